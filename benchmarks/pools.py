"""Which pool carries a step best: the same no-op chain on each, beside a bare Celery chain.

    python -m benchmarks.pools            # all of them, about two minutes
    python -m benchmarks.pools loop-2     # only these

Figures are ratios to the anchor of the same run (two solo workers, prefetch 4, Celery's own
publishing, acknowledgements emulated), which is measured before and after: the machine's speed
drifts. A step is one message: received, handled, and the next one published.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from celery import Celery

from handrail.broker.app import make_app, register_step
from handrail.broker.message import StepMessage
from handrail.broker.publish import Publisher
from handrail.broker.redis_client import redis_client
from handrail.embedded import EmbeddedValkey

RUNS, STEPS, REPEATS = 200, 10, 3
WAITS, WAIT_S = 300, 1.0
DONE = "bench:done"


class LostChain(Exception):
    """Nothing here publishes again what was lost, so the figures would be wrong."""


@dataclass(frozen=True)
class Case:
    name: str
    workers: int
    pool: str | None  # None: ours
    places: int
    plain_celery: bool = False


ANCHOR = Case("anchor", workers=2, pool="solo", places=1, plain_celery=True)
CASES = (
    Case("loop-2", workers=2, pool=None, places=256),
    Case("loop-1", workers=1, pool=None, places=256),
    Case("threads-2", workers=2, pool="threads", places=32),
    Case("solo-2", workers=2, pool="solo", places=1),
    Case("prefork-2", workers=1, pool="prefork", places=2),
)
WAIT_CASES = (
    Case("loop-1", workers=1, pool=None, places=512),
    Case("threads-1", workers=1, pool="threads", places=64),
)


def chain_app() -> Celery:
    """The app of a worker process, as its environment says."""
    url, pool, wait_s = os.environ["URL"], os.environ["POOL"] or None, float(os.environ["WAIT_S"])
    done = redis_client(url)
    if os.environ["PLAIN"]:
        plain = Celery("bench", broker=url)
        plain.conf.update(task_ignore_result=True, worker_prefetch_multiplier=4)

        @plain.task(name="chain")
        def chain(run: str, step: int) -> None:
            if step < STEPS:
                chain.apply_async((run, step + 1))
            else:
                done.lpush(DONE, run)

        return plain

    app = make_app(broker_url=url, pool=pool)
    publisher = Publisher(app)

    async def step(message: StepMessage) -> None:
        if wait_s:
            await asyncio.sleep(wait_s)
        if not wait_s and message.step < STEPS:
            following = message.model_copy(update={"step": message.step + 1})
            publisher.publish_one(following)
        else:
            done.lpush(DONE, message.run_id)

    register_step(app, step)
    return app


if "URL" in os.environ:  # imported by a worker
    app = chain_app()


@contextmanager
def workers(case: Case, url: str, wait_s: float = 0) -> Iterator[list[psutil.Process]]:
    environment = {
        **os.environ,
        "URL": url,
        "POOL": case.pool or "",
        "WAIT_S": str(wait_s),
        "PLAIN": "yes" if case.plain_celery else "",
    }
    options = ["-A", "benchmarks.pools", "worker", "-l", "WARNING", "-c", str(case.places)]
    if case.pool:
        options += ["-P", case.pool]
    with tempfile.TemporaryFile() as log:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "celery", *options, "-n", f"bench{number}@localhost"],
                env=environment,
                cwd=Path(__file__).parent.parent,
                stdout=log,
                stderr=log,
            )
            for number in range(case.workers)
        ]
        try:
            yield [psutil.Process(process.pid) for process in processes]
        except LostChain:
            log.seek(0)
            print(log.read().decode()[-3000:], file=sys.stderr)
            raise
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


def start_chains(case: Case, url: str, runs: int) -> None:
    if case.plain_celery:
        plain = Celery("bench", broker=url)
        for number in range(runs):
            plain.send_task("chain", (f"run-{number}", 1))
    else:
        publisher = Publisher(make_app(broker_url=url))
        publisher.publish(
            [StepMessage(run_id=f"run-{n}", step=1, epoch=0, remaining_ms=1) for n in range(runs)]
        )


def wait_for(url: str, runs: int) -> None:
    client: Any = redis_client(url, timeout_s=60)
    for _ in range(runs):
        if client.blpop([DONE], timeout=50) is None:
            raise LostChain("a chain was lost: see the workers' log above")


def cpu_seconds(processes: list[psutil.Process]) -> float:
    family = [p for parent in processes for p in [parent, *parent.children(recursive=True)]]
    return sum(p.cpu_times().user + p.cpu_times().system for p in family)


def server_of(url: str) -> psutil.Process:
    client: Any = redis_client(url)
    return psutil.Process(client.info("server")["process_id"])


def measure(case: Case) -> tuple[float, float, float]:
    """Steps a second, CPU µs a step in all processes, and ms from step to step of a lone run."""
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedValkey(Path(directory)) as valkey,
        workers(case, valkey.url) as processes,
    ):
        url = valkey.url
        start_chains(case, url, 20)  # warm
        wait_for(url, 20)
        involved = [*processes, server_of(url)]
        rates, costs = [], []
        for _ in range(REPEATS):
            cpu, began = cpu_seconds(involved), time.monotonic()
            start_chains(case, url, RUNS)
            wait_for(url, RUNS)
            rates.append(RUNS * STEPS / (time.monotonic() - began))
            costs.append((cpu_seconds(involved) - cpu) / (RUNS * STEPS) * 1e6)
        lone = []
        for _ in range(20):
            began = time.monotonic()
            start_chains(case, url, 1)
            wait_for(url, 1)
            lone.append((time.monotonic() - began) / STEPS * 1e3)
        return statistics.median(rates), statistics.median(costs), statistics.median(lone)


def measure_waiting(case: Case) -> float:
    """Wall time of many waiting steps in one process, in units of one wait (the ideal is 1)."""
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedValkey(Path(directory)) as valkey,
        workers(case, valkey.url, WAIT_S),
    ):
        start_chains(case, valkey.url, 1)
        wait_for(valkey.url, 1)
        began = time.monotonic()
        start_chains(case, valkey.url, WAITS)
        wait_for(valkey.url, WAITS)
        return (time.monotonic() - began) / WAIT_S


def main(wanted: list[str]) -> None:
    print(
        f"{'pool':12} {'steps/s':>9} {'÷ anchor':>9} {'CPU µs':>8} {'÷ anchor':>9} {'lone ms':>8}"
    )
    first = measure(ANCHOR)
    results = [(case, measure(case)) for case in CASES if not wanted or case.name in wanted]
    last = measure(ANCHOR)
    anchor = [statistics.mean(pair) for pair in zip(first, last, strict=True)]
    for case, (rate, cost, lone) in [(ANCHOR, first), *results, (ANCHOR, last)]:
        print(
            f"{case.name:12} {rate:9.0f} {rate / anchor[0]:9.2f} {cost:8.0f} "
            f"{cost / anchor[1]:9.2f} {lone:8.2f}"
        )
    if not wanted:
        print(f"\n{WAITS} steps that wait {WAIT_S:.0f} s, one process: wall ÷ one wait")
        for case in WAIT_CASES:
            print(f"{case.name:12} {measure_waiting(case):9.2f}  ({case.places} places)")


if __name__ == "__main__":
    main(sys.argv[1:])
