"""What the log says of a ruling, once it is committed: ids, enumerations and counts alone.

Every move of a run but those from step to step is a line, whoever made it: a step, the sweep, a
person, a provider's report.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Final

from handrail import logs, tracing
from handrail.agent.effects import Effect, EffectStatus
from handrail.agent.machine import RunState
from handrail.agent.notices import News, Notice
from handrail.agent.protocol import Locked, Ruling
from handrail.agent.status import CLAIMABLE, RunStatus

log: Final = logging.getLogger("handrail.ledger")


def ruled(locked: Locked, ruling: Ruling, news: Iterable[Notice]) -> None:
    """Say what a ruling did, after its commit."""
    if not log.isEnabledFor(logging.INFO):
        return
    state = locked.state
    with _about(state, locked.epoch, locked.traceparent):
        if ruling.wish and not locked.cancel_requested:
            logs.event(log, "run.cancel_requested")
        for before, after in ((locked.effect, ruling.effect), (locked.undoing, ruling.undoing)):
            if before is not None and after is not None:
                _effect(before, after)
        for notice in news:
            if notice.news is not News.RUN_STOPPED:  # which is a move
                name = notice.news.value.replace("-", ".")
                logs.event(log, name, reason=notice.reason, matter_id=notice.id)
        _move(state.status, ruling.state)


def ended(state: RunState, was: RunStatus, epoch: int, traceparent: str | None) -> None:
    """Say how a step's commit ended its run."""
    if log.isEnabledFor(logging.INFO):
        with _about(state, epoch, traceparent):
            _move(was, state)


def _about(state: RunState, epoch: int, traceparent: str | None) -> AbstractContextManager[None]:
    """Whose row it was: not always the run that is at work where this is said."""
    return logs.about(
        run_id=state.run_id,
        step=state.step,
        epoch=epoch,
        workflow=f"{state.workflow}@{state.workflow_version}",
        trace_id=tracing.ids_of(tracing.trace_of(state.run_id, traceparent))["trace_id"],
    )


def _effect(before: Effect, after: Effect) -> None:
    sent_again = after.status is EffectStatus.DISPATCHED and after.token != before.token
    if after.status is before.status and not sent_again:
        return
    unknown = after.status is EffectStatus.UNKNOWN
    logs.event(
        log,
        f"effect.{after.status}",
        tool=after.tool,
        effect_id=after.id,
        attempt=after.attempts,
        doubt=after.doubt.value,
        trigger=after.trigger.value if unknown and after.trigger is not None else None,
    )


def _move(was: RunStatus, state: RunState) -> None:
    """Say where a run has come to; from step to step it moves without a word."""
    if state.status is was or (was in CLAIMABLE and state.status in CLAIMABLE):
        return
    reason = None if state.reason is None else state.reason.value
    logs.event(log, "run.moved", status=state.status.value, was=was.value, reason=reason)
