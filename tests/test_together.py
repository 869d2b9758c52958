"""Steps that are at the same place at once ask the ledger together, each as if it were alone."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from handrail.agent.budget import Phase
from handrail.agent.protocol import Ruling, cancel
from handrail.agent.stage import Observation
from handrail.agent.status import RunStatus
from handrail.broker.message import StepMessage
from handrail.ledger import database as database_module
from handrail.ledger.errors import DatabaseUnavailable, LedgerLocked
from handrail.ledger.ledger import Claim, StepEnd
from handrail.ledger.session import ConnectionLost
from handrail.tasks.runtime import Handle, Runtime
from handrail.tasks.step import run_step
from handrail.tasks.together import MOST, Together
from tests.world import KINDS, LEASE_MS, SECOND, Outside, World, look, open_world

RUNS = 5
Rows = list[list[dict[str, Any]]]
Calls = Sequence[tuple[str, Mapping[str, Any]]]


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An empty world on each database."""
    with open_world(request) as opened:
        yield opened


# ---- who asks together ---------------------------------------------------------------------------


class Echo:
    """Answers each question with itself, and remembers which came together."""

    def __init__(self) -> None:
        self.trips: list[list[int]] = []

    def answer(self, questions: Sequence[int]) -> list[int | BaseException]:
        self.trips.append(list(questions))
        return [ValueError(str(n)) if n < 0 else n for n in questions]


async def ask_all(together: Together[int, int], *questions: int) -> list[int | BaseException]:
    asked = (together.ask(question) for question in questions)
    return await asyncio.gather(*asked, return_exceptions=True)


def test_what_is_asked_in_one_turn_of_a_loop_is_one_trip() -> None:
    echo = Echo()

    assert asyncio.run(ask_all(Together(echo.answer), 1, 2, 3)) == [1, 2, 3]
    assert echo.trips == [[1, 2, 3]]


def test_what_is_asked_later_is_a_trip_of_its_own() -> None:
    echo = Echo()
    together = Together(echo.answer)

    async def one_after_the_other() -> None:
        assert await together.ask(1) == 1
        assert await together.ask(2) == 2

    asyncio.run(one_after_the_other())
    assert echo.trips == [[1], [2]]


def test_who_is_alone_is_answered_before_the_loop_turns() -> None:
    echo = Echo()
    together = Together(echo.answer)

    async def ask() -> None:
        waiting = asyncio.ensure_future(together.ask(1))
        await asyncio.sleep(0)
        assert await together.ask(2, alone=True) == 2
        assert not waiting.done() and await waiting == 1
        with pytest.raises(ValueError, match="-3"):
            await together.ask(-3, alone=True)

    asyncio.run(ask())
    assert echo.trips == [[2], [1], [-3]]


def test_a_trip_has_a_largest_size_and_nobody_is_left_behind() -> None:
    echo = Echo()
    many = range(2 * MOST + 1)

    assert asyncio.run(ask_all(Together(echo.answer), *many)) == list(many)
    assert [len(trip) for trip in echo.trips] == [MOST, MOST, 1]


def test_an_exception_goes_to_the_one_whose_answer_it_is() -> None:
    one, two, three = asyncio.run(ask_all(Together(Echo().answer), 1, -2, 3))

    assert (one, three) == (1, 3)
    assert isinstance(two, ValueError)


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_what_ends_a_trip_reaches_everybody_who_asked(error: BaseException) -> None:
    def answer(_: Sequence[int]) -> list[int]:
        raise error

    async def caught(together: Together[int, int], question: int) -> BaseException | None:
        try:
            await together.ask(question)
        except BaseException as raised:
            return raised
        return None

    async def two() -> list[BaseException | None]:
        together: Together[int, int] = Together(answer)
        return list(await asyncio.gather(caught(together, 1), caught(together, 2)))

    assert asyncio.run(two()) == [error, error]


def test_one_who_gives_up_waiting_is_answered_all_the_same() -> None:
    echo = Echo()
    together = Together(echo.answer)

    async def gives_up() -> None:
        waiting = asyncio.ensure_future(together.ask(1))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await together.ask(2) == 2

    asyncio.run(gives_up())
    assert {question for trip in echo.trips for question in trip} == {1, 2}


def test_each_event_loop_asks_for_itself() -> None:
    echo = Echo()
    together = Together(echo.answer)
    at_once = threading.Barrier(4)

    def on_a_loop_of_its_own(first: int) -> None:
        async def ask() -> None:
            at_once.wait()
            assert await ask_all(together, first, first + 1) == [first, first + 1]

        asyncio.run(ask())

    threads = [threading.Thread(target=on_a_loop_of_its_own, args=(n,)) for n in (0, 2, 4, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(echo.trips) == [[0, 1], [2, 3], [4, 5], [6, 7]]


# ---- what the ledger makes of it -----------------------------------------------------------------


def several(world: World, count: int = RUNS) -> list[str]:
    """Accept runs of one read each."""
    world.workflow(world.read_tool(), plan=[look(q=1)])
    return [world.start() for _ in range(count)]


def at_once(runtime: Runtime, messages: Sequence[StepMessage]) -> None:
    """Let a worker that has a step at work take messages in one turn of its loop."""

    async def all_of_them() -> None:
        await asyncio.gather(*(run_step(runtime, message) for message in messages))

    runtime.at_work["another"] = cast(Handle, None)
    asyncio.run(all_of_them())
    del runtime.at_work["another"]


def trips_of(world: World, monkeypatch: pytest.MonkeyPatch) -> list[Calls]:
    """Keep what goes to the database together."""
    trips: list[Calls] = []
    claims, ends = world.ledger.claim_each, world.ledger.commit_each

    def claim_each(due: Sequence[tuple[str, int]], **options: Any) -> Any:
        trips.append([("claim", {"id": run_id}) for run_id, _ in due])
        return claims(due, **options)

    def commit_each(steps: Sequence[StepEnd]) -> Any:
        trips.append([("commit", {"id": end.claim.run_id}) for end in steps])
        return ends(steps)

    monkeypatch.setattr(world.ledger, "claim_each", claim_each)
    monkeypatch.setattr(world.ledger, "commit_each", commit_each)
    return trips


def test_steps_side_by_side_are_one_claim_one_commit_and_one_publication(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, trips = several(world), trips_of(world, monkeypatch)
    published: list[Sequence[StepMessage]] = []
    worker = world.worker()
    worker.publish = published.append

    at_once(worker, [world.message(run) for run in runs])

    assert [(trip[0][0], len(trip)) for trip in trips] == [("claim", RUNS), ("commit", RUNS)]
    assert [sorted(message.run_id for message in messages) for messages in published] == [
        sorted(runs)
    ]
    assert worker.counts["steps"] == RUNS
    assert {world.fleet.get(run).observation_count for run in runs} == {1}
    assert {world.drive(run).status for run in runs} == {"completed"}


@pytest.mark.parametrize("others", [False, True])
def test_a_step_asks_at_once_if_it_is_the_only_one(world: World, others: bool) -> None:
    [run], worker = several(world, 1), world.worker()
    seen: list[bool] = []

    def noting(together: Together[Any, Any]) -> Any:
        async def ask(question: object, *, alone: bool) -> Any:
            seen.append(alone)
            return await together.ask(question, alone=alone)

        return SimpleNamespace(ask=ask)

    worker.claims, worker.ends = noting(worker.claims), noting(worker.ends)
    if others:
        at_once(worker, [world.message(run)])
    else:
        asyncio.run(run_step(worker, world.message(run)))

    assert seen == [not others] * 2


def test_of_two_messages_about_one_step_one_is_dropped(world: World) -> None:
    [run] = several(world, 1)
    worker = world.worker()

    at_once(worker, [world.message(run)] * 2)

    assert (worker.counts["steps"], worker.counts["dropped"]) == (1, 1)
    assert world.used(run)["model_calls"] == 1


def test_a_cancel_that_is_wished_meanwhile_stops_its_own_run_alone(world: World) -> None:
    runs = several(world)
    ledger = world.ledger
    claims = ledger.claim_each([(run, 0) for run in runs], holder="w", known=["draft@1"])
    ledger.rule(runs[2], cancel)

    done = ledger.commit_each(
        [StepEnd(claim, going_on(claim), Phase.DECIDE) for claim in all_of(claims)]
    )

    assert [answer is False for answer in done] == [False, False, True, False, False]
    assert world.row(runs[2])["status"] == "cancelling"


def test_one_that_cannot_be_written_does_not_stop_the_others(world: World) -> None:
    """Its observation is in the ledger already, which a constraint refuses."""
    runs = several(world, 3)
    ledger, same = world.ledger, Observation.of("lookup", "the same")
    world.control.run(
        "INSERT INTO handrail_observation (run_id, seq, source, text, digest)"
        " VALUES (:id, 99, 'lookup', 'the same', :digest)",
        {"id": runs[1], "digest": same.digest},
    )
    claims = all_of(ledger.claim_each([(run, 0) for run in runs], holder="w", known=["draft@1"]))

    ends = [replace(going_on(claim), observation=same) for claim in claims]
    done = ledger.commit_each(
        [StepEnd(claim, end, Phase.DECIDE) for claim, end in zip(claims, ends, strict=True)]
    )

    assert [isinstance(answer, Exception) for answer in done] == [False, True, False]
    assert [world.row(run)["lease_until"] is None for run in runs] == [True, False, True]


def test_a_database_that_is_away_is_tried_once_for_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, worker = several(world), world.worker()
    tried = []

    def away(calls: object) -> Rows:
        tried.append(calls)
        raise DatabaseUnavailable("nobody answers")

    monkeypatch.setattr(world.database, "run_together", away)
    at_once(worker, [world.message(run) for run in runs])

    assert len(tried) == 1 and worker.counts["claim-failed"] == RUNS
    assert {world.row(run)["epoch"] for run in runs} == {0}


# ---- a run that somebody else holds --------------------------------------------------------------

Holds = Callable[[str], Any]


@pytest.fixture
def holds(world: World, monkeypatch: pytest.MonkeyPatch) -> Holds:
    """Hold a run's row in an open transaction, for longer than the fleet waits."""
    for name in ("_LOCK_TIMEOUT_MS", "_BUSY_TIMEOUT_MS"):
        monkeypatch.setattr(database_module, name, 300)
    world.ledger.close()  # a connection keeps the patience that it was made with

    @contextmanager
    def holding(run_id: str) -> Iterator[None]:
        with world.control.transaction() as tx:
            tx.run("UPDATE handrail_run SET goal = goal WHERE id = :id", {"id": run_id})
            yield

    return holding


def kept_waiting(world: World, held: str, runs: Sequence[str]) -> set[str]:
    """Whose step fails while one run is held: SQLite has one lock, for all of them."""
    return {held} if world.postgres else set(runs)


def test_a_run_that_somebody_holds_fails_its_own_claim_alone(world: World, holds: Holds) -> None:
    runs, worker = several(world), world.worker()
    failing = kept_waiting(world, runs[2], runs)

    with holds(runs[2]):
        at_once(worker, [world.message(run) for run in runs])

    assert worker.counts["claim-failed"] == len(failing)
    assert worker.counts["steps"] == RUNS - len(failing)
    assert {run for run in runs if not world.row(run)["epoch"]} == failing
    assert {world.drive(run).status for run in runs} == {"completed"}
    assert {world.used(run)["model_calls"] for run in runs} == {2}


def test_a_run_that_somebody_holds_fails_its_own_commit_alone(world: World, holds: Holds) -> None:
    """Its lease and the sweep bring it back; what it has paid for stays charged."""
    runs, worker = several(world), world.worker()
    failing = kept_waiting(world, runs[2], runs)

    with ExitStack() as until_the_end:
        world.outside.when = lambda place: place == "before read tool"

        def hold() -> None:
            world.outside.when = lambda place: False
            until_the_end.enter_context(holds(runs[2]))

        world.outside.then = hold
        at_once(worker, [world.message(run) for run in runs])

    assert worker.counts["step-failed"] == len(failing)
    assert {run for run in runs if world.row(run)["lease_until"] is not None} == failing
    assert {world.drive(run).status for run in runs} == {"completed"}
    assert {run for run in runs if world.used(run)["model_calls"] == 3} == failing


def test_a_lock_that_is_held_for_too_long_is_told_from_a_database_that_is_away(
    world: World, holds: Holds
) -> None:
    [run] = several(world, 1)

    with holds(run), pytest.raises(LedgerLocked) as told:
        world.ledger.rule(run, cancel)

    assert told.value.code == "ledger-locked"
    assert "pg_stat_activity" in str(told.value)
    assert world.row(run)["cancel_requested_at"] is None


def test_a_trip_is_longer_than_any_buffer_both_ways(world: World) -> None:
    """Who sends all of it before he reads would wait for a server that waits for him."""
    long = "x" * 2_000_000
    calls = [("SELECT CAST(:long AS text) AS long", {"long": long})] * 4

    answers = world.database.run_together(calls)

    assert [row["long"] == long for [row] in answers] == [True] * 4


def test_what_cannot_be_committed_was_not_written(world: World) -> None:
    """A constraint that is looked at when the transaction ends: no statement has failed by then."""
    database = world.database
    database.run("CREATE TABLE test_parent (id bigint PRIMARY KEY)", {})
    database.run(
        "CREATE TABLE test_child (parent bigint REFERENCES test_parent (id)"
        " DEFERRABLE INITIALLY DEFERRED)",
        {},
    )
    try:
        with pytest.raises((sqlite3.IntegrityError, ConnectionLost)):
            database.run_together(
                [("INSERT INTO test_child VALUES (:parent)", {"parent": n}) for n in (1, 2)]
            )
        assert database.run("SELECT * FROM test_child", {}) == []
    finally:
        database.run("DROP TABLE test_child", {})
        database.run("DROP TABLE test_parent", {})


# ---- answers that are lost -----------------------------------------------------------------------


@pytest.mark.parametrize("executed", [False, True])
def test_claims_whose_answer_was_lost_are_read_back(
    world: World, monkeypatch: pytest.MonkeyPatch, executed: bool
) -> None:
    runs, worker = several(world), world.worker()
    real = world.database.run_together

    def lost(calls: Calls) -> Rows:
        monkeypatch.setattr(world.database, "run_together", real)
        if executed:
            real(calls)
        raise ConnectionLost("the answer was lost")

    monkeypatch.setattr(world.database, "run_together", lost)
    at_once(worker, [world.message(run) for run in runs])

    assert worker.counts["steps" if executed else "dropped"] == RUNS
    assert {world.used(run)["model_calls"] for run in runs} == {int(executed)}
    assert {world.drive(run).status for run in runs} == {"completed"}


@pytest.mark.parametrize("executed", [False, True])
def test_commits_whose_answer_was_lost_happen_once(
    world: World, monkeypatch: pytest.MonkeyPatch, executed: bool
) -> None:
    runs, worker = several(world), world.worker()
    real = world.ledger._commit_together

    def lost(commits: Any) -> Rows:
        if executed:
            real(commits)
        raise ConnectionLost("the answer was lost")

    monkeypatch.setattr(world.ledger, "_commit_together", lost)
    at_once(worker, [world.message(run) for run in runs])
    monkeypatch.undo()

    assert worker.counts["steps"] == RUNS
    assert sorted(message.run_id for message in world.messages) == sorted(runs)
    assert {world.fleet.get(run).observation_count for run in runs} == {1}
    assert {world.drive(run).status for run in runs} == {"completed"}
    assert {world.used(run)["model_calls"] for run in runs} == {2}


# ---- several workers -----------------------------------------------------------------------------


def test_workers_that_claim_the_same_runs_in_any_order_never_wait_for_each_other(
    world: World,
) -> None:
    """All lock them in one order; and each run is one worker's alone."""
    rounds, runs = 20, several(world)
    barrier = threading.Barrier(2)
    won: list[list[str]] = [[], []]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for at in range(rounds):
                barrier.wait(timeout=30)
                due = [(run, 2 * at) for run in (runs if number else runs[::-1])]
                got = world.ledger.claim_each(due, holder=f"w{number}", known=["draft@1"])
                won[number] += [f"{claim.run_id} {at}" for claim in got if isinstance(claim, Claim)]
                barrier.wait(timeout=30)
                if number:  # every run is due again, one epoch on
                    world.control.run(
                        "UPDATE handrail_run SET status = traced_status, lease_until = NULL,"
                        " due_at = 0, epoch = :epoch,"
                        " steps_left = 9, model_calls_left = 9, tool_calls_left = 9",
                        {"epoch": 2 * at + 2},
                    )
                barrier.wait(timeout=30)
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failed
    assert sorted(won[0] + won[1]) == sorted(f"{run} {at}" for run in runs for at in range(rounds))


@pytest.fixture
def on_postgres(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world where one row can be held alone: SQLite has one lock, for all of them."""
    request.param = "postgres"
    with open_world(request) as opened:
        yield opened


def test_a_worker_that_leaves_waits_for_no_run_that_somebody_holds(on_postgres: World) -> None:
    """That one is left to its lease, and the others go on elsewhere at once."""
    world = on_postgres
    world.workflow(world.read_tool())
    claims = all_of([world.claim(world.start(run_id=name)) for name in "abc"])

    with world.control.transaction() as tx:
        tx.run("SELECT id FROM handrail_run WHERE id = 'b' FOR UPDATE", {})
        returned = world.ledger.give_back(
            [claim.claim_id for claim in claims], unused=[], holder="a worker"
        )

    assert sorted(step.run_id for step in returned) == ["a", "c"]
    assert world.row("b")["lease_until"] is not None


def test_a_run_that_somebody_holds_is_renewed_later_and_holds_up_no_other(
    on_postgres: World,
) -> None:
    world = on_postgres
    world.workflow(world.read_tool())
    claims = all_of([world.claim(world.start(run_id=name)) for name in "abc"])
    before = world.row("b")["lease_until"]
    world.advance(10_000)
    far = world.clock.ms + 10**6
    held = [(claim.run_id, claim.claim_id, far) for claim in claims]

    with world.control.transaction() as tx:
        tx.run("SELECT id FROM handrail_run WHERE id = 'b' FOR UPDATE", {})
        answers = world.ledger.renew(held)

    assert [answers[claim.claim_id] for claim in claims] == [False, None, False]
    assert world.row("b")["lease_until"] == before
    assert world.row("a")["lease_until"] == world.row("c")["lease_until"] == before + 10_000
    assert set(world.ledger.renew(held).values()) == {False}
    assert world.row("b")["lease_until"] == before + 10_000


def test_a_worker_beyond_its_lease_starts_nothing_while_somebody_holds_its_run(
    on_postgres: World,
) -> None:
    """Whoever holds it may be taking it over; what is not renewed is not lost either."""
    world = on_postgres
    world.workflow(world.read_tool(), plan=[look(q=1)])
    run = world.start()
    worker = world.worker(outside := Outside())
    outside.when = lambda place: place == "after model"

    with ExitStack() as until_the_end:

        def beyond_its_lease() -> None:
            outside.when = lambda place: False
            world.advance(LEASE_MS + SECOND)
            tx = until_the_end.enter_context(world.control.transaction())
            tx.run("SELECT id FROM handrail_run WHERE id = :id FOR UPDATE", {"id": run})

        outside.then = beyond_its_lease
        world.step(run, outside=outside, runtime=worker)

    assert worker.counts["fenced"] == 1 and world.service.calls[f"read {run}"] == 0
    assert world.drive(run).status == "completed"


def test_a_row_that_cannot_be_read_fails_its_own_claim_alone(world: World) -> None:
    runs = several(world)
    of_a_newer_release = '{"do": "of-a-newer-release"}'
    was = world.row(runs[2])["pending"]
    change = "UPDATE handrail_run SET pending = :pending WHERE id = :id"
    world.control.run(change, {"pending": of_a_newer_release, "id": runs[2]})

    claims = world.ledger.claim_each(
        [(run, 0) for run in runs], holder="a worker", known=["draft@1"]
    )

    assert isinstance(claims[2], Exception)
    assert len(all_of([claim for claim in claims if claim is not claims[2]])) == RUNS - 1
    world.control.run(change, {"pending": was, "id": runs[2]})


def all_of(claims: Sequence[Claim | BaseException | None]) -> list[Claim]:
    """Claims that were all granted."""
    granted = [claim for claim in claims if isinstance(claim, Claim)]
    assert len(granted) == len(claims)
    return granted


def going_on(claim: Claim) -> Ruling:
    """A ruling by which a run goes on, with nothing new."""
    return Ruling(state=replace(claim.state, status=RunStatus.RUNNING))


def test_a_claim_that_was_on_its_way_as_a_drain_began_is_given_back_unused(world: World) -> None:
    [run] = several(world, 1)
    worker = world.worker(outside := Outside())
    outside.when = lambda place: place == "after claim"
    outside.then = lambda: worker.drain(0)

    world.step(run, outside=outside, runtime=worker)

    row = world.row(run)
    assert (row["lease_until"], row["attempts"]) == (None, 0)
    assert world.service.calls[f"model {run}"] == 0
    assert [message.run_id for message in world.messages] == [run]
    assert world.drive(run).status == "completed"
