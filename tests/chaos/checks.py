"""What every run has promised, held against the provider's own records after the peace.

The numbers of the invariants are used throughout the project's tests: I1 no double effect, I2 no
lost run, I3 no overspend, I4 legal transitions only, I5 every stop explained, I6 an approval is
used once and exactly, I7 nothing started after a cancel, I8 a completion is true, I9 unknown leaves
by evidence only, I10 the ledger agrees with the provider in both directions, I13 a trace without
gaps and secrets.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from handrail.agent.effects import QUERIES_PER_DISPATCH
from handrail.agent.status import TERMINAL, Reason, RunStatus, category_of
from handrail.errors import IllegalTransition
from handrail.ledger.database import Database
from tests.chaos.app import intent_key
from tests.chaos.kinds import BY_NAME, CANARY, READ
from tests.world import replayed

Row = Mapping[str, Any]

TITLES: Final[Mapping[str, str]] = {
    "I1": "double effects",
    "I2": "lost runs",
    "I3": "overspends",
    "I4": "illegal transitions",
    "I5": "unexplained stops",
    "I6": "approvals misused",
    "I7": "starts after a cancel, or ends over a doubt",
    "I8": "false completions",
    "I9": "doubts left without evidence",
    "I10": "disagreements with the provider",
    "I13": "faulty traces",
}
#: Effect statuses under which the provider may have it on record.
_MAY_BE_THERE: Final = frozenset(
    {"applied", "handed_off", "compensating", "compensated", "contradicted"}
)
_LOST: Final = frozenset({"lease.lost", "effect-unknown"})


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that does not hold, and of what."""

    invariant: str
    about: str
    what: str


@dataclass(kw_only=True)
class Seen:
    """Everything on record after the peace, on both sides."""

    accepted: Collection[str]
    asked: Mapping[str, Row]
    ran_out: Collection[tuple[str, int]]
    runs: Mapping[str, Row]
    commits: Mapping[str, Sequence[Row]]  # of each run's trace, in order
    effects: Sequence[Row]
    approvals: Sequence[Row]
    handoffs: Sequence[Row]
    evidence: Mapping[str, Sequence[Row]]  # by effect
    arrivals: Counter[tuple[str, str]] = field(default_factory=Counter)  # run, verb
    queries: Counter[tuple[str, str]] = field(default_factory=Counter)  # tool, intent
    outside: Mapping[tuple[str, str], Sequence[Row]] = field(default_factory=dict)  # tool, intent

    @cached_property
    def owned(self) -> Mapping[str, Sequence[Row]]:
        """The effects of each run that has sent them."""
        return _grouped(self.effects, "owner_run_id")

    @cached_property
    def handoffs_of(self) -> Mapping[str, Sequence[Row]]:
        """The handoffs of each run."""
        return _grouped(self.handoffs, "run_id")

    @cached_property
    def effect(self) -> Mapping[str, Row]:
        """The effects by their ids."""
        return {effect["id"]: effect for effect in self.effects}

    def events(self, run_id: str) -> list[dict[str, Any]]:
        """A run's trace."""
        return [
            {"seq": commit["seq"] + n, "at": commit["at"], **event}
            for commit in self.commits[run_id]
            for n, event in enumerate(commit["events"])
        ]


def _grouped(rows: Sequence[Row], column: str) -> Mapping[str, Sequence[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row[column]].append(row)
    return found


def read(
    database: Database,
    provider_records: Path,
    *,
    accepted: Collection[str],
    asked: Mapping[str, Row],
    ran_out: Collection[tuple[str, int]],
) -> Seen:
    """Read both sides."""

    def rows(table: str, order: str) -> list[dict[str, Any]]:
        return database.run(f"SELECT * FROM {table} ORDER BY {order}", {})

    commits: dict[str, list[Row]] = defaultdict(list)
    for row in rows("handrail_trace", "run_id, seq"):
        commits[row["run_id"]].append(
            {**row, "text": row["events"], "events": json.loads(row["events"])}
        )
    evidence: dict[str, list[Row]] = defaultdict(list)
    for row in rows("handrail_evidence", "at, id"):
        evidence[row["effect_id"]].append({**row, "detail": json.loads(row["detail"])})
    with sqlite3.connect(f"file:{provider_records}?mode=ro", uri=True) as provider:
        provider.row_factory = sqlite3.Row
        arrived = [dict(row) for row in provider.execute("SELECT * FROM arrivals")]
        happened = [dict(row) for row in provider.execute("SELECT * FROM effects")]
    provider.close()
    outside: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in happened:
        outside[row["kind"], row["intent"]].append(row)
    return Seen(
        accepted=accepted,
        asked=asked,
        ran_out=ran_out,
        runs={row["id"]: row for row in rows("handrail_run", "id")},
        commits=commits,
        effects=[
            {**row, "terms": json.loads(row["terms"])} for row in rows("handrail_effect", "id")
        ],
        approvals=rows("handrail_approval", "id"),
        handoffs=[
            {**row, "package": json.loads(row["package"])} for row in rows("handrail_handoff", "id")
        ],
        evidence=evidence,
        arrivals=Counter((row["run"], row["verb"]) for row in arrived),
        queries=Counter((row["kind"], row["intent"]) for row in arrived if row["verb"] == "find"),
        outside=outside,
    )


def violations(seen: Seen) -> list[Violation]:
    """Everything that is not as promised."""
    found: list[Violation] = []
    for check in (_effects_happened_once, _nothing_is_lost, _approvals, _both_sides_agree):
        found += check(seen)
    for run_id, row in seen.runs.items():
        for check_run in (_spending, _moves, _stops, _cancel, _completion, _doubts, _trace):
            found += check_run(seen, run_id, row)
    return found


# ---- across runs ---------------------------------------------------------------------------------


def _effects_happened_once(seen: Seen) -> Iterator[Violation]:
    for (kind, intent), effects in seen.outside.items():
        if len(effects) > 1:
            when = ", ".join(f"{effect['at']} for {effect['run']}" for effect in effects)
            yield Violation("I1", intent, f"{kind} happened {len(effects)} times: {when}")


def _nothing_is_lost(seen: Seen) -> Iterator[Violation]:
    for run_id in seen.accepted:
        if run_id not in seen.runs:
            yield Violation("I2", run_id, "it was accepted, and is not in the ledger")
    for run_id, row in seen.runs.items():
        status = RunStatus(row["status"])
        if status not in TERMINAL and status is not RunStatus.HANDED_OFF:
            yield Violation("I2", run_id, f"it is still {status} after the peace")
        if status is RunStatus.HANDED_OFF and not seen.handoffs_of.get(run_id):
            yield Violation("I2", run_id, "it is handed off, and nobody is told")


def _approvals(seen: Seen) -> Iterator[Violation]:
    approvals = {approval["id"]: approval for approval in seen.approvals}
    used = Counter(effect["approval_id"] for effect in seen.effects if effect["approval_id"])
    for effect in seen.effects:
        kind, about = BY_NAME[effect["tool"]], effect["intent_key"]
        if not kind.confirmed or not effect["attempts"]:
            continue
        approval = approvals.get(effect["approval_id"] or "")
        if approval is None:
            yield Violation("I6", about, "it was sent without an approval")
            continue
        sent_at = effect["first_dispatched_at"]
        if used[approval["id"]] != 1 or approval["effect_id"] != effect["id"]:
            yield Violation("I6", about, "its approval served another effect, too")
        if approval["status"] != "consumed" or not approval["decided_by"]:
            yield Violation("I6", about, f"its approval is {approval['status']}")
        elif not approval["decided_at"] <= sent_at < approval["expires_at"]:
            yield Violation("I6", about, "it was sent before or after the approval held")
        if approval["arguments_hash"] != effect["arguments_hash"]:
            yield Violation("I6", about, "something else was approved")


def _both_sides_agree(seen: Seen) -> Iterator[Violation]:
    ledger = {(effect["tool"], effect["intent_key"]): effect for effect in seen.effects}
    for (kind, intent), happened in seen.outside.items():
        effect = ledger.get((kind, intent))
        status = "not known" if effect is None else effect["status"]
        if status not in _MAY_BE_THERE:
            yield Violation("I10", intent, f"{kind} happened, and in the ledger it is {status}")
        elif effect is not None and effect["status"] == "applied":
            told = json.loads(effect["result"])["number"]
            if told not in [there["number"] for there in happened]:
                yield Violation("I10", intent, f"the ledger's receipt {told} is not the provider's")
    for (kind, intent), effect in ledger.items():
        if effect["status"] == "applied" and (kind, intent) not in seen.outside:
            yield Violation("I10", intent, f"{kind} is applied in the ledger, and did not happen")
        if effect["status"] in ("dispatched", "unknown", "compensating"):
            yield Violation("I10", intent, f"{kind} is still {effect['status']} after the peace")
        if effect["status"] == "compensated" and not _undone(seen, kind, intent):
            yield Violation(
                "I10", intent, f"{kind} is compensated in the ledger, and was not undone"
            )


# ---- run by run ----------------------------------------------------------------------------------


def _spending(seen: Seen, run_id: str, row: Row) -> Iterator[Violation]:
    limits = json.loads(row["budget"])
    made = {
        "model_calls": seen.arrivals[run_id, "ask"],
        "tool_calls": seen.arrivals[run_id, "look"] + seen.arrivals[run_id, "apply"],
    }
    for budget, calls in made.items():
        charged = limits[budget] - row[f"{budget}_left"]
        if calls > charged:
            yield Violation("I3", run_id, f"{calls} {budget} were made, {charged} charged")
    for budget in ("steps", "model_calls", "tool_calls"):
        if not 0 <= row[f"{budget}_left"] <= limits[budget]:
            yield Violation("I3", run_id, f"{row[f'{budget}_left']} {budget} are left")


def _moves(seen: Seen, run_id: str, row: Row) -> Iterator[Violation]:
    try:
        reached = replayed(seen.events(run_id))
    except (AssertionError, IllegalTransition, KeyError) as error:
        yield Violation("I4", run_id, f"its moves: {error!r}")
        return
    if not reached == row["traced_status"] == row["status"]:
        yield Violation("I4", run_id, f"its trace leads to {reached}, it is {row['status']}")


def _stops(seen: Seen, run_id: str, row: Row) -> Iterator[Violation]:
    events = seen.events(run_id)
    resumed = [at for at, event in enumerate(events) if event["type"] == "run.resumed"]
    episode = events[resumed[-1] if resumed else 0 :]
    stops = [event["detail"] for event in episode if event["type"] == "run.stopped"]
    if len(stops) != 1:
        yield Violation("I5", run_id, f"{len(stops)} stops explain that it is {row['status']}")
        return
    [stop] = stops
    if stop["reason"] != row["reason"]:
        yield Violation("I5", run_id, f"it stopped for {stop['reason']}, it says {row['reason']}")
    known = stop["reason"] in {*Reason} and stop["category"] == category_of(Reason(stop["reason"]))
    if not known or not stop.get("budget_left") or not stop.get("evidence_ref"):
        yield Violation("I5", run_id, "its stop lacks category, budget or evidence")


def _cancel(seen: Seen, run_id: str, row: Row) -> Iterator[Violation]:
    wished = False
    for event in seen.events(run_id):
        wished = wished or event["type"] == "cancel.requested"
        detail = event["detail"]
        sends = event["type"] == "tool.started" and detail.get("idempotency_key_hash")
        if wished and sends and not BY_NAME[detail["tool"]].undoes:
            yield Violation("I7", run_id, "a write was sent after the cancel")
    open_still = [
        effect["intent_key"]
        for effect in seen.owned.get(run_id, ())
        if effect["status"] in ("dispatched", "unknown")
    ]
    if open_still and RunStatus(row["status"]) in TERMINAL:
        yield Violation("I7", run_id, f"it is {row['status']} over {', '.join(open_still)}")


def _completion(seen: Seen, run_id: str, row: Row) -> Iterator[Violation]:
    if row["status"] != RunStatus.COMPLETED:
        return
    for move in seen.asked[run_id]["input"]["moves"]:
        tool, item = move["tool"], move["item"]
        intent = intent_key(tool, item)
        if tool != READ and (tool, intent) not in seen.outside:
            yield Violation("I8", run_id, f"it is completed, and {tool} of {item} did not happen")
        if tool != READ and _undone(seen, tool, intent):
            yield Violation("I8", run_id, f"it is completed, and {tool} of {item} was undone")


def _undone(seen: Seen, tool: str, intent: str) -> bool:
    """Whether the provider has undone a write."""
    undoing = BY_NAME[tool].undone_by
    return (undoing, intent.replace(tool, undoing, 1)) in seen.outside


def _doubts(seen: Seen, run_id: str, row: Row) -> Iterator[Violation]:
    for event in seen.events(run_id):
        detail = event["detail"]
        if event["type"] == "effect.resolved":
            effect = seen.effect[detail["effect"]]
            if not _is_proved(seen.evidence[effect["id"]], detail["verdict"], event["at"]):
                what = f"{effect['intent_key']} was found {detail['verdict']} without evidence"
                yield Violation("I9", run_id, what)
        left = event["type"] == "run.moved" and detail["from"] == RunStatus.RECONCILING
        if left and detail["event"] == "no-proof" and not seen.handoffs_of.get(run_id):
            yield Violation("I9", run_id, "a doubt was given up without a handoff")
    for effect in seen.owned.get(run_id, ()):
        asked = seen.queries[effect["tool"], effect["intent_key"]]
        pending = sum(
            note["kind"] == "query" and note["detail"]["answer"] == "pending"
            for note in seen.evidence[effect["id"]]
        )
        # Contrary evidence grants the queries of one more dispatch.
        allowed = QUERIES_PER_DISPATCH * (effect["attempts"] + 1) + pending
        if asked > allowed:
            yield Violation("I9", run_id, f"{asked} queries, {allowed} were allowed")


def _is_proved(evidence: Sequence[Row], verdict: str, at: int) -> bool:
    """Whether what was known by then proves a verdict: a receipt or a record of it, or two answers
    that there is none.
    """
    before = [note for note in evidence if note["at"] <= at]
    answers = [note["detail"]["answer"] for note in before if note["kind"] == "query"]
    if verdict == "applied":
        receipts = [note for note in before if "receipt" in note["detail"]]
        return "applied" in answers or bool(receipts)
    return answers.count("absent") >= 2


def _trace(seen: Seen, run_id: str, row: Row) -> Iterator[Violation]:
    events = seen.events(run_id)
    if [event["seq"] for event in events] != [*range(row["trace_seq"])]:
        yield Violation("I13", run_id, "its trace has a gap")
    if any(CANARY in commit["text"] for commit in seen.commits[run_id]):
        yield Violation("I13", run_id, "its trace tells what is nobody's business")


# ---- figures -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recovery:
    """How long a run needed to move on: from the end of its lease, or from when its effect became
    unknown, to the first event of its trace that is not that loss itself.
    """

    run_id: str
    lost: str  # lease or effect
    seconds: float


def recoveries(seen: Seen) -> list[Recovery]:
    """Of every run that lost something, how long it took."""
    found = [
        recovery
        for run_id, lease_until in seen.ran_out
        if (recovery := _recovered(seen, run_id, "lease", lease_until)) is not None
    ]
    for run_id, commits in seen.commits.items():
        for commit in commits:
            if _losses(commit) and not _by_lost_worker(commit):
                recovery = _recovered(seen, run_id, "effect", commit["at"])
                found += [] if recovery is None else [recovery]
    return found


def _losses(commit: Row) -> frozenset[str]:
    causes = {event["detail"].get("event") for event in commit["events"]}
    return _LOST & (causes | {event["type"] for event in commit["events"]})


def _by_lost_worker(commit: Row) -> bool:
    """Whether what a commit lost is counted from the end of its lease."""
    triggers = {event["detail"].get("trigger") for event in commit["events"]}
    return "worker-lost" in triggers or "lease.lost" in _losses(commit)


def _recovered(seen: Seen, run_id: str, lost: str, since: int) -> Recovery | None:
    for commit in seen.commits.get(run_id, ()):
        if commit["at"] > since and not _losses(commit):
            return Recovery(run_id, lost, (commit["at"] - since) / 1_000)
    return None  # it has not moved on: a lost run, which is counted as such


@dataclass(slots=True)
class HandedOff:
    """How often a kind of tool came to a person."""

    used: int = 0
    in_doubt: int = 0  # nobody could tell, or the fleet gave up
    undone: int = 0  # by a cancel
    cancelled: int = 0  # it had happened, the run was cancelled, and nothing undoes it

    @property
    def rate(self) -> float:
        """The share that came to a person because of a doubt."""
        return self.in_doubt / self.used if self.used else 0.0


def handed_off(seen: Seen) -> dict[str, HandedOff]:
    """By kind of tool: effects that were sent (of the read: runs that read), and how many of those
    a person was called for.
    """
    found = {name: HandedOff() for name in (READ, *BY_NAME)}
    for effect in seen.effects:
        found[effect["tool"]].used += effect["attempts"] > 0
        found[effect["tool"]].undone += effect["status"] == "compensated"
    found[READ].used = sum(verb == "look" for _, verb in seen.arrivals)
    for handoff in seen.handoffs:
        package = handoff["package"]
        pending = package["pending_action"]
        about = seen.effect.get(handoff["effect_id"] or "")
        tool = about["tool"] if about is not None else None
        if isinstance(pending, dict) and tool is None:
            tool = pending.get("tool")
        kind = found.setdefault(tool or "no tool", HandedOff())
        if str(package.get("problem", "")).startswith("cancelled after"):
            kind.cancelled += 1
        else:
            kind.in_doubt += 1
    return found
