"""What is known of a ledger that was set back to an earlier state."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def words(name: str, *, null: bool = False) -> sa.Column[str]:
    """Return a column of text."""
    return sa.Column(name, sa.Text(), nullable=null)


def number(name: str, *, null: bool = False) -> sa.Column[int]:
    """Return a column of whole numbers: counts, versions, instants in milliseconds."""
    return sa.Column(name, sa.BigInteger(), autoincrement=False, nullable=null)


def upgrade() -> None:
    """Add a table and a column. Programs that know neither go on, until the ledger is set back."""
    op.create_table(
        "handrail_rewind",
        number("number"),
        number("lost_from"),
        number("lost_until"),
        words("reason"),
        words("marked_by"),
        number("cleared_at", null=True),
        words("cleared_by", null=True),
        sa.PrimaryKeyConstraint("number"),
        sa.CheckConstraint("lost_from <= lost_until", name="handrail_rewind_lost"),
        sa.CheckConstraint(
            "(cleared_at IS NULL) = (cleared_by IS NULL)", name="handrail_rewind_cleared"
        ),
    )
    op.add_column("handrail_effect", number("rewind", null=True))
    op.create_index(
        "handrail_effect_rewind",
        "handrail_effect",
        ["rewind", "status"],
        postgresql_where=sa.text("rewind IS NOT NULL"),
        sqlite_where=sa.text("rewind IS NOT NULL"),
    )


def downgrade() -> None:
    """Drop them, unless that would send again what may have been sent."""
    marked = sa.text("SELECT count(*) FROM handrail_rewind WHERE cleared_at IS NULL")
    written = op.get_context().as_sql  # where only its statements are wanted, nobody can look
    if not written and op.get_bind().execute(marked).scalar():
        raise RuntimeError("the ledger is marked as set back: clear that first (ledger cleared)")
    op.drop_index("handrail_effect_rewind", "handrail_effect")
    op.drop_column("handrail_effect", "rewind")
    op.drop_table("handrail_rewind")
