"""What a schedule is: everything that is drawn from its seed before it begins.

Which runs there are, with which tools and budgets; how many workers and sweepers, and how wrong
their clocks are; how the service and the model behave; and where trouble strikes. The scheduler
draws the order of events from the same seed as it goes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.simulator import points
from tests.simulator.points import AFTER, BEFORE, COMMITTED, INSIDE, POINTS, Point
from tests.simulator.service import KINDS, STALL_MS, Kind, Way

#: What strikes at a point, how often, and which faults of the plan it stands for.
STRIKES: Final = {
    "die": 5,  # F1: the process is killed
    "stall": 6,  # F2, F20: it stands still, or another is simply faster
    "slow": 2,  # F12: the call is slow, and the rest of the process is not
    "lose": 4,  # F6, F8: the answer is lost, before or after the work was done
    "refuse": 1,  # F5, F8, F9: the database, the broker or the lock refuses
}
STALLS_MS: Final = (0, 0, 0, 0, 0, 700, 3_000, 6_000, 12_000, 31_000, 31_000, 70_000, 600_000)

SHAPES: Final[Mapping[str, int]] = {"commit": 9, "loop": 8, "read": 1}

#: How calls of the service go, as far as a tool of each kind may behave so.
WRITES: Final = (
    *(Way("ok"),) * 4,
    Way("slow", 700),
    Way("slow", 4_500),
    Way("lost"),
    Way("lost"),
    Way("dropped"),
    Way("late", 3_000),
    Way("late", 40_000),
    Way("hang"),
    Way("late and silent", 2_000),
    Way("deaf"),
    Way("stubborn", 9_000),
    Way("refused"),
    Way("refused at the door"),
    Way("busy"),
    Way("busy"),
    Way("unclear"),
    Way("unclear and done"),
)
LIES: Final = (
    Way("no effect"),
    Way("another's"),
    Way("wrong amount"),
    Way("unstorable"),
    Way("huge"),
    Way("odd text"),
)
READS: Final = (
    *(Way("ok"),) * 3,
    Way("slow", 900),
    Way("slow", 7_000),
    Way("lost"),
    Way("hang"),
    Way("busy"),
    Way("unstorable"),
    Way("odd text"),
)
QUERIES: Final = (
    *(Way("ok"),) * 2,
    Way("error"),
    Way("pending"),
    Way("another's"),
    Way("wrong amount"),
)
#: More than there is time in any schedule: a run whose time ends has been forgotten.
DEADLINE_MS: Final = 10_000_000
#: How the model of a run behaves.
MODELS: Final = (
    "garbage",
    "unknown tool",
    "repeats",
    "a-b-a-b",
    "claims at once",
    "endless",
    "slow",
    "silent",
    "breaks",
    "asks",
    "two at once",
    "chatty",
)
ACTS: Final = {
    "cancel": 8,  # F16
    "flush": 3,  # F4: locks and queue are gone
    "unlock": 1,  # F4: one lock is deleted
    "empty the queue": 3,  # F4
    "forge": 3,  # F7: messages that nobody sent
    "drain": 3,  # F3
    "freeze": 1,  # F20: nobody moves for ten minutes
    "kill": 3,  # F1: between any two turns
    "database away": 2,  # F9
    "broker away": 2,  # F6
    "lock away": 2,  # F5
    "decide": 3,  # F16: at once, twice, or late
    "pause": 3,
    "resume": 2,
    "report": 4,
}
#: What happens while somebody stands still: where two are at one thing, things go wrong.
MEANWHILE: Final[dict[tuple[str, ...], int]] = {
    (): 6,
    ("cancel",): 5,
    ("sweep",): 3,
    ("deliver",): 3,
    ("deliver", "deliver", "old"): 1,
    ("the lease", "sweep", "deliver"): 5,
    ("world goes on",): 7,
    ("the lease", "world goes on"): 3,
    ("cancel", "world goes on"): 2,
    ("flush", "deliver"): 1,
    ("drain",): 2,
    ("freeze",): 1,
    ("report",): 2,
    ("pause", "deliver"): 1,
    ("cancel", "drain"): 1,
}


@dataclass(frozen=True, slots=True)
class Theme:
    """What a schedule is about: drawn from one theme, rare things meet more often.

    `opening` are cells, at one of which somebody stands still first, while `opens_with` happens; at
    one of `then` somebody does so later.
    """

    weight: int
    writes: Sequence[Way] = WRITES
    scripts: Sequence[tuple[Way, ...]] = ()  # how the first writes go, one after the other
    odd: float = 0.06  # how often a model, a budget or a mode is out of the ordinary
    strikes: Mapping[str, int] = field(default_factory=lambda: STRIKES)
    points: Sequence[Point] = tuple(POINTS)
    acts: Mapping[str, int] = field(default_factory=lambda: ACTS)
    kinds: Sequence[str] = ()
    shapes: Mapping[str, int] = field(default_factory=lambda: SHAPES)
    meanwhile: Mapping[tuple[str, ...], int] = field(default_factory=lambda: MEANWHILE)
    opening: Sequence[tuple[Point, int]] = ()
    opens_with: Sequence[tuple[str, ...]] = ()
    opens_at: Sequence[int] = (1,)  # the how manieth time
    then: Sequence[tuple[Point, int]] = ()
    then_with: Sequence[tuple[str, ...]] = ()
    sweepers: Sequence[int] = (0, 1, 1, 1, 1, 2, 2, 2, 2, 2)
    lacks: float = 0.03  # how often a process lacks the workflows
    people: bool = False  # people are at the desk while the runs go on, and in peace
    dead: float = 0.04  # how often no query is ever answered
    unbounded: float = 0.1  # how often nobody vouches for how long a sender stands still
    models: Sequence[str] = MODELS  # those that are out of the ordinary


_DOUBTFUL: Final = (
    Way("ok"),
    Way("lost"),
    Way("lost"),
    Way("dropped"),
    Way("dropped"),
    Way("late", 3_000),
    Way("late", 60_000),
    Way("late and silent", 60_000),
    Way("deaf"),
    Way("busy"),
)
_LEFT_OPEN: Final = (
    (Way("lost"),),
    (Way("dropped"),),
    (Way("deaf"),),
    (Way("late", 60_000),),
    (Way("dropped"), Way("lost")),
    (Way("unclear"), Way("dropped")),
    (Way("unclear and done"),),
)
_LONG: Final[Mapping[tuple[str, ...], int]] = {
    ("world goes on",): 6,
    ("the lease", "world goes on"): 3,
    ("the lease",): 2,
    ("freeze", "world goes on"): 1,
    ("cancel",): 2,
}
_AMONG_APPROVERS: Final[Mapping[tuple[str, ...], int]] = {
    ("two consents",): 3,
    ("cancel",): 4,
    ("rejection",): 2,
    ("consent",): 3,
    ("cancel", "world goes on"): 2,
    ("world goes on",): 3,
    ("pause", "deliver"): 1,
}
_AMONG_OPERATORS: Final[Mapping[tuple[str, ...], int]] = {
    ("two resolutions",): 4,
    ("report",): 3,
    ("operator's cancel",): 2,
    ("resolution",): 3,
    ("world goes on",): 3,
    ("handling",): 1,
    ("query",): 1,
}
_AT_A_MATTER: Final[Mapping[tuple[str, ...], int]] = {
    ("report",): 2,
    ("resolution",): 2,
    ("world goes on",): 2,
}
_OVER_A_SECOND_SENDING: Final[Mapping[tuple[str, ...], int]] = {
    ("operator's cancel",): 3,
    ("consent",): 3,
    ("resolution",): 3,
    ("two resolutions",): 2,
    ("world goes on",): 2,
}
_AT_A_QUESTION: Final[Mapping[tuple[str, ...], int]] = {
    ("answer",): 3,
    ("cancel",): 2,
    ("world goes on",): 2,
}
_STILL: Final = {"stall": 8, "die": 1, "slow": 1, "lose": 1}
_UNDOING: Final = (points.UNDO_PLAN, points.UNDO_DISPATCH, points.UNDO)
THEMES: Final[Mapping[str, Theme]] = {
    "anything": Theme(8, odd=0.4),
    "doubt": Theme(5, writes=_DOUBTFUL),
    "slow sweeps": Theme(
        3,
        writes=_DOUBTFUL,
        strikes=_STILL,
        points=(points.WAKE, points.QUERY, points.QUERY, points.VERDICT, points.DUE),
        meanwhile=_LONG,
    ),
    "slow writers": Theme(
        4,
        writes=_DOUBTFUL,
        strikes=_STILL,
        points=(
            points.CHECKPOINT,
            points.LOCK,
            points.DISPATCH,
            points.LOOK,
            points.WRITE,
            points.OUTCOME,
        ),
        meanwhile=_LONG,
        kinds=(
            "query_alone",
            "dying_key_and_query",
            "undoable_unkeyed",
            "key_and_query",
            "neither",
        ),
        opening=((points.DISPATCH, AFTER), (points.WRITE, BEFORE), (points.OUTCOME, BEFORE)),
        opens_with=(("sent again",), ("the lease", "world goes on"), ("world goes on",)),
    ),
    "races": Theme(
        4,
        strikes={"stall": 1},
        points=(points.CLAIM, points.CLAIM, points.COMMIT, points.MODEL, points.LOOK),
    ),
    "stale answers": Theme(
        3,
        scripts=(
            (Way("dropped"), Way("late", 60_000)),
            (Way("dropped"), Way("late", 60_000)),
            (Way("late", 60_000),),
        ),
        strikes={"stall": 1},
        points=(points.QUERY, points.VERDICT),
        meanwhile={("world goes on", "world goes on"): 3, ("the lease",): 2},
        kinds=("query_alone", "dying_key_and_query", "key_and_query", "deadline_and_query"),
        opening=((points.QUERY, INSIDE), (points.QUERY, AFTER), (points.VERDICT, BEFORE)),
        opens_with=(("the lease",), ("world goes on",), ("sent again",), ("sent again",)),
        opens_at=(1, 3),
        sweepers=(1, 2, 2),
    ),
    "stale verdicts": Theme(  # the second absence is read when the intent has been sent again
        5,
        scripts=((Way("dropped"), Way("lost")),),
        strikes={"stall": 1},
        points=(points.QUERY, points.VERDICT),
        meanwhile={("sent again",): 1},
        kinds=("query_alone", "dying_key_and_query", "deadline_and_query", "undoable_unkeyed"),
        opening=((points.QUERY, INSIDE), (points.QUERY, AFTER), (points.VERDICT, BEFORE)),
        opens_with=(("sent again",),),
        opens_at=(2, 3),
        sweepers=(2,),
    ),
    "second tries": Theme(
        2,
        scripts=(
            (Way("lost"), Way("refused at the door")),
            (Way("deaf"), Way("refused at the door")),
            (Way("late", 9_000), Way("refused at the door")),
            (Way("lost"), Way("busy"), Way("busy")),
        ),
        kinds=("key_alone", "dying_key_alone", "stored_failures", "key_and_query"),
    ),
    "late landings": Theme(
        3,
        scripts=(
            (Way("late", 60_000),),
            (Way("late and silent", 60_000),),
            (Way("dropped"), Way("late", 60_000)),
        ),
        points=(points.QUERY, points.VERDICT, points.WAKE, points.WRITE),
        kinds=("query_alone", "dying_key_and_query", "deadline_and_query", "undoable_unkeyed"),
    ),
    "deaths": Theme(3, strikes={"die": 1}),
    "lost answers": Theme(5, strikes={"lose": 1}),
    "undoing": Theme(
        8,
        kinds=("undoable", "undoable_unkeyed"),
        points=(
            *(points.UNDO_PLAN,) * 4,
            *(points.UNDO_DISPATCH,) * 5,
            *(points.UNDO,) * 3,
            *(points.UNDO_WAITS, points.WAKE, points.LOOK, points.VERDICT),
        ),
        meanwhile=_LONG,
        opening=((points.WRITE, INSIDE), (points.OUTCOME, BEFORE), (points.DISPATCH, AFTER)),
        opens_with=(("cancel",), ("cancel", "pause"), ("cancel", "lock away")),
    ),
    "undoing waits": Theme(
        3,
        scripts=((Way("late", 20_000),), (Way("lost"),), (Way("deaf"),)),
        kinds=("undoable", "undoable_unkeyed"),
        acts={"world goes on": 1},
        strikes={"die": 3, "lose": 3, "stall": 2},
        points=(*(points.UNDO_WAITS,) * 3, *_UNDOING),
        opening=((points.WRITE, INSIDE), (points.OUTCOME, BEFORE)),
        opens_with=(("cancel", "world goes on"),),
        then=(
            *((points.UNDO_PLAN, AFTER),) * 2,
            (points.UNDO_PLAN, COMMITTED),
            (points.UNDO_PLAN, BEFORE),
        ),
        then_with=(("lock away",), ("lock away", "world goes on")),
    ),
    "wishes": Theme(
        2,
        points=(points.UNDER_WISH, points.UNDER_WISH, points.CANCEL, points.COMMIT, points.WAKE),
        shapes={"loop": 2, "read": 1},
        opening=(
            (points.CLAIM, BEFORE),
            (points.MODEL, INSIDE),
            (points.VERIFY, INSIDE),
            (points.COMMIT, BEFORE),
        ),
        opens_with=(("cancel",),),
    ),
    "drains": Theme(
        3,
        points=(*(points.DRAIN,) * 5, points.CLAIM, points.COMMIT, points.OUTCOME),
        opening=((points.MODEL, INSIDE), (points.WRITE, BEFORE), (points.CLAIM, AFTER)),
        opens_with=(("drain",), ("drain", "deliver")),
    ),
    "deploys": Theme(
        2,
        writes=_DOUBTFUL,
        points=(*(points.RETURNED,) * 5, points.WAKE),
        lacks=0.5,
        kinds=("key_and_query", "query_alone", "confirmed"),
    ),
    "crowded": Theme(
        2,
        points=(points.GIVE_BACK, points.GIVE_BACK, points.LOCK, points.UNLOCK, points.DISPATCH),
        opening=((points.CLAIM, AFTER), (points.LOCK, AFTER), (points.WRITE, INSIDE)),
        opens_with=(("lock away",), ("deliver",), ("pause",)),
    ),
    "people": Theme(
        3,
        points=(*(points.PAUSE,) * 4, *(points.REPORT,) * 2, points.DECIDE, points.CANCEL),
        acts={"report": 6, "pause": 5, "resume": 5, "decide": 3, "cancel": 2},
        opening=((points.WRITE, INSIDE), (points.QUERY, INSIDE), (points.OUTCOME, BEFORE)),
        opens_with=(("report",), ("report", "world goes on"), ("pause",), ("decide",)),
    ),
    "consent": Theme(
        4,
        kinds=("agreed", "agreed_unkeyed"),
        shapes={"commit": 3, "loop": 2},
        acts={"price": 8, **ACTS},
        strikes={"die": 3, "stall": 3, "lose": 2},
        points=(points.DECIDE, points.PARK, points.DISPATCH, points.DISPATCH, points.CHECKPOINT),
        opening=((points.DECIDE, AFTER), (points.CLAIM, AFTER), (points.PARK, AFTER)),
        opens_with=(("price",), ("decide",), ("cancel",), ("decide", "price"), ("the lease",)),
    ),
    "approvers": Theme(
        4,
        kinds=("agreed", "agreed_unkeyed", *("agreed_by_two",) * 3, "agreed_neither"),
        shapes={"commit": 3, "loop": 2},
        acts={
            "consent": 6,
            "two consents": 6,
            "rejection": 3,
            "cancel": 4,
            "operator's cancel": 3,
            "price": 2,
            "pause": 1,
        },
        strikes={"die": 3, "stall": 4, "lose": 3},
        points=(*(points.DECIDE,) * 3, *(points.TOKEN,) * 2, points.DISPATCH, points.PARK),
        meanwhile=_AMONG_APPROVERS,
        opening=((points.DECIDE, BEFORE), (points.DECIDE, AFTER), (points.TOKEN, AFTER)),
        opens_with=(("cancel",), ("two consents",), ("rejection",), ("consent", "world goes on")),
        people=True,
    ),
    "operators": Theme(
        6,
        scripts=_LEFT_OPEN,
        kinds=(
            *("neither",) * 2,
            "dying_key_alone",
            *("query_alone",) * 2,
            "agreed_neither",
            "agreed_unkeyed",
            "undoable_unkeyed",
            "deadline_and_query",
        ),
        shapes={"commit": 2, "loop": 1},
        acts={
            "resolution": 5,
            "two resolutions": 6,
            "handling": 8,
            "query": 4,
            "answer": 1,
            "operator's cancel": 2,
            "report": 3,
            "two consents": 1,
            "service answers": 4,
        },
        strikes={"die": 2, "stall": 4, "lose": 3},
        points=(*(points.RESOLVE,) * 3, *(points.NOTE,) * 7, points.QUERY, points.DISPATCH),
        meanwhile=_AMONG_OPERATORS,
        opening=((points.RESOLVE, BEFORE), (points.NOTE, AFTER), (points.DISPATCH, AFTER)),
        opens_with=(
            ("two resolutions",),
            ("report",),
            ("resolution", "world goes on"),
            ("the lease", "world goes on", "cancel"),
        ),
        then=((points.RESOLVE, BEFORE), (points.RESOLVE, BEFORE), (points.QUERY, AFTER)),
        then_with=(("two resolutions",), ("report",), ("operator's cancel",), ("world goes on",)),
        people=True,
        dead=0.6,
    ),
    "late receipts": Theme(  # what was settled by a person turns out otherwise
        3,
        scripts=((Way("ok"),), (Way("late", 60_000),), (Way("lost"),)),
        kinds=("neither", "query_alone", "dying_key_alone", "undoable", "agreed_neither"),
        shapes={"commit": 2, "loop": 1},
        acts={"resolution": 4, "two resolutions": 3, "report": 3, "cancel": 1},
        strikes={"stall": 3, "die": 1},
        points=(points.RESOLVE, points.OUTCOME, points.QUERY),
        meanwhile=_AT_A_MATTER,
        opening=(
            *((points.WRITE, BEFORE),) * 2,
            (points.WRITE, INSIDE),
            (points.OUTCOME, BEFORE),
            (points.WRITE, AFTER),
        ),
        opens_with=(
            ("the lease", "world goes on", "resolution", "world goes on"),
            ("the lease", "freeze", "world goes on", "two resolutions", "world goes on"),
            ("the lease", "world goes on", "cancel", "world goes on", "resolution"),
        ),
        people=True,
        dead=0.6,
        unbounded=0.5,
    ),
    "sent again by a person": Theme(  # once somebody has agreed to it again
        2,
        scripts=((Way("dropped"),), (Way("dropped"), Way("lost")), (Way("lost"),)),
        kinds=("agreed_neither", "agreed_neither", "agreed_unkeyed"),
        shapes={"commit": 2, "loop": 1},
        acts={
            "resolution": 4,
            "two resolutions": 3,
            "consent": 4,
            "operator's cancel": 3,
            "service answers": 3,
            "cancel": 2,
        },
        strikes={"die": 2, "stall": 4, "lose": 2},
        points=(*(points.RESOLVE,) * 3, *(points.DECIDE,) * 2, points.TOKEN, points.DISPATCH),
        meanwhile=_OVER_A_SECOND_SENDING,
        opening=((points.RESOLVE, AFTER), (points.RESOLVE, BEFORE), (points.DECIDE, BEFORE)),
        opens_with=(("operator's cancel",), ("consent",), ("two resolutions",)),
        opens_at=(1, 2),
        people=True,
        dead=0.3,
    ),
    "questions": Theme(
        2,
        odd=0.9,
        shapes={"loop": 1},
        models=("asks",),
        acts={"answer": 6, "cancel": 2, "operator's cancel": 2},
        strikes={"die": 1, "stall": 2, "lose": 1},
        points=(points.DECIDE, points.DECIDE, points.COMMIT, points.CANCEL),
        meanwhile=_AT_A_QUESTION,
        opening=((points.DECIDE, BEFORE), (points.COMMIT, AFTER)),
        opens_with=(("answer",), ("cancel",), ("the lease", "world goes on")),
        people=True,
    ),
    "charges": Theme(
        2,
        kinds=("key_alone", "key_and_query"),
        shapes={"loop": 1},
        points=(points.CHARGE, points.CHARGE, points.READ, points.VERIFY, points.MARK),
    ),
}


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run that is to be accepted."""

    run_id: str
    workflow: str
    tenant: str
    order: str
    amount: int
    model: str
    reads: int  # how many reads an honest model wants first
    budget: dict[str, Any]
    mode: str = "live"


@dataclass(frozen=True, slots=True)
class Strike:
    """Trouble at a point: at the n-th point from the beginning, or the n-th time at a cell.

    `meanwhile` is what happens first while the one who was struck stands still.
    """

    what: str
    number: int
    cell: int | None
    ms: int
    meanwhile: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker: how wrong its monotonic clock is, and whether it has the workflows."""

    offset_ms: int
    rate: float
    knows: bool


@dataclass(slots=True)
class Plan:
    """Everything that is drawn before a schedule begins."""

    seed: int
    theme: str
    kind: Kind
    shape: str
    stall_ms: int | None
    runs: list[RunPlan]
    workers: list[WorkerPlan]
    sweepers: int
    moves: int
    strikes: list[Strike]
    acts: dict[int, list[str]] = field(default_factory=dict)
    writes: list[Way] = field(default_factory=list)
    reads: list[Way] = field(default_factory=list)
    queries: list[Way] = field(default_factory=list)
    foreign: float = 0.0  # how often a sweep lacks the workflows
    query_dead: bool = False  # no query is ever answered
    expires_ms: int = 24 * 3_600_000  # of an approval
    lag_ms: int = 0  # how late the service shows a record
    lively: bool = True  # while time passes, messages are taken and the beat goes on
    beat_ms: int = 0  # the beat's phase
    people: bool = False
    retires: bool = True  # a dead worker is replaced before there is peace

    def told(self) -> str:
        """The plan in one line, for the timeline."""
        orders = ", ".join(
            f"{run.run_id}={run.tenant}/{run.order}/{run.amount} ({run.model})" for run in self.runs
        )
        return (
            f"seed {self.seed} ({self.theme}): {self.shape} with {self.kind.name},"
            f" S {self.stall_ms}; {orders};"
            f" {len(self.workers)} workers, {self.sweepers} sweepers"
        )


def draw(seed: int) -> Plan:
    """Draw a schedule."""
    chance = random.Random(seed)
    name = chance.choices([*THEMES], [theme.weight for theme in THEMES.values()])[0]
    turn = IN_TURN[seed // ONE_IN % len(IN_TURN)] if seed % ONE_IN == 0 else None
    if turn is not None:
        name = chance.choice(_aims_at(turn[1]) or [name])
    theme = THEMES[name]
    shape = chance.choices([*theme.shapes], [*theme.shapes.values()])[0]
    kind = KINDS[chance.choice(theme.kinds or [*KINDS])]
    plan = Plan(
        seed=seed,
        theme=name,
        kind=kind,
        shape=shape,
        stall_ms=None if chance.random() < theme.unbounded else STALL_MS,
        runs=_runs(chance, shape, kind, theme),
        workers=_workers(chance, theme.lacks),
        foreign=theme.lacks,
        sweepers=chance.choice(theme.sweepers),
        moves=chance.randrange(10, 24) if theme.people else chance.randrange(5, 16),
        strikes=_strikes(chance, theme, turn),
        query_dead=chance.random() < theme.dead,
        people=theme.people,
        lag_ms=chance.choice((0, 0, 0, 1_500, 24_000)),
        lively=chance.random() < 0.65,
        beat_ms=chance.randrange(5_000),
        retires=chance.random() < 0.8,
    )
    for _ in range(chance.choices((0, 1, 2, 3), (6, 5, 3, 1))[0]):
        act = chance.choices([*theme.acts], [*theme.acts.values()])[0]
        plan.acts.setdefault(chance.randrange(plan.moves), []).append(act)
    if theme.scripts:
        plan.writes = [*chance.choice(theme.scripts)]
    elif chance.random() < 0.7:
        plan.writes = [chance.choice(theme.writes) for _ in range(chance.randrange(1, 4))]
        if chance.random() < 0.15:
            plan.writes.insert(chance.randrange(len(plan.writes) + 1), chance.choice(LIES))
    if chance.random() < 0.3:
        plan.reads = [chance.choice(READS) for _ in range(chance.randrange(1, 3))]
    if chance.random() < 0.4:
        plan.queries = [chance.choice(QUERIES) for _ in range(chance.randrange(1, 4))]
    return plan


def _runs(chance: random.Random, shape: str, kind: Kind, theme: Theme) -> list[RunPlan]:
    odd = theme.odd
    workflow = "reading" if shape == "read" else f"{shape}_{kind.name}"
    pattern = chance.choices(
        (
            [("shop", "a", 100)],
            [("shop", "a", 100), ("shop", "a", 100)],
            [("shop", "a", 100), ("shop", "b", 100)],
            [("shop", "a", 100), ("shop", "a", 999)],
            [("shop", "a", 100), ("store", "a", 100)],
            [("shop", "a", 100), ("shop", "a", 100), ("store", "a", 100)],
        ),
        (12, 5, 1, 1, 1, 1),
    )[0]
    return [
        RunPlan(
            run_id=f"r{number}",
            workflow=workflow,
            tenant=tenant,
            order=order,
            amount=amount,
            model=chance.choice(theme.models) if chance.random() < odd else "honest",
            reads=chance.choice((0, 0, 1)) if shape == "loop" else 1,
            budget=_budget(chance, shape, min(odd, 0.4)),
            mode="shadow" if chance.random() < min(odd, 0.4) / 10 else "live",
        )
        for number, (tenant, order, amount) in enumerate(pattern)
    ]


def _budget(chance: random.Random, shape: str, odd: float) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "steps": 9,
        "model_calls": 9,
        "tool_calls": 6,
        "deadline_ms": DEADLINE_MS,
    }
    if chance.random() >= odd:
        return whole
    tight: dict[str, Any] = chance.choice(
        (
            {"steps": 2},
            {"model_calls": 2},
            {"tool_calls": 1},
            {"tool_calls": 0},
            {"deadline_ms": 9_000},
            {"deadline_ms": 45_000},
            {"output_bytes": 60},
            {"expires_ms": 60_000},
            {"tool_calls": 3} if shape == "commit" else {"per_tool": {"lookup": 1}},
            {"tool_calls": 2} if shape == "commit" else {"per_tool": {"lookup": 0}},
        )
    )
    return whole | tight


def _workers(chance: random.Random, lacks_workflows: float) -> list[WorkerPlan]:
    number = chance.choices((1, 2, 3), (2, 6, 1))[0]
    lacks = chance.random() < lacks_workflows
    return [
        WorkerPlan(
            offset_ms=chance.randrange(10**8),
            rate=1 + chance.choice((0.0, 0.0, 1e-4, -1e-4)),
            knows=not (lacks and turn == 0),
        )
        for turn in range(number)
    ]


def _strikes(
    chance: random.Random, theme: Theme, turn: tuple[str, Point, int] | None
) -> list[Strike]:
    found: list[Strike] = []
    if turn is not None:
        what, point, side = turn
        acts = chance.choices([*theme.meanwhile], [*theme.meanwhile.values()])[0]
        number, ms = chance.choice((1, 1, 1, 2)), chance.choice(STALLS_MS)
        found.append(Strike(what, number, point.base + side, ms, acts if what == "stall" else ()))
    if theme.opening and chance.random() < 0.85:
        point, side = chance.choice(theme.opening)
        meanwhile = chance.choice(theme.opens_with)
        number = chance.choice(theme.opens_at)
        found.append(Strike("stall", number, point.base + side, 0, meanwhile))
    if theme.then:
        point, side = chance.choice(theme.then)
        meanwhile = chance.choice(theme.then_with)
        found.append(Strike("stall", 1, point.base + side, 0, meanwhile))
    for _ in range(chance.choices((0, 1, 2, 3, 4), (1, 5, 5, 3, 1))[0]):
        what = chance.choices([*theme.strikes], [*theme.strikes.values()])[0]
        ms = chance.choice(STALLS_MS)
        during: tuple[str, ...] = ()
        if what in ("stall", "slow"):
            during = chance.choices([*theme.meanwhile], [*theme.meanwhile.values()])[0]
        if chance.random() < (0.45 if len(theme.points) == len(POINTS) else 0.15):
            found.append(Strike(what, chance.randrange(1, 90), None, ms, during))
            continue
        point = chance.choice(theme.points)
        cell = point.base + chance.choice(sides_of(what, point) or point.sides)
        found.append(Strike(what, chance.choice((1, 1, 1, 2, 2, 3)), cell, ms, during))
    return found


def sides_of(what: str, point: Point) -> Sequence[int]:
    """At which sides of a point something can strike."""
    sides = point.sides
    if what in ("stall", "slow") and not point.stands:
        return ()
    if what in ("stall", "slow") and COMMITTED in sides:  # nobody stands still in a transaction
        return [side for side in sides if side != INSIDE]
    if what == "lose":
        return [side for side in sides if side != AFTER and point is not points.TAKE]
    if what == "refuse":
        return [side for side in sides if side not in (AFTER, COMMITTED)]
    return sides


def _all_cells() -> Iterator[tuple[str, Point, int]]:
    for point in POINTS:
        for what in ("die", "stall", "lose"):
            for side in point.sides if what == "die" else sides_of(what, point):
                yield what, point, side


def _aims_at(point: Point) -> list[str]:
    """The themes that are about a point: where the schedule gets there at all."""
    every = len(POINTS)
    return [n for n, theme in THEMES.items() if point in theme.points and len(theme.points) < every]


#: What must strike somewhere; luck alone would leave out some that are seldom reached.
IN_TURN: Final = (*_all_cells(),)
#: One schedule in so many has the next of them among its strikes.
ONE_IN: Final = 4
