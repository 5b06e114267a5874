"""A report is one well-formed file that fetches nothing and runs nothing."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.lab.report import style
from poise.lab.report.figures import Series, bars, cdf, lines, scatter
from poise.lab.report.page import HtmlTable, Section, page
from poise.scheduler.model.errors import InvariantError

HOSTILE = "<script>alert(\"x\")</script>' onload='y' & ]]> <!-- </style> </title>"
VOID = frozenset({"meta"})
LEAVES = frozenset({"path", "rect", "circle"})


class Balance(HTMLParser):
    """Reads as a browser does and remembers the tags, the open ones and the handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID | LEAVES, f"<{tag}/> would stay open in HTML"
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(text: str) -> Balance:
    parser = Balance()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def a_table() -> HtmlTable:
    rows = (("fifo", "3h12m", "1.20", "arrival order"), ("las", "2h05m", "–", ""))
    return HtmlTable(("policy", "average", "rho", "why"), rows, frozenset({(1, 1), (0, 2)}))


def a_page(word: str = "las") -> str:
    samples = {word: np.array([1.0, 60.0, 3600.0]), "fifo": np.array([0.0, 5.0])}
    over_time = [Series(word, np.arange(5.0), np.arange(5.0) / 5)]
    figures = (
        cdf(samples, title=word, x_label=word),
        lines(over_time, title=word, x_label="time", y_label=word, shape="steps", x_unit="seconds", y_unit="percent"),
        bars({word: 1.0, "fifo": 2.0}, title=word, unit="plain", best="lowest"),
        scatter({word: (1.0, 2.0), "fifo": (2.0, 1.0)}, title=word, x_label=word, y_label=word),
    )
    table = HtmlTable((word, "n"), ((word, "1"), ("fifo", word)), frozenset({(0, 1)}))
    sections = [Section(word, word, figures, table), Section("b", "one\n\ntwo"), Section("c", table=a_table())]
    return page(word, f"{word}\n\nmore", sections, footer=word)


def body_of(text: str) -> ET.Element:
    body = ET.fromstring(text).find("body")
    assert body is not None
    return body


def test_page_is_well_formed_as_html_and_as_xml() -> None:
    text = a_page()
    assert text.startswith("<!DOCTYPE html>\n")
    assert ET.fromstring(text).tag == "html"
    read(text)


@pytest.mark.parametrize("word", ["las", HOSTILE, "", "a\x00\ud800b"])
def test_page_runs_and_fetches_nothing_whatever_the_words(word: str) -> None:
    text = a_page(word)
    ET.fromstring(text)
    seen = read(text)
    assert not seen.tags & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    assert not {name for name in seen.attributes if name.startswith("on") or name in {"src", "style", "srcset"}}
    assert re.findall(r"https?://|//\w|url\(|@import|javascript:", text.replace("alert", "")) == []
    text.encode()


@given(st.text(st.characters(), max_size=30))
def test_page_shows_any_text_as_text(word: str) -> None:
    section = Section(word, word, (), HtmlTable((word,), ((word,),), frozenset({(0, 0)})))
    text = page(word, word, [section], footer=word)
    ET.fromstring(text)
    assert read(text).tags <= {
        *("html", "head", "meta", "title", "style", "body", "main", "header", "h1", "h2", "p", "section", "footer"),
        *("div", "table", "thead", "tbody", "tr", "th", "td", "strong"),
    }


def test_page_allows_itself_inline_styles_and_nothing_else() -> None:
    metas = list(ET.fromstring(a_page()).iter("meta"))
    (policy,) = [each.get("content") for each in metas if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_page_is_the_same_bytes_each_time() -> None:
    assert a_page() == a_page()


def test_page_without_sections_is_a_page() -> None:
    text = page("t", "", [])
    read(text)
    assert body_of(text).findtext("main/header/h1") == "t"
    assert "<footer" not in text
    assert "<nav" not in text


def test_page_links_to_each_section_by_place() -> None:
    root = body_of(a_page())
    want = [section.get("id") for section in root.iter("section")]
    assert [(link.get("href") or "").lstrip("#") for link in root.iter("a")] == want
    assert len(set(want)) == 3


def test_text_is_set_in_paragraphs() -> None:
    root = body_of(page("t", "", [Section("s", " one \n\n\n two\nlines \n\n")]))
    assert [each.text for each in root.iter("p")] == ["one", "two\nlines"]


def test_table_sets_the_best_cells_in_bold_and_no_others() -> None:
    root = body_of(page("t", "", [Section("s", table=a_table())]))
    assert [each.text for each in root.iter("strong")] == ["1.20", "2h05m"]


def test_table_sets_numbers_to_the_right_and_words_to_the_left() -> None:
    root = body_of(page("t", "", [Section("s", table=a_table())]))
    heads = [each.get("class") for each in root.iter("th") if each.get("scope") == "col"]
    assert heads == [None, "n", "n", None]


def test_table_names_its_rows_and_scrolls_by_itself() -> None:
    root = body_of(page("t", "", [Section("s", table=a_table())]))
    assert [each.text for each in root.iter("th") if each.get("scope") == "row"] == ["fifo", "las"]
    (box,) = [each for each in root.iter("div") if each.get("class") == "scroll"]
    assert (box.get("tabindex"), box.get("aria-label")) == ("0", "Table: s")


def test_table_without_rows_or_columns_is_a_table() -> None:
    for table in (HtmlTable((), (), frozenset()), HtmlTable(("a", "b"), (), frozenset())):
        text = page("t", "", [Section("s", table=table)])
        read(text)
        assert text.count("<table") == 1


def test_table_with_a_ragged_row_is_refused_with_its_number() -> None:
    with pytest.raises(InvariantError, match="row 1 has 1 cells; expected 2"):
        HtmlTable(("a", "b"), (("1", "2"), ("1",)), frozenset())


def test_style_knows_every_class_and_every_colour_that_is_used() -> None:
    text = a_page()
    used = {name for each in re.findall(r'class="([^"]+)"', text) for name in each.split()}
    known = set(re.findall(r"\.([a-z]\w*)", style.FIGURE + style.PAGE))
    assert used - known <= {"other"}
    variables = set(re.findall(r"var\(--(\w+)\)", style.FIGURE + style.PAGE)) - {"c"}
    assert variables <= {*style.LIGHT, *(f"s{place}" for place in range(len(style.LIGHT_SERIES)))}


def test_dark_has_a_colour_for_every_light_one() -> None:
    assert style.DARK.keys() == style.LIGHT.keys()
    assert len(style.DARK_SERIES) == len(style.LIGHT_SERIES)


@pytest.mark.parametrize("colours", [style.LIGHT, style.DARK], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["ink", "muted", "accent"])
def test_text_stands_out_from_the_paper(colours: dict[str, str], name: str) -> None:
    """At 4.5 to 1, as the accessibility guidelines ask of small text (WCAG 2.1, 1.4.3)."""
    low, high = sorted((_luminance(colours["paper"]), _luminance(colours[name])))
    assert (high + 0.05) / (low + 0.05) >= 4.5


def _luminance(colour: str) -> float:
    parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))
