"""A report as one HTML file that fetches nothing: open it, mail it, print it."""

import hashlib
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass

from poise.lab.report import style
from poise.lab.report.frame import element, escape
from poise.scheduler.model.errors import InvariantError

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Both as XML and as HTML, the script is what stands between the two comments.
_SCRIPT = "//<![CDATA[\n{}\n//]]>"
GENERATOR = "Poise"
"""The program that a page names as its maker; `output` recognises our files by it."""
_NUMBER_LIKE = re.compile(r"[-+−–~≈<>≤≥±]?\s*[.\d].*|[-–—]?|never|n/a")


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """Cells as text, of a page or of the terminal.

    best    (row, column) of the cells to set in bold
    names   how many columns, from the left, name the row
    words   headings of the columns that are aligned left, all others right: names may look like numbers. None: the first
            column, and those whose cells do not look like numbers
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[tuple[int, int]] = frozenset()
    names: int = 1
    words: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for place, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise InvariantError(f"table row {place} has {len(row)} cells; expected {len(self.columns)}")

    def holds_words(self, column: int) -> bool:
        """Whether a column is aligned left."""
        if self.words is not None:
            return self.columns[column] in self.words
        return column == 0 or not all(_NUMBER_LIKE.fullmatch(row[column].strip()) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Exhibit:
    """Something interactive: markup with the style sheet and the script that it needs. A page holds each of those once.

    The markup makes sense without the script, which must not hold `]]>` or `</script`.
    """

    markup: str
    style: str
    script: str


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with text (paragraphs are set apart by an empty line), figures from `report.figures`, exhibits, a table."""

    title: str
    text: str = ""
    figures: tuple[str, ...] = ()
    table: HtmlTable | None = None
    exhibits: tuple[Exhibit, ...] = ()


def page(title: str, intro: str, sections: Sequence[Section], *, footer: str = "") -> str:
    """A whole HTML document that is well-formed XML too. All text is escaped; only figures and exhibits are markup.

    No script runs but those of the exhibits, which the page's own security policy knows by their hashes.
    """
    exhibits = [exhibit for section in sections for exhibit in section.exhibits]
    scripts = [_SCRIPT.format(each) for each in dict.fromkeys(exhibit.script for exhibit in exhibits)]
    sheets = list(dict.fromkeys(exhibit.style for exhibit in exhibits))
    hashes = ["'sha256-" + b64encode(hashlib.sha256(each.encode()).digest()).decode("ascii") + "'" for each in scripts]
    policy = _POLICY + ("; script-src " + " ".join(hashes) if hashes else "")
    links = [element("a", escape(each.title), href=f"#section-{place}") for place, each in enumerate(sections, 1)]
    contents = element("nav", *links, aria_label="Sections") if len(links) > 2 else ""
    header = element("header", element("h1", escape(title)), _paragraphs(intro), contents) + "\n"
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
        element("meta", name="generator", content=GENERATOR),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", escape(title or "Report")),
        element("style", "\n", style.COLOURS, style.FIGURE, style.PAGE, *sheets),
        "</head>\n<body>",
        element("main", header, *(_section(each, f"section-{place}") for place, each in enumerate(sections, 1))),
        element("footer", _paragraphs(footer)) if footer.strip() else "",
        *(element("script", each) for each in scripts),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _section(section: Section, anchor: str) -> str:
    parts = [element("h2", escape(section.title)), _paragraphs(section.text)]
    if section.figures:
        parts.append(element("div", *(element("figure", each) for each in section.figures), class_="figures"))
    parts += [exhibit.markup for exhibit in section.exhibits]
    if section.table is not None:
        parts.append(_table(section.table, section.title))
    return element("section", *parts, id=anchor) + "\n"


def _paragraphs(text: str) -> str:
    return "".join(element("p", escape(each.strip())) for each in re.split(r"\n\s*\n", text) if each.strip())


def _table(table: HtmlTable, name: str) -> str:
    """The table in a box that scrolls by itself, by keyboard too, so that a phone's page does not."""
    kinds = ["" if table.holds_words(column) else "n" for column in range(len(table.columns))]
    head = [_cell("th", text, kind, scope="col") for text, kind in zip(table.columns, kinds, strict=True)]
    rows = []
    for place, row in enumerate(table.rows):
        cells = []
        for column, (text, kind) in enumerate(zip(row, kinds, strict=True)):
            marked = f"{kind} best".strip() if (place, column) in table.best else kind
            tag, scope = ("th", "row") if column == 0 else ("td", "")
            cells.append(_cell(tag, text, marked, scope=scope))
        rows.append(element("tr", *cells) + "\n")
    whole = element("table", element("thead", element("tr", *head)), "\n<tbody>\n", *rows, "</tbody>")
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {name}")


def _cell(tag: str, text: str, kind: str, *, scope: str) -> str:
    inside = element("strong", escape(text)) if kind.endswith("best") else escape(text)
    attributes = {name: value for name, value in (("class_", kind), ("scope", scope)) if value}
    return element(tag, inside, **attributes)
