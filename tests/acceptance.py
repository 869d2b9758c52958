"""Which tests carry which acceptance criterion, and whether they pass.

A test names its criteria: `@pytest.mark.accept("RUN-07", "BUD-02")`; an id that docs/acceptance.md
does not have fails the collection. A run of the whole suite leaves its outcomes in the file
.acceptance.json, with a digest of its tree. As a program (`make acceptance`) this module prints
every criterion with its tests; it runs the suite first where that record is missing or of another
tree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
DOCUMENT: Final = ROOT / "docs" / "acceptance.md"
RECORD: Final = ROOT / ".acceptance.json"
TREE: Final = ("agent", "gateway", "ledger", "broker", "tasks", "reconciler", "handrail", "tests")
PROPERTY: Final = "accept"

AREA = re.compile(r"^## ([A-Z]{3})\. (.+)$")
CRITERION = re.compile(r"^- \*\*([A-Z]{3}-\d\d)\*\* (.+)$")
RANGE = re.compile(r"^([A-Z]{3})-(\d\d)(?:\.\.(\d\d))?$")


class Standing(StrEnum):
    """How a criterion stands, the worst of its tests first."""

    FAILS = "FAIL"  # a test that carries it failed, or did not run to its end
    PASSES = "pass"
    BARE = "none"  # no test carries it


@dataclass(frozen=True, slots=True)
class Criterion:
    """One criterion of the document: its id, the title of its area, its text without mark-up."""

    id: str
    area: str
    text: str


def criteria(document: str) -> dict[str, Criterion]:
    """Read the criteria of the document, in its order. Raise ValueError for an id given twice."""
    found: dict[str, Criterion] = {}
    area = ""
    for line in document.splitlines():
        if heading := AREA.match(line):
            area = f"{heading[1]}. {heading[2]}"
        elif entry := CRITERION.match(line):
            if entry[1] in found:
                raise ValueError(f"{DOCUMENT.name} has {entry[1]} twice")
            found[entry[1]] = Criterion(entry[1], area, entry[2].replace("**", ""))
    return found


def claimed(text: str, known: Iterable[str]) -> list[str]:
    """Read a list of ids: `RUN-01..28` or `LED-13` a line or word, `#` opens a comment.

    Raise ValueError for a word that is neither, and for an id that is not among `known`.
    """
    ids: list[str] = []
    for word in " ".join(line.partition("#")[0] for line in text.splitlines()).split():
        parts = RANGE.match(word)
        if parts is None:
            raise ValueError(f"{word!r} is neither an id nor a range such as RUN-01..28")
        first, last = int(parts[2]), int(parts[3] or parts[2])
        ids += [f"{parts[1]}-{number:02}" for number in range(first, last + 1)]
    if unknown := sorted(set(ids) - set(known)):
        raise ValueError(f"{DOCUMENT.name} has no {', '.join(unknown)}")
    return ids


def digest_of_the_tree() -> str:
    """Return a digest of everything an outcome of the suite may depend on within the repository."""
    files = [ROOT / "pyproject.toml", DOCUMENT]
    for folder in TREE:
        files += (file for file in (ROOT / folder).rglob("*") if file.is_file())
    digest = hashlib.sha256()
    for file in sorted(files):
        if "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(ROOT)}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


class AcceptanceRecord:
    """The pytest plugin: it checks the ids, and keeps the outcomes of a complete run.

    Under xdist it works in every process: the ids travel to the controlling one with each report.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._known = criteria(DOCUMENT.read_text("utf8"))
        self._writes = not hasattr(config, "workerinput") and _runs_everything(config)
        self._digest = digest_of_the_tree() if self._writes else ""
        self._ids: dict[str, list[str]] = {}
        self._passed: dict[str, bool] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        problems = [
            problem
            for item in report.result
            if isinstance(item, pytest.Item)
            for problem in self._attach_ids(item)
        ]
        if problems:
            report.outcome, report.longrepr = "failed", "\n".join(problems)
        return report

    def _attach_ids(self, item: pytest.Item) -> Iterator[str]:
        """Let the item's reports carry its ids. Yield what is wrong with them."""
        for mark in item.iter_markers(PROPERTY):
            if not mark.args:
                yield f"{item.nodeid}: accept() names no criterion"
            for id in mark.args:
                item.user_properties.append((PROPERTY, id))
                if id not in self._known:
                    yield f"{item.nodeid}: {DOCUMENT.name} has no criterion {id!r}"

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._writes = self._writes and not items

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ids = [str(value) for name, value in report.user_properties if name == PROPERTY]
        if ids:
            self._ids[report.nodeid] = sorted(set(ids))
            so_far = self._passed.get(report.nodeid, True)
            self._passed[report.nodeid] = so_far and report.passed

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if self._writes and complete:
            tests = {
                test: {"ids": ids, "passed": self._passed[test]} for test, ids in self._ids.items()
            }
            RECORD.write_text(json.dumps({"tree": self._digest, "tests": tests}, indent=1), "utf8")


def _runs_everything(config: pytest.Config) -> bool:
    narrowing = ("keyword", "markexpr", "collectonly", "lf", "maxfail")
    from_testpaths = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return from_testpaths and not any(config.getoption(name, None) for name in narrowing)


def _tests_by_id(record: Mapping[str, Any]) -> dict[str, dict[str, list[bool]]]:
    """Return, for each id, the outcomes of each test that carries it; parameters fall together."""
    found: dict[str, dict[str, list[bool]]] = {}
    for test, entry in sorted(record["tests"].items()):
        for id in entry["ids"]:
            found.setdefault(id, {}).setdefault(test.partition("[")[0], []).append(entry["passed"])
    return found


def standing(tests: Mapping[str, Sequence[bool]]) -> Standing:
    """Say how a criterion stands whose tests, with their cases, ended like this."""
    if not tests:
        return Standing.BARE
    return Standing.PASSES if all(map(all, tests.values())) else Standing.FAILS


def _report(
    known: Mapping[str, Criterion], tests: Mapping[str, Mapping[str, Sequence[bool]]]
) -> str:
    return "\n".join([*_details(known, tests), "", *_summary(known, tests)])


def _details(
    known: Mapping[str, Criterion], tests: Mapping[str, Mapping[str, Sequence[bool]]]
) -> Iterator[str]:
    area = ""
    for criterion in known.values():
        if criterion.area != area:
            area = criterion.area
            yield f"\n{area}"
        carriers = tests.get(criterion.id, {})
        text = criterion.text if len(criterion.text) <= 100 else criterion.text[:99] + "…"
        yield f"  {standing(carriers):4}  {criterion.id}  {text}"
        for test, outcomes in carriers.items():
            cases = f" ({sum(outcomes)} of {len(outcomes)} cases pass)" if len(outcomes) > 1 else ""
            yield f"                {'passes' if all(outcomes) else 'FAILS '} {test}{cases}"


def _summary(
    known: Mapping[str, Criterion], tests: Mapping[str, Mapping[str, Sequence[bool]]]
) -> Iterator[str]:
    counts: dict[str, dict[Standing, int]] = {}
    for criterion in known.values():
        row = counts.setdefault(criterion.area, dict.fromkeys(Standing, 0))
        row[standing(tests.get(criterion.id, {}))] += 1
    counts["Total"] = {s: sum(row[s] for row in counts.values()) for s in Standing}
    yield f"{'area':58} {'pass':>5} {'fail':>5} {'none':>5}"
    for area, row in counts.items():
        yield (f"{area:58} {row[Standing.PASSES]:5} {row[Standing.FAILS]:5} {row[Standing.BARE]:5}")


def _current_record() -> dict[str, Any] | None:
    if not RECORD.exists():
        return None
    record: dict[str, Any] = json.loads(RECORD.read_text("utf8"))
    return record if record["tree"] == digest_of_the_tree() else None


def main(arguments: Sequence[str]) -> int:
    """Print the criteria and their tests. Return 1 if one fails, or a required one has no test."""
    parser = argparse.ArgumentParser(description="The acceptance criteria and their tests.")
    parser.add_argument("--require", type=Path, help="file of ids that need a passing test")
    parser.add_argument("--pytest-args", default="", help="for the run that fills the record")
    options = parser.parse_args(arguments)
    known = criteria(DOCUMENT.read_text("utf8"))
    required = claimed(options.require.read_text("utf8"), known) if options.require else []

    record = _current_record()
    if record is None:
        print("no outcomes of this tree yet: running the tests", flush=True)
        # -P: the root folders must not become importable by their bare names
        command = [sys.executable, "-P", "-m", "pytest", "-q", *shlex.split(options.pytest_args)]
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
        record = _current_record()
        if record is None:
            print("the tests did not run to their end: see above", file=sys.stderr)
            return 1

    tests = _tests_by_id(record)
    print(_report(known, tests))
    failing = [id for id in known if standing(tests.get(id, {})) is Standing.FAILS]
    missing = [id for id in required if standing(tests.get(id, {})) is Standing.BARE]
    for title, ids in (("failing", failing), ("required, without a test", missing)):
        if ids:
            print(f"\n{title}: {' '.join(ids)}")
    return 1 if failing or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
