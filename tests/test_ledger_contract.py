"""The ledger keeps its promises on SQLite and on PostgreSQL, driven by the real step.

Every test runs on both. At its end every run that it made is held against what no fault may break
(`tests.world.check`): a trace without a gap whose moves, replayed through the table, give the
stored status, one stop an episode, no end over a doubt, no call that no charge pays for.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import psycopg
import pytest

from handrail.agent.approvals import ApprovalRefused
from handrail.agent.budget import Budget, BudgetLeft, Phase, charge
from handrail.agent.effects import EffectStatus, Terms, upstream_key
from handrail.agent.fixed import Commit, Confirm, Read
from handrail.agent.people import MAX_WORDS
from handrail.agent.protocol import Locked, Ruling
from handrail.agent.stage import Action
from handrail.agent.status import Reason, RunStatus
from handrail.agent.tools import FOREVER
from handrail.broker.message import StepMessage
from handrail.canonical import Json
from handrail.errors import InvariantBroken, ToolRefused
from handrail.fleet import InvalidQuery, InvalidRun
from handrail.ledger.errors import (
    DatabaseUnavailable,
    RunExists,
    UnknownRun,
)
from handrail.ledger.ledger import Claim, Ledger
from handrail.ledger.session import ConnectionLost
from handrail.tasks.calls import ToolCall
from handrail.testing.people import APPROVER, OPERATOR, agree, disagree
from tests.world import (
    KINDS,
    LEASE_MS,
    SECOND,
    SETTLED_MS,
    Outside,
    World,
    check,
    look,
    open_world,
    save,
    save_for_goal,
)

R = RunStatus


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An empty world on each database."""
    with open_world(request) as opened:
        yield opened


# ---- accepting -----------------------------------------------------------------------------------


def test_a_run_is_accepted_once_whatever_happens_to_the_answer(world: World) -> None:
    world.workflow(world.read_tool())
    for number, executed in enumerate((False, True)):
        last = "WITH run AS ( INSERT" if world.postgres else "COMMIT"
        world.database.lose(1, executed=executed, only=last)
        run = world.start(run_id=f"r{number}")

        assert world.database.lost and run == f"r{number}"
        assert world.drive(run).status == "completed"
        assert len(world.trace(run, "run.accepted")) == 1


def test_a_double_click_is_one_run(world: World) -> None:
    world.workflow(world.read_tool())
    first = world.start(run_id="a", dedupe_key="order-42")

    assert world.start(run_id="b", dedupe_key="order-42") == first
    assert world.start(run_id="c", dedupe_key="order-42", tenant="another") == "c"
    assert world.start(run_id="a") == first  # the very same again
    with pytest.raises(RunExists):
        world.fleet.enqueue("draft", goal="another goal", run_id="a")


@pytest.mark.parametrize("other", [{"tenant": "another"}, {"principal": "eve"}])
def test_nobody_is_given_the_run_of_another_whose_id_they_name(world: World, other: Any) -> None:
    world.workflow(world.read_tool())
    world.start(run_id="a")

    with pytest.raises(RunExists):
        world.start(run_id="a", **other)


@pytest.mark.parametrize(
    "asked",
    [
        {"limit": -1},
        {"limit": 0},
        {"limit": 10_001},
        {"limit": "all"},
        {"limit": True},
        {"status": "lost"},
        {"status": "\x00"},
        {"workflow": "\x00"},
        {"workflow": 7},
    ],
)
def test_what_cannot_be_looked_up_is_refused_on_either_database(world: World, asked: Any) -> None:
    with pytest.raises(InvalidQuery) as refused:
        world.fleet.runs(**asked)
    assert refused.value.code == "invalid-query"


def test_runs_that_are_accepted_at_once_under_one_key_are_one_run(world: World) -> None:
    world.workflow(world.read_tool())
    at_once = threading.Barrier(4)

    def accept(number: int) -> str:
        at_once.wait()
        return world.fleet.enqueue("draft", goal="g", run_id=f"r{number}", dedupe_key="k")

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(accept, range(4)))) == 1


def test_a_key_that_could_not_be_indexed_is_refused_before_anything_is_written(
    world: World,
) -> None:
    world.workflow(world.read_tool())
    for key in ("", "x" * 1_001, "\U0001f600" * 84, 7):
        with pytest.raises(InvalidRun, match="dedupe_key"):
            world.start(dedupe_key=key)

    assert world.rows("SELECT id FROM handrail_run") == []
    hard_to_compress = "".join(chr(0x4E00 + number * 37 % 20_000) for number in range(166))
    assert world.start(dedupe_key=hard_to_compress) == "run-1"


# ---- the claim -----------------------------------------------------------------------------------

LEFT: Final = ("steps", "model_calls", "tool_calls", "tokens", "cost_microusd", "output_bytes")
AMOUNTS: Final = [
    (steps, model_calls, tool_calls, tokens, cost, output)
    for steps, model_calls, tool_calls in itertools.product((0, 1, 7), repeat=3)
    for tokens, cost, output in ((1, 1, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0))
]


@pytest.mark.accept("FLT-14")
def test_the_claim_charges_exactly_what_the_pure_rule_says(world: World) -> None:
    """For every phase, every budget at 0, 1 and more, the deadline passed or not, and a wish."""
    world.workflow(world.read_tool())
    world.start(run_id="pattern")
    cases = [
        (f"{phase}-{late}-{wished}-{number}", phase, late, wished, amounts)
        for phase, late, wished in itertools.product(Phase, (False, True), (False, True))
        for number, amounts in enumerate(AMOUNTS)
        if not wished or number % 9 == 0  # a wish refuses whatever is left
    ]
    _copies(world, cases)

    for run_id, phase, late, wished, amounts in cases:
        amount: dict[str, Any] = dict(zip(LEFT, amounts, strict=True))
        left = BudgetLeft(**amount)
        expected = charge(left, phase, cancelled=wished, remaining_ms=0 if late else 60_000)
        claim = world.ledger.claim(run_id, 0, holder="w", known=["draft@1"])
        if expected is Reason.CANCELLED:
            assert claim is None, run_id  # the sweep's: nobody starts anything
            continue
        assert claim is not None, run_id
        if isinstance(expected, Reason):
            assert (claim.refusal, claim.state.left) == (expected, left), run_id
        else:
            assert (claim.refusal, claim.state.left) == (None, expected), run_id
    world.database.run("DELETE FROM handrail_run WHERE id <> 'pattern'", {})  # they have no trace


def _copies(world: World, cases: Sequence[tuple[str, Phase, bool, bool, tuple[int, ...]]]) -> None:
    row = world.row("pattern")
    names = ", ".join(row)
    values = ", ".join(f":{name}" for name in row)
    with world.control.transaction() as tx:
        for run_id, phase, late, wished, amounts in cases:
            changed = {
                "id": run_id,
                "phase": phase.value,
                "deadline_at": world.clock.ms + (0 if late else 60_000),
                "cancel_requested_at": world.clock.ms if wished else None,
                **{f"{name}_left": n for name, n in zip(LEFT, amounts, strict=True)},
            }
            tx.run(f"INSERT INTO handrail_run ({names}) VALUES ({values})", {**row, **changed})


def test_a_run_past_its_hard_expiry_starts_nothing_and_says_why(world: World) -> None:
    world.workflow(world.read_tool())
    run = world.start(budget={"expires_ms": 1_000})
    world.advance(1_000)
    world.step(run)

    assert world.row(run)["reason"] == "expired"
    assert world.service.calls.total() == 0


def test_a_claim_is_for_one_worker_and_one_message(world: World) -> None:
    world.workflow(world.read_tool())
    run = world.start()
    late = world.message(run)
    first = world.claim(run)

    assert first is not None
    assert world.claim(run) is None  # leased
    assert world.claim(run, late.epoch) is None  # a duplicate
    assert world.ledger.claim("nobody", 0, holder="w", known=["draft@1"]) is None
    world.advance(LEASE_MS)
    assert world.claim(run) is None  # what became of it is for the sweep to say
    world.reconciler.sweep()
    due = world.row(run)["epoch"]
    assert due > first.epoch
    for other in (late.epoch, first.epoch, due + 1):  # it is due, but not by that message
        assert world.claim(run, other) is None
    second = world.claim(run)
    assert second is not None and second.epoch > due and second.attempts == 2


def test_a_claim_needs_the_pinned_version_of_the_workflow(world: World) -> None:
    world.workflow(world.read_tool())
    run = world.start()

    assert world.ledger.claim(run, 0, holder="w", known=["draft@2", "other@1"]) is None
    assert world.ledger.claim(run, 0, holder="w", known=["other@1", "draft@1"]) is not None


def test_a_step_that_is_due_later_is_not_claimed_before(world: World) -> None:
    world.workflow(world.read_tool(), world.write_tool(), plan=[save(id=1)])
    run = world.start()
    world.lock.away = True
    world.step(run)  # gives its lease back for a second

    assert world.row(run)["due_at"] == world.clock.ms + SECOND
    assert world.claim(run) is None
    world.advance(SECOND)
    assert world.claim(run) is not None


def test_many_claimants_at_once_never_overspend(world: World) -> None:
    """Counters are conditional statements: as many grants as there are calls, and no more."""
    world.workflow(world.read_tool())
    run = world.start(budget={"steps": 16, "model_calls": 12, "tool_calls": 5})
    granted: Counter[str] = Counter()

    def work(name: str) -> Counter[str]:
        mine: Counter[str] = Counter()
        for _ in range(400):
            epoch = world.ledger.read(run)["epoch"]
            claim = world.ledger.claim(run, epoch, holder=name, known=["draft@1"])
            if claim is None:
                continue
            if claim.refusal is not None:
                mine[claim.refusal] += 1
                return mine
            mine["granted"] += 1
            mine["reads"] += claim.state.left.tool_calls_reserved
            for _ in range(1_000):  # while another is at the row, it is not given back
                if world.ledger.give_back([claim.claim_id], unused=[], holder=name):
                    break
        return mine

    with ThreadPoolExecutor(4) as pool:
        for counted in pool.map(work, "abcd"):
            granted += counted

    assert granted == {"granted": 12, "reads": 5, "model-call-budget-exhausted": 1}
    assert world.used(run)["model_calls"] == 12 and world.used(run)["tool_calls"] == 5


# ---- a read-only round ---------------------------------------------------------------------------


def _writes(statements: Sequence[str]) -> int:
    """How many units of writing there are: transactions, and statements outside of them."""
    units, inside = 0, False
    for statement in statements:
        if statement.startswith("BEGIN"):
            inside = True
        elif statement == "COMMIT":
            units, inside = units + 1, False
        elif not inside and not statement.startswith("SELECT"):
            units += 1
    return units


def test_a_read_only_round_writes_twice(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(q=1)])
    run = world.start()
    world.database.statements.clear()
    world.step(run)

    assert world.service.calls[f"read {run}"] == 1
    assert _writes(world.database.statements) == 2
    if world.postgres:
        assert len(world.database.statements) == 2  # the claim and the commit, and nothing else


@pytest.mark.accept("FLT-19")
def test_no_connection_is_in_a_transaction_while_a_call_is_under_way(world: World) -> None:
    world.workflow(world.read_tool(), world.write_tool(), plan=[look(q=1), save(id=1)])
    run, seen = world.start(), []

    def idle() -> None:
        if world.postgres:
            states = world.rows(
                "SELECT state FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'handrail' AND pid <> pg_backend_pid()"
            )
            seen.append([row["state"] for row in states])
        else:
            seen.append(["busy" if c.in_transaction else "idle" for c in world.database._open])

    calls = ("before model", "before read tool", "before write tool", "before verify")
    for _ in range(3):
        world.step(run, outside=Outside(lambda place: place in calls, idle))

    assert world.row(run)["status"] == "completed"
    assert len(seen) == 6 and all(states and {*states} == {"idle"} for states in seen)


@pytest.mark.accept("STM-13")
def test_state_and_trace_are_written_together_or_not_at_all(world: World) -> None:
    """The connection breaks at every statement of a round, before and after it took effect."""
    world.workflow(world.read_tool(), plan=[look(q=1)])
    for number, executed in itertools.product(range(1, 30), (False, True)):
        run = world.start(run_id=f"r{number}{executed}")
        world.database.lose(number, executed=executed)
        world.step(run)
        lost = world.database.lost
        world.database.lose(0, executed=False)

        row, events = world.row(run), world.trace(run)
        observed = world.rows("SELECT seq FROM handrail_observation WHERE run_id = :id", id=run)
        moved = [event for event in events if event["type"] == "state.transitioned"]
        assert row["state_version"] == row["step"] == len(observed) == len(moved)
        assert row["trace_seq"] == len(events)
        check(world, run)
        assert world.drive(run).status == "completed"
        if not lost:
            break
    else:
        raise AssertionError("a round has fewer statements than that")


def test_a_round_without_an_event_leaves_no_row_in_the_trace(world: World) -> None:
    """Two rounds that record nothing would otherwise claim the same number."""
    tool = world.read_tool()
    world.workflow(
        stages=[
            Read("first", tool, lambda run: {"q": 1}),
            Read("second", tool, lambda run: {"q": 2}),
        ]
    )
    run = world.start()
    assert world.claim(run) is not None  # and its worker is never heard of again
    world.advance(LEASE_MS)
    world.reconciler.sweep()

    assert world.drive(run).status == "completed"
    assert world.rows("SELECT seq FROM handrail_trace WHERE count = 0") == []


def test_a_commit_that_comes_too_late_or_twice_changes_nothing(world: World) -> None:
    world.workflow(world.read_tool())
    run = world.start()
    claim = world.claim(run)
    assert claim is not None
    ruling = Ruling(state=replace(claim.state, status=R.RUNNING))
    taken_over = replace(claim, epoch=claim.epoch + 1)

    assert world.commit(taken_over, ruling) is False
    assert world.commit(claim, ruling) is not False
    before = world.row(run)
    assert world.commit(claim, ruling) is False
    assert world.row(run) == before


@pytest.mark.accept("FLT-01")
def test_a_message_that_comes_twice_is_one_step(world: World) -> None:
    world.workflow(world.read_tool(), world.write_tool(), plan=[look(q=1), save_for_goal])

    def go(run: str, copies: int) -> Any:
        shown = []
        while not world.fleet.get(run).ended:
            message = world.message(run)
            for _ in range(copies):
                world.step(run, message=message)
        for event in world.trace(run):
            shown.append((event["type"], event["step"], event["detail"].get("stateVersion")))
        return shown, world.used(run), world.effect(f"save:{run}")["token"]

    assert go(world.start(), copies=1) == go(world.start(), copies=2)


@pytest.mark.accept("FLT-01")
def test_two_workers_that_get_one_message_at_once_do_one_step(world: World) -> None:
    world.workflow(world.read_tool(), world.write_tool(), plan=[look(q=1), save_for_goal])
    run = world.start()

    while not world.fleet.get(run).ended:
        message, at_once = world.message(run), threading.Barrier(3)

        def work(message: StepMessage = message, at_once: threading.Barrier = at_once) -> None:
            runtime = world.worker()
            at_once.wait()
            asyncio.run(_step(runtime, message))

        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(work) for _ in range(3)]:
                done.result()

    assert world.used(run)["model_calls"] == 3 and world.used(run)["tool_calls"] == 2
    assert world.service.performed == [f"save:{run}"]
    assert world.service.calls[f"model {run}"] == 3


async def _step(runtime: Any, message: StepMessage) -> None:
    from handrail.tasks.step import run_step

    await run_step(runtime, message)


@pytest.mark.accept("FLT-21")
def test_a_message_says_nothing_that_the_row_does_not(world: World) -> None:
    """Its deadline, budget and step may be old, wrong or forged: the claim's own reading counts."""
    world.workflow(world.read_tool(), plan=[look(q=n) for n in range(9)])
    run = world.start(budget={"model_calls": 1})
    forged = StepMessage(
        run_id=run, step=77, epoch=0, deadline_at=1, remaining_ms=-5, budget={"model_calls": 99}
    )
    world.step(run, message=forged)
    assert world.service.calls[f"model {run}"] == 1  # not late, whatever it says
    rich = world.message(run).model_copy(update={"budget": {"model_calls": 99}})
    world.step(run, message=rich)

    assert world.row(run)["reason"] == "model-call-budget-exhausted"
    assert world.service.calls[f"model {run}"] == 1
    for epoch in (0, 1, 2, 50):
        world.step(run, message=rich.model_copy(update={"epoch": epoch}))
    assert world.row(run)["trace_seq"] == len(world.trace(run))


@pytest.mark.accept("FLT-14")
@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({"steps": 0}, "step-budget-exhausted"),
        ({"model_calls": 0}, "model-call-budget-exhausted"),
        ({"tokens": 0}, "token-budget-exhausted"),
        ({"cost_microusd": 0}, "cost-budget-exhausted"),
        ({"output_bytes": 0}, "output-budget-exhausted"),
        ({"deadline_ms": 0}, "deadline-exhausted"),
    ],
)
def test_a_step_whose_budget_is_spent_records_that_stop_and_starts_nothing(
    world: World, budget: dict[str, int], reason: str
) -> None:
    world.workflow(world.read_tool())
    run = world.start(budget=budget)
    world.step(run)

    row = world.row(run)
    assert (row["status"], row["reason"]) == ("budget_exhausted", reason)
    assert not any(world.used(run).values()) and world.service.calls.total() == 0
    assert world.messages == [] and world.reconciler.sweep() == 0


@pytest.mark.accept("FLT-05")
def test_fingerprints_are_kept_over_a_restart(world: World) -> None:
    async def constant(arguments: dict[str, Json], call: ToolCall) -> Json:
        return "nothing new"

    tool = world.fleet.tool("constant", side_effect="read")(constant)
    again = {"kind": "tool", "tool": "constant", "arguments": {}}
    world.workflow(tool, plan=[again, again])
    run = world.start()
    for _ in range(3):
        world.step(run)  # each by a process of its own, which knows nothing but the ledger
        world.ledger.close()

    assert world.row(run)["reason"] == "repeated-proposal"


# ---- time ----------------------------------------------------------------------------------------


@pytest.mark.accept("FLT-06")
def test_the_deadline_is_one_instant_whoever_works_and_whenever(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(q=n) for n in range(9)])
    run = world.start(budget={"deadline_ms": 40_000})
    deadline_at = world.row(run)["deadline_at"]
    for _ in range(3):
        world.step(run)
        world.ledger.close()  # a restart
        world.advance(9_000)
        claim = world.claim(run)
        assert claim is not None and claim.deadline_at == deadline_at
        assert claim.remaining_ms == deadline_at - world.clock.ms
        world.ledger.give_back([claim.claim_id], unused=[claim.claim_id], holder="a worker")
    world.advance(13_000)
    world.step(run)

    assert world.clock.ms == deadline_at
    assert world.row(run)["reason"] == "deadline-exhausted"


@pytest.mark.accept("FLT-06")
def test_a_workers_own_clock_decides_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wall clock may be hours off, its monotonic one anything: only differences of it count."""
    world.workflow(world.read_tool(), plan=[look(q=n) for n in range(9)])
    run = world.start(budget={"deadline_ms": 40_000})
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 10**19)
    for number in range(3):
        runtime = world.worker()
        runtime.clock = lambda number=number: 7_777_777.0 * number + world.clock.ms / 1000  # type: ignore[misc]
        world.step(run, runtime=runtime)
        world.advance(10_000)

    assert world.row(run)["step"] == 3
    world.advance(10_000)
    world.step(run)
    assert world.row(run)["reason"] == "deadline-exhausted"


@pytest.mark.accept("FLT-06")
def test_workers_whose_clocks_are_apart_stop_no_further_apart_than_that(world: World) -> None:
    """On PostgreSQL not at all: there is one clock, the database's."""
    world.workflow(world.read_tool())
    start, refused = world.clock.ms, dict[int, int]()
    ahead = 2 * SECOND
    other = Ledger(world.url, clock=lambda: world.clock.ms + ahead, lease_ms=LEASE_MS)
    runs = {n: world.start(run_id=f"r{n}", budget={"deadline_ms": 5_000}) for n in range(12)}
    for number, ledger in itertools.product(range(12), (world.ledger, other)):
        world.advance(max(0, start + number * 500 - world.clock.ms))
        row = world.row(runs[number])
        claim = ledger.claim(row["id"], row["epoch"], holder="w", known=["draft@1"])
        assert claim is not None
        if claim.refusal is not None:
            refused.setdefault(id(ledger), world.clock.ms - start)
        ledger.give_back([claim.claim_id], unused=[claim.claim_id], holder="w")
    other.close()

    assert refused[id(world.ledger)] == 5_000
    assert refused[id(other)] == (5_000 if world.postgres else 3_000)


@pytest.mark.accept("FLT-06")
def test_time_in_a_call_is_counted_by_the_monotonic_clock(world: World) -> None:
    """A worker that was paused for longer than the deadline starts no further call."""
    world.workflow(world.read_tool(), plan=[look(q=1)])
    run = world.start(budget={"deadline_ms": 20_000})
    runtime = world.worker()
    paused = [0.0]
    runtime.clock = lambda: world.clock.ms / 1000 + paused[0]

    def pause() -> None:
        paused[0] = 20.0  # the ledger's clock stands still: nobody else has noticed yet

    world.step(run, runtime=runtime, outside=Outside(lambda p: p == "after model", pause))

    assert world.row(run)["reason"] == "deadline-exhausted"
    assert world.service.calls[f"read {run}"] == 0


def test_the_clock_is_read_after_the_wait_for_a_lock(world: World) -> None:
    """A decision that waited for another's must not believe the time of its own beginning."""
    world.workflow(world.read_tool())
    run, seen = world.start(), []

    def decide(locked: Locked) -> None:
        seen.append(locked.now)

    with world.control.transaction() as tx:
        locks = "FOR UPDATE" if world.postgres else ""
        tx.run(f"SELECT id FROM handrail_run WHERE id = :id {locks}", {"id": run})
        waiting = threading.Thread(target=lambda: world.rule(run, decide))
        waiting.start()
        _until_blocked(world)
        later = world.clock.ms = world.clock.ms + 7_000
        if world.postgres:
            tx.run("UPDATE test_clock SET at = :at", {"at": later})
    waiting.join()

    assert seen == [later]


def _until_blocked(world: World) -> None:
    """Wait until another connection waits for our lock (SQLite has no way to tell: a moment)."""
    limit = time.monotonic() + 10
    while world.postgres and time.monotonic() < limit:
        with closing(psycopg.connect(**_address(world))) as other:
            blocked = other.execute(
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                " AND datname = current_database()"
            ).fetchall()
        if blocked:
            return
    time.sleep(0.05)


def _address(world: World) -> dict[str, Any]:
    url = world.control.url
    host = url.query["host"]
    return {"host": host, "user": url.username, "dbname": url.database, "autocommit": True}


# ---- dying workers -------------------------------------------------------------------------------

#: What a write's tool promises, and where its run ends at the worst when its worker dies.
TOOLS: Final[dict[str, dict[str, Any]]] = {
    "key and query": {},
    "key alone": {"query": False},
    "query alone": {"key_valid_for_ms": 0},
    "neither": {"key_valid_for_ms": 0, "query": False},
}


def dies_everywhere(world: World, steps: int, expect: Callable[[str, str], None]) -> set[str]:
    """Let a worker die at each call that it makes in the n-th step of a run, before and after it.

    Each time it is a run of its own, which the fleet then takes up; `expect` judges it. Returns the
    places.
    """
    places: set[str] = set()
    for number in range(100):
        run = world.start(run_id=f"dies-{number}")
        for _ in range(steps - 1):
            world.step(run)
        outside = Outside()
        outside.when = lambda place, own=outside, n=number: len(own.places) == n + 1  # type: ignore[misc]
        outside.then = outside.die
        world.step(run, outside=outside)
        if not outside.dead:
            assert number, "the step made no call at all"
            return places
        places.add(outside.places[-1])
        expect(run, outside.places[-1])
    raise AssertionError("a step has fewer places than that")


@pytest.mark.accept("FLT-02", "FLT-04")
def test_wherever_a_worker_dies_in_a_read_round_the_run_goes_on(world: World) -> None:
    """From its last committed state; what was charged stays charged, the rest is paid again."""
    world.workflow(world.read_tool(), plan=[look(q=1)])

    def goes_on(run: str, place: str) -> None:
        before = world.used(run)
        assert world.drive(run).status == "completed", place
        after = world.used(run)
        claimed, committed = place != "before claim", place == "after commit_each"
        assert before["model_calls"] == claimed, place
        assert after["model_calls"] == 2 + (claimed and not committed), place
        assert world.row(run)["observation_count"] == 1, place

    places = dies_everywhere(world, 1, goes_on)

    assert places >= {
        f"{side} {call}"
        for side in ("before", "after")
        for call in ("claim", "model", "read tool", "commit_each")
    }


@pytest.mark.accept("FLT-04")
def test_a_cancel_does_not_give_back_what_a_dead_worker_has_used(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(q=1)])
    for passed in (0, LEASE_MS):  # its lease lives, or has run out and nobody has looked yet
        run = world.start()
        outside = Outside(lambda place: place == "after read tool")
        outside.then = outside.die
        world.step(run, outside=outside)
        world.advance(passed)
        world.fleet.cancel(run)

        assert world.drive(run).status == "cancelled"
        assert world.used(run)["tool_calls"] == world.service.calls[f"read {run}"] == 1


@pytest.mark.accept("FLT-02")
def test_wherever_a_worker_dies_in_a_verification_the_run_goes_on(world: World) -> None:
    world.workflow(world.read_tool())

    def goes_on(run: str, place: str) -> None:
        assert world.drive(run).status == "completed", place

    assert "before verify" in dies_everywhere(world, 1, goes_on)


@pytest.mark.accept("FLT-02", "FLT-03", "LED-01", "LED-04")
@pytest.mark.parametrize("kind", TOOLS)
def test_wherever_a_worker_dies_in_a_write_round_the_effect_happens_once(
    world: World, kind: str
) -> None:
    """An unknown write is queried, sent again under the same key, or handed to a person."""
    tool = TOOLS[kind]
    world.workflow(world.write_tool(**tool), plan=[save_for_goal])

    def happens_once(run: str, place: str) -> None:
        intent = f"save:{run}"
        sent = world.service.calls[f"write {run}"]
        ended = world.drive(run)
        queries = world.service.calls[f"query {run}"]
        assert world.service.performed.count(intent) <= 1, place
        dispatched = place in IN_DOUBT
        if dispatched and kind == "neither":
            assert ended.status == "handed_off", place
            assert sent == world.service.calls[f"write {run}"], place  # never a blind second
            return
        assert ended.status == "completed", place
        assert world.service.performed.count(intent) == 1, place
        assert (queries > 0) is (dispatched and tool.get("query", True)), place
        assert world.effect(intent)["status"] == "applied"

    places = dies_everywhere(world, 1, happens_once)

    assert places >= IN_DOUBT | {"before checkpoint", "after checkpoint", "after outcome"}


#: Places at which a dispatch is committed, and its outcome is not.
IN_DOUBT: Final = frozenset(
    {
        "after rule",
        "before effect",
        "after effect",
        "before read",
        "after read",
        "before write tool",
        "after write tool",
        "before outcome",
    }
)


@pytest.mark.accept("FLT-17")
def test_after_some_workers_died_on_one_step_a_person_is_asked(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(q=1)], budget=Budget(deadline_ms=10**7))
    run = world.start()
    for died in range(world.reconciler.max_attempts):
        assert world.row(run)["status"] in ("queued", "running"), died
        outside = Outside(lambda place: place == "before model")
        outside.then = outside.die
        world.step(run, outside=outside)
        world.sweep_when_due(run)

    row = world.row(run)
    assert (row["status"], row["reason"]) == ("handed_off", "worker-lost")
    assert [h["reason"] for h in world.ledger.people.handoffs(run_id=run)] == ["worker-lost"]
    assert world.reconciler.sweep() == 0 and world.claim(run) is None


@pytest.mark.accept("FLT-09")
@pytest.mark.parametrize("place", ["before model", "after model", "before read tool"])
def test_a_worker_that_was_taken_over_commits_nothing_and_starts_nothing(
    world: World, place: str
) -> None:
    world.workflow(world.read_tool(), plan=[look(q=1)])
    run = world.start()

    def take_over() -> None:
        world.advance(LEASE_MS)
        world.reconciler.sweep()
        world.meanwhile(lambda: world.step(run))

    worker = world.step(run, outside=Outside(lambda p: p == place, take_over))

    assert worker.counts["fenced"] == 1
    assert world.row(run)["observation_count"] == 1 and world.row(run)["step"] == 1
    started = world.service.calls[f"read {run}"]
    assert started == (2 if place == "before read tool" else 1)  # only what had begun


@pytest.mark.accept("FLT-09")
def test_a_worker_that_was_taken_over_dispatches_nothing(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    for place in ("after checkpoint", "after acquire"):
        run = world.start()

        def take_over() -> None:
            world.advance(LEASE_MS)
            world.reconciler.sweep()

        worker = world.step(run, outside=Outside(lambda p, at=place: p == at, take_over))  # type: ignore[misc]

        assert worker.counts["halt:not-mine"] == 1
        assert world.service.performed == []
    assert world.effect("save:1")["status"] == "planned"


@pytest.mark.accept("FLT-09")
def test_a_fenced_worker_plans_nothing_either(world: World) -> None:
    """Or its arguments would stand in the way of those that its successor proposes."""
    told = iter([save(id=1, text="stale"), save(id=1, text="fresh")])
    world.workflow(world.write_tool(), plan=[lambda seen: next(told)])
    run = world.start()

    def take_over() -> None:
        world.advance(LEASE_MS)
        world.reconciler.sweep()

    world.step(run, outside=Outside(lambda place: place == "after model", take_over))

    assert world.rows("SELECT id FROM handrail_effect") == []
    assert world.drive(run).status == "completed"


@pytest.mark.accept("FLT-09", "LED-12")
def test_the_outcome_of_an_own_dispatch_counts_although_the_lease_is_lost(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    run = world.start()

    def too_long() -> None:
        world.advance(LEASE_MS * 2)
        world.reconciler.sweep()
        assert world.row(run)["status"] == "reconciling"

    world.step(run, outside=Outside(lambda place: place == "after write tool", too_long))

    assert world.effect("save:1")["status"] == "applied"
    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"]


def test_nobody_takes_an_earlier_writes_receipt_for_a_later_ones(world: World) -> None:
    """Both have the token 1; a sender names its effect."""
    world.workflow(world.write_tool(), plan=[save(id=1), save(id=2)])
    run = world.start()

    def go_on_without_it() -> None:
        world.advance(LEASE_MS * 2)
        world.reconciler.sweep()  # in doubt
        world.advance(SECOND)
        world.reconciler.sweep()  # proved by its record
        world.meanwhile(lambda: world.step(run))  # taken up

        def late_word() -> None:
            assert world.effect("save:2")["status"] == "dispatched"
            raise_pause.append(True)

        raise_pause: list[bool] = []
        outside = Outside(lambda place: place == "before write tool", late_word)
        world.service.script = ["lost"]
        world.meanwhile(lambda: world.step(run, outside=outside))
        assert raise_pause

    world.step(run, outside=Outside(lambda place: place == "after write tool", go_on_without_it))

    assert world.effect("save:2")["status"] == "unknown"
    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1", "save:2"]


# ---- writes --------------------------------------------------------------------------------------


@pytest.mark.accept("LED-01")
@pytest.mark.parametrize(
    ("way", "ends"),
    [
        ("ok", "applied"),
        ("refused", "absent"),
        ("busy", "absent"),
        ("lost", "unknown"),
        ("dropped", "unknown"),
        ("unclear", "unknown"),
        ("late:100", "unknown"),
    ],
)
def test_a_write_is_on_record_before_it_leaves_and_has_an_end(
    world: World, way: str, ends: str
) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    run, seen = world.start(), {}
    world.service.script = [way]

    def record(place: str) -> bool:
        found = world.rows("SELECT * FROM handrail_effect WHERE intent_key = 'save:1'")
        seen[place] = dict(found[0]) if found else {}
        return False

    world.step(run, outside=Outside(record))

    assert seen["before checkpoint"] == {}
    assert seen["after checkpoint"]["status"] == "planned"
    before = seen["before write tool"]
    assert (before["status"], before["tool"], before["owner_run_id"]) == ("dispatched", "save", run)
    assert before["id"] == upstream_key("default", "save:1") and before["arguments_hash"]
    assert world.effect("save:1")["status"] == ends
    world.drive(run)


@pytest.mark.accept("LED-02")
def test_of_two_runs_with_one_intent_one_is_sent_and_the_other_gets_its_result(
    world: World,
) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    first, second = world.start(), world.start()
    charged = {}

    def other() -> None:
        world.meanwhile(lambda: world.step(second))
        charged.update(world.used(second))

    world.step(first, outside=Outside(lambda place: place == "before write tool", other))

    assert charged["tool_calls"] == 0
    assert world.row(second)["status"] == "running"  # it has given its lease back and waits
    assert world.drive(first).status == world.drive(second).status == "completed"
    assert world.service.performed == ["save:1"] and world.used(second)["tool_calls"] == 0
    assert world.fleet.get(first).observations == world.fleet.get(second).observations


@pytest.mark.accept("LED-02")
def test_workers_that_race_for_one_intent_send_it_once(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    for attempt in range(3):
        runs = [world.start(run_id=f"race-{attempt}-{n}") for n in range(4)]
        messages = [world.message(run) for run in runs]
        at_once = threading.Barrier(len(runs))

        def work(message: StepMessage, at_once: threading.Barrier = at_once) -> None:
            runtime = world.worker()
            at_once.wait()
            asyncio.run(_step(runtime, message))

        with ThreadPoolExecutor(len(runs)) as pool:
            for done in [pool.submit(work, message) for message in messages]:
                done.result()
        assert all(world.drive(run).status == "completed" for run in runs)

    assert world.service.performed == ["save:1"]
    assert sum(world.used(run["id"])["tool_calls"] for run in world.rows(ALL_RUNS)) == 1


ALL_RUNS: Final = "SELECT id FROM handrail_run ORDER BY id"


@pytest.mark.accept("LED-03", "LED-05")
def test_an_intent_that_took_effect_gives_its_recorded_result(world: World) -> None:
    """In a later step of the same run, and in another run of the tenant; the tool is not called."""
    told = iter([save(id=1), look(q=1), save(id=1)])
    done = {"kind": "complete", "answer": "ok"}
    propose = [lambda seen: next(told, done)] * 3
    world.workflow(world.read_tool(), world.write_tool(), plan=propose)
    first = world.start()
    assert world.drive(first).status == "completed"
    told = iter([save(id=1)])
    second = world.start()
    assert world.drive(second).status == "completed"

    assert world.service.performed == ["save:1"]
    assert world.used(first)["tool_calls"] == 2 and world.used(second)["tool_calls"] == 0
    assert len(world.rows("SELECT id FROM handrail_effect")) == 1
    holders = world.rows("SELECT run_id FROM handrail_effect_holder ORDER BY run_id")
    assert [row["run_id"] for row in holders] == [first, second]


@pytest.mark.accept("LED-05")
def test_two_tenants_never_share_an_intent(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    runs = [world.start(tenant=tenant) for tenant in ("one", "two")]

    assert all(world.drive(run).status == "completed" for run in runs)
    assert world.service.performed == ["save:1", "save:1"]
    ids = {row["id"] for row in world.rows("SELECT id FROM handrail_effect")}
    assert ids == {upstream_key("one", "save:1"), upstream_key("two", "save:1")}


@pytest.mark.accept("LED-06")
def test_two_drafts_are_two_intents_and_one_intent_has_one_content(world: World) -> None:
    world.workflow(
        world.write_tool(), plan=[save(id=1, text="a"), save(id=2, text="a"), save(id=1, text="b")]
    )
    run = world.start()
    ended = world.drive(run)

    assert (ended.status, ended.reason) == ("failed", "intent-conflict")
    assert world.service.performed == ["save:1", "save:2"]
    assert world.used(run)["tool_calls"] == 2
    assert world.effect("save:1")["token"] == 1


def _in_another_run(world: World, status: str) -> str:
    """A run whose effect `save:1` is in a status, for another run to come upon."""
    first = world.start(run_id="first")
    if status in ("dispatched", "planned"):
        dies = "before write tool" if status == "dispatched" else "after checkpoint"
        outside = Outside(lambda place: place == dies)
        outside.then = outside.die
        world.step(first, outside=outside)
    else:
        world.service.script = [{"absent": "refused", "applied": "ok"}.get(status, "dropped")]
        world.step(first)
    if status == "handed_off":
        world.service.hidden = True
        world.drive(first)
    assert world.effect("save:1")["status"] == status
    return first


@pytest.mark.parametrize(
    ("status", "then", "calls"),
    [
        ("applied", "completed", 0),
        ("absent", "completed", 1),  # dispatched by the second
        ("planned", "completed", 1),  # by whoever comes first
        ("dispatched", "running", 0),  # the second asks again
        ("unknown", "running", 0),
        ("handed_off", "handed_off", 0),
    ],
)
@pytest.mark.accept("LED-14")
def test_a_second_run_meets_the_intent_of_a_first(
    world: World, status: str, then: str, calls: int
) -> None:
    kind = "neither" if status == "handed_off" else "key and query"
    world.workflow(world.write_tool(**TOOLS[kind]), plan=[save(id=1)])
    _in_another_run(world, status)
    second = world.start(run_id="second")
    world.step(second)

    assert world.row(second)["status"] == (then if then != "completed" else "running")
    assert world.used(second)["tool_calls"] == calls
    if then == "completed":
        assert world.drive(second).status == "completed"
    if then == "handed_off":
        assert world.row(second)["reason"] == "unknown-effect"
        assert len(world.ledger.people.handoffs(run_id=second)) == 1
    assert len(world.service.performed) <= 1


@pytest.mark.accept("LED-15")
def test_a_cancelled_run_leaves_the_effect_on_which_another_rests(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    first, second = world.start(), world.start()
    assert world.drive(first).status == "completed"
    world.step(second)  # has the recorded result
    assert world.fleet.cancel(second).status == "cancelled"

    assert world.effect("save:1")["status"] == "applied"
    assert world.ledger.people.handoffs() == []
    assert world.service.performed == ["save:1"]


def test_a_run_whose_attempt_came_to_nothing_rests_on_no_result(world: World) -> None:
    """Otherwise a later run's effect would be kept for it, and nobody would be asked."""
    world.workflow(world.write_tool(), plan=[save(id=1)])
    first, second = world.start(), world.start()
    world.service.script = ["refused"]
    assert world.drive(first).status == "failed"
    world.step(
        second,
        outside=Outside(lambda p: p == "before write tool", lambda: world.fleet.cancel(second)),
    )

    assert world.row(second)["status"] == "handed_off"
    assert world.effect("save:1")["status"] == "applied"
    assert len(world.ledger.people.handoffs(run_id=second)) == 1


def test_a_run_that_waits_for_anothers_write_gets_its_result_or_its_turn(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    first = _in_another_run(world, "unknown")
    second = world.start(run_id="second")
    world.step(second)

    assert world.drive(second).status == "completed"
    assert world.service.performed == ["save:1"]
    assert world.drive(first).status == "completed"


@pytest.mark.accept("LED-12")
def test_a_sender_that_is_late_speaks_to_the_run_that_owns_the_effect_by_now(
    world: World,
) -> None:
    """Its request left although the effect was believed absent; a second run has sent it too."""
    world.workflow(world.write_tool(key_valid_for_ms=0), plan=[save_for_1])
    first = world.start(run_id="first")

    def others() -> None:
        world.service.hidden = True
        world.advance(LEASE_MS)
        world.reconciler.sweep()  # in doubt
        world.fleet.cancel(first)
        while not world.fleet.get(first).ended:
            world.sweep_when_due(first)
        assert world.effect("save:1")["status"] == "absent"
        second = world.start(run_id="second")
        world.service.script = ["busy"]
        world.meanwhile(lambda: world.step(second))
        assert world.effect("save:1")["owner_run_id"] == second

    # It was paused for longer than was vouched for: nothing could keep it from sending.
    world.step(first, outside=Outside(lambda place: place == "before write tool", others))

    assert world.effect("save:1")["status"] == "contradicted"  # the second has moved on
    assert [h["reason"] for h in world.ledger.people.handoffs(run_id="second")] == ["contradiction"]
    assert world.row("first")["status"] == "cancelled"


def save_for_1(seen: Any) -> dict[str, Json]:
    """The same intent in every run."""
    return save(id=1)


def test_a_write_waits_where_its_lock_is_taken_or_out_of_reach(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    run, effect_id = world.start(), upstream_key("default", "save:1")
    for away in (True, False):
        world.lock.away = away
        world.lock.held[effect_id] = ("somebody", world.clock.ms + 60_000)
        world.step(run)
        row = world.row(run)

        assert (row["status"], row["attempts"]) == ("running", 0)
        assert row["wake_at"] == row["due_at"] == world.clock.ms + SECOND  # the sweep publishes it
        assert world.used(run)["tool_calls"] == 0 and world.service.performed == []
        world.advance(SECOND)
    world.lock.held.clear()

    assert world.drive(run).status == "completed"
    assert world.used(run)["model_calls"] == 2  # the proposal was kept, and not asked for again


@pytest.mark.accept("LED-09")
@pytest.mark.parametrize("place", ["after rule", "after effect", "after read"])
@pytest.mark.parametrize("noticed", [True, False])
def test_a_worker_that_is_paused_after_its_dispatch_does_not_send(
    world: World, place: str, noticed: bool
) -> None:
    """Woken past the dispatch deadline it says so; the intent may be sent again, paid again."""
    world.workflow(world.write_tool(), plan=[save(id=1)])
    run, ahead = world.start(), [0.0]

    def pause() -> None:
        if noticed:
            world.advance(6_000)
        else:
            ahead[0] = 6.0  # the ledger's clock says nothing of it: only the monotonic one does

    runtime = world.worker(outside := Outside(lambda p: p == place, pause))
    runtime.clock = lambda: world.clock.ms / 1000 + ahead[0]
    world.step(run, runtime=runtime, outside=outside)

    assert world.service.calls[f"write {run}"] == 0
    found = world.effect("save:1")
    assert (found["status"], found["token"], found["doubt"]) == ("absent", 1, "none")
    assert world.used(run)["tool_calls"] == 1  # every dispatch is charged
    assert world.drive(run).status == "completed"
    assert world.used(run)["tool_calls"] == 2 and world.service.performed == ["save:1"]


def test_a_wish_between_dispatch_and_sending_is_seen(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    for place in ("after rule", "after effect"):
        run = world.start()
        cancel = Outside(lambda p, at=place: p == at, lambda run=run: world.fleet.cancel(run))  # type: ignore[misc]
        world.step(run, outside=cancel)

        assert world.row(run)["status"] == "cancelled"
        assert world.effect("save:1")["status"] == "absent"
    assert world.service.performed == []


@pytest.mark.accept("LED-11")
@pytest.mark.parametrize("second", ["refused", "never sent"])
def test_a_second_attempt_that_came_to_nothing_does_not_close_the_first(
    world: World, second: str
) -> None:
    world.workflow(world.write_tool(query=False), plan=[save(id=1)])
    run = world.start()
    world.service.script = ["late:200000", "refused"]
    world.step(run)
    world.sweep_when_due(run)
    assert world.row(run)["status"] == "running"  # released: the same key may be sent again
    too_late = Outside(lambda p: second == "never sent" and p == "after read")
    too_late.then = lambda: world.advance(6_000)
    world.step(run, outside=too_late)

    assert world.effect("save:1")["status"] == "unknown"
    assert world.row(run)["status"] == "reconciling"
    assert world.drive(run).status == "completed"
    world.advance(400_000)
    assert world.service.performed == ["save:1"]


def test_a_write_beyond_its_tools_own_limit_is_not_sent(world: World) -> None:
    world.workflow(world.read_tool(), world.write_tool(), plan=[save(id=1), look(q=1), save(id=2)])
    run = world.start(budget={"per_tool": {"save": 1, "lookup": 1}})
    ended = world.drive(run)

    assert (ended.status, ended.reason) == ("budget_exhausted", "tool-call-budget-exhausted")
    assert world.service.performed == ["save:1"]
    left = world.rows("SELECT tool, calls_left FROM handrail_tool_allowance ORDER BY tool")
    assert left == [{"tool": "lookup", "calls_left": 0}, {"tool": "save", "calls_left": 0}]
    assert ended.budget_left["tool_calls"] > 0


def test_a_tools_own_limit_is_charged_once_by_many(world: World) -> None:
    world.workflow(world.read_tool())
    run = world.start(budget={"per_tool": {"lookup": 10}})
    claim = world.claim(run)
    assert claim is not None

    def work(_: int) -> int:
        return sum(world.ledger.charge_tool(claim, "lookup") for _ in range(8))

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) == 10
    assert not world.ledger.charge_tool(claim, "lookup")
    assert not world.ledger.charge_tool(replace(claim, epoch=9), "lookup")


def test_a_doubt_whose_tool_has_no_call_left_of_its_own_is_not_sent_again_for_ever(
    world: World,
) -> None:
    world.workflow(world.write_tool(query=False), plan=[save(id=1)])
    run = world.start(budget={"per_tool": {"save": 1}})
    world.service.script = ["lost"]

    assert world.drive(run, rounds=8).status == "handed_off"


def test_an_effect_makes_no_move_that_its_table_does_not_hold(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    run = world.start()
    world.drive(run)

    def unmake(locked: Locked) -> Ruling:
        assert locked.effect is not None
        planned = replace(locked.effect, status=EffectStatus.PLANNED)
        return Ruling(state=locked.state, effect=planned, lease="keep")

    with pytest.raises(InvariantBroken, match="no move from applied to planned"):
        world.ledger.rule(run, unmake, effect_id=upstream_key("default", "save:1"))
    assert world.effect("save:1")["status"] == "applied"


# ---- lost answers --------------------------------------------------------------------------------


@pytest.mark.accept("LED-22")
def test_a_claim_whose_answer_was_lost_is_charged_once(world: World) -> None:
    world.workflow(world.read_tool())
    for executed in (False, True):
        run = world.start(run_id=f"r-{executed}")
        world.database.lose(1, executed=executed, only="UPDATE")
        claim = world.claim(run)

        assert (claim is not None) is executed
        assert world.used(run)["model_calls"] == executed
        if claim is not None:
            assert claim.claim_id == world.row(run)["claim_id"]


@pytest.mark.accept("LED-22")
def test_a_claim_of_another_is_not_taken_for_an_own(world: World) -> None:
    world.workflow(world.read_tool())
    run, others = world.start(), list[Claim | None]()

    def meanwhile() -> None:
        others.append(world.meanwhile(lambda: world.claim(run)))

    world.database.lose(1, executed=False, only="UPDATE", then=meanwhile)

    assert world.claim(run) is None
    assert others[0] is not None and world.used(run)["model_calls"] == 1


@pytest.mark.accept("LED-22")
@pytest.mark.parametrize("number", [1, 2, 3])  # checkpoint, dispatch, outcome
@pytest.mark.parametrize("executed", [False, True])
def test_a_commit_whose_answer_was_lost_counts_once(
    world: World, number: int, executed: bool
) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    run = world.start()
    world.database.lose(number, executed=executed, only="COMMIT")
    world.step(run)

    assert world.database.lost
    assert world.service.calls[f"write {run}"] == 1
    found = world.effect("save:1")
    assert (found["status"], found["token"], found["attempts"]) == ("applied", 1, 1)
    assert world.used(run)["tool_calls"] == 1 and world.row(run)["observation_count"] == 1
    assert len(world.ledger.evidence(found["id"])) == 1
    assert world.drive(run).status == "completed"


@pytest.mark.accept("LED-22")
def test_a_dispatch_of_another_worker_is_not_taken_for_an_own(world: World) -> None:
    """The commit breaks before it took effect; meanwhile the run is taken over and dispatched."""
    world.workflow(world.write_tool(), plan=[save(id=1)])
    run = world.start()

    def taken_over() -> None:
        world.advance(LEASE_MS)
        world.reconciler.sweep()
        outside = Outside(lambda place: place == "before write tool")
        outside.then = outside.die
        world.lock.held.clear()  # and Redis was flushed: a lock is no wall
        world.meanwhile(lambda: world.step(run, outside=outside))
        assert world.effect("save:1")["status"] == "dispatched"

    world.database.lose(2, executed=False, only="COMMIT", then=taken_over)
    worker = world.step(run)

    assert worker.counts["halt:not-mine"] == 1 and world.service.calls[f"write {run}"] == 0
    assert world.used(run)["tool_calls"] == 1  # the other's
    assert world.drive(run).status == "completed" and world.service.performed == ["save:1"]


@pytest.mark.accept("LED-22")
def test_a_query_whose_answer_is_written_twice_counts_once(world: World) -> None:
    """Otherwise one absence would be taken for the two that it takes."""
    world.workflow(world.write_tool(key_valid_for_ms=0), plan=[save(id=1)])
    run = world.start()
    world.service.script = ["dropped"]
    world.step(run)
    world.advance(SETTLED_MS + SECOND)
    world.database.lose(2, executed=True, only="COMMIT")  # the query's claim is the first
    world.reconciler.sweep()

    assert world.database.lost
    assert world.effect("save:1")["absences"] == 1 and world.row(run)["status"] == "reconciling"


@pytest.mark.accept("LED-22")
def test_wherever_the_connection_breaks_in_a_write_nothing_is_done_or_paid_twice(
    world: World,
) -> None:
    world.workflow(world.write_tool(), plan=[save_for_goal])
    for number, executed in itertools.product(range(1, 80), (False, True)):
        run = world.start(run_id=f"r-{number}-{executed}")
        intent = f"save:{run}"
        world.database.lose(number, executed=executed)
        world.step(run)
        lost = world.database.lost
        world.database.lose(0, executed=False)

        assert world.drive(run).status == "completed", (number, executed)
        found = world.effect(intent)
        assert world.service.performed.count(intent) == 1
        assert world.used(run)["tool_calls"] == found["token"] == found["attempts"]
        assert world.row(run)["observation_count"] == 1
        if not lost:
            break
    else:
        raise AssertionError("a write has fewer statements than that")


def test_a_cancel_or_consent_whose_answer_was_lost_counts_once(world: World) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save_for_goal])
    for executed in (False, True):
        agreed, cancelled = (world.start(run_id=f"{n}-{executed}") for n in ("a", "c"))
        for run in (agreed, cancelled):
            world.step(run)
        world.database.lose(1, executed=executed, only="COMMIT")
        assert agree(world.fleet, agreed).status == "executing"
        world.database.lose(1, executed=executed, only="COMMIT")
        assert world.fleet.cancel(cancelled).status == "cancelled"
        assert len(world.trace(agreed, "approval.given")) == 1
        assert len(world.trace(cancelled, "cancel.requested")) == 1
        assert world.drive(agreed).status == "completed"


#: What a person does: the consent of the first of two, a resolution, and what moves no run.
ACTS: Final[dict[str, Callable[[World, str, str], object]]] = {
    "request-token": lambda w, run, token: w.fleet.desk.issue_token(
        w.ledger.people.approvals(run_id=run)[0].id, by=APPROVER
    ),
    "approve": lambda w, run, token: w.fleet.approve(token, by=APPROVER),
    "claim": lambda w, run, token: w.fleet.desk.claim(_open_handoff(w), by=OPERATOR),
    "comment": lambda w, run, token: w.fleet.desk.comment(
        _open_handoff(w), "I am on it", by=OPERATOR
    ),
    "resolve": lambda w, run, token: w.fleet.desk.resolve(
        _open_handoff(w), "failed", by=OPERATOR, reason="nobody wants it any more"
    ),
    "admit": lambda w, run, token: w.fleet.desk.admit("root", ["admin"]),
    "pause": lambda w, run, token: w.fleet.pause(by=OPERATOR, reason="as it is night"),
}


def _open_handoff(world: World) -> str:
    return str(world.ledger.people.handoffs()[0]["id"])


@pytest.mark.parametrize("executed", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_what_a_person_does_is_done_once_whichever_answer_was_lost(
    world: World, act: str, executed: bool
) -> None:
    world.workflow(world.write_tool(approval="always", approvers=2), plan=[save_for_goal])
    unkept = world.write_tool("pay", intent=lambda arguments, run: "x" * 5_000)
    pay = {"kind": "tool", "tool": "pay", "arguments": {}}
    world.workflow(unkept, name="pays", plan=[pay])
    asking, handed_off = world.start(), world.start("pays")
    world.step(asking)
    assert world.drive(handed_off).status == "handed_off"
    [asked] = world.ledger.people.approvals(run_id=asking)
    token = world.fleet.desk.issue_token(asked.id, by=APPROVER)
    before = len(list(world.ledger.people.audit_links()))

    looks = act == "resolve"  # in a transaction of its own
    world.database.lose(1 + looks, executed=executed, only="COMMIT")
    ACTS[act](world, asking, token)

    assert world.database.lost
    links = list(world.ledger.people.audit_links())
    assert [link.act for link in links[before:]] == [act]
    assert world.fleet.desk.verify_audit().intact
    consents = world.rows("SELECT who FROM handrail_consent")
    assert len(consents) == (act == "approve")
    assert len(world.rows("SELECT id FROM handrail_comment")) == (act == "comment")


def test_a_database_that_stays_away_is_said_so_and_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.workflow(world.read_tool(), plan=[look(q=1)])
    run = world.start()

    def away(*_: object) -> Any:
        raise ConnectionLost("away")

    with monkeypatch.context() as patch:
        patch.setattr(world.database, "_execute", away)
        for act in (world.fleet.get, world.fleet.cancel, world.ledger.effect):
            with pytest.raises(DatabaseUnavailable):
                act(run)
        worker = world.step(run, message=StepMessage(run_id=run, step=0, epoch=0))
    assert worker.counts["claim-failed"] == 1

    assert world.drive(run).status == "completed"


# ---- approvals -----------------------------------------------------------------------------------


def test_a_consent_is_consumed_in_the_transaction_of_the_dispatch(world: World) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    run, seen = world.start(), {}
    world.step(run)
    assert world.row(run)["status"] == "awaiting_approval"
    assert world.used(run)["tool_calls"] == 0 and world.rows(CONSENTS)[0]["status"] == "pending"
    agree(world.fleet, run)

    def record(place: str) -> bool:
        (found,) = world.rows(CONSENTS)
        status = world.rows("SELECT status FROM handrail_effect")
        seen[place] = (found["status"], [row["status"] for row in status])
        return False

    world.step(run, outside=Outside(record))

    assert seen["before rule"] == ("approved", ["planned"])
    assert seen["after rule"] == ("consumed", ["dispatched"])
    (found,) = world.rows(CONSENTS)
    assert found["effect_id"] == world.effect("save:1")["id"]
    assert world.effect("save:1")["approval_id"] == found["id"]
    assert world.drive(run).status == "completed"


CONSENTS: Final = "SELECT * FROM handrail_approval"


@pytest.mark.parametrize("executed", [False, True])
def test_a_consent_is_never_consumed_without_its_dispatch(world: World, executed: bool) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    run = world.start()
    world.step(run)
    agree(world.fleet, run)
    world.database.lose(2, executed=executed, only="COMMIT")  # after the checkpoint's
    outside = Outside(lambda place: place == "after rule")
    outside.then = outside.die
    world.step(run, outside=outside)

    assert world.database.lost
    assert world.rows(CONSENTS)[0]["status"] == "consumed"
    assert world.effect("save:1")["status"] == "dispatched"
    assert world.drive(run).status == "completed" and world.service.performed == ["save:1"]


@pytest.mark.accept("FLT-15")
def test_what_was_agreed_to_is_done_although_no_model_call_is_left(world: World) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    run = world.start(budget={"model_calls": 1, "steps": 1})
    world.step(run)
    agree(world.fleet, run)
    ended = world.drive(run)

    assert world.service.performed == ["save:1"] and world.used(run)["model_calls"] == 1
    assert ended.reason in ("step-budget-exhausted", "model-call-budget-exhausted")
    assert world.service.calls[f"model {run}"] == 1


def test_what_is_done_is_what_was_agreed_to(world: World) -> None:
    """The model is not asked again, and what it would propose now does not matter."""
    told = iter([save(id=1, amount=5), save(id=1, amount=500)])
    world.workflow(world.write_tool(approval="always"), plan=[lambda seen: next(told)])
    run = world.start()
    world.step(run)
    (shown,) = world.ledger.people.approvals(run_id=run)
    sent: list[Any] = []

    def execute(arguments: Any, call: ToolCall) -> Json:
        sent.append(arguments)
        return "done"

    world.service.script = [execute]
    agree(world.fleet, run)
    world.step(run)

    assert sent == [shown.arguments] == [{"id": 1, "amount": 5}]
    assert world.effect("save:1")["arguments_hash"] == shown.arguments_hash


def test_one_consent_given_by_many_at_once_is_one_effect(world: World) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    run = world.start()
    world.step(run)
    at_once = threading.Barrier(8)

    def approve(_: int) -> int:
        at_once.wait()
        try:
            agree(world.fleet, run)
        except ApprovalRefused:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(approve, range(8))) == 1
    assert world.drive(run).status == "completed" and world.service.performed == ["save:1"]


@pytest.mark.parametrize(
    "field", ["arguments_hash", "tool", "contract_version", "contract_hash", "intent_key"]
)
def test_a_consent_to_anything_else_is_none(world: World, field: str) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    run = world.start()
    world.step(run)
    agree(world.fleet, run)
    world.control.run(f"UPDATE handrail_approval SET {field} = 'forged'", {})
    ended = world.drive(run)

    assert (ended.status, ended.reason) == ("failed", "approval-expired")
    assert world.service.performed == [] and world.used(run)["tool_calls"] == 0


def test_a_consent_expires_whether_it_was_given_or_not(world: World) -> None:
    tool = world.write_tool(approval="always")

    def action(run: Any) -> Action:
        return Action(tool, {"id": run.run_id})

    world.workflow(stages=[Confirm("ask", action, expires_ms=60_000), Commit("do", action, tool)])
    asked, agreed, late = (world.start() for _ in range(3))
    for run in (asked, agreed, late):
        world.step(run)
    agree(world.fleet, agreed)
    [waiting] = world.fleet.desk.approvals(by=APPROVER, run=late)
    token = world.fleet.desk.issue_token(waiting.id, by=APPROVER)
    world.advance(60_000)

    with pytest.raises(ApprovalRefused) as refused:
        world.fleet.approve(token, by=APPROVER)
    assert refused.value.problem == "expired"
    assert world.row(late)["status"] == "failed"
    world.sweep_when_due(asked)
    for run in (asked, agreed, late):
        ended = world.drive(run)
        assert (ended.status, ended.reason) == ("failed", "approval-expired"), run
    assert world.service.performed == []
    assert {row["status"] for row in world.rows(CONSENTS)} == {"expired", "withdrawn"}


def test_waiting_for_a_person_takes_no_working_time_but_life(world: World) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save_for_goal])
    budget = {"deadline_ms": 38_000, "expires_ms": 4_000_000}
    patient, expiring = world.start(budget=budget), world.start(budget=budget)
    for run in (patient, expiring):
        world.advance(9_000)
        world.step(run)
    world.advance(3_600_000)
    agree(world.fleet, patient)

    row = world.row(patient)
    assert row["deadline_at"] - world.clock.ms == 38_000 - 9_000
    assert world.drive(patient).status == "completed"
    world.sweep_when_due(expiring)
    ended = world.fleet.get(expiring)
    assert (ended.status, ended.reason) == ("budget_exhausted", "expired")
    assert world.service.performed == [f"save:{patient}"]


def test_a_run_that_waits_for_nothing_cannot_be_agreed_to(world: World) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    run = world.start()
    assert world.fleet.desk.approvals(by=APPROVER, run=run) == []
    with pytest.raises(ApprovalRefused) as refused:
        world.fleet.answer(run, "42", by=OPERATOR)
    assert refused.value.problem == "not-asked"
    with pytest.raises(UnknownRun):
        world.fleet.answer("nobody", "42", by=OPERATOR)
    world.step(run)
    [asked] = world.fleet.desk.approvals(by=APPROVER, run=run)
    token = world.fleet.desk.issue_token(asked.id, by=APPROVER)
    assert world.fleet.cancel(run).status == "cancelled"
    assert world.rows(CONSENTS)[0]["status"] == "withdrawn"
    late: list[Callable[[], object]] = [
        lambda: world.fleet.approve(token, by=APPROVER),
        lambda: world.fleet.reject(asked.id, by=APPROVER, reason="no"),
        lambda: world.fleet.desk.issue_token(asked.id, by=APPROVER),
    ]
    for act in late:
        with pytest.raises(ApprovalRefused) as refused:
            act()
        assert refused.value.problem == "not-pending"
    assert world.rows("SELECT * FROM handrail_consent") == []


def test_a_refusal_is_final(world: World) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    run = world.start()
    world.step(run)
    [asked] = world.fleet.desk.approvals(by=APPROVER, run=run)
    token = world.fleet.desk.issue_token(asked.id, by=APPROVER)
    refused = world.fleet.reject(asked.id, by=APPROVER, reason="too much")

    assert (refused.status, refused.reason) == ("failed", "approval-rejected")
    assert world.rows(CONSENTS)[0]["decided_by"] == APPROVER.subject
    with pytest.raises(ApprovalRefused) as too_late:
        world.fleet.approve(token, by=APPROVER)
    assert too_late.value.problem == "not-pending"


# ---- cancelling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["read", "write"])
def test_wherever_a_cancel_comes_nothing_starts_after_it(world: World, kind: str) -> None:
    """What is in flight is accounted for; what was not dispatched before is never sent."""
    plan = [look(q=1)] if kind == "read" else [save_for_goal]
    world.workflow(world.read_tool(), world.write_tool(), plan=plan)
    for number in range(60):
        run = world.start(run_id=f"r{number}")
        outside = Outside()
        outside.when = lambda place, own=outside, n=number: len(own.places) == n + 1  # type: ignore[misc]
        outside.then = lambda run=run: world.fleet.cancel(run)  # type: ignore[misc]
        world.step(run, outside=outside)
        if number >= len(outside.places):
            break
        place, ended = outside.places[number], world.drive(run)
        later = outside.places[number + 1 :]
        assert "before write tool" not in later or place == "after read", place  # in flight by then
        if ended.status == "handed_off":  # it took effect all the same, and nothing undoes it
            assert world.effect(f"save:{run}")["status"] == "applied", place
            assert ended.reason == "unknown-effect"
        else:
            assert ended.status == "cancelled", place
            recorded = place in ("after outcome", "before release", "after release")
            assert (f"save:{run}" in world.service.performed) is recorded, place
        stops = [e["detail"]["reason"] for e in world.trace(run, "run.stopped")]
        assert stops[-1] == ended.reason
    else:
        raise AssertionError("a round has fewer places than that")


@pytest.mark.accept("LED-16")
def test_a_cancelled_doubt_is_cleared_up_first(world: World) -> None:
    """Proved absent it is cancelled; proved applied a person is asked, since nothing undoes it."""
    world.workflow(world.write_tool(), plan=[save_for_goal])
    for way, status in (("dropped", "cancelled"), ("lost", "handed_off")):
        run = world.start(run_id=way)
        world.service.script = [way]
        world.step(run)
        assert world.fleet.cancel(run).status == "reconciling"

        assert world.drive(run).status == status
    assert world.service.performed == ["save:lost"]


def test_a_cancel_of_a_reconciling_run_does_not_move_its_next_query(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    run = world.start()
    world.service.script = ["dropped"]
    world.step(run)
    before = world.row(run)
    world.fleet.cancel(run)
    after = world.row(run)

    assert after["wake_at"] == before["wake_at"] and after["epoch"] == before["epoch"]
    assert after["cancel_requested_at"] == world.clock.ms


@pytest.mark.parametrize("what", ["the look", "the word"])
def test_what_was_never_sent_is_said_although_the_ledger_is_away_for_a_moment(
    world: World, what: str
) -> None:
    """The last look fails, or is too late and that cannot be told at once: without a key and a
    query nobody else could ever say it.
    """
    world.workflow(world.write_tool(key_valid_for_ms=0, query=False), plan=[save(id=1)])
    run = world.start()
    outside = Outside()

    def away() -> None:
        outside.when = lambda place: False
        raise DatabaseUnavailable("away for a moment")

    def at(place: str) -> bool:
        if what == "the word" and place == "after read":
            world.meanwhile(lambda: world.advance(12_000))
        return place == ("before read" if what == "the look" else "before outcome")

    outside.when, outside.then = at, away
    world.step(run, outside=outside)

    assert world.effect("save:1")["status"] == "absent" and world.service.performed == []
    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"]


# ---- leases --------------------------------------------------------------------------------------


def test_leases_are_renewed_together_up_to_the_end_of_each_step(world: World) -> None:
    world.workflow(world.read_tool())
    claims = [world.claim(world.start()) for _ in range(3)]
    first, second, third = (claim for claim in claims if claim is not None)
    world.advance(20_000)
    far, near = world.clock.ms + 10**6, world.clock.ms + 15_000
    world.fleet.cancel(third.run_id)
    world.database.statements.clear()
    answers = world.ledger.renew(
        [
            (first.run_id, first.claim_id, far),
            (second.run_id, second.claim_id, near),
            (third.run_id, third.claim_id, far),
            ("nobody", "c9", far),
        ]
    )

    assert len(world.database.statements) == 1
    assert answers == {first.claim_id: False, second.claim_id: False, third.claim_id: True}
    ends = [world.row(claim.run_id)["lease_until"] - world.clock.ms for claim in (first, second)]
    assert ends == [LEASE_MS, 15_000]
    assert world.ledger.renew([(second.run_id, second.claim_id, near - 9_000)]) == {
        second.claim_id: False
    }
    assert world.row(second.run_id)["lease_until"] == near  # never shortened
    assert all(
        world.row(c.run_id)["wake_at"] == world.row(c.run_id)["lease_until"] for c in (first,)
    )
    assert world.ledger.renew([]) == {}


def test_a_lease_that_was_taken_over_is_not_renewed(world: World) -> None:
    world.workflow(world.read_tool())
    run = world.start()
    first = world.claim(run)
    assert first is not None
    world.advance(LEASE_MS)
    world.reconciler.sweep()
    far = world.clock.ms + 10**6

    assert world.ledger.renew([(run, first.claim_id, far)]) == {}
    second = world.claim(run)
    assert second is not None
    answers = world.ledger.renew([(run, first.claim_id, far), (run, second.claim_id, far)])
    assert answers == {second.claim_id: False}


def test_a_worker_that_leaves_gives_its_leases_back_and_nothing_is_lost(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(q=1)])
    run = world.start(budget={"tool_calls": 1, "model_calls": 9})
    claim = world.claim(run)
    assert claim is not None and claim.state.left.tool_calls_reserved == 1
    due = world.ledger.give_back([claim.claim_id], unused=[claim.claim_id], holder="a worker")

    row = world.row(run)
    assert [step.run_id for step in due] == [run] and due[0].epoch == row["epoch"]
    assert (row["status"], row["attempts"], row["lease_until"]) == ("queued", 0, None)
    assert world.used(run)["tool_calls"] == 0  # the read had not begun
    assert world.used(run)["model_calls"] == 1  # that call may have
    assert world.commit(claim, Ruling(state=claim.state)) is False
    assert world.ledger.give_back([claim.claim_id], unused=[], holder="a worker") == []
    assert world.drive(run).status == "completed"


def test_a_used_read_and_a_write_in_flight_are_not_given_back(world: World) -> None:
    world.workflow(world.read_tool(), world.write_tool(), plan=[save(id=1)])
    reading, writing = world.start(), world.start()
    claim = world.claim(reading)
    assert claim is not None
    world.ledger.give_back([claim.claim_id], unused=[], holder="a worker")
    assert world.used(reading)["tool_calls"] == 1

    def leave() -> None:
        claim_id = world.row(writing)["claim_id"]
        holder = world.row(writing)["holder"]
        assert world.ledger.give_back([claim_id], unused=[claim_id], holder=holder) == []

    world.step(writing, outside=Outside(lambda place: place == "before write tool", leave))
    assert world.effect("save:1")["status"] == "applied"
    assert world.drive(writing).status == "completed"


def test_what_a_leaving_worker_gives_back_as_unused_is_not_used_after_all(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(q=1)])
    run = world.start()
    runtime = world.worker()

    def drain() -> None:
        (handle,) = runtime.at_work.values()
        assert runtime.drain(0.0) == 1
        assert not runtime.may_start(handle, reserved=True)  # however far it has got

    leave = Outside(lambda place: place == "after model", drain)
    with pytest.raises(asyncio.CancelledError):
        world.step(run, runtime=runtime, outside=leave)

    assert world.service.calls[f"read {run}"] == 0
    assert world.used(run)["tool_calls"] == 0
    assert world.drive(run).status == "completed"


# ---- strings that break things -------------------------------------------------------------------

NASTY: Final = {
    "nul": "a\0b",
    "surrogate": "a\ud800b\udfff",
    "bidi": "a\u202eb\u2066c\u200f",
    "tags": "a\U000e0041\u200b\ufeffb",
    "quotes": "'\"\\;--$1 :id %s {}",
    "controls": "".join(map(chr, range(32))) + "\x7f\x85",
    "json": '{"__type__":"x","__value__":1}',
    "astral": "\U0001f600\U00010ffff",
    "huge": "ü" * 20_000,
}


@pytest.mark.accept("LED-17")
@pytest.mark.parametrize("name", NASTY)
def test_any_text_goes_through_every_path_and_comes_back_as_it_was(world: World, name: str) -> None:
    text = NASTY[name]
    short = text[:80]
    world.workflow(
        world.read_tool(max_output_bytes=10**7),
        world.write_tool(
            max_output_bytes=10**7,
            intent=lambda arguments, run: f"save:{arguments['id']}",
        ),
        plan=[
            look(q=text),
            save(id=short, text=text),
            {"kind": "clarify", "question": text},
            save(id="2"),
            {"kind": "complete", "answer": text},
        ],
    )
    world.service.script = [
        lambda arguments, call: {"text": text, text[:40]: [text]},
        lambda arguments, call: _refuse(text),
    ]
    run = world.fleet.enqueue(
        "draft",
        goal=text[:20_000],
        input={"given": text[:30_000]},
        run_id="r1",
        dedupe_key=short,
        budget={"output_bytes": 10**6},
    )
    same = world.fleet.enqueue("draft", goal="other", run_id="r2", dedupe_key=short)
    assert world.drive(run).status == "awaiting_input"
    said = text[:MAX_WORDS]
    world.fleet.answer(run, said, by=OPERATOR)
    ended = world.drive(run)

    assert same == run and (ended.goal, ended.reason) == (text[:20_000], "completed")
    assert ended.answer == text
    found = world.ledger.observations(run)
    assert [item["source"] for item in found] == ["lookup", "save", "answer:operator", "save"]
    assert json.loads(found[1]["text"])["text"] == text
    assert found[2]["text"] == said
    assert found[3]["text"] == f"tool:save:failed:{text[:300]}"
    (effect,) = [e for e in world.ledger.effects() if e["intent_key"] == f"save:{short}"]
    assert (effect["arguments"]["text"], effect["result"]["text"]) == (text, text)
    evidence = world.ledger.evidence(upstream_key("default", "save:2"))
    assert evidence[0]["detail"]["refused"] == text[:300]
    assert world.ledger.read(run)["state"].input == {"given": text[:30_000]}
    assert world.trace(run)


def _refuse(text: str) -> Json:
    raise ToolRefused(text, retryable=True)


REASONS: Final[dict[str, Any]] = {
    "none": None,
    "a number": 7,
    "bytes": b"bytes",
    "an object": object(),
    "an error": ValueError("x"),
    "a long text": "x" * 10**6,
    "not a number": float("nan"),
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("retryable", [True, False])
def test_a_refusal_is_recorded_whatever_the_tool_gave_as_its_reason(
    world: World, reason: str, retryable: bool
) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])

    def refuse(arguments: Any, call: ToolCall) -> Json:
        raise ToolRefused(REASONS[reason], retryable)

    world.service.script = [refuse]
    run = world.start()
    world.step(run)

    assert world.effect("save:1")["status"] == "absent"
    assert world.drive(run).status == ("completed" if retryable else "failed")


def _nested(levels: int) -> Json:
    return {"deep": _nested(levels - 1)} if levels else None


NO_RESULTS: Final[dict[str, Any]] = {
    "not a number": float("nan"),
    "a long number": 10**5_000,
    "another key": {1: 2},
    "bytes": b"x",
    "an object": object(),
    "surrogates": "\ud800" * 9,
    "too deep": _nested(100),
}


@pytest.mark.accept("LED-17")
@pytest.mark.parametrize("name", NO_RESULTS)
def test_an_outcome_is_recorded_whatever_the_tool_returned(world: World, name: str) -> None:
    """What cannot be a result is none: the write is in doubt, and the record clears it up."""
    world.workflow(world.write_tool(), plan=[save(id=1)])

    def answer(arguments: Any, call: ToolCall) -> Any:
        world.service.arrive(call, arguments, FOREVER)
        return NO_RESULTS[name]

    world.service.script = [answer]
    run = world.start()
    world.step(run)

    assert world.effect("save:1")["status"] in ("unknown", "applied")
    assert world.drive(run).status == "completed" and world.service.performed == ["save:1"]


@pytest.mark.parametrize("name", NASTY)
def test_a_person_may_say_anything(world: World, name: str) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save_for_goal])
    agreed, refused = world.start(), world.start()
    for run in (agreed, refused):
        world.step(run)
    text = NASTY[name][:MAX_WORDS]
    agree(world.fleet, agreed)
    disagree(world.fleet, refused, reason=text)

    assert world.drive(agreed).status == "completed"
    detail = world.trace(refused, "run.stopped")[0]["detail"]
    assert (detail["comment"], detail["by"]) == (text, "approver")
    acts = world.fleet.desk.audit(by=OPERATOR, run=refused)
    assert [(act["actor"], act["reason"]) for act in acts] == [("approver", text)]
    assert world.fleet.desk.verify_audit().intact


@pytest.mark.parametrize("name", NASTY)
def test_an_error_may_say_anything(world: World, name: str) -> None:
    def fail(arguments: Any, call: ToolCall) -> Json:
        raise RuntimeError(NASTY[name])

    world.workflow(world.write_tool(), plan=[save(id=1)])
    world.service.script = [fail]
    run = world.start()
    world.step(run)

    assert world.effect("save:1")["doubt_trigger"] == "exception"
    assert world.drive(run).status == "completed"


# ---- a workflow's own faults ---------------------------------------------------------------------


def test_an_intent_that_cannot_be_kept_is_a_persons_matter_and_nothing_is_sent(
    world: World,
) -> None:
    world.workflow(world.write_tool(intent=lambda arguments, run: "x" * 5_000), plan=[save(id=1)])
    run = world.start()
    ended = world.drive(run)

    assert (ended.status, ended.reason) == ("handed_off", "handoff-required")
    assert world.service.performed == [] and world.rows("SELECT id FROM handrail_effect") == []


def test_a_receipt_outlives_a_fault_in_the_workflows_own_code(world: World) -> None:
    def broken(arguments: Any, value: Any) -> dict[str, Json]:
        raise ZeroDivisionError

    world.workflow(
        world.write_tool(key_valid_for_ms=0, query=False, public=broken), plan=[save(id=1)]
    )
    run = world.start()
    ended = world.drive(run)

    assert ended.status in ("handed_off", "completed")
    assert world.effect("save:1")["status"] == "applied"


def test_terms_are_those_of_the_time_of_planning(world: World) -> None:
    tool = world.write_tool()
    world.workflow(tool, plan=[save(id=1)])
    run = world.start()
    world.drive(run)
    kept = json.loads(world.effect("save:1")["terms"])

    assert kept == Terms.of(tool.contract).to_json()
