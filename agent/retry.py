"""When a failed model call is made again, and how long it waits before that.

Every attempt is a call: it is charged, durably, before it is made. Pure: chance is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from handrail.agent.errors import InvalidDefinition


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRetry:
    """Make a model call again that failed for a reason that may pass: a time-out, a lost
    connection, or what the adapter marks as retryable.

    `attempts` counts the first call too: 1 means no retry. The pause after attempt n, counted from
    0, is min(`cap_ms`, `base_ms` x 2^n) x (0.5 + u) with u in [0, 1), and at most `max_pause_ms`:
    what a worst case is planned with. A pause that would reach the run's deadline is not begun.
    """

    attempts: int = 3
    base_ms: int = 250
    cap_ms: int = 4_000
    max_pause_ms: int = 6_000

    def __post_init__(self) -> None:
        for name in ("attempts", "base_ms", "cap_ms", "max_pause_ms"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidDefinition("retry", f"{name} must be a whole number of at least 1")

    def pause_ms(self, attempt: int, chance: float) -> int:
        """Return the pause after a failed attempt, in milliseconds; `chance` is in [0, 1)."""
        base = min(self.cap_ms, self.base_ms << min(attempt, 32))
        # In whole numbers: 0.5 + the largest float below 1 is 1.5, which is not below it.
        return min(self.max_pause_ms, base // 2 + min(base - 1, int(base * chance)))
