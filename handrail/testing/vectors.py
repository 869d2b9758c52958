"""Runner vectors: scripted runs with one right outcome each, replayed on a virtual clock.

A line of a file is one case: proposals, tool results, verdicts, latencies, errors and
cancellations, and the reason, state, trace and calls that must follow. `replay` drives the real
machine; only the three operations and the clock are stand-ins. `handrail.testing.fleet_vectors`
replays the same cases through the step shell and a ledger.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from handrail.agent import machine, trace
from handrail.agent.budget import Budget, BudgetLeft, CallLimits, call_limit, charge
from handrail.agent.loop import AgentLoop, observation_of
from handrail.agent.machine import RunState, Turn
from handrail.agent.stage import (
    AskModel,
    Doubtful,
    End,
    Event,
    InvokeTool,
    Observation,
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
from handrail.canonical import Json, canonical, dumps, normal, parse_json
from handrail.errors import BadInput, InvalidBudget, NotCanonical

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
#: What a vector states, by grade.
GRADES: Final = (
    ("reason", "answer"),
    ("state",),
    ("trace",),
    ("calls", "endMs", "cancelRequestedMs"),
)
_OPTIONS: Final = {
    "maxSteps": "steps",
    "maxModelCalls": "model_calls",
    "maxToolCalls": "tool_calls",
    "deadlineMs": "deadline_ms",
}
_ITEMS: Final = {"propose": "proposals", "invoke": "results", "verify": "verify"}
_SHOWN: Final = 400


class BadVectors(BadInput):
    """A file of vectors cannot be read, or a line of it is no vector; the message says which."""

    code: ClassVar[str] = "bad-vectors"


class ScriptedError(Exception):
    """What a scripted call raises: an error of its own, or that its script has ended."""


# ---- what a case says ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scripted:
    """One scripted call. Times are milliseconds after its start; infinite: never.

    It ends by itself at `ends_after_ms`, by raising if `throws`, else with `item`. Right after that
    the clock moves on by `clock_at_end_ms`, and the run's cancellation is asked for if
    `cancels_at_end`.
    """

    op: str
    number: int
    item: Any
    throws: bool
    ends_after_ms: float
    cancel_after_ms: float
    cancels_at_end: bool
    clock_at_end_ms: int
    ignores_abort: bool


@dataclass(slots=True)
class Script:
    """A case's three operations, as they are called one after the other."""

    case: Mapping[str, Any]
    made: Counter[str] = field(default_factory=Counter)

    def next(self, op: str) -> Scripted:
        """What the next call of an operation does."""
        number = self.made[op]
        self.made[op] += 1
        items = self.case[_ITEMS[op]]
        fault = self.case.get("faults", {}).get(op, {}).get(str(number), {})
        missing = number >= len(items)
        end = "throw" if missing else fault.get("end", "return")
        never = end == "hang"
        return Scripted(
            op=op,
            number=number,
            item=None if missing else items[number],
            throws=end == "throw",
            ends_after_ms=math.inf if never else 0 if missing else fault.get("latencyMs", 0),
            cancel_after_ms=fault.get("cancelAfterMs", math.inf),
            cancels_at_end=fault.get("cancelAtEnd", False),
            clock_at_end_ms=fault.get("clockAtEndMs", 0),
            ignores_abort=fault.get("onAbort", "ignore") == "ignore",
        )


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

    def stated(self) -> dict[str, Any]:
        """Return the outcome under the names of a vector's `expected`."""
        return {
            "reason": self.reason,
            "answer": self.answer,
            "state": self.state,
            "trace": self.trace,
            "calls": self.calls,
            "endMs": self.end_ms,
            "cancelRequestedMs": self.cancel_requested_ms,
        }


def case_limits(options: Mapping[str, Any]) -> tuple[Budget, CallLimits]:
    """Read a case's options; what is missing, fractional or out of range raises `InvalidBudget`."""
    names = {*_OPTIONS, "modelTimeoutMs", "toolTimeoutMs"}
    for name in sorted(names - options.keys()):
        raise InvalidBudget(name, None, "a whole number; it is missing")
    for name in sorted(options.keys() - names):
        raise InvalidBudget(name, options[name], f"one of {', '.join(sorted(names))}")
    budget = Budget().altered({ours: options[theirs] for theirs, ours in _OPTIONS.items()})
    return budget, CallLimits(model_ms=options["modelTimeoutMs"], tool_ms=options["toolTimeoutMs"])


def case_workflow(
    case: Mapping[str, Any],
    *,
    lookup: Callable[..., Any],
    save: Callable[..., Any],
    verify: Callable[..., Any],
    version: str = "1",
) -> Workflow:
    """The workflow of every vector: one agent loop with a read and a write, no approval.

    Every invocation is a business intent of its own, as the vectors want it.
    """
    budget, limits = case_limits(case["options"])
    can_query = case.get("saveDraftCanQuery", True)
    reads = ToolContract(name="lookup", side_effect=SideEffect.READ, timeout_ms=FOREVER)
    writes = ToolContract(
        name="saveDraft",
        side_effect=SideEffect.IDEMPOTENT,
        approval=Approval.NEVER,
        timeout_ms=FOREVER,
        intent=lambda arguments, run: f"vector:{run.run_id}:{run.tool_calls}",
        guarantee=Guarantee.IDEMPOTENCY_KEY,
        key_valid_for_ms=FOREVER,
        can_query=can_query,
        takeover="nobody: no case goes beyond its stop",
    )
    loop = AgentLoop(
        name="loop",
        actions=(Tool(reads, lookup), Tool(writes, save, _never if can_query else None)),
        verify=verify,
        no_progress=None,
    )
    return Workflow(name="vector", version=version, stages=[loop], budget=budget, limits=limits)


def reply_of(item: Any) -> Reply:
    """Read a scripted tool result. Raises `BadVectors` where it is none."""
    match item:
        case {"status": "success", "observation": str(text)}:
            return Succeeded(text, text)
        case {"status": "failed", "code": str(code), "retryable": bool(retryable)}:
            return Refused(code, retryable)
        case {"status": "unknown", "code": str(code)}:
            return Doubtful(code)
    raise BadVectors(f"a scripted result of unknown form: {_short(item)}")


def _never(*_: Any) -> None:
    raise AssertionError("a vector ends at its first stop: nothing is queried or called here")


# ---- on the machine alone ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ended:
    """How one scripted call ended: its end, and the item that it returned."""

    end: End
    item: Any
    bound: bool


@dataclass(slots=True)
class _World:
    """The clock, the three operations and the wish to cancel of one case."""

    script: Script
    deadline_at: int
    now_ms: int = 0
    cancelled_at: int | None = None
    calls: list[dict[str, Json]] = field(default_factory=list)

    def call(self, op: str, own_ms: int, detail: dict[str, Json]) -> _Ended:
        """Make one call under its time limit, move the clock and say how it ended."""
        scripted = self.script.next(op)
        limit, bound = call_limit(own_ms, self.deadline_at - self.now_ms)
        start = self.now_ms
        first = min(scripted.ends_after_ms, limit, scripted.cancel_after_ms)
        self.now_ms = start + int(first)
        if first == scripted.ends_after_ms:
            end = End.RAISED if scripted.throws else End.RETURNED
        elif first == limit:
            end = End.TIMED_OUT
        else:
            end = End.CANCELLED
            self._cancel()
        self.calls.append(
            {
                "op": op,
                "call": scripted.number,
                **detail,
                "startMs": start,
                "endMs": self.now_ms,
                "end": end.value,
            }
        )
        if end in (End.RETURNED, End.RAISED):
            self.now_ms += scripted.clock_at_end_ms
            if scripted.cancels_at_end:
                self._cancel()  # the runner sees it with its next look at the clock
        return _Ended(end, scripted.item if end is End.RETURNED else None, bound)

    def _cancel(self) -> None:
        if self.cancelled_at is None:
            self.cancelled_at = self.now_ms


class _Replay:
    """One case on the machine: what a step shell does, without claims, commits and clocks."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.workflow = case_workflow(case, lookup=_never, save=_never, verify=_never)
        budget, limits = case_limits(case["options"])
        self.world = _World(Script(case), budget.deadline_ms)
        if case.get("cancelBeforeStart"):
            self.world.cancelled_at = 0
        self.state = RunState(
            run_id="vector",
            tenant="vectors",
            workflow=self.workflow.name,
            workflow_version=self.workflow.version,
            goal=case.get("goal", ""),
            principal=Principal(),
            budget=budget,
            limits=limits,
            left=BudgetLeft.full(budget),
        )
        self.events: list[TraceEvent] = []
        self.observations: list[Observation] = []

    def run(self) -> Outcome:
        turn = self._take(machine.start(self.workflow, self.state, self._view()))
        while not isinstance(turn.command, Stop):
            if isinstance(turn.command, AskModel):
                refused = self._charge()
                if refused is not None:
                    self._take(machine.stop(self.state, refused, self._view()))
                    break
            event = self._execute(turn.command)
            turn = self._take(machine.on(self.workflow, self.state, event, self._view()))
            if isinstance(turn.command, AskModel):
                self.state = replace(self.state, left=self.state.left.settled())
        return self._outcome()

    def _view(self) -> View:
        return self.state.view(
            remaining_ms=self.world.deadline_at - self.world.now_ms,
            cancelled=self.world.cancelled_at is not None,
        )

    def _take(self, turn: Turn) -> Turn:
        self.state = turn.state
        self.events += turn.events
        if turn.observation is not None:
            self.observations.append(turn.observation)
        return turn

    def _charge(self) -> Reason | None:
        """Pay for the next round as a claim does; the reason where it is refused."""
        view = self._view()
        phase = machine.phase_of(self.workflow, self.state)
        left = charge(
            self.state.left, phase, cancelled=view.cancelled, remaining_ms=view.remaining_ms
        )
        if isinstance(left, Reason):
            return left
        claimed = machine.claimed(self.state, phase, self.events)
        self.state = replace(claimed, left=left)
        return None

    def _execute(self, command: object) -> Event:
        state = self.state
        saw: dict[str, Json] = {
            "saw": {"version": state.state_version, "observations": state.observation_count}
        }
        match command:
            case AskModel():
                done = self.world.call("propose", state.limits.model_ms, saw)
                return Proposed(done.end, done.item, done.bound)
            case Verify(claim, timeout_ms):
                done = self.world.call("verify", timeout_ms, {**saw, "answer": claim})
                return Verdict(done.end, done.item is True, bound=done.bound)
            case InvokeTool() as call:
                self.state = replace(state, left=state.left.tool_call_used(call.tool))
                detail: dict[str, Json] = {"tool": call.tool, "arguments": dict(call.arguments)}
                return self._result(call, self.world.call("invoke", call.timeout_ms, detail))
        raise AssertionError(f"a vector never does {type(command).__name__}")

    def _result(self, call: InvokeTool, done: _Ended) -> Result:
        if done.end is not End.RETURNED:
            return Result(done.end, bound=done.bound, settled=False)
        reply = reply_of(done.item)
        if isinstance(reply, Doubtful):
            return Result(done.end, reply, done.bound, settled=False)
        told = observation_of(self.workflow.tool_named(call.tool).contract, reply).digest
        known = any(seen.digest == told for seen in self.observations)
        return Result(done.end, reply, done.bound, known)

    def _outcome(self) -> Outcome:
        state = self.state
        assert state.reason is not None
        return Outcome(
            reason=state.reason.value,
            answer=state.answer,
            state={
                "version": state.state_version,
                "step": state.step,
                "modelCalls": state.model_calls,
                "toolCalls": state.tool_calls,
                "observations": [seen.text for seen in self.observations],
            },
            trace=list(compared(event.to_json() for event in self.events)),
            calls=self.world.calls,
            end_ms=self.world.now_ms,
            cancel_requested_ms=self.world.cancelled_at,
        )


def replay(case: Mapping[str, Any]) -> Outcome:
    """Run one case on the machine and a virtual clock; invalid options raise `InvalidBudget`."""
    return _Replay(case).run()


# ---- comparing -----------------------------------------------------------------------------------


def compared(events: Iterator[Mapping[str, Any]]) -> Iterator[dict[str, Json]]:
    """Keep what a vector states of a trace."""
    for event in events:
        keys = COMPARED.get(event["type"])
        if keys is not None:
            detail = {k: v for k, v in event["detail"].items() if k in keys}
            yield {"type": event["type"], "step": event["step"], "detail": detail}


def differences(expected: Mapping[str, Any], outcome: Outcome) -> dict[str, str]:
    """Name what differs from what a vector expects, each with its grade and what was found."""
    got = outcome.stated()
    want = {**expected, "trace": _with_own_triggers(expected["trace"], outcome.trace)}
    return {
        key: f"grade {grade}: {_difference(key, want[key], got[key])}"
        for grade, keys in enumerate(GRADES, start=1)
        for key in keys
        if not _same(want[key], got[key])
    }


def _same(one: object, other: object) -> bool:
    return canonical(one) == canonical(other)


def _difference(name: str, want: Any, got: Any) -> str:
    if isinstance(want, list) and isinstance(got, list):
        for number, (one, other) in enumerate(zip(want, got, strict=False)):
            if not _same(one, other):
                return _difference(f"{name}[{number}]", one, other)
        name = f"length of {name}"
        want, got = len(want), len(got)
    return f"{name}: expected {_short(want)}, got {_short(got)}"


def _with_own_triggers(want: list[Any], got: list[dict[str, Json]]) -> list[Any]:
    """A reconciliation that the tool itself asked for may name a trigger of our own."""
    out = []
    for number, event in enumerate(want):
        detail = event["detail"]
        if event["type"] == trace.RECONCILIATION_REQUIRED and "trigger" not in detail:
            ours = got[number]["detail"] if number < len(got) else {}
            if isinstance(ours, dict) and "trigger" in ours:
                event = {**event, "detail": {**detail, "trigger": ours["trigger"]}}
        out.append(event)
    return out


def _short(value: object) -> str:
    text = dumps(normal(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# ---- files ---------------------------------------------------------------------------------------


def load(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file of vectors: one JSON object a line, numbers exact. Raises `BadVectors`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadVectors(f"{path}: {error.strerror or error}") from None
    # Only "\n" ends a line: a JSON text may hold other characters that Python takes for an end.
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            try:
                yield _vector(parse_json(line))
            except (NotCanonical, BadVectors) as error:
                problem = error.problem if isinstance(error, NotCanonical) else str(error)
                raise BadVectors(f"{path}, line {number}: {problem}") from None


def _vector(value: Any) -> dict[str, Any]:
    match value:
        case {
            "id": str(),
            "case": {
                "options": dict(),
                "proposals": list(),
                "results": list(results),
                "verify": list(verdicts),
            } as case,
            "expected": {"trace": list(events)} as expected,
        }:
            pass
        case _:
            raise BadVectors("no vector: it needs id, case and expected, each of its form")
    if missing := [key for keys in GRADES for key in keys if key not in expected]:
        raise BadVectors(f"expected lacks {', '.join(missing)}")
    for event in events:
        if not isinstance(event, dict) or not isinstance(event.get("detail"), dict):
            raise BadVectors("an expected event needs a detail")
    for item in results:
        reply_of(item)
    if not all(isinstance(verdict, bool) for verdict in verdicts):
        raise BadVectors("a verdict is true or false")
    _check_faults(case.get("faults", {}))
    assert isinstance(value, dict)
    return value


def _check_faults(faults: Any) -> None:
    if not isinstance(faults, dict) or faults.keys() - _ITEMS.keys():
        raise BadVectors(f"faults are given for {', '.join(_ITEMS)}")
    for op, calls in faults.items():
        for number, fault in calls.items() if isinstance(calls, dict) else [("all", calls)]:
            if not isinstance(fault, dict) or not all(_is_fault(*pair) for pair in fault.items()):
                raise BadVectors(f"the fault of {op} call {number} cannot be read")


def _is_fault(name: str, value: Any) -> bool:
    match name:
        case "latencyMs" | "cancelAfterMs" | "clockAtEndMs":
            return type(value) is int and value >= 0
        case "cancelAtEnd":
            return isinstance(value, bool)
        case "end":
            return value in ("return", "throw", "hang")
        case "onAbort":
            return value in ("ignore", "throw")
    return False


@dataclass(frozen=True, slots=True)
class Found:
    """What a replayed file came to: how many vectors agree, and a line for each mismatch."""

    passed: int
    failed: int
    lines: tuple[str, ...]


def as_stated(case: Mapping[str, Any], expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """Expect of a case what its vector states."""
    return expected


@dataclass(frozen=True, slots=True)
class Driver:
    """A way to replay a case, and what is then to be expected of it."""

    play: Callable[[Mapping[str, Any]], Outcome]
    expect: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = as_stated


MACHINE: Final = Driver(replay)


def run_file(path: Path, driver: Driver = MACHINE) -> Found:
    """Replay a file and compare all four grades. Raises `BadVectors`.

    A case whose options are invalid is refused before it starts, which is a mismatch, no error.
    """
    passed, failed = 0, 0
    lines: list[str] = []
    for vector in list(load(path)):
        found = check(vector, driver)
        lines += found
        passed += not found
        failed += bool(found)
    return Found(passed, failed, tuple(lines))


def check(vector: Mapping[str, Any], driver: Driver = MACHINE) -> Sequence[str]:
    """Replay one vector; return a line for each mismatch."""
    case = vector["case"]
    try:
        outcome = driver.play(case)
    except InvalidBudget as error:
        return [f"{vector['id']}: refused before it starts: {error}"]
    found = differences(driver.expect(case, vector["expected"]), outcome)
    return [f"{vector['id']}: {line}" for line in found.values()]
