"""The sweep: publish again what nobody holds, recover lost leases, end what is overdue, settle
doubt.

It works from what is overdue, never from which tick it is, so that it is correct with no beat, one
or several; each run that it touches is decided under that run's lock. A query is paid for before it
is asked and remembers the effect's token: an answer about an older attempt changes nothing.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from handrail.agent import protocol
from handrail.agent.canonical import normal
from handrail.agent.effects import (
    Absent,
    Answer,
    Applied,
    Effect,
    EffectStatus,
    NoAnswer,
    Pending,
    resolve,
)
from handrail.agent.errors import HandrailError, NotCanonical
from handrail.agent.protocol import Locked, Ruling
from handrail.agent.status import RunStatus
from handrail.agent.tools import Tool
from handrail.agent.workflow import Workflow
from handrail.broker.message import StepMessage
from handrail.ledger.database import ConnectionLost
from handrail.ledger.ledger import Ledger, Ruled
from handrail.tasks.calls import ToolCall
from handrail.tasks.runtime import DEFAULT_MAX_STALL_MS, message_of

log = logging.getLogger("handrail.reconciler")
BATCH: Final = 100
DEFAULT_MAX_ATTEMPTS: Final = 5
#: A run whose tool is not known here waits for a reconciler that knows it.
FOREIGN_PAUSE_MS: Final = 30_000

#: Runs a query under a time limit: `ask(function, arguments, call, limit_ms)`; raises what it
# raises.
Ask = Callable[[Callable[..., Any], Any, ToolCall, int], Any]


@dataclass(slots=True, kw_only=True)
class Reconciler:
    """What a sweep works with. `workflows` are those whose tools can be queried here."""

    ledger: Ledger
    workflows: dict[str, Workflow]
    publish: Callable[[Sequence[StepMessage]], object]
    ask: Ask
    max_stall_ms: int | None = DEFAULT_MAX_STALL_MS
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    jitter: Callable[[], float] = random.random
    counts: Counter[str] = field(default_factory=Counter)

    def sweep(self, *, limit: int = BATCH) -> int:
        """Look at up to `limit` runs that are due for it; returns how many there were."""
        woken = self.ledger.due_for_sweep(limit=limit)
        self._republish([run.run_id for run in woken if run.plain_due])
        for run in woken:
            if run.plain_due:
                continue
            try:
                self._look_at(run.run_id)
            except (HandrailError, ConnectionLost) as error:
                self.counts["failed"] += 1
                log.warning("run %s was not looked at (%s); the next sweep does", run.run_id, error)
            except Exception:  # one run at fault must not keep the others from being looked at
                self.counts["failed"] += 1
                log.exception("run %s was not looked at; the next sweep tries", run.run_id)
        return len(woken)

    def sweep_until_quiet(self, *, limit: int = BATCH, rounds: int = 1_000) -> int:
        """Sweep until nothing is due; returns how many runs were looked at."""
        total = 0
        for _ in range(rounds):
            found = self.sweep(limit=limit)
            total += found
            if found == 0:
                break
        return total

    def _republish(self, run_ids: Sequence[str]) -> None:
        due = self.ledger.republish(run_ids)
        self.counts["republished"] += len(due)
        self._send(message_of(step) for step in due)

    def _send(self, messages: Iterable[StepMessage]) -> None:
        batch = list(messages)
        if not batch:
            return
        try:
            self.publish(batch)
        except HandrailError as error:
            log.warning("%d steps were not published (%s); they stay due", len(batch), error.code)

    def _look_at(self, run_id: str) -> None:
        ruled = self.ledger.rule(
            run_id,
            lambda locked: protocol.wake(
                locked, max_attempts=self.max_attempts, max_stall_ms=self.max_stall_ms
            ),
        )
        if ruled.ruling is None:
            return
        self.counts[f"ruled:{ruled.ruling.state.status}"] += 1
        if ruled.due is not None:
            self._send([message_of(ruled.due)])
        if _owes_a_query(ruled):
            assert ruled.ruling.effect is not None
            self._query(run_id, ruled.locked, ruled.ruling.effect)

    # ---- doubt -----------------------------------------------------------------------------------

    def _query(self, run_id: str, locked: Locked, effect: Effect) -> None:
        tool = self._tool(locked, effect)
        if tool is None:
            self._not_known_here(run_id, effect)
            return
        sent_at = self.ledger.now()
        answer = self._answer(tool, effect, locked)
        self.counts[f"answer:{type(answer).__name__.lower()}"] += 1

        def decide(now_locked: Locked) -> Ruling | None:
            current = now_locked.effect
            if current is None or current.id != effect.id or current.token != effect.token:
                return None  # somebody was faster: this answer is about an older attempt
            if current.status is not EffectStatus.UNKNOWN:
                return None
            if now_locked.state.status is not RunStatus.RECONCILING:
                return None
            conclusion = resolve(
                current,
                answer,
                sent_at=sent_at,
                now=now_locked.now,
                max_stall_ms=self.max_stall_ms,
                jitter=self.jitter(),
            )
            ruling = protocol.concluded(now_locked, conclusion, max_stall_ms=self.max_stall_ms)
            self.counts[f"concluded:{type(conclusion).__name__}"] += 1
            return protocol.with_evidence(ruling, answer, sent_at)

        ruled = self.ledger.rule(run_id, decide)
        if ruled.due is not None:
            self._send([message_of(ruled.due)])

    def _answer(self, tool: Tool, effect: Effect, locked: Locked) -> Answer:
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
        )
        try:
            arguments = tool.contract.revive(dict(effect.arguments))
            found = self.ask(tool.query, arguments, context, effect.terms.call_ms)
        except Exception as error:
            log.info("the query of %s failed: %r", effect.id, error)
            return NoAnswer(type(error).__name__)
        return self._read(tool, found, effect, locked)

    def _read(self, tool: Tool, found: Any, effect: Effect, locked: Locked) -> Answer:
        """Read a query's answer as untrusted as any other: a record that is not ours proves
        nothing.
        """
        if found is None or isinstance(found, Absent):
            return Absent()
        if isinstance(found, Pending | NoAnswer):
            return found
        evidence = f"query:{effect.id}:{effect.token}"
        if isinstance(found, Applied):
            evidence, found = found.evidence, found.value
        try:
            value = tool.contract.check_output(found)
            run = locked.view().run
            arguments = tool.contract.revive(dict(effect.arguments))
            contract = tool.contract
            if contract.belongs_to is not None and not contract.belongs_to(value, run):
                return NoAnswer("record-of-another-subject")
            if contract.postcondition is not None and not contract.postcondition(arguments, value):
                return NoAnswer("record-does-not-fit")
        except NotCanonical:
            return NoAnswer("record-violates-contract")
        except Exception as error:
            log.info("the record of %s could not be judged: %r", effect.id, error)
            return NoAnswer("record-not-judged")
        return Applied(normal(value), evidence)

    def _tool(self, locked: Locked, effect: Effect) -> Tool | None:
        state = locked.state
        workflow = self.workflows.get(f"{state.workflow}@{state.workflow_version}")
        if workflow is None:
            return None
        return next((tool for tool in workflow.tools if tool.name == effect.tool), None)

    def _not_known_here(self, run_id: str, effect: Effect) -> None:
        """Give the query back: only who has the workflow's code can ask."""
        self.counts["foreign"] += 1
        self.ledger.rule(run_id, lambda locked: protocol.query_returned(locked, effect.token))


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


def ask_directly(
    function: Callable[..., Any], arguments: Any, call: ToolCall, limit_ms: int
) -> Any:
    """Ask a query that does not block for long, in this thread; coroutines are not for it."""
    found = function(arguments, call)
    if inspect.isawaitable(found):
        raise TypeError("this reconciler asks plain functions only")
    return found
