"""One step of one run: claim, observe, decide, act, validate, update, publish.

The shell loads, asks the machine, executes its commands and commits; it decides nothing. A round of
the loop with a read is one claim and one commit; a write goes through checkpoint, lock, dispatch
and outcome. No connection to the database is held while a model or a tool is called.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from handrail import logs, tracing
from handrail.agent import machine, protocol, trace
from handrail.agent.budget import Phase, call_limit, charge_more
from handrail.agent.effects import (
    CompensationRecord,
    Doubt,
    EffectStatus,
    Terms,
    may_be_forgotten,
    upstream_key,
)
from handrail.agent.loop import observation_of
from handrail.agent.machine import Mode, RunState, Turn
from handrail.agent.protocol import Go, Locked, Ruling
from handrail.agent.stage import (
    Answered,
    AskModel,
    Checked,
    End,
    Event,
    InvokeTool,
    Observation,
    Park,
    Proposed,
    Refused,
    Reply,
    Resolved,
    Result,
    Stop,
    Succeeded,
    Verdict,
    Verify,
    View,
)
from handrail.agent.status import CLAIMABLE, TERMINAL, Reason, RunEvent, RunStatus
from handrail.agent.tools import Tool, ToolContract, contract_hash
from handrail.agent.trace import TraceEvent
from handrail.agent.workflow import Workflow
from handrail.broker.message import StepMessage
from handrail.canonical import Json, canonical, normal
from handrail.errors import InvariantBroken, NotCanonical, ToolRefused
from handrail.gateway.model import Folded, ModelRequest, OutputOverflow, fold, may_pass
from handrail.ledger.errors import DatabaseUnavailable, EffectForgotten, UnknownRun
from handrail.ledger.ledger import Claim, Plan, Ruled, StepEnd
from handrail.ledger.lock import Refusal
from handrail.ledger.session import ConnectionLost
from handrail.tasks.calls import Called, ToolCall, call
from handrail.tasks.judge import judged, reason_of
from handrail.tasks.runtime import Draining, Handle, Runtime
from handrail.tasks.sender import LOCK_PAUSE_MS, OUTCOME_PAUSES_S, Sending, whole_ms

log = logging.getLogger("handrail.tasks")
#: Of such an effect it is certain that the service has not carried it out.
_NOT_MADE: Final = frozenset({EffectStatus.PLANNED, EffectStatus.ABSENT})
_T = TypeVar("_T")


async def run_step(runtime: Runtime, message: StepMessage) -> None:
    """Run the step that a message hints at, if it is due and nobody else has it.

    The message grants nothing: the claim reads and charges the row. A database that is away loses
    nothing: the step stays due, or its lease runs out, and the sweep publishes it again.
    """
    started = runtime.clock()
    try:
        claim = await runtime.claims.ask(message, alone=not runtime.at_work)
    except Draining:
        runtime.counts["returned"] += 1
        runtime.publish([message])
        return
    except (ConnectionLost, DatabaseUnavailable) as error:
        runtime.counts["claim-failed"] += 1
        log.warning("run %s was not claimed (%s); the sweep repeats it", message.run_id, error)
        return
    if claim is None:
        runtime.counts["dropped"] += 1  # late or duplicate: normal
        return
    loop = asyncio.get_running_loop()
    until = claim.now + max(0, claim.remaining_ms) + protocol.LEASE_MARGIN_MS
    ends = started + runtime.ledger.lease_ms / 1000
    handle = Handle(claim, loop.create_future(), loop, until, ends, task=asyncio.current_task())
    runtime.enter(handle)
    try:
        if runtime.draining:  # it began while this claim was on its way
            runtime.give_back(handle)
            return
        with logs.about(**_ids(claim)):
            logs.event(log, "step.claimed")
            await _Step(runtime, claim, handle, started).run()
            logs.event(log, "step.ended", ms=whole_ms(runtime.clock() - started))
        runtime.counts["steps"] += 1
    except (ConnectionLost, DatabaseUnavailable) as error:
        runtime.counts["step-failed"] += 1
        log.warning("a step of run %s was not committed (%s); it is recovered", claim.run_id, error)
    except (UnknownRun, EffectForgotten) as error:  # the ledger was set back under it
        runtime.counts["forgotten"] += 1
        log.error("a step of run %s was in vain: %s", claim.run_id, error)
    finally:
        runtime.leave(handle)


def _ids(claim: Claim) -> dict[str, object]:
    """What the lines of a step carry."""
    state = claim.state
    names = {"run_id": claim.run_id, "step": state.step, "epoch": claim.epoch}
    whole = tracing.trace_of(claim.run_id, claim.traceparent)
    spans = tracing.ids_of(tracing.child(whole, *names.values()))
    return {**names, "workflow": f"{state.workflow}@{state.workflow_version}", **spans}


class _Over(BaseException):
    """Control flow: the step has committed its end and does nothing more.

    Not an Exception, so that no handler takes it for a failure.
    """


class _Lost(_Over):
    """Control flow: the claim was fenced off or the run ended; nothing more may be done or
    written.
    """


@dataclass(slots=True)
class _Told:
    """The latest turn and what led to it, so that it can be judged again under a wish to cancel."""

    before: RunState
    event: Event | None
    turn: Turn


class _Step:
    """One claimed step at work."""

    def __init__(self, runtime: Runtime, claim: Claim, handle: Handle, started: float) -> None:
        self.runtime = runtime
        self.ledger = runtime.ledger
        self.claim = claim
        self.handle = handle
        self.started = started
        self.workflow: Workflow = runtime.workflow(
            claim.state.workflow, claim.state.workflow_version
        )
        self.events: list[TraceEvent] = []
        self.observation: Observation | None = None
        self.outputs: dict[str, Json] = {}
        self.output_bytes = 0
        self.unasked = False  # the precondition of the write was left out: it may have been made

    # ---- time and view ---------------------------------------------------------------------------

    def remaining_ms(self) -> int:
        """Working time left: one reading of the ledger's clock, then the monotonic clock alone."""
        return self.claim.remaining_ms - whole_ms(self.runtime.clock() - self.started)

    def now_ms(self) -> int:
        """The ledger's time, by the same two clocks."""
        return self.claim.now + whole_ms(self.runtime.clock() - self.started)

    def view(self, state: RunState, *, cancelled: bool | None = None) -> View:
        return state.view(
            remaining_ms=self.remaining_ms(),
            cancelled=self.handle.wish.done() if cancelled is None else cancelled,
            deadline_at=self.claim.deadline_at,
            random=self.runtime.chance(),
        )

    def _span(self, what: str, attempt: int) -> str | None:
        """The traceparent of a call of this step."""
        claim = self.claim
        return tracing.below(claim.traceparent, claim.run_id, claim.epoch, what, attempt)

    # ---- the round -------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            await self._run()
        except _Lost:
            self.runtime.counts["fenced"] += 1
            logs.event(log, "step.fenced")
        except _Over:
            pass

    async def _run(self) -> None:
        claim = self.claim
        state = claim.state
        if state.status is not claim.status:
            state = replace(state, status=claim.status)
        refusal = claim.refusal
        if refusal is None and not state.budget.concurrency:
            refusal = Reason.CONCURRENCY_BUDGET_EXHAUSTED  # not even this step may be at work
        if refusal is not None:
            await self._refused(state, refusal)
            return
        told = self._asked_again(self._guarded(state, lambda: self._first(state)))
        if claim.phase is Phase.WRITE and not await self._may_go_on(told):
            return
        asked = acted = False
        while True:
            command, state = told.turn.command, told.turn.state
            event: Event
            match command:
                case AskModel(attempt=attempt) if claim.phase is Phase.DECIDE and (
                    attempt or not asked
                ):
                    asked = True
                    if attempt:
                        state = await self._pay(told, after_ms=command.after_ms, model_calls=1)
                    event = await self._ask(state, command)
                case InvokeTool() if self._writes(command) and state.mode is Mode.SHADOW:
                    if acted:
                        await self._commit(told)
                        return
                    acted = True
                    await self._must_be_usable(state, command)
                    event = await self._stand_in(state, command)
                case InvokeTool() if not acted and self._writes(command):
                    await self._write(told, command)
                    return
                case InvokeTool(attempt=attempt) if attempt or (
                    not acted and state.left.tool_calls_reserved
                ):
                    acted = True  # a claim pays for one read
                    if attempt:
                        state = await self._pay(told, after_ms=command.after_ms, tool_calls=1)
                    await self._must_be_usable(state, command)
                    state, event = await self._read(state, command)
                case Verify(before_write=True, attempt=0) if self.observation is not None:
                    await self._commit(told)  # which keeps one observation: why a plan was refused
                    return
                case Verify(before_write=True, attempt=0) if self._may_be_made(state):
                    told = self._unasked(state)
                    continue
                case Verify(cost_microusd=price, attempt=attempt) if attempt or not acted:
                    acted = not command.before_write  # after which the same claim writes
                    if price or attempt:
                        state = await self._pay(
                            told, after_ms=command.after_ms, cost_microusd=price
                        )
                    event = await self._verify(state, command)
                case _:
                    await self._commit(told)
                    return
            told = self._tell(state, event)

    async def _pay(self, told: _Told, *, after_ms: int = 0, **calls: int) -> RunState:
        """Charge one more call of this step after a pause, durably, before it is made.

        Where a budget or the deadline refuses it, or a cancel was wished, that stop is committed
        and the step ends (`_Over`). A wish ends the pause at once.
        """
        if after_ms:
            await asyncio.wait({self.handle.wish}, timeout=after_ms / 1000)
        state = told.turn.state
        here = _Told(state, None, Turn(state, told.turn.command))
        left = charge_more(state.left, remaining_ms=self.remaining_ms(), **calls)
        if self.handle.wish.done():
            self._cancelled_or_lost(here)
        elif isinstance(left, Reason):
            await self._stop(state, left)
        elif self.ledger.charge_more(self.claim, **calls):
            return replace(state, left=left)
        else:
            self._cancelled_or_lost(here)
        raise _Over

    async def _must_be_usable(self, state: RunState, command: InvokeTool) -> None:
        """Hold a read against its capability right before it is made, or stop the run."""
        problem = command.unusable(
            subject=state.principal.subject, state_version=state.state_version, now=self.now_ms()
        )
        if problem is not None:
            reason, detail = problem
            await self._stop(state, reason, problem=detail)
            raise _Over

    async def _stop(self, state: RunState, reason: Reason, **detail: Json) -> None:
        turn = machine.stop(state, reason, self.view(state), detail)
        self.events += turn.events
        await self._commit(_Told(state, None, turn))

    def _first(self, state: RunState) -> _Told:
        """Where the step begins: at the root, at an event that has waited, or at the pending
        command.
        """
        if not state.levels:
            turn = machine.start(self.workflow, state, self.view(state))
            return _Told(state, None, turn)
        if state.told is not None:
            event = self._known(state, state.told)
            return _Told(state, event, machine.on(self.workflow, state, event, self.view(state)))
        command = state.pending
        if command is None or isinstance(command, Park):
            raise InvariantBroken(f"run {state.run_id} is due and has nothing to do")
        if isinstance(command, InvokeTool):
            command = command.until(self.claim.deadline_at)
            state = replace(state, pending=command)
        return _Told(state, None, Turn(state, command))

    def _asked_again(self, told: _Told) -> _Told:
        """Ask the precondition of a write that is taken up again."""
        state, command = told.turn.state, told.turn.command
        if told.event is not None or not isinstance(command, InvokeTool):
            return told
        asked = machine.asked_again(self.workflow, state, self.view(state))
        return told if asked is None else replace(told, turn=replace(told.turn, command=asked))

    def _may_be_made(self, state: RunState) -> bool:
        """Whether the very write whose precondition is due may have been made, by whichever run:
        then its doubt is settled first, or its recorded result is taken.
        """
        if state.mode is Mode.SHADOW:
            return False
        command = machine.write_due(self.workflow, state, self.view(state))
        effect_id = upstream_key(state.tenant, command.intent_key or "")
        if self._may_be_forgotten(effect_id):
            return True
        effect = self.ledger.find_effect(effect_id)
        if effect is None or effect.arguments_hash != command.arguments_hash:
            return False
        return effect.status not in _NOT_MADE

    def _unasked(self, state: RunState) -> _Told:
        """Leave the precondition out; the dispatch is told, which sends nothing on that ground."""
        self.unasked = True

        def go_on() -> _Told:
            return _Told(state, None, machine.unasked(self.workflow, state, self.view(state)))

        return self._guarded(state, go_on)

    async def _may_go_on(self, told: _Told) -> bool:
        """Whether the lock of a write is to be had, before its precondition is asked once more:
        while Redis is away nobody outside is asked in vain. If not, the lease is given back.
        """
        command = told.turn.state.pending
        if not isinstance(told.turn.command, Verify) or not isinstance(command, InvokeTool):
            return True
        effect_id = upstream_key(told.turn.state.tenant, command.intent_key or "")
        granted = await self._locked(effect_id, command)
        if granted is None:
            return False
        await self._elsewhere(lambda: self.runtime.lock.release(effect_id, granted))
        return True

    async def _locked(self, effect_id: str, command: InvokeTool) -> str | None:
        """Take the lock of a write; None where it is not to be had, and the lease was given
        back.
        """
        ttl_ms = command.timeout_ms + protocol.LEASE_MARGIN_MS
        granted = await self._elsewhere(lambda: self.runtime.lock.acquire(effect_id, ttl_ms=ttl_ms))
        if not isinstance(granted, Refusal):
            return granted
        problem = granted.value
        ruled = self._rule_mine(
            lambda locked: protocol.give_back(locked, problem, due_in_ms=LOCK_PAUSE_MS)
        )
        self.runtime.send(ruled.due)
        return None

    def _tell(self, state: RunState, event: Event) -> _Told:
        """Tell the machine what happened, and keep what it records."""

        def tell() -> _Told:
            turn = machine.on(self.workflow, state, event, self.view(state))
            return _Told(state, event, turn)

        return self._guarded(state, tell)

    def _guarded(self, state: RunState, act: Callable[[], _Told]) -> _Told:
        """Run the machine; a workflow's own code that raises is a matter for a person, not for
        a retry.
        """
        try:
            told = act()
        except InvariantBroken:
            raise
        except BaseException as error:  # also what would end the event loop: it is sync code
            log.exception("run %s: the code of workflow %s raised", state.run_id, state.workflow)
            problem: dict[str, Json] = {
                "problem": f"the workflow's code raised {type(error).__name__}",
                "stage": "/".join(state.path),
            }
            turn = machine.stop(state, Reason.HANDOFF_REQUIRED, self.view(state), problem)
            told = _Told(state, None, turn)
        self.events += told.turn.events
        self.observation = told.turn.observation or self.observation
        self.outputs |= told.turn.outputs
        return told

    def _writes(self, command: InvokeTool) -> bool:
        return self._tool(command).contract.side_effect.writes

    def _tool(self, command: InvokeTool) -> Tool:
        return self.workflow.tool_named(command.tool)

    # ---- decide ----------------------------------------------------------------------------------

    async def _ask(self, state: RunState, command: AskModel) -> Proposed:
        model = self.runtime.models.get(command.model)
        if model is None:
            log.error("run %s: no model is named %r here", state.run_id, command.model)
            return Proposed(End.RAISED)
        limit_ms, bound = call_limit(state.limits.model_ms, self.remaining_ms())
        request = self._request(state, command)
        left = state.left.output_bytes
        folded = Folded()

        async def ask() -> Any:
            return await fold(model.stream(request), output_bytes_left=left, into=folded)

        with tracing.inside(request.traceparent):
            done = await call(ask, limit_ms=limit_ms, wish=self.handle.wish)
        if done.error is not None:
            log.info("run %s: the model call failed: %s", state.run_id, type(done.error).__name__)
        overflow = isinstance(done.error, OutputOverflow)
        produced = left if overflow else folded.output_bytes
        self.output_bytes += produced
        return Proposed(
            done.end,
            folded.raw if done.end is End.RETURNED else None,
            bound,
            overflow=overflow,
            retryable=may_pass(done.error),
            attempt=command.attempt,
            output_bytes=produced,
        )

    def _request(self, state: RunState, command: AskModel) -> ModelRequest:
        return ModelRequest(
            goal=state.goal,
            input=state.input,
            facts=MappingProxyType(dict(state.outputs)),
            observations=tuple(
                MappingProxyType({"source": o.source, "text": o.text}) for o in state.observations
            ),
            tools=tuple(_described(self.workflow.tool_named(name)) for name in command.tools),
            budget_left=MappingProxyType(state.left.snapshot()),
            state_version=state.state_version,
            remaining_ms=self.remaining_ms(),
            observation_count=state.observation_count,
            traceparent=self._span("model", command.attempt),
        )

    # ---- act: a read -----------------------------------------------------------------------------

    async def _read(self, state: RunState, command: InvokeTool) -> tuple[RunState, Event]:
        tool = self._tool(command)
        if not self.runtime.may_start(self.handle, reserved=True):
            raise _Lost
        if command.tool in state.left.per_tool and not self.ledger.charge_tool(
            self.claim, command.tool
        ):
            raise _Lost
        state = replace(state, left=state.left.tool_call_used(command.tool))
        limit_ms, bound = call_limit(command.timeout_ms, self.remaining_ms())
        context = self._context(command, limit_ms, state)
        call_id = self.claim.claim_id
        if command.attempt:
            call_id = f"{call_id}.{command.attempt + 1}"
        started: dict[str, Json] = {
            "tool": command.tool,
            "tool_call_id": call_id,
            "timeout_ms": limit_ms,
            "idempotency_key_hash": None,
            "arguments_hash": command.arguments_hash,
            "contract_version": command.contract_version,
            "state_version": command.state_version,
        }
        self.events.append(TraceEvent(trace.TOOL_STARTED, state.step, started))
        arguments = tool.contract.revive(dict(command.arguments))
        done = await call(
            tool.execute,
            arguments,
            context,
            limit_ms=limit_ms,
            wish=self.handle.wish,
            aborted=context.aborted,
        )
        end, reply = judged(tool.contract, arguments, done, state.facts)
        known = self._is_known(state, tool.contract, reply)
        return state, Result(
            end,
            reply,
            bound,
            known,
            evidence=f"call:{call_id}",
            retryable=_passing(done.error),
            attempt=command.attempt,
        )

    def _context(self, command: InvokeTool, limit_ms: int, state: RunState) -> ToolCall:
        return ToolCall(
            run_id=state.run_id,
            tenant=state.tenant,
            principal=state.principal,
            tool=command.tool,
            timeout_ms=limit_ms,
            attempt=command.attempt + 1,
            facts=state.outputs,
            traceparent=self._span(command.tool, command.attempt),
        )

    def _is_known(self, state: RunState, contract: ToolContract, reply: Reply | None) -> bool:
        if not isinstance(reply, Succeeded | Refused):
            return False
        return self._seen(state, observation_of(contract, reply))

    def _seen(self, state: RunState, told: Observation) -> bool:
        if any(seen.digest == told.digest for seen in state.observations):
            return True
        if state.observation_count <= len(state.observations):
            return False  # the window holds all there are
        return self.ledger.observed(state.run_id, told.digest)

    def _known(self, state: RunState, event: Event) -> Event:
        """Say of an event that has waited whether what it adds is in the state already."""
        match event:
            case Resolved(value, text, _) if isinstance(state.pending, InvokeTool):
                contract = self._tool(state.pending).contract
                told = observation_of(contract, Succeeded(value, text))
                return replace(event, known=self._seen(state, told))
            case Answered(text, author):
                told = Observation.of(f"answer:{author}", text)
                return replace(event, known=self._seen(state, told))
        return event

    async def _verify(self, state: RunState, command: Verify) -> Verdict:
        if not self.runtime.may_start(self.handle):
            raise _Lost
        name = "precondition" if command.before_write else "verify"
        check = getattr(self.workflow.stage_at(state.path), name, None)
        assert check is not None, "a stage that asks for a check has one"
        limit_ms, bound = call_limit(command.timeout_ms, self.remaining_ms())
        context = ToolCall(
            run_id=state.run_id,
            tenant=state.tenant,
            principal=state.principal,
            tool=name,
            timeout_ms=limit_ms,
            attempt=command.attempt + 1,
            facts=state.outputs,
            traceparent=self._span(name, command.attempt),
        )
        done = await call(
            check,
            command.claim,
            context,
            limit_ms=limit_ms,
            wish=self.handle.wish,
            aborted=context.aborted,
        )
        if done.end is not End.RETURNED:
            passing = _passing(done.error)
            return Verdict(done.end, bound=bound, retryable=passing, attempt=command.attempt)
        match done.value:
            case Checked(ok, detail, evidence):
                return Verdict(done.end, ok is True, detail, evidence, bound)
            case verdict:
                return Verdict(done.end, verdict is True, bound=bound)

    # ---- act: what a shadow run does instead of a write ------------------------------------------

    async def _stand_in(self, state: RunState, command: InvokeTool) -> Event:
        """Have the tool's stand-in say what the service would, and judge that like a result.

        There is no effect, so that there is no doubt either: whatever is no receipt is a refusal.
        """
        tool = self._tool(command)
        if tool.shadow is None:  # it had one when this was decided
            return Result(End.RETURNED, Refused("stand-in:missing"))
        if not self.runtime.may_start(self.handle):
            raise _Lost
        limit_ms, bound = call_limit(command.timeout_ms, self.remaining_ms())
        context = replace(self._context(command, limit_ms, state), intent_key=command.intent_key)
        self.events.append(machine.effect_shadowed(state, command, stand_in=True))
        arguments = tool.contract.revive(dict(command.arguments))
        done = await call(
            tool.shadow,
            arguments,
            context,
            limit_ms=limit_ms,
            wish=self.handle.wish,
            aborted=context.aborted,
        )
        _, reply = judged(tool.contract, arguments, done, state.facts)
        if not isinstance(reply, Succeeded | Refused):
            problem = reply.reason if reply is not None else done.end.value
            reply = Refused(reason_of(f"stand-in:{problem}"))
        known = self._is_known(state, tool.contract, reply)
        evidence = f"shadow:{self.claim.claim_id}"
        return Result(End.RETURNED, reply, bound, known, evidence=evidence)

    # ---- act: a write ----------------------------------------------------------------------------

    async def _write(self, told: _Told, command: InvokeTool) -> None:
        """Checkpoint, lock, dispatch, call, outcome; each is one transaction or one outside
        call.
        """
        tool = self._tool(command)
        effect_id = upstream_key(told.turn.state.tenant, command.intent_key or "")
        told, undo = await self._way_back(told, command, tool, effect_id)
        state = told.turn.state
        if state.status is RunStatus.RUNNING:  # a lease given back, or a fixed write's first claim
            state = machine.moved(state, RunEvent.CHECKPOINT_RESUMED, self.events)
        plan = Plan(self.claim, command, Terms.of(tool.contract), undo)
        planned = self._checkpoint(state, plan)
        if planned.ruling is None:
            self._cancelled_or_lost(told)
            return
        granted = await self._locked(effect_id, command)
        if granted is None:
            return
        try:
            await self._dispatch(command, tool, state)
        finally:
            await self._elsewhere(lambda: self.runtime.lock.release(effect_id, granted))

    async def _way_back(
        self, told: _Told, command: InvokeTool, tool: Tool, effect_id: str
    ) -> tuple[_Told, CompensationRecord | None]:
        """Find out how the write could be undone, which is recorded before it is sent; None where
        nothing can undo it, or that is recorded already.

        What cannot be read cannot be restored: then the write is not made now, as if its tool had
        said "nothing happened, try again", and the step ends (`_Over`).
        """
        undo = tool.compensation
        if undo is None:
            return told, None
        reads = undo.original is not None
        record = CompensationRecord(undo.tool.name, undo.tool.calls, read=reads)
        if undo.original is None:
            return told, record
        if self._may_be_forgotten(effect_id) or not self._may_be_planned(effect_id):
            return told, None
        told = await self._paid_call(told)
        state = told.turn.state
        done = await self._original(undo.original, command, tool, state)
        try:
            if done.end is not End.RETURNED:
                raise done.error or TimeoutError
            found = done.value
            if isinstance(found, BaseModel):
                found = found.model_dump(mode="json")
            original = normal(found)
            if len(canonical(original)) > tool.contract.max_output_bytes:
                raise NotCanonical("the original state is too large")
        except Exception as error:
            kind = type(error).__name__
            log.info("run %s: what %s changes was not read: %s", state.run_id, tool.name, kind)
            if self.handle.wish.done():
                self._cancelled_or_lost(told)
            else:
                await self._not_readable(told, tool)
            raise _Over from None
        detail: dict[str, Json] = {"tool": tool.name, "effect": effect_id}
        self.events.append(TraceEvent(trace.ORIGINAL_READ, state.step, detail))
        return told, replace(record, original=original)

    def _may_be_forgotten(self, effect_id: str) -> bool:
        """Whether the ledger was set back, and the write may have been sent in the lost time: then
        its dispatch asks the service first, and what is asked or read before that proves nothing.
        """
        rewind = self.ledger.lost()
        if rewind is None:
            return False
        found = self.ledger.find_effect(effect_id)
        return found is None or may_be_forgotten(found, rewind)

    def _may_be_planned(self, effect_id: str) -> bool:
        """Whether nothing of an intent can be there yet, and this run has not recorded it for the
        plan that it is at.
        """
        found = self.ledger.find_effect(effect_id)
        resumed = self.claim.effect_id == effect_id and self.claim.phase is Phase.WRITE
        if resumed and found is not None and found.compensation is not None:
            return False
        if found is None or found.status is EffectStatus.PLANNED:
            return True
        lacks = found.compensation is None or found.doubt is Doubt.NONE
        return found.status is EffectStatus.ABSENT and lacks

    async def _paid_call(self, told: _Told) -> _Told:
        """Pay for a call beside the write, durably: with the one that the claim has reserved, if
        there is one.
        """
        state = told.turn.state
        if self.handle.wish.done():
            self._cancelled_or_lost(told)
            raise _Over
        if not state.left.tool_calls_reserved:
            state = await self._pay(told, tool_calls=1)
        if not self.runtime.may_start(self.handle, reserved=True):
            raise _Lost
        left = state.left.call_used()
        turn = replace(told.turn, state=replace(state, left=left))
        return replace(told, before=replace(told.before, left=left), turn=turn)

    async def _original(
        self, read: Callable[..., Any], command: InvokeTool, tool: Tool, state: RunState
    ) -> Called:
        limit_ms, _ = call_limit(command.timeout_ms, self.remaining_ms())
        context = replace(self._context(command, limit_ms, state), intent_key=command.intent_key)
        return await call(
            read,
            tool.contract.revive(dict(command.arguments)),
            context,
            limit_ms=limit_ms,
            wish=self.handle.wish,
            aborted=context.aborted,
        )

    async def _not_readable(self, told: _Told, tool: Tool) -> None:
        state, reply = told.turn.state, Refused("original-unreadable", retryable=True)
        known = self._is_known(state, tool.contract, reply)
        event = Result(End.RETURNED, reply, known=known, evidence=f"call:{self.claim.claim_id}")
        await self._commit(self._tell(state, event))

    def _checkpoint(self, state: RunState, plan: Plan) -> Ruled:
        """Make the accepted proposal durable, so that a redelivered step never asks the model
        again.
        """

        def decide(locked: Locked) -> Ruling | None:
            if not self._mine(locked) or locked.cancel_requested:
                return None
            return Ruling(
                state=replace(state, left=state.left.settled(), pending=plan.command, told=None),
                events=tuple(self.events),
                observation=self.observation,
                outputs=self.outputs,
                lease="keep",
                attempts=locked.attempts,
            )

        done = self.ledger.rule(
            self.claim.run_id,
            decide,
            phase=lambda _: Phase.WRITE,
            output_bytes=self.output_bytes,
            plan=plan,
        )
        if done.ruling is not None:
            self.events.clear()
            self.observation, self.outputs, self.output_bytes = None, {}, 0
        return done

    async def _dispatch(self, command: InvokeTool, tool: Tool, state: RunState) -> None:
        arguments = tool.contract.revive(dict(command.arguments))  # the tool's own code: not later
        before = self.runtime.clock()
        decided: list[protocol.Dispatch] = []
        # Its claim was for nothing but this write: under a pause, to try it costs no time.
        kept_ms = self.claim.remaining_ms if self.claim.phase is Phase.WRITE else None

        def decide(locked: Locked) -> Ruling | None:
            ruling, dispatch = protocol.dispatch(
                locked,
                command,
                claim_id=self.claim.claim_id,
                call_ms=command.timeout_ms,
                max_stall_ms=self.runtime.max_stall_ms,
                contract_hash=contract_hash(tool.contract),
                kept_ms=kept_ms,
                unasked=self.unasked,
                compensable=tool.compensation is not None,
            )
            decided[:] = [dispatch]
            return ruling

        ruled = self.ledger.rule(self.claim.run_id, decide, dispatches=tool.name)
        go = decided[0]
        if not isinstance(go, Go):
            self.runtime.counts[f"halt:{go.code}"] += 1
            self.runtime.send(ruled.due)
            return
        self.handle.writing = True
        self.handle.until = go.deadline_at + protocol.LEASE_MARGIN_MS
        sending = Sending(
            ledger=self.ledger,
            workflow=self.workflow,
            state=state,
            tool=tool,
            arguments=arguments,
            go=go,
            # Counted from before the dispatch was sent: the worker's deadline is never later than
            # the ledger's.
            deadline=before + (go.deadline_at - ruled.locked.now) / 1000,
            clock=self.runtime.clock,
            phase=self._phase,
            traceparent=self.claim.traceparent,
        )
        if not self._last_look(sending) or (left_ms := sending.left_ms) <= 0:
            await self._outcome_kept(sending, End.RETURNED, None, sent=False)
            return
        context = sending.context(left_ms)
        done = await call(
            tool.execute,
            arguments,
            context,
            limit_ms=left_ms,
            wish=self.handle.wish,
            aborted=context.aborted,
            in_time=sending.in_time,
        )
        if not done.begun:  # the loop, or the whole process, stood still
            await self._outcome_kept(sending, End.RETURNED, None, sent=False)
            return
        end, reply = sending.judged(done)
        if done.late is not None:
            sending.listen(done.late, lambda end, reply: self._outcome(sending, end, reply))
        if sending.to_be_confirmed(reply):
            reply = await self._confirmed(sending, context, reply)
        bound = go.deadline_at == self.claim.deadline_at
        await self._outcome_kept(sending, end, reply, bound=bound)

    async def _confirmed(
        self, sending: Sending, context: ToolCall, receipt: Reply | None
    ) -> Reply | None:
        """Believe a receipt only once the service's own record says the same.

        The dispatch has paid for this. A wish to cancel does not cut it off: it starts nothing.
        """
        query, limit_ms = sending.tool.query, sending.left_ms
        assert query is not None
        found = await call(
            query,
            sending.arguments,
            replace(context, timeout_ms=limit_ms),
            limit_ms=limit_ms,
            wish=asyncio.get_running_loop().create_future(),
            aborted=context.aborted,
        )
        return sending.confirmed(receipt, found)

    def _last_look(self, sending: Sending) -> bool:
        """Look once more, right before sending: token mine, no wish, lease left. A look that fails
        has not seen that.
        """
        if self.handle.wish.done() or not sending.is_mine():
            return False
        try:
            row = self.ledger.read(self.claim.run_id)
        except (ConnectionLost, DatabaseUnavailable) as error:
            log.warning("run %s: not sent, for want of a last look (%s)", self.claim.run_id, error)
            return False
        lease = row["lease_until"]
        return (
            row["cancel_requested_at"] is None
            and row["claim_id"] == self.claim.claim_id
            and lease is not None
            and lease > row["now"]
        )

    async def _outcome_kept(
        self,
        sending: Sending,
        end: End,
        reply: Reply | None,
        *,
        bound: bool = False,
        sent: bool = True,
    ) -> None:
        """Commit an outcome, whenever the ledger is there: the lease has no say in it."""

        def tell() -> None:
            self._outcome(sending, end, reply, bound=bound, sent=sent)

        for pause_s in sending.patiently(tell, OUTCOME_PAUSES_S):
            await asyncio.sleep(pause_s)

    def _outcome(
        self,
        sending: Sending,
        end: End,
        reply: Reply | None,
        *,
        bound: bool = False,
        sent: bool = True,
    ) -> None:
        """Commit what is known of the attempt, whatever became of the lease."""
        ruled = sending.tell(end, reply, bound=bound, sent=sent)
        self.handle.writing = False
        self.runtime.send(ruled.due)

    # ---- update ----------------------------------------------------------------------------------

    async def _refused(self, state: RunState, reason: Reason) -> None:
        """The claim's charge was refused: commit that stop and start nothing."""
        if self.claim.effect_id is None:
            turn = machine.stop(state, reason, self.view(state))
            self.events += turn.events
            await self._commit(_Told(state, None, turn))
            return
        if isinstance(state.told, Resolved):
            told = self._guarded(state, lambda: self._stopped_with_proof(state, reason))
            await self._commit(told)
            return
        # An effect that was released for sending again is still unknown: no stop may end the run
        # over it.
        self._rule_mine(lambda locked: protocol.spent(locked, reason))

    def _stopped_with_proof(self, state: RunState, reason: Reason) -> _Told:
        """A write was proved while the time ran out: what it came to is kept, at no cost, and the
        run stops; unless that was all that it still had to do.
        """
        told = self._first(state)
        if isinstance(told.turn.command, Park):  # nobody is asked in vain
            return _Told(state, None, machine.stop(state, reason, self.view(state)))
        if told.turn.state.status not in CLAIMABLE:
            return told
        end = machine.stop(told.turn.state, reason, self.view(told.turn.state))
        events = (*told.turn.events, *end.events)
        turn = replace(told.turn, state=end.state, command=end.command, events=events)
        return replace(told, turn=turn)

    async def _commit(self, told: _Told) -> None:
        state = told.turn.state
        turn = Turn(state, told.turn.command, tuple(self.events), self.observation, self.outputs)
        end = StepEnd(self.claim, protocol.settle_turn(turn), self._phase(state), self.output_bytes)
        if not await self.runtime.ends.ask(end, alone=len(self.runtime.at_work) == 1):
            self._cancelled_or_lost(told)

    def _phase(self, state: RunState) -> Phase:
        if state.status not in CLAIMABLE:
            return Phase.RESUME
        return machine.phase_of(self.workflow, state)

    def _cancelled_or_lost(self, told: _Told) -> None:
        """Nothing was written: either a cancel was wished meanwhile, or the run is no longer
        ours.
        """

        def decide(locked: Locked) -> Ruling | None:
            if not self._mine(locked) or not locked.cancel_requested:
                return None
            return protocol.asked_first(locked) or self._under_wish(told, locked)

        done = self.ledger.rule(self.claim.run_id, decide, output_bytes=self.output_bytes)
        if done.ruling is None:
            raise _Lost

    def _under_wish(self, told: _Told, locked: Locked) -> Ruling:
        """Judge the latest event again, as of a run that is being cancelled: nothing more is
        started.
        """
        before = replace(told.before, status=RunStatus.CANCELLING)
        view = self.view(before, cancelled=True)
        # The cancel has traced the run's move; the moves that this step would have made did not
        # happen.
        latest = set(map(id, told.turn.events))
        events = [e for e in self.events if id(e) not in latest and e.type != trace.RUN_MOVED]
        turn = Turn(before, Stop(Reason.CANCELLED))
        if told.event is not None:
            try:
                turn = machine.on(self.workflow, before, told.event, view)
            except BaseException:
                log.exception("run %s: the workflow's code raised while cancelling", before.run_id)
        if turn.state.status not in TERMINAL:
            ended = machine.stop(turn.state, Reason.CANCELLED, view)
            turn = replace(turn, state=ended.state, events=(*turn.events, *ended.events))
        ruling = protocol.settle_turn(turn, locked.effect)
        return replace(ruling, events=(*events, *turn.events), lease="take")

    def _mine(self, locked: Locked) -> bool:
        return (
            locked.claim_id == self.claim.claim_id
            and locked.epoch == self.claim.epoch
            and locked.lease_until is not None
        )

    def _rule_mine(self, decide: Callable[[Locked], Ruling]) -> Ruled:
        done = self.ledger.rule(
            self.claim.run_id, lambda locked: decide(locked) if self._mine(locked) else None
        )
        if done.ruling is None:
            raise _Lost
        return done

    async def _elsewhere(self, act: Callable[[], _T]) -> _T:
        """Talk to Redis beside the loop: a server that hangs must not hold up the other steps."""
        if not self.runtime.threads:
            return act()
        return await asyncio.get_running_loop().run_in_executor(None, act)


def _passing(error: BaseException | None) -> bool:
    """Whether a read or a check that ended with this error may succeed when it is made again."""
    if isinstance(error, ToolRefused):
        return error.retryable is True
    return may_pass(error)


def _described(tool: Tool) -> MappingProxyType[str, Json]:
    contract = tool.contract
    schema: Json = {"type": "object"}
    if contract.input is not None:
        schema = json.loads(_schema(contract.input))  # a copy: a gateway may change it
    return MappingProxyType(
        {"name": contract.name, "description": contract.description, "schema": schema}
    )


@lru_cache(maxsize=1_024)
def _schema(model: type[BaseModel]) -> str:
    return json.dumps(model.model_json_schema())
