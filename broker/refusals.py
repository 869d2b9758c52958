"""Messages that were dropped, counted by reason.

Dropping is safe, since a message is a hint; not noticing is not. The counts are this process's
own, and each drop leaves one log line without a word of what the message held.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Final

logger = logging.getLogger("handrail.broker")


class Refusals:
    """A thread-safe tally of dropped messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def note(self, code: str, where: str, problem: str) -> None:
        """Count one dropped message. `where` and `problem` are our own words, not the message's."""
        with self._lock:
            self._counts[code] += 1
        logger.warning("%s: dropped a message (%s): %s", where, code, problem)

    def counts(self) -> dict[str, int]:
        """How many messages this process has dropped, by reason code."""
        with self._lock:
            return dict(self._counts)


REFUSALS: Final = Refusals()
