"""A host's own transaction, for accepting a run inside it: SQLAlchemy's here, Django's with its
integration.

Light: no agent code, and no SQLAlchemy but that of the session that is given.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from handrail.errors import BadInput, HandrailError

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, SessionTransaction

log = logging.getLogger("handrail")

#: A parameter of our statements; a cast (`::`) is none.
PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)")
_WAITING: Final = "handrail.on_commit"


class Transaction(Protocol):
    """The transaction that a host has open, or its connection where it has none open."""

    @property
    def postgres(self) -> bool:
        """Whether its database is PostgreSQL; else SQLite."""
        ...

    @property
    def elsewhere(self) -> bool:
        """Whether the ledger is in another database, so that nothing can be inserted here."""
        ...

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run one statement with `:name` parameters and return its rows, if it has any."""
        ...

    def on_commit(self, act: Callable[[], object]) -> None:
        """Do something after the outermost commit, at once where nothing is open, and never after
        a rollback.
        """
        ...


class Host(Protocol):
    """An application with a database of its own."""

    def transaction(self) -> Transaction:
        """What is open in this thread now."""
        ...


@dataclass(eq=False)
class InvalidSession(BadInput):
    """What was given is no session that a run could be accepted through; nothing was written."""

    code: ClassVar[str] = "invalid-session"
    given: str

    def __str__(self) -> str:
        return (
            f"{self.given} is no session: give a SQLAlchemy Session or scoped_session (of a"
            " Connection: Session(connection); of an AsyncSession: within its run_sync)"
        )


def of_session(session: Any, *, bind: Any = None, elsewhere: bool = False) -> Transaction:
    """Take part in the transaction of a SQLAlchemy `Session`, also a scoped one; `bind` is the
    engine of the ledger's database where the session has several. Raises `InvalidSession`.
    """
    from sqlalchemy.orm import Session, scoped_session

    if isinstance(session, scoped_session):
        session = session()
    if not isinstance(session, Session):
        raise InvalidSession(type(session).__name__)
    return _SessionTransaction(session, bind=bind, elsewhere=elsewhere)


class _SessionTransaction:
    def __init__(self, session: Session, *, bind: Any, elsewhere: bool) -> None:
        from sqlalchemy import Connection

        self._session = session
        # A session that is bound to a connection has its transaction there, whatever it is about.
        given = bind is not None and not isinstance(session.bind, Connection)
        self._bind = {"bind": bind} if given else {}
        self.elsewhere = elsewhere

    @property
    def postgres(self) -> bool:
        return self._connection().dialect.name == "postgresql"

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        from sqlalchemy import text

        wanted = {name: params[name] for name in PARAMETER.findall(sql)}
        result = self._connection().execute(text(sql), wanted)
        return [dict(row) for row in result.mappings()] if result.returns_rows else []

    def on_commit(self, act: Callable[[], object]) -> None:
        _Waiting.of(self._session).add(act)

    def _connection(self) -> Connection:
        return self._session.connection(bind_arguments={**self._bind})  # it empties what it gets


class _Waiting:
    """What waits for the commits of one session: each act with the transaction it was asked for in,
    a savepoint's until that is released, then with what is around it.
    """

    def __init__(self, session: Session) -> None:
        from sqlalchemy import event

        self._session = session
        self._acts: list[tuple[SessionTransaction, Callable[[], object]]] = []
        self._committed: SessionTransaction | None = None
        event.listen(session, "after_commit", self._note)
        event.listen(session, "after_transaction_end", self._end)

    @classmethod
    def of(cls, session: Session) -> _Waiting:
        """The one of a session, which stays with it."""
        found: _Waiting | None = session.info.get(_WAITING)
        if found is None:
            found = session.info[_WAITING] = cls(session)
        return found

    def add(self, act: Callable[[], object]) -> None:
        """Let an act wait for the commit, also that of a session which has done nothing yet; at
        once where nothing is open and the session begins nothing by itself.
        """
        if self._innermost() is None and self._session.autobegin:
            self._session.begin()  # takes no connection
        innermost = self._innermost()
        if innermost is None:
            _contained(act)
        else:
            self._acts.append((innermost, act))

    def _innermost(self) -> SessionTransaction | None:
        return self._session.get_nested_transaction() or self._session.get_transaction()

    def _note(self, _: Session) -> None:
        self._committed = self._innermost()

    def _end(self, _: Session, ended: SessionTransaction) -> None:
        """Called at the end of every transaction, savepoint and flush, whatever became of it."""
        mine = [act for around, act in self._acts if around is ended]
        if not mine:
            return
        committed = self._committed is ended
        self._committed = None
        self._acts = [one for one in self._acts if one[0] is not ended]
        if committed and ended.parent is not None:
            self._acts += [(ended.parent, act) for act in mine]
        elif committed:
            for act in mine:
                _contained(act)


def _contained(act: Callable[[], object]) -> None:
    """What is done after a commit must not look like a failure of it."""
    try:
        act()
    except Exception as error:
        code = error.code if isinstance(error, HandrailError) else type(error).__name__
        log.error("what was to be done after a commit failed (%s)", code)
