"""Start-up checks: a configuration that could break a promise does not start.

`verify_app` reads the settings, `verify_redis` asks the server. Each finding has a stable code and
says what to do; `UnsafeConfiguration` carries all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import redis
from amqp.exceptions import PreconditionFailed
from celery import Celery
from celery.concurrency import get_implementation

from handrail.broker.pool import LoopPool, LoopTask
from handrail.broker.redis_client import is_redis, redis_client, redis_url, ssl_options
from handrail.errors import BadInput

VERIFY_TIMEOUT_S: Final = 1.5  # connecting and asking together stay below 2 s on a local network
CANVAS_TASKS: Final = (
    "celery.accumulate",
    "celery.backend_cleanup",
    "celery.chain",
    "celery.chord",
    "celery.chord_unlock",
    "celery.chunks",
    "celery.group",
    "celery.map",
    "celery.starmap",
)
#: What no waiting mends; a broker that is away may come back.
NEVER: Final = ("redis-evicts", "queue-is-another")
_JSON: Final = {"json", "application/json"}


@dataclass(frozen=True, slots=True)
class UnsafeSetting:
    """One thing that must change before a worker may start."""

    code: str
    setting: str
    found: str
    wanted: str
    next_step: str

    def __str__(self) -> str:
        return (
            f"[{self.code}] {self.setting} is {self.found}, wanted: {self.wanted}. {self.next_step}"
        )


@dataclass(eq=False)
class UnsafeConfiguration(BadInput):
    """The configuration could break a promise: nothing was started."""

    code: ClassVar[str] = "unsafe-configuration"
    settings: tuple[UnsafeSetting, ...]

    def __str__(self) -> str:
        return "unsafe configuration, nothing was started:\n" + "\n".join(map(str, self.settings))


class _Rule(NamedTuple):
    code: str
    setting: str
    is_safe: Callable[[Any], bool]
    wanted: str
    next_step: str


def _only_json(value: Any) -> bool:
    return bool(value) and set(value) <= _JSON


def _off(value: Any) -> bool:
    return not value


_KEEP: Final = "Leave it as `make_app` sets it."
_APART: Final = (
    "Start this worker with -Q and your own queues, and run ours apart: 'handrail worker'."
)
_RULES: Final = (
    _Rule("content-type", "accept_content", _only_json, "json alone", "Accept nothing but json."),
    _Rule("content-type", "task_serializer", _JSON.__contains__, "json", _KEEP),
    _Rule("eager-tasks", "task_always_eager", _off, "off", "Use the in-process runner instead."),
    _Rule("publish-retry", "task_publish_retry", _off, "off", "The sweep repeats what was lost."),
    _Rule("time-limit", "task_time_limit", _off, "none", "A step keeps its own deadline."),
    _Rule("time-limit", "task_soft_time_limit", _off, "none", "A step keeps its own deadline."),
    _Rule("remote-control", "worker_enable_remote_control", _off, "off", _KEEP),
    _Rule("events", "worker_send_task_events", _off, "off", _KEEP),
    _Rule("events", "task_send_sent_event", _off, "off", _KEEP),
    _Rule("prefetch", "worker_prefetch_multiplier", lambda n: n == 1, "1", _KEEP),
    _Rule("late-ack", "task_acks_late", _off, "off", "Recovery is the ledger's, not the broker's."),
    _Rule("late-ack", "task_reject_on_worker_lost", _off, "off", "A step that kills would loop."),
)
_REDIS_RULES: Final = (
    _Rule("prefetch", "worker_disable_prefetch", bool, "on", _KEEP),
    _Rule(
        "ack-emulation",
        "broker_transport_options",
        lambda options: options.get("ack_emulation", True) is False,
        "ack_emulation: False",
        "It doubles a message's cost, and brings back steps that run.",
    ),
    _Rule(
        "socket-timeout",
        "broker_transport_options",
        lambda options: 0 < (options.get("socket_timeout") or 0) <= 5,
        "a socket_timeout of 1 to 5 s",
        "Without one, a frozen Redis freezes whoever publishes.",
    ),
)
# What a task of ours must not use: each starts work that nobody paid for, or delays or drops it.
_TASK_RULES: Final = (
    ("result-backend", "ignore_result", True),
    ("late-ack", "acks_late", False),
    ("task-retry", "max_retries", 0),
    ("task-retry", "autoretry_for", ()),
    ("time-limit", "time_limit", None),
    ("time-limit", "soft_time_limit", None),
    ("expiry", "expires", None),
    ("rate-limit", "rate_limit", None),
    ("priority", "priority", None),
)
_BEAT_OPTIONS: Final = frozenset({"countdown", "eta", "expires", "priority"})


def verify_app(app: Celery, *, pool: type | str | None = None) -> list[UnsafeSetting]:
    """Return what is unsafe in an app's settings, tasks and schedule; an empty list is good news.

    `pool` is the pool that a worker really uses, where it is known: `-P` overrides the setting.
    """
    rules = _RULES + (_REDIS_RULES if is_redis(app) else ())
    found = [
        UnsafeSetting(rule.code, rule.setting, repr(value), rule.wanted, rule.next_step)
        for rule in rules
        if not rule.is_safe(value := app.conf[rule.setting])
    ]
    return [*found, *_unsafe_pool(app, pool), *_unsafe_tasks(app), *_unsafe_schedule(app)]


def verify_guest(app: Celery, *, pool: type | str | None = None) -> list[UnsafeSetting]:
    """Return what keeps our tasks from being safe in a worker of a host's own app.

    Far less than in an app of ours, whose settings we make. Harmless here: late acknowledgement,
    time limits, rate limits and results (our tasks say their own), the emulation of
    acknowledgements and any prefetch (a message comes twice or late, and grants nothing),
    publishing again (we publish by ourselves), remote control and events (they stop a worker, and
    change no run).
    """
    found = []
    if not _only_json(app.conf.accept_content):
        found.append(
            UnsafeSetting(
                "content-type",
                "accept_content",
                repr(app.conf.accept_content),
                "json alone",
                f"What unpickles a message runs whatever its sender likes. {_APART}",
            )
        )
    kind = get_implementation(pool or app.conf.worker_pool)
    if kind.__module__.rpartition(".")[2] in ("gevent", "eventlet"):
        found.append(
            UnsafeSetting(
                "pool",
                "worker_pool",
                kind.__module__,
                "prefork, threads or solo",
                f"Green threads stand still while a step's event loop runs. {_APART}",
            )
        )
    return [*found, *(one for one in verify_server(app) if one.code in NEVER)]


def verify_server(app: Celery) -> list[UnsafeSetting]:
    """Return what is unsafe about an app's broker: whether it answers and, of a Redis, evicts."""
    url = redis_url(app)
    if url:
        return verify_redis(url, **ssl_options(app))
    try:
        with app.connection_for_write(connect_timeout=VERIFY_TIMEOUT_S) as connection:
            connection.connect()
            return [*_other_queues(app, connection)]
    except Exception as error:  # each transport has its own kinds
        return [_unreachable(error)]


def _other_queues(app: Celery, connection: Any) -> Iterator[UnsafeSetting]:
    """Declare our queues on RabbitMQ, and name those that are there as another kind."""
    if connection.transport.driver_type != "amqp":
        return
    for name, queue in app.amqp.queues.items():
        if not str(name).startswith("handrail."):
            continue
        channel = connection.channel()  # a refusal closes it
        try:
            queue(channel).declare()
        except PreconditionFailed:
            yield UnsafeSetting(
                "queue-is-another",
                f"queue {name}",
                "declared in another way",
                "a quorum queue of ours",
                "Stop the workers and delete it at the broker (rabbitmqctl delete_queue): the"
                " sweep publishes again what was in it.",
            )
        else:
            channel.close()


def verify_redis(
    url: str, *, timeout_s: float = VERIFY_TIMEOUT_S, **options: Any
) -> list[UnsafeSetting]:
    """Ask a Redis server whether it evicts keys. Never raises, and answers within 2 s.

    Codes: `broker-unreachable`, `redis-evicts`. Further options are redis-py's, for TLS.
    """
    try:
        with redis_client(url, timeout_s=timeout_s / 2, **options) as client:
            memory = client.info("memory")
    except (redis.RedisError, OSError, ValueError) as error:
        return [_unreachable(error)]
    policy = memory.get("maxmemory_policy", "unknown")
    if policy == "noeviction":
        return []
    return [
        UnsafeSetting(
            "redis-evicts",
            "maxmemory-policy",
            repr(policy),
            "noeviction",
            "Run `CONFIG SET maxmemory-policy noeviction`, and keep caches on another server.",
        )
    ]


def _unreachable(error: Exception) -> UnsafeSetting:
    next_step = "Start it, or correct the broker's address."
    problem = type(error).__name__
    return UnsafeSetting("broker-unreachable", "broker", problem, "an answer", next_step)


def _unsafe_pool(app: Celery, pool: type | str | None) -> Iterator[UnsafeSetting]:
    name = pool or app.conf.worker_pool
    kind = get_implementation(name)
    if issubclass(kind, LoopPool) or app.conf.get("handrail_pool_declared"):
        return
    yield UnsafeSetting(
        "pool",
        "worker_pool",
        f"{kind.__module__}:{kind.__qualname__}",
        "the pool of `make_app`",
        "Drop -P, or declare another pool with `make_app(pool=...)`: a waiting step occupies it.",
    )


def _unsafe_tasks(app: Celery) -> Iterator[UnsafeSetting]:
    for name, task in sorted(app.tasks.items()):
        if name in CANVAS_TASKS:
            yield UnsafeSetting(
                "canvas-task",
                f"task {name}",
                "registered",
                "not registered",
                "Make the app with `make_app`: a forged message could start any task through it.",
            )
        elif isinstance(task, LoopTask) or name.startswith("handrail."):
            for code, attribute, wanted in _TASK_RULES:
                if (value := getattr(task, attribute, wanted)) != wanted:
                    setting = f"task {name}: {attribute}"
                    yield UnsafeSetting(code, setting, repr(value), repr(wanted), _KEEP)
        elif task.acks_late and is_redis(app):
            yield UnsafeSetting(
                "late-ack",
                f"task {name}: acks_late",
                "True",
                "False",
                "This app does not emulate acknowledgements on Redis: use another app for it.",
            )


def _unsafe_schedule(app: Celery) -> Iterator[UnsafeSetting]:
    for name, entry in sorted((app.conf.beat_schedule or {}).items()):
        used = _BEAT_OPTIONS & set(entry.get("options") or {})
        if used and str(entry.get("task", "")).startswith("handrail."):
            setting, found = f"beat_schedule[{name!r}]", ", ".join(sorted(used))
            yield UnsafeSetting("schedule", setting, found, "no such option", _KEEP)
