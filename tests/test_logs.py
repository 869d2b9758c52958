"""Each line of a log says which run, step and trace it is about, and none gives a secret away.

The fleet is real: a worker process on a Valkey of its own test, at its most talkative.
"""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from handrail import logs
from handrail.agent.loop import AgentLoop
from handrail.agent.workflow import Workflow
from handrail.errors import ToolRefused
from handrail.fleet import Fleet
from handrail.settings import Settings
from tests.world import SETTLED_MS, World, look, open_world, save

GIVEN = f"00-{'ab' * 16}-{'cd' * 8}-01"
SECONDS = 40.0  # only a failure takes that long
MODULE = """
import logging, os, urllib.request
from pydantic import BaseModel
from handrail import AgentLoop, Budget, Fleet, Workflow

fleet = Fleet()
log = logging.getLogger("users.tool")

class Order(BaseModel):
    order: str

@fleet.tool(side_effect="read")
def look_up(args: Order, call):
    log.info("looking")
    headers = {"traceparent": call.traceparent}
    request = urllib.request.Request(os.environ["SERVICE"], headers=headers)
    urllib.request.urlopen(request, timeout=5).read()
    return "canary-output"

@fleet.tool(side_effect="read")
async def crash(args: Order, call):
    log.info("crashing")
    raise RuntimeError(os.environ["SECRET"])

@fleet.tool(side_effect="idempotent", approval="never",
            intent=lambda args, run: f"save:{args.order}",
            guarantee="unique-constraint", query=lambda args, call: None, settle_after_ms=100)
async def save(args: Order, call):
    log.info("saving")
    return "canary-output, saved"

def propose(seen):
    name = ("look_up", "save", "crash")[min(2, len(seen["observations"]))]
    return {"kind": "tool", "tool": name, "arguments": {"order": "canary-argument"}}

fleet.model("default", propose)
fleet.workflow(Workflow(name="errand", version="1", stages=[AgentLoop(
    name="loop", actions=(look_up, save, crash), verify=lambda claim, call: True)],
    budget=Budget(steps=12, model_calls=12, tool_calls=12, deadline_ms=30_000)))
"""


def _record(**extra: object) -> logging.LogRecord:
    record = logging.LogRecord("somewhere", logging.INFO, __file__, 1, "said", (), None)
    vars(record).update(extra)
    return record


def test_a_line_carries_the_ids_of_what_is_under_way_and_no_later_one_does() -> None:
    handler = logs.handler("json")
    record = _record(data={"args": "canary-argument"})
    with logs.about(run_id="r1", step=3), logs.about(tool="refund"):
        handler.filter(record)
    line = json.loads(handler.format(record))
    assert line["run_id"] == "r1" and line["step"] == 3 and line["tool"] == "refund"
    assert line["level"] == "INFO" and line["logger"] == "somewhere" and line["message"] == "said"
    assert "canary" not in json.dumps(line)
    after = _record()
    handler.filter(after)
    assert "run_id" not in json.loads(handler.format(after))


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_of_an_exception_its_type_and_places_are_logged_and_not_its_text(
    log_format: logs.LogFormat,
) -> None:
    try:
        raise RuntimeError("canary-exception")
    except RuntimeError:
        record = _record(exc_info=sys.exc_info())
    said = logs.handler(log_format).format(record)
    assert "RuntimeError" in said and "test_logs.py" in said
    assert 'raise RuntimeError("canary' in said.replace("\\", "")  # the source, not the value
    assert "RuntimeError: canary" not in said


def test_a_text_line_ends_with_the_ids() -> None:
    handler, record = logs.handler(), _record()
    with logs.about(run_id="r1", step=3):
        handler.filter(record)
    assert handler.format(record).endswith("said run=r1 step=3")


def test_figures_are_believed_of_our_own_loggers_alone() -> None:
    handler, theirs, ours = logs.handler("json"), _record(answer="canary"), _record(answer="absent")
    ours.name = "handrail.reconciler"
    assert "canary" not in handler.format(theirs) + logs.handler().format(theirs)
    assert json.loads(handler.format(ours))["answer"] == "absent"


def test_a_line_about_another_run_carries_none_of_the_ids_of_the_one_at_work() -> None:
    handler, record = logs.handler("json"), _record()
    with logs.about(run_id="r1", step=3, tool="refund"), logs.about(run_id="r2"):
        handler.filter(record)
    line = json.loads(handler.format(record))
    assert line["run_id"] == "r2" and not {"step", "tool"} & line.keys()


# ---- events --------------------------------------------------------------------------------------


class Lines:
    """What Handrail's loggers have said at INFO, as JSON."""

    def __init__(self) -> None:
        self.said = io.StringIO()
        self.handler = logging.StreamHandler(self.said)
        self.handler.addFilter(logs.RunFilter())
        self.handler.setFormatter(logs.JsonLines())

    @property
    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.said.getvalue().splitlines()]

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The events, or those of these names."""
        found = [line for line in self.all if "event" in line]
        return [line for line in found if not names or line["event"] in names]

    def named(self) -> list[str]:
        """Each event's name, of a move with where it has led."""
        moves = {"run.moved": "status"}
        return [
            " ".join([e["event"], *([e[moves[e["event"]]]] if e["event"] in moves else [])])
            for e in self.events()
        ]


@pytest.fixture
def lines() -> Iterator[Lines]:
    log, made = logging.getLogger("handrail"), Lines()
    level = log.level
    log.addHandler(made.handler)
    log.setLevel(logging.INFO)
    yield made
    log.setLevel(level)
    log.removeHandler(made.handler)


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request) as opened:
        yield opened


def test_a_run_says_each_step_each_attempt_of_its_write_and_how_it_ended(
    lines: Lines, tmp_path: Path
) -> None:
    """A real fleet in this process; its arguments, answers and secrets are in no line."""
    fleet = Fleet(settings=Settings.read(home=tmp_path))

    @fleet.tool(
        side_effect="idempotent",
        approval="never",
        intent=lambda arguments, run: f"pay:{arguments['canary']}",
        guarantee="idempotency-key",
        key_valid_for_ms=86_400_000,
        takeover="operations",
    )
    def pay(arguments: dict[str, Any], call: Any) -> Any:
        return {"canary": "canary-answer"}

    def propose(seen: Any) -> Any:
        if seen["observations"]:
            return {"kind": "complete", "answer": "canary-claim"}
        return {"kind": "tool", "tool": "pay", "arguments": {"canary": "canary-argument"}}

    fleet.model("default", propose)
    loop = AgentLoop(name="loop", actions=(pay,), verify=lambda claim, call: True)
    fleet.workflow(Workflow(name="pay", version="7", stages=[loop]))
    run = fleet.run("pay", goal="canary-goal", input="canary-input", traceparent=GIVEN)
    fleet.close()
    assert run.status == "completed"
    assert lines.named() == [
        *("step.claimed", "effect.dispatched", "effect.applied", "step.ended"),
        *("step.claimed", "run.moved completed", "step.ended"),
    ]
    for line in lines.events():
        about = {name: line[name] for name in ("run_id", "workflow", "trace_id")}
        assert about == {"run_id": run.run_id, "workflow": "pay@7", "trace_id": "ab" * 16}
        assert line["span_id"] and line["epoch"] >= 1 and line["level"] == "INFO"
    assert [line["step"] for line in lines.events("step.claimed")] == [0, 1]
    dispatched, applied = lines.events("effect.dispatched", "effect.applied")
    assert dispatched["tool"] == applied["tool"] == "pay"
    assert dispatched["effect_id"] == applied["effect_id"] and applied["attempt"] == 1
    [moved] = lines.events("run.moved")
    assert (moved["was"], moved["reason"]) == ("running", "completed")
    assert "canary" not in lines.said.getvalue()


def test_a_doubt_says_why_what_was_asked_and_how_it_was_settled(world: World, lines: Lines) -> None:
    world.workflow(world.write_tool(key_valid_for_ms=0), plan=[save(id=1)])
    world.service.script = ["lost"]
    run = world.start()
    world.step(run)
    [unknown] = lines.events("effect.unknown")
    assert (unknown["trigger"], unknown["doubt"]) == ("exception", "unproven")
    world.drive(run)
    said = [name for name in lines.named() if not name.startswith("step.")]
    assert said == [
        "effect.dispatched",
        *("effect.unknown", "run.moved reconciling"),
        *("effect.applied", "run.moved running", "effect.asked"),
        "run.moved completed",
    ]
    [asked] = lines.events("effect.asked")
    assert asked["answer"] == "applied" and asked["effect_id"] == unknown["effect_id"]
    assert {line["run_id"] for line in lines.events()} == {run}


def test_a_refusal_is_an_absence_and_no_doubt(world: World, lines: Lines) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    world.service.script = ["refused"]
    world.drive(world.start())
    [absent] = lines.events("effect.absent")
    assert absent["doubt"] == "none" and "trigger" not in absent
    assert lines.events("effect.unknown") == []


def test_a_handoff_says_its_reason_once(world: World, lines: Lines) -> None:
    tool = world.write_tool(key_valid_for_ms=0, query=False, guarantee="transaction")
    world.workflow(tool, plan=[save(id=1)])
    world.service.script = ["dropped"]
    run = world.start()
    world.drive(run)
    [opened] = lines.events("handoff.opened")
    [row] = world.rows("SELECT id, reason FROM handrail_handoff")
    assert (opened["reason"], opened["matter_id"]) == (row["reason"], row["id"])
    assert opened["run_id"] == run
    assert lines.named()[-1] == "run.moved handed_off"


def test_a_wish_to_cancel_is_said_once(world: World, lines: Lines) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])

    def cancelled(arguments: Any, call: Any) -> Any:
        world.meanwhile(lambda: world.fleet.cancel(call.run_id))
        world.meanwhile(lambda: world.fleet.cancel(call.run_id))
        raise ToolRefused("too-late")

    world.service.script = [cancelled]
    run = world.start()
    world.step(run)
    said = lines.named()
    assert said.count("run.cancel_requested") == 1
    assert said.index("effect.dispatched") < said.index("run.cancel_requested")
    assert said[-2:] == ["run.moved cancelled", "step.ended"]


def test_a_step_that_was_overtaken_says_that_it_is_fenced_off(world: World, lines: Lines) -> None:
    def overtaken(arguments: Any, call: Any) -> Any:
        world.meanwhile(lambda: world.advance(world.ledger.lease_ms + 1))
        world.meanwhile(world.reconciler.sweep)
        return "late"

    tool = world.fleet.tool("lookup", side_effect="read")(overtaken)
    world.workflow(tool, plan=[look(of=1)])
    run = world.start()
    world.step(run)
    assert lines.named() == ["step.claimed", "step.fenced", "step.ended"]
    assert lines.events("step.fenced")[0]["run_id"] == run


def test_a_sweep_says_what_it_did_and_nothing_when_idle(world: World, lines: Lines) -> None:
    world.workflow(world.write_tool(), plan=[save(id=1)])
    world.reconciler.sweep_until_quiet()
    assert lines.events() == []
    world.service.script = ["lost"]
    run = world.start()
    world.step(run)
    world.advance(SETTLED_MS)
    world.reconciler.sweep_until_quiet()
    [swept] = lines.events("sweep.ended")
    assert swept["looked_at"] >= 1 and swept["counts"]["answer:applied"] == 1
    assert "run_id" not in swept


def test_below_info_nothing_is_said(world: World, lines: Lines) -> None:
    logging.getLogger("handrail").setLevel(logging.WARNING)
    world.workflow(world.write_tool(), plan=[save(id=1)])
    world.drive(world.start())
    assert lines.all == []


class _Service(BaseHTTPRequestHandler):
    seen: list[str | None]

    def do_GET(self) -> None:
        self.seen.append(self.headers["traceparent"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Iterator[tuple[str, list[str | None]]]:
    """A service that keeps the traceparent of each request."""
    seen: list[str | None] = []
    handler = type("Handler", (_Service,), {"seen": seen})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
        server.shutdown()
        thread.join()


@pytest.mark.live
def test_a_request_s_trace_arrives_in_a_tool_s_call_and_in_every_line_and_no_secret_does(
    service: tuple[str, list[str | None]], tmp_path: Path, valkey_url: str
) -> None:
    """At DEBUG, the secrets are the goal, input, arguments, output, answer, an exception's text
    and the approval and broker secrets.
    """
    url, seen = service
    (tmp_path / "logs_fleet.py").write_text(MODULE)
    settings = {
        "HANDRAIL_HOME": str(tmp_path / "home"),
        "HANDRAIL_BROKER_URL": valkey_url,
        "HANDRAIL_KEY_PREFIX": f"{tmp_path.name}:",
        "HANDRAIL_APPROVAL_SECRET": "canary-approval" * 4,
        "HANDRAIL_LOG_FORMAT": "json",
        "SERVICE": url,
        "SECRET": "canary-exception",
    }
    log, environment = tmp_path / "log", os.environ | settings
    here = Settings.read(
        home=tmp_path / "home", broker_url=valkey_url, key_prefix=f"{tmp_path.name}:"
    )
    command = ["worker", "--beat", "--log-level", "debug", "--fleet", "logs_fleet:fleet"]
    with log.open("wb") as file:
        worker = subprocess.Popen(
            [sys.executable, "-m", "handrail", *command],
            cwd=tmp_path,
            env=environment,
            stdout=file,
            stderr=file,
        )
    try:
        _until(lambda: b"ready: fleet" in log.read_bytes(), worker)
        enqueue = [sys.executable, "-c", ENQUEUE]
        run_id = subprocess.check_output(enqueue, cwd=tmp_path, env=environment, text=True).strip()
        fleet = Fleet(settings=here)
        run = fleet.wait(run_id, timeout_s=SECONDS)
        fleet.close()
    finally:
        worker.terminate()
        worker.wait(SECONDS)
    text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert run.rests, run
    assert "canary" not in text and valkey_url not in text, [
        line for line in text.splitlines() if "canary" in line or valkey_url in line
    ]
    assert seen[0] is not None and seen[0][:36] == GIVEN[:36] and seen[0].endswith("-01")
    assert seen[0] != GIVEN
    of_tools = [line for line in lines if line["logger"] == "users.tool"]
    assert {line["tool"] for line in of_tools} == {"look_up", "save", "crash"}
    [saving] = [line for line in of_tools if line["tool"] == "save"]
    assert len(saving["effect_id"]) >= 32
    assert of_tools[0]["span_id"] == seen[0][36:52]
    of_run = [line for line in lines if line.get("run_id") == run_id]
    assert {"step.claimed", "step.ended"} <= {line.get("event") for line in of_run}
    assert {line["trace_id"] for line in of_run if "trace_id" in line} == {"ab" * 16}
    assert all("step" in line for line in of_tools)
    assert worker.returncode == 0


ENQUEUE = f"""
from logs_fleet import fleet
print(fleet.enqueue("errand", goal="canary-goal", input={{"note": "canary-input"}},
                    traceparent="{GIVEN}"))
fleet.close()
"""


def _until(true: Callable[[], bool], worker: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + SECONDS
    while not true():
        assert worker.poll() is None and time.monotonic() < ends, "the worker did not come up"
        time.sleep(0.05)
