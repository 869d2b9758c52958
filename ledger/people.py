"""What people are asked and what they do, as it is stored: requests for consent, tokens, handoffs,
comments, principals, and the audit.

What moves a run goes through `Ledger.rule`; here is the rest. Every change names what it expects,
and is written together with its audit entry. Locks are taken in one order: run, effect, handoff,
audit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from handrail.agent.approvals import Approval
from handrail.agent.people import (
    GENESIS,
    Act,
    AuditEntry,
    AuditLink,
    NotAllowed,
    Role,
    TooManyDecisions,
    same_person,
)
from handrail.agent.status import Reason
from handrail.agent.tools import Principal
from handrail.canonical import dumps, escaped, plain
from handrail.ledger.columns import APPROVAL, AUDIT, HANDOFF, PRINCIPAL
from handrail.ledger.database import Database
from handrail.ledger.rows import Row, approval_of
from handrail.ledger.session import PG_NOW, Session, again

_T = TypeVar("_T")
#: Texts of people and names that they chose, in a handoff's row.
_SPOKEN: Final = (
    "claimed_by",
    "assigned_to",
    "resolved_by",
    "resolved_reason",
    "resolved_evidence",
)
_LINK: Final = tuple(AuditLink.__slots__)
_PAGE: Final = 1_000


def lock_audit(tx: Session, *, postgres: bool) -> dict[str, Any]:
    """Wait until nobody else is at the audit's end; returns its number and hash."""
    tx.run(
        "INSERT INTO handrail_audit_head (id, seq, hash) VALUES (1, 0, :genesis)"
        " ON CONFLICT DO NOTHING",
        {"genesis": GENESIS},
    )
    lock = "FOR UPDATE" if postgres else ""
    (head,) = tx.run(f"SELECT seq, hash FROM handrail_audit_head WHERE id = 1 {lock}", {})
    return head


def append_audit(tx: Session, entry: AuditEntry, now: int, *, postgres: bool) -> AuditLink:
    """Append an act to the audit, in the transaction that it changed something in."""
    head = lock_audit(tx, postgres=postgres)
    if entry.at_most is not None:  # nobody adds another entry meanwhile
        most = entry.at_most
        if _acts_since(tx, entry.actor, most.acts, now - most.within_ms) >= most.number:
            raise TooManyDecisions(entry.actor, most.number)
    link = AuditLink.of(entry, seq=head["seq"] + 1, at=now, previous=head["hash"])
    columns = link.columns()
    names, marks = ", ".join(columns), ", ".join(f":{name}" for name in columns)
    tx.run(f"INSERT INTO handrail_audit ({names}) VALUES ({marks})", columns)
    tx.run(
        "UPDATE handrail_audit_head SET seq = :seq, hash = :hash WHERE id = 1",
        {"seq": link.seq, "hash": link.hash},
    )
    return link


def _acts_since(on: Session | Database, actor: str, acts: Sequence[Act], since: int) -> int:
    """Count a person's acts of some kinds."""
    named = {f"act_{number}": act.value for number, act in enumerate(acts)}
    among = ", ".join(f":{name}" for name in named)
    (row,) = on.run(
        "SELECT count(*) AS acts FROM handrail_audit"
        f" WHERE actor = :actor AND at >= :since AND act IN ({among})",
        {"actor": escaped(actor), "since": since, **named},
    )
    counted: int = row["acts"]
    return counted


def last_act(tx: Session) -> tuple[int, str] | None:
    """The number and hash of the last entry, as this transaction sees it; None before the first."""
    rows = tx.run("SELECT seq, hash FROM handrail_audit_head WHERE id = 1", {})
    return (rows[0]["seq"], rows[0]["hash"]) if rows else None


def was_written(tx: Session, act: tuple[int, str] | None) -> bool:
    """Whether an entry is there: how an act is found whose COMMIT was not answered."""
    if act is None:
        return False
    found = tx.run(
        "SELECT 1 AS found FROM handrail_audit WHERE seq = :seq AND hash = :hash",
        {"seq": act[0], "hash": act[1]},
    )
    return bool(found)


class People:
    """The part of the ledger that people work with."""

    def __init__(self, database: Database, *, new_id: Callable[[], str]) -> None:
        self.database = database
        self._new_id = new_id
        self._postgres = database.postgres

    # ---- requests for consent --------------------------------------------------------------------

    def approvals(
        self,
        *,
        status: str | None = "pending",
        run_id: str | None = None,
        tenants: Sequence[str] | None = None,
        workflow: str | None = None,
        tool: str | None = None,
        older_than_ms: int = 0,
        limit: int = 100,
    ) -> list[Approval]:
        """List requests for consent, oldest first."""
        where = _Where(status=status, run_id=run_id, workflow=workflow, tool=tool)
        where.of_tenants(tenants)
        where.older(self.database.now(), "requested_at", older_than_ms)
        rows = self.database.run(
            f"SELECT {APPROVAL} FROM handrail_approval WHERE {where}"
            " ORDER BY requested_at, id LIMIT :limit",
            {**where.params, "limit": limit},
        )
        return self._with_consents(rows)

    def approval(self, approval_id: str) -> Approval | None:
        """Read one request; None where there is none with this id."""
        rows = self.database.run(
            f"SELECT {APPROVAL} FROM handrail_approval WHERE id = :id", {"id": approval_id}
        )
        return self._with_consents(rows)[0] if rows else None

    def _with_consents(self, rows: Sequence[Row]) -> list[Approval]:
        """Add who has agreed, by one look for all of them."""
        if not rows:
            return []
        ids = {f"id_{number}": row["id"] for number, row in enumerate(rows)}
        among = ", ".join(f":{name}" for name in ids)
        agreed: dict[str, list[str]] = {row["id"]: [] for row in rows}
        for one in self.database.run(
            "SELECT approval_id, who FROM handrail_consent"
            f" WHERE approval_id IN ({among}) ORDER BY at, who",
            ids,
        ):
            agreed[one["approval_id"]].append(one["who"])
        return [approval_of(row, agreed[row["id"]]) for row in rows]

    def issue_token(
        self, approval_id: str, token_hash: str, *, to: str | None, entry: AuditEntry
    ) -> bool:
        """Record a token by its hash; False where nothing waits for consent any more."""

        def issue(tx: Session, now: int) -> bool:
            issued = tx.run(
                "INSERT INTO handrail_approval_token (hash, approval_id, issued_to, issued_at)"
                " SELECT :hash, id, :issued_to, :now FROM handrail_approval"
                " WHERE id = :id AND status = 'pending' RETURNING hash",
                {
                    "hash": token_hash,
                    "id": approval_id,
                    "issued_to": None if to is None else escaped(to),
                    "now": now,
                },
            )
            if issued:
                append_audit(tx, entry, now, postgres=self._postgres)
            return bool(issued)

        return self.transact(issue)

    # ---- handoffs --------------------------------------------------------------------------------

    def handoffs(
        self,
        *,
        status: str | None = "open",
        run_id: str | None = None,
        tenants: Sequence[str] | None = None,
        workflow: str | None = None,
        tool: str | None = None,
        reason: str | None = None,
        subject: str | None = None,
        assigned_to: str | None = None,
        mine: str | None = None,
        free_for: str | None = None,
        older_than_ms: int = 0,
        snoozed: bool = True,
        limit: int = 100,
    ) -> list[dict[str, Any]]:
        """List handoffs: the most urgent first, and of these the oldest. `mine` names a person:
        what it has claimed, or was given. `free_for` does too: what it could take up now, which is
        neither a question nor put aside, that nobody is at, and nobody else was given.
        """
        where = _Where(
            status=status,
            run_id=run_id,
            workflow=workflow,
            tool=tool,
            reason=reason,
            subject=subject,
            assigned_to=None if assigned_to is None else escaped(assigned_to),
        )
        where.of_tenants(tenants)
        now = self.database.now()
        where.older(now, "opened_at", older_than_ms)
        if mine is not None:
            claimed = "(claimed_by = :mine AND claimed_until > :now)"
            where.add(f"(assigned_to = :mine OR {claimed})", mine=escaped(mine), now=now)
        if free_for is not None:
            where.add("reason <> :question", question=Reason.CLARIFICATION_REQUIRED.value)
            where.add("(assigned_to IS NULL OR assigned_to = :me)", me=escaped(free_for))
            where.add("(claimed_by IS NULL OR claimed_until <= :now)")
        if not snoozed or free_for is not None:
            where.add("(snoozed_until IS NULL OR snoozed_until <= :now)", now=now)
        rows = self.database.run(
            f"SELECT {HANDOFF} FROM handrail_handoff WHERE {where}"
            " ORDER BY priority, opened_at, id LIMIT :limit",
            {**where.params, "limit": limit},
        )
        return [_handoff(row, now) for row in rows]

    def handoff_counts(
        self, *, tenants: Sequence[str] | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        """Count open handoffs by reason, workflow and tool, the most frequent first."""
        where = _Where(status="open")
        where.of_tenants(tenants)
        now = self.database.now()
        rows = self.database.run(
            "SELECT reason, workflow, tool, count(*) AS handoffs, min(priority) AS priority,"
            " min(opened_at) AS oldest, count(DISTINCT subject) AS subjects"
            f" FROM handrail_handoff WHERE {where}"
            " GROUP BY reason, workflow, tool ORDER BY count(*) DESC, reason LIMIT :limit",
            {**where.params, "limit": limit},
        )
        return [{**row, "oldest_ms": max(0, now - row.pop("oldest"))} for row in map(dict, rows)]

    def handoff(self, handoff_id: str) -> dict[str, Any] | None:
        """Read one handoff with its comments; None where there is none with this id."""
        rows = self.database.run(
            f"SELECT {HANDOFF} FROM handrail_handoff WHERE id = :id", {"id": handoff_id}
        )
        if not rows:
            return None
        comments = self.database.run(
            "SELECT at, who, text FROM handrail_comment WHERE handoff_id = :id ORDER BY at, id",
            {"id": handoff_id},
        )
        noted = [
            {"at": c["at"], "who": plain(c["who"]), "text": plain(c["text"])} for c in comments
        ]
        return {**_handoff(rows[0], self.database.now()), "comments": noted}

    def move_handoff(
        self,
        handoff_id: str,
        decide: Callable[[Mapping[str, Any], int], tuple[dict[str, Any], AuditEntry] | None],
    ) -> bool:
        """Change who is at an open handoff, or when it is looked at; False where nothing was.

        `decide(handoff, now)` sees it under lock, and gives the columns that change.
        """

        def move(tx: Session, now: int) -> bool:
            lock = "FOR UPDATE" if self._postgres else ""
            rows = tx.run(
                f"SELECT {HANDOFF} FROM handrail_handoff WHERE id = :id AND status = 'open' {lock}",
                {"id": handoff_id},
            )
            decided = decide(_handoff(rows[0], now), now) if rows else None
            if decided is None:
                return False
            changes, entry = decided
            stored = {
                name: escaped(value) if name in _SPOKEN and value is not None else value
                for name, value in changes.items()
            }
            names = "".join(f", {name} = :{name}" for name in stored)
            tx.run(
                f"UPDATE handrail_handoff SET version = version + 1{names} WHERE id = :id",
                {**stored, "id": handoff_id},
            )
            append_audit(tx, entry, now, postgres=self._postgres)
            return True

        return self.transact(move)

    def comment(self, handoff_id: str, *, who: str, text: str, entry: AuditEntry) -> None:
        """Note something about a handoff that is there, open or not."""

        def note(tx: Session, now: int) -> None:
            tx.run(
                "INSERT INTO handrail_comment (id, handoff_id, at, who, text)"
                " VALUES (:id, :handoff_id, :now, :who, :text)",
                {
                    "id": self._new_id(),
                    "handoff_id": handoff_id,
                    "now": now,
                    "who": escaped(who),
                    "text": escaped(text),
                },
            )
            append_audit(tx, entry, now, postgres=self._postgres)

        self.transact(note)

    def waiting(self, *, most: int) -> dict[str, Any]:
        """Count what waits for people, to `most` of each: open handoffs by priority, questions,
        requests for consent, writes in doubt that only a person settles; and the oldest of them.
        """
        now = self.database.now()
        counts = self.database.run(
            "SELECT priority, count(*) AS handoffs, min(opened_at) AS oldest FROM"
            " (SELECT priority, opened_at FROM handrail_handoff WHERE status = 'open'"
            " AND reason <> :question ORDER BY priority, opened_at LIMIT :most) AS h"
            " GROUP BY priority ORDER BY priority",
            {"question": Reason.CLARIFICATION_REQUIRED.value, "most": most},
        )
        (asked,) = self.database.run(
            "SELECT count(*) AS approvals, min(requested_at) AS oldest FROM"
            " (SELECT requested_at FROM handrail_approval WHERE status = 'pending'"
            " ORDER BY requested_at LIMIT :most) AS a",
            {"most": most},
        )
        (doubts,) = self.database.run(
            "SELECT count(*) AS effects FROM (SELECT DISTINCT h.effect_id FROM handrail_handoff h"
            " JOIN handrail_effect e ON e.id = h.effect_id WHERE h.status = 'open'"
            " AND e.status = 'handed_off' LIMIT :most) AS d",
            {"most": most},
        )
        since = [row["oldest"] for row in counts]
        return {
            "handoffs_by_priority": {str(row["priority"]): row["handoffs"] for row in counts},
            "oldest_handoff_ms": max(0, now - min(since)) if since else 0,
            "pending_approvals": asked["approvals"],
            "oldest_approval_ms": 0 if asked["oldest"] is None else max(0, now - asked["oldest"]),
            "handed_off_effects": doubts["effects"],
        }

    # ---- principals ------------------------------------------------------------------------------

    def admit(self, who: Principal, entry: AuditEntry, *, first: bool = False) -> bool:
        """Give a person these roles, in place of any before; `first`: only while there is nobody.

        False where there was somebody.
        """

        def write(tx: Session, now: int) -> bool:
            lock_audit(tx, postgres=self._postgres)  # of two who change roles, one waits
            there = _principals(tx)
            if first and there:
                return False
            for other in there:
                if other.subject != who.subject and same_person(other.subject, who.subject):
                    problem = f"{other.subject!r} is admitted, and reads the same"
                    raise NotAllowed(entry.actor, entry.act.value, problem)
            tx.run(
                "INSERT INTO handrail_principal (subject, roles, tenants, admitted_at)"
                " VALUES (:subject, :roles, :tenants, :now) ON CONFLICT (subject) DO UPDATE SET"
                " roles = excluded.roles, tenants = excluded.tenants",
                {
                    "subject": escaped(who.subject),
                    "roles": dumps([*sorted(who.roles)]),
                    "tenants": None if who.tenants is None else dumps([*sorted(who.tenants)]),
                    "now": now,
                },
            )
            _must_keep_an_admin(tx, there, entry)
            append_audit(tx, entry, now, postgres=self._postgres)
            return True

        return self.transact(write)

    def dismiss(self, subject: str, entry: AuditEntry) -> bool:
        """Take all roles from a person; False where there were none."""

        def write(tx: Session, now: int) -> bool:
            lock_audit(tx, postgres=self._postgres)
            there = _principals(tx)
            gone = tx.run(
                "DELETE FROM handrail_principal WHERE subject = :subject RETURNING subject",
                {"subject": escaped(subject)},
            )
            if gone:
                _must_keep_an_admin(tx, there, entry)
                append_audit(tx, entry, now, postgres=self._postgres)
            return bool(gone)

        return self.transact(write)

    def principal(self, subject: str) -> Principal | None:
        """Read a person's roles; None where nobody has admitted this person."""
        rows = self.database.run(
            f"SELECT {PRINCIPAL} FROM handrail_principal WHERE subject = :subject",
            {"subject": escaped(subject)},
        )
        return _principal(rows[0]) if rows else None

    def principals(self) -> list[Principal]:
        """List the people who have roles, by name."""
        return _principals(self.database)

    # ---- the audit -------------------------------------------------------------------------------

    def audit(
        self,
        *,
        actor: str | None = None,
        act: str | None = None,
        run_id: str | None = None,
        tenants: Sequence[str] | None = None,
        since_ms: int | None = None,
        limit: int = 100,
    ) -> list[dict[str, Any]]:
        """List acts, the latest first."""
        where = _Where(
            actor=None if actor is None else escaped(actor),
            act=act,
            run_id=run_id,
        )
        where.of_tenants(tenants)
        if since_ms is not None:
            where.add("at >= :since", since=self.database.now() - since_ms)
        rows = self.database.run(
            f"SELECT {AUDIT} FROM handrail_audit WHERE {where} ORDER BY seq DESC LIMIT :limit",
            {**where.params, "limit": limit},
        )
        return [_act(row) for row in rows]

    def acts_since(self, actor: str, acts: Sequence[Act], *, within_ms: int) -> int:
        """Count a person's acts of some kinds in the last time."""
        return _acts_since(self.database, actor, acts, self.database.now() - within_ms)

    def audit_links(self, *, up_to: int | None = None) -> Iterator[AuditLink]:
        """Go over the whole audit in its order, as it is stored; or up to an entry."""
        after = 0
        last = 2**62 if up_to is None else up_to
        names = ", ".join(_LINK)
        while True:
            rows = self.database.run(
                f"SELECT {names} FROM handrail_audit WHERE seq > :after AND seq <= :last"
                " ORDER BY seq LIMIT :page",
                {"after": after, "last": last, "page": _PAGE},
            )
            for row in rows:
                yield AuditLink(**row)
            if len(rows) < _PAGE:
                return
            after = rows[-1]["seq"]

    def audit_end(self) -> int:
        """The number of the last entry that is there."""
        rows = self.database.run("SELECT max(seq) AS last FROM handrail_audit", {})
        return rows[0]["last"] or 0

    def audit_head(self) -> tuple[int, str]:
        """The number and hash of the last entry, as the ledger remembers them."""
        rows = self.database.run("SELECT seq, hash FROM handrail_audit_head WHERE id = 1", {})
        return (rows[0]["seq"], rows[0]["hash"]) if rows else (0, GENESIS)

    # ---- inside ----------------------------------------------------------------------------------

    def transact(self, act: Callable[[Session, int], _T]) -> _T:
        """Make a change and its audit entry one transaction, once: where only the answer to its
        COMMIT was lost, it is not made again.
        """
        made: list[tuple[tuple[int, str] | None, _T]] = []

        def once() -> _T:
            with self.database.transaction() as tx:
                if made and was_written(tx, made[0][0]):
                    return made[0][1]
                now = self.database.now()
                if self._postgres:
                    (row,) = tx.run(f"SELECT {PG_NOW} AS now", {})
                    now = row["now"]
                before, done = last_act(tx), act(tx, now)
                after = last_act(tx)
                made[:] = [(None if after == before else after, done)]
                return done

        result = again(once)
        return result


class _Where:
    """Conditions of a query: columns that equal what is asked for, where anything is."""

    def __init__(self, **columns: Any) -> None:
        self._parts: list[str] = ["1 = 1"]
        self.params: dict[str, Any] = {}
        for name, value in columns.items():
            if value is not None:
                self.add(f"{name} = :{name}", **{name: value})

    def add(self, condition: str, **params: Any) -> None:
        """Add a condition."""
        self._parts.append(condition)
        self.params |= params

    def of_tenants(self, tenants: Sequence[str] | None) -> None:
        """Only what belongs to these tenants; None: to any."""
        if tenants is None:
            return
        named = {f"tenant_{number}": tenant for number, tenant in enumerate(sorted(tenants))}
        among = ", ".join(f":{name}" for name in named) or "NULL"
        self.add(f"tenant IN ({among})", **named)

    def older(self, now: int, column: str, age_ms: int) -> None:
        """Only what has been there for so long."""
        if age_ms:
            self.add(f"{column} <= :before", before=now - age_ms)

    def __str__(self) -> str:
        return " AND ".join(self._parts)


def _handoff(row: Row, now: int) -> dict[str, Any]:
    read = {
        name: plain(value) if name in _SPOKEN and value is not None else value
        for name, value in row.items()
    }
    return {**read, "package": json.loads(row["package"]), "age_ms": max(0, now - row["opened_at"])}


def _principals(session: Session) -> list[Principal]:
    rows = session.run(f"SELECT {PRINCIPAL} FROM handrail_principal ORDER BY subject", {})
    return [_principal(row) for row in rows]


def _must_keep_an_admin(tx: Session, before: Sequence[Principal], entry: AuditEntry) -> None:
    """Refuse what takes the last one who could admit anybody in any tenant from the others."""

    def admin_among(there: Sequence[Principal]) -> bool:
        return any(Role.ADMIN in one.roles and one.tenants is None for one in there)

    left = _principals(tx)
    if left and admin_among(before) and not admin_among(left):
        problem = "nobody would be left who admits anybody: admit another admin first"
        raise NotAllowed(entry.actor, entry.act.value, problem)


def _principal(row: Row) -> Principal:
    tenants = row["tenants"]
    return Principal(
        plain(row["subject"]),
        roles=frozenset(json.loads(row["roles"])),
        tenants=None if tenants is None else frozenset(json.loads(tenants)),
    )


def _act(row: Row) -> dict[str, Any]:
    spoken = {name: plain(row[name]) for name in ("actor", "target", "reason")}
    parsed = {name: json.loads(row[name]) for name in ("roles", "before", "after")}
    return {**row, **spoken, **parsed}
