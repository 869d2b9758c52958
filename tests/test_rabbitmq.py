"""The same fleet on RabbitMQ: quorum queues, and a server that freezes, dies and comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import amqp
import pytest
from kombu import Connection, pools
from kombu import Queue as PlainQueue

from handrail import Client, Fleet
from handrail.broker.app import HOST_QUEUE
from handrail.broker.message import RECONCILE_QUEUE, STEP_TASK, STEPS_QUEUE, StepMessage
from handrail.broker.publish import IN_PASSING_S, Publisher, PublishFailed
from handrail.broker.queues import queue
from handrail.broker.redis_client import TIMEOUT_S
from handrail.ledger import migrate
from tests.rabbit import Rabbit
from tests.test_installed_app import AGENTS

SECONDS = 60.0
BIN = Path(sys.executable).parent
OURS = (STEPS_QUEUE, RECONCILE_QUEUE, HOST_QUEUE)
HINTS = [StepMessage(run_id=f"nobody-{n}", step=0, epoch=0) for n in range(5)]

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
    def worker(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """A worker, from when it is ready."""
        log = self.place / f"worker{len(list(self.place.glob('*.log')))}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(BIN / "handrail"), "worker", *options],
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

    def at_work(self) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """A worker that sees to the sweep as well."""
        return self.worker("--beat")

    def until(self, holds: Callable[[], object]) -> None:
        limit = time.monotonic() + SECONDS
        while not holds():
            logs = "\n".join(log.read_text()[-2000:] for log in self.place.glob("*.log"))
            assert time.monotonic() < limit, logs
            time.sleep(0.03)

    def look(self, times: int = 1) -> list[str]:
        """Enqueue runs that only read."""
        return [self.client.enqueue("look", goal="see") for _ in range(times)]

    def complete(self, *runs: str) -> None:
        self.until(lambda: all(self.client.get(run).ended for run in runs))
        assert {self.client.get(run).status for run in runs} == {"completed"}

    def paid(self) -> int:
        """How often was paid, as whoever was paid knows it."""
        return len((self.place / "paid").read_text().split())

    def announced(self) -> None:
        """Let the catalog know the workflows, without a worker."""
        code = "from agents import fleet; fleet.announce()"
        subprocess.run(
            [sys.executable, "-c", code], cwd=self.place, env=self.environment, check=True
        )

    def declared(self) -> Fleet:
        """The whole fleet in this process."""
        scope: dict[str, Any] = {}
        source = AGENTS.replace('os.environ["LEDGER"]', "'sqlite://'")
        exec(source.replace('os.environ["PLACE"]', repr(str(self.place))), scope)
        made = Fleet(database_url=self.ledger, broker_url=self.rabbit.url)
        made.workflow(scope["fleet"].workflows["look@1"])
        return made


@pytest.fixture
def fleet(tmp_path: Path, rabbit: Rabbit, valkey_url: str) -> Iterator[OnRabbit]:
    pools.reset()  # whose connections know of queues that are there no more
    with Connection(rabbit.url) as connection:
        channel: Any = connection.default_channel
        for name in OURS:
            channel.queue_delete(name)
    made = OnRabbit(tmp_path, rabbit, valkey_url)
    yield made
    made.client.close()


def listed(rabbit: Rabbit, what: str, *columns: str) -> list[dict[str, Any]]:
    """What the server says of its queues, consumers or channels."""
    found: list[dict[str, Any]] = json.loads(
        rabbit.control(f"list_{what}", *columns, "--formatter", "json")
    )
    return found


def waiting(rabbit: Rabbit) -> int:
    """How many step messages lie at the server."""
    with Connection(rabbit.url) as connection:
        declare: Any = queue(STEPS_QUEUE, rabbit.url)(connection.default_channel).queue_declare
        count: int = declare(passive=True)[1]
        return count


def seconds(act: Callable[[], object]) -> float:
    """How long something takes."""
    began = time.monotonic()
    act()
    return time.monotonic() - began


# ---- queues, and who takes from them -------------------------------------------------------------


def test_runs_complete_on_quorum_queues_and_nothing_else_is_left(fleet: OnRabbit) -> None:
    """More runs than a worker may hold at a time, and each consumer is given so many messages."""
    fleet.environment["HANDRAIL_IN_FLIGHT"] = "16"
    with fleet.at_work():
        fleet.complete(fleet.client.enqueue("pay", goal="pay"), *fleet.look(100))
        types = {one["name"]: one["type"] for one in listed(fleet.rabbit, "queues", "name", "type")}
        consumers = listed(fleet.rabbit, "consumers", "queue_name", "prefetch_count")
        channels = listed(fleet.rabbit, "channels", "global_prefetch_count")
    assert {kind.rpartition(".")[2] for kind in types.values()} == {"quorum"}, types
    assert set(types) == set(OURS)
    assert {one["queue_name"]: one["prefetch_count"] for one in consumers} == dict.fromkeys(
        OURS, 16
    )
    assert {one["global_prefetch_count"] for one in channels} == {0}


def test_an_idle_worker_that_is_told_to_stop_is_gone_at_once(fleet: OnRabbit) -> None:
    """The server pushes: nothing comes from it that would wake the worker."""
    with fleet.worker() as worker:
        fleet.complete(*fleet.look())
        worker.terminate()
        assert seconds(lambda: worker.wait(SECONDS)) < 3.5


def test_no_redis_at_all_costs_no_promise(fleet: OnRabbit) -> None:
    """The lock is local to each worker then; the write is fenced by the ledger."""
    del fleet.environment["HANDRAIL_REDIS_URL"]
    (fleet.place / "takes").write_text("0.3")
    with fleet.at_work(), fleet.worker():
        fleet.complete(*(fleet.client.enqueue("pay", goal="pay") for _ in range(4)))
    assert fleet.paid() == 1


def test_junk_and_forgeries_end_no_worker(fleet: OnRabbit) -> None:
    with fleet.at_work():
        fleet.complete(*fleet.look())
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
        fleet.complete(*fleet.look())


def test_a_well_formed_forgery_of_a_real_run_changes_nothing(fleet: OnRabbit) -> None:
    """Whatever epoch, step, deadline and budget it names: before, while and after the run works."""
    (fleet.place / "takes").write_text("1")
    forger = Publisher(fleet.rabbit.url)

    def forge(run_id: str, *epochs: int) -> None:
        lies = partial(StepMessage, step=7, deadline_at=1, remaining_ms=-1, budget={"steps": 999})
        forger.publish([lies(run_id=run_id, epoch=epoch) for epoch in epochs])

    def told(run_id: str) -> tuple[Any, list[str]]:
        ledger = fleet.client.fleet.ledger
        charged = fleet.client.fleet.get(run_id).budget_used
        return charged, [event["type"] for event in ledger.trace(run_id)]

    with fleet.at_work():
        [honest] = fleet.look()
        paying = fleet.client.enqueue("pay", goal="pay")
        fleet.until(fleet.paid)
        forge(paying, *range(12))
        unpublished = Client(database_url=fleet.ledger)
        with closing(unpublished):
            looking = unpublished.enqueue("look", goal="see")
        forge(looking, *range(1, 12))  # of another epoch: nobody claims it
        fleet.complete(*fleet.look(), honest, paying)
        before = told(paying)
        assert fleet.client.get(looking).status == "queued"
        forge(looking, 0)  # of its own: no more than the hint that it was to get anyway
        fleet.complete(looking)
        for run_id in (looking, paying):
            forge(run_id, *range(12))
        fleet.complete(*fleet.look())
        assert told(looking) == told(honest)
        assert told(paying) == before
    assert fleet.paid() == 1


def test_a_queue_that_is_there_as_a_classic_one_is_named(fleet: OnRabbit) -> None:
    """It would otherwise be a loop of reconnections without a word."""
    with Connection(fleet.rabbit.url) as connection:
        PlainQueue(STEPS_QUEUE, durable=True)(connection.default_channel).declare()
    with fleet.worker() as worker:
        assert worker.wait(SECONDS) != 0
    told = (fleet.place / "worker0.log").read_text()
    assert "queue-is-another" in told
    assert STEPS_QUEUE in told
    assert "delete" in told


# ---- a server that dies, stands still, or takes nothing ------------------------------------------


def test_a_server_that_dies_amid_runs_loses_none_and_doubles_no_write(fleet: OnRabbit) -> None:
    (fleet.place / "takes").write_text("2")
    with fleet.at_work(), fleet.worker():
        fleet.complete(*fleet.look(10))
        runs = [fleet.client.enqueue("pay", goal="pay") for _ in range(2)]
        fleet.until(fleet.paid)
        fleet.rabbit.kill()
        for _ in range(3):
            assert seconds(lambda: runs.extend(fleet.look())) < 1.0
        fleet.rabbit.start()
        fleet.complete(*runs, *fleet.look())
    assert fleet.paid() == 1


def test_a_publisher_loses_no_message_to_a_connection_that_is_dead(fleet: OnRabbit) -> None:
    """The server has closed it while nobody had anything to say."""
    publisher = Publisher(fleet.rabbit.url)
    publisher.publish(HINTS)
    fleet.rabbit.control("close_all_connections", "for the test's sake")
    publisher.publish(HINTS)
    fleet.until(lambda: waiting(fleet.rabbit) == 2 * len(HINTS))


def test_a_message_that_no_queue_takes_is_not_told_to_be_sent(fleet: OnRabbit) -> None:
    """An operator has deleted it; the server would confirm the message all the same."""
    publisher = Publisher(fleet.rabbit.url)
    publisher.publish(HINTS)
    with Connection(fleet.rabbit.url) as connection:
        channel: Any = connection.default_channel
        channel.queue_delete(STEPS_QUEUE)
    with pytest.raises(PublishFailed):
        publisher.publish(HINTS)
    publisher.publish(HINTS)
    fleet.until(lambda: waiting(fleet.rabbit) == len(HINTS))


@pytest.mark.parametrize("how", ["it stands still", "it has no memory left"])
def test_what_is_not_confirmed_is_not_told_to_be_sent(how: str, fleet: OnRabbit) -> None:
    """Nor does whoever publishes wait longer than it says."""
    rabbit = fleet.rabbit
    publishers = [(Publisher(rabbit.url, timeout_s=s), 2 * s) for s in (TIMEOUT_S, IN_PASSING_S)]
    publishers[0][0].publish(HINTS)

    def refused(publisher: Publisher) -> None:
        with pytest.raises(PublishFailed):
            publisher.publish(HINTS)

    with ExitStack() as after:
        if how == "it stands still":
            after.callback(rabbit.thaw)
            rabbit.freeze()
        else:
            after.callback(rabbit.control, "set_vm_memory_high_watermark", "0.4")
            rabbit.control("set_vm_memory_high_watermark", "0.00001")
        for publisher, most_s in publishers:
            for _ in range(2):  # on a connection that is there, and on a new one
                assert seconds(partial(refused, publisher)) < most_s + 0.3


def test_a_frozen_server_holds_nobody_up(fleet: OnRabbit) -> None:
    """Neither who has a connection already nor who has to make one, and whatever kind of client."""
    fleet.announced()
    whole = fleet.declared()
    fleet.look()
    fleet.rabbit.freeze()
    runs: list[str] = []
    try:
        with closing(Client(database_url=fleet.ledger, broker_url=fleet.rabbit.url)) as fresh:
            clients: list[Any] = [fleet.client, whole, fresh]
            for asked in clients:
                for _ in range(2):
                    began = time.monotonic()
                    runs.append(asked.enqueue("look", goal="see"))
                    assert time.monotonic() - began < 1.0
    finally:
        fleet.rabbit.thaw()
        whole.close()
    with fleet.at_work():
        fleet.complete(*runs)
