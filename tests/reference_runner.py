"""A second runner, written from the rules of the runner vectors alone: plain and slow.

It shares no code with the product, so that a mistake in one of them shows as a difference.
`expected` plays a case; `random_cases` makes cases that the rules decide, from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, NoReturn

Json = Any
NEVER = 10**15
TOOLS = {"lookup": "none", "saveDraft": "write"}


class LeftOpen(Exception):
    """The rules do not say what such a case must do."""


class _Stopped(Exception):
    """The run has stopped."""


def same_text(value: Json) -> str:
    """One text for one JSON value: keys in order of code points, numbers by value."""
    match value:
        case None | True | False:
            return str(value)
        case int() | float():
            number = Decimal(value)
            if number == number.to_integral_value():
                return f"number {int(number)}"
            return f"number {number.normalize()}"
        case str():
            return f"text {[ord(character) for character in value]}"
        case list():
            return f"list({'; '.join(map(same_text, value))})"
        case dict():
            keys = sorted(value, key=lambda key: [ord(character) for character in key])
            return f"object({'; '.join(same_text(k) + ' is ' + same_text(value[k]) for k in keys)})"
    raise TypeError(type(value).__name__)


class _Run:
    """What changes while a case is played."""

    def __init__(self, case: Json) -> None:
        self.case = case
        self.options = case["options"]
        self.now = 0
        self.deadline_at = self.options["deadlineMs"]
        self.cancelled_at: int | None = 0 if case.get("cancelBeforeStart") else None
        self.version = self.step = self.model_calls = self.tool_calls = 0
        self.observations: list[str] = []
        self.seen: set[str] = set()
        self.trace: list[Json] = []
        self.calls: list[Json] = []
        self.answer: Json = None
        self.reason = ""

    def event(self, type_: str, /, **detail: Json) -> None:
        self.trace.append({"type": type_, "step": self.step, "detail": detail})

    def stop(self, reason: str, answer: Json = None) -> NoReturn:
        self.reason, self.answer = reason, answer
        self.event(
            "run.stopped",
            reason=reason,
            stateVersion=self.version,
            remainingModelCalls=max(0, self.options["maxModelCalls"] - self.model_calls),
            remainingToolCalls=max(0, self.options["maxToolCalls"] - self.tool_calls),
        )
        raise _Stopped

    @property
    def remaining(self) -> int:
        return int(self.deadline_at - self.now)

    @property
    def cancelled(self) -> bool:
        return self.cancelled_at is not None

    def call(self, op: str, limit_of_one: int, **more: Json) -> tuple[str, Json, bool]:
        """Make a call: how it ended, what it returned, and whether the deadline was its limit."""
        number = sum(call["op"] == op for call in self.calls)
        items = self.case[{"propose": "proposals", "invoke": "results", "verify": "verify"}[op]]
        fault = self.case.get("faults", {}).get(op, {}).get(str(number), {})
        bound = self.remaining <= limit_of_one
        own = fault.get("latencyMs", 0)
        end = fault.get("end", "return")
        if end == "hang":
            own = NEVER
        if number >= len(items):
            own, end = 0, "throw"
        due = {
            "own": own,
            "timed-out": min(limit_of_one, self.remaining),
            "cancelled": fault.get("cancelAfterMs", NEVER),
        }
        first = min(due, key=lambda name: due[name])
        if sorted(due.values())[0] == sorted(due.values())[1]:
            raise LeftOpen("two ends at one instant")
        start, self.now = self.now, self.now + due[first]
        how = first if first != "own" else "raised" if end == "throw" else "returned"
        if first == "cancelled":
            self.cancelled_at = self.now if self.cancelled_at is None else self.cancelled_at
        record = {"op": op, "call": number, "startMs": start, "endMs": self.now, "end": how}
        self.calls.append(record | more)
        if first == "own":
            self.now += fault.get("clockAtEndMs", 0)
            if fault.get("cancelAtEnd") and self.cancelled_at is None:
                self.cancelled_at = self.now
        return how, items[number] if how == "returned" else None, bound

    def saw(self) -> Json:
        return {"version": self.version, "observations": len(self.observations)}

    def failed_call(self, how: str, bound: bool, otherwise: str) -> NoReturn:
        if self.cancelled:
            self.stop("cancelled")
        if how == "timed-out" and bound:
            self.stop("deadline-exhausted")
        self.stop(otherwise)


def expected(case: Json) -> Json:
    """Play a case; what a vector would state of it. Raises `LeftOpen` where no rule decides."""
    run = _Run(case)
    try:
        while True:
            _round(run)
    except _Stopped:
        pass
    return {
        "reason": run.reason,
        "answer": run.answer,
        "state": {
            "version": run.version,
            "step": run.step,
            "modelCalls": run.model_calls,
            "toolCalls": run.tool_calls,
            "observations": run.observations,
        },
        "trace": run.trace,
        "calls": run.calls,
        "endMs": run.now,
        "cancelRequestedMs": run.cancelled_at,
    }


def _round(run: _Run) -> None:
    options = run.options
    if run.step >= options["maxSteps"] and run.cancelled:
        raise LeftOpen("cancellation against the step budget")
    if run.step >= options["maxSteps"]:
        run.stop("step-budget-exhausted")
    if run.cancelled:
        run.stop("cancelled")
    if run.remaining <= 0:
        run.stop("deadline-exhausted")
    if run.model_calls >= options["maxModelCalls"]:
        run.stop("model-call-budget-exhausted")

    run.model_calls += 1
    how, proposal, bound = run.call("propose", options["modelTimeoutMs"], saw=run.saw())
    if how != "returned":
        run.event("model.failed", timedOut=how == "timed-out", cancelled=run.cancelled)
        run.failed_call(how, bound, "model-failed")
    if run.cancelled:
        raise LeftOpen("cancellation that becomes visible together with a proposal")
    run.event("proposal.received", kind=proposal["kind"], modelCalls=run.model_calls)

    if proposal["kind"] == "clarify":
        run.stop("clarification-required")
    if proposal["kind"] == "complete":
        _complete(run, proposal["answer"])
        return
    if proposal["kind"] != "tool" or proposal["tool"] not in TOOLS:
        run.stop("invalid-proposal")
    if run.tool_calls >= options["maxToolCalls"]:
        run.stop("tool-call-budget-exhausted")
    mark = f"{run.version} {proposal['tool']} {same_text(proposal['arguments'])}"
    if mark in run.seen:
        run.stop("repeated-proposal")
    run.seen.add(mark)
    if run.remaining <= 0:
        run.stop("deadline-exhausted")
    _act(run, proposal["tool"], proposal["arguments"])


def _complete(run: _Run, answer: Json) -> None:
    if run.remaining <= 0:
        run.stop("deadline-exhausted")
    limit = run.options["toolTimeoutMs"]
    how, verdict, bound = run.call("verify", limit, saw=run.saw(), answer=answer)
    if how != "returned":
        run.event("completion.failed", timedOut=how == "timed-out", cancelled=run.cancelled)
        run.failed_call(how, bound, "verification-failed")
    run.event("completion.verified", verified=verdict)
    if verdict:
        run.stop("completed", answer)
    run.step += 1


def _act(run: _Run, tool: str, arguments: Json) -> None:
    write = TOOLS[tool] == "write"
    recovery = "query" if run.case.get("saveDraftCanQuery", True) else "human"
    run.tool_calls += 1
    limit = run.options["toolTimeoutMs"]
    how, result, bound = run.call("invoke", limit, tool=tool, arguments=arguments)
    if how != "returned":
        timed_out = how == "timed-out"
        failed = {"tool": tool, "sideEffect": TOOLS[tool]}
        run.event("tool.failed", **failed, timedOut=timed_out, cancelled=run.cancelled)
        if write:
            cause = "cancellation" if run.cancelled else "timeout" if timed_out else "exception"
            required = {"tool": tool, "trigger": cause, "recovery": recovery}
            run.event("effect.reconciliation-required", **required)
            run.stop("unknown-effect")
        run.failed_call(how, bound, "tool-failed")
    run.event("result.classified", tool=tool, status=result["status"])
    if result["status"] == "unknown":
        if write:
            run.event("effect.reconciliation-required", tool=tool, recovery=recovery)
            run.stop("unknown-effect")
        run.stop("tool-failed")
    if result["status"] == "failed" and not result["retryable"]:
        run.stop("tool-failed")
    if result["status"] == "success":
        observation = result["observation"]
    else:
        observation = f"tool:{tool}:failed:{result['code']}"
    changed = observation not in run.observations
    if changed:
        run.observations.append(observation)
        run.version += 1
    run.step += 1
    count = len(run.observations)
    run.event(
        "state.transitioned", changed=changed, stateVersion=run.version, observationCount=count
    )


# ---- cases ---------------------------------------------------------------------------------------

#: Arguments in families: within a family some are one JSON value, and some only look alike.
_FAMILIES: tuple[tuple[Json, ...], ...] = (
    (1, 1.0, "1", True, [1]),
    (0, -0.0, 0.0, False, None, ""),
    ("é", "e\u0301", "É"),
    (2**53, 2**53 + 1, float(2**53), 10**30, 1e30),
    ([1, 2], [1.0, 2.0], [2, 1]),
    ({"a": 1, "b": [{"c": 0, "d": 1}]}, {"b": [{"d": 1.0, "c": 0}], "a": 1}, {"a": 1, "b": [{}]}),
    ({"é": 1, "e\u0301": 2}, {"e\u0301": 2, "é": 1}, {"é": 2, "e\u0301": 1}),
    ({}, [], {"a": None}, {"a": {}}),
    ("\x00", "\x00\x00", "line\u2028end", "订单", 0.5, 0.25),
)
_ODD_NAMES = ("Lookup", "lookup ", "", "__proto__", "savedraft", "refund", "look\u200bup")
_OBSERVATIONS = ("same", "other", "third", "Same", "same ", "tool:lookup:failed:busy", "", "ü")
_CODES = ("busy", "not-found", "timeout")


def random_cases(seed: int) -> Iterator[tuple[str, Json, Json]]:
    """Name, case and expectation of random cases without end, the same for the same seed."""
    number = 0
    while True:
        case = random_case(random.Random(f"{seed}:{number}"))
        number += 1
        try:
            wanted = expected(case)
        except LeftOpen:
            continue
        yield f"{seed}:{number}", case, wanted


def random_case(rng: random.Random) -> Json:
    """Make a case; the rules may leave it open."""
    rounds = rng.choice((2, 4, 6, 8, 12))
    scarce = rng.random() < 0.4

    def budget() -> int:
        return rng.choice((0, 1, 2, 3, 5)) if scarce and rng.random() < 0.4 else 20

    case: dict[str, Json] = {
        "goal": "a random case",
        "options": {
            "maxSteps": budget(),
            "maxModelCalls": budget(),
            "maxToolCalls": budget(),
            "modelTimeoutMs": rng.choice((1, 20, 40, 60)),
            "toolTimeoutMs": rng.choice((1, 30, 50, 70)),
            "deadlineMs": rng.choice((0, 1, 35, 90, 200, *[9_000] * 15)),
        },
        **_script(rng, rounds),
    }
    if rng.random() < 0.03:
        case["cancelBeforeStart"] = True
    if rng.random() < 0.3:
        case["saveDraftCanQuery"] = False
    often = rng.choice((0, 0.1, 0.3))
    faults = {op: _faults(rng, rounds, often) for op in ("propose", "invoke", "verify")}
    if any(faults.values()):
        case["faults"] = faults
    return case


def _script(rng: random.Random, rounds: int) -> dict[str, Json]:
    ends = rng.choice((0, 0.1, 0.3))
    tools = rng.choice((("lookup",), ("saveDraft",), ("lookup", "lookup", "saveDraft")))
    values = rng.choice(_FAMILIES)[: rng.choice((1, 2, 3, 9))]
    told = rng.choice((_OBSERVATIONS[:1], _OBSERVATIONS[:3], _OBSERVATIONS))
    proposals: list[Json] = []
    for _ in range(rounds):
        if rng.random() < ends:
            proposals.append(_ending(rng))
        else:
            arguments = [("q", rng.choice(values)), ("a", 1)]
            rng.shuffle(arguments)
            name = rng.choice(tools)
            proposals.append({"kind": "tool", "tool": name, "arguments": dict(arguments)})
    return {
        "proposals": proposals,
        "results": [_result(rng, told) for _ in range(rounds - (rng.random() < 0.1))],
        "verify": [rng.random() < 0.4 for _ in range(rounds)],
    }


def _ending(rng: random.Random) -> Json:
    roll = rng.random()
    if roll < 0.6:
        return {"kind": "complete", "answer": rng.choice(("done", "", "Ω"))}
    if roll < 0.75:
        return {"kind": "clarify", "question": "Which one?"}
    if roll < 0.85:
        return {"kind": "tool", "tool": rng.choice(_ODD_NAMES), "arguments": {}}
    return {"kind": rng.choice(("shrug", "Tool", "", "completed")), "command": "refund"}


def _result(rng: random.Random, told: tuple[str, ...]) -> Json:
    roll = rng.random()
    if roll < 0.75:
        return {"status": "success", "observation": rng.choice(told)}
    if roll < 0.9:
        return {"status": "failed", "code": rng.choice(_CODES), "retryable": True}
    if roll < 0.95:
        return {"status": "failed", "code": rng.choice(_CODES), "retryable": False}
    return {"status": "unknown", "code": "lost"}


def _faults(rng: random.Random, rounds: int, often: float) -> Json:
    makers: tuple[Callable[[], Json], ...] = (
        lambda: {"latencyMs": rng.randrange(80)},
        lambda: {"latencyMs": rng.randrange(20)},
        lambda: {"latencyMs": rng.randrange(20)},
        lambda: {"latencyMs": rng.randrange(80), "end": "throw"},
        lambda: {"end": "hang"},
        lambda: {"latencyMs": rng.randrange(80), "cancelAfterMs": rng.randrange(1, 80)},
        lambda: {"end": "hang", "cancelAfterMs": rng.randrange(1, 80)},
        lambda: {"latencyMs": rng.randrange(30), "cancelAtEnd": True},
        lambda: {"end": "throw", "cancelAtEnd": True},
        lambda: {"latencyMs": rng.randrange(30), "clockAtEndMs": rng.choice((1, 40, 9_000))},
    )
    found: dict[str, Json] = {}
    for number in range(rounds):
        if rng.random() < often:
            fault = rng.choice(makers)()
            if rng.random() < 0.3:
                fault["onAbort"] = "throw"
            found[str(number)] = fault
    return found
