"""Is this deployment fit to run, and what must change? Every finding has a code and a next step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import redis
from kombu.utils.url import maybe_sanitize_url

from handrail.broker.app import verify_app, verify_server
from handrail.broker.redis_client import redis_client, redis_url, ssl_options
from handrail.cli.ground import for_reading
from handrail.cli.options import lasting
from handrail.errors import HandrailError
from handrail.fleet import Fleet
from handrail.ledger.errors import DatabaseUnavailable
from handrail.ledger.ledger import MOST_COUNTED
from handrail.ledger.liveness import (
    PERIODS_MISSED,
    WORKER_SILENT_MS,
    beat_of,
    sweep_silent_ms,
)
from handrail.ledger.schema import HEAD, revision_of
from handrail.ledger.session import ConnectionLost
from handrail.shared_valkey import find

OK: Final = "ok"
WARNING: Final = "warning"  # it runs, and somebody should look
FAILURE: Final = "failure"  # it does not run, or must not

OLDEST_POSTGRES: Final = 130_000  # older ones get no fixes any more
LAG_MS: Final = 30_000  # of the sweep; an idle fleet has none
CLOCK_MS: Final = 2_000  # by which this machine's clock may differ from the database's
FULL: Final = 0.7  # of the broker's memory: beyond it a burst may fill the rest
DOUBT_MS: Final = 120_000  # an effect that has been unknown for longer than most providers need


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `next_step` is empty where all is well."""

    about: str
    level: str
    code: str
    detail: str
    next_step: str = ""


def examine(fleet: Fleet) -> tuple[list[Finding], dict[str, Any] | None]:
    """Look at everything; never raises what it finds. The figures are None without a ledger."""
    findings = [*_database(fleet)]
    figures = None
    if all(finding.level != FAILURE for finding in findings):
        waiting = fleet.ledger.people.waiting(most=MOST_COUNTED)
        figures = fleet.ledger.figures() | waiting
    findings += _broker(fleet)
    if figures is not None:
        findings += _workers(figures)
        findings += _sweep(fleet, figures)
        findings += _doubt(figures)
        findings += _people(fleet, figures)
        findings += _pauses(figures)
        findings += _rewinds(fleet)
    return findings, figures


def _database(fleet: Fleet) -> Iterator[Finding]:
    try:
        shown = for_reading(fleet).ledger.database.shown
        fleet.ledger.now()
    except ConnectionLost as lost:
        yield _failed("database", DatabaseUnavailable(str(lost)))
    except HandrailError as error:
        yield _failed("database", error)
    else:
        revision = revision_of(fleet.ledger.database)
        newer = f", of a newer release; this program ({HEAD}) may work on it"
        said = f"{shown}, at revision {revision}{newer if revision != HEAD else ''}"
        yield Finding("database", OK, "database-ready", said)
        if fleet.ledger.database.postgres:
            yield from _read_only(fleet)
            yield from _clock(fleet)
            yield from _postgres(fleet)


def _read_only(fleet: Fleet) -> Iterator[Finding]:
    [row] = fleet.ledger.database.run(
        "SELECT pg_is_in_recovery() AS replica,"
        " current_setting('transaction_read_only') AS read_only",
        {},
    )
    if row["read_only"] == "on":
        what = "the server is a replica" if row["replica"] else "its transactions are read-only"
        yield Finding(
            "database",
            FAILURE,
            "database-read-only",
            f"nothing can be written: {what}",
            "Have HANDRAIL_DATABASE_URL name the primary (of several hosts:"
            " ?target_session_attrs=read-write), and default_transaction_read_only be off.",
        )


def _clock(fleet: Fleet) -> Iterator[Finding]:
    """Whether this machine's clock is the database's, as nearly as the question's way tells."""
    asked = time.time() * 1000
    theirs = fleet.ledger.now()
    answered = time.time() * 1000
    off_ms = max(asked - theirs, theirs - answered)
    if off_ms > CLOCK_MS:
        side = "behind" if theirs > answered else "ahead of"
        yield Finding(
            "database",
            WARNING,
            "clock-off",
            f"this machine's clock is {off_ms / 1000:.1f} s {side} the database's, which the ledger"
            " goes by; your tools and logs go by this one",
            "Have the time of both machines set by NTP.",
        )


def _postgres(fleet: Fleet) -> Iterator[Finding]:
    """What the server promises of a commit; warnings, so that the figures are still looked at."""
    [row] = fleet.ledger.database.run(
        "SELECT current_setting('fsync') AS fsync,"
        " current_setting('full_page_writes') AS full_page_writes,"
        " current_setting('synchronous_commit') AS synchronous_commit,"
        " current_setting('server_version_num')::int AS version",
        {},
    )
    for name in ("fsync", "full_page_writes", "synchronous_commit"):
        if row[name] == "off":
            yield Finding(
                "database",
                WARNING,
                f"postgres-{name.replace('_', '-')}-off",
                f"{name} is off: a crash of the server may lose a dispatch that was committed, and"
                " with it the promise that a write is made once",
                f"Set {name} = on.",
            )
    if row["version"] < OLDEST_POSTGRES:
        yield Finding(
            "database",
            WARNING,
            "postgres-old",
            f"the server is of version {row['version'] // 10_000}",
            f"Upgrade it to {OLDEST_POSTGRES // 10_000} or later.",
        )


def _broker(fleet: Fleet) -> Iterator[Finding]:
    settings = fleet.settings
    if not settings.broker_url:
        if find(settings.home) is None:
            yield Finding(
                "broker",
                WARNING,
                "no-broker",
                "none is configured, and no command here runs an embedded one",
                "Start 'handrail worker', which brings one, or set HANDRAIL_BROKER_URL.",
            )
        else:
            yield Finding("broker", OK, "broker-ready", f"embedded, run from {settings.home}")
        return
    unsafe = [*verify_app(fleet.celery), *verify_server(fleet.celery)]
    for setting in unsafe:
        detail = f"{setting.setting} is {setting.found}, wanted: {setting.wanted}"
        yield Finding("broker", FAILURE, setting.code, detail, setting.next_step)
    if not unsafe:
        shown = maybe_sanitize_url(settings.broker_url)
        yield Finding("broker", OK, "broker-ready", f"{shown}, settings are safe")
        yield from _redis(fleet)


def _redis(fleet: Fleet) -> Iterator[Finding]:
    """What a Redis that evicts nothing may still do: forget at a restart, refuse when full.

    A service that does not say so of itself is not blamed.
    """
    url = redis_url(fleet.celery)
    if not url:
        return
    try:
        with redis_client(url, **ssl_options(fleet.celery)) as client:
            kept, memory = client.info("persistence"), client.info("memory")
    except (redis.RedisError, OSError):
        return  # it has answered a moment ago, and may not want to say this
    if kept.get("aof_enabled") == 0:
        yield Finding(
            "broker",
            WARNING,
            "redis-keeps-nothing",
            "appendonly is off: after a restart of Redis each step under way waits for the sweep",
            "Run 'CONFIG SET appendonly yes', and set it in the server's configuration.",
        )
    used, most = memory.get("used_memory", 0), memory.get("maxmemory", 0)
    if most and used > FULL * most:
        yield Finding(
            "broker",
            WARNING,
            "redis-nearly-full",
            f"{used * 100 // most} % of maxmemory is used; when it is full nothing is published",
            "Raise maxmemory, or see what else is kept on this server, and that workers keep up.",
        )


def _workers(figures: dict[str, Any]) -> Iterator[Finding]:
    beats = figures["heartbeats"].items()
    silences = [ms for name, ms in beats if name.startswith(beat_of(""))]
    live = sum(ms <= WORKER_SILENT_MS for ms in silences)
    if live:
        yield Finding("workers", OK, "workers-seen", f"hosts with one at work: {live}")
        return
    last = f"the last one {min(silences) // 1000} s ago" if silences else "nor any a day before"
    yield Finding(
        "workers",
        WARNING,
        "no-worker",
        f"no worker has been at work here within the last minute, {last}",
        "Start 'handrail worker'; what runs elsewhere must have this database and schema.",
    )


def _sweep(fleet: Fleet, figures: dict[str, Any]) -> Iterator[Finding]:
    every_ms = int(fleet.settings.sweep_every_s * 1000)
    silence_ms = figures["last_sweep_ms"]
    due = sum(figures["backlog"].values())
    waits = f"{'at least ' * figures['at_least']}{due} runs are due for it"
    start = (
        "Start 'handrail beat' and a worker, or workers with HANDRAIL_SWEEP_IN_WORKERS=true, or"
        " have cron run 'handrail reconcile --once'."
    )
    if silence_ms is None:
        level = FAILURE if due else WARNING
        said = f"it has never run here, and {waits}" if due else "it has never run here"
        yield Finding("sweep", level, "sweep-never-ran", said, start)
    elif due and silence_ms > PERIODS_MISSED * every_ms:
        detail = f"it last ran {silence_ms // 1000} s ago, and {waits}"
        yield Finding("sweep", FAILURE, "sweep-stopped", detail, start)
    elif silence_ms > sweep_silent_ms(fleet.settings.sweep_every_s):
        detail = f"it last ran {silence_ms // 1000} s ago"
        yield Finding("sweep", WARNING, "sweep-silent", detail, start)
    else:
        yield Finding("sweep", OK, "sweep-runs", f"it last ran {silence_ms} ms ago")
    if figures["sweep_lag_ms"] > LAG_MS:
        yield Finding(
            "sweep",
            WARNING,
            "sweep-lags",
            f"a run has waited for it for {figures['sweep_lag_ms'] // 1000} s; {waits}",
            "See that beat runs and that workers keep up with the queue handrail.reconcile.",
        )


def _doubt(figures: dict[str, Any]) -> Iterator[Finding]:
    unknown, oldest_ms = figures["unknown_effects"], figures["oldest_unknown_ms"]
    if unknown and oldest_ms > DOUBT_MS:
        yield Finding(
            "effects",
            WARNING,
            "effects-unknown",
            f"{unknown} of unknown outcome, the oldest for {oldest_ms // 1000} s",
            "See that the services which they were sent to answer queries.",
        )
    elif handed_off := figures["handed_off_effects"]:
        yield Finding(
            "effects",
            WARNING,
            "effects-with-people",
            f"{unknown} of unknown outcome that is still asked about, {handed_off} that only a"
            " person can settle",
            "Settle them: 'handrail handoffs'.",
        )
    else:
        yield Finding("effects", OK, "effects-settled", f"{unknown} of unknown outcome")


def _people(fleet: Fleet, figures: dict[str, Any]) -> Iterator[Finding]:
    """What waits for a person, and whether persons can decide it here."""
    by_priority = figures["handoffs_by_priority"]
    consents, questions = figures["pending_approvals"], figures["open_questions"]
    said = [
        _waits("handoffs", sum(by_priority.values()), figures["oldest_handoff_ms"], by_priority),
        _waits("approvals", consents, figures["oldest_approval_ms"], {}),
        f"{questions} questions",
    ]
    if any((by_priority, consents, questions)):
        look = "Look: 'handrail handoffs', 'handrail approvals'."
        yield Finding("people", WARNING, "people-needed", ", ".join(said), look)
    else:
        yield Finding("people", OK, "nobody-needed", "nothing waits for a person")
    try:
        fleet.desk.must_sign()
    except HandrailError as error:
        problem = "nobody can agree to anything: approval tokens cannot be signed here"
        yield Finding("approvals", WARNING, error.code, problem, f"{error}.")


def _waits(what: str, number: int, oldest_ms: int, by_priority: dict[str, int]) -> str:
    """How many of something wait, of which urgency, and the oldest for how long."""
    parts = [f"{count} of priority {priority}" for priority, count in by_priority.items()]
    parts += [f"the oldest for {lasting(oldest_ms)}"] if number else []
    return f"{number} {what}" + (f" ({', '.join(parts)})" if parts else "")


def _pauses(figures: dict[str, Any]) -> Iterator[Finding]:
    if not figures["pauses"]:
        yield Finding("pauses", OK, "nothing-paused", "every write may be dispatched")
    for pause in figures["pauses"]:
        what = f"{pause['scope']} {pause['name']}".strip()
        if pause["automatic"]:
            yield Finding(
                "pauses",
                WARNING,
                "too-many-unknown",
                f"{what} is sent nothing new: {pause['reason']}",
                "See that the service answers queries; what only a person can settle is in"
                " 'handrail handoffs'.",
            )
        else:
            option = "" if pause["scope"] == "fleet" else f" --{pause['scope']} {pause['name']}"
            yield Finding(
                "pauses",
                WARNING,
                "paused",
                f"{what} is paused by {pause['paused_by']}: {pause['reason']}",
                f"When it may go on: handrail resume{option}",
            )


def _rewinds(fleet: Fleet) -> Iterator[Finding]:
    for number, reason in fleet.ledger.rewinds.open().items():
        yield Finding(
            "ledger",
            WARNING,
            "ledger-rewound",
            f"it was set back (rewind {number}: {reason}): what may have been sent in the lost time"
            " is asked about before it is sent",
            "See what is settled, and when it may be cleared: 'handrail ledger status'.",
        )


def _failed(about: str, error: HandrailError) -> Finding:
    return Finding(about, FAILURE, error.code, *_parted(str(error)))


def _parted(message: str) -> tuple[str, str]:
    """An error's message says what is wrong, and after a colon what to do."""
    problem, colon, next_step = message.rpartition(": ")
    return (problem, next_step) if colon else (message, "")


def to_json(finding: Finding) -> dict[str, Any]:
    """A finding as a JSON object."""
    return asdict(finding)
