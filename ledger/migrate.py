"""Brings a database to the ledger's schema, takes it back, and tells whether it is there.

An upgrade is one transaction under a lock: it happens as a whole or not at all, and of two that
start together one waits and finds nothing left to do. The schema's version is kept in a table of
our own, so a host that uses Alembic too keeps its history apart.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Final, TypeAlias

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext, RevisionStep
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import text
from sqlalchemy.engine import URL, Connection, create_engine, make_url
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateIndex, CreateTable, DDLElement

from handrail.ledger.database import Database
from handrail.ledger.errors import (
    DatabaseUnavailable,
    UnknownRevision,
    UnsupportedDatabase,
)
from handrail.ledger.schema import (
    HEAD,
    OLDEST_PROGRAM,
    VERSION_TABLE,
    allows_us,
    check_migrated,
    revision_of,
)
from handrail.ledger.tables import METADATA

__all__ = [
    "HEAD",
    "VERSION_TABLE",
    "check_migrated",
    "create_all",
    "current",
    "downgrade",
    "include_name",
    "statements_of",
    "upgrade",
]

#: Records: written once, deleted with their run, never changed.
APPEND_ONLY: Final = (
    "handrail_trace",
    "handrail_observation",
    "handrail_evidence",
    "handrail_consent",
    "handrail_comment",
    "handrail_audit",
)

_OURS: Final = "handrail_"
_LOCK_KEY: Final = int.from_bytes(b"handrail", "big")  # an advisory lock's key has 64 bits
#: A change that waits for a table makes everybody behind it wait: better to give up and try later.
_LOCK_TIMEOUT_S: Final = 10
_CONNECT_TIMEOUT_S: Final = 5

#: How Alembic lists the steps between the revisions that were found and the one that is wanted.
_Plan: TypeAlias = Callable[[ScriptDirectory, str, Any], Iterable[RevisionStep]]


def upgrade(
    url: str | URL,
    revision: str = "head",
    *,
    schema: str = "",
    versions: Sequence[Path] = (),
) -> str:
    """Bring a database up to a revision and return the one it is at; a second call changes nothing.

    A newer schema that allows this program stays as it is, too. `schema` (PostgreSQL only) is where
    the tables are, and is created where it is missing; `versions` are folders with revisions beside
    our own. Raises `UnsupportedDatabase`, `DatabaseUnavailable` (also where another upgrade or a
    long transaction held its lock for ten seconds), and `UnknownRevision` where the database is too
    new for this program.
    """
    database = Database(url, schema=schema)
    reached = _migrate(database, revision, ScriptDirectory._upgrade_revs, versions)
    if reached is None:  # "base" is no place that leads up
        raise UnknownRevision(revision)
    return reached


def downgrade(url: str | URL, revision: str = "base", *, schema: str = "") -> str | None:
    """Take a database back to a revision, or drop all our tables ("base"); raises as `upgrade`."""
    return _migrate(Database(url, schema=schema), revision, ScriptDirectory._downgrade_revs)


def current(url: str | URL, *, schema: str = "") -> str | None:
    """Return the revision that a database is at, or None where it has none of our tables."""
    database = Database(url, schema=schema)
    try:
        return revision_of(database)
    finally:
        database.close()


def create_all(database: Database) -> None:
    """Create the schema in an empty database over its own connection.

    The result is that of `upgrade`, its version included; an in-memory SQLite can be reached in no
    other way.
    """
    with database.transaction() as session:
        if database.schema:
            session.run(f'CREATE SCHEMA IF NOT EXISTS "{database.schema}"', {})
        for statement in _statements(database.postgres):
            session.run(statement, {})


def statements_of(revision: str, *, postgres: bool, back: bool = False) -> list[str]:
    """Return the statements that bring a database from the revision before to this one (`back`: to
    the one before), and record it, for whoever runs migrations of its own, as Django does. Raises
    `UnknownRevision`.
    """
    written: list[str] = []
    with as_file(files("handrail.ledger.migrations")) as directory:
        script = ScriptDirectory(str(directory))
        try:
            found = script.get_revision(revision)
        except CommandError:
            raise UnknownRevision(revision) from None
        before = None if found.down_revision is None else str(found.down_revision)

        def steps(*_: object) -> Iterable[RevisionStep]:
            if back:
                return script._downgrade_revs(before or "base", revision)
            return script._upgrade_revs(revision, before or "base")

        context = MigrationContext.configure(
            dialect_name="postgresql" if postgres else "sqlite",
            dialect_opts={"paramstyle": "named"},  # or each % would be doubled
            opts={
                "as_sql": True,
                "output_buffer": _Buffer(written),
                "version_table": VERSION_TABLE,
                "starting_rev": revision if back else before,
                "fn": steps,
            },
        )
        with Operations.context(context):
            context.run_migrations()
    statements = (text.strip().removesuffix(";") for text in written)
    return [text for text in statements if text and not text.startswith("--")]


class _Buffer:
    """Keeps each statement apart: some hold semicolons."""

    def __init__(self, written: list[str]) -> None:
        self._written = written

    def write(self, text: str) -> None:
        self._written.append(text)

    def flush(self) -> None:
        """Nothing is held back."""


def include_name(name: str | None, kind: str, parents: MutableMapping[Any, str | None]) -> bool:
    """Tell a host's Alembic to pass over our tables: `configure(..., include_name=include_name)`.

    They are in no MetaData of the host's, so its autogenerate would take them for left-overs.
    """
    return kind != "table" or not (name or "").startswith(_OURS)


# ---- inside --------------------------------------------------------------------------------------


def _migrate(
    database: Database, revision: str, plan: _Plan, versions: Sequence[Path] = ()
) -> str | None:
    if database.in_memory:
        raise UnsupportedDatabase(database.shown, "it is gone when its connection closes")
    options: dict[str, Any] = {"poolclass": NullPool}
    if database.postgres:
        address = database.url.set(drivername="postgresql+psycopg")
        options["connect_args"] = {"connect_timeout": _CONNECT_TIMEOUT_S}
    else:
        address = database.url.set(drivername="sqlite")
        options["connect_args"] = {"timeout": _LOCK_TIMEOUT_S}
    try:
        engine = create_engine(address, **options)
    except ImportError:
        raise UnsupportedDatabase(
            database.shown, "PostgreSQL needs psycopg (pip install 'handrail[postgres]')"
        ) from None
    try:
        with engine.begin() as connection:
            _lock(connection)
            if database.schema:
                _go_into(connection, database.schema)
            return _run(connection, revision, plan, versions)
    except DatabaseError as error:
        code = getattr(error.orig, "sqlite_errorcode", None)
        away = isinstance(error, OperationalError) and code != sqlite3.SQLITE_ERROR
        if not away and code != sqlite3.SQLITE_NOTADB:
            raise  # the statement is at fault, and would be later too
        problem = (str(error.orig).splitlines() or ["no reason given"])[0]
        raise DatabaseUnavailable(f"{database.shown}: {problem}") from error


def _lock(connection: Connection) -> None:
    """Let one upgrade at a time into the database, until its transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT_S}s'")
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK_KEY})")
    else:
        # The driver begins late, and not at all for DDL; it commits what we begin. Where a host's
        # listener has begun for every engine of the process, its transaction serves.
        if not connection.connection.dbapi_connection.in_transaction:  # type: ignore[union-attr]
            connection.exec_driver_sql("BEGIN IMMEDIATE")


def _go_into(connection: Connection, schema: str) -> None:
    """Have everything that follows happen in one schema, which is there from now on."""
    there = text("SELECT 1 FROM pg_namespace WHERE nspname = :schema")
    if connection.execute(there, {"schema": schema}).first() is None:  # it may not be ours to make
        connection.exec_driver_sql(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
    connection.exec_driver_sql(f'SET LOCAL search_path TO "{schema}"')


class _Found:
    """The connection of an upgrade, for the questions of `handrail.ledger.schema`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(row) for row in self._connection.execute(text(sql), params).mappings()]


def _run(
    connection: Connection, revision: str, plan: _Plan, versions: Sequence[Path]
) -> str | None:
    with as_file(files("handrail.ledger.migrations")) as directory:
        places = [directory / "versions", *versions]
        script = ScriptDirectory(str(directory), version_locations=[str(place) for place in places])

        def steps(found: Any, _: MigrationContext) -> Iterable[RevisionStep]:
            blamed = ", ".join(found)
            try:
                known = _known(script, found)
                upwards = plan is ScriptDirectory._upgrade_revs and revision == "head"
                if not known and upwards and allows_us(_Found(connection), blamed):
                    return ()  # of a newer release, under which this program may go on
                script.get_revisions(found)
                blamed = revision
                return plan(script, revision, found)
            except CommandError:
                raise UnknownRevision(blamed) from None

        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "fn": steps}
        )
        with Operations.context(context):
            context.run_migrations()
        return context.get_current_revision()


def _known(script: ScriptDirectory, found: Any) -> bool:
    try:
        script.get_revisions(found)
    except CommandError:
        return False
    return True


@lru_cache
def _statements(postgres: bool) -> tuple[str, ...]:
    """Return the statements that create at once what the migrations add up to."""
    dialect = make_url("postgresql+psycopg://" if postgres else "sqlite://").get_dialect()()
    statements: list[DDLElement] = []
    for table in METADATA.sorted_tables:
        statements.append(CreateTable(table))
        statements += map(CreateIndex, sorted(table.indexes, key=lambda index: str(index.name)))
    return (
        *(str(statement.compile(dialect=dialect)) for statement in statements),
        *(_POSTGRES if postgres else _SQLITE),
        *(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE ON {table} "
            + (_REFUSAL_POSTGRES if postgres else _REFUSAL_SQLITE.format(table=table))
            for table in APPEND_ONLY
        ),
        f"CREATE TABLE {VERSION_TABLE} (\n\tversion_num VARCHAR(32) NOT NULL, \n"
        f"\tCONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num)\n)",
        f"INSERT INTO {VERSION_TABLE} VALUES ('{HEAD}')",
        f"INSERT INTO handrail_schema VALUES (1, '{OLDEST_PROGRAM}')",
    )


_POSTGRES: Final = (
    """
    CREATE FUNCTION handrail_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'handrail: % is append-only', TG_TABLE_NAME
            USING ERRCODE = 'integrity_constraint_violation';
    END
    $$
    """,
    "ALTER TABLE handrail_run SET (autovacuum_vacuum_scale_factor = 0.01)",
)
#: What is known of a run when it is accepted; SQLite takes it through a view, see revision 0002.
_ACCEPTED: Final = (
    "id, tenant, workflow, workflow_version, goal, principal, input, budget, limits, "
    "dedupe_key, traceparent, mode, created_at, status, traced_status, reason, due_at, "
    "wake_at, deadline_at, expires_at, phase, steps_left, model_calls_left, tool_calls_left, "
    "tool_calls_reserved, compensations_reserved, tokens_left, cost_microusd_left, "
    "output_bytes_left, step, state_version, observation_count, trace_seq, levels, pending, "
    "told, answer"
)
_NEW: Final = ", ".join(f"NEW.{name}" for name in _ACCEPTED.split(", "))
_SQLITE: Final = (
    f"CREATE VIEW handrail_accept AS SELECT {_ACCEPTED}, '' AS writer, '' AS events,"
    " '' AS per_tool FROM handrail_run WHERE false",
    "CREATE TRIGGER handrail_accept_run INSTEAD OF INSERT ON handrail_accept BEGIN"
    f" INSERT INTO handrail_run ({_ACCEPTED}) SELECT {_NEW}"
    " WHERE true ON CONFLICT DO NOTHING;"
    " INSERT INTO handrail_trace (run_id, seq, count, writer, at, events)"
    " SELECT NEW.id, 0, NEW.trace_seq, NEW.writer, NEW.created_at, NEW.events"
    " WHERE changes() = 1;"
    " INSERT INTO handrail_tool_allowance (run_id, tool, calls_left)"
    " SELECT NEW.id, key, value FROM json_each(NEW.per_tool) WHERE EXISTS (SELECT 1"
    " FROM handrail_trace WHERE run_id = NEW.id AND seq = 0 AND writer = NEW.writer);"
    " END",
)
_REFUSAL_POSTGRES: Final = "FOR EACH ROW EXECUTE FUNCTION handrail_append_only()"
_REFUSAL_SQLITE: Final = "BEGIN SELECT RAISE(ABORT, 'handrail: {table} is append-only'); END"
