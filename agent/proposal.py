"""What a model asked for, read as untrusted input.

A proposal is a tool call, a claim of completion or a request for clarification: one of these, with
exactly its own fields. Anything else is a `Malformed` value with a stable code, never an exception.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from handrail.canonical import Json, normal, parse_json
from handrail.errors import NotCanonical


@dataclass(frozen=True, slots=True)
class ToolProposal:
    """The model wants a tool called; nothing is checked yet but the shape."""

    tool: str
    arguments: dict[str, Json]


@dataclass(frozen=True, slots=True)
class CompletionClaim:
    """The model says that it is done. A claim is a proposal: only a check completes a run."""

    answer: Json


@dataclass(frozen=True, slots=True)
class Clarification:
    """The model asks the user something."""

    question: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """The model's output is no proposal. `kind` is what it called itself, shortened for the
    trace.
    """

    kind: str
    problem: str


Proposal: TypeAlias = ToolProposal | CompletionClaim | Clarification

_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "tool": frozenset({"kind", "tool", "arguments"}),
    "complete": frozenset({"kind", "answer"}),
    "clarify": frozenset({"kind", "question"}),
}
_MAX_KIND: Final = 1_000


def parse_proposal(raw: object) -> Proposal | Malformed:
    """Read one proposal from a model's raw output: a JSON text or an already decoded value.

    A missing field, a wrong type, an additional field (`approved`, `credential`, `command`, ...), a
    list of actions, or a value without canonical form is `Malformed`. Never raises.
    """
    try:
        value: Any = parse_json(raw) if isinstance(raw, str | bytes) else normal(raw)
    except NotCanonical as error:
        return Malformed("unreadable", error.problem)
    if not isinstance(value, dict):
        return Malformed("unreadable", "not one object")
    kind = value.get("kind")
    if not isinstance(kind, str):
        return Malformed("unreadable", "no kind")
    shown = kind[:_MAX_KIND]
    if kind not in _FIELDS:
        return Malformed(shown, "unknown kind")
    if value.keys() != _FIELDS[kind]:
        odd = sorted(value.keys() ^ _FIELDS[kind])
        return Malformed(shown, f"missing or additional fields: {', '.join(odd)[:200]}")
    match value:
        case {"kind": "tool", "tool": str(tool), "arguments": dict(arguments)}:
            return ToolProposal(tool, arguments)
        case {"kind": "complete", "answer": answer}:
            return CompletionClaim(answer)
        case {"kind": "clarify", "question": str(question)}:
            return Clarification(question)
    return Malformed(shown, "a field of the wrong type")
