"""What many commands share: their options, how times are read and shown, who acts."""

from __future__ import annotations

import getpass
import re
import shlex
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final

import typer

from handrail.errors import BadInput

JSON_WANTED: Final = "handrail.json"
#: What stands in a hint for a person's own words; no command takes it for any.
YOUR_WORDS: Final = "..."
_GIVEN_AGAIN: Final = {"by": "--as", "fleet_name": "--fleet"}
_given: ContextVar[typer.Context | None] = ContextVar("given", default=None)
_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"([0-9]{1,9})([smhd])")
_LONGEST_MS: Final = 2**52


@dataclass(eq=False)
class InvalidDuration(BadInput):
    """An amount of time on the command line that cannot be read."""

    code: ClassVar[str] = "invalid-duration"
    option: str
    text: str

    def __str__(self) -> str:
        return f"{self.option}: {self.text!r} is no time: write it as 90s, 15m, 2h or 3d"


@dataclass(eq=False)
class InvalidOption(BadInput):
    """An option or argument that is missing, or cannot be read."""

    code: ClassVar[str] = "invalid-option"
    problem: str

    def __str__(self) -> str:
        return f"{self.problem} (see --help)"


def duration_ms(option: str, text: str | None) -> int:
    """Read `90s`, `15m`, `2h` or `3d`; nothing is 0. Raises `InvalidDuration`."""
    if text is None:
        return 0
    found = _DURATION.fullmatch(text)
    time_ms = int(found[1]) * _UNITS_MS[found[2]] if found else None
    if time_ms is None or time_ms > _LONGEST_MS:
        raise InvalidDuration(option, text)
    return time_ms


def lasting(time_ms: int) -> str:
    """Write an amount of time for people: its two largest units."""
    parts = []
    for unit, size_ms in reversed(_UNITS_MS.items()):
        amount, time_ms = divmod(time_ms, size_ms)
        if amount:
            parts.append(f"{amount}{unit}")
    return " ".join(parts[:2]) or "0s"


def time_of(at: int) -> str:
    """Write an instant of the ledger's clock, in UTC."""
    return datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def command(*words: str) -> str:
    """Write a command so that it can be typed, or pasted into a shell, as it is: with the `--as`
    and `--fleet` of the one that hints at it, where it takes them.
    """
    return shlex.join(["handrail", *words, *_given_again(words)])


def _given_again(words: Sequence[str]) -> list[str]:
    context = _given.get()
    if context is None:
        return []
    taken = _options_of(context.find_root().command, words)
    again: list[str] = []
    for name, option in _GIVEN_AGAIN.items():
        source = context.get_parameter_source(name)
        said = source is not None and source.name == "COMMANDLINE"  # the environment stays as it is
        if said and option in taken and option not in words:
            again += [option, str(context.params[name])]
    return again


def _options_of(found: Any, words: Sequence[str]) -> set[str]:
    """The options of the command that these words begin with."""
    for word in words:
        inner = getattr(found, "commands", {}).get(word)
        if inner is None:
            break
        found = inner
    return {option for parameter in found.params for option in parameter.opts}


def _remembered(context: typer.Context, value: str | None) -> str | None:
    _given.set(context)
    return value


def me(name: str | None) -> str:
    """Return who gives the command: as it was said, or the login name."""
    if name:
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a process without a user's name
        return "nobody"


def _wants_json(context: typer.Context, value: bool) -> bool:
    wanted = value or bool(context.meta.get(JSON_WANTED))  # also where a group was told so
    context.meta[JSON_WANTED] = wanted  # errors are to be JSON as well
    return wanted


AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=_wants_json,
        is_eager=True,  # before an option that cannot be read
        help="Print JSON, errors included.",
    ),
]
FleetName = Annotated[
    str | None,
    typer.Option(
        "--fleet",
        envvar="HANDRAIL_FLEET",
        metavar="MODULE:ATTRIBUTE",
        callback=_remembered,
        help="Your fleet.",
    ),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
By = Annotated[
    str | None,
    typer.Option(
        "--as",
        envvar="HANDRAIL_OPERATOR",
        metavar="NAME",
        callback=_remembered,
        help="Who you are; your login name.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask; it takes --reason.")]
OfTenant = Annotated[str | None, typer.Option("--tenant", help="Only of this tenant.")]
OfWorkflow = Annotated[str | None, typer.Option("--workflow", help="Only of this workflow.")]
OfTool = Annotated[str | None, typer.Option("--tool", help="Only of this tool.")]
OlderThan = Annotated[
    str | None, typer.Option("--older-than", metavar="TIME", help="As in 90s, 15m, 2h, 3d.")
]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")]
