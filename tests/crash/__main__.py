"""The command: `python -m tests.crash`, or `make crash`.

Prints what was covered, how fast, and each violation with the command that repeats it. Exit status
0: nothing was found and nothing was missed; 1: something was; 2: the sweep itself failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.crash.cases import PLANS, Case, Report, Sweeper
from tests.crash.child import HarnessError
from tests.crash.databases import DATABASES, Server, open_server
from tests.crash.planted import PLANTED
from tests.crash.points import missing, table
from tests.crash.scenarios import KINDS, SCENARIOS, WAYS, Setting, settings

#: What a killed process has written is the kernel's, and lost by no kill: a file may lie in memory.
MEMORY: Final = Path("/dev/shm")
_TICKET: Final = struct.Struct("<I")
#: A violation is shown in full so often; of the rest, the command is enough.
_SHOWN: Final = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit status."""
    asked = _asked(arguments)
    logging.disable(logging.CRITICAL)  # what is lost and refused here is meant to be
    if asked.planted:
        PLANTED[asked.planted].plant()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # children write too
    status, told = 0, {}
    for name in asked.databases:
        with open_server(name) as server:
            report = _sweep(server, _units(name, asked), asked)
        if report is None:
            return 2
        lacks = missing(report.hits) if asked.whole else []
        _print(name, report, asked)
        for code, side in lacks:
            print(f"NOT COVERED: {code} {side}")
        if report.violations or report.unnamed or lacks:
            status = max(status, 1)
        if report.errors:
            status = 2
        told[name] = _told(report, lacks)
    if asked.json:
        asked.json.write_text(json.dumps(told))
    return status


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    add = parser.add_argument
    for name, known in (
        ("databases", DATABASES),
        ("scenarios", tuple(SCENARIOS)),
        ("kinds", tuple(KINDS)),
        ("ways", WAYS),
    ):
        add(f"--{name}", type=_choice(known), default=known, help=f"of: {','.join(known)}")
    add("--plans", type=_choice(PLANS), default=("singles",), help=f"of: {','.join(PLANS)}")
    add("--every", type=int, default=1, help="only every n-th place of a setting")
    add("--case", action="append", default=[], help="this case alone; can be repeated")
    add("--planted", choices=sorted(PLANTED), help="with this fault planted: it must be found")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="how many workers")
    add("--json", type=Path, help="where to write the figures to")
    asked = parser.parse_args(arguments)
    everything = (tuple(SCENARIOS), tuple(KINDS), WAYS) == (
        asked.scenarios,
        asked.kinds,
        asked.ways,
    )
    swept = {"brief", "singles"} & {*asked.plans}
    asked.whole = bool(everything and swept and asked.every == 1 and not asked.case)
    if asked.case:
        asked.databases = tuple(dict.fromkeys(case.split("/")[0] for case in asked.case))
    return asked


def _choice(known: Sequence[str]) -> Any:
    def chosen(text: str) -> tuple[str, ...]:
        names = tuple(text.replace(",", " ").split())
        if unknown := {*names} - {*known}:
            raise argparse.ArgumentTypeError(f"{unknown} is none of {', '.join(known)}")
        return names

    return chosen


# ---- the work, and who does it -------------------------------------------------------------------

#: A plan of a setting, or cases given by name.
Unit = tuple[str, Setting, tuple[str, ...]]


def _units(database: str, asked: argparse.Namespace) -> list[Unit]:
    if asked.case:
        cases = [case for case in asked.case if case.startswith(f"{database}/")]
        return [("", Case.parse(case).setting, (case,)) for case in cases]
    return [
        (plan, setting, ())
        for plan in asked.plans
        if plan != "cuts" or database == "postgres"  # a file has no connection
        for setting in settings()
        if setting.scenario.name in asked.scenarios
        and setting.kind in asked.kinds
        and setting.way in asked.ways
    ]


def _sweep(server: Server, units: Sequence[Unit], asked: argparse.Namespace) -> Report | None:
    """Share the units out among workers; None where one of them failed."""
    began = time.monotonic()
    reading, writing = os.pipe()
    for number in range(len(units)):
        os.write(writing, _TICKET.pack(number))
    os.close(writing)
    place = MEMORY if MEMORY.is_dir() else None
    report, well = Report(), True
    with tempfile.TemporaryDirectory(prefix="handrail-crash-", dir=place) as directory:
        homes = [Path(directory) / str(job) for job in range(min(asked.jobs, len(units)))]
        workers = [_worker(server, home, units, reading, asked) for home in homes]
        for worker in workers:
            well = os.waitpid(worker, 0)[1] == 0 and well
        os.close(reading)
        if not well:
            return None
        for home in homes:
            report.add(pickle.loads((home / "report").read_bytes()))
    report.seconds = time.monotonic() - began
    return report


def _worker(
    server: Server, home: Path, units: Sequence[Unit], tickets: int, asked: argparse.Namespace
) -> int:
    """Fork a worker: one thread, and no connection of anybody else's."""
    pid = os.fork()
    if pid:
        return pid
    status = 3
    try:
        home.mkdir()
        sweeper = Sweeper(server.place(int(home.name), home), home)
        while ticket := os.read(tickets, _TICKET.size):
            _work(sweeper, units[_TICKET.unpack(ticket)[0]], asked)
        (home / "report").write_bytes(pickle.dumps(sweeper.report))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _work(sweeper: Sweeper, unit: Unit, asked: argparse.Namespace) -> None:
    plan, setting, names = unit
    report, began = sweeper.report, time.monotonic()
    before, known = report.cases, len(report.violations)
    try:
        for name in names:
            _one(sweeper, Case.parse(name))
        if plan:
            for case, story in sweeper.cases(plan, setting, asked.every):
                sweeper.run(case, story)
    except HarnessError as error:
        report.errors.append(str(error))
    cases, seconds = report.cases - before, time.monotonic() - began
    found = f", {len(report.violations) - known} violations" if report.violations[known:] else ""
    title = f"{sweeper.database.name}/{setting}"
    print(f"{plan or 'case':8}{title:44}{cases:6} cases {cases / seconds:6.1f}/s{found}")


def _one(sweeper: Sweeper, case: Case) -> None:
    """Run one case, and show what is left of it."""
    if case.place:
        sweeper.run(case)
    else:
        sweeper.story(case.setting)
    print(sweeper.shown())


# ---- what is told --------------------------------------------------------------------------------


def _print(database: str, report: Report, asked: argparse.Namespace) -> None:
    print(f"\n{database}: {report.cases} cases in {report.seconds:.1f} s,", end=" ")
    print(
        f"{report.cases / max(report.seconds, 0.001):.1f}/s; {report.kills} processes killed,",
        end=" ",
    )
    print(f"{report.cuts} connections broken; {report.lines} kills at a line of code;", end=" ")
    print(f"{report.known} left what was recovered from before")
    print(f"slowest recovery {report.slowest_ms} ms of the ledger's time; runs ended as", end=" ")
    print(", ".join(f"{status} {count}" for status, count in report.ends.most_common()))
    if report.hits:
        print("\n" + table(report.hits))
    for what in sorted(report.unnamed):
        print(f"NOT IN THE PLAN: {what}; give it a point in tests/crash/points.py")
    planted = f" --planted {asked.planted}" if asked.planted else ""
    for number, (name, story) in enumerate(report.violations):
        print(f"\nVIOLATION: {story if number < _SHOWN else story.strip().splitlines()[-1]}")
        print(f"repeat it: python -m tests.crash{planted} --case {name}")
    for problem in report.errors:
        print(f"\nTHE SWEEP FAILED: {problem}")
    print(f"\n{database}: {len(report.violations)} violations")


def _told(report: Report, lacks: Sequence[Any]) -> dict[str, Any]:
    return {
        "cases": report.cases,
        "kills": report.kills,
        "cuts": report.cuts,
        "lines": report.lines,
        "known": report.known,
        "seconds": report.seconds,
        "slowest_ms": report.slowest_ms,
        "ends": report.ends,
        "missing": [f"{code}.{side}" for code, side in lacks],
        "unnamed": sorted(report.unnamed),
        "violations": [[name, story.strip().splitlines()[-1]] for name, story in report.violations],
    }


if __name__ == "__main__":
    sys.exit(main())
