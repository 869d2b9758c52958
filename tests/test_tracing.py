"""The trace of a request goes on in what its run does; a header that is none is no trace."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from handrail import tracing

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
