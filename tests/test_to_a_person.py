"""When a run goes to a person, and the way of a write before and after: read, plan, validate,
confirm, commit, verify.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import pytest
from pydantic import BaseModel, ValidationError

from handrail.agent.fixed import Done, HandOff, Judgement, Proceed
from handrail.agent.handoffs import NEEDED, IncompleteHandoff, must_be_complete
from handrail.agent.loop import AgentLoop
from handrail.agent.protocol import Locked, Ruling
from handrail.agent.stage import Action, Checked, Stage
from handrail.agent.tools import RunFacts, Tool
from handrail.agent.workflow import Check, Commit, Confirm, Read, Verify, Workflow
from handrail.desk import Handoff
from handrail.errors import InvalidDefinition
from handrail.ledger.session import ConnectionLost
from handrail.runs import Run
from handrail.tasks.calls import ToolCall
from handrail.testing.people import ADMIN, APPROVER, OPERATOR, agree
from tests.world import LEASE_MS, SECOND, SETTLED_MS, Outside, World, look, open_world, save

MINUTE: Final = 60 * SECOND


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world on SQLite, for what no database can make different."""
    with open_world(request) as opened:
        yield opened


def answers(world: World, name: str, answer: Any) -> Read:
    """A read, made by the program, that is answered like this."""
    tool = world.fleet.tool(name, side_effect="read")(lambda arguments, call: answer)
    return Read(name, tool, lambda run: {})


def judged_by(world: World, judge: Callable[[RunFacts], Judgement], *stages: Stage) -> Run:
    """A run that reads, and pays only what the judge lets pass."""
    pay = world.write_tool(approval="always")

    def action(run: RunFacts) -> Action:
        return Action(pay, {"id": 1})

    judged = Check("judge", judge)
    world.workflow(
        stages=[*stages, judged, Confirm("confirm", action), Commit("commit", action, pay)]
    )
    return world.drive(world.start())


def with_a_person(world: World, run: Run, reason: str) -> Handoff:
    """What the operators' queue holds of a run that has paid nothing."""
    (row,) = world.fleet.desk.handoffs(by=OPERATOR, run=run)
    shown = world.fleet.desk.handoff(row["id"], by=OPERATOR)
    assert (run.status, run.reason, row["reason"]) == ("handed_off", reason, reason)
    assert shown.package["goal"] == run.goal and shown.package["trace"] == f"trace:{run.run_id}"
    assert shown.choices and world.service.performed == []
    assert world.rows("SELECT id FROM handrail_approval") == [] or reason == "unknown-effect"
    return shown


def given_up(world: World, shown: Handoff, **options: Any) -> None:
    """A person ends it, and is on record with it."""
    desk = world.fleet.desk
    run = desk.resolve(shown.id, "failed", by=OPERATOR, reason="looked at it", **options)
    assert run.status == "failed" and desk.handoffs(by=OPERATOR) == []
    assert [entry["actor"] for entry in desk.audit(by=ADMIN, act="resolve")] == ["operator"]


# ---- four ways to a person -----------------------------------------------------------------------


@pytest.mark.accept("TRM-14")
def test_what_is_too_risky_for_the_workflow_is_a_persons(world: World) -> None:
    """Above its limit nobody is asked for a mere yes: somebody has to look at the case."""

    def judge(run: RunFacts) -> Judgement:
        price: Any = run.outputs["price"]
        return HandOff({"cents": price, "limit": 50_000}) if price > 50_000 else Proceed()

    run = judged_by(world, judge, answers(world, "price", 99_900))
    shown = with_a_person(world, run, "handoff-required")

    (stop,) = world.trace(run.run_id, "run.stopped")
    assert (stop["detail"]["cents"], stop["detail"]["limit"]) == (99_900, 50_000)
    assert shown.package["verified"]["outputs"]["price"] == 99_900
    given_up(world, shown)


@pytest.mark.accept("TRM-14")
def test_no_model_gets_hold_of_an_irreversible_write(small: World) -> None:
    """High risk never waits in an open loop: only in a fixed commit, behind a confirmation."""
    tool = small.write_tool(side_effect="irreversible", approval="on-write")
    with pytest.raises(InvalidDefinition, match="irreversible"):
        AgentLoop(name="loop", actions=(tool,), verify=lambda claim, call: True)
    with pytest.raises(InvalidDefinition, match="needs approval"):
        Workflow(name="w", stages=[Commit("commit", lambda run: Action(tool), tool)])


@pytest.mark.accept("TRM-14")
def test_evidence_that_contradicts_itself_goes_to_a_person_with_both_sides(world: World) -> None:
    def judge(run: RunFacts) -> Judgement:
        bank, shop = run.outputs["bank"], run.outputs["shop"]
        return Proceed() if bank == shop else HandOff({"conflict": {"bank": bank, "shop": shop}})

    reads = answers(world, "bank", "paid twice"), answers(world, "shop", "paid once")
    run = judged_by(world, judge, *reads)
    shown = with_a_person(world, run, "handoff-required")

    assert shown.package["verified"]["outputs"] == {"bank": "paid twice", "shop": "paid once"}
    given_up(world, shown)


@pytest.mark.accept("TRM-14")
def test_a_write_of_which_nobody_knows_goes_to_a_person(world: World) -> None:
    tool = world.write_tool(query=False, key_valid_for_ms=0, guarantee="transaction")
    world.workflow(tool, plan=[save(id=1)])
    world.service.script = ["dropped"]
    run = world.drive(world.start())
    shown = with_a_person(world, run, "unknown-effect")

    assert shown.package["effect"]["status"] == "handed_off"
    assert shown.package["pending_action"]["arguments"] == {"id": 1}
    world.advance(SETTLED_MS)
    given_up(world, shown, evidence="the bank has no record")


@pytest.mark.accept("TRM-14")
def test_what_could_not_be_told_apart_with_confidence_goes_to_a_person(world: World) -> None:
    """No stage routes by itself yet: a classifier that is read, and a check of how sure it was,
    stand for one. The threshold is the program's.
    """

    def judge(run: RunFacts) -> Judgement:
        found: Any = run.outputs["classify"]
        return Proceed(found["label"]) if found["percent"] >= 80 else HandOff({"route": found})

    unsure = {"label": "refund", "percent": 41}
    run = judged_by(world, judge, answers(world, "classify", unsure))
    shown = with_a_person(world, run, "handoff-required")

    assert shown.package["verified"]["outputs"]["classify"] == unsure
    given_up(world, shown)


@pytest.mark.accept("TRM-15")
@pytest.mark.parametrize("lacking", NEEDED)
def test_a_package_that_lacks_anything_is_refused(lacking: str) -> None:
    whole: dict[str, Any] = {
        "goal": "refund order 7",
        "reason": "unknown-effect",
        "verified": {"outputs": "none", "observations": "none"},
        "pending_action": "none",
        "budget_left": {"steps": 0},
        "trace": "trace:run-1",
    }
    must_be_complete("run-1", whole)
    without: list[dict[str, Any]] = [{}, {lacking: None}, {lacking: ""}, {lacking: {}}]
    for empty in without:
        package = {name: value for name, value in whole.items() if name != lacking} | empty
        with pytest.raises(IncompleteHandoff, match=lacking):
            must_be_complete("run-1", package)


@pytest.mark.accept("TRM-15")
def test_that_the_agent_failed_is_no_handoff_and_nothing_of_it_is_written(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(of=1)])
    run = world.start()
    before = world.row(run)

    def fails(locked: Locked) -> Ruling:
        package: dict[str, Any] = {"reason": "handoff-required", "problem": "the agent failed"}
        return Ruling(state=locked.state, handoff=package)

    with pytest.raises(IncompleteHandoff) as refused:
        world.rule(run, fails)
    assert refused.value.code == "incomplete-handoff" and "goal" in refused.value.lacking
    assert world.row(run) == before and world.fleet.desk.handoffs(by=OPERATOR) == []


# ---- read ----------------------------------------------------------------------------------------


@pytest.mark.accept("RPW-02")
def test_a_write_that_is_proposed_while_reading_is_rejected(world: World) -> None:
    """The workflow has that tool, at its end; the stage that reads does not."""
    write = world.write_tool()

    def action(run: RunFacts) -> Action:
        return Action(write, {"id": 1})

    reading = AgentLoop(
        name="read", actions=(world.read_tool(),), model="draft", verify=lambda claim, call: True
    )
    world.workflow(stages=[reading, Commit("commit", action, write)], plan=[look(of=1), save(id=1)])
    run = world.drive(world.start())
    (rejected,) = world.trace(run.run_id, "proposal.rejected")

    assert (run.status, run.reason) == ("failed", "invalid-proposal")
    assert rejected["detail"]["problem"] == "unknown tool"
    assert world.service.performed == [] and run.tool_calls == 1
    with pytest.raises(InvalidDefinition, match="writes"):
        Read("read", write, lambda run: {"id": 1})


# ---- plan ----------------------------------------------------------------------------------------


class Plan(BaseModel):
    """What is to be done: to what, with which parameters, and what will be different then."""

    resource: str
    amount_cents: int
    expected_change: dict[str, str]


PLAN: Final[dict[str, Any]] = {
    "resource": "order:7",
    "amount_cents": 4_200,
    "expected_change": {"order:7": "refunded"},
}


def is_a_plan(claim: Any, call: ToolCall) -> Checked:
    try:
        Plan.model_validate(claim, strict=True, extra="forbid")
    except ValidationError as error:
        return Checked(False, {"problem": error.errors()[0]["type"]})
    return Checked(True)


@pytest.mark.accept("RPW-03")
@pytest.mark.parametrize(
    "claim",
    [
        "refund order 7, please",
        *({name: PLAN[name] for name in PLAN if name != left_out} for left_out in PLAN),
        {**PLAN, "approved": True},
        {**PLAN, "amount_cents": "all of it"},
        {**PLAN, "expected_change": "it is refunded"},
    ],
    ids=["free text", "no resource", "no parameter", "no change", "more", "a text", "in words"],
)
def test_only_a_structured_plan_ends_the_planning(world: World, claim: Any) -> None:
    said = [claim, PLAN]

    def planning(seen: Any) -> Any:
        return {"kind": "complete", "answer": said.pop(0)}

    loop = AgentLoop(name="plan", actions=(world.read_tool(),), model="draft", verify=is_a_plan)
    world.workflow(stages=[loop, Check("after", lambda run: Proceed())], plan=[planning] * 2)
    run = world.start()
    world.step(run)
    assert "plan" not in world.fleet.get(run).outputs and world.fleet.get(run).status == "running"
    found = world.drive(run)

    assert found.outputs["plan"] == PLAN
    verdicts = [event["detail"]["verified"] for event in world.trace(run, "completion.verified")]
    assert verdicts == [False, True]


# ---- confirm -------------------------------------------------------------------------------------


def paying(world: World, *, records: list[int] | None = None, **contract: Any) -> tuple[str, Tool]:
    """A run that waits for consent to pay; whether it was paid is looked up afterwards."""
    pay = world.write_tool(approval="always", **contract)

    def action(run: RunFacts) -> Action:
        return Action(pay, {"id": 1, "to": "ann", "cents": 4_200})

    def is_paid(claim: Any, call: ToolCall) -> Checked:
        found = len(world.service.records) if records is None else len(records)
        return Checked(found == 1, {"payments": found}, f"ledger:{found}")

    stages = [
        Confirm("confirm", action),
        Commit("commit", action, pay),
        Verify("verify", is_paid),
        Check("tell", lambda run: Done("paid")),
    ]
    world.workflow(stages=stages)
    run = world.start(principal="customer")
    world.step(run)
    return run, pay


@pytest.mark.accept("RPW-05")
def test_who_is_asked_sees_the_exact_action_with_every_parameter(world: World) -> None:
    run, tool = paying(world)
    (asked,) = world.fleet.desk.approvals(by=APPROVER, run=run)
    shown: Any = asked.shown

    assert shown["tool"] == "save" and shown["intent_key"] == "save:1"
    assert shown["arguments"] == {"id": 1, "to": "ann", "cents": 4_200}
    assert shown["subject"] == "customer" and shown["run"] == run
    assert shown["contract_version"] == tool.contract.version
    assert shown["expires_at"] > world.clock.ms
    agree(world.fleet, run)
    world.drive(run)
    sent = world.effect("save:1")
    assert sent["arguments_hash"] == asked.arguments_hash


@pytest.mark.accept("APR-02")
@pytest.mark.parametrize("executed", [False, True], ids=["before", "after"])
def test_a_request_and_the_status_that_waits_for_it_are_written_together_or_not_at_all(
    world: World, executed: bool
) -> None:
    """The connection breaks at every statement of the step in turn."""
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    seen = set()
    for number in range(1, 40):
        run = world.start()
        world.database.lose(number, executed=executed)
        with suppress(ConnectionLost):
            world.step(run)
        broken, world.database._lose_in = world.database.lost, None
        status = world.row(run)["status"]
        asked = world.ledger.people.approvals(run_id=run)
        assert (status == "awaiting_approval") == (len(asked) == 1), f"statement {number}"
        assert world.used(run)["tool_calls"] == 0
        assert world.service.performed == []
        seen.add(status)
        if not broken:
            break
    assert not broken and "awaiting_approval" in seen


# ---- verify --------------------------------------------------------------------------------------


@pytest.mark.accept("RPW-09")
def test_what_a_run_rests_on_was_looked_up_and_is_on_record(world: World) -> None:
    run, _ = paying(world)
    agree(world.fleet, run)
    found = world.drive(run)
    (verified, _) = world.trace(run, "completion.verified")

    assert (found.status, found.answer) == ("completed", "paid")
    assert found.outputs["verify"] == {"payments": 1, "evidence": "ledger:1"}
    assert verified["detail"]["evidence_ref"] == "ledger:1" and verified["detail"]["verified"]


@pytest.mark.accept("RPW-09")
def test_a_receipt_alone_completes_nothing(world: World) -> None:
    """The service has said that it paid; where the money should be there is none."""
    run, _ = paying(world, records=[])
    agree(world.fleet, run)
    found = world.drive(run)

    assert (found.status, found.reason, found.answer) == ("failed", "verification-failed", None)
    (stop,) = world.trace(run, "run.stopped")
    assert stop["detail"]["evidence"] == "ledger:0"
    assert world.effect("save:1")["status"] == "applied", "that it was sent is not forgotten"


# ---- recovery ------------------------------------------------------------------------------------


@pytest.mark.accept("RPW-10", "RPW-11")
@pytest.mark.parametrize("way", ["the answer is lost", "it never arrives", "the worker dies"])
def test_after_an_unknown_result_the_service_is_asked_before_anything_is_sent(
    world: World, way: str
) -> None:
    """One key, whatever happens; a second attempt only after the question, and under that key."""
    order: list[str] = []
    keys: set[str | None] = set()

    async def write(arguments: Any, call: ToolCall) -> Any:
        order.append("write")
        keys.add(call.key)
        if way == "it never arrives" and order.count("write") == 1:
            raise TimeoutError
        receipt = world.service.arrive(call, arguments, 10 * MINUTE)
        world.outside.at("after write")
        if way == "the answer is lost" and order.count("write") == 1:
            raise TimeoutError
        return receipt

    async def find(arguments: Any, call: ToolCall) -> Any:
        order.append("query")
        keys.add(call.key)
        return world.service.query(arguments, call)

    tool = world.fleet.tool(
        "save",
        side_effect="idempotent",
        approval="never",
        guarantee="idempotency-key",
        key_valid_for_ms=10 * MINUTE,
        intent=lambda arguments, run: f"save:{arguments['id']}",
        query=find,
    )(write)
    world.workflow(tool, plan=[save(id=1)])
    run = world.start()
    outside = Outside(lambda place: way == "the worker dies" and place == "after write")
    outside.then = outside.die
    world.step(run, outside=outside)
    found = world.drive(run)

    assert found.status == "completed" and world.service.performed == ["save:1"]
    assert order[:2] == ["write", "query"]
    assert order.count("write") == (2 if way == "it never arrives" else 1)
    assert len(keys) == 1


@pytest.mark.accept("LED-12")
def test_a_request_that_leaves_after_an_operators_absent_is_in_doubt_again(world: World) -> None:
    """Whoever stood still with it sends after all, while the run waits to send it again."""
    tool = world.write_tool(key_valid_for_ms=0, guarantee="transaction")
    world.workflow(tool, plan=[save(id=1)])
    run = world.start(budget={"deadline_ms": 120 * SECOND})

    def an_operator_believes_it_absent() -> None:
        world.service.away = True
        world.advance(LEASE_MS)
        while world.fleet.get(run).status != "handed_off":
            world.sweep_when_due(run)
        world.service.away = False
        world.advance(SETTLED_MS)
        (row,) = world.fleet.desk.handoffs(by=OPERATOR, run=run)
        world.fleet.desk.resolve(row["id"], "try-again", by=OPERATOR, reason="not there")
        assert world.effect("save:1")["status"] == "absent"
        assert world.fleet.get(run).status in ("running", "executing")

    late = Outside(lambda place: place == "before write tool", an_operator_believes_it_absent)
    world.step(run, outside=late)
    found, effect = world.fleet.get(run), world.effect("save:1")

    assert (found.status, found.reason) == ("reconciling", "unknown-effect")
    assert (effect["status"], effect["doubt_trigger"]) == ("unknown", "contrary-evidence")
    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"], "it was found, and not sent again"
