"""`handrail reconcile`, and what the doctor says about the sweep."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.test_cli import NO_BROKER, SECONDS, Project, ends, findings, migrated, project, running

__all__ = ["migrated", "project"]  # the fixtures of the command line's tests


def make_due(project: Project, *runs: str) -> None:
    """Let the sweep's look at runs be due."""
    with project.loaded.fleet.ledger.database.transaction() as session:
        for run in runs:
            session.run("UPDATE handrail_run SET wake_at = 0 WHERE id = :id", {"id": run})


def lost(project: Project, run: str) -> None:
    """Accept a run while there is no broker, so that only a sweep can publish it."""
    project("run", "chat", "--goal", "tea", "--run-id", run)
    make_due(project, run)


def test_once_sweeps_until_nothing_is_due_and_says_what_it_did(
    migrated: Project, monkeypatch: pytest.MonkeyPatch, valkey_url: str
) -> None:
    lost(migrated, "a")
    monkeypatch.setenv("HANDRAIL_BROKER_URL", valkey_url)
    monkeypatch.setenv("HANDRAIL_KEY_PREFIX", f"{migrated.module}.")

    done = migrated.json("reconcile", "--once")
    assert (done["looked_at"], done["published"], done["unpublished"]) == (1, 1, 0)
    assert done["quiet"] is True
    said = migrated("reconcile", "--once")
    assert said.strip() == "looked at 0 runs; published 0 steps; asked 0 queries; moved 0 runs"
    assert findings(migrated.json("doctor"))["sweep-runs"] == "ok"


@pytest.mark.parametrize("broker", ["", NO_BROKER])
def test_once_needs_no_broker_and_says_that_steps_stay_due(
    migrated: Project, monkeypatch: pytest.MonkeyPatch, broker: str
) -> None:
    lost(migrated, "a")
    if broker:
        monkeypatch.setenv("HANDRAIL_BROKER_URL", broker)
    said = migrated("reconcile", "--once")

    assert "1 steps could not be published: they stay due" in said
    row = migrated.loaded.fleet.ledger.read("a")
    assert (row["status"], row["publishes"]) == ("queued", 0)
    make_due(migrated, "a")
    assert migrated.json("reconcile", "--once")["unpublished"] == 1


@pytest.mark.parametrize(
    "away",
    [
        "postgresql://nobody:a-password@127.0.0.1:1/ledger",
        "postgresql://nobody@127.0.0.1:1/ledger?password=a-password",
    ],
)
def test_once_without_a_database_fails_with_its_own_code(
    project: Project, monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    monkeypatch.setenv("HANDRAIL_DATABASE_URL", away)

    assert project.refused("reconcile", "--once", code=3) == "database-unavailable"
    assert "a-password" not in project("reconcile", "--once", code=3)


def test_once_makes_no_ledger_where_there_is_none(project: Project) -> None:
    assert project.refused("reconcile", "--once", code=2) == "no-ledger"


def test_once_needs_to_know_whose_tools_it_may_ask(
    migrated: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HANDRAIL_FLEET")
    assert migrated.refused("reconcile", "--once", code=2) == "no-fleet"


@pytest.mark.live
@pytest.mark.timeout(120)
def test_without_once_it_sweeps_until_it_is_stopped(project: Project) -> None:
    """It takes the place of a beat: the worker beside it has none."""
    project("run", "chat", "--goal", "tea", "--run-id", "lost")  # before there is a broker
    with (
        running(project, "handrail", "worker"),
        running(project, "handrail", "reconcile", "--every-s", "0.2", "--json") as sweeper,
    ):
        make_due(project, "lost")
        assert project.loaded.fleet.wait("lost", timeout_s=SECONDS).status == "completed"
        sweeper.send_signal(signal.SIGTERM)
        told = [json.loads(line) for line in ends(sweeper).splitlines()]

    assert sweeper.returncode == 0
    assert sum(sweep["published"] for sweep in told) == 1


# ---- the doctor ----------------------------------------------------------------------------------


def finding(project: Project, *, code: int = 0) -> dict[str, str]:
    found = findings(project.json("doctor", code=code))
    return {code: level for code, level in found.items() if code.startswith("sweep")}


def test_the_doctor_fails_where_something_is_due_and_nothing_sweeps(
    migrated: Project, monkeypatch: pytest.MonkeyPatch, valkey_url: str
) -> None:
    monkeypatch.setenv("HANDRAIL_SWEEP_EVERY_S", "0.1")
    migrated("run", "chat", "--goal", "tea", "--run-id", "a")
    monkeypatch.setenv("HANDRAIL_BROKER_URL", valkey_url)
    monkeypatch.setenv("HANDRAIL_KEY_PREFIX", f"{migrated.module}.")
    assert finding(migrated) == {"sweep-never-ran": "warning"}  # nothing is due yet

    make_due(migrated, "a")
    never = finding(migrated, code=1)
    assert never.pop("sweep-never-ran") == "failure"

    migrated("reconcile", "--once")
    assert finding(migrated) == {"sweep-runs": "ok"}

    make_due(migrated, "a")
    time.sleep(0.31)  # three periods: the heartbeat is by the database's clock
    assert finding(migrated, code=1)["sweep-stopped"] == "failure"
    report = migrated.json("doctor", code=1)
    assert report["figures"]["backlog"] == {"due": 1, "in_doubt": 0}
    assert report["figures"]["last_sweep_ms"] > 300
    [stopped] = [f for f in report["findings"] if f["code"] == "sweep-stopped"]
    assert "1 runs are due" in stopped["detail"] and "reconcile --once" in stopped["next_step"]
