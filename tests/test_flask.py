"""Handrail in a Flask application, on both databases: transactions, configuration, tools."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from handrail import Read, ToolCall, Workflow
from handrail.asked import UnknownWorkflow
from handrail.broker.message import STEPS_QUEUE
from handrail.broker.redis_client import redis_client
from handrail.integrations.flask import Fleet, handrail
from handrail.integrations.flask.extension import NotInitialised
from handrail.integrations.flask.workers import NoApplication
from handrail.ledger import migrate
from handrail.ledger.errors import NotMigrated, UnknownRun
from handrail.ledger.migrate import include_name
from handrail.settings import InvalidSettings
from handrail.testing.services import EmbeddedPostgres

GIVEN: dict[str, Any] = {"goal": "see"}


@dataclass
class Site:
    """An application with a table of its own, and the fleet that works for it."""

    app: Flask
    db: SQLAlchemy
    order: Any
    fleet: Fleet
    ledger_url: str

    def ask(self, how: str, **headers: str) -> tuple[int, str]:
        """A request; returns the status and the run that it has asked for."""
        answer = self.app.test_client().post(f"/ask/{how}", headers=headers)
        return answer.status_code, answer.get_data(as_text=True)

    def orders(self) -> int:
        with self.app.app_context():
            return int(self.db.session.query(self.order).count())

    def has(self, run_id: str) -> bool:
        return run_id in {run.run_id for run in self.fleet.runs()}


def make_site(place: Path, session_url: str, ledger_url: str = "", **config: Any) -> Site:
    """Make an application whose session is on one database, and whose ledger may be elsewhere."""
    app = Flask(__name__, instance_path=str(place))
    app.config["SQLALCHEMY_DATABASE_URI"] = of_sqlalchemy(session_url)
    app.config.update(config)
    db = SQLAlchemy()

    class Order(db.Model):  # type: ignore[name-defined, misc]
        id = db.Column(db.Integer, primary_key=True)

    db.init_app(app)
    handrail.init_app(app)
    with app.app_context():
        db.create_all()
    migrate.upgrade(ledger_url or session_url)
    fleet = Fleet(app)

    @fleet.tool(side_effect="read")
    def count(arguments: Any, call: ToolCall) -> dict[str, Any]:
        db.session.add(Order())  # never committed: gone with the session
        db.session.flush()
        return {"orders": db.session.query(Order).count()}

    fleet.workflow(Workflow(name="count", stages=[Read("orders", count, lambda run: {})]))
    fleet.announce()
    made = Site(app, db, Order, fleet, ledger_url or session_url)
    app.add_url_rule("/ask/<how>", view_func=lambda how: asked(made, how), methods=["POST"])
    return made


def of_sqlalchemy(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


def asked(site: Site, how: str) -> str:
    """The views: an order and a run in one session, and what may become of them."""
    session = site.db.session
    key = request.headers.get("Dedupe-Key")
    session.add(site.order())
    if how == "savepoint":
        session.flush()
        inner = session.begin_nested()
        gone = handrail.enqueue("count", **GIVEN)
        inner.rollback()
        kept = handrail.enqueue("count", **GIVEN)
        session.commit()
        return f"{gone} {kept}"
    run_id = handrail.enqueue("count", run_id=request.headers.get("Run"), dedupe_key=key, **GIVEN)
    if how == "fail":
        raise ZeroDivisionError
    if how == "rollback":
        session.rollback()
    elif how == "twice":
        session.commit()
        session.add(site.order())
        second = handrail.enqueue("count", **GIVEN)
        session.commit()
        return f"{run_id} {second}"
    elif how == "commit":
        session.commit()
    return run_id


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/site.db"
    else:
        yield from a_database(request.getfixturevalue("postgres"), tmp_path)


@pytest.fixture
def pg(postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[str]:
    """An empty PostgreSQL database."""
    yield from a_database(postgres, tmp_path)


def a_database(server: EmbeddedPostgres, place: Path) -> Iterator[str]:
    name = re.sub(r"\W+", "_", f"flask_{place.name}").lower()
    yield server.create_database(name)
    server.drop_database(name)


def closed(site: Site) -> None:
    site.fleet.close()
    with site.app.app_context():
        handrail.client.close()
        for engine in site.db.engines.values():
            engine.dispose()


@pytest.fixture
def site(url: str, tmp_path: Path) -> Iterator[Site]:
    made = make_site(tmp_path, url)
    yield made
    closed(made)


# ---- the session of a request --------------------------------------------------------------------


def test_a_run_and_what_it_is_about_are_one_transaction(site: Site) -> None:
    code, run_id = site.ask("commit")
    assert (code, site.orders(), site.has(run_id)) == (200, 1, True)
    for how, status in (("rollback", 200), ("fail", 500), ("forget", 200)):
        code, _ = site.ask(how, Run=f"gone-{how}")
        assert code == status
        assert not site.has(f"gone-{how}")
    assert site.orders() == 1


def test_a_savepoint_s_rollback_takes_its_run_alone(site: Site) -> None:
    gone, kept = site.ask("savepoint")[1].split()
    assert (site.has(gone), site.has(kept), site.orders()) == (False, True, 1)


def test_two_commits_in_one_request_are_two_runs(site: Site) -> None:
    first, second = site.ask("twice")[1].split()
    assert first != second
    assert (site.has(first), site.has(second), site.orders()) == (True, True, 2)


def test_a_session_that_is_used_again_accepts_again(site: Site) -> None:
    with site.app.app_context():
        runs = []
        for ends in (site.db.session.rollback, site.db.session.commit) * 2:
            runs.append(handrail.enqueue("count", **GIVEN))
            ends()
    assert [site.has(run) for run in runs] == [False, True, False, True]


def test_an_engine_without_transactions_takes_no_run_back(url: str, tmp_path: Path) -> None:
    """What is said of AUTOCOMMIT: a rollback has nothing to roll back, and the run is whole."""
    options = {"isolation_level": "AUTOCOMMIT"}
    site = make_site(tmp_path, url, SQLALCHEMY_ENGINE_OPTIONS=options)
    try:
        code, run_id = site.ask("rollback")
        assert (code, site.has(run_id)) == (200, True)
        assert site.fleet.drive(run_id).status == "completed"
    finally:
        closed(site)


def test_accepting_costs_a_transaction_two_statements_and_no_savepoint(site: Site) -> None:
    said: list[str] = []
    with site.app.app_context():
        event.listen(site.db.engine, "before_cursor_execute", lambda *given: said.append(given[2]))
        event.listen(site.db.engine, "savepoint", lambda *given: said.append("SAVEPOINT"))
        site.db.session.execute(text("SELECT 1"))
        said.clear()
        handrail.enqueue("count", **GIVEN)
        accepting = list(said)
        site.db.session.commit()
    assert len(accepting) == 2
    assert said == accepting  # nor does the commit need any
    assert not [one for one in said if "SAVEPOINT" in one]


def test_a_double_click_is_one_run(site: Site) -> None:
    first, second = (site.ask("commit", **{"Dedupe-Key": "form-1"})[1] for _ in range(2))
    assert first == second
    assert len(site.fleet.runs()) == 1


def test_a_second_click_waits_for_the_first_one_s_transaction(pg: str, tmp_path: Path) -> None:
    site = make_site(tmp_path, pg)
    inserted = Event()

    def click(hold_s: float) -> str:
        with site.app.app_context():
            run_id = handrail.enqueue("count", dedupe_key="form-1", **GIVEN)
            inserted.set()
            time.sleep(hold_s)
            site.db.session.commit()
            return run_id

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(click, 0.3)
        assert inserted.wait(10)
        second = pool.submit(click, 0.0)
        assert first.result(20) == second.result(20)
    closed(site)


def test_threads_share_the_extension_and_no_session(site: Site) -> None:
    def one(number: int) -> str:
        with site.app.app_context():
            for _ in range(50):  # SQLite lets one writer in
                try:
                    run_id = handrail.enqueue("count", **GIVEN)
                    (site.db.session.rollback if number % 2 else site.db.session.commit)()
                    return run_id
                except Exception as error:
                    if "locked" not in str(error):
                        raise
                    site.db.session.rollback()
                    time.sleep(0.02)
            raise AssertionError("locked for good")

    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(one, range(12)))
    assert len(set(runs)) == 12
    assert [site.has(run) for run in runs] == [True, False] * 6


def test_a_plain_session_is_taken_as_it_is(site: Site) -> None:
    with site.app.app_context(), Session(site.db.engine) as session:
        gone = handrail.enqueue("count", session=session, **GIVEN)
        session.rollback()
        kept = handrail.enqueue("count", session=session, **GIVEN)
        site.db.session.rollback()  # another one, which changes nothing
        session.commit()
    assert (site.has(gone), site.has(kept)) == (False, True)


@pytest.mark.parametrize("first", [True, False], ids=["the first statement", "a later one"])
def test_a_session_on_a_connection_stays_in_its_transaction(site: Site, first: bool) -> None:
    """As tests do: whatever is committed in there is taken back with what is around it."""
    with site.app.app_context(), site.db.engine.connect() as connection:
        around = connection.begin()
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN")  # by itself the driver begins with a write
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            if not first:
                session.execute(text("SELECT 1"))
            run = handrail.enqueue("count", session=session, **GIVEN)
            session.commit()
        around.rollback()
    assert not site.has(run)


def test_begin_immediate_for_every_engine_does_not_disturb_an_upgrade(tmp_path: Path) -> None:
    """In a process of its own: such listeners are there for good."""
    code = f"""
from sqlalchemy import event
from sqlalchemy.engine import Engine

@event.listens_for(Engine, "connect")
def by_hand(connection, record):
    connection.isolation_level = None

@event.listens_for(Engine, "begin")
def at_once(connection):
    connection.exec_driver_sql("BEGIN IMMEDIATE")

from handrail.ledger.migrate import current, downgrade, upgrade
url = "sqlite:///{tmp_path}/site.db"
assert upgrade(url) == upgrade(url) == current(url)
assert downgrade(url) is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_asynchronous_session_accepts_within_run_sync(pg: str, tmp_path: Path) -> None:
    site = make_site(tmp_path, pg)

    async def accept() -> list[str]:
        engine = create_async_engine(of_sqlalchemy(pg))
        async with AsyncSession(engine) as session:
            runs = []
            for ends in (session.rollback, session.commit):
                runs.append(
                    await session.run_sync(lambda s: handrail.enqueue("count", session=s, **GIVEN))
                )
                await ends()
        await engine.dispose()
        return runs

    with site.app.app_context():
        runs = asyncio.run(accept())
    assert [site.has(run) for run in runs] == [False, True]
    closed(site)


def test_steps_are_published_after_the_outermost_commit(
    url: str, tmp_path: Path, valkey_url: str
) -> None:
    prefix = f"f{time.monotonic_ns()}."
    redis: Any = redis_client(valkey_url)
    site = make_site(tmp_path, url, HANDRAIL_BROKER_URL=valkey_url, HANDRAIL_KEY_PREFIX=prefix)

    def published() -> int:
        return int(redis.llen(prefix + STEPS_QUEUE))

    with site.app.app_context():
        session = site.db.session
        session.add(site.order())
        session.flush()
        with session.begin_nested():
            handrail.enqueue("count", **GIVEN)
        assert published() == 0
        session.commit()
        assert published() == 1
        handrail.enqueue("count", **GIVEN)
        session.rollback()
        session.commit()
    assert published() == 1
    for how in ("fail", "rollback", "forget"):
        site.ask(how)
    assert published() == 1
    site.ask("savepoint")
    assert published() == 2
    closed(site)


def test_a_run_belongs_to_the_trace_of_its_request(site: Site) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    run_id = site.ask("commit", traceparent=trace)[1]
    assert site.fleet.get(run_id).traceparent == trace
    assert site.fleet.get(site.ask("commit")[1]).traceparent is None
    broken = site.ask("commit", traceparent="00-nothing")[1]
    assert site.fleet.get(broken).traceparent is None
    with site.app.test_request_context(headers={"traceparent": trace}):
        of_the_fleet = site.fleet.enqueue("count", **GIVEN)
    assert site.fleet.get(of_the_fleet).traceparent == trace
    assert site.fleet.get(site.fleet.enqueue("count", **GIVEN)).traceparent is None


# ---- where the ledger is -------------------------------------------------------------------------


def test_a_ledger_elsewhere_waits_for_the_commit(pg: str, tmp_path: Path) -> None:
    mine = f"sqlite:///{tmp_path}/mine.db"
    site = make_site(tmp_path, mine, pg, HANDRAIL_DATABASE_URL=pg)
    for how in ("fail", "rollback", "forget"):
        site.ask(how)
    assert site.fleet.runs() == []
    with site.app.app_context():
        run_id = handrail.enqueue("count", **GIVEN)
        assert not site.has(run_id)
        site.db.session.commit()
        assert site.has(run_id)
        with pytest.raises(UnknownWorkflow):  # what is wrong is said at once, not after the commit
            handrail.enqueue("cuont", **GIVEN)
    gone, kept = site.ask("savepoint")[1].split()
    assert (site.has(gone), site.has(kept)) == (False, True)
    closed(site)


def test_a_ledger_elsewhere_that_is_not_migrated_says_what_to_do(tmp_path: Path) -> None:
    site = make_site(tmp_path, f"sqlite:///{tmp_path}/mine.db")
    site.app.config["HANDRAIL_DATABASE_URL"] = f"sqlite:///{tmp_path}/empty.db"
    with site.app.app_context(), pytest.raises(NotMigrated, match="handrail db upgrade"):
        handrail.enqueue("count", dedupe_key="twice", **GIVEN)


@pytest.mark.parametrize("early", [False, True])
def test_a_double_click_is_one_run_of_one_id_with_the_ledger_elsewhere(
    pg: str, tmp_path: Path, early: bool
) -> None:
    """Neither click's run is there when the other is answered; or it was accepted long ago."""
    site = make_site(tmp_path, f"sqlite:///{tmp_path}/mine.db", pg, HANDRAIL_DATABASE_URL=pg)
    key = f"refund:{uuid.uuid4().hex}\u00e9"
    asked = {**GIVEN, "dedupe_key": key}
    first = site.fleet.enqueue("count", **asked) if early else None
    with site.app.app_context():
        clicks = [handrail.enqueue("count", **asked) for _ in range(2)]
        clicks.append(handrail.enqueue("count", **{**asked, "goal": "count once more"}))
        assert len({*clicks, *([first] if first else [])}) == 1
        assert site.has(clicks[0]) is early
        site.db.session.commit()
        shadow = handrail.enqueue("count", **asked, mode="shadow")
        site.db.session.commit()
    [run] = [one for one in site.fleet.runs() if one.mode == "live"]
    assert (run.run_id, run.goal) == (clicks[0], GIVEN["goal"])
    assert shadow != run.run_id and site.has(shadow)
    closed(site)


def test_a_ledger_in_another_bind_is_in_the_session_s_transaction(url: str, tmp_path: Path) -> None:
    config = {"SQLALCHEMY_BINDS": {"agents": of_sqlalchemy(url)}, "HANDRAIL_BIND_KEY": "agents"}
    site = make_site(tmp_path, f"sqlite:///{tmp_path}/mine.db", url, **config)
    run_id = site.ask("commit")[1]
    assert (site.has(run_id), site.orders()) == (True, 1)
    for how in ("fail", "rollback"):
        site.ask(how)
    gone, kept = site.ask("savepoint")[1].split()
    assert (site.has(gone), site.has(kept)) == (False, True)
    assert len(site.fleet.runs()) == 2
    site.app.config["HANDRAIL_BIND_KEY"] = "agnets"
    with site.app.app_context(), pytest.raises(InvalidSettings, match="agnets"):
        handrail.enqueue("count", **GIVEN)
    site.app.config["HANDRAIL_BIND_KEY"] = "agents"
    closed(site)


# ---- configuration -------------------------------------------------------------------------------


def test_two_applications_know_nothing_of_each_other(tmp_path: Path) -> None:
    sites = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        database = f"sqlite:///{tmp_path}/{name}/site.db"
        sites.append(make_site(tmp_path / name, database, HANDRAIL_TENANT=name))
    one, two = sites
    mine, theirs = one.ask("commit")[1], two.ask("commit")[1]
    assert [run.tenant for run in one.fleet.runs()] == ["one"]
    assert [run.tenant for run in two.fleet.runs()] == ["two"]
    with one.app.app_context():
        assert handrail.get(mine).status == "queued"
        with pytest.raises(UnknownRun):
            handrail.get(theirs)
        with two.app.app_context():
            assert handrail.get(theirs).status == "queued"
    for site in sites:
        closed(site)


def test_the_application_s_configuration_wins_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDRAIL_TENANT", "of-the-environment")
    monkeypatch.setenv("HANDRAIL_LEASE_MS", "12000")
    monkeypatch.setenv("HANDRAIL_DATABASE_URL", f"sqlite:///{tmp_path}/environment.db")
    site = make_site(tmp_path, f"sqlite:///{tmp_path}/site.db", HANDRAIL_TENANT="of-the-app")
    with site.app.app_context():
        for settings in (handrail.client.settings, site.fleet.settings):
            assert settings.tenant == "of-the-app"
            assert settings.lease_ms == 12_000
    run_id = site.ask("commit")[1]
    assert site.fleet.get(run_id).tenant == "of-the-app"
    closed(site)


def test_a_key_that_is_no_setting_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    app = Flask(__name__, instance_path=str(tmp_path))
    app.config["HANDRAIL_BROKER_ULR"] = "redis://h"
    handrail.init_app(app)
    with app.app_context(), pytest.raises(InvalidSettings, match="mean HANDRAIL_BROKER_URL"):
        handrail.enqueue("count", **GIVEN)
    with pytest.raises(InvalidSettings, match="HANDRAIL_BROKER_ULR is no setting"):
        assert Fleet(app).settings


def test_an_application_that_was_not_initialised_says_what_to_do(tmp_path: Path) -> None:
    with Flask(__name__).app_context(), pytest.raises(NotInitialised, match="init_app"):
        handrail.enqueue("count", **GIVEN)
    for wrong in ("shop", lambda: "shop"):
        with pytest.raises(NoApplication):
            assert Fleet(wrong).app  # type: ignore[arg-type]


def test_a_web_process_imports_no_agent_code(tmp_path: Path) -> None:
    """Not by the import, and not by accepting a run either."""
    database = f"sqlite:///{tmp_path}/site.db"
    closed(make_site(tmp_path, database))
    code = f"""
import sys
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from handrail.integrations.flask import handrail
app, db = Flask("site", instance_path={str(tmp_path)!r}), SQLAlchemy()
app.config["SQLALCHEMY_DATABASE_URI"] = {database!r}
db.init_app(app)
handrail.init_app(app)
with app.app_context():
    run_id = handrail.enqueue("count", goal="see")
    db.session.commit()
    assert handrail.get(run_id).status == "queued"
heavy = ("handrail.agent", "handrail.gateway", "handrail.tasks", "celery", "kombu", "alembic")
print(*sorted(name for name in sys.modules if name.startswith(heavy)))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""


def test_flask_handrail_passes_options_and_exit_codes_through(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/site.db"
    site = make_site(tmp_path, database)
    run_id = site.ask("commit")[1]
    closed(site)
    (tmp_path / "site_of_mine.py").write_text(
        "from flask import Flask\n"
        "from handrail.integrations.flask import handrail\n"
        f"app = Flask(__name__, instance_path={str(tmp_path)!r})\n"
        f"app.config['HANDRAIL_DATABASE_URL'] = {database!r}\n"
        "handrail.init_app(app)\n"
    )

    def command(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "flask", "--app", "site_of_mine", "handrail", *arguments],
            cwd=tmp_path,
            env={**os.environ, "HANDRAIL_DATABASE_URL": "sqlite:///elsewhere.db", **more},
            capture_output=True,
            text=True,
        )

    shown = command("show", run_id, "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["run_id"] == run_id
    unknown = command("show", "nothing", "--json")
    assert (unknown.returncode, json.loads(unknown.stdout)["error"]["code"]) == (2, "unknown-run")
    assert command("runs", "--no-such-option").returncode == 2
    wrong = {"HANDRAIL_LEASE_MS": "soon"}
    refused = command("runs", **wrong)
    assert (refused.returncode, refused.stderr[:24]) == (2, "error[invalid-settings]:")
    helped = command("runs", "--help")
    assert (helped.returncode, "flask handrail runs" in helped.stdout) == (0, True)


# ---- tools ---------------------------------------------------------------------------------------


def test_a_tool_has_a_session_of_its_own_and_leaves_no_connection_behind(
    pg: str, tmp_path: Path
) -> None:
    site = make_site(tmp_path, pg)
    assert site.fleet.run("count", **GIVEN).answer == {"orders": 1}
    before = connections_of(site)
    runs = [site.fleet.run("count", **GIVEN) for _ in range(30)]
    assert [run.status for run in runs] == ["completed"] * 30
    assert {json.dumps(run.answer) for run in runs} == {'{"orders": 1}'}  # none saw another's
    assert connections_of(site) == before
    with site.app.app_context():
        assert site.db.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert site.orders() == 0
    closed(site)


def connections_of(site: Site) -> int:
    """How many connections, other than the ledger's, are open at the server."""
    with site.app.app_context():
        return int(
            site.db.session.execute(
                text(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND application_name <> 'handrail' AND backend_type = 'client backend'"
                )
            ).scalar_one()
        )


def test_what_a_teardown_raises_changes_nothing(site: Site) -> None:
    seen: list[object] = []

    @site.app.teardown_appcontext
    def fails(error: BaseException | None) -> None:
        if broken:
            seen.append(error)
            raise OSError("the pool is gone")

    broken = [True]
    found = site.fleet.run("count", **GIVEN)
    broken.clear()
    assert (found.status, found.answer) == ("completed", {"orders": 1})
    assert seen
    with site.app.app_context():  # Flask-SQLAlchemy's own teardown was not reached
        assert site.db.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_accepting_and_looking_end_no_context_of_the_request(site: Site) -> None:
    ended: list[object] = []
    site.app.teardown_appcontext(ended.append)
    with site.app.app_context():
        run = handrail.enqueue("count", **GIVEN)
        handrail.get(run)
        assert ended == []
    assert ended == [None]


# ---- migrations ----------------------------------------------------------------------------------


def test_a_host_s_autogenerate_passes_over_our_tables(site: Site) -> None:
    def left_over(**options: Any) -> list[Any]:
        with site.app.app_context(), site.db.engine.connect() as connection:
            context = MigrationContext.configure(connection, opts=options)
            return list(compare_metadata(context, site.db.metadata))

    dropped = {change[1].name for change in left_over() if change[0] == "remove_table"}
    assert "handrail_run" in dropped  # it would, without
    assert left_over(include_name=include_name) == []


def test_the_fleet_and_the_client_of_an_application_use_one_ledger(site: Site) -> None:
    run_id = site.ask("commit")[1]
    assert site.fleet.drive(run_id).status == "completed"
    with site.app.app_context(), closing(handrail.client):
        assert handrail.get(run_id).answer == {"orders": 2}  # the request's, and the tool's own
