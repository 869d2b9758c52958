"""Approvals: exact, signed, expiring, single use; what is not covered is refused and not called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import pytest
from pydantic import BaseModel

from handrail.agent.approvals import ApprovalRefused
from handrail.agent.fixed import Done
from handrail.agent.people import InvalidWords, NotAllowed
from handrail.agent.stage import Action
from handrail.agent.tools import Principal
from handrail.agent.workflow import Check, Commit, Confirm
from handrail.desk import TooManyDecisions, UnknownMatter
from handrail.errors import InvalidDefinition
from handrail.fleet import Fleet
from handrail.settings import Settings
from handrail.testing.people import ADMIN, APPROVER, OPERATOR, agree, disagree
from handrail.testing.services import EmbeddedPostgres
from handrail.tokens import NoSecret, UnusableKey
from tests.world import SECOND, World, open_world, save

HOUR: Final = 3_600 * SECOND
VIEWER: Final = Principal("viewer", roles=frozenset({"viewer"}))


class Refund(BaseModel):
    order_id: str
    amount_cents: int


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


def refunds(world: World, *, budget: Mapping[str, Any] | None = None, **contract: Any) -> str:
    """A run that waits for consent to refund order 7."""
    refund = world.write_tool(
        "refund",
        input=Refund,
        intent=lambda order, run: f"refund:{order.order_id}",
        **{"approval": "always", "amount": "amount_cents", **contract},
    )

    def action(run: Any) -> Action:
        return Action(refund, {"order_id": "7", "amount_cents": 4_200})

    stages = [
        Confirm("confirm", action=action, expires_ms=HOUR),
        Commit("commit", action=action, tool=refund),
        Check("done", judge=lambda run: Done("refunded")),
    ]
    world.workflow(stages=stages)
    run = world.start(budget=budget, principal="customer")
    world.step(run)
    assert world.row(run)["status"] == "awaiting_approval"
    return run


def token_for(world: World, run: str, **options: Any) -> str:
    (asked,) = world.fleet.desk.approvals(by=APPROVER, run=run)
    return world.fleet.desk.issue_token(asked.id, by=APPROVER, **options)


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(ApprovalRefused) as caught:
        act()
    assert caught.value.code == "approval-refused"
    return caught.value.problem


# ---- what is asked for, and what is done ---------------------------------------------------------


@pytest.mark.accept("APR-01", "PRO-16")
@pytest.mark.parametrize(
    ("approval", "writes", "asks"),
    [
        ("never", False, False),
        ("never", True, False),
        ("on-write", False, False),
        ("on-write", True, True),
        ("always", False, True),
        ("always", True, True),
    ],
)
def test_consent_is_asked_for_as_the_contract_says(
    world: World, approval: str, writes: bool, asks: bool
) -> None:
    tool = (
        world.write_tool(approval=approval)
        if writes
        else world.read_tool("save", approval=approval)
    )
    world.workflow(tool, plan=[save(id=1)])
    run = world.start()
    world.step(run)

    assert (world.row(run)["status"] == "awaiting_approval") is asks


@pytest.mark.accept("APR-02", "APR-08")
def test_the_request_is_there_with_the_status_and_nothing_is_charged_or_called(
    world: World,
) -> None:
    run = refunds(world)
    (asked,) = world.fleet.desk.approvals(by=APPROVER)

    assert dict(asked.arguments) == {"amount_cents": 4_200, "order_id": "7"}
    assert (asked.run_id, asked.tool, asked.terms.amount) == (run, "refund", 4_200)
    assert world.used(run)["tool_calls"] == 0 and world.service.performed == []
    assert world.row(run)["lease_until"] is None, "a worker is held"
    assert world.trace(run, "run.stopped") == [], "waiting is no stop"


@pytest.mark.accept("APR-03", "APR-04", "RPW-08")
def test_what_was_agreed_to_is_executed_byte_for_byte_without_asking_the_model(
    world: World,
) -> None:
    told = iter([save(id=1, amount=5), save(id=1, amount=500)])
    world.workflow(world.write_tool(approval="always"), plan=[lambda seen: next(told)])
    run = world.start()
    world.step(run)
    (asked,) = world.fleet.desk.approvals(by=APPROVER, run=run)
    agree(world.fleet, run)
    models = world.service.calls[f"model {run}"]
    world.step(run)

    effect = world.effect("save:1")
    assert world.service.performed == ["save:1"]
    assert world.service.calls[f"model {run}"] == models
    assert effect["arguments_hash"] == asked.arguments_hash
    assert effect["arguments"] == '{"amount":5,"id":1}'


@pytest.mark.accept("APR-09")
def test_the_same_approval_delivered_twice_is_one_execution(world: World) -> None:
    run = refunds(world)
    token = token_for(world, run)
    world.fleet.approve(token, by=APPROVER)

    assert refused(lambda: world.fleet.approve(token, by=APPROVER)) == "not-pending"
    assert world.drive(run).status == "completed"
    assert refused(lambda: world.fleet.approve(token, by=APPROVER)) == "not-pending"
    assert world.service.performed == ["refund:7"]


@pytest.mark.accept("APR-05", "APR-09", "RPW-06")
def test_a_hundred_uses_of_one_token_at_once_are_one_effect(world: World) -> None:
    run = refunds(world)
    token = token_for(world, run)
    fleets = [Fleet(settings=world.fleet.settings) for _ in range(4)]
    for fleet in fleets:
        fleet.__dict__["ledger"] = world.fleet.ledger
        fleet.__dict__["own_secret"] = world.fleet.own_secret
    outcomes: list[str] = []

    def use(fleet: Fleet) -> None:
        for _ in range(25):
            try:
                fleet.approve(token, by=APPROVER)
                outcomes.append("agreed")
            except ApprovalRefused as error:
                outcomes.append(error.problem)

    threads = [threading.Thread(target=use, args=(fleet,)) for fleet in fleets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(outcomes) == 100 and outcomes.count("agreed") == 1
    assert world.drive(run).status == "completed"
    assert world.service.performed == ["refund:7"]
    assert len(world.rows("SELECT * FROM handrail_consent")) == 1


# ---- what a consent is bound to ------------------------------------------------------------------

#: What somebody with access to the database may have changed about a request since it was shown.
CHANGES: Final = {
    "run": "run_id = 'run-2'",
    "order": """arguments = '{"amount_cents":4200,"order_id":"8"}'""",
    "amount": "amount = 420000",
    "arguments": "arguments_hash = 'other'",
    "action": "tool = 'refund_all'",
    "contract": "contract_version = '2'",
    "contract text": "contract_hash = 'other'",
    "intent": "intent_key = 'refund:8'",
    "step": "step = 9",
    "state version": "state_version = 9",
    "subject": "subject = 'somebody-else'",
    "tenant": "tenant = 'other'",
    "expiry": "expires_at = expires_at + 1",
    "approvers": "approvers = 2",
}


@pytest.mark.accept("APR-05", "RPW-06")
@pytest.mark.parametrize("what", CHANGES)
def test_a_token_counts_for_exactly_what_it_was_issued_for(world: World, what: str) -> None:
    """S5: every field that it is bound to, mutated, is a refusal."""
    run = refunds(world)
    world.start(run_id="run-2")
    token = token_for(world, run)
    world.rows(f"UPDATE handrail_approval SET {CHANGES[what]} WHERE run_id = :run", run=run)

    assert refused(lambda: world.fleet.approve(token, by=APPROVER)) in (
        "changed",
        "not-pending",  # it is the request of another run by now
    )
    assert world.row(run)["status"] == "awaiting_approval"
    assert world.service.performed == []
    world.rows("UPDATE handrail_approval SET run_id = :run", run=run)


@pytest.mark.accept("RPW-06")
def test_a_token_of_another_run_is_refused_where_one_is_named(world: World) -> None:
    first = refunds(world)
    second = world.start(principal="customer")
    world.step(second)
    token = token_for(world, first)

    assert refused(lambda: world.fleet.approve(token, by=APPROVER, run=second)) == "another-run"
    world.fleet.approve(token, by=APPROVER, run=first)
    assert world.row(second)["status"] == "awaiting_approval"


@pytest.mark.accept("APR-05", "RPW-06")
def test_after_its_expiry_a_token_counts_for_nothing_by_the_ledgers_clock(world: World) -> None:
    run = refunds(world)
    token = token_for(world, run)
    world.advance(HOUR)

    assert refused(lambda: world.fleet.approve(token, by=APPROVER)) == "expired"
    found = world.fleet.get(run)
    assert (found.status, found.reason) == ("failed", "approval-expired")
    assert world.service.performed == []


@pytest.mark.accept("RPW-07")
@pytest.mark.parametrize("word", ["go on", "", "yes", "ok.go.on", None, 7, b"token"])
def test_a_consent_that_names_no_action_is_refused(world: World, word: Any) -> None:
    run = refunds(world)

    assert refused(lambda: world.fleet.approve(word, by=APPROVER)) == "unbound"
    assert refused(lambda: world.fleet.approve(run, by=APPROVER)) == "unbound"
    assert world.row(run)["status"] == "awaiting_approval"


def test_a_token_of_another_signer_or_with_a_changed_letter_is_refused(world: World) -> None:
    run = refunds(world)
    token = token_for(world, run)
    stranger = Fleet(settings=Settings(database_url="sqlite://", approval_secret="x" * 40))
    forged = stranger.desk._signer().dumps(stranger.desk._signer().loads_unsafe(token)[1] or {})

    assert refused(lambda: world.fleet.approve(str(forged), by=APPROVER)) == "unbound"
    for place in (0, len(token) // 2, len(token) - 1):
        letter = "A" if token[place] != "A" else "B"
        changed = token[:place] + letter + token[place + 1 :]
        if changed[place] != token[place] and place != len(token) - 1:
            assert refused(lambda t=changed: world.fleet.approve(t, by=APPROVER)) == "unbound"  # type: ignore[misc]
    world.fleet.approve(token, by=APPROVER)


def test_the_token_is_stored_nowhere(world: World) -> None:
    run = refunds(world)
    token = token_for(world, run)
    nonce = world.fleet.desk._signer().loads(token)["n"]

    for table in ("approval", "approval_token", "audit", "run", "trace"):
        stored = str(world.rows(f"SELECT * FROM handrail_{table}"))
        assert token not in stored and nonce not in stored, table
    world.fleet.approve(token, by=APPROVER)


def test_a_new_secret_signs_and_an_old_one_is_still_known() -> None:
    old, new = "o" * 40, "n" * 40
    fleets = [
        Fleet(settings=Settings(database_url="sqlite://", approval_secret=secret))
        for secret in (old, f"{new},{old}", new)
    ]
    before, during, after = (fleet.desk._signer() for fleet in fleets)

    assert during.loads(before.dumps("x")) == "x" == after.loads(during.dumps("x"))
    assert after.loads_unsafe(before.dumps("x"))[0] is False
    for fleet in fleets:
        fleet.close()


@pytest.mark.accept("APR-05")
def test_a_contract_whose_words_changed_since_is_not_what_was_agreed_to(world: World) -> None:
    """S6: the text of the contract is pinned; a change of it voids the approval."""
    run = refunds(world)
    agree(world.fleet, run)
    tool = world.fleet.workflows["draft@1"].tool_named("refund")
    changed = replace(tool, contract=replace(tool.contract, description="refunds to anybody"))
    workflow = world.fleet.workflows["draft@1"]
    object.__setattr__(workflow, "_tools", {"refund": changed})
    world.step(run)

    found = world.fleet.get(run)
    assert (found.status, found.reason) == ("failed", "approval-expired")
    assert world.service.performed == []


# ---- who may -------------------------------------------------------------------------------------


@pytest.mark.accept("ORC-06", "APR-05")
@pytest.mark.parametrize("who", [OPERATOR, ADMIN, VIEWER, Principal("nobody")])
def test_only_an_approver_agrees(world: World, who: Principal) -> None:
    """S20: the matrix of roles."""
    run = refunds(world)
    token = token_for(world, run)

    with pytest.raises(NotAllowed):
        world.fleet.approve(token, by=who)
    with pytest.raises(NotAllowed):
        (asked,) = world.ledger.people.approvals(run_id=run)
        world.fleet.reject(asked.id, by=who, reason="no")
    assert world.row(run)["status"] == "awaiting_approval"


def test_who_asks_for_an_action_does_not_agree_to_it(world: World) -> None:
    run = refunds(world)
    customer = Principal("customer", roles=frozenset({"approver"}))

    assert refused(lambda: agree(world.fleet, run, by=customer)) == "own-request"
    assert world.row(run)["status"] == "awaiting_approval"


def test_who_asks_may_agree_where_the_contract_says_so(world: World) -> None:
    run = refunds(world, requester_approves=True)
    agree(world.fleet, run, by=Principal("customer", roles=frozenset({"approver"})))

    assert world.drive(run).status == "completed"


def test_a_token_issued_to_a_person_is_that_persons(world: World) -> None:
    run = refunds(world)
    token = token_for(world, run, to="ana")

    assert refused(lambda: world.fleet.approve(token, by=APPROVER)) == "wrong-person"
    world.fleet.approve(token, by=Principal("ana", roles=frozenset({"approver"})))
    assert world.drive(run).status == "completed"


def test_people_of_another_tenant_neither_see_nor_decide(world: World) -> None:
    """S16."""
    run = refunds(world)
    (asked,) = world.fleet.desk.approvals(by=APPROVER)
    stranger = Principal("eve", roles=frozenset({"approver"}), tenants=frozenset({"other"}))
    token = token_for(world, run)

    assert world.fleet.desk.approvals(by=stranger) == []
    assert world.fleet.desk.approvals(by=stranger, tenant="default") == []
    assert refused(lambda: world.fleet.approve(token, by=stranger)) == "wrong-tenant"
    for act in (
        lambda: world.fleet.desk.approval(asked.id, by=stranger),
        lambda: world.fleet.desk.issue_token(asked.id, by=stranger),
        lambda: world.fleet.reject(asked.id, by=stranger, reason="no"),
    ):
        with pytest.raises(UnknownMatter):
            act()
    assert world.row(run)["status"] == "awaiting_approval"


def test_names_stand_for_people_whom_an_admin_has_admitted(world: World) -> None:
    run = refunds(world)
    desk = world.fleet.desk
    with pytest.raises(NotAllowed, match="admit"):
        desk.approvals(by="ana")
    desk.admit("root", ["admin"])
    desk.admit("ana", ["approver"], by="root")
    (asked,) = desk.approvals(by="ana", run=run)
    world.fleet.approve(desk.issue_token(asked.id, by="ana"), by="ana")
    desk.dismiss("ana", by="root")

    with pytest.raises(NotAllowed):
        desk.approvals(by="ana")
    assert world.drive(run).status == "completed"


def test_the_first_to_be_admitted_is_an_admin_and_then_only_admins_admit(world: World) -> None:
    desk = world.fleet.desk
    with pytest.raises(NotAllowed):
        desk.admit("ana", ["approver"])
    desk.admit("root", ["admin", "operator"])
    with pytest.raises(NotAllowed):
        desk.admit("eve", ["admin"])
    with pytest.raises(NotAllowed):
        desk.admit("eve", ["approver"], by=OPERATOR)

    assert [one.subject for one in desk.principals(by="root")] == ["root"]


# ---- two people ----------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", [{"approvers": 2}, {"second_approver_above": 4_199}])
def test_two_people_have_to_agree(world: World, contract: dict[str, Any]) -> None:
    run = refunds(world, **contract)
    agree(world.fleet, run)
    assert world.row(run)["status"] == "awaiting_approval"
    (asked,) = world.fleet.desk.approvals(by=APPROVER)
    assert (asked.consents, asked.missing) == (("approver",), 1)

    assert refused(lambda: agree(world.fleet, run)) == "agreed-already"
    assert world.row(run)["status"] == "awaiting_approval"
    agree(world.fleet, run, by=Principal("bob", roles=frozenset({"approver"})))
    assert world.drive(run).status == "completed"
    assert world.rows("SELECT decided_by FROM handrail_approval") == [
        {"decided_by": "approver, bob"}
    ]


def test_up_to_the_limit_one_person_is_enough(world: World) -> None:
    run = refunds(world, second_approver_above=4_200)
    agree(world.fleet, run)

    assert world.row(run)["status"] == "executing"


@pytest.mark.parametrize(
    "contract",
    [
        {"approvers": 3},
        {"approvers": True},
        {"amount": "price"},
        {"amount": None, "second_approver_above": 5},
        {"second_approver_above": -1},
        {"requester_approves": "yes"},
    ],
)
def test_terms_that_cannot_be_are_refused_when_they_are_declared(contract: dict[str, Any]) -> None:
    fleet = Fleet(database_url="sqlite://")
    options = {"side_effect": "read", "input": Refund, "amount": "amount_cents", **contract}
    with pytest.raises(InvalidDefinition):
        fleet.tool("refund", **options)(lambda arguments, call: "done")


# ---- refusal, expiry, cancellation, time ---------------------------------------------------------


@pytest.mark.accept("APR-06")
def test_a_rejection_stops_the_run_and_the_tool_is_never_called(world: World) -> None:
    run = refunds(world)
    disagree(world.fleet, run, reason="too much")
    found = world.fleet.get(run)

    assert (found.status, found.reason) == ("failed", "approval-rejected")
    assert refused(lambda: agree(world.fleet, run)) == "not-pending"
    assert world.service.performed == []
    (entry,) = world.fleet.desk.audit(by=ADMIN, act="reject")
    assert (entry["actor"], entry["reason"]) == ("approver", "too much")


@pytest.mark.accept("APR-06")
def test_an_expiry_stops_the_run_with_a_reason_of_its_own(world: World) -> None:
    run = refunds(world)
    world.advance(HOUR)
    world.sweep_when_due(run)
    found = world.fleet.get(run)

    assert (found.status, found.reason) == ("failed", "approval-expired")
    assert world.service.performed == []


@pytest.mark.accept("APR-07")
def test_after_an_hour_the_run_has_the_time_that_it_had(world: World) -> None:
    run = refunds(world, budget={"deadline_ms": 38 * SECOND, "expires_ms": 3 * HOUR})
    left, used = world.fleet.get(run).remaining_ms, world.used(run)
    world.advance(HOUR - 1)
    found = agree(world.fleet, run)

    assert found.remaining_ms == left and world.used(run) == used
    assert world.drive(run).status == "completed"


@pytest.mark.accept("APR-07")
def test_past_the_hard_expiry_the_run_is_expired_whatever_was_agreed(world: World) -> None:
    run = refunds(world, budget={"deadline_ms": 38 * SECOND, "expires_ms": HOUR // 2})
    token = token_for(world, run)
    world.advance(HOUR // 2)

    assert refused(lambda: world.fleet.approve(token, by=APPROVER)) == "expired"
    found = world.fleet.get(run)
    assert (found.status, found.reason) == ("budget_exhausted", "expired")
    assert world.service.performed == []


@pytest.mark.accept("APR-10")
def test_a_cancelled_run_takes_no_approval(world: World) -> None:
    run = refunds(world)
    token = token_for(world, run)
    assert world.fleet.cancel(run).status == "cancelled"

    assert refused(lambda: world.fleet.approve(token, by=APPROVER)) == "not-pending"
    assert world.rows("SELECT status FROM handrail_approval") == [{"status": "withdrawn"}]
    assert world.service.performed == []


@pytest.mark.accept("APR-08", "FLT-11")
def test_another_worker_takes_up_what_was_agreed_to(world: World) -> None:
    """What waits is in the ledger alone: no worker, no broker and no lock know of it."""
    run = refunds(world)
    world.messages.clear()  # the broker has lost everything
    world.lock = type(world.lock)(world.clock)
    agree(world.fleet, run)
    world.messages.clear()
    world.advance(11 * SECOND)  # the sweep publishes it again

    assert world.drive(run).status == "completed" and world.service.performed == ["refund:7"]


# ---- careless approvers --------------------------------------------------------------------------


def test_who_decides_faster_than_anybody_can_read_is_stopped(world: World) -> None:
    """S20."""
    world.fleet.settings = world.fleet.settings.model_copy(update={"decisions_per_minute": 2})
    runs = [refunds(world)]
    for _ in range(2):
        runs.append(world.start(principal="customer"))
        world.step(runs[-1])
    agree(world.fleet, runs[0])
    agree(world.fleet, runs[1])

    with pytest.raises(TooManyDecisions):
        agree(world.fleet, runs[2])
    world.advance(61 * SECOND)
    agree(world.fleet, runs[2])


@pytest.mark.parametrize("words", [7, None, "x" * 2_001])
def test_words_that_cannot_be_kept_are_refused(world: World, words: Any) -> None:
    run = refunds(world)
    (asked,) = world.fleet.desk.approvals(by=APPROVER)
    token = token_for(world, run)

    with pytest.raises(InvalidWords):
        world.fleet.approve(token, by=APPROVER, comment=words)
    with pytest.raises(InvalidWords):
        world.fleet.reject(asked.id, by=APPROVER, reason=words)
    assert world.row(run)["status"] == "awaiting_approval"


def test_on_postgresql_a_secret_has_to_be_given(postgres: EmbeddedPostgres) -> None:
    settings = Settings(database_url=postgres.create_database("unsigned"), approval_secret="")
    fleet = Fleet(settings=settings)
    fleet.upgrade_database()
    with pytest.raises(NoSecret) as caught:
        fleet.desk._signer()
    assert "HANDRAIL_APPROVAL_SECRET" in str(caught.value)
    fleet.close()


def test_a_ledger_of_our_own_has_a_key_that_only_its_owner_reads(tmp_path: Any) -> None:
    settings = Settings(database_url="", home=tmp_path / "home", approval_secret="")
    first, second = Fleet(settings=settings), Fleet(settings=settings)

    assert second.desk._signer().loads(first.desk._signer().dumps("x")) == "x"
    key = tmp_path / "home" / "ledger.db.approval.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "home").iterdir() if path.suffix == ""] == []
    first.close()
    second.close()


def test_the_last_admin_stays_while_others_are_there(world: World) -> None:
    desk = world.fleet.desk
    desk.admit("root", ["admin"])
    desk.admit("ana", ["approver"], by="root")
    with pytest.raises(NotAllowed, match="admit another admin"):
        desk.dismiss("root", by="root")
    desk.dismiss("ana", by="root")
    desk.dismiss("root", by="root")

    assert world.ledger.people.principals() == []


# ---- consents of several runs, and of people who are one ----------------------------------------


def test_another_runs_consent_covers_nothing(world: World) -> None:
    """One intent, two runs, two consents: the second is not sent under the first one's."""
    first = refunds(world, key_valid_for_ms=0, guarantee="transaction")
    second = world.start(principal="bob")
    world.step(second)
    world.service.script = ["refused"]
    agree(world.fleet, first)
    assert world.drive(first).status == "failed"
    agree(world.fleet, second)
    world.advance(HOUR)
    ended = world.drive(second)

    assert (ended.status, ended.reason) != ("completed", "completed")
    assert world.service.performed == []
    states = {row["status"] for row in world.rows("SELECT status FROM handrail_approval")}
    assert states == {"consumed", "withdrawn"}


def test_each_run_uses_its_own_consent_up(world: World) -> None:
    first = refunds(world, key_valid_for_ms=0, guarantee="transaction")
    second = world.start(principal="bob")
    world.step(second)
    world.service.script = ["refused"]
    for run in (first, second):
        agree(world.fleet, run)
        world.drive(run)

    assert world.service.performed == ["refund:7"]
    (used,) = world.rows("SELECT count(*) AS n FROM handrail_approval WHERE status = 'consumed'")
    assert used["n"] == 2


@pytest.mark.parametrize("name", ["CUSTOMER", "Customer"])
def test_who_asks_is_the_same_person_however_it_is_spelled(world: World, name: str) -> None:
    run = refunds(world)
    person = Principal(name, roles=frozenset({"approver"}))

    assert refused(lambda: agree(world.fleet, run, by=person)) == "own-request"


@pytest.mark.parametrize("name", ["customer ", "customer\u200b", "\u0430na", "", "a\nb", "x" * 129])
def test_a_person_has_a_name_that_reads_as_one(world: World, name: str) -> None:
    run = refunds(world)
    with pytest.raises(InvalidWords):
        agree(world.fleet, run, by=Principal(name, roles=frozenset({"approver"})))
    with pytest.raises(InvalidWords):
        world.fleet.desk.admit(name, ["admin"])
    world.fleet.desk.admit("ana", ["admin"])
    with pytest.raises(NotAllowed, match="reads the same"):
        world.fleet.desk.admit("Ana", ["approver"], by="ana")


def test_no_approval_outlives_its_run(world: World) -> None:
    run = refunds(world)
    agree(world.fleet, run)
    world.fleet.cancel(run)

    assert world.rows("SELECT status FROM handrail_approval") == [{"status": "withdrawn"}]


def test_stricter_terms_are_not_what_was_agreed_to(world: World) -> None:
    run = refunds(world)
    agree(world.fleet, run)
    workflow = world.fleet.workflows["draft@1"]
    tool = workflow.tool_named("refund")
    stricter = replace(tool, contract=replace(tool.contract, approvers=2))
    object.__setattr__(workflow, "_tools", {"refund": stricter})
    world.step(run)

    assert world.fleet.get(run).reason == "approval-expired"
    assert world.service.performed == []


def test_of_many_who_want_to_be_the_first_admin_one_is(world: World) -> None:
    gate, outcomes = threading.Barrier(4), list[str]()

    def admit(name: str) -> None:
        gate.wait()
        try:
            world.fleet.desk.admit(name, ["admin"])
            outcomes.append(name)
        except NotAllowed:
            pass

    threads = [threading.Thread(target=admit, args=(f"u{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(outcomes) == 1
    assert [one.subject for one in world.ledger.people.principals()] == outcomes


def test_two_admins_do_not_dismiss_each_other(world: World) -> None:
    desk = world.fleet.desk
    desk.admit("a", ["admin"])
    desk.admit("b", ["admin"], by="a")
    desk.admit("c", ["viewer"], by="a")
    gate, done = threading.Barrier(2), list[str]()

    def dismiss(by: str, other: str) -> None:
        who = desk.who(by)
        gate.wait()
        try:
            desk.dismiss(other, by=who)
            done.append(by)
        except NotAllowed:
            pass

    threads = [threading.Thread(target=dismiss, args=pair) for pair in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(done) == 1
    with pytest.raises(NotAllowed):
        desk.admit(done[0], ["viewer"], by=done[0])


def test_a_first_admin_is_one_of_all_tenants(world: World) -> None:
    with pytest.raises(NotAllowed, match="all tenants"):
        world.fleet.desk.admit("root", ["admin"], tenants=["acme"])


@pytest.mark.parametrize("name", ["sqlite:///{}/books/shop.db", "sqlite:///{}/link.db"])
def test_the_key_is_beside_the_ledgers_file(tmp_path: Any, name: str) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "books" / "shop.db")
    url = name.format(tmp_path)
    fleet = Fleet(settings=Settings(database_url=url, home=tmp_path / "home", approval_secret=""))
    fleet.upgrade_database()
    fleet.desk.must_sign()

    assert (tmp_path / "books" / "shop.db.approval.key").exists()
    assert not (tmp_path / "home").exists()
    fleet.close()


@pytest.mark.parametrize("kept", [b"", b"short", b"\xff" * 64, None])
def test_a_key_file_that_holds_no_key_is_not_used(tmp_path: Any, kept: bytes | None) -> None:
    fleet = Fleet(settings=Settings(database_url="", home=tmp_path, approval_secret=""))
    fleet.ledger.now()
    key = tmp_path / "ledger.db.approval.key"
    key.mkdir() if kept is None else key.write_bytes(kept)

    with pytest.raises(UnusableKey) as refused:
        fleet.desk.must_sign()
    assert refused.value.code == "approval-key-unusable"
    assert str(key) in str(refused.value) and "HANDRAIL_APPROVAL_SECRET" in str(refused.value)
    fleet.close()


def test_an_amount_that_flows_back_takes_as_many_people(world: World) -> None:
    refund = world.write_tool(
        "refund",
        input=Refund,
        intent=lambda order, run: "refund",
        approval="always",
        amount="amount_cents",
        second_approver_above=10_000,
    )

    needed = refund.contract.approvers_for
    assert [needed({"amount_cents": n}) for n in (10_000, -10_000, 10_001, -10_001)] == [1, 1, 2, 2]
