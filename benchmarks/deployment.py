"""A fleet at work: a database, a Valkey, and worker processes of its own."""

from __future__ import annotations

import os
import secrets
import sys
import time
from functools import partial
from pathlib import Path
from types import TracebackType

import psycopg

from benchmarks.fleet import DOUBTFUL, WORKFLOW, bench_fleet
from benchmarks.processes import ROOT, Family, Load, cpu_seconds, start_worker, worker_memory_mb
from handrail.embedded import EmbeddedValkey
from handrail.keeper import KeptProcess
from handrail.ledger.database import Database
from handrail.ledger.liveness import SWEPT
from handrail.ledger.tables import METADATA
from handrail.settings import Settings

PATIENCE_S = 120
POLL_S = 0.1  # when it ended is read from the trace: looking must cost next to nothing
SEED_BATCH = 5_000
LATER_MS = 24 * 3_600_000  # no limit of a run comes in the way of what is measured
RECORDS = ("handrail_trace", "handrail_observation", "handrail_output")


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
        self._silent = bench_fleet(Settings.read(database_url=self._database_url, home=str(place)))
        self.fleet.upgrade_database()
        self._environment = {f"HANDRAIL_{name.upper()}": value for name, value in settings.items()}
        for number in range(self._workers):
            self._family.keep(
                partial(
                    start_worker,
                    "benchmarks.worker:app",
                    [],
                    self._environment,
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
        self._silent.close()
        self.fleet.close()
        self._family.close()

    @property
    def database(self) -> Database:
        """The ledger's database."""
        return self.fleet.ledger.database

    def enqueue(self, *, steps: int, wait_ms: int = 0) -> str:
        """Accept one run."""
        return self.fleet.enqueue(WORKFLOW, goal="go", input={"steps": steps, "wait_ms": wait_ms})

    def enqueue_lost(self, *, steps: int) -> str:
        """Accept one run whose message is lost; the sweep's first look at it is due at once."""
        run_id = self._silent.enqueue(WORKFLOW, goal="go", input={"steps": steps, "wait_ms": 0})
        self.wake(run_id)
        return run_id

    def wake(self, *run_ids: str) -> None:
        """Let the sweep's look at runs be due."""
        for run_id in run_ids:
            self.database.run("UPDATE handrail_run SET wake_at = 0 WHERE id = :id", {"id": run_id})

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
        new = {"id": "'finished-' || n"}
        of_run = (f"run_id = '{model}'", {"run_id": "'finished-' || n"})
        tables = {"handrail_run": (f"id = '{model}'", new)}
        self._multiply(count, tables | dict.fromkeys(RECORDS, of_run))
        self.settle_down()

    def seed_doubts(self, count: int) -> None:
        """Fill the ledger with copies of one run whose write is in doubt, all due to be asked about
        at once; nobody sweeps yet.
        """
        model = self.fleet.enqueue(DOUBTFUL, goal="go")
        began = time.monotonic()
        while self.fleet.get(model).status != "reconciling":
            if time.monotonic() - began > PATIENCE_S:
                raise NotCompleted(f"the write is not in doubt: see {self._directory}")
            time.sleep(POLL_S)
        row = self.database.run("SELECT effect_id FROM handrail_run WHERE id = :id", {"id": model})
        later = f"{self.fleet.ledger.now() + LATER_MS}"
        key = {"run_id": "'doubt-' || n"}
        own = {"id": "'effect-' || n", "intent_key": "'pay:doubt-' || n"}
        self._multiply(
            count,
            {
                "handrail_run": (
                    f"id = '{model}'",
                    {
                        **{"id": "'doubt-' || n", "effect_id": "'effect-' || n", "wake_at": "0"},
                        **{"deadline_at": later, "expires_at": later},
                    },
                ),
                "handrail_effect": (
                    f"id = '{row[0]['effect_id']}'",
                    {**own, "owner_run_id": "'doubt-' || n", "next_query_at": "NULL"},
                ),
                "handrail_trace": (f"run_id = '{model}'", key),
                "handrail_evidence": (
                    f"effect_id = '{row[0]['effect_id']}'",
                    {"id": "'evidence-' || n", "effect_id": "'effect-' || n"},
                ),
            },
        )
        self.settle_down()

    def settle_down(self) -> None:
        """Do what PostgreSQL would have done by and by, had the rows come one after the other."""
        if self.database.postgres:  # on a connection that may take its time, unlike the ledger's
            url = self.database.url.set(drivername="postgresql")
            plain = url.render_as_string(hide_password=False)
            with psycopg.connect(plain, autocommit=True) as connection:
                connection.execute("VACUUM (ANALYZE)")
                connection.execute("CHECKPOINT")

    def is_in_doubt(self) -> bool:
        """Whether a run is reconciling."""
        reconciling = "status = 'reconciling' AND wake_at IS NOT NULL"
        return bool(
            self.database.run(f"SELECT 1 AS x FROM handrail_run WHERE {reconciling} LIMIT 1", {})
        )

    def until_completed(self, count: int) -> None:
        """Wait until the runs of `seed_doubts` are over, all in the same way."""
        self._until_quiet()
        ended = self.database.run(
            "SELECT status, count(*) AS runs FROM handrail_run WHERE id LIKE 'doubt-%'"
            " GROUP BY status",
            {},
        )
        if ended != [{"status": "completed", "runs": count}]:
            raise NotCompleted(f"of {count} runs in doubt: {ended}")

    def start_sweeper(self) -> None:
        """Start a process that does nothing but sweep, and wait until it is at it."""
        command = [sys.executable, "-m", "handrail", "reconcile", "--every-s", "0.2"]
        self._family.keep(
            partial(
                KeptProcess,
                [*command, "--fleet", "benchmarks.worker:fleet"],
                directory=ROOT,
                log=self._directory / "sweeper.log",
                environment={**os.environ, **self._environment},
            )
        )
        began = time.monotonic()
        while self.fleet.ledger.since_beat(SWEPT) is None:
            if time.monotonic() - began > PATIENCE_S:
                raise NotCompleted(f"nobody sweeps: see {self._directory}")
            time.sleep(POLL_S)

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
        left = "SELECT count(*) AS runs FROM handrail_run WHERE status <> 'reconciling' AND wake_at"
        while runs := self.database.run(f"{left} IS NOT NULL", {})[0]["runs"]:
            if time.monotonic() - began > PATIENCE_S:
                raise NotCompleted(f"{runs} runs are not over: see {self._directory}")
            time.sleep(POLL_S)

    def _multiply(self, count: int, tables: dict[str, tuple[str, dict[str, str]]]) -> None:
        """Insert copies of rows: of each table those that a condition names, with some columns as
        SQL says; `n` is the copy's number.
        """
        for first in range(1, count + 1, SEED_BATCH):
            last = min(first + SEED_BATCH - 1, count)
            numbers = (
                f"generate_series({first}, {last}) AS numbers(n)"
                if self.database.postgres
                else f"(WITH RECURSIVE numbers(n) AS (SELECT {first} UNION ALL SELECT n + 1"
                f" FROM numbers WHERE n < {last}) SELECT n FROM numbers) AS numbers"
            )
            with self.database.transaction() as tx:
                for name, (which, new) in tables.items():
                    columns = [column.name for column in METADATA.tables[name].columns]
                    values = [new.get(column, f"old.{column}") for column in columns]
                    tx.run(
                        f"INSERT INTO {name} ({', '.join(columns)}) SELECT {', '.join(values)}"
                        f" FROM (SELECT * FROM {name} WHERE {which}) AS old, {numbers}",
                        {},
                    )
