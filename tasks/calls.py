"""One call of a model, a tool or a check, under its time limit and the run's wish to cancel.

What cut a call off decides how it ended, not which error happens to arrive first: an adapter that
answers the abort with an error of its own, or returns late, changes nothing. A function that blocks
runs in a daemon thread, since it cannot be killed; what it still says later is evidence.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from handrail import logs, tracing
from handrail.agent.stage import End
from handrail.agent.tools import Principal
from handrail.canonical import Json

log = logging.getLogger("handrail.tasks")

#: Makes what is entered around a function that may block, in its thread.
Around: TypeAlias = Callable[[], AbstractContextManager[object]]
#: What a host has around the calls of the step, or of the query, that is under way: its database
#: connections, its application. What leaving it raises changes nothing about what a call did.
AROUND: Final[ContextVar[Around | None]] = ContextVar("handrail_around", default=None)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a tool's function knows of its call.

    `key` is the idempotency key for the service (None for a read), the same however often the
    intent is sent. `timeout_ms` is what the call has; `not_after` (ms since the epoch) the instant
    after which a service that can should refuse it. `aborted` is set when the program has given the
    call up. `facts` are the outputs of the run's stages. `traceparent` names this call within the
    trace that the run was accepted in, for a header of that name; None where it was in none.
    """

    run_id: str
    tenant: str
    principal: Principal
    tool: str
    timeout_ms: int
    key: str | None = None
    intent_key: str | None = None
    not_after: int | None = None
    attempt: int = 1
    facts: Mapping[str, Json] = field(default_factory=dict)
    aborted: threading.Event = field(default_factory=threading.Event)
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Called:
    """How a call ended. `late` is its still running rest, where it was given up. `begun=False`: its
    function was never called.
    """

    end: End
    value: Any = None
    error: BaseException | None = None
    late: asyncio.Future[Any] | None = None
    begun: bool = True


class _TooLate(Exception):
    """Control flow: the time for a call was over before it began."""


def at_any_time() -> bool:
    """What may begin late: a call that changes nothing outside."""
    return True


class Ask(Protocol):
    """Begins a call of `function(arguments, context)` beside whoever asks, and says how it ended.

    The time limit and `in_time` are those of `call`.
    """

    def __call__(
        self,
        function: Callable[..., Any],
        arguments: Any,
        context: ToolCall,
        limit_ms: int,
        in_time: Callable[[], bool] = at_any_time,
    ) -> Future[Called]:
        """Begin it."""
        ...


def asked(begin: Callable[[], Future[Called]]) -> Future[Called]:
    """Begin a call by an `Ask`; one that could not even be begun has failed."""
    try:
        return begin()
    except Exception as error:
        failed: Future[Called] = Future()
        failed.set_result(Called(End.RAISED, error=error))
        return failed


def answered(asked: Future[Called]) -> Called:
    """How a call that was asked for has ended, even if nobody was left to say it."""
    if asked.cancelled():
        return Called(End.CANCELLED)
    error = asked.exception()
    return asked.result() if error is None else Called(End.RAISED, error=error)


async def call(
    function: Callable[..., Any],
    *args: Any,
    limit_ms: int,
    wish: asyncio.Future[None],
    aborted: threading.Event | None = None,
    in_time: Callable[[], bool] = at_any_time,
) -> Called:
    """Make one call and say how it ended. `wish` is done when the run is wished to be cancelled.

    `in_time` is asked right before the function is called: until then the event loop, or the whole
    process, may stand still for any time.
    """
    if limit_ms <= 0:
        return Called(End.TIMED_OUT)
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def end(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    work = _begin(function, args, end, in_time)
    work.add_done_callback(end)
    limit = loop.call_later(limit_ms / 1000, end)
    if not wish.done():
        # A wish that was there before does not cut the call off: what must not start is not called
        # at all.
        wish.add_done_callback(end)
    try:
        await over
    except asyncio.CancelledError:
        _give_up(work, aborted)  # who made the call is cut off itself: nobody waits for it any more
        raise
    finally:
        limit.cancel()
        wish.remove_done_callback(end)
        work.remove_done_callback(end)
    if work.done():
        error = work.exception() if not work.cancelled() else _harmless(asyncio.CancelledError())
        if isinstance(error, _TooLate):
            return Called(End.TIMED_OUT, begun=False)
        if error is not None:
            return Called(End.RAISED, error=error)
        return Called(End.RETURNED, work.result())
    _give_up(work, aborted)
    return Called(End.CANCELLED if wish.done() else End.TIMED_OUT, late=work)


def _begin(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    end: Callable[[], None],
    in_time: Callable[[], bool],
) -> asyncio.Future[Any]:
    with ExitStack() as known:
        for told in args:
            if isinstance(told, ToolCall):
                known.enter_context(_about(told))
        return _started(function, args, end, in_time)


@contextmanager
def _about(told: ToolCall) -> Iterator[None]:
    """Let what is started in here be known by its call, in the logs and in a trace."""
    ids = tracing.ids_of(told.traceparent) if told.traceparent else {}
    with (
        logs.about(run_id=told.run_id, tool=told.tool, effect_id=told.key, **ids),
        tracing.inside(told.traceparent),
    ):
        yield


def _started(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    end: Callable[[], None],
    in_time: Callable[[], bool],
) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # an object whose call is a coroutine
    ):
        return loop.create_task(_awaited(function, args, end, in_time))
    return in_thread(_not_awaitable, function, args, in_time)


def in_thread(function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """Call a function that may block, in a daemon thread of its own; for use on an event loop."""
    loop = asyncio.get_running_loop()
    around = AROUND.get()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = function(*args) if around is None else _surrounded(around, function, *args)
        except BaseException as raised:
            error = _harmless(raised)
        with suppress(RuntimeError):  # the loop was closed meanwhile: nobody wants to know
            loop.call_soon_threadsafe(settle, value, error)

    within = copy_context()  # a new thread begins with none: its lines must name their run too
    threading.Thread(target=within.run, args=(work,), daemon=True, name="handrail-call").start()
    return done


def _surrounded(around: Around, function: Callable[..., Any], *args: Any) -> Any:
    surroundings = around()
    surroundings.__enter__()
    try:
        return function(*args)
    finally:
        try:
            surroundings.__exit__(*sys.exc_info())
        except Exception as error:
            log.error("what is around a call could not be left (%s)", type(error).__name__)


def _not_awaitable(
    function: Callable[..., Any], args: tuple[Any, ...], in_time: Callable[[], bool]
) -> Any:
    if not in_time():
        raise _TooLate
    value = function(*args)
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError("a plain function returned an awaitable: declare it with async def")
    return value


async def _awaited(
    function: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    end: Callable[[], None],
    in_time: Callable[[], bool],
) -> Any:
    # Called in here: what it raises before it is awaited is the call's error, not the step's.
    try:
        if not in_time():
            raise _TooLate
        return await function(*args)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        raise _harmless(error) from None
    finally:
        end()  # at once, and not when the loop comes round to it


def _harmless(error: BaseException) -> Exception:
    """What a call raised, as an error that ends nothing but the call: neither its thread's loop nor
    the process.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"a call raised {type(error).__name__}")


def _give_up(work: asyncio.Future[Any], aborted: threading.Event | None) -> None:
    if aborted is not None:
        aborted.set()
    if isinstance(work, asyncio.Task):
        work.cancel()
    work.add_done_callback(_swallow)


def _swallow(work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()  # given up: its error must not go unhandled


__all__ = [
    "AROUND",
    "Around",
    "Ask",
    "Called",
    "ToolCall",
    "answered",
    "asked",
    "at_any_time",
    "call",
    "in_thread",
]
