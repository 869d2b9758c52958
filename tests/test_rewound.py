"""A ledger that was set back has forgotten writes that were made: none is made again."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from handrail.agent.budget import Budget
from handrail.agent.effects import EffectStatus, Rewind, may_be_forgotten
from handrail.agent.fixed import HandOff
from handrail.agent.people import NotAllowed
from handrail.agent.resolution import Resolution, ResolutionRefused
from handrail.agent.stage import Checked
from handrail.canonical import Json
from handrail.ledger import schema
from handrail.ledger.errors import FleetAtWork, InvalidMoment, NotMigrated, NotSettled
from handrail.ledger.rewinds import STILL_COUNTS_MS
from handrail.ledger.schema import HEAD
from handrail.ledger.session import Session
from handrail.tasks.calls import ToolCall
from handrail.testing.services import EmbeddedPostgres
from tests.live import complete, deployed
from tests.live import save as live_save
from tests.test_cli import Project, migrated, project
from tests.test_handoffs import matter, refused, resolve
from tests.test_protocol import effect
from tests.test_replanning import Shop, payments
from tests.test_to_a_person import judged_by
from tests.world import (
    _TABLES,
    KINDS,
    SECOND,
    SETTLED_MS,
    START_MS,
    Outside,
    Service,
    World,
    open_world,
    save,
    save_for_goal,
)

__all__ = ["migrated", "project"]  # the fixtures of the command line's tests

PATIENT: Final = Budget(tool_calls=12, model_calls=8, deadline_ms=4_000_000)
HOUR: Final = 3_600 * SECOND
#: How a tool can be asked about: whether its key is known again, and whether it has a query.
ASKABLE: Final[dict[str, dict[str, Any]]] = {
    "key and query": {},
    "key alone": {"query": False},
    "query alone": {"key_valid_for_ms": 0},
    "neither": {"key_valid_for_ms": 0, "query": False},
}


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


# ---- a backup ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Backup:
    """The ledger's rows as they were at a moment; what is outside is in no backup."""

    at: int
    tables: dict[str, list[dict[str, Any]]]
    place: str = ""


def backup(world: World, place: str = "") -> Backup:
    tables = {name: world.rows(f"SELECT * FROM {name}") for name in _TABLES}
    return Backup(world.clock.ms, tables, place)


def restore(world: World, taken: Backup) -> None:
    """Set the ledger back. No message survives, and nobody has said anything about it yet."""
    put_back(world.control, taken.tables)
    world._move(taken.at)  # each time it is set back from the same moment
    world.messages.clear()
    world.lock.held.clear()
    world.service.calls.clear()  # what the lost calls have cost is forgotten, too
    world.reconciler = world.sweeper()


def put_back(on: Session, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for name in _TABLES:
        on.run(f"DELETE FROM {name}", {})
    for name in reversed(_TABLES):
        for row in tables[name]:
            names, places = ", ".join(row), ", ".join(f":{column}" for column in row)
            on.run(f"INSERT INTO {name} ({names}) VALUES ({places})", row)


def rewound(world: World, **options: Any) -> Rewind:
    return world.fleet.ledger_rewound(reason="restored", by="olga", **options)


def all_backups(world: World, run: str, drive: Callable[[Outside], object]) -> list[Backup]:
    """Let a run go its way, with a backup at each call to the outside."""
    taken = [backup(world, "at first")]

    def keep() -> None:
        if not world.database.in_memory:
            taken.append(backup(world, outside.places[-1]))

    outside = Outside(when=lambda place: place.startswith(("before", "after")), then=keep)
    drive(outside)
    return taken


def seen_by(service: Service) -> tuple[Any, ...]:
    return tuple(map(copy.copy, (service.performed, service.records, service.keys)))


# ---- nothing is made twice -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ASKABLE)
@pytest.mark.parametrize("way", ["ok", "lost", "dropped"])
def test_whatever_a_backup_has_missed_is_not_made_again(world: World, kind: str, way: str) -> None:
    """From each moment of a run's life: what came after it is lost, and the run goes on."""
    world.workflow(world.write_tool(**ASKABLE[kind]), plan=[save(id=1)], budget=PATIENT)
    run = world.start()
    world.service.script = [way]

    def lost_time(outside: Outside) -> None:
        world.step(run, outside=outside)
        world.drive(run)

    taken = all_backups(world, run, lost_time)
    made = seen_by(world.service)
    assert len(taken) > 8
    ends = set()
    for one in taken:
        restore(world, one)
        world.service.performed, world.service.records, world.service.keys = map(copy.copy, made)
        world.advance(HOUR)
        rewound(world)
        ended = world.drive(run)
        assert world.service.performed.count("save:1") <= 1, one.place
        if ended.status == "completed":
            assert world.service.performed.count("save:1") == 1, one.place
        ends.add(ended.status)
    asked = kind != "neither"
    assert ends == ({"completed"} if asked else ends & {"completed", "handed_off"})


@pytest.mark.parametrize("kind", ["query alone", "neither"])
def test_without_the_mark_it_would_be_made_again(world: World, kind: str) -> None:
    """The tests here can fail: this is what they are about."""
    world.workflow(world.write_tool(**ASKABLE[kind]), plan=[save(id=1)], budget=PATIENT)
    run = world.start()
    taken = backup(world)
    world.drive(run)
    restore(world, taken)
    world.advance(HOUR)
    world.drive(run)

    assert world.service.performed == ["save:1", "save:1"]


@pytest.mark.parametrize("kind", ASKABLE)
def test_an_undoing_that_a_backup_has_missed_is_not_made_again(world: World, kind: str) -> None:
    tool = world.compensable_tool(undo=ASKABLE[kind])
    world.workflow(tool, plan=[save_for_goal], budget=PATIENT)
    run = world.start()

    def lost_time(outside: Outside) -> None:
        wished = Outside(
            when=lambda place: place == "after write tool", then=lambda: world.fleet.cancel(run)
        )
        world.step(run, outside=wished)
        world.sweep(outside)
        assert world.drive(run).status == "compensated"

    taken = all_backups(world, run, lost_time)[1:]
    made = seen_by(world.service)
    assert len(taken) > 4
    for one in taken:
        restore(world, one)
        world.service.performed, world.service.records, world.service.keys = map(copy.copy, made)
        world.advance(HOUR)
        rewound(world)
        ended = world.drive(run)
        assert world.service.performed == [f"save:{run}", f"undo:{run}"], one.place
        unasked = {"handed_off"} if kind == "neither" else set()
        assert ended.status in {"compensated"} | unasked, one.place


def test_another_run_of_the_same_intent_asks_as_well(world: World) -> None:
    """The run that made it is gone with its whole record, and its host asks for it once more."""
    world.workflow(world.write_tool(key_valid_for_ms=0), plan=[save(id=1)], budget=PATIENT)
    taken = backup(world)
    world.drive(world.start(run_id="lost"))
    restore(world, taken)
    world.advance(HOUR)
    rewound(world)

    assert world.drive(world.start(run_id="again")).status == "completed"
    assert world.service.performed == ["save:1"]
    assert world.effect("save:1")["result"] == '{"of":"save:1","receipt":1}'


def test_what_was_never_made_is_sent_once_the_service_has_said_so(world: World) -> None:
    """Two answers, each to a query that was sent when nothing of the lost time could still land."""
    world.workflow(world.write_tool(key_valid_for_ms=0), plan=[save(id=1)], budget=PATIENT)
    rewind = rewound(world)
    run = world.start()
    world.step(run)
    effect = world.effect("save:1")
    assert world.row(run)["status"] == "reconciling" and world.service.performed == []
    assert (effect["status"], effect["doubt_trigger"], effect["rewind"]) == (
        "unknown",
        "worker-lost",
        rewind.number,
    )
    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"]
    asked = world.rows("SELECT detail FROM handrail_evidence WHERE kind = 'query'")
    sent = [json.loads(one["detail"])["sent_at"] for one in asked]
    assert len([at for at in sent if at >= rewind.lost_until + SETTLED_MS]) == 2
    assert world.used(run)["tool_calls"] == 1, "asking is the reconciler's, and was not charged"


def test_it_is_asked_once_for_each_mark(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)], budget=PATIENT)
    first = rewound(world)
    run = world.start()
    world.service.script = ["busy"]  # proved not to have happened, and tried again
    assert world.drive(run).status == "completed"
    assert len(world.trace(run, "effect.reconciliation-required")) == 1
    [asked] = world.trace(run, "effect.reconciliation-required")
    assert asked["detail"]["rewind"] == first.number

    second = rewound(world)
    assert second.number == first.number + 1
    assert second.lost_from == first.lost_from, "what the first has lost is lost still"


def test_a_key_whose_lifetime_may_be_over_is_not_sent_again(world: World) -> None:
    """It may have been used in the lost time, and the service may have forgotten it by now."""
    tool = world.write_tool(key_valid_for_ms=HOUR, query=False)
    world.workflow(tool, plan=[save(id=1)], budget=PATIENT)
    run = world.start()
    taken = backup(world)
    world.drive(run)
    restore(world, taken)
    world.advance(HOUR)
    rewound(world)

    ended = world.drive(run)
    assert (ended.status, ended.reason) == ("handed_off", "unknown-effect")
    assert world.service.performed == ["save:1"]
    [handoff] = world.rows("SELECT package FROM handrail_handoff")
    assert "the ledger was set back (rewind 1)" in handoff["package"]


def test_a_write_that_was_about_to_be_sent_is_asked_about_before_its_run_can_end(
    world: World,
) -> None:
    """Its deadline has passed meanwhile: the run may stop for that, but not over a doubt."""
    budget = Budget(tool_calls=4, model_calls=4, deadline_ms=100_000)
    world.workflow(world.write_tool(), plan=[save(id=1)], budget=budget)
    run = world.start()
    taken: list[Backup] = []
    outside = Outside(
        when=lambda place: place == "after checkpoint", then=lambda: taken.append(backup(world))
    )
    world.step(run, outside=outside)
    assert world.drive(run).status == "completed"
    restore(world, taken[0])
    world.advance(HOUR)
    before = world.row(run)
    assert before["lease_until"] < world.clock.ms and before["status"] == "executing"

    rewound(world)
    assert world.row(run)["status"] == "reconciling"
    world.drive(run)
    assert world.effect("save:1")["status"] == "applied"
    assert world.service.performed == ["save:1"]


def test_how_it_is_undone_is_not_read_from_what_it_has_made(world: World) -> None:
    """The state from before the write is lost: what can be read now is what came of it."""
    world.workflow(
        world.compensable_tool(original=lambda arguments, call: {"made": world.service.performed}),
        plan=[save_for_goal],
        budget=PATIENT,
    )
    run = world.start()
    taken = backup(world)
    world.drive(run)
    restore(world, taken)
    world.advance(HOUR)
    rewound(world)
    world.step(run)
    assert world.effect(f"save:{run}")["compensation"] is None
    world.fleet.cancel(run)

    ended = world.drive(run)
    assert ended.status == "handed_off", "it took effect, and nobody knows how to undo it"
    assert world.service.performed == [f"save:{run}"]


def test_a_state_that_was_read_before_the_mark_is_not_believed(world: World) -> None:
    """Whoever was at work on the restored ledger before it was marked may have read too late."""
    world.workflow(
        world.compensable_tool(original=lambda arguments, call: {"was": 1}),
        plan=[save_for_goal],
        budget=PATIENT,
    )
    run = world.start()
    dies = Outside(when=lambda place: place == "after checkpoint")
    dies.then = dies.die
    world.step(run, outside=dies)
    assert json.loads(world.effect(f"save:{run}")["compensation"])["original"] == {"was": 1}
    rewound(world)
    assert world.effect(f"save:{run}")["compensation"] is None


def test_a_state_that_was_not_changed_is_read_anew(world: World) -> None:
    read: list[int] = []

    def original(arguments: Any, call: ToolCall) -> Json:
        read.append(world.clock.ms)
        return {"was": 1}

    world.workflow(world.compensable_tool(original=original), plan=[save_for_goal], budget=PATIENT)
    rewound(world)
    run = world.start()

    assert world.drive(run).status == "completed"
    assert world.service.performed == [f"save:{run}"]
    assert len(read) == 1, "before it was certain that nothing was made, a look proved nothing"
    assert world.used(run)["tool_calls"] == 2, "the look and the write"
    assert json.loads(world.effect(f"save:{run}")["compensation"])["original"] == {"was": 1}


def test_how_it_is_undone_stays_known_where_nothing_has_to_be_read(world: World) -> None:
    world.workflow(world.compensable_tool(), plan=[save_for_goal], budget=PATIENT)
    run = world.start()
    taken = backup(world)
    world.drive(run)
    restore(world, taken)
    world.advance(HOUR)
    rewound(world)
    world.step(run)
    assert world.row(run)["status"] == "reconciling"
    world.fleet.cancel(run)

    assert world.drive(run).status == "compensated"
    assert world.service.performed == [f"save:{run}", f"undo:{run}"]


# ---- what is asked before a write ----------------------------------------------------------------


@pytest.fixture
def shop(world: World) -> Shop:
    shop = Shop(world)
    options = {"precondition": unpaid(shop)}
    payments(shop, commit=options, approval="never", key_valid_for_ms=0, guarantee="transaction")
    return shop


def unpaid(shop: Shop) -> Callable[..., Checked]:
    """A precondition that the write itself ends."""

    def check(claim: Any, call: ToolCall) -> Checked:
        shop.asked += 1
        return Checked(not shop.paid)

    return check


def test_its_precondition_is_not_asked_of_what_it_may_have_made(shop: Shop) -> None:
    """It would say no, for what the write itself has done: its run would end as failed."""
    world = shop.world
    run = world.start("pay")
    taken = backup(world)
    assert world.drive(run).status == "completed" and shop.asked == 1
    restore(world, taken)
    world.advance(300 * SECOND)
    rewound(world)

    assert world.drive(run).status == "completed"
    assert (shop.paid, shop.asked) == ([100], 1)


def test_its_precondition_is_asked_once_it_is_certain_that_nothing_was_made(shop: Shop) -> None:
    world = shop.world
    rewound(world)
    run = world.start("pay")
    assert world.drive(run).status == "completed"
    assert (shop.paid, shop.asked) == ([100], 1)


# ---- nothing ends a run over what it may have sent -----------------------------------------------


def made_and_forgotten(world: World) -> str:
    """A new run of what was made in the lost time."""
    world.workflow(world.write_tool(), plan=[save(id=1)], budget=PATIENT)
    taken = backup(world)
    world.drive(world.start(run_id="lost"))
    restore(world, taken)
    world.advance(HOUR)
    rewound(world)
    return world.start(run_id="again")


def planned_and_dead(world: World) -> str:
    """It is planned, and its worker has died before the dispatch."""
    run = made_and_forgotten(world)
    dies = Outside(when=lambda place: place == "after checkpoint")
    dies.then = dies.die
    world.step(run, outside=dies)
    assert world.effect("save:1")["status"] == "planned"
    return run


def planned_and_given_back(world: World) -> str:
    """It is planned, and its lease was given back before the dispatch."""
    run = made_and_forgotten(world)
    world.lock.away = True
    world.step(run)
    world.lock.away = False
    assert world.effect("save:1")["status"] == "planned"
    return run


def ends_as_applied(world: World, run: str) -> None:
    """Cancelled it is not: the write was made, and nothing undoes it."""
    ended = world.drive(run)
    assert (ended.status, ended.reason) == ("handed_off", "unknown-effect")
    assert world.effect("save:1")["status"] == "applied"
    assert world.service.performed == ["save:1"]


def test_a_wish_while_nobody_has_the_run_is_no_proof(world: World) -> None:
    run = planned_and_dead(world)
    world.advance(60 * SECOND)
    world.reconciler.sweep()
    assert world.effect("save:1")["status"] == "unknown", "asked about as its lease is found lost"
    world.fleet.cancel(run)
    ends_as_applied(world, run)


def test_a_wish_over_a_dead_worker_is_no_proof(world: World) -> None:
    run = planned_and_dead(world)
    world.fleet.cancel(run)
    assert world.row(run)["status"] == "cancelling"
    ends_as_applied(world, run)


def wished_at(world: World, run: str, place: str) -> Outside:
    """A worker that goes on, while its run is cancelled at a place."""
    return Outside(
        when=lambda at: at == place,
        then=lambda: world.meanwhile(lambda: world.fleet.cancel(run)),
    )


@pytest.mark.parametrize("away", [False, True], ids=["its lock held", "Redis away"])
def test_a_wish_between_plan_and_dispatch_is_no_proof(world: World, away: bool) -> None:
    run = made_and_forgotten(world)
    world.lock.away = away
    world.step(run, outside=wished_at(world, run, "after checkpoint"))
    world.lock.away = False
    assert world.row(run)["status"] == "reconciling"
    ends_as_applied(world, run)


def test_a_wish_at_rest_is_no_proof(world: World) -> None:
    run = planned_and_given_back(world)
    world.fleet.cancel(run)
    assert world.row(run)["status"] == "reconciling"
    ends_as_applied(world, run)


def test_a_wish_during_the_next_claim_is_no_proof(world: World) -> None:
    run = planned_and_given_back(world)
    world.advance(10 * SECOND)
    world.step(run, outside=wished_at(world, run, "before checkpoint"))
    assert world.row(run)["status"] == "reconciling"
    ends_as_applied(world, run)


@pytest.mark.parametrize("dead", [True, False], ids=["a dead worker", "at rest"])
def test_a_deadline_is_no_proof(world: World, dead: bool) -> None:
    run = planned_and_dead(world) if dead else planned_and_given_back(world)
    world.advance(PATIENT.deadline_ms)
    if not dead:
        world.step(run)
    ended = world.drive(run)
    assert world.effect("save:1")["status"] == "applied"
    assert ended.reason == "deadline-exhausted" and world.service.performed == ["save:1"]


def test_a_run_whose_worker_is_alive_is_asked_about_at_once(world: World) -> None:
    """It holds the lease of the backup, and is fenced off."""
    world.workflow(world.write_tool(), plan=[save(id=1)], budget=PATIENT)
    run = world.start()
    taken: list[Backup] = []
    outside = Outside(
        when=lambda place: place == "after checkpoint", then=lambda: taken.append(backup(world))
    )
    world.step(run, outside=outside)
    restore(world, taken[0])
    assert world.row(run)["lease_until"] > world.clock.ms
    rewound(world, lost_from=world.clock.ms)

    assert world.row(run)["status"] == "reconciling"
    assert world.drive(run).status == "completed" and world.service.performed == ["save:1"]


def test_a_run_about_to_send_what_another_has_proved_absent_is_asked_about(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)], budget=PATIENT)
    first = world.start()
    world.service.script = ["busy"]
    world.step(first)
    assert world.effect("save:1")["status"] == "absent"
    second = world.start()
    world.lock.away = True
    world.step(second)
    world.lock.away = False
    assert world.row(second)["phase"] == "write" and world.effect("save:1")["owner_run_id"] == first
    world.fleet.cancel(first)
    taken = backup(world)
    world.drive(second)
    restore(world, taken)
    world.advance(HOUR)
    rewound(world)

    assert world.row(second)["status"] == "reconciling"
    assert world.drive(second).status == "completed" and world.service.performed == ["save:1"]


# ---- doubts that were open -----------------------------------------------------------------------


def test_a_doubt_counts_no_absence_from_before_it(world: World) -> None:
    """In the lost time the same intent may have been sent again, and may land until later."""
    world.workflow(world.write_tool(), plan=[save(id=1)], budget=PATIENT)
    run = world.start()
    world.service.script = ["dropped"]
    world.step(run)
    world.advance(SETTLED_MS)
    world.control.run("UPDATE handrail_effect SET absences = 1, queries_left = 1", {})
    rewind = rewound(world)
    effect = world.effect("save:1")

    assert (effect["absences"], effect["queries_left"]) == (0, 8)
    assert effect["dispatch_deadline_at"] == rewind.lost_until + 5_000
    assert world.drive(run).status == "completed" and world.service.performed == ["save:1"]


def test_a_refusal_says_nothing_of_attempts_that_are_forgotten(world: World) -> None:
    """The sender of the backup has its own attempt's refusal; there may have been another."""
    world.workflow(world.write_tool(), plan=[save(id=1)], budget=PATIENT)
    run = world.start()
    world.service.script = ["busy"]
    marked = Outside(
        when=lambda place: place == "before write tool",
        then=lambda: world.meanwhile(lambda: rewound(world)),
    )
    world.step(run, outside=marked)

    assert world.effect("save:1")["status"] == "unknown"
    assert world.drive(run).status == "completed"
    assert world.service.performed == ["save:1"]


def test_a_doubt_that_a_person_has_waits_for_what_may_land_as_well(world: World) -> None:
    tool = world.write_tool(key_valid_for_ms=0, query=False, guarantee="transaction")
    world.workflow(tool, plan=[save(id=1)], budget=PATIENT)
    run = world.start()
    world.service.script = ["dropped"]
    world.drive(run)
    assert world.effect("save:1")["status"] == "handed_off"
    world.advance(HOUR)
    rewind = rewound(world)
    effect = world.effect("save:1")
    assert effect["dispatch_deadline_at"] == rewind.lost_until + 5_000
    assert (effect["doubt"], effect["rewind"]) == ("unproven", None)
    with pytest.raises(ResolutionRefused) as refused:
        resolve(world, run, "failed", evidence="paper")
    assert "it may still land" in refused.value.detail


def test_a_run_that_a_person_gives_up_is_not_said_to_have_sent_nothing(world: World) -> None:
    run = judged_by(world, lambda run: HandOff()).run_id
    said = {one.resolution: one for one in matter(world, run).choices}
    assert "Nothing was sent" in said[Resolution.CANCELLED].consequence
    world.advance(HOUR)
    rewound(world)
    said = {one.resolution: one for one in matter(world, run).choices}
    assert "in the lost time" in said[Resolution.CANCELLED].consequence
    assert refused(world, run, "cancelled") == "evidence-needed"
    resolve(world, run, "cancelled", evidence="the service has no record")


# ---- who is still at work ------------------------------------------------------------------------


def test_a_receipt_of_the_lost_time_opens_the_doubt_that_settles_it(world: World) -> None:
    """The worker has outlived its ledger: what it has sent is planned there, and no more."""
    world.workflow(world.write_tool(key_valid_for_ms=0), plan=[save(id=1)], budget=PATIENT)
    run = world.start()
    taken: list[Backup] = []

    def act(place: str) -> bool:
        if place == "after checkpoint" and not taken:
            taken.append(backup(world))
        return place == "after write tool"

    world.step(run, outside=Outside(when=act, then=lambda: restore(world, taken[0])))

    effect = world.effect("save:1")
    assert (effect["status"], effect["doubt_trigger"]) == ("unknown", "contrary-evidence")
    assert effect["owner_run_id"] == run and effect["attempts"] == 1
    assert world.drive(run).status == "completed" and world.service.performed == ["save:1"]


def test_a_receipt_of_the_lost_time_is_not_taken_for_that_of_a_later_sender(
    world: World,
) -> None:
    """Both dispatches have the token 1: the claim tells them apart."""
    world.workflow(world.write_tool(), plan=[save(id=1)], budget=PATIENT)
    run = world.start()
    taken: list[Backup] = []

    def act(place: str) -> bool:
        if place == "after checkpoint" and not taken:
            taken.append(backup(world))
        return place == "after write tool"

    def meanwhile() -> None:
        restore(world, taken[0])
        world.advance(HOUR // 60)
        world.meanwhile(lambda: world.reconciler.sweep())
        world.service.script = ["hang"]
        dies = Outside(when=lambda place: place == "before write tool")
        dies.then = dies.die
        world.meanwhile(lambda: world.step(run, outside=dies))
        assert world.effect("save:1")["status"] == "dispatched"

    world.step(run, outside=Outside(when=act, then=meanwhile))

    assert world.effect("save:1")["status"] == "dispatched", "its own sender has the word"
    [kept] = world.rows("SELECT kind, token FROM handrail_evidence")
    assert kept == {"kind": "outcome", "token": 1}


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_sent_for_something_forgotten_is_logged_and_ends_no_worker(
    world: World, whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the effect, or even of the run, there is no row any more."""
    world.workflow(world.write_tool(), plan=[save(id=1)], budget=PATIENT)
    taken = backup(world)
    run = world.start()
    if not whole:
        taken = backup(world)
    outside = Outside(
        when=lambda place: place == "after write tool", then=lambda: restore(world, taken)
    )

    runtime = world.step(run, outside=outside)

    assert runtime.counts["forgotten"] == 1
    assert "which the ledger has forgotten" in caplog.text
    key = world.service.keys.popitem()[0]
    assert key in caplog.text, "by which the service can be asked"


@pytest.mark.live
def test_real_workers_on_a_restored_database_make_nothing_twice(
    tmp_path: Path, valkey_url: str, postgres: EmbeddedPostgres
) -> None:
    """The backup knows the run as queued; the lost time is all of its life."""
    url = postgres.create_database(f"rewound_{uuid.uuid4().hex[:8]}")
    with deployed(tmp_path, url, valkey_url) as fleet:
        runs = [
            fleet.start(live_save("note"), complete("note"), tenant=f"tenant-{number}")
            for number in range(3)
        ]
        database = fleet.fleet.ledger.database
        taken = {name: database.run(f"SELECT * FROM {name}", {}) for name in _TABLES}
        fleet.staff(2)
        assert {run.status for run in fleet.rest(*runs)} == {"completed"}
        fleet.kill(*fleet.workers)
        with database.transaction() as tx:
            put_back(tx, taken)
        assert {run.status for run in map(fleet.fleet.get, runs)} == {"queued"}
        fleet.fleet.ledger_rewound(reason="restored")
        fleet.staff(2)

        assert {run.status for run in fleet.rest(*runs)} == {"completed"}
        assert [len(fleet.noted("effect", run)) for run in runs] == [1, 1, 1]


# ---- the command line ----------------------------------------------------------------------------


def test_the_command_says_what_is_lost_and_what_is_to_be_settled(migrated: Project) -> None:
    assert migrated.json("ledger", "status") == []
    assert "never set back" in migrated("ledger", "status")
    marked = migrated.json("ledger", "rewound", "--reason", "restored to 09:14", "--as", "ann")
    assert (marked["number"], marked["open"], marked["by"]) == (1, True, "ann")
    assert marked["lost_from"] <= marked["lost_until"]
    assert migrated.json("ledger", "status") == [marked]
    told = migrated("ledger", "status")
    assert "rewind 1, open: restored to 09:14 (ann)" in told
    [finding] = [f for f in migrated.json("doctor")["findings"] if f["about"] == "ledger"]
    assert finding["code"] == "ledger-rewound"
    assert migrated.json("audit", "verify")["entries"] == 1

    assert migrated.json("ledger", "cleared", "--reason", "compared") == {"cleared": [1]}
    assert "nothing to clear" in migrated("ledger", "cleared", "--reason", "compared")
    assert migrated.json("ledger", "status")[0]["open"] is False
    assert "ledger" not in {f["about"] for f in migrated.json("doctor")["findings"]}


def test_the_command_wants_a_moment_that_it_can_read(migrated: Project) -> None:
    for given in (
        *("yesterday", "2026-11-30T09:14:00", "2999-01-01T00:00:00Z"),
        *("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", ""),
    ):
        refused = migrated.refused(
            "ledger", "rewound", "--reason", "why", "--lost-from", given, code=2
        )
        assert refused == "invalid-moment", given
    wanted = ["--lost-from", "2026-01-02T03:04:05+01:00"]
    marked = migrated.json("ledger", "rewound", "--reason", "why", *wanted)
    assert marked["lost_from"] == 1_767_319_445_000


# ---- the mark ------------------------------------------------------------------------------------


def test_it_says_what_is_lost_by_the_latest_moment_that_it_knows(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)], budget=PATIENT)
    world.advance(7 * SECOND)
    world.ledger.beat("sweep", kind="sweep")
    world.advance(SECOND)
    world.start()
    world.advance(HOUR)
    world.start()  # a web process that has gone on since it was restored
    world.advance(SECOND)
    rewind = rewound(world)

    assert rewind == Rewind(
        number=1, lost_from=START_MS + 7 * SECOND, lost_until=START_MS + 9 * SECOND + HOUR
    )
    [listed] = world.ledger.rewinds.listed()
    assert (listed.rewind, listed.reason, listed.marked_by) == (rewind, "restored", "olga")
    assert (listed.is_open, listed.older_runs, listed.asked) == (True, 2, {})


def test_without_any_sign_of_life_everything_that_was_begun_may_be_lost(world: World) -> None:
    assert rewound(world).lost_from == 1
    world.fleet.ledger_cleared(reason="a rehearsal", by="olga")
    world.advance(STILL_COUNTS_MS + 1)
    world.control.run("DELETE FROM handrail_audit", {})
    world.start(world.workflow(world.read_tool()))
    world.advance(SECOND)
    world.start()
    assert rewound(world).lost_from == world.clock.ms - SECOND


def test_a_fleet_at_work_has_to_say_since_when(world: World) -> None:
    world.advance(HOUR)
    world.ledger.beat("sweep", kind="sweep")
    world.advance(SECOND)
    with pytest.raises(FleetAtWork, match=r"sweep was at work 1 s ago.*--lost-from") as caught:
        rewound(world)
    assert caught.value.code == "fleet-at-work"
    for moment in (0, -5, world.clock.ms + 1):
        with pytest.raises(InvalidMoment):
            rewound(world, lost_from=moment)
    assert world.ledger.rewinds.listed() == []

    assert rewound(world, lost_from=START_MS + SECOND).lost_from == START_MS + SECOND
    world.advance(HOUR)
    assert rewound(world).lost_from == START_MS + SECOND


def test_a_mark_that_was_cleared_too_early_counts_for_the_next(world: World) -> None:
    world.ledger.beat("sweep", kind="sweep")
    world.advance(HOUR)
    first = rewound(world)
    world.fleet.ledger_cleared(reason="too early", by="olga")
    world.ledger.beat("sweep", kind="sweep")
    world.advance(HOUR)
    assert rewound(world).lost_from == first.lost_from
    world.fleet.ledger_cleared(reason="done", by="olga")
    world.advance(STILL_COUNTS_MS + 1)
    assert rewound(world).lost_from == START_MS + HOUR


def test_it_is_not_cleared_over_what_is_not_settled(world: World) -> None:
    world.workflow(
        world.write_tool(key_valid_for_ms=0, query=False, guarantee="transaction"),
        plan=[save(id=1)],
        budget=PATIENT,
    )
    waits, asks = world.start(), world.start()
    world.advance(HOUR)
    rewound(world)
    world.drive(asks)
    [listed] = world.ledger.rewinds.listed()
    assert (listed.older_runs, listed.with_people, listed.doubts) == (2, 1, 1)
    assert listed.asked == {"handed_off": 1}

    with pytest.raises(NotSettled, match="2 runs from before it have not ended, 1 of them") as bad:
        world.fleet.ledger_cleared(reason="done", by="olga")
    assert (bad.value.code, bad.value.doubts) == ("not-settled", 1)
    world.fleet.cancel(waits)
    with pytest.raises(NotSettled):
        world.fleet.ledger_cleared(reason="done", by="olga")
    world.advance(HOUR)
    resolve(world, asks, "cancelled", evidence="paper")
    assert world.ledger.rewinds.listed()[0].older_runs == 0
    assert world.fleet.ledger_cleared(reason="done", by="olga") == [1]


def test_it_is_cleared_by_force_where_a_person_knows_better(world: World) -> None:
    world.workflow(world.read_tool(), plan=[])
    world.start()
    rewound(world)
    assert world.fleet.ledger_cleared(reason="a rehearsal", by="olga", force=True) == [1]


def test_once_cleared_nothing_new_is_asked_about(world: World) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)], budget=PATIENT)
    rewound(world)
    assert world.fleet.ledger_cleared(reason="all compared", by="olga") == [1]
    assert world.fleet.ledger_cleared(reason="all compared", by="olga") == []
    run = world.start()

    assert world.drive(run).status == "completed"
    assert world.trace(run, "effect.reconciliation-required") == []
    audit = world.rows("SELECT act, actor, target, reason FROM handrail_audit ORDER BY seq")
    assert [tuple(row.values()) for row in audit] == [
        ("rewound", "olga", "ledger", "restored"),
        ("cleared", "olga", "ledger", "all compared"),
    ]
    [listed] = world.ledger.rewinds.listed()
    assert (listed.is_open, listed.cleared_by) == (False, "olga")


def test_whoever_has_to_do_with_some_tenants_alone_may_not_say_so(world: World) -> None:
    world.fleet.desk.admit("ada", ["admin"])
    world.fleet.desk.admit("tess", ["operator"], by="ada", tenants=["acme"])
    with pytest.raises(NotAllowed):
        world.fleet.ledger_rewound(reason="restored", by="tess")
    with pytest.raises(NotAllowed):
        world.fleet.ledger_cleared(reason="restored", by="tess")


def test_a_program_that_knows_no_rewinds_does_not_start_on_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = "UPDATE handrail_schema SET oldest_program = :known"
    world.control.run(allowed, {"known": "0001"})
    monkeypatch.setattr(schema, "HEAD", "0002")
    assert schema.check_migrated(world.control) == HEAD
    rewound(world)
    with pytest.raises(NotMigrated, match="newer release"):
        schema.check_migrated(world.control)
    world.control.run(allowed, {"known": "0001"})


@pytest.mark.parametrize(
    ("status", "rewind", "forgotten"),
    [
        ("planned", None, True),
        ("absent", None, True),
        ("absent", 1, True),
        ("absent", 2, False),
        ("planned", 2, False),
        ("dispatched", None, False),
        ("unknown", 1, False),
        ("applied", None, False),
        ("handed_off", None, False),
        ("contradicted", None, False),
    ],
)
def test_what_may_be_forgotten(status: str, rewind: int | None, forgotten: bool) -> None:
    one = replace(effect(EffectStatus(status)), rewind=rewind)
    assert may_be_forgotten(one, Rewind(number=2, lost_from=1, lost_until=2)) is forgotten
