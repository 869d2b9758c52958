"""The README tells the truth about what can be checked: the diagram, the commands, the links."""

from __future__ import annotations

import re
from pathlib import Path

from handrail.agent.status import state_diagram

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def test_the_state_diagram_is_drawn_from_the_transition_table() -> None:
    """If this fails, put the output of `handrail.agent.status.state_diagram()` into the README."""
    blocks = re.findall(r"```mermaid\n(.*?)\n```", README, flags=re.S)

    assert blocks == [state_diagram()]


def test_every_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.M))

    assert set(re.findall(r"`make ([a-z-]+)", README)) <= targets


def test_every_document_that_the_readme_links_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", README)

    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
