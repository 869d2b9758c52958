"""The service that the simulated tools call: its own records are the judge of every schedule.

It counts every call that reaches it and every effect that happens, by tenant and order, whatever
keys, intents or runs the fleet names. How a call goes is drawn beforehand, one `Way` for each call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from handrail.agent.effects import Pending
from handrail.agent.tools import FOREVER
from handrail.canonical import Json
from handrail.errors import ToolRefused
from handrail.tasks.calls import ToolCall

STALL_MS: Final = 20_000
SETTLE_MS: Final = 5_000
CALL_MS: Final = 5_000
#: What models and tools say holds this; no message and no trace ever may.
CANARY: Final = "CANARY-7f3a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of write tool: what the service honours, and what it can be asked."""

    name: str
    key_valid_for_ms: int = FOREVER
    query: bool = True
    not_after: bool = False
    stores_failures: bool = False
    confirmed: bool = False  # a receipt is believed once a query says the same
    approval: str = "never"
    approvers: int = 1
    undo: bool = False  # there is a compensation
    reads_original: bool = False

    @property
    def needs_a_bound(self) -> bool:
        """Whether at most one effect is promised only where a stall is bounded."""
        return self.key_valid_for_ms < FOREVER and not self.not_after

    @property
    def keyed_with_query(self) -> bool:
        """Whether no doubt may be left to a person."""
        return self.query and self.key_valid_for_ms >= FOREVER


KINDS: Final[Mapping[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind(name="key_and_query"),
        Kind(name="key_alone", query=False),
        Kind(name="dying_key_and_query", key_valid_for_ms=90_000),
        Kind(name="dying_key_alone", key_valid_for_ms=90_000, query=False),
        Kind(name="query_alone", key_valid_for_ms=0),
        Kind(name="neither", key_valid_for_ms=0, query=False),
        Kind(name="deadline_and_query", key_valid_for_ms=0, not_after=True),
        Kind(name="agreed", approval="always"),
        Kind(name="agreed_unkeyed", key_valid_for_ms=0, approval="always"),
        Kind(name="agreed_by_two", approval="always", approvers=2),
        Kind(name="agreed_neither", key_valid_for_ms=0, query=False, approval="always"),
        Kind(name="stored_failures", stores_failures=True),
        Kind(name="confirmed", confirmed=True),
        Kind(name="undoable", undo=True),
        Kind(name="undoable_unkeyed", key_valid_for_ms=0, undo=True, reads_original=True),
    )
}
#: What undoes a write of a kind is a tool of the same kind, for an order of its own.
UNDO: Final = "undo "
SECRET: Final = "what the provider signs with"


class Way(NamedTuple):
    """How one call goes: a word, and where it takes one a time."""

    word: str
    ms: int = 0


OK: Final = Way("ok")
Order = tuple[str, str]  # tenant, order


class Performed(NamedTuple):
    """One effect at the service."""

    at: int
    order: Order
    amount: int
    key: str
    run_id: str


class _Known(NamedTuple):
    answer: Json | ToolRefused
    until: int


@dataclass(slots=True)
class Record:
    """What a query finds; later than the effect itself, where the service is slow to show it."""

    answer: dict[str, Json]
    visible_at: int


@dataclass(slots=True)
class Service:
    """One schedule's service. `now` is the ledger's time, `later(at, act)` does something then."""

    now: Callable[[], int]
    later: Callable[[int, Callable[[], object]], object]
    stall_ms: int | None
    writes: list[Way] = field(default_factory=list)  # how the next ones go; then they go well
    reads: list[Way] = field(default_factory=list)
    queries: list[Way] = field(default_factory=list)
    query_dead: bool = False
    performed: list[Performed] = field(default_factory=list)
    records: dict[Order, Record] = field(default_factory=dict)
    keys: dict[str, _Known] = field(default_factory=dict)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # ("model", run id), ...
    lied: set[Order] = field(default_factory=set)  # it said what no program can see through
    by_hand: dict[Order, int] = field(default_factory=dict)  # what a person has undone, and when
    in_the_air: int = 0

    def may_still_leave(self, kind: Kind, call: ToolCall, looked_at: int) -> bool:
        """Whether the deployment's word holds, that no request leaves this late.

        A worker that stood still for longer than that since it looked at its clock is one that
        never woke up. One that looked too late, and sends all the same, is not excused.
        """
        assert call.not_after is not None
        if self.stall_ms is None or not kind.needs_a_bound or looked_at > call.not_after:
            return True
        return self.now() <= call.not_after + self.stall_ms

    def next_write(self, call: ToolCall) -> Way:
        """A write call has left: count it, and say how it goes."""
        self.calls["write", call.run_id] += 1
        return self.writes.pop(0) if self.writes else OK

    def arrive(self, kind: Kind, call: ToolCall, arguments: Mapping[str, Any], lag_ms: int) -> Json:
        """A request arrives: perform it, unless its key is known or its deadline is over."""
        assert call.key is not None and call.not_after is not None
        now = self.now()
        if kind.not_after and now > call.not_after:
            raise ToolRefused("too-late")
        known = self.keys.get(call.key)
        if kind.key_valid_for_ms and known is not None and known.until > now:
            if isinstance(known.answer, ToolRefused):
                raise known.answer
            return known.answer
        order = (call.tenant, str(arguments["order"]))
        amount = int(arguments["amount"])
        self.performed.append(Performed(now, order, amount, call.key, call.run_id))
        answer: dict[str, Json] = {
            "order": order[1],
            "tenant": order[0],
            "amount": amount,
            "receipt": len(self.performed),
            "note": CANARY,
        }
        self.records.setdefault(order, Record(answer, now + lag_ms))
        if kind.key_valid_for_ms:
            self.keys[call.key] = _Known(answer, now + kind.key_valid_for_ms)
        return answer

    def land_later(
        self, kind: Kind, call: ToolCall, arguments: Mapping[str, Any], delay_ms: int
    ) -> None:
        """Let a request arrive after a while, but within what the tool has declared."""
        assert call.not_after is not None
        at = self.now() + delay_ms
        if self.stall_ms is not None:
            at = max(self.now(), min(at, call.not_after + self.stall_ms + SETTLE_MS))
        elif kind.query:
            at = max(self.now(), min(at, call.not_after + SETTLE_MS))

        def arrives() -> None:
            self.in_the_air -= 1
            try:
                self.arrive(kind, call, arguments, 0)
            except ToolRefused:
                return  # nobody waits for it any more

        self.in_the_air += 1
        self.later(at, arrives)

    def refuse(self, kind: Kind, call: ToolCall, reason: str) -> None:
        """Refuse a request; where failures are stored, the same key is refused from then on.

        A key that is known already is answered as before, unless it is refused before that.
        """
        assert call.key is not None
        known = self.keys.get(call.key)
        seen = kind.key_valid_for_ms and known is not None and known.until > self.now()
        if seen and reason == "refused":
            return
        refusal = ToolRefused(reason, retryable=reason == "busy")
        if kind.stores_failures and not seen:
            self.keys[call.key] = _Known(refusal, self.now() + kind.key_valid_for_ms)
        raise refusal

    def refuse_read(self) -> None:
        """Refuse a read, which may be tried again."""
        raise ToolRefused("busy", retryable=True)

    def lag_ms(self, call: ToolCall, wished_ms: int) -> int:
        """How late a record may show: absence is believed after the last moment to send it."""
        assert call.not_after is not None
        latest = call.not_after + (self.stall_ms or 0) + SETTLE_MS
        return max(0, min(wished_ms, latest - self.now()))

    def find(self, arguments: Mapping[str, Any], call: ToolCall, way: Way) -> Any:
        """Answer a query: whether an order took effect."""
        self.calls["query", call.run_id] += 1
        record = self.records.get((call.tenant, str(arguments["order"])))
        shown = record.answer if record and record.visible_at <= self.now() else None
        if self.query_dead:
            raise ConnectionError("no answer")
        match way.word:
            case "error":
                raise ConnectionError("no answer")
            case "pending":
                return Pending()
            case "another's":
                return {**(shown or _blank(arguments)), "tenant": "somebody-else"}
            case "wrong amount":
                return {**(shown or _blank(arguments)), "tenant": call.tenant, "amount": -1}
        return shown

    def has(self, tenant: str, order: str, amount: int | None = None) -> bool:
        """Whether an order took effect, as an independent look at the service sees it."""
        record = self.records.get((tenant, order))
        return record is not None and amount in (None, record.answer["amount"])


def _blank(arguments: Mapping[str, Any]) -> dict[str, Json]:
    return {"order": arguments["order"], "amount": arguments["amount"], "receipt": 0, "note": ""}
