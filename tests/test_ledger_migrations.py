"""The ledger's schema: built as a whole or not at all, the same way each time, beside a host's."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine
from sqlmodel import SQLModel

from handrail.ledger import migrate
from handrail.ledger.database import Database
from handrail.ledger.errors import (
    DatabaseUnavailable,
    NotMigrated,
    UnknownRevision,
    UnsupportedDatabase,
)
from handrail.ledger.migrate import (
    HEAD,
    VERSION_TABLE,
    check_migrated,
    create_all,
    current,
    downgrade,
    include_name,
    upgrade,
)
from handrail.ledger.tables import METADATA
from handrail.testing.services import EmbeddedPostgres

REFUSED = (sqlite3.IntegrityError, psycopg.IntegrityError)

UPGRADE_WHEN_TOLD = """
import sys
from handrail.ledger.migrate import upgrade
print("ready", flush=True)
sys.stdin.readline()
print(upgrade(sys.argv[1]))
"""

PG_CATALOG = """
    SELECT table_name || '.' || column_name AS name,
           concat_ws(' ', ordinal_position, data_type, is_nullable, column_default) AS definition
    FROM information_schema.columns WHERE table_schema = 'public'
    UNION ALL
    SELECT conrelid::regclass || '.' || conname, pg_get_constraintdef(oid)
    FROM pg_constraint WHERE connamespace = 'public'::regnamespace
    UNION ALL
    SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
    UNION ALL
    SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
    UNION ALL
    SELECT proname, pg_get_functiondef(oid) FROM pg_proc
    WHERE pronamespace = 'public'::regnamespace
    UNION ALL
    SELECT relname || ' storage', reloptions::text FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND reloptions IS NOT NULL
"""


@contextmanager
def new_database(kind: str, place: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Make an empty database and give its url."""
    if kind == "sqlite":
        yield f"sqlite:///{place}/ledger.db"
        return
    server: EmbeddedPostgres = request.getfixturevalue("postgres")
    name = re.sub(r"\W+", "_", place.name)
    yield server.create_database(name)
    server.drop_database(name)


@pytest.fixture(params=["sqlite", "postgres"])
def url(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty database of each kind."""
    with new_database(request.param, tmp_path, request) as address:
        yield address


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """The ledger's own connection to the database of `url`."""
    with closing(Database(url)) as opened:
        yield opened


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def ledger(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Database]:
    """A database with one run and one effect, for tests whose every write is refused."""
    place = tmp_path_factory.mktemp("rules")
    with (
        new_database(request.param, place, request) as address,
        closing(Database(address)) as opened,
    ):
        create_all(opened)
        store(opened, "handrail_run", RUN)
        store(opened, "handrail_effect", EFFECT)
        store(opened, "handrail_approval", APPROVAL)
        store(opened, "handrail_handoff", HANDOFF)
        store(opened, "handrail_principal", PRINCIPAL)
        store(opened, "handrail_audit", AUDIT)
        store(opened, "handrail_audit_head", {"id": 1})
        store(opened, "handrail_approval_token", {"hash": "t1", "approval_id": "a1"})
        store(opened, "handrail_consent", {"approval_id": "a1", "who": "bob"})
        yield opened


RUN = {
    "id": "r1",
    "status": "queued",
    "traced_status": "queued",
    "phase": "decide",
    "mode": "live",
}
EFFECT = {"id": "e1", "tenant": "t", "intent_key": "refund:1", "status": "planned", "doubt": "none"}
APPROVAL = {"id": "a1", "run_id": "r1", "status": "pending", "approvers": 1}
PRINCIPAL = {"subject": "bob", "roles": '["approver"]'}
AUDIT = {"seq": 1, "act": "admit"}
HANDOFF = {"id": "h1", "run_id": "r1", "reason": "unknown-effect", "status": "open"}


def store(database: Database, table: str, values: Mapping[str, Any]) -> None:
    """Insert a row; columns that must have a value and were given none get one without meaning."""
    columns = METADATA.tables[table].columns
    row = {c.name: "x" if isinstance(c.type, Text) else 0 for c in columns if not c.nullable}
    row |= values
    names, places = ", ".join(row), ", ".join(f":{name}" for name in row)
    database.run(f"INSERT INTO {table} ({names}) VALUES ({places})", row)


def schema(database: Database) -> dict[str, list[str]]:
    """Read from the database what it holds: columns, rules, indexes, triggers, functions, options.

    The lines of a definition are sorted: the order of a table's rules has no meaning.
    """
    sql = (
        PG_CATALOG
        if database.postgres
        else "SELECT name, sql AS definition FROM sqlite_master WHERE sql IS NOT NULL"
    )
    return {
        row["name"]: sorted(line.strip(" \t,") for line in _lines(row["definition"]))
        for row in database.run(sql, {})
    }


def _lines(definition: str) -> list[str]:
    """A definition's lines; what SQLite has added later stands beside the column before it."""
    return re.sub(r"(\n\t\w+ [A-Z]+), (?=\w)", r"\1,\n\t", definition).splitlines()


# Up and down


def test_what_marks_it_as_set_back_is_not_dropped_while_it_counts(
    url: str, database: Database
) -> None:
    upgrade(url)
    database.run(
        "INSERT INTO handrail_rewind (number, lost_from, lost_until, reason, marked_by)"
        " VALUES (1, 1, 2, 'restored', 'olga')",
        {},
    )
    with pytest.raises(RuntimeError, match="clear that first"):
        downgrade(url)
    database.run("UPDATE handrail_rewind SET cleared_at = 3, cleared_by = 'olga'", {})
    assert downgrade(url) is None


def test_up_down_and_up_again_leaves_what_the_first_way_up_built(
    url: str, database: Database
) -> None:
    assert upgrade(url) == HEAD == current(url)
    built = schema(database)

    assert downgrade(url) is None
    assert current(url) is None
    assert {name.partition(".")[0].removesuffix("_pkc") for name in schema(database)} == {
        VERSION_TABLE
    }

    assert upgrade(url) == HEAD
    assert schema(database) == built


def test_a_second_upgrade_changes_nothing(url: str, database: Database) -> None:
    upgrade(url)
    store(database, "handrail_run", RUN)
    built = schema(database)

    assert upgrade(url) == HEAD
    assert schema(database) == built
    assert [row["id"] for row in database.run("SELECT id FROM handrail_run", {})] == ["r1"]


def test_processes_that_upgrade_at_the_same_time_all_succeed(url: str, database: Database) -> None:
    """One does it, the others wait and find it done."""
    command = [sys.executable, "-c", UPGRADE_WHEN_TOLD, url]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("\n")
            racer.stdin.flush()
        answers = [racer.communicate(timeout=30)[0] for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()

    assert answers == [f"{HEAD}\n"] * 2
    check_migrated(database)


def test_an_upgrade_gives_up_where_another_does_not_end(
    url: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To wait for ever would look like success to nobody and like a hang to everybody."""
    monkeypatch.setattr(migrate, "_LOCK_TIMEOUT_S", 0.05)
    with database.transaction() as other:
        if database.postgres:
            other.run(f"SELECT pg_advisory_xact_lock({migrate._LOCK_KEY})", {})

        with pytest.raises(DatabaseUnavailable, match="lock"):
            upgrade(url)

    assert upgrade(url) == HEAD


def test_an_upgrade_that_fails_half_way_leaves_nothing(url: str, database: Database) -> None:
    database.run("CREATE TABLE handrail_heartbeat (mine TEXT)", {})  # the last table is taken
    before = schema(database)

    with pytest.raises(Exception, match="already exists"):
        upgrade(url)

    assert schema(database) == before


def test_any_driver_in_the_url_means_ours(url: str) -> None:
    for driver in ("postgresql", "postgresql+asyncpg"):
        assert upgrade(url.replace("postgresql+psycopg", driver)) == HEAD


def test_the_newest_revision_is_the_only_head_of_the_history() -> None:
    history = ScriptDirectory(str(files("handrail.ledger.migrations")))

    assert history.get_heads() == [HEAD]


# Is it there?


def test_an_empty_database_is_not_migrated(database: Database) -> None:
    with pytest.raises(NotMigrated) as caught:
        check_migrated(database)

    assert (caught.value.found, caught.value.wanted) == (None, HEAD)
    assert "handrail db upgrade" in str(caught.value)


def test_a_revision_of_another_release_is_found_and_left_alone(
    url: str, database: Database
) -> None:
    upgrade(url)
    database.run(f"UPDATE {VERSION_TABLE} SET version_num = '9999'", {})
    database.run("UPDATE handrail_schema SET oldest_program = '9999'", {})

    with pytest.raises(NotMigrated) as caught:
        check_migrated(database)
    assert (caught.value.found, caught.value.wanted) == ("9999", HEAD)
    assert "db upgrade" not in str(caught.value)  # which this release could not do
    assert "a newer release" in str(caught.value)
    for move in (upgrade, downgrade):
        with pytest.raises(UnknownRevision, match="9999"):
            move(url)
    assert current(url) == "9999"


@pytest.mark.parametrize("revision", ["nowhere", "base"])
def test_there_is_no_way_up_to_what_is_no_revision(url: str, revision: str) -> None:
    with pytest.raises(UnknownRevision, match=revision):
        upgrade(url, revision)

    assert current(url) is None


def test_the_check_is_one_statement(url: str) -> None:
    """Every worker asks it as it starts."""
    statements = []

    class Recorded(Database):
        def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
            statements.append(sql)
            return super().run(sql, params)

    upgrade(url)
    with closing(Recorded(url)) as database:
        check_migrated(database)

    assert len(statements) == 1


def test_a_database_that_cannot_be_reached_is_unavailable(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}/no/folder.db", f"postgresql://u:secret@/x?host={tmp_path}"):
        for ask in (upgrade, downgrade, current):
            with pytest.raises(DatabaseUnavailable) as caught:
                ask(url)
            assert "secret" not in str(caught.value)


# One schema, built in two ways


def test_the_migrations_and_the_tables_say_the_same(
    url: str, database: Database, tmp_path_factory: pytest.TempPathFactory, request: Any
) -> None:
    kind = "postgres" if database.postgres else "sqlite"
    place = tmp_path_factory.mktemp("at_once")
    upgrade(url)
    with new_database(kind, place, request) as other, closing(Database(other)) as at_once:
        create_all(at_once)

        assert schema(database) == schema(at_once)
        check_migrated(at_once)
        assert upgrade(other) == HEAD


def test_autogenerate_finds_nothing_left_to_migrate(url: str) -> None:
    upgrade(url)

    assert difference(url, METADATA, version_table=VERSION_TABLE) == []


def test_an_in_memory_ledger_is_created_on_its_own_connection() -> None:
    with closing(Database("sqlite://")) as database:
        create_all(database)

        check_migrated(database)


def test_an_in_memory_ledger_cannot_be_upgraded_from_outside() -> None:
    with pytest.raises(UnsupportedDatabase, match="gone when its connection closes"):
        upgrade("sqlite://")


# Rules


@pytest.mark.parametrize(
    ("table", "row", "statement"),
    [
        ("handrail_trace", {"run_id": "r1"}, "UPDATE handrail_trace SET events = '[]'"),
        ("handrail_observation", {"run_id": "r1"}, "UPDATE handrail_observation SET text = 'no'"),
        ("handrail_evidence", {"effect_id": "e1"}, "UPDATE handrail_evidence SET kind = 'other'"),
        ("handrail_consent", {"approval_id": "a1"}, "UPDATE handrail_consent SET who = 'eve'"),
        ("handrail_comment", {"handoff_id": "h1"}, "UPDATE handrail_comment SET text = 'no'"),
        ("handrail_audit", {}, "UPDATE handrail_audit SET actor = 'eve'"),
        ("handrail_audit", {}, "UPDATE handrail_audit SET hash = 'another'"),
    ],
)
def test_a_record_is_never_changed_and_goes_with_its_run(
    url: str, database: Database, table: str, row: dict[str, str], statement: str
) -> None:
    upgrade(url)
    store(database, "handrail_run", RUN)
    store(database, "handrail_effect", EFFECT)
    store(database, "handrail_approval", APPROVAL)
    store(database, "handrail_handoff", HANDOFF)
    store(database, table, row)

    with pytest.raises(REFUSED, match=f"handrail: {table} is append-only"):
        database.run(statement, {})
    database.run(f"DELETE FROM {table}", {})

    assert database.run(f"SELECT * FROM {table}", {}) == []


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("handrail_run", {**RUN, "id": "r2", "status": "lost"}),
        ("handrail_run", {**RUN, "id": "r2", "phase": "wait"}),
        ("handrail_run", {**RUN, "id": "r2", "mode": "dry"}),
        ("handrail_run", {**RUN, "id": "r2", "steps_left": -1}),
        ("handrail_run", {**RUN, "id": "r2", "tool_calls_reserved": 2}),
        ("handrail_run", {**RUN, "id": "r2", "compensations_reserved": -1}),
        ("handrail_run", {**RUN, "id": "r2", "lease_until": 1}),  # leased by nobody
        ("handrail_run", {**RUN, "id": "r2", "status": "failed"}),  # without a reason
        ("handrail_tool_allowance", {"run_id": "r1", "calls_left": -1}),
        ("handrail_trace", {"run_id": "nobody's"}),
        ("handrail_effect", {**EFFECT, "id": "e2"}),  # the same intent twice
        ("handrail_effect", {**EFFECT, "id": "e2", "intent_key": "k", "status": "dispatched"}),
        ("handrail_effect", {**EFFECT, "id": "e2", "intent_key": "k", "doubt_trigger": "hope"}),
        ("handrail_effect", {**EFFECT, "id": "e2", "intent_key": "k", "status": "compensating"}),
        ("handrail_approval", {**APPROVAL, "id": "a2"}),  # a second open request
        ("handrail_approval", {**APPROVAL, "id": "a2", "status": "consumed"}),  # by no effect
        *(
            ("handrail_approval", {**APPROVAL, "id": "a2", "status": "rejected"} | wrong)
            for wrong in (
                {"status": "granted"},
                {"effect_id": "e1"},  # consumed without being so
                {"approvers": 0},
                {"approvers": 3},
                {"run_id": "nobody's"},
            )
        ),
        ("handrail_approval_token", {"hash": "t1", "approval_id": "a1"}),  # the same twice
        ("handrail_approval_token", {"hash": "t2", "approval_id": "none"}),
        ("handrail_approval_token", {"hash": "t2", "approval_id": "a1", "used_at": 1}),  # by nobody
        ("handrail_approval_token", {"hash": "t2", "approval_id": "a1", "used_by": "bob"}),  # when?
        ("handrail_consent", {"approval_id": "a1", "who": "bob"}),  # a second one of one person
        ("handrail_consent", {"approval_id": "none", "who": "bob"}),
        ("handrail_handoff", {**HANDOFF, "id": "h2"}),  # open for the same reason
        *(
            ("handrail_handoff", {**HANDOFF, "id": "h2", "reason": "contradiction"} | wrong)
            for wrong in (
                {"status": "closed"},
                {"status": "resolved"},  # as what, and when?
                {"status": "resolved", "resolution": "failed"},
                {"status": "resolved", "resolved_at": 1},
                {"resolution": "failed", "resolved_at": 1},  # and open
                {"claimed_by": "bob"},  # for ever
                {"claimed_until": 1},
                {"run_id": "nobody's"},
            )
        ),
        ("handrail_comment", {"handoff_id": "none"}),
        ("handrail_principal", PRINCIPAL),  # one person, two sets of roles
        ("handrail_audit", AUDIT),  # two acts in one place
        ("handrail_audit_head", {"id": 2}),  # a second chain
        ("handrail_pause", {"scope": "queue"}),
        ("handrail_pause", {"scope": "fleet", "name": "ours"}),  # the fleet has no name
        ("handrail_pause", {"scope": "tool", "name": ""}),  # which one?
    ],
)
def test_the_database_itself_refuses_what_must_not_be(
    ledger: Database, table: str, row: dict[str, Any]
) -> None:
    with pytest.raises(REFUSED):
        store(ledger, table, row)


# A host's own tables


def difference(url: str, metadata: MetaData, **options: Any) -> list[Any]:
    """Return what Alembic's autogenerate would change in a database, to make it like `metadata`."""
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            context = MigrationContext.configure(
                connection, opts={"compare_server_default": True, **options}
            )
            return list(compare_metadata(context, metadata))
    finally:
        engine.dispose()


def test_a_host_in_the_same_database_keeps_its_tables_and_its_history(
    url: str, database: Database
) -> None:
    for statement in (
        "CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)",
        "INSERT INTO alembic_version VALUES ('hosts-own')",
        "CREATE TABLE shop_order (id INTEGER PRIMARY KEY)",
        "INSERT INTO shop_order VALUES (7)",
    ):
        database.run(statement, {})
    before = schema(database)

    upgrade(url)
    assert before.items() < schema(database).items()
    downgrade(url)

    assert before.items() < schema(database).items()
    assert database.run("SELECT id FROM shop_order", {}) == [{"id": 7}]
    assert database.run("SELECT * FROM alembic_version", {}) == [{"version_num": "hosts-own"}]


def test_a_hosts_autogenerate_passes_over_our_tables(url: str, database: Database) -> None:
    host = MetaData()
    Table("shop_order", host, Column("id", Integer, primary_key=True))
    database.run("CREATE TABLE shop_order (id INTEGER NOT NULL PRIMARY KEY)", {})
    upgrade(url)

    assert difference(url, host, include_name=include_name) == []
    assert "remove_table" in {change[0] for change in difference(url, host)}  # why it needs that


def test_our_tables_are_not_among_a_hosts_models() -> None:
    assert not set(METADATA.tables) & set(SQLModel.metadata.tables)
