"""A shadow run does everything but dispatch: its trace shows what would have been written, and
nothing else does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from handrail.agent.commands import command_from_json
from handrail.agent.effects import upstream_key
from handrail.agent.fixed import Commit, Confirm, Read
from handrail.agent.machine import RunState
from handrail.agent.protocol import Go, Halt, Locked, dispatch
from handrail.agent.review import findings
from handrail.agent.stage import Action, InvokeTool, arguments_hash
from handrail.agent.status import RunStatus
from handrail.broker.message import StepMessage
from handrail.canonical import Json
from handrail.errors import InvalidDefinition, ToolRefused, ToolUnclear
from handrail.fleet import InvalidRun
from handrail.ledger.errors import RunExists
from handrail.testing.people import agree
from tests.world import (
    KINDS,
    LEASE_MS,
    SECOND,
    STALL_MS,
    Outside,
    World,
    look,
    open_world,
    save,
    save_for_goal,
)

RECEIPT: Final[Json] = {"receipt": 0, "of": "nobody"}


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An empty world on each database."""
    with open_world(request) as opened:
        yield opened


def shadowed(world: World, run: str) -> list[dict[str, Any]]:
    return [event["detail"] for event in world.trace(run, "effect.shadowed")]


def nothing_was_written(world: World) -> None:
    """No effect, no lock, no call: by the ledger's tables and by the service's own records."""
    assert world.rows("SELECT * FROM handrail_effect") == []
    assert world.rows("SELECT * FROM handrail_approval") == []
    assert not world.lock.held and not world.service.performed
    assert not any(kind.startswith("write") for kind in world.service.calls)


# ---- without a stand-in --------------------------------------------------------------------------


@pytest.mark.accept("LED-21")
def test_a_shadow_run_ends_where_it_would_write_and_shows_what(world: World) -> None:
    world.workflow(world.read_tool(), world.write_tool(), plan=[look(q=1), save_for_goal])
    run = world.drive(world.start(run_id="s", mode="shadow"))

    assert (run.status, run.reason, run.mode) == ("cancelled", "cancelled", "shadow")
    assert shadowed(world, "s") == [
        {
            "tool": "save",
            "contract_version": "1",
            "arguments_hash": arguments_hash("save", {"id": "s"}),
            "idempotency_key_hash": upstream_key("default", "save:s"),
            "approval": False,
            "stand_in": False,
        }
    ]
    (stop,) = world.trace("s", "run.stopped")
    assert stop["detail"]["shadow"] is True
    assert run.budget_used["tool_calls"] == 1  # the read
    nothing_was_written(world)


@pytest.mark.accept("LED-21")
def test_what_it_shows_is_what_a_live_run_then_writes(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=7)])
    world.drive(world.start(run_id="s", mode="shadow"))
    world.drive(world.start(run_id="l"))

    (would,), (did,) = shadowed(world, "s"), world.trace("l", "tool.started")
    assert {key: did["detail"][key] for key in ("tool", "arguments_hash")} == {
        key: would[key] for key in ("tool", "arguments_hash")
    }
    assert world.effect("save:7")["id"] == would["idempotency_key_hash"]


def test_nobody_is_asked_to_approve_what_a_shadow_run_would_write(world: World) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    run = world.drive(world.start(mode="shadow"))

    assert run.status == "cancelled"
    assert [detail["approval"] for detail in shadowed(world, run.run_id)] == [True]
    assert world.trace(run.run_id, "approval.requested") == []
    nothing_was_written(world)


def test_the_gates_come_before_the_shadow(world: World) -> None:
    """What a live run may not do, a shadow run is refused in the same way."""
    world.workflow(world.write_tool(permission="saver"), plan=[save(id=1)])
    run = world.drive(world.start(mode="shadow"))

    assert (run.status, run.reason) == ("failed", "permission-denied")
    assert shadowed(world, run.run_id) == []


def test_a_read_that_needs_consent_needs_it_in_a_shadow_run_too(world: World) -> None:
    world.workflow(world.read_tool(approval="always"), plan=[look(q=1)])
    run = world.drive(world.start(mode="shadow"))
    assert run.status == "awaiting_approval"

    agree(world.fleet, run)
    assert world.drive(run.run_id).status == "completed"


def test_a_run_that_writes_nothing_is_the_same_in_either_mode(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(q=1), look(q=2)])
    runs = [world.drive(world.start(mode=mode)) for mode in ("live", "shadow")]

    assert [run.status for run in runs] == ["completed", "completed"]
    assert runs[0].budget_used == runs[1].budget_used


# ---- with a stand-in -----------------------------------------------------------------------------


def plain_stand_in(arguments: dict[str, Json], call: Any) -> Json:
    assert call.key is None and call.intent_key == f"save:{arguments['id']}"
    receipt: Json = {"receipt": 0, "of": call.intent_key}
    return receipt


async def async_stand_in(arguments: dict[str, Json], call: Any) -> Json:
    return plain_stand_in(arguments, call)


@pytest.mark.accept("LED-21")
@pytest.mark.parametrize("stand_in", [plain_stand_in, async_stand_in])
@pytest.mark.parametrize("approval", ["never", "always"])
def test_with_a_stand_in_a_shadow_run_goes_on_to_its_end(
    world: World, stand_in: Callable[..., Any], approval: str
) -> None:
    tool = world.write_tool(shadow=stand_in, approval=approval)
    world.workflow(world.read_tool(), tool, plan=[save(id=1), look(q=1), save(id=2)])
    run = world.drive(world.start(run_id="s", mode="shadow"))

    assert run.status == "completed"
    details = shadowed(world, "s")
    assert [detail["stand_in"] for detail in details] == [True, True]
    assert [detail["approval"] for detail in details] == [approval == "always"] * 2
    assert len(world.trace("s", "approval.shadowed")) == (2 if approval == "always" else 0)
    assert run.budget_used["tool_calls"] == 1  # the read: what is not sent is not charged
    nothing_was_written(world)


def test_a_stand_in_is_never_called_by_a_live_run(world: World) -> None:
    def never(arguments: Any, call: Any) -> Json:
        raise AssertionError("a live run called it")

    world.workflow(world.write_tool(shadow=never), plan=[save(id=1)])

    assert world.drive(world.start()).status == "completed"
    assert world.service.performed == ["save:1"]


def refuses(arguments: Any, call: Any) -> Json:
    raise ToolRefused("no-funds")


def is_unclear(arguments: Any, call: Any) -> Json:
    raise ToolUnclear("gateway-timeout")


def raises(arguments: Any, call: Any) -> Json:
    raise ValueError("a fault of its own")


@pytest.mark.parametrize(
    ("stand_in", "code"),
    [
        (refuses, "no-funds"),
        (is_unclear, "stand-in:gateway-timeout"),
        (raises, "stand-in:raised"),
        (lambda arguments, call: {"receipt": 1, "of": "too much"}, "stand-in:postcondition-failed"),
        (lambda arguments, call: object(), "stand-in:result-violates-contract"),
    ],
)
def test_a_stand_in_that_gives_no_receipt_is_no_doubt(
    world: World, stand_in: Callable[..., Any], code: str
) -> None:
    """Nothing was sent, so that there is nothing to find out."""
    tool = world.write_tool(shadow=stand_in, postcondition=lambda _, found: found == RECEIPT)
    world.workflow(tool, plan=[save(id=1)])
    run = world.drive(world.start(mode="shadow"))

    assert (run.status, run.reason) == ("failed", "tool-failed")
    (stop,) = world.trace(run.run_id, "run.stopped")
    assert stop["detail"]["code"] == code
    nothing_was_written(world)


def test_a_wish_to_cancel_reaches_a_stand_in(world: World) -> None:
    def cancelled_meanwhile(arguments: Any, call: Any) -> Json:
        world.fleet.cancel("s")
        return RECEIPT

    world.workflow(world.write_tool(shadow=cancelled_meanwhile), plan=[save(id=1)])
    run = world.drive(world.start(run_id="s", mode="shadow"))

    assert run.status == "cancelled" and run.cancel_requested
    nothing_was_written(world)


@pytest.mark.parametrize("stand_in", [None, plain_stand_in])
def test_a_fixed_commit_is_shadowed_with_its_confirmation(world: World, stand_in: Any) -> None:
    tool = world.write_tool(side_effect="irreversible", approval="on-write", shadow=stand_in)

    def act(run: Any) -> Action:
        return Action(tool, {"id": 1})

    stages = [
        Read("read", world.read_tool(), lambda run: {"q": 1}),
        Confirm("confirm", act),
        Commit("commit", act, tool),
    ]
    world.workflow(stages=stages)
    run = world.drive(world.start(mode="shadow"))

    assert run.status == ("completed" if stand_in else "cancelled")
    assert [detail["approval"] for detail in shadowed(world, run.run_id)] == [True]
    nothing_was_written(world)


def test_a_workflow_whose_first_act_is_a_write_is_shadowed_too(world: World) -> None:
    tool = world.write_tool(shadow=plain_stand_in)
    world.workflow(stages=[Commit("commit", lambda run: Action(tool, {"id": 1}), tool)])

    assert world.drive(world.start(mode="shadow")).answer == {
        "receipt": 0,
        "of": "save:1",
    }
    nothing_was_written(world)


def test_a_shadow_without_a_write_to_stand_in_for_is_refused(world: World) -> None:
    with pytest.raises(InvalidDefinition, match="needs no shadow"):
        world.read_tool(shadow=plain_stand_in)
    with pytest.raises(InvalidDefinition, match="shadow must be a function"):
        world.write_tool(shadow="a receipt")


# ---- whatever happens ----------------------------------------------------------------------------

#: Every kind of write there is, with and without a stand-in.
TOOLS: Final[dict[str, dict[str, Any]]] = {
    "keyed": {},
    "query": {"key_valid_for_ms": 0},
    "neither": {"key_valid_for_ms": 0, "query": False},
    "agreed": {"approval": "always"},
    "stood_in": {"shadow": lambda arguments, call: RECEIPT},
    "agreed_and_stood_in": {"approval": "always", "shadow": lambda arguments, call: RECEIPT},
    "refused": {"shadow": refuses},
    "raising": {"shadow": raises},
}


@pytest.mark.accept("LED-21")
@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_tool_and_whatever_the_fault_a_shadow_run_dispatches_nothing(
    world: World, seed: int
) -> None:
    """Messages come again, workers die anywhere, leases run out, people cancel."""
    chance = random.Random(seed)
    for name, terms in TOOLS.items():
        write = {"kind": "tool", "tool": name, "arguments": {"id": 1}}
        world.workflow(
            world.read_tool(f"read_{name}"),
            world.write_tool(name, **terms),
            plan=[{**look(q=1), "tool": f"read_{name}"}, write, write],
            name=name,
        )
        run = world.start(name, run_id=name, mode="shadow")
        trouble(world, run, chance)
        ended = world.drive(run)
        assert ended.ended, name
        assert findings(world.trace(run), RunStatus(ended.status)) == []
        nothing_was_written(world)
        assert world.rows("SELECT status FROM handrail_run WHERE status = 'handed_off'") == []


def trouble(world: World, run: str, chance: random.Random) -> None:
    old: list[StepMessage] = []
    for _ in range(8):
        old.append(world.message(run))
        outside = Outside()
        dies_at = chance.randrange(12)
        outside.when = lambda place, o=outside, n=dies_at: len(o.places) == n  # type: ignore[misc]
        outside.then = outside.die
        world.step(run, message=chance.choice(old), outside=outside)
        if chance.random() < 0.5:
            world.advance(LEASE_MS + SECOND)
        world.reconciler.sweep()
    if chance.random() < 0.3:
        world.fleet.cancel(run)


def test_the_dispatch_itself_refuses_a_shadow_run(world: World) -> None:
    """The machine lets none come that far; if one did, this would stop it."""
    world.workflow(world.write_tool(), plan=[save(id=1)])
    live, shadow = world.start(run_id="l"), world.start(run_id="s", mode="shadow")
    outside = Outside(when=lambda place: place == "before acquire")
    outside.then = outside.die
    world.step(live, outside=outside)
    command = executable(world)

    halts = {}
    for run in (live, shadow):
        state = replace(world.ledger.read(run)["state"], status=RunStatus.EXECUTING)
        locked = ready_to_dispatch(world, state)
        _, halts[run] = dispatch(
            locked, command, claim_id="mine", call_ms=5_000, max_stall_ms=STALL_MS
        )

    assert isinstance(halts[live], Go)
    assert halts[shadow] == Halt("shadow")


def executable(world: World) -> InvokeTool:
    """The command of the write that a live run is about to make, as the ledger holds it."""
    pending = json.loads(world.row("l")["pending"])
    found = command_from_json(pending)
    assert isinstance(found, InvokeTool)
    return found


def ready_to_dispatch(world: World, state: RunState) -> Locked:
    """A run that nothing but its mode could keep from dispatching."""
    now = world.clock.ms
    effect = world.ledger.effect(upstream_key("default", "save:1"))
    return Locked(
        state=replace(state, state_version=0),
        now=now,
        epoch=1,
        claim_id="mine",
        lease_until=now + LEASE_MS,
        due_at=None,
        deadline_at=now + LEASE_MS,
        remaining_ms=None,
        expires_at=now + LEASE_MS,
        attempts=1,
        cancel_requested=False,
        effect=effect,
    )


# ---- accepting one -------------------------------------------------------------------------------


def test_a_shadow_run_takes_no_real_runs_place(world: World) -> None:
    """Neither its dedupe key nor its id stands for a run that was never made."""
    world.workflow(world.write_tool(), plan=[save_for_goal])
    shadow = world.start(run_id="s", mode="shadow", dedupe_key="order-42")
    live = world.start(run_id="l", dedupe_key="order-42")

    assert (shadow, live) == ("s", "l")
    assert world.start(run_id="again", mode="shadow", dedupe_key="order-42") == "s"
    with pytest.raises(RunExists):
        world.start(run_id="s")
    assert world.drive(live).status == "completed" and world.service.performed == ["save:l"]


def test_a_mode_that_there_is_not_is_refused(world: World) -> None:
    world.workflow(world.read_tool())
    with pytest.raises(InvalidRun, match="live, shadow"):
        world.start(mode="dry")
    with pytest.raises(InvalidRun):
        world.start(mode=None)


def test_a_shadow_run_says_so_wherever_it_is_shown(world: World) -> None:
    world.workflow(world.read_tool())
    run = world.start(mode="shadow")

    assert world.fleet.get(run).mode == "shadow"
    assert world.fleet.get(run).to_json()["mode"] == "shadow"
    assert [found.mode for found in world.fleet.runs()] == ["shadow"]
    assert world.trace(run, "run.accepted")[0]["detail"]["mode"] == "shadow"
