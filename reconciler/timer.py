"""The sweep from a timer inside a process: for a deployment without any beat.

Any number of processes may have one: a tick finds out by itself whether there is something to do.
"""

from __future__ import annotations

import threading
from typing import Final

from handrail.reconciler.sweep import Reconciler

_JOIN_S: Final = 5.0


class SweepTimer:
    """Ticks about every so often, in a thread of its own, until it is stopped."""

    def __init__(self, reconciler: Reconciler, *, every_s: float) -> None:
        self._reconciler = reconciler
        self._every_s = every_s
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="handrail-sweep", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no further sweep, and let one that is under way end soon; does not wait."""
        self._leaving.set()
        self._reconciler.stop()

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._reconciler.close()

    def _run(self) -> None:
        while not self._leaving.wait(self._pause_s()):
            self._reconciler.tick(every_s=self._every_s)

    def _pause_s(self) -> float:
        # Not in step with the other processes: then most of them find that one has just swept.
        return self._every_s * (0.75 + 0.5 * self._reconciler.jitter())
