"""Who has been at work lately, by rows: a worker's host, and the sweep.

Light, since a health check starts a process for it: no agent code and no tables. A row says that
somebody reached the ledger and wrote; an open socket, or an answer to a ping, says neither.
"""

from __future__ import annotations

from typing import Any, Final

from handrail.ledger.database import Database
from handrail.ledger.session import PG_NOW

#: A host whose worker has not written for so long has none: three of its periods.
WORKER_SILENT_MS: Final = 60_000
#: Of a host that is gone for good, the row goes too: in a cluster each new worker is a new host.
FORGOTTEN_MS: Final = 24 * 3_600_000
#: The sweep may be silent for so many of its periods, and in any case for so long.
PERIODS_MISSED: Final = 3
LEAST_SILENCE_MS: Final = 15_000
SWEPT: Final = "sweep"
WORKER: Final = "worker"


def beat_of(host: str) -> str:
    """The name of the heartbeat that the workers of a host write."""
    return f"{WORKER}:{host}"


def sweep_silent_ms(every_s: float) -> int:
    """How long no sweep may have run, where one is due every so often."""
    return max(LEAST_SILENCE_MS, int(PERIODS_MISSED * every_s * 1000))


def say_alive(database: Database, host: str) -> None:
    """Record that a worker of this host is at work; in one trip. Hosts of yesterday are dropped."""
    now = PG_NOW if database.postgres else ":now"
    params: dict[str, Any] = {"name": beat_of(host), "kind": WORKER, "old_ms": FORGOTTEN_MS}
    if not database.postgres:
        params["now"] = database.now()
    old = f"SELECT name FROM handrail_heartbeat WHERE kind = :kind AND at < {now} - :old_ms"
    if database.postgres:  # nobody waits for another who drops the same
        old += " FOR UPDATE SKIP LOCKED"
    database.run_together(
        [
            (
                f"INSERT INTO handrail_heartbeat (name, kind, at) VALUES (:name, :kind, {now})"
                " ON CONFLICT (name) DO UPDATE SET at = excluded.at, kind = excluded.kind",
                params,
            ),
            (f"DELETE FROM handrail_heartbeat WHERE name IN ({old})", params),
        ]
    )


def silence_ms(database: Database, name: str) -> int | None:
    """How long ago a heartbeat was written, by the database's clock; None: never."""
    now = PG_NOW if database.postgres else ":now"
    params: dict[str, Any] = {"name": name}
    if not database.postgres:
        params["now"] = database.now()
    rows = database.run(
        f"SELECT {now} - at AS ago FROM handrail_heartbeat WHERE name = :name", params
    )
    return max(0, int(rows[0]["ago"])) if rows else None
