"""`handrail demo`: a whole fleet on this machine, for half a minute, and its account at the end.

A shop, a payment provider in a process of its own that misbehaves as the mails say, an embedded
Valkey, an SQLite ledger, real worker processes and a beat, all in a temporary directory. This
program plays the customers, and confirms their refunds for them. Whatever happens, also when it is
interrupted or killed, nothing of it is left behind.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from handrail import Principal
from handrail.agent import trace
from handrail.agent.people import Role
from handrail.agent.status import TERMINAL, RunStatus
from handrail.demo.app import PERMISSION, fleet
from handrail.demo.display import Display
from handrail.demo.messages import Message
from handrail.demo.world import World, world
from handrail.runs import Run

LOOK_EVERY_S: Final = 0.1
LONGEST_S: Final = 120.0  # it takes a quarter of that; a machine that is very busy, more
ANSWER_S: Final = 10.0  # for what this program itself asks the provider

#: Where a run of the demo may stay. Whoever is asked a question here does not answer.
AT_REST: Final = TERMINAL | {RunStatus.HANDED_OFF, RunStatus.AWAITING_INPUT}


@dataclass(frozen=True, slots=True)
class Ended:
    """One run at its end, beside what its mail called for."""

    message: Message
    run: Run
    order_id: str | None  # that the plan was about
    settled_by_reconciler: bool

    @property
    def problems(self) -> list[str]:
        """In what it differs from what was expected."""
        expect = self.message["expect"]
        pairs = {
            "status": (self.run.status, expect["status"]),
            "reason": (self.run.reason, expect["reason"]),
            "order": (self.order_id, expect["order_id"]),
        }
        return [
            f"{self.message['id']}: {name} is {found}, expected: {wanted}"
            for name, (found, wanted) in pairs.items()
            if found != wanted
        ]

    def used(self, budget: str) -> str:
        """How much of a budget was used, and how much there was."""
        used = self.run.budget_used[budget]
        return f"{used}/{used + self.run.budget_left[budget]}"

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        run = self.run
        return {
            "mail": self.message["id"],
            "about": self.message["about"],
            "status": run.status,
            "reason": run.reason,
            "order_id": self.order_id,
            "expected": dict(self.message["expect"]),
            "as_expected": not self.problems,
            "budget_used": dict(run.budget_used),
            "budget_left": dict(run.budget_left),
            "settled_by_reconciler": self.settled_by_reconciler,
        }


@dataclass(frozen=True, slots=True)
class Refunded:
    """One charge that somebody wanted to give back: our record of it, and the provider's own."""

    order_id: str
    charge_id: str
    ours: Sequence[Mapping[str, Any]]  # effects
    theirs: Sequence[Mapping[str, Any]]  # refunds
    requests: int  # that reached the provider

    @property
    def agree(self) -> bool:
        """Whether both say the same, and the money went back at most once."""
        applied = [
            (effect["id"], effect["arguments"]["amount_cents"])
            for effect in self.ours
            if effect["status"] == "applied"
        ]
        paid = [(refund["key"], refund["amount_cents"]) for refund in self.theirs]
        settled = all(effect["status"] in ("applied", "absent", "planned") for effect in self.ours)
        return settled and applied == paid and len(paid) <= 1

    @property
    def paid_cents(self) -> int:
        """What the provider has paid out."""
        return sum(refund["amount_cents"] for refund in self.theirs)

    def to_json(self) -> dict[str, Any]:
        """Return both records as a JSON object."""
        return {
            "order_id": self.order_id,
            "charge_id": self.charge_id,
            "ours": [
                {"key": e["id"], "status": e["status"], "attempts": e["attempts"], **e["arguments"]}
                for e in self.ours
            ],
            "provider": [dict(refund) for refund in self.theirs],
            "requests": self.requests,
            "agree": self.agree,
        }


@dataclass(frozen=True, slots=True)
class Story:
    """How one refund went whose answer was lost: (time since the request, what happened)."""

    mail: str
    about: str
    events: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a demo. It is as expected if nothing of it is a problem."""

    runs: Sequence[Ended]
    refunds: Sequence[Refunded]
    story: Story
    problems: Sequence[str]
    confirmed: int
    workers_killed: int
    seconds: float

    @property
    def as_expected(self) -> bool:
        """Whether every run ended as its mail calls for, and both records agree."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "as_expected": self.as_expected,
            "problems": list(self.problems),
            "runs": [ended.to_json() for ended in self.runs],
            "refunds": [refund.to_json() for refund in self.refunds],
            "confirmed_for_customers": self.confirmed,
            "workers_killed": self.workers_killed,
            "seconds": round(self.seconds, 1),
        }


@dataclass(slots=True)
class Demo:
    """One performance. `kill`: a worker is killed in the middle of a refund, and replaced."""

    messages: Sequence[Message]
    display: Display
    workers: int = 2
    kill: bool = False
    confirmed: int = 0
    killed: int = 0
    corrected: set[str] = field(default_factory=set)  # whose orders are as they will stay

    def run(self) -> Outcome:
        """Start everything, let it run to its end, stop everything, and say what came of it."""
        self.display.begin(self.messages, workers=self.workers)
        with _ending_in_order(), world(self.workers) as around:
            outcome = self._perform(around)
        self.display.end(outcome)
        return outcome

    def _perform(self, world: World) -> Outcome:
        started = time.monotonic()
        for message in self.messages:
            for fault in message.get("faults", ()):
                world.provider.set_fault(fault, ANSWER_S)
            fleet.enqueue(
                "refund",
                goal="Return what this customer was charged twice, and nothing else.",
                input={"request_id": message["id"], "text": message["text"]},
                principal=Principal(message["from"], frozenset({PERMISSION})),
                run_id=message["id"],
            )
        problems: list[str] = []
        with self.display.live():
            while not self._is_over(started, world, problems):
                self._confirm(world)
                if self.kill and not self.killed:
                    self._kill_in_the_middle(world)
                time.sleep(LOOK_EVERY_S)
        seconds = time.monotonic() - started
        return self._account(world, problems, seconds)

    def _is_over(self, started: float, world: World, problems: list[str]) -> bool:
        rows = fleet.ledger.list_runs(limit=len(self.messages))
        self.display.update(rows)
        if all(RunStatus(row["status"]) in AT_REST for row in rows):
            return True
        if time.monotonic() - started > LONGEST_S:
            problems.append(f"not everything came to rest within {LONGEST_S:g} s")
        problems += world.lost_processes()
        return bool(problems)

    def _confirm(self, world: World) -> None:
        """Agree to exactly what each parked run shows, as its customer would."""
        for waiting in fleet.ledger.people.approvals():
            self._correct_prices(waiting.run_id, world)
            customer = Principal(waiting.subject, roles=frozenset({Role.APPROVER}))
            token = fleet.desk.issue_token(waiting.id, by=customer, to=customer.subject)
            fleet.approve(token, by=customer)
            self.confirmed += 1
            self.display.confirmed(waiting.shown)

    def _correct_prices(self, run_id: str, world: World) -> None:
        """Let the shop change an order that its customer is about to confirm a refund for."""
        message = next(message for message in self.messages if message["id"] == run_id)
        if message["id"] in self.corrected:
            return
        self.corrected.add(message["id"])
        for correction in message.get("corrections", ()):
            world.shop.correct_price(**correction)
            self.display.note(f"the shop has corrected the price of {correction['order_id']}")

    def _kill_in_the_middle(self, world: World) -> None:
        """Kill the worker that waits for a slow answer to a refund, with all else that it does."""
        victim = next(m["id"] for m in self.messages if _suffers(m, "delay_ms"))
        if not any(e["status"] == "dispatched" for e in fleet.ledger.effects(run_id=victim)):
            return
        host, pid, _ = fleet.ledger.read(victim)["holder"].rsplit(":", 2)
        assert host == socket.gethostname()
        os.kill(int(pid), signal.SIGKILL)
        self.killed += 1
        self.display.note(f"killed worker {pid} in the middle of the refund for {victim}")
        world.replace_worker()

    # ---- the account ---------------------------------------------------------------------------

    def _account(self, world: World, problems: list[str], seconds: float) -> Outcome:
        records = world.provider.records(ANSWER_S)
        ended = [_ended(message) for message in self.messages]
        refunds = compared(fleet.ledger.effects(), records)
        problems += [problem for end in ended for problem in end.problems]
        problems += [
            f"{refund.order_id}, {refund.charge_id}: our record and the provider's disagree"
            for refund in refunds
            if not refund.agree
        ]
        problems += wrong_payments(self.messages, refunds)
        if self.kill and not self.killed:
            problems.append("no worker was killed: the refund was over too soon")
        story = _story(next(m for m in self.messages if _suffers(m, "lose_response")))
        return Outcome(ended, refunds, story, problems, self.confirmed, self.killed, seconds)


def _ended(message: Message) -> Ended:
    run = fleet.get(message["id"])
    plan: Any = run.outputs.get("check_duplicate")
    settled = any(event["type"] == trace.EFFECT_RESOLVED for event in fleet.trace(run))
    return Ended(message, run, plan["order_id"] if plan else None, settled)


def compared(effects: Sequence[Mapping[str, Any]], records: Mapping[str, Any]) -> list[Refunded]:
    """Every charge that is on either side's record."""
    ours = [effect for effect in effects if effect["tool"] == "refund"]
    theirs = records["refunds"]
    charges = {
        *((e["arguments"]["order_id"], e["arguments"]["charge_id"]) for e in ours),
        *((refund["order_id"], refund["charge_id"]) for refund in theirs),
    }
    return [
        Refunded(
            order_id,
            charge_id,
            [e for e in ours if e["arguments"]["charge_id"] == charge_id],
            [refund for refund in theirs if refund["charge_id"] == charge_id],
            sum(request["charge_id"] == charge_id for request in records["requests"]),
        )
        for order_id, charge_id in sorted(charges)
    ]


def wrong_payments(messages: Sequence[Message], refunds: Sequence[Refunded]) -> list[str]:
    """Where the provider's own records differ from what the mails call for."""
    wanted = {
        (str(expect["order_id"]), expect["refund_cents"])
        for expect in (message["expect"] for message in messages)
        if expect["refund_cents"] is not None
    }
    paid = Counter((refund.order_id, refund.paid_cents) for refund in refunds if refund.theirs)
    return [
        f"{order_id}: the provider paid out {cents} cents {paid[order_id, cents]} times,"
        f" expected: {int((order_id, cents) in wanted)} times"
        for order_id, cents in sorted({*wanted, *paid})
        if paid[order_id, cents] != ((order_id, cents) in wanted)
    ]


def _story(message: Message) -> Story:
    """Tell from the trace what became of the refund that a mail led to."""
    events = fleet.trace(message["id"])
    starts = [
        e["at"]
        for e in events
        if e["type"] == trace.TOOL_STARTED and e["detail"]["tool"] == "refund"
    ]
    told = []
    for event in events if starts else ():
        text = _told(event)
        if text and event["at"] >= starts[0]:
            told.append((f"{event['at'] - starts[0]:,} ms", text))
    return Story(message["id"], message["about"], told)


def _told(event: Mapping[str, Any]) -> str | None:
    detail = event["detail"]
    match event["type"]:
        case trace.TOOL_STARTED:
            return f"{detail['tool']} is called, dispatched before in a commit of its own"
        case trace.RECONCILIATION_REQUIRED:
            return f"no proof of {detail['tool']} ({detail['trigger']}): to be found out"
        case trace.RUN_MOVED:
            return f"{detail['from']} -> {detail['to']} ({detail['event']})"
        case trace.EFFECT_RESOLVED:
            return f"asked, and {detail['verdict']}: {detail['evidence_ref']}"
        case trace.COMPLETION_VERIFIED:
            return f"looked at independently: {detail}"
        case trace.RUN_STOPPED:
            return f"{detail['from']} -> {detail['status']} ({detail['reason']})"
    return None


def _suffers(message: Message, switch: str) -> bool:
    """Whether the provider is told to misbehave in this way for a mail."""
    return any(switch in fault for fault in message.get("faults", ()))


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and a closed terminal end the demo, but not its clean-up."""

    def leave(number: int, _: object) -> None:
        for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(again, signal.SIG_IGN)  # the clean-up takes seconds, and is bounded
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, leave)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
