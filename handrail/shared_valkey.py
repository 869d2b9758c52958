"""One embedded Valkey for all commands that work with one home directory.

The first command that needs a broker starts it, says so in a file there, and stops it at its end;
the others find the file and join. The file proves nothing: only a server that answers to the
password in it is ours, so a file that a killed command left behind is no obstacle.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import redis

from handrail.broker.redis_client import redis_client
from handrail.embedded import EmbeddedValkey
from handrail.errors import TryLater

RENDEZVOUS: Final = "valkey.json"
LOCK: Final = "valkey.lock"
ANSWER_S: Final = 2.0  # a server on this machine that takes longer is not there
LOOK_EVERY_S: Final = 1.0
MISSES: Final = 3  # looks in a row without an answer, after which the server is gone for good


@dataclass(eq=False)
class EmbeddedGone(TryLater):
    """The command that had started the embedded Valkey has ended, and the server with it."""

    code: ClassVar[str] = "embedded-gone"

    def __str__(self) -> str:
        return (
            "the embedded Valkey ended with the command that had started it: start this one again,"
            " or set HANDRAIL_BROKER_URL to a server of your own"
        )


@dataclass(frozen=True, slots=True)
class SharedValkey:
    """A server that is up. `owned`: this command started it and stops it."""

    url: str
    owned: bool


def find(home: Path) -> SharedValkey | None:
    """The server that another command runs for this home, if it is up."""
    try:
        url = str(json.loads((home / RENDEZVOUS).read_text("utf-8"))["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return SharedValkey(url, owned=False) if _answers(url) else None


@contextmanager
def shared_valkey(home: Path) -> Iterator[SharedValkey]:
    """Join the server of this home, or start it. Raises `EmbeddedMissing`, `EmbeddedFailed`."""
    home.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with _locked(home / LOCK):  # of two commands that start together, one starts the server
            valkey = find(home)
            if valkey is None:
                url = stack.enter_context(EmbeddedValkey(home)).url
                stack.callback(_withdraw, home / RENDEZVOUS, url)
                _write_privately(home / RENDEZVOUS, json.dumps({"url": url, "pid": os.getpid()}))
                valkey = SharedValkey(url, owned=True)
        yield valkey


@contextmanager
def ended_with(valkey: SharedValkey) -> Iterator[None]:
    """End this process in order when a server that somebody else runs is gone.

    It will never be back under its address. The process gets SIGTERM, and whoever has handled that
    comes out of this block as `EmbeddedGone`.
    """
    if valkey.owned:
        yield
        return
    gone, leaving = threading.Event(), threading.Event()

    def look() -> None:
        misses = 0
        while misses < MISSES:
            if leaving.wait(LOOK_EVERY_S):
                return
            misses = 0 if _answers(valkey.url) else misses + 1
        gone.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="handrail-valkey", daemon=True).start()
    try:
        yield
    except SystemExit:
        if not gone.is_set():
            raise
    finally:
        leaving.set()
    if gone.is_set():
        raise EmbeddedGone


def _withdraw(path: Path, url: str) -> None:
    """Remove our own file, not that of a command which has taken over meanwhile."""
    if url in path.read_text("utf-8"):
        path.unlink()


def _answers(url: str) -> bool:
    try:
        with redis_client(url, timeout_s=ANSWER_S) as client:
            return bool(client.ping())
    except (redis.RedisError, OSError, ValueError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_privately(path: Path, text: str) -> None:
    """Write a file that holds a password, all at once."""
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
