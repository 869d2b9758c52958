"""What a command stands on: broker and ledger as they are configured, or the embedded ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from handrail.errors import BadInput
from handrail.fleet import Fleet
from handrail.ledger.database import ledger_file
from handrail.shared_valkey import SharedValkey, ended_with, find, shared_valkey


@dataclass(eq=False)
class NoLedger(BadInput):
    """A ledger in a file is meant, and there is none in this place. None was made."""

    code: ClassVar[str] = "no-ledger"
    place: str

    def __str__(self) -> str:
        return (
            f"there is no ledger in {self.place}: ask where your worker was started, or set"
            " HANDRAIL_HOME or HANDRAIL_DATABASE_URL; 'handrail db upgrade' makes a new one here"
        )


def for_reading(fleet: Fleet) -> Fleet:
    """A fleet whose ledger can be read: no broker is needed, and nothing is made on the way."""
    file = ledger_file(fleet.settings.database)
    if file is not None and not file.exists():
        raise NoLedger(str(file.parent.absolute()))
    return fleet


def for_writing(fleet: Fleet) -> Fleet:
    """A fleet whose runs can be moved."""
    return _joined(for_reading(fleet))


def for_new_runs(fleet: Fleet) -> Fleet:
    """A fleet that accepts runs, also the first one in this place."""
    return _joined(fleet)


@contextmanager
def for_work(fleet: Fleet, *, worker: bool) -> Iterator[SharedValkey | None]:
    """Make a fleet ready for a worker or a beat, and check that it is.

    Where no broker is configured the embedded one is joined or started, for as long as this block.
    Raises what start-up verification finds.
    """
    if fleet.settings.broker_url:
        fleet.verify(worker=worker)
        yield None
        return
    with shared_valkey(fleet.settings.home) as valkey:
        _join(fleet, valkey)
        fleet.verify(worker=worker)
        with ended_with(valkey):
            yield valkey


def _joined(fleet: Fleet) -> Fleet:
    """Let the embedded broker know of what happens to runs, if one is up and none is configured."""
    if not fleet.settings.broker_url:
        _join(fleet, find(fleet.settings.home))
    return fleet


def _join(fleet: Fleet, valkey: SharedValkey | None) -> None:
    if valkey is not None:
        fleet.settings = fleet.settings.model_copy(update={"broker_url": valkey.url})
