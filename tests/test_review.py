"""Reading a trace back: the audit finds what is missing, the diagnosis shows what happened, and a
handoff leaves nothing out.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from handrail import AgentLoop, Budget, Check, Fleet, HandOff, Proceed, Workflow
from handrail.agent import review
from handrail.agent.status import RunStatus
from handrail.cli import app
from handrail.runs import Run
from tests.control import PATIENCE_S, ask, claim, details, until
from tests.test_exercise import DONE, LOOKUP, SAVE, SCENARIOS, Desk, completes, hangs
from tests.world import LEASE_MS, Outside, World, look, open_world, save


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An empty world on SQLite."""
    with open_world(request) as opened:
        yield opened


# ---- the audit -----------------------------------------------------------------------------------


@pytest.mark.accept("REV-13")
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_stored_proposal_has_its_answer_with_a_reason(name: str) -> None:
    scenario, _ = SCENARIOS[name]
    desk, run = scenario()
    events = desk.fleet.trace(run)

    assert review.findings(events, RunStatus(run.status)) == []
    proposed = review.proposals(events)
    assert len(proposed) == len(details(events, "proposal.received"))
    for proposal in proposed:
        assert proposal["answer"] and proposal["why"]


@pytest.mark.accept("REV-13")
@pytest.mark.parametrize("answer", ["policy.allowed", "completion.verified"])
def test_a_proposal_without_an_answer_is_found(answer: str) -> None:
    events = doctored(lambda event: event["type"] not in (answer, "run.stopped", "run.completed"))

    codes = [finding.code for finding in review.findings(events)]

    assert "unanswered-proposal" in codes


def doctored(keeps: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The trace of a completed run without some events, numbered anew."""
    desk, run = completes()  # each time another: its events are the caller's to change
    kept = [event for event in desk.fleet.trace(run) if keeps(event)]
    return [{**event, "seq": number} for number, event in enumerate(kept)]


#: What may be wrong with a trace: where it is changed, how, and what the audit calls that.
WRONG: Final[dict[str, tuple[str, Callable[[dict[str, Any]], object], str]]] = {
    "a rule is missing": ("policy.allowed", lambda e: e["detail"].pop("rule"), "unexplained"),
    "a reason is missing": ("run.stopped", lambda e: e["detail"].pop("reason"), "unexplained"),
    "a budget is missing": ("run.stopped", lambda e: e["detail"].pop("budget_left"), "unexplained"),
    "evidence is missing": ("run.stopped", lambda e: e["detail"].update(evidence_ref=""), "unexpl"),
    "a move is illegal": ("run.moved", lambda e: e["detail"].update(to="completed"), "illegal-m"),
    "a move begins elsewhere": ("run.moved", lambda e: e["detail"].update({"from": "x"}), "ille"),
    "a move is unheard of": ("run.moved", lambda e: e["detail"].update(event="x"), "illegal-m"),
    "an event is missing": ("tool.started", lambda e: e.update(seq=99), "gap"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_trace_is_found(what: str) -> None:
    kind, change, code = WRONG[what]
    events = doctored(lambda event: True)
    assert review.findings(events, RunStatus.COMPLETED) == []

    change(next(event for event in events if event["type"] == kind))

    found = review.findings(events, RunStatus.COMPLETED)
    assert found and found[0].code.startswith(code)


def test_a_status_that_the_moves_do_not_lead_to_is_found() -> None:
    events = doctored(lambda event: True)

    [finding] = review.findings(events, RunStatus.CANCELLED)

    assert finding.code == "another-status"
    assert "completed" in finding.problem and "cancelled" in finding.problem


# ---- the diagnosis command -----------------------------------------------------------------------


class Stored:
    """A ledger in a file, which `handrail trace` reads as an operator's command does."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = file
        self.url = f"sqlite:///{file}"
        monkeypatch.setenv("HANDRAIL_DATABASE_URL", self.url)
        monkeypatch.setenv("HANDRAIL_HOME", str(file.parent))
        monkeypatch.delenv("HANDRAIL_FLEET", raising=False)
        Fleet(database_url=self.url).upgrade_database()

    def desk(self, script: list[Any], **options: Any) -> Desk:
        return Desk(script, database_url=self.url, **options)

    def diagnosed(self, run_id: str, code: int = 0) -> dict[str, Any]:
        """What the diagnosis command says of a run; the same is printed for people."""
        ended = CliRunner().invoke(app, ["trace", run_id, "--check", "--json"])
        assert ended.exit_code == code, ended.output
        found: dict[str, Any] = json.loads(ended.stdout)
        printed = CliRunner().invoke(app, ["trace", run_id, "--check"])
        assert printed.exit_code == code
        for shown in _texts(found["stops"], found["effects"], found["findings"]):
            assert shown in printed.output
        return found


def _texts(*values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, list):
            yield from _texts(*value)
        elif isinstance(value, dict):
            yield from _texts(*(v for v in value.values() if not isinstance(v, dict)))
        elif isinstance(value, str):
            yield value


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    return Stored(tmp_path / "ledger.db", monkeypatch)


@pytest.mark.accept("REV-13")
def test_the_audit_command_fails_for_a_run_whose_proposal_has_no_answer(stored: Stored) -> None:
    desk = stored.desk([LOOKUP, DONE], verify=lambda answer, call: True)
    run = desk.run()
    assert stored.diagnosed(run.run_id)["ok"] is True

    with closing(sqlite3.connect(stored.file, isolation_level=None)) as behind_its_back:
        for (trigger,) in behind_its_back.execute(
            "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'handrail_trace'"
        ).fetchall():
            behind_its_back.execute(f"DROP TRIGGER {trigger}")
        behind_its_back.execute(
            "UPDATE handrail_trace SET events = replace(events, 'policy.allowed', 'policy.was')"
        )

    found = stored.diagnosed(run.run_id, code=1)
    assert "unanswered-proposal" in [finding["code"] for finding in found["findings"]]


@pytest.mark.accept("DIA-04")
@pytest.mark.parametrize("volatile", [False, True])
def test_a_tool_that_is_called_again_and_again(volatile: bool, stored: Stored) -> None:
    """Its result carries a number that is new each time; once the contract says so, it stops."""
    numbers = itertools.count()
    fleet = Fleet(database_url=stored.url)
    tool = fleet.tool(
        "lookup", side_effect="read", volatile=frozenset({"stamp"} if volatile else ())
    )(lambda arguments, call: {"fact": "known", "stamp": next(numbers)})
    fleet.model("default", lambda seen: ask("lookup", item="d1"))
    loop = AgentLoop(name="loop", actions=(tool,), verify=lambda *_: True, no_progress=None)
    fleet.workflow(Workflow(name="again", stages=[loop], budget=Budget(steps=6)))
    run = fleet.run("again", goal="any")

    proposals = stored.diagnosed(run.run_id)["proposals"]

    marks = [proposal["fingerprint"] for proposal in proposals]
    versions = [proposal["state_version"] for proposal in proposals]
    assert None not in marks
    if volatile:
        assert (run.reason, run.tool_calls) == ("repeated-proposal", 2)
        assert versions == [0, 1, 1] and marks[1] == marks[2]
        assert proposals[-1]["why"] == "repeated-proposal"
    else:
        assert (run.reason, run.tool_calls) == ("step-budget-exhausted", 6)
        assert versions == [*range(6)] and len(set(marks)) == 6
    fleet.close()


@pytest.mark.accept("DIA-05")
def test_the_model_says_done_and_the_product_is_missing(stored: Stored) -> None:
    """The check asks the store, whatever the claim says; the diagnosis shows what it found."""
    desk = stored.desk([claim("The draft d1 has been saved successfully."), SAVE, DONE])
    run = desk.run()

    found = stored.diagnosed(run.run_id)

    assert [verdict["verified"] for verdict in found["verifications"]] == [False, True]
    first, *_, last = found["proposals"]
    assert (first["kind"], first["answer"], first["why"]) == (
        "complete",
        "completion.verified",
        "not verified",
    )
    assert last["why"] == "verified"
    assert run.status == "completed" and len(desk.store) == 1


@pytest.mark.accept("DIA-06")
def test_a_read_under_way_when_the_user_cancelled(stored: Stored) -> None:
    under_way, told_to_stop = threading.Event(), threading.Event()

    def look(call: Any) -> None:
        under_way.set()
        if call.aborted.wait(PATIENCE_S):
            told_to_stop.set()

    desk = stored.desk([LOOKUP, SAVE, DONE], on_lookup=look)
    driven = desk.drive()
    assert under_way.wait(PATIENCE_S)
    desk.fleet.cancel("exercise")
    driven.join()

    found = stored.diagnosed("exercise")

    assert told_to_stop.wait(PATIENCE_S)
    [call] = found["calls"]
    assert (call["tool"], call["ended"]) == ("lookup", "aborted: cancelled")
    assert (found["status"], found["effects"]) == ("cancelled", [])
    assert desk.calls == ["lookup"]


@pytest.mark.accept("DIA-06")
def test_a_write_under_way_when_the_user_cancelled_is_verified(stored: Stored) -> None:
    under_way = threading.Event()

    def save_and_hang(call: Any) -> None:
        under_way.set()
        hangs(call)

    desk = stored.desk([SAVE, LOOKUP, DONE], on_save=save_and_hang)
    driven = desk.drive()
    assert under_way.wait(PATIENCE_S)
    desk.fleet.cancel("exercise")
    until(lambda: driven.status == "reconciling", "the doubt")
    desk.clock.advance(1_000)
    driven.join()

    found = stored.diagnosed("exercise")

    [call] = found["calls"]
    assert (call["tool"], call["ended"]) == ("saveDraft", "aborted: cancelled")
    [effect] = found["effects"]
    assert (effect["status"], effect["queries"]) == ("applied", ["applied"])
    assert effect["intent_key_hash"] == call["intent_key_hash"] == desk.keys[0]
    assert desk.calls == ["saveDraft"]  # nothing new was started


@pytest.mark.accept("DIA-07")
def test_a_write_that_timed_out_was_queried_first_and_kept_its_key(stored: Stored) -> None:
    """The planner proposes it again after the time-out: its record is found under the same key."""
    desk = stored.desk([SAVE, SAVE, DONE], on_save=hangs, tool_ms=100)
    run = desk.settle(desk.drive())

    found = stored.diagnosed("exercise")

    [effect] = found["effects"]
    assert (effect["status"], effect["attempts"], effect["queries"]) == ("applied", 1, ["applied"])
    assert [effect["intent_key_hash"]] == desk.keys
    [call] = found["calls"]
    assert (call["ended"], call["intent_key_hash"]) == ("aborted: timed out", desk.keys[0])
    assert desk.order == ["saveDraft", "query"]
    assert (run.status, len(desk.store)) == ("completed", 1)


@pytest.mark.accept("DIA-09")
@pytest.mark.parametrize("reason", ["completed", "step-budget-exhausted", "invalid-proposal"])
def test_every_stop_says_why(reason: str, stored: Stored) -> None:
    script = {
        "completed": [SAVE, DONE],
        "step-budget-exhausted": [LOOKUP, SAVE],
        "invalid-proposal": [ask("dropTable")],
    }[reason]
    desk = stored.desk(script)
    run = desk.run(budget={"steps": 2})

    found = stored.diagnosed(run.run_id)

    [stop] = found["stops"]
    assert (stop["reason"], run.reason) == (reason, reason)
    assert stop["evidence_ref"] == f"trace:{run.run_id}"
    assert stop["budget_left"]["model_calls"] == run.budget_left["model_calls"]


def test_the_rounds_of_a_run_are_shown_step_by_step(stored: Stored) -> None:
    desk = stored.desk([SAVE, DONE])
    run = desk.run()

    shown = CliRunner().invoke(app, ["trace", run.run_id, "--rounds"]).output
    rounds = json.loads(CliRunner().invoke(app, ["trace", run.run_id, "--rounds", "--json"]).stdout)

    assert shown.count("1/5 observe") == shown.count("5/5 update") == 2
    assert '"goal": "save a draft"' in shown
    assert [step["name"] for step in rounds[0]["steps"]] == [name for name, _ in review.STEPS]


# ---- handoffs ------------------------------------------------------------------------------------


def nothing_known(world: World) -> Run:
    """The workflow itself calls for a person, before anything is known."""
    world.workflow(stages=[Check("judge", lambda run: HandOff({"why": "a conflict"}))])
    return world.drive(world.start())


def something_known(world: World) -> Run:
    world.workflow(
        stages=[
            Check("facts", lambda run: Proceed({"amount_cents": 100})),
            Check("judge", lambda run: HandOff()),
        ]
    )
    return world.drive(world.start())


def no_proof(world: World) -> Run:
    tool = world.write_tool(key_valid_for_ms=0, query=False, side_effect="idempotent")
    world.workflow(world.read_tool(), tool, plan=[look(q=1), save(id=1)])
    world.service.script = ["lost"]
    return world.drive(world.start())


def worker_lost(world: World) -> Run:
    patient = Budget(deadline_ms=3_600_000)
    world.workflow(world.read_tool(), plan=[look(q=1)], budget=patient)
    run_id = world.start()
    while not world.fleet.get(run_id).rests:
        dies = Outside(when=lambda place: place == "before model")
        dies.then = dies.die
        world.step(run_id, outside=dies)
        world.advance(LEASE_MS)
        world.reconciler.sweep()
    return world.fleet.get(run_id)


def code_raises(world: World) -> Run:
    def broken(run: Any) -> Any:
        raise ZeroDivisionError

    world.workflow(stages=[Check("broken", broken)])
    return world.drive(world.start())


HANDOFFS: Final = {
    "handoff-required": something_known,
    "handoff-required at once": nothing_known,
    "unknown-effect": no_proof,
    "worker-lost": worker_lost,
    "handoff-required by a fault": code_raises,
}


@pytest.mark.accept("REV-16")
@pytest.mark.parametrize("how", HANDOFFS)
def test_a_handoff_has_state_evidence_and_action_or_says_that_there_is_none(
    how: str, world: World
) -> None:
    run = HANDOFFS[how](world)
    assert (run.status, run.reason) == ("handed_off", how.partition(" ")[0])

    [handoff] = world.ledger.people.handoffs(run_id=run.run_id)
    package = handoff["package"]

    assert (package["status"], package["state_version"]) == ("handed_off", run.version)
    assert (package["reason"], package["goal"]) == (run.reason, run.goal)
    for there in (
        package["stage"],
        package["verified"]["outputs"],
        package["verified"]["observations"],
        package["pending_action"],
        package["takeover"],
        package["budget_left"],
    ):
        assert there  # "none" where there is none, and never an empty place
    assert package["verified"]["outputs"] == (dict(run.outputs) or "none")
    assert package["verified"]["observations"] == (list(run.observations) or "none")
    if how == "unknown-effect":
        assert package["pending_action"]["tool"] == package["effect"]["tool"] == "save"
        assert package["takeover"] == "operations"
