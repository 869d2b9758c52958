"""What somebody who has read no code does wrong, and what then must not happen.

A definition that cannot work is refused when it is made; input that cannot be stored or sent is
refused before anything is written; code of a workflow that misbehaves in any way ends its own run
with a reason, and neither the event loop of the process nor another run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from handrail import AgentLoop, Budget, Fleet, Workflow
from handrail.agent.approvals import ApprovalRefused
from handrail.agent.budget import CallLimits
from handrail.agent.fixed import Check, Confirm, Deny, HandOff, Proceed, Read, Verify
from handrail.agent.people import InvalidWords, NotAllowed
from handrail.agent.stage import Checked, End, Succeeded
from handrail.agent.tools import Principal, Tool
from handrail.broker.loop import SharedLoop, shared_loop
from handrail.errors import BadInput, InvalidBudget, InvalidDefinition
from handrail.fleet import (
    InvalidQuery,
    InvalidRun,
    UnknownWorkflow,
    ask_bounded,
)
from handrail.ledger.errors import DatabaseUnavailable, UnknownRun
from handrail.ledger.migrate import upgrade
from handrail.runs import Run
from handrail.settings import InvalidSettings, Settings
from handrail.tasks.calls import ToolCall
from handrail.testing.people import APPROVER, OPERATOR

ASK = {"kind": "tool", "tool": "look", "arguments": {}}
DONE = {"kind": "complete", "answer": "done"}
ENDS_A_PROCESS = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet(database_url="sqlite://")
    yield fleet
    fleet.close()


def look(fleet: Fleet, function: Callable[..., Any] = lambda a, c: "seen", **contract: Any) -> Tool:
    options: dict[str, Any] = {"side_effect": "read"}
    return fleet.tool("look", **(options | contract))(function)


def save(
    fleet: Fleet, function: Callable[..., Any] = lambda a, c: "saved", **contract: Any
) -> Tool:
    write: dict[str, Any] = {
        "side_effect": "idempotent",
        "approval": "never",
        "intent": lambda arguments, run: f"save:{run.run_id}",
        "guarantee": "unique-constraint",
        "takeover": "operations",
    }
    return fleet.tool("look", **(write | contract))(function)


def looped(tool: Tool, verify: Callable[..., Any] = lambda c, k: True, **loop: Any) -> Workflow:
    return Workflow(
        name="work", stages=[AgentLoop(name="loop", actions=(tool,), verify=verify, **loop)]
    )


def rest(
    fleet: Fleet, workflow: Workflow, model: Callable[..., Any] | None = None, **run: Any
) -> Run:
    said = iter((ASK, DONE))
    fleet.workflow(workflow)
    fleet.model("default", model or (lambda seen: next(said)))
    return fleet.run(workflow.name, goal="g", timeout_s=10, **run)


def raises(kind: type[BaseException]) -> Callable[..., Any]:
    def act(*_: Any) -> Any:
        raise kind

    return act


def raises_awaited(kind: type[BaseException]) -> Callable[..., Any]:
    async def act(*_: Any) -> Any:
        raise kind

    return act


# ---- code that would end a process ---------------------------------------------------------------


@pytest.mark.accept("RUN-20", "EXE-08")
@pytest.mark.parametrize("kind", ENDS_A_PROCESS)
@pytest.mark.parametrize("how", [raises, raises_awaited])
def test_a_call_that_tries_to_end_the_process_only_fails(
    fleet: Fleet, how: Callable[..., Any], kind: type[BaseException]
) -> None:
    loop = shared_loop().loop

    assert rest(fleet, looped(look(fleet, how(kind)))).reason == "tool-failed"

    assert shared_loop().loop is loop and loop.is_running()


@pytest.mark.accept("RUN-20")
@pytest.mark.parametrize("kind", ENDS_A_PROCESS)
@pytest.mark.parametrize("how", [raises, raises_awaited])
def test_a_query_that_tries_to_end_the_process_is_an_error_like_any_other(
    how: Callable[..., Any], kind: type[BaseException]
) -> None:
    call = ToolCall("run", "tenant", Principal(), "look", 5_000)

    done = ask_bounded(how(kind), {}, call, 5_000).result()

    assert done.end is End.RAISED and isinstance(done.error, RuntimeError)
    assert kind.__name__ in str(done.error)


@pytest.mark.parametrize("kind", ENDS_A_PROCESS)
@pytest.mark.parametrize("place", ["judge", "arguments", "allow", "public", "allowed"])
def test_code_of_the_workflow_that_tries_to_end_the_process_is_a_persons_matter(
    fleet: Fleet, place: str, kind: type[BaseException]
) -> None:
    fault = raises(kind)
    workflow = {
        "judge": lambda: Workflow(name="work", stages=[Check("check", fault)]),
        "arguments": lambda: Workflow(name="work", stages=[Read("read", look(fleet), fault)]),
        "allow": lambda: looped(look(fleet, allow=fault)),
        "public": lambda: looped(look(fleet, public=fault)),
        "allowed": lambda: looped(look(fleet), allowed=fault),
    }[place]()

    run = rest(fleet, workflow)

    assert (run.status, run.reason) == ("handed_off", "handoff-required")


def test_a_receipt_survives_public_facts_that_try_to_end_the_process(fleet: Fleet) -> None:
    run = rest(fleet, looped(save(fleet, public=raises(SystemExit))))

    assert (run.status, run.tool_calls) == ("completed", 1)


def test_the_event_loop_survives_what_is_raised_on_it() -> None:
    shared, went_on = SharedLoop(), threading.Event()

    def leave() -> None:
        raise SystemExit

    shared.loop.call_soon_threadsafe(leave)
    shared.loop.call_soon_threadsafe(went_on.set)

    assert went_on.wait(10)
    assert shared.stop()


# ---- models that block ---------------------------------------------------------------------------


@pytest.mark.accept("BUD-03", "BUD-14")
def test_a_model_that_is_a_plain_function_is_cut_off_at_its_limit(fleet: Fleet) -> None:
    released = threading.Event()

    def blocks(seen: Any) -> Any:
        released.wait(20)
        return DONE

    run = rest(fleet, looped(look(fleet)), blocks, limits={"model_ms": 50})
    released.set()

    assert run.reason == "model-failed"
    assert [e["detail"]["timedOut"] for e in fleet.trace(run) if e["type"] == "model.failed"] == [
        True
    ]


# ---- values that cannot be stored ----------------------------------------------------------------


@pytest.mark.accept("LED-01", "CTL-06")
@pytest.mark.parametrize("value", [object(), float("nan"), {1: 2}, b"x"])
@pytest.mark.parametrize("place", ["public", "detail", "evidence", "hand-off", "deny", "output"])
def test_what_is_no_json_is_a_persons_matter_at_once(fleet: Fleet, place: str, value: Any) -> None:
    """It was met only when the step was written, so that every attempt at the step failed."""
    told = {"k": value}
    workflow = {
        "public": lambda: looped(look(fleet, public=lambda a, r: told)),
        "detail": lambda: looped(look(fleet), lambda c, k: Checked(True, told)),
        "evidence": lambda: looped(look(fleet), lambda c, k: Checked(True, {}, value)),
        "hand-off": lambda: Workflow(name="work", stages=[Check("c", lambda r: HandOff(told))]),
        "deny": lambda: Workflow(name="work", stages=[Check("c", lambda r: Deny(detail=told))]),
        "output": lambda: Workflow(
            name="work", stages=[Verify("v", lambda c, k: Checked(True, told, value))]
        ),
    }[place]()

    run = rest(fleet, workflow)

    assert (run.status, run.reason) == ("handed_off", "handoff-required")
    assert [e for e in fleet.trace(run) if e["type"] == "lease.lost"] == []


@pytest.mark.accept("LED-01")
def test_a_receipt_survives_public_facts_that_are_no_json(fleet: Fleet) -> None:
    run = rest(fleet, looped(save(fleet, public=lambda a, r: {"k": object()})))

    assert (run.status, run.tool_calls) == ("completed", 1)
    assert [effect["attempts"] for effect in fleet.ledger.effects(run_id=run.run_id)] == [1]


def test_public_facts_do_not_replace_what_the_program_says(fleet: Fleet) -> None:
    run = rest(fleet, looped(look(fleet, public=lambda a, r: {"tool": "x", "evidence_ref": "y"})))

    verified = next(e["detail"] for e in fleet.trace(run) if e["type"] == "result.verified")
    assert verified["tool"] == "look"
    assert verified["evidence_ref"].startswith("call:")


def test_a_text_that_is_no_text_violates_the_contract(fleet: Fleet) -> None:
    bytes_for_text: Any = b"x"

    run = rest(fleet, looped(look(fleet, lambda a, c: Succeeded(1, bytes_for_text))))

    assert run.reason == "tool-failed"


# ---- budgets -------------------------------------------------------------------------------------


@pytest.mark.accept("BUD-02")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("steps", "step-budget-exhausted"),
        ("model_calls", "model-call-budget-exhausted"),
        ("tokens", "token-budget-exhausted"),
        ("cost_microusd", "cost-budget-exhausted"),
        ("output_bytes", "output-budget-exhausted"),
        ("deadline_ms", "deadline-exhausted"),
        ("expires_ms", "expired"),
        ("concurrency", "concurrency-budget-exhausted"),
    ],
)
def test_a_budget_of_zero_stops_a_run_at_once(fleet: Fleet, name: str, reason: str) -> None:
    run = rest(fleet, looped(look(fleet)), raises(AssertionError), budget={name: 0})

    assert (run.status, run.reason) == ("budget_exhausted", reason)
    assert set(run.budget_used.values()) == {0}


def test_time_without_end_is_refused(fleet: Fleet) -> None:
    """A deadline that no message could carry would stop the sweep for every run."""
    with pytest.raises(InvalidBudget, match="at most"):
        Budget(deadline_ms=2**53, expires_ms=2**53)


def test_a_limit_of_one_call_is_raised_with_permission_only(fleet: Fleet) -> None:
    fleet.workflow(looped(look(fleet)))
    longer = CallLimits(model_ms=40_000)

    with pytest.raises(InvalidBudget, match="budget:raise"):
        fleet.enqueue("work", goal="g", limits=longer)
    may = Principal("alice", frozenset({"budget:raise"}))
    assert fleet.enqueue("work", goal="g", limits=longer, principal=may)


# ---- input ---------------------------------------------------------------------------------------


#: What is neither a principal nor None, and must not be taken for nobody.
NOBODY: Final[Sequence[Any]] = (0, "", False, [], {}, 5, b"alice")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"workflow": ["work"]}, UnknownWorkflow),
        ({"limits": 5}, InvalidBudget),
        ({"limits": "x"}, InvalidBudget),
        ({"budget": {"per_tool": {"lock": 1}}}, InvalidBudget),
        ({"budget": {"per_tool": {5: 1}}}, InvalidBudget),
        *(({"principal": nobody}, InvalidRun) for nobody in NOBODY),
        *(({name: ""}, InvalidRun) for name in ("tenant", "run_id", "dedupe_key", "traceparent")),
        *(({name: 0}, InvalidRun) for name in ("tenant", "run_id", "dedupe_key", "traceparent")),
        *(({"mode": none}, InvalidRun) for none in ("", None, 0)),
        *(({"goal": none}, InvalidRun) for none in ("", None, 0)),
        ({"workflow": ""}, UnknownWorkflow),
        ({"budget": 0}, InvalidBudget),
        ({"budget": ""}, InvalidBudget),
        ({"limits": 0}, InvalidBudget),
        ({"principal": Principal("")}, InvalidRun),
        ({"principal": Principal("alice", None)}, InvalidRun),  # type: ignore[arg-type]
        ({"principal": Principal("alice", [5])}, InvalidRun),  # type: ignore[arg-type]
        ({"principal": Principal("alice", "all")}, InvalidRun),  # type: ignore[arg-type]
        ({"traceparent": "x"}, InvalidRun),
        ({"traceparent": 5}, InvalidRun),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    fleet: Fleet, options: dict[str, Any], error: type[BadInput]
) -> None:
    fleet.workflow(looped(look(fleet)))

    with pytest.raises(error):
        fleet.enqueue(**({"workflow": "work", "goal": "g"} | options))

    assert fleet.runs() == []


def test_only_who_names_nobody_is_anonymous(fleet: Fleet) -> None:
    fleet.workflow(looped(look(fleet)))

    fleet.enqueue("work", goal="g", run_id="nobody", principal=None)
    fleet.enqueue("work", goal="g", run_id="alice", principal="alice")

    subjects = [fleet.trace(run)[0]["detail"]["subject"] for run in ("nobody", "alice")]
    assert subjects == ["anonymous", "alice"]


@pytest.mark.parametrize("run_id", ["\ud800", "\0", "", "a b", ["x"], 0, 5, False, None])
def test_what_is_no_run_id_names_no_run(fleet: Fleet, run_id: Any) -> None:
    def answer(run: Any) -> object:
        return fleet.answer(run, "yes", by=OPERATOR)

    for ask in (fleet.get, fleet.trace, fleet.wait, fleet.drive, fleet.cancel, answer):
        with pytest.raises(UnknownRun) as refused:
            ask(run_id)
        assert refused.value.code == "unknown-run"


@pytest.mark.parametrize(
    "options",
    [
        *({"limit": limit} for limit in (-1, 0, None, "", True, 1.5)),
        *({"status": none} for none in ("", 0, "gone")),
        *({"workflow": none} for none in ("", 0, "\0")),
    ],
)
def test_runs_that_cannot_be_looked_up_are_not_simply_none(
    fleet: Fleet, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidQuery) as refused:
        fleet.runs(**options)
    assert refused.value.code == "invalid-query" and refused.value.field in options


@pytest.mark.parametrize("seconds", [-1, None, "", "5", True, float("nan")])
def test_nobody_waits_for_a_time_that_is_none(fleet: Fleet, seconds: Any) -> None:
    fleet.workflow(looped(look(fleet)))
    run = fleet.enqueue("work", goal="g")
    waits: list[Callable[[], object]] = [
        lambda: fleet.wait(run, timeout_s=seconds),
        lambda: fleet.wait(run, poll_s=seconds),
        lambda: fleet.drive(run, timeout_s=seconds),
        lambda: fleet.run("work", goal="g", timeout_s=seconds),
    ]
    for wait in waits:
        with pytest.raises(InvalidQuery, match="_s: give a number of seconds"):
            wait()

    assert len(fleet.runs()) == 1


@pytest.mark.parametrize(
    "url", ["http://host", "redis", "redis://host:port", "redis://host:99999", "mailto:x"]
)
def test_an_address_of_no_broker_is_refused(url: str) -> None:
    for name in ("broker_url", "redis_url"):
        with pytest.raises(InvalidSettings, match=f"HANDRAIL_{name.upper()}"):
            Settings.read(**{name: url})


def test_a_file_that_is_no_database_cannot_be_upgraded(tmp_path: Any) -> None:
    (tmp_path / "ledger.db").write_text("this is no database, but long enough to be one\n" * 100)

    with pytest.raises(DatabaseUnavailable):
        upgrade(f"sqlite:///{tmp_path / 'ledger.db'}")


# ---- definitions ---------------------------------------------------------------------------------


@pytest.mark.accept("TOL-01")
@pytest.mark.parametrize(
    "contract",
    [
        {"side_effect": None},
        {"side_effect": 5},
        {"approval": 5},
        {"guarantee": 5},
        {"input": dict},
        {"output": "x"},
        {"allow": 5},
        {"intent": "refund"},
        {"public": 5},
        {"volatile": "abc"},
        {"volatile": 5},
        {"permission": 5},
        {"version": 5},
        {"query": 5},
    ],
)
def test_a_contract_of_the_wrong_kind_is_refused(fleet: Fleet, contract: dict[str, Any]) -> None:
    with pytest.raises(InvalidDefinition, match=next(iter(contract))):
        look(fleet, **contract)


def test_what_cannot_be_called_is_no_tool_and_no_model(fleet: Fleet) -> None:
    nothing: Any = 5

    with pytest.raises(InvalidDefinition, match="function"):
        look(fleet, nothing)
    with pytest.raises(InvalidDefinition, match="function"):
        fleet.model("default", nothing)
    with pytest.raises(InvalidDefinition, match="no workflow"):
        fleet.workflow(nothing)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": 5},
        {"version": 5},
        {"version": "a@b"},
        {"version": "\0"},
        {"stages": None},
        {"stages": [5]},
        {"budget": {"steps": 1}},
        {"limits": {"model_ms": 1}},
        {"input": dict},
        {"answer": 5},
        {"answer_within_ms": "1"},
    ],
)
def test_a_workflow_of_the_wrong_kind_is_refused(fields: dict[str, Any]) -> None:
    check: Any = Check("check", lambda run: Proceed())

    with pytest.raises(InvalidDefinition):
        Workflow(**({"name": "work", "stages": [check]} | fields))


def test_a_stage_of_the_wrong_kind_is_refused(fleet: Fleet) -> None:
    nothing: Any = 5
    tool = look(fleet)

    for make in (
        lambda: AgentLoop(name="loop", actions=nothing, verify=lambda c, k: True),
        lambda: looped(tool, allowed=nothing),
        lambda: Read("read", tool, nothing),
        lambda: Check("check", nothing),
        lambda: Verify("verify", nothing),
        lambda: Confirm("confirm", nothing),
        lambda: Confirm("confirm", lambda run: nothing, expires_ms=0),
    ):
        with pytest.raises(InvalidDefinition):
            make()


@pytest.mark.parametrize(
    "word",
    [
        lambda fleet, none: fleet.answer("run", none, by=OPERATOR),
        lambda fleet, none: fleet.answer("run", "yes", by=Principal(none, roles=OPERATOR.roles)),
        lambda fleet, none: fleet.reject("an approval", by=APPROVER, reason=none),
        lambda fleet, none: fleet.approve("a token", by=APPROVER, comment=none),
        lambda fleet, none: fleet.desk.comment("a handoff", none, by=OPERATOR),
        lambda fleet, none: fleet.desk.resolve("a handoff", "failed", by=OPERATOR, reason=none),
        lambda fleet, none: fleet.desk.admit(none, ["admin"]),
    ],
)
@pytest.mark.parametrize("none", [123, None, b"no", ["yes"]])
def test_a_persons_word_that_is_no_text_is_refused_and_nothing_is_changed(
    fleet: Fleet, word: Callable[[Fleet, Any], object], none: Any
) -> None:
    with pytest.raises(InvalidWords, match=r"must be a text|is no name") as refused:
        word(fleet, none)

    assert refused.value.code == "invalid-words"
    assert fleet.runs() == [] and fleet.desk.verify_audit().entries == 0


@pytest.mark.parametrize("by", [None, 5, b"ann", ["ann"], {}])
def test_who_is_nobody_decides_nothing(fleet: Fleet, by: Any) -> None:
    acts: list[Callable[[], object]] = [
        lambda: fleet.answer("run", "yes", by=by),
        lambda: fleet.reject("an approval", by=by, reason="no"),
        lambda: fleet.approve("a token", by=by),
        lambda: fleet.desk.handoffs(by=by),
    ]
    for act in acts:
        with pytest.raises(NotAllowed) as refused:
            act()
        assert refused.value.code == "not-allowed"


@pytest.mark.parametrize(
    "wrong", [{"roles": ["operator"]}, {"roles": "operator"}, {"tenants": "t"}]
)
def test_a_principal_whose_roles_are_no_set_is_refused(fleet: Fleet, wrong: Any) -> None:
    with pytest.raises(InvalidWords, match="frozensets"):
        fleet.answer("run", "yes", by=replace(OPERATOR, **wrong))


@pytest.mark.parametrize("token", [None, 5, b"x", "", "x", "\ud800", "a.b.c", "x" * 10**6])
def test_what_is_no_token_is_no_consent(fleet: Fleet, token: Any) -> None:
    with pytest.raises(ApprovalRefused) as refused:
        fleet.approve(token, by=APPROVER)

    assert (refused.value.code, refused.value.problem) == ("approval-refused", "unbound")
