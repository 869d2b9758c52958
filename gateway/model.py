"""The narrow interface to models: one streaming operation, four kinds of event, one proposal out.

No object of a provider's SDK passes here, and a fake gateway suffices for every test of a run. What
comes out of `fold` is untrusted and is parsed by the core like any other input.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Final, Protocol, TypeAlias

from handrail.canonical import Json, dumps

#: Tool names by which a model completes, asks the user, or (a planner in code) hands a proposal
# over as it is.
COMPLETE: Final = "handrail.complete"
CLARIFY: Final = "handrail.clarify"
RAW: Final = "handrail.raw"


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What a model is shown: public facts of one run. It is a copy; changing it changes nothing.

    `observations` are {"source", "text"}, oldest first; `tools` {"name", "description", "schema"}.
    `traceparent` is for the request's header of that name, and no matter of the model's.
    """

    goal: str
    input: Json
    facts: Mapping[str, Json]
    observations: tuple[Mapping[str, str], ...]
    tools: tuple[Mapping[str, Json], ...]
    budget_left: Mapping[str, int]
    state_version: int
    remaining_ms: int
    observation_count: int = 0
    traceparent: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the request as one JSON object, for planners written as functions."""
        return {
            "goal": self.goal,
            "input": json.loads(dumps(self.input)),
            "facts": json.loads(dumps(dict(self.facts))),
            "observations": [
                {"tool": seen["source"], "text": seen["text"]} for seen in self.observations
            ],
            "allowed_tools": [tool["name"] for tool in self.tools],
            "budget_left": dict(self.budget_left),
            "state_version": self.state_version,
            "remaining_ms": self.remaining_ms,
        }


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The model calls a tool."""

    id: str
    name: str
    input: Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens used, as the provider counts them."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The answer is complete."""

    reason: str


ModelEvent: TypeAlias = Text | ToolCall | Usage | Stop


class ModelGateway(Protocol):
    """One streaming operation. Closing the iterator aborts the request and its connection.

    An adapter makes exactly one billable attempt a call: retries are the program's, and are
    charged.
    """

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Ask the model."""
        ...


class ModelBroke(Exception):
    """The stream ended without `Stop`, or the provider failed: a failure, not an answer.

    `retryable`: the same request may succeed later (rate limiting, overload), which the program
    decides and pays for. A refused request, key or content is not.
    """

    def __init__(self, problem: str = "the model failed", *, retryable: bool = False) -> None:
        super().__init__(problem)
        self.retryable = retryable


def may_pass(error: BaseException | None) -> bool:
    """Whether a model call that ended with this error may succeed when it is made again."""
    if isinstance(error, ModelBroke):
        return error.retryable
    return isinstance(error, ConnectionError | TimeoutError)


class OutputOverflow(Exception):
    """The model produced more than the run's output budget has left; the rest was not read."""

    def __init__(self, kept: str) -> None:
        super().__init__("the output budget is spent")
        self.kept = kept


@dataclass(slots=True)
class Folded:
    """One model call, folded: an untrusted proposal, and how many bytes of output it took."""

    raw: Any = None
    output_bytes: int = 0
    usage: Usage | None = None
    text: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


async def fold(
    events: AsyncIterator[ModelEvent], *, output_bytes_left: int, into: Folded | None = None
) -> Folded:
    """Read a stream to its end and fold it into one raw proposal; whatever happens, it is closed.

    Several tool calls in one answer give a list, which is no valid proposal. A final text is a
    claim of completion. `into` holds what was read so far, also where the call fails. Raises
    `ModelBroke` where the stream breaks off, `OutputOverflow` beyond the bytes left.
    """
    folded = Folded() if into is None else into
    try:
        stopped = await _read(events, folded, output_bytes_left)
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()
    if not stopped:
        raise ModelBroke("the stream broke off", retryable=True)
    proposals = [_proposal(call) for call in folded.calls]
    if len(proposals) == 1:
        folded.raw = proposals[0]
    elif proposals:
        folded.raw = proposals
    else:
        folded.raw = {"kind": "complete", "answer": "".join(folded.text)}
    return folded


async def _read(events: AsyncIterator[ModelEvent], folded: Folded, output_bytes_left: int) -> bool:
    """Read all events; whether the stream said that it is complete."""
    stopped = False
    async for event in events:
        match event:
            case Text(text):
                room = output_bytes_left - folded.output_bytes
                data = text.encode("utf-8", "surrogatepass")
                if len(data) > room:
                    kept = data[:room].decode("utf-8", "ignore")
                    raise OutputOverflow("".join(folded.text) + kept)
                folded.output_bytes += len(data)
                folded.text.append(text)
            case ToolCall():
                folded.output_bytes += _size(event.input)
                if folded.output_bytes > output_bytes_left:
                    raise OutputOverflow("".join(folded.text))
                folded.calls.append(event)
            case Usage():
                folded.usage = event
            case Stop():
                stopped = True
    return stopped


def _proposal(call: ToolCall) -> Any:
    if call.name == RAW:
        return call.input
    if call.name in (COMPLETE, CLARIFY):
        kind = "complete" if call.name == COMPLETE else "clarify"
        return {"kind": kind, **call.input} if isinstance(call.input, dict) else call.input
    return {"kind": "tool", "tool": call.name, "arguments": call.input}


def _size(value: Any) -> int:
    try:
        return len(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return 0  # no JSON value: the parser refuses it


class Planner:
    """A function that plays the model: a rule-based planner, or a test.

    `propose(observation)` takes `ModelRequest.to_json()` and returns a raw proposal, or awaits one.
    A plain function may block: `beside(propose, observation)` calls it where that holds up nobody
    else. Without `beside` it is called on the event loop.
    """

    def __init__(
        self,
        propose: Callable[[dict[str, Any]], Any | Awaitable[Any]],
        *,
        beside: Callable[..., Awaitable[Any]] | None = None,
    ) -> None:
        self._propose = propose
        self._beside = None if iscoroutinefunction(propose) else beside

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Ask the function."""
        seen = request.to_json()
        if self._beside is None:
            raw = self._propose(seen)
        else:
            raw = await self._beside(self._propose, seen)
        if isawaitable(raw):
            raw = await raw
        yield ToolCall("planner", RAW, raw)
        yield Stop("end")


class Scripted:
    """A model that gives its proposals one after the other, and fails when it has none left."""

    def __init__(self, proposals: Iterable[Any]) -> None:
        self._proposals = iter(proposals)
        self.requests: list[ModelRequest] = []

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Give the next proposal."""
        self.requests.append(request)
        try:
            raw = next(self._proposals)
        except StopIteration:
            raise ModelBroke("the script has no proposal left") from None
        yield ToolCall("scripted", RAW, raw)
        yield Stop("end")
