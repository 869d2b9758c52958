"""A plan that no longer fits the world is refused before anything is sent, and made again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from handrail.agent.budget import Budget
from handrail.agent.fixed import Deny, Judgement, Proceed
from handrail.agent.machine import Mode
from handrail.agent.retry import Retry
from handrail.agent.stage import Action, Checked, Stage
from handrail.agent.status import RunEvent, RunStatus, next_status
from handrail.agent.tools import FOREVER, Compensation, Principal, RunFacts, Tool
from handrail.agent.workflow import (
    AgentLoop,
    Check,
    Commit,
    Confirm,
    Read,
    Verify,
    Workflow,
)
from handrail.canonical import Json
from handrail.errors import IllegalTransition, InvalidDefinition, ToolRefused
from handrail.runs import Run
from handrail.tasks.calls import ToolCall
from handrail.testing.people import agree
from tests.world import KINDS, LEASE_MS, SECOND, Outside, World, open_world

ENOUGH: Final = Budget(steps=20, model_calls=12, tool_calls=24, deadline_ms=600_000)


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world on SQLite, for what no database can make different."""
    with open_world(request) as opened:
        yield opened


@dataclass
class Shop:
    """An order whose price may change, and a till. `paid` and `keys` are the till's own records."""

    world: World
    price: int = 100
    version: int = 1
    owner: str = "anonymous"
    paid: list[int] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    asked: int = 0  # how often a precondition was looked at
    notices: bool = False  # the till itself says that the order has changed
    script: list[Callable[[], object]] = field(default_factory=list)  # at each look, before it

    def change(self, price: int | None = None) -> None:
        self.version += 1
        self.price = self.price if price is None else price

    def order(self) -> dict[str, Json]:
        return {"price": self.price, "version": self.version, "owner": self.owner}

    def unchanged(self, claim: Any, call: ToolCall) -> Checked:
        """The precondition: the order is the one that the plan was made for."""
        self.asked += 1
        self.world.outside.at("before precondition")
        if self.script:
            self.script.pop(0)()
        planned: Any = call.facts["plan"]
        same = (self.version, self.price) == (planned["version"], claim["amount"])
        detail = {"version": self.version, "planned": planned["version"]}
        self.world.outside.at("after precondition")
        return Checked(same, detail, f"order:{self.version}")

    def pay(self, arguments: Any, call: ToolCall) -> Json:
        self.world.outside.at("before write tool")
        self.keys.add(call.key)
        planned: Any = call.facts["plan"]
        if self.notices and planned["version"] != self.version:
            raise ToolRefused("order-changed", changed=True)
        known = len(self.world.service.performed)
        try:
            receipt = self.world.service.execute(arguments, call, FOREVER, False)
        finally:
            if len(self.world.service.performed) > known:
                self.paid.append(arguments["amount"])
        self.world.outside.at("after write tool")
        return receipt

    def is_paid(self, claim: Any, call: ToolCall) -> Checked:
        return Checked(len(self.paid) == 1, {"payments": len(self.paid)}, "till:1")


def planned(run: RunFacts) -> Judgement:
    read: Any = run.outputs["read"]
    return Proceed({"order": run.goal, "amount": read["price"], "version": read["version"]})


def planned_for_one_order(run: RunFacts) -> Judgement:
    """Every run is about the same order."""
    judged = planned(run)
    assert isinstance(judged, Proceed) and isinstance(judged.value, dict)
    return Proceed({**judged.value, "order": "o-1"})


def valid(run: RunFacts) -> Judgement:
    """The plan is the read order's, and the order is the user's own."""
    read: Any = run.outputs["look"]
    plan: Any = run.outputs["plan"]
    if read["owner"] != run.principal.subject:
        return Deny(detail={"field": "owner"})
    if read["version"] != plan["version"]:
        return Deny(detail={"field": "version"})
    return Proceed()


def payment(tool: Tool) -> Callable[[RunFacts], Action]:
    def exactly(run: RunFacts) -> Action:
        plan: Any = run.outputs["plan"]
        return Action(tool, {"id": plan["order"], "amount": plan["amount"]})

    return exactly


def order_tool(shop: Shop) -> Tool:
    async def execute(arguments: Any, call: ToolCall) -> Json:
        return shop.order()

    return shop.world.fleet.tool("read_order", side_effect="read")(execute)


def pay_tool(shop: Shop, **contract: Any) -> Tool:
    async def execute(arguments: Any, call: ToolCall) -> Json:
        return shop.pay(arguments, call)

    async def find(arguments: Any, call: ToolCall) -> Json:
        return shop.world.service.query(arguments, call)

    options: dict[str, Any] = {
        "side_effect": "idempotent",
        "approval": "always",
        "guarantee": "idempotency-key",
        "key_valid_for_ms": FOREVER,
        "intent": lambda arguments, run: f"pay:{arguments['id']}",
        "query": find,
        "takeover": "operations",
    }
    return shop.world.fleet.tool("pay", **options | contract)(execute)


def payments(
    shop: Shop,
    *,
    commit: Mapping[str, Any] | None = None,
    validate: bool = False,
    plan: Stage | None = None,
    **contract: Any,
) -> None:
    """The workflow of these tests: read, plan, (validate,) confirm, commit, verify."""
    read, pay = order_tool(shop), pay_tool(shop, **contract)
    exactly = payment(pay)
    options = {"precondition": shop.unchanged, "replan": "read"} if commit is None else commit
    seen = [Read("look", read, lambda run: {}), Check("validate", valid)] if validate else []
    asks = [Confirm("confirm", exactly)] if pay.contract.needs_approval else []
    stages: list[Stage] = [
        Read("read", read, lambda run: {}),
        plan or Check("plan", planned),
        *seen,
        *asks,
        Commit("commit", exactly, pay, **options),
        Verify("verify", shop.is_paid),
    ]
    shop.world.workflow(name="pay", stages=stages, budget=ENOUGH)


def started(world: World, **options: Any) -> str:
    """A run that has come to rest for the first time, waiting for consent."""
    run = world.start("pay", **options)
    assert world.drive(run).status == "awaiting_approval"
    return run


def agreed(world: World, run: str) -> Run:
    """Agree, and let the run go on until it rests."""
    agree(world.fleet, run)
    return world.drive(run)


def approvals(world: World, run: str) -> list[tuple[str, int]]:
    """What was asked for, in order: what became of it, and the amount."""
    rows = world.rows(
        "SELECT status, arguments FROM handrail_approval WHERE run_id = :id ORDER BY state_version",
        id=run,
    )
    return [(row["status"], json.loads(row["arguments"])["amount"]) for row in rows]


def details(world: World, run: str, kind: str) -> list[dict[str, Any]]:
    return [event["detail"] for event in world.trace(run, kind)]


# ---- changed between plan and commit -------------------------------------------------------------


@pytest.mark.accept("RPW-12")
def test_a_price_that_changed_since_the_plan_is_refused_and_planned_under_a_new_approval(
    world: World,
) -> None:
    shop = Shop(world)
    payments(shop)
    run = started(world)
    shop.change(price=120)

    parked = agreed(world, run)

    assert (parked.status, shop.paid, shop.keys) == ("awaiting_approval", [], set())
    assert approvals(world, run) == [("withdrawn", 100), ("pending", 120)]
    [refused] = details(world, run, "plan.refused")
    assert refused["stage"] == "commit" and refused["back_to"] == "read"
    assert refused["refused"]["changed"] == {"version": 2, "planned": 1}
    assert refused["refused"]["evidence_ref"] == "order:2"

    done = agreed(world, run)

    assert (done.status, shop.paid) == ("completed", [120])
    assert approvals(world, run) == [("withdrawn", 100), ("consumed", 120)]
    assert world.effect(f"pay:{run}")["approval_id"] is not None


@pytest.mark.accept("RPW-12")
def test_a_tool_that_says_that_the_order_changed_is_asked_again_under_a_new_approval(
    world: World,
) -> None:
    """Its version alone moved: the same arguments and key, and a consent of their own."""
    shop = Shop(world, notices=True)
    payments(shop, commit={"replan": "read"})
    run = started(world)
    shop.change()

    parked = agreed(world, run)

    assert (parked.status, shop.paid) == ("awaiting_approval", [])
    assert world.effect(f"pay:{run}")["status"] == "absent"
    assert approvals(world, run) == [("consumed", 100), ("pending", 100)]
    [refused] = details(world, run, "plan.refused")
    assert refused["refused"] == {"by": "pay", "code": "order-changed"}

    done = agreed(world, run)

    assert (done.status, shop.paid, len(shop.keys)) == ("completed", [100], 1)
    assert approvals(world, run) == [("consumed", 100), ("consumed", 100)]


def test_the_second_consent_is_needed_although_the_first_was_consumed(small: World) -> None:
    shop = Shop(small, notices=True)
    payments(shop, commit={"replan": "read"})
    run = started(small)
    shop.change()
    agreed(small, run)
    agree(small.fleet, run)
    small.control.run(  # it grows too old before a worker comes
        "UPDATE handrail_approval SET expires_at = :now WHERE status = 'approved'",
        {"now": small.clock.ms},
    )

    done = small.drive(run)

    assert (done.status, done.reason, shop.paid) == ("failed", "approval-expired", [])


def test_what_was_sent_and_refused_is_not_sent_again_with_other_arguments(world: World) -> None:
    """The key stands for the old amount at the service: another amount is another intent."""
    shop = Shop(world, notices=True)
    payments(shop, commit={"replan": "read"})
    run = started(world)
    shop.change(price=120)
    agreed(world, run)

    done = agreed(world, run)

    assert (done.status, done.reason, shop.paid) == ("failed", "intent-conflict", [])
    assert "other arguments" in details(world, run, "run.stopped")[-1]["problem"]
    assert '"amount":100' in world.effect(f"pay:{run}")["arguments"]


@pytest.mark.parametrize(
    ("commit", "reason"),
    [("precondition", "verification-failed"), ("tool", "tool-failed")],
)
def test_without_a_way_back_a_change_stops_the_run(small: World, commit: str, reason: str) -> None:
    shop = Shop(small, notices=commit == "tool")
    payments(shop, commit={"precondition": shop.unchanged} if commit == "precondition" else {})
    run = started(small)
    shop.change()

    done = agreed(small, run)

    assert (done.status, done.reason, shop.paid) == ("failed", reason, [])


@pytest.mark.parametrize("notices", [False, True], ids=["precondition", "the tool's word"])
def test_an_order_that_never_holds_still_stops_the_run_after_so_many_plans(
    small: World, notices: bool
) -> None:
    shop = Shop(small, notices=notices)
    options = {} if notices else {"precondition": shop.unchanged}
    payments(shop, commit={"replan": "read", "replans": 2, **options})
    run = started(small)
    for _ in range(2):
        shop.change()
        assert agreed(small, run).status == "awaiting_approval"
    shop.change()

    done = agreed(small, run)

    assert (done.status, done.reason, shop.paid) == ("failed", "verification-failed", [])
    stopped = details(small, run, "run.stopped")[-1]
    assert stopped["replans"] == 2 and stopped["output"]["refused"]
    assert len(details(small, run, "plan.refused")) == 3


def test_the_public_state_moves_when_a_plan_is_refused(small: World) -> None:
    shop = Shop(small)
    payments(shop)
    run = started(small)
    before = small.row(run)["state_version"]
    shop.change()

    agreed(small, run)

    assert small.row(run)["state_version"] > before + 1
    assert small.fleet.get(run).outputs["commit"]["refused"]["by"] == "precondition"  # type: ignore[index, call-overload]


def test_a_write_without_approval_is_planned_again_by_itself(world: World) -> None:
    shop = Shop(world)
    payments(shop, approval="never")
    shop.script = [lambda: shop.change(price=70)]

    done = world.drive(world.start("pay"))

    assert (done.status, shop.paid, shop.asked) == ("completed", [70], 2)


# ---- a precondition that cannot be found out -----------------------------------------------------


def test_a_precondition_that_raises_sends_nothing(small: World) -> None:
    def away(claim: Any, call: ToolCall) -> Checked:
        raise ConnectionError("the shop is away")

    shop = Shop(small)
    payments(shop, commit={"precondition": away, "replan": "read"})

    done = agreed(small, started(small))

    assert (done.status, done.reason, shop.paid) == ("failed", "verification-failed", [])
    assert details(small, done.run_id, "plan.refused") == []
    [failed] = details(small, done.run_id, "precondition.failed")
    assert failed["timedOut"] is False


def test_a_precondition_is_asked_again_as_its_policy_allows(small: World) -> None:
    def away() -> None:
        raise ConnectionError("the shop is away")

    shop = Shop(small, script=[away])
    retry = Retry(attempts=2, base_ms=1)
    options = {"precondition": shop.unchanged, "replan": "read", "precondition_retry": retry}
    payments(shop, commit=options)

    done = agreed(small, started(small))

    assert (done.status, shop.paid, shop.asked) == ("completed", [100], 2)


# ---- another worker ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["after precondition", "before checkpoint", "after checkpoint"])
@pytest.mark.parametrize("price", [100, 130], ids=["the same price", "another price"])
def test_a_worker_that_dies_before_the_dispatch_is_followed_by_one_that_asks_again(
    world: World, place: str, price: int
) -> None:
    shop = Shop(world)
    payments(shop)
    run = started(world)
    agree(world.fleet, run)
    outside = Outside(when=lambda at: at == place)
    outside.then = outside.die

    world.step(run, outside=outside)
    assert outside.dead and shop.asked == 1
    if price != shop.price:
        shop.change(price=price)
    world.advance(LEASE_MS + SECOND)
    parked = world.drive(run)

    assert shop.asked == 2
    if price != 100:
        assert (parked.status, shop.paid) == ("awaiting_approval", [])
        parked = agreed(world, run)
    assert (parked.status, shop.paid, len(shop.keys)) == ("completed", [price], 1)
    assert f'"amount":{price}' in world.effect(f"pay:{run}")["arguments"]


def test_a_write_that_had_to_wait_for_its_lock_is_asked_again(world: World) -> None:
    shop = Shop(world)
    payments(shop)
    run = started(world)
    world.lock.away = True
    agree(world.fleet, run)
    world.step(run)
    assert world.effect(f"pay:{run}")["status"] == "planned"
    world.lock.away = False
    shop.change(price=130)

    assert world.drive(run).status == "awaiting_approval"
    assert agreed(world, run).status == "completed"
    assert shop.paid == [130]


def test_a_doubt_is_never_dropped_because_the_world_has_changed(world: World) -> None:
    """The answer was lost: whether the order changed meanwhile has no say in what happened."""
    shop = Shop(world)
    payments(shop)
    run = started(world)
    world.service.script = ["lost"]
    shop.script = [lambda: None, lambda: shop.change(price=130)]

    done = agreed(world, run)

    assert (done.status, shop.paid, shop.asked) == ("completed", [100], 1)


def test_a_key_that_may_have_been_used_is_sent_again_whatever_has_changed(world: World) -> None:
    """No query can tell: only the same request under the same key settles it."""
    shop = Shop(world)
    payments(shop, query=None)
    run = started(world)
    world.service.script = ["dropped"]
    agree(world.fleet, run)
    world.step(run)
    assert world.row(run)["status"] == "reconciling"
    shop.change(price=130)

    world.drive(run)

    assert (shop.paid, shop.asked) == ([100], 1)


def test_a_write_that_is_proved_absent_is_sent_again_only_if_the_order_is_unchanged(
    world: World,
) -> None:
    """And not with other arguments: it was dispatched once, whatever came of that."""
    shop = Shop(world)
    payments(shop)
    run = started(world)
    world.service.script = ["dropped"]
    agree(world.fleet, run)
    world.step(run)
    shop.change(price=130)

    assert world.drive(run).status == "awaiting_approval"
    assert world.effect(f"pay:{run}")["status"] == "absent"
    done = agreed(world, run)

    assert (done.reason, shop.paid) == ("intent-conflict", [])
    assert '"amount":100' in world.effect(f"pay:{run}")["arguments"]


@pytest.mark.accept("RPW-10")
@pytest.mark.parametrize("way", ["dies before the answer", "dies after the answer", "lost"])
def test_a_recovered_write_uses_one_key_and_takes_effect_once(world: World, way: str) -> None:
    shop = Shop(world)
    payments(shop)
    run = started(world)
    agree(world.fleet, run)
    outside = Outside()
    if way == "lost":
        world.service.script = ["lost"]
    else:
        place = "before write tool" if "before" in way else "after write tool"
        outside = Outside(when=lambda at: at == place)
        outside.then = outside.die
    world.step(run, outside=outside)

    done = world.drive(run)

    assert (done.status, shop.paid, len(shop.keys)) == ("completed", [100], 1)


# ---- the intent of another run -------------------------------------------------------------------


def two_runs_about_one_order(world: World, shop: Shop) -> tuple[str, str]:
    """The first has planned its payment, and waits for the lock; the second waits for consent."""
    payments(shop, plan=Check("plan", planned_for_one_order))
    first = started(world)
    world.lock.away = True
    agree(world.fleet, first)
    world.step(first)
    assert world.effect("pay:o-1")["planned_by"] == first
    shop.change(price=130)
    return first, started(world)


@pytest.mark.parametrize("dies", [False, True], ids=["at once", "after a crash"])
def test_what_another_run_has_planned_is_not_planned_anew(world: World, dies: bool) -> None:
    shop = Shop(world)
    first, second = two_runs_about_one_order(world, shop)
    agree(world.fleet, second)
    if dies:
        outside = Outside(when=lambda at: at == "after checkpoint")
        outside.then = outside.die
        world.lock.away = False
        world.step(second, outside=outside)
        assert outside.dead
        world.advance(LEASE_MS + SECOND)
    world.lock.away = False

    done = world.drive(second)

    assert (done.status, done.reason, shop.paid) == ("failed", "intent-conflict", [])
    assert world.effect("pay:o-1")["planned_by"] == first
    assert '"amount":100' in world.effect("pay:o-1")["arguments"]


def test_what_another_run_has_sent_is_not_planned_anew(world: World) -> None:
    """The first run planned it; a second one with the same arguments was faster."""
    shop = Shop(world)
    payments(shop, plan=Check("plan", planned_for_one_order))
    first, second = started(world), started(world)
    world.lock.away = True
    agree(world.fleet, first)
    world.step(first)
    world.lock.away = False
    assert agreed(world, second).status == "completed"

    done = world.drive(first)

    assert (done.status, shop.paid) == ("completed", [100])


# ---- cancelled in between ------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before precondition", "after precondition"])
@pytest.mark.parametrize("changed", [False, True], ids=["it holds", "it does not hold"])
def test_a_run_that_is_cancelled_at_its_precondition_sends_and_plans_nothing(
    world: World, place: str, changed: bool
) -> None:
    shop = Shop(world)
    payments(shop)
    run = started(world)
    agree(world.fleet, run)
    if changed:
        shop.change(price=130)
    asked_before = len(approvals(world, run))

    world.step(
        run, outside=Outside(when=lambda at: at == place, then=lambda: world.fleet.cancel(run))
    )

    done = world.drive(run)
    assert (done.status, shop.paid, shop.keys) == ("cancelled", [], set())
    assert len(approvals(world, run)) == asked_before


def test_a_run_that_is_cancelled_while_it_waits_for_the_second_consent_is_over(
    world: World,
) -> None:
    shop = Shop(world)
    payments(shop)
    run = started(world)
    shop.change(price=130)
    agreed(world, run)

    world.fleet.cancel(run)

    assert world.drive(run).status == "cancelled"
    assert approvals(world, run) == [("withdrawn", 100), ("withdrawn", 130)]
    assert shop.paid == []


# ---- a plan that a model makes -------------------------------------------------------------------


def model_plans(world: World, read: Tool) -> AgentLoop:
    """A planner that looks at the order before each plan, and believes no look before a refusal."""

    def propose(seen: dict[str, Any]) -> dict[str, Any]:
        texts = [seen["text"] for seen in seen["observations"]]
        refusals = [number for number, text in enumerate(texts) if '"refused"' in text]
        since = texts[refusals[-1] + 1 :] if refusals else texts
        if not since:
            return {"kind": "tool", "tool": "read_order", "arguments": {}}
        order = json.loads(since[-1])
        plan = {"order": seen["goal"], "amount": order["price"], "version": order["version"]}
        return {"kind": "complete", "answer": plan}

    world.fleet.model("planner", propose)

    def sound(claim: Any, call: ToolCall) -> bool:
        return set(claim) == {"order", "amount", "version"}

    return AgentLoop(name="plan", actions=(read,), model="planner", verify=sound)


def with_a_model(world: World, shop: Shop) -> None:
    read, pay = order_tool(shop), pay_tool(shop)
    exactly = payment(pay)
    plan = model_plans(world, read)
    stages: list[Stage] = [
        plan,
        Confirm("confirm", exactly),
        Commit("commit", exactly, pay, precondition=shop.unchanged, replan="plan"),
        Verify("verify", shop.is_paid),
    ]
    world.workflow(name="pay", stages=stages, budget=ENOUGH)


def test_a_model_that_plans_again_is_shown_why_and_repeats_nothing(world: World) -> None:
    """The same read of the same order is no repetition: it belongs to another plan."""
    shop = Shop(world)
    with_a_model(world, shop)
    run = started(world)
    shop.change(price=120)
    assert agreed(world, run).status == "awaiting_approval"

    done = agreed(world, run)

    assert (done.status, shop.paid) == ("completed", [120])
    sources = [told["source"] for told in world.ledger.observations(run)]
    assert sources.count("program") == 1


@pytest.mark.accept("RPW-08")
@pytest.mark.parametrize("changes", [False, True], ids=["as planned", "planned again"])
def test_no_model_is_asked_between_a_confirmation_and_the_end_of_its_verification(
    world: World, changes: bool
) -> None:
    shop = Shop(world)
    with_a_model(world, shop)
    run = started(world)
    if changes:
        shop.change(price=120)
        agreed(world, run)
    agreed(world, run)

    types = [event["type"] for event in world.trace(run)]
    since = types[len(types) - types[::-1].index("approval.given") :]
    assert "completion.verified" in since and "proposal.received" not in since
    assert types.count("proposal.received") == (4 if changes else 2)


# ---- what goes with a plan -----------------------------------------------------------------------


def test_what_a_write_would_change_is_read_anew_for_the_new_plan(world: World) -> None:
    """What undoes the write must restore what is there now, not what the old plan has seen."""
    shop = Shop(world)
    seen: list[int] = []

    async def undo(arguments: Any, call: ToolCall) -> Json:
        return {}

    def original(arguments: Any, call: ToolCall) -> Json:
        seen.append(shop.price)
        return {"price": shop.price}

    undoing = world.fleet.tool(
        "undo_pay",
        side_effect="idempotent",
        approval="never",
        guarantee="idempotency-key",
        key_valid_for_ms=FOREVER,
        intent=lambda arguments, run: f"undo:{arguments['id']}",
        takeover="operations",
    )(undo)
    compensation = Compensation(
        tool=undoing,
        arguments=lambda written, result, before, run: {"id": written["id"]},
        original=original,
    )
    payments(shop, side_effect="compensable", compensation=compensation)
    run = started(world)
    world.lock.away = True
    agree(world.fleet, run)
    world.step(run)
    world.lock.away = False
    shop.change(price=130)
    assert world.drive(run).status == "awaiting_approval"

    done = agreed(world, run)

    assert (done.status, seen) == ("completed", [100, 130])
    assert '"price":130' in world.effect(f"pay:{run}")["compensation"]


def test_a_shadow_run_asks_too(small: World) -> None:
    shop = Shop(small)
    payments(shop)

    done = small.drive(small.start("pay", mode=Mode.SHADOW))

    assert shop.paid == [] and done.status == "cancelled"


# ---- plans that a check makes from the refusal ---------------------------------------------------


def checked_plans(world: World, shop: Shop, **commit: Any) -> None:
    """The plan is made of what the refusal says; nothing is read for it."""
    confirmed = commit.pop("confirmed", False)
    tool = commit.pop("tool", None) or pay_tool(shop, approval="always" if confirmed else "never")

    def plan(run: RunFacts) -> Judgement:
        told: Any = run.outputs.get("commit")
        price = told["refused"]["changed"]["price"] if told else 100
        return Proceed({"order": run.goal, "amount": price})

    def same_price(claim: Any, call: ToolCall) -> Checked:
        shop.asked += 1
        if shop.script:
            shop.script.pop(0)()
        return Checked(claim["amount"] == shop.price, {"price": shop.price})

    exactly = payment(tool)
    options = {"precondition": same_price, "replan": "plan", **commit}
    stages: list[Stage] = [
        Check("plan", plan),
        *([Confirm("confirm", exactly)] if confirmed else []),
        Commit("commit", exactly, tool, **options),
    ]
    world.workflow(name="pay", stages=stages, budget=ENOUGH)


def test_the_consent_to_a_second_plan_counts_at_the_version_of_the_first(world: World) -> None:
    shop = Shop(world)
    checked_plans(world, shop, confirmed=True)
    run = started(world)
    shop.price = 130
    assert agreed(world, run).status == "awaiting_approval"

    done = agreed(world, run)

    assert (done.status, shop.paid) == ("completed", [130])
    second = world.rows(
        "SELECT id FROM handrail_approval WHERE run_id = :id AND status = 'consumed'", id=run
    )
    assert done.outputs["confirm"]["approval_id"] == second[0]["id"]  # type: ignore[index, call-overload]


def test_each_refusal_of_a_plan_is_kept(world: World) -> None:
    shop = Shop(world)
    shop.price = 110
    shop.script = [lambda: None, lambda: shop.change(price=120)]
    checked_plans(world, shop, replans=3)

    done = world.drive(world.start("pay"))

    assert (done.status, shop.paid) == ("completed", [120])
    told = [seen["text"] for seen in world.ledger.observations(done.run_id)]
    assert [json.loads(text)["refused"]["changed"]["price"] for text in told] == [110, 120]
    assert world.row(done.run_id)["observation_count"] == 2


@pytest.mark.parametrize("dies", [False, True])
def test_what_undoes_a_plan_that_was_made_anew_is_on_record_before_it_is_sent(
    world: World, dies: bool
) -> None:
    """The first plan is refused by the claim that was to send it."""
    shop = Shop(world)
    undone: list[Any] = []

    async def undo(arguments: Any, call: ToolCall) -> Json:
        undone.append(arguments["to"])
        return {}

    undoing = world.fleet.tool(
        "undo_pay",
        side_effect="idempotent",
        approval="never",
        guarantee="idempotency-key",
        key_valid_for_ms=FOREVER,
        intent=lambda arguments, run: f"undo:{arguments['id']}",
        takeover="operations",
    )(undo)

    def back(written: Any, result: Any, before: Any, run: Any) -> dict[str, Any]:
        return {"id": written["id"], "to": before["price"]}

    compensation = Compensation(
        tool=undoing, arguments=back, original=lambda arguments, call: {"price": shop.price}
    )
    options = {"side_effect": "compensable", "approval": "never", "compensation": compensation}
    checked_plans(world, shop, tool=pay_tool(shop, **options))
    run = world.start("pay")
    world.lock.away = True
    world.step(run)
    world.lock.away = False
    shop.price = 130
    world.advance(2 * SECOND)
    outside = Outside(when=lambda place: place == "after write tool")

    def cancelled() -> None:
        world.meanwhile(lambda: world.fleet.cancel(run))
        if dies:
            outside.die()

    outside.then = cancelled
    while not world.service.performed:
        world.step(run, outside=outside)
    world.advance(LEASE_MS + SECOND)
    done = world.drive(run)

    assert (done.status, shop.paid, undone) == ("compensated", [130], [130])


# ---- a write that may have been made, by whichever run -------------------------------------------


def one_intent(world: World, holds: Callable[[], bool]) -> list[str]:
    """A workflow whose runs all write `save:1`; returns who asked the precondition."""
    asked: list[str] = []
    tool = world.write_tool(intent=lambda arguments, run: "save:1")

    def precondition(claim: Any, call: ToolCall) -> Checked:
        asked.append(call.run_id)
        return Checked(holds())

    write = Commit("c", lambda run: Action(tool, {"id": 1}), tool, precondition=precondition)
    world.workflow(name="w", stages=[write], budget=ENOUGH)
    return asked


def test_a_second_run_takes_the_recorded_result_and_asks_nothing(world: World) -> None:
    """What the first has written is no change of the world that it would have to be asked about."""
    asked = one_intent(world, lambda: not world.service.performed)
    assert world.drive(world.start("w", run_id="a")).status == "completed"

    done = world.drive(world.start("w", run_id="b"))

    assert (done.status, asked) == ("completed", ["a"])
    assert world.service.performed == ["save:1"]


def test_a_precondition_that_was_left_out_for_a_doubt_is_asked_once_that_has_ended(
    world: World,
) -> None:
    """It ends as absent between the look at the effect and the dispatch."""
    state = {"holds": True}
    asked = one_intent(world, lambda: state["holds"])
    world.service.script = ["dropped"]
    world.start("w", run_id="a")
    world.start("w", run_id="b")
    world.step("a")
    while world.effect("save:1")["absences"] < 1:
        world.sweep_when_due("a")
    world.fleet.cancel("a")
    state["holds"] = False
    asked.clear()
    outside = Outside(when=lambda place: place == "after find_effect")

    def meanwhile() -> None:
        outside.when = lambda place: False
        while world.row("a")["status"] == "reconciling":
            world.meanwhile(lambda: world.sweep_when_due("a"))

    outside.then = meanwhile
    world.step("b", outside=outside)
    assert world.effect("save:1")["status"] == "absent" and world.service.performed == []

    done = world.drive("b")

    assert (done.status, done.reason) == ("failed", "verification-failed")
    assert (asked, world.service.performed) == (["b"], [])


# ---- what it may cost ----------------------------------------------------------------------------


def test_while_redis_is_away_nobody_outside_is_asked_again(world: World) -> None:
    asked = one_intent(world, lambda: True)
    run = world.start("w")
    world.lock.away = True
    for _ in range(20):
        if world._is_due(run):
            world.step(run)
        world.advance(SECOND)
    assert len(asked) == 1
    world.lock.away = False

    assert world.drive(run).status == "completed"
    assert len(asked) == 2


def test_what_a_precondition_says_is_kept_up_to_a_size(small: World) -> None:
    tool = small.write_tool()
    small.workflow(
        name="w",
        stages=[
            Commit(
                "c",
                lambda run: Action(tool, {"id": 1}),
                tool,
                precondition=lambda claim, call: Checked(
                    False, {"x": "y" * 100_000}, "z" * 100_000
                ),
            )
        ],
    )

    done = small.drive(small.start("w"))

    assert (done.status, done.reason) == ("failed", "verification-failed")
    [checked] = details(small, done.run_id, "precondition.checked")
    assert checked["omitted_bytes"] > 200_000 and checked["verified"] is False
    assert len(json.dumps(small.trace(done.run_id))) < 10_000


# ---- the stages ----------------------------------------------------------------------------------


@pytest.mark.accept("RPW-01")
def test_a_write_goes_through_its_stages_in_order(world: World) -> None:
    shop = Shop(world)
    payments(shop, validate=True)

    done = agreed(world, started(world))

    finished = [detail["stage"] for detail in details(world, done.run_id, "stage.finished")]
    assert finished == ["read", "plan", "look", "validate", "confirm", "commit", "verify"]


@pytest.mark.accept("RPW-01")
@pytest.mark.parametrize(
    "event",
    [
        RunEvent.CHECKPOINT_RESUMED,
        RunEvent.PROPOSAL_ALLOWED,
        RunEvent.RESULT_VERIFIED,
        RunEvent.COMPLETION_VERIFIED,
    ],
)
def test_a_run_that_waits_for_its_confirmation_cannot_skip_it(event: RunEvent) -> None:
    with pytest.raises(IllegalTransition):
        next_status("run", RunStatus.AWAITING_APPROVAL, event)


@pytest.mark.accept("RPW-01")
def test_a_stage_that_writes_cannot_be_reached_past_its_confirmation(small: World) -> None:
    pay = pay_tool(Shop(small))

    with pytest.raises(InvalidDefinition, match="needs approval"):
        Workflow(name="pay", stages=[Commit("commit", payment(pay), pay)])


@pytest.mark.accept("RPW-04")
@pytest.mark.parametrize("what", ["policy", "version", "user"])
def test_nobody_is_asked_to_confirm_what_does_not_fit(world: World, what: str) -> None:
    shop = Shop(world, owner="somebody else" if what == "user" else "anonymous")
    permission: dict[str, Any] = {"permission": "pay"} if what == "policy" else {}
    payments(shop, validate=True, **permission)
    run = world.start("pay", principal=Principal("anonymous"))
    if what == "version":
        while "plan" not in world.fleet.get(run).outputs:
            world.step(run)
        shop.change()

    done = world.drive(run)

    assert (done.status, done.reason) == ("failed", "permission-denied")
    assert approvals(world, run) == [] and shop.keys == set()


# ---- definitions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"replan": "nowhere"}, "which is no stage before it"),
        ({"replan": "verify"}, "which is no stage before it"),
        ({"replan": "commit"}, "which is no stage before it"),
        ({"replans": 0}, "replans must be at least 1"),
        ({"replans": True}, "replans must be at least 1"),
        ({"precondition": "unchanged"}, "precondition"),
        ({"precondition_retry": 3}, "retry"),
        ({"precondition_retry": Retry(attempts=2)}, "retries a precondition"),
        ({"replans": 2}, "let replan name one"),
    ],
)
def test_a_way_back_that_leads_nowhere_is_refused_when_it_is_defined(
    small: World, options: Mapping[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidDefinition, match=problem):
        payments(Shop(small), commit=options)


@pytest.mark.parametrize("approval", ["always", "never"])
def test_a_way_back_past_the_confirmation_is_refused_when_it_is_defined(
    small: World, approval: str
) -> None:
    """What somebody is asked about is never sent under the consent to an older plan."""
    shop = Shop(small)
    read, pay = order_tool(shop), pay_tool(shop, approval=approval)
    exactly = payment(pay)
    stages: list[Stage] = [
        Read("read", read, lambda run: {}),
        Check("plan", planned),
        Confirm("confirm", exactly),
        Check("late", lambda run: Proceed()),
        Commit("commit", exactly, pay, replan="late"),
    ]

    with pytest.raises(InvalidDefinition, match="goes back to 'late'"):
        Workflow(name="pay", stages=stages)


def test_a_way_back_past_another_write_is_refused_when_it_is_defined(small: World) -> None:
    """What has been written is not planned again: its new plan would be another write."""
    pay, save = pay_tool(Shop(small), approval="never"), small.write_tool()
    stages: list[Stage] = [
        Check("plan", lambda run: Proceed()),
        Commit("deposit", lambda run: Action(save, {"id": 1}), save),
        Commit("commit", payment(pay), pay, replan="plan"),
    ]

    with pytest.raises(InvalidDefinition, match="past 'deposit', which has written"):
        Workflow(name="pay", stages=stages)


def test_the_worst_case_counts_the_retries_of_each_plan(small: World) -> None:
    shop = Shop(small)
    read, pay = order_tool(shop), pay_tool(shop, approval="never")
    retry = Retry(attempts=2)

    def worst(**options: Any) -> int:
        stages: list[Stage] = [
            Read("read", read, lambda run: {}),
            Commit("commit", payment(pay), pay, precondition=shop.unchanged, **options),
        ]
        return Workflow(name="pay", stages=stages, budget=ENOUGH).worst_case_ms

    none = worst()
    once = worst(precondition_retry=retry) - none
    assert once > 0
    assert worst(precondition_retry=retry, replan="read", replans=2) - none == 3 * once
