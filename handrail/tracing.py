"""W3C trace context: which trace a run belongs to, from the request that asked for it down to the
calls that its tools make.

Light: a web process reads a header with it. Everything in here is told or derived and nothing is
drawn by lot, so that a run that is played again has the same ids. Only `traceparent` is carried;
`tracestate` is dropped, which the recommendation allows: it may hold anything, and our messages
carry ids alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from hashlib import sha256
from typing import Any, Final

TRACEPARENT_PATTERN: Final = r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
#: A header of a later version may have more fields behind the four that we know.
_HEADER: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?",
    re.ASCII,
)
_LONGEST: Final = 512
#: The header's name as frameworks have it, and as WSGI has it.
_NAMES: Final = ("traceparent", "Traceparent", "HTTP_TRACEPARENT")
_SAMPLED: Final = 0x01
#: What the request said that is being answered.
_request: ContextVar[str | None] = ContextVar("handrail_request", default=None)
_NOT_SAMPLED: Final = "00"


def checked(header: object) -> str | None:
    """Return a traceparent as we carry it; None if it is none: a trace is never worth an error."""
    if not isinstance(header, str) or len(header) > _LONGEST:
        return None
    found = _HEADER.fullmatch(header.strip(" \t"))
    if found is None or found["version"] == "ff":
        return None
    version, trace, span, flags = found["version"], found["trace"], found["span"], found["flags"]
    if not trace.strip("0") or not span.strip("0"):
        return None
    if version == "00":
        return None if found["rest"] else f"00-{trace}-{span}-{flags}"
    return f"00-{trace}-{span}-{int(flags, 16) & _SAMPLED:02x}"


def from_headers(headers: Mapping[str, Any]) -> str | None:
    """Find the traceparent in a request's headers, or in its WSGI environment.

    None if there is none, or a malformed one.
    """
    for name in _NAMES:
        header = headers.get(name)
        if header is not None:
            return checked(header)
    return None


@contextmanager
def of_request(headers: Mapping[str, Any]) -> Iterator[None]:
    """Let what is enqueued in here belong to the trace of a request, by its headers."""
    token = _request.set(from_headers(headers))
    try:
        yield
    finally:
        _request.reset(token)


def current() -> str | None:
    """Return the traceparent of the OpenTelemetry span that is current, else that of the request;
    None if there is neither.

    A process that has not imported OpenTelemetry has no span, and does not import it for this.
    """
    api = sys.modules.get("opentelemetry.trace")
    context = api.get_current_span().get_span_context() if api is not None else None
    if context is None or not context.is_valid:
        return _request.get()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def trace_of(run_id: str, traceparent: str | None) -> str:
    """Return the traceparent of a run: the one it was given, or one that follows from its id.

    The latter says that nobody has recorded the trace; it joins the lines of the run in every log.
    """
    given = checked(traceparent)
    if given is not None:
        return given
    name = sha256(f"handrail-run\n{run_id}".encode()).hexdigest()
    return f"00-{name[:32]}-{name[32:48]}-{_NOT_SAMPLED}"


def child(traceparent: str, *names: object) -> str:
    """Return the traceparent of a span below another one; `names` tell it from its siblings."""
    version, trace, span, flags = traceparent.split("-")
    named = sha256("\n".join([trace, span, *map(str, names)]).encode()).hexdigest()[:16]
    return f"{version}-{trace}-{named}-{flags}"


def below(traceparent: str | None, *names: object) -> str | None:
    """`child` of the trace that a run was given; None where it was given none."""
    given = checked(traceparent)
    return None if given is None else child(given, *names)


def ids_of(traceparent: str) -> dict[str, str]:
    """Return the trace id and the span id, as logs name them."""
    _, trace, span, _ = traceparent.split("-")
    return {"trace_id": trace, "span_id": span}


@contextmanager
def inside(traceparent: str | None) -> Iterator[None]:
    """Let instrumented code in here, such as a tool's HTTP client, go on with this trace.

    It does nothing without OpenTelemetry's API, and nothing without a trace.
    """
    api = None if traceparent is None else _opentelemetry()
    if api is None or traceparent is None:
        yield
        return
    context, trace = api
    _, trace_id, span_id, flags = traceparent.split("-")
    span = trace.NonRecordingSpan(
        trace.SpanContext(
            trace_id=int(trace_id, 16),
            span_id=int(span_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(int(flags, 16)),
        )
    )
    token = context.attach(trace.set_span_in_context(span))
    try:
        yield
    finally:
        context.detach(token)


@cache
def _opentelemetry() -> tuple[Any, Any] | None:
    try:
        from opentelemetry import context, trace
    except ImportError:
        return None
    return context, trace


__all__ = [
    "TRACEPARENT_PATTERN",
    "below",
    "checked",
    "child",
    "current",
    "from_headers",
    "ids_of",
    "inside",
    "of_request",
    "trace_of",
]
