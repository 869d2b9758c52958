"""A real RabbitMQ for tests: one node on free ports in a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

import psutil
import pytest

#: The program itself; the one on the PATH may want to change the user first.
PROGRAM: Final = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
MISSING: Final = "there is no RabbitMQ here: apt-get install rabbitmq-server"
SECONDS: Final = 60.0


class Rabbit:
    """A node with a port for clients; it can be frozen, killed, and started again with its data."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.port, distribution, names = (_free_port() for _ in range(3))
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        self.environment = {
            **os.environ,
            "HOME": str(place),
            "RABBITMQ_NODENAME": f"handrail{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "ERL_EPMD_PORT": str(names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(place / "mnesia"),
            "RABBITMQ_LOG_BASE": str(place / "log"),
            "RABBITMQ_PID_FILE": str(place / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(place / "none"),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._hosts = 0

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        with (self.place / "out.log").open("a") as output:
            self._process = subprocess.Popen(
                [PROGRAM], env=self.environment, stdout=output, stderr=output, cwd=self.place
            )
        limit = time.monotonic() + SECONDS
        while not self._answers():
            assert time.monotonic() < limit, (self.place / "out.log").read_text()[-2000:]
            time.sleep(0.1)

    def host(self) -> str:
        """Make a virtual host, whose queues nobody else has; returns its URL."""
        self._hosts += 1
        name = f"host{self._hosts}"
        made = (
            f'rabbit_vhost:add(<<"{name}">>, <<"tests">>), rabbit_auth_backend_internal:'
            f'set_permissions(<<"guest">>, <<"{name}">>, <<".*">>, <<".*">>, <<".*">>, <<"x">>).'
        )
        self.control("eval", made)
        return f"{self.url.removesuffix('/')}{name}"

    def control(self, *command: str) -> str:
        """Ask the node something, as an operator does."""
        return subprocess.run(
            [PROGRAM.with_name("rabbitmqctl"), "-q", *command],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def kill(self) -> None:
        """End it at once, as a power cut does."""
        for process in self._nodes():
            process.kill()
        if self._process is not None:
            self._process.wait(SECONDS)

    def stop(self) -> None:
        """End it, and what tells nodes each other's ports."""
        self.kill()
        limit = time.monotonic() + 5  # it stays while it believes in the node that was killed
        while b"Killed" not in self._told_epmd() and time.monotonic() < limit:
            time.sleep(0.1)

    def _told_epmd(self) -> bytes:
        told = subprocess.run(
            ["epmd", "-kill"], env=self.environment, capture_output=True, check=False
        )
        return told.stdout + told.stderr

    def freeze(self) -> None:
        """Let it stand still."""
        for process in self._nodes():
            process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        for process in self._nodes():
            process.send_signal(signal.SIGCONT)

    def _nodes(self) -> list[psutil.Process]:
        if self._process is None or self._process.poll() is not None:
            return []
        first = psutil.Process(self._process.pid)
        return [first, *first.children(recursive=True)]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as client:
                client.sendall(b"AMQP\x00\x00\x09\x01")
                client.settimeout(2)
                return bool(client.recv(1))
        except OSError:
            return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def is_there() -> bool:
    """Whether this machine has RabbitMQ."""
    return PROGRAM.exists() and shutil.which("epmd") is not None


def must_be_there() -> None:
    """Skip where there is no RabbitMQ, and fail where it was promised (as .ci/run does)."""
    if is_there():
        return
    if os.environ.get("HANDRAIL_TEST_RABBITMQ") == "required":
        pytest.fail(MISSING)
    pytest.skip(MISSING)
