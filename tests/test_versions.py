"""Pinned versions: a run waits for a worker that has its version, and is a person's after a while.

Workers are what the catalog knows of them: who announces, and goes on saying that it is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from handrail.agent.budget import Budget
from handrail.agent.tools import Principal
from handrail.ledger.accept import REPUBLISH_MS, current_entry
from handrail.ledger.catalog import Announcement, seen_every_s
from handrail.ledger.ledger import VERSION_PATIENCE_MS
from handrail.reconciler.sweep import Reconciler
from tests.live import ROOT
from tests.world import KINDS, SECOND, Outside, World, look, open_world, save_for_goal

PATIENT: Final = Budget(tool_calls=12, model_calls=8, deadline_ms=10**9, expires_ms=10**10)
OPERATOR: Final = Principal("operator", roles=frozenset({"operator"}))
EVERY_MS: Final = int(seen_every_s(VERSION_PATIENCE_MS) * SECOND)
MINUTE: Final = 60 * SECOND


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


def announced(world: World, *keys: str) -> None:
    """A worker starts that has these versions."""
    parts = (key.partition("@") for key in keys)
    world.ledger.announce([Announcement(name, version, "{}") for name, _, version in parts])


def pass_by(world: World, ms: int, *live: str) -> None:
    """Let time pass while workers have these versions; nobody sweeps."""
    while ms > 0:
        step_ms = min(ms, EVERY_MS)
        world.advance(step_ms)
        ms -= step_ms
        if live:
            world.ledger.seen(live, every_ms=EVERY_MS)


def foreign(world: World) -> Reconciler:
    """A sweep in a process that has none of these workflows."""
    return replace(world.sweeper(), workflows={})


def waits_for_a_version_that_is_gone(world: World, **options: Any) -> str:
    """A run that has waited long enough, in a fleet whose workers have a newer version."""
    world.workflow(world.read_tool(), plan=[look(id=1)], budget=PATIENT)
    announced(world, "draft@2")
    run = world.start(**options)
    pass_by(world, VERSION_PATIENCE_MS, "draft@2")
    return run


def matter(world: World, run: str) -> dict[str, Any]:
    """The one open handoff of a run."""
    [row] = world.rows(
        "SELECT * FROM handrail_handoff WHERE run_id = :id AND status='open'", id=run
    )
    return {**row, "package": json.loads(row["package"])}


# A run that waits for a worker


@pytest.mark.accept("FLT-20")
def test_a_run_whose_version_no_worker_has_is_handed_to_a_person_after_the_patience(
    world: World,
) -> None:
    run = waits_for_a_version_that_is_gone(world)
    foreign(world).sweep()

    row, found = world.row(run), matter(world, run)
    assert (row["status"], row["reason"]) == ("handed_off", "version-unavailable")
    assert row["attempts"] == 0, "nobody has crashed over it"
    assert found["reason"] == "version-unavailable"
    assert found["package"]["version"] == {
        "wanted": "draft@1",
        "seen_ms_ago": "never",
        "live": ["2"],
        "next_step": "Start a worker that has draft@1 and resume the run, or settle what it was"
        " about in another way.",
    }


@pytest.mark.accept("FLT-20")
def test_a_worker_without_the_version_leaves_the_run_alone(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(id=1)], budget=PATIENT)
    announced(world, "draft@2")
    run = world.start()

    for _ in range(5):
        assert world.ledger.claim(run, 0, holder="another", known=["draft@2"]) is None
        pass_by(world, REPUBLISH_MS, "draft@2")
        world.messages.clear()
        foreign(world).sweep()
    row = world.row(run)
    assert (row["status"], row["attempts"], row["epoch"]) == ("queued", 0, 0)


def test_a_run_that_was_accepted_a_moment_ago_waits(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(id=1)], budget=PATIENT)
    announced(world, "draft@2")
    pass_by(world, 2 * VERSION_PATIENCE_MS, "draft@2")
    run = world.start()
    pass_by(world, VERSION_PATIENCE_MS - SECOND, "draft@2")

    world.reconciler.sweep()

    assert world.row(run)["status"] == "queued"
    assert [message.run_id for message in world.messages] == [run]


def test_a_run_that_is_slow_because_the_fleet_is_busy_is_never_handed_off(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(id=1)], budget=PATIENT)
    announced(world, "draft@1", "draft@2")
    run = world.start()
    for _ in range(8):
        pass_by(world, VERSION_PATIENCE_MS, "draft@1", "draft@2")
        foreign(world).sweep()

    assert world.row(run)["status"] == "queued"


def test_a_fleet_that_is_away_or_has_just_come_back_says_nothing_about_versions(
    world: World,
) -> None:
    world.workflow(world.read_tool(), plan=[look(id=1)], budget=PATIENT)
    announced(world, "draft@1", "draft@2")
    run = world.start()
    pass_by(world, 4 * VERSION_PATIENCE_MS)
    foreign(world).sweep()  # cron sweeps, and nobody else is there
    assert world.row(run)["status"] == "queued"

    announced(world, "draft@2")  # of the workers the newer ones come back first
    pass_by(world, 11 * MINUTE, "draft@2")
    foreign(world).sweep()
    assert world.row(run)["status"] == "queued"
    pass_by(world, 15 * MINUTE, "draft@2")
    foreign(world).sweep()
    assert world.row(run)["status"] == "handed_off"


def test_a_version_of_which_a_run_is_being_worked_on_is_there(world: World) -> None:
    """Workers of an older release announce nothing."""
    run = waits_for_a_version_that_is_gone(world)
    other = world.start()
    assert world.claim(other) is not None
    foreign(world).sweep()

    assert world.row(run)["status"] == "queued"


def test_a_run_whose_time_ran_out_because_nobody_could_start_it_is_a_persons(
    world: World,
) -> None:
    world.workflow(world.read_tool(), plan=[look(id=1)])
    announced(world, "draft@2", "other@1")
    run = world.start(budget=Budget(deadline_ms=2 * MINUTE))
    busy = world.start(budget=Budget(deadline_ms=2 * MINUTE))
    world.rows("UPDATE handrail_run SET workflow_version = '2' WHERE id = :id", id=busy)
    pass_by(world, 2 * MINUTE, "draft@2", "other@1")
    world.reconciler.sweep()

    assert world.row(run)["reason"] == "version-unavailable"
    assert world.row(busy)["reason"] == "deadline-exhausted", "its version has a worker"


def test_a_run_that_is_resumed_waits_with_fresh_patience_and_completes(world: World) -> None:
    run = waits_for_a_version_that_is_gone(world)
    foreign(world).sweep()
    desk = world.fleet.desk
    desk.resolve(matter(world, run)["id"], "resumed", by=OPERATOR, reason="draft@1 is coming back")

    pass_by(world, VERSION_PATIENCE_MS - SECOND, "draft@2")
    foreign(world).sweep()
    assert world.row(run)["status"] == "running", "it waits anew"

    announced(world, "draft@1")
    foreign(world).sweep()
    assert world.messages[-1].run_id == run, "it goes on as soon as its version is back"
    assert world.drive(run).status == "completed"


def test_a_run_that_nobody_resumes_in_time_is_handed_off_again(world: World) -> None:
    run = waits_for_a_version_that_is_gone(world)
    foreign(world).sweep()
    desk = world.fleet.desk
    desk.resolve(matter(world, run)["id"], "resumed", by=OPERATOR, reason="too early")
    pass_by(world, VERSION_PATIENCE_MS, "draft@2")
    foreign(world).sweep()

    assert world.row(run)["reason"] == "version-unavailable"


def test_a_wish_to_cancel_and_the_hard_expiry_come_first(world: World) -> None:
    cancelled = waits_for_a_version_that_is_gone(world)
    expired = world.start(budget={"deadline_ms": MINUTE, "expires_ms": MINUTE})
    world.fleet.cancel(cancelled)
    pass_by(world, VERSION_PATIENCE_MS, "draft@2")
    foreign(world).sweep()

    assert world.row(cancelled)["status"] == "cancelled"
    assert world.row(expired)["reason"] == "expired"


def test_a_sweep_asks_about_versions_only_where_somebody_has_waited_long(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(id=1)], budget=PATIENT)
    announced(world, "draft@2")
    world.start()
    pass_by(world, REPUBLISH_MS, "draft@2")

    world.database.statements.clear()
    world.ledger.due_for_sweep(limit=10)
    assert len(world.database.statements) == 1
    assert "handrail_workflow" not in " ".join(world.database.statements)


# A doubt that nobody can ask about


def in_doubt(world: World) -> str:
    """A run whose write took effect and whose answer was lost."""
    world.workflow(world.write_tool(), plan=[save_for_goal], budget=PATIENT)
    run = world.start()
    world.service.script = ["lost"]
    world.step(run)
    assert world.row(run)["status"] == "reconciling"
    return run


def test_a_doubt_is_left_to_a_process_that_has_the_workflow(world: World) -> None:
    announced(world, "draft@1")
    run = in_doubt(world)
    queries_left = world.effect(f"save:{run}")["queries_left"]
    for _ in range(40):
        pass_by(world, MINUTE, "draft@1")
        foreign(world).sweep()
    row, effect = world.row(run), world.effect(f"save:{run}")
    assert (row["status"], effect["status"]) == ("reconciling", "unknown")
    assert effect["queries_left"] == queries_left, "what was not asked was given back"

    pass_by(world, MINUTE, "draft@1")
    world.reconciler.sweep()
    assert world.drive(run).status == "completed"
    assert world.service.performed == [f"save:{run}"]


@pytest.mark.accept("FLT-20")
def test_a_doubt_that_no_worker_can_ask_about_is_a_persons_and_stays_a_doubt(world: World) -> None:
    announced(world, "draft@2")
    run = in_doubt(world)
    pass_by(world, VERSION_PATIENCE_MS - MINUTE, "draft@2")
    foreign(world).sweep()
    assert world.row(run)["status"] == "reconciling"
    pass_by(world, 2 * MINUTE, "draft@2")
    foreign(world).sweep()

    row, effect, found = world.row(run), world.effect(f"save:{run}"), matter(world, run)
    assert (row["status"], row["reason"]) == ("handed_off", "unknown-effect")
    assert effect["status"] == "handed_off"
    assert found["package"]["problem"] == "no worker has draft@1"
    assert found["package"]["version"]["wanted"] == "draft@1"
    assert found["package"]["effect"]["id"] == effect["id"]
    assert found["effect_id"] == effect["id"]


def test_who_has_the_workflow_asks_although_no_worker_has_it(world: World) -> None:
    """`handrail reconcile` with the fleet's own code is no worker, and settles the doubt."""
    announced(world, "draft@2")
    run = in_doubt(world)
    pass_by(world, 2 * VERSION_PATIENCE_MS, "draft@2")
    world.reconciler.sweep()

    assert world.effect(f"save:{run}")["status"] == "applied"


def test_a_write_that_was_released_for_sending_again_is_handed_over_in_doubt(world: World) -> None:
    tool = world.write_tool(query=False, key_valid_for_ms=10**9)
    world.workflow(tool, plan=[save_for_goal], budget=PATIENT)
    announced(world, "draft@2")
    run = world.start()
    world.service.script = ["lost"]
    world.step(run)
    world.sweep_when_due(run)
    assert world.row(run)["status"] == "running"
    assert world.effect(f"save:{run}")["status"] == "unknown"
    pass_by(world, VERSION_PATIENCE_MS, "draft@2")
    foreign(world).sweep()

    assert world.row(run)["reason"] == "unknown-effect"
    assert world.effect(f"save:{run}")["status"] == "handed_off"
    assert matter(world, run)["package"]["version"]["live"] == ["2"]


def test_what_is_to_be_undone_waits_for_the_version_and_is_a_persons_after_a_while(
    world: World,
) -> None:
    world.workflow(world.compensable_tool(), plan=[save_for_goal], budget=PATIENT)
    announced(world, "draft@2")
    run = world.start()
    outside = Outside(
        when=lambda place: place == "after write tool", then=lambda: world.fleet.cancel(run)
    )
    world.step(run, outside=outside)
    assert world.effect(f"save:{run}")["status"] == "compensating"
    for _ in range(14):
        pass_by(world, MINUTE, "draft@2")
        foreign(world).sweep()
    assert world.row(run)["status"] == "reconciling"
    pass_by(world, 2 * MINUTE, "draft@2")
    foreign(world).sweep()

    assert (world.row(run)["status"], world.row(run)["reason"]) == (
        "handed_off",
        "version-unavailable",
    )
    assert matter(world, run)["package"]["problem"] == "no worker has draft@1"
    assert world.service.performed == [f"save:{run}"], "it stands, and nobody says otherwise"


# The catalog


def test_a_version_is_announced_once_and_seen_many_times(world: World) -> None:
    announced(world, "draft@1", "draft@2")
    before = world.rows("SELECT * FROM handrail_workflow ORDER BY version")
    world.advance(MINUTE)
    world.ledger.announce([Announcement("draft", "1", '{"new": 1}')])
    world.ledger.seen(["draft@1", "draft@9"], every_ms=EVERY_MS)
    after = world.rows("SELECT * FROM handrail_workflow ORDER BY version")

    assert [row["announced_at"] for row in before] == [row["announced_at"] for row in after]
    assert [row["seen_at"] - was["seen_at"] for row, was in zip(after, before, strict=True)] == [
        MINUTE,
        0,
    ]
    assert [row["entry"] for row in after] == ['{"new": 1}', "{}"]


def test_who_says_that_it_is_there_learns_what_the_catalog_does_not_know(world: World) -> None:
    announced(world, "draft@1")

    assert world.ledger.seen(["draft@1", "draft@2"], every_ms=EVERY_MS) == {"draft@1"}
    assert world.ledger.seen(["draft@2"], every_ms=EVERY_MS) == {"draft@1"}, "another's"
    assert world.ledger.seen([], every_ms=EVERY_MS) == set()


def test_a_run_that_came_to_the_wrong_worker_is_published_again_soon(world: World) -> None:
    """While another worker has its version; a run of one that is gone waits its time."""
    world.workflow(world.read_tool(), plan=[look(id=1)], budget=PATIENT)
    announced(world, "draft@2")
    run = world.start()
    before = world.row(run)["wake_at"]

    world.ledger.catalog.pass_on([run], known=["draft@2"])
    assert world.row(run)["wake_at"] == before, "nobody is there who could take it"
    announced(world, "draft@1")
    world.rows("UPDATE handrail_run SET wake_at = :at WHERE id = :id", at=before, id=run)
    world.ledger.catalog.pass_on([run], known=["draft@1"])
    assert world.row(run)["wake_at"] == before, "it is of a version that we have"
    world.ledger.catalog.pass_on([run, "no-run"], known=["draft@2"])
    assert world.row(run)["wake_at"] == world.clock.ms
    assert world.claim(run) is not None
    held = world.row(run)
    world.ledger.catalog.pass_on([run], known=["draft@2"])
    assert world.row(run) == held


def test_who_has_not_all_versions_notes_what_it_could_not_claim(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(id=1)], budget=PATIENT)
    announced(world, "draft@1")
    run = world.start()
    other = world.worker()
    other.workflows = {}
    for others in (False, True):
        other._others = others
        world.step(run, runtime=other)
        assert other._not_ours == ({run} if others else set())


def test_of_two_versions_of_one_process_the_later_registered_is_the_newer(world: World) -> None:
    announced(world, "draft@2", "draft@1")  # the older one was registered last: a way back

    [one, other] = world.ledger.catalog.listed(most=10)
    assert (one.version, one.current, other.current) == ("1", True, False)


@pytest.mark.parametrize("live", ["1", "2", None])
def test_the_list_says_which_version_new_runs_get_as_accepting_does(
    world: World, live: str | None
) -> None:
    announced(world, "draft@1", "other@1")
    world.advance(SECOND)
    announced(world, "draft@2")
    pass_by(world, 3 * MINUTE, *([f"draft@{live}"] if live else []))

    listed = world.ledger.catalog.listed(most=10)
    current = {one.name: one.version for one in listed if one.current}
    for name, version in current.items():
        now = world.ledger.now()
        found = current_entry(world.database, name, postgres=world.postgres, now=now)
        assert found is not None and found.version == version
    assert current == {"draft": live or "2", "other": "1"}


def test_the_command_announces_and_lists(tmp_path: Path) -> None:
    def told(*options: str) -> str:
        environment = {
            **os.environ,
            "HANDRAIL_DATABASE_URL": f"sqlite:///{tmp_path / 'ledger.db'}",
            "HANDRAIL_FLEET": "tests.live_fleet:fleet",
        }
        command = [sys.executable, "-m", "handrail", *options]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout

    told("db", "upgrade")
    assert "no workflow was announced" in told("workflows")
    [one] = json.loads(told("workflows", "--announce", "--json"))["workflows"]
    assert (one["name"], one["version"], one["pinned"], one["current"]) == ("errand", "1", 0, True)
    shown = told("workflows").split("\n")
    assert " ".join(shown[0].split()) == "workflow version announced last seen pinned runs new runs"
    assert shown[1].split()[0] == "errand" and shown[1].rstrip().endswith("yes")


def test_the_list_counts_the_runs_that_are_pinned_to_a_version(world: World) -> None:
    world.workflow(world.read_tool(), plan=[look(id=1)], budget=PATIENT)
    announced(world, "draft@1", "draft@2")
    over = world.start()
    world.drive(over)
    for _ in range(3):
        world.start()

    counts = {one.version: one.pinned for one in world.ledger.catalog.listed(most=10)}
    assert counts == {"1": 3, "2": 0}
    assert max(one.pinned for one in world.ledger.catalog.listed(most=2)) == 2
