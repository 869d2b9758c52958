"""The anchor: a bare Celery chain on Valkey with no SQL at all, and no promise of any kind.

Two solo workers, prefetch 4, Celery's own publishing and acknowledgements. Its speed is the unit in
which ours is given, since the speed of the machine drifts: ratios of one run can be compared,
figures of two runs cannot.
"""

from __future__ import annotations

import os
import time
from functools import cache, partial
from pathlib import Path
from types import TracebackType

import redis
from celery import Celery

from benchmarks.processes import Family, Load, cpu_seconds, start_worker
from handrail.embedded import EmbeddedValkey

WORKERS = 2
URL = "ANCHOR_URL"
DONE = "anchor:done"
PATIENCE_S = 60

app = Celery("anchor", broker=os.environ.get(URL, "memory://"))
app.conf.update(task_ignore_result=True, worker_prefetch_multiplier=4)


@app.task(name="anchor.step")
def step(number: int, steps: int) -> None:
    """Publish the next step, or say which process has ended the chain."""
    if number < steps:
        step.apply_async((number + 1, steps))
    else:
        _client().lpush(DONE, os.getpid())


def _bytes(told: bytes | str) -> bytes:
    return told.encode() if isinstance(told, str) else told


@cache
def _client() -> redis.Redis:
    return redis.Redis.from_url(str(app.conf.broker_url), socket_timeout=PATIENCE_S + 5)


class Anchor:
    """The bare chain on workers of its own, for the length of a `with` block."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._family = Family()
        self._valkey = EmbeddedValkey(directory)

    def __enter__(self) -> Anchor:
        self._family.keep(lambda: self._valkey)
        app.conf.update(broker_url=self._valkey.url)
        for number in range(WORKERS):
            options = ["-P", "solo", "-c", "1", "--without-mingle", "--without-gossip"]
            self._family.keep(
                partial(
                    start_worker,
                    "benchmarks.anchor:app",
                    options,
                    {URL: self._valkey.url},
                    log=self._directory / f"anchor-{number}.log",
                )
            )
        seen: set[bytes] = set()
        while len(seen) < WORKERS:  # until both are at work
            seen |= self._chains(runs=20, steps=2)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._family.close()

    def load(self, *, runs: int, steps: int) -> Load:
        """Run chains side by side, and say what they took."""
        processes = self._family.processes()
        cpu_s, began = cpu_seconds(processes), time.monotonic()
        self._chains(runs=runs, steps=steps)
        wall_s = time.monotonic() - began
        return Load(runs * steps, wall_s, cpu_seconds(processes) - cpu_s)

    def _chains(self, *, runs: int, steps: int) -> set[bytes]:
        for _ in range(runs):
            step.apply_async((1, steps))
        ended: set[bytes] = set()
        for _ in range(runs):
            told = _client().brpop([DONE], timeout=PATIENCE_S)
            if told is None:
                raise TimeoutError(f"a chain of the anchor was lost: see {self._directory}")
            ended.add(_bytes(told[1]))
        return ended
