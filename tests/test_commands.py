"""What is executed: a command that passed every gate, bound to one call, one state and one time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, dataclass, replace
from threading import Barrier
from types import MappingProxyType
from typing import Any, Final

import pytest

from handrail import Action, AgentLoop, Check, Proceed, Read, Workflow
from handrail.agent.capability import Capability, resource_of
from handrail.agent.commands import command_from_json, command_to_json
from handrail.agent.proposal import ToolProposal
from handrail.agent.protocol import Halt, Ruling
from handrail.agent.stage import End, Frame, Leaf, Move, Proposed, View
from handrail.agent.stage import Event as StageEvent
from handrail.agent.status import Reason, RunStatus
from handrail.errors import ToolRefused
from handrail.tasks.calls import ToolCall
from handrail.testing.people import agree
from handrail.testing.virtual_fleet import VirtualFleet
from tests.control import ask, details
from tests.test_definitions import WRITE, find
from tests.test_protocol import COMMAND, NOW, STATE, E, R, dispatched, effect, locked
from tests.world import KINDS, LEASE_MS, World, look, open_world, save

SUBJECT: Final = STATE.principal.subject


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An empty world on each database."""
    with open_world(request) as opened:
        yield opened


# ---- an executable command -----------------------------------------------------------------------


@pytest.mark.accept("NXT-02")
def test_a_proposal_that_passed_all_gates_becomes_a_bound_and_immutable_command() -> None:
    """The command of `test_protocol`: the loop's answer to a proposal of its write."""
    assert dict(COMMAND.arguments) == {"id": 1}
    assert COMMAND.intent_key == "save:1"
    assert COMMAND.state_version == STATE.state_version
    held = COMMAND.capability
    assert (held.subject, held.tool) == (SUBJECT, "save")
    assert held.resource == resource_of("save", {"id": 1}, "save:1")
    moved = COMMAND.until(NOW + 5)
    assert (moved.deadline_at, moved.capability.expires_at) == (NOW + 5, NOW + 5)
    for name in ("arguments", "intent_key", "capability", "state_version", "deadline_at"):
        with pytest.raises(FrozenInstanceError):
            setattr(COMMAND, name, None)
    with pytest.raises(FrozenInstanceError):
        held.tool = "refund"  # type: ignore[misc]
    with pytest.raises(TypeError):
        COMMAND.arguments["id"] = 2  # type: ignore[index]


@pytest.mark.accept("NXT-02")
def test_a_command_is_bound_to_the_deadline_of_its_run() -> None:
    with VirtualFleet() as virtual:
        seen: list[Any] = []

        async def work(arguments: dict[str, Any], call: ToolCall) -> str:
            row = virtual.fleet.ledger.read(call.run_id)
            pending = json.loads(row["pending"])
            seen.append((row["deadline_at"], pending["deadline_at"], pending["capability"]))
            return "saved"

        contract = {**WRITE, "approval": "never", "query": find}
        tool = virtual.fleet.tool("act", side_effect="idempotent", **contract)(work)
        loop = AgentLoop(name="loop", actions=(tool,), verify=lambda *_: True)
        virtual.fleet.workflow(Workflow(name="w", stages=[loop]))
        virtual.fleet.model("default", lambda seen: ask("act", id=1))

        virtual.run("w", goal="any", budget={"steps": 1})

    [(deadline_at, of_command, capability)] = seen
    assert deadline_at == of_command == capability["expires_at"]


@pytest.mark.accept("NXT-02")
def test_a_command_is_the_same_after_it_was_stored() -> None:
    for command in (COMMAND, COMMAND.until(NOW)):
        stored = json.loads(json.dumps(command_to_json(command)))
        assert command_from_json(stored) == command


@dataclass(frozen=True)
class Rogue(Leaf):
    """A stage that hands out something else than a command."""

    name: str
    hands_out: Any

    def start(self, view: View) -> Move:
        return Move({}, self.hands_out)

    def on(self, frame: Frame, event: StageEvent, view: View) -> Move:
        raise AssertionError("nothing was executed, so that nothing is told")


@pytest.mark.accept("NXT-02")
@pytest.mark.parametrize("kind", ["proposal", "action", "raw", "event"])
def test_nothing_but_a_command_can_be_executed(kind: str, world: World) -> None:
    called: list[Any] = []
    tool = world.fleet.tool("lookup", side_effect="read")(lambda arguments, call: called.append(1))
    rogue: dict[str, Any] = {
        "proposal": ToolProposal("lookup", {"q": 1}),
        "action": Action(tool, {"q": 1}),
        "raw": look(q=1),
        "event": Proposed(End.RETURNED, look(q=1)),
    }
    loop = AgentLoop(name="loop", actions=(tool,), verify=lambda *_: True)
    world.workflow(stages=[Rogue("rogue", rogue[kind]), loop])
    run_id = world.start()

    with pytest.raises(TypeError, match="a run cannot rest on"):
        world.step(run_id)

    assert called == []
    assert world.used(run_id)["tool_calls"] == 0


# ---- the state that it was made for --------------------------------------------------------------


@pytest.mark.accept("NXT-03")
def test_a_command_for_one_version_is_refused_at_the_next() -> None:
    moved = replace(STATE, state_version=COMMAND.state_version + 1)

    ruling, halt = dispatched(locked(moved))

    assert halt == Halt("stale")
    assert (ruling.state.status, ruling.state.reason) == (R.FAILED, Reason.INVALID_PROPOSAL)
    assert ruling.effect is None and ruling.charges_tool is None
    assert ruling.state.left.tool_calls_available == STATE.left.tool_calls_available


@pytest.mark.accept("NXT-03")
def test_a_checkpointed_write_whose_state_has_moved_is_not_sent(world: World) -> None:
    run_id = at_its_write(world)
    world.control.run(
        "UPDATE handrail_run SET state_version = state_version + 1 WHERE id = :id", {"id": run_id}
    )

    run = world.drive(run_id)

    assert (run.status, run.reason) == ("failed", "invalid-proposal")
    assert world.service.performed == []


def at_its_write(world: World) -> str:
    """A run that has checkpointed its write, and whose worker could not take the lock."""
    world.workflow(world.write_tool(), plan=[save(id=1)])
    run_id = world.start()
    world.lock.away = True
    world.step(run_id)
    world.lock.away = False
    assert world.row(run_id)["status"] == "running"
    return run_id


# ---- the capability ------------------------------------------------------------------------------

ANOTHER: Final[dict[str, dict[str, Any]]] = {
    "tool": {"tool": "refund"},
    "resource": {"arguments": MappingProxyType({"id": 2})},
    "intent": {"intent_key": "save:2"},
    "subject": {"capability": replace(COMMAND.capability, subject="mallory")},
}


@pytest.mark.accept("NXT-06")
@pytest.mark.parametrize("used_for", ANOTHER)
def test_a_capability_is_for_one_tool_and_one_resource(used_for: str) -> None:
    changed = replace(COMMAND, **ANOTHER[used_for])

    ruling, halt = dispatched(locked(effect=effect()), changed)

    assert halt == Halt("capability")
    assert (ruling.state.status, ruling.state.reason) == (R.FAILED, Reason.PERMISSION_DENIED)
    assert ruling.effect is None and ruling.charges_tool is None


@pytest.mark.accept("NXT-06")
@pytest.mark.parametrize(("late_by_ms", "refused"), [(-1, False), (0, True), (1, True)])
def test_a_capability_ends_with_its_time(late_by_ms: int, refused: bool) -> None:
    """The run's own deadline is later here: a kept command does not live on with it."""
    command = COMMAND.until(NOW - late_by_ms)

    ruling, halt = dispatched(locked(deadline_at=NOW + 60_000), command)

    assert (halt == Halt("capability")) is refused
    assert (ruling.state.reason is Reason.PERMISSION_DENIED) is refused


def test_a_doubt_is_never_ended_by_a_capability_but_handed_over() -> None:
    released = locked(effect=effect(E.UNKNOWN))

    ruling, halt = dispatched(released, COMMAND.until(NOW))

    assert halt == Halt("capability")
    assert ruling.state.status is R.HANDED_OFF and ruling.handoff is not None


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("field", ["tool", "arguments", "capability"])
@pytest.mark.accept("NXT-06")
def test_a_stored_command_that_was_changed_is_not_executed(
    field: str, kind: str, world: World
) -> None:
    """Whoever can write the row can have nothing called that was not allowed."""
    called: list[Any] = []

    def other(arguments: dict[str, Any], call: ToolCall) -> str:
        called.append(arguments)
        return "done"

    run_id = at_its_write(world) if kind == "write" else at_its_read(world, other)
    pending = json.loads(world.row(run_id)["pending"])
    changed = {
        "tool": "other" if kind == "read" else "save",
        "arguments": {"id": 2, "q": 2},
        "capability": {**pending["capability"], "subject": "mallory"},
    }
    if field == "tool" and kind == "write":
        pending["capability"]["tool"] = "another"
    pending[field] = changed[field]
    world.control.run(
        "UPDATE handrail_run SET pending = :pending WHERE id = :id",
        {"pending": json.dumps(pending), "id": run_id},
    )

    run = world.drive(run_id)

    assert called == [] and world.service.performed == []
    assert (run.status, run.reason) == ("failed", "permission-denied")
    assert run.tool_calls == 0


def at_its_read(world: World, other: Any) -> str:
    """A run whose next claim makes a fixed read, in a workflow that has another tool too."""
    lookup = world.fleet.tool("lookup", side_effect="read")(other)
    spare = world.fleet.tool("other", side_effect="read")(other)
    world.workflow(
        stages=[
            Check("check", lambda run: Proceed()),
            Read("read", lookup, lambda run: {"q": 1}),
            Read("spare", spare, lambda run: {"q": 1}),
        ]
    )
    run_id = world.start()
    world.step(run_id)
    assert world.row(run_id)["phase"] == "read"
    return run_id


@pytest.mark.parametrize(
    ("use", "lacks"),
    [
        ({}, None),
        ({"subject": "mallory"}, "another subject's"),
        ({"tool": "refund"}, "another tool"),
        ({"arguments": {"id": 2}}, "another resource"),
        ({"intent_key": "save:2"}, "another resource"),
        ({"now": 100}, "has expired"),
        ({"now": 99}, None),
    ],
)
def test_a_capability_says_what_a_use_lacks(use: dict[str, Any], lacks: str | None) -> None:
    held = Capability("ann", "save", resource_of("save", {"id": 1}, "save:1"), 100)
    asked: dict[str, Any] = {
        "subject": "ann",
        "tool": "save",
        "arguments": {"id": 1},
        "intent_key": "save:1",
        "now": 0,
    }

    found = held.lacks(**asked | use)

    assert (found is None) if lacks is None else (found is not None and lacks in found)


def test_a_wait_for_a_person_moves_the_deadline_of_what_was_agreed_to(world: World) -> None:
    """The capability ends with the run's working time, which waiting does not use."""
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    run_id = world.start(budget={"deadline_ms": 10_000})
    world.step(run_id)
    assert world.row(run_id)["status"] == "awaiting_approval"
    world.advance(3_600_000)
    agree(world.fleet, run_id)

    run = world.drive(run_id)

    assert run.status == "completed"
    assert world.service.performed == ["save:1"]


# ---- two writers ---------------------------------------------------------------------------------


@pytest.mark.accept("NXT-07")
def test_of_two_writers_with_one_state_version_exactly_one_succeeds(world: World) -> None:
    """Both have claimed the run at the same version; the first of them was believed to be dead."""
    world.workflow(world.read_tool(), plan=[look(q=1)])
    run_id = world.start()
    first = world.claim(run_id)
    world.advance(LEASE_MS)
    world.reconciler.sweep()
    second = world.claim(run_id)
    assert first is not None and second is not None
    assert first.state.state_version == second.state.state_version == 0
    together = Barrier(2)

    def commit(claim: Any) -> bool:
        moved = replace(claim.state, status=RunStatus.RUNNING, state_version=1)
        ruling = Ruling(state=moved, attempts=0)
        together.wait(5)
        return world.commit(claim, ruling) is not False

    with ThreadPoolExecutor(2) as pool:
        succeeded = list(pool.map(commit, [first, second]))

    assert succeeded == [False, True]
    assert world.row(run_id)["state_version"] == 1


@pytest.mark.accept("NXT-07")
def test_a_version_is_never_written_twice_whoever_commits_first(world: World) -> None:
    """The same claim at two places: a commit that is repeated changes nothing any more."""
    world.workflow(world.read_tool(), plan=[look(q=1)])
    run_id = world.start()
    claim = world.claim(run_id)
    assert claim is not None
    together = Barrier(2)

    def commit(version: int) -> bool:
        moved = replace(claim.state, status=RunStatus.RUNNING, state_version=version)
        together.wait(5)
        ruling = Ruling(state=moved, attempts=0)
        return world.commit(claim, ruling) is not False

    with ThreadPoolExecutor(2) as pool:
        succeeded = list(pool.map(commit, [1, 2]))

    assert sorted(succeeded) == [False, True]
    assert world.row(run_id)["state_version"] == 1 + succeeded.index(True)


def test_a_read_that_is_refused_says_why(world: World) -> None:
    def never(arguments: dict[str, Any], call: ToolCall) -> str:
        raise ToolRefused("it must not be called")

    run_id = at_its_read(world, never)
    world.control.run(
        "UPDATE handrail_run SET state_version = state_version + 1 WHERE id = :id", {"id": run_id}
    )

    run = world.drive(run_id)

    assert (run.status, run.reason, run.tool_calls) == ("failed", "invalid-proposal", 0)
    [stop] = details(world.trace(run_id), "run.stopped")
    assert stop["problem"] == "state moved on"
