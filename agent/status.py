"""The life of a run: its statuses, its events, the only legal moves, and the reasons for a stop.

Pure: no I/O, no clock. Every change of status asks `next_status`; the ledger repeats the statuses
as CHECKs, the README's diagram is drawn from `TRANSITIONS`, and a test walks every pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from handrail.errors import IllegalTransition


class RunStatus(StrEnum):
    """Where a run is, and who moves it on."""

    QUEUED = "queued"  # accepted; the first claim moves it
    RUNNING = "running"  # deciding; one worker at most holds the lease
    EXECUTING = "executing"  # a write is about to be called, or is; a dead worker leaves it here
    AWAITING_APPROVAL = "awaiting_approval"  # a person approves or rejects; the sweep expires it
    AWAITING_INPUT = "awaiting_input"  # a person answers; the sweep expires it
    AWAITING_BRANCHES = "awaiting_branches"  # the last child's commit moves it
    RECONCILING = "reconciling"  # a write without proof; the reconciler or a late receipt moves it
    CANCELLING = "cancelling"  # cancel is wished; the lease holder or the sweep ends it
    HANDED_OFF = "handed_off"  # only a person moves it
    COMPLETED = "completed"  # terminal
    COMPENSATED = "compensated"  # terminal: done, and undone with proof
    FAILED = "failed"  # terminal; `reason` says why
    CANCELLED = "cancelled"  # terminal
    BUDGET_EXHAUSTED = "budget_exhausted"  # terminal; `reason` says which budget


class RunEvent(StrEnum):
    """What happened to a run."""

    STEP_CLAIMED = "step-claimed"
    LEASE_RETURNED = (
        "lease-returned"  # given back: lock taken, tool paused, intent in flight elsewhere
    )
    LEASE_LOST = "lease-lost"
    WORKER_LOST = "worker-lost"
    VERSION_UNAVAILABLE = "version-unavailable"
    PROPOSAL_ALLOWED = "proposal-allowed"
    CHECKPOINT_RESUMED = "checkpoint-resumed"
    PROPOSAL_INVALID = "proposal-invalid"
    PERMISSION_DENIED = "permission-denied"
    INTENT_CONFLICT = "intent-conflict"
    MODEL_FAILED = "model-failed"
    VERIFICATION_FAILED = "verification-failed"
    BRANCH_FAILED = "branch-failed"
    PERSON_NEEDED = "person-needed"
    APPROVAL_NEEDED = "approval-needed"
    QUESTION_ASKED = "question-asked"
    BRANCHES_SPAWNED = "branches-spawned"
    BRANCHES_JOINED = "branches-joined"
    COMPLETION_VERIFIED = "completion-verified"
    COMPLETION_REJECTED = "completion-rejected"
    REPETITION_FOUND = "repetition-found"
    BUDGET_SPENT = "budget-spent"
    RESULT_VERIFIED = "result-verified"
    RETRYABLE_FAILURE = "retryable-failure"
    TOOL_FAILED = "tool-failed"
    INTENT_WITH_PERSON = "intent-with-person"  # handed off, compensating or contradicted elsewhere
    EFFECT_UNKNOWN = "effect-unknown"
    APPROVED = "approved"
    APPROVAL_REJECTED = "approval-rejected"
    APPROVAL_EXPIRED = "approval-expired"
    ANSWERED = "answered"
    INPUT_EXPIRED = "input-expired"
    EXPIRED = "expired"
    CANCEL_AT_REST = "cancel-at-rest"
    CANCEL_IN_FLIGHT = "cancel-in-flight"
    CANCEL_WISHED = "cancel-wished"
    CANCEL_SETTLED = "cancel-settled"
    PROVED_APPLIED = "proved-applied"
    PROVED_APPLIED_COMPENSATE = "proved-applied-compensate"
    PROVED_APPLIED_KEPT = "proved-applied-kept"
    PROVED_ABSENT = "proved-absent"
    PROVED_ABSENT_CANCELLED = "proved-absent-cancelled"
    PROVED_ABSENT_FAILED = "proved-absent-failed"
    RELEASED = "released"
    COMPENSATION_PROVED = "compensation-proved"
    NO_PROOF = "no-proof"
    CONTRARY_EVIDENCE = "contrary-evidence"
    OPERATOR_COMPLETED = "operator-completed"
    OPERATOR_COMPENSATED = "operator-compensated"
    OPERATOR_FAILED = "operator-failed"
    OPERATOR_CANCELLED = "operator-cancelled"
    OPERATOR_ASKS_AGAIN = "operator-asks-again"
    OPERATOR_RESUMED = "operator-resumed"


class Reason(StrEnum):
    """Why a run stopped or rests: stable, kebab-case, never reworded."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    CLARIFICATION_REQUIRED = "clarification-required"
    INVALID_PROPOSAL = "invalid-proposal"
    REPEATED_PROPOSAL = "repeated-proposal"
    STEP_BUDGET_EXHAUSTED = "step-budget-exhausted"
    MODEL_CALL_BUDGET_EXHAUSTED = "model-call-budget-exhausted"
    TOOL_CALL_BUDGET_EXHAUSTED = "tool-call-budget-exhausted"
    DEADLINE_EXHAUSTED = "deadline-exhausted"
    MODEL_FAILED = "model-failed"
    VERIFICATION_FAILED = "verification-failed"
    TOOL_FAILED = "tool-failed"
    UNKNOWN_EFFECT = "unknown-effect"
    TOKEN_BUDGET_EXHAUSTED = "token-budget-exhausted"
    COST_BUDGET_EXHAUSTED = "cost-budget-exhausted"
    OUTPUT_BUDGET_EXHAUSTED = "output-budget-exhausted"
    CONCURRENCY_BUDGET_EXHAUSTED = "concurrency-budget-exhausted"
    EXPIRED = "expired"
    OSCILLATION = "oscillation"
    NO_PROGRESS = "no-progress"
    PERMISSION_DENIED = "permission-denied"
    INTENT_CONFLICT = "intent-conflict"
    BRANCH_FAILED = "branch-failed"
    APPROVAL_REJECTED = "approval-rejected"
    APPROVAL_EXPIRED = "approval-expired"
    INPUT_EXPIRED = "input-expired"
    WORKER_LOST = "worker-lost"
    VERSION_UNAVAILABLE = "version-unavailable"
    HANDOFF_REQUIRED = "handoff-required"
    COMPENSATED = "compensated"
    CONTRADICTION = "contradiction"


class Category(StrEnum):
    """The coarse kind of a stop, as `run.stopped` shows it."""

    COMPLETION = "completion"
    FAILURE = "failure"
    CANCELLATION = "cancellation"
    BUDGET = "budget"
    HANDOFF = "handoff"


class Termination(StrEnum):
    """The kinds of condition that end the work on a run; each is a program's finding."""

    COMPLETION = "completion"
    UNRECOVERABLE_FAILURE = "unrecoverable-failure"
    BUDGET = "budget"
    NO_PROGRESS = "no-progress"  # or a loop: the same state or actions again and again
    CANCELLATION = "cancellation"
    HUMAN_TAKEOVER = "human-takeover"


_S, _E = RunStatus, RunEvent

_RESOLUTIONS: Final = {
    _E.PROVED_APPLIED: _S.RUNNING,
    _E.PROVED_APPLIED_COMPENSATE: _S.RECONCILING,
    _E.PROVED_APPLIED_KEPT: _S.CANCELLED,
    _E.PROVED_ABSENT: _S.RUNNING,
    _E.PROVED_ABSENT_CANCELLED: _S.CANCELLED,
    _E.PROVED_ABSENT_FAILED: _S.FAILED,
    _E.RELEASED: _S.RUNNING,
    _E.COMPENSATION_PROVED: _S.COMPENSATED,
    _E.NO_PROOF: _S.HANDED_OFF,
    _E.EFFECT_UNKNOWN: _S.RECONCILING,  # a compensation's own doubt keeps the run here
    _E.CANCEL_WISHED: _S.RECONCILING,
    _E.CONTRARY_EVIDENCE: _S.RECONCILING,
}
_WORKER_GONE: Final = {
    _E.WORKER_LOST: _S.HANDED_OFF,
    _E.VERSION_UNAVAILABLE: _S.HANDED_OFF,
}

TRANSITIONS: Final[Mapping[RunStatus, Mapping[RunEvent, RunStatus]]] = MappingProxyType(
    {
        _S.QUEUED: {
            _E.STEP_CLAIMED: _S.RUNNING,
            _E.CANCEL_AT_REST: _S.CANCELLED,
            _E.BUDGET_SPENT: _S.BUDGET_EXHAUSTED,
            _E.VERSION_UNAVAILABLE: _S.HANDED_OFF,
            _E.CONTRARY_EVIDENCE: _S.RECONCILING,
        },
        _S.RUNNING: {
            _E.STEP_CLAIMED: _S.RUNNING,
            _E.LEASE_RETURNED: _S.RUNNING,
            _E.LEASE_LOST: _S.RUNNING,
            **_WORKER_GONE,
            _E.PROPOSAL_ALLOWED: _S.EXECUTING,
            _E.CHECKPOINT_RESUMED: _S.EXECUTING,
            _E.PROPOSAL_INVALID: _S.FAILED,
            _E.PERMISSION_DENIED: _S.FAILED,
            _E.INTENT_CONFLICT: _S.FAILED,
            _E.MODEL_FAILED: _S.FAILED,
            _E.VERIFICATION_FAILED: _S.FAILED,
            _E.BRANCH_FAILED: _S.FAILED,
            _E.PERSON_NEEDED: _S.HANDED_OFF,
            _E.APPROVAL_NEEDED: _S.AWAITING_APPROVAL,
            _E.QUESTION_ASKED: _S.AWAITING_INPUT,
            _E.BRANCHES_SPAWNED: _S.AWAITING_BRANCHES,
            _E.COMPLETION_VERIFIED: _S.COMPLETED,
            _E.COMPLETION_REJECTED: _S.RUNNING,
            _E.REPETITION_FOUND: _S.FAILED,
            _E.BUDGET_SPENT: _S.BUDGET_EXHAUSTED,
            _E.EFFECT_UNKNOWN: _S.RECONCILING,
            _E.CANCEL_AT_REST: _S.CANCELLED,
            _E.CANCEL_IN_FLIGHT: _S.CANCELLING,
            _E.CONTRARY_EVIDENCE: _S.RECONCILING,
        },
        _S.EXECUTING: {
            _E.STEP_CLAIMED: _S.EXECUTING,
            _E.LEASE_RETURNED: _S.RUNNING,
            _E.LEASE_LOST: _S.EXECUTING,
            **_WORKER_GONE,
            _E.CHECKPOINT_RESUMED: _S.EXECUTING,
            _E.RESULT_VERIFIED: _S.RUNNING,
            _E.RETRYABLE_FAILURE: _S.RUNNING,
            _E.TOOL_FAILED: _S.FAILED,
            _E.INTENT_CONFLICT: _S.FAILED,
            _E.INTENT_WITH_PERSON: _S.HANDED_OFF,
            _E.APPROVAL_EXPIRED: _S.FAILED,
            _E.BUDGET_SPENT: _S.BUDGET_EXHAUSTED,
            _E.EFFECT_UNKNOWN: _S.RECONCILING,
            _E.CANCEL_AT_REST: _S.CANCELLED,
            _E.CANCEL_IN_FLIGHT: _S.CANCELLING,
            _E.CONTRARY_EVIDENCE: _S.RECONCILING,
        },
        _S.AWAITING_APPROVAL: {
            _E.APPROVED: _S.EXECUTING,
            _E.APPROVAL_REJECTED: _S.FAILED,
            _E.APPROVAL_EXPIRED: _S.FAILED,
            _E.EXPIRED: _S.BUDGET_EXHAUSTED,
            _E.CANCEL_AT_REST: _S.CANCELLED,
            _E.CONTRARY_EVIDENCE: _S.RECONCILING,
        },
        _S.AWAITING_INPUT: {
            _E.ANSWERED: _S.RUNNING,
            _E.INPUT_EXPIRED: _S.FAILED,
            _E.EXPIRED: _S.BUDGET_EXHAUSTED,
            _E.CANCEL_AT_REST: _S.CANCELLED,
            _E.CONTRARY_EVIDENCE: _S.RECONCILING,
        },
        _S.AWAITING_BRANCHES: {
            _E.BRANCHES_JOINED: _S.RUNNING,
            _E.CANCEL_IN_FLIGHT: _S.CANCELLING,
            _E.CANCEL_AT_REST: _S.CANCELLED,
            _E.CONTRARY_EVIDENCE: _S.RECONCILING,
        },
        _S.RECONCILING: _RESOLUTIONS,
        _S.CANCELLING: {
            _E.CANCEL_SETTLED: _S.CANCELLED,
            _E.EFFECT_UNKNOWN: _S.RECONCILING,
            _E.PROVED_APPLIED_COMPENSATE: _S.RECONCILING,
            _E.PROVED_APPLIED_KEPT: _S.CANCELLED,
            _E.CONTRARY_EVIDENCE: _S.RECONCILING,
        },
        _S.HANDED_OFF: {
            _E.CANCEL_WISHED: _S.HANDED_OFF,
            _E.OPERATOR_COMPLETED: _S.COMPLETED,
            _E.OPERATOR_COMPENSATED: _S.COMPENSATED,
            _E.OPERATOR_FAILED: _S.FAILED,
            _E.OPERATOR_CANCELLED: _S.CANCELLED,
            _E.OPERATOR_ASKS_AGAIN: _S.RECONCILING,
            _E.OPERATOR_RESUMED: _S.RUNNING,
            _E.CONTRARY_EVIDENCE: _S.RECONCILING,
        },
        _S.COMPLETED: {},  # terminal statuses are keys too: a test walks every pair
        _S.COMPENSATED: {},
        _S.FAILED: {},
        _S.CANCELLED: {},
        _S.BUDGET_EXHAUSTED: {},
    }
)

TERMINAL: Final = frozenset(status for status, moves in TRANSITIONS.items() if not moves)
#: Statuses in which a worker may claim the next step.
CLAIMABLE: Final = frozenset({_S.QUEUED, _S.RUNNING, _S.EXECUTING})
#: Statuses that nobody but a person leaves.
WITH_PERSON: Final = frozenset({_S.AWAITING_APPROVAL, _S.AWAITING_INPUT, _S.HANDED_OFF})

_R, _C = Reason, Category

#: How a run stops for a reason: the event that the transition table is asked with, and the
# category.
STOPS: Final[Mapping[Reason, tuple[RunEvent, Category]]] = MappingProxyType(
    {
        _R.COMPLETED: (_E.COMPLETION_VERIFIED, _C.COMPLETION),
        _R.CANCELLED: (_E.CANCEL_AT_REST, _C.CANCELLATION),
        _R.CLARIFICATION_REQUIRED: (_E.QUESTION_ASKED, _C.HANDOFF),
        _R.INVALID_PROPOSAL: (_E.PROPOSAL_INVALID, _C.FAILURE),
        _R.REPEATED_PROPOSAL: (_E.REPETITION_FOUND, _C.FAILURE),
        _R.OSCILLATION: (_E.REPETITION_FOUND, _C.FAILURE),
        _R.NO_PROGRESS: (_E.REPETITION_FOUND, _C.FAILURE),
        _R.STEP_BUDGET_EXHAUSTED: (_E.BUDGET_SPENT, _C.BUDGET),
        _R.MODEL_CALL_BUDGET_EXHAUSTED: (_E.BUDGET_SPENT, _C.BUDGET),
        _R.TOOL_CALL_BUDGET_EXHAUSTED: (_E.BUDGET_SPENT, _C.BUDGET),
        _R.DEADLINE_EXHAUSTED: (_E.BUDGET_SPENT, _C.BUDGET),
        _R.TOKEN_BUDGET_EXHAUSTED: (_E.BUDGET_SPENT, _C.BUDGET),
        _R.COST_BUDGET_EXHAUSTED: (_E.BUDGET_SPENT, _C.BUDGET),
        _R.OUTPUT_BUDGET_EXHAUSTED: (_E.BUDGET_SPENT, _C.BUDGET),
        _R.CONCURRENCY_BUDGET_EXHAUSTED: (_E.BUDGET_SPENT, _C.BUDGET),
        _R.EXPIRED: (_E.BUDGET_SPENT, _C.BUDGET),
        _R.MODEL_FAILED: (_E.MODEL_FAILED, _C.FAILURE),
        _R.VERIFICATION_FAILED: (_E.VERIFICATION_FAILED, _C.FAILURE),
        _R.TOOL_FAILED: (_E.TOOL_FAILED, _C.FAILURE),
        _R.PERMISSION_DENIED: (_E.PERMISSION_DENIED, _C.FAILURE),
        _R.INTENT_CONFLICT: (_E.INTENT_CONFLICT, _C.FAILURE),
        _R.BRANCH_FAILED: (_E.BRANCH_FAILED, _C.FAILURE),
        _R.UNKNOWN_EFFECT: (_E.EFFECT_UNKNOWN, _C.HANDOFF),
        _R.APPROVAL_REJECTED: (_E.APPROVAL_REJECTED, _C.HANDOFF),
        _R.APPROVAL_EXPIRED: (_E.APPROVAL_EXPIRED, _C.HANDOFF),
        _R.INPUT_EXPIRED: (_E.INPUT_EXPIRED, _C.HANDOFF),
        _R.WORKER_LOST: (_E.WORKER_LOST, _C.HANDOFF),
        _R.VERSION_UNAVAILABLE: (_E.VERSION_UNAVAILABLE, _C.HANDOFF),
        _R.HANDOFF_REQUIRED: (_E.PERSON_NEEDED, _C.HANDOFF),
        _R.COMPENSATED: (_E.COMPENSATION_PROVED, _C.CANCELLATION),
        _R.CONTRADICTION: (_E.INTENT_WITH_PERSON, _C.HANDOFF),
    }
)


def next_status(run_id: str, status: RunStatus, event: RunEvent) -> RunStatus:
    """Return the status that `event` leads to; raise `IllegalTransition` where the table has no
    move.
    """
    moves = TRANSITIONS[status]
    if event not in moves:
        raise IllegalTransition(run_id, status.value, event.value)
    return moves[event]


def category_of(reason: Reason) -> Category:
    """Return the category that `run.stopped` shows for a reason."""
    return STOPS[reason][1]


def _termination_of(reason: Reason) -> Termination:
    if STOPS[reason][0] is RunEvent.REPETITION_FOUND:
        return Termination.NO_PROGRESS
    return {
        Category.COMPLETION: Termination.COMPLETION,
        Category.FAILURE: Termination.UNRECOVERABLE_FAILURE,
        Category.BUDGET: Termination.BUDGET,
        Category.CANCELLATION: Termination.CANCELLATION,
        Category.HANDOFF: Termination.HUMAN_TAKEOVER,
    }[category_of(reason)]


#: The catalogue of termination conditions: every reason is of exactly one kind.
CATALOGUE: Final[Mapping[Termination, tuple[Reason, ...]]] = MappingProxyType(
    {
        kind: tuple(reason for reason in Reason if _termination_of(reason) is kind)
        for kind in Termination
    }
)


def state_diagram() -> str:
    """Draw `TRANSITIONS` as a Mermaid state diagram: one arrow for each pair of statuses."""
    lines = ["stateDiagram-v2", "    [*] --> queued"]
    for status, moves in TRANSITIONS.items():
        events: dict[RunStatus, list[str]] = {}
        for event, target in moves.items():
            if target is not status:
                events.setdefault(target, []).append(event.value)
        lines += [f"    {status} --> {to}: {', '.join(names)}" for to, names in events.items()]
    lines += [f"    {status} --> [*]" for status in TRANSITIONS if status in TERMINAL]
    return "\n".join(lines)
