"""The cases: which place, of which setting, on which database; and how one is run.

The places of a setting are found by a run without a fault. A case kills a child at one of them,
lets others recover, and holds the outcome against the service's records.
"""

from __future__ import annotations

import gc
import json
import re
import signal
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final

from tests.crash.bench import Bench
from tests.crash.checks import judge
from tests.crash.child import Ended, HarnessError, fork
from tests.crash.databases import TABLES, Database
from tests.crash.fuse import Fuse
from tests.crash.points import Cell, Place, Side, Story
from tests.crash.recovery import play, recover
from tests.crash.scenarios import WAYS, Setting

#: What is drawn anew in every process, and means nothing.
_DRAWN: Final = re.compile(r"receipt:[0-9a-f]+")
#: A brief sweep takes every place of these settings, but for sweeps that find nothing new; of the
#: others what their scenario is about, for these kinds and ways.
WHOLE: Final = tuple(f"run/key+query/{way}" for way in WAYS)
_BRIEF_KINDS: Final = ("key+query", "nothing")
_BRIEF_WAYS: Final = ("ok", "lost")
_SWEEPS: Final = 3
#: What can be made of the places of a setting.
PLANS: Final = ("brief", "singles", "lines", "cuts", "pairs")


def _in_brief(setting: Setting, place: Place) -> bool:
    scenario = setting.scenario
    if place.what in ("due_for_sweep", "beat"):
        return str(setting) in WHOLE and place.number <= _SWEEPS
    if str(setting) in WHOLE:
        return True
    if scenario.name == "run":
        typical = setting.way in (*_BRIEF_WAYS, "late")
    else:
        typical = setting.way in _BRIEF_WAYS and setting.kind in _BRIEF_KINDS
    return typical and place.what in scenario.about


@dataclass(frozen=True, slots=True)
class Case:
    """One case. `place` is where the first process dies (empty: nowhere), `second` where the one
    that recovers does. `cuts`: the connection to the database breaks there, and the process goes
    on.
    """

    database: str
    setting: Setting
    place: str
    second: str = ""
    cuts: bool = False

    def __str__(self) -> str:
        if not self.place:
            return f"{self.database}/{self.setting}"
        first = f"{self.database}/{self.setting}/{'cut:' if self.cuts else ''}{self.place}"
        return f"{first}/{self.second}" if self.second else first

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read what `str` wrote."""
        database, scenario, kind, way, *places = text.split("/")
        place, second = [*places, "", ""][:2]
        setting = Setting.parse(f"{scenario}/{kind}/{way}")
        return cls(database, setting, place.removeprefix("cut:"), second, place.startswith("cut:"))

    @property
    def doubled(self) -> bool:
        """Whether the broker delivers everything again after the crash; else it has lost it all."""
        return bool(zlib.crc32(str(self).encode()) & 1)

    @property
    def line(self) -> int | None:
        """The line at which the first process dies, if it is a line."""
        what, _, number = self.place.partition("#")
        return int(number) if what == "line" else None


@dataclass(slots=True)
class Report:
    """What came of cases. `kills` counts the processes that were really killed, `hits` the cells
    of the plan at which they were, `known` the cases that left what was recovered from before.
    """

    cases: int = 0
    kills: int = 0
    cuts: int = 0
    lines: int = 0
    known: int = 0
    seconds: float = 0.0
    slowest_ms: int = 0
    hits: Counter[Cell] = field(default_factory=Counter)
    unnamed: set[str] = field(default_factory=set)
    ends: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of the sweep itself

    def add(self, other: Report) -> None:
        """Add another report to this one."""
        for name in ("cases", "kills", "cuts", "lines", "known", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.slowest_ms = max(self.slowest_ms, other.slowest_ms)
        self.hits += other.hits
        self.ends += other.ends
        self.unnamed |= other.unnamed
        self.violations += other.violations
        self.errors += other.errors


class Sweeper:
    """Runs cases on one database."""

    def __init__(self, database: Database, directory: Path) -> None:
        self.database = database
        self.bench = Bench(database.url, directory)
        self.report = Report()
        self._judged: set[tuple[str, bool, str]] = set()
        gc.disable()  # between cases is time enough; a child lives too short
        gc.collect()
        gc.freeze()

    # ---- what there is ---------------------------------------------------------------------------

    def story(self, setting: Setting, *, lines: bool = False) -> Story:
        """What a process of a setting does that nobody disturbs; its end is judged too."""
        gc.collect()
        self._fresh(setting)
        name = f"{self.database.name}/{setting}"
        ended = fork(lambda: self._first(Fuse(self.bench.shared), lines))
        self._at_rest()
        story = self._whole(name, ended)
        self._others(name, doubled=False)
        self.report.unnamed |= story.unnamed()
        return story

    def _whole(self, name: str, ended: Ended) -> Story:
        """The story of a child that was to live; empty, and a violation, where it failed."""
        if ended.signal:
            raise HarnessError(f"{name}: a child was killed by signal {ended.signal}")
        if ended.story is None:
            self.report.violations.append((name, ended.failure))
            return Story((), {}, 0)
        return ended.story

    def cases(self, plan: str, setting: Setting, every: int = 1) -> Iterator[tuple[Case, Story]]:
        """The cases of a plan, or every n-th of them, with the story that each is of."""
        name = self.database.name
        story = self.story(setting, lines=plan == "lines")
        match plan:
            case "brief":
                places = (place for place in story.places if _in_brief(setting, place))
                found = (Case(name, setting, str(place)) for place in places)
            case "singles":
                found = (Case(name, setting, str(place)) for place in story.places)
            case "lines":
                found = (Case(name, setting, f"line#{n + 1}") for n in range(story.lines))
            case "cuts":
                sides = (Side.INSIDE, Side.COMMITTED)
                places = (place for place in story.places if place.side in sides)
                found = (Case(name, setting, str(place), cuts=True) for place in places)
            case _:
                found = (
                    case
                    for first in self._distinct(setting, story)
                    for case in self._seconds(first)
                )
        for number, case in enumerate(found):
            if number % every == 0:
                yield case, story

    def _distinct(self, setting: Setting, story: Story) -> Iterator[Case]:
        """First kills, one for each state in which they leave the world: what comes after is the
        same for all that leave the same.
        """
        seen = set()
        for place in story.places:
            case = Case(self.database.name, setting, str(place))
            self._kill(case)
            state = self._state()
            if state not in seen:
                seen.add(state)
                yield case

    def _seconds(self, first: Case) -> Iterator[Case]:
        """Every place of the recovery from a first kill."""
        self._kill(first)
        bench = self.bench

        def act() -> Fuse:
            bench.begin("b", Fuse(bench.shared))
            recover(bench, doubled=first.doubled)
            return bench.fuse

        story = self._whole(str(first), fork(act))
        self._at_rest()
        for place in story.places:
            yield Case(first.database, first.setting, first.place, str(place))

    # ---- a case ----------------------------------------------------------------------------------

    def run(self, case: Case, story: Story | None = None) -> None:
        """Run one case; what is found goes into the report."""
        report = self.report
        self._kill(case)
        if case.second:
            self._kill_again(case)
        report.cases += 1
        if case.cuts:
            report.cuts += 1
        else:
            report.kills += 2 if case.second else 1
        if story is not None and case.line is None:
            report.hits.update(story.cells_of(case.place))
        report.lines += case.line is not None
        many = bool(case.line or case.second)  # most of them leave what others have left
        left = (str(case.setting), case.doubled, self._state()) if many else None
        if left in self._judged:
            report.known += 1
        elif self._others(str(case), doubled=case.doubled) and left is not None:
            self._judged.add(left)

    def _kill(self, case: Case) -> None:
        self._fresh(case.setting)
        fuse = Fuse(self.bench.shared, place=case.place, line=case.line, cuts=case.cuts)
        ended = fork(lambda: self._first(fuse, case.line is not None))
        self._must_have_ended(case, ended, case.place)

    def _kill_again(self, case: Case) -> None:
        bench = self.bench
        fuse = Fuse(bench.shared, place=case.second)

        def act() -> Fuse:
            bench.begin("b", fuse)
            recover(bench, doubled=Case.parse(str(case).rpartition("/")[0]).doubled)
            return fuse

        self._must_have_ended(case, fork(act), case.second)

    def _must_have_ended(self, case: Case, ended: Ended, place: str) -> None:
        wanted = 0 if case.cuts else signal.SIGKILL
        word = self.bench.shared.last_word
        if ended.signal != wanted or word != place:
            what = ended.failure or f"signal {ended.signal}"
            raise HarnessError(f"{case}: the child ended at {word!r}, with {what}")
        if case.cuts:
            self._whole(str(case), ended)
        self._at_rest()

    def _first(self, fuse: Fuse, lines: bool) -> Fuse:
        self.bench.begin("a", fuse)
        if lines:
            fuse.watch_lines()
        play(self.bench)
        fuse.stop_watching()
        return fuse

    def _others(self, name: str, *, doubled: bool) -> bool:
        """Let others recover, and judge; False: a promise was broken."""
        bench, report = self.bench, self.report
        bench.begin("c", Fuse(bench.shared))
        try:
            took_ms = recover(bench, doubled=doubled)
            judge(bench, took_ms)
            report.slowest_ms = max(report.slowest_ms, took_ms)
            report.ends.update(row["status"] for row in bench.rows(_STATUSES))
        except Exception as error:
            report.violations.append((name, "".join(traceback.format_exception(error))))
            return False
        finally:
            bench.end()
        return True

    def _fresh(self, setting: Setting) -> None:
        bench = self.bench
        self.database.empty(bench.database, bench.shared.backend)
        bench.shared.clear()
        bench.records.clear()
        bench.setting = setting
        bench.service.way, bench.service.trouble = setting.way, setting.scenario.trouble

    def _at_rest(self) -> None:
        self.database.at_rest(self.bench.database, self.bench.shared.backend)

    def _state(self) -> str:
        """All that survives, in short."""
        bench = self.bench
        rows = [sorted(map(repr, bench.rows(f"SELECT * FROM {table}"))) for table in TABLES]
        text = json.dumps([rows, bench.records.all(), bench.shared.now_ms])
        return blake2b(_DRAWN.sub("", text).encode()).hexdigest()

    def shown(self) -> str:
        """What is left of the latest case, for people."""
        bench = self.bench
        lines = [json.dumps(record) for record in bench.records.all()]
        for table in ("handrail_run", "handrail_effect", "handrail_evidence"):
            lines += [f"{table}: {row}" for row in bench.rows(f"SELECT * FROM {table}")]
        for run_id in bench.runs:
            lines += [json.dumps(event) for event in bench.trace(run_id)]
        return "\n".join(lines)


_STATUSES: Final = "SELECT status FROM handrail_run"
