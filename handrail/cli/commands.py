"""The commands: each reads its options, asks the fleet, and prints what came of it."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer
from celery.apps.beat import Beat
from celery.apps.worker import Worker
from celery.signals import setup_logging, worker_ready
from kombu.utils.url import maybe_sanitize_url
from typer.core import TyperGroup

from handrail.agent.effects import EffectStatus
from handrail.agent.machine import Mode
from handrail.agent.pauses import InvalidPause, Scope
from handrail.agent.review import rounds as rounds_of
from handrail.agent.status import RunStatus
from handrail.agent.tools import Principal
from handrail.canonical import Json, parse_json
from handrail.cli import approvals, audit, handoffs, ledger
from handrail.cli import doctor as doctor_
from handrail.cli import reconcile as sweeps
from handrail.cli.errors import FAILED, report
from handrail.cli.ground import for_new_runs, for_reading, for_work, for_writing
from handrail.cli.health import health
from handrail.cli.options import (
    JSON_WANTED,
    AsJson,
    By,
    FleetName,
    InvalidOption,
    Limit,
    OfTenant,
    OfTool,
    OfWorkflow,
    OlderThan,
    RunId,
    command,
    duration_ms,
    lasting,
    me,
    time_of,
)
from handrail.cli.review import reviewed, show_review, show_rounds
from handrail.errors import HandrailError, InvalidBudget, NotCanonical
from handrail.fleet import Fleet, InvalidRun
from handrail.ledger.errors import DatabaseUnavailable
from handrail.ledger.ledger import MOST_COUNTED
from handrail.ledger.schema import HEAD
from handrail.ledger.session import ConnectionLost
from handrail.loading import load, load_or_plain
from handrail.logs import LogFormat, LogLevel, configure
from handrail.reconciler.sweep import Swept
from handrail.runs import Run
from handrail.terminal import compact, details, heading, note, say, say_json, table
from handrail.terminal import show as show_table

log = logging.getLogger("handrail.cli")


class Commands(TyperGroup):
    """The root of all commands: what any of them raises is printed here, in one way."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a known error becomes a line and an exit code."""
        try:
            return super().invoke(ctx)
        except ConnectionLost as lost:
            error: HandrailError = DatabaseUnavailable(str(lost))
        except HandrailError as raised:
            error = raised
        except typer.BadParameter as unread:
            if not ctx.meta.get(JSON_WANTED):
                raise
            error = InvalidOption(unread.format_message())
        raise typer.Exit(report(error, as_json=bool(ctx.meta.get(JSON_WANTED))))


app = typer.Typer(
    cls=Commands,
    help="Controlled agents on a Celery fleet.",
    epilog="Exit codes: 0 done, 1 failed, 2 bad input or refused, 3 try again later.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # they show local variables, and with them secrets
    context_settings={"help_option_names": ["-h", "--help"]},
)
db = typer.Typer(help="The ledger's database.", no_args_is_help=True)
app.add_typer(db, name="db")


Level = Annotated[
    LogLevel | None, typer.Option("--log-level", help="What is logged; HANDRAIL_LOG_LEVEL.")
]
Format = Annotated[LogFormat | None, typer.Option("--log-format", help="How; HANDRAIL_LOG_FORMAT.")]


@app.callback()
def _root() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")


# ---- the fleet at work ---------------------------------------------------------------------------


@app.command()
def demo(
    workers: Annotated[int, typer.Option(min=1, max=8, help="Worker processes.")] = 2,
    plain: Annotated[bool, typer.Option(help="Plain lines, no live table.")] = False,
    kill: Annotated[bool, typer.Option(help="Kill a worker in the middle of a refund.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch refunds run as controlled agents, on real workers on this machine.

    It brings everything along and leaves nothing behind. Exits 1 if the payment provider's records
    and the ledger disagree, or a run did not end as it should.
    """
    from handrail.demo.display import display_for
    from handrail.demo.messages import load_messages
    from handrail.demo.show import Demo

    messages = load_messages()
    display = display_for(messages, plain=plain, quiet=as_json)
    outcome = Demo(messages, display, workers=workers, kill=kill).run()
    if as_json:
        say_json(outcome.to_json())
    raise typer.Exit(0 if outcome.as_expected else FAILED)


@app.command()
def worker(
    fleet_name: FleetName = None,
    beat: Annotated[bool, typer.Option(help="Run the sweep from here as well.")] = False,
    log_level: Level = None,
    log_format: Format = None,
) -> None:
    """Run steps until SIGTERM or Ctrl-C; start as many of these as you like.

    Without HANDRAIL_BROKER_URL it joins the embedded Valkey of HANDRAIL_HOME, or starts it; without
    HANDRAIL_DATABASE_URL the ledger is an SQLite file there, made and migrated by itself.
    """
    fleet = load(fleet_name)
    if beat:
        fleet.settings = fleet.settings.model_copy(update={"sweep_in_workers": True})
    with for_work(fleet, worker=True) as valkey:
        where = maybe_sanitize_url(fleet.settings.broker_url)
        own = ", an embedded Valkey that ends with this worker" if valkey and valkey.owned else ""
        ready = f"ready: fleet {fleet_name}, broker {where}{own}"
        node = Worker(
            app=fleet.celery,
            hostname=f"handrail-{os.getpid()}@{socket.gethostname()}",
            redirect_stdouts=False,  # what tools print is no log
            quiet=True,
        )
        with _logging(fleet, log_format, log_level), _when_ready(lambda: note(ready)):
            node.start()
    if node.exitcode:
        raise typer.Exit(node.exitcode)


@app.command("beat")
def beat_command(
    fleet_name: FleetName = None, log_level: Level = None, log_format: Format = None
) -> None:
    """Have the sweep run every few seconds, on whichever worker is free.

    It republishes what was lost and settles what is in doubt. One is enough, and more do no harm.
    """
    fleet = load_or_plain(fleet_name)
    with for_work(fleet, worker=False):
        note(f"ready: a sweep every {fleet.settings.sweep_every_s:g} s")
        with _logging(fleet, log_format, log_level):
            Beat(
                app=fleet.celery,
                scheduler_cls="handrail.cli.beating:PlainScheduler",
                redirect_stdouts=False,
                quiet=True,
            ).run()


@contextmanager
def _logging(fleet: Fleet, log_format: LogFormat | None, level: LogLevel | None) -> Iterator[None]:
    """Have this process log as it was told to; Celery asks by a signal, and leaves it to us."""
    settings = fleet.settings

    def set_up(**_: object) -> None:
        configure(log_format or settings.log_format, level or settings.log_level)

    set_up()
    setup_logging.connect(set_up)
    try:
        yield
    finally:
        setup_logging.disconnect(set_up)


@contextmanager
def _when_ready(act: Callable[[], None]) -> Any:
    def ready(**_: object) -> None:
        act()

    worker_ready.connect(ready)
    try:
        yield
    finally:
        worker_ready.disconnect(ready)


@app.command()
def reconcile(
    fleet_name: FleetName = None,
    once: Annotated[bool, typer.Option("--once", help="Once, until nothing is due.")] = False,
    every_s: Annotated[
        float | None, typer.Option(min=0.05, help="Otherwise: how often, until it is stopped.")
    ] = None,
    within_s: Annotated[float, typer.Option(min=1, help="How long --once may take.")] = 60.0,
    log_level: Level = None,
    log_format: Format = None,
    as_json: AsJson = False,
) -> None:
    """Sweep from here: publish again, recover, end what is overdue, settle doubt.

    For cron (--once), or instead of a beat; beside others it does no harm. The broker may be away:
    what is due then stays due. Exits 3 where the database is.
    """
    fleet = for_writing(load(fleet_name))
    configure(log_format or fleet.settings.log_format, log_level or fleet.settings.log_level)
    reconciler = fleet.make_sweeper()

    def tell(swept: Swept) -> None:
        if as_json:
            say_json(sweeps.to_json(swept))
        else:
            for line in sweeps.lines(swept):
                say(line)

    if once:
        tell(reconciler.sweep_until_quiet(within_s=within_s))
        reconciler.finish()
        return
    every_s = every_s or fleet.settings.sweep_every_s
    leaving = threading.Event()

    def leave(*_: object) -> None:
        reconciler.stop()
        leaving.set()

    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, leave)
    note(f"ready: a sweep every {every_s:g} s")
    while not leaving.is_set():
        swept = reconciler.tick(every_s=every_s)
        if swept is not None and swept.looked_at:
            tell(swept)
        leaving.wait(every_s)


# ---- runs ----------------------------------------------------------------------------------------


@app.command()
def run(
    workflow: Annotated[str, typer.Argument(help="The workflow's name.")],
    goal: Annotated[str, typer.Option(help="What the run is to reach.")],
    fleet_name: FleetName = None,
    input: Annotated[str | None, typer.Option(metavar="JSON", help="The input.")] = None,
    principal: Annotated[str | None, typer.Option(help="On whose behalf it acts.")] = None,
    permission: Annotated[
        list[str] | None, typer.Option(help="What the principal may do; repeat it.")
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="A limit, as in steps=8; repeat it. 0 means none."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="The tenant.")] = None,
    run_id: Annotated[str | None, typer.Option(help="An id of your own.")] = None,
    dedupe_key: Annotated[
        str | None, typer.Option(help="Of runs with the same key there is one.")
    ] = None,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Write nothing: show in the trace what it would.")
    ] = False,
    here: Annotated[bool, typer.Option(help="Run it in this process, without workers.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait until it ends, or needs a person.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0, help="How long to wait.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Start a run.

    With --wait or --here the exit code is 0 if it completed, waits for a person, or, with --shadow,
    came to where it would write, and 1 if it ended in another way.
    """
    fleet = load(fleet_name)
    options: dict[str, Any] = {
        "goal": goal,
        "input": _parsed_input(input),
        "principal": Principal(
            "anonymous" if principal is None else principal, frozenset(permission or ())
        ),
        "budget": _parsed_budget(budget) if budget else None,
        "tenant": tenant,
        "run_id": run_id,
        "dedupe_key": dedupe_key,
        "mode": Mode.SHADOW if shadow else Mode.LIVE,
    }
    for_new_runs(fleet)
    if here:
        found = fleet.run(workflow, timeout_s=timeout_s, **options)
    else:
        found = fleet.get(fleet.enqueue(workflow, **options))
        if not fleet.settings.broker_url:
            note("no broker is running here: the run starts when a worker and a sweep do")
        if wait:
            found = fleet.wait(found, timeout_s=timeout_s)
    _show_run(found, as_json=as_json)
    if found.status == RunStatus.AWAITING_APPROVAL and not as_json:
        note(f"it waits for consent: {command('approve', found.run_id)}")
    if found.ended and found.status != RunStatus.COMPLETED and not _stopped_before_a_write(found):
        raise typer.Exit(FAILED)


@app.command()
def runs(
    status: Annotated[RunStatus | None, typer.Option(help="Only these.")] = None,
    workflow: OfWorkflow = None,
    tenant: OfTenant = None,
    tool: Annotated[
        str | None, typer.Option(help="Only what has sent, or rests on, a write of this tool.")
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Only what stopped with it.")] = None,
    older_than: OlderThan = None,
    limit: Limit = 50,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """List runs, the newest first."""
    fleet = for_reading(load_or_plain(fleet_name))
    found = fleet.runs(
        status=status.value if status else None,
        workflow=workflow,
        tenant=tenant,
        tool=tool,
        reason=reason,
        older_than_ms=duration_ms("--older-than", older_than),
        limit=limit,
    )
    if as_json:
        say_json([run.to_json() for run in found])
        return
    columns = (
        *("run", "workflow", "mode", "status", "reason"),
        *("steps", "model calls", "tool calls", "goal"),
    )
    show_table(
        table(
            columns,
            (
                (
                    run.run_id,
                    run.workflow,
                    run.mode,
                    run.status,
                    run.reason or "",
                    _used(run, "steps"),
                    _used(run, "model_calls"),
                    _used(run, "tool_calls"),
                    run.goal[:60],
                )
                for run in found
            ),
        )
    )


@app.command()
def effects(
    unresolved: Annotated[
        bool, typer.Option("--unresolved", help="Only those of unknown outcome.")
    ] = False,
    status: Annotated[EffectStatus | None, typer.Option(help="Only these.")] = None,
    tool: OfTool = None,
    tenant: OfTenant = None,
    workflow: OfWorkflow = None,
    older_than: OlderThan = None,
    limit: Limit = 50,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """List writes, the oldest first: how each stands, and which run it belongs to."""
    found = for_reading(load_or_plain(fleet_name)).effects(
        unresolved=unresolved,
        status=status.value if status else None,
        tool=tool,
        tenant=tenant,
        workflow=workflow,
        older_than_ms=duration_ms("--older-than", older_than),
        limit=limit,
    )
    if as_json:
        say_json(found)
        return
    columns = ("run", "tool", "status", "in doubt for", "attempts", "intent", "arguments")
    rows = (
        (
            one["owner_run_id"] or "",
            one["tool"],
            one["status"],
            "" if one["age_ms"] is None else lasting(one["age_ms"]),
            one["attempts"],
            one["intent_key"],
            compact(one["arguments"]),
        )
        for one in found
    )
    show_table(table(columns, rows))


@app.command()
def show(run_id: RunId, fleet_name: FleetName = None, as_json: AsJson = False) -> None:
    """Show one run: how it stands, what it has used, its effects, and what it waits for."""
    fleet = for_reading(load_or_plain(fleet_name))
    found = fleet.get(run_id)
    written = fleet.ledger.effects(run_id=run_id)
    asked = [one.shown for one in fleet.ledger.people.approvals(run_id=run_id)]
    handed_off = fleet.ledger.people.handoffs(run_id=run_id)
    if as_json:
        more = {"effects": written, "approvals": asked, "handoffs": handed_off}
        say_json(found.to_json() | more)
        return
    _show_run(found, as_json=False)
    if written:
        heading("effects")
        show_table(
            table(
                ("tool", "status", "attempts", "intent", "arguments", "evidence"),
                (
                    (
                        effect["tool"],
                        effect["status"],
                        effect["attempts"],
                        effect["intent_key"],
                        compact(effect["arguments"]),
                        effect["evidence"] or "",
                    )
                    for effect in written
                ),
            )
        )
    for approval in asked:
        heading("waits for approval of exactly this")
        show_table(details(_shown_action(approval)))
        note(f"agree: {command('approve', run_id)}")
    for handoff in handed_off:
        heading("handed off")
        package = handoff["package"]
        show_table(
            details(
                {
                    "reason": handoff["reason"],
                    "since": time_of(handoff["opened_at"]),
                    "problem": package.get("problem", ""),
                    "pending": compact(package.get("pending_action")),
                    "taken over by": package.get("takeover", "none"),
                }
            )
        )
        note(f"look at it: {command('handoff', 'show', handoff['id'])}")


@app.command()
def trace(
    run_id: RunId,
    check: Annotated[bool, typer.Option("--check", help="Audit and diagnose it.")] = False,
    rounds: Annotated[bool, typer.Option("--rounds", help="Show a loop's rounds.")] = False,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Print a run's trace: what was proposed, decided, called, proved, and why it stopped.

    With --check it says what became of each proposal, call and write, and exits 1 if something is
    missing: an answer to a proposal, a legal move, the reason of a stop. With --rounds it shows
    the five steps of each round of an agent loop.
    """
    fleet = for_reading(load_or_plain(fleet_name))
    if check:
        found = reviewed(fleet, run_id)
        say_json(found) if as_json else show_review(found)
        if not found["ok"]:
            raise typer.Exit(FAILED)
        return
    events = fleet.trace(run_id)
    if rounds:
        seen = rounds_of(events, fleet.get(run_id).goal)
        say_json(seen) if as_json else show_rounds(seen)
        return
    if as_json:
        say_json(events)
        return
    show_table(
        table(
            ("seq", "time", "step", "event", "detail"),
            (
                (e["seq"], time_of(e["at"]), e["step"], e["type"], compact(e["detail"]))
                for e in events
            ),
        )
    )


@app.command()
def cancel(
    run_id: RunId,
    reason: Annotated[str, typer.Option(help="Why; it is kept in the audit.")] = "",
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Cancel a run: nothing more is started, and what is in flight is found out, not denied."""
    fleet = for_writing(load_or_plain(fleet_name))
    _show_run(fleet.cancel(run_id, by=me(by), reason=reason), as_json=as_json)


# ---- people --------------------------------------------------------------------------------------

app.command("handoffs")(handoffs.handoffs)
app.add_typer(handoffs.handoff, name="handoff")
app.command("approvals")(approvals.approvals)
app.add_typer(approvals.approval, name="approval")
app.command("approve")(approvals.approve)
app.command("reject")(approvals.reject)
app.command("answer")(approvals.answer)
app.add_typer(audit.audit, name="audit")
app.add_typer(audit.principals, name="principals")
app.add_typer(ledger.ledger, name="ledger")


# ---- pauses --------------------------------------------------------------------------------------

TenantName = Annotated[str | None, typer.Option("--tenant", help="Of this tenant alone.")]
WorkflowName = Annotated[str | None, typer.Option("--workflow", help="Of this workflow alone.")]
ToolName = Annotated[str | None, typer.Option("--tool", help="Of this tool alone.")]


@app.command()
def pause(
    reason: Annotated[str, typer.Option(help="Why; whoever finds it paused reads this.")],
    tenant: TenantName = None,
    workflow: WorkflowName = None,
    tool: ToolName = None,
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Dispatch no write any more, of the whole fleet or of what an option names.

    Runs wait with it and use none of their working time; whatever is under way goes on to its end,
    and what is in doubt is still found out.
    """
    fleet = for_reading(load_or_plain(fleet_name))
    scope, name = _scope(tenant, workflow, tool)
    found = fleet.pause(scope, name, reason=reason, by=me(by))
    known = {Scope.WORKFLOW: fleet.workflows_known, Scope.TOOL: fleet.tools_known}.get(scope)
    if known and name not in known:
        note(f"no {scope} {name!r} is known here: is it spelled right?")
    say_json(found.to_json()) if as_json else say(f"paused: {_titled(scope, name)}")


@app.command()
def resume(
    tenant: TenantName = None,
    workflow: WorkflowName = None,
    tool: ToolName = None,
    reason: Annotated[str, typer.Option(help="Why; it is kept in the audit.")] = "",
    by: By = None,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Lift a pause; what waited on it goes on. Other pauses stay in force."""
    scope, name = _scope(tenant, workflow, tool)
    fleet = for_reading(load_or_plain(fleet_name))
    lifted = fleet.resume(scope, name, by=me(by), reason=reason)
    if as_json:
        say_json({"scope": scope.value, "name": name, "lifted": lifted})
    else:
        say(f"{'resumed' if lifted else 'not paused'}: {_titled(scope, name)}")


@app.command()
def pauses(fleet_name: FleetName = None, as_json: AsJson = False) -> None:
    """List what is paused, also by itself: a tool with too many effects of unknown outcome."""
    found = for_reading(load_or_plain(fleet_name)).pauses()
    if as_json:
        say_json([item.to_json() for item in found])
        return
    show_table(
        table(
            ("what", "since", "by", "reason"),
            (
                (
                    _titled(item.scope, item.name),
                    "" if item.paused_at is None else time_of(item.paused_at),
                    "itself" if item.automatic else item.paused_by,
                    item.reason,
                )
                for item in found
            ),
        )
    )


def _scope(tenant: str | None, workflow: str | None, tool: str | None) -> tuple[Scope, str]:
    """Read what a pause is about: what an option names, or the whole fleet."""
    options = ((Scope.TENANT, tenant), (Scope.WORKFLOW, workflow), (Scope.TOOL, tool))
    named = [(scope, name) for scope, name in options if name is not None]
    if len(named) > 1:
        raise InvalidPause("scope", "give one of --tenant, --workflow and --tool, or none")
    return named[0] if named else (Scope.FLEET, "")


def _titled(scope: Scope, name: str) -> str:
    return f"{scope} {name}".strip()


# ---- the deployment ------------------------------------------------------------------------------


@app.command()
def workflows(
    announce: Annotated[
        bool, typer.Option("--announce", help="Announce the fleet's workflows first.")
    ] = False,
    fleet_name: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of workflows that workers have announced, and how many runs need them.

    A version may be dropped when no run is pinned to it any more. New runs get the version that
    says so.
    """
    fleet = for_reading(load(fleet_name) if announce else load_or_plain(fleet_name))
    if announce:
        fleet.announce()
    found = fleet.workflow_versions()
    if as_json:
        say_json({"workflows": [asdict(listed) for listed in found]})
    elif not found:
        say("no workflow was announced: a worker does it when it starts")
    else:
        rows = (
            (
                listed.name,
                listed.version,
                time_of(listed.announced_at),
                f"{lasting(listed.seen_ms_ago)} ago",
                str(listed.pinned) + "+" * (listed.pinned == MOST_COUNTED),
                "yes" if listed.current else "",
            )
            for listed in found
        )
        columns = ("workflow", "version", "announced", "last seen", "pinned runs", "new runs")
        show_table(table(columns, rows))


@db.command("upgrade")
def upgrade(fleet_name: FleetName = None, as_json: AsJson = False) -> None:
    """Bring the database to this program's version. Safe to repeat, and from several places.

    A newer database on which this program may work is left as it is.
    """
    revision = load_or_plain(fleet_name).upgrade_database()
    if as_json:
        say_json({"revision": revision, "newer": revision > HEAD})
    elif revision > HEAD:
        say(
            f"the ledger's database is at revision {revision}, of a newer release, on which this"
            f" program ({HEAD}) may work: nothing was changed"
        )
    else:
        say(f"the ledger's database is at revision {revision}")


@app.command()
def doctor(fleet_name: FleetName = None, as_json: AsJson = False) -> None:
    """Check database, broker, settings and sweep, and say what must change.

    Exits 1 if something is wrong; warnings are for people to look at.
    """
    findings, figures = doctor_.examine(load_or_plain(fleet_name))
    is_fit = all(finding.level != doctor_.FAILURE for finding in findings)
    if as_json:
        described = [doctor_.to_json(finding) for finding in findings]
        say_json({"ok": is_fit, "findings": described, "figures": figures})
    else:
        rows = ((f.about, f.level, f.code, f.detail, f.next_step) for f in findings)
        show_table(table(("about", "level", "code", "detail", "what to do"), rows))
        if figures is not None:
            counts = ", ".join(f"{n} {status}" for status, n in sorted(figures["runs"].items()))
            say(f"runs under way: {counts or 'none'}")
    if not is_fit:
        raise typer.Exit(FAILED)


app.command()(health)


# ---- inside --------------------------------------------------------------------------------------


def _parsed_input(text: str | None) -> Json:
    if text is None:
        return None
    try:
        return parse_json(text)
    except NotCanonical as error:
        raise InvalidRun("input", f"it is no JSON: {error.problem}") from None


def _parsed_budget(limits: list[str]) -> dict[str, Any]:
    """Read NAME=N; a value that is no whole number is refused by the budget, by its name."""
    parsed: dict[str, Any] = {}
    per_tool: dict[str, Any] = {}
    for limit in limits:
        name, equals, text = limit.partition("=")
        if not equals:
            raise InvalidBudget(name, "missing", "a value, as in steps=8")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if name.startswith("per_tool."):
            per_tool[name.removeprefix("per_tool.")] = value
        else:
            parsed[name] = value
    return parsed | ({"per_tool": per_tool} if per_tool else {})


def _stopped_before_a_write(found: Run) -> bool:
    cancelled = found.status == RunStatus.CANCELLED and not found.cancel_requested
    return cancelled and found.mode == Mode.SHADOW


def _show_run(found: Run, *, as_json: bool) -> None:
    if as_json:
        say_json(found.to_json())
        return
    shown: dict[str, object] = {
        "run": found.run_id,
        "workflow": f"{found.workflow}@{found.workflow_version}",
        "mode": found.mode if found.mode != Mode.LIVE else "",
        "goal": found.goal,
        "status": found.status,
        "reason": found.reason or "",
        "answer": "" if found.answer is None else compact(found.answer),
        "created": time_of(found.created_at),
        "used": ", ".join(
            f"{_used(found, name)} {name.replace('_', ' ')}"
            for name in ("steps", "model_calls", "tool_calls")
        ),
        "cancel": "wished" if found.cancel_requested else "",
    }
    show_table(details({name: value for name, value in shown.items() if value != ""}))


def _shown_action(approval: dict[str, Any]) -> dict[str, object]:
    return {
        "tool": f"{approval['tool']}@{approval['contract_version']}",
        "arguments": compact(approval["arguments"]),
        "on behalf of": approval["subject"],
        "expires": time_of(approval["expires_at"]),
    }


def _used(run: Run, name: str) -> str:
    used = run.budget_used[name]
    return f"{used}/{used + run.budget_left[name]}"
