"""The examples as their users run them: a web server, a worker, a beat, and requests over HTTP."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy.engine import make_url

from handrail import Client
from handrail.embedded import EmbeddedValkey
from handrail.ledger.errors import UnknownRun
from handrail.testing.services import EmbeddedPostgres

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
BIN = Path(sys.executable).parent
SECONDS = 60.0
#: A command of each shop's: (its own, Handrail's).
COMMANDS = {
    "django": ([sys.executable, "manage.py"], [sys.executable, "manage.py", "handrail"]),
    "flask": (
        [str(BIN / "flask"), "--app", "shop"],
        [str(BIN / "flask"), "--app", "shop", "handrail"],
    ),
}
SERVED = {"django": "shop.wsgi:application", "flask": "shop:create_app()"}

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


class Shop:
    """One of the shops, with a database and a broker of its own."""

    def __init__(self, kind: str, place: Path, database: str, valkey: EmbeddedValkey) -> None:
        self.kind, self.place, self.valkey = kind, place, valkey
        self.own, self.handrail = COMMANDS[kind]
        address = make_url(database)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HANDRAIL_")}
        self.environment = kept | {
            "HANDRAIL_BROKER_URL": valkey.url,
            "HANDRAIL_HOME": str(place),
            "HANDRAIL_APPROVAL_SECRET": "tests-only/" + "0123456789" * 3,
            "HANDRAIL_SWEEP_EVERY_S": "0.5",
            "PYTHONPATH": str(EXAMPLES / f"{kind}_shop"),
            "SHOP_DATABASE": database
            if kind == "flask"
            else f"postgresql://{address.username}@/{address.database}",
            "SHOP_DATABASE_HOST": str(address.query["host"]),
        }
        self.folder = EXAMPLES / f"{kind}_shop"
        self.client = Client(database_url=database.replace("+psycopg", ""))
        self.url = ""

    def command(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def process(self, name: str, *command: str, ready: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process of the deployment, from when its log says so."""
        log = self.place / f"{name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=output, stderr=output
            )
        try:
            self.until(lambda: ready in log.read_text())
            yield process
        finally:
            process.terminate()
            process.wait(SECONDS)

    @contextmanager
    def server(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """A web server, on whatever port is free; requests go to the one that was started last."""
        options = ("--bind", "127.0.0.1:0", "--workers", "1", "--threads", "4")
        command = (str(BIN / "gunicorn"), *options, SERVED[self.kind])
        before = self.url
        with self.process(name, *command, ready="Booting worker") as server:
            told = (self.place / f"{name}.log").read_text()
            self.url = told.split("Listening at: ")[1].split()[0]
            yield server
        self.url = before

    def until(self, holds: Callable[[], object]) -> None:
        limit = time.monotonic() + SECONDS
        while not holds():
            logs = "\n".join(log.read_text()[-1500:] for log in self.place.glob("*.log"))
            assert time.monotonic() < limit, logs
            time.sleep(0.03)

    def ask(self, path: str, who: str, said: Any = None, *, post: bool = False) -> tuple[int, Any]:
        """A request over HTTP; returns the status and what was answered."""
        login = base64.b64encode(f"{who}:{who}".encode()).decode()
        data = json.dumps(said or {}).encode() if said is not None or post else None
        request = urllib.request.Request(
            f"{self.url}{path}", data=data, headers={"Authorization": f"Basic {login}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read()
            return error.code, json.loads(text) if text.startswith(b"{") else None

    def refund(self, **more: Any) -> str:
        code, told = self.ask("/refunds", "alice", {"order_id": 1, **more})
        assert code == 202, told
        return str(told["run"])

    def comes_to(self, run_id: str, status: str) -> None:
        self.until(lambda: self.ask(f"/refunds/{run_id}", "alice")[1]["status"] == status)

    def new_order(self) -> None:
        """Forget what was asked for, so that the one order can be refunded by a new run."""
        self.client.fleet.ledger.database.run("UPDATE handrail_run SET dedupe_key = NULL", {})


@pytest.fixture(params=sorted(SERVED), scope="module")
def shop(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    postgres: EmbeddedPostgres,
) -> Iterator[Shop]:
    """A shop with its server, a worker and a beat."""
    kind: str = request.param
    place = tmp_path_factory.mktemp(kind)
    with ExitStack() as stack:
        valkey = stack.enter_context(EmbeddedValkey(place))
        made = Shop(kind, place, postgres.create_database(f"{kind}_shop"), valkey)
        if kind == "django":
            made.command(*made.own, "migrate", "-v0")
        else:
            made.command(*made.handrail, "db", "upgrade")
        made.command(*made.own, "seed")
        made.command(*made.own, "seed")  # another order, and no error
        stack.enter_context(made.server("server"))
        stack.enter_context(made.process("worker", *made.handrail, "worker", ready="ready:"))
        stack.enter_context(made.process("beat", *made.handrail, "beat", ready="ready:"))
        yield made
        made.client.close()


def test_a_refund_from_the_double_click_to_the_money(shop: Shop) -> None:
    """Asked for twice, approved by somebody else as it is shown, paid once."""
    run_id = shop.refund()
    assert shop.refund() == run_id
    shop.comes_to(run_id, "awaiting_approval")
    assert shop.ask(f"/refunds/{run_id}", "bob")[0] == 404  # not his
    assert shop.ask(f"/refunds/{run_id}/approval", "alice")[0] == 403
    code, shown = shop.ask(f"/refunds/{run_id}/approval", "bob")
    assert code == 200
    assert shown["action"]["arguments"] == {"order_id": 1, "charge_id": 2, "amount_cents": 4_200}
    assert shop.ask(f"/refunds/{run_id}/approval", "bob", {"digest": "another"})[0] == 409
    assert shop.ask(f"/refunds/{run_id}/approval", "alice", {"digest": shown["digest"]})[0] == 403
    assert shop.ask(f"/refunds/{run_id}/approval", "bob", {"digest": shown["digest"]})[0] == 200
    shop.comes_to(run_id, "completed")
    told = shop.ask(f"/refunds/{run_id}", "alice")[1]
    assert told["answer"]["amount_cents"] == 4_200


def test_a_request_that_fails_after_enqueueing_leaves_nothing(shop: Shop) -> None:
    shop.new_order()
    code, told = shop.ask("/refunds", "alice", {"order_id": 1, "note": "x" * 2_000})
    assert (code, told["code"]) == (400, "note-too-long")
    with pytest.raises(UnknownRun):
        shop.client.get(told["run"])


def test_the_cancel_button(shop: Shop) -> None:
    shop.new_order()
    run_id = shop.refund()
    shop.comes_to(run_id, "awaiting_approval")
    assert shop.ask(f"/refunds/{run_id}/cancel", "bob", post=True)[0] == 404
    assert shop.ask(f"/refunds/{run_id}/cancel", "alice", post=True)[1] == {"status": "cancelled"}
    assert shop.ask("/refunds", "nobody", {"order_id": 1})[0] == 401
    wrongs: list[Any] = [{}, {"order_id": "x"}, "x", 1]
    for wrong in wrongs:
        code, told = shop.ask("/refunds", "alice", wrong, post=True)
        assert (code, told["code"]) == (400, "invalid-request"), wrong


@contextmanager
def frozen(shop: Shop) -> Iterator[None]:
    """A broker that stands still: it takes connections and answers nothing."""
    port = int(shop.valkey.url.rsplit(":", 1)[1].split("/")[0])
    (broker,) = (
        one.pid
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
    )
    assert broker is not None
    os.kill(broker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker, signal.SIGCONT)


def test_a_frozen_broker_delays_no_request_and_loses_no_run(shop: Shop) -> None:
    """The request answers within a second, and the sweep finds the run."""
    shop.new_order()
    began = time.monotonic()
    shop.ask("/refunds/none", "alice")  # to log in alone takes its time, on a busy machine
    usual_s = time.monotonic() - began
    with frozen(shop):
        began = time.monotonic()
        run_id = shop.refund()
        assert time.monotonic() - began < 1.0 + usual_s
    shop.comes_to(run_id, "awaiting_approval")


def test_a_server_that_dies_between_commit_and_publish_loses_no_run(shop: Shop) -> None:
    """It is killed while it waits for a broker that does not answer."""
    shop.new_order()
    database = shop.client.fleet.ledger.database
    open_runs = "SELECT id FROM handrail_run WHERE dedupe_key IS NOT NULL"
    with shop.server("dying") as server, frozen(shop):
        asking = threading.Thread(target=lambda: suppressed(shop.refund))
        asking.start()
        shop.until(lambda: database.run(open_runs, {}))  # it is committed
        for worker in psutil.Process(server.pid).children():
            worker.kill()
        asking.join(SECONDS)
    (run,) = database.run(open_runs, {})
    shop.until(lambda: shop.client.get(run["id"]).status == "awaiting_approval")


def suppressed(act: Callable[[], object]) -> None:
    """Ask a server that dies meanwhile."""
    with suppress(OSError, AssertionError, http.client.HTTPException):
        act()


def test_a_web_process_imports_no_agent_code(shop: Shop) -> None:
    makes = {
        "django": "from shop.wsgi import application; import shop.urls",
        "flask": "import shop; app = shop.create_app()",
    }[shop.kind]
    code = f"""
import sys
{makes}
heavy = ("handrail.agent", "handrail.gateway", "handrail.tasks", "celery")
print(*sorted(name for name in sys.modules if name.startswith(heavy)))
"""
    environment = {**shop.environment, "DJANGO_SETTINGS_MODULE": "shop.settings"}
    told = subprocess.check_output(
        [sys.executable, "-c", code], cwd=shop.folder, env=environment, text=True
    )
    assert told.strip() == ""
