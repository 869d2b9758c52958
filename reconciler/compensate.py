"""How a write is undone: the reconciler's side of a compensation.

A compensation is an effect of its own, under the same protocol as any write: planned by its own
intent, locked, dispatched, and sent as a worker sends (see `handrail.tasks.sender`). No lease is
involved: the fence is the effect's token and its dispatcher, so that a sweep that dies in between
leaves what the next one finds.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from handrail.agent import protocol
from handrail.agent.effects import Effect, Terms
from handrail.agent.loop import permission, plain
from handrail.agent.protocol import Dispatch, Go, Locked, Ruling
from handrail.agent.stage import End, InvokeTool, Reply, executable
from handrail.agent.tools import Invalid, Permit, Tool
from handrail.agent.workflow import Workflow
from handrail.errors import InvalidDefinition
from handrail.ledger.ledger import Ledger, Ruled, UndoPlan
from handrail.ledger.lock import IntentLock, Refusal
from handrail.reconciler.errands import Errand
from handrail.tasks.calls import Ask, Called, asked
from handrail.tasks.judge import NOT_CONFIRMED
from handrail.tasks.sender import LOCK_PAUSE_MS, OUTCOME_PAUSES_S, Sending

log = logging.getLogger("handrail.reconciler")
#: How long an outcome is held on to while the ledger is away: not as long as by a step, since the
#: sweep does nothing else meanwhile.
SWEEP_PAUSES_S: Final = OUTCOME_PAUSES_S[:4]


class CannotUndo(Exception):
    """Control flow: the compensation cannot be begun, and why; a person decides."""


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

        Returns the call that is under way, if it has come to that. Only who has the workflow's code
        can do it.
        """
        state = locked.state
        workflow = self.workflows[f"{state.workflow}@{state.workflow_version}"]
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
                sending = Sending(
                    ledger=self.ledger,
                    workflow=workflow,
                    state=locked.state,
                    tool=tool,
                    arguments=arguments,
                    go=go,
                    # Counted from before the dispatch was sent, as a worker does.
                    deadline=before + call_ms / 1000,
                    clock=self.clock,
                    traceparent=locked.traceparent,
                )
                return self._call(sending, granted)
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

    def _call(self, sending: Sending, granted: str) -> Errand | None:
        """Look once more, and call; what is too late now was never sent."""
        if not sending.is_mine() or (left_ms := sending.left_ms) <= 0:
            self._tell(sending, granted, End.RETURNED, None, sent=False)
            return None
        context = sending.context(left_ms)

        def begin() -> Future[Called]:
            execute = sending.tool.execute
            return self.ask(execute, sending.arguments, context, left_ms, sending.in_time)

        return Errand(
            sending.state.run_id,
            sending.tool.name,
            asked(begin),
            lambda done: self._answered(sending, granted, done),
        )

    # ---- outcome ---------------------------------------------------------------------------------

    def _answered(self, sending: Sending, granted: str, done: Called) -> Errand | None:
        """Judge what the call gave; a receipt that a query has to confirm needs one more call."""
        if not done.begun:  # whoever was to call it stood still
            self._tell(sending, granted, End.RETURNED, None, sent=False)
            return None
        if done.late is not None:
            loop = done.late.get_loop()
            loop.call_soon_threadsafe(sending.listen, done.late, sending.tell)
        end, reply = sending.judged(done)
        if not sending.to_be_confirmed(reply):
            self._tell(sending, granted, end, reply)
            return None
        if (left_ms := sending.left_ms) <= 0:
            self._tell(sending, granted, end, NOT_CONFIRMED)
            return None

        def begin() -> Future[Called]:
            query = sending.tool.query
            assert query is not None
            return self.ask(query, sending.arguments, sending.context(left_ms), left_ms)

        def confirm(found: Called) -> Errand | None:
            self._tell(sending, granted, end, sending.confirmed(reply, found))
            return None

        return Errand(sending.state.run_id, sending.tool.name, asked(begin), confirm)

    def _tell(
        self, sending: Sending, granted: str, end: End, reply: Reply | None, *, sent: bool = True
    ) -> None:
        """Commit what is known of the attempt, and let go of its intent."""

        def tell() -> None:
            self.done(sending.tell(end, reply, sent=sent))

        try:
            for pause_s in sending.patiently(tell, SWEEP_PAUSES_S):
                self.pause(pause_s)
        finally:
            self.lock.release(sending.go.effect.id, granted)

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
