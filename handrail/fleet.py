"""The front door: declare tools and workflows, enqueue runs, follow, approve and cancel them.

One `Fleet` is one deployment: its ledger, its broker, its workflows. Nothing is connected before it
is used; `fleet.celery` is an ordinary Celery app, so `celery -A yourmodule:fleet.celery worker`
works as `handrail worker` does.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import re
import secrets
import socket
import sys
import time
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, Final

from celery import Celery
from celery.signals import worker_init, worker_process_shutdown, worker_ready, worker_shutdown
from kombu.utils.url import maybe_sanitize_url
from pydantic import BaseModel

from handrail import tracing
from handrail.agent import machine, protocol
from handrail.agent.budget import Budget, BudgetLeft, CallLimits, Phase
from handrail.agent.effects import Answer, Effect, EffectStatus, Rewind
from handrail.agent.loop import AgentLoop
from handrail.agent.machine import Mode, RunState
from handrail.agent.pauses import Pause, Scope, checked_scope, checked_words
from handrail.agent.people import Act, AuditEntry, NotAllowed, must_be_allowed
from handrail.agent.people import checked_words as words_of_person
from handrail.agent.protocol import Locked, Reported, Ruling
from handrail.agent.status import RunStatus
from handrail.agent.tools import (
    Approval,
    Compensation,
    Guarantee,
    Principal,
    SideEffect,
    Tool,
    ToolContract,
    must_be_functions,
)
from handrail.agent.trace import TraceEvent
from handrail.agent.workflow import Workflow
from handrail.asked import Asked, InvalidRun, UnknownWorkflow
from handrail.asked import checked as checked_request
from handrail.broker.app import (
    make_app,
    register_step,
    sweep_entry,
    verify_app,
    verify_redis,
    verify_server,
)
from handrail.broker.loop import shared_loop
from handrail.broker.message import SWEEP_TASK, StepMessage, message_of
from handrail.broker.publish import IN_PASSING_S, Courier, Publisher, PublishFailed
from handrail.broker.signal import CancelSignal
from handrail.broker.verify import UnsafeConfiguration
from handrail.canonical import Json, dumps, normal
from handrail.desk import Desk, InvalidQuery, must_see
from handrail.errors import (
    BadInput,
    HandrailError,
    InvalidDefinition,
    TryLater,
)
from handrail.gateway.model import ModelGateway, Planner
from handrail.hosts import Host, Transaction, of_session
from handrail.inputs import by_model, described
from handrail.ledger.accept import Inserted, accept, accepted_by_key
from handrail.ledger.catalog import Announcement, Listed, seen_every_s
from handrail.ledger.errors import UnknownRun
from handrail.ledger.ledger import MOST_COUNTED, DueStep, Ledger, NewRun, Ruled, row_of
from handrail.ledger.liveness import say_alive
from handrail.ledger.lock import IntentLock, LocalLock, RedisLock
from handrail.ledger.rows import state_columns
from handrail.ledger.schema import check_migrated
from handrail.limits import chosen_budget, chosen_limits
from handrail.reconciler.sweep import Reconciler
from handrail.reconciler.timer import SweepTimer
from handrail.reports import checked as checked_report
from handrail.reports import receive
from handrail.runs import Run, run_of
from handrail.settings import Settings
from handrail.shared_valkey import SharedValkey, find
from handrail.signals import Messenger
from handrail.tasks.calls import AROUND, Around, Called, ToolCall, at_any_time, call, in_thread
from handrail.tasks.runtime import Runtime
from handrail.tasks.step import run_step

log = logging.getLogger("handrail")
#: Threads, and so connections, by which a sweep asks PostgreSQL about many runs in doubt.
SWEEP_HANDS: Final = 4
_RUN_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_MAX_LISTED: Final = 10_000
_SHORTEST_POLL_S: Final = 0.001  # without any pause, waiting would be all that the process does


@dataclass(eq=False)
class NoBroker(BadInput):
    """The fleet needs a broker and none is configured."""

    code: ClassVar[str] = "no-broker"

    def __str__(self) -> str:
        return (
            "no broker is configured: set HANDRAIL_BROKER_URL (redis://host:6379/0), or start the"
            " command without one to have it start an embedded Valkey"
        )


@dataclass(eq=False)
class BrokerUnreachable(TryLater):
    """The broker, or the server of the intent lock, does not answer; nothing was started."""

    code: ClassVar[str] = "broker-unreachable"
    address: str
    problem: str

    def __str__(self) -> str:
        return (
            f"the broker at {self.address} does not answer ({self.problem}): start it, or correct"
            " HANDRAIL_BROKER_URL"
        )


@dataclass(eq=False)
class StillRunning(HandrailError):
    """The run did not rest within the time that was waited."""

    code: ClassVar[str] = "still-running"
    run_id: str
    status: str

    def __str__(self) -> str:
        return f"run {self.run_id!r} is still {self.status}: wait longer, or see 'handrail show'"


class Fleet:
    """A deployment of controlled agents; see the module.

    Settings come from the environment (`HANDRAIL_*`); what is given here wins.
    """

    def __init__(
        self,
        name: str = "handrail",
        *,
        settings: Settings | None = None,
        database_url: str | None = None,
        broker_url: str | None = None,
        clock: Callable[[], int] | None = None,
        host: Host | None = None,
    ) -> None:
        self.name = name
        self._host = host
        self._given = {"database_url": database_url, "broker_url": broker_url}
        self._settings = settings
        self._clock = clock
        self.workflows: dict[str, Workflow] = {}
        self._latest: dict[str, Workflow] = {}
        self.models: dict[str, ModelGateway] = {}
        self._tools: dict[str, Tool] = {}
        self._driving: list[Runtime] = []  # of runs that are driven in this process
        #: How a model that is a plain function is called; None: on the event loop, so that it must
        #: not block.
        self.beside: Callable[..., Awaitable[Any]] | None = in_thread
        #: Makes what is entered around each call of a tool, a model or a query that is a plain
        #: function, in its thread: a framework's connections, its application.
        self.around_calls: Around | None = None
        self._joined: SharedValkey | None = None
        _let_celery_find(sys._getframe(1).f_globals)

    @cached_property
    def settings(self) -> Settings:
        """The settings, read when they are first needed."""
        return self._settings or Settings.read(**self._given)

    @property
    def _reach(self) -> Settings:
        """The settings with which the broker is reached.

        Without one of its own, a fleet joins the embedded Valkey that a command runs for its home.
        """
        settings = self.settings
        in_memory = settings.database in ("sqlite://", "sqlite:///:memory:")
        if settings.broker_url or in_memory:  # a ledger that no other process can see
            return settings
        if self._joined is None:
            self._joined = find(settings.home)
        if self._joined is None:
            return settings
        return settings.model_copy(update={"broker_url": self._joined.url})

    # ---- declaring -------------------------------------------------------------------------------

    def tool(
        self,
        name: str | None = None,
        *,
        query: Callable[..., Any] | None = None,
        shadow: Callable[..., Any] | None = None,
        report_secret: str | None = None,
        compensation: Compensation | None = None,
        **contract: Any,
    ) -> Callable[[Callable[..., Any]], Tool]:
        """Declare a tool: a decorator that turns a function into a `Tool` with an executable
        contract.

        The function takes (arguments, call): its input model, or a plain dict where the first
        parameter has no pydantic annotation, and a `ToolCall`. It returns the result (its output
        model, or a JSON value), raises `ToolRefused` to say that nothing happened, `ToolUnclear`
        where it does not know. `query`, `shadow`, `report_secret` and `compensation` are described
        at `Tool`. The other parameters are those of `ToolContract`; enumerations may be given as
        text. Whatever is not declared has the most conservative default. Raises
        `InvalidDefinition`.
        """
        if callable(name):
            raise InvalidDefinition(
                getattr(name, "__name__", "tool"),
                "a function alone is no tool: declare at least its side effect, as in"
                " @fleet.tool(side_effect='read')",
            )

        def declare(function: Callable[..., Any]) -> Tool:
            must_be_functions("a tool", function=function)
            title = str(name or getattr(function, "__name__", type(function).__name__))
            found = _models_of(title, function, sys._getframe(1).f_locals, given=contract)
            options = {**found, **_enums(contract), "can_query": query is not None}
            try:
                declared = ToolContract(
                    name=title,
                    description=options.pop("description", inspect.getdoc(function) or ""),
                    **options,
                )
            except TypeError as error:
                raise InvalidDefinition(f"tool {title!r}", str(error)) from None
            tool = Tool(
                declared,
                function,
                query,
                shadow=shadow,
                report_secret=report_secret,
                compensation=compensation,
            )
            if title in self._tools:
                raise InvalidDefinition(f"tool {title!r}", "it is declared twice")
            self._tools[title] = tool
            return tool

        return declare

    def workflow(self, workflow: Workflow) -> Workflow:
        """Register a workflow; the version registered last is the one that new runs get."""
        if not isinstance(workflow, Workflow):
            raise InvalidDefinition(f"{workflow!r}", "is no workflow: make a Workflow(...) of it")
        key = f"{workflow.name}@{workflow.version}"
        if key in self.workflows and self.workflows[key] is not workflow:
            raise InvalidDefinition(f"workflow {key}", "it is registered twice: raise its version")
        self.workflows[key] = workflow
        self._latest[workflow.name] = workflow
        return workflow

    def model(
        self, name: str = "default", model: ModelGateway | Callable[..., Any] | None = None
    ) -> Any:
        """Name a model: a gateway, or a function that plays one. Also usable as a decorator."""
        if model is None:
            return lambda function: self.model(name, function)
        if hasattr(model, "stream"):
            self.models[name] = model
        elif callable(model):
            self.models[name] = Planner(model, beside=self.beside)
        else:
            problem = "give a function of the observation, or a gateway with stream(request)"
            raise InvalidDefinition(f"model {name!r}", problem)
        return model

    # ---- running ---------------------------------------------------------------------------------

    def enqueue(
        self,
        workflow: str,
        *,
        goal: str,
        input: Json | BaseModel = None,
        principal: Principal | str | None = None,
        tenant: str | None = None,
        budget: Budget | Mapping[str, Any] | None = None,
        limits: CallLimits | Mapping[str, Any] | None = None,
        dedupe_key: str | None = None,
        run_id: str | None = None,
        traceparent: str | None = None,
        mode: Mode | str = Mode.LIVE,
        session: Any = None,
    ) -> str:
        """Accept a run and publish its first step; returns the run's id.

        Everything is checked before anything is written: an unknown workflow, a malformed goal or
        input, a budget that is negative, fractional or missing each raise an error with a stable
        code. A broker that is down is no error: the run is accepted, and the sweep publishes it.
        With a `dedupe_key` (unique within the tenant) a double click is one run. With
        `mode="shadow"` the run does everything but dispatch: its trace shows what it would write.
        Without a `traceparent` the run belongs to the trace that is current here, if any.

        With a SQLAlchemy `session` on the ledger's database, or in a fleet that has a `host`, the
        run is a row of the transaction that is open there: a rollback leaves nothing, and its step
        is published after the commit. See `handrail.client` for processes that have no workflows.
        """
        new = self._new_run(
            workflow,
            goal=goal,
            input=input,
            principal=principal,
            tenant=tenant,
            budget=budget,
            limits=limits,
            dedupe_key=dedupe_key,
            run_id=run_id,
            traceparent=traceparent,
            mode=mode,
        )
        if session is not None:
            transaction: Transaction | None = of_session(session)
        else:
            transaction = None if self._host is None else self._host.transaction()
        if transaction is None:
            return self._accept_here(new)
        if transaction.elsewhere:
            if dedupe_key is not None and run_id is None:
                key = (new.tenant, new.state.mode.value, dedupe_key)
                settled = accepted_by_key(self.ledger.database, *key)
                new = replace(new, run_id=settled, state=replace(new.state, run_id=settled))
            transaction.on_commit(functools.partial(self._accept_here, new))
            return new.run_id
        inserted = accept(
            transaction,
            row_of(new),
            postgres=transaction.postgres,
            schema=self.settings.database_schema if transaction.postgres else "",
        )
        transaction.on_commit(functools.partial(self._publish_first, inserted))
        return inserted.run_id

    def _accept_here(self, new: NewRun) -> str:
        inserted = self.ledger.insert_run(new)
        self._publish_first(inserted)
        return inserted.run_id

    def _publish_first(self, inserted: Inserted) -> None:
        if inserted.due is not None and self._reach.broker_url:
            self._courier.publish([message_of(inserted.due)])

    def announce(self) -> None:
        """Tell the ledger's catalog which versions of workflows this fleet has.

        Every worker does it when it starts. To do it in a release step as well lets light clients
        accept runs of a new workflow before its first worker is up. Safe to repeat.
        """
        self.ledger.announce(
            [
                Announcement(flow.name, flow.version, dumps(self.entry_of(flow)))
                for flow in self.workflows.values()
            ]
        )

    def workflow_versions(self) -> list[Listed]:
        """List the versions that the fleet's workers have announced, by name, the latest first."""
        return self.ledger.catalog.listed(most=MOST_COUNTED)

    def entry_of(self, workflow: Workflow) -> dict[str, Json]:
        """What the catalog holds of a workflow: all that accepting a run of it takes, so that a web
        process can do it without the workflow's code. See `handrail.client`.
        """
        nobody = {name: None for name in ("input", "principal", "dedupe_key", "run_id")}
        asked = checked_request(goal="-", tenant="-", traceparent=None, mode="live", **nobody)
        new = _run_of(workflow, asked, None)
        row = row_of(new)
        columns = {name: value for name, value in row.columns.items() if name not in _OF_A_RUN}
        at_rest = state_columns(replace(new.state, levels=(), pending=None))
        (event,) = new.events
        entry: dict[str, Json] = normal(  # type: ignore[assignment]  # of an object it is one
            {
                "columns": columns,
                "at_rest": {
                    "levels": at_rest["levels"],
                    "pending": at_rest["pending"],
                    "phase": Phase.RESUME.value,
                },
                "accepted": {k: v for k, v in event.detail.items() if k not in _OF_A_RUN},
                "per_tool": dict(new.budget.per_tool),
                "tools": [tool.name for tool in workflow.tools],
                "working_ms": row.working_ms,
                "expires_ms": row.expires_ms,
                "input": None if workflow.input is None else described(workflow.input),
            }
        )
        return entry

    def _new_run(
        self,
        name: str,
        *,
        goal: str,
        input: Json | BaseModel,
        principal: Principal | str | None,
        tenant: str | None,
        budget: Budget | Mapping[str, Any] | None,
        limits: CallLimits | Mapping[str, Any] | None,
        dedupe_key: str | None,
        run_id: str | None,
        traceparent: str | None,
        mode: Mode | str,
    ) -> NewRun:
        workflow = self._latest.get(name) if isinstance(name, str) else None
        if workflow is None:
            raise UnknownWorkflow(str(name), tuple(sorted(self._latest)))
        asked = checked_request(
            goal=goal,
            input=input,
            principal=principal,
            tenant=self.settings.tenant if tenant is None else tenant,
            dedupe_key=dedupe_key,
            run_id=run_id,
            traceparent=tracing.current() if traceparent is None else traceparent,
            mode=mode,
        )
        text = asked.input
        given = json.loads(text) if workflow.input is None else by_model(workflow.input, text)
        return _run_of(workflow, asked, given, budget=budget, limits=limits)

    def get(self, run_id: str | Run) -> Run:
        """Read a run with all its observations. Raises `UnknownRun`."""
        row = self.ledger.read(_id(run_id))
        run = run_of(row)
        if run.observation_count > len(run.observations):  # more than the window that a step sees
            texts = tuple(seen["text"] for seen in self.ledger.observations(run.run_id))
            run = replace(run, observations=texts)
        return run

    def trace(self, run_id: str | Run) -> list[dict[str, Any]]:
        """Read a run's trace: events with a gapless sequence number, public facts only."""
        self.get(run_id)
        return self.ledger.trace(_id(run_id))

    def runs(
        self,
        *,
        status: str | None = None,
        workflow: str | None = None,
        tenant: str | None = None,
        reason: str | None = None,
        tool: str | None = None,
        older_than_ms: int = 0,
        limit: int = 50,
    ) -> list[Run]:
        """List runs, newest first; with `tool` those that have sent, or rest on, a write of it.
        Raises `InvalidQuery`.
        """
        rows = self.ledger.list_runs(
            status=_one_of("status", status, RunStatus),
            workflow=_named("workflow", workflow),
            tenant=_named("tenant", tenant),
            reason=_named("reason", reason),
            tool=_named("tool", tool),
            older_than_ms=_listed("older_than_ms", older_than_ms, least=0, most=2**52),
            limit=_listed("limit", limit, least=1, most=_MAX_LISTED),
        )
        return [self.get(row["id"]) for row in rows]

    def effects(
        self,
        *,
        unresolved: bool = False,
        status: str | None = None,
        tool: str | None = None,
        tenant: str | None = None,
        workflow: str | None = None,
        older_than_ms: int = 0,
        limit: int = 50,
    ) -> list[dict[str, Any]]:
        """List effects, oldest first; `unresolved`: those of unknown outcome. Raises
        `InvalidQuery`.
        """
        return self.ledger.effects(
            unresolved=unresolved,
            status=_one_of("status", status, EffectStatus),
            tool=_named("tool", tool),
            tenant=_named("tenant", tenant),
            workflow=_named("workflow", workflow),
            older_than_ms=_listed("older_than_ms", older_than_ms, least=0, most=2**52),
            limit=_listed("limit", limit, least=1, most=_MAX_LISTED),
        )

    def wait(
        self,
        run_id: str | Run,
        *,
        timeout_s: float = 60.0,
        ended: bool = False,
        poll_s: float = 0.05,
    ) -> Run:
        """Wait until a run rests: has ended, or waits for a person. `ended=True` waits for the end
        alone.

        Raises `StillRunning` after `timeout_s`.
        """
        _must_be_seconds("timeout_s", timeout_s, least=0.0)
        _must_be_seconds("poll_s", poll_s, least=_SHORTEST_POLL_S)
        limit = time.monotonic() + timeout_s
        while True:
            run = run_of(self.ledger.read(_id(run_id)))
            if run.ended or (run.rests and not ended):
                return self.get(run.run_id)
            if time.monotonic() >= limit:
                raise StillRunning(run.run_id, run.status)
            time.sleep(poll_s)

    def cancel(
        self, run_id: str | Run, *, by: Principal | str | None = None, reason: str = ""
    ) -> Run:
        """Wish a run to be cancelled: nothing new is started; what is in flight is resolved, not
        denied, and a write that proves to have happened is undone where its tool says how.

        Returns the run as it is right after: `cancelled`, `cancelling`, or `reconciling` where the
        outcome of a write is not known yet. A run that has ended is returned as it is. `by` is an
        operator who is recorded with it; None: the application, on whoever's behalf it does so.
        """
        decide = protocol.cancel
        reason = words_of_person("reason", reason, needed=False)
        if by is not None:
            who = self.desk.on_duty(by)
            must_be_allowed(who, Act.CANCEL)
            must_see(who, self.get(run_id))
            decide = functools.partial(_cancelled_by, who=who, reason=reason)
        ruled = self.ledger.rule(_id(run_id), decide)
        if ruled.ruling is None:
            self._changed_nothing("a wish to cancel", ruled)
        run = self.get(run_id)  # before anybody is told: what is in flight is still in flight
        self._signal(run.run_id)
        for runtime in tuple(self._driving):
            runtime.cancel_signalled(run.run_id)
        return run

    def approve(
        self,
        token: str,
        *,
        by: Principal | str,
        run: str | Run | None = None,
        comment: str = "",
    ) -> Run:
        """Agree to the exact action that an approval token was issued for; see `Desk.approve`."""
        return self.desk.approve(token, by=by, run=run, comment=comment)

    def reject(self, approval_id: str, *, by: Principal | str, reason: str) -> Run:
        """Refuse a request for approval: its run stops, and the tool is never called."""
        return self.desk.reject(approval_id, by=by, reason=reason)

    def answer(self, run: str | Run, text: str, *, by: Principal | str) -> Run:
        """Answer the question that a run has asked; it goes on with the time it had left."""
        return self.desk.answer(run, text, by=by)

    @cached_property
    def desk(self) -> Desk:
        """What people do with this fleet: approvals, handoffs, the audit."""
        return Desk(self)

    @cached_property
    def _messenger(self) -> Messenger:
        return Messenger(self)

    @cached_property
    def own_secret(self) -> str:
        """What signs approval tokens where no other process can see the ledger."""
        return secrets.token_urlsafe(48)

    def pause(
        self,
        scope: str = "fleet",
        name: str = "",
        *,
        reason: str,
        by: Principal | str = "operator",
    ) -> Pause:
        """Let nothing be dispatched any more in a `scope`: fleet, tenant, workflow or tool.

        `name` says which (of a fleet: none). A dispatch that is committed already goes on, and so
        do reads, queries and outcomes. A run whose write is held back waits without using its
        working time; its hard expiry does not pause. `by` is recorded in the audit: an
        operator, of that tenant or of all; a name is believed until anybody was admitted. Raises
        `InvalidPause`, `NotAllowed`.
        """
        checked, named = checked_scope(scope, name)
        who = self._acting(by, Act.PAUSE, checked, named)
        why, _ = checked_words(reason, who.subject)
        entry = _of_a_pause(who, Act.PAUSE, checked, named, why)
        return self.ledger.pause(checked, named, entry=entry)

    def resume(
        self,
        scope: str = "fleet",
        name: str = "",
        *,
        by: Principal | str = "operator",
        reason: str = "",
    ) -> bool:
        """Lift a pause; what waits on it goes on. Returns whether there was one."""
        checked, named = checked_scope(scope, name)
        who = self._acting(by, Act.RESUME, checked, named)
        why = words_of_person("reason", reason, needed=False)
        entry = _of_a_pause(who, Act.RESUME, checked, named, why)
        return self.ledger.resume(checked, named, entry=entry)

    def ledger_rewound(
        self, *, reason: str, by: Principal | str = "operator", lost_from: int | None = None
    ) -> Rewind:
        """Say that the ledger was set back to an earlier state, as by a restored backup.

        To be said before workers start on it. Until it is cleared, a write that may have been sent
        in the lost time is not sent before its service was asked, under the rules by which every
        doubt is resolved. `lost_from` is the backup's latest moment, in milliseconds since the
        epoch; where it is not given, the last sign of life of a worker or a sweep that the ledger
        holds: nobody may have been at work since it was restored. Raises `FleetAtWork`,
        `InvalidMoment`, `NotAllowed`.
        """
        who = self._acting(by, Act.REWOUND, Scope.FLEET, "")
        why = words_of_person("reason", reason)
        entry = AuditEntry.by(who, Act.REWOUND, "ledger", tenant=None, reason=why)
        return self.ledger.rewinds.mark(entry, lost_from=lost_from)

    def ledger_cleared(
        self, *, reason: str, by: Principal | str = "operator", force: bool = False
    ) -> Sequence[int]:
        """Say that nothing which the ledger has lost can be sent again. Returns the numbers of the
        rewinds that were open. Raises `NotAllowed`, and `NotSettled` while runs from before them
        have not ended or doubts about the lost time are open, unless `force`.
        """
        who = self._acting(by, Act.CLEARED, Scope.FLEET, "")
        why = words_of_person("reason", reason)
        entry = AuditEntry.by(who, Act.CLEARED, "ledger", tenant=None, reason=why)
        return self.ledger.rewinds.clear(entry, force=force)

    def _acting(self, by: Principal | str, act: Act, scope: Scope, name: str) -> Principal:
        """Who does something to the fleet itself: an operator; who has to do with some tenants
        alone stops and starts those alone.
        """
        who = self.desk.on_duty(by)
        must_be_allowed(who, act, tenant=name if scope is Scope.TENANT else None)
        if scope is not Scope.TENANT and who.tenants is not None:
            raise NotAllowed(who.subject, act.value, "it belongs to other tenants, too")
        return who

    @property
    def tools_known(self) -> frozenset[str]:
        """The names of the tools that are declared here."""
        return frozenset(self._tools)

    def contracts_of(self, tool: str) -> list[ToolContract]:
        """The contracts of a name that are declared here; none where the tool is another's."""
        used = (one for workflow in self.workflows.values() for one in workflow.tools)
        declared = {id(one): one for one in (*self._tools.values(), *used)}
        return [one.contract for one in declared.values() if one.name == tool]

    @property
    def workflows_known(self) -> frozenset[str]:
        """The names of the workflows that are registered here."""
        return frozenset(self._latest)

    def pauses(self) -> list[Pause]:
        """List the pauses in force, the automatic ones included: a tool of which too many effects
        are unknown (`max_open_unknowns`) is sent nothing new until they are settled.
        """
        return self.ledger.pauses()

    def report(
        self,
        intent_key: str,
        answer: str,
        evidence: Json = None,
        *,
        tenant: str | None = None,
        report_id: str,
        sent_at: int,
        signature: str,
    ) -> Reported:
        """Take a provider's own word about an intent, from its signed webhook; see `sign_report`.

        `answer` is "applied", with the provider's record as `evidence`, "absent" or "pending";
        `sent_at` is in milliseconds since the epoch. A record settles a doubt, or opens one where
        absence was believed; whatever else is said is kept as evidence. The same `report_id` counts
        once. Raises a `ReportRefused` where the report does not count; nothing was changed then.
        """
        found = checked_report(
            intent_key=intent_key,
            answer=answer,
            evidence=evidence,
            tenant=self.settings.tenant if tenant is None else tenant,
            report_id=report_id,
            sent_at=sent_at,
        )
        declared = [*self._tools.values(), *(t for w in self.workflows.values() for t in w.tools)]
        known = {tool.report_secret for tool in declared if tool.report_secret}
        return receive(
            found,
            signature,
            ledger=self.ledger,
            workflows=self.workflows,
            secrets=known,
            max_stall_ms=self.settings.max_stall_ms,
            send=self.send_due,
        )

    def _changed_nothing(self, what: str, ruled: Ruled) -> None:
        state = ruled.locked.state
        log.info("run %s: %s changed nothing, the run is %s", state.run_id, what, state.status)

    def send_due(self, due: DueStep | None) -> None:
        """Publish a step that a decision has made due, if it has; the sweep does what is missed."""
        if due is not None:
            self._publish([message_of(due)])

    def query_now(self, locked: Locked, effect: Effect) -> tuple[Answer, int]:
        """Ask a tool whether an effect took place, now; returns its answer, and when it was asked.

        For people: it is paid by nobody's budget, and settles nothing.
        """
        return self.make_reconciler().query_now(locked, effect), locked.now

    # ---- in this process -------------------------------------------------------------------------

    def run(self, workflow: str, *, goal: str, timeout_s: float = 60.0, **options: Any) -> Run:
        """Run a workflow in this process, without a broker, until it rests; for tests and
        notebooks.

        The same machine, ledger and reconciler as on a fleet. Options are those of `enqueue`. A run
        that waits for a person is returned as it is: approve it, then `drive` it on.
        """
        _must_be_seconds("timeout_s", timeout_s, least=0.0)
        new = self._new_run(workflow, goal=goal, **(_NO_OPTIONS | options))
        inserted = self.ledger.insert_run(new)
        return self.drive(inserted.run_id, timeout_s=timeout_s)

    def drive(self, run_id: str | Run, *, timeout_s: float = 60.0) -> Run:
        """Drive an accepted run in this process until it rests. Raises `StillRunning` after
        `timeout_s`.
        """
        _must_be_seconds("timeout_s", timeout_s, least=0.0)
        limit = time.monotonic() + timeout_s
        queue: list[StepMessage] = []
        lock = LocalLock()
        runtime = self.make_runtime(publish=queue.extend, lock=lock)
        reconciler = self.make_reconciler(publish=queue.extend, lock=lock)
        self._driving.append(runtime)
        try:
            while True:
                while queue:
                    shared_loop().submit(self._run_step(runtime, queue.pop(0))).result()
                row = self.ledger.read(_id(run_id))
                run = run_of(row)
                if run.rests:
                    return self.get(run.run_id)
                if time.monotonic() >= limit:
                    raise StillRunning(run.run_id, run.status)
                if row["due_at"] is not None and row["due_at"] <= row["now"]:
                    queue.append(StepMessage(run_id=run.run_id, step=run.step, epoch=row["epoch"]))
                elif not reconciler.sweep():
                    time.sleep(0.02)
        finally:
            self._driving.remove(runtime)
            runtime.close()

    # ---- parts -----------------------------------------------------------------------------------

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger, checked to be migrated. Raises `NotMigrated`, `DatabaseUnavailable`.

        The embedded default, a file of our own in `home`, is made and migrated at its first use.
        """
        url = self.settings.database
        if not self.settings.database_url:
            self.upgrade_database()
        ledger = Ledger(
            url,
            clock=self._clock,
            lease_ms=self.settings.lease_ms,
            max_open_unknowns=self.settings.max_open_unknowns,
            max_open_handoffs=self.settings.max_open_handoffs,
            escalate_ms=int(self.settings.escalate_after_s * 1000),
            tell=self._messenger.tell,
            schema=self.settings.database_schema,
            version_patience_ms=int(self.settings.version_patience_s * 1000),
        )
        if ledger.database.in_memory:
            from handrail.ledger import migrate  # here: a worker never needs what it imports

            migrate.create_all(ledger.database)
        else:
            check_migrated(ledger.database)
        return ledger

    def upgrade_database(self) -> str:
        """Bring the ledger's database to this program's version; returns it. Safe to repeat."""
        if not self.settings.database_url:
            self.settings.home.mkdir(parents=True, exist_ok=True)
        from handrail.ledger import migrate

        return migrate.upgrade(self.settings.database, schema=self.settings.database_schema)

    @cached_property
    def celery(self) -> Celery:
        """The Celery app: tasks, queues, routes and beat schedule, with safe settings."""
        if not self._reach.broker_url:
            raise NoBroker
        pool = None if self.settings.pool == "loop" else self.settings.pool
        app = make_app(
            self.name,
            broker_url=self._reach.broker_url,
            in_flight=self.settings.in_flight,
            drain_timeout_s=self.settings.drain_timeout_s,
            key_prefix=self.settings.key_prefix,
            pool=pool,
        )
        register_step(app, self.handle_step)

        def sweep() -> None:  # not the method: Celery counts its `self` among a message's arguments
            self.sweep_now()

        # Not shared: every other Celery app of the process, the host's too, would get this sweep.
        app.task(name=SWEEP_TASK, ignore_result=True, max_retries=0, shared=False)(sweep)
        app.conf.beat_schedule = self.beat_schedule()
        setattr(app, "handrail_drain", self._drain)  # noqa: B010  # the pool's hook; no attribute of Celery
        worker_init.connect(self._on_worker_init, weak=False)
        worker_ready.connect(self._on_worker_ready, weak=False)
        worker_shutdown.connect(self._on_worker_shutdown, weak=False)
        worker_process_shutdown.connect(self._on_worker_shutdown, weak=False)
        return app

    def beat_schedule(self) -> dict[str, Any]:
        """What Celery's beat sends for this fleet, to be merged into any app's `beat_schedule`.

        That app needs none of this fleet's code: only the same broker, with the same key prefix.
        """
        known = self.settings
        return {"handrail-sweep": sweep_entry(known.sweep_every_s, known.broker_url)}

    def verify(self, *, worker: bool = False) -> None:
        """Check what a process needs before it starts: database, broker, settings. Raises what
        it finds.
        """
        self.ledger.now()
        if not self._reach.broker_url:
            return
        found = [*(verify_app(self.celery) if worker else []), *verify_server(self.celery)]
        if self.settings.redis_url:  # the lock's own server
            found += verify_redis(self.settings.redis_url)
        if found and all(setting.code == "broker-unreachable" for setting in found):
            address = maybe_sanitize_url(self._reach.broker_url)  # without its password
            raise BrokerUnreachable(address, found[0].found)
        if found:
            raise UnsafeConfiguration(tuple(found))

    def make_runtime(
        self, *, publish: Callable[[Sequence[StepMessage]], object], lock: IntentLock | None = None
    ) -> Runtime:
        """Build what a process needs to run steps."""
        return Runtime(
            ledger=self.ledger,
            workflows=self.workflows,
            models=self.models,
            lock=lock or self._lock(),
            publish=publish,
            max_stall_ms=self.settings.max_stall_ms,
        )

    def make_reconciler(
        self,
        *,
        publish: Callable[[Sequence[StepMessage]], object] | None = None,
        lock: IntentLock | None = None,
        hands: int = 0,
    ) -> Reconciler:
        """Build a reconciler on this fleet's ledger; `hands` threads ask that for it."""
        return Reconciler(
            ledger=self.ledger,
            workflows=self.workflows,
            publish=publish or self._deliver,
            ask=functools.partial(ask_bounded, around=self.around_calls),
            lock=lock or self._lock(),
            max_stall_ms=self.settings.max_stall_ms,
            max_attempts=self.settings.max_attempts,
            queries=self.settings.queries_at_once,
            hands=hands,
        )

    def make_sweeper(self) -> Reconciler:
        """Build a reconciler for a process that sweeps for the whole fleet."""
        # SQLite has one writer at a time: more hands would only stand in each other's way.
        return self.make_reconciler(hands=SWEEP_HANDS if self.ledger.database.postgres else 0)

    def close(self) -> None:
        """Close what this process has opened."""
        self._close("_sweep_timer", "_reconciler", "_cancel_signal", "_runtime", "_publisher")
        self._close("_courier")
        self._close("ledger", "_messenger")

    @cached_property
    def _runtime(self) -> Runtime:
        return self.make_runtime(publish=self._publish)

    @cached_property
    def _reconciler(self) -> Reconciler:
        return self.make_sweeper()

    @cached_property
    def _sweep_timer(self) -> SweepTimer:
        return SweepTimer(self.make_sweeper(), every_s=self.settings.sweep_every_s)

    @cached_property
    def _publisher(self) -> Publisher:
        return Publisher(self.celery)

    @cached_property
    def _courier(self) -> Courier:
        """Publishes for who enqueues: a web request, say, which no broker may hold up."""
        return Courier(Publisher(self.celery, timeout_s=IN_PASSING_S))

    @cached_property
    def _cancel_signal(self) -> CancelSignal:
        return CancelSignal(self._reach.redis, key_prefix=self.settings.key_prefix)

    def _lock(self) -> IntentLock:
        return (
            RedisLock(self._reach.redis, prefix=self.settings.key_prefix)
            if self._reach.redis
            else LocalLock()
        )

    def _publish(self, messages: Sequence[StepMessage]) -> None:
        """Publish, bounded; a broker that is down loses nothing: the sweep publishes what is
        due.
        """
        if not self._reach.broker_url:
            return
        try:
            self._publisher.publish(messages)
        except PublishFailed as error:
            log.warning("[%s] %s", error.code, error)

    def _deliver(self, messages: Sequence[StepMessage]) -> None:
        """Publish, or raise what kept it from being done: `NoBroker`, `PublishFailed`."""
        if not self._reach.broker_url:
            raise NoBroker
        self._publisher.publish(messages)

    def _signal(self, run_id: str) -> None:
        if self._reach.redis:
            self._cancel_signal.send(run_id)

    # ---- inside a worker -------------------------------------------------------------------------

    async def handle_step(self, message: StepMessage) -> None:
        """Run the step that a message is about, if it is due."""
        await self._run_step(self._runtime, message)

    async def _run_step(self, runtime: Runtime, message: StepMessage) -> None:
        AROUND.set(self.around_calls)
        await run_step(runtime, message)

    def _drain(self, timeout_s: float) -> None:
        for name in ("_sweep_timer", "_reconciler"):
            part: SweepTimer | Reconciler | None = self.__dict__.get(name)
            if part is not None:
                part.stop()
        self._runtime.drain(timeout_s)

    def _on_worker_init(self, **_: object) -> None:
        """Refuse to start without a ledger; after any other exception Celery would go on."""
        try:
            self.announce()
        except HandrailError as error:
            raise SystemExit(f"error[{error.code}]: {error}") from None

    def sweep_now(self) -> None:
        """Sweep once in this process, unless another sweep has just been here."""
        self._reconciler.tick(every_s=self.settings.sweep_every_s)

    def _on_worker_ready(self, **_: object) -> None:
        self.begin_work()

    def begin_work(self) -> None:
        """Begin what goes on beside the steps of this process: leases, cancel signals, sweeps."""
        runtime = self._runtime
        every_s = seen_every_s(self.ledger.version_patience_ms)
        runtime.be_seen(functools.partial(self._say_seen, every_s), every_s=every_s)
        if self._reach.redis:
            self._cancel_signal.listen(runtime.cancel_signalled)
        if self.settings.sweep_in_workers:
            self._sweep_timer.start()

    def _say_seen(self, every_s: float) -> bool:
        """Say that this host is at work, and which versions are here; returns whether other workers
        have other ones.
        """
        say_alive(self.ledger.database, socket.gethostname())
        keys = self.workflows.keys()
        there = self.ledger.seen(keys, every_ms=int(every_s * 1000))
        if not there.issuperset(keys):  # the database was set back to before we came
            self.announce()
        return bool(there - keys)

    def end_work(self) -> None:
        """Give back what this process holds of runs, and close what it has opened."""
        self._drain(self.settings.drain_timeout_s)
        self._on_worker_shutdown()

    def _on_worker_shutdown(self, **_: object) -> None:
        self._close("_sweep_timer", "_reconciler", "_cancel_signal", "_runtime", "_messenger")

    def _close(self, *names: str) -> None:
        for name in names:
            part = self.__dict__.pop(name, None)
            if part is not None:
                part.close()


#: Of a run's row, what belongs to the one run; of its first event, too.
_OF_A_RUN: Final = frozenset(
    {
        *("id", "tenant", "goal", "principal", "input", "dedupe_key", "traceparent", "mode"),
        "subject",
    }
)

_NO_OPTIONS: Final[dict[str, Any]] = {
    "input": None,
    "principal": None,
    "tenant": None,
    "budget": None,
    "limits": None,
    "dedupe_key": None,
    "run_id": None,
    "traceparent": None,
    "mode": Mode.LIVE,
}


def _run_of(
    workflow: Workflow,
    asked: Asked,
    input: Json,
    *,
    budget: Budget | Mapping[str, Any] | None = None,
    limits: CallLimits | Mapping[str, Any] | None = None,
) -> NewRun:
    """Make a run of what was asked for; its input has been checked. Raises `InvalidBudget`."""
    who = Principal.from_json(asked.principal)
    chosen = chosen_budget(
        workflow.default_budget,
        budget,
        tools=[tool.name for tool in workflow.tools],
        permissions=who.permissions,
    )
    calls = chosen_limits(workflow.limits, limits, permissions=who.permissions)
    state = RunState(
        run_id=asked.run_id,
        tenant=asked.tenant,
        workflow=workflow.name,
        workflow_version=workflow.version,
        goal=asked.goal,
        principal=who,
        input=input,
        mode=Mode(asked.mode),
        budget=chosen,
        limits=calls,
        left=BudgetLeft.full(chosen),
    )
    accepted: dict[str, Json] = {
        "workflow": workflow.name,
        "version": workflow.version,
        "declared": workflow.declared(),
        "budget": normal(chosen.to_json()),
        "subject": who.subject,
        "mode": state.mode.value,
    }
    phase = Phase.RESUME
    first = workflow.stages[0]
    if isinstance(first, AgentLoop) and first.allowed is None and chosen.concurrency:
        # Such a loop's first command needs none of the workflow's own code, and saves a step.
        turn = machine.start(workflow, state, state.view(remaining_ms=chosen.deadline_ms))
        state, phase = turn.state, machine.phase_of(workflow, turn.state)
    return NewRun(
        run_id=asked.run_id,
        tenant=asked.tenant,
        workflow=workflow.name,
        workflow_version=workflow.version,
        goal=asked.goal,
        principal=who,
        input=state.input,
        budget=chosen,
        limits=calls,
        state=state,
        phase=phase,
        events=(TraceEvent("run.accepted", 0, accepted),),
        dedupe_key=asked.dedupe_key,
        traceparent=asked.traceparent,
    )


def ask_bounded(
    function: Callable[..., Any],
    arguments: Any,
    context: ToolCall,
    limit_ms: int,
    in_time: Callable[[], bool] = at_any_time,
    *,
    around: Around | None = None,
) -> Future[Called]:
    """Begin a call under its time limit, on the process's event loop or in a thread of its own."""

    async def ask() -> Called:
        AROUND.set(around)
        return await call(
            function,
            arguments,
            context,
            limit_ms=limit_ms,
            wish=asyncio.get_running_loop().create_future(),
            aborted=context.aborted,
            in_time=in_time,
        )

    return shared_loop().submit(ask())


def _of_a_pause(who: Principal, act: Act, scope: Scope, name: str, reason: str) -> AuditEntry:
    tenant = name if scope is Scope.TENANT else None
    return AuditEntry.by(who, act, f"pause:{scope.value}:{name}", tenant=tenant, reason=reason)


def _cancelled_by(locked: Locked, *, who: Principal, reason: str) -> Ruling | None:
    ruling = protocol.cancel(locked)
    if ruling is None:
        return None
    state = locked.state
    entry = AuditEntry.by(
        who,
        Act.CANCEL,
        f"run:{state.run_id}",
        tenant=state.tenant,
        run_id=state.run_id,
        reason=reason,
        before={"run": state.status.value},
        after={"run": ruling.state.status.value},
    )
    return replace(ruling, audit=entry)


def _let_celery_find(module: dict[str, Any]) -> None:
    """Make `celery -A module:fleet.celery` work for the module that makes a fleet.

    Celery looks the text after the colon up as one attribute, dots and all; this module-level
    `__getattr__` follows the dots. A module that has one of its own keeps it.
    """

    def follow(name: str) -> Any:
        first, *rest = name.split(".")
        if not rest or first not in module:
            raise AttributeError(f"module {module.get('__name__')!r} has no attribute {name!r}")
        return functools.reduce(getattr, rest, module[first])

    module.setdefault("__getattr__", follow)


def _id(run: str | Run) -> str:
    run_id = run.run_id if isinstance(run, Run) else run
    if not isinstance(run_id, str) or not _RUN_ID.match(run_id):
        raise UnknownRun(run_id)  # no run has such an id, and not every database can be asked
    return run_id


def _models_of(
    title: str,
    function: Callable[..., Any],
    names: Mapping[str, Any],
    *,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Take a tool's input and output models from its annotations; `names` are those of its scope.

    An annotation that cannot be read is refused: without its model nothing would be validated.
    """
    signature = inspect.signature(function)
    first = next(iter(signature.parameters.values()), None)
    annotated = {
        "input": first.annotation if first is not None else None,
        "output": signature.return_annotation,
    }
    scope = {**getattr(inspect.unwrap(function), "__globals__", {}), **names}
    found: dict[str, Any] = {}
    for role, annotation in annotated.items():
        if role in given or annotation is inspect.Signature.empty:
            continue
        holder = types.SimpleNamespace(__annotations__={role: annotation})
        try:
            model = typing.get_type_hints(holder, scope)[role]
        except Exception as error:
            raise InvalidDefinition(
                f"tool {title!r}",
                f"its annotation {annotation!r} cannot be read here ({error}): define the model"
                f" before the tool, or give {role}=",
            ) from None
        if isinstance(model, type) and issubclass(model, BaseModel):
            found[role] = model
    return found


def _enums(contract: Mapping[str, Any]) -> dict[str, Any]:
    kinds: dict[str, Callable[[str], Any]] = {
        "side_effect": SideEffect,
        "approval": Approval,
        "guarantee": Guarantee,
    }
    out = dict(contract)
    for name, kind in kinds.items():
        value = out.get(name)
        if isinstance(value, str):
            try:
                out[name] = kind(value)
            except ValueError:
                known = ", ".join(item.value for item in kind)  # type: ignore[attr-defined]
                raise InvalidDefinition(name, f"{value!r} is none of: {known}") from None
    if isinstance(out.get("volatile"), list | tuple | set):
        out["volatile"] = frozenset(out["volatile"])
    return out


def _named(field: str, value: str | None) -> str | None:
    if value is None or (isinstance(value, str) and value and value.isprintable()):
        return value
    raise InvalidQuery(field, f"give the name of a {field}")


def _one_of(field: str, value: str | None, known: type[StrEnum]) -> str | None:
    if value is None or value in tuple(known):
        return value
    raise InvalidQuery(field, f"give one of: {', '.join(known)}")


def _listed(field: str, value: int, *, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidQuery(field, f"give a whole number of {least} to {most}")
    return value


def _must_be_seconds(name: str, value: object, *, least: float) -> None:
    """A time that is no number, or NaN, would never be over."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= least:
        raise InvalidQuery(name, f"give a number of seconds, {least:g} or more")


__all__ = [
    "Fleet",
    "InvalidQuery",
    "InvalidRun",
    "NoBroker",
    "StillRunning",
    "UnknownRun",
    "UnknownWorkflow",
]
