"""What is shown to a person acts on nothing, hides nothing, passes for nothing else (S6, S14)."""

# ruff: noqa: RUF001  # texts of many scripts are what is tried

from __future__ import annotations

import json
import unicodedata

import pytest

from handrail.legible import visible
from handrail.terminal import compact

ACTING = {
    "control": [*range(0x00, 0x20), *range(0x7F, 0xA0)],
    "direction": [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C],
    "of no width": [0x200B, 0x200C, 0x200D, 0x2060, 0x2061, 0x2064, 0xFEFF, 0x00AD, 0x034F],
    "tags": [*range(0xE0000, 0xE0080)],
    "selectors": [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0), 0x180B, 0x180F],
    "lines": [0x2028, 0x2029, 0x0085],
    "blanks": [0x00A0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000],
    "fillers": [0x115F, 0x1160, 0x3164, 0xFFA0, 0x2800, 0x17B4, 0x17B5, 0x1D159],
    "overlays": [*range(0x0334, 0x0339), 0x20DD, 0x20E0],
    "nobody's": [0xD800, 0xDFFF, 0xE000, 0xFFFE, 0x10FFFF],
}


@pytest.mark.parametrize("kind", ACTING)
def test_what_acts_or_hides_is_shown_as_an_escape(kind: str) -> None:
    for code in ACTING[kind]:
        shown = visible(f"pay{chr(code)}me")
        assert shown.startswith("pay\\") and shown.endswith("me"), hex(code)
        assert shown.isascii() and shown.isprintable(), hex(code)


def test_no_character_of_all_unicode_leaves_the_line() -> None:
    """Whatever is shown as it is takes room in its place: no control, format, or unseen blank."""
    for code in range(0x110000):
        shown = visible(chr(code))
        assert "\n" not in shown and shown.isprintable(), hex(code)
        for char in shown:
            kept = unicodedata.category(char)
            assert kept[0] not in "CZ" or char == " ", hex(code)


@pytest.mark.parametrize(
    "text",
    [
        "größer, naïve, Ærøskøbing, Łódź, Tiếng Việt",
        "ışık, п\u02bcять, don’t, Eʋegbe ɛ ɔ",
        "e\u0301le\u0300ve",  # an accent of its own sign
        "退款 4200 元，订单 42",
        "返金をお願いします。",
        "환불해 주세요",
        "Верните деньги за заказ 42, а я подожду",
        "Επιστροφή χρημάτων για την παραγγελία",
        "استرداد المبلغ",
        "שָׁלוֹם",
        "धनवापसी कृपया करें",
        "กรุณาคืนเงินให้ด้วย",
        "Заказ iPhone из Shop",  # two scripts, each in words of its own
        "iPhone手机 3月",
        "😀 20 m² 5 µm ½ №1 – “quoted” €",
    ],
)
def test_plain_words_of_any_script_stay_readable(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("p\u0430ypal", r"p\u0430ypal"),  # one Cyrillic letter among Latin ones
        ("\u0420ayment to \u0391cme", r"\u0420ayment to \u0391cme"),  # Cyrillic, Greek capitals
        ("acc\u043eunt_1", r"acc\u043eunt_1"),
        ("pa\u0301y\u0440al", "pa\u0301y\\u0440al"),  # an accent does not part a word
        ("\u0441\u043e\u0441\u0430 Ltd", r"\u0441\u043e\u0441\u0430 Ltd"),  # nothing but twins
        ("\u0410\u0412\u0421-100", r"\u0410\u0412\u0421-100"),
        ("\uff30\uff21\uff39 \uff14\uff12", r"\uff30\uff21\uff39 \uff14\uff12"),  # full width
        ("\U0001d429\U0001d41a\U0001d432", r"\U0001d429\U0001d41a\U0001d432"),  # mathematical
        ("10\u09ea", r"10\u09ea"),  # a Bengali four looks like an 8
        ("\u212aelvin", r"\u212aelvin"),
        ("payp\u0251l", r"payp\u0251l"),  # a phonetic alpha
        ("\u0261oogle", r"\u0261oogle"),
        ("b\u0131ll", r"b\u0131ll"),  # a dotless i
        ("IBAN \u01c01", r"IBAN \u01c01"),  # a click
        ("it\u02bcs", r"it\u02bcs"),  # no quote
        ("\u1d0frder", r"\u1d0frder"),  # a small capital
        ("caf\u00e9 \u1d18\u1d00\u028f", r"café \u1d18\u1d00\u028f"),
        ("b\u0131\u0301ll", "b\\u0131\\u0301ll"),  # an accent does not excuse it
        ("\u216d\u217c", r"\u216d\u217c"),  # Roman numerals
    ],
)
def test_letters_that_pass_for_others_are_marked(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_flood_of_marks_stays_on_its_line() -> None:
    shown = visible("z" + "\u0301" * 200 + "algo")

    assert shown.count("\u0301") == 4 and shown.endswith("algo")
    assert visible("\u0301 5\u0305 =\u0308") == r"\u0301 5\u0305 =\u0308"  # on no letter


@pytest.mark.parametrize(
    "order", ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\x1bP+q\x1b\\", "\b\b"]
)
def test_orders_to_a_terminal_are_text(order: str) -> None:
    shown = visible(f"before{order}after")

    assert shown.isprintable() and "\x1b" not in shown
    assert shown.startswith("before\\x") and shown.endswith("after")


def test_a_value_on_one_line_can_be_told_from_its_escapes() -> None:
    """A JSON text doubles its backslashes, so that no text passes for an escape of another."""
    assert visible(compact("a\\u202eb")) == r'"a\\u202eb"'
    assert visible(compact("a\u202eb")) == r'"a\u202eb"'
    assert json.loads(visible(compact("line\n\u202e"))) == "line\n\u202e"
