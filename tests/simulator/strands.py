"""Strands: greenlets of one thread, of which one runs at a time, when the scheduler has handed it
the turn.

Whatever an actor does is plain code on its own strand, so that it can stand still in the middle of
any call and go on later, or never. Who runs is decided by the scheduler alone: the operating system
has no say, and a schedule is the same every time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from greenlet import getcurrent, greenlet


class Died(BaseException):
    """An actor is gone: nothing of what it held is given back.

    Not an Exception, so that no handler takes it for a failure.
    """


class Strand:
    """One such greenlet; it begins its job at its first turn.

    An event loop is the running one of its thread, so each strand keeps its own while others run.
    """

    def __init__(self, job: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._job = job
        self._greenlet = greenlet(self._live)

    @property
    def idle(self) -> bool:
        """Whether it has ended its job."""
        return self._greenlet.dead

    def resume(self) -> None:
        """Hand it the turn, and wait until it gives the turn back. For the scheduler."""
        self._greenlet.parent = getcurrent()
        self._greenlet.switch()
        asyncio._set_running_loop(None)
        sys.set_asyncgen_hooks(None, None)

    def pause(self) -> None:
        """Give the turn back, and wait until it comes again. For the strand itself."""
        loop, hooks = asyncio._get_running_loop(), sys.get_asyncgen_hooks()
        assert self._greenlet.parent is not None
        self._greenlet.parent.switch()
        asyncio._set_running_loop(loop)
        sys.set_asyncgen_hooks(*hooks)

    def _live(self) -> None:
        try:
            self._job()
        except Died:
            pass
        except BaseException as error:
            self.error = error
