"""A configuration that could break a promise does not start, and says what to do instead."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery

from handrail.broker.app import (
    HOST_QUEUE,
    RECONCILE_QUEUE,
    UnsafeConfiguration,
    UnsafeSetting,
    make_app,
    register_step,
    verify_app,
    verify_redis,
    verify_server,
)
from handrail.broker.message import STEP_TASK, STEPS_QUEUE, StepMessage
from handrail.broker.redis_client import redis_client
from handrail.broker.verify import CANVAS_TASKS
from handrail.errors import BadInput

REDIS = "redis://localhost:6379/0"
BROKERS = [
    REDIS,
    "rediss://localhost/0",
    "redis+socket:///run/redis.sock?virtual_host=1",
    "redis://one;redis://two",
    "sentinel://localhost:26379",
    "amqp://localhost//",
    "memory://",
]


async def handle(message: StepMessage) -> None:
    """Nothing here runs it."""


def fleet(broker_url: str = REDIS, **options: Any) -> Celery:
    app = make_app(broker_url=broker_url, **options)
    register_step(app, handle)

    @app.task(name="handrail.reconcile.sweep", max_retries=0, shared=False)
    def sweep() -> None: ...

    @app.task(name="host.task", shared=False)
    def host_task() -> None: ...

    return app


@pytest.mark.accept("FLT-12")
@pytest.mark.parametrize("url", BROKERS)
def test_an_app_as_it_is_made_is_safe_on_every_broker(url: str) -> None:
    assert verify_app(fleet(url)) == []


def test_work_travels_on_queues_of_its_own() -> None:
    """Not on Celery's default queue: another app may live on that server."""
    app = fleet()
    queues = {
        name: app.amqp.router.route({}, name)["queue"].name
        for name in (STEP_TASK, "handrail.reconcile.sweep", "host.task")
    }
    assert queues == {
        STEP_TASK: STEPS_QUEUE,
        "handrail.reconcile.sweep": RECONCILE_QUEUE,
        "host.task": HOST_QUEUE,
    }
    assert set(app.amqp.queues.consume_from) == {STEPS_QUEUE, RECONCILE_QUEUE, HOST_QUEUE}


def test_tasks_through_which_a_forged_message_could_start_others_are_gone() -> None:
    assert set(fleet().tasks) == {STEP_TASK, "handrail.reconcile.sweep", "host.task"}


SETTINGS = {
    "pickle beside json": ("content-type", {"accept_content": ["json", "pickle"]}),
    "yaml": ("content-type", {"accept_content": ["yaml"]}),
    "everything accepted": ("content-type", {"accept_content": None}),
    "another serializer": ("content-type", {"task_serializer": "pickle"}),
    "tasks in place": ("eager-tasks", {"task_always_eager": True}),
    "publishing again": ("publish-retry", {"task_publish_retry": True}),
    "a hard time limit": ("time-limit", {"task_time_limit": 30}),
    "a soft time limit": ("time-limit", {"task_soft_time_limit": 30}),
    "remote control": ("remote-control", {"worker_enable_remote_control": True}),
    "worker events": ("events", {"worker_send_task_events": True}),
    "sent events": ("events", {"task_send_sent_event": True}),
    "prefetching": ("prefetch", {"worker_prefetch_multiplier": 4}),
    "prefetching on Redis": ("prefetch", {"worker_disable_prefetch": False}),
    "late acknowledgement": ("late-ack", {"task_acks_late": True}),
    "a poison loop": ("late-ack", {"task_reject_on_worker_lost": True}),
    "no transport options": ("ack-emulation", {"broker_transport_options": {}}),
    "acknowledgement emulation": (
        "ack-emulation",
        {"broker_transport_options": {"ack_emulation": True, "socket_timeout": 1.0}},
    ),
    "no socket timeout": (
        "socket-timeout",
        {"broker_transport_options": {"ack_emulation": False, "socket_timeout": None}},
    ),
    "a long socket timeout": (
        "socket-timeout",
        {"broker_transport_options": {"ack_emulation": False, "socket_timeout": 60}},
    ),
    "another pool": ("pool", {"worker_pool": "prefork"}),
    "an expiring schedule": (
        "schedule",
        {
            "beat_schedule": {
                "sweep": {"task": "handrail.reconcile.sweep", "options": {"expires": 5}}
            }
        },
    ),
}


def test_redis_behind_a_sentinel_is_held_to_the_rules_of_redis() -> None:
    app = fleet("sentinel://localhost:26379")
    app.conf.broker_transport_options = {"master_name": "mymaster"}
    assert {setting.code for setting in verify_app(app)} == {"ack-emulation", "socket-timeout"}


@pytest.mark.accept("FLT-12")
@pytest.mark.parametrize(("code", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_an_unsafe_setting_is_found(code: str, settings: dict[str, object]) -> None:
    app = fleet()
    app.conf.update(settings)
    found = verify_app(app)
    assert code in {setting.code for setting in found}
    assert all(setting.next_step and setting.wanted for setting in found)


TASK_OPTIONS = {
    "results": ("result-backend", "ignore_result", False),
    "late acknowledgement": ("late-ack", "acks_late", True),
    "retries": ("task-retry", "max_retries", 3),
    "automatic retries": ("task-retry", "autoretry_for", (OSError,)),
    "a time limit": ("time-limit", "time_limit", 30),
    "a soft time limit": ("time-limit", "soft_time_limit", 30),
    "an expiry": ("expiry", "expires", 30),
    "a rate limit": ("rate-limit", "rate_limit", "1/s"),
    "a priority": ("priority", "priority", 3),
}


@pytest.mark.accept("FLT-12")
@pytest.mark.parametrize("name", [STEP_TASK, "handrail.reconcile.sweep"])
@pytest.mark.parametrize(("code", "option", "value"), TASK_OPTIONS.values(), ids=TASK_OPTIONS)
def test_an_unsafe_option_of_a_task_of_ours_is_found(
    name: str, code: str, option: str, value: object
) -> None:
    app = fleet()
    setattr(app.tasks[name], option, value)
    [found] = verify_app(app)
    assert found.code == code
    assert name in found.setting


def test_an_annotation_that_slips_a_retry_into_a_step_is_found() -> None:
    """Celery applies annotations to every task of an app, behind the task's own back."""
    app = make_app(broker_url=REDIS)
    app.conf.task_annotations = {"*": {"max_retries": 5}}
    register_step(app, handle)
    assert [setting.code for setting in verify_app(app)] == ["task-retry"]


def test_a_host_task_keeps_its_own_options_except_what_this_app_cannot_give() -> None:
    """Late acknowledgement would be a promise without the emulation that it rests on."""
    app = fleet()
    host_task = app.tasks["host.task"]
    host_task.max_retries, host_task.time_limit = 9, 60
    assert verify_app(app) == []
    host_task.acks_late = True
    assert [setting.code for setting in verify_app(app)] == ["late-ack"]


def test_a_canvas_task_that_came_back_is_found() -> None:
    app = fleet()
    app.tasks[CANVAS_TASKS[0]] = app.tasks["host.task"]
    assert [setting.code for setting in verify_app(app)] == ["canvas-task"]


@pytest.mark.parametrize("pool", ["prefork", "solo", "threads"])
def test_a_pool_that_holds_few_steps_must_be_declared(pool: str) -> None:
    assert [setting.code for setting in verify_app(fleet(), pool=pool)] == ["pool"]
    assert verify_app(fleet(pool=pool)) == []


def test_all_findings_are_reported_at_once() -> None:
    app = fleet()
    app.conf.update(task_time_limit=3, task_acks_late=True)
    error = UnsafeConfiguration(tuple(verify_app(app)))
    assert isinstance(error, BadInput)
    assert error.code == "unsafe-configuration"
    assert "[time-limit] task_time_limit is 3" in str(error)
    assert "[late-ack] task_acks_late is True" in str(error)


def test_tls_is_checked_unless_the_address_says_otherwise() -> None:
    """kombu alone would accept any certificate for `rediss://`."""
    checked = make_app(broker_url="rediss://localhost/0").connection_for_write()
    waived = make_app(broker_url="rediss://localhost/0?ssl_cert_reqs=none").connection_for_write()
    assert checked.ssl == {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    assert waived.ssl == {"ssl_cert_reqs": ssl.CERT_NONE}


@contextmanager
def policy(url: str, name: str) -> Iterator[None]:
    client: Any = redis_client(url)
    client.config_set("maxmemory-policy", name)
    try:
        yield
    finally:
        client.config_set("maxmemory-policy", "noeviction")


def test_a_server_that_keeps_its_keys_is_safe(valkey_url: str) -> None:
    assert verify_redis(valkey_url) == []
    assert verify_server(fleet(valkey_url)) == []


@pytest.mark.parametrize("name", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_evicts_is_refused(valkey_url: str, name: str) -> None:
    """An evicted queue is a silent loss, and an evicted lock a second holder."""
    with policy(valkey_url, name):
        [found] = verify_redis(valkey_url)
    assert found.code == "redis-evicts"
    assert name in found.found
    assert "CONFIG SET maxmemory-policy noeviction" in found.next_step


def refused() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield port


def silent() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("kind", [refused, silent])
def test_a_server_that_does_not_answer_is_reported_not_waited_for(
    kind: Callable[[], Iterator[int]],
) -> None:
    with contextmanager(kind)() as port:
        [found] = verify_redis(f"redis://127.0.0.1:{port}/0")
    assert found == UnsafeSetting(
        code="broker-unreachable",
        setting="broker",
        found=found.found,
        wanted="an answer",
        next_step="Start it, or correct the broker's address.",
    )


@pytest.mark.parametrize("url", ["amqp://127.0.0.1:1//", "redis://127.0.0.1:1;redis://127.0.0.1:2"])
def test_a_broker_that_is_no_plain_redis_is_asked_whether_it_answers(url: str) -> None:
    assert [found.code for found in verify_server(fleet(url))] == ["broker-unreachable"]
    assert verify_server(fleet("memory://")) == []
