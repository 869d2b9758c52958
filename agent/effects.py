"""The record of one business intent, from plan to proof, and what may be concluded about it.

`may_send` says when an intent may be sent (again), `classify` what a sender's own word proves,
`resolve` what a query's answer proves. A doubt is never settled by hope: absence takes two
consistent answers to queries that were sent after the last moment at which the write could still
land. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from handrail.agent.stage import Doubtful, End, Refused, Reply, Succeeded
from handrail.agent.tools import FOREVER, ToolContract
from handrail.canonical import Json, digest


class EffectStatus(StrEnum):
    """Where an effect is, and who moves it on."""

    PLANNED = "planned"  # recorded; whoever dispatches first owns it
    DISPATCHED = "dispatched"  # a request may be under way; its sender or the sweep moves it
    APPLIED = "applied"  # proved
    ABSENT = "absent"  # proved, by the sender's word or by two queries
    UNKNOWN = "unknown"  # no proof; the reconciler, late evidence or a person moves it
    COMPENSATING = "compensating"  # its compensation is under way
    COMPENSATED = "compensated"  # undone, with proof
    HANDED_OFF = "handed_off"  # a person finds out
    CONTRADICTED = "contradicted"  # it happened although its run ended without it; a person decides


_E = EffectStatus

#: The legal moves; an operator may also move `handed_off` and `contradicted` anywhere.
EFFECT_MOVES: Final[Mapping[EffectStatus, frozenset[EffectStatus]]] = MappingProxyType(
    {
        # Sent in a time that the ledger has lost, perhaps, or as a late word proves.
        _E.PLANNED: frozenset({_E.DISPATCHED, _E.UNKNOWN, _E.CONTRADICTED}),
        _E.DISPATCHED: frozenset({_E.APPLIED, _E.ABSENT, _E.UNKNOWN}),
        _E.UNKNOWN: frozenset({_E.APPLIED, _E.ABSENT, _E.HANDED_OFF, _E.DISPATCHED}),
        _E.ABSENT: frozenset({_E.DISPATCHED, _E.UNKNOWN, _E.CONTRADICTED}),
        _E.APPLIED: frozenset({_E.COMPENSATING}),
        _E.COMPENSATING: frozenset({_E.COMPENSATED, _E.APPLIED, _E.HANDED_OFF}),
        _E.COMPENSATED: frozenset(),
        _E.HANDED_OFF: frozenset(_E) - {_E.HANDED_OFF},
        _E.CONTRADICTED: frozenset(_E) - {_E.CONTRADICTED},
    }
)


def may_become(before: EffectStatus, after: EffectStatus) -> bool:
    """Whether one transaction may move an effect so.

    It may pass through `applied` on the way: proved, and at once to be undone; and through
    `compensating`: undone by a person.
    """
    if after is before or after in EFFECT_MOVES[before]:
        return True
    if before is _E.APPLIED:
        return after is _E.COMPENSATED
    return after is _E.COMPENSATING and _E.APPLIED in EFFECT_MOVES[before]


#: Neither proved nor never sent: such an effect blocks every other write of its run.
UNRESOLVED: Final = frozenset({_E.DISPATCHED, _E.UNKNOWN})
QUERIES_PER_DISPATCH: Final = 8


class Doubt(StrEnum):
    """What is known of the attempts before the current one."""

    NONE = "none"  # never sent, or each attempt closed by its own sender's word
    UNPROVEN = "unproven"  # an attempt's fate is not known
    BY_QUERY = "by-query"  # a query says "absent"; a paused sender may still prove it wrong


class Trigger(StrEnum):
    """Why an effect is unknown."""

    TIMEOUT = "timeout"
    CANCELLATION = "cancellation"
    EXCEPTION = "exception"
    REPORTED = "reported"
    WORKER_LOST = "worker-lost"
    CONTRARY_EVIDENCE = "contrary-evidence"


@dataclass(frozen=True, slots=True)
class Terms:
    """What a tool declared when the intent was planned; milliseconds. They stay with the effect."""

    call_ms: int
    key_valid_for_ms: int
    not_after: bool
    can_query: bool
    settle_after_ms: int
    pending_for_ms: int
    stores_failures: bool
    confirmed_by_query: bool = False
    takeover: str | None = None

    @classmethod
    def of(cls, contract: ToolContract) -> Terms:
        """Take them from a contract."""
        return cls(
            call_ms=contract.timeout_ms,
            key_valid_for_ms=contract.key_valid_for_ms,
            not_after=contract.not_after,
            can_query=contract.can_query,
            settle_after_ms=contract.settle_after_ms,
            pending_for_ms=contract.pending_for_ms,
            stores_failures=contract.stores_failures,
            confirmed_by_query=contract.confirmed_by_query,
            takeover=contract.takeover,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the terms as a JSON object."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class CompensationRecord:
    """What was recorded about undoing a write, before it was sent: the tool that undoes it, how
    many calls that takes, and the state that was there before, where the declaration reads one
    (`read`).
    """

    tool: str
    calls: int = 1
    original: Json = None
    read: bool = True

    def to_json(self) -> dict[str, Json]:
        """Return the record as a JSON object."""
        return {
            "tool": self.tool,
            "calls": self.calls,
            "original": self.original,
            "read": self.read,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One effect as the ledger holds it. Instants are milliseconds since the epoch, by its
    clock.
    """

    id: str
    tenant: str
    intent_key: str
    tool: str
    contract_version: str
    arguments: Mapping[str, Json]
    arguments_hash: str
    terms: Terms
    status: EffectStatus = EffectStatus.PLANNED
    token: int = 0
    dispatcher: str | None = None
    owner_run_id: str | None = None
    attempts: int = 0
    doubt: Doubt = Doubt.NONE
    first_dispatched_at: int | None = None
    dispatch_deadline_at: int | None = None
    unknown_since: int | None = None
    trigger: Trigger | None = None
    queries_left: int = QUERIES_PER_DISPATCH
    absences: int = 0
    next_query_at: int | None = None
    result: Json = None
    evidence: str | None = None
    approval_id: str | None = None
    compensation: CompensationRecord | None = None
    compensates: str | None = None  # the effect that this one undoes
    rewind: int | None = None  # the latest rewind of the ledger under which it was asked about

    def settles_at(self, max_stall_ms: int) -> int:
        """The moment after which a query that is sent may prove absence."""
        assert self.dispatch_deadline_at is not None
        return self.dispatch_deadline_at + max_stall_ms + self.terms.settle_after_ms

    @property
    def perhaps_forgotten(self) -> bool:
        """Whether its doubt is about a dispatch that the ledger does not know of."""
        return self.rewind is not None and self.dispatcher is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """The ledger was set back to an earlier state: what it knew of a time is lost.

    Nothing is forgotten that was written before `lost_from`, and nothing was sent on its word after
    `lost_until`; milliseconds, by the ledger's clock.
    """

    number: int
    lost_from: int
    lost_until: int


def may_be_forgotten(effect: Effect, rewind: Rewind) -> bool:
    """Whether an intent that the ledger takes for not sent may have been sent in the lost time.

    One that has been asked about since then was not, or is known.
    """
    not_sent = effect.status in (EffectStatus.PLANNED, EffectStatus.ABSENT)
    return not_sent and effect.rewind != rewind.number


def perhaps_sent(effect: Effect, rewind: Rewind, *, run_id: str, now: int) -> Effect:
    """The effect that may have been sent in the lost time: in doubt, as after any unproven attempt.

    A state from before it that is recorded may be what it has made: then it is read anew where the
    write turns out not to have been made, and nobody can undo it where it was.
    """
    latest_end = rewind.lost_until + effect.terms.call_ms
    undo = effect.compensation
    return replace(
        effect,
        status=EffectStatus.UNKNOWN,
        token=effect.token + 1,
        dispatcher=None,
        owner_run_id=run_id,
        attempts=max(1, effect.attempts),
        doubt=Doubt.UNPROVEN,
        first_dispatched_at=effect.first_dispatched_at or rewind.lost_from,
        dispatch_deadline_at=max(effect.dispatch_deadline_at or 0, latest_end),
        unknown_since=now,
        trigger=Trigger.WORKER_LOST,
        queries_left=QUERIES_PER_DISPATCH,
        absences=0,
        next_query_at=first_query_at(now),
        compensation=None if undo is None or undo.read else undo,
        rewind=rewind.number,
    )


def upstream_key(tenant: str, intent_key: str) -> str:
    """The idempotency key that the service is given; two tenants never share one."""
    return digest("intent", tenant, intent_key)


def may_send(effect: Effect, *, now: int, max_stall_ms: int | None) -> bool:
    """Whether this intent may be sent, first or again. `max_stall_ms=None`: no bound is
    declared.
    """
    if effect.attempts == 0 or effect.doubt is Doubt.NONE:
        return True
    terms = effect.terms
    # What may have happened is sent again only where the service would know it again.
    absent = effect.status is EffectStatus.ABSENT
    if terms.key_valid_for_ms >= FOREVER or (terms.not_after and absent):
        return True
    if terms.key_valid_for_ms:
        if max_stall_ms is None or effect.first_dispatched_at is None:
            return False
        dies_at = effect.first_dispatched_at + terms.key_valid_for_ms
        return dies_at >= now + terms.call_ms + max_stall_ms + terms.settle_after_ms
    return absent and max_stall_ms is not None


def classify(effect: Effect, end: End, reply: Reply | None) -> EffectStatus:
    """Say what the sender's own word proves about the attempt that it has just made.

    A receipt proves application. A refusal proves the absence of its own attempt alone: with an
    unproven earlier attempt the effect stays unknown. Everything else proves nothing.
    """
    if end is End.RETURNED and isinstance(reply, Succeeded):
        return EffectStatus.APPLIED
    if end is End.RETURNED and isinstance(reply, Refused):
        unproven = effect.doubt is Doubt.UNPROVEN
        return EffectStatus.UNKNOWN if unproven else EffectStatus.ABSENT
    return EffectStatus.UNKNOWN


def trigger_of(end: End, reply: Reply | None, *, cancelled: bool) -> Trigger:
    """Say why an effect is unknown."""
    if end is End.RETURNED:
        return Trigger.REPORTED if isinstance(reply, Doubtful | Refused) else Trigger.EXCEPTION
    if cancelled:
        return Trigger.CANCELLATION
    return Trigger.TIMEOUT if end is End.TIMED_OUT else Trigger.EXCEPTION


# ---- queries -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Applied:
    """A query's answer: it took effect. `value` is the service's record, `evidence` refers to
    it.
    """

    value: Json
    evidence: str


@dataclass(frozen=True, slots=True)
class Absent:
    """A query's answer: there is no trace of it."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A query's answer: the service is still at it."""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The query failed; nothing is known. `problem` is for people."""

    problem: str


Answer: TypeAlias = Applied | Absent | Pending | NoAnswer


def answer_to_json(answer: Answer) -> dict[str, Json]:
    """Return a service's answer to a query as a JSON object."""
    said: dict[str, Json] = {"answer": type(answer).__name__.lower()}
    match answer:
        case Applied(value, evidence):
            return {**said, "record": value, "evidence": evidence}
        case NoAnswer(problem):
            return {**said, "problem": problem}
    return said


@dataclass(frozen=True, slots=True)
class ProvedApplied:
    """Settled: it happened."""

    value: Json
    evidence: str


@dataclass(frozen=True, slots=True)
class ProvedAbsent:
    """Settled: it did not happen, and nothing that was sent can still make it happen."""


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Not settled: query again at `at`. `absences` counts answers that count; `queries_left`
    what remains.
    """

    at: int
    absences: int
    queries_left: int


@dataclass(frozen=True, slots=True)
class SendAgain:
    """No query can settle it, but the same key may be sent again, which does."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No proof is to be had by the program: a person decides."""

    problem: str


Conclusion: TypeAlias = ProvedApplied | ProvedAbsent | AskAgain | SendAgain | GiveUp


def resolve(
    effect: Effect,
    answer: Answer,
    *,
    sent_at: int,
    now: int,
    max_stall_ms: int | None,
    jitter: float,
) -> Conclusion:
    """Say what a tool's answer proves about an effect whose outcome is unknown.

    `sent_at` is when the query was *sent*, by the ledger's clock: one that was sent too early
    proves no absence, whenever its answer is read. `jitter` is in [0, 1). The first case that fits
    decides.
    """
    counts = max_stall_ms is not None and sent_at >= effect.settles_at(max_stall_ms)
    absences = effect.absences
    match answer:
        case Applied(value, evidence):
            return ProvedApplied(value, evidence)
        case Absent() if counts and absences > 0:
            return ProvedAbsent()
        case Absent() if counts:
            absences += 1
        case Absent():
            pass
        case Pending() | NoAnswer():
            absences = 0  # two answers must be consistent, one after the other
    queries_left = effect.queries_left
    if isinstance(answer, Pending) and _pending_is_normal(effect, now):
        queries_left += 1
    if queries_left > 0:
        at = _next_query_at(effect, now=now, max_stall_ms=max_stall_ms, jitter=jitter)
        return AskAgain(at, absences, queries_left)
    return without_query(effect, now=now, max_stall_ms=max_stall_ms)


def without_query(effect: Effect, *, now: int, max_stall_ms: int | None) -> Conclusion:
    """What is left when no query can settle a doubt: the same key again, or a person."""
    if effect.terms.key_valid_for_ms:
        if may_send(effect, now=now, max_stall_ms=max_stall_ms):
            return SendAgain()
        return GiveUp("the key's lifetime is over")
    return GiveUp("no key and no answer that proves anything")


def first_query_at(now: int) -> int:
    """When an effect that has just become unknown is queried for the first time: early, once."""
    return now + 500


def believed_absent(effect: Effect) -> Effect:
    """The effect after two queries: absent, but not by its sender's word."""
    return replace(effect, status=EffectStatus.ABSENT, doubt=Doubt.BY_QUERY, next_query_at=None)


def _pending_is_normal(effect: Effect, now: int) -> bool:
    return (
        effect.unknown_since is not None
        and now < effect.unknown_since + effect.terms.pending_for_ms
    )


def _next_query_at(effect: Effect, *, now: int, max_stall_ms: int | None, jitter: float) -> int:
    asked = QUERIES_PER_DISPATCH - effect.queries_left
    pause = min(60_000, 1_000 * 2 ** max(0, asked - 1))
    at = now + int(pause * (0.5 + jitter))
    if max_stall_ms is None:
        return at
    return max(at, effect.settles_at(max_stall_ms))  # one early query is enough; keep the rest
