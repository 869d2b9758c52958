"""`Fleet` for the module of a Django project that declares tools and workflows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import django
from django.apps import apps
from django.db import close_old_connections, connections

from handrail.fleet import Fleet as PlainFleet
from handrail.integrations.django import conf
from handrail.integrations.django.database import DjangoHost
from handrail.integrations.django.signals import relay
from handrail.settings import Settings


class Fleet(PlainFleet):
    """A fleet whose settings, and whose ledger's database, are those of the Django project.

    Tools, models and queries that are plain functions may use the ORM: each runs in a thread of its
    own, and the connections that it opened there are closed after it. (A coroutine may not; Django
    says so itself.)
    """

    def __init__(self, name: str = "handrail", **options: Any) -> None:
        if not apps.ready and not apps.apps_ready:  # a worker that was started without manage.py
            django.setup()
        super().__init__(name, host=DjangoHost(), **options)
        self.around_calls = _connections_looked_after
        relay()

    @cached_property
    def settings(self) -> Settings:
        """The settings of the project, read when they are first needed."""
        return self._settings or conf.read()


@contextmanager
def _connections_looked_after() -> Iterator[None]:
    """A thread's connections are nobody's after it: they would stay open at the server."""
    close_old_connections()
    try:
        yield
    finally:
        connections.close_all()
