"""Budgets: what a run may spend, what is left of it, and who is refused in which order.

Counts are charged before the call that they pay for and never return; a claim's reserved tool call
is settled once, downwards. Zero means none, never "unlimited". Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from handrail.agent.status import Reason
from handrail.errors import InvalidBudget, InvalidDefinition

MAX_COUNT: Final = 2**53  # fits every store, and no honest budget is larger
MAX_MS: Final = 2**52  # added to an instant it still fits


def _whole(name: str, value: object, *, least: int, most: int = MAX_COUNT) -> None:
    if type(value) is not int or value < least:
        raise InvalidBudget(name, value, f"a whole number of at least {least}")
    if value > most:
        raise InvalidBudget(name, value, f"a whole number of at most {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of one run. Every dimension has a value; none is unlimited.

    Counts are whole numbers of at least 0, `deadline_ms` is working time in milliseconds (waiting
    for a person does not use it), `expires_ms` the hard limit on the run's whole life, which
    nothing pauses; `cost_microusd` is millionths of a US dollar. `per_tool` bounds single tools
    within `tool_calls`.
    """

    steps: int = 16
    model_calls: int = 16
    tool_calls: int = 24
    tokens: int = 200_000
    cost_microusd: int = 1_000_000
    output_bytes: int = 1_000_000
    deadline_ms: int = 120_000
    expires_ms: int = 7 * 24 * 3_600_000
    concurrency: int = 1
    per_tool: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name != "per_tool":
                most = MAX_MS if item.name.endswith("_ms") else MAX_COUNT
                _whole(item.name, getattr(self, item.name), least=0, most=most)
        if not isinstance(self.per_tool, Mapping):
            raise InvalidBudget("per_tool", self.per_tool, "a mapping from tool name to a count")
        for tool, count in self.per_tool.items():
            _whole(f"per_tool.{tool}", count, least=0)
        object.__setattr__(self, "per_tool", MappingProxyType(dict(self.per_tool)))

    def to_json(self) -> dict[str, Any]:
        """Return the limits as a JSON object."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "per_tool"} | {
            "per_tool": dict(self.per_tool)
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Budget:
        """Read limits that `to_json` wrote; unknown names and bad values raise `InvalidBudget`."""
        return cls().altered(value)

    def altered(self, changes: Mapping[str, Any]) -> Budget:
        """Return these limits with some replaced; an unknown name or a bad value raises
        `InvalidBudget`.
        """
        names = {f.name for f in fields(self)}
        for name, value in changes.items():
            if name not in names:
                raise InvalidBudget(name, value, f"one of {', '.join(sorted(names))}")
        return replace(self, **changes)

    def raised_over(self, other: Budget) -> tuple[str, ...]:
        """Name the dimensions in which these limits exceed `other`.

        A tool without a limit of its own is bounded by `tool_calls`: to drop the limit raises it.
        """
        names = (f.name for f in fields(self) if f.name != "per_tool")
        raised = [name for name in names if getattr(self, name) > getattr(other, name)]
        tools = dict.fromkeys([*self.per_tool, *other.per_tool])
        raised += [f"per_tool.{t}" for t in tools if self.tool_bound(t) > other.tool_bound(t)]
        return tuple(raised)

    def tool_bound(self, tool: str) -> int:
        """Return how often one tool may be called at most."""
        return min(self.tool_calls, self.per_tool.get(tool, self.tool_calls))


#: Default limits by type of task: a question is not a code migration.
TASK_TYPES: Final[Mapping[str, Budget]] = MappingProxyType(
    {
        "general": Budget(),
        "read-only-question": Budget(
            steps=8,
            model_calls=8,
            tool_calls=8,
            tokens=60_000,
            cost_microusd=200_000,
            output_bytes=200_000,
            deadline_ms=60_000,
        ),
        "code-migration": Budget(
            steps=200,
            model_calls=240,
            tool_calls=600,
            tokens=4_000_000,
            cost_microusd=40_000_000,
            output_bytes=20_000_000,
            deadline_ms=4 * 3_600_000,
            concurrency=4,
        ),
        "refund": Budget(steps=12, model_calls=12, tool_calls=24, deadline_ms=120_000),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Time limits of one call, in milliseconds, at least 1. They bound a call and are no
    budgets.
    """

    model_ms: int = 30_000
    tool_ms: int = 10_000

    def __post_init__(self) -> None:
        _whole("model_ms", self.model_ms, least=1)
        _whole("tool_ms", self.tool_ms, least=1)

    def to_json(self) -> dict[str, int]:
        """Return the limits as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLeft:
    """What is left of a budget.

    `tool_calls_reserved` is 0 or 1: paid by the claim, not yet used. `compensations_reserved` is
    what is kept, while a write is in flight, for the call that may have to undo it.
    """

    steps: int
    model_calls: int
    tool_calls: int
    tokens: int
    cost_microusd: int
    output_bytes: int
    tool_calls_reserved: int = 0
    compensations_reserved: int = 0
    per_tool: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def full(cls, budget: Budget) -> BudgetLeft:
        """Return a budget of which nothing was used yet."""
        return cls(
            steps=budget.steps,
            model_calls=budget.model_calls,
            tool_calls=budget.tool_calls,
            tokens=budget.tokens,
            cost_microusd=budget.cost_microusd,
            output_bytes=budget.output_bytes,
            per_tool=budget.per_tool,
        )

    @property
    def tool_calls_available(self) -> int:
        """How many tool calls may still be started, the reserved one included."""
        return self.tool_calls + self.tool_calls_reserved

    @property
    def tool_calls_unused(self) -> int:
        """How many tool calls were not used so far, whatever they are kept for."""
        return self.tool_calls_available + self.compensations_reserved

    def may_call(self, tool: str, calls: int = 1) -> bool:
        """Whether a call of this tool is left, of its own limit, and `calls` in all."""
        return self.tool_calls_available >= calls and self.per_tool.get(tool, 1) > 0

    def tool_call_used(self, tool: str) -> BudgetLeft:
        """Charge one tool call: the reserved one if there is one."""
        return self._counted(tool).call_used()

    def call_used(self) -> BudgetLeft:
        """Charge one call that counts against no tool's own limit."""
        if self.tool_calls_reserved:
            return replace(self, tool_calls_reserved=0)
        return replace(self, tool_calls=self.tool_calls - 1)

    def with_compensation(self, calls: int) -> BudgetLeft:
        """Keep calls for undoing what is about to be written."""
        return replace(self, tool_calls=self.tool_calls - calls, compensations_reserved=calls)

    def without_compensation(self) -> BudgetLeft:
        """Give back what was kept: there is nothing to undo."""
        if not self.compensations_reserved:
            return self
        calls = self.tool_calls + self.compensations_reserved
        return replace(self, tool_calls=calls, compensations_reserved=0)

    def may_compensate(self, tool: str, calls: int = 1) -> bool:
        """Whether a call of this undoing tool is left, of its own limit, and `calls` in all, those
        that are kept included.
        """
        unused = self.tool_calls + self.compensations_reserved
        return unused >= calls and self.per_tool.get(tool, 1) > 0

    def compensation_used(self, tool: str, calls: int = 1) -> BudgetLeft:
        """Charge one undoing call, `calls` in all: what was kept first, then what is left."""
        kept = min(calls, self.compensations_reserved)
        return replace(
            self._counted(tool),
            tool_calls=self.tool_calls - (calls - kept),
            compensations_reserved=self.compensations_reserved - kept,
        )

    def _counted(self, tool: str) -> BudgetLeft:
        if tool not in self.per_tool:
            return self
        return replace(self, per_tool={**self.per_tool, tool: self.per_tool[tool] - 1})

    def settled(self) -> BudgetLeft:
        """Give back the tool call that was reserved and not started."""
        return replace(
            self, tool_calls=self.tool_calls + self.tool_calls_reserved, tool_calls_reserved=0
        )

    def output_used(self, output_bytes: int) -> BudgetLeft:
        """Take off the output that a call has produced, as far as it was read."""
        return replace(self, output_bytes=max(0, self.output_bytes - output_bytes))

    def snapshot(self) -> dict[str, int]:
        """Return what is left as a flat JSON object, for traces, messages and observations."""
        return {
            "steps": self.steps,
            "model_calls": self.model_calls,
            "tool_calls": self.tool_calls_available,
            "tokens": self.tokens,
            "cost_microusd": self.cost_microusd,
            "output_bytes": self.output_bytes,
        } | {f"tool_calls.{tool}": left for tool, left in sorted(self.per_tool.items())}


class Phase(StrEnum):
    """What the next claim of a run has to pay for."""

    DECIDE = "decide"  # a step, a model call, and a reserved tool call if one is left
    READ = "read"  # a fixed stage's read: one tool call
    WRITE = "write"  # a checkpointed write: an attempt; the dispatch pays for the call
    RESUME = "resume"  # a verification, or an approval that was given: an attempt


def charge(
    left: BudgetLeft, phase: Phase, *, cancelled: bool, remaining_ms: int
) -> BudgetLeft | Reason:
    """Pay for a claim, or name what refuses it; a refused claim charges nothing.

    The order is fixed: cancellation, steps, deadline, model calls, then the amounts that a model
    call uses. `remaining_ms` is the time left of the run's deadline. The ledger's claim statement
    says the same in SQL, and a test compares the two.
    """
    if cancelled:
        return Reason.CANCELLED
    if phase is Phase.DECIDE and left.steps <= 0:
        return Reason.STEP_BUDGET_EXHAUSTED
    if remaining_ms <= 0:
        return Reason.DEADLINE_EXHAUSTED
    if phase is Phase.DECIDE:
        if left.model_calls <= 0:
            return Reason.MODEL_CALL_BUDGET_EXHAUSTED
        if left.tokens <= 0:
            return Reason.TOKEN_BUDGET_EXHAUSTED
        if left.cost_microusd <= 0:
            return Reason.COST_BUDGET_EXHAUSTED
        if left.output_bytes <= 0:
            return Reason.OUTPUT_BUDGET_EXHAUSTED
        reserved = min(1, left.tool_calls)
        return replace(
            left,
            steps=left.steps - 1,
            model_calls=left.model_calls - 1,
            tool_calls=left.tool_calls - reserved,
            tool_calls_reserved=reserved,
        )
    if phase is Phase.READ:
        if left.tool_calls <= 0:
            return Reason.TOOL_CALL_BUDGET_EXHAUSTED
        return replace(left, tool_calls=left.tool_calls - 1, tool_calls_reserved=1)
    return left


def charge_more(
    left: BudgetLeft,
    *,
    remaining_ms: int,
    model_calls: int = 0,
    tool_calls: int = 0,
    cost_microusd: int = 0,
) -> BudgetLeft | Reason:
    """Pay for one more call under a claim that is held, or name what refuses it.

    A retry of a model call costs a model call and no step, one of a read a tool call, which is
    reserved for it as a claim's is; a verification that has a price costs that price alone.
    """
    if remaining_ms <= 0:
        return Reason.DEADLINE_EXHAUSTED
    if left.model_calls < model_calls:
        return Reason.MODEL_CALL_BUDGET_EXHAUSTED
    if left.tool_calls < tool_calls:
        return Reason.TOOL_CALL_BUDGET_EXHAUSTED
    if left.cost_microusd < cost_microusd:
        return Reason.COST_BUDGET_EXHAUSTED
    return replace(
        left,
        model_calls=left.model_calls - model_calls,
        tool_calls=left.tool_calls - tool_calls,
        tool_calls_reserved=left.tool_calls_reserved + tool_calls,
        cost_microusd=left.cost_microusd - cost_microusd,
    )


class BudgetCode(StrEnum):
    """The codes that callers outside know a spent budget by."""

    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    MODEL_BUDGET_EXHAUSTED = "MODEL_BUDGET_EXHAUSTED"
    TOOL_BUDGET_EXHAUSTED = "TOOL_BUDGET_EXHAUSTED"


CODE_OF: Final[Mapping[Reason, BudgetCode]] = MappingProxyType(
    {
        Reason.DEADLINE_EXHAUSTED: BudgetCode.DEADLINE_EXCEEDED,
        Reason.MODEL_CALL_BUDGET_EXHAUSTED: BudgetCode.MODEL_BUDGET_EXHAUSTED,
        Reason.TOOL_CALL_BUDGET_EXHAUSTED: BudgetCode.TOOL_BUDGET_EXHAUSTED,
    }
)


def call_limit(own_ms: int, remaining_ms: int) -> tuple[int, bool]:
    """Return min(own limit, time left) in milliseconds, and whether the run's deadline is what
    binds.

    Equal counts as bound. No layer ever starts a full time-out anew.
    """
    return min(own_ms, remaining_ms), remaining_ms <= own_ms


def worst_case_ms(
    *,
    model_calls: int,
    model_ms: int,
    pauses: int = 0,
    pause_ms: int = 0,
    tool_calls: int = 0,
    tool_ms: int = 0,
    retries_ms: int = 0,
) -> int:
    """Return the longest time that the calls, pauses and retries can take one after the other, in
    milliseconds.
    """
    return model_calls * model_ms + pauses * pause_ms + tool_calls * tool_ms + retries_ms


def must_answer_within(name: str, *, worst_ms: int, required_ms: int) -> None:
    """Refuse a definition whose worst case exceeds the answer time that it promises."""
    if worst_ms > required_ms:
        raise InvalidDefinition(
            name,
            f"the worst case is {worst_ms / 1000:g} s and the required answer time"
            f" {required_ms / 1000:g} s: allow fewer calls, shorter limits or more time",
        )
