"""The sweep: it publishes again, recovers, ends what is overdue and clears up doubt, on both
databases; any number of sweeps may be at it at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import pytest

from handrail.agent import protocol
from handrail.agent.budget import Budget
from handrail.agent.effects import QUERIES_PER_DISPATCH, Absent, Applied, NoAnswer, Pending
from handrail.agent.protocol import Outcome
from handrail.agent.stage import End, Succeeded
from handrail.agent.tools import FOREVER
from handrail.canonical import Json
from handrail.errors import TryLater
from handrail.ledger import statements
from handrail.ledger.accept import REPUBLISH_MS
from handrail.ledger.ledger import POSTPONE_MS
from handrail.ledger.statements import REPUBLISH_MAX_MS
from handrail.reconciler.sweep import ask_directly
from handrail.tasks.calls import Called, ToolCall
from tests.world import (
    KINDS,
    LEASE_MS,
    SECOND,
    SETTLED_MS,
    Outside,
    World,
    look,
    open_world,
    save,
    save_for_goal,
)

#: So long that no deadline comes in the way of what a test looks at.
PATIENT: Final = Budget(deadline_ms=10**9, expires_ms=10**10)


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An empty world on each database."""
    with open_world(request) as opened:
        yield opened


@pytest.fixture(params=KINDS)
def unbounded(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world in which nobody vouches for how long a worker may stall."""
    with open_world(request, max_stall_ms=None) as opened:
        yield opened


def doubtful(world: World, way: str = "dropped", **tool: Any) -> str:
    """A run whose write is in doubt."""
    world.workflow(world.write_tool(**tool), plan=[save(id=1)], budget=PATIENT)
    run = world.start()
    world.service.script = [way]
    world.step(run)
    assert world.row(run)["status"] == "reconciling"
    return run


# ---- publishing again ----------------------------------------------------------------------------


def test_what_nobody_takes_is_published_again_ever_more_rarely(world: World) -> None:
    """After 10 s, then 20 s, 40 s and so on, at most every 10 minutes."""
    world.workflow(world.read_tool(), budget=PATIENT)
    run = world.start()
    pauses = []
    for _ in range(9):
        before = world.clock.ms
        world.sweep_when_due(run)
        pauses.append((world.clock.ms - before) // SECOND)

    assert pauses == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert REPUBLISH_MAX_MS == 600 * SECOND
    assert [message.run_id for message in world.messages] == [run] * 9
    assert {message.epoch for message in world.messages} == {0}


def test_a_sweep_before_its_time_publishes_nothing(world: World) -> None:
    world.workflow(world.read_tool(), budget=PATIENT)
    world.start()
    world.advance(REPUBLISH_MS - 1)

    assert world.reconciler.sweep() == 0 and world.messages == []


def test_each_step_begins_the_schedule_anew(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(q=1)], budget=PATIENT)
    run = world.start()
    for _ in range(4):
        world.sweep_when_due(run)
    world.step(run)

    assert world.row(run)["wake_at"] == world.clock.ms + REPUBLISH_MS
    assert world.row(run)["publishes"] == 0


def test_a_published_message_says_what_is_left(world: World) -> None:
    world.workflow(world.read_tool(), budget=Budget(model_calls=7, deadline_ms=60_000))
    run = world.start()
    world.sweep_when_due(run)
    (message,) = world.messages

    assert message.budget["model_calls"] == 7
    assert message.remaining_ms == 60_000 - REPUBLISH_MS
    assert message.deadline_at == world.row(run)["deadline_at"]


@dataclass(eq=False)
class Away(TryLater):
    """The broker is away."""

    code: ClassVar[str] = "away"


def test_a_broker_that_is_away_loses_nothing(world: World) -> None:
    world.workflow(world.read_tool(), budget=PATIENT)
    run = world.start()

    def away(messages: object) -> None:
        raise Away

    world.reconciler.publish = away
    world.sweep_when_due(run)
    world.reconciler.publish = world.messages.extend
    world.sweep_when_due(run)

    assert [message.run_id for message in world.messages] == [run]


def test_a_sweep_that_dies_with_its_batch_only_delays_it(world: World) -> None:
    world.workflow(world.read_tool(), budget=PATIENT)
    run = world.start()
    world.advance(REPUBLISH_MS)
    assert [woken.run_id for woken in world.ledger.due_for_sweep(limit=9)] == [run]

    assert world.reconciler.sweep() == 0
    world.advance(POSTPONE_MS)
    assert world.reconciler.sweep() == 1 and len(world.messages) == 1


def test_a_large_backlog_is_taken_in_batches(world: World) -> None:
    world.workflow(world.read_tool(), budget=PATIENT)
    runs = {world.start() for _ in range(7)}
    world.advance(REPUBLISH_MS)

    assert [world.reconciler.sweep(limit=3) for _ in range(4)] == [3, 3, 1, 0]
    assert {message.run_id for message in world.messages} == runs


# ---- several at once -----------------------------------------------------------------------------


def test_sweeps_at_once_never_do_one_thing_twice(world: World) -> None:
    """Due steps, lost leases, overdue runs and doubts: each is one sweep's."""
    world.workflow(world.write_tool(), plan=[save_for_goal], budget=PATIENT)
    due = [world.start(run_id=f"due-{n}") for n in range(20)]
    doubts = [world.start(run_id=f"doubt-{n}") for n in range(6)]
    world.service.hidden = True
    for run in doubts:
        world.service.script = ["lost"]
        world.step(run)
    lost = [world.start(run_id=f"lost-{n}") for n in range(6)]
    assert all(world.claim(run) for run in lost)
    world.advance(LEASE_MS)
    at_once, sent = threading.Barrier(4), list[str]()

    def sweep(_: int) -> None:
        reconciler = world.sweeper()
        reconciler.publish = lambda messages: sent.extend(m.run_id for m in messages)
        at_once.wait()
        while reconciler.sweep(limit=5):
            pass

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(sweep, n) for n in range(4)]:
            done.result()

    assert sorted(sent) == sorted([*due, *lost])
    for run in doubts:
        assert world.service.calls[f"query {run}"] == 1
        assert world.effect(f"save:{run}")["queries_left"] == QUERIES_PER_DISPATCH - 1
    for run in lost:
        assert len(world.trace(run, "lease.lost")) == 1
        assert world.row(run)["epoch"] == 2  # one claim, one takeover
    world.service.hidden = False


def test_a_run_that_is_locked_keeps_nobody_from_the_others(world: World) -> None:
    if not world.postgres:  # one writer at a time: there is nothing to skip
        assert statements.dialect(False).skip_locked == ""
        return
    world.workflow(world.read_tool(), budget=PATIENT)
    locked, free = world.start(run_id="locked"), world.start(run_id="free")
    world.advance(REPUBLISH_MS)
    with world.control.transaction() as tx:
        tx.run("SELECT id FROM handrail_run WHERE id = :id FOR UPDATE", {"id": locked})
        assert world.reconciler.sweep() == 1
    assert world.reconciler.sweep() == 1

    assert [message.run_id for message in world.messages] == [free, locked]


def test_a_run_at_fault_keeps_nobody_from_the_others(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save_for_goal], budget=PATIENT)
    runs = [world.start(run_id=name) for name in ("a", "b", "c")]
    for run in runs:
        world.service.script = ["lost"]
        world.step(run)
    good = world.effect("save:a")["terms"]
    world.control.run("UPDATE handrail_effect SET terms = '{}' WHERE intent_key = 'save:a'", {})
    world.advance(SECOND)
    world.reconciler.sweep()

    assert world.reconciler.counts["failed"] == 1
    assert [world.row(run)["status"] for run in runs] == ["reconciling", "running", "running"]
    world.control.run("UPDATE handrail_effect SET terms = :terms", {"terms": good})
    assert world.drive("a").status == "completed"


# ---- when there is nothing to do -----------------------------------------------------------------


def _many(world: World, *, finished: int, waiting: int) -> None:
    """Fill the ledger with runs that have ended, and some whose time has not come: every second
    of these is in doubt.
    """
    world.workflow(world.read_tool())
    world.start(run_id="pattern")
    row = world.row("pattern")
    later = world.clock.ms + 10**6
    changed = {
        "id": "'run-' || n",
        "status": f"CASE WHEN n <= {finished} THEN 'completed' WHEN n % 2 = 0 THEN 'queued'"
        " ELSE 'reconciling' END",
        "traced_status": f"CASE WHEN n <= {finished} THEN 'completed' WHEN n % 2 = 0 THEN 'queued'"
        " ELSE 'reconciling' END",
        "reason": f"CASE WHEN n <= {finished} THEN 'completed' END",
        "due_at": f"CASE WHEN n > {finished} THEN {world.clock.ms} END",
        "wake_at": f"CASE WHEN n > {finished} THEN {later} + n END",
    }
    names = ", ".join(row)
    values = ", ".join(changed.get(name, f"p.{name}") for name in row)
    total = finished + waiting
    numbers = (
        f"generate_series(1, {total}) AS n"
        if world.postgres
        else f"(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {total})"
        " SELECT n FROM s)"
    )
    world.control.run(
        f"INSERT INTO handrail_run ({names}) SELECT {values} FROM handrail_run AS p, {numbers}"
        " WHERE p.id = 'pattern'",
        {},
    )
    world.control.run("ANALYZE handrail_run" if world.postgres else "ANALYZE", {})


def test_an_idle_sweep_is_one_statement_that_looks_at_nothing(world: World) -> None:
    """However many runs have ended, and however many wait for their time."""
    _many(world, finished=20_000, waiting=2_000)
    world.database.statements.clear()
    assert world.reconciler.sweep() == 0
    (statement,) = world.database.statements

    sql = statements.due_for_sweep(world.postgres)
    assert statement == " ".join(sql.split())
    plan = _plan(world, sql, {"postpone_ms": 1, "limit": 100, "doubts": 100})
    assert "handrail_run_wake" in plan and "handrail_run_doubt" in plan, plan
    assert "Seq Scan on handrail_run" not in plan and "SCAN handrail_run" not in plan, plan
    assert "Rows Removed by Filter" not in plan, plan  # it does not go through those that wait
    empty = "TRUNCATE handrail_run CASCADE" if world.postgres else "DELETE FROM handrail_trace"
    world.control.run(empty, {})
    world.control.run("DELETE FROM handrail_run", {})


def _plan(world: World, sql: str, params: Mapping[str, Any]) -> str:
    how = "EXPLAIN (ANALYZE, COSTS OFF) " if world.postgres else "EXPLAIN QUERY PLAN "
    now = {} if world.postgres else {"now": world.clock.ms}
    rows = world.control.run(how + sql, {**params, **now})
    return "\n".join(str(row.get("QUERY PLAN", row.get("detail"))) for row in rows)


def test_a_run_that_has_ended_or_waits_for_a_person_is_never_looked_at(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(q=1)], budget=Budget(expires_ms=10**9))
    ended, asking = world.start(), world.start()
    world.drive(ended)
    world.advance(10**8)

    assert world.row(ended)["wake_at"] is None
    assert [woken.run_id for woken in world.ledger.due_for_sweep(limit=9)] == [asking]


# ---- what is overdue -----------------------------------------------------------------------------


@pytest.mark.accept("FLT-14")
def test_a_deadline_that_passed_in_the_queue_is_recorded_by_the_sweep(world: World) -> None:
    world.workflow(world.read_tool(), budget=Budget(deadline_ms=10_000))
    run = world.start()
    world.sweep_when_due(run)

    row = world.row(run)
    assert (row["status"], row["reason"]) == ("budget_exhausted", "deadline-exhausted")
    assert world.messages == [] and world.service.calls.total() == 0


def test_a_question_expires_with_its_run(world: World) -> None:
    world.workflow(
        world.read_tool(),
        plan=[{"kind": "clarify", "question": "which?"}],
        budget=Budget(expires_ms=50_000),
    )
    run = world.start()
    world.step(run)
    assert world.row(run)["status"] == "awaiting_input"
    world.sweep_when_due(run)

    row = world.row(run)
    assert (row["status"], row["reason"]) == ("budget_exhausted", "expired")
    assert [e["type"] for e in world.trace(run)[-2:]] == ["run.resumed", "run.stopped"]


@pytest.mark.accept("LED-16")
@pytest.mark.parametrize("over", ["deadline", "expiry", "cancel"])
def test_no_limit_ends_a_run_over_a_doubt(world: World, over: str) -> None:
    limits = {"deadline": 20_000, "expiry": 10**6, "cancel": 10**6}
    budget = Budget(deadline_ms=limits[over], expires_ms=20_000 if over == "expiry" else 10**9)
    world.workflow(world.write_tool(), plan=[save(id=1)], budget=budget)
    run = world.start()
    world.service.script, world.service.hidden = ["lost"], True
    world.step(run)
    if over == "cancel":
        world.fleet.cancel(run)
    while world.effect("save:1")["status"] == "unknown":
        assert world.row(run)["status"] == "reconciling"
        world.sweep_when_due(run)
        world.service.hidden = world.effect("save:1")["absences"] < 1  # found at last

    ended = world.drive(run)
    assert world.effect("save:1")["status"] == "applied"
    wanted = {
        "deadline": ("budget_exhausted", "deadline-exhausted"),
        "expiry": ("budget_exhausted", "expired"),
        "cancel": ("handed_off", "unknown-effect"),
    }
    assert (ended.status, ended.reason) == wanted[over]


# ---- doubt ---------------------------------------------------------------------------------------


@pytest.mark.accept("LED-04")
def test_a_doubt_is_queried_first_and_the_record_ends_it(world: World) -> None:
    run = doubtful(world, "lost")
    world.sweep_when_due(run)

    assert world.service.calls[f"query {run}"] == 1
    found = world.effect("save:1")
    assert (found["status"], found["token"]) == ("applied", 1)
    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"] and world.used(run)["tool_calls"] == 1
    kinds = [item["kind"] for item in world.ledger.evidence(found["id"])]
    assert kinds == ["outcome", "query"]


@pytest.mark.accept("LED-10")
def test_absence_is_believed_after_two_answers_and_the_same_intent_is_sent_again(
    world: World,
) -> None:
    run = doubtful(world)
    sent_at: list[int] = []
    while world.effect("save:1")["status"] == "unknown":
        world.sweep_when_due(run)
        sent_at.append(world.clock.ms)

    settled = world.effect("save:1")["dispatch_deadline_at"] + SETTLED_MS - 5_000
    assert len(sent_at) == 3
    assert sent_at[0] < settled <= sent_at[1] < sent_at[2]  # one early, which proves nothing
    assert world.effect("save:1")["status"] == "absent"
    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"]
    assert world.used(run)["tool_calls"] == 2  # each dispatch is charged


@pytest.mark.accept("LED-10")
def test_what_lands_late_but_in_time_is_found_and_not_sent_again(world: World) -> None:
    """It is applied at the last moment that the tool has declared."""
    run = doubtful(world, "late:29000", key_valid_for_ms=0)

    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"] and world.service.calls[f"write {run}"] == 1


@pytest.mark.accept("LED-10")
@pytest.mark.parametrize(
    ("key", "status"), [(FOREVER, "completed"), (0, "handed_off"), (60_000, "handed_off")]
)
def test_without_a_bound_on_stalls_absence_settles_nothing_by_itself(
    unbounded: World, key: int, status: str
) -> None:
    """Only a lasting key does, by being sent again; otherwise a person decides."""
    run = doubtful(unbounded, "late:200000", key_valid_for_ms=key)
    asked = unbounded.drive(run)

    assert asked.status == status
    assert unbounded.service.calls[f"query {run}"] == QUERIES_PER_DISPATCH
    unbounded.advance(300_000)
    assert unbounded.service.performed == ["save:1"]
    if status == "handed_off":
        (handoff,) = unbounded.ledger.people.handoffs(run_id=run)
        assert handoff["package"]["effect"]["intent_key"] == "save:1"
        assert unbounded.ledger.effects(unresolved=True)[0]["status"] == "handed_off"


@pytest.mark.accept("LED-13")
@pytest.mark.parametrize(
    ("tool", "status", "writes"),
    [
        ({"key_valid_for_ms": FOREVER}, "completed", 2),
        ({"key_valid_for_ms": 120_000}, "completed", 2),  # it still lives
        ({"key_valid_for_ms": 40_000}, "failed", 1),  # absent, but its key would die on the way
        ({"key_valid_for_ms": 0}, "completed", 2),  # no key: a believed absence suffices
        ({"key_valid_for_ms": 40_000, "not_after": True}, "completed", 2),
    ],
)
def test_a_believed_absence_is_sent_again_only_while_its_key_lives(
    world: World, tool: dict[str, Any], status: str, writes: int
) -> None:
    run = doubtful(world, **tool)
    ended = world.drive(run)

    assert ended.status == status
    assert world.service.calls[f"write {run}"] == writes
    assert world.service.performed == ["save:1"] * (writes - 1)
    if status == "failed":
        assert ended.reason == "tool-failed"
        assert world.trace(run, "run.stopped")[-1]["detail"]["evidence"] == "absent"


@pytest.mark.accept("LED-13")
def test_a_senders_own_word_allows_another_attempt_whatever_became_of_the_key(
    world: World,
) -> None:
    world.workflow(world.write_tool(key_valid_for_ms=1), plan=[save(id=1)], budget=PATIENT)
    first, second = world.start(), world.start()
    world.service.script = ["refused"]
    assert world.drive(first).status == "failed"
    world.advance(10**6)

    assert world.drive(second).status == "completed"
    assert world.service.performed == ["save:1"]


@pytest.mark.accept("LED-04")
def test_without_a_query_the_same_key_is_sent_again_inside_its_lifetime(world: World) -> None:
    run = doubtful(world, "lost", query=False)
    keys: list[str | None] = []

    def execute(arguments: Any, call: ToolCall) -> Json:
        keys.append(call.key)
        return "known"

    world.service.script = [execute]
    world.sweep_when_due(run)
    assert world.row(run)["status"] == "running"
    assert world.effect("save:1")["status"] == "unknown"  # released, and a doubt still
    assert world.drive(run).status == "completed"

    assert keys == [world.effect("save:1")["id"]]
    assert world.used(run)["tool_calls"] == 2


@pytest.mark.accept("LED-04")
def test_a_released_doubt_whose_worker_dies_is_a_doubt_again(world: World) -> None:
    run = doubtful(world, "lost", query=False)
    since = world.effect("save:1")["unknown_since"]
    world.sweep_when_due(run)
    outside = Outside(lambda place: place == "after claim")
    outside.then = outside.die
    world.step(run, outside=outside)
    world.sweep_when_due(run)

    assert world.row(run)["status"] == "reconciling"
    assert world.effect("save:1")["unknown_since"] == since
    assert world.drive(run).status == "completed" and world.service.performed == ["save:1"]


def test_a_query_is_paid_for_before_it_is_asked(world: World) -> None:
    run = doubtful(world)
    left: list[int] = []

    def ask(arguments: Any, call: Any) -> Json:
        left.append(world.effect("save:1")["queries_left"])
        raise TimeoutError

    _query(world, ask)
    while world.row(run)["status"] == "reconciling":
        world.sweep_when_due(run)

    assert left == list(range(QUERIES_PER_DISPATCH))[::-1]
    answers = world.ledger.evidence(world.effect("save:1")["id"])
    assert [a["detail"].get("problem") for a in answers if a["kind"] == "query"] == [
        "TimeoutError"
    ] * QUERIES_PER_DISPATCH


def test_a_query_that_was_lost_with_its_sweep_is_asked_again_soon(world: World) -> None:
    """As soon as it could not be under way any more: here, after its five seconds and a margin."""
    run = doubtful(world, "lost")
    world.advance(SECOND)

    class Killed(BaseException):
        pass

    def dies(arguments: Any, call: Any) -> Json:
        raise Killed

    sweeper = world.sweeper()
    sweeper.ask = lambda function, *args, **options: ask_directly(dies, *args, **options)
    with pytest.raises(Killed):
        sweeper.sweep()
    assert world.row(run)["status"] == "reconciling"

    world.advance(10 * SECOND - 1)
    world.reconciler.sweep()
    assert world.service.calls[f"query {run}"] == 0
    world.advance(1)
    world.reconciler.sweep()
    assert world.service.calls[f"query {run}"] == 1
    assert world.row(run)["status"] == "running"


def _query(world: World, ask: Callable[[Any, Any], Any]) -> None:
    """Replace how the write's tool is queried."""

    def asked(function: object, *args: Any, **options: Any) -> Future[Called]:
        return ask_directly(ask, *args, **options)

    world.reconciler.ask = asked


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"of": "save:2"}, "record-of-another-subject"),
        ({"of": "save:1", "id": 9}, "record-does-not-fit"),
        ({"of": float("nan")}, "record-violates-contract"),
        ({"no": "subject"}, "record-not-judged"),
        ({"of": "save:1", "id": "exit"}, "record-not-judged"),
        (Applied({"of": "save:2"}, "forged"), "record-of-another-subject"),
        (NoAnswer("busy"), "busy"),
    ],
)
def test_a_record_that_is_not_ours_proves_nothing(world: World, record: Any, problem: str) -> None:
    def fits(arguments: Any, result: Any) -> bool:
        if result.get("id") == "exit":
            raise SystemExit  # a fault of the workflow's code is not the sweep's end
        return bool(result.get("id", 1) == 1)

    run = doubtful(
        world,
        belongs_to=lambda result, facts: result["of"] == "save:1",
        postcondition=fits,
    )
    _query(world, lambda arguments, call: record)
    world.sweep_when_due(run)

    assert world.effect("save:1")["status"] == "unknown"
    last = world.ledger.evidence(world.effect("save:1")["id"])[-1]["detail"]
    assert (last["answer"], last["problem"]) == ("noanswer", problem)
    _query(world, lambda arguments, call: Applied({"of": "save:1", "id": 1}, "record:7"))
    assert world.drive(run).status == "completed"
    assert world.effect("save:1")["evidence"] == "record:7"


def test_a_pending_answer_is_waited_for_and_costs_no_query(world: World) -> None:
    run = doubtful(world, "late:40000")
    _query(world, lambda arguments, call: Pending())
    for _ in range(QUERIES_PER_DISPATCH * 2):
        if world.clock.ms > world.effect("save:1")["unknown_since"] + 50_000:
            break
        world.sweep_when_due(run)
    assert world.effect("save:1")["queries_left"] == QUERIES_PER_DISPATCH
    world.reconciler = world.sweeper()

    assert world.drive(run).status == "completed" and world.service.performed == ["save:1"]


def test_an_answer_about_an_older_moment_changes_nothing(world: World) -> None:
    """A late receipt proves the effect while the query is under way, whose answer is "absent"."""
    run = doubtful(world)
    workflow = world.fleet.workflows["draft@1"]
    found = world.effect("save:1")
    by, receipt = found["dispatcher"], Succeeded("done", "done")
    out = Outcome(found["id"], 1, End.RETURNED, receipt, evidence_id="receipt:1", dispatcher=by)

    def late_receipt(arguments: Any, call: Any) -> Json:
        world.ledger.rule(
            run, lambda locked: protocol.outcome(locked, workflow, out), effect_id=found["id"]
        )
        return None

    world.advance(SETTLED_MS)
    _query(world, late_receipt)
    world.reconciler.sweep()

    assert world.effect("save:1")["status"] == "applied"
    assert world.effect("save:1")["evidence"] == "receipt:1"
    assert world.drive(run).status == "completed"


def test_a_reconciler_without_the_workflows_code_leaves_the_query_to_others(
    world: World,
) -> None:
    run = doubtful(world, "lost")
    workflows, world.reconciler.workflows = world.reconciler.workflows, {}
    for _ in range(QUERIES_PER_DISPATCH + 2):
        world.sweep_when_due(run)
    assert world.effect("save:1")["queries_left"] == QUERIES_PER_DISPATCH
    assert world.reconciler.counts["foreign"] == QUERIES_PER_DISPATCH + 2
    world.reconciler.workflows = workflows

    assert world.drive(run).status == "completed"


@pytest.mark.accept("LED-12")
def test_contrary_evidence_opens_the_doubt_anew_with_a_window_of_its_own(world: World) -> None:
    """A worker that was paused beyond all bounds sends after all, and lands late."""
    world.workflow(world.write_tool(key_valid_for_ms=0), plan=[save(id=1)], budget=PATIENT)
    run = world.start()
    world.service.script = ["late:24000"]

    def believed_absent() -> None:
        world.advance(LEASE_MS)
        while world.effect("save:1")["status"] in ("dispatched", "unknown"):
            world.sweep_when_due(run)
        assert world.effect("save:1")["status"] == "absent"

    pause = Outside(lambda place: place == "before write tool", believed_absent)
    world.step(run, outside=pause)
    assert world.row(run)["status"] == "reconciling"
    assert world.effect("save:1")["doubt_trigger"] == "contrary-evidence"

    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"]  # found, since it was waited for


# ---- what an operator sees -----------------------------------------------------------------------


@pytest.mark.accept("LED-08")
@pytest.mark.parametrize(
    "trigger", ["timeout", "cancellation", "exception", "reported", "worker-lost"]
)
@pytest.mark.parametrize("query", [True, False])
def test_a_doubt_is_listed_with_all_that_an_operator_needs(
    world: World, trigger: str, query: bool
) -> None:
    tool = world.write_tool(query=query, key_valid_for_ms=0, timeout_ms=30)
    world.workflow(tool, plan=[save(id=1)], budget=PATIENT)
    run = world.start()
    outside = Outside()
    if trigger == "worker-lost":
        outside = Outside(lambda place: place == "before outcome")
        outside.then = outside.die
    elif trigger == "cancellation":
        runtime = world.worker()

        def cancel() -> None:
            world.fleet.cancel(run)
            runtime.renew()  # learns of the wish, as it does every second

        world.service.script = ["hang"]
        world.step(
            run, runtime=runtime, outside=Outside(lambda p: p == "before write tool", cancel)
        )
    words = {"timeout": "hang", "exception": "dropped", "reported": "unclear", "worker-lost": "ok"}
    if trigger != "cancellation":
        world.service.script = [words[trigger]]
        world.step(run, outside=outside)
    if trigger == "worker-lost":
        world.sweep_when_due(run)
    world.advance(400)

    (shown,) = world.ledger.effects(unresolved=True)
    assert (shown["tool"], shown["intent_key"], shown["trigger"]) == ("save", "save:1", trigger)
    assert shown["recovery"] == ("query" if query else "human")
    assert shown["age_ms"] == 400 and shown["status"] == "unknown"
    required = world.trace(run, "effect.reconciliation-required")[-1]["detail"]
    assert (required["trigger"], required["recovery"]) == (trigger, shown["recovery"])
    rested = world.drive(run)
    still = [effect["status"] for effect in world.ledger.effects(unresolved=True)]
    assert still == (["handed_off"] if rested.status == "handed_off" and not query else [])


def test_absent_is_the_answer_of_a_query_that_finds_nothing(world: World) -> None:
    run = doubtful(world)
    _query(world, lambda arguments, call: Absent())
    world.sweep_when_due(run)

    last = world.ledger.evidence(world.effect("save:1")["id"])[-1]["detail"]
    assert last == {"answer": "absent", "sent_at": world.clock.ms}
