"""What goes into the demo's tools, and what comes out: exactly these fields, and no others."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Contract(BaseModel):
    """A value that crosses a tool's border. An additional field is refused, on either side."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Mail(Contract):
    """What a run is started with. Who wrote it is the run's principal, never a line in the mail."""

    request_id: str
    text: str


class Sender(Contract):
    email: str


class RequestId(Contract):
    request_id: str


class CustomerId(Contract):
    customer_id: str


class OrderId(Contract):
    order_id: str


class Channel(Contract):
    channel: str


class Channels(Contract):
    channels: tuple[str, ...]


class Customer(Contract):
    customer_id: str
    name: str
    email: str


class User(Contract):
    customer: Customer | None  # None: nobody here writes from this address


class Request(Contract):
    request_id: str
    email: str
    text: str
    received_on: str
    answered: bool


class Order(Contract):
    order_id: str
    customer_id: str
    item: str
    amount_cents: int
    currency: str
    channel: str
    status: Literal["paid", "shipped", "cancelled", "refunded"]
    placed_on: str
    version: int


class Orders(Contract):
    customer_id: str
    orders: tuple[Order, ...]


class Charge(Contract):
    charge_id: str
    order_id: str
    kind: Literal["authorization", "capture", "void", "refund"]
    amount_cents: int
    charged_time: str
    reference: str
    reverses: str | None


class Charges(Contract):
    order_id: str
    version: int  # of the order, when its charges were read
    charges: tuple[Charge, ...]


class Rule(Contract):
    channel: str
    policy: Literal["automatic", "person", "forbidden"]
    limit_cents: int | None
    within_days: int | None
    wording: str


class Rules(Contract):
    rules: dict[str, Rule]


class Records(Contract):
    """Everything that a decision about one customer's orders rests on."""

    customer_id: str
    orders: tuple[Order, ...]
    charges: dict[str, tuple[Charge, ...]]
    rules: dict[str, Rule]


class RefundOrder(Contract):
    order_id: str
    charge_id: str
    amount_cents: int


class Refund(Contract):
    """The provider's receipt. `applied_at`: epoch milliseconds, by the provider's clock."""

    refund_id: str
    key: str
    order_id: str
    charge_id: str
    amount_cents: int
    applied_at: int


class Letter(Contract):
    request_id: str
    customer_id: str
    text: str


class Sent(Contract):
    key: str
    customer_id: str
    request_id: str | None
    text: str
