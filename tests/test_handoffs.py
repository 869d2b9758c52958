"""Handoffs: the queue, what a person is shown, and what each resolution does and refuses to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from handrail.agent import protocol
from handrail.agent.approvals import ApprovalRefused
from handrail.agent.budget import TASK_TYPES
from handrail.agent.effects import Absent, Applied
from handrail.agent.people import InvalidWords, NotAllowed
from handrail.agent.resolution import Resolution, ResolutionRefused
from handrail.agent.stage import End, Succeeded
from handrail.agent.tools import FOREVER, Principal
from handrail.desk import Handoff, InvalidQuery, InvalidTime, NotYours, UnknownMatter
from handrail.ledger.errors import UnknownRun
from handrail.ledger.ledger import Ledger
from handrail.testing.people import ADMIN, APPROVER, OPERATOR, agree, disagree
from tests.world import (
    LEASE_MS,
    SECOND,
    SETTLED_MS,
    World,
    look,
    open_world,
    save,
    save_for_goal,
)

MINUTE: Final = 60 * SECOND
BOB: Final = Principal("bob", roles=frozenset({"operator"}))
VIEWER: Final = Principal("vic", roles=frozenset({"viewer"}))


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


def handed_off(world: World, *script: str, **contract: Any) -> str:
    """A run whose write is in doubt, and that nobody but a person can settle."""
    options = {"key_valid_for_ms": 0, "query": False, "guarantee": "person", **contract}
    if options["guarantee"] == "person":
        options |= {"side_effect": "irreversible", "approval": "on-write"}
    tool = world.write_tool(**options)
    if options.get("side_effect") == "irreversible":
        from handrail.agent.fixed import Done
        from handrail.agent.stage import Action
        from handrail.agent.workflow import Check, Commit, Confirm

        def action(run: Any) -> Action:
            return Action(tool, {"id": 1})

        world.workflow(
            stages=[
                Confirm("confirm", action=action),
                Commit("commit", action=action, tool=tool),
                Check("tell", judge=lambda run: Done("told")),
            ]
        )
    else:
        world.workflow(tool, plan=[save(id=1)])
    world.service.script = [*(script or ("dropped",))]
    run = world.start()
    world.step(run)
    if world.row(run)["status"] == "awaiting_approval":
        agree(world.fleet, run)
    found = world.drive(run)
    assert found.status == "handed_off", found
    return run


def matter(world: World, run: str) -> Handoff:
    (row,) = world.fleet.desk.handoffs(by=OPERATOR, run=run)
    return world.fleet.desk.handoff(row["id"], by=OPERATOR)


def resolve(world: World, run: str, how: Resolution | str, **options: Any) -> Any:
    given = {"by": OPERATOR, "reason": "looked at it", **options}
    return world.fleet.desk.resolve(matter(world, run).id, how, **given)


def refused(world: World, run: str, how: Resolution | str, **options: Any) -> str:
    before = (world.row(run), world.rows("SELECT * FROM handrail_effect"))
    with pytest.raises(ResolutionRefused) as caught:
        resolve(world, run, how, **options)
    assert (world.row(run), world.rows("SELECT * FROM handrail_effect")) == before
    return caught.value.problem


def says_late(world: World, run: str, intent_key: str, end: End, reply: Succeeded | None) -> None:
    """The sender of a run's write says what it knows, when the run has long been decided about."""
    effect, workflow = world.effect(intent_key), world.fleet.workflows["draft@1"]
    by = effect["dispatcher"]
    said = protocol.Outcome(
        effect["id"], effect["token"], end, reply, evidence_id="late", dispatcher=by
    )
    world.ledger.rule(run, lambda seen: protocol.outcome(seen, workflow, said))


def choice(world: World, run: str, how: Resolution) -> Any:
    (found,) = [one for one in matter(world, run).choices if one.resolution is how]
    return found


# ---- what a person sees --------------------------------------------------------------------------


@pytest.mark.accept("TRM-15", "TRM-14")
def test_a_handoff_has_everything_that_a_person_needs(world: World) -> None:
    run = handed_off(world)
    shown = matter(world, run)

    assert shown.package["goal"] == run
    assert shown.package["verified"]["outputs"]["confirm"]["approvers"] == ["approver"]
    assert shown.package["pending_action"]["arguments"] == {"id": 1} == dict(shown.sent_as or {})
    assert shown.package["budget_left"]["tool_calls"] >= 0 and shown.remaining_ms > 0
    assert shown.package["trace"] == f"trace:{run}"
    assert shown.package["problem"] and shown.package["reason"] == "unknown-effect"
    assert [e["kind"] for e in shown.evidence] == ["outcome"]
    assert {one.resolution for one in shown.choices} == set(Resolution)
    assert all(one.consequence for one in shown.choices)


@pytest.mark.accept("TRM-16")
def test_a_question_is_in_the_queue_with_its_words(world: World) -> None:
    world.workflow(world.read_tool(), plan=[{"kind": "clarify", "question": "Which order?"}])
    run = world.start()
    world.step(run)
    shown = matter(world, run)

    assert world.row(run)["status"] == "awaiting_input"
    assert shown.package["question"] == "Which order?" and shown.package["goal"] == run
    assert shown.row["reason"] == "clarification-required" and shown.choices == ()


def test_the_queue_is_ordered_by_urgency_and_age_and_can_be_narrowed(world: World) -> None:
    first = handed_off(world)
    world.advance(MINUTE)
    desk = world.fleet.desk
    world.workflow(
        world.read_tool(),
        plan=[{"kind": "clarify", "question": "Which?"}],
        name="ask",
    )
    asks = world.start("ask")
    world.step(asks)

    assert [row["run_id"] for row in desk.handoffs(by=VIEWER)] == [first, asks]
    assert [row["run_id"] for row in desk.handoffs(by=VIEWER, workflow="ask")] == [asks]
    assert [row["run_id"] for row in desk.handoffs(by=VIEWER, tool="save")] == [first]
    assert [r["run_id"] for r in desk.handoffs(by=VIEWER, reason="unknown-effect")] == [first]
    assert [row["run_id"] for row in desk.handoffs(by=VIEWER, older_than_ms=MINUTE)] == [first]
    assert [row["run_id"] for row in desk.handoffs(by=VIEWER, tenant="other")] == []
    assert len(desk.handoffs(by=VIEWER, limit=1)) == 1
    assert desk.digest(by=VIEWER)[0]["handoffs"] == 1
    with pytest.raises(InvalidQuery):
        desk.handoffs(by=VIEWER, limit=0)
    with pytest.raises(InvalidQuery):
        desk.handoffs(by=VIEWER, older_than_ms=-1)


def test_people_of_another_tenant_do_not_find_it(world: World) -> None:
    """S16: every look and every act."""
    run = handed_off(world)
    handoff = matter(world, run).id
    eve = Principal("eve", roles=frozenset({"operator"}), tenants=frozenset({"other"}))
    desk = world.fleet.desk

    assert desk.handoffs(by=eve) == [] == desk.handoffs(by=eve, tenant="default")
    assert desk.digest(by=eve) == [] == desk.audit(by=eve)
    for act in (
        lambda: desk.handoff(handoff, by=eve),
        lambda: desk.claim(handoff, by=eve),
        lambda: desk.release(handoff, by=eve),
        lambda: desk.assign(handoff, "eve", by=eve),
        lambda: desk.snooze(handoff, for_ms=1, by=eve),
        lambda: desk.comment(handoff, "mine", by=eve),
        lambda: desk.query(handoff, by=eve),
        lambda: desk.resolve(handoff, "failed", by=eve, reason="x", evidence="x"),
    ):
        with pytest.raises(UnknownMatter):
            act()
    with pytest.raises(UnknownRun):  # as one that is not there
        world.fleet.cancel(run, by=eve)


@pytest.mark.parametrize("who", [VIEWER, APPROVER])
def test_only_operators_act(world: World, who: Principal) -> None:
    """S20."""
    run = handed_off(world)
    handoff = matter(world, run).id
    desk = world.fleet.desk
    for act in (
        lambda: desk.claim(handoff, by=who),
        lambda: desk.comment(handoff, "mine", by=who),
        lambda: desk.query(handoff, by=who),
        lambda: desk.resolve(handoff, "failed", by=who, reason="x", evidence="x"),
        lambda: desk.next(by=who),
        lambda: world.fleet.cancel(run, by=who),
        lambda: world.fleet.pause(reason="x", by=who),
    ):
        with pytest.raises(NotAllowed):
            act()
    assert desk.handoff(handoff, by=who).open


# ---- the queue at work ---------------------------------------------------------------------------


def test_a_claimed_matter_is_one_persons_until_the_claim_is_over(world: World) -> None:
    run = handed_off(world)
    desk, handoff = world.fleet.desk, matter(world, run).id
    desk.claim(handoff, by=OPERATOR, for_ms=MINUTE)

    with pytest.raises(NotYours):
        desk.claim(handoff, by=BOB)
    assert refused(world, run, "completed", by=BOB, evidence="mail") == "claimed"
    world.advance(MINUTE)
    assert desk.claim(handoff, by=BOB)["claimed_by"] == "bob"
    desk.release(handoff, by=BOB)
    assert resolve(world, run, "completed", evidence="mail").status == "completed"
    with pytest.raises(NotYours):
        desk.claim(handoff, by=BOB)


def test_the_next_is_the_most_urgent_that_nobody_is_at(world: World) -> None:
    first = handed_off(world)
    desk, handoff = world.fleet.desk, matter(world, first).id
    taken = desk.next(by=OPERATOR)
    assert taken is not None and taken.id == handoff and taken.row["claimed_by"] == "operator"

    assert desk.next(by=BOB) is None
    desk.assign(handoff, "bob", by=OPERATOR)
    desk.release(handoff, by=OPERATOR)
    assert desk.next(by=OPERATOR) is None, "it is assigned to somebody else"
    assert desk.next(by=BOB) is not None
    desk.assign(handoff, None, by=BOB)
    desk.release(handoff, by=BOB)
    desk.snooze(handoff, for_ms=MINUTE, by=BOB)
    assert desk.next(by=OPERATOR) is None
    world.advance(MINUTE)
    assert desk.next(by=OPERATOR) is not None


def test_comments_stay_with_it(world: World) -> None:
    run = handed_off(world)
    desk, handoff = world.fleet.desk, matter(world, run).id
    desk.comment(handoff, "called the\nbank \x00\ud800", by=OPERATOR)
    desk.comment(handoff, "they say no", by=BOB)

    noted = desk.handoff(handoff, by=VIEWER).row["comments"]
    assert [(one["who"], one["text"]) for one in noted] == [
        ("operator", "called the\nbank \x00\ud800"),
        ("bob", "they say no"),
    ]
    with pytest.raises(InvalidWords):
        desk.comment(handoff, "  ", by=OPERATOR)


def test_what_waits_too_long_is_escalated_once(world: World) -> None:
    run = handed_off(world)
    assert world.row(run)["wake_at"] == world.clock.ms + world.ledger.escalate_ms
    world.advance(world.ledger.escalate_ms)
    world.sweep_when_due(run)
    row = matter(world, run).row

    assert row["escalated_at"] is not None and row["priority"] == 1
    assert world.row(run)["wake_at"] is None, "it is looked at again and again"
    assert world.row(run)["status"] == "handed_off"


def test_what_a_person_has_put_aside_is_escalated_when_it_comes_back(world: World) -> None:
    run = handed_off(world)
    escalate_ms = world.ledger.escalate_ms
    world.fleet.desk.snooze(matter(world, run).id, for_ms=escalate_ms + MINUTE, by=OPERATOR)
    world.advance(escalate_ms)
    world.sweep_when_due(run)
    assert matter(world, run).row["escalated_at"] is None
    world.advance(MINUTE)
    world.sweep_when_due(run)

    assert matter(world, run).row["escalated_at"] is not None


def test_a_flood_of_handoffs_leaves_the_queue_usable(world: World) -> None:
    """S24: what is listed is bounded, and the digest says what it is made of."""
    run = handed_off(world)
    columns = (
        "tenant, workflow, tool, effect_id, reason, priority, package, status, version, opened_at"
    )
    for number in range(300):
        world.rows(
            "INSERT INTO handrail_handoff (id, run_id, subject, " + columns + ")"
            " SELECT :id, run_id, :subject, " + columns.replace("reason", ":reason", 1) + ""
            " FROM handrail_handoff WHERE run_id = :run AND reason = 'unknown-effect' RETURNING id",
            id=f"flood-{number}",
            subject=f"s{number % 3}",
            reason=f"flood-{number}",
            run=run,
        )
    desk = world.fleet.desk

    assert len(desk.handoffs(by=VIEWER)) == 100
    assert len(desk.digest(by=VIEWER, limit=50)) == 50
    assert len(desk.handoffs(by=VIEWER, subject="s0")) == 100
    world.rows("DELETE FROM handrail_handoff WHERE id LIKE 'flood-%'")


# ---- resolutions of a doubt that nothing but a person can settle ---------------------------------


def test_completed_takes_evidence_where_the_service_cannot_be_asked(world: World) -> None:
    run = handed_off(world)
    assert refused(world, run, "completed") == "evidence-needed"
    found = resolve(world, run, "completed", evidence="bank statement 12")
    effect = world.effect("save:1")

    assert (found.status, found.reason) == ("completed", "completed")
    assert (effect["status"], effect["evidence"]) == ("applied", "bank statement 12")
    assert world.service.calls[f"write {run}"] == 1, "it was sent again"
    assert world.fleet.desk.handoffs(by=OPERATOR) == []
    (kept,) = world.fleet.desk.handoffs(by=OPERATOR, resolved=True)
    assert (kept["resolution"], kept["resolved_by"]) == ("completed", "operator")
    assert (kept["resolved_reason"], kept["resolved_evidence"]) == (
        "looked at it",
        "bank statement 12",
    )


def test_resumed_goes_on_behind_the_write(world: World) -> None:
    run = handed_off(world)
    left = world.fleet.get(run).remaining_ms
    world.advance(10 * MINUTE)
    assert world.fleet.get(run).remaining_ms == left, "waiting for a person used working time"
    resolve(world, run, "resumed", evidence="bank statement 12")
    found = world.drive(run)

    assert (found.status, found.answer) == ("completed", "told")
    assert world.service.calls[f"write {run}"] == 1
    assert world.effect("save:1")["status"] == "applied"


def test_once_a_person_has_proved_it_no_call_is_kept_for_undoing_it(world: World) -> None:
    tool = world.compensable_tool(key_valid_for_ms=0, query=False, guarantee="transaction")
    world.workflow(tool, plan=[save(id=1)])
    run = world.start()
    world.service.script = ["dropped"]
    world.drive(run)
    assert world.row(run)["compensations_reserved"] == 1
    resolve(world, run, "resumed", evidence="bank statement 12")

    assert world.drive(run).status == "completed"
    assert world.row(run)["compensations_reserved"] == 0


def test_a_run_without_time_goes_on_with_what_a_person_grants(world: World) -> None:
    run = handed_off(world)
    world.rows("UPDATE handrail_run SET remaining_ms = 0 WHERE id = :id RETURNING id", id=run)

    assert refused(world, run, "resumed", evidence="paper") == "no-time"
    resolve(world, run, "resumed", evidence="paper", grant_ms=30 * SECOND)
    assert world.drive(run).status == "completed"
    (entry,) = world.fleet.desk.audit(by=ADMIN, act="resolve")
    assert entry["after"]["grant_ms"] == 30 * SECOND


def test_compensated_is_a_persons_word_with_evidence(world: World) -> None:
    run = handed_off(world)
    assert refused(world, run, "compensated", evidence="x") == "not-possible"  # it may yet land
    world.advance(SETTLED_MS)
    assert refused(world, run, "compensated") == "evidence-needed"
    found = resolve(world, run, "compensated", evidence="reversal 7")

    assert (found.status, found.reason) == ("compensated", "compensated")
    assert world.effect("save:1")["status"] == "compensated"


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_nothing_is_called_failed_or_cancelled_while_it_may_still_land(
    world: World, how: str
) -> None:
    run = handed_off(world)
    assert refused(world, run, how, evidence="nothing there") == "not-possible"
    world.advance(SETTLED_MS)
    assert refused(world, run, how) == "evidence-needed"
    found = resolve(world, run, how, evidence="nothing there")

    assert found.status == how
    assert found.reason == ("tool-failed" if how == "failed" else "cancelled")
    assert world.effect("save:1")["status"] == "absent"


@pytest.mark.accept("LED-12")
def test_a_late_request_after_a_persons_absent_is_a_contradiction(world: World) -> None:
    """LED-12: the operator may be wrong; the sender's own word shows it."""
    run = handed_off(world)
    world.advance(SETTLED_MS)
    resolve(world, run, "failed", evidence="nothing there")
    says_late(world, run, "save:1", End.TIMED_OUT, None)

    assert world.effect("save:1")["status"] == "contradicted"
    assert world.fleet.get(run).status == "failed"
    shown = matter(world, run)
    assert shown.row["reason"] == "contradiction" and shown.row["priority"] == 1
    assert {c.resolution for c in shown.choices} == {
        Resolution.COMPLETED,
        Resolution.COMPENSATED,
        Resolution.FAILED,
    }
    found = resolve(world, run, "completed", evidence="it did arrive")
    assert found.status == "failed", "a run that has ended keeps its status"
    assert world.effect("save:1")["status"] == "applied"
    assert world.fleet.desk.handoffs(by=OPERATOR) == []


def test_try_again_takes_a_new_approval_and_sends_the_same_key(world: World) -> None:
    run = handed_off(world)
    world.advance(SETTLED_MS)
    assert refused(world, run, "try-again") == "evidence-needed"
    desk = world.fleet.desk
    with pytest.raises(ResolutionRefused) as caught:
        resolve(world, run, "try-again", evidence="not there")
    assert caught.value.problem == "approval-needed"
    (asked,) = desk.approvals(by=APPROVER)
    assert asked.id in caught.value.detail and dict(asked.arguments) == {"id": 1}
    assert world.row(run)["status"] == "handed_off"
    assert refused(world, run, "try-again", evidence="not there") == "approval-needed"
    agree(world.fleet, run)
    assert world.row(run)["status"] == "handed_off", "an approval alone sends nothing"
    resolve(world, run, "try-again", evidence="not there")
    found = world.drive(run)

    assert found.status == "completed" and world.service.performed == ["save:1"]
    effect = world.effect("save:1")
    assert (effect["status"], effect["attempts"]) == ("applied", 2)
    assert effect["approval_id"] == asked.id
    states = {r["status"] for r in world.rows("SELECT status FROM handrail_approval")}
    assert states == {"consumed"}


def test_a_cancel_withdraws_the_consent_that_was_asked_for_again(world: World) -> None:
    """Nothing is sent again after the wish: nobody is asked to agree to it any more."""
    run = handed_off(world)
    world.advance(SETTLED_MS)
    assert refused(world, run, "try-again", evidence="not there") == "approval-needed"
    (asked,) = world.fleet.desk.approvals(by=APPROVER)
    token = world.fleet.desk.issue_token(asked.id, by=APPROVER)
    world.fleet.cancel(run, by=OPERATOR)

    assert world.fleet.desk.approvals(by=APPROVER) == []
    with pytest.raises(ApprovalRefused) as caught:
        world.fleet.approve(token, by=APPROVER)
    assert caught.value.problem == "not-pending"
    assert world.rows("SELECT who FROM handrail_consent WHERE approval_id = :id", id=asked.id) == []
    assert refused(world, run, "try-again", evidence="not there") == "not-possible"


def test_a_request_that_is_settled_at_once_is_still_told_as_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the request for consent and the answer to who has caused it, others decide."""
    run = handed_off(world)
    world.advance(SETTLED_MS)
    rule = Ledger.rule

    def then_somebody_resolves(self: Ledger, run_id: str, decide: Any, **options: Any) -> Any:
        done = rule(self, run_id, decide, **options)
        if done.ruling is not None and done.ruling.park is not None:
            resolve(world, run, "failed", evidence="not there")
        return done

    monkeypatch.setattr(Ledger, "rule", then_somebody_resolves)
    with pytest.raises(ResolutionRefused) as caught:
        resolve(world, run, "try-again", evidence="not there")

    assert caught.value.problem == "approval-needed"
    assert world.row(run)["status"] == "failed"


def test_a_refused_consent_leaves_the_matter_with_the_operator(world: World) -> None:
    run = handed_off(world)
    world.advance(SETTLED_MS)
    with pytest.raises(ResolutionRefused):
        resolve(world, run, "try-again", evidence="not there")
    disagree(world.fleet, run)

    assert world.row(run)["status"] == "handed_off"
    assert world.effect("save:1")["status"] == "handed_off"
    assert resolve(world, run, "failed", evidence="not there").status == "failed"


def test_without_a_bound_on_stalls_an_unkeyed_write_is_never_sent_again(
    request: pytest.FixtureRequest,
) -> None:
    """Rule 7: "try again" is refused to a person, too."""
    with open_world(request, max_stall_ms=None) as world:
        run = handed_off(world)
        world.advance(10 * SETTLED_MS)

        assert refused(world, run, "try-again", evidence="not there") == "not-possible"
        assert resolve(world, run, "failed", evidence="not there").status == "failed"


# ---- resolutions where the service can be asked --------------------------------------------------


def in_query_doubt(
    world: World, *script: str, deadline_ms: int = 120 * SECOND, **contract: Any
) -> str:
    """A run whose service does not answer queries for so long that it was handed off."""
    options = {"query": True, "guarantee": "transaction", "key_valid_for_ms": 0, **contract}
    world.workflow(world.write_tool(**options), plan=[save(id=1)])
    world.service.script = [*(script or ("lost",))]
    run = world.start(budget={"deadline_ms": deadline_ms})
    world.service.away = True
    found = world.drive(run)
    assert found.status == "handed_off", found
    world.service.away = False
    return run


def test_the_service_is_asked_before_anything_is_called_completed(world: World) -> None:
    """S20: no "force complete"."""
    run = in_query_doubt(world, "dropped")

    assert refused(world, run, "completed", evidence="I am sure") == "no-record"
    assert refused(world, run, "resumed", evidence="I am sure") == "no-record"
    world.service.records["save:1"] = {"receipt": 1}
    found = resolve(world, run, "completed")
    assert found.status == "completed"
    assert world.effect("save:1")["result"] == '{"receipt":1}'


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_what_happened_is_not_called_failed_or_cancelled(world: World, how: str) -> None:
    run = in_query_doubt(world)
    world.advance(SETTLED_MS)

    assert refused(world, run, how, evidence="I am sure") == "it-happened"
    assert world.effect("save:1")["status"] == "handed_off"


def test_absent_by_the_services_word_and_late_enough_is_failed(world: World) -> None:
    run = in_query_doubt(world, "dropped")
    world.advance(SETTLED_MS)

    assert resolve(world, run, "failed").status == "failed"
    assert world.effect("save:1")["status"] == "absent"


def test_ask_again_gives_it_back_to_the_reconciler(world: World) -> None:
    run = in_query_doubt(world)
    found = resolve(world, run, "ask-again")
    assert (found.status, found.reason) == ("reconciling", "unknown-effect")
    effect = world.effect("save:1")
    assert (effect["status"], effect["queries_left"]) == ("unknown", 8)

    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"]


def test_try_again_is_refused_where_the_service_has_a_record(world: World) -> None:
    run = in_query_doubt(world)
    world.advance(SETTLED_MS)

    assert refused(world, run, "try-again") == "it-happened"
    assert world.service.performed == ["save:1"]


def test_try_again_sends_an_unkeyed_write_again_once_it_is_absent(world: World) -> None:
    run = in_query_doubt(world, "dropped")
    world.advance(SETTLED_MS)
    resolve(world, run, "try-again")

    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"]


def test_a_key_that_lives_for_ever_is_sent_again_at_any_time(world: World) -> None:
    keyed = {"key_valid_for_ms": FOREVER, "guarantee": "idempotency-key"}
    run = in_query_doubt(world, "lost", deadline_ms=6 * SECOND, **keyed)
    world.service.records.clear()  # its query finds nothing; its key knows better
    assert refused(world, run, "try-again") == "no-time"
    resolve(world, run, "try-again", grant_ms=30 * SECOND)

    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"] and world.effect("save:1")["attempts"] == 2


def test_a_dead_key_is_not_sent_again(world: World) -> None:
    run = in_query_doubt(
        world, "dropped", key_valid_for_ms=60 * SECOND, guarantee="idempotency-key"
    )
    world.advance(10 * MINUTE)

    assert refused(world, run, "try-again") == "not-possible"
    assert "lifetime" in choice(world, run, Resolution.TRY_AGAIN).obstacle


def test_a_query_now_is_kept_as_evidence_and_settles_nothing(world: World) -> None:
    run = in_query_doubt(world)
    answer = world.fleet.desk.query(matter(world, run).id, by=OPERATOR)

    assert isinstance(answer, Applied)
    assert world.row(run)["status"] == "handed_off"
    last = matter(world, run).evidence[-1]
    assert last["kind"] == "query" and last["detail"]["answer"] == "applied"
    world.service.records.clear()
    assert isinstance(world.fleet.desk.query(matter(world, run).id, by=OPERATOR), Absent)
    assert [e["act"] for e in world.fleet.desk.audit(by=ADMIN)] == ["query", "query"]


def test_a_query_where_there_is_none_says_so(world: World) -> None:
    run = handed_off(world)
    with pytest.raises(ResolutionRefused) as caught:
        world.fleet.desk.query(matter(world, run).id, by=OPERATOR)

    assert caught.value.problem == "no-query"


# ---- other kinds of matter -----------------------------------------------------------------------


def lost_worker(world: World) -> str:
    patient = TASK_TYPES["general"].altered({"deadline_ms": 10 * MINUTE})
    world.workflow(world.read_tool(), plan=[look(of=1)], budget=patient)
    run = world.start()
    while world.row(run)["status"] != "handed_off":
        assert world.claim(run) is not None
        world.advance(LEASE_MS + SECOND)
        world.sweep_when_due(run)
    assert world.fleet.get(run).reason == "worker-lost"
    return run


def test_a_run_that_lost_its_workers_can_go_on(world: World) -> None:
    run = lost_worker(world)
    resolve(world, run, "resumed")

    assert world.row(run)["attempts"] == 0
    assert world.drive(run).status == "completed"


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [("failed", "failed", "worker-lost"), ("cancelled", "cancelled", "cancelled")],
)
def test_or_is_given_up(world: World, how: str, status: str, reason: str) -> None:
    run = lost_worker(world)
    found = resolve(world, run, how)

    assert (found.status, found.reason) == (status, reason)
    assert world.fleet.desk.handoffs(by=OPERATOR, run=run) == []


def test_a_run_that_is_to_be_cancelled_does_not_go_on(world: World) -> None:
    run = lost_worker(world)
    world.fleet.cancel(run, by=OPERATOR, reason="not wanted")

    assert refused(world, run, "resumed") == "not-possible"
    assert resolve(world, run, "cancelled").status == "cancelled"


@pytest.mark.accept("LED-15")
def test_what_was_cancelled_and_happened_stands_or_was_undone_by_a_person(world: World) -> None:
    for how, status, effect in (
        ("completed", "completed", "applied"),
        ("compensated", "compensated", "compensated"),
    ):
        tool = f"save_{how}"
        world.workflow(
            world.write_tool(tool, intent=lambda a, r: f"{a['id']}"),
            plan=[{"kind": "tool", "tool": tool, "arguments": {"id": how}}],
            name=how.title(),
        )
        world.service.script = [lambda arguments, call: stopped(world, arguments, call)]
        run = world.start(how.title())
        world.drive(run)
        assert world.fleet.get(run).status == "handed_off"
        assert {c.resolution.value for c in matter(world, run).choices} == {
            "completed",
            "compensated",
        }
        assert refused(world, run, "cancelled") == "not-offered"
        evidence = "reversal" if how == "compensated" else ""
        assert resolve(world, run, how, evidence=evidence).status == status
        assert world.effect(how)["status"] == effect


def stopped(world: World, arguments: Any, call: Any) -> Any:
    """The write happens, and its run is cancelled meanwhile."""
    world.meanwhile(lambda: world.fleet.cancel(call.run_id))
    return world.service.arrive(call, arguments, FOREVER)


# ---- one resolution ------------------------------------------------------------------------------


def test_two_operators_do_not_resolve_one_matter(world: World) -> None:
    run = handed_off(world)
    world.advance(SETTLED_MS)
    seen = matter(world, run)
    desk = world.fleet.desk
    outcomes: list[str] = []
    gate = threading.Barrier(2)

    def decide(who: Principal, how: str) -> None:
        gate.wait()
        try:
            desk.resolve(seen.id, how, by=who, reason="mine", evidence="paper", seen=seen.seen)
            outcomes.append(how)
        except ResolutionRefused as error:
            outcomes.append(error.problem)

    threads = [
        threading.Thread(target=decide, args=given)
        for given in ((OPERATOR, "completed"), (BOB, "compensated"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(set(outcomes) & {"completed", "compensated"}) != ["compensated", "completed"]
    assert len(set(outcomes) & {"not-open", "moved-on"}) == 1, outcomes
    assert len(world.fleet.desk.audit(by=ADMIN, act="resolve")) == 1


def test_what_moved_since_it_was_looked_at_is_looked_at_again(world: World) -> None:
    run = in_query_doubt(world)
    seen = matter(world, run)
    world.fleet.cancel(run)

    assert refused(world, run, "completed", seen=seen.seen) == "moved-on"
    assert resolve(world, run, "completed", seen=matter(world, run).seen).status == "completed"


def test_contrary_evidence_takes_the_run_back_and_closes_the_matter(world: World) -> None:
    """The reconciler and a person do not both settle it."""
    run = in_query_doubt(world)
    handoff = matter(world, run).id
    resolve(world, run, "ask-again")
    assert world.fleet.desk.handoffs(by=OPERATOR, run=run) == []

    with pytest.raises(ResolutionRefused) as caught:
        world.fleet.desk.resolve(handoff, "failed", by=BOB, reason="late")
    assert caught.value.problem == "not-open"
    assert world.drive(run).status == "completed"


@pytest.mark.parametrize("words", ["", "  ", 7, None, "x" * 2_001])
def test_a_decision_takes_a_reason(world: World, words: Any) -> None:
    run = handed_off(world)
    with pytest.raises(InvalidWords):
        resolve(world, run, "completed", reason=words, evidence="paper")
    assert matter(world, run).open


def test_what_there_is_not_cannot_be_chosen(world: World) -> None:
    run = handed_off(world)

    assert refused(world, run, "force-complete") == "not-offered"
    with pytest.raises(UnknownMatter):
        world.fleet.desk.resolve("nobody", "failed", by=OPERATOR, reason="x")
    with pytest.raises(InvalidTime):
        resolve(world, run, "resumed", grant_ms=-1, evidence="x")


# ---- writes that were to be undone ---------------------------------------------------------------


def undone(world: World, *script: str, **undo: Any) -> str:
    """A run that was cancelled in its write, whose undoing goes as the script says."""
    world.workflow(world.compensable_tool(undo=undo), plan=[save(id=1)])
    world.service.script = [lambda arguments, call: stopped(world, arguments, call), *script]
    run = world.start()
    found = world.drive(run)
    assert found.status == "handed_off", found
    return run


@pytest.mark.accept("LED-18")
def test_a_refused_undo_is_tried_again_by_a_person_under_the_same_key(world: World) -> None:
    run = undone(world, "refused")
    assert world.effect("save:1")["status"] == "applied"
    assert {one.resolution.value for one in matter(world, run).choices} == {
        "completed",
        "compensated",
        "try-again",
    }
    resolve(world, run, "try-again")
    found = world.drive(run)

    assert (found.status, world.effect("save:1")["status"]) == ("compensated", "compensated")
    assert world.service.performed == ["save:1", "undo:1"]
    assert world.effect("undo:1")["attempts"] == 2


@pytest.mark.accept("LED-18")
@pytest.mark.parametrize(
    ("how", "evidence", "status"),
    [("completed", "", "applied"), ("compensated", "reversal 7", "compensated")],
)
def test_or_the_write_stands_or_a_person_has_undone_it(
    world: World, how: str, evidence: str, status: str
) -> None:
    run = undone(world, "refused")
    found = resolve(world, run, how, evidence=evidence)

    assert (found.status, world.effect("save:1")["status"]) == (how, status)
    assert world.effect("undo:1")["status"] == "absent"


def test_whether_it_was_undone_is_asked_of_the_service(world: World) -> None:
    keyless = {"key_valid_for_ms": 0, "guarantee": "transaction"}
    world.service.away = True
    run = undone(world, "dropped", **keyless)
    assert world.effect("undo:1")["status"] == "handed_off"
    world.service.away = False

    assert refused(world, run, "compensated", evidence="surely") == "no-record"
    world.service.records["undo:1"] = {"receipt": 9}
    assert refused(world, run, "completed") == "it-happened"
    found = resolve(world, run, "compensated")
    assert (found.status, world.effect("undo:1")["status"]) == ("compensated", "applied")


def test_a_doubtful_undo_is_asked_about_again(world: World) -> None:
    keyless = {"key_valid_for_ms": 0, "guarantee": "transaction"}
    world.service.away = True
    run = undone(world, "lost", **keyless)
    world.service.away = False
    assert resolve(world, run, "ask-again").status == "reconciling"

    assert world.drive(run).status == "compensated"
    assert world.service.performed == ["save:1", "undo:1"]


# ---- an intent that is another run's -------------------------------------------------------------


def test_a_run_that_waits_for_anothers_handoff_asks_again_when_that_is_settled(
    world: World,
) -> None:
    first = in_query_doubt(world, "dropped")
    second = world.start()
    assert world.drive(second).status == "handed_off"
    assert world.effect("save:1")["owner_run_id"] == first
    assert {one.resolution.value for one in matter(world, second).choices} == {
        "resumed",
        "failed",
        "cancelled",
    }
    world.service.records["save:1"] = {"receipt": 1}
    resolve(world, first, "completed")
    resolve(world, second, "resumed")

    assert world.drive(second).status == "completed"
    assert world.service.calls[f"write {second}"] == 0, "it was sent again"


def test_or_is_given_up_without_touching_it(world: World) -> None:
    first = in_query_doubt(world, "dropped")
    second = world.start()
    world.drive(second)
    assert resolve(world, second, "cancelled").status == "cancelled"

    assert world.effect("save:1")["status"] == "handed_off"
    assert world.fleet.get(first).status == "handed_off"


# ---- what comes too late -------------------------------------------------------------------------


def test_a_receipt_that_comes_after_the_handoff_is_proof(world: World) -> None:
    """LED-12's spirit: the sender's own word outweighs a person's guess."""
    run = handed_off(world)
    says_late(world, run, "save:1", End.RETURNED, Succeeded({"receipt": 5}, "receipt 5"))
    assert world.row(run)["status"] == "handed_off"
    world.advance(SETTLED_MS)

    for how in ("failed", "cancelled", "try-again", "ask-again"):
        assert refused(world, run, how, evidence="surely not") == "not-possible"
    found = resolve(world, run, "completed")
    assert found.status == "completed"
    assert world.effect("save:1")["result"] == '{"receipt":5}'


def test_who_floods_people_with_doubts_sends_nothing_new(world: World) -> None:
    """S24: a cap for each subject; who has no name shares none."""
    world.ledger.max_open_handoffs = 1
    tool = world.write_tool(key_valid_for_ms=0, query=False, guarantee="transaction")
    world.workflow(tool, plan=[save_for_goal])
    world.service.script = ["dropped"]
    first = world.start(principal="mallory")
    assert world.drive(first).status == "handed_off"
    second, other = world.start(principal="mallory"), world.start(principal="alice")
    for _ in range(3):
        world.step(second)
        world.advance(10 * SECOND)

    assert world.drive(other).status == "completed"
    assert world.service.performed == [f"save:{other}"]
    assert world.fleet.get(second).status == "running"
    resolve(world, first, "completed", evidence="paper")
    assert world.drive(second).status == "completed"


def test_a_contradiction_is_escalated_at_once(world: World) -> None:
    """Its run has ended, and wakes nobody."""
    run = handed_off(world)
    world.advance(SETTLED_MS)
    resolve(world, run, "failed", evidence="nothing there")
    says_late(world, run, "save:1", End.TIMED_OUT, None)

    assert matter(world, run).row["escalated_at"] == world.clock.ms


def test_a_receipt_of_the_undo_outweighs_a_persons_word(world: World) -> None:
    world.service.away = True
    run = undone(world, "dropped", key_valid_for_ms=0, guarantee="transaction")
    world.service.away = False
    says_late(world, run, "undo:1", End.RETURNED, Succeeded({"receipt": 9}, "receipt 9"))
    world.advance(SETTLED_MS)

    assert refused(world, run, "completed", evidence="nothing") == "not-possible"
    assert refused(world, run, "ask-again") == "not-possible"
    assert resolve(world, run, "compensated").status == "compensated"
    assert world.effect("undo:1")["result"] == '{"receipt":9}'


def test_what_never_happened_is_not_called_undone(world: World) -> None:
    run = in_query_doubt(world, "dropped")
    world.advance(SETTLED_MS)

    assert refused(world, run, "compensated", evidence="reversal 7") == "no-record"


def test_a_question_is_answered_not_resolved(world: World) -> None:
    world.workflow(world.read_tool(), plan=[{"kind": "clarify", "question": "Which?"}])
    run = world.start()
    world.step(run)
    for how in Resolution:
        assert refused(world, run, how, evidence="x") == "not-offered"


def test_a_query_leaves_its_entry_even_where_the_decision_is_refused(world: World) -> None:
    run = in_query_doubt(world)
    world.advance(SETTLED_MS)
    with pytest.raises(ResolutionRefused):
        resolve(world, run, "failed")

    assert [e["act"] for e in world.fleet.desk.audit(by=ADMIN)] == ["query"]
    assert matter(world, run).evidence[-1]["kind"] == "query"


def test_try_again_asks_anew_when_the_contract_reads_otherwise(world: World) -> None:
    run = handed_off(world)
    world.advance(SETTLED_MS)
    with pytest.raises(ResolutionRefused):
        resolve(world, run, "try-again", evidence="not there")
    agree(world.fleet, run)
    workflow = world.fleet.workflows["draft@1"]
    tool = workflow.tool_named("save")
    changed = replace(tool, contract=replace(tool.contract, description="saves more"))
    object.__setattr__(workflow, "_tools", {"save": changed})
    with pytest.raises(ResolutionRefused) as caught:
        resolve(world, run, "try-again", evidence="not there")
    assert caught.value.problem == "approval-needed"
    agree(world.fleet, run)
    resolve(world, run, "try-again", evidence="not there")

    assert world.drive(run).status == "completed"
    states = [row["status"] for row in world.rows("SELECT status FROM handrail_approval")]
    assert sorted(states) == ["consumed", "consumed", "withdrawn"]


def test_who_undoes_what_others_rest_on_is_told_so(world: World) -> None:
    run = in_query_doubt(world, "lost")
    other = world.start()
    world.rows(
        "INSERT INTO handrail_effect_holder (effect_id, run_id) VALUES (:effect, :run) RETURNING"
        " run_id",
        effect=world.effect("save:1")["id"],
        run=other,
    )

    told = choice(world, run, Resolution.COMPENSATED).consequence
    assert "Other runs that rest on it: 1" in told
