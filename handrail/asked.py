"""What somebody asks for who enqueues a run, checked before anything is written.

Light: a web process that enqueues imports this and no agent code. What depends on the workflow, its
input and its budget, is checked by whoever knows the workflow.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from handrail.broker.message import RUN_ID_PATTERN
from handrail.canonical import Json, canonical, escaped
from handrail.errors import BadInput, HandrailError
from handrail.tracing import TRACEPARENT_PATTERN

MODES: Final = ("live", "shadow")
RUN_ID: Final = re.compile(RUN_ID_PATTERN)
_NAME: Final = re.compile(r"[A-Za-z0-9_.:@-]{1,128}\Z")
_MAX_GOAL: Final = 20_000
_MAX_DEDUPE_KEY: Final = 1_000  # it is indexed
_MAX_INPUT: Final = 256_000


@dataclass(eq=False)
class InvalidRun(BadInput):
    """A run cannot be enqueued as it was asked for; nothing was written."""

    code: ClassVar[str] = "invalid-run"
    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


@dataclass(eq=False)
class UnknownWorkflow(BadInput):
    """No workflow has this name here."""

    code: ClassVar[str] = "unknown-workflow"
    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        known = f"; known: {', '.join(self.known)}" if self.known else ""
        return (
            f"there is no workflow {self.name!r}: register it with fleet.workflow(...), and start a"
            f" worker that has it{known}"
        )


@runtime_checkable
class Subject(Protocol):
    """On whose behalf a run acts: a `handrail.Principal`, without importing it."""

    @property
    def subject(self) -> str:
        """Who it is."""
        ...

    @property
    def permissions(self) -> frozenset[str]:
        """What it may do."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for, checked; `input` is canonical text."""

    goal: str
    subject: str
    permissions: tuple[str, ...]
    tenant: str
    run_id: str
    dedupe_key: str | None
    traceparent: str | None
    mode: str
    input: str

    @property
    def principal(self) -> dict[str, Json]:
        """The principal as a run's row holds it."""
        return {"subject": self.subject, "permissions": [*self.permissions]}


def checked(
    *,
    goal: str,
    input: Any,
    principal: Subject | Mapping[str, Any] | str | None,
    tenant: str,
    dedupe_key: str | None,
    run_id: str | None,
    traceparent: str | None,
    mode: str,
) -> Asked:
    """Check what can be checked without the workflow. Raises `InvalidRun`."""
    if not isinstance(goal, str) or not goal.strip() or len(goal) > _MAX_GOAL:
        raise InvalidRun("goal", f"give a text of 1 to {_MAX_GOAL} characters")
    subject, permissions = _who(principal)
    for field, value in (("tenant", tenant), ("principal", subject)):
        if not isinstance(value, str) or not _NAME.match(value):
            raise InvalidRun(field, f"{value!r} is no name: letters, digits and _.:@- (1 to 128)")
    run_id = secrets.token_hex(16) if run_id is None else run_id
    if not isinstance(run_id, str) or not RUN_ID.fullmatch(run_id):
        raise InvalidRun("run_id", "give 1 to 64 letters, digits, '_' or '-'")
    if dedupe_key is not None and not (
        isinstance(dedupe_key, str) and 0 < len(escaped(dedupe_key)) <= _MAX_DEDUPE_KEY
    ):
        raise InvalidRun(
            "dedupe_key",
            f"give a text of 1 to {_MAX_DEDUPE_KEY} ASCII characters"
            " (one outside of ASCII counts as 6 or 12)",
        )
    if traceparent is not None and not (
        isinstance(traceparent, str) and re.fullmatch(TRACEPARENT_PATTERN, traceparent)
    ):
        raise InvalidRun("traceparent", "give it as W3C trace context says: 00-<trace>-<span>-01")
    if mode not in MODES:
        raise InvalidRun("mode", f"{mode!r} is none of: {', '.join(MODES)}")
    return Asked(
        goal=goal,
        subject=subject,
        permissions=permissions,
        tenant=tenant,
        run_id=run_id,
        dedupe_key=dedupe_key,
        traceparent=traceparent,
        mode=str(mode),
        input=_text(input),
    )


def _who(principal: Subject | Mapping[str, Any] | str | None) -> tuple[str, tuple[str, ...]]:
    if principal is None or isinstance(principal, str):
        return ("anonymous" if principal is None else principal), ()
    if isinstance(principal, Mapping):
        unknown = principal.keys() - {"subject", "permissions"}
        if unknown or "subject" not in principal:
            raise InvalidRun("principal", "give its subject, and permissions if it has any")
        subject, permissions = principal["subject"], principal.get("permissions", ())
    elif isinstance(principal, Subject):
        subject, permissions = principal.subject, principal.permissions
    else:
        raise InvalidRun("principal", "give a name, or a Principal")
    if not _are_texts(permissions):
        raise InvalidRun("principal", "its permissions must be a set of texts")
    return subject, tuple(sorted(set(permissions)))


def _are_texts(values: object) -> bool:
    return isinstance(values, frozenset | set | list | tuple) and all(
        isinstance(value, str) for value in values
    )


def _text(given: Any) -> str:
    if hasattr(given, "model_dump"):  # a pydantic model
        given = given.model_dump(mode="json")
    try:
        text = canonical(given)
    except HandrailError as error:
        raise InvalidRun("input", str(error)) from None
    if len(text) > _MAX_INPUT:
        raise InvalidRun("input", f"it is longer than {_MAX_INPUT} characters")
    return text
