"""Who makes the sweep run: the workers themselves, or the beat of somebody's own app."""

from __future__ import annotations

import signal
import uuid
from pathlib import Path
from typing import Any

import pytest

from handrail.testing.services import EmbeddedPostgres
from tests.live import Broker, Deployment, complete, deployed, look, save

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


def database(kind: str, directory: Path, postgres: EmbeddedPostgres) -> str:
    if kind == "sqlite":
        return f"sqlite:///{directory / 'ledger.db'}"
    return postgres.create_database(f"sweep_{uuid.uuid4().hex[:8]}")


def written_by_a_killed_worker(fleet: Deployment) -> str:
    """A run whose worker was killed after its write, and whose fate nobody has recorded."""
    fleet.staff(2)
    run_id, pid = fleet.start_on(None, "saved", save("a", hold="saved"), complete("a"))
    fleet.world.let_go(run_id)  # nobody is held there again
    fleet.kill(pid)
    return run_id


@pytest.mark.parametrize(
    ("kind", "broker"), [("sqlite", "redis"), ("postgres", "rabbitmq")], indirect=["broker"]
)
def test_workers_without_any_beat_recover_what_a_killed_one_held(
    kind: str, broker: Broker, tmp_path: Path, postgres: EmbeddedPostgres
) -> None:
    settings = {"sweep_in_workers": "true", **broker.settings}
    how: dict[str, Any] = {"beat": None, "settings": settings, "ahead_s": 0}
    with deployed(tmp_path, database(kind, tmp_path, postgres), broker.url, **how) as fleet:
        run_id = written_by_a_killed_worker(fleet)
        [run] = fleet.rest(run_id)

        assert (run.status, run.reason) == ("completed", "completed")
        assert len(fleet.noted("effect", run_id)) == 1
        assert len(fleet.noted("find", run_id)) == 1, "two timers, one query"


def test_a_worker_that_sweeps_ends_in_order(
    tmp_path: Path, broker: Broker, postgres: EmbeddedPostgres
) -> None:
    """Its timer keeps it from nothing, and it leaves nothing that nobody holds."""
    how: dict[str, Any] = {"beat": None}
    how["settings"] = {"sweep_in_workers": "true", **broker.settings}
    with deployed(tmp_path, database("postgres", tmp_path, postgres), broker.url, **how) as fleet:
        fleet.staff(1)
        [worker] = fleet.workers.values()
        fleet.until("it sweeps", lambda: fleet.fleet.ledger.figures()["last_sweep_ms"] is not None)
        run_id, _ = fleet.start_on(None, "ask", look("a", hold="ask"), complete())
        worker.send(signal.SIGTERM)
        fleet.until("it is gone", lambda: not worker.is_alive, within_s=10)
        fleet.world.let_go(run_id)

        assert fleet.row(run_id)["lease_until"] is None
        fleet.staff(1)
        [run] = fleet.rest(run_id)
        assert run.status == "completed"


def test_the_beat_of_an_app_that_has_a_schedule_of_its_own_makes_the_sweep_run(
    tmp_path: Path, broker: Broker, postgres: EmbeddedPostgres
) -> None:
    url = database("postgres", tmp_path, postgres)
    how: dict[str, Any] = {"beat": "tests.somebodys_app:app", "settings": broker.settings}
    with deployed(tmp_path, url, broker.url, **how) as fleet:
        run_id = written_by_a_killed_worker(fleet)
        [run] = fleet.rest(run_id)

        assert run.status == "completed"
        assert len(fleet.noted("effect", run_id)) == 1
