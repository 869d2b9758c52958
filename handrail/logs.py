"""Which run a log line is about, in text or as JSON; and what a line never says.

`RunFilter` puts the ids of the step or call under way into every record, the user's own and a
library's too. The formatters print ids, names and counts from an allow-list, and of an exception
its type and places: its text, like an argument, may hold what no log should.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType, TracebackType
from typing import Any, Final, Literal, TypeAlias

from pythonjsonlogger.json import JsonFormatter

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error", "critical"]
#: What a record carries while a run is at work.
IDS: Final = (
    *("run_id", "step", "epoch", "workflow", "tool", "effect_id"),
    *("trace_id", "span_id"),
)
#: What an event of ours adds. A record of another logger is not believed to mean the same by them.
FIGURES: Final = (
    *("event", "status", "was", "reason", "ms"),
    *("attempt", "doubt", "trigger", "answer", "matter_id"),
    *("looked_at", "counts"),
)
_OURS: Final = "handrail"
_NOTHING: Final[MappingProxyType[str, Any]] = MappingProxyType({})
_ABOUT: ContextVar[MappingProxyType[str, Any]] = ContextVar("handrail_logs", default=_NOTHING)


@contextmanager
def about(**ids: Any) -> Iterator[None]:
    """Let every record that is made in here carry these ids too.

    With the `run_id` of another run than outside, none of the outer ids is carried.
    """
    known = _ABOUT.get()
    same = ids.get("run_id") in (None, known.get("run_id"))
    token = _ABOUT.set(MappingProxyType(known | ids if same else ids))
    try:
        yield
    finally:
        _ABOUT.reset(token)


def event(log: logging.Logger, name: str, **figures: Any) -> None:
    """Log one of our events at INFO: a stable name, ids, enumerations and counts alone.

    A figure that is None is left out.
    """
    if log.isEnabledFor(logging.INFO):
        said = {figure: value for figure, value in figures.items() if value is not None}
        log.info(name, extra={"event": name, **said})


def _known(logger: str) -> tuple[str, ...]:
    """What may be printed of a logger's record beside its message."""
    ours = logger == _OURS or logger.startswith(f"{_OURS}.")
    return (*IDS, *FIGURES) if ours else IDS


class RunFilter(logging.Filter):
    """Puts the ids of what is under way into each record. It belongs on a handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add what the record does not say itself; never refuses one."""
        for name, value in _ABOUT.get().items():
            if value is not None and not hasattr(record, name):
                setattr(record, name, value)
        return True


class _Discreet(logging.Formatter):
    """Prints of an exception its type and the places it went through, and not its text."""

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        kind, _, trace = ei
        if kind is None:
            return ""
        return "".join(traceback.format_tb(trace)) + kind.__name__


class TextLines(_Discreet):
    """Plain lines, each with `run=... step=...` at its end."""

    def __init__(self) -> None:
        super().__init__("[%(asctime)s: %(levelname)s/%(processName)s] %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line itself, before an exception's places."""
        said = [
            f"{name.removesuffix('_id')}={vars(record)[name]}"
            for name in _known(record.name)
            if name in vars(record) and name != "event"  # which is the message
        ]
        return " ".join([super().formatMessage(record), *said])


class JsonLines(_Discreet, JsonFormatter):
    """One JSON object a line."""

    def __init__(self) -> None:
        JsonFormatter.__init__(
            self,
            "%(levelname)s %(name)s %(message)s %(process)d",
            timestamp="at",
            rename_fields={"levelname": "level", "name": "logger"},
            json_ensure_ascii=True,
        )

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        """Keep what is known: other libraries put arguments into their records."""
        first = ("at", "level", "logger", "message", "process", "exc_info")
        known = (*first, *_known(log_data["logger"]))
        return {name: log_data[name] for name in known if name in log_data}


def handler(log_format: LogFormat = "text") -> logging.Handler:
    """A handler on the standard error that prints lines in this format."""
    made = logging.StreamHandler()
    made.addFilter(RunFilter())
    made.setFormatter(JsonLines() if log_format == "json" else TextLines())
    return made


def configure(log_format: LogFormat = "text", level: str = "warning") -> None:
    """Set up the logging of a process that is all ours; it replaces the root's handlers."""
    root = logging.getLogger()
    for old in tuple(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler(log_format))
    root.setLevel(level.upper())


__all__ = ["JsonLines", "LogFormat", "LogLevel", "RunFilter", "TextLines", "about", "configure"]
