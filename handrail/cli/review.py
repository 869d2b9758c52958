"""What `handrail trace` says beyond the events: its audit and diagnosis, and a loop's rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handrail.agent import review
from handrail.agent.status import RunStatus
from handrail.canonical import Json
from handrail.fleet import Fleet
from handrail.terminal import compact, console, details, heading, say, table


def reviewed(fleet: Fleet, run_id: str) -> dict[str, Any]:
    """Audit and diagnose a stored run: what it proposed, called and proved, and what is missing."""
    run, events = fleet.get(run_id), fleet.trace(run_id)
    stored = RunStatus(run.status) if run.rests else None
    found = review.findings(events, stored)
    return {
        "run_id": run_id,
        "status": run.status,
        "ok": not found,
        "findings": [finding.to_json() for finding in found],
        "proposals": review.proposals(events),
        "calls": review.calls(events),
        "effects": [_effect(fleet, effect) for effect in fleet.ledger.effects(run_id=run_id)],
        "verifications": [
            event["detail"] for event in events if event["type"].startswith("completion.")
        ],
        "stops": review.stops(events),
    }


def _effect(fleet: Fleet, effect: dict[str, Any]) -> dict[str, Any]:
    learned = fleet.ledger.evidence(effect["id"])
    return {
        "tool": effect["tool"],
        "status": effect["status"],
        "attempts": effect["attempts"],
        "intent_key_hash": effect["id"],
        "queries": [seen["detail"]["answer"] for seen in learned if seen["kind"] == "query"],
        "evidence": effect["evidence"],
    }


def show_review(found: dict[str, Any]) -> None:
    """Print what `reviewed` found, for people."""
    for title in ("proposals", "calls", "effects"):
        _section(title, found[title])
    for verification in found["verifications"]:
        heading("verification of the claimed completion")
        say(compact(verification))
    for stop in found["stops"]:
        heading("stopped")
        console().print(details({name: _shown(value) for name, value in stop.items()}))
    heading("audit")
    for finding in found["findings"]:
        say(f"{finding['code']} at event {finding['seq']}: {finding['problem']}")
    if found["ok"]:
        say("every proposal has its answer, every move is legal, every stop is explained")


def show_rounds(found: Sequence[dict[str, Any]]) -> None:
    """Print the rounds of a run's loops, for people."""
    for one in found:
        heading(f"round {one['round']}")
        for step in one["steps"]:
            say(f"{step['step']} {step['name']}")
            for output in step["output"] or [{"event": "none"}]:
                rest = {name: value for name, value in output.items() if name != "event"}
                say(f"    {output['event']} {compact(rest) if rest else ''}".rstrip())


def _section(title: str, rows: Sequence[dict[str, Json]]) -> None:
    if rows:
        columns = [name.replace("_", " ") for name in rows[0]]
        heading(title)
        console().print(table(columns, ([_shown(cell) for cell in row.values()] for row in rows)))


def _shown(value: Json) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else compact(value)
