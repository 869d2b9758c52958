"""The chaos on the real stack in short, and whether it can see what it looks for.

`make chaos` is the long version. Here everything goes five times as fast, for half a minute.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from tests.chaos.__main__ import run
from tests.chaos.app import intent_key
from tests.chaos.checks import Seen, violations
from tests.chaos.kinds import CANARY, KINDS, READ, Pace
from tests.chaos.nemesis import CATALOGUE, LONG_PAUSE, plan
from tests.chaos.report import ENOUGH_KINDS, Report, percentile
from tests.live import ROOT

FIVE_MINUTES_S: Final = 300.0
FAST: Final = Pace(0.2)


# ---- the drawing ---------------------------------------------------------------------------------


def test_a_seed_draws_the_same_faults_again() -> None:
    assert plan(7, FIVE_MINUTES_S, database="sqlite") == plan(7, FIVE_MINUTES_S, database="sqlite")
    assert plan(7, FIVE_MINUTES_S, database="sqlite") != plan(8, FIVE_MINUTES_S, database="sqlite")


@pytest.mark.parametrize("database", ["postgresql", "sqlite"])
def test_five_minutes_meet_every_kind_of_fault_often_enough(database: str) -> None:
    """And at least two pauses outlast a lease, and are over before the peace begins."""
    for seed in range(200):
        faults = plan(seed, FIVE_MINUTES_S, database=database)
        kinds = Counter(fault.kind for fault in faults)
        known = {kind for kind, about in CATALOGUE.items() if about.only in ("", database)}
        assert len(faults) >= 60
        assert len(kinds) >= ENOUGH_KINDS and len(known - kinds.keys()) <= 2, seed
        long = [fault for fault in faults if fault.kind == LONG_PAUSE]
        assert len(long) >= 2, seed
        for fault in long:
            assert fault.lasts_s * 1_000 > Pace().lease_ms
            assert fault.at_s + fault.lasts_s < FIVE_MINUTES_S
        assert [fault.number for fault in faults] == [*range(1, len(faults) + 1)]
        assert all(0 < fault.at_s < FIVE_MINUTES_S for fault in faults)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 99, 0.0), ([3.0, 1.0, 2.0], 50, 2.0), ([*map(float, range(1, 101))], 99, 99.0)],
)
def test_a_percentile_is_the_smallest_value_that_covers_its_share(
    values: list[float], share: int, expected: float
) -> None:
    assert percentile(values, share) == expected


# ---- the run -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> Report:
    """What half a minute of chaos has shown."""
    seed = random.randrange(1 << 32)
    print(f"again: python -m tests.chaos --seconds 20 --scale 0.2 --per-s 3 --seed {seed}")
    return run(seed=seed, seconds=20, database="postgresql", pace=FAST, per_s=3, keep=None)


@pytest.mark.live
@pytest.mark.timeout(300)
def test_no_promise_is_broken_under_chaos(report: Report) -> None:
    report.show()
    assert report.problems() == []
    assert len(report.faults) >= ENOUGH_KINDS
    assert report.seen.accepted
    assert "completed" in {row["status"] for row in report.seen.runs.values()}


# ---- can it see? ---------------------------------------------------------------------------------


def twice(seen: Seen) -> Seen:
    intent, happened = next(iter(seen.outside.items()))
    return replace(seen, outside={**seen.outside, intent: [*happened, *happened]})


def gone(seen: Seen) -> Seen:
    return replace(seen, accepted={*seen.accepted, "run-gone"})


def unfinished(seen: Seen) -> Seen:
    return _with_row(seen, _completed(seen), status="running", traced_status="running")


def unpaid(seen: Seen) -> Seen:
    return replace(seen, arrivals=seen.arrivals + Counter({(_completed(seen), "ask"): 99}))


def teleported(seen: Seen) -> Seen:
    def change(event: dict[str, Any]) -> dict[str, Any]:
        if event["type"] != "run.moved":
            return event
        return {**event, "detail": {**event["detail"], "from": "cancelled"}}

    return _with_events(seen, _completed(seen), change)


def unexplained(seen: Seen) -> Seen:
    def change(event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "type": "run.fell-over"} if event["type"] == "run.stopped" else event

    return _with_events(seen, _completed(seen), change)


def unasked(seen: Seen) -> Seen:
    """What nobody was asked about is of a kind that takes a person's consent."""
    [confirmed] = [kind.name for kind in KINDS if kind.confirmed]
    return replace(seen, effects=[{**effect, "tool": confirmed} for effect in seen.effects])


def started_after_a_cancel(seen: Seen) -> Seen:
    def change(event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "type": "cancel.requested"} if event["type"] == "run.accepted" else event

    return _with_events(seen, _completed(seen), change)


def untrue(seen: Seen) -> Seen:
    return replace(seen, outside={k: v for k, v in seen.outside.items() if k != _written(seen)})


def unproved(seen: Seen) -> Seen:
    tool, intent = _written(seen)
    [effect] = [e for e in seen.effects if (e["tool"], e["intent_key"]) == (tool, intent)]
    detail = {"effect": effect["id"], "verdict": "absent"}

    def change(event: dict[str, Any]) -> dict[str, Any]:
        if event["type"] != "observation.built":
            return event
        return {**event, "type": "effect.resolved", "detail": detail}

    return _with_events(seen, _completed(seen), change)


def denied(seen: Seen) -> Seen:
    effects = [
        {**effect, "status": "absent"}
        if (effect["tool"], effect["intent_key"]) == _written(seen)
        else effect
        for effect in seen.effects
    ]
    return replace(seen, effects=effects)


def with_a_gap(seen: Seen) -> Seen:
    run_id = _completed(seen)
    return replace(seen, commits={**seen.commits, run_id: seen.commits[run_id][:-1]})


def talkative(seen: Seen) -> Seen:
    run_id = _completed(seen)
    commits = [{**commit, "text": commit["text"] + CANARY} for commit in seen.commits[run_id]]
    return replace(seen, commits={**seen.commits, run_id: commits})


@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("invariant", "spoil"),
    [
        ("I1", twice),
        ("I2", gone),
        ("I2", unfinished),
        ("I3", unpaid),
        ("I4", teleported),
        ("I5", unexplained),
        ("I6", unasked),
        ("I7", started_after_a_cancel),
        ("I8", untrue),
        ("I9", unproved),
        ("I10", denied),
        ("I10", untrue),
        ("I13", with_a_gap),
        ("I13", talkative),
    ],
)
def test_a_broken_promise_is_seen(
    report: Report, invariant: str, spoil: Callable[[Seen], Seen]
) -> None:
    """What was really on record after the run, spoilt in one place, is no longer in order."""
    assert violations(report.seen) == []
    assert invariant in {violation.invariant for violation in violations(spoil(report.seen))}


def _completed(seen: Seen) -> str:
    """A completed run of the open loop that has written something."""
    return next(
        run_id
        for run_id, row in seen.runs.items()
        if (row["status"], row["workflow"]) == ("completed", "errand")
        and any(
            event["type"] == "tool.started" and event["detail"].get("idempotency_key_hash")
            for event in seen.events(run_id)
        )
    )


def _written(seen: Seen) -> tuple[str, str]:
    """The last thing that it has written."""
    move = seen.asked[_completed(seen)]["input"]["moves"][-1]
    assert move["tool"] != READ
    return move["tool"], intent_key(move["tool"], move["item"])


def _with_row(seen: Seen, run_id: str, **changes: Any) -> Seen:
    return replace(seen, runs={**seen.runs, run_id: {**seen.runs[run_id], **changes}})


def _with_events(
    seen: Seen, run_id: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> Seen:
    commits = [
        {**commit, "events": [change(event) for event in commit["events"]]}
        for commit in seen.commits[run_id]
    ]
    return replace(seen, commits={**seen.commits, run_id: commits})


# ---- what is left behind -------------------------------------------------------------------------


@pytest.mark.live
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind_however_the_chaos_ends(how: signal.Signals, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "tests.chaos", "--seconds", "60", "--scale", "0.2"]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "CHAOS_TEST": mark},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            _until(lambda: "#2 " in (tmp_path / "log").read_text(), "two faults have happened")
            family = _marked(mark)
            places = _places(family)
            assert len(family) > 10 and places
            process.send_signal(how)
            process.wait(150)  # a busy machine takes its time to stop so many
        finally:
            process.kill()
            process.wait()
    _until(lambda: not _marked(mark), "all its processes are gone")
    _until(lambda: not any(place.exists() for place in places), "its files are gone")


def _marked(mark: str) -> list[psutil.Process]:
    """The processes of one run: each has inherited its mark."""
    return [*_with_environment("CHAOS_TEST", mark)]


def _with_environment(name: str, value: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                yield process
        except psutil.Error:
            continue


def _places(family: list[psutil.Process]) -> set[Path]:
    """The directories that a run's processes work in."""
    found = set()
    for process in family:
        try:
            parts = process.cmdline()
        except psutil.Error:
            continue
        paths = [Path(part) for part in parts if part.startswith("/tmp/handrail-")]
        found |= {Path(*path.parts[:3]) for path in paths}
    return found


def _until(holds: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.1)
