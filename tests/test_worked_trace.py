"""The worked trace: does the API support idempotent writes, answered from three public documents.

Four decisions, three tool calls, 38 seconds. The planner is a script; the two tools read a small
library and leave a record of what was read; the check of a claim looks into that library by itself.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel

from handrail import AgentLoop, Budget, Fleet, Workflow
from handrail.agent.stage import Checked
from handrail.agent.tools import Permit, Principal, RunFacts
from handrail.canonical import digest, dumps
from handrail.gateway.model import (
    RAW,
    ModelEvent,
    ModelGateway,
    ModelRequest,
    Scripted,
    Stop,
    Text,
    ToolCall,
)
from handrail.runs import Run
from tests.control import ask, claim, details, stop_of

GOAL = "Does the API support idempotent writes? Answer with a citation, or with 'no answer'."
QUERY = "idempotent writes of the example API"
MAY_RAISE = Principal("asker", frozenset({"budget:raise"}))
BUDGET = Budget(steps=5, model_calls=4, tool_calls=3, deadline_ms=38_000)


@dataclass(frozen=True, slots=True)
class Document:
    """A public document in one version; `verdict` is what its section says about the question."""

    version: str
    section: str
    verdict: str | None
    relevant: bool
    text: str


LIBRARY = {
    "source-a": Document("2026-01", "section-2", None, True, "How the client retries."),
    "source-b": Document("2026-03", "section-4", "yes", True, "A repeated key writes once."),
    "source-c": Document("2025-11", "section-1", None, False, "How to pay an invoice."),
}
SILENT = {**LIBRARY, "source-b": Document("2026-03", "section-4", None, True, "About limits.")}


class Query(BaseModel):
    query: str


class Source(BaseModel):
    source: str


class Found(BaseModel):
    candidates: list[str]
    possibly_relevant: list[str]


class Page(BaseModel):
    source: str
    version: str
    claim_support: bool
    location: str | None
    text: str


@dataclass(slots=True)
class World:
    """A library, the fleet that may ask about it, and the record of what was read."""

    library: Mapping[str, Document] = field(default_factory=lambda: LIBRARY)
    reads: list[str] = field(default_factory=list)
    fleet: Fleet = field(default_factory=lambda: Fleet(database_url="sqlite://"))

    def __post_init__(self) -> None:
        @self.fleet.tool(side_effect="read", public=lambda _, r: {"source_ids": r["candidates"]})
        def search(arguments: Query, call: object) -> Found:
            self.reads.append("search")
            relevant = [name for name, document in self.library.items() if document.relevant]
            return Found(candidates=list(self.library), possibly_relevant=relevant)

        @self.fleet.tool(side_effect="read", allow=self._listed, public=_read_of)
        def fetch(arguments: Source, call: object) -> Page:
            self.reads.append(arguments.source)
            document = self.library[arguments.source]
            supports = document.verdict is not None
            return Page(
                source=arguments.source,
                version=document.version,
                claim_support=supports,
                location=document.section if supports else None,
                text=document.text,
            )

        loop = AgentLoop(name="answer", actions=(search, fetch), verify=self.verify)
        self.fleet.workflow(Workflow(name="question", stages=[loop], budget=BUDGET))

    def _listed(self, arguments: Source, run: RunFacts) -> Permit:
        return Permit.ALLOW if arguments.source in self.library else Permit.DENY

    def verify(self, answer: Any, call: object) -> Checked:
        """Resolve every citation in the library, and compare what it says with the verdict."""
        verdict, citations = answer["verdict"], answer["citations"]
        supporting = [cited for cited in citations if self._says(cited) == verdict]
        if verdict == "no answer":
            silent = all(document.verdict is None for document in self.library.values())
            ok, unsupported = silent and not citations, 0 if silent else 1
        else:
            ok = bool(citations) and supporting == citations
            unsupported = 0 if ok else 1
        evidence = ", ".join("{source}@{version}#{location}".format(**c) for c in supporting)
        detail = {"citations": len(citations), "unsupported_claims": unsupported}
        return Checked(ok, detail, evidence or None)

    def _says(self, cited: Mapping[str, str]) -> str | None:
        document = self.library.get(cited["source"])
        if document is None or (document.version, document.section) != (
            cited["version"],
            cited["location"],
        ):
            return None
        return document.verdict

    def ask(self, planner: ModelGateway | Iterable[Any], **options: Any) -> Run:
        """Run the question with a gateway, or with a script, for a planner."""
        model = Scripted(planner) if isinstance(planner, Iterable) else planner
        self.fleet.model("default", model)
        return self.fleet.run("question", goal=GOAL, **options)


def _read_of(arguments: Source, page: Any) -> dict[str, Any]:
    return {key: page[key] for key in ("source", "version", "claim_support", "location")}


CITED = {"source": "source-b", "version": "2026-03", "location": "section-4"}
ANSWER = claim({"verdict": "yes", "citations": [CITED]})
UNCITED = claim({"verdict": "yes", "citations": []})
NO_ANSWER = claim({"verdict": "no answer", "citations": []})
READS = [
    ask("search", query=QUERY),
    ask("fetch", source="source-a"),
    ask("fetch", source="source-b"),
]
SCRIPT = [*READS, ANSWER]


@pytest.mark.accept("WRK-01")
def test_the_question_is_answered_with_four_decisions_and_three_calls() -> None:
    world = World()

    run = world.ask(SCRIPT)

    assert (run.status, run.reason, run.answer) == ("completed", "completed", ANSWER["answer"])
    assert (run.model_calls, run.tool_calls) == (4, 3)
    assert (run.budget_left["model_calls"], run.budget_left["tool_calls"]) == (0, 0)
    [completed] = details(world.fleet.trace(run), "run.completed")
    assert completed["steps"] == 4  # rounds entered ...
    assert run.step == 3  # ... of which three were finished without stopping


@pytest.mark.accept("WRK-02")
def test_each_round_shows_the_planner_what_is_known_by_then() -> None:
    """No document; three candidates, two of them possibly relevant; A insufficient and B unread;
    evidence that can be cited."""
    planner = Scripted(SCRIPT)

    World().ask(planner)

    shown = [
        [json.loads(seen["text"]) for seen in asked.observations] for asked in planner.requests
    ]
    assert len(shown) == 4
    assert shown[0] == []
    assert len(shown[1]) == 1
    assert shown[1][0]["candidates"] == ["source-a", "source-b", "source-c"]
    assert shown[1][0]["possibly_relevant"] == ["source-a", "source-b"]
    assert [(page["source"], page["claim_support"]) for page in shown[2][1:]] == [
        ("source-a", False)
    ]
    assert {key: shown[3][2][key] for key in CITED} == CITED
    assert shown[3][2]["claim_support"] is True


@pytest.mark.accept("WRK-03")
def test_the_trace_tells_the_worked_story_in_its_order() -> None:
    world = World()

    trace = world.fleet.trace(world.ask(SCRIPT))

    def proposed(tool: str, **arguments: str) -> dict[str, Any]:
        hashes = {f"{name}_hash": digest(dumps(value)) for name, value in arguments.items()}
        return {"proposal_type": "tool", "tool_name": tool, **hashes}

    story: list[tuple[str, dict[str, Any]]] = [
        ("proposal.received", proposed("search", query=QUERY)),
        ("policy.allowed", {"tool": "search", "remaining_calls": 3}),
        ("result.verified", {"source_ids": ["source-a", "source-b", "source-c"]}),
        ("proposal.received", proposed("fetch", source="source-a")),
        ("result.verified", {"source": "source-a", "claim_support": False}),
        ("proposal.received", proposed("fetch", source="source-b")),
        (
            "result.verified",
            {"source": "source-b", "claim_support": True, "location": "section-4"},
        ),
        ("completion.verified", {"verified": True, "citations": 1, "unsupported_claims": 0}),
        ("run.completed", {"steps": 4, "tool_calls": 3}),
    ]
    assert "query_hash" in story[0][1]
    events = iter(trace)
    for kind, expected in story:  # `any` goes on from where the last one was found
        assert any(_is(event, kind, expected) for event in events), (kind, expected)


def _is(event: Mapping[str, Any], kind: str, expected: Mapping[str, Any]) -> bool:
    shown = {key: event["detail"].get(key) for key in expected}
    return event["type"] == kind and shown == expected


@pytest.mark.accept("WRK-04")
def test_a_source_that_is_not_on_the_list_is_rejected_before_any_read() -> None:
    world = World()

    run = world.ask([ask("fetch", source="source-x"), ANSWER])

    assert (run.status, run.reason) == ("failed", "permission-denied")
    assert (world.reads, run.tool_calls) == ([], 0)
    trace = world.fleet.trace(run)
    assert [d["stable_reason_code"] for d in details(trace, "proposal.rejected")] == [run.reason]
    assert details(trace, "tool.started") == []


@pytest.mark.accept("WRK-05")
def test_the_version_that_was_read_is_recorded_with_its_verified_result() -> None:
    world = World()

    trace = world.fleet.trace(world.ask(SCRIPT))

    read = details(trace, "result.verified")[1:]
    assert [(seen["source"], seen["version"]) for seen in read] == [
        ("source-a", "2026-01"),
        ("source-b", "2026-03"),
    ]
    [verdict] = details(trace, "completion.verified")
    assert verdict["evidence_ref"] == "source-b@2026-03#section-4"


@pytest.mark.accept("WRK-06")
def test_a_completion_without_a_citation_spends_the_last_decision() -> None:
    world = World()

    run = world.ask([*READS, UNCITED, ANSWER])

    assert (run.status, run.reason) == ("budget_exhausted", "model-call-budget-exhausted")
    assert run.answer is None
    trace = world.fleet.trace(run)
    assert [verdict["verified"] for verdict in details(trace, "completion.verified")] == [False]


@pytest.mark.accept("WRK-06")
def test_with_a_decision_left_a_further_round_follows_an_uncited_completion() -> None:
    world = World()
    planner = Scripted([*READS, UNCITED, ANSWER])

    run = world.ask(planner, budget={"model_calls": 5}, principal=MAY_RAISE)

    trace = world.fleet.trace(run)
    assert [verdict["verified"] for verdict in details(trace, "completion.verified")] == [
        False,
        True,
    ]
    assert [event["step"] for event in trace if event["type"] == "observation.built"] == [*range(5)]
    assert (run.status, run.answer) == ("completed", ANSWER["answer"])


@pytest.mark.accept("WRK-07")
def test_where_no_source_supports_a_claim_the_verified_answer_is_no_answer() -> None:
    run = World(SILENT).ask([*READS, NO_ANSWER])

    assert (run.status, run.answer) == ("completed", NO_ANSWER["answer"])


@pytest.mark.accept("WRK-07")
@pytest.mark.parametrize("verdict", ["yes", "no"])
@pytest.mark.parametrize("citations", [[], [CITED]], ids=["uncited", "cited"])
def test_a_claim_without_support_is_rejected(verdict: str, citations: list[Any]) -> None:
    run = World(SILENT).ask([*READS, claim({"verdict": verdict, "citations": citations})])

    assert (run.status, run.answer) == ("budget_exhausted", None)


@pytest.mark.accept("WRK-07")
def test_no_answer_is_rejected_where_a_source_does_answer() -> None:
    run = World().ask([*READS, NO_ANSWER])

    assert (run.status, run.answer) == ("budget_exhausted", None)


@pytest.mark.accept("WRK-08")
@pytest.mark.parametrize(
    "cited",
    [
        {**CITED, "source": "source-x"},  # there is no such source
        {**CITED, "location": "section-9"},  # ... no such section
        {**CITED, "version": "2024-01"},  # ... no such version
        {
            "source": "source-a",
            "version": "2026-01",
            "location": "section-2",
        },  # it says nothing of it
    ],
    ids=["source", "section", "version", "says-nothing"],
)
def test_a_citation_that_does_not_resolve_or_support_is_rejected(cited: dict[str, str]) -> None:
    world = World()

    run = world.ask([*READS, claim({"verdict": "yes", "citations": [cited]})])

    assert (run.status, run.answer) == ("budget_exhausted", None)
    [verdict] = details(world.fleet.trace(run), "completion.verified")
    assert (verdict["verified"], verdict["unsupported_claims"]) == (False, 1)


@pytest.mark.accept("WRK-08")
def test_a_source_that_says_the_opposite_supports_nothing() -> None:
    run = World().ask([*READS, claim({"verdict": "no", "citations": [CITED]})])

    assert (run.status, run.answer) == ("budget_exhausted", None)


class Reasoning:
    """A gateway whose model thinks aloud before each of its proposals."""

    CANARY = "CANARY-let-me-think"

    def __init__(self, script: Iterable[Any]) -> None:
        self._script = iter(script)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        yield Text(f"{self.CANARY}: perhaps I should look at the documents first")
        yield ToolCall("1", RAW, next(self._script))
        yield Stop("end")


@pytest.mark.accept("WRK-09")
def test_the_trace_holds_no_reasoning_and_no_text_but_hashes_verdicts_and_counters() -> None:
    world = World()

    run = world.ask(Reasoning(SCRIPT))

    assert run.status == "completed"
    stored = json.dumps(world.fleet.trace(run))
    texts = [Reasoning.CANARY, GOAL, QUERY, *(document.text for document in LIBRARY.values())]
    assert [text for text in texts if text in stored] == []


@pytest.mark.accept("WRK-10")
def test_the_same_script_gives_the_same_trace_and_outcome() -> None:
    first, second, other = (_record(script) for script in (SCRIPT, SCRIPT, [*READS, UNCITED]))

    assert first == second
    assert first != other


def _record(script: Iterable[Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a run leaves behind, without times; ids that are drawn by lot are numbered instead."""
    world = World()
    run = world.ask(script, run_id="worked")
    names: dict[str, str] = {}

    def plain(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: plain(k, v) for k, v in value.items() if k not in ("at", "deadline_ms")}
        if key == "tool_call_id":
            return names.setdefault(value, f"call-{len(names)}")
        if key == "evidence_ref" and value is not None and value.startswith("call:"):
            return names[value.removeprefix("call:")]
        return value

    timeless = {"created_at", "deadline_at", "remaining_ms"}
    outcome = {k: v for k, v in run.to_json().items() if k not in timeless}
    return outcome, [plain("", event) for event in world.fleet.trace(run)]


def test_the_stop_explains_itself() -> None:
    """A run that was out of decisions says so, and what it has found by then."""
    world = World()

    run = world.ask([*READS, UNCITED])

    stop = stop_of(world.fleet.trace(run))
    assert stop["exhausted"] == "model-call-budget-exhausted"
    assert stop["products"] == {"outputs": [], "observations": 3}
