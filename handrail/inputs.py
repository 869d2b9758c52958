"""The input of a workflow: checked by its pydantic model, or by what the catalog says of it.

A web process that enqueues does not import the code of the workflow. Where a model says all that it
demands in JSON Schema, that is what the input is checked by; where it does more (a validator of its
own, a date, an alias), the model itself is imported, by the name that the catalog holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from handrail.asked import InvalidRun
from handrail.canonical import Json, dumps, normal, parse_json

#: What a model's own schema consists of where JSON Schema says the same.
_PLAIN: Final = frozenset(
    {
        *("any", "bool", "default", "definition-ref", "definitions", "dict", "enum", "float"),
        *("int", "list", "literal", "model", "model-field", "model-fields", "none", "nullable"),
        *("str", "tagged-union", "union"),
    }
)
_ALIASES: Final = ("validation_alias", "serialization_alias", "alias")


def by_model(model: type[BaseModel], text: str) -> Json:
    """Check an input by its model, strictly, and return it as a run keeps it. Raises
    `InvalidRun`.
    """
    try:
        checked = model.model_validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidRun(_place(first["loc"]), first["msg"]) from None
    return normal(checked.model_dump(mode="json"))


def described(model: type[BaseModel]) -> dict[str, Json]:
    """What the catalog holds of a model: its name, and its schema if that says everything."""
    name = f"{model.__module__}:{model.__qualname__}"
    if not _is_plain(model.__pydantic_core_schema__):
        return {"model": name}
    schema: dict[str, Json] = normal(model.model_json_schema())  # type: ignore[assignment]
    _close(schema)
    return {"model": name, "schema": schema}


def by_description(description: Mapping[str, Any], text: str) -> Json:
    """Check an input by what the catalog says of it; see the module. Raises `InvalidRun`."""
    schema = description.get("schema")
    if schema is None:
        return by_model(_imported(description["model"]), text)
    value = parse_json(text)
    first = next(iter(_validator(dumps(schema)).iter_errors(value)), None)
    if first is not None:
        raise InvalidRun(_place(first.absolute_path), _problem(first))
    return value


def _place(path: Iterable[object]) -> str:
    return ".".join(["input", *map(str, path)])


def _problem(error: Any) -> str:
    """Say what is wrong without repeating what was given, which may be a secret."""
    if error.validator in ("required", "additionalProperties"):  # these name properties alone
        return str(error.message)[:300]
    return f"it does not fit its schema, {error.validator}: {dumps(error.validator_value)}"[:300]


def _imported(name: str) -> type[BaseModel]:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidRun(
            "input",
            f"its model {name} checks more than a schema can say, and cannot be imported here"
            f" ({error}): put it in a module that the web process has, too",
        ) from None
    model: type[BaseModel] = found
    return model


def _is_plain(schema: Any) -> bool:
    """Whether a core schema has no part that JSON Schema cannot say."""
    if isinstance(schema, Mapping):
        kind = schema.get("type")
        if isinstance(kind, str) and kind not in _PLAIN:
            return False
        if any(schema.get(alias) is not None for alias in _ALIASES):
            return False
        inner = (
            value
            for key, value in schema.items()
            if key not in ("metadata", "serialization", "expected", "members", "default", "config")
        )
        return all(map(_is_plain, inner)) and not callable(schema.get("default_factory"))
    if isinstance(schema, list | tuple):
        return all(map(_is_plain, schema))
    return True


def _close(schema: Any) -> None:
    """Let no object have more than its properties, as the model does when it forbids extras."""
    if isinstance(schema, dict):
        if "properties" in schema:
            schema["additionalProperties"] = False
        for value in schema.values():
            _close(value)
    elif isinstance(schema, list):
        for value in schema:
            _close(value)


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """A validator that fills in the defaults of what it has found right."""
    from jsonschema import Draft202012Validator, validators

    properties = Draft202012Validator.VALIDATORS["properties"]

    def with_defaults(validator: Any, declared: Any, instance: Any, schema: Any) -> Any:
        yield from properties(validator, declared, instance, schema)
        if isinstance(instance, dict):
            for name, inner in declared.items():
                if isinstance(inner, dict) and "default" in inner:
                    instance.setdefault(name, inner["default"])

    extend: Any = validators.extend  # untyped
    kind = extend(Draft202012Validator, {"properties": with_defaults})
    return kind(parse_json(schema))
