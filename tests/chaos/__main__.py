"""Run the chaos: `python -m tests.chaos --minutes 5`, or `make chaos MINUTES=5`.

Exit code 1: a promise was broken, a target was missed, or too few kinds of fault took place.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final

from tests.chaos import checks
from tests.chaos.kinds import Pace
from tests.chaos.load import AWAY, Load, restless
from tests.chaos.nemesis import CATALOGUE, Nemesis, plan
from tests.chaos.report import Report
from tests.chaos.stack import Stack

PEACE_S: Final = 90.0
#: What a worker's log holds where an exception got through that nobody had expected.
UNEXPECTED: Final = re.compile(r"^.*(?:crashed|Traceback|Unrecoverable).*$", re.MULTILINE)


def run(
    *, seed: int, seconds: float, database: str, pace: Pace, per_s: float, keep: Path | None
) -> Report:
    """Let a fleet work under a nemesis, give it peace, and check what it has promised."""
    faults = plan(seed, seconds, database=database, scale=pace.scale)
    with Stack(pace, database, seed) as stack:
        load = Load(stack, seed, per_s)
        nemesis = Nemesis(stack, faults, _say)
        try:
            with load.running():
                nemesis.rage(seconds)
            rested_s = _peace(stack, load)
        finally:
            load.close()
        seen = checks.read(
            stack.direct,
            stack.provider_records,
            accepted=load.accepted,
            asked=load.asked,
            ran_out=load.ran_out,
        )
        crashes = [
            f"{name}: {line}"
            for name, log in stack.logs().items()
            for line in UNEXPECTED.findall(log)
        ]
        report = Report(
            seed=seed,
            seconds=seconds,
            database=database,
            default_pace=pace.scale == 1,
            rested_s=rested_s,
            seen=seen,
            faults=nemesis.happened,
            known_kinds=sum(kind.only in ("", database) for kind in CATALOGUE.values()),
            violations=checks.violations(seen),
            recoveries=checks.recoveries(seen),
            handed_off=checks.handed_off(seen),
            counts=load.counts,
            crashes=crashes,
            troubles=nemesis.failed,
        )
        if keep is not None:
            stack.keep_evidence(keep)
        return report


def _peace(stack: Stack, load: Load) -> float | None:
    """Wait until everything rests; return how long that took, None where it was too long."""
    began = time.monotonic()
    while time.monotonic() < began + PEACE_S:
        try:
            if not restless(stack.direct) and not stack.in_the_air():
                return time.monotonic() - began
        except AWAY:
            pass  # its first statement after a restart
        time.sleep(0.5)
    return None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # through every `finally` on the way


def main(arguments: list[str] | None = None) -> int:
    """Run, print the report, and say whether every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, help="instead of --minutes")
    parser.add_argument("--seed", type=int, help="of the drawing; default: another each time")
    parser.add_argument("--database", choices=("postgresql", "sqlite"), default="postgresql")
    parser.add_argument("--per-s", type=float, default=5.0, help="runs enqueued a second")
    parser.add_argument("--scale", type=float, default=1.0, help="of all times; 1: the defaults")
    parser.add_argument("--keep", type=Path, help="a directory to copy logs and records to")
    options = parser.parse_args(arguments)
    seconds = options.seconds or options.minutes * 60
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    signal.signal(signal.SIGTERM, _leave)
    logging.basicConfig(level=logging.ERROR)  # that servers are away is what we are here for
    _say(f"chaos: --seed {seed} --seconds {seconds:g} --database {options.database}")
    report = run(
        seed=seed,
        seconds=seconds,
        database=options.database,
        pace=Pace(options.scale),
        per_s=options.per_s,
        keep=options.keep,
    )
    report.show()
    return 1 if report.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
