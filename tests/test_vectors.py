"""The runner vectors: on the machine alone, through the step shell, and against a second runner.

Where the folder with the agreed cases lies beside the repository, its files are replayed too.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from handrail.canonical import canonical
from handrail.errors import InvalidBudget
from handrail.testing import vectors
from handrail.testing.__main__ import main
from handrail.testing.fleet_vectors import FLEET
from handrail.testing.vectors import MACHINE, Driver, check, differences, load, run_file
from tests import reference_runner

CASES = Path(__file__).with_name("cases")
OURS = CASES / "runner_vectors.jsonl"
AGREED = CASES.parent.parent.parent / "shared" / "cases"
FILES = [OURS, *sorted(AGREED.glob("*.jsonl"))]
DRIVERS = {"machine": MACHINE, "fleet": FLEET}
VECTORS = {vector["id"]: vector for vector in load(OURS)}
REASONS = {
    "completed", "cancelled", "clarification-required", "invalid-proposal", "repeated-proposal",
    "step-budget-exhausted", "model-call-budget-exhausted", "tool-call-budget-exhausted",
    "deadline-exhausted", "model-failed", "verification-failed", "tool-failed", "unknown-effect",
}  # fmt: skip
LOOKUP = {"kind": "tool", "tool": "lookup", "arguments": {"q": 1}}
SAVE = {"kind": "tool", "tool": "saveDraft", "arguments": {"q": 1}}
DONE = {"kind": "complete", "answer": "done"}
QUESTION = {"kind": "clarify", "question": "Which one?"}
FOUND = {"status": "success", "observation": "x"}
BUSY = {"status": "failed", "code": "busy", "retryable": True}
GONE = {"status": "failed", "code": "gone", "retryable": False}
LOST = {"status": "unknown", "code": "lost"}


def a_case(**changes: Any) -> dict[str, Any]:
    """A case with generous options; by itself it completes."""
    options = {
        "maxSteps": 50, "maxModelCalls": 50, "maxToolCalls": 50,
        "modelTimeoutMs": 50, "toolTimeoutMs": 50, "deadlineMs": 5000,
    }  # fmt: skip
    return {
        "goal": "any",
        "options": options | changes.pop("options", {}),
        "proposals": [DONE],
        "results": [],
        "verify": [True],
    } | changes


def a_vector(id: str, case: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "tags": [], "case": case, "expected": reference_runner.expected(case)}


def written(folder: Path, *found: object) -> Path:
    file = folder / "vectors.jsonl"
    file.write_text("".join(f"{json.dumps(vector)}\n" for vector in found), "utf-8")
    return file


# ---- the agreed vectors --------------------------------------------------------------------------


@pytest.mark.accept("RUN-01")
@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
@pytest.mark.parametrize("id", VECTORS)
def test_a_vector_has_its_one_outcome_in_all_four_grades(id: str, driver: Driver) -> None:
    assert check(VECTORS[id], driver) == []


@pytest.mark.accept("RUN-01")
def test_there_are_sixty_vectors_and_they_stop_for_each_of_the_thirteen_reasons() -> None:
    assert len(VECTORS) == 60
    assert {vector["expected"]["reason"] for vector in VECTORS.values()} == REASONS


@pytest.mark.accept("RUN-01")
@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_of_vectors_replays_without_a_mismatch(file: Path) -> None:
    found = run_file(file)

    assert found.lines == ()
    assert found.passed > 0
    assert found.failed == 0


@pytest.mark.accept("RUN-01")
@pytest.mark.parametrize("id", VECTORS)
def test_the_second_runner_agrees_with_the_vectors(id: str) -> None:
    """Otherwise it would prove nothing about other cases."""
    wanted = reference_runner.expected(VECTORS[id]["case"])

    assert canonical(wanted) == canonical(VECTORS[id]["expected"])


# ---- other cases ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "seed", "count"), [(MACHINE, 2026, 1200), (FLEET, 2029, 120)], ids=DRIVERS
)
def test_random_cases_end_as_in_the_second_runner(driver: Driver, seed: int, count: int) -> None:
    """`seed:number` in a failure names the case; `random_cases(seed)` makes it again."""
    stopped = set()
    for name, case, wanted in itertools.islice(reference_runner.random_cases(seed), count):
        found = differences(driver.expect(case, wanted), driver.play(case))
        assert not found, f"{name}: {found}\n{json.dumps(case)}"
        stopped.add(wanted["reason"])

    assert stopped == REASONS


@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
def test_an_observation_is_known_however_old_it_is(driver: Driver) -> None:
    """The state shows a window of observations; what lies before it is still known."""
    told = [f"observation {number}" for number in range(40)]
    case = a_case(
        proposals=[*({**LOOKUP, "arguments": {"q": n}} for n in range(40)), LOOKUP, LOOKUP],
        results=[{"status": "success", "observation": text} for text in [*told, told[0]]],
    )
    wanted = reference_runner.expected(case)

    assert wanted["reason"] == "repeated-proposal"
    assert len(wanted["state"]["observations"]) == 40
    assert differences(wanted, driver.play(case)) == {}


@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
@pytest.mark.parametrize("proposal", [LOOKUP, SAVE, DONE, QUESTION, {"kind": "odd"}])
def test_a_wish_that_becomes_visible_with_a_proposal_starts_nothing(
    proposal: dict[str, Any], driver: Driver
) -> None:
    """What no vector has: nothing is started then, nothing counted, and the run is cancelled."""
    found = driver.play(
        a_case(proposals=[proposal], faults={"propose": {"0": {"cancelAtEnd": True}}})
    )

    assert found.reason == "cancelled"
    assert [call["op"] for call in found.calls] == ["propose"]
    assert (found.state["modelCalls"], found.state["toolCalls"]) == (1, 0)
    assert [event["type"] for event in found.trace] == ["proposal.received", "run.stopped"]


@pytest.mark.accept("RUN-22")
@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
def test_a_wish_comes_before_the_step_budget(driver: Driver) -> None:
    """What no vector has: both stop the run, and it says that it was cancelled."""
    found = driver.play(
        a_case(
            options={"maxSteps": 1},
            proposals=[LOOKUP, LOOKUP],
            results=[FOUND],
            faults={"invoke": {"0": {"cancelAtEnd": True}}},
        )
    )

    assert (found.reason, found.state["step"]) == ("cancelled", 1)


@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
@pytest.mark.parametrize("proposal", [LOOKUP, SAVE])
def test_a_call_gets_its_last_millisecond(proposal: dict[str, Any], driver: Driver) -> None:
    """At this time the difference of two readings of a clock is a trifle less than it should be."""
    at_ms = next(t for t in range(1, 1_000) if (t / 1000 + 0.001) - t / 1000 < 0.001)
    case = a_case(
        options={"toolTimeoutMs": 1, "modelTimeoutMs": 2_000},
        proposals=[proposal, DONE],
        results=[FOUND],
        faults={"propose": {"0": {"latencyMs": at_ms}}},
    )

    assert differences(reference_runner.expected(case), driver.play(case)) == {}


@pytest.mark.parametrize(
    ("proposal", "result", "verdict", "reference", "fleet"),
    [
        (DONE, None, True, "completed", "cancelled"),
        (DONE, None, False, "cancelled", "cancelled"),
        (LOOKUP, FOUND, True, "cancelled", "cancelled"),
        (LOOKUP, BUSY, True, "cancelled", "cancelled"),
        (LOOKUP, GONE, True, "tool-failed", "cancelled"),
        (LOOKUP, LOST, True, "tool-failed", "cancelled"),
        (SAVE, FOUND, True, "cancelled", "unknown-effect"),
        (SAVE, BUSY, True, "cancelled", "cancelled"),
        (SAVE, GONE, True, "tool-failed", "cancelled"),
        (SAVE, LOST, True, "unknown-effect", "unknown-effect"),
    ],
)
def test_a_wish_made_at_the_instant_of_a_return_binds_the_fleet(
    proposal: Any, result: Any, verdict: bool, reference: str, fleet: str
) -> None:
    """There it is durable before the return is; where the two runners differ is written down."""
    op = "verify" if result is None else "invoke"
    case = a_case(
        proposals=[proposal, DONE],
        results=[] if result is None else [result],
        verify=[verdict, verdict],
        faults={op: {"0": {"cancelAtEnd": True, "clockAtEndMs": 3}}},
    )
    wanted = reference_runner.expected(case)

    assert wanted["reason"] == reference
    assert differences(wanted, MACHINE.play(case)) == {}
    assert FLEET.expect(case, wanted)["reason"] == fleet
    assert differences(FLEET.expect(case, wanted), FLEET.play(case)) == {}


@pytest.mark.accept("RUN-23")
@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modelTimeoutMs", 0),  # below 1 ms
        ("toolTimeoutMs", 0),
        ("toolTimeoutMs", 0.5),
        ("maxSteps", -1),
        ("maxModelCalls", 1.5),
        ("deadlineMs", None),
        ("maxToolCalls", "3"),
        ("maxToolCalls", True),
    ],
)
def test_a_case_with_invalid_options_is_refused_before_it_starts(
    name: str, value: object, driver: Driver
) -> None:
    with pytest.raises(InvalidBudget):
        driver.play(a_case(options={name: value}))


@pytest.mark.accept("RUN-23")
@pytest.mark.parametrize("name", ["maxSteps", "modelTimeoutMs", "deadlineMs"])
def test_a_case_that_lacks_an_option_is_refused_before_it_starts(name: str) -> None:
    case = a_case()
    del case["options"][name]

    with pytest.raises(InvalidBudget, match=name):
        MACHINE.play(case)


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_replays_a_file_and_counts() -> None:
    command = [sys.executable, "-P", "-m", "handrail.testing", "vectors", str(OURS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.stdout.splitlines()[-1] == "60 passed, 0 failed"
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("through", DRIVERS)
def test_a_mismatch_is_a_line_and_an_exit_code(
    through: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, wrong = a_vector("good", a_case()), a_vector("wrong", a_case())
    wrong["expected"]["reason"] = "cancelled"
    wrong["expected"]["trace"][0]["detail"]["kind"] = "tool"
    wrong["expected"]["endMs"] = 7

    assert main(["vectors", "--through", through, str(written(tmp_path, good, wrong))]) == 1

    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["wrong", "grade 1"], ["wrong", "grade 3"], ["wrong", "grade 4"],
    ]  # fmt: skip
    assert 'trace[0]: expected {"detail":{"kind":"tool"' in lines[1]
    assert last == "1 passed, 1 failed"


def test_a_refused_case_is_a_mismatch_and_no_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = a_vector("bad", a_case())
    bad["case"]["options"]["toolTimeoutMs"] = 0

    assert main(["vectors", str(written(tmp_path, bad, a_vector("good", a_case())))]) == 1

    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("bad: refused before it starts: budget 'tool_ms' is 0")
    assert last == "1 passed, 1 failed"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: no vector"),
        ('{"id": "x"}', "line 2: no vector"),
        ('{"id": "a", "id": "b"}', "line 2: one key twice"),
        ("\xff", "line 2: not JSON"),
    ],
)
def test_a_bad_line_is_named(
    line: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, a_vector("good", a_case()))
    file.write_bytes(file.read_bytes() + line.encode("latin-1"))

    assert main(["vectors", str(file)]) == 2

    shown = capsys.readouterr()
    assert problem in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"results": [{"status": "odd"}]}, "a scripted result of unknown form"),
        ({"verify": [1]}, "a verdict is true or false"),
        ({"faults": {"invoke": {"0": {"end": "explode"}}}}, "fault of invoke call 0"),
        ({"faults": {"invoke": {"0": {"latencyMs": -1}}}}, "fault of invoke call 0"),
        ({"faults": {"think": {}}}, "faults are given for propose, invoke, verify"),
    ],
)
def test_a_script_that_cannot_be_followed_is_refused(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    """Nothing in a case is ignored: a fault of an unknown kind would be a case of its own."""
    vector = a_vector("x", a_case())
    vector["case"] |= change

    with pytest.raises(vectors.BadVectors, match=problem):
        run_file(written(tmp_path, vector))


@pytest.mark.parametrize("key", ["reason", "state", "calls", "endMs"])
def test_an_expectation_must_be_whole(key: str, tmp_path: Path) -> None:
    vector = a_vector("x", a_case())
    del vector["expected"][key]

    with pytest.raises(vectors.BadVectors, match=f"expected lacks {key}"):
        run_file(written(tmp_path, vector))


def test_a_file_that_is_not_there_is_an_error_and_no_mismatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vectors", str(tmp_path / "none.jsonl")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    """JSON allows other line separators inside a text, and a vector may hold them."""
    case = a_case(proposals=[{"kind": "complete", "answer": "a\u2028b\x85c"}])
    vector = a_vector("separators", case)
    file = tmp_path / "vectors.jsonl"
    file.write_text(json.dumps(vector, ensure_ascii=False) + "\r\n\n", "utf-8")

    assert run_file(file).lines == ()
    assert run_file(file).passed == 1
