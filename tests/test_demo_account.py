"""The account at the end of the demo: the provider's own record is the judge, and is obeyed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from handrail.cli import app
from handrail.demo.messages import load_messages
from handrail.demo.show import Demo, Outcome, Story, compared, wrong_payments

MAIL = load_messages()[0]  # whose refund is 49.90 for HR-1001


def effect(status: str = "applied", cents: int = 4990, key: str = "k-1") -> dict[str, Any]:
    arguments = {"order_id": "HR-1001", "charge_id": "ch-1001-2", "amount_cents": cents}
    return {
        "id": key,
        "tool": "refund",
        "status": status,
        "attempts": 1,
        "arguments": arguments,
    }


def paid(cents: int = 4990, key: str = "k-1") -> dict[str, Any]:
    return {
        "refund_id": "re-1",
        "key": key,
        "order_id": "HR-1001",
        "charge_id": "ch-1001-2",
        "amount_cents": cents,
        "applied_at": 1,
    }


def records(*refunds: Mapping[str, Any]) -> dict[str, Any]:
    return {"refunds": list(refunds), "requests": list(refunds)}


@pytest.mark.parametrize(
    ("ours", "theirs", "agree"),
    [
        ([effect()], [paid()], True),
        ([effect("absent")], [], True),  # refused, and not paid
        ([effect("planned")], [], True),  # confirmed by nobody
        ([effect("unknown")], [paid()], False),  # nobody has found out
        ([effect("dispatched")], [], False),
        ([effect("handed_off")], [paid()], False),
        ([effect()], [], False),  # we believe what did not happen
        ([effect("absent")], [paid()], False),  # we deny what happened
        ([], [paid()], False),  # nobody here asked for it
        ([effect()], [paid(4991)], False),
        ([effect()], [paid(key="k-2")], False),  # paid under another identity
        ([effect()], [paid(), paid()], False),  # paid twice
        ([effect(), effect(key="k-2")], [paid(), paid(key="k-2")], False),  # twice, knowingly
    ],
)
def test_both_records_must_say_the_same_and_at_most_one_payment(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], agree: bool
) -> None:
    (refund,) = compared(ours, records(*theirs))

    assert refund.agree is agree


@pytest.mark.parametrize(
    ("theirs", "problems"),
    [
        ([paid()], 0),
        ([], 1),  # the customer is still waiting
        ([paid(), paid()], 2),  # 99.80 was not called for, and 49.90 was not paid
        ([paid(), paid() | {"order_id": "HR-1", "charge_id": "ch-1"}], 1),
    ],
    ids=["paid", "not paid", "paid twice", "another order paid too"],
)
def test_what_the_mails_call_for_is_held_against_the_provider_alone(
    theirs: list[dict[str, Any]], problems: int
) -> None:
    refunds = compared([], records(*theirs))

    assert len(wrong_payments([MAIL], refunds)) == problems


@pytest.mark.parametrize(("problems", "exit_code"), [((), 0), (("HR-1 was paid twice",), 1)])
def test_a_demo_with_a_problem_ends_with_code_1(
    monkeypatch: pytest.MonkeyPatch, problems: tuple[str, ...], exit_code: int
) -> None:
    outcome = Outcome([], [], Story("m-22", "", []), problems, 0, 0, 1.0)
    monkeypatch.setattr(Demo, "run", lambda self: outcome)

    ended = CliRunner().invoke(app, ["demo", "--json"])

    assert ended.exit_code == exit_code
    assert json.loads(ended.stdout)["problems"] == list(problems)
