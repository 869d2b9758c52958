"""What a statement is given to: an autocommit connection, an open transaction, or a host's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeVar

from handrail.ledger.errors import DatabaseUnavailable

#: PostgreSQL's own time in milliseconds, moving within a transaction.
PG_NOW: Final = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
#: How often what can be repeated is tried where its connection broke, before the caller is told.
TRIES: Final = 3

#: What our schema may be called: it stands in statements, between quotes.
SCHEMA_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")

_T = TypeVar("_T")


class Session(Protocol):
    """Something that runs statements, with `:name` parameters."""

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run one statement and return its rows, if it has any."""
        ...


class ConnectionLost(Exception):
    """The connection broke while a statement was under way: it may or may not have been
    committed.
    """


def again(act: Callable[[], _T]) -> _T:
    """Do what can be repeated without harm, again where its connection breaks.

    Raises `DatabaseUnavailable` where it broke each time.
    """
    for _ in range(TRIES - 1):
        try:
            return act()
        except ConnectionLost:
            continue
    try:
        return act()
    except ConnectionLost as error:
        raise DatabaseUnavailable(str(error)) from error
