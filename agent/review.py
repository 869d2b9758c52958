"""Reading a trace back: what each round did, what became of each proposal and call, why the run
stopped, and what a trace must hold and does not.

A finding is a fault of the program or of the store, never of the run: a run that failed for a good
reason has none. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from handrail.agent import trace
from handrail.agent.status import TRANSITIONS, RunEvent, RunStatus
from handrail.canonical import Json

#: An event as the ledger hands it out: `seq`, `type`, `step`, `detail`.
Event: TypeAlias = Mapping[str, Any]

#: What may become of a proposal: the program's answers, the first of which counts.
_ANSWERS: Final = frozenset(
    {
        trace.POLICY_ALLOWED,
        trace.PROPOSAL_REJECTED,
        trace.COMPLETION_VERIFIED,
        trace.COMPLETION_FAILED,
        trace.RUN_STOPPED,
    }
)
#: What each answer and each stop must say, so that it explains something.
_EXPLAINED_BY: Final[Mapping[str, tuple[str, ...]]] = {
    trace.POLICY_ALLOWED: ("rule",),
    trace.PROPOSAL_REJECTED: ("stable_reason_code",),
    trace.RUN_STOPPED: ("reason", "category", "budget_left", "budget_used", "evidence_ref"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is missing or wrong in a trace; `code` is stable."""

    code: str
    seq: int
    problem: str

    def to_json(self) -> dict[str, Json]:
        """Return the finding as a JSON object."""
        return {"code": self.code, "seq": self.seq, "problem": self.problem}


def findings(events: Sequence[Event], status: RunStatus | None = None) -> list[Finding]:
    """Say what is missing or wrong in a trace; `status` is the stored one of a run at rest."""
    found = [*_gaps(events), *_unanswered(events), *_unexplained(events), *_moves(events, status)]
    return sorted(found, key=lambda finding: finding.seq)


def _gaps(events: Sequence[Event]) -> Iterator[Finding]:
    for number, event in enumerate(events):
        if event["seq"] != number:
            yield Finding("gap", event["seq"], f"event {number} is not there")
            return


def _unanswered(events: Sequence[Event]) -> Iterator[Finding]:
    for proposal, answer in _answered(events):
        if answer is None:
            problem = "nothing says why the proposal was allowed or rejected"
            yield Finding("unanswered-proposal", proposal["seq"], problem)


def _unexplained(events: Sequence[Event]) -> Iterator[Finding]:
    for event in events:
        wanted = _EXPLAINED_BY.get(event["type"], ())
        missing = [key for key in wanted if not event["detail"].get(key)]
        if missing:
            problem = f"{event['type']} does not say its {', '.join(missing)}"
            yield Finding("unexplained", event["seq"], problem)


def _moves(events: Sequence[Event], stored: RunStatus | None) -> Iterator[Finding]:
    """Go through the moves by the transition table, from the start to the stored status."""
    status = RunStatus.QUEUED
    for event in events:
        detail = event["detail"]
        if "event" not in detail or "from" not in detail:
            continue
        cause, before = detail["event"], detail["from"]
        after = detail.get("to", detail.get("status"))
        known = cause in {*RunEvent} and before == status
        if not known or TRANSITIONS[status].get(RunEvent(cause)) != after:
            problem = f"no move from {status} by {cause!r} to {after}"
            yield Finding("illegal-move", event["seq"], problem)
            return
        status = RunStatus(after)
    if stored is not None and status is not stored:
        problem = f"the moves lead to {status}, and the run is {stored}"
        yield Finding("another-status", len(events), problem)


def _answered(events: Sequence[Event]) -> Iterator[tuple[Event, Event | None]]:
    """Each proposal of a model with the program's answer to it, if there is one."""
    asked: Event | None = None
    for event in events:
        if event["type"] == trace.PROPOSAL_RECEIVED:
            if asked is not None:
                yield asked, None
            asked = event
        elif asked is not None and event["type"] in _ANSWERS:
            yield asked, event
            asked = None
    if asked is not None:
        yield asked, None


# ---- what happened -------------------------------------------------------------------------------


def proposals(events: Sequence[Event]) -> list[dict[str, Json]]:
    """Each proposal: its round, its kind and tool, the state version that it was made for, its
    fingerprint where it has one, and the answer with its reason.
    """
    version: Json = 0
    versions: dict[int, Json] = {}
    for event in events:
        if event["type"] == trace.OBSERVATION_BUILT:
            version = event["detail"]["state_version"]
        versions[event["seq"]] = version
    return [
        {
            "step": asked["step"],
            "kind": asked["detail"]["kind"],
            "tool": asked["detail"].get("tool_name"),
            "state_version": versions[asked["seq"]],
            "fingerprint": answer["detail"].get("fingerprint") if answer else None,
            "answer": answer["type"] if answer else None,
            "why": _why(answer["detail"]) if answer else None,
        }
        for asked, answer in _answered(events)
    ]


def _why(detail: Mapping[str, Json]) -> Json:
    for key in ("rule", "stable_reason_code", "reason"):
        if key in detail:
            return detail[key]
    if "verified" in detail:
        return "verified" if detail["verified"] else "not verified"
    return "timed out" if detail.get("timedOut") else "failed"


def calls(events: Sequence[Event]) -> list[dict[str, Json]]:
    """Each call of a tool, with the hash of its intent key (of a write) and how it ended, as far as
    the trace says: one that was cut off was aborted.
    """
    made: list[dict[str, Json]] = []
    for event in events:
        detail = event["detail"]
        match event["type"]:
            case trace.TOOL_STARTED:
                made.append(
                    {
                        "step": event["step"],
                        "tool": detail["tool"],
                        "call": detail["tool_call_id"],
                        "intent_key_hash": detail["idempotency_key_hash"],
                        "ended": None,
                    }
                )
            case trace.TOOL_FAILED | trace.RESULT_CLASSIFIED if made:
                made[-1]["ended"] = detail.get("status") or _cut_off(detail)
    return made


def _cut_off(detail: Mapping[str, Json]) -> str:
    if detail.get("cancelled"):
        return "aborted: cancelled"
    return "aborted: timed out" if detail.get("timedOut") else "raised"


def stops(events: Sequence[Event]) -> list[dict[str, Json]]:
    """Each stop of the run: its stable reason, its category, what is left, and the evidence."""
    keys = ("reason", "category", "status", "budget_left", "evidence_ref", "fingerprint")
    return [
        {key: event["detail"][key] for key in keys if key in event["detail"]}
        for event in events
        if event["type"] == trace.RUN_STOPPED
    ]


# ---- a loop's rounds, step by step ---------------------------------------------------------------

#: The five steps of a round, with the events that are their public output.
STEPS: Final[tuple[tuple[str, frozenset[str]], ...]] = (
    ("observe", frozenset({trace.OBSERVATION_BUILT})),
    ("decide", frozenset({trace.MODEL_FAILED, trace.PROPOSAL_RECEIVED, trace.FINAL})),
    (
        "act",
        frozenset(
            {
                trace.PROPOSAL_REJECTED,
                trace.POLICY_ALLOWED,
                trace.APPROVAL_REQUESTED,
                trace.TOOL_STARTED,
            }
        ),
    ),
    (
        "validate",
        frozenset(
            {
                trace.TOOL_FAILED,
                trace.RESULT_CLASSIFIED,
                trace.RESULT_VERIFIED,
                trace.COMPLETION_FAILED,
                trace.COMPLETION_VERIFIED,
                trace.PRECONDITION_CHECKED,
                trace.PRECONDITION_FAILED,
                trace.PLAN_REFUSED,
                trace.RECONCILIATION_REQUIRED,
                trace.EFFECT_RESOLVED,
            }
        ),
    ),
    (
        "update",
        frozenset(
            {
                trace.STATE_TRANSITIONED,
                trace.STAGE_FINISHED,
                trace.RUN_COMPLETED,
                trace.RUN_STOPPED,
                trace.RUN_RESUMED,
            }
        ),
    ),
)


def rounds(events: Sequence[Event], goal: str) -> list[dict[str, Any]]:
    """The rounds of a run's agent loops, each in its five steps with their public output.

    The first step shows what the round began with: the goal, the state and the tools.
    """
    found: list[dict[str, list[Json]]] = []
    under_way = False
    for event in events:
        if event["type"] == trace.OBSERVATION_BUILT:
            found.append({name: [] for name, _ in STEPS})
            under_way = True
        if not under_way:
            continue  # a fixed stage: no model decides there
        for name, types in STEPS:
            if event["type"] in types:
                begun = {"goal": goal} if event["type"] == trace.OBSERVATION_BUILT else {}
                found[-1][name].append({"event": event["type"], **begun, **event["detail"]})
        under_way = event["type"] != trace.STAGE_FINISHED
    return [
        {
            "round": number,
            "steps": [
                {"step": f"{place}/{len(STEPS)}", "name": name, "output": list(output)}
                for place, (name, output) in enumerate(parts.items(), start=1)
            ],
        }
        for number, parts in enumerate(found, start=1)
    ]
