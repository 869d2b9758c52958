"""What Handrail costs, beside a bare Celery chain: `python -m benchmarks.run`, some minutes.

Every figure of speed is a ratio to the anchor, which runs in turn with what is measured: the machine's
speed drifts. Own processes, real servers, PostgreSQL with its default durability.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.anchor import Anchor
from benchmarks.deployment import Deployment
from benchmarks.fleet import called_at_ns
from benchmarks.processes import Family, Load
from handrail.testing.services import EmbeddedPostgres


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    runs: int = 200
    steps: int = 10
    rounds: int = 5
    lone_runs: int = 5
    lone_steps: int = 100
    first_steps: int = 60
    enqueues: int = 500
    finished: int = 100_000
    long_steps: int = 200
    long_runs: int = 10
    waiting_runs: int = 300
    waiting_steps: int = 5
    waiting_ms: int = 1_000
