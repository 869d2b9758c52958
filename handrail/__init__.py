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
    from handrail.agent.workflow import AgentLoop, Check, Commit, Confirm, Read, Verify, Workflow
    from handrail.fleet import Fleet

__all__ = [
    "AgentLoop",
    "Budget",
    "Check",
    "Commit",
    "Confirm",
    "Fleet",
    "Read",
    "Verify",
    "Workflow",
]

_HOME = {
    "AgentLoop": "handrail.agent.workflow",
    "Budget": "handrail.agent.budget",
    "Check": "handrail.agent.workflow",
    "Commit": "handrail.agent.workflow",
    "Confirm": "handrail.agent.workflow",
    "Fleet": "handrail.fleet",
    "Read": "handrail.agent.workflow",
    "Verify": "handrail.agent.workflow",
    "Workflow": "handrail.agent.workflow",
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
