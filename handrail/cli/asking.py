"""Asking whoever gives a command, before it does what cannot be taken back."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from handrail.agent.people import says_something
from handrail.errors import BadInput
from handrail.terminal import visible


@dataclass(eq=False)
class NotConfirmed(BadInput):
    """Nobody has clearly said that it is to be done; nothing was."""

    code: ClassVar[str] = "not-confirmed"
    problem: str

    def __str__(self) -> str:
        return f"nothing was done: {self.problem}"


def must_confirm(
    question: str, *, to_type: str | None, yes: bool, reason: str, as_json: bool
) -> None:
    """Have a person confirm what was shown; returns where it may be done. Raises `NotConfirmed`.

    `to_type` is what has to be typed, as it is shown; None: a plain yes is enough. A program, and
    whoever has no terminal, says `--yes` and why.
    """
    if yes:
        if not says_something(reason):
            raise NotConfirmed("--yes takes --reason, which is kept with what is done")
        return
    if as_json or not sys.stdin.isatty():
        raise NotConfirmed("without a terminal there is nobody to ask: give --yes and --reason")
    if to_type is None:
        if _asked(f"{question} [y/N]: ").strip().lower() not in ("y", "yes"):
            raise NotConfirmed("you did not say yes")
    elif _asked(f"{question} Type {visible(to_type)}: ") != visible(to_type):
        raise NotConfirmed("what you typed is something else")


def _asked(prompt: str) -> str:
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        print(file=sys.stderr)
        raise NotConfirmed("nobody has answered")
    return line.rstrip("\n")


__all__ = ["NotConfirmed", "must_confirm"]
