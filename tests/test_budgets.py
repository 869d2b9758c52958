"""Budgets: each is a counter of its own, paid before the call, and names itself when it is
spent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import AgentLoop, Budget, Confirm, Fleet, Read, Workflow
from handrail.agent.budget import (
    CODE_OF,
    TASK_TYPES,
    BudgetLeft,
    CallLimits,
    Phase,
    call_limit,
    charge,
    charge_more,
    worst_case_ms,
)
from handrail.agent.fixed import Verify
from handrail.agent.retry import Retry
from handrail.agent.stage import Action, Stage
from handrail.agent.status import Reason
from handrail.agent.tools import FOREVER, Principal, Tool, ToolContract
from handrail.broker.message import StepMessage
from handrail.errors import InvalidBudget, InvalidDefinition
from handrail.gateway.model import (
    RAW,
    Folded,
    ModelBroke,
    ModelEvent,
    ModelGateway,
    ModelRequest,
    OutputOverflow,
    Stop,
    Text,
    ToolCall,
    fold,
)
from handrail.runs import Run
from handrail.testing.people import agree
from handrail.testing.vectors import replay
from tests.control import PATIENCE_S, Clock, Driven, ask, claim, details, stop_of, until

MAY_RAISE = Principal("boss", frozenset({"budget:raise"}))


class Asked:
    """A gateway of one function; it keeps the requests, and makes one attempt a call."""

    def __init__(self, propose: Callable[[int, ModelRequest], Any]) -> None:
        self._propose = propose
        self.requests: list[ModelRequest] = []

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        self.requests.append(request)
        yield ToolCall("1", RAW, self._propose(len(self.requests) - 1, request))
        yield Stop("end")


def restless(number: int, request: ModelRequest) -> Any:
    """A planner that never finishes: each round it looks something else up."""
    return ask("lookup", number=number)


def never_content(claimed: Any, call: Any) -> bool:
    return False


def content(claimed: Any, call: Any) -> bool:
    return True


class Bench:
    """A fleet with the read `lookup` and the write `save_draft`, and a record of their calls."""

    def __init__(
        self,
        model: ModelGateway | None = None,
        *,
        verify: Callable[..., Any] = content,
        clock: Clock | None = None,
        limits: CallLimits | None = None,
        on_lookup: Callable[[Any], object] | None = None,
        on_save: Callable[[Any], object] | None = None,
        **loop: Any,
    ) -> None:
        self.fleet = Fleet(database_url="sqlite://", clock=clock)
        self.calls: list[tuple[str, Any]] = []
        self.timeouts: list[int] = []

        @self.fleet.tool(side_effect="read", timeout_ms=600_000)
        def lookup(arguments: dict[str, Any], call: Any) -> str:
            self.calls.append(("lookup", arguments["number"]))
            self.timeouts.append(call.timeout_ms)
            if on_lookup is not None:
                on_lookup(call)
            return f"fact {arguments['number']}"

        @self.fleet.tool(
            side_effect="idempotent",
            approval="never",
            intent=lambda arguments, run: f"draft:{arguments['number']}",
            guarantee="idempotency-key",
            key_valid_for_ms=FOREVER,
            query=lambda arguments, call: {"saved": arguments["number"]},
            timeout_ms=600_000,
        )
        def save_draft(arguments: dict[str, Any], call: Any) -> dict[str, Any]:
            self.calls.append(("save_draft", arguments["number"]))
            if on_save is not None:
                on_save(call)
            return {"saved": arguments["number"]}

        self.lookup, self.save_draft = lookup, save_draft
        self.model: Any = model or Asked(restless)
        self.fleet.model("default", self.model)
        self.loop = AgentLoop(
            name="loop",
            actions=(lookup, save_draft),
            verify=verify,
            **{"no_progress": None, **loop},
        )
        self.fleet.workflow(
            Workflow(name="work", stages=[self.loop], limits=limits or CallLimits())
        )

    def run(self, workflow: str = "work", **options: Any) -> Run:
        options.setdefault("principal", MAY_RAISE)
        return self.fleet.run(workflow, goal="test", **options)

    @property
    def requests(self) -> list[ModelRequest]:
        """What the model was asked, call by call, where it keeps that."""
        asked: list[ModelRequest] = self.model.requests
        return asked

    def stop(self, run: Run) -> dict[str, Any]:
        return stop_of(self.fleet.trace(run))


# ---- what a run may spend -----------------------------------------------------------------------

EIGHT = {
    "steps": "stepBudget",
    "model_calls": "modelCallBudget",
    "tool_calls": "toolCallBudget",
    "tokens": "tokenBudget",
    "cost_microusd": "costBudget",
    "deadline_ms": "deadline",
    "concurrency": "concurrencyBudget",
    "output_bytes": "output size",
}


@pytest.mark.accept("BUD-01")
@pytest.mark.parametrize("missing", EIGHT)
def test_a_budget_that_is_left_out_has_the_default_of_its_task_type(missing: str) -> None:
    bench = Bench()
    bench.fleet.workflow(
        Workflow(name="question", stages=[bench.loop], task_type="read-only-question")
    )
    given = {name: 1 for name in EIGHT if name != missing}

    run_id = bench.fleet.enqueue("question", goal="test", budget=given)

    [accepted] = details(bench.fleet.trace(run_id), "run.accepted")
    default = TASK_TYPES["read-only-question"]
    assert accepted["budget"][missing] == getattr(default, missing)
    assert {name: accepted["budget"][name] for name in given} == given


@pytest.mark.accept("BUD-01")
@pytest.mark.parametrize("task_type", TASK_TYPES)
@pytest.mark.parametrize("name", EIGHT)
def test_no_budget_of_a_task_type_is_unlimited(task_type: str, name: str) -> None:
    limit = getattr(TASK_TYPES[task_type], name)

    assert type(limit) is int and 0 < limit < 10**9
    for unlimited in (None, float("inf"), -1):
        with pytest.raises(InvalidBudget, match=name):
            Budget().altered({name: unlimited})


@pytest.mark.accept("BUD-02")
@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("steps", "step-budget-exhausted"),
        ("model_calls", "model-call-budget-exhausted"),
        ("tool_calls", "tool-call-budget-exhausted"),
    ],
)
def test_a_planner_that_never_finishes_spends_exactly_its_budget(
    name: str, reason: str, limit: int
) -> None:
    bench = Bench()

    run = bench.run(budget={name: limit})

    assert (run.status, run.reason) == ("budget_exhausted", reason)
    assert run.budget_used[name] == limit
    assert run.budget_left[name] == 0
    assert len(bench.calls) == limit  # one look-up a round, and none beyond


@given(steps=st.integers(0, 9), model_calls=st.integers(0, 9), tool_calls=st.integers(0, 9))
def test_whichever_of_the_three_is_smallest_ends_the_run(
    steps: int, model_calls: int, tool_calls: int
) -> None:
    """Steps are looked at before model calls, and tool calls only once a tool is proposed."""
    outcome = replay(
        _case(
            proposals=[ask("lookup", number=number) for number in range(12)],
            results=[{"status": "success", "observation": f"fact {n}"} for n in range(12)],
            maxSteps=steps,
            maxModelCalls=model_calls,
            maxToolCalls=tool_calls,
        )
    )

    rounds = min(steps, model_calls, tool_calls)
    if rounds == steps:
        reason = "step-budget-exhausted"
    elif rounds == model_calls:
        reason = "model-call-budget-exhausted"
    else:
        reason = "tool-call-budget-exhausted"
    assert outcome.reason == reason
    assert outcome.state["toolCalls"] == rounds
    asked_in_vain = reason == "tool-call-budget-exhausted"
    assert outcome.state["modelCalls"] == rounds + asked_in_vain


def _case(
    proposals: list[Any],
    results: list[Any] | None = None,
    verify: list[bool] | None = None,
    faults: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A scripted case with a virtual clock; limits that are not given are generous."""
    generous = {
        "maxSteps": 99,
        "maxModelCalls": 99,
        "maxToolCalls": 99,
        "modelTimeoutMs": 8_000,
        "toolTimeoutMs": 5_000,
        "deadlineMs": 38_000,
    }
    return {
        "goal": "test",
        "options": {**generous, **options},
        "proposals": proposals,
        "results": results or [],
        "verify": verify or [],
        "faults": faults or {},
    }


# ---- a step limit alone never suffices ----------------------------------------------------------


@pytest.mark.accept("BUD-03")
def test_a_tool_that_would_run_for_half_an_hour_is_cut_off_at_its_own_limit() -> None:
    saw_abort = threading.Event()
    bench = Bench(on_lookup=_works_until_aborted(saw_abort), limits=CallLimits(tool_ms=30))

    run = bench.run(budget={"steps": 5})

    assert (run.status, run.reason) == ("failed", "tool-failed")
    assert saw_abort.wait(PATIENCE_S)
    assert bench.timeouts == [30]


@pytest.mark.accept("BUD-03")
def test_a_tool_that_would_run_for_half_an_hour_is_cut_off_at_the_deadline() -> None:
    saw_abort = threading.Event()
    # The ledger's clock stands still: the deadline counts from the claim, whatever came before.
    bench = Bench(
        on_lookup=_works_until_aborted(saw_abort),
        clock=Clock(),
        limits=CallLimits(tool_ms=1_800_000),
    )

    run = bench.run(budget={"steps": 5, "deadline_ms": 150})

    assert (run.status, run.reason) == ("budget_exhausted", "deadline-exhausted")
    assert saw_abort.wait(PATIENCE_S)
    assert len(bench.calls) == 1


def _works_until_aborted(saw_abort: threading.Event) -> Callable[[Any], None]:
    def work(call: Any) -> None:
        if call.aborted.wait(1_800):
            saw_abort.set()

    return work


# ---- retries are calls --------------------------------------------------------------------------

QUICK = Retry(attempts=3, base_ms=2)


def failing(times: int, error: Callable[[], BaseException]) -> Asked:
    """A model that fails so often, and then claims to be done."""

    def propose(number: int, request: ModelRequest) -> Any:
        if number < times:
            raise error()
        return claim("done")

    return Asked(propose)


@pytest.mark.accept("BUD-04")
def test_a_model_call_that_was_retried_twice_costs_one_step_and_three_calls() -> None:
    bench = Bench(failing(2, ConnectionResetError), retry=QUICK)

    run = bench.run()

    assert (run.status, run.answer) == ("completed", "done")
    assert (run.budget_used["steps"], run.budget_used["model_calls"]) == (1, 3)
    assert len(bench.requests) == 3  # the provider counts what was charged
    trace = bench.fleet.trace(run)
    assert len(details(trace, "observation.built")) == 1
    assert [failed["attempt"] for failed in details(trace, "model.failed")] == [1, 2]
    assert [received["modelCalls"] for received in details(trace, "proposal.received")] == [3]


def test_every_retry_is_charged_in_the_ledger_before_it_is_made() -> None:
    seen: list[int] = []

    def propose(number: int, request: ModelRequest) -> Any:
        seen.append(bench.fleet.get("retried").budget_used["model_calls"])
        if number < 2:
            raise ConnectionResetError
        return claim("done")

    bench = Bench(Asked(propose), retry=QUICK)

    bench.run(run_id="retried")

    assert seen == [1, 2, 3]


def test_without_a_policy_a_failed_model_call_stops_the_run() -> None:
    bench = Bench(failing(1, ConnectionResetError))

    run = bench.run()

    assert (run.status, run.reason, run.model_calls) == ("failed", "model-failed", 1)


@pytest.mark.accept("RTY-03", "RTY-14")
@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (lambda: ConnectionResetError(), 3),
        (lambda: TimeoutError(), 3),
        (lambda: ModelBroke("overloaded", retryable=True), 3),
        (lambda: ModelBroke("the key was refused"), 1),
        (lambda: ValueError("a parameter is wrong"), 1),
    ],
    ids=["reset", "upstream-time-out", "overloaded", "refused", "parameter"],
)
def test_only_a_failure_that_may_pass_is_retried(
    error: Callable[[], BaseException], calls: int
) -> None:
    bench = Bench(failing(9, error), retry=QUICK)

    run = bench.run()

    assert (run.status, run.reason, run.model_calls) == ("failed", "model-failed", calls)


def test_a_model_call_that_timed_out_is_retried_and_charged() -> None:
    class Slow:
        requests: list[ModelRequest] = []  # noqa: RUF012  # of this one test

        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
            self.requests.append(request)
            if len(self.requests) == 1:
                await never()
            yield ToolCall("1", RAW, claim("done"))
            yield Stop("end")

    bench = Bench(Slow(), retry=QUICK, limits=CallLimits(model_ms=200))

    run = bench.run()

    assert (run.status, run.model_calls) == ("completed", 2)
    [failed] = details(bench.fleet.trace(run), "model.failed")
    assert failed["timedOut"] is True


async def never() -> None:
    await asyncio.get_running_loop().create_future()


def test_retries_that_use_up_the_model_calls_stop_the_run_for_that_budget() -> None:
    bench = Bench(failing(9, ConnectionResetError), retry=Retry(attempts=9, base_ms=1))

    run = bench.run(budget={"model_calls": 2})

    assert (run.status, run.reason) == ("budget_exhausted", "model-call-budget-exhausted")
    assert len(bench.requests) == 2


def test_a_pause_that_would_reach_the_deadline_is_not_begun() -> None:
    """The original failure stands at once; the day-long pause of this policy was not waited out."""
    day = 24 * 3_600_000
    bench = Bench(
        failing(9, ConnectionResetError),
        retry=Retry(base_ms=day, cap_ms=day, max_pause_ms=day),
    )

    run = bench.run()

    assert (run.status, run.reason, run.model_calls) == ("failed", "model-failed", 1)


def test_a_cancel_ends_the_pause_and_no_attempt_follows() -> None:
    failed = threading.Event()

    def propose(number: int, request: ModelRequest) -> Any:
        failed.set()
        raise ConnectionResetError

    minute = 60_000
    bench = Bench(Asked(propose), retry=Retry(base_ms=minute, cap_ms=minute, max_pause_ms=minute))
    driven = Driven(bench.fleet, bench.fleet.enqueue("work", goal="test", run_id="paused"))
    assert failed.wait(PATIENCE_S)

    bench.fleet.cancel("paused")

    driven.join()
    run = bench.fleet.get("paused")
    assert (run.status, run.reason, run.model_calls) == ("cancelled", "cancelled", 1)
    assert len(bench.requests) == 1


@given(attempt=st.integers(0, 60), chance=st.floats(0, 1, exclude_max=True))
def test_a_pause_doubles_up_to_the_cap_and_carries_jitter(attempt: int, chance: float) -> None:
    base = min(4_000, 250 * 2**attempt)

    pause = Retry().pause_ms(attempt, chance)

    assert base // 2 <= pause < base + base // 2


@pytest.mark.parametrize("name", ["attempts", "base_ms", "cap_ms", "max_pause_ms"])
@pytest.mark.parametrize("value", [0, 1.5, True, None])
def test_a_retry_policy_wants_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(InvalidDefinition, match=name):
        Retry(**{name: value})


# ---- limits of single tools ---------------------------------------------------------------------


@pytest.mark.accept("BUD-05")
@pytest.mark.parametrize("tool", ["lookup", "save_draft"], ids=["read", "write"])
def test_a_tool_with_a_limit_of_its_own_is_refused_beyond_it(tool: str) -> None:
    bench = Bench(Asked(lambda number, request: ask(tool, number=number)))

    run = bench.run(budget={"tool_calls": 5, "per_tool": {tool: 1}})

    assert (run.status, run.reason) == ("budget_exhausted", "tool-call-budget-exhausted")
    assert bench.calls == [(tool, 0)]
    assert run.budget_left["tool_calls"] == 4
    [rejected] = details(bench.fleet.trace(run), "proposal.rejected")
    assert rejected["stable_reason_code"] == run.reason
    stop = bench.stop(run)
    name = f"tool_calls.{tool}"
    assert (stop["budget_used"][name], stop["budget_left"][name]) == (1, 0)


@pytest.mark.accept("BUD-05")
def test_another_tool_may_still_be_called() -> None:
    script = [ask("lookup", number=1), ask("save_draft", number=1), claim("done")]
    bench = Bench(Asked(lambda number, request: script[number]))

    run = bench.run(budget={"per_tool": {"lookup": 1}})

    assert run.status == "completed"
    assert bench.calls == [("lookup", 1), ("save_draft", 1)]


@pytest.mark.accept("BUD-05")
def test_the_limit_of_a_tool_holds_in_fixed_stages_too() -> None:
    bench = Bench()
    bench.fleet.workflow(
        Workflow(
            name="fixed",
            stages=[Read(name, bench.lookup, lambda run: {"number": 1}) for name in ("a", "b")],
        )
    )

    run = bench.run("fixed", budget={"per_tool": {"lookup": 1}})

    assert (run.status, run.reason) == ("budget_exhausted", "tool-call-budget-exhausted")
    assert len(bench.calls) == 1


def test_nobody_is_asked_to_confirm_what_cannot_be_paid() -> None:
    bench = Bench()
    action = Action(bench.save_draft, {"number": 1})
    bench.fleet.workflow(Workflow(name="fixed", stages=[Confirm("confirm", lambda run: action)]))

    run = bench.run("fixed", budget={"tool_calls": 0})

    assert (run.status, run.reason) == ("budget_exhausted", "tool-call-budget-exhausted")
    assert bench.fleet.ledger.people.approvals() == []


# ---- output -------------------------------------------------------------------------------------


class Talkative:
    """A model that streams 150 bytes, ten at a time; it keeps how far it came and that it was
    closed.
    """

    def __init__(self, piece: str = "0123456789") -> None:
        self.piece = piece
        self.sent = 0
        self.closed = False

    async def stream(self, request: ModelRequest | None = None) -> AsyncIterator[ModelEvent]:
        try:
            for _ in range(15):
                self.sent += 1
                yield Text(self.piece)
            yield Stop("end")
        finally:
            self.closed = True


@pytest.mark.accept("BUD-09")
def test_a_stream_beyond_the_output_budget_is_stopped() -> None:
    model = Talkative()
    bench = Bench(model)

    run = bench.run(budget={"output_bytes": 100})

    assert (run.status, run.reason) == ("budget_exhausted", "output-budget-exhausted")
    assert (model.sent, model.closed) == (11, True)  # the piece that did not fit was the last
    assert (run.budget_used["output_bytes"], run.budget_left["output_bytes"]) == (100, 0)
    assert bench.stop(run)["budget_left"]["output_bytes"] == 0
    assert (run.answer, run.observations) == (None, ())


@pytest.mark.accept("BUD-09")
@given(limit=st.integers(0, 200), piece=st.text(min_size=1, max_size=12))
def test_no_more_is_kept_of_a_stream_than_the_budget_has_left(limit: int, piece: str) -> None:
    model = Talkative(piece)
    whole = piece * 15
    folded = Folded()

    async def read() -> str:
        try:
            await fold(model.stream(), output_bytes_left=limit, into=folded)
            kept = "".join(folded.text)
        except OutputOverflow as overflow:
            kept = overflow.kept
        assert model.closed  # at once, not when somebody collects it
        return kept

    kept = asyncio.run(read())

    assert len(kept.encode()) <= limit
    assert whole.startswith(kept)
    assert (kept == whole) == (len(whole.encode()) <= limit)
    assert folded.output_bytes <= limit


def test_output_of_attempts_that_failed_counts_too() -> None:
    class Breaks:
        calls = 0

        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
            self.calls += 1
            yield Text("x" * 40)
            if self.calls < 3:
                raise ConnectionResetError
            yield Text("y" * 30)
            yield Stop("end")

    bench = Bench(Breaks(), retry=QUICK)

    run = bench.run(budget={"output_bytes": 150})

    assert (run.status, run.budget_used["output_bytes"]) == ("completed", 150)


# ---- the deadline -------------------------------------------------------------------------------


@pytest.mark.accept("BUD-10")
def test_no_round_and_no_retry_moves_the_deadline() -> None:
    seen: list[int | None] = []

    def propose(number: int, request: ModelRequest) -> Any:
        seen.append(bench.fleet.get("steady").deadline_at)
        if number == 1:
            raise ConnectionResetError
        return ask("lookup", number=number) if number < 4 else claim("done")

    def look(call: Any) -> None:
        clock.advance(1_000)
        seen.append(bench.fleet.get("steady").deadline_at)

    clock = Clock()
    bench = Bench(Asked(propose), on_lookup=look, clock=clock, retry=QUICK)
    accepted_at = clock.now

    run = bench.run(run_id="steady", budget={"deadline_ms": 38_000})

    assert run.status == "completed"
    assert len(seen) == 8
    assert {*seen, run.deadline_at} == {accepted_at + 38_000}


@pytest.mark.accept("BUD-10")
def test_only_a_wait_for_a_person_moves_the_deadline_and_nothing_the_hard_expiry() -> None:
    clock = Clock()
    bench = Bench(Asked(lambda number, request: claim("done")), clock=clock)
    parked = _parks_for_approval(bench, clock)
    before = bench.fleet.ledger.read(parked.run_id)
    assert (before["deadline_at"], before["remaining_ms"]) == (None, 20_000)

    clock.advance(3_600_000)
    agree(bench.fleet, parked)

    after = bench.fleet.ledger.read(parked.run_id)
    assert after["deadline_at"] == clock.now + 20_000
    assert after["expires_at"] == before["expires_at"]


@pytest.mark.accept("BUD-10")
def test_the_hard_expiry_ends_a_run_that_waits_for_a_person() -> None:
    clock = Clock()
    bench = Bench(clock=clock)
    parked = _parks_for_approval(bench, clock, expires_ms=10 * 3_600_000)

    clock.advance(10 * 3_600_000)
    bench.fleet.make_reconciler(publish=lambda messages: None).sweep_until_quiet()

    run = bench.fleet.get(parked)
    assert (run.status, run.reason) == ("budget_exhausted", "expired")


def _parks_for_approval(bench: Bench, clock: Clock, **budget: int) -> Run:
    """Use 18 s of 38 s, then wait for a person."""

    def look(arguments: dict[str, Any], call: Any) -> str:
        clock.advance(18_000)
        return "known"

    contract = ToolContract(name="look", side_effect=bench.lookup.contract.side_effect)
    stages: list[Stage] = [
        Read("look", Tool(contract, look), lambda run: {}),
        Confirm("confirm", lambda run: Action(bench.save_draft, {"number": 1})),
        bench.loop,
    ]
    bench.fleet.workflow(Workflow(name="asks", stages=stages))
    run = bench.run("asks", budget={"deadline_ms": 38_000, **budget})
    assert run.status == "awaiting_approval"
    return run


@pytest.mark.accept("BUD-11")
def test_the_worst_case_is_every_decision_at_its_limit_and_every_pause_in_full() -> None:
    assert worst_case_ms(model_calls=4, model_ms=8_000, pauses=3, pause_ms=2_000) == 38_000


def _promises(answer_within_ms: int) -> Workflow:
    """Four decisions of at most 8 s, and between any two a pause of at most 2 s."""
    return Workflow(
        name="question",
        stages=[
            AgentLoop(
                name="loop",
                actions=(Bench().lookup,),
                verify=content,
                retry=Retry(attempts=4, max_pause_ms=2_000),
            )
        ],
        budget=Budget(model_calls=4, deadline_ms=38_000),
        limits=CallLimits(model_ms=8_000, tool_ms=5_000),
        answer_within_ms=answer_within_ms,
    )


@pytest.mark.accept("BUD-11", "BUD-12")
def test_a_definition_that_cannot_answer_in_time_is_refused() -> None:
    with pytest.raises(InvalidDefinition) as refused:
        _promises(30_000)

    assert "38 s" in str(refused.value)
    assert "30 s" in str(refused.value)


@pytest.mark.accept("BUD-12")
def test_a_definition_that_can_answer_in_time_is_accepted() -> None:
    assert _promises(38_000).worst_case_ms == 38_000


@pytest.mark.accept("BUD-13")
def test_tools_take_their_time_from_the_shared_deadline() -> None:
    """Added up, calls at their limits would take 53 s; under the deadline of 38 s they do not."""
    worst = worst_case_ms(
        model_calls=4, model_ms=8_000, pauses=3, pause_ms=2_000, tool_calls=3, tool_ms=5_000
    )
    assert worst == 53_000
    slow = {str(number): {"latencyMs": 7_999} for number in range(4)}
    slower = {str(number): {"latencyMs": 4_999} for number in range(3)}

    outcome = replay(
        _case(
            proposals=[*(ask("lookup", number=n) for n in range(3)), claim("done")],
            results=[{"status": "success", "observation": f"fact {n}"} for n in range(3)],
            faults={"propose": slow, "invoke": slower},
            maxModelCalls=4,
            maxToolCalls=3,
        )
    )

    assert (outcome.reason, outcome.end_ms) == ("deadline-exhausted", 38_000)


@pytest.mark.accept("BUD-14")
@pytest.mark.parametrize("own_ms", [5_000, 8_000], ids=["tool", "model"])
def test_a_call_gets_its_own_limit_or_the_time_left_whichever_is_less(own_ms: int) -> None:
    assert call_limit(own_ms, 38_000 - 36_000) == (2_000, True)
    assert call_limit(own_ms, 38_000) == (own_ms, False)


@pytest.mark.accept("BUD-14")
@pytest.mark.parametrize("operation", ["propose", "invoke"])
def test_with_36_of_38_seconds_used_a_call_is_cut_off_after_two(operation: str) -> None:
    """Five decisions of 7 s and one second more are 36 s; the next call never ends by itself."""
    late = {str(number): {"latencyMs": 7_000} for number in range(5)}
    late["5"] = {"latencyMs": 1_000}
    faults = {"propose": late, "invoke": {"5": {"end": "hang"}}}
    if operation == "propose":
        faults = {"propose": {**late, "6": {"end": "hang"}}}

    outcome = replay(
        _case(
            proposals=[ask("lookup", number=number) for number in range(8)],
            results=[{"status": "success", "observation": f"fact {n}"} for n in range(8)],
            faults=faults,
        )
    )

    last = outcome.calls[-1]
    assert (last["op"], last["startMs"], last["endMs"]) == (operation, 36_000, 38_000)
    assert outcome.reason == "deadline-exhausted"


@pytest.mark.accept("BUD-14")
def test_a_tool_of_a_late_round_is_told_the_time_that_is_left() -> None:
    clock = Clock()

    def look(call: Any) -> None:
        if len(bench.calls) == 1:
            clock.advance(36_000)

    bench = Bench(on_lookup=look, clock=clock, limits=CallLimits(model_ms=8_000, tool_ms=5_000))

    bench.run(budget={"deadline_ms": 38_000, "steps": 2})

    assert bench.timeouts[0] == 5_000
    assert bench.timeouts[1] <= bench.requests[1].remaining_ms <= 2_000


@pytest.mark.accept("BUD-15")
def test_run_round_call_and_retry_each_receive_the_time_that_remains() -> None:
    """With a deadline below every limit of a call, each layer is told less than the one before."""
    told: list[int] = []

    def propose(number: int, request: ModelRequest) -> Any:
        told.append(request.remaining_ms)
        if number in (0, 3):
            raise ConnectionResetError
        return ask("lookup", number=number) if number < 5 else claim("done")

    def look(call: Any) -> None:
        told.append(call.timeout_ms)

    def check(claimed: Any, call: Any) -> bool:
        told.append(call.timeout_ms)
        return True

    bench = Bench(
        Asked(propose),
        on_lookup=look,
        verify=check,
        limits=CallLimits(model_ms=600_000, tool_ms=600_000),
        retry=Retry(base_ms=8),
    )

    run = bench.run(budget={"deadline_ms": 60_000})

    assert run.status == "completed"
    assert len(told) == 10
    assert told[0] <= 60_000
    assert told == sorted(told, reverse=True)
    assert told[1] < told[0]  # a pause of at least 4 ms lies between the attempts


@pytest.mark.accept("BUD-15")
def test_a_retry_does_not_start_a_full_time_out_anew() -> None:
    """The second attempt would have 8 s of its own, and is cut off at the run's deadline."""

    class Hangs:
        calls = 0

        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
            self.calls += 1
            if self.calls == 1:
                raise ConnectionResetError
            await never()
            yield Stop("end")

    bench = Bench(Hangs(), clock=Clock(), retry=QUICK, limits=CallLimits(model_ms=8_000))

    run = bench.run(budget={"deadline_ms": 150})

    assert (run.status, run.reason, run.model_calls) == (
        "budget_exhausted",
        "deadline-exhausted",
        2,
    )


# ---- spent is spent -----------------------------------------------------------------------------


@pytest.mark.accept("BUD-18")
@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({"steps": 2}, "step-budget-exhausted"),
        ({"model_calls": 2}, "model-call-budget-exhausted"),
        ({"tool_calls": 1}, "tool-call-budget-exhausted"),
        ({"output_bytes": 60}, "output-budget-exhausted"),
        ({"tokens": 0}, "token-budget-exhausted"),
        ({"cost_microusd": 0}, "cost-budget-exhausted"),
        ({"deadline_ms": 0}, "deadline-exhausted"),
    ],
)
def test_no_other_model_is_asked_once_a_budget_is_spent(
    budget: dict[str, int], reason: str
) -> None:
    bench = Bench()
    spare = Asked(restless)
    bench.fleet.model("spare", spare)
    second = AgentLoop(name="second", actions=(bench.lookup,), verify=content, model="spare")
    bench.fleet.workflow(Workflow(name="two-models", stages=[bench.loop, second]))

    run = bench.run("two-models", budget=budget)

    assert (run.status, run.reason, run.ended) == ("budget_exhausted", reason, True)
    asked, called = len(bench.requests), len(bench.calls)
    epoch = bench.fleet.ledger.read(run.run_id)["epoch"]
    late = StepMessage(run_id=run.run_id, step=run.step, epoch=epoch)
    known = bench.fleet.workflows.keys()
    assert bench.fleet.ledger.claim(late.run_id, late.epoch, holder="late", known=known) is None
    again = bench.fleet.drive(run)
    assert (again.status, again.reason, again.budget_left) == (
        run.status,
        run.reason,
        run.budget_left,
    )
    assert (len(bench.requests), len(bench.calls)) == (asked, called)
    assert spare.requests == []


@pytest.mark.accept("BUD-19")
@pytest.mark.parametrize("end", ["raises", "times-out"])
def test_a_model_call_without_success_was_charged_all_the_same(end: str) -> None:
    class Unlucky:
        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
            if end == "raises":
                raise RuntimeError("the provider is down")
            await never()
            yield Stop("end")

    bench = Bench(Unlucky(), limits=CallLimits(model_ms=30))

    run = bench.run()

    assert (run.status, run.reason) == ("failed", "model-failed")
    assert (run.budget_used["steps"], run.model_calls) == (1, 1)


@pytest.mark.accept("BUD-19")
@pytest.mark.parametrize("tool", ["lookup", "save_draft"], ids=["read", "write"])
@pytest.mark.parametrize("end", ["raises", "times-out"])
def test_a_tool_call_without_success_was_charged_all_the_same(tool: str, end: str) -> None:
    def unlucky(call: Any) -> None:
        if end == "times-out":
            call.aborted.wait(PATIENCE_S)
        raise RuntimeError("the service is down")

    script = [ask(tool, number=1), claim("done")]
    clock = Clock()
    bench = Bench(
        Asked(lambda number, request: script[number]),
        clock=clock,
        on_lookup=unlucky,
        on_save=unlucky,
        limits=CallLimits(tool_ms=100),
    )
    driven = Driven(bench.fleet, bench.fleet.enqueue("work", goal="test", run_id="unlucky"))
    rests = {"failed", "reconciling"}
    until(lambda: driven.status in rests, "the end of the call")

    run = bench.fleet.get("unlucky")

    assert run.reason == ("tool-failed" if tool == "lookup" else "unknown-effect")
    assert (run.tool_calls, run.budget_used["tool_calls"]) == (1, 1)
    clock.advance(1_000)  # the query of a write is due
    driven.join()
    assert bench.fleet.get("unlucky").tool_calls == 1  # whatever a query said, nothing came back


@pytest.mark.accept("BUD-19")
def test_every_call_is_charged_while_it_is_still_under_way() -> None:
    script = [ask("lookup", number=1), ask("save_draft", number=1), claim("done")]
    seen: list[tuple[str, int]] = []

    def look(name: str, column: str) -> None:
        seen.append((name, bench.fleet.ledger.read("paid")[column]))

    def propose(number: int, request: ModelRequest) -> Any:
        look("model", "model_calls_left")
        return script[number]

    bench = Bench(
        Asked(propose),
        on_lookup=lambda call: look("read", "tool_calls_left"),
        on_save=lambda call: look("write", "tool_calls_left"),
    )

    bench.run(run_id="paid", budget={"model_calls": 5, "tool_calls": 5})

    assert seen == [("model", 4), ("read", 4), ("model", 3), ("write", 3), ("model", 2)]


@pytest.mark.accept("BUD-20")
@pytest.mark.parametrize(
    ("budget", "code", "reason"),
    [
        ({"deadline_ms": 0}, "DEADLINE_EXCEEDED", "deadline-exhausted"),
        ({"model_calls": 0}, "MODEL_BUDGET_EXHAUSTED", "model-call-budget-exhausted"),
        ({"tool_calls": 0}, "TOOL_BUDGET_EXHAUSTED", "tool-call-budget-exhausted"),
    ],
)
def test_the_three_codes_stand_for_their_stop_reasons(
    budget: dict[str, int], code: str, reason: str
) -> None:
    bench = Bench()

    run = bench.run(budget=budget)

    stop = bench.stop(run)
    assert (stop["code"], stop["reason"], run.reason) == (code, reason, reason)
    assert bench.calls == []
    assert CODE_OF[Reason(reason)] == code


# ---- task types ---------------------------------------------------------------------------------


@pytest.mark.accept("BUD-21")
def test_default_budgets_come_from_the_task_type_and_differ() -> None:
    bench = Bench()
    defaults = {}
    for task_type in ("read-only-question", "code-migration"):
        workflow = Workflow(name=task_type, stages=[bench.loop], task_type=task_type)
        bench.fleet.workflow(workflow)
        run_id = bench.fleet.enqueue(task_type, goal="test")
        [accepted] = details(bench.fleet.trace(run_id), "run.accepted")
        defaults[task_type] = accepted["budget"]
        assert accepted["budget"] == TASK_TYPES[task_type].to_json()

    question, migration = defaults["read-only-question"], defaults["code-migration"]
    assert [name for name in EIGHT if not question[name] < migration[name]] == []


@pytest.mark.accept("BUD-21")
@pytest.mark.parametrize("name", EIGHT)
def test_a_run_may_lower_a_budget_and_raises_it_only_with_permission(name: str) -> None:
    bench = Bench()
    default = TASK_TYPES["general"]
    higher = {name: getattr(default, name) + 1}

    with pytest.raises(InvalidBudget, match=name):
        bench.fleet.enqueue("work", goal="test", budget=higher, run_id="greedy")

    assert bench.fleet.runs() == []
    lowered = bench.fleet.enqueue("work", goal="test", budget={name: 0})
    raised = bench.fleet.enqueue("work", goal="test", budget=higher, principal=MAY_RAISE)
    for run_id, limit in ((lowered, 0), (raised, higher[name])):
        [accepted] = details(bench.fleet.trace(run_id), "run.accepted")
        assert accepted["budget"][name] == limit


@pytest.mark.accept("BUD-21")
def test_to_drop_the_limit_of_a_tool_is_to_raise_it() -> None:
    bench = Bench()
    budget = Budget(tool_calls=9, per_tool={"lookup": 2})
    bench.fleet.workflow(Workflow(name="limited", stages=[bench.loop], budget=budget))

    for raised in ({}, {"lookup": 3}):
        with pytest.raises(InvalidBudget, match=r"per_tool\.lookup"):
            bench.fleet.enqueue("limited", goal="test", budget={"per_tool": raised})

    bench.fleet.enqueue("limited", goal="test", budget={"per_tool": {"lookup": 1, "save_draft": 1}})
    bench.fleet.enqueue("limited", goal="test", budget={"per_tool": {}}, principal=MAY_RAISE)


# ---- completion and verification ----------------------------------------------------------------


@pytest.mark.accept("BUD-22")
def test_without_a_tool_call_left_a_completion_is_still_verified() -> None:
    checked: list[Any] = []

    def check(claimed: Any, call: Any) -> bool:
        checked.append(claimed)
        return True

    bench = Bench(Asked(lambda number, request: claim("done")), verify=check)

    run = bench.run(budget={"tool_calls": 0})

    assert (run.status, run.answer, checked) == ("completed", "done", ["done"])


@pytest.mark.accept("BUD-22")
def test_without_a_tool_call_left_a_tool_is_refused() -> None:
    bench = Bench()

    run = bench.run(budget={"tool_calls": 0})

    assert (run.reason, run.model_calls, bench.calls) == ("tool-call-budget-exhausted", 1, [])


@pytest.mark.accept("BUD-23")
def test_a_verification_uses_neither_model_nor_tool_calls_and_a_rejection_one_step() -> None:
    verdicts = iter([False, False, True])
    bench = Bench(
        Asked(lambda number, request: claim(number)), verify=lambda claimed, call: next(verdicts)
    )

    run = bench.run(budget={"tool_calls": 0})

    assert run.status == "completed"
    assert (run.model_calls, run.tool_calls) == (3, 0)  # one a decision, none a check
    assert run.step == 2
    assert run.budget_used["steps"] == 3
    assert run.budget_used["cost_microusd"] == 0


@pytest.mark.accept("BUD-23")
@pytest.mark.parametrize(
    ("options", "end_ms", "reason"),
    [
        ({"toolTimeoutMs": 5_000, "deadlineMs": 38_000}, 5_000, "verification-failed"),
        ({"toolTimeoutMs": 5_000, "deadlineMs": 3_000}, 3_000, "deadline-exhausted"),
    ],
    ids=["limit", "deadline"],
)
def test_a_verification_is_bounded_by_the_tools_limit_and_uses_the_deadline(
    options: dict[str, Any], end_ms: int, reason: str
) -> None:
    outcome = replay(
        _case(
            proposals=[claim("done")],
            verify=[True],
            faults={"verify": {"0": {"end": "hang"}}},
            **options,
        )
    )

    assert (outcome.reason, outcome.end_ms) == (reason, end_ms)


@pytest.mark.accept("BUD-23")
def test_a_verification_is_paid_from_the_cost_budget_before_it_is_made() -> None:
    paid: list[int] = []

    def check(claimed: Any, call: Any) -> bool:
        paid.append(bench.fleet.ledger.read("priced")["cost_microusd_left"])
        return False

    bench = Bench(
        Asked(lambda number, request: claim(number)), verify=check, verify_cost_microusd=300
    )

    run = bench.run(run_id="priced", budget={"cost_microusd": 700})

    assert paid == [400, 100]  # the third was not made: 300 do not fit
    assert (run.status, run.reason) == ("budget_exhausted", "cost-budget-exhausted")
    assert run.budget_used["cost_microusd"] == 600
    assert bench.stop(run)["budget_used"]["cost_microusd"] == 600


@pytest.mark.accept("BUD-23")
@pytest.mark.parametrize(("cost", "status"), [(300, "completed"), (299, "budget_exhausted")])
def test_a_fixed_verification_has_its_price_too(cost: int, status: str) -> None:
    bench = Bench()
    stages = [Verify("look", content, cost_microusd=300)]
    bench.fleet.workflow(Workflow(name="fixed", stages=stages))

    run = bench.run("fixed", budget={"cost_microusd": cost})

    assert run.status == status
    assert run.budget_used["cost_microusd"] == (300 if status == "completed" else 0)


# ---- every stop shows every budget --------------------------------------------------------------


STOPS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "completed": ([ask("lookup", number=1), claim("done")], {}),
    "clarification-required": ([{"kind": "clarify", "question": "Which order?"}], {}),
    "invalid-proposal": ([ask("nothing")], {}),
    "model-failed": ([ask("lookup", number=1)], {}),
    "repeated-proposal": ([ask("lookup", number=n) for n in (1, 1, 1)], {}),
    "step-budget-exhausted": ([ask("lookup", number=1)], {"steps": 1}),
    "tool-call-budget-exhausted": ([ask("lookup", number=1)], {"tool_calls": 0}),
    "deadline-exhausted": ([], {"deadline_ms": 0}),
}


@pytest.mark.accept("BUD-24")
@pytest.mark.parametrize("reason", STOPS)
def test_every_stop_shows_what_was_used_and_what_is_left_of_every_budget(reason: str) -> None:
    script, budget = STOPS[reason]
    bench = Bench(Asked(lambda number, request: script[number]))

    run = bench.run(budget={**budget, "per_tool": {"lookup": 7}})

    assert run.reason == reason
    stop = bench.stop(run)
    used, left = stop["budget_used"], stop["budget_left"]
    assert {*EIGHT, "tool_calls.lookup"} == used.keys() == left.keys()
    limits = TASK_TYPES["general"].altered({**budget, "per_tool": {"lookup": 7}}).to_json()
    limits["tool_calls.lookup"] = 7
    assert {name: used[name] + left[name] for name in used} == {n: limits[n] for n in used}
    assert {name: left[name] for name in run.budget_left} == dict(run.budget_left)
    assert {name: used[name] for name in run.budget_used} == dict(run.budget_used)
    assert min(*used.values(), *left.values()) >= 0


@pytest.mark.accept("BUD-24")
def test_a_cancelled_run_shows_its_budgets_too() -> None:
    bench = Bench()
    run_id = bench.fleet.enqueue("work", goal="test")

    run = bench.fleet.cancel(run_id)

    stop = bench.stop(run)
    assert stop["reason"] == "cancelled"
    assert stop["budget_used"] == dict.fromkeys(EIGHT, 0) | {
        "deadline_ms": stop["budget_used"]["deadline_ms"]
    }


# ---- the arithmetic -----------------------------------------------------------------------------

COUNTS = st.integers(0, 3)
LEFT = st.builds(
    BudgetLeft,
    steps=COUNTS,
    model_calls=COUNTS,
    tool_calls=COUNTS,
    tokens=COUNTS,
    cost_microusd=COUNTS,
    output_bytes=COUNTS,
)


@given(left=LEFT, phase=st.sampled_from(Phase), cancelled=st.booleans(), ms=st.integers(-1, 1))
def test_a_charge_takes_what_its_phase_costs_or_names_what_refuses_it(
    left: BudgetLeft, phase: Phase, cancelled: bool, ms: int
) -> None:
    paid = charge(left, phase, cancelled=cancelled, remaining_ms=ms)

    if isinstance(paid, Reason):
        assert cancelled or ms <= 0 or 0 in _counts(left).values()
        return
    assert not cancelled and ms > 0
    spent = {name: count - _counts(paid)[name] for name, count in _counts(left).items()}
    decides = phase is Phase.DECIDE
    reserves = phase in (Phase.DECIDE, Phase.READ) and left.tool_calls > 0
    assert (spent["steps"], spent["model_calls"], spent["tool_calls"]) == (
        decides,
        decides,
        reserves,
    )
    assert min(_counts(paid).values()) >= 0
    assert paid.tool_calls_available == left.tool_calls_available
    assert paid.settled().tool_calls == left.tool_calls  # what was not started is given back


@given(left=LEFT, calls=COUNTS, cost=COUNTS, ms=st.integers(-1, 1))
def test_a_further_call_is_paid_in_full_or_not_at_all(
    left: BudgetLeft, calls: int, cost: int, ms: int
) -> None:
    paid = charge_more(left, remaining_ms=ms, model_calls=calls, cost_microusd=cost)

    if ms <= 0:
        assert paid is Reason.DEADLINE_EXHAUSTED
    elif calls > left.model_calls:
        assert paid is Reason.MODEL_CALL_BUDGET_EXHAUSTED
    elif cost > left.cost_microusd:
        assert paid is Reason.COST_BUDGET_EXHAUSTED
    else:
        assert isinstance(paid, BudgetLeft)
        assert paid.model_calls == left.model_calls - calls
        assert paid.cost_microusd == left.cost_microusd - cost
        assert paid.steps == left.steps


def _counts(left: BudgetLeft) -> dict[str, int]:
    names = (f.name for f in fields(left) if f.name not in ("per_tool", "tool_calls_reserved"))
    return {name: getattr(left, name) for name in names}


@given(own=st.integers(1, 10**9), remaining=st.integers(-(10**9), 10**9))
def test_no_call_is_given_more_than_its_own_limit_or_the_time_left(
    own: int, remaining: int
) -> None:
    limit, bound = call_limit(own, remaining)

    assert limit == min(own, remaining)
    assert bound == (remaining <= own)


@given(
    st.dictionaries(st.sampled_from(sorted(EIGHT)), st.integers(0, 50)),
    st.dictionaries(st.sampled_from(sorted(EIGHT)), st.integers(0, 50)),
)
def test_a_budget_is_raised_exactly_where_a_limit_is_higher(
    one: dict[str, int], other: dict[str, int]
) -> None:
    mine, theirs = Budget().altered(one), Budget().altered(other)

    raised = mine.raised_over(theirs)

    assert {*raised} == {n for n in EIGHT if getattr(mine, n) > getattr(theirs, n)}
