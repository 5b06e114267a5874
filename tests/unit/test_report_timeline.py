"""What a page holds for its timeline is what happened; the script in it is the only one that may run."""

import base64
import hashlib
import json
import re
import zlib
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from tests.builders import nodes
from tests.unit.test_report_tracks import CLUSTER, a_history, hold

from poise.lab.analysis.history import RunEnd
from poise.lab.report import timeline as module
from poise.lab.report.page import Exhibit, Section, page
from poise.lab.report.timeline import COLOURS, ENDS, UNITS, Track, still, timeline

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\u2029\u202e\x00'\"&]]><!--"


def a_track(*names: str) -> Track:
    """Jobs one after another, ten seconds each, the first half failing."""
    stints = [
        hold(name, 10.0 * n, 10.0 * n + 10, (0, 3), ended=RunEnd.FAILED if 2 * n < len(names) else RunEnd.FINISHED)
        for n, name in enumerate(names)
    ]
    return Track.of(a_history(*stints))


def shown(*runs: tuple[str, Track]) -> Exhibit:
    exhibit = timeline(runs, CLUSTER)
    assert exhibit is not None
    return exhibit


def held(exhibit: Exhibit) -> list[bytes]:
    """What the elements that hold data hold, the common part first."""
    found = re.findall(r'<script type="text/plain" data-holds="\w+">([^<]*)</script>', exhibit.markup)
    return [zlib.decompress(base64.b64decode(each)) for each in found]


def columns(data: bytes) -> list[list[int]]:
    planes = np.frombuffer(data, dtype=np.uint8).astype(np.int64).reshape(6, 3, -1)
    return [(low + (middle << 8) + (high << 16)).tolist() for low, middle, high in planes]


def common(exhibit: Exhibit) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(held(exhibit)[0])
    return document


def test_data_says_who_held_what_when_and_how_it_ended() -> None:
    exhibit = shown(("fifo", a_track("x1", "y1", "x2", "x1")))
    known, (start, length, row, rows, job, ended) = common(exhibit), columns(held(exhibit)[1])
    unit = known["span"] / known["units"]
    moments = (np.cumsum(start) * unit).tolist()
    assert moments == pytest.approx([0, 10, 20, 30], abs=2 * unit)
    assert [each * unit for each in length] == pytest.approx([10] * 4, abs=2 * unit)
    assert (row, rows) == ([0] * 4, [2] * 4)
    assert [known["jobs"][each] for each in job] == ["x1", "y1", "x2", "x1"]
    assert [known["tenants"][known["tenant"][each]] for each in job] == ["x", "y", "x", "x"]
    assert [known["ends"][each] for each in ended] == ["failed", "failed", "finished", "finished"]
    assert known["nodes"] == [["n0", 4, "gpu"], ["n1", 2, "gpu"], ["n2", 4, "gpu"]]


def test_runs_number_jobs_alike_and_the_largest_tenant_comes_first() -> None:
    exhibit = shown(("a", a_track("x1", "y1")), ("b", a_track("y2", "y1", "z1")))
    known = common(exhibit)
    first, second = (columns(each)[4] for each in held(exhibit)[1:])
    assert [known["jobs"][each] for each in first] == ["x1", "y1"]
    assert [known["jobs"][each] for each in second] == ["y2", "y1", "z1"]
    assert known["tenants"][0] == "y"


def test_ends_and_lanes_fit_into_what_the_script_reads() -> None:
    assert len(ENDS) <= 8


def test_all_runs_share_one_span() -> None:
    exhibit = shown(("short", a_track("x1")), ("long", a_track("x1", "x2")))
    assert common(exhibit)["span"] == 20
    assert columns(held(exhibit)[1])[1] == [UNITS // 2]


def test_runs_without_a_block_are_no_timeline_and_one_among_others_is() -> None:
    assert timeline([("a", a_track())], CLUSTER) is None
    assert timeline([], CLUSTER) is None
    assert len(held(shown(("a", a_track()), ("b", a_track("x1"))))[1]) == 0


def test_what_was_put_together_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BLOCKS", 40)
    monkeypatch.setattr(module, "FEWEST_BLOCKS", 5)
    exhibit = shown(("fifo", a_track(*(f"x{n}" for n in range(100)))), ("las", a_track("x1")))
    assert "fifo: 100 blocks are drawn as " in exhibit.markup
    assert "las: 1 blocks" not in exhibit.markup
    known, (start, _, _, _, job, _) = common(exhibit), columns(held(exhibit)[1])
    assert len(start) <= 20
    assert max(job) >= len(known["jobs"])


def test_same_runs_are_the_same_bytes() -> None:
    assert shown(("fifo", a_track("x1", "y1"))) == shown(("fifo", a_track("x1", "y1")))


def test_page_allows_the_script_by_its_hash_and_holds_it_once() -> None:
    one, other = shown(("fifo", a_track("x1"))), shown(("las", a_track("y1")))
    text = page("t", "", [Section("a", exhibits=(one, other)), Section("b", exhibits=(one,))])
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    assert one.script in scripts[0]
    assert text.count(one.style) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    metas = [each.get("content") for each in ET.fromstring(text).iter("meta")]
    want = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    assert want in metas


def test_script_and_style_fetch_and_evaluate_nothing() -> None:
    exhibit = shown(("fifo", a_track("x1")))
    assert re.findall(r"https?:|//\w|\beval\b|\bFunction\(|fetch\(|import\b|url\(|XMLHttp|WebSocket", exhibit.style) == []
    code = re.sub(r"(?m)//.*$", "", exhibit.script)
    assert re.findall(r"https?:|\beval\b|\bFunction\(|fetch\(|\bimport\b|url\(|XMLHttp|WebSocket|innerHTML", code) == []
    assert "</script" not in exhibit.script
    assert "]]>" not in exhibit.script


def test_style_knows_every_class_of_the_markup() -> None:
    exhibit = shown(("fifo", a_track("x1", "y1")))
    used = {name for each in re.findall(r'class="([^"]+)"', exhibit.markup) for name in each.split()}
    known = set(re.findall(r"\.([a-z]\w*)", page("t", "", [Section("a", exhibits=(exhibit,))]).partition("</style>")[0]))
    assert used - known <= {"live", "figures"}


@pytest.mark.parametrize("word", [HOSTILE, "", "a\ud800b"])
def test_names_are_text_in_markup_and_in_data(word: str) -> None:
    exhibit = shown((word, a_track(f"x{word}", f"y{word}")))
    text = page("t", "", [Section("s", exhibits=(exhibit,))])
    tags = {element.tag for element in ET.fromstring(text).iter()}
    assert "img" not in tags
    text.encode()
    name = common(exhibit)["jobs"][0]
    assert not set(name) & {"\x00", "\ud800", "\u202e"}


def test_every_control_has_a_name() -> None:
    root = ET.fromstring(shown(("fifo", a_track("x1")), ("las", a_track("x1"))).markup)
    for tag in ("button", "select"):
        assert all((each.get("aria-label") or "").strip() for each in root.iter(tag))
    assert [each.findtext("span") for each in root.iter("label") if each.find("input") is not None] == ["fifo", "las"]
    (stage,) = [each for each in root.iter() if each.get("role") == "application"]
    assert stage.get("tabindex") == "0"


def cells(svg: str) -> dict[str, list[tuple[float, float]]]:
    """Of each colour, the left ends and the widths of its rectangles, without those of the key."""
    found = {}
    for path in ET.fromstring(svg).iter("path"):
        if (path.get("class") or "").startswith("cell") and (d := path.get("d") or "").count("h-18z") == 0:
            pieces = re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", d)
            found[path.get("class") or ""] = [(float(x), float(width)) for x, width in pieces]
    return found


def test_still_colours_cells_by_who_held_them() -> None:
    track = Track.of(a_history(hold("x1", 0, 50, (0, 15), (1, 3), (2, 15)), hold("y1", 50, 100, (0, 1))))
    drawn = cells(still("fifo", track, ("x", "y"), CLUSTER, 100.0))
    assert [len(each) for each in drawn.values()] == [10, 1]
    (x, wide), ((y, narrow),) = drawn["cell c0"][0], drawn["cell c1"]
    assert wide == pytest.approx(narrow, abs=4)
    assert y == pytest.approx(x + wide, abs=4)


def test_still_of_one_tenant_tells_jobs_apart() -> None:
    drawn = cells(still("fifo", a_track("x1", "x2", "x3"), ("x",), CLUSTER, 30.0))
    assert sorted(drawn) == ["cell c0", "cell c1", "cell c2"]


def test_still_of_a_large_cluster_stays_small() -> None:
    cluster = nodes(*[8] * 256)
    rng = np.random.default_rng(0)
    stints = [hold(f"x{n}", t, t + 5, (int(rng.integers(256)), 255)) for n, t in enumerate(rng.random(3000) * 1000)]
    history = a_history(*stints)
    history.cluster = cluster
    svg = still("fifo", Track.of(history), ("x",), cluster, 1000.0)
    assert len(svg) < 300_000


def test_tenants_beyond_the_colours_share_a_grey() -> None:
    names = [f"{letter}1" for letter in "abcdefghijklmn"]
    track = a_track(*names)
    drawn = cells(still("fifo", track, tuple("abcdefghijklmn"), CLUSTER, 140.0))
    assert set(drawn) == {f"cell c{n}" for n in range(COLOURS + 1)}
    assert len(drawn[f"cell c{COLOURS}"]) == 2  # the last three follow one another, on two rows
