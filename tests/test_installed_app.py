"""A fleet in a Celery app that somebody has: beside its tasks, settings, results and schedule."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery
from kombu import Connection

import handrail
from handrail import Client, Fleet
from handrail.broker.message import RECONCILE_QUEUE, STEP_TASK, STEPS_QUEUE, SWEEP_TASK
from handrail.broker.queues import queue
from handrail.broker.redis_client import redis_client
from handrail.broker.verify import verify_guest
from handrail.installing import AlreadyInstalled
from handrail.ledger import migrate
from tests.live import BROKERS, Broker

SECONDS = 40.0

AGENTS = '''
import os, time
from pathlib import Path
from handrail import Action, Commit, Fleet, Read, Workflow

fleet = Fleet(database_url=os.environ["LEDGER"])
PLACE = Path(os.environ["PLACE"])


@fleet.tool(side_effect="read")
def look(arguments, call):
    return {"process": os.getpid()}


def query(arguments, call):
    found = [line for line in (PLACE / "paid").read_text().split() if line == call.key]
    return {"times": len(found)} if found else None


@fleet.tool(
    side_effect="idempotent",
    approval="never",
    intent=lambda arguments, run: "pay:1",
    guarantee="unique-constraint",
    query=query,
    settle_after_ms=100,
    timeout_ms=int(os.environ.get("TIMEOUT_MS", "20000")),
)
def pay(arguments, call):
    """Pays at once, and then takes its time to say so."""
    with (PLACE / "paid").open("a") as file:
        file.write(call.key + "\\n")
    (PLACE / "paying").write_text(str(os.getpid()))
    time.sleep(float((PLACE / "takes").read_text()))
    return {"times": 1}


fleet.workflow(Workflow(name="look", stages=[Read("see", look, lambda run: {})]))
fleet.workflow(Workflow(name="pay", stages=[Commit("pay", lambda run: Action(pay), pay)]))
'''

APP = """
import os
from celery import Celery
import handrail

app = Celery("theirs", broker=os.environ["BROKER"], backend=os.environ["BACKEND"])
handrail.install(app, "agents:fleet")
app.conf.update(
    task_acks_late=True,
    task_time_limit=60,
    task_default_queue="their-default",
    broker_transport_options=(
        {"global_keyprefix": os.environ["PREFIX"]} if os.environ["PREFIX"] else {}
    ),
    **eval(os.environ.get("MORE", "{}")),
)


@app.task
def add(a, b):
    return a + b
"""


class Host:
    """Somebody's app in a folder of its own, with a ledger in a file."""

    def __init__(self, place: Path, valkey_url: str, broker: Broker | None = None) -> None:
        broker = broker or Broker(valkey_url, {})
        self.place = place
        self.prefix = f"{place.name[-12:]}." if broker.url == valkey_url else ""
        (place / "agents.py").write_text(AGENTS)
        (place / "theirs.py").write_text(APP)
        (place / "paid").write_text("")
        (place / "takes").write_text("0")
        self.ledger = f"sqlite:///{place}/ledger.db"
        migrate.upgrade(self.ledger)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HANDRAIL_")}
        self.environment = kept | {
            "LEDGER": self.ledger,
            "PLACE": str(place),
            "BROKER": broker.url,
            "BACKEND": valkey_url,
            "PREFIX": self.prefix,
            "PYTHONPATH": str(place),
            "C_FORCE_ROOT": "1",  # Celery's own leave to unpickle as root
            "HANDRAIL_LEASE_MS": "2000",
            "HANDRAIL_MAX_STALL_MS": "500",
            **{f"HANDRAIL_{name.upper()}": value for name, value in broker.settings.items()},
        }
        self.client = Client(database_url=self.ledger, broker_url=broker.url)
        settings = self.client.settings.model_copy(update={"key_prefix": self.prefix})
        self.client.settings = settings
        self.queues: Any = redis_client(valkey_url)

    @contextmanager
    def worker(self, *options: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
        """A worker of theirs, from when it is ready."""
        log = self.place / "worker.log"
        command = [str(Path(sys.executable).parent / "celery"), "-A", "theirs", "worker"]
        environment = self.environment | {"MORE": repr(more)}
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--loglevel", "INFO", *options],
                cwd=self.place,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            self.until(lambda: "ready." in log.read_text() or process.poll() is not None)
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    raise

    def until(self, holds: Callable[[], object]) -> None:
        limit = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < limit, (self.place / "worker.log").read_text()[-3000:]
            time.sleep(0.02)

    def ended(self, run_id: str) -> str:
        self.until(lambda: self.client.get(run_id).rests)
        return self.client.get(run_id).status

    def add(self) -> int:
        """Call a task of theirs, and wait for its result."""
        code = "from theirs import add; print(add.delay(1, 2).get(timeout=30))"
        done = subprocess.check_output(
            [sys.executable, "-c", code], cwd=self.place, env=self.environment, text=True
        )
        return int(done)


@pytest.fixture
def host(tmp_path: Path, valkey_url: str) -> Iterator[Host]:
    made = Host(tmp_path, valkey_url)
    yield made
    made.client.close()


@pytest.fixture
def on_each(tmp_path: Path, valkey_url: str, broker: Broker) -> Iterator[Host]:
    """An app on each broker; its results are on Redis."""
    made = Host(tmp_path, valkey_url, broker)
    yield made
    made.client.close()


@pytest.mark.live
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("pool", "broker"),
    [(pool, broker) for broker in BROKERS for pool in ("prefork", "threads")] + [("solo", "redis")],
    indirect=["broker"],
)
def test_one_worker_runs_their_tasks_and_our_steps(pool: str, on_each: Host) -> None:
    """Theirs with results, late acknowledgement and a time limit; ours with none of that."""
    with on_each.worker("-P", pool, "-c", "2", "-B", "-s", str(on_each.place / "beat")):
        assert on_each.add() == 3
        assert on_each.ended(on_each.client.enqueue("look", goal="see")) == "completed"
        assert on_each.ended(on_each.client.enqueue("pay", goal="pay")) == "completed"
        # The beat of their app drives the sweep: what was never published is found.
        unpublished = Client(database_url=on_each.ledger)
        lost = unpublished.enqueue("look", goal="see")
        on_each.client.fleet.ledger.database.run(
            "UPDATE handrail_run SET wake_at = created_at WHERE id = :id", {"id": lost}
        )
        assert on_each.ended(lost) == "completed"
    keys = [key.decode() for key in on_each.queues.scan_iter(match="celery-task-meta-*")]
    ours = [key for key in keys if b"handrail" in (on_each.queues.get(key) or b"")]
    assert ours == []
    assert "Traceback" not in (on_each.place / "worker.log").read_text()


@pytest.mark.live
@pytest.mark.timeout(120)
def test_a_child_that_is_killed_in_the_middle_of_a_write_doubles_nothing(on_each: Host) -> None:
    # What is waited for before anybody asks the service.
    on_each.environment |= {"TIMEOUT_MS": "4000", "HANDRAIL_SWEEP_EVERY_S": "1"}
    (on_each.place / "takes").write_text("30")
    with on_each.worker(
        "-P", "prefork", "-c", "2", "-B", "-s", str(on_each.place / "beat")
    ) as worker:
        run_id = on_each.client.enqueue("pay", goal="pay")
        on_each.until((on_each.place / "paying").exists)
        on_each.until((on_each.place / "paying").read_text)
        child = int((on_each.place / "paying").read_text())
        assert child in [one.pid for one in psutil.Process(worker.pid).children()]
        (on_each.place / "takes").write_text("0")
        os.kill(child, signal.SIGKILL)
        assert on_each.ended(run_id) == "completed"
    assert len((on_each.place / "paid").read_text().split()) == 1


@pytest.mark.live
@pytest.mark.timeout(120)
def test_a_worker_of_their_queues_alone_leaves_ours_alone(host: Host) -> None:
    """Also with settings that would be refused for ours."""
    theirs = ("-Q", "their-default", "-c", "1")
    with host.worker(*theirs, accept_content=["json", "pickle"]) as worker:
        assert host.add() == 3
        assert worker.poll() is None
        assert "handrail.steps" not in (host.place / "worker.log").read_text()
    with host.worker(accept_content=["json", "pickle"]) as worker:
        assert worker.wait(SECONDS) == 1
    refused = (host.place / "worker.log").read_text()
    assert "error[unsafe-configuration]" in refused
    assert "handrail worker" in refused


@pytest.mark.live
@pytest.mark.timeout(120)
def test_a_worker_may_be_for_ours_alone(on_each: Host) -> None:
    with on_each.worker("-Q", f"{STEPS_QUEUE},{RECONCILE_QUEUE}", "-P", "threads", "-c", "2"):
        assert on_each.ended(on_each.client.enqueue("look", goal="see")) == "completed"
        assert ".> their-default" not in (on_each.place / "worker.log").read_text()


# ---- what it adds to an app ----------------------------------------------------------------------


def installed(**conf: Any) -> Celery:
    app = Celery("theirs", broker="memory://", set_as_current=False)
    app.conf.update(**conf)
    handrail.install(app, Fleet(database_url="sqlite://"))
    return app


@pytest.mark.parametrize(
    "theirs",
    [
        None,
        {"other.*": {"queue": "other"}},
        [{"other.*": {"queue": "other"}}],
        ({"other.*": {"queue": "other"}},),
        lambda name, *_, **__: {"queue": "other"} if name.startswith("other.") else None,
    ],
)
def test_their_routes_are_kept(theirs: Any) -> None:
    app = installed(task_routes=theirs)
    routed = {
        name: app.amqp.router.route({}, name)["queue"].name
        for name in (STEP_TASK, SWEEP_TASK, "other.task", "any.task")
    }
    assert routed == {
        STEP_TASK: STEPS_QUEUE,
        SWEEP_TASK: RECONCILE_QUEUE,
        "other.task": "other" if theirs else "celery",
        "any.task": "celery",
    }


def test_their_schedule_and_other_settings_are_kept() -> None:
    theirs = {"mine": {"task": "any.task", "schedule": 60}}
    plain = Celery("plain", broker="memory://", set_as_current=False)
    app = installed(beat_schedule=theirs)
    assert app.conf.beat_schedule["mine"] == theirs["mine"]
    assert app.conf.beat_schedule["handrail-sweep"]["task"] == SWEEP_TASK
    touched = {"task_routes", "beat_schedule", "broker_url"}
    same = set(plain.conf) - touched
    assert {n: app.conf[n] for n in same} == {n: plain.conf[n] for n in same}


def test_a_worker_without_q_consumes_theirs_and_ours() -> None:
    app = installed()
    app.finalize()
    assert set(app.amqp.queues.consume_from) == {"celery", STEPS_QUEUE, RECONCILE_QUEUE}
    app.amqp.queues.select(["celery"])
    assert set(app.amqp.queues.consume_from) == {"celery"}


def test_our_tasks_take_none_of_their_defaults() -> None:
    app = installed(task_acks_late=True, task_ignore_result=False, task_serializer="pickle")
    app.finalize()
    for name in (STEP_TASK, SWEEP_TASK):
        task: Any = app.tasks[name]
        assert (task.acks_late, task.ignore_result, task.serializer) == (False, True, "json")
        assert task.time_limit >= 86_400


def test_settings_that_come_after_it_count() -> None:
    """As where Django's are read when they are first needed."""
    app = Celery("theirs", broker="memory://", set_as_current=False)
    handrail.install(app, Fleet(database_url="sqlite://"))
    app.conf.update(task_routes={"other.*": {"queue": "other"}})
    assert app.amqp.router.route({}, "other.task")["queue"].name == "other"
    assert app.amqp.router.route({}, STEP_TASK)["queue"].name == STEPS_QUEUE


def test_settings_that_are_given_anew_keep_what_is_ours() -> None:
    """As where an app's settings were looked at before its module came to read them."""
    app = Celery("theirs", broker="memory://", set_as_current=False)
    assert app.conf.task_routes is None
    handrail.install(app, Fleet(database_url="sqlite://"))
    app.config_from_object({"task_routes": {"other.*": {"queue": "other"}}, "beat_schedule": {}})
    assert app.amqp.router.route({}, STEP_TASK)["queue"].name == STEPS_QUEUE
    assert app.amqp.router.route({}, "other.task")["queue"].name == "other"
    assert "handrail-sweep" in app.conf.beat_schedule


def test_installing_twice_is_installing_once_and_two_fleets_are_refused() -> None:
    app = Celery("theirs", broker="memory://", set_as_current=False)
    fleet = Fleet(database_url="sqlite://")
    handrail.install(app, fleet)
    handrail.install(app, fleet)
    assert len(app.conf.task_routes) == 1
    with pytest.raises(AlreadyInstalled, match="make one fleet of both"):
        handrail.install(app, "another:fleet")


def test_importing_an_app_in_a_web_process_imports_no_agent_code(host: Host) -> None:
    code = "import sys, theirs; print(*(m for m in sys.modules if m.startswith('handrail.agent')))"
    done = subprocess.check_output(
        [sys.executable, "-c", code], cwd=host.place, env=host.environment, text=True
    )
    assert done.strip() == ""


@pytest.mark.parametrize(
    ("conf", "codes"),
    [
        ({}, []),
        ({"accept_content": ["json", "pickle"]}, ["content-type"]),
        ({"accept_content": ["application/x-python-serialize"]}, ["content-type"]),
        ({"worker_pool": "eventlet"}, ["pool"]),
        ({"task_acks_late": True, "task_time_limit": 1, "worker_prefetch_multiplier": 9}, []),
    ],
)
def test_only_what_could_break_a_promise_is_refused(conf: Any, codes: list[str]) -> None:
    pool = conf.pop("worker_pool", None)
    if pool == "eventlet":  # which is not installed, and need not be
        pool = type("TaskPool", (), {"__module__": "celery.concurrency.eventlet"})
    app = Celery("theirs", broker="memory://", set_as_current=False)
    app.conf.update(**conf)
    assert [one.code for one in verify_guest(app, pool=pool or "prefork")] == codes


BEAT = """
import json, os, sys
import django
from celery import Celery
from django.conf import settings
from django.core.management import call_command

settings.configure(
    INSTALLED_APPS=["django_celery_beat", "django.contrib.contenttypes"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "beat.db"}},
    USE_TZ=True,
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
)
django.setup()
call_command("migrate", verbosity=0)
import handrail
from handrail import Fleet
app = Celery("theirs", broker=os.environ["BROKER"])
app.conf.broker_transport_options = {"global_keyprefix": os.environ["PREFIX"]}
handrail.install(app, Fleet(database_url="sqlite://"))
from django_celery_beat.schedulers import DatabaseScheduler
from django_celery_beat.models import PeriodicTask
scheduler = DatabaseScheduler(app=app)
scheduler.tick()
(entry,) = PeriodicTask.objects.filter(name="handrail-sweep")
print(json.dumps([entry.task, entry.queue, entry.enabled]))
scheduler.schedule["handrail-sweep"].last_run_at -= __import__("datetime").timedelta(hours=1)
scheduler.apply_async(scheduler.schedule["handrail-sweep"], advance=False)
"""


def test_the_sweep_is_an_entry_of_django_celery_beat(host: Host) -> None:
    """It lands in its tables, where people see it, and what is sent goes to our queue."""
    done = subprocess.run(
        [sys.executable, "-c", BEAT], cwd=host.place, env=host.environment, text=True,
        capture_output=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [SWEEP_TASK, RECONCILE_QUEUE, True]
    sent: Any = host.queues.lindex(host.prefix + RECONCILE_QUEUE, 0)
    message = json.loads(sent)
    assert message["headers"]["task"] == SWEEP_TASK
    assert message["content-type"] == "application/json"


@pytest.mark.live
@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_beat_with_a_table_sends_sweeps_to_a_quorum_queue(
    broker: Broker, valkey_url: str, tmp_path: Path
) -> None:
    """As text in the table, the queue's name alone would be declared as a classic queue."""
    host = Host(tmp_path, valkey_url, broker)
    (tmp_path / "scheduled.py").write_text(BEAT.partition("from django_celery_beat.sched")[0])
    command = [str(Path(sys.executable).parent / "celery"), "-A", "scheduled", "beat"]
    log = tmp_path / "worker.log"
    with log.open("w") as output:
        beat = subprocess.Popen(
            [*command, "-S", "django_celery_beat.schedulers:DatabaseScheduler", "-l", "INFO"],
            cwd=tmp_path, env=host.environment, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        host.until(lambda: log.read_text().count("Sending due task handrail-sweep") > 1)
    finally:
        beat.terminate()
        beat.wait(SECONDS)
    assert "Traceback" not in log.read_text(), log.read_text()
    with Connection(broker.url) as connection, connection.channel() as channel:
        # A queue of another type would be refused.
        bound: Any = queue(RECONCILE_QUEUE, broker.url)(channel)
        _, waiting, _ = bound.queue_declare()
    assert waiting > 0
