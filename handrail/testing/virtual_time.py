"""An asyncio event loop whose time is virtual: it jumps to the next timer when nothing is ready.

Code under test waits as it always does, with `asyncio.sleep` and time limits, and takes no real
time. Time is whole milliseconds, starts at 0 and moves by nothing but timers and `advance`.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from typing import Any


class NothingLeft(RuntimeError):
    """Everything waits, and no timer is set: the code under test would wait for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; see the module. One thread only: nothing outside of it is waited for."""

    def __init__(self) -> None:
        self.now_ms = 0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """The virtual time, in seconds."""
        return self.now_ms / 1000

    def advance(self, by_ms: int) -> None:
        """Let time pass, as if somebody had held up the process."""
        self.now_ms += by_ms


class _Jumping(selectors.SelectSelector):
    """A selector that never waits: what the loop would wait for a timer passes at once."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise NothingLeft("nothing is ready and no timer is set")
        # A timer is a whole millisecond; the difference of two floats may not be, by a trifle.
        self._loop.advance(max(1, math.ceil(timeout * 1000 - 1e-3)))
        return ready


def close(loop: VirtualLoop) -> None:
    """Cancel what is left on the loop, let it clean up, and close the loop."""
    if loop.is_closed():
        return
    loop.run_until_complete(_end(asyncio.all_tasks(loop)))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def _end(left: set[asyncio.Task[Any]]) -> None:
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
