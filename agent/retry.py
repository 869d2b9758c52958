"""When a failed call of a model, a tool or a check is made again, and how long it waits before
that.

Every attempt is a call: it is charged, durably, before it is made. Pure: chance is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from handrail.errors import InvalidDefinition


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Make a call again that failed for a reason that may pass: a time-out, a lost connection, or
    what the adapter or the tool marks as retryable.

    `attempts` counts the first call too: 1 means no retry. The pause after attempt n, counted from
    0, is min(`cap_ms`, `base_ms` x 2^n) x (0.5 + u) with u in [0, 1), and at most `max_pause_ms`:
    what a worst case is planned with. The longest that a user is willing to wait is the run's
    deadline: a pause after which less than `min_call_ms` would be left of it is not begun, and the
    original error stands at once.
    """

    attempts: int = 3
    base_ms: int = 250
    cap_ms: int = 4_000
    max_pause_ms: int = 6_000
    min_call_ms: int = 1  # no call is made with less; so a pause that ends at the deadline is late

    def __post_init__(self) -> None:
        for name in ("attempts", "base_ms", "cap_ms", "max_pause_ms", "min_call_ms"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidDefinition("retry", f"{name} must be a whole number of at least 1")

    def pause_ms(self, attempt: int, chance: float) -> int:
        """Return the pause after a failed attempt, in milliseconds; `chance` is in [0, 1)."""
        base = min(self.cap_ms, self.base_ms << min(attempt, 32))
        # In whole numbers: 0.5 + the largest float below 1 is 1.5, which is not below it.
        return min(self.max_pause_ms, base // 2 + min(base - 1, int(base * chance)))

    def next_pause_ms(self, attempt: int, *, remaining_ms: int, chance: float) -> int | None:
        """Return the pause after which a failed attempt is followed by another; None where none
        follows: it was the last one, or the next would come too late.
        """
        pause_ms = self.pause_ms(attempt, chance)
        late = remaining_ms < pause_ms + self.min_call_ms
        return None if late or attempt + 1 >= self.attempts else pause_ms

    def worst_ms(self, call_ms: int, *, calls: int) -> int:
        """Return how long the retries among so many calls take at most, each with its pause."""
        first = -(-calls // self.attempts)  # each series of attempts begins with a call of its own
        return (calls - first) * (self.max_pause_ms + call_ms)


def must_be_retry(title: str, retry: object) -> None:
    """Refuse what is neither a policy nor left out, with `InvalidDefinition`."""
    if retry is not None and not isinstance(retry, Retry):
        raise InvalidDefinition(title, "retry must be a Retry, as in Retry(attempts=3)")


ModelRetry = Retry  # the name under which models had it first
