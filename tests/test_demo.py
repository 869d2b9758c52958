"""`handrail demo` as a user starts it: real workers, a real provider, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from handrail.demo.messages import load_messages

SECONDS = 150  # for a whole demo; only a failure, or a very busy machine, takes that long
MAILS = {message["id"]: message for message in load_messages()}

pytestmark = [pytest.mark.live, pytest.mark.timeout(SECONDS + 30)]


@contextmanager
def demo(directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A demo that makes its temporary directory in `directory`."""
    with (directory / "errors.log").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "handrail", "demo", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "TMPDIR": str(place_of(directory))},
        )
    too_late = threading.Timer(SECONDS, process.kill)
    too_late.start()
    try:
        with process:
            yield process
    finally:
        too_late.cancel()
        process.kill()


def place_of(directory: Path) -> Path:
    place = directory / "tmp"
    place.mkdir(exist_ok=True)
    return place


def perform(directory: Path, *options: str) -> dict[str, Any]:
    """Run a demo to its end, and return its account."""
    with demo(directory, "--json", *options) as process:
        assert process.stdout is not None
        text = process.stdout.read()
    assert process.returncode == 0, text + (directory / "errors.log").read_text()
    account: dict[str, Any] = json.loads(text)
    return account


def left_behind(directory: Path) -> list[str]:
    """The processes and files of a demo that are still there."""
    place = str(place_of(directory))
    found = [str(path) for path in Path(place).iterdir()]
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == place and process.status() != "zombie":
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def wait_until_gone(directory: Path) -> None:
    give_up_at = time.monotonic() + 30
    while left := left_behind(directory):
        assert time.monotonic() < give_up_at, left
        time.sleep(0.05)


def expected_ends() -> dict[str, tuple[str, str]]:
    return {
        name: (message["expect"]["status"], message["expect"]["reason"])
        for name, message in MAILS.items()
    }


def expected_refunds() -> list[tuple[str | None, int]]:
    """What the provider should have paid, by the mails alone: each order once."""
    wanted = {(m["expect"]["order_id"], m["expect"]["refund_cents"]) for m in MAILS.values()}
    return sorted((order, cents) for order, cents in wanted if cents is not None)


def check(account: dict[str, Any]) -> None:
    """Compare an account with the mails, without believing its own verdict."""
    paid = [(r["order_id"], p["amount_cents"]) for r in account["refunds"] for p in r["provider"]]
    keys = [
        (
            [effect["key"] for effect in refund["ours"] if effect["status"] == "applied"],
            [receipt["key"] for receipt in refund["provider"]],
        )
        for refund in account["refunds"]
    ]

    ends = {run["mail"]: (run["status"], run["reason"]) for run in account["runs"]}
    assert ends == expected_ends()
    assert sorted(paid) == expected_refunds()
    assert all(ours == theirs for ours, theirs in keys)
    assert account["as_expected"] is True
    assert account["problems"] == []


def settled(account: dict[str, Any]) -> set[str]:
    return {run["mail"] for run in account["runs"] if run["settled_by_reconciler"]}


def test_the_demo_ends_as_its_mails_say_and_leaves_nothing_behind(tmp_path: Path) -> None:
    account = perform(tmp_path)

    check(account)
    assert {"m-22", "m-25", "m-27"} <= settled(account)  # whose answers were lost
    assert account["workers_killed"] == 0
    assert left_behind(tmp_path) == []


@pytest.mark.accept("FLT-03")
def test_a_worker_killed_in_the_middle_of_a_refund_changes_nothing_but_time(
    tmp_path: Path,
) -> None:
    """The provider is asked before anything is sent again: it has seen one request."""
    account = perform(tmp_path, "--kill")

    check(account)
    assert account["workers_killed"] == 1
    assert "m-24" in settled(account)  # whose refund was under way
    assert [r["requests"] for r in account["refunds"] if r["order_id"] == "HR-1029"] == [1]
    assert left_behind(tmp_path) == []


def first_confirmation(process: subprocess.Popen[str]) -> None:
    """Wait until the workers are in the middle of their work."""
    assert process.stdout is not None
    for line in process.stdout:
        if "confirmed on the customer's behalf" in line:
            return
    raise AssertionError("the demo ended before anything was confirmed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_demo_cleans_up_before_it_ends(
    tmp_path: Path, number: signal.Signals
) -> None:
    with demo(tmp_path, "--plain") as process:
        first_confirmation(process)
        process.send_signal(number)
        assert process.stdout is not None
        process.stdout.read()

    assert process.returncode == 128 + number
    assert left_behind(tmp_path) == []


def test_a_killed_demo_leaves_nothing_behind_either(tmp_path: Path) -> None:
    with demo(tmp_path, "--plain") as process:
        first_confirmation(process)
        process.kill()

    wait_until_gone(tmp_path)
