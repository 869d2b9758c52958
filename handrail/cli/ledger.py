"""What a person says of a ledger that was set back, on the command line."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from handrail.cli.ground import for_reading
from handrail.cli.options import AsJson, By, FleetName, command, me, time_of
from handrail.ledger.errors import InvalidMoment
from handrail.ledger.rewinds import Marked
from handrail.loading import load_or_plain
from handrail.terminal import note, say, say_json

ledger = typer.Typer(
    help="After a restored backup: ask before anything is sent that may have been.",
    no_args_is_help=True,
)
Why = Annotated[str, typer.Option("--reason", help="Why; it is kept in the audit.")]


@ledger.command()
def rewound(
    reason: Why,
    lost_from: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="The backup's latest moment, as in 2026-11-30T09:14:00Z; by itself, the last sign"
            " of life of a worker.",
        ),
    ] = None,
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Say that the ledger was set back, before any worker starts on it.

    From then on a write that may have been sent in the lost time is not sent before its service
    was asked. What cannot be asked about, and has no key, is handed to a person.
    """
    fleet = for_reading(load_or_plain(fleet_name))
    moment = None if lost_from is None else _moment(lost_from)
    rewind = fleet.ledger_rewound(reason=reason, by=me(by), lost_from=moment)
    marked = fleet.ledger.rewinds.listed()[-1]
    if as_json:
        say_json(marked.to_json())
        return
    say(f"rewind {rewind.number}: lost is what was done from {time_of(rewind.lost_from)} UTC on")
    _asked(marked)
    say("start the workers and the beat; see how it goes, and when it is over, with")
    say(f"  {command('ledger', 'status')}")


@ledger.command()
def cleared(
    reason: Why,
    force: Annotated[
        bool,
        typer.Option("--force", help="Although runs from before it, or doubts, are not settled."),
    ] = False,
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Say that nothing the ledger has lost can be sent again: new writes are sent unasked."""
    fleet = for_reading(load_or_plain(fleet_name))
    numbers = fleet.ledger_cleared(reason=reason, by=me(by), force=force)
    if as_json:
        say_json({"cleared": list(numbers)})
    elif numbers:
        say(f"cleared: {', '.join(map(str, numbers))}")
    else:
        say("nothing to clear: the ledger is not marked as set back")


@ledger.command()
def status(fleet_name: FleetName = None, as_json: AsJson = False) -> None:
    """List the times that the ledger was set back, and what is still to be settled of each."""
    found = for_reading(load_or_plain(fleet_name)).ledger.rewinds.listed()
    if as_json:
        say_json([one.to_json() for one in found])
        return
    if not found:
        say("never set back")
    for one in found:
        _told(one)


def _told(one: Marked) -> None:
    rewind = one.rewind
    state = "open" if one.cleared_at is None else f"cleared {time_of(one.cleared_at)} UTC"
    say(f"rewind {rewind.number}, {state}: {one.reason} ({one.marked_by})")
    say(f"  lost: {time_of(rewind.lost_from)} to {time_of(rewind.lost_until)} UTC")
    _asked(one)
    if not one.is_open:
        return
    if one.older_runs or one.doubts:
        note("keep it open: runs from before it, or doubts, are not settled yet")
    else:
        note(
            "all runs from before it have ended. Clear it once nobody enqueues again what was"
            f" enqueued in the lost time: {command('ledger', 'cleared', '--reason', '...')}"
        )


def _asked(one: Marked) -> None:
    counts = ", ".join(f"{count} {status}" for status, count in one.asked.items())
    say(f"  asked about: {counts or 'nothing yet'}")
    if one.is_open:
        say(f"  older runs that have not ended: {one.older_runs}, {one.with_people} with people")


def _moment(text: str) -> int:
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidMoment(f"{text!r} is no time: write it as 2026-11-30T09:14:00Z") from None
    if read.tzinfo is None:
        raise InvalidMoment(f"{text!r} has no time zone: add Z for UTC")
    return int(read.timestamp() * 1000)
