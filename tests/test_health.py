"""`handrail health`: a probe that believes rows, and costs little."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from handrail.cli import app
from handrail.fleet import Fleet
from handrail.ledger.database import Database
from handrail.ledger.liveness import FORGOTTEN_MS, beat_of, say_alive, silence_ms
from handrail.testing.services import EmbeddedPostgres

HOST = socket.gethostname()
Health = Callable[..., tuple[int, str]]


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A ledger's database, migrated."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    if request.param == "postgres":
        server: EmbeddedPostgres = request.getfixturevalue("postgres")
        url = server.create_database(f"health_{os.getpid()}_{tmp_path.name[-30:]}")
    fleet = Fleet(database_url=url)
    fleet.upgrade_database()
    yield fleet.ledger.database
    fleet.close()


@pytest.fixture
def health(database: Database, monkeypatch: pytest.MonkeyPatch) -> Health:
    """Run the command on that database; its exit code and all that it prints."""
    monkeypatch.setenv("HANDRAIL_DATABASE_URL", database.url.render_as_string(hide_password=False))

    def run(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["health", *options])
        return result.exit_code, result.output.strip()

    return run


def make_older(database: Database, name: str, by_ms: int) -> None:
    database.run(
        "UPDATE handrail_heartbeat SET at = at - :by_ms WHERE name = :name",
        {"by_ms": by_ms, "name": name},
    )


def test_a_worker_is_healthy_from_its_first_word_until_three_periods_later(
    database: Database, health: Health
) -> None:
    before = health()
    say_alive(database, HOST)
    after = health("--kind", "worker")
    make_older(database, beat_of(HOST), 50_000)
    quiet = health()
    make_older(database, beat_of(HOST), 11_000)
    silent = health()
    say_alive(database, HOST)
    back = health()

    assert before == (1, f"error[worker-unseen]: a worker of {HOST} has never been at work here")
    assert [code for code, _ in (after, quiet, silent, back)] == [0, 0, 1, 0]
    assert silent[1].startswith(f"error[worker-silent]: a worker of {HOST} was last at work 61 s")
    assert "\n" not in silent[1]


def test_the_word_of_another_host_counts_for_nothing(database: Database, health: Health) -> None:
    say_alive(database, "another-host")

    assert health()[0] == 1


def test_beat_is_healthy_while_sweeps_run(
    database: Database, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = health("--kind", "beat")
    fleet = Fleet(database_url=database.url.render_as_string(hide_password=False))
    fleet.sweep_now()
    fleet.close()
    swept = health("--kind", "beat")
    make_older(database, "sweep", 16_000)
    stopped = health("--kind", "beat")
    monkeypatch.setenv("HANDRAIL_SWEEP_EVERY_S", "10")  # three periods are longer now
    slow = health("--kind", "beat")

    assert [code for code, _ in (never, swept, stopped, slow)] == [1, 0, 1, 0]
    assert never[1].startswith("error[beat-unseen]") and stopped[1].startswith("error[beat-silent]")


def test_a_worker_process_says_by_itself_that_it_is_at_work(
    database: Database, health: Health
) -> None:
    fleet = Fleet(database_url=database.url.render_as_string(hide_password=False))
    fleet.begin_work()
    try:
        code = 1
        for _ in range(100):
            code, _said = health()
            if code == 0:
                break
    finally:
        fleet.end_work()
        fleet.close()

    assert code == 0


def test_hosts_that_are_gone_for_a_day_leave_no_rows(database: Database) -> None:
    say_alive(database, "old")
    say_alive(database, "older")
    make_older(database, beat_of("old"), FORGOTTEN_MS - 60_000)
    make_older(database, beat_of("older"), FORGOTTEN_MS + 1)
    database.run("INSERT INTO handrail_heartbeat (name, kind, at) VALUES ('sweep', 'x', 0)", {})

    say_alive(database, HOST)

    assert silence_ms(database, beat_of("old")) is not None
    assert silence_ms(database, beat_of("older")) is None
    assert silence_ms(database, "sweep") is not None, "only workers' rows are dropped"


def test_answers_are_json_where_that_is_wanted(database: Database, health: Health) -> None:
    say_alive(database, HOST)

    good, bad = health("--json"), health("--kind", "beat", "--json")

    assert good[0] == 0 and json.loads(good[1])["ok"] is True
    assert bad[0] == 1 and json.loads(bad[1])["code"] == "beat-unseen"


def test_where_no_ledger_is_none_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDRAIL_HOME", str(tmp_path / "nowhere"))
    monkeypatch.delenv("HANDRAIL_DATABASE_URL", raising=False)

    result = CliRunner().invoke(app, ["health"])

    assert result.exit_code == 1 and "error[no-ledger]" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_is_not_migrated_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Database(f"sqlite:///{tmp_path / 'empty.db'}").run("SELECT 1", {})
    monkeypatch.setenv("HANDRAIL_DATABASE_URL", f"sqlite:///{tmp_path / 'empty.db'}")

    result = CliRunner().invoke(app, ["health"])

    assert result.exit_code == 1 and "error[database-not-migrated]" in result.output


def test_a_database_that_is_away_is_no_fault_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDRAIL_DATABASE_URL", "postgresql+psycopg://a:secret@127.0.0.1:1/none")

    result = CliRunner().invoke(app, ["health"])

    assert result.exit_code == 3 and "error[database-unavailable]" in result.output
    assert "secret" not in result.output


def test_the_installed_command_imports_neither_celery_nor_agents(database: Database) -> None:
    say_alive(database, HOST)
    url = database.url.render_as_string(hide_password=False)
    probe = (
        "import sys; from handrail.cli import main; sys.argv = ['handrail', 'health']\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = ('celery', 'kombu', 'handrail.agent', 'handrail.fleet', 'sqlmodel', 'rich')\n"
        "print(code, [name for name in heavy if name in sys.modules])"
    )

    ran = subprocess.run(
        [sys.executable, "-c", probe],
        env={**os.environ, "HANDRAIL_DATABASE_URL": url},
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert ran.stdout.splitlines()[-1] == "0 []", ran.stdout + ran.stderr
