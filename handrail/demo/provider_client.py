"""How the shop talks to its payment provider: three endings, and no fourth.

A call returns a receipt, or raises `ProviderRefused`: the provider's own word that this request
moved no money. Whatever else happens raises `ProviderUnclear`: a timeout, a lost or broken answer,
a 500. Then nobody knows whether money moved, and `find_refund` has to tell. The client never
retries by itself: that would be a call which nobody has paid for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any, ClassVar, Final
from urllib.parse import quote, urlsplit

ANSWER_LIMIT_BYTES: Final = 4 * 1024 * 1024  # the records of a long demo stay far below


@dataclass(frozen=True, slots=True)
class Receipt:
    """The provider's record of one refund. `applied_at`: epoch milliseconds by its own clock."""

    refund_id: str
    key: str
    order_id: str
    charge_id: str
    amount_cents: int
    applied_at: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(eq=False)
class ProviderRefused(Exception):
    """The provider said no to this request. Earlier requests under the key are another matter."""

    code: ClassVar[str] = "provider-refused"
    refusal: str  # the provider's code, e.g. `card-closed`

    def __str__(self) -> str:
        return f"the payment provider refused: {self.refusal}"


@dataclass(eq=False)
class ProviderUnclear(Exception):
    """No receipt and no refusal came back: the request may have been carried out."""

    code: ClassVar[str] = "provider-unclear"
    what: str

    def __str__(self) -> str:
        return f"{self.what}: query the refund by its key before anything is sent again"


class ProviderClient:
    """A client for the provider at `url`. It holds no connection, so threads may share it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._address = urlsplit(url).netloc

    def refund(
        self, order_id: str, charge_id: str, amount_cents: int, key: str, timeout_s: float
    ) -> Receipt:
        """Return money, at most once for each `key`; sent again, the first receipt comes back.

        Raises `ProviderRefused` or `ProviderUnclear`. A receipt for something else is unclear too.
        """
        asked = {"order_id": order_id, "charge_id": charge_id, "amount_cents": amount_cents}
        answer = self._call("POST", "/refunds", timeout_s, asked, {"Idempotency-Key": key})
        receipt = _receipt(answer)
        if asked | {"key": key} != {name: getattr(receipt, name) for name in (*asked, "key")}:
            raise ProviderUnclear(f"the receipt {receipt.refund_id} is for another refund")
        return receipt

    def find_refund(self, key: str, timeout_s: float) -> Receipt | None:
        """The refund under `key`; None: there is none so far, and one may still be on its way."""
        answer = self._call("GET", f"/refunds?key={quote(key, safe='')}", timeout_s)
        receipts = _receipts(answer)
        if any(receipt.key != key for receipt in receipts):
            raise ProviderUnclear("the query was answered with refunds under another key")
        return receipts[0] if receipts else None

    def refunds_of(self, order_id: str, timeout_s: float) -> list[Receipt]:
        """Every refund of an order, the oldest first."""
        answer = self._call("GET", f"/refunds?order_id={quote(order_id, safe='')}", timeout_s)
        return _receipts(answer)

    def records(self, timeout_s: float) -> dict[str, Any]:
        """All that the provider has on record: `refunds`, `requests`, `keys_seen`."""
        answer = self._call("GET", "/records", timeout_s)
        if not isinstance(answer, dict):
            raise ProviderUnclear("the records are not a JSON object")
        return answer

    def set_fault(self, fault: Mapping[str, Any], timeout_s: float) -> None:
        """Make something go wrong, see `handrail.demo.provider.Fault`."""
        self._call("POST", "/faults", timeout_s, fault)

    def clear_faults(self, timeout_s: float) -> None:
        self._call("DELETE", "/faults", timeout_s)

    def _call(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> object:
        """One request; `timeout_s` is one budget for connecting, sending, waiting and reading."""
        content = None if body is None else json.dumps(body).encode()
        try:
            status, raw = self._exchange(method, path, content, dict(headers or {}), timeout_s)
            answer = json.loads(raw) if raw else None
        except (OSError, HTTPException, ValueError) as error:
            raise ProviderUnclear(f"{method} {path} failed: {error!r}") from error
        if 200 <= status < 300:
            return answer
        match answer:
            # The provider's own words only: a bare 4xx may come from a proxy on the way.
            case {"refused": str(refusal)} if 400 <= status < 500:
                raise ProviderRefused(refusal)
        raise ProviderUnclear(f"{method} {path} was answered with status {status}")

    def _exchange(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> tuple[int, bytes]:
        deadline = time.monotonic() + timeout_s
        connection = HTTPConnection(self._address, timeout=timeout_s)
        try:
            connection.request(method, path, content, headers)
            raw = b""
            connection.sock.settimeout(_left(deadline))
            response = connection.getresponse()
            while chunk := response.read1(ANSWER_LIMIT_BYTES - len(raw) + 1):
                raw += chunk
                if len(raw) > ANSWER_LIMIT_BYTES:
                    raise ValueError("the answer is too long")
                _left(deadline)
            return response.status, raw
        finally:
            connection.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time left for the answer")
    return left


def _receipts(answer: object) -> list[Receipt]:
    match answer:
        case {"refunds": list(refunds)}:
            return [_receipt(refund) for refund in refunds]
    raise ProviderUnclear("the answer to the query is not a list of refunds")


def _receipt(answer: object) -> Receipt:
    match answer:
        case {
            "refund_id": str(refund_id),
            "key": str(key),
            "order_id": str(order_id),
            "charge_id": str(charge_id),
            "amount_cents": int(amount_cents),
            "applied_at": int(applied_at),
        }:
            return Receipt(refund_id, key, order_id, charge_id, amount_cents, applied_at)
    raise ProviderUnclear("the answer is not a receipt")
