"""The sweep: publish again what nobody holds, recover lost leases, end what is overdue, settle
doubt.

It works from what is overdue, never from which tick it is, so that it is correct with no beat, one
or several; each run that it touches is decided under that run's lock. A query is paid for before it
is asked and remembers the effect's token: an answer about an older attempt changes nothing. Queries
run side by side, bounded, while the sweep goes on.
"""

from __future__ import annotations

import inspect
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Final

from handrail import logs, tracing
from handrail.agent import protocol
from handrail.agent.effects import Answer, Effect, EffectStatus, NoAnswer, resolve
from handrail.agent.protocol import Gone, Locked, Ruling
from handrail.agent.stage import End
from handrail.agent.status import RunStatus
from handrail.agent.tools import Tool
from handrail.agent.workflow import Workflow
from handrail.broker.message import StepMessage, message_of
from handrail.errors import HandrailError
from handrail.ledger.ledger import DueStep, Ledger, Ruled
from handrail.ledger.liveness import SWEPT
from handrail.ledger.lock import IntentLock, LocalLock
from handrail.ledger.session import ConnectionLost
from handrail.reconciler.answers import read_answer
from handrail.reconciler.compensate import Compensator
from handrail.reconciler.errands import Errand, Errands, Part
from handrail.reconciler.pace import Pace
from handrail.tasks.calls import Ask, Called, ToolCall, answered, asked, at_any_time
from handrail.tasks.runtime import DEFAULT_MAX_STALL_MS

log = logging.getLogger("handrail.reconciler")
#: How many runs of each kind are taken at a time.
BATCH: Final = 100
#: A sweep takes no more after this time: shorter than `ledger.POSTPONE_MS`, after which what it has
#: taken and not reached is due again.
SWEEP_S: Final = 10.0
#: How long a sweep is at its doubts before it looks again for runs that only have to go on.
TURN_S: Final = 0.25
#: How long it waits for the fleet to take up what it has set going, before it looks again.
PAUSE_S: Final = 0.02
#: How often a sweep that takes long says that it is alive.
ALIVE_S: Final = 1.0
#: How long a process that goes away waits for the answers to its calls.
FINISH_S: Final = 3.0
DEFAULT_QUERIES: Final = 16
DEFAULT_MAX_ATTEMPTS: Final = 5

#: A heartbeat beside SWEPT: a sweep has found nothing more to do.
QUIET: Final = "sweep:quiet"


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep has done. `quiet`: nothing was due any more when it ended.

    `counts` has what was `published` and `unpublished`, `answer:<kind>` for each query, and
    `moved:<status>` for each run that changed its status.
    """

    looked_at: int
    quiet: bool
    counts: Mapping[str, int]


@dataclass(slots=True, kw_only=True)
class Reconciler:
    """What a sweep works with; for one thread at a time, but for `tick` and `stop`.

    `workflows` are those whose tools can be queried here; up to `queries` are asked at once. With
    `hands` the ledger is asked by so many threads beside the sweeping one, else by that alone.
    """

    ledger: Ledger
    workflows: dict[str, Workflow]
    publish: Callable[[Sequence[StepMessage]], object]
    ask: Ask
    lock: IntentLock = field(default_factory=LocalLock)
    max_stall_ms: int | None = DEFAULT_MAX_STALL_MS
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    queries: int = DEFAULT_QUERIES
    hands: int = 0
    jitter: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter)
    _errands: Errands = field(init=False)
    _pace: Pace = field(init=False)
    _counting: threading.Lock = field(default_factory=threading.Lock)
    _away: bool = False  # the broker was, in this sweep
    _leaving: bool = False
    _gone: dict[str, Gone] = field(default_factory=dict)  # by run: what it waits for in vain
    _at_work: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._errands = Errands(
            places=self.queries,
            hands=self.hands,
            clock=lambda: self.clock(),
            contained=self._contained,
        )
        self._pace = Pace(ledger=self.ledger, most=self.queries)

    # ---- when to sweep ---------------------------------------------------------------------------

    def tick(self, *, every_s: float) -> Swept | None:
        """Sweep, for a beat or a timer of that period; None where it came to nothing. Never raises.

        Any number may tick at once, late, or all that have piled up: this process sweeps once at a
        time, and not at all where a sweep has just found nothing more to do.
        """
        if self._leaving or not self._at_work.acquire(blocking=False):
            return None
        try:
            quiet_ms = self.ledger.since_beat(QUIET)
            # Half a period: two ticks of one beat are never quite a period apart.
            if quiet_ms is not None and 0 <= quiet_ms < every_s * 500:
                return None
            return self.sweep_until_quiet()
        except (HandrailError, ConnectionLost) as error:
            log.warning("the sweep failed (%s); the next one finds what is due", error)
        except Exception:
            log.exception("the sweep failed; the next one finds what is due")
        finally:
            self._at_work.release()
        return None

    def sweep_until_quiet(self, *, limit: int = BATCH, within_s: float = SWEEP_S) -> Swept:
        """Sweep until nothing is due, at most for `within_s`.

        A query that takes longer goes on, and the next sweep takes its answer.
        """
        until, alive_at = self.clock() + within_s, 0.0
        before, looked_at, dropped = self.counts.copy(), 0, 0
        self._away = False
        try:
            while True:
                waited = self._errands.waiting
                found = self._take(limit)
                self._go_on(min(until, self.clock() + TURN_S), may=self._has_room)
                looked_at += found
                dropped += self._errands.drop_stuck()
                left = self._errands.waiting
                idle = not (waited or found or left or self._errands.under_way)
                over = idle or self._leaving or self.clock() >= until
                quiet = idle and not dropped
                if over or self.clock() >= alive_at:
                    alive_at = self.clock() + ALIVE_S
                    self.ledger.beat(SWEPT, *([QUIET] if quiet else []), kind="reconciler")
                if over:
                    done = Swept(looked_at - dropped - left, quiet, self.counts - before)
                    if done.looked_at or done.counts:
                        figures = {"looked_at": done.looked_at, "counts": dict(done.counts)}
                        logs.event(log, "sweep.ended", **figures)
                    return done
        finally:
            self._errands.drop_waiting()
            self._gone.clear()
            if self._leaving:
                self.finish()

    def sweep(self, *, limit: int = BATCH) -> int:
        """Take one batch, up to `limit` runs of each kind, and see it through; returns how many
        runs there were.
        """
        until = self.clock() + SWEEP_S
        self._away = False
        try:
            found = self._take(limit)
            self._go_on(until)
        finally:
            self._errands.drop_waiting()
            self._gone.clear()
        return found

    def finish(self, *, within_s: float = FINISH_S) -> None:
        """Take the answers to what is under way, and begin nothing more; for whoever goes away."""
        until = self.clock() + within_s
        while self._errands.under_way and self._errands.serve(until - self.clock()):
            continue
        self._errands.close()

    def stop(self) -> None:
        """Let a sweep that is under way end soon, from any thread; what it has taken is due
        again.
        """
        self._leaving = True

    def close(self) -> None:
        """Stop, and take no further answers."""
        self.stop()
        self._errands.close()

    # ---- a batch ---------------------------------------------------------------------------------

    def _take(self, limit: int) -> int:
        """Take a batch and publish again what only has to go on; the others wait for a place."""
        woken = self.ledger.due_for_sweep(
            limit=max(0, limit - self._errands.waiting_inside),
            doubts=max(0, limit - self._errands.waiting_outside),
        )
        self._republish([run.due for run in woken if run.due is not None])
        for run in woken:
            if run.gone is not None:
                self._gone[run.run_id] = run.gone
            if run.due is None:
                in_doubt = run.status is RunStatus.RECONCILING
                self._errands.wait(run.run_id, (run.tool or "") if in_doubt else None)
        return len(woken)

    def _go_on(self, until: float, *, may: Callable[[], bool] = lambda: True) -> None:
        """Look at runs until none waits and nothing is under way, or the time is over."""
        while self.clock() < until and not self._leaving:
            self._errands.begin(self._look_at, until=until, may=may)
            if self._errands.under_way:
                if not self._errands.serve(until - self.clock()):
                    return
            elif self._errands.waiting_outside:  # the fleet has to take up first what was set going
                time.sleep(PAUSE_S)
            else:
                return

    def _has_room(self) -> bool:
        return self._pace.has_room(self._errands.under_way_outside)

    def _contained(self, run_id: str, part: Part) -> Errand | None:
        """One run at fault must not keep the others from being looked at."""
        try:
            with logs.about(run_id=run_id):
                return part()
        except (HandrailError, ConnectionLost) as error:
            self._count("failed")
            log.warning("run %s was not looked at (%s); the next sweep does", run_id, error)
        except Exception:
            self._count("failed")
            log.exception("run %s was not looked at; the next sweep tries", run_id)
        return None

    def _count(self, what: str, number: int = 1) -> None:
        with self._counting:
            self.counts[what] += number

    def _republish(self, due: Sequence[DueStep]) -> None:
        if due and self._send(due):
            self.ledger.published(due)

    def _send(self, due: Sequence[DueStep]) -> bool:
        """Publish, bounded: a broker that is away is asked once a sweep."""
        if not self._away:
            try:
                self.publish([message_of(step) for step in due])
            except HandrailError as error:
                self._away = True
                log.warning("%d steps were not published (%s); they stay due", len(due), error.code)
        self._count("unpublished" if self._away else "published", len(due))
        return not self._away

    # ---- a run -----------------------------------------------------------------------------------

    def _look_at(self, run_id: str) -> Errand | None:
        """Decide about one run under its lock; returns the call outside that it needs, if any."""
        gone = self._gone.pop(run_id, None)

        def decide(locked: Locked) -> Ruling | None:
            handed = None if gone is None else protocol.version_unavailable(locked, gone)
            return handed or protocol.wake(
                locked, max_attempts=self.max_attempts, max_stall_ms=self.max_stall_ms
            )

        ruled = self.ledger.rule(run_id, decide)
        self._done(ruled)
        return self._errand(run_id, ruled)

    def _done(self, ruled: Ruled) -> None:
        """Count what was ruled, and publish what it made due."""
        if ruled.ruling is not None and ruled.ruling.state.status is not ruled.locked.state.status:
            self._count(f"moved:{ruled.ruling.state.status}")
        if ruled.due is None or not self._send([ruled.due]):
            return
        if ruled.locked.state.status is RunStatus.RECONCILING:
            self._pace.set_going(ruled.due)

    def _errand(self, run_id: str, ruled: Ruled) -> Errand | None:
        """Begin the call outside that a woken run needs: the ruling has paid for it."""
        if _owes_a_query(ruled):
            assert ruled.ruling is not None and ruled.ruling.effect is not None
            return self._query(run_id, ruled.locked, ruled.ruling.effect)
        if ruled.ruling is not None and ruled.ruling.undoes:
            if not self._knows(ruled.locked):
                self._not_known_here(run_id, ruled.locked)
                return None
            return self._compensator().begin(run_id, ruled.locked)
        return None

    def _compensator(self) -> Compensator:
        return Compensator(
            ledger=self.ledger,
            workflows=self.workflows,
            lock=self.lock,
            ask=self.ask,
            max_stall_ms=self.max_stall_ms,
            clock=self.clock,
            done=self._done,
        )

    # ---- doubt -----------------------------------------------------------------------------------

    def _query(self, run_id: str, locked: Locked, effect: Effect) -> Errand | None:
        tool = self._tool(locked, effect)
        if tool is None:
            self._not_known_here(run_id, locked)
            self.ledger.rule(run_id, lambda locked: protocol.query_returned(locked, effect.token))
            return None
        sent_at = locked.now  # it is sent later than that, never earlier

        def conclude(found: Called) -> Errand | None:
            self._conclude(run_id, effect, _answer(tool, found, effect, locked), sent_at)
            return None

        answer = asked(lambda: self._ask_for(tool, effect, locked))
        return Errand(run_id, tool.name, answer, conclude)

    def query_now(self, locked: Locked, effect: Effect) -> Answer:
        """Ask a tool now, for a person, and wait for its answer; it settles nothing."""
        tool = self._tool(locked, effect)
        if tool is None or tool.query is None:
            return NoAnswer("tool-not-known-here")
        future = asked(lambda: self._ask_for(tool, effect, locked))
        wait([future])
        return _answer(tool, answered(future), effect, locked)

    def _ask_for(self, tool: Tool, effect: Effect, locked: Locked) -> Future[Called]:
        assert tool.query is not None
        context = ToolCall(
            run_id=locked.state.run_id,
            tenant=effect.tenant,
            principal=locked.state.principal,
            tool=tool.name,
            timeout_ms=effect.terms.call_ms,
            key=effect.id,
            intent_key=effect.intent_key,
            attempt=effect.attempts,
            facts=locked.state.outputs,
            traceparent=tracing.below(locked.traceparent, effect.id, effect.token, locked.now),
        )
        arguments = tool.contract.revive(dict(effect.arguments))
        return self.ask(tool.query, arguments, context, effect.terms.call_ms)

    def _conclude(self, run_id: str, effect: Effect, answer: Answer, sent_at: int) -> None:
        self._count(f"answer:{type(answer).__name__.lower()}")

        def decide(locked: Locked) -> Ruling | None:
            current = locked.effect
            if current is None or current.id != effect.id or current.token != effect.token:
                return None  # somebody was faster: this answer is about an older attempt
            if current.status is not EffectStatus.UNKNOWN:
                return None
            if locked.state.status is not RunStatus.RECONCILING:
                return None
            conclusion = resolve(
                current,
                answer,
                sent_at=sent_at,
                now=locked.now,
                max_stall_ms=self.max_stall_ms,
                jitter=self.jitter(),
            )
            ruling = protocol.concluded(locked, conclusion, max_stall_ms=self.max_stall_ms)
            return protocol.with_evidence(ruling, answer, sent_at)

        ruled = self.ledger.rule(run_id, decide)
        said = {"tool": effect.tool, "effect_id": effect.id, "attempt": effect.attempts}
        logs.event(log, "effect.asked", answer=type(answer).__name__.lower(), **said)
        self._done(ruled)

    def _tool(self, locked: Locked, effect: Effect) -> Tool | None:
        state = locked.state
        workflow = self.workflows.get(f"{state.workflow}@{state.workflow_version}")
        if workflow is None:
            return None
        return next((tool for tool in workflow.tools if tool.name == effect.tool), None)

    def _knows(self, locked: Locked) -> bool:
        return f"{locked.state.workflow}@{locked.state.workflow_version}" in self.workflows

    def _not_known_here(self, run_id: str, locked: Locked) -> None:
        """Leave it to whoever has the workflow's code, or to a person where nobody has it."""
        self._count("foreign")
        gone = self.ledger.gone(locked.state.workflow, locked.state.workflow_version)
        if gone is not None:
            moved_at = self.ledger.moved_at(run_id)
            self._done(
                self.ledger.rule(
                    run_id,
                    lambda locked: protocol.version_unavailable(locked, gone, stood_since=moved_at),
                )
            )


def _owes_a_query(ruled: Ruled) -> bool:
    """Whether the wake-up has paid for a query of this run's effect."""
    ruling, before = ruled.ruling, ruled.locked.effect
    return (
        ruling is not None
        and ruling.effect is not None
        and before is not None
        and ruling.state.status is RunStatus.RECONCILING
        and ruling.effect.status is EffectStatus.UNKNOWN
        and ruling.effect.queries_left < before.queries_left
    )


def _answer(tool: Tool, found: Called, effect: Effect, locked: Locked) -> Answer:
    """Read what a query gave, or that it gave nothing."""
    if found.error is not None:
        log.info("the query of %s failed: %s", effect.id, type(found.error).__name__)
        return NoAnswer(type(found.error).__name__)
    if found.end is not End.RETURNED:
        return NoAnswer(found.end.value)
    evidence = f"query:{effect.id}:{effect.token}"
    return read_answer(tool, found.value, effect, locked.view().run, evidence=evidence)


def ask_directly(
    function: Callable[..., Any],
    arguments: Any,
    context: ToolCall,
    limit_ms: int,
    in_time: Callable[[], bool] = at_any_time,
) -> Future[Called]:
    """Call in this thread what does not block for long; a coroutine that has to wait for anything
    has not answered in time.
    """

    def called() -> Called:
        if not in_time():
            return Called(End.TIMED_OUT, begun=False)
        found = function(arguments, context)
        if not inspect.iscoroutine(found):
            return Called(End.RETURNED, found)
        try:
            found.send(None)
        except StopIteration as ended:
            return Called(End.RETURNED, ended.value)
        found.close()
        return Called(End.TIMED_OUT)

    answer: Future[Called] = Future()
    try:
        answer.set_result(called())
    except Exception as error:
        answer.set_result(Called(End.RAISED, error=error))
    return answer
