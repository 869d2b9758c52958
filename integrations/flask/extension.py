"""The extension: accept runs in the request's transaction, look at them, act on them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from flask import Flask, current_app, has_request_context, request

from handrail import tracing
from handrail.client import Client, RunInfo
from handrail.errors import BadInput
from handrail.hosts import Transaction, of_session
from handrail.integrations.flask import conf
from handrail.settings import Settings

if TYPE_CHECKING:  # heavy
    from handrail.desk import Desk
    from handrail.fleet import Fleet
    from handrail.runs import Run

_NAME: Final = "handrail"


class NotInitialised(BadInput):
    """The extension does not know the application."""

    code = "not-initialised"

    def __str__(self) -> str:
        return "this application has no Handrail: call handrail.init_app(app) when it is made"


class Handrail:
    """Handrail as a Flask extension. One object serves any number of applications: each has its own
    client, in `app.extensions["handrail"]`, and nothing is connected before it is used.
    """

    def __init__(self, app: Flask | None = None) -> None:
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Give an application its client and its commands (`flask handrail ...`)."""
        from handrail.integrations.flask import commands

        app.extensions[_NAME] = AppClient(app)
        app.cli.add_command(commands.handrail)

    @property
    def client(self) -> AppClient:
        """The client of the current application. Raises `NotInitialised`."""
        found: AppClient | None = current_app.extensions.get(_NAME)
        if found is None:
            raise NotInitialised
        return found

    @property
    def desk(self) -> Desk:
        """What people do with the fleet: approvals, handoffs, the audit."""
        return self.client.fleet.desk

    def enqueue(self, workflow: str, **options: Any) -> str:
        """Accept a run in the transaction of the session; see `handrail.Client.enqueue`.

        `session` is Flask-SQLAlchemy's where nothing else is given, and the trace that of the
        request.
        """
        return self.client.enqueue(workflow, **options)

    def get(self, run_id: str, **options: Any) -> RunInfo:
        """Look at a run; see `handrail.Client.get`."""
        return self.client.get(run_id, **options)

    def cancel(self, run_id: str, **options: Any) -> Run:
        """Wish a run to be cancelled; see `handrail.Fleet.cancel`."""
        return self.client.cancel(run_id, **options)

    def approve(self, token: str, **options: Any) -> Run:
        """Agree to an exact action; see `handrail.Fleet.approve`."""
        return self.client.approve(token, **options)

    def reject(self, approval_id: str, **options: Any) -> Run:
        """Refuse a request for approval; see `handrail.Fleet.reject`."""
        return self.client.reject(approval_id, **options)

    def answer(self, run: str, text: str, **options: Any) -> Run:
        """Answer the question that a run has asked; see `handrail.Fleet.answer`."""
        return self.client.answer(run, text, **options)


def in_its_trace() -> AbstractContextManager[None]:
    """Let what is enqueued belong to the trace of the request that is answered here, if any."""
    if has_request_context():
        return tracing.of_request(dict(request.headers))
    return nullcontext()


class AppClient(Client):
    """The `handrail.Client` of one application."""

    def __init__(self, app: Flask) -> None:
        super().__init__()
        self._app = app

    @cached_property
    def settings(self) -> Settings:
        """The settings of the application, read when they are first needed."""
        return conf.read(self._app)

    @cached_property
    def fleet(self) -> Fleet:
        """What rules over runs, and its `desk`; imported when it is first asked for."""
        from handrail.fleet import Fleet

        return Fleet(settings=self.settings)

    def enqueue(self, workflow: str, **options: Any) -> str:
        """Accept a run; see `handrail.Client.enqueue`."""
        with in_its_trace():
            return super().enqueue(workflow, **options)

    def _transaction(self, session: Any) -> Transaction | None:
        engine = conf.engine_of(self._app)
        elsewhere = bool(conf.given(self._app).get("database_url")) or engine is None
        if session is not None:
            return of_session(session, bind=None if elsewhere else engine)
        if engine is None:  # nobody's transaction to take part in
            return None
        theirs = self._app.extensions["sqlalchemy"].session
        return of_session(theirs, bind=None if elsewhere else engine, elsewhere=elsewhere)


#: One for all applications: it keeps nothing of any.
handrail = Handrail()
