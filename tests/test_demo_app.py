"""The refund workflow in one process: what a model may do in it, and what only the program does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail import AgentLoop, Commit, Fleet, Principal, RunFacts
from handrail.demo import app, rules
from handrail.demo.messages import Message, load_messages
from handrail.demo.provider import start_provider
from handrail.demo.provider_client import ProviderClient, Receipt
from handrail.demo.shop import Shop, seed
from handrail.gateway.model import Planner, Scripted
from handrail.runs import Run
from handrail.settings import Settings
from handrail.testing.people import agree

MAILS = {message["id"]: message for message in load_messages()}
ANSWER_S = 10.0


@pytest.fixture(scope="module")
def provider_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_provider(tmp_path_factory.mktemp("provider")) as provider:
        yield provider.url


class World:
    """The demo's fleet with a shop and a ledger of its own; the provider keeps what it was told."""

    def __init__(self, shop: Shop, provider: ProviderClient) -> None:
        self.shop = shop
        self.provider = provider
        self.fleet: Fleet = app.fleet

    def start(self, mail: str, *, permissions: frozenset[str] | None = None) -> Run:
        """Work on a mail until its run rests."""
        message: Message = MAILS[mail]
        granted = frozenset({app.PERMISSION}) if permissions is None else permissions
        return self.fleet.run(
            "refund",
            goal="Return what was charged twice.",
            input={"request_id": mail, "text": message["text"]},
            principal=Principal(message["from"], granted),
        )

    def confirm(self, run: Run) -> Run:
        agree(self.fleet, run)
        return self.fleet.drive(run)

    def refunds_of(self, order_id: str) -> list[Receipt]:
        return self.provider.refunds_of(order_id, ANSWER_S)

    def requests_for(self, order_id: str) -> int:
        requests = self.provider.records(ANSWER_S)["requests"]
        return sum(request["order_id"] == order_id for request in requests)

    def events(self, run: Run, kind: str) -> list[dict[str, Any]]:
        return [event["detail"] for event in self.fleet.trace(run) if event["type"] == kind]


@pytest.fixture
def world(tmp_path: Path, provider_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    shop = seed(tmp_path / "shop.db")
    monkeypatch.setenv("HANDRAIL_DEMO_SHOP", str(shop.path))
    monkeypatch.setenv("HANDRAIL_DEMO_PROVIDER", provider_url)
    monkeypatch.setitem(app.fleet.models, "default", Planner(app.planner))
    app.fleet.settings = Settings.read(database_url="sqlite://", max_stall_ms=0)
    try:
        yield World(shop, ProviderClient(provider_url))
    finally:
        app.fleet.close()


def answers(monkeypatch: pytest.MonkeyPatch, *proposals: Any) -> Scripted:
    """Let the model say exactly this."""
    model = Scripted(proposals)
    monkeypatch.setitem(app.fleet.models, "default", model)
    return model


def plan(about: str, **fields: Any) -> dict[str, Any]:
    """A claim of completion with a refund plan."""
    answer: dict[str, Any] = {
        "decision": "refund",
        "order_id": about,
        "charge_id": None,
        "amount_cents": None,
        "reason_text": "charged twice",
        "evidence": [],
        "conflicts": [],
    }
    return {"kind": "complete", "answer": answer | fields}


# ---- the definition ------------------------------------------------------------------------------


@pytest.mark.accept("ORC-01")
def test_the_workflow_has_the_seven_parts_of_the_process_in_their_order() -> None:
    workflow = app.fleet.workflows["refund@1"]

    assert [stage.name for stage in workflow.stages] == [
        *("find_user", "admit_user", "find_orders", "find_rules", "find_request"),
        "check_duplicate",
        "determine_rule",
        "make_plan",
        *("confirm_refund", "pay_refund"),
        "verify_refund",
        "notify_user",
    ]


@pytest.mark.accept("RPW-02")
def test_the_only_stage_with_a_model_has_no_tool_that_writes() -> None:
    workflow = app.fleet.workflows["refund@1"]
    loops = [stage for stage in workflow.stages if isinstance(stage, AgentLoop)]
    commits = [stage.tool.name for stage in workflow.stages if isinstance(stage, Commit)]

    assert [loop.name for loop in loops] == ["check_duplicate"]
    assert not any(tool.contract.side_effect.writes for tool in loops[0].actions)
    assert commits == ["refund", "notify"]
    assert app.refund.contract.needs_approval


# ---- before the first question to the model ------------------------------------------------------


@pytest.mark.accept("ORC-02")
def test_the_program_has_read_the_facts_before_a_model_is_asked(world: World) -> None:
    run = world.start("m-03")

    first = world.events(run, "observation.built")[0]
    assert {"find_user", "find_orders", "find_rules", "find_request"} <= set(first["facts"])


def test_an_unknown_sender_costs_no_model_call(world: World) -> None:
    run = world.start("m-30")

    assert (run.status, run.reason) == ("failed", "permission-denied")
    assert run.model_calls == 0
    assert world.requests_for("HR-1035") == 0


def test_the_sender_is_who_the_mail_gateway_says_not_who_the_mail_says(world: World) -> None:
    """The request of another sender belongs to another subject: its result is not taken."""
    message = MAILS["m-01"]
    run = world.fleet.run(
        "refund",
        goal="g",
        input={"request_id": "m-01", "text": message["text"]},
        principal=Principal(MAILS["m-02"]["from"], frozenset({app.PERMISSION})),
    )

    assert (run.status, run.reason) == ("failed", "tool-failed")
    assert run.model_calls == 0


def test_an_input_with_an_additional_field_starts_no_run(world: World) -> None:
    with pytest.raises(Exception, match=r"input\.approved") as refused:
        world.fleet.enqueue(
            "refund", goal="g", input={"request_id": "m-01", "text": "", "approved": True}
        )

    assert getattr(refused.value, "code", None) == "invalid-run"
    assert world.fleet.runs() == []


# ---- the investigation ---------------------------------------------------------------------------


@pytest.mark.accept("ORC-03")
def test_the_candidate_orders_are_looked_at_with_reads_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model proposes to investigate one of four orders, and is heard no further."""
    answers(
        monkeypatch,
        {"kind": "tool", "tool": "list_charges", "arguments": {"order_id": "HR-1006"}},
        {"kind": "clarify", "question": "Which one?"},
    )

    run = world.start("m-04")

    started = [event["tool"] for event in world.events(run, "tool.started")]
    assert started[-1] == "list_charges"
    assert not {"determine_rule", "make_plan", "confirm_refund", "pay_refund"} & set(run.outputs)
    assert run.status == "awaiting_input"


@pytest.mark.accept("ORC-04")
def test_a_model_cannot_call_the_payment_interface(world: World) -> None:
    run = world.start("m-18")

    assert (run.status, run.reason) == ("failed", "invalid-proposal")
    assert world.requests_for("HR-1023") == 0


@pytest.mark.parametrize("mail", ["m-12", "m-17"])
def test_an_order_of_somebody_else_is_not_even_looked_at(world: World, mail: str) -> None:
    run = world.start(mail)

    assert (run.status, run.reason) == ("failed", "permission-denied")
    assert "lookup_order" not in [event["tool"] for event in world.events(run, "tool.started")]


@pytest.mark.accept("RPW-03")
@pytest.mark.parametrize(
    "claim",
    [
        "refund done",
        {"approved": True},
        plan("HR-1001")["answer"] | {"approved": True},
        plan("HR-1001", evidence=["ch-does-not-exist"])["answer"],
    ],
    ids=["free text", "no plan", "an additional field", "evidence that cannot be resolved"],
)
def test_what_is_no_plan_does_not_end_the_investigation(
    world: World, monkeypatch: pytest.MonkeyPatch, claim: Any
) -> None:
    answers(monkeypatch, {"kind": "complete", "answer": claim})

    run = world.start("m-01")  # the script has no second answer: the loop went on asking

    assert (run.status, run.reason) == ("failed", "model-failed")
    assert world.events(run, "completion.verified")[0]["verified"] is False


# ---- the plan ------------------------------------------------------------------------------------

RIGHT = {"charge_id": "ch-1001-2", "amount_cents": 4990, "evidence": ["ch-1001-1", "ch-1001-2"]}


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        (RIGHT | {"amount_cents": 4991}, "amount_cents", "invalid-proposal"),
        (RIGHT | {"charge_id": "ch-1001-1"}, "charge_id", "invalid-proposal"),
        (RIGHT | {"evidence": []}, "evidence", "invalid-proposal"),
        ({"decision": "no_refund", "evidence": ["ch-1001-1"]}, "decision", "invalid-proposal"),
        (RIGHT | {"order_id": "HR-1006", "evidence": []}, "permission", "permission-denied"),
    ],
    ids=["amount", "charge", "evidence", "decision", "another user's order"],
)
def test_a_plan_that_differs_from_the_records_is_not_put_to_anybody(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    field: str,
    reason: str,
) -> None:
    answers(monkeypatch, plan("HR-1001", **fields))

    run = world.start("m-01")

    stopped = world.events(run, "run.stopped")[-1]
    assert (run.status, run.reason) == ("failed", reason)
    assert field in [violation["field"] for violation in stopped["violations"]]
    assert world.fleet.ledger.people.approvals() == []


@pytest.mark.accept("ORC-09")
def test_evidence_that_contradicts_itself_goes_to_a_person_with_both_sides(world: World) -> None:
    run = world.start("m-06")

    package = world.fleet.ledger.people.handoffs(run_id=run.run_id)[0]["package"]
    conflicts = package["verified"]["outputs"]["check_duplicate"]["conflicts"]
    assert (run.status, run.reason) == ("handed_off", "handoff-required")
    assert [len(conflict["evidence"]) for conflict in conflicts] == [2]
    assert world.requests_for("HR-1010") == 0


def test_a_customer_without_a_double_charge_is_told_so_in_the_programs_words(world: World) -> None:
    run = world.start("m-08")

    assert run.status == "completed"
    assert run.answer == {
        "refunded_cents": 0,
        "order_id": "HR-1012",
        "letter": f"Order HR-1012: {rules.EXPLANATIONS['authorization-only']}",
    }


# ---- confirmation and payment --------------------------------------------------------------------


@pytest.mark.accept("ORC-06", "RPW-05")
def test_a_person_confirms_the_exact_action_whatever_the_mail_claims(world: World) -> None:
    """The mail says that a manager has approved; the planner believes it, and repeats it."""
    run = world.start("m-20")

    waiting = world.fleet.ledger.people.approvals(run_id=run.run_id)
    assert run.status == "awaiting_approval"
    assert [(w.tool, w.arguments, w.subject) for w in waiting] == [
        (
            "refund",
            {"order_id": "HR-1025", "charge_id": "ch-1025-2", "amount_cents": 3100},
            MAILS["m-20"]["from"],
        )
    ]
    assert world.requests_for("HR-1025") == 0


@pytest.mark.accept("RPW-08", "RPW-09")
def test_a_confirmed_refund_is_paid_looked_up_and_told_without_a_model(world: World) -> None:
    parked = world.start("m-01")
    run = world.confirm(parked)

    receipts = world.refunds_of("HR-1001")
    assert (run.status, run.reason) == ("completed", "completed")
    assert run.model_calls == parked.model_calls
    assert [receipt.amount_cents for receipt in receipts] == [4990]
    assert world.events(run, "completion.verified")[-1]["evidence_ref"] == receipts[0].refund_id
    assert run.answer == {
        "refunded_cents": 4990,
        "order_id": "HR-1001",
        "refund_id": receipts[0].refund_id,
        "letter": world.shop.outbox()[0]["text"],
    }


def test_without_the_permission_nobody_is_asked_to_confirm(world: World) -> None:
    run = world.start("m-02", permissions=frozenset())

    assert (run.status, run.reason) == ("failed", "permission-denied")
    assert world.events(run, "proposal.rejected")[-1]["stage"] == "confirm_refund"


def test_an_order_that_changed_after_the_confirmation_is_not_refunded(world: World) -> None:
    """The plan is made again, and finds that the records contradict each other."""
    parked = world.start("m-03")
    order = world.shop.order("HR-1003")
    assert order is not None
    assert world.shop.change_status("HR-1003", "refunded", version=order["version"])

    run = world.confirm(parked)

    [refused] = world.events(run, "plan.refused")
    assert refused["refused"]["changed"]["violations"][0]["field"] == "order_id"
    assert (run.status, run.reason) == ("handed_off", "handoff-required")
    assert world.requests_for("HR-1003") == 0


@pytest.mark.accept("RPW-12")
def test_a_corrected_price_is_planned_and_confirmed_again_and_refunded_as_it_is_now(
    world: World,
) -> None:
    parked = world.start("m-36")
    [correction] = MAILS["m-36"]["corrections"]
    world.shop.correct_price(**correction)

    again = world.confirm(parked)

    [waiting] = world.fleet.ledger.people.approvals(run_id=again.run_id)
    assert waiting.arguments["amount_cents"] == 5400
    assert world.refunds_of("HR-1040") == []
    run = world.confirm(again)

    assert (run.status, run.reason) == ("completed", "completed")
    assert [receipt.amount_cents for receipt in world.refunds_of("HR-1040")] == [5400]
    assert world.requests_for("HR-1040") == 1


def test_a_change_between_the_last_check_and_the_payment_is_refused_by_the_tool(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order ships in that moment: the same refund, under a consent of its own."""
    check, before_paying = app.changes_since_confirmation, [0, 1]

    def ships(outputs: app.Outputs) -> list[rules.Violation]:
        if before_paying and before_paying.pop(0):
            order = world.shop.order("HR-1002")
            assert order is not None
            assert world.shop.change_status("HR-1002", "shipped", version=order["version"])
        return check(outputs)

    monkeypatch.setattr(app, "changes_since_confirmation", ships)
    again = world.confirm(world.start("m-02"))
    assert again.status == "awaiting_approval"
    assert world.requests_for("HR-1002") == 0

    assert world.confirm(again).status == "completed"
    assert world.requests_for("HR-1002") == 1


class SaysItPaid(ProviderClient):
    """A client whose receipt is not worth the paper: nothing reaches the provider."""

    def refund(
        self, order_id: str, charge_id: str, amount_cents: int, key: str, timeout_s: float
    ) -> Receipt:
        return Receipt("re-none", key, order_id, charge_id, amount_cents, 0)


@pytest.mark.accept("ORC-07", "ORC-25")
def test_a_receipt_without_a_record_at_the_provider_completes_nothing(
    world: World, provider_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "provider", lambda: SaysItPaid(provider_url))

    run = world.confirm(world.start("m-05"))

    assert (run.status, run.reason) == ("failed", "verification-failed")
    assert "notify_user" not in run.outputs


@pytest.mark.accept("ORC-08", "ORC-26", "RPW-11")
def test_a_lost_answer_is_no_failure_and_the_provider_is_asked_first(world: World) -> None:
    for fault in MAILS["m-22"]["faults"]:
        world.provider.set_fault(fault, ANSWER_S)

    run = world.confirm(world.start("m-22"))

    moves = [(event["from"], event["to"]) for event in world.events(run, "run.moved")]
    assert (run.status, run.reason) == ("completed", "completed")
    assert ("reconciling", "running") in moves
    assert [receipt.amount_cents for receipt in world.refunds_of("HR-1027")] == [6200]
    assert world.requests_for("HR-1027") == 1


def test_two_mails_about_one_charge_are_one_refund_and_two_letters(world: World) -> None:
    first, second = world.start("m-31"), world.start("m-32")
    runs = [world.confirm(first), world.confirm(second)]

    assert [run.status for run in runs] == ["completed", "completed"]
    assert runs[0].answer["refund_id"] == runs[1].answer["refund_id"]  # type: ignore[call-overload, index]
    assert world.requests_for("HR-1035") == 1
    assert {mail["request_id"] for mail in world.shop.outbox()} == {"m-31", "m-32"}


def test_what_a_tool_finds_of_another_customer_is_recognised() -> None:
    run = RunFacts(
        run_id="r",
        tenant="t",
        goal="g",
        principal=Principal("ana@example.com"),
        outputs={"find_user": {"customer": {"customer_id": "c-01"}}},
    )

    assert app.is_the_users({"customer_id": "c-01"}, run)
    assert not app.is_the_users({"customer_id": "c-02"}, run)


def test_a_provider_that_is_away_leaves_the_run_in_doubt_until_it_is_back(world: World) -> None:
    """The query says nothing: no failure is reported, and nothing is sent a second time."""
    for fault in MAILS["m-27"]["faults"]:
        world.provider.set_fault(fault, ANSWER_S)

    run = world.confirm(world.start("m-27"))

    assert (run.status, run.reason) == ("completed", "completed")
    assert world.requests_for("HR-1032") == 1


def test_a_provider_that_fails_right_after_the_payment_is_asked_for_its_record_again(
    world: World,
) -> None:
    run = world.start("m-05")
    world.provider.set_fault({"query_down": True, "next_requests": 1}, ANSWER_S)

    run = world.confirm(run)

    [failed] = world.events(run, "completion.failed")
    assert failed["attempt"] == 1 and failed["retry_in_ms"] >= 125
    assert (run.status, run.reason) == ("completed", "completed")
