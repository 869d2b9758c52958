"""The command line: `handrail demo | worker | run | runs | handoffs | handoff | approve | ...`.

Every error that we know is one line, `error[code]: what is wrong, and what to do about it`, on the
standard error; with `--json` it is an object on the standard output. Exit codes: 0 it worked, 1 it
did not, 2 bad input or refused, 3 something that we depend on is away: try again later.
"""

from __future__ import annotations

from handrail.cli.commands import app


def main() -> None:
    """Run the command that the process was started with."""
    app(prog_name="handrail")


__all__ = ["app", "main"]
