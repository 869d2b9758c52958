"""Random schedules over the real ledger, protocol, step and sweep, on a clock that a test moves.

Messages are lost and doubled, workers die or pause between any two calls, connections break,
answers are lost, requests land late, people cancel, the lock is flushed. Then there is peace, and
the service's own records are the judge. HANDRAIL_TEST_SEED runs one schedule again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any, Final

import pytest

from handrail.agent.budget import Budget
from handrail.agent.effects import upstream_key
from handrail.broker.message import StepMessage
from handrail.canonical import Json
from handrail.reports import UnknownIntent, sign_report
from handrail.testing.people import agree
from tests.world import STALL_MS, ClockedLock, Outside, Service, World, check, clear, look

#: How many schedules there are, in all and for one test; more where somebody asks for more.
SCHEDULES: Final = int(os.environ.get("HANDRAIL_TEST_SCHEDULES", "240"))
BLOCKS: Final = 8
FIRST_SEED: Final = 20_261_130

SECRET: Final = "what the service signs with"
TOOLS: Final[dict[str, dict[str, Any]]] = {
    "key_and_query": {},
    "key_alone": {"query": False},
    "dying_key_and_query": {"key_valid_for_ms": 90_000},
    "query_alone": {"key_valid_for_ms": 0},
    "nothing": {"key_valid_for_ms": 0, "query": False},
    "deadline_and_query": {"key_valid_for_ms": 0, "not_after": True},
    "agreed": {"approval": "always"},
    "undone": {"undo": {}},
    "undone_by_query_alone": {"undo": {"key_valid_for_ms": 0}},
    "undone_without_proof": {"query": False, "undo": {"key_valid_for_ms": 0, "query": False}},
}
WAYS: Final = ["ok", "ok", "ok", "lost", "dropped", "late:4000", "refused", "busy", "unclear"]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One world for all schedules, with a workflow for every kind of tool."""
    opened = World("sqlite://")
    read = opened.read_tool()
    for kind, tool in TOOLS.items():

        def write(seen: dict[str, Any], kind: str = kind) -> dict[str, Json]:
            _, intent = seen["goal"].split("-for-")
            return {"kind": "tool", "tool": kind, "arguments": {"id": intent}}

        make = opened.compensable_tool if "undo" in tool else opened.write_tool
        opened.workflow(
            read,
            make(kind, report_secret=SECRET, **tool),
            plan=[look(q=1), write, look(q=2)],
            name=kind,
            budget=Budget(tool_calls=8, model_calls=12, deadline_ms=400_000),
        )
    yield opened
    clear(opened.control)
    opened.close()


class Schedule:
    """One schedule: everything that it does follows from its seed."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.chance = world, random.Random(seed)
        clear(world.control)
        world.service, world.lock = Service(world.clock), ClockedLock(world.clock)
        world.reconciler = world.sweeper()
        self.story: list[str] = [f"seed {seed}"]
        self.old: list[StepMessage] = []
        self.kind = self.chance.choice([*TOOLS])
        intents = self.chance.choice([["a"], ["a", "a"], ["a", "b"]])
        self.runs = [
            world.start(self.kind, run_id=f"r{n}-for-{intent}") for n, intent in enumerate(intents)
        ]
        world.service.script = [self.chance.choice(WAYS) for _ in range(self.chance.randrange(5))]
        self.tell(f"{self.kind}, runs {self.runs}, writes go {world.service.script}")

    @property
    def undone(self) -> bool:
        """Whether the write can be undone."""
        return "undo" in TOOLS[self.kind]

    def tell(self, what: str) -> None:
        self.story.append(f"{self.world.clock.ms % 10**8} {what}")

    # ---- trouble ---------------------------------------------------------------------------------

    def trouble(self, acts: int, depth: int) -> None:
        """Let this and that happen, in any order."""
        for _ in range(acts):
            run = self.chance.choice(self.runs)
            act = self.chance.choices(
                [
                    *(self.deliver, self.again, self.pass_time, self.sweep, self.flush),
                    *(self.cancel, self.hold, self.report),
                ],
                [10, 3, 6, 6, 1, 1, 2, 4],
            )[0]
            act(run, depth)

    def deliver(self, run: str, depth: int) -> None:
        message = self.world.message(run)
        self.old.append(message)
        self.work(message, depth)

    def again(self, run: str, depth: int) -> None:
        if self.old:
            self.work(self.chance.choice(self.old), depth)

    def pass_time(self, run: str, depth: int) -> None:
        ms = self.chance.choice([200, 1_000, 2_500, 11_000, 31_000, 70_000])
        self.tell(f"{ms} ms pass")
        self.world.advance(ms)

    def sweep(self, run: str, depth: int) -> None:
        self.tell("sweep")
        if self.undone and self.chance.random() < 0.3:
            at, outside = self.chance.randrange(30), Outside()
            outside.when = lambda place: len(outside.places) == at + 1
            outside.then = lambda: self.die(outside)
            self.world.sweep(outside)
            return
        self.breaking(self.world.reconciler.sweep)

    def flush(self, run: str, depth: int) -> None:
        self.tell("the lock is flushed")
        self.world.lock.held.clear()

    def cancel(self, run: str, depth: int) -> None:
        self.tell(f"cancel {run}")
        self.world.fleet.cancel(run)

    def hold(self, run: str, depth: int) -> None:
        """A person pauses something, or lets it go on."""
        scopes = [("fleet", ""), ("tool", self.kind), ("tenant", "default")]
        scope, name = self.chance.choice(scopes)
        if self.world.fleet.resume(scope, name):
            self.tell(f"resumed {scope} {name}")
        else:
            self.tell(f"paused {scope} {name}")
            self.world.fleet.pause(scope, name, reason="trouble")

    def report(self, run: str, depth: int) -> None:
        """The provider reports by itself what it has done by now, as it is."""
        intent = f"save:{run.split('-for-')[1]}"
        record = self.world.service.records.get(intent)
        fields: dict[str, Any] = {
            "intent_key": intent,
            "answer": "absent" if record is None else "applied",
            "evidence": record,
            "report_id": f"event-{len(self.story)}",
            "sent_at": self.world.clock.ms,
        }
        try:
            came_to = self.world.fleet.report(**fields, signature=sign_report(SECRET, **fields))
        except UnknownIntent:
            return  # nothing was sent yet
        self.tell(f"report of {intent}, {fields['answer']}: {came_to}")

    def breaking(self, act: Any) -> None:
        """Do something, perhaps with a connection that breaks in the middle of it."""
        breaks = self.chance.random() < 0.1
        if breaks:
            number, executed = self.chance.randrange(1, 25), self.chance.random() < 0.5
            self.tell(f"the connection breaks at {number}, executed: {executed}")
            self.world.database.lose(number, executed=executed)
        try:
            act()
        except Exception as error:
            if not breaks:
                raise
            self.tell(f"given up: {type(error).__name__}")
        finally:
            self.world.database.lose(0, executed=False)

    def work(self, message: StepMessage, depth: int) -> None:
        """Let a worker take a message, and perhaps die or pause at one of its calls."""
        outside = Outside()
        fate = self.chance.random()
        at = self.chance.randrange(22)
        self.tell(f"{'  ' * depth}a worker takes {message.run_id} at epoch {message.epoch}")
        if fate < 0.3:
            outside.when = lambda place: len(outside.places) == at + 1
            outside.then = lambda: self.die(outside)
        elif fate < 0.55 and depth < 2:
            outside.when = lambda place: len(outside.places) == at + 1
            outside.then = lambda: self.pause(outside, depth)
        elif self.undone:
            outside.when = lambda place: place == "after write tool"
            outside.then = lambda: self.cancel(message.run_id, depth)

        def step() -> None:
            self.world.step(message.run_id, message=message, outside=outside)

        self.breaking(step if depth == 0 else lambda: self.world.meanwhile(step))

    def die(self, outside: Outside) -> None:
        self.tell(f"it dies {outside.places[-1]}")
        outside.die()

    def pause(self, outside: Outside, depth: int) -> None:
        """Let the world go on while a worker stands still.

        Between its last look and the call nothing can keep it from waking up late: there only a key
        that never dies, or a deadline that the service enforces, covers a stall of any length. The
        other tools count on the bound that was declared.
        """
        place = outside.places[-1]
        self.tell(f"it pauses {place}")
        within, self.world.outside = self.world.outside, Outside()
        tool = TOOLS[self.kind]
        if place == "before write tool" and "key_valid_for_ms" in tool and "not_after" not in tool:
            self.world.advance(self.chance.randrange(STALL_MS))
            self.breaking(self.world.reconciler.sweep)
        else:
            self.trouble(self.chance.randrange(1, 5), depth + 1)
        self.world.outside = within
        self.tell("it goes on")

    # ---- peace -----------------------------------------------------------------------------------

    def peace(self) -> None:
        """No fault any more: every run must come to rest by itself."""
        self.tell("peace")
        self.world.service.script = []
        for pause in self.world.fleet.pauses():
            self.world.fleet.resume(pause.scope, pause.name)
        self.world.drive(*self.runs)
        for run in self.runs:
            if self.world.row(run)["status"] == "awaiting_approval":
                self.tell(f"approve {run}")
                agree(self.world.fleet, run)
        self.world.drive(*self.runs)

    def judge(self) -> None:
        """Hold what the ledger says against the service's own records."""
        world, performed = self.world, self.world.service.performed
        assert len(performed) == len({*performed}), f"one intent twice: {performed}"
        for run in self.runs:
            check(world, run)
            row = world.row(run)
            assert world.fleet.get(run).rests, row["status"]
            intent = f"save:{run.split('-for-')[1]}"
            found = world.rows(EFFECT, id=upstream_key("default", intent))
            status = found[0]["status"] if found else None
            if row["status"] == "completed" and row["observation_count"] == 3:
                last = world.ledger.observations(run)[1]["text"]
                assert intent in performed or last.endswith(":busy"), "completed without it"
            if row["status"] in ("failed", "cancelled", "budget_exhausted"):
                assert status not in ("dispatched", "unknown")
            if status in ("absent", "planned"):
                assert intent not in performed, "it took effect, and is recorded as absent"
            if status == "applied":
                assert intent in performed, "recorded as applied, and it never happened"
            self.nothing_after_the_wish(run)
            self.undone_if_it_says_so(run)

    def nothing_after_the_wish(self, run: str) -> None:
        """No write's dispatch is committed after the wish to cancel."""
        events = self.world.trace(run)
        wished = [event["seq"] for event in events if event["type"] == "cancel.requested"]
        sent = [
            event["seq"]
            for event in events
            if event["type"] == "tool.started" and event["detail"]["idempotency_key_hash"]
            if "compensates" not in event["detail"]
        ]
        assert not wished or not sent or sent[-1] < wished[0]

    def undone_if_it_says_so(self, run: str) -> None:
        """A run is compensated if and only if its write has happened and was undone."""
        world, performed = self.world, self.world.service.performed
        row, (_, intent) = world.row(run), run.split("-for-")
        undo = world.rows(EFFECT, id=upstream_key("default", f"undo:{intent}"))
        if row["status"] == "compensated":
            assert {f"save:{intent}", f"undo:{intent}"} <= {*performed}, "it was not undone"
        if f"undo:{intent}" in performed:
            assert f"save:{intent}" in performed, "undone, and it never happened"
            assert undo[0]["status"] in ("applied", "handed_off", "contradicted"), undo
        elif undo:
            assert undo[0]["status"] != "applied", "recorded as undone, and it was not"


EFFECT: Final = "SELECT status FROM handrail_effect WHERE id = :id"


def play(world: World, seed: int) -> Schedule:
    """Play one schedule and judge it; a failure tells its story."""
    schedule = Schedule(world, seed)
    try:
        schedule.trouble(schedule.chance.randrange(3, 14), 0)
        schedule.peace()
        schedule.judge()
    except Exception as error:
        raise AssertionError("\n".join([*schedule.story, repr(error)])) from error
    return schedule


@pytest.mark.accept("FLT-03", "FLT-04")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_schedule_breaks_a_promise(world: World, block: int) -> None:
    one = os.environ.get("HANDRAIL_TEST_SEED")
    seeds = range(FIRST_SEED + block, FIRST_SEED + SCHEDULES, BLOCKS)
    for seed in [int(one)] if one else seeds:
        play(world, seed)


def test_the_schedules_reach_what_they_are_for(world: World) -> None:
    """A silent search proves nothing: each kind of trouble must have happened, and each end."""
    told, ends = "", set()
    for seed in range(FIRST_SEED, FIRST_SEED + 90):
        schedule = play(world, seed)
        told += "\n".join(schedule.story)
        ends |= {world.row(run)["status"] for run in schedule.runs}

    for what in ("it dies", "it pauses", "cancel", "connection breaks", "flushed", "approve"):
        assert what in told, what
    for what in ("paused fleet", "resumed tool", "applied: kept", "absent: kept"):
        assert what in told, what
    assert ends >= {"completed", "cancelled", "handed_off", "failed", "compensated"}


def test_a_schedule_can_be_played_again(world: World) -> None:
    stories = [play(world, FIRST_SEED + 7).story for _ in range(2)]
    plain = [[line.partition(" ")[2] for line in story] for story in stories]

    assert plain[0] == plain[1]


def test_a_service_that_forgets_its_keys_is_caught(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge can see: with a lie at the service, some schedule performs an intent twice."""
    arrive = Service.arrive

    def forgetful(
        service: Service, call: Any, arguments: Any, valid_ms: int, deadline: bool = False
    ) -> Json:
        return arrive(service, call, arguments, 0, deadline)

    monkeypatch.setattr(Service, "arrive", forgetful)
    with pytest.raises(AssertionError, match="one intent twice"):
        for seed in range(FIRST_SEED, FIRST_SEED + 200):
            play(world, seed)
