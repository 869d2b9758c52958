"""The program's own view of a refund: what the records call for, and what of a plan holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from handrail.demo.rules import (
    EXPLANATIONS,
    Facts,
    Finding,
    Plan,
    RefundAction,
    Violation,
    assess,
    check_commit,
    conflicts,
    duplicates,
    explain,
    in_scope,
    is_duplicate,
    parse_plan,
    refund_action,
    refund_key,
    stop_reason,
    validate_plan,
)
from handrail.demo.shop import Charge, ChargeKind, Order, OrderStatus, Rule

ASKED_ON = "2026-08-06"

CARD: Rule = {
    "channel": "card",
    "policy": "automatic",
    "limit_cents": 50000,
    "within_days": 60,
    "wording": "",
}
PERSON: Rule = {**CARD, "policy": "person", "limit_cents": None, "within_days": None}
FORBIDDEN: Rule = {**PERSON, "policy": "forbidden"}
NO_LIMITS: Rule = {**PERSON, "policy": "automatic"}


def order(
    order_id: str = "HR-1",
    amount_cents: int = 5000,
    *,
    status: OrderStatus = "paid",
    placed_on: str = "2026-08-05",
    version: int = 1,
) -> Order:
    return {
        "order_id": order_id,
        "customer_id": "c-1",
        "item": "lamp",
        "amount_cents": amount_cents,
        "currency": "EUR",
        "channel": "card",
        "status": status,
        "placed_on": placed_on,
        "version": version,
    }


def lines(*kinds_and_cents: tuple[ChargeKind, int] | tuple[ChargeKind, int, int]) -> list[Charge]:
    """The payment log of an order; a third number names the line that is reversed, from 1."""
    return [
        {
            "charge_id": f"ch-{number}",
            "order_id": "HR-1",
            "kind": line[0],
            "amount_cents": line[1],
            "charged_time": f"2026-08-05T10:00:{number:02d}Z",
            "reference": f"pay-{number}",
            "reverses": f"ch-{line[2]}" if len(line) == 3 else None,
        }
        for number, line in enumerate(kinds_and_cents, start=1)
    ]


TWICE = lines(("capture", 5000), ("capture", 5000))
ONCE = lines(("capture", 5000))


def facts(*orders: Order) -> Facts:
    return {
        "customer": {"customer_id": "c-1", "name": "Ana", "email": "ana@example.com"},
        "orders": orders or (order(),),
        "rules": {"card": CARD},
        "request": {
            "request_id": "m-1",
            "email": "ana@example.com",
            "text": "charged twice",
            "received_on": ASKED_ON,
            "answered": False,
        },
    }


def plan(**changes: object) -> dict[str, Any]:
    """The plan that the records of `TWICE` bear out, with changes."""
    return {
        "decision": "refund",
        "order_id": "HR-1",
        "charge_id": "ch-2",
        "amount_cents": 5000,
        "reason_text": "charged twice",
        "evidence": ["ch-1", "ch-2"],
        "conflicts": [],
    } | changes


def no_refund(**changes: object) -> dict[str, Any]:
    nothing = {"decision": "no_refund", "charge_id": None, "amount_cents": None}
    return plan(**nothing, **changes)


def check(
    proposed: object,
    charges: Sequence[Charge] = TWICE,
    *,
    rule: Rule = CARD,
    of: Order | None = None,
) -> list[Violation]:
    return validate_plan(proposed, facts(of or order()), {"HR-1": charges}, {"card": rule})


def fields(violations: Sequence[Violation]) -> list[str]:
    return [violation.field for violation in violations]


# Duplicates


@pytest.mark.parametrize(
    "charges, surplus",
    [
        ([], []),
        (ONCE, []),
        (TWICE, ["ch-2"]),
        (lines(("authorization", 5000), ("capture", 5000)), []),  # one payment, two lines
        (lines(("authorization", 5000), ("authorization", 5000)), []),  # no money has moved
        (lines(("capture", 2500), ("capture", 2500)), []),  # instalments make up the price
        (lines(("capture", 5000), ("capture", 5000), ("void", 5000, 2)), []),
        (lines(("capture", 5000), ("capture", 5000), ("refund", 5000, 1)), []),
        (lines(("capture", 5000), ("capture", 5000), ("capture", 5000)), ["ch-2", "ch-3"]),
        (
            lines(("capture", 5000), ("capture", 5000), ("capture", 5000), ("void", 5000, 2)),
            ["ch-3"],
        ),
        (lines(("capture", 5000), ("capture", 700)), []),  # too much, but nothing twice
        (lines(("capture", 2500), ("capture", 2500), ("capture", 2500)), ["ch-3"]),
        (lines(("capture", 5000), ("capture", 5000), ("refund", 100, 2)), []),  # part is back
    ],
)
def test_a_duplicate_repeats_a_capture_and_exceeds_the_price(
    charges: list[Charge], surplus: list[str]
) -> None:
    assert [charge["charge_id"] for charge in duplicates(order(), charges)] == surplus
    assert is_duplicate(order(), charges) == bool(surplus)


# Conflicts


def test_two_lines_with_one_payment_reference_contradict_each_other() -> None:
    charges = [TWICE[0], Charge({**TWICE[1], "reference": TWICE[0]["reference"]})]

    (conflict,) = conflicts(order(), charges)

    assert conflict.code == "one-payment-two-lines"
    assert conflict.evidence == ("charge:ch-1", "charge:ch-2")


def test_refunded_without_a_refund_is_a_contradiction() -> None:
    (conflict,) = conflicts(order(status="refunded"), TWICE)

    assert conflict.code == "refunded-without-refund"
    assert conflict.evidence == ("order:HR-1", "charge:ch-1", "charge:ch-2")


def test_money_beyond_the_price_that_repeats_nothing_is_a_contradiction() -> None:
    (conflict,) = conflicts(order(), lines(("capture", 5000), ("capture", 700)))

    assert conflict.code == "excess-unexplained"


@pytest.mark.parametrize(
    "status, charges",
    [
        ("paid", TWICE),
        ("paid", ONCE),
        ("shipped", lines(("authorization", 5000), ("capture", 5000))),
        ("refunded", lines(("capture", 5000), ("refund", 5000, 1))),
        ("cancelled", lines(("authorization", 5000), ("void", 5000, 1))),
    ],
)
def test_records_that_agree_hold_no_conflict(status: OrderStatus, charges: list[Charge]) -> None:
    assert conflicts(order(status=status), charges) == ()


# The finding

LARGE = lines(("capture", 50000), ("capture", 50000))
TOO_LARGE = lines(("capture", 50001), ("capture", 50001))


@pytest.mark.parametrize(
    "of, charges, rule, decision, code",
    [
        (order(), TWICE, CARD, "refund", "double-charge"),
        (order(), ONCE, CARD, "no_refund", "charged-once"),
        (order(), [], CARD, "no_refund", "charged-once"),
        (
            order(),
            lines(("authorization", 5000), ("capture", 5000)),
            CARD,
            "no_refund",
            "authorization-only",
        ),
        (order(), lines(("capture", 2500), ("capture", 2500)), CARD, "no_refund", "instalments"),
        (
            order(),
            lines(("capture", 5000), ("capture", 5000), ("void", 5000, 2)),
            CARD,
            "no_refund",
            "already-returned",
        ),
        (order(status="refunded"), TWICE, CARD, "handoff", "conflicting-evidence"),
        (
            order(),
            lines(("capture", 5000), ("capture", 5000), ("capture", 5000)),
            CARD,
            "handoff",
            "several-duplicates",
        ),
        (order(), TWICE, FORBIDDEN, "no_refund", "refunds-forbidden"),
        (order(), TWICE, PERSON, "handoff", "person-decides"),
        (
            order(),
            TWICE,
            None,
            "handoff",
            "channel-without-rule",
        ),  # what is unknown goes to a person
        (order(amount_cents=50000), LARGE, CARD, "refund", "double-charge"),  # exactly the limit
        (order(amount_cents=50001), TOO_LARGE, CARD, "handoff", "above-limit"),
        (order(amount_cents=50001), TOO_LARGE, NO_LIMITS, "refund", "double-charge"),
        (order(placed_on="2026-06-07"), TWICE, CARD, "refund", "double-charge"),  # the 60th day
        (order(placed_on="2026-06-06"), TWICE, CARD, "handoff", "outside-window"),  # the 61st
        (order(placed_on="2020-01-01"), TWICE, NO_LIMITS, "refund", "double-charge"),
    ],
)
def test_the_records_and_the_rules_decide(
    of: Order,
    charges: list[Charge],
    rule: Rule | None,
    decision: Literal["refund", "no_refund", "handoff"],
    code: str,
) -> None:
    finding = assess(of, charges, {} if rule is None else {"card": rule}, ASKED_ON)

    assert (finding.decision, finding.code) == (decision, code)
    if decision == "refund":
        assert (finding.charge_id, finding.amount_cents) == ("ch-2", charges[1]["amount_cents"])


# Reading a plan


def test_a_plan_is_read_into_its_fields() -> None:
    parsed = parse_plan(plan())

    assert isinstance(parsed, Plan)
    assert (parsed.order_id, parsed.amount_cents, parsed.evidence) == (
        "HR-1",
        5000,
        ("ch-1", "ch-2"),
    )


@pytest.mark.parametrize(
    "answer, field",
    [
        ("I have refunded the customer.", "plan"),  # free text is no plan
        (None, "plan"),
        ([], "plan"),
        (plan(approved=True), "approved"),  # no room for a consent
        (plan(decision="pay"), "decision"),
        (plan(amount_cents="5000"), "amount_cents"),
        (plan(amount_cents=50.0), "amount_cents"),
        (plan(amount_cents=True), "amount_cents"),
        (plan(amount_cents=-5000), "amount_cents"),
        (plan(order_id=1), "order_id"),
        (plan(evidence="ch-1"), "evidence"),
        (plan(reason_text="x" * 2001), "reason_text"),
        (plan(conflicts=[{"code": "x", "evidence": ["only-one"]}]), "conflicts"),
        ({key: value for key, value in plan().items() if key != "charge_id"}, "charge_id"),
    ],
)
def test_what_is_no_plan_is_named_and_refused(answer: object, field: str) -> None:
    violations = check(answer)

    assert fields(violations) == [field]
    assert stop_reason(violations) == "invalid-proposal"


# Comparing a plan with the records


@pytest.mark.parametrize(
    "proposed, charges, rule",
    [
        (plan(), TWICE, CARD),
        (no_refund(evidence=["ch-1"]), ONCE, CARD),
        (no_refund(), TWICE, FORBIDDEN),
        (plan(decision="handoff"), TWICE, CARD),  # asking for a person is always right
        (no_refund(order_id=None, evidence=["ch-1"]), ONCE, CARD),
        (no_refund(order_id=None, evidence=[]), [], CARD),  # there is nothing to cite
    ],
)
def test_a_plan_that_the_records_bear_out_has_no_violation(
    proposed: dict[str, Any], charges: list[Charge], rule: Rule
) -> None:
    assert check(proposed, charges, rule=rule) == []


@pytest.mark.parametrize(
    "proposed, charges, rule, field, reason",
    [
        (plan(order_id="HR-2"), TWICE, CARD, "permission", "permission-denied"),
        (plan(decision="handoff", order_id="HR-2"), TWICE, CARD, "permission", "permission-denied"),
        (plan(charge_id="ch-1"), TWICE, CARD, "charge_id", "invalid-proposal"),
        (plan(amount_cents=4999), TWICE, CARD, "amount_cents", "invalid-proposal"),
        (plan(amount_cents=48000), TWICE, CARD, "amount_cents", "invalid-proposal"),
        (plan(order_id=None), TWICE, CARD, "order_id", "invalid-proposal"),
        (plan(evidence=["ch-1"]), ONCE, CARD, "order_id", "invalid-proposal"),  # not that order
        (no_refund(), TWICE, CARD, "decision", "invalid-proposal"),  # the customer is right
        (no_refund(order_id=None), TWICE, CARD, "decision", "invalid-proposal"),
        (plan(), TWICE, FORBIDDEN, "decision", "invalid-proposal"),
        (plan(), TWICE, PERSON, "decision", "handoff-required"),
        (no_refund(), TWICE, PERSON, "decision", "handoff-required"),
        (plan(evidence=["ch-1", "ch-2", "ch-9"]), TWICE, CARD, "evidence", "invalid-proposal"),
        (plan(evidence=["ch-1"]), TWICE, CARD, "evidence", "invalid-proposal"),
        (no_refund(evidence=[]), ONCE, CARD, "evidence", "invalid-proposal"),
        (
            plan(conflicts=[{"code": "x", "evidence": ["charge:ch-1", "charge:ch-2"]}]),
            TWICE,
            CARD,
            "conflicts",
            "handoff-required",
        ),
    ],
)
def test_a_plan_that_differs_is_refused_and_the_field_named(
    proposed: dict[str, Any], charges: list[Charge], rule: Rule, field: str, reason: str
) -> None:
    violations = check(proposed, charges, rule=rule)

    assert fields(violations) == [field]
    assert stop_reason(violations) == reason


def test_a_plan_that_overlooks_a_conflict_goes_to_a_person_with_both_sides() -> None:
    violations = check(plan(), of=order(status="refunded"))

    assert fields(violations) == ["conflicts"]
    assert stop_reason(violations) == "handoff-required"
    assert "order:HR-1" in violations[0].detail and "charge:ch-2" in violations[0].detail


def test_a_plan_about_no_order_must_hold_for_each_order() -> None:
    second = order("HR-2")
    both = facts(order(), second)
    elsewhere = [Charge({**line, "order_id": "HR-2"}) for line in TWICE]

    violations = validate_plan(
        no_refund(order_id=None), both, {"HR-1": ONCE, "HR-2": elsewhere}, {"card": CARD}
    )

    assert fields(violations) == ["decision"]
    assert violations[0].detail.startswith("HR-2")


def test_a_refusal_does_not_tell_whether_the_order_exists() -> None:
    """HR-2 has charges on record, HR-3 does not exist; the customer has neither."""
    charges = {"HR-1": TWICE, "HR-2": TWICE}
    refusals = [
        validate_plan(plan(order_id=number), facts(), charges, {"card": CARD})
        for number in ("HR-2", "HR-3")
    ]

    assert refusals[0][0].detail.replace("HR-2", "HR-3") == refusals[1][0].detail
    assert in_scope(facts(), "HR-2") is in_scope(facts(), "HR-3") is None


def test_the_gravest_reason_stops_a_run() -> None:
    def violation(reason: Any) -> Violation:
        return Violation("field", "code", "detail", reason)

    person, invalid, denied = map(
        violation, ("handoff-required", "invalid-proposal", "permission-denied")
    )

    assert stop_reason([]) is None
    assert stop_reason([person]) == "handoff-required"
    assert stop_reason([person, invalid]) == "invalid-proposal"
    assert stop_reason([person, invalid, denied]) == "permission-denied"


# The action, and the commit

RECORDS = {"HR-1": TWICE}
RULES = {"card": CARD}


def confirmed_action() -> RefundAction:
    action = refund_action("HR-1", facts(), RECORDS, RULES)
    assert action is not None
    return action


def test_the_action_comes_from_the_records_alone() -> None:
    assert confirmed_action() == RefundAction(
        order_id="HR-1",
        order_version=1,
        charge_id="ch-2",
        amount_cents=5000,
        currency="EUR",
        intent_key="refund:HR-1:ch-2",
    )


@pytest.mark.parametrize("number, charges", [("HR-2", TWICE), ("HR-1", ONCE)])
def test_there_is_no_action_without_a_refund_due(number: str, charges: list[Charge]) -> None:
    assert refund_action(number, facts(), {"HR-1": charges, "HR-2": charges}, RULES) is None


def test_the_intent_names_the_charge_and_neither_run_nor_mail() -> None:
    assert refund_key("HR-1", "ch-2") == refund_key("HR-1", "ch-2")
    assert (
        len({refund_key("HR-1", "ch-1"), refund_key("HR-1", "ch-2"), refund_key("HR-2", "ch-2")})
        == 3
    )


def test_a_confirmed_action_that_the_records_still_bear_out_may_be_committed() -> None:
    assert check_commit(confirmed_action(), facts(), RECORDS, RULES) == []


@pytest.mark.parametrize(
    "change, field, reason",
    [
        ({"order_id": "HR-2"}, "permission", "permission-denied"),
        ({"charge_id": "ch-1"}, "charge_id", "invalid-proposal"),
        ({"amount_cents": 5001}, "amount_cents", "invalid-proposal"),
        ({"currency": "USD"}, "currency", "invalid-proposal"),
        ({"intent_key": "refund:HR-1:ch-2:again"}, "intent_key", "invalid-proposal"),
        ({"order_version": 2}, "order_version", "invalid-proposal"),
    ],
)
def test_each_field_of_a_confirmed_action_is_compared(
    change: dict[str, Any], field: str, reason: str
) -> None:
    violations = check_commit(replace(confirmed_action(), **change), facts(), RECORDS, RULES)

    assert fields(violations) == [field]
    assert stop_reason(violations) == reason


def test_an_order_that_changed_after_the_confirmation_is_not_refunded() -> None:
    moved = facts(order(status="shipped", version=2))

    assert fields(check_commit(confirmed_action(), moved, RECORDS, RULES)) == ["order_version"]


def test_a_charge_that_was_voided_after_the_confirmation_is_not_refunded() -> None:
    """Both are named: the records call for nothing now, and the order has moved."""
    voided = {"HR-1": lines(("capture", 5000), ("capture", 5000), ("void", 5000, 2))}
    moved = facts(order(version=2))

    violations = check_commit(confirmed_action(), moved, voided, RULES)

    assert fields(violations) == ["order_id", "order_version"]


# What the customer is told


def test_the_mail_of_a_refund_names_order_and_amount() -> None:
    mail = explain(assess(order(), TWICE, RULES, ASKED_ON), order())

    assert "HR-1" in mail and "50.00 EUR" in mail


def test_every_ending_without_a_person_has_its_words() -> None:
    for charges in (ONCE, lines(("authorization", 5000), ("capture", 5000))):
        finding = assess(order(), charges, RULES, ASKED_ON)
        assert EXPLANATIONS[finding.code] in explain(finding, order())
    assert explain(None, None) == EXPLANATIONS["charged-once"]


def test_a_handed_off_customer_is_told_that_a_person_will_write() -> None:
    finding = Finding("HR-1", "handoff", "above-limit", "ch-2", 5000)

    assert (
        explain(finding, order()) == "Order HR-1: A colleague will look into this and write to you."
    )
