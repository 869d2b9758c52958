"""What a run is, as a product shows it: its state and why, and what each kind of failure leads to.

Every state is reached by a run of the real fleet, on both databases; the service's own records say
what was called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import BaseModel, field_validator

from handrail.agent import review
from handrail.agent.approvals import ApprovalTerms
from handrail.agent.budget import TASK_TYPES, Budget, CallLimits
from handrail.agent.fixed import Deny, HandOff, Judgement, Proceed
from handrail.agent.loop import AgentLoop
from handrail.agent.retry import Retry
from handrail.agent.stage import Action, Checked
from handrail.agent.tools import Permit, Principal, RunFacts, Tool
from handrail.agent.workflow import Check, Commit, Confirm, Read, Verify
from handrail.errors import BadInput, InvalidBudget, InvalidDefinition, ToolRefused
from handrail.fleet import Fleet
from handrail.runs import Run
from handrail.tasks.calls import ToolCall
from handrail.testing.people import agree
from tests.world import SECOND, World, look, open_world, save

ACCEPTANCE: Final = Path(__file__).parent.parent / "docs" / "acceptance.md"
QUICK: Final = Retry(attempts=3, base_ms=1, cap_ms=1)


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world on SQLite, for what no database can make different."""
    with open_world(request) as opened:
        yield opened


def ended(world: World, *tools: Tool, plan: list[Any], **options: Any) -> Run:
    """A run of one loop, driven until it rests."""
    world.workflow(*tools, plan=plan)
    return world.drive(world.start(**options))


def detail(world: World, run: Run, kind: str) -> dict[str, Any]:
    """What the only event of a kind says."""
    (event,) = world.trace(run.run_id, kind)
    found: dict[str, Any] = event["detail"]
    return found


def types(world: World, run: Run) -> list[str]:
    return [event["type"] for event in world.trace(run.run_id)]


def stopped_as(run: Run) -> tuple[str, str | None]:
    return run.status, run.reason


def breaks(seen: Mapping[str, Any]) -> Any:
    """A model that cannot be reached, which may pass."""
    raise ConnectionError("the provider is away")


# ---- the states of the vocabulary ----------------------------------------------------------------


def running(world: World) -> Run:
    seen: list[Run] = []

    def propose(shown: dict[str, Any]) -> Any:
        seen.append(world.fleet.get(shown["goal"]))
        return {"kind": "complete", "answer": "ok"}

    ended(world, world.read_tool(), plan=[propose])
    return seen[0]


def during_a_write(world: World, act: Callable[[str], object]) -> Run:
    """The run as it is while its write is being made, after something else has happened."""
    seen: list[Run] = []

    def write(arguments: Any, call: ToolCall) -> Any:
        world.meanwhile(lambda: act(call.run_id))
        seen.append(world.meanwhile(lambda: world.fleet.get(call.run_id)))
        return world.service.arrive(call, arguments, SECOND)

    world.service.script = [write]
    ended(world, world.write_tool(), plan=[save(id=1)])
    return seen[0]


def executing(world: World) -> Run:
    return during_a_write(world, lambda run: None)


def cancelling(world: World) -> Run:
    return during_a_write(world, world.fleet.cancel)


def completed(world: World) -> Run:
    return ended(world, world.read_tool(), plan=[look(of=1)])


def cancelled(world: World) -> Run:
    world.workflow(world.read_tool(), plan=[look(of=1)])
    run = world.start()
    world.step(run)
    world.fleet.cancel(run)
    return world.drive(run)


def out_of_steps(world: World) -> Run:
    return ended(world, world.read_tool(), plan=[look(of=1), look(of=2)], budget={"steps": 1})


def invalid(world: World) -> Run:
    return ended(world, world.read_tool(), plan=[{"kind": "tool", "tool": "nothing"}])


def repeated(world: World) -> Run:
    tool = world.read_tool("lookup", volatile=["at"])

    def same(seen: Any) -> Any:
        return {"kind": "tool", "tool": "same", "arguments": {}}

    always = world.fleet.tool("same", side_effect="read")(lambda arguments, call: "as before")
    return ended(world, tool, always, plan=[same, same, same])


def handed_off(world: World) -> Run:
    world.workflow(stages=[Check("look", lambda run: HandOff({"why": "high risk"}))])
    return world.drive(world.start())


def awaiting_approval(world: World) -> Run:
    return ended(world, world.write_tool(approval="always"), plan=[save(id=1)])


def tool_failed(world: World) -> Run:
    world.service.script = ["refused"]
    return ended(world, world.write_tool(), plan=[save(id=1)])


def not_verified(world: World) -> Run:
    check = Verify("verify", lambda claim, call: Checked(False, evidence="record:none"))
    world.workflow(stages=[Check("look", lambda run: Proceed()), check])
    return world.drive(world.start())


def provider_failed(world: World) -> Run:
    return ended(world, world.read_tool(), plan=[breaks])


#: By the name that a state has elsewhere: how a run gets there, and what it is here. Two rows of
#: the vocabulary are two states each.
REACHED: Final[Mapping[str, tuple[tuple[Callable[[World], Run], str, str | None], ...]]] = {
    "running": ((running, "running", None),),
    "executing": ((executing, "executing", None),),
    "cancelling": ((cancelling, "cancelling", None),),
    "completed": ((completed, "completed", "completed"),),
    "cancelled": ((cancelled, "cancelled", "cancelled"),),
    "budget_exhausted": ((out_of_steps, "budget_exhausted", "step-budget-exhausted"),),
    "stopped_invalid": ((invalid, "failed", "invalid-proposal"),),
    "stopped_budget": (
        (out_of_steps, "budget_exhausted", "step-budget-exhausted"),
        (repeated, "failed", "repeated-proposal"),
    ),
    "human_handoff": ((handed_off, "handed_off", "handoff-required"),),
    "waiting_for_approval": ((awaiting_approval, "awaiting_approval", None),),
    "tool_failed": (
        (tool_failed, "failed", "tool-failed"),
        (not_verified, "failed", "verification-failed"),
    ),
    "provider_failed": ((provider_failed, "failed", "model-failed"),),
}


@pytest.mark.accept("PRO-01")
@pytest.mark.parametrize(
    ("reach", "status", "reason"),
    [way for ways in REACHED.values() for way in ways],
    ids=[f"{name}-{number}" for name, ways in REACHED.items() for number, _ in enumerate(ways)],
)
def test_every_state_of_the_vocabulary_is_reached(
    world: World, reach: Callable[[World], Run], status: str, reason: str | None
) -> None:
    run = reach(world)

    assert (run.status, run.reason) == (status, reason)


@pytest.mark.accept("PRO-01")
def test_the_vocabulary_of_the_document_is_the_one_that_is_reached() -> None:
    document = ACCEPTANCE.read_text("utf8")
    table = document.partition("| elsewhere called | here |")[2].partition("\n\n")[0]
    names = [
        name.strip(" `") for row in table.splitlines()[2:] for name in row.split("|")[1].split(",")
    ]

    assert names and {*names} == {*REACHED}


# ---- failure has a kind --------------------------------------------------------------------------


def not_permitted(world: World) -> Run:
    return ended(world, world.write_tool(permission="may:save"), plan=[save(id=1)])


@pytest.mark.accept("PRO-02")
def test_four_failures_differ_in_status_reason_and_code(world: World) -> None:
    told = {}
    for number, reach in enumerate((tool_failed, provider_failed, not_permitted, out_of_calls)):
        world.fleet._tools.clear()
        world.fleet.workflows.clear()
        run = reach(world)
        shown = detail(world, run, "run.stopped")
        code = shown.get("code") or shown.get("problem") or shown["category"]
        told[number] = (run.status, run.reason, code)
        assert not any(isinstance(value, bool) for value in told[number])

    assert [*told.values()] == [
        ("failed", "tool-failed", "no-funds"),
        ("failed", "model-failed", "failure"),
        ("failed", "permission-denied", "not permitted"),
        ("budget_exhausted", "tool-call-budget-exhausted", "TOOL_BUDGET_EXHAUSTED"),
    ]


def out_of_calls(world: World) -> Run:
    plan = [look(of=1), look(of=2)]
    return ended(world, world.read_tool(), plan=plan, budget={"tool_calls": 1})


#: What only one of the four ways leaves in a trace.
SIGNS: Final = ("model.failed", "approval.requested", "proposal.rejected")


def signs(world: World, run: Run) -> set[str]:
    return {*SIGNS} & {*types(world, run)}


@pytest.mark.accept("PRO-03")
def test_after_a_retryable_tool_failure_other_parameters_are_tried(world: World) -> None:
    world.service.script = ["busy", "ok"]
    run = ended(world, world.write_tool(), plan=[save(id=1), save(id=2)])

    assert stopped_as(run) == ("completed", "completed")
    assert world.service.performed == ["save:2"]
    assert run.observations[0] == "tool:save:failed:busy", "the model was told"
    assert signs(world, run) == set()


@pytest.mark.accept("PRO-03")
def test_a_provider_failure_is_retried_so_often_and_no_further(world: World) -> None:
    tool = world.read_tool()
    world.workflow(
        stages=[
            AgentLoop(
                name="loop",
                actions=(tool,),
                model="draft",
                verify=lambda claim, call: True,
                retry=QUICK,
            )
        ],
        plan=[breaks],
    )
    run = world.drive(world.start())

    assert stopped_as(run) == ("failed", "model-failed")
    assert run.budget_used["model_calls"] == 3 == world.service.calls[f"model {run.run_id}"]
    assert (run.budget_used["steps"], run.tool_calls) == (1, 0)
    assert signs(world, run) == {"model.failed"}


@pytest.mark.accept("PRO-03", "PRO-16")
def test_a_permission_that_a_person_can_give_is_waited_for(world: World) -> None:
    tool = world.write_tool(allow=lambda arguments, run: Permit.WITH_APPROVAL)
    run = ended(world, tool, plan=[save(id=1)])

    assert run.status == "awaiting_approval"
    assert world.service.performed == [] and run.tool_calls == 0
    assert signs(world, run) == {"approval.requested"}
    agree(world.fleet, run)
    assert stopped_as(world.drive(run.run_id)) == ("completed", "completed")


@pytest.mark.accept("PRO-03", "PRO-04")
def test_a_spent_budget_is_an_orderly_stop_with_an_interim_result(world: World) -> None:
    run = out_of_calls(world)
    shown = detail(world, run, "run.stopped")
    elsewhere = Fleet(settings=world.fleet.settings)  # another process that reads the same ledger
    elsewhere.__dict__["ledger"] = world._ledger()

    assert stopped_as(run) == ("budget_exhausted", "tool-call-budget-exhausted")
    assert run.answer is None, "an interim result is no answer"
    found: Any = run.interim["observations"]
    assert len(found) == 1 and found[0].startswith('found {"of": 1}')
    assert elsewhere.get(run.run_id).interim == run.interim
    assert shown["products"] == {"outputs": [], "observations": 1}
    assert world.service.calls[f"read {run.run_id}"] == 1
    elsewhere.close()


@pytest.mark.accept("PRO-04")
@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({"steps": 1}, "step-budget-exhausted"),
        ({"model_calls": 1}, "model-call-budget-exhausted"),
        ({"tool_calls": 2}, "tool-call-budget-exhausted"),
        ({"output_bytes": 60}, "output-budget-exhausted"),
        ({"deadline_ms": 4_000}, "deadline-exhausted"),
    ],
)
def test_whichever_budget_ends_what_was_found_by_then_is_kept(
    world: World, budget: dict[str, int], reason: str
) -> None:
    """The first stage has finished; a loop goes on looking until something is spent."""
    tool = world.read_tool()

    def slow(seen: Any) -> Any:
        world.advance(3 * SECOND)
        return look(of=len(seen["observations"]) + 1)

    world.workflow(
        stages=[
            Read("orders", tool, lambda run: {"of": "orders"}),
            AgentLoop(name="loop", actions=(tool,), model="draft", verify=lambda claim, call: True),
        ],
        plan=[slow] * 9,
    )
    run = world.drive(world.start(budget=budget))

    assert stopped_as(run) == ("budget_exhausted", reason)
    outputs = run.interim["outputs"]
    assert isinstance(outputs, dict) and str(outputs["orders"]).startswith("found")
    assert detail(world, run, "run.stopped")["products"]["outputs"] == ["orders"]


# ---- bounds --------------------------------------------------------------------------------------


def never_content(seen: Mapping[str, Any]) -> Any:
    return look(of=len(seen["observations"]))


def always_done(seen: Mapping[str, Any]) -> Any:
    return {"kind": "complete", "answer": "done"}


def never_valid(seen: Mapping[str, Any]) -> Any:
    return {"kind": "tool", "tool": f"tool_{len(seen['observations'])}", "arguments": {}}


def to_and_fro(seen: Mapping[str, Any]) -> Any:
    return look(of=len(seen["observations"]) % 2)


@pytest.mark.accept("PRO-05")
@pytest.mark.parametrize("planner", [never_content, always_done, never_valid, to_and_fro, breaks])
def test_a_planner_that_never_converges_ends_within_its_budgets(
    world: World, planner: Callable[..., Any]
) -> None:
    """Every help for it is on: corrections, retries, and no detector of loops."""
    tool = world.read_tool()
    loop = AgentLoop(
        name="loop",
        actions=(tool,),
        model="draft",
        verify=lambda claim, call: False,
        corrections=100,
        retry=QUICK,
        no_progress=None,
    )
    world.workflow(stages=[loop], plan=[planner] * 100)
    limits = {"steps": 5, "model_calls": 7, "tool_calls": 4}
    run = world.drive(world.start(budget=limits))

    assert run.ended and run.status in ("budget_exhausted", "failed") and run.answer is None
    assert all(run.budget_used[name] <= limit for name, limit in limits.items())
    assert world.service.calls[f"model {run.run_id}"] <= 7
    assert world.service.calls[f"read {run.run_id}"] <= 4


@pytest.mark.accept("PRO-06")
def test_a_tool_with_a_limit_of_its_own_is_called_no_oftener(world: World) -> None:
    other = world.read_tool("other")
    plan = [look(of=1), look(of=2), {"kind": "tool", "tool": "other", "arguments": {}}, look(of=3)]
    run = ended(world, world.read_tool(), other, plan=plan, budget={"per_tool": {"lookup": 2}})
    started = [event["detail"]["tool"] for event in world.trace(run.run_id, "tool.started")]

    assert stopped_as(run) == ("budget_exhausted", "tool-call-budget-exhausted")
    assert started == ["lookup", "lookup", "other"], "only the limited one is refused"
    assert run.budget_left["tool_calls.lookup"] == 0 and run.budget_left["tool_calls"] > 0


# ---- nothing is taken for valid ------------------------------------------------------------------


class Order(BaseModel):
    number: int
    cents: int

    @field_validator("cents")
    @classmethod
    def is_plausible(cls, cents: int) -> int:
        if cents == 13:
            raise RuntimeError("the validator itself is broken")
        if cents <= 0:
            raise ValueError("nothing to pay")
        return cents


INVALID: Final = {
    "missing": {"number": 1},
    "additional": {"number": 1, "cents": 5, "approved": True},
    "text as number": {"number": "1", "cents": 5},
    "boolean as number": {"number": True, "cents": 5},
    "fraction": {"number": 1, "cents": 5.5},
    "against the rule": {"number": 1, "cents": 0},
}


def order_tool(world: World, **contract: Any) -> Tool:
    return world.write_tool(
        input=Order, intent=lambda order, run: f"save:{order.number}", **contract
    )


@pytest.mark.accept("PRO-07")
@pytest.mark.parametrize("arguments", INVALID.values(), ids=INVALID.keys())
@pytest.mark.parametrize("who", ["the model", "the program"])
def test_no_arguments_are_taken_for_valid_whoever_made_them(
    world: World, who: str, arguments: dict[str, Any]
) -> None:
    tool = order_tool(world)
    if who == "the program":
        commit = Commit("commit", lambda run: Action(tool, arguments), tool)
        world.workflow(stages=[commit])
        run = world.drive(world.start())
    else:
        run = ended(world, tool, plan=[save(**arguments)])

    assert stopped_as(run) == ("failed", "invalid-proposal")
    assert world.service.calls[f"write {run.run_id}"] == 0 == run.tool_calls


@pytest.mark.accept("PRO-07")
@pytest.mark.parametrize("arguments", INVALID.values(), ids=INVALID.keys())
def test_an_input_that_is_invalid_starts_no_run(small: World, arguments: dict[str, Any]) -> None:
    small.workflow(stages=[Check("look", lambda run: Proceed())], input=Order)

    with pytest.raises(BadInput) as refused:
        small.start(input=arguments)
    assert refused.value.code == "invalid-run"
    assert small.rows("SELECT id FROM handrail_run") == []


@pytest.mark.accept("PRO-12")
@pytest.mark.parametrize(
    "name", ["refund", "Save", "save ", "\u0455ave", "__class__", "handrail.step"]
)
def test_an_unknown_tool_is_an_invalid_proposal_and_costs_no_tool_call(
    world: World, name: str
) -> None:
    proposal = {"kind": "tool", "tool": name, "arguments": {"id": 1}}
    run = ended(world, world.write_tool(), plan=[proposal])

    assert stopped_as(run) == ("failed", "invalid-proposal")
    assert run.tool_calls == 0 == run.budget_used["tool_calls"]
    assert world.trace(run.run_id, "tool.started") == []
    assert world.service.performed == []


@pytest.mark.accept("PRO-13")
def test_a_validator_that_raises_makes_the_proposal_invalid_and_nothing_escapes(
    world: World,
) -> None:
    run = ended(world, order_tool(world), plan=[save(number=1, cents=13)])

    assert stopped_as(run) == ("failed", "invalid-proposal")
    assert run.tool_calls == 0 and world.service.performed == []
    assert detail(world, run, "proposal.rejected")["stable_reason_code"] == "invalid-proposal"


@pytest.mark.accept("PRO-14")
@pytest.mark.parametrize("holds", [True, False])
def test_a_final_text_is_kept_as_final_and_verified_all_the_same(world: World, holds: bool) -> None:
    asked: list[Any] = []

    def verify(claim: Any, call: ToolCall) -> bool:
        asked.append(claim)
        return holds

    loop = AgentLoop(name="loop", actions=(world.read_tool(),), model="draft", verify=verify)
    world.workflow(stages=[loop], plan=[])
    world.fleet.model("draft", lambda seen: {"kind": "complete", "answer": "all is paid"})
    run = world.drive(world.start(budget={"steps": 2}))
    told = types(world, run)

    assert run.status == ("completed" if holds else "budget_exhausted")
    assert run.answer == ("all is paid" if holds else None)
    assert asked == ["all is paid"] * told.count("final")
    first = told.index("final")
    assert "completion.verified" in told[first:]
    assert ("run.completed" in told) is holds
    if holds:
        assert told.index("completion.verified") < told.index("run.completed")


# ---- an upstream failure is classified -----------------------------------------------------------


@pytest.mark.accept("PRO-08")
@pytest.mark.parametrize(
    ("script", "status", "reason", "writes", "queried"),
    [
        (["refused"], "failed", "tool-failed", 1, False),  # definite: no second attempt
        (["busy", "ok"], "completed", "completed", 2, False),  # it says itself: try again
        (["lost"], "completed", "completed", 1, True),  # it happened: found by asking
        (["dropped", "ok"], "completed", "completed", 2, True),  # absent: the same key again
        (["unclear", "ok"], "completed", "completed", 2, True),  # its own doubt is a doubt
    ],
    ids=["refused", "busy", "lost", "dropped", "unclear"],
)
def test_an_upstream_failure_has_the_answer_of_its_class(
    world: World, script: list[Any], status: str, reason: str, writes: int, queried: bool
) -> None:
    world.service.script = [*script]
    plan = [save(id=1), save(id=2)][: 1 + ("busy" in script)]
    run = ended(world, world.write_tool(), plan=plan)

    assert stopped_as(run) == (status, reason)
    assert world.service.calls[f"write {run.run_id}"] == writes
    assert (world.service.calls[f"query {run.run_id}"] > 0) is queried
    assert len(world.service.performed) == (status == "completed")


@pytest.mark.accept("PRO-08")
def test_what_changed_since_the_plan_is_read_again_before_it_is_sent_again(world: World) -> None:
    """The order's version alone has moved: what is sent is the same intent, planned anew."""
    done: list[str] = []

    def read(arguments: Any, call: ToolCall) -> Any:
        done.append("read")
        return len(done)

    def write(arguments: Any, call: ToolCall) -> Any:
        done.append("write")
        if done.count("write") == 1:
            raise ToolRefused("order-changed", changed=True)
        return world.service.arrive(call, arguments, SECOND)

    order = world.fleet.tool("order", side_effect="read")(read)
    pay = world.write_tool()
    world.service.script = [write, write]

    def action(run: RunFacts) -> Action:
        return Action(pay, {"id": 1})

    stages = [Read("read", order, lambda run: {}), Commit("commit", action, pay, replan="read")]
    world.workflow(stages=stages)
    run = world.drive(world.start())

    assert stopped_as(run) == ("completed", "completed")
    assert done == ["read", "write", "read", "write"]
    assert world.service.performed == ["save:1"]


# ---- what was done can be explained, is limited, can be recovered --------------------------------


@pytest.mark.accept("PRO-09")
def test_an_executed_action_has_an_answer_to_three_questions(world: World) -> None:
    """Why, within what, and from where to go on; asked in the middle of the run."""
    world.workflow(world.read_tool(), world.write_tool(), plan=[look(of=1), save(id=1)])
    run_id = world.start()
    while world.fleet.get(run_id).tool_calls < 2:
        world.step(run_id)
    trace = world.trace(run_id)
    started = [event for event in trace if event["type"] == "tool.started"]
    made = review.calls(trace)
    assert [call["tool"] for call in made] == ["lookup", "save"]

    for number, event in enumerate(started):
        step = [one for one in trace if one["step"] == event["step"]]
        told = {one["type"]: one["detail"] for one in step}
        assert told["proposal.received"]["arguments_hash"] == event["detail"]["arguments_hash"]
        assert told["policy.allowed"]["rule"] and told["result.verified"]["evidence_ref"]
        assert made[number]["ended"] == "success"

    run = world.fleet.get(run_id)
    assert run.budget_used["tool_calls"] == 2
    assert run.budget_left["tool_calls"] == TASK_TYPES["general"].tool_calls - 2

    effect = world.effect("save:1")
    assert (effect["status"], effect["result"]) == ("applied", '{"of":"save:1","receipt":1}')
    assert run.observation_count == 2, "the read's result is kept in the ledger, too"
    calls = dict(world.service.calls)
    world.step(run_id, runtime=world.worker())  # another worker goes on from there
    assert world.drive(run_id).status == "completed"
    assert world.service.calls[f"read {run_id}"] == calls[f"read {run_id}"]
    assert world.service.calls[f"write {run_id}"] == calls[f"write {run_id}"]


# ---- the order within a round --------------------------------------------------------------------


@pytest.mark.accept("PRO-10")
def test_a_round_goes_its_way_in_one_order(world: World) -> None:
    """What model, validator, policy, person, tool and check see when they are asked."""
    log: list[tuple[str, int, int, int]] = []

    def note(what: str, run_id: str) -> None:
        seen = world.meanwhile(lambda: world.fleet.get(run_id))
        calls = world.meanwhile(lambda: world.ledger.read(run_id))["state"].left.tool_calls
        log.append((what, seen.model_calls, 24 - calls, seen.observation_count))

    class Watched(BaseModel):
        number: int

        @field_validator("number")
        @classmethod
        def validated(cls, number: int) -> int:
            log.append(("arguments", 0, 0, 0))
            return number

    def allow(arguments: Watched, run: RunFacts) -> Permit:
        log.append(("permission", 0, 0, 0))
        return Permit.WITH_APPROVAL

    def write(arguments: Any, call: ToolCall) -> Any:
        note("executed", call.run_id)
        assert 0 < call.timeout_ms <= 5_000
        return world.service.arrive(call, arguments, SECOND)

    def propose(seen: dict[str, Any]) -> Any:
        note("asked", seen["goal"])
        done = {"kind": "complete", "answer": "ok"}
        return done if seen["observations"] else save(number=1)

    def verify(claim: Any, call: ToolCall) -> bool:
        note("checked", call.run_id)
        return True

    tool = world.write_tool(input=Watched, intent=lambda w, run: "save:1", allow=allow)
    world.workflow(stages=[AgentLoop(name="loop", actions=(tool,), model="order", verify=verify)])
    world.fleet.model("order", propose)
    world.service.script = [write]
    run_id = world.start(budget={"tool_calls": 24})
    world.step(run_id)

    assert world.fleet.get(run_id).status == "awaiting_approval"
    names = [name for name, *_ in log]
    assert [*dict.fromkeys(names)] == ["asked", "arguments", "permission"]
    assert log[0] == ("asked", 1, 1, 0), "the model call, and one tool call, were charged before"
    before = len(log)
    agree(world.fleet, run_id)
    assert world.used(run_id)["tool_calls"] == 0, "a person is asked before the call is charged"
    world.drive(run_id)
    after = [entry for entry in log[before:] if entry[0] not in ("arguments", "permission")]

    assert [name for name, *_ in after] == ["executed", "asked", "checked"]
    assert after[0][2:] == (1, 0), "the call was charged, and no result is there yet"
    assert after[1][3] == 1, "the result was appended before the model is asked again"
    order = ["observation.built", "proposal.received", "policy.allowed", "approval.requested"]
    order += ["approval.given", "tool.started", "result.classified", "result.verified"]
    order += ["state.transitioned", "observation.built", "proposal.received", "final"]
    order += ["completion.verified", "run.completed", "run.stopped"]
    told = [event["type"] for event in world.trace(run_id)]
    assert [type for type in told if type in {*order}] == order


@pytest.mark.accept("PRO-10")
@pytest.mark.parametrize(
    ("proposal", "budget", "status", "reason", "asked"),
    [
        (look(of=1), {"steps": 0}, "budget_exhausted", "step-budget-exhausted", 0),
        (look(of=1), {"model_calls": 0}, "budget_exhausted", "model-call-budget-exhausted", 0),
        ({"kind": "complete", "answer": 1}, {"tool_calls": 0}, "completed", "completed", 1),
        (
            {"kind": "tool", "tool": "none", "arguments": {"x": 1}},
            {"tool_calls": 0},
            "failed",
            "invalid-proposal",
            1,
        ),
        (save(number="one"), {"tool_calls": 0}, "failed", "invalid-proposal", 1),
        (save(number=1, cents=5), {"tool_calls": 1}, "awaiting_approval", None, 1),
    ],
    ids=["steps", "model calls", "completion", "tool known", "arguments", "approval"],
)
def test_of_two_things_that_are_wrong_the_one_that_is_looked_at_first_counts(
    world: World,
    proposal: dict[str, Any],
    budget: dict[str, int],
    status: str,
    reason: str | None,
    asked: int,
) -> None:
    tools = (world.read_tool(), order_tool(world, approval="always"))
    run = ended(world, *tools, plan=[proposal], budget=budget)

    assert stopped_as(run) == (status, reason)
    assert world.service.calls[f"model {run.run_id}"] == asked == run.model_calls
    assert run.tool_calls == 0 and world.service.performed == []


@pytest.mark.accept("PRO-10")
def test_a_cancellation_is_looked_at_before_any_budget(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(of=1), look(of=2)])
    run = world.start(budget={"steps": 1, "model_calls": 1})
    world.step(run)
    world.fleet.cancel(run)

    assert stopped_as(world.drive(run)) == ("cancelled", "cancelled")


# ---- cancellation, identity, permission ----------------------------------------------------------


@pytest.mark.accept("PRO-11")
@pytest.mark.parametrize("during", ["model", "read"])
def test_a_cancel_during_a_model_call_or_a_read_is_no_failure(world: World, during: str) -> None:
    """The call fails as well, and that is not what the run is remembered for."""

    def broken(run_id: str) -> Any:
        world.meanwhile(lambda: world.fleet.cancel(run_id))
        raise ConnectionError("aborted")

    def propose(seen: dict[str, Any]) -> Any:
        return broken(seen["goal"]) if during == "model" else look(of=1)

    def read(arguments: Any, call: ToolCall) -> Any:
        return broken(call.run_id)

    tool = world.fleet.tool("lookup", side_effect="read", retry=QUICK)(read)
    run = ended(world, tool, plan=[propose])

    assert stopped_as(run) == ("cancelled", "cancelled")
    assert detail(world, run, "run.stopped")["category"] == "cancellation"


@pytest.mark.accept("PRO-15")
def test_a_result_is_bound_to_the_call_that_asked_for_it(world: World) -> None:
    plan = [look(of=1), look(of=2), save(id=3)]
    run = ended(world, world.read_tool(), world.write_tool(), plan=plan)
    trace = world.trace(run.run_id)
    started = [event["detail"] for event in trace if event["type"] == "tool.started"]
    verified = [event["detail"] for event in trace if event["type"] == "result.verified"]
    ids = [call["tool_call_id"] for call in started]
    effect = world.effect("save:3")

    assert len({*ids}) == 3
    assert [one["evidence_ref"] for one in verified[:2]] == [f"call:{id}" for id in ids[:2]]
    assert ids[2] == f"{effect['id']}:{effect['token']}"
    assert verified[2]["evidence_ref"] == effect["evidence"]
    assert [seen["source"] for seen in world.ledger.observations(run.run_id)] == [
        call["tool"] for call in started
    ]
    for number in (1, 2):
        assert f'"of": {number}' in run.observations[number - 1]


@pytest.mark.accept("PRO-15")
def test_an_answer_that_comes_after_its_call_was_given_up_is_not_the_next_ones(
    world: World,
) -> None:
    """The first attempt is abandoned; what it says later enters no state."""
    answered: list[str] = []

    async def read(arguments: Any, call: ToolCall) -> str:
        answered.append(f"answer {len(answered) + 1}")
        mine = answered[-1]
        if len(answered) == 1:
            raise TimeoutError("given up")
        return mine

    tool = world.fleet.tool("lookup", side_effect="read", retry=QUICK)(read)
    run = ended(world, tool, plan=[look(of=1)])
    ids = [event["detail"]["tool_call_id"] for event in world.trace(run.run_id, "tool.started")]

    assert run.observations == ("answer 2",) and ids[1] == f"{ids[0]}.2"
    assert detail(world, run, "result.verified")["evidence_ref"] == f"call:{ids[1]}"


@pytest.mark.accept("PRO-16")
@pytest.mark.parametrize("who", ["the permission", "the policy", "the outside system"])
def test_what_is_denied_outright_stops_at_once_and_nobody_is_asked(world: World, who: str) -> None:
    if who == "the outside system":

        def judge(run: RunFacts) -> Judgement:
            return Proceed() if run.outputs["may"] == "yes" else Deny(detail={"field": "account"})

        may = world.fleet.tool("may", side_effect="read")(lambda arguments, call: "no")
        tool = world.write_tool(approval="always")

        def action(run: RunFacts) -> Action:
            return Action(tool, {"id": 1})

        stages = [
            Read("may", may, lambda run: {}),
            Check("allowed", judge),
            Confirm("confirm", action),
            Commit("commit", action, tool),
        ]
        world.workflow(stages=stages)
        run = world.drive(world.start())
    else:
        denied: dict[str, Any] = {"permission": "may:save"}
        if who == "the policy":
            denied = {"allow": lambda arguments, run: Permit.DENY}
        run = ended(world, world.write_tool(approval="always", **denied), plan=[save(id=1)])

    assert stopped_as(run) == ("failed", "permission-denied")
    assert world.rows("SELECT id FROM handrail_approval") == []
    assert world.service.calls[f"write {run.run_id}"] == 0


# ---- what a type of task is configured with ------------------------------------------------------


@pytest.mark.accept("PRO-17")
def test_nothing_is_retried_unless_it_is_said(world: World) -> None:
    failing = world.fleet.tool("lookup", side_effect="read")(breaks_call)
    run = ended(world, failing, plan=[look(of=1)])

    assert stopped_as(run) == ("failed", "tool-failed") and run.tool_calls == 1
    assert failing.contract.retries is None
    loop = AgentLoop(name="loop", actions=(failing,), verify=lambda claim, call: True)
    commit = Commit("c", lambda run: Action(failing), world.write_tool())
    assert (loop.retry, commit.attempts, Verify("v", lambda c, k: True).retry) == (None, 1, None)


def breaks_call(arguments: Any, call: ToolCall) -> Any:
    raise ConnectionError("away")


@pytest.mark.accept("PRO-17")
def test_a_write_without_an_identity_and_a_guarantee_is_refused(small: World) -> None:
    intent = {"intent": lambda arguments, run: "save:1"}
    for lacking in (
        {},
        intent,
        {**intent, "guarantee": "idempotency-key"},
        {**intent, "guarantee": "transaction"},
    ):
        with pytest.raises(InvalidDefinition):
            small.fleet.tool("save", side_effect="idempotent", **lacking)(breaks_call)
    with pytest.raises(InvalidDefinition):
        small.fleet.tool("save")(breaks_call)


@pytest.mark.accept("PRO-17")
def test_permission_is_asked_for_and_given_to_nobody_unless_it_is_said(small: World) -> None:
    tool = small.write_tool(approval=None)

    assert tool.contract.needs_approval
    terms = ApprovalTerms.of(tool.contract, {"id": 1})
    assert (terms.approvers, terms.requester_approves) == (1, False)
    assert (Principal().permissions, Principal().roles) == (frozenset(), frozenset())
    with pytest.raises(InvalidDefinition, match="needs approval"):
        small.workflow(stages=[Commit("c", lambda run: Action(tool, {"id": 1}), tool)])


@pytest.mark.accept("PRO-17")
@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_every_type_of_task_has_a_bound_for_everything_that_costs(
    small: World, task_type: str
) -> None:
    small.workflow(stages=[Check("look", lambda run: Proceed())], task_type=task_type)
    run = small.start()
    (accepted,) = small.trace(run, "run.accepted")
    budget = accepted["detail"]["budget"]

    assert budget == TASK_TYPES[task_type].to_json()
    assert all(
        type(budget[name]) is int and budget[name] > 0 for name in budget if name != "per_tool"
    )
    assert CallLimits().tool_ms > 0 and Budget().concurrency == 1
    for name in budget.keys() - {"per_tool"}:
        with pytest.raises(InvalidBudget):  # a run may lower it, and raise it only with leave
            small.start(budget={name: budget[name] + 1})


@pytest.mark.accept("PRO-17")
def test_a_person_comes_in_where_nothing_was_said(small: World) -> None:
    tool = small.write_tool(approval=None)
    assert Confirm("c", lambda run: Action(tool)).expires_ms == 24 * 3_600 * SECOND
    loop = AgentLoop(name="loop", actions=(tool,), verify=lambda claim, call: True)
    assert loop.approve_within_ms == loop.answer_within_ms == 24 * 3_600 * SECOND
    with pytest.raises(InvalidDefinition, match="takeover"):
        small.write_tool("other", query=False, takeover=None)


@pytest.mark.accept("PRO-17")
@pytest.mark.parametrize(
    "words",
    [
        {"retry": 9},
        {"attempts": 9},
        {"idempotency_key": "mine"},
        {"approval": "never"},
        {"permission": "admin"},
        {"budget": {"tool_calls": 99}},
        {"requester_approves": True},
    ],
    ids=lambda words: next(iter(words)),
)
def test_none_of_it_is_left_to_the_model(small: World, words: dict[str, Any]) -> None:
    """Neither beside the arguments nor within them; the same without it is taken."""
    tool = order_tool(small, approval="always")
    beside: Any = {**save(number=1, cents=5), **words}
    within = save(number=1, cents=5, **words)
    for name, proposal in (("beside", beside), ("within", within)):
        small.workflow(tool, plan=[proposal], name=name)
        run = small.drive(small.start(name))
        assert stopped_as(run) == ("failed", "invalid-proposal"), name
        assert run.budget_left["tool_calls"] == TASK_TYPES["general"].tool_calls

    assert ended(small, tool, plan=[save(number=1, cents=5)]).status == "awaiting_approval"
