"""What one process needs to run steps: the ledger, the workflows, the models, the lock, and who is
at work.

Leases of all steps of the process are renewed by one statement a second from a thread of its own,
whose answer also brings wishes to cancel; the broker's cancel signal only makes that faster. The
same thread says now and then which versions of workflows are here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from handrail.agent.workflow import Workflow
from handrail.broker.message import StepMessage, message_of
from handrail.errors import HandrailError, InvalidDefinition
from handrail.gateway.model import ModelGateway
from handrail.ledger.ledger import Claim, DueStep, Ledger, StepEnd
from handrail.ledger.lock import IntentLock
from handrail.ledger.session import ConnectionLost
from handrail.tasks.together import Together

log = logging.getLogger("handrail.tasks")
RENEW_EVERY_S: Final = 1.0
DEFAULT_MAX_STALL_MS: Final = 20_000


@dataclass(eq=False, slots=True)
class Handle:
    """A step at work in this process."""

    claim: Claim
    wish: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    until: int  # the lease is never renewed beyond this instant of the ledger's clock
    ends: float  # by the runtime's clock, in seconds: until then the lease is surely ours
    writing: bool = False  # a dispatch was committed: only its outcome ends the step
    tool_unused: bool = True  # the claim's reserved tool call has not been started
    task: asyncio.Task[None] | None = None
    lost: bool = False

    def cancel(self) -> None:
        """Let the step see the wish; from any thread."""

        def seen() -> None:
            if not self.wish.done():
                self.wish.set_result(None)

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(seen)


class Draining(Exception):
    """This process claims nothing more: the step is another worker's."""


Publish = Callable[[Sequence[StepMessage]], object]


@dataclass(slots=True, kw_only=True)
class Runtime:
    """The parts that a step works with; one a process. `clock` is monotonic, in seconds."""

    ledger: Ledger
    workflows: dict[str, Workflow]
    models: Mapping[str, ModelGateway]
    lock: IntentLock
    publish: Publish
    max_stall_ms: int | None = DEFAULT_MAX_STALL_MS
    renews: bool = True
    threads: bool = True  # whether the lock may be asked in a thread
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random  # in [0, 1): the jitter of pauses
    holder: str = field(
        default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    )
    at_work: dict[str, Handle] = field(default_factory=dict)  # by claim id
    counts: Counter[str] = field(default_factory=Counter)
    draining: bool = False
    claims: Together[StepMessage, Claim | None] = field(init=False)
    ends: Together[StepEnd, bool] = field(init=False)  # False: nothing was written
    _renewal: threading.Thread | None = None
    _saying: Callable[[], bool] | None = None
    _say_every_s: float = 0.0
    _say_at: float = 0.0
    _others: bool = False  # other workers have versions of workflows that are not here
    _not_ours: set[str] = field(default_factory=set)  # runs that may be of one of these
    _sayer: int = 0  # the process that says it; none that was forked from it does
    _stop: bool = False
    _hurry: threading.Event = field(default_factory=threading.Event)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.claims = Together(self._claim)
        self.ends = Together(self._end)

    def workflow(self, name: str, version: str) -> Workflow:
        """Return the pinned version of a workflow."""
        found = self.workflows.get(f"{name}@{version}")
        if found is None:
            raise InvalidDefinition(f"workflow {name!r}", f"version {version!r} is not known here")
        return found

    def send(self, *due: DueStep | None) -> None:
        """Publish steps that are due. A failure is normal: the row is the outbox, the sweep
        repeats it.
        """
        messages = [message_of(step) for step in due if step is not None]
        if not messages:
            return
        try:
            self.publish(messages)
        except HandrailError as error:
            self.counts["publish-failed"] += len(messages)
            for message in messages:
                log.warning(
                    "a step of run %s was not published (%s); the sweep repeats it",
                    message.run_id,
                    error.code,
                )

    # ---- what steps ask together -----------------------------------------------------------------

    def _claim(self, messages: Sequence[StepMessage]) -> Sequence[Claim | BaseException | None]:
        if self.draining:
            raise Draining
        known = self.workflows.keys()
        if len(messages) == 1:
            hint = messages[0]
            claims: Sequence[Claim | BaseException | None] = [
                self.ledger.claim(hint.run_id, hint.epoch, holder=self.holder, known=known)
            ]
        else:
            due = [(hint.run_id, hint.epoch) for hint in messages]
            claims = self.ledger.claim_each(due, holder=self.holder, known=known)
        for hint, claim in zip(messages, claims, strict=True):
            if claim is None:
                self._not_claimed(hint)
        return claims

    def _end(self, ends: Sequence[StepEnd]) -> list[bool | BaseException]:
        """Commit, and publish what is due at once: whoever asked may have been told to stop."""
        done = self.ledger.commit_each(ends)
        self.send(*(step for step in done if isinstance(step, DueStep)))
        return [step if isinstance(step, BaseException) else step is not False for step in done]

    # ---- who is at work --------------------------------------------------------------------------

    def enter(self, handle: Handle) -> None:
        """Take a step into the renewal of leases."""
        with self._guard:
            self.at_work[handle.claim.claim_id] = handle
            self._start_renewal()

    def _start_renewal(self) -> None:
        # (A process that was forked has the thread's object, but not the thread.)
        if self.renews and (self._renewal is None or not self._renewal.is_alive()):
            self._renewal = threading.Thread(
                target=self._renew_for_ever, daemon=True, name="handrail-leases"
            )
            self._renewal.start()

    def be_seen(self, say: Callable[[], bool], *, every_s: float) -> None:
        """From now on, say every so often which versions of workflows are here; until it drains.

        What is said returns whether other workers have versions that are not here.
        """
        with self._guard:
            self._saying, self._say_every_s, self._say_at = say, every_s, self.clock()
            self._sayer = os.getpid()
            self._start_renewal()

    def _say(self) -> None:
        if self._saying is None or self.draining or self._sayer != os.getpid():
            return
        if self.clock() >= self._say_at:
            self._say_at = self.clock() + self._say_every_s
            self._others = self._saying()
        with self._guard:
            others, self._not_ours = self._not_ours, set()
        if others:  # not at once: whoever has published them has yet to count that
            self.ledger.catalog.pass_on(others, known=self.workflows.keys())

    def _not_claimed(self, hint: StepMessage) -> None:
        """A message led to nothing: its run may be of a version that another worker has."""
        if self._others:
            with self._guard:
                self._not_ours.add(hint.run_id)

    def leave(self, handle: Handle) -> None:
        """A step has ended."""
        with self._guard:
            self.at_work.pop(handle.claim.claim_id, None)

    def cancel_signalled(self, run_id: str) -> None:
        """The broker says that a cancel was wished: look at the ledger at once; only its row
        counts.
        """
        with self._guard:
            ours = any(h.claim.run_id == run_id for h in self.at_work.values())
        if ours:
            self._hurry.set()

    def renew(self) -> None:
        """Renew the leases of all steps at work in one statement, and learn of wishes and
        losses.
        """
        with self._guard:
            handles = list(self.at_work.values())
        self._renew(handles)

    def _renew(self, handles: Sequence[Handle]) -> None:
        held = [(h.claim.run_id, h.claim.claim_id, h.until) for h in handles]
        asked = self.clock()
        answers = self.ledger.renew(held)
        for handle in handles:
            if handle.claim.claim_id not in answers:
                handle.lost = True  # its commit will be refused; a write is judged by its token
                continue
            wished = answers[handle.claim.claim_id]
            if wished is None:
                continue  # somebody is at its row: its turn comes again
            handle.ends = asked + self.ledger.lease_ms / 1000
            if wished:
                handle.cancel()

    def may_start(self, handle: Handle, *, reserved: bool = False) -> bool:
        """Whether a step may start one more call; with `reserved`, the claim's tool call is used
        for it.

        A worker that was paused beyond its lease asks the ledger whether it was taken over.
        """
        if self.clock() >= handle.ends:
            self._renew([handle])
        with self._guard:
            if handle.lost or self.clock() >= handle.ends:
                return False
            handle.tool_unused = handle.tool_unused and not reserved
            return True

    def _renew_for_ever(self) -> None:
        every_s = min(RENEW_EVERY_S, self.ledger.lease_ms / 3_000)  # in time for a short lease too
        while not self._stop:
            self._hurry.wait(every_s)
            self._hurry.clear()
            try:
                self.renew()
                self._say()
            except (HandrailError, ConnectionLost) as error:
                log.warning("leases were not renewed (%s); trying again", error)
            except Exception:
                log.exception("leases were not renewed; trying again")

    # ---- going away ------------------------------------------------------------------------------

    def give_back(self, handle: Handle) -> None:
        """Give back a claim of which nothing was used; its step is published again."""
        claim_id = handle.claim.claim_id
        handle.lost = True
        due = self.ledger.give_back([claim_id], unused=[claim_id], holder=self.holder)
        self.send(*due)

    def drain(self, timeout_s: float) -> int:
        """Stop in order: claim nothing more, finish writes, give back the rest in one statement.

        Returns how many leases were given back; their steps are published again.
        """
        self.draining = True
        with self._guard:
            rest = [h for h in self.at_work.values() if not h.writing]
            unused = [h.claim.claim_id for h in rest if h.tool_unused]
            for handle in rest:  # what is given back as unused must not be used after all
                handle.lost = True
        due: list[DueStep] = []
        try:
            due = self.ledger.give_back(
                [h.claim.claim_id for h in rest], unused=unused, holder=self.holder
            )
        except (HandrailError, ConnectionLost) as error:
            log.warning("leases were not given back (%s); they run out", error)
        for handle in rest:
            task = handle.task
            if task is not None and not handle.writing:
                handle.loop.call_soon_threadsafe(task.cancel)
        for step in due:
            self.send(step)
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            with self._guard:
                if not any(h.writing for h in self.at_work.values()):
                    break
            time.sleep(0.02)
        return len(due)

    def close(self) -> None:
        """End the renewal of leases."""
        self._stop = True
        self._hurry.set()
        if self._renewal is not None:
            self._renewal.join(timeout=5)
