"""Between rows and values: what the tables hold, as the core's immutable values, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from handrail.agent.approvals import Approval, ApprovalStatus, ApprovalTerms
from handrail.agent.budget import Budget, BudgetLeft, CallLimits
from handrail.agent.commands import (
    command_from_json,
    command_to_json,
    told_from_json,
    told_to_json,
)
from handrail.agent.effects import (
    CompensationRecord,
    Doubt,
    Effect,
    EffectStatus,
    Terms,
    Trigger,
)
from handrail.agent.machine import Level, Mode, RunState
from handrail.agent.protocol import OpenHandoff
from handrail.agent.stage import Observation
from handrail.agent.status import Reason, RunStatus
from handrail.agent.tools import Principal
from handrail.agent.trace import TraceEvent
from handrail.canonical import dumps, loads, normal, plain, plains

Row = Mapping[str, Any]


def state_of(row: Row, *, status: str) -> RunState:
    """Build a run's state; `status` is the column that counts here (the traced or the current
    one).
    """
    budget = _budget(row["budget"])
    return RunState(
        run_id=row["id"],
        tenant=row["tenant"],
        workflow=row["workflow"],
        workflow_version=row["workflow_version"],
        goal=plain(row["goal"]),
        principal=_principal(row["principal"]),
        input=loads(row["input"]),
        mode=Mode(row["mode"]),
        budget=budget,
        limits=_limits(row["limits"]),
        left=BudgetLeft(
            steps=row["steps_left"],
            model_calls=row["model_calls_left"],
            tool_calls=row["tool_calls_left"],
            tool_calls_reserved=row["tool_calls_reserved"],
            compensations_reserved=row["compensations_reserved"],
            tokens=row["tokens_left"],
            cost_microusd=row["cost_microusd_left"],
            output_bytes=row["output_bytes_left"],
            per_tool=_pairs(row.get("allowances")) if budget.per_tool else {},
        ),
        status=RunStatus(row[status]),
        reason=Reason(row["reason"]) if row["reason"] else None,
        step=row["step"],
        state_version=row["state_version"],
        levels=tuple(Level(name, frame) for name, frame in loads(row["levels"])),
        pending=command_from_json(loads(row["pending"])) if row["pending"] else None,
        told=told_from_json(loads(row["told"])) if row["told"] else None,
        answer=loads(row["answer"]) if row["answer"] else None,
        observations=_observations(_list(row.get("observations"))),
        observation_count=row["observation_count"],
        outputs=MappingProxyType({name: loads(value) for name, value in _list(row.get("outputs"))}),
    )


# Immutable values that most runs share; the text is the key, so that they are never stale.
@lru_cache(maxsize=1_024)
def _budget(text: str) -> Budget:
    return Budget.from_json(loads(text))


@lru_cache(maxsize=1_024)
def _principal(text: str) -> Principal:
    return Principal.from_json(loads(text))


@lru_cache(maxsize=1_024)
def _limits(text: str) -> CallLimits:
    return CallLimits(**loads(text))


@lru_cache(maxsize=1_024)
def _terms(text: str) -> Terms:
    return Terms(**loads(text))


def state_columns(state: RunState) -> dict[str, Any]:
    """The mutable columns of a run's state, budget left out: that moves by its own rules."""
    return {
        "status": state.status.value,
        "reason": state.reason.value if state.reason else None,
        "step": state.step,
        "state_version": state.state_version,
        "observation_count": state.observation_count,
        "levels": dumps([list(level) for level in state.levels]),
        "pending": dumps(command_to_json(state.pending)) if state.pending else None,
        "told": dumps(told_to_json(state.told)) if state.told else None,
        "answer": None if state.answer is None else dumps(state.answer),
    }


def left_columns(left: BudgetLeft) -> dict[str, int]:
    """The columns of what is left of a budget; each tool's own limit has a row of its own."""
    return {
        "steps_left": left.steps,
        "model_calls_left": left.model_calls,
        "tool_calls_left": left.tool_calls,
        "tool_calls_reserved": left.tool_calls_reserved,
        "compensations_reserved": left.compensations_reserved,
        "tokens_left": left.tokens,
        "cost_microusd_left": left.cost_microusd,
        "output_bytes_left": left.output_bytes,
    }


def effect_of(row: Row) -> Effect:
    """Build an effect."""
    return Effect(
        id=row["id"],
        tenant=row["tenant"],
        intent_key=plain(row["intent_key"]),
        tool=row["tool"],
        contract_version=row["contract_version"],
        arguments=MappingProxyType(loads(row["arguments"])),
        arguments_hash=row["arguments_hash"],
        terms=_terms(row["terms"]),
        status=EffectStatus(row["status"]),
        token=row["token"],
        dispatcher=row["dispatcher"],
        owner_run_id=row["owner_run_id"],
        attempts=row["attempts"],
        doubt=Doubt(row["doubt"]),
        first_dispatched_at=row["first_dispatched_at"],
        dispatch_deadline_at=row["dispatch_deadline_at"],
        unknown_since=row["unknown_since"],
        trigger=Trigger(row["doubt_trigger"]) if row["doubt_trigger"] else None,
        queries_left=row["queries_left"],
        absences=row["absences"],
        next_query_at=row["next_query_at"],
        result=loads(row["result"]) if row["result"] else None,
        evidence=row["evidence"],
        approval_id=row["approval_id"],
        compensation=_compensation(row["compensation"]),
        compensates=row["compensates"],
        rewind=row["rewind"],
    )


def _compensation(text: str | None) -> CompensationRecord | None:
    return None if text is None else CompensationRecord(**loads(text))


def effect_columns(effect: Effect) -> dict[str, Any]:
    """The mutable columns of an effect."""
    undo = effect.compensation
    return {
        "status": effect.status.value,
        "token": effect.token,
        "dispatcher": effect.dispatcher,
        "owner_run_id": effect.owner_run_id,
        "attempts": effect.attempts,
        "doubt": effect.doubt.value,
        "first_dispatched_at": effect.first_dispatched_at,
        "dispatch_deadline_at": effect.dispatch_deadline_at,
        "unknown_since": effect.unknown_since,
        "doubt_trigger": effect.trigger.value if effect.trigger else None,
        "queries_left": effect.queries_left,
        "absences": effect.absences,
        "next_query_at": effect.next_query_at,
        "result": None if effect.result is None else dumps(normal(effect.result)),
        "evidence": effect.evidence,
        "approval_id": effect.approval_id,
        "compensation": None if undo is None else dumps(undo.to_json()),
        "rewind": effect.rewind,
    }


def approval_of(row: Row, consents: Iterable[str] = ()) -> Approval:
    """Build an approval; `consents` are the people who have agreed, as they are stored."""
    return Approval(
        id=row["id"],
        run_id=row["run_id"],
        tenant=row["tenant"],
        workflow=row["workflow"],
        status=ApprovalStatus(row["status"]),
        step=row["step"],
        state_version=row["state_version"],
        tool=row["tool"],
        contract_version=row["contract_version"],
        intent_key=None if row["intent_key"] is None else plain(row["intent_key"]),
        arguments=MappingProxyType(loads(row["arguments"])),
        arguments_hash=row["arguments_hash"],
        subject=row["subject"],
        terms=ApprovalTerms(
            contract_hash=row["contract_hash"],
            amount=row["amount"],
            approvers=row["approvers"],
            requester_approves=bool(row["requester_approves"]),
        ),
        requested_at=row["requested_at"],
        expires_at=row["expires_at"],
        consents=tuple(map(plain, consents)),
    )


def handoff_row(row: Row) -> OpenHandoff:
    """Build an open handoff, as a decision takes it."""
    return OpenHandoff(
        id=row["id"],
        reason=Reason(row["reason"]),
        effect_id=row["effect_id"],
        claimed_by=None if row["claimed_by"] is None else plain(row["claimed_by"]),
        claimed_until=row["claimed_until"],
        version=row["version"],
    )


def events_text(events: tuple[TraceEvent, ...]) -> str:
    """Write trace events as one JSON array."""
    return dumps([event.to_json() for event in events])


def _observations(rows: list[Any]) -> tuple[Observation, ...]:
    texts = plains(text for _, text, _ in rows)
    return tuple(
        Observation(plain(source), text, digest)
        for (source, _, digest), text in zip(rows, texts, strict=True)
    )


def _list(value: Any) -> list[Any]:
    # PostgreSQL's driver hands JSON over parsed, SQLite's as text.
    if value is None:
        return []
    out = loads(value) if isinstance(value, str) else value
    assert isinstance(out, list)
    return out


def _pairs(value: Any) -> dict[str, int]:
    return {name: left for name, left in _list(value)}


__all__ = [
    "approval_of",
    "effect_columns",
    "effect_of",
    "events_text",
    "handoff_row",
    "left_columns",
    "state_columns",
    "state_of",
]
