"""Questions: a run rests with its words in the queue, goes on with the time it had, and expires."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from handrail.agent.approvals import ApprovalRefused
from handrail.agent.loop import AgentLoop
from handrail.agent.people import InvalidWords, NotAllowed
from handrail.agent.tools import Principal
from handrail.errors import InvalidDefinition
from handrail.ledger.errors import UnknownRun
from handrail.testing.people import ADMIN, APPROVER, OPERATOR
from tests.world import SECOND, World, look, open_world

ASK: Final = {"kind": "clarify", "question": "Which order?"}
HOUR: Final = 3_600 * SECOND


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


def asking(world: World, *, budget: dict[str, int] | None = None, **options: Any) -> str:
    tool = world.read_tool()

    async def propose(seen: dict[str, Any]) -> Any:
        answered = "order 7" in str(seen["observations"])
        return {"kind": "complete", "answer": "ok"} if answered else ASK

    world.fleet.model("asks", propose)
    loop = AgentLoop(
        name="loop", actions=(tool,), model="asks", verify=lambda claim, call: True, **options
    )
    world.workflow(stages=[loop])
    run = world.start(budget=budget)
    world.step(run)
    assert world.fleet.get(run).status == "awaiting_input"
    return run


@pytest.mark.accept("TRM-16")
def test_the_question_rests_in_the_queue_and_in_the_outcome(world: World) -> None:
    run = asking(world)
    (row,) = world.fleet.desk.handoffs(by=OPERATOR, reason="clarification-required")
    (stop,) = world.trace(run, "run.stopped")

    assert row["package"]["question"] == "Which order?" == stop["detail"]["question"]
    assert row["package"]["budget_left"] and row["package"]["trace"] == f"trace:{run}"
    assert world.fleet.get(run).reason == "clarification-required"


def test_an_answer_goes_on_with_the_time_that_was_left(world: World) -> None:
    run = asking(world, budget={"deadline_ms": 38 * SECOND})
    left = world.fleet.get(run).remaining_ms
    world.advance(HOUR)
    found = world.fleet.answer(run, "order 7", by=OPERATOR)

    assert found.status == "running" and found.remaining_ms == left
    assert world.drive(run).status == "completed"
    (row,) = world.fleet.desk.handoffs(by=OPERATOR, resolved=True)
    assert row["resolution"] == "answered"
    (entry,) = world.fleet.desk.audit(by=ADMIN, act="answer")
    assert entry["reason"] == "order 7"


def test_a_question_expires_with_a_reason_of_its_own(world: World) -> None:
    run = asking(world, answer_within_ms=HOUR)
    world.advance(HOUR)
    world.sweep_when_due(run)
    found = world.fleet.get(run)

    assert (found.status, found.reason) == ("failed", "input-expired")
    assert world.fleet.desk.handoffs(by=OPERATOR) == []
    with pytest.raises(ApprovalRefused):
        world.fleet.answer(run, "order 7", by=OPERATOR)


def test_an_answer_after_the_expiry_is_too_late_even_before_the_sweep(world: World) -> None:
    run = asking(world, answer_within_ms=HOUR)
    world.advance(HOUR)
    with pytest.raises(ApprovalRefused) as caught:
        world.fleet.answer(run, "order 7", by=OPERATOR)

    assert caught.value.problem == "expired"
    assert world.fleet.get(run).reason == "input-expired"


def test_the_hard_expiry_comes_first_where_it_is_earlier(world: World) -> None:
    run = asking(world, budget={"expires_ms": HOUR // 2}, answer_within_ms=HOUR)
    world.advance(HOUR // 2)
    world.sweep_when_due(run)
    found = world.fleet.get(run)

    assert (found.status, found.reason) == ("budget_exhausted", "expired")


def test_a_cancelled_run_takes_no_answer_and_leaves_no_question_behind(world: World) -> None:
    run = asking(world)
    world.fleet.cancel(run)

    assert world.fleet.desk.handoffs(by=OPERATOR) == []
    (row,) = world.fleet.desk.handoffs(by=OPERATOR, resolved=True)
    assert row["resolution"] == "cancelled"
    with pytest.raises(ApprovalRefused):
        world.fleet.answer(run, "order 7", by=OPERATOR)


def test_the_second_answer_is_refused(world: World) -> None:
    run = asking(world)
    world.fleet.answer(run, "order 7", by=OPERATOR)

    with pytest.raises(ApprovalRefused) as caught:
        world.fleet.answer(run, "order 8", by=OPERATOR)
    assert caught.value.problem == "not-asked"
    assert world.drive(run).status == "completed"


def test_who_answers_has_to_be_somebody(world: World) -> None:
    run = asking(world)
    with pytest.raises(NotAllowed):
        world.fleet.answer(run, "order 7", by=APPROVER)
    eve = Principal("eve", roles=frozenset({"operator"}), tenants=frozenset())
    with pytest.raises(UnknownRun):  # as one that is not there
        world.fleet.answer(run, "order 7", by=eve)
    for words in ("", 7, None):
        with pytest.raises(InvalidWords):
            world.fleet.answer(run, words, by=OPERATOR)  # type: ignore[arg-type]
    assert world.fleet.get(run).status == "awaiting_input"


@pytest.mark.parametrize("within", [0, -1, 1.5, True, None])
@pytest.mark.parametrize("which", ["answer_within_ms", "approve_within_ms"])
def test_how_long_a_person_is_waited_for_is_a_whole_number(which: str, within: Any) -> None:
    with pytest.raises(InvalidDefinition, match=which):
        AgentLoop(
            name="loop", actions=(_read(),), verify=lambda claim, call: True, **{which: within}
        )


def _read() -> Any:
    from handrail.fleet import Fleet

    return Fleet(database_url="sqlite://").tool("look", side_effect="read")(lambda a, call: look())
