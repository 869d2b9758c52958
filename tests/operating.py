"""The recorded session of docs/operating.md: read, given again, and recorded anew.

`python -m tests.operating` gives its commands to a shop of its own and writes down what they show.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.shop import Shop, opened
from tests.terminal import at_terminal

GUIDE: Final = Path(__file__).resolve().parent.parent / "docs" / "operating.md"
SESSION: Final = re.compile(r"(?<=```console\n)(.*?)(?=```)", re.DOTALL)
ID: Final = re.compile(r"\b[0-9a-f]{32,64}\b")
TYPED: Final = re.compile(r"^(?:.*\? Type .*|.*\[y/N\]): (.*)$", re.MULTILINE)
#: What is another each time: instants, ages, amounts of milliseconds, and the blanks beside them.
CHANGING: Final = (
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{3})?"), "TIME"),
    (re.compile(r"\b\d{13}\b"), "INSTANT"),
    (re.compile(r"\b\d+ ms\b"), "SPAN"),
    (re.compile(r"\b\d+[smhd](?: \d+[smh])?\b"), "AGE"),
    (re.compile(r"\s+"), " "),  # where a line is broken depends on how long an age is
)


@dataclass(frozen=True, slots=True)
class Step:
    """One command of the session, what was typed at its prompts, and what it has shown."""

    command: str
    shown: str

    @property
    def typed(self) -> tuple[str, ...]:
        """What a person has typed."""
        return tuple(TYPED.findall(self.shown))


def sessions(text: str) -> list[list[Step]]:
    """Read the sessions of a document; each begins anew with a list of what there is to do."""
    return [
        [
            Step(*one.partition("\n")[::2])
            for one in re.split(r"^\$ ", block, flags=re.MULTILINE)
            if one
        ]
        for block in SESSION.findall(text)
    ]


def settled(shown: str) -> str:
    """Write what was shown without what is another each time; ids are not touched."""
    for pattern, word in CHANGING:
        shown = pattern.sub(word, shown)
    return shown.strip()


class Replay:
    """Gives the commands of the session again. The ids in it stand for those of this time."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._ids: dict[str, str] = {}

    def give(self, step: Step) -> Step:
        """Give a command; returns it with the ids and the screen of this time."""
        command = ID.sub(lambda found: self._ids[found[0]], step.command)
        words = [sys.executable, "-m", *shlex.split(command)]
        answered = at_terminal(words, directory=self._shop.directory, typed=step.typed)
        assert answered.code == 0, answered.screen
        for then, now in zip(ID.findall(step.shown), ID.findall(answered.screen), strict=False):
            self._ids.setdefault(then, now)
        return Step(command, answered.screen)

    def expected(self, step: Step) -> str:
        """What was recorded, with the ids of this time."""
        return settled(ID.sub(lambda found: self._ids.get(found[0], found[0]), step.shown))


@contextmanager
def staffed_shop(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """The shop of the guide: one payment in doubt, and two that wait for consent."""
    with opened(directory, monkeypatch, staffed=True) as shop:
        shop.handed_off(order="order-42")
        offset = shop.loaded.OFFSET
        offset.write_text(str(int(offset.read_text()) + 300_000))  # nothing can land any more
        shop.parked(order="order-77", to="Mill & Sons", cents=129_900)
        shop.parked(order="order-78", to="Mill & Sons", cents=129_900)
        shop.forget()
        yield shop


def _record() -> None:
    text = GUIDE.read_text("utf-8")
    with (
        tempfile.TemporaryDirectory() as directory,
        pytest.MonkeyPatch.context() as monkeypatch,
        staffed_shop(Path(directory), monkeypatch) as shop,
    ):
        replay = Replay(shop)
        for block in SESSION.findall(text):
            (steps,) = sessions(f"```console\n{block}```")
            given = [replay.give(step) for step in steps]
            lines = "\n".join(f"$ {step.command}\n{step.shown}" for step in given).splitlines()
            text = text.replace(block, "\n".join(line.rstrip() for line in lines) + "\n")
    GUIDE.write_text(text, "utf-8")


if __name__ == "__main__":
    _record()
