"""A fleet of real processes: what waits for a person waits in the ledger, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import redis

from handrail.testing.people import APPROVER
from handrail.testing.services import EmbeddedPostgres
from tests.live import ROOT, Deployment, FailingBroker, complete, deployed, save

pytestmark = [pytest.mark.live, pytest.mark.timeout(60)]

#: What an approver's process runs: it knows the token, and none of the fleet's code.
AGREE: Final = """
import sys
from handrail import Fleet
from handrail.agent.approvals import ApprovalRefused
from handrail.agent.tools import Principal

fleet = Fleet()
ann = Principal("ann", roles=frozenset({"approver"}))
try:
    fleet.approve(sys.stdin.read(), by=ann)
    print("agreed")
except ApprovalRefused as error:
    print(error.problem)
finally:
    fleet.close()
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[FailingBroker]:
    broker = FailingBroker(tmp_path)
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
def fleet(
    tmp_path: Path, broker: FailingBroker, postgres: EmbeddedPostgres
) -> Iterator[Deployment]:
    url = postgres.create_database(f"consent_{uuid.uuid4().hex[:8]}")
    secret = {"approval_secret": uuid.uuid4().hex * 2}
    with deployed(tmp_path, url, broker.url, settings=secret) as made:
        yield made


def agreed_elsewhere(fleet: Deployment, token: str) -> str:
    """Agree in a process of its own; what it said."""
    settings = {f"HANDRAIL_{name.upper()}": str(value) for name, value in fleet.settings.items()}
    done = subprocess.run(
        [sys.executable, "-c", AGREE],
        input=token,
        env=os.environ | settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.accept("FLT-11", "APR-08", "APR-09")
def test_a_run_that_waits_for_consent_outlives_the_broker_and_every_worker(
    fleet: Deployment, broker: FailingBroker
) -> None:
    """All that was queued is lost, all who worked are dead; the consent comes from elsewhere."""
    fleet.staff(2)
    run_id = fleet.start(save("draft", tool="save_with_consent"), complete("draft"))
    [parked] = fleet.rest(run_id)
    assert parked.status == "awaiting_approval" and fleet.noted("save", run_id) == []
    assert fleet.row(run_id)["lease_until"] is None, "a worker is held"
    [asked] = fleet.fleet.desk.approvals(by=APPROVER, run=run_id)
    token = fleet.fleet.desk.issue_token(asked.id, by=APPROVER)

    before = {*fleet.workers}
    fleet.kill(*before)
    broker.stop()
    broker.start()
    with redis.Redis.from_url(broker.url) as client:
        assert not any(run_id in str(client.dump(key)) for key in client.scan_iter())
    fleet.staff(2)
    assert before.isdisjoint(fleet.workers)
    assert fleet.fleet.get(run_id).status == "awaiting_approval"

    assert agreed_elsewhere(fleet, token) == "agreed"
    [run] = fleet.rest(run_id)
    assert (run.status, run.reason) == ("completed", "completed")
    assert agreed_elsewhere(fleet, token) == "not-pending"
    assert len(fleet.noted("effect", run_id)) == 1
    assert {note.pid for note in fleet.noted("save", run_id)} <= {*fleet.workers}
    told = [event["type"] for event in fleet.fleet.trace(run_id)]
    assert told.count("run.stopped") == 1 and told[-1] == "run.stopped"
    used = fleet.fleet.desk.approval(asked.id, by=APPROVER)
    assert (used.status, used.consents) == ("consumed", ("ann",))
