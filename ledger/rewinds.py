"""What is done about a ledger that was set back to an earlier state, as by a restored backup.

It has forgotten writes that were made. Until a person clears it, nothing is sent that may have been
sent in the lost time: a dispatch first asks the service (`protocol.dispatch`), under the rules by
which every doubt is resolved. Here is what the mark says, and who has set it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from handrail.agent import protocol
from handrail.agent.effects import QUERIES_PER_DISPATCH, Rewind
from handrail.agent.people import AuditEntry
from handrail.canonical import escaped, plain
from handrail.ledger import statements
from handrail.ledger.database import Database
from handrail.ledger.errors import FleetAtWork, InvalidMoment, NotSettled
from handrail.ledger.people import People, append_audit
from handrail.ledger.session import Session, again

#: A fleet whose last sign of life is older than this is at rest.
AT_REST_MS: Final = 60_000

#: A mark that was cleared too early, and is set again without another restore, has lost what it
#: had lost: so long it counts for where the next one's loss begins.
STILL_COUNTS_MS: Final = 30 * 24 * 3_600_000
#: Programs before this revision send without asking.
KNOWS_REWINDS: Final = "0003"

#: Where a loss begins, if nobody says it: at the last sign of life that the backup holds of whoever
#: sends and resolves; web processes give none, whatever they have accepted since it was restored.
#: Without any, everything that was ever begun may have been sent.
_BEGINNING: Final = """
    SELECT coalesce(
        (SELECT max(at) FROM handrail_heartbeat),
        (SELECT min(at) FROM (
            SELECT min(created_at) AS at FROM handrail_run
            UNION ALL SELECT min(at) FROM handrail_audit
            UNION ALL SELECT min(announced_at) FROM handrail_workflow) AS known),
        1) AS at"""
#: The earliest beginning of the losses that count still.
_EARLIER: Final = """
    SELECT min(lost_from) AS at FROM handrail_rewind
    WHERE cleared_at IS NULL OR cleared_at > :recently"""
#: Doubts that are being resolved: what was sent again in the lost time may land until later, and
#: no sender's word about one attempt says anything about those that are forgotten.
_LATER: Final = """
    UPDATE handrail_effect SET absences = 0, queries_left = :queries, doubt = 'unproven',
        dispatch_deadline_at = {greatest}(dispatch_deadline_at, :lost_until + {call_ms}),
        rewind = CASE WHEN status = 'handed_off' THEN rewind ELSE :number END
    WHERE status IN ('dispatched', 'unknown', 'handed_off')"""
#: Whoever holds a run is one of the lost time.
_FENCED: Final = """
    UPDATE handrail_run SET epoch = epoch + 1
    WHERE status NOT IN ('completed', 'compensated', 'failed', 'cancelled', 'budget_exhausted')"""
#: Runs that are about to send a write; most of these have sent none.
_ABOUT_TO_WRITE: Final = """
    SELECT r.id FROM handrail_run AS r JOIN handrail_effect AS e ON e.id = r.effect_id
    WHERE r.status IN ('running', 'executing') AND r.phase = 'write'
        AND e.status IN ('planned', 'absent') AND (e.rewind IS NULL OR e.rewind <> :number)
        AND r.id > :after
    ORDER BY r.id LIMIT :batch"""
_LISTED: Final = """
    SELECT number, lost_from, lost_until, reason, marked_by, cleared_at, cleared_by
    FROM handrail_rewind ORDER BY number"""
#: What became of the effects that were asked about under a mark, and which older runs go on.
_ASKED: Final = """
    SELECT status, count(*) AS effects FROM handrail_effect WHERE rewind = :number
    GROUP BY status ORDER BY status"""
_OLDER: Final = """
    SELECT count(*) AS runs, count(CASE WHEN status = 'handed_off' THEN 1 END) AS with_people
    FROM handrail_run
    WHERE status NOT IN ('completed', 'compensated', 'failed', 'cancelled', 'budget_exhausted')
        AND created_at <= :lost_until"""
_DOUBTS: Final = """
    SELECT count(*) AS doubts FROM handrail_effect
    WHERE status IN ('dispatched', 'unknown', 'handed_off')
        AND rewind IN (SELECT number FROM handrail_rewind WHERE cleared_at IS NULL)"""
_OPEN: Final = """
    SELECT number, reason FROM handrail_rewind WHERE cleared_at IS NULL ORDER BY number"""
_BATCH: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A rewind as it is recorded. `asked` counts by status the effects that were asked about under
    it; `older_runs` those runs from before it that have not ended, of which `with_people` wait for
    a person; none are counted once it is cleared.
    """

    rewind: Rewind
    reason: str
    marked_by: str
    cleared_at: int | None = None
    cleared_by: str | None = None
    asked: dict[str, int]
    older_runs: int = 0
    with_people: int = 0

    @property
    def is_open(self) -> bool:
        """Whether what may have been sent is still asked about first."""
        return self.cleared_at is None

    @property
    def doubts(self) -> int:
        """How many of the effects that were asked about are not settled yet."""
        return sum(self.asked.get(status, 0) for status in ("dispatched", "unknown", "handed_off"))

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "number": self.rewind.number,
            "open": self.is_open,
            "lost_from": self.rewind.lost_from,
            "lost_until": self.rewind.lost_until,
            "reason": self.reason,
            "by": self.marked_by,
            "cleared_at": self.cleared_at,
            "cleared_by": self.cleared_by,
            "asked": self.asked,
            "older_runs": self.older_runs,
            "with_people": self.with_people,
        }


def lost_in(rows: Sequence[dict[str, Any]]) -> Rewind | None:
    """Read what all the open marks together have lost (`statements.LOST`); None without any."""
    (row,) = rows
    return None if row["number"] is None else Rewind(**row)


class Rewinds:
    """The times that a ledger was set back."""

    def __init__(self, database: Database, people: People, rule: Callable[..., Any]) -> None:
        self.database = database
        self._people = people
        self._rule = rule
        self._postgres = database.postgres

    def mark(self, entry: AuditEntry, *, lost_from: int | None = None) -> Rewind:
        """Record that the ledger was set back just now, and ask about what is about to be sent.

        `lost_from` is the latest moment of the backup, in milliseconds since the epoch. Where none
        is given it is the last sign of life of a worker or a sweep, and nobody may have been at
        work since the backup was restored. Programs that know no rewinds can no longer start on
        this schema. A second mark asks about everything again. Raises `FleetAtWork`,
        `InvalidMoment`.
        """

        def write(tx: Session, now: int) -> Rewind:
            if lost_from is None:
                _must_be_at_rest(tx, now)
            elif not 0 < lost_from <= now:
                raise InvalidMoment("say a moment of the past")
            rewind = self._written(tx, entry, lost_from, now)
            tx.run(_FENCED, {})  # the runs before their effects, as whoever locks both
            greatest = "GREATEST" if self._postgres else "max"
            call_ms = "json_extract(terms, '$.call_ms')"
            if self._postgres:
                call_ms = "(terms::json->>'call_ms')::bigint"
            doubts = {
                "queries": QUERIES_PER_DISPATCH,
                "lost_until": now,
                "number": rewind.number,
            }
            tx.run(_LATER.format(greatest=greatest, call_ms=call_ms), doubts)
            tx.run(
                "UPDATE handrail_schema SET oldest_program = :known"
                " WHERE id = 1 AND oldest_program < :known",
                {"known": KNOWS_REWINDS},
            )
            append_audit(tx, entry, now, postgres=self._postgres)
            return rewind

        rewind = self._people.transact(write)
        for run_id in self._about_to_write(rewind):
            self._rule(run_id, protocol.asked_first)
        return rewind

    def _written(self, tx: Session, entry: AuditEntry, lost_from: int | None, now: int) -> Rewind:
        (earlier,) = tx.run(_EARLIER, {"recently": now - STILL_COUNTS_MS})
        (last,) = tx.run("SELECT coalesce(max(number), 0) AS number FROM handrail_rewind", {})
        if lost_from is None:
            (beginning,) = tx.run(_BEGINNING, {})
            lost_from = beginning["at"]
        known = (lost_from, earlier["at"], now)
        rewind = Rewind(
            number=last["number"] + 1,
            lost_from=min(moment for moment in known if moment is not None),
            lost_until=now,
        )
        tx.run(
            "INSERT INTO handrail_rewind (number, lost_from, lost_until, reason, marked_by)"
            " VALUES (:number, :lost_from, :lost_until, :reason, :by)",
            {
                "number": rewind.number,
                "lost_from": rewind.lost_from,
                "lost_until": rewind.lost_until,
                "reason": escaped(entry.reason),
                "by": escaped(entry.actor),
            },
        )
        return rewind

    def _about_to_write(self, rewind: Rewind) -> Iterator[str]:
        after = ""
        while True:
            params = {"number": rewind.number, "after": after, "batch": _BATCH}
            rows = again(partial(self.database.run, _ABOUT_TO_WRITE, params))
            for row in rows:
                yield row["id"]
            if len(rows) < _BATCH:
                return
            after = rows[-1]["id"]

    def clear(self, entry: AuditEntry, *, force: bool = False) -> Sequence[int]:
        """Take back all marks that are open: nothing new is asked about first. Returns their
        numbers.

        Raises `NotSettled` while runs from before them have not ended, or what was asked about is
        in doubt, unless `force`: what is in doubt then stays so, and those runs send unasked.
        """

        def write(tx: Session, now: int) -> list[int]:
            lost = lost_in(tx.run(statements.LOST, {}))
            if lost is not None and not force:
                (older,) = tx.run(_OLDER, {"lost_until": lost.lost_until})
                (found,) = tx.run(_DOUBTS, {})
                if older["runs"] or found["doubts"]:
                    raise NotSettled(older["runs"], older["with_people"], found["doubts"])
            cleared = tx.run(
                "UPDATE handrail_rewind SET cleared_at = :now, cleared_by = :by"
                " WHERE cleared_at IS NULL RETURNING number",
                {"now": now, "by": escaped(entry.actor)},
            )
            if cleared:
                append_audit(tx, entry, now, postgres=self._postgres)
            return sorted(row["number"] for row in cleared)

        return self._people.transact(write)

    def open(self) -> dict[int, str]:
        """The numbers of those that are not cleared, and why each was marked; quickly."""
        rows = self.database.run(_OPEN, {})
        return {row["number"]: plain(row["reason"]) for row in rows}

    def listed(self) -> list[Marked]:
        """List all, the earliest first, with what was asked and is to be settled."""
        return [self._marked(row) for row in self.database.run(_LISTED, {})]

    def _marked(self, row: dict[str, Any]) -> Marked:
        rewind = Rewind(
            number=row["number"], lost_from=row["lost_from"], lost_until=row["lost_until"]
        )
        asked = self.database.run(_ASKED, {"number": rewind.number})
        by = row["cleared_by"]
        older = {"runs": 0, "with_people": 0}
        if row["cleared_at"] is None:
            (older,) = self.database.run(_OLDER, {"lost_until": rewind.lost_until})
        return Marked(
            rewind=rewind,
            reason=plain(row["reason"]),
            marked_by=plain(row["marked_by"]),
            cleared_at=row["cleared_at"],
            cleared_by=None if by is None else plain(by),
            asked={one["status"]: one["effects"] for one in asked},
            older_runs=older["runs"],
            with_people=older["with_people"],
        )


def _must_be_at_rest(tx: Session, now: int) -> None:
    """Where somebody is at work, the ledger's latest moment is not the backup's."""
    found = tx.run("SELECT name, at FROM handrail_heartbeat ORDER BY at DESC LIMIT 1", {})
    if found and now - found[0]["at"] < AT_REST_MS:
        raise FleetAtWork(found[0]["name"], now - found[0]["at"])
