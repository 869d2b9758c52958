"""Pauses: what a person, or too much doubt, keeps from being dispatched. Pure.

A pause stops dispatches alone: reads, queries, outcomes and late receipts go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from handrail.errors import BadInput

#: While this many effects of one tool are unknown, it is sent nothing new.
DEFAULT_MAX_OPEN_UNKNOWNS: Final = 1_000
MAX_REASON: Final = 1_000
MAX_NAME: Final = 128


class Scope(StrEnum):
    """What is paused, the widest first."""

    FLEET = "fleet"
    TENANT = "tenant"
    WORKFLOW = "workflow"
    TOOL = "tool"


@dataclass(eq=False)
class InvalidPause(BadInput):
    """A pause cannot be ordered, or lifted, as it was asked for; nothing was changed."""

    code: ClassVar[str] = "invalid-pause"
    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause in force. `automatic`: by too many open unknowns of a tool; it ends by itself when
    they are settled, and has no moment at which it began.
    """

    scope: Scope
    name: str
    reason: str
    paused_by: str = ""
    paused_at: int | None = None
    automatic: bool = False

    def to_json(self) -> Mapping[str, object]:
        """Return the pause as a JSON object."""
        return {
            "scope": self.scope.value,
            "name": self.name,
            "reason": self.reason,
            "paused_by": self.paused_by,
            "paused_at": self.paused_at,
            "automatic": self.automatic,
        }


def checked_scope(scope: object, name: object) -> tuple[Scope, str]:
    """Read what is to be paused or resumed. Raises `InvalidPause`."""
    try:
        wanted = Scope(str(scope))
    except ValueError:
        known = ", ".join(item.value for item in Scope)
        raise InvalidPause("scope", f"{scope!r} is none of: {known}") from None
    if wanted is Scope.FLEET:
        if name != "":
            raise InvalidPause("name", "the whole fleet has none: leave it out")
    elif not _is_line(name, MAX_NAME):
        raise InvalidPause("name", f"name the {wanted.value}: 1 to {MAX_NAME} printable characters")
    return wanted, str(name)


def checked_words(reason: object, by: object) -> tuple[str, str]:
    """Read why something is paused and who says so. Raises `InvalidPause`."""
    if not _is_line(reason, MAX_REASON):
        raise InvalidPause("reason", f"say why in 1 to {MAX_REASON} printable characters")
    if not _is_line(by, MAX_NAME):
        raise InvalidPause("by", f"say who in 1 to {MAX_NAME} printable characters")
    return str(reason), str(by)


def _is_line(text: object, most: int) -> bool:
    printable = isinstance(text, str) and len(text) <= most and text.isprintable()
    return printable and bool(str(text).strip())
