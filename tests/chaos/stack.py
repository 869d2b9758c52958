"""The deployment under chaos: its processes, started as a user starts them, and kept alive as a
supervisor would.

Three workers, two beats, Valkey, PostgreSQL (or an SQLite file), a provider. Each process reaches
its servers through links of its own (tests/chaos/proxy.py). Nothing is left behind, however this
process ends: every other process has a keeper, and so has the directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import psutil
import redis
from sqlalchemy.engine import make_url

from handrail import Fleet
from handrail.keeper import KeptProcess
from handrail.ledger.database import Database
from handrail.ledger.tables import METADATA
from handrail.settings import Settings
from handrail.testing.services import EmbeddedPostgres
from tests.chaos import provider
from tests.chaos.app import declare
from tests.chaos.kinds import Pace
from tests.chaos.proxy import Link, Proxies
from tests.live import ROOT, FailingBroker, FailingStore

WORKERS: Final = ("worker-1", "worker-2", "worker-3")
BEATS: Final = ("beat-1", "beat-2")
CLIENT: Final = "client"
FLEET: Final = "tests.chaos.app:fleet"
START_S: Final = 60.0
RESTART_S: Final = 1.0  # how long a supervisor takes to start a process again
POLL_S: Final = 0.1


@dataclass(slots=True)
class Slot:
    """A place for one process, which is started again whenever it has ended."""

    name: str
    command: str  # worker or beat
    pid_file: Path
    log: Path
    process: KeptProcess | None = None
    restart_at: float = 0.0
    starts: int = 0

    @property
    def pid(self) -> int:
        """The process that is there now; 0 while there is none."""
        try:
            pid = int(self.pid_file.read_text() or 0)
        except OSError:
            return 0
        return pid if psutil.pid_exists(pid) else 0

    @property
    def is_ready(self) -> bool:
        """Whether the process takes work; a beat has nothing more to say than that it is there."""
        ready = self.pid_file.with_suffix(".ready") if self.command == "worker" else self.pid_file
        return bool(self.pid) and ready.exists()


@dataclass(slots=True)
class Stack:
    """The deployment, for the length of a `with` block."""

    pace: Pace
    database: str = "postgresql"
    seed: int = 0
    slots: dict[str, Slot] = field(default_factory=dict)
    directory: Path = Path()
    store: FailingStore | None = None
    _environments: dict[str, dict[str, Any]] = field(default_factory=dict)  # settings, by slot
    _held: dict[int, int] = field(default_factory=dict)  # paused processes: by how many faults
    _guard: threading.RLock = field(default_factory=threading.RLock)
    _closing: threading.Event = field(default_factory=threading.Event)
    _parts: ExitStack = field(default_factory=ExitStack)
    broker: FailingBroker = field(init=False)
    proxies: Proxies = field(init=False)
    fleet: Fleet = field(init=False)
    direct: Database = field(init=False)
    provider_port: int = field(init=False, default=0)
    provider_pid: int = field(init=False, default=0)
    _direct_url: str = field(init=False, default="")

    # ---- coming and going ------------------------------------------------------------------------

    def __enter__(self) -> Stack:
        try:
            self._start()
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
        self._closing.set()
        self._parts.close()

    def _start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="handrail-chaos-"))
        self._parts.callback(shutil.rmtree, self.directory, ignore_errors=True)
        # If this process is killed, somebody else has to clear up.
        nobody = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1e6)"]
        self._keep(nobody, "directory", remove=self.directory)
        self._start_servers()
        self.proxies = Proxies()
        self._parts.callback(self.proxies.close)
        self.fleet = declare(
            Fleet("chaos", settings=Settings.read(**self._settings(CLIENT))), self.pace
        )
        self._parts.callback(self.fleet.close)
        self.fleet.upgrade_database()
        self.direct = Database(self._direct_url)
        self._parts.callback(self.direct.close)
        for command, names in (("worker", WORKERS), ("beat", BEATS)):
            for name in names:
                pid_file = self.directory / f"{name}.pid"
                self.slots[name] = Slot(name, command, pid_file, self.directory / f"{name}.log")
        self._parts.callback(self._stop_processes)
        for slot in self.slots.values():
            self._begin(slot)
        self._until(
            "all processes are at work", lambda: all(s.is_ready for s in self.slots.values())
        )
        supervisor = threading.Thread(target=self._supervise, name="chaos-supervisor", daemon=True)
        supervisor.start()
        self._parts.callback(supervisor.join)
        self._parts.callback(self._closing.set)

    def _start_servers(self) -> None:
        self.broker = FailingBroker(self.directory)
        self._parts.callback(self.broker.stop)
        self.broker.start()
        if self.database == "postgresql":
            # Durable: what it has committed must outlive its crash.
            server = self._parts.enter_context(EmbeddedPostgres())
            self._direct_url = server.create_database("chaos")
            self.store = FailingStore(self._direct_url)
        else:
            self._direct_url = f"sqlite:///{self.directory / 'ledger.db'}"
        self.provider_port = _free_port()
        options = ["--port", self.provider_port, "--database", self.provider_records]
        command = [sys.executable, "-m", "tests.chaos.provider", *options, "--seed", self.seed]
        self._keep([str(part) for part in command], "provider")
        self._until("the provider answers", self._provider_answers)

    def _provider_answers(self) -> bool:
        with suppress(OSError):
            self.provider_pid = self.tell_provider({"verb": "state"})["pid"]
        return bool(self.provider_pid)

    def _keep(self, command: list[str], name: str, **how: Any) -> KeptProcess:
        log = self.directory / f"{name}.log"
        process = KeptProcess(command, directory=ROOT, log=log, **how)
        self._parts.callback(process.close)
        return process

    # ---- addresses -------------------------------------------------------------------------------

    @property
    def provider_records(self) -> Path:
        """The provider's own records, an SQLite file."""
        return self.directory / "provider.db"

    def links(self, server: str) -> list[Link]:
        """The ways of all processes to `database` or `broker`."""
        return [link for name, link in self.proxies.links.items() if name.endswith(server)]

    def _settings(self, name: str) -> dict[str, Any]:
        broker = make_url(self.broker.url)
        assert broker.port is not None
        way = self.proxies.open(f"{name} to the broker", ("127.0.0.1", broker.port))
        settings = {
            "broker_url": f"redis://127.0.0.1:{way.port}/0",
            "tenant": "chaos",
            "approval_secret": "of the chaos test/" * 3,
            "decisions_per_minute": "0",
        }
        url = make_url(self._direct_url)
        if self.database == "postgresql":
            server = Path(str(url.query["host"])) / ".s.PGSQL.5432"
            way = self.proxies.open(f"{name} to the database", server)
            url = url.set(host="127.0.0.1", port=way.port, query={"sslmode": "disable"})
        settings["database_url"] = url.render_as_string(hide_password=False)
        return {**settings, **self.pace.settings()}

    def tell_provider(self, what: dict[str, Any]) -> dict[str, Any]:
        """Make a request of the provider's, beside the fleet."""
        return provider.request_blocking(self.provider_port, what, by_s=time.monotonic() + 60)

    def in_the_air(self) -> int:
        """How many writes have yet to land at the provider."""
        return int(self.tell_provider({"verb": "state"})["in_the_air"])

    def keep_evidence(self, place: Path) -> None:
        """Copy logs, records and the ledger's tables to a place that outlives us."""
        place.mkdir(parents=True, exist_ok=True)
        for file in (*self.directory.glob("*.log"), *self.directory.glob("provider.db*")):
            shutil.copy(file, place)
        for table in METADATA.tables:
            rows = self.direct.run(f"SELECT * FROM {table}", {})
            (place / f"{table}.json").write_text(json.dumps(rows))

    # ---- processes -------------------------------------------------------------------------------

    def _begin(self, slot: Slot) -> None:
        for left in (slot.pid_file, slot.pid_file.with_suffix(".ready")):
            left.unlink(missing_ok=True)
        clock = self._clock(slot.name)
        if not slot.starts:
            self._environments[slot.name] = self._settings(slot.name)
            clock.write_bytes(struct.pack("d", 0.0))
        settings = self._environments[slot.name]
        environment = {
            **os.environ,
            **self.pace.environment(),
            **{f"HANDRAIL_{key.upper()}": str(value) for key, value in settings.items()},
            "HANDRAIL_FLEET": FLEET,
            "CHAOS_PROVIDER": str(self.provider_port),
            "CHAOS_PID": str(slot.pid_file),
            "CHAOS_CLOCK": str(clock) if self.database == "postgresql" else "",
            "PYTHONUNBUFFERED": "1",
        }
        slot.starts += 1
        slot.process = KeptProcess(
            [sys.executable, "-m", "handrail", slot.command],
            directory=ROOT,
            log=slot.log,
            environment=environment,
        )

    def _supervise(self) -> None:
        while not self._closing.wait(POLL_S):
            for slot in self.slots.values():
                if slot.process is None or slot.process.is_running():
                    continue
                if not slot.restart_at:
                    slot.restart_at = time.monotonic() + RESTART_S
                elif time.monotonic() >= slot.restart_at:
                    slot.restart_at = 0.0
                    slot.process.close()
                    self._begin(slot)

    def _stop_processes(self) -> None:
        running = [slot.process for slot in self.slots.values() if slot.process is not None]
        for process in running:
            process.stop()
        for process in running:
            process.close()

    def signal(self, name: str, what: signal.Signals) -> int:
        """Send a signal to the process of a slot; return its id, 0 where there is none."""
        pid = self.slots[name].pid
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, what)
        return pid

    def pause(self, pid: int) -> None:
        """Stop a process until as many `resume` as `pause` it."""
        with self._guard:
            self._held[pid] = self._held.get(pid, 0) + 1
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def resume(self, pid: int) -> None:
        """Let a process go on, unless another fault holds it."""
        with self._guard:
            self._held[pid] -= 1
            if not self._held[pid]:
                del self._held[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def paused(self) -> list[str]:
        """The slots whose process is stopped at the moment."""
        return [name for name, slot in self.slots.items() if slot.pid in self._held]

    def broker_pid(self) -> int:
        """The process of Valkey."""
        with redis.Redis.from_url(self.broker.url, socket_timeout=5) as client:
            return int(client.info("server")["process_id"])

    def _clock(self, name: str) -> Path:
        return self.directory / f"{name}.clock"

    def set_clock(self, name: str, ahead_s: float) -> None:
        """Put a process's wall clock ahead, or behind."""
        with self._clock(name).open("r+b") as file:
            file.write(struct.pack("d", ahead_s))

    def logs(self) -> dict[str, str]:
        """What the processes have logged, by slot."""
        return {n: slot.log.read_text(errors="replace") for n, slot in self.slots.items()}

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + START_S
        while not holds():
            if time.monotonic() > give_up_at:
                said = "\n".join(path.read_text() for path in self.directory.glob("*.log"))
                raise TimeoutError(f"not within {START_S:g} s: {what}\n{said[-4_000:]}")
            time.sleep(POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
