"""Real worker processes for the broker's tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from handrail.broker.app import make_app
from handrail.broker.message import STEPS_QUEUE, StepMessage
from handrail.broker.publish import Publisher
from handrail.broker.redis_client import redis_client

SECONDS = 30  # for anything that must happen; only a failure takes that long
CELERY_WORKER = [sys.executable, "-m", "celery", "-A", "tests.broker_fleet", "worker", "-l", "INFO"]
ROOT = Path(__file__).parent.parent


@dataclass
class Bench:
    """One queue, the workers on it, and what they noted. Keys have a prefix of their own."""

    url: str
    directory: Path
    prefix: str = field(default_factory=lambda: f"t{uuid.uuid4().hex[:8]}.")

    def __post_init__(self) -> None:
        self.redis: Any = redis_client(self.url, timeout_s=SECONDS + 5)
        self.app = make_app(broker_url=self.url, key_prefix=self.prefix)
        self.publisher = Publisher(self.app)
        self.queue = self.prefix + STEPS_QUEUE

    def publish(self, *run_ids: str) -> None:
        self.publisher.publish([StepMessage(run_id=run_id, step=1, epoch=0) for run_id in run_ids])

    def next(self, kind: str) -> str:
        """The next note of a kind; fails when none comes."""
        found = self.redis.blpop([self.prefix + kind], timeout=SECONDS)
        assert found is not None, f"no note {kind!r} was left"
        text: str = found[1].decode()
        return text

    def notes(self, kind: str) -> list[str]:
        """The notes of a kind that nobody has read."""
        return [text.decode() for text in self.redis.lrange(self.prefix + kind, 0, -1)]

    def let_go(self) -> None:
        self.redis.lpush(self.prefix + "let-go", "go")

    def waiting(self) -> int:
        length: int = self.redis.llen(self.queue)
        return length

    @contextmanager
    def worker(self, *options: str, **environment: str) -> Iterator[Worker]:
        """A worker process that is ready. It is stopped at the end, by force if need be."""
        with self.process(*options, **environment) as worker:
            self.next("ready")
            yield worker

    @contextmanager
    def process(self, *options: str, **environment: str) -> Iterator[Worker]:
        """A worker process, which may refuse to start."""
        log = self.directory / f"worker-{uuid.uuid4().hex[:8]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*CELERY_WORKER, "--hostname", f"{uuid.uuid4().hex[:8]}@test", *options],
                cwd=ROOT,
                env={
                    **os.environ,
                    "BROKER_TEST_URL": self.url,
                    "BROKER_TEST_PREFIX": self.prefix,
                    **{f"BROKER_TEST_{name.upper()}": value for name, value in environment.items()},
                },
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        worker = Worker(process, log)
        try:
            yield worker
        finally:
            worker.stop()


@dataclass
class Worker:
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def ends(self) -> int:
        """Wait for its end, and return its exit code."""
        return self.process.wait(SECONDS)

    def stop(self) -> None:
        if self.is_alive:
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.ends()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # and the children of a pool
        self.process.wait()


def is_up(url: str) -> bool:
    try:
        return bool(redis_client(url).ping())
    except (redis.RedisError, OSError):
        return False
