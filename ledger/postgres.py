"""One connection to PostgreSQL: every statement is prepared once, then run by libpq directly.

psycopg makes the connection and names the errors. Its cursors can do far more than a ledger needs,
and take longer over a statement than the client library itself; so the statement goes there
directly. Parameters are text, whole numbers and NULL; so is what comes back, and truth values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from select import POLLIN, POLLOUT, poll
from typing import Any, Final

import psycopg
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, TransactionStatus

_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)")
#: The server ends a statement of ours sooner, and says so: what is silent for longer is gone, or
#: the way to it is. Nobody should wait for ever, least of all the event loop of a worker.
SILENCE_S: Final = 12.0
_GOING: Final = "57P"  # the SQLSTATEs with which the server takes leave
_DONE: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)
_BOOL, _INT8, _INT2, _INT4 = 16, 20, 21, 23  # the server's numbers for its types
_READ: Final[Mapping[int, Callable[[bytes], Any]]] = {
    _BOOL: b"t".__eq__,
    _INT2: int,
    _INT4: int,
    _INT8: int,
}


@dataclass(frozen=True, slots=True)
class _Statement:
    """A prepared statement: the parameters in the server's order, and its columns."""

    name: bytes
    parameters: tuple[str, ...]
    columns: tuple[tuple[int, str, Callable[[bytes], Any]], ...]


class Connection:
    """A connection of one thread, in autocommit. Raises what `psycopg.connect` raises.

    The server keeps every text that it was given, so the texts must be few: a value that varies is
    a parameter.
    """

    def __init__(self, **parameters: Any) -> None:
        self._connection = psycopg.connect(autocommit=True, client_encoding="utf8", **parameters)
        self._libpq = self._connection.pgconn
        self._readable, self._either = poll(), poll()
        self._readable.register(self._libpq.socket, POLLIN)
        self._either.register(self._libpq.socket, POLLIN | POLLOUT)
        self._prepared: dict[str, _Statement] = {}

    @property
    def closed(self) -> bool:
        """Whether the connection is closed, by us or by a failure."""
        return self._connection.closed

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run one statement with `:name` parameters and return its rows, if it has any.

        Raises the `psycopg.Error` of what went wrong.
        """
        statement = self._prepared.get(sql) or self._prepare(sql)
        values: Any = [_written(params[name]) for name in statement.parameters]
        answer = self._ask(self._libpq.send_query_prepared, statement.name, values)
        return _rows(statement, self._done(answer))

    def run_together(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> list[list[dict[str, Any]]]:
        """Run statements as one transaction in one trip, and return the rows of each.

        Raises the `psycopg.Error` of the first that failed; then none has happened.
        """
        libpq = self._libpq
        prepared = [self._prepared.get(sql) or self._prepare(sql) for sql, _ in calls]
        values: list[Any] = [
            [_written(params[name]) for name in statement.parameters]
            for statement, (_, params) in zip(prepared, calls, strict=True)
        ]
        results = []
        try:
            libpq.enter_pipeline_mode()
            for statement, sent in zip(prepared, values, strict=True):
                libpq.send_query_prepared(statement.name, sent)
            libpq.pipeline_sync()  # commits what came before it, if all of it went well
            self._flush()
            for _ in prepared:
                results.append(self._answer())
                self._answer()  # None: there is no more of this one
            end = self._answer()
            if end.status != ExecStatus.PIPELINE_SYNC:  # it could not be committed
                raise error_from_result(end)
            libpq.exit_pipeline_mode()
        except BaseException:
            self.close()  # nobody knows where in the pipeline it is
            raise
        return [
            _rows(statement, self._done(result))
            for statement, result in zip(prepared, results, strict=True)
        ]

    def _ask(self, send: Callable[..., None], *what: Any) -> Any:
        """Send something, and wait for the one answer to it."""
        try:
            send(*what)
            self._flush()
            result = self._answer()
            while self._answer() is not None:
                pass  # None: there is no more of this one
        except BaseException:
            self.close()  # nobody knows what it would answer next
            raise
        return result

    def _flush(self) -> None:
        while self._libpq.flush():
            _wait(self._either)
            self._libpq.consume_input()  # or a server that waits for us to read would not read on

    def _answer(self) -> Any:
        """Wait for the next answer; other threads go on meanwhile."""
        while self._libpq.is_busy():
            _wait(self._readable)
            self._libpq.consume_input()
        return self._libpq.get_result()

    def rollback(self) -> None:
        """Roll back the open transaction, if there is one."""
        if self._libpq.transaction_status != TransactionStatus.IDLE:
            self.run("ROLLBACK", {})

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _prepare(self, sql: str) -> _Statement:
        numbers: dict[str, int] = {}

        def numbered(found: re.Match[str]) -> str:
            return f"${numbers.setdefault(found[1], len(numbers) + 1)}"

        text = _PARAMETER.sub(numbered, sql).encode()
        name = b"handrail_%d" % len(self._prepared)
        self._done(self._ask(self._libpq.send_prepare, name, text))
        # (libpq's own way to ask this and wait for it would hold up all other threads.)
        described = self._done(self._ask(self._libpq.send_describe_prepared, name))
        columns = tuple(
            (
                number,
                (described.fname(number) or b"").decode(),
                _READ.get(described.ftype(number), bytes.decode),
            )
            for number in range(described.nfields)
        )
        statement = self._prepared[sql] = _Statement(name, tuple(numbers), columns)
        return statement

    def _done(self, result: Any) -> Any:
        if result.status in _DONE:
            return result
        error = error_from_result(result)
        if error.sqlstate is None or error.sqlstate.startswith(_GOING):
            self.close()  # libpq's own word has no SQLSTATE; it may believe it open until next used
        raise error


def _wait(ready: Any) -> None:
    if not ready.poll(SILENCE_S * 1000):
        raise psycopg.OperationalError(f"the server has been silent for {SILENCE_S:g} s")


def _rows(statement: _Statement, result: Any) -> list[dict[str, Any]]:
    cell = result.get_value
    return [
        {
            name: None if (value := cell(row, number)) is None else read(value)
            for number, name, read in statement.columns
        }
        for row in range(result.ntuples)
    ]


def _written(value: object) -> bytes | None:
    """Write a parameter as the server reads it."""
    if value is None:
        return None
    if isinstance(value, str):
        text = value.encode()
        if b"\0" in text:  # libpq would take it for the end
            raise psycopg.DataError("PostgreSQL's text cannot contain NUL")
        return text
    if isinstance(value, int):
        return b"%d" % value
    raise TypeError(f"no parameter of a statement: {type(value).__name__}")
