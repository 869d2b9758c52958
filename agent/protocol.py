"""Every decision about a run and its effect that is made under the row's lock.

The ledger locks the run row, then its effect, hands both in as a `Locked` value and writes the
`Ruling` that comes back, in one transaction. What a cancel, a lost lease, a dispatch, a receipt or
a query's answer means is said here and nowhere else. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeAlias

from handrail.agent import machine, trace
from handrail.agent.approvals import (
    Approval,
    ApprovalRefused,
    ApprovalStatus,
    IssuedToken,
    Token,
    consent_problem,
)
from handrail.agent.budget import BudgetLeft
from handrail.agent.commands import command_to_json
from handrail.agent.effects import (
    QUERIES_PER_DISPATCH,
    UNRESOLVED,
    Absent,
    Answer,
    Applied,
    AskAgain,
    CompensationRecord,
    Conclusion,
    Doubt,
    Effect,
    EffectStatus,
    GiveUp,
    NoAnswer,
    Pending,
    ProvedAbsent,
    ProvedApplied,
    Rewind,
    SendAgain,
    Trigger,
    answer_to_json,
    believed_absent,
    classify,
    first_query_at,
    may_be_forgotten,
    may_send,
    perhaps_sent,
    trigger_of,
    without_query,
)
from handrail.agent.loop import judge
from handrail.agent.machine import Mode, RunState, Turn
from handrail.agent.people import Act, AuditEntry
from handrail.agent.stage import (
    Answered,
    Approved,
    Doubtful,
    End,
    InvokeTool,
    Observation,
    Park,
    Refused,
    Reply,
    Resolved,
    Result,
    Stop,
    Succeeded,
    View,
)
from handrail.agent.status import (
    CLAIMABLE,
    TERMINAL,
    Reason,
    RunEvent,
    RunStatus,
    category_of,
)
from handrail.agent.tools import Principal
from handrail.agent.trace import TraceEvent
from handrail.agent.workflow import Workflow
from handrail.canonical import Json, canonical

_S, _E = RunStatus, RunEvent

#: A dispatch must leave its worker this long to record the outcome before the lease runs out.
LEASE_MARGIN_MS: Final = 5_000
#: How long a run waits before it asks again for an intent that is in flight elsewhere.
ELSEWHERE_MS: Final = 2_000
#: How long a run that waits on a pause waits before it tries again. Lifting a pause sets it going
#: at once, so that this is only how late the end of one that ends by itself is seen.
PAUSED_MS: Final = 5_000
#: While a query is under way, nobody else asks: for as long as it may take, and this much longer,
#: in which its answer is written.
QUERY_MARGIN_MS: Final = 5_000
#: How long a doubt waits that the sweep which has looked at it can do nothing about.
NOTHING_TO_DO_MS: Final = 30_000
#: While a sweep is at a compensation, no other begins with it.
UNDO_LEASE_MS: Final = 30_000
#: How often a compensation is sent at most while the service says "nothing happened, try again".
UNDO_ATTEMPTS: Final = 5
#: How long it waits before that the first time; then twice as long each time.
UNDO_PAUSE_MS: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenHandoff:
    """A matter that waits for a person, as the ledger holds it."""

    id: str
    reason: Reason
    effect_id: str | None
    claimed_by: str | None = None
    claimed_until: int | None = None
    version: int = 0

    def held_by_other(self, who: str, now: int) -> bool:
        """Whether somebody else is at it."""
        return self.claimed_by not in (None, who) and (self.claimed_until or 0) > now


@dataclass(frozen=True, slots=True)
class Consent:
    """A person's consent, to be written with what it leads to; the token that it used is spent."""

    approval_id: str
    who: str
    token_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """How a handoff ends: what a person has decided, why, and what was looked at."""

    handoff: OpenHandoff
    resolution: str
    who: str
    reason: str
    evidence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A version of a workflow that no worker has had for the patience, although others are there.

    `live` are the versions of that workflow which workers have; `seen_ms_ago` is None where nobody
    has ever announced it.
    """

    workflow: str
    version: str
    seen_ms_ago: int | None
    live: tuple[str, ...]
    patience_ms: int

    @property
    def wanted(self) -> str:
        """The version as a worker knows it."""
        return f"{self.workflow}@{self.version}"

    def to_json(self) -> dict[str, Json]:
        """What a person has to know of it."""
        return {
            "wanted": self.wanted,
            "seen_ms_ago": "never" if self.seen_ms_ago is None else self.seen_ms_ago,
            "live": list(self.live) or "none",
            "next_step": f"Start a worker that has {self.wanted} and resume the run, or settle what"
            " it was about in another way.",
        }


#: The evidence that a report is which may settle a doubt later: under "proves", its judged record.
KEPT_REPORT: Final = "report-kept"


@dataclass(frozen=True, slots=True)
class KeptReport:
    """A provider's record of an effect, judged when it came. `evidence` refers to it."""

    value: Json
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """A run and its effect under lock. Instants are milliseconds by the ledger's clock."""

    state: RunState
    now: int
    epoch: int
    claim_id: str | None
    lease_until: int | None
    due_at: int | None
    deadline_at: int | None
    remaining_ms: int | None
    expires_at: int
    attempts: int
    cancel_requested: bool
    effect: Effect | None = None
    current: bool = True  # the effect is the run's latest; False: a sender asked for an earlier one
    undoing: Effect | None = None  # what the run's effect undoes, where it is a compensation
    other_holders: int = 0
    approval: Approval | None = None
    consumed: Approval | None = None  # the consent that the effect was dispatched under
    issued: IssuedToken | None = None  # the token by which somebody consents
    input_expires_at: int | None = None  # when the question that the run has asked is too old
    handoff: OpenHandoff | None = None  # the matter that a person decides
    known: bool = False  # the observation that the sender's reply adds is in the state already
    paused: str | None = None  # the pause that this dispatch is under: "tool:refund"
    rewind: Rewind | None = None  # what the ledger has lost, where it was set back
    crowded: bool = False  # as many effects of its tool are unknown as may be
    flooded: bool = False  # as many handoffs of its subject are open as may be
    kept: KeptReport | None = None  # what settles this doubt, and came while it was none
    traceparent: str | None = None  # the trace that the run is a part of

    @property
    def lease_live(self) -> bool:
        """Whether somebody holds the right to run a step."""
        return self.lease_until is not None and self.lease_until > self.now

    @property
    def left_ms(self) -> int:
        """Working time left."""
        if self.deadline_at is None:
            return self.remaining_ms or 0
        return self.deadline_at - self.now

    @property
    def own_effect(self) -> EffectStatus | None:
        """The status of the run's own effect; None where it has none, or another run dispatched
        it.
        """
        if self.effect is None or self.effect.owner_run_id not in (None, self.state.run_id):
            return None
        return self.effect.status

    def view(self, *, cancelled: bool | None = None) -> View:
        """What the stages may know at this moment."""
        wish = self.cancel_requested if cancelled is None else cancelled
        return self.state.view(
            remaining_ms=self.left_ms, cancelled=wish, deadline_at=self.deadline_at
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What is to be written, in the transaction that holds the lock.

    `lease`: `keep` it, `release` it, or `take` it over (released, and the epoch raised, so that
    whoever held it is fenced off). `wake_in_ms` overrides when the sweep looks again. `publish`: a
    step is due.
    """

    state: RunState
    events: tuple[TraceEvent, ...] = ()
    observation: Observation | None = None
    outputs: Mapping[str, Json] = field(default_factory=dict)
    effect: Effect | None = None
    undoing: Effect | None = None  # what becomes of the effect that is to be undone
    undoes: bool = False  # the sweep goes on with the compensation
    lease: str = "release"
    attempts: int | None = None
    due_in_ms: int = 0
    wake_in_ms: int | None = None
    wish: bool = False
    park: Park | None = None
    approval_status: ApprovalStatus | None = None
    decided_by: str | None = None
    consent: Consent | None = None
    closing: Closing | None = None
    audit: AuditEntry | None = None
    answer_within_ms: int | None = None  # how long a question waits for its answer
    escalates: bool = False  # an open handoff has waited too long
    joins: bool = False  # the run becomes a holder of its effect
    consumes_approval: bool = False
    charges_tool: str | None = None
    evidence: tuple[str, Mapping[str, Json]] | None = None
    handoff: Mapping[str, Json] | None = None
    deadline_in_ms: int | None = None
    lease_ms: int | None = None
    kept_ms: int | None = None  # the working time that the run keeps while its clock stands still

    @property
    def publish(self) -> bool:
        """Whether a step of the run is due now."""
        return self.state.status in CLAIMABLE and self.lease != "keep" and self.due_in_ms == 0


# ---- a step's own decisions ----------------------------------------------------------------------


def settle_turn(turn: Turn, effect: Effect | None = None) -> Ruling:
    """Write a turn of the machine as it is."""
    state = turn.state
    if state.left.tool_calls_reserved:
        state = replace(state, left=state.left.settled())
    return Ruling(
        state=state,
        events=turn.events,
        observation=turn.observation,
        outputs=turn.outputs,
        park=turn.command if isinstance(turn.command, Park) else None,
        handoff=handoff_of(state, effect) if state.status is _S.HANDED_OFF else question_of(turn),
        attempts=0,
        answer_within_ms=_answer_within_ms(turn),
    )


def question_of(turn: Turn) -> dict[str, Json] | None:
    """The package of a run that has asked a question: as of any handoff, and the question itself.
    None where it has asked none.
    """
    state, command = turn.state, turn.command
    if state.status is not _S.AWAITING_INPUT or not isinstance(command, Stop):
        return None
    asked = {"question": command.detail.get("question", "none")}
    return {**handoff_of(state, None, reason=Reason.CLARIFICATION_REQUIRED), **asked}


def _answer_within_ms(turn: Turn) -> int | None:
    if turn.state.status is not _S.AWAITING_INPUT or not isinstance(turn.command, Stop):
        return None
    within_ms = turn.command.detail.get("answer_within_ms")
    return within_ms if type(within_ms) is int else None


def give_back(locked: Locked, problem: str, *, due_in_ms: int) -> Ruling:
    """Give the lease back without a charge: the write cannot happen now."""
    if locked.cancel_requested:
        return asked_first(locked) or _stop(locked, Reason.CANCELLED)
    events = [TraceEvent(trace.STEP_DEFERRED, locked.state.step, {"problem": problem})]
    state = machine.moved(locked.state, _E.LEASE_RETURNED, events)
    attempts = max(0, locked.attempts - 1)  # a lease given back is no attempt
    return Ruling(state=state, events=tuple(events), due_in_ms=due_in_ms, attempts=attempts)


def held_back(locked: Locked, effect: Effect) -> str | None:
    """Say what keeps a write of this effect from being dispatched now; None where nothing does.

    Sending an unknown intent again is how its doubt is settled: only a person's pause stops that.
    """
    if locked.paused is not None:
        return f"paused:{locked.paused}"
    if locked.crowded and effect.status is not EffectStatus.UNKNOWN:
        return f"too-many-unknown:{effect.tool}"
    if locked.flooded and effect.status is not EffectStatus.UNKNOWN:
        return f"too-many-handoffs:{locked.state.principal.subject}"
    return None


# ---- dispatch ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Go:
    """The dispatch is committed: call the tool until `deadline_at` with this effect's key."""

    effect: Effect
    deadline_at: int


@dataclass(frozen=True, slots=True)
class Halt:
    """Nothing is sent: the ruling says what becomes of the run."""

    code: str


Dispatch: TypeAlias = Go | Halt


def dispatch(
    locked: Locked,
    command: InvokeTool,
    *,
    claim_id: str,
    call_ms: int,
    max_stall_ms: int | None,
    contract_hash: str | None = None,
    kept_ms: int | None = None,
    unasked: bool = False,
    compensable: bool = False,
) -> tuple[Ruling | None, Dispatch]:
    """Decide whether a write may be sent now; source: the effect protocol's dispatch.

    The run must be mine, live, executing and not wished to be cancelled; the effect must be free;
    approval and tool call are consumed in the same transaction. `contract_hash` is that of the
    contract which the worker has, and has to be the one that was agreed to. `kept_ms` is the
    working time that the run had when it was claimed, if its claim did nothing but try this: under
    a pause, trying costs no time either. `unasked`: its precondition was not asked, because the
    write might have been made; `compensable`: how it is undone has to be recorded by now.
    """
    state, effect = locked.state, locked.effect
    if effect is None or locked.claim_id != claim_id or not locked.lease_live:
        return None, Halt("not-mine")
    if state.mode is Mode.SHADOW:  # the machine lets none come here: this is the second wall
        return _stop(locked, Reason.CANCELLED, shadow=True), Halt("shadow")
    asks = asked_first(locked)
    if asks is not None:
        return asks, Halt("asked-first")
    if locked.cancel_requested and locked.own_effect not in UNRESOLVED:
        return _stop(locked, Reason.CANCELLED), Halt("cancelled")
    if locked.cancel_requested or state.status is not _S.EXECUTING:
        return None, Halt("not-mine")
    if effect.arguments_hash != command.arguments_hash or effect.status is EffectStatus.COMPENSATED:
        problem = "the intent exists with other arguments, or was undone"
        return _stop(locked, Reason.INTENT_CONFLICT, problem=problem), Halt("intent-conflict")
    mine = effect.owner_run_id in (None, state.run_id)
    lacks_record = compensable and effect.compensation is None
    match effect.status:
        case EffectStatus.APPLIED:
            return _takes_recorded(locked, effect), Halt("recorded")
        case EffectStatus.HANDED_OFF | EffectStatus.COMPENSATING | EffectStatus.CONTRADICTED:
            return _with_person(locked, effect), Halt("with-person")
        case EffectStatus.DISPATCHED | EffectStatus.UNKNOWN if not mine:
            return give_back(locked, "intent-elsewhere", due_in_ms=ELSEWHERE_MS), Halt("elsewhere")
        case EffectStatus.DISPATCHED:
            return None, Halt("not-mine")
        case EffectStatus.PLANNED | EffectStatus.ABSENT if unasked:
            # The doubt has ended meanwhile, and nothing was made: now the world is to be asked.
            return give_back(locked, "precondition-unasked", due_in_ms=0), Halt("unasked")
        case EffectStatus.PLANNED | EffectStatus.ABSENT if lacks_record:  # the second wall
            lacks: dict[str, Json] = {"problem": f"how {effect.tool} is undone was not recorded"}
            turn = machine.stop(state, Reason.HANDOFF_REQUIRED, locked.view(), lacks)
            return settle_turn(turn, effect), Halt("unrecorded")
    if locked.left_ms <= 0:
        return spent(locked, Reason.DEADLINE_EXHAUSTED), Halt("deadline")
    refused = command.unusable(
        subject=state.principal.subject, state_version=state.state_version, now=locked.now
    )
    if refused is not None:
        reason, why = refused
        halt = Halt("stale" if reason is Reason.INVALID_PROPOSAL else "capability")
        if effect.status is EffectStatus.UNKNOWN:  # released for sending again: no stop ends that
            return _handed_off(locked, effect, why), halt
        return _stop(locked, reason, problem=why), halt
    left = paid_for(state.left, effect)
    if left is None:
        return spent(locked, Reason.TOOL_CALL_BUDGET_EXHAUSTED), Halt("budget")
    # An effect that is unknown here was released for sending the same key again.
    if not may_send(effect, now=locked.now, max_stall_ms=max_stall_ms):
        if effect.status is EffectStatus.ABSENT:
            turn = machine.stop(state, Reason.TOOL_FAILED, locked.view(), absence_of(effect))
            return settle_turn(turn), Halt("may-not-send")
        return _handed_off(locked, effect, "it may not be sent again"), Halt("may-not-send")
    consumes = command.approval and _needs_consent(locked, effect, command, contract_hash)
    if consumes:
        lacking = approval_problem(locked, command, contract_hash)
        if lacking is not None and effect.status is EffectStatus.UNKNOWN:  # no stop ends that
            return _handed_off(locked, effect, lacking), Halt("approval")
        if lacking is not None:
            return _stop(locked, Reason.APPROVAL_EXPIRED, problem=lacking), Halt("approval")
    held = held_back(locked, effect)
    if held is not None:
        kept_ms = locked.left_ms if kept_ms is None else kept_ms
        waits = give_back(locked, held, due_in_ms=PAUSED_MS)
        return replace(waits, kept_ms=kept_ms), Halt("paused")
    deadline_at = locked.now + min(call_ms, locked.left_ms)
    sent = replace(
        _sent(locked, effect, dispatcher=claim_id, deadline_at=deadline_at),
        approval_id=locked.approval.id if consumes and locked.approval else effect.approval_id,
    )
    ruling = Ruling(
        state=replace(state, left=left),
        events=(_started(locked, sent),),
        effect=sent,
        lease="keep",
        lease_ms=deadline_at - locked.now + LEASE_MARGIN_MS,
        consumes_approval=consumes,
        charges_tool=command.tool,
    )
    return ruling, Go(sent, deadline_at)


def asked_first(locked: Locked) -> Ruling | None:
    """Ask about a write that a run is about to send, before it is sent, and before anything ends
    the run: the ledger was set back, and the write may have been sent. Its service is asked, as
    after any doubtful attempt. None where the run is about to send none, or that is known.
    """
    effect, rewind = locked.effect, locked.rewind
    if effect is None or rewind is None or locked.undoing is not None:
        return None
    about_to = locked.state.status in (_S.RUNNING, _S.EXECUTING, _S.CANCELLING)
    if not about_to or not locked.current or not _rests_on(locked.state, effect):
        return None
    if not may_be_forgotten(effect, rewind):
        return None
    locked = _without_its_holder(locked)
    doubtful = perhaps_sent(effect, rewind, run_id=locked.state.run_id, now=locked.now)
    trigger = Trigger.WORKER_LOST
    detail: dict[str, Json] = {"trigger": trigger.value, "rewind": rewind.number}
    turn = machine.stop(locked.state, Reason.UNKNOWN_EFFECT, locked.view(), detail)
    return Ruling(
        state=turn.state,
        events=(_doubt_event(locked, doubtful, trigger), *turn.events),
        effect=doubtful,
        lease="take",
        wake_in_ms=first_query_at(0),
    )


def paid_for(left: BudgetLeft, effect: Effect) -> BudgetLeft | None:
    """What is left once a dispatch is paid: the call, the query that is to confirm it, and, kept
    until its end, what may have to undo it. None where that is not left.
    """
    calls = 1 + effect.terms.confirmed_by_query
    undo = effect.compensation
    keep = 0 if undo is None or left.compensations_reserved else undo.calls
    if not left.may_call(effect.tool, calls + keep):
        return None
    if undo is not None and not left.may_compensate(undo.tool):
        return None
    paid = left.tool_call_used(effect.tool)
    if effect.terms.confirmed_by_query:
        paid = paid.call_used()
    return paid.with_compensation(keep) if keep else paid


def _sent(locked: Locked, effect: Effect, *, dispatcher: str, deadline_at: int) -> Effect:
    """The effect once its dispatch is committed."""
    return replace(
        effect,
        status=EffectStatus.DISPATCHED,
        token=effect.token + 1,
        dispatcher=dispatcher,
        owner_run_id=locked.state.run_id,
        attempts=effect.attempts + 1,
        doubt=Doubt.UNPROVEN if effect.status is EffectStatus.UNKNOWN else effect.doubt,
        first_dispatched_at=effect.first_dispatched_at or locked.now,
        dispatch_deadline_at=deadline_at,
        queries_left=QUERIES_PER_DISPATCH,
        absences=0,
        unknown_since=None,
        trigger=None,
        next_query_at=None,
    )


def _started(locked: Locked, sent: Effect, **detail: Json) -> TraceEvent:
    assert sent.dispatch_deadline_at is not None
    started: dict[str, Json] = {
        "tool": sent.tool,
        "tool_call_id": f"{sent.id}:{sent.token}",
        "timeout_ms": sent.dispatch_deadline_at - locked.now,
        "idempotency_key_hash": sent.id,
        "arguments_hash": sent.arguments_hash,
    }
    return TraceEvent(trace.TOOL_STARTED, locked.state.step, started | detail)


def _needs_consent(
    locked: Locked, effect: Effect, command: InvokeTool, contract_hash: str | None
) -> bool:
    """Whether a dispatch has to consume a consent. One covers every later dispatch of its effect by
    the run that it was given to, until that has planned anew, or the contract reads otherwise.
    """
    given = locked.consumed
    if effect.approval_id is None or given is None or given.run_id != locked.state.run_id:
        return True
    same_words = contract_hash in (None, given.terms.contract_hash)
    return given.state_version != command.state_version or not same_words


def approval_problem(
    locked: Locked, command: InvokeTool, contract_hash: str | None = None
) -> str | None:
    """Say why the approval at hand does not cover this command; None where it does, exactly."""
    approval = locked.approval
    if approval is None or approval.status is not ApprovalStatus.APPROVED:
        return "there is no approval of it"
    if approval.expires_at <= locked.now:
        return "the approval is too old"
    same = (
        approval.tool == command.tool
        and approval.contract_version == command.contract_version
        and approval.intent_key == command.intent_key
        and approval.arguments_hash == command.arguments_hash
        and approval.state_version == command.state_version
        and contract_hash in (None, approval.terms.contract_hash)
    )
    return None if same else "something else was approved"


# ---- the outcome of a dispatch -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a sender knows of its own attempt. `sent=False`: it never left, by the sender's own
    word.
    """

    effect_id: str
    token: int
    end: End
    reply: Reply | None
    bound: bool = False
    sent: bool = True
    evidence_id: str = ""
    dispatcher: str | None = None

    def is_of(self, effect: Effect) -> bool:
        """Whether it is about the effect's latest dispatch. Two dispatches can have the same token
        where the ledger was set back between them; no two have the same dispatcher.
        """
        return (self.token, self.dispatcher) == (effect.token, effect.dispatcher)


def outcome(locked: Locked, workflow: Workflow, out: Outcome) -> Ruling | None:
    """Commit what a sender says about its attempt, judged by the effect's token alone.

    A cancel or a lost lease must not discard a receipt; whatever comes too late is kept as evidence
    and is never a negative verdict. None: another run has sent the intent again and owns the effect
    by now; say it to that run.
    """
    effect = locked.effect
    assert effect is not None and effect.id == out.effect_id
    if effect.owner_run_id not in (None, locked.state.run_id):
        return None
    note = ("outcome", _outcome_detail(out))
    in_flight = effect.status is EffectStatus.DISPATCHED and out.is_of(effect)
    if not locked.current or not in_flight:
        return replace(_late(locked, effect, out), evidence=note)
    status = classify(effect, out.end, out.reply) if out.sent else _unsent_status(effect)
    if status is EffectStatus.ABSENT and locked.kept is not None:
        status = EffectStatus.UNKNOWN  # its provider has said that it took effect
    ruling: Ruling
    if locked.undoing is not None:
        ruling = _undoing_told(locked, workflow, effect, out, status)
        return replace(ruling, evidence=note)
    match status:
        case EffectStatus.APPLIED:
            ruling = _receipt(locked, workflow, effect, out)
        case EffectStatus.ABSENT:
            ruling = _own_word_absent(locked, workflow, effect, out)
        case _:
            ruling = _no_proof(locked, workflow, effect, out)
    return replace(ruling, evidence=note)


def _receipt(locked: Locked, workflow: Workflow, effect: Effect, out: Outcome) -> Ruling:
    assert isinstance(out.reply, Succeeded)
    proved = applied_by(effect, out.reply.value, out.evidence_id)
    event = Result(
        out.end,
        out.reply,
        bound=out.bound,
        known=locked.known,
        evidence=out.evidence_id,
    )
    if locked.cancel_requested:
        events = _judged_events(locked, workflow, effect, event)
        return _applied_although_cancelled(replace(locked, effect=proved), proved, events)
    locked = _nothing_to_undo(locked)
    try:
        turn = machine.on(workflow, locked.state, event, locked.view())
    except BaseException:
        # A receipt is never lost to a fault in the workflow's own code: the next step meets that.
        return replace(_takes_recorded(locked, proved), effect=proved)
    return replace(settle_turn(turn, effect), effect=proved, joins=True)


def _judged_events(
    locked: Locked, workflow: Workflow, effect: Effect, event: Result
) -> list[TraceEvent]:
    """How a result was classified and verified, for the trace of a run that does not use it."""
    try:
        contract = workflow.tool_named(effect.tool).contract
        cancelled = locked.cancel_requested and locked.undoing is None
        view = locked.view(cancelled=cancelled)
        return [*judge(contract, effect.arguments, event, view).events]
    except BaseException:
        return []  # the workflow's own code raised: a receipt is not lost to that


def _own_word_absent(locked: Locked, workflow: Workflow, effect: Effect, out: Outcome) -> Ruling:
    absent = replace(effect, status=EffectStatus.ABSENT, unknown_since=None, trigger=None)
    locked = _nothing_to_undo(locked)
    if not out.sent:
        if locked.cancel_requested:
            return replace(_stop(locked, Reason.CANCELLED), effect=absent)
        if locked.left_ms <= 0:
            return replace(spent(locked, Reason.DEADLINE_EXHAUSTED), effect=absent)
        return replace(give_back(locked, "never-sent", due_in_ms=0), effect=absent, attempts=None)
    assert isinstance(out.reply, Refused)
    event = Result(
        out.end,
        out.reply,
        bound=out.bound,
        known=locked.known,
        evidence=out.evidence_id,
    )
    try:
        turn = machine.on(workflow, locked.state, event, locked.view())
    except BaseException as error:
        problem = f"the workflow's code raised {type(error).__name__}"
        turn = machine.stop(
            locked.state, Reason.HANDOFF_REQUIRED, locked.view(), {"problem": problem}
        )
    return replace(settle_turn(turn, effect), effect=absent)


def _no_proof(locked: Locked, workflow: Workflow, effect: Effect, out: Outcome) -> Ruling:
    cancelled = locked.cancel_requested or out.end is End.CANCELLED
    # This attempt was never sent, but an earlier one may have been: that one is still in doubt.
    reply = out.reply if out.sent else Doubtful("never-sent")
    doubtful = _doubted(effect, locked.now, trigger_of(out.end, reply, cancelled=cancelled))
    event = Result(out.end, reply, bound=out.bound, settled=False)
    turn = machine.on(workflow, locked.state, event, locked.view(cancelled=cancelled))
    return replace(settle_turn(turn, effect), effect=doubtful, wake_in_ms=first_query_at(0))


def _late(locked: Locked, effect: Effect, out: Outcome) -> Ruling:
    state = locked.state
    unchanged = Ruling(state=state, lease="keep", wake_in_ms=None)
    in_doubt = effect.status is EffectStatus.UNKNOWN and state.status is _S.RECONCILING
    if in_doubt and locked.current and out.sent and isinstance(out.reply, Succeeded):
        return proved_applied(locked, out.reply.value, out.evidence_id)
    left = out.sent and not isinstance(out.reply, Refused)
    by_query = effect.status is EffectStatus.ABSENT and effect.doubt is Doubt.BY_QUERY
    if left and (by_query or _is_forgotten(effect, out)):
        return contrary_evidence(locked)
    return unchanged


def _is_forgotten(effect: Effect, out: Outcome) -> bool:
    """Whether it is about a dispatch that the ledger, set back, has forgotten."""
    not_sent = effect.status in (EffectStatus.PLANNED, EffectStatus.ABSENT)
    return not_sent and out.token >= effect.token and not out.is_of(effect)


class Reported(StrEnum):
    """What a provider's report has come to."""

    PROVED = "proved"  # a doubt is settled: the intent took effect
    CONTRARY = "contrary"  # it took effect although it was believed absent: in doubt again
    KEPT = "kept"  # evidence, for whoever decides
    REPEATED = "repeated"  # it has counted before


def reported(
    locked: Locked, answer: Answer, detail: Mapping[str, Json], *, max_stall_ms: int | None
) -> tuple[Ruling | None, Reported]:
    """Take what a provider says about an effect by itself, judged as a query's answer is.

    A record settles a doubt, and opens one where absence was believed. Absence is proved by queries
    alone: nobody here knows at which moment the provider looked. Its word that nothing happened, or
    has not yet, makes the next query due. While a sender is at it, the sender has the word, and a
    record is kept for the doubt that may follow. None: another run owns the effect by now.
    """
    state, effect = locked.state, locked.effect
    assert effect is not None
    if effect.owner_run_id != state.run_id:
        return None, Reported.KEPT
    ruling, what, kind = Ruling(state=state, lease="keep"), Reported.KEPT, "report"
    in_doubt = effect.status is EffectStatus.UNKNOWN and state.status is _S.RECONCILING
    match answer:
        case Applied(value, evidence) if in_doubt and locked.current:
            ruling, what = proved_applied(locked, value, evidence), Reported.PROVED
        case Applied() if effect.status is EffectStatus.ABSENT:
            ruling, what = contrary_evidence(locked), Reported.CONTRARY
        case Applied(value) if effect.status in (*UNRESOLVED, EffectStatus.HANDED_OFF):
            kind, detail = KEPT_REPORT, {**detail, "proves": value}
        case Absent() | Pending() if in_doubt and locked.current:
            ruling = _query_hurried(locked, effect, max_stall_ms) or ruling
        case NoAnswer(problem):
            detail = {**detail, "problem": problem}
    return replace(ruling, evidence=(kind, detail)), what


def _query_hurried(locked: Locked, effect: Effect, max_stall_ms: int | None) -> Ruling | None:
    """Make the next query due now; None where it would be spent too early to prove anything, or
    is the last.
    """
    early = max_stall_ms is not None and locked.now < effect.settles_at(max_stall_ms)
    if early or effect.queries_left < 2 or not effect.terms.can_query:
        return None
    due = replace(effect, next_query_at=locked.now)
    return Ruling(state=locked.state, effect=due, lease="keep", wake_in_ms=0)


def contrary_evidence(locked: Locked) -> Ruling:
    """A request left although its effect is believed absent: doubt again, or a contradiction.

    A run that has ended, or has moved on to something else, keeps its status; a person looks at the
    effect.
    """
    state, effect = locked.state, locked.effect
    assert effect is not None
    if locked.undoing is not None and state.status not in TERMINAL:
        return _undoing_in_doubt_again(locked, effect, locked.undoing)
    if not locked.current or not _rests_on(state, effect):
        package = handoff_of(state, effect, reason=Reason.CONTRADICTION, undoing=locked.undoing)
        contradicted = replace(effect, status=EffectStatus.CONTRADICTED)
        return Ruling(state=state, lease="keep", effect=contradicted, handoff=package)
    events: list[TraceEvent] = []
    state = machine.moved(_without_its_holder(locked).state, _E.CONTRARY_EVIDENCE, events)
    trigger = Trigger.CONTRARY_EVIDENCE
    ruling = ended(locked, state, Reason.UNKNOWN_EFFECT, events, {"trigger": trigger.value})
    doubtful = _left_after_all(locked, effect)
    return replace(ruling, effect=doubtful, lease="take", wake_in_ms=first_query_at(0))


def _left_after_all(locked: Locked, effect: Effect) -> Effect:
    """The effect whose request left although it was believed absent.

    It left by now at the latest: from here on counts how long it may take to land.
    """
    return replace(
        _doubted(effect, locked.now, Trigger.CONTRARY_EVIDENCE),
        owner_run_id=effect.owner_run_id or locked.state.run_id,
        attempts=max(1, effect.attempts),
        queries_left=QUERIES_PER_DISPATCH,
        dispatch_deadline_at=max(locked.now, effect.dispatch_deadline_at or 0),
    )


def _rests_on(state: RunState, effect: Effect) -> bool:
    """Whether what a run is about to do is the write of this effect."""
    pending = state.pending
    return (
        isinstance(pending, InvokeTool)
        and pending.intent_key == effect.intent_key
        and pending.arguments_hash == effect.arguments_hash
    )


# ---- cancellation --------------------------------------------------------------------------------


def cancel(locked: Locked) -> Ruling | None:
    """Set the wish and move the run; None where it has ended, or is wished already.

    Unless the run's own effect is unknown the epoch stays: the lease holder may still commit what
    is true.
    """
    state = locked.state
    if state.status in TERMINAL or locked.cancel_requested:
        return None
    events: list[TraceEvent] = [TraceEvent("cancel.requested", state.step, {})]
    match state.status:
        case _S.QUEUED | _S.AWAITING_APPROVAL | _S.AWAITING_INPUT:
            return replace(
                _stop(locked, Reason.CANCELLED, before=events),
                wish=True,
                approval_status=ApprovalStatus.WITHDRAWN,
            )
        case _S.RECONCILING | _S.HANDED_OFF:
            state = machine.moved(state, _E.CANCEL_WISHED, events)
            return Ruling(
                state=state,
                events=tuple(events),
                wish=True,
                lease="keep",
                approval_status=ApprovalStatus.WITHDRAWN,  # nothing is sent again after the wish
            )
    if locked.own_effect is EffectStatus.UNKNOWN:  # released for sending again, not yet sent
        locked = _without_its_holder(locked)
        assert locked.effect is not None
        turn = machine.stop(
            locked.state,
            Reason.UNKNOWN_EFFECT,
            locked.view(),
            {"trigger": Trigger.CANCELLATION.value},
        )
        return Ruling(
            state=turn.state,
            events=(*events, *turn.events),
            effect=replace(locked.effect, trigger=Trigger.CANCELLATION),
            lease="take",
            wish=True,
            wake_in_ms=first_query_at(0),
        )
    in_flight = locked.lease_live or locked.own_effect is EffectStatus.DISPATCHED
    if in_flight or state.status is _S.AWAITING_BRANCHES:
        state = machine.moved(state, _E.CANCEL_IN_FLIGHT, events)
        return Ruling(state=state, events=tuple(events), wish=True, lease="keep")
    asks = asked_first(locked)
    if asks is not None:
        return replace(asks, events=(*events, *asks.events), wish=True)
    stopped = _stop(_without_its_holder(locked), Reason.CANCELLED, before=events)
    return replace(stopped, wish=True)


# ---- what the sweep finds ------------------------------------------------------------------------


def wake(locked: Locked, *, max_attempts: int, max_stall_ms: int | None) -> Ruling | None:
    """Decide what becomes of a run that the sweep has to look at; None: nothing but to look later.

    A reconciling run's effect is given a query here, which is paid for before it is asked.
    """
    state = locked.state
    if state.status in TERMINAL:
        return None
    if state.status is _S.HANDED_OFF:
        return Ruling(state=state, lease="keep", escalates=True)
    if locked.lease_live:
        return None
    asks = asked_first(locked)
    if asks is not None:
        return asks
    if locked.lease_until is not None:
        return _lease_lost(locked, max_attempts)
    match state.status:
        case _S.AWAITING_APPROVAL | _S.AWAITING_INPUT:
            return _parked_too_long(locked)
        case _S.RECONCILING:
            return _reconcile(locked, max_stall_ms)
        case _S.CANCELLING:
            return _cancelling_at_rest(locked)
    if locked.own_effect is EffectStatus.DISPATCHED:
        return _lease_lost(locked, max_attempts)
    if locked.cancel_requested:
        return _stop(locked, Reason.CANCELLED)
    overdue = _overdue(locked)
    return None if overdue is None else spent(locked, overdue)


def version_unavailable(
    locked: Locked, gone: Gone, *, stood_since: int | None = None
) -> Ruling | None:
    """Hand a run to a person whose version of its workflow no worker has; None: it waits on.

    It has waited for that long itself: since it was due, or, reconciling, since `stood_since`, when
    it last moved. One whose working time is over while nobody could use it has waited long enough.
    A write in doubt stays so: its run is a person's with the doubt.
    """
    if locked.lease_until is not None or locked.now >= locked.expires_at:
        return None
    state, effect = locked.state, locked.effect
    problem = f"no worker has {gone.wanted}"
    more: dict[str, Json] = {"version": gone.to_json()}
    if state.status is _S.RECONCILING:
        if stood_since is None or locked.now - stood_since < gone.patience_ms:
            return None
        return _gone_over_a_write(locked, problem, more)
    if state.status not in CLAIMABLE or locked.due_at is None or locked.cancel_requested:
        return None
    waited = locked.now - locked.due_at >= gone.patience_ms or locked.left_ms <= 0
    if not waited or locked.own_effect is EffectStatus.DISPATCHED:
        return None
    if locked.own_effect is EffectStatus.UNKNOWN:
        assert effect is not None
        given = _handed_off(locked, effect, problem)
        return replace(given, handoff={**(given.handoff or {}), **more})
    turn = machine.stop(state, Reason.VERSION_UNAVAILABLE, locked.view(), {"wanted": gone.wanted})
    package = {**handoff_of(turn.state, effect), "problem": problem, **more}
    return Ruling(state=turn.state, events=turn.events, lease="take", handoff=package)


def _gone_over_a_write(locked: Locked, problem: str, more: Mapping[str, Json]) -> Ruling | None:
    """Nobody can ask about a write, or undo it: the doubt stays, and a person has it."""
    effect = locked.effect
    if effect is None or locked.kept is not None:
        return None
    if _is_undoing(locked):
        if locked.own_effect is EffectStatus.DISPATCHED:
            return None  # whoever sent it has the word, for as long as it may take
        in_doubt = locked.undoing is not None and effect.status is EffectStatus.UNKNOWN
        reason = None if in_doubt else Reason.VERSION_UNAVAILABLE
        given = _undoing_with_person(locked, problem, reason, [])
    elif effect.status is EffectStatus.UNKNOWN:
        given = _handed_off(locked, effect, problem)
    else:
        return None
    return replace(given, handoff={**(given.handoff or {}), **more})


def _overdue(locked: Locked) -> Reason | None:
    """Which of the two time limits has passed, if any; the ledger's claim says the same."""
    if locked.now >= locked.expires_at:
        return Reason.EXPIRED
    return Reason.DEADLINE_EXHAUSTED if locked.left_ms <= 0 else None


def _without_its_holder(locked: Locked) -> Locked:
    """The run as it is once its holder is fenced off or gone: the call that the claim has reserved
    may have been made, so that it stays charged.
    """
    left = replace(locked.state.left, tool_calls_reserved=0)
    return replace(locked, state=replace(locked.state, left=left))


def _lost_over_a_write(locked: Locked) -> Ruling:
    """Nobody is left who could say what became of the run's write: it is in doubt."""
    locked = _without_its_holder(locked)
    effect = locked.effect
    assert effect is not None
    trigger = Trigger.CANCELLATION if locked.cancel_requested else Trigger.WORKER_LOST
    detail: dict[str, Json] = {"trigger": trigger.value}
    turn = machine.stop(locked.state, Reason.UNKNOWN_EFFECT, locked.view(), detail)
    return Ruling(
        state=turn.state,
        events=(_doubt_event(locked, effect, trigger), *turn.events),
        effect=_doubted(effect, locked.now, trigger),
        lease="take",
        wake_in_ms=first_query_at(0),
    )


def _lease_lost(locked: Locked, max_attempts: int) -> Ruling:
    if locked.own_effect in UNRESOLVED:
        return _lost_over_a_write(locked)
    locked = _without_its_holder(locked)
    state, effect = locked.state, locked.effect
    if locked.cancel_requested or state.status is _S.CANCELLING:
        return replace(_stop(locked, Reason.CANCELLED), lease="take")
    if locked.attempts >= max_attempts:
        turn = machine.stop(state, Reason.WORKER_LOST, locked.view(), {"attempts": locked.attempts})
        return Ruling(
            state=turn.state,
            events=turn.events,
            lease="take",
            handoff=handoff_of(turn.state, effect),
        )
    overdue = _overdue(locked)
    if overdue is not None:
        return replace(spent(locked, overdue), lease="take")
    events: list[TraceEvent] = [TraceEvent("lease.lost", state.step, {"attempts": locked.attempts})]
    state = machine.moved(state, _E.LEASE_LOST, events)
    return Ruling(state=state, events=tuple(events), lease="take")


def _cancelling_at_rest(locked: Locked) -> Ruling:
    if locked.own_effect in UNRESOLVED:
        return _lost_over_a_write(locked)
    return replace(_stop(locked, Reason.CANCELLED), lease="take")


def _parked_too_long(locked: Locked) -> Ruling | None:
    state = locked.state
    if locked.now >= locked.expires_at:
        events: list[TraceEvent] = []
        moved = machine.moved(state, _E.EXPIRED, events)
        expired = ended(locked, moved, Reason.EXPIRED, events)
        return replace(expired, approval_status=ApprovalStatus.EXPIRED)
    if state.status is _S.AWAITING_INPUT:
        if locked.input_expires_at is not None and locked.now >= locked.input_expires_at:
            return _stop(locked, Reason.INPUT_EXPIRED)
        return None
    approval = locked.approval
    if approval is not None and locked.now >= approval.expires_at:
        stopped = _stop(locked, Reason.APPROVAL_EXPIRED)
        return replace(stopped, approval_status=ApprovalStatus.EXPIRED)
    return None


def _reconcile(locked: Locked, max_stall_ms: int | None) -> Ruling:
    """Give the unknown effect its next query, or settle what no query can."""
    state, effect = locked.state, locked.effect
    if effect is not None and _is_undoing(locked):
        following = _undoing_next(locked, effect)
        if following is not None:
            return following
    if effect is None or effect.status is not EffectStatus.UNKNOWN:
        return Ruling(state=state, lease="keep", wake_in_ms=NOTHING_TO_DO_MS)
    if locked.kept is not None:
        return _settled_by_report(locked, locked.kept)
    if effect.next_query_at is not None and locked.now < effect.next_query_at:
        # Woken too early, or another's query is under way.
        early_ms = effect.next_query_at - locked.now
        return Ruling(state=state, lease="keep", wake_in_ms=early_ms)
    if effect.terms.can_query and effect.queries_left > 0:
        lease_ms = effect.terms.call_ms + QUERY_MARGIN_MS
        asked = replace(
            effect,
            queries_left=effect.queries_left - 1,
            next_query_at=locked.now + lease_ms,
        )
        return Ruling(state=state, effect=asked, lease="keep", wake_in_ms=lease_ms)
    conclusion = without_query(effect, now=locked.now, max_stall_ms=max_stall_ms)
    if locked.undoing is not None and isinstance(conclusion, SendAgain):
        return _undoes(locked)
    return concluded(locked, conclusion, max_stall_ms=max_stall_ms)


def _settled_by_report(locked: Locked, kept: KeptReport) -> Ruling:
    """Take what a provider has said while the sender still had the word, or the run was about to
    send the intent again. That it took effect stays true.
    """
    ruling = proved_applied(locked, kept.value, kept.evidence)
    return replace(ruling, evidence=("report-used", {"evidence": kept.evidence}))


def concluded(locked: Locked, conclusion: Conclusion, *, max_stall_ms: int | None) -> Ruling:
    """Write what was concluded about the run's unknown effect."""
    state, effect = locked.state, locked.effect
    assert effect is not None
    match conclusion:
        case ProvedApplied(value, evidence):
            return proved_applied(locked, value, evidence)
        case ProvedAbsent():
            return _proved_absent(locked, effect, max_stall_ms)
        case AskAgain(at, absences, queries_left):
            asked = replace(effect, next_query_at=at, absences=absences, queries_left=queries_left)
            wait = max(0, at - locked.now)
            return Ruling(state=state, effect=asked, lease="keep", wake_in_ms=wait)
        case SendAgain():
            return _released_for_sending(locked, effect)
        case GiveUp(problem):
            return _handed_off(locked, effect, problem)


def with_evidence(ruling: Ruling, answer: Answer, sent_at: int) -> Ruling:
    """Keep a query's answer beside what was concluded from it."""
    detail = {**answer_to_json(answer), "sent_at": sent_at}
    return replace(ruling, evidence=("query", detail))


def query_returned(locked: Locked, token: int) -> Ruling | None:
    """Give a query back that was paid for and not asked: nobody here knows the tool."""
    effect = locked.effect
    if effect is None or effect.token != token or effect.status is not EffectStatus.UNKNOWN:
        return None
    again = replace(effect, queries_left=min(QUERIES_PER_DISPATCH, effect.queries_left + 1))
    return Ruling(state=locked.state, effect=again, lease="keep", wake_in_ms=NOTHING_TO_DO_MS)


def proved_applied(locked: Locked, value: Json, evidence: str) -> Ruling:
    """The unknown effect happened: go on as the workflow says, or settle the wish to cancel."""
    effect = locked.effect
    assert effect is not None
    proved = applied_by(effect, value, evidence)
    events = [_resolved_event(locked, "applied", evidence)]
    if locked.undoing is not None:
        return _undone(locked, proved, locked.undoing, events)
    if locked.cancel_requested:
        return _applied_although_cancelled(replace(locked, effect=proved), proved, events)
    locked = _nothing_to_undo(locked)
    state = machine.resumed(locked.state, _E.PROVED_APPLIED, events, evidence_ref=evidence)
    return Ruling(
        state=replace(state, told=told_of(value, evidence)),
        events=tuple(events),
        effect=proved,
        lease="take",
        joins=True,
    )


def _proved_absent(locked: Locked, effect: Effect, max_stall_ms: int | None) -> Ruling:
    absent = replace(believed_absent(effect), unknown_since=None)
    events = [_resolved_event(locked, "absent", f"effect:{effect.id}")]
    if locked.undoing is not None:
        sendable = may_send(absent, now=locked.now, max_stall_ms=max_stall_ms)
        problem = "the compensation did not take effect"
        return _not_undone(locked, absent, locked.undoing, problem, events, again=sendable)
    locked = _nothing_to_undo(locked)
    state = locked.state
    if locked.cancel_requested:
        cancelled = machine.moved(state, _E.PROVED_ABSENT_CANCELLED, events)
        return replace(ended(locked, cancelled, Reason.CANCELLED, events), effect=absent)
    sendable = may_send(absent, now=locked.now, max_stall_ms=max_stall_ms)
    if sendable and locked.left_ms > 0 and paid_for(state.left, effect) is not None:
        state = machine.resumed(state, _E.PROVED_ABSENT, events)
        return Ruling(state=state, events=tuple(events), effect=absent, lease="take")
    failed = machine.moved(state, _E.PROVED_ABSENT_FAILED, events)
    stopped = ended(locked, failed, Reason.TOOL_FAILED, events, absence_of(effect))
    return replace(stopped, effect=absent)


def _released_for_sending(locked: Locked, effect: Effect) -> Ruling:
    if locked.undoing is not None:
        free = replace(effect, next_query_at=None)
        return Ruling(state=locked.state, effect=free, lease="keep", wake_in_ms=0)
    may_call = paid_for(locked.state.left, effect) is not None
    if locked.cancel_requested or locked.left_ms <= 0 or not may_call:
        return _handed_off(locked, effect, "the key could be sent again, but the run may not")
    events: list[TraceEvent] = []
    state = machine.resumed(locked.state, _E.RELEASED, events)
    return Ruling(state=state, events=tuple(events), lease="take")


def absence_of(effect: Effect) -> dict[str, Json]:
    return {"evidence": "absent", "effect": effect.id}


# ---- undoing -------------------------------------------------------------------------------------
#
# A compensation is an effect of its own, and the run's latest while it is under way: what is said
# above about senders, tokens, doubt and queries holds for it. `locked.undoing` is what it undoes.


def _to_be_undone(
    locked: Locked, effect: Effect, undo: CompensationRecord, events: list[TraceEvent]
) -> Ruling:
    """The write of a run that is wished to be cancelled is proved: what was recorded about undoing
    it is done from here on, by the sweep, whatever the run has left.
    """
    cause = _E.PROVED_APPLIED_COMPENSATE
    if locked.state.status is _S.RECONCILING:
        state = machine.resumed(locked.state, cause, events)
    else:
        state = machine.moved(locked.state, cause, events)
    detail: dict[str, Json] = {"effect": effect.id, "tool": effect.tool, "by": undo.tool}
    events.append(TraceEvent(trace.EFFECT_COMPENSATING, state.step, detail))
    return Ruling(
        state=state,
        events=tuple(events),
        effect=replace(effect, status=EffectStatus.COMPENSATING),
        lease="take",
        wake_in_ms=0,
    )


def _is_undoing(locked: Locked) -> bool:
    """Whether the run's write is being undone: its compensation is to be planned, or is under
    way.
    """
    if locked.state.status is not _S.RECONCILING:
        return False
    about = locked.undoing or locked.effect
    return about is not None and about.status is EffectStatus.COMPENSATING


def _nothing_to_undo(locked: Locked) -> Locked:
    """The run once its write is settled: the call that was kept for undoing it is free."""
    left = locked.state.left.without_compensation()
    return replace(locked, state=replace(locked.state, left=left))


def _undoes(locked: Locked) -> Ruling:
    return Ruling(state=locked.state, lease="keep", wake_in_ms=UNDO_LEASE_MS, undoes=True)


def _waits(locked: Locked, wake_in_ms: int) -> Ruling:
    return Ruling(state=locked.state, lease="keep", wake_in_ms=wake_in_ms)


def _undoing_next(locked: Locked, effect: Effect) -> Ruling | None:
    """What the sweep does about a write that is being undone; None: it queries the compensation."""
    if locked.undoing is None:
        return _undoes(locked)
    if locked.own_effect is None and effect.status in UNRESOLVED:
        return _waits(locked, ELSEWHERE_MS)  # another run has sent the same intent
    match effect.status:
        case EffectStatus.UNKNOWN:
            return None
        case EffectStatus.DISPATCHED:
            assert effect.dispatch_deadline_at is not None
            over_at = effect.dispatch_deadline_at + LEASE_MARGIN_MS
            if locked.now < over_at:
                return _waits(locked, over_at - locked.now)
            events = [_doubt_event(locked, effect, Trigger.WORKER_LOST)]
            return _undoing_in_doubt(locked, effect, Trigger.WORKER_LOST, events)
    return _undoes(locked)


def compensation_planned(locked: Locked, command: InvokeTool) -> Ruling | None:
    """Take the effect that was planned for undoing as the run's own; None where somebody was
    faster, or there is nothing to undo any more.
    """
    effect = locked.effect
    if effect is None or locked.undoing is None or not _is_undoing(locked):
        return None
    other = effect.arguments_hash != command.arguments_hash
    if other or effect.status is EffectStatus.COMPENSATED:
        return cannot_undo(locked, "what would undo it exists with other arguments, or was undone")
    return _waits(locked, UNDO_LEASE_MS)


def cannot_undo(locked: Locked, problem: str) -> Ruling | None:
    """The compensation cannot be begun: the write is a person's. None where nothing is to be
    undone any more.
    """
    if not _is_undoing(locked) or locked.own_effect is EffectStatus.DISPATCHED:
        return None  # also while somebody's call is under way: its outcome has the word
    return _undoing_with_person(locked, problem, Reason.HANDOFF_REQUIRED, [])


def undoing_waits(locked: Locked, wake_in_ms: int) -> Ruling | None:
    """The compensation cannot be sent now; nothing is charged."""
    return _waits(locked, wake_in_ms) if _is_undoing(locked) else None


def dispatch_compensation(
    locked: Locked, *, dispatcher: str, call_ms: int, max_stall_ms: int | None
) -> tuple[Ruling | None, Dispatch]:
    """Decide whether the compensation may be sent now: as `dispatch` does, under the reconciler.

    There is no lease: the effect's token and its dispatcher are the fence. The wish that caused it
    does not stop it, and neither does a deadline or a budget that is spent: its call was kept.
    """
    state, effect = locked.state, locked.effect
    if effect is None or locked.undoing is None or not _is_undoing(locked):
        return None, Halt("not-mine")
    mine = locked.own_effect is not None
    match effect.status:
        case EffectStatus.APPLIED if _undid_something_else(effect, locked.undoing):
            problem = "what would undo it has undone something else"
            return cannot_undo(locked, problem), Halt("with-person")
        case EffectStatus.APPLIED:
            return _undone(locked, effect, locked.undoing, []), Halt("recorded")
        case EffectStatus.PLANNED | EffectStatus.ABSENT:
            pass
        case EffectStatus.DISPATCHED | EffectStatus.UNKNOWN if not mine:
            return _waits(locked, ELSEWHERE_MS), Halt("elsewhere")
        case EffectStatus.UNKNOWN if not (effect.terms.can_query and effect.queries_left > 0):
            pass
        case EffectStatus.DISPATCHED | EffectStatus.UNKNOWN:
            return None, Halt("not-mine")
        case _:
            problem = f"what would undo it is {effect.status.value}"
            return _undoing_with_person(locked, problem, None, []), Halt("with-person")
    if locked.rewind is not None and may_be_forgotten(effect, locked.rewind):
        doubtful = perhaps_sent(effect, locked.rewind, run_id=state.run_id, now=locked.now)
        events = (_doubt_event(locked, doubtful, Trigger.WORKER_LOST),)
        wake_in_ms = first_query_at(0)
        asks = Ruling(
            state=state, events=events, effect=doubtful, lease="keep", wake_in_ms=wake_in_ms
        )
        return asks, Halt("asked-first")
    calls = 1 + effect.terms.confirmed_by_query
    allowed = may_send(effect, now=locked.now, max_stall_ms=max_stall_ms)
    if not allowed or not state.left.may_compensate(effect.tool, calls):
        problem = "no tool call is left to undo it" if allowed else "undoing may not be sent again"
        if effect.status is EffectStatus.UNKNOWN:
            return _undoing_with_person(locked, problem, None, []), Halt("may-not-send")
        return _stands(locked, effect, locked.undoing, problem, []), Halt("may-not-send")
    held = held_back(locked, effect)
    if held is not None:
        return _waits(locked, PAUSED_MS), Halt("paused")
    deadline_at = locked.now + call_ms
    sent = _sent(locked, effect, dispatcher=dispatcher, deadline_at=deadline_at)
    ruling = Ruling(
        state=replace(state, left=state.left.compensation_used(effect.tool, calls)),
        events=(_started(locked, sent, compensates=locked.undoing.id),),
        effect=sent,
        lease="keep",
        wake_in_ms=call_ms + LEASE_MARGIN_MS,
        charges_tool=effect.tool,
    )
    return ruling, Go(sent, deadline_at)


def _undid_something_else(effect: Effect, undoing: Effect) -> bool:
    """Whether a compensation that took effect is no proof here: it was recorded for another write,
    or left before the one that it is to undo.
    """
    if effect.compensates not in (None, undoing.id):
        return True
    return (effect.first_dispatched_at or 0) < (undoing.first_dispatched_at or 0)


def _undoing_told(
    locked: Locked, workflow: Workflow, effect: Effect, out: Outcome, status: EffectStatus
) -> Ruling:
    """What its sender's word about a compensation comes to."""
    assert locked.undoing is not None
    reply = out.reply if out.sent else Doubtful("never-sent")
    settled = status is not EffectStatus.UNKNOWN
    events: list[TraceEvent] = []
    if out.sent:
        event = Result(out.end, reply, settled=settled, evidence=out.evidence_id)
        events = _judged_events(locked, workflow, effect, event)
    match status, out.reply:
        case EffectStatus.APPLIED, Succeeded(value, _):
            proved = applied_by(effect, value, out.evidence_id)
            return _undone(locked, proved, locked.undoing, events)
        case EffectStatus.ABSENT, answer:
            absent = replace(effect, status=EffectStatus.ABSENT, unknown_since=None, trigger=None)
            refused = answer if isinstance(answer, Refused) else None
            problem = "the compensation was never sent"
            if refused is not None:
                problem = f"the compensation was refused: {refused.reason}"
            again = refused is None or refused.retryable
            return _not_undone(locked, absent, locked.undoing, problem, events, again=again)
    trigger = trigger_of(out.end, reply, cancelled=False)
    return _undoing_in_doubt(locked, effect, trigger, events)


def _undone(locked: Locked, proved: Effect, undoing: Effect, events: list[TraceEvent]) -> Ruling:
    """The compensation is proved: what it undoes is compensated, and so is the run."""
    evidence = proved.evidence or f"effect:{proved.id}"
    detail: dict[str, Json] = {
        "effect": undoing.id,
        "compensation": proved.id,
        "evidence": evidence,
    }
    events.append(TraceEvent(trace.EFFECT_COMPENSATED, locked.state.step, detail))
    state = machine.moved(locked.state, _E.COMPENSATION_PROVED, events)
    ruling = ended(locked, state, Reason.COMPENSATED, events, detail)
    undone = replace(undoing, status=EffectStatus.COMPENSATED)
    return replace(ruling, effect=proved, undoing=undone, lease="take")


def _not_undone(
    locked: Locked,
    absent: Effect,
    undoing: Effect,
    problem: str,
    events: list[TraceEvent],
    *,
    again: bool,
) -> Ruling:
    """The compensation did not happen: it is sent again where that may be, a bounded number of
    times; else the write stands, and a person decides.
    """
    calls = 1 + absent.terms.confirmed_by_query
    left = locked.state.left.may_compensate(absent.tool, calls)
    if not again or not left or absent.attempts >= UNDO_ATTEMPTS:
        return _stands(locked, absent, undoing, problem, events)
    return Ruling(
        state=locked.state,
        events=tuple(events),
        effect=absent,
        lease="keep",
        wake_in_ms=UNDO_PAUSE_MS << max(0, absent.attempts - 1),
    )


def _stands(
    locked: Locked, absent: Effect, undoing: Effect, problem: str, events: list[TraceEvent]
) -> Ruling:
    """The write was not undone, and that is certain: it is applied as before, and a person's."""
    state = machine.moved(locked.state, _E.NO_PROOF, events)
    ruling = ended(locked, state, Reason.HANDOFF_REQUIRED, events, {"problem": problem})
    stands = replace(undoing, status=EffectStatus.APPLIED)
    package = {**handoff_of(ruling.state, absent, undoing=stands), "problem": problem}
    return replace(ruling, effect=absent, undoing=stands, handoff=package, lease="take")


def _undoing_in_doubt(
    locked: Locked, effect: Effect, trigger: Trigger, events: list[TraceEvent]
) -> Ruling:
    """Whether the compensation happened is not known: it is reconciled like any write."""
    return Ruling(
        state=locked.state,
        events=tuple(events),
        effect=_doubted(effect, locked.now, trigger),
        lease="keep",
        wake_in_ms=first_query_at(0),
    )


def _undoing_in_doubt_again(locked: Locked, effect: Effect, undoing: Effect) -> Ruling:
    """A compensation left although it was believed absent: what it undoes may be undone."""
    events: list[TraceEvent] = []
    state = machine.moved(locked.state, _E.CONTRARY_EVIDENCE, events)
    trigger = Trigger.CONTRARY_EVIDENCE
    ruling = ended(locked, state, Reason.UNKNOWN_EFFECT, events, {"trigger": trigger.value})
    return replace(
        ruling,
        effect=_left_after_all(locked, effect),
        undoing=replace(undoing, status=EffectStatus.COMPENSATING),
        lease="take",
        wake_in_ms=first_query_at(0),
    )


def _undoing_with_person(
    locked: Locked, problem: str, reason: Reason | None, events: list[TraceEvent]
) -> Ruling:
    """Nobody can say whether the write was undone, or it cannot even be tried: a person decides."""
    effect, undoing = locked.effect, locked.undoing
    assert effect is not None
    state = machine.moved(locked.state, _E.NO_PROOF, events)
    detail: dict[str, Json] = {"problem": problem}
    ruling = ended(locked, state, reason or Reason.UNKNOWN_EFFECT, events, detail)
    if undoing is not None:
        undoing = replace(undoing, status=EffectStatus.HANDED_OFF)
    if undoing is None or (effect.status is EffectStatus.UNKNOWN and locked.own_effect is not None):
        effect = replace(effect, status=EffectStatus.HANDED_OFF, next_query_at=None)
    package = {**handoff_of(ruling.state, effect, undoing=undoing), "problem": problem}
    return replace(ruling, effect=effect, undoing=undoing, handoff=package, lease="take")


def _doubt_event(locked: Locked, effect: Effect, trigger: Trigger) -> TraceEvent:
    detail: dict[str, Json] = {
        "tool": effect.tool,
        "trigger": trigger.value,
        "recovery": "query" if effect.terms.can_query else "human",
    }
    if effect.perhaps_forgotten:
        detail["rewind"] = effect.rewind
    return TraceEvent(trace.RECONCILIATION_REQUIRED, locked.state.step, detail)


# ---- people --------------------------------------------------------------------------------------


def approve(
    locked: Locked, *, who: Principal, token: Token, comment: str = ""
) -> Ruling | ApprovalRefused:
    """Record a person's consent; the last one that it takes sets the run going, with the time that
    it had left.

    The run that waits for it is locked, so that of many uses of one token one counts.
    """
    state, approval = locked.state, locked.approval
    if approval is None or approval.id != token.approval_id:
        return ApprovalRefused("not-pending", f"the run is {state.status.value}, and asks for none")
    if approval.status is not ApprovalStatus.PENDING:
        return ApprovalRefused("not-pending", f"it is {approval.status.value} already")
    problem = consent_problem(approval, token, locked.issued, who, now=locked.now)
    if problem is not None or locked.now >= locked.expires_at:
        late = state.status is _S.AWAITING_APPROVAL and _parked_too_long(locked)
        return late or problem or ApprovalRefused("expired", "the run is over its time")
    agreed = replace(approval, consents=(*approval.consents, who.subject))
    enough = agreed.missing == 0
    entry = AuditEntry.by(
        who,
        Act.APPROVE,
        f"approval:{approval.id}",
        tenant=state.tenant,
        run_id=state.run_id,
        reason=comment,
        before={"run": state.status.value, "approval": approval.status.value},
        after={"approval": "approved" if enough else "pending", "digest": approval.digest},
    )
    consent = Consent(approval.id, who.subject, token.hash)
    ruling = Ruling(state=state, lease="keep", consent=consent, audit=entry)
    if not enough:
        return ruling
    ruling = replace(
        ruling, approval_status=ApprovalStatus.APPROVED, decided_by=", ".join(agreed.consents)
    )
    if state.status is not _S.AWAITING_APPROVAL:
        return ruling  # of a write that a person has taken up: whoever has, sends it
    given: dict[str, Json] = {
        "approval_id": approval.id,
        "arguments_hash": approval.arguments_hash,
        "approvers": len(agreed.consents),
    }
    events: list[TraceEvent] = [TraceEvent("approval.given", state.step, given)]
    moved = machine.moved(state, _E.APPROVED, events)
    return replace(
        ruling,
        state=replace(moved, told=Approved(approval.id, agreed.consents)),
        events=tuple(events),
        lease="release",
        deadline_in_ms=working_ms(locked),
    )


def working_ms(locked: Locked) -> int:
    """The time that a parked run had left, within its hard expiry, which did not pause."""
    return min(locked.remaining_ms or 0, locked.expires_at - locked.now)


def reject(
    locked: Locked, *, approval_id: str, who: Principal, reason: str
) -> Ruling | ApprovalRefused:
    """Record a refusal: the tool is not called, and a run that waits for consent stops."""
    state, approval = locked.state, locked.approval
    if approval is None or approval.id != approval_id:
        return ApprovalRefused("not-pending", f"the run is {state.status.value}, and asks for none")
    if approval.status is not ApprovalStatus.PENDING:
        return ApprovalRefused("not-pending", f"it is {approval.status.value} already")
    waits = state.status is _S.AWAITING_APPROVAL
    ruling = Ruling(state=state, lease="keep")
    if waits:
        ruling = _parked_too_long(locked) or _stop(
            locked, Reason.APPROVAL_REJECTED, comment=reason, by=who.subject
        )
    if ruling.approval_status is ApprovalStatus.EXPIRED:
        return ruling
    entry = AuditEntry.by(
        who,
        Act.REJECT,
        f"approval:{approval.id}",
        tenant=state.tenant,
        run_id=state.run_id,
        reason=reason,
        before={"run": state.status.value, "approval": approval.status.value},
        after={"run": ruling.state.status.value, "approval": "rejected"},
    )
    return replace(
        ruling,
        approval_status=ApprovalStatus.REJECTED,
        decided_by=who.subject,
        audit=entry,
    )


def answer(locked: Locked, *, text: str, who: Principal) -> Ruling | None:
    """Give the asked-for input and set the run going with the time that it had left; None where
    it asks for none.
    """
    state = locked.state
    if state.status is not _S.AWAITING_INPUT:
        return None
    late = _parked_too_long(locked)
    if late is not None:
        return late
    events: list[TraceEvent] = []
    moved = machine.resumed(state, _E.ANSWERED, events)
    entry = AuditEntry.by(
        who,
        Act.ANSWER,
        f"run:{state.run_id}",
        tenant=state.tenant,
        run_id=state.run_id,
        reason=text,
        before={"run": state.status.value},
        after={"run": moved.status.value},
    )
    return Ruling(
        state=replace(moved, told=Answered(text, who.subject)),
        events=tuple(events),
        deadline_in_ms=working_ms(locked),
        audit=entry,
    )


#: How urgent a matter is: 1 comes first.
_PRIORITIES: Final = {
    Reason.CONTRADICTION: 1,
    Reason.UNKNOWN_EFFECT: 2,
    Reason.CLARIFICATION_REQUIRED: 4,
}


def priority_of(reason: Reason) -> int:
    """How urgent a handoff with this reason is, from 1, the most urgent, to 4."""
    return _PRIORITIES.get(reason, 3)


def handoff_of(
    state: RunState,
    effect: Effect | None,
    *,
    reason: Reason | None = None,
    undoing: Effect | None = None,
) -> dict[str, Json]:
    """Everything that a person needs: goal, state, verified facts, pending action, who takes over,
    budget left, trace pointer. What there is none of is said to be "none", never left out.

    Where a write was to be undone, that write is `undoing`, and `effect` is its compensation.
    """
    about = undoing or effect
    pending: Json = "none"
    if state.pending is not None:
        pending = command_to_json(state.pending)
    package: dict[str, Json] = {
        "goal": state.goal,
        "reason": (reason or state.reason or Reason.HANDOFF_REQUIRED).value,
        "status": state.status.value,
        "stage": "/".join(state.path) or "none",
        "step": state.step,
        "state_version": state.state_version,
        "subject": state.principal.subject,
        "verified": {
            "outputs": dict(state.outputs) or "none",
            "observations": [o.text for o in state.observations] or "none",
        },
        "pending_action": pending,
        "takeover": (about.terms.takeover if about is not None else None) or "none",
        "budget_left": dict(state.left.snapshot()),
        "trace": f"trace:{state.run_id}",
    }
    if about is not None:
        package["effect"] = _shown(about)
    if undoing is not None and effect is not None:
        package["compensation"] = _shown(effect)
    return package


def _shown(effect: Effect) -> dict[str, Json]:
    shown: dict[str, Json] = {
        "id": effect.id,
        "tool": effect.tool,
        "intent_key": effect.intent_key,
        "arguments": dict(effect.arguments),
        "status": effect.status.value,
        "attempts": effect.attempts,
        "trigger": effect.trigger.value if effect.trigger else None,
        "evidence": effect.evidence,
    }
    if effect.perhaps_forgotten:
        shown["perhaps_sent_before"] = f"the ledger was set back (rewind {effect.rewind})"
    if effect.compensation is not None:
        shown["original"] = effect.compensation.original
    return shown


# ---- shared --------------------------------------------------------------------------------------


def _takes_recorded(locked: Locked, effect: Effect) -> Ruling:
    """The intent took effect before, here or in another run: rest on the recorded result."""
    ruling = give_back(locked, "recorded", due_in_ms=0)
    evidence = effect.evidence or f"effect:{effect.id}"
    told = told_of(effect.result, evidence)
    return replace(ruling, state=replace(ruling.state, told=told), joins=True)


def told_of(value: Json, evidence: str) -> Resolved:
    return Resolved(value, value if isinstance(value, str) else canonical(value), evidence)


def applied_by(effect: Effect, value: Json, evidence: str) -> Effect:
    return replace(
        effect,
        status=EffectStatus.APPLIED,
        result=value,
        evidence=evidence,
        doubt=Doubt.NONE,
        unknown_since=None,
        next_query_at=None,
    )


def _doubted(effect: Effect, now: int, trigger: Trigger) -> Effect:
    return replace(
        effect,
        status=EffectStatus.UNKNOWN,
        doubt=Doubt.UNPROVEN,
        trigger=trigger,
        unknown_since=now if effect.unknown_since is None else effect.unknown_since,
        absences=0,
        next_query_at=first_query_at(now),
    )


def _unsent_status(effect: Effect) -> EffectStatus:
    unproven = effect.doubt is Doubt.UNPROVEN
    return EffectStatus.UNKNOWN if unproven else EffectStatus.ABSENT


def _applied_although_cancelled(
    locked: Locked, effect: Effect, events: list[TraceEvent] | None = None
) -> Ruling:
    """A write took effect and its run is wished to be cancelled: the effect stays where others rest
    on it, and is undone where its compensation was recorded; otherwise a person decides."""
    events = events if events is not None else []
    state = locked.state
    if locked.other_holders:
        kept = machine.moved(state, _E.PROVED_APPLIED_KEPT, events)
        return replace(ended(locked, kept, Reason.CANCELLED, events), effect=effect)
    if effect.compensation is not None:
        return _to_be_undone(locked, effect, effect.compensation, events)
    if state.status is _S.CANCELLING:
        state = machine.moved(state, _E.PROVED_APPLIED_COMPENSATE, events)
    state = machine.moved(state, _E.NO_PROOF, events)
    detail: dict[str, Json] = {"problem": "cancelled after it was applied; no compensation"}
    ruling = ended(locked, state, Reason.UNKNOWN_EFFECT, events, detail)
    package = {**handoff_of(ruling.state, effect), "problem": detail["problem"]}
    return replace(ruling, effect=effect, handoff=package)


def _handed_off(locked: Locked, effect: Effect, problem: str) -> Ruling:
    events: list[TraceEvent] = []
    if locked.undoing is not None:
        return _undoing_with_person(locked, problem, None, events)
    state = locked.state
    if state.status is not _S.RECONCILING:
        state = machine.moved(state, _E.EFFECT_UNKNOWN, events)
    state = machine.moved(state, _E.NO_PROOF, events)
    given = replace(effect, status=EffectStatus.HANDED_OFF, next_query_at=None)
    ruling = ended(locked, state, Reason.UNKNOWN_EFFECT, events, {"problem": problem})
    package = {**handoff_of(ruling.state, given), "problem": problem}
    return replace(ruling, effect=given, handoff=package, lease="take")


def _unknown_again(locked: Locked, effect: Effect) -> Ruling:
    turn = machine.stop(locked.state, Reason.UNKNOWN_EFFECT, locked.view(), {"effect": effect.id})
    return Ruling(state=turn.state, events=turn.events, wake_in_ms=first_query_at(0))


def _with_person(locked: Locked, effect: Effect) -> Ruling:
    reason = Reason.CONTRADICTION if effect.status is EffectStatus.CONTRADICTED else None
    events: list[TraceEvent] = []
    state = machine.moved(locked.state, _E.INTENT_WITH_PERSON, events)
    ruling = ended(locked, state, reason or Reason.UNKNOWN_EFFECT, events)
    return replace(ruling, handoff=handoff_of(ruling.state, effect))


def spent(locked: Locked, reason: Reason) -> Ruling:
    """A budget or the deadline is spent: the run ends, unless its own effect is still unknown."""
    if locked.own_effect is EffectStatus.UNKNOWN:
        assert locked.effect is not None
        return _unknown_again(locked, locked.effect)
    asks = asked_first(locked)
    if asks is not None:
        return asks
    told = locked.state.told
    if isinstance(told, Resolved):  # nobody has taken up what was proved: the stop refers to it
        return _stop(locked, reason, proved=told.evidence)
    return _stop(locked, reason)


def _stop(
    locked: Locked, reason: Reason, before: list[TraceEvent] | None = None, **detail: Json
) -> Ruling:
    turn = machine.stop(locked.state, reason, locked.view(), detail)
    return Ruling(state=turn.state, events=(*(before or ()), *turn.events))


def ended(
    locked: Locked,
    state: RunState,
    reason: Reason,
    events: list[TraceEvent],
    detail: Mapping[str, Json] | None = None,
) -> Ruling:
    """Explain a stop whose status moves were made by hand."""
    left = state.left.settled()
    if state.status in TERMINAL:
        left = left.without_compensation()
    state = replace(state, reason=reason, left=left)
    if locked.state.reason is not None or not _is_undoing(locked):
        machine.reopened(locked.state, reason, events)
    command = Stop(reason, detail or {})
    stopped = machine.stop_detail(state, command, category_of(reason), locked.left_ms)
    events.append(TraceEvent(trace.RUN_STOPPED, state.step, stopped))
    if state.status in TERMINAL:
        state = replace(state, pending=None, told=None)
    return Ruling(state=state, events=tuple(events))


def _resolved_event(locked: Locked, verdict: str, evidence: str) -> TraceEvent:
    assert locked.effect is not None
    return TraceEvent(
        trace.EFFECT_RESOLVED,
        locked.state.step,
        {"effect": locked.effect.id, "verdict": verdict, "evidence_ref": evidence},
    )


def _outcome_detail(out: Outcome) -> dict[str, Json]:
    detail: dict[str, Json] = {"end": out.end.value, "sent": out.sent}
    match out.reply:
        case Succeeded(value, _):
            detail["receipt"] = value
        case Refused(reason, retryable):
            detail.update({"refused": reason, "retryable": retryable})
        case Doubtful(reason):
            detail["unknown"] = reason
    return detail
