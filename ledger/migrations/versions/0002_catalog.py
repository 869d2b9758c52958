"""The catalog of workflows, and what older programs may still use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

#: A program that knows no revision but this one, or a later one, works on this schema.
OLDEST_PROGRAM = "0001"
#: What is known of a run when it is accepted.
ACCEPTED = (
    "id, tenant, workflow, workflow_version, goal, principal, input, budget, limits, "
    "dedupe_key, traceparent, mode, created_at, status, traced_status, reason, due_at, "
    "wake_at, deadline_at, expires_at, phase, steps_left, model_calls_left, tool_calls_left, "
    "tool_calls_reserved, compensations_reserved, tokens_left, cost_microusd_left, "
    "output_bytes_left, step, state_version, observation_count, trace_seq, levels, pending, "
    "told, answer"
)


def words(name: str, *, null: bool = False) -> sa.Column[str]:
    """Return a column of text."""
    return sa.Column(name, sa.Text(), nullable=null)


def number(name: str, *, null: bool = False) -> sa.Column[int]:
    """Return a column of whole numbers: counts, versions, instants in milliseconds."""
    return sa.Column(name, sa.BigInteger(), autoincrement=False, nullable=null)


def upgrade() -> None:
    """Add the tables; nothing of what is there changes."""
    op.create_table(
        "handrail_workflow",
        words("name"),
        words("version"),
        number("announced_at"),
        number("seen_at"),
        words("entry"),
        sa.PrimaryKeyConstraint("name", "version"),
    )
    op.create_table(
        "handrail_schema",
        number("id"),
        words("oldest_program"),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("id = 1", name="handrail_schema_one"),
    )
    op.execute(f"INSERT INTO handrail_schema VALUES (1, '{OLDEST_PROGRAM}')")
    if op.get_context().dialect.name == "sqlite":
        accept_runs_at_once()


def accept_runs_at_once() -> None:
    """Let one statement write all that a new run brings along: SQLite writes one table a statement,
    so it goes through a view. Only what was inserted gets its trace and its allowances.
    """
    names = ACCEPTED
    new = ", ".join(f"NEW.{name}" for name in ACCEPTED.split(", "))
    op.execute(
        f"CREATE VIEW handrail_accept AS SELECT {names}, '' AS writer, '' AS events,"
        " '' AS per_tool FROM handrail_run WHERE false"
    )
    op.execute(
        "CREATE TRIGGER handrail_accept_run INSTEAD OF INSERT ON handrail_accept BEGIN"
        f" INSERT INTO handrail_run ({names}) SELECT {new} WHERE true ON CONFLICT DO NOTHING;"
        " INSERT INTO handrail_trace (run_id, seq, count, writer, at, events)"
        " SELECT NEW.id, 0, NEW.trace_seq, NEW.writer, NEW.created_at, NEW.events"
        " WHERE changes() = 1;"
        " INSERT INTO handrail_tool_allowance (run_id, tool, calls_left)"
        " SELECT NEW.id, key, value FROM json_each(NEW.per_tool) WHERE EXISTS (SELECT 1"
        " FROM handrail_trace WHERE run_id = NEW.id AND seq = 0 AND writer = NEW.writer);"
        " END"
    )


def downgrade() -> None:
    """Drop them."""
    if op.get_context().dialect.name == "sqlite":
        op.execute("DROP VIEW handrail_accept")  # with its trigger
    for table in ("handrail_schema", "handrail_workflow"):
        op.drop_table(table)
