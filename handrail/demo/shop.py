"""A small shop in one SQLite file: customers, orders, charges, refund rules, requests, an outbox.

It is the outside world of the demo, so it knows nothing of runs and agents. Every method opens its
own connection and does one thing in one transaction: a `Shop` may be shared between threads, and
carried into a forked worker. What it returns is plain JSON. Amounts are whole cents of the order's
currency, times are ISO 8601 in UTC, dates are the shop's own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypedDict, cast

from handrail.demo.messages import load_messages

TODAY: Final = "2026-08-06"  # when the mails of the demo arrive, whatever the real date is
NOON: Final = f"{TODAY}T12:00:00Z"
BUSY_TIMEOUT_SECONDS: Final = 10  # a writer holds the file for milliseconds

FILE_REQUEST: Final = (
    "INSERT INTO support_requests (request_id, email, text, received_on) VALUES (?, ?, ?, ?)"
)

INSERT_CHARGE: Final = (
    "INSERT INTO charges (charge_id, order_id, kind, amount_cents, charged_time, reference,"
    " reverses) VALUES (:charge_id, :order_id, :kind, :amount_cents, :charged_time, :reference,"
    " :reverses)"
)

ChargeKind = Literal["authorization", "capture", "void", "refund"]
OrderStatus = Literal["paid", "shipped", "cancelled", "refunded"]
RefundPolicy = Literal["automatic", "person", "forbidden"]


class Customer(TypedDict):
    customer_id: str
    name: str
    email: str


class Order(TypedDict):
    order_id: str
    customer_id: str
    item: str
    amount_cents: int
    currency: str
    channel: str
    status: OrderStatus
    placed_on: str
    version: int  # moves with every change of the order and with every new charge


class Charge(TypedDict):
    """One line of the payment log. A void or a refund names the capture that it `reverses`."""

    charge_id: str
    order_id: str
    kind: ChargeKind
    amount_cents: int
    charged_time: str
    reference: str  # the payment, as the bank names it: one payment has one reference
    reverses: str | None


class Rule(TypedDict):
    """What a payment channel grants. None: no such limit."""

    channel: str
    policy: RefundPolicy
    limit_cents: int | None
    within_days: int | None
    wording: str


class SupportRequest(TypedDict):
    request_id: str
    email: str
    text: str
    received_on: str
    answered: bool


class Notification(TypedDict):
    key: str
    customer_id: str
    request_id: str | None
    text: str


@dataclass(eq=False)
class NotificationConflict(Exception):
    """A notification key was used again for another mail."""

    code: ClassVar[str] = "notification-conflict"
    key: str

    def __str__(self) -> str:
        return f"{self.key!r} has already sent another mail: give every mail a key of its own"


class Shop:
    """The shop in the file at `path`, which `seed` has made."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    # Reading

    def customer_of(self, email: str) -> Customer | None:
        """The customer who writes from `email`, in any case of letters. Never a payment token."""
        row = self._one("SELECT customer_id, name, email FROM customers WHERE email = ?", email)
        return cast("Customer | None", row)

    def orders_of(self, customer_id: str) -> list[Order]:
        """The customer's orders, the newest first."""
        rows = self._all(
            "SELECT * FROM orders WHERE customer_id = ? ORDER BY placed_on DESC, order_id DESC",
            customer_id,
        )
        return cast("list[Order]", rows)

    def order(self, order_id: str) -> Order | None:
        """One order with its version. The caller checks whose it is."""
        row = self._one("SELECT * FROM orders WHERE order_id = ?", order_id)
        return cast("Order | None", row)

    def charges_of(self, order_id: str) -> list[Charge]:
        """The order's charges, the oldest first."""
        rows = self._all(
            "SELECT * FROM charges WHERE order_id = ? ORDER BY charged_time, charge_id", order_id
        )
        return cast("list[Charge]", rows)

    def rules_for(self, channel: str) -> Rule | None:
        """What the payment channel grants; None for a channel without a rule."""
        row = self._one("SELECT * FROM refund_rules WHERE channel = ?", channel)
        return cast("Rule | None", row)

    def request(self, request_id: str) -> SupportRequest | None:
        """A support request; it is `answered` exactly when the outbox holds a mail for it."""
        row = self._one(
            "SELECT *, EXISTS (SELECT 1 FROM outbox WHERE request_id = r.request_id) AS answered"
            " FROM support_requests AS r WHERE request_id = ?",
            request_id,
        )
        return cast("SupportRequest", row | {"answered": bool(row["answered"])}) if row else None

    def notification(self, key: str) -> Notification | None:
        """The mail that was sent under `key`: the proof that it was sent."""
        return cast("Notification | None", self._one("SELECT * FROM outbox WHERE key = ?", key))

    def outbox(self) -> list[Notification]:
        """Every mail that was sent, by key."""
        return cast("list[Notification]", self._all("SELECT * FROM outbox ORDER BY key"))

    def captured_cents(self) -> dict[str, int]:
        """Every captured amount by charge: what a payment provider knows about this shop."""
        rows = self._all("SELECT charge_id, amount_cents FROM charges WHERE kind = 'capture'")
        return {row["charge_id"]: row["amount_cents"] for row in rows}

    # Writing

    def receive_request(
        self, request_id: str, email: str, text: str, received_on: str = TODAY
    ) -> None:
        """File a customer's mail. A request that is known already stays as it is."""
        with self._transaction() as connection:
            connection.execute(
                f"{FILE_REQUEST} ON CONFLICT (request_id) DO NOTHING",
                (request_id, email, text, received_on),
            )

    def send_notification(
        self, key: str, customer_id: str, text: str, *, request_id: str | None = None
    ) -> Notification:
        """Send a mail, once for each `key`: sent again, the first one is returned.

        Raises `NotificationConflict` where the key has sent something else.
        """
        mail = Notification(key=key, customer_id=customer_id, request_id=request_id, text=text)
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO outbox (key, customer_id, request_id, text)"
                " VALUES (:key, :customer_id, :request_id, :text) ON CONFLICT (key) DO NOTHING",
                mail,
            )
            sent = dict(connection.execute("SELECT * FROM outbox WHERE key = ?", (key,)).fetchone())
        if sent != mail:
            raise NotificationConflict(key)
        return mail

    def change_status(self, order_id: str, status: OrderStatus, *, version: int) -> bool:
        """Move an order that still has `version`. False: somebody else changed it first."""
        with self._transaction() as connection:
            changed = connection.execute(
                "UPDATE orders SET status = ?, version = version + 1"
                " WHERE order_id = ? AND version = ?",
                (status, order_id, version),
            )
            return changed.rowcount == 1

    def record_charge(self, charge: Charge) -> None:
        """Add a line to the payment log; the order's version moves with it."""
        with self._transaction() as connection:
            connection.execute(INSERT_CHARGE, charge)

    def correct_price(self, order_id: str, amount_cents: int) -> None:
        """Correct what an order costs: each of its payments is cancelled, and taken again."""
        captures = [line for line in self.charges_of(order_id) if line["kind"] == "capture"]
        with self._transaction() as connection:
            connection.execute(
                "UPDATE orders SET amount_cents = ?, version = version + 1 WHERE order_id = ?",
                (amount_cents, order_id),
            )
            for capture in captures:
                again = capture | {"amount_cents": amount_cents}
                void = capture | {"kind": "void", "reverses": capture["charge_id"]}
                for line, suffix in ((void, "void"), (again, "again")):
                    new = {name: f"{line[name]}-{suffix}" for name in ("charge_id", "reference")}
                    connection.execute(INSERT_CHARGE, {**line, **new, "charged_time": NOON})

    # The file

    def _all(self, statement: str, *values: object) -> list[dict[str, Any]]:
        with _connected(self.path) as connection:
            return [dict(row) for row in connection.execute(statement, values)]

    def _one(self, statement: str, *values: object) -> dict[str, Any] | None:
        return next(iter(self._all(statement, *values)), None)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _connected(self.path) as connection:
            connection.execute("BEGIN IMMEDIATE")  # a writer waits here, never in the middle
            yield connection
            connection.execute("COMMIT")  # left early, the closing connection rolls back


def seed(path: Path | str) -> Shop:
    """Make the shop of the demo at `path`, the same each time; what was there before is gone."""
    script = files("handrail.demo").joinpath("shop.sql").read_text(encoding="utf-8")
    with _connected(Path(path), mode="rwc") as connection:
        connection.execute("PRAGMA journal_mode = WAL")  # readers and one writer side by side
        connection.executescript(script)
        mails = [(m["id"], m["from"], m["text"], TODAY) for m in load_messages()]
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(FILE_REQUEST, mails)
        connection.execute("COMMIT")
    return Shop(path)


def money(amount_cents: int, currency: str) -> str:
    """An amount as customers read it: `1,249.00 EUR`."""
    return f"{amount_cents // 100:,}.{amount_cents % 100:02d} {currency}"


@contextmanager
def _connected(path: Path, *, mode: Literal["rw", "rwc"] = "rw") -> Iterator[sqlite3.Connection]:
    """A connection of its own; `rw` refuses to make an empty shop out of a wrong path."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_TIMEOUT_SECONDS,
        isolation_level=None,
    )
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        yield connection
    finally:
        connection.close()
