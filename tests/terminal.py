"""A terminal to give commands at: what a person types is typed, and what is shown is read."""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PATIENCE_S: Final = 50.0
PROMPT: Final = re.compile(r"(\[y/N\]|\? Type [^\n]*): \Z")


@dataclass(frozen=True, slots=True)
class Shown:
    """What a command left on the screen, and its exit code."""

    screen: str
    code: int


def at_terminal(
    command: Sequence[str],
    *,
    directory: Path,
    typed: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Shown:
    """Give a command at a terminal of 120 columns; type a line at each of its prompts."""
    ours, theirs = os.openpty()
    started = subprocess.Popen(
        command,
        cwd=directory,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "120", **(environment or {})},
    )
    os.close(theirs)
    try:
        screen = _followed(ours, [*typed])
        return Shown(screen, started.wait(PATIENCE_S))
    finally:
        started.kill()
        started.wait()
        os.close(ours)


def _followed(terminal: int, typed: list[str]) -> str:
    seen, since = b"", 0
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            more = os.read(terminal, 65_536)
        except OSError:  # Linux says so once nobody holds the other side any more
            more = b""
        if not more:
            break
        seen += more
        if typed and PROMPT.search(_text(seen[since:])):
            os.write(terminal, f"{typed.pop(0)}\n".encode())
            since = len(seen)
    assert not typed, f"nobody asked for {typed}:\n{_text(seen)}"
    return _text(seen)


def _text(seen: bytes) -> str:
    return seen.decode("utf-8", "replace").replace("\r\n", "\n")
