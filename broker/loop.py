"""One asyncio event loop a process, for everything that waits: models, async tools, steps.

It runs in a daemon thread of its own, so that what is in flight goes on while the thread that
consumes from the broker reconnects, blocks or shuts down. It starts when it is first needed: a
forked child makes its own, and a process that never waits has no thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

T = TypeVar("T")
logger = logging.getLogger("handrail.broker")


class SharedLoop:
    """An event loop in a daemon thread. Every method may be called from any thread."""

    def __init__(self, name: str = "handrail-loop") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=partial(_forget, weakref.ref(self)))

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop of this process; started on first use, and again after `stop`."""
        loop = self._loop
        if loop is not None:
            return loop
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_drive, args=(loop,), name=self._name, daemon=True
                )
                self._thread.start()
                self._loop = loop
            return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; the future holds its result, and cancels it.

        Waiting for the future on the loop's own thread would wait forever.
        """
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Cancel what runs, let it clean up, and end the thread. False: it took longer."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return True
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout_s)
        return not thread.is_alive()

    def forget(self) -> None:
        """In a forked child: the thread stayed behind, and the lock may have been held."""
        self._lock = threading.Lock()
        self._loop = self._thread = None


def _forget(shared: weakref.ref[SharedLoop]) -> None:
    if (loop := shared()) is not None:
        loop.forget()


def _drive(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        _run_until_stopped(loop)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is told to stop; who raises `SystemExit` on it ends only its own
    task.
    """
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:  # never a signal's: those go to the main
            logger.error("code on the event loop raised %s; the loop goes on", type(error).__name__)
        else:
            return


_SHARED: Final = SharedLoop()


def shared_loop() -> SharedLoop:
    """The event loop of this process."""
    return _SHARED
