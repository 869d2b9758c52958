"""Errors of the core, grouped by what the caller does next. What we expect is a value, not an
error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class HandrailError(Exception):
    """Base of every error that Handrail raises; `code` is stable and kebab-case."""

    code: ClassVar[str] = "handrail-error"


class BadInput(HandrailError):
    """The caller handed in something that cannot be accepted; nothing was written."""

    code: ClassVar[str] = "bad-input"


class InvariantBroken(HandrailError):
    """A promise of the program itself does not hold: stop this run and call a person."""

    code: ClassVar[str] = "invariant-broken"


class TryLater(HandrailError):
    """A part that we depend on is away; nothing is lost, ask again."""

    code: ClassVar[str] = "try-later"


@dataclass(eq=False)  # fields for machines; passed by position, so that pickle can rebuild it
class IllegalTransition(InvariantBroken):
    """A run was asked to make a move that its transition table does not hold."""

    code: ClassVar[str] = "illegal-transition"
    run_id: str
    status: str
    event: str

    def __str__(self) -> str:
        return f"run {self.run_id}: no move for {self.event!r} in status {self.status!r}"


@dataclass(eq=False)
class InvalidBudget(BadInput):
    """A budget or time limit is negative, fractional, missing or unknown."""

    code: ClassVar[str] = "invalid-budget"
    name: str
    value: object
    wanted: str

    def __str__(self) -> str:
        return f"budget {self.name!r} is {self.value!r}: give {self.wanted}"


@dataclass(eq=False)
class InvalidDefinition(BadInput):
    """A tool or workflow definition lacks something; the message names what."""

    code: ClassVar[str] = "invalid-definition"
    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


@dataclass(eq=False)
class NotCanonical(BadInput):
    """A value has no canonical form: not a JSON value, not finite, or nested too deeply."""

    code: ClassVar[str] = "not-canonical"
    problem: str

    def __str__(self) -> str:
        return f"no canonical form: {self.problem}"


@dataclass(eq=False)
class ToolRefused(Exception):
    """A tool raises it to say that nothing happened, and why: definite proof of its own attempt.

    `retryable`: the same call may succeed later. `changed`: what it rests on is no longer as it was
    planned (a price, an order's version), so that the plan has to be made again.
    """

    reason: str
    retryable: bool = False
    changed: bool = False

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class ToolUnclear(Exception):
    """A tool raises it to say that it does not know whether anything happened."""

    reason: str

    def __str__(self) -> str:
        return self.reason
