"""The ledger's tables, in a MetaData of their own: a host's migrations never see them.

Tables carry their rules: CHECK, partial unique index, foreign key. Instants are milliseconds since
the epoch by the database's clock; JSON is canonical ASCII text, so that nothing a model or a tool
says can fail to be stored. The migrations build exactly this, and a test compares the two.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import BigInteger, CheckConstraint, Index, MetaData, Text, text
from sqlmodel import Field, SQLModel

from handrail.agent.approvals import ApprovalStatus
from handrail.agent.budget import Phase
from handrail.agent.effects import Doubt, EffectStatus, Trigger
from handrail.agent.machine import Mode
from handrail.agent.pauses import Scope
from handrail.agent.status import RunStatus

METADATA = MetaData()


def one_of(column: str, values: type[StrEnum]) -> str:
    """Return the SQL condition that a column holds a member of an enumeration."""
    return f"{column} IN ({', '.join(repr(item.value) for item in values)})"


class Table(SQLModel):
    """Base of the ledger's tables."""

    metadata = METADATA


def _text(*, null: bool = False, key: bool = False) -> Any:
    return Field(default=None if null else ..., sa_type=Text, nullable=null, primary_key=key)


def _int(*, null: bool = False, key: bool = False, default: int | None = None) -> Any:
    server_default = None if default is None else text(str(default))
    return Field(
        default=None if null else default if default is not None else ...,
        sa_type=BigInteger,
        nullable=null,
        primary_key=key,
        sa_column_kwargs={"server_default": server_default, "autoincrement": False},
    )


class RunRow(Table, table=True):
    """One run. The row is the outbox: what is due is published, and published again by the
    sweep.
    """

    __tablename__: ClassVar[str] = "handrail_run"
    __table_args__ = (
        CheckConstraint(one_of("status", RunStatus), name="handrail_run_status"),
        # A claim alone moves the status without a trace. (PostgreSQL reads a CHECK's text anew for
        # each statement, so that a second list of statuses would cost every step.)
        CheckConstraint(
            "traced_status = status OR traced_status IN ('queued', 'running')",
            name="handrail_run_traced_status",
        ),
        CheckConstraint(one_of("phase", Phase), name="handrail_run_phase"),
        CheckConstraint(one_of("mode", Mode), name="handrail_run_mode"),
        CheckConstraint(
            "steps_left >= 0 AND model_calls_left >= 0 AND tool_calls_left >= 0"
            " AND tokens_left >= 0 AND cost_microusd_left >= 0 AND output_bytes_left >= 0"
            " AND tool_calls_reserved IN (0, 1) AND compensations_reserved IN (0, 1, 2)",
            name="handrail_run_budget",
        ),
        CheckConstraint(
            "lease_until IS NULL OR (claim_id IS NOT NULL AND holder IS NOT NULL)",
            name="handrail_run_lease",
        ),
        CheckConstraint(
            "status NOT IN ('completed', 'compensated', 'failed', 'cancelled', 'budget_exhausted')"
            " OR (reason IS NOT NULL AND lease_until IS NULL AND wake_at IS NULL)",
            name="handrail_run_terminal",
        ),
        # Everything that the sweep has to look at, and nothing else: proportional to what is due.
        # A row is in one of the two: doubts never stand before a run that only has to go on.
        Index(
            "handrail_run_wake",
            "wake_at",
            postgresql_where=text("wake_at IS NOT NULL AND status <> 'reconciling'"),
            sqlite_where=text("wake_at IS NOT NULL AND status <> 'reconciling'"),
        ),
        Index(
            "handrail_run_doubt",
            "wake_at",
            postgresql_where=text("wake_at IS NOT NULL AND status = 'reconciling'"),
            sqlite_where=text("wake_at IS NOT NULL AND status = 'reconciling'"),
        ),
        Index(
            "handrail_run_dedupe",
            "tenant",
            "mode",  # a shadow run never takes the place of the real one
            "dedupe_key",
            unique=True,
            postgresql_where=text("dedupe_key IS NOT NULL"),
            sqlite_where=text("dedupe_key IS NOT NULL"),
        ),
    )

    id: str = _text(key=True)
    tenant: str = _text()
    workflow: str = _text()
    workflow_version: str = _text()
    goal: str = _text()
    principal: str = _text()
    input: str = _text()
    budget: str = _text()
    limits: str = _text()
    dedupe_key: str | None = _text(null=True)
    traceparent: str | None = _text(null=True)
    mode: str = _text()
    created_at: int = _int()
    # status and fencing
    status: str = _text()
    traced_status: str = _text()  # as of the last trace event; a claim moves `status` alone
    reason: str | None = _text(null=True)
    epoch: int = _int(default=0)
    claim_id: str | None = _text(null=True)
    holder: str | None = _text(null=True)
    lease_until: int | None = _int(null=True)
    attempts: int = _int(default=0)
    refusal: str | None = _text(null=True)  # what refused the latest claim's charge
    # when
    due_at: int | None = _int(null=True)
    wake_at: int | None = _int(null=True)  # when the sweep must look
    publishes: int = _int(default=0)
    deadline_at: int | None = _int(null=True)
    remaining_ms: int | None = _int(null=True)  # working time left while the clock stands still
    expires_at: int = _int()
    cancel_requested_at: int | None = _int(null=True)
    # budget left
    phase: str = _text()
    steps_left: int = _int()
    model_calls_left: int = _int()
    tool_calls_left: int = _int()
    tool_calls_reserved: int = _int(default=0)
    compensations_reserved: int = _int(default=0)  # kept while its write is in flight
    tokens_left: int = _int()
    cost_microusd_left: int = _int()
    output_bytes_left: int = _int()
    # position
    step: int = _int(default=0)
    state_version: int = _int(default=0)
    observation_count: int = _int(default=0)
    trace_seq: int = _int(default=0)
    levels: str = _text()
    pending: str | None = _text(null=True)
    told: str | None = _text(null=True)
    answer: str | None = _text(null=True)
    effect_id: str | None = _text(null=True)  # the latest
    undoing_effect_id: str | None = _text(null=True)  # what the latest undoes, if it is for that


class ToolAllowanceRow(Table, table=True):
    """What is left of one tool's own limit in one run; only tools with such a limit have a row."""

    __tablename__: ClassVar[str] = "handrail_tool_allowance"
    __table_args__ = (CheckConstraint("calls_left >= 0", name="handrail_tool_allowance_left"),)

    run_id: str = Field(primary_key=True, foreign_key="handrail_run.id", sa_type=Text)
    tool: str = _text(key=True)
    calls_left: int = _int()


class TraceRow(Table, table=True):
    """The events of one commit, append-only. `seq` numbers the first; `writer` proves who
    committed.
    """

    __tablename__: ClassVar[str] = "handrail_trace"
    __table_args__ = (CheckConstraint("count >= 0", name="handrail_trace_count"),)

    run_id: str = Field(primary_key=True, foreign_key="handrail_run.id", sa_type=Text)
    seq: int = _int(key=True)
    count: int = _int()
    writer: str = _text()
    at: int = _int()
    events: str = _text()


class ObservationRow(Table, table=True):
    """One fact of a run's public state, append-only; the same fact is never held twice."""

    __tablename__: ClassVar[str] = "handrail_observation"
    __table_args__ = (Index("handrail_observation_digest", "run_id", "digest", unique=True),)

    run_id: str = Field(primary_key=True, foreign_key="handrail_run.id", sa_type=Text)
    seq: int = _int(key=True)
    source: str = _text()
    text: str = _text()
    digest: str = _text()


class OutputRow(Table, table=True):
    """The output of one stage, append-only; the latest state version counts."""

    __tablename__: ClassVar[str] = "handrail_output"

    run_id: str = Field(primary_key=True, foreign_key="handrail_run.id", sa_type=Text)
    name: str = _text(key=True)
    version: int = _int(key=True)
    value: str = _text()


class EffectRow(Table, table=True):
    """One business intent, from plan to proof; unique within its tenant."""

    __tablename__: ClassVar[str] = "handrail_effect"
    __table_args__ = (
        CheckConstraint(one_of("status", EffectStatus), name="handrail_effect_status"),
        CheckConstraint(one_of("doubt", Doubt), name="handrail_effect_doubt"),
        CheckConstraint(
            f"doubt_trigger IS NULL OR {one_of('doubt_trigger', Trigger)}",
            name="handrail_effect_trigger",
        ),
        CheckConstraint(
            "queries_left >= 0 AND absences >= 0 AND attempts >= 0 AND token >= 0",
            name="handrail_effect_counts",
        ),
        CheckConstraint(
            "status <> 'dispatched' OR (dispatcher IS NOT NULL AND owner_run_id IS NOT NULL"
            " AND dispatch_deadline_at IS NOT NULL)",
            name="handrail_effect_dispatched",
        ),
        CheckConstraint(
            "status <> 'compensating' OR compensation IS NOT NULL",
            name="handrail_effect_compensating",
        ),
        Index("handrail_effect_intent", "tenant", "intent_key", unique=True),
        Index(
            "handrail_effect_unresolved",
            "unknown_since",
            postgresql_where=text("unknown_since IS NOT NULL"),
            sqlite_where=text("unknown_since IS NOT NULL"),
        ),
        # Each dispatch counts what is in doubt of its tool.
        Index(
            "handrail_effect_doubtful",
            "tool",
            postgresql_where=text("unknown_since IS NOT NULL"),
            sqlite_where=text("unknown_since IS NOT NULL"),
        ),
        # What was asked about under a mark is few among all effects.
        Index(
            "handrail_effect_rewind",
            "rewind",
            "status",
            postgresql_where=text("rewind IS NOT NULL"),
            sqlite_where=text("rewind IS NOT NULL"),
        ),
    )

    id: str = _text(key=True)
    tenant: str = _text()
    intent_key: str = _text()
    tool: str = _text()
    contract_version: str = _text()
    arguments: str = _text()
    arguments_hash: str = _text()
    terms: str = _text()
    created_at: int = _int()
    status: str = _text()
    token: int = _int(default=0)
    dispatcher: str | None = _text(null=True)
    owner_run_id: str | None = _text(null=True)
    attempts: int = _int(default=0)
    doubt: str = _text()
    first_dispatched_at: int | None = _int(null=True)
    dispatch_deadline_at: int | None = _int(null=True)
    unknown_since: int | None = _int(null=True)
    doubt_trigger: str | None = _text(null=True)  # why it is unknown
    queries_left: int = _int()
    absences: int = _int(default=0)
    next_query_at: int | None = _int(null=True)
    result: str | None = _text(null=True)
    evidence: str | None = _text(null=True)
    approval_id: str | None = _text(null=True)
    compensation: str | None = _text(null=True)  # how it is undone, recorded before it is sent
    compensates: str | None = _text(null=True)  # the effect that it was planned to undo
    planned_by: str | None = _text(null=True)  # the run that may plan it anew until it is sent
    rewind: int | None = _int(null=True)  # the latest under which it was asked about


class EffectHolderRow(Table, table=True):
    """A run that rests on an effect: it was told the receipt, the record or the recorded result."""

    __tablename__: ClassVar[str] = "handrail_effect_holder"
    __table_args__ = (Index("handrail_effect_holder_run", "run_id"),)

    effect_id: str = Field(primary_key=True, foreign_key="handrail_effect.id", sa_type=Text)
    run_id: str = Field(primary_key=True, foreign_key="handrail_run.id", sa_type=Text)


class EvidenceRow(Table, table=True):
    """What was learned about an effect, append-only: receipts, refusals, answers, late words."""

    __tablename__: ClassVar[str] = "handrail_evidence"
    __table_args__ = (Index("handrail_evidence_effect", "effect_id", "at"),)

    id: str = _text(key=True)
    effect_id: str = Field(foreign_key="handrail_effect.id", sa_type=Text)
    token: int = _int()
    kind: str = _text()
    at: int = _int()
    detail: str = _text()


class ApprovalRow(Table, table=True):
    """A request for a person's consent to one exact action; consumed by the effect's first
    dispatch.
    """

    __tablename__: ClassVar[str] = "handrail_approval"
    __table_args__ = (
        CheckConstraint(one_of("status", ApprovalStatus), name="handrail_approval_status"),
        CheckConstraint(
            "(status = 'consumed') = (effect_id IS NOT NULL)", name="handrail_approval_consumed"
        ),
        CheckConstraint("approvers IN (1, 2)", name="handrail_approval_approvers"),
        Index("handrail_approval_run", "run_id"),
        Index(
            "handrail_approval_open",
            "run_id",
            unique=True,  # one open request a run
            postgresql_where=text("status = 'pending'"),
            sqlite_where=text("status = 'pending'"),
        ),
        Index(
            "handrail_approval_queue",
            "requested_at",
            postgresql_where=text("status = 'pending'"),
            sqlite_where=text("status = 'pending'"),
        ),
    )

    id: str = _text(key=True)
    run_id: str = Field(foreign_key="handrail_run.id", sa_type=Text)
    tenant: str = _text()
    workflow: str = _text()
    step: int = _int()
    state_version: int = _int()
    tool: str = _text()
    contract_version: str = _text()
    contract_hash: str = _text()
    intent_key: str | None = _text(null=True)
    arguments: str = _text()
    arguments_hash: str = _text()
    amount: int | None = _int(null=True)
    subject: str = _text()
    approvers: int = _int()
    requester_approves: int = _int()  # 0 or 1
    status: str = _text()
    requested_at: int = _int()
    expires_at: int = _int()
    decided_at: int | None = _int(null=True)
    decided_by: str | None = _text(null=True)
    effect_id: str | None = _text(null=True)


class ApprovalTokenRow(Table, table=True):
    """A token by which a person may consent, once; only its hash is known here."""

    __tablename__: ClassVar[str] = "handrail_approval_token"
    __table_args__ = (
        CheckConstraint(
            "(used_at IS NULL) = (used_by IS NULL)", name="handrail_approval_token_used"
        ),
        Index("handrail_approval_token_of", "approval_id"),
    )

    hash: str = _text(key=True)
    approval_id: str = Field(foreign_key="handrail_approval.id", sa_type=Text)
    issued_to: str | None = _text(null=True)
    issued_at: int = _int()
    used_at: int | None = _int(null=True)
    used_by: str | None = _text(null=True)


class ConsentRow(Table, table=True):
    """A person's consent to one request: nobody counts twice."""

    __tablename__: ClassVar[str] = "handrail_consent"

    approval_id: str = Field(primary_key=True, foreign_key="handrail_approval.id", sa_type=Text)
    who: str = _text(key=True)
    at: int = _int()
    token_hash: str = _text()


class HandoffRow(Table, table=True):
    """A package for a person: why, what is verified, what was about to be done, what is left."""

    __tablename__: ClassVar[str] = "handrail_handoff"
    __table_args__ = (
        CheckConstraint("status IN ('open', 'resolved')", name="handrail_handoff_status"),
        CheckConstraint(
            "(status = 'resolved') = (resolution IS NOT NULL AND resolved_at IS NOT NULL)",
            name="handrail_handoff_resolved",
        ),
        CheckConstraint(
            "(claimed_by IS NULL) = (claimed_until IS NULL)", name="handrail_handoff_claimed"
        ),
        Index("handrail_handoff_run", "run_id"),
        # Each dispatch counts what is open of its subject.
        Index(
            "handrail_handoff_subject",
            "tenant",
            "subject",
            postgresql_where=text("status = 'open'"),
            sqlite_where=text("status = 'open'"),
        ),
        Index(
            "handrail_handoff_queue",
            "priority",
            "opened_at",
            postgresql_where=text("status = 'open'"),
            sqlite_where=text("status = 'open'"),
        ),
        Index(
            "handrail_handoff_open",
            "run_id",
            "reason",
            unique=True,
            postgresql_where=text("status = 'open'"),
            sqlite_where=text("status = 'open'"),
        ),
    )

    id: str = _text(key=True)
    run_id: str = Field(foreign_key="handrail_run.id", sa_type=Text)
    tenant: str = _text()
    workflow: str = _text()
    tool: str | None = _text(null=True)
    subject: str = _text()
    effect_id: str | None = _text(null=True)
    reason: str = _text()
    priority: int = _int()  # 1 is the most urgent
    package: str = _text()
    status: str = _text()
    version: int = _int(default=0)
    opened_at: int = _int()
    expires_at: int | None = _int(null=True)  # of a question
    escalates_at: int | None = _int(null=True)
    escalated_at: int | None = _int(null=True)
    claimed_by: str | None = _text(null=True)
    claimed_until: int | None = _int(null=True)
    assigned_to: str | None = _text(null=True)
    snoozed_until: int | None = _int(null=True)
    resolution: str | None = _text(null=True)
    resolved_at: int | None = _int(null=True)
    resolved_by: str | None = _text(null=True)
    resolved_reason: str | None = _text(null=True)
    resolved_evidence: str | None = _text(null=True)


class CommentRow(Table, table=True):
    """What a person has noted about a handoff, append-only."""

    __tablename__: ClassVar[str] = "handrail_comment"
    __table_args__ = (Index("handrail_comment_handoff", "handoff_id", "at"),)

    id: str = _text(key=True)
    handoff_id: str = Field(foreign_key="handrail_handoff.id", sa_type=Text)
    at: int = _int()
    who: str = _text()
    text: str = _text()


class PrincipalRow(Table, table=True):
    """A person who may look at runs and decide about them: the roles, and the tenants they are
    for.
    """

    __tablename__: ClassVar[str] = "handrail_principal"

    subject: str = _text(key=True)
    roles: str = _text()
    tenants: str | None = _text(null=True)  # a JSON list; none: all
    admitted_at: int = _int()


class AuditRow(Table, table=True):
    """One act of a person, append-only and chained: an edit or a gap shows."""

    __tablename__: ClassVar[str] = "handrail_audit"
    __table_args__ = (
        Index("handrail_audit_actor", "actor", "at"),
        Index("handrail_audit_run", "run_id"),
    )

    seq: int = _int(key=True)
    at: int = _int()
    actor: str = _text()
    roles: str = _text()
    act: str = _text()
    tenant: str | None = _text(null=True)
    run_id: str | None = _text(null=True)
    target: str = _text()
    reason: str = _text()
    before: str = _text()
    after: str = _text()
    previous: str = _text()
    hash: str = _text()


class AuditHeadRow(Table, table=True):
    """The last entry of the audit: whoever appends locks it, so that there is one chain."""

    __tablename__: ClassVar[str] = "handrail_audit_head"
    __table_args__ = (CheckConstraint("id = 1", name="handrail_audit_head_one"),)

    id: int = _int(key=True)
    seq: int = _int()
    hash: str = _text()


class WorkerRow(Table, table=True):
    """When a part of the fleet last made progress: liveness is finished work, not an open
    socket.
    """

    __tablename__: ClassVar[str] = "handrail_heartbeat"

    name: str = _text(key=True)
    kind: str = _text()
    at: int = _int()


class PauseRow(Table, table=True):
    """A pause that a person has ordered: while the row is there, no write in its scope is
    dispatched.
    """

    __tablename__: ClassVar[str] = "handrail_pause"
    __table_args__ = (
        CheckConstraint(one_of("scope", Scope), name="handrail_pause_scope"),
        CheckConstraint("(scope = 'fleet') = (name = '')", name="handrail_pause_name"),
    )

    scope: str = _text(key=True)
    name: str = _text(key=True)  # of the tenant, workflow or tool; '' for the fleet
    reason: str = _text()
    paused_by: str = _text()
    paused_at: int = _int()


class RewindRow(Table, table=True):
    """The ledger was set back: until it is cleared, what may have been sent in the lost time is
    asked about before it is sent.
    """

    __tablename__: ClassVar[str] = "handrail_rewind"
    __table_args__ = (
        CheckConstraint("lost_from <= lost_until", name="handrail_rewind_lost"),
        CheckConstraint(
            "(cleared_at IS NULL) = (cleared_by IS NULL)", name="handrail_rewind_cleared"
        ),
    )

    number: int = _int(key=True)
    lost_from: int = _int()
    lost_until: int = _int()
    reason: str = _text()
    marked_by: str = _text()
    cleared_at: int | None = _int(null=True)
    cleared_by: str | None = _text(null=True)


class WorkflowRow(Table, table=True):
    """A workflow that some worker of the fleet has announced: what accepting a run of it takes."""

    __tablename__: ClassVar[str] = "handrail_workflow"

    name: str = _text(key=True)
    version: str = _text(key=True)
    announced_at: int = _int()  # at first
    seen_at: int = _int()  # when a live worker last said that it has this version
    entry: str = _text()


class SchemaRow(Table, table=True):
    """Which programs may use this schema: any that knows this revision, or a later one."""

    __tablename__: ClassVar[str] = "handrail_schema"
    __table_args__ = (CheckConstraint("id = 1", name="handrail_schema_one"),)

    id: int = _int(key=True)
    oldest_program: str = _text()
