"""The simulator in short: no schedule breaks a promise, each planted bug is found, a seed is one
schedule, byte for byte. `make simulate` and `make simulate-bugs` are the long versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from handrail.agent.resolution import Resolution
from tests.simulator import people
from tests.simulator.bugs import BUGS
from tests.simulator.coverage import Tally
from tests.simulator.faults import draw
from tests.simulator.search import hunt, play, play_block

ROOT: Final = Path(__file__).resolve().parent.parent
SCHEDULES: Final = 600
BLOCKS: Final = 6
#: Where each planted bug is found. A change of what is drawn moves them: `make simulate-bugs` says
#: where to. A bug that is found nowhere within 2,000 schedules is a hole in the simulator.
FOUND_AT: Final[dict[str, int]] = {
    "M1": 9,
    "M2": 9,
    "M7": 66,
    "M8": 647,
    "M17": 17,
    "M3": 27,
    "M9": 3,
    "B14": 97,
    "M4": 273,
    "M5": 120,
    "M19": 259,
    "M6": 25,
    "B13": 1206,
    "D5": 719,
    "D8": 541,
    "B10": 25,
    "M14": 1485,
    "M15": 29,
    "M12": 1,
    "M13": 1,
    "M11": 1551,
    "M9p": 2,
    "M10": 316,
    "M10b": 2,
    "M15p": 145,
    "P1": 487,
    "P2": 74,
    "P3": 248,
    "P4": 0,
    "M16": 232,
    "M18": 0,
    "M20": 18,
}

pytestmark = pytest.mark.timeout(300)  # on a machine that does other work


@pytest.mark.accept("FLT-01", "FLT-09", "FLT-21", "LED-01", "LED-04", "LED-11", "LED-12")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_schedule_breaks_a_promise(block: int) -> None:
    size = SCHEDULES // BLOCKS
    played = play_block(range(block * size, (block + 1) * size))

    assert played.broken == []
    assert played.tally.stale["claim"] > 0, "no stale writer has tried"


def test_the_schedules_reach_what_they_are_for() -> None:
    """A silent search proves nothing: each kind of trouble strikes, and runs end in each way."""
    tally: Tally = play_block(range(10_000, 10_150)).tally

    assert {what for what, _ in tally.strikes} >= {"die", "stall", "slow", "lose", "refuse"}
    ends = {end.partition(" ")[0] for end in tally.ends}
    assert ends >= {"completed", "cancelled", "compensated", "failed", "handed_off"}
    assert {"cancel", "drain", "flush", "forge", "kill", "pause", "report"} <= {*tally.acts}


def test_people_meet_at_what_they_decide() -> None:
    """Consents, resolutions, questions and cancels race each other, and runs that go on."""
    tally, seeds = Tally(), [seed for seed in range(30_000, 30_600) if draw(seed).people]

    assert {what for seed in seeds if (what := play(seed, tally))} == set()
    assert {*people.ACTS} <= {*tally.acts}
    assert {*Resolution} <= {*tally.resolved}
    assert tally.wrong > 0, "nobody was wrong where nobody can check"


def test_reads_and_keyed_tools_with_a_query_are_never_handed_off_in_doubt() -> None:
    handed = play_block(range(20_000, 20_150)).tally.handed_off

    in_doubt = {why for kind, why in handed if kind in ("read", "key_and_query")}
    assert in_doubt <= {"cancelled after it was applied; no compensation"}


@pytest.mark.parametrize("bug", [*BUGS])
def test_a_planted_bug_is_found(bug: str) -> None:
    found = hunt(bug, first=FOUND_AT[bug], seeds=1)

    assert found.seed == FOUND_AT[bug], found.what


def test_a_seed_is_the_same_schedule_byte_for_byte() -> None:
    told = [explained(seed=250, hashes=hashes) for hashes in ("1", "2")]

    assert told[0] == told[1]
    assert told[0].count(b"\n") > 30


def explained(seed: int, hashes: str) -> bytes:
    """The timeline of a schedule, from a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulator", "--seed", str(seed), "--explain"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hashes},
        capture_output=True,
        check=True,
        timeout=140,
    ).stdout
