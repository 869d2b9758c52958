"""Who may do what, and who did what, on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from handrail.agent.people import Act, Role
from handrail.agent.tools import Principal
from handrail.cli.errors import FAILED
from handrail.cli.ground import for_reading
from handrail.cli.options import (
    AsJson,
    By,
    FleetName,
    Limit,
    OfTenant,
    command,
    duration_ms,
    me,
    time_of,
)
from handrail.loading import load_or_plain
from handrail.terminal import compact, say, say_json, table
from handrail.terminal import show as show_table

audit = typer.Typer(help="What people did.", invoke_without_command=True)
principals = typer.Typer(help="Who may look, operate, approve, admit.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The person's name.")]
Why = Annotated[str, typer.Option("--reason", help="Why; it is kept in the audit.")]


@audit.callback()
def listing(
    context: typer.Context,
    actor: Annotated[str | None, typer.Option(help="Only of this person.")] = None,
    act: Annotated[Act | None, typer.Option(help="Only this.")] = None,
    run: Annotated[str | None, typer.Option(help="Only about this run.")] = None,
    tenant: OfTenant = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only of the last time, as in 2h.")
    ] = None,
    limit: Limit = 50,
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """List what people did, the latest first; `audit verify` looks whether all of it is there."""
    if context.invoked_subcommand is not None:
        return
    found = for_reading(load_or_plain(fleet_name)).desk.audit(
        by=me(by),
        actor=actor,
        act=None if act is None else act.value,
        run=run,
        tenant=tenant,
        since_ms=None if since is None else duration_ms("--since", since),
        limit=limit,
    )
    if as_json:
        say_json(found)
        return
    for one in found:
        at = time_of(one["at"])[:-4]  # in seconds
        say(f"{one['seq']}  {at}  {one['actor']}  {one['act']}  {one['target']}")
        if one["reason"]:
            say(f"    because: {one['reason']}")
        if one["before"] or one["after"]:
            say(f"    {_changed(one['before'], one['after'])}")


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Say what an act has changed, and what it noted."""
    changed = []
    for name in [*before, *(name for name in after if name not in before)]:
        values = [side[name] for side in (before, after) if name in side]
        shown = (_written(name, value) for value in values)
        changed.append(f"{name}: {' -> '.join(shown)}")
    return ", ".join(changed)


def _written(name: str, value: Any) -> str:
    if type(value) is int and name.endswith(("_at", "_until")):
        return time_of(value)
    return value if isinstance(value, str) else compact(value)


@audit.command()
def verify(
    anchor: Annotated[
        str | None, typer.Option(metavar="NUMBER:HASH", help="What an earlier look has printed.")
    ] = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Look whether an entry was edited, lost or put in; exits 1 if so.

    Note down what it prints, where whoever can write to the database cannot: given as --anchor
    later, it shows that the whole was not written anew.
    """
    report = for_reading(load_or_plain(fleet_name)).desk.verify_audit(anchor=anchor)
    if as_json:
        found = {"entries": report.entries, "head": report.head, "faults": [*report.faults]}
        say_json({"intact": report.intact, **found})
    else:
        for fault in report.faults:
            say(fault, style="bold")
        say(f"{report.entries} entries, {'intact' if report.intact else 'NOT intact'}")
        say(f"note down: {report.head}")
    if not report.intact:
        raise typer.Exit(FAILED)


@principals.command("list")
def list_(by: By = None, fleet_name: FleetName = None, as_json: AsJson = False) -> None:
    """List the people who have roles."""
    found = for_reading(load_or_plain(fleet_name)).desk.principals(by=me(by))
    if as_json:
        say_json([_to_json(one) for one in found])
        return
    rows = (
        (
            one.subject,
            ", ".join(sorted(one.roles)),
            "all" if one.tenants is None else ", ".join(sorted(one.tenants)),
        )
        for one in found
    )
    show_table(table(("name", "roles", "tenants"), rows))


@principals.command()
def admit(
    name: Name,
    role: Annotated[list[Role], typer.Option(help="Repeat it for several.")],
    tenant: Annotated[
        list[str] | None, typer.Option(help="Only in this tenant; repeat it. None: in all.")
    ] = None,
    reason: Why = "",
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Give a person these roles, instead of any before.

    The first to be admitted has to be an admin, and needs nobody's leave.
    """
    desk = for_reading(load_or_plain(fleet_name)).desk
    admitted = desk.admit(
        name,
        [one.value for one in role],
        by=me(by) if desk.staffed else None,
        tenants=tenant or None,
        reason=reason,
    )
    if as_json:
        say_json(_to_json(admitted))
    else:
        say(f"{admitted.subject} is {', '.join(sorted(admitted.roles))}")
        say(f"to act as this person: {command('handoffs', '--as', admitted.subject)}")


@principals.command()
def dismiss(
    name: Name,
    reason: Why = "",
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Take all roles from a person."""
    for_reading(load_or_plain(fleet_name)).desk.dismiss(name, by=me(by), reason=reason)
    if as_json:
        say_json({"dismissed": name})
    else:
        say(f"{name} has no roles any more")


def _to_json(who: Principal) -> dict[str, object]:
    tenants = None if who.tenants is None else sorted(who.tenants)
    return {"name": who.subject, "roles": sorted(who.roles), "tenants": tenants}
