"""A fleet on one ledger whose every call passes a port, and what survives its processes.

`begin` is the start of a process: its ledger's ids, its event loop, its worker and its sweep are
new; the database, the queue, the lock, the service and the clock are what the one before has left.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

from handrail.agent.budget import Budget
from handrail.agent.loop import AgentLoop
from handrail.agent.retry import ModelRetry
from handrail.agent.stage import Action, Checked
from handrail.agent.status import TERMINAL, WITH_PERSON, RunStatus
from handrail.agent.tools import Compensation, RunFacts, Tool
from handrail.agent.workflow import Commit, Confirm, Read, Verify, Workflow
from handrail.broker.message import StepMessage
from handrail.canonical import Json
from handrail.errors import ToolRefused, ToolUnclear
from handrail.fleet import Fleet
from handrail.ledger.ledger import Ledger
from handrail.ledger.lock import Refusal
from handrail.ledger.tables import METADATA
from handrail.reconciler.sweep import Reconciler, ask_directly
from handrail.reports import sign_report
from handrail.settings import Settings
from handrail.tasks.calls import ToolCall
from handrail.tasks.runtime import Runtime
from handrail.tasks.step import run_step
from handrail.testing.people import OPERATOR, agree, disagree
from handrail.testing.virtual_time import VirtualLoop, close
from tests.crash.fuse import Fuse, LedgerPort, WatchedDatabase
from tests.crash.outside import CALL_MS, START_MS, Lock, Queue, Records, Service, Shared
from tests.crash.points import Side
from tests.crash.scenarios import KINDS, Setting

STALL_MS: Final = 20_000
#: More acts than any run of the sweep needs by far.
MOST_ACTS: Final = 200
#: How long a person takes.
PERSON_MS: Final = 60_000
#: In the arguments and the results of every write; a trace must not show it.
CANARY: Final = "canary-4711"
#: What the provider signs its reports with.
SECRET: Final = "a secret of the provider, shared with us"


class Stuck(AssertionError):
    """A run neither rests nor will anybody look at it: it is lost."""


class Loop(VirtualLoop):
    """An event loop on the shared clock."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        super().__init__()

    @property
    def now_ms(self) -> int:
        """Virtual time."""
        return self._shared.now_ms

    @now_ms.setter
    def now_ms(self, value: int) -> None:
        self._shared.now_ms = max(value, self._shared.now_ms)  # a new loop does not turn it back


class Bench:
    """The fleet; see the module. `directory` takes the records of the outside."""

    def __init__(self, url: str, directory: Path) -> None:
        self.shared = Shared()
        self.records = Records(directory / "outside")
        self.queue = Queue(self.records)
        self.service = Service(self.records, self.shared)
        self.lock = Lock(self.records, self.shared)
        self.fuse = Fuse(self.shared)
        self.database = WatchedDatabase(url, self.shared, lambda: self.fuse)
        self.setting = Setting.parse("run/key+query/ok")
        settings = Settings(
            database_url=url,
            broker_url="memory://",
            max_stall_ms=STALL_MS,
            approval_secret="of the crash bench/" * 3,
            decisions_per_minute=0,
        )
        self.fleet = Fleet(settings=settings)
        self.fleet.__dict__["_publisher"] = self
        self.tables = [table.name for table in reversed(METADATA.sorted_tables)]
        self.frozen: asyncio.Future[None] | None = None
        self.left: list[Loop] = []  # of workers that stand still
        self.people_ms = 0  # how long people have taken
        _Declared(self).declare()

    # ---- a process -------------------------------------------------------------------------------

    def begin(self, process: str, fuse: Fuse) -> None:
        """Start a process; `process` begins the ids that it makes."""
        self.fuse, self.people_ms, self.reported = fuse, 0, False
        numbers = itertools.count(1)
        ledger = Ledger(self.database.url, new_id=lambda: f"{process}-{next(numbers)}")  # type: ignore[arg-type]
        ledger.database = self.database
        self.ledger = ledger
        self.fleet.__dict__["ledger"] = LedgerPort(ledger, lambda: self.fuse)
        self.loop = Loop(self.shared)
        self._new_worker()
        self.reconciler: Reconciler = self.fleet.make_reconciler(lock=cast(Any, _LockPort(self)))
        self.reconciler.ask, self.reconciler.jitter = ask_directly, lambda: 0.0
        self.reconciler.clock = lambda: self.loop.time()

    def end(self) -> None:
        """End a process in good order."""
        for loop in (self.loop, *self.left):
            close(loop)
        self.left.clear()

    def _new_worker(self) -> None:
        runtime = self.fleet.make_runtime(
            publish=self.fleet._publish, lock=cast(Any, _LockPort(self))
        )
        runtime.renews = runtime.threads = False
        runtime.clock = self.loop.time
        runtime.chance, runtime.holder = (lambda: 0.5), "worker"
        self.runtime: Runtime = runtime

    def now(self) -> int:
        """The ledger's time."""
        return START_MS + self.shared.now_ms

    # ---- the fleet at work -----------------------------------------------------------------------

    @property
    def runs(self) -> list[str]:
        """The runs of this setting, accepted or not."""
        return [f"run-{number + 1}" for number in range(self.setting.scenario.runs)]

    def enqueue(self) -> None:
        """Ask for the runs; a client that got no answer asks again."""
        for run_id in self.runs:
            self.fleet.enqueue(
                self.setting.workflow,
                goal=run_id,
                run_id=run_id,
                budget={"per_tool": self.setting.scenario.limits},
            )

    def work(self) -> None:
        """Let the fleet go on, from event to event, until every run rests."""
        for _ in range(MOST_ACTS):
            if messages := self._take():
                self._step(messages)
            elif not self._people() and not self._provider():
                busy = self.busy()
                if not busy:
                    return
                self._wait_and_sweep(busy)
        raise Stuck(f"no rest after {MOST_ACTS} acts: {self.busy()}")

    def busy(self) -> list[dict[str, Any]]:
        """The runs that do not rest."""
        rests = TERMINAL | WITH_PERSON
        return [row for row in self.rows(_RUNS) if RunStatus(row["status"]) not in rests]

    def sweep(self) -> None:
        """Sweep, as the beat's task does it: a fault in it is logged, and the next one goes on."""
        self.reconciler.tick(every_s=0.0)

    def overdue(self) -> list[dict[str, Any]]:
        """What a sweep would find."""
        return self.rows(
            "SELECT id, status FROM handrail_run WHERE wake_at <= :now", now=self.now()
        )

    def pass_time(self, ms: int) -> None:
        """Let time pass in which nobody does anything."""
        self.shared.now_ms += ms

    def publish(self, messages: Sequence[StepMessage]) -> None:
        """Publish, as the fleet's publisher does."""
        number = self.fuse.enter("publish")
        for message in messages:
            self.queue.put(message)
        self.fuse.at("publish", number, Side.ANSWERED)

    def _take(self) -> list[StepMessage]:
        waiting = self.queue.waiting()[: self.setting.scenario.runs]
        for _ in waiting:
            number = self.fuse.enter("take")
            self.queue.take()
            self.fuse.at("take", number, Side.ANSWERED)
        return waiting

    def _step(self, messages: Sequence[StepMessage]) -> None:
        self.loop.run_until_complete(self._steps(messages))
        if self.frozen is not None and self.frozen.done():
            self.left.append(self.loop)  # never run again: its worker stands still
            self.loop = Loop(self.shared)
            self._new_worker()
        elif self.runtime.draining:
            self._new_worker()

    async def _steps(self, messages: Sequence[StepMessage]) -> None:
        self.frozen = self.loop.create_future()
        steps = [self.loop.create_task(run_step(self.runtime, message)) for message in messages]
        all_of_them: asyncio.Future[Any] = asyncio.gather(*steps, return_exceptions=True)
        ends: list[asyncio.Future[Any]] = [all_of_them, self.frozen]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if all_of_them.done():
            for error in all_of_them.result():
                if isinstance(error, BaseException) and not self.runtime.draining:
                    raise error
            await asyncio.sleep(0)  # a call that was told to stop hears of it

    def _people(self) -> bool:
        """What people do about runs that wait for them; False: none does."""
        waiting = [row for row in self.rows(_RUNS) if row["status"].startswith("awaiting_")]
        for row in waiting:
            self.pass_time(PERSON_MS)
            self.people_ms += PERSON_MS
            if row["status"] == "awaiting_input":
                self.fleet.answer(row["id"], "yes, it is", by=OPERATOR)
            elif self.setting.scenario.approves:
                agree(self.fleet, row["id"])
            else:
                disagree(self.fleet, row["id"])
        paused = self.fleet.pauses() if self.setting.scenario.pauses else []
        for pause in paused:
            self.fleet.resume(pause.scope, pause.name)
        return bool(waiting or paused)

    def _provider(self) -> bool:
        """What the provider says by itself, and says again where it got no answer."""
        said = False
        for row in self.busy() if self.setting.scenario.reports and not self.reported else []:
            intent = f"save:{row['id']}"
            if row["status"] == "reconciling" and self.service.record(intent) is not None:
                self._report(intent)
                self.reported = said = True
        return said

    def _report(self, intent: str) -> None:
        report: dict[str, Any] = {
            "intent_key": intent,
            "answer": "applied",
            "evidence": {"record": self.service.record(intent), "secret": CANARY},
            "report_id": "report-1",
            "sent_at": self.now(),
        }
        self.fleet.report(**report, signature=sign_report(SECRET, **report))

    def _wait_and_sweep(self, busy: Sequence[dict[str, Any]]) -> None:
        wakes = [row["wake_at"] for row in busy]
        if None in wakes:
            raise Stuck(f"nobody will ever look at this run: {busy}")
        self.pass_time(max(0, min(wakes) - self.now()))
        self.sweep()

    # ---- looking ---------------------------------------------------------------------------------

    def rows(self, sql: str, **params: Any) -> list[dict[str, Any]]:
        """Read beside the fleet."""
        return self.database.run(sql, params)

    def row(self, run_id: str) -> dict[str, Any]:
        """A run's row."""
        return self.rows("SELECT * FROM handrail_run WHERE id = :id", id=run_id)[0]

    def trace(self, run_id: str) -> list[dict[str, Any]]:
        """A run's trace."""
        return self.ledger.trace(run_id)

    def used(self, run_id: str) -> dict[str, int]:
        """What a run was charged."""
        return dict(self.fleet.get(run_id).budget_used)


_RUNS: Final = "SELECT id, status, wake_at FROM handrail_run ORDER BY id"


class _LockPort:
    """The intent lock, each of whose acts has sides."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def acquire(self, effect_id: str, *, ttl_ms: int) -> str | Refusal:
        fuse = self._bench.fuse
        number = fuse.enter("lock")
        if self._bench.setting.scenario.locked and number == 1:
            self._bench.lock.acquire(effect_id, ttl_ms=500)  # somebody else's
        granted = self._bench.lock.acquire(effect_id, ttl_ms=ttl_ms)
        fuse.at("lock", number, Side.ANSWERED)
        return granted

    def release(self, effect_id: str, token: str) -> None:
        fuse = self._bench.fuse
        number = fuse.enter("unlock")
        self._bench.lock.release(effect_id, token)
        fuse.at("unlock", number, Side.ANSWERED)


class _Declared:
    """The tools, models and workflows of a bench."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def declare(self) -> None:
        """Declare them on the bench's fleet."""
        read = self._read()
        undoing = {kind: self._undo(kind) for kind in KINDS}
        for kind in KINDS:
            name = _named(kind)
            undo = Compensation(
                tool=undoing["key+query"], arguments=_to_undo, original=self._original
            )
            write = self._write(
                kind, f"save-{name}", compensation=undo if kind == "compensable" else None
            )
            agreed = self._write(kind, f"agreed-{name}", approval="always")
            undoable = self._write(
                "compensable",
                f"undoable-{name}",
                compensation=Compensation(tool=undoing[kind], arguments=_to_undo),
            )
            for flavour, tool in (
                ("loop", write),
                ("agreed", agreed),
                ("undoable", undoable),
                ("asking", write),
                ("retrying", write),
            ):
                self._loop(f"{flavour}-{name}", flavour, read, tool)
            self._fixed(f"fixed-{name}", read, agreed)

    def _loop(self, title: str, flavour: str, read: Tool, write: Tool) -> None:
        fleet = self.bench.fleet
        fleet.model(title, self._model(flavour, write.name))
        loop = AgentLoop(
            name="loop",
            actions=(read, write),
            model=title,
            verify=self._verify,
            retry=ModelRetry(attempts=2) if flavour == "retrying" else None,
        )
        fleet.workflow(Workflow(name=title, stages=[loop], budget=_BUDGET))

    # ---- tools -----------------------------------------------------------------------------------

    def _read(self) -> Tool:
        bench = self.bench

        async def lookup(arguments: dict[str, Json], call: ToolCall) -> Json:
            number = bench.fuse.enter("read")
            bench.service.note("read", call.run_id)
            bench.fuse.at("read", number, Side.SENT)
            found = "in stock"
            if arguments["q"] == "record":
                record = bench.service.record(f"save:{call.run_id}")
                found = "there is no record" if record is None else "there is a record"
            bench.fuse.at("read", number, Side.ANSWERED)
            return found

        return bench.fleet.tool("lookup", side_effect="read")(lookup)

    def _write(
        self,
        kind: str,
        name: str,
        approval: str = "never",
        compensation: Compensation | None = None,
    ) -> Tool:
        bench, keyed = self.bench, bool(KINDS[kind]["key_valid_for_ms"])

        async def save(arguments: dict[str, Json], call: ToolCall) -> Json:
            fuse = bench.fuse
            number = fuse.enter("tool")
            way = bench.service.receive("write", call, keyed=keyed)
            fuse.at("tool", number, Side.SENT)
            await self._meanwhile("tool", call.run_id)
            if way in _NO_ANSWER:
                await asyncio.Event().wait()
            fuse.at("tool", number, Side.ANSWERED)
            return self._answered(way, call)

        return bench.fleet.tool(
            name,
            **self._contract(kind, "save"),
            approval=approval,
            side_effect="idempotent" if compensation is None else "compensable",
            compensation=compensation,
        )(save)

    def _undo(self, kind: str) -> Tool:
        bench, keyed = self.bench, bool(KINDS[kind]["key_valid_for_ms"])

        def undo(arguments: dict[str, Json], call: ToolCall) -> Json:
            fuse = bench.fuse
            number = fuse.enter("undo")
            way = bench.service.receive("undo", call, keyed=keyed)
            fuse.at("undo", number, Side.SENT)
            if way in _NO_ANSWER:
                bench.pass_time(CALL_MS)
                raise TimeoutError
            fuse.at("undo", number, Side.ANSWERED)
            return self._answered(way, call)

        return bench.fleet.tool(
            f"undo-{_named(kind)}",
            **self._contract(kind, "undo"),
            approval="never",
            side_effect="idempotent",
        )(undo)

    def _contract(self, kind: str, act: str) -> dict[str, Any]:
        bench, known_ms = self.bench, KINDS[kind]["key_valid_for_ms"]

        def find(arguments: dict[str, Json], call: ToolCall) -> Json:
            number = bench.fuse.enter("query")
            bench.service.note("query", call.run_id)
            bench.fuse.at("query", number, Side.SENT)
            receipt = self._receipt(call)
            bench.fuse.at("query", number, Side.ANSWERED)
            return receipt

        return {
            "query": find if KINDS[kind]["query"] else None,
            "guarantee": "idempotency-key" if known_ms else "unique-constraint",
            "key_valid_for_ms": known_ms,
            "takeover": "operations",
            "report_secret": SECRET,
            "timeout_ms": CALL_MS,
            "intent": lambda arguments, run: f"{act}:{arguments['id']}",
        }

    async def _original(self, arguments: dict[str, Json], call: ToolCall) -> Json:
        number = self.bench.fuse.enter("original")
        self.bench.service.note("original", call.run_id)
        self.bench.fuse.at("original", number, Side.SENT)
        self.bench.fuse.at("original", number, Side.ANSWERED)
        return {"before": CANARY}

    def _answered(self, way: str, call: ToolCall) -> Json:
        if way == "refused":
            raise ToolRefused("no-funds")
        if way == "unclear":
            raise ToolUnclear("gateway-timeout")
        return self._receipt(call)

    def _receipt(self, call: ToolCall) -> Json:
        assert call.intent_key is not None
        record = self.bench.service.record(call.intent_key)
        return None if record is None else {"record": record, "secret": CANARY}

    async def _meanwhile(self, what: str, run_id: str) -> None:
        """What happens around the first call of its kind of a run, while it is in flight."""
        bench, scenario = self.bench, self.bench.setting.scenario
        kind = "write" if what == "tool" else what
        if bench.service.calls[f"{kind} {run_id}"] > 1:
            return
        if scenario.cancels == what:
            bench.fleet.cancel(run_id)
            bench.runtime.renew()
            await asyncio.sleep(0)
        if scenario.freezes and what == "tool":
            assert bench.frozen is not None
            bench.frozen.set_result(None)
            await asyncio.Event().wait()
        if scenario.pauses and what == "model":
            tool = f"save-{_named(bench.setting.kind)}"
            bench.fleet.pause("tool", tool, reason="a test", by="ann")
        if scenario.drains and what == "model":
            bench.runtime.drain(0.0)
            await asyncio.sleep(0)

    # ---- the model and the check -----------------------------------------------------------------

    def _model(self, flavour: str, tool: str) -> Callable[[dict[str, Any]], Awaitable[Json]]:
        bench = self.bench

        async def propose(seen: dict[str, Any]) -> Json:
            run_id = seen["goal"]
            number = bench.fuse.enter("model")
            calls = bench.service.note("model", run_id)
            bench.fuse.at("model", number, Side.SENT)
            await self._meanwhile("model", run_id)
            bench.fuse.at("model", number, Side.ANSWERED)
            if flavour == "retrying" and calls == 1:
                raise ConnectionError("overloaded")
            texts = [item["text"] for item in seen["observations"]]
            if flavour == "asking":
                if not texts:
                    return {"kind": "clarify", "question": "is it yours?"}
                texts = texts[1:]
            match len(texts):
                case 0:
                    return {"kind": "tool", "tool": "lookup", "arguments": {"q": "stock"}}
                case 1:
                    arguments: dict[str, Json] = {"id": run_id, "note": CANARY}
                    return {"kind": "tool", "tool": tool, "arguments": arguments}
                case 2:
                    return {"kind": "tool", "tool": "lookup", "arguments": {"q": "record"}}
            return {"kind": "complete", "answer": texts[-1]}

        return propose

    async def _verify(self, claim: Json, call: ToolCall) -> Checked:
        """Whether what the model claims is so: it looks at the service itself."""
        bench = self.bench
        number = bench.fuse.enter("verify")
        bench.service.note("verify", call.run_id)
        bench.fuse.at("verify", number, Side.SENT)
        there = bench.service.record(f"save:{call.run_id}") is not None
        bench.fuse.at("verify", number, Side.ANSWERED)
        return Checked(claim == "there is a record" if there else claim == "there is no record")

    # ---- fixed stages ----------------------------------------------------------------------------

    def _fixed(self, title: str, read: Tool, write: Tool) -> None:
        def action(run: RunFacts) -> Action:
            return Action(write, {"id": run.run_id, "note": CANARY})

        stages = [
            Read("look", read, lambda run: {"q": "stock"}),
            Confirm("confirm", action),
            Commit("commit", action, write),
            Verify("verify", self._verify, claim=lambda run: "there is a record"),
        ]
        self.bench.fleet.workflow(Workflow(name=title, stages=stages, budget=_BUDGET))


_BUDGET: Final = Budget(tool_calls=12, model_calls=16, deadline_ms=600_000)
#: Ways in which whoever sent a request is not answered.
_NO_ANSWER: Final = ("lost", "never", "late")


def _named(kind: str) -> str:
    return kind.replace("+", "-and-")


def _to_undo(written: Any, result: Json, before: Json, run: RunFacts) -> dict[str, Json]:
    return {"id": written["id"], "note": CANARY}
