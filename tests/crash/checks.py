"""What must hold when everything rests, whoever died and wherever: the promises I1 to I13.

The judge is the service's own records; our tables are what is judged.
"""

from __future__ import annotations

import json
from typing import Any, Final, cast

from handrail.agent.effects import QUERIES_PER_DISPATCH
from handrail.agent.review import findings
from handrail.agent.status import Reason, RunStatus
from tests.crash.bench import CANARY, Bench
from tests.crash.recovery import BOUND_MS
from tests.world import World, check

#: Statuses of an effect that say it took effect, and that it did not.
_HAPPENED: Final = frozenset({"applied", "compensating", "compensated"})
_DID_NOT: Final = frozenset({"planned", "absent"})


def judge(bench: Bench, took_ms: int) -> None:
    """Hold what the ledger says against the service's records; raises `AssertionError`."""
    once(bench)
    assert took_ms <= BOUND_MS, f"I2: it took {took_ms} ms to recover"
    for run_id in bench.runs:
        found = bench.rows("SELECT * FROM handrail_run WHERE id = :id", id=run_id)
        assert found, f"I2: {run_id} was accepted and is lost"
        [row] = found
        check(cast(World, bench), run_id)  # I3, I4, I5, I7: charges, moves, stops, no end in doubt
        paid_for(bench, run_id)
        explained(bench, row)
        ended_well(bench, row)
        nothing_after_the_wish(bench, run_id)
        tells_nothing(bench, run_id)
    for effect in bench.rows("SELECT * FROM handrail_effect"):
        as_the_service_says(bench, effect)
        proved(bench, effect)
        approved_once(bench, effect)


def once(bench: Bench) -> None:
    """I1: no intent took effect twice."""
    performed = bench.service.performed
    assert len(performed) == len({*performed}), f"I1: one intent twice: {performed}"


def paid_for(bench: Bench, run_id: str) -> None:
    """I3: each call that the service has seen was charged, what undoes a write included."""
    calls, used = bench.service.calls, bench.used(run_id)["tool_calls"]
    seen = sum(calls[f"{kind} {run_id}"] for kind in ("read", "write", "undo"))
    assert seen <= used, f"I3: {seen} calls of tools, {used} charged"


def explained(bench: Bench, row: dict[str, Any]) -> None:
    """I4, I5, I13: the trace has no gap, its moves are legal and lead to where the run is, each
    proposal has its answer, and the last stop says why, what was left and where the evidence is.
    """
    events = bench.trace(row["id"])
    found = findings(events, RunStatus(row["status"]))
    assert not found, f"I5: the trace of {row['id']} lacks something: {found}"
    stops = [event["detail"] for event in events if event["type"] == "run.stopped"]
    assert stops, f"I5: {row['id']} is {row['status']} and no stop is recorded"
    assert Reason(stops[-1]["reason"]) and stops[-1]["reason"] == row["reason"], stops[-1]
    if row["status"] == "handed_off":
        open_ = bench.ledger.people.handoffs(run_id=row["id"])
        assert len(open_) == 1, f"I2: handed off, and {len(open_)} handoffs are open"


def ended_well(bench: Bench, row: dict[str, Any]) -> None:
    """I2 and I8: it rests as such a run may rest, and `completed` is true."""
    status = row["status"]
    assert status in bench.setting.ends, f"it ended as {status}, not as {bench.setting.ends}"
    performed = bench.service.performed
    undone = f"undo:{row['id']}" in performed
    assert undone <= (status in ("compensated", "handed_off")), f"{status}, and it was undone"
    assert undone or status != "compensated", "I8: compensated, and it was not undone"
    if status == "completed":
        there = f"save:{row['id']}" in performed
        answer = json.loads(row["answer"])
        said = answer == "there is a record" or isinstance(answer, dict)
        assert said == there, f"I8: completed with {answer!r}, and the service has {there}"


def nothing_after_the_wish(bench: Bench, run_id: str) -> None:
    """I7: no write is dispatched after the wish to cancel, unless it undoes another."""
    events = bench.trace(run_id)
    wished = [event["seq"] for event in events if event["type"] == "cancel.requested"]
    sent = [
        event["seq"]
        for event in events
        if event["type"] == "tool.started"
        and event["detail"]["idempotency_key_hash"]
        and not event["detail"]["tool"].startswith("undo-")
    ]
    assert not wished or not sent or sent[-1] < wished[0], "I7: dispatched after the wish"


def tells_nothing(bench: Bench, run_id: str) -> None:
    """I13: what went in and came out of a write is not in the trace."""
    assert CANARY not in json.dumps(bench.trace(run_id)), "I13: the trace tells a secret"


def as_the_service_says(bench: Bench, effect: dict[str, Any]) -> None:
    """I10: the ledger says what the service's records say, in both directions."""
    there = effect["intent_key"] in bench.service.performed
    status = effect["status"]
    assert status not in ("dispatched", "unknown"), f"I2: an effect is {status} for ever"
    assert not (there and status in _DID_NOT), f"I10: it happened, and is recorded as {status}"
    assert there or status not in _HAPPENED, f"I10: {status}, and it never happened"


def proved(bench: Bench, effect: dict[str, Any]) -> None:
    """I9: who says that it happened has evidence; who says that it did not, its sender's word or
    two answers. Queries are bounded.
    """
    notes = bench.ledger.evidence(effect["id"])
    if effect["status"] == "applied":
        assert effect["evidence"], "I9: applied without evidence"
    if effect["status"] == "absent":
        answers = [note["detail"].get("answer") for note in notes if note["kind"] == "query"]
        word = any("refused" in note["detail"] for note in notes) or any(
            note["detail"].get("sent") is False for note in notes
        )
        assert word or answers[-2:] == ["absent", "absent"], f"I9: absent by {notes}"
    asked = bench.service.calls[f"query {effect['owner_run_id']}"]
    assert asked <= QUERIES_PER_DISPATCH * max(1, effect["attempts"]), f"I3: {asked} queries"


def approved_once(bench: Bench, effect: dict[str, Any]) -> None:
    """I6: what needs consent was sent with one, for exactly this, and used it up."""
    if effect["tool"].startswith("agreed") and effect["attempts"]:
        consents = bench.rows(
            "SELECT * FROM handrail_approval WHERE effect_id = :id", id=effect["id"]
        )
        assert len(consents) == 1, f"I6: {len(consents)} approvals were used"
        [consent] = consents
        assert consent["status"] == "consumed" and effect["approval_id"] == consent["id"]
        assert consent["arguments_hash"] == effect["arguments_hash"], "I6: something else"
