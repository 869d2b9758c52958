"""Handoffs on the command line: the queue, one matter, and what a person makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from handrail.agent.effects import answer_to_json
from handrail.agent.resolution import Choice, Resolution, ResolutionRefused
from handrail.agent.status import Reason
from handrail.agent.tools import Principal
from handrail.cli.asking import must_confirm
from handrail.cli.ground import for_reading, for_writing
from handrail.cli.options import (
    YOUR_WORDS,
    AsJson,
    By,
    FleetName,
    Limit,
    OfTenant,
    OfTool,
    OfWorkflow,
    OlderThan,
    Yes,
    command,
    duration_ms,
    lasting,
    me,
    time_of,
)
from handrail.desk import Desk, Handoff
from handrail.loading import load_or_plain
from handrail.terminal import compact, details, heading, note, say, say_json, table
from handrail.terminal import show as show_table

NONE: Final = "none"
_GOES_ON: Final = (Resolution.RESUMED, Resolution.TRY_AGAIN)
HandoffId = Annotated[str, typer.Argument(metavar="HANDOFF", help="The handoff's id.")]
OfReason = Annotated[str | None, typer.Option("--reason", help="Only with this reason.")]

handoff = typer.Typer(help="One matter that waits for a person.", no_args_is_help=True)


def handoffs(
    workflow: OfWorkflow = None,
    tenant: OfTenant = None,
    tool: OfTool = None,
    reason: OfReason = None,
    subject: Annotated[str | None, typer.Option(help="Only on behalf of this one.")] = None,
    older_than: OlderThan = None,
    assigned_to: Annotated[
        str | None, typer.Option(help="Only what this person was given.")
    ] = None,
    mine: Annotated[bool, typer.Option("--mine", help="What you are at, or were given.")] = False,
    snoozed: Annotated[bool, typer.Option("--snoozed", help="Also what was put aside.")] = False,
    resolved: Annotated[bool, typer.Option("--resolved", help="What is over instead.")] = False,
    limit: Limit = 50,
    digest: Annotated[
        bool, typer.Option("--digest", help="Counts by reason, workflow and tool.")
    ] = False,
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """List what waits for a person: the most urgent first, and of these the oldest."""
    desk = for_reading(load_or_plain(fleet_name)).desk
    if digest:
        _show_digest(desk.digest(by=me(by), limit=limit), as_json=as_json)
        return
    found = desk.handoffs(
        by=me(by),
        workflow=workflow,
        tenant=tenant,
        tool=tool,
        reason=reason,
        subject=subject,
        assigned_to=assigned_to,
        mine=mine,
        older_than_ms=duration_ms("--older-than", older_than),
        snoozed=snoozed or resolved,
        resolved=resolved,
        limit=limit,
    )
    if as_json:
        say_json(found)
        return
    columns = (
        *("handoff", "age", "priority", "reason", "workflow", "tool", "subject"),
        *(("resolved as", "by") if resolved else ("who is at it", "escalation")),
    )
    show_table(table(columns, (_queued(row, resolved=resolved) for row in found)))
    if len(found) == limit:
        note(f"these are the first {limit}: more with --limit, counts with --digest")


def _queued(row: Mapping[str, Any], *, resolved: bool) -> tuple[object, ...]:
    about = (row["reason"], row["workflow"], row["tool"] or "", row["subject"])
    last = (
        (row["resolution"], row["resolved_by"] or "")
        if resolved
        else (_at_it(row), _escalation(row))
    )
    return (row["id"], lasting(row["age_ms"]), row["priority"], *about, *last)


def _now(row: Mapping[str, Any]) -> int:
    return int(row["opened_at"] + row["age_ms"])


def _at_it(row: Mapping[str, Any]) -> str:
    if row["claimed_by"] is not None and row["claimed_until"] > _now(row):
        return f"{row['claimed_by']} for {lasting(row['claimed_until'] - _now(row))}"
    if row["snoozed_until"] is not None and row["snoozed_until"] > _now(row):
        return f"put aside for {lasting(row['snoozed_until'] - _now(row))}"
    return f"for {row['assigned_to']}" if row["assigned_to"] else ""


def _escalation(row: Mapping[str, Any]) -> str:
    if row["escalated_at"] is not None:
        return "escalated"
    if row["escalates_at"] is None:
        return ""
    left_ms = row["escalates_at"] - _now(row)
    return f"in {lasting(left_ms)}" if left_ms > 0 else "due"


def _show_digest(counts: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        say_json(counts)
        return
    columns = ("handoffs", "priority", "oldest", "subjects", "reason", "workflow", "tool")
    rows = (
        (
            *(one["handoffs"], one["priority"], lasting(one["oldest_ms"]), one["subjects"]),
            *(one["reason"], one["workflow"], one["tool"] or ""),
        )
        for one in counts
    )
    show_table(table(columns, rows))


# ---- one matter ----------------------------------------------------------------------------------


@handoff.command()
def show(
    handoff_id: HandoffId, by: By = None, fleet_name: FleetName = None, as_json: AsJson = False
) -> None:
    """Show a matter: why it came, what is known, and what each resolution would do."""
    desk = for_reading(load_or_plain(fleet_name)).desk
    _show(desk.handoff(handoff_id, by=me(by)), as_json=as_json)


@handoff.command("next")
def next_(
    workflow: OfWorkflow = None,
    tenant: OfTenant = None,
    tool: OfTool = None,
    reason: OfReason = None,
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Claim the most urgent matter that nobody is at, and show it."""
    desk = for_reading(load_or_plain(fleet_name)).desk
    found = desk.next(by=me(by), workflow=workflow, tenant=tenant, tool=tool, reason=reason)
    if found is not None:
        if found.yours_already:
            note("nothing else waits that nobody is at: this one is yours already")
        _show(found, as_json=as_json)
    elif as_json:
        say_json(None)
    else:
        say("nothing waits that nobody is at")


@handoff.command()
def claim(
    handoff_id: HandoffId,
    for_: Annotated[str, typer.Option("--for", metavar="TIME", help="How long, as in 2h.")] = "15m",
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Take a matter: nobody else resolves it for that long. Claim it again for longer."""
    desk = for_reading(load_or_plain(fleet_name)).desk
    row = desk.claim(handoff_id, by=me(by), for_ms=duration_ms("--for", for_))
    _moved(row, f"yours until {time_of(row['claimed_until'])}", as_json=as_json)


@handoff.command()
def release(
    handoff_id: HandoffId, by: By = None, fleet_name: FleetName = None, as_json: AsJson = False
) -> None:
    """Give a matter back to the queue."""
    desk = for_reading(load_or_plain(fleet_name)).desk
    _moved(desk.release(handoff_id, by=me(by)), "nobody is at it", as_json=as_json)


@handoff.command()
def assign(
    handoff_id: HandoffId,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who is to look at it; '': anybody.")],
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Say who is to look at a matter."""
    desk = for_reading(load_or_plain(fleet_name)).desk
    row = desk.assign(handoff_id, name or None, by=me(by))
    _moved(row, f"for {row['assigned_to'] or 'anybody'}", as_json=as_json)


@handoff.command()
def snooze(
    handoff_id: HandoffId,
    for_: Annotated[str, typer.Option("--for", metavar="TIME", help="How long, as in 2h.")],
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Put a matter aside; it comes back by itself."""
    desk = for_reading(load_or_plain(fleet_name)).desk
    row = desk.snooze(handoff_id, for_ms=duration_ms("--for", for_), by=me(by))
    _moved(row, f"put aside until {time_of(row['snoozed_until'])}", as_json=as_json)


@handoff.command()
def comment(
    handoff_id: HandoffId,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to note.")],
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Note something for whoever looks at the matter later."""
    desk = for_reading(load_or_plain(fleet_name)).desk
    _moved(desk.comment(handoff_id, text, by=me(by)), "noted", as_json=as_json)


@handoff.command()
def query(
    handoff_id: HandoffId, by: By = None, fleet_name: FleetName = None, as_json: AsJson = False
) -> None:
    """Ask the service now whether the write took effect. It settles nothing by itself."""
    desk = for_reading(load_or_plain(fleet_name)).desk
    answer = answer_to_json(desk.query(handoff_id, by=me(by)))
    if as_json:
        say_json(answer)
        return
    show_table(details({name: compact(value) for name, value in answer.items()}))
    note(f"look at it: {command('handoff', 'show', handoff_id)}")


def _moved(row: Mapping[str, Any], said: str, *, as_json: bool) -> None:
    if as_json:
        say_json(row)
    else:
        say(f"{row['id']}: {said}")


@handoff.command()
def resolve(
    handoff_id: HandoffId,
    how: Annotated[Resolution, typer.Argument(metavar="RESOLUTION", help=", ".join(Resolution))],
    reason: Annotated[str, typer.Option(help="Why; it is kept with what is done.")],
    evidence: Annotated[str, typer.Option(help="Where the proof is.")] = "",
    grant: Annotated[
        str | None, typer.Option(metavar="TIME", help="Working time for a run that goes on.")
    ] = None,
    yes: Yes = False,
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Resolve a matter. What it does is said first; what cannot be taken back wants the write's
    intent key typed.

    If anything has moved since it was shown, nothing is done, and it is shown again.
    """
    grant_ms = duration_ms("--grant", grant)
    desk = for_writing(load_or_plain(fleet_name)).desk
    who = desk.who(me(by))
    matter = desk.handoff(handoff_id, by=who)
    choice = desk.chosen(matter, how, by=who, evidence=evidence)
    if not as_json:
        show_table(details(_in_short(matter)))
        say()
        say(f"{choice.resolution}: {choice.consequence}", style="bold")
        for line in _takes(matter, choice):
            say(line)
    must_confirm(
        f"Resolve it as {choice.resolution}?",
        to_type=matter.to_type if choice.final else None,
        yes=yes,
        reason=reason,
        as_json=as_json,
    )
    try:
        run = desk.resolve(
            handoff_id,
            how,
            by=who,
            reason=reason,
            evidence=evidence,
            seen=matter.seen,
            grant_ms=grant_ms,
        )
    except ResolutionRefused as refused:
        if not as_json:
            _what_next(desk, who, matter, refused)
        raise
    if as_json:
        say_json(run.to_json())
    else:
        say(f"resolved as {choice.resolution}: run {run.run_id} is {run.status}")


def _what_next(desk: Desk, who: Principal, matter: Handoff, refused: ResolutionRefused) -> None:
    """Name the command that helps where a resolution was refused."""
    if refused.problem == "approval-needed":
        for asked in desk.approvals(by=who, run=matter.run_id):
            note(f"an approver agrees to it: {command('approve', asked.id)}")
    else:
        note(f"look at it: {command('handoff', 'show', matter.id)}")


# ---- how a matter is shown -----------------------------------------------------------------------


def _in_short(matter: Handoff) -> dict[str, object]:
    effect, arguments = _effect(matter), _arguments(matter)
    write = {
        "write": effect.get("tool", NONE),
        "intent key": effect.get("intent_key") or NONE,
        "arguments": compact(dict(arguments)) if arguments else NONE,
    }
    return _why(matter) | _without_nothing(write)


def _why(matter: Handoff) -> dict[str, object]:
    row, package = matter.row, matter.package
    return _without_nothing(
        {
            "handoff": matter.id,
            "run": f"{matter.run_id}, {matter.run_status}",
            "workflow": row["workflow"],
            "goal": package["goal"],
            "reason": row["reason"],
            "problem": package.get("problem", NONE),
            "question": package.get("question", NONE),
            "on behalf of": row["subject"],
        }
    )


def _show(matter: Handoff, *, as_json: bool) -> None:
    if as_json:
        say_json(matter.to_json())
        return
    row, package = matter.row, matter.package
    queued = {
        "age": f"{lasting(row['age_ms'])}, priority {row['priority']}",
        "who is at it": _at_it(row) or NONE,
        "escalation": _escalation(row) or NONE,
        "taken over by": package.get("takeover", NONE),
    }
    show_table(details(_why(matter) | (_without_nothing(queued) if matter.open else {})))
    _section("verified facts", _facts(package))
    _section("the action, as it would be sent", _action(matter))
    _section("budget left", package["budget_left"])
    if matter.evidence:
        heading("evidence")
        seen = ((time_of(e["at"]), e["kind"], compact(e["detail"])) for e in matter.evidence)
        show_table(table(("time", "kind", "detail"), seen))
    if row["comments"]:
        heading("comments")
        said = ((time_of(c["at"]), c["who"], c["text"]) for c in row["comments"])
        show_table(table(("time", "who", "text"), said))
    heading("what you can do" if matter.open else "what was done")
    for line in _choices(matter) if matter.open else _resolved(row):
        say(line)
    say(f"all that happened: {command('trace', matter.run_id)}")


def _section(title: str, pairs: Mapping[str, object]) -> None:
    if pairs:
        heading(title)
        show_table(details(pairs))


def _without_nothing(pairs: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in pairs.items() if value != NONE}


def _facts(package: Mapping[str, Any]) -> dict[str, object]:
    verified = package["verified"]
    outputs = verified["outputs"] if verified["outputs"] != NONE else {}
    observed = verified["observations"] if verified["observations"] != NONE else []
    facts = {f"output {name}": compact(value) for name, value in outputs.items()}
    return facts | {f"observed {n}": text for n, text in enumerate(observed, 1)}


def _effect(matter: Handoff) -> Mapping[str, Any]:
    found: Mapping[str, Any] = matter.package.get("effect") or {}
    if not found and isinstance(matter.package["pending_action"], dict):
        found = matter.package["pending_action"]
    return found


def _arguments(matter: Handoff) -> Mapping[str, Any]:
    """What would be sent: of the pending command, or what was sent and is in doubt."""
    found: Mapping[str, Any] = matter.sent_as or _effect(matter).get("arguments") or {}
    return found


def _action(matter: Handoff) -> dict[str, object]:
    effect, undo = _effect(matter), matter.package.get("compensation")
    shown: dict[str, object] = {f"argument {k}": compact(v) for k, v in _arguments(matter).items()}
    if "status" in effect:
        shown |= {"status": effect["status"], "attempts": effect["attempts"]}
        shown |= {name: effect[name] for name in ("trigger", "evidence") if effect.get(name)}
    if undo:
        shown["undone by"] = f"{undo['tool']} {compact(undo['arguments'])}, {undo['status']}"
    if not effect.get("tool"):
        return {}
    return {"tool": effect["tool"], "intent key": effect.get("intent_key") or NONE, **shown}


def _choices(matter: Handoff) -> list[str]:
    if matter.row["reason"] == Reason.CLARIFICATION_REQUIRED.value:
        return [
            "answer the question, and the run goes on:",
            f"    {command('answer', matter.run_id, YOUR_WORDS)}",
        ]
    lines: list[str] = []
    for choice in matter.choices:
        lines.append(f"{choice.resolution}: {choice.consequence}")
        if choice.obstacle is not None:
            lines.append(f"    cannot be chosen: {choice.obstacle}")
            continue
        lines += [f"    {line}" for line in _takes(matter, choice)]
        words = ["resolve", matter.id, choice.resolution.value, "--reason", YOUR_WORDS]
        words += ["--evidence", YOUR_WORDS] if choice.wants_evidence else []
        words += ["--grant", "2m"] if choice.resolution in _GOES_ON else []
        lines.append(f"    {command('handoff', *words)}")
    return lines


def _takes(matter: Handoff, choice: Choice) -> list[str]:
    """What a choice wants, beside a reason."""
    lines = []
    if choice.asks_tool:
        lines.append("the service is asked first, and its answer has to fit")
    if choice.wants_evidence:
        lines.append("it takes evidence: say where the proof is")
    if choice.final and matter.to_type is not None:
        lines.append("it cannot be taken back: you type the intent key")
    return lines


def _resolved(row: Mapping[str, Any]) -> list[str]:
    by = f"{row['resolution']}, by {row['resolved_by'] or NONE} at {time_of(row['resolved_at'])}"
    because = [f"because: {row['resolved_reason']}"] if row["resolved_reason"] else []
    proof = [f"evidence: {row['resolved_evidence']}"] if row["resolved_evidence"] else []
    return [by, *because, *proof]
