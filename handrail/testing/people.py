"""People for tests: somebody who agrees, somebody who resolves."""

from __future__ import annotations

from typing import Final

from handrail.agent.approvals import ApprovalRefused
from handrail.agent.people import Role
from handrail.agent.tools import Principal
from handrail.fleet import Fleet
from handrail.runs import Run

APPROVER: Final = Principal("approver", roles=frozenset({Role.APPROVER}))
OPERATOR: Final = Principal("operator", roles=frozenset({Role.OPERATOR}))
ADMIN: Final = Principal("admin", roles=frozenset({Role.ADMIN}))


def agree(fleet: Fleet, run: str | Run, *, by: Principal = APPROVER) -> Run:
    """Agree to what a run is parked with, as an approver who has looked at it. Raises
    `ApprovalRefused`.
    """
    waiting = fleet.desk.approvals(by=by, run=run)
    if not waiting:
        raise ApprovalRefused("not-pending", f"the run is {fleet.get(run).status}")
    return fleet.approve(fleet.desk.issue_token(waiting[0].id, by=by), by=by)


def disagree(fleet: Fleet, run: str | Run, *, by: Principal = APPROVER, reason: str = "no") -> Run:
    """Refuse what a run is parked with. Raises `ApprovalRefused`."""
    waiting = fleet.desk.approvals(by=by, run=run)
    if not waiting:
        raise ApprovalRefused("not-pending", f"the run is {fleet.get(run).status}")
    return fleet.reject(waiting[0].id, by=by, reason=reason)
