"""Hooks for the host: told after the commit, beside the run, and without any power over it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from blinker import ANY

from handrail import signals
from handrail.agent.notices import News, Notice
from handrail.testing.people import agree
from tests.world import World, look, open_world, save


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


class Heard:
    """Connects to all signals, and keeps what it is told."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.fleets: set[Any] = set()
        self.there = threading.Condition()

    def __call__(self, fleet: Any, notice: Notice) -> None:
        with self.there:
            self.notices.append(notice)
            self.fleets.add(id(fleet))
            self.there.notify_all()

    def wait_for(self, *news: str) -> list[str]:
        with self.there:
            self.there.wait_for(lambda: len(self.notices) >= len(news), timeout=10)
            return [notice.news.value for notice in self.notices]


@pytest.fixture
def heard(world: World) -> Iterator[Heard]:
    listener = Heard()
    world.ledger._tell = world.fleet._messenger.tell
    known = [signals.approval_needed, signals.question_asked, signals.handoff_opened]
    known += [signals.handoff_escalated, signals.run_stopped]
    for signal in known:
        signal.connect(listener)
    yield listener
    for signal in known:
        signal.disconnect(listener)


def test_an_approval_a_stop_and_who_it_is_about(world: World, heard: Heard) -> None:
    world.workflow(world.write_tool(approval="always"), plan=[save(id=1)])
    run = world.start(principal="customer")
    world.step(run)
    assert heard.wait_for("approval-needed") == ["approval-needed"]
    agree(world.fleet, run)
    world.drive(run)

    assert heard.wait_for("", "") == ["approval-needed", "run-stopped"]
    first, last = heard.notices
    assert (first.run_id, first.subject, first.workflow) == (run, "customer", "draft")
    assert first.id == world.rows("SELECT id FROM handrail_approval")[0]["id"]
    assert (last.status, last.reason) == ("completed", "completed")
    assert heard.fleets == {id(world.fleet)}


def test_a_question_a_handoff_and_its_escalation(world: World, heard: Heard) -> None:
    world.workflow(world.read_tool(), plan=[{"kind": "clarify", "question": "Which?"}], name="ask")
    asks = world.start("ask")
    world.step(asks)
    tool = world.write_tool(key_valid_for_ms=0, query=False, guarantee="transaction")
    world.workflow(tool, plan=[save(id=1)])
    world.service.script = ["dropped"]
    run = world.start()
    world.drive(run)
    world.advance(world.ledger.escalate_ms)
    world.sweep_when_due(run)

    told = heard.wait_for("", "", "")
    assert told == ["question-asked", "handoff-opened", "handoff-escalated"]
    assert heard.notices[1].reason == "unknown-effect" == heard.notices[2].reason
    assert heard.notices[1].id == heard.notices[2].id


def test_a_receiver_that_fails_or_blocks_disturbs_no_run(world: World, heard: Heard) -> None:
    gate = threading.Event()

    def bad(fleet: Any, notice: Notice) -> None:
        gate.wait(5)
        raise RuntimeError("the chat is down")

    signals.run_stopped.connect(bad)
    try:
        world.workflow(world.read_tool(), plan=[look(of=1)])
        first, second = world.start(), world.start()
        began = time.monotonic()
        world.drive(first, second)
        assert time.monotonic() - began < 4, "the run waited for a receiver"
        gate.set()
        assert heard.wait_for("", "") == ["run-stopped", "run-stopped"]
    finally:
        gate.set()
        signals.run_stopped.disconnect(bad)
    assert world.fleet.get(first).status == "completed"


@pytest.fixture
def nobody_listens() -> Iterator[None]:
    """Whoever in this process has connected a receiver, as a Django project does, hears nothing."""
    apart = [
        (signal, receiver)
        for signal in signals._OF.values()
        for receiver in [*signal.receivers_for(ANY)]
    ]
    for signal, receiver in apart:
        signal.disconnect(receiver)
    yield
    for signal, receiver in apart:
        signal.connect(receiver)


@pytest.mark.usefixtures("nobody_listens")
def test_without_receivers_there_is_no_thread(world: World) -> None:
    world.ledger._tell = world.fleet._messenger.tell
    world.workflow(world.read_tool(), plan=[look(of=1)])
    world.drive(world.start())

    assert world.fleet._messenger._thread is None


def test_closing_lets_what_waits_be_told(world: World, heard: Heard) -> None:
    slow = threading.Event()

    def late(fleet: Any, notice: Notice) -> None:
        slow.wait(0.2)

    signals.run_stopped.connect(late)
    try:
        world.workflow(world.read_tool(), plan=[look(of=1)])
        for _ in range(3):
            world.drive(world.start())
        world.fleet._messenger.close()
    finally:
        signals.run_stopped.disconnect(late)

    assert len(heard.notices) == 3


def test_a_receiver_that_exits_ends_nothing_but_itself(world: World, heard: Heard) -> None:
    def leaves(fleet: Any, notice: Notice) -> None:
        raise SystemExit(3)

    signals.run_stopped.connect(leaves)
    try:
        world.workflow(world.read_tool(), plan=[look(of=1)])
        for _ in range(2):
            world.drive(world.start())
        assert heard.wait_for("", "") == ["run-stopped", "run-stopped"]
    finally:
        signals.run_stopped.disconnect(leaves)


def test_where_the_thread_has_ended_a_new_one_tells(world: World, heard: Heard) -> None:
    world.workflow(world.read_tool(), plan=[look(of=1)])
    world.drive(world.start())
    world.fleet._messenger.close()
    world.drive(world.start())

    assert heard.wait_for("", "") == ["run-stopped", "run-stopped"]


def test_who_is_connected_twice_is_told_once(world: World, heard: Heard) -> None:
    signals.run_stopped.connect(heard)
    world.workflow(world.read_tool(), plan=[look(of=1)])
    world.drive(world.start())
    world.fleet._messenger.close()

    assert [notice.news.value for notice in heard.notices] == ["run-stopped"]


def test_a_forked_child_tells_what_it_has_committed_itself(heard: Heard, world: World) -> None:
    """Whatever the parent's thread held or had yet to tell at the fork."""
    messenger = world.fleet._messenger
    gate, parent = threading.Event(), os.getpid()

    def late(fleet: Any, notice: Notice) -> None:
        if os.getpid() == parent:
            gate.wait(10)

    signals.run_stopped.connect(late)
    try:
        messenger.tell(stopped("of the parent"))
        messenger.tell(stopped("of the parent"))
        with messenger._starting:  # as another thread may hold it
            child = os.fork()
            if child == 0:
                _tell_in_child(messenger, heard)
        _, status = os.waitpid(child, 0)
    finally:
        gate.set()
        signals.run_stopped.disconnect(late)
    assert os.waitstatus_to_exitcode(status) == 0, "the child has told nobody, or all of it"


def stopped(run_id: str) -> Notice:
    about = {"tenant": "t", "workflow": "w", "subject": "s", "status": "completed"}
    return Notice(news=News.RUN_STOPPED, run_id=run_id, **about)


def _tell_in_child(messenger: signals.Messenger, heard: Heard) -> None:
    heard.notices, heard.there = [], threading.Condition()
    messenger.tell(stopped("of the child"))
    messenger.close()
    os._exit(0 if [notice.run_id for notice in heard.notices] == ["of the child"] else 1)
