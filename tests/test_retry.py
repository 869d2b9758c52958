"""Retries: what is made again, when, and who pays for it. Every attempt is a call."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import pytest

from handrail import (
    Action,
    AgentLoop,
    Budget,
    Checked,
    Commit,
    Confirm,
    Fleet,
    Read,
    Retry,
    Verify,
    Workflow,
)
from handrail.agent.budget import BudgetLeft, CallLimits, charge_more
from handrail.agent.status import Reason
from handrail.agent.tools import FOREVER, Principal, RunFacts, Tool
from handrail.errors import InvalidDefinition, ToolRefused, ToolUnclear
from handrail.gateway.model import ModelBroke, Scripted
from handrail.runs import Run
from handrail.tasks.calls import ToolCall
from handrail.testing.people import agree
from handrail.testing.virtual_fleet import VirtualFleet
from tests.control import ask, claim, details, stop_of
from tests.world import KINDS, LEASE_MS, Outside, World, look, open_world

LOOKUP: Final = ask("lookup", q="tea")
DONE: Final = claim("done")
MAY_RAISE: Final = Principal("boss", frozenset({"budget:raise"}))
#: Half-way of the jitter: the pauses of the default policy are 250, 500, 1000 ... ms.
HALF: Final = 0.5

Answer = Callable[[ToolCall], Any]


class Desk:
    """A fleet on virtual time with a read, a write and a model, and a record of what was called.

    `answers` says what a tool's call comes to: it may return, raise, or give something to await.
    """

    def __init__(self, virtual: VirtualFleet) -> None:
        self.virtual, self.fleet = virtual, virtual.fleet
        virtual.runtime.chance = lambda: HALF
        self.called: list[tuple[str, int]] = []  # what, and when
        self.calls: list[ToolCall] = []
        self.answers: Answer = lambda call: "found"

    def read(self, name: str = "lookup", **contract: Any) -> Tool:
        usual: dict[str, Any] = {"side_effect": "read", "timeout_ms": 1_000, "retry": Retry()}
        return self.fleet.tool(name, **usual | contract)(self._work)

    def write(self, name: str = "save", **contract: Any) -> Tool:
        usual: dict[str, Any] = {
            "side_effect": "idempotent",
            "approval": "never",
            "intent": lambda arguments, run: f"draft:{arguments.get('id')}",
            "guarantee": "idempotency-key",
            "key_valid_for_ms": FOREVER,
            "takeover": "operations",
        }
        return self.fleet.tool(name, **usual | contract)(self._work)

    async def _work(self, arguments: dict[str, Any], call: ToolCall) -> Any:
        self.called.append((call.tool, self.virtual.loop.now_ms))
        self.calls.append(call)
        found = self.answers(call)
        return await found if asyncio.iscoroutine(found) else found

    async def check(self, answer: Any, call: ToolCall) -> bool:
        return True

    def loop(self, *tools: Tool, **options: Any) -> None:
        """The workflow `task`: one loop over these tools, whose claims are always true."""
        limits = options.pop("limits", CallLimits())
        loop = AgentLoop(name="loop", actions=tools, verify=self.check, **options)
        self.fleet.workflow(Workflow(name="task", stages=[loop], limits=limits))

    def stages(self, *stages: Any, **options: Any) -> None:
        """The workflow `task`: these stages."""
        self.fleet.workflow(Workflow(name="task", stages=stages, **options))

    def run(self, *proposals: Any, **options: Any) -> Run:
        if proposals:
            self.fleet.model("default", Scripted(proposals))
        options.setdefault("principal", MAY_RAISE)
        return self.virtual.run("task", goal="any", **options)

    def trace(self, run: Run, kind: str) -> list[dict[str, Any]]:
        return details(self.fleet.trace(run), kind)


@pytest.fixture
def desk() -> Iterator[Desk]:
    with VirtualFleet() as virtual:
        yield Desk(virtual)


def failing(times: int, error: Callable[[], BaseException]) -> Answer:
    """What fails so often, and then answers."""
    left = [times]

    def answer(call: ToolCall) -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error()
        return "found"

    return answer


async def for_ever() -> None:
    await asyncio.Event().wait()


def the_query(run: RunFacts) -> dict[str, Any]:
    return {"q": "tea"}


# ---- no hidden retry -----------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """A real server that counts its requests. It answers with 503, and the model's every second
    request well.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: Counter[str] = Counter()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests[self.path] += 1
        well = self.path == "/model" and self.server.requests[self.path] % 2 == 0
        self.send_response(200 if well else 503)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def busy_server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def sent(server: Server, path: str, *, retries: int) -> bool:
    """One call over a transport that sends again by itself, as those of many SDKs do."""
    for _ in range(retries + 1):
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=5)
        try:
            connection.request("GET", path)
            if connection.getresponse().status < 500:
                return True
        finally:
            connection.close()
    return False


def against(server: Server, *, retries: int) -> Run:
    """A run of at most five steps whose model and tool both call the busy server."""
    fleet = Fleet(database_url="sqlite://")
    policy = Retry(attempts=2, base_ms=1)
    numbers = itertools.count()

    @fleet.tool(side_effect="read", retry=policy)
    def lookup(arguments: dict[str, Any], call: ToolCall) -> str:
        if not sent(server, "/tool", retries=retries):
            raise ToolRefused("503", retryable=True)
        return "found"

    def model(seen: dict[str, Any]) -> Any:
        if not sent(server, "/model", retries=retries):
            raise ModelBroke("503", retryable=True)
        return ask("lookup", q=next(numbers))

    fleet.model("default", model)
    loop = AgentLoop(name="loop", actions=(lookup,), verify=lambda *_: True, retry=policy)
    budget = Budget(steps=5, model_calls=20, tool_calls=20)
    fleet.workflow(Workflow(name="task", stages=[loop], budget=budget))
    run = fleet.run("task", goal="any")
    fleet.close()
    return run


@pytest.mark.accept("RTY-01")
def test_a_server_counts_the_calls_that_were_charged() -> None:
    with busy_server() as server:
        run = against(server, retries=0)

    assert (run.reason, run.budget_used["steps"]) == ("step-budget-exhausted", 5)
    assert server.requests == {"/model": run.model_calls, "/tool": run.tool_calls}
    assert (run.model_calls, run.tool_calls) == (10, 10)  # each retried once, and paid for


@pytest.mark.accept("RTY-01")
def test_the_count_sees_a_transport_that_sends_again_by_itself() -> None:
    """Otherwise the test before could not fail."""
    with busy_server() as server:
        run = against(server, retries=2)

    assert server.requests["/model"] > run.model_calls
    assert server.requests["/tool"] > run.tool_calls


# ---- the policy ----------------------------------------------------------------------------------

LARGEST_CHANCE: Final = 1 - 2**-53


@pytest.mark.accept("RTY-10")
@pytest.mark.parametrize(
    ("attempt", "least", "below"),
    [
        (0, 125, 375),
        (1, 250, 750),
        (2, 500, 1_500),
        (3, 1_000, 3_000),
        (4, 2_000, 6_000),  # the cap is applied before the jitter
        (5, 2_000, 6_000),
    ],
)
def test_a_pause_lies_within_its_bounds(attempt: int, least: int, below: int) -> None:
    policy = Retry()

    pauses = [policy.pause_ms(attempt, chance / 1_000) for chance in range(1_000)]

    assert policy.pause_ms(attempt, 0.0) == min(pauses) == least
    assert policy.pause_ms(attempt, HALF) == (least + below) // 2
    assert below - 2 < policy.pause_ms(attempt, LARGEST_CHANCE) < below
    assert pauses == sorted(pauses) and max(pauses) < below


@pytest.mark.accept("RTY-11")
@pytest.mark.parametrize("attempt", range(6))
def test_the_pauses_of_many_are_spread_around_their_base(attempt: int) -> None:
    chance = random.Random(attempt)
    policy = Retry()

    pauses = [policy.pause_ms(attempt, chance.random()) for _ in range(1_000)]

    base = min(4_000, 250 * 2**attempt)
    assert len(set(pauses)) > 100
    assert abs(sum(pauses) / len(pauses) - base) < 0.05 * base


@pytest.mark.accept("RTY-04", "RTY-12")
@pytest.mark.parametrize(
    ("min_call_ms", "remaining_ms", "follows"),
    [
        (1, 249, False),
        (1, 250, False),  # the pause would end at the deadline: too late
        (1, 251, True),
        (100, 349, False),
        (100, 350, True),
    ],
)
def test_less_time_than_the_pause_and_a_minimal_call_is_too_little(
    min_call_ms: int, remaining_ms: int, follows: bool
) -> None:
    policy = Retry(min_call_ms=min_call_ms)

    pause = policy.next_pause_ms(0, remaining_ms=remaining_ms, chance=HALF)

    assert pause == (250 if follows else None)


def test_after_the_last_attempt_there_is_none() -> None:
    policy = Retry(attempts=3)

    pauses = [policy.next_pause_ms(n, remaining_ms=99_000, chance=HALF) for n in range(3)]

    assert pauses == [250, 500, None]
    assert Retry(attempts=1).next_pause_ms(0, remaining_ms=99_000, chance=HALF) is None


def test_a_retry_of_a_read_reserves_a_call_or_names_the_budget_that_is_spent() -> None:
    left = BudgetLeft(
        steps=1, model_calls=1, tool_calls=1, tokens=1, cost_microusd=1, output_bytes=1
    )

    paid = charge_more(left, remaining_ms=1, tool_calls=1)

    assert isinstance(paid, BudgetLeft)
    assert (paid.tool_calls, paid.tool_calls_reserved) == (0, 1)
    spent = charge_more(paid, remaining_ms=1, tool_calls=1)
    assert spent is Reason.TOOL_CALL_BUDGET_EXHAUSTED
    assert charge_more(left, remaining_ms=0, tool_calls=1) is Reason.DEADLINE_EXHAUSTED


# ---- a read that fails for a reason that may pass ------------------------------------------------


@pytest.mark.accept("RTY-02")
def test_a_tool_call_that_was_retried_twice_is_three_calls_of_one_round(desk: Desk) -> None:
    desk.loop(desk.read())
    desk.answers = failing(2, ConnectionResetError)

    run = desk.run(LOOKUP, DONE, budget={"per_tool": {"lookup": 5}})

    assert (run.status, run.observations) == ("completed", ("found",))
    assert desk.called == [("lookup", 0), ("lookup", 250), ("lookup", 750)]
    assert (run.tool_calls, run.model_calls, run.budget_used["steps"]) == (3, 2, 2)
    assert run.budget_left["tool_calls.lookup"] == 2


@pytest.mark.accept("RTY-02")
def test_a_model_call_that_was_retried_twice_is_three_calls_of_one_round(desk: Desk) -> None:
    times: list[int] = []

    async def model(seen: dict[str, Any]) -> Any:
        times.append(desk.virtual.loop.now_ms)
        if len(times) < 3:
            raise ConnectionResetError
        return DONE

    desk.loop(desk.read(), retry=Retry())
    desk.fleet.model("default", model)

    run = desk.run()

    assert (run.status, times) == ("completed", [0, 250, 750])
    assert (run.model_calls, run.budget_used["steps"]) == (3, 1)


@pytest.mark.accept("RTY-02")
@pytest.mark.parametrize("fixed", [False, True])
def test_every_attempt_is_charged_in_the_ledger_before_it_is_made(fixed: bool, desk: Desk) -> None:
    seen: list[tuple[int, int]] = []

    def look_at_the_ledger(call: ToolCall) -> str:
        used = desk.fleet.get(call.run_id)
        limit = 24
        seen.append((limit - used.budget_left["tool_calls"], used.budget_left["tool_calls.lookup"]))
        if len(seen) < 3:
            raise ConnectionResetError
        return "found"

    desk.answers = look_at_the_ledger
    if fixed:
        desk.stages(Read("read", desk.read(), the_query))
        run = desk.run(budget={"per_tool": {"lookup": 9}})
    else:
        desk.loop(desk.read())
        run = desk.run(LOOKUP, DONE, budget={"per_tool": {"lookup": 9}})

    assert run.status == "completed"
    assert [left for _, left in seen] == [8, 7, 6]
    # The first one is the claim's: charged as reserved, which `budget_left` still shows as left.
    assert [used for used, _ in seen] == [0, 1, 2]
    assert run.tool_calls == 3


def _raises(error: BaseException) -> Answer:
    def answer(call: ToolCall) -> Any:
        raise error

    return answer


#: How a read may fail: what its call does, and whether that may pass.
FAILURES: Final[dict[str, tuple[Answer, bool]]] = {
    "connection-reset": (_raises(ConnectionResetError()), True),
    "upstream-time-out": (_raises(TimeoutError()), True),
    "no-answer-in-time": (lambda call: for_ever(), True),
    "rate-limited": (_raises(ToolRefused("rate-limited", retryable=True)), True),
    "explicit-5xx": (_raises(ToolRefused("503", retryable=True)), True),
    "parameter-error": (_raises(ToolRefused("bad-parameter")), False),
    "authentication": (_raises(ToolRefused("unauthenticated")), False),
    "content-policy": (_raises(ToolRefused("content-policy")), False),
    "a-bug": (_raises(ValueError("a parameter is wrong")), False),
    "not-known": (_raises(ToolUnclear("who knows")), False),
}


@pytest.mark.accept("RTY-03", "RTY-08")
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("fixed", [False, True])
def test_only_what_may_pass_is_tried_again(fixed: bool, failure: str, desk: Desk) -> None:
    desk.answers, may_pass = FAILURES[failure]
    if fixed:
        desk.stages(Read("read", desk.read(), the_query))
        run = desk.run()
    else:
        desk.loop(desk.read())
        run = desk.run(LOOKUP, DONE)

    assert len(desk.called) == run.tool_calls == (3 if may_pass else 1)
    told = failure in ("rate-limited", "explicit-5xx") and not fixed  # it goes back to the model
    assert (run.status, run.reason) == (
        ("completed", "completed") if told else ("failed", "tool-failed")
    )
    [last] = desk.trace(run, "run.stopped")
    assert run.observations == (("tool:lookup:failed:" + last_code(failure),) if told else ())
    assert last["remainingToolCalls"] == 24 - run.tool_calls


def last_code(failure: str) -> str:
    return {"rate-limited": "rate-limited", "explicit-5xx": "503"}[failure]


@pytest.mark.accept("RTY-03")
def test_a_model_that_was_refused_is_not_asked_again(desk: Desk) -> None:
    asked: list[int] = []

    async def model(seen: dict[str, Any]) -> Any:
        asked.append(1)
        raise ModelBroke("the content was refused")

    desk.loop(desk.read(), retry=Retry())
    desk.fleet.model("default", model)

    run = desk.run()

    assert (run.reason, len(asked), run.model_calls) == ("model-failed", 1, 1)


def test_a_read_without_a_policy_is_called_once(desk: Desk) -> None:
    desk.loop(desk.read(retry=None))
    desk.answers = failing(1, ConnectionResetError)

    run = desk.run(LOOKUP, DONE)

    assert (run.reason, len(desk.called)) == ("tool-failed", 1)


@pytest.mark.parametrize(("retry", "calls"), [(None, 3), (Retry(attempts=1), 1)])
def test_a_replayable_call_is_retried_unless_it_says_otherwise(
    retry: Retry | None, calls: int, desk: Desk
) -> None:
    desk.loop(desk.read("compute", side_effect="replayable", version="7", retry=retry))
    desk.answers = _raises(ConnectionResetError())

    run = desk.run(ask("compute", q="tea"), DONE)

    assert len(desk.called) == run.tool_calls == calls
    started = desk.trace(run, "tool.started")
    kept = ("arguments_hash", "contract_version", "state_version")
    assert len({tuple(call[key] for key in kept) for call in started}) == 1
    assert (started[0]["contract_version"], started[0]["state_version"]) == ("7", 0)


def test_each_attempt_is_in_the_trace(desk: Desk) -> None:
    desk.loop(desk.read())
    desk.answers = failing(2, ConnectionResetError)

    run = desk.run(LOOKUP, DONE)

    started = desk.trace(run, "tool.started")
    assert len({call["tool_call_id"] for call in started}) == 3
    failed = desk.trace(run, "tool.failed")
    assert [(f["attempt"], f["retry_in_ms"]) for f in failed] == [(1, 250), (2, 500)]
    [verified] = desk.trace(run, "result.verified")
    assert verified["evidence_ref"] == f"call:{started[-1]['tool_call_id']}"
    assert [call.attempt for call in desk.calls] == [1, 2, 3]


def test_a_refusal_that_is_tried_again_is_in_the_trace_too(desk: Desk) -> None:
    desk.loop(desk.read())
    desk.answers = failing(1, lambda: ToolRefused("busy", retryable=True))

    run = desk.run(LOOKUP, DONE)

    first, second = desk.trace(run, "result.classified")
    assert (first["status"], first["attempt"], first["retry_in_ms"]) == ("failed", 1, 250)
    assert second["status"] == "success"
    assert run.observations == ("found",)  # the model is told of the end alone


def test_an_attempt_sees_nothing_of_what_the_one_before_did_to_its_arguments(desk: Desk) -> None:
    seen: list[Any] = []

    async def greedy(arguments: dict[str, Any], call: ToolCall) -> str:
        seen.append(list(arguments["ids"]))
        arguments["ids"].clear()
        if len(seen) < 2:
            raise ConnectionResetError
        return "found"

    tool = desk.fleet.tool("lookup", side_effect="read", retry=Retry())(greedy)
    desk.loop(tool)

    run = desk.run(ask("lookup", ids=[1, 2]), DONE)

    assert run.status == "completed"
    assert seen == [[1, 2], [1, 2]]


def test_each_attempt_gets_the_time_that_remains(desk: Desk) -> None:
    desk.loop(desk.read(timeout_ms=9_000), limits=CallLimits(tool_ms=9_000))
    desk.answers = failing(2, ConnectionResetError)

    desk.run(LOOKUP, DONE, budget={"deadline_ms": 5_000})

    assert [call.timeout_ms for call in desk.calls] == [5_000, 4_750, 4_250]


# ---- budgets and deadlines -----------------------------------------------------------------------


@pytest.mark.accept("RTY-07")
@pytest.mark.parametrize(
    "budget", [{"tool_calls": 2}, {"per_tool": {"lookup": 2}}], ids=["all", "own"]
)
@pytest.mark.parametrize("error", [ConnectionResetError(), ToolRefused("busy", retryable=True)])
@pytest.mark.parametrize("fixed", [False, True])
def test_retries_that_use_up_the_tool_calls_stop_the_run_for_that_budget(
    fixed: bool, error: BaseException, budget: dict[str, Any], desk: Desk
) -> None:
    tool = desk.read(retry=Retry(attempts=9))
    desk.answers = _raises(error)
    if fixed:
        desk.stages(Read("read", tool, the_query))
        run = desk.run(budget=budget)
    else:
        desk.loop(tool)
        run = desk.run(LOOKUP, DONE, budget=budget)

    assert (run.status, run.reason) == ("budget_exhausted", "tool-call-budget-exhausted")
    assert len(desk.called) == run.tool_calls == 2


@pytest.mark.accept("RTY-07")
def test_retries_that_use_up_the_model_calls_stop_the_run_for_that_budget(desk: Desk) -> None:
    async def model(seen: dict[str, Any]) -> Any:
        raise ConnectionResetError

    desk.loop(desk.read(), retry=Retry(attempts=9))
    desk.fleet.model("default", model)

    run = desk.run(budget={"model_calls": 2})

    assert (run.status, run.reason) == ("budget_exhausted", "model-call-budget-exhausted")
    assert run.model_calls == 2


@pytest.mark.accept("RTY-04", "RTY-12")
@pytest.mark.parametrize("adapter", ["model", "tool", "check"])
@pytest.mark.parametrize(("deadline_ms", "attempts"), [(250, 1), (251, 2)])
def test_a_pause_that_would_reach_the_deadline_is_not_begun(
    deadline_ms: int, attempts: int, adapter: str, desk: Desk
) -> None:
    """The original error stands at once: no time has passed."""
    made: list[int] = []

    async def fails(*_: Any) -> Any:
        made.append(desk.virtual.loop.now_ms)
        raise ConnectionResetError

    policy = Retry(attempts=2)
    if adapter == "model":
        desk.loop(desk.read(), retry=policy)
        desk.fleet.model("default", fails)
    elif adapter == "tool":
        tool = desk.fleet.tool("lookup", side_effect="read", retry=policy)(fails)
        desk.stages(Read("read", tool, the_query))
    else:
        desk.stages(Verify("look", fails, retry=policy))

    run = desk.run(budget={"deadline_ms": deadline_ms})

    reasons = {"model": "model-failed", "tool": "tool-failed", "check": "verification-failed"}
    assert (run.status, run.reason) == ("failed", reasons[adapter])
    assert made == [0, 250][:attempts]
    assert desk.virtual.loop.now_ms == made[-1]


@pytest.mark.accept("RTY-04")
def test_a_call_that_takes_longer_than_what_would_remain_is_not_tried_again(desk: Desk) -> None:
    desk.stages(Read("read", desk.read(retry=Retry(min_call_ms=800)), the_query))
    desk.answers = _raises(ConnectionResetError())

    run = desk.run(budget={"deadline_ms": 1_300})

    assert desk.called == [("lookup", 0), ("lookup", 250)]  # 500 ms of pause leave 550 of 1,050
    assert (run.reason, desk.virtual.loop.now_ms) == ("tool-failed", 250)


@pytest.mark.accept("RTY-06")
@pytest.mark.parametrize("adapter", ["model", "tool"])
def test_a_user_who_waits_a_minute_does_not_wait_for_a_pause_of_a_day(
    adapter: str, desk: Desk
) -> None:
    """The run's deadline is how long its user is willing to wait."""
    day = 24 * 3_600_000
    policy = Retry(base_ms=day, cap_ms=day, max_pause_ms=day)
    desk.loop(desk.read(retry=policy), retry=policy)
    desk.answers = _raises(ConnectionResetError())
    if adapter == "model":
        desk.fleet.model("default", lambda seen: _raises(ConnectionResetError())(seen))
        run = desk.run(budget={"deadline_ms": 60_000})
    else:
        run = desk.run(LOOKUP, DONE, budget={"deadline_ms": 60_000})

    assert run.reason == f"{adapter}-failed"
    assert desk.virtual.loop.now_ms == 0


@pytest.mark.accept("RTY-06")
def test_no_pause_is_longer_than_the_policy_lets_it_be(desk: Desk) -> None:
    desk.loop(desk.read(retry=Retry(attempts=9, base_ms=4_000, max_pause_ms=700)))
    desk.answers = failing(3, ConnectionResetError)

    run = desk.run(LOOKUP, DONE)

    assert run.status == "completed"
    assert [at for _, at in desk.called] == [0, 700, 1_400, 2_100]


@pytest.mark.accept("RTY-13")
@pytest.mark.parametrize("adapter", ["model", "tool", "check"])
def test_a_cancel_ends_a_pause_at_once_and_no_attempt_follows(adapter: str, desk: Desk) -> None:
    made: list[int] = []

    async def fails(*_: Any) -> Any:
        made.append(desk.virtual.loop.now_ms)
        desk.virtual.loop.call_later(0.1, desk.virtual.cancel, "paused")
        raise ConnectionResetError

    policy = Retry(base_ms=60_000, cap_ms=60_000, max_pause_ms=60_000)
    if adapter == "model":
        desk.loop(desk.read(), retry=policy)
        desk.fleet.model("default", fails)
    elif adapter == "tool":
        tool = desk.fleet.tool("lookup", side_effect="read", retry=policy)(fails)
        desk.loop(tool)
        desk.fleet.model("default", Scripted([LOOKUP]))
    else:
        desk.stages(Verify("look", fails, retry=policy, cost_microusd=5))

    run = desk.run(run_id="paused")

    assert (run.status, run.reason) == ("cancelled", "cancelled")
    assert (made, desk.virtual.loop.now_ms) == ([0], 100)
    assert (run.model_calls, run.tool_calls, run.budget_used["cost_microusd"]) == {
        "model": (1, 0, 0),
        "tool": (1, 1, 0),
        "check": (0, 0, 5),
    }[adapter]


@pytest.mark.accept("RTY-13")
def test_a_failure_under_a_wish_to_cancel_is_not_tried_again(desk: Desk) -> None:
    def fails(call: ToolCall) -> Any:
        desk.virtual.cancel(call.run_id)
        raise ConnectionResetError

    desk.loop(desk.read())
    desk.answers = fails

    run = desk.run(LOOKUP, DONE)

    assert (run.status, len(desk.called), desk.virtual.loop.now_ms) == ("cancelled", 1, 0)


@pytest.mark.accept("RTY-14")
@pytest.mark.parametrize("attempts", [1, 2, 4])
def test_a_model_that_does_not_answer_in_time_is_asked_so_often_and_then_the_run_fails(
    attempts: int, desk: Desk
) -> None:
    asked: list[int] = []

    async def model(seen: dict[str, Any]) -> Any:
        asked.append(desk.virtual.loop.now_ms)
        await for_ever()

    desk.loop(desk.read(), retry=Retry(attempts=attempts), limits=CallLimits(model_ms=1_000))
    desk.fleet.model("default", model)

    run = desk.run()

    assert (run.status, run.reason) == ("failed", "model-failed")
    assert len(asked) == run.model_calls == attempts
    assert asked == [0, 1_250, 2_750, 4_750][:attempts]


@pytest.mark.accept("RTY-15")
def test_after_a_failure_the_same_tool_with_other_arguments_is_a_new_action(desk: Desk) -> None:
    desk.loop(desk.read(retry=None))
    desk.answers = failing(1, lambda: ToolRefused("busy", retryable=True))

    run = desk.run(LOOKUP, ask("lookup", q="coffee"), DONE)

    assert (run.status, run.tool_calls, len(desk.called)) == ("completed", 2, 2)
    assert run.observations == ("tool:lookup:failed:busy", "found")


@pytest.mark.accept("RTY-15")
def test_a_new_action_after_a_failure_needs_a_call_of_the_budget(desk: Desk) -> None:
    desk.loop(desk.read(retry=None))
    desk.answers = failing(1, lambda: ToolRefused("busy", retryable=True))

    run = desk.run(LOOKUP, ask("lookup", q="coffee"), DONE, budget={"tool_calls": 1})

    assert (run.reason, len(desk.called)) == ("tool-call-budget-exhausted", 1)


# ---- a write is never retried blindly ------------------------------------------------------------

#: What a service's end says about a write: the error, and whether it says that nothing happened.
WRITE_ENDS: Final[dict[str, tuple[BaseException, bool]]] = {
    "connection-reset": (ConnectionResetError(), False),
    "explicit-5xx": (ToolUnclear("502"), False),
    "rate-limited": (ToolRefused("rate-limited", retryable=True), True),
    "5xx-nothing-happened": (ToolRefused("503-not-accepted", retryable=True), True),
}


@pytest.mark.accept("RTY-09")
@pytest.mark.parametrize("end", WRITE_ENDS)
def test_a_write_that_failed_is_unknown_unless_the_service_says_that_nothing_happened(
    end: str, desk: Desk
) -> None:
    error, nothing_happened = WRITE_ENDS[end]
    desk.loop(desk.write())
    desk.answers = _raises(error)

    run = desk.run(ask("save", id=1), DONE)

    assert len(desk.called) == 1  # whatever it says, nothing sends it again by itself
    [effect] = desk.fleet.ledger.effects(run_id=run.run_id)
    if nothing_happened:  # the model is told, and may propose it again: the same intent
        assert (run.reason, effect["status"]) == ("completed", "absent")
    else:
        assert (run.status, run.reason) == ("reconciling", "unknown-effect")
        assert effect["status"] == "unknown"


@pytest.mark.accept("RTY-09")
@pytest.mark.parametrize("queried", [True, False])
def test_a_write_in_doubt_is_sent_again_with_its_key_and_queried_before_where_that_is_possible(
    queried: bool, desk: Desk
) -> None:
    def query(arguments: Any, call: ToolCall) -> None:
        desk.called.append(("query", desk.virtual.loop.now_ms))

    desk.loop(desk.write(query=query if queried else None))
    desk.answers = failing(1, ConnectionResetError)
    run = desk.run(ask("save", id=1), DONE)
    assert run.status == "reconciling"

    while desk.fleet.get(run.run_id).status == "reconciling":
        desk.virtual.advance(5_000)
        desk.virtual.reconciler.sweep()
    run = desk.virtual.drive(run.run_id)

    assert run.status == "completed"
    names = [name for name, _ in desk.called]
    assert names[0] == names[-1] == "save" and names.count("save") == 2
    assert ("query" in names[1:-1]) is queried
    assert len({call.key for call in desk.calls}) == 1
    assert run.tool_calls == 2


@pytest.mark.accept("RTY-09")
def test_a_service_that_says_try_again_gets_the_same_key(desk: Desk) -> None:
    tool = desk.write()

    def action(run: RunFacts) -> Action:
        return Action(tool, {"id": 1})

    desk.stages(Commit("save", action, tool, attempts=2))
    desk.answers = failing(1, lambda: ToolRefused("busy", retryable=True))

    run = desk.run()

    assert (run.status, run.tool_calls) == ("completed", 2)
    assert len({call.key for call in desk.calls}) == 1


@pytest.mark.accept("RTY-05")
def test_a_write_that_is_neither_idempotent_nor_queried_is_sent_once(desk: Desk) -> None:
    tool = desk.write(
        "pay", side_effect="irreversible", approval="always", guarantee="person", key_valid_for_ms=0
    )

    def action(run: RunFacts) -> Action:
        return Action(tool, {"id": 1})

    desk.stages(Confirm("confirm", action), Commit("pay", action, tool, attempts=5))
    desk.answers = _raises(ConnectionResetError())
    run = desk.run()
    agree(desk.fleet, run)
    run = desk.virtual.drive(run.run_id)
    assert (run.status, run.reason) == ("reconciling", "unknown-effect")

    for _ in range(20):
        desk.virtual.advance(60_000)
        desk.virtual.reconciler.sweep()
    run = desk.fleet.get(run.run_id)

    assert len(desk.called) == 1
    assert run.status == "handed_off"


@pytest.mark.accept("RTY-05")
@pytest.mark.parametrize("side_effect", ["idempotent", "compensable", "irreversible"])
def test_no_write_takes_a_retry_policy(side_effect: str, desk: Desk) -> None:
    with pytest.raises(InvalidDefinition, match=r"use Commit\(\.\.\., attempts=n\)"):
        desk.write(side_effect=side_effect, approval="always", retry=Retry())


@pytest.mark.parametrize("wrong", [3, "often", Retry])
def test_a_retry_policy_is_a_retry(wrong: Any, desk: Desk) -> None:
    with pytest.raises(InvalidDefinition, match="retry must be a Retry"):
        desk.read(retry=wrong)
    with pytest.raises(InvalidDefinition, match="retry must be a Retry"):
        Verify("look", desk.check, retry=wrong)
    with pytest.raises(InvalidDefinition, match="retry must be a Retry"):
        AgentLoop(name="loop", actions=(desk.read(),), verify=desk.check, retry=wrong)


# ---- a verification is looked at again -----------------------------------------------------------


def test_a_verification_that_cannot_be_made_is_made_again(desk: Desk) -> None:
    made: list[int] = []

    async def check(claimed: Any, call: ToolCall) -> Checked:
        made.append(call.attempt)
        if len(made) == 1:
            raise ConnectionResetError
        if len(made) == 2:
            await for_ever()
        return Checked(True, evidence="record:1")

    desk.stages(
        Verify("look", check, retry=Retry(), cost_microusd=7), limits=CallLimits(tool_ms=400)
    )

    run = desk.run()

    assert (run.status, made) == ("completed", [1, 2, 3])
    assert run.budget_used["cost_microusd"] == 21
    assert (run.model_calls, run.tool_calls, run.budget_used["steps"]) == (0, 0, 0)
    failed = desk.trace(run, "completion.failed")
    assert [(f["attempt"], f["retry_in_ms"]) for f in failed] == [(1, 250), (2, 500)]
    assert desk.virtual.loop.now_ms == 250 + 400 + 500


def test_a_verification_that_found_out_is_not_asked_twice(desk: Desk) -> None:
    made: list[int] = []

    async def check(claimed: Any, call: ToolCall) -> bool:
        made.append(1)
        return False

    desk.stages(Verify("look", check, retry=Retry()))

    run = desk.run()

    assert (run.reason, made) == ("verification-failed", [1])


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (ToolRefused("no-answer", retryable=True), 3),
        (ToolRefused("unauthenticated"), 1),
        (ValueError("a bug"), 1),
        (TimeoutError(), 3),
    ],
)
def test_only_a_verification_that_may_yet_be_made_is_made_again(
    error: BaseException, attempts: int, desk: Desk
) -> None:
    made: list[int] = []

    async def check(claimed: Any, call: ToolCall) -> bool:
        made.append(1)
        raise error

    desk.stages(Verify("look", check, retry=Retry()))

    run = desk.run()

    assert (run.reason, len(made)) == ("verification-failed", attempts)


def test_a_verification_whose_price_is_spent_stops_the_run_for_that_budget(desk: Desk) -> None:
    async def check(claimed: Any, call: ToolCall) -> bool:
        raise ConnectionResetError

    desk.stages(Verify("look", check, retry=Retry(attempts=9), cost_microusd=300))

    run = desk.run(budget={"cost_microusd": 700})

    assert (run.status, run.reason) == ("budget_exhausted", "cost-budget-exhausted")
    assert run.budget_used["cost_microusd"] == 600


# ---- planning ------------------------------------------------------------------------------------


def test_a_worst_case_counts_the_retries_of_tools_and_checks(desk: Desk) -> None:
    read = desk.read(timeout_ms=2_000, retry=Retry(attempts=3, max_pause_ms=1_000))
    loop = AgentLoop(name="loop", actions=(read,), verify=desk.check)
    looked = Verify("look", desk.check, retry=Retry(attempts=2, max_pause_ms=500))
    limits = CallLimits(model_ms=8_000, tool_ms=5_000)

    def worst(*stages: Any, **budget: Any) -> int:
        chosen = Budget(model_calls=4, **budget)
        return Workflow(name="w", stages=stages, budget=chosen, limits=limits).worst_case_ms

    assert worst(loop, tool_calls=0) == 32_000
    # Of seven calls in series of three at least three are first ones: four pauses, four calls.
    assert worst(loop, tool_calls=7) == 32_000 + 4 * (1_000 + 2_000)
    assert worst(loop, tool_calls=7, per_tool={"lookup": 3}) == 32_000 + 2 * (1_000 + 2_000)
    assert worst(loop, looked, tool_calls=0) == 32_000 + 500 + 5_000
    with pytest.raises(InvalidDefinition, match="44 s"):
        Workflow(
            name="w",
            stages=[loop],
            budget=Budget(model_calls=4, tool_calls=7),
            limits=limits,
            answer_within_ms=43_000,
        )


# ---- a worker that dies between two attempts -----------------------------------------------------


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An empty world on each database."""
    with open_world(request) as opened:
        yield opened


@pytest.mark.parametrize(
    ("place", "charged"), [("before charge_more", 1), ("after charge_more", 2)]
)
def test_what_was_charged_for_a_lost_attempt_stays_charged(
    place: str, charged: int, world: World
) -> None:
    """The round is taken up again with a new model call, as any read round is."""
    failures = [ConnectionResetError()]

    async def lookup(arguments: dict[str, Any], call: ToolCall) -> str:
        world.service.calls[f"read {call.run_id}"] += 1
        if failures:
            raise failures.pop()
        return "found"

    tool = world.fleet.tool("lookup", side_effect="read", retry=Retry(base_ms=1))(lookup)
    world.workflow(tool, plan=[look(q=1)])
    run_id = world.start(budget={"per_tool": {"lookup": 5}, "tool_calls": 9})
    outside = Outside(when=lambda at: at == place)
    outside.then = outside.die

    world.step(run_id, outside=outside)

    assert outside.dead
    assert world.row(run_id)["tool_calls_left"] == 9 - charged
    world.advance(LEASE_MS)
    run = world.drive(run_id)
    assert run.status == "completed"
    assert (run.tool_calls, run.model_calls) == (charged + 1, 3)
    assert world.service.calls[f"read {run_id}"] == 2


def test_retries_are_paid_on_each_database(world: World) -> None:
    failures = [ConnectionResetError(), ConnectionResetError()]

    async def lookup(arguments: dict[str, Any], call: ToolCall) -> str:
        world.service.calls[f"read {call.run_id}"] += 1
        if failures:
            raise failures.pop()
        return "found"

    tool = world.fleet.tool("lookup", side_effect="read", retry=Retry(base_ms=1))(lookup)
    world.workflow(tool, plan=[look(q=1)])

    run = world.drive(world.start(budget={"per_tool": {"lookup": 3}, "tool_calls": 4}))

    assert (run.status, run.tool_calls) == ("completed", 3)
    assert (run.budget_left["tool_calls"], run.budget_left["tool_calls.lookup"]) == (1, 0)
    assert stop_of(world.trace(run.run_id))["remainingToolCalls"] == 1


def test_a_worker_that_was_taken_over_in_a_pause_makes_no_further_attempt(world: World) -> None:
    async def lookup(arguments: dict[str, Any], call: ToolCall) -> str:
        world.service.calls[f"read {call.run_id}"] += 1
        raise ConnectionResetError

    tool = world.fleet.tool("lookup", side_effect="read", retry=Retry(base_ms=1))(lookup)
    world.workflow(tool, plan=[look(q=1)])
    run_id = world.start()

    def taken_over() -> None:
        world.advance(LEASE_MS)
        world.reconciler.sweep()

    outside = Outside(when=lambda at: at == "before charge_more", then=taken_over)

    worker = world.step(run_id, outside=outside)

    assert worker.counts["fenced"] == 1
    assert world.service.calls[f"read {run_id}"] == 1
    assert world.row(run_id)["tool_calls_left"] == 24 - 1
