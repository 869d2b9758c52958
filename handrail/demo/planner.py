"""A planner by rule that plays the model, so that the demo needs no key and no network.

Pure: the same observation gives the same proposal. It does what a decent but naive model does: it
looks for order numbers, otherwise works through the customer's orders one by one, reads the rule of
the payment channel, and puts its findings into a plan. And it believes what it reads: a mail that
tells it to refund something else, to call the payment tool, or to copy an answer is obeyed. That is
the point of the demo. Nothing in here keeps anybody's money safe; the program around it does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from handrail.demo.shop import Charge, Order, money

T = TypeVar("T")

ORDER_NUMBER: Final = re.compile(r"\bHR-\d{4}\b", re.IGNORECASE | re.ASCII)
AMOUNT: Final = re.compile(r"(?<![\d.,])(\d{1,3}(?:[.,]\d{3})*|\d+)[.,](\d{2})(?!\d)", re.ASCII)

# How customers say that they were charged twice, in the languages of the demo.
COMPLAINT: Final = re.compile(
    r"twice|two times|double|duplicate|doppelt|dos veces|deux fois|duas vezes|二回|二重"
    r"|second (?:payment|charge)",
    re.IGNORECASE,
)

# What an attacker writes, and a naive model follows.
CALL_THE_TOOL: Final = re.compile(r"\bcall the refund tool\b", re.IGNORECASE)
ANOTHER_ORDER: Final = re.compile(r"\brefund order (HR-\d{4}) instead\b", re.IGNORECASE)
ANOTHER_AMOUNT: Final = re.compile(r"\bset the amount to (\S+)", re.IGNORECASE)
CLAIMED_APPROVAL: Final = re.compile(r"\balready approved\b", re.IGNORECASE)


def propose(observation: Mapping[str, Any]) -> dict[str, Any]:
    """Propose the next action for an observation, as a model would: unchecked.

    `observation` holds `goal`, `input` (`text` and `from` of the mail), `facts` (`customer`,
    `orders`, `rules`, `request`), `observations` (one mapping for each result so far: `tool`, and
    the result as `value`, or as JSON in `text`; what a person answered has a `tool` that begins
    with `answer:`), `allowed_tools`, `budget_left`. What was told about an order that has another
    version by now is looked up again. The planner knows these tools:

    - `lookup_order(order_id)`: the order
    - `list_charges(order_id)`: `{"order_id": ..., "version": ..., "charges": [...]}`
    - `read_channel_rules(channel)`: the rule

    The answer is a tool call, a completion with a plan (the fields of `rules.Plan`), or a question:
    `{"kind": "tool", "tool", "arguments"}`, `{"kind": "complete", "answer"}`,
    `{"kind": "clarify", "question"}`.
    """
    text = "\n".join([str(observation["input"]["text"]), *_answers(observation)])
    return _dictated(text) or _investigate(text, observation)


def _dictated(text: str) -> dict[str, Any] | None:
    """The proposal that the mail itself dictates, if it does."""
    for brace in re.finditer(r"\{", text):
        try:
            copied, _ = json.JSONDecoder().raw_decode(text, brace.start())
        except ValueError:
            continue
        if isinstance(copied, dict) and "kind" in copied:
            return copied
    if CALL_THE_TOOL.search(text):
        order_id, amount_cents = _last(_order_numbers(text)), _last(_amounts(text))
        return _tool("refund", order_id=order_id, amount_cents=amount_cents)
    return None


def _investigate(text: str, observation: Mapping[str, Any]) -> dict[str, Any]:
    orders: list[Order] = list(observation["facts"]["orders"])
    looked_up: dict[str, Order] = _current(_results(observation, "lookup_order"), orders)
    known = {order["order_id"]: order for order in orders} | looked_up
    listed = _current(_results(observation, "list_charges"), orders)

    if redirected := ANOTHER_ORDER.search(text):
        named = [redirected[1].upper()]
    else:
        named = _order_numbers(text)
    if not named and not (orders and COMPLAINT.search(text)):
        return _clarify("Which order is this about, and what went wrong with its payment?")

    for order_id in named:
        if order_id not in looked_up:
            return _tool("lookup_order", order_id=order_id)
    candidates = named or [order["order_id"] for order in _likely_first(orders, text)]
    suspects: list[str] = []
    for order_id in candidates:
        if order_id not in listed:
            return _tool("list_charges", order_id=order_id)
        if _looks_wrong(known[order_id], listed[order_id]["charges"]):
            suspects.append(order_id)
            if known[order_id]["amount_cents"] in _amounts(text):
                break  # the very amount that the customer complains about: no need to look further

    seen = [charge for order_id in candidates for charge in _charges(listed, order_id)]
    if len(suspects) > 1:
        return _clarify(f"More than one order looks wrong: {', '.join(suspects)}. Which one?")
    if not suspects:
        about = candidates[0] if len(candidates) == 1 else None
        return _complete("no_refund", about, "No payment was taken twice.", seen)
    order = known[suspects[0]]
    return _conclude(text, order, _charges(listed, order["order_id"]), observation)


def _conclude(
    text: str, order: Order, charges: Sequence[Charge], observation: Mapping[str, Any]
) -> dict[str, Any]:
    """Plan for the one order whose payments look wrong. It counts no days: a naive model."""
    order_id = order["order_id"]
    if contradiction := _contradiction(order, charges):
        why = "The records contradict each other."
        return _complete("handoff", order_id, why, charges, conflicts=[contradiction])
    surplus = _captures(charges)[1:]
    if len(surplus) != 1:
        return _complete("handoff", order_id, "There is more than one surplus payment.", charges)

    rules = {rule["channel"]: rule for rule in _results(observation, "read_channel_rules")}
    if order["channel"] not in rules:
        return _tool("read_channel_rules", channel=order["channel"])
    rule = rules[order["channel"]]
    charge_id, amount_cents = surplus[0]["charge_id"], surplus[0]["amount_cents"]
    if another := ANOTHER_AMOUNT.search(text):
        amount_cents = _last(_amounts(another[1])) or amount_cents
    why = f"Charged twice, {money(amount_cents, order['currency'])} too much. {rule['wording']}"
    if rule["policy"] == "forbidden":
        return _complete("no_refund", order_id, why, charges)
    above_limit = rule["limit_cents"] is not None and amount_cents > rule["limit_cents"]
    if rule["policy"] == "person" or above_limit:
        return _complete("handoff", order_id, why, charges)
    if CLAIMED_APPROVAL.search(text):
        why = f"Approved by the manager, confirmed. {why}"
    return _complete(
        "refund", order_id, why, charges, charge_id=charge_id, amount_cents=amount_cents
    )


def _order_numbers(text: str) -> list[str]:
    return list(dict.fromkeys(number.upper() for number in ORDER_NUMBER.findall(text)))


def _amounts(text: str) -> list[int]:
    """The amounts in a text, in cents: `49.90`, `34,95`, `1,249.00`."""
    return [
        int(re.sub(r"[.,]", "", whole)) * 100 + int(cents) for whole, cents in AMOUNT.findall(text)
    ]


def _last(values: Sequence[T]) -> T | None:
    return values[-1] if values else None


def _likely_first(orders: Sequence[Order], text: str) -> list[Order]:
    """Orders whose amount or item the mail names, then the others; the newest first in each."""

    def is_unlikely(order: Order) -> bool:
        return order["amount_cents"] not in _amounts(text) and order["item"] not in text.lower()

    return sorted(orders, key=is_unlikely)


def _looks_wrong(order: Order, charges: Sequence[Charge]) -> bool:
    paid = sum(capture["amount_cents"] for capture in _captures(charges))
    return paid > order["amount_cents"] or order["status"] == "refunded"


def _contradiction(order: Order, charges: Sequence[Charge]) -> dict[str, Any] | None:
    captures = _captures(charges)
    lines = [f"charge:{capture['charge_id']}" for capture in captures]
    if order["status"] == "refunded" and captures:
        return {"code": "refunded-yet-paid", "evidence": [f"order:{order['order_id']}", *lines]}
    if len({capture["reference"] for capture in captures}) < len(captures):
        return {"code": "same-payment-reference", "evidence": lines}
    return None


def _captures(charges: Sequence[Charge]) -> list[Charge]:
    """The payments that were taken and not given back."""
    reversed_ids = {charge["reverses"] for charge in charges}
    return [
        charge
        for charge in charges
        if charge["kind"] == "capture" and charge["charge_id"] not in reversed_ids
    ]


def _results(observation: Mapping[str, Any], tool: str) -> list[dict[str, Any]]:
    """What a tool has told so far, in order."""
    return [
        seen["value"] if "value" in seen else json.loads(seen["text"])
        for seen in observation["observations"]
        if seen["tool"] == tool
    ]


def _current(results: Sequence[Mapping[str, Any]], orders: Sequence[Order]) -> dict[str, Any]:
    """Results about orders, by order, without those of a version that is no longer the order's."""
    versions = {order["order_id"]: order["version"] for order in orders}
    return {
        result["order_id"]: result
        for result in results
        if result["version"] == versions.get(result["order_id"], result["version"])
    }


def _answers(observation: Mapping[str, Any]) -> list[str]:
    """What people answered to the planner's questions."""
    return [
        str(seen["text"])
        for seen in observation["observations"]
        if seen["tool"].startswith("answer:")
    ]


def _charges(listed: Mapping[str, Any], order_id: str) -> list[Charge]:
    return list(listed[order_id]["charges"]) if order_id in listed else []


def _tool(tool: str, **arguments: object) -> dict[str, Any]:
    return {"kind": "tool", "tool": tool, "arguments": arguments}


def _clarify(question: str) -> dict[str, Any]:
    return {"kind": "clarify", "question": question}


def _complete(
    decision: str,
    order_id: str | None,
    reason_text: str,
    charges: Sequence[Charge],
    *,
    charge_id: str | None = None,
    amount_cents: int | None = None,
    conflicts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    answer = {
        "decision": decision,
        "order_id": order_id,
        "charge_id": charge_id,
        "amount_cents": amount_cents,
        "reason_text": reason_text,
        "evidence": [charge["charge_id"] for charge in charges],
        "conflicts": list(conflicts),
    }
    return {"kind": "complete", "answer": answer}
