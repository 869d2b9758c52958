"""The sweep as a service: it is fair, bounded and shared, whoever drives it and how often.

Queries are held by the tests themselves: one that hangs is a future that nobody completes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest

from handrail.agent.budget import Budget
from handrail.agent.effects import QUERIES_PER_DISPATCH
from handrail.agent.stage import End
from handrail.broker.message import StepMessage
from handrail.broker.publish import PublishFailed
from handrail.fleet import ask_bounded
from handrail.ledger import statements
from handrail.ledger.accept import REPUBLISH_MS
from handrail.ledger.errors import DatabaseUnavailable
from handrail.ledger.ledger import POSTPONE_MS, DueStep
from handrail.ledger.liveness import SWEPT
from handrail.reconciler.errands import STUCK_S
from handrail.reconciler.pace import GRACE_S, Pace
from handrail.reconciler.sweep import QUIET, SWEEP_S, Reconciler
from handrail.reconciler.timer import SweepTimer
from handrail.tasks.calls import Called, ToolCall, at_any_time
from tests.world import KINDS, LEASE_MS, SECOND, World, open_world, save_for_goal

PATIENT: Final = Budget(deadline_ms=10**9, expires_ms=10**10)
EVERY_S: Final = 2.0


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An empty world on each database."""
    with open_world(request) as opened:
        yield opened


@dataclass
class Questions:
    """Queries as a test answers them: at once from the service's records, or by `answer` alone."""

    hangs: Callable[[ToolCall], bool] = lambda call: False
    asked: list[str] = field(default_factory=list)  # run ids
    open: dict[str, Future[Called]] = field(default_factory=dict)
    most_open: Counter[str] = field(default_factory=Counter)  # by tool, and "" for all
    before: Callable[[], object] = lambda: None
    guard: threading.Lock = field(default_factory=threading.Lock)
    _tools: dict[str, str] = field(default_factory=dict)

    def ask(
        self,
        function: Callable[..., Any],
        arguments: Any,
        context: ToolCall,
        limit_ms: int,
        in_time: Callable[[], bool] = at_any_time,
    ) -> Future[Called]:
        self.before()
        found: Future[Called] = Future()
        with self.guard:
            self.asked.append(context.run_id)
            if self.hangs(context):
                self.open[context.run_id] = found
                self._tools[context.run_id] = context.tool
                count = Counter(self._tools[run] for run in self.open)
                self.most_open |= count + Counter({"": count.total()})
                return found
        found.set_result(Called(End.RETURNED, function(arguments, context)))
        return found

    def answer(self, run_id: str, record: Any = None) -> None:
        """Let the service answer at last."""
        with self.guard:
            found = self.open.pop(run_id)
        found.set_result(Called(End.RETURNED, record))


def asking(world: World, questions: Questions, **options: Any) -> Reconciler:
    """A reconciler whose queries are a test's, before a fleet that takes up at once what is
    published; its own clock is the machine's.
    """
    given = {"ask": questions.ask, "clock": time.monotonic, "publish": taken_up(world), **options}
    return replace(world.sweeper(), **given)


def taken_up(world: World) -> Callable[[Sequence[StepMessage]], None]:
    """Publish to workers that claim each step at once, and then do nothing."""

    def publish(messages: Sequence[StepMessage]) -> None:
        world.messages.extend(messages)
        for message in messages:
            world.claim(message.run_id)

    return publish


def doubts(
    world: World, count: int, *, tool: str = "save", first: int = 0, **contract: Any
) -> list[str]:
    """Runs whose write took effect and whose answer was lost; their first query is due."""
    if f"{tool}s@1" not in world.fleet.workflows:
        plan: list[Any] = [lambda seen: save_for_goal(seen) | {"tool": tool}]
        writes = world.write_tool(tool, **contract)
        world.workflow(writes, plan=plan, name=f"{tool}s", budget=PATIENT)
    numbers = range(first, first + count)
    runs = [world.start(f"{tool}s", run_id=f"{tool}-{number}") for number in numbers]
    for run in runs:
        world.service.script = ["lost"]
        world.step(run)
        assert world.row(run)["status"] == "reconciling"
    world.messages.clear()
    world.advance(SECOND)
    return runs


def lost(world: World, name: str = "fresh") -> str:
    """A run whose first message was lost, and that the sweep has to publish by now."""
    if "plain@1" not in world.fleet.workflows:
        world.workflow(world.read_tool(), name="plain", budget=PATIENT)
    run = world.start("plain", run_id=name)
    world.advance(REPUBLISH_MS)
    return run


def published(world: World) -> list[str]:
    return [message.run_id for message in world.messages]


def statuses(world: World, runs: Sequence[str]) -> dict[str, int]:
    return dict(Counter(world.row(run)["status"] for run in runs))


# ---- fairness ------------------------------------------------------------------------------------


def test_however_many_doubts_are_due_a_run_that_only_has_to_go_on_is_in_the_first_batch(
    world: World,
) -> None:
    before_it = doubts(world, 12)
    fresh = lost(world)
    reconciler = asking(world, Questions(hangs=lambda call: True), queries=2)
    taken = world.ledger.due_for_sweep(limit=3, doubts=3)
    assert Counter(run.status for run in taken) == {"queued": 1, "reconciling": 3}
    world.advance(POSTPONE_MS)

    reconciler.sweep_until_quiet(limit=3, within_s=0.2)
    assert published(world) == [fresh]
    assert statuses(world, before_it) == {"reconciling": 12}


def test_a_run_that_becomes_due_during_a_sweep_does_not_wait_for_its_doubts(world: World) -> None:
    """Every answer takes a while, and the sweep looks up in between."""
    doubts(world, 8)
    questions = Questions(before=lambda: time.sleep(0.05))
    world.workflow(world.read_tool(), name="plain", budget=PATIENT)
    world.start("plain", run_id="fresh")
    first = questions.before

    def meanwhile() -> None:
        first()
        if len(questions.asked) == 2:
            world.control.run("UPDATE handrail_run SET wake_at = 0 WHERE id = 'fresh'", {})

    questions.before = meanwhile
    asking(world, questions, queries=2).sweep_until_quiet()

    order = published(world)
    assert order.index("fresh") < len(order) - 1, "it came before the last of the doubts"
    assert len(questions.asked) == 8


def test_no_more_doubts_are_set_going_than_the_fleet_takes_up(world: World) -> None:
    """A queue is served in order: what is settled must not stand before every fresh run."""
    runs = doubts(world, 12)
    reconciler = asking(world, Questions(), queries=4, publish=world.messages.extend)
    while not published(world):
        reconciler.sweep_until_quiet(within_s=GRACE_S / 4)
        world.advance(POSTPONE_MS)
    waiting = set(published(world))
    assert len(waiting) <= 4

    claims = [world.claim(run) for run in waiting]
    assert all(claims)
    reconciler.publish = taken_up(world)
    while not reconciler.sweep_until_quiet().quiet:
        world.advance(POSTPONE_MS)
    assert statuses(world, runs) == {"running": 12}
    world.advance(LEASE_MS)
    world.messages.clear()
    world.reconciler.sweep_until_quiet()  # those workers are gone
    assert sorted(published(world)) == sorted(runs)


def test_where_nobody_takes_anything_up_doubts_are_settled_all_the_same(world: World) -> None:
    """Some at a time, each for a while: perhaps there is no worker."""
    now = 0.0
    pace = Pace(ledger=world.ledger, most=2, clock=lambda: now)
    for name in ("a", "b"):
        assert pace.has_room(0)
        pace.set_going(fresh_step(world, name))
    assert not pace.has_room(0)
    now = GRACE_S / 2
    assert not pace.has_room(0)
    now = GRACE_S + 0.1
    assert pace.has_room(1) and not pace.has_room(2)


def test_a_step_that_is_claimed_makes_room_for_a_doubt(world: World) -> None:
    pace = Pace(ledger=world.ledger, most=2)
    for name in ("a", "b"):
        pace.set_going(fresh_step(world, name))
    assert not pace.has_room(0)
    assert world.claim("a") is not None
    assert pace.has_room(0) and not pace.has_room(1)


def fresh_step(world: World, name: str) -> DueStep:
    lost(world, name)
    [step] = [run.due for run in world.ledger.due_for_sweep(limit=9) if run.run_id == name]
    assert step is not None
    return step


def test_what_goes_on_by_itself_leaves_doubts_their_share(world: World) -> None:
    [doubt] = doubts(world, 1)
    due = [world.start("saves", run_id=f"due-{number}") for number in range(9)]
    world.advance(REPUBLISH_MS)
    questions = Questions()
    reconciler = asking(world, questions)
    reconciler.sweep(limit=3)

    assert questions.asked == [doubt]
    assert len(set(published(world)) & set(due)) == 3


# ---- queries side by side ------------------------------------------------------------------------


def test_a_tool_that_hangs_keeps_the_others_neither_of_this_sweep_nor_of_the_next(
    world: World,
) -> None:
    """It gets half of the places, and is left alone while its calls hold them."""
    stuck = doubts(world, 12, tool="stuck")
    quick = doubts(world, 3, tool="quick")
    questions = Questions(hangs=lambda call: call.tool == "stuck")
    reconciler = asking(world, questions, queries=8)

    def sweep_until_running(runs: Sequence[str]) -> None:
        for _ in range(20):
            assert not reconciler.sweep_until_quiet(limit=4, within_s=STUCK_S + 0.5).quiet
            if statuses(world, runs) == {"running": len(runs)}:
                return
            world.advance(POSTPONE_MS)
        raise AssertionError(statuses(world, runs))

    sweep_until_running(quick)
    assert questions.most_open == {"stuck": 4, "": 4}
    sweep_until_running(doubts(world, 1, tool="quick", first=3))
    assert questions.most_open["stuck"] == 4
    asked = Counter(questions.asked)
    assert [run for run in stuck if asked[run] > 1] == [], "a call under way is not repeated"

    for run in [*questions.open]:
        questions.answer(run, world.service.records[f"save:{run}"])
    reconciler.finish()
    assert statuses(world, [run for run in stuck if asked[run]]) == {"running": 4}


def test_an_answer_that_comes_after_the_sweep_is_taken_by_the_next(world: World) -> None:
    [run] = doubts(world, 1)
    questions = Questions(hangs=lambda call: True)
    reconciler = asking(world, questions)
    while not questions.asked:
        reconciler.sweep_until_quiet(within_s=0.2)
        world.advance(POSTPONE_MS)
    assert world.row(run)["status"] == "reconciling"

    questions.answer(run, world.service.records[f"save:{run}"])
    assert reconciler.sweep_until_quiet(within_s=5.0).quiet
    assert world.row(run)["status"] == "running"
    assert questions.asked == [run]
    assert world.effect(f"save:{run}")["queries_left"] == QUERIES_PER_DISPATCH - 1


@pytest.mark.parametrize("hands", [0, 3])
def test_queries_of_real_functions_run_side_by_side_and_each_is_asked_once(
    world: World, hands: int
) -> None:
    """Two sweeps at once, with the fleet's own threads; each query waits until it has company."""
    runs = doubts(world, 24)
    together, most, open_now = threading.Barrier(4), 0, 0
    guard = threading.Lock()
    tool = world.fleet.workflows["saves@1"].tools[0]

    def find(arguments: Any, call: ToolCall) -> Any:
        nonlocal most, open_now
        with guard:
            open_now += 1
            most = max(most, open_now)
        together.wait(timeout=20)
        with guard:
            open_now -= 1
        return world.service.query(arguments, call)

    object.__setattr__(tool, "query", find)

    def sweep(_: int) -> None:
        reconciler = asking(world, Questions(), ask=ask_bounded, queries=8, hands=hands)
        assert reconciler.sweep_until_quiet(limit=5, within_s=30).quiet
        reconciler.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(sweep, range(2)))

    assert statuses(world, runs) == {"running": 24}
    assert [world.service.calls[f"query {run}"] for run in runs] == [1] * 24
    assert 4 <= most <= 8, "four of one tool for each of two sweeps"
    assert sorted(published(world)) == sorted(runs)


# ---- bounded -------------------------------------------------------------------------------------


def test_a_sweep_takes_no_more_after_its_time_and_the_rest_comes_again(world: World) -> None:
    runs = doubts(world, 16)
    now = 0.0

    def slowly() -> None:
        nonlocal now
        now += 0.9

    questions = Questions(before=slowly)
    reconciler = asking(world, questions, queries=1, clock=lambda: now)
    first = reconciler.sweep_until_quiet()
    assert not first.quiet
    assert SWEEP_S <= 0.9 * len(questions.asked) < SWEEP_S + 1
    assert first.looked_at == len(questions.asked)
    assert not reconciler.sweep_until_quiet().looked_at  # the others were taken, and not reached

    world.advance(POSTPONE_MS)
    while not reconciler.sweep_until_quiet().quiet:
        world.advance(POSTPONE_MS)
    assert sorted(questions.asked) == sorted(runs)
    assert statuses(world, runs) == {"running": 16}


def test_a_backlog_is_worked_off_by_one_tick_and_not_a_batch_a_tick(world: World) -> None:
    runs = doubts(world, 30)
    swept = asking(world, Questions()).sweep_until_quiet(limit=4, within_s=50)

    assert swept.quiet and swept.looked_at == 30
    assert statuses(world, runs) == {"running": 30}
    assert swept.counts["answer:applied"] == swept.counts["moved:running"] == 30


def test_a_sweep_that_is_told_to_stop_ends_soon_and_takes_the_answers_that_come(
    world: World,
) -> None:
    runs = doubts(world, 6)
    questions = Questions(hangs=lambda call: True)
    reconciler = asking(world, questions, queries=2)

    def stop_and_answer() -> None:
        reconciler.stop()
        answers = [(run, world.service.records[f"save:{run}"]) for run in questions.open]
        for run, record in answers:
            questions.answer(run, record)

    threading.Timer(0.3, stop_and_answer).start()
    began = time.monotonic()
    assert not reconciler.sweep_until_quiet().quiet

    assert time.monotonic() - began < SWEEP_S / 2
    assert statuses(world, runs)["running"] == 1  # one place for one tool
    assert reconciler.tick(every_s=EVERY_S) is None


@pytest.mark.accept("FLT-18")
def test_ten_thousand_queued_runs_get_at_most_one_more_message_each_in_twenty_seconds(
    world: World,
) -> None:
    """And then one after 20 s, 40 s and so on, however often the sweep runs."""
    world.workflow(world.read_tool(), name="plain", budget=PATIENT)
    copy(world, world.start("plain", run_id="pattern"), 9_999)
    reconciler = asking(world, Questions(), publish=world.messages.extend)
    sent: list[tuple[int, int]] = []
    start = world.clock.ms
    for at_s in (0, 5, 9, 10, 11, 15, 20, 29, 30, 35, 69, 70):
        world.advance(start + at_s * SECOND - world.clock.ms)
        before = len(world.messages)
        reconciler.sweep_until_quiet(within_s=50)
        if len(world.messages) > before:
            sent.append((at_s, len(world.messages) - before))

    assert sent == [(10, 10_000), (30, 10_000), (70, 10_000)]
    assert set(Counter(published(world)).values()) == {3}
    clear_copies(world)


def copy(world: World, run: str, count: int, **changed: str) -> None:
    """Make copies of a run's row, with some columns as SQL says; `n` is the copy's number."""
    row = world.row(run)
    values = ", ".join({"id": "'copy-' || n", **changed}.get(name, f"p.{name}") for name in row)
    numbers = (
        f"generate_series(1, {count}) AS n"
        if world.postgres
        else f"(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count})"
        " SELECT n FROM s)"
    )
    world.control.run(
        f"INSERT INTO handrail_run ({', '.join(row)}) SELECT {values}"
        f" FROM handrail_run AS p, {numbers} WHERE p.id = :run",
        {"run": run},
    )


def clear_copies(world: World) -> None:
    """What was never accepted has no trace, which the end of a world would find."""
    world.control.run("DELETE FROM handrail_run WHERE id LIKE 'copy-%'", {})


# ---- a broker that is away -----------------------------------------------------------------------


def test_what_could_not_be_published_is_due_as_it_was(world: World) -> None:
    """It is not counted as a publication; the broker is asked once a sweep, not once a batch."""
    runs = [lost(world, f"lost-{number}") for number in range(7)]
    attempts = 0

    def away(messages: Sequence[StepMessage]) -> None:
        nonlocal attempts
        attempts += 1
        raise PublishFailed(len(messages), "ConnectionError")

    reconciler = asking(world, Questions(), publish=away)
    swept = reconciler.sweep_until_quiet(limit=2)

    assert swept.quiet and attempts == 1
    assert swept.counts == {"unpublished": 7}
    assert {world.row(run)["publishes"] for run in runs} == {0}
    reconciler.publish = world.messages.extend
    world.advance(POSTPONE_MS)
    reconciler.sweep_until_quiet(limit=2)
    assert sorted(published(world)) == runs
    assert {world.row(run)["publishes"] for run in runs} == {1}


def test_what_is_claimed_while_it_is_published_is_left_alone(world: World) -> None:
    run = lost(world)

    def publish(messages: Sequence[StepMessage]) -> None:
        assert world.claim(run) is not None

    asking(world, Questions(), publish=publish).sweep()

    row = world.row(run)
    assert (row["publishes"], row["wake_at"]) == (0, world.clock.ms + LEASE_MS)
    world.advance(LEASE_MS)
    world.reconciler.sweep()


# ---- whoever drives it ---------------------------------------------------------------------------


def test_sweeps_that_have_piled_up_cost_next_to_nothing(world: World) -> None:
    """A beat went on while no worker ran: the first message does the work of all."""
    run = lost(world)
    reconciler = asking(world, Questions(), publish=world.messages.extend)
    assert reconciler.tick(every_s=EVERY_S) is not None
    world.database.statements.clear()
    others = [asking(world, Questions()).tick(every_s=EVERY_S) for _ in range(20)]

    assert others == [None] * 20
    assert len(world.database.statements) == 20
    assert published(world) == [run]
    world.advance(2 * REPUBLISH_MS)
    assert reconciler.tick(every_s=EVERY_S) is not None  # its time has come again
    assert published(world) == [run, run]


def test_a_beat_that_paused_for_an_hour_is_made_up_for_by_its_next_tick(world: World) -> None:
    [doubt] = doubts(world, 1)
    world.workflow(world.read_tool(), name="plain", budget=Budget(deadline_ms=60_000))
    overdue = world.start("plain")
    claimed = world.start("saves")
    assert world.claim(claimed) is not None
    world.advance(3_600_000)
    swept = asking(world, Questions()).tick(every_s=EVERY_S)

    assert swept is not None and swept.quiet
    ended = [world.row(run)["status"] for run in (doubt, overdue, claimed)]
    assert ended == ["running", "budget_exhausted", "running"]


def test_a_sweep_that_is_not_done_keeps_no_other_from_helping(world: World) -> None:
    """Only one that found nothing more to do does."""
    runs = doubts(world, 4, timeout_ms=2 * POSTPONE_MS)  # so long a query is under way
    questions = Questions(hangs=lambda call: call.run_id == runs[0])
    first = asking(world, questions, queries=2)
    while not questions.asked:
        first.sweep_until_quiet(limit=1, within_s=0.2)
    assert world.ledger.since_beat(SWEPT) == 0 and world.ledger.since_beat(QUIET) is None

    world.advance(POSTPONE_MS)
    assert asking(world, questions).tick(every_s=EVERY_S) is not None
    assert statuses(world, runs) == {"reconciling": 1, "running": 3}
    assert Counter(questions.asked).most_common(1)[0][1] == 1


def test_a_process_sweeps_once_at_a_time(world: World) -> None:
    doubts(world, 1)
    inside, ticks = threading.Event(), list[object]()
    reconciler: Reconciler

    def meanwhile() -> None:
        with ThreadPoolExecutor(1) as other:
            ticks.append(other.submit(reconciler.tick, every_s=EVERY_S).result(timeout=20))
        inside.set()

    reconciler = asking(world, Questions(before=meanwhile))
    assert reconciler.tick(every_s=EVERY_S) is not None
    assert inside.is_set() and ticks == [None]


def test_a_tick_without_a_database_fails_quietly_and_the_next_one_works(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lost(world)
    reconciler = asking(world, Questions())

    def away(**_: object) -> None:
        raise DatabaseUnavailable("it is away")

    with monkeypatch.context() as patch:
        patch.setattr(world.ledger, "due_for_sweep", away)
        assert reconciler.tick(every_s=EVERY_S) is None
    assert world.ledger.since_beat(SWEPT) is None
    assert reconciler.tick(every_s=EVERY_S) is not None
    assert published(world) == [run]


def test_a_timer_sweeps_until_it_is_stopped(world: World) -> None:
    run = lost(world)
    done = threading.Event()

    def publish(messages: Sequence[StepMessage]) -> None:
        world.messages.extend(messages)
        done.set()

    reconciler = asking(world, Questions(), publish=publish)
    timer = SweepTimer(reconciler, every_s=0.02)
    timer.start()
    assert done.wait(20)
    timer.close()

    assert "handrail-sweep" not in {thread.name for thread in threading.enumerate()}
    assert published(world) == [run]


# ---- figures -------------------------------------------------------------------------------------


@pytest.mark.accept("LED-08")
def test_figures_say_how_much_the_sweep_has_before_it_and_how_long_it_has_waited(
    world: World,
) -> None:
    runs = doubts(world, 3)
    lost(world)
    figures = world.ledger.figures()

    assert figures["backlog"] == {"due": 1, "in_doubt": 3}
    assert figures["runs"] == {"queued": 1, "reconciling": 3}
    assert figures["sweep_lag_ms"] == REPUBLISH_MS + SECOND - 500
    assert (figures["unknown_effects"], figures["oldest_unknown_ms"]) == (3, 11 * SECOND)
    assert (figures["last_sweep_ms"], figures["open_handoffs"]) == (None, 0)

    world.reconciler.sweep_until_quiet()
    world.advance(700)
    figures = world.ledger.figures()
    assert figures["backlog"] == {"due": 0, "in_doubt": 0}
    assert figures["runs"] == {"queued": 1, "running": 3}
    assert (figures["sweep_lag_ms"], figures["unknown_effects"]) == (0, 0)
    assert figures["last_sweep_ms"] == 700
    world.drive(runs[0], *runs[1:])
    assert world.ledger.figures()["runs"] == {"queued": 1}


def test_an_open_handoff_is_counted_until_somebody_takes_it(world: World) -> None:
    world.workflow(world.write_tool(query=False, key_valid_for_ms=0), plan=[save_for_goal])
    run = world.start()
    world.service.script = ["lost"]
    world.step(run)
    assert world.drive(run).status == "handed_off"
    figures = world.ledger.figures()

    assert (figures["open_handoffs"], figures["unknown_effects"]) == (1, 1)
    assert figures["runs"] == {"handed_off": 1}


def test_figures_are_bounded_and_say_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handrail.ledger.ledger.MOST_COUNTED", 3)
    for number in range(3):
        lost(world, f"lost-{number}")
    assert world.ledger.figures()["at_least"] is True
    assert world.ledger.figures()["backlog"]["due"] == 3
    lost(world, "one-more")
    assert world.ledger.figures()["backlog"]["due"] == 3


def test_figures_look_at_nothing_that_is_over(world: World) -> None:
    """With however many finished runs: each part goes by the partial index made for it."""
    world.workflow(world.read_tool(), name="plain")
    over = {"status": "'completed'", "traced_status": "'completed'", "reason": "'completed'"}
    none = {"due_at": "NULL", "wake_at": "NULL"}
    copy(world, world.start("plain", run_id="pattern"), 20_000, **over, **none)
    world.control.run("ANALYZE handrail_run" if world.postgres else "ANALYZE", {})

    for sql in (statements.FIGURES, statements.RUNS_UNDER_WAY):
        plan = explained(world, sql, {"now": world.clock.ms, "most": 10})
        assert "handrail_run_wake" in plan and "handrail_run_doubt" in plan, plan
        assert "Seq Scan on handrail_run" not in plan, plan
        assert "SCAN handrail_run\n" not in plan + "\n", plan
    assert world.ledger.figures()["runs"] == {"queued": 1}
    clear_copies(world)


def explained(world: World, sql: str, params: Mapping[str, Any]) -> str:
    """The plan of a statement."""
    how = "EXPLAIN (COSTS OFF) " if world.postgres else "EXPLAIN QUERY PLAN "
    rows = world.control.run(how + sql, params)
    return "\n".join(str(row.get("QUERY PLAN", row.get("detail"))) for row in rows)


def test_renewing_leases_goes_by_the_runs_that_are_held(world: World) -> None:
    """SQLite would go through every run there ever was, once a second."""
    sql = statements.RENEW_POSTGRES if world.postgres else statements.RENEW_SQLITE
    params = (
        {"ids": "{a}", "claims": "{b}", "untils": "{1}", "lease_ms": 1}
        if world.postgres
        else {"held": '[["a","b",1]]', "lease_ms": 1, "now": 1}
    )
    plan = explained(world, sql, params)

    assert "SCAN r\n" not in plan + "\n", plan
