"""The operator's guide shows what really happens: its session is given again, at a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.operating import GUIDE, Replay, sessions, settled, staffed_shop

TEXT = GUIDE.read_text("utf-8")


def test_the_recorded_session_goes_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails because a text was changed: `python -m tests.operating`, and read the diff."""
    with staffed_shop(tmp_path, monkeypatch) as shop:
        replay = Replay(shop)
        for session in sessions(TEXT):
            for step in session:
                shown = replay.give(step).shown
                assert settled(shown) == replay.expected(step), step.command


def test_a_handoff_is_resolved_in_three_commands_after_the_list_and_the_consequence_is_first() -> (
    None
):
    (first, *_) = sessions(TEXT)
    commands = [step.command for step in first]

    assert commands[0] == "handrail handoffs"
    assert 1 <= len(commands[1:]) <= 3 and commands[-1].startswith("handrail handoff resolve ")
    consequence = "is recorded as applied, and the run ends as completed"
    said, asked, done = first[-1].shown.partition("Resolve it as completed? Type ")
    assert asked and consequence in said and "resolved as completed" in done
    assert consequence in first[-2].shown  # and before, where there was to choose


def test_every_command_that_the_guide_names_is_there() -> None:
    from typer.testing import CliRunner

    from handrail.cli import app

    named = set(re.findall(r"`handrail ([a-z]+(?: (?:show|next|list|admit|verify|token))?)", TEXT))
    assert {"handoffs", "approve", "audit verify", "principals admit"} <= named
    for command in named:
        ended = CliRunner().invoke(app, [*command.split(), "--help"])
        assert ended.exit_code == 0, command
