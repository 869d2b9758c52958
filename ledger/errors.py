"""Errors of the ledger, each with a stable code and a next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from handrail.errors import BadInput, HandrailError, TryLater


@dataclass(eq=False)
class NotMigrated(HandrailError):
    """The database lacks our tables, or has those of another version."""

    code: ClassVar[str] = "database-not-migrated"
    found: str | None
    wanted: str

    def __str__(self) -> str:
        if (self.found or "") > self.wanted:  # they are numbered, with zeros in front
            return (
                f"the ledger's database is at {self.found}, of a newer release than this one, which"
                f" knows {self.wanted} and cannot work on it: run the release of Handrail that has"
                " it"
            )
        return (
            f"the ledger's database is at {self.found or 'no version'}, this program needs"
            f" {self.wanted}: run 'handrail db upgrade'"
        )


@dataclass(eq=False)
class UnknownRevision(BadInput):
    """A revision of the schema that this program does not have: mistyped, or of a newer release."""

    code: ClassVar[str] = "unknown-revision"
    revision: str

    def __str__(self) -> str:
        return (
            f"this program knows no schema revision {self.revision!r}:"
            " run the release of Handrail that has it"
        )


@dataclass(eq=False)
class UnsupportedDatabase(BadInput):
    """The database URL names something that the ledger cannot live in."""

    code: ClassVar[str] = "unsupported-database"
    url: str
    problem: str

    def __str__(self) -> str:
        return (
            f"database {self.url!r}: {self.problem};"
            " use sqlite:///file.db or postgresql://user@host/name"
        )


@dataclass(eq=False)
class DatabaseUnavailable(TryLater):
    """The database cannot be reached, or the connection broke and nothing is known to be lost."""

    code: ClassVar[str] = "database-unavailable"
    problem: str

    def __str__(self) -> str:
        return (
            f"the ledger's database is away ({self.problem}):"
            " check HANDRAIL_DATABASE_URL and the server"
        )


@dataclass(eq=False)
class LedgerLocked(DatabaseUnavailable):
    """Somebody else has held what a statement needs for longer than it may wait; nothing was
    written.
    """

    code: ClassVar[str] = "ledger-locked"

    def __str__(self) -> str:
        return (
            f"somebody has held a lock in the ledger's database for too long ({self.problem}):"
            " end the transaction that was left open (PostgreSQL: see pg_stat_activity; SQLite:"
            " another program that has the file open), and try again"
        )


@dataclass(eq=False)
class UnknownRun(BadInput):
    """No run has this id (in this tenant)."""

    code: ClassVar[str] = "unknown-run"
    run_id: str

    def __str__(self) -> str:
        return f"there is no run {self.run_id!r}: list them with 'handrail runs'"


@dataclass(eq=False)
class RunExists(BadInput):
    """A run with this id was enqueued before, with something else in it."""

    code: ClassVar[str] = "run-exists"
    run_id: str

    def __str__(self) -> str:
        return f"run {self.run_id!r} exists already: give another run_id, or a dedupe_key"


@dataclass(eq=False)
class EffectForgotten(HandrailError):
    """Something was sent for an effect that is not in the ledger: the ledger was set back."""

    code: ClassVar[str] = "effect-forgotten"
    effect_id: str

    def __str__(self) -> str:
        return (
            f"the ledger knows no effect {self.effect_id!r}, which was sent on its word: it was"
            " set back to an earlier state. Stop the workers and run 'handrail ledger rewound'"
        )


@dataclass(eq=False)
class FleetAtWork(BadInput):
    """Workers or sweeps are at work on a ledger that is to be marked as set back."""

    code: ClassVar[str] = "fleet-at-work"
    name: str
    ago_ms: int

    def __str__(self) -> str:
        return (
            f"{self.name} was at work {self.ago_ms / 1000:.0f} s ago: stop all workers, beats and"
            " sweeps and try again a minute later; or, where they have worked on the restored"
            " ledger already, say with --lost-from what the backup's latest moment is"
        )


@dataclass(eq=False)
class NotSettled(BadInput):
    """What a ledger that was set back has forgotten may be sent yet."""

    code: ClassVar[str] = "not-settled"
    older_runs: int
    with_people: int
    doubts: int

    def __str__(self) -> str:
        return (
            f"{self.older_runs} runs from before it have not ended, {self.with_people} of them wait"
            f" for a person, and {self.doubts} writes are in doubt: let them end, and see `handrail"
            " ledger status`; or, if you know that none of them has sent anything in the lost time,"
            " say --force"
        )


@dataclass(eq=False)
class InvalidMoment(BadInput):
    """The moment from which on a ledger has lost what it knew cannot be right."""

    code: ClassVar[str] = "invalid-moment"
    problem: str

    def __str__(self) -> str:
        return f"--lost-from: {self.problem}"
