"""A web process accepts runs in its own transaction, and never waits for a broker."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import psutil
import pytest
from pydantic import AfterValidator, BaseModel, Field
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

from handrail import AgentLoop, Budget, Fleet, Principal, Read, RunFacts, ToolCall, Workflow
from handrail.agent.status import TERMINAL, WITH_PERSON
from handrail.asked import InvalidRun, UnknownWorkflow
from handrail.broker.message import STEPS_QUEUE, StepMessage
from handrail.broker.publish import REST_S, Courier, Publisher, PublishFailed
from handrail.broker.redis_client import redis_client
from handrail.client import ENDED, Client
from handrail.client import WITH_PERSON as CLIENTS_WITH_PERSON
from handrail.embedded import EmbeddedValkey
from handrail.errors import InvalidBudget
from handrail.hosts import InvalidSession
from handrail.ledger import migrate
from handrail.ledger.errors import NotMigrated, RunExists, UnknownRun
from handrail.testing.services import EmbeddedPostgres

HEAVY = ("handrail.agent", "handrail.gateway", "handrail.tasks", "handrail.reconciler")


class Order(BaseModel):
    order_id: Annotated[int, Field(ge=1)]
    note: str = "none"


def not_thirteen(value: int) -> int:
    if value == 13:
        raise ValueError("thirteen brings bad luck")
    return value


class Delivery(BaseModel):
    day: date
    floor: Annotated[int, AfterValidator(not_thirteen)]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A migrated ledger in each database."""
    if request.param == "sqlite":
        address = f"sqlite:///{tmp_path}/ledger.db"
        migrate.upgrade(address)
        yield address
        return
    server: EmbeddedPostgres = request.getfixturevalue("postgres")
    name = re.sub(r"\W+", "_", tmp_path.name)
    address = server.create_database(name)
    migrate.upgrade(address)
    yield address
    server.drop_database(name)


def announce(fleet: Fleet, workflow: str = "look", *, version: str = "1", at: int = 1) -> None:
    """Put a workflow into the catalog, as a worker does when it starts."""
    entry = fleet.entry_of(fleet.workflows[f"{workflow}@{version}"])
    fleet.ledger.database.run(
        "INSERT INTO handrail_workflow (name, version, announced_at, seen_at, entry)"
        " VALUES (:name, :version, :at, :at, :entry)",
        {"name": workflow, "version": version, "at": at, "entry": json.dumps(entry)},
    )


def of_run(run: RunFacts) -> dict[str, Any]:
    assert isinstance(run.input, dict)
    return run.input


def make_fleet(url: str, **options: Any) -> Fleet:
    fleet = Fleet(database_url=url, **options)

    @fleet.tool(side_effect="read")
    def look(arguments: Order, call: ToolCall) -> dict[str, Any]:
        return {"order": arguments.order_id, "note": arguments.note}

    fleet.model("default", lambda observation: {"finish": {"answer": "seen"}})
    see = Read(name="see", tool=look, arguments=of_run)
    fleet.workflow(
        Workflow(
            name="look", input=Order, stages=[see], budget=Budget(steps=4, per_tool={"look": 2})
        )
    )
    return fleet


@pytest.fixture
def fleet(url: str) -> Iterator[Fleet]:
    with closing(make_fleet(url)) as made:
        announce(made)
        yield made


@pytest.fixture
def client(url: str, fleet: Fleet) -> Iterator[Client]:
    with closing(Client(database_url=url)) as made:
        yield made


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """The host's own connections, as Flask-SQLAlchemy makes them."""
    made = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    yield made
    made.dispose()


def test_what_a_web_process_imports_is_light() -> None:
    """No agent code; and publishing on Redis needs no Celery."""
    code = f"""
import sys
import handrail.client
from handrail.broker.publish import Courier, Publisher
handrail.client.Client(database_url="sqlite://")
Publisher("redis://127.0.0.1:1")
heavy = {(*HEAVY, "celery", "kombu", "sqlalchemy", "sqlmodel", "alembic")!r}
print(*sorted(name for name in sys.modules if name.startswith(heavy)))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""


def test_accepting_and_looking_need_no_agent_code_either(url: str, fleet: Fleet) -> None:
    code = f"""
import sys
from handrail.client import Client
client = Client(database_url={url!r})
run_id = client.enqueue("look", goal="see", input={{"order_id": 1}})
assert client.get(run_id).status == "queued"
print(*sorted(name for name in sys.modules if name.startswith({HEAVY!r})))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""


def test_the_client_knows_the_machine_s_statuses() -> None:
    assert ENDED == TERMINAL
    assert CLIENTS_WITH_PERSON == WITH_PERSON


def rows_of(fleet: Fleet, run_id: str) -> list[dict[str, Any]]:
    """All that was written for a run, without what no two runs share."""
    tables = {"handrail_run": "id", "handrail_trace": "run_id", "handrail_tool_allowance": "run_id"}
    found: list[dict[str, Any]] = []
    for table, key in tables.items():
        found += fleet.ledger.database.run(
            f"SELECT * FROM {table} WHERE {key} = :id", {"id": run_id}
        )
    times = ("_at", "writer", "id", "run_id", "at")
    return [{k: v for k, v in row.items() if not k.endswith(times)} for row in found]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"principal": "alice", "tenant": "acme", "goal": "naïve \x00 \ud800", "mode": "shadow"},
        {"principal": Principal("bob", frozenset({"b", "a"})), "dedupe_key": "ключ"},
        {"budget": {"steps": 1, "per_tool": {"look": 1}}, "limits": {"tool_ms": 5}},
        {"budget": {"concurrency": 0}, "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"},
    ],
)
def test_client_and_fleet_write_the_same_rows(
    options: dict[str, Any], fleet: Fleet, client: Client
) -> None:
    asked: dict[str, Any] = {"goal": "see", "input": {"order_id": 7}} | options
    theirs = rows_of(fleet, fleet.enqueue("look", **asked))
    fleet.ledger.database.run("UPDATE handrail_run SET dedupe_key = NULL", {})
    ours = rows_of(fleet, client.enqueue("look", **asked))
    assert ours == theirs
    assert len(ours) == 3


def test_a_loop_that_begins_a_workflow_is_begun_by_the_client_too(url: str) -> None:
    fleet = make_fleet(url)
    look = fleet.workflows["look@1"].tools[0]
    loop = AgentLoop(name="work", actions=(look,), verify=lambda claim, call: True)
    fleet.workflow(Workflow(name="think", stages=[loop]))
    announce(fleet, "think")
    client = Client(database_url=url)
    theirs = rows_of(fleet, fleet.enqueue("think", goal="think"))
    ours = rows_of(fleet, client.enqueue("think", goal="think"))
    assert ours == theirs
    assert ours[0]["phase"] == "decide"
    at_rest = client.enqueue("think", goal="think", budget={"concurrency": 0})
    assert rows_of(fleet, at_rest)[0]["phase"] == "resume"
    fleet.close()
    client.close()


def test_a_run_that_a_client_accepted_is_worked_off(fleet: Fleet, client: Client) -> None:
    run_id = client.enqueue("look", goal="see", input={"order_id": 7})
    fleet.drive(run_id)
    found = client.get(run_id)
    assert (found.status, found.ended, found.rests) == ("completed", True, True)
    assert found.answer == {"order": 7, "note": "none"}  # the model's default came along


# ---- in the host's transaction -------------------------------------------------------------------


def test_a_rollback_leaves_nothing(client: Client, engine: Engine) -> None:
    with Session(engine) as session:
        run_id = client.enqueue("look", goal="see", input={"order_id": 1}, session=session)
        assert client.get(run_id, session=session).status == "queued"
        session.rollback()
    with pytest.raises(UnknownRun):
        client.get(run_id)


def test_a_run_is_seen_by_others_from_the_commit_on(client: Client, engine: Engine) -> None:
    with Session(engine) as session:
        run_id = client.enqueue(
            "look", goal="see", input={"order_id": 1}, run_id="known-before", session=session
        )
        with pytest.raises(UnknownRun):
            client.get(run_id)
        session.commit()
    assert run_id == "known-before"
    assert client.get(run_id).status == "queued"


def test_a_fleet_takes_part_in_a_session_as_a_client_does(fleet: Fleet, engine: Engine) -> None:
    with Session(engine) as session:
        kept = fleet.enqueue("look", goal="see", input={"order_id": 1}, session=session)
        session.commit()
        gone = fleet.enqueue("look", goal="see", input={"order_id": 1}, session=session)
        session.rollback()
    assert fleet.get(kept).status == "queued"
    with pytest.raises(UnknownRun):
        fleet.get(gone)


def test_accepting_costs_a_transaction_two_statements(client: Client, engine: Engine) -> None:
    """The first one too: it looks the workflow up, and inserts all that a run begins with."""
    seen: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: seen.append(given[2]))
    with Session(engine) as session:
        session.execute(text("SELECT 1"))
        before = len(seen)
        client.enqueue("look", goal="see", input={"order_id": 1}, session=session)
        assert len(seen) - before == 2
        session.commit()


def test_a_double_click_is_one_run(client: Client, engine: Engine) -> None:
    def click() -> str:
        with Session(engine) as session:
            run_id = client.enqueue(
                "look", goal="see", input={"order_id": 1}, dedupe_key="form-1", session=session
            )
            session.commit()
            return run_id

    assert click() == click()


def test_an_id_that_is_taken_by_something_else_is_refused(client: Client) -> None:
    client.enqueue("look", goal="see", input={"order_id": 1}, run_id="r1")
    assert client.enqueue("look", goal="see", input={"order_id": 1}, run_id="r1") == "r1"
    with pytest.raises(RunExists):
        client.enqueue("look", goal="another", input={"order_id": 1}, run_id="r1")


def test_what_is_no_session_is_refused(client: Client, engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(InvalidSession, match=r"Session\("):
        client.enqueue("look", goal="see", input={"order_id": 1}, session=connection)


def test_publishing_waits_for_the_outermost_commit(
    url: str, fleet: Fleet, engine: Engine, valkey_url: str
) -> None:
    prefix = f"c{time.monotonic_ns()}."
    redis = redis_client(valkey_url)

    def published() -> int:
        return int(redis.llen(prefix + STEPS_QUEUE))

    settings = fleet.settings.model_copy(update={"broker_url": valkey_url, "key_prefix": prefix})
    with closing(Client(settings=settings)) as client, Session(engine) as session:

        def accept() -> str:
            return client.enqueue("look", goal="see", input={"order_id": 1}, session=session)

        accept()
        assert published() == 0
        session.commit()
        assert published() == 1
        session.commit()  # of nothing: what was published is not published again
        accept()
        session.rollback()
        session.commit()
        assert published() == 1
        with session.begin_nested():
            accept()
        assert published() == 1
        with pytest.raises(ZeroDivisionError), session.begin_nested():
            accept()
            raise ZeroDivisionError
        session.commit()
        assert published() == 2
    message = json.loads(redis.lindex(prefix + STEPS_QUEUE, -1))  # type: ignore[arg-type]
    (payload,), _, _ = json.loads(message["body"])
    found = StepMessage.from_json(payload)
    assert (found.step, found.epoch) == (0, 0)
    assert found.budget == {"steps": 4, "model_calls": 16, "tool_calls": 24}


# ---- a broker that is away -----------------------------------------------------------------------


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A server that stands still: it takes connections and answers nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_frozen_broker_holds_nobody_up_and_loses_nothing(
    url: str, fleet: Fleet, tmp_path: Path
) -> None:
    """The first request finds out, the next ones do not try; each of them was accepted."""
    with EmbeddedValkey(tmp_path) as valkey:
        port = int(valkey.url.rsplit(":", 1)[1].split("/")[0])
        settings = fleet.settings.model_copy(update={"broker_url": valkey.url})
        (server,) = (
            c.pid
            for c in psutil.net_connections("tcp")
            if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN
        )
        assert server is not None
        with closing(Client(settings=settings)) as client, stopped(server):
            started = time.monotonic()
            runs = [client.enqueue("look", goal="s", input={"order_id": 1}) for _ in range(20)]
            took_s = time.monotonic() - started
        assert took_s < 2.0  # twenty patient ones would take sixteen times as long
    assert {fleet.get(run).status for run in runs} == {"queued"}


class Refusing(Publisher):
    """A publisher whose broker is away, and who counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def publish(self, messages: Any) -> int:
        self.asked += 1
        raise PublishFailed(len(messages), "away")


def test_after_a_failure_a_courier_rests_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Refusing()
    courier = Courier(publisher)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    message = StepMessage(run_id="r", step=0, epoch=0)
    for moment, asked in ((0.0, 1), (REST_S - 0.1, 1), (REST_S, 2)):
        now[0] = 100.0 + moment
        courier.publish([message])
        assert publisher.asked == asked


def test_a_broker_that_refuses_is_no_failure_of_the_request(url: str, fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for scheme in ("redis", "amqp"):
        broker = f"{scheme}://127.0.0.1:{port}/"
        settings = fleet.settings.model_copy(update={"broker_url": broker})
        with closing(Client(settings=settings)) as client:
            run_id = client.enqueue("look", goal="see", input={"order_id": 1})
        assert fleet.get(run_id).status == "queued"


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "place", "says"),
    [
        ({"order_id": "7-secret"}, "input.order_id", "type"),
        ({"order_id": 0}, "input.order_id", "minimum"),
        ({}, "input", "required"),
        ({"order_id": 1, "more": "secret"}, "input", "more"),
        ([], "input", "object"),
        ({"order_id": True}, "input.order_id", "type"),
    ],
)
def test_an_input_is_held_against_its_schema(
    given: Any, place: str, says: str, client: Client, fleet: Fleet
) -> None:
    with pytest.raises(InvalidRun) as refused:
        client.enqueue("look", goal="see", input=given)
    assert refused.value.field == place
    assert says in refused.value.problem
    assert "secret" not in str(refused.value)
    with pytest.raises(InvalidRun):
        fleet.enqueue("look", goal="see", input=given)
    assert fleet.runs() == []


def test_a_model_that_checks_more_than_a_schema_says_is_asked_itself(
    client: Client, fleet: Fleet
) -> None:
    fleet.workflow(Workflow(name="bring", input=Delivery, stages=fleet.workflows["look@1"].stages))
    announce(fleet, "bring")
    for wrong in ({"day": "soon", "floor": 1}, {"day": "2026-12-01", "floor": 13}):
        with pytest.raises(InvalidRun):
            client.enqueue("bring", goal="bring it", input=wrong)
    run_id = client.enqueue("bring", goal="bring it", input={"day": "2026-12-01", "floor": 1})
    assert fleet.get(run_id).status == "queued"


def test_a_model_that_a_web_process_lacks_is_named(client: Client, fleet: Fleet) -> None:
    class Hidden(Delivery):
        pass

    fleet.workflow(Workflow(name="bring", input=Hidden, stages=fleet.workflows["look@1"].stages))
    announce(fleet, "bring")
    with pytest.raises(InvalidRun, match=r"Hidden.*web process"):
        client.enqueue("bring", goal="bring it", input={"day": "2026-12-01", "floor": 1})


def test_more_than_a_workflow_grants_takes_a_permission(client: Client) -> None:
    given = {"order_id": 1}
    with pytest.raises(InvalidBudget, match="budget:raise"):
        client.enqueue("look", goal="see", input=given, budget={"steps": 5})
    with pytest.raises(InvalidBudget, match="a tool of the workflow: look"):
        client.enqueue("look", goal="see", input=given, budget={"per_tool": {"lok": 1}})
    boss = {"subject": "boss", "permissions": ["budget:raise"]}
    client.enqueue("look", goal="see", input=given, budget={"steps": 5}, principal=boss)


@pytest.mark.parametrize("name", ["nothing", "", None, 7, "look\x00"])
def test_an_unknown_workflow_is_refused(name: Any, client: Client) -> None:
    with pytest.raises(UnknownWorkflow, match="start a worker"):
        client.enqueue(name, goal="see")


@pytest.mark.parametrize(
    "wrong",
    [
        {"goal": ""},
        {"goal": None},
        {"tenant": "no tenant"},
        {"principal": 7},
        {"principal": {"name": "alice"}},
        {"principal": {"subject": "alice", "permissions": "all"}},
        {"run_id": "r1\n"},
        {"dedupe_key": ""},
        {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01\n"},
        {"mode": "dry"},
        {"input": float("nan")},
    ],
)
def test_what_is_malformed_is_refused_before_anything_is_written(
    wrong: dict[str, Any], client: Client, fleet: Fleet
) -> None:
    with pytest.raises(InvalidRun):
        client.enqueue("look", **({"goal": "see", "input": {"order_id": 1}} | wrong))
    assert fleet.runs() == []


def test_a_ledger_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    client = Client(database_url=f"sqlite:///{tmp_path}/empty.db")
    with pytest.raises(NotMigrated, match="handrail db upgrade"):
        client.enqueue("look", goal="see")


def test_nobody_learns_of_a_run_that_is_not_his(client: Client) -> None:
    run_id = client.enqueue(
        "look", goal="see", input={"order_id": 1}, principal="alice", tenant="acme"
    )
    assert client.get(run_id, tenant="acme", subject="alice").subject == "alice"
    for others in ({"subject": "bob"}, {"tenant": "other"}, {"tenant": "acme", "subject": ""}):
        with pytest.raises(UnknownRun):
            client.get(run_id, **others)
    for nothing in ("", "x" * 65, None, "r\x00"):
        with pytest.raises(UnknownRun):
            client.get(nothing)  # type: ignore[arg-type]


# ---- which version a run gets --------------------------------------------------------------------


def test_a_run_gets_the_newest_version_that_a_live_worker_has(fleet: Fleet, client: Client) -> None:
    database = fleet.ledger.database

    def at(version: str, *, announced: int, seen: int) -> None:
        database.run(
            "UPDATE handrail_workflow SET announced_at = :announced, seen_at = :seen"
            " WHERE version = :version",
            {"announced": announced, "seen": fleet.ledger.now() - seen, "version": version},
        )

    def given() -> str:
        run_id = client.enqueue("look", goal="see", input={"order_id": 1})
        return client.get(run_id).workflow_version

    stages = fleet.workflows["look@1"].stages
    fleet.workflow(Workflow(name="look", version="2", input=Order, stages=stages))
    announce(fleet, version="2", at=2)
    at("1", announced=1, seen=0)
    at("2", announced=2, seen=0)
    assert given() == "2"  # side by side, in a rolling deployment
    at("2", announced=2, seen=600_000)
    assert given() == "1"  # the deployment was taken back
    at("1", announced=1, seen=600_000)
    assert given() == "2"  # no worker is there at all


# ---- a host whose transaction is in another database ---------------------------------------------


class Elsewhere:
    """A host's transaction that is not the ledger's; it is its own host."""

    postgres, elsewhere = False, True

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def transaction(self) -> Elsewhere:
        return self

    def run(self, sql: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        raise AssertionError("there are no tables of ours here")

    def on_commit(self, act: Callable[[], object]) -> None:
        self.waiting.append(act)

    def commit(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


def test_a_fleet_and_a_client_beside_another_database_agree_on_the_run_of_a_key(
    tmp_path: Path,
) -> None:
    host, url = Elsewhere(), f"sqlite:///{tmp_path}/ledger.db"
    fleet = Fleet(database_url=url, host=host)
    fleet.upgrade_database()
    look = fleet.tool("look", side_effect="read")(lambda arguments, call: None)
    fleet.workflow(Workflow(name="look", stages=[Read("found", look, lambda run: {})]))
    fleet.announce()
    client = Client(database_url=url, host=host)
    by_fleet = fleet.enqueue("look", goal="look", dedupe_key="k")
    by_client = client.enqueue("look", goal="look again", dedupe_key="k")
    assert by_fleet == by_client != client.enqueue("look", goal="look", dedupe_key="l")
    with pytest.raises(UnknownRun):
        fleet.get(by_fleet)
    host.commit()
    assert [fleet.get(by_fleet).goal, len(fleet.runs())] == ["look", 2]
    mine = client.enqueue("look", goal="look", dedupe_key="m", run_id="mine")
    host.commit()
    assert mine == "mine" == client.enqueue("look", goal="look", dedupe_key="m")
