"""The databases of the sweep: real ones, made once, and emptied for every case."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from handrail.ledger import database as product
from handrail.ledger.migrate import create_all
from handrail.ledger.tables import METADATA
from handrail.testing.services import EmbeddedPostgres

DATABASES: Final = ("sqlite", "postgres")
#: The tables, each before those that it refers to.
TABLES: Final = tuple(table.name for table in reversed(METADATA.sorted_tables))

#: In place of PostgreSQL's own clock: what the session was last told; see `WatchedDatabase`.
_CLOCK: Final = (
    "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE"
    " AS 'SELECT to_timestamp(current_setting(''test.now'')::bigint / 1000.0)'"
)
_CLEAR: Final = (
    "CREATE FUNCTION public.test_clear() RETURNS void LANGUAGE sql"
    f" AS '{'; '.join(f'DELETE FROM public.{table}' for table in TABLES)}'"
)
_GONE_S: Final = 10.0


class Database(Protocol):
    """A database that can be emptied."""

    name: str
    url: str

    def empty(self, database: product.Database, backend: int) -> None:
        """Empty it; nobody talks to it but `database`, and `backend` no longer."""
        ...

    def at_rest(self, database: product.Database, backend: int) -> None:
        """Wait until what a dead process has left undone is undone."""
        ...


class Sqlite:
    """A file in WAL mode, with full sync as the product sets it."""

    name = "sqlite"

    def __init__(self, directory: Path) -> None:
        self._file = directory / "ledger.db"
        self.url = f"sqlite:///{self._file}"
        database = product.Database(self.url)
        create_all(database)
        database.close()
        self._new = self._file.read_bytes()

    def empty(self, database: product.Database, backend: int) -> None:
        """Put a new file in its place. No connection may be open: none survives a fork."""
        database.close()
        for rest in ("-wal", "-shm"):
            self._file.with_name(self._file.name + rest).unlink(missing_ok=True)
        self._file.write_bytes(self._new)

    def at_rest(self, database: product.Database, backend: int) -> None:
        """The next connection recovers the file."""


class Postgres:
    """A database of a server of our own that forgets nothing which it has committed."""

    name = "postgres"

    def __init__(self, url: str) -> None:
        self.url = url
        database = product.Database(url)
        create_all(database)
        for statement in (_CLOCK, _CLEAR):
            database.run(statement, {})
        name = database.url.database
        database.run(f"ALTER DATABASE {name} SET search_path = public, pg_catalog", {})
        database.close()

    def empty(self, database: product.Database, backend: int) -> None:
        """Delete every row."""
        self.at_rest(database, backend)
        database.run("SELECT test_clear()", {})

    def at_rest(self, database: product.Database, backend: int) -> None:
        """Wait until the server has seen that its client is dead."""
        process = Path(f"/proc/{backend}")
        give_up_at = time.monotonic() + _GONE_S
        while backend and process.exists():
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"backend {backend} does not go away")
            time.sleep(0.0003)


@dataclass(frozen=True, slots=True)
class Server:
    """Where databases of a kind are made, one for each worker."""

    name: str
    postgres: EmbeddedPostgres | None = None

    def place(self, worker: int, directory: Path) -> Database:
        """Make a worker's database; `directory` takes its file, if it is one."""
        if self.postgres is None:
            return Sqlite(directory)
        return Postgres(self.postgres.create_database(f"crash_{worker}"))


@contextmanager
def open_server(name: str) -> Iterator[Server]:
    """Start what a kind of database needs."""
    if name == "sqlite":
        yield Server(name)
        return
    with EmbeddedPostgres(durable=True) as postgres:
        yield Server(name, postgres)
