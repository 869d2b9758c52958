"""What a run under chaos has shown, in figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from handrail.terminal import console, say, table
from tests.chaos.checks import TITLES, HandedOff, Recovery, Seen, Violation
from tests.chaos.kinds import BY_NAME, READ

RECOVERY_P99_S: Final = 60.0
ENOUGH_KINDS: Final = 12
ENOUGH_S: Final = 300.0  # a run of at least this length must have met so many kinds
SHOWN: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one run."""

    seed: int
    seconds: float
    database: str
    default_pace: bool
    rested_s: float | None  # None: not everything came to rest
    seen: Seen
    faults: Counter[str]
    known_kinds: int
    violations: Sequence[Violation]
    recoveries: Sequence[Recovery]
    handed_off: dict[str, HandedOff]
    counts: Counter[str]
    crashes: Sequence[str]  # exceptions in the workers' logs that nobody expects
    troubles: Sequence[str]  # of the test itself

    def problems(self) -> list[str]:
        """Why this run is no success; empty where it is one."""
        found = [f"{v.invariant} {v.about}: {v.what}" for v in self.violations]
        found += [f"unexpected in a log: {line}" for line in self.crashes]
        found += [f"the test itself: {trouble}" for trouble in self.troubles]
        for name, kind in self.handed_off.items():
            if kind.in_doubt and (name not in BY_NAME or not BY_NAME[name].may_be_handed_off):
                found.append(f"{kind.in_doubt} handed off that need no person: {name}")
        p99 = percentile([recovery.seconds for recovery in self.recoveries], 99)
        if self.default_pace and p99 > RECOVERY_P99_S:
            found.append(f"recovery p99 is {p99:.1f} s, {RECOVERY_P99_S:g} s are allowed")
        if self.seconds >= ENOUGH_S and len(self.faults) < ENOUGH_KINDS:
            found.append(f"{len(self.faults)} kinds of fault, at least {ENOUGH_KINDS} are needed")
        return found

    def show(self) -> None:
        """Print it."""
        out = console()
        statuses = Counter(f"{row['status']} ({row['reason']})" for row in self.seen.runs.values())
        say()
        say(f"chaos: seed {self.seed}, {self.seconds:g} s, {self.database}", style="bold")
        rested = (
            "NOT ALL AT REST" if self.rested_s is None else f"all at rest {self.rested_s:.0f} s"
        )
        say(f"runs {len(self.seen.runs)}, {rested} after the last fault")
        out.print(table(("runs", "ended as"), ((n, s) for s, n in statuses.most_common())))
        total = sum(self.faults.values())
        say()
        say(f"faults {total} of {len(self.faults)} kinds (of {self.known_kinds})", style="bold")
        out.print(table(("faults", "kind"), ((n, kind) for kind, n in sorted(self.faults.items()))))
        say()
        say("violations", style="bold")
        broken = Counter(violation.invariant for violation in self.violations)
        out.print(
            table(("", "count", "what"), ((i, broken[i], title) for i, title in TITLES.items()))
        )
        say()
        say("recovery, in seconds", style="bold")
        rows = []
        for lost in ("lease", "effect", "both"):
            took = [r.seconds for r in self.recoveries if lost in ("both", r.lost)]
            figures = (percentile(took, 50), percentile(took, 99), max(took, default=0.0))
            rows.append((lost, len(took), *(f"{figure:.1f}" for figure in figures)))
        out.print(table(("lost", "count", "p50", "p99", "max"), rows))
        slowest = sorted(self.recoveries, key=lambda r: -r.seconds)[:3]
        say("slowest: " + ", ".join(f"{r.run_id} ({r.lost}) {r.seconds:.1f}" for r in slowest))
        say()
        say("handed off", style="bold")
        columns = ("tool", "used", "in doubt", "rate", "cancelled too late", "undone")
        out.print(
            table(
                columns,
                (
                    (
                        _described(name),
                        kind.used,
                        kind.in_doubt,
                        f"{kind.rate:.1%}",
                        kind.cancelled,
                        kind.undone,
                    )
                    for name, kind in self.handed_off.items()
                ),
            )
        )
        say()
        say("client: " + json.dumps(self.counts))
        problems = self.problems()
        for problem in problems[:SHOWN]:
            say(f"PROBLEM {problem}", style="bold red")
        say(f"{len(problems)} problems" if problems else "no promise was broken", style="bold")


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that so many per cent of the values do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


def _described(name: str) -> str:
    kind = BY_NAME.get(name)
    if kind is None:
        return f"{name} (a read)" if name == READ else name
    has = ["a key"] * bool(kind.key_valid_for_ms) + ["a query"] * kind.queried
    has += ["a deadline at the service"] * kind.not_after + ["a person's consent"] * kind.confirmed
    return f"{name} ({', '.join(has)})"
