"""The step message: a hint that a run may be due. It grants nothing.

It carries ids, counts and instants, never text of a model or a tool, because text can destroy a
message on its way (typed envelopes, huge integers, deep nesting) or be read by whoever can read
the broker. The claim in the ledger decides; deadline and budget here are a snapshot for metrics
and early warnings, and may be old, wrong or forged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from handrail.errors import BadInput
from handrail.ledger.accept import DueStep
from handrail.tracing import TRACEPARENT_PATTERN

STEP_TASK: Final = "handrail.step"
STEPS_QUEUE: Final = "handrail.steps"
SWEEP_TASK: Final = "handrail.reconcile.sweep"
RECONCILE_QUEUE: Final = "handrail.reconcile"
MAX_MESSAGE_BYTES: Final = 16_384  # ours have a few hundred
RUN_ID_PATTERN: Final = r"^[A-Za-z0-9_-]{1,64}$"
_LARGEST: Final = 2**53 - 1  # the integers that every JSON reader keeps exact

Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Milliseconds = Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)]
BudgetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]


@dataclass(eq=False)
class BadMessage(BadInput):
    """A message that is not ours, or not whole. Drop it: the sweep publishes again what is due."""

    code: ClassVar[str] = "bad-message"
    problem: str

    def __str__(self) -> str:
        return f"not a step message: {self.problem}; it is dropped, the sweep repeats what is due"


class StepMessage(BaseModel):
    """One step of one run is due, as its sender saw it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: Annotated[str, Field(pattern=RUN_ID_PATTERN)]
    step: Count
    epoch: Count  # the run's epoch as the sender saw it: an older message claims nothing
    deadline_at: Count | None = None
    remaining_ms: Milliseconds | None = None  # at sending; negative: the deadline had passed
    budget: Annotated[dict[BudgetName, Milliseconds], Field(max_length=64)] = {}
    traceparent: Annotated[str | None, Field(pattern=TRACEPARENT_PATTERN)] = None
    version: Annotated[int, Field(ge=1, le=1)] = 1  # a newer one waits for a newer worker

    def to_json(self) -> str:
        """The message as compact JSON, ASCII."""
        return self.model_dump_json(exclude_none=True)

    @classmethod
    def from_json(cls, data: str | bytes | Mapping[str, object]) -> StepMessage:
        """Read a message from JSON text, or from a JSON object that was parsed already.

        Raises `BadMessage`, and nothing else, whatever comes in.
        """
        try:
            if isinstance(data, str | bytes):
                if len(data) > MAX_MESSAGE_BYTES:
                    raise BadMessage(f"longer than {MAX_MESSAGE_BYTES} bytes")
                return cls.model_validate_json(data)
            return cls.model_validate(data)
        except ValidationError as error:
            raise BadMessage(_problem(error)) from None
        except (ValueError, TypeError, RecursionError) as error:  # lone surrogates, for one
            raise BadMessage(type(error).__name__) from None


def message_of(due: DueStep) -> StepMessage:
    """Make the message of a due step."""
    return StepMessage(
        run_id=due.run_id,
        step=due.step,
        epoch=due.epoch,
        deadline_at=due.deadline_at,
        remaining_ms=due.remaining_ms,
        budget=due.budget,
        traceparent=due.traceparent,
    )


def _problem(error: ValidationError) -> str:
    """Say which field is wrong and how, without repeating anything that came in."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = first["loc"][0] if first["loc"] else "message"
    known = field in StepMessage.model_fields or field == "message"
    return f"{field if known else 'an unknown field'} ({first['type']})"
