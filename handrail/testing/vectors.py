"""Runner vectors: scripted runs with one right outcome each, replayed on a virtual clock.

Each line of a file is one case: proposals, tool results, verdicts, latencies, errors and cancellations,
and the reason, state, trace and calls that must follow. The real machine is driven; only the three
operations and the clock are stand-ins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from handrail.agent import machine, trace
from handrail.agent.budget import Budget, BudgetLeft, CallLimits, Phase, call_limit, charge
from handrail.agent.canonical import Json, canonical, dumps, normal, parse_json
from handrail.agent.errors import HandrailError, InvalidBudget, NotCanonical
from handrail.agent.loop import AgentLoop, observation_of
from handrail.agent.machine import RunState, Turn
from handrail.agent.stage import (
    AskModel,
    Doubtful,
    End,
    InvokeTool,
    Proposed,
    Refused,
    Reply,
    Result,
    Stop,
    Succeeded,
    Verdict,
    Verify,
    View,
)
from handrail.agent.status import Reason
from handrail.agent.tools import (
    FOREVER,
    Approval,
    Guarantee,
    Principal,
    SideEffect,
    Tool,
    ToolContract,
)
from handrail.agent.trace import TraceEvent
from handrail.agent.workflow import Workflow

#: The events that are compared, with the keys of their detail that are.
COMPARED: Final[Mapping[str, frozenset[str]]] = {
    trace.MODEL_FAILED: frozenset({"timedOut", "cancelled"}),
    trace.PROPOSAL_RECEIVED: frozenset({"kind", "modelCalls"}),
    trace.COMPLETION_FAILED: frozenset({"timedOut", "cancelled"}),
    trace.COMPLETION_VERIFIED: frozenset({"verified"}),
    trace.TOOL_FAILED: frozenset({"tool", "sideEffect", "timedOut", "cancelled"}),
    trace.RESULT_CLASSIFIED: frozenset({"tool", "status"}),
    trace.RECONCILIATION_REQUIRED: frozenset({"tool", "trigger", "recovery"}),
    trace.STATE_TRANSITIONED: frozenset({"changed", "stateVersion", "observationCount"}),
    trace.RUN_STOPPED: frozenset(
        {"reason", "stateVersion", "remainingModelCalls", "remainingToolCalls"}
    ),
}
_OPTIONS: Final = {
    "maxSteps": "steps",
    "maxModelCalls": "model_calls",
    "maxToolCalls": "tool_calls",
    "deadlineMs": "deadline_ms",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replayed case did, in the form in which a vector states it."""

    reason: str
    answer: Json
    state: dict[str, Json]
    trace: list[dict[str, Json]]
    calls: list[dict[str, Json]]
    end_ms: int
    cancel_requested_ms: int | None


@dataclass(frozen=True, slots=True)
class Ended:
    """How one scripted call ended: its end, and the item that it returned."""

    end: End
    item: Any
    bound: bool


class ScriptEnd(Exception):
    """A call came for which the case has no item any more."""


@dataclass(slots=True)
class VirtualWorld:
    """The clock, the three operations and the wish to cancel of one case."""

    case: Mapping[str, Any]
    now_ms: int = 0
    cancelled_at: int | None = None
    calls: list[dict[str, Json]] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=lambda: {"propose": 0, "invoke": 0, "verify": 0})

    def call(self, op: str, own_ms: int, deadline_at: int, detail: dict[str, Json]) -> Ended:
        """Make one call under its time limit, move the clock and say how it ended."""
        number = self.made[op]
        self.made[op] += 1
        faults = self.case.get("faults", {}).get(op, {}).get(str(number), {})
        items = self.case[{"propose": "proposals", "invoke": "results", "verify": "verify"}[op]]
        limit, bound = call_limit(own_ms, deadline_at - self.now_ms)
        start = self.now_ms
        missing = number >= len(items)
        ends_after = 0 if missing else faults.get("latencyMs", 0)
        if not missing and faults.get("end") == "hang":
            ends_after = math.inf
        cancel_after = faults.get("cancelAfterMs", math.inf)
        first = min(ends_after, limit, cancel_after)
        self.now_ms = start + int(first)
        if first == cancel_after and self.cancelled_at is None:
            self.cancelled_at = self.now_ms
        if first == ends_after:
            throws = missing or faults.get("end") == "throw"
            end = End.RAISED if throws else End.RETURNED
        elif first == limit:
            end = End.TIMED_OUT
        else:
            end = End.CANCELLED
        self.calls.append(
            {
                "op": op,
                "call": number,
                **detail,
                "startMs": start,
                "endMs": self.now_ms,
                "end": end.value,
            }
        )
        if end in (End.RETURNED, End.RAISED):
            self.now_ms += faults.get("clockAtEndMs", 0)
            if faults.get("cancelAtEnd") and self.cancelled_at is None:
                self.cancelled_at = (
                    self.now_ms
                )  # as the runner sees it: with its next look at the clock
        return Ended(end, items[number] if end is End.RETURNED else None, bound)


def case_workflow(case: Mapping[str, Any]) -> Workflow:
    """The workflow of every vector: one agent loop with a read and a write, no approval."""

    def never(*_: Any) -> None:
        raise AssertionError("a vector's tools are scripted")

    can_query = case.get("saveDraftCanQuery", True)
    lookup = ToolContract(name="lookup", side_effect=SideEffect.READ, timeout_ms=FOREVER)
    save = ToolContract(
        name="saveDraft",
        side_effect=SideEffect.IDEMPOTENT,
        approval=Approval.NEVER,
        timeout_ms=FOREVER,
        intent=lambda arguments, run: f"vector:{run.tool_calls}",
        guarantee=Guarantee.IDEMPOTENCY_KEY,
        key_valid_for_ms=FOREVER,
        can_query=can_query,
    )
    loop = AgentLoop(
        name="loop",
        actions=(Tool(lookup, never), Tool(save, never, never if can_query else None)),
        verify=never,
        no_progress=None,
    )
    return Workflow(name="vector", stages=[loop])


def case_limits(options: Mapping[str, Any]) -> tuple[Budget, CallLimits]:
    """Read a case's options; anything missing, fractional or out of range raises `InvalidBudget`."""
    names = {*_OPTIONS, "modelTimeoutMs", "toolTimeoutMs"}
    for name in names - options.keys():
        raise InvalidBudget(name, None, "a whole number; it is missing")
    for name in options.keys() - names:
        raise InvalidBudget(name, options[name], f"one of {', '.join(sorted(names))}")
    budget = Budget().altered({ours: options[theirs] for theirs, ours in _OPTIONS.items()})
    return budget, CallLimits(model_ms=options["modelTimeoutMs"], tool_ms=options["toolTimeoutMs"])


def reply_of(item: Mapping[str, Any]) -> Reply:
    """Read a scripted tool result."""
    match item:
        case {"status": "success", "observation": str(text)}:
            return Succeeded(text, text)
        case {"status": "failed", "code": str(code), "retryable": bool(retryable)}:
            return Refused(code, retryable)
        case {"status": "unknown", "code": str(code)}:
            return Doubtful(code)
    raise NotCanonical(f"a scripted result of unknown form: {item!r}")


def replay(case: Mapping[str, Any]) -> Outcome:
    """Run one case on the machine and a virtual clock."""
    budget, limits = case_limits(case["options"])
    workflow = case_workflow(case)
    world = VirtualWorld(case, cancelled_at=0 if case.get("cancelBeforeStart") else None)
    deadline_at = budget.deadline_ms
    state = RunState(
        run_id="vector",
        tenant="vectors",
        workflow=workflow.name,
        workflow_version=workflow.version,
        goal=case["goal"],
        principal=Principal(),
        budget=budget,
        limits=limits,
        left=BudgetLeft.full(budget),
    )
    seen: list[TraceEvent] = []

    def view() -> View:
        return state.view(
            remaining_ms=deadline_at - world.now_ms, cancelled=world.cancelled_at is not None
        )

    def apply(turn: Turn) -> Turn:
        nonlocal state
        state = turn.state
        seen.extend(turn.events)
        return turn

    turn = apply(machine.start(workflow, state, view()))
    while not isinstance(turn.command, Stop):
        phase = machine.phase_of(workflow, state)
        if isinstance(turn.command, AskModel):
            now = view()
            left = charge(state.left, phase, cancelled=now.cancelled, remaining_ms=now.remaining_ms)
            if isinstance(left, Reason):
                turn = apply(machine.stop(state, left, now))
                break
            state = replace(machine.claimed(state, phase, seen), left=left)
        turn = apply(_execute(workflow, state, turn.command, world, deadline_at))
        if isinstance(turn.command, AskModel):
            state = replace(state, left=state.left.settled())
    assert state.reason is not None
    return Outcome(
        reason=state.reason.value,
        answer=state.answer,
        state={
            "version": state.state_version,
            "step": state.step,
            "modelCalls": state.model_calls,
            "toolCalls": state.tool_calls,
            "observations": [o.text for o in state.observations],
        },
        trace=list(compared(seen)),
        calls=world.calls,
        end_ms=world.now_ms,
        cancel_requested_ms=world.cancelled_at,
    )


def _execute(
    workflow: Workflow, state: RunState, command: object, world: VirtualWorld, deadline_at: int
) -> Turn:
    saw: dict[str, Json] = {
        "saw": {"version": state.state_version, "observations": state.observation_count}
    }
    event: Proposed | Result | Verdict
    match command:
        case AskModel():
            done = world.call("propose", state.limits.model_ms, deadline_at, saw)
            event = Proposed(done.end, done.item, done.bound)
        case Verify(claim, timeout_ms):
            done = world.call("verify", timeout_ms, deadline_at, {**saw, "answer": claim})
            event = Verdict(done.end, done.item is True, bound=done.bound)
        case InvokeTool() as call:
            state = replace(state, left=state.left.tool_call_used(call.tool))
            detail: dict[str, Json] = {"tool": call.tool, "arguments": dict(call.arguments)}
            done = world.call("invoke", call.timeout_ms, deadline_at, detail)
            event = _result(workflow, state, call, done)
        case _:
            raise AssertionError(f"a vector never does {type(command).__name__}")
    now = state.view(
        remaining_ms=deadline_at - world.now_ms, cancelled=world.cancelled_at is not None
    )
    return machine.on(workflow, state, event, now)


def _result(workflow: Workflow, state: RunState, call: InvokeTool, done: Ended) -> Result:
    if done.end is not End.RETURNED:
        return Result(done.end, bound=done.bound, settled=False)
    reply = reply_of(done.item)
    known = False
    if not isinstance(reply, Doubtful):
        contract = workflow.tool_named(call.tool).contract
        told = observation_of(contract, reply).digest
        known = any(o.digest == told for o in state.observations)
    return Result(done.end, reply, done.bound, known, settled=not isinstance(reply, Doubtful))


def compared(events: list[TraceEvent]) -> Iterator[dict[str, Json]]:
    """Keep what a vector states of a trace."""
    for event in events:
        keys = COMPARED.get(event.type)
        if keys is not None:
            detail = {k: v for k, v in event.detail.items() if k in keys}
            yield {"type": event.type, "step": event.step, "detail": detail}


def mismatches(vector: Mapping[str, Any], outcome: Outcome) -> list[str]:
    """Compare an outcome with what a vector expects, grade by grade; one line for each difference."""
    want = vector["expected"]
    got: dict[str, Any] = {
        "reason": outcome.reason,
        "answer": outcome.answer,
        "state": outcome.state,
        "trace": outcome.trace,
        "calls": outcome.calls,
        "endMs": outcome.end_ms,
        "cancelRequestedMs": outcome.cancel_requested_ms,
    }
    expected = {**want, "trace": _with_own_triggers(want["trace"], outcome.trace)}
    return [
        f"{vector['id']}: grade {grade}: {key}: expected {_short(expected[key])}, got {_short(got[key])}"
        for grade, keys in enumerate(
            (("reason", "answer"), ("state",), ("trace",), ("calls", "endMs", "cancelRequestedMs")),
            start=1,
        )
        for key in keys
        if canonical(got[key]) != canonical(expected[key])
    ]


def _with_own_triggers(want: list[Any], got: list[dict[str, Json]]) -> list[Any]:
    """A reconciliation that the tool itself asked for may name a trigger of our own."""
    if len(want) != len(got):
        return want
    out = []
    for expected, event in zip(want, got, strict=True):
        ours = event["detail"]
        assert isinstance(ours, dict)
        if (
            expected["type"] == trace.RECONCILIATION_REQUIRED
            and "trigger" not in expected["detail"]
        ):
            expected = {
                **expected,
                "detail": {**expected["detail"], "trigger": ours.get("trigger")},
            }
        out.append(expected)
    return out


def _short(value: object) -> str:
    text = dumps(normal(value))
    return text if len(text) <= 600 else f"{text[:600]}..."


def load(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file of vectors: one JSON object a line, numbers exact. Raises `NotCanonical` with the line."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        if line.strip():
            try:
                value = parse_json(line)
            except NotCanonical as error:
                raise NotCanonical(f"{path.name}, line {number}: {error.problem}") from None
            if not isinstance(value, dict):
                raise NotCanonical(f"{path.name}, line {number}: not an object")
            yield value


def run_file(path: Path) -> tuple[int, list[str]]:
    """Replay a file; return how many passed, and one line for each mismatch."""
    passed, lines = 0, []
    for vector in load(path):
        try:
            found = mismatches(vector, replay(vector["case"]))
        except (HandrailError, KeyError) as error:
            found = [f"{vector.get('id', '?')}: cannot be replayed: {error}"]
        passed += not found
        lines += found[:1] if len(found) == 1 else ["; ".join(found)] if found else []
    return passed, lines


__all__ = ["Outcome", "Phase", "load", "mismatches", "replay", "run_file"]
