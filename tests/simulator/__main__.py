"""Play schedules: `python -m tests.simulator --seeds 20000`; one of them told: `--seed 7
--explain`; the planted bugs, each of which must be found: `--bugs`.

Exits with 1 on a broken promise, a cell that nothing has struck, or a planted bug that was missed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tests.simulator.coverage import Tally
from tests.simulator.search import bugs, explain, play, search


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2_000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--explain", action="store_true", help="tell its timeline")
    parser.add_argument("--bugs", nargs="*", metavar="ID", help="search for planted bugs")
    given = parser.parse_args(arguments)
    if given.bugs is not None:
        return bugs(given.bugs, given.jobs)
    if given.seed is not None:
        if given.explain:
            return explain(given.seed)
        what = play(given.seed, Tally())
        print(what or "no promise was broken")
        return 1 if what else 0
    return search(given.first, given.seeds, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
