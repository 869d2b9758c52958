"""A cancelled run whose write took effect undoes it, by the same protocol, on both databases."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from handrail.agent import protocol
from handrail.agent.budget import Budget
from handrail.agent.effects import Pending
from handrail.agent.review import findings
from handrail.agent.stage import Action, End
from handrail.agent.status import RunStatus
from handrail.agent.tools import FOREVER, Compensation, Principal, SideEffect
from handrail.agent.workflow import AgentLoop, Commit, Workflow
from handrail.canonical import Json
from handrail.errors import InvalidDefinition
from handrail.fleet import Fleet, ask_bounded
from handrail.reconciler.sweep import ask_directly
from handrail.runs import Run
from handrail.tasks.calls import ToolCall
from tests.world import (
    KINDS,
    SECOND,
    Outside,
    Service,
    World,
    look,
    open_world,
    save,
    save_for_goal,
)

PATIENT: Final = Budget(tool_calls=12, model_calls=8, deadline_ms=400_000)
MINUTE: Final = 60 * SECOND


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


def drafts(world: World, *, budget: Budget = PATIENT, **tool: Any) -> None:
    """A workflow that saves one draft, which can be undone."""
    world.workflow(world.compensable_tool(**tool), plan=[save_for_goal], budget=budget)


def cancelled_in_flight(world: World, *script: str) -> str:
    """A run that is cancelled while its write is under way; the script goes on with the
    compensation's calls.
    """
    run = world.start()
    world.service.script = ["ok", *script]
    outside = Outside(
        when=lambda place: place == "after write tool", then=lambda: world.fleet.cancel(run)
    )
    world.step(run, outside=outside)
    assert world.row(run)["status"] == "reconciling"
    assert saved(world, run)["status"] == "compensating"
    return run


def saved(world: World, run: str) -> dict[str, Any]:
    """The effect of a run's write."""
    return world.effect(f"save:{run}")


def undoing(world: World, run: str) -> dict[str, Any]:
    """The effect of its compensation."""
    return world.effect(f"undo:{run}")


def statuses(world: World, run: str) -> tuple[str, str]:
    """The statuses of a write and of its compensation."""
    return saved(world, run)["status"], undoing(world, run)["status"]


def handoff(world: World, run: str) -> dict[str, Any]:
    """The package of a run's one handoff."""
    (found,) = world.ledger.people.handoffs(run_id=run)
    package: dict[str, Any] = found["package"]
    assert found["effect_id"] == package["effect"]["id"]
    return package


def is_undone(world: World, ended: Run) -> None:
    """The run is compensated, and so it is at the service: each intent happened once."""
    run = ended.run_id
    assert (ended.status, ended.reason) == ("compensated", "compensated")
    assert statuses(world, run) == ("compensated", "applied")
    assert [world.service.performed.count(f"{act}:{run}") for act in ("save", "undo")] == [1, 1]
    assert findings(world.trace(run), RunStatus.COMPENSATED) == []


# ---- what was recorded, and what it leads to -----------------------------------------------------


@pytest.mark.accept("ORC-23")
def test_how_to_undo_a_write_is_recorded_before_it_is_sent(world: World) -> None:
    """The state that was there before, and the compensating action: the service's first call
    already finds both in the ledger.
    """
    found: list[Any] = []

    def before(arguments: dict[str, Json], call: ToolCall) -> Json:
        return {"draft": f"as it was before {call.intent_key}"}

    def at_the_call(arguments: Any, call: ToolCall) -> Json:
        (row,) = world.rows("SELECT * FROM handrail_effect WHERE id = :id", id=call.key)
        found.append((row["status"], json.loads(row["compensation"])))
        return world.service.arrive(call, arguments, FOREVER)

    drafts(world, original=before)
    run = world.start()
    world.service.script = [at_the_call]
    world.step(run)

    original = {"draft": f"as it was before save:{run}"}
    recorded = {"tool": "undo_save", "calls": 1, "original": original, "read": True}
    assert found == [("dispatched", recorded)]
    (read,) = world.trace(run, "effect.original-read")
    assert read["detail"] == {"tool": "save", "effect": saved(world, run)["id"]}


@pytest.mark.accept("ORC-23", "LED-16")
def test_a_write_is_undone_where_its_run_was_cancelled_meanwhile(world: World) -> None:
    drafts(world)
    run = cancelled_in_flight(world)

    ended = world.drive(run)

    is_undone(world, ended)
    assert ended.cancel_requested and ended.budget_used["tool_calls"] == 2
    (compensated,) = world.trace(run, "effect.compensated")
    (stopped,) = world.trace(run, "run.stopped")
    assert stopped["detail"]["category"] == "cancellation"
    assert stopped["detail"]["effect"] == compensated["detail"]["effect"] == saved(world, run)["id"]
    assert stopped["detail"]["compensation"] == undoing(world, run)["id"]
    assert undoing(world, run)["compensates"] == saved(world, run)["id"]
    evidence = world.ledger.evidence(undoing(world, run)["id"])
    assert [item["kind"] for item in evidence] == ["outcome"]


def test_the_undoing_call_is_made_of_what_was_written_found_and_answered(world: World) -> None:
    calls: list[Any] = []

    def arguments(written: Json, result: Any, original: Any, run: Any) -> dict[str, Json]:
        calls.append((written, result, original, run.goal))
        return {"id": result["receipt"], "text": original["text"]}

    drafts(world, original=lambda given, call: {"text": "before"}, arguments=arguments)
    run = cancelled_in_flight(world)
    world.drive(run)

    receipt = {"receipt": 1, "of": f"save:{run}"}
    assert calls == [({"id": run}, receipt, {"text": "before"}, run)]
    assert json.loads(world.effect("undo:1")["arguments"]) == {"id": 1, "text": "before"}


@pytest.mark.accept("ORC-23")
@pytest.mark.parametrize("way", ["lost", "dropped", "late:4000", "unclear", "refused"])
def test_a_compensable_write_that_fails_or_is_unknown_is_reconciled(world: World, way: str) -> None:
    """Nobody has cancelled: it is queried and settled like any write, and not undone."""
    drafts(world)
    run = world.start()
    world.service.script = [way]

    ended = world.drive(run)

    assert ended.status == ("failed" if way == "refused" else "completed")
    assert world.service.performed == ([] if way == "refused" else [f"save:{run}"])
    assert world.row(run)["compensations_reserved"] == 0


@pytest.mark.accept("FIX-13")
@pytest.mark.parametrize(
    ("way", "tool", "status", "performed"),
    [
        ("lost", {}, "completed", 1),  # the query finds the record: the intent is complete
        ("dropped", {}, "completed", 1),  # it does not: the same key again, as the tool allows
        ("dropped", {"key_valid_for_ms": 60_000}, "failed", 0),  # the key is dead by then
        ("dropped", {"key_valid_for_ms": 0, "query": False}, "handed_off", 0),
    ],
)
def test_a_doubt_ends_as_the_tools_policy_says(
    world: World, way: str, tool: dict[str, Any], status: str, performed: int
) -> None:
    drafts(world, **tool)
    run = world.start()
    world.service.script = [way]

    ended = world.drive(run)

    assert ended.status == status
    assert len(world.service.performed) == performed


@pytest.mark.accept("FIX-13")
def test_a_query_that_only_fails_leads_to_a_person(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(service: Service, arguments: Json, call: ToolCall) -> Json:
        raise ConnectionError("no answer")

    monkeypatch.setattr(Service, "query", broken)
    drafts(world, key_valid_for_ms=0)
    run = world.start()
    world.service.script = ["lost"]

    ended = world.drive(run)

    assert (ended.status, ended.reason) == ("handed_off", "unknown-effect")


@pytest.mark.accept("FIX-13", "LED-16")
def test_a_doubt_of_a_cancelled_run_ends_as_compensation_once_the_record_is_found(
    world: World,
) -> None:
    drafts(world)
    run = world.start()
    world.service.script = ["lost"]
    world.step(run)
    world.fleet.cancel(run)
    assert world.row(run)["status"] == "reconciling"

    is_undone(world, world.drive(run))


# ---- each end of a compensation ------------------------------------------------------------------


@pytest.mark.accept("LED-18")
def test_a_refused_compensation_leaves_the_write_applied_and_a_persons(world: World) -> None:
    drafts(world, original=lambda given, call: "as it was")
    run = cancelled_in_flight(world, "refused")

    ended = world.drive(run)

    assert (ended.status, ended.reason) == ("handed_off", "handoff-required")
    assert statuses(world, run) == ("applied", "absent")
    assert world.service.performed == [f"save:{run}"]
    package = handoff(world, run)
    assert package["problem"] == "the compensation was refused: no-funds"
    assert package["effect"]["status"] == "applied"
    assert package["effect"]["original"] == "as it was"
    assert package["compensation"]["status"] == "absent"
    assert package["compensation"]["tool"] == "undo_save"


@pytest.mark.accept("LED-18")
@pytest.mark.parametrize("way", ["lost", "dropped", "late:4000", "unclear", "hang"])
def test_a_compensation_without_an_answer_is_unknown_and_reconciled(world: World, way: str) -> None:
    drafts(world)
    run = cancelled_in_flight(world, way)

    world.sweep_when_due(run)
    assert undoing(world, run)["status"] == "unknown"
    assert saved(world, run)["status"] == "compensating"
    assert world.row(run)["status"] == "reconciling"
    (doubt,) = world.trace(run, "effect.reconciliation-required")
    assert doubt["detail"]["tool"] == "undo_save"
    assert doubt["detail"]["trigger"] != "cancellation"  # that is why it is undone at all

    is_undone(world, world.drive(run))


@pytest.mark.accept("LED-18")
def test_a_compensation_that_says_try_again_is_tried_again(world: World) -> None:
    drafts(world)
    run = cancelled_in_flight(world, "busy", "busy")

    ended = world.drive(run)

    is_undone(world, ended)
    assert undoing(world, run)["attempts"] == 3
    assert ended.budget_used["tool_calls"] == 4


@pytest.mark.accept("LED-18")
def test_a_compensation_is_not_tried_for_ever(world: World) -> None:
    drafts(world)
    run = cancelled_in_flight(world, *["busy"] * 10)

    ended = world.drive(run)

    assert ended.status == "handed_off" and statuses(world, run) == ("applied", "absent")
    assert undoing(world, run)["attempts"] == 5
    assert handoff(world, run)["problem"] == "the compensation was refused: busy"


@pytest.mark.accept("LED-18")
def test_a_compensation_that_nothing_can_prove_is_a_persons(world: World) -> None:
    drafts(world, undo={"key_valid_for_ms": 0, "query": False})
    run = cancelled_in_flight(world, "lost")

    ended = world.drive(run)

    assert (ended.status, ended.reason) == ("handed_off", "unknown-effect")
    assert statuses(world, run) == ("handed_off", "handed_off")
    package = handoff(world, run)
    assert package["effect"]["tool"] == "save" and package["compensation"]["attempts"] == 1


@pytest.mark.accept("LED-18")
def test_a_compensation_without_a_query_is_settled_by_its_key(world: World) -> None:
    drafts(world, undo={"query": False})
    run = cancelled_in_flight(world, "lost")

    ended = world.drive(run)

    is_undone(world, ended)
    assert undoing(world, run)["attempts"] == 2


@pytest.mark.accept("LED-18")
def test_a_compensation_whose_key_died_in_doubt_is_a_persons(world: World) -> None:
    drafts(world, undo={"query": False, "key_valid_for_ms": 20_000})
    run = cancelled_in_flight(world, "dropped")

    ended = world.drive(run)

    assert ended.status == "handed_off" and statuses(world, run) == ("handed_off", "handed_off")


def test_a_compensation_that_is_proved_absent_and_has_no_call_left_is_a_persons(
    world: World,
) -> None:
    drafts(world, budget=Budget(tool_calls=2, model_calls=4, deadline_ms=400_000))
    run = cancelled_in_flight(world, "dropped")

    ended = world.drive(run)

    assert ended.status == "handed_off" and statuses(world, run) == ("applied", "absent")
    assert handoff(world, run)["problem"] == "the compensation did not take effect"
    assert ended.budget_used["tool_calls"] == 2


def test_a_compensation_waits_for_nobody_to_come_back(world: World) -> None:
    """Neither deadline, expiry nor a spent budget ends it: the reconciler goes on."""
    drafts(world, budget=Budget(tool_calls=2, model_calls=2, steps=1, deadline_ms=MINUTE))
    run = cancelled_in_flight(world, "lost")

    world.advance(30 * 24 * 60 * MINUTE)

    is_undone(world, world.drive(run))


# ---- death, pauses, lost answers, rivals ---------------------------------------------------------

UNDOING: Final[dict[str, dict[str, Any]]] = {
    "key and query": {},
    "key alone": {"query": False},
    "query alone": {"key_valid_for_ms": 0},
    "neither": {"key_valid_for_ms": 0, "query": False},
}


def at_call(number: int, then: Callable[[Outside], object]) -> Outside:
    """A sweep to which something happens at its n-th call."""
    outside = Outside()
    outside.when = lambda place: len(outside.places) == number
    outside.then = lambda: then(outside)
    return outside


@pytest.mark.accept("LED-18", "FLT-03")
@pytest.mark.parametrize("kind", UNDOING)
def test_a_sweep_that_dies_at_any_call_leaves_what_the_next_one_finds(
    world: World, kind: str
) -> None:
    drafts(world, undo=UNDOING[kind])
    places: set[str] = set()
    for number in itertools.count(1):
        run = cancelled_in_flight(world)
        outside = at_call(number, Outside.die)
        world.sweep(outside)
        ended = world.drive(run)
        places.add(outside.places[-1])
        if ended.status == "handed_off":
            assert kind == "neither" and statuses(world, run) == ("handed_off", "handed_off")
        else:
            is_undone(world, ended)
        if not outside.dead:
            break

    wanted = ("checkpoint", "acquire", "rule", "effect", "write tool", "outcome", "release")
    assert places >= {f"{side} {call}" for side in ("before", "after") for call in wanted}


@pytest.mark.accept("LED-18")
@pytest.mark.parametrize("executed", [True, False], ids=["answer lost", "statement lost"])
def test_a_connection_that_breaks_at_any_statement_breaks_no_compensation(
    world: World, executed: bool
) -> None:
    drafts(world)
    for number in itertools.count(1):
        run = cancelled_in_flight(world)
        world.database.lose(number, executed=executed)
        world.reconciler.sweep()
        broke = world.database.lost
        world.database.lose(0, executed=False)
        is_undone(world, world.drive(run))
        if not broke:
            break
    assert number > 10


@pytest.mark.accept("LED-18")
@pytest.mark.parametrize("pause_ms", [0, 15 * SECOND], ids=["at once", "after 15 s"])
def test_two_sweeps_at_once_undo_once(world: World, pause_ms: int) -> None:
    """While one stands still at any of its calls, another does what it finds."""
    drafts(world, undo={"key_valid_for_ms": 0})
    for number in itertools.count(1):
        run = cancelled_in_flight(world)

        def meanwhile(outside: Outside, run: str = run) -> None:
            within, world.outside = world.outside, Outside()
            world.advance(pause_ms)
            world.reconciler.sweep()
            world.outside = within

        outside = at_call(number, meanwhile)
        world.sweep(outside)
        is_undone(world, world.drive(run))
        if len(outside.places) < number:
            break
    assert number > 15


def paused_at(world: World, place: str, act: Callable[[], object]) -> None:
    """Let a sweep stand still at a place of its own while something happens."""

    def then() -> None:
        within, world.outside = world.outside, Outside()
        act()
        world.outside = within

    world.sweep(Outside(when=lambda at: at == place, then=then))


@pytest.mark.accept("LED-12", "LED-18")
def test_a_late_receipt_of_a_compensation_counts(world: World) -> None:
    drafts(world, undo={"query": False, "key_valid_for_ms": 0})
    run = cancelled_in_flight(world)

    def another_finds_it_lost() -> None:
        world.advance(11 * SECOND)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("handrail.agent.protocol.first_query_at", lambda now: now + MINUTE)
            world.reconciler.sweep()
        assert statuses(world, run) == ("compensating", "unknown")

    paused_at(world, "after write tool", another_finds_it_lost)

    is_undone(world, world.drive(run))


@pytest.mark.accept("LED-12")
def test_a_compensation_that_left_although_believed_absent_is_in_doubt_again(world: World) -> None:
    drafts(
        world,
        undo={"key_valid_for_ms": 0},
        budget=Budget(tool_calls=2, model_calls=4, deadline_ms=400_000),
    )
    run = cancelled_in_flight(world)

    def believed_absent() -> None:
        world.service.hidden = True
        assert world.drive(run).status == "handed_off"
        assert statuses(world, run) == ("applied", "absent")
        world.service.hidden = False

    paused_at(world, "after write tool", believed_absent)
    assert world.row(run)["status"] == "reconciling"
    assert statuses(world, run) == ("compensating", "unknown")

    is_undone(world, world.drive(run))


@pytest.mark.accept("LED-10", "LED-18")
def test_without_a_bound_on_stalls_the_same_key_settles_a_compensation(world: World) -> None:
    world.reconciler.max_stall_ms = None
    drafts(world)
    run = cancelled_in_flight(world, "dropped")

    ended = world.drive(run)

    is_undone(world, ended)
    assert undoing(world, run)["attempts"] == 2
    assert undoing(world, run)["absences"] == 0


def test_a_sweep_that_wakes_too_late_to_send_says_so(world: World) -> None:
    drafts(world)
    run = cancelled_in_flight(world)

    paused_at(world, "before effect", lambda: world.advance(6 * SECOND))
    assert undoing(world, run)["status"] == "absent"
    assert world.service.performed == [f"save:{run}"]

    is_undone(world, world.drive(run))


@pytest.mark.accept("LED-18")
def test_a_compensation_is_not_sent_by_whoever_stood_still_right_before(world: World) -> None:
    """Its last look was in time; the call itself would have left after the dispatch deadline."""
    drafts(world, undo={"key_valid_for_ms": 0})
    run = cancelled_in_flight(world)

    def late(*args: Any, **options: Any) -> Any:
        world.reconciler.ask = ask_directly
        world.advance(5 * SECOND)
        return ask_directly(*args, **options)

    world.reconciler.ask = late
    world.sweep_when_due(run)

    assert world.service.performed == [f"save:{run}"]
    assert statuses(world, run) == ("compensating", "absent")
    assert undoing(world, run)["doubt"] == "none"
    (told,) = world.ledger.evidence(undoing(world, run)["id"])
    assert told["detail"] == {"end": "returned", "sent": False}
    is_undone(world, world.drive(run))


@pytest.mark.parametrize("blocks", [False, True], ids=["a coroutine", "a function that blocks"])
def test_a_call_that_is_asked_for_too_late_is_not_made(blocks: bool) -> None:
    called: list[str] = []

    async def undo(arguments: Any, call: ToolCall) -> None:
        called.append("undo")

    def undo_in_a_thread(arguments: Any, call: ToolCall) -> None:
        called.append("undo")

    context = ToolCall("run", "tenant", Principal(), "undo", 5_000)
    function = undo_in_a_thread if blocks else undo
    done = ask_bounded(function, {}, context, 5_000, lambda: False).result(timeout=10)

    assert (done.begun, done.end, called) == (False, End.TIMED_OUT, [])


def test_a_lock_that_is_taken_or_away_holds_a_compensation_up_and_costs_nothing(
    world: World,
) -> None:
    drafts(world)
    run = cancelled_in_flight(world)
    world.lock.away = True
    world.sweep_when_due(run)
    world.sweep_when_due(run)
    assert undoing(world, run)["status"] == "planned"
    assert world.row(run)["compensations_reserved"] == 1
    world.lock.away = False

    is_undone(world, world.drive(run))


@pytest.mark.accept("LED-19")
def test_a_paused_tool_holds_a_compensation_up(world: World) -> None:
    drafts(world)
    run = cancelled_in_flight(world)
    world.fleet.pause("tool", "undo_save", reason="the service is in trouble")
    for _ in range(3):
        world.sweep_when_due(run)
    assert undoing(world, run)["status"] == "planned"

    world.fleet.resume("tool", "undo_save")
    is_undone(world, world.drive(run))


def test_who_does_not_know_the_workflow_leaves_it_to_others(world: World) -> None:
    drafts(world)
    run = cancelled_in_flight(world)
    stranger = world.sweeper()
    stranger.workflows = {}

    stranger.sweep()

    assert saved(world, run)["status"] == "compensating"
    is_undone(world, world.drive(run))


# ---- cancel at any moment ------------------------------------------------------------------------


@pytest.mark.accept("LED-16", "LED-18")
@pytest.mark.parametrize("way", ["ok", "lost", "refused"])
def test_a_cancel_at_any_moment_of_a_write_ends_truthfully(world: World, way: str) -> None:
    """Either it never happened and the run is cancelled, or it happened and was undone, or the run
    was faster and its write stands.
    """
    drafts(world, original=lambda given, call: "before")
    ends: set[str] = set()
    for number in itertools.count(1):
        run = world.start()
        world.service.script = [way]

        def cancel(outside: Outside, run: str = run) -> None:
            world.fleet.cancel(run)

        outside = at_call(number, cancel)
        world.step(run, outside=outside)
        reached = len(outside.places) >= number
        world.fleet.cancel(run)
        ended = world.drive(run)
        happened = [world.service.performed.count(f"{act}:{run}") for act in ("save", "undo")]
        ends.add(f"{ended.status} {happened}")
        if ended.status == "compensated":
            is_undone(world, ended)
        elif happened == [1, 0]:
            assert saved(world, run)["status"] == "applied"
            told = [event["seq"] for event in world.trace(run, "result.verified")]
            assert told and told[0] < world.trace(run, "cancel.requested")[0]["seq"]
        if not reached:
            break
    usual = {"cancelled [0, 0]", "compensated [1, 1]"}
    assert ends - {"failed [0, 0]", "cancelled [1, 0]"} == (
        {"cancelled [0, 0]"} if way == "refused" else usual
    )


def test_a_second_cancel_changes_nothing(world: World) -> None:
    drafts(world)
    run = cancelled_in_flight(world)
    world.sweep(at_call(9, lambda outside: world.fleet.cancel(run)))
    before = world.row(run)
    world.fleet.cancel(run)

    assert world.row(run) == before
    is_undone(world, world.drive(run))


# ---- others --------------------------------------------------------------------------------------


@pytest.mark.accept("LED-15")
def test_a_write_that_another_run_rests_on_is_not_undone(world: World) -> None:
    world.workflow(world.compensable_tool(), plan=[save(id=1)], budget=PATIENT)
    first, second = world.start(), world.start()
    assert world.drive(first).status == "completed"
    world.step(second)  # has the recorded result

    assert world.fleet.cancel(second).status == "cancelled"

    assert world.effect("save:1")["status"] == "applied"
    assert world.service.performed == ["save:1"] and world.ledger.people.handoffs() == []


@pytest.mark.accept("LED-14")
def test_another_run_with_the_same_intent_is_a_persons_while_it_is_undone(world: World) -> None:
    world.workflow(world.compensable_tool(), plan=[save(id=1)], budget=PATIENT)
    first, second, third = (world.start() for _ in range(3))
    outside = Outside(
        when=lambda place: place == "after write tool", then=lambda: world.fleet.cancel(first)
    )
    world.step(first, outside=outside)
    assert world.effect("save:1")["status"] == "compensating"

    assert world.drive(second).status == "handed_off"
    assert world.drive(first).status == "compensated"
    conflict = world.drive(third)
    assert (conflict.status, conflict.reason) == ("failed", "intent-conflict")
    assert world.service.performed == ["save:1", "undo:1"]


def runs_undo(world: World, run: str, **arguments: Json) -> str:
    """Another run that does by itself what would undo the write of a run."""
    tool = world.fleet.workflows["draft@1"].tool_named("undo_save")
    proposal = {"kind": "tool", "tool": "undo_save", "arguments": {"id": run, **arguments}}
    world.workflow(tool, plan=[proposal], name="by_hand", budget=PATIENT)
    return world.start("by_hand", run_id="by-hand")


def test_a_compensation_that_somebody_else_has_made_is_the_proof(world: World) -> None:
    drafts(world)
    run = cancelled_in_flight(world)
    assert world.drive(runs_undo(world, run)).status == "completed"

    ended = world.drive(run)

    is_undone(world, ended)
    assert ended.budget_used["tool_calls"] == 1  # what was kept for undoing is given back
    assert undoing(world, run)["owner_run_id"] == "by-hand"


def test_a_compensation_that_has_undone_something_else_is_no_proof(world: World) -> None:
    """Two bookings of a seat, each an intent of its own, and one way to free it: it happened once,
    for the first of them.
    """
    booking: dict[str, Any] = {"intent": lambda arguments, run: f"book:7:{run.goal}"}
    world.workflow(world.compensable_tool(**booking), plan=[save(id=7)], budget=PATIENT)
    ended = []
    for run in (world.start(), world.start()):
        world.step(run, outside=cancelling(world, run))
        ended.append(world.drive(run).status)

    assert ended == ["compensated", "handed_off"]
    assert world.service.performed == ["book:7:run-1", "undo:7", "book:7:run-2"]
    assert "something else" in handoff(world, "run-2")["problem"]


def test_a_compensation_that_left_before_the_write_is_no_proof(world: World) -> None:
    drafts(world)
    assert world.drive(runs_undo(world, "later")).status == "completed"
    world.advance(SECOND)
    run = world.start("draft", run_id="later")
    world.step(run, outside=cancelling(world, run))

    assert world.drive(run).status == "handed_off"
    assert statuses(world, run) == ("handed_off", "applied")
    assert world.service.performed == [f"undo:{run}", f"save:{run}"]


def cancelling(world: World, run: str) -> Outside:
    """A worker whose run is cancelled while its write is under way."""
    return Outside(
        when=lambda place: place == "after write tool", then=lambda: world.fleet.cancel(run)
    )


def test_a_compensation_whose_intent_exists_with_other_arguments_is_a_persons(
    world: World,
) -> None:
    drafts(world)
    run = cancelled_in_flight(world)
    assert world.drive(runs_undo(world, run, why="a complaint")).status == "completed"

    ended = world.drive(run)

    assert (ended.status, ended.reason) == ("handed_off", "handoff-required")
    assert statuses(world, run) == ("handed_off", "applied")
    assert "other arguments" in handoff(world, run)["problem"]


@pytest.mark.parametrize("way", ["lost", "dropped"])
def test_a_compensation_that_another_run_has_in_flight_is_waited_for(
    world: World, way: str
) -> None:
    drafts(world)
    run = cancelled_in_flight(world)
    other = runs_undo(world, run)
    world.service.script = [way]
    world.step(other)
    world.sweep_when_due(run)
    assert world.row(run)["status"] == "reconciling"
    assert statuses(world, run) == ("compensating", "unknown")
    assert undoing(world, run)["owner_run_id"] == other
    assert world.used(run)["tool_calls"] == 1

    world.drive(run, other)

    assert world.row(run)["status"] == "compensated"
    assert world.row(other)["status"] == "completed"
    assert world.service.performed == [f"save:{run}", f"undo:{run}"]


# ---- the workflow's own code ---------------------------------------------------------------------


def raises(*_: object) -> dict[str, Json]:
    raise LookupError("a fault")


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        ({"arguments": raises}, "raised LookupError"),
        ({"arguments": lambda *_: None}, "raised TypeError"),
        ({"arguments": lambda *_: {"id": float("nan")}}, "raised NotCanonical"),
        ({"undo": {"intent": lambda arguments, run: ""}}, "raised InvalidDefinition"),
        ({"undo": {"permission": "undo"}}, "not permitted"),
        ({"undo": {"allow": raises}}, "not permitted"),
    ],
)
def test_what_cannot_be_begun_is_a_persons(
    world: World, tool: dict[str, Any], problem: str
) -> None:
    drafts(world, **tool)
    run = cancelled_in_flight(world)

    ended = world.drive(run)

    assert (ended.status, ended.reason) == ("handed_off", "handoff-required")
    assert saved(world, run)["status"] == "handed_off"
    assert problem in handoff(world, run)["problem"]
    assert world.service.performed == [f"save:{run}"]


def test_who_cannot_begin_a_compensation_does_not_stop_one_that_is_under_way(
    world: World,
) -> None:
    """Two processes sweep, and the code of one is at fault: the call of the other counts."""
    drafts(world)
    run = cancelled_in_flight(world)

    def gives_up() -> None:
        assert world.rule(run, lambda locked: protocol.cannot_undo(locked, "at fault")) is None

    world.sweep(Outside(when=lambda place: place == "after write tool", then=gives_up))

    is_undone(world, world.fleet.get(run))


def test_a_compensation_that_the_code_does_not_declare_any_more_is_a_persons(
    world: World,
) -> None:
    drafts(world)
    run = cancelled_in_flight(world)
    workflow = world.fleet.workflows["draft@1"]
    known = workflow.tool_named("save")
    contract = replace(known.contract, side_effect=SideEffect.IDEMPOTENT)
    changed = replace(known, contract=contract, compensation=None)
    object.__setattr__(workflow, "_tools", {**workflow._tools, "save": changed})

    assert world.drive(run).status == "handed_off"
    assert handoff(world, run)["problem"] == "save is not undone by undo_save any more"


# ---- the state before ----------------------------------------------------------------------------


class Drafts:
    """Reads of the state before a write, as a test says."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reads = 0
        self.fails = 0
        self.answer: Json = "as it was"

    def __call__(self, arguments: Any, call: ToolCall) -> Json:
        self.reads += 1
        self.world.service.calls[f"read {call.run_id}"] += 1
        assert call.key is None, "a read has no key"
        if self.fails:
            self.fails -= 1
            raise ConnectionError("away")
        return self.answer


def test_reading_the_state_before_costs_a_call_that_is_paid_first(world: World) -> None:
    before = Drafts(world)
    drafts(world, original=before)
    paid: list[int] = []
    run = world.start()
    outside = Outside(
        when=lambda place: place == "before checkpoint",
        then=lambda: paid.append(world.used(run)["tool_calls"]),
    )
    world.step(run, outside=outside)

    assert before.reads == 1 and paid == [0]  # the claim's reserved call is used for it
    assert world.used(run)["tool_calls"] == 2


@pytest.mark.parametrize("answer", [float("nan"), object(), "x" * 100_000, None])
def test_a_state_that_cannot_be_recorded_cannot_be_restored(world: World, answer: Any) -> None:
    before = Drafts(world)
    before.answer = answer
    drafts(world, original=before)
    run = world.start()

    ended = world.drive(run)

    made = answer is None  # nothing was there before: that can be recorded
    assert world.service.performed == ([f"save:{run}"] if made else [])
    assert ended.status == "completed"
    if not made:  # the model was told, and went on without it
        assert ended.observations == ("tool:save:failed:original-unreadable",)
        assert ended.budget_used["tool_calls"] == 1


def test_a_write_whose_state_before_cannot_be_read_is_tried_again_in_full(world: World) -> None:
    before = Drafts(world)
    before.fails = 1
    tool = world.compensable_tool(original=before)
    commit = Commit("commit", lambda run: Action(tool, {"id": run.goal}), tool, attempts=2)
    world.workflow(name="fixed", stages=[commit], budget=PATIENT)
    run = world.start("fixed")

    ended = world.drive(run)

    assert ended.status == "completed" and before.reads == 2
    assert ended.budget_used["tool_calls"] == 3
    assert world.service.performed == [f"save:{run}"]


def test_a_write_whose_state_before_cannot_be_read_is_not_made(world: World) -> None:
    before = Drafts(world)
    before.fails = 9
    tool = world.compensable_tool(original=before)
    commit = Commit("commit", lambda run: Action(tool, {"id": run.goal}), tool)
    world.workflow(name="fixed", stages=[commit], budget=PATIENT)
    run = world.start("fixed")

    ended = world.drive(run)

    assert (ended.status, ended.reason) == ("failed", "tool-failed")
    assert before.reads == 1 and world.service.performed == []
    assert world.trace(run, "run.stopped")[0]["detail"]["code"] == "original-unreadable"
    assert world.rows("SELECT id FROM handrail_effect") == []


def test_the_state_before_is_read_once_for_a_write_that_has_to_wait(world: World) -> None:
    before = Drafts(world)
    drafts(world, original=before)
    run = world.start()
    world.lock.away = True
    world.step(run)
    before.answer = "as it was later"
    world.lock.away = False

    assert world.drive(run).status == "completed"
    assert before.reads == 1
    assert json.loads(saved(world, run)["compensation"])["original"] == "as it was"


def test_the_state_before_is_read_anew_by_the_run_that_sends_the_write_at_last(
    world: World,
) -> None:
    before = Drafts(world)
    tool = world.compensable_tool(original=before)
    world.workflow(tool, plan=[save(id=1)], budget=PATIENT)
    first, second, third = (world.start() for _ in range(3))
    world.service.script = ["refused"]
    assert world.drive(first).status == "failed"
    before.answer = "as it was later"

    assert world.drive(second).status == "completed"
    assert json.loads(world.effect("save:1")["compensation"])["original"] == "as it was later"
    assert world.drive(third).status == "completed"
    assert before.reads == 2  # what is there already is not what was there before


def test_a_cancel_while_the_state_before_is_read_ends_the_run(world: World) -> None:
    before = Drafts(world)
    drafts(world, original=before)
    run = world.start()
    world.step(
        run,
        outside=Outside(
            when=lambda place: place == "before checkpoint",
            then=lambda: world.fleet.cancel(run),
        ),
    )

    assert world.row(run)["status"] == "cancelled" and before.reads == 1
    assert world.used(run)["tool_calls"] == 1  # the read was made, and stays paid
    assert world.service.performed == []


# ---- budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "tool", "sent"),
    [
        (1, {}, False),  # the write alone could be paid, but not what may have to undo it
        (2, {}, True),
        (2, {"original": lambda given, call: 1}, False),
        (3, {"original": lambda given, call: 1}, True),
        (2, {"undo": {"confirmed_by_query": True}}, False),
        (3, {"undo": {"confirmed_by_query": True}}, True),
    ],
)
def test_a_write_is_sent_only_if_undoing_it_is_paid_for_too(
    world: World, calls: int, tool: dict[str, Any], sent: bool
) -> None:
    drafts(world, budget=Budget(tool_calls=calls, model_calls=4), **tool)
    run = world.start()

    ended = world.drive(run)

    assert world.service.performed == ([f"save:{run}"] if sent else [])
    if not sent:
        assert (ended.status, ended.reason) == ("budget_exhausted", "tool-call-budget-exhausted")
        assert ended.budget_used["tool_calls"] == 0


def test_what_is_kept_for_undoing_is_neither_used_nor_left(world: World) -> None:
    world.workflow(
        world.read_tool(),
        world.compensable_tool(),
        plan=[save_for_goal, look(q=1), look(q=2)],
        budget=Budget(tool_calls=3, model_calls=6),
    )
    run = world.start()
    seen: list[Any] = []

    def at_the_call(arguments: Any, call: ToolCall) -> Json:
        found = world.fleet.get(run)
        seen.append((found.budget_used["tool_calls"], found.budget_left["tool_calls"]))
        return world.service.arrive(call, arguments, FOREVER)

    world.service.script = [at_the_call]
    ended = world.drive(run)

    assert seen == [(1, 1)]  # one is used, one is left, one is kept
    assert ended.status == "completed"  # the result was used: what was kept is left again
    assert ended.budget_used["tool_calls"] == 3 and ended.budget_left["tool_calls"] == 0


def test_what_was_kept_is_given_back_once_there_is_nothing_to_undo(world: World) -> None:
    world.workflow(
        world.read_tool(),
        world.compensable_tool(),
        plan=[save_for_goal, look(q=1)],
        budget=Budget(tool_calls=2, model_calls=6),
    )
    run = world.start()
    world.service.script = ["busy"]

    ended = world.drive(run)

    assert ended.status == "completed" and ended.budget_used["tool_calls"] == 2
    assert world.trace(run, "run.stopped")[0]["detail"]["budget_used"]["tool_calls"] == 2


def test_a_tools_own_limit_holds_for_undoing(world: World) -> None:
    drafts(world, budget=Budget(tool_calls=9, model_calls=4, per_tool={"undo_save": 0}))
    refused = world.start()
    assert world.drive(refused).reason == "tool-call-budget-exhausted"

    world.fleet._latest["draft"] = world.fleet.workflows["draft@1"]
    run = world.start(budget={"per_tool": {"undo_save": 0}})
    assert world.drive(run).reason == "tool-call-budget-exhausted"
    assert world.service.performed == []


# ---- what stands beside it -----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["a write", "a compensation"])
def test_a_stored_failure_is_not_asked_for_again(world: World, call: str) -> None:
    """The key would only ever give the same refusal: it is definite, whatever it says."""
    if call == "a write":
        world.workflow(world.write_tool(stores_failures=True), plan=[save_for_goal], budget=PATIENT)
        run = world.start()
        world.service.script = ["busy"]
        ended = world.drive(run)
        assert (ended.status, ended.reason) == ("failed", "tool-failed")
        assert saved(world, run)["attempts"] == 1
    else:
        drafts(world, undo={"stores_failures": True})
        run = cancelled_in_flight(world, "busy")
        assert world.drive(run).status == "handed_off"
        assert undoing(world, run)["attempts"] == 1


def lies(world: World) -> Callable[[Any, ToolCall], Json]:
    """A service that says that it has done what it has not."""
    return lambda arguments, call: {"receipt": 0, "of": call.intent_key}


def test_a_receipt_that_no_record_confirms_is_a_doubt(world: World) -> None:
    world.workflow(world.write_tool(confirmed_by_query=True), plan=[save_for_goal], budget=PATIENT)
    run = world.start()
    world.service.script = [lies(world)]
    world.step(run)

    assert world.row(run)["status"] == "reconciling"
    (outcome,) = world.ledger.evidence(saved(world, run)["id"])
    assert outcome["detail"]["unknown"] == "not-confirmed"
    ended = world.drive(run)
    assert ended.status == "completed" and world.service.performed == [f"save:{run}"]


def test_a_receipt_that_a_record_confirms_is_believed(world: World) -> None:
    """The call that confirms it is paid with the dispatch."""
    world.workflow(
        world.write_tool(confirmed_by_query=True),
        plan=[save_for_goal],
        budget=Budget(tool_calls=2, model_calls=4),
    )
    run = world.start()

    ended = world.drive(run)

    assert ended.status == "completed" and ended.budget_used["tool_calls"] == 2
    assert world.service.calls[f"query {run}"] == 1


@pytest.mark.parametrize(
    "contract",
    [
        {"postcondition": lambda given, record: record["of"] == "another"},
        {"belongs_to": lambda record, run: "owner" in record},
    ],
)
def test_a_record_of_something_else_confirms_nothing(
    world: World, contract: dict[str, Any]
) -> None:
    fits: list[bool] = [True]

    def once(*given: Any) -> bool:
        (check,) = contract.values()
        return fits.pop() if fits else check(*given)  # the receipt passes, the record does not

    options: dict[str, Any] = dict.fromkeys(contract, once)
    tool = world.write_tool(confirmed_by_query=True, **options)
    world.workflow(tool, plan=[save_for_goal], budget=PATIENT)
    run = world.start()
    world.step(run)

    assert saved(world, run)["status"] == "unknown"


def test_a_write_that_cannot_be_confirmed_for_lack_of_calls_is_not_sent(world: World) -> None:
    world.workflow(
        world.write_tool(confirmed_by_query=True),
        plan=[save_for_goal],
        budget=Budget(tool_calls=1, model_calls=4),
    )

    ended = world.drive(world.start())

    assert ended.reason == "tool-call-budget-exhausted" and world.service.performed == []


@pytest.mark.accept("LED-18")
def test_a_compensation_is_confirmed_where_its_tool_wants_that(world: World) -> None:
    drafts(world, undo={"confirmed_by_query": True})
    run = cancelled_in_flight(world)
    world.service.script = [lies(world)]
    world.sweep_when_due(run)
    assert statuses(world, run) == ("compensating", "unknown")

    is_undone(world, world.drive(run))


def test_a_proof_that_comes_after_the_deadline_is_kept(world: World) -> None:
    """The run has no time for anything else; what it came to is not lost, and nobody is asked."""
    world.workflow(
        world.write_tool(), plan=[save_for_goal], budget=Budget(tool_calls=4, deadline_ms=MINUTE)
    )
    run = world.start()
    world.service.script = ["lost"]
    world.step(run)
    world.advance(2 * MINUTE)

    ended = world.drive(run)

    assert (ended.status, ended.reason) == ("budget_exhausted", "deadline-exhausted")
    assert ended.observations == (f'{{"of":"save:{run}","receipt":1}}',)
    stopped = world.trace(run, "run.stopped")[-1]["detail"]
    assert stopped["products"]["observations"] == 1
    assert world.ledger.people.handoffs(run_id=run) == []


def test_a_proof_that_was_all_that_was_missing_completes_a_run_after_its_deadline(
    world: World,
) -> None:
    tool = world.write_tool()
    commit = Commit("commit", lambda run: Action(tool, {"id": run.goal}), tool)
    world.workflow(name="fixed", stages=[commit], budget=Budget(tool_calls=4, deadline_ms=MINUTE))
    run = world.start("fixed")
    world.service.script = ["lost"]
    world.step(run)
    world.advance(2 * MINUTE)

    ended = world.drive(run)

    assert ended.status == "completed"
    assert ended.outputs["commit"] == {"of": f"save:{run}", "receipt": 1}


def test_a_proof_that_nobody_takes_up_is_named_by_the_stop(world: World) -> None:
    world.workflow(
        world.write_tool(), plan=[save_for_goal], budget=Budget(tool_calls=4, deadline_ms=MINUTE)
    )
    run = world.start()
    world.service.script = ["lost"]
    world.step(run)
    world.advance(2 * MINUTE)
    while world.row(run)["wake_at"] is not None:
        world.sweep_when_due(run)  # and no worker ever takes a message

    assert world.row(run)["status"] == "budget_exhausted"
    stopped = world.trace(run, "run.stopped")[-1]["detail"]
    assert stopped["proved"] == saved(world, run)["evidence"]


# ---- in one process, with the real calls ---------------------------------------------------------


def in_one_process(undo: Callable[..., Any], **undoing: Any) -> Run:
    """A run on a fleet in memory that is cancelled by its own write."""
    fleet = Fleet(database_url="sqlite://")

    def seat(written: Any, result: Any, original: Any, run: Any) -> dict[str, Json]:
        return {"seat": result["seat"]}

    proposal = {"kind": "tool", "tool": "book", "arguments": {"seat": 7}}
    fleet.model("default", lambda seen: proposal)
    cancel = fleet.tool(
        "cancel_booking",
        side_effect="idempotent",
        approval="never",
        guarantee="transaction",
        intent=lambda arguments, run: f"cancel:{arguments['seat']}",
        **undoing,
    )(undo)

    @fleet.tool(
        side_effect="compensable",
        approval="never",
        guarantee="transaction",
        intent=lambda arguments, run: f"book:{arguments['seat']}",
        takeover="the box office",
        compensation=Compensation(tool=cancel, arguments=seat),
    )
    async def book(arguments: dict[str, Any], call: ToolCall) -> dict[str, Any]:
        fleet.ledger.rule(call.run_id, protocol.cancel)
        return {"seat": arguments["seat"]}

    fleet.workflow(
        Workflow(name="trip", stages=[AgentLoop(name="loop", actions=(book,), verify=raises)])
    )
    run = fleet.run("trip", goal="to Rome", timeout_s=30)
    fleet.close()
    return run


@pytest.mark.accept("LED-18")
def test_a_fleet_in_one_process_undoes_with_a_plain_function_or_a_coroutine() -> None:
    undone: list[Any] = []

    def plainly(arguments: dict[str, Any], call: ToolCall) -> str:
        undone.append((arguments["seat"], call.tool, call.key is not None))
        return "cancelled"

    async def awaited(arguments: dict[str, Any], call: ToolCall) -> str:
        return plainly(arguments, call)

    for undo in (plainly, awaited):
        run = in_one_process(undo, takeover="the box office")
        assert run.status == "compensated"
    assert undone == [(7, "cancel_booking", True)] * 2


@pytest.mark.accept("LED-12", "LED-18")
def test_the_answer_of_a_compensation_that_was_given_up_still_counts() -> None:
    """It blocks in a thread beyond its time limit, and nothing but its own word can prove it."""
    heard = threading.Event()

    def slowly(arguments: dict[str, Any], call: ToolCall) -> str:
        assert call.aborted.wait(10)
        heard.set()
        return "cancelled"

    query = lambda arguments, call: Pending()  # noqa: E731
    run = in_one_process(slowly, timeout_ms=50, query=query)

    assert heard.is_set() and run.status == "compensated"


# ---- declaring -----------------------------------------------------------------------------------


def declared(**given: Any) -> Any:
    """Declare a write with a compensation, or with what a test says."""
    fleet = Fleet(database_url="sqlite://")
    write: dict[str, Any] = {
        "approval": "never",
        "side_effect": "idempotent",
        "guarantee": "transaction",
        "takeover": "operations",
        "intent": lambda arguments, run: "intent",
    }
    undo_options = write | given.pop("undo", {})
    if undo_options["side_effect"] == "read":
        undo_options = {"side_effect": "read"}
    undo = fleet.tool("undo", **undo_options)(lambda arguments, call: 1)
    options = write | {"side_effect": "compensable"} | given
    if options["side_effect"] == "read":
        options = {"side_effect": "read", "compensation": options.get("compensation")}
    if "compensation" not in options or callable(options["compensation"]):
        make = options.get("compensation", lambda tool: Compensation(tool, lambda *_: {}))
        options["compensation"] = make(undo)
    return fleet.tool("write", **options)(lambda arguments, call: 1)


BAD: Final[Any] = "no function"


def nested(tool: Any) -> Compensation:
    return Compensation(replace(tool, compensation=Compensation(tool, lambda *_: {})), raises)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"compensation": None}, "must say how it is undone"),
        ({"compensation": lambda tool: "undo"}, "must be a Compensation"),
        ({"compensation": lambda tool: Compensation(BAD, raises)}, "is no tool"),
        ({"compensation": lambda tool: Compensation(tool, BAD)}, "a function of what was written"),
        (
            {"compensation": lambda tool: Compensation(tool, raises, BAD)},
            "original must be a function",
        ),
        ({"undo": {"approval": None}}, "nobody is asked while a write is undone"),
        ({"undo": {"approval": "always"}}, "nobody is asked while a write is undone"),
        ({"undo": {"side_effect": "read"}}, "a write is undone by a write"),
        ({"compensation": nested}, "cannot undo itself"),
        (
            {"side_effect": "read", "compensation": lambda tool: Compensation(tool, raises)},
            "nothing to undo",
        ),
        ({"confirmed_by_query": True}, "for a write with a query"),
    ],
)
def test_a_compensation_that_could_not_work_is_refused_when_it_is_declared(
    given: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidDefinition, match=problem):
        declared(**given)


def test_any_write_may_have_a_compensation_and_no_model_may_choose_it(world: World) -> None:
    world.workflow(
        world.compensable_tool(side_effect="idempotent"),
        plan=[{"kind": "tool", "tool": "undo_save", "arguments": {"id": 1}}],
    )
    workflow = world.fleet.workflows["draft@1"]

    assert [tool.name for tool in workflow.tools] == ["save", "undo_save"]
    assert workflow.declared()["actions"] == ["save"]
    run = world.drive(world.start())
    assert (run.status, run.reason) == ("failed", "invalid-proposal")
    assert world.service.performed == []
