"""What surrounds the marks of a figure: title, legend, two axes with their grid; and the markup that all of it is made of.

A figure is drawn from the top down: `heading` gives the title and the height it takes, `legend_for` the legend below it,
`framed` the rectangle for the marks below that, and `figure` puts the parts into one `<svg>` element.
"""

import html
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from poise.lab.report.axes import Axis, FloatArray, Unit

WIDTH = 460.0
"""Units of a figure's width. A phone shows them at four fifths of a pixel each, which keeps 12-unit text readable."""
MARGIN = 1.0
TEXT = 12.0
ROW = 19.0
BOLD = 1.13
"""How much wider bold text is: multiply its size by this before measuring."""
SWATCH = 24.0
"""Room for a legend entry's sample of its colour."""
_TITLE = 14.5
_PLOT_HEIGHT = 215.0
_LEGEND_GAP = 5.0
_LEGEND_BETWEEN = 14.0
_LEGEND_LONGEST = 190.0


@dataclass(frozen=True, slots=True)
class FigureLabels:
    """The words around a figure."""

    title: str
    x: str
    y: str


@dataclass(frozen=True, slots=True)
class Frame:
    """The rectangle in which marks are drawn, in units of the figure, and the axes along it."""

    left: float
    top: float
    right: float
    bottom: float
    x: Axis
    y: Axis

    @property
    def figure_height(self) -> float:
        """Height of the whole figure, with the labels below the frame."""
        return self.bottom + 46

    def across(self, values: FloatArray) -> FloatArray:
        """Horizontal positions of values of x."""
        return self.left + self.x.at(values) * (self.right - self.left)

    def down(self, values: FloatArray) -> FloatArray:
        """Vertical positions of values of y; the figure's origin is at the top."""
        return self.bottom - self.y.at(values) * (self.bottom - self.top)


@dataclass(frozen=True, slots=True)
class Legend:
    """Entries one after another in rows; `spots` are their left ends and middle lines, `bottom` ends the last row."""

    labels: tuple[str, ...]
    spots: tuple[tuple[float, float], ...]
    bottom: float

    def entry(self, place: int, swatch: str, style: str = "") -> str:
        """The label at a place behind its swatch."""
        left, middle = self.spots[place]
        label = shorten(self.labels[place], _LEGEND_LONGEST, TEXT)
        return swatch + text(label, left + SWATCH + _LEGEND_GAP, middle + 4, style)

    def line(self, place: int, style: str = "", *, length: float = SWATCH) -> str:
        """The entry of a series that is drawn as a line."""
        left, middle = self.spots[place]
        path = f"M{number(left)} {number(middle)}h{number(length)}"
        return self.entry(place, element("path", class_="line", d=path), style)


def legend_for(labels: Sequence[str], top: float) -> Legend:
    """Put as many entries in a row as fit."""
    spots: list[tuple[float, float]] = []
    left, row = MARGIN, 0
    for label in labels:
        width = SWATCH + _LEGEND_GAP + min(_LEGEND_LONGEST, text_width(label, TEXT))
        if left > MARGIN and left + width > WIDTH - MARGIN:
            left, row = MARGIN, row + 1
        spots.append((left, top + ROW * row + ROW / 2))
        left += width + _LEGEND_BETWEEN
    return Legend(tuple(labels), tuple(spots), top + (ROW * (row + 1) if labels else 0.0))


def framed(x: Axis, y: Axis, top: float) -> Frame:
    """A frame below `top`, with as much space on the left as the labels of y need."""
    widest = max((text_width(tick.label, TEXT) for tick in y.ticks), default=0.0)
    left = MARGIN + max(widest, 14.0) + 7
    return Frame(left, top + 14, WIDTH - MARGIN - 10, top + 14 + _PLOT_HEIGHT, x, y)


def room_for(unit: Unit, frame_width: float = WIDTH - 60) -> float:
    """How near two ticks along the bottom may be, as a fraction of the axis, without their labels touching."""
    return (48.0 if unit == "seconds" else 40.0) / frame_width


def heading(title: str) -> tuple[str, float]:
    """The title in one or two lines, and the height it takes."""
    rows = wrap(title, WIDTH - 2 * MARGIN, _TITLE * BOLD, 2)
    drawn = [text(row, MARGIN, 18 + ROW * place, "title") for place, row in enumerate(rows)]
    return "".join(drawn), 8 + ROW * len(rows)


def surroundings(frame: Frame, labels: FigureLabels) -> str:
    """Grid, ticks and the names of the axes; y is named above its axis, where it need not be read sideways."""
    parts = [text(shorten(labels.y, WIDTH - 2 * MARGIN, TEXT), MARGIN, frame.top - 12, "soft")]
    for tick in frame.y.ticks:
        at = frame.bottom - frame.y.place(tick.value) * (frame.bottom - frame.top)
        parts.append(element("path", class_="grid", d=f"M{frame.left:.1f} {at:.1f}H{frame.right:.1f}"))
        parts.append(text(tick.label, frame.left - 7, at + 4, "soft end"))
    for tick in frame.x.ticks:
        at = frame.left + frame.x.place(tick.value) * (frame.right - frame.left)
        parts.append(element("path", class_="grid", d=f"M{at:.1f} {frame.top:.1f}V{frame.bottom:.1f}"))
        # A label at the right end would stick out of the figure if it were centred.
        half = text_width(tick.label, TEXT) / 2
        parts.append(text(tick.label, min(at, WIDTH - 1 - half), frame.bottom + 18, "soft middle"))
    parts.append(element("path", class_="rule", d=f"M{frame.left:.1f} {frame.bottom:.1f}H{frame.right:.1f}"))
    named = shorten(labels.x, frame.right - frame.left, TEXT)
    parts.append(text(named, (frame.left + frame.right) / 2, frame.bottom + 37, "soft middle"))
    return "".join(parts)


def no_data(frame: Frame) -> str:
    """What stands in a frame without marks."""
    return text("no data", (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2, "soft middle")


def described(kind: str, labels: FigureLabels, names: Sequence[str]) -> str:
    """One sentence or two on a figure, for screen readers."""
    listed = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    return f"{kind}: {labels.title}. {labels.y} against {labels.x}. {f'Shown: {listed}.' if names else 'No data.'}"


def figure(description: str, height: float, *children: str) -> str:
    """The `<svg>` element; `description` is what a screen reader says of it."""
    box = f"0 0 {WIDTH:.0f} {height:.0f}"
    return element("svg", *children, class_="fig", viewBox=box, role="img", aria_label=" ".join(description.split()))


# Markup
#
# Names of jobs, policies and traces come from outside. Whatever they hold, the result stays well-formed XML in which they
# are text and nothing else.

# Characters that XML cannot hold at all, and the marks that turn the direction of the text around them.
_UNFIT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")
# HTML knows no short form of an empty element, save for those that are always empty and inside SVG.
_CHILDLESS = frozenset({"meta", "input", "path", "rect", "circle"})


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


def text(content: str, x: float, y: float, style: str = "", mark: str = "") -> str:
    """A line of text whose baseline starts (or, by its style, ends or is centred) at a point; a mark may follow it."""
    after = element("tspan", escape(mark), class_="mark", dx="7") if mark else ""
    return element("text", escape(content), after, **({"class_": style} if style else {}), x=x, y=y)


def tooltip(content: str) -> str:
    """What a pointer resting on the mark around it shows."""
    return element("title", escape(content))


# Widths of text

_NARROWEST = 0.38
_NARROW = frozenset("iljtfr.,:;|!'`()[]{}/\\ ")
_BROAD = frozenset("mwMW@%—…")
_ROUNDING = 1e-6
"""A width that was made for a text, added to and taken from, still holds it."""


def text_width(text: str, size: float) -> float:
    """Estimate how wide a text is set in a common sans-serif: rather too wide than too narrow."""

    def width(character: str) -> float:
        if character in _NARROW:
            return _NARROWEST
        if character in _BROAD:
            return 0.95
        if unicodedata.east_asian_width(character) in "WF":
            return 1.0
        return 0.72 if character.isupper() else 0.62

    return size * sum(map(width, text))


def shorten(text: str, width: float, size: float) -> str:
    """The text, or as much of its two ends as fits around an ellipsis: names often differ in their last characters."""
    if text_width(text, size) <= width + _ROUNDING:
        return text

    def without_middle(kept: int) -> str:
        head = (kept + 1) // 2
        return text[:head] + "…" + text[len(text) - (kept - head) :]

    kept = min(len(text) - 1, int(width / (_NARROWEST * size)))
    while kept > 0 and text_width(without_middle(kept), size) > width:
        kept -= 1
    return without_middle(kept)


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
