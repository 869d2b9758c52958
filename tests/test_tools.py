"""The contract of a tool: what must be declared, what is assumed, and what a call is given."""

from __future__ import annotations

import asyncio
import posixpath
import threading
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import unquote

import pytest
from pydantic import AfterValidator, BaseModel

from handrail import Action, AgentLoop, Commit, Confirm, Read, Workflow
from handrail.agent.budget import Budget, CallLimits
from handrail.agent.stage import End
from handrail.agent.tools import (
    FOREVER,
    SHORTEST_TIMEOUT_MS,
    Approval,
    Guarantee,
    Invalid,
    Permit,
    Principal,
    RunFacts,
    SetOf,
    SideEffect,
    Tool,
    ToolContract,
    Validated,
    fingerprint,
)
from handrail.errors import InvalidDefinition
from handrail.gateway.model import Scripted
from handrail.tasks.calls import ToolCall, call
from handrail.testing.people import agree
from handrail.testing.virtual_fleet import VirtualFleet
from tests.control import ask, claim, details


class Query(BaseModel):
    q: str
    limit: int = 10


async def nothing(arguments: Any, call: ToolCall) -> str:
    return "nothing"


@pytest.fixture
def virtual() -> Iterator[VirtualFleet]:
    with VirtualFleet() as fleet:
        yield fleet


def loop_of(virtual: VirtualFleet, *tools: Tool, **workflow: Any) -> None:
    """Register the workflow `task`: a loop over these tools, whose claims are always true."""

    async def holds(claim: Any, call: ToolCall) -> bool:
        return True

    loop = AgentLoop(name="loop", actions=tools, verify=holds)
    virtual.fleet.workflow(Workflow(name="task", stages=[loop], **workflow))


# ---- what is declared ----------------------------------------------------------------------------


@pytest.mark.accept("TOL-01")
def test_a_declaration_has_all_that_the_program_needs(virtual: VirtualFleet) -> None:
    @virtual.fleet.tool(
        side_effect="read", concurrency_safe=True, timeout_ms=700, approval="always"
    )
    async def lookup(arguments: Query, call: ToolCall) -> str:
        """Look something up."""
        return arguments.q

    contract = lookup.contract
    assert contract.name == lookup.name == "lookup"
    assert contract.description == "Look something up."
    assert contract.input is Query
    assert contract.side_effect is SideEffect.READ
    assert not contract.side_effect.writes
    assert contract.concurrency_safe
    assert contract.timeout_ms == 700
    assert contract.approval is Approval.ALWAYS
    assert callable(lookup.execute)


@pytest.mark.accept("TOL-01")
@pytest.mark.parametrize(
    "arguments",
    [
        {},  # a missing field
        {"q": 1},  # a wrong type
        {"q": "x", "limit": "10"},  # a text for a number
        {"q": "x", "limit": True},  # a boolean for a number
        {"q": "x", "limit": 1.5},
        {"q": "x", "approved": True},  # an additional field
        {"q": None},
    ],
)
def test_arguments_are_checked_strictly_against_the_input_schema(arguments: Any) -> None:
    contract = ToolContract(name="lookup", side_effect=SideEffect.READ, input=Query)

    assert isinstance(contract.validate(arguments), Invalid)
    assert contract.validate({"q": "x"}) == Validated(Query(q="x"), {"q": "x", "limit": 10})


def test_a_validator_that_raises_makes_the_arguments_invalid() -> None:
    def broken(value: str) -> str:
        raise RuntimeError("a bug in a validator")

    class Broken(BaseModel):
        q: Annotated[str, AfterValidator(broken)]

    contract = ToolContract(name="lookup", side_effect=SideEffect.READ, input=Broken)

    assert isinstance(contract.validate({"q": "x"}), Invalid)


@pytest.mark.accept("TOL-01")
def test_a_bare_function_is_no_tool(virtual: VirtualFleet) -> None:
    function: Any = nothing

    def action(run: RunFacts) -> Action:
        return Action(function)

    def verify(claim: Any, call: ToolCall) -> bool:
        return True

    with pytest.raises(InvalidDefinition, match="a function alone is no tool"):
        virtual.fleet.tool(function)
    with pytest.raises(InvalidDefinition, match="a function alone is no tool"):
        Tool(function, function)
    with pytest.raises(InvalidDefinition, match="'nothing' is no tool"):
        AgentLoop(name="loop", actions=(function,), verify=verify)
    with pytest.raises(InvalidDefinition, match="'nothing' is no tool"):
        Read("read", function, lambda run: {})
    with pytest.raises(InvalidDefinition, match="'nothing' is no tool"):
        Commit("commit", action, function)


def test_an_annotation_that_cannot_be_read_is_refused(virtual: VirtualFleet) -> None:
    """Taken for no model at all, it would let every argument pass."""

    async def lookup(arguments: Query, call: ToolCall) -> str:
        return "found"

    lookup.__annotations__["arguments"] = "DefinedNowhere"
    with pytest.raises(InvalidDefinition, match="'DefinedNowhere' cannot be read here"):
        virtual.fleet.tool(side_effect="read")(lookup)

    declared = virtual.fleet.tool(side_effect="read", input=Query)(lookup)
    assert declared.contract.input is Query


@pytest.mark.accept("TOL-01", "TOL-08")
def test_a_call_is_given_a_signal(virtual: VirtualFleet) -> None:
    signals = []

    @virtual.fleet.tool(side_effect="read")
    async def lookup(arguments: dict[str, Any], call: ToolCall) -> str:
        signals.append(call.aborted)
        return "x"

    virtual.fleet.model("default", Scripted([ask("lookup"), claim("done")]))
    loop_of(virtual, lookup)
    virtual.run("task", goal="any")

    [signal] = signals
    assert isinstance(signal, threading.Event)
    assert not signal.is_set()  # nothing was given up


# ---- what is assumed -----------------------------------------------------------------------------


def undeclared(**declared: Any) -> ToolContract:
    """A write about which no more is declared than it must be."""
    return ToolContract(
        name="pay",
        intent=lambda arguments, run: "payment:1",
        guarantee=Guarantee.PERSON,
        takeover="accounting",
        **declared,
    )


@pytest.mark.accept("TOL-02")
def test_a_tool_without_a_declared_side_effect_is_an_irreversible_write() -> None:
    contract = undeclared()

    assert contract.side_effect is SideEffect.IRREVERSIBLE
    assert contract.side_effect.writes
    assert contract.side_effect.coarse == "write"
    assert contract.needs_approval
    with pytest.raises(InvalidDefinition, match="a write must declare intent"):
        ToolContract(name="pay")  # what a read need not declare
    with pytest.raises(InvalidDefinition, match="irreversible: it belongs into a fixed commit"):
        AgentLoop(name="loop", actions=(Tool(contract, nothing),), verify=nothing)


@pytest.mark.accept("TOL-02")
def test_such_a_tool_is_approved_first_and_its_time_out_is_an_unknown_effect(
    virtual: VirtualFleet,
) -> None:
    sent = []

    async def pay(arguments: dict[str, Any], call: ToolCall) -> str:
        sent.append(call.key)
        await asyncio.Event().wait()
        return "never"

    tool = Tool(undeclared(), pay)

    def action(run: RunFacts) -> Action:
        return Action(tool, {"amount_cents": 100})

    virtual.fleet.workflow(
        Workflow(name="payment", stages=[Confirm("confirm", action), Commit("pay", action, tool)])
    )

    run = virtual.run("payment", goal="pay")
    assert (run.status, sent) == ("awaiting_approval", [])

    agree(virtual.fleet, run)
    run = virtual.drive(run.run_id)

    assert len(sent) == 1
    assert (run.status, run.reason) == ("reconciling", "unknown-effect")
    [required] = details(virtual.fleet.trace(run), "effect.reconciliation-required")
    assert required == {"tool": "pay", "trigger": "timeout", "recovery": "human"}
    assert virtual.loop.now_ms == SHORTEST_TIMEOUT_MS


@pytest.mark.accept("TOL-03")
def test_calls_are_serial_where_nothing_else_is_declared(virtual: VirtualFleet) -> None:
    """A model that asks for two calls at once gets neither, and one call ends before the next."""
    active: list[str] = []
    overlaps: list[tuple[str, ...]] = []

    @virtual.fleet.tool(side_effect="read")
    async def lookup(arguments: dict[str, Any], call: ToolCall) -> str:
        active.append(call.tool)
        overlaps.append(tuple(active))
        await asyncio.sleep(0.05)
        active.remove(call.tool)
        return f"seen {arguments['n']}"

    assert not lookup.contract.concurrency_safe
    loop_of(virtual, lookup)
    virtual.fleet.model("default", Scripted([ask("lookup", n=n) for n in range(3)]))
    virtual.run("task", goal="any")
    virtual.fleet.model("default", Scripted([[ask("lookup", n=8), ask("lookup", n=9)]]))
    refused = virtual.run("task", goal="any")

    assert overlaps == [("lookup",)] * 3
    assert refused.reason == "invalid-proposal"


@pytest.mark.accept("TOL-04")
def test_the_shortest_limit_applies_where_none_is_declared(virtual: VirtualFleet) -> None:
    limits = []

    @virtual.fleet.tool(side_effect="read")
    async def lookup(arguments: dict[str, Any], call: ToolCall) -> str:
        limits.append(call.timeout_ms)
        await asyncio.Event().wait()
        return "never"

    loop_of(virtual, lookup, limits=CallLimits(tool_ms=60_000))
    virtual.fleet.model("default", Scripted([ask("lookup")]))
    run = virtual.run("task", goal="any")

    assert limits == [SHORTEST_TIMEOUT_MS]
    assert CallLimits().tool_ms >= SHORTEST_TIMEOUT_MS  # of the configured defaults the shortest
    assert run.reason == "tool-failed"
    assert virtual.loop.now_ms == SHORTEST_TIMEOUT_MS


@pytest.mark.accept("TOL-04")
@pytest.mark.parametrize(
    ("side_effect", "approval", "asked"),
    [
        (SideEffect.READ, None, False),
        (SideEffect.REPLAYABLE, None, False),
        (SideEffect.IDEMPOTENT, None, True),
        (SideEffect.COMPENSABLE, None, True),
        (SideEffect.IRREVERSIBLE, None, True),
        (SideEffect.IDEMPOTENT, Approval.NEVER, False),
        (SideEffect.IDEMPOTENT, Approval.ON_WRITE, True),
        (SideEffect.READ, Approval.ON_WRITE, False),
        (SideEffect.READ, Approval.ALWAYS, True),
    ],
)
def test_a_person_is_asked_before_every_write_where_nothing_is_declared(
    side_effect: SideEffect, approval: Approval | None, asked: bool
) -> None:
    contract = ToolContract(
        name="tool",
        side_effect=side_effect,
        approval=approval,
        intent=lambda arguments, run: "intent:1",
        guarantee=Guarantee.UNIQUE_CONSTRAINT,
        takeover="accounting",
    )

    assert contract.needs_approval is asked


@pytest.mark.accept("TOL-04")
def test_a_write_of_a_loop_waits_for_approval_where_none_is_declared(
    virtual: VirtualFleet,
) -> None:
    sent = []

    @virtual.fleet.tool(
        side_effect="idempotent",
        intent=lambda arguments, run: "draft:1",
        guarantee="idempotency-key",
        key_valid_for_ms=FOREVER,
        takeover="accounting",
    )
    async def save(arguments: dict[str, Any], call: ToolCall) -> str:
        sent.append(arguments)
        return "saved"

    loop_of(virtual, save)
    virtual.fleet.model("default", Scripted([ask("save", id=1), claim("done")]))

    run = virtual.run("task", goal="any")

    assert (run.status, sent, run.tool_calls) == ("awaiting_approval", [], 0)


# ---- validation before permission ----------------------------------------------------------------


def normalised(path: str) -> str:
    """A path as the file service would resolve it."""
    decoded = unquote(unquote(path))
    return posixpath.normpath(decoded)


class Document(BaseModel):
    path: Annotated[str, AfterValidator(normalised)]


class Gatekeeper:
    """A rule that allows what lies below docs/, and remembers what it was asked about."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, arguments: Document, run: RunFacts) -> Permit:
        self.asked.append(arguments.path)
        return Permit.ALLOW if arguments.path.startswith("docs/") else Permit.DENY


@pytest.mark.accept("TOL-05")
@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("../../etc/x", "../../etc/x"),
        ("docs/../../etc/x", "../etc/x"),  # a rule on the raw text would let these pass
        ("docs/%2e%2e/%2e%2e/etc/x", "../etc/x"),
        ("docs%2f..%2f..%2fetc/x", "../etc/x"),
        ("docs/%252e%252e/%252e%252e/etc/x", "../etc/x"),
        ("/etc/x", "/etc/x"),
        ("/docs/../etc/x", "/etc/x"),
    ],
)
def test_the_permission_rule_sees_the_normalised_value(
    path: str, seen: str, virtual: VirtualFleet
) -> None:
    rule, read = Gatekeeper(), []

    @virtual.fleet.tool(side_effect="read", allow=rule)
    async def fetch(arguments: Document, call: ToolCall) -> str:
        read.append(arguments.path)
        return "secret"

    loop_of(virtual, fetch)
    virtual.fleet.model("default", Scripted([ask("fetch", path=path)]))
    run = virtual.run("task", goal="any")

    assert rule.asked == [seen]
    assert (run.status, run.reason, read) == ("failed", "permission-denied", [])


@pytest.mark.accept("TOL-05")
def test_the_tool_is_given_what_the_rule_has_seen(virtual: VirtualFleet) -> None:
    rule, read = Gatekeeper(), []

    @virtual.fleet.tool(side_effect="read", allow=rule)
    async def fetch(arguments: Document, call: ToolCall) -> str:
        read.append(arguments.path)
        return "text"

    loop_of(virtual, fetch)
    proposal = ask("fetch", path="docs/./a/../b%2etxt")
    virtual.fleet.model("default", Scripted([proposal, claim("done")]))
    run = virtual.run("task", goal="any")

    assert run.reason == "completed"
    assert rule.asked == read == ["docs/b.txt"]


@pytest.mark.accept("TOL-06")
@pytest.mark.parametrize("refuses", ["rule", "permission"])
def test_invalid_arguments_are_refused_before_anybody_is_asked_about_permission(
    refuses: str, virtual: VirtualFleet
) -> None:
    rule = Gatekeeper()
    how: dict[str, Any] = {"allow": rule} if refuses == "rule" else {"permission": "read:docs"}

    @virtual.fleet.tool(side_effect="read", **how)
    async def fetch(arguments: Document, call: ToolCall) -> str:
        return "text"

    loop_of(virtual, fetch)
    virtual.fleet.model("default", Scripted([ask("fetch", path=7)]))
    run = virtual.run("task", goal="any", principal=Principal("nobody"))

    [rejected] = details(virtual.fleet.trace(run), "proposal.rejected")
    assert rejected == {"stable_reason_code": "invalid-proposal", "problem": "invalid arguments"}
    assert run.reason == "invalid-proposal"
    assert rule.asked == []

    virtual.fleet.model("default", Scripted([ask("fetch", path="elsewhere")]))
    denied = virtual.run("task", goal="any", principal=Principal("nobody"))
    assert denied.reason == "permission-denied"  # what valid arguments come to


@pytest.mark.accept("RUN-18")
@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (["b", "a"], ["a", "b"], True),
        (["a", "b", "a"], ["b", "a"], True),  # what is said twice counts once
        (["a"], ["b"], False),
    ],
)
def test_an_array_that_is_a_set_is_one_whatever_its_order(
    one: list[str], other: list[str], same: bool
) -> None:
    class AsSet(BaseModel):
        ids: SetOf[str]

    class AsList(BaseModel):
        ids: list[str]

    def marks(model: type[BaseModel]) -> set[str]:
        contract = ToolContract(name="lookup", side_effect=SideEffect.READ, input=model)
        found = set()
        for ids in (one, other):
            checked = contract.validate({"ids": list(ids)})
            assert isinstance(checked, Validated)
            found.add(fingerprint(0, contract, checked.json))
        return found

    assert len(marks(AsSet)) == (1 if same else 2)
    assert len(marks(AsList)) == 2  # without it the order counts


@pytest.mark.accept("RUN-18")
def test_a_repeated_set_is_a_repeated_proposal_and_the_tool_gets_its_normal_form(
    virtual: VirtualFleet,
) -> None:
    class Ids(BaseModel):
        ids: SetOf[int]

    got = []

    @virtual.fleet.tool(side_effect="read")
    async def lookup(arguments: Ids, call: ToolCall) -> str:
        got.append(arguments.ids)
        return "same"

    loop_of(virtual, lookup)
    proposals = [ask("lookup", ids=[*ids]) for ids in ((3, 1), (1, 3, 3), (3, 1, 1))]
    virtual.fleet.model("default", Scripted(proposals))
    run = virtual.run("task", goal="any")

    assert run.reason == "repeated-proposal"
    assert got == [[1, 3], [1, 3]]


# ---- what a call is given ------------------------------------------------------------------------


@pytest.mark.accept("TOL-07")
@pytest.mark.parametrize(
    ("tool_ms", "run_ms", "left_ms", "gets_ms"),
    [(50, 100, 30, 30), (50, 100, 80, 50), (50, 20, 30, 20), (50, 100, 50, 50)],
)
@pytest.mark.parametrize("side_effect", ["read", "idempotent"])
def test_a_call_gets_the_least_of_three_times(
    tool_ms: int, run_ms: int, left_ms: int, gets_ms: int, side_effect: str, virtual: VirtualFleet
) -> None:
    """The tool's own limit, the run's limit of one call, and what is left of the run's deadline."""
    given = []

    @virtual.fleet.tool(
        side_effect=side_effect,
        timeout_ms=tool_ms,
        approval="never",
        intent=lambda arguments, run: "intent:1",
        guarantee="unique-constraint",
        takeover="accounting",
    )
    async def work(arguments: dict[str, Any], call: ToolCall) -> str:
        given.append(call.timeout_ms)
        await asyncio.Event().wait()
        return "never"

    async def thinks(observation: Any) -> Any:
        await asyncio.sleep(0.070)  # this much of the 100 ms and of the others is gone
        return ask("work")

    loop_of(
        virtual,
        work,
        limits=CallLimits(model_ms=500, tool_ms=run_ms),
        budget=Budget(deadline_ms=70 + left_ms),
    )
    virtual.fleet.model("default", thinks)
    run = virtual.run("task", goal="any")

    assert given == [gets_ms]
    assert virtual.loop.now_ms == 70 + gets_ms  # and then it is cut off
    stopped = {"read": "deadline-exhausted" if left_ms <= gets_ms else "tool-failed"}
    assert run.reason == stopped.get(side_effect, "unknown-effect")


@pytest.mark.accept("TOL-08")
@pytest.mark.parametrize("side_effect", ["read", "idempotent"])
def test_a_cancelled_call_sees_it_through_its_signal(
    side_effect: str, virtual: VirtualFleet
) -> None:
    seen = []

    @virtual.fleet.tool(
        side_effect=side_effect,
        approval="never",
        intent=lambda arguments, run: "intent:1",
        guarantee="unique-constraint",
        takeover="accounting",
    )
    async def work(arguments: dict[str, Any], call: ToolCall) -> str:
        virtual.loop.call_later(0.025, virtual.cancel, call.run_id)
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            seen.append((virtual.loop.now_ms, call.aborted.is_set()))
            raise
        return "not reached"

    loop_of(virtual, work)
    virtual.fleet.model("default", Scripted([ask("work")]))
    virtual.run("task", goal="any")

    assert seen == [(25, True)]


@pytest.mark.accept("TOL-08")
def test_a_function_that_blocks_sees_it_through_its_signal_too() -> None:
    started, ended = threading.Event(), threading.Event()
    aborted = threading.Event()

    def blocks() -> None:
        started.set()
        if aborted.wait(10):
            ended.set()

    async def cancelled_meanwhile() -> End:
        wish: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = asyncio.ensure_future(call(blocks, limit_ms=10_000, wish=wish, aborted=aborted))
        await asyncio.to_thread(started.wait, 10)
        wish.set_result(None)
        return (await work).end

    assert asyncio.run(cancelled_meanwhile()) is End.CANCELLED
    assert ended.wait(10)
