"""The controlled agent loop: the model chooses one action a round; the program does everything
else.

Observe, decide, act, validate, update. The gate's order of checks is fixed: cancellation, kind and
tool name, arguments, permission, tool budget, repetition, deadline, approval, dispatch. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from handrail.agent import trace
from handrail.agent.budget import CODE_OF, MAX_MS, charge_more
from handrail.agent.commands import command_from_json, command_to_json
from handrail.agent.proposal import (
    Clarification,
    CompletionClaim,
    Malformed,
    Proposal,
    ToolProposal,
    parse_proposal,
)
from handrail.agent.retry import Retry, must_be_retry
from handrail.agent.stage import (
    OBSERVATION_WINDOW,
    Answered,
    Approved,
    AskModel,
    Doubtful,
    End,
    Event,
    Finish,
    Frame,
    InvokeTool,
    Leaf,
    Move,
    Observation,
    Park,
    Proposed,
    Refused,
    Resolved,
    Result,
    Stop,
    Succeeded,
    Verdict,
    Verify,
    View,
    executable,
)
from handrail.agent.status import Reason
from handrail.agent.tools import (
    Invalid,
    Permit,
    SideEffect,
    Tool,
    ToolContract,
    Validated,
    action_digest,
    fingerprint,
    must_be_functions,
    must_be_tool,
)
from handrail.agent.trace import TraceEvent
from handrail.canonical import Json, canonical, digest, dumps, normal
from handrail.errors import InvalidDefinition

#: What a workflow's own code says for the trace is kept up to this size.
MAX_PUBLIC_BYTES: Final = 16_384


@dataclass(frozen=True, slots=True)
class NoProgress:
    """Stop when one action was executed `times` times within the last `window` executed actions.

    The state version is disregarded: a tool that tells something new but useless every time is
    found too.
    """

    times: int = 4
    window: int = 12

    def __post_init__(self) -> None:
        if not 2 <= self.times <= self.window:
            raise InvalidDefinition("no_progress", "needs 2 <= times <= window")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoop(Leaf):
    """A region in which a model chooses among `actions`, one at a time, until a check holds.

    `verify(claim, call)` is the independent check of a claim of completion: the model has no access
    to it. `allowed(view)` narrows the tools of a round. `corrections` is how many invalid proposals
    are answered with their reason code instead of a stop. `no_progress=None` switches that detector
    off. `retry` makes a failed model call again within the round; without it a failure stops the
    run. `verify_cost_microusd` is the price of one check, paid from the cost budget before it.
    `answer_within_ms` and `approve_within_ms` are how long a question and a request for consent
    wait for a person.
    """

    name: str
    actions: tuple[Tool, ...]
    verify: Callable[..., Any]
    model: str = "default"
    allowed: Callable[[View], Collection[str]] | None = None
    corrections: int = 0
    no_progress: NoProgress | None = NoProgress()
    retry: Retry | None = None
    verify_cost_microusd: int = 0
    answer_within_ms: int = 24 * 3_600_000
    approve_within_ms: int = 24 * 3_600_000

    def __post_init__(self) -> None:
        title = f"agent loop {self.name!r}"
        actions: object = self.actions
        if not isinstance(actions, list | tuple) or not actions:
            raise InvalidDefinition(title, "actions must list the tools the model may choose from")
        object.__setattr__(self, "actions", tuple(self.actions))
        must_be_functions(title, allowed=self.allowed)
        for action in self.actions:
            must_be_tool(title, action)
        if not callable(self.verify):
            raise InvalidDefinition(title, "a completion needs a check: verify(claim, call)")
        must_be_retry(title, self.retry)
        if len({tool.name for tool in self.actions}) != len(self.actions):
            raise InvalidDefinition(title, "two actions have the same name")
        for tool in self.actions:
            if tool.contract.side_effect is SideEffect.IRREVERSIBLE:
                raise InvalidDefinition(
                    title,
                    f"the tool {tool.name!r} is irreversible: it belongs into a fixed commit,"
                    " not into an open loop",
                )
        for unit in ("corrections", "verify_cost_microusd"):
            value = getattr(self, unit)
            if type(value) is not int or value < 0:
                raise InvalidDefinition(title, f"{unit} must be a whole number of at least 0")
        for unit in ("answer_within_ms", "approve_within_ms"):
            value = getattr(self, unit)
            if type(value) is not int or not 1 <= value <= MAX_MS:
                raise InvalidDefinition(title, f"{unit} must be a whole number of at least 1")

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The actions that the model may choose from."""
        return self.actions

    def start(self, view: View) -> Move:
        """Begin with the first question to the model."""
        frame = self._opened(_fresh_frame(view), view)
        return Move(frame, self._ask(frame))

    def on(self, frame: Frame, event: Event, view: View) -> Move:
        """Go on after an event; see the module for the order of checks."""
        match event:
            case Proposed():
                return self._on_proposed(frame, event, view)
            case Result():
                return self._on_result(frame, event, view)
            case Verdict():
                return self._on_verdict(frame, event, view)
            case Approved():
                waiting = command_from_json(frame["waiting"])
                assert isinstance(waiting, InvokeTool)
                return Move(frame, waiting.until(view.deadline_at))
            case Resolved(value, text, evidence, known):
                contract = self._contract(_waiting(frame).tool)
                verified = _event(
                    view, trace.RESULT_VERIFIED, tool=contract.name, evidence_ref=evidence
                )
                observation = _observe(contract, value, text)
                return self._absorb(frame, view, observation, known, (verified,))
            case Answered(text, author, known):
                return self._absorb(
                    frame, view, Observation.of(f"answer:{author}", text), known, ()
                )
        raise TypeError(f"an agent loop is told nothing about {type(event).__name__}")

    # ---- decide ----------------------------------------------------------------------------------

    def _opened(self, frame: Frame, view: View) -> Frame:
        """Open a round: what it allows is settled now, for the model and for the gate alike."""
        if self.allowed is None:
            return frame
        allowed = self.allowed(view)
        return {**frame, "allowed": [tool.name for tool in self.actions if tool.name in allowed]}

    def _ask(self, frame: Frame) -> AskModel:
        return AskModel(self.model, self._allowed_names(frame))

    def _allowed_names(self, frame: Frame) -> tuple[str, ...]:
        if self.allowed is None:
            return tuple(tool.name for tool in self.actions)
        return tuple(_strings(frame["allowed"]))

    def _on_proposed(self, frame: Frame, event: Proposed, view: View) -> Move:
        built = _event(
            view,
            trace.OBSERVATION_BUILT,
            state_version=view.state_version,
            allowed_tools=list(self._allowed_names(frame)),
            remaining_budget=dict(view.budget.snapshot()),
            observations=view.observation_count,
            facts=[*sorted(view.outputs)],
        )
        # A retry shows the model what the first attempt showed it: one observation a round.
        events: tuple[TraceEvent, ...] = (built,) if event.attempt == 0 else ()
        if event.end is not End.RETURNED:
            following = self._after_failure(frame, event, view)
            failed = _event(
                view,
                trace.MODEL_FAILED,
                timedOut=event.end is End.TIMED_OUT,
                cancelled=view.cancelled,
                attempt=event.attempt + 1,
                retry_in_ms=_retry_in_ms(following),
            )
            return Move(frame, following, (*events, failed))
        proposal = parse_proposal(event.raw)
        received = self._received(frame, proposal, view)
        events += (received,)
        if view.cancelled:
            return Move(frame, Stop(Reason.CANCELLED), events)
        match proposal:
            case Clarification(question):
                asked: dict[str, Json] = {
                    "question": question,
                    "answer_within_ms": self.answer_within_ms,
                }
                park = Stop(Reason.CLARIFICATION_REQUIRED, asked)
                return Move(frame, park, events)
            case CompletionClaim(answer):
                if isinstance(answer, str):
                    events += (_event(view, trace.FINAL, text_hash=digest(answer)),)
                price = self.verify_cost_microusd
                paid = charge_more(view.budget, remaining_ms=view.remaining_ms, cost_microusd=price)
                if isinstance(paid, Reason):
                    return Move(frame, _spent(paid), events)
                check = Verify(answer, view.limits.tool_ms, price)
                return Move({**frame, "claim": answer}, check, events)
            case Malformed(_, problem):
                return self._reject(frame, view, events, Reason.INVALID_PROPOSAL, problem)
            case ToolProposal():
                return self._gate(frame, proposal, view, events)

    def _after_failure(self, frame: Frame, event: Proposed, view: View) -> AskModel | Stop:
        """The same question again where policy, time and budget allow it; otherwise a stop."""
        if event.overflow and not view.cancelled:
            return _spent(Reason.OUTPUT_BUDGET_EXHAUSTED)
        reason = _cut_off(event.end, event.bound, view, Reason.MODEL_FAILED)
        passing = event.retryable or event.end is End.TIMED_OUT
        if reason is not Reason.MODEL_FAILED or not passing:
            return Stop(reason)
        pause_ms = _pause_ms(self.retry, event.attempt, view)
        if pause_ms is None:
            return Stop(reason)
        paid = charge_more(view.budget, remaining_ms=view.remaining_ms, model_calls=1)
        if isinstance(paid, Reason):
            return _spent(paid)
        return replace(self._ask(frame), attempt=event.attempt + 1, after_ms=pause_ms)

    def _received(self, frame: Frame, proposal: Proposal | Malformed, view: View) -> TraceEvent:
        detail: dict[str, Json] = {}
        match proposal:
            case ToolProposal(tool, arguments):
                kind, detail["tool_name"] = "tool", tool[:128]
                detail["arguments_hash"] = digest("arguments", tool, dumps(arguments))
                if tool in self._allowed_names(frame):
                    detail |= {
                        f"{name}_hash": digest(dumps(value))
                        for name, value in list(arguments.items())[:16]
                        if name.isidentifier() and len(name) <= 64
                    }
            case CompletionClaim():
                kind = "complete"
            case Clarification():
                kind = "clarify"
            case Malformed(kind, _):
                pass
        detail |= {"kind": kind, "proposal_type": kind, "modelCalls": view.model_calls}
        return _event(view, trace.PROPOSAL_RECEIVED, **detail)

    # ---- the policy gate -------------------------------------------------------------------------

    def _gate(
        self, frame: Frame, proposal: ToolProposal, view: View, events: tuple[TraceEvent, ...]
    ) -> Move:
        # Exact comparison against this round's list: no normalising, no near match, no look-up by
        # import.
        if proposal.tool not in self._allowed_names(frame):
            return self._reject(frame, view, events, Reason.INVALID_PROPOSAL, "unknown tool")
        tool = next(tool for tool in self.actions if tool.name == proposal.tool)
        contract = tool.contract
        checked = contract.validate(proposal.arguments)
        if isinstance(checked, Invalid):
            return self._reject(frame, view, events, Reason.INVALID_PROPOSAL, "invalid arguments")
        permit = permission(contract, checked, view)
        if permit is Permit.DENY:
            return self._reject(frame, view, events, Reason.PERMISSION_DENIED, "not permitted")
        if not view.budget.may_call(tool.name, tool.calls):
            return _refuse(frame, view, events, _spent(Reason.TOOL_CALL_BUDGET_EXHAUSTED))
        mark = fingerprint(view.state_version, contract, checked.json)
        frame = _at_version(frame, view.state_version)
        if mark in _strings(frame["seen"]):
            stop = Stop(Reason.REPEATED_PROPOSAL, {"fingerprint": mark})
            return _refuse(frame, view, events, stop)
        frame = {**frame, "seen": [*_strings(frame["seen"]), mark]}
        action = action_digest(contract, checked.json)
        stuck = self._stuck(_strings(frame["recent"]), action)
        if stuck is not None:
            return _refuse(frame, view, events, Stop(stuck, {"fingerprint": mark}))
        if view.remaining_ms <= 0:
            return _refuse(frame, view, events, _deadline())
        ask = contract.needs_approval or permit is Permit.WITH_APPROVAL
        command = executable(tool, checked, view, approval=ask, fixed=False)
        frame = {
            **frame,
            "recent": self._remember(frame, action),
            "waiting": command_to_json(command),
        }
        rule = _event(
            view,
            trace.POLICY_ALLOWED,
            tool=tool.name,
            side_effect=contract.side_effect.value,
            remaining_calls=view.budget.tool_calls_available,
            rule="with-approval" if ask else f"{contract.side_effect.value}-in-budget",
            fingerprint=mark,
            state_version=view.state_version,
            capability=command.capability.hashed,
        )
        events += (rule,)
        if ask:
            within_ms = self.approve_within_ms
            return Move(frame, Park.for_consent(contract, command, expires_ms=within_ms), events)
        return Move(frame, command, events)

    def _reject(
        self,
        frame: Frame,
        view: View,
        events: tuple[TraceEvent, ...],
        reason: Reason,
        problem: str,
    ) -> Move:
        rejected = _rejected(view, reason, problem)
        used = frame.get("corrections", 0)
        assert isinstance(used, int)
        if reason is Reason.INVALID_PROPOSAL and used < self.corrections:
            frame = {**frame, "corrections": used + 1}
            told = Observation.of("program", f"proposal:rejected:{reason.value}:{problem}")
            known = any(seen.digest == told.digest for seen in view.observations)
            return self._absorb(frame, view, told, known, (*events, rejected))
        return Move(frame, Stop(reason, {"problem": problem}), (*events, rejected))

    def _stuck(self, recent: list[str], action: str) -> Reason | None:
        if self.no_progress is None or recent.count(action) < self.no_progress.times:
            return None
        # A few actions in turn are an oscillation; one action alone, or among others that come
        # only once, is no progress.
        since = recent[recent.index(action) :]
        others = {other for other in since if other != action and since.count(other) > 1}
        return Reason.OSCILLATION if others else Reason.NO_PROGRESS

    def _remember(self, frame: Frame, action: str) -> list[Json]:
        if self.no_progress is None:
            return []
        recent = [*_strings(frame["recent"]), action][-self.no_progress.window :]
        return [*recent]

    # ---- validate and update ---------------------------------------------------------------------

    def _on_result(self, frame: Frame, event: Result, view: View) -> Move:
        waiting = _waiting(frame)
        contract = self._contract(waiting.tool)
        following = after_failed_read(contract, waiting, event, view)
        judged = judge(contract, waiting.arguments, event, view, following)
        if judged.following is not None:
            return Move(frame, judged.following, judged.events)
        if isinstance(event.reply, Succeeded):
            observation = _observe(contract, event.reply.value, event.reply.text)
        else:
            assert isinstance(event.reply, Refused)
            observation = failed_observation(contract, event.reply)
        return self._absorb(frame, view, observation, event.known, judged.events)

    def _on_verdict(self, frame: Frame, event: Verdict, view: View) -> Move:
        judged = judge_verdict(event, view)
        if judged.following is not None:
            return Move(frame, judged.following, judged.events)
        if event.ok:
            # A claim that was verified is the run's answer or the next stage's input, not a new
            # fact.
            return Move(frame, Finish(frame["claim"], fact=False), judged.events)
        frame = self._opened(frame, replace(view, step=view.step + 1))
        return Move(frame, self._ask(frame), judged.events, round_done=True)

    def _absorb(
        self,
        frame: Frame,
        view: View,
        observation: Observation,
        known: bool,
        events: tuple[TraceEvent, ...],
    ) -> Move:
        after = replace(view, step=view.step + 1)
        if not known:
            after = replace(
                after,
                state_version=view.state_version + 1,
                observation_count=view.observation_count + 1,
                observations=(*view.observations, observation)[-OBSERVATION_WINDOW:],
            )
        moved = _event(
            after,
            trace.STATE_TRANSITIONED,
            changed=not known,
            stateVersion=after.state_version,
            new_version=after.state_version,
            observationCount=after.observation_count,
        )
        frame = _at_version({**frame, "waiting": None}, after.state_version)
        frame = self._opened(frame, after)
        return Move(
            frame,
            self._ask(frame),
            (*events, moved),
            observation=None if known else observation,
            round_done=True,
        )

    def _contract(self, name: str) -> ToolContract:
        return next(tool.contract for tool in self.actions if tool.name == name)


# ---- judging what came back, shared with the fixed stages ----------------------------------------


@dataclass(frozen=True, slots=True)
class Judged:
    """What a call's end means: events for the trace, and what it forces: a stop, or the same call
    again; None where the stage goes on with it.
    """

    events: tuple[TraceEvent, ...]
    following: Stop | InvokeTool | Verify | None


def after_failed_read(
    contract: ToolContract, command: InvokeTool, event: Result, view: View
) -> InvokeTool | Stop | None:
    """The same read again where its policy, time and budget allow it, or the stop of a budget that
    is spent; None where its end stands as it is.
    """
    if event.end is End.RETURNED:
        passing = isinstance(event.reply, Refused) and event.reply.retryable
    else:
        passing = event.retryable or (event.end is End.TIMED_OUT and not event.bound)
    if not passing or view.cancelled:
        return None
    pause_ms = _pause_ms(contract.retries, event.attempt, view)
    if pause_ms is None:
        return None
    if not view.budget.may_call(contract.name):
        return _spent(Reason.TOOL_CALL_BUDGET_EXHAUSTED)
    return replace(command, attempt=event.attempt + 1, after_ms=pause_ms)


def after_failed_check(
    policy: Retry | None, command: Verify, event: Verdict, view: View
) -> Verify | Stop | None:
    """The same check again, as `after_failed_read` says it of a read; it costs its price alone."""
    passing = event.retryable or (event.end is End.TIMED_OUT and not event.bound)
    if not passing or view.cancelled:
        return None
    pause_ms = _pause_ms(policy, event.attempt, view)
    if pause_ms is None:
        return None
    price = command.cost_microusd
    paid = charge_more(view.budget, remaining_ms=view.remaining_ms, cost_microusd=price)
    if isinstance(paid, Reason):
        return _spent(paid)
    return replace(command, attempt=event.attempt + 1, after_ms=pause_ms)


def judge(
    contract: ToolContract,
    arguments: Mapping[str, Json],
    event: Result,
    view: View,
    following: InvokeTool | Stop | None = None,
) -> Judged:
    """Classify how a tool call ended; `following` is what its retry policy makes of a failure.

    A write without proof is an unknown effect, whatever the cause.
    """
    write = contract.side_effect.writes
    tried: dict[str, Json] = {}
    if contract.retries is not None:
        tried = {"attempt": event.attempt + 1, "retry_in_ms": _retry_in_ms(following)}
    if event.end is not End.RETURNED:
        failed = _event(
            view,
            trace.TOOL_FAILED,
            tool=contract.name,
            sideEffect=contract.side_effect.coarse,
            timedOut=event.end is End.TIMED_OUT,
            cancelled=view.cancelled,
            **tried,
        )
        if write:
            trigger = (
                "cancellation"
                if view.cancelled
                else "timeout"
                if event.end is End.TIMED_OUT
                else "exception"
            )
            return _doubt(contract, view, (failed,), trigger)
        reason = _cut_off(event.end, event.bound, view, Reason.TOOL_FAILED)
        return Judged((failed,), following or Stop(reason))
    reply = event.reply
    assert reply is not None
    status = {Succeeded: "success", Refused: "failed", Doubtful: "unknown"}[type(reply)]
    classified = _event(view, trace.RESULT_CLASSIFIED, tool=contract.name, status=status)
    if isinstance(reply, Doubtful) or (write and not event.settled):
        if write:
            return _doubt(contract, view, (classified,), "reported")
        return Judged((classified,), Stop(Reason.TOOL_FAILED, {"code": "unknown"}))
    if isinstance(reply, Refused):
        classified = replace(classified, detail={**classified.detail, **tried})
        if reply.retryable:
            return Judged((classified,), following)
        return Judged((classified,), Stop(Reason.TOOL_FAILED, {"code": reply.reason}))
    detail: dict[str, Json] = {}
    if contract.public is not None:
        detail = public(contract.public(contract.revive(dict(arguments)), reply.value))
    detail |= {"tool": contract.name, "evidence_ref": event.evidence}
    return Judged((classified, _event(view, trace.RESULT_VERIFIED, **detail)), None)


def judge_verdict(
    event: Verdict,
    view: View,
    following: Verify | Stop | None = None,
    *,
    failed_as: str = trace.COMPLETION_FAILED,
    found_as: str = trace.COMPLETION_VERIFIED,
) -> Judged:
    """Classify how a verification ended; `following` is as in `judge`, the other two are the types
    of the event that says so.
    """
    if event.end is not End.RETURNED:
        failed = _event(
            view,
            failed_as,
            timedOut=event.end is End.TIMED_OUT,
            cancelled=view.cancelled,
            attempt=event.attempt + 1,
            retry_in_ms=_retry_in_ms(following),
        )
        reason = _cut_off(event.end, event.bound, view, Reason.VERIFICATION_FAILED)
        return Judged((failed,), following or Stop(reason))
    evidence = {} if event.evidence is None else {"evidence_ref": event.evidence}
    detail = {**public({**event.detail, **evidence}), "verified": event.ok}
    return Judged((_event(view, found_as, **detail),), None)


def plain(detail: Mapping[str, Json]) -> dict[str, Json]:
    """Read what a workflow's own code says into JSON, before anything is written on its word.

    Raises `NotCanonical`.
    """
    value = normal(dict(detail))
    assert isinstance(value, dict)
    return value


def public(detail: Mapping[str, Json]) -> dict[str, Json]:
    """Read what a workflow's own code says for the trace, which everybody who follows a run reads:
    of more than MAX_PUBLIC_BYTES only the size is said. Raises `NotCanonical`.
    """
    value = plain(detail)
    size = len(canonical(value).encode())
    return value if size <= MAX_PUBLIC_BYTES else {"omitted_bytes": size}


def permission(contract: ToolContract, checked: Validated, view: View) -> Permit:
    """Ask the contract's policy. A policy that raises denies: doubt is no permission."""
    if (
        contract.permission is not None
        and contract.permission not in view.run.principal.permissions
    ):
        return Permit.DENY
    if contract.allow is None:
        return Permit.ALLOW
    try:
        return Permit(contract.allow(checked.model, view.run))
    except Exception:
        return Permit.DENY


def failed_observation(contract: ToolContract, reply: Refused) -> Observation:
    """What the model is told of a failure that may be tried again."""
    return Observation.of(contract.name, f"tool:{contract.name}:failed:{reply.reason}")


def observation_of(contract: ToolContract, reply: Succeeded | Refused) -> Observation:
    """The observation that a reply would add to the state."""
    if isinstance(reply, Refused):
        return failed_observation(contract, reply)
    return _observe(contract, reply.value, reply.text)


def _pause_ms(policy: Retry | None, attempt: int, view: View) -> int | None:
    """The pause before the next attempt; None where none is left, or it would come too late."""
    if policy is None:
        return None
    return policy.next_pause_ms(attempt, remaining_ms=view.remaining_ms, chance=view.random)


def _retry_in_ms(following: AskModel | InvokeTool | Verify | Stop | None) -> int | None:
    return following.after_ms if isinstance(following, AskModel | InvokeTool | Verify) else None


def _doubt(
    contract: ToolContract, view: View, events: tuple[TraceEvent, ...], trigger: str
) -> Judged:
    required = _event(
        view,
        trace.RECONCILIATION_REQUIRED,
        tool=contract.name,
        trigger=trigger,
        recovery=contract.recovery,
    )
    return Judged((*events, required), Stop(Reason.UNKNOWN_EFFECT, {"trigger": trigger}))


def _cut_off(end: End, bound: bool, view: View, otherwise: Reason) -> Reason:
    if view.cancelled:
        return Reason.CANCELLED
    return Reason.DEADLINE_EXHAUSTED if end is End.TIMED_OUT and bound else otherwise


def _observe(contract: ToolContract, value: Json, text: str) -> Observation:
    stable = dumps(contract.stable(value)) if contract.volatile else None
    return Observation.of(contract.name, text, stable)


def _refuse(frame: Frame, view: View, events: tuple[TraceEvent, ...], stop: Stop) -> Move:
    rejected = _rejected(view, stop.reason, stop.reason.value)
    if "fingerprint" in stop.detail:
        shown = {"fingerprint": stop.detail["fingerprint"], "state_version": view.state_version}
        rejected = replace(rejected, detail={**rejected.detail, **shown})
    return Move(frame, stop, (*events, rejected))


def _rejected(view: View, reason: Reason, problem: str) -> TraceEvent:
    return _event(
        view, trace.PROPOSAL_REJECTED, stable_reason_code=reason.value, problem=problem[:300]
    )


def _spent(reason: Reason) -> Stop:
    code = CODE_OF.get(reason)
    return Stop(reason, {"code": code.value} if code else {})


def _deadline() -> Stop:
    return _spent(Reason.DEADLINE_EXHAUSTED)


def _event(view: View, type_: str, **detail: Json) -> TraceEvent:
    return TraceEvent(type_, view.step, detail)


def _fresh_frame(view: View) -> Frame:
    return {"version": view.state_version, "seen": [], "recent": [], "waiting": None}


def _at_version(frame: Frame, version: int) -> Frame:
    # Only fingerprints of the current version can ever be met again: the version never goes back.
    return frame if frame["version"] == version else {**frame, "version": version, "seen": []}


def _waiting(frame: Frame) -> InvokeTool:
    command = command_from_json(frame["waiting"])
    assert isinstance(command, InvokeTool)
    return command


def _strings(value: Json) -> list[str]:
    assert isinstance(value, list)
    return [item for item in value if isinstance(item, str)]
