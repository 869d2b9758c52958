"""What a fleet of the sweep does: kinds of tools, the ways in which their first write goes, and
what happens around them. One setting is one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from handrail.agent.tools import FOREVER

WAYS: Final = ("ok", "lost", "refused", "never", "late", "unclear")
#: What upholds "at most once" at the service, and how doubt is resolved.
KINDS: Final[dict[str, dict[str, Any]]] = {
    "key+query": {"key_valid_for_ms": FOREVER, "query": True},
    "key": {"key_valid_for_ms": FOREVER, "query": False},
    "query": {"key_valid_for_ms": 0, "query": True},
    "nothing": {"key_valid_for_ms": 0, "query": False},
    # A write with key and query that another such write undoes.
    "compensable": {"key_valid_for_ms": FOREVER, "query": True},
}
_PLAIN: Final = ("key+query", "key", "query", "nothing")

Ends = Callable[[str, str], set[str]]


def _run_ends(kind: str, way: str) -> set[str]:
    """Whoever can ask, or send the same key again, finishes without a person."""
    ends = {"completed", "failed"} if way == "refused" else {"completed"}
    return ends | {"handed_off"} if kind == "nothing" else ends


def _cancel_ends(kind: str, way: str) -> set[str]:
    """A process that dies before its wish is durable leaves a run that goes on. What took effect
    although the run was cancelled is undone, or a person's, as is what nobody can prove.
    """
    ends = {"completed", "cancelled"} | ({"failed"} if way == "refused" else set())
    return ends | {"compensated" if kind == "compensable" else "handed_off"}


def _undo_ends(kind: str, way: str) -> set[str]:
    """What is not undone, or not provably, is a person's; here the kind is that of the undoing
    tool.
    """
    ends = {"completed", "cancelled", "compensated"}
    return ends | {"handed_off"} if way == "refused" or kind == "nothing" else ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens around a read, a write, a second read and the verification of the claim.

    `about` names the acts that it adds to the others'. `flavour` names the workflow. `trouble` is
    what goes one way or another. `cancels`: a cancel is wished while this is in flight. `freezes`:
    the first worker that writes stands still for ever once its request has left. `drains`: the
    first worker that asks a model is told to stop. `pauses`: its tool is paused while the model is
    asked, until nothing else is to be done. `reports`: the provider reports what took effect.
    `locked`: the intent's lock is taken at first.
    """

    name: str
    says: str
    about: tuple[str, ...]
    ends: Ends = _run_ends
    flavour: str = "loop"
    runs: int = 1
    kinds: tuple[str, ...] = _PLAIN
    ways: tuple[str, ...] = WAYS
    trouble: str = "write"
    cancels: str = ""
    freezes: bool = False
    drains: bool = False
    pauses: bool = False
    reports: bool = False
    locked: bool = False
    approves: bool = True
    limits: Mapping[str, int] = field(default_factory=dict)


_DOUBT: Final = ("dispatch", "tool", "outcome", "wake", "query", "verdict")
_ONE: Final[dict[str, Any]] = {"kinds": ("key+query",), "ways": ("ok",)}

SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="run",
            says="a read, a write, a second read, completion",
            about=(*_DOUBT, "original"),
            kinds=tuple(KINDS),
        ),
        Scenario(
            name="orphan",
            says="the sender of the write stands still for ever",
            about=("wake", "query", "verdict"),
            kinds=tuple(KINDS),
            freezes=True,
        ),
        Scenario(
            name="cancel",
            says="a cancel is wished while the write is in flight",
            about=("cancel", "renew", "outcome", "verdict"),
            ends=_cancel_ends,
            kinds=tuple(KINDS),
            cancels="tool",
        ),
        Scenario(
            name="undo",
            says="the write of a cancelled run is undone, by a tool of each kind",
            about=("undo_plan", "undo_dispatch", "undo", "outcome", "wake", "query", "verdict"),
            ends=_undo_ends,
            flavour="undoable",
            trouble="undo",
            cancels="tool",
        ),
        Scenario(
            name="approval",
            says="the write is parked, approved and resumed",
            about=("issue_token", "approve", "commit_each", "dispatch"),
            flavour="agreed",
        ),
        Scenario(
            name="fixed",
            says="the stages are fixed: read, confirm, commit, verify",
            about=("approve", "commit_each", "dispatch", "outcome"),
            flavour="fixed",
        ),
        Scenario(
            name="rejection",
            says="the write is parked and refused",
            about=("reject",),
            ends=lambda kind, way: {"failed"},
            flavour="agreed",
            approves=False,
            **_ONE,
        ),
        Scenario(
            name="together",
            says="three runs in one worker",
            about=("claim_each", "commit_each"),
            runs=3,
            kinds=("key+query",),
            ways=("ok", "lost", "late"),
        ),
        Scenario(
            name="cancel-model",
            says="a cancel is wished while a model is asked",
            about=("cancel", "renew", "under_wish"),
            ends=lambda kind, way: {"completed", "cancelled"},
            cancels="model",
            **_ONE,
        ),
        Scenario(
            name="question",
            says="the model asks, and a person answers",
            about=("answer",),
            flavour="asking",
            **_ONE,
        ),
        Scenario(
            name="retry",
            says="the model fails once; the read has a limit of its own",
            about=("charge_more", "charge_tool"),
            flavour="retrying",
            limits={"lookup": 6},
            **_ONE,
        ),
        Scenario(
            name="shutdown",
            says="the worker is told to stop while a model is asked",
            about=("give_back",),
            drains=True,
            **_ONE,
        ),
        Scenario(
            name="pause",
            says="the tool is paused before the write, and later is not",
            about=("pause", "resume"),
            pauses=True,
            **_ONE,
        ),
        Scenario(
            name="report",
            says="the provider reports what was in doubt",
            about=("report",),
            reports=True,
            kinds=("key+query", "nothing"),
            ways=("lost",),
        ),
        Scenario(
            name="locked",
            says="the intent's lock is taken",
            about=("step_aside", "published"),
            locked=True,
            **_ONE,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A scenario with one kind of tool, whose first write goes one way."""

    scenario: Scenario
    kind: str
    way: str

    def __str__(self) -> str:
        return f"{self.scenario.name}/{self.kind}/{self.way}"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Read what `str` wrote."""
        name, kind, way = text.split("/")
        return cls(SCENARIOS[name], kind, way)

    @property
    def ends(self) -> set[str]:
        """The statuses in which a run of it may rest in the end."""
        return self.scenario.ends(self.kind, self.way)

    @property
    def workflow(self) -> str:
        """The workflow of its runs."""
        return f"{self.scenario.flavour}-{self.kind.replace('+', '-and-')}"


def settings() -> list[Setting]:
    """All settings."""
    return [
        Setting(scenario, kind, way)
        for scenario in SCENARIOS.values()
        for kind in scenario.kinds
        for way in scenario.ways
    ]
