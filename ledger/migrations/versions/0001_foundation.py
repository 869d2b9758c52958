"""The tables of the first release, their rules, and the triggers that keep records as written."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Spelled out, not imported: a released revision builds the same tables for ever.
RUN_STATUSES = (
    "'queued', 'running', 'executing', 'awaiting_approval', 'awaiting_input', 'awaiting_branches',"
    " 'reconciling', 'cancelling', 'handed_off', 'completed', 'compensated', 'failed', 'cancelled',"
    " 'budget_exhausted'"
)
EFFECT_STATUSES = (
    "'planned', 'dispatched', 'applied', 'absent', 'unknown', 'compensating', 'compensated',"
    " 'handed_off', 'contradicted'"
)
TRIGGERS = "'timeout', 'cancellation', 'exception', 'reported', 'worker-lost', 'contrary-evidence'"
APPEND_ONLY = (
    "handrail_trace",
    "handrail_observation",
    "handrail_evidence",
    "handrail_consent",
    "handrail_comment",
    "handrail_audit",
)


def words(name: str, *, null: bool = False) -> sa.Column[str]:
    """Return a column of text."""
    return sa.Column(name, sa.Text(), nullable=null)


def number(name: str, *, null: bool = False, default: int | None = None) -> sa.Column[int]:
    """Return a column of whole numbers: counts, versions, instants in milliseconds."""
    server_default = None if default is None else sa.text(str(default))
    return sa.Column(
        name, sa.BigInteger(), autoincrement=False, nullable=null, server_default=server_default
    )


def of(column: str, table: str) -> sa.ForeignKeyConstraint:
    """Return the rule that a column holds the id of a row that exists."""
    return sa.ForeignKeyConstraint([column], [f"{table}.id"])


def partial_index(
    name: str, table: str, columns: list[str], where: str, *, unique: bool = False
) -> None:
    """Create an index of those rows alone that meet a condition."""
    condition = sa.text(where)
    op.create_index(
        name, table, columns, unique=unique, postgresql_where=condition, sqlite_where=condition
    )


def upgrade() -> None:
    """Create everything."""
    create_runs()
    create_records_of_runs()
    create_effects()
    create_approvals()
    create_handoffs()
    create_people()
    create_pauses()
    op.create_table(
        "handrail_heartbeat",
        words("name"),
        words("kind"),
        number("at"),
        sa.PrimaryKeyConstraint("name"),
    )
    refuse_updates()
    vacuum_runs_often()


def create_runs() -> None:
    """Create the runs and the tools' own limits."""
    op.create_table(
        "handrail_run",
        words("id"),
        words("tenant"),
        words("workflow"),
        words("workflow_version"),
        words("goal"),
        words("principal"),
        words("input"),
        words("budget"),
        words("limits"),
        words("dedupe_key", null=True),
        words("traceparent", null=True),
        words("mode"),
        number("created_at"),
        words("status"),
        words("traced_status"),
        words("reason", null=True),
        number("epoch", default=0),
        words("claim_id", null=True),
        words("holder", null=True),
        number("lease_until", null=True),
        number("attempts", default=0),
        words("refusal", null=True),
        number("due_at", null=True),
        number("wake_at", null=True),
        number("publishes", default=0),
        number("deadline_at", null=True),
        number("remaining_ms", null=True),
        number("expires_at"),
        number("cancel_requested_at", null=True),
        words("phase"),
        number("steps_left"),
        number("model_calls_left"),
        number("tool_calls_left"),
        number("tool_calls_reserved", default=0),
        number("compensations_reserved", default=0),
        number("tokens_left"),
        number("cost_microusd_left"),
        number("output_bytes_left"),
        number("step", default=0),
        number("state_version", default=0),
        number("observation_count", default=0),
        number("trace_seq", default=0),
        words("levels"),
        words("pending", null=True),
        words("told", null=True),
        words("answer", null=True),
        words("effect_id", null=True),
        words("undoing_effect_id", null=True),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint(f"status IN ({RUN_STATUSES})", name="handrail_run_status"),
        sa.CheckConstraint(
            "traced_status = status OR traced_status IN ('queued', 'running')",
            name="handrail_run_traced_status",
        ),
        sa.CheckConstraint(
            "phase IN ('decide', 'read', 'write', 'resume')", name="handrail_run_phase"
        ),
        sa.CheckConstraint("mode IN ('live', 'shadow')", name="handrail_run_mode"),
        sa.CheckConstraint(
            "steps_left >= 0 AND model_calls_left >= 0 AND tool_calls_left >= 0"
            " AND tokens_left >= 0 AND cost_microusd_left >= 0 AND output_bytes_left >= 0"
            " AND tool_calls_reserved IN (0, 1) AND compensations_reserved IN (0, 1, 2)",
            name="handrail_run_budget",
        ),
        sa.CheckConstraint(
            "lease_until IS NULL OR (claim_id IS NOT NULL AND holder IS NOT NULL)",
            name="handrail_run_lease",
        ),
        sa.CheckConstraint(
            "status NOT IN ('completed', 'compensated', 'failed', 'cancelled', 'budget_exhausted')"
            " OR (reason IS NOT NULL AND lease_until IS NULL AND wake_at IS NULL)",
            name="handrail_run_terminal",
        ),
    )
    partial_index(
        "handrail_run_wake",
        "handrail_run",
        ["wake_at"],
        "wake_at IS NOT NULL AND status <> 'reconciling'",
    )
    partial_index(
        "handrail_run_doubt",
        "handrail_run",
        ["wake_at"],
        "wake_at IS NOT NULL AND status = 'reconciling'",
    )
    partial_index(
        "handrail_run_dedupe",
        "handrail_run",
        ["tenant", "mode", "dedupe_key"],
        "dedupe_key IS NOT NULL",
        unique=True,
    )
    op.create_table(
        "handrail_tool_allowance",
        words("run_id"),
        words("tool"),
        number("calls_left"),
        sa.PrimaryKeyConstraint("run_id", "tool"),
        sa.CheckConstraint("calls_left >= 0", name="handrail_tool_allowance_left"),
        of("run_id", "handrail_run"),
    )


def create_records_of_runs() -> None:
    """Create what a run writes down as it goes."""
    op.create_table(
        "handrail_trace",
        words("run_id"),
        number("seq"),
        number("count"),
        words("writer"),
        number("at"),
        words("events"),
        sa.PrimaryKeyConstraint("run_id", "seq"),
        sa.CheckConstraint("count >= 0", name="handrail_trace_count"),
        of("run_id", "handrail_run"),
    )
    op.create_table(
        "handrail_observation",
        words("run_id"),
        number("seq"),
        words("source"),
        words("text"),
        words("digest"),
        sa.PrimaryKeyConstraint("run_id", "seq"),
        of("run_id", "handrail_run"),
    )
    op.create_index(
        "handrail_observation_digest", "handrail_observation", ["run_id", "digest"], unique=True
    )
    op.create_table(
        "handrail_output",
        words("run_id"),
        words("name"),
        number("version"),
        words("value"),
        sa.PrimaryKeyConstraint("run_id", "name", "version"),
        of("run_id", "handrail_run"),
    )


def create_effects() -> None:
    """Create the intents, who rests on them, and what was learned about them."""
    op.create_table(
        "handrail_effect",
        words("id"),
        words("tenant"),
        words("intent_key"),
        words("tool"),
        words("contract_version"),
        words("arguments"),
        words("arguments_hash"),
        words("terms"),
        number("created_at"),
        words("status"),
        number("token", default=0),
        words("dispatcher", null=True),
        words("owner_run_id", null=True),
        number("attempts", default=0),
        words("doubt"),
        number("first_dispatched_at", null=True),
        number("dispatch_deadline_at", null=True),
        number("unknown_since", null=True),
        words("doubt_trigger", null=True),
        number("queries_left"),
        number("absences", default=0),
        number("next_query_at", null=True),
        words("result", null=True),
        words("evidence", null=True),
        words("approval_id", null=True),
        words("compensation", null=True),
        words("compensates", null=True),
        words("planned_by", null=True),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint(f"status IN ({EFFECT_STATUSES})", name="handrail_effect_status"),
        sa.CheckConstraint(
            "doubt IN ('none', 'unproven', 'by-query')", name="handrail_effect_doubt"
        ),
        sa.CheckConstraint(
            f"doubt_trigger IS NULL OR doubt_trigger IN ({TRIGGERS})",
            name="handrail_effect_trigger",
        ),
        sa.CheckConstraint(
            "queries_left >= 0 AND absences >= 0 AND attempts >= 0 AND token >= 0",
            name="handrail_effect_counts",
        ),
        sa.CheckConstraint(
            "status <> 'dispatched' OR (dispatcher IS NOT NULL AND owner_run_id IS NOT NULL"
            " AND dispatch_deadline_at IS NOT NULL)",
            name="handrail_effect_dispatched",
        ),
        sa.CheckConstraint(
            "status <> 'compensating' OR compensation IS NOT NULL",
            name="handrail_effect_compensating",
        ),
    )
    op.create_index(
        "handrail_effect_intent", "handrail_effect", ["tenant", "intent_key"], unique=True
    )
    partial_index(
        "handrail_effect_unresolved",
        "handrail_effect",
        ["unknown_since"],
        "unknown_since IS NOT NULL",
    )
    partial_index(
        "handrail_effect_doubtful", "handrail_effect", ["tool"], "unknown_since IS NOT NULL"
    )
    op.create_table(
        "handrail_effect_holder",
        words("effect_id"),
        words("run_id"),
        sa.PrimaryKeyConstraint("effect_id", "run_id"),
        of("effect_id", "handrail_effect"),
        of("run_id", "handrail_run"),
    )
    op.create_index("handrail_effect_holder_run", "handrail_effect_holder", ["run_id"])
    op.create_table(
        "handrail_evidence",
        words("id"),
        words("effect_id"),
        number("token"),
        words("kind"),
        number("at"),
        words("detail"),
        sa.PrimaryKeyConstraint("id"),
        of("effect_id", "handrail_effect"),
    )
    op.create_index("handrail_evidence_effect", "handrail_evidence", ["effect_id", "at"])


def create_approvals() -> None:
    """Create the requests for consent, the tokens by which it is given, and the consents."""
    op.create_table(
        "handrail_approval",
        words("id"),
        words("run_id"),
        words("tenant"),
        words("workflow"),
        number("step"),
        number("state_version"),
        words("tool"),
        words("contract_version"),
        words("contract_hash"),
        words("intent_key", null=True),
        words("arguments"),
        words("arguments_hash"),
        number("amount", null=True),
        words("subject"),
        number("approvers"),
        number("requester_approves"),
        words("status"),
        number("requested_at"),
        number("expires_at"),
        number("decided_at", null=True),
        words("decided_by", null=True),
        words("effect_id", null=True),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint(
            "status IN ('pending', 'approved', 'rejected', 'expired', 'withdrawn', 'consumed')",
            name="handrail_approval_status",
        ),
        sa.CheckConstraint(
            "(status = 'consumed') = (effect_id IS NOT NULL)", name="handrail_approval_consumed"
        ),
        sa.CheckConstraint("approvers IN (1, 2)", name="handrail_approval_approvers"),
        of("run_id", "handrail_run"),
    )
    op.create_index("handrail_approval_run", "handrail_approval", ["run_id"])
    pending = "status = 'pending'"
    partial_index("handrail_approval_open", "handrail_approval", ["run_id"], pending, unique=True)
    partial_index("handrail_approval_queue", "handrail_approval", ["requested_at"], pending)
    op.create_table(
        "handrail_approval_token",
        words("hash"),
        words("approval_id"),
        words("issued_to", null=True),
        number("issued_at"),
        number("used_at", null=True),
        words("used_by", null=True),
        sa.PrimaryKeyConstraint("hash"),
        sa.CheckConstraint(
            "(used_at IS NULL) = (used_by IS NULL)", name="handrail_approval_token_used"
        ),
        of("approval_id", "handrail_approval"),
    )
    op.create_index("handrail_approval_token_of", "handrail_approval_token", ["approval_id"])
    op.create_table(
        "handrail_consent",
        words("approval_id"),
        words("who"),
        number("at"),
        words("token_hash"),
        sa.PrimaryKeyConstraint("approval_id", "who"),
        of("approval_id", "handrail_approval"),
    )


def create_handoffs() -> None:
    """Create the packages for a person, and what people note about them."""
    op.create_table(
        "handrail_handoff",
        words("id"),
        words("run_id"),
        words("tenant"),
        words("workflow"),
        words("tool", null=True),
        words("subject"),
        words("effect_id", null=True),
        words("reason"),
        number("priority"),
        words("package"),
        words("status"),
        number("version", default=0),
        number("opened_at"),
        number("expires_at", null=True),
        number("escalates_at", null=True),
        number("escalated_at", null=True),
        words("claimed_by", null=True),
        number("claimed_until", null=True),
        words("assigned_to", null=True),
        number("snoozed_until", null=True),
        words("resolution", null=True),
        number("resolved_at", null=True),
        words("resolved_by", null=True),
        words("resolved_reason", null=True),
        words("resolved_evidence", null=True),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("status IN ('open', 'resolved')", name="handrail_handoff_status"),
        sa.CheckConstraint(
            "(status = 'resolved') = (resolution IS NOT NULL AND resolved_at IS NOT NULL)",
            name="handrail_handoff_resolved",
        ),
        sa.CheckConstraint(
            "(claimed_by IS NULL) = (claimed_until IS NULL)", name="handrail_handoff_claimed"
        ),
        of("run_id", "handrail_run"),
    )
    op.create_index("handrail_handoff_run", "handrail_handoff", ["run_id"])
    is_open = "status = 'open'"
    partial_index("handrail_handoff_subject", "handrail_handoff", ["tenant", "subject"], is_open)
    partial_index("handrail_handoff_queue", "handrail_handoff", ["priority", "opened_at"], is_open)
    partial_index(
        "handrail_handoff_open", "handrail_handoff", ["run_id", "reason"], is_open, unique=True
    )
    op.create_table(
        "handrail_comment",
        words("id"),
        words("handoff_id"),
        number("at"),
        words("who"),
        words("text"),
        sa.PrimaryKeyConstraint("id"),
        of("handoff_id", "handrail_handoff"),
    )
    op.create_index("handrail_comment_handoff", "handrail_comment", ["handoff_id", "at"])


def create_people() -> None:
    """Create who may do what, and the record of what they did."""
    op.create_table(
        "handrail_principal",
        words("subject"),
        words("roles"),
        words("tenants", null=True),
        number("admitted_at"),
        sa.PrimaryKeyConstraint("subject"),
    )
    op.create_table(
        "handrail_audit",
        number("seq"),
        number("at"),
        words("actor"),
        words("roles"),
        words("act"),
        words("tenant", null=True),
        words("run_id", null=True),
        words("target"),
        words("reason"),
        words("before"),
        words("after"),
        words("previous"),
        words("hash"),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("handrail_audit_actor", "handrail_audit", ["actor", "at"])
    op.create_index("handrail_audit_run", "handrail_audit", ["run_id"])
    op.create_table(
        "handrail_audit_head",
        number("id"),
        number("seq"),
        words("hash"),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("id = 1", name="handrail_audit_head_one"),
    )


def create_pauses() -> None:
    """Create what keeps writes from being dispatched."""
    op.create_table(
        "handrail_pause",
        words("scope"),
        words("name"),
        words("reason"),
        words("paused_by"),
        number("paused_at"),
        sa.PrimaryKeyConstraint("scope", "name"),
        sa.CheckConstraint(
            "scope IN ('fleet', 'tenant', 'workflow', 'tool')", name="handrail_pause_scope"
        ),
        sa.CheckConstraint("(scope = 'fleet') = (name = '')", name="handrail_pause_name"),
    )


def refuse_updates() -> None:
    """Let nobody rewrite a record. Deleting stays allowed: whole runs are pruned."""
    postgres = op.get_context().dialect.name == "postgresql"
    if postgres:
        op.execute(
            """
            CREATE FUNCTION handrail_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                RAISE EXCEPTION 'handrail: % is append-only', TG_TABLE_NAME
                    USING ERRCODE = 'integrity_constraint_violation';
            END
            $$
            """
        )
    for table in APPEND_ONLY:
        refusal = (
            "FOR EACH ROW EXECUTE FUNCTION handrail_append_only()"
            if postgres
            else f"BEGIN SELECT RAISE(ABORT, 'handrail: {table} is append-only'); END"
        )
        op.execute(f"CREATE TRIGGER {table}_append_only BEFORE UPDATE ON {table} {refusal}")


def vacuum_runs_often() -> None:
    """Bound the dead versions of runs by what is done, not by a fifth of all that was ever done.

    A run moves in the wake index with every claim and every commit, so no update of it can be
    heap-only (a lower fill factor gains nothing), and the sweep's scan meets every dead version.
    """
    if op.get_context().dialect.name == "postgresql":
        op.execute("ALTER TABLE handrail_run SET (autovacuum_vacuum_scale_factor = 0.01)")


def downgrade() -> None:
    """Drop everything, the records too."""
    for table in (
        "handrail_heartbeat",
        "handrail_pause",
        "handrail_audit_head",
        "handrail_audit",
        "handrail_principal",
        "handrail_comment",
        "handrail_handoff",
        "handrail_consent",
        "handrail_approval_token",
        "handrail_approval",
        "handrail_evidence",
        "handrail_effect_holder",
        "handrail_effect",
        "handrail_output",
        "handrail_observation",
        "handrail_trace",
        "handrail_tool_allowance",
        "handrail_run",
    ):
        op.drop_table(table)  # with its indexes and triggers
    if op.get_context().dialect.name == "postgresql":
        op.execute("DROP FUNCTION handrail_append_only()")
