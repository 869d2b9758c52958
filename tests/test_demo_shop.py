"""The demo's shop: the same each time, private where it must be, and safe to write to twice."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from handrail.demo.messages import load_messages
from handrail.demo.provider import Fault
from handrail.demo.shop import Charge, NotificationConflict, Shop, money, seed


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return seed(tmp_path / "shop.db")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """A shop for tests that only read."""
    return seed(tmp_path_factory.mktemp("shop") / "shop.db")


def dump(shop: Shop) -> list[str]:
    with closing(sqlite3.connect(shop.path)) as connection:
        return list(connection.iterdump())


def void_of(charge: Charge) -> Charge:
    return {**charge, "charge_id": "ch-void", "kind": "void", "reverses": charge["charge_id"]}


# Reading


def test_a_customer_is_found_by_address_in_any_case_of_letters(untouched: Shop) -> None:
    customer = untouched.customer_of("MEI.tanaka@Example.com")

    assert customer == {
        "customer_id": "c-03",
        "name": "Mei Tanaka",
        "email": "mei.tanaka@example.com",
    }
    assert untouched.customer_of("nobody@example.com") is None


def test_orders_come_newest_first_and_charges_oldest_first(untouched: Shop) -> None:
    orders = untouched.orders_of("c-04")
    charges = untouched.charges_of("HR-1005")

    assert [order["order_id"] for order in orders] == ["HR-1007", "HR-1006", "HR-1005", "HR-1004"]
    assert [charge["kind"] for charge in charges] == ["authorization", "capture"]


def test_what_does_not_exist_is_none_or_empty(untouched: Shop) -> None:
    assert untouched.order("HR-9999") is None
    assert untouched.charges_of("HR-9999") == []
    assert untouched.orders_of("c-99") == []
    assert untouched.rules_for("cheque") is None
    assert untouched.request("m-99") is None
    assert untouched.notification("no-such-key") is None


def test_each_channel_of_an_order_has_its_rule(untouched: Shop) -> None:
    card, giftcard = untouched.rules_for("card"), untouched.rules_for("giftcard")

    assert card is not None and giftcard is not None
    assert (card["policy"], card["limit_cents"], card["within_days"]) == ("automatic", 50000, 60)
    assert (giftcard["policy"], giftcard["limit_cents"]) == ("forbidden", None)


def test_the_captured_amounts_leave_out_what_moved_no_money(untouched: Shop) -> None:
    captured = untouched.captured_cents()

    assert captured["ch-1012-2"] == 8800
    assert "ch-1012-1" not in captured, "an authorization captures nothing"
    assert "ch-1015-3" not in captured, "a void captures nothing"


def test_a_payment_token_never_leaves_the_shop(untouched: Shop) -> None:
    """The tokens are in the file, so the search would find them."""
    read: list[object] = [untouched.captured_cents(), untouched.outbox()]
    for message in load_messages():
        read.append(untouched.request(message["id"]))
        if customer := untouched.customer_of(message["from"]):
            read.append(customer)
            for order in untouched.orders_of(customer["customer_id"]):
                read += [order, untouched.order(order["order_id"])]
                read += [
                    untouched.charges_of(order["order_id"]),
                    untouched.rules_for(order["channel"]),
                ]

    assert any("vault-7d01" in line for line in dump(untouched))
    assert "vault-" not in json.dumps(read)


# Seeding


def test_seeding_gives_the_same_shop_each_time(tmp_path: Path) -> None:
    assert dump(seed(tmp_path / "one.db")) == dump(seed(tmp_path / "two.db"))


def test_seeding_again_leaves_nothing_of_what_happened_before(shop: Shop) -> None:
    fresh = dump(shop)
    shop.send_notification("mail-1", "c-01", "Hello", request_id="m-01")
    shop.change_status("HR-1001", "cancelled", version=1)
    assert dump(shop) != fresh

    seed(shop.path)

    assert dump(shop) == fresh


def test_every_mail_is_filed_as_an_open_request(untouched: Shop) -> None:
    for message in load_messages():
        request = untouched.request(message["id"])
        assert request is not None
        assert (request["email"], request["text"]) == (message["from"], message["text"])
        assert request["answered"] is False


def test_a_wrong_path_does_not_make_an_empty_shop(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        Shop(tmp_path / "typo.db").order("HR-1001")

    assert not (tmp_path / "typo.db").exists()


# Writing


def test_sending_twice_under_one_key_is_one_mail(shop: Shop) -> None:
    first = shop.send_notification("mail-1", "c-01", "Refunded.", request_id="m-01")
    again = shop.send_notification("mail-1", "c-01", "Refunded.", request_id="m-01")

    assert first == again == shop.notification("mail-1")
    assert shop.outbox() == [first]


def test_one_key_cannot_send_two_different_mails(shop: Shop) -> None:
    shop.send_notification("mail-1", "c-01", "Refunded.")

    with pytest.raises(NotificationConflict, match="mail-1") as refused:
        shop.send_notification("mail-1", "c-02", "Refunded.")

    assert refused.value.code == "notification-conflict"
    assert [mail["customer_id"] for mail in shop.outbox()] == ["c-01"]


def test_many_senders_at_once_with_one_key_send_one_mail(shop: Shop) -> None:
    with ThreadPoolExecutor(8) as senders:
        mails = list(
            senders.map(lambda _: shop.send_notification("mail-1", "c-01", "Hi"), range(24))
        )

    assert all(mail == mails[0] for mail in mails)
    assert len(shop.outbox()) == 1


def test_a_request_is_answered_when_its_mail_is_sent(shop: Shop) -> None:
    shop.send_notification("mail-1", "c-01", "Hello", request_id="m-01")
    answered, other = shop.request("m-01"), shop.request("m-02")

    assert answered is not None and answered["answered"] is True
    assert other is not None and other["answered"] is False


def test_a_request_that_is_known_already_stays_as_it_is(shop: Shop) -> None:
    shop.receive_request("m-01", "mallory@example.com", "another text")

    request = shop.request("m-01")
    assert request is not None and request["email"] == "ana.lindqvist@example.com"


def test_an_order_moves_only_from_the_version_that_was_read(shop: Shop) -> None:
    assert shop.change_status("HR-1001", "cancelled", version=1)
    assert not shop.change_status("HR-1001", "paid", version=1), "the version has moved"

    order = shop.order("HR-1001")
    assert order is not None and (order["status"], order["version"]) == ("cancelled", 2)


def test_a_new_charge_moves_the_version_of_its_order(shop: Shop) -> None:
    shop.record_charge(void_of(shop.charges_of("HR-1001")[1]))

    order, other = shop.order("HR-1001"), shop.order("HR-1002")
    assert order is not None and order["version"] == 2
    assert other is not None and other["version"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "void"},  # without the capture that it reverses
        {"amount_cents": 0},
        {"order_id": "HR-9999"},
        {"kind": "gift"},
        {"charge_id": "ch-1001-1"},  # taken
    ],
)
def test_the_tables_refuse_a_charge_that_makes_no_sense(
    shop: Shop, wrong: dict[str, object]
) -> None:
    charge = {**shop.charges_of("HR-1001")[0], "charge_id": "ch-new"} | wrong

    with pytest.raises(sqlite3.IntegrityError):
        shop.record_charge(charge)  # type: ignore[arg-type]

    assert len(shop.charges_of("HR-1001")) == 2


# The mails


def test_the_mails_cover_the_demo() -> None:
    messages = load_messages()
    endings = {message["expect"]["reason"] for message in messages}

    assert len(messages) >= 26
    assert len({message["id"] for message in messages}) == len(messages)
    assert endings == {
        "completed",
        "handoff-required",
        "permission-denied",
        "invalid-proposal",
        "clarification-required",
        "tool-failed",
    }


def test_one_mail_comes_from_somebody_whom_the_shop_does_not_know(untouched: Shop) -> None:
    unknown = [m["about"] for m in load_messages() if not untouched.customer_of(m["from"])]

    assert unknown == ["unknown sender"]


def faults_of_the_mails() -> Iterator[tuple[str, dict[str, object]]]:
    for message in load_messages():
        for fault in message.get("faults", []):
            yield message["id"], fault


def test_every_fault_of_a_mail_is_one_of_the_providers_and_for_its_order_alone() -> None:
    """A fault for everybody, or for an order of two mails, would hit whoever comes first."""
    messages = {message["id"]: message for message in load_messages()}
    for message_id, body in faults_of_the_mails():
        fault = Fault.model_validate(body)
        assert fault.switches()
        assert fault.order_id == messages[message_id]["expect"]["order_id"]
        assert sum(str(fault.order_id) in message["text"] for message in messages.values()) == 1


def test_money_is_written_as_customers_read_it() -> None:
    assert money(4990, "EUR") == "49.90 EUR"
    assert money(124905, "USD") == "1,249.05 USD"
    assert money(7, "GBP") == "0.07 GBP"
