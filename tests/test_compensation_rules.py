"""What is decided about undoing a write, under the lock: each case alone, without a ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from handrail.agent import protocol
from handrail.agent.budget import Budget, BudgetLeft
from handrail.agent.effects import (
    EFFECT_MOVES,
    CompensationRecord,
    Doubt,
    Effect,
    EffectStatus,
    Terms,
    may_become,
)
from handrail.agent.loop import AgentLoop
from handrail.agent.protocol import (
    LEASE_MARGIN_MS,
    UNDO_ATTEMPTS,
    Go,
    Halt,
    Locked,
    Outcome,
    Ruling,
)
from handrail.agent.stage import Doubtful, End, Refused, Reply, Succeeded, arguments_hash
from handrail.agent.status import Reason, RunStatus
from handrail.agent.tools import FOREVER, Compensation, Guarantee, SideEffect, Tool, ToolContract
from handrail.agent.tools import Approval as Consent
from handrail.agent.workflow import Workflow
from tests.test_protocol import COMMAND, NOW, STATE, TERMS, at_rest, effect, kinds, locked

E, R = EffectStatus, RunStatus
RECORD: Final = CompensationRecord("undo", original={"text": "before"})


async def _never(*_: object) -> bool:
    raise AssertionError("nothing is called by a decision")


def tool(name: str, **given: Any) -> Tool:
    """A write without a person."""
    contract = ToolContract(
        name=name,
        side_effect=SideEffect.IDEMPOTENT,
        approval=Consent.NEVER,
        guarantee=Guarantee.IDEMPOTENCY_KEY,
        key_valid_for_ms=FOREVER,
        can_query=True,
        intent=lambda arguments, run: name,
    )
    return Tool(contract, _never, query=_never, **given)


UNDO: Final = tool("undo")
SAVE: Final = tool("save", compensation=Compensation(UNDO, lambda *_: {}))
WORKFLOW: Final = Workflow(
    name="draft", stages=[AgentLoop(name="loop", actions=(SAVE,), verify=_never)]
)
KEPT: Final = replace(STATE, left=replace(STATE.left, tool_calls=1, compensations_reserved=1))


def written(status: EffectStatus = E.COMPENSATING, **given: Any) -> Effect:
    """The write that is undone."""
    return replace(effect(E.APPLIED), status=status, compensation=RECORD, **given)


def undo(status: EffectStatus = E.PLANNED, **given: Any) -> Effect:
    """Its compensation."""
    fields: dict[str, Any] = {"terms": TERMS}
    if status is not E.PLANNED:
        fields |= {
            "attempts": 1,
            "token": 1,
            "dispatcher": "sweep:1",
            "owner_run_id": "r1",
            "first_dispatched_at": NOW - 10_000,
            "dispatch_deadline_at": NOW - 5_000,
            "doubt": Doubt.UNPROVEN if status is E.UNKNOWN else Doubt.NONE,
        }
    return Effect(
        id="e2",
        tenant="t",
        intent_key="undo",
        tool="undo",
        contract_version="1",
        arguments={},
        arguments_hash=arguments_hash("undo", {}),
        status=status,
        compensates="e1",
        **fields | given,
    )


def while_undoing(by: Effect | None, **given: Any) -> Locked:
    """The run whose write is being undone."""
    state = given.pop("state", replace(KEPT, status=R.RECONCILING, reason=None))
    options: dict[str, Any] = {"effect": by, "undoing": written(), "cancel_requested": True}
    if by is None:
        options |= {"effect": written(), "undoing": None}
    return replace(at_rest(R.RECONCILING), state=state, **options | given)


def said(seen: Locked, reply: Reply | None, **given: Any) -> Ruling:
    """What the word of a compensation's sender comes to."""
    fields: dict[str, Any] = {"end": End.RETURNED if reply else End.RAISED, "evidence_id": "r:2"}
    out = Outcome("e2", **{"token": 1, "dispatcher": "sweep:1", **fields, "reply": reply} | given)
    ruling = protocol.outcome(seen, WORKFLOW, out)
    assert ruling is not None
    return ruling


def sent(seen: Locked, **given: Any) -> tuple[Any, Any]:
    """What dispatching the compensation comes to."""
    options: dict[str, Any] = {"dispatcher": "sweep:2", "call_ms": 3_000, "max_stall_ms": 20_000}
    return protocol.dispatch_compensation(seen, **options | given)


def moved(ruling: Ruling | None) -> tuple[Any, Any, Any]:
    """What becomes of the run, of the compensation and of what it undoes."""
    assert ruling is not None
    by = ruling.effect.status if ruling.effect else None
    return ruling.state.status, by, ruling.undoing.status if ruling.undoing else None


RECEIPT: Final = Succeeded({"undone": 1}, "undone")


# ---- keeping a call ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "record", "confirmed", "after"),
    [
        ({"tool_calls": 2}, RECORD, False, (0, 1)),
        ({"tool_calls": 1}, RECORD, False, None),
        ({"tool_calls": 1}, None, False, (0, 0)),
        ({"tool_calls": 3}, RECORD, True, (0, 1)),
        ({"tool_calls": 2}, RECORD, True, None),
        ({"tool_calls": 3}, replace(RECORD, calls=2), False, (0, 2)),
        ({"tool_calls": 1, "compensations_reserved": 1}, RECORD, False, (0, 1)),  # sent again
        ({"tool_calls": 9, "per_tool": {"undo": 0}}, RECORD, False, None),
        ({"tool_calls": 9, "per_tool": {"undo": 1, "save": 1}}, RECORD, False, (7, 1)),
    ],
)
def test_a_dispatch_pays_for_the_call_and_keeps_what_may_have_to_undo_it(
    left: dict[str, Any],
    record: CompensationRecord | None,
    confirmed: bool,
    after: tuple[int, int] | None,
) -> None:
    budget = replace(STATE.budget, per_tool=left.get("per_tool", {}))
    state = replace(STATE, budget=budget, left=replace(STATE.left, **left))
    terms = replace(TERMS, confirmed_by_query=confirmed)
    planned = effect(terms=terms, compensation=record)
    options: dict[str, Any] = {"claim_id": "c1", "call_ms": 3_000, "max_stall_ms": 20_000}
    ruling, go = protocol.dispatch(locked(state, effect=planned), COMMAND, **options)

    assert ruling is not None
    if after is None:
        assert go == Halt("budget") and ruling.state.reason is Reason.TOOL_CALL_BUDGET_EXHAUSTED
        return
    assert isinstance(go, Go)
    assert (ruling.state.left.tool_calls, ruling.state.left.compensations_reserved) == after


def test_what_is_kept_is_not_used_and_not_left() -> None:
    left = BudgetLeft.full(Budget(tool_calls=5)).with_compensation(2)

    assert (left.tool_calls_available, left.tool_calls_unused) == (3, 5)
    assert left.snapshot()["tool_calls"] == 3
    assert left.without_compensation() == BudgetLeft.full(Budget(tool_calls=5))
    assert left.compensation_used("undo", 2) == replace(left, compensations_reserved=0)
    used = left.compensation_used("undo", 2).compensation_used("undo", 2)
    assert (used.tool_calls, used.may_compensate("undo"), used.may_compensate("undo", 2)) == (
        1,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("reply", "given", "status"),
    [
        (RECEIPT, {}, R.RUNNING),
        (Refused("busy", retryable=True), {}, R.RUNNING),
        (Refused("no"), {}, R.FAILED),
        (None, {"sent": False, "end": End.RETURNED}, R.RUNNING),
    ],
)
def test_what_was_kept_is_free_once_the_write_is_settled(
    reply: Reply | None, given: dict[str, Any], status: RunStatus
) -> None:
    in_flight = replace(written(E.DISPATCHED), dispatch_deadline_at=NOW + 1)
    by = in_flight.dispatcher
    fields: dict[str, Any] = {"token": 1, "end": End.RETURNED, "reply": reply, "dispatcher": by}
    out = Outcome("e1", **fields | given)
    ruling = protocol.outcome(locked(KEPT, effect=in_flight), WORKFLOW, out)

    assert ruling is not None and ruling.state.status is status
    assert ruling.state.left.tool_calls_unused == KEPT.left.tool_calls_unused
    assert ruling.state.left.compensations_reserved == 0


@pytest.mark.parametrize("wish", [False, True])
def test_what_was_kept_stays_while_the_write_is_in_doubt(wish: bool) -> None:
    in_flight = replace(written(E.DISPATCHED), dispatch_deadline_at=NOW + 1)
    state = replace(KEPT, status=R.CANCELLING) if wish else KEPT
    by = in_flight.dispatcher
    out = Outcome("e1", token=1, end=End.RAISED, reply=None, dispatcher=by)
    seen = locked(state, effect=in_flight, cancel_requested=wish)
    ruling = protocol.outcome(seen, WORKFLOW, out)

    assert ruling is not None and ruling.state.status is R.RECONCILING
    assert ruling.state.left.compensations_reserved == 1


# ---- beginning -----------------------------------------------------------------------------------


@pytest.mark.accept("LED-15")
@pytest.mark.parametrize(
    ("others", "record", "status", "becomes"),
    [
        (0, RECORD, R.RECONCILING, E.COMPENSATING),
        (1, RECORD, R.CANCELLED, E.APPLIED),
        (0, None, R.HANDED_OFF, E.APPLIED),
        (1, None, R.CANCELLED, E.APPLIED),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_proved_write_of_a_cancelled_run_is_undone_unless_others_rest_on_it(
    others: int,
    record: CompensationRecord | None,
    status: RunStatus,
    becomes: EffectStatus,
    late: bool,
) -> None:
    was = E.UNKNOWN if late else E.DISPATCHED
    seen = locked(
        replace(
            KEPT,
            status=R.RECONCILING if late else R.CANCELLING,
            reason=Reason.UNKNOWN_EFFECT if late else None,
        ),
        effect=replace(written(was), compensation=record),
        cancel_requested=True,
        other_holders=others,
    )
    assert seen.effect is not None
    by = seen.effect.dispatcher
    out = Outcome("e1", token=1, end=End.RETURNED, reply=RECEIPT, evidence_id="r:1", dispatcher=by)
    ruling = protocol.outcome(seen, WORKFLOW, out)

    assert ruling is not None and ruling.effect is not None and ruling.evidence is not None
    assert (ruling.state.status, ruling.effect.status) == (status, becomes)
    assert ruling.effect.result == {"undone": 1} and ruling.effect.evidence == "r:1"
    assert may_become(was, becomes)
    if becomes is E.COMPENSATING:
        assert ruling.wake_in_ms == 0 and ruling.lease == "take"
        assert ruling.state.left.compensations_reserved == 1
        assert "effect.compensating" in kinds(ruling)
        assert ("run.resumed" in kinds(ruling)) is late  # the rest in doubt had been announced
    elif status is R.CANCELLED:
        assert ruling.state.left.compensations_reserved == 0


def test_one_transaction_may_lead_over_applied_alone() -> None:
    leads = {
        s for s in E if may_become(s, E.COMPENSATING) and E.COMPENSATING not in EFFECT_MOVES[s]
    }

    assert leads == {E.DISPATCHED, E.UNKNOWN, E.COMPENSATING}
    assert not may_become(E.ABSENT, E.COMPENSATING) and not may_become(E.PLANNED, E.COMPENSATING)
    assert not may_become(E.DISPATCHED, E.COMPENSATED)


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (None, "undoes"),
        (undo(), "undoes"),
        (undo(E.ABSENT), "undoes"),
        (undo(E.APPLIED, owner_run_id="r2"), "undoes"),
        (undo(E.HANDED_OFF, owner_run_id="r2"), "undoes"),
        (undo(E.DISPATCHED, owner_run_id="r2"), protocol.ELSEWHERE_MS),
        (undo(E.UNKNOWN, owner_run_id="r2"), protocol.ELSEWHERE_MS),
        (undo(E.DISPATCHED, dispatch_deadline_at=NOW), LEASE_MARGIN_MS),
    ],
)
def test_the_sweep_goes_on_with_it_or_waits(by: Effect | None, expected: str | int) -> None:
    ruling = protocol.wake(while_undoing(by), max_attempts=5, max_stall_ms=20_000)

    assert ruling is not None and ruling.lease == "keep" and ruling.effect is None
    assert ruling.undoes is (expected == "undoes")
    assert ruling.wake_in_ms == (protocol.UNDO_LEASE_MS if expected == "undoes" else expected)


@pytest.mark.accept("LED-18")
def test_a_compensation_whose_sender_is_gone_is_in_doubt() -> None:
    over = undo(E.DISPATCHED, dispatch_deadline_at=NOW - LEASE_MARGIN_MS)
    ruling = protocol.wake(while_undoing(over), max_attempts=5, max_stall_ms=20_000)

    assert moved(ruling) == (R.RECONCILING, E.UNKNOWN, None)
    assert ruling is not None and kinds(ruling) == ["effect.reconciliation-required"]


def test_a_doubtful_compensation_is_queried_like_any_write() -> None:
    ruling = protocol.wake(while_undoing(undo(E.UNKNOWN)), max_attempts=5, max_stall_ms=20_000)

    assert ruling is not None and ruling.effect is not None and not ruling.undoes
    assert ruling.effect.queries_left == undo(E.UNKNOWN).queries_left - 1


# ---- sending -------------------------------------------------------------------------------------


def test_a_compensation_is_sent_with_the_call_that_was_kept_for_it() -> None:
    """Its run has neither time nor budget, and the wish to cancel is why it is sent at all."""
    spent = replace(KEPT.left, tool_calls=0, steps=0, model_calls=0)
    seen = while_undoing(undo(), state=replace(KEPT, status=R.RECONCILING, left=spent))
    ruling, go = sent(replace(seen, deadline_at=NOW - 1, expires_at=NOW - 1))

    assert isinstance(go, Go) and go.deadline_at == NOW + 3_000
    assert (ruling.effect.status, ruling.effect.token, ruling.effect.owner_run_id) == (
        E.DISPATCHED,
        1,
        "r1",
    )
    assert ruling.effect.dispatcher == "sweep:2"
    assert ruling.state.left == replace(spent, compensations_reserved=0)
    assert ruling.state.status is R.RECONCILING and ruling.undoing is None
    assert ruling.wake_in_ms == 3_000 + LEASE_MARGIN_MS
    (started,) = ruling.events
    assert started.detail["compensates"] == "e1" and started.detail["tool"] == "undo"


NO_QUERY: Final = replace(TERMS, can_query=False)
DEAD_KEY: Final = replace(NO_QUERY, key_valid_for_ms=1)


@pytest.mark.parametrize(
    ("seen", "code", "becomes"),
    [
        (while_undoing(None), "not-mine", None),
        (while_undoing(undo(), undoing=written(E.APPLIED)), "not-mine", None),
        (while_undoing(undo(), state=replace(KEPT, status=R.HANDED_OFF)), "not-mine", None),
        (while_undoing(undo(E.DISPATCHED)), "not-mine", None),
        (while_undoing(undo(E.UNKNOWN)), "not-mine", None),  # it has queries left
        (
            while_undoing(undo(E.APPLIED, owner_run_id="r2")),
            "recorded",
            (R.COMPENSATED, E.APPLIED, E.COMPENSATED),
        ),
        (
            while_undoing(undo(E.DISPATCHED, owner_run_id="r2")),
            "elsewhere",
            (R.RECONCILING, None, None),
        ),
        (
            while_undoing(undo(E.CONTRADICTED, owner_run_id="r2")),
            "with-person",
            (R.HANDED_OFF, E.CONTRADICTED, E.HANDED_OFF),
        ),
        (
            while_undoing(undo(E.UNKNOWN, terms=DEAD_KEY)),
            "may-not-send",
            (R.HANDED_OFF, E.HANDED_OFF, E.HANDED_OFF),
        ),
        (
            while_undoing(undo(E.ABSENT, terms=DEAD_KEY, doubt=Doubt.BY_QUERY)),
            "may-not-send",
            (R.HANDED_OFF, E.ABSENT, E.APPLIED),
        ),
        (
            while_undoing(
                undo(E.ABSENT), state=replace(KEPT, left=replace(KEPT.left, tool_calls=0))
            ),
            "not-mine",
            None,
        ),
        (while_undoing(undo(), paused="tool:undo"), "paused", (R.RECONCILING, None, None)),
    ],
)
def test_a_compensation_that_is_not_sent(
    seen: Locked, code: str, becomes: tuple[Any, ...] | None
) -> None:
    ruling, halt = sent(seen)

    assert halt == Halt(code)
    assert (ruling is None) is (becomes is None)
    if becomes is not None:
        assert moved(ruling) == becomes


@pytest.mark.parametrize("status", [E.ABSENT, E.UNKNOWN])
def test_a_compensation_without_a_call_left_is_a_persons(status: EffectStatus) -> None:
    left = replace(KEPT.left, tool_calls=0, compensations_reserved=0)
    seen = while_undoing(
        undo(status, terms=NO_QUERY), state=replace(KEPT, status=R.RECONCILING, left=left)
    )
    ruling, halt = sent(seen)

    assert halt == Halt("may-not-send")
    expected = (E.ABSENT, E.APPLIED) if status is E.ABSENT else (E.HANDED_OFF, E.HANDED_OFF)
    assert moved(ruling) == (R.HANDED_OFF, *expected)
    assert ruling.handoff["problem"] == "no tool call is left to undo it"


def test_what_nobody_else_can_settle_is_sent_again_under_its_key() -> None:
    ruling, go = sent(while_undoing(undo(E.UNKNOWN, terms=NO_QUERY)))

    assert isinstance(go, Go) and ruling.effect.attempts == 2
    assert ruling.effect.doubt is Doubt.UNPROVEN


# ---- what its sender says ------------------------------------------------------------------------

UNPROVEN: Final = {"doubt": Doubt.UNPROVEN, "attempts": 2}


@pytest.mark.accept("LED-18", "LED-11")
@pytest.mark.parametrize(
    ("by", "reply", "given", "becomes"),
    [
        ({}, RECEIPT, {}, (R.COMPENSATED, E.APPLIED, E.COMPENSATED)),
        (UNPROVEN, RECEIPT, {}, (R.COMPENSATED, E.APPLIED, E.COMPENSATED)),
        ({}, Refused("no"), {}, (R.HANDED_OFF, E.ABSENT, E.APPLIED)),
        ({}, Refused("busy", retryable=True), {}, (R.RECONCILING, E.ABSENT, None)),
        (
            {"attempts": UNDO_ATTEMPTS},
            Refused("busy", retryable=True),
            {},
            (R.HANDED_OFF, E.ABSENT, E.APPLIED),
        ),
        ({}, None, {"sent": False, "end": End.RETURNED}, (R.RECONCILING, E.ABSENT, None)),
        (UNPROVEN, Refused("done before"), {}, (R.RECONCILING, E.UNKNOWN, None)),
        (UNPROVEN, None, {"sent": False, "end": End.RETURNED}, (R.RECONCILING, E.UNKNOWN, None)),
        ({}, Doubtful("no idea"), {}, (R.RECONCILING, E.UNKNOWN, None)),
        ({}, None, {}, (R.RECONCILING, E.UNKNOWN, None)),
        ({}, None, {"end": End.TIMED_OUT}, (R.RECONCILING, E.UNKNOWN, None)),
    ],
)
def test_what_the_senders_word_comes_to(
    by: dict[str, Any], reply: Reply | None, given: dict[str, Any], becomes: tuple[Any, ...]
) -> None:
    ruling = said(while_undoing(undo(E.DISPATCHED, **by)), reply, **given)

    assert moved(ruling) == becomes
    assert ruling.evidence is not None and ruling.evidence[0] == "outcome"
    assert kinds(ruling).count("run.stopped") == (becomes[0] is not R.RECONCILING)
    assert "run.resumed" not in kinds(ruling)  # nothing had been announced
    if becomes[0] is R.COMPENSATED:
        assert ruling.state.reason is Reason.COMPENSATED and ruling.handoff is None
        assert ruling.state.left.compensations_reserved == 0
    if becomes[1] is E.UNKNOWN:
        assert ruling.effect is not None and ruling.effect.trigger is not None
        assert ruling.effect.trigger.value != "cancellation"


@pytest.mark.accept("LED-12")
@pytest.mark.parametrize(
    ("by", "token", "reply", "becomes"),
    [
        (undo(E.UNKNOWN), 1, RECEIPT, (R.COMPENSATED, E.APPLIED, E.COMPENSATED)),
        (undo(E.UNKNOWN, token=2), 1, RECEIPT, (R.COMPENSATED, E.APPLIED, E.COMPENSATED)),
        (undo(E.UNKNOWN, token=2), 1, Refused("no"), (R.RECONCILING, None, None)),
        (undo(E.DISPATCHED, token=2), 1, RECEIPT, (R.RECONCILING, None, None)),
        (
            undo(E.ABSENT, doubt=Doubt.BY_QUERY),
            1,
            RECEIPT,
            (R.RECONCILING, E.UNKNOWN, E.COMPENSATING),
        ),
        (undo(E.ABSENT, doubt=Doubt.BY_QUERY), 1, Refused("no"), (R.RECONCILING, None, None)),
    ],
)
def test_what_is_late_is_evidence_and_never_a_negative_verdict(
    by: Effect, token: int, reply: Reply, becomes: tuple[Any, ...]
) -> None:
    ruling = said(while_undoing(by), reply, token=token)

    assert moved(ruling) == becomes and ruling.evidence is not None


def test_a_compensation_that_left_after_all_makes_doubt_of_what_a_person_had() -> None:
    seen = while_undoing(
        undo(E.ABSENT, doubt=Doubt.BY_QUERY),
        undoing=written(E.APPLIED),
        state=replace(KEPT, status=R.HANDED_OFF, reason=Reason.HANDOFF_REQUIRED),
    )
    ruling = said(seen, RECEIPT)

    assert moved(ruling) == (R.RECONCILING, E.UNKNOWN, E.COMPENSATING)
    assert kinds(ruling) == ["run.moved", "run.resumed", "run.stopped"]


def test_a_compensation_that_left_after_the_end_is_a_contradiction() -> None:
    ended = replace(KEPT, status=R.FAILED, reason=Reason.TOOL_FAILED)
    seen = while_undoing(
        undo(E.ABSENT, doubt=Doubt.BY_QUERY), undoing=written(E.APPLIED), state=ended
    )
    ruling = said(seen, RECEIPT)

    assert moved(ruling) == (R.FAILED, E.CONTRADICTED, None)
    assert ruling.handoff is not None and ruling.handoff["reason"] == "contradiction"


def test_the_writes_own_sender_is_too_late_to_say_anything() -> None:
    seen = replace(while_undoing(undo()), effect=written(), undoing=None, current=False)
    for reply in (RECEIPT, Refused("no"), None):
        end = End.RETURNED if reply else End.RAISED
        by = written().dispatcher
        out = Outcome("e1", token=1, end=end, reply=reply, dispatcher=by)
        ruling = protocol.outcome(seen, WORKFLOW, out)
        assert moved(ruling) == (R.RECONCILING, None, None)


def test_a_handoff_shows_the_write_and_its_compensation() -> None:
    ruling = said(while_undoing(undo(E.DISPATCHED)), Refused("no"))
    package: Any = ruling.handoff

    assert package["effect"]["id"] == "e1" and package["effect"]["status"] == "applied"
    assert package["effect"]["original"] == {"text": "before"}
    assert package["compensation"]["id"] == "e2" and package["compensation"]["status"] == "absent"
    assert package["problem"] == "the compensation was refused: no"


def test_nothing_is_said_about_a_compensation_that_is_none_any_more() -> None:
    for seen in (at_rest(R.RUNNING), while_undoing(undo(), undoing=written(E.HANDED_OFF))):
        assert protocol.cannot_undo(seen, "why") is None
        assert protocol.undoing_waits(seen, 1_000) is None
        assert protocol.compensation_planned(seen, COMMAND) is None


def test_terms_that_were_stored_before_are_read_back() -> None:
    stored = {k: v for k, v in TERMS.to_json().items() if k != "confirmed_by_query"}

    assert Terms(**stored) == replace(TERMS, confirmed_by_query=False)
