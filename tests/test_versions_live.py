"""A rolling deploy: workers with two versions of a workflow side by side on one ledger."""

from __future__ import annotations

import signal
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from handrail import Fleet
from handrail.agent.tools import Principal
from handrail.settings import Settings
from handrail.testing.services import EmbeddedPostgres
from tests.live import Broker, complete, deployed, look, save
from tests.live_fleet import declare

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

PATIENCE_S = 4.0
OPERATOR = Principal("operator", roles=frozenset({"operator"}))


@pytest.mark.accept("FLT-20")
@pytest.mark.parametrize(
    ("kind", "broker"), [("sqlite", "redis"), ("postgres", "rabbitmq")], indirect=["broker"]
)
def test_a_run_waits_for_a_worker_with_its_version_and_is_handed_off_when_none_comes(
    kind: str, broker: Broker, tmp_path: Path, postgres: EmbeddedPostgres
) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    if kind == "postgres":
        url = postgres.create_database(f"versions_{uuid.uuid4().hex[:8]}")
    how: dict[str, Any] = {
        "ahead_s": 0,
        "beat": None,
        "settings": {
            "version_patience_s": PATIENCE_S,
            "sweep_in_workers": "true",
            **broker.settings,
        },
    }
    with deployed(tmp_path, url, broker.url, **how) as fleet:
        old, new = fleet.hire(version="1"), fleet.hire(version="2")
        newer = declare(Fleet(fleet.tag, settings=Settings.read(**fleet.settings)), version="2")
        try:
            moves: list[Any] = [look("a"), save("one"), complete("one")]
            first = fleet.start(*moves, tenant="first")
            second = newer.enqueue(
                "errand",
                goal="run an errand",
                input={"run": "second", "moves": moves},
                run_id="second",
            )
            assert {run.status for run in fleet.rest(first, second)} == {"completed"}
            who = [fleet.noted("effect", run)[0].pid for run in (first, second)]
            assert who == [old.pid, new.pid], "each was worked on by a worker that has its version"

            old.send(signal.SIGTERM)
            fleet.until("the old worker is gone", lambda: not old.is_alive)
            waiting = fleet.start(*moves, tenant="third", name="waiting")
            busy = newer.enqueue(
                "errand",
                goal="run an errand",
                input={"run": "busy", "moves": [look("a", hold="look"), complete()]},
                run_id="busy",
            )
            fleet.arrives("look", busy)
            time.sleep(PATIENCE_S / 2)
            row = fleet.row(waiting)
            assert (row["status"], row["attempts"], row["epoch"]) == ("queued", 0, 0)

            [run] = fleet.rest(waiting)
            assert (run.status, run.reason) == ("handed_off", "version-unavailable")
            assert fleet.row(waiting)["attempts"] == 0
            assert fleet.row(busy)["status"] == "running", "its version has a worker"

            fleet.hire(version="1")
            desk = fleet.fleet.desk
            [found] = desk.handoffs(by=OPERATOR, run=waiting)
            desk.resolve(
                found["id"], "resumed", by=OPERATOR, reason="a worker has it", grant_ms=60_000
            )
            [run] = fleet.rest(waiting)
            assert run.status == "completed"
            assert len(fleet.noted("effect", waiting)) == 1
            fleet.world.let_go(busy)
            assert fleet.rest(busy)[0].status == "completed"
            listed = {one.version: one for one in fleet.fleet.workflow_versions()}
            assert (listed["1"].pinned, listed["2"].pinned) == (0, 0)
            assert listed["2"].current
        finally:
            newer.close()
