"""The timeline of a schedule, for people: who did what, when, and what came of it.

Only written where somebody wants to read it: a schedule that fails is simply played again.
"""

from __future__ import annotations

from typing import Final

#: The ledger's time at the beginning of every schedule.
START_MS: Final = 1_800_000_000_000


class Timeline:
    """Lines in order, each with the time since the beginning and who acted."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def tell(self, now: int, who: str, what: str) -> None:
        """Add a line."""
        self.lines.append(f"{(now - START_MS) / 1000:10.3f} s  {who:<12}{what}")

    def __str__(self) -> str:
        return "\n".join(self.lines)
