"""Consent and answers on the command line: the exact action is shown, then a person decides."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from handrail.agent.approvals import Approval, ApprovalRefused
from handrail.cli.asking import must_confirm
from handrail.cli.ground import for_reading, for_writing
from handrail.cli.options import (
    AsJson,
    By,
    FleetName,
    Limit,
    OfTenant,
    OfTool,
    OfWorkflow,
    OlderThan,
    RunId,
    Yes,
    command,
    duration_ms,
    lasting,
    me,
    time_of,
)
from handrail.desk import Desk, UnknownMatter, must_see
from handrail.fleet import Fleet
from handrail.loading import load_or_plain
from handrail.runs import Run
from handrail.terminal import compact, details, heading, note, say, say_json, table
from handrail.terminal import show as show_table

ApprovalOrRun = Annotated[
    str, typer.Argument(metavar="APPROVAL|RUN", help="The request's id, or that of its run.")
]

approval = typer.Typer(help="One request for consent.", no_args_is_help=True)


def approvals(
    workflow: OfWorkflow = None,
    tenant: OfTenant = None,
    tool: OfTool = None,
    older_than: OlderThan = None,
    limit: Limit = 50,
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """List what waits for somebody's consent, oldest first."""
    fleet = for_reading(load_or_plain(fleet_name))
    found = fleet.desk.approvals(
        by=me(by),
        workflow=workflow,
        tenant=tenant,
        tool=tool,
        older_than_ms=duration_ms("--older-than", older_than),
        limit=limit,
    )
    if as_json:
        say_json([_to_json(one) for one in found])
        return
    now = fleet.ledger.now()
    columns = (
        *("approval", "age", "expires in", "workflow", "tool", "subject"),
        *("agreed", "arguments"),
    )
    rows = (
        (
            one.id,
            lasting(max(0, now - one.requested_at)),
            lasting(max(0, one.expires_at - now)),
            *(one.workflow, one.tool, one.subject),
            f"{len(one.consents)} of {one.terms.approvers}",
            compact(dict(one.arguments)),
        )
        for one in found
    )
    show_table(table(columns, rows))
    if len(found) == limit:
        note(f"these are the first {limit}: more with --limit")


@approval.command("show")
def show(
    target: ApprovalOrRun, by: By = None, fleet_name: FleetName = None, as_json: AsJson = False
) -> None:
    """Show the exact action that a request is about, whatever has become of it."""
    fleet = for_reading(load_or_plain(fleet_name))
    found = _found(fleet, target, me(by))
    if as_json:
        say_json(_to_json(found))
    else:
        show_exactly(found)


@approval.command("token")
def token_command(
    target: ApprovalOrRun,
    to: Annotated[str | None, typer.Option(metavar="NAME", help="Only for this person.")] = None,
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Print a token by which one approver may agree to exactly this request, once.

    For an application that sends it to somebody; treat it as a secret.
    """
    fleet = for_reading(load_or_plain(fleet_name))
    found = _found(fleet, target, me(by))
    issued = fleet.desk.issue_token(found.id, by=me(by), to=to)
    if as_json:
        say_json({"approval": found.id, "digest": found.digest, "to": to, "token": issued})
    else:
        say(issued)


def approve(
    target: ApprovalOrRun,
    reason: Annotated[str, typer.Option(help="Why; it is kept with the consent.")] = "",
    token: Annotated[str | None, typer.Option(help="A token that you were sent.")] = None,
    yes: Yes = False,
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Agree to an exact action, which is shown in full; its run goes on with the time it had left.

    A write that cannot be taken back, or moves money, wants its intent key typed.
    """
    fleet = for_writing(load_or_plain(fleet_name))
    desk, who = fleet.desk, me(by)
    found = _found(fleet, target, who)
    desk.must_be_approver(found, by=who)
    if not as_json:
        show_exactly(found)
    must_confirm(
        "Agree to exactly this?",
        to_type=desk.to_type(found),
        yes=yes,
        reason=reason,
        as_json=as_json,
    )
    used = desk.issue_token(found.id, by=who, to=who) if token is None else token
    run = desk.approve(used, by=who, run=found.run_id, comment=reason)
    if as_json:
        say_json(run.to_json())
        return
    now = desk.approval(found.id, by=who)
    if now.missing:
        say(f"noted: {now.missing} more has to agree: {command('approve', found.id)}")
    else:
        say(f"agreed by {', '.join(now.consents)}: run {run.run_id} is {run.status}")


def reject(
    target: ApprovalOrRun,
    reason: Annotated[str, typer.Option(help="Why; it is kept with the refusal.")],
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Refuse a request: the tool is not called, and the run that waits for it stops."""
    fleet = for_writing(load_or_plain(fleet_name))
    found = _found(fleet, target, me(by))
    _told(fleet.desk.reject(found.id, by=me(by), reason=reason), "refused", as_json=as_json)


def answer(
    run_id: RunId,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The answer.")],
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Answer the question that a run has asked; it goes on with the time it had left."""
    fleet = for_writing(load_or_plain(fleet_name))
    _told(fleet.desk.answer(run_id, text, by=me(by)), "answered", as_json=as_json)


def _told(run: Run, what: str, *, as_json: bool) -> None:
    if as_json:
        say_json(run.to_json())
    else:
        say(f"{what}: run {run.run_id} is {run.status}")


def _found(fleet: Fleet, target: str, by: str) -> Approval:
    """Find a request by its id, or as that which a run waits for."""
    desk: Desk = fleet.desk
    who = desk.who(by)
    try:
        return desk.approval(target, by=who)
    except UnknownMatter:
        waiting = desk.approvals(by=who, run=target)
    if waiting:
        return waiting[0]
    run = fleet.get(target)
    must_see(who, run)
    raise ApprovalRefused("not-pending", f"the run is {run.status}, and asks for no consent")


def show_exactly(found: Approval) -> None:
    """Show an action from the text that is hashed: every argument in full, nothing left out."""
    shown = json.loads(found.text)
    agreed = ", ".join(found.consents) or "nobody"
    pairs: dict[str, object] = {
        "approval": shown["approval"],
        "run": f"{shown['run']}, workflow {shown['workflow']}, tenant {shown['tenant']}",
        "tool": f"{shown['tool']}@{shown['contract_version']}",
        "intent key": shown["intent_key"] or "none",
        **{f"argument {name}": compact(value) for name, value in shown["arguments"].items()},
        "amount": "none declared" if shown["amount"] is None else shown["amount"],
        "on behalf of": shown["subject"],
        "status": found.status.value,
        "expires": time_of(shown["expires_at"]),
        "agreed": f"{agreed}; {found.missing} of {shown['approvers']} still missing",
        "digest": found.digest,
    }
    show_table(details(pairs))
    heading("the same, as it is hashed")
    say(found.text)


def _to_json(found: Approval) -> dict[str, object]:
    return {
        **found.shown,
        "status": found.status.value,
        "requested_at": found.requested_at,
        "consents": [*found.consents],
        "missing": found.missing,
        "digest": found.digest,
    }
