"""Actors: whoever acts in a schedule, on a strand of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from handrail.agent.protocol import Locked, Ruling
from handrail.reconciler.compensate import Compensator
from handrail.reconciler.sweep import Reconciler
from handrail.tasks.calls import Called, at_any_time, call
from tests.simulator.loop import WorkerLoop
from tests.simulator.points import Point
from tests.simulator.strands import Died, Strand
from tests.simulator.timeline import START_MS

if TYPE_CHECKING:
    from tests.simulator.schedule import Schedule


class Actor:
    """Somebody who acts, on a strand of their own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.strand: Strand | None = None
        self.point: Point | None = None  # what of the ledger it is in
        self.written: list[tuple[Mapping[str, Any], list[dict[str, Any]]]] | None = None
        self.ruled: tuple[Locked, Ruling] | None = None
        self.stalled_until: int | None = None  # stands still at a point
        self.waiting = False  # for its event loop's next timer, or for work
        self.wake_at: int | None = None
        self.doomed = False
        self.process: Actor | None = None  # that it is a part of, and dies with
        self.token_hash = ""  # of the last token that it was given

    def give_up(self) -> None:
        """Die: meet `Died` at the next turn, and at every port from then on."""
        self.doomed = True

    def wait(self, now: int, ms: int | None) -> None:
        """Give the turn back until a timer of the own event loop is due."""
        assert self.strand is not None
        self.waiting, self.wake_at = True, None if ms is None else now + ms
        self.strand.pause()
        self.waiting, self.wake_at = False, None


class Asker(Actor):
    """Somebody who asks tools: the calls run on an event loop of its own, and it waits meanwhile.

    What it has asked and not read any more, its next look reads.
    """

    def __init__(self, name: str, schedule: Schedule) -> None:
        super().__init__(name)
        self._schedule = schedule
        self._ground = schedule.ground

    @cached_property
    def reconciler(self) -> SimReconciler:
        """The product's own, over the ports of this process."""
        schedule, ground = self._schedule, self._ground
        made = ground.fleet.make_reconciler(publish=ground.broker.publish, lock=ground.lock)
        reconciler = SimReconciler(
            ledger=made.ledger,
            workflows=schedule.workflows,
            publish=made.publish,
            lock=made.lock,
            ask=self._ask,
            max_stall_ms=schedule.plan.stall_ms,
            max_attempts=made.max_attempts,
            jitter=schedule.chance.random,
            clock=self._clock,
        )
        reconciler.pauses = lambda seconds: self._run(asyncio.sleep(seconds))
        return reconciler

    def rest(self, ms: int) -> None:
        """Do nothing for a while."""
        self._wait(ms)

    def _clock(self) -> float:
        return (self._ground.now_ms - START_MS) / 1000

    def _ask(
        self,
        function: Any,
        arguments: Any,
        context: Any,
        limit_ms: int,
        in_time: Callable[[], bool] = at_any_time,
    ) -> Future[Called]:
        """Make a call, as the product's own `ask_bounded`; whoever asks waits for it meanwhile."""
        answer: Future[Called] = Future()

        async def ask() -> Called:
            done = await call(
                function,
                arguments,
                context,
                limit_ms=limit_ms,
                wish=asyncio.get_running_loop().create_future(),
                aborted=context.aborted,
                in_time=in_time,
            )
            return replace(done, late=None)  # its loop ends with it

        try:
            answer.set_result(self._run(ask()))
        except Exception as error:
            answer.set_exception(error)
        return answer

    def _run(self, coroutine: Any) -> Any:
        loop = WorkerLoop(self._clock, self._wait)
        tasks: list[Any] = []

        def task(loop: Any, coroutine: Any, **options: Any) -> Any:
            tasks.append(asyncio.Task(coroutine, loop=loop, **options))
            return tasks[-1]

        loop.set_task_factory(task)
        try:
            return loop.run_until_complete(coroutine)
        finally:
            for left in tasks:
                if not left.done():
                    close_task(left)
            loop.close()

    def _wait(self, ms: int | None) -> None:
        self.wait(self._ground.now_ms, ms)
        if self.doomed:
            raise Died


class SimReconciler(Reconciler):
    """The reconciler; what it waits between two tries of an outcome takes no real time."""

    pauses: Callable[[float], None]

    def _compensator(self) -> Compensator:
        return replace(super()._compensator(), pause=self.pauses)


def close_task(task: Any) -> None:
    """End a task whose process is gone: nothing of it goes on."""
    task._log_destroy_pending = False
    try:
        task.get_coro().close()
    except BaseException:  # dead code still runs its `finally`, and reaches nothing
        return
