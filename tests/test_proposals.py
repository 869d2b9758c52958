"""What a model says is read as untrusted input: one proposal of an exact form, or nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import AgentLoop, Fleet, Workflow
from handrail.agent.proposal import (
    Clarification,
    CompletionClaim,
    Malformed,
    ToolProposal,
    parse_proposal,
)
from handrail.gateway.model import (
    CLARIFY,
    COMPLETE,
    ModelEvent,
    ModelRequest,
    Scripted,
    Stop,
    Text,
    ToolCall,
)
from handrail.runs import Run
from tests.control import ask, claim, details

TOOL = ask("lookup", q=1)
QUESTION = {"kind": "clarify", "question": "Which one?"}


class Called:
    """A fleet with one read and one write, which count their calls, and a model."""

    def __init__(self, model: Any) -> None:
        self.calls: list[str] = []
        self.fleet = Fleet(database_url="sqlite://")

        @self.fleet.tool(side_effect="read")
        def lookup(arguments: dict[str, Any], call: object) -> str:
            self.calls.append("lookup")
            return "found"

        @self.fleet.tool(
            side_effect="idempotent",
            approval="never",
            intent=lambda arguments, run: "draft:1",
            guarantee="unique-constraint",
            takeover="operations",
        )
        def save(arguments: dict[str, Any], call: object) -> str:
            self.calls.append("save")
            return "saved"

        self.fleet.model("default", model)
        loop = AgentLoop(name="loop", actions=(lookup, save), verify=lambda answer, call: True)
        self.fleet.workflow(Workflow(name="task", stages=[loop]))
        self.run: Run = self.fleet.run("task", goal="anything")
        self.trace = self.fleet.trace(self.run)
        self.fleet.close()


def says(*proposals: Any) -> Called:
    return Called(Scripted(proposals))


class Streams:
    """A model whose answer is these events."""

    def __init__(self, *events: ModelEvent) -> None:
        self.events = events

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        for event in self.events:
            yield event


# ---- the form ------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [TOOL, json.dumps(TOOL), json.dumps(TOOL).encode()])
def test_a_tool_call_is_read(raw: Any) -> None:
    assert parse_proposal(raw) == ToolProposal("lookup", {"q": 1})


def test_a_claim_and_a_question_are_read() -> None:
    assert parse_proposal(claim("done")) == CompletionClaim("done")
    assert parse_proposal(QUESTION) == Clarification("Which one?")


@pytest.mark.accept("RUN-16")
@pytest.mark.parametrize("whole", [TOOL, claim("done"), QUESTION])
def test_a_missing_field_is_refused(whole: dict[str, Any]) -> None:
    for field in whole:
        broken = {key: value for key, value in whole.items() if key != field}
        assert isinstance(parse_proposal(broken), Malformed), field
        assert isinstance(parse_proposal(json.dumps(broken)), Malformed), field


@pytest.mark.accept("RUN-16")
@pytest.mark.parametrize(
    "wrong",
    [
        ask("lookup") | {"arguments": [1]},
        ask("lookup") | {"arguments": "{}"},
        ask("lookup") | {"arguments": None},
        ask("lookup") | {"tool": 1},
        ask("lookup") | {"tool": ["lookup"]},
        {"kind": "clarify", "question": {"text": "Which?"}},
        {"kind": 1, "tool": "lookup", "arguments": {}},
        {"kind": None},
        {"kind": ["tool"]},
    ],
)
def test_a_wrong_type_is_refused(wrong: dict[str, Any]) -> None:
    assert isinstance(parse_proposal(wrong), Malformed)


@pytest.mark.accept("RUN-16")
@pytest.mark.parametrize(
    "field", ["approved", "credential", "command", "Kind", "tool ", "__class__"]
)
@pytest.mark.parametrize("whole", [TOOL, claim("done"), QUESTION])
def test_an_additional_field_is_refused(whole: dict[str, Any], field: str) -> None:
    assert isinstance(parse_proposal(whole | {field: True}), Malformed)


@pytest.mark.accept("RUN-16")
@pytest.mark.parametrize(
    "raw",
    [
        {"kind": "tool", "tool": "lookup"},  # a missing field
        ask("lookup") | {"arguments": "q=1"},  # a wrong type
        ask("save") | {"approved": True},  # an additional field
        ask("save") | {"credential": "token"},
        ask("save") | {"command": "save"},
    ],
)
def test_what_is_refused_never_reaches_the_run_as_a_proposal(raw: Any) -> None:
    world = says(raw, claim("done"))

    assert (world.run.status, world.run.reason) == ("failed", "invalid-proposal")
    assert world.calls == []
    assert details(world.trace, "policy.allowed") == []
    assert [e["stable_reason_code"] for e in details(world.trace, "proposal.rejected")] == [
        "invalid-proposal"
    ]


@pytest.mark.parametrize("kind", ["Tool", "tool ", "TOOL", "shrug", "", "completed"])
def test_a_kind_is_compared_exactly(kind: str) -> None:
    proposal = parse_proposal({**TOOL, "kind": kind})

    assert isinstance(proposal, Malformed)
    assert proposal.kind == kind


@pytest.mark.parametrize(
    "raw",
    [None, 1, "", "plain text", "[]", "{}", b"\xff", object(), float("nan"), {"kind": object()}],
)
def test_what_is_no_object_is_refused(raw: object) -> None:
    assert isinstance(parse_proposal(raw), Malformed)


def test_the_kind_that_a_trace_shows_is_whole_within_reason() -> None:
    """A trace says what the model called itself; only what no model means is cut."""
    assert parse_proposal({"kind": "x" * 200}) == Malformed("x" * 200, "unknown kind")
    found = parse_proposal({"kind": "x" * 10_000})

    assert isinstance(found, Malformed)
    assert len(found.kind) <= 1_000


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "tool", "arguments", "answer", "question", "x"])
                          | st.integers(), inner, max_size=4)
    ),
    max_leaves=8,
)  # fmt: skip


@given(ANYTHING)
def test_reading_never_raises(raw: object) -> None:
    found = parse_proposal(raw)

    assert isinstance(found, ToolProposal | CompletionClaim | Clarification | Malformed)


@given(st.text() | st.binary())
def test_reading_text_never_raises(raw: str | bytes) -> None:
    assert isinstance(
        parse_proposal(raw), ToolProposal | CompletionClaim | Clarification | Malformed
    )


# ---- one action a round --------------------------------------------------------------------------

TWO = [ToolCall("1", "lookup", {"q": 1}), ToolCall("2", "save", {"q": 2})]


@pytest.mark.accept("STM-02")
@pytest.mark.parametrize(
    "model",
    [
        Streams(*TWO, Stop("end")),
        Streams(TWO[0], ToolCall("2", COMPLETE, {"answer": "done"}), Stop("end")),
        Streams(TWO[0], TWO[0], Stop("end")),
        Scripted([[ask("lookup", q=1), ask("save", q=2)]]),
        Scripted([[ask("lookup", q=1)]]),  # a list, though of one
        Scripted([{"kind": "tools", "tools": [ask("lookup", q=1), ask("save", q=2)]}]),
    ],
)
def test_more_than_one_action_is_no_valid_proposal(model: Any) -> None:
    world = Called(model)

    assert (world.run.status, world.run.reason) == ("failed", "invalid-proposal")
    assert world.calls == []


@pytest.mark.accept("STM-02")
def test_a_round_executes_at_most_one_candidate() -> None:
    world = says(ask("lookup", q=1), ask("save", q=1), claim("done"))

    kinds = [event["type"] for event in world.trace]
    assert world.run.reason == "completed"
    assert world.calls == ["lookup", "save"]
    assert kinds.count("proposal.received") == kinds.count("observation.built") == 3
    for step in range(3):
        of_round = [e["type"] for e in world.trace if e["step"] == step]
        assert of_round.count("tool.started") <= 1


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([ToolCall("1", "lookup", {"q": 1})], "tool"),
        ([Text("let me see"), ToolCall("1", "lookup", {"q": 1})], "tool"),
        ([ToolCall("1", COMPLETE, {"answer": "done"})], "complete"),
        ([ToolCall("1", CLARIFY, {"question": "Which one?"})], "clarify"),
        ([Text("do"), Text("ne")], "complete"),
    ],
)
def test_a_stream_of_events_is_one_proposal(events: list[ModelEvent], kind: str) -> None:
    world = Called(Streams(*events, Stop("end")))

    assert details(world.trace, "proposal.received")[0]["kind"] == kind


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.accept("RUN-17")
@pytest.mark.parametrize(
    "name",
    ["Lookup", "lookup ", " lookup", "LOOKUP", "look\u200bup", "lookup\x00", "lookup\n",
     "\uff4cookup", "__proto__", "__class__", "constructor", "", "*", "loop.lookup", "default",
     "refund"],
)  # fmt: skip
def test_only_a_name_that_is_allowed_here_passes_compared_exactly(name: str) -> None:
    world = says(ask(name, q=1))

    assert (world.run.status, world.run.reason) == ("failed", "invalid-proposal")
    assert world.calls == []


@pytest.mark.accept("RUN-17")
@pytest.mark.parametrize("name", ["lookup", "save"])
def test_the_exact_name_passes(name: str) -> None:
    assert says(ask(name, q=1), claim("done")).calls == [name]
