"""`Fleet` for the module of a Flask application that declares tools and workflows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flask import Flask, current_app, has_app_context

from handrail.errors import BadInput
from handrail.fleet import Fleet as PlainFleet
from handrail.integrations.flask import conf
from handrail.integrations.flask.extension import in_its_trace
from handrail.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class NoApplication(BadInput):
    """A fleet has to know the application whose configuration and database it uses."""

    code = "no-application"

    def __str__(self) -> str:
        return "give the application, or what makes it: Fleet(create_app)"


class Fleet(PlainFleet):
    """A fleet whose settings, and whose ledger's database, are those of the application.

    `app` is the application, or a function that makes it, called when it is first needed; within
    `flask handrail` it is the current one. Tools, models and queries that are plain functions are
    called inside `app.app_context()`, so that `db.session` works in them; it is removed after each
    call.
    """

    def __init__(
        self, app: Flask | Callable[[], Flask], name: str = "handrail", **options: Any
    ) -> None:
        if not callable(app):
            raise NoApplication
        super().__init__(name, **options)
        self._app = app
        self.around_calls = self._in_context

    @cached_property
    def app(self) -> Flask:
        """The application."""
        if isinstance(self._app, Flask):
            return self._app
        if has_app_context():
            return current_app._get_current_object()  # type: ignore[attr-defined, no-any-return]
        made = self._app()
        if not isinstance(made, Flask):
            raise NoApplication
        return made

    @cached_property
    def settings(self) -> Settings:
        """The settings of the application, read when they are first needed."""
        return self._settings or conf.read(self.app)

    def enqueue(self, workflow: str, **options: Any) -> str:
        """Accept a run; see `handrail.Fleet.enqueue`."""
        with in_its_trace():
            return super().enqueue(workflow, **options)

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        session = None
        try:
            with self.app.app_context():
                try:
                    yield
                finally:
                    session = self._session()
        finally:
            # A teardown that raises keeps Flask from the ones behind it, Flask-SQLAlchemy's perhaps
            # among them: its session would hold a connection, and locks, for good.
            if session is not None:
                session.close()

    def _session(self) -> Session | None:
        """Flask-SQLAlchemy's session of the current context, if the call has used one."""
        sqlalchemy = self.app.extensions.get("sqlalchemy")
        if sqlalchemy is None or not sqlalchemy.session.registry.has():
            return None
        session: Session = sqlalchemy.session()
        return session
