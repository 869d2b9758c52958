"""A run as its owner reads it: one immutable value; changing what it holds changes nothing
inside.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handrail.agent.machine import RunState
from handrail.agent.status import TERMINAL, WITH_PERSON, RunStatus
from handrail.canonical import Json


@dataclass(frozen=True, slots=True)
class Run:
    """What a run is now. `answer` only if completed; `observations` are oldest first.

    `step` counts rounds finished, `budget_left` and `budget_used` each budget by name; instants
    are milliseconds since the epoch, by the ledger's clock.
    """

    run_id: str
    tenant: str
    workflow: str
    workflow_version: str
    goal: str
    status: str
    reason: str | None
    answer: Json
    step: int
    version: int
    model_calls: int
    tool_calls: int
    observations: tuple[str, ...]
    observation_count: int
    outputs: Mapping[str, Json]
    budget_left: Mapping[str, int]
    budget_used: Mapping[str, int]
    created_at: int
    deadline_at: int | None
    remaining_ms: int | None
    cancel_requested: bool
    traceparent: str | None = None
    mode: str = "live"

    @property
    def ended(self) -> bool:
        """Whether the run has a terminal status."""
        return RunStatus(self.status) in TERMINAL

    @property
    def rests(self) -> bool:
        """Whether the run has ended, or waits for a person."""
        return self.ended or RunStatus(self.status) in WITH_PERSON

    @property
    def state(self) -> dict[str, Any]:
        """The final public state, in the form of the runner's outcome."""
        return {
            "runId": self.run_id,
            "goal": self.goal,
            "observations": list(self.observations),
            "version": self.version,
            "step": self.step,
            "modelCalls": self.model_calls,
            "toolCalls": self.tool_calls,
        }

    @property
    def interim(self) -> dict[str, Json]:
        """What is verified so far: stage outputs and observations, whatever stopped the run."""
        return {"outputs": copy.deepcopy(dict(self.outputs)), "observations": [*self.observations]}

    def to_json(self) -> dict[str, Any]:
        """Return the run as one JSON object."""
        return {
            "run_id": self.run_id,
            "tenant": self.tenant,
            "workflow": self.workflow,
            "workflow_version": self.workflow_version,
            "mode": self.mode,
            "goal": self.goal,
            "status": self.status,
            "reason": self.reason,
            "answer": self.answer,
            "steps": self.step,
            "state_version": self.version,
            "model_calls": self.model_calls,
            "tool_calls": self.tool_calls,
            "observations": list(self.observations),
            "observation_count": self.observation_count,
            "outputs": dict(self.outputs),
            "budget_left": dict(self.budget_left),
            "budget_used": dict(self.budget_used),
            "created_at": self.created_at,
            "deadline_at": self.deadline_at,
            "remaining_ms": self.remaining_ms,
            "cancel_requested": self.cancel_requested,
        }


def run_of(row: Mapping[str, Any]) -> Run:
    """Build a run from what the ledger read."""
    state: RunState = row["state"]
    left = state.left.snapshot()
    limits = state.budget.to_json()
    deadline_at = row["deadline_at"]
    remaining = row["remaining_ms"] if deadline_at is None else deadline_at - row["now"]
    return Run(
        run_id=state.run_id,
        tenant=state.tenant,
        workflow=state.workflow,
        workflow_version=state.workflow_version,
        goal=state.goal,
        status=state.status.value,
        reason=state.reason.value if state.reason else None,
        answer=copy.deepcopy(state.answer),
        step=state.step,
        version=state.state_version,
        model_calls=state.model_calls,
        tool_calls=state.tool_calls,
        observations=tuple(o.text for o in state.observations),
        observation_count=state.observation_count,
        outputs=copy.deepcopy(dict(state.outputs)),
        budget_left=left,
        budget_used={name: limits[name] - left[name] for name in left if name in limits}
        | {"tool_calls": state.tool_calls},
        created_at=row["created_at"],
        deadline_at=deadline_at,
        remaining_ms=remaining,
        cancel_requested=row["cancel_requested_at"] is not None,
        traceparent=row["traceparent"],
        mode=state.mode.value,
    )
