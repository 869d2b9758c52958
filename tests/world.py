"""A world for the ledger: either database, a clock that stands still, workers that die or pause
where a test says, and a service whose own records are the judge.

Faults enter through the ports: the worker's ledger, lock, model and tools, and the database's
connection. PostgreSQL's clock is ours too: a function of the same name stands before its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import psycopg
import pytest

from handrail.agent import review
from handrail.agent.budget import Budget, CallLimits
from handrail.agent.loop import AgentLoop
from handrail.agent.protocol import Locked, Ruling
from handrail.agent.stage import Stage
from handrail.agent.status import TERMINAL, TRANSITIONS, RunEvent, RunStatus
from handrail.agent.tools import FOREVER, Compensation, Tool
from handrail.agent.workflow import Workflow
from handrail.broker.message import StepMessage
from handrail.canonical import Json
from handrail.errors import ToolRefused, ToolUnclear
from handrail.fleet import Fleet
from handrail.ledger.database import Database
from handrail.ledger.ledger import Claim, DueStep, Ledger, StepEnd
from handrail.ledger.lock import Refusal
from handrail.ledger.migrate import create_all
from handrail.ledger.session import ConnectionLost
from handrail.reconciler.sweep import Reconciler, ask_directly
from handrail.runs import Run
from handrail.settings import Settings
from handrail.tasks.calls import ToolCall
from handrail.tasks.runtime import Runtime
from handrail.tasks.step import run_step
from handrail.testing.services import EmbeddedPostgres

_T = TypeVar("_T")


def look(**arguments: Json) -> dict[str, Json]:
    """A proposal to read."""
    return {"kind": "tool", "tool": "lookup", "arguments": arguments}


def save(**arguments: Json) -> dict[str, Json]:
    """A proposal to write; the intent is `save:<id>`."""
    return {"kind": "tool", "tool": "save", "arguments": arguments}


def save_for_goal(seen: Mapping[str, Any]) -> dict[str, Json]:
    """A proposal to write something of its own in every run: the intent is `save:<run id>`."""
    return save(id=seen["goal"])


START_MS: Final = 1_800_000_000_000
SECOND: Final = 1_000
LEASE_MS: Final = 30_000
STALL_MS: Final = 20_000
#: What a dispatched write may take at most until nothing can land any more, in these worlds.
SETTLED_MS: Final = 5_000 + STALL_MS + 5_000

_CLOCK: Final = (
    "CREATE TABLE test_clock (at bigint NOT NULL)",
    f"INSERT INTO test_clock VALUES ({START_MS})",
    "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE"
    " AS 'SELECT to_timestamp(at / 1000.0) FROM public.test_clock'",
)
_TABLES: Final = (
    "handrail_audit",
    "handrail_audit_head",
    "handrail_principal",
    "handrail_comment",
    "handrail_handoff",
    "handrail_consent",
    "handrail_approval_token",
    "handrail_approval",
    "handrail_evidence",
    "handrail_effect_holder",
    "handrail_effect",
    "handrail_output",
    "handrail_observation",
    "handrail_trace",
    "handrail_tool_allowance",
    "handrail_heartbeat",
    "handrail_workflow",
    "handrail_pause",
    "handrail_rewind",
    "handrail_run",
)


class Died(BaseException):
    """A worker is gone: nothing of what it held is given back."""


@dataclass(slots=True)
class Clock:
    """The world's time: the ledger's in milliseconds, and the workers' monotonic one."""

    ms: int = START_MS

    def now(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.ms / 1000


class TappedDatabase(Database):
    """A database whose statements are kept, and whose connection can be made to break."""

    statements: list[str]
    _lose_in: int | None = None
    _executed = False
    _only = ""
    _then: Callable[[], object] | None = None

    def lose(
        self,
        number: int,
        *,
        executed: bool,
        only: str = "",
        then: Callable[[], object] | None = None,
    ) -> None:
        """Break the connection at the n-th statement from now (of those that begin with `only`),
        before or after it took effect; `then` happens before anybody can look.
        """
        self._lose_in, self._executed, self._only, self._then = number, executed, only, then
        self.statements = []

    @property
    def lost(self) -> bool:
        """Whether the connection has broken as it was told to."""
        return self._lose_in == 0

    def _execute(
        self, connection: Any, sql: str, params: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        self.statements.append(" ".join(sql.split()))
        if not self._lose_in or not self.statements[-1].startswith(self._only):
            return super()._execute(connection, sql, params)
        self._lose_in -= 1
        if self._lose_in:
            return super()._execute(connection, sql, params)
        if self._executed:
            super()._execute(connection, sql, params)
        if self.postgres:
            connection.close()
        else:
            assert isinstance(connection, sqlite3.Connection)
            connection.rollback()
        if self._then is not None:
            self._then()
        if self.postgres:
            raise psycopg.OperationalError("the answer was lost")
        raise ConnectionLost("the answer was lost")


# ---- what a worker touches -----------------------------------------------------------------------


@dataclass(slots=True)
class Outside:
    """Every call that one worker makes to the outside, in order, each before and after.

    `then` is called at a place for which `when` holds: to die there, or to let the world go on
    while this worker is paused. A worker that is dead reaches nothing any more.
    """

    when: Callable[[str], bool] = lambda place: False
    then: Callable[[], object] = lambda: None
    places: list[str] = field(default_factory=list)
    dead: bool = False

    def at(self, place: str) -> None:
        if self.dead:
            raise Died
        self.places.append(place)
        if self.when(place):
            self.then()

    def die(self) -> None:
        self.dead = True
        raise Died


class Port:
    """A part whose calls pass a worker's `Outside`."""

    def __init__(self, part: Any, outside: Outside) -> None:
        self._part, self._outside = part, outside

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            shown = name
            if name == "rule":
                shown = "outcome" if "effect_id" in options else name
                shown = "checkpoint" if "plan" in options else shown
            self._outside.at(f"before {shown}")
            answer = found(*args, **options)
            self._outside.at(f"after {shown}")
            return answer

        return call


class ClockedLock:
    """The intent lock, on the world's clock: it outlives its holder, and can be flushed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.held: dict[str, tuple[str, int]] = {}
        self.away = False
        self._count = 0

    def acquire(self, effect_id: str, *, ttl_ms: int) -> str | Refusal:
        if self.away:
            return Refusal.UNREACHABLE
        holder = self.held.get(effect_id)
        if holder is not None and holder[1] > self._clock.ms:
            return Refusal.TAKEN
        self._count += 1
        self.held[effect_id] = (str(self._count), self._clock.ms + ttl_ms)
        return str(self._count)

    def release(self, effect_id: str, token: str) -> None:
        if self.held.get(effect_id, ("", 0))[0] == token:
            del self.held[effect_id]


# ---- the service ---------------------------------------------------------------------------------

#: How a write call goes: a word of `Service.execute`, or a function that takes its place.
Behaviour = str | Callable[[Any, ToolCall], Json]


@dataclass(slots=True)
class Service:
    """What the tools of these worlds call. Its records say what really happened.

    `script` holds how the next writes go, one word each: ok; lost (performed, the answer is lost);
    dropped (never arrives, no answer); late:<ms> (arrives so much later, no answer); hang (never
    arrives, nothing ends the call); refused; busy (refused, may be tried again); unclear (it does
    not know itself).
    """

    clock: Clock
    script: list[Behaviour] = field(default_factory=list)
    performed: list[str] = field(default_factory=list)  # intents, each time one took effect
    records: dict[str, Json] = field(default_factory=dict)  # by intent
    keys: dict[str, tuple[Json, int]] = field(default_factory=dict)  # receipt, known until
    air: list[tuple[int, Callable[[], object]]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)  # "<kind> <run id>"
    hidden: bool = False  # queries find nothing
    away: bool = False  # queries have no answer

    def arrive(self, call: ToolCall, arguments: Any, valid_ms: int, deadline: bool = False) -> Json:
        """A request reaches the service; with `deadline` it refuses one that is too late."""
        assert call.key is not None and call.intent_key is not None and call.not_after is not None
        if deadline and self.clock.ms > call.not_after:
            raise ToolRefused("too-late")
        known = self.keys.get(call.key)
        if known is not None and known[1] > self.clock.ms:
            return known[0]
        self.performed.append(call.intent_key)
        receipt: Json = {"receipt": len(self.performed), "of": call.intent_key}
        self.records[call.intent_key] = receipt
        if valid_ms:
            self.keys[call.key] = (receipt, self.clock.ms + valid_ms)
        return receipt

    def land(self) -> None:
        """Let the requests in the air arrive whose time has come."""
        now, self.air = self.air, []
        for landing, arrival in now:
            if landing > self.clock.ms:
                self.air.append((landing, arrival))
                continue
            with suppress(ToolRefused):  # nobody waits for it any more
                arrival()

    def execute(self, arguments: Any, call: ToolCall, valid_ms: int, deadline: bool) -> Json:
        """One write call, as the script says."""
        self.calls[f"write {call.run_id}"] += 1
        way = self.script.pop(0) if self.script else "ok"
        if callable(way):
            return way(arguments, call)
        word, _, detail = way.partition(":")
        if word in ("ok", "lost"):
            receipt = self.arrive(call, arguments, valid_ms, deadline)
            if word == "ok":
                return receipt
        elif word == "refused":
            raise ToolRefused("no-funds")
        elif word == "busy":
            raise ToolRefused("busy", retryable=True)
        elif word == "unclear":
            raise ToolUnclear("gateway-timeout")
        elif word == "hang":
            return None  # it arrives nowhere, and whoever sent it waits
        elif word == "late":
            landing = self.clock.ms + int(detail)
            self.air.append((landing, lambda: self.arrive(call, arguments, valid_ms, deadline)))
        else:
            assert word == "dropped", way
        raise ConnectionError("no answer")

    def query(self, arguments: Any, call: ToolCall) -> Json:
        """Whether an intent took effect: its record, or None."""
        self.calls[f"query {call.run_id}"] += 1
        assert call.intent_key is not None
        if self.away:
            raise ConnectionError("no answer")
        return None if self.hidden else self.records.get(call.intent_key)


# ---- the world -----------------------------------------------------------------------------------


class World:
    """A fleet on one ledger, driven by hand: nothing happens that a test does not make happen."""

    def __init__(self, url: str, *, max_stall_ms: int | None = STALL_MS) -> None:
        self.clock = Clock()
        self.url = url
        self.fleet = Fleet(settings=Settings(database_url=url, max_stall_ms=max_stall_ms))
        self.ledger = self._ledger()
        if self.database.in_memory:  # which has one connection
            create_all(self.database)
            self.control: Database = self.database
        else:
            self.control = Database(url, clock=self.clock.now)
        self.fleet.__dict__["ledger"] = self.ledger
        self.messages: list[StepMessage] = []
        self.lock = ClockedLock(self.clock)
        self.outside = Outside()
        self.service = Service(self.clock)
        self.reconciler = self.sweeper()
        self._runner = asyncio.Runner()
        self._home = threading.current_thread()
        self._move(START_MS)

    def _ledger(self) -> Ledger:
        numbers = itertools.count(1)
        ledger = Ledger(
            self.url,
            clock=self.clock.now,
            lease_ms=LEASE_MS,
            new_id=lambda: f"id-{next(numbers)}",
        )
        ledger.database = TappedDatabase(self.url, clock=self.clock.now)
        ledger.database.statements = []
        return ledger

    @property
    def database(self) -> TappedDatabase:
        """The database as the workers and the sweep reach it."""
        assert isinstance(self.ledger.database, TappedDatabase)
        return self.ledger.database

    @property
    def postgres(self) -> bool:
        """Which database this is."""
        return self.control.postgres

    def close(self) -> None:
        """Check what every run of this world has promised, and close what was opened."""
        try:
            for row in self.rows("SELECT id FROM handrail_run"):
                check(self, row["id"])
        finally:
            self._runner.close()
            self.ledger.close()
            self.control.close()

    # ---- time ------------------------------------------------------------------------------------

    def advance(self, ms: int) -> None:
        """Let time pass; requests that were in the air arrive."""
        self._move(self.clock.ms + ms)
        self.service.land()

    def _move(self, ms: int) -> None:
        self.clock.ms = ms
        if self.postgres:
            self.control.run("UPDATE test_clock SET at = :at", {"at": ms})

    # ---- declaring -------------------------------------------------------------------------------

    def read_tool(self, name: str = "lookup", **contract: Any) -> Tool:
        """A read: it answers with its arguments, and a number that is new each time."""

        async def execute(arguments: dict[str, Json], call: ToolCall) -> Json:
            outside = self.outside
            outside.at("before read tool")
            self.service.calls[f"read {call.run_id}"] += 1
            answer = f"found {json.dumps(arguments)} {self.service.calls.total()}"
            outside.at("after read tool")
            return answer

        return self.fleet.tool(name, side_effect="read", **contract)(execute)

    def write_tool(
        self,
        name: str = "save",
        *,
        key_valid_for_ms: int = FOREVER,
        query: bool = True,
        intent: Callable[[Any, Any], str] = lambda arguments, run: f"save:{arguments['id']}",
        **contract: Any,
    ) -> Tool:
        """A write, as `Service.script` says."""

        async def execute(arguments: dict[str, Json], call: ToolCall) -> Json:
            outside = self.outside
            outside.at("before write tool")
            hangs = self.service.script[:1] == ["hang"]
            deadline = bool(contract.get("not_after"))
            answer = self.service.execute(arguments, call, key_valid_for_ms, deadline)
            if hangs:
                await asyncio.Event().wait()
            outside.at("after write tool")
            return answer

        keyed = "idempotency-key" if key_valid_for_ms else "transaction"
        options = {
            "side_effect": "idempotent",
            "approval": "never",
            "guarantee": keyed,
            "key_valid_for_ms": key_valid_for_ms,
            "intent": intent,
            "takeover": "operations",
            **contract,
        }

        def find(arguments: dict[str, Json], call: ToolCall) -> Json:
            return self.service.query(arguments, call)

        return self.fleet.tool(name, query=find if query else None, **options)(execute)

    def compensable_tool(
        self,
        name: str = "save",
        *,
        undo: Mapping[str, Any] | None = None,
        original: Callable[..., Any] | None = None,
        arguments: Callable[..., Any] = lambda written, result, before, run: {"id": written["id"]},
        **contract: Any,
    ) -> Tool:
        """A write that is undone by another: the intent of that is `undo:<id>`."""
        intent = {"intent": lambda arguments, run: f"undo:{arguments['id']}"}
        undoing = self.write_tool(f"undo_{name}", **intent | dict(undo or {}))
        return self.write_tool(
            name,
            compensation=Compensation(tool=undoing, arguments=arguments, original=original),
            **{"side_effect": "compensable", **contract},
        )

    def workflow(
        self,
        *tools: Tool,
        plan: Sequence[Any] = (),
        name: str = "draft",
        stages: Sequence[Stage] | None = None,
        **options: Any,
    ) -> str:
        """A workflow of one loop, whose model goes through `plan` and then claims completion.

        It goes by the number of observations, so that whoever asks again gets the same proposal.
        """

        async def propose(seen: dict[str, Any]) -> Any:
            outside = self.outside
            outside.at("before model")
            self.service.calls[f"model {seen['goal']}"] += 1
            number = len(seen["observations"])
            proposal = plan[number] if number < len(plan) else {"kind": "complete", "answer": "ok"}
            proposal = proposal(seen) if callable(proposal) else proposal
            outside.at("after model")
            return proposal

        async def checked(claim: Json, call: ToolCall) -> bool:
            outside = self.outside
            outside.at("before verify")
            outside.at("after verify")
            return True

        self.fleet.model(name, propose)
        if stages is None:
            stages = [AgentLoop(name="loop", actions=tools, model=name, verify=checked)]
        self.fleet.workflow(Workflow(name=name, stages=stages, **options))
        return name

    # ---- runs ------------------------------------------------------------------------------------

    def start(
        self,
        workflow: str = "draft",
        *,
        budget: Budget | Mapping[str, Any] | None = None,
        limits: CallLimits | None = None,
        run_id: str | None = None,
        **options: Any,
    ) -> str:
        """Accept a run; its goal is its id, so that the model's calls can be counted."""
        run_id = run_id or f"run-{len(self.rows('SELECT id FROM handrail_run')) + 1}"
        return self.fleet.enqueue(
            workflow, goal=run_id, run_id=run_id, budget=budget, limits=limits, **options
        )

    def message(self, run_id: str) -> StepMessage:
        """A message about a run as it is now."""
        row = self.row(run_id)
        return StepMessage(run_id=run_id, step=row["step"], epoch=row["epoch"])

    def worker(self, outside: Outside | None = None) -> Runtime:
        """A worker process; with `outside`, one whose ledger and lock are reached through it."""
        runtime = self.fleet.make_runtime(publish=self.messages.extend, lock=self.lock)
        if outside is not None:
            runtime.ledger = cast(Ledger, Port(self.ledger, outside))
            runtime.lock = cast(Any, Port(self.lock, outside))
        runtime.renews = runtime.threads = False
        runtime.clock = self.clock.monotonic
        runtime.chance = lambda: 0.5
        return runtime

    def sweeper(self, outside: Outside | None = None) -> Reconciler:
        """A reconciler that asks in this thread, without jitter; with `outside`, one whose ledger
        and lock are reached through it.
        """
        reconciler = self.fleet.make_reconciler(publish=self.messages_extend, lock=self.lock)
        reconciler.ask = ask_directly
        reconciler.jitter = lambda: 0.0
        reconciler.clock = self.clock.monotonic
        if outside is not None:
            reconciler.ledger = cast(Ledger, Port(self.ledger, outside))
            reconciler.lock = cast(Any, Port(self.lock, outside))
        return reconciler

    def sweep(self, outside: Outside) -> None:
        """Let a reconciler sweep once, which may die or pause as `outside` says."""
        before, self.outside = self.outside, outside
        try:
            sweeper = self.sweeper(outside)
            sweeper.sweep()
            sweeper.finish()  # also what took longer than a sweep
        except Died:
            assert outside.dead
        finally:
            self.outside = before

    def messages_extend(self, messages: Sequence[StepMessage]) -> None:
        """What the sweep publishes with."""
        self.messages.extend(messages)

    def step(
        self,
        run_id: str,
        *,
        message: StepMessage | None = None,
        outside: Outside | None = None,
        runtime: Runtime | None = None,
    ) -> Runtime:
        """Let a worker take one message of a run; returns the worker."""
        outside = outside or Outside()
        before, self.outside = self.outside, outside
        runtime = runtime or self.worker(outside)
        try:
            # A worker that is paused in a call holds this thread's event loop: its fellows run
            # in threads of their own.
            run = self._runner.run if threading.current_thread() is self._home else asyncio.run
            run(run_step(runtime, message or self.message(run_id)))
        except Died:
            assert outside.dead
        finally:
            self.outside = before
        return runtime

    def meanwhile(self, act: Callable[[], _T]) -> _T:
        """Do something in another thread, while a worker of this one is paused in a call."""
        found: list[_T] = []
        failed: list[BaseException] = []
        outside, self.outside = self.outside, Outside()

        def work() -> None:
            try:
                found.append(act())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.outside = outside
        if failed:
            raise failed[0]
        return found[0]

    def drive(self, run_id: str, *others: str, rounds: int = 300) -> Run:
        """Let the fleet go on, from event to event, until the run rests (and the others do)."""
        runs = (run_id, *others)
        for _ in range(rounds):
            busy = [run for run in runs if not self.fleet.get(run).rests]
            if not busy:
                return self.fleet.get(run_id)
            due = [run for run in busy if self._is_due(run)]
            for run in due:
                self.step(run)
            if not due:
                self.sweep_when_due(*busy)
        raise AssertionError(f"no rest: {[self.fleet.get(run) for run in runs]}")

    def _is_due(self, run_id: str) -> bool:
        row = self.row(run_id)
        free = row["lease_until"] is None and row["cancel_requested_at"] is None
        return free and row["due_at"] is not None and row["due_at"] <= self.clock.ms

    def sweep_when_due(self, *run_ids: str) -> None:
        """Let time pass until the sweep has to look at one of the runs, and sweep."""
        wakes = [self.row(run_id)["wake_at"] for run_id in run_ids]
        assert None not in wakes, "nobody will ever look at this run"
        self.advance(max(0, min(wakes) - self.clock.ms))
        self.reconciler.sweep()

    # ---- looking ---------------------------------------------------------------------------------

    def rows(self, sql: str, **params: Any) -> list[dict[str, Any]]:
        """Read beside the fleet."""
        return self.control.run(sql, params)

    def row(self, run_id: str) -> dict[str, Any]:
        """A run's row."""
        return self.rows("SELECT * FROM handrail_run WHERE id = :id", id=run_id)[0]

    def effect(self, intent_key: str) -> dict[str, Any]:
        """An effect's row."""
        (row,) = self.rows("SELECT * FROM handrail_effect WHERE intent_key = :key", key=intent_key)
        return row

    def trace(self, run_id: str, kind: str | None = None) -> list[dict[str, Any]]:
        """A run's trace, or its events of one kind."""
        return [e for e in self.ledger.trace(run_id) if kind is None or e["type"] == kind]

    def claim(self, run_id: str, epoch: int | None = None) -> Claim | None:
        """Claim a run's step for a worker that is not simulated any further."""
        row = self.row(run_id)
        known = [f"{row['workflow']}@{row['workflow_version']}"]
        at = row["epoch"] if epoch is None else epoch
        return self.ledger.claim(run_id, at, holder="a worker", known=known)

    def commit(self, claim: Claim, ruling: Ruling) -> DueStep | bool:
        """End a claimed step with a ruling; False: nothing was written."""
        [done] = self.ledger.commit_each([StepEnd(claim, ruling, claim.phase)])
        assert not isinstance(done, BaseException), done
        return done

    def rule(self, run_id: str, decide: Callable[[Locked], Ruling | None]) -> Ruling | None:
        """Decide about a run under its lock."""
        return self.ledger.rule(run_id, decide).ruling

    def used(self, run_id: str) -> dict[str, int]:
        """What a run was charged."""
        return dict(self.fleet.get(run_id).budget_used)


# ---- what every run has promised -----------------------------------------------------------------


def check(world: World, run_id: str) -> None:
    """Hold a run against the promises that no fault may break."""
    row, events = world.row(run_id), world.trace(run_id)
    status = RunStatus(row["status"])
    assert [event["seq"] for event in events] == list(range(len(events))), "the trace has a gap"
    assert replayed(events) == row["traced_status"]
    assert review.findings(events) == []
    assert status == row["traced_status"] or row["lease_until"] is not None
    if status in TERMINAL:
        assert (row["lease_until"], row["due_at"], row["wake_at"]) == (None, None, None)
        stops = _last_episode(events)
        assert len(stops) == 1, f"{len(stops)} stops after the last resume"
        assert stops[0]["detail"]["reason"] == row["reason"]
    unresolved = world.rows(
        "SELECT status FROM handrail_effect WHERE owner_run_id = :id"
        " AND status IN ('dispatched', 'unknown', 'compensating')",
        id=run_id,
    )
    assert not unresolved or status not in TERMINAL, f"{status} over {unresolved}"
    assert not row["compensations_reserved"] or status not in TERMINAL
    _check_compensation(world, row)
    calls, used = world.service.calls, world.used(run_id)
    assert calls[f"model {run_id}"] <= used["model_calls"]
    assert calls[f"read {run_id}"] + calls[f"write {run_id}"] <= used["tool_calls"]


def _check_compensation(world: World, row: Mapping[str, Any]) -> None:
    """What a run undoes is undone if and only if its compensation is proved."""
    by_a_person = world.rows(
        "SELECT 1 AS found FROM handrail_handoff WHERE run_id = :id AND resolution = 'compensated'",
        id=row["id"],
    )
    if row["undoing_effect_id"] is None:
        assert row["status"] != "compensated" or by_a_person
        return
    found = "SELECT status FROM handrail_effect WHERE id = :id"
    (undone,) = world.rows(found, id=row["undoing_effect_id"])
    (by,) = world.rows(found, id=row["effect_id"])
    if row["status"] == "compensated":
        assert undone["status"] == "compensated"
        assert by["status"] == "applied" or by_a_person
    elif row["status"] == "reconciling":
        assert undone["status"] == "compensating"
    else:
        assert undone["status"] != "compensating", row["status"]


def _last_episode(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    resumes = [n for n, event in enumerate(events) if event["type"] == "run.resumed"]
    following = events[resumes[-1] if resumes else 0 :]
    return [event for event in following if event["type"] == "run.stopped"]


def replayed(events: Sequence[Mapping[str, Any]]) -> str:
    """Go through the moves that a trace holds, each by the transition table."""
    status = RunStatus.QUEUED
    for event in events:
        detail = event["detail"]
        if "event" in detail and "from" in detail:
            assert detail["from"] == status, f"{event} follows {status}"
            status = TRANSITIONS[status][RunEvent(detail["event"])]
            assert detail.get("to", detail.get("status")) == status
    return status


# ---- databases -----------------------------------------------------------------------------------

KINDS: Final = ("sqlite", "postgres")
_template: list[bytes] = []
_worlds: dict[str, str] = {}  # a server's address: that of its database


@contextmanager
def open_world(request: pytest.FixtureRequest, **options: Any) -> Iterator[World]:
    """Open an empty world on the database that the fixture's parameter names."""
    kind = getattr(request, "param", "sqlite")
    if kind == "postgres":
        url = _postgres_url(request.getfixturevalue("postgres"))
    else:
        url = _sqlite_url(request.getfixturevalue("tmp_path"))
    world = World(url, **options)
    try:
        yield world
    except BaseException:
        world._runner.close()
        world.ledger.close()
        world.control.close()
        raise
    world.close()


def _sqlite_url(place: Path) -> str:
    file = place / "ledger.db"
    if not _template:
        database = Database(f"sqlite:///{file}")
        create_all(database)
        database.close()
        _template.append(file.read_bytes())
    file.write_bytes(_template[0])
    return f"sqlite:///{file}"


def clear(database: Database) -> None:
    """Empty the ledger's tables."""
    for table in _TABLES:
        database.run(f"DELETE FROM {table}", {})


def _postgres_url(server: EmbeddedPostgres) -> str:
    address = server.url()
    if address not in _worlds:
        url = _worlds[address] = server.create_database("worlds")
        database = Database(url)
        create_all(database)
        for statement in _CLOCK:
            database.run(statement, {})
        database.run("ALTER DATABASE worlds SET search_path = public, pg_catalog", {})
        database.close()
    database = Database(_worlds[address])
    clear(database)
    database.close()
    return _worlds[address]
