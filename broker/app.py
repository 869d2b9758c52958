"""The Celery app of a fleet: safe settings, our pool, our queues, and the one step task.

What Celery offers and we do not use is switched off here, once: results, retries, time limits,
priorities, delays, remote control, events, canvas. `verify_app` finds what was switched on again.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

from celery import Celery

from handrail.broker.message import (
    RECONCILE_QUEUE,
    STEP_TASK,
    STEPS_QUEUE,
    SWEEP_TASK,
    BadMessage,
    StepMessage,
)
from handrail.broker.pool import (
    DEFAULT_DRAIN_SECONDS,
    DEFAULT_HOST_THREADS,
    DEFAULT_IN_FLIGHT,
    LoopTask,
    Payload,
)
from handrail.broker.queues import AMQP, queue
from handrail.broker.refusals import REFUSALS
from handrail.broker.verify import (
    CANVAS_TASKS,
    UnsafeConfiguration,
    UnsafeSetting,
    verify_app,
    verify_redis,
    verify_server,
)

__all__ = [
    "HOST_QUEUE",
    "RECONCILE_QUEUE",
    "UnsafeConfiguration",
    "UnsafeSetting",
    "make_app",
    "register_step",
    "verify_app",
    "verify_redis",
    "verify_server",
]

HOST_QUEUE: Final = "handrail.host"  # not Celery's "celery": another app may live on that Redis
LOOP_POOL: Final = "handrail.broker.pool:LoopPool"
#: What a task of ours needs in an app whose settings are a host's: its time limits are its own, and
#: what is acknowledged late, or kept as a result, is not for us. (A week: no step lasts as long.)
HOST_TASK: Final[dict[str, Any]] = {
    "acks_late": False,
    "time_limit": 604_800,
    "soft_time_limit": 604_800,
    "rate_limit": None,
    "serializer": "json",
    "store_errors_even_if_ignored": False,
}
#: RabbitMQ goes on giving messages to a consumer that stands still, until it has said nothing for
#: twice as long; then others get them. Celery's own would be two minutes.
HEARTBEAT_S: Final = 10.0
SOCKET_TIMEOUT_S: Final = 2.0  # above the consumer's blocking pop of 1 s, which it must not break


def make_app(
    name: str = "handrail",
    *,
    broker_url: str,
    in_flight: int = DEFAULT_IN_FLIGHT,
    host_threads: int = DEFAULT_HOST_THREADS,
    drain_timeout_s: float = DEFAULT_DRAIN_SECONDS,
    key_prefix: str = "",
    pool: str | None = None,
) -> Celery:
    """Make the Celery app of a fleet.

    A worker process holds up to `in_flight` steps (and tasks of the host, of which `host_threads`
    run at a time); at SIGTERM it waits `drain_timeout_s` for them. `key_prefix` is put before every
    key on Redis. `pool` declares another pool than ours: there a waiting step occupies a place.
    """
    scheme = urlsplit(broker_url).scheme
    app = Celery(name, broker=broker_url, set_as_current=False)
    app.conf.update(
        # JSON, and nothing else
        accept_content=["json"],
        task_serializer="json",
        result_serializer="json",
        # no results, no second chances, no limits but our own
        result_backend=None,
        result_expires=None,
        task_ignore_result=True,
        task_acks_late=False,
        task_publish_retry=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_enable_prefetch_count_reduction=False,
        # nobody steers a worker through the broker, and nobody watches it there
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        task_send_sent_event=False,
        # queues
        task_queues=[queue(n, broker_url) for n in (STEPS_QUEUE, RECONCILE_QUEUE, HOST_QUEUE)],
        task_routes={
            STEP_TASK: {"queue": STEPS_QUEUE},
            "handrail.reconcile.*": {"queue": RECONCILE_QUEUE},
        },
        task_default_queue=HOST_QUEUE,
        # the worker
        worker_pool=pool or LOOP_POOL,
        worker_concurrency=in_flight if pool is None else None,
        worker_consumer="handrail.broker.consumer:StepConsumer",
        worker_prefetch_multiplier=1,
        worker_detect_quorum_queues=scheme in AMQP,  # they know no prefetch but a consumer's
        worker_disable_rate_limits=True,
        worker_proc_alive_timeout=30.0,
        # the broker may be away, at the start too
        broker_connection_timeout=SOCKET_TIMEOUT_S,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        handrail_pool_declared=pool is not None,
        handrail_host_threads=host_threads,
        handrail_drain_timeout_s=drain_timeout_s,
    )
    app.conf.update(_transport_settings(scheme, broker_url, key_prefix))
    app.on_after_finalize.connect(_unregister_canvas, weak=False)
    return app


def register_step(
    app: Celery, handler: Callable[[StepMessage], Awaitable[None]], **options: Any
) -> LoopTask:
    """Register `handrail.step`: each readable message is handed to `handler`, others are dropped.
    `options` are attributes of the task.

    What the handler raises is logged with its `code`, and ends there: the ledger's lease runs out.
    """

    class StepTask(LoopTask):
        name = STEP_TASK

        async def run_async(self, payload: Payload) -> None:
            try:
                message = StepMessage.from_json(payload)
            except BadMessage as error:
                REFUSALS.note(error.code, STEP_TASK, error.problem)
                return
            await handler(message)

    task = StepTask()
    for name, value in options.items():
        setattr(task, name, value)
    return app.register_task(task)


def sweep_entry(every_s: float, broker_url: str = "") -> dict[str, Any]:
    """What a beat sends, of whatever app on this broker: every message is as good as another.

    While no worker takes them they do not pile up: RabbitMQ drops them after a while by the
    message's own lifetime, our Redis transport keeps the newest few.

    An app that does not know our queues declares one for what it sends: with RabbitMQ's address it
    is told how, since Celery would make a classic queue of the mere name.
    """
    declared = urlsplit(broker_url).scheme in AMQP
    options = {
        "queue": queue(RECONCILE_QUEUE, broker_url) if declared else RECONCILE_QUEUE,
        "serializer": "json",
        "ignore_result": True,
        "expiration": max(10.0, 5 * every_s),
    }
    return {"task": SWEEP_TASK, "schedule": every_s, "options": options}


def _transport_settings(scheme: str, url: str, key_prefix: str) -> dict[str, Any]:
    if scheme in ("redis", "rediss", "redis+socket", "sentinel"):
        settings: dict[str, Any] = {
            "worker_disable_prefetch": True,
            "broker_transport_options": {
                "ack_emulation": False,
                "priority_steps": [0],  # one list a queue: a priority would starve the others
                "socket_timeout": SOCKET_TIMEOUT_S,
                "socket_connect_timeout": SOCKET_TIMEOUT_S,
                "socket_keepalive": True,
                "global_keyprefix": key_prefix,
            },
        }
        if scheme in ("redis", "rediss"):
            settings["broker_transport"] = "handrail.broker.transport:Transport"
        if scheme == "rediss" and "ssl_" not in url:  # kombu would not check the certificate
            settings["broker_use_ssl"] = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
        return settings
    if scheme in AMQP:
        return {
            "broker_transport_options": {"confirm_publish": True},
            "broker_heartbeat": HEARTBEAT_S,
        }
    return {}


def _unregister_canvas(sender: Celery, **_: object) -> None:
    """Through Celery's built-in tasks one forged message could start any other."""
    for name in CANVAS_TASKS:
        sender.tasks.pop(name, None)
