"""Whom and what is trusted: a person's role and tenant, the ledger's clock, the exact text shown.

The matrices are generated from what the program itself declares, against the real functions.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Final

import pytest
import time_machine
from pydantic import BaseModel

from handrail.agent.approvals import ApprovalRefused
from handrail.agent.fixed import Done
from handrail.agent.people import MAY, Act, NotAllowed, Role
from handrail.agent.resolution import ResolutionRefused
from handrail.agent.stage import Action, arguments_hash
from handrail.agent.tools import Principal
from handrail.agent.workflow import Check, Commit, Confirm
from handrail.canonical import digest
from handrail.desk import Desk, NotYours, UnknownMatter
from handrail.errors import BadInput
from handrail.fleet import Fleet
from handrail.ledger.errors import UnknownRun
from handrail.testing.people import ADMIN, APPROVER, OPERATOR, agree
from tests.world import LEASE_MS, SECOND, Outside, World, look, open_world, save

HOUR: Final = 3_600 * SECOND


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world on SQLite, for what no database can make different."""
    with open_world(request) as opened:
        yield opened


# ---- what there is to decide ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Matters:
    """Of one tenant: what waits for consent, what asks, and what is in doubt."""

    tenant: str
    approval: str
    pays: str  # the runs
    asks: str
    doubts: str
    handoff: str


def declare(world: World) -> None:
    """The three workflows whose runs come to a person."""
    world.workflow(
        world.write_tool("pay", intent=lambda a, run: f"pay:{run.run_id}", approval="always"),
        plan=[{"kind": "tool", "tool": "pay", "arguments": {"id": 1}}],
        name="Pays",
    )
    question = {"kind": "clarify", "question": "Which order?"}
    world.workflow(world.read_tool(), plan=[question], name="Asks")
    doubtful = world.write_tool(
        "doubtful",
        intent=lambda a, run: f"doubtful:{run.run_id}",
        key_valid_for_ms=0,
        guarantee="transaction",
    )
    proposal = {"kind": "tool", "tool": "doubtful", "arguments": {"id": 1}}
    world.workflow(doubtful, plan=[proposal], name="Doubts")


def matters(world: World, tenant: str) -> Matters:
    """New runs of a tenant that all wait for somebody."""
    pays, asks = (world.start(name, tenant=tenant) for name in ("Pays", "Asks"))
    world.step(pays)
    world.step(asks)
    doubts = world.start("Doubts", tenant=tenant)
    world.service.script, world.service.away = ["dropped"], True
    world.drive(doubts)
    world.service.away = False
    (asked,) = world.ledger.people.approvals(run_id=pays)
    (handoff,) = world.ledger.people.handoffs(run_id=doubts)
    assert world.fleet.get(asks).status == "awaiting_input"
    return Matters(tenant, asked.id, pays, asks, doubts, handoff["id"])


def everything(world: World) -> dict[str, list[dict[str, Any]]]:
    """All that a person's act could have changed."""
    tables = "run effect approval approval_token consent handoff comment evidence audit principal"
    tables += " pause trace"
    return {
        table: sorted(world.rows(f"SELECT * FROM handrail_{table}"), key=repr)
        for table in tables.split()
    }


#: How a person is told that something is not for it.
REFUSALS: Final = (UnknownMatter, UnknownRun, NotAllowed, ApprovalRefused)


def does_nothing(world: World, act: Callable[..., object], *given: Any, **options: Any) -> None:
    """The act is refused, and nothing is as much as noted."""
    before = everything(world)
    with pytest.raises(REFUSALS):
        act(*given, **options)
    assert everything(world) == before


#: What a person does, by the name of the desk's function: (who, what there is, a token of it).
ACTS: Final[Mapping[str, Callable[[Fleet, Principal, Matters, str], object]]] = {
    "approval": lambda f, who, m, t: f.desk.approval(m.approval, by=who),
    "issue_token": lambda f, who, m, t: f.desk.issue_token(m.approval, by=who),
    "approve": lambda f, who, m, t: f.desk.approve(t, by=who),
    "reject": lambda f, who, m, t: f.desk.reject(m.approval, by=who, reason="no"),
    "answer": lambda f, who, m, t: f.desk.answer(m.asks, "7", by=who),
    "must_be_approver": lambda f, who, m, t: f.desk.must_be_approver(
        f.desk.approval(m.approval, by=OPERATOR), by=who
    ),
    "chosen": lambda f, who, m, t: f.desk.chosen(
        f.desk.handoff(m.handoff, by=OPERATOR), "ask-again", by=who
    ),
    "handoff": lambda f, who, m, t: f.desk.handoff(m.handoff, by=who),
    "claim": lambda f, who, m, t: f.desk.claim(m.handoff, by=who),
    "release": lambda f, who, m, t: f.desk.release(m.handoff, by=who),
    "assign": lambda f, who, m, t: f.desk.assign(m.handoff, "known", by=who),
    "snooze": lambda f, who, m, t: f.desk.snooze(m.handoff, for_ms=SECOND, by=who),
    "comment": lambda f, who, m, t: f.desk.comment(m.handoff, "mine", by=who),
    "query": lambda f, who, m, t: f.desk.query(m.handoff, by=who),
    "resolve": lambda f, who, m, t: f.desk.resolve(m.handoff, "ask-again", by=who, reason="x"),
}
#: And by that of the fleet's own.
FLEET_ACTS: Final[Mapping[str, Callable[[Fleet, Principal, Matters, str], object]]] = {
    "approve": lambda f, who, m, t: f.approve(t, by=who),
    "reject": lambda f, who, m, t: f.reject(m.approval, by=who, reason="no"),
    "answer": lambda f, who, m, t: f.answer(m.asks, "7", by=who),
    "cancel": lambda f, who, m, t: f.cancel(m.pays, by=who),
    "pause": lambda f, who, m, t: f.pause("tenant", m.tenant, reason="x", by=who),
    "resume": lambda f, who, m, t: f.resume("tenant", m.tenant, reason="x", by=who),
}
#: What is about the whole fleet, and done by nobody who has to do with some tenants alone.
WHOLE_ACTS: Final[Mapping[str, Callable[[Fleet, Principal, Matters, str], object]]] = {
    "ledger_rewound": lambda f, who, m, t: f.ledger_rewound(reason="x", by=who),
    "ledger_cleared": lambda f, who, m, t: f.ledger_cleared(reason="x", by=who, force=True),
}
#: What lists, each with how its entries say whose they are.
LISTS: Final[Mapping[str, Callable[[Fleet, Principal, Mapping[str, Any]], list[str]]]] = {
    "approvals": lambda f, who, o: [a.tenant for a in f.desk.approvals(by=who, **o)],
    "handoffs": lambda f, who, o: [h["tenant"] for h in f.desk.handoffs(by=who, **o)],
    "audit": lambda f, who, o: [e["tenant"] for e in f.desk.audit(by=who, **o)],
}
#: What has tests of its own below, and what only says who somebody is.
BESIDE: Final = {"digest", "next", "may_approve", "admit", "dismiss", "principals"}
NAMES: Final = {"who", "on_duty"}


def takes_a_person(owner: type) -> set[str]:
    """The public functions by which a person does something."""
    return {
        name
        for name, function in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_") and "by" in inspect.signature(function).parameters
    }


def test_the_matrix_has_every_function_by_which_a_person_does_something() -> None:
    assert takes_a_person(Desk) == {*ACTS, *LISTS} | BESIDE | NAMES
    assert takes_a_person(Fleet) == {*FLEET_ACTS, *WHOLE_ACTS}


# ---- two tenants ---------------------------------------------------------------------------------

ALL: Final = frozenset(Role)
ANN: Final = Principal("ann", roles=ALL, tenants=frozenset({"a"}))
EVE: Final = Principal("eve", roles=ALL, tenants=frozenset({"b"}))


@pytest.mark.parametrize("owner", ["desk", "fleet"])
def test_nobody_does_anything_to_what_is_another_tenants(world: World, owner: str) -> None:
    """S16: every role of one tenant is none in another; the tenant's own people may."""
    declare(world)
    acts = ACTS if owner == "desk" else FLEET_ACTS
    theirs = matters(world, "a")
    for act in (*acts.values(), *WHOLE_ACTS.values()):
        token = world.fleet.desk.issue_token(theirs.approval, by=ANN)
        does_nothing(world, act, world.fleet, EVE, theirs, token)
    for name, act in acts.items():
        own = matters(world, "a")
        token = world.fleet.desk.issue_token(own.approval, by=ANN)
        act(world.fleet, ANN, own, token)
        if name == "pause":
            world.fleet.resume("tenant", "a")


def test_nobody_finds_what_is_another_tenants(world: World) -> None:
    """S16: whatever a list is narrowed by."""
    declare(world)
    theirs, hers = matters(world, "a"), matters(world, "b")
    for run, who in ((theirs.pays, ANN), (hers.pays, EVE)):
        world.fleet.cancel(run, by=who, reason="x")
    theirs, hers = matters(world, "a"), matters(world, "b")

    for name, listed in LISTS.items():
        assert {*listed(world.fleet, EVE, {})} == {"b"}, name
        assert {*listed(world.fleet, ANN, {})} == {"a"}, name
        assert {*listed(world.fleet, OPERATOR, {})} >= {"a", "b"}, name
        assert listed(world.fleet, EVE, {"tenant": "a"}) == [], name
        for run in (theirs.pays, theirs.asks, theirs.doubts):
            assert listed(world.fleet, EVE, {"run": run}) == [], name
    counted = world.fleet.desk.digest(by=EVE)
    assert sum(row["handoffs"] for row in counted) == 4 and len(counted) == 2
    taken = [world.fleet.desk.next(by=EVE)]
    assert taken[0] is not None and taken[0].row["tenant"] == "b"
    assert world.fleet.desk.next(by=EVE, tenant="a") is None
    asked = world.fleet.desk.approval(theirs.approval, by=OPERATOR)
    assert world.fleet.desk.may_approve(asked, by=EVE) is not None
    assert world.fleet.desk.may_approve(asked, by=ANN) is None


def test_a_tenants_operator_stops_that_tenant_alone(small: World) -> None:
    for scope, name in (("fleet", ""), ("tenant", "a"), ("workflow", "Pays"), ("tool", "pay")):
        for act in (small.fleet.pause, small.fleet.resume):
            does_nothing(small, act, scope, name, reason="x", by=EVE)

    small.fleet.pause("tenant", "b", reason="x", by=EVE)
    assert [pause.name for pause in small.fleet.pauses()] == ["b"]
    assert small.fleet.resume("tenant", "b", by=EVE) is True


def test_a_tenants_admin_hands_out_nothing_beyond_it(small: World) -> None:
    desk = small.fleet.desk
    desk.admit("root", ["admin"])
    desk.admit("ann", ["admin"], tenants=["a"], by="root")
    desk.admit("bob", ["operator"], tenants=["b"], by="root")

    for tenants in (None, ["b"], ["a", "b"]):
        for subject in ("new", "ann"):
            does_nothing(small, desk.admit, subject, ["admin"], tenants=tenants, by="ann")
    for subject in ("root", "bob"):
        does_nothing(small, desk.admit, subject, ["viewer"], tenants=["a"], by="ann")
        does_nothing(small, desk.dismiss, subject, by="ann")
    assert [one.subject for one in desk.principals(by="ann")] == ["ann", "root"]
    desk.admit("cem", ["operator"], tenants=["a"], by="ann")
    desk.dismiss("cem", by="ann")


@pytest.mark.parametrize("kind", ["read", "write", "query"])
def test_a_result_that_is_another_subjects_is_not_taken(world: World, kind: str) -> None:
    """S16: it enters no state; of a write it proves nothing."""

    def mine(result: Any, run: Any) -> bool:
        return bool(result["owner"] == run.principal.subject)

    def theirs(arguments: Any, call: Any) -> Any:
        world.service.calls[f"read {call.run_id}"] += kind == "read"
        return {"owner": "somebody-else", "secret": "4711"}

    if kind == "read":
        tool = world.fleet.tool("lookup", side_effect="read", belongs_to=mine)(theirs)
        world.workflow(tool, plan=[look(of=1)])
    else:
        tool = world.write_tool(belongs_to=mine, key_valid_for_ms=0, guarantee="transaction")
        world.workflow(tool, plan=[save(id=1)])
        world.service.script = [theirs if kind == "write" else "dropped"]
        world.service.records["save:1"] = {"owner": "somebody-else", "secret": "4711"}
    run = world.drive(world.start(principal="customer"))

    if kind == "read":
        assert (run.status, run.reason) == ("failed", "tool-failed")
    else:
        assert (run.status, run.reason) == ("handed_off", "unknown-effect")
        assert world.effect("save:1")["status"] != "applied"
    assert run.observations == () and "4711" not in str(world.trace(run.run_id))


# ---- every act, every role -----------------------------------------------------------------------

BY_ACT: Final[Mapping[Act, Callable[[Fleet, Principal, Matters, str], object]]] = {
    Act.LOOK: lambda f, who, m, t: f.desk.handoffs(by=who),
    Act.REQUEST_TOKEN: ACTS["issue_token"],
    Act.APPROVE: ACTS["approve"],
    Act.REJECT: ACTS["reject"],
    Act.ANSWER: ACTS["answer"],
    Act.CLAIM: ACTS["claim"],
    Act.RELEASE: ACTS["release"],
    Act.ASSIGN: ACTS["assign"],
    Act.SNOOZE: ACTS["snooze"],
    Act.COMMENT: ACTS["comment"],
    Act.QUERY: ACTS["query"],
    Act.RESOLVE: ACTS["resolve"],
    Act.CANCEL: FLEET_ACTS["cancel"],
    Act.PAUSE: FLEET_ACTS["pause"],
    Act.RESUME: FLEET_ACTS["resume"],
    Act.ADMIT: lambda f, who, m, t: f.desk.admit("new", ["viewer"], by=who),
    Act.DISMISS: lambda f, who, m, t: f.desk.dismiss("known", by=who),
    Act.REWOUND: WHOLE_ACTS["ledger_rewound"],
    Act.CLEARED: WHOLE_ACTS["ledger_cleared"],
}


def test_every_act_there_is_has_a_place_in_the_matrix() -> None:
    assert {*BY_ACT} == {*Act} == {*MAY}


@pytest.mark.parametrize("act", Act)
def test_an_act_is_done_by_those_roles_that_may_and_no_others(small: World, act: Act) -> None:
    """S20: a refused one leaves nothing, one that is done is in the audit with who did it."""
    declare(small)
    there = matters(small, "a")
    token = small.fleet.desk.issue_token(there.approval, by=APPROVER)
    for role in [*({*Role} - MAY[act]), None]:
        who = Principal("who", roles=frozenset({role} if role else ()))
        does_nothing(small, BY_ACT[act], small.fleet, who, there, token)

    for role in sorted(MAY[act]):
        there = matters(small, "a")
        token = small.fleet.desk.issue_token(there.approval, by=APPROVER)
        small.fleet.desk.admit("known", ["viewer"], by=ADMIN)
        small.fleet.pause("tenant", "a" if act is Act.RESUME else "b", reason="x", by=OPERATOR)
        if act is Act.CLEARED:
            small.fleet.ledger_rewound(reason="x", by=OPERATOR)
        who = Principal(f"the-{role}", roles=frozenset({role}))
        BY_ACT[act](small.fleet, who, there, token)
        if act is not Act.LOOK:
            entry = small.fleet.desk.audit(by=ADMIN, limit=1)[0]
            assert (entry["actor"], entry["act"], entry["roles"]) == (who.subject, act, [role])
        small.fleet.resume("tenant", "a", by=OPERATOR)


def test_whoever_hands_out_roles_or_resolves_agrees_to_nothing() -> None:
    """S20: consent is another person's, and nobody completes by decree."""
    assert MAY[Act.APPROVE] == MAY[Act.REJECT] == MAY[Act.REQUEST_TOKEN] == {Role.APPROVER}
    assert MAY[Act.ADMIT] == MAY[Act.DISMISS] == {Role.ADMIN}
    assert all(Role.VIEWER not in roles for act, roles in MAY.items() if act is not Act.LOOK)


def at_once(*acts: Callable[[], object]) -> list[str]:
    """Do things in threads of their own, at the same moment; what became of each."""
    gate = threading.Barrier(len(acts))
    outcomes = ["" for _ in acts]

    def do(number: int) -> None:
        gate.wait()
        try:
            acts[number]()
            outcomes[number] = "done"
        except BadInput as error:
            outcomes[number] = error.code

    threads = [threading.Thread(target=do, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


BOB: Final = Principal("bob", roles=frozenset({"operator", "approver"}))


def test_two_people_at_once_make_one_decision(world: World) -> None:
    """S20: consent and refusal, two answers, two claims."""
    declare(world)
    there, fleet = matters(world, "a"), world.fleet
    token = fleet.desk.issue_token(there.approval, by=APPROVER)

    decided = at_once(
        lambda: fleet.approve(token, by=APPROVER),
        lambda: fleet.reject(there.approval, by=BOB, reason="no"),
    )
    assert sorted(decided) == ["approval-refused", "done"]
    status = fleet.get(there.pays).status
    assert status == ("executing" if decided[0] == "done" else "failed")

    answered = at_once(
        lambda: fleet.answer(there.asks, "7", by=OPERATOR),
        lambda: fleet.answer(there.asks, "8", by=BOB),
    )
    assert sorted(answered) == ["approval-refused", "done"]
    assert len(fleet.desk.audit(by=ADMIN, act="answer")) == 1

    claimed = at_once(
        lambda: fleet.desk.claim(there.handoff, by=OPERATOR),
        lambda: fleet.desk.claim(there.handoff, by=BOB),
    )
    assert sorted(claimed) == ["done", "handoff-taken"]
    winner = (OPERATOR, BOB)[claimed.index("done")]
    loser = (OPERATOR, BOB)[1 - claimed.index("done")]
    with pytest.raises(NotYours):
        fleet.desk.release(there.handoff, by=loser)
    assert fleet.desk.handoff(there.handoff, by=loser).row["claimed_by"] == winner.subject


# ---- wrong clocks --------------------------------------------------------------------------------


def waiting(world: World, *, expires_ms: int = HOUR) -> str:
    """A run that waits for consent to save 1."""
    tool = world.write_tool(approval="always")

    def action(run: Any) -> Action:
        return Action(tool, {"id": 1})

    stages = [
        Confirm("confirm", action=action, expires_ms=expires_ms),
        Commit("commit", action=action, tool=tool),
        Check("tell", judge=lambda run: Done("saved")),
    ]
    world.workflow(stages=stages)
    run = world.start()
    world.step(run)
    return run


WRONG: Final = [datetime(2001, 1, 1), datetime(2099, 12, 31)]


@pytest.mark.parametrize("wall", WRONG, ids=["far behind", "far ahead"])
@pytest.mark.parametrize("late", [False, True], ids=["in time", "too late"])
def test_no_wall_clock_of_a_process_keeps_an_approval_alive_or_ends_it(
    world: World, wall: datetime, late: bool
) -> None:
    """S21: only the ledger's clock says what has expired."""
    run = waiting(world)
    (asked,) = world.fleet.desk.approvals(by=APPROVER)
    token = world.fleet.desk.issue_token(asked.id, by=APPROVER)
    world.advance(HOUR if late else HOUR - 1)
    console = Fleet(settings=world.fleet.settings)
    console.__dict__["own_secret"] = world.fleet.own_secret
    if not world.postgres:  # whose clock is that of the process
        console.__dict__["ledger"] = world.ledger
    with time_machine.travel(wall, tick=False):
        if late:
            with pytest.raises(ApprovalRefused) as refused:
                console.approve(token, by=APPROVER)
            assert refused.value.problem == "expired"
        else:
            console.approve(token, by=APPROVER)
            world.step(run)
    if world.postgres:
        console.close()
    found = world.drive(run)

    assert found.reason == ("approval-expired" if late else "completed")
    assert len(world.service.performed) == (not late)


@pytest.mark.parametrize("offset_s", [-1e9, 1e9])
def test_no_worker_clock_keeps_a_deadline_alive_or_ends_it(world: World, offset_s: float) -> None:
    """S21: a worker counts from its claim; by what its clock stands at is nothing measured."""

    def worker() -> Any:
        runtime = world.worker()
        runtime.clock = lambda: world.clock.monotonic() + offset_s
        return runtime

    def slow(seen: Any) -> Any:
        world.advance(15 * SECOND)
        return look(of=len(seen["observations"]))

    world.workflow(world.read_tool(), plan=[slow] * 9)
    run = world.start(budget={"deadline_ms": 38 * SECOND})
    with time_machine.travel(WRONG[offset_s > 0], tick=False):
        for rounds in (1, 2):
            world.step(run, runtime=worker())
            assert world.fleet.get(run).observation_count == rounds
        world.step(run, runtime=worker())
    found = world.drive(run)

    assert (found.status, found.reason) == ("budget_exhausted", "deadline-exhausted")
    assert found.observation_count == 2


def test_a_worker_whose_clock_stands_still_sends_nothing_under_a_dead_approval(
    world: World,
) -> None:
    """S21: it took the step in time, and slept until long after; its own clock knows nothing."""
    run = waiting(world, expires_ms=LEASE_MS // 3)
    agree(world.fleet, run)
    outside = Outside(when=lambda place: place == "before checkpoint")
    outside.then = lambda: world.meanwhile(lambda: world.advance(LEASE_MS // 2))
    runtime = world.worker(outside)
    began = world.clock.monotonic()
    runtime.clock = lambda: began
    world.step(run, outside=outside, runtime=runtime)
    assert "before checkpoint" in outside.places, outside.places
    found = world.fleet.get(run)

    assert (found.status, found.reason) == ("failed", "approval-expired")
    assert world.service.performed == []


# ---- what is shown is what is done ---------------------------------------------------------------

HIDING: Final = {
    "bidi": "pay \u202e001\u202c now",
    "isolates": "\u2066to\u2069 \u2067ot\u2069",
    "zero width": "acc\u200bount\u200d\ufeff",
    "tags": "go\U000e0041\U000e0042\U000e007f",
    "homoglyph": "\u0440\u0430yp\u0430l",  # the first two and the last are Cyrillic
    "full width": "\uff11\uff10\uff10",
    "combining": "a\u0338\u0336",
    "control": "a\x00b\x1b[2K\rc\x7f",
    "selectors": "ok\ufe0f\U000e0100",
    "lone surrogate": "x\ud800y",
    "composed": "\u00e9",
    "decomposed": "e\u0301",
}


class Letter(BaseModel):
    text: str


@pytest.mark.parametrize("hidden", HIDING.values(), ids=HIDING.keys())
def test_what_a_person_is_shown_is_ascii_complete_and_what_is_hashed(
    world: World, hidden: str
) -> None:
    """S6: nothing in it hides, however it was written, and all of it is bound."""
    sent: list[str] = []

    def write(arguments: Any, call: Any) -> Any:
        sent.append(arguments.text if isinstance(arguments, Letter) else arguments["text"])
        return world.service.arrive(call, arguments, SECOND)

    model = None if "\ud800" in hidden else Letter  # a text that no UTF-8 can hold
    tool = world.write_tool(approval="always", input=model, intent=lambda letter, run: "save:1")
    world.workflow(tool, plan=[save(text=hidden)])
    world.service.script = [write]
    run = world.start()
    world.step(run)
    (asked,) = world.fleet.desk.approvals(by=APPROVER, run=run)
    shown = json.loads(asked.text)

    assert asked.text.isascii() and asked.text.isprintable()
    assert shown["arguments"] == {"text": hidden} == dict(asked.arguments)
    assert asked.digest == digest("approval", asked.text)
    assert shown["arguments_hash"] == arguments_hash("save", {"text": hidden})
    agree(world.fleet, run)
    assert world.drive(run).status == "completed"
    assert sent == [hidden]
    assert world.effect("save:1")["arguments_hash"] == asked.arguments_hash


def test_what_looks_alike_is_not_the_same_action(small: World) -> None:
    """S6: each pair reads the same, and has a text and a digest of its own."""
    alike = [("paypal", HIDING["homoglyph"]), ("account", HIDING["zero width"])]
    alike += [("go", HIDING["tags"]), (HIDING["composed"], HIDING["decomposed"])]
    tool = small.write_tool(approval="always", input=Letter, intent=lambda letter, run: run.run_id)
    for pair in alike:
        texts = []
        for word in pair:
            name = f"Letter{len(small.fleet.workflows)}"
            small.workflow(tool, plan=[save(text=word)], name=name)
            run = small.start(name)
            small.step(run)
            (asked,) = small.fleet.desk.approvals(by=APPROVER, run=run)
            texts.append((json.dumps(asked.shown["arguments"]), asked.digest))
        assert texts[0][0] != texts[1][0] and texts[0][1] != texts[1][1], pair


def test_nothing_of_a_long_action_is_left_out(small: World) -> None:
    """S6: what matters may stand at the very end."""
    tail = "x" * 20_000 + " and pay everything to \u202eeve"
    tool = small.write_tool(approval="always", input=Letter, intent=lambda letter, run: "save:1")
    small.workflow(tool, plan=[save(text=tail)])
    run = small.start()
    small.step(run)
    (asked,) = small.fleet.desk.approvals(by=APPROVER, run=run)

    assert json.loads(asked.text)["arguments"]["text"] == tail
    assert "and pay everything to \\u202eeve" in asked.text


# ---- a flood -------------------------------------------------------------------------------------

FLOOD: Final = 10_000


def flood(world: World) -> Matters:
    """Ten thousand runs in a person's queue; the first one is real, the others its copies.

    Of the most urgent, half are questions and half are somebody else's.
    """
    declare(world)
    first = matters(world, "a")
    numbers = (
        f"generate_series(1, {FLOOD}) AS n"
        if world.postgres
        else f"(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {FLOOD})"
        " SELECT n FROM c)"
    )
    for table, key in (("run", "id"), ("handoff", "run_id")):
        (row,) = world.rows(f"SELECT * FROM handrail_{table} WHERE {key} = :id", id=first.doubts)
        new = {"id": "'flood-' || n"}
        if table == "run":
            new |= {"dedupe_key": "NULL", "undoing_effect_id": "NULL", "effect_id": "NULL"}
        else:
            new |= {
                "run_id": "'flood-' || n",
                "effect_id": "NULL",
                "priority": "CASE WHEN n <= 500 THEN 1 ELSE 3 END",
                "reason": "CASE WHEN n <= 250 THEN 'clarification-required' ELSE reason END",
                "assigned_to": "CASE WHEN n > 250 AND n <= 500 THEN 'somebody' END",
                "subject": "'s' || (n % 7)",
                "opened_at": "opened_at + n",
            }
        columns = [name for name in row if name != "claim_id"]
        values = ", ".join(new.get(name, name) for name in columns)
        world.rows(
            f"INSERT INTO handrail_{table} ({', '.join(columns)})"
            f" SELECT {values} FROM handrail_{table}, {numbers} WHERE {key} = :id RETURNING id",
            id=first.doubts,
        )
    if world.postgres:
        world.rows("ANALYZE handrail_handoff")
        world.rows("ANALYZE handrail_run")
    return first


def dried_up(world: World) -> None:
    """Take the copies away: what every run of a world promises they never promised."""
    for table in ("handoff", "run"):
        world.rows(f"DELETE FROM handrail_{table} WHERE id LIKE 'flood-%'")


def statements(world: World, act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What an act gives, and the statements that it took."""
    world.database.statements = []
    found = act()
    return found, world.database.statements


def test_under_a_flood_of_handoffs_a_look_costs_what_is_shown(world: World) -> None:
    """S24: list, digest and `next` are a few statements each, and bring few rows."""
    first = flood(world)
    desk = world.fleet.desk
    try:
        listed, cost = statements(world, lambda: desk.handoffs(by=OPERATOR))
        assert len(listed) == 100 and len(cost) <= 2, cost
        assert all("LIMIT" in sql for sql in cost if "handrail_handoff" in sql)

        counted, cost = statements(world, lambda: desk.digest(by=OPERATOR))
        assert len(cost) <= 2 and len(counted) <= 4
        assert sum(row["handoffs"] for row in counted) == FLOOD + 2
        assert max(row["subjects"] for row in counted) >= 7, "whose they are shows from above"

        taken, cost = statements(world, lambda: desk.next(by=OPERATOR))
        assert taken is not None and taken.id == first.handoff, "behind 500 that are not for it"
        assert len(cost) <= 40, cost
    finally:
        dried_up(world)


def test_a_list_of_requests_costs_the_same_however_many_it_shows(world: World) -> None:
    """S24: and each has those who have agreed to it, and no others."""
    pay = world.write_tool("pay", intent=lambda a, run: run.run_id, approval="always", approvers=2)
    proposal = {"kind": "tool", "tool": "pay", "arguments": {"id": 1}}
    world.workflow(pay, plan=[proposal])
    runs = [world.start() for _ in range(7)]
    for run in runs:
        world.step(run)
    agree(world.fleet, runs[3])
    agree(world.fleet, runs[5], by=BOB)
    costs = set()
    for limit in (1, 4, 100):
        look_at = partial(world.fleet.desk.approvals, by=APPROVER, limit=limit)
        listed, cost = statements(world, look_at)
        costs.add(len(cost))
        assert len(listed) == min(limit, 7)

    assert len(costs) == 1 and costs.pop() <= 3
    agreed = {asked.run_id: asked.consents for asked in listed}
    assert agreed == {run: () for run in runs} | {runs[3]: ("approver",), runs[5]: ("bob",)}


def test_under_a_flood_of_handoffs_the_queue_is_read_by_its_index(world: World) -> None:
    flood(world)
    explain = "EXPLAIN" if world.postgres else "EXPLAIN QUERY PLAN"
    wanted = (
        "SELECT * FROM handrail_handoff WHERE 1 = 1 AND status = 'open'"
        " ORDER BY priority, opened_at, id LIMIT 100"
    )
    try:
        plan = str(world.rows(f"{explain} {wanted}"))
        assert "handrail_handoff_queue" in plan, plan
        _, cost = statements(world, lambda: world.fleet.desk.handoffs(by=OPERATOR))
        asked = [sql for sql in cost if "handrail_handoff" in sql]
        assert asked and "ORDER BY priority, opened_at, id LIMIT" in asked[0], (
            "that is what it asks"
        )
    finally:
        dried_up(world)


def test_under_a_flood_of_handoffs_a_sweep_goes_on_with_what_is_not_one(world: World) -> None:
    """S24: what waits for people, and what is escalated, holds up no other run."""
    flood(world)
    try:
        world.workflow(world.read_tool("other"), plan=[], name="Goes")
        goes = world.start("Goes")
        world.messages.clear()
        world.advance(11 * SECOND)
        found, cost = statements(world, lambda: world.reconciler.sweep(limit=10))
        assert found <= 20 and len(cost) <= 10, (found, cost)
        assert [message.run_id for message in world.messages] == [goes]

        world.advance(world.ledger.escalate_ms)  # now all of them are due at once
        found, cost = statements(world, lambda: world.reconciler.sweep(limit=10))
        assert found <= 20 and len(cost) <= 20 * found + 10, (found, len(cost))
        escalated = "SELECT count(*) AS n FROM handrail_handoff WHERE escalated_at IS NOT NULL"
        assert 0 < world.rows(escalated)[0]["n"] <= 20
    finally:
        dried_up(world)


def test_a_name_that_nobody_admitted_stops_and_starts_nothing(small: World) -> None:
    small.fleet.pause(reason="x", by="anybody")
    assert small.fleet.resume(by="anybody"), "until somebody is admitted, a name is believed"
    small.fleet.desk.admit("root", ["admin"])
    small.fleet.desk.admit("vera", ["viewer"], by="root")
    small.fleet.desk.admit("olga", ["operator"], by="root")

    for name in ("anybody", "vera", "operator"):
        does_nothing(small, small.fleet.pause, reason="x", by=name)
    small.fleet.pause(reason="x", by="olga")
    for name in ("anybody", "vera"):
        does_nothing(small, small.fleet.resume, by=name)
    assert small.fleet.resume(by="olga")


def test_what_only_admitted_people_are_given(small: World) -> None:
    declare(small)
    there = matters(small, "a")
    desk = small.fleet.desk
    desk.assign(there.handoff, "anybody", by=OPERATOR)
    desk.admit("root", ["admin"])

    does_nothing(small, desk.assign, there.handoff, "olga", by=OPERATOR)
    desk.admit("olga", ["operator"], by="root")
    assert desk.assign(there.handoff, "olga", by=OPERATOR)["assigned_to"] == "olga"


def test_a_question_that_somebody_is_at_is_answered_by_nobody_else(world: World) -> None:
    declare(world)
    asks = matters(world, "a").asks
    (question,) = world.fleet.desk.handoffs(by=OPERATOR, run=asks)
    world.fleet.desk.claim(question["id"], by=BOB)

    with pytest.raises(ResolutionRefused) as refused:
        world.fleet.answer(asks, "7", by=OPERATOR)
    assert refused.value.problem == "claimed"
    assert world.fleet.get(asks).status == "awaiting_input"
    world.fleet.answer(asks, "7", by=BOB)


def test_the_next_matter_is_one_that_nobody_is_at(world: World) -> None:
    declare(world)
    handoffs = {matters(world, "a").handoff, matters(world, "a").handoff}
    taken = [world.fleet.desk.next(by=OPERATOR) for _ in range(3)]

    assert all(taken) and {one.id for one in taken[:2] if one} == handoffs
    assert [one.yours_already for one in taken if one] == [False, False, True]
    assert world.fleet.desk.next(by=BOB) is None


NO_NAMES: Final[tuple[Any, ...]] = (5, b"x", "", "a\0b", "\ud800", "acme")


def test_what_cannot_be_read_is_refused_by_its_code_and_changes_nothing(world: World) -> None:
    """Nothing that a person or a program hands in ends in an error without a code."""
    declare(world)
    there = matters(world, "a")
    fleet, desk = world.fleet, world.fleet.desk
    no_words: tuple[Any, ...] = (5, None, "x" * 3_000)
    no_roles: tuple[Any, ...] = ("admin", [], None, 5, [{}], ["king"])
    no_anchors: tuple[Any, ...] = (5, b"1:2", "9" * 5_000 + ":" + "0" * 64)
    no_times: tuple[Any, ...] = (-1, "1", 1.5, 2**60)
    no_filters: Any = [{name: True} for name in ("bogus", "free", "limit", "mine")]
    wrong: list[Callable[[], object]] = [
        *(partial(desk.verify_audit, anchor=x) for x in no_anchors),
        *(partial(desk.audit, by=ADMIN, since_ms=x) for x in no_times),
        *(partial(desk.audit, by=ADMIN, actor=x) for x in NO_NAMES[:2]),
        *(partial(desk.handoffs, by=ADMIN, assigned_to=x) for x in NO_NAMES[:2]),
        *(partial(desk.issue_token, there.approval, by=APPROVER, to=x) for x in NO_NAMES[:5]),
        *(partial(desk.dismiss, x, by=ADMIN) for x in NO_NAMES),
        *(partial(desk.admit, "eve", x, by=ADMIN) for x in no_roles),
        *(partial(desk.admit, "eve", ["admin"], by=ADMIN, tenants=x) for x in NO_NAMES),
        partial(desk.admit, "eve", ["admin"], by=ADMIN, tenants=["a\0"]),
        *(partial(desk.next, by=OPERATOR, **x) for x in no_filters),
        *(partial(fleet.cancel, there.pays, by=OPERATOR, reason=x) for x in no_words),
        *(partial(fleet.resume, by=OPERATOR, reason=x) for x in no_words),
        partial(desk.handoffs, by=replace(OPERATOR, tenants=frozenset({"a\0"}))),
        partial(desk.comment, there.handoff, "...", by=OPERATOR),
    ]
    before = everything(world)
    for act in wrong:
        with pytest.raises(BadInput) as refused:
            act()
        assert refused.value.code != BadInput.code, act
    assert everything(world) == before


@pytest.mark.parametrize("words", ["a\0b", "a\ud800b", "\x1b[31m"])
def test_whatever_text_a_person_says_is_kept_as_it_was_said(world: World, words: str) -> None:
    declare(world)
    there = matters(world, "a")
    desk = world.fleet.desk
    row = desk.comment(there.handoff, words, by=OPERATOR)
    desk.reject(there.approval, by=APPROVER, reason=words)
    world.fleet.cancel(there.asks, by=OPERATOR, reason=words)
    world.fleet.resume(by=OPERATOR, reason=words)

    assert row["comments"][0]["text"] == words
    assert [one["reason"] for one in desk.audit(by=ADMIN, limit=3)][1:] == [words] * 2
    assert desk.verify_audit().intact


def test_the_bound_of_decisions_holds_for_many_at_once(world: World) -> None:
    declare(world)
    world.fleet.settings = world.fleet.settings.model_copy(update={"decisions_per_minute": 1})
    asked = [matters(world, "a").approval for _ in range(4)]

    outcomes = at_once(
        *(partial(world.fleet.reject, one, by=APPROVER, reason="no") for one in asked)
    )
    assert outcomes.count("done") == 1, outcomes
    assert len(world.fleet.desk.audit(by=ADMIN, act="reject")) == 1
