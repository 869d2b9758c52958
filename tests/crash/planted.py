"""Faults that are planted into the product on purpose: a sweep that cannot see them proves nothing.

Each replaces a piece of the product in this process and its children, and names the settings in
which it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from handrail.agent import protocol
from handrail.agent.effects import Absent, EffectStatus, ProvedAbsent, upstream_key
from handrail.agent.stage import End, InvokeTool
from handrail.agent.status import Reason, RunStatus
from handrail.ledger import ledger
from handrail.ledger.session import ConnectionLost
from handrail.reconciler import sweep
from handrail.tasks import sender, step
from handrail.tasks.calls import ToolCall

_Step: Any = step._Step


def _recorded_after_the_call() -> None:
    """The call is made first, and the effect is recorded when it has gone well."""
    write = _Step._write

    async def call_first(self: Any, told: Any, command: InvokeTool) -> None:
        tool, state = self._tool(command), self.claim.state
        intent = command.intent_key or ""
        context = ToolCall(
            run_id=state.run_id,
            tenant=state.tenant,
            principal=state.principal,
            tool=tool.name,
            timeout_ms=command.timeout_ms,
            key=upstream_key(state.tenant, intent),
            intent_key=intent,
        )
        answer = await tool.execute(dict(command.arguments), context)

        async def already(arguments: Any, call: ToolCall) -> Any:
            return answer

        self._tool = lambda _: replace(tool, execute=already)
        await write(self, told, command)

    _Step._write = call_first


def _dispatched_is_forgotten() -> None:
    """The sweep passes over a run whose write is under way."""
    wake = protocol.wake

    def forgetful(locked: Any, **options: Any) -> Any:
        sent = locked.own_effect is EffectStatus.DISPATCHED
        return None if sent else wake(locked, **options)

    setattr(protocol, "wake", forgetful)  # noqa: B010


def _first_absence_counts() -> None:
    """The first answer "absent" is believed, whenever it was asked for."""
    resolve = getattr(sweep, "resolve")  # noqa: B009

    def hasty(effect: Any, answer: Any, **options: Any) -> Any:
        return ProvedAbsent() if isinstance(answer, Absent) else resolve(effect, answer, **options)

    setattr(sweep, "resolve", hasty)  # noqa: B010


def _another_key() -> None:
    """Each attempt is sent with a key of its own."""

    def renamed(**facts: Any) -> ToolCall:
        if facts.get("key"):
            facts["key"] += f":{facts['attempt']}"
        return ToolCall(**facts)

    setattr(sender, "ToolCall", renamed)  # noqa: B010


def _no_outbox() -> None:
    """A step is published once, by whoever made it due, and by no sweep."""
    setattr(sweep.Reconciler, "_republish", lambda self, due: None)  # noqa: B010


def _cancelled_over_doubt() -> None:
    """A cancelled run ends at once, whatever became of its write."""
    wake = protocol.wake

    def final(locked: Any, **options: Any) -> Any:
        wished = locked.cancel_requested and locked.state.status is RunStatus.CANCELLING
        if wished and not locked.lease_live:
            return replace(protocol._stop(locked, Reason.CANCELLED), lease="take")
        return wake(locked, **options)

    setattr(protocol, "wake", final)  # noqa: B010


def _commit_error_is_failure() -> None:
    """A commit that was not answered is taken for one that failed: "it was never sent"."""
    again = vars(ledger)["again"]

    def not_a_ruling(act: Callable[[], Any]) -> Any:
        return act() if act.__qualname__.startswith("Ledger.rule") else again(act)

    setattr(ledger, "again", not_a_ruling)  # noqa: B010

    async def once(self: Any, sending: Any, end: End, reply: Any, **known: bool) -> None:
        try:
            self._outcome(sending, end, reply, **known)
        except ConnectionLost:
            self._outcome(sending, End.RETURNED, None, sent=False)

    _Step._outcome_kept = once


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted fault: how it is planted, and where a sweep sees it, by which promise."""

    plant: Callable[[], None]
    sees: Sequence[str]
    breaks: str


PLANTED: Final = {
    "recorded-after-the-call": Fault(
        _recorded_after_the_call, ("sqlite", "singles", "run", "query", "ok"), "I1"
    ),
    "dispatched-is-forgotten": Fault(
        _dispatched_is_forgotten, ("sqlite", "brief", "run", "key", "ok"), "Stuck"
    ),
    "first-absence-counts": Fault(
        _first_absence_counts, ("sqlite", "brief", "run", "query", "late"), "I1"
    ),
    "another-key": Fault(_another_key, ("sqlite", "brief", "run", "key", "lost"), "I1"),
    "no-outbox": Fault(_no_outbox, ("sqlite", "singles", "run", "key+query", "ok"), "I2"),
    "cancelled-over-doubt": Fault(
        _cancelled_over_doubt, ("sqlite", "brief", "cancel", "key+query", "lost"), "cancelled over"
    ),
    "commit-error-is-failure": Fault(
        _commit_error_is_failure, ("postgres", "cuts", "run", "query", "ok"), "I1"
    ),
}
