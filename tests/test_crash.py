"""The crash sweep, as far as every change has to pass it; `make crash` runs all of it.

It runs in processes of its own: what forks should be small, and have no threads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.crash.planted import PLANTED
from tests.crash.points import POINTS, Place, Side, Story, missing, table

ROOT = Path(__file__).parent.parent


class Swept:
    """What a sweep has said."""

    def __init__(self, place: Path, *options: str) -> None:
        figures = place / "figures.json"
        command = [sys.executable, "-m", "tests.crash", "--json", str(figures), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        self.status = done.returncode
        self.said = done.stdout + done.stderr
        self.figures: dict[str, Any] = json.loads(figures.read_text()) if figures.exists() else {}

    def went_well(self) -> dict[str, Any]:
        """The figures of the one database that was swept; nothing may have been found."""
        assert self.status == 0, self.said
        [figures] = self.figures.values()
        assert figures["violations"] == [] and figures["unnamed"] == []
        return dict(figures)


@pytest.mark.accept("FLT-02", "FLT-03", "FLT-04", "LED-04")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_whoever_dies_and_wherever_everything_comes_to_a_good_end(
    database: str, tmp_path: Path
) -> None:
    """Every side of every write and call, for every way in which the tool's write can go."""
    figures = Swept(tmp_path, "--databases", database, "--plans", "brief").went_well()

    assert figures["missing"] == []
    assert figures["kills"] == figures["cases"] > 1_200
    ends = {"completed", "handed_off", "failed", "cancelled", "compensated"}
    assert {*figures["ends"]} == ends


@pytest.mark.accept("FLT-02")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario, every", [("run", "61"), ("orphan", "61")])
def test_every_line_of_a_step_and_of_the_sweep_is_a_place_to_die_at(
    scenario: str, every: str, tmp_path: Path
) -> None:
    """Some of the lines; `make crash LINES=yes` takes all."""
    options = ["--scenarios", scenario, "--kinds", "key+query", "--ways", "lost"]
    figures = Swept(
        tmp_path, "--databases", "sqlite", "--plans", "lines", *options, "--every", every
    ).went_well()

    assert figures["lines"] == figures["kills"] > 40


@pytest.mark.timeout(600)
def test_whoever_recovers_may_die_too(tmp_path: Path) -> None:
    """Some of the pairs; `make crash PAIRS=yes` takes all."""
    options = ["--scenarios", "run", "--kinds", "query", "--ways", "lost", "--every", "61"]
    figures = Swept(tmp_path, "--databases", "sqlite", "--plans", "pairs", *options).went_well()

    assert figures["kills"] == 2 * figures["cases"] > 80


@pytest.mark.accept("LED-22")
@pytest.mark.timeout(600)
def test_an_answer_that_is_lost_with_its_connection_is_read_again(tmp_path: Path) -> None:
    """Before a COMMIT and after it, of every write: the process goes on, and must find out."""
    options = ["--scenarios", "run,cancel", "--kinds", "query", "--ways", "ok,lost"]
    figures = Swept(tmp_path, "--databases", "postgres", "--plans", "cuts", *options).went_well()

    assert figures["cuts"] == figures["cases"] > 80


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    """A clean sweep proves nothing unless it can see; what it finds can be repeated by name."""
    fault = PLANTED[name]
    database, plan, scenario, kind, way = fault.sees
    found = Swept(
        tmp_path,
        *("--planted", name, "--databases", database, "--plans", plan),
        *("--scenarios", scenario, "--kinds", kind, "--ways", way),
    )

    assert found.status == 1, found.said
    violations = found.figures[database]["violations"]
    case, _ = next(one for one in violations if fault.breaks in one[1])
    assert f"python -m tests.crash --planted {name} --case {case}" in found.said

    again = Swept(tmp_path, "--planted", name, "--case", case)
    assert again.status == 1 and fault.breaks in again.said, again.said


def test_a_child_that_was_to_die_and_did_not_is_an_error(tmp_path: Path) -> None:
    swept = Swept(tmp_path, "--case", "sqlite/run/key+query/ok/claim#99.committed")

    assert swept.status == 2
    assert "claim#99.committed: the child ended at ''" in swept.said


def test_a_cell_of_the_plan_without_a_hit_is_missing() -> None:
    cells = [(point.code, side) for point in POINTS for side in point.sides]
    hits = Counter(cells)
    assert missing(hits) == []

    del hits["P18", Side.COMMITTED]
    assert missing(hits) == [("P18", Side.COMMITTED)]
    assert " 0" in next(line for line in table(hits).splitlines() if line.startswith("P18"))


def test_a_write_that_the_plan_does_not_name_is_told() -> None:
    places = (Place("claim", 1, Side.INSIDE), Place("new_write", 1, Side.COMMITTED))

    assert Story(places, {}, 0).unnamed() == {"new_write"}
