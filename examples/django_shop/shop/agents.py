"""The refund as a controlled agent: a model looks and proposes, the program decides and pays.

    read_order      the program reads the order and its charges
    find_duplicate  the model says which charge is the duplicate; a check looks into the book
    confirm         a person agrees to the exact refund
    pay             it is sent once, with a key that the bank honours, and found out if in doubt
    verify          the bank's own record is read

Only workers import this module.
"""

from typing import Any

from django.db import transaction
from pydantic import BaseModel

from handrail import (
    FOREVER,
    Action,
    AgentLoop,
    Checked,
    Commit,
    Confirm,
    Read,
    RunFacts,
    ToolCall,
    Verify,
    Workflow,
)
from handrail.integrations.django import Fleet
from handrail.integrations.django.people import name_of
from shop.models import Charge, Order, Refund

fleet = Fleet("shop")


class OrderId(BaseModel):
    order_id: int


class Payment(BaseModel):
    order_id: int
    charge_id: int
    amount_cents: int


@fleet.tool(
    side_effect="read", belongs_to=lambda found, run: found["customer"] == run.principal.subject
)
def read_order(asked: OrderId, call: ToolCall) -> dict[str, Any]:
    """An order of the customer's, and the charges for it."""
    order = Order.objects.select_related("customer").get(pk=asked.order_id)
    charges = order.charge_set.order_by("id").values("id", "amount_cents")
    return {
        "customer": name_of(order.customer),
        "amount_cents": order.amount_cents,
        "charges": list(charges),
    }


def find_refund(payment: Payment, call: ToolCall) -> dict[str, Any] | None:
    """Ask the bank whether this refund took place; the reconciler does when in doubt."""
    found = Refund.objects.filter(key=call.key).first()
    return None if found is None else {"refund": found.pk, "amount_cents": found.amount_cents}


@fleet.tool(
    side_effect="irreversible",
    approval="always",
    amount="amount_cents",
    intent=lambda payment, run: f"refund:order-{payment.order_id}:charge-{payment.charge_id}",
    guarantee="idempotency-key",
    key_valid_for_ms=FOREVER,
    query=find_refund,
    takeover="the payments desk",
    settle_after_ms=1_000,
    postcondition=lambda payment, receipt: receipt["amount_cents"] == payment.amount_cents,
)
def refund(payment: Payment, call: ToolCall) -> dict[str, Any]:
    """Give the money of one charge back. No model ever sees this tool."""
    with transaction.atomic():
        done, _ = Refund.objects.get_or_create(
            key=call.key,
            defaults={"charge_id": payment.charge_id, "amount_cents": payment.amount_cents},
        )
    return {"refund": done.pk, "amount_cents": done.amount_cents}


@fleet.model()
def planner(observation: dict[str, Any]) -> dict[str, Any]:
    """A rule plays the model, so that the example needs no key: the last charge is one too many."""
    seen = observation["facts"]["read_order"]["charges"]
    return {"kind": "complete", "answer": {"charge_id": seen[-1]["id"] if len(seen) > 1 else None}}


def is_a_duplicate(claim: Any, call: ToolCall) -> Checked:
    """What the model claims is held against the book: two charges of the same amount."""
    order: Any = call.facts["read_order"]
    amounts = [charge["amount_cents"] for charge in order["charges"]]
    known = {charge["id"]: charge["amount_cents"] for charge in order["charges"]}
    amount = known.get(claim.get("charge_id"))
    return Checked(amount is not None and amounts.count(amount) > 1, {"charges": len(amounts)})


def the_order(run: RunFacts) -> dict[str, Any]:
    asked = OrderId.model_validate(run.input)
    return {"order_id": asked.order_id}


def exact_refund(run: RunFacts) -> Action:
    """Made twice by the same code: what is confirmed is what is paid."""
    facts: Any = run.outputs
    charge_id = facts["find_duplicate"]["charge_id"]
    charges = facts["read_order"]["charges"]
    (amount,) = (one["amount_cents"] for one in charges if one["id"] == charge_id)
    order_id = OrderId.model_validate(run.input).order_id
    return Action(refund, {"order_id": order_id, "charge_id": charge_id, "amount_cents": amount})


def refund_is_on_record(claim: Any, call: ToolCall) -> Checked:
    """Look at the bank's record independently: one refund of that charge, of that amount."""
    facts: Any = call.facts
    charge = Charge.objects.get(pk=facts["find_duplicate"]["charge_id"])
    booked = list(Refund.objects.filter(charge=charge).values_list("amount_cents", flat=True))
    return Checked(booked == [charge.amount_cents], {"records": len(booked)})


fleet.workflow(
    Workflow(
        name="refund",
        task_type="refund",
        input=OrderId,
        stages=[
            Read("read_order", read_order, the_order),
            AgentLoop(name="find_duplicate", actions=(read_order,), verify=is_a_duplicate),
            Confirm("confirm", exact_refund),
            Commit("pay", exact_refund, refund),
            Verify("verify", refund_is_on_record),
        ],
        answer=lambda run: run.outputs["pay"],
    )
)
