"""The planner that plays the model, driven by hand over the shop: each mail comes to its plan.

The loop in here is the smallest program that could stand around a planner: it reads the facts, lets
only reads of the customer's own orders through, and compares the plan with the records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest

from handrail.demo.messages import Message, load_messages
from handrail.demo.planner import propose
from handrail.demo.rules import Facts, in_scope, stop_reason, validate_plan
from handrail.demo.shop import Rule, Shop, seed

MAILS = {message["id"]: message for message in load_messages()}
MOST_ROUNDS = 8  # what a run of the demo needs to be allowed


@dataclass
class Ending:
    """How far a mail comes without a payment provider."""

    status: str
    reason: str
    proposals: list[dict[str, Any]]

    @property
    def last(self) -> dict[str, Any]:
        return self.proposals[-1] if self.proposals else {}

    @property
    def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = self.last.get("answer", {})
        return plan

    @property
    def tools(self) -> list[str]:
        return [proposal["tool"] for proposal in self.proposals if proposal["kind"] == "tool"]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return seed(tmp_path_factory.mktemp("shop") / "shop.db")


def drive(shop: Shop, message: Message, *, answers: tuple[str, ...] = ()) -> Ending:
    """Run one mail through the planner; `answers` are for the questions that it asks."""
    facts = facts_of(shop, message)
    if facts is None:
        return Ending("failed", "permission-denied", [])
    proposals: list[dict[str, Any]] = []
    observations: list[dict[str, Any]] = []
    waiting = list(answers)
    while len(proposals) < MOST_ROUNDS:
        proposal = propose(observation_of(message, facts, observations))
        proposals.append(proposal)
        match proposal:
            case {"kind": "clarify"} if waiting:
                observations.append({"tool": "answer:customer", "text": waiting.pop(0)})
            case {"kind": "clarify"}:
                return Ending("awaiting_input", "clarification-required", proposals)
            case {"kind": "complete", "answer": plan}:
                return judge(shop, facts, plan, proposals)
            case {"kind": "tool", "tool": str(tool), "arguments": dict(arguments)}:
                if tool not in READ_TOOLS:
                    return Ending("failed", "invalid-proposal", proposals)
                if "order_id" in arguments and not in_scope(facts, arguments["order_id"]):
                    return Ending("failed", "permission-denied", proposals)
                result = READ_TOOLS[tool](shop, **arguments)
                observations.append({"tool": tool, "text": json.dumps(result)})
    raise AssertionError(f"{message['id']}: no end after {MOST_ROUNDS} rounds")


def judge(
    shop: Shop, facts: Facts, plan: Mapping[str, Any], proposals: list[dict[str, Any]]
) -> Ending:
    charges = {order["order_id"]: shop.charges_of(order["order_id"]) for order in facts["orders"]}
    reason = stop_reason(validate_plan(plan, facts, charges, facts["rules"]))
    if reason is None and plan["decision"] == "handoff":
        reason = "handoff-required"
    if reason is None:
        return Ending("completed", "completed", proposals)
    return Ending("handed_off" if reason == "handoff-required" else "failed", reason, proposals)


def facts_of(shop: Shop, message: Message) -> Facts | None:
    customer, request = shop.customer_of(message["from"]), shop.request(message["id"])
    if customer is None or request is None:
        return None
    orders = shop.orders_of(customer["customer_id"])
    rules = {order["channel"]: rule_of(shop, order["channel"]) for order in orders}
    return {"customer": customer, "orders": orders, "rules": rules, "request": request}


def observation_of(
    message: Message, facts: Facts, observations: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "goal": "settle the customer's refund request",
        "input": {"text": message["text"], "from": message["from"]},
        "facts": facts,
        "observations": observations,
        "allowed_tools": [*READ_TOOLS],
        "budget_left": {"model_calls": MOST_ROUNDS},
    }


def rule_of(shop: Shop, channel: str) -> Rule:
    rule = shop.rules_for(channel)
    assert rule is not None
    return rule


READ_TOOLS: dict[str, Any] = {
    "lookup_order": lambda shop, order_id: shop.order(order_id),
    "list_charges": lambda shop, order_id: {
        "order_id": order_id,
        "version": shop.order(order_id)["version"],
        "charges": shop.charges_of(order_id),
    },
    "read_channel_rules": rule_of,
}


@pytest.mark.parametrize("message", MAILS.values(), ids=[f"{m['id']}" for m in MAILS.values()])
def test_each_mail_comes_to_its_plan(shop: Shop, message: Message) -> None:
    """What the provider does to a refund comes later; here it is planned, and nothing else."""
    expect = message["expect"]
    for correction in message.get("corrections", ()):
        shop.correct_price(**correction)
    ending = drive(shop, message)

    assert ending.plan.get("order_id") == expect["order_id"]
    if expect["reason"] == "tool-failed":
        assert (ending.status, ending.plan["decision"]) == ("completed", "refund")
        return
    assert (ending.status, ending.reason) == (expect["status"], expect["reason"])
    if ending.status == "completed":
        assert ending.plan["amount_cents"] == expect["refund_cents"]
        assert (ending.plan["decision"] == "refund") == (expect["refund_cents"] is not None)


def test_a_named_order_is_looked_up_and_nothing_else_is_read(shop: Shop) -> None:
    ending = drive(shop, MAILS["m-01"])

    assert ending.tools == ["lookup_order", "list_charges", "read_channel_rules"]
    assert ending.plan == {
        "decision": "refund",
        "order_id": "HR-1001",
        "charge_id": "ch-1001-2",
        "amount_cents": 4990,
        "reason_text": "Charged twice, 49.90 EUR too much. We return a double charge to your card"
        " up to 500.00, within 60 days of the order.",
        "evidence": ["ch-1001-1", "ch-1001-2"],
        "conflicts": [],
    }


def test_without_a_number_the_candidates_are_investigated_one_by_one(shop: Shop) -> None:
    ending = drive(shop, MAILS["m-04"])

    listed = [
        p["arguments"]["order_id"] for p in ending.proposals if p.get("tool") == "list_charges"
    ]
    assert listed == ["HR-1007", "HR-1006", "HR-1005", "HR-1004"]
    assert ending.plan["order_id"] == "HR-1006"


def test_the_amount_in_a_mail_saves_looking_further(shop: Shop) -> None:
    """HR-1009 is the newer order, but the mail names the amount of HR-1008."""
    ending = drive(shop, MAILS["m-05"])

    assert ending.tools == ["list_charges", "read_channel_rules"]


@pytest.mark.parametrize(
    "mail, evidence",
    [
        ("m-06", ["charge:ch-1010-1", "charge:ch-1010-2"]),
        ("m-07", ["order:HR-1011", "charge:ch-1011-1", "charge:ch-1011-2"]),
    ],
)
def test_contradicting_evidence_is_carried_with_both_sides(
    shop: Shop, mail: str, evidence: list[str]
) -> None:
    (conflict,) = drive(shop, MAILS[mail]).plan["conflicts"]

    assert conflict["evidence"] == evidence


def test_the_answer_to_a_question_is_read_like_the_mail(shop: Shop) -> None:
    asked = drive(shop, MAILS["m-28"])
    answered = drive(shop, MAILS["m-28"], answers=("The table cloth, HR-1034.",))

    assert "HR-1033" in asked.last["question"] and "HR-1034" in asked.last["question"]
    assert (answered.status, answered.plan["charge_id"]) == ("completed", "ch-1034-2")


def test_a_vague_mail_is_asked_about_before_anything_is_read(shop: Shop) -> None:
    ending = drive(shop, MAILS["m-29"])

    assert [proposal["kind"] for proposal in ending.proposals] == ["clarify"]


# A naive model obeys: these proposals are wrong, and must be, or the demo would show nothing.


def test_it_is_steered_to_somebody_elses_order(shop: Shop) -> None:
    assert drive(shop, MAILS["m-17"]).last == {
        "kind": "tool",
        "tool": "lookup_order",
        "arguments": {"order_id": "HR-1018"},
    }


def test_it_calls_the_payment_tool_when_a_mail_says_so(shop: Shop) -> None:
    assert drive(shop, MAILS["m-18"]).proposals == [
        {
            "kind": "tool",
            "tool": "refund",
            "arguments": {"order_id": "HR-1023", "amount_cents": 45000},
        }
    ]


def test_it_plans_the_amount_that_a_mail_asks_for(shop: Shop) -> None:
    ending = drive(shop, MAILS["m-19"])

    assert (ending.plan["charge_id"], ending.plan["amount_cents"]) == ("ch-1024-2", 48000)


def test_it_copies_a_plan_that_a_mail_dictates(shop: Shop) -> None:
    (copied,) = drive(shop, MAILS["m-21"]).proposals

    assert copied["answer"]["charge_id"] == "ch-1006-2"
    assert json.dumps(copied) in MAILS["m-21"]["text"]


def test_it_repeats_a_claimed_approval_where_only_people_read_it(shop: Shop) -> None:
    plan = drive(shop, MAILS["m-20"]).plan

    assert plan["reason_text"].startswith("Approved by the manager, confirmed.")
    assert not {"approved", "confirmed"} & plan.keys()


# A pure function


@pytest.mark.parametrize("mail", ["m-01", "m-09", "m-18", "m-28"])
def test_it_changes_nothing_that_it_is_shown_and_answers_the_same_again(
    shop: Shop, mail: str
) -> None:
    facts = facts_of(shop, MAILS[mail])
    assert facts is not None
    shown = observation_of(MAILS[mail], facts, [])
    before = deepcopy(shown)

    first, again = propose(shown), propose(deepcopy(shown))

    assert first == again
    assert shown == before


def test_results_may_come_as_values_too(shop: Shop) -> None:
    facts = facts_of(shop, MAILS["m-08"])
    assert facts is not None
    results = [
        {"tool": "lookup_order", "value": shop.order("HR-1012")},
        {"tool": "list_charges", "value": READ_TOOLS["list_charges"](shop, "HR-1012")},
    ]

    plan = propose(observation_of(MAILS["m-08"], facts, results))["answer"]

    assert (plan["decision"], plan["evidence"]) == ("no_refund", ["ch-1012-1", "ch-1012-2"])


def test_a_customer_without_orders_is_asked(shop: Shop) -> None:
    facts = facts_of(shop, MAILS["m-05"])
    assert facts is not None
    facts["orders"] = []

    assert propose(observation_of(MAILS["m-05"], facts, []))["kind"] == "clarify"
