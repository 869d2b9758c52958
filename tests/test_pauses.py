"""What is paused is not dispatched, costs nothing while it waits, and goes on; the rest is not held
up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from handrail.agent.budget import Budget
from handrail.agent.pauses import InvalidPause
from handrail.agent.protocol import PAUSED_MS, contrary_evidence
from handrail.agent.review import findings
from handrail.agent.status import RunStatus
from handrail.ledger import statements
from tests.world import (
    KINDS,
    LEASE_MS,
    SECOND,
    Outside,
    World,
    look,
    open_world,
    save_for_goal,
)

MINUTE: Final = 60_000
BUDGET: Final = Budget(deadline_ms=MINUTE, expires_ms=15 * MINUTE)
SCOPES: Final = [
    ("fleet", ""),
    ("tenant", "default"),
    ("workflow", "draft"),
    ("tool", "save"),
]


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An empty world on each database."""
    with open_world(request) as opened:
        yield opened


def writing(world: World, **tool: Any) -> str:
    """Accept a run that will write in its second round, and let it do the first."""
    write = world.write_tool(**tool)
    world.workflow(world.read_tool(), write, plan=[look(q=1), save_for_goal], budget=BUDGET)
    run = world.start(run_id="r")
    world.step(run)
    world.messages.clear()
    return run


def let_wait(world: World, run: str, ms: int) -> None:
    """Let a run wait: whenever the fleet would look at it, it does."""
    until = world.clock.ms + ms
    while world.clock.ms < until and (wake_at := world.row(run)["wake_at"]) is not None:
        world.advance(max(0, min(wake_at, until) - world.clock.ms))
        world.reconciler.sweep()
        while world.messages:
            message = world.messages.pop(0)
            world.advance(150)  # it takes a moment until a worker is free, and to find out
            world.step(message.run_id, message=message)


def deferrals(world: World, run: str) -> set[str]:
    return {event["detail"]["problem"] for event in world.trace(run, "step.deferred")}


# ---- what is paused ------------------------------------------------------------------------------


@pytest.mark.accept("LED-19")
@pytest.mark.parametrize(("scope", "name"), SCOPES)
def test_what_is_paused_waits_without_using_its_budget_and_goes_on(
    world: World, scope: str, name: str
) -> None:
    run = writing(world)
    charged = world.used(run)
    world.fleet.pause(scope, name, reason="the provider is down", by="ann")

    world.step(run)
    let_wait(world, run, 10 * MINUTE)

    found, effect = world.fleet.get(run), world.effect("save:r")
    assert found.status == "running" and world.service.calls["write r"] == 0
    assert (effect["status"], effect["token"]) == ("planned", 0)
    assert deferrals(world, run) == {f"paused:{scope}:{name}"}
    used = {name: world.used(run)[name] - charged[name] for name in charged}
    assert (used["steps"], used["model_calls"], used["tool_calls"]) == (1, 1, 0)  # that round alone
    assert found.deadline_at is None and found.remaining_ms is not None
    assert found.remaining_ms > 59_000

    assert world.fleet.resume(scope, name)

    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:r"]
    assert world.used(run)["tool_calls"] == 2
    assert findings(world.trace(run), RunStatus.COMPLETED) == []


def test_to_try_in_vain_costs_neither_time_nor_attempts(world: World) -> None:
    run = writing(world)
    world.fleet.pause(reason="the provider is down")
    world.step(run)
    left = world.fleet.get(run).remaining_ms

    for _ in range(30):
        world.advance(PAUSED_MS)
        slow = Outside(when=lambda place: place.startswith("before"), then=lambda: pass_time(world))
        world.step(run, outside=slow)

    assert world.fleet.get(run).remaining_ms == left
    assert world.row(run)["attempts"] == 0
    assert len(world.trace(run, "step.deferred")) == 31


def pass_time(world: World) -> None:
    world.advance(100)


def test_however_long_a_pause_lasts_no_worker_is_kept_busy_by_it(world: World) -> None:
    """The sweep lets what waits go on waiting; the trace says once what for."""
    run = writing(world)
    world.fleet.pause("tool", "save", reason="the provider is down")
    world.step(run)
    epoch = world.row(run)["epoch"]

    let_wait(world, run, 10 * MINUTE)

    assert world.row(run)["epoch"] == epoch and len(world.trace(run, "step.deferred")) == 1


def test_a_pause_of_something_else_holds_nothing_up(world: World) -> None:
    run = writing(world)
    for scope, name in (("tenant", "another"), ("workflow", "save"), ("tool", "draft")):
        world.fleet.pause(scope, name, reason="by mistake")

    assert world.drive(run).status == "completed"
    assert deferrals(world, run) == set()


@pytest.mark.accept("LED-19")
def test_the_hard_expiry_does_not_pause(world: World) -> None:
    run = writing(world)
    world.fleet.pause(reason="for ever")

    let_wait(world, run, 16 * MINUTE)

    found = world.fleet.get(run)
    assert (found.status, found.reason) == ("budget_exhausted", "expired")
    assert world.effect("save:r")["status"] == "planned" and not world.service.performed


def test_a_run_that_waits_on_a_pause_can_be_cancelled(world: World) -> None:
    run = writing(world)
    world.fleet.pause(reason="the provider is down")
    world.step(run)

    assert world.fleet.cancel(run).status == "cancelled"

    world.fleet.resume()
    assert world.fleet.get(run).status == "cancelled" and not world.service.performed


@pytest.mark.accept("LED-19")
def test_a_pause_that_comes_before_the_dispatch_stops_it_and_one_after_does_not(
    world: World,
) -> None:
    run = writing(world)
    outside = Outside(
        when=lambda place: place == "before acquire",  # everything but the dispatch was done
        then=lambda: world.fleet.pause("tool", "save", reason="now"),
    )
    world.step(run, outside=outside)
    assert world.effect("save:r")["status"] == "planned" and not world.service.performed
    world.fleet.resume("tool", "save")

    outside = Outside(
        when=lambda place: place == "before write tool",
        then=lambda: world.fleet.pause("tool", "save", reason="too late for this one"),
    )
    world.step(run, outside=outside)
    assert world.effect("save:r")["status"] == "applied"
    assert world.drive(run).status == "completed"


def test_lifting_a_pause_sets_going_what_waited_on_it(world: World) -> None:
    run = writing(world)
    world.fleet.pause("tool", "save", reason="first")
    world.fleet.pause("tool", "save", reason="second", by="ben")  # the same pause, better explained
    world.step(run)

    assert world.fleet.resume("tool", "save") is True
    world.reconciler.sweep()  # no time has passed

    assert [message.run_id for message in world.messages] == [run]
    assert world.fleet.resume("tool", "save") is False


def test_reads_queries_outcomes_and_late_receipts_are_never_paused(world: World) -> None:
    """A doubt is cleared up under a pause, and what the run then knows it may still read."""
    world.workflow(
        world.read_tool(), world.write_tool(), plan=[save_for_goal, look(q=1)], budget=BUDGET
    )
    run = world.start(run_id="r")
    world.service.script = ["lost"]
    world.step(run, outside=pausing_at(world, "before write tool"))
    assert world.fleet.get(run).status == "reconciling"

    assert world.drive(run).status == "completed"
    assert world.service.calls["query r"] == 1 and world.service.calls["read r"] == 1


def pausing_at(world: World, place: str) -> Outside:
    return Outside(
        when=lambda here: here == place, then=lambda: world.fleet.pause(reason="everything")
    )


def test_an_unknown_intent_is_not_sent_again_under_a_pause(world: World) -> None:
    """Without a query the same key settles the doubt: that is a dispatch like any other."""
    world.workflow(world.write_tool(query=False), plan=[save_for_goal], budget=BUDGET)
    run = world.start(run_id="r")
    world.service.script = ["lost"]
    world.step(run, outside=pausing_at(world, "before write tool"))

    let_wait(world, run, 3 * MINUTE)
    assert world.service.calls["write r"] == 1
    assert world.effect("save:r")["status"] == "unknown"

    world.fleet.resume()
    assert world.drive(run).status == "completed"
    assert world.service.calls["write r"] == 2 and world.service.performed == ["save:r"]


def test_a_write_that_is_proved_under_a_pause_sets_its_run_going(world: World) -> None:
    """It was believed absent, and waited on a pause to be sent again; then it proves to have left.
    Nothing is left to dispatch, whether or not the first message about that arrives.
    """
    patient = replace(BUDGET, deadline_ms=5 * MINUTE)
    world.workflow(world.write_tool(), plan=[save_for_goal], budget=patient)
    run = world.start(run_id="r")
    world.service.script = ["dropped"]
    world.step(run)
    until(world, run, "running")
    world.fleet.pause(reason="everything")
    world.step(run)
    assert world.row(run)["deadline_at"] is None

    world.service.records["save:r"] = {"receipt": 1}
    world.rule(run, contrary_evidence)
    until(world, run, "running")
    assert world.effect("save:r")["status"] == "applied"

    world.messages.clear()  # the one that says so is lost
    let_wait(world, run, MINUTE)
    assert world.fleet.get(run).status == "completed" and world.service.calls["write r"] == 1


def until(world: World, run: str, status: str) -> None:
    """Sweep until a run has come so far."""
    while world.row(run)["status"] != status:
        world.sweep_when_due(run)


@pytest.mark.accept("LED-19")
def test_lifting_a_pause_sets_a_compensation_going_at_once(world: World) -> None:
    """As it does a run; one that its service holds up goes on waiting."""
    world.workflow(world.compensable_tool(), plan=[save_for_goal], budget=BUDGET)
    run = world.start(run_id="r")
    outside = Outside(when=lambda place: place == "after write tool")
    outside.then = lambda: world.fleet.cancel(run)
    world.step(run, outside=outside)
    world.fleet.pause("tool", "undo_save", reason="the provider is down")
    world.sweep_when_due(run)
    assert world.effect("undo:r")["status"] == "planned"
    assert world.row(run)["wake_at"] > world.clock.ms

    world.fleet.resume("tool", "undo_save")
    assert world.row(run)["wake_at"] == world.clock.ms and world.row(run)["due_at"] is None
    world.reconciler.sweep()

    assert world.fleet.get(run).status == "compensated"
    assert world.service.performed == ["save:r", "undo:r"]


def test_a_compensation_that_waits_for_its_service_is_not_hurried_by_the_end_of_a_pause(
    world: World,
) -> None:
    world.workflow(world.compensable_tool(), plan=[save_for_goal], budget=BUDGET)
    run = world.start(run_id="r")
    world.service.script = ["ok", "dropped"]
    outside = Outside(when=lambda place: place == "after write tool")
    outside.then = lambda: world.fleet.cancel(run)
    world.step(run, outside=outside)
    world.sweep_when_due(run)
    before = world.effect("undo:r")
    assert before["status"] == "unknown" and before["next_query_at"] > world.clock.ms

    world.fleet.pause("tool", "undo_save", reason="the provider is down")
    world.fleet.resume("tool", "undo_save")
    world.reconciler.sweep()

    assert world.effect("undo:r") == before
    assert world.row(run)["wake_at"] == before["next_query_at"]


def test_wherever_a_worker_dies_under_a_pause_the_run_goes_on_after_it(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save_for_goal], budget=BUDGET)
    number, reached = 0, True
    while reached:
        run = world.start(run_id=f"r{number}")
        world.fleet.pause(reason="the provider is down")
        outside = Outside()
        outside.when = lambda place, o=outside, n=number: len(o.places) == n + 1  # type: ignore[misc]
        outside.then = outside.die
        world.step(run, outside=outside)
        reached, number = outside.dead, number + 1
        world.advance(LEASE_MS + SECOND)
        world.reconciler.sweep()
        world.fleet.resume()
        assert world.drive(run).status == "completed", outside.places
        assert world.service.performed.count(f"save:{run}") == 1
    assert number > 5


def test_a_claim_gives_a_clock_that_stood_still_what_it_had_left(world: World) -> None:
    run = writing(world)
    world.fleet.pause(reason="the provider is down")
    world.step(run)
    left = world.fleet.get(run).remaining_ms
    world.advance(10 * MINUTE)

    claim = world.claim(run)

    assert claim is not None and claim.remaining_ms == left
    row = world.row(run)
    assert row["deadline_at"] == world.clock.ms + left and row["remaining_ms"] is None


def test_a_worker_that_leaves_gives_a_paused_run_back_as_any_other(world: World) -> None:
    run = writing(world)
    world.fleet.pause(reason="the provider is down")
    world.step(run)
    world.advance(PAUSED_MS)
    claim = world.claim(run)
    assert claim is not None

    (due,) = world.ledger.give_back([claim.claim_id], unused=[], holder="a worker")
    assert due.remaining_ms == claim.remaining_ms

    world.step(run)
    assert world.row(run)["deadline_at"] is None and not world.service.performed


# ---- what it costs -------------------------------------------------------------------------------


def test_only_a_dispatch_asks_whether_it_is_paused_and_with_one_statement(world: World) -> None:
    run = writing(world)
    asked = [sql for sql in world.database.statements if "handrail_pause" in sql]
    assert asked == []  # accepted, claimed, read, committed

    world.step(run)
    asked = [sql for sql in world.database.statements if "handrail_pause" in sql]
    assert len(asked) == 1


def test_that_statement_counts_by_an_index_and_no_further_than_it_matters(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save_for_goal])
    world.service.script = ["lost"]
    world.step(world.start(run_id="pattern"))
    columns = [*world.effect("save:pattern")]
    numbers = (
        "generate_series(1, 3000) AS n"
        if world.postgres
        else "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 3000)"
        " SELECT n FROM s)"
    )
    changed = {
        "id": "'e-' || n",
        "intent_key": "'save:' || n",
        "owner_run_id": "NULL",
        "status": "CASE WHEN n % 3 = 0 THEN 'unknown' ELSE 'planned' END",
        "unknown_since": "CASE WHEN n % 3 = 0 THEN 1 END",
    }
    values = ", ".join(changed.get(name, f"e.{name}") for name in columns)
    world.control.run(
        f"INSERT INTO handrail_effect ({', '.join(columns)}) SELECT {values}"
        f" FROM handrail_effect AS e, {numbers}",
        {},
    )
    asked: dict[str, Any] = {"tenant": "default", "workflow": "draft", "tool": "save", "most": 10}
    asked |= {"subject": "customer", "most_open": 10}

    (found,) = world.control.run(statements.PAUSED, asked)
    how = "EXPLAIN (ANALYZE, COSTS OFF) " if world.postgres else "EXPLAIN QUERY PLAN "
    if world.postgres:  # which does it by itself, in its own time
        world.control.run("ANALYZE handrail_effect", {})
    plan = str(world.control.run(how + statements.PAUSED, asked))

    assert found == {"paused": None, "doubtful": 10, "open": 0, "rewind": None}
    assert "handrail_effect_doubtful" in plan
    assert world.postgres or "SCAN handrail_effect" not in plan
    assert world.postgres or "handrail_handoff_subject" in plan
    world.control.run("DELETE FROM handrail_effect WHERE id LIKE 'e-%'", {})


# ---- too many open unknowns ----------------------------------------------------------------------


def doubtful(world: World, number: int) -> list[str]:
    """Runs whose write is unknown, and cannot be found out about for now."""
    world.service.hidden = True
    world.service.script = ["lost"] * number
    runs = [world.start("doubt", run_id=f"d{n}") for n in range(number)]
    for run in runs:
        world.step(run)
        assert world.fleet.get(run).status == "reconciling"
    return runs


def crowded(world: World, **tool: Any) -> list[str]:
    """A world in which a tool has as many open unknowns as it may."""
    world.ledger.max_open_unknowns = 3
    save_tool, other = world.write_tool(**tool), world.write_tool("other")
    world.workflow(save_tool, plan=[save_for_goal], name="doubt", budget=BUDGET)
    world.workflow(save_tool, plan=[save_for_goal], name="next", budget=BUDGET)
    other_plan = [lambda seen: {**save_for_goal(seen), "tool": "other"}]
    world.workflow(other, plan=other_plan, name="other", budget=BUDGET)
    return doubtful(world, 3)


@pytest.mark.accept("LED-19")
def test_a_tool_with_too_many_open_unknowns_is_sent_nothing_new_until_they_are_settled(
    world: World,
) -> None:
    doubts = crowded(world)
    run = world.start("next", run_id="n")
    world.step(run)
    assert deferrals(world, run) == {"too-many-unknown:save"}
    assert world.fleet.get(run).status == "running" and world.service.calls["write n"] == 0
    assert world.row(run)["deadline_at"] is None
    assert world.drive(world.start("other", run_id="o")).status == "completed"

    world.service.hidden = False  # the service can be asked again

    assert world.drive(*doubts).status == "completed"
    assert world.drive(run).status == "completed"
    assert len(world.service.performed) == 5


def test_the_limit_of_open_unknowns_does_not_keep_them_from_being_settled(world: World) -> None:
    """Sending the same key again is how these are settled: that is not held back."""
    doubts = crowded(world, query=False)

    assert world.drive(*doubts).status == "completed"
    assert len(world.service.performed) == 3 and world.service.calls["write d0"] == 2


def test_without_a_limit_nothing_pauses_by_itself(world: World) -> None:
    crowded(world)
    world.ledger.max_open_unknowns = 0

    assert world.drive(world.start("next", run_id="n")).status == "completed"
    assert world.fleet.pauses() == []


# ---- what an operator sees -----------------------------------------------------------------------


def test_pauses_are_listed_the_widest_first_with_who_and_why(world: World) -> None:
    crowded(world)
    world.fleet.pause("tool", "save", reason="audit", by="ann")
    world.fleet.pause("fleet", reason="maintenance", by="ben")
    since = world.clock.ms
    world.advance(SECOND)
    world.fleet.pause("tool", "save", reason="an audit of all refunds", by="cem")

    listed = world.fleet.pauses()

    assert [(p.scope, p.name, p.reason, p.paused_by, p.paused_at) for p in listed[:2]] == [
        ("fleet", "", "maintenance", "ben", since),
        ("tool", "save", "an audit of all refunds", "cem", since),
    ]
    assert [(p.name, p.automatic) for p in listed] == [("", False), ("save", False), ("save", True)]
    assert "3 effects of unknown outcome" in listed[2].reason
    assert world.ledger.figures()["pauses"] == [dict(pause.to_json()) for pause in listed]


@pytest.mark.parametrize(
    ("scope", "name", "words"),
    [
        ("queue", "a", {}),  # no such scope
        ("fleet", "ours", {}),  # the fleet has no name
        ("tool", "", {}),  # which one?
        ("tool", "a\x00b", {}),  # no database could be asked
        ("tool", "a" * 129, {}),
        ("tool", None, {}),
        ("tool", "save", {"reason": " "}),
        ("tool", "save", {"by": ""}),
    ],
)
def test_a_pause_that_makes_no_sense_is_refused(
    world: World, scope: str, name: Any, words: dict[str, str]
) -> None:
    with pytest.raises(InvalidPause) as refused:
        world.fleet.pause(scope, name, **{"reason": "why", "by": "ann", **words})

    assert refused.value.code == "invalid-pause"
    assert world.fleet.pauses() == []


@pytest.mark.parametrize("executed", [False, True])
def test_a_pause_whose_answer_was_lost_was_lifted_all_the_same(
    world: World, executed: bool
) -> None:
    world.fleet.pause(reason="why")
    world.database.lose(1, executed=executed, only="COMMIT")

    assert world.fleet.resume() is True
    assert world.database.lost and world.fleet.pauses() == []
