"""The runner, probe by probe: on the real step shell and ledger, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from handrail import AgentLoop, Fleet, ToolCall, ToolUnclear, Workflow
from handrail.agent.budget import Budget, CallLimits
from handrail.agent.protocol import Locked
from handrail.agent.tools import FOREVER, Tool
from handrail.errors import BadInput, InvalidBudget
from handrail.gateway.model import RAW, ModelEvent, ModelRequest, Scripted, Stop
from handrail.gateway.model import ToolCall as ModelCall
from handrail.ledger.ledger import Ruled
from handrail.ledger.lock import LocalLock, Refusal
from handrail.runs import Run
from handrail.testing.vectors import COMPARED
from handrail.testing.virtual_fleet import VirtualFleet
from tests.acceptance import DOCUMENT, ROOT, criteria
from tests.control import ask, claim, details

LOOKUP: Final = ask("lookup", q=1)
SAVE: Final = ask("save", id=1)
DONE: Final = claim("done")


class Desk:
    """A virtual fleet with one loop over a read and a write, and a check of claims."""

    def __init__(self, virtual: VirtualFleet) -> None:
        self.virtual, self.fleet, self.loop = virtual, virtual.fleet, virtual.loop
        self.calls: list[str] = []
        self.answers: Callable[..., Any] = lambda call: "done"
        self.verdict: Callable[..., Any] = lambda call: True
        self.tools = (
            self.fleet.tool("lookup", side_effect="read", timeout_ms=FOREVER)(self.work),
            self.save_tool("save"),
        )
        loop = AgentLoop(name="loop", actions=self.tools, verify=self.check, no_progress=None)
        self.fleet.workflow(
            Workflow(
                name="task",
                stages=[loop],
                budget=Budget(steps=9, model_calls=9, tool_calls=9, deadline_ms=10_000),
                limits=CallLimits(model_ms=100, tool_ms=100),
            )
        )

    def save_tool(self, name: str, *, query: Callable[..., Any] | None = lambda *_: None) -> Tool:
        declare = self.fleet.tool(
            name,
            side_effect="idempotent",
            approval="never",
            intent=lambda arguments, run: f"draft:{arguments['id']}",
            guarantee="idempotency-key",
            key_valid_for_ms=FOREVER,
            timeout_ms=FOREVER,
            query=query,
            takeover="operations",
        )
        return declare(self.work)

    async def work(self, arguments: dict[str, Any], call: ToolCall) -> Any:
        self.calls.append(call.tool)
        return await self.awaited(self.answers(call))

    async def check(self, answer: Any, call: ToolCall) -> Any:
        self.calls.append("check")
        return await self.awaited(self.verdict(call))

    async def awaited(self, found: Any) -> Any:
        return await found if asyncio.iscoroutine(found) else found

    def model(self, *proposals: Any) -> Scripted:
        model = Scripted(proposals)
        self.fleet.model("default", model)
        return model

    def run(self, *proposals: Any, **options: Any) -> Run:
        if proposals:
            self.model(*proposals)
        return self.virtual.run("task", goal="any", **options)

    def cancel_running(self) -> None:
        """Wish the run that is being worked on to be cancelled."""
        [run] = [run for run in self.fleet.runs() if not run.ended]
        self.virtual.cancel(run.run_id)

    def runner_events(self, run: Run) -> list[str]:
        return [e["type"] for e in self.fleet.trace(run) if e["type"] in COMPARED]


async def for_ever() -> Any:
    await asyncio.Event().wait()


@pytest.fixture
def desk() -> Iterator[Desk]:
    with VirtualFleet() as virtual:
        yield Desk(virtual)
        assert virtual.unhandled == []


# ---- the probes ----------------------------------------------------------------------------------


@pytest.mark.accept("RUN-03")
def test_a_lookup_that_tells_something_new_may_be_repeated(desk: Desk) -> None:
    told = iter(["first", "second"])
    desk.answers = lambda call: next(told)
    run = desk.run(LOOKUP, LOOKUP, DONE)

    assert (run.reason, run.version, run.tool_calls) == ("completed", 2, 2)
    assert run.observations == ("first", "second")


@pytest.mark.accept("RUN-04")
def test_a_lookup_that_tells_the_same_is_refused_the_third_time(desk: Desk) -> None:
    run = desk.run(LOOKUP, LOOKUP, LOOKUP)

    assert (run.reason, run.version, run.tool_calls) == ("repeated-proposal", 1, 2)
    assert desk.calls == ["lookup", "lookup"]


@pytest.mark.accept("RUN-05")
def test_a_model_that_raises_fails_the_run(desk: Desk) -> None:
    async def raises(observation: Any) -> Any:
        raise RuntimeError("the provider is away")

    desk.fleet.model("default", raises)
    run = desk.run()

    assert run.reason == "model-failed"
    trace = desk.fleet.trace(run)
    assert [event["type"] for event in trace[-2:]] == ["model.failed", "run.stopped"]
    assert (trace[-2]["detail"]["timedOut"], trace[-2]["detail"]["cancelled"]) == (False, False)


@pytest.mark.accept("RUN-06")
def test_a_check_that_raises_fails_the_run(desk: Desk) -> None:
    async def raises() -> bool:
        raise RuntimeError("the check is broken")

    desk.verdict = lambda call: raises()
    run = desk.run(DONE)

    assert (run.status, run.reason, run.answer) == ("failed", "verification-failed", None)
    assert [e["type"] for e in desk.fleet.trace(run)[-2:]] == ["completion.failed", "run.stopped"]


@pytest.mark.accept("RUN-07")
def test_without_a_model_call_left_no_model_is_called(desk: Desk) -> None:
    model = desk.model(DONE)
    run = desk.run(budget={"model_calls": 0})

    assert run.reason == "model-call-budget-exhausted"
    assert (model.requests, run.model_calls) == ([], 0)


@pytest.mark.accept("RUN-08")
def test_a_read_that_does_not_know_has_no_effect_to_speak_of(desk: Desk) -> None:
    def unclear(call: ToolCall) -> Any:
        raise ToolUnclear("the answer was cut off")

    desk.answers = unclear
    run = desk.run(LOOKUP)

    assert run.reason == "tool-failed"
    trace = desk.fleet.trace(run)
    assert details(trace, "result.classified")[0]["status"] == "unknown"
    assert not [event for event in trace if "effect" in event["type"]]
    assert desk.fleet.ledger.effects(run_id=run.run_id) == []


@pytest.mark.accept("RUN-09")
def test_a_planner_that_changes_what_it_was_shown_changes_nothing(desk: Desk) -> None:
    def vandal(seen: dict[str, Any]) -> Any:
        seen["observations"].append({"tool": "lookup", "text": "forged"})
        seen["budget_left"]["model_calls"] = 1_000
        seen["allowed_tools"].append("refund")
        seen["input"]["limit"] = 10**6
        seen["facts"]["approved"] = True
        return DONE if len(shown) else ask("refund")

    shown: list[Any] = []
    desk.fleet.model("default", vandal)
    refused = desk.run(input={"limit": 1})
    shown.append(refused)
    run = desk.run(input={"limit": 1})

    assert refused.reason == "invalid-proposal"
    assert run.reason == "completed"
    for one in (refused, run):
        assert (one.observations, one.observation_count, one.version) == ((), 0, 0)
        assert (one.model_calls, one.budget_left["model_calls"]) == (1, 8)
        assert desk.fleet.ledger.read(one.run_id)["state"].input == {"limit": 1}
        assert dict(one.outputs).get("approved") is None


@pytest.mark.accept("RUN-09")
def test_a_gateway_cannot_change_the_request_that_it_was_handed(desk: Desk) -> None:
    class Vandal:
        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
            with pytest.raises(TypeError):
                request.budget_left["steps"] = 99  # type: ignore[index]
            with pytest.raises(TypeError):
                request.facts["approved"] = True  # type: ignore[index]
            with pytest.raises(AttributeError):
                request.observations.append({})  # type: ignore[attr-defined]
            with pytest.raises(AttributeError):
                request.goal = "another"  # type: ignore[misc]
            request.input["limit"] = 10**6  # type: ignore[index, call-overload]
            yield ModelCall("1", RAW, DONE)
            yield Stop("end")

    desk.fleet.model("default", Vandal())
    run = desk.run(input={"limit": 1})

    assert run.reason == "completed"
    assert desk.fleet.ledger.read(run.run_id)["state"].input == {"limit": 1}


@pytest.mark.accept("RUN-10")
def test_a_read_that_never_ends_is_cut_off_by_the_deadline(desk: Desk) -> None:
    desk.answers = lambda call: for_ever()
    run = desk.run(LOOKUP, budget={"deadline_ms": 10})

    assert (run.status, run.reason) == ("budget_exhausted", "deadline-exhausted")
    assert (desk.calls, desk.loop.now_ms) == (["lookup"], 10)


@pytest.mark.accept("RUN-11")
def test_a_write_that_does_not_know_is_an_unknown_effect(desk: Desk) -> None:
    def unclear(call: ToolCall) -> Any:
        raise ToolUnclear("the answer was cut off")

    desk.answers = unclear
    run = desk.run(SAVE)

    assert (run.status, run.reason) == ("reconciling", "unknown-effect")
    [required] = details(desk.fleet.trace(run), "effect.reconciliation-required")
    assert required == {"tool": "save", "trigger": "reported", "recovery": "query"}


@pytest.mark.accept("RUN-12")
def test_a_write_that_never_ends_is_an_unknown_effect(desk: Desk) -> None:
    desk.answers = lambda call: for_ever()
    run = desk.run(SAVE, budget={"deadline_ms": 100}, limits={"tool_ms": 5})

    assert (run.status, run.reason) == ("reconciling", "unknown-effect")
    [required] = details(desk.fleet.trace(run), "effect.reconciliation-required")
    assert required["trigger"] == "timeout"
    assert (desk.calls, desk.loop.now_ms) == (["save"], 5)


@pytest.mark.accept("RUN-12")
def test_a_write_that_the_deadline_cuts_off_is_an_unknown_effect_too(desk: Desk) -> None:
    desk.answers = lambda call: for_ever()
    run = desk.run(SAVE, budget={"deadline_ms": 5})

    assert (run.status, run.reason) == ("reconciling", "unknown-effect")
    assert desk.loop.now_ms == 5


@pytest.mark.accept("RUN-13")
def test_cancellation_during_a_write_leaves_an_unknown_effect(desk: Desk) -> None:
    def cancelled(call: ToolCall) -> Any:
        desk.loop.call_later(0.001, desk.cancel_running)
        return for_ever()

    desk.answers = cancelled
    run = desk.run(SAVE)

    assert (run.status, run.reason) == ("reconciling", "unknown-effect")
    [required] = details(desk.fleet.trace(run), "effect.reconciliation-required")
    assert required["trigger"] == "cancellation"
    assert desk.loop.now_ms == 1


@pytest.mark.accept("RUN-14")
def test_cancellation_during_a_read_cancels_the_run(desk: Desk) -> None:
    def cancelled(call: ToolCall) -> Any:
        desk.loop.call_later(0.001, desk.cancel_running)
        return for_ever()

    desk.answers = cancelled
    run = desk.run(LOOKUP)

    assert (run.status, run.reason) == ("cancelled", "cancelled")
    assert desk.loop.now_ms == 1
    assert details(desk.fleet.trace(run), "tool.failed")[0]["cancelled"] is True


@pytest.mark.accept("RUN-15")
def test_a_run_that_is_cancelled_before_its_start_calls_no_model(desk: Desk) -> None:
    model = desk.model(DONE)
    run_id = desk.fleet.enqueue("task", goal="any")
    desk.virtual.cancel(run_id)

    run = desk.virtual.drive(run_id)

    assert (run.status, run.reason, run.model_calls) == ("cancelled", "cancelled", 0)
    assert model.requests == []


# ---- one attempt ---------------------------------------------------------------------------------


class Provider:
    """A fake provider that counts what it would bill, and answers as it is told."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.billed = 0

    async def answer(self, value: Any) -> Any:
        self.billed += 1
        if self.how == "raises":
            raise ConnectionResetError
        if self.how == "hangs":
            await for_ever()
        return value


@pytest.mark.accept("RUN-19")
@pytest.mark.parametrize("how", ["returns", "raises", "hangs"])
@pytest.mark.parametrize("adapter", ["model", "read", "write", "check"])
def test_a_call_of_an_adapter_is_exactly_one_billable_attempt(
    adapter: str, how: str, desk: Desk
) -> None:
    provider = Provider(how)
    if adapter == "model":
        desk.fleet.model("default", lambda seen: provider.answer(ask("refund")))
        run = desk.run()
        assert run.model_calls == 1
    elif adapter == "check":
        desk.verdict = lambda call: provider.answer(True)
        run = desk.run(DONE)
    else:
        desk.answers = lambda call: provider.answer("found")
        run = desk.run({"read": LOOKUP, "write": SAVE}[adapter], ask("refund"))
        assert run.tool_calls == 1

    assert provider.billed == 1


# ---- adapters that misbehave ---------------------------------------------------------------------


def raises_at_the_abort() -> Any:
    async def work() -> Any:
        try:
            await for_ever()
        except asyncio.CancelledError:
            raise ValueError("I do not like to be told to stop") from None

    return work()


def returns_late() -> Any:
    async def work() -> Any:
        try:
            await for_ever()
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)
        return "much too late"

    return work()


def raises_late() -> Any:
    async def work() -> Any:
        try:
            await for_ever()
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)
        raise ValueError("much too late")

    return work()


MISBEHAVIOURS = [raises_at_the_abort, returns_late, raises_late]
#: What cuts the call off, for each adapter: the run's reason where it was a time-out, where the
#: deadline was the limit, and where it was a cancellation.
CUT_OFF: Final = {
    "model": ("model-failed", "deadline-exhausted", "cancelled"),
    "read": ("tool-failed", "deadline-exhausted", "cancelled"),
    "write": ("unknown-effect", "unknown-effect", "unknown-effect"),
    "check": ("verification-failed", "deadline-exhausted", "cancelled"),
}
FAILED: Final = {
    "model": "model.failed", "read": "tool.failed", "write": "tool.failed",
    "check": "completion.failed",
}  # fmt: skip


def with_adapter(desk: Desk, adapter: str, behave: Callable[[], Any], **options: Any) -> Run:
    """Run a task in which one adapter behaves like this."""
    if adapter == "model":
        desk.fleet.model("default", lambda seen: behave())
        return desk.run(**options)
    if adapter == "check":
        desk.verdict = lambda call: behave()
        return desk.run(DONE, **options)
    desk.answers = lambda call: behave()
    return desk.run({"read": LOOKUP, "write": SAVE}[adapter], DONE, **options)


@pytest.mark.accept("RUN-20")
@pytest.mark.parametrize("misbehaves", MISBEHAVIOURS)
@pytest.mark.parametrize("cause", ["timeout", "deadline", "cancellation"])
@pytest.mark.parametrize("adapter", CUT_OFF)
def test_what_cut_a_call_off_decides_and_not_what_the_adapter_makes_of_it(
    adapter: str, cause: str, misbehaves: Callable[[], Any], desk: Desk
) -> None:
    def behave() -> Any:
        if cause == "cancellation":
            desk.loop.call_later(0.030, desk.cancel_running)
        return misbehaves()

    budget = {"deadline_ms": 40} if cause == "deadline" else {}
    run = with_adapter(desk, adapter, behave, budget=budget)
    stopped = desk.fleet.get(run.run_id)
    ended_ms = desk.loop.now_ms

    expected = dict(zip(("timeout", "deadline", "cancellation"), CUT_OFF[adapter], strict=True))
    assert run.reason == expected[cause]
    [failed] = details(desk.fleet.trace(run), FAILED[adapter])
    assert failed["timedOut"] is (cause != "cancellation")
    assert failed["cancelled"] is (cause == "cancellation")
    assert ended_ms == {"timeout": 100, "deadline": 40, "cancellation": 30}[cause]

    desk.loop.run_until_complete(asyncio.sleep(2))  # the late value or error arrives meanwhile
    gc.collect()  # an error that nobody has retrieved says so now, which the fixture looks at
    later = desk.fleet.get(run.run_id)
    if adapter != "write":  # of a write it is evidence, which settles the doubt
        assert (later.status, later.reason) == (stopped.status, stopped.reason)
        assert len(desk.fleet.trace(run)) == len(desk.fleet.trace(stopped))
    assert "much too late" not in json.dumps(later.to_json())
    assert (later.observations, later.answer, later.version) == ((), None, 0)


def raises_at_once() -> Any:
    raise ValueError("before anything was awaited")


def ends_the_process() -> Any:
    raise SystemExit(3)


@pytest.mark.accept("RUN-20")
@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("raises", [raises_at_once, ends_the_process])
@pytest.mark.parametrize("adapter", CUT_OFF)
def test_an_adapter_that_raises_before_it_awaits_anything_fails_its_call_alone(
    adapter: str, raises: Callable[[], Any], cancelled: bool, desk: Desk
) -> None:
    def behave() -> Any:
        if cancelled:
            desk.cancel_running()
        return raises()

    run = with_adapter(desk, adapter, behave)

    failure = "unknown-effect" if adapter == "write" else CUT_OFF[adapter][0]
    gc.collect()
    assert run.reason == (CUT_OFF[adapter][2] if cancelled else failure)
    [failed] = details(desk.fleet.trace(run), FAILED[adapter])
    assert (failed["timedOut"], failed["cancelled"]) == (False, cancelled)


@pytest.mark.accept("RUN-20")
def test_adapters_of_the_wrong_shape_fail_their_call_alone(desk: Desk) -> None:
    class NoStream:
        def stream(self, request: ModelRequest) -> Any:
            return None

    class RaisesAtTheCall:
        def stream(self, request: ModelRequest) -> Any:
            raise ValueError

    @desk.fleet.tool("odd", side_effect="read")
    async def odd(arguments: dict[str, Any]) -> str:  # it takes no call
        return "found"

    def lazy(claim: Any, call: ToolCall) -> Any:
        return for_ever()  # a plain function that returns what is to be awaited

    loop = AgentLoop(name="loop", actions=(odd,), verify=lazy)
    desk.fleet.workflow(Workflow(name="odd", stages=[loop]))
    for model in (NoStream(), RaisesAtTheCall()):
        desk.fleet.model("default", model)
        assert desk.run().reason == "model-failed"
    desk.model(ask("odd"))
    assert desk.virtual.run("odd", goal="any").reason == "tool-failed"


# ---- cancellation on the way to a write ----------------------------------------------------------


def halted(desk: Desk, run: Run, *, tool_calls: int) -> None:
    """What must hold where a write was not sent although it was proposed."""
    assert (run.status, run.reason) == ("cancelled", "cancelled")
    assert (desk.calls, run.tool_calls) == ([], tool_calls)
    assert not [e for e in desk.fleet.trace(run) if e["type"].startswith("effect.")]
    effects = desk.fleet.ledger.effects(run_id=run.run_id)
    assert {effect["status"] for effect in effects} <= {"planned", "absent"}
    assert desk.runner_events(run)[-1] == "run.stopped"


class LockThatWaits(LocalLock):
    """A lock whose holder finds the world changed when it has got it."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] = lambda: None

    def acquire(self, effect_id: str, *, ttl_ms: int) -> str | Refusal:
        token = super().acquire(effect_id, ttl_ms=ttl_ms)
        self.meanwhile()
        return token


@pytest.mark.accept("RUN-21")
@pytest.mark.parametrize("signalled", [True, False])
def test_a_wish_that_comes_with_the_proposal_keeps_the_write_from_being_sent(
    signalled: bool, desk: Desk
) -> None:
    """With or without the signal: the ledger's row is enough."""

    def cancels(seen: Any) -> Any:
        [run] = desk.fleet.runs()
        (desk.virtual if signalled else desk.fleet).cancel(run.run_id)
        return SAVE

    desk.fleet.model("default", cancels)
    run = desk.run()

    halted(desk, run, tool_calls=0)
    assert desk.runner_events(run) == ["proposal.received", "run.stopped"]


@pytest.mark.accept("RUN-21")
@pytest.mark.parametrize("signalled", [True, False])
def test_a_wish_that_comes_before_the_dispatch_is_committed_keeps_it_from_being_sent(
    signalled: bool,
) -> None:
    lock = LockThatWaits()
    with VirtualFleet(lock=lock) as virtual:
        desk = Desk(virtual)
        canceller = virtual if signalled else virtual.fleet
        lock.meanwhile = lambda: canceller.cancel(virtual.fleet.runs()[0].run_id)
        run = desk.run(SAVE)

        halted(desk, run, tool_calls=0)
        assert details(desk.fleet.trace(run), "tool.started") == []


@pytest.mark.accept("RUN-21")
@pytest.mark.parametrize("signalled", [True, False])
def test_a_wish_that_comes_between_dispatch_and_call_keeps_it_from_being_sent_but_is_paid(
    signalled: bool, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = desk.fleet.ledger.rule
    dispatched: list[object] = []

    def rules(run_id: str, decide: Callable[[Locked], Any], **options: Any) -> Ruled:
        ruled = rule(run_id, decide, **options)
        if ruled.ruling is not None and ruled.ruling.charges_tool and not dispatched:
            dispatched.append(ruled.ruling.effect)
            (desk.virtual if signalled else desk.fleet).cancel(run_id)
        return ruled

    monkeypatch.setattr(desk.fleet.ledger, "rule", rules)
    run = desk.run(SAVE)

    assert len(dispatched) == 1
    halted(desk, run, tool_calls=1)
    assert len(details(desk.fleet.trace(run), "tool.started")) == 1


@pytest.mark.accept("RUN-22")
@pytest.mark.parametrize("proposal", [LOOKUP, claim("not yet")])
def test_a_wish_that_comes_with_the_last_step_cancels_the_run(proposal: Any, desk: Desk) -> None:
    def cancels(call: ToolCall) -> Any:
        desk.cancel_running()
        return False if call.tool == "verify" else "found"

    desk.answers = desk.verdict = cancels
    run = desk.run(proposal, DONE, budget={"steps": 1})

    assert (run.status, run.reason) == ("cancelled", "cancelled")
    assert run.step == 1  # the last step was finished


@pytest.mark.accept("RUN-22")
def test_a_wish_that_comes_right_after_the_last_step_cancels_the_run(desk: Desk) -> None:
    desk.model(LOOKUP, DONE)
    run_id = desk.fleet.enqueue("task", goal="any", budget={"steps": 1})
    desk.virtual.step(run_id)

    desk.fleet.cancel(run_id)

    assert desk.virtual.drive(run_id).reason == "cancelled"


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.accept("RUN-23")
@pytest.mark.parametrize(
    "options",
    [
        {"limits": {"model_ms": 0}},  # a time limit below 1 ms
        {"limits": {"tool_ms": 0}},
        {"limits": {"tool_ms": 0.5}},
        {"limits": {"tool_ms": -1}},
        {"budget": {"steps": -1}},  # a negative budget
        {"budget": {"model_calls": -1}},
        {"budget": {"tool_calls": -1}},
        {"budget": {"deadline_ms": -1}},
        {"budget": {"steps": 1.5}},  # a fraction
        {"budget": {"cost_microusd": 0.4}},
        {"limits": {"model_ms": 1.5}},
        {"budget": {"steps": None}},  # a missing value
        {"limits": {"model_ms": None}},
        {"limits": {"tool_ms": None}},
        {"budget": {"deadline_ms": None}},
        {"budget": {"steps": "3"}},
        {"budget": {"steps": True}},
        {"budget": {"steps": float("nan")}},
        {"budget": {"stepz": 3}},
        {"limits": {"toolz_ms": 3}},
        {"budget": {"per_tool": {"lookup": -1}}},
        {"budget": {"per_tool": {"lookup": 0.5}}},
        {"budget": 7},
    ],
    ids=str,
)
def test_a_run_with_invalid_options_is_refused_before_it_starts(
    options: dict[str, Any], desk: Desk
) -> None:
    model = desk.model(DONE)

    with pytest.raises(InvalidBudget) as refused:
        desk.fleet.enqueue("task", goal="any", **options)

    assert isinstance(refused.value, BadInput)
    assert refused.value.code == "invalid-budget"
    assert (desk.fleet.runs(), model.requests) == ([], [])


@pytest.mark.accept("RUN-23")
def test_zero_is_a_budget_and_one_millisecond_a_time_limit(desk: Desk) -> None:
    limits = CallLimits(model_ms=1, tool_ms=1)
    run = desk.run(DONE, limits=limits, budget={"tool_calls": 0})

    assert run.reason == "completed"


# ---- reconciliation and outcome ------------------------------------------------------------------


@pytest.mark.accept("RUN-25")
@pytest.mark.parametrize("trigger", ["timeout", "exception", "reported", "cancellation"])
@pytest.mark.parametrize("queried", [True, False])
def test_who_finds_out_depends_on_whether_the_effect_can_be_queried(
    queried: bool, trigger: str, desk: Desk
) -> None:
    tool = desk.save_tool("pay", query=(lambda *_: None) if queried else None)
    loop = AgentLoop(name="loop", actions=(tool,), verify=desk.check)
    desk.fleet.workflow(Workflow(name="payment", stages=[loop]))

    def fails(call: ToolCall) -> Any:
        if trigger == "exception":
            raise ConnectionResetError
        if trigger == "reported":
            raise ToolUnclear("no answer")
        if trigger == "cancellation":
            desk.loop.call_later(0.001, desk.cancel_running)
        return for_ever()

    desk.answers = fails
    desk.model(ask("pay", id=1))
    run = desk.virtual.run("payment", goal="any")

    assert run.reason == "unknown-effect"
    assert details(desk.fleet.trace(run), "effect.reconciliation-required") == [
        {"tool": "pay", "trigger": trigger, "recovery": "query" if queried else "human"}
    ]


@pytest.mark.accept("RUN-26")
def test_the_outcome_of_a_run_is_whole(desk: Desk) -> None:
    run = desk.run(LOOKUP, claim({"found": ["a"]}))

    assert (run.reason, run.answer) == ("completed", {"found": ["a"]})
    assert run.state == {
        "runId": run.run_id,
        "goal": "any",
        "observations": ["done"],
        "version": 1,
        "step": 1,
        "modelCalls": 2,
        "toolCalls": 1,
    }
    trace = desk.fleet.trace(run)
    assert trace
    for event in trace:
        assert isinstance(event["type"], str)
        assert isinstance(event["step"], int)
        assert isinstance(event["detail"], dict)


@pytest.mark.accept("RUN-26")
@pytest.mark.parametrize(
    ("proposals", "reason"),
    [
        ([ask("refund")], "invalid-proposal"),
        ([claim("not verified"), ask("refund")], "invalid-proposal"),
        ([{"kind": "clarify", "question": "Which?"}], "clarification-required"),
        ([claim("not verified")], "step-budget-exhausted"),
    ],
)
def test_there_is_an_answer_only_if_the_run_was_completed(
    proposals: list[Any], reason: str, desk: Desk
) -> None:
    desk.verdict = lambda call: False
    run = desk.run(*proposals, budget={"steps": len(proposals)})

    assert (run.reason, run.answer) == (reason, None)


@pytest.mark.accept("RUN-26")
def test_changing_what_was_returned_changes_nothing_inside(desk: Desk) -> None:
    run = desk.run(LOOKUP, claim({"found": ["a"]}))
    before = (desk.fleet.get(run.run_id).to_json(), desk.fleet.trace(run))

    answer, outputs, as_json = run.answer, run.outputs, run.to_json()
    assert isinstance(answer, dict)
    answer["found"] = "forged"
    run.state["observations"].append("forged")
    run.interim.clear()
    as_json["observations"].append("forged")
    as_json["budget_left"]["steps"] = 99
    if isinstance(outputs, dict):
        outputs["loop"] = "forged"
    trace = desk.fleet.trace(run)
    trace[-1]["detail"]["reason"] = "forged"
    trace.clear()

    assert (desk.fleet.get(run.run_id).to_json(), desk.fleet.trace(run)) == before
    with pytest.raises(AttributeError):
        run.status = "completed"  # type: ignore[misc]


# ---- what is around the runner -------------------------------------------------------------------

#: What a minimal runner leaves out, the criteria that cover it, and a word that they must have.
LEFT_OUT: Final = {
    "tool schemas": ("NXT-01", "contract"),
    "capabilities": ("NXT-06", "capability"),
    "stable intent key": ("LED-05", "intent key"),
    "durable run state": ("FLT-02", "last committed state"),
    "concurrent versions": ("NXT-07", "state version"),
    "long-term memory": ("NXT-05", "long-term memory"),
    "side-effect reconciliation": ("LED-04", "query first"),
}


@pytest.mark.accept("RUN-27")
@pytest.mark.parametrize("part", LEFT_OUT)
def test_what_a_minimal_runner_leaves_out_is_covered_by_a_criterion(part: str) -> None:
    known = criteria(DOCUMENT.read_text("utf8"))
    id, word = LEFT_OUT[part]

    assert id[:3] in ("NXT", "FLT", "LED")
    assert word in known[id].text


@pytest.mark.accept("RUN-28")
@pytest.mark.timeout(300)
def test_the_runner_passes_strict_static_type_checking() -> None:
    folders = [str(ROOT / "handrail" / part) for part in ("agent", "tasks")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.accept("RUN-28")
def test_one_command_checks_the_types_and_executes_the_probes() -> None:
    """And none of the probes is left out of the tests that it executes."""
    ci, makefile = (ROOT / ".ci" / "run").read_text(), (ROOT / "Makefile").read_text()
    steps = re.findall(r"^ *step make (\S+)", ci, re.MULTILINE)
    recipes = dict(re.findall(r"^(\w+):[^\n]*\n((?:\t[^\n]*\n)+)", makefile, re.MULTILINE))

    assert "set -euo pipefail" in ci
    assert {"test", "lint"} <= set(steps)
    assert re.search(r"\$\(BIN\)/mypy$", recipes["lint"], re.MULTILINE)
    assert re.search(r"\$\(BIN\)/pytest \$\(PYTEST_ARGS\)$", recipes["test"], re.MULTILINE)
    assert re.search(r"^PYTEST_ARGS \?= -n \d+$", makefile, re.MULTILINE)  # nothing is deselected
    marked = "".join(file.read_text("utf8") for file in Path(__file__).parent.glob("test_*.py"))
    probes = {f"RUN-{number:02}" for number in range(2, 16)}
    assert probes <= set(re.findall(r'"(RUN-\d\d)"', marked))


def test_a_whole_run_needs_no_virtual_time() -> None:
    """The same on the real clock, with plain functions, as a notebook would have it."""
    fleet = Fleet(database_url="sqlite://")

    @fleet.tool(side_effect="read")
    def lookup(arguments: dict[str, Any], call: ToolCall) -> str:
        return "found"

    fleet.model("default", Scripted([LOOKUP, DONE]))
    loop = AgentLoop(name="loop", actions=(lookup,), verify=lambda answer, call: answer == "done")
    fleet.workflow(Workflow(name="task", stages=[loop]))
    run = fleet.run("task", goal="any")

    assert (run.status, run.answer, run.version) == ("completed", "done", 1)
    fleet.close()
