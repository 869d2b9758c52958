"""The pool keeps many steps in flight, takes no more than it can run, and survives each of them.

Here the pool stands alone, without a broker: messages are doubles, and the consumer is a list of
what it was asked to do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
from celery import Celery

from handrail.broker import pool as pool_module
from handrail.broker.app import make_app
from handrail.broker.loop import shared_loop
from handrail.broker.message import BadMessage
from handrail.broker.pool import LoopPool, LoopTask, Payload, payload_of
from handrail.broker.refusals import REFUSALS
from handrail.errors import HandrailError

SECONDS = 20.0


class Message:
    """What the pool sees of a kombu message."""

    def __init__(self, body: object = None, **changes: Any) -> None:
        plain = [[{"n": 1}], {}, {"callbacks": None, "chain": None}]
        self.body = body if isinstance(body, bytes) else json.dumps(body or plain).encode()
        self.content_type = changes.get("content_type", "application/json")
        self.headers = changes.get("headers", {"task": "test.task", "id": "1"})
        self.acknowledged = False

    def ack_log_error(self, *_: object) -> None:
        self.acknowledged = True


class Consumer:
    """Stands for Celery's consumer: remembers what the pool wants done on its thread."""

    connection_errors = (OSError,)

    def __init__(self, pool: LoopPool) -> None:
        self.pool = pool
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def call_soon(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Do as told until the condition holds; fails when nothing is left that could bring it."""
        while not done():
            self._calls.get(timeout=SECONDS)()


class Work(LoopTask):
    name = "test.task"

    def __init__(self, work: Callable[[Payload], Awaitable[None]]) -> None:
        self._work = work

    async def run_async(self, payload: Payload) -> None:
        await self._work(payload)


@contextmanager
def started(limit: int, **settings: Any) -> Iterator[tuple[LoopPool, Consumer]]:
    app = make_app(broker_url="memory://", in_flight=limit, **settings)
    pool = LoopPool(limit, app=app)
    consumer = Consumer(pool)
    pool.attach(consumer)
    pool.start()
    try:
        yield pool, consumer
    finally:
        pool.stop()


class Gate:
    """A task that says when it has begun, and ends when it is told to."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[Payload] = SimpleQueue()
        self._ends: list[asyncio.Event] = []

    async def __call__(self, payload: Payload) -> None:
        end = asyncio.Event()
        self._ends.append(end)
        self.begun.put(payload)
        await end.wait()

    def open_one(self) -> None:
        shared_loop().loop.call_soon_threadsafe(self._ends.pop(0).set)

    def open_all(self) -> None:
        while self._ends:
            self.open_one()


def test_a_hundred_tasks_wait_in_one_process_at_once() -> None:
    """None ends before all have begun, so they do overlap, whatever the machine's speed."""
    gate = Gate()
    with started(limit=100) as (pool, _):
        for number in range(100):
            while not pool.num_processes:  # as Celery does: it pops nothing before there is room
                gate.begun.get(timeout=SECONDS)
            pool.offer(Work(gate), {"n": number}, Message())
        while pool.info["in-flight-peak"] < 100:
            gate.begun.get(timeout=SECONDS)
        gate.open_all()
    assert pool.info["in-flight"] == 0
    assert pool.info["taken"] == 100


def test_a_full_pool_lets_celery_pop_nothing_and_asks_for_more_when_a_task_ends() -> None:
    gate = Gate()
    with started(limit=2) as (pool, consumer):
        for _ in range(2):
            pool.offer(Work(gate), {}, Message())
            gate.begun.get(timeout=SECONDS)
        assert pool.num_processes == 0
        gate.open_one()
        consumer.run_until(lambda: pool.num_processes == 1)
        gate.open_all()


def test_what_a_pushing_broker_sends_too_much_waits_unacknowledged() -> None:
    """RabbitMQ pushes: a message without a place stays the broker's until there is one."""
    gate, first, second = Gate(), Message(), Message()
    with started(limit=1) as (pool, consumer):
        pool.offer(Work(gate), {"n": 1}, first)
        pool.offer(Work(gate), {"n": 2}, second)
        assert gate.begun.get(timeout=SECONDS) == {"n": 1}
        assert (first.acknowledged, second.acknowledged) == (True, False)
        gate.open_one()
        consumer.run_until(lambda: second.acknowledged)
        assert gate.begun.get(timeout=SECONDS) == {"n": 2}
        gate.open_all()


def test_what_waits_for_room_is_not_forgotten_when_more_comes_while_there_is_some() -> None:
    """One has begun, which is too few to wake the consumer: what comes now goes behind the others,
    and all of them begin in time.
    """
    go_on, begun, order = threading.Semaphore(0), SimpleQueue[None](), list[object]()

    async def compute(payload: Payload) -> None:
        order.append(payload["n"])
        begun.put(None)
        go_on.acquire(timeout=SECONDS)

    with started(limit=100) as (pool, consumer):
        work, numbers = Work(compute), iter(range(100))

        def offer() -> Message:
            message = Message()
            pool.offer(work, {"n": next(numbers)}, message)
            return message

        offer()
        begun.get(timeout=SECONDS)
        ahead = [offer() for _ in range(pool_module.AHEAD)]
        waiting = [offer() for _ in range(3)]
        assert all(message.acknowledged for message in ahead)
        assert not any(message.acknowledged for message in waiting)
        go_on.release()
        begun.get(timeout=SECONDS)
        late = offer()
        assert (waiting[0].acknowledged, late.acknowledged) == (True, False)
        go_on.release(100)
        consumer.run_until(lambda: late.acknowledged)
    assert order == [*range(13)]


def test_a_lost_connection_forgets_what_was_not_acknowledged() -> None:
    """The broker delivers it again, to anybody: starting it here as well would be a duplicate."""
    gate, waiting = Gate(), Message()
    with started(limit=1) as (pool, consumer):
        pool.offer(Work(gate), {"n": 1}, Message())
        pool.offer(Work(gate), {"n": 2}, waiting)
        gate.begun.get(timeout=SECONDS)
        pool.flush()
        gate.open_one()
        consumer.run_until(lambda: pool.num_processes == 1)
        assert pool.info["taken"] == 1
        assert not waiting.acknowledged


def test_few_messages_are_taken_ahead_of_a_busy_loop() -> None:
    """A loop that computes begins nothing: what it has not begun is better left to others."""
    resume, busy = threading.Event(), threading.Event()

    async def compute(payload: Payload) -> None:
        busy.set()
        resume.wait(SECONDS)

    with started(limit=50) as (pool, consumer):
        pool.offer(Work(compute), {}, Message())
        assert busy.wait(SECONDS)
        taken = 0
        while pool.num_processes and taken < 50:
            pool.offer(Work(compute), {}, Message())
            taken += 1
        assert taken == pool_module.AHEAD
        resume.set()
        consumer.run_until(lambda: pool.num_processes > 0)


class Refused(HandrailError):
    code = "test-refused"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Refused("secret"), "test-refused"),
        (ValueError("secret"), "crashed"),
        (SystemExit("secret"), "crashed"),
        (KeyboardInterrupt("secret"), "crashed"),
    ],
)
def test_what_a_task_raises_is_logged_by_code_and_harms_nobody_else(
    error: BaseException, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    after: Future[None] = Future()

    async def crash(payload: Payload) -> None:
        raise error

    async def go_on(payload: Payload) -> None:
        after.set_result(None)

    with caplog.at_level(logging.ERROR, "handrail.broker"), started(limit=2) as (pool, _):
        pool.offer(Work(crash), {}, Message())
        pool.offer(Work(go_on), {}, Message())
        after.result(SECONDS)
    assert f"test.task crashed ({code}): {type(error).__name__}" in caplog.text
    assert "in crash" in caplog.text, "the place is what one needs to find it"
    assert "secret" not in caplog.text, "an exception's text stays out"


def test_stopping_lets_the_app_drain_first_and_waits_for_what_is_in_flight() -> None:
    gate = Gate()
    with started(limit=2, drain_timeout_s=SECONDS) as (pool, _):
        pool.offer(Work(gate), {}, Message())
        gate.begun.get(timeout=SECONDS)
        asked: list[float] = []

        def drain(timeout_s: float) -> None:
            asked.append(timeout_s)
            gate.open_all()

        pool.app.handrail_drain = drain
    assert asked == [SECONDS]
    assert pool.info["in-flight"] == 0


def test_stopping_cuts_off_what_does_not_end_in_time(caplog: pytest.LogCaptureFixture) -> None:
    cleaned = threading.Event()
    begun = threading.Event()

    async def never(payload: Payload) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    def broken_drain(timeout_s: float) -> None:
        raise Refused

    with started(limit=2, drain_timeout_s=0.0) as (pool, _):
        pool.app.handrail_drain = broken_drain
        pool.offer(Work(never), {}, Message())
        assert begun.wait(SECONDS)
    assert cleaned.is_set()
    assert "1 steps cut off" in caplog.text
    assert "handrail_drain crashed (test-refused)" in caplog.text


def test_busy_host_threads_take_no_further_message() -> None:
    release, results = threading.Event(), SimpleQueue[object]()
    with started(limit=10, host_threads=1) as (pool, consumer):
        pool.apply_async(release.wait, (SECONDS,), callback=results.put)
        assert pool.num_processes == 0
        release.set()
        consumer.run_until(lambda: pool.num_processes == 10)
        assert results.get(timeout=SECONDS) is True


def embed(**embedded: object) -> list[object]:
    return [[{"n": 1}], {}, embedded]


HOSTILE = {
    "an embedded chain": Message(embed(chain=[{"task": "celery.map"}])),
    "an embedded callback": Message(embed(callbacks=[{"task": "other"}])),
    "an embedded error callback": Message(embed(errbacks=[{"task": "other"}])),
    "an embedded chord": Message(embed(chord={"task": "other"})),
    "something embedded that nobody knows": Message(embed(surprise="x")),
    "a list as what is embedded": Message([[{"n": 1}], {}, [1]]),
    "pickle": Message(b"\x80\x04.", content_type="application/x-python-serialize"),
    "YAML": Message(b"!!python/object", content_type="application/x-yaml"),
    "no content type": Message(content_type=None),
    "an eta": Message(headers={"eta": "2030-01-01T00:00:00"}),
    "an expiry": Message(headers={"expires": "2020-01-01T00:00:00"}),
    "keyword arguments": Message([[{"n": 1}], {"n": 2}, {}]),
    "two arguments": Message([[{"n": 1}, {"n": 2}], {}, {}]),
    "no argument": Message([[], {}, {}]),
    "an argument that is no object": Message([["run"], {}, {}]),
    "arguments that are no list": Message([{"n": 1}, {}, {}]),
    "two parts": Message([[{"n": 1}], {}]),
    "a number": Message(b"7"),
    "nothing": Message(b""),
    "not UTF-8": Message(b"\xff\xff\xff\xff"),
    "deep nesting": Message(b"[" * 10_000),
    "a huge integer": Message(b"[[{}], {}, " + b"9" * 5000 + b"]"),
    "a long body": Message(b" " * 20_000 + b"[[{}],{},{}]"),
}


@pytest.mark.accept("FLT-21")
@pytest.mark.parametrize("message", HOSTILE.values(), ids=HOSTILE)
def test_a_message_that_is_more_or_less_than_one_object_is_refused(message: Message) -> None:
    with pytest.raises(BadMessage):
        payload_of(message, None)


def test_protocol_1_is_refused() -> None:
    with pytest.raises(BadMessage):
        payload_of(Message(), {"task": "test.task", "args": [{}]})


def test_a_typed_envelope_stays_the_plain_object_that_it_is() -> None:
    """kombu would make a Decimal of it: then the step's own strict reading could be bypassed."""
    envelope = {"__type__": "decimal", "__value__": "1"}
    assert payload_of(Message([[{"n": envelope}], {}, {}]), None) == {"n": envelope}


def test_a_refused_message_is_acknowledged_counted_and_logged_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with started(limit=1) as (pool, consumer):
        receive = pool_module.strategy(Work(Gate()), pool.app, consumer)
        before = REFUSALS.counts().get("bad-message", 0)
        message = Message(b'["secret"]')
        receive(message, None, None, None, ())
        assert message.acknowledged
        assert REFUSALS.counts()["bad-message"] == before + 1
        assert pool.info["taken"] == 0
    assert "(bad-message)" in caplog.text
    assert "secret" not in caplog.text


def test_a_loop_task_can_also_be_called_in_place(app: Celery) -> None:
    """On Celery's own pools it is: the caller waits for the coroutine."""
    done: list[Payload] = []

    async def work(payload: Payload) -> None:
        await asyncio.sleep(0)
        done.append(payload)

    task = app.register_task(Work(work))
    task({"n": 1})
    assert done == [{"n": 1}]


@pytest.fixture
def app() -> Celery:
    return make_app(broker_url="memory://")
