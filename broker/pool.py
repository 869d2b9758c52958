"""The pool that keeps many steps in flight in one process, for the price of a coroutine each.

A `LoopTask` runs on the process's shared event loop; every other task of the host runs in a small
pool of threads, through Celery's usual machinery. A worker never holds more than it can run: Celery
asks `num_processes` before each pop, and pops nothing while that is zero. On a transport that
pushes (RabbitMQ), what has no place yet stays unacknowledged, bounded by the prefetch count.

A LoopTask's message skips Celery's Request and trace: no result, no retry, no time limit, no
events, no embedded chain. Whatever `run_async` raises is logged with its code and ends there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from celery import Celery, Task
from celery.concurrency.base import BasePool, apply_target
from celery.worker.strategy import default as celery_strategy

from handrail.broker.loop import shared_loop
from handrail.broker.message import MAX_MESSAGE_BYTES, BadMessage
from handrail.broker.refusals import REFUSALS
from handrail.errors import HandrailError

logger = logging.getLogger("handrail.broker")

Payload = Mapping[str, object]

DEFAULT_IN_FLIGHT: Final = 256
DEFAULT_HOST_THREADS: Final = 16
DEFAULT_DRAIN_SECONDS: Final = 20.0
# Taken off the queue and not yet begun. While the loop is busy a message is better left for another
# worker, and safer; but what a turn of the loop finds waiting is claimed in one trip to the ledger.
AHEAD: Final = 8
CANCEL_SECONDS: Final = 2.0  # for the `finally` blocks of what a drain had to cut off


class LoopTask(Task):  # type: ignore[type-arg]  # generic in its stubs alone
    """A task whose body is a coroutine. On `LoopPool` it costs no thread while it waits.

    On Celery's own pools (threads, solo, prefork) it works too: `run` waits for the coroutine, so
    there a waiting task occupies one place of the pool.
    """

    Strategy = "handrail.broker.pool:strategy"
    ignore_result = True
    store_errors_even_if_ignored = False
    acks_late = False
    max_retries = 0
    serializer = "json"

    async def run_async(self, payload: Payload) -> None:
        """Do the work. `payload` is the one JSON object of the message, and untrusted."""
        raise NotImplementedError

    def run(self, payload: Payload) -> None:
        shared_loop().submit(_contained(self, payload)).result()


def strategy(task: LoopTask, app: Celery, consumer: Any, **options: Any) -> Callable[..., None]:
    """Celery's hook between a received message and the pool, for LoopTasks on every pool."""
    pool = consumer.pool
    usual = None
    if isinstance(pool, LoopPool):
        pool.attach(consumer)
    else:
        usual = celery_strategy(task, app, consumer, **options)

    def receive(message: Any, body: object, ack: Any, reject: Any, callbacks: Any) -> None:
        try:
            payload = payload_of(message, body)
        except BadMessage as error:
            message.ack_log_error(logger, consumer.connection_errors)
            REFUSALS.note(error.code, task.name, error.problem)
            return
        if usual is None:
            pool.offer(task, payload, message)
        else:
            usual(message, body, ack, reject, callbacks)

    return receive


def payload_of(message: Any, body: object) -> Payload:
    """Return the one JSON object of a plain protocol-2 message; `BadMessage` for anything else.

    Whoever can write to the broker can embed more tasks, a delay or an expiry in a message: what
    carries any of them is not ours.
    """
    if body is not None:
        raise BadMessage("protocol 1")
    if message.content_type != "application/json":
        raise BadMessage("its content is not JSON")
    if message.headers.get("eta") or message.headers.get("expires"):
        raise BadMessage("it carries an eta or an expiry")
    if len(message.body) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"longer than {MAX_MESSAGE_BYTES} bytes")
    try:
        args, kwargs, embedded = json.loads(message.body)  # plain: no typed envelopes
    except (ValueError, TypeError, RecursionError) as error:
        raise BadMessage(f"its body cannot be read ({type(error).__name__})") from None
    if not isinstance(embedded, dict) or any(embedded.values()):
        raise BadMessage("it embeds further tasks")
    if kwargs or not isinstance(args, list) or len(args) != 1 or not isinstance(args[0], dict):
        raise BadMessage("its arguments are not one object")
    return args[0]


class LoopPool(BasePool):
    """A Celery worker pool: `limit` tasks in flight, coroutines and host threads together."""

    body_can_be_buffer = True
    signal_safe = False  # stopping waits, which a signal handler must not

    def __init__(self, limit: int | None = None, **options: Any) -> None:
        super().__init__(limit or DEFAULT_IN_FLIGHT, **options)
        conf = self.app.conf
        self._host_threads: int = conf.get("handrail_host_threads", DEFAULT_HOST_THREADS)
        self._drain_s: float = conf.get("handrail_drain_timeout_s", DEFAULT_DRAIN_SECONDS)
        # Each count has one writer, so none needs a lock: the consumer's thread takes, the loop's
        # thread begins and ends. Only host tasks end on many threads.
        self._taken = self._begun = self._ended = self._peak = 0
        self._host_busy = 0
        self._host_lock = threading.Lock()
        self._pending: deque[tuple[LoopTask, Payload, Any]] = deque()
        self._jobs: set[asyncio.Task[None]] = set()
        self._refused = False  # the consumer was told there is no room: wake it when there is
        self._consumer: Any = None

    # --- what the consumer's thread does -------------------------------------------------------

    def on_start(self) -> None:
        self._loop = shared_loop().loop
        self._executor = ThreadPoolExecutor(self._host_threads, "handrail-host")

    def attach(self, consumer: Any) -> None:
        """Learn whose thread to wake when there is room again."""
        self._consumer = consumer

    @property
    def num_processes(self) -> int:
        """How many more messages may be held, beside host tasks; Celery pops none at zero."""
        return self._room()

    def offer(self, task: LoopTask, payload: Payload, message: Any) -> None:
        """Start a task now, or keep its message unacknowledged until there is room; those that have
        waited begin first.
        """
        self._pending.append((task, payload, message))
        self._admit()

    def flush(self) -> None:
        """The broker's connection is lost: what was not acknowledged will be delivered again."""
        self._pending.clear()

    def on_apply(
        self,
        target: Callable[..., Any],
        args: Any = None,
        kwargs: Any = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        **_: Any,
    ) -> None:
        """Run a task of the host in a thread; it goes through Celery's usual trace."""
        with self._host_lock:
            self._host_busy += 1
        self._executor.submit(self._run_host, target, args, kwargs, callback, accept_callback)

    def on_stop(self) -> None:
        """Celery consumes no more. Let the app put its steps in order, then wait, then cut off."""
        until = time.monotonic() + self._drain_s
        drain: Callable[[float], None] | None = getattr(self.app, "handrail_drain", None)
        if drain is not None:
            try:
                drain(self._drain_s)
            except Exception as error:
                log_crash("handrail_drain", error)
        left_s = max(0.0, until - time.monotonic())
        cut_off = asyncio.run_coroutine_threadsafe(self._finish(left_s), self._loop).result()
        if cut_off:
            logger.warning("stopped with %d steps cut off; their leases run out", cut_off)
        self._executor.shutdown(cancel_futures=True)

    def on_terminate(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Neither a thread nor a coroutine can be killed from outside: nothing happens."""

    def _get_info(self) -> dict[str, Any]:
        return {
            **super()._get_info(),  # type: ignore[misc]  # unknown to celery-types
            "max-concurrency": self.limit,
            "host-threads": self._host_threads,
            "taken": self._taken,
            "in-flight": self._taken - self._ended,
            "in-flight-peak": self._peak,
            "refused": REFUSALS.counts(),
        }

    def _room(self) -> int:
        # The flag is raised before the counts are read, and read by the other threads after they
        # changed them: a wake-up may be one too many, never one too few.
        self._refused = True
        if self._taken - self._begun >= AHEAD or self._host_busy >= self._host_threads:
            return 0
        room: int = self.limit - (self._taken - self._ended)
        self._refused = room <= 0
        return room

    def _begin(self, task: LoopTask, payload: Payload, message: Any) -> None:
        message.ack_log_error(logger, self._consumer.connection_errors)  # early: a hint, no more
        self._taken += 1
        self._loop.call_soon_threadsafe(self._spawn, task, payload)

    def _admit(self) -> None:
        while self._pending and self._room() > 0:
            self._begin(*self._pending.popleft())

    # --- what other threads do -----------------------------------------------------------------

    def _spawn(self, task: LoopTask, payload: Payload) -> None:
        job = self._loop.create_task(self._run(task, payload))
        self._jobs.add(job)  # the loop itself keeps only weak references
        job.add_done_callback(self._jobs.discard)

    async def _run(self, task: LoopTask, payload: Payload) -> None:
        self._begun += 1
        self._peak = max(self._peak, self._begun - self._ended)
        self._wake()
        try:
            await _contained(task, payload)
        finally:
            self._ended += 1
            self._wake()

    def _run_host(self, *args: Any) -> None:
        try:
            apply_target(*args)
        finally:
            with self._host_lock:
                self._host_busy -= 1
            self._wake()

    def _wake(self) -> None:
        """Tell a consumer that found no room that there is some: not for each place that frees."""
        if self._refused and self._taken - self._begun <= AHEAD // 2 and self._consumer:
            self._refused = False
            self._consumer.call_soon(self._admit)  # also makes the consumer look for room again

    async def _finish(self, timeout_s: float) -> int:
        """Wait for what is in flight, cancel the rest, and say how many those were."""
        jobs = set(self._jobs)
        if not jobs:
            return 0
        _, left = await asyncio.wait(jobs, timeout=timeout_s)
        for job in left:
            job.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCEL_SECONDS)
        return len(left)


async def _contained(task: LoopTask, payload: Payload) -> None:
    """Run a task's coroutine; whatever it raises is logged here and goes no further."""
    try:
        await task.run_async(payload)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit too: it would end the loop, and all steps with it
        log_crash(task.name, error)


def log_crash(name: str, error: BaseException) -> None:
    """Log an exception by code, type and place. Its text may hold what no log should."""
    code = error.code if isinstance(error, HandrailError) else "crashed"
    places = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s crashed (%s): %s\n%s", name, code, type(error).__name__, places)
