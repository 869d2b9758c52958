"""The command line: `handrail demo | worker | run | runs | handoffs | handoff | approve | ...`.

Every error that we know is one line, `error[code]: what is wrong, and what to do about it`, on the
standard error; with `--json` it is an object on the standard output. Exit codes: 0 it worked, 1 it
did not, 2 bad input or refused, 3 something that we depend on is away: try again later.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.cli.commands import app


def main() -> None:
    """Run the command that the process was started with."""
    if sys.argv[1:2] == ["health"]:  # a probe runs it every few seconds
        from handrail.cli.health import alone

        alone()(args=sys.argv[2:], prog_name="handrail health")
    from handrail.cli.commands import app

    app(prog_name="handrail")


def __getattr__(name: str) -> Any:
    """`app`, imported when it is first asked for."""
    if name == "app":
        from handrail.cli.commands import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["app", "main"]
