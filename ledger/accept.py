"""Accepting a run: one statement, through the ledger's own connection or a host's.

Light: a web process that accepts runs imports this and no agent code. What a run of a workflow
begins with was prepared by whoever has its code, and stands in the ledger's catalog.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from handrail.canonical import digest, escaped, plain
from handrail.ledger.errors import RunExists
from handrail.ledger.session import PG_NOW, Session

#: The sweep publishes a due step again after 10 s, then 20 s, 40 s, ... at most every 10 minutes.
REPUBLISH_MS: Final = 10_000
#: A version of a workflow that some worker has named within this time is alive.
SEEN_MS: Final = 120_000

_TIMES: Final = ("created_at", "due_at", "wake_at", "deadline_at", "expires_at")
_TABLE: Final = re.compile(r"\bhandrail_\w+\b")


@dataclass(frozen=True, slots=True)
class NewRow:
    """A run as its row will be. `columns` are all but those that hold a time; `events` is the text
    of its first trace, `per_tool` a JSON object of the limits of single tools.
    """

    columns: Mapping[str, Any]
    events: str
    per_tool: str
    working_ms: int
    expires_ms: int

    @property
    def run_id(self) -> str:
        """The run's id."""
        run_id: str = self.columns["id"]
        return run_id


_BY_KEY: Final = (
    "SELECT id FROM handrail_run WHERE tenant = :tenant AND mode = :mode"
    " AND dedupe_key = :dedupe_key"
)


@dataclass(frozen=True, slots=True)
class DueStep:
    """A step that is due: what a message about it says. It grants nothing."""

    run_id: str
    step: int
    epoch: int
    deadline_at: int | None
    remaining_ms: int | None
    budget: dict[str, int]
    traceparent: str | None


@dataclass(frozen=True, slots=True)
class Inserted:
    """What accepting a run did: its id, whether it is new, and its first step if it is."""

    run_id: str
    created: bool
    due: DueStep | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A workflow in the catalog: the version that new runs get, and what accepting one takes.
    `taken` is the run that has the dedupe key with which it was looked up.
    """

    workflow: str
    version: str
    prepared: Mapping[str, Any]
    taken: str | None = None


def accept(
    tx: Session,
    new: NewRow,
    *,
    postgres: bool,
    schema: str = "",
    now: int | None = None,
    writer: str | None = None,
) -> Inserted:
    """Insert a run, or find the one that has its id or dedupe key; `RunExists` where they differ.

    `now` is the ledger's time where the database has no clock (SQLite); None: this machine's.
    `writer` proves who inserted it: a random text.
    """
    params = {
        **new.columns,
        "working_ms": new.working_ms,
        "expires_ms": new.expires_ms,
        "writer": writer or secrets.token_hex(16),
        "events": new.events,
        "per_tool": new.per_tool,
        "now": time.time_ns() // 1_000_000 if now is None else now,
    }
    names = tuple(new.columns)
    statement = _insert_postgres(names, schema) if postgres else _insert_sqlite(names)
    inserted = tx.run(statement, params)
    if not inserted or not inserted[0]["created"]:
        return _existing(tx, new, schema)
    created_at = inserted[0]["now"]
    row = new.columns
    due = DueStep(
        new.run_id,
        row["step"],
        0,
        created_at + new.working_ms,
        new.working_ms,
        snapshot(row),
        row["traceparent"],
    )
    return Inserted(new.run_id, True, due)


def current_entry(
    tx: Session,
    workflow: str,
    *,
    postgres: bool,
    schema: str = "",
    now: int | None = None,
    key: Mapping[str, str] | None = None,
) -> Entry | None:
    """Look up what a new run of a workflow gets: of the versions that live workers have the one
    that was announced last; of none is alive, of all. `key` is its `tenant`, `mode` and
    `dedupe_key`, where a run may have that already.
    """
    clock = PG_NOW if postgres else ":now"
    taken = f"({_BY_KEY})" if key else "NULL"
    sql = f"""
        SELECT version, entry, {taken} AS taken FROM handrail_workflow WHERE name = :name
        ORDER BY CASE WHEN seen_at > {clock} - {SEEN_MS} THEN 0 ELSE 1 END,
                 announced_at DESC, version DESC
        LIMIT 1"""
    params: dict[str, Any] = {"name": workflow, **(key or {})}
    if not postgres:
        params["now"] = time.time_ns() // 1_000_000 if now is None else now
    rows = tx.run(qualified(sql, schema), params)
    if not rows:
        return None
    (row,) = rows
    return Entry(workflow, row["version"], json.loads(row["entry"]), row["taken"])


def snapshot(row: Mapping[str, Any]) -> dict[str, int]:
    """What a message says of the budget that is left."""
    return {
        "steps": row["steps_left"],
        "model_calls": row["model_calls_left"],
        "tool_calls": row["tool_calls_left"],
    }


def qualified(sql: str, schema: str) -> str:
    """Name the schema of our tables, for a connection whose search path is a host's."""
    return _TABLE.sub(rf'"{schema}".\g<0>', sql) if schema else sql


@lru_cache(maxsize=8)
def _insert_postgres(columns: tuple[str, ...], schema: str) -> str:
    """Insert a run with its first trace and its allowances, unless its id or dedupe key is taken;
    the times are by the database's clock.
    """
    values = [*(f":{column}" for column in columns), *_times("c.now")]
    return qualified(
        f"""
        WITH run AS (
            INSERT INTO handrail_run ({", ".join((*columns, *_TIMES))})
            SELECT {", ".join(values)} FROM (SELECT {PG_NOW} AS now) AS c
            ON CONFLICT DO NOTHING RETURNING id, created_at AS now), traced AS (
            INSERT INTO handrail_trace (run_id, seq, count, writer, at, events)
            SELECT id, 0, :trace_seq, :writer, now, :events FROM run), allowed AS (
            INSERT INTO handrail_tool_allowance (run_id, tool, calls_left)
            SELECT run.id, tool.key, CAST(tool.value AS bigint)
            FROM run, json_each_text(CAST(:per_tool AS json)) AS tool)
        SELECT now, true AS created FROM run""",
        schema,
    )


@lru_cache(maxsize=8)
def _insert_sqlite(columns: tuple[str, ...]) -> str:
    """The same through a view whose trigger writes the three tables: SQLite writes one a statement.

    What was inserted by us bears our `writer`.
    """
    names = (*columns, *_TIMES, "writer", "events", "per_tool")
    brought = (":writer", ":events", ":per_tool")
    values = [*(f":{column}" for column in columns), *_times(":now"), *brought]
    return f"""
        INSERT INTO handrail_accept ({", ".join(names)}) VALUES ({", ".join(values)})
        RETURNING created_at AS now, (SELECT count(*) FROM handrail_trace
            WHERE run_id = :id AND seq = 0 AND writer = :writer) AS created"""


def _times(now: str) -> tuple[str, ...]:
    """The values of the columns that hold a time, in their order."""
    return (now, now, f"{now} + {REPUBLISH_MS}", f"{now} + :working_ms", f"{now} + :expires_ms")


def id_by_key(tenant: str, mode: str, dedupe_key: str) -> str:
    """The id of a run that is accepted later, so that each click knows the same one before."""
    return digest("run", tenant, mode, dedupe_key)[:32]


def accepted_by_key(tx: Session, tenant: str, mode: str, dedupe_key: str) -> str:
    """The id of the run that has a dedupe key, or is going to have it (`id_by_key`)."""
    known = tx.run(_BY_KEY, {"tenant": tenant, "mode": mode, "dedupe_key": escaped(dedupe_key)})
    return str(known[0]["id"]) if known else id_by_key(tenant, mode, dedupe_key)


_SAME: Final = ("id", "tenant", "principal", "workflow", "goal", "input", "mode")


def _existing(tx: Session, new: NewRow, schema: str) -> Inserted:
    rows = tx.run(
        qualified(
            f"SELECT {', '.join(_SAME)} FROM handrail_run"
            " WHERE id = :id OR (tenant = :tenant AND mode = :mode AND dedupe_key = :dedupe_key)",
            schema,
        ),
        {name: new.columns[name] for name in ("id", "tenant", "mode", "dedupe_key")},
    )
    asked = {name: new.columns[name] for name in _SAME}
    tenant, mode, key = (new.columns[name] for name in ("tenant", "mode", "dedupe_key"))
    by_key = key is not None and new.run_id == id_by_key(tenant, mode, plain(key))
    for row in rows:
        # Of another id, or by its key: a double click is one run. Of the same: asked once more.
        if by_key or row["id"] != new.run_id or row == asked:
            return Inserted(row["id"], False, None)
    raise RunExists(new.run_id)


__all__ = [
    "DueStep",
    "Entry",
    "Inserted",
    "NewRow",
    "accept",
    "accepted_by_key",
    "current_entry",
    "qualified",
    "snapshot",
]
