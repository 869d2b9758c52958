"""A provider's signed report is evidence, once; whatever else arrives changes nothing."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from handrail import sign_report
from handrail.agent.budget import Budget
from handrail.agent.effects import upstream_key
from handrail.agent.fixed import Proceed
from handrail.agent.protocol import Reported
from handrail.agent.stage import Action
from handrail.agent.tools import FOREVER
from handrail.agent.workflow import Check, Commit
from handrail.canonical import Json
from handrail.errors import InvalidDefinition, ToolRefused
from handrail.reports import (
    AHEAD_MS,
    OLDEST_MS,
    InvalidReport,
    ReportFromTheFuture,
    ReportNotSigned,
    ReportRefused,
    ReportTooOld,
    ToolNotHere,
    UnknownIntent,
)
from handrail.tasks.calls import ToolCall
from tests.world import (
    KINDS,
    SECOND,
    SETTLED_MS,
    Outside,
    World,
    look,
    open_world,
    save,
)

SECRET: Final = "the provider's own secret"
ANOTHER: Final = "the secret of something else"
RECORD: Final[Json] = {"receipt": 1, "of": "save:1"}


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An empty world on each database."""
    with open_world(request) as opened:
        yield opened


def doubtful(world: World, way: str = "dropped", **tool: Any) -> str:
    """A run whose write is in doubt, of a tool whose provider reports."""
    world.workflow(world.write_tool(report_secret=SECRET, **tool), plan=[save(id=1)])
    world.service.script = [way]
    run = world.start(run_id="r")
    world.step(run)
    assert world.fleet.get(run).status == "reconciling"
    world.messages.clear()
    return run


def report(world: World, answer: str = "applied", *, secret: str = SECRET, **changes: Any) -> Any:
    """Have the provider report about the intent."""
    fields = {
        "intent_key": "save:1",
        "answer": answer,
        "evidence": RECORD if answer == "applied" else None,
        "tenant": "default",
        "report_id": "event-1",
        "sent_at": world.clock.ms,
        **changes,
    }
    signature = fields.pop("signature", None) or sign_report(secret, **fields)
    return world.fleet.report(**fields, signature=signature)


def snapshot(world: World) -> dict[str, list[dict[str, Any]]]:
    """Everything that a report could change."""
    tables = ("run", "effect", "evidence", "trace", "handoff", "effect_holder")
    return {
        table: sorted(world.rows(f"SELECT * FROM handrail_{table}"), key=str) for table in tables
    }


def reports(world: World) -> list[dict[str, Any]]:
    found = world.ledger.evidence(upstream_key("default", "save:1"))
    return [row["detail"] for row in found if row["kind"] == "report"]


# ---- what counts ---------------------------------------------------------------------------------


@pytest.mark.accept("LED-20")
@pytest.mark.parametrize("query", [True, False])
def test_a_signed_record_settles_a_doubt(
    world: World, query: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = doubtful(world, "lost", query=query)
    monkeypatch.setattr(world.fleet, "_publish", world.messages.extend)

    assert report(world) is Reported.PROVED

    assert [message.run_id for message in world.messages] == [run]
    effect = world.effect("save:1")
    assert effect["status"] == "applied" and effect["evidence"].startswith("report:")
    assert json.loads(effect["result"]) == RECORD
    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"] and world.service.calls["write r"] == 1
    (resolved,) = world.trace(run, "effect.resolved")
    assert resolved["detail"]["evidence_ref"] == effect["evidence"]


@pytest.mark.accept("LED-20")
def test_a_report_that_comes_again_counts_once(world: World) -> None:
    doubtful(world)
    sent_at = world.clock.ms
    assert report(world, "pending", sent_at=sent_at) is Reported.KEPT
    before = snapshot(world)
    world.advance(SECOND)

    assert report(world, "pending", sent_at=sent_at) is Reported.REPEATED
    # The same event under other words is the same event: the first counts.
    assert report(world) is Reported.REPEATED

    assert snapshot(world) == before
    assert report(world, report_id="event-2") is Reported.PROVED
    assert [detail["report_id"] for detail in reports(world)] == ["event-1", "event-2"]


def test_of_many_that_report_one_event_at_once_one_counts(world: World) -> None:
    doubtful(world)
    with ThreadPoolExecutor(6) as pool:
        came_to = list(pool.map(lambda _: report(world), range(6)))

    assert sorted(came_to) == sorted([Reported.PROVED] + [Reported.REPEATED] * 5)
    assert len(reports(world)) == 1


@pytest.mark.parametrize("executed", [False, True])
def test_a_report_whose_answer_was_lost_counts_once(world: World, executed: bool) -> None:
    doubtful(world)
    world.database.lose(1, executed=executed, only="COMMIT")

    assert report(world) is Reported.PROVED
    assert world.database.lost and len(reports(world)) == 1
    assert report(world) is Reported.REPEATED


@pytest.mark.accept("LED-20")
def test_an_absence_that_was_believed_is_doubted_again(world: World) -> None:
    """The run went on to wait for its turn; a record says that the write has landed after all."""
    run = absent_by_query(world)
    assert world.effect("save:1")["status"] == "absent"

    assert report(world) is Reported.CONTRARY

    assert world.effect("save:1")["status"] == "unknown"
    assert world.fleet.get(run).status == "reconciling"
    world.service.hidden = False
    world.service.records["save:1"] = RECORD
    assert world.drive(run).status == "completed" and world.service.calls["write r"] == 1


def absent_by_query(world: World) -> str:
    run = doubtful(world)
    world.service.hidden = True
    while world.fleet.get(run).status == "reconciling":
        world.sweep_when_due(run)
    return run


def test_a_record_that_contradicts_how_a_run_has_ended_is_a_persons(world: World) -> None:
    run = doubtful(world)
    world.fleet.cancel(run)
    assert world.drive(run).status == "cancelled"

    assert report(world) is Reported.CONTRARY

    assert world.fleet.get(run).status == "cancelled"
    assert world.effect("save:1")["status"] == "contradicted"
    assert [handoff["reason"] for handoff in world.ledger.people.handoffs()] == ["contradiction"]


def test_while_a_sender_is_at_it_the_sender_has_the_word(world: World) -> None:
    world.workflow(world.write_tool(report_secret=SECRET), plan=[save(id=1)])
    heard: list[Reported] = []
    run = world.start(run_id="r")
    outside = Outside(
        when=lambda place: place == "before write tool",
        then=lambda: heard.append(world.meanwhile(lambda: report(world))),
    )
    world.step(run, outside=outside)

    assert heard == [Reported.KEPT]
    effect = world.effect("save:1")
    assert effect["status"] == "applied" and effect["evidence"].startswith("receipt:")
    assert world.drive(run).status == "completed"


# ---- what comes while its sender has the word ----------------------------------------------------


def reported_under_way(world: World, way: str, answer: str = "applied", **tool: Any) -> str:
    """A run whose provider has reported about its write before the sender could say anything."""
    world.workflow(world.write_tool(report_secret=SECRET, **tool), plan=[save(id=1)])
    run = world.start(run_id="r")
    world.service.script = [way]
    heard: list[Reported] = []
    outside = Outside(
        when=lambda place: place == "before write tool",
        then=lambda: heard.append(world.meanwhile(lambda: report(world, answer))),
    )
    world.step(run, outside=outside)
    assert heard == [Reported.KEPT]
    assert world.row(run)["status"] == "reconciling"
    world.messages.clear()
    return run


@pytest.mark.accept("LED-20")
@pytest.mark.parametrize("tool", [{}, {"query": False, "key_valid_for_ms": 0}])
def test_a_report_that_was_kept_settles_the_doubt_that_its_sender_leaves(
    world: World, tool: dict[str, Any]
) -> None:
    """Nobody has to be asked: neither the service nor, where that cannot be, a person."""
    run = reported_under_way(world, "lost", **tool)

    world.sweep_when_due(run)

    effect = world.effect("save:1")
    assert effect["status"] == "applied" and effect["evidence"].startswith("report:")
    assert json.loads(effect["result"]) == RECORD
    assert world.drive(run).status == "completed"
    assert world.service.calls["query r"] == 0 and world.service.calls["write r"] == 1
    (resolved,) = world.trace(run, "effect.resolved")
    assert resolved["detail"]["evidence_ref"] == effect["evidence"]
    used = world.ledger.evidence(effect["id"])[-1]
    assert used["kind"] == "report-used"
    assert used["detail"] == {"evidence": effect["evidence"]}


@pytest.mark.accept("LED-20")
def test_a_report_that_was_kept_counts_where_the_sender_is_lost(world: World) -> None:
    world.workflow(world.write_tool(report_secret=SECRET), plan=[save(id=1)])
    run = world.start(run_id="r")
    outside = Outside(when=lambda place: place == "after write tool")

    def reported_and_gone() -> None:
        assert world.meanwhile(lambda: report(world)) is Reported.KEPT
        outside.die()

    outside.then = reported_and_gone
    world.step(run, outside=outside)

    assert world.drive(run).status == "completed"
    assert world.service.calls["query r"] == 0
    assert world.effect("save:1")["evidence"].startswith("report:")


@pytest.mark.accept("LED-20")
@pytest.mark.parametrize("answer", ["absent", "pending"])
def test_no_report_that_was_kept_is_a_negative_verdict(world: World, answer: str) -> None:
    run = reported_under_way(world, "lost", answer)

    world.sweep_when_due(run)

    assert world.service.calls["query r"] == 1  # whose record it is that counts
    assert world.effect("save:1")["evidence"].startswith("query:")
    assert world.drive(run).status == "completed"


def test_a_report_that_was_kept_and_does_not_fit_settles_nothing(world: World) -> None:
    run = reported_under_way(
        world, "lost", query=False, key_valid_for_ms=0, belongs_to=lambda found, run: False
    )

    ended = world.drive(run)

    assert (ended.status, ended.reason) == ("handed_off", "unknown-effect")


@pytest.mark.accept("LED-20")
def test_a_report_that_was_kept_undoes_the_write_of_a_cancelled_run(world: World) -> None:
    world.workflow(world.compensable_tool(report_secret=SECRET), plan=[save(id=1)])
    run = world.start(run_id="r")
    world.service.script = ["lost"]
    outside = Outside(when=lambda place: place == "before write tool")

    def reported_and_cancelled() -> None:
        assert world.meanwhile(lambda: report(world)) is Reported.KEPT
        world.meanwhile(lambda: world.fleet.cancel(run))

    outside.then = reported_and_cancelled
    world.step(run, outside=outside)

    assert world.drive(run).status == "compensated"
    assert world.service.performed == ["save:1", "undo:1"]
    assert world.service.calls["query r"] == 0


def test_a_report_that_comes_before_a_doubt_is_sent_again_counts_after_it(world: World) -> None:
    """The run is about to send the intent again, under its key: the sender will know."""
    run = doubtful(world, "lost", query=False)
    world.sweep_when_due(run)
    assert world.row(run)["status"] == "running"
    assert world.effect("save:1")["status"] == "unknown"
    assert report(world) is Reported.KEPT

    world.service.script = ["lost"]
    world.step(run)
    assert world.row(run)["status"] == "reconciling"
    world.sweep_when_due(run)

    assert world.effect("save:1")["evidence"].startswith("report:")
    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"] and world.service.calls["write r"] == 2


def test_about_what_is_proved_a_report_is_evidence_and_no_more(world: World) -> None:
    world.workflow(world.write_tool(report_secret=SECRET), plan=[save(id=1)])
    run = world.drive(world.start(run_id="r"))

    assert report(world) is Reported.KEPT
    assert report(world, "absent", report_id="event-2") is Reported.KEPT

    assert world.fleet.get(run.run_id) == run
    assert world.effect("save:1")["status"] == "applied" and len(reports(world)) == 2


@pytest.mark.accept("LED-20")
@pytest.mark.parametrize("answer", ["absent", "pending"])
def test_a_reported_absence_proves_none_however_often_it_is_said(world: World, answer: str) -> None:
    """Nobody here knows what the provider's clock was when it looked."""
    run = doubtful(world)
    world.advance(SETTLED_MS + SECOND)
    for number in range(20):
        assert report(world, answer, report_id=f"event-{number}") is Reported.KEPT

    assert world.effect("save:1")["status"] == "unknown"
    assert world.effect("save:1")["absences"] == 0
    assert world.fleet.get(run).status == "reconciling"


def test_a_reported_absence_has_the_service_asked_at_once(world: World) -> None:
    run = doubtful(world)
    world.service.hidden = True
    while world.effect("save:1")["absences"] == 0:
        world.sweep_when_due(run)
    assert world.row(run)["wake_at"] > world.clock.ms

    report(world, "absent")
    world.reconciler.sweep()

    assert world.effect("save:1")["status"] == "absent"  # by the second query, no time has passed


def test_a_query_that_could_prove_nothing_yet_is_not_spent_on_a_report(world: World) -> None:
    run = doubtful(world)
    world.sweep_when_due(run)  # the early one
    left, at = world.effect("save:1")["queries_left"], world.row(run)["wake_at"]

    for number in range(5):
        report(world, "absent", report_id=f"event-{number}")
    world.reconciler.sweep()

    assert (world.effect("save:1")["queries_left"], world.row(run)["wake_at"]) == (left, at)


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        ({"postcondition": lambda arguments, found: found["of"] == "me"}, "record-does-not-fit"),
        ({"belongs_to": lambda found, run: False}, "record-of-another-subject"),
    ],
)
def test_a_signed_record_that_is_not_ours_proves_nothing(
    world: World, terms: dict[str, Any], problem: str
) -> None:
    run = doubtful(world, **terms)

    assert report(world) is Reported.KEPT

    assert world.fleet.get(run).status == "reconciling"
    assert [detail["problem"] for detail in reports(world)] == [problem]


def test_it_counts_for_the_run_that_has_sent_the_intent_last(world: World) -> None:
    """The first run's attempt came to nothing; a second has sent the same intent."""
    tool = world.write_tool(report_secret=SECRET)
    world.workflow(tool, plan=[save(id=1)])
    world.service.script = ["refused", "lost"]
    assert world.drive(world.start(run_id="a")).status == "failed"
    second = world.start(run_id="b")
    world.step(second)

    assert report(world) is Reported.PROVED

    assert world.drive(second).status == "completed"
    assert world.fleet.get("a").status == "failed"


def test_a_report_about_a_compensation_settles_that(world: World) -> None:
    """What undoes a write is an intent of its own, with a secret of its own."""
    tool = world.compensable_tool(undo={"report_secret": SECRET})
    world.workflow(tool, plan=[save(id=1)])
    run = world.start(run_id="r")
    world.service.script = ["ok", "lost"]
    outside = Outside(when=lambda place: place == "after write tool")
    outside.then = lambda: world.fleet.cancel(run)
    world.step(run, outside=outside)
    while not world.rows("SELECT id FROM handrail_effect WHERE status = 'unknown'"):
        world.sweep_when_due(run)

    record: Json = {"receipt": 2, "of": "undo:1"}
    assert report(world, intent_key="undo:1", evidence=record) is Reported.PROVED

    assert world.fleet.get(run).status == "compensated"
    assert world.effect("save:1")["status"] == "compensated"
    assert world.service.performed == ["save:1", "undo:1"]


# ---- what does not -------------------------------------------------------------------------------


@pytest.mark.accept("LED-20")
@pytest.mark.parametrize("name", ["signature", "secret", "empty", "none", "field", "unsigned"])
def test_what_is_not_signed_changes_nothing(world: World, name: str) -> None:
    doubtful(world)
    before = snapshot(world)
    good = sign_report(
        SECRET,
        intent_key="save:1",
        answer="absent",
        report_id="event-1",
        sent_at=world.clock.ms,
    )
    wrong: dict[str, dict[str, Any]] = {
        "signature": {"signature": good[:-1] + ("0" if good[-1] != "0" else "1")},
        "secret": {"secret": ANOTHER},
        "empty": {"signature": " "},
        "none": {"signature": 7},
        "field": {"signature": good},  # of a report that said something else
        "unsigned": {"signature": "é"},
    }

    with pytest.raises(ReportNotSigned) as refused:
        report(world, **wrong[name])

    assert refused.value.code == "report-not-signed"
    assert snapshot(world) == before


@pytest.mark.accept("LED-20")
@pytest.mark.parametrize(
    ("age_ms", "refusal"),
    [
        (OLDEST_MS, None),
        (OLDEST_MS + 1, ReportTooOld),
        (-AHEAD_MS, None),  # clocks are never quite together
        (-AHEAD_MS - 1, ReportFromTheFuture),
    ],
)
def test_a_report_counts_for_a_while(
    world: World, age_ms: int, refusal: type[ReportRefused] | None
) -> None:
    doubtful(world)
    before = snapshot(world)
    sent_at = world.clock.ms - age_ms
    if refusal is None:
        assert report(world, sent_at=sent_at) is Reported.PROVED
        return

    with pytest.raises(refusal):
        report(world, sent_at=sent_at)

    assert snapshot(world) == before


@pytest.mark.accept("LED-20")
def test_another_tenants_report_changes_nothing(world: World) -> None:
    """Each is signed with a good secret: a report is about an intent of its own tenant."""
    doubtful(world)
    before = snapshot(world)

    with pytest.raises(UnknownIntent):
        report(world, tenant="another")
    moved = sign_report(
        SECRET,
        intent_key="save:1",
        answer="applied",
        evidence=RECORD,
        tenant="another",
        report_id="event-1",
        sent_at=world.clock.ms,
    )
    with pytest.raises(ReportNotSigned):
        report(world, signature=moved)

    assert snapshot(world) == before


def test_what_was_never_sent_cannot_be_reported(world: World) -> None:
    world.workflow(world.write_tool(report_secret=SECRET), plan=[save(id=1)])
    outside = Outside(when=lambda place: place == "before acquire")
    outside.then = outside.die
    world.step(world.start(run_id="r"), outside=outside)
    assert world.effect("save:1")["status"] == "planned"

    for intent in ("save:1", "save:2"):
        with pytest.raises(UnknownIntent) as refused:
            report(world, intent_key=intent)
        assert refused.value.code == "unknown-intent"
        with pytest.raises(ReportNotSigned):  # and whoever cannot sign does not learn even that
            report(world, intent_key=intent, secret=ANOTHER)


def test_another_tools_secret_is_none_of_this_ones(world: World) -> None:
    world.write_tool("other", report_secret=ANOTHER)
    doubtful(world)

    with pytest.raises(ReportNotSigned):
        report(world, secret=ANOTHER)


def test_a_tool_without_a_secret_is_reported_about_by_nobody(world: World) -> None:
    world.write_tool("other", report_secret=ANOTHER)
    world.workflow(world.write_tool(), plan=[save(id=1)])
    world.step(world.start(run_id="r"))

    with pytest.raises(ReportNotSigned):
        report(world, secret=ANOTHER)


def test_without_the_workflows_code_nothing_is_judged(world: World) -> None:
    doubtful(world)
    world.fleet.workflows.clear()

    with pytest.raises(ToolNotHere) as refused:
        report(world)

    assert refused.value.code == "report-tool-not-here"
    assert world.effect("save:1")["status"] == "unknown" and reports(world) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"answer": "maybe"},
        {"answer": None},
        {"evidence": None},  # of what was applied there is a record
        {"evidence": {"a": float("nan")}},
        {"evidence": {"a": object()}},
        {"evidence": "a" * 64_001},
        {"intent_key": ""},
        {"intent_key": 7},
        {"tenant": ""},
        {"report_id": ""},
        {"report_id": "a b"},
        {"report_id": "a" * 201},
        {"sent_at": "now"},
        {"sent_at": 1.5},
        {"sent_at": True},
    ],
)
def test_a_report_that_is_not_formed_as_it_must_be_is_refused(
    world: World, wrong: dict[str, Any]
) -> None:
    doubtful(world)
    before = snapshot(world)

    with pytest.raises(InvalidReport):
        report(world, **wrong, signature="a")
    with pytest.raises(InvalidReport):
        report(world, **wrong)  # signing refuses it as well

    assert snapshot(world) == before


@pytest.mark.parametrize("text", ["\x00", "\ud800", "ä" * 40, "\u202e"])
def test_a_report_may_say_anything(world: World, text: str) -> None:
    doubtful(world)
    record: Json = {"receipt": 1, "of": text}

    assert report(world, evidence=record) is Reported.PROVED
    assert reports(world)[0]["record"] == record


# ---- a report that comes while the sender has the word -------------------------------------------

ENOUGH: Final = Budget(steps=20, model_calls=12, tool_calls=24, deadline_ms=600_000)


def committing(world: World, **tool: Any) -> None:
    """A workflow that writes, and sends it again up to five times."""
    save_it = world.write_tool(report_secret=SECRET, **tool)
    commit = Commit("commit", lambda run: Action(save_it, {"id": 1}), save_it, attempts=5)
    world.workflow(stages=[commit], budget=ENOUGH)


@pytest.mark.parametrize("retryable", [False, True])
@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("key_valid_for_ms", [FOREVER, 0])
def test_a_sender_that_is_refused_does_not_outweigh_the_record_that_its_provider_has_sent(
    world: World, retryable: bool, cancel: bool, key_valid_for_ms: int
) -> None:
    """The client's first request took effect, and the one that it sent again was refused."""
    committing(world, key_valid_for_ms=key_valid_for_ms)
    came: list[Reported] = []

    def performed_and_refused(arguments: Any, call: ToolCall) -> Json:
        world.service.arrive(call, arguments, key_valid_for_ms)
        came.append(world.meanwhile(lambda: report(world)))
        if cancel:
            world.meanwhile(lambda: world.fleet.cancel(call.run_id))
        raise ToolRefused("duplicate", retryable=retryable)

    world.service.script = [performed_and_refused]
    done = world.drive(world.start())

    assert came == [Reported.KEPT]
    assert done.status == ("handed_off" if cancel else "completed")
    assert world.effect("save:1")["status"] == "applied"
    assert world.service.performed == ["save:1"]


def test_a_record_of_an_earlier_attempt_outweighs_the_refusal_of_a_later_one(world: World) -> None:
    committing(world, key_valid_for_ms=0)
    came: list[Reported] = []

    def refused_meanwhile(arguments: Any, call: ToolCall) -> Json:
        world.service.air = [(0, arrival) for _, arrival in world.service.air]
        world.service.land()
        came.append(world.meanwhile(lambda: report(world)))
        raise ToolRefused("busy", retryable=True)

    world.service.script = ["late:600000", refused_meanwhile]
    done = world.drive(world.start())

    assert came == [Reported.KEPT]
    assert done.status == "completed" and world.service.performed == ["save:1"]


def test_the_result_of_a_refused_plan_is_not_taken_for_that_of_the_next(world: World) -> None:
    """The same key, and other arguments: what took effect is not what is about to be written."""
    amount = [1]
    tool = world.write_tool(report_secret=SECRET, intent=lambda arguments, run: "save:1")

    def write(run: Any) -> Action:
        return Action(tool, {"id": 1, "amount": run.outputs["plan"]})

    plan = Check("plan", lambda run: Proceed(amount[0]))
    world.workflow(stages=[plan, Commit("commit", write, tool, replan="plan")], budget=ENOUGH)

    def performed_and_refused(arguments: Any, call: ToolCall) -> Json:
        world.service.arrive(call, arguments, FOREVER)
        amount[0] = 2
        raise ToolRefused("changed", changed=True)

    world.service.script = [performed_and_refused]
    run = world.start()
    world.step(run)
    world.lock.away = True
    world.step(run)
    assert report(world) is Reported.CONTRARY
    world.lock.away = False
    done = world.drive(run)

    assert (done.status, done.reason) == ("failed", "intent-conflict")
    assert world.effect("save:1")["status"] == "contradicted"
    assert len(world.rows("SELECT id FROM handrail_handoff WHERE status = 'open'")) == 1


# ---- the secret and the signature ----------------------------------------------------------------


def test_the_signature_is_what_it_is_said_to_be() -> None:
    """HMAC-SHA256 over canonical JSON of all fields: anybody can make one."""
    fields: dict[str, Any] = {
        "intent_key": "refund:order-42",
        "answer": "applied",
        "evidence": {"amount_cents": 500, "id": "re_1"},
        "tenant": "default",
        "report_id": "evt_1",
        "sent_at": 1_800_000_000_000,
    }
    text = json.dumps(["handrail-report-1", fields], sort_keys=True, separators=(",", ":"))
    expected = hmac.new(SECRET.encode(), text.encode(), hashlib.sha256).hexdigest()

    assert sign_report(SECRET, **fields) == expected


@pytest.mark.parametrize("secret", ["", "too short", 7, b"bytes that are long enough"])
def test_a_secret_that_protects_nothing_is_refused(world: World, secret: Any) -> None:
    with pytest.raises(InvalidDefinition, match="report_secret") as refused:
        world.write_tool(report_secret=secret)
    assert not str(secret) or str(secret) not in str(refused.value)


def test_a_read_has_nothing_to_report(world: World) -> None:
    with pytest.raises(InvalidDefinition, match="report_secret"):
        world.read_tool(report_secret=SECRET)


def test_the_secret_is_shown_nowhere(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """In no representation, no trace, no table, no error, no log."""
    caplog.set_level("DEBUG")
    tool = world.write_tool(report_secret=SECRET)
    world.workflow(world.read_tool(), tool, plan=[look(q=1), save(id=1)])
    world.service.script = ["lost"]
    run = world.start(run_id="r")
    world.step(run)
    world.step(run)
    with pytest.raises(ReportNotSigned) as refused:
        report(world, secret=ANOTHER)
    report(world)
    world.drive(run)

    shown = [repr(tool), str(tool), repr(refused.value), str(refused.value), caplog.text]
    shown += [repr(world.trace(run)), repr(snapshot(world)), repr(world.fleet.get(run))]
    assert not [text for text in shown if SECRET in text]
