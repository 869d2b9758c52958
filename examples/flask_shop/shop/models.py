"""Users, orders, what was charged for them, what customers ask for, and the bank's book."""

from typing import Any

import click
from werkzeug.security import check_password_hash, generate_password_hash

from shop import db


class User(db.Model):  # type: ignore[name-defined]
    id = db.Column(db.Integer, primary_key=True)
    name = db.Column(db.Text, unique=True, nullable=False)
    password = db.Column(db.Text, nullable=False)
    is_approver = db.Column(db.Boolean, nullable=False, default=False)

    def has_password(self, given: str) -> bool:
        return check_password_hash(self.password, given)

    @property
    def principal(self) -> Any:
        """Who this is to the fleet."""
        from handrail import Principal  # here: only who acts on runs needs agent code

        return Principal(self.name, roles=frozenset({"approver"} if self.is_approver else ()))


class Order(db.Model):  # type: ignore[name-defined]
    id = db.Column(db.Integer, primary_key=True)
    customer = db.Column(db.Text, nullable=False)
    amount_cents = db.Column(db.Integer, nullable=False)


class Charge(db.Model):  # type: ignore[name-defined]
    id = db.Column(db.Integer, primary_key=True)
    order_id = db.Column(db.ForeignKey(Order.id), nullable=False)
    amount_cents = db.Column(db.Integer, nullable=False)


class RefundRequest(db.Model):  # type: ignore[name-defined]
    id = db.Column(db.Integer, primary_key=True)
    order_id = db.Column(db.ForeignKey(Order.id), nullable=False)
    run_id = db.Column(db.Text, nullable=False)
    note = db.Column(db.Text, nullable=False)


class Refund(db.Model):  # type: ignore[name-defined]
    """The bank's own record. In real life it is behind an API that honours idempotency keys."""

    id = db.Column(db.Integer, primary_key=True)
    key = db.Column(db.Text, unique=True, nullable=False)
    charge_id = db.Column(db.ForeignKey(Charge.id), nullable=False)
    amount_cents = db.Column(db.Integer, nullable=False)


def seed() -> None:
    """Make the tables, alice (a customer), bob (an approver) and an order that was charged twice;
    the passwords are the names.
    """
    db.create_all()
    for name, approves in (("alice", False), ("bob", True)):
        if db.session.query(User).filter_by(name=name).first() is not None:
            continue  # each time another order; the people once
        hashed = generate_password_hash(name, method="pbkdf2:sha256:1000")
        db.session.add(User(name=name, password=hashed, is_approver=approves))
    order = Order(customer="alice", amount_cents=4_200)
    db.session.add(order)
    db.session.flush()
    db.session.add_all([Charge(order_id=order.id, amount_cents=4_200) for _ in range(2)])
    db.session.commit()
    click.echo(f"order {order.id}")
