"""The run machine: state and event in; state, next command and trace out.

A worker, the in-process runner, the vectors and the simulator drive this one machine. It resolves
moves inside the stage tree (`Enter`, `Finish`) by itself and returns at every command that needs
the world. Pure: no I/O, no clock; times, ids and chance are handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from handrail.agent import trace
from handrail.agent.budget import CODE_OF, Budget, BudgetLeft, CallLimits, Phase
from handrail.agent.effects import upstream_key
from handrail.agent.fixed import Commit
from handrail.agent.stage import (
    OBSERVATION_WINDOW,
    Approved,
    AskModel,
    ChildDone,
    Command,
    Enter,
    Event,
    Finish,
    Frame,
    InvokeTool,
    Observation,
    Park,
    ParkKind,
    Proposed,
    Refused,
    Resolved,
    Result,
    Stop,
    Succeeded,
    Verify,
    View,
)
from handrail.agent.status import (
    STOPS,
    TERMINAL,
    Category,
    Reason,
    RunEvent,
    RunStatus,
    category_of,
    next_status,
)
from handrail.agent.tools import Principal, RunFacts
from handrail.agent.trace import TraceEvent
from handrail.agent.workflow import Workflow
from handrail.canonical import Json
from handrail.errors import InvariantBroken

_S, _E = RunStatus, RunEvent


class Mode(StrEnum):
    """Whether a run acts in earnest."""

    LIVE = "live"
    SHADOW = "shadow"  # everything but the dispatch: what it would write is recorded, never sent


class Level(NamedTuple):
    """One level of a run's position: the stage's name below its parent ("" for the root) and
    its frame.
    """

    name: str
    frame: Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The public and authoritative state of one run, as the ledger stores it between two steps.

    `pending` is the command that the next claim executes; `told` an event that arrived while the
    run rested (an approval, an answer, a proof) and is delivered instead. `observations` is a
    window, oldest first; `observation_count` counts all.
    """

    run_id: str
    tenant: str
    workflow: str
    workflow_version: str
    goal: str
    principal: Principal
    budget: Budget
    limits: CallLimits
    left: BudgetLeft
    input: Json = None
    mode: Mode = Mode.LIVE
    status: RunStatus = RunStatus.QUEUED
    reason: Reason | None = None
    step: int = 0
    state_version: int = 0
    levels: tuple[Level, ...] = ()
    pending: Command | None = None
    told: Event | None = None
    answer: Json = None
    observations: tuple[Observation, ...] = ()
    observation_count: int = 0
    outputs: Mapping[str, Json] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def model_calls(self) -> int:
        """Model calls charged so far."""
        return self.budget.model_calls - self.left.model_calls

    @property
    def tool_calls(self) -> int:
        """Tool calls charged so far, without those that are reserved and not started."""
        return self.budget.tool_calls - self.left.tool_calls_unused

    @property
    def path(self) -> tuple[str, ...]:
        """Where the run is in the stage tree."""
        return tuple(level.name for level in self.levels[1:])

    @property
    def facts(self) -> RunFacts:
        """What a policy or a contract's check may know of the run."""
        return RunFacts(
            run_id=self.run_id,
            tenant=self.tenant,
            goal=self.goal,
            principal=self.principal,
            input=self.input,
            outputs=self.outputs,
            tool_calls=self.tool_calls,
        )

    def view(
        self,
        *,
        remaining_ms: int,
        cancelled: bool = False,
        deadline_at: int | None = None,
        random: float = 0.5,
    ) -> View:
        """What the stages may know now."""
        return View(
            run=self.facts,
            budget=self.left,
            limits=self.limits,
            remaining_ms=remaining_ms,
            state_version=self.state_version,
            step=self.step,
            cancelled=cancelled,
            observations=self.observations,
            observation_count=self.observation_count,
            model_calls=self.model_calls,
            deadline_at=deadline_at,
            random=random,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """The machine's answer: the state after, what to do next, and what to record.

    `command` is what `state.pending` holds unless the run stopped. `observation` and `outputs` are
    new and go into rows of their own.
    """

    state: RunState
    command: Command
    events: tuple[TraceEvent, ...] = ()
    observation: Observation | None = None
    outputs: Mapping[str, Json] = field(default_factory=lambda: MappingProxyType({}))


def start(workflow: Workflow, state: RunState, view: View) -> Turn:
    """Put a run that was accepted at its first command; its status does not move."""
    move = workflow.start(view)
    root = replace(state, levels=(Level("", move.frame),))
    return _run(workflow, root, move.command, view, [])


def on(workflow: Workflow, state: RunState, event: Event, view: View) -> Turn:
    """Tell the run what happened and return what follows."""
    events: list[TraceEvent] = []
    state = _moves_of(state, event, events)
    if not state.levels:
        raise InvariantBroken(f"run {state.run_id} was never started")
    level = state.levels[-1]
    move = workflow.stage_at(state.path).on(level.frame, event, view)
    events += move.events
    changes: dict[str, Any] = {
        "levels": (*state.levels[:-1], level._replace(frame=move.frame)),
        "told": None,
    }
    if isinstance(move.command, AskModel | InvokeTool | Verify):
        changes["pending"] = move.command
    if move.round_done:
        changes["step"] = state.step + 1
    if move.observation is not None:
        changes |= _observed(state, move.observation)
    if isinstance(event, Proposed):
        changes["left"] = state.left.output_used(event.output_bytes)
    state = replace(state, **changes)  # at once: it has many fields, and this is each step's path
    return _run(workflow, state, move.command, view, events, move.observation)


def stop(
    state: RunState, reason: Reason, view: View, detail: Mapping[str, Json] | None = None
) -> Turn:
    """Stop a run from outside its stages: a refused claim, a cancellation, a lost worker."""
    events: list[TraceEvent] = []
    command = Stop(reason, detail or {})
    state = _stopped(state, command, view, events)
    return Turn(state, command, tuple(events))


def moved(state: RunState, event: RunEvent, events: list[TraceEvent]) -> RunState:
    """Make one move of the transition table and record it, if the status changes."""
    return _at(state, _move(state, state.status, event, events))


def resumed(state: RunState, event: RunEvent, events: list[TraceEvent], **detail: Json) -> RunState:
    """Open the next episode of a run that rested."""
    before = state.status
    state = moved(state, event, events)
    events.append(
        TraceEvent(trace.RUN_RESUMED, state.step, {"from": before, "cause": event.value, **detail})
    )
    return replace(state, reason=None)


def reopened(before: RunState, reason: Reason, events: list[TraceEvent]) -> None:
    """Open the episode in which a run that rested stops anew: each `run.stopped` closes one."""
    if before.status in _ANNOUNCED:
        detail: dict[str, Json] = {"from": before.status, "cause": reason.value}
        events.append(TraceEvent(trace.RUN_RESUMED, before.step, detail))


#: Rests that `run.stopped` has announced.
_ANNOUNCED: Final = frozenset({_S.AWAITING_INPUT, _S.RECONCILING, _S.HANDED_OFF})


def asked_again(workflow: Workflow, state: RunState, view: View) -> Verify | None:
    """The precondition of the write at which a run is taken up: what held when it was planned may
    hold no more. None where its stage has none.
    """
    stage = workflow.stage_at(state.path)
    if not isinstance(stage, Commit) or stage.precondition is None:
        return None
    return stage.asked(state.levels[-1].frame, view)


def write_due(workflow: Workflow, state: RunState, view: View) -> InvokeTool:
    """The write whose precondition is due."""
    stage = workflow.stage_at(state.path)
    assert isinstance(stage, Commit)
    return stage.write(state.levels[-1].frame, view)


def unasked(workflow: Workflow, state: RunState, view: View) -> Turn:
    """Go on to the write whose precondition is due without asking it."""
    return _run(workflow, state, write_due(workflow, state, view), view, [])


def phase_of(workflow: Workflow, state: RunState) -> Phase:
    """What the claim that goes on from this state has to pay for."""
    if state.told is not None:
        return Phase.RESUME
    match state.pending:
        case AskModel():
            return Phase.DECIDE
        case InvokeTool() as command if state.mode is Mode.SHADOW and _writes(workflow, command):
            return Phase.RESUME  # its stand-in is not paid for
        case InvokeTool() as command:
            return Phase.WRITE if _writes(workflow, command) else Phase.READ
    return Phase.RESUME


def claimed(state: RunState, phase: Phase, events: list[TraceEvent]) -> RunState:
    """Make and record the move that a claim means; the ledger's claim makes it in its own row."""
    if state.status is _S.QUEUED:
        state = moved(state, _E.STEP_CLAIMED, events)
    if phase is Phase.WRITE and state.status is _S.RUNNING:
        state = moved(state, _E.CHECKPOINT_RESUMED, events)
    return state


# ---- inside one turn -----------------------------------------------------------------------------


def _run(
    workflow: Workflow,
    state: RunState,
    command: Command,
    view: View,
    events: list[TraceEvent],
    observation: Observation | None = None,
) -> Turn:
    """Resolve moves inside the tree until a command needs the world."""
    outputs: dict[str, Json] = {}
    while True:
        match command:
            case Enter(child):
                stage = workflow.stage_at((*state.path, child))
                view = _moved(view, state)
                move = stage.start(view)
                state = replace(state, levels=(*state.levels, Level(child, move.frame)))
            case Finish(output, fact, back_to):
                name = state.path[-1]
                key = "/".join(state.path)
                outputs[key] = output
                if back_to is not None and state.status is _S.EXECUTING:
                    state = moved(state, _E.RETRYABLE_FAILURE, events)  # by another plan
                state = _finished(state, key, output, fact, events)
                view = _moved(view, state)
                level = state.levels[-1]
                stage = workflow.stage_at(state.path)
                move = stage.on(level.frame, ChildDone(name, output, back_to), view)
                levels = (*state.levels[:-1], level._replace(frame=move.frame))
                state = replace(state, levels=levels)
            case Stop():
                state = _stopped(state, command, view, events)
                return Turn(state, command, tuple(events), observation, outputs)
            case _ if state.status is _S.CANCELLING:
                command = Stop(Reason.CANCELLED)  # nothing starts after cancel
                continue
            case Park(action=InvokeTool() as action) if _shadowed(workflow, state, action):
                if _lacks_stand_in(workflow, action):
                    command = _would_write(state, replace(action, approval=True), events)
                    continue
                asked: dict[str, Json] = {
                    "tool": action.tool,
                    "arguments_hash": action.arguments_hash,
                }
                events.append(TraceEvent(trace.APPROVAL_SHADOWED, state.step, asked))
                level = state.levels[-1]
                stage = workflow.stage_at(state.path)
                move = stage.on(level.frame, Approved(_NOBODY, (_NOBODY,)), view)
                levels = (*state.levels[:-1], level._replace(frame=move.frame))
                state = replace(state, levels=levels)
            case InvokeTool() if _shadowed(workflow, state, command):
                if _lacks_stand_in(workflow, command):
                    command = _would_write(state, command, events)
                    continue
                if state.pending is not command:
                    state = replace(state, pending=command)
                return Turn(state, command, tuple(events), observation, outputs)
            case Park():
                state = _parked(state, command, events)
                return Turn(state, command, tuple(events), observation, outputs)
            case _:
                if state.pending is not command:
                    state = replace(state, pending=command)
                if isinstance(command, InvokeTool) and _writes(workflow, command):
                    state = _towards_execution(state, command, events)
                return Turn(state, command, tuple(events), observation, outputs)
        events += move.events
        command = move.command


def _shadowed(workflow: Workflow, state: RunState, command: InvokeTool) -> bool:
    """Whether a call is a write that is not to be made: the run is a shadow."""
    return state.mode is Mode.SHADOW and _writes(workflow, command)


def _lacks_stand_in(workflow: Workflow, command: InvokeTool) -> bool:
    return workflow.tool_named(command.tool).shadow is None


#: Who agrees to what a shadow run would write.
_NOBODY: Final = "shadow"


def _would_write(state: RunState, command: InvokeTool, events: list[TraceEvent]) -> Stop:
    """End a shadow run where it would write: it claims nothing beyond that."""
    events.append(effect_shadowed(state, command, stand_in=False))
    return Stop(Reason.CANCELLED, {"shadow": True, "tool": command.tool})


def effect_shadowed(state: RunState, command: InvokeTool, *, stand_in: bool) -> TraceEvent:
    """Record what a live run would have written at this place, and nothing of its text."""
    assert command.intent_key is not None
    detail: dict[str, Json] = {
        "tool": command.tool,
        "contract_version": command.contract_version,
        "arguments_hash": command.arguments_hash,
        "idempotency_key_hash": upstream_key(state.tenant, command.intent_key),
        "approval": command.approval,
        "stand_in": stand_in,
    }
    return TraceEvent(trace.EFFECT_SHADOWED, state.step, detail)


def _moves_of(state: RunState, event: Event, events: list[TraceEvent]) -> RunState:
    """Make the status moves that a tool's result means, before its stage judges it."""
    status = state.status
    if isinstance(event, Result) and status is _S.RUNNING:
        # A read was never durable as `executing`: the commit traces both moves.
        assert isinstance(state.pending, InvokeTool)
        status = _move(state, status, _cause_of(state.pending), events)
    if status is not _S.EXECUTING:
        return _at(state, status)
    match event:
        case Resolved():  # another run's recorded result
            status = _move(state, status, _E.RESULT_VERIFIED, events)
        case Result(reply=Succeeded(), settled=True):
            status = _move(state, status, _E.RESULT_VERIFIED, events)
        case Result(reply=Refused(retryable=True), settled=True):
            status = _move(state, status, _E.RETRYABLE_FAILURE, events)
    return _at(state, status)


def _move(
    state: RunState, status: RunStatus, event: RunEvent, events: list[TraceEvent]
) -> RunStatus:
    following = next_status(state.run_id, status, event)
    if following is not status:
        detail: dict[str, Json] = {"event": event.value, "from": status, "to": following}
        events.append(TraceEvent(trace.RUN_MOVED, state.step, detail))
    return following


def _at(state: RunState, status: RunStatus) -> RunState:
    return state if status is state.status else replace(state, status=status)


def _cause_of(command: InvokeTool) -> RunEvent:
    # The same two moves whoever chose the call: a model's proposal, or the program's own
    # checkpoint.
    return _E.CHECKPOINT_RESUMED if command.fixed else _E.PROPOSAL_ALLOWED


def _towards_execution(state: RunState, command: InvokeTool, events: list[TraceEvent]) -> RunState:
    if state.status in (_S.QUEUED, _S.EXECUTING):
        return state  # a workflow whose first stage writes is moved by its first claim
    return moved(state, _cause_of(command), events)


def _finished(
    state: RunState, key: str, output: Json, fact: bool, events: list[TraceEvent]
) -> RunState:
    version = state.state_version + fact
    events.append(
        TraceEvent(trace.STAGE_FINISHED, state.step, {"stage": key, "new_version": version})
    )
    return replace(
        state,
        levels=state.levels[:-1],
        outputs=MappingProxyType({**state.outputs, key: output}),
        state_version=version,
    )


def _observed(state: RunState, observation: Observation) -> dict[str, Any]:
    return {
        "observations": (*state.observations, observation)[-OBSERVATION_WINDOW:],
        "observation_count": state.observation_count + 1,
        "state_version": state.state_version + 1,
    }


def _moved(view: View, state: RunState) -> View:
    """The same moment, seen from the state after."""
    return replace(
        view,
        run=replace(view.run, outputs=state.outputs, tool_calls=state.tool_calls),
        budget=state.left,
        state_version=state.state_version,
        step=state.step,
        observations=state.observations,
        observation_count=state.observation_count,
    )


def _parked(state: RunState, park: Park, events: list[TraceEvent]) -> RunState:
    if state.status is _S.EXECUTING:
        state = moved(state, _E.RESULT_VERIFIED, events)
    event = _E.APPROVAL_NEEDED if park.kind is ParkKind.APPROVAL else _E.QUESTION_ASKED
    state = moved(state, event, events)
    if park.action is not None:
        events.append(
            TraceEvent(
                trace.APPROVAL_REQUESTED,
                state.step,
                {
                    "tool": park.action.tool,
                    "arguments_hash": park.action.arguments_hash,
                    "stateVersion": state.state_version,
                },
            )
        )
    return replace(state, pending=park)


#: Stops that the table reaches only while a tool is being executed.
_ONLY_EXECUTING: Final = frozenset({_E.TOOL_FAILED, _E.INTENT_WITH_PERSON, _E.APPROVAL_EXPIRED})


def _stopped(state: RunState, command: Stop, view: View, events: list[TraceEvent]) -> RunState:
    if state.status is _S.CANCELLING and command.reason not in _CANCELLING_STOPS:
        command = Stop(Reason.CANCELLED, command.detail)  # it was asked to cancel before it stopped
    event, category = STOPS[command.reason]
    if state.status is _S.CANCELLING and command.reason is Reason.CANCELLED:
        event = _E.CANCEL_SETTLED
    if event in _ONLY_EXECUTING and state.status is _S.RUNNING:
        state = moved(state, _E.CHECKPOINT_RESUMED, events)
    if state.status is _S.EXECUTING and event not in _EXECUTING_STOPS:
        state = moved(state, _E.LEASE_RETURNED, events)
    before = state.status
    reopened(state, command.reason, events)
    state = replace(state, status=next_status(state.run_id, before, event))
    left = state.left.settled()
    rests = state.status not in TERMINAL
    if not rests:
        left = left.without_compensation()
    state = replace(
        state,
        reason=command.reason,
        left=left,
        answer=command.answer if command.reason is Reason.COMPLETED else None,
        pending=state.pending if rests else None,
    )
    if command.reason is Reason.COMPLETED:
        rounds = state.budget.steps - left.steps
        summary: dict[str, Json] = {"steps": rounds, "tool_calls": state.tool_calls}
        events.append(TraceEvent(trace.RUN_COMPLETED, state.step, summary))
    detail = stop_detail(state, command, category, view.remaining_ms)
    # The stop records its own move: nothing stands between what stopped the run and the stop.
    detail |= {"event": event.value, "from": before.value}
    events.append(TraceEvent(trace.RUN_STOPPED, state.step, detail))
    return state


_CANCELLING_STOPS: Final = frozenset({Reason.CANCELLED, Reason.UNKNOWN_EFFECT})
_EXECUTING_STOPS: Final = frozenset(
    {
        _E.TOOL_FAILED,
        _E.INTENT_CONFLICT,
        _E.INTENT_WITH_PERSON,
        _E.APPROVAL_EXPIRED,
        _E.BUDGET_SPENT,
        _E.EFFECT_UNKNOWN,
        _E.WORKER_LOST,
        _E.VERSION_UNAVAILABLE,
        _E.CANCEL_AT_REST,
    }
)


def stop_detail(
    state: RunState, command: Stop, category: Category, remaining_ms: int
) -> dict[str, Json]:
    """Explain a stop: stable reason, snapshot of all budgets, products so far, pointers to
    evidence.
    """
    # Nothing of the run is active any more: no slot of its concurrency is used.
    left = {**state.left.snapshot(), "concurrency": state.budget.concurrency}
    limits = state.budget.to_json() | {
        f"tool_calls.{tool}": limit for tool, limit in state.budget.per_tool.items()
    }
    used: dict[str, Json] = {name: limits[name] - left[name] for name in left}
    used["tool_calls"] = state.tool_calls
    used["deadline_ms"] = state.budget.deadline_ms - max(0, remaining_ms)
    detail: dict[str, Json] = {
        "reason": command.reason.value,
        "category": category.value,
        "status": state.status.value,
        "stateVersion": state.state_version,
        "remainingModelCalls": max(0, state.left.model_calls),
        "remainingToolCalls": max(0, state.left.tool_calls_available),
        "budget_left": {**left, "deadline_ms": max(0, remaining_ms)},
        "budget_used": used,
        "products": {"outputs": [*sorted(state.outputs)], "observations": state.observation_count},
        "evidence_ref": f"trace:{state.run_id}",
    }
    if category_of(command.reason) is Category.BUDGET:
        detail["exhausted"] = command.reason.value
    code = CODE_OF.get(command.reason)
    if code is not None:
        detail["code"] = code.value
    for key, value in command.detail.items():
        detail.setdefault(key, value)
    return detail


def _writes(workflow: Workflow, command: InvokeTool) -> bool:
    return workflow.tool_named(command.tool).contract.side_effect.writes


__all__ = [
    "Level",
    "RunState",
    "Turn",
    "asked_again",
    "claimed",
    "moved",
    "on",
    "phase_of",
    "resumed",
    "start",
    "stop",
    "stop_detail",
    "unasked",
    "write_due",
]
