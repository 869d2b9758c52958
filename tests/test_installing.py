"""What `handrail.install` adds to somebody's Celery app stays there, whatever comes after it.

And what their own process manager does to such a worker while a write of ours is under way.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from celery import Celery
from celery.signals import celeryd_init, import_modules

import handrail
from handrail import Client, Fleet
from handrail.broker.message import RECONCILE_QUEUE, STEP_TASK, STEPS_QUEUE
from tests.rabbit import Rabbit
from tests.test_installed_app import SECONDS, Host

OURS = {STEPS_QUEUE, RECONCILE_QUEUE}


@pytest.fixture
def app() -> Celery:
    """An app in which we are installed, and which is finalised: its tasks were looked at."""
    made = Celery("theirs", broker="memory://", set_as_current=False)
    handrail.install(made, Fleet(database_url="sqlite://"))
    made.finalize()
    return made


# ---- settings that come late ---------------------------------------------------------------------


def test_queues_that_are_declared_after_the_app_was_finalised_count(app: Celery) -> None:
    from kombu import Queue

    app.conf.task_queues = [Queue("letters"), Queue("pictures")]
    assert set(app.amqp.queues.consume_from) == {"letters", "pictures"} | OURS


def test_our_queues_are_added_to_those_that_were_looked_at_before() -> None:
    made = Celery("theirs", broker="memory://", set_as_current=False)
    assert set(made.amqp.queues) == {"celery"}
    handrail.install(made, Fleet(database_url="sqlite://"))
    made.finalize()
    assert set(made.amqp.queues.consume_from) == {"celery"} | OURS


def test_a_worker_or_a_beat_adds_again_what_a_later_assignment_replaced(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = {"mine": {"task": "any.task", "schedule": 60}}
    app.conf.update(task_routes={"other.*": {"queue": "other"}}, beat_schedule=theirs)
    with caplog.at_level(logging.WARNING, "handrail"):
        app.loader.init_worker()  # the first thing that either does
    assert set(app.conf.beat_schedule) == {"mine", "handrail-sweep"}
    assert app.amqp.router.route({}, STEP_TASK)["queue"].name == STEPS_QUEUE
    assert app.amqp.router.route({}, "other.task")["queue"].name == "other"
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("[settings-replaced]") and "app.conf.beat_schedule.update" in line


def test_nothing_is_said_where_nothing_was_replaced(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(app.conf)
    with caplog.at_level(logging.WARNING, "handrail"):
        app.loader.init_worker()
    assert caplog.records == [] and dict(app.conf) == before


def test_another_app_of_the_process_is_left_alone(app: Celery) -> None:
    other = Celery("other", broker="memory://", set_as_current=False)
    import_modules.send(sender=other)
    assert not other.conf.task_routes and not other.conf.beat_schedule


# ---- live ----------------------------------------------------------------------------------------

LATE = """
app.finalize()
app.conf.update(beat_schedule={"mine": {"task": "any.task", "schedule": 60}})
"""


@pytest.fixture
def host(tmp_path: Path, valkey_url: str) -> Iterator[Host]:
    made = Host(tmp_path, valkey_url)
    yield made
    made.client.close()


@pytest.mark.live
@pytest.mark.timeout(60)
def test_their_beat_sends_our_sweep_although_the_schedule_was_assigned_late(host: Host) -> None:
    module = host.place / "theirs.py"
    module.write_text(module.read_text() + LATE)
    command = [str(Path(sys.executable).parent / "celery"), "-A", "theirs", "beat"]
    log = host.place / "beat.log"
    with log.open("w") as output:
        beat = subprocess.Popen(
            [*command, "--loglevel", "INFO", "-s", str(host.place / "beat")],
            cwd=host.place,
            env=host.environment | {"HANDRAIL_SWEEP_EVERY_S": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        limit = time.monotonic() + SECONDS
        while not host.queues.llen(host.prefix + RECONCILE_QUEUE):
            assert beat.poll() is None and time.monotonic() < limit, log.read_text()
            time.sleep(0.05)
    finally:
        beat.terminate()
        beat.wait(SECONDS)
    assert "[settings-replaced]" in log.read_text()


@pytest.mark.live
@pytest.mark.timeout(60)
@pytest.mark.parametrize("reaches", ["the worker", "its children too"])
def test_a_worker_that_is_told_to_stop_in_the_middle_of_a_write_doubles_nothing(
    reaches: str, host: Host
) -> None:
    """Kubernetes tells the worker alone, systemd its children as well. Either way the write is
    finished, whatever comes after it is another worker's.
    """
    (host.place / "takes").write_text("2")
    beat = ("-B", "-s", str(host.place / "beat"))
    with host.worker("-P", "prefork", "-c", "2") as first:
        run_id = host.client.enqueue("pay", goal="pay")
        host.until((host.place / "paying").exists)
        host.until((host.place / "paying").read_text)
        if reaches == "the worker":
            first.terminate()
        else:
            os.killpg(first.pid, signal.SIGTERM)
        with_it = psutil.Process(first.pid).children(recursive=True)
        assert first.wait(SECONDS) == 0
        _, alive = psutil.wait_procs(with_it, timeout=5)
        assert alive == []
    [effect] = host.client.fleet.effects()
    assert (effect["status"], effect["attempts"]) == ("applied", 1), "it was not finished"
    with host.worker("-P", "prefork", "-c", "2", *beat):
        assert host.ended(run_id) == "completed"
    assert len((host.place / "paid").read_text().split()) == 1


@pytest.mark.live
@pytest.mark.timeout(60)
def test_a_worker_that_grows_and_shrinks_loses_and_doubles_nothing(host: Host) -> None:
    (host.place / "takes").write_text("0.5")
    host.environment["AUTOSCALE_KEEPALIVE"] = "1"
    with host.worker("--autoscale=4,1", "-B", "-s", str(host.place / "beat")) as worker:
        several = [host.client.enqueue("look", goal="look") for _ in range(12)]
        several.append(host.client.enqueue("pay", goal="pay"))
        assert {host.ended(run) for run in several} == {"completed"}
        log = host.place / "worker.log"
        host.until(lambda: "Scaling down" in log.read_text())
        assert "Scaling up" in log.read_text()
        later = [host.client.enqueue("look", goal="look") for _ in range(3)]
        assert {host.ended(run) for run in later} == {"completed"}
        assert worker.poll() is None
    assert len((host.place / "paid").read_text().split()) == 1


# ---- on RabbitMQ ---------------------------------------------------------------------------------

ON_RABBIT = """
import os
from celery import Celery
import handrail

app = Celery("theirs", broker=os.environ["BROKER"])
handrail.install(app, "agents:fleet")
app.conf.update(task_default_queue="their-default")


@app.task
def add(a, b):
    open(os.environ["PLACE"] + "/added", "w").write(str(a + b))
"""


@pytest.mark.parametrize(
    ("chosen", "known"),
    [
        (["celery"], {"celery"}),
        ("celery,others", {"celery"}),
        ([STEPS_QUEUE], {"celery"} | OURS),
        ("celery,handrail.reconcile", {"celery"} | OURS),
        (None, {"celery"} | OURS),
    ],
)
def test_on_rabbitmq_only_who_uses_our_queues_knows_of_them(chosen: Any, known: set[str]) -> None:
    """Celery changes how an app's own tasks travel wherever it knows of a quorum queue."""
    app = Celery("theirs", broker="amqp://nobody", set_as_current=False)
    handrail.install(app, Fleet(database_url="sqlite://"))
    app.finalize()
    assert set(app.amqp.queues) == {"celery"}, "a process that only publishes"
    worker = SimpleNamespace(app=app)
    celeryd_init.send(sender="here", instance=worker, conf=app.conf, options={"queues": chosen})
    assert set(app.amqp.queues) == known


@pytest.fixture
def on_rabbit(tmp_path: Path, valkey_url: str, rabbit: Rabbit) -> Iterator[Host]:
    made = Host(tmp_path, valkey_url)
    url = rabbit.host()
    made.environment |= {"BROKER": url, "HANDRAIL_SWEEP_EVERY_S": "1"}
    (made.place / "theirs.py").write_text(ON_RABBIT)
    made.client.close()
    made.client = Client(database_url=made.ledger, broker_url=url)
    yield made
    made.client.close()


@pytest.mark.live
@pytest.mark.timeout(120)
def test_on_rabbitmq_a_worker_of_theirs_alone_is_as_without_us(
    on_rabbit: Host, rabbit: Rabbit
) -> None:
    def queues() -> set[str]:
        name = on_rabbit.environment["BROKER"].rpartition("/")[2]
        listed = rabbit.control("list_queues", "--vhost", name, "--no-table-headers", "name")
        return set(listed.split())

    log = on_rabbit.place / "worker.log"
    with on_rabbit.worker("-Q", "their-default", "-c", "1"):
        code = "from theirs import add; add.apply_async((1, 2), countdown=0.1)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=on_rabbit.place,
            env=on_rabbit.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        on_rabbit.until((on_rabbit.place / "added").exists)
        assert "delayed delivery" not in done.stderr + log.read_text()
        assert "Prefetch count is now static" not in log.read_text()
        assert not [name for name in queues() if name.startswith(("handrail", "celery_delayed"))]

    with on_rabbit.worker("-c", "2", "-B", "-s", str(on_rabbit.place / "beat")):
        run_id = on_rabbit.client.enqueue("pay", goal="pay")
        assert on_rabbit.ended(run_id) == "completed"
        assert OURS | {"their-default", "celery_delayed_27"} <= queues()
        silent = Client(database_url=on_rabbit.ledger)  # its run is found by the sweep alone
        lost = silent.enqueue("look", goal="look")
        silent.fleet.ledger.database.run(
            "UPDATE handrail_run SET wake_at = created_at WHERE id = :id", {"id": lost}
        )
        assert on_rabbit.ended(lost) == "completed"
        silent.close()
    assert "Traceback" not in log.read_text()
