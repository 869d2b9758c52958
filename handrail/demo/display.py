"""What the demo shows: a live table, plain lines where there is no terminal, and the account."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from rich.live import Live
from rich.table import Table
from rich.text import Text

from handrail.agent.status import CLAIMABLE, TERMINAL, WITH_PERSON, RunStatus
from handrail.demo.messages import Message
from handrail.demo.world import SHORT_TIMES
from handrail.terminal import console, say, table

if TYPE_CHECKING:
    from handrail.demo.show import Outcome

STYLES: Final[Mapping[str, str]] = {
    RunStatus.COMPLETED: "green",
    RunStatus.FAILED: "red",
    RunStatus.HANDED_OFF: "yellow",
    RunStatus.AWAITING_INPUT: "yellow",
    RunStatus.AWAITING_APPROVAL: "blue",
    RunStatus.RECONCILING: "magenta",
}
ON_THE_WAY: Final = CLAIMABLE  # not worth a line
AROUND_THE_TABLE: Final = 5  # lines of a terminal that the live table must leave free


class Display:
    """Says nothing; the other displays say what they add."""

    def begin(self, messages: Sequence[Message], *, workers: int) -> None:
        """The demo is being started."""

    @contextmanager
    def live(self) -> Iterator[None]:
        """Around the time in which runs move."""
        yield

    def update(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """How the runs stand now, as the ledger lists them."""

    def note(self, text: str) -> None:
        """Something worth a line has happened."""

    def end(self, outcome: Outcome) -> None:
        """The demo is over."""

    def confirmed(self, approval: Mapping[str, Any]) -> None:
        """A refund was confirmed for its customer."""
        action = ", ".join(f"{name}={value}" for name, value in approval["arguments"].items())
        tool = approval["tool"]
        self.note(f"{approval['run']}: confirmed on the customer's behalf: {tool}({action})")


class Lines(Display):
    """One line for each move of a run, and the account."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._seen: dict[str, str] = {}

    def begin(self, messages: Sequence[Message], *, workers: int) -> None:
        lease, stall = SHORT_TIMES["lease_ms"] // 1000, SHORT_TIMES["max_stall_ms"] // 1000
        for line in (
            f"Handrail demo: {len(messages)} mails of customers who say they were charged twice.",
            f"{workers} worker processes, a beat, an embedded Valkey, an SQLite ledger, a shop,",
            "and a payment provider in its own process that loses answers: gone at the end.",
            "A planner by rule plays the model. Refunds are confirmed on the customers' behalf.",
            f"To be short, a lease lasts {lease} s here, and a stall {stall} s at most.",
            "",
        ):
            say(line)

    def update(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            stands = " ".join(filter(None, (row["status"], row["reason"])))
            if row["status"] not in ON_THE_WAY and self._seen.get(row["id"]) != stands:
                self._seen[row["id"]] = stands
                self.note(f"{row['id']}: {stands}")

    def note(self, text: str) -> None:
        say(f"{time.monotonic() - self._started:6.1f} s  {text}")

    def end(self, outcome: Outcome) -> None:
        say()
        out = console()
        out.print(_runs(outcome))
        say()
        say("Refunds: our ledger beside the payment provider's own records", style="bold")
        out.print(_refunds(outcome))
        if outcome.story:
            say()
            say(f"{outcome.story.mail}: {outcome.story.about}", style="bold")
            out.print(table(("after", "event"), outcome.story.events))
        say()
        for problem in outcome.problems:
            say(f"WRONG: {problem}", style="bold red")
        say(_verdict(outcome), style="bold green" if outcome.as_expected else "bold red")


class LiveTable(Lines):
    """A table that moves, and the account."""

    def __init__(self, messages_about: Mapping[str, str]) -> None:
        super().__init__()
        self._about = messages_about
        self._console = console()
        self._live: Live | None = None

    @contextmanager
    def live(self) -> Iterator[None]:
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            yield

    def update(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._live is not None:
            self._live.update(self._table(rows), refresh=True)

    def confirmed(self, approval: Mapping[str, Any]) -> None:
        """It was said at the beginning, and the table shows that the run goes on."""

    def _table(self, rows: Sequence[Mapping[str, Any]]) -> Table:
        ordered = sorted(rows, key=lambda row: str(row["id"]))
        moving = [row for row in ordered if not _rests(row)]
        room = self._console.height - AROUND_THE_TABLE
        shown = (ordered if len(ordered) <= room else moving)[: max(1, room)]
        made = table(
            ("mail", "about", "status", "reason"),
            (
                (row["id"], self._about[row["id"]], _status(row["status"]), row["reason"] or "")
                for row in shown
            ),
        )
        made.caption = f"{len(rows) - len(moving)} of {len(rows)} at rest"
        made.caption_justify = "left"
        return made


def display_for(messages: Sequence[Message], *, plain: bool, quiet: bool) -> Display:
    """Choose: nothing for programs, a moving table for a terminal, lines for everything else."""
    if quiet:
        return Display()
    if plain or not sys.stdout.isatty():
        return Lines()
    return LiveTable({message["id"]: message["about"] for message in messages})


def _runs(outcome: Outcome) -> Table:
    columns = ("mail", "about", "status", "reason", "steps", "model", "tools", "settled by", "")
    return table(
        columns,
        (
            (
                ended.message["id"],
                ended.message["about"],
                _status(ended.run.status),
                ended.run.reason or "",
                ended.used("steps"),
                ended.used("model_calls"),
                ended.used("tool_calls"),
                "reconciler" if ended.settled_by_reconciler else "",
                Text("✓", "green") if not ended.problems else Text("✗ unexpected", "bold red"),
            )
            for ended in outcome.runs
        ),
    )


def _refunds(outcome: Outcome) -> Table:
    return table(
        ("order", "charge", "our record", "provider's record", "requests", ""),
        (
            (
                refund.order_id,
                refund.charge_id,
                ", ".join(
                    f"{effect['status']} {_amount(effect['arguments']['amount_cents'])}"
                    for effect in refund.ours
                )
                or "nothing",
                ", ".join(
                    f"{paid['refund_id']} {_amount(paid['amount_cents'])}" for paid in refund.theirs
                )
                or "nothing",
                refund.requests,
                Text("✓", "green") if refund.agree else Text("✗ they disagree", "bold red"),
            )
            for refund in outcome.refunds
        ),
    )


def _verdict(outcome: Outcome) -> str:
    paid = sum(len(refund.theirs) for refund in outcome.refunds)
    settled = sum(ended.settled_by_reconciler for ended in outcome.runs)
    killed = f", {outcome.workers_killed} worker killed" if outcome.workers_killed else ""
    counted = (
        f"{len(outcome.runs)} runs in {outcome.seconds:.0f} s, {outcome.confirmed} confirmations,"
        f" {paid} refunds paid, {settled} settled by the reconciler{killed}"
    )
    if outcome.as_expected:
        return f"{counted}: both records agree, and every run ended as it should."
    return f"{counted}: {len(outcome.problems)} things are not as they should be."


def _rests(row: Mapping[str, Any]) -> bool:
    status = RunStatus(row["status"])
    return status in TERMINAL | WITH_PERSON - {RunStatus.AWAITING_APPROVAL}


def _status(status: str) -> Text:
    return Text(status, STYLES.get(status, "cyan"))


def _amount(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"
