"""What is built once in a process and used by all schedules: a fleet with a workflow for every kind
of tool, an empty ledger in memory, and the servers of the lock and of the queue.
"""

from __future__ import annotations

import itertools
import logging
import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from handrail.agent.budget import Budget
from handrail.agent.effects import Answer, Effect
from handrail.agent.fixed import Commit, Confirm, Verify
from handrail.agent.loop import AgentLoop
from handrail.agent.protocol import Locked
from handrail.agent.retry import Retry
from handrail.agent.stage import Action, Stage
from handrail.agent.tools import Compensation, RunFacts, Tool
from handrail.agent.workflow import Workflow
from handrail.broker.message import StepMessage
from handrail.broker.publish import PublishFailed
from handrail.fleet import Fleet
from handrail.ledger.database import Database
from handrail.ledger.ledger import Ledger
from handrail.ledger.migrate import create_all
from handrail.ledger.tables import METADATA
from handrail.settings import Settings
from tests.simulator import ports
from tests.simulator.actors import Asker
from tests.simulator.faults import DEADLINE_MS
from tests.simulator.service import CALL_MS, KINDS, SECRET, SETTLE_MS, STALL_MS, UNDO, Kind
from tests.simulator.timeline import START_MS

if TYPE_CHECKING:
    from tests.simulator.schedule import Schedule

BUDGET: Final = Budget(steps=9, model_calls=9, tool_calls=6, deadline_ms=DEADLINE_MS)


#: A question, and a request for two consents, are soon too old: people come too late for them.
SOON_MS: Final = 120_000


class SimFleet(Fleet):
    """The front door; what it publishes goes to the simulated broker."""

    ground: Ground

    def query_now(self, locked: Locked, effect: Effect) -> tuple[Answer, int]:
        """Ask a tool for a person, who waits for the answer."""
        who = self.ground.schedule.current
        assert isinstance(who, Asker)
        return who.reconciler.query_now(locked, effect), locked.now

    def _publish(self, messages: Sequence[StepMessage]) -> None:
        try:
            self.ground.broker.publish(messages)
        except PublishFailed:
            return  # as the product's own does: the sweep publishes what is due

    def _signal(self, run_id: str) -> None:
        self.ground.schedule.signalled(run_id)


class Ground:
    """The process's parts. One schedule at a time is played on them."""

    schedule: Schedule

    def __init__(self) -> None:
        self.now_ms = START_MS
        self.sweeps_ahead_ms = 0
        self.ids = itertools.count(1)
        control = Database("sqlite://", clock=self.now)
        create_all(control)
        self.connection: sqlite3.Connection = control._connection()
        self._tables = [table.name for table in reversed(METADATA.sorted_tables)]
        self._filled = "SELECT " + ", ".join(
            f"EXISTS (SELECT 1 FROM {name})" for name in self._tables
        )
        self._read: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        self.lock_server = ports.LockServer(self.now)
        self.ledger = ports.SimLedger(
            "sqlite://", clock=self.now, new_id=lambda: f"id-{next(self.ids)}"
        )
        self.ledger._ground = self
        self.ledger.database = ports.SimDatabase(self, self.connection)
        self.lock = ports.SimLock(self)
        self.broker = ports.Broker(self)
        self.bounded = Settings(database_url="sqlite://", max_stall_ms=STALL_MS)
        self.unbounded = Settings(database_url="sqlite://", max_stall_ms=None)
        self.fleet = SimFleet(settings=self.bounded)
        self.fleet.ground = self
        self.fleet.__dict__["ledger"] = cast(Ledger, self.ledger)
        self.fleet.models["sim"] = ports.SimModel(self)
        self._declare()
        self.errors: list[str] = []
        self._listen()

    def now(self) -> int:
        """The ledger's time, in milliseconds."""
        return self.now_ms

    def clear(self) -> None:
        """Empty the ledger, the lock's server and the queue."""
        self.now_ms = START_MS
        self.ids = itertools.count(1)
        self._read.clear()
        (filled,) = self.connection.execute(self._filled)
        for name, there in zip(self._tables, filled, strict=True):
            if there:
                self.connection.execute(f"DELETE FROM {name}")
        self.lock_server.flush()
        self.broker.queue.clear()
        self.broker.old.clear()
        self.errors.clear()

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Read beside the fleet; not again, where nobody has written since."""
        written = self.connection.total_changes
        known = self._read.get(sql)
        if known is not None and known[0] == written and not self.connection.in_transaction:
            return known[1]
        cursor = self.connection.execute(sql)
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
        if not self.connection.in_transaction:
            self._read[sql] = written, rows
        return rows

    # ---- declaring -------------------------------------------------------------------------------

    def _declare(self) -> None:
        read = self.fleet.tool(
            "lookup", side_effect="read", timeout_ms=CALL_MS, retry=Retry(attempts=2)
        )(ports.make_read(self))
        check = ports.make_check(self)
        self._workflow(
            "reading", AgentLoop(name="loop", actions=(read,), verify=check, model="sim")
        )
        for kind in KINDS.values():
            tool = self._write_tool(kind)
            loop = AgentLoop(
                name="loop",
                actions=(read, tool),
                verify=check,
                model="sim",
                retry=Retry(attempts=2) if kind.name == "key_and_query" else None,
                answer_within_ms=SOON_MS,
                approve_within_ms=_consent_within_ms(kind),
                verify_cost_microusd=5 if kind.name == "key_alone" else 0,
            )
            self._workflow(f"loop_{kind.name}", loop)
            self._workflow(f"commit_{kind.name}", *self._committing(kind, tool, check))

    def _workflow(self, name: str, *stages: Stage) -> None:
        self.fleet.workflow(Workflow(name=name, stages=stages, budget=BUDGET))

    def _committing(self, kind: Kind, tool: Tool, check: Any) -> tuple[Stage, ...]:
        def action(run: RunFacts) -> Action:
            assert isinstance(run.input, dict)
            amount = self.schedule.prices.get(run.run_id, run.input["amount"])
            return Action(tool, {"order": run.input["order"], "amount": amount})

        commit = Commit("commit", action=action, tool=tool, attempts=2)
        verify = Verify("verify", check=check)
        if kind.approval == "never":
            return commit, verify
        return (
            Confirm("confirm", action=action, expires_ms=_consent_within_ms(kind)),
            commit,
            verify,
        )

    def _write_tool(self, kind: Kind) -> Tool:
        undo = None
        if kind.undo:
            undo = Compensation(
                tool=self._tool(f"undo_{kind.name}", kind),
                arguments=lambda arguments, found, original, run: {
                    "order": UNDO + arguments["order"],
                    "amount": arguments["amount"],
                },
                original=ports.make_original(self) if kind.reads_original else None,
            )
        return self._tool(kind.name, kind, undo)

    def _tool(self, name: str, kind: Kind, undo: Compensation | None = None) -> Tool:
        keyed = kind.key_valid_for_ms > 0
        return self.fleet.tool(
            name,
            side_effect="idempotent" if undo is None else "compensable",
            guarantee="idempotency-key" if keyed else "transaction",
            key_valid_for_ms=kind.key_valid_for_ms,
            stores_failures=kind.stores_failures,
            confirmed_by_query=kind.confirmed,
            not_after=kind.not_after,
            approval=kind.approval,
            approvers=kind.approvers,
            timeout_ms=CALL_MS,
            settle_after_ms=SETTLE_MS,
            intent=lambda arguments, run: f"save:{arguments['order']}",
            postcondition=lambda arguments, found: found["amount"] == arguments["amount"],
            belongs_to=lambda found, run: found["tenant"] == run.tenant,
            query=ports.make_query(self) if kind.query else None,
            takeover=None if kind.query else "operations",
            compensation=undo,
            report_secret=SECRET,
            shadow=ports.make_stand_in(self) if kind.name == "key_and_query" else None,
        )(ports.make_write(self, kind))

    # ---- what would hide in a log ----------------------------------------------------------------

    def _listen(self) -> None:
        """What the fleet logs as an error is a finding: it would hide in a log otherwise."""
        errors = self.errors

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                cause = record.exc_info[1] if record.exc_info else None
                errors.append(f"{record.getMessage()} {cause!r}")

        log = logging.getLogger("handrail")
        log.setLevel(logging.ERROR)
        log.addHandler(Handler())


def _consent_within_ms(kind: Kind) -> int:
    return SOON_MS if kind.approvers > 1 else 24 * 3_600_000
