"""Pauses and shadow runs on the command line."""

from __future__ import annotations

import pytest

from tests.test_cli import Project, migrated, project

__all__ = ["migrated", "project"]  # the fixtures of the command line's tests


@pytest.mark.accept("LED-19")
@pytest.mark.parametrize(
    ("options", "scope", "name"),
    [
        ([], "fleet", ""),
        (["--tenant", "default"], "tenant", "default"),
        (["--workflow", "post"], "workflow", "post"),
        (["--tool", "send"], "tool", "send"),
    ],
)
def test_what_is_paused_is_listed_and_resumed(
    migrated: Project, options: list[str], scope: str, name: str
) -> None:
    paused = migrated.json("pause", *options, "--reason", "it is [red]down[/red]", "--as", "ann")

    assert (paused["scope"], paused["name"]) == (scope, name)
    assert (paused["reason"], paused["paused_by"]) == ("it is [red]down[/red]", "ann")
    assert migrated.json("pauses") == [paused]
    assert "it is [red]down[/red]" in migrated("pauses")
    findings = {f["code"]: f for f in migrated.json("doctor")["findings"]}
    resume = f"handrail resume{f' --{scope} {name}' if name else ''}"
    assert findings["paused"]["next_step"].endswith(resume)

    lifted = migrated.json("resume", *options)
    assert lifted == {"scope": scope, "name": name, "lifted": True}
    assert migrated.json("resume", *options)["lifted"] is False
    assert "not paused" in migrated("resume", *options)
    assert migrated.json("pauses") == []
    assert "nothing-paused" in {f["code"] for f in migrated.json("doctor")["findings"]}


def test_a_pause_says_why_and_of_what(migrated: Project) -> None:
    assert "--reason" in migrated("pause", code=2)
    assert migrated.refused("pause", "--reason", " ", code=2) == "invalid-pause"
    two = ["--tool", "send", "--tenant", "default"]
    assert migrated.refused("pause", *two, "--reason", "why", code=2) == "invalid-pause"
    assert migrated.refused("resume", *two, code=2) == "invalid-pause"
    assert migrated.json("pauses") == []


def test_a_name_that_is_not_known_here_is_paused_and_pointed_out(migrated: Project) -> None:
    """It may be known elsewhere, and a pause must not wait for that to be found out."""
    assert "is it spelled right?" in migrated("pause", "--tool", "sent", "--reason", "why")
    assert [p["name"] for p in migrated.json("pauses")] == ["sent"]
    assert "spelled" not in migrated("pause", "--tool", "send", "--reason", "why")
    assert "spelled" not in migrated("pause", "--tenant", "anybody", "--reason", "why")


def test_a_tool_that_has_paused_itself_is_pointed_out(
    migrated: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDRAIL_MAX_OPEN_UNKNOWNS", "1")
    migrated.json("run", "post", "--goal", "a", "--here")  # loads the module, makes the ledger
    migrated.loaded.fleet.ledger.database.run(
        "INSERT INTO handrail_effect (id, tenant, intent_key, tool, contract_version, arguments,"
        " arguments_hash, terms, created_at, status, doubt, queries_left, unknown_since)"
        " VALUES ('e', 'default', 'send:a', 'send', '1', '{}', 'h', '{}', 0, 'unknown',"
        " 'unproven', 8, 0)",
        {},
    )

    (found,) = migrated.json("pauses")
    assert (found["scope"], found["name"], found["automatic"]) == ("tool", "send", True)
    assert "itself" in migrated("pauses")
    assert "too-many-unknown" in {f["code"] for f in migrated.json("doctor")["findings"]}


@pytest.mark.accept("LED-21")
def test_a_shadow_run_shows_what_it_would_write(migrated: Project) -> None:
    run = migrated.json("run", "post", "--goal", "tea", "--shadow", "--here")

    assert (run["status"], run["mode"]) == ("cancelled", "shadow")
    assert migrated.loaded.notes == []
    (shadowed,) = [
        e["detail"] for e in migrated.json("trace", run["run_id"]) if e["type"] == "effect.shadowed"
    ]
    assert shadowed["tool"] == "send" and shadowed["approval"] is True
    assert migrated.json("trace", run["run_id"], "--check")["ok"] is True
    assert migrated.json("show", run["run_id"])["mode"] == "shadow"
    assert "shadow" in migrated("show", run["run_id"]) and "shadow" in migrated("runs")
