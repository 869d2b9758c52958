"""The same fleet on RabbitMQ: quorum queues, and a server that freezes, dies and comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import amqp
import pytest
from kombu import Connection
from kombu import Queue as PlainQueue

from handrail import Client, Fleet
from handrail.broker.app import HOST_QUEUE
from handrail.broker.message import RECONCILE_QUEUE, STEP_TASK, STEPS_QUEUE
from handrail.ledger import migrate
from tests.rabbit import Rabbit
from tests.test_installed_app import AGENTS

SECONDS = 60.0
BIN = Path(sys.executable).parent
OURS = (STEPS_QUEUE, RECONCILE_QUEUE, HOST_QUEUE)

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]


class OnRabbit:
    """A fleet with a ledger in a file and its messages on RabbitMQ."""

    def __init__(self, place: Path, rabbit: Rabbit, redis_url: str) -> None:
        self.place, self.rabbit = place, rabbit
        (place / "agents.py").write_text(AGENTS)
        (place / "paid").write_text("")
        (place / "takes").write_text("0")
        self.ledger = f"sqlite:///{place}/ledger.db"
        migrate.upgrade(self.ledger)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HANDRAIL_")}
        self.environment = kept | {
            "LEDGER": self.ledger,
            "PLACE": str(place),
            "PYTHONPATH": str(place),
            "HANDRAIL_BROKER_URL": rabbit.url,
            "HANDRAIL_REDIS_URL": redis_url,
            "HANDRAIL_FLEET": "agents:fleet",
            "HANDRAIL_LEASE_MS": "2000",
            "HANDRAIL_MAX_STALL_MS": "500",
            "HANDRAIL_SWEEP_EVERY_S": "0.5",
        }
        self.client = Client(database_url=self.ledger, broker_url=rabbit.url)

    @contextmanager
    def process(self, command: str) -> Iterator[subprocess.Popen[bytes]]:
        log = self.place / f"{command}{len(list(self.place.glob('*.log')))}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(BIN / "handrail"), command],
                cwd=self.place,
                env=self.environment,
                stdout=output,
                stderr=output,
            )
        try:
            self.until(lambda: "ready:" in log.read_text() or process.poll() is not None)
            yield process
        finally:
            process.terminate()
            process.wait(SECONDS)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with ExitStack() as stack:
            for command in ("worker", "beat"):
                stack.enter_context(self.process(command))
            yield

    def until(self, holds: Callable[[], object]) -> None:
        limit = time.monotonic() + SECONDS
        while not holds():
            logs = "\n".join(log.read_text()[-2000:] for log in self.place.glob("*.log"))
            assert time.monotonic() < limit, logs
            time.sleep(0.03)

    def complete(self, *runs: str) -> None:
        self.until(lambda: all(self.client.get(run).ended for run in runs))
        assert {self.client.get(run).status for run in runs} == {"completed"}

    def announced(self) -> None:
        """Let the catalog know the workflows, without a worker."""
        code = "from agents import fleet; fleet.announce()"
        subprocess.run(
            [sys.executable, "-c", code], cwd=self.place, env=self.environment, check=True
        )


@pytest.fixture
def fleet(tmp_path: Path, rabbit: Rabbit, valkey_url: str) -> Iterator[OnRabbit]:
    with Connection(rabbit.url) as connection:
        channel: Any = connection.default_channel
        for name in OURS:
            channel.queue_delete(name)
    made = OnRabbit(tmp_path, rabbit, valkey_url)
    yield made
    made.client.close()


def declared(rabbit: Rabbit) -> dict[str, str]:
    """The queues of the server, each with its type."""
    told = subprocess.run(
        ["/usr/lib/rabbitmq/bin/rabbitmqctl", "-q", "list_queues", "name", "type", "--formatter",
         "json"],
        env=rabbit.environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {one["name"]: one["type"] for one in json.loads(told)}


def test_runs_complete_on_quorum_queues_and_nothing_else_is_left(fleet: OnRabbit) -> None:
    """Four hundred runs: more than a worker may hold at a time."""
    with fleet.at_work():
        fleet.complete(fleet.client.enqueue("pay", goal="pay"))
        fleet.complete(*(fleet.client.enqueue("look", goal="see") for _ in range(400)))
        found = declared(fleet.rabbit)
    assert {name.split(".")[-1] for name in found.values()} <= {"quorum"}, found
    assert set(found) == set(OURS)


def test_no_redis_at_all_costs_no_promise(fleet: OnRabbit) -> None:
    """The lock is local to each worker then; the write is fenced by the ledger."""
    del fleet.environment["HANDRAIL_REDIS_URL"]
    (fleet.place / "takes").write_text("0.3")
    with fleet.at_work(), fleet.process("worker"):
        fleet.complete(*(fleet.client.enqueue("pay", goal="pay") for _ in range(4)))
    assert len((fleet.place / "paid").read_text().split()) == 1


def test_a_server_that_dies_and_comes_back_loses_no_run(fleet: OnRabbit) -> None:
    with fleet.at_work():
        fleet.complete(fleet.client.enqueue("look", goal="see"))
        fleet.rabbit.kill()
        began = time.monotonic()
        meanwhile = [fleet.client.enqueue("look", goal="see") for _ in range(3)]
        assert time.monotonic() - began < 1.0
        fleet.rabbit.start()
        fleet.complete(*meanwhile, fleet.client.enqueue("look", goal="see"))


@pytest.mark.parametrize("who", ["client", "fleet"])
def test_a_frozen_server_holds_nobody_up(who: str, fleet: OnRabbit) -> None:
    fleet.announced()
    asks: Any = fleet.client
    if who == "fleet":
        asks = Fleet(database_url=fleet.ledger, broker_url=fleet.rabbit.url)
        scope: dict[str, Any] = {}
        source = AGENTS.replace('os.environ["LEDGER"]', "'sqlite://'")
        exec(source.replace('os.environ["PLACE"]', repr(str(fleet.place))), scope)
        asks.workflow(scope["fleet"].workflows["look@1"])
    asks.enqueue("look", goal="see")  # it has a connection by now
    fleet.rabbit.freeze()
    try:
        began = time.monotonic()
        runs = [asks.enqueue("look", goal="see") for _ in range(3)]
        assert time.monotonic() - began < 1.5
    finally:
        fleet.rabbit.thaw()
    with fleet.at_work():
        fleet.complete(*runs)


def test_junk_and_forgeries_end_no_worker(fleet: OnRabbit) -> None:
    with fleet.at_work():
        fleet.complete(fleet.client.enqueue("look", goal="see"))
        with Connection(fleet.rabbit.url) as connection:
            channel: Any = connection.default_channel
            task = {"application_headers": {"task": STEP_TASK, "id": "1"}}
            other = {"application_headers": {"task": "os.system", "id": "2"}}
            for body, options in (
                (b'[[{"run_id": "x"}], {}, {}]', task),
                (b"[[], {}, {}]", other),
                (b'{"__type__": "uuid", "__value__": "x"}', task),
                (b"[", {}),
                (b"\xff\x00", task),
                (b"null", {}),
            ):
                given = {"content_type": "application/json", "content_encoding": "utf-8"}
                channel.basic_publish(
                    amqp.Message(body, **given, **options), exchange="", routing_key=STEPS_QUEUE
                )
        fleet.complete(fleet.client.enqueue("look", goal="see"))


def test_a_queue_that_is_there_as_a_classic_one_is_named(fleet: OnRabbit) -> None:
    """It would otherwise be a loop of reconnections without a word."""
    with Connection(fleet.rabbit.url) as connection:
        PlainQueue(STEPS_QUEUE, durable=True)(connection.default_channel).declare()
    with fleet.process("worker") as worker:
        assert worker.wait(SECONDS) != 0
    told = (fleet.place / "worker0.log").read_text()
    assert "queue-is-another" in told
    assert STEPS_QUEUE in told
    assert "delete" in told
