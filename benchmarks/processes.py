"""The processes of a measurement: started, counted, stopped, never left behind."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from handrail.keeper import KeptProcess

ROOT = Path(__file__).resolve().parent.parent
_T = TypeVar("_T")


@dataclass(frozen=True)
class Load:
    """What a number of steps took: wall and CPU seconds, the latter of all processes, ours
    included.
    """

    steps: int
    wall_s: float
    cpu_s: float

    @property
    def steps_per_s(self) -> float:
        """Steps a second."""
        return self.steps / self.wall_s

    @property
    def cpu_us(self) -> float:
        """Microseconds of CPU a step."""
        return self.cpu_s / self.steps * 1e6


class Family:
    """Servers and workers that belong to one thing that is measured; stopped in reverse order."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._children: list[psutil.Process] = []

    def keep(self, start: Callable[[], AbstractContextManager[_T]]) -> _T:
        """Start something and count whatever processes that adds to ours."""
        before = set(psutil.Process().children())
        started = self._stack.enter_context(start())
        self._children += set(psutil.Process().children()) - before
        return started

    def adopt(self, other: Family) -> None:
        """Count what another family keeps, too."""
        self._children += other._children

    def processes(self) -> list[psutil.Process]:
        """Every process of the family, and ours, which gives it the work."""
        found = [psutil.Process()]
        for child in self._children:
            with suppress(psutil.NoSuchProcess):
                found += [child, *child.children(recursive=True)]
        return found

    def close(self) -> None:
        """Stop all of them."""
        self._stack.close()


def start_worker(
    app: str, options: Sequence[str], environment: Mapping[str, str], *, log: Path
) -> KeptProcess:
    """Start a Celery worker that ends with us; it is not ready yet."""
    settings = [f"{name}={value}" for name, value in environment.items()]
    celery = [sys.executable, "-m", "celery", "-A", app, "worker", "-l", "WARNING"]
    name = ["-n", f"bench-{secrets.token_hex(4)}@localhost"]
    return KeptProcess(
        ["/usr/bin/env", *settings, *celery, *name, *options],
        directory=ROOT,
        log=log,
        stop_signal=signal.SIGTERM,
    )


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """CPU time that living processes have used so far, in user code and in the kernel."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            used: Any = process.cpu_times()
            total += used.user + used.system
    return total


def worker_memory_mb(processes: Iterable[psutil.Process]) -> float:
    """The proportional set size of the largest Celery worker, in megabytes (10**6 bytes)."""
    sizes = [0]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if "celery" in process.cmdline():
                sizes.append(process.memory_full_info().pss)
    return max(sizes) / 1e6
