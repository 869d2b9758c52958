"""The fault points: each durable write and each call to the outside, and the sides at which an
actor can die, stand still or lose its answer.

The ports name them; nothing in the product does. `covers` are the numbers of the fault plan:
P1 run insert, P2 gap before publish, P3 publish, P4 outbox mark, P5 message taken, P6 gap before
claim, P7 claim, P8 model call, P9 proposal, P10 policy decision, P11 approval request, P12 approval
consumption, P13 intent, P14 lock, P15 gap before the tool, P16 inside it, P17 gap after it, P18
outcome, P19 next outbox row, P20 unlock, P21 acknowledgement, P22 reconciler's claim, P23 query,
P24 resolution, P25 compensation's intent, P26 its call, P27 hand-off, P28 a person's resolution,
P29 cancel, P30 beat, P31 trace write, P32 deploy boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BEFORE: Final = 0  # nothing has happened yet
INSIDE: Final = 1  # in the open transaction; of a call: it has arrived, the answer has not
COMMITTED: Final = 2  # it is durable, and whoever wrote it has no answer yet
AFTER: Final = 3  # the answer is there
SIDES: Final = ("before", "inside", "committed", "after")

_TRANSACTION: Final = (BEFORE, INSIDE, COMMITTED, AFTER)
_STATEMENT: Final = (BEFORE, COMMITTED, AFTER)
_CALL: Final = (BEFORE, INSIDE, AFTER)


@dataclass(frozen=True, slots=True)
class Point:
    """One point. `base` + a side is its cell in the tables of the coverage."""

    name: str
    covers: str
    sides: tuple[int, ...]
    base: int
    stands: bool  # whether an actor can stand still there


POINTS: Final[list[Point]] = []


def _point(name: str, covers: str, sides: tuple[int, ...], *, stands: bool = True) -> Point:
    POINTS.append(Point(name, covers, sides, 4 * len(POINTS), stands))
    return POINTS[-1]


# accepting
ACCEPT: Final = _point("accept", "P1 P2", _TRANSACTION)
PUBLISH: Final = _point("publish", "P2 P3", _STATEMENT)
TAKE: Final = _point("take", "P5 P6 P21", (BEFORE,))
# a step
CLAIM: Final = _point("claim", "P6 P7", _STATEMENT)
MODEL: Final = _point("model", "P8", _CALL)
CHARGE: Final = _point("charge", "P8 P10", _STATEMENT)
READ: Final = _point("read", "P15 P16 P17", _CALL)
VERIFY: Final = _point("verify", "P17", _CALL)
COMMIT: Final = _point("commit", "P10 P19 P31", _TRANSACTION)
PARK: Final = _point("park", "P11 P31", _TRANSACTION)
CHECKPOINT: Final = _point("checkpoint", "P9 P10 P13", _TRANSACTION)
LOCK: Final = _point("lock", "P14", _STATEMENT)
GIVE_BACK: Final = _point("give back", "P14 P19", _TRANSACTION)
DISPATCH: Final = _point("dispatch", "P12 P13", _TRANSACTION)
LOOK: Final = _point("look", "P15", (BEFORE, AFTER))
WRITE: Final = _point("write", "P15 P16 P17", _CALL)
OUTCOME: Final = _point("outcome", "P18 P19 P27 P31", _TRANSACTION)
UNLOCK: Final = _point("unlock", "P20", _STATEMENT)
UNDER_WISH: Final = _point("under a wish", "P18 P29", _TRANSACTION)
RENEW: Final = _point("renew", "P7", (BEFORE, COMMITTED), stands=False)
DRAIN: Final = _point("drain", "P19 P32", _STATEMENT)
# the sweep
DUE: Final = _point("due", "P30", _STATEMENT)
MARK: Final = _point("outbox mark", "P4", _STATEMENT)
WAKE: Final = _point("wake", "P22 P27", _TRANSACTION)
QUERY: Final = _point("query", "P23", _CALL)
VERDICT: Final = _point("verdict", "P24 P27", _TRANSACTION)
RETURNED: Final = _point("query returned", "P22 P32", _TRANSACTION)
BEAT: Final = _point("beat", "P30", _STATEMENT)
UNDO_PLAN: Final = _point("undo planned", "P25", _TRANSACTION)
UNDO_DISPATCH: Final = _point("undo dispatch", "P25", _TRANSACTION)
UNDO: Final = _point("undo", "P26", _CALL)
UNDO_WAITS: Final = _point("undo waits", "P25 P27", _TRANSACTION)
# people
CANCEL: Final = _point("cancel", "P29", _TRANSACTION)
DECIDE: Final = _point("decide", "P12 P28", _TRANSACTION)
TOKEN: Final = _point("token", "P11 P12", _TRANSACTION)
RESOLVE: Final = _point("resolve", "P28", _TRANSACTION)
NOTE: Final = _point("note", "P28", _TRANSACTION)
REPORT: Final = _point("report", "P24", _TRANSACTION)
PAUSE: Final = _point("pause", "P28", _STATEMENT)

CELLS: Final = 4 * len(POINTS)


def cell_name(cell: int) -> str:
    """How a cell is shown."""
    return f"{SIDES[cell % 4]} {POINTS[cell // 4].name}"
