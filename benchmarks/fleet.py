"""The fleet that is measured: one agent loop, whose model and tool do nothing but tell the time.

A run of `steps` steps is `steps - 1` rounds with a call of the tool and one with the claim that the
work is done. The tool's result is the instant of its call, so that the ledger itself holds when
each step was at work, and measuring costs the step nothing. `wait_ms` is how long the model takes.

A run of the other workflow writes once, and its service never answers: it is in doubt until the
service is queried, which takes a millisecond.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel

from handrail import AgentLoop, Budget, Fleet, Workflow
from handrail.gateway.model import COMPLETE, ModelEvent, ModelRequest, Stop, ToolCall
from handrail.settings import Settings

WORKFLOW = "bench"
DOUBTFUL = "doubtful"
QUERY_S = 0.001
MAX_STEPS = 1_000


class Call(BaseModel):
    """What the tool takes."""

    number: int


class NoModel:
    """A model that knows its answer, and gives it after the run's `wait_ms`."""

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Propose the next call, or claim that the work is done."""
        plan: Any = request.input
        if plan["wait_ms"]:
            await asyncio.sleep(plan["wait_ms"] / 1000)
        done = request.observation_count
        if done + 1 < plan["steps"]:
            yield ToolCall("call", "touch", {"number": done})
        else:
            yield ToolCall("call", COMPLETE, {"answer": "done"})
        yield Stop("end")


class Payer:
    """A model that writes, and then claims that the work is done."""

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Propose the write, or claim completion."""
        if request.observation_count == 0:
            yield ToolCall("call", "pay", {"number": 1})
        else:
            yield ToolCall("call", COMPLETE, {"answer": "done"})
        yield Stop("end")


async def find_payment(arguments: Call, call: object) -> dict[str, int]:
    """The service's answer to a query, over a network."""
    await asyncio.sleep(QUERY_S)
    return {"number": arguments.number}


async def holds(claim: object, call: object) -> bool:
    """Verify nothing: what a check costs is the application's."""
    return True


def bench_fleet(settings: Settings | None = None) -> Fleet:
    """Make the fleet; without settings it reads them from the environment, as in a worker."""
    fleet = Fleet("bench", settings=settings)

    @fleet.tool(side_effect="read")
    async def touch(arguments: Call, call: object) -> dict[str, int]:
        """Say when it was called."""
        return {"number": arguments.number, "at_ns": time.monotonic_ns()}

    @fleet.tool(
        side_effect="idempotent",
        approval="never",
        intent=lambda arguments, run: f"pay:{run.run_id}",
        guarantee="unique-constraint",
        query=find_payment,
    )
    async def pay(arguments: Call, call: object) -> dict[str, int]:
        """Write, and never hear of it."""
        raise ConnectionError("no answer")

    fleet.model("default", NoModel())
    fleet.model("payer", Payer())
    budget = Budget(
        steps=MAX_STEPS, model_calls=MAX_STEPS, tool_calls=MAX_STEPS, deadline_ms=600_000
    )
    loop = AgentLoop(name="loop", actions=(touch,), verify=holds)
    fleet.workflow(Workflow(name=WORKFLOW, stages=[loop], budget=budget))
    paying = AgentLoop(name="loop", actions=(pay,), model="payer", verify=holds)
    fleet.workflow(Workflow(name=DOUBTFUL, stages=[paying], budget=budget))
    return fleet


def called_at_ns(fleet: Fleet, run_id: str) -> list[int]:
    """When a run's tool was called, in order, by the machine's monotonic clock."""
    return [json.loads(seen["text"])["at_ns"] for seen in fleet.ledger.observations(run_id)]
