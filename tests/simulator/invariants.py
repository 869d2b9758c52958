"""The judge: it sees what becomes durable and what reaches the service, and holds every schedule
against I1 to I13. The service's own records count, never the ledger's alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from handrail.agent.effects import Effect, EffectStatus
from handrail.agent.protocol import Locked, Ruling
from handrail.agent.stage import arguments_hash
from handrail.agent.status import (
    STOPS,
    TERMINAL,
    TRANSITIONS,
    Category,
    Reason,
    RunEvent,
    RunStatus,
)
from handrail.agent.tools import FOREVER
from handrail.tasks.calls import ToolCall
from tests.simulator import points
from tests.simulator.people_judge import PeopleJudge
from tests.simulator.points import Point
from tests.simulator.service import CANARY, UNDO, Kind, Order

if TYPE_CHECKING:
    from tests.simulator.schedule import Schedule

Row = Mapping[str, Any]


class Violation(AssertionError):
    """A promise was broken: which, and how."""

    def __init__(self, promise: str, problem: str) -> None:
        super().__init__(f"{promise}: {problem}")
        self.promise = promise


class Judge:
    """The judge of one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._service = schedule.service
        self._cancelled: set[str] = set()
        self._epochs: dict[str, int] = {}
        self.people = PeopleJudge(schedule, self._broken)
        self.paused = False
        self.sent_calls = 0
        self.first: Violation | None = None  # seen while the fleet was at work

    def _broken(self, promise: str, problem: str) -> Violation:
        """What is seen while the fleet's own code is on the stack, which may catch it."""
        violation = Violation(promise, problem)
        self.first = self.first or violation
        return violation

    # ---- what becomes durable --------------------------------------------------------------------

    def wrote(self, point: Point, params: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """A statement of the step's path is committed."""
        if point is points.CLAIM:
            for row in rows:
                run_id = row["id"]
                if run_id in self._cancelled:
                    raise self._broken("I7", f"{run_id} was claimed after its cancel was committed")
                self._epoch(run_id, row["epoch"])
        elif point is points.COMMIT:
            if rows and params["epoch"] < self._epochs.get(params["id"], 0):
                raise self._broken("I11", f"a stale commit of {params['id']} was taken")
        elif point is points.DRAIN:
            for row in rows:
                self._epoch(row["id"], row["epoch"])

    def _epoch(self, run_id: str, epoch: int) -> None:
        if epoch <= self._epochs.get(run_id, 0):
            raise self._broken("I11", f"the epoch of {run_id} did not rise")
        self._epochs[run_id] = epoch

    def ruled(self, point: Point, locked: Locked, ruling: Ruling) -> None:
        """A ruling is committed."""
        run_id, before, after = locked.state.run_id, locked.effect, ruling.effect
        if ruling.lease == "take":
            self._epoch(run_id, locked.epoch + 1)
        self.people.ruled(locked, ruling, self._cancelled)
        if ruling.wish:
            self._cancelled.add(run_id)
        if before is None or after is None:
            return
        if before.status is not after.status:
            self._moved(point, run_id, before.status, after.status, ruling)
            consent = self._schedule.plan.kind.approval != "never"
            if after.status is EffectStatus.DISPATCHED and consent:
                self.people.dispatched(locked, after)
            if (before.status, after.status) == (EffectStatus.UNKNOWN, EffectStatus.ABSENT):
                self._believed_absent(run_id, after)

    def _moved(
        self,
        point: Point,
        run_id: str,
        before: EffectStatus,
        after: EffectStatus,
        ruling: Ruling,
    ) -> None:
        if after is EffectStatus.DISPATCHED and self.paused:
            raise self._broken("pause", f"{run_id} dispatched while the fleet was paused")
        undoes = point is points.UNDO_DISPATCH
        if after is EffectStatus.DISPATCHED and run_id in self._cancelled and not undoes:
            raise self._broken("I7", f"{run_id} dispatched after its cancel was committed")
        proved = after in (EffectStatus.APPLIED, EffectStatus.ABSENT)
        if before is EffectStatus.UNKNOWN and proved and ruling.evidence is None:
            raise self._broken("I9", f"the effect of {run_id} is {after} without evidence")

    def _believed_absent(self, run_id: str, effect: Effect) -> None:
        """What was believed absent has not happened. Only under a key that never dies may a request
        leave however late, and the ledger learn of it afterwards.
        """
        order = effect.tenant, str(effect.arguments["order"])
        late = self._schedule.plan.kind.key_valid_for_ms >= FOREVER
        if order in self._service.records and not late:
            raise self._broken("I9", f"{run_id} believes {order} absent, and it took effect")

    def sent(self, kind: Kind, call: ToolCall, arguments: Mapping[str, Any]) -> None:
        """A write call leaves a worker."""
        self.sent_calls += 1
        if self._schedule.run_plan(call.run_id).mode == "shadow":
            raise self._broken("shadow", f"{call.run_id} only shadows, and sends {arguments}")
        if kind.approval != "never" and not self.people.agreed_to(call.tenant, arguments):
            raise self._broken("I6", f"{call.run_id} sends {arguments}, and nobody agreed to that")

    def published(self, text: str) -> None:
        """A message goes to the broker."""
        if CANARY in text:
            raise self._broken("I13", "a message holds what a model or a tool said")

    # ---- the end ---------------------------------------------------------------------------------

    def judge(self) -> None:
        """Everybody rests: hold the ledger against the service's records."""
        schedule, rows = self._schedule, self._schedule.ground.rows
        if self.first is not None:
            raise self.first
        if schedule.ground.errors:
            raise Violation("the log", schedule.ground.errors[0])
        runs = {row["id"]: row for row in rows("SELECT * FROM handrail_run")}
        effects = {
            (row["tenant"], json.loads(row["arguments"])["order"]): row
            for row in rows("SELECT * FROM handrail_effect")
        }
        traces: dict[str, list[dict[str, Any]]] = {run_id: [] for run_id in runs}
        for row in rows("SELECT * FROM handrail_trace ORDER BY run_id, seq"):
            if CANARY in row["events"]:
                raise Violation("I13", f"the trace of {row['run_id']} holds what was said")
            events = json.loads(row["events"])
            if row["seq"] != len(traces[row["run_id"]]) or row["count"] != len(events):
                raise Violation("I13", f"the trace of {row['run_id']} has a gap at {row['seq']}")
            traces[row["run_id"]] += [{**event, "at": row["at"]} for event in events]
        self._effects(effects)
        self._approvals(effects, rows("SELECT * FROM handrail_approval"))
        holders = {r["run_id"] for r in rows("SELECT run_id FROM handrail_effect_holder")}
        for run_id, row in runs.items():
            self._run(row, traces[run_id], effects, holders)
        self.people.judge(runs, traces)
        self._count(runs, traces, effects)

    def _effects(self, effects: Mapping[Order, Row]) -> None:
        """I1, I10: what the service did, and what the ledger says of it."""
        times = Counter(done.order for done in self._service.performed)
        for order, count in times.items():
            if count > 1 and order not in self.people.mistaken:
                raise Violation("I1", f"{order} took effect {count} times")
            if order not in effects:
                raise Violation("I10", f"{order} took effect, and the ledger knows nothing of it")
        for order, row in effects.items():
            status = EffectStatus(row["status"])
            if status in (EffectStatus.DISPATCHED, EffectStatus.UNKNOWN):
                raise Violation("I2", f"nobody settles {order}: it is {status} for good")
            if order in self._service.lied or order in self.people.mistaken:
                continue
            happened = order in times
            if happened and status in (EffectStatus.PLANNED, EffectStatus.ABSENT):
                raise Violation("I10", f"{order} took effect, and the ledger says {status}")
            if not happened and status in (EffectStatus.APPLIED, EffectStatus.COMPENSATED):
                raise Violation("I10", f"{order} is {status} in the ledger, and never happened")
            undo = (order[0], UNDO + order[1])
            if undo in self._service.lied:
                continue
            if undo in times and status is EffectStatus.APPLIED:
                raise Violation("I10", f"{order} was undone, and the ledger says {status}")
            by_hand = order in self._service.by_hand
            if undo not in times and status is EffectStatus.COMPENSATED and not by_hand:
                raise Violation("I10", f"{order} is {status}, and was never undone")

    def _approvals(self, effects: Mapping[Order, Row], approvals: Sequence[Row]) -> None:
        """I6: what took effect was agreed to, exactly; each dispatch was judged when it was
        committed.
        """
        kind = self._schedule.plan.kind
        if kind.approval == "never":
            return
        by_effect: dict[str, list[Row]] = {}
        for row in approvals:
            if row["effect_id"] is not None:
                by_effect.setdefault(row["effect_id"], []).append(row)
        for done in self._service.performed:
            effect = effects[done.order]
            used = by_effect.get(effect["id"], [])
            if not used or any(one["status"] != "consumed" for one in used):
                raise Violation("I6", f"{done.order} took effect without a consent")
            exact = arguments_hash(kind.name, {"order": done.order[1], "amount": done.amount})
            if exact not in {one["arguments_hash"] for one in used}:
                raise Violation("I6", f"{done.order} took effect, and something else was agreed")

    def _run(
        self,
        row: Row,
        events: Sequence[dict[str, Any]],
        effects: Mapping[Order, Row],
        holders: set[str],
    ) -> None:
        run_id, status = row["id"], RunStatus(row["status"])
        plan = self._schedule.run_plan(run_id)
        if len(events) != row["trace_seq"]:
            raise Violation("I13", f"{run_id}: {len(events)} events, {row['trace_seq']} counted")
        _replayed(run_id, row, events)
        _explained(run_id, row, events)
        self._spending(row)
        order = (plan.tenant, plan.order)
        writes = plan.workflow != "reading" and plan.mode == "live"
        wrong = run_id in self.people.mistaken_runs or order in self.people.mistaken
        if status is RunStatus.COMPLETED and writes and not wrong:
            if not self._service.has(*order):
                raise Violation("I8", f"{run_id} completed, and {order} never happened")
            # A person may undo what others have ended on; nobody may rest on it after that.
            undone = self._service.by_hand.get(order, events[-1]["at"]) < events[-1]["at"]
            undone = undone or self._service.has(order[0], UNDO + order[1])
            if run_id in holders and undone:
                raise Violation("I8", f"{run_id} completed on {order}, which was undone")
            held = effects.get(order)
            mine = held is not None and held["owner_run_id"] == run_id
            if held is not None and mine and held["status"] != "applied":
                raise Violation("I8", f"{run_id} completed over an effect {held['status']}")
        self._after_the_wish(run_id, events)

    def _spending(self, row: Row) -> None:
        """I3: no call was made that was not charged, and no charge exceeds its limit."""
        run_id, budget = row["id"], json.loads(row["budget"])
        calls = self._service.calls
        kept = row["tool_calls_reserved"] + row["compensations_reserved"]
        left = row["tool_calls_left"] + kept
        for name, made, charged in (
            ("model", calls["model", run_id], budget["model_calls"] - row["model_calls_left"]),
            (
                "tool",
                calls["read", run_id] + calls["write", run_id],
                budget["tool_calls"] - left,
            ),
        ):
            if made > charged:
                raise Violation("I3", f"{run_id} made {made} {name} calls and paid {charged}")
            if charged > budget[f"{name}_calls"]:
                raise Violation("I3", f"{run_id} spent {charged} {name} calls, more than it has")

    def _after_the_wish(self, run_id: str, events: Sequence[dict[str, Any]]) -> None:
        wished = False
        for event in events:
            wished = wished or event["type"] == "cancel.requested"
            sends = event["type"] == "tool.started" and event["detail"]["idempotency_key_hash"]
            if wished and sends and "compensates" not in event["detail"]:
                raise Violation("I7", f"{run_id}: a dispatch is traced after the wish to cancel")

    def _count(
        self,
        runs: Mapping[str, Row],
        traces: Mapping[str, Sequence[dict[str, Any]]],
        effects: Mapping[Order, Row],
    ) -> None:
        schedule = self._schedule
        tally, plan = schedule.tally, schedule.plan
        tally.schedules += 1
        tally.wrong += bool(self.people.mistaken or self.people.mistaken_runs)
        tally.resolved.update(
            row["resolution"]
            for row in schedule.ground.rows(
                "SELECT resolution FROM handrail_handoff WHERE resolved_reason IS NOT NULL"
            )
        )
        for run_id, row in runs.items():
            tally.ends[f"{row['status']} ({row['reason']})"] += 1
            kind = "read" if plan.shape == "read" else plan.kind.name
            tally.runs[kind] += 1
            if row["status"] == RunStatus.HANDED_OFF:
                tally.handed_off[kind, _why(row, traces[run_id])] += 1


def _why(row: Row, events: Sequence[dict[str, Any]]) -> str:
    """Why a run was handed off, as short as a table needs it."""
    stop = next(event for event in reversed(events) if event["type"] == "run.stopped")
    return str(stop["detail"].get("problem", row["reason"]))


# ---- the trace -----------------------------------------------------------------------------------


def _replayed(run_id: str, row: Row, events: Sequence[dict[str, Any]]) -> None:
    """I4: the moves that the trace holds lead through the transition table to the run's status."""
    status = RunStatus.QUEUED
    version = 0
    for event in events:
        detail = event["detail"]
        if "event" in detail and "from" in detail:
            if detail["from"] != status:
                raise Violation("I4", f"{run_id}: {event['type']} from {detail['from']}, {status}")
            moved = TRANSITIONS[status].get(RunEvent(detail["event"]))
            if moved is None or moved != detail.get("to", detail.get("status")):
                raise Violation("I4", f"{run_id}: no move {detail['event']} in {status}")
            status = moved
        new = detail.get("new_version", version)
        if not version <= new <= version + 1:
            raise Violation("I4", f"{run_id}: state version {version}, then {new}")
        version = new
    if status != row["status"]:
        raise Violation("I4", f"{run_id} is {row['status']}, and its trace leads to {status}")
    if status in TERMINAL and (row["lease_until"] or row["due_at"] or row["wake_at"]):
        raise Violation("I4", f"{run_id} has ended, and somebody still looks at it")


def _explained(run_id: str, row: Row, events: Sequence[dict[str, Any]]) -> None:
    """I5: after the last resume exactly one stop, with a reason that follows from the trace."""
    status = RunStatus(row["status"])
    if status is RunStatus.AWAITING_APPROVAL:
        return
    last = max((n for n, e in enumerate(events) if e["type"] == "run.resumed"), default=-1)
    stops = [event for event in events[last + 1 :] if event["type"] == "run.stopped"]
    if len(stops) != 1:
        raise Violation("I5", f"{run_id} has {len(stops)} stops after its last resume")
    detail = stops[0]["detail"]
    if detail.get("reason") != row["reason"]:
        raise Violation(
            "I5", f"{run_id} stopped as {detail.get('reason')}, its row says {row['reason']}"
        )
    for fact in ("budget_left", "evidence_ref", "category"):
        if fact not in detail:
            raise Violation("I5", f"{run_id}: its stop has no {fact}")
    if not _follows(Reason(row["reason"]), row, stops[0], events):
        raise Violation("I5", f"{run_id}: {row['reason']} does not follow from its trace")


def _follows(
    reason: Reason, row: Row, stop: Mapping[str, Any], events: Sequence[dict[str, Any]]
) -> bool:
    """Recompute a stop's reason from the events before it."""
    types = {event["type"] for event in events}
    detail = stop["detail"]

    def any_of(type_: str, **facts: Any) -> bool:
        return any(
            event["type"] == type_ and all(event["detail"].get(k) == v for k, v in facts.items())
            for event in events
        )

    event, category = STOPS[reason]
    if detail["category"] != category.value:
        return False
    if "resolution" in detail:
        return any_of("handoff.resolved", resolution=detail["resolution"], by=detail["by"])
    left = detail["budget_left"]
    match reason:
        case Reason.COMPLETED:
            return any_of("completion.verified", verified=True)
        case Reason.CANCELLED:
            return "cancel.requested" in types or bool(detail.get("shadow"))
        case Reason.COMPENSATED:
            return "effect.compensated" in types
        case Reason.DEADLINE_EXHAUSTED:
            return bool(left["deadline_ms"] == 0)
        case Reason.EXPIRED:
            return bool(stop["at"] >= row["expires_at"])
        case Reason.VERIFICATION_FAILED:
            return any_of("completion.verified", verified=False) or "completion.failed" in types
        case Reason.MODEL_FAILED:
            return "model.failed" in types
        case Reason.UNKNOWN_EFFECT:
            elsewhere = any_of("run.moved", event=RunEvent.INTENT_WITH_PERSON.value)
            return elsewhere or _doubted(detail, types)
        case Reason.TOOL_FAILED:
            failed = any_of("result.classified", status="failed")
            return failed or "tool.failed" in types or detail.get("evidence") == "absent"
        case Reason.WORKER_LOST:
            return int(detail["attempts"]) >= 5
        case Reason.CLARIFICATION_REQUIRED:
            return any_of("proposal.received", kind="clarify")
        case Reason.OUTPUT_BUDGET_EXHAUSTED:
            return "model.failed" in types or left["output_bytes"] == 0
        case Reason.INTENT_CONFLICT | Reason.APPROVAL_EXPIRED | Reason.APPROVAL_REJECTED:
            return True
    if reason is Reason.TOOL_CALL_BUDGET_EXHAUSTED:
        # A write may need more than one: to be confirmed, and perhaps to be undone.
        return bool(left["tool_calls"] < 3 or left.get("tool_calls.lookup") == 0)
    if category is Category.BUDGET:
        dimension = reason.value.removesuffix("-budget-exhausted").replace("-", "_")
        name = {"step": "steps", "model_call": "model_calls"}
        return bool(left[name.get(dimension, dimension)] == 0)
    if event in (RunEvent.PROPOSAL_INVALID, RunEvent.REPETITION_FOUND, RunEvent.PERMISSION_DENIED):
        told = any_of("proposal.rejected", stable_reason_code=reason.value)
        return told or "problem" in detail
    return True


_DOUBTS: Final = frozenset({"effect.reconciliation-required", "effect.resolved"})


def _doubted(detail: Row, types: set[str]) -> bool:
    return bool(types & _DOUBTS) or "trigger" in detail or "problem" in detail or "effect" in detail
