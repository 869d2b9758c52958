"""Each line of a log says which run, step and trace it is about, and none gives a secret away.

The fleet is real: a worker process on a Valkey of its own test, at its most talkative.
"""

from __future__ import annotations

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

import pytest

from handrail import logs
from handrail.fleet import Fleet
from handrail.settings import Settings

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
