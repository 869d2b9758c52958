"""What a sweep does beside itself: so many runs at a time, and no tool holds all the places.

A run has its place from when it is looked at until what it needed outside is answered and
concluded. A call that hangs keeps its place, past the end of the sweep that began it, until its own
time limit; a tool whose calls hold all of its places is left alone meanwhile, so that the others go
on. The database's share of the work is done by a few hands, or without any by the sweeping thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, TypeAlias

from handrail.tasks.calls import Called, answered

#: A tool that holds all of its places for so long gets no more work for now.
STUCK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Errand:
    """One call outside that a run needs, and what is made of its answer: perhaps another call."""

    run_id: str
    tool: str
    answer: Future[Called]
    conclude: Callable[[Called], Errand | None]


#: A part of the work on a run: what it still needs outside, if anything.
Part: TypeAlias = Callable[[], Errand | None]


@dataclass(eq=False, slots=True)
class _Place:
    run_id: str
    tool: str | None
    began: float


@dataclass(slots=True, kw_only=True)
class Errands:
    """Who waits for a place, and who has one. One thread sweeps; `clock` is its, in seconds.

    A run without a `tool` needs nothing outside, and waits for no place of those that do.
    `contained(run_id, part)` does a part of the work and never raises an `Exception`.
    """

    places: int
    hands: int
    clock: Callable[[], float]
    contained: Callable[[str, Part], Errand | None]
    _waiting: dict[str | None, deque[str]] = field(default_factory=dict)  # run ids by tool
    _taken: dict[str | None, dict[_Place, None]] = field(default_factory=dict)  # oldest first
    _to_do: SimpleQueue[Callable[[], object]] = field(default_factory=SimpleQueue)  # by the sweep
    _pool: ThreadPoolExecutor | None = None

    @property
    def tools_at_once(self) -> int:
        """How many places one tool may hold."""
        return max(1, self.places // 2)

    @property
    def under_way(self) -> int:
        """How many runs have a place."""
        return sum(map(len, self._taken.values()))

    @property
    def under_way_outside(self) -> int:
        """How many of them need something outside."""
        return self.under_way - len(self._taken.get(None, ()))

    @property
    def waiting(self) -> int:
        """How many runs wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def waiting_inside(self) -> int:
        """How many runs wait that need nothing outside."""
        return len(self._waiting.get(None, ()))

    @property
    def waiting_outside(self) -> int:
        """How many runs wait for a place of their tool."""
        return self.waiting - self.waiting_inside

    def wait(self, run_id: str, tool: str | None) -> None:
        """Let a run wait for a place."""
        self._waiting.setdefault(tool, deque()).append(run_id)

    def begin(
        self, look_at: Callable[[str], Errand | None], *, until: float, may: Callable[[], bool]
    ) -> None:
        """Give places to those who may have one, from each tool in turn, and have them looked at.

        `may` says whether one more may go outside.
        """
        while self.clock() < until and (place := self._next(may)) is not None:
            self._do(place, partial(look_at, place.run_id))

    def serve(self, timeout_s: float) -> bool:
        """Do what comes next for the sweeping thread; False: nothing came in that time."""
        try:
            act = self._to_do.get(timeout=max(0.0, timeout_s))
        except Empty:
            return False
        act()
        return True

    def drop_stuck(self) -> int:
        """Let nobody wait for a tool that has held all of its places for a while; how many did."""
        dropped = 0
        for tool, places in self._taken.items():
            oldest = next(iter(places))
            stuck = self.clock() - oldest.began > STUCK_S
            if tool is not None and stuck and len(places) >= self.tools_at_once:
                dropped += len(self._waiting.pop(tool, ()))
        return dropped

    def drop_waiting(self) -> None:
        """Let nobody wait any more; what is under way goes on."""
        self._waiting.clear()

    def close(self) -> None:
        """Let the hands go; a later answer is concluded by nobody here."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- inside ----------------------------------------------------------------------------------

    def _next(self, may: Callable[[], bool]) -> _Place | None:
        outside = self.waiting_outside and self.under_way_outside < self.places and may()
        for tool, runs in self._waiting.items():
            if tool is not None and not outside:
                continue
            if len(self._taken.get(tool, ())) < self.tools_at_once:
                place = _Place(runs.popleft(), tool, self.clock())
                del self._waiting[tool]
                if runs:
                    self._waiting[tool] = runs  # behind the other tools
                self._take(place, tool)
                return place
        return None

    def _do(self, place: _Place, part: Part) -> None:
        """Do a part of the work on a run, and see to it that what follows is done."""

        def work() -> None:
            errand = self.contained(place.run_id, part)
            if errand is None:
                self._to_do.put(partial(self._free, place))
            else:
                self._to_do.put(partial(self._move, place, errand.tool))
                conclude = errand.conclude
                errand.answer.add_done_callback(
                    lambda answer: self._do(place, partial(conclude, answered(answer)))
                )

        if not self.hands:
            self._to_do.put(work)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.hands, "handrail-sweep")
        with suppress(RuntimeError):  # closed: the run is due again when its query's time is over
            self._pool.submit(work)

    def _take(self, place: _Place, tool: str | None) -> None:
        place.tool = tool
        self._taken.setdefault(tool, {})[place] = None

    def _free(self, place: _Place) -> None:
        others = self._taken[place.tool]
        del others[place]
        if not others:
            del self._taken[place.tool]

    def _move(self, place: _Place, tool: str) -> None:
        """The call is another tool's than was expected: a compensation's."""
        if place.tool != tool:
            self._free(place)
            self._take(place, tool)
