"""One event loop a process, in a thread of its own, made when it is needed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from handrail.broker.loop import SharedLoop, shared_loop

SECONDS = 20.0


@pytest.fixture
def loop() -> Iterator[SharedLoop]:
    shared = SharedLoop("test-loop")
    yield shared
    assert shared.stop()


async def where_am_i() -> tuple[int, asyncio.AbstractEventLoop]:
    return threading.get_ident(), asyncio.get_running_loop()


def test_nothing_runs_before_it_is_needed() -> None:
    SharedLoop("test-idle-loop")
    assert "test-idle-loop" not in {thread.name for thread in threading.enumerate()}


def test_all_coroutines_of_a_process_share_one_loop(loop: SharedLoop) -> None:
    places = {loop.submit(where_am_i()).result(SECONDS) for _ in range(5)}
    [(thread, running)] = places
    assert thread != threading.get_ident()
    assert running is loop.loop


def test_threads_that_start_the_loop_at_once_get_the_same_one(loop: SharedLoop) -> None:
    together = threading.Barrier(8)
    found: list[asyncio.AbstractEventLoop] = []

    def start() -> None:
        together.wait(SECONDS)
        found.append(loop.loop)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [loop.loop] * 8


def test_many_coroutines_wait_at_the_same_time(loop: SharedLoop) -> None:
    """Each waits for all the others, so the last line is reached only if all are in flight."""

    async def meet(waiting: list[None], all_here: asyncio.Event) -> int:
        waiting.append(None)
        if len(waiting) == 100:
            all_here.set()
        await all_here.wait()
        return len(waiting)

    waiting: list[None] = []
    all_here = asyncio.Event()
    futures = [loop.submit(meet(waiting, all_here)) for _ in range(100)]
    assert [future.result(SECONDS) for future in futures] == [100] * 100


def test_stopping_lets_what_runs_clean_up_and_the_loop_can_start_again(loop: SharedLoop) -> None:
    begun, cleaned = threading.Event(), threading.Event()

    async def wait_for_ever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    future = loop.submit(wait_for_ever())
    assert begun.wait(SECONDS)
    first = loop.loop
    assert loop.stop()
    assert cleaned.is_set()
    assert future.cancelled()
    assert first.is_closed()
    assert loop.submit(where_am_i()).result(SECONDS)[1] is not first


def test_a_forked_child_makes_its_own_loop(loop: SharedLoop) -> None:
    """The parent's loop has no thread in the child: waiting for it there would never end."""
    parents = loop.loop
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _, running = loop.submit(where_am_i()).result(SECONDS)
            os.write(writer, b"own" if running is not parents else b"parent's")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        assert answer.read() == b"own"
    os.waitpid(child, 0)
    assert loop.loop is parents


def test_a_process_has_one_shared_loop() -> None:
    assert shared_loop() is shared_loop()
