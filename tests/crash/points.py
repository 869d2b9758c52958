"""The fault points: every durable write and every call outside, each with its sides.

A place is the n-th time that something is done, and a side of it. Places are not listed anywhere:
a run without a fault finds them. What is listed is the plan, P1 to P31, and which of them a place
is: a cell of the plan that no place covers, or a durable write that the plan does not name, fails
the sweep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple


class Side(StrEnum):
    """Where in a write or a call a process dies."""

    BEFORE = "before"  # nothing of it has happened
    INSIDE = "inside"  # a write: the statements have run, the transaction is open
    COMMITTED = "committed"  # a write: it is durable, and its caller has not been told
    KNOWN = "known"  # a write: its caller has been told, and has done nothing with it yet
    SENT = "sent"  # a call: the other side has it, and has not answered
    ANSWERED = "answered"  # a call: it has answered, and the caller has not read it


S = Side
WRITE: Final = (S.BEFORE, S.INSIDE, S.COMMITTED, S.KNOWN)
CALL: Final = (S.BEFORE, S.SENT, S.ANSWERED)
HANDED_OVER: Final = (S.BEFORE, S.ANSWERED)  # what the other side does with it is one act


class Place(NamedTuple):
    """The n-th time that something is done, and a side of it."""

    what: str
    number: int
    side: Side

    def __str__(self) -> str:
        return f"{self.what}#{self.number}.{self.side}"


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the plan: which acts are it, on which sides. `fact` narrows it to those acts
    of which this was true; `since` says why a point has no place here.
    """

    code: str
    name: str
    sides: tuple[Side, ...] = ()
    acts: tuple[str, ...] = ()
    fact: str | None = None
    elsewhere: str = ""

    def covers(self, place: Place, facts: frozenset[str]) -> bool:
        """Whether a place is of this point; `facts` are those of the place's act."""
        if place.side not in self.sides or (self.acts and place.what not in self.acts):
            return False
        return self.fact is None or self.fact in facts


POINTS: Final = (
    Point("P1", "run insert", WRITE, ("insert_run",)),
    Point("P2", "gap before publish", (S.KNOWN,), ("insert_run",)),
    Point("P3", "publish", HANDED_OVER, ("publish",)),
    Point("P4", "outbox mark", WRITE, ("published",)),
    Point("P5", "message taken", HANDED_OVER, ("take",)),
    Point("P6", "gap before claim", (S.BEFORE,), ("claim",)),
    Point("P7", "claim", WRITE, ("claim", "claim_each")),
    Point("P8", "model call", CALL, ("model",)),
    Point("P9", "proposal event", WRITE, fact="proposal.received"),
    Point("P10", "policy decision", WRITE, fact="policy.allowed"),
    Point("P11", "approval request", WRITE, fact="parks"),
    Point("P12", "approval consumption", WRITE, fact="consumes"),
    Point("P13", "intent", WRITE, fact="intent"),
    Point("P14", "lock acquired", HANDED_OVER, ("lock",)),
    Point("P15", "gap before the tool", (S.KNOWN,), ("effect",)),
    Point("P16", "tool call", CALL, ("tool",)),
    Point("P17", "gap after the tool", (S.BEFORE,), ("outcome",)),
    Point("P18", "outcome", WRITE, ("outcome",)),
    Point("P19", "next outbox row", WRITE, fact="due"),
    Point("P20", "lock released", HANDED_OVER, ("unlock",)),
    Point("P21", "ack", elsewhere="a step is acknowledged before it begins; a broker is needed"),
    Point("P22", "query paid", WRITE, fact="pays"),
    Point("P23", "query", CALL, ("query",)),
    Point("P24", "resolution", WRITE, ("verdict",)),
    Point("P25", "compensation intent", WRITE, ("undo_plan", "undo_dispatch")),
    Point("P26", "compensation call", CALL, ("undo",)),
    Point("P27", "hand-off", WRITE, fact="hands-off"),
    Point("P28", "operator's resolution", elsewhere="no operator works in here"),
    Point("P29", "cancel", WRITE, ("cancel",)),
    Point("P30", "sweep", WRITE, ("due_for_sweep", "beat")),
    Point("P31", "trace write", WRITE, fact="traces"),
    # Durable writes for which the plan has no number.
    Point("W1", "end of a step", WRITE, ("commit_each",)),
    Point("W2", "checkpoint", WRITE, ("checkpoint",)),
    Point("W3", "lease given back by a step", WRITE, ("step_aside",)),
    Point("W4", "end under a wish", WRITE, ("under_wish",)),
    Point("W5", "lost lease, deadline, expiry", WRITE, ("wake",)),
    Point("W6", "lease renewal", WRITE, ("renew",)),
    Point("W7", "leases given back at shutdown", WRITE, ("give_back",)),
    Point("W8", "charge of a retry", WRITE, ("charge_more",)),
    Point("W9", "charge of a tool's own limit", WRITE, ("charge_tool",)),
    Point("W10", "approval given", WRITE, ("approve",)),
    Point("W11", "approval refused", WRITE, ("reject",)),
    Point("W12", "answer given", WRITE, ("answer",)),
    Point("W13", "dispatch", WRITE, ("dispatch",)),
    Point("W14", "report of a provider", WRITE, ("report",)),
    Point("W15", "pause, and its end", WRITE, ("pause", "resume")),
    Point("W16", "approval token", WRITE, ("issue_token",)),
    Point("R1", "read call", CALL, ("read",)),
    Point("R2", "verification", CALL, ("verify",)),
    Point("R3", "state before a write", CALL, ("original",)),
)

#: A decision under lock is named after the function that decides; see `Ledger.rule`.
DECISIONS: Final[Mapping[str, str]] = {
    "_Step._checkpoint": "checkpoint",
    "_Step._dispatch": "dispatch",
    "tell_outcome": "outcome",
    "_Step._rule_mine": "step_aside",
    "_Step._cancelled_or_lost": "under_wish",
    "Reconciler._look_at": "wake",
    "Reconciler._conclude": "verdict",
    "Compensator._plan": "undo_plan",
    "Compensator._dispatch": "undo_dispatch",
    "Desk.approve": "approve",
    "Desk.reject": "reject",
    "Desk.answer": "answer",
    "cancel": "cancel",
    "_count": "report",
}


def decision(qualified_name: str) -> str:
    """Name a decision under lock; one that is not known keeps its own name."""
    name = qualified_name.partition(".<locals>")[0]
    return DECISIONS.get(name, name)


Cell = tuple[str, Side]


@dataclass(frozen=True, slots=True)
class Story:
    """What a process without a fault did: its places in order, and the facts of each act.

    `lines` is how many lines of the watched files it ran.
    """

    places: tuple[Place, ...]
    facts: Mapping[tuple[str, int], frozenset[str]]
    lines: int

    def cells(self, place: Place) -> list[Cell]:
        """The cells of the plan that a place covers."""
        facts = self.facts.get((place.what, place.number), frozenset())
        return [(point.code, place.side) for point in POINTS if point.covers(place, facts)]

    def cells_of(self, place: str) -> list[Cell]:
        """The cells that a place covers, by its text."""
        return next(self.cells(found) for found in self.places if str(found) == place)

    def unnamed(self) -> set[str]:
        """What was done of which no point of the plan speaks."""
        return {place.what for place in self.places if not self.cells(place)}


def missing(hits: Counter[Cell]) -> list[Cell]:
    """The cells of the plan that have no hit."""
    wanted = [(point.code, side) for point in POINTS for side in point.sides]
    return [cell for cell in wanted if not hits[cell]]


def table(hits: Counter[Cell]) -> str:
    """The coverage as a table: hits by point and side; `-` where a point has no such side."""
    sides = list(Side)
    lines = [f"{'point':36}" + "".join(f"{side:>11}" for side in sides)]
    for point in POINTS:
        title = f"{point.code:4} {point.name}"
        if not point.sides:
            lines.append(f"{title:36} {point.elsewhere}")
            continue
        cells = (hits[point.code, side] if side in point.sides else "-" for side in sides)
        lines.append(f"{title:36}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def total(counts: Iterable[Counter[Cell]]) -> Counter[Cell]:
    """Add counts up."""
    return sum(counts, Counter[Cell]())
