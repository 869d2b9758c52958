"""The ports: database, ledger, lock, broker, model and tools as the simulated fleet reaches them.

Each passes its fault points on the way, and tells the judge what has become durable. The product's
own code runs between them unchanged: faults enter here and nowhere else.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import redis

from handrail.agent.protocol import Locked, Ruling
from handrail.broker.message import StepMessage
from handrail.canonical import Json
from handrail.errors import ToolUnclear
from handrail.gateway.model import RAW, ModelEvent, ModelRequest, Stop, Text, ToolCall
from handrail.ledger import lock as lock_module
from handrail.ledger.database import Database
from handrail.ledger.ledger import Ledger, Ruled
from handrail.ledger.lock import RedisLock
from handrail.ledger.people import People
from handrail.ledger.session import ConnectionLost
from handrail.tasks import calls
from tests.simulator import points
from tests.simulator.points import AFTER, BEFORE, COMMITTED, INSIDE, Point
from tests.simulator.service import CANARY, UNDO, Kind, Service, Way

if TYPE_CHECKING:
    from tests.simulator.ground import Ground


_NOBODY_ELSE: Final = nullcontext()
#: When the step that is at work has last looked at its clock, by the ledger's time.
LOOKED_AT: Final[ContextVar[int]] = ContextVar("looked at", default=0)


class SimDatabase(Database):
    """The ledger's database: one SQLite connection in memory, which every actor shares.

    Nobody stands still in an open transaction; dying in one rolls it back, as losing the connection
    does.
    """

    def __init__(self, ground: Ground, connection: sqlite3.Connection) -> None:
        super().__init__("sqlite://", clock=ground.now)
        self._ground = ground
        self._shared = connection

    def _serialised(self) -> AbstractContextManager[object]:
        return _NOBODY_ELSE  # one strand runs at a time

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run one statement in autocommit, between its points."""
        schedule = self._ground.schedule
        point = schedule.current.point
        if point is None or not _writes(sql):
            schedule.at_database(points.LOOK, BEFORE)
            return super().run(sql, params)
        schedule.at_database(point, BEFORE)
        rows = super().run(sql, params)
        if point is points.CLAIM and not rows:
            schedule.tally.stale["claim"] += 1
        schedule.judge.wrote(point, params, rows)
        schedule.at_database(point, COMMITTED)
        return rows

    def _execute(
        self, connection: Any, sql: str, params: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        schedule = self._ground.schedule
        actor = schedule.current
        point = actor.point
        if point is None:  # whoever reads beside the fleet
            return super()._execute(connection, sql, params)
        if sql == "BEGIN IMMEDIATE":
            schedule.at_database(point, BEFORE)
            actor.written = []
            return super()._execute(connection, sql, params)
        if sql == "COMMIT":
            try:
                schedule.at_database(point, INSIDE)
            except ConnectionLost:
                connection.rollback()
                raise
            super()._execute(connection, sql, params)
            for statement in actor.written or ():
                schedule.judge.wrote(point, *statement)
            actor.written = None
            ruled, actor.ruled = actor.ruled, None
            if ruled is not None:
                schedule.judge.ruled(point, *ruled)
            schedule.at_database(point, COMMITTED)
            return []
        rows = super()._execute(connection, sql, params)
        if actor.written is not None and _moves_a_run(sql):
            if rows:
                actor.written.append((params, rows))
            else:
                schedule.tally.stale[point.name] += 1
        return rows


@cache
def _writes(sql: str) -> bool:
    return sql.lstrip().startswith(("UPDATE", "INSERT"))


@cache
def _moves_a_run(sql: str) -> bool:
    return sql.lstrip().startswith("UPDATE handrail_run")


#: Which decision of the product is which point, by the name of the function that decides.
DECISIONS: Final[Mapping[str, Point]] = {
    "_Step._checkpoint.<locals>.decide": points.CHECKPOINT,
    "_Step._dispatch.<locals>.decide": points.DISPATCH,
    "tell_outcome.<locals>.<lambda>": points.OUTCOME,
    "_Step._rule_mine.<locals>.<lambda>": points.GIVE_BACK,
    "_Step._cancelled_or_lost.<locals>.decide": points.UNDER_WISH,
    "Ledger._commit_by_rule.<locals>.decide": points.PARK,
    "Reconciler._look_at.<locals>.decide": points.WAKE,
    "Reconciler._conclude.<locals>.decide": points.VERDICT,
    "Reconciler._query.<locals>.<lambda>": points.RETURNED,
    "Compensator._plan.<locals>.<lambda>": points.UNDO_PLAN,
    "Compensator._dispatch.<locals>.decide": points.UNDO_DISPATCH,
    "Compensator._send.<locals>.<lambda>": points.UNDO_WAITS,
    "Compensator.begin.<locals>.<lambda>": points.UNDO_WAITS,
    "cancel": points.CANCEL,
    "_cancelled_by": points.CANCEL,
    "_count.<locals>.decide": points.REPORT,
    "Desk.approve.<locals>.<lambda>": points.DECIDE,
    "Desk.reject.<locals>.<lambda>": points.DECIDE,
    "Desk.answer.<locals>.decide": points.DECIDE,
    "Desk._look.<locals>.<lambda>": points.LOOK,
    "Desk._resolve.<locals>.decide": points.RESOLVE,
    "Desk._asked.<locals>.keep": points.NOTE,
}


def _decided_at(decide: Any) -> Point:
    return DECISIONS[getattr(decide, "func", decide).__qualname__]


_METHODS: Final[Mapping[str, Point]] = {
    "insert_run": points.ACCEPT,
    "claim": points.CLAIM,
    "claim_each": points.CLAIM,
    "commit_each": points.COMMIT,
    "charge_more": points.CHARGE,
    "charge_tool": points.CHARGE,
    "renew": points.RENEW,
    "give_back": points.DRAIN,
    "due_for_sweep": points.DUE,
    "published": points.MARK,
    "beat": points.BEAT,
    "effect": points.LOOK,
    "read": points.LOOK,
    "observed": points.LOOK,
    "find_effect": points.LOOK,
    "since_beat": points.LOOK,
    "pause": points.PAUSE,
    "resume": points.PAUSE,
}


class SimLedger(Ledger):
    """The ledger, each of whose methods is a point; a decision under lock is named by who decides.

    The judge sees every ruling, when and only when it is committed.
    """

    _ground: Ground

    @property
    def people(self) -> SimPeople:
        """What people are asked and what they do."""
        people = SimPeople(self.database, new_id=self._new_id)
        people._ground = self._ground
        return people

    def rule(self, run_id: str, decide: Callable[[Locked], Ruling | None], **options: Any) -> Ruled:
        """Decide under lock; see `DECISIONS`."""
        schedule = self._ground.schedule
        actor = schedule.current
        outer = actor.point, actor.ruled
        actor.point = _decided_at(decide)

        def watched(locked: Locked) -> Ruling | None:
            actor.ruled = None
            ruling = decide(locked)
            if ruling is not None:
                actor.ruled = (locked, ruling)
            return ruling

        try:
            done = super().rule(run_id, watched, **options)
            schedule.at(actor.point, AFTER)
            if schedule.timeline is not None:
                schedule.tell(f"{actor.point.name} {run_id}: {_shown(done)}")
        finally:
            actor.point, actor.ruled = outer
        return done


def _shown(done: Ruled) -> str:
    if done.ruling is None:
        return f"changes nothing ({done.locked.state.status})"
    status = done.ruling.state.status
    effect = done.ruling.effect
    moved = "" if effect is None else f", effect {effect.status} #{effect.token}"
    before = done.locked.state.status
    run = status if before is status else f"{before} -> {status}"
    reason = done.ruling.state.reason
    return f"{run}{moved}{f' ({reason})' if reason and before is not status else ''}"


class SimPeople(People):
    """What people do beside the runs: their tokens, and the queue."""

    _ground: Ground

    def issue_token(self, approval_id: str, token_hash: str, **options: Any) -> bool:
        """Issue a token; whoever asks for it knows it by its hash, as the ledger does."""
        self._ground.schedule.current.token_hash = token_hash
        return bool(_issue_token(self, approval_id, token_hash, **options))


def _method(of: type[SimLedger] | type[SimPeople], name: str, point: Point) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        schedule = self._ground.schedule
        actor = schedule.current
        outer, actor.point = actor.point, point
        try:
            answer = getattr(super(of, self), name)(*args, **options)
            schedule.at(point, AFTER)
            if schedule.timeline is not None and point is not points.LOOK:
                schedule.tell_answer(point, args, answer)
            return answer
        finally:
            actor.point = outer

    return call


for _name, _of in _METHODS.items():
    setattr(SimLedger, _name, _method(SimLedger, _name, _of))
for _name in ("move_handoff", "comment"):
    setattr(SimPeople, _name, _method(SimPeople, _name, points.NOTE))
_issue_token: Any = _method(SimPeople, "issue_token", points.TOKEN)


# ---- the lock ------------------------------------------------------------------------------------


class LockServer:
    """What the lock's client talks to: keys with a time to live, by the ledger's clock."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._keys: dict[str, tuple[str, int]] = {}  # a token, and until when

    def get(self, key: str) -> str | None:
        """The token that a key holds."""
        held = self._keys.get(key)
        if held is None or held[1] < self._now():  # as Redis: it lives to its last millisecond
            return None
        return held[0]

    def set_new(self, key: str, token: str, ttl_ms: int) -> bool | None:
        """SET NX PX: True, or None where the key is there already."""
        if self.get(key) is not None:
            return None
        self._keys[key] = token, self._now() + ttl_ms
        return True

    def release(self, key: str, token: str) -> int:
        """What the lock's script does: delete a key if it still holds this token."""
        if self.get(key) != token:
            return 0
        del self._keys[key]
        return 1

    def flush(self) -> None:
        """Lose everything."""
        self._keys.clear()


class _Redis:
    """The lock's client: a server's answers can be lost, and the server can be away."""

    def __init__(self, ground: Ground) -> None:
        self._ground, self._server = ground, ground.lock_server

    def set(self, key: str, token: str, *, nx: bool, px: int) -> bool | None:
        assert nx
        schedule = self._ground.schedule
        schedule.at_lock(points.LOCK, BEFORE)
        answer = self._server.set_new(key, token, px)
        schedule.at_lock(points.LOCK, COMMITTED)
        schedule.at_lock(points.LOCK, AFTER)
        return answer

    def get(self, key: str) -> str | None:
        return self._server.get(key)

    def eval(self, script: str, keys: int, key: str, token: str) -> int:
        assert script == lock_module._RELEASE and keys == 1
        schedule = self._ground.schedule
        schedule.at_lock(points.UNLOCK, BEFORE)
        answer = self._server.release(key, token)
        schedule.at_lock(points.UNLOCK, COMMITTED)
        schedule.at_lock(points.UNLOCK, AFTER)
        return answer


class SimLock(RedisLock):
    """The product's own lock, over a client and a server of ours."""

    def __init__(self, ground: Ground) -> None:
        self._client = _Redis(ground)  # type: ignore[assignment]
        self._prefix = "handrail:intent:"


def lost(error: str = "the answer was lost") -> redis.RedisError:
    """What redis-py raises where a server does not answer."""
    return redis.ConnectionError(error)


# ---- tools ---------------------------------------------------------------------------------------


def make_write(ground: Ground, kind: Kind) -> Callable[..., Any]:
    """The function of a write tool of a kind: it goes as the schedule has drawn it."""

    async def execute(arguments: dict[str, Json], call: calls.ToolCall) -> Json:
        schedule = ground.schedule
        point = points.UNDO if str(arguments["order"]).startswith(UNDO) else points.WRITE
        schedule.at_call(point, BEFORE)
        service = schedule.service
        if not service.may_still_leave(kind, call, LOOKED_AT.get()):
            schedule.dies("it stood still for longer than a request can")
        way = service.next_write(call)
        schedule.judge.sent(kind, call, arguments)
        schedule.tell(f"sends {call.intent_key} ({way.word})")
        answer = _write(service, kind, call, arguments, way, schedule.plan.lag_ms)
        schedule.at_call(point, INSIDE)
        answer = await _answered(way, answer)
        schedule.at_call(point, AFTER)
        return answer

    return execute


def _write(
    service: Service,
    kind: Kind,
    call: calls.ToolCall,
    arguments: dict[str, Json],
    way: Way,
    lag_ms: int,
) -> Json:
    word = way.word
    if word in ("refused", "busy", "refused at the door"):
        service.refuse(kind, call, word)
    elif word in ("late", "late and silent"):
        service.land_later(kind, call, arguments, way.ms)
        return None
    elif word == "unclear":
        raise ToolUnclear("gateway-timeout")
    elif word in ("dropped", "hang"):
        return None
    elif word == "no effect":
        order = (call.tenant, str(arguments["order"]))
        if order not in service.records:
            service.lied.add(order)
        return {**arguments, "tenant": call.tenant, "receipt": 0, "note": CANARY}
    receipt = service.arrive(kind, call, arguments, service.lag_ms(call, lag_ms))
    assert isinstance(receipt, dict)
    if word == "unclear and done":
        raise ToolUnclear("gateway-timeout")
    if word == "another's":
        return {**receipt, "tenant": "somebody-else"}
    if word == "wrong amount":
        return {**receipt, "amount": -1}
    return {**receipt, **_odd(word)}


def _odd(word: str) -> dict[str, Any]:
    return _ODD.get(word, {})


_ODD: Final[Mapping[str, dict[str, Any]]] = {
    "unstorable": {"note": float("nan")},
    "huge": {"note": "x" * 70_000},
    "odd text": {"note": 'a\x00b\ud800 {"__type__": "decimal", "__value__": "1"}'},
}


async def _answered(way: Way, answer: Json) -> Json:
    """Let a call's answer take its time, get lost, or never come."""
    match way.word:
        case "slow":
            await asyncio.sleep(way.ms / 1000)
        case "lost" | "dropped" | "late":
            raise ConnectionError("no answer")
        case "hang" | "late and silent" | "deaf":
            await asyncio.get_running_loop().create_future()
        case "stubborn":  # it does not let itself be stopped, and answers late
            loop = asyncio.get_running_loop()
            ends = loop.time() + way.ms / 1000
            while (left := ends - loop.time()) > 0:
                try:
                    await asyncio.sleep(left)
                except asyncio.CancelledError:
                    continue
    return answer


def make_stand_in(ground: Ground) -> Callable[..., Any]:
    """What a shadow run is told instead of a receipt."""

    async def stand_in(arguments: dict[str, Json], call: calls.ToolCall) -> Json:
        return {**arguments, "tenant": call.tenant, "receipt": 0, "note": CANARY}

    return stand_in


def make_query(ground: Ground) -> Callable[..., Any]:
    """The function by which the reconciler asks the service."""

    async def query(arguments: dict[str, Json], call: calls.ToolCall) -> Any:
        schedule = ground.schedule
        schedule.at_call(points.QUERY, BEFORE)
        queries = schedule.service.queries
        way = queries.pop(0) if queries else Way("ok")
        found = schedule.service.find(arguments, call, way)
        schedule.at_call(points.QUERY, INSIDE)
        schedule.at_call(points.QUERY, AFTER)
        schedule.tell(f"asked about {call.intent_key}: {_answer_shown(found)}")
        return found

    return query


def _answer_shown(found: Any) -> str:
    if found is None:
        return "no trace of it"
    return "a record" if isinstance(found, dict) else type(found).__name__.lower()


def make_read(ground: Ground) -> Callable[..., Any]:
    """The function of the read tool."""

    async def execute(arguments: dict[str, Json], call: calls.ToolCall) -> Json:
        schedule = ground.schedule
        schedule.at_call(points.READ, BEFORE)
        service = schedule.service
        service.calls["read", call.run_id] += 1
        way = service.reads.pop(0) if service.reads else Way("ok")
        schedule.tell(f"reads ({way.word})")
        schedule.at_call(points.READ, INSIDE)
        if way.word == "busy":
            service.refuse_read()
        record: dict[str, Any] = {**arguments, "note": CANARY, **_odd(way.word)}
        answer = await _answered(way, record)
        schedule.at_call(points.READ, AFTER)
        return answer

    return execute


def make_original(ground: Ground) -> Callable[..., Any]:
    """The function that reads, before a write, what undoing it has to restore."""

    async def original(arguments: dict[str, Json], call: calls.ToolCall) -> Json:
        schedule = ground.schedule
        schedule.at_call(points.READ, BEFORE)
        schedule.service.calls["read", call.run_id] += 1
        schedule.tell("reads what is there before it writes")
        schedule.at_call(points.READ, INSIDE)
        schedule.at_call(points.READ, AFTER)
        return {"was": 0}

    return original


def make_check(ground: Ground) -> Callable[..., Any]:
    """The independent check of a completion: it looks at the service's own records."""

    async def check(claim: Json, call: calls.ToolCall) -> bool:
        schedule = ground.schedule
        schedule.at_call(points.VERIFY, BEFORE)
        run = schedule.run_plan(call.run_id)
        holds = schedule.service.has(run.tenant, run.order) or run.mode == "shadow"
        if run.workflow == "reading":
            holds = schedule.service.calls["read", run.run_id] > 0
        schedule.at_call(points.VERIFY, INSIDE)
        schedule.at_call(points.VERIFY, AFTER)
        schedule.tell(f"looks whether {run.run_id} is done: {holds}")
        return holds

    return check


# ---- the model -----------------------------------------------------------------------------------


class SimModel:
    """The model of all runs; how it behaves in each is drawn with the run."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Answer one request, well or badly."""
        schedule = self._ground.schedule
        run = schedule.run_plan(request.goal)
        schedule.at_call(points.MODEL, BEFORE)
        count = schedule.service.calls["model", run.run_id]
        schedule.service.calls["model", run.run_id] = count + 1
        schedule.tell(f"asks the model of {run.run_id} ({run.model})")
        schedule.at_call(points.MODEL, INSIDE)
        match run.model:
            case "slow":
                await asyncio.sleep(3)
            case "silent" if count == 0:
                await asyncio.get_running_loop().create_future()
            case "breaks" if count == 0:
                raise ConnectionError("the stream broke")
            case "endless":
                for _ in range(40):
                    yield Text(CANARY * 3_000)
            case "chatty":
                yield Text(f"I think about {CANARY}")
        proposal = propose(
            run.model, count, request, run.workflow, run.order, run.amount, run.reads
        )
        yield ToolCall("sim", RAW, proposal)
        if run.model == "two at once":
            yield ToolCall("sim", RAW, proposal)
        yield Stop("end")
        schedule.at_call(points.MODEL, AFTER)


def propose(
    model: str,
    count: int,
    request: ModelRequest,
    workflow: str,
    order: str,
    amount: int,
    reads: int,
) -> Any:
    """What a model proposes, by what it is shown and how often it was asked."""
    tool = workflow.removeprefix("loop_")
    match model:
        case "garbage" if count % 2:
            return {"kind": "tool", "tool": tool, "arguments": {"order": order}, "approved": True}
        case "unknown tool" if count:
            return {"kind": "tool", "tool": "sаve", "arguments": {}}  # noqa: RUF001  # Cyrillic
        case "repeats":
            return _look(0)
        case "a-b-a-b":
            return _look(count % 2)
        case "claims at once":
            return {"kind": "complete", "answer": CANARY}
        case "asks" if count == 0:
            return {"kind": "clarify", "question": "Which order?"}
    seen = [(shown["source"], shown["text"]) for shown in request.observations]
    looked = sum(source == "lookup" for source, _ in seen)
    written = any(source == tool and not text.startswith("tool:") for source, text in seen)
    if looked < reads:
        return _look(looked)
    if workflow != "reading" and not written:
        arguments: Json = {"order": order, "amount": amount}
        return {"kind": "tool", "tool": tool, "arguments": arguments}
    return {"kind": "complete", "answer": CANARY}


def _look(number: int) -> Json:
    return {"kind": "tool", "tool": "lookup", "arguments": {"q": number}}


# ---- the broker ----------------------------------------------------------------------------------


class Broker:
    """The queue: messages as text, which anybody may lose, double, reorder, delay or forge."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.queue: list[str] = []
        self.old: list[str] = []

    def publish(self, messages: Sequence[StepMessage]) -> None:
        """Publish, as the fleet does."""
        schedule = self._ground.schedule
        schedule.at_broker(BEFORE)
        for message in messages:
            text = message.to_json()
            schedule.judge.published(text)
            self.queue.append(text)
        schedule.at_broker(COMMITTED)
        schedule.at_broker(AFTER)
