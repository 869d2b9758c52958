"""Let the runs that a request enqueues belong to the request's trace."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest, HttpResponse
from django.utils.decorators import sync_and_async_middleware

from handrail import tracing

_Answer = Callable[[HttpRequest], HttpResponse] | Callable[[HttpRequest], Awaitable[HttpResponse]]


@sync_and_async_middleware
def trace_context(get_response: _Answer) -> _Answer:
    """Take the W3C `traceparent` of the request, for whatever is enqueued while it is answered.

    Where OpenTelemetry has a current span, that one counts, and this is not needed.
    """
    if iscoroutinefunction(get_response):

        async def answer_later(request: HttpRequest) -> HttpResponse:
            with tracing.of_request(request.headers):
                return await get_response(request)  # type: ignore[no-any-return]

        return answer_later

    def answer(request: HttpRequest) -> HttpResponse:
        with tracing.of_request(request.headers):
            return get_response(request)  # type: ignore[return-value]

    return answer
