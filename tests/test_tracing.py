"""The trace of a request goes on in what its run does; a header that is none is no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from handrail import Client, Read, Workflow, tracing
from handrail.fleet import Fleet
from handrail.settings import Settings

GIVEN = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.mark.parametrize(
    ("header", "read"),
    [
        (GIVEN, GIVEN),
        (f"  {GIVEN}\t", GIVEN),
        (f"cc-{'ab' * 16}-{'cd' * 8}-03-more", GIVEN),  # of a later version: what we know of it
        (f"ff-{'ab' * 16}-{'cd' * 8}-01", None),  # no version
        (f"00-{'0' * 32}-{'cd' * 8}-01", None),  # no trace
        (f"00-{'ab' * 16}-{'0' * 16}-01", None),  # no span
        (f"{GIVEN}-more", None),  # version 00 ends there
        (GIVEN.upper(), None),
        (f"{GIVEN}, {GIVEN}", None),  # sent twice
        (f"{GIVEN}\n", None),
        ("cc-" + "a" * 1_000, None),
        ("", None),
        (None, None),
        (7, None),
    ],
)
def test_only_a_well_formed_header_is_a_trace(header: object, read: str | None) -> None:
    assert tracing.checked(header) == read
    assert tracing.from_headers({"traceparent": header}) == read
    assert tracing.from_headers({"HTTP_TRACEPARENT": header}) == read


def test_a_span_below_keeps_trace_and_flags_and_differs_from_its_siblings() -> None:
    first, second = (tracing.child(GIVEN, "run", attempt) for attempt in (1, 2))
    assert tracing.checked(first) == first
    assert first[:36] == second[:36] == GIVEN[:36]
    assert first[-3:] == "-01"
    assert len({first, second, GIVEN}) == 3


def test_a_run_without_a_trace_has_one_of_its_own_that_nobody_recorded() -> None:
    derived = tracing.trace_of("run-1", None)
    assert tracing.checked(derived) == derived == tracing.trace_of("run-1", "no traceparent")
    assert derived.endswith("-00")
    assert derived != tracing.trace_of("run-2", None)
    assert tracing.below(None, "run-1") is None


def test_instrumented_code_goes_on_with_the_trace_that_it_is_inside_of() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with tracing.inside(GIVEN):
        assert tracing.current() == GIVEN
        with provider.get_tracer("a client of the user's").start_as_current_span("GET"):
            within = tracing.current()
    assert tracing.current() is None
    [span] = exporter.get_finished_spans()
    assert span.context is not None and span.parent is not None
    assert trace.format_trace_id(span.context.trace_id) == "ab" * 16
    assert trace.format_span_id(span.parent.span_id) == "cd" * 8
    assert within is not None and within[3:35] == "ab" * 16


# ---- from a request to a tool --------------------------------------------------------------------

OTHER = f"00-{'12' * 16}-{'34' * 8}-00"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet whose workflow does nothing; what it has is announced."""
    with closing(Fleet(settings=Settings(database_url=f"sqlite:///{tmp_path}/l.db"))) as made:
        nothing = made.tool("nothing", side_effect="read")(lambda arguments, call: None)
        made.workflow(Workflow(name="nothing", stages=[Read("r", nothing, lambda run: {})]))
        made.upgrade_database()
        made.announce()
        yield made


@pytest.mark.parametrize("who", ["fleet", "client"])
def test_whoever_enqueues_a_run_belongs_to_the_trace_that_is_current(
    who: str, fleet: Fleet
) -> None:
    """Whichever way: a span of OpenTelemetry, else the request's header; what is said wins."""
    enqueue: Callable[..., str] = fleet.enqueue
    if who == "client":
        enqueue = Client(settings=fleet.settings).enqueue

    def of(**options: Any) -> str | None:
        found: str | None = fleet.ledger.read(enqueue("nothing", goal="g", **options))[
            "traceparent"
        ]
        return found

    with tracing.of_request({"traceparent": GIVEN}):
        assert of() == GIVEN
        assert of(traceparent=OTHER) == OTHER
        with tracing.inside(OTHER):
            assert of() == OTHER
            assert of(traceparent=GIVEN) == GIVEN
    assert of() is None


MODULE = """
import asyncio, json, os
from opentelemetry import trace
from handrail import Fleet, Read, Workflow

fleet = Fleet()

def seen(how, call):
    here = trace.get_current_span().get_span_context()
    current = [trace.format_trace_id(here.trace_id), trace.format_span_id(here.span_id)]
    with open(os.environ["SEEN"], "a") as file:
        file.write(json.dumps([how, call.traceparent, *current]) + "\\n")

@fleet.tool(side_effect="read")
def plain(arguments, call):
    seen("plain", call)

@fleet.tool(side_effect="read")
async def awaited(arguments, call):
    await asyncio.sleep(0.01)
    seen("awaited", call)

fleet.workflow(Workflow(name="look", stages=[
    Read("one", plain, lambda run: {}), Read("two", awaited, lambda run: {})]))
"""


@pytest.mark.live
@pytest.mark.timeout(60)
def test_the_span_of_a_web_request_is_the_ancestor_of_a_tool_s_in_a_worker_process(
    tmp_path: Path, valkey_url: str
) -> None:
    """A real tracer around the request, a real worker, and OpenTelemetry's API in its tools."""
    (tmp_path / "traced.py").write_text(MODULE)
    settings = Settings.read(
        database_url=f"sqlite:///{tmp_path}/ledger.db",
        broker_url=valkey_url,
        key_prefix=f"{tmp_path.name}:",
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HANDRAIL_")}
    environment |= settings.to_environment() | {"SEEN": str(tmp_path / "seen")}
    command = ["worker", "--beat", "--fleet", "traced:fleet"]
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "handrail", *command],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        with closing(Fleet(settings=settings)) as here, closing(Client(settings=settings)) as web:
            here.upgrade_database()
            _until(lambda: bool(here.workflow_versions()), worker)
            with TracerProvider().get_tracer("web").start_as_current_span("POST /refunds") as span:
                run_id = web.enqueue("look", goal="look")
            run = here.wait(run_id, timeout_s=40.0)
    finally:
        worker.terminate()
        worker.wait(40.0)
    assert run.status == "completed", (tmp_path / "log").read_text()
    trace_id = trace.format_trace_id(span.get_span_context().trace_id)
    lines = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert [how for how, *_ in lines] == ["plain", "awaited"]
    for _, header, current_trace, current_span in lines:
        assert header[3:35] == current_trace == trace_id
        assert header[36:52] == current_span
        assert int(header[-2:], 16) & 1, "the request was sampled"
    assert len({span_id for *_, span_id in lines}) == 2


def _until(true: Callable[[], bool], worker: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + 40.0
    while not true():
        assert worker.poll() is None and time.monotonic() < ends, "the worker did not come up"
        time.sleep(0.05)
