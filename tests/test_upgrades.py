"""A newer release's schema under this program: it works on, where that schema allows it."""

from __future__ import annotations

import json
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from handrail.cli import doctor
from handrail.cli.commands import app
from handrail.fleet import Fleet
from handrail.ledger import columns
from handrail.ledger.database import Database
from handrail.ledger.errors import NotMigrated, UnknownRevision, UnsupportedDatabase
from handrail.ledger.migrate import current, downgrade, upgrade
from handrail.ledger.schema import HEAD, check_migrated
from handrail.ledger.tables import METADATA
from handrail.settings import InvalidSettings, Settings
from handrail.testing.services import EmbeddedPostgres
from tests.live import complete, deployed, look, save
from tests.world import KINDS

LATER: Final = "9000"
_REVISION: Final = '''
"""What a later release might add."""

import sqlalchemy as sa
from alembic import op

revision = "9000"
down_revision = "{head}"
branch_labels = None
depends_on = None


def upgrade():
    for table in {tables}:
        op.add_column(table, sa.Column("later", sa.Text(), nullable=True))
    op.create_table("handrail_later", sa.Column("id", sa.Text(), primary_key=True))
    op.execute("UPDATE handrail_schema SET oldest_program = '{oldest}'")


def downgrade():
    raise NotImplementedError
'''
_WIDENED: Final = (
    "handrail_run",
    "handrail_effect",
    "handrail_approval",
    "handrail_handoff",
    "handrail_trace",
    "handrail_observation",
    "handrail_output",
    "handrail_evidence",
    "handrail_heartbeat",
    "handrail_workflow",
    "handrail_principal",
    "handrail_audit",
)


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    postgres: EmbeddedPostgres = request.getfixturevalue("postgres")
    return postgres.create_database(f"upgrade_{uuid.uuid4().hex[:8]}")


def later_revision(place: Path, *, oldest: str = HEAD) -> Path:
    """A folder with the revision of a later release, additive all over."""
    folder = place / f"later_{oldest}"
    folder.mkdir()
    (folder / "9000_later.py").write_text(
        _REVISION.format(head=HEAD, tables=_WIDENED, oldest=oldest)
    )
    return folder


# What a program may do with a newer schema


def test_a_newer_schema_that_allows_this_program_is_accepted(url: str, tmp_path: Path) -> None:
    upgrade(url, versions=[later_revision(tmp_path)])
    assert current(url) == LATER

    with closing(Database(url)) as database:
        assert check_migrated(database) == LATER


def test_a_newer_schema_that_does_not_is_refused(url: str, tmp_path: Path) -> None:
    upgrade(url, versions=[later_revision(tmp_path, oldest=LATER)])

    with closing(Database(url)) as database, pytest.raises(NotMigrated, match="newer release"):
        check_migrated(database)
    fleet = Fleet(database_url=url)
    with pytest.raises(NotMigrated):
        fleet.ledger.now()
    with pytest.raises(UnknownRevision, match=LATER):
        upgrade(url)
    assert current(url) == LATER


def test_an_older_schema_is_refused_as_before(url: str) -> None:
    upgrade(url, "0001")

    with closing(Database(url)) as database, pytest.raises(NotMigrated, match="db upgrade"):
        check_migrated(database)


def test_db_upgrade_and_the_doctor_leave_a_newer_schema_and_say_so(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(url, versions=[later_revision(tmp_path)])
    monkeypatch.setenv("HANDRAIL_DATABASE_URL", url)

    told = CliRunner().invoke(app, ["db", "upgrade"])
    assert told.exit_code == 0, told.output
    assert "nothing was changed" in told.output
    told = CliRunner().invoke(app, ["db", "upgrade", "--json"])
    assert json.loads(told.output) == {"revision": LATER, "newer": True}
    assert current(url) == LATER
    with closing(Fleet(database_url=url)) as fleet:
        [database] = [f for f in doctor.examine(fleet)[0] if f.code == "database-ready"]
    assert (database.level, database.code) == ("ok", "database-ready")
    assert "of a newer release" in database.detail


def test_there_is_no_way_down_from_what_this_program_does_not_know(
    url: str, tmp_path: Path
) -> None:
    upgrade(url, versions=[later_revision(tmp_path)])
    with pytest.raises(UnknownRevision):
        downgrade(url)


def test_what_is_read_as_a_whole_is_named_column_by_column() -> None:
    """A prepared `SELECT *` of PostgreSQL breaks when a column is added under it."""
    for table in ("run", "effect", "approval", "handoff", "principal", "audit"):
        named = getattr(columns, table.upper()).split(", ")
        assert named == [column.name for column in METADATA.tables[f"handrail_{table}"].columns]


# Upgraded under load


def errand(number: int) -> list[dict[str, Any]]:
    return [look("a"), save(f"item-{number}"), look("b"), complete(f"item-{number}")]


@pytest.mark.live
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_release_upgrades_the_database_under_workers_that_go_on(
    kind: str, tmp_path: Path, valkey_url: str, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    if kind == "postgres":
        url = request.getfixturevalue("postgres").create_database(f"up_{uuid.uuid4().hex[:8]}")
    with deployed(tmp_path, url, valkey_url, ahead_s=0) as fleet:
        fleet.staff(2)
        runs = [fleet.start(*errand(number)) for number in range(10)]
        fleet.rest(runs[0])
        for number in range(10, 40):
            runs.append(fleet.start(*errand(number)))
            if number == 20:  # they are in the middle of it
                assert upgrade(url, versions=[later_revision(tmp_path)]) == LATER
        ended = fleet.rest(*runs)

        assert {run.status for run in ended} == {"completed"}
        saved = [note.run for note in fleet.noted("effect")]
        assert sorted(saved) == sorted(runs), "each has written once"
        assert current(url) == LATER
        assert [log for log in fleet.logs("worker") if "ERROR/" in log] == []
        fleet.staff(3)  # one that starts on it
        [run] = fleet.rest(fleet.start(*errand(99)))
        assert run.status == "completed"


# A schema of its own


def test_the_ledger_lives_in_a_schema_of_its_own_and_leaves_the_others_alone(
    postgres: EmbeddedPostgres, tmp_path: Path, valkey_url: str
) -> None:
    url = postgres.create_database(f"schema_{uuid.uuid4().hex[:8]}")
    settings = {"database_schema": "agents"}
    with deployed(tmp_path, url, valkey_url, ahead_s=0, settings=settings) as fleet:
        fleet.staff(1)
        [run] = fleet.rest(fleet.start(*errand(1)))
        assert run.status == "completed"
        assert fleet.fleet.upgrade_database() == HEAD, "a second time it changes nothing"
        [database] = [f for f in doctor.examine(fleet.fleet)[0] if f.code == "database-ready"]
        assert database.code == "database-ready"
        assert [one.name for one in fleet.fleet.workflow_versions()] == ["errand"]
        ledger = fleet.fleet.ledger.database
        with pytest.raises(Exception, match="append-only"):
            ledger.run("UPDATE handrail_trace SET writer = 'me'", {})

        found = "SELECT DISTINCT table_schema AS name FROM information_schema.tables"
        ours = ledger.run(f"{found} WHERE table_name LIKE 'handrail%'", {})
        assert [row["name"] for row in ours] == ["agents"]
    with closing(Database(url)) as other:
        tables = other.run(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
            " UNION SELECT routine_name FROM information_schema.routines"
            " WHERE routine_schema = 'public'",
            {},
        )
        assert tables == []
        with pytest.raises(NotMigrated):
            check_migrated(other)
    downgrade(url, schema="agents")
    assert current(url, schema="agents") is None


@pytest.mark.parametrize("name", ["Agents", "a-b", 'a"; DROP', "1a", "a" * 64, "ä"])
def test_a_schema_of_another_kind_of_name_is_refused(name: str, postgres_url: str) -> None:
    with pytest.raises(InvalidSettings, match="HANDRAIL_DATABASE_SCHEMA"):
        Settings.read(database_schema=name)
    with pytest.raises(UnsupportedDatabase):
        Database(postgres_url, schema=name)


def test_a_word_of_sql_is_a_name_like_any_other(postgres: EmbeddedPostgres) -> None:
    url = postgres.create_database(f"schema_{uuid.uuid4().hex[:8]}")
    assert upgrade(url, schema="select") == HEAD
    assert current(url, schema="select") == HEAD
    assert current(url) is None


def test_sqlite_has_no_schemas(tmp_path: Path) -> None:
    fleet = Fleet(
        settings=Settings.read(database_url=f"sqlite:///{tmp_path / 'l.db'}", database_schema="a")
    )
    for act in (fleet.upgrade_database, lambda: fleet.ledger):
        with pytest.raises(UnsupportedDatabase, match="HANDRAIL_DATABASE_SCHEMA"):
            act()
