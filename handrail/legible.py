r"""Text from outside, written so that nothing in it acts, hides, or passes for something else.

Models, tools and customers write what people read before they decide. Whatever would move the
cursor, turn the direction, take no room, or look like another sign is shown as an escape: `\x1b`,
`\u202e`, `\u0430`. Plain words of any script stay as they are. Pure.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Final

#: Marks on one letter; real spelling takes three at most, a flood paints over other lines.
MOST_MARKS: Final = 4

#: Printable to Python, and seen by nobody: fillers, joiners, selectors, the blank of Braille.
_UNSEEN: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U0001d159\U000e0100-\U000e01ef]"
)
#: Strike through, or enclose, what somebody has to read.
_OVERLAYS: Final = re.compile("[\u0334-\u0338\u20d0-\u20f0]")
#: Alphabets with letters that look like Latin ones.
_ALIKE: Final = frozenset({"CYRILLIC", "GREEK", "ARMENIAN", "COPTIC", "CHEROKEE", "LISU"})
#: Of these, the letters that cannot be told from Latin ones: a word of nothing else is a disguise.
_TWINS: Final = frozenset(
    "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0425\u0405\u0406\u0408"
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0455\u0456\u0458\u04bb\u04cf\u0501\u051b\u051d"
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7"
    "\u03bf\u03bd\u03c1\u03f2\u03f3"
)
#: Latin letters of no ordinary spelling that pass for ASCII ones: those of phonetics, clicks, old
#: tones, small capitals, Roman numerals.
_POSING: Final = frozenset(
    "\u0251\u0261\u017f\u0196\u01a7\u01a8\u01bc\u01bd\u01bf\u01c0\u01c3\u0222\u0237\ua76b"
    "\u1d00\u0299\u1d04\u1d05\u1d07\ua730\u0262\u029c\u026a\u1d0a\u1d0b\u029f\u1d0d\u0274\u1d0f"
    "\u1d18\ua7af\u0280\ua731\u1d1b\u1d1c\u1d20\u1d21\u028f\u1d22"
    "\u2160\u2164\u2169\u216c\u216d\u216e\u216f\u2170\u2174\u2179\u217c\u217d\u217e\u217f"
)
#: These are spelled with (a dotless i, an iota, apostrophes of many languages): disguises where all
#: else in the word is ASCII.
_POSING_IN_ASCII: Final = frozenset(
    "\u0131\u0269\u02b9\u02bb\u02bc\u02bd\u02be\u02bf\u02c8\u02ca\u02cb\ua78c"
)


def visible(text: object) -> str:
    r"""Write text so that no character of it does anything, and none is taken for another."""
    said = str(text)
    if said.isascii() and said.isprintable():
        return said
    marked = _disguises(said)
    out: list[str] = []
    marks = MOST_MARKS  # without a letter before it, a mark would sit on what is not its own
    for place, char in enumerate(said):
        is_mark = unicodedata.category(char)[0] == "M"
        hidden = place in marked or _acts(char) or (is_mark and marks >= MOST_MARKS)
        out.append(_escaped(char) if hidden else char)
        if is_mark and not hidden:
            marks += 1
        else:
            marks = 0 if char.isalpha() and not hidden else MOST_MARKS
    return "".join(out)


def _acts(char: str) -> bool:
    return not char.isprintable() or bool(_UNSEEN.match(char) or _OVERLAYS.match(char))


def _escaped(char: str) -> str:
    code = ord(char)
    if code < 0x80 and char.isprintable():
        return f"\\x{code:02x}"
    return char.encode("unicode_escape").decode("ascii")


def _disguises(text: str) -> set[int]:
    """The places of letters and digits that pass for others.

    In a word with Latin letters those are the letters of an alphabet that looks like Latin; in one
    with ASCII digits, other digits. Of a text whose only words of such an alphabet could be Latin
    as well, all of them are; and everywhere the second forms of ASCII letters and digits.
    """
    marked = {place for place, char in enumerate(text) if char in _POSING or _is_second_form(char)}
    twins: list[int] = []
    own_words: set[str] = set()
    for word in re.finditer(r"[\w\u0300-\u036f]+", text):
        letters = [(place, text[place]) for place in range(*word.span())]
        scripts = {script_of(char) for _, char in letters if char.isalpha()}
        alike = [(place, char) for place, char in letters if script_of(char) in _ALIKE]
        if "LATIN" in scripts:
            marked |= {place for place, char in alike if char.isalpha()}
        elif alike and all(char in _TWINS for _, char in alike):
            twins += [place for place, _ in alike]
        else:
            own_words |= scripts & _ALIKE
        if all(_is_ascii_or_poses(char) for _, char in letters):
            marked |= {place for place, char in letters if char in _POSING_IN_ASCII}
        if any(char.isascii() and char.isdigit() for _, char in letters):
            marked |= {p for p, char in letters if char.isdecimal() and not char.isascii()}
    return marked | {place for place in twins if script_of(text[place]) not in own_words}


def _is_ascii_or_poses(char: str) -> bool:
    """Whether a letter is ASCII, or poses as such; an accent of its own sign changes nothing."""
    poses = char in _POSING or char in _POSING_IN_ASCII
    return char.isascii() or poses or unicodedata.category(char)[0] == "M"


def _is_second_form(char: str) -> bool:
    """Whether it is an ASCII letter or digit in another dress: full width, mathematical, ..."""
    if char.isascii() or unicodedata.category(char) not in ("Lu", "Ll", "Nd"):
        return False
    plain = unicodedata.normalize("NFKC", char)
    return len(plain) == 1 and plain.isascii() and plain.isalnum()


@lru_cache(maxsize=4096)
def script_of(char: str) -> str:
    """The script of a letter, by the first word of its name: LATIN, CYRILLIC, CJK, ..."""
    return unicodedata.name(char, "").partition(" ")[0]


__all__ = ["MOST_MARKS", "visible"]
