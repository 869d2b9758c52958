"""Refunds as controlled agents: read this first, and copy it.

A customer writes "you charged me twice". A model may look around, with tools that only read, and
propose a plan. The program reads the facts by itself, judges the plan by them, has the exact refund
confirmed, pays it out once, looks at the provider's own record, and writes to the customer. Where
the order changes between the plan and the payment, nothing is paid, and all of it is done again.

The seven parts of the business process, and the stages that carry them:

    find user and order                        find_user, admit_user, find_orders, find_rules,
                                               find_request
    check that it really is a duplicate        check_duplicate (the only stage that asks a model)
    determine payment channel and refund rule  determine_rule
    make the refund plan                       make_plan
    pay after confirmation                     confirm_refund, pay_refund
    verify that the refund record exists       verify_refund
    notify the user                            notify_user

Two variables of the environment say where the outside world is: HANDRAIL_DEMO_SHOP, the shop's
SQLite file, and HANDRAIL_DEMO_PROVIDER, the address of the payment provider.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from handrail import (
    FOREVER,
    Action,
    AgentLoop,
    Check,
    Checked,
    Commit,
    Confirm,
    Deny,
    Done,
    Fleet,
    HandOff,
    Permit,
    Proceed,
    Read,
    Reason,
    Retry,
    RunFacts,
    ToolCall,
    ToolRefused,
    ToolUnclear,
    Verify,
    Workflow,
)
from handrail.demo import contracts as c
from handrail.demo import rules
from handrail.demo.planner import propose
from handrail.demo.provider_client import ProviderClient, ProviderRefused, ProviderUnclear
from handrail.demo.shop import Shop

PERMISSION: Final = "refund:own-orders"  # granted to senders whom the mail gateway authenticated

Outputs = Mapping[str, Any]  # what the stages that have finished left behind, by stage

fleet = Fleet("refund-demo")


def shop() -> Shop:
    return Shop(os.environ["HANDRAIL_DEMO_SHOP"])


def provider() -> ProviderClient:
    return ProviderClient(os.environ["HANDRAIL_DEMO_PROVIDER"])


def customer_id(outputs: Outputs) -> str:
    return str(outputs["find_user"]["customer"]["customer_id"])


def facts_of(outputs: Outputs) -> rules.Facts:
    """What the program has read before the first question to the model."""
    return {
        "customer": outputs["find_user"]["customer"],
        "orders": outputs["find_orders"]["orders"],
        "rules": outputs["find_rules"]["rules"],
        "request": outputs["find_request"],
    }


def evidence(
    outputs: Outputs, records: Mapping[str, Any]
) -> tuple[rules.Facts, rules.Records, rules.Rules]:
    """What a plan is judged by: the given records, and who asked for what."""
    return (
        {**facts_of(outputs), "orders": records["orders"]},
        records["charges"],
        records["rules"],
    )


def is_the_users(found: Any, run: RunFacts) -> bool:
    """Whether a result belongs to the customer on whose behalf the run acts."""
    return bool(found["customer_id"] == customer_id(run.outputs))


# ---- tools that the program calls by itself ------------------------------------------------------


@fleet.tool(side_effect="read")
def read_user(sender: c.Sender, call: ToolCall) -> c.User:
    """Who writes from this address."""
    return c.User.model_validate({"customer": shop().customer_of(sender.email)})


@fleet.tool(side_effect="read", belongs_to=is_the_users)
def read_orders(customer: c.CustomerId, call: ToolCall) -> c.Orders:
    """The orders that this run may be about, the newest first."""
    orders = shop().orders_of(customer.customer_id)
    return c.Orders.model_validate({"customer_id": customer.customer_id, "orders": orders})


@fleet.tool(side_effect="read")
def read_rules(asked: c.Channels, call: ToolCall) -> c.Rules:
    """What payment channels grant."""
    found = {channel: shop().rules_for(channel) for channel in asked.channels}
    return c.Rules.model_validate({"rules": {name: rule for name, rule in found.items() if rule}})


@fleet.tool(
    side_effect="read",
    belongs_to=lambda found, run: found["email"].lower() == run.principal.subject.lower(),
)
def read_request(asked: c.RequestId, call: ToolCall) -> c.Request:
    """The customer's request, and whether it was answered before."""
    found = shop().request(asked.request_id)
    if found is None:
        raise ToolRefused("unknown-request")
    return c.Request.model_validate(found)


@fleet.tool(side_effect="read", belongs_to=is_the_users)
def read_records(customer: c.CustomerId, call: ToolCall) -> c.Records:
    """All that a decision rests on, read anew: orders, their charges, and the rules for them."""
    return records_of(customer.customer_id)


def records_of(customer_id: str) -> c.Records:
    orders = shop().orders_of(customer_id)
    granted = {order["channel"]: shop().rules_for(order["channel"]) for order in orders}
    return c.Records.model_validate(
        {
            "customer_id": customer_id,
            "orders": orders,
            "charges": {o["order_id"]: shop().charges_of(o["order_id"]) for o in orders},
            "rules": {channel: rule for channel, rule in granted.items() if rule},
        }
    )


# ---- tools that the model may choose from: they read, within the user's own orders ---------------


def own_order(asked: c.OrderId, run: RunFacts) -> Permit:
    """An unknown order and somebody else's are the same to a customer: not permitted."""
    found = rules.in_scope(facts_of(run.outputs), asked.order_id)
    return Permit.DENY if found is None else Permit.ALLOW


@fleet.tool(side_effect="read", allow=own_order, belongs_to=is_the_users)
def lookup_order(asked: c.OrderId, call: ToolCall) -> c.Order:
    """One order of the customer: item, amount, payment channel, status."""
    found = shop().order(asked.order_id)
    if found is None:
        raise ToolRefused("unknown-order")
    return c.Order.model_validate(found)


@fleet.tool(side_effect="read", allow=own_order)
def list_charges(asked: c.OrderId, call: ToolCall) -> c.Charges:
    """The lines of one order in the payment log, and the version that the order had."""
    order = shop().order(asked.order_id)
    if order is None:
        raise ToolRefused("unknown-order")
    charges = shop().charges_of(asked.order_id)
    found = {"order_id": asked.order_id, "version": order["version"], "charges": charges}
    return c.Charges.model_validate(found)


@fleet.tool(side_effect="read")
def read_channel_rules(asked: c.Channel, call: ToolCall) -> c.Rule:
    """What one payment channel grants: a limit, a time window, or no refunds at all."""
    found = shop().rules_for(asked.channel)
    if found is None:
        raise ToolRefused("unknown-channel")
    return c.Rule.model_validate(found)


# ---- tools that write: no model ever sees them ---------------------------------------------------


def find_refund(order: c.RefundOrder, call: ToolCall) -> c.Refund | None:
    """Ask the provider whether this intent took effect. The reconciler calls it when in doubt."""
    assert call.key is not None
    receipt = provider().find_refund(call.key, call.timeout_ms / 1000)
    return c.Refund(**receipt.as_json()) if receipt else None


@fleet.tool(
    side_effect="irreversible",
    approval="always",
    amount="amount_cents",
    requester_approves=True,  # the customer whose money it is
    permission=PERMISSION,
    intent=lambda order, run: rules.refund_key(order.order_id, order.charge_id),
    guarantee="idempotency-key",
    key_valid_for_ms=FOREVER,
    query=find_refund,
    takeover="the payments desk",  # gets what no query can settle
    timeout_ms=1_000,
    settle_after_ms=3_000,  # for so long the provider may still carry out what it has received
    postcondition=lambda order, receipt: order.model_dump().items() <= receipt.items(),
    public=lambda order, receipt: {"refund_id": receipt["refund_id"]},
)
def refund(order: c.RefundOrder, call: ToolCall) -> c.Refund:
    """Return one charge to the customer. Three endings: a receipt, a refusal, or nobody knows."""
    assert call.key is not None
    if changed := changes_since_confirmation(call.facts):
        raise ToolRefused(f"changed-since-confirmation:{changed[0].field}", changed=True)
    try:
        receipt = provider().refund(
            order.order_id,
            order.charge_id,
            order.amount_cents,
            key=call.key,
            timeout_s=call.timeout_ms / 1000,
        )
    except ProviderRefused as error:
        raise ToolRefused(error.refusal) from error
    except ProviderUnclear as error:
        raise ToolUnclear(str(error)) from error
    return c.Refund(**receipt.as_json())


def changes_since_confirmation(outputs: Outputs) -> list[rules.Violation]:
    """Where the records, read anew, differ from the plan that was confirmed."""
    confirmed = rules.RefundAction(**outputs["make_plan"])
    now = records_of(customer_id(outputs)).model_dump(mode="json")
    return rules.check_commit(confirmed, *evidence(outputs, now))


def find_letter(letter: c.Letter, call: ToolCall) -> c.Sent | None:
    """Look for the letter in the outbox."""
    assert call.key is not None
    found = shop().notification(call.key)
    return c.Sent.model_validate(found) if found else None


@fleet.tool(
    side_effect="idempotent",
    approval="never",
    intent=lambda letter, run: f"letter:{letter.request_id}",
    guarantee="unique-constraint",
    key_valid_for_ms=FOREVER,
    query=find_letter,
    belongs_to=is_the_users,
)
def notify(letter: c.Letter, call: ToolCall) -> c.Sent:
    """Write to the customer, once for each request."""
    assert call.key is not None
    sent = shop().send_notification(
        call.key, letter.customer_id, letter.text, request_id=letter.request_id
    )
    return c.Sent.model_validate(sent)


# ---- the model, and what the program makes of its plan -------------------------------------------


def planner(observation: dict[str, Any]) -> dict[str, Any]:
    """A rule plays the model, so that the demo needs no key. It believes every mail it reads."""
    return propose({**observation, "facts": facts_of(observation["facts"])})


fleet.model("default", planner)


def admit_user(run: RunFacts) -> Proceed | Deny:
    """Go on with a customer; whoever else writes gets no answer, and costs no model call."""
    if run.outputs["find_user"] == {"customer": None}:
        return Deny(detail={"field": "sender", "problem": "no customer writes from this address"})
    return Proceed()


def plan_is_sound(claim: Any, call: ToolCall) -> Checked:
    """A plan ends the investigation if it has exactly a plan's form and its evidence exists."""
    read = rules.parse_plan(claim)
    if isinstance(read, list):
        return Checked(False, {"violations": [asdict(violation) for violation in read]})
    orders = [order["order_id"] for order in facts_of(call.facts)["orders"]]
    about = orders if read.order_id is None else [read.order_id]
    known = {line["charge_id"] for order_id in about for line in shop().charges_of(order_id)}
    return Checked(known.issuperset(read.evidence), {"cited": len(read.evidence)})


def make_plan(run: RunFacts) -> Proceed | Done | HandOff | Deny:
    """Decide by the records. The model's plan can only agree: whatever differs stops the run."""
    judged_by = evidence(run.outputs, run.outputs["determine_rule"])  # type: ignore[arg-type]
    proposed = rules.Plan.model_validate(run.outputs["check_duplicate"])
    violations = rules.validate_plan(proposed, *judged_by)
    detail: dict[str, Any] = {"violations": [asdict(violation) for violation in violations]}
    match rules.stop_reason(violations):
        case "permission-denied":
            return Deny(detail=detail)
        case "invalid-proposal":
            return Deny(Reason.INVALID_PROPOSAL, detail)
        case "handoff-required":
            return HandOff(detail)
    if proposed.decision == "handoff":
        return HandOff({"order_id": proposed.order_id})
    if proposed.decision == "no_refund":
        return Done(
            {
                "refunded_cents": 0,
                "order_id": proposed.order_id,
                "letter": letter_text(run.outputs, proposed.order_id),
            }
        )
    assert proposed.order_id is not None
    action = rules.refund_action(proposed.order_id, *judged_by)
    assert action is not None, "the plan agrees with the records"
    return Proceed(asdict(action))


def letter_text(outputs: Outputs, order_id: str | None) -> str:
    """What the customer is told: the program's words, never the model's."""
    facts, charges, granted = evidence(outputs, outputs["determine_rule"])
    order = rules.in_scope(facts, order_id) if order_id else None
    if order is None:
        return rules.explain(None, None)
    received_on = facts["request"]["received_on"]
    lines = charges[order["order_id"]]
    return rules.explain(rules.assess(order, lines, granted, received_on), order)


def exact_refund(run: RunFacts) -> Action:
    """The action that a person confirms and the commit performs: made twice, by the same code."""
    planned: Any = run.outputs["make_plan"]
    return Action(refund, {field: planned[field] for field in c.RefundOrder.model_fields})


def order_is_unchanged(claim: Any, call: ToolCall) -> Checked:
    """Asked right before the payment: whether it is still what the records call for."""
    changed = changes_since_confirmation(call.facts)
    return Checked(not changed, {"violations": [asdict(violation) for violation in changed]})


def refund_is_on_record(claim: Any, call: ToolCall) -> Checked:
    """Ask the provider for all refunds of the order: the one that was meant, once."""
    planned: Any = call.facts["make_plan"]
    try:
        receipts = provider().refunds_of(planned["order_id"], call.timeout_ms / 1000)
    except ProviderUnclear as error:  # the money may well have moved: ask again, see `Verify` below
        raise ToolRefused("no-answer", retryable=True) from error
    found = [receipt for receipt in receipts if receipt.charge_id == planned["charge_id"]]
    ok = [receipt.amount_cents for receipt in found] == [planned["amount_cents"]]
    return Checked(ok, {"records": len(found)}, found[0].refund_id if found else None)


def letter(run: RunFacts) -> Action:
    outputs: Outputs = run.outputs
    return Action(
        notify,
        {
            "request_id": outputs["find_request"]["request_id"],
            "customer_id": customer_id(outputs),
            "text": letter_text(outputs, outputs["make_plan"]["order_id"]),
        },
    )


def answer(run: RunFacts) -> dict[str, Any]:
    outputs: Outputs = run.outputs
    return {
        "refunded_cents": outputs["pay_refund"]["amount_cents"],
        "order_id": outputs["pay_refund"]["order_id"],
        "refund_id": outputs["verify_refund"]["evidence"],
        "letter": outputs["notify_user"]["text"],
    }


# ---- the workflow --------------------------------------------------------------------------------


def the_user(run: RunFacts) -> dict[str, Any]:
    return {"customer_id": customer_id(run.outputs)}


def the_channels(run: RunFacts) -> dict[str, Any]:
    outputs: Outputs = run.outputs
    return {"channels": sorted({order["channel"] for order in outputs["find_orders"]["orders"]})}


def the_request(run: RunFacts) -> dict[str, Any]:
    mail = c.Mail.model_validate(run.input)
    return {"request_id": mail.request_id}


fleet.workflow(
    Workflow(
        name="refund",
        task_type="refund",
        input=c.Mail,
        stages=[
            Read("find_user", read_user, lambda run: {"email": run.principal.subject}),
            Check("admit_user", admit_user),
            Read("find_orders", read_orders, the_user),
            Read("find_rules", read_rules, the_channels),
            Read("find_request", read_request, the_request),
            AgentLoop(
                name="check_duplicate",
                actions=(lookup_order, list_charges, read_channel_rules),
                verify=plan_is_sound,
            ),
            Read("determine_rule", read_records, the_user),
            Check("make_plan", make_plan),
            Confirm("confirm_refund", exact_refund),
            Commit(
                "pay_refund",
                exact_refund,
                refund,
                precondition=order_is_unchanged,
                replan="find_orders",
            ),
            Verify("verify_refund", refund_is_on_record, retry=Retry()),
            Commit("notify_user", letter, notify),
        ],
        answer=answer,
    )
)
