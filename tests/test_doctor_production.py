"""`handrail doctor` sees what makes a deployment unfit before it fails; with real servers."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
import time_machine
from sqlalchemy.engine import make_url

from handrail.broker.redis_client import redis_client
from handrail.cli.doctor import FAILURE, OK, WARNING, Finding, examine
from handrail.embedded import EmbeddedValkey
from handrail.fleet import Fleet
from handrail.keeper import KeptProcess
from handrail.ledger.liveness import say_alive
from handrail.testing.services import EmbeddedPostgres


def found(**settings: str) -> dict[str, Finding]:
    """What the doctor finds with these settings, by code."""
    fleet = Fleet(**settings)  # type: ignore[arg-type]  # two addresses
    try:
        findings, _ = examine(fleet)
    finally:
        fleet.close()
    assert all(one.next_step for one in findings if one.level != OK)
    return {one.code: one for one in findings}


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    """A migrated ledger in a file."""
    return migrated(f"sqlite:///{tmp_path / 'ledger.db'}")


@pytest.fixture
def ledger(postgres: EmbeddedPostgres, tmp_path: Path) -> str:
    """A migrated ledger on PostgreSQL."""
    return migrated(postgres.create_database(f"fit_{os.getpid()}_{tmp_path.name[-30:]}"))


def migrated(url: str) -> str:
    fleet = Fleet(database_url=url)
    fleet.upgrade_database()
    fleet.close()
    return url


# ---- Redis ---------------------------------------------------------------------------------------


def test_a_redis_that_forgets_or_is_nearly_full_is_a_warning(sqlite: str, tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as valkey, redis_client(valkey.url) as client:
        forgetful = found(database_url=sqlite, broker_url=valkey.url)
        client.config_set("appendonly", "yes")
        client.config_set("maxmemory", 1_000_000_000)
        roomy = found(database_url=sqlite, broker_url=valkey.url)
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] * 1.2))
        full = found(database_url=sqlite, broker_url=valkey.url)

    assert forgetful["redis-keeps-nothing"].level == WARNING
    assert "redis-nearly-full" not in forgetful, "without a limit nothing is full"
    assert roomy["broker-ready"].level == OK
    assert not {"redis-keeps-nothing", "redis-nearly-full"} & roomy.keys()
    assert full["redis-nearly-full"].level == WARNING


# ---- workers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "ledger"])
def test_a_fleet_without_workers_is_a_warning(kind: str, request: pytest.FixtureRequest) -> None:
    url: str = request.getfixturevalue(kind)
    fleet = Fleet(database_url=url)
    never = found(database_url=url)
    say_alive(fleet.ledger.database, "host-1")
    say_alive(fleet.ledger.database, "host-2")
    there = found(database_url=url)
    fleet.ledger.database.run("UPDATE handrail_heartbeat SET at = at - 61000", {})
    gone = found(database_url=url)
    fleet.close()

    assert never["no-worker"].level == gone["no-worker"].level == WARNING
    assert there["workers-seen"].level == OK and there["workers-seen"].detail.endswith(": 2")
    assert "61 s ago" in gone["no-worker"].detail


# ---- the database --------------------------------------------------------------------------------


def test_a_clock_that_is_not_the_databases_is_a_warning(ledger: str) -> None:
    right = found(database_url=ledger)
    with time_machine.travel(time.time() + 10, tick=True):
        ahead = found(database_url=ledger)
    with time_machine.travel(time.time() - 10, tick=True):
        behind = found(database_url=ledger)

    assert "clock-off" not in right
    assert ahead["clock-off"].level == behind["clock-off"].level == WARNING
    assert "ahead of" in ahead["clock-off"].detail and "behind" in behind["clock-off"].detail


def test_a_database_whose_transactions_are_read_only_is_a_failure(ledger: str) -> None:
    address = make_url(ledger).update_query_dict({"options": "-c default_transaction_read_only=on"})

    report = found(database_url=address.render_as_string(hide_password=False))

    assert report["database-read-only"].level == FAILURE
    assert "database-read-only" not in found(database_url=ledger)


@contextmanager
def replica(server: EmbeddedPostgres) -> Iterator[str]:
    """A standby from a backup of a server that runs; the address of its copy of the ledger."""
    home = Path(str(make_url(server.url()).query["host"]))
    copy = home / "replica"
    postmaster = psutil.Process(int((home / "data/postmaster.pid").read_text().splitlines()[0]))
    program, user = postmaster.exe(), postmaster.uids().real
    with psycopg.connect(host=str(home), user="postgres", dbname="postgres", autocommit=True) as c:
        c.execute("SELECT pg_backup_start('replica', true)")
        subprocess.run(["cp", "-a", home / "data", copy], check=True)
        [label] = c.execute("SELECT labelfile FROM pg_backup_stop(false)").fetchall()[0]
    subprocess.run(["cp", "-a", f"{home}/data/pg_wal/.", copy / "pg_wal"], check=True)
    (copy / "postmaster.pid").unlink()
    (copy / "backup_label").write_text(label)
    (copy / "standby.signal").touch()
    for name in ("backup_label", "standby.signal"):
        os.chown(copy / name, user, user)
    sockets = home / "replica-socket"
    sockets.mkdir()
    os.chown(sockets, user, user)
    options = ["-c", "listen_addresses=", "-c", "max_connections=200"]
    with KeptProcess(
        [program, "-D", copy, "-k", sockets, *options],
        directory=home,
        log=home / "replica-log",
        user=user if os.geteuid() == 0 else None,
    ):
        give_up_at = time.monotonic() + 30
        while True:
            try:
                psycopg.connect(host=str(sockets), user="postgres", dbname="postgres").close()
                break
            except psycopg.OperationalError:
                assert time.monotonic() < give_up_at, (home / "replica-log").read_text()
                time.sleep(0.1)
        yield f"postgresql+psycopg://postgres@/ledger?host={sockets}"


def test_a_replica_is_a_failure() -> None:
    with EmbeddedPostgres() as server:
        migrated(server.create_database("ledger"))
        with replica(server) as url:
            report = found(database_url=url)

    assert report["database-read-only"].level == FAILURE
    assert "replica" in report["database-read-only"].detail
