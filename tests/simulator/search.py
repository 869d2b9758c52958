"""Many schedules: played by several processes, counted and reported; the hunt for planted bugs."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context

from tests.simulator.bugs import BUGS
from tests.simulator.coverage import Tally
from tests.simulator.faults import draw
from tests.simulator.ground import Ground
from tests.simulator.invariants import Violation
from tests.simulator.schedule import Schedule
from tests.simulator.timeline import Timeline

#: Seeds that one process plays before it reports.
BLOCK = 250
#: With fewer schedules than this, chance alone leaves cells empty.
ENOUGH = 20_000
#: A planted bug must be found within so many schedules.
BUG_SEEDS = 2_000


@dataclass(slots=True)
class Played:
    """What a block of schedules came to."""

    tally: Tally = field(default_factory=Tally)
    broken: list[tuple[int, str]] = field(default_factory=list)  # (seed, what)
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """How the search for a planted bug went. `seed` is None where it was missed."""

    bug: str
    seed: int | None
    what: str


@cache
def ground() -> Ground:
    """The ground of this process: schedules follow one another on it."""
    return Ground()


def play(seed: int, tally: Tally, timeline: Timeline | None = None) -> str | None:
    """Play one schedule; returns what it has broken, if anything."""
    try:
        Schedule(ground(), draw(seed), tally, timeline).play()
    except Violation as violation:
        return str(violation)
    except Exception as error:  # the fleet's code raised where nothing may be raised
        return f"crashed: {type(error).__name__}: {error}"
    return None


def play_block(seeds: range) -> Played:
    """Play some schedules, one after the other."""
    played = Played()
    with _uncollected():
        began = time.process_time()
        for seed in seeds:
            if what := play(seed, played.tally):
                played.broken.append((seed, what))
        played.cpu_s = time.process_time() - began
    played.tally.schedules = len(seeds)
    return played


@contextmanager
def _uncollected() -> Iterator[None]:
    """What a block of schedules leaves behind is little: it is collected once, at the end."""
    ground()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def hunt(bug: str, first: int = 0, seeds: int = BUG_SEEDS) -> Found:
    """Plant a bug and search for it; without it, the schedule that found it must be clean."""
    with _uncollected(), BUGS[bug].plant(ground()):
        for seed in range(first, first + seeds):
            if what := play(seed, Tally()):
                break
        else:
            return Found(bug, None, "missed")
    if still := play(seed, Tally()):
        return Found(bug, None, f"seed {seed} is broken without it, too: {still}")
    return Found(bug, seed, what)


def explain(seed: int) -> int:
    """Tell one schedule, as a timeline that is the same every time."""
    timeline = Timeline()
    what = play(seed, Tally(), timeline)
    print(timeline)
    print(what or "no promise was broken")
    return 1 if what else 0


def search(first: int, count: int, jobs: int) -> int:
    """Play many schedules on all cores and report."""
    began = time.monotonic()
    total = Played()
    for played in _blocks(first, count, jobs):
        total.tally.add(played.tally)
        total.broken += played.broken
        total.cpu_s += played.cpu_s
    took_s = time.monotonic() - began
    print(total.tally.table())
    print()
    print(_handed_off(total.tally))
    print()
    speed = count / took_s / jobs
    stale = total.tally.stale.total()
    print(
        f"{count:,} schedules from seed {first}, {speed:.0f} a second a core, {jobs} at a time;"
        f" {1000 * total.cpu_s / count:.1f} ms of a processor each"
    )
    print(f"{stale:,} stale writers were refused")
    resolved = ", ".join(f"{count:,} {how}" for how, count in sorted(total.tally.resolved.items()))
    print(f"people have resolved: {resolved or 'nothing'}")
    print(f"in {total.tally.wrong:,} schedules one was wrong about what nobody can check")
    missing = total.tally.missing()
    if missing:
        print(f"{len(missing)} cells were not struck: {', '.join(missing)}")
    for seed, what in sorted(total.broken):
        print(f"BROKEN {what}\n    python -m tests.simulator --seed {seed} --explain")
    if not total.broken:
        print(
            f"0 promises broken: at 95 %, at most {3 / count:.6f} of the schedules that this"
            " generator draws break one, and nothing is said of what it does not draw"
        )
    unreached = bool(missing) and count >= ENOUGH
    return 1 if total.broken or unreached or not stale else 0


def _blocks(first: int, count: int, jobs: int) -> Iterator[Played]:
    seeds = range(first, first + count)
    blocks = [seeds[at : at + BLOCK] for at in range(0, count, BLOCK)]
    if jobs == 1:
        yield from map(play_block, blocks)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(play_block, blocks)


def _handed_off(tally: Tally) -> str:
    lines = [f"{'kind of tool':<24}{'runs':>8}{'with a person':>15}"]
    for kind, runs in sorted(tally.runs.items()):
        handed = sum(count for (of, _), count in tally.handed_off.items() if of == kind)
        lines.append(f"{kind:<24}{runs:>8}{handed / runs:>14.1%}")
    return "\n".join(lines)


def bugs(chosen: Sequence[str], jobs: int) -> int:
    """Search for the planted bugs, and print the table."""
    wanted = list(chosen) or list(BUGS)
    print(f"{'bug':<5}{'seed':>6}  what is planted, and what was seen")
    missed = 0
    with get_context("spawn").Pool(jobs) as pool:
        for found in pool.imap(hunt, wanted):
            missed += found.seed is None
            seed = "MISSED" if found.seed is None else str(found.seed)
            print(
                f"{found.bug:<5}{seed:>6}  {BUGS[found.bug].title}\n{'':13}{found.what}", flush=True
            )
    print(f"{len(wanted) - missed} of {len(wanted)} found within {BUG_SEEDS:,} schedules each")
    return 1 if missed else 0
