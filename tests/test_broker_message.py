"""A step message is read strictly, and whatever is not one is one clear error."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from handrail.broker.message import MAX_MESSAGE_BYTES, BadMessage, StepMessage
from handrail.errors import BadInput

WHOLE = StepMessage(
    run_id="run_01-A",
    step=3,
    epoch=7,
    deadline_at=1_796_000_000_000,
    remaining_ms=38_000,
    budget={"steps": 4, "tool:lookup_order": 2},
    traceparent="00-" + "ab" * 16 + "-" + "cd" * 8 + "-01",
)


def wire(**changes: object) -> dict[str, object]:
    return {"run_id": "r", "step": 1, "epoch": 0, **changes}


@pytest.mark.parametrize(
    "message",
    [
        WHOLE,
        StepMessage(run_id="r", step=0, epoch=0),
        StepMessage(run_id="r" * 64, step=2**53 - 1, epoch=1, remaining_ms=-5),
    ],
    ids=["whole", "smallest", "extremes"],
)
def test_a_message_survives_the_wire(message: StepMessage) -> None:
    text = message.to_json()
    assert text.isascii()
    assert StepMessage.from_json(text) == message
    assert StepMessage.from_json(text.encode()) == message
    assert StepMessage.from_json(json.loads(text)) == message


def test_a_message_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        WHOLE.epoch = 9


HOSTILE_FIELDS = {
    "no run": {"run_id": ""},
    "a run id with a path": {"run_id": "../../etc"},
    "a run id with a line end": {"run_id": "r\n"},
    "a run id of 65 characters": {"run_id": "r" * 65},
    "a run id that is a number": {"run_id": 7},
    "a negative step": {"step": -1},
    "a step as text": {"step": "1"},
    "a step as a fraction": {"step": 1.0},
    "a step as a boolean": {"step": True},
    "an epoch beyond exact integers": {"epoch": 2**53},
    "a huge integer": {"epoch": 10**4000},
    "a fractional deadline": {"deadline_at": 1.5},
    "a negative deadline": {"deadline_at": -1},
    "text in the budget": {"budget": {"steps": "all of it"}},
    "a name with spaces in the budget": {"budget": {"ignore all rules": 1}},
    "a nested budget": {"budget": {"steps": {"steps": 1}}},
    "a budget of 65 names": {"budget": {f"n{n}": n for n in range(65)}},
    "free text as a trace": {"traceparent": "please refund order 42"},
    "a newer version": {"version": 2},
    "a boolean version": {"version": True},
    "an unknown field": {"approved": True},
    "a typed envelope": {"epoch": {"__type__": "decimal", "__value__": "1"}},
}


@pytest.mark.parametrize("changes", HOSTILE_FIELDS.values(), ids=HOSTILE_FIELDS)
def test_a_message_with_a_wrong_field_is_refused_both_as_object_and_as_text(
    changes: dict[str, object],
) -> None:
    with pytest.raises(BadMessage):
        StepMessage.from_json(wire(**changes))
    try:
        text = json.dumps(wire(**changes))
    except ValueError:
        return  # Python itself writes no integer of 4,000 digits
    with pytest.raises(BadMessage):
        StepMessage.from_json(text)


HOSTILE_TEXT: dict[str, str | bytes] = {
    "nothing": "",
    "no JSON": "wake up!",
    "not UTF-8": b"\xff\xfe{}",
    "a lone surrogate": '{"run_id": "\ud800"}',
    "a list": "[]",
    "null": "null",
    "deep nesting": '{"budget":' * 5000 + "1" + "}" * 5000,
    "a deep list": "[" * 8000,
    "a huge integer": '{"run_id":"r","step":' + "9" * 5000 + ',"epoch":0}',
    "not a number": '{"run_id":"r","step":NaN,"epoch":0}',
    "too long": " " * MAX_MESSAGE_BYTES + WHOLE.to_json(),
}


@pytest.mark.parametrize("text", HOSTILE_TEXT.values(), ids=HOSTILE_TEXT)
def test_text_that_is_no_message_is_refused(text: str | bytes) -> None:
    with pytest.raises(BadMessage) as refused:
        StepMessage.from_json(text)
    assert refused.value.code == "bad-message"
    assert isinstance(refused.value, BadInput)


def test_a_refusal_repeats_nothing_of_what_came_in() -> None:
    """It goes into logs: neither a value nor the name of an unknown field may be steered there."""
    with pytest.raises(BadMessage) as unknown_field:
        StepMessage.from_json(wire(**{"secret-name": "secret-value"}))
    with pytest.raises(BadMessage) as wrong_value:
        StepMessage.from_json(wire(step="secret-value"))
    assert "secret" not in str(unknown_field.value) + str(wrong_value.value)
    assert "an unknown field" in str(unknown_field.value)
    assert "step" in str(wrong_value.value)


# The machine may be busy; how long an example takes says nothing about a message.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@unhurried
@given(
    st.dictionaries(
        st.sampled_from([*StepMessage.model_fields, "other"]), anything, max_size=6
    ).map(lambda changes: wire(**changes))
)
def test_whatever_comes_in_is_a_message_or_a_bad_message(data: dict[str, object]) -> None:
    try:
        message = StepMessage.from_json(data)
    except BadMessage:
        return
    assert StepMessage.from_json(message.to_json()) == message


@unhurried
@given(st.binary(max_size=64) | st.text(max_size=64))
def test_no_text_raises_anything_but_a_bad_message(text: str | bytes) -> None:
    with pytest.raises(BadMessage):
        StepMessage.from_json(text)
