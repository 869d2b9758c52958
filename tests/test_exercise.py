"""The exercise: `lookup` and `saveDraft`, scripted proposals, at most five steps and three tool
calls, one absolute deadline.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from handrail import AgentLoop, Budget, Fleet, Workflow
from handrail.agent import review
from handrail.agent.tools import FOREVER, RunFacts
from handrail.broker.loop import shared_loop
from handrail.broker.message import StepMessage
from handrail.canonical import dumps
from handrail.gateway.model import ModelEvent, ModelRequest, Scripted, Stop, Text, ToolCall
from handrail.ledger.lock import LocalLock
from handrail.runs import Run
from handrail.tasks.step import run_step
from handrail.testing.virtual_fleet import VirtualFleet
from tests.control import (
    PATIENCE_S,
    Clock,
    Driven,
    ask,
    claim,
    details,
    no_unhandled_error,
    stop_of,
    until,
)

BUDGET = Budget(steps=5, model_calls=9, tool_calls=3, deadline_ms=38_000)


class Item(BaseModel):
    item: str
    lang: str = "en"


class Draft(BaseModel):
    draft: str
    text: str


class Desk:
    """A fleet with the two tools, and the world outside: stored drafts, and what was called.

    `on_lookup` and `on_save` are called inside the tool, the latter after the draft was stored:
    they may hang, raise or look around.
    """

    def __init__(
        self,
        script: list[Any],
        *,
        on_lookup: Callable[[Any], object] = lambda call: None,
        on_save: Callable[[Any], object] = lambda call: None,
        verify: Callable[[Any, Any], Any] | None = None,
        clock: Clock | None = None,
        tool_ms: int = 60_000,
        database_url: str = "sqlite://",
        **save: Any,
    ) -> None:
        self.clock = clock or Clock()
        self.calls: list[str] = []
        self.keys: list[str] = []  # each request to store, by the key that it carried
        self.store: dict[str, dict[str, str]] = {}  # by key: a repeated one writes once
        self.queries = 0
        self.model = Scripted(script)
        self.order: list[str] = []  # what reached the store, in order: saveDraft and query
        fleet = self.fleet = Fleet(database_url=database_url, clock=self.clock)
        fleet.model("default", self.model)

        @fleet.tool(side_effect="read", timeout_ms=tool_ms)
        def lookup(arguments: Item, call: Any) -> str:
            self.calls.append("lookup")
            on_lookup(call)
            return f"{arguments.item} is known"

        usual: dict[str, Any] = {
            "side_effect": "idempotent",
            "approval": "never",
            "intent": _intent,
            "guarantee": "idempotency-key",
            "key_valid_for_ms": FOREVER,
            "query": self._find,
            "timeout_ms": tool_ms,
        }

        @fleet.tool("saveDraft", **usual | save)
        def save_draft(arguments: Draft, call: Any) -> str:
            self.calls.append("saveDraft")
            self.order.append("saveDraft")
            self.keys.append(call.key)
            self.store.setdefault(call.key, arguments.model_dump())
            on_save(call)
            return f"{arguments.draft} is known"

        loop = AgentLoop(
            name="loop", actions=(lookup, save_draft), verify=verify or self._is_stored
        )
        fleet.workflow(Workflow(name="exercise", stages=[loop], budget=BUDGET))

    def _find(self, arguments: Draft, call: Any) -> str | None:
        self.queries += 1
        self.order.append("query")
        return f"{arguments.draft} is known" if call.key in self.store else None

    def _is_stored(self, answer: Any, call: Any) -> bool:
        """The postcondition: the draft that the answer names is in the store."""
        return any(record["draft"] == answer for record in self.store.values())

    def run(self, **options: Any) -> Run:
        return self.fleet.run("exercise", goal="save a draft", **options)

    def drive(self, run_id: str = "exercise", **options: Any) -> Driven:
        """Let another thread drive the run, so that the test can interfere."""
        self.fleet.enqueue("exercise", goal="save a draft", run_id=run_id, **options)
        return Driven(self.fleet, run_id)

    def settle(self, driven: Driven) -> Run:
        """Let the reconciler find the proof of an unknown write, and the run come to rest."""
        until(lambda: driven.status == "reconciling", "the doubt")
        self.clock.advance(1_000)
        driven.join()
        return self.fleet.get(driven.run_id)


def _intent(arguments: Draft, run: RunFacts) -> str:
    return f"save-draft:{arguments.draft}"


LOOKUP = ask("lookup", item="d1")
SAVE = ask("saveDraft", draft="d1", text="hello")
DONE = claim("d1")


def hangs(call: Any) -> None:
    """End only when the program gives the call up, and then without an answer."""
    call.aborted.wait(PATIENCE_S)
    raise RuntimeError("the connection is gone")


# ---- the six scenarios ---------------------------------------------------------------------------


def completes() -> tuple[Desk, Run]:
    desk = Desk([LOOKUP, SAVE, DONE])
    return desk, desk.run()


def unknown_tool() -> tuple[Desk, Run]:
    desk = Desk([ask("dropTable", item="d1"), DONE])
    return desk, desk.run()


def invalid_arguments() -> tuple[Desk, Run]:
    desk = Desk([ask("saveDraft", draft="d1", text=7), DONE])
    return desk, desk.run()


def read_times_out() -> tuple[Desk, Run]:
    desk = Desk([LOOKUP, DONE], on_lookup=hangs, tool_ms=30)
    return desk, desk.run()


def read_meets_the_deadline() -> tuple[Desk, Run]:
    desk = Desk([LOOKUP, DONE], on_lookup=hangs)
    return desk, desk.run(budget={"deadline_ms": 150})


def write_times_out() -> tuple[Desk, Run]:
    desk = Desk([SAVE, DONE], on_save=hangs, tool_ms=100)
    return desk, desk.settle(desk.drive())


def repeats() -> tuple[Desk, Run]:
    """What the look-up tells was known from the draft: it leaves the state version as it is."""
    desk = Desk([SAVE, LOOKUP, LOOKUP, DONE])
    return desk, desk.run()


def is_cancelled() -> tuple[Desk, Run]:
    under_way = threading.Event()

    def look(call: Any) -> None:
        under_way.set()
        hangs(call)

    desk = Desk([LOOKUP, SAVE, DONE], on_lookup=look)
    driven = desk.drive()
    assert under_way.wait(PATIENCE_S)
    desk.fleet.cancel("exercise")
    driven.join()
    return desk, desk.fleet.get("exercise")


#: Each scenario with the reasons of its stops, and the event that explains each of them.
SCENARIOS: dict[str, tuple[Callable[[], tuple[Desk, Run]], list[tuple[str, str, dict[str, Any]]]]]
SCENARIOS = {
    "completed": (completes, [("completed", "completion.verified", {"verified": True})]),
    "unknown-tool": (
        unknown_tool,
        [
            (
                "invalid-proposal",
                "proposal.rejected",
                {"stable_reason_code": "invalid-proposal", "problem": "unknown tool"},
            )
        ],
    ),
    "invalid-arguments": (
        invalid_arguments,
        [
            (
                "invalid-proposal",
                "proposal.rejected",
                {"stable_reason_code": "invalid-proposal", "problem": "invalid arguments"},
            )
        ],
    ),
    "read-times-out": (
        read_times_out,
        [("tool-failed", "tool.failed", {"tool": "lookup", "timedOut": True})],
    ),
    "read-meets-the-deadline": (
        read_meets_the_deadline,
        [("deadline-exhausted", "tool.failed", {"tool": "lookup", "timedOut": True})],
    ),
    "write-times-out": (
        write_times_out,
        [
            (
                "unknown-effect",
                "effect.reconciliation-required",
                {"tool": "saveDraft", "trigger": "timeout", "recovery": "query"},
            ),
            ("completed", "completion.verified", {"verified": True}),
        ],
    ),
    "repeated": (
        repeats,
        [
            (
                "repeated-proposal",
                "proposal.rejected",
                {"stable_reason_code": "repeated-proposal"},
            )
        ],
    ),
    "cancelled": (
        is_cancelled,
        [("cancelled", "tool.failed", {"tool": "lookup", "cancelled": True})],
    ),
}


@pytest.mark.accept("EXE-01")
def test_a_draft_that_is_stored_completes_the_run() -> None:
    desk, run = completes()

    assert (run.status, run.reason, run.answer) == ("completed", "completed", "d1")
    assert desk.calls == ["lookup", "saveDraft"]
    assert list(desk.store.values()) == [{"draft": "d1", "text": "hello"}]


@pytest.mark.accept("EXE-02")
@pytest.mark.parametrize("scenario", [unknown_tool, invalid_arguments])
def test_an_invalid_proposal_stops_the_run_before_execution(
    scenario: Callable[[], tuple[Desk, Run]],
) -> None:
    desk, run = scenario()

    assert (run.status, run.reason) == ("failed", "invalid-proposal")
    assert (desk.calls, run.tool_calls) == ([], 0)


@pytest.mark.accept("EXE-03")
@pytest.mark.parametrize(
    ("scenario", "status", "reason"),
    [
        (read_times_out, "failed", "tool-failed"),
        (read_meets_the_deadline, "budget_exhausted", "deadline-exhausted"),
    ],
)
def test_a_look_up_that_times_out_is_a_failure_without_reconciliation(
    scenario: Callable[[], tuple[Desk, Run]], status: str, reason: str
) -> None:
    desk, run = scenario()

    assert (run.status, run.reason) == (status, reason)
    assert (desk.calls, desk.queries) == (["lookup"], 0)
    assert [e["type"] for e in desk.fleet.trace(run) if e["type"].startswith("effect.")] == []
    assert desk.fleet.ledger.effects() == []


@pytest.mark.accept("EXE-04")
def test_a_draft_whose_saving_times_out_is_unknown_and_reconciled() -> None:
    desk = Desk([SAVE, DONE], on_save=hangs, tool_ms=100)
    driven = desk.drive()
    until(lambda: driven.status == "reconciling", "the doubt")

    doubtful = desk.fleet.get("exercise")
    [effect] = desk.fleet.ledger.effects(unresolved=True)

    assert doubtful.reason == "unknown-effect"
    assert (effect["status"], effect["trigger"]) == ("unknown", "timeout")
    assert desk.queries == 0
    run = desk.settle(driven)
    assert desk.queries == 1
    assert (run.status, run.answer) == ("completed", "d1")
    resolved = details(desk.fleet.trace(run), "effect.resolved")
    assert [verdict["verdict"] for verdict in resolved] == ["applied"]


@pytest.mark.accept("EXE-05", "FIX-18")
def test_a_repeated_proposal_with_an_unchanged_version_calls_the_tool_once() -> None:
    desk, run = repeats()

    assert (run.status, run.reason) == ("failed", "repeated-proposal")
    assert desk.calls.count("lookup") == 1
    assert run.version == 1  # as it was when the look-up was proposed for the first time


@pytest.mark.accept("EXE-06")
def test_after_a_cancel_no_new_action_starts() -> None:
    desk, run = is_cancelled()
    assert (run.status, run.reason) == ("cancelled", "cancelled")
    assert (desk.calls, run.model_calls, run.tool_calls) == (["lookup"], 1, 1)

    desk.clock.advance(3_600_000)
    again = desk.fleet.drive(run)
    desk.fleet.make_reconciler(publish=lambda messages: None).sweep_until_quiet()

    assert (desk.calls, len(desk.model.requests)) == (["lookup"], 1)
    assert (again.status, again.budget_left) == (run.status, run.budget_left)


@pytest.mark.accept("EXE-07")
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_trace_is_written_as_json_and_explains_each_stop(name: str, tmp_path: Path) -> None:
    scenario, stops = SCENARIOS[name]
    desk, run = scenario()
    file = tmp_path / "trace.json"

    file.write_text(json.dumps(desk.fleet.trace(run)))

    trace = json.loads(file.read_text())
    assert [event["seq"] for event in trace] == [*range(len(trace))]
    places = [place for place, event in enumerate(trace) if event["type"] == "run.stopped"]
    assert len(places) == len(stops)
    for place, (reason, kind, expected) in zip(places, stops, strict=True):
        assert trace[place]["detail"]["reason"] == reason
        told = [e for e in trace[:place] if e["type"] not in BOOKKEEPING]
        assert told[-1]["type"] == kind
        assert {key: told[-1]["detail"].get(key) for key in expected} == expected
    assert run.reason == stop_of(trace)["reason"]


#: What stands between a finding and the stop that it means, and explains neither.
BOOKKEEPING = {"run.moved", "stage.finished", "run.completed"}


@pytest.mark.accept("EXE-08")
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_error_of_a_background_task_goes_unhandled(name: str) -> None:
    scenario, stops = SCENARIOS[name]

    with no_unhandled_error():
        _, run = scenario()

    assert run.reason == stops[-1][0]


@pytest.mark.accept("EXE-08")
@pytest.mark.parametrize("place", ["task", "thread", "finaliser"])
def test_the_watch_for_unhandled_errors_sees_them(place: str) -> None:
    """Otherwise the test before could not fail."""

    async def leave_a_task_behind() -> None:
        async def fail() -> None:
            raise RuntimeError("planted")

        asyncio.get_running_loop().create_task(fail())  # nobody takes its error
        await asyncio.sleep(0)

    class Unhappy:
        def __del__(self) -> None:
            raise RuntimeError("planted")

    def fail() -> None:
        raise RuntimeError("planted")

    with pytest.raises(AssertionError, match="planted"), no_unhandled_error():
        if place == "task":
            shared_loop().submit(leave_a_task_behind()).result(PATIENCE_S)
        elif place == "thread":
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
        else:
            Unhappy()


@pytest.mark.accept("EXE-09")
def test_a_lost_response_leads_to_no_second_write() -> None:
    """The recovered run's planner proposes the same draft again, and the record is taken for it."""
    answers = iter([hangs])
    desk = Desk(
        [SAVE, SAVE, DONE],
        on_save=lambda call: next(answers, lambda call: None)(call),
        tool_ms=100,
    )

    run = desk.settle(desk.drive())

    assert (run.status, run.answer) == ("completed", "d1")
    assert desk.calls == ["saveDraft"]
    assert len(desk.store) == 1


@pytest.mark.accept("EXE-09")
def test_a_worker_that_dies_after_the_write_leads_to_no_second_write() -> None:
    stored, woken = threading.Event(), threading.Event()

    def store_and_die(call: Any) -> None:
        stored.set()
        woken.wait(PATIENCE_S)

    desk = Desk([SAVE, DONE], on_save=store_and_die)
    run_id = desk.fleet.enqueue("exercise", goal="save a draft", run_id="exercise")
    runtime = desk.fleet.make_runtime(publish=lambda messages: None, lock=LocalLock())
    step = shared_loop().submit(run_step(runtime, StepMessage(run_id=run_id, step=0, epoch=0)))
    assert stored.wait(PATIENCE_S)
    step.cancel()  # the worker is gone: it writes nothing more
    runtime.close()
    assert desk.fleet.get(run_id).status == "executing"

    desk.clock.advance(120_000 - 38_000)  # the lease has run out
    driven = Driven(desk.fleet, run_id)
    run = desk.settle(driven)
    woken.set()

    assert run.tool_calls == 1
    assert desk.calls == ["saveDraft"]
    assert len(desk.store) == 1
    [effect] = desk.fleet.ledger.effects(run_id=run_id)
    assert (effect["status"], effect["attempts"]) == ("applied", 1)
    lost = details(desk.fleet.trace(run), "effect.reconciliation-required")
    assert [doubt["trigger"] for doubt in lost] == ["worker-lost"]


@pytest.mark.accept("EXE-10")
def test_a_sixth_step_is_refused() -> None:
    desk = Desk([claim("d2")] * 9)

    run = desk.run()

    assert (run.status, run.reason) == ("budget_exhausted", "step-budget-exhausted")
    assert (run.step, len(desk.model.requests)) == (5, 5)


@pytest.mark.accept("EXE-10")
def test_a_fourth_tool_call_is_refused() -> None:
    desk = Desk([ask("lookup", item=f"d{number}") for number in range(9)])

    run = desk.run()

    assert (run.status, run.reason) == ("budget_exhausted", "tool-call-budget-exhausted")
    assert (run.tool_calls, desk.calls) == (3, ["lookup"] * 3)


@pytest.mark.accept("EXE-11")
def test_a_claim_passes_an_independent_check_or_does_not_complete() -> None:
    """The first claim names a draft that nobody has stored, however sure the planner is."""
    sure = claim({"draft": "d1", "verified": True, "status": "completed"})
    desk = Desk([sure, DONE, SAVE, DONE])

    run = desk.run()

    assert (run.status, run.answer) == ("completed", "d1")
    verdicts = details(desk.fleet.trace(run), "completion.verified")
    assert [verdict["verified"] for verdict in verdicts] == [False, False, True]


@pytest.mark.accept("EXE-11")
def test_the_planner_is_shown_public_facts_and_never_the_check() -> None:
    checks: list[Any] = []

    def check(answer: Any, call: Any) -> bool:
        checks.append((len(desk.model.requests), answer))
        return True

    desk = Desk([LOOKUP, DONE], verify=check)

    desk.run()

    assert checks == [(2, "d1")]  # after the last question, with the bare claim
    for request in desk.model.requests:
        shown = request.to_json()
        assert shown.keys() == {
            "goal",
            "input",
            "facts",
            "observations",
            "allowed_tools",
            "budget_left",
            "state_version",
            "remaining_ms",
        }
        assert shown["allowed_tools"] == ["lookup", "saveDraft"]
        assert "check" not in dumps(shown) and "verif" not in dumps(shown)


@pytest.mark.accept("EXE-12")
def test_the_same_fingerprint_twice_in_a_row_stops_the_run() -> None:
    desk, run = repeats()

    trace = desk.fleet.trace(run)
    proposed = details(trace, "proposal.received")[-2:]
    assert proposed[0]["arguments_hash"] == proposed[1]["arguments_hash"]
    assert stop_of(trace)["reason"] == "repeated-proposal"
    assert len(stop_of(trace)["fingerprint"]) == 32
    assert len(details(trace, "policy.allowed")) == 2  # the draft and the first look-up


@pytest.mark.accept("EXE-13")
def test_one_intent_in_two_steps_has_one_key() -> None:
    desk = Desk([SAVE, LOOKUP, ask("saveDraft", text="hello", draft="d1"), DONE])

    run = desk.run()

    assert run.status == "completed"
    started = details(desk.fleet.trace(run), "proposal.received")
    assert started[0]["arguments_hash"] == started[2]["arguments_hash"]
    [effect] = desk.fleet.ledger.effects()
    assert effect["intent_key"] == "save-draft:d1"
    assert desk.keys == [effect["id"]]  # the second one took the recorded result


@pytest.mark.accept("EXE-13")
def test_one_intent_in_two_runs_has_one_key_and_another_intent_another() -> None:
    desk = Desk([SAVE, DONE, SAVE, DONE, ask("saveDraft", draft="d2", text="hello"), claim("d2")])

    runs = [desk.run() for _ in range(3)]

    assert [run.status for run in runs] == ["completed"] * 3
    held = [[effect["id"] for effect in desk.fleet.ledger.effects(run_id=r.run_id)] for r in runs]
    assert held[0] == held[1] != held[2]
    assert desk.keys == [*held[0], *held[2]]
    assert len(desk.store) == 2


# ---- experiment 3: a claim without the product ---------------------------------------------------


def product(folder: Path, script: list[Any]) -> Desk:
    """A desk whose drafts are files in an artifact store, and whose check looks for the file."""
    return Desk(
        script,
        on_save=lambda call: (folder / "d1").write_text("hello"),
        verify=lambda answer, call: (folder / str(answer)).exists(),
    )


@pytest.mark.accept("FIX-08")
def test_a_claim_without_the_file_is_rejected_and_the_next_round_starts(tmp_path: Path) -> None:
    desk = product(tmp_path, [DONE, LOOKUP])

    run = desk.run(budget={"steps": 2})

    trace = desk.fleet.trace(run)
    assert [verdict["verified"] for verdict in details(trace, "completion.verified")] == [False]
    rounds = [event["step"] for event in trace if event["type"] == "observation.built"]
    assert rounds == [0, 1]
    assert desk.calls == ["lookup"]


@pytest.mark.accept("FIX-09")
@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({"steps": 1}, "step-budget-exhausted"),
        ({"model_calls": 1}, "model-call-budget-exhausted"),
    ],
)
def test_a_claim_without_the_file_never_completes_whatever_runs_out(
    budget: dict[str, int], reason: str, tmp_path: Path
) -> None:
    run = product(tmp_path, [DONE, DONE]).run(budget=budget)

    assert (run.status, run.reason, run.answer) == ("budget_exhausted", reason, None)


@pytest.mark.accept("FIX-10")
def test_a_later_round_that_writes_the_file_completes_the_run(tmp_path: Path) -> None:
    desk = product(tmp_path, [DONE, SAVE, DONE])

    run = desk.run()

    assert (run.status, run.answer) == ("completed", "d1")
    verdicts = details(desk.fleet.trace(run), "completion.verified")
    assert [verdict["verified"] for verdict in verdicts] == [False, True]
    assert (tmp_path / "d1").read_text() == "hello"


# ---- experiment 4: the answer of a write is lost -------------------------------------------------


@pytest.mark.accept("FIX-11")
def test_a_write_whose_answer_times_out_after_it_was_done_is_unknown() -> None:
    desk = Desk([SAVE, DONE], on_save=hangs, tool_ms=100)
    driven = desk.drive()
    until(lambda: driven.status == "reconciling", "the doubt")

    run = desk.fleet.get("exercise")

    assert len(desk.store) == 1  # it did happen, and nobody here knows
    [effect] = desk.fleet.ledger.effects(run_id="exercise")
    assert (run.reason, effect["status"], effect["trigger"]) == (
        "unknown-effect",
        "unknown",
        "timeout",
    )
    assert stop_of(desk.fleet.trace(run))["trigger"] == "timeout"
    desk.settle(driven)


@pytest.mark.accept("FIX-12", "FIX-13")
def test_the_store_is_queried_before_anything_is_sent_and_sees_one_key() -> None:
    """The planner of the recovered run proposes the draft again: its record is found."""
    desk = Desk([SAVE, SAVE, DONE], on_save=hangs, tool_ms=100)

    run = desk.settle(desk.drive())

    assert desk.order == ["saveDraft", "query"]
    assert len(set(desk.keys)) == len(desk.store) == 1
    assert (run.status, run.answer) == ("completed", "d1")
    [effect] = desk.fleet.ledger.effects(run_id="exercise")
    assert effect["status"] == "applied"


class Doubt:
    """`saveDraft` on virtual time: its first answer is lost; a query finds what `finds` says."""

    def __init__(self, virtual: VirtualFleet, finds: Callable[[], Any], **contract: Any) -> None:
        self.virtual = virtual
        self.keys: list[str] = []
        self.queries = 0

        def find(arguments: Any, call: Any) -> Any:
            self.queries += 1
            return finds()

        async def save(arguments: dict[str, Any], call: Any) -> str:
            self.keys.append(call.key)
            if len(self.keys) == 1:
                await virtual.loop.create_future()
            return "d1 is known"

        async def is_stored(answer: Any, call: Any) -> bool:
            return len(self.keys) > 1

        usual: dict[str, Any] = {
            "side_effect": "idempotent",
            "approval": "never",
            "intent": lambda arguments, run: f"save-draft:{arguments['draft']}",
            "query": find,
            "timeout_ms": 100,
        }
        tool = virtual.fleet.tool("saveDraft", **usual | contract)(save)
        loop = AgentLoop(name="loop", actions=(tool,), verify=is_stored)
        virtual.fleet.workflow(Workflow(name="exercise", stages=[loop]))
        virtual.fleet.model("default", Scripted([SAVE, DONE]))

    def settle(self) -> Run:
        """Run until the doubt is settled, and on if the run goes on."""
        run = self.virtual.run("exercise", goal="save a draft")
        assert (run.status, run.reason) == ("reconciling", "unknown-effect")
        while run.status == "reconciling":
            self.virtual.advance(5_000)
            self.virtual.reconciler.sweep()
            run = self.virtual.fleet.get(run.run_id)
        return self.virtual.drive(run.run_id)


KEYED: dict[str, Any] = {"guarantee": "idempotency-key", "key_valid_for_ms": FOREVER}
UNKEYED: dict[str, Any] = {"guarantee": "unique-constraint"}


@pytest.mark.accept("FIX-13")
def test_a_draft_that_a_query_does_not_find_is_sent_again_with_its_key() -> None:
    with VirtualFleet() as virtual:
        doubt = Doubt(virtual, lambda: None, **KEYED)

        run = doubt.settle()

        assert run.status == "completed"
        assert len(doubt.keys) == 2 and len(set(doubt.keys)) == 1
        assert doubt.queries >= 2  # before the second sending: absence takes two answers


@pytest.mark.accept("FIX-13")
def test_a_draft_without_a_key_that_is_not_found_is_a_persons_where_a_stall_has_no_bound() -> None:
    with VirtualFleet() as virtual:
        virtual.runtime.max_stall_ms = virtual.reconciler.max_stall_ms = None
        doubt = Doubt(virtual, lambda: None, **UNKEYED)

        run = doubt.settle()

        assert (run.status, len(doubt.keys)) == ("handed_off", 1)


@pytest.mark.accept("FIX-13")
def test_a_query_that_fails_leads_to_a_person() -> None:
    def fails() -> Any:
        raise ConnectionResetError

    with VirtualFleet() as virtual:
        doubt = Doubt(virtual, fails, **UNKEYED)

        run = doubt.settle()

        assert (run.status, run.reason, len(doubt.keys)) == ("handed_off", "unknown-effect", 1)
        [handoff] = virtual.fleet.ledger.people.handoffs(run_id=run.run_id)
        assert handoff["package"]["effect"]["status"] == "handed_off"


# ---- experiment 5: the same again ----------------------------------------------------------------


def asks_twice() -> tuple[Desk, Run]:
    """The same look-up twice in a row, the second time with its default written out."""
    script = [SAVE, LOOKUP, ask("lookup", lang="en", item="d1"), DONE]
    desk = Desk(script)
    return desk, desk.run()


@pytest.mark.accept("FIX-14")
def test_normalised_arguments_at_an_unchanged_version_are_refused_before_the_second_call() -> None:
    desk, run = asks_twice()

    assert (run.status, run.reason) == ("failed", "repeated-proposal")
    assert desk.calls.count("lookup") == 1
    proposals = review.proposals(desk.fleet.trace(run))
    assert [proposal["state_version"] for proposal in proposals] == [0, 1, 1]
    assert proposals[1]["fingerprint"] == proposals[2]["fingerprint"]


@pytest.mark.accept("FIX-15")
def test_the_stop_of_a_repetition_holds_its_fingerprint_and_what_is_left() -> None:
    desk, run = asks_twice()

    trace = desk.fleet.trace(run)
    stop = stop_of(trace)
    allowed = details(trace, "policy.allowed")
    assert stop["fingerprint"] == allowed[-1]["fingerprint"]
    left = {"steps": 2, "model_calls": 6, "tool_calls": 1}
    assert {name: stop["budget_left"][name] for name in left} == left
    assert (stop["remainingModelCalls"], stop["remainingToolCalls"]) == (6, 1)
    assert 0 < stop["budget_left"]["deadline_ms"] <= 38_000


# ---- interactive ---------------------------------------------------------------------------------


@pytest.mark.accept("FIX-16")
def test_a_tool_that_times_out_is_stopped_and_never_shown_as_a_success() -> None:
    told_to_stop = threading.Event()

    def works_on(call: Any) -> None:
        if call.aborted.wait(PATIENCE_S):
            told_to_stop.set()

    desk = Desk([LOOKUP, DONE], on_lookup=works_on, tool_ms=30)

    run = desk.run()

    assert told_to_stop.wait(PATIENCE_S)
    assert (run.status, run.reason, run.observations) == ("failed", "tool-failed", ())
    trace = desk.fleet.trace(run)
    assert [call["ended"] for call in review.calls(trace)] == ["aborted: timed out"]
    assert details(trace, "result.verified") == details(trace, "result.classified") == []


class Found(BaseModel):
    item: str
    pages: int


@pytest.mark.accept("FIX-17")
@pytest.mark.parametrize("result", [{"item": "d1"}, {"item": "d1", "pages": "many"}, "d1", None])
def test_a_result_that_violates_its_schema_does_not_enter_the_state(result: Any) -> None:
    fleet = Fleet(database_url="sqlite://")
    tool = fleet.tool("lookup", side_effect="read", output=Found)(lambda arguments, call: result)
    seen: list[Any] = []

    def model(observation: dict[str, Any]) -> Any:
        seen.append(observation["observations"])
        return ask("lookup", item="d1")

    fleet.model("default", model)
    loop = AgentLoop(name="loop", actions=(tool,), verify=lambda answer, call: True)
    fleet.workflow(Workflow(name="exercise", stages=[loop]))

    run = fleet.run("exercise", goal="look something up")

    assert (run.status, run.reason) == ("failed", "tool-failed")
    assert (run.version, run.observations, dict(run.outputs)) == (0, (), {})
    assert seen == [[]]  # no next round was shown it
    assert stop_of(fleet.trace(run))["code"] == "result-violates-contract"
    fleet.close()


REASONING = "private-reasoning-of-the-model"


class Thinks:
    """A model that thinks aloud before each of its proposals."""

    def __init__(self, script: list[Any]) -> None:
        self.script = iter(script)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        yield Text(f"I think: {REASONING}")
        proposal = next(self.script)
        if proposal["kind"] == "tool":
            yield ToolCall("1", proposal["tool"], proposal["arguments"])
        else:
            yield ToolCall("1", "handrail.complete", {"answer": proposal["answer"]})
        yield Stop("end")


@pytest.mark.accept("FIX-19")
def test_the_trace_shows_decisions_calls_and_verdicts_and_no_reasoning() -> None:
    desk = Desk([])
    desk.fleet.model("default", Thinks([LOOKUP, SAVE, DONE]))

    run = desk.run()

    assert run.status == "completed"
    trace = desk.fleet.trace(run)
    shown = {event["type"] for event in trace}
    assert {
        "proposal.received",
        "policy.allowed",
        "tool.started",
        "result.classified",
        "result.verified",
        "completion.verified",
    } <= shown
    assert REASONING not in json.dumps(trace)


#: What differs from run to run although nothing else does.
OF_THE_RUN = {"tool_call_id", "evidence_ref", "deadline_ms", "timeout_ms", "remaining_budget"}


def told_by(desk: Desk, run: Run) -> list[Any]:
    """A run's trace without what differs in every run."""
    return [
        (
            event["type"],
            event["step"],
            {
                key: value
                for key, value in event["detail"].items()
                if key not in OF_THE_RUN | {"budget_left", "budget_used"}
            },
        )
        for event in desk.fleet.trace(run)
    ]


@pytest.mark.accept("FIX-20")
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_that_is_restarted_knows_nothing_of_an_earlier_fault(name: str) -> None:
    scenario, _ = SCENARIOS[name]
    before, unharmed = completes()
    scenario()  # with its fault

    desk = Desk([LOOKUP, SAVE, DONE])
    assert (desk.store, desk.calls, desk.fleet.runs()) == ({}, [], [])
    run = desk.run()

    assert run.version == unharmed.version and run.budget_used == unharmed.budget_used
    assert told_by(desk, run) == told_by(before, unharmed)
    assert desk.calls == before.calls


@pytest.mark.accept("FIX-20")
def test_a_run_that_is_started_anew_in_one_fleet_begins_at_the_beginning() -> None:
    failures = iter([hangs])
    desk = Desk(
        [LOOKUP, LOOKUP, SAVE, DONE],
        on_lookup=lambda call: next(failures, lambda call: None)(call),
        tool_ms=100,
    )
    failed = desk.run()
    assert failed.reason == "tool-failed"

    again = desk.run()

    assert (again.status, again.answer, again.tool_calls) == ("completed", "d1", 2)
    first = desk.model.requests[1].to_json()
    assert (first["observations"], first["state_version"], first["facts"]) == ([], 0, {})
    assert first["budget_left"]["tool_calls"] == BUDGET.tool_calls


@pytest.mark.accept("FIX-21")
def test_the_step_view_shows_the_five_steps_of_a_round() -> None:
    desk, run = completes()

    first, second, third = review.rounds(desk.fleet.trace(run), run.goal)

    names = ["observe", "decide", "act", "validate", "update"]
    for one in (first, second, third):
        assert [step["name"] for step in one["steps"]] == names
        assert [step["step"] for step in one["steps"]] == ["1/5", "2/5", "3/5", "4/5", "5/5"]
    [observed] = first["steps"][0]["output"]
    assert observed["goal"] == "save a draft"
    assert observed["allowed_tools"] == ["lookup", "saveDraft"]
    assert (observed["state_version"], observed["observations"]) == (0, 0)
    assert observed["remaining_budget"]["steps"] == 4
    kinds = [[said["event"] for said in step["output"]] for step in second["steps"]]
    assert kinds == [
        ["observation.built"],
        ["proposal.received"],
        ["policy.allowed", "tool.started"],
        ["result.classified", "result.verified"],
        ["state.transitioned"],
    ]
    assert second["steps"][0]["output"][0]["observations"] == 1
    [verdict] = third["steps"][3]["output"]
    assert verdict["verified"] is True
