"""The fleet of the worker processes: tools of each kind, a scripted model, two workflows.

A run is an errand: a list of moves that the model proposes one after the other; or it is
confirmed: one irreversible write that a person agrees to. The environment says where the provider
is (CHAOS_PROVIDER), where to leave one's process id (CHAOS_PID), and where to read by how much the
wall clock is wrong (CHAOS_CLOCK).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from celery.signals import worker_ready
from pydantic import BaseModel

from handrail import (
    AgentLoop,
    Budget,
    Commit,
    Compensation,
    Confirm,
    Fleet,
    Read,
    ToolCall,
    ToolRefused,
    ToolUnclear,
    Verify,
    Workflow,
)
from handrail.agent.budget import CallLimits
from handrail.agent.effects import Pending
from handrail.agent.stage import Action
from handrail.agent.tools import RunFacts, Tool
from handrail.gateway.model import COMPLETE, ModelEvent, ModelRequest, Stop, Text
from handrail.gateway.model import ToolCall as Proposal
from tests.chaos import provider
from tests.chaos.kinds import CANARY, KINDS, READ, Kind, Pace

DEADLINE_MS: Final = 240_000


class Item(BaseModel):
    """What a tool is asked for. `note` is the customer's, and nobody else's business."""

    item: str
    note: str


# ---- what the tools do ---------------------------------------------------------------------------


def _port() -> int:
    return int(os.environ["CHAOS_PROVIDER"])


def _wanted(kind: Kind, pace: Pace, call: ToolCall) -> dict[str, Any]:
    return {
        "verb": "apply",
        "kind": kind.name,
        "intent": call.intent_key,
        "key": call.key,
        "run": call.run_id,
        "timeout_ms": call.timeout_ms,
        "settle_ms": pace.settle_ms,
        "not_after": call.not_after if kind.not_after else None,
    }


def _received(item: str, answer: dict[str, Any]) -> dict[str, Any]:
    match answer:
        case {"receipt": receipt}:
            return {"item": item, "number": receipt["number"]}
        case {"refused": str(reason), "retryable": bool(retryable)}:
            raise ToolRefused(reason, retryable=retryable)
    raise ToolUnclear("not-a-receipt")


def _writes(kind: Kind, pace: Pace) -> Any:
    async def write(args: Item, call: ToolCall) -> dict[str, Any]:
        by_s = time.monotonic() + call.timeout_ms / 1_000
        try:
            answer = await provider.request(_port(), _wanted(kind, pace, call), by_s=by_s)
        except provider.NeverSent:
            raise ToolRefused("never-sent", retryable=True) from None
        return _received(args.item, answer)

    def write_blocking(args: Item, call: ToolCall) -> dict[str, Any]:
        by_s = time.monotonic() + call.timeout_ms / 1_000
        try:
            answer = provider.request_blocking(_port(), _wanted(kind, pace, call), by_s=by_s)
        except provider.NeverSent:
            raise ToolRefused("never-sent", retryable=True) from None
        return _received(args.item, answer)

    return write_blocking if kind.blocking else write


def _finds(kind: Kind) -> Any:
    async def find(args: Item, call: ToolCall) -> Any:
        what = {
            "verb": "find",
            "kind": kind.name,
            "intent": call.intent_key,
            "run": call.run_id,
            "timeout_ms": call.timeout_ms,
        }
        answer = await provider.request(
            _port(), what, by_s=time.monotonic() + call.timeout_ms / 1_000
        )
        match answer:
            case {"record": None}:
                return None
            case {"record": record}:
                return {"item": args.item, "number": record["number"]}
            case {"pending": True}:
                return Pending()
        raise ConnectionError("the query was not answered")

    return find


async def look(args: Item, call: ToolCall) -> dict[str, Any]:
    """Read something."""
    what = {
        "verb": "look",
        "kind": READ,
        "intent": args.item,
        "run": call.run_id,
        "timeout_ms": call.timeout_ms,
    }
    answer = await provider.request(_port(), what, by_s=time.monotonic() + call.timeout_ms / 1_000)
    if "refused" in answer:
        raise ToolRefused(answer["refused"], retryable=answer["retryable"])
    return {"item": args.item}


async def is_done(claim: Any, call: ToolCall) -> bool:
    """Look outside whether each thing that is claimed to be done was done, once."""
    what = {
        "verb": "check",
        "run": call.run_id,
        "of": claim["done"],
        "timeout_ms": call.timeout_ms,
    }
    answer = await provider.request(_port(), what, by_s=time.monotonic() + call.timeout_ms / 1_000)
    return all(count == 1 for count in answer["counts"])


class ScriptedModel:
    """A model that goes through the moves of the run's input, and thinks aloud about it."""

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Propose the first move that has not come about; each question is on record outside."""
        errand: Any = request.input
        what = {"verb": "ask", "run": request.goal, "timeout_ms": 1_000}
        await provider.request(_port(), what, by_s=time.monotonic() + 60)
        yield Text(f"I think of {CANARY}")
        done = {json.loads(seen["text"])["item"] for seen in request.observations if _told(seen)}
        left = [move for move in errand["moves"] if move["item"] not in done]
        if left:
            arguments = {"item": left[0]["item"], "note": CANARY}
            yield Proposal("call", left[0]["tool"], arguments)
        else:
            yield Proposal("call", COMPLETE, {"answer": {"done": _claimed(errand)}})
        yield Stop("end")


def _told(seen: Any) -> bool:
    return str(seen["text"]).startswith("{")  # a refusal is told in other words


def _claimed(errand: Any) -> list[list[str]]:
    writes = [move for move in errand["moves"] if move["tool"] != READ]
    return [[move["tool"], intent_key(move["tool"], move["item"])] for move in writes]


def intent_key(kind: str, item: str) -> str:
    """The business intent of a write: what it does to which thing."""
    return f"{kind}:{item}"


def _undone(args: Item, result: Any, original: Any, run: RunFacts) -> dict[str, Any]:
    """What undoes a write is asked for."""
    assert original == {"item": args.item}
    return {"item": args.item, "note": CANARY}


# ---- declarations --------------------------------------------------------------------------------


def _tool(fleet: Fleet, kind: Kind, pace: Pace, undoing: Tool | None = None) -> Tool:
    return fleet.tool(
        kind.name,
        input=Item,
        description="Write something.",
        side_effect=kind.side_effect,
        approval="always" if kind.confirmed else "never",
        intent=lambda args, run: intent_key(kind.name, args.item),
        guarantee=kind.guarantee,
        key_valid_for_ms=kind.key_valid_for_ms,
        not_after=kind.not_after,
        query=_finds(kind) if kind.queried else None,
        takeover=None if kind.queried else "the chaos desk",
        compensation=None if undoing is None else Compensation(undoing, _undone, original=look),
        timeout_ms=pace.call_ms,
        settle_after_ms=pace.settle_ms,
        concurrency_safe=True,
    )(_writes(kind, pace))


def declare(fleet: Fleet, pace: Pace) -> Fleet:
    """Declare everything on a fleet: in a worker, or for the client that enqueues."""
    reading = fleet.tool(side_effect="read", timeout_ms=pace.call_ms)(look)
    tools = {kind.name: _tool(fleet, kind, pace) for kind in KINDS if not kind.undone_by}
    for kind in KINDS:
        if kind.undone_by:
            tools[kind.name] = _tool(fleet, kind, pace, tools[kind.undone_by])
    open_to_a_model = [tools[kind.name] for kind in KINDS if not kind.confirmed and not kind.undoes]
    fleet.model("default", ScriptedModel())
    limits = CallLimits(model_ms=8_000, tool_ms=pace.call_ms)
    budget = Budget(steps=16, model_calls=16, tool_calls=16, deadline_ms=DEADLINE_MS)
    fleet.workflow(
        Workflow(
            name="errand",
            stages=[AgentLoop(name="loop", actions=(reading, *open_to_a_model), verify=is_done)],
            budget=budget,
            limits=limits,
        )
    )
    for kind in KINDS:
        if kind.confirmed:
            fleet.workflow(_confirmed(kind, tools[kind.name], reading, budget, limits))
    return fleet


def _confirmed(
    kind: Kind, tool: Tool, reading: Tool, budget: Budget, limits: CallLimits
) -> Workflow:
    def item(run: RunFacts) -> dict[str, Any]:
        given: Any = run.input
        return {"item": given["moves"][0]["item"], "note": CANARY}

    def action(run: RunFacts) -> Action:
        return Action(tool, item(run))

    def claim(run: RunFacts) -> Any:
        return {"done": _claimed(run.input)}

    return Workflow(
        name="confirmed",
        stages=[
            Read("before", reading, item),
            Confirm("consent", action),
            Commit("write", action, tool),
            Verify("after", is_done, claim),
        ],
        budget=budget,
        limits=limits,
    )


# ---- the process ---------------------------------------------------------------------------------


def believe_another_time(offset: Path) -> None:
    """Make this process's wall clock as wrong as a file says at the moment. Its monotonic clock
    goes on as it does.
    """
    with offset.open("rb") as file:
        seconds = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + struct.unpack("d", seconds)[0]
    time.time_ns = lambda: now_ns() + int(struct.unpack("d", seconds)[0] * 1e9)


def _say_ready(**_: object) -> None:
    Path(os.environ["CHAOS_PID"]).with_suffix(".ready").write_text(str(os.getpid()))


if clock := os.environ.get("CHAOS_CLOCK"):
    believe_another_time(Path(clock))
if pid_file := os.environ.get("CHAOS_PID"):
    Path(pid_file).write_text(str(os.getpid()))
    worker_ready.connect(_say_ready, weak=False)

fleet = declare(Fleet("chaos"), Pace.of_this_process())
