"""The canonical text of a JSON value, and the fingerprints that are made of it."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.agent.tools import SideEffect, ToolContract, fingerprint
from handrail.canonical import MAX_DEPTH, canonical, digest, normal, parse_json
from handrail.errors import NotCanonical
from tests.reference_runner import same_text

LOOKUP = ToolContract(name="lookup", side_effect=SideEffect.READ)
OTHER = ToolContract(name="other", side_effect=SideEffect.READ)

#: Few different leaves, so that two drawn values are often the same or nearly so.
LEAVES = st.sampled_from(
    [None, True, False, 0, 1, -1, 1.0, -0.0, 0.5, 2**53, 2**53 + 1, 10**30, 1e30, "", "1", "a", "A",
     "é", "e\u0301", "\x00", "\ud800", "\u2028", "null"]
)  # fmt: skip
KEYS = st.sampled_from(["", "a", "b", "é", "e\u0301", "\U0001f600", "\uffff"])
VALUES = st.recursive(
    LEAVES | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
ALIKE = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=3,
)


def respelled(value: Any, rng: random.Random) -> Any:
    """The same JSON value: keys in another order, numbers written differently."""
    if isinstance(value, dict):
        pairs = [(key, respelled(item, rng)) for key, item in value.items()]
        rng.shuffle(pairs)
        return dict(pairs)
    if isinstance(value, list):
        return [respelled(item, rng) for item in value]
    if type(value) is int and abs(value) <= 2**53 and rng.random() < 0.5:
        return float(value)
    if type(value) is float and value.is_integer() and rng.random() < 0.5:
        return int(value)
    return value


def mark(arguments: Any, *, version: int = 3, contract: ToolContract = LOOKUP) -> str:
    return fingerprint(version, contract, normal(arguments))


@pytest.mark.accept("RUN-02", "TRM-06")
def test_the_order_of_keys_does_not_matter_at_any_depth_and_inside_arrays() -> None:
    one = {"z": {"b": 1, "a": 2}, "a": [{"d": 3, "c": 4}]}
    other = {"a": [{"c": 4, "d": 3}], "z": {"a": 2, "b": 1}}

    assert canonical(one) == canonical(other)
    assert mark(one) == mark(other)


@pytest.mark.accept("RUN-02", "TRM-06")
def test_the_order_of_array_items_matters() -> None:
    assert canonical([1, 2]) != canonical([2, 1])
    assert mark({"ids": [1, 2]}) != mark({"ids": [2, 1]})


@pytest.mark.accept("TRM-06")
def test_a_fingerprint_tells_state_versions_and_tools_apart() -> None:
    assert mark({"q": 1}) == mark({"q": 1})
    assert mark({"q": 1}, version=4) != mark({"q": 1})
    assert mark({"q": 1}, contract=OTHER) != mark({"q": 1})


@pytest.mark.accept("RUN-24")
def test_integers_beyond_the_exact_floats_are_told_apart() -> None:
    assert mark({"id": 2**53}) != mark({"id": 2**53 + 1})
    assert mark({"id": 10**400}) != mark({"id": 10**400 + 1})
    assert mark(parse_json('{"id": 9007199254740993}')) != mark(
        parse_json('{"id": 9007199254740992}')
    )


@pytest.mark.accept("RUN-24")
@pytest.mark.parametrize(
    ("one", "other"),
    [("1", "1.0"), ("1", "1e0"), ("0", "-0"), ("0", "-0.0"), ("100", "1E+2"), ("0.5", "5e-1"),
     ("9007199254740993", "9007199254740993.0"), ("1000000000000000000000000", "1e24")],
)  # fmt: skip
def test_numbers_are_compared_by_value_however_they_are_written(one: str, other: str) -> None:
    assert mark(parse_json(f'{{"n": {one}}}')) == mark(parse_json(f'{{"n": {other}}}'))


@pytest.mark.accept("RUN-24")
def test_keys_that_differ_in_composition_alone_stay_two_keys_in_one_order() -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    one = {composed: 1, decomposed: 2}
    other = {decomposed: 2, composed: 1}

    assert mark(one) == mark(other)
    assert len(json.loads(canonical(one))) == 2
    assert mark(one) != mark({composed: 2, decomposed: 1})
    assert mark({composed: 1}) != mark({decomposed: 1})


@pytest.mark.accept("RUN-24")
def test_keys_are_ordered_by_code_point_and_not_by_utf16() -> None:
    """In UTF-16 the second would come first."""
    assert canonical({"\uffff": 1, "\U0001f600": 2}) == r'{"\uffff":1,"\ud83d\ude00":2}'


@pytest.mark.parametrize(
    "different",
    [
        (1, "1", True),
        (0, False, None, "", [], {}),
        ({}, {"a": None}),
        ("a", "A", "a ", " a"),
        ("\u00e9", "e\u0301"),
        ("null", None),
        ([], [[]], [None]),
        (0.5, "0.5"),
    ],
)
def test_what_only_looks_alike_is_told_apart(different: tuple[Any, ...]) -> None:
    assert len({mark({"x": value}) for value in different}) == len(different)


@given(ALIKE, ALIKE)
def test_two_values_have_one_text_exactly_if_they_are_the_same(one: Any, other: Any) -> None:
    """The second runner compares values in a way of its own."""
    assert (canonical(one) == canonical(other)) == (same_text(one) == same_text(other))


@given(VALUES, st.randoms(use_true_random=False))
def test_another_spelling_has_the_same_text(value: Any, rng: random.Random) -> None:
    assert canonical(respelled(value, rng)) == canonical(value)


@given(VALUES)
def test_a_text_can_be_read_back_and_stays_what_it_is(value: Any) -> None:
    text = canonical(value)

    assert text.isascii()
    assert "\x00" not in text
    assert canonical(parse_json(text)) == text
    assert canonical(normal(value)) == text


@given(VALUES)
def test_a_normal_form_shares_nothing_with_what_came_in(value: Any) -> None:
    before = canonical({"v": value})
    copy: Any = normal({"v": value})
    copy["v"] = "changed"
    copy.clear()

    assert canonical({"v": value}) == before


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_the_parts_of_a_digest_cannot_run_together(one: list[str], other: list[str]) -> None:
    assert (digest(*one) == digest(*other)) == (one == other)


@given(st.text() | st.binary())
def test_untrusted_text_is_read_or_refused_and_nothing_else(text: str | bytes) -> None:
    try:
        value = parse_json(text)
    except NotCanonical:
        return
    assert canonical(parse_json(canonical(value))) == canonical(value)


@pytest.mark.parametrize(
    "text",
    ["NaN", "Infinity", "-Infinity", '{"a": 1, "a": 2}', "1e400000", "9" * 5000, "[" * 100_000,
     "1e-9999999999999999999", "", "{", "\ufeff1"],
)  # fmt: skip
def test_json_that_has_no_one_value_is_refused(text: str) -> None:
    with pytest.raises(NotCanonical):
        parse_json(text)


NO_JSON = {
    "nan": math.nan,
    "infinity": math.inf,
    "a number as a key": {1: "a"},
    "a set": {"a", "b"},
    "bytes": b"x",
    "an object": [object()],
    "an integer of 20,000 digits": 10**20_000,
}


@pytest.mark.parametrize("value", NO_JSON.values(), ids=NO_JSON)
def test_a_value_that_is_no_json_is_refused(value: object) -> None:
    with pytest.raises(NotCanonical):
        canonical(value)


def test_nesting_is_bounded() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]

    assert canonical(value) == "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH
    with pytest.raises(NotCanonical, match="nested"):
        canonical([value])
