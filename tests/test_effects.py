"""What may be concluded about a write, and when its intent may be sent again: rules without a
ledger.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.agent.effects import (
    EFFECT_MOVES,
    QUERIES_PER_DISPATCH,
    UNRESOLVED,
    Absent,
    Answer,
    Applied,
    AskAgain,
    Conclusion,
    Doubt,
    Effect,
    EffectStatus,
    GiveUp,
    NoAnswer,
    Pending,
    ProvedAbsent,
    ProvedApplied,
    SendAgain,
    Terms,
    Trigger,
    believed_absent,
    classify,
    first_query_at,
    may_send,
    resolve,
    trigger_of,
    upstream_key,
    without_query,
)
from handrail.agent.stage import Doubtful, End, Refused, Reply, Succeeded
from handrail.agent.tools import (
    FOREVER,
    MAX_INTENT_CHARACTERS,
    Guarantee,
    Principal,
    RunFacts,
    SideEffect,
    ToolContract,
)
from handrail.errors import InvalidDefinition

S: Final = EffectStatus
STALL_MS: Final = 20_000
DISPATCHED_AT: Final = 1_000_000
DEADLINE_AT: Final = DISPATCHED_AT + 5_000
SETTLES_AT: Final = DEADLINE_AT + STALL_MS + 3_000
KEY_MS: Final = 100_000


def terms(**given: Any) -> Terms:
    """What a tool declared: a key that lives 100 s and a query, unless the test says otherwise."""
    declared: dict[str, Any] = {
        "call_ms": 5_000,
        "key_valid_for_ms": KEY_MS,
        "not_after": False,
        "can_query": True,
        "settle_after_ms": 3_000,
        "pending_for_ms": 60_000,
        "stores_failures": False,
    }
    return Terms(**declared | given)


def effect(status: EffectStatus = S.UNKNOWN, **given: Any) -> Effect:
    """An effect that was dispatched once and is in doubt, unless the test says otherwise."""
    told = {key: given.pop(key) for key in list(given) if key in Terms.__slots__}
    fields: dict[str, Any] = {
        "attempts": 1,
        "doubt": Doubt.UNPROVEN,
        "token": 1,
        "first_dispatched_at": DISPATCHED_AT,
        "dispatch_deadline_at": DEADLINE_AT,
        "unknown_since": DEADLINE_AT,
        "owner_run_id": "r1",
        "dispatcher": "c1",
    }
    return Effect(
        id="e1",
        tenant="t",
        intent_key="refund:1",
        tool="refund",
        contract_version="1",
        arguments={},
        arguments_hash="h",
        terms=terms(**told),
        status=status,
        **fields | given,
    )


# ---- the table of moves --------------------------------------------------------------------------


def test_every_status_of_an_effect_says_who_moves_it_on() -> None:
    assert set(EFFECT_MOVES) == set(EffectStatus)
    for status, moves in EFFECT_MOVES.items():
        assert status not in moves
        assert moves or status is S.COMPENSATED


def test_a_doubt_is_left_only_by_proof_by_a_person_or_by_the_same_key_again() -> None:
    assert EFFECT_MOVES[S.UNKNOWN] == {S.APPLIED, S.ABSENT, S.HANDED_OFF, S.DISPATCHED}
    by_a_person = {S.HANDED_OFF, S.CONTRADICTED}
    assert all(S.PLANNED not in EFFECT_MOVES[status] for status in set(S) - by_a_person)


def test_what_is_applied_is_left_only_by_its_compensation() -> None:
    assert EFFECT_MOVES[S.APPLIED] == {S.COMPENSATING}
    assert not UNRESOLVED & {S.APPLIED, S.ABSENT, S.PLANNED}


# ---- sending (again) -----------------------------------------------------------------------------

SENDING = [
    # never sent
    (effect(S.PLANNED, attempts=0, doubt=Doubt.NONE, first_dispatched_at=None), 0, True),
    # every attempt was closed by its own sender's word, whatever the key
    (effect(S.ABSENT, doubt=Doubt.NONE, key_valid_for_ms=1), KEY_MS * 9, True),
    (effect(S.ABSENT, doubt=Doubt.NONE, key_valid_for_ms=0), 0, True),
    # a key that never dies
    (effect(key_valid_for_ms=FOREVER), KEY_MS * 9, True),
    (effect(S.ABSENT, doubt=Doubt.BY_QUERY, key_valid_for_ms=FOREVER), KEY_MS * 9, True),
    # a key that dies: until the call, the stall and the settling fit before its end, and no longer
    (effect(), KEY_MS - 5_000 - STALL_MS - 3_000, True),
    (effect(), KEY_MS - 5_000 - STALL_MS - 3_000 + 1, False),
    (effect(S.ABSENT, doubt=Doubt.BY_QUERY), KEY_MS - 28_000, True),
    (effect(S.ABSENT, doubt=Doubt.BY_QUERY), KEY_MS - 28_000 + 1, False),
    # a service that refuses what comes too late: only what is absent may be sent again
    (effect(S.ABSENT, doubt=Doubt.BY_QUERY, not_after=True), KEY_MS * 9, True),
    (effect(S.ABSENT, doubt=Doubt.BY_QUERY, not_after=True, key_valid_for_ms=0), 0, True),
    (effect(not_after=True, key_valid_for_ms=0), 0, False),
    (effect(not_after=True), KEY_MS, False),
    # no key: only believed absence, and only while a stall is bounded
    (effect(key_valid_for_ms=0), 0, False),
    (effect(S.ABSENT, doubt=Doubt.BY_QUERY, key_valid_for_ms=0), 0, True),
]


@pytest.mark.accept("LED-13")
@pytest.mark.parametrize(("sent", "after_ms", "may"), SENDING)
def test_an_intent_is_sent_again_only_where_the_service_would_know_it(
    sent: Effect, after_ms: int, may: bool
) -> None:
    assert may_send(sent, now=DISPATCHED_AT + after_ms, max_stall_ms=STALL_MS) is may


@pytest.mark.accept("LED-13")
def test_with_an_unbounded_stall_only_a_lasting_key_or_the_senders_word_suffices() -> None:
    believed: dict[str, Any] = {"status": S.ABSENT, "doubt": Doubt.BY_QUERY}

    def may(sent: Effect) -> bool:
        return may_send(sent, now=DISPATCHED_AT, max_stall_ms=None)

    assert may(effect(key_valid_for_ms=FOREVER))
    assert may(effect(S.ABSENT, doubt=Doubt.NONE, key_valid_for_ms=0))
    assert may(effect(**believed, not_after=True, key_valid_for_ms=0))
    assert not may(effect(**believed))
    assert not may(effect(**believed, key_valid_for_ms=0))


@given(
    status=st.sampled_from([S.UNKNOWN, S.ABSENT]),
    doubt=st.sampled_from(Doubt),
    key=st.sampled_from([0, 1, 30_000, KEY_MS, FOREVER]),
    not_after=st.booleans(),
    stall=st.none() | st.integers(0, 200_000),
    now=st.integers(0, 400_000),
)
def test_waiting_never_makes_sending_again_safe(
    status: EffectStatus,
    doubt: Doubt,
    key: int,
    not_after: bool,
    stall: int | None,
    now: int,
) -> None:
    """Nor does a longer stall; and what may have happened is never repeated without a key."""
    sent = effect(status, doubt=doubt, key_valid_for_ms=key, not_after=not_after)
    later = may_send(sent, now=DISPATCHED_AT + now + 1, max_stall_ms=stall)
    soon = may_send(sent, now=DISPATCHED_AT + now, max_stall_ms=stall)

    assert soon or not later
    if stall is not None and not soon:
        assert not may_send(sent, now=DISPATCHED_AT + now, max_stall_ms=stall + 1)
    if soon and status is S.UNKNOWN and doubt is not Doubt.NONE:
        assert key > 0


# ---- the sender's own word -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "reply", "first", "after_doubt"),
    [
        (End.RETURNED, Succeeded({"id": 1}, "1"), S.APPLIED, S.APPLIED),  # a receipt proves it
        (End.RETURNED, Refused("no"), S.ABSENT, S.UNKNOWN),  # its own attempt alone
        (End.RETURNED, Refused("no", retryable=True), S.ABSENT, S.UNKNOWN),
        (End.RETURNED, Doubtful("?"), S.UNKNOWN, S.UNKNOWN),
        (End.RAISED, None, S.UNKNOWN, S.UNKNOWN),
        (End.TIMED_OUT, None, S.UNKNOWN, S.UNKNOWN),
        (End.CANCELLED, None, S.UNKNOWN, S.UNKNOWN),
    ],
)
@pytest.mark.accept("LED-11")
def test_a_refusal_proves_the_absence_of_its_own_attempt_alone(
    end: End, reply: Reply | None, first: EffectStatus, after_doubt: EffectStatus
) -> None:
    sent = effect(S.DISPATCHED, doubt=Doubt.NONE)

    assert classify(sent, end, reply) is first
    assert classify(replace(sent, doubt=Doubt.UNPROVEN), end, reply) is after_doubt
    # Earlier attempts that two queries have shown to be absent are in doubt no more.
    assert classify(replace(sent, doubt=Doubt.BY_QUERY), end, reply) is first


@pytest.mark.parametrize(
    ("end", "reply", "cancelled", "trigger"),
    [
        (End.TIMED_OUT, None, False, Trigger.TIMEOUT),
        (End.RAISED, None, False, Trigger.EXCEPTION),
        (End.CANCELLED, None, True, Trigger.CANCELLATION),
        (End.TIMED_OUT, None, True, Trigger.CANCELLATION),
        (End.RETURNED, Doubtful("?"), False, Trigger.REPORTED),
        (End.RETURNED, Refused("no"), False, Trigger.REPORTED),
    ],
)
def test_a_doubt_names_what_brought_it_about(
    end: End, reply: Reply | None, cancelled: bool, trigger: Trigger
) -> None:
    assert trigger_of(end, reply, cancelled=cancelled) is trigger


# ---- what a query proves -------------------------------------------------------------------------

FOUND = Applied({"id": 1}, "query:e1:1")


def concluded(asked: Effect, answer: Answer, *, sent_at: int, **given: Any) -> Conclusion:
    """What is concluded from one answer, read right after it was sent unless told otherwise."""
    options: dict[str, Any] = {"now": sent_at, "max_stall_ms": STALL_MS, "jitter": 0.5}
    return resolve(asked, answer, sent_at=sent_at, **options | given)


@pytest.mark.accept("LED-10")
def test_absence_takes_two_consistent_answers_after_the_last_moment_to_land() -> None:
    asked = effect(queries_left=5)
    early = concluded(asked, Absent(), sent_at=SETTLES_AT - 1)
    first = concluded(asked, Absent(), sent_at=SETTLES_AT)
    second = concluded(replace(asked, absences=1), Absent(), sent_at=SETTLES_AT)

    assert isinstance(early, AskAgain) and early.absences == 0
    assert isinstance(first, AskAgain) and first.absences == 1
    assert second == ProvedAbsent()


@pytest.mark.accept("LED-10")
def test_a_query_counts_by_when_it_was_sent_not_by_when_its_answer_is_read() -> None:
    asked = effect(queries_left=5, absences=1)

    early = concluded(asked, Absent(), sent_at=SETTLES_AT - 1, now=SETTLES_AT + 60_000)

    assert isinstance(early, AskAgain)


@pytest.mark.parametrize("between", [Pending(), NoAnswer("timeout")])
@pytest.mark.accept("LED-10")
def test_an_answer_between_two_absences_starts_the_count_anew(between: Answer) -> None:
    asked = effect(queries_left=5, absences=1, unknown_since=None)

    again = concluded(asked, between, sent_at=SETTLES_AT)

    assert isinstance(again, AskAgain) and again.absences == 0


@pytest.mark.accept("LED-10")
def test_with_an_unbounded_stall_no_number_of_absences_is_believed() -> None:
    asked = effect(queries_left=5, absences=4)
    again = concluded(asked, Absent(), sent_at=SETTLES_AT * 2, max_stall_ms=None)
    last = replace(asked, queries_left=0)

    assert isinstance(again, AskAgain) and again.absences == 4
    lasting = replace(last, terms=terms(key_valid_for_ms=FOREVER))
    assert concluded(lasting, Absent(), sent_at=SETTLES_AT, max_stall_ms=None) == SendAgain()
    assert isinstance(
        concluded(last, Absent(), sent_at=SETTLES_AT, max_stall_ms=None), GiveUp
    )  # its key dies: a person decides


def test_a_record_that_is_found_proves_it_whenever_the_query_was_sent() -> None:
    for sent_at in (DISPATCHED_AT, SETTLES_AT):
        assert concluded(effect(queries_left=0), FOUND, sent_at=sent_at) == ProvedApplied(
            FOUND.value, FOUND.evidence
        )


def test_a_pending_answer_gives_its_query_back_as_long_as_that_is_normal() -> None:
    asked = effect(queries_left=0, pending_for_ms=60_000)
    normal_until = DEADLINE_AT + 60_000

    waiting = concluded(asked, Pending(), sent_at=normal_until - 1)
    too_long = concluded(asked, Pending(), sent_at=normal_until)

    assert isinstance(waiting, AskAgain) and waiting.queries_left == 1
    assert not isinstance(too_long, AskAgain)


@pytest.mark.parametrize(
    ("asked", "conclusion"),
    [
        (effect(), SendAgain),  # the same key settles it
        (effect(key_valid_for_ms=1), GiveUp),  # its lifetime is over
        (effect(key_valid_for_ms=0), GiveUp),  # no key
        (effect(key_valid_for_ms=0, not_after=True), GiveUp),  # it may have landed in time
    ],
)
def test_without_a_query_the_same_key_settles_a_doubt_or_a_person_does(
    asked: Effect, conclusion: type[Conclusion]
) -> None:
    assert isinstance(without_query(asked, now=DEADLINE_AT, max_stall_ms=STALL_MS), conclusion)


ANSWERS = st.sampled_from([Absent(), Absent(), Pending(), NoAnswer("x"), FOUND])


@given(
    answers=st.lists(st.tuples(ANSWERS, st.integers(0, 40_000)), max_size=40),
    key=st.sampled_from([0, 1, KEY_MS, FOREVER]),
    stall=st.none() | st.integers(0, 30_000),
    jitter=st.floats(0, 1, exclude_max=True),
)
@pytest.mark.accept("LED-10")
def test_no_sequence_of_answers_settles_a_doubt_by_hope(
    answers: list[tuple[Answer, int]], key: int, stall: int | None, jitter: float
) -> None:
    """Only a record proves application; only the two latest answers together prove absence."""
    asked = effect(key_valid_for_ms=key, queries_left=QUERIES_PER_DISPATCH)
    now, paid = DISPATCHED_AT, 0
    heard: list[tuple[Answer, bool]] = []
    for answer, delay in answers:
        now += delay
        sent_at, counts = now, stall is not None and now >= asked.settles_at(stall)
        asked, paid = replace(asked, queries_left=asked.queries_left - 1), paid + 1
        heard.append((answer, counts))
        found = resolve(asked, answer, sent_at=sent_at, now=now, max_stall_ms=stall, jitter=jitter)
        match found:
            case AskAgain(at, absences, queries_left):
                assert at >= now
                asked = replace(asked, absences=absences, queries_left=queries_left)
            case ProvedApplied():
                assert answer == FOUND
                return
            case ProvedAbsent():
                assert answer == Absent() and counts
                two = [item for item in heard if item[1] or item[0] != Absent()][-2:]
                assert two == [(Absent(), True), (Absent(), True)]
                return
            case SendAgain():
                assert key and may_send(asked, now=now, max_stall_ms=stall)
                return
            case GiveUp():
                return
    gave_back = sum(1 for answer, _ in heard if isinstance(answer, Pending))
    assert paid <= QUERIES_PER_DISPATCH + gave_back


def test_one_early_query_is_asked_and_the_rest_are_kept_for_after_the_window() -> None:
    asked = effect(queries_left=QUERIES_PER_DISPATCH - 1)

    again = concluded(asked, Absent(), sent_at=DEADLINE_AT)

    assert first_query_at(DEADLINE_AT) < SETTLES_AT
    assert isinstance(again, AskAgain) and again.at == SETTLES_AT


def test_the_pauses_between_queries_grow_and_are_never_equal_for_all() -> None:
    pauses = []
    for left in range(QUERIES_PER_DISPATCH - 1, 0, -1):
        found = concluded(effect(queries_left=left), NoAnswer("x"), sent_at=SETTLES_AT, jitter=0.5)
        assert isinstance(found, AskAgain)
        pauses.append(found.at - SETTLES_AT)

    assert all(later >= earlier for earlier, later in pairwise(pauses))
    assert pauses[0] == 1_000 and pauses[-1] <= 60_000
    soon = concluded(effect(queries_left=1), NoAnswer("x"), sent_at=SETTLES_AT, jitter=0.0)
    late = concluded(effect(queries_left=1), NoAnswer("x"), sent_at=SETTLES_AT, jitter=0.99)
    assert isinstance(soon, AskAgain) and isinstance(late, AskAgain) and soon.at < late.at


def test_absence_by_query_stays_marked_as_such() -> None:
    absent = believed_absent(effect())

    assert (absent.status, absent.doubt) == (S.ABSENT, Doubt.BY_QUERY)


# ---- the identity of an intent -------------------------------------------------------------------


def refund(**given: Any) -> ToolContract:
    """A payment's contract."""
    declared: dict[str, Any] = {
        "name": "refund",
        "side_effect": SideEffect.IRREVERSIBLE,
        "intent": lambda arguments, run: f"refund:{arguments['order']}:{run.input['request']}",
        "guarantee": Guarantee.IDEMPOTENCY_KEY,
        "key_valid_for_ms": KEY_MS,
        "takeover": "accounting",
    }
    return ToolContract(**declared | given)


def facts(**given: Any) -> RunFacts:
    """What an intent may know of its run."""
    known: dict[str, Any] = {
        "run_id": "run-1",
        "tenant": "t",
        "goal": "g",
        "principal": Principal(),
        "input": {"request": "request-1"},
        "tool_calls": 0,
    }
    return RunFacts(**known | given)


@pytest.mark.accept("LED-05")
def test_an_intent_is_the_same_in_every_step_and_every_run_of_the_tenant() -> None:
    contract = refund()
    first = contract.intent_of({"order": "order-42"}, facts())
    second = contract.intent_of({"order": "order-42"}, facts(run_id="run-2", tool_calls=7))

    assert first == second == "refund:order-42:request-1"
    assert first is not None
    assert upstream_key("t", first) == upstream_key("t", first)
    assert upstream_key("t", first) != upstream_key("u", first)


def test_parts_of_an_upstream_key_cannot_run_together() -> None:
    assert upstream_key("a", "b:c") != upstream_key("a:b", "c")


@pytest.mark.parametrize("key", ["", 7, None, "x" * (MAX_INTENT_CHARACTERS + 1), "\0" * 200])
def test_an_intent_that_cannot_be_kept_is_refused_with_its_reason(key: object) -> None:
    contract = refund(intent=lambda arguments, run: key)

    with pytest.raises(InvalidDefinition, match="name the object and the action"):
        contract.intent_of({}, facts())


@pytest.mark.accept("LED-07")
@pytest.mark.parametrize("kind", ["payment", "mail", "deletion"])
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"guarantee": None}, "must name the service's guarantee"),
        ({"key_valid_for_ms": 0}, "how long the service honours the key"),  # ours alone is none
        ({"guarantee": Guarantee.NOT_AFTER}, "needs not_after=True"),
        ({"intent": None}, "must declare intent"),
    ],
)
def test_a_write_without_a_guarantee_of_its_service_is_refused(
    kind: str, given: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidDefinition, match=problem):
        refund(name=kind, **given)


@pytest.mark.accept("LED-07")
@pytest.mark.parametrize(
    "guarantee", [Guarantee.UNIQUE_CONSTRAINT, Guarantee.TRANSACTION, Guarantee.IDEMPOTENCY_KEY]
)
def test_a_write_names_what_makes_it_happen_at_most_once_on_the_server(
    guarantee: Guarantee,
) -> None:
    assert refund(guarantee=guarantee).guarantee is guarantee
