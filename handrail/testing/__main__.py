"""`python -m handrail.testing vectors FILE`: replay a file of runner vectors, say what differs.

One line a mismatch, then `N passed, M failed`. Exit code 0: all agree, 1: some differ, 2: the file
cannot be read, or a line of it is no vector.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from handrail.testing import fleet_vectors, vectors

_DRIVERS = {"machine": vectors.MACHINE, "fleet": fleet_vectors.FLEET}


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m handrail.testing")
    command = parser.add_subparsers(dest="command", required=True)
    replays = command.add_parser("vectors", help="replay a file of runner vectors")
    replays.add_argument("file", type=Path, help="one vector a line, as JSON")
    replays.add_argument(
        "--through",
        choices=sorted(_DRIVERS),
        default="machine",
        help="the pure machine, or the step shell with a ledger, on a virtual clock",
    )
    options = parser.parse_args(arguments)
    try:
        found = vectors.run_file(options.file, _DRIVERS[options.through])
    except vectors.BadVectors as error:
        print(f"handrail: {error}", file=sys.stderr)
        return 2
    for line in found.lines:
        print(line)
    print(f"{found.passed} passed, {found.failed} failed")
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
