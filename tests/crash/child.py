"""The process that dies: forked, so that it is there at once; it connects after the fork.

It tells its story through a pipe where it lives to the end. A child that was to die and did not,
or died elsewhere, is an error of the sweep, not a finding.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.crash.fuse import Fuse
from tests.crash.points import Place, Side, Story

#: What a child does takes milliseconds. One that goes round and round is ended by the first limit,
#: one that waits for ever by the second, which a busy machine must not reach.
MOST_CPU_S: Final = 20
MOST_S: Final = 300


class HarnessError(Exception):
    """The sweep itself is at fault: what it says proves nothing."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: by a signal, with what it did, or with what went wrong in it."""

    signal: int
    story: Story | None = None
    failure: str = ""


def fork(act: Callable[[], Fuse]) -> Ended:
    """Let a forked child act, and wait for its end."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_the_child(act, writing)
    os.close(writing)
    said = b""
    while more := os.read(reading, 1 << 16):
        said += more
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return Ended(os.WTERMSIG(status))
    told = json.loads(said)
    return Ended(0, failure=told) if isinstance(told, str) else Ended(0, _story_of(told))


def _be_the_child(act: Callable[[], Fuse], writing: int) -> None:
    told: dict[str, Any] | str
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
        signal.alarm(MOST_S)
        told = _told(act().story())
    except BaseException:
        told = traceback.format_exc()
    try:
        text = json.dumps(told).encode()
        while text:
            text = text[os.write(writing, text) :]
    finally:
        os._exit(0)  # nothing that the parent has opened is closed twice


def _told(story: Story) -> dict[str, Any]:
    return {
        "places": story.places,
        "facts": [[*act, sorted(facts)] for act, facts in story.facts.items()],
        "lines": story.lines,
    }


def _story_of(told: dict[str, Any]) -> Story:
    return Story(
        tuple(Place(what, number, Side(side)) for what, number, side in told["places"]),
        {(what, number): frozenset(facts) for what, number, facts in told["facts"]},
        told["lines"],
    )
