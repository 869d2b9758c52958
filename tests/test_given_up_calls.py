"""A call whose own caller is cut off, as a step is when its worker stops: it ends with it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from handrail.agent.stage import End
from handrail.tasks.calls import Called, call


@pytest.mark.parametrize("blocks", [False, True], ids=["a coroutine", "a function that blocks"])
def test_a_call_is_aborted_when_the_step_that_made_it_is_cut_off(blocks: bool) -> None:
    begun, heard, aborted = threading.Event(), threading.Event(), threading.Event()

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.sleep(30)
        finally:
            heard.set()

    def waits_in_a_thread() -> None:
        begun.set()
        if aborted.wait(30):
            heard.set()

    async def step() -> Any:
        wish = asyncio.get_running_loop().create_future()
        function = waits_in_a_thread if blocks else waits
        return await call(function, limit_ms=30_000, wish=wish, aborted=aborted)

    async def worker() -> None:
        task = asyncio.create_task(step())
        assert await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(heard.wait, 10)

    asyncio.run(worker())


@pytest.mark.parametrize("blocks", [False, True], ids=["a coroutine", "a function that blocks"])
def test_a_function_is_not_called_once_its_time_is_over(blocks: bool) -> None:
    """The loop may have stood still since the call was decided on: a write sent then is late."""
    called: list[str] = []

    async def write() -> None:
        called.append("write")

    def write_in_a_thread() -> None:
        called.append("write")

    async def step() -> Called:
        wish = asyncio.get_running_loop().create_future()
        function = write_in_a_thread if blocks else write
        return await call(function, limit_ms=30_000, wish=wish, in_time=lambda: False)

    done = asyncio.run(step())
    assert (done.begun, done.end, called) == (False, End.TIMED_OUT, [])
