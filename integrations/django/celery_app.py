"""`install(app)`: the project's fleet in the project's Celery app."""

from __future__ import annotations

from celery import Celery

from handrail import installing
from handrail.integrations.django import conf


def install(app: Celery) -> None:
    """Let the workers of the project's own Celery app run the fleet of `HANDRAIL["FLEET"]`.

    To be called in the module that makes the app; nothing is read of the project before the app is
    configured, and nothing of the fleet before a worker needs it. See `handrail.install`.
    """
    installing.install(app, settings=conf.read)
