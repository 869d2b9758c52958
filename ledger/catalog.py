"""The catalog of workflows: which versions the fleet has, and which of them are alive.

Workers announce what they have when they start, and say from then on that they have it. From that
alone it is known that a run's pinned version is gone: while nobody speaks, nothing is known.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from handrail.agent.protocol import Gone
from handrail.ledger.accept import SEEN_MS
from handrail.ledger.database import Database
from handrail.ledger.session import PG_NOW, again

#: How often a process says which versions it has, at most.
SEEN_EVERY_S: Final = 20.0
#: A version that nobody has named for so long has no worker at this moment.
MISSED_MS: Final = 60_000
#: So many runs that wait for a version are set going at once when it is back.
SET_GOING: Final = 1_000
#: The heartbeat that says since when some worker has been there without a gap.
WORKERS_SINCE: Final = "workers:since"


def seen_every_s(patience_ms: int) -> float:
    """How often to say which versions are here: several times within the patience."""
    return min(SEEN_EVERY_S, patience_ms / 4_000)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A version of a workflow that somebody has. `entry` is the text of what accepting takes."""

    name: str
    version: str
    entry: str

    @property
    def key(self) -> str:
        """The version's name, as a worker knows it."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class Listed:
    """A version in the catalog. `pinned`: runs that are not over, up to a bound; `current`: new
    runs of a light client get it.
    """

    name: str
    version: str
    announced_at: int
    seen_ms_ago: int
    pinned: int
    current: bool


class Catalog:
    """The catalog in one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._postgres = database.postgres
        self._now = PG_NOW if database.postgres else ":now"

    def announce(self, announced: Sequence[Announcement]) -> None:
        """Record versions; of one name the later one in the list is the newer. When a version was
        announced first stays as it is. What waits for one that was away goes on.
        """
        if not announced:
            return
        keys = [one.key for one in announced]
        away = set(keys) - again(lambda: self._alive(keys))
        calls: list[tuple[str, dict[str, Any]]] = [self._since()]
        # In one order, so that two who announce the same do not wait for each other.
        for later, one in sorted(enumerate(announced), key=lambda item: item[1].key):
            params = {"name": one.name, "version": one.version, "entry": one.entry, "later": later}
            calls.append((self._announcing(), self._timed(params)))
        if away:
            waiting = {"keys": self._array(sorted(away)), "most": SET_GOING}
            calls.append((self._set_going(), self._timed(waiting)))
        again(lambda: self._database.run_together(calls))

    def seen(self, keys: Collection[str], *, every_ms: int) -> set[str]:
        """Say that a live worker has these versions; returns those of them that the catalog knows,
        and what other workers have.
        """
        if not keys:
            return set()
        params = self._timed({"keys": self._array(sorted(keys)), "fresh_ms": every_ms // 2})
        there = (
            "SELECT name || '@' || version AS key FROM handrail_workflow"
            f" WHERE {self._ours} OR seen_at > {self._now} - {MISSED_MS}"
        )
        *_, known = self._database.run_together(
            [self._since(), (self._touching(), params), (there, params)]
        )
        return {row["key"] for row in known}

    def pass_on(self, run_ids: Collection[str], *, known: Collection[str]) -> None:
        """Have the sweep publish runs soon that came to a worker without their version, where
        another worker has it.
        """
        ids = f"SELECT id FROM handrail_run WHERE {self._any('id', 'ids')}"
        if self._postgres:
            ids += " FOR UPDATE SKIP LOCKED"
        theirs = self._any("r.workflow || '@' || r.workflow_version")
        self._database.run(
            f"""UPDATE handrail_run AS r SET wake_at = {self._now}
                WHERE r.id {f"= ANY (ARRAY({ids}))" if self._postgres else f"IN ({ids})"}
                    AND r.status IN ('queued', 'running', 'executing') AND r.lease_until IS NULL
                    AND r.cancel_requested_at IS NULL AND r.due_at <= {self._now}
                    AND r.wake_at > {self._now} AND NOT {theirs}
                    AND EXISTS (SELECT 1 FROM handrail_workflow AS w WHERE w.name = r.workflow
                        AND w.version = r.workflow_version
                        AND w.seen_at > {self._now} - {MISSED_MS})""",
            self._timed({"ids": self._array(sorted(run_ids)), "keys": self._array(sorted(known))}),
        )

    def gone(
        self, versions: Collection[tuple[str, str]], *, patience_ms: int
    ) -> dict[tuple[str, str], Gone]:
        """Which of these versions, by name and version, no worker has had for that long.

        None of them, unless some worker has been there all that time: a fleet that was away, or has
        just come back, has said nothing yet. A version of which a run is being worked on is there.
        """
        asked = sorted(set(versions))
        names = self._array([name for name, _ in asked])
        there = "(SELECT at FROM handrail_heartbeat WHERE name = :since)"
        rows = again(
            lambda: self._database.run(
                f"SELECT name, version, {self._now} - seen_at AS seen_ms_ago,"
                f" {self._now} - {there} AS there_ms FROM handrail_workflow"
                f" WHERE {self._any('name')} OR seen_at > {self._now} - {SEEN_MS}",
                self._timed({"keys": names, "since": WORKERS_SINCE}),
            )
        )
        there_ms = max((row["there_ms"] for row in rows if row["there_ms"] is not None), default=-1)
        up = any(row["seen_ms_ago"] < SEEN_MS for row in rows)
        if not up or there_ms < patience_ms:
            return {}
        seen = {(row["name"], row["version"]): row["seen_ms_ago"] for row in rows}
        found = {}
        for name, version in asked:
            ago = seen.get((name, version))
            if (ago is not None and ago < patience_ms) or self._at_work(name, version):
                continue
            live = sorted(v for (n, v), ms in seen.items() if n == name and ms < SEEN_MS)
            found[name, version] = Gone(
                workflow=name,
                version=version,
                seen_ms_ago=ago,
                live=tuple(live),
                patience_ms=patience_ms,
            )
        return found

    def listed(self, *, most: int) -> list[Listed]:
        """List all versions by name, the latest announced first."""
        rows = self._database.run(
            "SELECT name, version, announced_at, seen_at,"
            f" {self._now} - seen_at AS seen_ms_ago,"
            " (SELECT count(*) FROM (SELECT 1 FROM handrail_run AS r WHERE r.workflow = w.name"
            " AND r.workflow_version = w.version AND (r.wake_at IS NOT NULL OR r.status IN"
            " ('awaiting_approval', 'awaiting_input', 'handed_off')) LIMIT :most) AS p) AS pinned"
            " FROM handrail_workflow AS w ORDER BY name, announced_at DESC, version DESC",
            self._timed({"most": most}),
        )
        current: dict[str, str] = {}
        for row in sorted(rows, key=lambda row: row["seen_ms_ago"] >= SEEN_MS):  # as accepting does
            current.setdefault(row["name"], row["version"])
        return [
            Listed(
                name=row["name"],
                version=row["version"],
                announced_at=row["announced_at"],
                seen_ms_ago=max(0, row["seen_ms_ago"]),
                pinned=row["pinned"],
                current=current[row["name"]] == row["version"],
            )
            for row in rows
        ]

    # ---- inside ----------------------------------------------------------------------------------

    def _alive(self, keys: Sequence[str]) -> set[str]:
        rows = self._database.run(
            "SELECT name || '@' || version AS key FROM handrail_workflow"
            f" WHERE {self._ours} AND seen_at > {self._now} - {SEEN_MS}",
            self._timed({"keys": self._array(keys)}),
        )
        return {row["key"] for row in rows}

    def _at_work(self, name: str, version: str) -> bool:
        """Whether somebody holds a run of a version: also one of a release that announces none."""
        held = again(
            lambda: self._database.run(
                f"SELECT 1 AS held FROM handrail_run WHERE wake_at > {self._now}"
                f" AND lease_until > {self._now} AND workflow = :name"
                " AND workflow_version = :version LIMIT 1",
                self._timed({"name": name, "version": version}),
            )
        )
        return bool(held)

    def _since(self) -> tuple[str, dict[str, Any]]:
        """Record that workers are there from now on, where none was a moment ago."""
        sql = f"""
            INSERT INTO handrail_heartbeat (name, kind, at)
            SELECT :since, 'workers', {self._now} WHERE NOT EXISTS (SELECT 1
                FROM handrail_workflow WHERE seen_at > {self._now} - {SEEN_MS})
            ON CONFLICT (name) DO UPDATE SET at = excluded.at"""
        return sql, self._timed({"since": WORKERS_SINCE})

    def _announcing(self) -> str:
        return f"""
            INSERT INTO handrail_workflow (name, version, announced_at, seen_at, entry)
            VALUES (:name, :version, {self._now} + :later, {self._now}, :entry)
            ON CONFLICT (name, version) DO UPDATE
                SET seen_at = excluded.seen_at, entry = excluded.entry"""

    def _touching(self) -> str:
        """Touch what nobody has touched a moment ago; nobody waits for another who does."""
        stale = f"seen_at <= {self._now} - :fresh_ms"
        if not self._postgres:
            return f"UPDATE handrail_workflow SET seen_at = :now WHERE {self._ours} AND {stale}"
        return f"""
            UPDATE handrail_workflow SET seen_at = {PG_NOW}
            WHERE name || '@' || version = ANY (ARRAY(
                SELECT name || '@' || version FROM handrail_workflow
                WHERE {self._ours} AND {stale} FOR UPDATE SKIP LOCKED))"""

    def _set_going(self) -> str:
        """Have the sweep publish at once what is due and waits for these versions."""
        waiting = f"""SELECT id FROM handrail_run
            WHERE {self._any("workflow || '@' || workflow_version")}
                AND status IN ('queued', 'running', 'executing') AND lease_until IS NULL
                AND due_at <= {self._now} AND wake_at > {self._now} ORDER BY due_at LIMIT :most"""
        if self._postgres:
            return f"""UPDATE handrail_run SET wake_at = {PG_NOW}, publishes = 0
                WHERE id = ANY (ARRAY({waiting} FOR UPDATE SKIP LOCKED))"""
        return f"UPDATE handrail_run SET wake_at = :now, publishes = 0 WHERE id IN ({waiting})"

    @property
    def _ours(self) -> str:
        return self._any("name || '@' || version")

    def _any(self, column: str, of: str = "keys") -> str:
        """That a column is one of the texts of a parameter."""
        if self._postgres:
            return f"({column} = ANY(:{of}))"
        return f"({column} IN (SELECT value FROM json_each(:{of})))"

    def _array(self, values: Sequence[str]) -> str:
        return array(values) if self._postgres else json.dumps(list(values))

    def _timed(self, params: dict[str, Any]) -> dict[str, Any]:
        return params if self._postgres else {**params, "now": self._database.now()}


def array(values: Collection[str]) -> str:
    """Write texts as PostgreSQL itself writes an array."""
    quoted = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return "{" + ",".join(f'"{value}"' for value in quoted) + "}"


__all__ = ["Announcement", "Catalog", "Listed", "seen_every_s"]
