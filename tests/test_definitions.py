"""What a definition must say about its writes: who lacks it is refused, and told what to add."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from handrail import Action, AgentLoop, Commit, Confirm, Fleet, Workflow
from handrail.agent.protocol import handoff_of
from handrail.agent.tools import FOREVER, Compensation, RunFacts, SideEffect, Tool
from handrail.errors import InvalidDefinition
from handrail.tasks.calls import ToolCall
from handrail.testing.virtual_fleet import VirtualFleet
from tests.test_protocol import STATE, effect

#: A write about which nothing is left open but its class and who finds out.
WRITE: Final[dict[str, Any]] = {
    "intent": lambda arguments, run: f"act:{arguments['id']}",
    "guarantee": "idempotency-key",
    "key_valid_for_ms": FOREVER,
}


def work(arguments: dict[str, Any], call: ToolCall) -> str:
    return "done"


def find(arguments: dict[str, Any], call: ToolCall) -> None:
    return None


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet(database_url="sqlite://")
    yield fleet
    fleet.close()


def declared(fleet: Fleet, **contract: Any) -> Tool:
    return fleet.tool("act", **contract)(work)


# ---- every action is classed ---------------------------------------------------------------------


@pytest.mark.accept("REV-07")
def test_an_action_that_is_not_classed_is_refused_and_told_what_is_missing(fleet: Fleet) -> None:
    """It counts as an irreversible write that declares nothing; as a read it is accepted."""
    with pytest.raises(InvalidDefinition, match="side_effect='read'"):
        fleet.tool(work)  # type: ignore[arg-type]
    with pytest.raises(InvalidDefinition, match="side_effect='read'"):
        declared(fleet)

    assert declared(fleet, side_effect="read").contract.side_effect is SideEffect.READ


@pytest.mark.accept("REV-07")
@pytest.mark.parametrize("unknown", ["harmless", "", "write", None])
def test_an_action_of_an_unknown_class_is_refused(unknown: Any, fleet: Fleet) -> None:
    with pytest.raises(InvalidDefinition, match="side_effect"):
        declared(fleet, side_effect=unknown, query=find, **WRITE)


@pytest.mark.accept("REV-07")
def test_a_write_without_a_class_is_of_the_strictest(fleet: Fleet) -> None:
    tool = declared(fleet, query=find, **WRITE)

    assert tool.contract.side_effect is SideEffect.IRREVERSIBLE
    assert tool.contract.needs_approval
    with pytest.raises(InvalidDefinition, match="irreversible"):
        AgentLoop(name="loop", actions=(tool,), verify=work)


@pytest.mark.accept("REV-07")
@pytest.mark.parametrize("side_effect", SideEffect)
def test_an_action_of_each_class_is_accepted_with_what_its_class_needs(
    side_effect: SideEffect, fleet: Fleet
) -> None:
    needs: dict[str, Any] = {**WRITE, "query": find} if side_effect.writes else {}
    if side_effect is SideEffect.COMPENSABLE:
        undoes = {**WRITE, "side_effect": "idempotent", "approval": "never", "query": find}
        undo = fleet.tool("undo", **undoes)(work)
        needs["compensation"] = Compensation(undo, lambda arguments, *_: arguments)

    tool = declared(fleet, side_effect=side_effect.value, **needs)

    assert tool.contract.side_effect is side_effect


# ---- a high-risk write is confirmed, and outside of any loop -------------------------------------


@pytest.mark.accept("REV-08")
def test_an_irreversible_write_is_no_action_of_an_open_loop(fleet: Fleet) -> None:
    tool = declared(fleet, side_effect="irreversible", query=find, **WRITE)

    with pytest.raises(InvalidDefinition, match="it belongs into a fixed commit"):
        AgentLoop(name="loop", actions=(tool,), verify=work)


@pytest.mark.accept("REV-08")
def test_an_irreversible_write_cannot_go_without_confirmation(fleet: Fleet) -> None:
    with pytest.raises(InvalidDefinition, match="an irreversible write takes an exact confirm"):
        declared(fleet, side_effect="irreversible", approval="never", query=find, **WRITE)


@pytest.mark.accept("REV-08")
@pytest.mark.parametrize("confirms", ["nothing", "later", "another"])
def test_a_commit_is_confirmed_before_and_exactly(confirms: str, fleet: Fleet) -> None:
    tool = declared(fleet, side_effect="irreversible", query=find, **WRITE)

    def action(run: RunFacts) -> Action:
        return Action(tool, {"id": 1})

    def other(run: RunFacts) -> Action:
        return Action(tool, {"id": 2})

    commit = Commit("commit", action, tool)
    wrong: dict[str, list[Any]] = {
        "nothing": [commit],
        "later": [commit, Confirm("confirm", action)],
        "another": [Confirm("confirm", other), commit],
    }
    with pytest.raises(InvalidDefinition, match=r"put Confirm\(\.\.\., action="):
        Workflow(name="w", stages=wrong[confirms])

    fleet.workflow(Workflow(name="w", stages=[Confirm("confirm", action), commit]))


# ---- who finds out about a doubt -----------------------------------------------------------------


@pytest.mark.accept("REV-12", "REV-15")
@pytest.mark.parametrize("side_effect", [s for s in SideEffect if s.writes])
def test_a_write_about_which_nobody_finds_out_is_refused(
    side_effect: SideEffect, fleet: Fleet
) -> None:
    """Neither after a time-out nor after a cancellation would anybody confirm its true state."""
    with pytest.raises(InvalidDefinition) as refused:
        declared(fleet, side_effect=side_effect.value, **WRITE)

    for named in ("time-out", "cancellation", "query(arguments, call)", "takeover="):
        assert named in str(refused.value)


@pytest.mark.accept("REV-12", "REV-15")
@pytest.mark.parametrize(
    ("by", "recovery"),
    [
        ({"query": find}, "query"),
        ({"takeover": "the payments desk"}, "human"),
        ({"query": find, "takeover": "the payments desk"}, "query"),
    ],
)
def test_a_query_or_a_named_person_makes_it_acceptable(
    by: dict[str, Any], recovery: str, fleet: Fleet
) -> None:
    tool = declared(fleet, side_effect="idempotent", **WRITE, **by)

    assert tool.contract.recovery == recovery
    assert tool.contract.takeover == by.get("takeover")


@pytest.mark.parametrize("nobody", ["", "  ", 7, True])
def test_a_takeover_is_a_name(nobody: Any, fleet: Fleet) -> None:
    with pytest.raises(InvalidDefinition, match="takeover must be the name"):
        declared(fleet, side_effect="idempotent", takeover=nobody, **WRITE)


@pytest.mark.accept("REV-12")
def test_whoever_takes_over_is_named_in_the_handoff_after_a_cancellation() -> None:
    with VirtualFleet() as virtual:

        async def vanish(arguments: dict[str, Any], call: ToolCall) -> str:
            virtual.loop.call_later(0.1, virtual.cancel, call.run_id)
            await virtual.loop.create_future()
            return "never"

        contract = {**WRITE, "approval": "never", "takeover": "the payments desk"}
        tool = virtual.fleet.tool("act", side_effect="idempotent", **contract)(vanish)

        def action(run: RunFacts) -> Action:
            return Action(tool, {"id": 1})

        virtual.fleet.workflow(Workflow(name="w", stages=[Commit("commit", action, tool)]))
        run = virtual.run("w", goal="any")
        assert (run.status, run.reason) == ("reconciling", "unknown-effect")

        virtual.advance(60_000)
        virtual.reconciler.sweep()

        [handoff] = virtual.fleet.ledger.people.handoffs(run_id=run.run_id)
        assert handoff["package"]["takeover"] == "the payments desk"


def test_a_handoff_about_a_write_that_names_nobody_says_so() -> None:
    doubtful = effect()
    named = replace(doubtful.terms, takeover="accounting")

    assert handoff_of(STATE, doubtful)["takeover"] == "none"
    assert handoff_of(STATE, effect(terms=named))["takeover"] == "accounting"
