"""Everything that survives a process: the clock, the broker's queue, the intent lock, and the
service that the tools call, whose own records are the judge.

It is one file of records, each appended with one write, and one page of shared memory. Whoever is
killed leaves them as they are.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any, Final

from handrail.broker.message import StepMessage
from handrail.canonical import Json
from handrail.ledger.lock import Refusal
from handrail.tasks.calls import ToolCall

START_MS: Final = 1_800_000_000_000
CALL_MS: Final = 5_000
#: How long after its sender gave up a late request lands; within every tool's settle time.
LATE_MS: Final = 2_000
_PAGE: Final = 4_096
_NUMBERS: Final = struct.Struct("<4q")  # time, backend, steps of the fuse, length of the place


class Shared:
    """A page of memory that a process and its children share."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _PAGE)

    def clear(self) -> None:
        """Everything is zero."""
        self._page[:_PAGE] = bytes(_PAGE)

    def _get(self, index: int) -> int:
        return int(struct.unpack_from("<q", self._page, 8 * index)[0])

    def _set(self, index: int, value: int) -> None:
        struct.pack_into("<q", self._page, 8 * index, value)

    @property
    def now_ms(self) -> int:
        """Time since the start."""
        return self._get(0)

    @now_ms.setter
    def now_ms(self, value: int) -> None:
        self._set(0, value)

    @property
    def backend(self) -> int:
        """The process of the database's server that the child has talked to."""
        return self._get(1)

    @backend.setter
    def backend(self, value: int) -> None:
        self._set(1, value)

    @property
    def last_word(self) -> str:
        """Where the child has died, as it said right before."""
        length = self._get(2)
        return self._page[32 : 32 + length].decode()

    @last_word.setter
    def last_word(self, value: str) -> None:
        text = value.encode()
        self._page[32 : 32 + len(text)] = text
        self._set(2, len(text))


class Records:
    """An append-only file of JSON lines, read on from where it was read before."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._read = 0
        self._known: list[dict[str, Any]] = []

    def clear(self) -> None:
        """Nothing has happened."""
        os.ftruncate(self._file, 0)
        self._read, self._known = 0, []

    def add(self, what: str, **facts: Any) -> None:
        """Append a record."""
        self.all()
        line = json.dumps({"what": what, **facts}).encode() + b"\n"
        os.write(self._file, line)
        self._read += len(line)
        self._known.append({"what": what, **facts})

    def all(self) -> list[dict[str, Any]]:
        """All records, in order."""
        while more := os.pread(self._file, 1 << 20, self._read):
            self._read += len(more)
            self._known += map(json.loads, more.splitlines())
        return self._known

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """The records of some kinds, in order."""
        return [record for record in self.all() if record["what"] in kinds]


class Queue:
    """The broker: what was published and not taken. A message is gone once it is taken."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def put(self, message: StepMessage) -> None:
        """Publish a message."""
        self._records.add("published", message=message.model_dump(mode="json"))

    def waiting(self) -> list[StepMessage]:
        """The messages that wait."""
        sent: list[Any] = []
        queue: list[Any] = []
        for record in self._records.of("published", "taken", "lost", "doubled"):
            match record["what"]:
                case "published":
                    sent.append(record["message"])
                    queue.append(record["message"])
                case "taken":
                    queue.pop(0)
                case "lost":
                    queue.clear()
                case "doubled":
                    queue = [*sent, *queue]
        return [StepMessage.model_validate(message) for message in queue]

    def take(self) -> None:
        """Take the first message."""
        self._records.add("taken")

    def lose(self) -> None:
        """Lose every message that waits."""
        self._records.add("lost")

    def double(self) -> None:
        """Deliver everything again that was ever published."""
        self._records.add("doubled")


class Lock:
    """The intent lock, on the shared clock: it outlives its holder until it runs out."""

    def __init__(self, records: Records, shared: Shared) -> None:
        self._records, self._shared = records, shared

    def acquire(self, effect_id: str, *, ttl_ms: int) -> str | Refusal:
        """Take the lock; see `IntentLock`."""
        holder = self._holder(effect_id)
        if holder is not None and holder["until"] > self._shared.now_ms:
            return Refusal.TAKEN
        token = f"lock-{len(self._records.of('locked')) + 1}"
        until = self._shared.now_ms + ttl_ms
        self._records.add("locked", effect=effect_id, token=token, until=until)
        return token

    def release(self, effect_id: str, token: str) -> None:
        """Give the lock back; see `IntentLock`."""
        holder = self._holder(effect_id)
        if holder is not None and holder["token"] == token:
            self._records.add("unlocked", effect=effect_id)

    def _holder(self, effect_id: str) -> dict[str, Any] | None:
        last = None
        for record in self._records.of("locked", "unlocked"):
            if record["effect"] == effect_id:
                last = record if record["what"] == "locked" else None
        return last


class Service:
    """What the tools call. The first call of the kind `trouble` of a run goes as `way` says, all
    others well.

    ok; lost: performed, the answer is lost; refused; never: it never arrives; late: it lands when
    its sender has given up; unclear: not performed, and the service says that it does not know.
    """

    def __init__(self, records: Records, shared: Shared) -> None:
        self._records, self._shared = records, shared
        self.trouble, self.way = "write", "ok"

    def note(self, what: str, run_id: str) -> int:
        """Record that a call has reached the outside; returns the how-many-th of its run it is."""
        number = sum(1 for record in self._records.of(what) if record["run"] == run_id) + 1
        self._records.add(what, run=run_id)
        return number

    def receive(self, what: str, call: ToolCall, *, keyed: bool) -> str:
        """A request to change something has left its sender; returns how it goes."""
        self.land()
        first = self.note(what, call.run_id) == 1 and what == self.trouble
        way = self.way if first else "ok"
        if way in ("ok", "lost"):
            self._perform(call.intent_key, call.key if keyed else None)
        elif way == "late":
            self._records.add(
                "air",
                intent=call.intent_key,
                key=call.key if keyed else None,
                lands=self._shared.now_ms + CALL_MS + LATE_MS,
            )
        return way

    def _perform(self, intent: str | None, key: str | None) -> None:
        known = key is not None and any(r["key"] == key for r in self._records.of("performed"))
        if not known:
            self._records.add("performed", intent=intent, key=key, at=self._shared.now_ms)

    def land(self) -> None:
        """Let the requests in the air arrive whose time has come."""
        landed = len(self._records.of("landed"))
        for record in self._records.of("air")[landed:]:
            if record["lands"] <= self._shared.now_ms:
                self._records.add("landed")
                self._perform(record["intent"], record["key"])

    def record(self, intent: str) -> Json:
        """The service's record of an intent, as a receipt shows it too; None where there is
        none.
        """
        self.land()
        number = self.performed.index(intent) + 1 if intent in self.performed else 0
        return {"receipt": number, "of": intent} if number else None

    @property
    def performed(self) -> list[str]:
        """The intents, each time that one took effect."""
        return [record["intent"] for record in self._records.of("performed")]

    @property
    def calls(self) -> Counter[str]:
        """The calls by kind and run."""
        kinds = ("model", "read", "write", "undo", "query", "verify")
        return Counter(f"{record['what']} {record['run']}" for record in self._records.of(*kinds))
