"""The kinds of tool that take part, and how fast everything goes.

What a kind declares to the ledger (tests/chaos/app.py) and what the provider really does about it
(tests/chaos/provider.py) are both read from here, so that no tool lies by accident.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from handrail.agent.tools import FOREVER

TENANT: Final = "chaos"
READ: Final = "look"
#: What no trace may hold: it stands in arguments, and in what the model says to itself.
CANARY: Final = "canary-never-to-be-traced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of write. Two requests are two effects, unless the service knows the key again."""

    name: str
    side_effect: str
    guarantee: str
    key_valid_for_ms: int = 0  # for how long the service knows a key again
    queried: bool = False
    not_after: bool = False  # the service refuses a request that arrives too late
    blocking: bool = False  # its client blocks a thread
    confirmed: bool = False  # a person agrees to each call, in a fixed workflow
    undone_by: str = ""  # the kind that undoes it once its run is cancelled
    undoes: bool = False  # it is never proposed: the program undoes with it

    @property
    def may_be_handed_off(self) -> bool:
        """Whether a doubt about it may come to a person."""
        return not (self.queried and self.key_valid_for_ms)


KINDS: Final = (
    Kind(
        name="keyed-queried",
        side_effect="idempotent",
        guarantee="idempotency-key",
        key_valid_for_ms=FOREVER,
        queried=True,
    ),
    Kind(
        name="undoable",
        side_effect="compensable",
        guarantee="idempotency-key",
        key_valid_for_ms=FOREVER,
        queried=True,
        undone_by="undoing",
    ),
    Kind(
        name="undoing",
        side_effect="idempotent",
        guarantee="idempotency-key",
        key_valid_for_ms=FOREVER,
        queried=True,
        undoes=True,
    ),
    Kind(
        name="keyed",
        side_effect="idempotent",
        guarantee="idempotency-key",
        key_valid_for_ms=600_000,
    ),
    Kind(
        name="queried",
        side_effect="idempotent",
        guarantee="transaction",
        queried=True,
        blocking=True,
    ),
    Kind(
        name="dated",
        side_effect="idempotent",
        guarantee="not-after",
        not_after=True,
        queried=True,
    ),
    Kind(name="neither", side_effect="irreversible", guarantee="person", confirmed=True),
)
BY_NAME: Final[Mapping[str, Kind]] = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Pace:
    """How long everything takes. At 1 the settings are the product's defaults; the short version
    of the test goes faster, in the same proportions.
    """

    scale: float = 1.0

    @property
    def lease_ms(self) -> int:
        """How long a lease lasts."""
        return int(30_000 * self.scale)

    @property
    def max_stall_ms(self) -> int:
        """By how much a request may leave after its deadline, as declared."""
        return int(20_000 * self.scale)

    @property
    def settle_ms(self) -> int:
        """How long after that a write may still land."""
        return max(1_000, int(5_000 * self.scale))

    @property
    def call_ms(self) -> int:
        """A tool's time limit."""
        return max(1_000, int(3_000 * self.scale))

    @property
    def sweep_every_s(self) -> float:
        """How often a beat asks for a sweep."""
        return max(0.4, 2.0 * self.scale)

    def settings(self) -> dict[str, Any]:
        """The settings of the fleet that go with it; none where they are the defaults."""
        if self.scale == 1:
            return {}
        return {
            "lease_ms": self.lease_ms,
            "max_stall_ms": self.max_stall_ms,
            "sweep_every_s": self.sweep_every_s,
        }

    def environment(self) -> dict[str, str]:
        """How a worker process is told."""
        return {"CHAOS_SCALE": str(self.scale)}

    @classmethod
    def of_this_process(cls) -> Pace:
        """The pace that a worker process was told."""
        return cls(float(os.environ.get("CHAOS_SCALE", "1")))
