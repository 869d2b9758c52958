"""The bond between tests and criteria cannot be broken by a slip of the pen."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests import conftest
from tests.acceptance import DOCUMENT, Standing, claimed, criteria, main, standing

KNOWN = criteria(DOCUMENT.read_text("utf8"))
CLAIMED = Path(__file__).with_name("claimed_criteria.txt")


@pytest.fixture
def plugin() -> ModuleType:
    """Our conftest, as a plugin for a suite inside a test."""
    return conftest


def test_every_claimed_criterion_is_in_the_document() -> None:
    ids = claimed(CLAIMED.read_text("utf8"), KNOWN)

    assert len(ids) == len(set(ids))
    assert {"RUN-28", "LED-22", "BUD-24"} <= set(ids)
    assert not {"FLT-08", "BUD-06"} & set(ids)  # these come with later features


def test_a_range_names_each_id_in_it() -> None:
    assert claimed("RUN-09..11 LED-02  # and no more", KNOWN) == [
        "RUN-09", "RUN-10", "RUN-11", "LED-02",
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["RUN-1", "RUN-01-03", "RUN-99", "XYZ-01", "RUN-27..29"])
def test_a_word_that_names_no_criterion_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"neither|has no"):
        claimed(word, KNOWN)


def test_an_id_given_twice_in_the_document_is_refused() -> None:
    with pytest.raises(ValueError, match="RUN-01 twice"):
        criteria("## RUN. The runner\n- **RUN-01** a\n- **RUN-01** b\n")


def test_a_criterion_stands_as_the_worst_of_its_tests() -> None:
    assert standing({}) is Standing.BARE
    assert standing({"a": [True, True], "b": [True]}) is Standing.PASSES
    assert standing({"a": [True, False], "b": [True]}) is Standing.FAILS


@pytest.mark.parametrize("mark", ['accept("RUN-99")', "accept()"])
def test_a_mark_that_names_no_criterion_fails_the_collection(
    mark: str, pytester: pytest.Pytester, plugin: ModuleType
) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.{mark}\ndef test_x(): pass")

    result = pytester.inline_run("-p", "no:cacheprovider", plugins=[plugin])

    assert result.ret == pytest.ExitCode.INTERRUPTED
    [failure] = result.getfailedcollections()
    assert "criterion" in str(failure.longrepr)


def test_a_required_criterion_without_a_test_fails_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = {"tests/test_x.py::test_x": {"ids": ["RUN-07"], "passed": True}}
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"tree": "this", "tests": outcome}))
    monkeypatch.setattr("tests.acceptance.RECORD", record)
    monkeypatch.setattr("tests.acceptance.digest_of_the_tree", lambda: "this")
    required = tmp_path / "required.txt"

    required.write_text("RUN-07")
    assert main(["--require", str(required)]) == 0
    required.write_text("RUN-07 RUN-08")
    assert main(["--require", str(required)]) == 1

    assert "required, without a test: RUN-08" in capsys.readouterr().out
