"""What is decided about a run and its effect under their lock: every decision as a pure function.

No ledger, no clock: the locked rows are values here, and the rulings are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail.agent import machine, protocol
from handrail.agent.approvals import (
    Approval,
    ApprovalRefused,
    ApprovalStatus,
    ApprovalTerms,
    IssuedToken,
    Token,
)
from handrail.agent.budget import Budget, BudgetLeft, CallLimits
from handrail.agent.effects import (
    EFFECT_MOVES,
    QUERIES_PER_DISPATCH,
    UNRESOLVED,
    Absent,
    AskAgain,
    Doubt,
    Effect,
    EffectStatus,
    GiveUp,
    ProvedAbsent,
    ProvedApplied,
    SendAgain,
    Terms,
    Trigger,
)
from handrail.agent.loop import AgentLoop
from handrail.agent.machine import RunState
from handrail.agent.people import Act, Role
from handrail.agent.protocol import Consent, Go, Halt, Locked, Outcome, Ruling
from handrail.agent.stage import (
    Answered,
    Approved,
    AskModel,
    Command,
    Doubtful,
    End,
    InvokeTool,
    Park,
    ParkKind,
    Proposed,
    Refused,
    Reply,
    Resolved,
    Result,
    Succeeded,
)
from handrail.agent.status import CLAIMABLE, TERMINAL, Reason, RunStatus
from handrail.agent.tools import (
    FOREVER,
    Guarantee,
    Principal,
    SideEffect,
    Tool,
    ToolContract,
)
from handrail.agent.tools import (
    Approval as Asks,
)
from handrail.agent.trace import RUN_RESUMED, RUN_STOPPED
from handrail.agent.workflow import Workflow
from handrail.canonical import canonical
from handrail.errors import IllegalTransition

R, E = RunStatus, EffectStatus
NOW: Final = 1_000_000
STALL_MS: Final = 20_000
CALL_MS: Final = 5_000
TERMS: Final = Terms(CALL_MS, FOREVER, False, True, 5_000, 60_000, False)


def _never(*_: object) -> None:
    raise AssertionError("nothing is called in here")


SAVE: Final = Tool(
    ToolContract(
        name="save",
        side_effect=SideEffect.IDEMPOTENT,
        approval=Asks.NEVER,
        intent=lambda arguments, run: f"save:{arguments['id']}",
        guarantee=Guarantee.IDEMPOTENCY_KEY,
        key_valid_for_ms=FOREVER,
        can_query=True,
    ),
    _never,
    _never,
)
WORKFLOW: Final = Workflow(
    name="draft", stages=[AgentLoop(name="loop", actions=(SAVE,), verify=_never)]
)


def _at_the_write() -> tuple[RunState, InvokeTool]:
    budget = Budget(steps=4, model_calls=4, tool_calls=3)
    fresh = RunState(
        run_id="r1",
        tenant="t",
        workflow="draft",
        workflow_version="1",
        goal="g",
        principal=Principal("ann"),
        budget=budget,
        limits=CallLimits(),
        left=BudgetLeft.full(budget),
    )
    view = fresh.view(remaining_ms=60_000)
    asked = machine.start(WORKFLOW, fresh, view).state
    proposal = {"kind": "tool", "tool": "save", "arguments": {"id": 1}}
    running = replace(asked, status=R.RUNNING)
    turn = machine.on(WORKFLOW, running, Proposed(End.RETURNED, proposal), view)
    assert isinstance(turn.command, InvokeTool)
    return turn.state, turn.command


STATE, COMMAND = _at_the_write()
assert STATE.status is R.EXECUTING
NONE_OF_THIS_TOOL: Final = replace(
    STATE,
    budget=replace(STATE.budget, per_tool={"save": 1}),
    left=replace(STATE.left, per_tool={"save": 0}),
)


def effect(status: EffectStatus = E.PLANNED, **given: Any) -> Effect:
    """The effect of the run's write: planned, or dispatched by it once where a status says so."""
    fields: dict[str, Any] = {"token": 0}
    if status is not E.PLANNED:
        fields = {
            "attempts": 1,
            "token": 1,
            "doubt": Doubt.NONE if status in (E.DISPATCHED, E.APPLIED) else Doubt.UNPROVEN,
            "dispatcher": "c1",
            "owner_run_id": "r1",
            "first_dispatched_at": NOW - 10_000,
            "dispatch_deadline_at": NOW - 5_000,
        }
    if status in (E.UNKNOWN, E.HANDED_OFF):
        fields |= {"unknown_since": NOW - 4_000, "trigger": Trigger.TIMEOUT}
    return Effect(
        id="e1",
        tenant="t",
        intent_key=COMMAND.intent_key or "",
        tool="save",
        contract_version="1",
        arguments=COMMAND.arguments,
        arguments_hash=given.pop("arguments_hash", COMMAND.arguments_hash),
        terms=given.pop("terms", TERMS),
        status=status,
        **fields | given,
    )


def locked(state: RunState | None = None, **given: Any) -> Locked:
    """The run at its write, claimed by `c1`, unless the test says otherwise."""
    fields: dict[str, Any] = {
        "state": state or STATE,
        "now": NOW,
        "epoch": 3,
        "claim_id": "c1",
        "lease_until": NOW + 20_000,
        "due_at": None,
        "deadline_at": NOW + 60_000,
        "remaining_ms": None,
        "expires_at": NOW + 900_000,
        "attempts": 1,
        "cancel_requested": False,
        "effect": effect(),
    }
    return Locked(**fields | given)


def at_rest(status: RunStatus, **given: Any) -> Locked:
    """The run in a status in which nobody holds it."""
    options: dict[str, Any] = {"claim_id": "c1", "lease_until": None}
    return locked(replace(STATE, status=status), **options | given)


def dispatched(seen: Locked, command: InvokeTool = COMMAND, **given: Any) -> tuple[Any, Any]:
    """What a dispatch by claim `c1` comes to."""
    options: dict[str, Any] = {"claim_id": "c1", "call_ms": CALL_MS, "max_stall_ms": STALL_MS}
    return protocol.dispatch(seen, command, **options | given)


def told(seen: Locked, reply: Reply | None, **given: Any) -> Ruling:
    """What the sender's word comes to."""
    fields: dict[str, Any] = {"end": End.RETURNED if reply else End.RAISED, "evidence_id": "r:1"}
    out = Outcome("e1", **{"token": 1, "dispatcher": "c1", **fields, "reply": reply} | given)
    ruling = protocol.outcome(seen, WORKFLOW, out)
    assert ruling is not None
    return ruling


def kinds(ruling: Ruling) -> list[str]:
    """The types of a ruling's events."""
    return [event.type for event in ruling.events]


# ---- dispatch ------------------------------------------------------------------------------------


def test_a_dispatch_takes_the_effect_and_pays_before_the_call() -> None:
    ruling, go = dispatched(locked())

    assert isinstance(go, Go) and go.deadline_at == NOW + CALL_MS
    sent = ruling.effect
    assert (sent.status, sent.token, sent.dispatcher, sent.owner_run_id) == (
        E.DISPATCHED,
        1,
        "c1",
        "r1",
    )
    assert sent.dispatch_deadline_at == go.deadline_at and sent.first_dispatched_at == NOW
    assert sent.queries_left == QUERIES_PER_DISPATCH
    assert ruling.state.left.tool_calls_available == STATE.left.tool_calls_available - 1
    assert ruling.lease == "keep" and ruling.lease_ms > CALL_MS
    assert not ruling.joins  # it rests on it once it is proved


def test_a_call_gets_no_more_than_the_time_that_is_left() -> None:
    _, go = dispatched(locked(deadline_at=NOW + 700))

    assert isinstance(go, Go) and go.deadline_at == NOW + 700


@pytest.mark.parametrize(
    "given",
    [
        {"claim_id": "c2"},  # another claim
        {"lease_until": None},  # taken over
        {"lease_until": NOW},  # run out
        {"state": replace(STATE, status=R.RUNNING)},
        {"effect": effect(E.DISPATCHED)},
    ],
)
@pytest.mark.accept("FLT-09")
def test_who_does_not_hold_the_run_dispatches_nothing(given: dict[str, Any]) -> None:
    assert dispatched(locked(**given)) == (None, Halt("not-mine"))


def test_nothing_is_dispatched_after_a_cancel() -> None:
    cancelling = replace(STATE, status=R.CANCELLING)
    ruling, halt = dispatched(locked(cancelling, cancel_requested=True))

    assert halt == Halt("cancelled") and ruling.state.status is R.CANCELLED


OTHERS = {"owner_run_id": "r2", "dispatcher": "c9"}


@pytest.mark.parametrize(
    ("status", "given", "code", "becomes"),
    [
        (E.APPLIED, {"result": {"id": 1}, "evidence": "receipt:9"}, "recorded", R.RUNNING),
        (E.APPLIED, {"result": {"id": 1}, **OTHERS}, "recorded", R.RUNNING),
        (E.DISPATCHED, OTHERS, "elsewhere", R.RUNNING),
        (E.UNKNOWN, OTHERS, "elsewhere", R.RUNNING),
        (E.HANDED_OFF, OTHERS, "with-person", R.HANDED_OFF),
        (E.COMPENSATING, OTHERS, "with-person", R.HANDED_OFF),
        (E.CONTRADICTED, OTHERS, "with-person", R.HANDED_OFF),
        (E.COMPENSATED, OTHERS, "intent-conflict", R.FAILED),
    ],
)
@pytest.mark.accept("LED-03", "LED-14")
def test_an_intent_that_is_taken_is_not_sent(
    status: EffectStatus, given: dict[str, Any], code: str, becomes: RunStatus
) -> None:
    """It is charged nothing for that; what is in flight elsewhere is asked for again later."""
    ruling, halt = dispatched(locked(effect=effect(status, **given)))

    assert halt == Halt(code) and ruling.state.status is becomes
    assert ruling.state.left.tool_calls_available == STATE.left.tool_calls_available
    assert ruling.charges_tool is None and ruling.effect is None
    assert (ruling.due_in_ms > 0) is (code == "elsewhere")
    assert isinstance(ruling.state.told, Resolved) is (code == "recorded")


@pytest.mark.parametrize("owner", ["r1", "r2", None])
def test_planned_and_absent_belong_to_whoever_dispatches_first(owner: str | None) -> None:
    for status, doubt in ((E.PLANNED, Doubt.NONE), (E.ABSENT, Doubt.NONE)):
        found = effect(status, owner_run_id=owner, doubt=doubt)
        ruling, go = dispatched(locked(effect=found))

        assert isinstance(go, Go) and ruling.effect.owner_run_id == "r1"
        assert ruling.effect.token == found.token + 1


@pytest.mark.accept("LED-06")
@pytest.mark.parametrize("status", [E.PLANNED, E.ABSENT])
def test_a_write_whose_precondition_was_left_out_is_not_sent_once_it_is_certain_not_to_be_made(
    status: EffectStatus,
) -> None:
    ruling, halt = dispatched(locked(effect=effect(status)), unasked=True)

    assert halt == Halt("unasked")
    assert (ruling.state.status, ruling.due_in_ms, ruling.attempts) == (R.RUNNING, 0, 0)
    assert ruling.effect is None


def test_a_run_without_an_effect_sends_nothing() -> None:
    """The ledger was set back between its plan and its dispatch."""
    assert dispatched(locked(effect=None)) == (None, Halt("not-mine"))


def test_a_doubt_is_sent_again_without_its_precondition() -> None:
    _, go = dispatched(locked(effect=effect(E.UNKNOWN)), unasked=True)

    assert isinstance(go, Go)


@pytest.mark.parametrize("status", [E.PLANNED, E.ABSENT])
def test_a_compensable_write_is_not_sent_before_it_is_recorded_how_to_undo_it(
    status: EffectStatus,
) -> None:
    ruling, halt = dispatched(locked(effect=effect(status, doubt=Doubt.NONE)), compensable=True)

    assert halt == Halt("unrecorded")
    assert ruling.state.status is R.HANDED_OFF and ruling.handoff is not None
    assert ruling.effect is None


def test_an_intent_with_other_arguments_is_a_conflict() -> None:
    for status in (E.PLANNED, E.APPLIED, E.ABSENT):
        found = effect(status, arguments_hash="other", owner_run_id="r2")
        ruling, halt = dispatched(locked(effect=found))

        assert halt == Halt("intent-conflict")
        assert (ruling.state.status, ruling.state.reason) == (R.FAILED, Reason.INTENT_CONFLICT)


def test_a_command_of_an_older_state_is_not_sent() -> None:
    ruling, halt = dispatched(locked(), replace(COMMAND, state_version=7))

    assert halt == Halt("stale") and ruling.state.reason is Reason.INVALID_PROPOSAL


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"deadline_at": NOW}, Reason.DEADLINE_EXHAUSTED),
        (
            {"state": replace(STATE, left=replace(STATE.left, tool_calls=0))},
            Reason.TOOL_CALL_BUDGET_EXHAUSTED,
        ),
        (
            {"state": NONE_OF_THIS_TOOL},
            Reason.TOOL_CALL_BUDGET_EXHAUSTED,
        ),
    ],
)
def test_what_is_spent_ends_the_run_but_never_over_a_doubt(
    given: dict[str, Any], reason: Reason
) -> None:
    ends, _ = dispatched(locked(**given))
    waits, _ = dispatched(locked(**given, effect=effect(E.UNKNOWN)))

    assert (ends.state.status, ends.state.reason) == (R.BUDGET_EXHAUSTED, reason)
    assert (waits.state.status, waits.state.reason) == (R.RECONCILING, Reason.UNKNOWN_EFFECT)


@pytest.mark.accept("LED-13")
def test_what_may_not_be_sent_again_fails_if_absent_and_is_a_persons_if_unknown() -> None:
    dead = replace(TERMS, key_valid_for_ms=1)
    absent, _ = dispatched(locked(effect=effect(E.ABSENT, terms=dead, doubt=Doubt.BY_QUERY)))
    doubt, _ = dispatched(locked(effect=effect(E.UNKNOWN, terms=dead)))

    assert (absent.state.status, absent.state.reason) == (R.FAILED, Reason.TOOL_FAILED)
    assert doubt.state.status is R.HANDED_OFF and doubt.effect.status is E.HANDED_OFF


def test_sending_a_released_doubt_again_keeps_in_mind_that_it_is_one() -> None:
    ruling, go = dispatched(locked(effect=effect(E.UNKNOWN)))

    assert isinstance(go, Go)
    assert ruling.effect.doubt is Doubt.UNPROVEN and ruling.effect.token == 2
    assert ruling.effect.first_dispatched_at == NOW - 10_000  # its key's life began there


# ---- approval ------------------------------------------------------------------------------------

AGREED: Final = replace(COMMAND, approval=True)
CONTRACT: Final = "the hash of its contract"


def approval(**given: Any) -> Approval:
    """A request for consent to exactly this command, which was given unless the test says else."""
    terms: dict[str, Any] = {"contract_hash": CONTRACT}
    for name in ("contract_hash", "approvers", "requester_approves"):
        if name in given:
            terms[name] = given.pop(name)
    fields: dict[str, Any] = {
        "id": "a1",
        "run_id": "r1",
        "tenant": "t",
        "workflow": "draft",
        "status": ApprovalStatus.APPROVED,
        "step": 0,
        "tool": "save",
        "contract_version": "1",
        "intent_key": COMMAND.intent_key,
        "arguments": COMMAND.arguments,
        "arguments_hash": COMMAND.arguments_hash,
        "subject": "ann",
        "terms": ApprovalTerms(**terms),
        "state_version": COMMAND.state_version,
        "requested_at": NOW - 1_000,
        "expires_at": NOW + 1,
    }
    return Approval(**fields | given)


def asked(**given: Any) -> Approval:
    """The same request, while people are asked."""
    return approval(**{"status": ApprovalStatus.PENDING} | given)


def test_an_approval_is_consumed_with_the_dispatch() -> None:
    ruling, go = dispatched(locked(approval=approval()), AGREED, contract_hash=CONTRACT)

    assert isinstance(go, Go) and ruling.consumes_approval
    assert ruling.effect.approval_id == "a1"


@pytest.mark.parametrize(
    "given",
    [
        *({"status": status} for status in set(ApprovalStatus) - {ApprovalStatus.APPROVED}),
        {"tool": "pay"},
        {"contract_version": "2"},
        {"intent_key": "save:2"},
        {"arguments_hash": "other"},
        {"state_version": 1},
        {"expires_at": NOW},
        {"contract_hash": "that of another text under the same version"},
    ],
)
def test_an_approval_of_anything_else_is_none(given: dict[str, Any]) -> None:
    for found in (approval(**given), None):
        ruling, halt = dispatched(locked(approval=found), AGREED, contract_hash=CONTRACT)

        assert halt == Halt("approval") and not ruling.consumes_approval
        assert (ruling.state.status, ruling.state.reason) == (R.FAILED, Reason.APPROVAL_EXPIRED)


def test_a_consent_that_does_not_cover_a_doubt_hands_it_to_a_person() -> None:
    """No stop ends a run over a write that may have happened."""
    doubt = locked(effect=effect(E.UNKNOWN), approval=approval(tool="pay"))
    ruling, halt = dispatched(doubt, AGREED)

    assert halt == Halt("approval")
    assert (ruling.state.status, ruling.effect.status) == (R.HANDED_OFF, E.HANDED_OFF)


def test_a_consumed_approval_covers_the_same_key_again() -> None:
    again = effect(E.UNKNOWN, approval_id="a1")
    given = approval(id="a1", status=ApprovalStatus.CONSUMED)
    ruling, go = dispatched(locked(effect=again, approval=None, consumed=given), AGREED)

    assert isinstance(go, Go) and not ruling.consumes_approval


@pytest.mark.parametrize(
    ("earlier", "consumes"),
    [
        ({"state_version": AGREED.state_version - 1}, True),  # its run has planned anew
        ({}, False),  # the same action is sent again
        ({"run_id": "r2"}, True),  # another run's consent covers nothing of this one
        ({"contract_hash": "other"}, True),  # it was given to other words
    ],
)
def test_one_consent_covers_its_effect_until_its_run_plans_anew(
    earlier: dict[str, Any], consumes: bool
) -> None:
    again = effect(E.ABSENT, approval_id="a1")
    given = approval(id="a1", status=ApprovalStatus.CONSUMED, **earlier)
    seen = locked(effect=again, approval=approval(id="a2"), consumed=given)
    ruling, go = dispatched(seen, AGREED, contract_hash=CONTRACT)

    assert isinstance(go, Go) and ruling.consumes_approval is consumes
    assert ruling.effect.approval_id == ("a2" if consumes else "a1")


BOB: Final = Principal("bob", roles=frozenset({Role.APPROVER}))
EVE: Final = Principal("eve", roles=frozenset({Role.APPROVER}))


def parked(**given: Any) -> Locked:
    """The run, waiting for consent with 20 s of its time left; a token was issued for it."""
    park = Park(ParkKind.APPROVAL, action=AGREED)
    state = replace(STATE, status=R.AWAITING_APPROVAL, pending=park)
    options: dict[str, Any] = {
        "lease_until": None,
        "deadline_at": None,
        "remaining_ms": 20_000,
        "approval": asked(),
        "issued": IssuedToken("t1", "a1", None),
        "effect": None,
    }
    return locked(state, **options | given)


def token(of: Approval | None = None, **given: Any) -> Token:
    """What a token says that was issued for the request as it is."""
    fields = {"approval_id": "a1", "digest": (of or asked()).digest, "role": "approver"}
    return Token(**{**fields, "hash": "t1"} | given)


def approved(seen: Locked, who: Principal = BOB, **given: Any) -> Ruling:
    """What becomes of the run by a consent that counts."""
    ruling = protocol.approve(seen, who=who, token=token(seen.approval, **given))
    assert isinstance(ruling, Ruling)
    return ruling


def refusal(found: Ruling | ApprovalRefused) -> str:
    """Why a person's decision does not count."""
    assert isinstance(found, ApprovalRefused)
    assert found.code == "approval-refused" and found.detail
    return found.problem


def test_consent_sets_the_run_going_with_the_time_that_it_had_left() -> None:
    ruling = approved(parked())

    assert ruling.publish
    assert ruling.state.status is R.EXECUTING and ruling.deadline_in_ms == 20_000
    assert ruling.state.told == Approved("a1", ("bob",)) and ruling.approval_status == "approved"


def test_a_consent_is_written_with_its_token_and_with_who_gave_it() -> None:
    ruling = protocol.approve(parked(), who=BOB, token=token(), comment="as agreed by phone")

    assert isinstance(ruling, Ruling) and ruling.audit is not None
    assert ruling.consent == Consent("a1", "bob", "t1") and ruling.decided_by == "bob"
    entry = ruling.audit
    assert (entry.actor, entry.act, entry.target) == ("bob", Act.APPROVE, "approval:a1")
    assert (entry.roles, entry.tenant, entry.run_id) == (("approver",), "t", "r1")
    assert entry.reason == "as agreed by phone"
    assert entry.after == {"approval": "approved", "digest": asked().digest}


def test_the_time_of_a_run_that_goes_on_ends_with_its_hard_expiry() -> None:
    assert approved(parked(expires_at=NOW + 500)).deadline_in_ms == 500


def test_where_two_have_to_agree_the_first_consent_moves_nothing() -> None:
    both = asked(approvers=2)
    first = approved(parked(approval=both))

    assert first.state == parked().state and first.lease == "keep" and not first.publish
    assert first.consent == Consent("a1", "bob", "t1") and first.approval_status is None
    assert first.audit is not None and first.audit.after["approval"] == "pending"

    half = replace(both, consents=("bob",))
    second = approved(parked(approval=half), EVE)
    assert second.state.status is R.EXECUTING and second.publish
    assert (second.approval_status, second.decided_by) == ("approved", "bob, eve")


def test_nobody_agrees_twice_to_one_action() -> None:
    half = asked(approvers=2, consents=("bob",))
    assert refusal(protocol.approve(parked(approval=half), who=BOB, token=token(half))) == (
        "agreed-already"
    )


@pytest.mark.parametrize(
    ("seen", "says", "who", "problem"),
    [
        ({"issued": None}, {}, BOB, "unknown-token"),  # forged, or of another ledger
        (
            {"issued": IssuedToken("t1", "a2", None)},
            {},
            BOB,
            "unknown-token",
        ),  # for another request
        ({"issued": IssuedToken("t1", "a1", None, used_at=NOW - 1)}, {}, BOB, "token-used"),
        ({"issued": IssuedToken("t1", "a1", "eve")}, {}, BOB, "wrong-person"),
        ({}, {"digest": "what it was before"}, BOB, "changed"),
        ({}, {"role": "admin"}, BOB, "wrong-role"),
        ({}, {}, Principal("bob"), "wrong-role"),
        ({}, {}, replace(BOB, roles=frozenset({Role.OPERATOR, Role.ADMIN})), "wrong-role"),
        ({}, {}, replace(BOB, tenants=frozenset({"u"})), "wrong-tenant"),
        ({}, {}, replace(BOB, subject="ann"), "own-request"),
    ],
)
def test_a_consent_that_does_not_count_says_why_and_changes_nothing(
    seen: dict[str, Any], says: dict[str, Any], who: Principal, problem: str
) -> None:
    assert refusal(protocol.approve(parked(**seen), who=who, token=token(**says))) == problem


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": {"id": 2}},
        {"arguments_hash": "other"},
        {"intent_key": "save:2"},
        {"tool": "pay"},
        {"contract_version": "2"},
        {"contract_hash": "other"},
        {"approvers": 2},
        {"subject": "eve"},
        {"tenant": "u"},
        {"run_id": "r2"},
        {"workflow": "other"},
        {"step": 1},
        {"state_version": COMMAND.state_version + 1},
        {"expires_at": NOW + 2},
    ],
)
def test_a_token_stands_for_all_that_was_shown_and_for_nothing_else(change: dict[str, Any]) -> None:
    """Whatever of the request is not what it was when the token was issued."""
    moved = parked(approval=asked(**change))

    assert refusal(protocol.approve(moved, who=BOB, token=token())) == "changed"


def test_a_token_may_be_for_one_person_only() -> None:
    assert approved(parked(issued=IssuedToken("t1", "a1", "bob"))).decided_by == "bob"


def test_who_asks_for_an_action_agrees_to_it_where_its_contract_lets_it() -> None:
    own = asked(requester_approves=True)

    assert approved(parked(approval=own), replace(BOB, subject="ann")).decided_by == "ann"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"now": NOW + 1}, Reason.APPROVAL_EXPIRED),
        ({"expires_at": NOW}, Reason.EXPIRED),
    ],
)
def test_consent_that_comes_too_late_ends_the_run(given: dict[str, Any], reason: Reason) -> None:
    late = approved(parked(**given))
    swept = protocol.wake(parked(**given), max_attempts=5, max_stall_ms=STALL_MS)
    no = protocol.reject(parked(**given), approval_id="a1", who=BOB, reason="too much")

    assert late == swept == no and late.audit is None
    assert late.state.reason is reason and late.approval_status == "expired"


def test_a_late_consent_that_would_not_count_anyhow_ends_the_run_too() -> None:
    """That the time is over does not hang on who says something."""
    late = protocol.approve(parked(now=NOW + 1, issued=None), who=BOB, token=token())

    assert isinstance(late, Ruling) and late.state.reason is Reason.APPROVAL_EXPIRED


def test_consent_is_given_once_and_only_where_it_was_asked_for() -> None:
    for seen in (
        locked(),
        parked(approval=None),
        parked(approval=asked(id="a2")),
        *(parked(approval=approval(status=s)) for s in set(ApprovalStatus) - {"pending"}),
    ):
        consent = protocol.approve(seen, who=BOB, token=token())
        no = protocol.reject(seen, approval_id="a1", who=BOB, reason="too much")
        assert refusal(consent) == refusal(no) == "not-pending"
    assert protocol.answer(parked(), text="x", who=BOB) is None


def test_consent_to_a_write_that_a_person_has_taken_up_moves_no_run() -> None:
    """The person who resolves the matter sends it: by this consent, and not by itself."""
    seen = at_rest(
        R.HANDED_OFF,
        effect=effect(E.HANDED_OFF),
        approval=asked(),
        issued=IssuedToken("t1", "a1", None),
    )
    ruling = approved(seen)

    assert ruling.state == seen.state and ruling.lease == "keep" and not ruling.publish
    assert ruling.approval_status == "approved" and ruling.effect is None
    no = protocol.reject(seen, approval_id="a1", who=BOB, reason="too much")
    assert isinstance(no, Ruling) and no.state == seen.state and no.approval_status == "rejected"


def test_a_refusal_ends_the_run() -> None:
    ruling = protocol.reject(parked(), approval_id="a1", who=BOB, reason="too much")

    assert isinstance(ruling, Ruling) and ruling.approval_status == "rejected"
    assert (ruling.state.status, ruling.state.reason) == (R.FAILED, Reason.APPROVAL_REJECTED)
    assert ruling.decided_by == "bob" and ruling.audit is not None
    assert (ruling.audit.act, ruling.audit.reason) == (Act.REJECT, "too much")
    assert ruling.audit.after == {"run": "failed", "approval": "rejected"}


def asking(**given: Any) -> Locked:
    """The run, waiting for an answer."""
    state = replace(STATE, status=R.AWAITING_INPUT, pending=AskModel("default", ()))
    options: dict[str, Any] = {"deadline_at": None, "remaining_ms": 20_000, "effect": None}
    return locked(state, lease_until=None, **options | given)


def test_an_answer_opens_the_next_episode() -> None:
    ruling = protocol.answer(asking(), text="42", who=Principal("ann"))

    assert ruling is not None and ruling.state.told == Answered("42", "ann")
    assert kinds(ruling)[-1] == RUN_RESUMED and ruling.state.reason is None
    assert ruling.deadline_in_ms == 20_000 and ruling.audit is not None
    assert (ruling.audit.actor, ruling.audit.act, ruling.audit.reason) == ("ann", Act.ANSWER, "42")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"expires_at": NOW}, Reason.EXPIRED),
        ({"input_expires_at": NOW}, Reason.INPUT_EXPIRED),
    ],
)
def test_an_answer_that_comes_too_late_ends_the_run(given: dict[str, Any], reason: Reason) -> None:
    ruling = protocol.answer(asking(**given), text="42", who=Principal("ann"))

    assert ruling is not None and ruling.state.reason is reason and ruling.audit is None
    assert ruling == protocol.wake(asking(**given), max_attempts=5, max_stall_ms=STALL_MS)
    assert kinds(ruling)[-2:] == [RUN_RESUMED, RUN_STOPPED]  # its question had been a stop


# ---- outcomes ------------------------------------------------------------------------------------

RECEIPT: Final = Succeeded({"id": 1}, '{"id":1}')


def in_flight(**given: Any) -> Locked:
    """The run while its write is under way."""
    options: dict[str, Any] = {"effect": effect(E.DISPATCHED)}
    return locked(**options | given)


@pytest.mark.parametrize(
    ("reply", "given", "becomes", "status"),
    [
        (RECEIPT, {}, E.APPLIED, R.RUNNING),
        (Refused("no"), {}, E.ABSENT, R.FAILED),
        (Refused("busy", retryable=True), {}, E.ABSENT, R.RUNNING),
        (Doubtful("?"), {}, E.UNKNOWN, R.RECONCILING),
        (None, {"end": End.TIMED_OUT}, E.UNKNOWN, R.RECONCILING),
        (None, {"end": End.CANCELLED}, E.UNKNOWN, R.RECONCILING),
        (None, {"end": End.RETURNED, "sent": False}, E.ABSENT, R.RUNNING),
    ],
)
def test_a_senders_word_moves_the_run_and_its_effect_together(
    reply: Reply | None, given: dict[str, Any], becomes: EffectStatus, status: RunStatus
) -> None:
    """The lease may have run out: the effect's token decides."""
    for lease_until in (NOW + 1, NOW - 1):
        ruling = told(in_flight(lease_until=lease_until), reply, **given)

        assert ruling.effect is not None and ruling.effect.status is becomes
        assert ruling.state.status is status and ruling.lease == "release"
        assert ruling.evidence is not None and ruling.joins is (becomes is E.APPLIED)


@pytest.mark.accept("LED-11")
@pytest.mark.parametrize(
    ("reply", "given"), [(Refused("already refunded"), {}), (None, {"sent": False})]
)
def test_a_second_attempt_without_effect_proves_nothing_about_the_first(
    reply: Reply | None, given: dict[str, Any]
) -> None:
    unproven = effect(E.DISPATCHED, doubt=Doubt.UNPROVEN, attempts=2)
    options: dict[str, Any] = {"end": End.RETURNED, **given}
    ruling = told(in_flight(effect=unproven), reply, **options)

    assert ruling.effect is not None and ruling.effect.status is E.UNKNOWN
    assert ruling.state.status is R.RECONCILING


@pytest.mark.parametrize("reply", [Refused("duplicate"), Refused("busy", retryable=True), None])
@pytest.mark.parametrize("cancelled", [False, True])
def test_no_senders_word_outweighs_a_record_that_its_provider_has_sent(
    reply: Reply | None, cancelled: bool
) -> None:
    state = replace(STATE, status=R.CANCELLING) if cancelled else STATE
    kept = protocol.KeptReport({"id": 1}, "report:1")
    seen = in_flight(state=state, cancel_requested=cancelled, kept=kept)
    ruling = told(seen, reply, end=End.RETURNED, sent=reply is not None)

    assert ruling.effect is not None and ruling.effect.status is E.UNKNOWN
    assert ruling.state.status is R.RECONCILING


def test_a_receipt_outlives_a_fault_in_the_workflows_own_code() -> None:
    def broken(arguments: Any, value: Any) -> Mapping[str, Any]:
        raise ZeroDivisionError

    contract = replace(SAVE.contract, public=broken)
    loop = AgentLoop(name="loop", actions=(Tool(contract, _never, _never),), verify=_never)
    faulty = Workflow(name="draft", stages=[loop])
    out = Outcome("e1", 1, End.RETURNED, RECEIPT, evidence_id="r:1", dispatcher="c1")
    ruling = protocol.outcome(in_flight(), faulty, out)

    assert ruling is not None and ruling.effect is not None
    assert (ruling.effect.status, ruling.effect.result) == (E.APPLIED, {"id": 1})
    assert ruling.state.status not in TERMINAL


@pytest.mark.parametrize("reply", [Refused("no"), None])
def test_a_write_that_did_not_happen_ends_a_cancelled_run(reply: Reply | None) -> None:
    cancelling = replace(STATE, status=R.CANCELLING)
    sent = {"sent": False, "end": End.RETURNED} if reply is None else {}
    ruling = told(in_flight(state=cancelling, cancel_requested=True), reply, **sent)

    assert ruling.effect is not None and ruling.effect.status is E.ABSENT
    assert ruling.state.status is R.CANCELLED


@pytest.mark.accept("LED-15")
def test_a_write_that_happened_although_cancelled_stays_where_others_rest_on_it() -> None:
    cancelling = replace(STATE, status=R.CANCELLING)
    alone = told(in_flight(state=cancelling, cancel_requested=True), RECEIPT)
    shared = told(in_flight(state=cancelling, cancel_requested=True, other_holders=1), RECEIPT)

    assert alone.state.status is R.HANDED_OFF and alone.handoff is not None
    assert shared.state.status is R.CANCELLED
    for ruling in (alone, shared):
        assert ruling.effect is not None and ruling.effect.status is E.APPLIED
        assert kinds(ruling).count(RUN_STOPPED) == 1


def test_a_late_receipt_proves_a_reconciling_runs_effect() -> None:
    seen = at_rest(R.RECONCILING, effect=effect(E.UNKNOWN, token=2))
    ruling = told(seen, RECEIPT)

    assert ruling.effect is not None and ruling.effect.status is E.APPLIED
    assert ruling.state.status is R.RUNNING and ruling.lease == "take"


@pytest.mark.parametrize("status", [E.UNKNOWN, E.APPLIED, E.HANDED_OFF, E.DISPATCHED])
@pytest.mark.parametrize("reply", [Refused("no"), None])
def test_a_late_word_is_never_a_negative_verdict(status: EffectStatus, reply: Reply | None) -> None:
    seen = at_rest(R.RECONCILING, effect=effect(status, token=2))
    ruling = told(seen, reply)

    assert ruling.effect is None and ruling.state == seen.state
    assert ruling.evidence is not None and ruling.lease == "keep"


BELIEVED: Final = effect(E.ABSENT, doubt=Doubt.BY_QUERY, token=2)


@pytest.mark.parametrize("reply", [RECEIPT, Doubtful("?"), None])
def test_a_request_that_left_against_belief_puts_the_effect_in_doubt_again(
    reply: Reply | None,
) -> None:
    """From now on counts how long it may take to land, and queries are paid anew."""
    seen = at_rest(R.RUNNING, effect=replace(BELIEVED, queries_left=0))
    ruling = told(seen, reply)

    assert ruling.state.status is R.RECONCILING and ruling.lease == "take"
    assert ruling.effect is not None
    assert (ruling.effect.status, ruling.effect.trigger) == (E.UNKNOWN, Trigger.CONTRARY_EVIDENCE)
    assert ruling.effect.queries_left == QUERIES_PER_DISPATCH and ruling.effect.absences == 0
    assert ruling.effect.settles_at(STALL_MS) == NOW + STALL_MS + 5_000
    assert kinds(ruling).count(RUN_STOPPED) == 1


@pytest.mark.parametrize(
    "seen",
    [
        at_rest(R.FAILED, effect=BELIEVED),
        at_rest(R.CANCELLED, effect=BELIEVED),
        at_rest(R.RUNNING, effect=BELIEVED, current=False),  # at another write by now
        locked(replace(STATE, pending=AskModel("default", ()), status=R.RUNNING), effect=BELIEVED),
    ],
)
def test_a_run_that_went_on_without_it_keeps_its_status_and_a_person_looks(seen: Locked) -> None:
    if seen.state.status in TERMINAL:
        seen = replace(seen, state=replace(seen.state, pending=None))
    ruling = told(seen, RECEIPT)

    assert ruling.effect is not None and ruling.effect.status is E.CONTRADICTED
    assert ruling.state.status is seen.state.status and not ruling.events
    assert ruling.handoff is not None and ruling.handoff["reason"] == "contradiction"


def test_an_effect_that_another_run_sent_again_is_that_runs_to_judge() -> None:
    seen = at_rest(R.FAILED, effect=effect(E.DISPATCHED, token=2, **OTHERS))

    assert protocol.outcome(seen, WORKFLOW, Outcome("e1", 1, End.RETURNED, RECEIPT)) is None


# ---- cancelling ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "becomes"),
    [
        (at_rest(R.QUEUED, effect=None), R.CANCELLED),
        (at_rest(R.RUNNING), R.CANCELLED),
        (at_rest(R.EXECUTING), R.CANCELLED),
        (locked(), R.CANCELLING),  # a lease is live: a model call may be under way
        (locked(lease_until=NOW - 1), R.CANCELLED),  # its holder is gone, nothing was sent
        (in_flight(), R.CANCELLING),
        (in_flight(lease_until=NOW - 1), R.CANCELLING),
        (parked(), R.CANCELLED),
        (asking(), R.CANCELLED),
        (locked(effect=effect(E.UNKNOWN)), R.RECONCILING),  # released, not yet sent again
        (at_rest(R.RECONCILING, effect=effect(E.UNKNOWN)), R.RECONCILING),
        (at_rest(R.HANDED_OFF, effect=effect(E.HANDED_OFF)), R.HANDED_OFF),
        (locked(effect=effect(E.DISPATCHED, **OTHERS)), R.CANCELLING),
        (at_rest(R.RUNNING, effect=effect(E.UNKNOWN, **OTHERS)), R.CANCELLED),  # not its own
    ],
)
def test_a_cancel_ends_what_is_not_in_flight_and_nothing_else(
    seen: Locked, becomes: RunStatus
) -> None:
    ruling = protocol.cancel(seen)

    assert ruling is not None and ruling.wish and ruling.state.status is becomes
    assert (ruling.lease == "take") is (
        becomes is R.RECONCILING and seen.state.status is not R.RECONCILING
    )  # only an own doubt fences the holder off
    assert protocol.cancel(replace(seen, cancel_requested=True)) is None


@pytest.mark.parametrize("status", sorted(TERMINAL))
def test_what_has_ended_is_not_cancelled(status: RunStatus) -> None:
    assert protocol.cancel(at_rest(status)) is None


# ---- the sweep -----------------------------------------------------------------------------------


def woken(seen: Locked, **given: Any) -> Ruling:
    """What the sweep decides."""
    options: dict[str, Any] = {"max_attempts": 3, "max_stall_ms": STALL_MS}
    ruling = protocol.wake(seen, **options | given)
    assert ruling is not None
    return ruling


def test_what_is_over_or_held_or_only_has_to_go_on_is_left_alone() -> None:
    for seen in (locked(), at_rest(R.COMPLETED), at_rest(R.RUNNING)):
        assert protocol.wake(seen, max_attempts=1, max_stall_ms=None) is None


@pytest.mark.parametrize("given", [{}, {"expires_at": NOW}, {"attempts": 9}, {"remaining_ms": 0}])
def test_a_handoff_that_waits_too_long_is_escalated_and_left_to_people(
    given: dict[str, Any],
) -> None:
    """Whatever its time or its attempts: the sweep says so, and decides nothing."""
    seen = at_rest(R.HANDED_OFF, **given)
    ruling = protocol.wake(seen, max_attempts=1, max_stall_ms=None)

    assert ruling == Ruling(state=seen.state, lease="keep", escalates=True)


@pytest.mark.parametrize("status", [E.DISPATCHED, E.UNKNOWN])
@pytest.mark.parametrize("cancelled", [False, True])
def test_a_worker_lost_over_a_write_leaves_a_doubt(status: EffectStatus, cancelled: bool) -> None:
    state = replace(STATE, status=R.CANCELLING if cancelled else R.EXECUTING)
    seen = locked(state, lease_until=NOW, effect=effect(status), cancel_requested=cancelled)
    ruling = woken(seen)

    assert ruling.state.status is R.RECONCILING and ruling.lease == "take"
    assert ruling.effect is not None
    assert (ruling.effect.status, ruling.effect.doubt) == (E.UNKNOWN, Doubt.UNPROVEN)
    wanted = Trigger.CANCELLATION if cancelled else Trigger.WORKER_LOST
    assert ruling.effect.trigger is wanted
    since = NOW if status is E.DISPATCHED else NOW - 4_000  # a doubt does not grow younger
    assert ruling.effect.unknown_since == since


def test_a_worker_lost_over_nothing_costs_an_attempt_and_fences_it_off() -> None:
    state = replace(STATE, left=replace(STATE.left, tool_calls=1, tool_calls_reserved=1))
    ruling = woken(locked(state, lease_until=NOW))

    assert ruling.state.status is R.EXECUTING and ruling.lease == "take" and ruling.publish
    assert ruling.attempts is None  # counted by the next claim
    assert ruling.state.left.tool_calls_available == 1  # what was reserved may have been used


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.accept("FLT-04")
def test_whoever_ends_the_run_of_a_lost_worker_leaves_its_reserved_call_charged(
    cancelled: bool,
) -> None:
    """It may have been made: only the holder of the claim can say that it was not."""
    left = replace(STATE.left, tool_calls=1, tool_calls_reserved=1)
    state = replace(STATE, status=R.RUNNING, left=left)
    gone = locked(state, lease_until=NOW, effect=None)
    ruling = protocol.cancel(gone) if cancelled else woken(replace(gone, attempts=3))

    assert ruling is not None and ruling.state.left.tool_calls_available == 1


@pytest.mark.accept("FLT-17")
def test_after_some_lost_workers_a_person_is_asked() -> None:
    ruling = woken(locked(lease_until=NOW, attempts=3))

    assert (ruling.state.status, ruling.state.reason) == (R.HANDED_OFF, Reason.WORKER_LOST)
    assert ruling.handoff is not None


@pytest.mark.parametrize(
    ("seen", "status", "reason"),
    [
        (at_rest(R.QUEUED, deadline_at=NOW), R.BUDGET_EXHAUSTED, Reason.DEADLINE_EXHAUSTED),
        (at_rest(R.RUNNING, deadline_at=NOW), R.BUDGET_EXHAUSTED, Reason.DEADLINE_EXHAUSTED),
        (at_rest(R.EXECUTING, expires_at=NOW), R.BUDGET_EXHAUSTED, Reason.EXPIRED),
        (locked(lease_until=NOW, deadline_at=NOW), R.BUDGET_EXHAUSTED, Reason.DEADLINE_EXHAUSTED),
        (locked(lease_until=NOW, expires_at=NOW), R.BUDGET_EXHAUSTED, Reason.EXPIRED),
        (at_rest(R.RUNNING, cancel_requested=True), R.CANCELLED, Reason.CANCELLED),
        (at_rest(R.CANCELLING, cancel_requested=True), R.CANCELLED, Reason.CANCELLED),
        (asking(expires_at=NOW), R.BUDGET_EXHAUSTED, Reason.EXPIRED),
        # a doubt outlives them all
        (
            at_rest(R.RUNNING, deadline_at=NOW, effect=effect(E.UNKNOWN)),
            R.RECONCILING,
            Reason.UNKNOWN_EFFECT,
        ),
        (
            at_rest(R.RUNNING, expires_at=NOW, effect=effect(E.UNKNOWN)),
            R.RECONCILING,
            Reason.UNKNOWN_EFFECT,
        ),
        (
            at_rest(R.CANCELLING, cancel_requested=True, effect=effect(E.DISPATCHED)),
            R.RECONCILING,
            Reason.UNKNOWN_EFFECT,
        ),
    ],
)
@pytest.mark.accept("LED-16")
def test_what_is_overdue_ends_and_a_doubt_is_never_ended_by_it(
    seen: Locked, status: RunStatus, reason: Reason
) -> None:
    ruling = woken(seen)

    assert (ruling.state.status, ruling.state.reason) == (status, reason)


def in_doubt(**given: Any) -> Locked:
    """A reconciling run with a query left."""
    options: dict[str, Any] = {"effect": effect(E.UNKNOWN)}
    return at_rest(R.RECONCILING, **options | given)


def test_a_query_is_paid_for_before_it_is_asked_and_nobody_else_asks_meanwhile() -> None:
    first = woken(in_doubt())
    assert first.effect is not None and first.effect.queries_left == QUERIES_PER_DISPATCH - 1
    again = woken(in_doubt(effect=first.effect))

    assert again.effect is None and again.wake_in_ms == first.wake_in_ms


@pytest.mark.parametrize("call_ms", [1_000, 120_000])
def test_a_query_is_waited_for_as_long_as_it_may_take_and_a_little_longer(call_ms: int) -> None:
    terms = replace(TERMS, call_ms=call_ms)
    ruling = woken(in_doubt(effect=effect(E.UNKNOWN, terms=terms, queries_left=1)))

    assert ruling.wake_in_ms == call_ms + protocol.QUERY_MARGIN_MS
    assert ruling.effect is not None
    assert ruling.effect.next_query_at == NOW + ruling.wake_in_ms


def test_a_query_that_nobody_here_can_ask_is_given_back_once() -> None:
    asked = woken(in_doubt()).effect
    assert asked is not None
    back = protocol.query_returned(in_doubt(effect=asked), token=1)
    twice = protocol.query_returned(in_doubt(), token=1)

    assert back is not None and back.effect is not None
    assert back.effect.queries_left == QUERIES_PER_DISPATCH
    assert twice is not None and twice.effect is not None
    assert twice.effect.queries_left == QUERIES_PER_DISPATCH
    assert protocol.query_returned(in_doubt(), token=2) is None


NO_QUERY: Final = replace(TERMS, can_query=False)


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({}, R.RUNNING),  # the same key may be sent again
        ({"cancel_requested": True}, R.HANDED_OFF),
        ({"deadline_at": NOW}, R.HANDED_OFF),
        (
            {"state": replace(STATE, left=replace(STATE.left, tool_calls=0))},
            R.HANDED_OFF,
        ),
        (
            {"state": NONE_OF_THIS_TOOL},
            R.HANDED_OFF,
        ),
        (
            {"effect": effect(E.UNKNOWN, terms=replace(NO_QUERY, key_valid_for_ms=0))},
            R.HANDED_OFF,
        ),
    ],
)
def test_without_a_query_the_same_key_is_sent_again_or_a_person_decides(
    given: dict[str, Any], becomes: RunStatus
) -> None:
    state = replace(given.pop("state", STATE), status=R.RECONCILING)
    options: dict[str, Any] = {"effect": effect(E.UNKNOWN, terms=NO_QUERY), "lease_until": None}
    ruling = woken(locked(state, **options | given))

    assert ruling.state.status is becomes
    if becomes is R.HANDED_OFF:
        assert ruling.effect is not None and ruling.effect.status is E.HANDED_OFF
        assert kinds(ruling)[-2:] == [RUN_RESUMED, RUN_STOPPED]  # one stop an episode
    else:
        assert ruling.effect is None and ruling.publish  # a doubt still, until it is sent


def concluded(seen: Locked, conclusion: Any) -> Ruling:
    """What a conclusion about the doubt comes to."""
    return protocol.concluded(seen, conclusion, max_stall_ms=STALL_MS)


@pytest.mark.parametrize(
    ("given", "status", "reason"),
    [
        ({}, R.RUNNING, None),  # the checkpoint is kept: the same intent is sent again
        ({"cancel_requested": True}, R.CANCELLED, Reason.CANCELLED),
        ({"deadline_at": NOW}, R.FAILED, Reason.TOOL_FAILED),
        (
            {"effect": effect(E.UNKNOWN, terms=replace(TERMS, key_valid_for_ms=1))},
            R.FAILED,
            Reason.TOOL_FAILED,
        ),
    ],
)
def test_proved_absence_lets_the_same_intent_be_sent_or_ends_the_run(
    given: dict[str, Any], status: RunStatus, reason: Reason | None
) -> None:
    ruling = concluded(in_doubt(**given), ProvedAbsent())

    assert (ruling.state.status, ruling.state.reason) == (status, reason)
    assert ruling.effect is not None
    assert (ruling.effect.status, ruling.effect.doubt) == (E.ABSENT, Doubt.BY_QUERY)
    assert isinstance(ruling.state.pending, InvokeTool) is (status is R.RUNNING)
    assert kinds(ruling).count(RUN_RESUMED) == 1


def test_proved_application_goes_on_with_the_record() -> None:
    ruling = concluded(in_doubt(), ProvedApplied({"id": 1}, "query:e1:1"))

    assert ruling.state.status is R.RUNNING and ruling.lease == "take"
    assert isinstance(ruling.state.told, Resolved) and ruling.state.told.value == {"id": 1}
    assert ruling.effect is not None and ruling.effect.evidence == "query:e1:1"


def test_a_doubt_that_stays_is_asked_about_later_or_handed_over() -> None:
    later = concluded(in_doubt(), AskAgain(NOW + 7_000, 1, 4))
    given_up = concluded(in_doubt(), GiveUp("no key"))
    sent = concluded(in_doubt(), SendAgain())

    assert later.wake_in_ms == 7_000 and later.lease == "keep"
    assert given_up.state.status is R.HANDED_OFF and given_up.handoff is not None
    assert "no key" in canonical(given_up.handoff)
    assert sent.state.status is R.RUNNING


def test_an_answer_is_kept_beside_what_was_concluded_from_it() -> None:
    ruling = protocol.with_evidence(concluded(in_doubt(), GiveUp("x")), Absent(), NOW)

    assert ruling.evidence == ("query", {"answer": "absent", "sent_at": NOW})


# ---- giving back ---------------------------------------------------------------------------------


def test_a_lease_given_back_is_no_attempt_and_no_charge() -> None:
    ruling = protocol.give_back(locked(attempts=2), "lock-taken", due_in_ms=1_000)

    assert ruling.state.status is R.RUNNING and ruling.attempts == 1
    assert ruling.state.left == STATE.left and not ruling.publish


def test_a_lease_given_back_under_a_wish_ends_the_run() -> None:
    seen = locked(replace(STATE, status=R.CANCELLING), cancel_requested=True)

    assert protocol.give_back(seen, "lock-taken", due_in_ms=1).state.status is R.CANCELLED


# ---- every decision ------------------------------------------------------------------------------

PENDING: Final[Mapping[RunStatus, Command | None]] = MappingProxyType(
    dict.fromkeys(TERMINAL)
    | {
        R.AWAITING_APPROVAL: Park(ParkKind.APPROVAL, action=AGREED),
        R.AWAITING_INPUT: AskModel("default", ()),
    }
)


def _decisions(seen: Locked, fence: int) -> dict[str, Callable[[], Ruling | None]]:
    consent = token(seen.approval)

    def counted(found: Ruling | ApprovalRefused) -> Ruling | None:
        return found if isinstance(found, Ruling) else None

    def said(reply: Reply | None, sent: bool = True) -> Ruling | None:
        end = End.RETURNED if reply or not sent else End.TIMED_OUT
        out = Outcome("e1", fence, end, reply, sent=sent, evidence_id="r:1", dispatcher="c1")
        return protocol.outcome(seen, WORKFLOW, out)

    decisions: dict[str, Callable[[], Ruling | None]] = {
        "dispatch": lambda: dispatched(seen)[0],
        "receipt": lambda: said(RECEIPT),
        "refusal": lambda: said(Refused("no")),
        "busy": lambda: said(Refused("busy", retryable=True)),
        "silence": lambda: said(None),
        "never sent": lambda: said(None, sent=False),
        "cancel": lambda: protocol.cancel(seen),
        "sweep": lambda: protocol.wake(seen, max_attempts=2, max_stall_ms=STALL_MS),
        "approve": lambda: counted(protocol.approve(seen, who=BOB, token=consent)),
        "reject": lambda: counted(
            protocol.reject(seen, approval_id="a1", who=BOB, reason="too much")
        ),
        "answer": lambda: protocol.answer(seen, text="x", who=BOB),
    }
    if seen.state.status is R.RECONCILING and seen.own_effect is E.UNKNOWN:
        for name, conclusion in (
            ("applied", ProvedApplied({"id": 1}, "q")),
            ("absent", ProvedAbsent()),
            ("again", SendAgain()),
            ("given up", GiveUp("x")),
        ):
            decisions[name] = lambda found=conclusion: concluded(seen, found)  # type: ignore[misc]
    return decisions


#: A run cannot have ended, nor rest with a person for another reason, over an effect in doubt.
_DOUBTLESS: Final = TERMINAL | {R.QUEUED, R.AWAITING_APPROVAL, R.AWAITING_INPUT}


@settings(max_examples=600)
@given(
    status=st.sampled_from(sorted(set(R) - {R.AWAITING_BRANCHES})),
    found=st.none() | st.sampled_from(sorted(E)),
    others=st.booleans(),
    doubt=st.sampled_from(sorted(Doubt)),
    key=st.sampled_from([0, 1, FOREVER]),
    query=st.booleans(),
    cancelled=st.booleans(),
    lease=st.sampled_from([None, -1, 10_000]),
    left_ms=st.sampled_from([0, 60_000]),
    expires_ms=st.sampled_from([0, 900_000]),
    calls=st.sampled_from([0, 1]),
    attempts=st.sampled_from([1, 2]),
    holders=st.sampled_from([0, 1]),
    current=st.booleans(),
)
@pytest.mark.accept("LED-16")
def test_no_decision_ends_a_run_over_a_doubt_or_breaks_a_table(
    status: RunStatus,
    found: EffectStatus | None,
    others: bool,
    doubt: Doubt,
    key: int,
    query: bool,
    cancelled: bool,
    lease: int | None,
    left_ms: int,
    expires_ms: int,
    calls: int,
    attempts: int,
    holders: int,
    current: bool,
) -> None:
    """Whatever is locked: status moves by its table, an effect by its own, and cancel wins."""
    if status not in (R.RUNNING, R.EXECUTING, R.CANCELLING):
        lease = None
    current = current or found is None or found in UNRESOLVED  # which keep a run where it is
    doubtful = found in UNRESOLVED and not others
    if (status in _DOUBTLESS and doubtful) or (status is R.CANCELLING) > cancelled:
        return
    if cancelled and status in CLAIMABLE | {R.AWAITING_APPROVAL, R.AWAITING_INPUT}:
        return  # a wish has moved it on
    if found is E.DISPATCHED and doubtful and status not in (R.EXECUTING, R.CANCELLING):
        return  # nobody moves such a run but its sender and the sweep
    if status in (R.EXECUTING, R.RUNNING) and found is E.UNKNOWN and not others and not key:
        return  # only what may be sent again is released
    state = replace(
        STATE,
        status=status,
        pending=PENDING.get(status, COMMAND),
        left=replace(STATE.left, tool_calls=calls),
    )
    terms = replace(TERMS, key_valid_for_ms=key, can_query=query)
    held = None
    if found is not None:
        owner = OTHERS if others else {}
        if found is E.PLANNED:
            held = effect(found, terms=terms)
        else:
            doubt = Doubt.UNPROVEN if found is E.UNKNOWN else doubt
            held = effect(found, terms=terms, **{"doubt": doubt, **owner})
    parked_now = status in (R.AWAITING_APPROVAL, R.AWAITING_INPUT)
    seen = locked(
        state,
        effect=held,
        cancel_requested=cancelled,
        lease_until=None if lease is None else NOW + lease,
        deadline_at=None if parked_now else NOW + left_ms,
        remaining_ms=left_ms if parked_now else None,
        expires_at=NOW + expires_ms,
        attempts=attempts,
        other_holders=holders,
        current=current,
        approval=asked() if status in (R.AWAITING_APPROVAL, R.HANDED_OFF) else None,
        issued=IssuedToken("t1", "a1", None),
    )
    for name, decide in _decisions(seen, 1).items():
        if held is None and name in _WANT_AN_EFFECT:
            continue
        if not current and name not in _WORDS:  # only senders ask for an effect by its id
            continue
        ruling = decide()
        if ruling is None:
            continue
        after = ruling.effect or held
        assert held is None or after is not None
        if after is not None and held is not None:
            assert after.status in {held.status, *EFFECT_MOVES[held.status]}, name
            own = after.owner_run_id in (None, "r1") and current
            if ruling.state.status in TERMINAL and status not in TERMINAL:
                assert not (own and after.status in UNRESOLVED), name
            if cancelled:
                assert after.status is not E.DISPATCHED or held.status is E.DISPATCHED, name
        if status in TERMINAL:
            assert ruling.state == seen.state, name
        rests = ruling.state.status in TERMINAL | {R.RECONCILING, R.HANDED_OFF}
        if ruling.state.status is not status and rests:
            assert kinds(ruling).count(RUN_STOPPED) == 1, name
            announced = status in (R.RECONCILING, R.HANDED_OFF, R.AWAITING_INPUT)
            assert kinds(ruling).count(RUN_RESUMED) == announced, name


_WORDS: Final = frozenset({"receipt", "refusal", "busy", "silence", "never sent"})
_WANT_AN_EFFECT: Final = _WORDS | {"dispatch"}


def test_a_decision_that_the_table_does_not_hold_is_an_error() -> None:
    with pytest.raises(IllegalTransition):
        protocol.give_back(at_rest(R.HANDED_OFF), "x", due_in_ms=0)


def test_a_result_is_told_to_the_stage_that_asked() -> None:
    turn = machine.on(
        WORKFLOW,
        STATE,
        Result(End.RETURNED, RECEIPT, evidence="r:1"),
        STATE.view(remaining_ms=1_000),
    )

    assert isinstance(turn.command, AskModel) and turn.observation is not None
