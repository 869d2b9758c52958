"""The fleet of the live tests' worker processes, and the world outside that it acts upon.

A run is an errand: a list of moves that the model proposes one after the other, each of which may
be told to wait at one place until the test lets the run go. The world keeps its own record of who
came where, and the record is what the tests believe: it knows nothing of the ledger.

The environment says where the record lies (LIVE_WORLD), what the process is called (LIVE_NAME),
by how much its wall clock is wrong (LIVE_CLOCK_AHEAD_S) and which version of the workflow it has
(LIVE_VERSION).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from celery.signals import worker_ready
from pydantic import BaseModel

from handrail import AgentLoop, Budget, Fleet, ToolCall, Workflow
from handrail.agent.budget import CallLimits

POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Note:
    """One line of the record: who (`pid`) came to which `place`, for which run and item."""

    place: str
    run: str
    item: str
    pid: int
    id: str


class World:
    """The world outside: an append-only file that many processes write and read.

    It takes no locks, so that a process that is stopped or killed in it holds up nobody.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._read_to = 0
        self._notes: list[Note] = []
        self._let_go: set[str] = set()
        self._guard = threading.Lock()

    def note(self, place: str, run: str = "", item: str = "") -> int:
        """Write a line; return how many there are of this place, run and item up to it."""
        id = uuid.uuid4().hex
        line = {"place": place, "run": run, "item": item, "pid": os.getpid(), "id": id}
        os.write(self._file, json.dumps(line).encode() + b"\n")
        ids = [note.id for note in self.notes(place, run, item)]
        return ids.index(id) + 1

    def notes(self, place: str, run: str | None = None, item: str | None = None) -> list[Note]:
        """The lines so far, in order."""
        with self._guard:
            self._read_on()
            return [
                note
                for note in self._notes
                if note.place == place and run in (None, note.run) and item in (None, note.item)
            ]

    def all(self) -> list[Note]:
        """The whole record, in order."""
        with self._guard:
            self._read_on()
            return [*self._notes]

    async def arrive(
        self, place: str, run: str, item: str, hold: Mapping[str, Any] | None = None
    ) -> None:
        """Come to a place. Who is the one to be held there waits until the run is let go."""
        seen = self.note(place, run, item)
        if hold is None or hold != {"place": place, "nth": seen}:
            return
        try:
            while not self.is_let_go(run):
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            self.note("aborted", run, place)
            raise
        self.note("went-on", run, place)

    def let_go(self, *runs: str) -> None:
        """Let what is held of some runs go on; each of them waits no more."""
        for run in runs:
            self.note("let-go", run)

    def is_let_go(self, run: str) -> bool:
        """Whether nothing of a run is to be held any longer."""
        with self._guard:
            self._read_on()
            return run in self._let_go

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _read_on(self) -> None:
        found = os.pread(self._file, 1 << 24, self._read_to)
        whole, end, _ = found.rpartition(b"\n")
        self._read_to += len(whole + end)
        read = [Note(**json.loads(line)) for line in whole.splitlines()]
        self._notes += read
        self._let_go |= {note.run for note in read if note.place == "let-go"}


@cache
def world() -> World:
    """The world of this process, as its environment says."""
    return World(Path(os.environ["LIVE_WORLD"]))


# ---- tools ---------------------------------------------------------------------------------------


class Errand(BaseModel):
    """What a tool is asked for. `hold` says where this call waits, and at which of its visits."""

    item: str
    hold: dict[str, Any] | None = None


def find(args: Errand, call: ToolCall) -> str | None:
    """Ask the world whether a save took effect."""
    world().note("find", call.run_id, args.item)
    return args.item if world().notes("effect", item=str(call.key)) else None


async def look(args: Errand, call: ToolCall) -> str:
    """Read something."""
    await world().arrive("look", call.run_id, args.item, args.hold)
    return f"{args.item} is there"


def look_blocking(args: Errand, call: ToolCall) -> str:
    """Read something with a client that blocks its thread, and hears of the abort by the call."""
    world().note("look", call.run_id, args.item)
    while args.hold and not world().is_let_go(call.run_id):
        if call.aborted.wait(POLL_S):
            world().note("aborted", call.run_id, "look")
            break
    return f"{args.item} is there"


def die(args: Errand, call: ToolCall) -> str:
    """Read something that is the end of whoever reads it."""
    world().note("die", call.run_id, args.item)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


async def save(args: Errand, call: ToolCall) -> str:
    """Write something. The service does not look at our key: two requests are two effects."""
    await world().arrive("save", call.run_id, args.item, args.hold)
    world().note("effect", call.run_id, str(call.key))
    await world().arrive("saved", call.run_id, args.item, args.hold)
    return args.item


# ---- the model, the check, the workflow ----------------------------------------------------------


async def propose(seen: dict[str, Any]) -> Any:
    """Propose the next move of the errand: as many are done as there are observations."""
    run, moves, done = seen["input"]["run"], seen["input"]["moves"], len(seen["observations"])
    move = moves[done]
    hold = move.get("hold")
    await world().arrive("ask", run, str(done), hold)
    if move["do"] == "complete":
        return {"kind": "complete", "answer": {"saved": move["saved"], "hold": hold}}
    arguments = {"item": move["item"], "hold": hold}
    return {"kind": "tool", "tool": move["do"], "arguments": arguments}


async def is_done(claim: Any, call: ToolCall) -> bool:
    """Look outside whether what is claimed to be saved was saved."""
    await world().arrive("check", call.run_id, "", claim["hold"])
    return len(world().notes("effect", call.run_id)) >= len(claim["saved"])


def declare(fleet: Fleet, *, version: str = "1") -> Fleet:
    """Declare tools, model and workflow on a fleet: in a worker, or in the test that asks it."""
    reads = [
        fleet.tool(side_effect="read", timeout_ms=20_000)(function)
        for function in (look, look_blocking, die)
    ]
    saves = [
        fleet.tool(
            name,
            side_effect="idempotent",
            approval=approval,
            intent=lambda args, run: f"save:{args.item}",
            guarantee="unique-constraint",
            query=find,
            timeout_ms=timeout_ms,
            settle_after_ms=100,
        )(save)
        # A lost worker's write is looked at when its lease is over: time limit + 5 s.
        for name, timeout_ms, approval in (
            ("save", 3_000, "never"),
            ("save_patiently", 20_000, "never"),
            ("save_with_consent", 3_000, "always"),
        )
    ]
    fleet.model("default", propose)
    fleet.workflow(
        Workflow(
            name="errand",
            version=version,
            stages=[AgentLoop(name="loop", actions=(*reads, *saves), verify=is_done)],
            budget=Budget(steps=12, model_calls=12, tool_calls=12, deadline_ms=90_000),
            limits=CallLimits(model_ms=20_000, tool_ms=20_000),
        )
    )
    return fleet


fleet = declare(Fleet("live"), version=os.environ.get("LIVE_VERSION", "1"))


# ---- the process ---------------------------------------------------------------------------------


def put_the_wall_clock_ahead(seconds: float) -> None:
    """Make this process believe in another time. Its monotonic clock goes on as it does."""
    now = time.time
    time.time = lambda: now() + seconds
    time.time_ns = lambda: int((now() + seconds) * 1e9)


if ahead := os.environ.get("LIVE_CLOCK_AHEAD_S"):
    put_the_wall_clock_ahead(float(ahead))


@worker_ready.connect
def say_ready(**_: object) -> None:
    world().note("ready", os.environ["LIVE_NAME"])
