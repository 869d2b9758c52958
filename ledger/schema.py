"""At which version of the schema a database is. Light: what changes it is in `migrate`.

Each worker asks this once when it starts, and none of them needs the tables' declarations or
Alembic, which together would add a quarter to its memory.
"""

from __future__ import annotations

from typing import Final

from handrail.ledger.errors import NotMigrated
from handrail.ledger.session import Session

HEAD: Final = "0003"
#: The oldest program that may use this schema, by the newest revision that it knows.
OLDEST_PROGRAM: Final = "0001"
VERSION_TABLE: Final = "handrail_alembic_version"

_UNDEFINED_TABLE: Final = "42P01"


def check_migrated(database: Session) -> str:
    """Return the revision that the database is at, this program's or a newer one that allows it.

    Raises `NotMigrated`. One statement where it is this program's own.
    """
    found = revision_of(database)
    if found is None or (found != HEAD and not allows_us(database, found)):
        raise NotMigrated(found, HEAD)
    return found


def allows_us(database: Session, found: str) -> bool:
    """Whether a newer release's schema says that this program may still work on it."""
    if found < HEAD:  # they are numbered, with zeros in front
        return False
    rows = database.run("SELECT oldest_program FROM handrail_schema", {})
    return bool(rows) and bool(rows[0]["oldest_program"] <= HEAD)


def revision_of(database: Session) -> str | None:
    """Return the revision that a database is at, or None where it has none of our tables."""
    try:
        rows = database.run(f"SELECT version_num FROM {VERSION_TABLE}", {})
    except Exception as error:
        if lacks_the_table(error):
            return None
        raise
    return ", ".join(sorted(row["version_num"] for row in rows)) or None


def lacks_the_table(error: Exception) -> bool:
    """Whether a statement failed because a table of ours is missing, whoever ran it."""
    causes = (error, error.__cause__, getattr(error, "orig", None))
    return "no such table" in str(error) or any(
        getattr(cause, "sqlstate", None) == _UNDEFINED_TABLE for cause in causes
    )
