"""Handrail: controlled agents on a Celery fleet.

This module runs before every `handrail.x`, so it imports its public names only when they are asked
for: `import handrail.agent` stays free of Celery and SQL.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.agent.budget import Budget
    from handrail.agent.fixed import Deny, Done, HandOff, Proceed
    from handrail.agent.loop import NoProgress
    from handrail.agent.retry import ModelRetry, Retry
    from handrail.agent.stage import Action, Checked
    from handrail.agent.status import Reason
    from handrail.agent.tools import FOREVER, Compensation, Permit, Principal, RunFacts
    from handrail.agent.workflow import AgentLoop, Check, Commit, Confirm, Read, Verify, Workflow
    from handrail.client import Client
    from handrail.errors import ToolRefused, ToolUnclear
    from handrail.fleet import Fleet
    from handrail.installing import install
    from handrail.reports import sign_report
    from handrail.tasks.calls import ToolCall

__all__ = [
    "FOREVER",
    "Action",
    "AgentLoop",
    "Budget",
    "Check",
    "Checked",
    "Client",
    "Commit",
    "Compensation",
    "Confirm",
    "Deny",
    "Done",
    "Fleet",
    "HandOff",
    "ModelRetry",
    "NoProgress",
    "Permit",
    "Principal",
    "Proceed",
    "Read",
    "Reason",
    "Retry",
    "RunFacts",
    "ToolCall",
    "ToolRefused",
    "ToolUnclear",
    "Verify",
    "Workflow",
    "install",
    "sign_report",
]

_HOME = {
    "FOREVER": "handrail.agent.tools",
    "Action": "handrail.agent.stage",
    "AgentLoop": "handrail.agent.workflow",
    "Budget": "handrail.agent.budget",
    "Check": "handrail.agent.workflow",
    "Checked": "handrail.agent.stage",
    "Client": "handrail.client",
    "Commit": "handrail.agent.workflow",
    "Compensation": "handrail.agent.tools",
    "Confirm": "handrail.agent.workflow",
    "Deny": "handrail.agent.fixed",
    "Done": "handrail.agent.fixed",
    "Fleet": "handrail.fleet",
    "HandOff": "handrail.agent.fixed",
    "ModelRetry": "handrail.agent.retry",
    "NoProgress": "handrail.agent.loop",
    "Permit": "handrail.agent.tools",
    "Principal": "handrail.agent.tools",
    "Proceed": "handrail.agent.fixed",
    "Read": "handrail.agent.workflow",
    "Reason": "handrail.agent.status",
    "Retry": "handrail.agent.retry",
    "RunFacts": "handrail.agent.tools",
    "ToolCall": "handrail.tasks.calls",
    "ToolRefused": "handrail.errors",
    "ToolUnclear": "handrail.errors",
    "Verify": "handrail.agent.workflow",
    "Workflow": "handrail.agent.workflow",
    "install": "handrail.installing",
    "sign_report": "handrail.reports",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for, and read the version when it is."""
    if name == "__version__":
        return version("handrail")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
