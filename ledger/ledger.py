"""The ledger: every transaction of Handrail is opened here, in a method for each thing the domain
says.

A step's path is a claim and a commit, one statement each. Everything else that moves a run goes
through `rule`: lock the run row, then its effect, let a pure function decide, write its ruling,
commit. A commit whose answer was lost is looked up by its writer before anything is decided.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final, TypeVar

from handrail.agent.approvals import Approval, IssuedToken
from handrail.agent.budget import Budget, CallLimits, Phase
from handrail.agent.effects import (
    CompensationRecord,
    Doubt,
    Effect,
    EffectStatus,
    Rewind,
    Terms,
    may_become,
    upstream_key,
)
from handrail.agent.handoffs import must_be_complete
from handrail.agent.machine import RunState
from handrail.agent.notices import News, Notice
from handrail.agent.pauses import DEFAULT_MAX_OPEN_UNKNOWNS, Pause, Scope
from handrail.agent.people import AuditEntry
from handrail.agent.protocol import (
    KEPT_REPORT,
    PAUSED_MS,
    Consent,
    Gone,
    KeptReport,
    Locked,
    OpenHandoff,
    Ruling,
    priority_of,
)
from handrail.agent.stage import Answered, InvokeTool, Park, ParkKind
from handrail.agent.status import CLAIMABLE, TERMINAL, WITH_PERSON, Reason, RunEvent, RunStatus
from handrail.agent.tools import Principal
from handrail.agent.trace import RUN_MOVED, TraceEvent
from handrail.canonical import Json, canonical, dumps, escaped, plain
from handrail.errors import InvariantBroken
from handrail.ledger import lines, statements
from handrail.ledger.accept import (
    REPUBLISH_MS,
    DueStep,
    Inserted,
    NewRow,
    accept,
    snapshot,
)
from handrail.ledger.catalog import MISSED_MS, Announcement, Catalog, array
from handrail.ledger.columns import APPROVAL, EFFECT, HANDOFF
from handrail.ledger.database import Database
from handrail.ledger.errors import (
    DatabaseUnavailable,
    EffectForgotten,
    LedgerLocked,
    UnknownRun,
)
from handrail.ledger.people import People, append_audit, last_act, was_written
from handrail.ledger.rewinds import Rewinds, lost_in
from handrail.ledger.rows import (
    Row,
    approval_of,
    effect_columns,
    effect_of,
    events_text,
    handoff_row,
    left_columns,
    state_columns,
    state_of,
)
from handrail.ledger.session import PG_NOW, ConnectionLost, Session, again

LEASE_MS: Final = 30_000
#: While so many handoffs of one subject are open, nothing new of it is dispatched.
MAX_OPEN_HANDOFFS: Final = 100
#: A handoff that nobody has resolved for so long is escalated.
ESCALATE_MS: Final = 4 * 3_600_000
#: A sweep that takes a batch and dies delays it by this long.
POSTPONE_MS: Final = 15_000
#: For how long a version of a workflow may be away before people are asked about its runs.
VERSION_PATIENCE_MS: Final = 900_000
#: Figures count no further: an operator needs no more than "very many".
MOST_COUNTED: Final = 10_000

_T = TypeVar("_T")
_WIDEST: Final = {scope: rank for rank, scope in enumerate(Scope)}


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to run one step: what the ledger said when it was granted.

    `state` is the run as it was last traced, with the claim's charges taken off; `status` is where
    the claim has moved it, which the next write traces. `refusal` names the budget that refused the
    charge: the step then commits that stop and starts nothing.
    """

    run_id: str
    claim_id: str
    epoch: int
    phase: Phase
    state: RunState
    status: RunStatus
    refusal: Reason | None
    now: int
    deadline_at: int | None
    attempts: int
    trace_seq: int
    effect_id: str | None
    traceparent: str | None

    @property
    def remaining_ms(self) -> int:
        """Working time that was left when the claim was granted."""
        return 0 if self.deadline_at is None else self.deadline_at - self.now

    def holds(self, row: Row) -> bool:
        """Whether the run's row is still this claim's to write, and no cancel is wished."""
        mine: bool = row["claim_id"] == self.claim_id and row["epoch"] == self.epoch
        return mine and row["lease_until"] is not None and row["cancel_requested_at"] is None


@dataclass(frozen=True, slots=True)
class StepEnd:
    """How a claimed step ends: what is to be written, and what the next claim has to pay for."""

    claim: Claim
    ruling: Ruling
    phase: Phase
    output_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Commit:
    """A step's end as its statements take it. `due`: the run goes on at once."""

    claim: Claim
    ruling: Ruling
    due: bool
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """A write that is to be recorded before it is sent, by the holder of a claim alone.

    `compensation` is what was found out about undoing it, and is recorded with it.
    """

    claim: Claim
    command: InvokeTool
    terms: Terms
    compensation: CompensationRecord | None = None


@dataclass(frozen=True, slots=True)
class UndoPlan:
    """A compensation that is to be recorded before it is sent, while its run undoes an effect."""

    undoes: str
    command: InvokeTool
    terms: Terms

    def fits(self, row: Row) -> bool:
        """Whether the run has yet to plan what undoes this effect."""
        unplanned: bool = row["effect_id"] == self.undoes and row["undoing_effect_id"] is None
        return unplanned and row["status"] == RunStatus.RECONCILING


@dataclass(frozen=True, slots=True)
class Woken:
    """A run that the sweep has taken: a due step to publish again (`due`), or something to decide.

    `tool` is that of the effect in doubt, where the run is reconciling; `gone` says that no worker
    has the run's version of its workflow.
    """

    run_id: str
    status: RunStatus
    due: DueStep | None
    tool: str | None = None
    gone: Gone | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run to insert; see `handrail.Fleet.enqueue` for what the fields mean."""

    run_id: str
    tenant: str
    workflow: str
    workflow_version: str
    goal: str
    principal: Principal
    input: Json
    budget: Budget
    limits: CallLimits
    state: RunState
    phase: Phase
    events: tuple[TraceEvent, ...]
    dedupe_key: str | None = None
    traceparent: str | None = None


class Ledger:
    """The ledger in one database. `clock` (SQLite only) replaces the machine's clock, in
    milliseconds.

    While `max_open_handoffs` of one subject are open, nothing of it may be dispatched; while
    `max_open_unknowns` effects of a tool are unknown, nothing new of it may be dispatched; 0
    sets no bound. `schema` (PostgreSQL only) is where its tables are. A version of a workflow that
    no worker has had for `version_patience_ms` is gone.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Callable[[], int] | None = None,
        lease_ms: int = LEASE_MS,
        max_open_unknowns: int = DEFAULT_MAX_OPEN_UNKNOWNS,
        max_open_handoffs: int = MAX_OPEN_HANDOFFS,
        escalate_ms: int = ESCALATE_MS,
        new_id: Callable[[], str] | None = None,
        tell: Callable[[Notice], None] | None = None,
        schema: str = "",
        version_patience_ms: int = VERSION_PATIENCE_MS,
    ) -> None:
        self.database = Database(url, clock=clock, schema=schema)
        self.version_patience_ms = version_patience_ms
        self.lease_ms = lease_ms
        self.max_open_unknowns = max_open_unknowns
        self.escalate_ms = escalate_ms
        self.max_open_handoffs = max_open_handoffs
        self._tell = tell
        self._new_id = new_id or (lambda: secrets.token_hex(16))
        self._postgres = self.database.postgres

    def close(self) -> None:
        """Close this process's connections."""
        self.database.close()

    @property
    def people(self) -> People:
        """What people are asked and what they do."""
        return People(self.database, new_id=self._new_id)

    @property
    def rewinds(self) -> Rewinds:
        """The times that this ledger was set back."""
        return Rewinds(self.database, self.people, self.rule)

    @property
    def catalog(self) -> Catalog:
        """Which versions of workflows the fleet has."""
        return Catalog(self.database)

    def announce(self, announced: Sequence[Announcement]) -> None:
        """Record versions of workflows that somebody has; see `Catalog.announce`."""
        self.catalog.announce(announced)

    def seen(self, keys: Collection[str], *, every_ms: int) -> set[str]:
        """Say that a live worker has these versions (`name@version`); see `Catalog.seen`."""
        return self.catalog.seen(keys, every_ms=every_ms)

    def now(self) -> int:
        """The ledger's time, in milliseconds since the epoch."""
        return self.database.now()

    # ---- accepting -------------------------------------------------------------------------------

    def insert_run(self, new: NewRun, session: Session | None = None) -> Inserted:
        """Insert a run, or find the one that has its id or dedupe key; `RunExists` where they
        differ.

        With `session` it takes part in the caller's own transaction.
        """
        row = row_of(new)
        if session is not None:
            return self._accept(session, row)
        # Natural keys make it repeatable: a lost answer is read back by the run's own id.
        return again(lambda: self._accepted(row))

    def _accepted(self, row: NewRow) -> Inserted:
        if self._postgres:  # one statement, in autocommit
            return self._accept(self.database, row)
        with self.database.transaction() as tx:
            return self._accept(tx, row)

    def _accept(self, tx: Session, row: NewRow) -> Inserted:
        now = None if self._postgres else self.database.now()
        writer = self._new_id()
        return accept(tx, row, postgres=self._postgres, now=now, writer=writer)

    # ---- a step's path ---------------------------------------------------------------------------

    def claim(
        self, run_id: str, epoch: int, *, holder: str, known: Collection[str]
    ) -> Claim | None:
        """Claim a due step; None for a late or duplicate message, or a workflow that is not known
        here.

        `known` holds `name@version` of the workflows of this worker.
        """
        rows = self._claim_once(self._claim_params(run_id, epoch, holder, self._array(known)))
        return self._claim_of(rows[0]) if rows else None

    def claim_each(
        self, due: Sequence[tuple[str, int]], *, holder: str, known: Collection[str]
    ) -> list[Claim | BaseException | None]:
        """Claim several steps in one transaction, by run id and epoch; each as `claim` does it.

        Where somebody holds one of them locked each is claimed for itself; an exception stands for
        one that cannot be. Raises `DatabaseUnavailable` where none can.
        """
        workflows = self._array(known)
        params = [self._claim_params(run_id, at, holder, workflows) for run_id, at in due]
        answers: Iterator[list[dict[str, Any]]]
        try:
            answers = iter(self._together([(statements.claim(self._postgres), p) for p in params]))
        except ConnectionLost:
            answers = map(self._claimed, params)
        except LedgerLocked as locked:
            answers = self._one_by_one(self._claim_once, params, [p["id"] for p in params], locked)
        done: list[Claim | BaseException | None] = []
        for _ in params:
            try:
                rows = next(answers)
                done.append(self._claim_of(rows[0]) if rows else None)
            except Exception as error:  # also a row that this release cannot read
                done.append(error)
        return done

    def _claim_once(self, params: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            return self.database.run(statements.claim(self._postgres), params)
        except ConnectionLost:
            return self._claimed(params)

    def _claim_params(self, run_id: str, epoch: int, holder: str, known: str) -> dict[str, Any]:
        return self._timed(
            {
                "id": run_id,
                "epoch": epoch,
                "claim_id": self._new_id(),
                "holder": holder,
                "lease_ms": self.lease_ms,
                "known": known,
            }
        )

    def _claimed(self, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Read a run whose claim was not answered; its claim id tells ours from another's."""
        rows = again(lambda: self._read(params["id"]))
        return [row for row in rows if row["claim_id"] == params["claim_id"]]

    def _together(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> list[list[dict[str, Any]]]:
        # All that lock several runs lock them in one order, or they could wait for each other.
        order = sorted(range(len(calls)), key=lambda number: calls[number][1]["id"])
        answers = self.database.run_together([calls[number] for number in order])
        return [rows for _, rows in sorted(zip(order, answers, strict=True), key=itemgetter(0))]

    def _one_by_one(
        self,
        ask: Callable[[_T], list[dict[str, Any]]],
        asked: Sequence[_T],
        run_ids: Sequence[str],
        locked: LedgerLocked,
    ) -> Iterator[list[dict[str, Any]]]:
        """Ask for each run by itself, after all together have waited in vain.

        Raises `locked` for a run that somebody still holds: nobody waits for that a second time.
        """
        free = self._not_locked(run_ids)

        def one(what: _T, run_id: str) -> list[dict[str, Any]]:
            if run_id not in free:
                raise locked
            return ask(what)

        return map(one, asked, run_ids)

    def _not_locked(self, run_ids: Sequence[str]) -> set[str]:
        """Which of these runs nobody holds at this moment."""
        if not self._postgres:
            return set()  # SQLite has one lock, for all of them
        rows = self.database.run(
            "SELECT id FROM handrail_run WHERE id = ANY(:ids) FOR NO KEY UPDATE SKIP LOCKED",
            {"ids": self._array(run_ids)},
        )
        return {row["id"] for row in rows}

    def _claim_of(self, row: Row) -> Claim:
        return Claim(
            run_id=row["id"],
            claim_id=row["claim_id"],
            epoch=row["epoch"],
            phase=Phase(row["phase"]),
            state=state_of(row, status="traced_status"),
            status=RunStatus(row["status"]),
            refusal=Reason(row["refusal"]) if row["refusal"] else None,
            now=row["now"],
            deadline_at=row["deadline_at"],
            attempts=row["attempts"],
            trace_seq=row["trace_seq"],
            effect_id=row["effect_id"],
            traceparent=row["traceparent"],
        )

    def commit_each(self, ends: Sequence[StepEnd]) -> list[DueStep | bool | BaseException]:
        """End claimed steps in one transaction: write each ruling, release the lease, and say what
        is due.

        That is the next step, True where the run rests or has ended, False where nothing was
        written: the claim was fenced off, or a cancel was wished meanwhile. Where they cannot be
        written together each is written for itself; an exception stands for one that cannot be.
        Raises `DatabaseUnavailable` where none can.
        """
        commits = [self._commit_of(end) for end in ends]
        together = [commit for commit in commits if commit is not None]
        rows: Iterator[list[dict[str, Any]]]
        try:
            rows = iter(self._commit_together(together))
        except LedgerLocked as locked:
            run_ids = [commit.claim.run_id for commit in together]
            rows = self._one_by_one(self._commit_once, together, run_ids, locked)
        except DatabaseUnavailable:
            raise
        except ConnectionLost:
            rows = map(self._commit_again, together)
        except Exception:  # one of them cannot be written: which, is found out below
            rows = map(self._commit_once, together)
        done: list[DueStep | bool | BaseException] = []
        for end, commit in zip(ends, commits, strict=True):
            try:
                if commit is None:
                    done.append(self._commit_by_rule(end))
                else:
                    done.append(self._committed(commit, next(rows)))
            except Exception as error:
                done.append(error)
        return done

    def _commit_of(self, end: StepEnd) -> _Commit | None:
        """Prepare the commit of a step; None where it has to be decided under the run's lock."""
        claim, ruling, state = end.claim, end.ruling, end.ruling.state
        ends = state.status in TERMINAL and claim.status is not RunStatus.EXECUTING
        simple = ends or (state.status in CLAIMABLE and not ruling.due_in_ms)
        if not simple or ruling.effect is not None or ruling.charges_tool is not None:
            return None
        if moves := _untraced(claim.state.status, claim.status, claim.state.step):
            ruling = replace(ruling, events=(*moves, *ruling.events))
        params = self._commit_params(claim, ruling, end.phase, end.output_bytes)
        return _Commit(claim, ruling, state.status in CLAIMABLE, params)

    def _committed(self, commit: _Commit, rows: list[dict[str, Any]]) -> DueStep | bool:
        claim, state = commit.claim, commit.ruling.state
        if not rows:
            return False
        if not commit.due:
            lines.ended(state, claim.status, claim.epoch, claim.traceparent)
            if self._tell is not None:
                self._tell(_notice(News.RUN_STOPPED, state))
            return True
        deadline_at = claim.deadline_at
        return DueStep(
            claim.run_id,
            state.step,
            claim.epoch,
            deadline_at,
            None if deadline_at is None else deadline_at - rows[0]["now"],
            {
                "steps": state.left.steps,
                "model_calls": state.left.model_calls,
                "tool_calls": state.left.tool_calls_available,
            },
            claim.traceparent,
        )

    def _commit_once(self, commit: _Commit) -> list[dict[str, Any]]:
        if self._postgres:
            return self.database.run(_commit_sql(commit), commit.params)
        with self.database.transaction() as tx:
            return self._commit_in(tx, commit)

    def _commit_again(self, commit: _Commit) -> list[dict[str, Any]]:
        """Commit after the connection broke: the answer may be all that was lost."""
        if self._ended(commit.claim):
            return [{"now": self.now()}]
        return self._commit_once(commit)

    def _commit_together(self, commits: Sequence[_Commit]) -> list[list[dict[str, Any]]]:
        if len(commits) == 1:  # a trip for several costs it more
            return [self._commit_once(commits[0])]
        if self._postgres:
            return self._together([(_commit_sql(commit), commit.params) for commit in commits])
        with self.database.transaction() as tx:
            return [self._commit_in(tx, commit) for commit in commits]

    def _commit_in(self, tx: Session, commit: _Commit) -> list[dict[str, Any]]:
        """SQLite: a commit's statements, in the open transaction."""
        params, ruling = self._timed(commit.params), commit.ruling
        rows = tx.run(statements.commit_run(False, due=commit.due), params)
        if rows:
            run_id, writer = params["id"], params["claim_id"]
            if ruling.events:
                tx.run(statements.INSERT_TRACE, params | {"run_id": run_id, "writer": writer})
            self._facts(tx, run_id, ruling, ruling.state.state_version)
        return rows

    def _commit_params(
        self, claim: Claim, ruling: Ruling, phase: Phase, output_bytes: int
    ) -> dict[str, Any]:
        state = ruling.state
        back = state.left.tool_calls_available - claim.state.left.tool_calls
        params: dict[str, Any] = {
            **state_columns(state),
            "id": claim.run_id,
            "epoch": claim.epoch,
            "claim_id": claim.claim_id,
            "phase": phase.value,
            "tool_calls_back": max(0, min(back, claim.state.left.tool_calls_reserved)),
            "output_bytes": min(output_bytes, claim.state.left.output_bytes),
            "seq": claim.trace_seq,
            "count": len(ruling.events),
            "trace_seq": claim.trace_seq + len(ruling.events),
            "events": events_text(ruling.events),
        }
        if ruling.observation is not None:
            params |= {
                "source": escaped(ruling.observation.source),
                "text": escaped(ruling.observation.text),
                "digest": ruling.observation.digest,
            }
        for number, (name, value) in enumerate(ruling.outputs.items()):
            params |= {f"name_{number}": name, f"value_{number}": dumps(value)}
        return params

    def _commit_by_rule(self, end: StepEnd) -> DueStep | bool:
        claim = end.claim

        def decide(locked: Locked) -> Ruling | None:
            mine = locked.claim_id == claim.claim_id and locked.epoch == claim.epoch
            if not mine or locked.lease_until is None or locked.cancel_requested:
                return None
            return end.ruling

        done = self.rule(
            claim.run_id, decide, phase=lambda _: end.phase, output_bytes=end.output_bytes
        )
        if done.ruling is None:
            return False
        return done.due or True

    def observed(self, run_id: str, digest: str) -> bool:
        """Whether an observation is in the run's state already, however old."""
        rows = again(
            lambda: self.database.run(
                "SELECT 1 AS found FROM handrail_observation"
                " WHERE run_id = :run_id AND digest = :digest",
                {"run_id": run_id, "digest": digest},
            )
        )
        return bool(rows)

    def charge_more(
        self, claim: Claim, *, model_calls: int = 0, tool_calls: int = 0, cost_microusd: int = 0
    ) -> bool:
        """Charge what one more call under a claim costs, before the call: a retry of a model call
        or of a read, a verification that has a price.

        False where nothing was charged: the claim was fenced off, a cancel is wished, or it is not
        left.
        """
        rows = self.database.run(
            "UPDATE handrail_run SET model_calls_left = model_calls_left - :model_calls,"
            " tool_calls_left = tool_calls_left - :tool_calls,"
            " cost_microusd_left = cost_microusd_left - :cost_microusd"
            " WHERE id = :run_id AND claim_id = :claim_id AND epoch = :epoch"
            " AND lease_until IS NOT NULL AND cancel_requested_at IS NULL"
            " AND model_calls_left >= :model_calls AND tool_calls_left >= :tool_calls"
            " AND cost_microusd_left >= :cost_microusd RETURNING id",
            {
                "run_id": claim.run_id,
                "claim_id": claim.claim_id,
                "epoch": claim.epoch,
                "model_calls": model_calls,
                "tool_calls": tool_calls,
                "cost_microusd": cost_microusd,
            },
        )
        return bool(rows)

    def charge_tool(self, claim: Claim, tool: str) -> bool:
        """Charge a call against a tool's own limit, before the call; False where none is left.

        Only tools with such a limit need it: their count is no part of the claim.
        """
        rows = self.database.run(
            "UPDATE handrail_tool_allowance SET calls_left = calls_left - 1"
            " WHERE run_id = :run_id AND tool = :tool AND calls_left > 0 AND EXISTS ("
            "  SELECT 1 FROM handrail_run WHERE id = :run_id AND claim_id = :claim_id"
            "  AND epoch = :epoch AND lease_until IS NOT NULL)"
            " RETURNING calls_left",
            {
                "run_id": claim.run_id,
                "tool": tool,
                "claim_id": claim.claim_id,
                "epoch": claim.epoch,
            },
        )
        return bool(rows)

    def renew(self, held: Sequence[tuple[str, str, int]]) -> dict[str, bool | None]:
        """Renew the leases of all steps of a process in one statement.

        `held` has (run id, claim id, no later than this instant). Returns the claims still held,
        each with whether a cancel is wished; None: somebody is at its row, it was not renewed this
        time. A claim that is missing is lost.
        """
        if not held:
            return {}
        params: dict[str, Any] = {"lease_ms": self.lease_ms}
        if self._postgres:
            ids, claims, untils = ([str(item[i]) for item in held] for i in range(3))
            params["ids"], params["claims"] = self._array(ids), self._array(claims)
            params["untils"] = self._array(untils)
            sql = statements.RENEW_POSTGRES
        else:
            params["held"] = json.dumps(list(held))
            sql = statements.RENEW_SQLITE
        rows = self.database.run(sql, self._timed(params))
        return {
            row["claim_id"]: row["cancel_requested_at"] is not None if row["renewed"] else None
            for row in rows
        }

    def give_back(
        self, claims: Sequence[str], *, unused: Sequence[str], holder: str
    ) -> list[DueStep]:
        """Give the leases of claims back in one statement; returns the steps that are due again.

        A run that somebody holds at that moment is left to its lease.
        """
        if not claims:
            return []
        params = {
            "claims": self._array(claims),
            "unused": self._array(unused),
            "holder": holder,
        }
        rows = self.database.run(statements.give_back(self._postgres), self._timed(params))
        return [_due_of(row) for row in rows]

    # ---- decisions under lock --------------------------------------------------------------------

    def rule(
        self,
        run_id: str,
        decide: Callable[[Locked], Ruling | None],
        *,
        phase: Callable[[RunState], Phase] | None = None,
        output_bytes: int = 0,
        plan: Plan | UndoPlan | None = None,
        effect_id: str | None = None,
        known_digest: str | None = None,
        dispatches: str | None = None,
        once: str | None = None,
        token_hash: str | None = None,
        handoff_id: str | None = None,
    ) -> Ruled:
        """Lock a run and its effect, let a pure function decide, and write what it rules.

        Locks the run row first, then the effect that is being undone, then the run's latest effect,
        as every transaction on them does. `plan` inserts
        the effect of a command's intent, or finds it, before the decision; `effect_id` locks one
        that is perhaps no longer the run's latest. `dispatches` names the tool that is to be sent
        something: the decision then knows of the pauses in force. `once` is the id under which its
        evidence counts one time only: with it there already, nothing is decided (`repeated`).
        `token_hash` is the token by which a person consents, `handoff_id` the matter that is
        decided: they are read under the same lock.
        Raises `UnknownRun`, `EffectForgotten`, and `DatabaseUnavailable` where the connection broke
        several times in a row.
        """
        writer = once or self._new_id()
        made: list[Ruled] = []

        def transact() -> Ruled:
            with self.database.transaction() as tx:
                locked, row = self._lock(tx, run_id, plan, effect_id, known_digest, handoff_id)
                if token_hash is not None:
                    locked = self._with_token(tx, locked, token_hash)
                if dispatches is not None:
                    locked = self._with_pauses(tx, row, locked, dispatches)
                act = made[0].act if made else None
                if (made or once) and (self._wrote(tx, run_id, writer) or was_written(tx, act)):
                    if made and made[0].ruling is not None:
                        return made[0]  # only the answer to our COMMIT was lost
                    return Ruled(locked, None, None, repeated=True)
                ruling = decide(locked)
                done = Ruled(locked, ruling, None)
                if ruling is not None:
                    due, news = self._write(tx, row, locked, ruling, phase, output_bytes, writer)
                    act = None if ruling.audit is None else last_act(tx)
                    done = Ruled(locked, ruling, due, news=news, act=act)
                made[:] = [done]
                return done

        ruled = again(transact)
        if ruled.ruling is not None:
            lines.ruled(ruled.locked, ruled.ruling, ruled.news)
        if self._tell is not None:
            for notice in ruled.news:
                self._tell(notice)
        return ruled

    def look(self, run_id: str, handoff_id: str) -> Locked:
        """Read a run as a decision about one of its handoffs would see it, and hold nothing.

        Raises `UnknownRun`.
        """

        def read() -> Locked:
            with self.database.transaction() as tx:
                return self._lock(tx, run_id, None, None, None, handoff_id, hold=False)[0]

        return again(read)

    def _wrote(self, tx: Session, run_id: str, writer: str) -> bool:
        """Whether a writer's ruling is there: asked under the lock of its run, for which a commit
        that is still under way is waited for.
        """
        found = tx.run(
            "SELECT 1 AS found FROM handrail_trace WHERE run_id = :run_id AND writer = :writer"
            " UNION ALL SELECT 1 FROM handrail_evidence WHERE id = :writer",
            {"run_id": run_id, "writer": writer},
        )
        return bool(found)

    def _ended(self, claim: Claim) -> bool:
        """Whether a claim's commit is in the trace: how one whose answer was lost is found."""
        rows = again(
            lambda: self.database.run(
                "SELECT 1 AS found FROM handrail_trace"
                " WHERE run_id = :run_id AND seq = :seq AND writer = :writer",
                {"run_id": claim.run_id, "seq": claim.trace_seq, "writer": claim.claim_id},
            )
        )
        return bool(rows)

    def _lock(
        self,
        tx: Session,
        run_id: str,
        plan: Plan | UndoPlan | None,
        effect_id: str | None,
        known_digest: str | None,
        handoff_id: str | None = None,
        *,
        hold: bool = True,
    ) -> tuple[Locked, dict[str, Any]]:
        reading = statements.read_run(self._postgres, lock=hold)
        rows = tx.run(reading, self._timed({"id": run_id}))
        if not rows:
            raise UnknownRun(run_id)
        row = rows[0]
        match plan:
            case Plan() if plan.claim.holds(row):
                row["effect_id"], row["undoing_effect_id"] = self._plan(tx, row, plan), None
            case UndoPlan() if plan.fits(row):
                row["effect_id"], row["undoing_effect_id"] = self._plan(tx, row, plan), plan.undoes
        handoff, input_expires_at = self._lock_matter(tx, row, handoff_id, hold=hold)
        if handoff is not None and handoff.effect_id not in (
            None,
            row["effect_id"],
            row["undoing_effect_id"],
        ):
            effect_id = handoff.effect_id
        current = effect_id in (None, row["effect_id"])
        undone = row["undoing_effect_id"] if current else None
        undoing, _ = self._lock_effect(tx, run_id, undone, hold=hold)
        effect, others = self._lock_effect(tx, run_id, effect_id or row["effect_id"], hold=hold)
        approval = None
        if row["status"] in ("awaiting_approval", "executing", "handed_off"):
            approval = self._open_approval(tx, run_id)
        known = known_digest is not None and bool(
            tx.run(
                "SELECT 1 AS found FROM handrail_observation"
                " WHERE run_id = :run_id AND digest = :digest",
                {"run_id": run_id, "digest": known_digest},
            )
        )
        locked = Locked(
            state=state_of(row, status="status"),
            now=row["now"],
            epoch=row["epoch"],
            claim_id=row["claim_id"],
            lease_until=row["lease_until"],
            due_at=row["due_at"],
            deadline_at=row["deadline_at"],
            remaining_ms=row["remaining_ms"],
            expires_at=row["expires_at"],
            attempts=row["attempts"],
            cancel_requested=row["cancel_requested_at"] is not None,
            traceparent=row["traceparent"],
            effect=effect,
            current=current,
            undoing=undoing,
            other_holders=others,
            approval=approval,
            consumed=self._consumed(tx, row, effect),
            input_expires_at=input_expires_at,
            handoff=handoff,
            known=known,
            kept=self._kept_report(tx, row, effect),
            rewind=None if row["rewind"] is None else lost_in(tx.run(statements.LOST, {})),
        )
        return locked, row

    def _kept_report(self, tx: Session, row: Row, effect: Effect | None) -> KeptReport | None:
        """What a provider has said about a doubt before it was one, while its sender had the word,
        or about one that is a person's by now; there a receipt that came too late counts as well.
        """
        if effect is None:
            return None
        with_person = row["status"] in (RunStatus.RECONCILING, RunStatus.HANDED_OFF)
        match effect.status:
            case EffectStatus.DISPATCHED:
                pass
            case EffectStatus.UNKNOWN if with_person:
                pass
            case EffectStatus.HANDED_OFF if with_person:
                return self._late_receipt(tx, effect)
            case _:
                return None
        found = tx.run(
            "SELECT id, detail FROM handrail_evidence WHERE effect_id = :effect_id"
            " AND kind = :kind ORDER BY at, id LIMIT 1",
            {"effect_id": effect.id, "kind": KEPT_REPORT},
        )
        if not found:
            return None
        return KeptReport(json.loads(found[0]["detail"])["proves"], f"report:{found[0]['id']}")

    def _consumed(self, tx: Session, row: Row, effect: Effect | None) -> Approval | None:
        """The consent under which an effect that is to be sent again was dispatched."""
        if effect is None or effect.approval_id is None or row["status"] != RunStatus.EXECUTING:
            return None
        found = tx.run(
            f"SELECT {APPROVAL} FROM handrail_approval WHERE id = :id",
            {"id": effect.approval_id},
        )
        return approval_of(found[0]) if found else None

    def _late_receipt(self, tx: Session, effect: Effect) -> KeptReport | None:
        found = tx.run(
            "SELECT id, kind, detail FROM handrail_evidence WHERE effect_id = :effect_id"
            " AND kind IN ('outcome', :kind) ORDER BY at, id",
            {"effect_id": effect.id, "kind": KEPT_REPORT},
        )
        for row in found:
            detail = json.loads(row["detail"])
            for name, of in (("receipt", "evidence"), ("proves", "report")):
                if name in detail:
                    return KeptReport(detail[name], f"{of}:{row['id']}")
        return None

    def _open_approval(self, tx: Session, run_id: str) -> Approval | None:
        found = tx.run(
            f"SELECT {APPROVAL} FROM handrail_approval WHERE run_id = :run_id"
            " AND status IN ('pending', 'approved') ORDER BY requested_at DESC, id LIMIT 1",
            {"run_id": run_id},
        )
        if not found:
            return None
        agreed = tx.run(
            "SELECT who FROM handrail_consent WHERE approval_id = :id ORDER BY at, who",
            {"id": found[0]["id"]},
        )
        return approval_of(found[0], [row["who"] for row in agreed])

    def _lock_matter(
        self, tx: Session, row: Row, handoff_id: str | None, *, hold: bool = True
    ) -> tuple[OpenHandoff | None, int | None]:
        """The open handoff that a person decides: the one that is named, or the question of a run
        that has asked one, and when that is too old.

        Whoever resolves it holds its run's lock, so that the row needs one only against those who
        claim, assign or snooze it.
        """
        if handoff_id is not None:
            lock = statements.dialect(self._postgres).lock if hold else ""
            found = tx.run(
                f"SELECT {HANDOFF} FROM handrail_handoff WHERE id = :id AND run_id = :run_id"
                f" AND status = 'open' {lock}",
                {"id": handoff_id, "run_id": row["id"]},
            )
            return (handoff_row(found[0]) if found else None), None
        if row["status"] != RunStatus.AWAITING_INPUT:
            return None, None
        found = tx.run(
            f"SELECT {HANDOFF} FROM handrail_handoff"
            " WHERE run_id = :run_id AND status = 'open' AND reason = :question",
            {"run_id": row["id"], "question": Reason.CLARIFICATION_REQUIRED.value},
        )
        return (handoff_row(found[0]), found[0]["expires_at"]) if found else (None, None)

    def _with_token(self, tx: Session, locked: Locked, token_hash: str) -> Locked:
        """Add the token by which a person consents, and has to be issued for that."""
        found = tx.run(
            "SELECT hash, approval_id, issued_to, used_at FROM handrail_approval_token"
            " WHERE hash = :hash",
            {"hash": token_hash},
        )
        if not found:
            return locked
        to = found[0]["issued_to"]
        issued = IssuedToken(**{**found[0], "issued_to": None if to is None else plain(to)})
        return replace(locked, issued=issued)

    def _with_pauses(self, tx: Session, row: Row, locked: Locked, tool: str) -> Locked:
        """Add what keeps a tool from being sent anything. A pause that was committed before this
        reads it stops the dispatch, since the run's lock is held until that is committed.
        """
        who = locked.state.principal
        asked = {
            "tenant": row["tenant"],
            "workflow": row["workflow"],
            "tool": tool,
            "most": self.max_open_unknowns,
            # Who has no name shares no limit with others.
            "subject": None if who == Principal() else who.subject,
            "most_open": self.max_open_handoffs,
        }
        (found,) = tx.run(statements.PAUSED, asked)
        most = self.max_open_unknowns
        crowded = most > 0 and found["doubtful"] >= most
        flooded = bool(self.max_open_handoffs) and found["open"] >= self.max_open_handoffs
        # Read once more: since the run was locked, it may have been set back.
        rewind = None if found["rewind"] is None else lost_in(tx.run(statements.LOST, {}))
        return replace(
            locked, paused=found["paused"], crowded=crowded, flooded=flooded, rewind=rewind
        )

    def _lock_effect(
        self, tx: Session, run_id: str, effect_id: str | None, *, hold: bool = True
    ) -> tuple[Effect | None, int]:
        if effect_id is None:
            return None, 0
        lock = statements.dialect(self._postgres).lock if hold else ""
        found = tx.run(
            f"SELECT {EFFECT} FROM handrail_effect WHERE id = :id {lock}", {"id": effect_id}
        )
        holders = tx.run(
            "SELECT count(*) AS others FROM handrail_effect_holder AS h"
            " JOIN handrail_run AS r ON r.id = h.run_id"
            " WHERE h.effect_id = :id AND h.run_id <> :run_id AND r.status <> 'cancelled'",
            {"id": effect_id, "run_id": run_id},
        )
        if not found:
            raise EffectForgotten(effect_id)
        return effect_of(found[0]), holders[0]["others"]

    def _plan(self, tx: Session, row: Row, plan: Plan | UndoPlan) -> str:
        command, terms = plan.command, plan.terms
        assert command.intent_key is not None
        effect_id = upstream_key(row["tenant"], command.intent_key)
        recorded = plan.compensation if isinstance(plan, Plan) else None
        compensation = None if recorded is None else dumps(recorded.to_json())
        asked = {
            "id": effect_id,
            "tenant": row["tenant"],
            "intent_key": escaped(command.intent_key),
            "tool": command.tool,
            "contract_version": command.contract_version,
            "arguments": dumps(dict(command.arguments)),
            "arguments_hash": command.arguments_hash,
            "terms": dumps(terms.to_json()),
            "now": row["now"],
            "compensation": compensation,
            "compensates": plan.undoes if isinstance(plan, UndoPlan) else None,
            "run_id": row["id"],
        }
        inserted = tx.run(
            "INSERT INTO handrail_effect (id, tenant, intent_key, tool, contract_version,"
            " arguments, arguments_hash, terms, created_at, status, doubt, queries_left,"
            " compensation, compensates, planned_by)"
            " VALUES (:id, :tenant, :intent_key, :tool, :contract_version, :arguments,"
            " :arguments_hash, :terms, :now, 'planned', 'none', 0, :compensation, :compensates,"
            " :run_id) ON CONFLICT DO NOTHING RETURNING id",
            asked,
        )
        if not inserted and isinstance(plan, Plan):
            # What nobody was ever asked to do may be planned anew, by the run that has planned it.
            tx.run(
                "UPDATE handrail_effect SET tool = :tool, contract_version = :contract_version,"
                " arguments = :arguments, arguments_hash = :arguments_hash, terms = :terms,"
                " compensation = :compensation WHERE id = :id AND planned_by = :run_id"
                " AND status = 'planned' AND token = 0 AND arguments_hash <> :arguments_hash",
                asked,
            )
        if not inserted and compensation is not None:
            # What was there before is read anew as long as nothing of the intent can be there yet.
            tx.run(
                "UPDATE handrail_effect SET compensation = :compensation WHERE id = :id"
                " AND status IN ('planned', 'absent') AND (compensation IS NULL OR doubt = 'none')",
                {"id": effect_id, "compensation": compensation},
            )
        return effect_id

    def _write(
        self,
        tx: Session,
        row: dict[str, Any],
        locked: Locked,
        ruling: Ruling,
        phase: Callable[[RunState], Phase] | None,
        output_bytes: int,
        writer: str,
    ) -> tuple[DueStep | None, tuple[Notice, ...]]:
        state, now, run_id = ruling.state, locked.now, locked.state.run_id
        traced, status = RunStatus(row["traced_status"]), RunStatus(row["status"])
        events = (*_untraced(traced, status, locked.state.step), *ruling.events)
        seq = row["trace_seq"]
        changes: dict[str, Any] = {
            **state_columns(state),
            **left_columns(state.left),
            "traced_status": state.status.value if events else row["traced_status"],
            "trace_seq": seq + len(events),
            "effect_id": row["effect_id"],
            "undoing_effect_id": row["undoing_effect_id"],
            "output_bytes_left": max(0, row["output_bytes_left"] - output_bytes),
        }
        if state.told is not None:
            changes["phase"] = Phase.RESUME.value
        elif phase is not None:
            changes["phase"] = phase(state).value
        if ruling.attempts is not None:
            changes["attempts"] = ruling.attempts
        if ruling.wish:
            changes["cancel_requested_at"] = now
        changes |= self._when(row, locked, ruling)
        names = ", ".join(f"{name} = :{name}" for name in changes)
        updated = tx.run(
            f"UPDATE handrail_run SET {names} WHERE id = :id AND epoch = :was_epoch"
            " AND status = :was_status RETURNING id",
            {**changes, "id": run_id, "was_epoch": locked.epoch, "was_status": row["status"]},
        )
        assert updated, "the row is locked"
        if ruling.charges_tool is not None and ruling.charges_tool in locked.state.left.per_tool:
            tx.run(
                "UPDATE handrail_tool_allowance SET calls_left = calls_left - 1"
                " WHERE run_id = :run_id AND tool = :tool",
                {"run_id": run_id, "tool": ruling.charges_tool},
            )
        if events:
            self._trace(tx, run_id, seq, events, writer, now)
        self._facts(tx, run_id, ruling, state.state_version)
        self._write_effect(tx, locked, ruling, writer)
        news = self._write_people(tx, row, locked, ruling)
        if state.status in TERMINAL and status not in TERMINAL:
            news.append(_notice(News.RUN_STOPPED, state))
        due = None
        if ruling.publish:
            due = _due_of({**row, **changes, "id": run_id, "now": now, "epoch": changes["epoch"]})
        return due, tuple(news)

    def _when(self, row: Row, locked: Locked, ruling: Ruling) -> dict[str, Any]:
        """Who holds the run, when it is due, and when the sweep must look at it."""
        state, now = ruling.state, locked.now
        epoch = locked.epoch + (ruling.lease == "take")
        when: dict[str, Any] = {"epoch": epoch, "lease_until": row["lease_until"]}
        if ruling.deadline_in_ms is not None:
            when |= {"deadline_at": now + ruling.deadline_in_ms, "remaining_ms": None}
        if ruling.lease == "keep" and row["lease_until"] is not None:
            until = row["lease_until"]
            if ruling.lease_ms is not None:
                until = max(until, now + ruling.lease_ms)
            return {**when, "lease_until": until, "wake_at": until}
        when["lease_until"] = None
        if ruling.lease == "keep" and ruling.wake_in_ms is None:  # nothing moved: as it was
            return {**when, "due_at": row["due_at"], "wake_at": row["wake_at"]}
        if state.status in CLAIMABLE:
            due_at = now + ruling.due_in_ms
            if ruling.kept_ms is not None:
                when |= {"deadline_at": None, "remaining_ms": ruling.kept_ms}
            return {
                **when,
                "due_at": due_at,
                # What is due later has no message of its own: the sweep publishes it in time.
                "wake_at": due_at if ruling.due_in_ms else due_at + REPUBLISH_MS,
                "publishes": 0,
            }
        when |= {"due_at": None, "wake_at": None}
        if state.status in (RunStatus.AWAITING_APPROVAL, RunStatus.AWAITING_INPUT):
            # Waiting for a person uses no working time; the hard expiry does not pause.
            waits = row["expires_at"] - now
            if ruling.park is not None:
                waits = ruling.park.expires_ms
            elif ruling.answer_within_ms is not None:
                waits = ruling.answer_within_ms
            wake_at = min(now + waits, row["expires_at"])
            return {**when, **self._clock_stopped(locked), "wake_at": wake_at}
        if state.status is RunStatus.HANDED_OFF:
            # The sweep looks once more, to say that it waits for long.
            wake_at = now + self.escalate_ms
            return {**when, **self._clock_stopped(locked), "wake_at": wake_at}
        if state.status not in TERMINAL and state.status not in WITH_PERSON:
            pause = ruling.wake_in_ms if ruling.wake_in_ms is not None else self.lease_ms
            when["wake_at"] = now + pause
        return when

    def _clock_stopped(self, locked: Locked) -> dict[str, Any]:
        return {"deadline_at": None, "remaining_ms": max(0, locked.left_ms)}

    def _write_effect(self, tx: Session, locked: Locked, ruling: Ruling, writer: str) -> None:
        effect = locked.effect
        for before, after in ((locked.undoing, ruling.undoing), (effect, ruling.effect)):
            if after is not None and after != before:
                assert before is not None
                self._move_effect(tx, before, after)
        if ruling.joins and effect is not None:
            tx.run(
                "INSERT INTO handrail_effect_holder (effect_id, run_id)"
                " VALUES (:effect_id, :run_id) ON CONFLICT DO NOTHING",
                {"effect_id": effect.id, "run_id": locked.state.run_id},
            )
        if ruling.evidence is not None and effect is not None:
            kind, detail = ruling.evidence
            tx.run(
                "INSERT INTO handrail_evidence (id, effect_id, token, kind, at, detail)"
                " VALUES (:id, :effect_id, :token, :kind, :now, :detail)",
                {
                    "id": writer,
                    "effect_id": effect.id,
                    "token": effect.token,
                    "kind": kind,
                    "now": locked.now,
                    "detail": canonical(detail),
                },
            )

    def _move_effect(self, tx: Session, before: Effect, after: Effect) -> None:
        if not may_become(before.status, after.status):
            raise InvariantBroken(
                f"effect {before.id}: no move from {before.status} to {after.status}"
            )
        columns = effect_columns(after)
        names = ", ".join(f"{name} = :{name}" for name in columns)
        updated = tx.run(
            f"UPDATE handrail_effect SET {names} WHERE id = :id AND token = :was_token"
            " AND status = :was_status RETURNING id",
            {
                **columns,
                "id": before.id,
                "was_token": before.token,
                "was_status": before.status.value,
            },
        )
        assert updated, "the effect is locked"

    def _write_people(self, tx: Session, row: Row, locked: Locked, ruling: Ruling) -> list[Notice]:
        now, news = locked.now, list[Notice]()
        if ruling.consent is not None:
            self._write_consent(tx, ruling.consent, now)
        if ruling.consumes_approval and locked.approval is not None:
            assert locked.effect is not None
            consumed = tx.run(
                "UPDATE handrail_approval SET status = 'consumed', effect_id = :effect_id"
                " WHERE id = :id AND status = 'approved' RETURNING id",
                {"id": locked.approval.id, "effect_id": locked.effect.id},
            )
            assert consumed, "the run is locked, and approvals move under its lock"
        elif ruling.approval_status is not None and locked.approval is not None:
            tx.run(
                "UPDATE handrail_approval SET status = :status, decided_at = :now,"
                " decided_by = :decided_by WHERE id = :id AND status IN ('pending', 'approved')",
                {
                    "id": locked.approval.id,
                    "status": ruling.approval_status.value,
                    "now": now,
                    "decided_by": escaped(ruling.decided_by) if ruling.decided_by else None,
                },
            )
        elif ruling.state.status in TERMINAL and locked.approval is not None:
            tx.run(  # what was agreed to is not to be done any more
                "UPDATE handrail_approval SET status = 'withdrawn', decided_at = :now"
                " WHERE run_id = :run_id AND status IN ('pending', 'approved')",
                {"run_id": locked.state.run_id, "now": now},
            )
        if ruling.park is not None and ruling.park.kind is ParkKind.APPROVAL:
            asked = self._request_approval(tx, ruling.state, ruling.park, now)
            news.append(_notice(News.APPROVAL_NEEDED, ruling.state, asked))
        self._close_handoffs(tx, row, ruling, now)
        if ruling.handoff is not None:
            news += self._open_handoff(tx, locked, ruling, ruling.handoff)
        if ruling.escalates:
            news += self._escalate(tx, ruling.state, now)
        if ruling.audit is not None:
            append_audit(tx, ruling.audit, now, postgres=self._postgres)
        return news

    def _write_consent(self, tx: Session, consent: Consent, now: int) -> None:
        spent = tx.run(
            "UPDATE handrail_approval_token SET used_at = :now, used_by = :who"
            " WHERE hash = :hash AND used_at IS NULL RETURNING hash",
            {"hash": consent.token_hash, "who": escaped(consent.who), "now": now},
        )
        assert spent, "the run is locked, and tokens are spent under its lock"
        tx.run(
            "INSERT INTO handrail_consent (approval_id, who, at, token_hash)"
            " VALUES (:approval_id, :who, :now, :hash)",
            {
                "approval_id": consent.approval_id,
                "who": escaped(consent.who),
                "hash": consent.token_hash,
                "now": now,
            },
        )

    def _open_handoff(
        self, tx: Session, locked: Locked, ruling: Ruling, package: Mapping[str, Json]
    ) -> list[Notice]:
        state, now, about = ruling.state, locked.now, locked.undoing or locked.effect
        must_be_complete(state.run_id, package)
        reason = Reason(str(package["reason"]))
        asks = reason is Reason.CLARIFICATION_REQUIRED
        # Its run may have ended, and wakes nobody any more: it does not wait to be escalated.
        grave = reason is Reason.CONTRADICTION
        within_ms = ruling.answer_within_ms
        opened = tx.run(
            "INSERT INTO handrail_handoff (id, run_id, tenant, workflow, tool, subject, effect_id,"
            " reason, priority, package, status, opened_at, expires_at, escalates_at, escalated_at)"
            " VALUES (:id, :run_id, :tenant, :workflow, :tool, :subject, :effect_id, :reason,"
            " :priority, :package, 'open', :now, :expires_at, :escalates_at, :escalated_at)"
            " ON CONFLICT DO NOTHING RETURNING id",
            {
                "id": self._new_id(),
                "run_id": state.run_id,
                "tenant": state.tenant,
                "workflow": state.workflow,
                "tool": None if asks or about is None else about.tool,
                "subject": state.principal.subject,
                "effect_id": None if asks or about is None else about.id,
                "reason": reason.value,
                "priority": priority_of(reason),
                "package": canonical(package),
                "now": now,
                "expires_at": now + within_ms if asks and within_ms is not None else None,
                "escalates_at": None if asks or grave else now + self.escalate_ms,
                "escalated_at": now if grave else None,
            },
        )
        news = [News.QUESTION_ASKED if asks else News.HANDOFF_OPENED]
        if grave:
            news.append(News.HANDOFF_ESCALATED)
        return [_notice(one, state, row["id"], reason) for row in opened for one in news]

    def _close_handoffs(self, tx: Session, row: Row, ruling: Ruling, now: int) -> None:
        """Close what a person has decided, and what a run that rests no more has left open."""
        done = ruling.closing
        if done is not None:
            closed = tx.run(
                "UPDATE handrail_handoff SET status = 'resolved', version = version + 1,"
                " resolution = :resolution, resolved_at = :now, resolved_by = :who,"
                " resolved_reason = :reason, resolved_evidence = :evidence"
                " WHERE id = :id AND status = 'open' RETURNING id",
                {
                    "id": done.handoff.id,
                    "resolution": done.resolution,
                    "who": escaped(done.who),
                    "reason": escaped(done.reason),
                    "evidence": escaped(done.evidence),
                    "now": now,
                },
            )
            assert closed, "the handoff is locked"
        before, after = RunStatus(row["status"]), ruling.state.status
        if before is after or before not in (RunStatus.HANDED_OFF, RunStatus.AWAITING_INPUT):
            return
        tx.run(  # what a person was asked to agree to is not to be done any more
            "UPDATE handrail_approval SET status = 'withdrawn', decided_at = :now"
            " WHERE run_id = :run_id AND status = 'pending'",
            {"run_id": row["id"], "now": now},
        )
        told, reason = ruling.state.told, ruling.state.reason
        ended = "answered" if isinstance(told, Answered) else "superseded"
        if before is RunStatus.AWAITING_INPUT and reason is not None:
            ended = reason.value
        tx.run(
            "UPDATE handrail_handoff SET status = 'resolved', version = version + 1,"
            " resolution = :resolution, resolved_at = :now, resolved_by = :who"
            " WHERE run_id = :run_id AND status = 'open' AND reason <> 'contradiction'",
            {
                "run_id": row["id"],
                "resolution": ended,
                "now": now,
                "who": escaped(told.author) if isinstance(told, Answered) else None,
            },
        )

    def _escalate(self, tx: Session, state: RunState, now: int) -> list[Notice]:
        """Mark what has waited too long; what is put aside by a person, once it is not any more."""
        escalated = tx.run(
            "UPDATE handrail_handoff SET escalated_at = :now, version = version + 1,"
            " priority = CASE WHEN priority > 1 THEN priority - 1 ELSE 1 END"
            " WHERE run_id = :run_id AND status = 'open' AND escalated_at IS NULL"
            " AND escalates_at <= :now AND (snoozed_until IS NULL OR snoozed_until <= :now)"
            " RETURNING id, reason",
            {"run_id": state.run_id, "now": now},
        )
        tx.run(
            "UPDATE handrail_run SET wake_at = (SELECT min(CASE"
            " WHEN snoozed_until > escalates_at THEN snoozed_until ELSE escalates_at END)"
            " FROM handrail_handoff WHERE run_id = :run_id AND status = 'open'"
            " AND escalated_at IS NULL AND escalates_at IS NOT NULL) WHERE id = :run_id",
            {"run_id": state.run_id},
        )
        return [
            _notice(News.HANDOFF_ESCALATED, state, row["id"], Reason(row["reason"]))
            for row in escalated
        ]

    def _request_approval(self, tx: Session, state: RunState, park: Park, now: int) -> str:
        action, terms = park.action, park.terms
        assert action is not None and terms is not None
        approval_id = self._new_id()
        tx.run(  # what was asked for before this is not to be done any more
            "UPDATE handrail_approval SET status = 'withdrawn', decided_at = :now"
            " WHERE run_id = :run_id AND status IN ('pending', 'approved')",
            {"run_id": state.run_id, "now": now},
        )
        tx.run(
            "INSERT INTO handrail_approval (id, run_id, tenant, workflow, step, state_version,"
            " tool, contract_version, contract_hash, intent_key, arguments, arguments_hash, amount,"
            " subject, approvers, requester_approves, status, requested_at, expires_at)"
            " VALUES (:id, :run_id, :tenant, :workflow, :step, :state_version, :tool,"
            " :contract_version, :contract_hash, :intent_key, :arguments, :arguments_hash, :amount,"
            " :subject, :approvers, :requester_approves, 'pending', :now, :expires_at)",
            {
                "id": approval_id,
                "run_id": state.run_id,
                "tenant": state.tenant,
                "workflow": state.workflow,
                "contract_hash": terms.contract_hash,
                "amount": terms.amount,
                "approvers": terms.approvers,
                "requester_approves": int(terms.requester_approves),
                "step": state.step,
                "state_version": action.state_version,
                "tool": action.tool,
                "contract_version": action.contract_version,
                "intent_key": None if action.intent_key is None else escaped(action.intent_key),
                "arguments": dumps(dict(action.arguments)),
                "arguments_hash": action.arguments_hash,
                "subject": state.principal.subject,
                "now": now,
                "expires_at": now + park.expires_ms,
            },
        )
        return approval_id

    # ---- the sweep -------------------------------------------------------------------------------

    def due_for_sweep(self, *, limit: int, doubts: int | None = None) -> list[Woken]:
        """Take a batch of runs that the sweep must look at; one indexed statement where none is
        due.

        Up to `limit` runs that go on by themselves, and up to `doubts` reconciling ones (as many,
        unless it is given).
        """
        params = self._timed(
            {
                "limit": limit,
                "doubts": limit if doubts is None else doubts,
                "postpone_ms": POSTPONE_MS,
            }
        )
        # A batch whose answer was lost comes again after its pause, repeated or not.
        rows = again(lambda: self.database.run(statements.due_for_sweep(self._postgres), params))
        waiting = [row["id"] for row in rows if _waits_on_a_pause(row)]
        if waiting:
            put_off = self._put_off(waiting)
            rows = [row for row in rows if row["id"] not in put_off]
        gone = self._gone(rows)
        return [
            Woken(
                row["id"],
                RunStatus(row["status"]),
                _due_of(row) if _is_plainly_due(row) and row["id"] not in gone else None,
                row["tool"],
                gone.get(row["id"]),
            )
            for row in rows
        ]

    def _gone(self, rows: Sequence[Row]) -> dict[str, Gone]:
        """Which of these runs have long waited for a worker, and wait for a version that none has.

        Where nobody has waited long, nothing is asked.
        """
        found: dict[str, Gone] = {}
        overdue_ms = min(MISSED_MS, self.version_patience_ms)
        for patience_ms, waits in (
            (self.version_patience_ms, _has_waited(self.version_patience_ms)),
            (overdue_ms, _could_not_start),
        ):
            waiting = [row for row in rows if row["id"] not in found and waits(row)]
            if not waiting:
                continue
            gone = self.catalog.gone([_version_of(row) for row in waiting], patience_ms=patience_ms)
            for row in waiting:
                if _version_of(row) in gone:
                    found[row["id"]] = gone[_version_of(row)]
        return found

    def gone(self, workflow: str, version: str) -> Gone | None:
        """Whether no worker has had a version of a workflow for the patience."""
        version_of = (workflow, version)
        found = self.catalog.gone([version_of], patience_ms=self.version_patience_ms)
        return found.get(version_of)

    def moved_at(self, run_id: str) -> int:
        """When a run last moved, by its trace."""
        rows = self.database.run(
            "SELECT at FROM handrail_trace WHERE run_id = :run_id ORDER BY seq DESC LIMIT 1",
            {"run_id": run_id},
        )
        return int(rows[0]["at"]) if rows else 0

    def published(self, due: Sequence[DueStep]) -> None:
        """Count a publication of due steps, and set when the sweep repeats it.

        After it, not before: what could not be published is due as it was.
        """
        if due:
            self.database.run(statements.published(self._postgres), self._timed(self._sent(due)))

    def unclaimed(self, due: Sequence[DueStep]) -> set[str]:
        """Which of these steps nobody has claimed yet; by the ids of their runs."""
        if not due:
            return set()
        rows = self.database.run(statements.unclaimed(self._postgres), self._sent(due))
        return {row["id"] for row in rows}

    def _sent(self, due: Sequence[DueStep]) -> dict[str, Any]:
        ids, epochs = [step.run_id for step in due], [step.epoch for step in due]
        if self._postgres:
            return {"ids": self._array(ids), "epochs": self._array([str(at) for at in epochs])}
        return {"sent": json.dumps(list(zip(ids, epochs, strict=True)))}

    def beat(self, *names: str, kind: str) -> None:
        """Record that parts of the fleet have finished work."""
        now = PG_NOW if self._postgres else ":now"
        rows = ", ".join(f"(:name_{number}, :kind, {now})" for number in range(len(names)))
        self.database.run(
            f"INSERT INTO handrail_heartbeat (name, kind, at) VALUES {rows}"
            " ON CONFLICT (name) DO UPDATE SET at = excluded.at, kind = excluded.kind",
            self._timed(
                {"kind": kind, **{f"name_{number}": name for number, name in enumerate(names)}}
            ),
        )

    def since_beat(self, name: str) -> int | None:
        """How long ago a part of the fleet has finished work, in milliseconds; None: never."""
        now = PG_NOW if self._postgres else ":now"
        rows = self.database.run(
            f"SELECT {now} - at AS ago FROM handrail_heartbeat WHERE name = :name",
            self._timed({"name": name}),
        )
        return rows[0]["ago"] if rows else None

    # ---- pauses ----------------------------------------------------------------------------------

    def pause(self, scope: Scope, name: str, *, entry: AuditEntry) -> Pause:
        """Let nothing be dispatched in a scope; returns the pause in force. Where it is paused
        already, the new words count and the moment stays.
        """
        params = {"scope": scope.value, "name": name, "reason": entry.reason, "by": entry.actor}

        def write(tx: Session, now: int) -> dict[str, Any]:
            (row,) = tx.run(
                "INSERT INTO handrail_pause (scope, name, reason, paused_by, paused_at)"
                " VALUES (:scope, :name, :reason, :by, :now) ON CONFLICT (scope, name)"
                " DO UPDATE SET reason = excluded.reason, paused_by = excluded.paused_by"
                " RETURNING reason, paused_by, paused_at",
                {**params, "now": now},
            )
            append_audit(tx, entry, now, postgres=self._postgres)
            return row

        return Pause(scope=scope, name=name, **self.people.transact(write))

    def resume(self, scope: Scope, name: str, *, entry: AuditEntry) -> bool:
        """Lift a pause and make due what waits on one, compensations too; returns whether it was
        there.
        """

        def lift(tx: Session, now: int) -> bool:
            lifted = tx.run(
                "DELETE FROM handrail_pause WHERE scope = :scope AND name = :name RETURNING scope",
                {"scope": scope.value, "name": name},
            )
            if lifted:
                waiting = self._timed({"within_ms": PAUSED_MS})
                tx.run(statements.set_going(self._postgres), waiting)
                tx.run(statements.hurry_undoing(self._postgres), waiting)
                append_audit(tx, entry, now, postgres=self._postgres)
            return bool(lifted)

        return self.people.transact(lift)

    def _put_off(self, waiting: Sequence[str]) -> set[str]:
        """Let those go on waiting whose pause is still in force; returns which.

        However many they are and however long it takes, no worker tries them in vain.
        """
        crowded = [pause.name for pause in self._crowded()]
        params = {
            "ids": self._array(waiting),
            "crowded": self._array(crowded),
            "pause_ms": PAUSED_MS,
        }
        rows = self.database.run(statements.put_off(self._postgres), self._timed(params))
        return {row["id"] for row in rows}

    def pauses(self) -> list[Pause]:
        """List the pauses in force, the widest first, those by too many open unknowns last."""
        rows = self.database.run(
            "SELECT scope, name, reason, paused_by, paused_at FROM handrail_pause", {}
        )
        ordered = [Pause(**{**row, "scope": Scope(row["scope"])}) for row in rows]
        ordered.sort(key=lambda pause: (_WIDEST[pause.scope], pause.name))
        return ordered + self._crowded()

    def _crowded(self) -> list[Pause]:
        if not self.max_open_unknowns:
            return []
        rows = self.database.run(
            "SELECT tool, count(*) AS doubtful FROM handrail_effect WHERE unknown_since IS NOT NULL"
            " GROUP BY tool HAVING count(*) >= :most ORDER BY tool",
            {"most": self.max_open_unknowns},
        )
        return [
            Pause(
                scope=Scope.TOOL,
                name=row["tool"],
                reason=f"{row['doubtful']} effects of unknown outcome"
                f" (at most {self.max_open_unknowns} may be open)",
                automatic=True,
            )
            for row in rows
        ]

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, run_id: str) -> dict[str, Any]:
        """Read one run's row with its state. Raises `UnknownRun`."""
        rows = again(lambda: self._read(run_id))
        if not rows:
            raise UnknownRun(run_id)
        return {**rows[0], "state": state_of(rows[0], status="status")}

    def _read(self, run_id: str) -> list[dict[str, Any]]:
        return self.database.run(
            statements.read_run(self._postgres, lock=False), self._timed({"id": run_id})
        )

    def trace(self, run_id: str) -> list[dict[str, Any]]:
        """Read a run's trace: events with a gapless `seq`, in order."""
        rows = self.database.run(
            "SELECT seq, at, events FROM handrail_trace WHERE run_id = :run_id ORDER BY seq",
            {"run_id": run_id},
        )
        return [
            {"run_id": run_id, "seq": row["seq"] + offset, "at": row["at"], **event}
            for row in rows
            for offset, event in enumerate(json.loads(row["events"]))
        ]

    def observations(self, run_id: str) -> list[dict[str, Any]]:
        """Read all observations of a run, in order."""
        rows = self.database.run(
            "SELECT seq, source, text FROM handrail_observation"
            " WHERE run_id = :run_id ORDER BY seq",
            {"run_id": run_id},
        )
        return [
            {"seq": row["seq"], "source": plain(row["source"]), "text": plain(row["text"])}
            for row in rows
        ]

    def list_runs(
        self,
        *,
        status: str | None = None,
        workflow: str | None = None,
        tenant: str | None = None,
        reason: str | None = None,
        tool: str | None = None,
        older_than_ms: int = 0,
        limit: int = 50,
    ) -> list[dict[str, Any]]:
        """List runs, newest first; with `tool` those that have sent, or rest on, a write of it."""
        wanted = {"status": status, "workflow": workflow, "tenant": tenant, "reason": reason}
        where, params = _equal(wanted)
        params["limit"] = limit
        if tool is not None:
            where.append(
                "id IN (SELECT owner_run_id FROM handrail_effect WHERE tool = :tool"
                " UNION SELECT h.run_id FROM handrail_effect_holder AS h"
                " JOIN handrail_effect AS e ON e.id = h.effect_id WHERE e.tool = :tool)"
            )
            params["tool"] = tool
        if older_than_ms:
            where.append("created_at <= :before")
            params["before"] = self.now() - older_than_ms
        return self.database.run(
            "SELECT id, tenant, workflow, workflow_version, status, reason, step, created_at,"
            " steps_left, model_calls_left, tool_calls_left, tool_calls_reserved, budget"
            f" FROM handrail_run WHERE {' AND '.join(where)}"
            " ORDER BY created_at DESC, id DESC LIMIT :limit",
            params,
        )

    def effects(
        self,
        *,
        run_id: str | None = None,
        unresolved: bool = False,
        status: str | None = None,
        tool: str | None = None,
        tenant: str | None = None,
        workflow: str | None = None,
        older_than_ms: int = 0,
        limit: int | None = None,
    ) -> list[dict[str, Any]]:
        """List effects, oldest first, with their age in doubt in milliseconds where they have
        one.
        """
        where, params = _equal({"status": status, "tool": tool, "tenant": tenant})
        if workflow is not None:
            where.append("owner_run_id IN (SELECT id FROM handrail_run WHERE workflow = :workflow)")
            params["workflow"] = workflow
        now = self.now()
        if older_than_ms:
            where.append("created_at <= :before")
            params["before"] = now - older_than_ms
        bound = ""
        if limit is not None:
            bound = "LIMIT :limit"
            params["limit"] = limit
        if run_id is not None:
            where.append(
                "(owner_run_id = :run_id OR id IN"
                " (SELECT effect_id FROM handrail_effect_holder WHERE run_id = :run_id)"
                " OR id = (SELECT effect_id FROM handrail_run WHERE id = :run_id))"
            )
            params["run_id"] = run_id
        if unresolved:
            where.append("unknown_since IS NOT NULL")
        rows = self.database.run(
            f"SELECT {EFFECT} FROM handrail_effect WHERE {' AND '.join(where)}"
            f" ORDER BY created_at, id {bound}",
            params,
        )
        return [_effect_info(row, now) for row in rows]

    def effect(self, effect_id: str) -> Effect:
        """Read one effect that is there. Raises `EffectForgotten`."""
        found = self.find_effect(effect_id)
        if found is None:
            raise EffectForgotten(effect_id)
        return found

    def find_effect(self, effect_id: str) -> Effect | None:
        """Read one effect; None where the intent was never planned."""
        rows = again(
            lambda: self.database.run(
                f"SELECT {EFFECT} FROM handrail_effect WHERE id = :id", {"id": effect_id}
            )
        )
        return effect_of(rows[0]) if rows else None

    def lost(self) -> Rewind | None:
        """What the ledger has lost, where it was set back and that is not cleared."""
        return lost_in(again(lambda: self.database.run(statements.LOST, {})))

    def evidence(self, effect_id: str) -> list[dict[str, Any]]:
        """Read what was learned about an effect, in order."""
        rows = self.database.run(
            "SELECT token, kind, at, detail FROM handrail_evidence"
            " WHERE effect_id = :id ORDER BY at, id",
            {"id": effect_id},
        )
        return [{**row, "detail": json.loads(row["detail"])} for row in rows]

    def figures(self) -> dict[str, Any]:
        """What an operator watches: runs that are not over, what the sweep has before it, doubts.

        What has ended is not counted, so that it costs little to look, however much there is of it;
        nor is more than MOST_COUNTED of anything (`at_least` says that there may be more).
        """
        now = self.now()
        counted = self.database.run(statements.FIGURES, {"now": now, "most": MOST_COUNTED})[0]
        by_status = self.database.run(statements.RUNS_UNDER_WAY, {"most": MOST_COUNTED})
        beats = self.database.run("SELECT name, at FROM handrail_heartbeat", {})
        heartbeats = {row["name"]: now - row["at"] for row in beats}
        oldest = [at for at in (counted["oldest_due"], counted["oldest_doubt"]) if at is not None]
        backlog = {"due": counted["due"], "in_doubt": counted["in_doubt"]}
        runs = {row["status"]: row["runs"] for row in by_status if row["runs"]}
        unknown_since = counted["unknown_since"]
        return {
            "runs": runs,
            "sweep_lag_ms": max(0, now - min(oldest)) if oldest else 0,
            "last_sweep_ms": heartbeats.get("sweep"),
            "backlog": backlog,
            "unknown_effects": counted["unknown"],
            "oldest_unknown_ms": 0 if unknown_since is None else now - unknown_since,
            "open_handoffs": counted["handoffs"],
            "open_questions": counted["questions"],
            "at_least": MOST_COUNTED
            in (*backlog.values(), *runs.values(), counted["unknown"], counted["handoffs"]),
            "heartbeats": heartbeats,
            "pauses": [pause.to_json() for pause in self.pauses()],
        }

    # ---- inside ----------------------------------------------------------------------------------

    def _trace(
        self,
        tx: Session,
        run_id: str,
        seq: int,
        events: tuple[TraceEvent, ...],
        writer: str,
        now: int,
    ) -> None:
        params = {
            "run_id": run_id,
            "seq": seq,
            "count": len(events),
            "writer": writer,
            "now": now,
            "events": events_text(events),
        }
        tx.run(statements.INSERT_TRACE, params)

    def _facts(self, tx: Session, run_id: str, ruling: Ruling, version: int) -> None:
        if ruling.observation is not None:
            tx.run(
                statements.INSERT_OBSERVATION,
                {
                    "run_id": run_id,
                    "seq": ruling.state.observation_count,
                    "source": escaped(ruling.observation.source),
                    "text": escaped(ruling.observation.text),
                    "digest": ruling.observation.digest,
                },
            )
        for name, value in ruling.outputs.items():
            params = {"run_id": run_id, "name": name, "version": version, "value": dumps(value)}
            tx.run(statements.INSERT_OUTPUT, params)

    def _timed(self, params: dict[str, Any]) -> dict[str, Any]:
        # PostgreSQL reads its own clock inside the statement; SQLite has none but ours.
        return params if self._postgres else {**params, "now": self.database.now()}

    def _array(self, values: Collection[str]) -> str:
        if not self._postgres:
            return json.dumps(list(values))
        return array(values)


@dataclass(frozen=True, slots=True)
class Ruled:
    """What a decision under lock came to: what was seen, what was ruled (if anything), what is
    due.
    """

    locked: Locked
    ruling: Ruling | None
    due: DueStep | None
    repeated: bool = False  # it was decided before, under the same id
    news: tuple[Notice, ...] = ()
    act: tuple[int, str] | None = None  # the audit entry that was written with it


def _notice(
    news: News, state: RunState, of: str | None = None, reason: Reason | None = None
) -> Notice:
    about = reason or state.reason
    return Notice(
        news=news,
        run_id=state.run_id,
        tenant=state.tenant,
        workflow=state.workflow,
        subject=state.principal.subject,
        status=state.status.value,
        reason=about.value if about else None,
        id=of,
    )


def _commit_sql(commit: _Commit) -> str:
    return statements.commit_in_one(
        due=commit.due,
        traces=bool(commit.ruling.events),
        observes=commit.ruling.observation is not None,
        outputs=len(commit.ruling.outputs),
    )


def _untraced(traced: RunStatus, status: RunStatus, step: int) -> tuple[TraceEvent, ...]:
    """A claim moves the status alone; whoever writes next records that move."""
    if traced is status:
        return ()
    cause = RunEvent.STEP_CLAIMED if traced is RunStatus.QUEUED else RunEvent.CHECKPOINT_RESUMED
    detail: dict[str, Json] = {"event": cause.value, "from": traced.value, "to": status.value}
    return (TraceEvent(RUN_MOVED, step, detail),)


def row_of(new: NewRun) -> NewRow:
    """Write a new run as its row will be."""
    return NewRow(
        columns={
            "id": new.run_id,
            "tenant": new.tenant,
            "workflow": new.workflow,
            "workflow_version": new.workflow_version,
            "goal": escaped(new.goal),
            "principal": dumps(new.principal.to_json()),
            "input": canonical(new.input),
            "budget": dumps(new.budget.to_json()),
            "limits": dumps(dict(new.limits.to_json())),
            "dedupe_key": None if new.dedupe_key is None else escaped(new.dedupe_key),
            "traceparent": new.traceparent,
            "mode": new.state.mode.value,
            **state_columns(new.state),
            "traced_status": new.state.status.value,
            "phase": new.phase.value,
            **left_columns(new.state.left),
            "trace_seq": len(new.events),
        },
        events=events_text(new.events),
        per_tool=dumps(dict(new.budget.per_tool)),
        working_ms=min(new.budget.deadline_ms, new.budget.expires_ms),
        expires_ms=new.budget.expires_ms,
    )


def _due_of(row: Row) -> DueStep:
    deadline_at = row["deadline_at"]
    return DueStep(
        row["id"],
        row["step"],
        row["epoch"],
        deadline_at,
        row["remaining_ms"] if deadline_at is None else deadline_at - row["now"],
        snapshot(row),
        row["traceparent"],
    )


def _waits_on_a_pause(row: Row) -> bool:
    return row["due_at"] is not None and row["deadline_at"] is None


def _version_of(row: Row) -> tuple[str, str]:
    return row["workflow"], row["workflow_version"]


def _waits_for_a_worker(row: Row) -> bool:
    """Whether a run is due, nobody holds it, and nothing else is to be decided about it first."""
    return (
        row["status"] in CLAIMABLE
        and row["lease_until"] is None
        and row["due_at"] is not None
        and row["cancel_requested_at"] is None
        and row["expires_at"] > row["now"]
    )


def _has_waited(patience_ms: int) -> Callable[[Row], bool]:
    return lambda row: _waits_for_a_worker(row) and row["now"] - row["due_at"] >= patience_ms


def _could_not_start(row: Row) -> bool:
    """Whether a run's working time ran out while it waited for a worker."""
    over = row["deadline_at"] is not None and row["deadline_at"] <= row["now"]
    return over and _waits_for_a_worker(row)


def _is_plainly_due(row: Row) -> bool:
    """Whether a run that was woken has but to be published: nobody holds it and no limit is
    over.
    """
    in_time = row["deadline_at"] is None or row["deadline_at"] > row["now"]
    return in_time and _waits_for_a_worker(row)


def _equal(columns: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Conditions that columns equal what is asked for, where anything is, and their parameters."""
    params = {name: value for name, value in columns.items() if value is not None}
    return ["1 = 1", *(f"{name} = :{name}" for name in params)], params


def _effect_info(row: Row, now: int) -> dict[str, Any]:
    terms = json.loads(row["terms"])
    return {
        "id": row["id"],
        "tenant": row["tenant"],
        "intent_key": plain(row["intent_key"]),
        "tool": row["tool"],
        "arguments": json.loads(row["arguments"]),
        "status": row["status"],
        "token": row["token"],
        "owner_run_id": row["owner_run_id"],
        "attempts": row["attempts"],
        "trigger": row["doubt_trigger"],
        "recovery": "query" if terms["can_query"] else "human",
        "age_ms": None if row["unknown_since"] is None else now - row["unknown_since"],
        "queries_left": row["queries_left"],
        "next_query_at": row["next_query_at"],
        "evidence": row["evidence"],
        "result": json.loads(row["result"]) if row["result"] else None,
        "compensation": json.loads(row["compensation"]) if row["compensation"] else None,
        "compensates": row["compensates"],
    }


__all__ = [
    "Claim",
    "Doubt",
    "DueStep",
    "EffectStatus",
    "Inserted",
    "Ledger",
    "NewRun",
    "Ruled",
    "Woken",
]
