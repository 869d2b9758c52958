"""One text for one JSON value: what is hashed, compared, shown to an approver and sent to a tool.

Keys are ordered by code point, numbers stand by value (`1`, `1.0` and `1e0` are one number, `-0` is
`0`, integers are exact at any size), array order counts, strings are never normalised or trimmed.
The text is ASCII: whatever a model or a tool says (NUL, lone surrogates) can be stored and read
back. Pure: no I/O, no clock.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, Final, TypeAlias

from handrail.errors import NotCanonical

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

#: Deeper nesting has no use in a tool's arguments and would exhaust an interpreter's stack.
MAX_DEPTH: Final = 64
#: Python refuses to print longer integers, and no tool wants one.
MAX_INTEGER_DIGITS: Final = 4_000

_WRITER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_DECODER: Final[Any] = json.JSONDecoder()  # whose scanner its stubs do not know
_SCAN: Final[Callable[[str, int], tuple[Any, int]]] = _DECODER.scan_once
#: Most of a JSON value is of these types, and in normal form as it is; so are integers of a word.
_ATOMS: Final = frozenset({str, bool, type(None)})
_WORD: Final = 2**63


def parse_json(text: str | bytes) -> Json:
    """Parse untrusted JSON text exactly.

    Numbers keep their value (`9007199254740993.0` is an integer), duplicate keys, NaN and
    infinities are refused. Raises `NotCanonical`; never another error.
    """
    try:
        value = json.loads(
            text,
            parse_float=_exact_number,
            parse_constant=_no_constant,
            object_pairs_hook=_no_duplicates,
        )
    except NotCanonical:
        raise
    except (ValueError, RecursionError, ArithmeticError) as error:
        raise NotCanonical(f"not JSON ({type(error).__name__})") from None
    return normal(value)


def normal(value: object) -> Json:
    """Return the normal form of a JSON-like value: plain types, exact numbers. Raises
    `NotCanonical`.
    """
    return _normal(value, MAX_DEPTH)


def canonical(value: object) -> str:
    """Return the canonical text of a JSON-like value, in ASCII. Raises `NotCanonical`."""
    return dumps(normal(value))


def dumps(value: Json) -> str:
    """Write a value that is already in normal form."""
    return "".join(_CHUNKS(value, 0))


def loads(text: str) -> Any:
    """Read what `dumps` wrote, or any other JSON that is trusted; whoever gets it may change it."""
    try:
        value, end = _SCAN(text, 0)
    except StopIteration:
        return json.loads(text)
    return value if end == len(text) else json.loads(text)


def escaped(text: str) -> str:
    """Write any text in ASCII, reversibly: NUL and lone surrogates can be stored and read back."""
    return dumps(text)[1:-1]


def plain(text: str) -> str:
    """Read what `escaped` wrote."""
    if "\\" not in text:
        return text
    return plains([text])[0]


def plains(texts: Iterable[str]) -> list[str]:
    """Read what `escaped` wrote, many at once."""
    value: list[str] = loads("[" + ",".join(f'"{text}"' for text in texts) + "]")
    return value


def digest(*parts: str) -> str:
    """Return a 128-bit hash of canonical texts, as 32 hexadecimal digits; parts cannot run
    together.
    """
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(b"%d:" % len(data))
        hasher.update(data)
    return hasher.hexdigest()[:32]


def _normal(value: object, depth: int) -> Json:
    if type(value) is dict:  # most are; the questions below take their time
        return _normal_object(value, depth)
    if type(value) is int and -_WORD < value < _WORD:
        return value
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        if abs(value).bit_length() > MAX_INTEGER_DIGITS * 3:
            raise NotCanonical("an integer with thousands of digits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NotCanonical("a number that is not finite")
        return int(value) if value.is_integer() else value
    if isinstance(value, list | tuple):
        _check_depth(depth)
        return [item if type(item) in _ATOMS else _normal(item, depth - 1) for item in value]
    if isinstance(value, Mapping):
        return _normal_object(value, depth)
    raise NotCanonical(f"a value of type {type(value).__name__}")


def _normal_object(value: Mapping[Any, Any], depth: int) -> dict[str, Json]:
    _check_depth(depth)
    out: dict[str, Json] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise NotCanonical(f"a key that is no text ({type(key).__name__})")
        out[key] = item if type(item) in _ATOMS else _normal(item, depth - 1)
    return out


def _check_depth(depth: int) -> None:
    if depth == 0:
        raise NotCanonical(f"nested deeper than {MAX_DEPTH} levels")


def _exact_number(text: str) -> int | float:
    number = Decimal(text)
    if not -MAX_INTEGER_DIGITS < number.adjusted() < MAX_INTEGER_DIGITS:
        raise NotCanonical("a number out of range")
    if number == number.to_integral_value():
        return int(number)
    value = float(number)
    if not math.isfinite(value):
        raise NotCanonical("a number out of range")
    return value


def _no_constant(name: str) -> Any:
    raise NotCanonical(f"the constant {name}")


def _chunks() -> Callable[[Json, int], Iterable[str]]:
    """What `_WRITER` writes with. CPython's makes it anew for every text, at the price of a small
    one; it holds nothing of what it writes, as long as it is not to look for circles.
    """
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return lambda value, _: (_WRITER.encode(value),)
    ascii_text = json.encoder.encode_basestring_ascii
    chunks: Callable[[Json, int], Iterable[str]] = make(
        None, _WRITER.default, ascii_text, None, ":", ",", True, False, False
    )
    return chunks


_CHUNKS: Final = _chunks()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise NotCanonical("one key twice in an object")
    return out
