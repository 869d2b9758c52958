"""The app of the worker processes in the broker's tests: what a step does is in its run id.

    note-*    leave a note, and no more
    hold-*    leave a note, wait until it is let go, leave another
    crash-*   leave a note and raise
    exit-*    leave a note and raise SystemExit

Notes go to lists on the same Redis; a worker without our pool and consumer can be had too.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from celery import Celery
from celery.signals import worker_ready

from handrail.broker.app import make_app, register_step
from handrail.broker.loop import shared_loop
from handrail.broker.message import STEP_TASK, StepMessage
from handrail.broker.redis_client import redis_client

URL = os.environ["BROKER_TEST_URL"]
PREFIX = os.environ["BROKER_TEST_PREFIX"]
POOL = os.environ.get("BROKER_TEST_POOL") or None
PLAIN = "BROKER_TEST_PLAIN" in os.environ
SECRET = "".join(("sec", "ret"))  # a traceback shows this line, and must not show the value

notes: Any = redis_client(os.environ.get("BROKER_TEST_NOTES", URL), timeout_s=30)


def note(kind: str, text: str) -> None:
    notes.lpush(f"{PREFIX}{kind}", text)


@worker_ready.connect
def say_ready(**_: object) -> None:
    note("ready", str(os.getpid()))


async def hold(run_id: str) -> None:
    await asyncio.to_thread(notes.blpop, [f"{PREFIX}let-go"], 30)
    note("let-go-seen", run_id)


async def step(message: StepMessage) -> None:
    note("begun", message.run_id)
    match message.run_id.partition("-")[0]:
        case "hold":
            await hold(message.run_id)
        case "crash":
            raise RuntimeError(SECRET)
        case "exit":
            raise SystemExit(SECRET)


def drain(timeout_s: float) -> None:
    """The tasks layer's hook: here it lets one held step go, from the loop, as a real one may."""
    note("drain", str(timeout_s))
    shared_loop().submit(asyncio.to_thread(notes.lpush, f"{PREFIX}let-go", "drained")).result(10)


def fleet() -> Celery:
    app = make_app(
        broker_url=URL,
        in_flight=int(os.environ.get("BROKER_TEST_IN_FLIGHT", "256")),
        key_prefix=PREFIX,
        pool=POOL,
    )
    register_step(app, step)
    app.handrail_drain = drain  # type: ignore[attr-defined]

    @app.task(name="host.canary", shared=False)
    def canary(text: str = "") -> None:
        note("canary", text)

    return app


def plain_celery() -> Celery:
    """A worker that knows nothing of Handrail, but for the name of its task."""
    app = Celery("plain", broker=URL)
    app.conf.broker_transport_options = {"global_keyprefix": PREFIX}
    app.conf.task_default_queue = "handrail.steps"

    @app.task(name=STEP_TASK, shared=False)
    def plain_step(payload: dict[str, object]) -> None:
        note("begun", StepMessage.from_json(payload).to_json())

    return app


app = plain_celery() if PLAIN else fleet()
