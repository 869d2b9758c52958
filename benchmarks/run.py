"""What Handrail costs, beside a bare Celery chain: `python -m benchmarks.run`, some minutes.

Every figure of speed is a ratio to the anchor, which runs right before and right after what is
measured: the machine's speed drifts. Own processes, real servers, PostgreSQL with its default
durability.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.anchor import Anchor
from benchmarks.deployment import Deployment, NotCompleted
from benchmarks.fleet import called_at_ns
from benchmarks.processes import Family, Load
from handrail.reconciler.sweep import BATCH
from handrail.testing.services import EmbeddedPostgres

EVERY_S = 0.1  # between fresh runs
PARTS = ("steps", "latency", "enqueue", "flat", "waiting", "sweep", "backlog", "rabbitmq")
ON_RABBITMQ = "durable steps/s on RabbitMQ, acknowledged and confirmed ÷ anchor"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    runs: int = 200
    steps: int = 10
    repeats: int = 3
    lone_runs: int = 5
    lone_steps: int = 60
    first_steps: int = 60
    enqueues: int = 500
    finished: int = 100_000
    long_steps: int = 200
    long_runs: int = 10
    waiting_runs: int = 300
    waiting_steps: int = 5
    waiting_ms: int = 1_000
    sweeps: int = 200
    sweeps_due: int = 30
    many_finished: int = 1_000_000
    doubts: int = 100_000


#: Shows that everything still runs; its figures mean nothing.
SHORT = Size(
    runs=20,
    steps=5,
    repeats=1,
    lone_runs=1,
    lone_steps=10,
    first_steps=5,
    enqueues=50,
    finished=1_000,
    long_steps=20,
    long_runs=2,
    waiting_runs=30,
    waiting_steps=2,
    waiting_ms=200,
    sweeps=20,
    sweeps_due=3,
    many_finished=1_000,
    doubts=200,
)


@dataclass(frozen=True)
class Figure:
    """One measure on one database: its value, and the bound that it has to keep."""

    name: str
    database: str
    value: float
    bound: float | None = None
    at_least: bool = False

    @property
    def holds(self) -> bool | None:
        """Whether the bound is kept; None where there is none."""
        if self.bound is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass
class Bench:
    """A run of the benchmark: what it measures with, and what it has found."""

    size: Size
    directory: Path
    console: Console
    anchor: Anchor
    rabbitmq_url: str = ""
    figures: list[Figure] = field(default_factory=list)

    def add(
        self,
        name: str,
        database: str,
        value: float,
        bound: float | None = None,
        *,
        at_least: bool = False,
    ) -> None:
        """Keep a figure, and show it at once."""
        figure = Figure(name, database, value, bound, at_least)
        self.figures.append(figure)
        self.console.print(f"  {database}: {name}: {value:,.2f}")

    @contextmanager
    def deployment(self, database: str, **options: Any) -> Iterator[Deployment]:
        """A fleet with two workers on a database of its own."""
        with tempfile.TemporaryDirectory(dir=self.directory) as name:
            place = Path(name)
            servers = Family()
            try:
                url = f"sqlite:///{place / 'ledger.db'}"
                if database == "postgresql":
                    url = servers.keep(lambda: EmbeddedPostgres(durable=True)).url()
                with Deployment(place, url, servers=servers, **options) as deployment:
                    yield deployment
            finally:
                servers.close()

    def against_anchor(self, measure: Callable[[], Load]) -> tuple[Load, float]:
        """Measure between two runs of the anchor; the load, and its steps/s as a ratio to them."""
        ratios, loads = [], []
        for _ in range(self.size.repeats):
            before = self.anchor.load(runs=self.size.runs, steps=self.size.steps)
            load = measure()
            after = self.anchor.load(runs=self.size.runs, steps=self.size.steps)
            speed = (before.steps_per_s + after.steps_per_s) / 2
            ratios.append(load.steps_per_s / speed)
            loads.append(load)
        middle = sorted(range(len(ratios)), key=ratios.__getitem__)[len(ratios) // 2]
        return loads[middle], ratios[middle]

    # ---- the parts --------------------------------------------------------------------------

    def steps(self, database: str) -> None:
        """Durable steps a second beside the anchor, CPU a step, and what a worker holds."""
        size = self.size
        with self.deployment(database) as fleet:
            load, ratio = self.against_anchor(lambda: fleet.load(runs=size.runs, steps=size.steps))
            bound = 0.8 if database == "postgresql" else 0.6
            self.add("durable steps/s ÷ anchor", database, ratio, bound, at_least=True)
            cpu_bound = 2_500 if database == "postgresql" else None
            self.add("CPU µs a step, all processes", database, load.cpu_us, cpu_bound)
            self.add("worker memory (PSS), MB", database, fleet.memory_mb(), 90)

    def rabbitmq(self, database: str) -> None:
        """Durable steps a second with RabbitMQ as the broker, beside the anchor, which is on Redis.

        The server is not counted among the processes: it may be anywhere.
        """
        size = self.size
        with self.deployment(database, broker_url=self.rabbitmq_url) as fleet:
            load, ratio = self.against_anchor(lambda: fleet.load(runs=size.runs, steps=size.steps))
        self.add(ON_RABBITMQ, database, ratio)
        self.add("CPU µs a step on RabbitMQ, without the server", database, load.cpu_us)

    def latency(self, database: str) -> None:
        """From step to step of one run alone, and from enqueue to its first step."""
        size = self.size
        bounds = (3, 6, 5) if database == "postgresql" else (None, None, None)
        with self.deployment(database) as fleet:
            gaps: list[float] = []
            for _ in range(size.lone_runs):
                run_id = fleet.enqueue(steps=size.lone_steps)
                fleet.fleet.wait(run_id, timeout_s=60, poll_s=0.5)
                at = called_at_ns(fleet.fleet, run_id)
                gaps += [(b - a) / 1e6 for a, b in pairwise(at)]
            first = self._first_steps_ms(fleet, fleet.enqueue, size.first_steps)
        gaps.sort()
        self.add("step to step p50, ms", database, statistics.median(gaps), bounds[0])
        self.add("step to step p99, ms", database, gaps[int(len(gaps) * 0.99)], bounds[1])
        self.add("enqueue to first step p50, ms", database, statistics.median(first), bounds[2])

    def enqueue(self, database: str) -> None:
        """Enqueues a second of one client process, with nobody to take them up."""
        with self.deployment(database, workers=0) as fleet:
            began = time.monotonic()
            for _ in range(self.size.enqueues):
                fleet.enqueue(steps=2)
            speed = self.size.enqueues / (time.monotonic() - began)
        bound = 800 if database == "postgresql" else None
        self.add("enqueues/s a client process", database, speed, bound, at_least=True)

    def flat(self, database: str) -> None:
        """The cost of a step in a long run, and with a full ledger, as ratios to neither."""
        size = self.size
        with self.deployment(database) as fleet:
            empty = fleet.load(runs=size.runs, steps=size.steps)
            # As many runs side by side as there are long ones: steps that are at work together
            # share their trips to the database, which has nothing to do with their runs' length.
            repeats = size.long_steps // size.steps
            short_us = statistics.mean(
                fleet.load(runs=size.long_runs, steps=size.steps).cpu_us for _ in range(repeats)
            )
            long = fleet.load(runs=size.long_runs, steps=size.long_steps)
            fleet.seed_finished(size.finished)
            full = fleet.load(runs=size.runs, steps=size.steps)
        name = f"CPU of a step: run of {size.long_steps} ÷ run of {size.steps} steps"
        self.add(name, database, long.cpu_us / short_us)
        name = f"CPU of a step: {size.finished:,} finished runs ÷ none"
        self.add(name, database, full.cpu_us / empty.cpu_us)

    def waiting(self, database: str) -> None:
        """Many runs whose model takes its time, in one worker process."""
        size = self.size
        with self.deployment(database, workers=1, in_flight=2 * size.waiting_runs) as fleet:
            load = fleet.load(
                runs=size.waiting_runs, steps=size.waiting_steps, wait_ms=size.waiting_ms
            )
        ideal_s = size.waiting_steps * size.waiting_ms / 1000
        name = f"{size.waiting_runs} waiting runs: wall ÷ ideal"
        self.add(name, database, load.wall_s / ideal_s, 1.5)

    def sweep(self, database: str) -> None:
        """What a sweep costs that finds nothing, and one that finds much, whatever is finished."""
        size = self.size
        with self.deployment(database, workers=1) as fleet:
            empty = self._looks_ms(fleet)
            fleet.seed_finished(size.many_finished)
            full = self._looks_ms(fleet)
        for name, took_ms in empty.items():
            self.add(f"{name}, ms", database, took_ms)
            more = f"{name}: {size.many_finished:,} finished runs ÷ none"
            self.add(more, database, full[name] / took_ms)

    def backlog(self, database: str) -> None:
        """Very many effects in doubt, all due at once, while fresh runs come in."""
        size = self.size
        with self.deployment(database) as fleet:
            idle = self._first_steps_ms(fleet, fleet.enqueue, size.first_steps)
            fleet.seed_doubts(size.doubts)
            fleet.start_sweeper()
            began = time.monotonic()
            fresh: list[tuple[int, str]] = []
            lost: list[tuple[int, str]] = []
            while fleet.is_in_doubt():
                fresh.append(_enqueued(fleet.enqueue))
                if len(fresh) % 10 == 0:
                    lost.append(_enqueued(fleet.enqueue_lost))
                time.sleep(EVERY_S)
            settled_s = time.monotonic() - began
            fleet.until_completed(size.doubts)
            ended_s = time.monotonic() - began
            meanwhile, found = _took_ms(fleet, fresh), _took_ms(fleet, lost)
        of = f"{size.doubts:,} effects in doubt"
        self.add(f"{of}: settled a second", database, size.doubts / settled_s)
        self.add(f"{of}: until all are settled, s", database, settled_s)
        self.add(f"{of}: until all their runs have ended, s", database, ended_s)
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            took, usual = _quantile(meanwhile, share), _quantile(idle, share)
            self.add(f"enqueue to first step meanwhile {name}, ms", database, took)
            self.add(f"enqueue to first step {name}: meanwhile ÷ idle", database, took / usual)
            if found:
                name = f"lost message to first step meanwhile {name}, ms"
                self.add(name, database, _quantile(found, share))

    # ---- inside -----------------------------------------------------------------------------

    def _first_steps_ms(
        self, fleet: Deployment, enqueue: Callable[..., str], times: int
    ) -> list[float]:
        """How long it takes from accepting a run to the first call of its tool; of runs that come
        at their own time, not when the one before has ended.
        """
        enqueued = []
        for _ in range(times):
            enqueued.append(_enqueued(enqueue))
            time.sleep(EVERY_S)
        return _took_ms(fleet, enqueued)

    def _looks_ms(self, fleet: Deployment) -> dict[str, float]:
        """How long a sweep takes, and a look at the figures; the middle of many."""
        ledger = fleet.fleet.ledger
        reconciler = fleet.fleet.make_reconciler(publish=lambda messages: None)
        fleet.settle_down()
        took = {
            "an idle sweep": _median_ms(reconciler.sweep, self.size.sweeps),
            "the doctor's figures": _median_ms(ledger.figures, self.size.sweeps),
        }
        due = [fleet.enqueue_lost(steps=2) for _ in range(BATCH)]

        def batch() -> None:
            if reconciler.sweep() != BATCH:
                raise NotCompleted("the sweep has not found what was due")

        took[f"a sweep that publishes {BATCH} runs"] = _median_ms(
            batch, self.size.sweeps_due, before=lambda: fleet.wake(*due)
        )
        for run_id in due:
            fleet.fleet.cancel(run_id)
        return took


def _enqueued(enqueue: Callable[..., str]) -> tuple[int, str]:
    began = time.monotonic_ns()
    return began, enqueue(steps=2)


def _took_ms(fleet: Deployment, enqueued: list[tuple[int, str]]) -> list[float]:
    """From when runs were enqueued to the first calls of their tools."""
    for _, run_id in enqueued:
        fleet.fleet.wait(run_id, timeout_s=60)
    return [(called_at_ns(fleet.fleet, run)[0] - began) / 1e6 for began, run in enqueued]


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


def _median_ms(
    act: Callable[[], object], times: int, *, before: Callable[[], object] = lambda: None
) -> float:
    took = []
    for _ in range(times):
        before()
        began = time.perf_counter()
        act()
        took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)


def table_of(figures: list[Figure]) -> Table:
    """Show all figures beside their bounds."""
    table = Table(title="Handrail beside a bare Celery chain, both of this run")
    for title in ("measure", "database", "value", "first version", ""):
        table.add_column(title, justify="left" if title in ("measure", "database") else "right")
    for figure in figures:
        sign = "≥" if figure.at_least else "≤"
        bound = "" if figure.bound is None else f"{sign} {figure.bound:g}"
        verdict = {None: "", True: "holds", False: "MISSED"}[figure.holds]
        table.add_row(figure.name, figure.database, f"{figure.value:,.2f}", bound, verdict)
    return table


def main(
    only: Annotated[str, typer.Option(help=f"Parts, by comma: {', '.join(PARTS)}.")] = "",
    databases: Annotated[str, typer.Option(help="By comma.")] = "postgresql,sqlite",
    short: Annotated[
        bool, typer.Option(help="See that it runs; the figures mean nothing.")
    ] = False,
    rabbitmq_url: Annotated[
        str, typer.Option(help="A RabbitMQ to measure with, whose queues handrail.* are nobody's.")
    ] = "",
    to: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure Handrail beside a bare Celery chain."""
    console = Console()
    parts = [part for part in only.split(",") if part]
    parts = parts or [part for part in PARTS if part != "rabbitmq" or rabbitmq_url]
    for part in parts:
        if part not in PARTS:
            raise typer.BadParameter(f"{part!r} is none of {', '.join(PARTS)}")
    if "rabbitmq" in parts and not rabbitmq_url:
        raise typer.BadParameter("say with --rabbitmq-url where a RabbitMQ is")
    with (
        tempfile.TemporaryDirectory(prefix="handrail-bench-") as name,
        Anchor(Path(name)) as anchor,
    ):
        bench = Bench(SHORT if short else Size(), Path(name), console, anchor, rabbitmq_url)
        for part in parts:
            for database in databases.split(","):
                console.print(f"{part} on {database}")
                getattr(bench, part)(database)
    console.print(table_of(bench.figures))
    if not rabbitmq_url:
        console.print("RabbitMQ: not measured; --rabbitmq-url says where one is.")
    missed = [figure for figure in bench.figures if figure.holds is False]
    if not short:
        console.print(f"{len(missed)} figures miss the first version." if missed else "All hold.")
    if to is not None:
        found = {
            "machine": {"python": platform.python_version(), "platform": platform.platform()},
            "size": asdict(bench.size),
            "figures": [{**asdict(figure), "holds": figure.holds} for figure in bench.figures],
        }
        to.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    typer.run(main)
