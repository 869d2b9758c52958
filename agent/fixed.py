"""Fixed stages: what is always the same is written as code, and no model decides about it.

`Read` calls a read tool with arguments that the program makes, `Check` judges what is known,
`Confirm` parks the exact action with a person, `Commit` performs it, `Verify` looks at the outside
world independently. The functions that a workflow hands in are pure, but for the check of `Verify`
and the precondition of `Commit`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from handrail.agent import trace
from handrail.agent.budget import MAX_MS
from handrail.agent.commands import command_from_json, command_to_json
from handrail.agent.loop import (
    after_failed_check,
    after_failed_read,
    judge,
    judge_verdict,
    permission,
    plain,
    public,
)
from handrail.agent.retry import Retry, must_be_retry
from handrail.agent.stage import (
    Action,
    Approved,
    Command,
    End,
    Event,
    Finish,
    Frame,
    InvokeTool,
    Leaf,
    Move,
    Observation,
    Park,
    Refused,
    Resolved,
    Result,
    Stop,
    Succeeded,
    Verdict,
    View,
    executable,
)
from handrail.agent.stage import Verify as VerifyCommand
from handrail.agent.status import Reason
from handrail.agent.tools import (
    Invalid,
    Permit,
    RunFacts,
    Tool,
    ToolContract,
    must_be_functions,
    must_be_tool,
)
from handrail.agent.trace import TraceEvent
from handrail.canonical import Json, canonical, normal
from handrail.errors import HandrailError, InvalidDefinition


@dataclass(frozen=True, slots=True)
class Proceed:
    """A check's answer: go on; the value is recorded as the stage's output."""

    value: Json = None


@dataclass(frozen=True, slots=True)
class Done:
    """A check's answer: the goal is reached without the stages that follow; the run completes."""

    answer: Json


@dataclass(frozen=True, slots=True)
class HandOff:
    """A check's answer: a person decides; the detail is what they are shown."""

    detail: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deny:
    """A check's answer: the run stops for this reason; the detail names the fields that do not
    fit.
    """

    reason: Reason = Reason.PERMISSION_DENIED
    detail: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reason not in (Reason.PERMISSION_DENIED, Reason.INVALID_PROPOSAL):
            raise InvalidDefinition(
                "deny", "a check denies as permission-denied or invalid-proposal"
            )


Judgement: TypeAlias = Proceed | Done | HandOff | Deny


@dataclass(frozen=True, slots=True)
class Read(Leaf):
    """Call a read tool with arguments made by the program; the result is the stage's output.

    It pays one tool call for each attempt: a tool with a retry policy is called again where it
    failed for a reason that may pass. After that a failure stops the run as `tool-failed`.
    """

    name: str
    tool: Tool
    arguments: Callable[[RunFacts], Mapping[str, Json]]

    def __post_init__(self) -> None:
        must_be_tool(f"stage {self.name!r}", self.tool)
        must_be_functions(f"stage {self.name!r}", arguments=self.arguments)
        if self.tool.contract.side_effect.writes:
            raise InvalidDefinition(
                f"stage {self.name!r}", f"{self.tool.name!r} writes: use Confirm and Commit"
            )

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tool that this stage calls."""
        return (self.tool,)

    def start(self, view: View) -> Move:
        """Make the command."""
        return _call(self.name, Action(self.tool, self.arguments(view.run)), view)

    def on(self, frame: Frame, event: Event, view: View) -> Move:
        """Take the result."""
        return _after_call(self.tool.contract, frame, event, view, attempts=1)


@dataclass(frozen=True, slots=True)
class Check(Leaf):
    """Judge what is known, in plain code: `judge(run)` answers Proceed, Done, HandOff or Deny."""

    name: str
    judge: Callable[[RunFacts], Judgement]

    def __post_init__(self) -> None:
        must_be_functions(f"stage {self.name!r}", judge=self.judge)

    def start(self, view: View) -> Move:
        """Judge at once."""
        match self.judge(view.run):
            case Proceed(value):
                return Move({}, Finish(normal(value)))
            case Done(answer):
                verified = TraceEvent(
                    trace.COMPLETION_VERIFIED, view.step, {"verified": True, "by": self.name}
                )
                return Move({}, Stop(Reason.COMPLETED, answer=normal(answer)), (verified,))
            case HandOff(detail):
                return Move({}, Stop(Reason.HANDOFF_REQUIRED, public(detail)))
            case Deny(reason, detail):
                return Move({}, Stop(reason, public(detail)))
        raise InvalidDefinition(f"stage {self.name!r}", "a check answers with a Judgement")

    def on(self, frame: Frame, event: Event, view: View) -> Move:
        """A check waits for nothing."""
        raise TypeError(f"a check is told nothing about {type(event).__name__}")


@dataclass(frozen=True, slots=True)
class Confirm(Leaf):
    """Park the exact action until a person confirms it; no worker is held meanwhile."""

    name: str
    action: Callable[[RunFacts], Action]
    expires_ms: int = 24 * 3_600_000

    def __post_init__(self) -> None:
        title = f"stage {self.name!r}"
        must_be_functions(title, action=self.action)
        if type(self.expires_ms) is not int or not 1 <= self.expires_ms <= MAX_MS:
            raise InvalidDefinition(title, "expires_ms must be a whole number of at least 1")

    def start(self, view: View) -> Move:
        """Show the person the command that will be executed, and nothing less."""
        action = self.action(view.run)
        move = _call(self.name, action, view, approval=True)
        if not isinstance(move.command, InvokeTool):
            return move
        park = Park.for_consent(action.tool.contract, move.command, expires_ms=self.expires_ms)
        return Move({}, park)

    def on(self, frame: Frame, event: Event, view: View) -> Move:
        """Go on once it was confirmed."""
        if not isinstance(event, Approved):
            raise TypeError(f"a confirmation is told nothing about {type(event).__name__}")
        # No fact of the public state: the commit must meet the version that was approved.
        output: Json = {"approval_id": event.approval_id, "approvers": [*event.approvers]}
        return Move(frame, Finish(output, fact=False))


@dataclass(frozen=True, slots=True)
class Commit(Leaf):
    """Perform one write that the program has decided on; its receipt is the stage's output.

    `attempts` bounds how often it is sent while the service says "nothing happened, try again".

    `precondition(claim, call)` may do I/O and is asked right before the write, each time that a
    worker takes it up: it reads anew what the plan rests on (`claim` are the write's arguments,
    `call.facts` the outputs so far) and answers with `Checked`. Where it does not hold nothing is
    sent, and the run goes back to the stage named by `replan`, at most `replans` times; then, or
    without `replan`, it stops as `verification-failed`. A tool that raises
    `ToolRefused(..., changed=True)` sends the run the same way. `precondition_retry` makes a
    precondition again that could not be found out, as `retry` of `Verify` does.
    """

    name: str
    action: Callable[[RunFacts], Action]
    tool: Tool
    attempts: int = 1
    precondition: Callable[..., Any] | None = None
    replan: str | None = None
    replans: int = 1
    precondition_retry: Retry | None = None

    def __post_init__(self) -> None:
        title = f"stage {self.name!r}"
        must_be_tool(title, self.tool)
        must_be_functions(title, action=self.action, precondition=self.precondition)
        must_be_retry(title, self.precondition_retry)
        if not self.tool.contract.side_effect.writes:
            raise InvalidDefinition(title, f"{self.tool.name!r} is no write: use Read")
        for name in ("attempts", "replans"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidDefinition(title, f"{name} must be at least 1")
        if self.precondition_retry is not None and self.precondition is None:
            raise InvalidDefinition(title, "precondition_retry retries a precondition: name that")
        if self.replans != 1 and self.replan is None:
            raise InvalidDefinition(title, "replans bounds the ways back: let replan name one")

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tool that this stage calls."""
        return (self.tool,)

    def start(self, view: View) -> Move:
        """Make the command anew from what the program knows: a plan's words decide nothing."""
        action = self.action(view.run)
        if action.tool.name != self.tool.name:
            raise InvalidDefinition(f"stage {self.name!r}", "the action names another tool")
        move = _call(self.name, action, view, approval=self.tool.contract.needs_approval)
        if self.precondition is None or not isinstance(move.command, InvokeTool):
            return move
        return replace(move, command=self.asked(move.frame, view))

    def asked(self, frame: Frame, view: View) -> VerifyCommand:
        """Ask whether what the write rests on is as it was planned."""
        claim = normal(dict(_waiting(frame).arguments))
        return VerifyCommand(claim, view.limits.tool_ms, before_write=True)

    def write(self, frame: Frame, view: View) -> InvokeTool:
        """The write for which the precondition is asked, under the deadline of this moment."""
        return _waiting(frame).until(view.deadline_at)

    def on(self, frame: Frame, event: Event, view: View) -> Move:
        """Make the write once its precondition holds, and take the receipt; or go back."""
        match event:
            case Verdict():
                return self._on_precondition(frame, event, view)
            case Result(reply=Refused(changed=True) as said, settled=True) if self.replan:
                arguments = _waiting(frame).arguments
                judged = judge(self.tool.contract, arguments, event, view)
                return self._back(view, judged.events, {"by": self.tool.name, "code": said.reason})
        return _after_call(self.tool.contract, frame, event, view, attempts=self.attempts)

    def _on_precondition(self, frame: Frame, event: Verdict, view: View) -> Move:
        following = None
        if event.end is not End.RETURNED:
            asked = self.asked(frame, view)
            following = after_failed_check(self.precondition_retry, asked, event, view)
        judged = judge_verdict(
            event,
            view,
            following,
            failed_as=trace.PRECONDITION_FAILED,
            found_as=trace.PRECONDITION_CHECKED,
        )
        if judged.following is not None:
            return Move(frame, judged.following, judged.events)
        if event.ok:
            return Move(frame, self.write(frame, view), judged.events)
        shown: dict[str, Json] = {"changed": dict(event.detail)}
        if event.evidence is not None:
            shown["evidence_ref"] = event.evidence
        refused: dict[str, Json] = {"by": "precondition", **public(shown)}
        if self.replan is None:
            stop = Stop(Reason.VERIFICATION_FAILED, {"stage": self.name, "refused": refused})
            return Move(frame, stop, judged.events)
        return self._back(view, judged.events, refused)

    def _back(
        self, view: View, events: tuple[TraceEvent, ...], refused: Mapping[str, Json]
    ) -> Move:
        """Nothing was sent: have the plan made again. Whoever makes it is shown why; what was
        observed before that belongs to the plan that does not hold.
        """
        shown: dict[str, Json] = {"stage": self.name, "refused": dict(refused)}
        told = canonical({**shown, "state_version": view.state_version})
        detail: dict[str, Json] = {**shown, "back_to": self.replan}
        return Move(
            {},
            Finish(shown, back_to=self.replan),
            (*events, TraceEvent(trace.PLAN_REFUSED, view.step, detail)),
            observation=Observation.of("program", told),
        )


@dataclass(frozen=True, slots=True)
class Verify(Leaf):
    """Look at the outside world independently; only a check that holds lets the run go on.

    `check(claim, call)` may do I/O; `claim(run)` is what it is asked about (default: all outputs);
    `cost_microusd` is its price, paid from the cost budget before each attempt. `retry` makes a
    check again that timed out, lost its connection or raised `ToolRefused(..., retryable=True)`;
    one that found that it does not hold is not asked twice.
    """

    name: str
    check: Callable[..., Any]
    claim: Callable[[RunFacts], Json] | None = None
    cost_microusd: int = 0
    retry: Retry | None = None

    def __post_init__(self) -> None:
        must_be_functions(f"stage {self.name!r}", check=self.check, claim=self.claim)
        must_be_retry(f"stage {self.name!r}", self.retry)
        if type(self.cost_microusd) is not int or self.cost_microusd < 0:
            raise InvalidDefinition(
                f"stage {self.name!r}", "cost_microusd must be a whole number of at least 0"
            )

    @property
    def verify(self) -> Callable[..., Any]:
        """The check, under the name by which the shell asks every stage for it."""
        return self.check

    def start(self, view: View) -> Move:
        """Ask for the check."""
        return Move({}, self._asked(view))

    def _asked(self, view: View) -> VerifyCommand:
        claim = self.claim(view.run) if self.claim else dict(view.outputs)
        return VerifyCommand(normal(claim), view.limits.tool_ms, self.cost_microusd)

    def on(self, frame: Frame, event: Event, view: View) -> Move:
        """Go on if it holds."""
        assert isinstance(event, Verdict)
        following = None
        if event.end is not End.RETURNED:
            following = after_failed_check(self.retry, self._asked(view), event, view)
        judged = judge_verdict(event, view, following)
        if judged.following is not None:
            return Move(frame, judged.following, judged.events)
        if not event.ok:
            stop = Stop(Reason.VERIFICATION_FAILED, {"evidence": event.evidence})
            return Move(frame, stop, judged.events)
        output = plain({**event.detail, "evidence": event.evidence})
        return Move(frame, Finish(output), judged.events)


def _call(stage: str, action: Action, view: View, *, approval: bool = False) -> Move:
    """Pass the program's own call through the gates: its arguments are no more trusted than a
    model's.
    """
    contract = action.tool.contract
    try:
        checked = contract.validate(plain(action.arguments))
    except HandrailError as error:
        return _refused(view, Reason.INVALID_PROPOSAL, stage, contract, str(error))
    if isinstance(checked, Invalid):
        return _refused(view, Reason.INVALID_PROPOSAL, stage, contract, checked.problem)
    permit = permission(contract, checked, view)
    if permit is Permit.DENY:
        return _refused(view, Reason.PERMISSION_DENIED, stage, contract, "not permitted")
    if not view.budget.may_call(contract.name, action.tool.calls):  # before a person is asked, too
        reason = Reason.TOOL_CALL_BUDGET_EXHAUSTED
        return _refused(view, reason, stage, contract, "no call left")
    approval = approval or permit is Permit.WITH_APPROVAL
    command = executable(action.tool, checked, view, approval=approval, fixed=True)
    return Move({"waiting": command_to_json(command), "attempt": 1}, command)


def _waiting(frame: Frame) -> InvokeTool:
    waiting = command_from_json(frame["waiting"])
    assert isinstance(waiting, InvokeTool)
    return waiting


def _after_call(
    contract: ToolContract, frame: Frame, event: Event, view: View, *, attempts: int
) -> Move:
    waiting = _waiting(frame)
    match event:
        case Result():
            following = after_failed_read(contract, waiting, event, view)
            judged = judge(contract, waiting.arguments, event, view, following)
            if judged.following is not None:
                return Move(frame, judged.following, judged.events)
            if isinstance(event.reply, Succeeded):
                return Move(frame, Finish(event.reply.value), judged.events)
            assert isinstance(event.reply, Refused)
            return _again(contract, waiting, frame, event.reply, view, judged.events, attempts)
        case Resolved(value, _, evidence):
            verified = TraceEvent(
                trace.RESULT_VERIFIED,
                view.step,
                {"tool": contract.name, "evidence_ref": evidence},
            )
            return Move(frame, Finish(value), (verified,))
    raise TypeError(f"a call is told nothing about {type(event).__name__}")


def _again(
    contract: ToolContract,
    waiting: InvokeTool,
    frame: Frame,
    reply: Refused,
    view: View,
    events: tuple[TraceEvent, ...],
    attempts: int,
) -> Move:
    attempt = frame["attempt"]
    assert isinstance(attempt, int)
    command: Command = waiting
    if attempt >= attempts:
        command = Stop(Reason.TOOL_FAILED, {"code": reply.reason})
    elif not view.budget.may_call(contract.name):
        command = Stop(Reason.TOOL_CALL_BUDGET_EXHAUSTED, {"tool": contract.name})
    return Move({**frame, "attempt": attempt + 1}, command, events)


def _refused(view: View, reason: Reason, stage: str, contract: ToolContract, problem: str) -> Move:
    rejected = TraceEvent(
        trace.PROPOSAL_REJECTED,
        view.step,
        {"stable_reason_code": reason.value, "stage": stage, "problem": problem[:300]},
    )
    detail: dict[str, Json] = {"stage": stage, "tool": contract.name, "problem": problem[:300]}
    return Move({}, Stop(reason, detail), (rejected,))
