"""The command line: what it prints, what it refuses, and that nothing on it is half done."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner, Result

from handrail.broker.redis_client import redis_client
from handrail.cli import app
from handrail.embedded import EmbeddedValkey
from handrail.ledger.schema import HEAD
from handrail.shared_valkey import RENDEZVOUS, find
from handrail.terminal import visible

SECONDS = 60  # for anything that must happen; only a failure takes that long
NO_BROKER = "redis://:a-password@127.0.0.1:1/0"  # nobody listens on port 1

#: What a user's own module looks like. `notes` shows what its tools were really called with.
MODULE: Final = '''
from pydantic import BaseModel

from handrail import AgentLoop, Commit, Confirm, Action, Fleet, FOREVER, Workflow

fleet = Fleet("ours")
notes = []


class Question(BaseModel):
    text: str


@fleet.tool(side_effect="read")
def look_up(question: Question, call):
    """Look something up."""
    return f"found {question.text}"


@fleet.tool(
    side_effect="irreversible",
    approval="always",
    intent=lambda question, run: f"send:{question.text}",
    guarantee="idempotency-key",
    key_valid_for_ms=FOREVER,
    takeover="the-shop",
)
def send(question: Question, call):
    """Send something."""
    notes.append(question.text)
    return {"sent": question.text}


def model(observation):
    if not observation["observations"]:
        arguments = {"text": observation["goal"]}
        return {"kind": "tool", "tool": "look_up", "arguments": arguments}
    return {"kind": "complete", "answer": f"[red]{observation['goal']}[/red]"}


fleet.model("default", model)
loop = AgentLoop(name="loop", actions=(look_up,), verify=lambda claim, call: True)
fleet.workflow(Workflow(name="ask", stages=[loop], input=Question))
fleet.workflow(Workflow(name="chat", stages=[loop]))


def action(run):
    return Action(send, {"text": run.goal})


fleet.workflow(
    Workflow(name="post", stages=[Confirm("confirm", action), Commit("send", action, send)])
)
'''


class Project:
    """A directory with a user's module in it, in which commands are given."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.module = f"ours_{secrets.token_hex(4)}"
        self.fleet = f"{self.module}:fleet"
        (directory / f"{self.module}.py").write_text(MODULE)

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Give a command in this process; returns all that it printed."""
        return self._invoke(*arguments, code=code).output

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Give a command in this process; returns what a program would read of it."""
        return json.loads(self._invoke(*arguments, "--json", code=code).stdout)

    @property
    def loaded(self) -> Any:
        """The user's module, as the latest command has loaded it."""
        return sys.modules[self.module]

    def forget(self) -> None:
        """Let the next command load the module as a new process does."""
        module = sys.modules.pop(self.module, None)
        if module is not None:
            module.fleet.close()

    def _invoke(self, *arguments: str, code: int) -> Result:
        self.forget()
        ended = CliRunner().invoke(app, arguments)
        if ended.exception is not None and not isinstance(ended.exception, SystemExit):
            raise ended.exception
        assert ended.exit_code == code, ended.output
        return ended

    def refused(self, *arguments: str, code: int) -> str:
        """Give a command that is refused; returns the stable code of its error."""
        said = self(*arguments, code=code)
        assert said.startswith("error["), said
        described = self.json(*arguments, code=code)["error"]
        assert said.startswith(f"error[{described['code']}]: "), said
        return str(described["code"])

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=self.directory,
            env={**os.environ, "HANDRAIL_SWEEP_EVERY_S": "0.3", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A user's project, without a broker, and with the embedded ledger."""
    made = Project(tmp_path)
    for name in os.environ:
        if name.startswith("HANDRAIL_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HANDRAIL_FLEET", made.fleet)
    yield made
    made.forget()


@pytest.fixture
def migrated(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The same, with a database of its own that was upgraded."""
    monkeypatch.setenv("HANDRAIL_DATABASE_URL", f"sqlite:///{project.directory / 'ours.db'}")
    project("db", "upgrade")
    return project


# ---- runs ----------------------------------------------------------------------------------------


def test_a_run_is_started_followed_and_explained(project: Project) -> None:
    started = project.json("run", "ask", "--goal", "tea", "--input", '{"text": "tea"}', "--here")
    run_id = started["run_id"]

    assert started["status"] == "completed"
    assert [run["run_id"] for run in project.json("runs")] == [run_id]
    assert project.json("show", run_id)["answer"] == "[red]tea[/red]"
    events = project.json("trace", run_id)
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "run.stopped"
    for command in (["runs"], ["show", run_id], ["trace", run_id]):
        assert "completed" in project(*command)


def test_runs_can_be_chosen_by_status_and_workflow(project: Project) -> None:
    project("run", "chat", "--goal", "a", "--here")
    project("run", "post", "--goal", "b", "--here")

    assert [run["goal"] for run in project.json("runs", "--status", "completed")] == ["a"]
    assert [run["goal"] for run in project.json("runs", "--workflow", "post")] == ["b"]
    assert [run["goal"] for run in project.json("runs", "--limit", "1")] == ["b"]


def test_a_parked_run_shows_its_exact_action_and_goes_on_once_approved(project: Project) -> None:
    run_id = project.json("run", "post", "--goal", "flowers", "--here")["run_id"]
    assert project.loaded.notes == []
    assert '{"text": "flowers"}' in project("show", run_id)

    project("principals", "admit", "boss", "--role", "admin")
    project("principals", "admit", "ada", "--role", "approver", "--as", "boss")
    agree = ("approve", run_id, "--as", "ada", "--yes", "--reason", "as ordered")
    approved = project.json(*agree)
    project.loaded.fleet.drive(run_id)

    assert approved["status"] == "executing"
    assert project.loaded.notes == ["flowers"]
    assert project.json("show", run_id)["effects"][0]["status"] == "applied"
    assert project.refused(*agree, code=2) == "approval-refused"


def test_a_waiting_run_is_cancelled(project: Project) -> None:
    run_id = project.json("run", "post", "--goal", "flowers", "--here")["run_id"]

    assert project.json("cancel", run_id)["status"] == "cancelled"
    assert "cancelled" in project("cancel", run_id)  # again: it stays as it is


def test_with_one_dedupe_key_there_is_one_run(project: Project) -> None:
    first = project.json("run", "chat", "--goal", "a", "--dedupe-key", "k", "--run-id", "mine")
    again = project.json("run", "chat", "--goal", "a", "--dedupe-key", "k")

    assert first["run_id"] == again["run_id"] == "mine"


def test_text_from_outside_is_shown_and_not_obeyed(project: Project) -> None:
    """Neither as an order to the terminal nor as markup."""
    goal = "\x1b]0;owned\x07 [bold]tea[/bold] \u202e :smile: \nstatus completed"
    run_id = project.json("run", "chat", "--goal", goal, "--here")["run_id"]

    for command in (["runs"], ["show", run_id], ["trace", run_id]):
        said = project(*command)
        assert not {"\x1b", "\x07", "\u202e"} & set(said)
    shown = project("show", run_id)
    assert r"\x1b]0;owned\x07 [bold]tea[/bold] \u202e :smile: \nstatus completed" in shown
    assert project.json("show", run_id)["goal"] == goal
    assert project("show", run_id, "--json").isascii()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größer 日本 😀", "größer 日本 😀"),
        ("\x00\x1b\x7f\x9b", r"\x00\x1b\x7f\x9b"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\u2028\u200f\ud800", r"\u2028\u200f\ud800"),
    ],
)
def test_every_character_that_acts_is_made_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


# ---- what is refused -----------------------------------------------------------------------------

BUDGETS = [
    "steps=-1",
    "steps=1.5",
    "steps=",  # missing
    "steps=null",
    "steps",
    "steps=many",
    "steps=true",
    "stamps=1",
    "per_tool.look_up=-1",
    "tool_calls=1000",  # more than the workflow allows, without the permission
]


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_that_is_none_starts_no_run(migrated: Project, budget: str) -> None:
    code = migrated.refused("run", "chat", "--goal", "a", "--budget", budget, code=2)

    assert code == "invalid-budget"
    assert migrated.json("runs") == []


def test_a_budget_of_zero_is_legal_and_stops_at_once(project: Project) -> None:
    run = project.json("run", "chat", "--goal", "a", "--budget", "steps=0", "--here", code=1)

    assert (run["status"], run["reason"]) == ("budget_exhausted", "step-budget-exhausted")
    assert run["model_calls"] == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nonsense", "--goal", "a"], "unknown-workflow"),
        (["chat", "--goal", ""], "invalid-run"),
        (["chat", "--goal", "  "], "invalid-run"),
        (["chat", "--goal", "a" * 20_001], "invalid-run"),
        (["chat", "--goal", "a", "--input", '{"a":'], "invalid-run"),
        (["chat", "--goal", "a", "--input", "NaN"], "invalid-run"),
        (["ask", "--goal", "a"], "invalid-run"),  # it wants an input
        (["ask", "--goal", "a", "--input", '{"text": 1}'], "invalid-run"),
        (["ask", "--goal", "a", "--input", '{"text": "a", "more": 1}'], "invalid-run"),
        (["chat", "--goal", "a", "--run-id", "../etc"], "invalid-run"),
        (["chat", "--goal", "a", "--principal", "no\nname"], "invalid-run"),
        (["chat", "--goal", "a", "--principal", ""], "invalid-run"),
    ],
)
def test_bad_input_starts_no_run(migrated: Project, arguments: list[str], code: str) -> None:
    assert migrated.refused("run", *arguments, code=2) == code
    assert migrated.json("runs") == []


@pytest.mark.parametrize("command", ["show", "trace", "cancel"])
def test_a_run_that_does_not_exist_is_named(migrated: Project, command: str) -> None:
    assert migrated.refused(command, "nobody", code=2) == "unknown-run"


BAD_MODULES = {
    "a tool without a contract": (
        "@fleet.tool\ndef tool(arguments, call): ...",
        "invalid-definition",
    ),
    "a write without an intent": (
        "@fleet.tool(side_effect='idempotent')\ndef tool(arguments, call): ...",
        "invalid-definition",
    ),
    "an undeclared tool, which is a write": (
        "@fleet.tool()\ndef tool(arguments, call): ...",
        "invalid-definition",
    ),
    "a plain function as an action": (
        "from handrail import AgentLoop\n"
        "AgentLoop(name='loop', actions=(print,), verify=lambda claim, call: True)",
        "invalid-definition",
    ),
    "code that raises": ("1 / 0", "fleet-not-loaded"),
    "something else under the name": ("fleet = 7", "fleet-not-loaded"),
}


@pytest.mark.parametrize("what", BAD_MODULES)
def test_a_module_that_cannot_be_used_says_why(project: Project, what: str) -> None:
    source, code = BAD_MODULES[what]
    module = f"bad_{secrets.token_hex(4)}"
    text = f"from handrail import Fleet\nfleet = Fleet('bad')\n{source}\n"
    (project.directory / f"{module}.py").write_text(text)

    assert project.refused("run", "w", "--goal", "a", "--fleet", f"{module}:fleet", code=2) == code
    assert not (project.directory / ".handrail").exists()


@pytest.mark.parametrize("name", ["nowhere:fleet", "os:nothing", "os:getcwd", "os:environ", ":x"])
def test_a_name_that_leads_to_no_fleet_says_so(project: Project, name: str) -> None:
    code = project.refused("run", "w", "--goal", "a", "--fleet", name, code=2)

    assert code == "fleet-not-loaded"


@pytest.mark.parametrize("command", [["worker"], ["run", "chat", "--goal", "a"]])
def test_what_needs_the_users_code_asks_for_it(
    project: Project, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.delenv("HANDRAIL_FLEET")

    said = project(*command, code=2)

    assert said.startswith("error[no-fleet]: ")
    assert "--fleet" in said


def test_what_only_reads_needs_neither_code_nor_broker_and_makes_nothing(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HANDRAIL_FLEET")
    for command in (["runs"], ["show", "r"], ["trace", "r"], ["cancel", "r"]):
        assert project.refused(*command, code=2) == "no-ledger"

    assert [path.name for path in project.directory.iterdir()] == [f"{project.module}.py"]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ["handoffs"],
        ["approvals"],
        ["audit", "verify"],
        ["principals", "list"],
        ["principals", "admit", "eve", "--role", "admin"],
        ["pauses"],
    ],
)
def test_a_wrong_directory_gets_no_ledger(
    project: Project, monkeypatch: pytest.MonkeyPatch, command: list[str], named: bool
) -> None:
    if named:
        monkeypatch.setenv("HANDRAIL_DATABASE_URL", "sqlite:///ours.db")
    assert project.refused(*command, code=2) == "no-ledger"

    assert str(project.directory) in project(*command, code=2), "it says where it looked"
    assert [path.name for path in project.directory.iterdir()] == [f"{project.module}.py"]


@pytest.mark.parametrize(
    "command",
    [["runs"], ["show", "r"], ["trace", "r"], ["cancel", "r"], ["run", "chat", "--goal", "a"]],
)
def test_a_database_that_is_not_migrated_is_not_used(
    project: Project, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    database = project.directory / "ours.db"
    database.touch()
    monkeypatch.setenv("HANDRAIL_DATABASE_URL", f"sqlite:///{database}")

    said = project(*command, code=1)

    assert said.startswith("error[database-not-migrated]: ")
    assert "handrail db upgrade" in said
    assert not database.exists() or database.stat().st_size <= 4096  # no table in it


def test_an_upgrade_can_be_repeated(migrated: Project) -> None:
    assert migrated.json("db", "upgrade") == {"revision": HEAD, "newer": False}
    assert HEAD in migrated("db", "upgrade")


@pytest.mark.parametrize(
    ("name", "value", "code", "error"),
    [
        ("HANDRAIL_DATABASE_URL", "postgresql://127.0.0.1:1/x", 3, "database-unavailable"),
        ("HANDRAIL_DATABASE_URL", "mysql://127.0.0.1/x", 2, "unsupported-database"),
        ("HANDRAIL_DATABASE_URL", "no url", 2, "unsupported-database"),
        ("HANDRAIL_LEASE_MS", "soon", 2, "invalid-settings"),
        ("HANDRAIL_LEASE_MS", "-1", 2, "invalid-settings"),
    ],
)
def test_settings_that_lead_nowhere_are_named(
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    code: int,
    error: str,
) -> None:
    monkeypatch.setenv(name, value)

    assert project.refused("runs", code=code) == error


# ---- the broker ----------------------------------------------------------------------------------


def test_a_broker_that_is_down_starts_no_worker(
    migrated: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDRAIL_BROKER_URL", NO_BROKER)
    for command in ("worker", "beat"):
        said = migrated(command, code=3)

        assert said.startswith("error[broker-unreachable]: ")
        assert "HANDRAIL_BROKER_URL" in said
        assert "a-password" not in said


def test_a_broker_that_is_down_loses_no_run_and_stops_no_reader(
    migrated: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HANDRAIL_BROKER_URL", NO_BROKER)
    run_id = migrated.json("run", "chat", "--goal", "a")["run_id"]

    assert "[publish-failed]" in caplog.text
    assert migrated.json("show", run_id)["status"] == "queued"
    assert migrated.json("trace", run_id)[0]["type"] == "run.accepted"
    assert migrated.json("cancel", run_id)["status"] == "cancelled"


@pytest.fixture
def evicting(tmp_path: Path) -> Iterator[str]:
    """A server that throws away what it has no room for."""
    place = tmp_path / "valkey"
    place.mkdir()
    with EmbeddedValkey(place) as valkey, redis_client(valkey.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        yield valkey.url


def test_a_redis_that_evicts_starts_no_worker(
    migrated: Project, monkeypatch: pytest.MonkeyPatch, evicting: str
) -> None:
    monkeypatch.setenv("HANDRAIL_BROKER_URL", evicting)
    for command in ("worker", "beat"):
        said = migrated(command, code=2)

        assert said.startswith("error[redis-evicts]: ")
        assert "noeviction" in said


def test_a_run_without_a_broker_says_what_it_waits_for(project: Project) -> None:
    assert "no broker is running here" in project("run", "chat", "--goal", "a")


# ---- the doctor ----------------------------------------------------------------------------------


def findings(report: dict[str, Any]) -> dict[str, str]:
    return {finding["code"]: finding["level"] for finding in report["findings"]}


def test_the_doctor_finds_nothing_wrong_with_what_is_right(
    migrated: Project, monkeypatch: pytest.MonkeyPatch, valkey_url: str
) -> None:
    monkeypatch.setenv("HANDRAIL_BROKER_URL", valkey_url)
    migrated("run", "chat", "--goal", "a", "--here")

    report = migrated.json("doctor")

    assert report["ok"] is True
    assert report["figures"]["runs"] == {}  # what is over is not counted
    assert findings(report) == {
        "database-ready": "ok",
        "broker-ready": "ok",
        "redis-keeps-nothing": "warning",  # this one is for tests
        "no-worker": "warning",
        "sweep-never-ran": "warning",
        "effects-settled": "ok",
        "nobody-needed": "ok",
        "nothing-paused": "ok",
    }
    assert "runs under way: none" in migrated("doctor")


def test_the_doctor_says_everything_that_must_change_at_once(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.directory / "ours.db").touch()
    monkeypatch.setenv("HANDRAIL_DATABASE_URL", f"sqlite:///{project.directory / 'ours.db'}")
    monkeypatch.setenv("HANDRAIL_BROKER_URL", NO_BROKER)

    report = project.json("doctor", code=1)
    said = project("doctor", code=1)

    assert report["ok"] is False
    assert report["figures"] is None
    assert findings(report) == {
        "database-not-migrated": "failure",
        "broker-unreachable": "failure",
    }
    assert all(finding["next_step"] for finding in report["findings"])
    assert "handrail db upgrade" in said
    assert "a-password" not in said


def test_the_doctor_sees_a_redis_that_evicts(
    migrated: Project, monkeypatch: pytest.MonkeyPatch, evicting: str
) -> None:
    monkeypatch.setenv("HANDRAIL_BROKER_URL", evicting)

    assert findings(migrated.json("doctor", code=1))["redis-evicts"] == "failure"


def test_the_doctor_makes_nothing_where_there_is_nothing(project: Project) -> None:
    assert findings(project.json("doctor", code=1)) == {
        "no-ledger": "failure",
        "no-broker": "warning",
    }
    assert not (project.directory / ".handrail").exists()


# ---- workers -------------------------------------------------------------------------------------


@contextmanager
def running(project: Project, *command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A worker or a beat that is ready; it is stopped at the end."""
    process = project.start(*command, **environment)
    try:
        said = []
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if line.startswith("ready: ") or "ready." in line:
                break
        else:
            raise AssertionError("".join(said))
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[str]) -> str:
    """Stop a process in order, and return what else it said."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        rest, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        rest, _ = process.communicate()
    return rest


def ends(process: subprocess.Popen[str]) -> str:
    rest, _ = process.communicate(timeout=SECONDS)
    return rest


@pytest.mark.live
@pytest.mark.timeout(180)
def test_workers_and_a_beat_of_one_home_share_an_embedded_broker_and_ledger(
    project: Project,
) -> None:
    """The first one starts it and takes it along; the others notice, and say what to do."""
    home = project.directory / ".handrail"
    with (
        running(project, "handrail", "worker") as owner,
        running(project, "handrail", "beat") as beat,
        running(project, "handrail", "worker") as second,
    ):
        valkey = find(home)
        assert valkey is not None
        assert (home / RENDEZVOUS).stat().st_mode & 0o077 == 0  # it holds a password

        run = project.json("run", "chat", "--goal", "tea", "--wait", "--timeout-s", "60")
        assert run["status"] == "completed"
        assert findings(project.json("doctor"))["broker-ready"] == "ok"

        stop(owner)
        for left in (beat, second):
            assert "error[embedded-gone]: " in ends(left)
            assert left.returncode == 3

    assert owner.returncode == 0
    assert find(home) is None
    assert not (home / RENDEZVOUS).exists()


@pytest.mark.live
@pytest.mark.timeout(120)
def test_a_rendezvous_that_a_killed_worker_left_behind_is_no_obstacle(project: Project) -> None:
    with running(project, "handrail", "worker") as first:
        first.kill()
        first.wait()
    assert (project.directory / ".handrail" / RENDEZVOUS).exists()

    with running(project, "handrail", "worker"):
        run = project.json("run", "chat", "--goal", "tea", "--wait", "--timeout-s", "60")

    assert run["status"] == "completed"


@pytest.mark.live
@pytest.mark.timeout(120)
def test_a_worker_can_sweep_by_itself(project: Project) -> None:
    """A run that nobody published is found by the sweep."""
    project("run", "chat", "--goal", "tea", "--run-id", "lost")  # before there is a broker
    with project.loaded.fleet.ledger.database.transaction() as session:
        session.run("UPDATE handrail_run SET wake_at = 0", {})  # the sweep's first look is due

    with running(project, "handrail", "worker", "--beat"):
        assert project.loaded.fleet.wait("lost", timeout_s=SECONDS).status == "completed"
        wait_for_sweep(project)


def wait_for_sweep(project: Project) -> None:
    give_up_at = time.monotonic() + SECONDS
    while "sweep-runs" not in findings(project.json("doctor")):
        assert time.monotonic() < give_up_at
        time.sleep(0.1)


@pytest.mark.live
@pytest.mark.timeout(120)
def test_the_fleet_is_an_ordinary_celery_app(
    migrated: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`celery -A module:fleet.celery worker` does what `handrail worker` does."""
    place = tmp_path / "valkey"
    place.mkdir()
    with EmbeddedValkey(place) as valkey:
        monkeypatch.setenv("HANDRAIL_BROKER_URL", valkey.url)
        app_name = f"{migrated.module}:fleet.celery"
        with running(migrated, "celery", "-A", app_name, "worker", "-l", "INFO"):
            run = migrated.json("run", "chat", "--goal", "tea", "--wait", "--timeout-s", "60")

    assert run["status"] == "completed"


@pytest.mark.live
def test_a_plain_celery_worker_refuses_a_database_that_is_not_migrated(
    project: Project, valkey_url: str
) -> None:
    worker = project.start(
        "celery",
        "-A",
        f"{project.module}:fleet.celery",
        "worker",
        HANDRAIL_BROKER_URL=valkey_url,
        HANDRAIL_DATABASE_URL=f"sqlite:///{project.directory / 'ours.db'}",
    )

    assert "error[database-not-migrated]: " in ends(worker)
    assert worker.returncode == 1


@pytest.mark.live
def test_the_module_is_the_command(project: Project) -> None:
    ended = project.start("handrail", "runs", "--json")

    assert json.loads(ends(ended))["error"]["code"] == "no-ledger"
    assert ended.returncode == 2
