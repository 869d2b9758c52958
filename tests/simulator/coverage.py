"""What the schedules have reached: every point and side, and what struck there.

A search that reaches too little proves too little: a cell that nothing ever struck fails the run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.simulator.faults import IN_TURN, STRIKES
from tests.simulator.points import CELLS, POINTS, SIDES, Point, cell_name


@dataclass(slots=True)
class Tally:
    """Counts over any number of schedules."""

    schedules: int = 0
    passed: list[int] = field(default_factory=lambda: [0] * CELLS)
    strikes: Counter[tuple[str, int]] = field(default_factory=Counter)  # (what, cell)
    acts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)  # statuses and reasons of runs
    handed_off: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, why)
    runs: Counter[str] = field(default_factory=Counter)  # by kind, those that count for hand-offs
    stale: Counter[str] = field(default_factory=Counter)  # stale writers that lost
    resolved: Counter[str] = field(default_factory=Counter)  # by a person, as what
    wrong: int = 0  # schedules in which a person was wrong about what nobody can check

    def struck(self, what: str, point: Point, side: int) -> None:
        """Something struck at a point."""
        self.strikes[what, point.base + side] += 1

    def add(self, other: Tally) -> None:
        """Add what others have counted."""
        self.schedules += other.schedules
        self.passed = [
            mine + theirs for mine, theirs in zip(self.passed, other.passed, strict=True)
        ]
        self.wrong += other.wrong
        for name in ("strikes", "acts", "ends", "handed_off", "runs", "stale", "resolved"):
            getattr(self, name).update(getattr(other, name))

    def missing(self) -> list[str]:
        """The cells that nothing struck, of those that something can strike."""
        return [
            f"{what} {cell_name(point.base + side)}"
            for what, point, side in IN_TURN
            if not self.strikes[what, point.base + side]
        ]

    def table(self) -> str:
        """Every point and side: how often it was passed, and what struck how often."""
        kinds = [*STRIKES]
        lines = [f"{'point':<16}{'side':<11}{'passed':>9}" + "".join(f"{k:>9}" for k in kinds)]
        for point in POINTS:
            for side in point.sides:
                cell = point.base + side
                counts = "".join(f"{self.strikes[kind, cell] or '':>9}" for kind in kinds)
                name = point.name if side == point.sides[0] else ""
                lines.append(f"{name:<16}{SIDES[side]:<11}{self.passed[cell]:>9}{counts}")
        return "\n".join(lines)
