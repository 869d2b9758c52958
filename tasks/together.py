"""Asking together: what the steps of an event loop ask in one turn of it is asked in one trip.

A busy loop turns with several steps at the same place, and several statements in one transaction
cost a database little more than one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Final, Generic, TypeVar
from weakref import WeakKeyDictionary

_A = TypeVar("_A")
_B = TypeVar("_B")

#: More than this in one transaction holds up the first of them for the sake of the last.
MOST: Final = 16


class Together(Generic[_A, _B]):
    """Gathers questions. `answer` is handed those of one turn of a loop, and runs on the loop.

    It returns an answer to each, or the exception that the one who asked is to have instead; what
    it raises itself they all get. An answer that nobody waits for any more was given all the same.
    """

    def __init__(self, answer: Callable[[Sequence[_A]], Sequence[_B | BaseException]]) -> None:
        self._answer = answer
        self._waiting: WeakKeyDictionary[
            asyncio.AbstractEventLoop, list[tuple[_A, asyncio.Future[_B]]]
        ] = WeakKeyDictionary()

    async def ask(self, question: _A, *, alone: bool = False) -> _B:
        """Ask with the others of this turn; returns the answer, or raises what it is instead.

        `alone`: there are no others, so ask at once.
        """
        if alone:
            [only] = self._answer([question])
            if isinstance(only, BaseException):
                raise only
            return only
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_B] = loop.create_future()
        waiting = self._waiting.setdefault(loop, [])
        if not waiting:
            loop.call_soon(self._go, loop, context=Context())  # of no single run
        waiting.append((question, future))
        return await future

    def _go(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting = self._waiting.pop(loop)
        if len(waiting) > MOST:
            self._waiting[loop] = waiting[MOST:]
            loop.call_soon(self._go, loop)
        asked = waiting[:MOST]
        answers: Sequence[_B | BaseException]
        try:
            answers = self._answer([question for question, _ in asked])
        except BaseException as error:  # whatever it is, those who asked are to have it
            answers = [error] * len(asked)
        for (_, future), answer in zip(asked, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
