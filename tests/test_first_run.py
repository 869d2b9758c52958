"""What docs/django.md and docs/flask.md say of a first run, done to the letter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
SECONDS = 45.0


def blocks(page: str) -> tuple[dict[str, str], list[str]]:
    """The files and the commands of a page's first chapter."""
    chapter = (DOCS / page).read_text("utf8").split("\n## ")[1]
    files = dict(re.findall(r"`([\w/]+\.py)`[^\n]*:\n\n```python\n(.*?)```", chapter, re.S))
    (commands,) = re.findall(r"```console\n(.*?)```", chapter, re.S)
    return files, commands.strip().splitlines()


def lines_of(files: dict[str, str]) -> int:
    """What a user writes: of a file that is shown whole, the lines that are marked as new."""
    count = 0
    for text in files.values():
        lines = [line for line in text.splitlines() if line.strip()]
        marked = [line for line in lines if line.endswith("# new")]
        count += len(marked or lines)
    return count


def environment() -> dict[str, str]:
    """A shell in which nothing of this repository's own is set."""
    ours = ("HANDRAIL_", "DJANGO_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"}


@contextmanager
def started(command: str, place: Path) -> Iterator[None]:
    """A command that goes on beside the others, from when it says that it is ready."""
    log = place / "worker.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, shell=True, cwd=place, env=environment(), stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        subprocess.run(
            ["sh", "-c", f"until grep -q ^ready: {log}; do sleep 0.1; done"],
            timeout=SECONDS,
            check=True,
        )
        yield
    finally:
        os.killpg(process.pid, 15)
        process.wait(SECONDS)


def run(command: str, place: Path) -> str:
    done = subprocess.run(
        command, shell=True, cwd=place, env=environment(), capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.live
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("page", "prepare"),
    [
        ("django.md", f"{sys.executable} -m django startproject mysite ."),
        ("flask.md", "true"),
    ],
)
def test_ten_lines_are_enough_for_the_first_controlled_run(
    page: str, prepare: str, tmp_path: Path
) -> None:
    files, (first, worker, last) = blocks(page)
    assert lines_of(files) <= 10
    run(prepare, tmp_path)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write("\n" + text)
    run(first, tmp_path)
    with started(worker, tmp_path):
        found = json.loads(run(f"{last} --json", tmp_path))
    assert found["status"] == "completed"
    assert set(found["answer"]) == {"users"}
