"""The transaction that is open on Django's own connection, for accepting runs in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from handrail.hosts import PARAMETER, Transaction
from handrail.integrations.django import conf


class DjangoHost:
    """A Django project as a host of runs."""

    def transaction(self) -> Transaction:
        """What is open in this thread: on the ledger's database, else on the default one."""
        if conf.is_elsewhere():
            return DjangoTransaction(DEFAULT_DB_ALIAS, elsewhere=True)
        alias = conf.alias()
        default = connections[DEFAULT_DB_ALIAS]
        if default.in_atomic_block and not connections[alias].in_atomic_block:
            return DjangoTransaction(DEFAULT_DB_ALIAS, elsewhere=True)  # that one is meant
        return DjangoTransaction(alias, elsewhere=False)


class DjangoTransaction:
    """The transaction of one of Django's connections; outside of `atomic` each statement is one."""

    def __init__(self, alias: str, *, elsewhere: bool) -> None:
        self._alias = alias
        self._elsewhere = elsewhere

    @property
    def postgres(self) -> bool:
        """Whether its database is PostgreSQL."""
        return self._connection.vendor == "postgresql"

    @property
    def elsewhere(self) -> bool:
        """Whether the ledger is in another database."""
        return self._elsewhere

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run one statement through Django's connection."""
        text = PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%"))
        wanted = {name: params[name] for name in PARAMETER.findall(sql)}
        with self._connection.cursor() as cursor:
            cursor.execute(text, wanted)
            if cursor.description is None:
                return []
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def on_commit(self, act: Callable[[], object]) -> None:
        """Do something after the outermost commit, at once outside of a transaction."""
        connection = self._connection
        if not connection.in_atomic_block and not connection.get_autocommit():
            return  # nobody is told of a commit that is made by hand: the sweep finds the row
        transaction.on_commit(act, using=self._alias, robust=True)

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        return connections[self._alias]
