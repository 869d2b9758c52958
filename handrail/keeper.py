"""A server that lives exactly as long as the process that asked for it, however that process ends.

A clean exit, an exception and SIGTERM could be handled by a `finally`; SIGKILL and a machine out of
memory cannot. So a small keeper process stands between us and the server. It holds the read end of
a pipe whose write end only we hold: when we are gone, for whatever reason, the kernel closes the
pipe, and the keeper stops the server. Why not simply PR_SET_PDEATHSIG from us: it fires when the
*thread* that started the server ends, needs a preexec function in a program with threads, and is
Linux's alone. It serves below, where there is one thread: who kills the keeper kills the server.

The keeper runs this file by its path, isolated and without site packages: standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

STOP_SECONDS = 15  # PostgreSQL may have to write out what it holds; Valkey goes at once
REMOVE_AGAIN_SECONDS = 0.05


class KeptProcess:
    """A running command that ends with us. `close`, or leaving the context, stops it and waits.

    `directory` is its working directory, `log` the file its output is appended to, `stop_signal`
    what stops it, `environment` its variables (None: ours). `user` is the numeric user id (and
    group id) it runs under, which only root may give; `remove` names a directory that the keeper
    deletes at the end, even when we were killed.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        directory: Path,
        log: Path,
        stop_signal: signal.Signals = signal.SIGKILL,
        user: int | None = None,
        remove: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        order = {
            "command": [str(part) for part in command],
            "stop_signal": int(stop_signal),
            "user": user,
            "remove": None if remove is None else str(remove),
        }
        with log.open("ab") as output:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=None if environment is None else dict(environment),
                start_new_session=True,  # Ctrl-C in a terminal is ours: we stop the server last
            )

    def is_running(self) -> bool:
        """Say whether the server is still up; its keeper ends with it."""
        return self._keeper.poll() is None

    def stop(self) -> None:
        """Tell the server to stop, and do not wait for it: `close` does."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()

    def close(self) -> None:
        """Stop the server and wait until it is gone. Doing so twice is harmless."""
        self.stop()
        try:
            self._keeper.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def __enter__(self) -> KeptProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _dying_with_the_keeper() -> Callable[[], object] | None:
    """What the server does before it starts: ask Linux to be killed when the keeper dies.

    It is looked up here, since the server's user may be unable to read Python's own files.
    """
    if sys.platform != "linux":
        return None
    pr_set_pdeathsig = 1
    return partial(ctypes.CDLL(None).prctl, pr_set_pdeathsig, int(signal.SIGKILL))


def _keep(command: Sequence[str], *, stop_signal: int, user: int | None, remove: str | None) -> int:
    """Run `command` until it ends or our standard input does. Return its exit code."""
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        preexec_fn=_dying_with_the_keeper(),
    )

    def stop_when_nobody_holds_the_pipe() -> None:
        os.read(0, 1)
        server.send_signal(stop_signal)

    threading.Thread(target=stop_when_nobody_holds_the_pipe, daemon=True).start()
    code = server.wait()
    if remove is not None:
        _remove(Path(remove))
    return code


def _remove(directory: Path) -> None:
    """Delete `directory`, again while it is still there: what dies beside us may write into it."""
    give_up_at = time.monotonic() + STOP_SECONDS
    while directory.exists() and time.monotonic() < give_up_at:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(REMOVE_AGAIN_SECONDS)


if __name__ == "__main__":
    sys.exit(_keep(**json.loads(sys.argv[1])))
