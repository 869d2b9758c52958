"""The audit: every act of a person is there, in the transaction that it changed something in, and
an edit or a gap shows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from handrail.agent.people import GENESIS, Act, AuditEntry, AuditLink, audit_faults
from handrail.desk import InvalidQuery
from handrail.testing.people import ADMIN, APPROVER, OPERATOR, agree
from tests.world import World, open_world, save


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


def acts(world: World, number: int = 5) -> None:
    for count in range(number):
        world.fleet.pause("tool", f"t{count}", reason=f"because {count} 理由", by=OPERATOR)


def unlocked(world: World, sql: str) -> None:
    """Change the audit as somebody who owns the database can."""
    if world.postgres:
        world.rows("ALTER TABLE handrail_audit DISABLE TRIGGER USER")
        world.rows(sql)
        world.rows("ALTER TABLE handrail_audit ENABLE TRIGGER USER")
        return
    (found,) = world.rows("SELECT sql FROM sqlite_master WHERE name = 'handrail_audit_append_only'")
    world.rows("DROP TRIGGER handrail_audit_append_only")
    world.rows(sql)
    world.rows(found["sql"])


def faults(world: World, **options: Any) -> tuple[str, ...]:
    return world.fleet.desk.verify_audit(**options).faults


def test_an_untouched_audit_is_intact(world: World) -> None:
    assert world.fleet.desk.verify_audit().intact, "an empty one is"
    acts(world)
    report = world.fleet.desk.verify_audit()

    assert report.intact and report.entries == 5
    assert [e["act"] for e in world.fleet.desk.audit(by=ADMIN)] == ["pause"] * 5
    assert world.fleet.desk.audit(by=ADMIN)[0]["reason"] == "because 4 理由"


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE handrail_audit SET actor = 'eve' WHERE seq = 3",
        "UPDATE handrail_audit SET at = at + 1 WHERE seq = 1",
        "UPDATE handrail_audit SET reason = 'none' WHERE seq = 5",
        """UPDATE handrail_audit SET after = '{"x":1}' WHERE seq = 2""",
        "UPDATE handrail_audit SET hash = previous WHERE seq = 4",
        "DELETE FROM handrail_audit WHERE seq = 1",
        "DELETE FROM handrail_audit WHERE seq = 3",
        "DELETE FROM handrail_audit WHERE seq = 5",
        "DELETE FROM handrail_audit WHERE seq > 2",
        "DELETE FROM handrail_audit",
        "UPDATE handrail_audit SET seq = 9 WHERE seq = 5",
    ],
)
def test_any_edit_or_gap_shows(world: World, edit: str) -> None:
    acts(world)
    unlocked(world, edit)

    assert faults(world) != ()


def test_whoever_rewrites_all_of_it_cannot_rewrite_what_was_noted_down(world: World) -> None:
    acts(world, 3)
    noted = world.fleet.desk.verify_audit().head
    acts(world, 1)
    assert faults(world, anchor=noted) == ()
    links = list(world.ledger.people.audit_links())
    forged = AuditLink.of(
        AuditEntry(actor="eve", act=Act.PAUSE, target="x"), seq=3, at=1, previous=links[1].hash
    )
    last = AuditLink.of(
        AuditEntry(actor="eve", act=Act.PAUSE, target="y"), seq=4, at=1, previous=forged.hash
    )
    chain = [*links[:2], forged, last]

    assert audit_faults(chain, (4, last.hash)) == []
    assert audit_faults(chain, (4, last.hash), (3, links[2].hash)) != []
    for wrong in ("", "3", "x:y"):
        with pytest.raises(InvalidQuery):
            world.fleet.desk.verify_audit(anchor=wrong)


def test_the_database_itself_refuses_to_edit_an_entry(world: World) -> None:
    acts(world, 1)
    with pytest.raises((psycopg.Error, Exception), match="append-only"):
        world.rows("UPDATE handrail_audit SET actor = 'eve' WHERE seq = 1")


def test_an_act_that_changes_nothing_leaves_no_entry(world: World) -> None:
    assert world.fleet.resume("tool", "t") is False

    assert world.fleet.desk.audit(by=ADMIN) == []
    assert world.ledger.people.audit_head() == (0, GENESIS)


def test_an_act_and_its_entry_are_one_transaction(world: World) -> None:
    """A connection that breaks in the middle leaves both or neither, and one entry at most."""
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    run = world.start()
    world.step(run)
    (asked,) = world.fleet.desk.approvals(by=APPROVER)
    token = world.fleet.desk.issue_token(asked.id, by=APPROVER)
    for executed in (False, True):
        world.database.lose(1, executed=executed, only="COMMIT")
        if executed:
            world.fleet.pause("tool", "t", reason="x", by=OPERATOR)
        else:
            world.fleet.approve(token, by=APPROVER)
        assert world.database.lost

    assert [e["act"] for e in world.fleet.desk.audit(by=ADMIN, act="approve")] == ["approve"]
    assert faults(world) == ()


def test_many_at_once_make_one_chain(world: World) -> None:
    def act(who: str) -> None:
        for number in range(10):
            world.fleet.pause("tool", f"{who}-{number}", reason="x", by=OPERATOR)

    threads = [threading.Thread(target=act, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = world.fleet.desk.verify_audit()

    assert report.entries == 40 and report.intact


def test_it_can_be_narrowed(world: World) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    run = world.start()
    world.step(run)
    agree(world.fleet, run)
    world.fleet.cancel(run, by=OPERATOR, reason="changed my mind")
    desk = world.fleet.desk

    assert [e["act"] for e in desk.audit(by=ADMIN)] == ["cancel", "approve", "request-token"]
    assert [e["act"] for e in desk.audit(by=ADMIN, actor="operator")] == ["cancel"]
    assert [e["act"] for e in desk.audit(by=ADMIN, run=run, act="approve")] == ["approve"]
    assert desk.audit(by=ADMIN, tenant="other") == []
    assert len(desk.audit(by=ADMIN, limit=2)) == 2
    (entry,) = desk.audit(by=ADMIN, act="cancel")
    assert (entry["before"], entry["reason"]) == ({"run": "executing"}, "changed my mind")
    world.advance(60_000)
    assert desk.audit(by=ADMIN, since_ms=1_000) == []


def test_it_can_be_verified_while_people_go_on(world: World) -> None:
    stop = threading.Event()

    def act() -> None:
        while not stop.is_set():
            world.fleet.pause("tool", "t", reason="x", by=OPERATOR)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        looks = [world.fleet.desk.verify_audit() for _ in range(60)]
    finally:
        stop.set()
        thread.join()

    assert [look.faults for look in looks if not look.intact] == []
