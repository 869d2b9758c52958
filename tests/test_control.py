"""Control stays in the program: what a model sees, what it may ask for, and who ends a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from pydantic import BaseModel

from handrail import AgentLoop, Checked, Permit, Principal, RunFacts, ToolCall, Workflow
from handrail.agent.budget import Budget
from handrail.agent.stage import View
from handrail.agent.tools import FOREVER, Tool
from handrail.fleet import InvalidRun, UnknownWorkflow
from handrail.gateway.model import RAW, ModelEvent, ModelRequest, Stop
from handrail.gateway.model import ToolCall as ModelCall
from handrail.runs import Run
from handrail.testing.virtual_fleet import VirtualFleet
from tests.control import ask, claim, details

CANARY = "canary-7f3a"
QUESTION = {"kind": "clarify", "question": "Which account?"}


class Model:
    """A scripted model that keeps what it was shown, whole."""

    def __init__(self, *proposals: Any) -> None:
        self.proposals = list(proposals)
        self.requests: list[ModelRequest] = []

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        self.requests.append(request)
        proposal = self.proposals.pop(0)
        yield ModelCall("1", RAW, proposal() if callable(proposal) else proposal)
        yield Stop("end")


class Desk:
    """A virtual fleet with one loop; its tools and its check count what they were asked."""

    def __init__(self, virtual: VirtualFleet) -> None:
        self.virtual, self.fleet = virtual, virtual.fleet
        self.calls: list[Any] = []
        self.claims: list[Any] = []
        self.verdict: Any = True
        self.answers: Callable[[dict[str, Any]], Any] = lambda arguments: "found"

    def read(self, name: str = "lookup", **contract: Any) -> Tool:
        @self.fleet.tool(name, side_effect="read", **contract)
        async def execute(arguments: Any, call: ToolCall) -> Any:
            plain = arguments.model_dump() if isinstance(arguments, BaseModel) else arguments
            self.calls.append((name, plain))
            return self.answers(plain)

        return execute

    def write(self, name: str = "save", **contract: Any) -> Tool:
        @self.fleet.tool(
            name,
            side_effect="idempotent",
            approval="never",
            intent=lambda arguments, run: f"draft:{arguments['id']}",
            guarantee="idempotency-key",
            key_valid_for_ms=FOREVER,
            takeover="operations",
            **contract,
        )
        async def execute(arguments: dict[str, Any], call: ToolCall) -> Any:
            self.calls.append((name, arguments))
            return self.answers(arguments)

        return execute

    async def check(self, claim: Any, call: ToolCall) -> Any:
        self.claims.append(claim)
        return self.verdict

    def workflow(self, *tools: Tool, name: str = "task", **more: Any) -> None:
        allowed = more.pop("allowed", None)
        loop = AgentLoop(name="loop", actions=tools, verify=self.check, allowed=allowed)
        self.fleet.workflow(Workflow(name=name, stages=[loop], **more))

    def run(self, *proposals: Any, workflow: str = "task", **options: Any) -> Run:
        self.model = Model(*proposals)
        self.fleet.model("default", self.model)
        return self.virtual.run(workflow, goal="any", **options)

    def trace(self, run: Run) -> list[dict[str, Any]]:
        return self.fleet.trace(run)


@pytest.fixture
def desk() -> Iterator[Desk]:
    with VirtualFleet() as virtual:
        yield Desk(virtual)


def rejections(trace: list[dict[str, Any]]) -> list[str]:
    return [detail["stable_reason_code"] for detail in details(trace, "proposal.rejected")]


# ---- before the first round ----------------------------------------------------------------------


@pytest.mark.accept("CTL-01")
def test_a_goal_of_an_unregistered_kind_is_refused_before_any_model_call(desk: Desk) -> None:
    class Question(BaseModel):
        order_id: int

    desk.workflow(desk.read(), name="refund", input=Question)
    model = Model(claim("done"))
    desk.fleet.model("default", model)

    with pytest.raises(UnknownWorkflow) as refused:
        desk.fleet.enqueue("transfer", goal="move money")
    assert refused.value.code == "unknown-workflow"
    with pytest.raises(InvalidRun):
        desk.fleet.enqueue("refund", goal="refund me", input={"account": 7})
    with pytest.raises(InvalidRun):
        desk.fleet.enqueue("refund", goal="   ", input={"order_id": 7})

    assert desk.fleet.runs() == []
    assert model.requests == []


@pytest.mark.accept("CTL-11")
def test_what_a_run_may_do_is_declared_in_its_record_before_its_first_round(desk: Desk) -> None:
    desk.workflow(desk.read(), desk.write(), budget=Budget(steps=3, model_calls=4, tool_calls=2))

    run_id = desk.fleet.enqueue("task", goal="find it", principal="alice", budget={"steps": 2})

    run = desk.fleet.get(run_id)
    [accepted] = desk.trace(run)
    detail = accepted["detail"]
    assert (run.status, run.goal, run.version, run.step) == ("queued", "find it", 0, 0)
    assert detail["declared"]["actions"] == ["lookup", "save"]
    assert detail["declared"]["success"] == ["loop"]
    assert detail["declared"]["stages"] == ["loop"]
    assert detail["subject"] == "alice"
    assert {name: detail["budget"][name] for name in ("steps", "model_calls", "tool_calls")} == {
        "steps": 2, "model_calls": 4, "tool_calls": 2,
    }  # fmt: skip
    assert None not in detail["budget"].values()  # every dimension has its limit
    assert run.budget_left["steps"] == 2


# ---- what the model is shown ---------------------------------------------------------------------

#: All that a model is ever shown of a run. A new field is a decision, not an accident.
PUBLIC = {
    "goal", "input", "facts", "observations", "tools", "budget_left", "state_version",
    "remaining_ms", "observation_count",
}  # fmt: skip


@pytest.mark.accept("CTL-02")
def test_an_observation_has_the_fields_of_the_public_list_and_no_others(desk: Desk) -> None:
    desk.workflow(desk.read())
    desk.run(ask("lookup"), claim("done"))

    # The trace is for the adapter's own request; the model is not shown it.
    assert {field.name for field in fields(ModelRequest)} - {"traceparent"} == PUBLIC
    shown = desk.model.requests[1].to_json()
    assert set(shown) == {
        "goal", "input", "facts", "observations", "allowed_tools", "budget_left", "state_version",
        "remaining_ms",
    }  # fmt: skip
    assert shown["observations"] == [{"tool": "lookup", "text": "found"}]


@pytest.mark.accept("CTL-02")
def test_nothing_private_reaches_the_model(desk: Desk) -> None:
    """The canary stands in every place that is not public: one by one they are looked for."""
    credential = f"{CANARY}-credential"
    principal = Principal(f"{CANARY}-subject", frozenset({f"{CANARY}-permission"}))

    @desk.fleet.tool(side_effect="read")
    async def lookup(arguments: dict[str, Any], call: ToolCall) -> str:
        assert credential and call.principal is not None
        return "found" if arguments["who"] == "me" else f"{CANARY}-of-another-user"

    @desk.fleet.tool(
        side_effect="idempotent",
        approval="never",
        intent=lambda arguments, run: f"{CANARY}-intent",
        guarantee="unique-constraint",
        takeover="operations",
    )
    async def save(arguments: dict[str, Any], call: ToolCall) -> str:
        return "saved"

    desk.workflow(lookup, save)
    private: dict[str, Any] = {
        "principal": principal,
        "tenant": f"{CANARY}-tenant",
        "dedupe_key": f"{CANARY}-dedupe",
    }
    other = desk.run(ask("lookup", who="other"), claim(f"{CANARY}-answer"), **private)
    private["dedupe_key"] = f"{CANARY}-second"
    run = desk.run(
        ask("lookup", who="me"), ask("save"), claim("done"), run_id=f"{CANARY}-run", **private
    )

    assert (other.reason, run.reason) == ("completed", "completed")
    assert len(desk.model.requests) == 3
    for request in desk.model.requests:
        assert CANARY not in repr(request)
        assert CANARY not in json.dumps(request.to_json())
    assert "saved" in repr(desk.model.requests[2])  # what is public is there


@pytest.mark.accept("CTL-05")
def test_only_the_executor_holds_the_credential(desk: Desk) -> None:
    """Not even where a tool's error speaks of it, and nowhere in the ledger."""
    used = []

    @desk.fleet.tool(side_effect="read")
    async def lookup(arguments: dict[str, Any], call: ToolCall) -> str:
        used.append(CANARY)
        return "found"

    @desk.fleet.tool("broken", side_effect="read")
    async def broken(arguments: dict[str, Any], call: ToolCall) -> str:
        used.append(CANARY)
        raise RuntimeError(f"401 Unauthorized: Bearer {CANARY}")

    desk.workflow(lookup, broken)
    proposals = [ask("lookup", q=1), ask("broken", q=1)]
    run = desk.run(*proposals)

    assert used == [CANARY, CANARY]
    assert run.reason == "tool-failed"
    assert CANARY not in repr(desk.model.requests)
    assert CANARY not in json.dumps(proposals)
    assert CANARY not in json.dumps(desk.trace(run))
    assert CANARY not in stored(desk)


def stored(desk: Desk) -> str:
    """Everything that the ledger holds, as text."""
    database = desk.fleet.ledger.database
    tables = database.run("SELECT name FROM sqlite_master WHERE type = 'table'", {})
    return repr([database.run(f"SELECT * FROM {table['name']}", {}) for table in tables])


# ---- what it may ask for -------------------------------------------------------------------------


@pytest.mark.accept("CTL-03")
def test_an_action_of_another_round_is_rejected_in_this_one(desk: Desk) -> None:
    def allowed(view: View) -> list[str]:
        return ["lookup"] if view.observation_count == 0 else ["save"]

    desk.workflow(desk.read(), desk.write(), allowed=allowed)
    run = desk.run(ask("lookup", id=1), ask("lookup", id=2))

    assert [list(r.to_json()["allowed_tools"]) for r in desk.model.requests] == [
        ["lookup"],
        ["save"],
    ]
    assert (run.status, run.reason) == ("failed", "invalid-proposal")
    assert desk.calls == [("lookup", {"id": 1})]
    assert rejections(desk.trace(run)) == ["invalid-proposal"]


@pytest.mark.accept("CTL-03")
def test_an_action_of_another_kind_of_run_is_rejected(desk: Desk) -> None:
    desk.workflow(desk.read(), name="question")
    desk.workflow(desk.write(), name="change")
    run = desk.run(ask("save", id=1), workflow="question")

    assert (run.status, run.reason) == ("failed", "invalid-proposal")
    assert desk.calls == []
    assert rejections(desk.trace(run)) == ["invalid-proposal"]


class Numbered(BaseModel):
    id: int


@pytest.mark.accept("CTL-04")
def test_parameters_can_forbid_a_proposal(desk: Desk) -> None:
    desk.workflow(desk.read(input=Numbered))
    run = desk.run(ask("lookup", id="7"))

    assert rejections(desk.trace(run)) == ["invalid-proposal"]
    assert (run.reason, desk.calls, run.tool_calls) == ("invalid-proposal", [], 0)


@pytest.mark.accept("CTL-04")
def test_permission_can_forbid_a_proposal(desk: Desk) -> None:
    desk.workflow(desk.read(permission="orders:read"))
    run = desk.run(ask("lookup", id=7), principal=Principal("bob", frozenset({"mail:read"})))

    assert rejections(desk.trace(run)) == ["permission-denied"]
    assert (run.reason, desk.calls, run.tool_calls) == ("permission-denied", [], 0)


@pytest.mark.accept("CTL-04")
def test_a_policy_that_raises_forbids_a_proposal(desk: Desk) -> None:
    def broken(arguments: Any, run: RunFacts) -> Permit:
        raise LookupError

    desk.workflow(desk.read(allow=broken))
    run = desk.run(ask("lookup", id=7))

    assert rejections(desk.trace(run)) == ["permission-denied"]
    assert desk.calls == []


@pytest.mark.accept("CTL-04")
def test_the_budget_can_forbid_a_proposal(desk: Desk) -> None:
    desk.workflow(desk.read())
    run = desk.run(ask("lookup", id=1), ask("lookup", id=2), budget={"tool_calls": 1})

    assert rejections(desk.trace(run)) == ["tool-call-budget-exhausted"]
    assert run.reason == "tool-call-budget-exhausted"
    assert desk.calls == [("lookup", {"id": 1})]
    assert run.tool_calls == 1


@pytest.mark.accept("CTL-04")
def test_the_current_state_can_forbid_a_proposal(desk: Desk) -> None:
    """What was asked in this state already is not asked again; in a later state it may be."""
    desk.workflow(desk.read())
    run = desk.run(*[ask("lookup", id=1)] * 3)

    assert rejections(desk.trace(run)) == ["repeated-proposal"]
    assert run.reason == "repeated-proposal"
    assert desk.calls == [("lookup", {"id": 1})] * 2


# ---- the proposal to look up an order, check by check --------------------------------------------


class OrderQuery(BaseModel):
    orderHint: str  # the name that models are given


PROPOSAL = ask("lookup_order", orderHint="the blue one")
ALICE = Principal("alice", frozenset({"orders:read"}))


def order_desk(desk: Desk) -> Desk:
    """A tool that finds an order of the user on whose behalf the run acts."""

    def of_own_shop(arguments: OrderQuery, run: RunFacts) -> Permit:
        return Permit.ALLOW if run.input == {"shop": run.principal.subject} else Permit.DENY

    tool = desk.read(
        "lookup_order",
        input=OrderQuery,
        permission="orders:read",
        allow=of_own_shop,
        belongs_to=lambda order, run: order["owner"] == run.principal.subject,
    )
    desk.workflow(tool, budget=Budget(deadline_ms=1_000))
    desk.workflow(desk.read("lookup_invoice"), name="billing")
    desk.answers = lambda arguments: {"owner": "alice", "order": 42}
    return desk


@pytest.mark.accept("CTL-09")
def test_with_all_checks_passed_the_order_is_looked_up(desk: Desk) -> None:
    run = order_desk(desk).run(PROPOSAL, claim("42"), principal=ALICE, input={"shop": "alice"})

    assert run.reason == "completed"
    assert desk.calls == [("lookup_order", {"orderHint": "the blue one"})]
    assert run.observations == ('{"order":42,"owner":"alice"}',)


@pytest.mark.accept("CTL-09")
@pytest.mark.parametrize(
    ("options", "proposal", "reason"),
    [
        ({"workflow": "billing"}, PROPOSAL, "invalid-proposal"),  # this run may not look up orders
        ({"principal": Principal("alice")}, PROPOSAL, "permission-denied"),  # nor this user
        ({"input": {"shop": "bob"}}, PROPOSAL, "permission-denied"),  # out of the user's range
        ({}, ask("lookup_order", orderHint=42), "invalid-proposal"),  # it does not parse
    ],
)
def test_one_failing_check_keeps_the_order_from_being_looked_up(
    options: dict[str, Any], proposal: Any, reason: str, desk: Desk
) -> None:
    order_desk(desk)
    usual: dict[str, Any] = {"principal": ALICE, "input": {"shop": "alice"}}
    run = desk.run(proposal, **(usual | options))

    assert run.reason == reason
    assert desk.calls == []
    assert rejections(desk.trace(run)) == [reason]


@pytest.mark.accept("CTL-09")
def test_a_call_that_does_not_fit_before_the_deadline_is_not_made(desk: Desk) -> None:
    def late() -> Any:
        desk.virtual.advance(1_000)
        return PROPOSAL

    run = order_desk(desk).run(late, principal=ALICE, input={"shop": "alice"})

    assert run.reason == "deadline-exhausted"
    assert desk.calls == []
    assert rejections(desk.trace(run)) == ["deadline-exhausted"]


@pytest.mark.accept("CTL-09")
def test_an_order_of_another_user_is_discarded_as_a_violation(desk: Desk) -> None:
    order_desk(desk)
    desk.answers = lambda arguments: {"owner": "bob", "order": CANARY}
    run = desk.run(PROPOSAL, principal=ALICE, input={"shop": "alice"})

    assert len(desk.calls) == 1
    assert (run.reason, run.observations, run.version) == ("tool-failed", (), 0)
    assert details(desk.trace(run), "run.stopped")[0]["code"] == "result-of-another-subject"
    assert CANARY not in json.dumps(desk.trace(run))


# ---- what enters the state -----------------------------------------------------------------------


class Order(BaseModel):
    id: int
    cents: int


@pytest.mark.accept("CTL-06")
@pytest.mark.parametrize(
    "told",
    [
        {"id": 1},  # a field is missing
        {"id": 1, "cents": "7"},  # a text for a number
        "free text",
        {"id": 1, "cents": float("nan")},
        object(),
        {"id": 1, "cents": -1},  # the postcondition does not hold
    ],
)
@pytest.mark.parametrize("writes", [False, True])
def test_a_result_outside_of_its_contract_does_not_enter_the_state(
    told: Any, writes: bool, desk: Desk
) -> None:
    """Of a read it is a failure; of a write, which may have happened all the same, a doubt."""
    contract: dict[str, Any] = {
        "output": Order,
        "postcondition": lambda arguments, order: order["cents"] >= 0,
    }
    tool = desk.write("order", **contract) if writes else desk.read("order", **contract)
    desk.workflow(tool)
    desk.answers = lambda arguments: told
    run = desk.run(ask("order", id=1), claim("done"))

    assert len(desk.calls) == 1
    assert run.reason == ("unknown-effect" if writes else "tool-failed")
    assert (run.observations, run.version) == ((), 0)
    assert details(desk.trace(run), "result.verified") == []
    assert len(desk.model.requests) == 1


@pytest.mark.accept("CTL-06")
@pytest.mark.parametrize("writes", [False, True])
def test_a_result_within_its_contract_enters_the_state(writes: bool, desk: Desk) -> None:
    contract: dict[str, Any] = {
        "output": Order,
        "postcondition": lambda arguments, order: order["cents"] >= 0,
    }
    desk.workflow(desk.write("order", **contract) if writes else desk.read("order", **contract))
    desk.answers = lambda arguments: {"id": 1, "cents": 5}
    run = desk.run(ask("order", id=1), claim("done"))

    assert run.observations == ('{"cents":5,"id":1}',)


@pytest.mark.accept("CTL-07")
def test_only_verified_results_are_the_input_of_the_next_round(desk: Desk) -> None:
    desk.workflow(desk.read())
    desk.verdict = False
    desk.answers = lambda arguments: f"the order is {arguments['status']}"
    said = f"{CANARY}: the order is paid and the refund confirmed"
    run = desk.run(
        claim(said),  # not verified
        ask("lookup", status="open", note=said),  # a verified result
        claim(said),
        ask("Lookup", note=said),
    )

    assert desk.claims == [said, said]
    assert CANARY not in repr(desk.model.requests)
    assert [len(request.observations) for request in desk.model.requests] == [0, 0, 1, 1]
    assert [request.state_version for request in desk.model.requests] == [0, 0, 1, 1]
    assert run.observations == ("the order is open",)
    assert run.version == 1
    assert CANARY not in json.dumps(run.state)


# ---- who ends a run ------------------------------------------------------------------------------


def loud(desk: Desk, proposal: Any, setting: dict[str, Any]) -> Callable[[], Any]:
    """What a model says that wants to have the last word; it may be cut off while it speaks."""

    def say() -> Any:
        if setting.get("cancels"):
            desk.virtual.cancel(desk.fleet.runs()[0].run_id)
        desk.virtual.advance(setting.get("advances", 0))
        return proposal

    return say


@pytest.mark.accept("CTL-08")
@pytest.mark.parametrize(
    ("status", "reason", "setting"),
    [
        ("completed", "completed", {}),
        ("failed", "verification-failed", {"verdict": RuntimeError("the check is broken")}),
        ("cancelled", "cancelled", {"cancels": True}),
        ("budget_exhausted", "deadline-exhausted", {"advances": 200_000}),
        ("budget_exhausted", "step-budget-exhausted", {"verdict": False, "steps": 1}),
        ("awaiting_input", "clarification-required", {"proposal": QUESTION}),
    ],
)
@pytest.mark.parametrize(
    "wants", ["completed", "failed", "cancelled", "budget_exhausted", "approved"]
)
def test_every_end_is_entered_by_the_program_whatever_the_model_says(
    status: str, reason: str, setting: dict[str, Any], wants: str, desk: Desk
) -> None:
    async def check(claim: Any, call: ToolCall) -> Any:
        verdict = setting.get("verdict", True)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    loop = AgentLoop(name="loop", actions=(desk.read(),), verify=check)
    desk.fleet.workflow(Workflow(name="task", stages=[loop]))
    proposal = setting.get("proposal", claim(f'{{"status": "{wants}", "reason": "{wants}"}}'))
    run = desk.run(loud(desk, proposal, setting), budget={"steps": setting.get("steps", 16)})

    assert (run.status, run.reason) == (status, reason)
    assert details(desk.trace(run), "run.stopped")[0]["reason"] == reason


@pytest.mark.accept("CTL-08")
@pytest.mark.parametrize(
    "raw",
    [
        {"kind": "completed", "answer": "done"},
        {"kind": "complete", "answer": "done", "reason": "completed"},
        {"kind": "complete", "answer": "done", "verified": True},
        {"kind": "stop", "reason": "cancelled"},
        {"kind": "cancelled"},
        {"kind": "run.stopped", "reason": "completed"},
        {"status": "completed"},
    ],
)
def test_no_output_of_a_model_is_a_stop_of_its_own(raw: Any, desk: Desk) -> None:
    desk.workflow(desk.read())
    run = desk.run(raw)

    assert (run.status, run.reason) == ("failed", "invalid-proposal")
    assert desk.claims == []


@pytest.mark.accept("CTL-10")
@pytest.mark.parametrize(
    ("proposal", "verdict", "end"),
    [
        (claim("done"), True, "complete"),
        (claim("done"), False, "continue"),
        (ask("lookup", id=1), True, "continue"),
        (ask("Lookup", id=1), True, "stop"),  # refused
        (ask("lookup", id="cancel"), True, "stop"),  # cancelled
        (QUESTION, True, "stop"),  # handed over
    ],
)
def test_a_round_ends_in_exactly_one_of_three_ways(
    proposal: Any, verdict: bool, end: str, desk: Desk
) -> None:
    def answers(arguments: Any) -> str:
        if arguments["id"] == "cancel":
            desk.virtual.cancel(desk.fleet.runs()[0].run_id)
        return "found"

    desk.workflow(desk.read())
    desk.answers = answers
    desk.verdict = Checked(verdict, {"looked_at": "the record"}, evidence="record:7")
    desk.fleet.model("default", Model(proposal))
    run_id = desk.fleet.enqueue("task", goal="any")

    desk.virtual.step(run_id)

    run, trace = desk.fleet.get(run_id), desk.fleet.trace(run_id)
    stops = details(trace, "run.stopped")
    ends: dict[str, list[Any]] = {
        "complete": [s for s in stops if s["category"] == "completion"],
        "continue": [] if stops else ["the next round is due"],
        "stop": [s for s in stops if s["category"] != "completion"],
    }
    assert {name: len(found) for name, found in ends.items()} == {
        name: int(name == end) for name in ends
    }
    assert run.budget_used["model_calls"] == run.budget_used["steps"] == 1
    if end == "complete":
        assert run.answer == "done"
        assert details(trace, "completion.verified")[0]["evidence_ref"] == "record:7"
        assert details(trace, "completion.verified")[0]["verified"] is True
    elif end == "continue":
        assert (run.status, run.reason, run.step) == ("running", None, 1)
        assert run.version == run.budget_used["tool_calls"] == int(proposal["kind"] == "tool")
    else:
        assert run.reason in ("invalid-proposal", "cancelled", "clarification-required")
        assert run.answer is None
        if proposal is QUESTION:
            assert stops[0]["question"] == "Which account?"


# ---- the only chance -----------------------------------------------------------------------------

OWN_TO_A_RUN = {"run_id", "at", "tool_call_id", "evidence_ref"}


def without_identities(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_identities(v) for k, v in value.items() if k not in OWN_TO_A_RUN}
    return [without_identities(item) for item in value] if isinstance(value, list) else value


@pytest.mark.accept("CTL-12")
@pytest.mark.parametrize(
    "candidates",
    [
        [ask("lookup", q=1), ask("save", id=1), claim("wrong"), claim("done")],
        [ask("lookup", q=1), ask("lookup", q=1), ask("lookup", q=1)],
        [ask("lookup", q=1), ask("refund", id=1)],
        [ask("lookup", q=1), QUESTION],
        [ask("save", id="late")],
    ],
)
def test_the_same_candidates_in_the_same_state_come_to_the_same(candidates: list[Any]) -> None:
    def once() -> Any:
        with VirtualFleet() as virtual:
            desk = Desk(virtual)

            @virtual.fleet.tool(
                side_effect="idempotent",
                approval="never",
                intent=lambda arguments, run: f"draft:{arguments['id']}",
                guarantee="unique-constraint",
                takeover="operations",
            )
            async def save(arguments: dict[str, Any], call: ToolCall) -> str:
                desk.calls.append((call.tool, arguments, call.timeout_ms, call.key))
                await asyncio.sleep(60 if arguments["id"] == "late" else 0.02)
                return "saved"

            async def check(claim: Any, call: ToolCall) -> bool:
                desk.claims.append(claim)
                return bool(claim == "done")

            loop = AgentLoop(name="loop", actions=(desk.read(), save), verify=check)
            virtual.fleet.workflow(Workflow(name="task", stages=[loop]))
            run = desk.run(*candidates)
            return (
                without_identities(desk.trace(run)),
                {**run.state, "runId": None},
                (run.status, run.reason, run.answer, dict(run.budget_left)),
                desk.calls,
                desk.claims,
                [request.to_json() for request in desk.model.requests],
                virtual.loop.now_ms,
            )

    assert once() == once()
