"""The planted bugs: each breaks the product in one place while a schedule is played, and must be
found. A search that misses one of them would miss it in the product as well.

M1 to M20 are those of the fault plan (M9p, M10b and M15p are further forms of theirs, with people);
B10, B13 and B14 are those of the protocol's model that are not among them; D5 and D8 are two
readings of the protocol that were wrong; P1 to P4 are of consents, resolutions and the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from unittest import mock

from handrail.agent import effects, machine, protocol, resolution
from handrail.agent.budget import Phase
from handrail.agent.effects import (
    UNRESOLVED,
    Absent,
    Doubt,
    EffectStatus,
    ProvedAbsent,
    classify,
    may_send,
    resolve,
)
from handrail.agent.machine import RunState
from handrail.agent.protocol import Locked, Ruling
from handrail.agent.stage import End, Refused, Reply, Succeeded, Verdict
from handrail.agent.status import RunStatus
from handrail.agent.tools import FOREVER
from handrail.agent.trace import RUN_STOPPED
from handrail.canonical import digest
from handrail.gateway.model import ModelEvent, ModelRequest
from handrail.ledger import ledger as ledger_module
from handrail.ledger import session, statements
from handrail.ledger.errors import DatabaseUnavailable
from handrail.ledger.ledger import Claim, Ledger
from handrail.ledger.people import append_audit
from handrail.ledger.rows import Row, handoff_row
from handrail.ledger.session import ConnectionLost
from handrail.reconciler import sweep as sweep_module
from handrail.reconciler.sweep import Reconciler
from handrail.tasks import calls as calls_module
from handrail.tasks import sender as sender_module
from handrail.tasks import step as step_module
from handrail.tasks.calls import ToolCall
from tests.simulator import points, ports
from tests.simulator.ground import Ground

Planted = Iterator[None]


@dataclass(frozen=True, slots=True)
class Bug:
    """One planted bug."""

    id: str
    title: str
    plant: Callable[[Ground], AbstractContextManager[None]]


BUGS: Final[dict[str, Bug]] = {}


def _bug(id_: str, title: str) -> Callable[[Callable[[Ground], Planted]], None]:
    def register(plant: Callable[[Ground], Planted]) -> None:
        BUGS[id_] = Bug(id_, title, contextmanager(plant))

    return register


@contextmanager
def _replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for where, name, what in changes:
            stack.enter_context(mock.patch.object(where, name, what))
        yield


# ---- the effect and its identity -----------------------------------------------------------------


@_bug("M1", "the effect is recorded after the call")
def _recorded_after(ground: Ground) -> Planted:
    dispatch = step_module._Step._dispatch

    async def late(self: Any, command: Any, tool: Any, state: RunState) -> None:
        context = ToolCall(
            run_id=state.run_id,
            tenant=state.tenant,
            principal=state.principal,
            tool=command.tool,
            timeout_ms=command.timeout_ms,
            key=effects.upstream_key(state.tenant, command.intent_key or ""),
            intent_key=command.intent_key,
            not_after=ground.now() + command.timeout_ms,
        )
        answer: Any = None
        try:
            answer = await tool.execute(dict(command.arguments), context)
        except Exception as error:
            answer = error

        async def remembered(arguments: Any, call: ToolCall) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        await dispatch(self, command, replace(tool, execute=remembered), state)

    with _replaced((step_module._Step, "_dispatch", late)):
        yield


@_bug("M2", "no unique key: each run has an effect of its own")
def _no_unique_key(ground: Ground) -> Planted:
    plan = Ledger._plan

    def own(self: Ledger, tx: Any, row: Row, planned: Any) -> str:
        intent = f"{planned.command.intent_key}/{row['id']}"
        command = replace(planned.command, intent_key=intent)
        return plan(self, tx, row, replace(planned, command=command))

    with _replaced((Ledger, "_plan", own)):
        yield


@_bug("M7", "sent again with a new key")
def _new_key(ground: Ground) -> Planted:
    def fresh(**fields: Any) -> ToolCall:
        if fields.get("key"):
            fields["key"] = digest(fields["key"], str(fields["attempt"]))
        return ToolCall(**fields)

    with _replaced((sender_module, "ToolCall", fresh)):
        yield


@_bug("M8", "the key's lifetime is ignored")
def _immortal_key(ground: Ground) -> Planted:
    def ever(effect: Any, **options: Any) -> bool:
        if effect.terms.key_valid_for_ms:
            effect = replace(effect, terms=replace(effect.terms, key_valid_for_ms=FOREVER))
        return may_send(effect, **options)

    with _replaced((protocol, "may_send", ever), (effects, "may_send", ever)):
        yield


@_bug("M17", "the lock is trusted instead of the ledger")
def _lock_trusted(ground: Ground) -> Planted:
    dispatch = protocol.dispatch

    def trusting(locked: Locked, command: Any, **options: Any) -> Any:
        effect = locked.effect
        if effect is not None and effect.status in UNRESOLVED:
            free = replace(effect, status=EffectStatus.PLANNED, owner_run_id=None, attempts=0)
            locked = replace(locked, effect=free)
        return dispatch(locked, command, **options)

    with _replaced((protocol, "dispatch", trusting)):
        yield


# ---- fences --------------------------------------------------------------------------------------


@_bug("M3", "no epoch is compared")
def _no_epoch(ground: Ground) -> Planted:
    claim, commit, dispatch = statements.claim, statements.commit_run, protocol.dispatch

    def claims(postgres: bool) -> str:
        return claim(postgres).replace(" AND r.epoch = :epoch", "")

    def commits(postgres: bool, *, due: bool) -> str:
        return commit(postgres, due=due).replace(
            " AND r.epoch = :epoch AND r.claim_id = :claim_id\n            AND"
            " r.lease_until IS NOT NULL",
            "",
        )

    def dispatches(locked: Locked, command: Any, **options: Any) -> Any:
        claim_id = options["claim_id"]
        held = replace(locked, claim_id=claim_id, lease_until=locked.now + 30_000)
        return dispatch(held, command, **options)

    with _replaced(
        (statements, "claim", claims),
        (statements, "commit_run", commits),
        (protocol, "dispatch", dispatches),
        (step_module._Step, "_mine", lambda self, locked: True),
    ):
        yield


@_bug("M9", "the cancel is read outside the claim")
def _cancel_read_outside(ground: Ground) -> Planted:
    claim, sql = Ledger.claim, statements.claim

    def blind(postgres: bool) -> str:
        return (
            sql(postgres)
            .replace("AND r.status IN ('queued', 'running', 'executing')", "")
            .replace("AND r.cancel_requested_at IS NULL", "")
            .replace("AND r.due_at <= :now", "")
        )

    def reads_first(self: Ledger, run_id: str, epoch: int, **options: Any) -> Claim | None:
        rows = self._read(run_id)
        if not rows or rows[0]["cancel_requested_at"] is not None or rows[0]["due_at"] is None:
            return None
        return claim(self, run_id, epoch, **options)

    with _replaced((statements, "claim", blind), (Ledger, "claim", reads_first)):
        yield


@_bug("B14", "no last look before the call, at the effect or at the clock")
def _no_last_look(ground: Ground) -> Planted:
    whole_ms, make = sender_module.whole_ms, calls_module.call

    async def calls(*args: Any, in_time: Any = None, **options: Any) -> Any:
        return await make(*args, **options)

    with _replaced(
        (step_module._Step, "_last_look", lambda self, sending: True),
        (sender_module, "whole_ms", lambda seconds: max(1, whole_ms(seconds))),
        (step_module, "call", calls),
    ):
        yield


# ---- budgets -------------------------------------------------------------------------------------


@_bug("M4", "the budget is loaded, changed and saved")
def _load_modify_save(ground: Ground) -> Planted:
    rule = Ledger.rule
    names = ("steps_left", "model_calls_left", "tool_calls_left")

    def saves(self: Ledger, run_id: str, decide: Any, **options: Any) -> Any:
        loaded = self.read(run_id)
        done = rule(self, run_id, decide, **options)
        if done.ruling is not None:
            before, after = done.locked.state.left, done.ruling.state.left
            spent = {
                "steps_left": before.steps - after.steps,
                "model_calls_left": before.model_calls - after.model_calls,
                "tool_calls_left": before.tool_calls - after.tool_calls,
            }
            saved = {name: max(0, loaded[name] - spent[name]) for name in names}
            sets = ", ".join(f"{name} = :{name}" for name in names)
            ground.connection.execute(
                f"UPDATE handrail_run SET {sets} WHERE id = :id", {**saved, "id": run_id}
            )
        return done

    with _replaced((Ledger, "rule", saves)):
        yield


@_bug("M5", "a model call is charged after it was made")
def _charged_after(ground: Ground) -> Planted:
    run = step_module._Step.run

    async def charges_late(self: Any) -> None:
        run_id, asked = self.claim.run_id, self.claim.phase is Phase.DECIDE
        paid = asked and self.claim.refusal is None
        if paid:
            ground.connection.execute(
                "UPDATE handrail_run SET model_calls_left = model_calls_left + 1 WHERE id = ?",
                (run_id,),
            )
        await run(self)
        if paid:
            ground.connection.execute(
                "UPDATE handrail_run SET model_calls_left = max(0, model_calls_left - 1)"
                " WHERE id = ?",
                (run_id,),
            )

    with _replaced((step_module._Step, "run", charges_late)):
        yield


@_bug("M19", "a client repeats a model call by itself")
def _hidden_retry(ground: Ground) -> Planted:
    stream = ports.SimModel.stream

    async def repeats(self: Any, request: ModelRequest) -> Any:
        heard: list[ModelEvent] = []
        try:
            async for event in stream(self, request):
                heard.append(event)
        except ConnectionError:
            heard = [event async for event in stream(self, request)]
        for event in heard:
            yield event

    with _replaced((ports.SimModel, "stream", repeats)):
        yield


# ---- doubt ---------------------------------------------------------------------------------------


@_bug("M6", 'the first "absent" is believed')
def _first_absent(ground: Ground) -> Planted:
    def hasty(effect: Any, answer: Any, **options: Any) -> Any:
        if isinstance(answer, Absent):
            return ProvedAbsent()
        return resolve(effect, answer, **options)

    with _replaced((sweep_module, "resolve", hasty)):
        yield


@_bug("B13", "a verdict is committed whatever the effect's token is by now")
def _verdict_without_token(ground: Ground) -> Planted:
    def blind(self: Reconciler, run_id: str, effect: Any, answer: Any, sent_at: int) -> None:
        def decide(locked: Locked) -> Ruling | None:
            current, status = locked.effect, locked.state.status
            doubtful = current is not None and current.status is EffectStatus.UNKNOWN
            if not doubtful or status is not RunStatus.RECONCILING:
                return None
            conclusion = resolve(  # as it was when it was asked
                effect,
                answer,
                sent_at=sent_at,
                now=locked.now,
                max_stall_ms=self.max_stall_ms,
                jitter=self.jitter(),
            )
            ruling = protocol.concluded(locked, conclusion, max_stall_ms=self.max_stall_ms)
            return protocol.with_evidence(ruling, answer, sent_at)

        decide.__qualname__ = "Reconciler._conclude.<locals>.decide"
        self._done(self.ledger.rule(run_id, decide))

    with _replaced((Reconciler, "_conclude", blind)):
        yield


@_bug("D5", "absence is judged by when the answer is read, not by when it was asked")
def _judged_when_read(ground: Ground) -> Planted:
    def late(effect: Any, answer: Any, *, sent_at: int, now: int, **options: Any) -> Any:
        return resolve(replace(effect, absences=1), answer, sent_at=now, now=now, **options)

    with _replaced((sweep_module, "resolve", late)):
        yield


@_bug("D8", "a refusal proves the absence of earlier attempts too")
def _refusal_proves_all(ground: Ground) -> Planted:
    def hasty(effect: Any, end: End, reply: Reply | None) -> EffectStatus:
        return classify(replace(effect, doubt=Doubt.NONE), end, reply)

    with _replaced(
        (protocol, "classify", hasty),
        (protocol, "_unsent_status", lambda effect: EffectStatus.ABSENT),
    ):
        yield


@_bug("B10", "the time of the call is not counted to the dispatch deadline")
def _short_deadline(ground: Ground) -> Planted:
    dispatch = protocol.dispatch

    def short(locked: Locked, command: Any, **options: Any) -> Any:
        ruling, answer = dispatch(locked, command, **options)
        if ruling is not None and isinstance(answer, protocol.Go):
            effect = replace(answer.effect, dispatch_deadline_at=locked.now - 20_000)
            ruling = replace(ruling, effect=effect)
        return ruling, answer

    with _replaced((protocol, "dispatch", short)):
        yield


@_bug("M14", "an error at the commit is taken for a failure of the write")
def _commit_error_is_failure(ground: Ground) -> Planted:
    outcome = step_module._Step._outcome

    def hasty(self: Any, sending: Any, end: End, reply: Reply | None, **how: Any) -> None:
        once = replace(sending, ledger=_Once(sending.ledger))
        try:
            outcome(self, once, end, reply, **how)
        except (ConnectionLost, DatabaseUnavailable):
            outcome(self, sending, End.RETURNED, Refused("not stored"), **how)

    with _replaced((step_module._Step, "_outcome", hasty)):
        yield


class _Once:
    """A ledger that does not look whether its commit has happened."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def rule(self, *args: Any, **options: Any) -> Any:
        with mock.patch.object(session, "TRIES", 1):
            return self._ledger.rule(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


@_bug("M15", '"cancelled" is written over an unknown effect')
def _cancelled_over_unknown(ground: Ground) -> Planted:
    cancel = protocol.cancel

    def at_once(locked: Locked) -> Ruling | None:
        return cancel(replace(locked, effect=None, lease_until=None))

    at_once.__qualname__ = "cancel"
    with _replaced((protocol, "cancel", at_once)):
        yield


# ---- the outbox ----------------------------------------------------------------------------------


@_bug("M12", "a step is published, and there is no outbox")
def _no_outbox(ground: Ground) -> Planted:
    with _replaced((Reconciler, "_republish", lambda self, due: None)):
        yield


@_bug("M13", "there is no sweep")
def _no_sweep(ground: Ground) -> Planted:
    with _replaced(
        (Reconciler, "sweep", lambda self, **options: 0),
        (Reconciler, "tick", lambda self, **options: None),
    ):
        yield


# ---- people, ends and clocks ---------------------------------------------------------------------


@_bug("M11", "an approval is not compared with the arguments")
def _inexact_approval(ground: Ground) -> Planted:
    lacking = protocol.approval_problem

    def inexact(locked: Locked, command: Any, contract_hash: str | None = None) -> str | None:
        if locked.approval is not None:
            command = replace(command, arguments_hash=locked.approval.arguments_hash)
        return lacking(locked, command, contract_hash)

    with _replaced((protocol, "approval_problem", inexact)):
        yield


@_bug("M9p", "a consent rests on what was read before the lock")
def _consents_to_a_reading(ground: Ground) -> Planted:
    rule = Ledger.rule

    def reads_first(self: Ledger, run_id: str, decide: Any, **options: Any) -> Any:
        if ground.schedule.current.point is not points.DECIDE:
            return rule(self, run_id, decide, **options)
        read = rule(self, run_id, lambda _: None, **options).locked
        return rule(self, run_id, lambda _: decide(read), **options)

    with _replaced((Ledger, "rule", reads_first)):
        yield


@_bug("M10", "an approval is used up before the dispatch, in a transaction of its own")
def _used_up_before(ground: Ground) -> Planted:
    rule = Ledger.rule

    def uses_first(self: Ledger, run_id: str, decide: Any, **options: Any) -> Any:
        if ground.schedule.current.point is not points.DISPATCH:
            return rule(self, run_id, decide, **options)
        read = rule(self, run_id, lambda _: None, **options).locked
        approval, effect = read.approval, read.effect
        if approval is not None and effect is not None and effect.approval_id is None:
            _use_up(ground, approval.id, effect.id)

        def decided(locked: Locked) -> Any:
            ruling = decide(replace(locked, approval=approval))
            return ruling and replace(ruling, consumes_approval=False)

        return rule(self, run_id, decided, **options)

    with _replaced((Ledger, "rule", uses_first)):
        yield


@_bug("M10b", "an approval is used up after the dispatch, in a transaction of its own")
def _used_up_after(ground: Ground) -> Planted:
    rule = Ledger.rule

    def uses_later(self: Ledger, run_id: str, decide: Any, **options: Any) -> Any:
        used: list[tuple[str, str]] = []

        def decided(locked: Locked) -> Any:
            ruling = decide(locked)
            if ruling is None or not ruling.consumes_approval:
                return ruling
            assert locked.approval is not None and locked.effect is not None
            used[:] = [(locked.approval.id, locked.effect.id)]
            return replace(ruling, consumes_approval=False)

        done = rule(self, run_id, decided, **options)
        for approval_id, effect_id in used:
            _use_up(ground, approval_id, effect_id)
        return done

    with _replaced((Ledger, "rule", uses_later)):
        yield


def _use_up(ground: Ground, approval_id: str, effect_id: str) -> None:
    ground.connection.execute(
        "UPDATE handrail_approval SET status = 'consumed', effect_id = ?"
        " WHERE id = ? AND status = 'approved'",
        (effect_id, approval_id),
    )


@_bug("M15p", "a person is believed, and the service's answer is not")
def _believes_people(ground: Ground) -> Planted:
    lacking = resolution._unproved

    def trusting(locked: Locked, choice: Any, decision: Any, max_stall_ms: Any) -> Any:
        return lacking(locked, replace(choice, asks_tool=False), decision, max_stall_ms)

    with _replaced((resolution, "_unproved", trusting)):
        yield


@_bug("P1", "a token is not marked as used")
def _token_for_ever(ground: Ground) -> Planted:
    def unspent(self: Ledger, tx: Any, consent: Any, now: int) -> None:
        tx.run(
            "INSERT INTO handrail_consent (approval_id, who, at, token_hash)"
            " VALUES (:approval_id, :who, :now, :hash)",
            {
                "approval_id": consent.approval_id,
                "who": consent.who,
                "hash": consent.token_hash,
                "now": now,
            },
        )

    with _replaced((Ledger, "_write_consent", unspent)):
        yield


@_bug("P2", "a matter is resolved whatever has become of it since")
def _resolves_anything(ground: Ground) -> Planted:
    resolve_, close = resolution.resolve, Ledger._close_handoffs

    def blind(locked: Locked, decision: Any, **options: Any) -> Any:
        return resolve_(locked, replace(decision, seen=None), **options)

    def any_matter(self: Ledger, tx: Any, row: Row, handoff_id: str | None, **options: Any) -> Any:
        if handoff_id is None:
            return matter(self, tx, row, handoff_id, **options)
        found = tx.run("SELECT * FROM handrail_handoff WHERE id = :id", {"id": handoff_id})
        return handoff_row(found[0]), None

    def closes_again(self: Ledger, tx: Any, row: Row, ruling: Ruling, now: int) -> None:
        if ruling.closing is not None:
            tx.run(
                "UPDATE handrail_handoff SET status = 'open', resolution = NULL,"
                " resolved_at = NULL WHERE id = :id",
                {"id": ruling.closing.handoff.id},
            )
        close(self, tx, row, ruling, now)

    matter = Ledger._lock_matter
    with _replaced(
        (resolution, "resolve", blind),
        (Ledger, "_lock_matter", any_matter),
        (Ledger, "_close_handoffs", closes_again),
    ):
        yield


@_bug("P3", "whether a consent or an answer is in time is judged by a clock that is late")
def _late_clock(ground: Ground) -> Planted:
    approve, answer = protocol.approve, protocol.answer

    def approves(locked: Locked, **options: Any) -> Any:
        return approve(replace(locked, now=locked.now - 60_000), **options)

    def answers(locked: Locked, **options: Any) -> Any:
        return answer(replace(locked, now=locked.now - 60_000), **options)

    with _replaced((protocol, "approve", approves), (protocol, "answer", answers)):
        yield


def _record(entry: Any, tx: Any, now: int) -> None:
    append_audit(tx, entry, now, postgres=False)


@_bug("P4", "what a person did is recorded in a transaction of its own")
def _recorded_apart(ground: Ground) -> Planted:
    rule = Ledger.rule
    kept: list[Any] = []

    def later(tx: Any, entry: Any, now: int, **options: Any) -> None:
        kept.append(entry)

    def records_later(self: Ledger, run_id: str, decide: Any, **options: Any) -> Any:
        kept.clear()
        done = rule(self, run_id, decide, **options)
        for entry in kept:
            self.people.transact(partial(_record, entry))
        return done

    with _replaced((Ledger, "rule", records_later), (ledger_module, "append_audit", later)):
        yield


@_bug("M16", "a claim of completion is believed")
def _believes_claims(ground: Ground) -> Planted:
    async def believes(self: Any, state: RunState, command: Any) -> Verdict:
        return Verdict(End.RETURNED, True)

    with _replaced((step_module._Step, "_verify", believes)):
        yield


@_bug("M18", "a stop without its reason")
def _no_reason(ground: Ground) -> Planted:
    stopped = machine._stopped

    def silent(state: RunState, command: Any, view: Any, events: list[Any]) -> RunState:
        state = stopped(state, command, view, events)
        told = {k: v for k, v in events[-1].detail.items() if k != "reason"}
        assert events[-1].type == RUN_STOPPED
        events[-1] = replace(events[-1], detail=told)
        return state

    with _replaced((machine, "_stopped", silent)):
        yield


@_bug("M20", "every process goes by its own wall clock")
def _wall_clocks(ground: Ground) -> Planted:
    def wall() -> int:
        who = ground.schedule.current.name
        return ground.now_ms + (40_000 if who.startswith("sweeper") else 0)

    with _replaced((ground.ledger.database, "_clock", wall), (ground, "sweeps_ahead_ms", 40_000)):
        yield


__all__ = ["BUGS", "Bug", "Succeeded"]
