"""How a write is undone: the reconciler's side of a compensation.

A compensation is an effect of its own, under the same protocol as any write: planned by its own
intent, locked, dispatched, looked at once more, called with its key and time limit, and judged by
its token. No lease is involved: the fence is the effect's token and its dispatcher, so that a sweep
that dies in between leaves what the next one finds.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Final

from handrail.agent import protocol
from handrail.agent.effects import Effect, Terms
from handrail.agent.errors import InvalidDefinition
from handrail.agent.loop import observation_of, permission, plain
from handrail.agent.machine import RunState
from handrail.agent.protocol import Dispatch, Go, Locked, Outcome, Ruling
from handrail.agent.stage import End, InvokeTool, Refused, Reply, Succeeded, executable
from handrail.agent.tools import Invalid, Permit, Tool
from handrail.agent.workflow import Workflow
from handrail.ledger.database import ConnectionLost
from handrail.ledger.errors import DatabaseUnavailable
from handrail.ledger.ledger import Ledger, Ruled, UndoPlan
from handrail.ledger.lock import IntentLock, Refusal
from handrail.reconciler.errands import Errand
from handrail.tasks.calls import Called, GivenUp, ToolCall
from handrail.tasks.step import LOCK_PAUSE_MS, NOT_CONFIRMED, confirms, judged, tell_outcome

log = logging.getLogger("handrail.reconciler")
#: How long an outcome is held on to while the ledger is away: the sweep can do nothing else either.
OUTCOME_PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0)

#: Begins a call under a time limit: `ask(function, arguments, call, limit_ms)`; its future raises
#: what the function raises.
Ask = Callable[[Callable[..., Any], Any, ToolCall, int], Future[Any]]


class CannotUndo(Exception):
    """Control flow: the compensation cannot be begun, and why; a person decides."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A compensation whose dispatch is committed. `deadline` is by the monotonic clock."""

    go: Go
    tool: Tool
    arguments: Any
    workflow: Workflow
    state: RunState
    call: ToolCall
    deadline: float
    lock_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compensator:
    """What undoing works with. `done` is told every ruling; `clock` is monotonic, in seconds."""

    ledger: Ledger
    workflows: Mapping[str, Workflow]
    lock: IntentLock
    ask: Ask
    max_stall_ms: int | None
    clock: Callable[[], float]
    done: Callable[[Ruled], None]
    pause: Callable[[float], None] = time.sleep

    def begin(self, run_id: str, locked: Locked) -> Errand | None:
        """Go on with undoing a run's write: plan what is not planned, and send what may be sent.

        Returns the call that is under way, if it has come to that.
        """
        state = locked.state
        workflow = self.workflows.get(f"{state.workflow}@{state.workflow_version}")
        if workflow is None:
            return None  # only who has the workflow's code can undo: the run is woken again
        try:
            if locked.undoing is None:
                planned = self._plan(run_id, workflow, locked)
                if planned is None:
                    return None
                locked = planned
            assert locked.effect is not None
            return self._send(run_id, workflow, locked, locked.effect)
        except CannotUndo as problem:
            log.warning("run %s: %s", run_id, problem)
            text = str(problem)
            self._rule(run_id, lambda locked: protocol.cannot_undo(locked, text))
            return None

    # ---- plan ------------------------------------------------------------------------------------

    def _plan(self, run_id: str, workflow: Workflow, locked: Locked) -> Locked | None:
        """Record the compensation before it is sent; None where somebody was faster, or it exists
        as something else.
        """
        effect = locked.effect
        assert effect is not None
        tool, command = _undoing_call(workflow, effect, locked)
        ruled = self._rule(
            run_id,
            lambda locked: protocol.compensation_planned(locked, command),
            plan=UndoPlan(effect.id, command, Terms.of(tool.contract)),
        )
        if ruled.ruling is None or ruled.ruling.handoff is not None:
            return None
        return ruled.locked

    # ---- send ------------------------------------------------------------------------------------

    def _send(
        self, run_id: str, workflow: Workflow, locked: Locked, effect: Effect
    ) -> Errand | None:
        tool, arguments = _revived(workflow, effect)
        call_ms = min(tool.contract.timeout_ms, locked.state.limits.tool_ms)
        ttl_ms = call_ms + protocol.LEASE_MARGIN_MS
        granted = self.lock.acquire(effect.id, ttl_ms=ttl_ms)
        if isinstance(granted, Refusal):
            self._rule(run_id, lambda locked: protocol.undoing_waits(locked, LOCK_PAUSE_MS))
            return None
        before = self.clock()
        try:
            go = self._dispatch(run_id, tool, call_ms)
            if go is not None:
                sent = _Sent(
                    go=go,
                    tool=tool,
                    arguments=arguments,
                    workflow=workflow,
                    state=locked.state,
                    call=_context(locked.state, go.effect, call_ms),
                    # Counted from before the dispatch was sent, as a worker does.
                    deadline=before + call_ms / 1000,
                    lock_token=granted,
                )
                return self._call(sent)
        except Exception:
            self.lock.release(effect.id, granted)
            raise
        self.lock.release(effect.id, granted)
        return None

    def _dispatch(self, run_id: str, tool: Tool, call_ms: int) -> Go | None:
        dispatcher = f"sweep:{secrets.token_hex(8)}"
        decided: list[Dispatch] = []

        def decide(locked: Locked) -> Ruling | None:
            ruling, dispatch = protocol.dispatch_compensation(
                locked, dispatcher=dispatcher, call_ms=call_ms, max_stall_ms=self.max_stall_ms
            )
            decided[:] = [dispatch]
            return ruling

        self._rule(run_id, decide, dispatches=tool.name)
        return decided[0] if isinstance(decided[0], Go) else None

    def _call(self, sent: _Sent) -> Errand | None:
        """Look once more, and call; what is too late now was never sent."""
        now = self.ledger.effect(sent.go.effect.id)
        mine = now.token == sent.go.effect.token and now.status is sent.go.effect.status
        left_ms = self._left_ms(sent)
        if not mine or left_ms <= 0:
            self._tell(sent, End.RETURNED, None, sent_it=False)
            return None
        answer = self._asked(sent, sent.tool.execute, left_ms)
        return Errand(
            sent.state.run_id, sent.tool.name, answer, lambda found: self._answered(sent, found)
        )

    def _asked(self, sent: _Sent, function: Callable[..., Any], limit_ms: int) -> Future[Any]:
        try:
            call = replace(sent.call, timeout_ms=limit_ms)
            return self.ask(function, sent.arguments, call, limit_ms)
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _left_ms(self, sent: _Sent) -> int:
        return int(round((sent.deadline - self.clock()) * 1000, 3))

    # ---- outcome ---------------------------------------------------------------------------------

    def _answered(self, sent: _Sent, found: Future[Any]) -> Errand | None:
        """Judge what the call gave; a receipt that a query has to confirm needs one more call."""
        contract, facts = sent.tool.contract, sent.state.facts
        called = _called(found)
        if called.late is not None:
            self._listen_for_late(sent, called.late)
        end, reply = judged(contract, sent.arguments, called, facts)
        if not isinstance(reply, Succeeded) or not contract.confirmed_by_query:
            self._tell(sent, end, reply)
            return None
        receipt, left_ms = reply, self._left_ms(sent)
        if left_ms <= 0:
            self._tell(sent, end, NOT_CONFIRMED)
            return None

        def confirm(record: Future[Any]) -> Errand | None:
            fits = confirms(contract, sent.arguments, _called(record), facts)
            self._tell(sent, end, receipt if fits else NOT_CONFIRMED)
            return None

        assert sent.tool.query is not None
        answer = self._asked(sent, sent.tool.query, left_ms)
        return Errand(sent.state.run_id, sent.tool.name, answer, confirm)

    def _tell(self, sent: _Sent, end: End, reply: Reply | None, *, sent_it: bool = True) -> None:
        """Commit what is known of the attempt, and let go of its intent."""
        out = self._said(sent, end, reply, sent_it=sent_it)
        digest = None
        if isinstance(reply, Succeeded | Refused):
            digest = observation_of(sent.tool.contract, reply).digest
        try:
            self._kept(lambda: self._outcome(sent, out, digest))
        finally:
            self.lock.release(sent.go.effect.id, sent.lock_token)

    def _said(self, sent: _Sent, end: End, reply: Reply | None, *, sent_it: bool = True) -> Outcome:
        evidence_id = f"receipt:{secrets.token_hex(8)}"
        effect = sent.go.effect
        return Outcome(effect.id, effect.token, end, reply, False, sent_it, evidence_id)

    def _outcome(self, sent: _Sent, out: Outcome, digest: str | None) -> None:
        run_id = sent.state.run_id
        ruled = tell_outcome(self.ledger, run_id, sent.workflow, out, known_digest=digest)
        self.done(ruled)

    def _listen_for_late(self, sent: _Sent, late: asyncio.Future[Any]) -> None:
        """A call that was given up may still answer: a receipt, however late, is evidence."""

        def heard(work: asyncio.Future[Any]) -> None:
            if work.cancelled() or work.exception() is not None:
                return
            done = Called(End.RETURNED, work.result())
            end, reply = judged(sent.tool.contract, sent.arguments, done, sent.state.facts)
            if not isinstance(reply, Succeeded):
                return
            if sent.tool.contract.confirmed_by_query:
                reply = NOT_CONFIRMED
            out = self._said(sent, end, reply)
            try:
                tell_outcome(self.ledger, sent.state.run_id, sent.workflow, out, known_digest=None)
            except (ConnectionLost, DatabaseUnavailable) as error:
                log.warning("late evidence for %s was not stored (%s)", sent.go.effect.id, error)

        late.get_loop().call_soon_threadsafe(late.add_done_callback, heard)

    def _kept(self, commit: Callable[[], None]) -> None:
        """Commit although the ledger may be away for a while: nobody else knows the outcome."""
        for pause_s in OUTCOME_PAUSES_S:
            try:
                commit()
                return
            except (ConnectionLost, DatabaseUnavailable) as error:
                log.warning("the outcome of a compensation is not stored yet (%s)", error)
            self.pause(pause_s)
        commit()

    def _rule(
        self, run_id: str, decide: Callable[[Locked], Ruling | None], **options: Any
    ) -> Ruled:
        ruled = self.ledger.rule(run_id, decide, **options)
        self.done(ruled)
        return ruled


def _undoing_call(workflow: Workflow, effect: Effect, locked: Locked) -> tuple[Tool, InvokeTool]:
    """Have the workflow's own code say how a write is undone, and put that through the gates: it
    is no more trusted than any call. Raises `CannotUndo`.
    """
    recorded = effect.compensation
    assert recorded is not None, "what is being undone has a compensation"
    try:
        tool = workflow.tool_named(effect.tool)
        undo = tool.compensation
        if undo is None or undo.tool.name != recorded.tool:
            raise CannotUndo(f"{effect.tool} is not undone by {recorded.tool} any more")
        view = locked.view(cancelled=False)
        written = tool.contract.revive(dict(effect.arguments))
        made = undo.arguments(written, effect.result, recorded.original, view.run)
        contract = undo.tool.contract
        checked = contract.validate(plain(made))
        if isinstance(checked, Invalid):
            raise CannotUndo(f"{recorded.tool} would get invalid arguments: {checked.problem}")
        if permission(contract, checked, view) is not Permit.ALLOW:
            raise CannotUndo(f"{recorded.tool} is not permitted to undo it")
        return undo.tool, executable(undo.tool, checked, view, approval=False, fixed=True)
    except CannotUndo:
        raise
    except BaseException as error:  # also what would end the sweep: it is the workflow's own code
        log.exception("run %s: how %s is undone", locked.state.run_id, effect.tool)
        problem = f"the code that says how {effect.tool} is undone raised {type(error).__name__}"
        raise CannotUndo(problem) from None


def _revived(workflow: Workflow, effect: Effect) -> tuple[Tool, Any]:
    """The tool and the arguments of a compensation that is planned. Raises `CannotUndo`."""
    try:
        tool = workflow.tool_named(effect.tool)
        return tool, tool.contract.revive(dict(effect.arguments))
    except InvalidDefinition:
        raise CannotUndo(f"{effect.tool}, which would undo it, is not known any more") from None
    except Exception as error:
        raise CannotUndo(
            f"{effect.tool} does not take its recorded arguments any more: {type(error).__name__}"
        ) from None


def _context(state: RunState, effect: Effect, call_ms: int) -> ToolCall:
    return ToolCall(
        run_id=state.run_id,
        tenant=state.tenant,
        principal=state.principal,
        tool=effect.tool,
        timeout_ms=call_ms,
        key=effect.id,
        intent_key=effect.intent_key,
        not_after=effect.dispatch_deadline_at,
        attempt=effect.attempts,
        facts=state.outputs,
    )


def _called(found: Future[Any]) -> Called:
    """How a call that was asked for has ended."""
    if found.cancelled():
        return Called(End.CANCELLED)
    error = found.exception()
    if error is None:
        return Called(End.RETURNED, found.result())
    if isinstance(error, GivenUp):
        return Called(End.TIMED_OUT, error=error, late=error.late)
    return Called(End.TIMED_OUT if isinstance(error, TimeoutError) else End.RAISED, error=error)
