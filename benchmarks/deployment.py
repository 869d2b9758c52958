"""A fleet at work: a database, a Valkey, and worker processes of its own."""

from __future__ import annotations

import json
import secrets
import time
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.fleet import WORKFLOW, bench_fleet
from benchmarks.processes import Family, Load, cpu_seconds, start_worker, worker_memory_mb
from handrail.embedded import EmbeddedValkey
from handrail.ledger.database import Database
from handrail.ledger.tables import METADATA
from handrail.settings import Settings

PATIENCE_S = 120
POLL_S = 0.1  # when it ended is read from the trace: looking must cost next to nothing
SEED_BATCH = 5_000


class NotCompleted(Exception):
    """A run did not complete, so that the figures would mean nothing."""


class Deployment:
    """A fleet for the length of a `with` block. `servers` are counted with it and started before.

    `workers=0`: nobody takes up what is enqueued. `broker_url`: another broker than a Valkey of its
    own.
    """

    def __init__(
        self,
        directory: Path,
        database_url: str,
        *,
        servers: Family | None = None,
        workers: int = 2,
        in_flight: int | None = None,
        broker_url: str | None = None,
    ) -> None:
        self._directory = directory
        self._database_url = database_url
        self._workers = workers
        self._in_flight = in_flight
        self._broker_url = broker_url
        self._family = Family()
        if servers is not None:
            self._family.adopt(servers)

    def __enter__(self) -> Deployment:
        place = self._directory / secrets.token_hex(4)
        place.mkdir()
        valkey = EmbeddedValkey(place)
        self._family.keep(lambda: valkey)
        settings = {
            "database_url": self._database_url,
            "broker_url": self._broker_url or valkey.url,
            "redis_url": valkey.url,
        }
        if self._in_flight is not None:
            settings["in_flight"] = str(self._in_flight)
        self.fleet = bench_fleet(Settings.read(**settings))
        self.fleet.upgrade_database()
        environment = {f"HANDRAIL_{name.upper()}": value for name, value in settings.items()}
        for number in range(self._workers):
            self._family.keep(
                partial(
                    start_worker,
                    "benchmarks.worker:app",
                    [],
                    environment,
                    log=self._directory / f"worker-{number}.log",
                )
            )
        while len(self._holders()) < self._workers:  # until all are at work
            self.load(runs=20, steps=3)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.fleet.close()
        self._family.close()

    @property
    def database(self) -> Database:
        """The ledger's database."""
        return self.fleet.ledger.database

    def enqueue(self, *, steps: int, wait_ms: int = 0) -> str:
        """Accept one run."""
        return self.fleet.enqueue(WORKFLOW, goal="go", input={"steps": steps, "wait_ms": wait_ms})

    def load(self, *, runs: int, steps: int, wait_ms: int = 0) -> Load:
        """Run runs side by side, from the first `enqueue` to the last commit, and say what they
        took.
        """
        processes = self._family.processes()
        cpu_s, began_at = cpu_seconds(processes), self.fleet.ledger.now()
        ids = [self.enqueue(steps=steps, wait_ms=wait_ms) for _ in range(runs)]
        self._until_quiet()
        cpu_s = cpu_seconds(processes) - cpu_s
        ended_at = began_at
        for run_id in ids:
            run = self.fleet.get(run_id)
            charged = run.budget_used["steps"]
            if (run.status, charged) != ("completed", steps):
                raise NotCompleted(f"{run.status} ({run.reason}) after {charged} of {steps} steps")
            ended_at = max(ended_at, self.fleet.ledger.trace(run_id)[-1]["at"])
        return Load(runs * steps, (ended_at - began_at) / 1000, cpu_s)

    def seed_finished(self, count: int) -> None:
        """Fill the ledger with copies of one short run that has really finished, with all its
        rows.
        """
        model = self.enqueue(steps=2)
        self._until_quiet()
        for first in range(0, count, SEED_BATCH):
            ids = [secrets.token_hex(16) for _ in range(min(SEED_BATCH, count - first))]
            self._copy(model, ids)
        if self.database.postgres:  # as autovacuum would have done by and by
            self.database.run("SET statement_timeout = 0", {})
            self.database.run("VACUUM (ANALYZE)", {})
            self.database.run("CHECKPOINT", {})

    def memory_mb(self) -> float:
        """What the largest worker holds."""
        return worker_memory_mb(self._family.processes())

    # ---- inside ----------------------------------------------------------------------------------

    def _holders(self) -> set[str]:
        rows = self.database.run("SELECT DISTINCT holder FROM handrail_run", {})
        return {row["holder"] for row in rows if row["holder"]}

    def _until_quiet(self) -> None:
        """Wait until the ledger holds nothing that is due, leased or waited for."""
        began = time.monotonic()
        left = "SELECT count(*) AS runs FROM handrail_run WHERE wake_at IS NOT NULL"
        while runs := self.database.run(left, {})[0]["runs"]:
            if time.monotonic() - began > PATIENCE_S:
                raise NotCompleted(f"{runs} runs are not over: see {self._directory}")
            time.sleep(POLL_S)

    def _copy(self, model: str, ids: list[str]) -> None:
        new_ids = (
            "(SELECT json_array_elements_text(CAST(:ids AS json)) AS id)"
            if self.database.postgres
            else "(SELECT value AS id FROM json_each(:ids))"
        )
        params: dict[str, Any] = {"model": model, "ids": json.dumps(ids)}
        with self.database.transaction() as tx:
            for name, key in (
                ("handrail_run", "id"),
                ("handrail_trace", "run_id"),
                ("handrail_observation", "run_id"),
                ("handrail_output", "run_id"),
            ):
                columns = [column.name for column in METADATA.tables[name].columns]
                values = ["new.id" if column == key else f"old.{column}" for column in columns]
                tx.run(
                    f"INSERT INTO {name} ({', '.join(columns)}) SELECT {', '.join(values)}"
                    f" FROM {name} AS old, {new_ids} AS new WHERE old.{key} = :model",
                    params,
                )
