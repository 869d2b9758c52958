"""What a beat sends: any app's beat will do, and what nobody takes does not pile up."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from celery.beat import Scheduler

from handrail.broker.message import RECONCILE_QUEUE, SWEEP_TASK
from handrail.broker.transport import MOST_SWEEPS_WAITING
from handrail.fleet import Fleet
from handrail.settings import Settings


@pytest.fixture
def prefix() -> str:
    return f"beat-{uuid.uuid4().hex[:8]}."


@pytest.fixture
def fleet(valkey_url: str, prefix: str) -> Iterator[Fleet]:
    settings = Settings(database_url="sqlite://", broker_url=valkey_url, key_prefix=prefix)
    made = Fleet(settings=settings)
    yield made
    made.close()


def somebodys_app(url: str, prefix: str) -> Celery:
    """An app of its own, with a schedule of its own, that knows nothing of Handrail."""
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(
        task_serializer="pickle",
        task_default_queue="shop",
        broker_transport_options={"global_keyprefix": prefix},
        beat_schedule={"stock": {"task": "shop.count", "schedule": 60.0}},
    )
    return app


def send_all(app: Celery) -> None:
    """Let a beat send each of its entries, as it does when they are due."""
    scheduler = Scheduler(app=app)
    for entry in scheduler.schedule.values():
        scheduler.apply_async(entry, advance=False)


def waiting(url: str, queue: str) -> list[dict[str, Any]]:
    with redis.Redis.from_url(url) as client:
        found: Any = client.lrange(queue, 0, -1)
        return [json.loads(item) for item in found]


def test_the_fleets_own_app_has_the_schedule(fleet: Fleet) -> None:
    assert fleet.celery.conf.beat_schedule == fleet.beat_schedule()
    [entry] = fleet.beat_schedule().values()
    assert (entry["task"], entry["schedule"]) == (SWEEP_TASK, fleet.settings.sweep_every_s)


def test_the_schedule_merges_into_that_of_any_app(
    fleet: Fleet, valkey_url: str, prefix: str
) -> None:
    """Its beat sends both; ours is a message that a fleet's worker takes, whatever that app's
    settings.
    """
    app = somebodys_app(valkey_url, prefix)
    app.conf.beat_schedule = {**app.conf.beat_schedule, **fleet.beat_schedule()}
    send_all(app)

    [theirs] = waiting(valkey_url, f"{prefix}shop")
    assert theirs["headers"]["task"] == "shop.count"
    [ours] = waiting(valkey_url, f"{prefix}{RECONCILE_QUEUE}")
    assert ours["headers"]["task"] == SWEEP_TASK
    assert ours["content-type"] == "application/json"
    assert ours["headers"]["expires"] is None and ours["headers"]["eta"] is None
    assert int(ours["properties"]["expiration"]) == 10_000  # for RabbitMQ


def test_sweeps_that_no_worker_takes_do_not_pile_up(
    fleet: Fleet, valkey_url: str, prefix: str
) -> None:
    for _ in range(3 * MOST_SWEEPS_WAITING):
        send_all(fleet.celery)

    assert len(waiting(valkey_url, f"{prefix}{RECONCILE_QUEUE}")) == MOST_SWEEPS_WAITING
