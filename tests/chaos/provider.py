"""The service outside: a process of its own, whose durable records are the judge of everything.

    python -m tests.chaos.provider --port 40123 --database provider.db --seed 7

One line of JSON is a request, one line the answer; a connection carries one request. It keeps every
request that arrived and everything that it did, before anybody hears of it. The nemesis tells it
how to misbehave (`behave`, `relent`); it never misbehaves beyond what the tools have declared:
whatever lands late lands within their settling time, and a key is known again for as long as
promised.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import sqlite3
import time
from pathlib import Path
from typing import Any, Final

from tests.chaos.kinds import BY_NAME

Request = dict[str, Any]
Answer = dict[str, Any]

SCHEMA: Final = """
CREATE TABLE arrivals (
    number INTEGER PRIMARY KEY,
    verb   TEXT NOT NULL, -- ask (the model), look, apply, find, check
    kind   TEXT,
    intent TEXT,
    run    TEXT,
    at     INTEGER NOT NULL,
    way    TEXT NOT NULL -- how it was dealt with
);
CREATE INDEX arrivals_by_run ON arrivals (run, verb);
CREATE TABLE effects (
    number INTEGER PRIMARY KEY,
    kind   TEXT NOT NULL,
    intent TEXT NOT NULL, -- not unique: who asks twice has it twice
    key    TEXT NOT NULL,
    run    TEXT NOT NULL,
    at     INTEGER NOT NULL
);
CREATE INDEX effects_by_intent ON effects (kind, intent);
CREATE INDEX effects_by_key ON effects (key);
"""
#: How a request of each verb may go wrong.
WAYS: Final = {
    "apply": ("lost", "dropped", "late", "refused", "busy", "slow", "unclear"),
    "find": ("down", "slow"),
    "look": ("dropped", "slow", "busy"),
    "ask": ("dropped", "slow"),
    "check": ("dropped", "slow"),
}
USUAL_S: Final = 0.5  # what an answer takes at most while nothing is wrong
SILENCE: Final[Answer] = {}  # no answer at all


class Book:
    """What the service has on record. A record is durable before the next line of code runs."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.executescript(SCHEMA)

    def arrived(self, request: Request, way: str) -> None:
        """Note a request, whatever becomes of it."""
        self._connection.execute(
            "INSERT INTO arrivals (verb, kind, intent, run, at, way) VALUES (?, ?, ?, ?, ?, ?)",
            (
                request["verb"],
                request.get("kind"),
                request.get("intent"),
                request.get("run"),
                now_ms(),
                way,
            ),
        )

    def apply(self, request: Request) -> Answer:
        """Do it, or answer as before where the key is known."""
        kind = BY_NAME[request["kind"]]
        if kind.key_valid_for_ms:
            known = self._connection.execute(
                "SELECT * FROM effects WHERE key = ? AND at > ?",
                (request["key"], now_ms() - kind.key_valid_for_ms),
            ).fetchone()
            if known is not None:
                return _receipt(known)
        self._connection.execute(
            "INSERT INTO effects (kind, intent, key, run, at) VALUES (?, ?, ?, ?, ?)",
            (kind.name, request["intent"], request["key"], request["run"], now_ms()),
        )
        return self.find(kind.name, request["intent"])[-1]

    def find(self, kind: str, intent: str) -> list[Answer]:
        """Every effect of an intent, as receipts."""
        rows = self._connection.execute(
            "SELECT * FROM effects WHERE kind = ? AND intent = ? ORDER BY number", (kind, intent)
        )
        return [_receipt(row) for row in rows]


class Service:
    """Answers requests, for better or worse."""

    def __init__(self, book: Book, chance: random.Random) -> None:
        self._book = book
        self._chance = chance
        self._faults: dict[str, Request] = {}
        self._in_the_air: dict[tuple[str, str], int] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            line = await reader.readline()
            if line.endswith(b"\n"):  # a request that was cut off never arrived
                await self._answer(json.loads(line), reader, writer)
        except (ConnectionError, TimeoutError):
            pass  # who hung up wants no answer
        finally:
            writer.close()

    async def _answer(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        match request["verb"]:
            case "behave":
                self._faults[request["fault"]] = request
                answer: Answer = {"ok": True}
            case "relent":
                self._faults.pop(request["fault"], None)
                answer = {"ok": True}
            case "state":
                answer = {"pid": os.getpid(), "in_the_air": sum(self._in_the_air.values())}
            case _:
                answer = await self._deal_with(request)
        if answer is not SILENCE:
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        elif self._chance.random() < 0.5:
            await reader.read()  # say nothing until the other side has had enough

    async def _deal_with(self, request: Request) -> Answer:
        verb, way = request["verb"], self._way(request)
        late = request.get("not_after") is not None and now_ms() > request["not_after"]
        self._book.arrived(request, "too-late" if late else way)
        if late:
            return {"refused": "too-late", "retryable": False}
        limit_s = request.get("timeout_ms", 1_000) / 1_000
        await asyncio.sleep(self._chance.uniform(0.01, USUAL_S))
        if way == "slow":
            await asyncio.sleep(self._chance.uniform(0.2, 1.4) * limit_s)
        match verb, way:
            case _, "dropped":
                return SILENCE
            case "find", "down":
                return {"error": "down"} if self._chance.random() < 0.5 else SILENCE
            case _, "busy" | "refused":
                return {"refused": "no-funds", "retryable": way == "busy"}
            case "apply", "late":
                self._apply_later(request, limit_s)
                return SILENCE
            case "apply", "unclear":
                if self._chance.random() < 0.5:
                    self._book.apply(request)
                return {"unclear": "internal"}
            case "apply", "lost":
                self._book.apply(request)
                return SILENCE
            case "apply", _:
                return {"receipt": self._book.apply(request)}
            case "find", _:
                return self._find(request)
            case "check", _:
                return {
                    "counts": [len(self._book.find(kind, intent)) for kind, intent in request["of"]]
                }
        return {"ok": True}

    def _way(self, request: Request) -> str:
        for fault in self._faults.values():
            concerns = request["verb"] in fault["verbs"]
            if concerns and fault["kinds"] is not None:
                concerns = request.get("kind") in fault["kinds"]
            if concerns and self._chance.random() < fault["share"]:
                return str(fault["way"])
        return "ok"

    def _apply_later(self, request: Request, limit_s: float) -> None:
        settle_s = request["settle_ms"] / 1_000
        pause_s = self._chance.uniform(0.3 * limit_s, limit_s + 0.8 * settle_s)
        intent = (request["kind"], request["intent"])
        self._in_the_air[intent] = self._in_the_air.get(intent, 0) + 1

        def land() -> None:
            self._in_the_air[intent] -= 1
            self._book.apply(request)

        asyncio.get_running_loop().call_later(pause_s, land)

    def _find(self, request: Request) -> Answer:
        kind, intent = request["kind"], request["intent"]
        found = self._book.find(kind, intent)
        if found:
            return {"record": found[0]}
        # Some services know what they are still at, others do not.
        pending = BY_NAME[kind].key_valid_for_ms and self._in_the_air.get((kind, intent))
        return {"pending": True} if pending else {"record": None}


def _receipt(row: sqlite3.Row) -> Answer:
    return {"number": row["number"], "intent": row["intent"]}


def now_ms() -> int:
    """The service's time; it refuses what is too late by it."""
    return time.time_ns() // 1_000_000


# ---- who asks it ---------------------------------------------------------------------------------


class NeverSent(Exception):
    """The time for the request was over before it was sent."""


async def request(port: int, what: Request, *, by_s: float) -> Answer:
    """Make one request; it is sent before the monotonic instant `by_s` or never.

    Raises `ConnectionError` where no answer came, `NeverSent`.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if time.monotonic() >= by_s:  # this process may have been paused since it began to connect
            raise NeverSent
        writer.write(json.dumps(what).encode() + b"\n")
        line = await reader.readline()
    finally:
        writer.close()
    if not line.endswith(b"\n"):
        raise ConnectionError("no answer")
    answer: Answer = json.loads(line)
    return answer


def request_blocking(port: int, what: Request, *, by_s: float) -> Answer:
    """As `request`, by a client that blocks its thread and does not hear that it is given up."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        if time.monotonic() >= by_s:
            raise NeverSent
        connection.sendall(json.dumps(what).encode() + b"\n")
        with connection.makefile("rb") as answers:
            line = answers.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("no answer")
    answer: Answer = json.loads(line)
    return answer


# ---- the process ---------------------------------------------------------------------------------


async def _serve(port: int, database: Path, seed: int) -> None:
    service = Service(Book(database), random.Random(seed))
    server = await asyncio.start_server(service.serve, "127.0.0.1", port, backlog=512)
    await server.serve_forever()


def main(arguments: list[str] | None = None) -> None:
    """Serve until killed: what is on record is durable."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.provider")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--database", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args(arguments)
    asyncio.run(_serve(options.port, options.database, options.seed))


if __name__ == "__main__":
    main()
