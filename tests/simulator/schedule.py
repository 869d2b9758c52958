"""One schedule: actors that take turns as a seed decides, trouble, then peace, then the judge.

Workers, sweepers and people are actors on strands of their own. The virtual clock moves only when
the scheduler says so; what is due on the way happens in order.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from handrail.agent.status import TERMINAL, WITH_PERSON
from handrail.broker.message import BadMessage, StepMessage
from handrail.broker.publish import PublishFailed
from handrail.errors import HandrailError
from handrail.ledger.errors import DatabaseUnavailable
from handrail.ledger.session import ConnectionLost
from handrail.reconciler.sweep import Reconciler
from handrail.reports import sign_report
from handrail.tasks.runtime import Runtime
from handrail.tasks.step import run_step
from tests.simulator import people, points, ports
from tests.simulator.actors import Actor, Asker, close_task
from tests.simulator.coverage import Tally
from tests.simulator.faults import Plan, RunPlan, Strike, WorkerPlan
from tests.simulator.ground import Ground
from tests.simulator.invariants import Judge, Violation
from tests.simulator.loop import WorkerLoop
from tests.simulator.points import BEFORE, Point
from tests.simulator.service import SECRET, Service
from tests.simulator.strands import Died, Strand
from tests.simulator.timeline import START_MS, Timeline

#: A run that was accepted rests within so much time of peace, whatever happened before.
PEACE_MS: Final = 3_600_000
#: Between two looks of the sweep; the product's default is 5 s.
SWEEP_MS: Final = 5_000
#: Longer than any schedule.
FOR_NOW_MS: Final = 10**12
_REST: Final = frozenset(status.value for status in (*TERMINAL, *WITH_PERSON))


class Worker(Actor):
    """A worker process: its event loop, its clock, its runtime."""

    def __init__(self, name: str, plan: WorkerPlan, schedule: Schedule) -> None:
        super().__init__(name)
        self.plan = plan
        self._schedule = schedule
        self._ground = schedule.ground
        self.loop = WorkerLoop(self.clock, self._wait)
        self.loop.set_task_factory(self._task)
        self.tasks: list[Any] = []
        self.renews_at = 0
        self.slow = False  # stands still in a call, while its leases are renewed
        fleet = self._ground.fleet
        runtime = fleet.make_runtime(publish=fleet._publish, lock=self._ground.lock)
        runtime.renews = runtime.threads = False
        runtime.clock, runtime.chance = self.look, lambda: 0.5
        runtime.holder = name
        runtime.max_stall_ms = schedule.plan.stall_ms
        runtime.workflows = schedule.workflows if plan.knows else {}
        self.runtime: Runtime = runtime

    def clock(self) -> float:
        """Its monotonic clock, in seconds: wrong by an offset, and by a trifle in its pace."""
        return (self.plan.offset_ms + (self._ground.now_ms - START_MS) * self.plan.rate) / 1000

    def look(self) -> float:
        """Its clock, as a step looks at it."""
        ports.LOOKED_AT.set(self._ground.now_ms)
        return self.clock()

    def live(self) -> None:
        """The process, from its start to its end."""
        try:
            self.loop.run_forever()
        finally:
            self.doomed = True
            self.loop.abandon()
            for task in self.tasks:
                if not task.done():
                    close_task(task)
            self.loop.close()

    def begin(self, text: str) -> None:
        """A message was popped from the queue."""
        self._schedule.at(points.TAKE, BEFORE)
        try:
            message = StepMessage.from_json(text)
        except BadMessage:
            self._schedule.tell("drops a message that is none")
            return
        self._schedule.tell(f"takes {message.run_id} at epoch {message.epoch}")
        self.loop.create_task(run_step(self.runtime, message))

    def give_up(self) -> None:
        super().give_up()
        self.loop.abandon()

    @property
    def busy(self) -> bool:
        """Whether a step is at work."""
        return bool(self.runtime.at_work)

    def _task(self, loop: Any, coroutine: Any, **options: Any) -> Any:
        task = asyncio.Task(coroutine, loop=loop, **options)
        self.tasks.append(task)
        return task

    def _wait(self, ms: int | None) -> None:
        self.wait(self._ground.now_ms, ms)

    def failed(self) -> BaseException | None:
        """What ended a step as nothing may end one."""
        done, self.tasks = self.tasks, [task for task in self.tasks if not task.done()]
        for task in done:
            if task.done() and not task.cancelled():
                error = task.exception()
                ours = task.get_coro().__name__ == "run_step"
                if ours and isinstance(error, BaseException) and not isinstance(error, Died):
                    return error
        return None


class Sweeper(Asker):
    """A process that sweeps."""


class Schedule:
    """A schedule at play; see the module."""

    def __init__(
        self, ground: Ground, plan: Plan, tally: Tally, timeline: Timeline | None = None
    ) -> None:
        ground.clear()
        ground.schedule = self
        self.ground, self.plan, self.tally, self.timeline = ground, plan, tally, timeline
        settings = ground.unbounded if plan.stall_ms is None else ground.bounded
        ground.fleet.__dict__["settings"] = settings
        self.chance = random.Random(f"schedule {plan.seed}")
        self.agenda: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self.service = Service(
            ground.now,
            self._later,
            plan.stall_ms,
            writes=[*plan.writes],
            reads=[*plan.reads],
            queries=[*plan.queries],
            query_dead=plan.query_dead,
        )
        self.judge = Judge(self)
        self.prices: dict[str, int] = {}
        self._runs = {run.run_id: run for run in plan.runs}
        used = {run.workflow for run in plan.runs}
        known = ground.fleet.workflows.items()
        self.workflows = {key: workflow for key, workflow in known if workflow.name in used}
        self.nobody = Actor("world")
        self.current: Actor = self.nobody
        self.workers: list[Worker] = []
        self.sweepers: list[Sweeper] = []
        self.others: list[Actor] = []  # who sweeps, and people at work
        self._names = itertools.count(1)
        self.ticks = 0
        self.striking = True
        self.by_tick: dict[int, Strike] = {}
        self.by_cell: dict[int, list[Strike]] = {}
        for strike in plan.strikes:
            if strike.cell is None:
                self.by_tick[strike.number] = strike
            else:
                self.by_cell.setdefault(strike.cell, []).append(strike)
        self._seen_at: dict[int, int] = {}
        self._swept_at = 0
        self.meanwhile: list[str] = []  # what happens next, before anything else
        self._held: list[Actor] = []  # who stands still until then
        self.database_back_at = self.broker_back_at = self.lock_back_at = 0

    # ---- what the ports ask ----------------------------------------------------------------------

    def run_plan(self, run_id: str) -> RunPlan:
        """The plan of a run."""
        return self._runs[run_id]

    def at(self, point: Point, side: int) -> None:
        """The current actor is at a fault point."""
        actor = self.current
        if actor.doomed:
            raise Died
        strike = self._strike(point, side)
        if strike is not None:
            self._suffer(actor, strike, point, side)

    def at_database(self, point: Point, side: int) -> None:
        """At a point of the ledger: its connection can break, and it can be away."""
        actor = self.current
        if actor.doomed:
            raise Died
        if side == BEFORE and self.database_back_at > self.ground.now_ms and self.striking:
            raise DatabaseUnavailable("database is locked")
        strike = self._strike(point, side)
        if strike is None:
            return
        if strike.what == "lose":
            self._struck("lose", point, side)
            raise ConnectionLost("the answer was lost")
        if strike.what == "refuse" and side != points.COMMITTED:
            self._struck("refuse", point, side)
            raise DatabaseUnavailable("could not serialize access")
        self._suffer(actor, strike, point, side)

    def at_lock(self, point: Point, side: int) -> None:
        """At a point of the lock's server."""
        actor = self.current
        if actor.doomed:
            raise Died
        if side == BEFORE and self.lock_back_at > self.ground.now_ms and self.striking:
            raise ports.lost("away")
        strike = self._strike(point, side)
        if strike is None:
            return
        if strike.what in ("lose", "refuse") and side != points.AFTER:
            self._struck(strike.what, point, side)
            raise ports.lost()
        self._suffer(actor, strike, point, side)

    def at_broker(self, side: int) -> None:
        """At a point of the broker."""
        actor = self.current
        if actor.doomed:
            raise Died
        if side == BEFORE and self.broker_back_at > self.ground.now_ms and self.striking:
            raise PublishFailed(1, "away")
        strike = self._strike(points.PUBLISH, side)
        if strike is None:
            return
        if strike.what in ("lose", "refuse") and side != points.AFTER:
            self._struck(strike.what, points.PUBLISH, side)
            raise PublishFailed(1, "the answer was lost")
        self._suffer(actor, strike, points.PUBLISH, side)

    def at_call(self, point: Point, side: int) -> None:
        """At a point of a call to a model, a tool or a check."""
        actor = self.current
        if actor.doomed:
            raise Died
        strike = self._strike(point, side)
        if strike is None:
            return
        if strike.what in ("lose", "refuse"):
            self._struck(strike.what, point, side)
            raise ConnectionError("the answer was lost")
        self._suffer(actor, strike, point, side)

    def _strike(self, point: Point, side: int) -> Strike | None:
        cell = point.base + side
        self.tally.passed[cell] += 1
        if not self.striking:
            return None
        self.ticks += 1
        if self.ticks in self.by_tick:
            return self.by_tick[self.ticks]
        if cell in self.by_cell:
            seen = self._seen_at[cell] = self._seen_at.get(cell, 0) + 1
            for strike in self.by_cell[cell]:
                if strike.number == seen:
                    return strike
        return None

    def _suffer(self, actor: Actor, strike: Strike, point: Point, side: int) -> None:
        what = strike.what
        may_stall = (actor.strand is not None and side != points.INSIDE) or point in _CALLS
        if what in ("stall", "slow") and may_stall and actor.strand is not None:
            self._struck(what, point, side, strike.ms)
            ms = strike.ms
            if strike.meanwhile:  # until all of that has happened
                self.meanwhile += [*strike.meanwhile, "go on"]
                self._held.append(actor)
                ms = FOR_NOW_MS
            self._stall(actor, ms, slow=what == "slow")
        else:
            self._struck("die", point, side)
            actor.give_up()
            raise Died

    def _struck(self, what: str, point: Point, side: int, ms: int = 0) -> None:
        self.tally.struck(what, point, side)
        if self.timeline is not None:
            shown = {
                "die": "dies",
                "stall": f"stands still for {ms} ms",
                "slow": f"is slow by {ms} ms",
                "lose": "gets no answer",
                "refuse": "is refused",
            }[what]
            self.tell(f"** {shown} {points.SIDES[side]} {point.name}")

    def _stall(self, actor: Actor, ms: int, *, slow: bool) -> None:
        assert actor.strand is not None
        actor.stalled_until = self.ground.now_ms + ms
        if isinstance(actor, Worker):
            actor.slow = slow
        actor.strand.pause()
        actor.stalled_until = None
        if actor.doomed:
            raise Died
        self.tell("goes on")

    def dies(self, why: str) -> None:
        """End the current actor here."""
        self.tell(f"** dies: {why}")
        self.current.give_up()
        raise Died

    def signalled(self, run_id: str) -> None:
        """The broker's signal that a cancel was wished: whoever is at work on the run looks."""
        for worker in self.workers:
            if worker.busy and worker.waiting and self.chance.random() < 0.5:
                worker.renews_at = self.ground.now_ms

    # ---- telling ---------------------------------------------------------------------------------

    def tell(self, what: str) -> None:
        """Write a line into the timeline, if there is one."""
        if self.timeline is not None:
            self.timeline.tell(self.ground.now_ms, self.current.name, what)

    def tell_answer(self, point: Point, args: tuple[Any, ...], answer: Any) -> None:
        """Write what came of a call of the ledger."""
        if point is points.CLAIM:
            claims = answer if isinstance(answer, list) else [answer]
            for claim in claims:
                self.tell(
                    "claim: late or duplicate, dropped"
                    if claim is None
                    else f"claim {claim.run_id}: epoch {claim.epoch}, {claim.phase},"
                    f" {claim.status}" + (f", refused: {claim.refusal}" if claim.refusal else "")
                )
        elif point is points.COMMIT:
            ends = args[0] if isinstance(args[0], list) else [args]
            for end in ends:
                claim = end[0] if isinstance(end, tuple) else end.claim
                ruling = end[1] if isinstance(end, tuple) else end.ruling
                state = ruling.state
                self.tell(
                    f"commit {claim.run_id}: {state.status}"
                    + (f" ({state.reason})" if state.reason else "")
                    + ("" if answer is not False else ": refused")
                )
        elif point is points.DUE:
            self.tell(f"due for the sweep: {', '.join(run.run_id for run in answer) or 'nothing'}")
        elif point is points.MARK:
            self.tell(f"published again: {', '.join(due.run_id for due in args[0])}")
        elif point is points.DRAIN:
            self.tell(f"gives back: {', '.join(due.run_id for due in answer) or 'nothing'}")
        elif point is points.ACCEPT:
            self.tell(f"accepted {answer.run_id}")

    # ---- turns -----------------------------------------------------------------------------------

    def go(self, actor: Actor) -> None:
        """Give an actor the turn until it stands still, waits or has ended."""
        assert actor.strand is not None
        before, self.current = self.current, actor
        actor.strand.resume()
        self.current = before
        if isinstance(actor, Worker):
            error = actor.failed()
            if error is not None:
                raise Violation("the step", f"{type(error).__name__}: {error}") from error
        if actor.strand.idle:
            self._ended(actor)

    def _ended(self, actor: Actor) -> None:
        strand = actor.strand
        assert strand is not None
        actor.strand = None
        if isinstance(actor, Worker):
            self.workers.remove(actor)
            for other in self.others:
                if other.process is actor:
                    other.give_up()
        else:
            self.others.remove(actor)
        if isinstance(actor, Sweeper) and actor.doomed:
            self.sweepers.remove(actor)
            if self.plan.retires:
                self._start_sweeper()
        error = strand.error
        if error is not None:
            raise Violation(actor.name, f"{type(error).__name__}: {error}") from error

    def act(self, name: str, job: Callable[[], object]) -> None:
        """Let somebody act; it may stand still on the way."""
        self.begin(Actor(name), job)

    def begin(self, actor: Actor, job: Callable[[], object]) -> None:
        """Let an actor begin with something, on a strand of its own."""
        actor.strand = Strand(job)
        self.others.append(actor)
        self.go(actor)

    def start_worker(self, plan: WorkerPlan) -> Worker:
        """Start a worker process."""
        worker = Worker(f"worker {next(self._names)}", plan, self)
        worker.strand = Strand(worker.live)
        self.workers.append(worker)
        self.go(worker)
        return worker

    def kill(self, actor: Actor) -> None:
        """SIGKILL: it dies where it is."""
        actor.give_up()
        self.go(actor)

    def deliver(self, worker: Worker, text: str) -> None:
        """Let a worker take a message."""
        worker.loop.call_soon(worker.begin, text)
        if worker.stalled_until is None:
            self.go(worker)

    def renew(self, worker: Worker) -> None:
        """A worker's leases are renewed, by the thread that it has for that."""
        renewal = Actor(worker.name + "'")
        before, self.current = self.current, renewal
        try:
            worker.runtime.renew()
        except (HandrailError, ConnectionLost):
            self.tell("leases were not renewed")
        except Died:
            if worker.strand is not None:
                self.kill(worker)
        finally:
            self.current = before
        worker.renews_at = self.ground.now_ms + 8_000
        if worker.strand is not None and worker.waiting and worker.loop.has_work:
            self.go(worker)

    def sweep(self) -> None:
        """A beat: a process that does not sweep already does so."""
        self._swept_at = self.ground.now_ms
        idle = [sweeper for sweeper in self.sweepers if sweeper.strand is None]
        if idle:
            sweeper = idle[0] if len(idle) == 1 else self.chance.choice(idle)
            self.begin(sweeper, lambda: self._sweep(sweeper.reconciler))

    def _sweep(self, reconciler: Reconciler) -> None:
        if self.chance.random() < 0.5:
            reconciler.tick(every_s=SWEEP_MS / 1000)
            return
        try:
            reconciler.sweep()
        except (ConnectionLost, DatabaseUnavailable):
            self.tell("nothing was swept")

    def _start_sweeper(self) -> None:
        sweeper = Sweeper(f"sweeper {next(self._names)}", self)
        if self.striking and self.chance.random() < self.plan.foreign:
            sweeper.reconciler.workflows = {}
        self.sweepers.append(sweeper)

    # ---- time ------------------------------------------------------------------------------------

    def _later(self, at: int, act: Callable[[], object]) -> None:
        heapq.heappush(self.agenda, (at, next(self._numbers), act))

    def _next(self) -> tuple[int, Callable[[], object]] | None:
        """What is due next by itself, and when."""
        first: tuple[int, Callable[[], object]] | None = None
        if self.agenda:
            at, _, act = self.agenda[0]

            def land() -> None:
                heapq.heappop(self.agenda)
                act()

            first = at, land
        for worker in self.workers:
            for at_, act_ in self._next_of(worker):
                if first is None or at_ < first[0]:
                    first = at_, act_
        for actor in self.others:
            due = actor.stalled_until if actor.stalled_until is not None else actor.wake_at
            if due is None or due > self.ground.now_ms + FOR_NOW_MS // 2:
                continue
            if first is None or due < first[0]:
                first = due, partial(self.go, actor)
        return first

    def _next_of(self, worker: Worker) -> list[tuple[int, Callable[[], object]]]:
        found: list[tuple[int, Callable[[], object]]] = []
        if worker.stalled_until is not None:
            if worker.stalled_until <= self.ground.now_ms + FOR_NOW_MS // 2:
                found.append((worker.stalled_until, lambda: self.go(worker)))
        elif worker.loop.has_work:
            found.append((self.ground.now_ms, lambda: self.go(worker)))
        elif worker.wake_at is not None:
            found.append((worker.wake_at, lambda: self.go(worker)))
        if worker.busy and (worker.stalled_until is None or worker.slow):
            found.append((worker.renews_at, lambda: self.renew(worker)))
        return found

    def _beat(self) -> tuple[int, Callable[[], object]] | None:
        """The next beat that finds something to do; there is none while all sweepers are busy."""
        if not any(sweeper.strand is None for sweeper in self.sweepers):
            return None
        wakes_at = self.ground.rows("SELECT min(wake_at) AS at FROM handrail_run")[0]["at"]
        if wakes_at is None:
            return None
        wakes_at -= self.ground.sweeps_ahead_ms  # which only a planted bug makes them
        after = max(wakes_at, self._swept_at + 1, self.ground.now_ms)
        return after + (self.plan.beat_ms - after) % SWEEP_MS, self.sweep

    def _whatever_is_next(self) -> tuple[int, Callable[[], object]] | None:
        """What is due next: a message, the beat, or what somebody waits for."""
        if self.ground.broker.queue and self._free():
            return self.ground.now_ms, lambda: self._deliver(self._take())
        head, beat = self._next(), self._beat()
        if head is None or (beat is not None and beat[0] < head[0]):
            return beat
        return head

    def pass_time(self, until: int) -> None:
        """Let time pass; what is due on the way happens, in order."""
        find = self._whatever_is_next if self.plan.lively else self._next
        while (head := find()) is not None and head[0] <= until:
            self.ground.now_ms = max(self.ground.now_ms, head[0])
            head[1]()
        self.ground.now_ms = max(self.ground.now_ms, until)

    # ---- the whole -------------------------------------------------------------------------------

    def play(self) -> None:
        """Play the schedule to its end and judge it; raises `Violation`."""
        try:
            self.tell(self.plan.told())
            for plan in self.plan.workers:
                self.start_worker(plan)
            for _ in range(self.plan.sweepers):
                self._start_sweeper()
            for run in self.plan.runs:
                self.act("client", lambda run=run: self._accept(run))  # type: ignore[misc]
            for number in range(self.plan.moves):
                for act in self.plan.acts.get(number, ()):
                    self._happens(act)
                self._move()
                while self.meanwhile:
                    self._happens(self.meanwhile.pop(0))
            self._peace()
            self.judge.judge()
        except Violation as violation:
            raise (self.judge.first or violation) from None
        finally:
            self.close()

    def close(self) -> None:
        """End everybody who is still there."""
        self.striking = False
        while self.workers or self.others:
            actor = (self.workers or self.others)[0]
            try:
                self.kill(actor)
            except Violation:
                continue

    def _accept(self, run: RunPlan) -> None:
        for _ in range(2):
            try:
                self.ground.fleet.enqueue(
                    run.workflow,
                    goal=run.run_id,
                    run_id=run.run_id,
                    tenant=run.tenant,
                    input={"order": run.order, "amount": run.amount},
                    budget=run.budget,
                    mode=run.mode,
                )
                return
            except (ConnectionLost, DatabaseUnavailable):
                self.tell(f"{run.run_id} was perhaps not accepted; tries again")

    # ---- trouble ---------------------------------------------------------------------------------

    def _move(self) -> None:
        """Let one thing happen that may happen now."""
        now, queue = self.ground.now_ms, self.ground.broker.queue
        actors = self._actors()
        stalled = [a for a in actors if a.stalled_until is not None and a.stalled_until <= now]
        weights = (
            6 if stalled else 0,
            9 if queue and self.workers else 0,
            1.5 if self.ground.broker.old and self.workers else 0,
            5,
            3 if any(sweeper.strand is None for sweeper in self.sweepers) else 0,
            7 if self.plan.kind.approval != "never" and self._asked() else 0,
            4 if len(self.workers) < len(self.plan.workers) and self.plan.retires else 0,
            9 if self.plan.people else 0,
        )
        move = self.chance.choices(range(8), weights)[0]
        if move == 0:
            self.go(self.chance.choice(stalled))
        elif move in (1, 2):
            self._deliver(self._take() if move == 1 else self._old())
        elif move == 3:
            self.pass_time(now + self._pause())
        elif move == 4:
            self.sweep()
        elif move == 5:
            self._happens("decide")
        elif move == 7:
            self._people_act()
        else:
            self.start_worker(self.chance.choice(self.plan.workers))

    def _actors(self) -> list[Actor]:
        return [*self.workers, *self.others]

    def _deliver(self, text: str) -> None:
        self.deliver(self.chance.choice(self._free() or self.workers), text)

    def _free(self) -> list[Worker]:
        """The workers that take messages."""
        return [w for w in self.workers if w.stalled_until is None and not w.runtime.draining]

    def _goes_on(self, turns: int, until: Callable[[], bool] = lambda: False) -> None:
        """Let everybody go on who can, from one due thing to the next."""
        for _ in range(turns):
            if until():
                return
            head = self._whatever_is_next()
            if head is None:
                return
            self.ground.now_ms = max(self.ground.now_ms, head[0])
            head[1]()

    def _asked(self) -> list[dict[str, Any]]:
        """Who waits for a person's consent."""
        return self.ground.rows("SELECT id FROM handrail_run WHERE status = 'awaiting_approval'")

    def _take(self) -> str:
        broker = self.ground.broker
        first = 0 if self.chance.random() < 0.8 else self.chance.randrange(len(broker.queue))
        text = broker.queue.pop(first)
        broker.old.append(text)
        return text

    def _old(self) -> str:
        return self.chance.choice(self.ground.broker.old)

    def _pause(self) -> int:
        head = self._next()
        if head is not None and self.chance.random() < 0.5:
            return max(0, head[0] - self.ground.now_ms)
        return self.chance.choice((50, 600, 2_500, 6_000, 11_000, 31_000, 61_000))

    def _happens(self, act: str) -> None:
        """One of the plan's acts."""
        self.tell(f"** {act}")
        self.tally.acts[act] += 1
        now, broker = self.ground.now_ms, self.ground.broker
        away_ms = self.chance.choice((400, 3_000, 15_000, 45_000))
        run = self.chance.choice(self.plan.runs)
        match act:
            case "cancel":
                self.act("person", lambda: self._cancel(run.run_id))
            case "decide":
                asked = self._asked()
                run_id = self.chance.choice(asked)["id"] if asked else run.run_id
                people.decide(self, run_id, agrees=self.chance.random() < 0.8)
            case "flush":
                self.ground.lock_server.flush()
                broker.queue.clear()
            case "unlock":
                self.ground.lock_server.flush()
            case "empty the queue":
                broker.queue.clear()
            case "forge":
                self._forge()
            case "drain":
                if self.workers:
                    busy = [worker for worker in self.workers if worker.busy]
                    worker = self.chance.choice(busy or self.workers)
                    signal = Actor("signal")
                    signal.process = worker
                    self.begin(signal, lambda: worker.runtime.drain(0))
                    if worker.waiting and worker.loop.has_work and worker.strand is not None:
                        self.go(worker)
            case "freeze":
                self._freeze(600_000)
            case "pause":
                self.act("person", lambda: self._pause_fleet(run))
            case "resume":
                self.act("person", self._resume)
            case "report":
                self.act("provider", lambda: self._report(run))
            case "kill":
                if self.workers:
                    self.kill(self.chance.choice(self.workers))
            case "database away":
                self.database_back_at = now + away_ms
            case "broker away":
                self.broker_back_at = now + away_ms
            case "lock away":
                self.lock_back_at = now + away_ms
            case "service answers":
                self.service.query_dead = False
            case "price":
                for plan in self.plan.runs:
                    self.prices[plan.run_id] = 101
            case "sweep":
                self.sweep()
            case "deliver" if self.workers and broker.queue:
                self._deliver(self._take())
            case "old" if self.workers and broker.old:
                self._deliver(self._old())
            case "the lease":
                self.pass_time(now + 31_000)
            case "world goes on":
                self._goes_on(self.chance.randrange(3, 12))
            case "sent again":
                sent = self.judge.sent_calls
                self._goes_on(16, until=lambda: self.judge.sent_calls > sent)
            case _ if act in people.ACTS:
                people.begin(self, act)
            case "go on":
                actor = self._held.pop(0)
                if actor.stalled_until is not None:
                    self.go(actor)

    def _cancel(self, run_id: str) -> None:
        try:
            self.ground.fleet.cancel(run_id)
        except (HandrailError, ConnectionLost) as error:
            self.tell(f"cancel {run_id}: {type(error).__name__}")

    def _freeze(self, ms: int) -> None:
        """Let time pass in which nobody of ours moves; what is in the air lands."""
        until = self.ground.now_ms + ms
        while self.agenda and self.agenda[0][0] <= until:
            at, _, act = heapq.heappop(self.agenda)
            self.ground.now_ms = max(self.ground.now_ms, at)
            act()
        self.ground.now_ms = until

    def _pause_fleet(self, run: RunPlan) -> None:
        scope = self.chance.choice(("fleet", "tenant", "workflow", "tool"))
        names = {"tenant": run.tenant, "workflow": run.workflow, "tool": self.plan.kind.name}
        try:
            self.ground.fleet.pause(scope, names.get(scope, ""), reason="an exercise")
        except (HandrailError, ConnectionLost) as error:
            self.tell(f"pause: {type(error).__name__}")
            return
        self.judge.paused = self.judge.paused or scope == "fleet"
        self.tell(f"paused: {scope} {names.get(scope, '')}")

    def _resume(self) -> None:
        fleet = self.ground.fleet
        self.judge.paused = False
        try:
            for pause in fleet.pauses():
                fleet.resume(pause.scope, pause.name)
                self.tell(f"resumed: {pause.scope} {pause.name}")
        except (HandrailError, ConnectionLost) as error:
            self.tell(f"resume: {type(error).__name__}")

    def _report(self, run: RunPlan) -> None:
        """The provider says what it knows of an order, by itself."""
        record = self.service.records.get((run.tenant, run.order))
        fields: dict[str, Any] = {
            "intent_key": f"save:{run.order}",
            "answer": "applied" if record else self.chance.choice(("absent", "pending")),
            "evidence": record.answer if record else None,
            "tenant": run.tenant,
            "report_id": self.chance.choice(("first", "second")),
            "sent_at": self.ground.now_ms,
        }
        signature = sign_report(SECRET, **fields)
        try:
            came_to = self.ground.fleet.report(**fields, signature=signature)
            self.tell(f"reports {fields['answer']}: {came_to.value}")
        except (HandrailError, ConnectionLost) as error:
            self.tell(f"reports {fields['answer']}: {type(error).__name__}")

    def _forge(self) -> None:
        run = self.chance.choice(self.plan.runs)
        epoch = self.chance.randrange(0, 6)
        forged = StepMessage(run_id=run.run_id, step=0, epoch=epoch, budget={"steps": 10**9})
        text = forged.to_json()
        self.ground.broker.queue.append(
            self.chance.choice((text, text[:-9], '{"run_id": "r0", "step": -1}', "[" * 99))
        )

    # ---- peace -----------------------------------------------------------------------------------

    def _peace(self) -> None:
        """No fault any more: every run must come to rest by itself, and within a bound."""
        self.tell("** peace")
        self.striking = False
        self.service.writes = []
        self.service.reads = []
        self.service.queries = []
        for actor in [*self.workers, *self.others]:
            if actor.stalled_until is not None:
                self.go(actor)
        self.act("person", self._resume)
        for worker in [*self.workers]:
            if worker.runtime.draining or not worker.plan.knows:
                self.kill(worker)
        self.sweepers = [s for s in self.sweepers if s.reconciler.workflows]
        if not self.sweepers:
            self._start_sweeper()
        ends = self.ground.now_ms + PEACE_MS
        self._rest(ends)
        for row in self._asked():
            if self.chance.random() < 0.8:
                people.decide(self, row["id"], agrees=self.chance.random() < 0.8)
        self._rest(ends)
        if self.plan.people:
            self.service.query_dead = self.service.query_dead and self.chance.random() < 0.4
            for _ in range(self.chance.choice((0, 2, 6))):
                self._people_act()
                self._rest(ends)

    def _people_act(self) -> None:
        acts = people.busy_ones(
            self.ground.rows(
                "SELECT reason FROM handrail_handoff WHERE status = 'open' UNION ALL"
                " SELECT 'approval' FROM handrail_approval WHERE status = 'pending'"
            )
        )
        if acts:
            self._happens(self.chance.choice(acts))

    def _rest(self, ends: int) -> None:
        """Go on, from one due thing to the next, until everybody rests."""
        ground = self.ground
        while True:
            if not self.workers:
                self.start_worker(WorkerPlan(0, 1.0, True))
            head = self._whatever_is_next()
            if head is None or head[1] == self.sweep or head[0] > ground.now_ms:
                rows = ground.rows("SELECT id, status FROM handrail_run")
                restless = [row for row in rows if row["status"] not in _REST]
                if not restless and (head is None or head[1] == self.sweep):
                    return
                shown = ", ".join(f"{row['id']} is {row['status']}" for row in restless)
                if head is None:
                    raise Violation("I2", f"nobody will ever look again: {shown}")
                if ground.now_ms > ends:
                    raise Violation("I2", f"no rest after an hour of peace: {shown}")
            assert head is not None
            ground.now_ms = max(ground.now_ms, head[0])
            head[1]()


_CALLS: Final = frozenset(
    {points.MODEL, points.READ, points.WRITE, points.VERIFY, points.QUERY, points.UNDO}
)
