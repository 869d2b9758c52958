"""What passes between a run's machine and its stages: views, events, commands, moves.

A stage is handed a view and an event and answers with a move; it does no I/O and reads no clock.
Big values live in rows of their own; a frame is one small JSON object. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

from handrail.agent.approvals import ApprovalTerms
from handrail.agent.budget import BudgetLeft, CallLimits
from handrail.agent.capability import Capability, resource_of
from handrail.agent.status import Reason
from handrail.agent.tools import RunFacts, Tool, ToolContract, Validated
from handrail.agent.trace import TraceEvent
from handrail.canonical import Json, digest, dumps

Frame: TypeAlias = dict[str, Json]

#: How many of the latest observations a step is shown; the rest stay in the ledger.
OBSERVATION_WINDOW: Final = 32


@dataclass(frozen=True, slots=True)
class Observation:
    """One fact that entered the public state: what the model is shown of a tool's result."""

    source: str  # the tool, or what else said it
    text: str
    digest: str

    @classmethod
    def of(cls, source: str, text: str, stable: str | None = None) -> Observation:
        """Make an observation; `stable` is the text without volatile fields, by which it is
        compared.
        """
        return cls(source, text, digest(text if stable is None else stable))


@dataclass(frozen=True, slots=True)
class View:
    """What a stage may know when it decides. Times are milliseconds; ids and chance are handed
    in.
    """

    run: RunFacts
    budget: BudgetLeft
    limits: CallLimits
    remaining_ms: int
    state_version: int
    step: int
    cancelled: bool  # a wish to cancel is visible
    observations: tuple[Observation, ...]  # a window, oldest first
    observation_count: int
    model_calls: int = 0  # charged so far, this round's included
    deadline_at: int | None = (
        None  # the run's deadline by the ledger's clock, for the commands made now
    )
    random: float = 0.5

    @property
    def outputs(self) -> Mapping[str, Json]:
        """The outputs of the stages that have finished, by name."""
        return self.run.outputs


@dataclass(frozen=True, slots=True)
class Checked:
    """A verification's finding: whether it holds, harmless facts for the trace, what was looked
    at.
    """

    ok: bool
    detail: Mapping[str, Json] = field(default_factory=dict)
    evidence: str | None = None


# ---- events: what a stage is told ----------------------------------------------------------------


class End(StrEnum):
    """How a call ended; what cut it off decides, not which error happens to arrive first."""

    RETURNED = "returned"
    RAISED = "raised"
    TIMED_OUT = "timed-out"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Succeeded:
    """A tool's result, already within its output contract."""

    value: Json
    text: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The tool says that nothing happened, and why. `changed`: what the call rests on is no longer
    as it was planned.
    """

    reason: str
    retryable: bool = False
    changed: bool = False


@dataclass(frozen=True, slots=True)
class Doubtful:
    """The tool itself does not know whether anything happened."""

    reason: str


Reply: TypeAlias = Succeeded | Refused | Doubtful


@dataclass(frozen=True, slots=True)
class Proposed:
    """A model call has ended. `raw` is untrusted; `bound`: the run's deadline was the limit."""

    end: End
    raw: object = None
    bound: bool = False
    overflow: bool = False  # the output budget cut it off
    retryable: bool = False  # it failed for a reason that may pass
    attempt: int = 0  # how many attempts of this round came before
    output_bytes: int = 0  # produced by this attempt, as far as it was read


@dataclass(frozen=True, slots=True)
class Result:
    """A tool call has ended. `known`: the same observation is already in the state.

    For a write, `settled` says whether the ledger holds a proof (`applied` or `absent`), and
    `evidence` refers to it. For a read, `retryable` and `attempt` are as in `Proposed`.
    """

    end: End
    reply: Reply | None = None
    bound: bool = False
    known: bool = False
    settled: bool = True
    evidence: str | None = None
    retryable: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verification has ended. `detail` goes to the trace, `evidence` refers to what was
    looked at; `retryable` and `attempt` are as in `Proposed`.
    """

    end: End
    ok: bool = False
    detail: Mapping[str, Json] = field(default_factory=dict)
    evidence: str | None = None
    bound: bool = False
    retryable: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class ChildDone:
    """The child stage that was entered has finished with this output; `back_to` as in `Finish`."""

    child: str
    output: Json
    back_to: str | None = None


@dataclass(frozen=True, slots=True)
class Approved:
    """People agreed to the exact action that was parked: as many as it takes."""

    approval_id: str
    approvers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """A person answered the question that was asked."""

    text: str
    author: str
    known: bool = False


@dataclass(frozen=True, slots=True)
class Resolved:
    """Doubt about a write was resolved as applied, with the recorded result."""

    value: Json
    text: str
    evidence: str
    known: bool = False


Event: TypeAlias = Proposed | Result | Verdict | ChildDone | Approved | Answered | Resolved


# ---- commands: what the program does next --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskModel:
    """Ask the named model for a proposal; these are the tools that it may choose from.

    With `attempt` > 0 it is a retry within the round: wait `after_ms`, pay for one more model call,
    ask again.
    """

    model: str
    tools: tuple[str, ...]
    attempt: int = 0
    after_ms: int = 0


@dataclass(frozen=True, slots=True)
class InvokeTool:
    """An executable command: what the program made of a proposal after all gates.

    Immutable and bound: arguments validated and in normal form, capability (which subject may have
    which tool called with what, until when), intent key (of a write), state version. `fixed`:
    chosen by the program. `attempt` and `after_ms` are those of a retry of a read, see `AskModel`.
    """

    tool: str
    contract_version: str
    arguments: Mapping[str, Json]
    arguments_hash: str
    state_version: int
    capability: Capability
    timeout_ms: int
    deadline_at: int | None = None
    intent_key: str | None = None
    approval: bool = False  # dispatch must consume an approval of exactly this action
    fixed: bool = False
    attempt: int = 0
    after_ms: int = 0

    def until(self, deadline_at: int | None) -> InvokeTool:
        """The same command under the deadline that its run has by now.

        Waiting for a person, or for a pause to end, moves it.
        """
        if deadline_at == self.deadline_at:
            return self
        capability = replace(self.capability, expires_at=deadline_at)
        return replace(self, deadline_at=deadline_at, capability=capability)

    def unusable(self, *, subject: str, state_version: int, now: int) -> tuple[Reason, str] | None:
        """Say why this command may not be executed, with the reason of the stop that follows; None
        where it may.
        """
        if self.state_version != state_version:
            return Reason.INVALID_PROPOSAL, "state moved on"
        lacking = self.capability.lacks(
            subject=subject,
            tool=self.tool,
            arguments=self.arguments,
            intent_key=self.intent_key,
            now=now,
        )
        return None if lacking is None else (Reason.PERMISSION_DENIED, lacking)


@dataclass(frozen=True, slots=True)
class Verify:
    """Check a claim or a postcondition independently; the shell finds the check at the stage's
    path and pays its price first. `attempt` and `after_ms` are those of a retry, see `AskModel`.

    `before_write`: it is the stage's precondition, after which the same claim goes on to the write.
    """

    claim: Json
    timeout_ms: int
    cost_microusd: int = 0
    attempt: int = 0
    after_ms: int = 0
    before_write: bool = False


class ParkKind(StrEnum):
    """What a parked run waits for."""

    APPROVAL = "approval"
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class Park:
    """Wait for a person. An approval is bound to `action`, by people as `terms` say; a question is
    text.
    """

    kind: ParkKind
    action: InvokeTool | None = None
    question: str = ""
    expires_ms: int = 24 * 3_600_000
    terms: ApprovalTerms | None = None

    @classmethod
    def for_consent(
        cls, contract: ToolContract, action: InvokeTool, *, expires_ms: int | None = None
    ) -> Park:
        """Wait for consent to exactly this call."""
        park = cls(ParkKind.APPROVAL, action, terms=ApprovalTerms.of(contract, action.arguments))
        return park if expires_ms is None else replace(park, expires_ms=expires_ms)


@dataclass(frozen=True, slots=True)
class Enter:
    """Enter a child stage of the static tree."""

    child: str


@dataclass(frozen=True, slots=True)
class Finish:
    """This stage is done; its output goes to the parent and is recorded.

    `fact`: the output is part of the public state, so that the state version moves with it.
    `back_to`: it could not be done as planned, and the run goes on at this earlier sibling.
    """

    output: Json
    fact: bool = True
    back_to: str | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """The run stops, or rests with a person. `detail` explains; `pending` is what was about to
    be done.
    """

    reason: Reason
    detail: Mapping[str, Json] = field(default_factory=dict)
    answer: Json = None


Command: TypeAlias = AskModel | InvokeTool | Verify | Park | Enter | Finish | Stop


@dataclass(frozen=True, slots=True)
class Move:
    """A stage's answer. `observation` enters the state unless `known`; `round_done` counts a
    round.
    """

    frame: Frame
    command: Command
    events: tuple[TraceEvent, ...] = ()
    observation: Observation | None = None
    round_done: bool = False


class Stage(Protocol):
    """One orchestration pattern. `name` is its place in the tree; `children` is the static tree
    below.
    """

    @property
    def name(self) -> str: ...
    @property
    def children(self) -> Mapping[str, Stage]: ...
    @property
    def tools(self) -> tuple[Tool, ...]: ...
    def start(self, view: View) -> Move: ...
    def on(self, frame: Frame, event: Event, view: View) -> Move: ...


# ---- what stages share ---------------------------------------------------------------------------

_NO_CHILDREN: Final[Mapping[str, Stage]] = MappingProxyType({})


class Leaf(ABC):
    """A stage without stages below it; it calls no tool unless it says which."""

    __slots__ = ()
    name: str

    @property
    def children(self) -> Mapping[str, Stage]:
        """No stages below."""
        return _NO_CHILDREN

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that this stage can call."""
        return ()

    @abstractmethod
    def start(self, view: View) -> Move:
        """Begin."""

    @abstractmethod
    def on(self, frame: Frame, event: Event, view: View) -> Move:
        """Go on after an event."""


@dataclass(frozen=True, slots=True)
class Action:
    """A call that a program has decided on: a tool and its arguments, not yet checked."""

    tool: Tool
    arguments: Mapping[str, Json] = field(default_factory=dict)


def executable(
    tool: Tool, checked: Validated, view: View, *, approval: bool, fixed: bool
) -> InvokeTool:
    """Make the executable command of a call that has passed every gate."""
    contract = tool.contract
    intent_key = contract.intent_of(checked.model, view.run)
    return InvokeTool(
        tool=contract.name,
        contract_version=contract.version,
        arguments=MappingProxyType(checked.json),
        arguments_hash=arguments_hash(contract.name, checked.json),
        state_version=view.state_version,
        capability=Capability(
            view.run.principal.subject,
            contract.name,
            resource_of(contract.name, checked.json, intent_key),
            view.deadline_at,
        ),
        timeout_ms=min(contract.timeout_ms, view.limits.tool_ms),
        deadline_at=view.deadline_at,
        intent_key=intent_key,
        approval=approval,
        fixed=fixed,
    )


def arguments_hash(tool: str, arguments: Json) -> str:
    """Hash what is sent to a tool; key order does not matter."""
    return digest("arguments", tool, dumps(arguments))
