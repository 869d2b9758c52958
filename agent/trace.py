"""What a trace holds: typed events with public facts only; never a model's reasoning, never a
secret.

Arguments and intent keys appear as hashes. Events are numbered without a gap when they are stored.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from handrail.canonical import Json

OBSERVATION_BUILT: Final = "observation.built"
PROPOSAL_RECEIVED: Final = "proposal.received"
PROPOSAL_REJECTED: Final = "proposal.rejected"
POLICY_ALLOWED: Final = "policy.allowed"
MODEL_FAILED: Final = "model.failed"
FINAL: Final = "final"
COMPLETION_FAILED: Final = "completion.failed"
COMPLETION_VERIFIED: Final = "completion.verified"
TOOL_STARTED: Final = "tool.started"
TOOL_FAILED: Final = "tool.failed"
RESULT_CLASSIFIED: Final = "result.classified"
RESULT_VERIFIED: Final = "result.verified"
RECONCILIATION_REQUIRED: Final = "effect.reconciliation-required"
EFFECT_RESOLVED: Final = "effect.resolved"
ORIGINAL_READ: Final = "effect.original-read"
EFFECT_COMPENSATING: Final = "effect.compensating"
EFFECT_COMPENSATED: Final = "effect.compensated"
HANDOFF_RESOLVED: Final = "handoff.resolved"
PRECONDITION_CHECKED: Final = "precondition.checked"
PRECONDITION_FAILED: Final = "precondition.failed"
PLAN_REFUSED: Final = "plan.refused"
STATE_TRANSITIONED: Final = "state.transitioned"
STAGE_FINISHED: Final = "stage.finished"
EFFECT_SHADOWED: Final = "effect.shadowed"
APPROVAL_REQUESTED: Final = "approval.requested"
APPROVAL_SHADOWED: Final = "approval.shadowed"
STEP_DEFERRED: Final = "step.deferred"
RUN_MOVED: Final = "run.moved"
RUN_COMPLETED: Final = "run.completed"
RUN_STOPPED: Final = "run.stopped"
RUN_RESUMED: Final = "run.resumed"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One public fact. `step` is the number of rounds finished at that moment."""

    type: str
    step: int
    detail: Mapping[str, Json]

    def to_json(self) -> dict[str, Json]:
        """Return the event as a JSON object."""
        return {"type": self.type, "step": self.step, "detail": dict(self.detail)}
