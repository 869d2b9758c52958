"""The payment provider of the demo: its own process, its own records, and faults on demand.

    python -m handrail.demo.provider --port 0 --database provider.db

It prints one line of JSON, `{"url": "http://127.0.0.1:41233"}`, and serves until SIGTERM or until
its parent process is gone.

| request | body or query | answer |
| --- | --- | --- |
| POST /refunds | order_id, charge_id, amount_cents; header `Idempotency-Key` | 201 the refund |
| GET /refunds | `key=` or `order_id=` | `{"refunds": [...]}`, the oldest first |
| GET /records | | every refund, every request that arrived, and the keys seen |
| POST /faults | a `Fault` | 204 |
| DELETE /faults | | 204; nothing goes wrong any more |

One key is one refund: the same key with the same body gets the same refund again (200), with
another body it is refused (409 `key-conflict`). A refusal is a 4xx with `{"refused": code}`; it
means that this request moved no money, and it is not stored under the key. Keys never expire.
Records are durable before anybody hears of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import socketserver
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Final, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

BODY_LIMIT_BYTES: Final = 64 * 1024  # the largest honest body has a few hundred
PARENT_CHECK_SECONDS: Final = 0.2  # for so long an orphaned provider may live on
READY_SECONDS: Final = 30  # a cold start takes under one; a loaded test machine takes a few
STOP_SECONDS: Final = 5  # after SIGTERM nothing is waited for; this long means that it hangs

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS requests (
    request_no   INTEGER PRIMARY KEY AUTOINCREMENT,
    received_at  INTEGER NOT NULL,
    key          TEXT NOT NULL,
    order_id     TEXT NOT NULL,
    charge_id    TEXT NOT NULL,
    amount_cents INTEGER NOT NULL,
    outcome      TEXT NOT NULL -- received; then applied, repeated, or the code of the refusal
);
CREATE INDEX IF NOT EXISTS requests_by_key ON requests (key);
CREATE TABLE IF NOT EXISTS refunds (
    refund_no    INTEGER PRIMARY KEY AUTOINCREMENT,
    key          TEXT NOT NULL, -- not unique: told to ignore keys, the provider pays twice
    order_id     TEXT NOT NULL,
    charge_id    TEXT NOT NULL,
    amount_cents INTEGER NOT NULL CHECK (amount_cents > 0),
    applied_at   INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS refunds_by_key ON refunds (key);
CREATE TABLE IF NOT EXISTS keys (
    key       TEXT PRIMARY KEY, -- the promise: one key, one refund
    refund_no INTEGER NOT NULL REFERENCES refunds
);
"""
REFUNDS: Final = (
    "SELECT 're-' || refund_no AS refund_id, key, order_id, charge_id, amount_cents, applied_at"
    " FROM refunds"
)


class RefundRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    order_id: StrictStr = Field(min_length=1, max_length=100)
    charge_id: StrictStr = Field(min_length=1, max_length=100)
    amount_cents: StrictInt = Field(gt=0, lt=10**12)


class Fault(BaseModel):
    """What goes wrong, and for whom: everybody, one order, or the next requests only.

    `query_down` is about GET /refunds. The other switches are about POST /refunds, and combine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    order_id: StrictStr | None = None
    next_requests: StrictInt | None = Field(default=None, gt=0)

    delay_ms: StrictInt = Field(default=0, ge=0)  # wait, then apply and answer as usual
    refuse: StrictStr | None = None  # a definite 422 with this code; nothing is applied
    answer_late_ms: StrictInt = Field(default=0, ge=0)  # hang up at once, apply after this long
    ignore_keys: StrictBool = False  # no idempotency: every request is a new refund
    lose_response: StrictBool = False  # apply, then hang up without an answer
    error_after_apply: StrictBool = False  # apply, then answer 500
    query_down: StrictBool = False  # answer queries with 503

    def switches(self) -> dict[str, Any]:
        """The switches that are on."""
        return self.model_dump(exclude_defaults=True, exclude={"order_id", "next_requests"})

    def used_once(self) -> Fault | None:
        """What is left of the fault after one more request; None when it is used up."""
        if self.next_requests is None:
            return self
        left = self.next_requests - 1
        return self.model_copy(update={"next_requests": left}) if left else None


@dataclass(frozen=True, slots=True)
class Answer:
    status: HTTPStatus
    body: Mapping[str, Any] | None = None
    outcome: str = ""  # of a refund request, for the records


def refused(code: str, status: HTTPStatus = HTTPStatus.UNPROCESSABLE_ENTITY) -> Answer:
    """The provider's definite no: the request that it answers moved no money."""
    return Answer(status, {"refused": code}, outcome=code)


class Faults:
    """The faults that are switched on. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def take(self, order_id: str | None, *, query: bool) -> Fault:
        """All that goes wrong with one request or query; of two settings the later one holds."""
        switches: dict[str, Any] = {}
        left: list[Fault] = []
        with self._lock:
            for fault in self._faults:
                rest: Fault | None = fault
                if fault.query_down == query and fault.order_id in (None, order_id):
                    switches |= fault.switches()
                    rest = fault.used_once()
                if rest is not None:
                    left.append(rest)
            self._faults = left
        return Fault(**switches)


class Book:
    """The provider's own records. Every method is one transaction, one at a time.

    `captured_cents`, where given, is what each charge has captured: then a refund beyond it, or of
    a charge that is not in it, is refused.
    """

    def __init__(self, path: Path, captured_cents: Mapping[str, int] | None = None) -> None:
        self._captured_cents = captured_cents
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.executescript(SCHEMA)

    def receive(self, request: RefundRequest, key: str) -> int:
        """Note that a request has arrived, whatever becomes of it; returns its number."""
        with self._transaction() as connection:
            arrived = connection.execute(
                "INSERT INTO requests"
                " (received_at, key, order_id, charge_id, amount_cents, outcome)"
                " VALUES (?, ?, ?, ?, ?, 'received')",
                (_now(), key, request.order_id, request.charge_id, request.amount_cents),
            )
            return int(arrived.lastrowid or 0)

    def refuse(self, request_no: int, code: str) -> Answer:
        """Refuse a request that has arrived."""
        with self._transaction() as connection:
            return _noted(connection, request_no, refused(code))

    def apply(
        self, request_no: int, request: RefundRequest, key: str, *, honour_key: bool
    ) -> Answer:
        """Pay, or repeat what the key has paid already, or refuse."""
        with self._transaction() as connection:
            answer = self._repeated(connection, request, key) if honour_key else None
            answer = answer or self._forbidden(connection, request)
            answer = answer or self._paid(connection, request, key, honour_key=honour_key)
            return _noted(connection, request_no, answer)

    def refunds(self, by: Literal["key", "order_id"], value: str) -> list[dict[str, Any]]:
        return self._all(f"{REFUNDS} WHERE {by} = ? ORDER BY refund_no", value)

    def order_of(self, key: str) -> str | None:
        """The order that a key was first used for, paid or not."""
        rows = self._all("SELECT order_id FROM requests WHERE key = ? ORDER BY request_no", key)
        return rows[0]["order_id"] if rows else None

    def records(self) -> dict[str, Any]:
        requests = self._all("SELECT * FROM requests ORDER BY request_no")
        return {
            "refunds": self._all(f"{REFUNDS} ORDER BY refund_no"),
            "requests": requests,
            "keys_seen": list(dict.fromkeys(request["key"] for request in requests)),
        }

    def _repeated(
        self, connection: sqlite3.Connection, request: RefundRequest, key: str
    ) -> Answer | None:
        stored = connection.execute(
            f"{REFUNDS} WHERE refund_no = (SELECT refund_no FROM keys WHERE key = ?)", (key,)
        ).fetchone()
        if stored is None:
            return None
        if any(stored[name] != value for name, value in request.model_dump().items()):
            return refused("key-conflict", HTTPStatus.CONFLICT)
        return Answer(HTTPStatus.OK, dict(stored), outcome="repeated")

    def _forbidden(self, connection: sqlite3.Connection, request: RefundRequest) -> Answer | None:
        if self._captured_cents is None:
            return None
        if request.charge_id not in self._captured_cents:
            return refused("unknown-charge")
        (refunded,) = connection.execute(
            "SELECT COALESCE(SUM(amount_cents), 0) FROM refunds WHERE charge_id = ?",
            (request.charge_id,),
        ).fetchone()
        beyond = refunded + request.amount_cents > self._captured_cents[request.charge_id]
        return refused("beyond-captured") if beyond else None

    def _paid(
        self, connection: sqlite3.Connection, request: RefundRequest, key: str, *, honour_key: bool
    ) -> Answer:
        refund_no = connection.execute(
            "INSERT INTO refunds (key, order_id, charge_id, amount_cents, applied_at)"
            " VALUES (?, ?, ?, ?, ?)",
            (key, request.order_id, request.charge_id, request.amount_cents, _now()),
        ).lastrowid
        if honour_key:
            connection.execute("INSERT INTO keys VALUES (?, ?)", (key, refund_no))
        refund = connection.execute(f"{REFUNDS} WHERE refund_no = ?", (refund_no,)).fetchone()
        return Answer(HTTPStatus.CREATED, dict(refund), outcome="applied")

    def _all(self, statement: str, *values: object) -> list[dict[str, Any]]:
        with self._lock:
            return [dict(row) for row in self._connection.execute(statement, values)]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.rollback()
                raise


class Handler(BaseHTTPRequestHandler):
    server: ProviderServer  # HTTP/1.0, one request a connection: hanging up is easy to see

    def do_POST(self) -> None:
        match urlsplit(self.path).path:
            case "/refunds":
                self._refund()
            case "/faults":
                self._set_fault()
            case _:
                self._answer(Answer(HTTPStatus.NOT_FOUND))

    def do_GET(self) -> None:
        match urlsplit(self.path).path:
            case "/refunds":
                self._query()
            case "/records":
                self._answer(Answer(HTTPStatus.OK, self.server.book.records()))
            case _:
                self._answer(Answer(HTTPStatus.NOT_FOUND))

    def do_DELETE(self) -> None:
        if urlsplit(self.path).path != "/faults":
            self._answer(Answer(HTTPStatus.NOT_FOUND))
            return
        self.server.faults.clear()
        self._answer(Answer(HTTPStatus.NO_CONTENT))

    def _refund(self) -> None:
        book, key = self.server.book, self.headers.get("Idempotency-Key", "")
        try:
            request = RefundRequest.model_validate_json(self._body())
        except ValidationError:
            self._answer(refused("malformed-request", HTTPStatus.BAD_REQUEST))
            return
        if not key:
            self._answer(refused("key-required", HTTPStatus.BAD_REQUEST))
            return

        fault = self.server.faults.take(request.order_id, query=False)
        request_no = book.receive(request, key)
        time.sleep(fault.delay_ms / 1000)
        if fault.refuse is not None:
            self._answer(book.refuse(request_no, fault.refuse))
            return
        if fault.answer_late_ms:
            self._hang_up()
            time.sleep(fault.answer_late_ms / 1000)
        answer = book.apply(request_no, request, key, honour_key=not fault.ignore_keys)
        if fault.answer_late_ms or fault.lose_response:
            self._hang_up()
        elif fault.error_after_apply:
            self._answer(Answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "internal"}))
        else:
            self._answer(answer)

    def _query(self) -> None:
        book = self.server.book
        match parse_qs(urlsplit(self.path).query):
            case {"key": [key], **others} if not others:
                order_id, refunds = book.order_of(key), book.refunds("key", key)
            case {"order_id": [asked], **others} if not others:
                order_id, refunds = asked, book.refunds("order_id", asked)
            case _:
                self._answer(refused("malformed-query", HTTPStatus.BAD_REQUEST))
                return
        if self.server.faults.take(order_id, query=True).query_down:
            self._answer(Answer(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "query-down"}))
        else:
            self._answer(Answer(HTTPStatus.OK, {"refunds": refunds}))

    def _set_fault(self) -> None:
        try:
            fault = Fault.model_validate_json(self._body())
        except ValidationError:
            self._answer(refused("malformed-fault", HTTPStatus.BAD_REQUEST))
            return
        switches = fault.switches()
        if not switches or ("query_down" in switches and len(switches) > 1):
            self._answer(refused("unclear-fault", HTTPStatus.BAD_REQUEST))
            return
        self.server.faults.add(fault)
        self._answer(Answer(HTTPStatus.NO_CONTENT))

    def _body(self) -> bytes:
        """The body; a body without an honest length is read as nothing, and fails to parse."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > BODY_LIMIT_BYTES:
            return b""
        return self.rfile.read(int(length))

    def _answer(self, answer: Answer) -> None:
        content = b"" if answer.body is None else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _hang_up(self) -> None:
        with suppress(OSError):  # the client may have done so first
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: what arrived is in the records."""


class ProviderServer(ThreadingHTTPServer):
    """One thread for each request; on 127.0.0.1 only."""

    daemon_threads = True  # a request that waits for its late moment does not keep the process
    request_queue_size = 128  # many workers may call at once

    def __init__(self, port: int, book: Book) -> None:
        self.book = book
        self.faults = Faults()
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def server_bind(self) -> None:
        """Bind without the reverse name lookup of the base class, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.socket.getsockname()[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up before its answer is everyday business; the rest is reported."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@dataclass(frozen=True, slots=True)
class RunningProvider:
    url: str
    pid: int
    database: Path


@dataclass(eq=False)
class ProviderNotStarted(Exception):
    """The provider's process did not announce its URL."""

    code: ClassVar[str] = "provider-not-started"
    log: Path

    def __str__(self) -> str:
        return f"the payment provider did not start: read {self.log}"


@contextmanager
def start_provider(
    directory: Path, *, captured_cents: Mapping[str, int] | None = None
) -> Iterator[RunningProvider]:
    """Run a provider that keeps its files in `directory`; it is stopped on the way out.

    With `captured_cents` (by charge) it refuses to refund more than was captured; without, it pays
    whatever it is asked to, so that a refund too many shows. Raises `ProviderNotStarted`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    database, log_path = directory / "provider.db", directory / "provider.log"
    command = [sys.executable, "-m", "handrail.demo.provider", "--database", str(database)]
    command += ["--parent", str(os.getpid())]
    if captured_cents is not None:
        captured = directory / "captured.json"
        captured.write_text(json.dumps(dict(captured_cents)), encoding="utf-8")
        command += ["--captured", str(captured)]
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the demo, which still has runs to settle
        )
    try:
        yield RunningProvider(_announced_url(process, log_path), process.pid, database)
    finally:
        _stop(process)


def _announced_url(process: subprocess.Popen[bytes], log: Path) -> str:
    assert process.stdout is not None
    too_late = threading.Timer(READY_SECONDS, process.kill)  # ends the wait for the line below
    too_late.start()
    try:
        line = process.stdout.readline()
    finally:
        too_late.cancel()
    if not line:
        raise ProviderNotStarted(log)
    return str(json.loads(line)["url"])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _noted(connection: sqlite3.Connection, request_no: int, answer: Answer) -> Answer:
    connection.execute(
        "UPDATE requests SET outcome = ? WHERE request_no = ?", (answer.outcome, request_no)
    )
    return answer


def _now() -> int:
    return time.time_ns() // 1_000_000


def main(arguments: list[str] | None = None) -> None:
    """Serve until SIGTERM, Ctrl-C, or the end of the parent process."""
    parser = argparse.ArgumentParser(prog="python -m handrail.demo.provider")
    parser.add_argument("--port", type=int, default=0, help="0, the default: any free port")
    parser.add_argument("--database", type=Path, required=True, help="SQLite file of the records")
    parser.add_argument("--captured", type=Path, help="JSON file: captured cents by charge id")
    parser.add_argument("--parent", type=int, default=os.getppid(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)

    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    captured = json.loads(options.captured.read_text("utf-8")) if options.captured else None
    server = ProviderServer(options.port, Book(options.database, captured))
    serving = threading.Thread(target=server.serve_forever, args=[PARENT_CHECK_SECONDS])
    serving.start()
    print(json.dumps({"url": server.url}), flush=True)
    while os.getppid() == options.parent and not stopping.wait(PARENT_CHECK_SECONDS):
        pass
    server.shutdown()
    serving.join()
    server.server_close()


if __name__ == "__main__":
    main()
