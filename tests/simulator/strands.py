"""Strands: threads of which one runs at a time, only while the scheduler has handed it the turn.

Whatever an actor does is plain code on its own strand, so that it can stand still in the middle of
any call and go on later, or never. Who runs is decided by the scheduler alone: the operating system
has no say, and a schedule is the same every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Died(BaseException):
    """An actor is gone: nothing of what it held is given back.

    Not an Exception, so that no handler takes it for a failure.
    """


class Strand:
    """One such thread. It is used again and again: to start one costs more than a whole call."""

    def __init__(self) -> None:
        self.job: Callable[[], object] | None = None
        self.error: BaseException | None = None
        self._turn = threading.Lock()
        self._back = threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        threading.Thread(target=self._live, daemon=True, name="simulator").start()

    @property
    def idle(self) -> bool:
        """Whether it has ended what it was given."""
        return self.job is None

    def resume(self) -> None:
        """Hand it the turn, and wait until it gives the turn back. For the scheduler."""
        self._turn.release()
        self._back.acquire()

    def pause(self) -> None:
        """Give the turn back, and wait until it comes again. For the strand itself."""
        self._back.release()
        self._turn.acquire()

    def _live(self) -> None:
        while True:
            self._turn.acquire()
            assert self.job is not None
            try:
                self.job()
            except Died:
                pass
            except BaseException as error:
                self.error = error
            self.job = None
            self._back.release()


class Strands:
    """The strands of this process that are free, and those that are made when none is."""

    def __init__(self) -> None:
        self._free: list[Strand] = []

    def take(self, job: Callable[[], object]) -> Strand:
        """Give a job to a strand; it begins at its first turn."""
        strand = self._free.pop() if self._free else Strand()
        strand.job, strand.error = job, None
        return strand

    def give_back(self, strand: Strand) -> None:
        """Take back a strand that has ended its job."""
        assert strand.idle
        self._free.append(strand)
