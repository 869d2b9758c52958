"""What the tests of controlled runs share: proposals, a ledger clock that is moved by hand, a look
at traces, and a watch for errors that nobody handled.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from handrail import Fleet
from handrail.broker.loop import shared_loop
from handrail.canonical import Json

#: How long a test waits for what must come; only a failing test waits that long.
PATIENCE_S = 10.0


def ask(tool: str, **arguments: Json) -> dict[str, Any]:
    """A proposal to call a tool."""
    return {"kind": "tool", "tool": tool, "arguments": arguments}


def claim(answer: Any) -> dict[str, Any]:
    """A claim of completion."""
    return {"kind": "complete", "answer": answer}


def details(trace: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The details of all events of one kind, in order."""
    return [event["detail"] for event in trace if event["type"] == kind]


def stop_of(trace: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The detail of the last event, which must be `run.stopped`."""
    assert trace[-1]["type"] == "run.stopped"
    detail: dict[str, Any] = trace[-1]["detail"]
    return detail


class Clock:
    """The ledger's clock, moved by hand: what the database believes, in milliseconds."""

    def __init__(self) -> None:
        self.now = 1_800_000_000_000

    def __call__(self) -> int:
        return self.now

    def advance(self, by_ms: int) -> None:
        """Let time pass for the ledger."""
        self.now += by_ms


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds that gives no signal."""
    ends = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends, f"it never came: {what}"
        time.sleep(0.002)


class Driven:
    """A run that another thread drives in this process, while the test looks on and interferes."""

    def __init__(self, fleet: Fleet, run_id: str) -> None:
        self.fleet, self.run_id = fleet, run_id
        self._raised: list[BaseException] = []
        self._thread = threading.Thread(target=self._drive)
        self._thread.start()

    def _drive(self) -> None:
        try:
            self.fleet.drive(self.run_id, timeout_s=2 * PATIENCE_S)
        except BaseException as error:
            self._raised.append(error)

    @property
    def status(self) -> str:
        """The stored status of the run."""
        return self.fleet.get(self.run_id).status

    def join(self) -> None:
        """Wait until the run rests, and raise what its thread raised."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the run never came to rest"
        if self._raised:
            raise self._raised[0]


@contextmanager
def no_unhandled_error() -> Iterator[None]:
    """Fail if an error of a background task, a thread or a finaliser goes unhandled meanwhile."""
    found: list[str] = []
    _settle()  # what others left behind is theirs
    loop = shared_loop().loop
    before = loop.get_exception_handler()
    hooks = threading.excepthook, sys.unraisablehook
    loop.set_exception_handler(lambda _, context: found.append(f"loop: {context}"))
    threading.excepthook = lambda args: found.append(f"thread: {args.exc_value!r}")
    sys.unraisablehook = lambda args: found.append(f"finaliser: {args.exc_value!r}")
    try:
        yield
        _settle()
    finally:
        threading.excepthook, sys.unraisablehook = hooks
        loop.set_exception_handler(before)
    assert not found, "; ".join(found)


def _settle() -> None:
    """Let the loop run what is ready; a task that is collected reports its error if nobody has."""
    shared_loop().submit(asyncio.sleep(0)).result(PATIENCE_S)
    gc.collect()
