"""What no handoff may lack: with less than this, a person could only guess. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from handrail.canonical import Json
from handrail.errors import InvariantBroken


@dataclass(eq=False)
class IncompleteHandoff(InvariantBroken):
    """A run was to be handed to a person without what that person needs; nothing was written."""

    code: ClassVar[str] = "incomplete-handoff"
    run_id: str
    lacking: tuple[str, ...]

    def __str__(self) -> str:
        lacking = ", ".join(self.lacking)
        return f"run {self.run_id}: its handoff lacks {lacking}; say 'none' where there is none"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_object(value: object) -> bool:
    return isinstance(value, dict) and bool(value)


def _is_action(value: object) -> bool:
    return value == "none" or _is_object(value)


def _is_trace(value: object) -> bool:
    return isinstance(value, str) and value.startswith("trace:")


#: Why alone ("the agent failed") is no package: what was wanted, what is known, what was about to
#: be done, what is left to do it with, and where it all stands.
NEEDED: Final[Mapping[str, Callable[[Any], bool]]] = {
    "goal": _is_text,
    "reason": _is_text,
    "verified": _is_object,
    "pending_action": _is_action,
    "budget_left": _is_object,
    "trace": _is_trace,
}


def must_be_complete(run_id: str, package: Mapping[str, Json]) -> None:
    """Refuse with `IncompleteHandoff` what lacks any of it."""
    lacking = tuple(name for name, is_there in NEEDED.items() if not is_there(package.get(name)))
    if lacking:
        raise IncompleteHandoff(run_id, lacking)


__all__ = ["NEEDED", "IncompleteHandoff", "must_be_complete"]
