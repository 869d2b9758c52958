"""The life of a run: its statuses, the only legal moves, and that a move is whole or not made."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import pytest

from handrail import AgentLoop, Fleet, ToolCall, Workflow
from handrail.agent import machine, protocol
from handrail.agent.approvals import ApprovalRefused
from handrail.agent.budget import Budget
from handrail.agent.machine import RunState
from handrail.agent.protocol import Locked, Ruling
from handrail.agent.stage import AskModel, End, Proposed, Stop, Succeeded
from handrail.agent.status import (
    STOPS,
    TERMINAL,
    TRANSITIONS,
    Reason,
    RunEvent,
    RunStatus,
    next_status,
)
from handrail.agent.tools import FOREVER, Tool
from handrail.broker.message import StepMessage
from handrail.errors import IllegalTransition
from handrail.gateway.model import Scripted
from handrail.ledger.database import Database
from handrail.ledger.ledger import Claim, Ledger, StepEnd
from handrail.ledger.migrate import create_all
from handrail.runs import Run
from handrail.testing.people import APPROVER, OPERATOR, agree, disagree
from handrail.testing.services import EmbeddedPostgres
from handrail.testing.virtual_fleet import VirtualFleet
from tests.control import ask, claim, details

S = RunStatus

#: From where to where a run may go, written down here once more.
LEGAL: Final[Mapping[RunStatus, frozenset[RunStatus]]] = {
    S.QUEUED: frozenset(
        {S.RUNNING, S.CANCELLED, S.BUDGET_EXHAUSTED, S.HANDED_OFF, S.RECONCILING}
    ),
    S.RUNNING: frozenset(
        {S.RUNNING, S.EXECUTING, S.AWAITING_APPROVAL, S.AWAITING_INPUT, S.AWAITING_BRANCHES,
         S.RECONCILING, S.CANCELLING, S.HANDED_OFF, S.COMPLETED, S.FAILED, S.CANCELLED,
         S.BUDGET_EXHAUSTED}
    ),
    S.EXECUTING: frozenset(
        {S.EXECUTING, S.RUNNING, S.RECONCILING, S.CANCELLING, S.HANDED_OFF, S.FAILED, S.CANCELLED,
         S.BUDGET_EXHAUSTED}
    ),
    S.AWAITING_APPROVAL: frozenset(
        {S.EXECUTING, S.FAILED, S.CANCELLED, S.BUDGET_EXHAUSTED, S.RECONCILING}
    ),
    S.AWAITING_INPUT: frozenset(
        {S.RUNNING, S.FAILED, S.CANCELLED, S.BUDGET_EXHAUSTED, S.RECONCILING}
    ),
    S.AWAITING_BRANCHES: frozenset({S.RUNNING, S.CANCELLING, S.CANCELLED, S.RECONCILING}),
    S.RECONCILING: frozenset(
        {S.RECONCILING, S.RUNNING, S.HANDED_OFF, S.COMPENSATED, S.FAILED, S.CANCELLED}
    ),
    S.CANCELLING: frozenset({S.CANCELLED, S.RECONCILING}),
    S.HANDED_OFF: frozenset(
        {S.HANDED_OFF, S.RUNNING, S.RECONCILING, S.COMPLETED, S.COMPENSATED, S.FAILED, S.CANCELLED}
    ),
    S.COMPLETED: frozenset(),
    S.COMPENSATED: frozenset(),
    S.FAILED: frozenset(),
    S.CANCELLED: frozenset(),
    S.BUDGET_EXHAUSTED: frozenset(),
}  # fmt: skip
ILLEGAL = [(one, other) for one in S for other in S if other not in LEGAL[one]]


class Desk:
    """A virtual fleet with a loop over a read and writes, whose statuses are watched."""

    def __init__(self, virtual: VirtualFleet) -> None:
        self.virtual, self.fleet = virtual, virtual.fleet
        self.calls: list[str] = []
        self.keys: list[str | None] = []
        self.during: list[str] = []
        self.verdict: Any = True
        self.answers: Callable[[ToolCall], Any] = lambda call: "done"

    async def work(self, arguments: dict[str, Any], call: ToolCall) -> Any:
        self.calls.append(call.tool)
        self.keys.append(call.key)
        self.during.append(self.fleet.get(call.run_id).status)
        found = self.answers(call)
        return await found if asyncio.iscoroutine(found) else found

    def read(self) -> Tool:
        return self.fleet.tool("lookup", side_effect="read")(self.work)

    def write(self, name: str = "save", **contract: Any) -> Tool:
        usual: dict[str, Any] = {
            "side_effect": "idempotent",
            "approval": "never",
            "intent": lambda arguments, run: f"draft:{arguments.get('id')}",
            "guarantee": "unique-constraint",
            "takeover": "operations",
        }
        return self.fleet.tool(name, **usual | contract)(self.work)

    async def check(self, claim: Any, call: ToolCall) -> Any:
        self.calls.append("check")
        return self.verdict

    def workflow(self, *tools: Tool, **more: Any) -> None:
        loop = AgentLoop(name="loop", actions=tools, verify=self.check)
        self.fleet.workflow(Workflow(name="task", stages=[loop], **more))

    def run(self, *proposals: Any, **options: Any) -> Run:
        self.fleet.model("default", Scripted(proposals))
        return self.virtual.run("task", goal="any", **options)

    def moves(self, run: Run) -> list[tuple[str, str]]:
        """From where to where the run went, as its trace tells it."""
        return [
            (event["detail"]["from"], event["detail"].get("to", event["detail"].get("status")))
            for event in self.fleet.trace(run)
            if event["type"] in ("run.moved", "run.stopped", "run.resumed")
            and "event" in event["detail"]
        ]


async def for_ever() -> Any:
    await asyncio.Event().wait()


@pytest.fixture
def desk() -> Iterator[Desk]:
    with VirtualFleet() as virtual:
        yield Desk(virtual)


# ---- the phases of a round -----------------------------------------------------------------------


@pytest.mark.accept("STM-01")
@pytest.mark.parametrize("tool", ["lookup", "save"])
def test_a_round_has_five_phases_in_order(tool: str, desk: Desk) -> None:
    desk.workflow(desk.read(), desk.write())
    run = desk.run(ask(tool, id=1), claim("done"))

    phases = {
        "observation.built": "observe",
        "proposal.received": "decide",
        "tool.started": "act",
        "result.verified": "validate",
        "state.transitioned": "update",
    }
    seen = [phases[event["type"]] for event in desk.fleet.trace(run) if event["type"] in phases]
    assert seen[:5] == ["observe", "decide", "act", "validate", "update"]
    assert seen[5:] == ["observe", "decide"]  # and the round that completes


# ---- the moves -----------------------------------------------------------------------------------


@pytest.mark.accept("STM-03")
def test_a_valid_proposal_of_an_allowed_action_makes_the_run_executing(desk: Desk) -> None:
    """For a write that is durable while the tool is called; a read's round traces it."""
    desk.workflow(desk.read(), desk.write())
    run = desk.run(ask("save", id=1), ask("lookup", id=1), claim("done"))

    assert desk.during[0] == "executing"
    assert desk.moves(run).count(("running", "executing")) == 2


@pytest.mark.accept("STM-04")
@pytest.mark.parametrize("proposal", [ask("refund"), {"kind": "odd"}, "no json"])
def test_an_invalid_proposal_fails_the_run(proposal: Any, desk: Desk) -> None:
    desk.workflow(desk.read())
    run = desk.run(proposal)

    assert (run.status, run.reason) == ("failed", "invalid-proposal")
    assert desk.moves(run) == [("queued", "running"), ("running", "failed")]


@pytest.mark.accept("STM-05")
@pytest.mark.parametrize("tool", ["lookup", "save"])
def test_a_verified_result_makes_the_run_running_again(tool: str, desk: Desk) -> None:
    desk.workflow(desk.read(), desk.write())
    desk.fleet.model("default", Scripted([ask(tool, id=1)]))
    run_id = desk.fleet.enqueue("task", goal="any")

    desk.virtual.step(run_id)

    run = desk.fleet.get(run_id)
    assert run.status == "running"
    assert desk.moves(run)[-2:] == [("running", "executing"), ("executing", "running")]


@pytest.mark.accept("STM-06")
def test_an_unknown_effect_is_queried_first(desk: Desk) -> None:
    asked = []

    def query(arguments: Any, call: ToolCall) -> str:
        asked.append(call.key)
        return "it is there"

    desk.workflow(desk.write(query=query))
    desk.answers = lambda call: for_ever()
    run = desk.run(ask("save", id=1))
    assert (run.status, run.reason, asked) == ("reconciling", "unknown-effect", [])

    desk.virtual.advance(1_000)
    desk.virtual.reconciler.sweep()
    run = desk.fleet.get(run.run_id)

    assert asked == desk.keys  # with the key of the one call that was made
    assert (run.status, run.reason) == ("running", None)
    assert ("executing", "reconciling") in desk.moves(run)
    desk.virtual.drive(run.run_id)
    assert desk.fleet.get(run.run_id).observations == ("it is there",)
    assert desk.calls == ["save"]


@pytest.mark.accept("STM-06")
def test_what_cannot_be_queried_is_sent_again_with_the_same_key(desk: Desk) -> None:
    desk.workflow(desk.write(guarantee="idempotency-key", key_valid_for_ms=FOREVER))
    desk.answers = lambda call: for_ever() if call.attempt == 1 else "saved"
    run = desk.run(ask("save", id=1), claim("done"))
    assert (run.status, run.reason) == ("reconciling", "unknown-effect")

    desk.virtual.advance(60_000)
    desk.virtual.reconciler.sweep()
    run = desk.virtual.drive(run.run_id)

    assert (run.status, run.reason) == ("completed", "completed")
    assert desk.calls == ["save", "save", "check"]
    assert len(set(desk.keys)) == 1
    assert run.tool_calls == 2


@pytest.mark.accept("STM-06")
def test_a_doubt_that_nothing_can_settle_is_handed_to_a_person(desk: Desk) -> None:
    desk.workflow(desk.write())
    desk.answers = lambda call: for_ever()
    run = desk.run(ask("save", id=1))
    assert (run.status, run.reason) == ("reconciling", "unknown-effect")

    desk.virtual.advance(60_000)
    desk.virtual.reconciler.sweep()
    run = desk.fleet.get(run.run_id)

    assert (run.status, run.reason) == ("handed_off", "unknown-effect")
    assert desk.calls == ["save"]
    [handoff] = desk.fleet.ledger.people.handoffs(run_id=run.run_id)
    assert handoff["reason"] == "unknown-effect"


@pytest.mark.accept("STM-06")
def test_a_doubt_that_queries_do_not_settle_is_handed_to_a_person(desk: Desk) -> None:
    def query(arguments: Any, call: ToolCall) -> str:
        raise ConnectionError("the service is away")

    desk.workflow(desk.write(query=query))
    desk.answers = lambda call: for_ever()
    run = desk.run(ask("save", id=1))
    for _ in range(20):
        desk.virtual.advance(120_000)
        desk.virtual.reconciler.sweep()

    run = desk.fleet.get(run.run_id)
    assert (run.status, run.reason) == ("handed_off", "unknown-effect")
    assert desk.calls == ["save"]


@pytest.mark.accept("STM-07")
def test_a_verified_completion_completes_the_run(desk: Desk) -> None:
    desk.workflow(desk.read())
    run = desk.run(claim("done"))

    assert (run.status, run.reason, run.answer) == ("completed", "completed", "done")
    assert desk.moves(run)[-1] == ("running", "completed")


@pytest.mark.accept("STM-08")
def test_a_repeated_state_fails_the_run(desk: Desk) -> None:
    desk.workflow(desk.read())
    run = desk.run(*[ask("lookup", id=1)] * 3)

    assert (run.status, run.reason) == ("failed", "repeated-proposal")
    assert desk.moves(run)[-1] == ("running", "failed")


@pytest.mark.accept("STM-08")
@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({"steps": 1}, "step-budget-exhausted"),
        ({"model_calls": 1}, "model-call-budget-exhausted"),
        ({"tool_calls": 1}, "tool-call-budget-exhausted"),
        ({"deadline_ms": 50}, "deadline-exhausted"),
        ({"tokens": 0}, "token-budget-exhausted"),
        ({"cost_microusd": 0}, "cost-budget-exhausted"),
        ({"output_bytes": 0}, "output-budget-exhausted"),
    ],
)
def test_an_exhausted_budget_stops_the_run_with_its_own_reason(
    budget: dict[str, int], reason: str, desk: Desk
) -> None:
    desk.workflow(desk.read())

    def slowly(call: ToolCall) -> str:
        desk.virtual.advance(25)
        return "found"

    desk.answers = slowly
    run = desk.run(ask("lookup", id=1), ask("lookup", id=2), ask("lookup", id=3), budget=budget)

    assert (run.status, run.reason) == ("budget_exhausted", reason)
    assert desk.moves(run)[-1] == ("running", "budget_exhausted")


# ---- cancelling ----------------------------------------------------------------------------------


@pytest.mark.accept("STM-09")
def test_a_run_with_nothing_in_flight_is_cancelled_at_once(desk: Desk) -> None:
    desk.workflow(desk.read())
    desk.fleet.model("default", Scripted([ask("lookup", id=1)]))
    queued = desk.fleet.cancel(desk.fleet.enqueue("task", goal="any"))
    run_id = desk.fleet.enqueue("task", goal="any")
    desk.virtual.step(run_id)
    assert desk.fleet.get(run_id).status == "running"

    running = desk.fleet.cancel(run_id)

    assert (queued.status, queued.reason) == ("cancelled", "cancelled")
    assert (running.status, running.reason) == ("cancelled", "cancelled")
    assert desk.moves(running)[-1] == ("running", "cancelled")


@pytest.mark.accept("STM-09")
@pytest.mark.parametrize(
    ("tool", "ends"), [("lookup", "cancelled"), ("save", "reconciling"), (None, "cancelled")]
)
def test_a_run_with_a_call_in_flight_is_cancelling_until_the_call_has_ended(
    tool: str | None, ends: str, desk: Desk
) -> None:
    at_the_wish = []

    async def cancelled_meanwhile(run_id: str) -> Any:
        await asyncio.sleep(0.010)
        at_the_wish.append(desk.virtual.cancel(run_id).status)
        await for_ever()

    async def check(claim: Any, call: ToolCall) -> Any:
        await cancelled_meanwhile(call.run_id)

    loop = AgentLoop(name="loop", actions=(desk.read(), desk.write()), verify=check)
    desk.fleet.workflow(Workflow(name="task", stages=[loop]))
    desk.answers = lambda call: cancelled_meanwhile(call.run_id)
    run = desk.run(claim("done") if tool is None else ask(tool, id=1))

    assert at_the_wish == ["cancelling"]
    assert run.status == ends
    before = "running" if tool != "save" else "executing"
    assert desk.moves(run)[-2:] == [(before, "cancelling"), ("cancelling", ends)]
    if ends == "reconciling":
        required = details(desk.fleet.trace(run), "effect.reconciliation-required")
        assert [detail["trigger"] for detail in required] == ["cancellation"]


@pytest.mark.accept("STM-09")
def test_a_run_whose_own_effect_is_unknown_is_reconciled_when_it_is_cancelled(desk: Desk) -> None:
    """Its key was released to be sent again; the wish comes before that."""
    desk.workflow(desk.write(guarantee="idempotency-key", key_valid_for_ms=FOREVER))
    desk.answers = lambda call: for_ever()
    run = desk.run(ask("save", id=1))
    desk.virtual.advance(60_000)
    desk.virtual.reconciler.sweep()
    assert desk.fleet.get(run.run_id).status == "running"

    run = desk.fleet.cancel(run.run_id)

    assert (run.status, run.reason) == ("reconciling", "unknown-effect")
    assert desk.calls == ["save"]


@pytest.mark.accept("STM-09")
def test_nothing_but_cancelled_and_reconciling_follows_cancelling() -> None:
    assert set(TRANSITIONS[S.CANCELLING].values()) == {S.CANCELLED, S.RECONCILING}


def cancelling(desk: Desk) -> RunState:
    """The state of a run that is being cancelled, as the machine has it."""
    workflow = desk.fleet.workflows["task@1"]
    run_id = desk.fleet.enqueue("task", goal="any")
    state: RunState = desk.fleet.ledger.read(run_id)["state"]
    assert isinstance(state.pending, AskModel)
    state = replace(machine.claimed(state, machine.phase_of(workflow, state), []), told=None)
    return replace(state, status=S.CANCELLING)


@pytest.mark.accept("STM-11")
@pytest.mark.parametrize(
    ("proposal", "next_call", "spent"),
    [
        (ask("lookup", id=1), "lookup", (1, 0)),  # a read was about to start
        (ask("save", id=1), "save", (1, 0)),  # a write
        (claim("done"), "check", (1, 0)),  # a verification
    ],
)
def test_a_cancelling_run_starts_nothing_after_its_model_call(
    proposal: Any, next_call: str, spent: tuple[int, int], desk: Desk
) -> None:
    async def cancelled_meanwhile(observation: Any) -> Any:
        desk.virtual.cancel(desk.fleet.runs()[0].run_id)
        assert desk.fleet.runs()[0].status == "cancelling"
        return proposal

    desk.workflow(desk.read(), desk.write())
    desk.fleet.model("default", cancelled_meanwhile)
    run = desk.virtual.run("task", goal="any")

    assert next_call not in desk.calls
    assert (run.status, run.reason) == ("cancelled", "cancelled")
    assert (run.model_calls, run.tool_calls) == spent
    assert details(desk.fleet.trace(run), "tool.started") == []


@pytest.mark.accept("STM-11")
def test_a_cancelling_run_asks_no_model_again(desk: Desk) -> None:
    asked = []

    async def model(observation: Any) -> Any:
        asked.append(observation)
        return ask("lookup", id=1)

    def cancels(call: ToolCall) -> str:
        desk.virtual.cancel(call.run_id)
        return "found"

    desk.workflow(desk.read())
    desk.answers = cancels
    desk.fleet.model("default", model)
    run_id = desk.fleet.enqueue("task", goal="any")
    message = StepMessage(run_id=run_id, step=0, epoch=0)
    desk.virtual.handle(message)
    before = desk.fleet.get(run_id)
    for epoch in range(4):  # whatever messages are still about
        desk.virtual.handle(message.model_copy(update={"epoch": epoch}))

    assert len(asked) == 1
    assert desk.fleet.get(run_id).budget_left == before.budget_left
    assert (before.status, before.model_calls, before.tool_calls) == ("cancelled", 1, 1)


@pytest.mark.accept("STM-11")
@pytest.mark.parametrize("start", ["tool", "model", "verification"])
def test_the_machine_turns_every_start_of_a_cancelling_run_into_the_end(
    start: str, desk: Desk
) -> None:
    """Even where the wish itself is not visible: the status is enough."""
    desk.workflow(desk.read())
    workflow, state = desk.fleet.workflows["task@1"], cancelling(desk)
    view = state.view(remaining_ms=1_000, cancelled=False)
    proposals = {"tool": ask("lookup", id=1), "verification": claim("done")}
    if start == "model":
        turn = machine.start(workflow, replace(state, levels=()), view)
    else:
        turn = machine.on(workflow, state, Proposed(End.RETURNED, proposals[start]), view)

    assert isinstance(turn.command, Stop)
    assert turn.state.status is S.CANCELLED
    assert turn.state.left.snapshot() == state.left.snapshot()


# ---- completion ----------------------------------------------------------------------------------


@pytest.mark.accept("STM-12")
@pytest.mark.parametrize("verdict", [False, None, "yes", 1, {"ok": True}, "raises"])
def test_a_claim_that_does_not_hold_completes_nothing(verdict: Any, desk: Desk) -> None:
    async def check(claim: Any, call: ToolCall) -> Any:
        if verdict == "raises":
            raise RuntimeError
        return verdict

    loop = AgentLoop(name="loop", actions=(desk.read(),), verify=check)
    desk.fleet.workflow(Workflow(name="task", stages=[loop]))
    run = desk.run(claim("done"), claim("really done"), budget={"steps": 2})

    assert run.status != "completed"
    assert run.answer is None
    assert details(desk.fleet.trace(run), "run.completed") == []
    assert ("running", "completed") not in desk.moves(run)


# ---- illegal moves -------------------------------------------------------------------------------


def test_the_transition_table_is_the_one_written_down_here() -> None:
    assert {status: frozenset(moves.values()) for status, moves in TRANSITIONS.items()} == LEGAL
    assert {status for status, targets in LEGAL.items() if not targets} == TERMINAL


def test_every_stop_has_a_move_of_the_table() -> None:
    """From `running`, or from where such a stop is made."""
    for reason, (event, _) in STOPS.items():
        assert any(event in moves for moves in TRANSITIONS.values()), reason


def open_sqlite(request: pytest.FixtureRequest) -> str:
    return f"sqlite:///{request.getfixturevalue('tmp_path') / 'ledger.db'}"


def open_postgres(request: pytest.FixtureRequest) -> str:
    server: EmbeddedPostgres = request.getfixturevalue("postgres")
    server.drop_database("statuses")
    return server.create_database("statuses")


@pytest.fixture(params=[open_sqlite, open_postgres], ids=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of an empty ledger: on either database."""
    url = request.param(request)
    ledger = Ledger(url)
    create_all(ledger.database)
    ledger.close()
    yield url


def a_fleet(url: str) -> Fleet:
    """A fleet with a read, a write and a loop over them."""
    fleet = Fleet(database_url=url)

    @fleet.tool(side_effect="read")
    def lookup(arguments: dict[str, Any], call: ToolCall) -> str:
        return "found"

    @fleet.tool(
        side_effect="idempotent",
        approval="never",
        intent=lambda arguments, run: f"draft:{run.run_id}",
        guarantee="unique-constraint",
        takeover="operations",
    )
    def save(arguments: dict[str, Any], call: ToolCall) -> str:
        return "saved"

    loop = AgentLoop(name="loop", actions=(lookup, save), verify=lambda claim, call: True)
    fleet.workflow(Workflow(name="task", stages=[loop], budget=Budget(steps=5)))
    return fleet


@pytest.mark.accept("STM-10")
def test_an_illegal_move_fails_and_the_stored_status_stays(database: str) -> None:
    """For every pair that is not in the table, by every event that leads there from elsewhere."""
    fleet = a_fleet(database)
    ledger = fleet.ledger
    run_id = fleet.enqueue("task", goal="any")
    assert len(ILLEGAL) > 100
    for before, after in ILLEGAL:
        store(ledger, run_id, before)
        leading = {e for moves in TRANSITIONS.values() for e, to in moves.items() if to is after}
        for event in sorted(leading - TRANSITIONS[before].keys()):
            with pytest.raises(IllegalTransition) as refused:
                ledger.rule(run_id, attempt(event))
            assert (refused.value.status, refused.value.event) == (before, event)
            row = ledger.read(run_id)
            assert (row["status"], row["trace_seq"], row["epoch"]) == (before, 1, 0)
    assert len(ledger.trace(run_id)) == 1
    fleet.close()


def store(ledger: Ledger, run_id: str, status: RunStatus) -> None:
    """Put a run into a status, whatever led there."""
    ledger.database.run(
        "UPDATE handrail_run SET status = :status, traced_status = :status, reason = :reason,"
        " due_at = NULL, wake_at = NULL WHERE id = :id",
        {"id": run_id, "status": status, "reason": "cancelled" if status in TERMINAL else None},
    )


def attempt(event: RunEvent) -> Callable[[Locked], Ruling]:
    """A decision that makes one move."""

    def decide(locked: Locked) -> Ruling:
        events: list[Any] = []
        state = machine.moved(locked.state, event, events)
        return Ruling(state=state, events=tuple(events))

    return decide


@pytest.mark.accept("STM-10")
@pytest.mark.parametrize("before", S)
def test_an_event_that_has_no_move_in_a_status_fails(before: RunStatus) -> None:
    for event in RunEvent:
        if event in TRANSITIONS[before]:
            assert next_status("r", before, event) in LEGAL[before]
        else:
            with pytest.raises(IllegalTransition, match=f"no move for '{event}' in status"):
                next_status("r", before, event)


# ---- trace and state -----------------------------------------------------------------------------


def claimed(fleet: Fleet, run_id: str) -> Claim:
    row = fleet.ledger.read(run_id)
    found = fleet.ledger.claim(
        run_id, row["epoch"], holder="a worker", known=fleet.workflows.keys()
    )
    assert found is not None
    return found


def commit_a_stop(ledger: Ledger, claim: Claim) -> object:
    """End a claimed step as a worker does: here with a failed model call."""
    state = replace(claim.state, status=claim.status)
    turn = machine.stop(state, Reason.MODEL_FAILED, state.view(remaining_ms=1_000))
    ruling = protocol.settle_turn(turn)
    [done] = ledger.commit_each([StepEnd(claim, ruling, claim.phase)])
    if isinstance(done, BaseException):
        raise done
    return done


def rule_a_stop(ledger: Ledger, claim: Claim) -> object:
    """The same under the row's lock, as a dispatch, an outcome or a sweep does."""

    def decide(locked: Locked) -> Ruling:
        turn = machine.stop(locked.state, Reason.MODEL_FAILED, locked.view())
        return protocol.settle_turn(turn)

    return ledger.rule(claim.run_id, decide)


WRITERS: Final[dict[str, Callable[[Ledger, Claim], object]]] = {
    "commit": commit_a_stop,
    "rule": rule_a_stop,
}


def snapshot(ledger: Ledger, run_id: str) -> Any:
    """Everything that is stored of a run: its row and its trace."""
    rows = [
        ledger.database.run(f"SELECT * FROM {table} WHERE {key} = :id", {"id": run_id})
        for table, key in (("handrail_run", "id"), ("handrail_trace", "run_id"))
    ]
    return rows


@pytest.mark.accept("STM-13")
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_state_and_trace_are_written_together(
    write: Callable[[Ledger, Claim], object], database: str
) -> None:
    fleet = a_fleet(database)
    run_id = fleet.enqueue("task", goal="any")
    write(fleet.ledger, claimed(fleet, run_id))

    run, trace = fleet.get(run_id), fleet.trace(run_id)
    assert (run.status, run.reason) == ("failed", "model-failed")
    assert trace[-1]["type"] == "run.stopped"
    fleet.close()


@pytest.mark.accept("STM-13")
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_trace_that_cannot_be_written_leaves_the_state_as_it_was(
    write: Callable[[Ledger, Claim], object], database: str
) -> None:
    """Inside of the one statement too: another row has taken the place of the events."""
    fleet = a_fleet(database)
    ledger = fleet.ledger
    run_id = fleet.enqueue("task", goal="any")
    claim = claimed(fleet, run_id)
    taken = {"run_id": run_id, "seq": claim.trace_seq}
    ledger.database.run(
        "INSERT INTO handrail_trace (run_id, seq, count, writer, at, events)"
        " VALUES (:run_id, :seq, 1, 'somebody else', 1, '[]')",
        taken,
    )
    before = snapshot(ledger, run_id)

    with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
        write(ledger, claim)

    assert snapshot(ledger, run_id) == before
    fleet.close()


@pytest.mark.accept("STM-13")
@pytest.mark.parametrize("place", ["before the trace", "after the trace"])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_process_that_dies_between_trace_and_state_has_written_neither(
    write: Callable[[Ledger, Claim], object], place: str, database: str
) -> None:
    """PostgreSQL's commit is one statement: there the process dies before it or after it."""
    fleet = a_fleet(database)
    run_id = fleet.enqueue("task", goal="any")
    claim = claimed(fleet, run_id)
    before = snapshot(fleet.ledger, run_id)

    one_statement = database.startswith("postgresql") and write is commit_a_stop
    code = in_a_process_that_dies(place, lambda: write(Ledger(database), claim))

    after = snapshot(fleet.ledger, run_id)
    assert code == 9  # it died where it was to die
    if one_statement and place == "after the trace":
        assert fleet.get(run_id).reason == "model-failed"
        assert fleet.trace(run_id)[-1]["type"] == "run.stopped"
    else:
        assert after == before
    fleet.close()


def in_a_process_that_dies(place: str, act: Callable[[], object]) -> int:
    """Run `act` in a forked process that ends at a place, as if it were killed; its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        whole = Database._execute

        def dies(self: Database, connection: Any, sql: str, params: Mapping[str, Any]) -> Any:
            writes_the_trace = "INSERT INTO handrail_trace" in sql
            if writes_the_trace and place == "before the trace":
                os._exit(9)
            found = whole(self, connection, sql, params)
            if writes_the_trace:
                os._exit(9)
            return found

        Database._execute = dies  # type: ignore[method-assign]
        act()
    finally:
        os._exit(1)


# ---- what comes after the end --------------------------------------------------------------------

ENDED: Final[dict[str, list[Any]]] = {  # what is proposed after the write that was agreed to
    "completed": [claim("done")],
    "failed": [ask("refund")],
    "budget_exhausted": [ask("lookup", id=2)],
    "cancelled": [],  # while it waits for consent
    "compensated": [claim("done")],  # stored as such: the way there is another's test
}


@pytest.mark.accept("STM-14")
@pytest.mark.parametrize("status", ENDED)
def test_an_ended_run_stays_as_it_is_whatever_arrives(
    status: str, desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.workflow(desk.read(), desk.write(approval="always"))
    desk.fleet.model("default", Scripted([ask("save", id=1), *ENDED[status]]))
    run_id = desk.fleet.enqueue("task", goal="any", budget={"tool_calls": 1})
    desk.virtual.drive(run_id)
    [asked] = desk.fleet.desk.approvals(by=APPROVER, run=run_id)
    used, late_token = (desk.fleet.desk.issue_token(asked.id, by=APPROVER) for _ in range(2))
    if status == "cancelled":
        desk.fleet.cancel(run_id)
    else:
        desk.fleet.approve(used, by=APPROVER)
    run = desk.virtual.drive(run_id)
    ledger = desk.fleet.ledger
    if status == "compensated":
        store(ledger, run_id, S.COMPENSATED)
        run = desk.fleet.get(run_id)
    assert run.status == status
    before = snapshot(ledger, run_id)
    caplog.set_level(logging.INFO, "handrail")

    epoch = ledger.read(run_id)["epoch"]
    for seen in range(epoch + 2):
        desk.virtual.handle(StepMessage(run_id=run_id, step=run.step, epoch=seen))
    assert desk.fleet.cancel(run_id) == run
    late: list[Callable[[], object]] = [
        lambda: desk.fleet.approve(used, by=APPROVER),
        lambda: desk.fleet.approve(late_token, by=APPROVER),
        lambda: desk.fleet.reject(asked.id, by=APPROVER, reason="no"),
        lambda: desk.fleet.answer(run_id, "yes", by=OPERATOR),
    ]
    for command in late:
        with pytest.raises(ApprovalRefused):
            command()
    desk.virtual.advance(10_000_000)
    desk.virtual.reconciler.sweep()

    assert snapshot(ledger, run_id) == before
    assert desk.virtual.runtime.counts["dropped"] >= epoch + 2
    assert f"run {run_id}: a wish to cancel changed nothing, the run is {status}" in caplog.text
    assert caplog.text.count(f"run {run_id}: a person's decision changed nothing") == len(late)


@pytest.mark.accept("STM-14")
def test_a_late_result_of_an_ended_run_is_kept_as_evidence_beside_it(desk: Desk) -> None:
    desk.workflow(desk.write())
    run = desk.run(ask("save", id=1), claim("done"))
    ledger = desk.fleet.ledger
    [effect] = ledger.effects(run_id=run.run_id)
    before, known = snapshot(ledger, run.run_id), ledger.evidence(effect["id"])
    assert run.status == "completed"
    late = protocol.Outcome(
        effect["id"], effect["token"], End.RETURNED, Succeeded("another", "another")
    )

    ledger.rule(
        run.run_id,
        lambda locked: protocol.outcome(locked, desk.fleet.workflows["task@1"], late),
        effect_id=effect["id"],
    )

    assert snapshot(ledger, run.run_id) == before
    [unchanged] = ledger.effects(run_id=run.run_id)
    assert {**unchanged, "age_ms": None} == {**effect, "age_ms": None}
    assert len(ledger.evidence(effect["id"])) == len(known) + 1


# ---- waiting for approval ------------------------------------------------------------------------


def parked(desk: Desk, **options: Any) -> Run:
    desk.workflow(desk.write(approval="always"))
    run = desk.run(ask("save", id=1), claim("done"), **options)
    assert (run.status, desk.calls) == ("awaiting_approval", [])
    return run


@pytest.mark.accept("STM-15")
def test_an_approved_run_is_executing(desk: Desk) -> None:
    run = parked(desk)
    approved = agree(desk.fleet, run)

    assert approved.status == "executing"
    assert desk.moves(approved)[-1] == ("awaiting_approval", "executing")
    assert desk.virtual.drive(run.run_id).reason == "completed"
    assert desk.calls == ["save", "check"]


def reject(desk: Desk, run: Run) -> object:
    return disagree(desk.fleet, run)


def expire(desk: Desk, run: Run) -> object:
    desk.virtual.advance(24 * 3_600_000)
    return desk.virtual.reconciler.sweep()


def outlive(desk: Desk, run: Run) -> object:
    desk.virtual.advance(60_000)
    return desk.virtual.reconciler.sweep()


def cancel(desk: Desk, run: Run) -> object:
    return desk.fleet.cancel(run)


@pytest.mark.accept("STM-15")
@pytest.mark.parametrize(
    ("act", "options", "status", "reason"),
    [
        (reject, {}, "failed", "approval-rejected"),
        (expire, {}, "failed", "approval-expired"),
        (outlive, {"budget": {"expires_ms": 60_000}}, "budget_exhausted", "expired"),
        (cancel, {}, "cancelled", "cancelled"),
    ],
)
def test_an_approval_that_is_not_given_stops_the_run(
    act: Callable[[Desk, Run], object],
    options: dict[str, Any],
    status: str,
    reason: str,
    desk: Desk,
) -> None:
    run = parked(desk, **options)
    act(desk, run)
    run = desk.fleet.get(run)

    assert (run.status, run.reason) == (status, reason)
    assert desk.moves(run)[-1] == ("awaiting_approval", status)
    assert (desk.calls, run.tool_calls) == ([], 0)
    with pytest.raises(ApprovalRefused):
        agree(desk.fleet, run)


@pytest.mark.accept("STM-15")
def test_no_other_move_leaves_a_wait_for_approval() -> None:
    """But one: that an earlier write of the run may have happened after all comes first."""
    moves = dict(TRANSITIONS[S.AWAITING_APPROVAL])

    assert moves.pop(RunEvent.CONTRARY_EVIDENCE) is S.RECONCILING
    assert moves == {
        RunEvent.APPROVED: S.EXECUTING,
        RunEvent.APPROVAL_REJECTED: S.FAILED,
        RunEvent.APPROVAL_EXPIRED: S.FAILED,
        RunEvent.EXPIRED: S.BUDGET_EXHAUSTED,
        RunEvent.CANCEL_AT_REST: S.CANCELLED,
    }
