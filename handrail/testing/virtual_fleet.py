"""A fleet in one thread whose time is virtual: runs that wait for minutes take no time to test.

The ledger's clock, the leases, the time limits and the calls of asynchronous tools and models share
one clock, which moves by what is waited for and by `advance`. Everything else is real: the ledger
(SQLite, in memory), the step shell, the reconciler. Tools, checks and models must be asynchronous.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from types import TracebackType
from typing import Any, Final

from handrail.broker.message import StepMessage
from handrail.fleet import Fleet
from handrail.ledger.lock import IntentLock, LocalLock
from handrail.reconciler.sweep import Reconciler, ask_directly
from handrail.runs import Run
from handrail.tasks.runtime import Runtime
from handrail.tasks.step import run_step
from handrail.testing.virtual_time import VirtualLoop, close

START_AT: Final = 1_700_000_000_000  # no ledger's clock says zero


class NothingDue(RuntimeError):
    """A run neither rests nor has a step that is due."""


class VirtualFleet:
    """The fleet; see the module. Declare tools, models and workflows on `fleet`, then `run`."""

    def __init__(self, *, lock: IntentLock | None = None) -> None:
        self.loop = VirtualLoop()
        self.fleet = Fleet(database_url="sqlite://", clock=self.now)
        self.fleet.beside = None  # one thread
        self.lock = LocalLock() if lock is None else lock
        self.due: list[StepMessage] = []
        self.unhandled: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.unhandled.append(context))

    def now(self) -> int:
        """The time of the ledger, in milliseconds since the epoch."""
        return START_AT + self.loop.now_ms

    def advance(self, by_ms: int) -> None:
        """Let time pass in which nobody does anything."""
        self.loop.advance(by_ms)

    @cached_property
    def runtime(self) -> Runtime:
        """What the steps work with."""
        runtime = self.fleet.make_runtime(publish=self.due.extend, lock=self.lock)
        runtime.renews = runtime.threads = False
        runtime.clock = self.loop.time
        return runtime

    @cached_property
    def reconciler(self) -> Reconciler:
        """Who looks at what is overdue; its back-off is without chance."""
        reconciler = self.fleet.make_reconciler(publish=self.due.extend, lock=self.lock)
        reconciler.ask, reconciler.jitter = ask_directly, lambda: 0.5
        return reconciler

    def run(self, workflow: str, **options: Any) -> Run:
        """Enqueue a run and drive it to its first stop or rest; options are those of `enqueue`."""
        return self.drive(self.fleet.enqueue(workflow, **options))

    def drive(self, run_id: str) -> Run:
        """Run the steps of a run until it stops or rests. Raises `NothingDue`."""
        while True:
            run = self.fleet.get(run_id)
            if run.reason is not None or run.rests:
                return run
            self.step(run_id)

    def step(self, run_id: str) -> None:
        """Run the next step of a run, at the time at which it is due. Raises `NothingDue`."""
        row = self.fleet.ledger.read(run_id)
        if row["due_at"] is None:
            raise NothingDue(f"run {run_id} is {row['status']}")
        self.advance(max(0, row["due_at"] - self.now()))
        self.handle(StepMessage(run_id=run_id, step=row["step"], epoch=row["epoch"]))

    def handle(self, message: StepMessage) -> None:
        """Handle one message, as a worker does."""
        self.loop.run_until_complete(self._handle(message))

    async def _handle(self, message: StepMessage) -> None:
        await run_step(self.runtime, message)
        await asyncio.sleep(0)  # a call that was told to stop hears of it

    def cancel(self, run_id: str) -> Run:
        """Wish a run to be cancelled; a step at work learns of it as it renews its lease."""
        run = self.fleet.cancel(run_id)
        self.runtime.renew()
        return run

    def close(self) -> None:
        """End what is left."""
        close(self.loop)
        self.fleet.close()

    def __enter__(self) -> VirtualFleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
