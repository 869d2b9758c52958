"""A fleet of real processes: what is promised holds while workers, broker and database fail.

Real workers and a real beat, on real Valkey, RabbitMQ, PostgreSQL and SQLite. What happened outside
is told by the world's own record (tests/live_fleet.py). Every second worker's wall clock is wrong.
"""

from __future__ import annotations

import random
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy.engine import make_url

from handrail.agent import protocol
from handrail.broker.message import StepMessage
from handrail.runs import Run
from handrail.testing.services import EmbeddedPostgres
from tests.live import (
    BROKERS,
    Deployment,
    FailingBroker,
    FailingStore,
    Move,
    broker_of,
    complete,
    deployed,
    look,
    save,
)
from tests.rabbit import is_there, must_be_there

pytestmark = [pytest.mark.live, pytest.mark.timeout(150)]

#: How long broker and database are away: long enough for every worker to notice, several times.
AWAY_S: Final = 3.0


@pytest.fixture(scope="module", params=BROKERS)
def deployment(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    postgres: EmbeddedPostgres,
) -> Iterator[Deployment]:
    """A deployment on each broker."""
    url = postgres.create_database(f"live_{uuid.uuid4().hex[:8]}")
    broker, place = broker_of(request.param, request), tmp_path_factory.mktemp("fleet")
    with deployed(place, url, broker.url, settings=broker.settings) as made:
        yield made


@pytest.fixture
def fleet(deployment: Deployment) -> Deployment:
    """A deployment with two workers, whatever the test before has done to them."""
    return deployment.staff(2)


# ---- what the tests look at ----------------------------------------------------------------------


def effects(fleet: Deployment, run_id: str) -> int:
    return len(fleet.world.notes("effect", run_id))


def requests(fleet: Deployment, run: Run) -> dict[str, int]:
    """How often model and tools were asked for a run, as they themselves say."""
    noted = {place: len(fleet.noted(place, run.run_id)) for place in ("ask", "look", "save", "die")}
    return {"model_calls": noted.pop("ask"), "tool_calls": sum(noted.values())}


def types(fleet: Deployment, run_id: str) -> list[str]:
    return [event["type"] for event in fleet.fleet.trace(run_id)]


def stopped_once(fleet: Deployment, run_id: str) -> bool:
    """Whether the run's last episode has one stop, and that as its last event."""
    told = types(fleet, run_id)
    resumed = [at for at, type in enumerate(told) if type == "run.resumed"]
    last = told[resumed[-1] if resumed else 0 :]
    return last.count("run.stopped") == 1 and last[-1] == "run.stopped"


def comparable(trace: list[dict[str, Any]]) -> list[Any]:
    """A trace without what tells one run, one call and one moment from another."""
    own = {"tool_call_id", "idempotency_key_hash", "evidence_ref", "capability", "deadline_ms"}

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(item) for key, item in value.items() if key not in own}
        return value

    return [
        (event["seq"], event["step"], event["type"], without(event["detail"])) for event in trace
    ]


# ---- without a fault -----------------------------------------------------------------------------


@pytest.mark.accept("FLT-01", "FLT-21")
def test_messages_that_come_again_late_forged_or_out_of_order_change_nothing(
    fleet: Deployment,
) -> None:
    """A run whose every step is announced many times ends like one that is announced once."""
    moves = (look("a", hold="ask"), save("once"), look("b"), complete("once"))
    once = fleet.start(*moves, tenant="once")
    fleet.world.let_go(once)

    often = fleet.start(*moves, tenant="often")
    fleet.arrives("ask", often)
    forged = {"steps": 999, "model_calls": 999, "tool_calls": 0}
    copies = [
        StepMessage(run_id=often, step=step, epoch=epoch, deadline_at=deadline_at, budget=forged)
        for epoch in range(12)
        for step, deadline_at in ((epoch, 1), (0, None))
    ]
    seed = random.randrange(1 << 32)
    random.Random(seed).shuffle(copies)
    fleet.push(copies)
    fleet.push(copies[::-1])
    fleet.world.let_go(often)
    fleet.push(copies)
    reference, run = fleet.rest(once, often)
    fleet.push(copies)
    fleet.rest(fleet.start(complete()))  # it comes after all those

    run = fleet.fleet.get(often)
    assert run.status == "completed", f"seed {seed}"
    assert run.budget_used == reference.budget_used, f"seed {seed}"
    assert requests(fleet, run) == requests(fleet, reference) == {"model_calls": 4, "tool_calls": 3}
    assert effects(fleet, often) == effects(fleet, once) == 1
    told, expected = fleet.fleet.trace(often), fleet.fleet.trace(once)
    assert comparable(told) == comparable(expected), f"seed {seed}"


@pytest.mark.accept("FLT-10", "FLT-19")
def test_a_hundred_runs_at_once_each_stop_once_and_none_stays_behind(fleet: Deployment) -> None:
    """All wait for the model at the same time, without a connection; then some are cancelled."""
    runs = [
        fleet.start(look("a", hold="ask"), save(f"draft-{n}"), complete(f"draft-{n}"))
        for n in range(100)
    ]
    fleet.until(
        "all are being decided at once",
        lambda: len({note.run for note in fleet.noted("ask")} & {*runs}) == 100,
    )
    assert connections(fleet) < 25, "a call in flight holds no connection"
    cancelled, others = runs[::10], [run for n, run in enumerate(runs) if n % 10]
    for run_id in cancelled:
        fleet.fleet.cancel(run_id)
    fleet.world.let_go(*others)

    ended = {run.run_id: run for run in fleet.rest(*runs)}
    assert {ended[run_id].status for run_id in cancelled} == {"cancelled"}
    assert {ended[run_id].status for run_id in others} == {"completed"}
    assert [run_id for run_id in runs if not stopped_once(fleet, run_id)] == []
    assert [effects(fleet, run_id) for run_id in others] == [1] * 90
    assert [effects(fleet, run_id) for run_id in cancelled] == [0] * 10
    assert [run for run in ended.values() if requests(fleet, run)["model_calls"] != used(run)] == []
    counts = fleet.fleet.ledger.figures()["runs"]
    assert counts.get("running", 0) == counts.get("executing", 0) == 0


def used(run: Run, budget: str = "model_calls") -> int:
    return run.budget_used[budget]


def connections(fleet: Deployment) -> int:
    url = make_url(fleet.database_url)
    with psycopg.connect(
        host=str(url.query["host"]), user=url.username, dbname=url.database
    ) as connection:
        found = connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.accept("FLT-07", "TRM-12")
@pytest.mark.parametrize("told", ["by the signal", "by the renewal of leases"])
def test_a_cancel_aborts_what_the_workers_have_in_flight(fleet: Deployment, told: str) -> None:
    """Model stream, awaiting tool and blocking tool see the abort within two seconds; the signal
    only makes it faster."""
    held = {
        fleet.start(look("a", hold="ask"), complete()): "ask",
        fleet.start(look("a", hold="look"), complete()): "look",
        fleet.start(look("a", hold="look", tool="look_blocking"), complete()): "look",
    }
    for run_id, place in held.items():
        fleet.arrives(place, run_id)
    for run_id in held:
        if told == "by the signal":
            assert fleet.fleet.cancel(run_id).status == "cancelling"
        else:
            fleet.fleet.ledger.rule(run_id, protocol.cancel)
    fleet.until(
        "all were aborted",
        lambda: all(fleet.noted("aborted", run_id) for run_id in held),
        within_s=2.0,
    )
    for run in fleet.rest(*held):
        assert (run.status, run.reason) == ("cancelled", "cancelled")
        assert stopped_once(fleet, run.run_id)
        assert requests(fleet, run) == {
            "model_calls": 1,
            "tool_calls": 0 if held[run.run_id] == "ask" else 1,
        }, "nothing was started after the cancel"


@pytest.mark.accept("FLT-07", "LED-16")
def test_a_cancel_does_not_deny_a_write_that_is_in_flight(fleet: Deployment) -> None:
    """The call is aborted, its effect is found out about, and a person decides what it means."""
    run_id = fleet.start(save("cancelled-draft", hold="saved"), complete("cancelled-draft"))
    fleet.arrives("saved", run_id)
    assert fleet.fleet.cancel(run_id).status == "cancelling"
    fleet.until("it was aborted", lambda: fleet.noted("aborted", run_id), within_s=2.0)

    [run] = fleet.rest(run_id)
    assert (run.status, run.reason) == ("handed_off", "unknown-effect")
    [effect] = fleet.fleet.ledger.effects(run_id=run_id)
    assert effect["status"] == "applied"
    assert (effects(fleet, run_id), len(fleet.noted("find", run_id))) == (1, 1)


@pytest.mark.accept("FLT-06")
def test_workers_whose_clocks_differ_stop_their_runs_at_the_same_instant(
    fleet: Deployment,
) -> None:
    """One worker's wall clock is an hour ahead; deadlines are instants of the ledger's clock."""
    one, other = fleet.workers
    runs = [
        fleet.start_on(pid, "ask", look("a", hold="ask"), complete(), budget={"deadline_ms": 1500})
        for pid in (one, other)
    ]
    for run in fleet.rest(*(run_id for run_id, _ in runs)):
        assert (run.status, run.reason) == ("budget_exhausted", "deadline-exhausted")
        stopped = fleet.fleet.trace(run.run_id)[-1]
        assert run.deadline_at is not None
        assert abs(stopped["at"] - run.deadline_at) < 2_000


@pytest.mark.accept("FLT-16")
def test_the_lease_of_a_long_step_is_renewed_and_nothing_runs_twice(fleet: Deployment) -> None:
    run_id = fleet.start(look("a", hold="look"), complete())
    fleet.arrives("look", run_id)
    first = fleet.row(run_id)
    fleet.until(
        "the first lease is over, and a newer one is held",
        lambda: (row := fleet.row(run_id))["lease_until"] > row["now"] > first["lease_until"],
    )
    assert fleet.row(run_id)["claim_id"] == first["claim_id"]
    fleet.world.let_go(run_id)

    [run] = fleet.rest(run_id)
    assert run.status == "completed"
    assert requests(fleet, run) == {"model_calls": 2, "tool_calls": 1}
    assert "lease.lost" not in types(fleet, run_id)


# ---- a worker that goes, is killed, or is paused -------------------------------------------------


@pytest.mark.accept("FLT-16")
def test_a_worker_that_is_told_to_stop_finishes_its_write_and_gives_the_rest_back(
    fleet: Deployment,
) -> None:
    """Another worker goes on within five seconds; a lease given back is no attempt."""
    deciding, pid = fleet.start_on(None, "ask", look("a", hold="ask"), complete())
    reading, _ = fleet.start_on(pid, "look", look("a", hold="look"), complete())
    writing, _ = fleet.start_on(
        pid,
        "saved",
        save("patient-draft", tool="save_patiently", hold="saved"),
        complete("patient-draft"),
    )
    leaving = fleet.workers[pid]
    leaving.send(signal.SIGTERM)
    fleet.until(
        "another worker goes on with both",
        lambda: all(
            any(note.pid != pid for note in fleet.noted(place, run_id))
            for place, run_id in (("ask", deciding), ("look", reading))
        ),
        within_s=5.0,
    )
    assert leaving.is_alive, "it has a write to finish"
    fleet.world.let_go(writing)
    fleet.until("the worker is gone", lambda: not leaving.is_alive)

    decided, read, written = fleet.rest(deciding, reading, writing)
    assert {run.status for run in (decided, read, written)} == {"completed"}
    assert {note.pid for note in fleet.noted("saved", writing)} == {pid}
    assert effects(fleet, writing) == 1 and fleet.noted("find", writing) == []
    assert requests(fleet, decided) == {"model_calls": 3, "tool_calls": 1}
    assert requests(fleet, read) == {"model_calls": 3, "tool_calls": 2}
    for run in (decided, read, written):
        assert {name: used(run, name) for name in requests(fleet, run)} == requests(fleet, run)
        assert "lease.lost" not in types(fleet, run.run_id)


@pytest.mark.accept("FLT-09", "LED-12")
def test_a_worker_that_wakes_after_its_runs_were_taken_over_changes_nothing(
    fleet: Deployment,
) -> None:
    """It was stopped in a model call, a read and a write; awake again it starts no call, its
    commits are refused, and what it knows of its own write is kept as evidence."""
    deciding, pid = fleet.start_on(None, "ask", look("a", hold="ask"), complete())
    reading, _ = fleet.start_on(pid, "look", look("a", hold="look"), complete())
    writing, _ = fleet.start_on(
        pid, "saved", save("paused-draft", hold="saved"), complete("paused-draft")
    )
    runs = (deciding, reading, writing)
    stopped = fleet.workers[pid]
    stopped.send(signal.SIGSTOP)
    assert [run.status for run in fleet.rest(*runs)] == ["completed"] * 3
    before = {
        run_id: (fleet.fleet.get(run_id).budget_used, fleet.fleet.trace(run_id)) for run_id in runs
    }
    assert "lease.lost" in types(fleet, deciding) and "lease.lost" in types(fleet, reading)

    fleet.world.let_go(*runs)
    stopped.send(signal.SIGCONT)
    [effect] = fleet.fleet.ledger.effects(run_id=writing)
    fleet.until(
        "its late word is kept",
        lambda: (
            {"query", "outcome"} == {e["kind"] for e in fleet.fleet.ledger.evidence(effect["id"])}
        ),
    )
    fleet.arrives("went-on", deciding)
    stopped.send(signal.SIGTERM)
    fleet.until("it has ended all that it had", lambda: not stopped.is_alive)

    assert before == {
        run_id: (fleet.fleet.get(run_id).budget_used, fleet.fleet.trace(run_id)) for run_id in runs
    }
    [effect] = fleet.fleet.ledger.effects(run_id=writing)
    assert (effect["status"], effects(fleet, writing)) == ("applied", 1)
    assert [note.pid for note in fleet.noted("look", deciding)].count(pid) == 0
    assert len(fleet.noted("look", reading)) == 2


@pytest.mark.accept("FLT-17", "FLT-12")
def test_a_step_that_kills_every_worker_is_handed_to_a_person(fleet: Deployment) -> None:
    """Two attempts are allowed here; the third worker is not asked to die."""
    run_id = fleet.start({"do": "die", "item": "a", "hold": None}, complete())
    fleet.arrives("die", run_id, visit=2)
    fleet.until("both are gone", lambda: not any(w.is_alive for w in fleet.workers.values()))
    fleet.staff(1)
    [run] = fleet.rest(run_id)
    assert (run.status, run.reason) == ("handed_off", "worker-lost")
    assert stopped_once(fleet, run_id)
    assert requests(fleet, run) == {"model_calls": 2, "tool_calls": 2}
    assert {name: used(run, name) for name in requests(fleet, run)} == requests(fleet, run)
    assert [h["reason"] for h in fleet.fleet.ledger.people.handoffs(run_id=run_id)] == [
        "worker-lost"
    ]
    assert len(fleet.workers) == 1 and all(worker.is_alive for worker in fleet.workers.values())


# ---- all workers are killed at once, and others join ---------------------------------------------

#: What each run is doing when its worker is killed: a place, which visit to it, and its moves.
#: The writes come last: they have a short time limit.
ERRANDS: Final[dict[str, tuple[str, int, tuple[Move, ...]]]] = {
    "deciding": ("ask", 1, (look("a", hold="ask"), complete())),
    "reading": ("look", 1, (look("b", hold="look"), complete())),
    "validating": ("check", 1, (look("c"), complete(hold="check"))),
    "repeating": ("ask", 3, (look("d"), look("d", hold="ask", nth=2))),
    "written": ("saved", 1, (save("e", hold="saved"), complete("e"))),
    "unwritten": ("save", 1, (save("f", hold="save"), complete("f"))),
}
WRITES: Final = ("written", "unwritten")


@dataclass
class Crash:
    """A fleet whose workers were all killed with runs at work, and what became of those."""

    fleet: Deployment
    ids: dict[str, str] = field(default_factory=dict)
    before: dict[str, Run] = field(default_factory=dict)
    after: dict[str, Run] = field(default_factory=dict)

    def hold(self, *names: str) -> None:
        """Start runs, and wait until each is held where it is to be killed."""
        for name in names:
            self.ids[name] = self.fleet.start(*ERRANDS[name][2], name=name)
        for name in names:
            place, visit, _ = ERRANDS[name]
            self.fleet.arrives(place, self.ids[name], visit=visit)

    def happen(self) -> None:
        """Kill all workers."""
        self.before = {name: self.fleet.fleet.get(run_id) for name, run_id in self.ids.items()}
        self.fleet.kill(*self.fleet.workers)

    def recover(self) -> None:
        """Wait for what the workers that have joined make of the runs."""
        self.after = dict(zip(self.ids, self.fleet.rest(*self.ids.values()), strict=True))

    def __iter__(self) -> Iterator[tuple[Run, Run]]:
        return ((self.before[name], self.after[name]) for name in ERRANDS)


@pytest.fixture(scope="module")
def crashes(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    valkey_url: str,
    postgres: EmbeddedPostgres,
) -> Iterator[dict[str, Crash]]:
    """A crash on each database and broker, side by side: most of it is waiting for leases to run
    out.
    """
    with ExitStack() as stack:

        def deploy(name: str, url: str = "", *, broker: str = valkey_url, **how: Any) -> Crash:
            directory = tmp_path_factory.mktemp(f"crash-{name}")
            url = url or postgres.create_database(f"live_{uuid.uuid4().hex[:8]}")
            made = deployed(directory, url, broker, **how)
            return Crash(stack.enter_context(made).staff(2))

        file = tmp_path_factory.mktemp("crash-file") / "ledger.db"
        all_of_them = {
            "postgresql": deploy("postgresql"),
            # The machine's wall clock is the ledger's: it cannot be wrong.
            "sqlite": deploy("sqlite", f"sqlite:///{file}", ahead_s=0),
        }
        if is_there():
            broker = request.getfixturevalue("rabbit").host()
            locks = {"redis_url": valkey_url}
            all_of_them["rabbitmq"] = deploy("rabbitmq", broker=broker, settings=locks)
        for crash in all_of_them.values():
            crash.hold(*(name for name in ERRANDS if name not in WRITES))
        for crash in all_of_them.values():
            crash.hold(*WRITES)
            crash.happen()
        for crash in all_of_them.values():
            crash.fleet.staff(2)
        for crash in all_of_them.values():
            crash.recover()
        yield all_of_them


@pytest.fixture(params=["postgresql", "sqlite", "rabbitmq"])
def crash(request: pytest.FixtureRequest, crashes: dict[str, Crash]) -> Crash:
    if request.param == "rabbitmq":
        must_be_there()
    return crashes[request.param]


@pytest.mark.accept("FLT-02", "FLT-06", "FLT-12")
def test_after_a_kill_every_run_goes_on_from_its_last_commit(crash: Crash) -> None:
    """New workers end every run as it would have ended; what was charged stays charged, every
    call outside was paid for, and the deadline is the same instant."""
    reasons = {name: run.reason for name, run in crash.after.items()}
    assert reasons == {**dict.fromkeys(ERRANDS, "completed"), "repeating": "repeated-proposal"}
    for before, after in crash:
        assert stopped_once(crash.fleet, after.run_id)
        assert after.deadline_at == before.deadline_at
        for budget in ("steps", "model_calls", "tool_calls"):
            assert used(after, budget) >= used(before, budget)
        asked = requests(crash.fleet, after)
        assert asked["model_calls"] == used(after), after.run_id
        assert asked["tool_calls"] <= used(after, "tool_calls"), after.run_id


@pytest.mark.accept("FLT-02", "FLT-04")
@pytest.mark.parametrize(
    ("name", "model_calls", "looks"),
    [
        ("deciding", 3, 1),  # the question was lost, and was put again
        ("reading", 3, 2),  # the round was lost with its read: both again
        ("validating", 3, 1),  # the claim was lost with its check; the read before it was not
    ],
)
def test_a_lost_read_or_question_is_made_again_and_stays_charged(
    crash: Crash, name: str, model_calls: int, looks: int
) -> None:
    run = crash.after[name]
    assert used(run) == model_calls
    assert len(crash.fleet.noted("look", run.run_id)) == looks
    # The claim that was lost had paid for a tool call, used or not.
    assert used(run, "tool_calls") == 2
    assert "lease.lost" in types(crash.fleet, run.run_id)


@pytest.mark.accept("FLT-03", "LED-04")
def test_a_write_whose_worker_was_killed_after_it_is_asked_about_and_not_repeated(
    crash: Crash,
) -> None:
    run = crash.after["written"]
    assert len(crash.fleet.noted("save", run.run_id)) == effects(crash.fleet, run.run_id) == 1
    assert len(crash.fleet.noted("find", run.run_id)) == 1
    assert doubt(crash.fleet, run.run_id) == {
        "tool": "save",
        "trigger": "worker-lost",
        "recovery": "query",
    }
    assert (used(run), used(run, "tool_calls")) == (2, 1)


@pytest.mark.accept("FLT-03", "LED-04")
def test_a_write_whose_worker_was_killed_before_it_is_asked_about_twice_and_then_sent_again(
    crash: Crash,
) -> None:
    run = crash.after["unwritten"]
    visits = [
        note.place
        for note in crash.fleet.world.all()
        if note.run == run.run_id and note.place in ("save", "find", "effect")
    ]
    assert visits[0] == "save" and visits[-2:] == ["save", "effect"]
    assert len(visits[1:-2]) >= 2 and {*visits[1:-2]} == {"find"}
    assert doubt(crash.fleet, run.run_id)["trigger"] == "worker-lost"
    assert (used(run), used(run, "tool_calls")) == (2, 2), "both dispatches are charged"


def doubt(fleet: Deployment, run_id: str) -> dict[str, Any]:
    [event] = [
        event
        for event in fleet.fleet.trace(run_id)
        if event["type"] == "effect.reconciliation-required"
    ]
    detail: dict[str, Any] = event["detail"]
    return detail


@pytest.mark.accept("FLT-05")
def test_a_proposal_that_was_seen_before_the_kill_is_a_repetition_after_it(crash: Crash) -> None:
    run = crash.after["repeating"]
    assert (run.status, run.reason) == ("failed", "repeated-proposal")
    assert len(crash.fleet.noted("look", run.run_id)) == 2
    assert used(run) == 4


@pytest.mark.accept("LED-03")
def test_an_intent_that_took_effect_before_the_kill_is_not_sent_by_another_run(
    crash: Crash,
) -> None:
    """The other run rests on the recorded result."""
    again = crash.fleet.start(save("e", hold="saved"), complete())
    [run] = crash.fleet.rest(again)
    assert (run.status, run.observations) == ("completed", ("e",))
    assert crash.fleet.noted("save", again) == []
    assert used(run, "tool_calls") == 0


# ---- broker and database go away -----------------------------------------------------------------


@dataclass
class Shaky:
    """A deployment on servers of its own, which fail."""

    fleet: Deployment
    broker: FailingBroker
    store: FailingStore

    def load(self, name: str, count: int = 30) -> list[str]:
        """Start runs that read and write; return when the fleet is in the midst of them."""
        runs = [
            self.fleet.start(look(f"{name}-{n}"), save(f"{name}-{n}"), complete(f"{name}-{n}"))
            for n in range(count)
        ]
        self.fleet.until(
            "some have written, and many have not",
            lambda: sum(effects(self.fleet, run_id) for run_id in runs) >= 3,
        )
        return runs

    def all_is_well(self, runs: list[str]) -> bool:
        for run in self.fleet.rest(*runs):
            assert run.status == "completed", run
            assert effects(self.fleet, run.run_id) == 1, run
            assert stopped_once(self.fleet, run.run_id), run
            asked = requests(self.fleet, run)
            assert asked["model_calls"] <= used(run), run
            assert asked["tool_calls"] <= used(run, "tool_calls"), run
        return True


@pytest.fixture(scope="module")
def shaky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shaky]:
    directory = tmp_path_factory.mktemp("shaky")
    broker = FailingBroker(directory)
    broker.start()
    try:
        # Durable: what it has committed must outlive its crash.
        with EmbeddedPostgres() as server:
            url = server.create_database("shaky")
            with deployed(directory, url, broker.url) as fleet:
                yield Shaky(fleet.staff(2), broker, FailingStore(url))
    finally:
        broker.stop()


@pytest.mark.accept("FLT-13", "FLT-12")
def test_no_run_is_lost_when_the_broker_forgets_everything_and_goes_away(shaky: Shaky) -> None:
    """Its queues and locks are lost twice; runs are accepted while it is away."""
    runs = shaky.load("broker")
    shaky.broker.flush()
    shaky.broker.stop()
    back_at = time.monotonic() + AWAY_S
    runs += [shaky.fleet.start(save(f"away-{n}"), complete(f"away-{n}")) for n in range(5)]
    shaky.fleet.until("the broker has been away", lambda: time.monotonic() >= back_at)
    shaky.broker.start()
    assert shaky.all_is_well(runs)
    assert all(worker.is_alive for worker in shaky.fleet.workers.values())


@pytest.mark.accept("FLT-13", "FLT-12")
def test_no_run_is_lost_when_the_database_crashes_and_is_away(shaky: Shaky) -> None:
    """Every connection is dropped in the midst of the work, and none can be made for a while."""
    runs = shaky.load("store")
    shaky.store.crash()
    back_at = time.monotonic() + AWAY_S
    try:
        shaky.fleet.until("the database has been away", lambda: time.monotonic() >= back_at)
    finally:
        shaky.store.back()
    assert shaky.all_is_well(runs)
    assert all(worker.is_alive for worker in shaky.fleet.workers.values())
