"""Text that is safe inside SVG and HTML, and elements made of it.

Names of jobs, policies and traces come from outside. Whatever they hold, the result stays well-formed XML in which they
are text and nothing else.
"""

import html
import re
import unicodedata

# What XML cannot hold at all, and the marks that turn the direction of the text around them.
_UNFIT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")
# HTML knows no short form of an empty element, save for those that are always empty and inside SVG.
_CHILDLESS = frozenset({"meta", "input", "path", "rect", "circle"})
_NARROWEST = 0.38
_NARROW = frozenset("iljtfr.,:;|!'`()[]{}/\\ ")
_BROAD = frozenset("mwMW@%—…")
_ROUNDING = 1e-6
"""A width that was made for a text, added to and taken from, still holds it."""

BOLD = 1.13
"""How much wider bold text is: multiply its size by this before measuring."""


def fit(text: str) -> str:
    """Text as it may be shown; characters that XML does not allow, or that turn text around, become U+FFFD."""
    return _UNFIT.sub("\ufffd", text)


def escape(text: str) -> str:
    """Text for an element or a quoted attribute, with the characters that `fit` lets through."""
    return html.escape(fit(text), quote=True)


def number(value: float) -> str:
    """A coordinate with one decimal: a tenth of a unit is finer than a screen shows, and keeps files small."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def element(tag: str, *children: str, **attributes: str | float) -> str:
    """An element around children that are markup already; attribute values are escaped.

    In attribute names a trailing underscore is dropped and the others become hyphens: `class_`, `text_anchor`.
    """
    written = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{escape(value) if isinstance(value, str) else number(value)}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{written}/>" if tag in _CHILDLESS else f"<{tag}{written}>{''.join(children)}</{tag}>"


def text_width(text: str, size: float) -> float:
    """A careful guess of how wide a text is set in a common sans-serif: rather too wide than too narrow."""
    return size * sum(_width(character) for character in text)


def shorten(text: str, width: float, size: float) -> str:
    """The text, or as much of its two ends as fits around an ellipsis: names often differ in their last characters."""
    if text_width(text, size) <= width + _ROUNDING:
        return text
    kept = min(len(text) - 1, int(width / (_NARROWEST * size)))
    while kept > 0 and text_width(_without_middle(text, kept), size) > width:
        kept -= 1
    return _without_middle(text, kept)


def wrap(text: str, width: float, size: float, most: int) -> list[str]:
    """The text in at most `most` lines broken at spaces; what does not fit loses its middle to an ellipsis."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and (len(lines) == most or text_width(longer, size) <= width):
            lines[-1] = longer
        else:
            lines.append(word)
    return [shorten(line, width, size) for line in lines]


def _without_middle(text: str, kept: int) -> str:
    head = (kept + 1) // 2
    return text[:head] + "…" + text[len(text) - (kept - head) :]


def _width(character: str) -> float:
    if character in _NARROW:
        return _NARROWEST
    if character in _BROAD:
        return 0.95
    if unicodedata.east_asian_width(character) in "WF":
        return 1.0
    return 0.72 if character.isupper() else 0.62
