"""At which version of the schema a database is. Light: what changes it is in `migrate`.

Each worker asks this once when it starts, and none of them needs the tables' declarations or
Alembic, which together would add a quarter to its memory.
"""

from __future__ import annotations

from typing import Final

from handrail.ledger.database import Database
from handrail.ledger.errors import NotMigrated

HEAD: Final = "0002"
#: The oldest program that may use this schema, by the newest revision that it knows.
OLDEST_PROGRAM: Final = "0001"
VERSION_TABLE: Final = "handrail_alembic_version"

_UNDEFINED_TABLE: Final = "42P01"


def check_migrated(database: Database) -> None:
    """Raise `NotMigrated` unless the database is at this program's revision; one statement."""
    found = revision_of(database)
    if found != HEAD:
        raise NotMigrated(found, HEAD)


def revision_of(database: Database) -> str | None:
    """Return the revision that a database is at, or None where it has none of our tables."""
    try:
        rows = database.run(f"SELECT version_num FROM {VERSION_TABLE}", {})
    except Exception as error:
        if _lacks_the_table(error):
            return None
        raise
    return ", ".join(sorted(row["version_num"] for row in rows)) or None


def _lacks_the_table(error: Exception) -> bool:
    return getattr(error, "sqlstate", None) == _UNDEFINED_TABLE or "no such table" in str(error)
