"""Whoever lacks something to set up with is told what, in one line, and what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parent.parent / ".ci" / "venv"

# A Python that lacks what the argument says, and is this one otherwise.
LACKING = f"""#!/bin/sh
case "$*" in
    *"LACK"*) exit 1 ;;
    --version) echo "Python 3.9.2" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def _python_without(what: str, place: Path) -> Path:
    python = place / "python-without"
    python.write_text(LACKING.replace("LACK", what))
    python.chmod(0o755)
    return python


def _set_up(python: Path, place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SETUP, python, place], capture_output=True, text=True, check=False, cwd="/"
    )


@pytest.mark.parametrize(
    ("lacks", "told"),
    [
        ("version_info", "Python 3.9.2 is too old: install Python 3.11 or later"),
        ("import venv", "lacks the module venv: install it"),
    ],
)
def test_what_is_missing_is_said_in_one_line(lacks: str, told: str, tmp_path: Path) -> None:
    done = _set_up(_python_without(lacks, tmp_path), tmp_path / "venv")

    assert done.returncode == 1
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


def test_no_python_at_all_is_said_in_one_line(tmp_path: Path) -> None:
    done = _set_up(tmp_path / "python9", tmp_path / "venv")

    assert done.returncode == 1
    assert "no " in done.stderr and "install Python 3.11 or later" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_neither_ensurepip_nor_pip_is_said_in_one_line(tmp_path: Path) -> None:
    python = tmp_path / "python-without"
    python.write_text(LACKING.replace('*"LACK"*)', "*ensurepip*|*pip*)"))
    python.chmod(0o755)

    done = _set_up(python, tmp_path / "venv")

    assert done.returncode == 1
    assert "has no pip: install it" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_environment_that_is_there_is_left_alone(tmp_path: Path) -> None:
    python = Path(sys.executable)
    done = _set_up(python, python.parent.parent)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
