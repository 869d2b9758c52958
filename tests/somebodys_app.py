"""Somebody's own Celery app: it has a schedule already, and merges a fleet's into it."""

from __future__ import annotations

from celery import Celery

from handrail import Fleet

fleet = Fleet("client")  # as in a web process: it knows the settings, and no workflow
settings = fleet.settings

app = Celery("shop", broker=settings.broker_url, set_as_current=False)
app.conf.update(
    task_default_queue=f"{settings.key_prefix}shop",
    broker_transport_options={"global_keyprefix": settings.key_prefix},
    beat_schedule={"stock": {"task": "shop.count", "schedule": 60.0}},
)
app.conf.beat_schedule = {**app.conf.beat_schedule, **fleet.beat_schedule()}
