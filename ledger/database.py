"""One door to the database: SQLite or PostgreSQL, one statement in autocommit, or a short
transaction.

Statements are plain SQL with `:name` parameters. Every thread has a connection of its own, made on
first use and never carried over a fork. SQLite runs in WAL mode with a busy timeout; each of its
transactions begins IMMEDIATE, since a reader cannot be upgraded under load.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from handrail.ledger.errors import DatabaseUnavailable, LedgerLocked, UnsupportedDatabase
from handrail.ledger.session import PG_NOW, SCHEMA_NAME, ConnectionLost, Session

_BUSY_TIMEOUT_MS: Final = 10_000
_CONNECT_TIMEOUT_S: Final = 5
#: Where no connection could be made, nobody tries again for this long. Otherwise each step of an
#: event loop would wait its own time for the same server, one after the other, and all the calls
#: that are under way on that loop with them.
_AWAY_S: Final = 0.5
#: A statement of ours takes milliseconds; one that hangs must not hold a step for ever.
_STATEMENT_TIMEOUT_MS: Final = 10_000
#: Sooner, or a lock that somebody else holds could not be told from a statement that hangs.
_LOCK_TIMEOUT_MS: Final = 8_000
#: Between two statements of a transaction there is nothing but arithmetic.
_IDLE_TIMEOUT_MS: Final = 15_000
#: Every thread has its own connection: nobody waits for another.
_EACH_ITS_OWN: Final = nullcontext()


def ledger_file(url: str) -> Path | None:
    """The file of an SQLite ledger; None for one that lives elsewhere, or in a process alone."""
    database = Database(url)
    held = not database.postgres and not database.in_memory
    return Path(str(database.url.database)) if held else None


class Database:
    """A database by its URL. `clock` (SQLite only) replaces the machine's clock, in
    milliseconds; `schema` (PostgreSQL only) is where our tables are, whatever the search path says.
    """

    dialect: str
    postgres: bool  # whether this is PostgreSQL
    in_memory: bool  # whether this is an SQLite database that lives in this process alone

    def __init__(
        self, url: str | URL, *, clock: Callable[[], int] | None = None, schema: str = ""
    ) -> None:
        try:
            self.url = make_url(url)
        except ArgumentError:
            raise UnsupportedDatabase(str(url), "not a database URL") from None
        backend = self.url.get_backend_name()
        if backend not in ("sqlite", "postgresql"):
            raise UnsupportedDatabase(self.shown, f"{backend} is neither SQLite nor PostgreSQL")
        self.dialect = backend
        self.postgres = backend == "postgresql"
        self.schema = schema
        if schema and not self.postgres:
            raise UnsupportedDatabase(
                self.shown, "SQLite has no schemas, and HANDRAIL_DATABASE_SCHEMA names one"
            )
        if schema and not SCHEMA_NAME.fullmatch(schema):
            raise UnsupportedDatabase(self.shown, f"{schema!r} cannot be the name of our schema")
        self.in_memory = not self.postgres and self.url.database in (None, "", ":memory:")
        self._clock = clock or _wall_clock
        self._local = threading.local()
        self._shared: Any = None  # an in-memory SQLite has one connection for all threads
        self._guard = threading.RLock()
        self._open: list[Any] = []
        self._away_until = 0.0

    @property
    def shown(self) -> str:
        """The URL without its password, wherever that is written."""
        url = self.url
        if "password" in url.query:
            url = url.update_query_dict({"password": "***"})
        return url.render_as_string(hide_password=True)

    def now(self) -> int:
        """Return the database's time. SQLite has no clock but its process's."""
        if not self.postgres:
            return self._clock()
        return int(self.run(f"SELECT {PG_NOW} AS now", {})[0]["now"])

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run one statement in autocommit and return its rows.

        Raises `ConnectionLost` where the connection broke under way, `DatabaseUnavailable` where
        none could be made, `LedgerLocked` where somebody has held what it needs for too long.
        """
        with self._serialised():
            connection = self._connection()
            try:
                return self._execute(connection, sql, params)
            except Exception as error:
                raise self._translated(connection, error) from error

    def run_together(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> list[list[dict[str, Any]]]:
        """Run independent statements as one transaction, on PostgreSQL in one trip; returns the
        rows of each.

        Raises what `run` raises; nothing was written then, unless it is a `ConnectionLost`.
        """
        if not self.postgres:
            with self.transaction() as tx:
                return [tx.run(sql, params) for sql, params in calls]
        connection = self._connection()
        try:
            answers: list[list[dict[str, Any]]] = connection.run_together(calls)
        except Exception as error:
            raise self._translated(connection, error) from error
        return answers

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Open a short transaction that may write; commits at the end, rolls back on any
        exception.
        """
        with self._serialised():
            connection = self._connection()
            try:
                self._execute(connection, "BEGIN" if self.postgres else "BEGIN IMMEDIATE", {})
                yield _Open(self, connection)
                self._execute(connection, "COMMIT", {})
            except BaseException as error:
                translated = self._translated(connection, error)
                if not isinstance(translated, ConnectionLost):
                    self._roll_back(connection)
                if translated is error:
                    raise
                raise translated from error

    def close(self) -> None:
        """Close all connections that this process has opened."""
        with self._guard:
            for connection in self._open:
                try:
                    connection.close()
                except Exception:
                    continue  # another thread's, or broken already: nothing to save
            self._open.clear()
            self._shared = None
            self._local = threading.local()

    # ---- inside ----------------------------------------------------------------------------------

    def _serialised(self) -> AbstractContextManager[object]:
        return self._guard if self.in_memory else _EACH_ITS_OWN

    def _connection(self) -> Any:
        if self.in_memory:
            if self._shared is None:
                self._shared = self._connect()
            return self._shared
        held = getattr(self._local, "held", None)
        if held is not None and held[0] == os.getpid() and not getattr(held[1], "closed", False):
            return held[1]
        # Never a connection from before a fork: two processes would read each other's answers.
        connection = self._connect()
        self._local.held = (os.getpid(), connection)
        return connection

    def _connect(self) -> Any:
        if time.monotonic() < self._away_until:
            raise DatabaseUnavailable(f"{self.shown}: it could not be reached a moment ago")
        try:
            connection = self._connect_postgres() if self.postgres else self._connect_sqlite()
        except DatabaseUnavailable:
            self._away_until = time.monotonic() + _AWAY_S
            raise
        with self._guard:
            self._open.append(connection)
        return connection

    def _connect_sqlite(self) -> sqlite3.Connection:
        database = self.url.database or ":memory:"
        try:
            connection = sqlite3.connect(
                database,
                timeout=_BUSY_TIMEOUT_MS / 1000,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=256,
            )
            connection.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
            if not self.in_memory:
                _use_wal(connection)
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
        except sqlite3.Error as error:
            raise DatabaseUnavailable(f"{self.shown}: {error}") from error
        return connection

    def _connect_postgres(self) -> Any:
        try:
            import psycopg

            from handrail.ledger.postgres import Connection
        except ImportError:
            raise UnsupportedDatabase(
                self.shown, "PostgreSQL needs psycopg (pip install 'handrail[postgres]')"
            ) from None
        parameters: dict[str, Any] = {
            "host": self.url.host,
            "port": self.url.port,
            "user": self.url.username,
            "password": self.url.password,
            "dbname": self.url.database,
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "application_name": "handrail",
            **{k: v for k, v in self.url.query.items() if isinstance(v, str)},
        }
        try:
            connection = Connection(**parameters)
            if self.schema:
                connection.run(f'SET search_path TO "{self.schema}"', {})
            connection.run(f"SET statement_timeout = {_STATEMENT_TIMEOUT_MS}", {})
            connection.run(f"SET lock_timeout = {_LOCK_TIMEOUT_MS}", {})
            # A process that stands still in a transaction does not keep its rows from the others.
            connection.run(f"SET idle_in_transaction_session_timeout = {_IDLE_TIMEOUT_MS}", {})
        except psycopg.Error as error:
            raise DatabaseUnavailable(f"{self.shown}: {_first_line(error)}") from error
        return connection

    def _execute(
        self, connection: Any, sql: str, params: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        if self.postgres:
            rows: list[dict[str, Any]] = connection.run(sql, params)
            return rows
        cursor = connection.execute(sql, params)
        if not (columns := cursor.description) or not (found := cursor.fetchall()):
            return []
        names = [column[0] for column in columns]
        return [dict(zip(names, row, strict=True)) for row in found]

    def _translated(self, connection: Any, error: BaseException) -> BaseException:
        if isinstance(error, sqlite3.OperationalError):
            return self._away_or_locked(error) or error
        if not self.postgres:
            return error
        import psycopg

        # Of what class the error is varies: a server that is gone names no SQLSTATE any more.
        if isinstance(error, psycopg.Error) and connection.closed:
            self._discard(connection)
            return ConnectionLost(_first_line(error))
        if isinstance(error, psycopg.errors.LockNotAvailable):
            return LedgerLocked(_first_line(error))
        if isinstance(error, psycopg.errors.QueryCanceled):
            return DatabaseUnavailable(_first_line(error))
        if isinstance(error, psycopg.errors.SerializationFailure | psycopg.errors.DeadlockDetected):
            return DatabaseUnavailable(_first_line(error))
        return error

    def _away_or_locked(self, error: sqlite3.OperationalError) -> DatabaseUnavailable | None:
        text = f"{self.shown}: {error}"
        if _locked(error):
            return LedgerLocked(text)
        return DatabaseUnavailable(text) if _away(error) else None

    def _roll_back(self, connection: Any) -> None:
        try:
            if self.postgres:
                connection.rollback()
            elif connection.in_transaction:
                connection.execute("ROLLBACK")
        except Exception:
            self._discard(connection)

    def _discard(self, connection: Any) -> None:
        with self._guard:
            if connection in self._open:
                self._open.remove(connection)
        self._local.held = None
        try:
            connection.close()
        except Exception:
            return  # it is broken: that is why it goes


class _Open:
    """An open transaction."""

    def __init__(self, database: Database, connection: Any) -> None:
        self._database = database
        self._connection = connection

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._database._execute(self._connection, sql, params)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch a file to WAL. Of two that switch a new one, SQLite refuses one at once, timeout
    or not.
    """
    give_up_at = time.monotonic() + _BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            passing = _locked(error) or _away(error)
            if not passing or time.monotonic() > give_up_at:
                raise
            time.sleep(0.01)
        else:
            return


def _locked(error: sqlite3.OperationalError) -> bool:
    return "locked" in str(error) or "busy" in str(error)


def _away(error: sqlite3.OperationalError) -> bool:
    return "unable to open" in str(error) or "disk" in str(error)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _wall_clock() -> int:
    return time.time_ns() // 1_000_000
