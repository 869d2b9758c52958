"""What the shop's records say about a refund, and what of a plan they bear out.

Pure: no I/O, no clock, and no word of the planner is believed. The program finds order, charge,
amount and permission in the records by itself; a plan only chooses among what it found. Every
disagreement is a `Violation` that names the field, and its `reason` is how the run has to stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Final, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from handrail.demo.shop import Charge, Customer, Order, Rule, SupportRequest, money

Decision = Literal["refund", "no_refund", "handoff"]
StopReason = Literal["permission-denied", "invalid-proposal", "handoff-required"]

Records = Mapping[str, Sequence[Charge]]  # the charges of each order in scope, by order id
Rules = Mapping[str, Rule]  # by payment channel


class Facts(TypedDict):
    """What the program has read before the planner is asked anything."""

    customer: Customer
    orders: Sequence[Order]  # the scope: whatever is not in here, this customer may not touch
    rules: Rules
    request: SupportRequest


class Conflict(BaseModel):
    """Two pieces of evidence that cannot both be true, e.g. `order:HR-1` and `charge:ch-1-2`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    code: Annotated[StrictStr, Field(max_length=60)]
    evidence: Annotated[tuple[StrictStr, ...], Field(min_length=2)]


class Plan(BaseModel):
    """A planner's answer. Nothing but these fields is read: there is no room for an "approved"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    decision: Decision
    order_id: StrictStr | None
    charge_id: StrictStr | None
    amount_cents: Annotated[StrictInt, Field(gt=0)] | None
    reason_text: Annotated[StrictStr, Field(max_length=2000)]  # shown to people, never acted on
    evidence: tuple[StrictStr, ...]  # charge ids
    conflicts: tuple[Conflict, ...]


@dataclass(frozen=True, slots=True)
class Violation:
    """One point in which a plan, or an action, differs from what the program found."""

    field: str  # of the plan or action; `permission` where the customer may not touch the order
    code: str
    detail: str
    reason: StopReason


@dataclass(frozen=True, slots=True)
class Finding:
    """What the records say about one order; `code` is the reason, in one stable word.

    Charge and amount are given wherever one double charge was found, also where the rules leave
    the decision to a person or forbid the refund.
    """

    order_id: str
    decision: Decision
    code: str
    charge_id: str | None = None
    amount_cents: int | None = None
    conflicts: tuple[Conflict, ...] = ()


@dataclass(frozen=True, slots=True)
class RefundAction:
    """The exact action that a person confirms and the commit carries out."""

    order_id: str
    order_version: int
    charge_id: str
    amount_cents: int
    currency: str
    intent_key: str


EXPLANATIONS: Final[Mapping[str, str]] = {
    "double-charge": "This order was charged twice, and the second payment goes back to you.",
    "authorization-only": "Your bank shows a reservation and its payment: that is one charge.",
    "already-returned": "The second payment was already cancelled; your bank will release it.",
    "instalments": "The payments are instalments that together make the price of your order.",
    "charged-once": "Our records show one payment for each order, and no double charge.",
    "refunds-forbidden": "This means of payment cannot be refunded.",
}
A_PERSON_WILL_WRITE: Final = "A colleague will look into this and write to you."


def refund_key(order_id: str, charge_id: str) -> str:
    """The identity of the intent to return one charge: the same in every run that wants it."""
    return f"refund:{order_id}:{charge_id}"


def in_scope(facts: Facts, order_id: str) -> Order | None:
    """The order, if this customer may touch it. Unknown and somebody else's look the same."""
    return next((order for order in facts["orders"] if order["order_id"] == order_id), None)


def is_duplicate(order: Order, charges: Sequence[Charge]) -> bool:
    """Whether the order was charged more than once for the same thing."""
    return bool(duplicates(order, charges))


def duplicates(order: Order, charges: Sequence[Charge]) -> tuple[Charge, ...]:
    """The captures to give back: each repeats an earlier one and exceeds the price of the order.

    The latest ones are the surplus. Authorizations move no money, and a capture that was voided or
    refunded is gone. Instalments repeat an amount too, but make up the price: no excess is left.
    """
    excess = _excess_cents(order, charges)
    standing = _standing(charges)
    surplus: list[Charge] = []
    for position in reversed(range(len(standing))):
        amount = standing[position]["amount_cents"]
        repeats = any(earlier["amount_cents"] == amount for earlier in standing[:position])
        if repeats and amount <= excess:
            surplus.insert(0, standing[position])
            excess -= amount
    return tuple(surplus)


def conflicts(order: Order, charges: Sequence[Charge]) -> tuple[Conflict, ...]:
    """Where the shop's records contradict themselves. Only a person can say which side is right."""
    found: list[Conflict] = []
    first_by_reference: dict[str, Charge] = {}
    for capture in _captures(charges):
        first = first_by_reference.setdefault(capture["reference"], capture)
        if first is not capture:
            found.append(_conflict("one-payment-two-lines", _line(first), _line(capture)))

    standing = _standing(charges)
    order_ref = f"order:{order['order_id']}"
    if order["status"] == "refunded" and standing:
        found.append(_conflict("refunded-without-refund", order_ref, *map(_line, standing)))

    repeated_cents = sum(charge["amount_cents"] for charge in duplicates(order, charges))
    if _excess_cents(order, charges) > repeated_cents:
        found.append(_conflict("excess-unexplained", order_ref, *map(_line, standing)))
    return tuple(found)


def assess(order: Order, charges: Sequence[Charge], rules: Rules, received_on: str) -> Finding:
    """Decide about one order from the records alone. `received_on`: when the customer asked.

    In doubt a person decides: on a contradiction, on more than one surplus payment, without a rule.
    """
    order_id = order["order_id"]
    contradictions = conflicts(order, charges)
    if contradictions:
        return Finding(order_id, "handoff", "conflicting-evidence", conflicts=contradictions)
    match duplicates(order, charges):
        case ():
            return Finding(order_id, "no_refund", _why_not(charges))
        case (charge,):
            decision, code = _apply_rule(rules.get(order["channel"]), order, charge, received_on)
            return Finding(order_id, decision, code, charge["charge_id"], charge["amount_cents"])
        case _:
            return Finding(order_id, "handoff", "several-duplicates")


def parse_plan(answer: object) -> Plan | list[Violation]:
    """Read an untrusted answer. Free text, a missing, wrong or extra field is a violation."""
    try:
        return Plan.model_validate(dict(answer) if isinstance(answer, Mapping) else answer)
    except ValidationError as error:
        return [
            Violation(
                field=str(problem["loc"][0]) if problem["loc"] else "plan",
                code=problem["type"].replace("_", "-"),
                detail=problem["msg"],
                reason="invalid-proposal",
            )
            for problem in error.errors(include_input=False, include_url=False)
        ]


def validate_plan(plan: object, facts: Facts, charges: Records, rules: Rules) -> list[Violation]:
    """Compare a plan with the records; no violation means that the program found the same.

    Asking for a person is always right. A plan about no order in particular can only say that
    there is nothing to refund, and holds if that is true of every order in scope.
    """
    parsed = plan if isinstance(plan, Plan) else parse_plan(plan)
    if isinstance(parsed, list):
        return parsed
    if parsed.order_id is None:
        return _about_all(parsed, facts, charges, rules)
    order = in_scope(facts, parsed.order_id)
    if order is None:
        return [_not_permitted(parsed.order_id)]
    lines = charges.get(order["order_id"], ())
    finding = assess(order, lines, rules, facts["request"]["received_on"])
    return [*_decision(parsed, finding), *_evidence(parsed, lines, {finding.charge_id} - {None})]


def stop_reason(violations: Sequence[Violation]) -> StopReason | None:
    """How a run with these violations stops: the gravest reason first; None without any.

    A person is called last: a plan that was tampered with is no base for anybody's decision.
    """
    order: tuple[StopReason, ...] = ("permission-denied", "invalid-proposal", "handoff-required")
    reasons = {violation.reason for violation in violations}
    return next((reason for reason in order if reason in reasons), None)


def refund_action(
    order_id: str, facts: Facts, charges: Records, rules: Rules
) -> RefundAction | None:
    """The refund that the records call for; None where they call for none, or for a person."""
    order = in_scope(facts, order_id)
    if order is None:
        return None
    finding = assess(order, charges.get(order_id, ()), rules, facts["request"]["received_on"])
    if finding.decision != "refund" or not finding.charge_id or not finding.amount_cents:
        return None
    return RefundAction(
        order_id=order_id,
        order_version=order["version"],
        charge_id=finding.charge_id,
        amount_cents=finding.amount_cents,
        currency=order["currency"],
        intent_key=refund_key(order_id, finding.charge_id),
    )


def check_commit(
    confirmed: RefundAction, facts: Facts, charges: Records, rules: Rules
) -> list[Violation]:
    """Compare a confirmed action, field by field, with records that were read just now.

    An order that changed since the confirmation is a violation of `order_version`, whatever the
    change was: what was confirmed is not what would be done, so the plan has to be made again.
    """
    order = in_scope(facts, confirmed.order_id)
    if order is None:
        return [_not_permitted(confirmed.order_id)]
    found = refund_action(confirmed.order_id, facts, charges, rules)
    if found is not None:
        return [
            _differs(field, getattr(confirmed, field), getattr(found, field))
            for field in RefundAction.__dataclass_fields__
            if getattr(confirmed, field) != getattr(found, field)
        ]
    detail = f"the records call for no refund of {confirmed.order_id}"
    violations = [Violation("order_id", "no-refund-due", detail, "invalid-proposal")]
    if confirmed.order_version != order["version"]:
        violations.append(_differs("order_version", confirmed.order_version, order["version"]))
    return violations


def explain(finding: Finding | None, order: Order | None) -> str:
    """The mail to the customer, in the program's words: a planner's text is never sent.

    Without a finding: the mail that no order of the customer was charged twice.
    """
    if finding is None or order is None:
        return EXPLANATIONS["charged-once"]
    text = f"Order {finding.order_id}: {EXPLANATIONS.get(finding.code, A_PERSON_WILL_WRITE)}"
    if finding.decision == "refund" and finding.amount_cents:
        text += f" Amount: {money(finding.amount_cents, order['currency'])}."
    return text


def _apply_rule(
    rule: Rule | None, order: Order, charge: Charge, received_on: str
) -> tuple[Decision, str]:
    if rule is None:
        return "handoff", "channel-without-rule"
    if rule["policy"] == "forbidden":
        return "no_refund", "refunds-forbidden"
    if rule["policy"] == "person":
        return "handoff", "person-decides"
    if rule["limit_cents"] is not None and charge["amount_cents"] > rule["limit_cents"]:
        return "handoff", "above-limit"
    age = date.fromisoformat(received_on) - date.fromisoformat(order["placed_on"])
    if rule["within_days"] is not None and age.days > rule["within_days"]:
        return "handoff", "outside-window"
    return "refund", "double-charge"


def _why_not(charges: Sequence[Charge]) -> str:
    kinds = {charge["kind"] for charge in charges}
    if kinds & {"void", "refund"}:
        return "already-returned"
    if len(_standing(charges)) > 1:
        return "instalments"
    return "authorization-only" if "authorization" in kinds else "charged-once"


def _about_all(plan: Plan, facts: Facts, charges: Records, rules: Rules) -> list[Violation]:
    if plan.decision == "refund":
        return [_missing("order_id", "a refund names its order")]
    violations: list[Violation] = []
    if plan.decision == "no_refund":
        for order in facts["orders"]:
            lines = charges.get(order["order_id"], ())
            finding = assess(order, lines, rules, facts["request"]["received_on"])
            violations += _decision(plan, finding)
    every_line = [line for order in facts["orders"] for line in charges.get(order["order_id"], ())]
    return [*violations, *_evidence(plan, every_line, set())]


def _decision(plan: Plan, finding: Finding) -> list[Violation]:
    """Whether the decision, charge and amount of a plan are those of the finding."""
    if plan.decision == "handoff":
        return []
    if finding.conflicts:
        detail = "; ".join(f"{c.code}: {', '.join(c.evidence)}" for c in finding.conflicts)
        return [Violation("conflicts", "conflicting-evidence", detail, "handoff-required")]
    if plan.conflicts:
        detail = "the plan names a conflict and decides all the same"
        return [Violation("conflicts", "conflict-ignored", detail, "handoff-required")]
    violations: list[Violation] = []
    if plan.decision != finding.decision:
        wrong_order = plan.decision == "refund" and finding.charge_id is None
        violations.append(
            Violation(
                "order_id" if wrong_order else "decision",
                finding.code,
                f"{finding.order_id}: the records say {finding.decision} ({finding.code})",
                "handoff-required" if finding.decision == "handoff" else "invalid-proposal",
            )
        )
    if plan.decision == "refund" and finding.charge_id is not None:
        violations += [
            _differs(field, getattr(plan, field), getattr(finding, field))
            for field in ("charge_id", "amount_cents")
            if getattr(plan, field) != getattr(finding, field)
        ]
    return violations


def _evidence(plan: Plan, lines: Sequence[Charge], needed: set[str | None]) -> list[Violation]:
    """Every cited charge must exist in the records; a refund cites the charge that it returns."""
    known = {line["charge_id"] for line in lines}
    violations = [
        Violation("evidence", "evidence-unknown", f"{cited!r} is not on record", "invalid-proposal")
        for cited in plan.evidence
        if cited not in known
    ]
    if plan.decision == "refund" and not needed <= set(plan.evidence):
        violations.append(_missing("evidence", "a refund cites the charge that it returns"))
    if plan.decision == "no_refund" and known and not plan.evidence:
        violations.append(_missing("evidence", "a refusal cites the charges that it rests on"))
    return violations


def _missing(field: str, detail: str) -> Violation:
    return Violation(field, "missing", detail, "invalid-proposal")


def _differs(field: str, said: object, found: object) -> Violation:
    detail = f"{field} is {found!r} by the records, not {said!r}"
    return Violation(field, "differs-from-records", detail, "invalid-proposal")


def _not_permitted(order_id: str) -> Violation:
    # One wording for "unknown" and "somebody else's": a refusal must not tell which orders exist.
    detail = f"{order_id} is not an order of this customer"
    return Violation("permission", "order-not-in-scope", detail, "permission-denied")


def _captures(charges: Sequence[Charge]) -> list[Charge]:
    return [charge for charge in charges if charge["kind"] == "capture"]


def _standing(charges: Sequence[Charge]) -> list[Charge]:
    """The captures that were not given back in full."""
    returned: dict[str | None, int] = {}
    for charge in charges:
        if charge["reverses"] is not None:
            returned[charge["reverses"]] = (
                returned.get(charge["reverses"], 0) + charge["amount_cents"]
            )
    return [
        capture
        for capture in _captures(charges)
        if returned.get(capture["charge_id"], 0) < capture["amount_cents"]
    ]


def _excess_cents(order: Order, charges: Sequence[Charge]) -> int:
    """What the customer has paid beyond the price; never below zero."""
    captured = sum(charge["amount_cents"] for charge in _captures(charges))
    returned = sum(charge["amount_cents"] for charge in charges if charge["reverses"] is not None)
    return max(0, captured - returned - order["amount_cents"])


def _line(charge: Charge) -> str:
    return f"charge:{charge['charge_id']}"


def _conflict(code: str, *evidence: str) -> Conflict:
    return Conflict(code=code, evidence=evidence)
