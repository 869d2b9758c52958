"""The event loop of a simulated worker: a real one of asyncio, whose time is the worker's clock.

Where the loop would wait for a timer or for nothing, it gives the turn back to the scheduler.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any


class WorkerLoop(asyncio.BaseEventLoop):
    """The loop; `wait(ms)` gives the turn back until something is due, in ms of the loop's clock.

    No timer: `wait(None)`.
    """

    def __init__(self, clock: Callable[[], float], wait: Callable[[int | None], object]) -> None:
        super().__init__()
        self._clock, self._wait = clock, wait
        self._selector = self  # what the loop asks when it has nothing to do
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        """The worker's monotonic clock, in seconds."""
        return self._clock()

    def select(self, timeout: float | None) -> tuple[()]:
        """Wait, as the selector of a loop does. There are no sockets: nothing is ever reported."""
        if timeout is None:
            self._wait(None)
        elif timeout > 0:
            self._wait(max(1, math.ceil(timeout * 1000 - 1e-3)))
        return ()

    @property
    def has_work(self) -> bool:
        """Whether a callback is ready to run."""
        ready: Any = getattr(self, "_ready")  # noqa: B009  # asyncio's own
        return bool(ready)

    def abandon(self) -> None:
        """Run nothing any more, and end with this turn: the process is gone."""
        ready: Any = getattr(self, "_ready")  # noqa: B009
        for handle in ready:
            handle.cancel()
        self.stop()

    def _process_events(self, event_list: object) -> None:
        return None

    def _write_to_self(self) -> None:
        return None
