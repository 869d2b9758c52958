"""Handrail in a Django project, on both databases: transactions, migrations, checks, admin."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pydantic import BaseModel

from handrail import FOREVER, Action, Commit, Confirm, Fleet, Read, RunFacts, ToolCall, Workflow
from handrail.broker.message import STEPS_QUEUE
from handrail.broker.redis_client import redis_client
from handrail.ledger.errors import UnknownRun
from handrail.ledger.migrate import downgrade, upgrade
from handrail.settings import InvalidSettings
from handrail.testing.services import EmbeddedPostgres
from tests import django_site
from tests.django_site import SECRET

ALIASES = ("default", "pg")
GIVEN: dict[str, Any] = {"goal": "see", "input": {"order_id": 1}}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, postgres: EmbeddedPostgres) -> None:
    django_site.set_up(tmp_path_factory.mktemp("site"), postgres.create_database("django_site"))


@contextmanager
def configured(**handrail: Any) -> Iterator[None]:
    from django.test.utils import override_settings

    with override_settings(HANDRAIL={"APPROVAL_SECRET": SECRET, **handrail}):
        yield


class Payment(BaseModel):
    amount_cents: int
    to: str


def look(arguments: Any, call: ToolCall) -> dict[str, Any]:
    from django.contrib.auth.models import User

    return {"users": User.objects.using(str(arguments["on"])).count()}


def pay(arguments: Payment, call: ToolCall) -> dict[str, Any]:
    return {"paid": arguments.amount_cents}


def payment(run: RunFacts) -> Action:
    tool = next(t for t in run_tools if t.name == "pay")
    return Action(tool, {"amount_cents": 500, "to": "<script>alert(1)</script>\u202e"})


run_tools: list[Any] = []


def declare(fleet: Fleet, alias: str) -> None:
    see = fleet.tool("look", side_effect="read")(look)
    transfer = fleet.tool(
        "pay",
        side_effect="irreversible",
        approval="always",
        amount="amount_cents",
        intent=lambda arguments, run: f"pay:{run.run_id}",
        guarantee="idempotency-key",
        key_valid_for_ms=FOREVER,
        takeover="the payments desk",
    )(pay)
    run_tools[:] = [see, transfer]
    fleet.workflow(Workflow(name="look", stages=[Read("see", see, lambda run: {"on": alias})]))
    stages = [Confirm("confirm", payment), Commit("commit", payment, transfer)]
    fleet.workflow(Workflow(name="pay", stages=stages))


@pytest.fixture(params=ALIASES)
def alias(request: pytest.FixtureRequest, site: None) -> Iterator[str]:
    """The ledger in one of the site's databases, empty."""
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.db import connections

    with configured(DATABASE=request.param, FLEET="tests.test_django:named"):
        yield request.param
        call_command("migrate", "handrail", database=request.param, verbosity=0)
        User.objects.all().delete()
        with connections[request.param].cursor() as cursor:
            for table in (
                *("trace", "tool_allowance", "observation", "output", "evidence", "comment"),
                *("consent", "approval_token", "approval", "effect_holder", "effect", "handoff"),
                *("run", "workflow", "audit", "audit_head", "principal"),
            ):
                cursor.execute(f"DELETE FROM handrail_{table}")
        connections.close_all()


@pytest.fixture
def fleet(alias: str) -> Iterator[Fleet]:
    from handrail.integrations.django import Fleet as DjangoFleet

    with closing(DjangoFleet()) as made:
        declare(made, alias)
        made.announce()
        globals()["named"] = made
        yield made


@pytest.fixture
def client(fleet: Fleet) -> Any:
    from handrail.integrations.django import client

    return client


# ---- transactions --------------------------------------------------------------------------------


def test_a_rollback_leaves_nothing_and_a_savepoint_s_neither(client: Any, alias: str) -> None:
    from django.db import transaction

    with pytest.raises(ZeroDivisionError), transaction.atomic(using=alias):
        gone = client.enqueue("look", **GIVEN)
        assert client.get(gone).status == "queued"
        raise ZeroDivisionError
    with transaction.atomic(using=alias):
        kept = client.enqueue("look", **GIVEN)
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=alias):
            inner = client.enqueue("look", **GIVEN)
            raise ZeroDivisionError
    assert client.get(kept).status == "queued"
    for missing in (gone, inner):
        with pytest.raises(UnknownRun):
            client.get(missing)


def test_accepting_costs_a_transaction_two_statements(client: Any, alias: str) -> None:
    from django.db import connections, transaction
    from django.test.utils import CaptureQueriesContext

    with transaction.atomic(using=alias), CaptureQueriesContext(connections[alias]) as seen:
        client.enqueue("look", **GIVEN)
    assert len(seen) == 2
    assert not any("SAVEPOINT" in one["sql"] for one in seen.captured_queries)
    for most in (2, 1):  # a double click finds its run
        with transaction.atomic(using=alias), CaptureQueriesContext(connections[alias]) as seen:
            client.enqueue("look", dedupe_key="twice", **GIVEN)
        assert len(seen) == most


def test_outside_of_a_transaction_a_run_is_accepted_at_once(
    client: Any, fleet: Fleet, alias: str
) -> None:
    run_id = client.enqueue("look", goal="100% 'sure' :now ::x %(id)s", input={"order_id": 1})
    assert fleet.get(run_id).goal == "100% 'sure' :now ::x %(id)s"


def test_a_double_click_is_one_run(client: Any) -> None:
    twice = [client.enqueue("look", dedupe_key="form-1", **GIVEN) for _ in range(2)]
    assert twice[0] == twice[1]


def test_steps_are_published_on_commit(client: Any, alias: str, valkey_url: str) -> None:
    from django.db import transaction

    prefix = f"d{time.monotonic_ns()}."
    redis: Any = redis_client(valkey_url)

    def published() -> int:
        return int(redis.llen(prefix + STEPS_QUEUE))

    with configured(DATABASE=alias, BROKER_URL=valkey_url, KEY_PREFIX=prefix):
        with transaction.atomic(using=alias):
            client.enqueue("look", **GIVEN)
            with transaction.atomic(using=alias):
                client.enqueue("look", **GIVEN)
            assert published() == 0
        assert published() == 2
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=alias):
            client.enqueue("look", **GIVEN)
            raise ZeroDivisionError
        client.enqueue("look", **GIVEN)
        assert published() == 3


def test_in_another_database_s_transaction_a_run_waits_for_its_commit(
    site: None, fleet: Fleet, alias: str
) -> None:
    """The id is known before; a rollback leaves nothing there either."""
    from django.db import connections, transaction

    from handrail.integrations.django import client

    if alias == "default":
        url = client.settings.database
        elsewhere = configured(DATABASE_URL=url)
    else:
        elsewhere = configured(DATABASE="pg")
    with elsewhere:
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            gone = client.enqueue("look", **GIVEN)
            raise ZeroDivisionError
        callbacks = len(connections["default"].run_on_commit)
        assert callbacks == 0
        if alias == "default":
            return  # SQLite lets one writer in: the ledger's own is shut out by this transaction
        with transaction.atomic():
            kept = client.enqueue("look", **GIVEN)
            with pytest.raises(UnknownRun):
                fleet.get(kept)
        assert fleet.get(kept).status == "queued"
        with pytest.raises(UnknownRun):
            fleet.get(gone)


@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_a_view_that_fails_leaves_nothing(fleet: Fleet, alias: str) -> None:
    from django.test import Client as Browser

    browser = Browser(raise_request_exception=False)
    assert browser.get("/ask?fail").status_code == 500
    assert fleet.runs() == []
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    answer = browser.get("/ask", headers={"traceparent": trace})
    assert fleet.get(answer.json()["run"]).traceparent == trace


def test_asynchronous_views_accept_and_look(fleet: Fleet, alias: str) -> None:
    from django.test import AsyncClient

    async def both() -> list[Any]:
        browser = AsyncClient()
        return list(await asyncio.gather(*(browser.get("/ask-later") for _ in range(3))))

    answers = asyncio.run(both())
    assert {answer.json()["status"] for answer in answers} == {"queued"}
    assert {run.run_id for run in fleet.runs()} == {a.json()["run_id"] for a in answers}


def test_a_web_process_that_accepts_and_looks_imports_no_agent_code(tmp_path: Path) -> None:
    """Nor SQLAlchemy: everything goes through Django's own connection."""
    url = f"sqlite:///{tmp_path}/x.db"
    with closing(Fleet(database_url=url)) as there:
        nothing = there.tool("nothing", side_effect="read")(lambda arguments, call: None)
        there.workflow(Workflow(name="nothing", stages=[Read("r", nothing, lambda run: {})]))
        there.upgrade_database()
        there.announce()
    code = """
import sys, django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "handrail.integrations.django"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
)
django.setup()
from django.db import transaction
import handrail.integrations.django.signals
from handrail.integrations.django import client
with transaction.atomic():
    run_id = client.enqueue("nothing", goal="see")
assert client.get(run_id).status == "queued"
heavy = ("handrail.agent", "handrail.gateway", "handrail.tasks", "celery", "kombu", "alembic")
print(*sorted(name for name in sys.modules if name.startswith((*heavy, "sqlalchemy"))))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "x.db")]
    assert subprocess.check_output(command, text=True, cwd=tmp_path).strip() == ""


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"NAME": "shop"}, {"database": "shop"}),
        (
            {"NAME": "shop", "USER": "ann", "HOST": "db.example", "PORT": 5433},
            {"database": "shop", "username": "ann", "host": "db.example", "port": 5433},
        ),
        (
            {"NAME": "shop", "USER": "a@b:c/d", "PASSWORD": "p@ss:w/o r+d%41?#", "HOST": "::1"},
            {"username": "a@b:c/d", "password": "p@ss:w/o r+d%41?#", "host": "::1"},
        ),
        (
            {"NAME": "shop", "HOST": "/run/post gres", "PORT": "5433"},
            {"query": {"host": "/run/post gres"}, "host": None, "port": 5433},
        ),
        ({"NAME": "our shop?50%"}, {"query": {"dbname": "our shop?50%"}, "database": None}),
        (
            {"OPTIONS": {"service": "shop", "sslmode": "verify-full", "pool": True}},
            {"query": {"service": "shop", "sslmode": "verify-full"}, "database": None},
        ),
    ],
)
def test_the_address_of_a_database_says_what_django_s_settings_say(
    given: dict[str, Any], fields: dict[str, Any]
) -> None:
    from django.db.backends.postgresql.base import DatabaseWrapper
    from sqlalchemy.engine import make_url

    from handrail.integrations.django.conf import url_of

    blank = {"NAME": "", "USER": "", "PASSWORD": "", "HOST": "", "PORT": "", "OPTIONS": {}}
    found = make_url(url_of(DatabaseWrapper(blank | given)))
    assert found.drivername == "postgresql"
    assert {name: getattr(found, name) for name in fields} == fields


def test_a_file_that_no_address_can_name_is_said_so() -> None:
    from django.db.backends.sqlite3.base import DatabaseWrapper
    from sqlalchemy.engine import make_url

    from handrail.integrations.django.conf import url_of

    for name in ("/data/shop.db", "/data/our shop#1 100%.db"):
        assert make_url(url_of(DatabaseWrapper({"NAME": name}))).database == name
    for name in ("/data/what?.db", "/data/a%20b.db"):
        with pytest.raises(InvalidSettings, match="cannot be written as an address"):
            url_of(DatabaseWrapper({"NAME": name}))


# ---- workers -------------------------------------------------------------------------------------


def test_tools_use_the_orm_and_leave_no_connection_behind(fleet: Fleet, alias: str) -> None:
    from django.contrib.auth.models import User

    if alias == "default":
        User.objects.create_user("alice")
    before = connections_of(alias)
    runs = [fleet.run("look", **GIVEN) for _ in range(8)]
    assert [run.status for run in runs] == ["completed"] * 8, runs[0]
    assert runs[0].answer == {"users": User.objects.using(alias).count()}
    assert connections_of(alias) == before


def connections_of(alias: str) -> int:
    """How many connections Django has open at the server."""
    from django.db import connections

    if alias == "default":
        return 0
    with connections["pg"].cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name <> 'handrail' AND backend_type = 'client backend'"
        )
        return int(cursor.fetchone()[0])


def test_django_s_receivers_hear_the_news_and_one_that_fails_keeps_it_from_nobody(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    from django.contrib.auth.models import User
    from django.db import connections
    from django.dispatch import receiver

    from handrail.integrations.django.signals import approval_needed, run_stopped

    heard: queue.Queue[tuple[Any, str, str | None]] = queue.Queue()
    threads: list[Any] = []

    @receiver([approval_needed, run_stopped])
    def fails(sender: Any, **_: Any) -> None:
        raise RuntimeError("the mail server is down")

    @receiver(approval_needed)
    @receiver(run_stopped)
    def tell(sender: Any, notice: Any, **_: Any) -> None:
        assert User.objects.count() == 0
        threads.append(connections["default"])
        heard.put((sender, notice.news.value, notice.reason))

    try:
        fleet.run("look", goal="see")
        assert heard.get(timeout=10) == (fleet, "run-stopped", "completed")
        run = fleet.run("pay", goal="pay")
        assert heard.get(timeout=10) == (fleet, "approval-needed", None)
        fleet.cancel(run)
        assert heard.get(timeout=10) == (fleet, "run-stopped", "cancelled")
    finally:
        for signal in (approval_needed, run_stopped):
            signal.disconnect(fails)
            signal.disconnect(tell)
    fleet.close()
    assert [one.connection for one in threads] == [None] * 3, "a connection was left open"
    assert "the mail server is down" in caplog.text


def test_people_who_act_through_the_client_are_news_to_django_as_well(
    fleet: Fleet, client: Any
) -> None:
    from django.dispatch import receiver

    from handrail.integrations.django.signals import run_stopped

    heard: queue.Queue[str] = queue.Queue()

    @receiver(run_stopped)
    def tell(sender: Any, notice: Any, **_: Any) -> None:
        heard.put(notice.run_id)

    try:
        run_id = client.enqueue("look", **GIVEN)
        client.cancel(run_id)
        assert heard.get(timeout=10) == run_id
    finally:
        run_stopped.disconnect(tell)


def test_what_leaving_the_surroundings_raises_changes_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import connections

    def fails() -> None:
        raise OSError("the pool is gone")

    monkeypatch.setattr(connections, "close_all", fails)
    assert fleet.run("look", **GIVEN).status == "completed"


# ---- migrations ----------------------------------------------------------------------------------


def tables_of(alias: str) -> dict[str, str]:
    """What our tables are, as the database itself describes it."""
    from django.db import connections

    with connections[alias].cursor() as cursor:
        if alias == "default":
            cursor.execute(
                "SELECT name, sql FROM sqlite_master"
                " WHERE name LIKE 'handrail_%' AND sql IS NOT NULL"
            )
        else:
            cursor.execute(
                "SELECT table_name || '.' || column_name, data_type || is_nullable"
                " || coalesce(column_default, '') FROM information_schema.columns"
                " WHERE table_schema = 'public' AND table_name LIKE 'handrail_%%'"
                " UNION ALL SELECT indexname, indexdef FROM pg_indexes"
                " WHERE schemaname = 'public' AND tablename LIKE 'handrail_%%'"
                " UNION ALL SELECT tgname, pg_get_triggerdef(t.oid) FROM pg_trigger AS t"
                " JOIN pg_class AS c ON c.oid = tgrelid WHERE NOT tgisinternal"
                " AND relnamespace = 'public'::regnamespace"
            )
        return {name: re.sub(r"\s+", " ", sql) for name, sql in cursor.fetchall()}


def test_manage_migrate_makes_what_db_upgrade_makes(alias: str) -> None:
    from django.core.management import call_command
    from django.db import connections

    from handrail.integrations.django import client

    by_django = tables_of(alias)
    call_command("migrate", "handrail", "zero", database=alias, verbosity=0)
    assert tables_of(alias) == {}
    connections.close_all()
    url = client.settings.database
    upgrade(url)
    assert tables_of(alias) == by_django
    call_command("migrate", "handrail", database=alias, verbosity=0)  # finds them
    assert tables_of(alias) == by_django
    connections.close_all()
    downgrade(url)
    call_command("migrate", "handrail", "zero", database=alias, verbosity=0)  # finds nothing
    call_command("migrate", "handrail", database=alias, verbosity=0)
    assert tables_of(alias) == by_django


def test_other_databases_get_no_tables_and_no_migration_is_missing(site: None) -> None:
    from django.core.management import call_command

    with configured(DATABASE="default"):
        call_command("makemigrations", "--check", "--dry-run", verbosity=0)
        before = tables_of("pg")
        call_command("migrate", "handrail", "zero", database="pg", verbosity=0)
        assert tables_of("pg") == before
        call_command("migrate", "handrail", database="pg", verbosity=0)


def test_tables_may_be_in_a_schema_of_their_own(site: None) -> None:
    from django.core.management import call_command
    from django.db import connections, transaction

    from handrail.integrations.django import Fleet as DjangoFleet
    from handrail.integrations.django import client
    from handrail.integrations.django.checks import check_tables

    with configured(DATABASE="pg"):
        call_command("migrate", "handrail", "zero", database="pg", verbosity=0)
    with configured(DATABASE="pg", DATABASE_SCHEMA="agents"):
        call_command("migrate", "handrail", database="pg", verbosity=0)
        assert tables_of("pg") == {}
        with closing(DjangoFleet()) as fleet:
            declare(fleet, "pg")
            fleet.announce()
            with transaction.atomic(using="pg"):
                run_id = client.enqueue("look", **GIVEN)
            assert fleet.drive(run_id).status == "completed"
        assert check_tables() == []
        call_command("migrate", "handrail", "zero", database="pg", verbosity=0)
        with connections["pg"].cursor() as cursor:
            cursor.execute("SHOW search_path")
            assert "public" in cursor.fetchone()[0]
    with configured(DATABASE="pg"):
        call_command("migrate", "handrail", database="pg", verbosity=0)


# ---- settings and checks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handrail", "found"),
    [
        ({}, []),
        ({"BROKER_ULR": "redis://h"}, ["handrail.E001"]),
        ({"LEASE_MS": 1}, ["handrail.E001"]),
        ({"DATABASE": "nowhere"}, ["handrail.E001"]),
        ({"DATABASE_URL": "sqlite:///other.db"}, ["handrail.W002"]),
        ({"DATABASE": "pg"}, ["handrail.W003"]),
        ({"DATABASE": "pg", "APPROVAL_SECRET": ""}, ["handrail.W003", "handrail.W007"]),
        ({"BROKER_URL": ""}, ["handrail.W005"]),
        ({"BROKER_URL": "redis://cache:6379/1"}, ["handrail.W006"]),
        ({"APPROVAL_SECRET": "the-project-s-own-" + "x" * 30}, ["handrail.W008"]),
    ],
)
def test_checks_say_what_is_unsafe(
    handrail: dict[str, Any], found: list[str], site: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.test.utils import override_settings

    from handrail.integrations.django.checks import check_settings

    monkeypatch.delenv("HANDRAIL_APPROVAL_SECRET", raising=False)
    caches = {"default": {"BACKEND": "x", "LOCATION": "redis://cache:6379/0"}}
    secret = "the-project-s-own-" + "x" * 30
    with (
        configured(**({"BROKER_URL": "redis://broker/0"} | handrail)),
        override_settings(CACHES=caches, SECRET_KEY=secret),
    ):
        messages = check_settings()
    assert [message.id for message in messages] == found
    assert all(message.hint for message in messages)


def test_sqlite_that_begins_deferred_is_reported(site: None) -> None:
    from django.db import connections

    from handrail.integrations.django.checks import check_settings

    options = connections["default"].settings_dict["OPTIONS"]
    kept = options.pop("transaction_mode")
    try:
        with configured(BROKER_URL="redis://broker/0"):
            assert [message.id for message in check_settings()] == ["handrail.W004"]
    finally:
        options["transaction_mode"] = kept


def test_a_fleet_that_cannot_be_imported_is_found_before_the_deployment(site: None) -> None:
    from handrail.integrations.django.checks import check_fleet

    for name, found in (("", "handrail.E009"), ("nothing.here:fleet", "handrail.E010")):
        with configured(FLEET=name):
            assert [message.id for message in check_fleet()] == [found]


def test_tables_that_are_missing_are_found(site: None) -> None:
    from django.core.management import call_command

    from handrail.integrations.django.checks import check_tables

    with configured():
        assert check_tables() == []
        call_command("migrate", "handrail", "zero", verbosity=0)
        assert [message.id for message in check_tables()] == ["handrail.W011"]
        call_command("migrate", "handrail", verbosity=0)


def test_a_database_that_does_not_answer_is_no_traceback(site: None) -> None:
    from django.db import OperationalError

    from handrail.integrations.django import checks

    away = OperationalError("nobody is there")
    with configured(), mock.patch("handrail.ledger.schema.check_migrated", side_effect=away):
        [told] = checks.check_tables()
    assert (told.id, "nobody is there" in told.msg) == ("handrail.W012", True)


def test_settings_come_from_the_project_then_from_the_environment(
    site: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.test.utils import override_settings

    from handrail.integrations.django import conf

    monkeypatch.setenv("HANDRAIL_LEASE_MS", "7000")
    monkeypatch.setenv("HANDRAIL_MAX_ATTEMPTS", "9")
    with configured(LEASE_MS=8_000), override_settings(CELERY_BROKER_URL="redis://celery/0"):
        found = conf.read()
        assert (found.lease_ms, found.max_attempts) == (8_000, 9)
        assert found.broker_url == "redis://celery/0"
        monkeypatch.setenv("HANDRAIL_BROKER_URL", "redis://ours/0")
        assert conf.read().broker_url == "redis://ours/0"
    with configured(LEASE_M=1), pytest.raises(InvalidSettings, match="do you mean 'LEASE_MS'"):
        conf.read()


def test_manage_handrail_is_the_command_line(
    fleet: Fleet, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from handrail.integrations.django.management.commands.handrail import Command

    run_id = client.enqueue("look", **GIVEN)

    def manage(*arguments: str) -> tuple[object, str]:
        with mock.patch.dict(os.environ), pytest.raises(SystemExit) as left:
            Command().run_from_argv(["manage.py", "handrail", *arguments])
        told = capsys.readouterr()
        return left.value.code, told.out + told.err

    code, told = manage("show", run_id, "--json")
    assert (code, json.loads(told)["run_id"]) == (0, run_id)
    code, told = manage("show", "no-such-run")
    assert (code, "error[unknown-run]" in told) == (2, True)


def test_handrail_itself_loads_a_project_s_apps_before_its_fleet(tmp_path: Path) -> None:
    """The fleet's module imports models above everything else, as a module of Django's does."""
    (tmp_path / "site_of_mine.py").write_text(
        "SECRET_KEY = 'x' * 50\n"
        "INSTALLED_APPS = ['django.contrib.auth', 'django.contrib.contenttypes',"
        " 'handrail.integrations.django']\n"
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': 'site.db'}}\n"
    )
    (tmp_path / "agents_of_mine.py").write_text(
        "from django.contrib.auth.models import User\n"
        "from handrail.integrations.django import Fleet\n"
        "assert User.objects is not None\n"
        "fleet = Fleet()\n"
    )
    surroundings = {
        **{n: v for n, v in os.environ.items() if not n.startswith(("HANDRAIL_", "DJANGO_"))},
        "DJANGO_SETTINGS_MODULE": "site_of_mine",
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env=surroundings,
            capture_output=True,
            text=True,
        )

    migrated = run("django", "migrate", "--pythonpath", ".")
    assert migrated.returncode == 0, migrated.stderr
    listed = run("handrail", "runs", "--fleet", "agents_of_mine:fleet", "--json")
    assert (listed.returncode, json.loads(listed.stdout)) == (0, []), listed.stderr


def test_a_setting_that_is_none_is_an_error_and_no_traceback(
    site: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from handrail.integrations.django.management.commands.handrail import Command

    with configured(LEASE_M=1), pytest.raises(SystemExit) as left:
        Command().run_from_argv(["manage.py", "handrail", "runs"])
    assert left.value.code == 2
    assert "error[invalid-settings]" in capsys.readouterr().err


def test_a_transaction_that_is_ended_by_hand_accepts_as_well(client: Any, alias: str) -> None:
    """Django tells nobody of such a commit: the sweep finds the row."""
    from django.db import transaction

    transaction.set_autocommit(False, using=alias)
    try:
        gone = client.enqueue("look", **GIVEN)
        transaction.rollback(using=alias)
        kept = client.enqueue("look", **GIVEN)
        transaction.commit(using=alias)
    finally:
        transaction.set_autocommit(True, using=alias)
    assert client.get(kept).status == "queued"
    with pytest.raises(UnknownRun):
        client.get(gone)


# ---- admin ---------------------------------------------------------------------------------------


@pytest.fixture
def browser(alias: str) -> Callable[..., Any]:
    """A browser of a member of staff with some permissions."""
    from django.contrib.auth.models import Permission, User
    from django.test import Client as Browser

    def log_in(name: str, *permissions: str, csrf: bool = False) -> Any:
        user = User.objects.create_user(name, is_staff=True)
        for permission in permissions:
            user.user_permissions.add(Permission.objects.get(codename=permission))
        made = Browser(enforce_csrf_checks=csrf)
        made.force_login(user)
        return made

    return log_in


def waiting(fleet: Fleet) -> tuple[str, str]:
    """A run that waits for consent, and the approval."""
    run = fleet.run("pay", goal="<b>pay</b> \u202egnp.exe", principal="carol")
    assert run.status == "awaiting_approval"
    (approval,) = fleet.desk.approvals(by=_viewer(), run=run.run_id)
    return run.run_id, approval.id


def _viewer() -> Any:
    from handrail import Principal

    return Principal("viewer", roles=frozenset({"viewer"}))


def test_pages_show_and_change_nothing(fleet: Fleet, browser: Callable[..., Any]) -> None:
    run_id, approval = waiting(fleet)
    views = [f"view_{name}" for name in ("run", "effect", "approval", "handoff")]
    admin = browser("viewer", *views)
    for page in ("run", "effect", "approval", "handoff"):
        assert admin.get(f"/admin/handrail/{page}/").status_code == 200
        assert admin.get(f"/admin/handrail/{page}/add/").status_code == 403
    page = django_site.text_of(admin.get(f"/admin/handrail/run/{run_id}/change/"))
    assert "run.accepted" in page
    assert "<b>pay</b>" not in page
    assert "&lt;b&gt;pay&lt;/b&gt;" in page
    assert "\u202e" not in page
    assert "Cancel this run" not in page
    approval_page = django_site.text_of(admin.get(f"/admin/handrail/approval/{approval}/change/"))
    assert "<script>alert" not in approval_page
    assert "\u202e" not in approval_page
    assert admin.post(f"/admin/handrail/run/{run_id}/change/", {"status": "x"}).status_code == 403
    assert admin.get(f"/admin/handrail/run/?q={run_id}").status_code == 200
    assert fleet.get(run_id).status == "awaiting_approval"


@pytest.mark.parametrize(
    ("page", "permission"),
    [
        ("run/{run}/cancel", "cancel_run"),
        ("approval/{approval}/decide", "approve_action"),
    ],
)
def test_an_act_takes_its_permission_a_post_and_a_token(
    page: str, permission: str, fleet: Fleet, browser: Callable[..., Any]
) -> None:
    run_id, approval = waiting(fleet)
    address = "/admin/handrail/" + page.format(run=run_id, approval=approval) + "/"
    said = {"choice": "reject", "reason": "a test"}
    assert browser("viewer", "view_run", "view_approval").post(address, said).status_code == 403
    assert browser("other", "resolve_handoff").get(address).status_code == 403
    allowed = browser("allowed", permission, csrf=True)
    assert allowed.get(address).status_code == 200
    assert fleet.get(run_id).status == "awaiting_approval"
    assert allowed.post(address, said).status_code == 403  # forged by another site
    assert fleet.get(run_id).status == "awaiting_approval"
    token = allowed.cookies["csrftoken"].value
    assert allowed.post(address, {**said, "csrfmiddlewaretoken": token}).status_code == 302
    assert fleet.get(run_id).status in ("cancelled", "failed")
    assert any(act["actor"] == "allowed" for act in fleet.desk.audit(by=_viewer()))


def test_an_action_is_approved_as_it_is_shown(fleet: Fleet, browser: Callable[..., Any]) -> None:
    run_id, approval = waiting(fleet)
    address = f"/admin/handrail/approval/{approval}/decide/"
    approver = browser("ann", "approve_action", "view_approval")
    page = django_site.text_of(approver.get(address))
    assert f"pay:{run_id}" in page
    assert "\\u202e" in page
    assert "<script>alert" not in page
    wrong = approver.post(address, {"choice": "approve", "confirm": "pay:another"}, follow=True)
    assert "not-confirmed" in django_site.text_of(wrong)
    assert fleet.get(run_id).status == "awaiting_approval"
    requester = browser("carol", "approve_action", "view_approval")
    own = requester.post(address, {"choice": "approve", "confirm": f"pay:{run_id}"}, follow=True)
    assert fleet.get(run_id).status == "awaiting_approval", django_site.text_of(own)
    done = approver.post(address, {"choice": "approve", "confirm": f"pay:{run_id}"}, follow=True)
    assert "The run is executing." in django_site.text_of(done)
    assert fleet.drive(run_id).status == "completed"


def test_a_handoff_is_claimed_and_resolved(fleet: Fleet, browser: Callable[..., Any]) -> None:
    def unclear(arguments: Any, call: ToolCall) -> dict[str, Any]:
        raise TimeoutError

    write = fleet.tool(
        "send",
        side_effect="idempotent",
        approval="never",
        intent=lambda arguments, run: f"send:{run.run_id}",
        guarantee="idempotency-key",
        key_valid_for_ms=1,  # over before it could be sent again
        takeover="the desk",
    )(unclear)
    fleet.workflow(Workflow(name="send", stages=[Commit("send", lambda run: Action(write), write)]))
    run = fleet.run("send", goal="send", timeout_s=30)
    assert run.status == "handed_off"
    (matter,) = fleet.desk.handoffs(by=_viewer())
    operator = browser("otto", "resolve_handoff", "view_handoff")
    base = f"/admin/handrail/handoff/{matter['id']}/"
    assert operator.post(base + "claim/").status_code == 302
    page = django_site.text_of(operator.get(base + "resolve/"))
    seen = re.search(r'name="seen" value="([^"]+)"', page)
    assert seen is not None
    said = {
        "choice": "completed",
        "reason": "seen in the sent mail",
        "evidence": "mail 7",
        "seen": seen[1],
        "confirm": f"send:{run.run_id}",
    }
    refused = operator.post(base + "resolve/", {**said, "choice": "try-again"}, follow=True)
    assert "[" in django_site.text_of(refused)
    assert fleet.get(run.run_id).status == "handed_off"
    assert operator.post(base + "resolve/", said).status_code == 302
    assert fleet.get(run.run_id).status == "completed"


def test_names_that_the_audit_cannot_hold_are_told_apart(site: None) -> None:
    from handrail.integrations.django.people import UnknownPerson, name_of, principal_of

    class Somebody:
        is_authenticated = True

        def __init__(self, name: str, pk: int) -> None:
            self.name, self.pk = name, pk

        def get_username(self) -> str:
            return self.name

        def has_perm(self, name: str) -> bool:
            return name == "handrail.cancel_run"

    assert principal_of(Somebody("ann@shop", 1)).subject == "ann@shop"
    assert principal_of(Somebody("ann@shop", 1)).roles == {"operator"}
    one, other = (principal_of(Somebody("李 雷", pk)).subject for pk in (1, 2))
    assert one != other
    assert name_of(Somebody("李 雷", 1)) == one, "who asks is known to be who agrees"
    nobody = Somebody("", 0)
    nobody.is_authenticated = False
    with pytest.raises(UnknownPerson):
        principal_of(nobody)
