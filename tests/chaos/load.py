"""The load: runs enqueued steadily, some cancelled, some waiting for a person; and who watches.

Whatever fails because a server is away is tried again, under the same run id. What the client was
told is kept, and so are the leases that ran out, which the ledger itself forgets.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from handrail.agent.approvals import ApprovalRefused
from handrail.errors import TryLater
from handrail.ledger.database import Database
from handrail.ledger.errors import DatabaseUnavailable
from handrail.ledger.session import ConnectionLost
from handrail.testing.people import APPROVER
from tests.chaos.app import DEADLINE_MS
from tests.chaos.kinds import KINDS, READ
from tests.chaos.stack import Stack

AWAY: Final = (DatabaseUnavailable, ConnectionLost, TryLater)
PAUSE_S: Final = 0.3
LOOK_EVERY_S: Final = 0.5
MOST_UNDER_WAY: Final = 150  # more than this, and the load waits for the fleet
CANCELLED_SHARE: Final = 0.12
CONFIRMED_SHARE: Final = 0.10
SHARED_SHARE: Final = 0.10  # of the writes whose intent another run has, too
CANCEL_AFTER_S: Final = 1.5  # on average: most runs are over soon


@dataclass(slots=True)
class Load:
    """Client threads that keep a fleet busy. `accepted` are the runs that it has promised."""

    stack: Stack
    seed: int
    per_s: float
    accepted: set[str] = field(default_factory=set)
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)  # what each run was to do
    counts: Counter[str] = field(default_factory=Counter)
    ran_out: set[tuple[str, int]] = field(default_factory=set)  # run, when its lease ran out
    under_way: int = 0
    _cancels: queue.PriorityQueue[tuple[float, str]] = field(default_factory=queue.PriorityQueue)
    _enough: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _failures: list[BaseException] = field(default_factory=list)
    _shared: dict[str, list[str]] = field(default_factory=dict)  # by kind of tool
    _threads: list[threading.Thread] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Load the fleet until the block ends; those who watch and approve go on until `close`."""
        enqueuing = [self._thread(self._enqueue, n) for n in (0, 1)]
        for act in (self._cancel, self._approve, self._watch):
            self._thread(act)
        try:
            yield
        finally:
            self._enough.set()
        for thread in enqueuing:  # what it has begun to enqueue it enqueues
            thread.join()

    def close(self) -> None:
        """End everything."""
        self._enough.set()
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _thread(self, act: Callable[..., None], *args: Any) -> threading.Thread:
        def work() -> None:
            try:
                act(*args)
            except BaseException as error:
                self._failures.append(error)

        thread = threading.Thread(target=work, name=f"chaos{act.__name__}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    # ---- the client ------------------------------------------------------------------------------

    def _enqueue(self, number: int) -> None:
        draw = random.Random(f"{self.seed}/{number}")
        made = 0
        due = time.monotonic()
        while not self._enough.is_set():
            made += 1
            run_id = f"run-{number}-{made}"
            options = self._drawn(draw, run_id)
            self.asked[run_id] = options
            if not self._insist(self._accept, run_id, options):
                return
            if draw.random() < CANCELLED_SHARE:
                at = time.monotonic() + draw.expovariate(1 / CANCEL_AFTER_S)
                self._cancels.put((at, run_id))
            due = max(due, time.monotonic() - 1) + 2 / self.per_s
            while time.monotonic() < due or self.under_way > MOST_UNDER_WAY:
                if self._enough.wait(0.05):
                    return

    def _accept(self, run_id: str, options: dict[str, Any]) -> None:
        self.stack.fleet.enqueue(goal=run_id, run_id=run_id, **options)
        self.accepted.add(run_id)

    def _insist(self, act: Callable[..., object], *args: Any) -> bool:
        """Try until it is done, or everything is over."""
        while not self._over.is_set():
            try:
                act(*args)
                return True
            except AWAY:
                self.counts["tried again"] += 1
                self._over.wait(PAUSE_S)
        return False

    def _drawn(self, draw: random.Random, run_id: str) -> dict[str, Any]:
        confirmed = draw.random() < CONFIRMED_SHARE
        fitting = [k.name for k in KINDS if k.confirmed == confirmed and not k.undoes]
        count = 1 if confirmed else draw.randint(1, 3)
        moves = []
        for number in range(count):
            write = confirmed or number == count - 1 or draw.random() < 0.5
            tool = draw.choice(fitting) if write else READ
            moves.append({"tool": tool, "item": self._item(draw, f"{run_id}-{number}", tool)})
        # Recovery takes half a minute or more: some runs have no time for that.
        deadline_ms = draw.choices((DEADLINE_MS, 60_000, 8_000), (70, 20, 10))[0]
        budget: dict[str, Any] = {"deadline_ms": deadline_ms}
        if draw.random() < 0.05:
            budget[draw.choice(("steps", "model_calls", "tool_calls"))] = draw.randint(1, 2)
        return {
            "workflow": "confirmed" if confirmed else "errand",
            "input": {"moves": moves},
            "budget": budget,
        }

    def _item(self, draw: random.Random, own: str, tool: str) -> str:
        """Name what is written: mostly something of the run's own."""
        if tool == READ or draw.random() >= SHARED_SHARE:
            return own
        known = self._shared.setdefault(tool, [])
        if known and draw.random() < 0.7:
            return draw.choice(known[-3:])
        known.append(own)
        return own

    def _cancel(self) -> None:
        while not self._over.is_set():
            try:
                at, run_id = self._cancels.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                continue
            if self._over.wait(max(0.0, at - time.monotonic())):
                return
            if self._insist(self.stack.fleet.cancel, run_id):
                self.counts["cancelled"] += 1

    def _approve(self) -> None:
        """A person who mostly agrees, and sometimes says so twice."""
        draw = random.Random(f"{self.seed}/approver")
        while not self._over.wait(LOOK_EVERY_S):
            try:
                waiting = self.stack.fleet.ledger.people.approvals()
            except AWAY:
                continue
            for approval in waiting:
                self._decide(approval.id, draw.random() >= 0.1, times=draw.choice((1, 1, 2)))

    def _decide(self, approval_id: str, agrees: bool, *, times: int) -> None:
        fleet = self.stack.fleet
        try:
            token = fleet.desk.issue_token(approval_id, by=APPROVER) if agrees else ""
        except AWAY:
            self.counts["tried again"] += 1  # it is still in the list
            return
        except ApprovalRefused:
            self.counts["decided too late"] += 1
            return
        for _ in range(times):
            try:
                if agrees:
                    fleet.approve(token, by=APPROVER)
                else:
                    fleet.reject(approval_id, by=APPROVER, reason="not this one")
                self.counts["decided"] += 1
            except ApprovalRefused:
                self.counts["decided too late"] += 1
            except AWAY:
                self.counts["tried again"] += 1  # it is still in the list

    # ---- who watches -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Note which leases run out, and how much is under way."""
        database = Database(self.stack.direct.url)
        try:
            while not self._over.wait(LOOK_EVERY_S):
                try:
                    self._look(database)
                except AWAY:
                    continue
        finally:
            database.close()

    def _look(self, database: Database) -> None:
        now = database.now()
        rows = database.run(
            "SELECT id, lease_until FROM handrail_run WHERE lease_until < :now", {"now": now}
        )
        self.ran_out |= {(row["id"], row["lease_until"]) for row in rows}
        self.under_way = restless(database)


def restless(database: Database) -> int:
    """How many runs somebody has yet to look at: none rests before that is zero."""
    found = database.run(
        "SELECT count(*) AS runs FROM handrail_run WHERE status NOT IN ('completed',"
        " 'compensated', 'failed', 'cancelled', 'budget_exhausted', 'handed_off')",
        {},
    )
    return int(found[0]["runs"])
