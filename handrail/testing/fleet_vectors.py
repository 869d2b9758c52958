"""Runner vectors through the step shell: claim, call, commit, lock and dispatch as on a fleet.

`replay` runs a case with `handrail.tasks.step.run_step` on a ledger in memory, a lock of this
process and an event loop whose time is virtual; the model is a gateway, the tools and the check are
coroutines that do what the case says. A wish to cancel goes through the ledger, as a user's does.
All four grades are compared. Three endings differ from the reference runner's, since here a wish is
durable the moment it is made; `on_a_fleet` says how.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from handrail.agent.stage import Doubtful, End, Refused, Succeeded
from handrail.canonical import Json
from handrail.errors import ToolRefused, ToolUnclear
from handrail.gateway.model import RAW, ModelEvent, ModelRequest, Stop, ToolCall
from handrail.testing.vectors import (
    Driver,
    Outcome,
    Script,
    ScriptedError,
    case_workflow,
    compared,
    reply_of,
)
from handrail.testing.virtual_fleet import VirtualFleet

RUN: Final = "vector"


@dataclass(slots=True)
class _World:
    """The scripted calls of one case, and what they saw and did."""

    script: Script
    virtual: VirtualFleet
    cancelled_at: int | None = None
    calls: list[dict[str, Json]] = field(default_factory=list)

    # ---- what the fleet is given -----------------------------------------------------------------

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Play the model."""
        saw = {"version": request.state_version, "observations": request.observation_count}
        yield ToolCall("vector", RAW, await self._call("propose", {"saw": saw}))
        yield Stop("end")

    async def lookup(self, arguments: dict[str, Json], call: Any) -> str:
        """Play the read."""
        return await self._tool(arguments, call)

    async def save(self, arguments: dict[str, Json], call: Any) -> str:
        """Play the write."""
        return await self._tool(arguments, call)

    async def verify(self, claim: Json, call: Any) -> bool:
        """Play the check of a claim; it reads the run's state where it is durable."""
        durable = self.virtual.fleet.get(RUN)
        saw = {"version": durable.version, "observations": durable.observation_count}
        return await self._call("verify", {"saw": saw, "answer": claim}) is True

    async def _tool(self, arguments: dict[str, Json], call: Any) -> str:
        detail: dict[str, Json] = {"tool": call.tool, "arguments": arguments}
        match reply_of(await self._call("invoke", detail)):
            case Succeeded(_, text):
                return text
            case Refused(reason, retryable):
                raise ToolRefused(reason, retryable)
            case Doubtful(reason):
                raise ToolUnclear(reason)

    # ---- a scripted call -------------------------------------------------------------------------

    async def _call(self, op: str, detail: dict[str, Any]) -> Any:
        scripted = self.script.next(op)
        record: dict[str, Json] = {
            "op": op,
            "call": scripted.number,
            **detail,
            "startMs": self.virtual.loop.now_ms,
        }
        self.calls.append(record)
        cancels = None
        if not math.isinf(scripted.cancel_after_ms):
            cancels = self.virtual.loop.call_later(scripted.cancel_after_ms / 1000, self.cancel)
        try:
            await self._wait(scripted.ends_after_ms)
        except asyncio.CancelledError:
            end = End.TIMED_OUT if self.cancelled_at is None else End.CANCELLED
            record |= {"endMs": self.virtual.loop.now_ms, "end": end.value}
            if not scripted.ignores_abort:
                raise ScriptedError("told to stop") from None
            await self._wait(scripted.ends_after_ms)
            return scripted.item
        finally:
            if cancels is not None:
                cancels.cancel()
        end = End.RAISED if scripted.throws else End.RETURNED
        record |= {"endMs": self.virtual.loop.now_ms, "end": end.value}
        self.virtual.loop.advance(scripted.clock_at_end_ms)
        if scripted.cancels_at_end:
            self.cancel()
        if scripted.throws:
            raise ScriptedError(f"{op} call {scripted.number} fails")
        return scripted.item

    async def _wait(self, ms: float) -> None:
        if math.isinf(ms):
            await self.virtual.loop.create_future()
        await asyncio.sleep(ms / 1000)

    def cancel(self) -> None:
        """Wish the run to be cancelled, and let its worker learn of it as it renews its leases."""
        if self.cancelled_at is None:
            self.cancelled_at = self.virtual.loop.now_ms
            self.virtual.cancel(RUN)


# ---- driving -------------------------------------------------------------------------------------


def replay(case: Mapping[str, Any]) -> Outcome:
    """Run one case through the step shell; invalid options raise `InvalidBudget`."""
    with VirtualFleet() as virtual:
        world = _World(Script(case), virtual)
        fleet = virtual.fleet
        fleet.model("default", world)
        fleet.workflow(
            case_workflow(case, lookup=world.lookup, save=world.save, verify=world.verify)
        )
        fleet.enqueue("vector", goal=str(case.get("goal") or "-"), run_id=RUN)
        if case.get("cancelBeforeStart"):
            world.cancel()
        virtual.drive(RUN)
        return _outcome(world)


def _outcome(world: _World) -> Outcome:
    fleet = world.virtual.fleet
    run = fleet.get(RUN)
    assert run.reason is not None
    seen = fleet.ledger.observations(RUN)
    return Outcome(
        reason=run.reason,
        answer=run.answer,
        state={
            "version": run.version,
            "step": run.step,
            "modelCalls": run.model_calls,
            "toolCalls": run.tool_calls,
            "observations": [observation["text"] for observation in seen],
        },
        trace=list(compared(iter(fleet.trace(RUN)))),
        calls=world.calls,
        end_ms=world.virtual.loop.now_ms,
        cancel_requested_ms=world.cancelled_at,
    )


# ---- where a fleet ends otherwise ----------------------------------------------------------------


def on_a_fleet(case: Mapping[str, Any], expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a case must come to on a fleet; the vector's own expectation in almost all cases.

    It differs where the cancellation is asked for at the very instant at which a call returns. The
    reference runner judges that return first. On a fleet the ledger holds the wish before the
    return is committed, and a run that is `cancelling` only becomes `cancelled` or `reconciling`:

    1. a verification returned true: `cancelled`, not `completed`;
    2. a tool failed for good, or a read reported that it does not know: `cancelled`, not
       `tool-failed`;
    3. a write succeeded: not `cancelled`, since it did happen and nothing undoes it. A person
       decides (`unknown-effect`), and the result does not enter the state.
    """
    if not expected["calls"] or expected["cancelRequestedMs"] is None:
        return expected
    last = expected["calls"][-1]
    fault = case.get("faults", {}).get(last["op"], {}).get(str(last["call"]), {})
    if last["end"] != "returned" or not fault.get("cancelAtEnd"):
        return expected
    if expected["reason"] in ("completed", "tool-failed"):
        return _stopped(expected, "cancelled") | {"answer": None}
    written = last.get("tool") == "saveDraft"
    if written and case["results"][last["call"]]["status"] == "success":
        return _stopped(_without_last_change(expected), "unknown-effect")
    return expected


def _stopped(expected: Mapping[str, Any], reason: str) -> dict[str, Any]:
    *before, stop = expected["trace"]
    stop = {**stop, "detail": {**stop["detail"], "reason": reason}}
    return {**expected, "reason": reason, "trace": [*before, stop]}


def _without_last_change(expected: Mapping[str, Any]) -> dict[str, Any]:
    *before, moved, stop = expected["trace"]
    changed = bool(moved["detail"]["changed"])
    state = expected["state"]
    state = {
        **state,
        "step": state["step"] - 1,
        "version": state["version"] - changed,
        "observations": state["observations"][: len(state["observations"]) - changed],
    }
    stop = {
        **stop,
        "step": state["step"],
        "detail": {**stop["detail"], "stateVersion": state["version"]},
    }
    return {**expected, "state": state, "trace": [*before, stop]}


FLEET: Final = Driver(replay, on_a_fleet)
