"""`client`: accept runs in the request's transaction, look at them, act on them; also from ASGI."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.core.signals import setting_changed

from handrail.client import Client, RunInfo
from handrail.integrations.django import conf
from handrail.integrations.django.database import DjangoHost
from handrail.settings import Settings

if TYPE_CHECKING:  # heavy
    from handrail.fleet import Fleet
    from handrail.runs import Run


class DjangoClient(Client):
    """A `handrail.Client` on Django's own connection.

    Each method has an asynchronous twin with an `a` before its name, for views of ASGI: it does the
    same in the thread in which Django keeps its connections.
    """

    def __init__(self) -> None:
        super().__init__(host=DjangoHost())

    @cached_property
    def settings(self) -> Settings:
        """The settings of the project, read when they are first needed."""
        return conf.read()

    @cached_property
    def fleet(self) -> Fleet:
        """What rules over runs, and its `desk`; imported when it is first asked for."""
        from handrail.fleet import Fleet
        from handrail.integrations.django.signals import relay

        relay()
        return Fleet(settings=self.settings, host=DjangoHost())

    async def aenqueue(self, workflow: str, **options: Any) -> str:
        """Accept a run; see `enqueue`."""
        return await sync_to_async(self.enqueue)(workflow, **options)

    async def aget(self, run_id: str, **options: Any) -> RunInfo:
        """Look at a run; see `get`."""
        return await sync_to_async(self.get)(run_id, **options)

    async def acancel(self, run_id: str, **options: Any) -> Run:
        """Wish a run to be cancelled; see `cancel`."""
        return await sync_to_async(self.cancel)(run_id, **options)

    async def aapprove(self, token: str, **options: Any) -> Run:
        """Agree to an exact action; see `approve`."""
        return await sync_to_async(self.approve)(token, **options)

    async def areject(self, approval_id: str, **options: Any) -> Run:
        """Refuse a request for approval; see `reject`."""
        return await sync_to_async(self.reject)(approval_id, **options)

    async def aanswer(self, run: str, text: str, **options: Any) -> Run:
        """Answer the question that a run has asked; see `answer`."""
        return await sync_to_async(self.answer)(run, text, **options)


client = DjangoClient()


def _forget(*, setting: str, **_: object) -> None:
    """Tests change settings: what was made of the old ones is made anew."""
    if setting in ("HANDRAIL", "DATABASES"):
        client.close()
        client.__dict__.pop("settings", None)


setting_changed.connect(_forget)
