"""What a person can make of a handoff, and what each choice would do.

`choices` says, for one matter, which resolutions there are, what each would do, what it wants (a
look at the service, evidence) and what stands against it. `resolve` makes the ruling, under the
run's lock. A person's word never overrules the effect protocol: a write is called done only with
proof or evidence, absent only by a look that was late enough, and sent again only where the program
itself may send it again. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Final

from handrail.agent import machine, trace
from handrail.agent.approvals import ApprovalStatus
from handrail.agent.effects import (
    QUERIES_PER_DISPATCH,
    Absent,
    Answer,
    Applied,
    Doubt,
    Effect,
    EffectStatus,
    NoAnswer,
    Pending,
    Trigger,
    answer_to_json,
    believed_absent,
    first_query_at,
    may_be_forgotten,
    may_send,
)
from handrail.agent.people import Act, AuditEntry, says_something
from handrail.agent.protocol import (
    Closing,
    Locked,
    OpenHandoff,
    Ruling,
    applied_by,
    approval_problem,
    ended,
    paid_for,
    told_of,
    working_ms,
)
from handrail.agent.stage import InvokeTool, Park
from handrail.agent.status import TERMINAL, Reason, RunEvent, RunStatus
from handrail.agent.tools import Principal, ToolContract, contract_hash
from handrail.agent.trace import TraceEvent
from handrail.canonical import Json
from handrail.errors import BadInput

_S, _E, _F = RunStatus, RunEvent, EffectStatus
#: How much working time a person may give a run that goes on; the hard expiry bounds it, too.
MOST_GRANTED_MS: Final = 24 * 3_600_000
#: A consent that a person needs before a write is sent again is asked for so long.
CONSENT_WITHIN_MS: Final = 24 * 3_600_000


class Resolution(StrEnum):
    """What a person decides about a handoff."""

    COMPLETED = "completed"  # it is done
    COMPENSATED = "compensated"  # it was done, and is undone
    RESUMED = "resumed"  # the run goes on from where it is
    ASK_AGAIN = "ask-again"  # the program finds out, with new queries
    TRY_AGAIN = "try-again"  # the same intent is sent again, under the same key
    FAILED = "failed"  # it was not done
    CANCELLED = "cancelled"  # it was not done, and is not wanted any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One resolution of one handoff. `obstacle` says why it cannot be chosen, if it cannot.

    `asks_tool`: the service is asked first, and its answer decides; `wants_evidence`: it cannot be
    asked, so that the person says where the proof is. `final`: it cannot be taken back.
    """

    resolution: Resolution
    consequence: str
    obstacle: str | None = None
    asks_tool: bool = False
    wants_evidence: bool = False
    final: bool = True

    def to_json(self) -> dict[str, Json]:
        """Return the choice as a JSON object."""
        return {
            "resolution": self.resolution.value,
            "consequence": self.consequence,
            "obstacle": self.obstacle,
            "asks_tool": self.asks_tool,
            "wants_evidence": self.wants_evidence,
            "final": self.final,
        }


@dataclass(eq=False)
class ResolutionRefused(BadInput):
    """A handoff cannot be resolved so; nothing was changed. `problem` is stable, `detail` says
    what stands against it.
    """

    code: ClassVar[str] = "resolution-refused"
    problem: str
    detail: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a person has decided, on which grounds.

    `seen` is the version of the matter that the person looked at: what has moved since is looked at
    again. `answer` is what the service said when it was asked for this, `asked_at` when.
    """

    who: Principal
    resolution: Resolution
    reason: str
    evidence: str = ""
    seen: str | None = None
    grant_ms: int = 0
    answer: Answer | None = None
    asked_at: int = 0


class _Matter(StrEnum):
    """What kind of matter a handoff is."""

    NO_DOUBT = "no-doubt"  # nothing of the run is in doubt: it waits for a person's decision
    ELSEWHERE = "elsewhere"  # the intent is another run's, and in a person's hands there
    DOUBT = "doubt"  # nobody knows whether the write happened
    STANDS = "stands"  # the run was to be cancelled, its write happened, nothing undoes it
    UNDO_REFUSED = "undo-refused"  # the write stands: undoing it did not happen, for certain
    UNDO_DOUBT = "undo-doubt"  # nobody knows whether the write was undone
    CONTRADICTED = "contradicted"  # it happened, and its run has gone another way


def _matter(locked: Locked) -> _Matter:
    effect, undoing = locked.effect, locked.undoing
    if undoing is not None:
        return _Matter.UNDO_REFUSED if undoing.status is _F.APPLIED else _Matter.UNDO_DOUBT
    if effect is None:
        return _Matter.NO_DOUBT
    mine = effect.owner_run_id in (None, locked.state.run_id)
    match effect.status:
        case _F.CONTRADICTED if mine:
            return _Matter.CONTRADICTED
        case _F.HANDED_OFF if mine:
            return _Matter.DOUBT
        case _F.APPLIED if mine and locked.cancel_requested:
            return _Matter.STANDS
        case _F.APPLIED | _F.PLANNED | _F.ABSENT | _F.COMPENSATED:
            return _Matter.NO_DOUBT
    if not mine:
        return _Matter.ELSEWHERE
    return _Matter.NO_DOUBT


def seen_of(locked: Locked) -> str:
    """Name the version of a matter: what a person looked at, and has to decide about."""
    effect, undoing, handoff = locked.effect, locked.undoing, locked.handoff
    parts: list[object] = [locked.state.status.value, locked.epoch, int(locked.cancel_requested)]
    parts += [handoff.id] if handoff is not None else []
    for one in (effect, undoing):
        parts += [] if one is None else [one.id[:8], one.token, one.status.value]
    return ".".join(map(str, parts))


def asked_effect(locked: Locked) -> Effect | None:
    """The effect that a look at the service is about; None where it cannot be asked."""
    matter, effect = _matter(locked), locked.effect
    if effect is None or not effect.terms.can_query or matter is _Matter.ELSEWHERE:
        return None
    return effect if effect.attempts else None


# ---- what there is to choose ---------------------------------------------------------------------


def choices(locked: Locked, *, max_stall_ms: int | None) -> tuple[Choice, ...]:
    """List the resolutions of a handoff, with the consequence of each, in the order of the enum."""
    if locked.handoff is not None and locked.handoff.reason is Reason.CLARIFICATION_REQUIRED:
        return ()  # a question is answered, not resolved
    matter = _matter(locked)
    offered = {
        _Matter.NO_DOUBT: _of_no_doubt,
        _Matter.ELSEWHERE: _of_elsewhere,
        _Matter.DOUBT: _of_doubt,
        _Matter.STANDS: _of_write_that_stands,
        _Matter.UNDO_REFUSED: _of_refused_undo,
        _Matter.UNDO_DOUBT: _of_doubtful_undo,
        _Matter.CONTRADICTED: _of_contradiction,
    }[matter](locked, max_stall_ms)
    order = list(Resolution)
    return tuple(sorted(offered, key=lambda choice: order.index(choice.resolution)))


def _of_no_doubt(locked: Locked, max_stall_ms: int | None) -> list[Choice]:
    nothing = None
    if locked.state.reason is Reason.HANDOFF_REQUIRED:
        nothing = "its workflow has asked for a person here, and knows nothing to go on with"
    return [
        Choice(
            resolution=Resolution.COMPLETED,
            consequence="The run ends as completed, by your evidence. Its workflow does no more.",
            wants_evidence=True,
        ),
        _resumed(locked, "The run goes on with what it was about to do", nothing),
        *_given_up_unsent(locked),
    ]


def _given_up_unsent(locked: Locked) -> list[Choice]:
    """What a run comes to that has sent nothing; unless the ledger may have forgotten it."""
    effect, rewind = locked.effect, locked.rewind
    if rewind is None or (effect is not None and not may_be_forgotten(effect, rewind)):
        return _given_up("Nothing was sent that could still take effect.")
    forgotten = "The ledger was set back: what was sent in the lost time it does not know."
    return [replace(choice, wants_evidence=True) for choice in _given_up(forgotten)]


def _of_elsewhere(locked: Locked, max_stall_ms: int | None) -> list[Choice]:
    return [
        _resumed(
            locked,
            "The run asks again for the intent, which is another run's: settle it there first",
        ),
        *_given_up("The other run's write is not touched."),
    ]


def _given_up(what: str) -> list[Choice]:
    return [
        Choice(resolution=Resolution.FAILED, consequence=f"The run ends as failed. {what}"),
        Choice(resolution=Resolution.CANCELLED, consequence=f"The run ends as cancelled. {what}"),
    ]


def _of_doubt(locked: Locked, max_stall_ms: int | None) -> list[Choice]:
    effect = locked.effect
    assert effect is not None
    write = _words(effect)
    known = locked.kept is not None  # a receipt, or a provider's word, that came too late
    asks = effect.terms.can_query and not known
    wants = not (asks or known)
    happened = "it happened: its receipt is among the evidence" if known else None
    too_early = happened or _too_early(locked, effect, max_stall_ms)

    def absent(resolution: Resolution, ends: str) -> Choice:
        return Choice(
            resolution=resolution,
            consequence=f"{write} is recorded as absent, and the run ends as {ends}.",
            obstacle=too_early,
            asks_tool=asks,
            wants_evidence=not asks,
        )

    return [
        Choice(
            resolution=Resolution.COMPLETED,
            consequence=f"{write} is recorded as applied, and the run ends as completed. What its"
            " workflow would do next is not done.",
            asks_tool=asks,
            wants_evidence=wants,
        ),
        Choice(
            resolution=Resolution.COMPENSATED,
            consequence=f"{write} is recorded as applied and undone, and the run ends as"
            f" compensated. Nothing is undone by this: you have done it.{_others(locked)}",
            obstacle=None if asks or known else too_early,
            asks_tool=asks,
            wants_evidence=True,
        ),
        replace(
            _resumed(locked, f"{write} is recorded as applied, and the run goes on behind it"),
            asks_tool=asks,
            wants_evidence=wants,
        ),
        Choice(
            resolution=Resolution.ASK_AGAIN,
            consequence=f"The reconciler asks the service again, up to {QUERIES_PER_DISPATCH}"
            " times, and settles it or hands it back.",
            obstacle=happened or (None if asks else "the tool has no query"),
            final=False,
        ),
        _try_again(locked, effect, max_stall_ms, happened),
        absent(Resolution.FAILED, "failed"),
        absent(Resolution.CANCELLED, "cancelled"),
    ]


def _try_again(
    locked: Locked, effect: Effect, max_stall_ms: int | None, happened: str | None
) -> Choice:
    pending = locked.state.pending
    needs = isinstance(pending, InvokeTool) and pending.approval
    consent = (
        " A new approval of it is needed: the request is made if there is none."
        if needs and _lacks_consent(locked, None)
        else ""
    )
    key = (
        "under the same key, which the service knows"
        if effect.terms.key_valid_for_ms
        else "and what nobody could prove may happen twice if you are wrong"
    )
    if effect.terms.not_after and not effect.terms.key_valid_for_ms:
        key = "since the service refuses what comes too late"
    way = _way_to_send(locked, effect, max_stall_ms)
    obstacle = happened or (_cannot_go_on(locked) if isinstance(way, EffectStatus) else way)
    if obstacle is None and paid_for(locked.state.left, effect) is None:
        obstacle = "no tool call is left"
    by_absence = way is _F.ABSENT
    return Choice(
        resolution=Resolution.TRY_AGAIN,
        consequence=f"{_words(effect)} is sent again with the same arguments, {key}.{consent}",
        obstacle=obstacle,
        asks_tool=effect.terms.can_query,
        wants_evidence=by_absence and not effect.terms.can_query,
    )


def _way_to_send(locked: Locked, effect: Effect, max_stall_ms: int | None) -> EffectStatus | str:
    """As what an effect may be sent again: as unknown, where the service would know it again, or
    as absent, once that is proved. Otherwise why not.
    """
    doubtful = replace(effect, status=_F.UNKNOWN)
    if may_send(doubtful, now=locked.now, max_stall_ms=max_stall_ms):
        return _F.UNKNOWN
    if not may_send(believed_absent(effect), now=locked.now, max_stall_ms=max_stall_ms):
        if effect.terms.key_valid_for_ms:
            return "the key's lifetime is over: the service would take it for a new request"
        return "nobody vouches for how late a request may leave (max_stall_ms)"
    return _too_early(locked, effect, max_stall_ms) or _F.ABSENT


def _of_write_that_stands(locked: Locked, max_stall_ms: int | None) -> list[Choice]:
    effect = locked.effect
    assert effect is not None
    return [
        Choice(
            resolution=Resolution.COMPLETED,
            consequence=f"{_words(effect)} stands, and the run ends as completed, although it was"
            " to be cancelled.",
        ),
        Choice(
            resolution=Resolution.COMPENSATED,
            consequence=f"{_words(effect)} is recorded as undone, and the run ends as compensated."
            f" Nothing is undone by this: you have done it.{_others(locked)}",
            wants_evidence=True,
        ),
    ]


def _of_refused_undo(locked: Locked, max_stall_ms: int | None) -> list[Choice]:
    undoing, undo = locked.undoing, locked.effect
    assert undoing is not None and undo is not None
    free = undo.status in (_F.PLANNED, _F.ABSENT)
    sendable = free and may_send(undo, now=locked.now, max_stall_ms=max_stall_ms)
    left = locked.state.left.may_compensate(undo.tool, 1 + undo.terms.confirmed_by_query)
    return [
        *_of_write_that_stands(replace(locked, effect=undoing), max_stall_ms),
        Choice(
            resolution=Resolution.TRY_AGAIN,
            consequence=f"{_words(undo)} is sent again, to undo {_words(undoing)}.",
            obstacle=None
            if sendable and left
            else "it may not be sent again"
            if left
            else "no tool call is left",
        ),
    ]


def _of_doubtful_undo(locked: Locked, max_stall_ms: int | None) -> list[Choice]:
    undoing, undo = locked.undoing, locked.effect
    assert undoing is not None and undo is not None
    in_doubt = undo.status is _F.HANDED_OFF
    known = in_doubt and locked.kept is not None
    asks = undo.terms.can_query and undo.attempts > 0 and not known
    too_early = _too_early(locked, undo, max_stall_ms) if in_doubt else None
    undone = "it was undone: the receipt is among the evidence" if known else None
    return [
        Choice(
            resolution=Resolution.COMPLETED,
            consequence=f"{_words(undoing)} stands: it was not undone. The run ends as completed.",
            obstacle=undone or too_early,
            asks_tool=asks and in_doubt,
            wants_evidence=in_doubt and not asks,
        ),
        Choice(
            resolution=Resolution.COMPENSATED,
            consequence=f"{_words(undoing)} is recorded as undone. The run ends as compensated.",
            asks_tool=asks and in_doubt,
            wants_evidence=not (known or (asks and in_doubt)),
        ),
        Choice(
            resolution=Resolution.ASK_AGAIN,
            consequence="The reconciler asks the service again whether it was undone, and settles"
            " it or hands it back.",
            obstacle=undone
            or (None if asks and in_doubt else "there is nothing to ask the service about"),
            final=False,
        ),
    ]


def _of_contradiction(locked: Locked, max_stall_ms: int | None) -> list[Choice]:
    effect = locked.effect
    assert effect is not None
    asks = effect.terms.can_query
    status = locked.state.status.value
    return [
        Choice(
            resolution=Resolution.COMPLETED,
            consequence=f"{_words(effect)} is recorded as applied. Its run stays {status}.",
            asks_tool=asks,
            wants_evidence=not asks,
        ),
        Choice(
            resolution=Resolution.COMPENSATED,
            consequence=f"{_words(effect)} is recorded as undone. Its run stays {status}."
            f" Nothing is undone by this: you have done it.{_others(locked)}",
            asks_tool=asks,
            wants_evidence=True,
        ),
        Choice(
            resolution=Resolution.FAILED,
            consequence=f"{_words(effect)} is recorded as absent after all. Its run stays"
            f" {status}.",
            obstacle=_too_early(locked, effect, max_stall_ms),
            asks_tool=asks,
            wants_evidence=not asks,
        ),
    ]


def _resumed(locked: Locked, what: str, nothing: str | None = None) -> Choice:
    left_ms = max(0, working_ms(locked))
    return Choice(
        resolution=Resolution.RESUMED,
        consequence=f"{what}, with {left_ms} ms of working time and what you grant.",
        obstacle=nothing or _cannot_go_on(locked),
        final=False,
    )


def _cannot_go_on(locked: Locked) -> str | None:
    if locked.cancel_requested:
        return "it is to be cancelled"
    return "it is over its hard expiry" if locked.now >= locked.expires_at else None


def _too_early(locked: Locked, effect: Effect, max_stall_ms: int | None) -> str | None:
    """Why nobody can say yet that a write did not happen. Where no bound of a stall is declared no
    program ever can; a person may, once the request should have landed.
    """
    if effect.dispatch_deadline_at is None:
        return None
    at = effect.settles_at(max_stall_ms or 0)
    if locked.now >= at:
        return None
    return f"it may still land: look again in {at - locked.now} ms"


def _others(locked: Locked) -> str:
    """What undoing means for other runs that rest on the same write: they keep their ends."""
    if not locked.other_holders:
        return ""
    return f" Other runs that rest on it: {locked.other_holders}; they stay as they are."


def _words(effect: Effect) -> str:
    return f"{effect.tool} ({effect.intent_key})"


def chosen(
    offered: Sequence[Choice], wanted: Resolution, evidence: str
) -> Choice | ResolutionRefused:
    """Take one of the choices, or say why it cannot be taken as things stand."""
    choice = next((one for one in offered if one.resolution is wanted), None)
    if choice is None:
        known = ", ".join(one.resolution for one in offered) or "nothing; a question is answered"
        return ResolutionRefused("not-offered", f"there is to choose: {known}")
    if choice.obstacle is not None:
        return ResolutionRefused("not-possible", choice.obstacle)
    if choice.wants_evidence and not says_something(evidence):
        return ResolutionRefused("evidence-needed", "say where the proof of it is")
    return choice


def held_by(holder: str | None) -> ResolutionRefused:
    """The refusal of what somebody else is at."""
    return ResolutionRefused("claimed", f"{holder!r} is at it")


# ---- what becomes of it --------------------------------------------------------------------------


def resolve(
    locked: Locked,
    decision: Decision,
    *,
    max_stall_ms: int | None,
    contract: ToolContract | None = None,
) -> Ruling | ResolutionRefused:
    """Make a person's decision the ruling, or say what stands against it.

    `contract` is that of the tool which is to be sent again, where a new consent has to be asked
    for. The handoff has to be open still, nobody else's, and as it was when the person looked at
    it.
    """
    handoff = locked.handoff
    if handoff is None:
        return ResolutionRefused("not-open", "somebody has resolved it, or it has settled itself")
    if handoff.held_by_other(decision.who.subject, locked.now):
        return held_by(handoff.claimed_by)
    if decision.seen is not None and decision.seen != seen_of(locked):
        return ResolutionRefused("moved-on", "it is not as you have seen it: look at it again")
    found = choices(locked, max_stall_ms=max_stall_ms)
    choice = chosen(found, decision.resolution, decision.evidence)
    if isinstance(choice, ResolutionRefused):
        return choice
    lacking = _unproved(locked, choice, decision, max_stall_ms)
    if lacking is not None:
        return lacking
    goes_on = decision.resolution in (Resolution.RESUMED, Resolution.TRY_AGAIN)
    if goes_on and locked.undoing is None and _granted_ms(locked, decision) <= 0:
        return ResolutionRefused("no-time", "no working time is left: grant some")
    if decision.resolution is Resolution.TRY_AGAIN and _wants_consent(locked, contract):
        return _asked_for_consent(locked, decision, handoff, contract)
    ruling = _ruled(locked, decision, max_stall_ms)
    return _closed(locked, decision, handoff, ruling)


def _unproved(
    locked: Locked, choice: Choice, decision: Decision, max_stall_ms: int | None
) -> ResolutionRefused | None:
    """What a decision lacks of the service's own answer, where it is asked."""
    if not choice.asks_tool:
        return None
    effect = locked.effect
    assert effect is not None
    applied = choice.resolution in (
        Resolution.COMPLETED,
        Resolution.RESUMED,
        Resolution.COMPENSATED,
    )
    if locked.undoing is not None:
        applied = choice.resolution is Resolution.COMPENSATED
    tried_anyway = (
        choice.resolution is Resolution.TRY_AGAIN
        and _way_to_send(locked, effect, max_stall_ms) is _F.UNKNOWN
    )
    match decision.answer:
        case Applied() if applied:
            return None
        case Applied():
            return ResolutionRefused("it-happened", "the service has a record of it")
        case _ if tried_anyway:
            return None
        case Absent() if applied:
            return ResolutionRefused("no-record", "the service knows nothing of it")
        case Absent():
            at = effect.settles_at(max_stall_ms or 0) if effect.dispatch_deadline_at else 0
            if decision.asked_at >= at:
                return None
            return ResolutionRefused("too-early", "it may still land: look again later")
        case Pending():
            return ResolutionRefused("pending", "the service is still at it: ask again later")
        case NoAnswer(problem):
            return ResolutionRefused("no-answer", f"the service did not say: {problem}")
    return ResolutionRefused("not-asked", "the service has to be asked first")


def _granted_ms(locked: Locked, decision: Decision) -> int:
    left_ms = max(0, working_ms(locked))
    return min(left_ms + decision.grant_ms, locked.expires_at - locked.now)


def _ruled(locked: Locked, decision: Decision, max_stall_ms: int | None) -> Ruling:
    matter = _matter(locked)
    if matter in (_Matter.UNDO_REFUSED, _Matter.UNDO_DOUBT):
        return _undo_ruled(locked, decision)
    if matter is _Matter.CONTRADICTED:
        state = locked.state
        return Ruling(state=state, lease="keep", effect=_settled(locked, decision))
    match decision.resolution:
        case Resolution.ASK_AGAIN:
            return _asked_again(locked)
        case Resolution.RESUMED:
            return _goes_on(locked, decision, _settled(locked, decision))
        case Resolution.TRY_AGAIN:
            assert locked.effect is not None
            way = _way_to_send(locked, locked.effect, max_stall_ms)
            effect = replace(locked.effect, status=_F.UNKNOWN, approval_id=None)
            if way is _F.ABSENT:
                effect = replace(believed_absent(effect), unknown_since=None, trigger=None)
            return _goes_on(locked, decision, effect)
    return _ends(locked, decision, _settled(locked, decision))


def _settled(locked: Locked, decision: Decision) -> Effect | None:
    """The effect as it is once a person's decision, and what proves it, is recorded."""
    effect = locked.effect
    if effect is None or _matter(locked) in (_Matter.NO_DOUBT, _Matter.ELSEWHERE):
        return None
    match decision.resolution:
        case Resolution.COMPLETED | Resolution.RESUMED:
            if _matter(locked) is _Matter.STANDS:
                return None
            return _proved(locked, effect, decision)
        case Resolution.COMPENSATED:
            free = replace(effect, unknown_since=None, trigger=None, next_query_at=None)
            return replace(free, status=_F.COMPENSATED, evidence=decision.evidence or None)
    return replace(believed_absent(effect), unknown_since=None, trigger=None)


def _proved(locked: Locked, effect: Effect, decision: Decision) -> Effect:
    match decision.answer:
        case Applied(value, evidence):
            return replace(applied_by(effect, value, evidence), trigger=None)
    if locked.kept is not None:
        kept = locked.kept
        return replace(applied_by(effect, kept.value, kept.evidence), trigger=None)
    return replace(applied_by(effect, effect.result, decision.evidence), trigger=None)


def _asked_again(locked: Locked) -> Ruling:
    assert locked.effect is not None
    events: list[TraceEvent] = []
    state = machine.resumed(locked.state, _E.OPERATOR_ASKS_AGAIN, events)
    return Ruling(
        state=replace(state, reason=Reason.UNKNOWN_EFFECT),
        events=tuple(events),
        effect=_in_doubt_again(locked, locked.effect),
        lease="take",
        wake_in_ms=first_query_at(0),
    )


def _in_doubt_again(locked: Locked, effect: Effect) -> Effect:
    return replace(
        effect,
        status=_F.UNKNOWN,
        doubt=Doubt.UNPROVEN,
        trigger=effect.trigger or Trigger.REPORTED,
        unknown_since=effect.unknown_since or locked.now,
        queries_left=QUERIES_PER_DISPATCH,
        absences=0,
        next_query_at=first_query_at(locked.now),
    )


def _goes_on(locked: Locked, decision: Decision, effect: Effect | None) -> Ruling:
    events: list[TraceEvent] = []
    state = machine.resumed(locked.state, _E.OPERATOR_RESUMED, events)
    joins = effect is not None and effect.status is _F.APPLIED
    if joins:
        assert effect is not None
        evidence = effect.evidence or f"effect:{effect.id}"
        # As after any proof, the call that was kept for undoing it is free.
        left = state.left.without_compensation()
        state = replace(state, left=left, told=told_of(effect.result, evidence))
    return Ruling(
        state=state,
        events=tuple(events),
        effect=effect,
        lease="take",
        attempts=0,
        deadline_in_ms=_granted_ms(locked, decision),
        joins=joins,
    )


def _ends(locked: Locked, decision: Decision, effect: Effect | None) -> Ruling:
    before = locked.state.reason or Reason.HANDOFF_REQUIRED
    failed = before if effect is None else Reason.TOOL_FAILED
    event, reason = {
        Resolution.COMPLETED: (_E.OPERATOR_COMPLETED, Reason.COMPLETED),
        Resolution.COMPENSATED: (_E.OPERATOR_COMPENSATED, Reason.COMPENSATED),
        Resolution.FAILED: (_E.OPERATOR_FAILED, failed),
        Resolution.CANCELLED: (_E.OPERATOR_CANCELLED, Reason.CANCELLED),
    }[decision.resolution]
    events: list[TraceEvent] = []
    state = machine.moved(locked.state, event, events)
    detail: dict[str, Json] = {
        "by": decision.who.subject,
        "resolution": decision.resolution.value,
        "evidence": decision.evidence or (effect.evidence if effect else None),
    }
    ruling = ended(locked, state, reason, events, detail)
    joins = effect is not None and effect.status is _F.APPLIED
    return replace(ruling, effect=effect, lease="take", joins=joins)


def _undo_ruled(locked: Locked, decision: Decision) -> Ruling:
    """What a person decides about a write that was to be undone, and the write that undoes it."""
    undoing, undo = locked.undoing, locked.effect
    assert undoing is not None and undo is not None
    in_doubt = undo.status is _F.HANDED_OFF
    match decision.resolution:
        case Resolution.ASK_AGAIN | Resolution.TRY_AGAIN:
            events: list[TraceEvent] = []
            state = machine.resumed(locked.state, _E.OPERATOR_ASKS_AGAIN, events)
            return Ruling(
                state=replace(state, reason=Reason.UNKNOWN_EFFECT),
                events=tuple(events),
                effect=_in_doubt_again(locked, undo) if in_doubt else None,
                undoing=replace(undoing, status=_F.COMPENSATING),
                lease="take",
                wake_in_ms=first_query_at(0) if in_doubt else 0,
            )
        case Resolution.COMPENSATED:
            done = _proved(locked, undo, decision) if in_doubt else None
            was_undone = replace(undoing, status=_F.COMPENSATED)
            return replace(_ends(locked, decision, None), effect=done, undoing=was_undone)
    absent = replace(believed_absent(undo), unknown_since=None, trigger=None) if in_doubt else None
    stands = replace(undoing, status=_F.APPLIED)
    return replace(_ends(locked, decision, None), effect=absent, undoing=stands)


# ---- a consent, and the record -------------------------------------------------------------------


def _lacks_consent(locked: Locked, contract: ToolContract | None) -> bool:
    pending = locked.state.pending
    assert isinstance(pending, InvokeTool)
    words = None if contract is None else contract_hash(contract)
    return approval_problem(locked, pending, words) is not None


def _wants_consent(locked: Locked, contract: ToolContract | None) -> bool:
    """Whether a write that a person sends again has yet to be agreed to: the consent to the first
    attempt does not cover it.
    """
    pending = locked.state.pending
    if locked.undoing is not None or not isinstance(pending, InvokeTool) or not pending.approval:
        return False
    return _lacks_consent(locked, contract)


def _asked_for_consent(
    locked: Locked, decision: Decision, handoff: OpenHandoff, contract: ToolContract | None
) -> Ruling | ResolutionRefused:
    pending, approval = locked.state.pending, locked.approval
    assert isinstance(pending, InvokeTool)
    pending_yet = approval is not None and approval.status is ApprovalStatus.PENDING
    fits = contract is None or (
        approval is not None and approval.terms.contract_hash == contract_hash(contract)
    )
    if approval is not None and pending_yet and fits and approval.expires_at > locked.now:
        detail = f"approval {approval.id} of it is asked for: try again once it is given"
        return ResolutionRefused("approval-needed", detail)
    if contract is None:
        return ResolutionRefused("tool-unknown", "its tool is not declared here: name your fleet")
    within_ms = min(CONSENT_WITHIN_MS, locked.expires_at - locked.now)
    park = Park.for_consent(contract, pending, expires_ms=within_ms)
    entry = _entry(locked, decision, handoff, {"approval": "requested"})
    return Ruling(state=locked.state, lease="keep", park=park, audit=entry)


def _closed(locked: Locked, decision: Decision, handoff: OpenHandoff, ruling: Ruling) -> Ruling:
    done = Closing(
        handoff=handoff,
        resolution=decision.resolution.value,
        who=decision.who.subject,
        reason=decision.reason,
        evidence=decision.evidence,
    )
    detail: dict[str, Json] = {
        "handoff": handoff.id,
        "resolution": decision.resolution.value,
        "by": decision.who.subject,
    }
    event = TraceEvent(trace.HANDOFF_RESOLVED, locked.state.step, detail)
    after: dict[str, Json] = {"run": ruling.state.status.value, "handoff": "resolved"}
    for name, one in (("effect", ruling.effect), ("undoing", ruling.undoing)):
        if one is not None:
            after[name] = one.status.value
    entry = _entry(locked, decision, handoff, after)
    answered = _as_evidence(decision)
    return replace(
        ruling,
        events=(event, *ruling.events) if locked.state.status not in TERMINAL else (),
        closing=done,
        audit=entry,
        evidence=answered if locked.effect is not None else None,
    )


def _as_evidence(decision: Decision) -> tuple[str, dict[str, Json]]:
    detail: dict[str, Json] = {
        "resolution": decision.resolution.value,
        "by": decision.who.subject,
        "reason": decision.reason,
        "evidence": decision.evidence,
    }
    if decision.answer is not None:
        detail |= {"service": answer_to_json(decision.answer), "asked_at": decision.asked_at}
    return "operator", detail


def _entry(
    locked: Locked, decision: Decision, handoff: OpenHandoff, after: dict[str, Json]
) -> AuditEntry:
    state = locked.state
    before: dict[str, Json] = {"run": state.status.value, "handoff": "open"}
    for name, one in (("effect", locked.effect), ("undoing", locked.undoing)):
        if one is not None:
            before[name] = one.status.value
    return AuditEntry.by(
        decision.who,
        Act.RESOLVE,
        f"handoff:{handoff.id}",
        tenant=state.tenant,
        run_id=state.run_id,
        reason=decision.reason,
        before=before,
        after={
            **after,
            "resolution": decision.resolution.value,
            "evidence": decision.evidence,
            "grant_ms": decision.grant_ms,
        },
    )
