"""A workflow: a registered tree of stages with limits; the root runs its stages one after the
other.

A definition that lacks something is refused when it is made, with a message that names what. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel

from handrail.agent.budget import (
    TASK_TYPES,
    Budget,
    CallLimits,
    must_answer_within,
    worst_case_ms,
)
from handrail.agent.fixed import Check, Commit, Confirm, Read, Verify
from handrail.agent.loop import AgentLoop
from handrail.agent.stage import ChildDone, Enter, Event, Frame, Move, Stage, Stop, View
from handrail.agent.status import Reason
from handrail.agent.tools import RunFacts, Tool, is_model, must_be_functions
from handrail.canonical import Json, normal
from handrail.errors import InvalidDefinition

__all__ = ["AgentLoop", "Check", "Commit", "Confirm", "Read", "Verify", "Workflow"]

MAX_STAGES = 64
_VERSION: Final = re.compile(r"[A-Za-z0-9_.+-]{1,64}")
_WORDS: Final = "1 to 64 letters, digits, '.', '_', '+' or '-'"


def _is_name(name: str) -> bool:
    return 0 < len(name) <= 64 and name.replace("-", "_").isidentifier()


def _is_stage(value: object) -> bool:
    able = all(callable(getattr(value, act, None)) for act in ("start", "on"))
    return able and isinstance(getattr(value, "name", None), str)


#: What a workflow's fields hold: (field, check, words for it). The version stands in the run's row
#: and in `name@version`.
_OF_TYPE: Final[tuple[tuple[str, Callable[[Any], bool], str], ...]] = (
    ("version", lambda value: isinstance(value, str) and bool(_VERSION.fullmatch(value)), _WORDS),
    ("task_type", lambda value: isinstance(value, str), "a text"),
    (
        "stages",
        lambda value: isinstance(value, list | tuple) and all(map(_is_stage, value)),
        "a list of stages",
    ),
    ("budget", lambda value: value is None or isinstance(value, Budget), "a Budget"),
    ("limits", lambda value: isinstance(value, CallLimits), "CallLimits"),
    ("input", lambda value: value is None or is_model(value), "a pydantic model"),
    (
        "answer_within_ms",
        lambda value: value is None or (type(value) is int and value >= 0),
        "a whole number of at least 0",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """One kind of run. `answer(run)` makes the answer when the last stage has finished.

    `budget` (default: that of `task_type`) and `limits` apply to every run; a run may lower them,
    and raise them only with the permission `budget:raise`. `answer_within_ms` is the answer time
    that the definition promises: a worst case beyond it is refused. That is every model call at its
    limit, between any two the longest pause that a loop's retry policy allows, and every retry of
    a tool or a check with its pause; else tools take their time from the same deadline.
    """

    name: str
    stages: Sequence[Stage]
    version: str = "1"
    task_type: str = "general"
    budget: Budget | None = None
    limits: CallLimits = field(default_factory=CallLimits)
    input: type[BaseModel] | None = None
    answer: Callable[[RunFacts], Json] | None = None
    answer_within_ms: int | None = None
    children: Mapping[str, Stage] = field(init=False, repr=False, compare=False)  # in order
    _tools: Mapping[str, Tool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        title = f"workflow {self.name!r}"
        name: object = self.name
        if not isinstance(name, str) or not _is_name(name):
            raise InvalidDefinition(title, "name it with letters, digits, '-' and '_'")
        for field_name, is_right, wanted in _OF_TYPE:
            if not is_right(getattr(self, field_name)):
                raise InvalidDefinition(title, f"{field_name} must be {wanted}")
        must_be_functions(title, answer=self.answer)
        if self.task_type not in TASK_TYPES:
            known = ", ".join(sorted(TASK_TYPES))
            raise InvalidDefinition(title, f"task_type {self.task_type!r} is none of {known}")
        if not 1 <= len(self.stages) <= MAX_STAGES:
            raise InvalidDefinition(title, f"give it 1 to {MAX_STAGES} stages")
        names = [stage.name for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise InvalidDefinition(title, f"two stages are named {name!r}")
            if not name.isidentifier():
                raise InvalidDefinition(title, f"stage name {name!r} is no identifier")
        # What every step looks up is looked up here: a definition never changes.
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(
            self, "children", MappingProxyType(dict(zip(names, self.stages, strict=True)))
        )
        object.__setattr__(self, "_tools", self._tools_by_name(title))
        self._check_confirmations(title)
        self._check_replanning(title)
        if self.answer_within_ms is not None:
            must_answer_within(
                title, worst_ms=self.worst_case_ms, required_ms=self.answer_within_ms
            )

    def _tools_by_name(self, title: str) -> Mapping[str, Tool]:
        found: dict[str, Tool] = {}
        for tool in self.tools:
            if found.setdefault(tool.name, tool) != tool:
                raise InvalidDefinition(title, f"two different tools are named {tool.name!r}")
        return MappingProxyType(found)

    def _check_confirmations(self, title: str) -> None:
        confirmed: set[Any] = set()
        for stage in self.stages:
            if isinstance(stage, Confirm):
                confirmed.add(stage.action)
                continue
            if not isinstance(stage, Commit) or not stage.tool.contract.needs_approval:
                continue
            if stage.action not in confirmed:
                raise InvalidDefinition(
                    title,
                    f"stage {stage.name!r} commits {stage.tool.name!r}, which needs approval:"
                    " put Confirm(..., action=<the same function>) before it",
                )

    def _check_replanning(self, title: str) -> None:
        """A way back leads to an earlier stage, never past the write's own confirmation, and never
        past another write.
        """
        names = [stage.name for stage in self.stages]
        for number, stage in enumerate(self.stages):
            if not isinstance(stage, Commit) or stage.replan is None:
                continue
            if stage.replan not in names[:number]:
                problem = f"replan names {stage.replan!r}, which is no stage before it"
                raise InvalidDefinition(title, f"stage {stage.name!r}: {problem}")
            between = self.stages[names.index(stage.replan) : number]
            written = [each.name for each in between if isinstance(each, Commit)]
            if written:
                raise InvalidDefinition(
                    title,
                    f"stage {stage.name!r} goes back to {stage.replan!r}, past {written[-1]!r},"
                    " which has written: let replan name a stage after that",
                )
            asked = [
                each.name
                for each in self.stages[:number]
                if isinstance(each, Confirm) and each.action == stage.action
            ]
            if asked and asked[-1] not in [each.name for each in between]:
                raise InvalidDefinition(
                    title,
                    f"stage {stage.name!r} goes back to {stage.replan!r}, past {asked[-1]!r}: let"
                    " replan name a stage before that, so that the new plan is confirmed, too",
                )

    @property
    def default_budget(self) -> Budget:
        """The limits of a run that names none of its own."""
        return self.budget if self.budget is not None else TASK_TYPES[self.task_type]

    @property
    def worst_case_ms(self) -> int:
        """How long the model calls of a run, the pauses between them and all retries can take, in
        milliseconds.
        """
        calls = self.default_budget.model_calls
        retries = [s.retry for s in self.walk() if isinstance(s, AgentLoop) and s.retry]
        return worst_case_ms(
            model_calls=calls,
            model_ms=self.limits.model_ms,
            pauses=max(0, calls - 1),
            pause_ms=max((retry.max_pause_ms for retry in retries), default=0),
            retries_ms=self._retries_ms(),
        )

    def _retries_ms(self) -> int:
        """What the retries of tools and checks can add: as many as the tool calls allow."""
        budget, tool_ms = self.default_budget, self.limits.tool_ms
        tools = max(
            (
                retry.worst_ms(
                    min(tool.contract.timeout_ms, tool_ms), calls=budget.tool_bound(tool.name)
                )
                for tool in self.tools
                if (retry := tool.contract.retries)
            ),
            default=0,
        )
        stages = [*self.walk()]
        checks = [s.retry for s in stages if isinstance(s, Verify) and s.retry]
        commits = [s for s in stages if isinstance(s, Commit)]
        checks += [s.precondition_retry for s in commits if s.precondition_retry]
        plans = 1 + sum(s.replans for s in commits if s.replan is not None)
        once = sum(retry.worst_ms(tool_ms, calls=retry.attempts) for retry in checks)
        return tools + plans * once

    @property
    def tools(self) -> tuple[Tool, ...]:
        """All tools that any stage can call, and those that undo what they have written."""
        called = tuple(tool for stage in self.walk() for tool in stage.tools)
        return called + tuple(tool.compensation.tool for tool in called if tool.compensation)

    def walk(self) -> Iterator[Stage]:
        """Go over all stages below the root, depth first."""

        def below(stage: Stage) -> Iterator[Stage]:
            yield stage
            for child in stage.children.values():
                yield from below(child)

        for stage in self.stages:
            yield from below(stage)

    def stage_at(self, path: Sequence[str]) -> Stage:
        """Return the stage at a path of names below the root; `InvalidDefinition` where there
        is none.
        """
        stage: Stage = self
        for name in path:
            if name not in stage.children:
                problem = f"has no stage {'/'.join(path)!r}"
                raise InvalidDefinition(f"workflow {self.name!r}", problem)
            stage = stage.children[name]
        return stage

    def tool_named(self, name: str) -> Tool:
        """Return a tool by its exact name; `InvalidDefinition` where no stage has it."""
        tool = self._tools.get(name)
        if tool is None:
            raise InvalidDefinition(f"workflow {self.name!r}", f"has no tool {name!r}")
        return tool

    def declared(self) -> dict[str, Json]:
        """What a run declares before its first round: stages, actions, how success is checked."""
        return {
            "stages": [stage.name for stage in self.stages],
            "actions": [*sorted({tool.name for s in self.walk() for tool in s.tools})],
            "success": [
                stage.name for stage in self.walk() if callable(getattr(stage, "verify", None))
            ],
        }

    def start(self, view: View) -> Move:
        """Enter the first stage."""
        return Move({}, Enter(self.stages[0].name))

    def on(self, frame: Frame, event: Event, view: View) -> Move:
        """Enter the next stage, or complete; or go back to make a plan again."""
        assert isinstance(event, ChildDone)
        if event.back_to is not None:
            return self._back(frame, event, event.back_to)
        names = [stage.name for stage in self.stages]
        following = names.index(event.child) + 1
        if following < len(names):
            return Move(frame, Enter(names[following]))
        answer = event.output if self.answer is None else normal(self.answer(view.run))
        return Move(frame, Stop(Reason.COMPLETED, answer=answer))

    def _back(self, frame: Frame, event: ChildDone, to: str) -> Move:
        commit = self.children[event.child]
        assert isinstance(commit, Commit)
        made = frame.get(event.child, 0)  # how often its plan was made again
        assert isinstance(made, int)
        if made < commit.replans:
            return Move({**frame, event.child: made + 1}, Enter(to))
        detail: dict[str, Json] = {"replans": made, "output": event.output}
        return Move(frame, Stop(Reason.VERIFICATION_FAILED, detail))
