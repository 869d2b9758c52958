"""The customer mails of the demo, and how the run of each must end.

`messages.jsonl` holds one mail a line. `expect` is the end of its run: `status` and `reason` of the
run, the amount that the customer has back, and the order it is about. `faults` are settings of the
payment provider, posted before the mails are worked on. `corrections` are prices that the shop
corrects while the run waits for its first confirmation. Two endings were a matter of choice: a
sender whom the shop does not know, and a customer who asks for somebody else's order, both end as
`permission-denied`, with the same words whether or not such an order exists.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, NotRequired, TypedDict, cast


class Expectation(TypedDict):
    """`refund_cents` and `order_id` are None where no money goes back, or no one order is meant."""

    status: str
    reason: str
    refund_cents: int | None
    order_id: str | None


# The functional form, because `from` is a keyword.
Message = TypedDict(
    "Message",
    {
        "id": str,
        "from": str,
        "text": str,
        "expect": Expectation,
        "about": str,
        "faults": NotRequired[list[dict[str, Any]]],
        "corrections": NotRequired[list[dict[str, Any]]],
    },
)


def load_messages() -> list[Message]:
    """Every mail, in the order of the file."""
    lines = files("handrail.demo").joinpath("messages.jsonl").read_text(encoding="utf-8")
    return [cast("Message", json.loads(line)) for line in lines.rstrip("\n").split("\n")]
