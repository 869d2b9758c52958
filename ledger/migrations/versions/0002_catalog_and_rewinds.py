"""The catalog of workflows, marks of a rewound ledger, and what older programs may still use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

#: A program that knows no revision but this one, or a later one, works on this schema.
OLDEST_PROGRAM = "0001"


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
        "handrail_rewind",
        number("number"),
        number("rewound_at"),
        words("reason"),
        words("declared_by"),
        number("cleared_at", null=True),
        words("cleared_by", null=True),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_table(
        "handrail_schema",
        number("id"),
        words("oldest_program"),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("id = 1", name="handrail_schema_one"),
    )
    op.execute(f"INSERT INTO handrail_schema VALUES (1, '{OLDEST_PROGRAM}')")


def downgrade() -> None:
    """Drop them."""
    for table in ("handrail_schema", "handrail_rewind", "handrail_workflow"):
        op.drop_table(table)
