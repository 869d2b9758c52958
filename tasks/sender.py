"""A write whose dispatch is committed: who sends it, until when, and how its answer is told.

A step's worker sends the writes of its run and the sweep their compensations, both in this way. It
is sent under the effect's key, while the effect is as it was dispatched, and not after its deadline
by a monotonic clock that was read before the dispatch was. What comes back is told for as long as
the ledger may be away: the effect's token judges it, however late. A call that was given up is
listened for; a receipt that comes of it then is evidence.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from handrail import tracing
from handrail.agent import protocol
from handrail.agent.budget import Phase
from handrail.agent.loop import observation_of
from handrail.agent.machine import RunState
from handrail.agent.protocol import Go, Outcome
from handrail.agent.stage import End, Refused, Reply, Succeeded
from handrail.agent.tools import Tool
from handrail.agent.workflow import Workflow
from handrail.ledger.errors import DatabaseUnavailable, EffectForgotten, UnknownRun
from handrail.ledger.ledger import Ledger, Ruled
from handrail.ledger.session import ConnectionLost
from handrail.tasks.calls import Called, ToolCall
from handrail.tasks.judge import NOT_CONFIRMED, confirms, judged

log = logging.getLogger("handrail.tasks")
#: How long a sender holds on to an outcome while the ledger is away, in all about half a minute.
OUTCOME_PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
#: How long a write waits before it tries again for a lock that was taken or unreachable.
LOCK_PAUSE_MS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One attempt of a write. `deadline` is by `clock`, which is monotonic, in seconds; `phase`
    says what the run's next claim has to pay for.
    """

    ledger: Ledger
    workflow: Workflow
    state: RunState
    tool: Tool
    arguments: Any
    go: Go
    deadline: float
    clock: Callable[[], float]
    phase: Callable[[RunState], Phase] | None = None
    traceparent: str | None = None  # of the run

    # ---- before it is sent -----------------------------------------------------------------------

    @property
    def left_ms(self) -> int:
        """How long the call may still take."""
        return whole_ms(self.deadline - self.clock())

    def in_time(self) -> bool:
        """Whether it may be sent now; to be asked right before."""
        return self.clock() < self.deadline

    def is_mine(self) -> bool:
        """Whether the effect is still as it was dispatched: nobody has taken it over. While the
        ledger cannot say so, it is not: then nothing is sent.
        """
        sent = self.go.effect
        try:
            now = self.ledger.effect(sent.id)
        except (ConnectionLost, DatabaseUnavailable, EffectForgotten) as error:
            log.warning("%s is not sent: the ledger was asked in vain (%s)", sent.id, error)
            return False
        as_sent = (sent.token, sent.dispatcher, sent.status)
        return (now.token, now.dispatcher, now.status) == as_sent

    def context(self, limit_ms: int) -> ToolCall:
        """What the tool's function is told."""
        state, effect = self.state, self.go.effect
        return ToolCall(
            run_id=state.run_id,
            tenant=state.tenant,
            principal=state.principal,
            tool=self.tool.name,
            timeout_ms=limit_ms,
            key=effect.id,
            intent_key=effect.intent_key,
            not_after=self.go.deadline_at,
            attempt=effect.attempts,
            facts=state.outputs,
            traceparent=tracing.below(self.traceparent, effect.id, effect.token),
        )

    # ---- what it comes to ------------------------------------------------------------------------

    def judged(self, done: Called) -> tuple[End, Reply | None]:
        """Judge what the call gave."""
        return judged(self.tool.contract, self.arguments, done, self.state.facts)

    def to_be_confirmed(self, reply: Reply | None) -> bool:
        """Whether this is a receipt that is believed only once the service's record says so."""
        return isinstance(reply, Succeeded) and self.tool.contract.confirmed_by_query

    def confirmed(self, receipt: Reply | None, found: Called) -> Reply | None:
        """Judge a receipt by what the tool's query has found."""
        fits = confirms(self.tool.contract, self.arguments, found, self.state.facts)
        return receipt if fits else NOT_CONFIRMED

    def tell(
        self, end: End, reply: Reply | None, *, bound: bool = False, sent: bool = True
    ) -> Ruled:
        """Commit what is known of the attempt. `sent=False`: it never left."""
        effect = self.go.effect
        evidence_id = f"receipt:{secrets.token_hex(8)}"
        out = Outcome(
            effect.id, effect.token, end, reply, bound, sent, evidence_id, effect.dispatcher
        )
        digest = None
        if isinstance(reply, Succeeded | Refused):
            digest = observation_of(self.tool.contract, reply).digest
        return tell_outcome(
            self.ledger,
            self.state.run_id,
            self.workflow,
            out,
            known_digest=digest,
            phase=self.phase,
        )

    def patiently(self, tell: Callable[[], object], pauses_s: Sequence[float]) -> Iterator[float]:
        """Tell it although the ledger may be away for a while: nobody else knows the outcome.

        Yields how long to wait before the next try; what the last one raises is the caller's.
        """
        for pause_s in pauses_s:
            try:
                tell()
                return
            except (ConnectionLost, DatabaseUnavailable) as error:
                log.warning("the outcome of %s is not stored yet (%s)", self.go.effect.id, error)
            yield pause_s
        tell()

    def listen(self, late: asyncio.Future[Any], tell: Callable[[End, Reply], object]) -> None:
        """Wait for what a call that was given up may still say; to be called on its loop."""

        def heard(work: asyncio.Future[Any]) -> None:
            if work.cancelled() or work.exception() is not None:
                return
            end, reply = self.judged(Called(End.RETURNED, work.result()))
            if not isinstance(reply, Succeeded):
                return
            if self.to_be_confirmed(reply):
                reply = NOT_CONFIRMED  # its query is the reconciler's by now
            try:
                tell(end, reply)
            except (ConnectionLost, DatabaseUnavailable) as error:
                log.warning("late evidence for %s was not stored (%s)", self.go.effect.id, error)

        late.add_done_callback(heard)


def tell_outcome(
    ledger: Ledger,
    run_id: str,
    workflow: Workflow,
    out: Outcome,
    *,
    known_digest: str | None,
    phase: Callable[[RunState], Phase] | None = None,
) -> Ruled:
    """Commit what a sender knows of its attempt, for the run that owns the effect by now.

    Raises `UnknownRun` or `EffectForgotten` where the ledger was set back to before it.
    """
    while True:
        try:
            ruled = ledger.rule(
                run_id,
                lambda locked: protocol.outcome(locked, workflow, out),
                effect_id=out.effect_id,
                known_digest=known_digest,
                phase=phase,
            )
        except (UnknownRun, EffectForgotten):
            # Nothing is left that it could be written to; the key leads to it in the service.
            log.error("%s %s, which the ledger has forgotten", out.effect_id, out.end.value)
            raise
        if ruled.ruling is not None:
            return ruled
        effect = ruled.locked.effect
        assert effect is not None and effect.owner_run_id is not None
        run_id = effect.owner_run_id  # has sent the intent again: its row decides
        phase = None


def whole_ms(seconds: float) -> int:
    """Whole milliseconds of a difference of two readings of the clock.

    Such a difference is a trifle off: 0.001 s must not become 0 ms.
    """
    return int(round(seconds * 1000, 3))
