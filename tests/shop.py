"""A project with the shop's fleet in it, and the people who work there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from handrail import Principal
from handrail.testing.people import agree
from tests.test_cli import Project

SHOP: Final = (Path(__file__).parent / "shop_fleet.py").read_text("utf-8")
PEOPLE: Final[dict[str, list[str]]] = {
    "boss": ["admin"],
    "ann": ["operator"],
    "olga": ["operator"],
    "bob": ["approver"],
    "ada": ["approver"],
    "vera": ["viewer"],
}


class Shop(Project):
    """The shop's directory; commands are given as `ann`, unless `--as` says otherwise."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._agreed = 0
        (directory / f"{self.module}.py").write_text(SHOP)

    @property
    def path(self) -> Path:
        """The file of the ledger."""
        return self.directory / ".handrail" / "ledger.db"

    def staff(self) -> None:
        """Admit everybody."""
        for name, roles in PEOPLE.items():
            given = [word for role in roles for word in ("--role", role)]
            self("principals", "admit", name, *given, "--as", "boss")

    def parked(self, workflow: str = "pay", order: str = "order-42", **more: Any) -> str:
        """Start a run that waits for consent, or for an answer; returns its id."""
        payment = json.dumps({"order": order, **more})
        goal = f"Pay the roaster for {order}"
        options = ("--input", payment, "--principal", "buyer", "--here")
        return str(self.json("run", workflow, "--goal", goal, *options)["run_id"])

    def handed_off(self, workflow: str = "pay", order: str = "order-42", **more: Any) -> str:
        """Have a run's write end in doubt that only a person can settle; returns the handoff."""
        run_id = self.parked(workflow, order, **more)
        module = self.loaded
        for _ in range(module.fleet.ledger.people.approvals(run_id=run_id)[0].missing):
            agree(module.fleet, run_id, by=self._another())
        module.hurries = True
        run = module.fleet.drive(run_id)
        module.hurries = False
        module.OFFSET.write_text(str(module.offset_ms))
        assert run.status == "handed_off"
        (row,) = module.fleet.ledger.people.handoffs(run_id=run_id)
        return str(row["id"])

    def _another(self) -> Principal:
        self._agreed += 1
        return Principal(f"approver-{self._agreed}", roles=frozenset({"approver"}))

    def run_of(self, handoff_id: str) -> str:
        """The run that a handoff is about."""
        return str(self.json("handoff", "show", handoff_id)["run_id"])


@contextmanager
def opened(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, staffed: bool, database_url: str = ""
) -> Iterator[Shop]:
    """A shop in a directory of its own; commands are given by ann. Its ledger is the embedded one,
    or in the database that is named.
    """
    made = Shop(directory)
    for name in os.environ:
        if name.startswith("HANDRAIL_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HANDRAIL_FLEET", made.fleet)
    monkeypatch.setenv("HANDRAIL_OPERATOR", "ann")
    monkeypatch.setenv("HANDRAIL_DECISIONS_PER_MINUTE", "0")
    if database_url:
        monkeypatch.setenv("HANDRAIL_DATABASE_URL", database_url)
        monkeypatch.setenv("HANDRAIL_APPROVAL_SECRET", "a secret of the tests alone " + "x" * 32)
    made("db", "upgrade")
    if staffed:
        made.staff()
    yield made
    made.forget()
