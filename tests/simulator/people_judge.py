"""What must hold of people's acts: each consent counts once and covers exactly what is sent, each
matter is resolved once and as it was seen, each act leaves one audit entry.

It sees every ruling when it is committed, and reads the ledger beside the fleet. What a person says
about a tool that cannot be asked is held against the service's records, and counted to the person.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from handrail.agent.approvals import Approval, ApprovalStatus
from handrail.agent.effects import Effect, EffectStatus
from handrail.agent.people import Act
from handrail.agent.protocol import Locked, Ruling
from handrail.agent.resolution import seen_of
from handrail.agent.stage import InvokeTool, arguments_hash
from handrail.agent.status import TERMINAL, Reason, RunStatus
from handrail.agent.tools import FOREVER, contract_hash
from handrail.desk import Handoff
from tests.simulator.people import APPROVERS, REQUESTER
from tests.simulator.service import UNDO, Order

if TYPE_CHECKING:
    from tests.simulator.schedule import Schedule

Row = Mapping[str, Any]
_F = EffectStatus
_MAY_APPROVE: Final = {who.subject for who in (*APPROVERS, REQUESTER)}
#: What a resolution states about the write that is in doubt; None: nothing.
_STATES: Final[Mapping[str, bool]] = {
    "completed": True,
    "resumed": True,
    "compensated": True,
    "failed": False,
    "cancelled": False,
}


class PeopleJudge:
    """The part of a schedule's judge that watches people. `broken(promise, problem)` is raised."""

    def __init__(self, schedule: Schedule, broken: Any) -> None:
        self._schedule, self._broken = schedule, broken
        self._tokens: dict[str, tuple[Approval, str | None]] = {}
        self._used: set[str] = set()
        self._agreed: dict[str, list[str]] = {}  # approval -> who
        self._exact: set[tuple[str, str, object]] = set()  # tenant, order, amount: agreed to
        self._consumed: dict[str, str] = {}  # approval -> effect
        self._looked: dict[tuple[str, str], list[str]] = {}
        self._closed: set[str] = set()
        self.mistaken: set[Order] = set()  # of which a person has said what is not so
        self.mistaken_runs: set[str] = set()

    # ---- what people say -------------------------------------------------------------------------

    def issued(self, token_hash: str, seen: Approval, to: str | None) -> None:
        """A token was issued to somebody who has seen this."""
        self._tokens[token_hash] = seen, to

    def looked(self, who: str, matter: Handoff) -> None:
        """Somebody has looked at a matter."""
        self._looked.setdefault((who, matter.id), []).append(matter.seen)

    def agreed_to(self, tenant: str, arguments: Row) -> bool:
        """Whether as many as it takes have seen exactly this, and agreed."""
        return (tenant, arguments["order"], arguments["amount"]) in self._exact

    # ---- what is committed -----------------------------------------------------------------------

    def ruled(self, locked: Locked, ruling: Ruling, cancelled: set[str]) -> None:
        """A ruling is committed. `cancelled` are the runs that were to be cancelled before it."""
        run_id, status = locked.state.run_id, ruling.state.status
        before, after = locked.effect, ruling.effect
        if ruling.consent is not None:
            self._consent(locked, ruling, run_id in cancelled)
        if ruling.audit is not None:
            self._recorded(ruling)
            if ruling.audit.act is Act.ANSWER:
                self._answered(run_id, run_id in cancelled)
        if ruling.closing is not None:
            self._closing(locked, ruling)
        left = before is not None and after is not None and before.status is _F.HANDED_OFF
        if left and after is not None and after.status is not _F.HANDED_OFF:
            said = ruling.closing is not None and ruling.audit is not None
            if not said and ruling.evidence is None:
                raise self._broken("I9", f"{run_id} has left a person's hands, and nobody said so")
        now_is = after or before
        owned = now_is is not None and now_is.owner_run_id == run_id
        if status in TERMINAL and owned and now_is is not None:
            doubtful = now_is.status in (_F.DISPATCHED, _F.UNKNOWN)
            if doubtful and locked.state.status not in TERMINAL:
                raise self._broken("I7", f"{run_id} is {status}, and its write is {now_is.status}")
        self._waits_for_somebody(run_id, status)

    def dispatched(self, locked: Locked, effect: Effect) -> None:
        """A write that needs consent is about to be sent: one covers it exactly."""
        run_id, kind, now = locked.state.run_id, self._schedule.plan.kind, self._now
        used = self._row("handrail_approval", effect.approval_id)
        if used is None or used["status"] != "consumed" or used["effect_id"] != effect.id:
            raise self._broken("I6", f"{run_id} dispatches, and no consent to it is consumed")
        contract = self._schedule.ground.fleet.contracts_of(kind.name)[0]
        exact = (
            used["tool"] == kind.name
            and used["arguments_hash"] == arguments_hash(kind.name, dict(effect.arguments))
            and used["contract_hash"] == contract_hash(contract)
        )
        pending = locked.state.pending
        if used["run_id"] == run_id and isinstance(pending, InvokeTool):
            exact = exact and used["state_version"] == pending.state_version
        if not exact:
            raise self._broken("I6", f"{run_id} dispatches, and something else was agreed to")
        id_ = used["id"]
        if len(self._agreed.get(id_, ())) < kind.approvers:
            raise self._broken("I6", f"{run_id} dispatches, and too few have agreed")
        if id_ not in self._consumed and used["expires_at"] <= now:
            raise self._broken("I6", f"{run_id} dispatches on a consent that is too old")
        if self._consumed.setdefault(id_, effect.id) != effect.id:
            raise self._broken("I6", f"{run_id} dispatches on a consent that was used up")

    def _consent(self, locked: Locked, ruling: Ruling, cancelled: bool) -> None:
        consent, run_id = ruling.consent, locked.state.run_id
        assert consent is not None
        seen, to = self._tokens.get(consent.token_hash, (None, None))
        row = self._row("handrail_approval", consent.approval_id)
        if seen is None or row is None or seen.id != row["id"]:
            raise self._broken("I6", f"{run_id}: a consent by a token that was not issued for it")
        if consent.token_hash in self._used:
            raise self._broken("I6", f"{run_id}: a token counts twice")
        self._used.add(consent.token_hash)
        agreed = self._agreed.setdefault(seen.id, [])
        if consent.who in agreed:
            raise self._broken("I6", f"{run_id}: {consent.who} counts twice")
        agreed.append(consent.who)
        entitled = consent.who in _MAY_APPROVE and consent.who != REQUESTER.subject
        if not entitled or to not in (None, consent.who):
            raise self._broken("I6", f"{run_id}: {consent.who} may not agree to it")
        if json.loads(row["arguments"]) != dict(seen.arguments):
            raise self._broken("I6", f"{run_id}: {consent.who} has seen something else")
        if self._now >= row["expires_at"]:
            raise self._broken("I6", f"{run_id}: a consent came too late, and counts")
        if cancelled:
            raise self._broken("I7", f"{run_id}: a consent counts after the cancel")
        if ruling.approval_status is ApprovalStatus.APPROVED:
            if len(agreed) < self._schedule.plan.kind.approvers:
                raise self._broken("I6", f"{run_id}: too few have agreed")
            self._exact.add((seen.tenant, str(seen.arguments["order"]), seen.arguments["amount"]))

    def _answered(self, run_id: str, cancelled: bool) -> None:
        if cancelled:
            raise self._broken("I7", f"{run_id}: an answer counts after the cancel")
        late = "handrail_handoff WHERE resolution = 'answered' AND resolved_at >= expires_at"
        if not self._count("handrail_handoff WHERE resolution = 'answered'", run_id):
            raise self._broken("I9", f"{run_id}: an answer counts, and its question is open")
        if self._count(late, run_id):
            raise self._broken("I6", f"{run_id}: an answer came too late, and counts")

    def _recorded(self, ruling: Ruling) -> None:
        entry = ruling.audit
        assert entry is not None
        rows = self._schedule.ground.rows(
            "SELECT actor, act, target FROM handrail_audit ORDER BY seq DESC LIMIT 1"
        )
        last = rows and (rows[0]["actor"], rows[0]["act"], rows[0]["target"])
        if last != (entry.actor, entry.act.value, entry.target):
            raise self._broken("audit", f"{entry.actor}'s {entry.act} is committed without record")

    def _closing(self, locked: Locked, ruling: Ruling) -> None:
        closing, run_id = ruling.closing, locked.state.run_id
        assert closing is not None
        id_ = closing.handoff.id
        if id_ in self._closed:
            raise self._broken("I9", f"{run_id}: a handoff is resolved twice")
        self._closed.add(id_)
        if seen_of(locked) not in self._looked.get((closing.who, id_), ()):
            raise self._broken("I9", f"{run_id}: {closing.who} resolves what has moved since")
        row = self._row("handrail_handoff", id_)
        if row is None or row["status"] != "resolved" or row["resolved_by"] != closing.who:
            raise self._broken("I9", f"{run_id}: a resolution is committed, its handoff is open")
        self._word(locked, ruling)

    def _word(self, locked: Locked, ruling: Ruling) -> None:
        """Hold what a resolution states against the service's records."""
        closing, effect = ruling.closing, locked.effect
        assert closing is not None
        run = self._schedule.run_plan(locked.state.run_id)
        order: Order = (run.tenant, run.order)
        service, how = self._schedule.service, closing.resolution
        states, subject = _STATES.get(how), order
        mine = effect is not None and effect.owner_run_id in (None, run.run_id)
        in_doubt = effect is not None and effect.status in (_F.HANDED_OFF, _F.CONTRADICTED) and mine
        if how == "try-again" and ruling.effect is not None:
            states = False if ruling.effect.status is _F.ABSENT else None
        if locked.undoing is not None:
            subject = (run.tenant, UNDO + run.order)
            states = {"completed": False, "compensated": True}.get(how)
        elif not in_doubt and how != "completed" and how != "compensated":
            return
        asked = in_doubt and effect is not None and effect.terms.can_query and effect.attempts > 0
        by_hand = how == "compensated" and not (asked and locked.undoing is not None)
        if by_hand:
            service.by_hand.setdefault(order, self._now)
            subject, asked = order, False
        if states is None:
            return
        if (subject in service.records) is states:
            if not states and self._schedule.plan.stall_ms is None:
                self.mistaken.add(order)  # nobody vouches for what may still leave
            return
        if not asked:
            self._schedule.tell(f"{closing.who} is wrong about {subject}")
            self.mistaken.add(order)
            self.mistaken_runs.add(run.run_id)
            return
        if subject in service.lied:
            return
        if states or not self._came_since(subject, ruling):
            raise self._broken("I9", f"{run.run_id} is resolved as {how}, and {subject} is not so")
        self.mistaken.add(order)

    def _came_since(self, order: Order, ruling: Ruling) -> bool:
        """Whether a write shows since the service was asked, and nobody vouches that none does."""
        plan, record = self._schedule.plan, self._schedule.service.records[order]
        vouched = plan.stall_ms is not None and plan.kind.key_valid_for_ms < FOREVER
        said: Row = {} if ruling.evidence is None else ruling.evidence[1]
        asked_at = said.get("asked_at")
        return not vouched and isinstance(asked_at, int) and record.visible_at > asked_at

    def _waits_for_somebody(self, run_id: str, status: RunStatus) -> None:
        """Who waits for a person is seen by one."""
        asks = f"reason = '{Reason.CLARIFICATION_REQUIRED.value}'"
        if status is RunStatus.AWAITING_INPUT:
            found = self._count(f"handrail_handoff WHERE status = 'open' AND {asks}", run_id)
        elif status is RunStatus.HANDED_OFF:
            found = self._count(f"handrail_handoff WHERE status = 'open' AND NOT {asks}", run_id)
        elif status is RunStatus.AWAITING_APPROVAL:
            found = self._count("handrail_approval WHERE status = 'pending'", run_id)
        else:
            return
        if not found:
            raise self._broken("I2", f"{run_id} is {status}, and no person can see it")

    # ---- the end ---------------------------------------------------------------------------------

    def judge(self, runs: Mapping[str, Row], traces: Mapping[str, Sequence[Row]]) -> None:
        """Everybody rests."""
        rows = self._schedule.ground.rows
        for row in rows("SELECT run_id, reason FROM handrail_handoff WHERE status = 'open'"):
            status, reason = runs[row["run_id"]]["status"], row["reason"]
            asks = reason == Reason.CLARIFICATION_REQUIRED.value
            wanted = RunStatus.AWAITING_INPUT if asks else RunStatus.HANDED_OFF
            if status != wanted and reason != Reason.CONTRADICTION.value:
                raise self._broken("I2", f"{row['run_id']} is {status}, and its matter is open")
        for run_id, run in runs.items():
            self._waits_for_somebody(run_id, RunStatus(run["status"]))
        consumed = {
            r["id"] for r in rows("SELECT id FROM handrail_approval WHERE status='consumed'")
        }
        if consumed != self._consumed.keys():
            raise self._broken("I6", "a consent was used up by what was never dispatched")
        self._audit(traces)

    def _audit(self, traces: Mapping[str, Sequence[Row]]) -> None:
        """Each act is recorded once, and the chain holds."""
        rows = self._schedule.ground.rows
        report = self._schedule.ground.fleet.desk.verify_audit()
        if not report.intact:
            raise self._broken("audit", report.faults[0])
        noted = Counter(row["act"] for row in rows("SELECT act FROM handrail_audit"))
        asked = sum(
            json.loads(row["after"]).get("approval") == "requested"
            for row in rows("SELECT after FROM handrail_audit WHERE act = 'resolve'")
        )
        resolved = "handrail_handoff WHERE resolved_reason IS NOT NULL"
        answered = "handrail_handoff WHERE resolution = 'answered'"
        told = [event for events in traces.values() for event in events]
        for act, count in {
            "request-token": self._count("handrail_approval_token"),
            "approve": self._count("handrail_consent"),
            "reject": self._count("handrail_approval WHERE status = 'rejected'"),
            "resolve": self._count(resolved) + asked,
            "answer": self._count(answered),
            "comment": self._count("handrail_comment"),
        }.items():
            if noted[act] != count:
                raise self._broken("audit", f"{act}: {count} times done, {noted[act]} recorded")
        moved = sum(noted[act] for act in ("claim", "release", "assign", "snooze"))
        (versions,) = rows(
            "SELECT coalesce(sum(version), 0) AS moves, coalesce(sum((status = 'resolved')"
            " + coalesce(escalated_at > opened_at, 0)), 0) AS ours FROM handrail_handoff"
        )
        if versions["moves"] - versions["ours"] != moved:
            raise self._broken("audit", f"the queue was moved by people, {moved} times recorded")
        if noted["cancel"] > sum(event["type"] == "cancel.requested" for event in told):
            raise self._broken("audit", "a cancel is recorded that did not happen")

    # ---- inside ----------------------------------------------------------------------------------

    @property
    def _now(self) -> int:
        return self._schedule.ground.now_ms

    def _row(self, table: str, id_: str | None) -> dict[str, Any] | None:
        found = self._schedule.ground.connection.execute(
            f"SELECT * FROM {table} WHERE id = ?", (id_,)
        )
        names = [column[0] for column in found.description]
        row = found.fetchone()
        return None if row is None else dict(zip(names, row, strict=True))

    def _count(self, source: str, run_id: str | None = None) -> int:
        also = "" if run_id is None else " AND run_id = ?"
        sql = f"SELECT count(*) FROM {source}{also}"
        (count,) = self._schedule.ground.connection.execute(
            sql, () if run_id is None else (run_id,)
        ).fetchone()
        return int(count)
