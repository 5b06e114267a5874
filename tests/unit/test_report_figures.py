"""Figures are well-formed, inert, bounded, deterministic, and mark what is best."""

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Literal
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.lab.report.axes import FloatArray
from poise.lab.report.figures import Series, bars, best_places, cdf, frontier, groups, lines, scatter, standalone
from poise.lab.report.frame import BOLD, WIDTH, escape, legend_for, shorten, text_width, wrap
from poise.lab.report.point_labels import NEAR, Area, Point, label_spots
from poise.scheduler.model.errors import InvariantError

HOSTILE = "<script>alert(\"x\")</script>' onload='y' & ]]> <!--"
NAN, INF = math.nan, math.inf


def values_of(numbers: Sequence[float]) -> FloatArray:
    return np.array(numbers, dtype=np.float64)


def line(label: str, x: Sequence[float], y: Sequence[float]) -> Series:
    return Series(label, values_of(x), values_of(y))


def plot(*series: Series, shape: Literal["line", "steps"] = "line", scale: Literal["linear", "log"] = "linear") -> str:
    return lines(series, title="t", x_label="x", y_label="y", shape=shape, x_scale=scale)


def points(**places: tuple[float, float]) -> str:
    return scatter(places, title="t", x_label="x", y_label="y")


FIGURES: dict[str, Callable[[], str]] = {
    "no series": lambda: plot(),
    "an empty series": lambda: plot(line("a", [], [])),
    "one point": lambda: plot(line("a", [1.0], [2.0])),
    "one point of steps": lambda: plot(line("a", [1.0], [2.0]), shape="steps"),
    "equal y": lambda: plot(line("a", [0.0, 1.0, 2.0], [7.0, 7.0, 7.0])),
    "equal x": lambda: plot(line("a", [7.0, 7.0, 7.0], [0.0, 1.0, 2.0])),
    "all zero": lambda: plot(line("a", [0.0, 0.0], [0.0, 0.0])),
    "zeros on a log axis": lambda: plot(line("a", [0.0, 0.0, 1.0, 100.0], [1.0, 2.0, 3.0, 4.0]), scale="log"),
    "nothing but zeros on a log axis": lambda: plot(line("a", [0.0, 0.0], [1.0, 2.0]), scale="log"),
    "not finite": lambda: plot(line("a", [NAN, 1.0, INF, 2.0], [0.0, NAN, 1.0, -INF])),
    "huge": lambda: plot(line("a", [-1e308, 1e308], [-1e308, 1e308])),
    "tiny": lambda: plot(line("a", [5e-324, 1e-310], [5e-324, 1e-300])),
    "twenty series": lambda: plot(*(line(f"p{n}", [0.0, 1.0], [n, n + 1.0]) for n in range(20))),
    "hostile words": lambda: lines([line(HOSTILE, [0.0, 1.0], [0.0, 1.0])], title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE),
    "no samples": lambda: cdf({}, title="t", x_label="x"),
    "odd samples": lambda: cdf(
        {"a": values_of([]), "b": values_of([0.0, 0.0]), "c": values_of([5.0] * 3), "d": values_of([NAN, INF])},
        title="t",
        x_label="x",
    ),
    "hostile samples": lambda: cdf({HOSTILE: values_of([1.0, 2.0])}, title=HOSTILE, x_label=HOSTILE),
    "no bars": lambda: bars({}, title="t", unit="plain", best="lowest"),
    "odd bars": lambda: bars({"a": NAN, "b": INF, "c": 0.0, "d": -3.0, "e": 1e308}, title="t", unit="plain", best="lowest"),
    "hostile bars": lambda: bars({HOSTILE: 1.0}, title=HOSTILE, unit="percent", best="highest"),
    "no points": lambda: points(),
    "odd points": lambda: points(a=(NAN, 1.0), b=(1.0, INF), c=(1.0, 1.0), d=(1.0, 1.0), e=(1e308, -1e308)),
    "hostile points": lambda: scatter({HOSTILE: (1.0, 2.0)}, title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE),
}
each_figure = pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES.keys())


def classes(root: ET.Element) -> list[str]:
    return [each.get("class", "") for each in root.iter()]


def paths(root: ET.Element) -> list[str]:
    """The drawn curves, without the swatches of the legend, which are relative."""
    return [d for each in root.iter("path") if each.get("class") == "line" and "h" not in (d := each.get("d", ""))]


def coordinates(path: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path)]


@each_figure
def test_figure_is_well_formed_and_says_what_it_is(draw: Callable[[], str]) -> None:
    root = ET.fromstring(draw())
    assert root.tag == "svg"
    assert root.get("role") == "img"
    assert (root.get("aria-label") or "").strip()
    assert re.fullmatch(r"0 0 \d+ \d+", root.get("viewBox", ""))


@each_figure
def test_figure_has_no_address_script_handler_or_id(draw: Callable[[], str]) -> None:
    for element in ET.fromstring(draw()).iter():
        assert element.tag in {"svg", "g", "path", "circle", "rect", "text", "tspan", "title"}
        assert not {name for name in element.attrib if name.startswith("on") or name in {"id", "href", "style"}}


@each_figure
def test_figure_stays_inside_its_box_and_has_finite_coordinates(draw: Callable[[], str]) -> None:
    root = ET.fromstring(draw())
    height = float(root.get("viewBox", "").split()[3])
    for element in root.iter():
        for name, most in (("x", WIDTH), ("cx", WIDTH), ("y", height), ("cy", height)):
            assert 0 <= float(element.get(name, "0")) <= most
        assert "nan" not in element.get("d", "")
        assert "inf" not in element.get("d", "")


@each_figure
def test_figure_is_the_same_bytes_each_time(draw: Callable[[], str]) -> None:
    assert draw() == draw()


@each_figure
def test_standalone_figure_is_an_svg_file(draw: Callable[[], str]) -> None:
    text = standalone(draw())
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "--ink" in (root.findtext("{http://www.w3.org/2000/svg}style") or "")
    assert re.findall(r"https?:[^\"' ]*", text) == ["http://www.w3.org/2000/svg"]
    assert int(root.get("width", "0")) > 0


def test_standalone_refuses_what_is_not_a_figure() -> None:
    with pytest.raises(InvariantError, match="not a figure"):
        standalone("<p>hello</p>")


@pytest.mark.slow
def test_figure_does_not_depend_on_the_hash_seed() -> None:
    script = (
        "from poise.lab.report.figures import *; import numpy as np\n"
        "print(scatter({f'p{n}': (n % 3, n % 5) for n in range(9)}, title='t', x_label='x', y_label='y'))\n"
        "print(cdf({f'p{n}': np.arange(n + 1.0) for n in range(9)}, title='t', x_label='x'))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


@given(st.text(st.characters(), max_size=30), st.text(st.characters(), max_size=30))
def test_any_text_whatever_is_inert(name: str, title: str) -> None:
    for svg in (
        lines([line(name, [0.0, 1.0], [0.0, 1.0])], title=title, x_label=name, y_label=title),
        bars({name: 1.0}, title=title, unit="plain", best="lowest"),
        scatter({name: (1.0, 1.0)}, title=title, x_label=name, y_label=title),
    ):
        tags = {element.tag for element in ET.fromstring(svg).iter()}
        assert tags <= {"svg", "g", "path", "circle", "rect", "text", "tspan", "title"}
        svg.encode()


def test_escape_replaces_what_xml_forbids_and_what_turns_text_around() -> None:
    assert escape("a\x00b\ud800c\u202ed<&>\"'") == "a\ufffdb\ufffdc\ufffdd&lt;&amp;&gt;&quot;&#x27;"


def test_lines_of_many_points_stay_small() -> None:
    rng = np.random.default_rng(0)
    x = np.arange(70_000.0)
    series = [Series(f"p{n}", x, rng.random(70_000)) for n in range(7)]
    svg = lines(series, title="t", x_label="x", y_label="y", shape="steps")
    drawn = paths(ET.fromstring(svg))
    assert len(drawn) == 7
    assert all(path.count("V") <= 600 for path in drawn)
    assert len(svg) < 7 * 600 * 14


def test_steps_hold_a_value_until_the_next() -> None:
    (path,) = paths(ET.fromstring(plot(line("a", [0.0, 1.0, 2.0, 3.0], [0.0, 5.0, 5.0, 0.0]), shape="steps")))
    assert re.sub(r"[\d. ]+", "", path) == "MHVHV"


def test_steps_show_the_last_value_to_the_end() -> None:
    (path,) = paths(ET.fromstring(plot(line("a", [0.0, 1.0, 2.0], [0.0, 5.0, 5.0]), shape="steps")))
    assert re.sub(r"[\d. ]+", "", path) == "MHVH"


def test_one_point_is_a_dot() -> None:
    root = ET.fromstring(plot(line("a", [1.0], [2.0]), shape="steps"))
    assert classes(root).count("dot") == 1
    assert paths(root) == []


def test_twenty_series_differ_in_colour_or_dashes() -> None:
    root = ET.fromstring(FIGURES["twenty series"]())
    looks = [each for each in classes(root) if each.startswith("series")]
    assert len(set(looks)) == len(looks) == 20


def test_empty_series_keeps_the_colours_of_those_behind_it() -> None:
    root = ET.fromstring(plot(line("a", [], []), line("b", [0.0, 1.0], [0.0, 1.0])))
    drawn = [group.get("class") for group in root.iter("g") if len(group.findall("circle"))]
    assert drawn == ["series c1 d1"]


def test_legend_entries_do_not_overlap_and_stay_inside() -> None:
    labels = [f"policy-{'x' * (n % 7)}" for n in range(20)]
    legend = legend_for(labels, 30.0)
    ends = [(left, left + 29 + text_width(label, 12.0), y) for label, (left, y) in zip(labels, legend.spots, strict=True)]
    assert all(right <= WIDTH for _, right, _ in ends)
    assert all(b[2] > a[2] or b[0] > a[1] for a, b in itertools.pairwise(ends))


def test_no_data_is_said() -> None:
    for svg in (plot(), cdf({}, title="t", x_label="x"), bars({}, title="t", unit="plain", best="lowest"), points()):
        assert "no data" in svg


@settings(max_examples=settings().max_examples * 5 // 4)
@given(st.lists(st.one_of(st.floats(0, 1e7), st.just(0.0)), min_size=1, max_size=60))
def test_cdf_rises_from_left_to_right_up_to_all(samples: list[float]) -> None:
    root = ET.fromstring(cdf({"a": values_of(samples)}, title="t", x_label="x"))
    (path,) = paths(root)
    across = [float(x) for x in re.findall(r"[MH](-?[\d.]+)", path)]
    down = [float(y) for y in re.findall(r"V(-?[\d.]+)", path)]
    assert across == sorted(across)
    assert down == sorted(down, reverse=True)  # upwards on the screen
    top = min(float(y) for y in re.findall(r'y="([\d.]+)">100%', ET.tostring(root, encoding="unicode")))
    assert coordinates(path)[1] == pytest.approx(top - 4) or down[-1] == pytest.approx(top - 4, abs=0.11)


def test_cdf_starts_with_the_share_of_zeros() -> None:
    svg = cdf({"a": values_of([0.0, 0.0, 0.0, 100.0])}, title="t", x_label="x")
    start, top, bottom = coordinates(paths(ET.fromstring(svg))[0])[1], *_level(svg, "100%"), *_level(svg, "0%")
    assert (bottom - start) / (bottom - top) == pytest.approx(0.75, abs=0.01)


def _level(svg: str, label: str) -> tuple[float]:
    """Where the grid line of a tick of y lies."""
    found = re.search(rf'y="([\d.]+)">{label}<', svg)
    assert found is not None
    return (float(found[1]) - 4,)


def test_cdf_says_median_and_tail() -> None:
    svg = cdf({"a": np.arange(1.0, 101.0) * 60}, title="t", x_label="x")
    assert "a: median 50m00s, 99th percentile 1h39m" in svg


def test_cdf_of_plain_numbers_says_them_plainly() -> None:
    svg = cdf({"a": np.arange(1.0, 101.0)}, title="t", x_label="x", unit="plain")
    assert "a: median 50, 99th percentile 99" in svg
    assert "min" not in re.findall(r">([^<]*)</text>", svg)


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({"a": 60.001, "b": 60.002, "c": 300.0}, ["a", "b"]),
        ({"a": 60.0, "b": 60.0}, []),
        ({"a": 60.001, "b": 60.002}, []),
        ({"a": 60.0}, []),
    ],
)
def test_bars_that_are_written_the_same_are_marked_together_or_not_at_all(values: dict[str, float], want: list[str]) -> None:
    root = ET.fromstring(bars(values, title="t", unit="seconds", best="lowest"))
    marked = [group.findtext("title") or "" for group in root.iter("g") if group.get("class") == "best"]
    assert [each.partition(":")[0] for each in marked] == want


@pytest.mark.parametrize(("best", "want"), [("lowest", ["a", "c"]), ("highest", ["b"])])
def test_bars_mark_the_best_and_all_that_tie_with_it(best: Literal["lowest", "highest"], want: list[str]) -> None:
    root = ET.fromstring(bars({"a": 1.0, "b": 2.0, "c": 1.0, "d": NAN}, title="t", unit="plain", best=best))
    marked = [group.find("text") for group in root.iter("g") if group.get("class") == "best"]
    assert [text.text for text in marked if text is not None] == want
    assert len([each for each in root.iter("tspan") if "best" in (each.text or "")]) == len(want)


def test_bars_print_values_and_are_as_long_as_they_are_large() -> None:
    root = ET.fromstring(bars({"a": 3600.0, "b": 7200.0}, title="t", unit="seconds", best="lowest"))
    short, long = (float(bar.get("width", "")) for bar in root.iter("rect"))
    assert long == pytest.approx(2 * short, abs=0.2)
    assert {"1h00m", "2h00m"} <= {each.text for each in root.iter("text")}


def test_frontier_is_the_points_that_nothing_beats() -> None:
    x, y = values_of([1.0, 2.0, 3.0, 2.0, 1.0]), values_of([5.0, 3.0, 3.0, 9.0, 5.0])
    assert frontier(x, y) == [0, 4, 1]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_frontier_agrees_with_the_definition(places: list[tuple[int, int]]) -> None:
    x, y = values_of([float(a) for a, _ in places]), values_of([float(b) for _, b in places])
    want = {
        index for index, (a, b) in enumerate(places) if not any(c <= a and d <= b and (c < a or d < b) for c, d in places)
    }
    assert set(frontier(x, y)) == want


def test_scatter_fills_the_frontier_alone() -> None:
    root = ET.fromstring(points(fast=(1.0, 3.0), fair=(3.0, 1.0), poor=(4.0, 4.0)))
    best = [group.findtext("title") for group in root.iter("g") if group.get("class") == "best"]
    assert sorted(best, key=str) == ["fair: 3, 1", "fast: 1, 3"]


def test_scatter_fills_all_points_that_read_the_same_as_one_of_the_frontier() -> None:
    root = ET.fromstring(points(fast=(1.0, 3.0), twin=(1.0, 3.0001), fair=(3.0, 1.0), poor=(4.0, 4.0)))
    best = [group.findtext("title") for group in root.iter("g") if group.get("class") == "best"]
    assert sorted(best, key=str) == ["fair: 3, 1", "fast: 1, 3", "twin: 1, 3"]


@given(st.lists(st.floats(0.1, 10) | st.none(), max_size=8), st.sampled_from(["lowest", "highest"]))
def test_the_best_are_all_that_are_written_as_the_best_and_never_all_there_are(
    values: list[float | None], kind: Literal["lowest", "highest"]
) -> None:
    written = ["–" if value is None else f"{value:.0f}" for value in values]
    found = best_places(values, written, kind)
    known = [value for value in values if value is not None]
    texts = {text for text in written if text != "–"}
    if len(texts) < 2:
        assert found == []
    else:
        goal = f"{(min if kind == 'lowest' else max)(known):.0f}"
        assert found == [place for place, text in enumerate(written) if text == goal]
        assert 0 < len(found) < len(known)


def test_scatter_keeps_points_apart_when_one_is_thousands_of_times_as_far() -> None:
    svg = points(wild=(9.0, 15_000.0), fair=(2.0, 1.1), fairer=(3.0, 2.2))
    root = ET.fromstring(svg)
    down = sorted(float(each.get("cy", "")) for each in root.iter("circle"))
    assert down[2] - down[1] > 10
    assert "y (log scale)" in svg
    assert "x (log scale)" not in svg


def test_scatter_labels_of_neighbours_do_not_overlap() -> None:
    crowd = [Point(f"policy-{n}", "", 100.0 + 6 * n, 100.0 + 3 * (n % 2), "other") for n in range(6)]
    spots = label_spots(crowd, Area(0.0, 0.0, 400.0, 300.0))
    assert all(a.area.shared_with(b.area) == 0 for a, b in itertools.combinations(spots, 2))


def test_scatter_labels_stand_close_to_their_points_and_closer_than_to_others() -> None:
    """The policies of the demonstration, of which three stand close together near the left end."""
    jcts = {
        "srtf": (1.28, 4.46),
        "themis": (1.30, 2.42),
        "fifo": (5.53, 75.37),
        "las": (2.10, 5.10),
        "max-min": (1.32, 5.78),
    }
    jcts |= {"tiresias": (1.88, 5.48), "max-min+agnostic": (1.75, 12.86), "gandiva-fair": (2.33, 8.53)}
    drawn = ET.fromstring(
        scatter(
            {name: (3600 * x, y) for name, (x, y) in jcts.items()}, title="t", x_label="x", y_label="y", x_unit="seconds"
        )
    )
    assert "leader" not in classes(drawn)
    dots = {
        (group.findtext("title") or "").partition(":")[0]: (float(dot.get("cx", "")), float(dot.get("cy", "")))
        for group in drawn.iter("g")
        for dot in group.iter("circle")
    }
    labels = {each.text or "": _drawn(each) for each in drawn.iter("text") if "halo" in each.get("class", "")}
    assert labels.keys() == dots.keys() == jcts.keys()
    for name, area in labels.items():
        own = area.off(*dots[name])
        assert own <= NEAR + 1
        assert [other for other in dots if other != name and area.off(*dots[other]) <= own] == [], name
    assert all(a.shared_with(b) == 0 for a, b in itertools.combinations(labels.values(), 2))


def _drawn(label: ET.Element) -> Area:
    """What a label covers; it is drawn four units below its middle line."""
    kinds, x, y = label.get("class", "").split(), float(label.get("x", "")), float(label.get("y", "")) - 4
    width = text_width(label.text or "", 12.0 * (BOLD if "strong" in kinds else 1))
    left = x - (width if "end" in kinds else width / 2 if "middle" in kinds else 0.0)
    return Area(left, y - 7, left + width, y + 7)


@given(st.lists(st.tuples(st.floats(0, 400), st.floats(0, 300), st.text(max_size=12)), min_size=1, max_size=7))
def test_a_line_leads_to_every_label_that_is_not_close_to_its_point(places: list[tuple[float, float, str]]) -> None:
    crowd = [Point(name, "", x, y, "other") for x, y, name in places]
    for point, spot in zip(crowd, label_spots(crowd, Area(0.0, 0.0, 400.0, 300.0)), strict=True):
        assert spot.far == (spot.area.off(point.x, point.y) > NEAR)
        assert spot.area.off(point.x, point.y) < 70


@given(st.floats(20, 380), st.floats(20, 280), st.text(max_size=12))
def test_the_label_of_a_point_alone_is_close_and_inside(x: float, y: float, name: str) -> None:
    (spot,) = label_spots([Point(name, "", x, y, "best")], Area(0.0, 0.0, 400.0, 300.0))
    assert not spot.far
    assert 0 <= spot.area.left <= spot.area.right <= 400


@pytest.mark.slow
def test_scatter_of_many_points_names_some_and_draws_all() -> None:
    many = {f"p{n}": (float(n % 17), float(n % 23)) for n in range(300)}
    root = ET.fromstring(scatter(many, title="t", x_label="x", y_label="y"))
    assert classes(root).count("point") == 300
    assert len([each for each in classes(root) if each.startswith("halo")]) == 40


@given(st.text(max_size=60), st.floats(20, 300))
def test_shorten_fits_and_leaves_what_fits_alone(text: str, width: float) -> None:
    got = shorten(text, width, 12.0)
    assert text_width(got, 12.0) <= width
    assert got == text or text_width(text, 12.0) > width


@pytest.mark.parametrize("name", ["fifo-skip", "gandiva-fair", "max-min+agnostic", "tiresias", "las", "ab"])
def test_a_name_for_which_room_was_made_is_written_whole(name: str) -> None:
    """Whatever is rounded when margins are added to its width and taken away again."""
    drawn = bars({name: 1.0, "a": 2.0}, title="t", unit="plain", best="lowest"), groups({name: [0.5]}, ["x"], title="t")
    for svg in drawn:
        assert name in [each.text for each in ET.fromstring(svg).iter("text")]


def test_shorten_keeps_the_end_by_which_names_differ() -> None:
    assert shorten("max-min+partitioned:k=8", 100.0, 12.0).endswith("k=8")


@given(st.text(max_size=200))
def test_wrap_fits_its_lines_and_their_number(text: str) -> None:
    got = wrap(text, 200.0, 14.0, 2)
    assert len(got) <= 2
    assert all(text_width(each, 14.0) <= 200.0 for each in got)
