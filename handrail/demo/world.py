"""The processes of the demo and the directory they live in: started, used, gone.

Every process ends with this one, however this one ends, and the directory with them.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from handrail.demo.app import fleet
from handrail.demo.provider import start_provider
from handrail.demo.provider_client import ProviderClient
from handrail.demo.shop import Shop, seed
from handrail.embedded import EmbeddedValkey, log_tail
from handrail.keeper import KeptProcess
from handrail.settings import Settings

#: A lost lease is found out in 5 s instead of 30, and a request is believed to be stuck for 2 s at
#: most instead of 20: short enough to watch, and true of processes on one machine that is awake.
#: Even where it is not true nobody is paid twice: the key of a refund never expires.
SHORT_TIMES: Final[Mapping[str, Any]] = {
    "lease_ms": 5_000,
    "max_stall_ms": 2_000,
    "sweep_every_s": 0.5,
    "drain_timeout_s": 5.0,
}


class World:
    """A shop, a provider, workers and a beat, at work."""

    def __init__(
        self, directory: Path, shop: Shop, provider_url: str, environment: Mapping[str, str]
    ) -> None:
        self.shop = shop
        self.provider = ProviderClient(provider_url)
        self._directory = directory
        self._environment = environment
        self._processes: dict[Path, KeptProcess] = {}  # by log
        self._missed = 0

    def start_worker(self) -> None:
        """Start one more worker process."""
        self._start("worker", "--fleet", "handrail.demo.app:fleet", "--log-level", "info")

    def start_beat(self) -> None:
        """Start what makes the sweep run."""
        self._start("beat", "--fleet", "handrail.demo.app:fleet")

    def replace_worker(self) -> None:
        """Start a worker for one that was killed, and that nobody will miss."""
        self._missed += 1
        self.start_worker()

    def lost_processes(self) -> list[str]:
        """Say which processes have ended by themselves, as far as nobody killed them."""
        ended = [log for log, process in self._processes.items() if not process.is_running()]
        if len(ended) <= self._missed:
            return []
        return [f"{log.stem} ended by itself; its log ends with: {log_tail(log)}" for log in ended]

    def close(self) -> None:
        """Stop all processes, at the same time."""
        for process in self._processes.values():
            process.stop()
        for process in self._processes.values():
            process.close()

    def _start(self, command: str, *options: str) -> None:
        log = self._directory / f"{command}-{len(self._processes) + 1}.log"
        self._processes[log] = KeptProcess(
            [sys.executable, "-m", "handrail", command, *options],
            directory=self._directory,
            log=log,
            stop_signal=signal.SIGTERM,  # in order: steps at work are given back
            environment=self._environment,
        )


@contextmanager
def world(workers: int) -> Iterator[World]:
    """Start everything, and point `handrail.demo.app.fleet` of this process at it."""
    with ExitStack() as stack:
        directory = stack.enter_context(_directory())
        valkey = stack.enter_context(EmbeddedValkey(directory))
        shop = seed(directory / "shop.db")
        # It pays whatever it is asked to, so that a refund too many would show.
        provider = stack.enter_context(start_provider(directory / "provider"))
        settings: dict[str, Any] = {
            "home": directory,
            "database_url": f"sqlite:///{directory / 'ledger.db'}",
            "broker_url": valkey.url,
            **SHORT_TIMES,
        }
        fleet.settings = Settings.read(**_defaults() | settings)
        fleet.upgrade_database()
        stack.callback(fleet.close)
        environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("HANDRAIL_")},
            **{f"HANDRAIL_{name.upper()}": str(value) for name, value in settings.items()},
            "HANDRAIL_DEMO_SHOP": str(shop.path),
            "HANDRAIL_DEMO_PROVIDER": provider.url,
        }
        made = World(directory, shop, provider.url, environment)
        stack.callback(made.close)
        made.start_beat()
        for _ in range(workers):
            made.start_worker()
        yield made


@contextmanager
def _directory() -> Iterator[Path]:
    """A directory of our own whose keeper removes it, also when we are killed."""
    path = Path(tempfile.mkdtemp(prefix="handrail-demo-"))
    waiting = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
    with KeptProcess(waiting, directory=path, log=path / "keeper.log", remove=path):
        yield path


def _defaults() -> dict[str, Any]:
    """All settings as they are without an environment: the user's own are not meant for a demo."""
    return {name: field.get_default() for name, field in Settings.model_fields.items()}
