"""Termination: a run ends by a condition that a program has checked, and its record says which."""

from __future__ import annotations

import asyncio
import runpy
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from handrail import AgentLoop, Budget, Fleet, Read, Workflow
from handrail.agent.loop import NoProgress
from handrail.agent.stage import Checked
from handrail.agent.status import CATALOGUE, STOPS, Category, Reason, RunEvent, Termination
from handrail.agent.tools import (
    FOREVER,
    Approval,
    Guarantee,
    SideEffect,
    Tool,
    ToolContract,
    Validated,
    fingerprint,
)
from handrail.canonical import Json, canonical, normal
from handrail.errors import InvalidDefinition, ToolRefused
from handrail.gateway.model import RAW, ModelEvent, ModelRequest, Scripted, Stop, ToolCall
from handrail.runs import Run
from handrail.testing.vectors import replay
from tests.control import PATIENCE_S, Clock, Driven, ask, claim, details, stop_of, until

# ---- the catalogue -------------------------------------------------------------------------------


@pytest.mark.accept("TRM-01")
def test_the_catalogue_lists_six_kinds_of_termination() -> None:
    assert {kind.value for kind in CATALOGUE} == {
        "completion",
        "unrecoverable-failure",
        "budget",
        "no-progress",
        "cancellation",
        "human-takeover",
    }
    assert all(CATALOGUE.values())


@pytest.mark.accept("TRM-01")
@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_of_exactly_one_kind(reason: Reason) -> None:
    [kind] = [kind for kind, reasons in CATALOGUE.items() if reason in reasons]

    event, category = STOPS[reason]
    loops = event is RunEvent.REPETITION_FOUND
    assert (kind is Termination.NO_PROGRESS) == loops
    if not loops:
        assert (
            kind
            is {
                Category.COMPLETION: Termination.COMPLETION,
                Category.FAILURE: Termination.UNRECOVERABLE_FAILURE,
                Category.BUDGET: Termination.BUDGET,
                Category.CANCELLATION: Termination.CANCELLATION,
                Category.HANDOFF: Termination.HUMAN_TAKEOVER,
            }[category]
        )


# ---- a fleet to end runs in ----------------------------------------------------------------------


class Bench:
    """A fleet with one loop over the given tools, and the script that plays its model."""

    def __init__(
        self,
        *tools: Tool,
        script: Sequence[Any] = (),
        verify: Callable[..., Any] = lambda claimed, call: True,
        clock: Clock | None = None,
        before: Sequence[Any] = (),
        **loop: Any,
    ) -> None:
        self.fleet = Fleet(database_url="sqlite://", clock=clock)
        self.model = Scripted(script)
        self.fleet.model("default", self.model)
        agent = AgentLoop(name="loop", actions=tools, verify=verify, **loop)
        self.fleet.workflow(Workflow(name="work", stages=[*before, agent]))

    def run(self, **options: Any) -> Run:
        return self.fleet.run("work", goal="test", **options)

    def stop(self, run: Run) -> dict[str, Any]:
        return stop_of(self.fleet.trace(run))


class Calls:
    """A tool that answers from a function, and the record of its calls."""

    def __init__(
        self,
        name: str,
        answer: Callable[[dict[str, Any]], Any] = lambda arguments: "nothing new",
        **contract: Any,
    ) -> None:
        self.made: list[dict[str, Any]] = []

        def execute(arguments: dict[str, Any], call: Any) -> Any:
            self.made.append(arguments)
            return answer(arguments)

        contract.setdefault("side_effect", SideEffect.READ)
        self.tool = Tool(ToolContract(name=name, **contract), execute)


WRITES: dict[str, Any] = {
    "side_effect": SideEffect.IDEMPOTENT,
    "approval": Approval.NEVER,
    "intent": lambda arguments, run: f"draft:{arguments['number']}",
    "guarantee": Guarantee.IDEMPOTENCY_KEY,
    "key_valid_for_ms": FOREVER,
    "takeover": "operations",
}


# ---- completion ----------------------------------------------------------------------------------


class Delivery:
    """What a run must deliver: a product, a citation, a database state and a test that passes."""

    def __init__(self, folder: Path) -> None:
        self.product = folder / "product.py"
        self.product.write_text("ANSWER = 42\n")
        self.sections = {"manual#4": "The answer is 42."}
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.database.execute("CREATE TABLE orders (id INTEGER, status TEXT)")
        self.database.execute("INSERT INTO orders VALUES (1, 'migrated')")

    def verify(self, answer: Any, call: Any) -> Checked:
        """Look at each for itself; the claim only says where the citation points."""
        [(status,)] = self.database.execute("SELECT status FROM orders WHERE id = 1")
        found = {
            "product": self.product.exists(),
            "citation": answer["citation"] in self.sections,
            "database": status == "migrated",
            "test": self.product.exists() and runpy.run_path(str(self.product))["ANSWER"] == 42,
        }
        evidence = {
            "product": str(self.product),
            "citation": answer["citation"],
            "database": f"orders/1: {status}",
            "test": "ANSWER == 42",
        }
        return Checked(all(found.values()), {"found": found, "evidence": evidence})


MISSING: dict[str, Callable[[Delivery], object]] = {
    "product": lambda delivery: delivery.product.unlink(),
    "citation": lambda delivery: delivery.sections.clear(),
    "database": lambda delivery: delivery.database.execute("UPDATE orders SET status = 'old'"),
    "test": lambda delivery: delivery.product.write_text("ANSWER = 41\n"),
}
DONE = claim({"citation": "manual#4"})


@pytest.mark.accept("TRM-02")
@pytest.mark.parametrize("missing", MISSING)
def test_a_claim_is_not_believed_while_something_is_missing(missing: str, tmp_path: Path) -> None:
    delivery = Delivery(tmp_path)
    MISSING[missing](delivery)
    bench = Bench(Calls("lookup").tool, script=[DONE], verify=delivery.verify)

    run = bench.run(budget={"steps": 1})

    assert (run.status, run.reason) == ("budget_exhausted", "step-budget-exhausted")
    assert run.answer is None
    [verdict] = details(bench.fleet.trace(run), "completion.verified")
    assert verdict["verified"] is False
    assert verdict["found"][missing] is False


@pytest.mark.accept("TRM-03")
def test_a_claim_of_which_everything_holds_completes_with_evidence_for_each(
    tmp_path: Path,
) -> None:
    delivery = Delivery(tmp_path)
    bench = Bench(Calls("lookup").tool, script=[DONE], verify=delivery.verify)

    run = bench.run()

    assert (run.status, run.reason, run.answer) == ("completed", "completed", DONE["answer"])
    [verdict] = details(bench.fleet.trace(run), "completion.verified")
    assert verdict["verified"] is True
    assert verdict["evidence"] == {
        "product": str(tmp_path / "product.py"),
        "citation": "manual#4",
        "database": "orders/1: migrated",
        "test": "ANSWER == 42",
    }


# ---- failure that no rewording repairs -----------------------------------------------------------


@pytest.mark.accept("TRM-04")
@pytest.mark.parametrize("effect", ["read", "write"])
@pytest.mark.parametrize("code", ["violates-business-rule", "not-permitted", "no-such-order"])
def test_a_failure_that_cannot_be_repaired_stops_the_run_at_once(code: str, effect: str) -> None:
    def refuse(arguments: dict[str, Any]) -> Any:
        raise ToolRefused(code)

    order = Calls("order", refuse, **(WRITES if effect == "write" else {}))
    reworded = [ask("order", number=1), ask("order", number=2), claim("done")]
    bench = Bench(order.tool, script=reworded)

    run = bench.run()

    assert (run.status, run.reason) == ("failed", "tool-failed")
    assert (len(order.made), len(bench.model.requests)) == (1, 1)
    trace = bench.fleet.trace(run)
    assert stop_of(trace)["code"] == code
    assert [told["status"] for told in details(trace, "result.classified")] == ["failed"]


# ---- budgets -------------------------------------------------------------------------------------


@pytest.mark.accept("TRM-05")
@pytest.mark.parametrize(
    ("budget", "reason", "observations"),
    [
        ({"steps": 1}, "step-budget-exhausted", 1),
        ({"model_calls": 1}, "model-call-budget-exhausted", 1),
        ({"tool_calls": 2}, "tool-call-budget-exhausted", 1),
        ({"tokens": 0}, "token-budget-exhausted", 0),
        ({"cost_microusd": 0}, "cost-budget-exhausted", 0),
        ({"deadline_ms": 38_000}, "deadline-exhausted", 1),
    ],
)
def test_a_spent_budget_is_named_and_the_products_so_far_are_listed(
    budget: dict[str, int], reason: str, observations: int
) -> None:
    clock = Clock()

    def look(arguments: dict[str, Any]) -> str:
        clock.advance(40_000 if budget.get("deadline_ms") else 0)
        return f"fact {arguments['number']}"

    orders = Calls("orders", lambda arguments: {"order": 42})
    bench = Bench(
        Calls("lookup", look).tool,
        script=[ask("lookup", number=number) for number in range(4)],
        clock=clock,
        before=[Read("orders", orders.tool, lambda run: {})],
    )

    run = bench.run(budget=budget)

    assert (run.status, run.reason) == ("budget_exhausted", reason)
    stop = bench.stop(run)
    assert (stop["reason"], stop["exhausted"], stop["category"]) == (reason, reason, "budget")
    assert stop["products"] == {"outputs": ["orders"], "observations": observations}
    assert run.interim["outputs"] == {"orders": {"order": 42}}
    assert run.interim["observations"] == ["fact 0"][:observations]


# ---- fingerprints --------------------------------------------------------------------------------

KEYS = st.text(max_size=2)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)
LOOKUP = ToolContract(name="lookup", side_effect=SideEffect.READ)
SEARCH = ToolContract(name="search", side_effect=SideEffect.READ)


def _mark(version: int, contract: ToolContract, arguments: dict[str, Json]) -> str:
    checked = contract.validate(arguments)
    assert isinstance(checked, Validated)
    return fingerprint(version, contract, checked.json)


def _keys_reversed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _keys_reversed(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [_keys_reversed(item) for item in value]
    return value


@pytest.mark.accept("TRM-06")
@given(arguments=ARGUMENTS, version=st.integers(0, 9))
def test_a_fingerprint_does_not_depend_on_the_order_of_keys_at_any_depth(
    arguments: dict[str, Any], version: int
) -> None:
    reordered = _keys_reversed(arguments)

    assert _mark(version, LOOKUP, arguments) == _mark(version, LOOKUP, reordered)


@pytest.mark.accept("TRM-06")
@given(arguments=ARGUMENTS, version=st.integers(0, 9))
def test_another_tool_or_version_has_another_fingerprint(
    arguments: dict[str, Any], version: int
) -> None:
    mark = _mark(version, LOOKUP, arguments)

    assert mark != _mark(version + 1, LOOKUP, arguments)
    assert mark != _mark(version, SEARCH, arguments)


@pytest.mark.accept("TRM-06")
@given(items=st.lists(VALUES, min_size=2, max_size=4), other=VALUES)
def test_a_reordered_array_or_another_value_has_another_fingerprint(
    items: list[Any], other: Any
) -> None:
    mark = _mark(0, LOOKUP, {"deep": [{"items": items}]})

    if canonical(items) != canonical(items[::-1]):
        assert mark != _mark(0, LOOKUP, {"deep": [{"items": items[::-1]}]})
    assume(normal(other) != normal(items) or canonical(other) != canonical(items))
    assert mark != _mark(0, LOOKUP, {"deep": [{"items": other}]})


# ---- repetition ----------------------------------------------------------------------------------

SAME: Mapping[str, Any] = {"no_progress": None}  # only the fingerprint is tried here
A, B, C = (ask("lookup", item=item) for item in "abc")


@pytest.mark.accept("TRM-07")
def test_a_proposal_seen_before_stops_the_run_before_it_is_executed() -> None:
    """The first call told something new, which moved the state: the third is the repetition."""
    lookup = Calls("lookup")
    bench = Bench(lookup.tool, script=[A, A, A, claim("done")], **SAME)

    run = bench.run()

    assert (run.status, run.reason, run.version) == ("failed", "repeated-proposal", 1)
    assert len(lookup.made) == 2
    trace = bench.fleet.trace(run)
    [rejected] = details(trace, "proposal.rejected")
    assert rejected["stable_reason_code"] == "repeated-proposal"
    assert stop_of(trace)["fingerprint"] == _mark(1, LOOKUP, A["arguments"])


@pytest.mark.accept("TRM-07")
def test_a_proposal_seen_earlier_but_not_last_stops_the_run_too() -> None:
    lookup = Calls("lookup")
    bench = Bench(lookup.tool, script=[C, A, B, C, A, claim("done")], **SAME)

    run = bench.run()

    assert (run.reason, run.version) == ("repeated-proposal", 1)
    assert [made["item"] for made in lookup.made] == ["c", "a", "b", "c"]


@pytest.mark.accept("TRM-08")
def test_two_proposals_in_turn_stop_at_the_second_of_the_first() -> None:
    """C moves the state; since then A and B were executed once each."""
    lookup = Calls("lookup")
    bench = Bench(lookup.tool, script=[C, A, B, A, B, claim("done")], **SAME)

    run = bench.run()

    assert (run.reason, run.version) == ("repeated-proposal", 1)
    assert [made["item"] for made in lookup.made] == ["c", "a", "b"]
    assert bench.stop(run)["fingerprint"] == _mark(1, LOOKUP, A["arguments"])


STAMPS = count()


def _stamped(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"status": "open", "checked_at": next(STAMPS)}


@pytest.mark.accept("TRM-09")
def test_a_volatile_field_of_a_result_does_not_hide_the_loop() -> None:
    lookup = Calls("lookup", _stamped, volatile=frozenset({"checked_at"}))
    bench = Bench(lookup.tool, script=[A] * 9, **SAME)

    run = bench.run()

    assert (run.reason, run.version, len(lookup.made)) == ("repeated-proposal", 1, 2)


@pytest.mark.accept("TRM-09")
def test_a_volatile_field_of_a_proposal_does_not_hide_the_loop() -> None:
    lookup = Calls("lookup", volatile=frozenset({"request_id"}))
    script = [ask("lookup", item="a", request_id=number) for number in range(9)]
    bench = Bench(lookup.tool, script=script, **SAME)

    run = bench.run()

    assert (run.reason, run.version, len(lookup.made)) == ("repeated-proposal", 1, 2)


@pytest.mark.accept("TRM-09")
def test_only_what_the_contract_marks_is_left_out() -> None:
    lookup = Calls("lookup", _stamped, volatile=frozenset({"request_id"}))
    bench = Bench(lookup.tool, script=[A] * 9, **SAME)

    run = bench.run(budget={"steps": 5})

    assert (run.reason, run.version, len(lookup.made)) == ("step-budget-exhausted", 5, 5)


# ---- lack of progress ----------------------------------------------------------------------------


def _always_new() -> Calls:
    """A tool that tells something else each time, and never anything useful."""
    numbers = count()
    return Calls("lookup", lambda arguments: f"useless text {next(numbers)}")


@pytest.mark.accept("TRM-10")
@pytest.mark.parametrize(
    ("proposals", "reason", "executed"),
    [
        ([A, A, A, A, A], "no-progress", "aaa"),
        ([A, B, A, B, A, B, A], "oscillation", "ababab"),
        ([A, B, C, A, B, C, A, B, C, A], "oscillation", "abcabcabc"),
        ([C, A, A, A, A], "no-progress", "caaa"),  # what came once before is no alternation
        ([A, B, A, C, A, A], "no-progress", "abaca"),  # nor is what came once between
    ],
)
def test_an_action_executed_too_often_stops_the_run_whatever_it_tells(
    proposals: list[Any], reason: str, executed: str
) -> None:
    lookup = _always_new()
    bench = Bench(lookup.tool, script=proposals, no_progress=NoProgress(times=3, window=9))

    run = bench.run()

    assert (run.status, run.reason) == ("failed", reason)
    assert "".join(made["item"] for made in lookup.made) == executed


@pytest.mark.accept("TRM-10")
def test_an_action_that_comes_back_after_the_window_goes_on() -> None:
    lookup = _always_new()
    others = [ask("lookup", item=item) for item in "bcde"]
    script = [A, A, *others, A, A, claim("done")]
    bench = Bench(lookup.tool, script=script, no_progress=NoProgress(times=3, window=4))

    run = bench.run()

    assert (run.status, len(lookup.made)) == ("completed", 8)


@pytest.mark.accept("TRM-10")
def test_the_detector_can_be_off_and_is_for_the_runner_vectors() -> None:
    lookup = _always_new()
    bench = Bench(lookup.tool, script=[*[A] * 12, claim("done")], no_progress=None)
    assert bench.run().status == "completed"

    outcome = replay(
        {
            "options": {
                "maxSteps": 12,
                "maxModelCalls": 99,
                "maxToolCalls": 99,
                "modelTimeoutMs": 10,
                "toolTimeoutMs": 10,
                "deadlineMs": 1_000,
            },
            "proposals": [A] * 12,
            "results": [{"status": "success", "observation": f"{n}"} for n in range(12)],
            "verify": [],
        }
    )
    assert (outcome.reason, outcome.state["toolCalls"]) == ("step-budget-exhausted", 12)


@pytest.mark.accept("TRM-10")
def test_the_detector_is_on_by_default_and_refuses_nonsense() -> None:
    lookup = _always_new()
    default = NoProgress()

    run = Bench(lookup.tool, script=[A] * 15).run()

    assert (run.reason, len(lookup.made)) == ("no-progress", default.times)
    for times, window in ((1, 4), (5, 4)):
        with pytest.raises(InvalidDefinition):
            NoProgress(times=times, window=window)


@pytest.mark.accept("TRM-11")
def test_the_same_action_is_executed_again_once_the_state_has_changed() -> None:
    """The second A repeats what is known, and would be the last one but for what B tells."""
    answers = {"a": "nothing new", "b": "something new"}
    lookup = Calls("lookup", lambda arguments: answers[arguments["item"]])
    bench = Bench(lookup.tool, script=[A, A, B, A, claim("done")])

    run = bench.run()

    assert (run.status, run.version) == ("completed", 2)
    assert [made["item"] for made in lookup.made] == ["a", "a", "b", "a"]


# ---- cancellation --------------------------------------------------------------------------------


class InFlight:
    """A run with one call of a kind under way, which ends only when it sees the abort."""

    def __init__(self, kind: str, clock: Clock | None = None) -> None:
        self.started, self.aborted = threading.Event(), threading.Event()
        self.after: list[str] = []  # what was begun once the call under way had begun
        self.asked = self.called = 0
        self.kind = kind
        fleet = self.fleet = Fleet(database_url="sqlite://", clock=clock)

        @fleet.tool(side_effect="read", timeout_ms=600_000)
        def lookup(arguments: dict[str, Any], call: Any) -> str:
            self._blocking("read", call)
            return "a fact"

        @fleet.tool(side_effect="read", timeout_ms=600_000)
        async def stream(arguments: dict[str, Any], call: Any) -> str:
            await self._waiting("async-read")
            return "a fact"

        @fleet.tool(**WRITES, query=self._query, timeout_ms=600_000)
        def save(arguments: dict[str, Any], call: Any) -> dict[str, Any]:
            self._blocking("write", call)
            return {"number": 1}

        @fleet.tool(
            **{**WRITES, "intent": lambda arguments, run: "draft:async"},
            query=self._query,
            timeout_ms=600_000,
        )
        async def upload(arguments: dict[str, Any], call: Any) -> dict[str, Any]:
            await self._waiting("async-write")
            return {"number": 1}

        fleet.model("default", self)
        tools = (lookup, stream, save, upload)
        loop = AgentLoop(name="loop", actions=tools, verify=self._verify)
        fleet.workflow(Workflow(name="work", stages=[loop], budget=Budget(deadline_ms=600_000)))
        self.statuses: list[str] = []
        run_id = fleet.enqueue("work", goal="test", run_id="in-flight")
        self.driven = Driven(fleet, run_id)
        assert self.started.wait(PATIENCE_S)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        self.asked += 1
        await self._waiting("model")
        tools = {"read": "lookup", "async-read": "stream", "write": "save", "async-write": "upload"}
        proposal = claim("done")
        if self.kind in tools:
            proposal = ask(tools[self.kind], number=1)
        yield ToolCall("1", RAW, proposal)
        yield Stop("end")

    def _verify(self, claimed: Any, call: Any) -> bool:
        self._blocking("verification", call)
        return True

    def _query(self, arguments: dict[str, Any], call: Any) -> dict[str, Any]:
        self.statuses.append(self.fleet.get("in-flight").status)
        return {"number": 1}

    def _begins(self, kind: str) -> bool:
        if self.started.is_set():
            self.after.append(kind)
        elif kind == self.kind:
            self.started.set()
            return True
        return False

    def _blocking(self, kind: str, call: Any) -> None:
        if self._begins(kind):
            if call.aborted.wait(PATIENCE_S):
                self.aborted.set()
            raise RuntimeError("aborted")

    async def _waiting(self, kind: str) -> None:
        if self._begins(kind):
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.aborted.set()
                raise


READS = ["model", "read", "async-read", "verification"]
IN_FLIGHT_WRITES = ["write", "async-write"]


@pytest.mark.accept("TRM-12")
@pytest.mark.parametrize("kind", [*READS, *IN_FLIGHT_WRITES])
def test_a_cancel_aborts_the_call_under_way_and_nothing_new_starts(kind: str) -> None:
    clock = Clock()
    world = InFlight(kind, clock)

    stored = world.fleet.cancel("in-flight")

    assert stored.status == "cancelling"
    assert world.aborted.wait(PATIENCE_S)
    until(lambda: world.driven.status != "cancelling", "the end of the call")
    run = world.fleet.get("in-flight")
    assert run.status == ("reconciling" if kind in IN_FLIGHT_WRITES else "cancelled")
    clock.advance(1_000)  # the query of a write is due
    world.driven.join()
    assert world.after == []
    calls = 0 if kind in ("model", "verification") else 1
    run = world.fleet.get("in-flight")
    assert (run.budget_used["steps"], run.model_calls, run.tool_calls) == (1, 1, calls)
    trace = world.fleet.trace("in-flight")
    assert len(details(trace, "tool.started")) == calls
    assert details(trace, "completion.verified") == []


@pytest.mark.accept("TRM-13")
@pytest.mark.parametrize("kind", IN_FLIGHT_WRITES)
def test_a_cancel_over_a_write_is_reconciled_and_not_called_cancelled(kind: str) -> None:
    clock = Clock()
    world = InFlight(kind, clock)

    world.fleet.cancel("in-flight")

    until(lambda: world.driven.status != "cancelling", "the end of the call")
    run = world.fleet.get("in-flight")
    assert (run.status, run.reason) == ("reconciling", "unknown-effect")
    trace = world.fleet.trace(run)
    stop = stop_of(trace)
    assert (stop["reason"], stop["trigger"]) == ("unknown-effect", "cancellation")
    [required] = details(trace, "effect.reconciliation-required")
    assert (required["trigger"], required["recovery"]) == ("cancellation", "query")
    [effect] = world.fleet.ledger.effects(unresolved=True)
    assert (effect["status"], effect["trigger"]) == ("unknown", "cancellation")

    clock.advance(1_000)  # the query is due; it finds the record
    world.driven.join()
    assert world.statuses == ["reconciling"]
    settled = world.fleet.get("in-flight")
    assert settled.status == "handed_off"  # applied, and no compensation is declared
    [handoff] = world.fleet.ledger.people.handoffs(run_id="in-flight")
    assert handoff["package"]["effect"]["status"] == "applied"
