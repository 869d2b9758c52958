"""Is the process that this check stands for at work? For probes, which run it every few seconds.

Judged by what the ledger's rows say was done, never by an open socket or an answer to a ping: a
worker can have both and do nothing. Light, so that a probe costs a fraction of a second.
"""

from __future__ import annotations

import json
import socket
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from handrail.errors import HandrailError, TryLater
from handrail.ledger.database import Database, ledger_file
from handrail.ledger.errors import DatabaseUnavailable, NotMigrated
from handrail.ledger.liveness import (
    SWEPT,
    WORKER_SILENT_MS,
    beat_of,
    silence_ms,
    sweep_silent_ms,
)
from handrail.ledger.schema import HEAD, lacks_the_table
from handrail.ledger.session import ConnectionLost
from handrail.settings import Settings

FAILED = 1  # as in handrail.cli.errors, which is too heavy for a probe
TRY_LATER = 3


class Kind(StrEnum):
    """What a process is there for."""

    WORKER = "worker"
    BEAT = "beat"


def health(
    kind: Annotated[Kind, typer.Option(help="Whose work is looked for.")] = Kind.WORKER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, errors included.")] = False,
) -> None:
    """Say whether this host's worker, or the sweep, has been at work lately; for health checks.

    It reads the environment (HANDRAIL_*) and no fleet. Exits 1 if not, and 3 where the database
    cannot be asked: that is no reason to start a worker again.
    """
    try:
        settings = Settings.read()
        code, detail = look(settings, kind)
    except ConnectionLost as lost:
        raise typer.Exit(_failed(DatabaseUnavailable(str(lost)), as_json)) from None
    except HandrailError as error:
        raise typer.Exit(_failed(error, as_json)) from None
    healthy = code.endswith("-works")
    if as_json:
        print(json.dumps({"ok": healthy, "code": code, "detail": detail}))
    elif healthy:
        print(detail)
    else:
        print(f"error[{code}]: {detail}", file=sys.stderr)
    if not healthy:
        raise typer.Exit(FAILED)


def look(settings: Settings, kind: Kind) -> tuple[str, str]:
    """Return a code, which ends in `-works` where all is well, and what there is to say."""
    file = ledger_file(settings.database)
    if file is not None and not file.exists():  # and none is made by looking
        return "no-ledger", f"there is no ledger in {file.parent.absolute()}"
    if kind is Kind.WORKER:
        host = socket.gethostname()
        name, whose, most_ms = beat_of(host), f"a worker of {host}", WORKER_SILENT_MS
    else:
        name, whose, most_ms = SWEPT, "the sweep", sweep_silent_ms(settings.sweep_every_s)
    ago_ms = _silence_ms(settings, name)
    if ago_ms is None:
        return f"{kind}-unseen", f"{whose} has never been at work here"
    if ago_ms > most_ms:
        detail = f"{whose} was last at work {ago_ms // 1000} s ago; allowed: {most_ms // 1000} s"
        return f"{kind}-silent", detail
    return f"{kind}-works", f"{whose} was at work {ago_ms / 1000:.1f} s ago"


def _silence_ms(settings: Settings, name: str) -> int | None:
    database = Database(settings.database, schema=settings.database_schema)
    try:
        return silence_ms(database, name)
    except Exception as error:
        if lacks_the_table(error):
            raise NotMigrated(None, HEAD) from None
        raise
    finally:
        database.close()


def _failed(error: HandrailError, as_json: bool) -> int:
    if as_json:
        found: dict[str, Any] = {"code": error.code, "message": str(error)}
        print(json.dumps({"error": found}))
    else:
        print(f"error[{error.code}]: {error}", file=sys.stderr)
    return TRY_LATER if isinstance(error, TryLater) else FAILED


def alone() -> typer.Typer:
    """This command without the others, which would take a second to import."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command("health", context_settings={"help_option_names": ["-h", "--help"]})(health)
    return app
