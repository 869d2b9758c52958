"""The fuse of a process, and the ports through which everything that it does passes.

A fuse counts what is done, side by side, and ends the process with SIGKILL at one place, or at one
line of the code. Faults enter here alone: no line of the product exists for a test's sake.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psycopg

from handrail import reconciler
from handrail.agent import protocol
from handrail.ledger import ledger
from handrail.ledger.database import Database
from handrail.ledger.ledger import DueStep, Ruled
from handrail.tasks import sender, step
from tests.crash.outside import START_MS, Shared
from tests.crash.points import Place, Side, Story, decision

#: The code whose every line is a place to die at.
WATCHED: Final = frozenset(
    [step.__file__, sender.__file__, ledger.__file__, protocol.__file__]
    + [str(path) for place in reconciler.__path__ for path in Path(place).glob("*.py")]
)
#: What asks the ledger and writes nothing.
_READS: Final = (
    *("now", "read", "trace", "observed", "observations", "list_runs", "effects", "evidence"),
    *("figures", "pauses", "since_beat", "close"),
    *("approvals", "approval", "handoffs", "handoff", "principal", "acts_since"),
)


class Fuse:
    """Counts, and burns at one place or line. Burning kills the process, or with `cuts` breaks
    the connection to the database there.
    """

    def __init__(
        self,
        shared: Shared,
        *,
        place: str | None = None,
        line: int | None = None,
        cuts: bool = False,
    ) -> None:
        self._shared = shared
        self._place, self._line, self._cuts = place, line, cuts
        self.cut = False  # the connection was broken
        self.places: list[Place] = []
        self.facts: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self.lines = 0
        self.under: tuple[str, int] | None = None  # the write that is under way
        self._entered: Counter[str] = Counter()

    # ---- places ----------------------------------------------------------------------------------

    def enter(self, what: str) -> int:
        """Something is about to be done; returns the how-many-th time it is."""
        self._entered[what] += 1
        number = self._entered[what]
        self.at(what, number, Side.BEFORE)
        return number

    def at(
        self, what: str, number: int, side: Side, last_act: Callable[[], object] | None = None
    ) -> None:
        """A place is reached; `last_act` is done where the process dies here."""
        place = Place(what, number, side)
        self.places.append(place)
        if self._cuts or str(place) != self._place:
            return
        if last_act is not None:
            last_act()
        self._burn(str(place))

    def cuts_at(self, what: str, number: int, side: Side) -> bool:
        """Whether the connection breaks at this place."""
        if not self._cuts or self.cut or str(Place(what, number, side)) != self._place:
            return False
        self._shared.last_word = self._place or ""
        self.cut = True
        return True

    def note(self, what: str, number: int, facts: Iterable[str]) -> None:
        """Note what was true of an act."""
        self.facts[what, number] |= set(facts)

    def story(self) -> Story:
        """What was done so far. Reads have no sides, but for the last look before a call."""
        deep = {p[:2] for p in self.places if p.side not in (Side.BEFORE, Side.KNOWN)}
        looks = ("effect", Side.KNOWN)
        places = [p for p in self.places if p[:2] in deep or (p.what, p.side) == looks]
        facts = {act: frozenset(found) for act, found in self.facts.items()}
        return Story(tuple(dict.fromkeys(places)), facts, self.lines)

    def _burn(self, word: str) -> None:
        self._shared.last_word = word
        os.kill(os.getpid(), signal.SIGKILL)

    # ---- lines -----------------------------------------------------------------------------------

    def watch_lines(self) -> None:
        """Count the lines of the watched files from here on, and burn before the one given."""
        sys.settrace(self._called)

    def stop_watching(self) -> None:
        """Count no further."""
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._stepped if frame.f_code.co_filename in WATCHED else None

    def _stepped(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                self._burn(f"line#{self.lines}")
        return self._stepped


# ---- the ledger ----------------------------------------------------------------------------------


class LedgerPort:
    """A ledger, and the part of it that people work with, whose every write is an act with
    sides.
    """

    def __init__(self, whole: Any, fuse: Callable[[], Fuse]) -> None:
        self._ledger, self._fuse = whole, fuse

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ledger, name)
        if name == "people":
            return LedgerPort(found, self._fuse)
        if not callable(found) or name in _READS:
            return found

        def call(*args: Any, **options: Any) -> Any:
            fuse = self._fuse()
            what = decision(args[1].__qualname__) if name == "rule" else name
            number = fuse.enter(what)
            outer, fuse.under = fuse.under, (what, number)
            try:
                answer = found(*args, **options)
            finally:
                fuse.under = outer
            fuse.note(what, number, _facts(name, args, options, answer))
            fuse.at(what, number, Side.KNOWN)
            return answer

        return call


def _facts(
    name: str, args: Sequence[Any], options: Mapping[str, Any], answer: Any
) -> Iterable[str]:
    """What a write of the ledger was, as far as the plan asks for it."""
    rulings: list[Any] = []
    match name:
        case "rule":
            assert isinstance(answer, Ruled)
            rulings = [answer.ruling]
            before = answer.locked.effect
            after = answer.ruling and answer.ruling.effect
            if before and after and before.queries_left > after.queries_left:
                yield "pays"
            if options.get("plan") is not None or (after and after.status == "dispatched"):
                yield "intent"
            if answer.due is not None:
                yield "due"
        case "commit_each":
            rulings = [end.ruling for end in args[0]]
            if any(isinstance(done, DueStep) for done in answer):
                yield "due"
        case "insert_run":
            yield "traces"
            yield "due"
    for ruling in filter(None, rulings):
        yield from (event.type for event in ruling.events)
        if ruling.events:
            yield "traces"
        if ruling.handoff is not None:
            yield "hands-off"
        if ruling.park is not None:
            yield "parks"
        if ruling.consumes_approval:
            yield "consumes"


# ---- the database --------------------------------------------------------------------------------


class WatchedDatabase(Database):
    """A database whose transactions have an inside and an end, on the shared clock.

    A statement in autocommit is a transaction of its own: to die inside it, it is begun by hand.
    """

    def __init__(self, url: str, shared: Shared, fuse: Callable[[], Fuse]) -> None:
        super().__init__(url, clock=lambda: START_MS + shared.now_ms)
        self._page, self._fuse = shared, fuse
        self._alone = False  # the statement under way is a write in autocommit
        self._told: tuple[Any, int] | None = None  # which connection was told which time

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._alone = self._fuse().under is not None and not sql.lstrip().startswith("SELECT")
        try:
            return super().run(sql, params)
        finally:
            self._alone = False

    def run_together(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> list[list[dict[str, Any]]]:
        fuse, under = self._fuse(), self._fuse().under
        if under is None or not self.postgres:
            return super().run_together(calls)
        connection = self._connection()
        self._tell_time(connection)
        self._may_break(connection, under, Side.INSIDE)
        fuse.at(*under, Side.INSIDE, lambda: self._begin(connection, calls))
        answers = super().run_together(calls)
        self._may_break(connection, under, Side.COMMITTED)
        fuse.at(*under, Side.COMMITTED)
        return answers

    def _connect(self) -> Any:
        connection = super()._connect()
        if self.postgres:
            rows = connection.run("SELECT pg_backend_pid() AS pid", {})
            self._page.backend = rows[0]["pid"]
        return connection

    def _execute(
        self, connection: Any, sql: str, params: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        self._tell_time(connection)
        fuse, under = self._fuse(), self._fuse().under
        if under is None or not (self._alone or sql == "COMMIT"):
            return super()._execute(connection, sql, params)
        self._may_break(connection, under, Side.INSIDE)
        alone = [(sql, params)] if self._alone else []
        fuse.at(*under, Side.INSIDE, lambda: self._begin(connection, alone))
        rows = super()._execute(connection, sql, params)
        self._may_break(connection, under, Side.COMMITTED)
        fuse.at(*under, Side.COMMITTED)
        return rows

    def _begin(self, connection: Any, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Bring statements about, and leave their transaction open."""
        if calls:
            super()._execute(connection, "BEGIN" if self.postgres else "BEGIN IMMEDIATE", {})
        for sql, params in calls:
            super()._execute(connection, sql, params)

    def _may_break(self, connection: Any, under: tuple[str, int], side: Side) -> None:
        if self._fuse().cuts_at(*under, side):
            connection.close()
            raise psycopg.OperationalError("the connection broke")

    def _tell_time(self, connection: Any) -> None:
        """PostgreSQL has a clock of its own, in whose place stands ours; see `databases`."""
        now = (connection, START_MS + self._page.now_ms)
        if self.postgres and self._told != now:
            self._told = now
            connection.run("SELECT set_config('test.now', :now, false)", {"now": str(now[1])})
