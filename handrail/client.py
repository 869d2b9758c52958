"""What a web process needs of a fleet: accept runs inside its own transaction, look at them, act.

Light: importing this, accepting a run and looking at one import no agent, model or tool code, and
on Redis no Celery. What a run of a workflow begins with stands in the ledger's catalog, which the
workers fill. Cancelling a run and deciding about it are rulings of the machine, which is imported
when the first of them is asked for.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from handrail import tracing
from handrail.asked import RUN_ID, Asked, Subject, UnknownWorkflow, checked
from handrail.broker.message import message_of
from handrail.broker.publish import IN_PASSING_S, Courier, Publisher
from handrail.canonical import Json, canonical, dumps, escaped, plain
from handrail.hosts import Host, Transaction, of_session
from handrail.inputs import by_description
from handrail.ledger.accept import (
    Entry,
    Inserted,
    NewRow,
    accept,
    accepted_by_key,
    current_entry,
    qualified,
)
from handrail.ledger.errors import NotMigrated, UnknownRun
from handrail.ledger.schema import HEAD, lacks_the_table
from handrail.ledger.session import Session, again
from handrail.settings import Settings

if TYPE_CHECKING:  # heavy
    from handrail.agent.budget import Budget, CallLimits
    from handrail.agent.tools import Principal
    from handrail.fleet import Fleet
    from handrail.ledger.database import Database
    from handrail.runs import Run

ENDED: Final = frozenset({"completed", "compensated", "failed", "cancelled", "budget_exhausted"})
WITH_PERSON: Final = frozenset({"awaiting_approval", "awaiting_input", "handed_off"})

_LOOK: Final = """
    SELECT id, tenant, principal, workflow, workflow_version, mode, goal, status, reason, answer,
        created_at, deadline_at, cancel_requested_at
    FROM handrail_run WHERE id = :id"""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """How a run stands, as its row says it. `answer` only if completed; instants are milliseconds
    since the epoch, by the ledger's clock.
    """

    run_id: str
    tenant: str
    subject: str
    workflow: str
    workflow_version: str
    mode: str
    goal: str
    status: str
    reason: str | None
    answer: Json
    created_at: int
    deadline_at: int | None
    cancel_requested: bool

    @property
    def ended(self) -> bool:
        """Whether the run has a terminal status."""
        return self.status in ENDED

    @property
    def rests(self) -> bool:
        """Whether the run has ended, or waits for a person."""
        return self.ended or self.status in WITH_PERSON

    def to_json(self) -> dict[str, Json]:
        """Return it as one JSON object."""
        return {
            "run_id": self.run_id,
            "tenant": self.tenant,
            "subject": self.subject,
            "workflow": self.workflow,
            "workflow_version": self.workflow_version,
            "mode": self.mode,
            "goal": self.goal,
            "status": self.status,
            "reason": self.reason,
            "answer": self.answer,
            "created_at": self.created_at,
            "deadline_at": self.deadline_at,
            "cancel_requested": self.cancel_requested,
            "ended": self.ended,
        }


class Client:
    """A fleet as a web process sees it. Thread-safe; nothing is connected before it is used.

    Settings come from the environment (`HANDRAIL_*`); what is given here wins. With a `host` every
    run is accepted and looked at through the host's own connection, inside the transaction that it
    has open; `session` of a call does the same for that call.
    """

    def __init__(
        self,
        *,
        settings: Settings | None = None,
        database_url: str | None = None,
        broker_url: str | None = None,
        host: Host | None = None,
    ) -> None:
        self._given = {"database_url": database_url, "broker_url": broker_url}
        self._settings = settings
        self._host = host
        self._courier: Courier | None = None

    @cached_property
    def settings(self) -> Settings:
        """The settings, read when they are first needed."""
        return self._settings or Settings.read(**self._given)

    # ---- accepting runs --------------------------------------------------------------------------

    def enqueue(
        self,
        workflow: str,
        *,
        goal: str,
        input: Any = None,
        principal: Subject | Mapping[str, Any] | str | None = None,
        tenant: str | None = None,
        budget: Budget | Mapping[str, Any] | None = None,
        limits: CallLimits | Mapping[str, Any] | None = None,
        dedupe_key: str | None = None,
        run_id: str | None = None,
        traceparent: str | None = None,
        mode: str = "live",
        session: Any = None,
    ) -> str:
        """Accept a run and return its id; it starts when the transaction has committed.

        Inside a host's transaction (that of `session`, or of the client's host) the run is a row of
        that transaction: a rollback leaves nothing. Its first step is published after the commit; a
        broker that is down is no error and holds nobody up, the sweep publishes what was missed.
        With a `dedupe_key` (unique within the tenant) a double click is one run, and the id that is
        returned is that run's.

        The workflow is known by the ledger's catalog: a worker that has it must have been started
        once. Everything is checked before anything is written: raises `UnknownWorkflow`,
        `InvalidRun`, `InvalidBudget`, `RunExists`.

        Where the ledger is in another database than the transaction, the run is accepted after the
        commit: a crash between the two loses it.
        """
        asked = checked(
            goal=goal,
            input=input,
            principal=principal,
            tenant=self.settings.tenant if tenant is None else tenant,
            dedupe_key=dedupe_key,
            run_id=run_id,
            traceparent=tracing.current() if traceparent is None else traceparent,
            mode=mode,
        )
        transaction = self._transaction(session)
        if transaction is None:
            entry = self._own.entry(workflow)
            return self._accept_here(self._row(workflow, entry, asked, budget, limits))
        if transaction.elsewhere:
            if dedupe_key is not None and run_id is None:
                key = (asked.tenant, asked.mode, dedupe_key)
                with _migrated():
                    asked = replace(asked, run_id=accepted_by_key(self._own, *key))
            entry = self._own.entry(workflow)
            row = self._row(workflow, entry, asked, budget, limits)
            transaction.on_commit(functools.partial(self._accept_here, row))
            return row.run_id
        way = _Way(transaction, transaction.postgres, self.settings.database_schema)
        by_key = None
        if dedupe_key is not None and run_id is None:
            by_key = {"tenant": asked.tenant, "mode": asked.mode, "dedupe_key": escaped(dedupe_key)}
        entry = way.entry(workflow, by_key)
        row = self._row(workflow, entry, asked, budget, limits)
        if entry is not None and entry.taken is not None:
            return entry.taken
        inserted = way.accept(row)
        transaction.on_commit(functools.partial(self._publish, inserted))
        return inserted.run_id

    def get(
        self,
        run_id: str,
        *,
        tenant: str | None = None,
        subject: str | None = None,
        session: Any = None,
    ) -> RunInfo:
        """Look at a run. With `tenant` or `subject` only at one of theirs.

        Raises `UnknownRun` where there is none, or it is another's: nobody learns of a run that is
        not his.
        """
        transaction = self._transaction(session)
        if transaction is None or transaction.elsewhere:
            way = self._own
        else:
            way = _Way(transaction, transaction.postgres, self.settings.database_schema)
        known = isinstance(run_id, str) and RUN_ID.fullmatch(run_id)
        rows = way.run(_LOOK, {"id": run_id}) if known else []
        found = _info(rows[0]) if rows else None
        if found is None or tenant not in (None, found.tenant):
            raise UnknownRun(run_id)
        if subject not in (None, found.subject):
            raise UnknownRun(run_id)
        return found

    # ---- acting on runs --------------------------------------------------------------------------

    def cancel(self, run_id: str, *, by: Principal | str | None = None, reason: str = "") -> Run:
        """Wish a run to be cancelled; see `Fleet.cancel`. A transaction of its own."""
        return self.fleet.cancel(run_id, by=by, reason=reason)

    def approve(
        self, token: str, *, by: Principal | str, run: str | None = None, comment: str = ""
    ) -> Run:
        """Agree to the exact action that an approval token was issued for; see `Desk.approve`."""
        return self.fleet.approve(token, by=by, run=run, comment=comment)

    def reject(self, approval_id: str, *, by: Principal | str, reason: str) -> Run:
        """Refuse a request for approval; see `Desk.reject`."""
        return self.fleet.reject(approval_id, by=by, reason=reason)

    def answer(self, run: str, text: str, *, by: Principal | str) -> Run:
        """Answer the question that a run has asked; see `Desk.answer`."""
        return self.fleet.answer(run, text, by=by)

    @cached_property
    def fleet(self) -> Fleet:
        """The fleet, without its workflows: what rules over runs, and its `desk` for people. It is
        imported when it is first asked for.
        """
        from handrail.fleet import Fleet

        return Fleet(settings=self.settings)

    def close(self) -> None:
        """Close what this process has opened."""
        for part in (self._courier, *(self.__dict__.pop(n, None) for n in ("fleet", "_database"))):
            if part is not None:
                part.close()
        self._courier = None
        self.__dict__.pop("_own", None)

    # ---- inside ----------------------------------------------------------------------------------

    def _transaction(self, session: Any) -> Transaction | None:
        if session is not None:
            return of_session(session)
        return None if self._host is None else self._host.transaction()

    def _accept_here(self, row: NewRow) -> str:
        """Accept a run through a connection of our own."""
        # Natural keys make it repeatable: a lost answer is read back by the run's own id.
        inserted = again(lambda: self._own.accept(row))
        self._publish(inserted)
        return inserted.run_id

    def _row(
        self,
        workflow: str,
        entry: Entry | None,
        asked: Asked,
        budget: Budget | Mapping[str, Any] | None,
        limits: CallLimits | Mapping[str, Any] | None,
    ) -> NewRow:
        if entry is None:
            raise UnknownWorkflow(str(workflow), ())
        row = prepared_row(entry.prepared, asked)
        if budget is None and limits is None:
            return row
        from handrail.limits import bounded  # it needs the rules of budgets

        return bounded(row, entry.prepared, budget, limits, permissions=asked.permissions)

    def _publish(self, inserted: Inserted) -> None:
        url = self.settings.broker_url or self._embedded()
        if inserted.due is None or not url:  # without a broker the sweep sets it going
            return
        if self._courier is None or self._courier.url != url:
            publisher = Publisher(url, key_prefix=self.settings.key_prefix, timeout_s=IN_PASSING_S)
            self._courier = Courier(publisher, url=url)
        self._courier.publish([message_of(inserted.due)])

    def _embedded(self) -> str:
        """The embedded Valkey that a worker runs for the same home, at this moment."""
        from handrail.shared_valkey import find

        found = None if self.settings.database == "sqlite://" else find(self.settings.home)
        return "" if found is None else found.url

    @cached_property
    def _database(self) -> Database:
        from handrail.ledger.database import Database

        return Database(self.settings.database, schema=self.settings.database_schema)

    @cached_property
    def _own(self) -> _Way:
        """Our own connection to the ledger; its search path names the schema."""
        return _Way(self._database, self._database.postgres, "")


@dataclass(frozen=True, slots=True)
class _Way:
    """How the ledger is reached: through what, and with what schema's name before its tables."""

    through: Session
    postgres: bool
    schema: str

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self.through.run(qualified(sql, self.schema if self.postgres else ""), params)

    def entry(self, workflow: str, key: Mapping[str, str] | None = None) -> Entry | None:
        if not isinstance(workflow, str):
            return None
        with _migrated():
            return current_entry(
                *(self.through, escaped(workflow)),
                postgres=self.postgres,
                schema=self.schema,
                key=key,
            )

    def accept(self, row: NewRow) -> Inserted:
        return accept(self.through, row, postgres=self.postgres, schema=self.schema)


@contextmanager
def _migrated() -> Iterator[None]:
    """Say what to do where a table of ours is missing."""
    try:
        yield
    except Exception as error:
        if lacks_the_table(error):
            raise NotMigrated(None, HEAD) from error
        raise


def prepared_row(prepared: Mapping[str, Any], asked: Asked) -> NewRow:
    """Write the row of a run with its workflow's own budget; `prepared` is the catalog's. Raises
    `InvalidRun` where the input is not the workflow's.
    """
    text = asked.input
    if prepared["input"] is not None:
        text = canonical(by_description(prepared["input"], text))
    accepted = {**prepared["accepted"], "subject": asked.subject, "mode": asked.mode}
    return NewRow(
        columns={
            **prepared["columns"],
            "id": asked.run_id,
            "tenant": asked.tenant,
            "goal": escaped(asked.goal),
            "principal": dumps(asked.principal),
            "input": text,
            "dedupe_key": None if asked.dedupe_key is None else escaped(asked.dedupe_key),
            "traceparent": asked.traceparent,
            "mode": asked.mode,
        },
        events=dumps([{"type": "run.accepted", "step": 0, "detail": accepted}]),
        per_tool=dumps(prepared["per_tool"]),
        working_ms=prepared["working_ms"],
        expires_ms=prepared["expires_ms"],
    )


def _info(row: Mapping[str, Any]) -> RunInfo:
    return RunInfo(
        run_id=row["id"],
        tenant=row["tenant"],
        subject=json.loads(row["principal"])["subject"],
        workflow=row["workflow"],
        workflow_version=row["workflow_version"],
        mode=row["mode"],
        goal=plain(row["goal"]),
        status=row["status"],
        reason=row["reason"],
        answer=None if row["answer"] is None else json.loads(row["answer"]),
        created_at=row["created_at"],
        deadline_at=row["deadline_at"],
        cancel_requested=row["cancel_requested_at"] is not None,
    )


__all__ = ["Client", "RunInfo", "UnknownRun", "UnknownWorkflow"]
