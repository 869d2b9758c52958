"""Publishing steps: after the commit, at least once or not at all, and never in the way.

On Redis the message is made by hand and pushed with one command, for a tenth of the cost of
Celery's producer; any Celery worker can read it. On every other broker kombu's producer is used,
without retries. A failure is normal: the row is the outbox, and the sweep publishes it again. It
may also be half a failure, since a push whose answer was lost has been delivered.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import ssl
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import urlsplit

import redis

from handrail.broker.message import STEP_TASK, STEPS_QUEUE, StepMessage
from handrail.broker.redis_client import (
    TIMEOUT_S,
    is_one_redis,
    redis_client,
    redis_url,
    ssl_options,
)
from handrail.errors import TryLater

if TYPE_CHECKING:  # a web process that only publishes needs no Celery
    from celery import Celery

log = logging.getLogger("handrail.broker")

#: For whoever must not be held up, a web request above all: to connect, and for each answer.
IN_PASSING_S: Final = 0.3
#: So long nothing is tried after a failure, or each request would wait for the same broker.
REST_S: Final = 5.0

_ID: Final = "@id@"
_EMBEDDED: Final = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
_BODY_TAIL: Final = "],{}," + json.dumps(_EMBEDDED) + "]"


@dataclass(eq=False)
class PublishFailed(TryLater):
    """The broker did not take the messages, or did not say so. Go on: the sweep publishes again."""

    code: ClassVar[str] = "publish-failed"
    count: int
    problem: str

    def __str__(self) -> str:
        return f"{self.count} step messages were not published ({self.problem}); the sweep will"


class Publisher:
    """Publishes step messages on a broker: that of a Celery app, or by its address alone (on one
    Redis server that needs no Celery). Thread-safe, and safe to carry over a fork.
    """

    def __init__(
        self, broker: Celery | str, *, key_prefix: str = "", timeout_s: float = TIMEOUT_S
    ) -> None:
        if isinstance(broker, str):
            url = broker if is_one_redis(broker) else None
            options = _checking_certificates(broker)
        else:
            url, options = redis_url(broker), ssl_options(broker)
            key_prefix = broker.conf.broker_transport_options.get("global_keyprefix", "")
        self._broker = broker
        self._key_prefix = key_prefix
        self._timeout_s = timeout_s
        self._parts = _envelope().split(_ID)
        self._client = redis_client(url, timeout_s=timeout_s, **options) if url else None
        self._key = key_prefix + STEPS_QUEUE

    @cached_property
    def _app(self) -> Celery:
        if not isinstance(self._broker, str):
            return self._broker
        from handrail.broker.app import make_app

        return make_app(broker_url=self._broker, key_prefix=self._key_prefix)

    def publish(self, messages: Sequence[StepMessage]) -> int:
        """Publish messages, on Redis with one command for all. Returns how many there were.

        Raises `PublishFailed`, within two timeouts: then some may have been published.
        """
        if not messages:
            return 0
        if self._client is not None:
            self._push(self._client, [self._item(message) for message in messages])
        else:
            self._produce(messages)
        return len(messages)

    def publish_one(self, message: StepMessage) -> None:
        """Publish one message; see `publish`."""
        self.publish((message,))

    def close(self) -> None:
        """Close the connections. Publishing again opens new ones."""
        if self._client is not None:
            self._client.connection_pool.disconnect()

    def _item(self, message: StepMessage) -> str:
        body = f"[[{message.to_json()}{_BODY_TAIL}"
        return f"{str(uuid.uuid4()).join(self._parts)}{json.dumps(body)}}}"

    def _push(self, client: redis.Redis, items: list[str]) -> None:
        # As `client.lpush` does it, without what it does for the sake of other commands.
        pool: Any = client.connection_pool
        try:
            connection = pool.get_connection()
            try:
                connection.send_command("LPUSH", self._key, *items)
                connection.read_response()
            except BaseException:
                connection.disconnect()  # or its answer would be taken for the next command's
                raise
            finally:
                pool.release(connection)
        except (redis.RedisError, OSError) as error:
            raise PublishFailed(len(items), type(error).__name__) from error

    def _produce(self, messages: Sequence[StepMessage]) -> None:
        queue = self._app.amqp.queues[STEPS_QUEUE]
        headers = json.loads(_envelope() + '""}')["headers"]
        try:
            with self._app.amqp.producer_pool.acquire(
                block=True, timeout=self._timeout_s
            ) as producer:
                connection: Any = producer.connection
                try:
                    self._open(connection)
                    for message in messages:
                        task_id = str(uuid.uuid4())
                        producer.publish(
                            ([json.loads(message.to_json())], {}, _EMBEDDED),
                            serializer="json",
                            headers={**headers, "id": task_id, "root_id": task_id},
                            correlation_id=task_id,
                            exchange="",
                            routing_key=STEPS_QUEUE,
                            declare=[queue],
                            delivery_mode=2,
                            mandatory=True,  # or one that no queue takes is confirmed as well
                            retry=False,
                            timeout=self._timeout_s,
                            confirm_timeout=self._timeout_s,
                        )
                except Exception:
                    # Not politely: a server that stands still would be waited for without an end.
                    connection.collect()
                    connection.maybe_switch_next()  # of several servers
                    raise
        except Exception as error:  # each transport has its own kinds
            raise PublishFailed(len(messages), type(error).__name__) from error

    def _open(self, connection: Any) -> None:
        """Let a connection to RabbitMQ be a living one, on which nothing is waited for for long."""
        if connection.transport.driver_type != "amqp":
            return
        if connection.connected and _speaks(connection.connection.sock):
            connection.collect()
        connection.connect_timeout = self._timeout_s
        connection.ensure_connection(
            max_retries=max(0, len(connection.alt) - 1),  # each server once
            interval_start=0,
            interval_step=0,
            timeout=self._timeout_s,
        )
        connection.connection.sock.settimeout(self._timeout_s)


class Courier:
    """Publishes in passing: bounded, and never a failure of whoever has just committed.

    After a failure it does not try for some seconds; whatever it leaves the sweep publishes.
    """

    def __init__(self, publisher: Publisher, *, url: str = "") -> None:
        self.url = url  # where it publishes, for whoever has to know
        self._publisher = publisher
        self._rests_until = 0.0

    def publish(self, messages: Sequence[StepMessage]) -> None:
        """Publish messages if that is to be had within a moment."""
        if time.monotonic() < self._rests_until:
            return
        try:
            self._publisher.publish(messages)
        except PublishFailed as error:
            self._rests_until = time.monotonic() + REST_S
            log.warning("[%s] %s", error.code, error)

    def close(self) -> None:
        """Close the connections. Publishing again opens new ones."""
        self._publisher.close()


def _speaks(sock: socket.socket) -> bool:
    """Whether a server has said something that nobody has asked for: it ends the connection."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(0))


def _checking_certificates(url: str) -> dict[str, Any]:
    """Over TLS a certificate is checked, unless the address says otherwise."""
    if urlsplit(url).scheme == "rediss" and "ssl_" not in url:
        return {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    return {}


def _envelope() -> str:
    """The message around a body, as kombu writes it, with a mark for its id and an open end."""
    envelope: dict[str, Any] = {
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            "lang": "py",
            "task": STEP_TASK,
            "id": _ID,
            "root_id": _ID,
            "parent_id": None,
            "group": None,
            "eta": None,
            "expires": None,
            "retries": 0,
            "timelimit": [None, None],
            "argsrepr": "",
            "kwargsrepr": "",
            "origin": f"{os.getpid()}@{socket.gethostname()}",
            "ignore_result": True,
        },
        "properties": {
            "correlation_id": _ID,
            "reply_to": "",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": STEPS_QUEUE},
            "priority": 0,
            "body_encoding": "utf-8",  # as it is: base64 would only make it longer
            "delivery_tag": _ID,
        },
    }
    return json.dumps(envelope)[:-1] + ', "body": '
