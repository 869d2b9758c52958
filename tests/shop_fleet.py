"""A fleet for the tests of what people do: a bank that loses answers, a clock that can hurry."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from handrail import (
    FOREVER,
    Action,
    AgentLoop,
    Commit,
    Confirm,
    Fleet,
    ToolUnclear,
    Workflow,
)

BANK, OFFSET = Path("bank.json"), Path("offset.txt")
offset_ms = int(OFFSET.read_text()) if OFFSET.exists() else 0
hurries = False


def clock() -> int:
    """The time; in a hurry, each look at it finds that more of it has gone by."""
    global offset_ms
    offset_ms += 1_000 * hurries
    return int(time.time() * 1000) + offset_ms


fleet = Fleet("shop", clock=clock)


class Payment(BaseModel):
    order: str
    to: str = "Roaster Ltd"
    cents: int = 4200


def records() -> dict[str, Any]:
    """What the bank has on record, by intent key."""
    return json.loads(BANK.read_text()) if BANK.exists() else {}


@fleet.tool(
    side_effect="irreversible",
    intent=lambda payment, run: f"pay:{payment.order}",
    amount="cents",
    guarantee="person",
    takeover="bookkeeping",
)
def pay(payment: Payment, call: Any) -> Any:
    """Pay a supplier, over a counter that gives no receipts."""
    raise ToolUnclear("the bank has not answered in time")


def found(payment: Payment, call: Any) -> Any:
    """Ask the bank; where it is away, it does not answer."""
    if Path("bank-is-away").exists():
        raise ConnectionError("the bank is away")
    return records().get(f"transfer:{payment.order}")


@fleet.tool(
    side_effect="irreversible",
    intent=lambda payment, run: f"transfer:{payment.order}",
    approvers=2,
    guarantee="idempotency-key",
    key_valid_for_ms=FOREVER,
    query=found,
    takeover="bookkeeping",
)
def transfer(payment: Payment, call: Any) -> Any:
    """Transfer money; the bank can be asked about it."""
    if Path("bank-is-away").exists():
        raise ToolUnclear("the line was cut")
    BANK.write_text(json.dumps(records() | {f"transfer:{payment.order}": {"paid": payment.cents}}))
    return {"paid": payment.cents}


@fleet.tool(
    side_effect="idempotent",
    approval="always",
    intent=lambda payment, run: f"note:{payment.order}",
    guarantee="idempotency-key",
    key_valid_for_ms=FOREVER,
    takeover="bookkeeping",
)
def note(payment: Payment, call: Any) -> Any:
    """Write a note, which can be written again."""
    return {"noted": payment.order}


@fleet.tool(side_effect="read")
def look(payment: Payment, call: Any) -> str:
    """Look something up."""
    return payment.order


def model(observation: Any) -> Any:
    """Ask what is not known, then be content."""
    if not observation["observations"]:
        return {"kind": "clarify", "question": "Which \x1b[31morder\u202e?"}
    return {"kind": "complete", "answer": observation["observations"][-1]}


def plan(tool: Any) -> Any:
    """The action that is confirmed, and then committed."""
    return lambda run: Action(tool, run.input)


fleet.model("default", model)
for tool in (pay, transfer, note):
    action = plan(tool)
    stages = [Confirm("confirm", action), Commit("commit", action, tool)]
    fleet.workflow(Workflow(name=tool.name, stages=stages))
talk = AgentLoop(name="talk", actions=(look,), verify=lambda claim, call: True)
fleet.workflow(Workflow(name="talk", stages=[talk]))
