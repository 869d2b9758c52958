"""How a command ends in an error: one line and an exit code, or one JSON object."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, Final

from handrail.agent.approvals import ApprovalRefused
from handrail.agent.resolution import ResolutionRefused
from handrail.broker.verify import UnsafeConfiguration
from handrail.errors import BadInput, HandrailError, TryLater
from handrail.terminal import visible

FAILED: Final = 1
BAD_INPUT: Final = 2
TRY_LATER: Final = 3


def report(error: HandrailError, *, as_json: bool) -> int:
    """Print an error; returns the exit code that it means."""
    if as_json:
        print(json.dumps({"error": _described(error)}))
    else:
        for code, message in _lines(error):
            print(f"error[{code}]: {visible(message)}", file=sys.stderr)
    if isinstance(error, TryLater):
        return TRY_LATER
    return BAD_INPUT if isinstance(error, BadInput) else FAILED


def _lines(error: HandrailError) -> list[tuple[str, str]]:
    if isinstance(error, UnsafeConfiguration):
        return [
            (s.code, f"{s.setting} is {s.found}, wanted: {s.wanted}. {s.next_step}")
            for s in error.settings
        ]
    return [(error.code, str(error))]


def _described(error: HandrailError) -> dict[str, Any]:
    found: dict[str, Any] = {"code": error.code, "message": str(error)}
    if isinstance(error, ApprovalRefused | ResolutionRefused):
        return {**found, "problem": error.problem}  # stable, as the code is
    if isinstance(error, UnsafeConfiguration):
        return {**found, "settings": [asdict(setting) for setting in error.settings]}
    return found
