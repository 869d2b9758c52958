"""People: who may do what, and the record of what they did.

A person is a `Principal` with roles; the front door asks `must_be_allowed` before every look and
every act, and each act leaves an `AuditEntry` in the transaction that it changed something in. The
entries form a chain: each names the hash of the one before, so that an edit or a gap shows. Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, Final

from handrail.agent.tools import Principal
from handrail.canonical import Json, canonical
from handrail.errors import BadInput

MAX_WORDS: Final = 2_000
_NAME: Final = re.compile(r"[A-Za-z0-9_.:@-]{1,128}\Z")
#: What the first entry of an audit names as the one before it.
GENESIS: Final = "0" * 64


class Role(StrEnum):
    """What a person is trusted with. None includes another, but for looking."""

    VIEWER = "viewer"  # looks
    OPERATOR = "operator"  # resolves handoffs, answers, cancels, pauses
    APPROVER = "approver"  # consents to an exact action, or refuses it
    ADMIN = "admin"  # says who has which role


class Act(StrEnum):
    """What a person does."""

    LOOK = "look"
    REQUEST_TOKEN = "request-token"
    APPROVE = "approve"
    REJECT = "reject"
    ANSWER = "answer"
    CLAIM = "claim"
    RELEASE = "release"
    ASSIGN = "assign"
    SNOOZE = "snooze"
    COMMENT = "comment"
    QUERY = "query"
    RESOLVE = "resolve"
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    ADMIT = "admit"
    DISMISS = "dismiss"
    REWOUND = "rewound"
    CLEARED = "cleared"


_OPERATOR_OR_ADMIN: Final = frozenset({Role.OPERATOR, Role.ADMIN})

#: Which roles may do what. An admin does not approve: who hands out roles has to ask another.
MAY: Final[Mapping[Act, frozenset[Role]]] = MappingProxyType(
    {act: _OPERATOR_OR_ADMIN for act in Act}
    | {
        Act.LOOK: frozenset(Role),
        Act.REQUEST_TOKEN: frozenset({Role.APPROVER}),
        Act.APPROVE: frozenset({Role.APPROVER}),
        Act.REJECT: frozenset({Role.APPROVER}),
        Act.ADMIT: frozenset({Role.ADMIN}),
        Act.DISMISS: frozenset({Role.ADMIN}),
    }
)


@dataclass(eq=False)
class NotAllowed(BadInput):
    """A person may not do this, here; nothing was changed."""

    code: ClassVar[str] = "not-allowed"
    who: str
    act: str
    problem: str

    def __str__(self) -> str:
        return f"{self.who!r} may not {self.act}: {self.problem}"


@dataclass(eq=False)
class InvalidWords(BadInput):
    """What a person says cannot be taken as it was given; nothing was changed."""

    code: ClassVar[str] = "invalid-words"
    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


@dataclass(eq=False)
class TooManyDecisions(BadInput):
    """A person decides faster than anybody can read; nothing was changed."""

    code: ClassVar[str] = "too-many-decisions"
    who: str
    most: int

    def __str__(self) -> str:
        return (
            f"{self.who!r} has decided {self.most} times within a minute: read what you decide, or"
            " raise HANDRAIL_DECISIONS_PER_MINUTE"
        )


def must_be_allowed(who: Principal, act: Act, *, tenant: str | None = None) -> None:
    """Refuse with `NotAllowed` who has no role for an act, or none in this tenant."""
    roles = MAY[act]
    if not roles & who.roles:
        known = " or ".join(sorted(roles))
        raise NotAllowed(who.subject, act.value, f"that takes the role {known}")
    if tenant is not None and not who.sees(tenant):
        raise NotAllowed(who.subject, act.value, "it belongs to another tenant")


def same_person(one: str, other: str) -> bool:
    """Whether two names are those of one person: how they are spelled makes nobody a second one."""
    return one.casefold() == other.casefold()


def checked_name(who: object) -> str:
    """Read a person's name: as the subject of a run is written, so that no two look alike. Raises
    `InvalidWords`.
    """
    if not isinstance(who, str) or not _NAME.match(who):
        raise InvalidWords(
            "name", f"{who!r} is no name: letters, digits and _.:@- (1 to 128 of them)"
        )
    return who


def checked_words(
    field_name: str, text: object, *, needed: bool = True, most: int = MAX_WORDS
) -> str:
    """Read what a person says: some text, or none where it is not needed. Raises `InvalidWords`.

    Lines and any script are welcome; it is stored escaped, and shown with every sign visible.
    """
    if not isinstance(text, str):
        raise InvalidWords(field_name, f"must be a text, not {type(text).__name__}")
    if len(text) > most:
        raise InvalidWords(field_name, f"say it in at most {most} characters")
    if needed and not says_something(text):
        raise InvalidWords(field_name, "say something: it is kept with what is done")
    return text


def says_something(text: str) -> bool:
    """Whether there is anything in a text; the dots of a printed hint stand for what is missing."""
    return bool(text.strip(" \t\r\n.\u2026"))


# ---- the audit -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AtMost:
    """A bound for one person: so many of these acts within a time."""

    number: int
    acts: tuple[Act, ...]
    within_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One act of a person, as it is recorded. `before` and `after` are what it changed; `at_most`
    is counted in the transaction that records it, and refuses it with `TooManyDecisions`.
    """

    actor: str
    act: Act
    target: str  # what it was done to: "run:…", "handoff:…", "approval:…", "pause:tool:…"
    roles: tuple[str, ...] = ()
    tenant: str | None = None
    run_id: str | None = None
    reason: str = ""
    before: Mapping[str, Json] = field(default_factory=lambda: MappingProxyType({}))
    after: Mapping[str, Json] = field(default_factory=lambda: MappingProxyType({}))
    at_most: AtMost | None = None

    @classmethod
    def by(cls, who: Principal, act: Act, target: str, **rest: Any) -> AuditEntry:
        """Record an act of this person."""
        return cls(
            actor=who.subject, roles=tuple(sorted(who.roles)), act=act, target=target, **rest
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLink:
    """An entry in its place: numbered from 1 without gaps, chained to the one before."""

    seq: int
    at: int  # milliseconds since the epoch, by the ledger's clock
    actor: str
    roles: str  # JSON, as all texts below, exactly as they are stored and hashed
    act: str
    tenant: str | None
    run_id: str | None
    target: str
    reason: str
    before: str
    after: str
    previous: str
    hash: str = ""

    @classmethod
    def of(cls, entry: AuditEntry, *, seq: int, at: int, previous: str) -> AuditLink:
        """Put an entry behind the last one."""
        link = cls(
            seq=seq,
            at=at,
            actor=canonical(entry.actor)[1:-1],
            roles=canonical(list(entry.roles)),
            act=entry.act.value,
            tenant=entry.tenant,
            run_id=entry.run_id,
            target=canonical(entry.target)[1:-1],
            reason=canonical(entry.reason)[1:-1],
            before=canonical(dict(entry.before)),
            after=canonical(dict(entry.after)),
            previous=previous,
        )
        return cls(**{**link.columns(), "hash": link.expected_hash()})

    def columns(self) -> dict[str, Any]:
        """The entry's fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def expected_hash(self) -> str:
        """The hash of everything in the entry, the hash before it included."""
        text = canonical([value for name, value in self.columns().items() if name != "hash"])
        return hashlib.sha256(text.encode("ascii")).hexdigest()


def audit_faults(
    links: Iterable[AuditLink], head: tuple[int, str], anchor: tuple[int, str] | None = None
) -> list[str]:
    """Say what is wrong with an audit: nothing, where no entry was edited, lost, or put in.

    `head` is the number and hash of the last entry as the ledger remembers them; `anchor` those of
    one that was noted down elsewhere: whoever can rewrite the whole database cannot rewrite that.
    """
    faults: list[str] = []
    wanted, previous, seen_anchor = 1, GENESIS, anchor is None or anchor == (0, GENESIS)
    for link in links:
        if link.seq != wanted:
            faults.append(f"entries {wanted} to {link.seq - 1} are missing")
        elif link.previous != previous:
            faults.append(f"entry {link.seq} does not follow on the one before it")
        if link.hash != link.expected_hash():
            faults.append(f"entry {link.seq} was edited")
        if anchor is not None and link.seq == anchor[0]:
            seen_anchor = link.hash == anchor[1]
        wanted, previous = link.seq + 1, link.hash
    if head != (wanted - 1, previous):
        faults.append(f"it ends at entry {wanted - 1}, and {head[0]} were written")
    if not seen_anchor:
        assert anchor is not None
        faults.append(f"entry {anchor[0]} is not the one that was noted down")
    return faults
