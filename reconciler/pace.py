"""How fast doubts are settled: no faster than the fleet takes up the runs that this sets going.

A doubt that is settled makes a step due, and a queue is served in order. Set going all at once,
very many would stand before every fresh run. For use by several threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from handrail.ledger.ledger import DueStep, Ledger

#: After this time a step that nobody takes up counts no more: perhaps no worker is there.
GRACE_S: Final = 2.0


@dataclass(slots=True, kw_only=True)
class Pace:
    """Steps that the sweep has made due and nobody has claimed yet: `most` at a time."""

    ledger: Ledger
    most: int
    clock: Callable[[], float] = time.monotonic
    _going: dict[str, tuple[DueStep, float]] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def set_going(self, due: DueStep) -> None:
        """A step of a run was published whose doubt is settled."""
        with self._guard:
            self._going[due.run_id] = (due, self.clock())

    def has_room(self, under_way: int) -> bool:
        """Whether one more doubt may be settled, beside those that are under way."""
        with self._guard:
            going = dict(self._going)
        if len(going) + under_way < self.most:
            return True
        since = self.clock() - GRACE_S
        waiting = self.ledger.unclaimed([due for due, at in going.values() if at > since])
        with self._guard:
            for run_id in going.keys() - waiting:
                if self._going.get(run_id) == going[run_id]:
                    del self._going[run_id]
            return len(self._going) + under_way < self.most
