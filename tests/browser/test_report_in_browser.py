"""A report opens without complaint, fetches nothing, and its timeline can be zoomed by every means that it offers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.browser.conftest import POLICIES, Open, Opened
from tests.shell import a_row, poise
from tests.unit.test_report_tracks import CLUSTER, a_history, hold

from poise.lab.analysis.history import History
from poise.lab.report.page import HtmlTable, Section, page
from poise.lab.report.timeline import Track, timeline

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}


def press(seen: Opened, name: str) -> None:
    seen.page.get_by_role("button", name=name, exact=True).click()
    seen.settle()


def key(seen: Opened, *names: str) -> None:
    seen.page.locator(".stage").focus()
    for name in names:
        seen.page.keyboard.press(name)
    seen.settle()


def overflow(seen: Opened) -> int:
    found: int = seen.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found


def a_page(folder: Path, history: History) -> Path:
    """A page with the timeline of one run and nothing else."""
    exhibit = timeline([("fifo", Track.of(history))], CLUSTER)
    assert exhibit is not None
    path = folder / "r.html"
    path.write_text(page("t", "", [Section("s", exhibits=(exhibit,))]), encoding="utf-8")
    return path


def test_report_opens_without_complaint_and_asks_for_nothing_but_itself(report: Path, opened: Open) -> None:
    seen = opened(report)
    assert seen.errors == []
    assert seen.requests == [report.as_uri()]


def test_figures_are_there_and_have_a_size(report: Path, opened: Open) -> None:
    page = opened(report).page
    figures = page.locator("figure svg").all()
    assert len(figures) == 6
    for figure in [*figures, page.locator(".stage canvas"), page.locator("table")]:
        box = figure.bounding_box()
        assert box["width"] > 250
        assert box["height"] > 100


def test_whole_span_is_shown_at_first(report: Path, opened: Open) -> None:
    seen = opened(report)
    assert (float(seen.data["from"]), float(seen.data["top"]), float(seen.data["bottom"])) == (0, 0, 16)
    assert seen.page.locator(".shown").inner_text().startswith("fifo: 0:00:00 to ")
    assert "all 16 GPUs" in seen.page.locator(".shown").inner_text()


def test_buttons_zoom_move_and_show_the_whole_again(report: Path, opened: Open) -> None:
    seen = opened(report)
    whole, first = seen.span, seen.picture
    press(seen, "Zoom in")
    assert seen.span == pytest.approx(whole / 2)
    assert seen.picture != first
    before = float(seen.data["from"])
    press(seen, "Later")
    assert float(seen.data["from"]) == pytest.approx(before + whole / 8)
    press(seen, "Earlier")
    assert float(seen.data["from"]) == pytest.approx(before)
    press(seen, "Fewer GPUs")
    assert float(seen.data["bottom"]) - float(seen.data["top"]) == 8
    press(seen, "Show the whole")
    assert (seen.span, seen.picture) == (whole, first)
    assert seen.page.get_by_role("button", name="Zoom out", exact=True).is_disabled()


def test_keys_zoom_move_and_show_the_whole_again(report: Path, opened: Open) -> None:
    seen = opened(report)
    whole, first = seen.span, seen.picture
    key(seen, "+", "+")
    assert seen.span == pytest.approx(whole / 4)
    at = float(seen.data["from"])
    key(seen, "ArrowRight")
    assert float(seen.data["from"]) == pytest.approx(at + whole / 16)
    key(seen, "ArrowLeft", "-")
    assert seen.span == pytest.approx(whole / 2)
    key(seen, "Shift+ArrowUp", "ArrowDown")
    assert (float(seen.data["top"]), float(seen.data["bottom"])) == (6, 14)
    key(seen, "0")
    assert (seen.span, seen.picture) == (whole, first)


def test_zoom_has_a_deepest_point(report: Path, opened: Open) -> None:
    seen = opened(report)
    whole = seen.span
    key(seen, *["+"] * 15)
    assert seen.span == pytest.approx(whole / 4096)
    assert seen.page.get_by_role("button", name="Zoom in", exact=True).is_disabled()


def test_wheel_zooms_around_the_pointer_and_lets_the_page_scroll_at_the_whole(report: Path, opened: Open) -> None:
    seen = opened(report)
    whole, first = seen.span, seen.picture
    x, y = seen.middle()
    seen.page.mouse.move(x, y)
    seen.page.mouse.wheel(0, -400)
    seen.settle()
    assert seen.span < whole / 2
    assert seen.picture != first
    assert float(seen.data["from"]) > 0
    seen.page.mouse.wheel(0, 4000)
    seen.settle()
    assert seen.span == pytest.approx(whole)
    scrolled = seen.page.evaluate("scrollY")
    seen.page.mouse.wheel(0, 300)
    seen.page.wait_for_function("before => scrollY > before", arg=scrolled)


def test_a_wheel_that_scrolls_the_page_goes_on_doing_so_over_the_timeline(report: Path, opened: Open) -> None:
    seen = opened(report)
    whole = seen.span
    top = seen.page.locator(".stage").bounding_box()["y"]
    seen.page.mouse.move(600, 120)
    for left in (3, 2, 1, 0):  # until the timeline is below the pointer
        seen.page.mouse.wheel(0, (top - 20) / 4)
        seen.scrolled_to(20 + (top - 20) * left / 4)
    seen.page.mouse.wheel(0, -40)
    seen.scrolled_to(60)
    assert seen.span == whole
    seen.page.mouse.move(602, 121)
    seen.page.mouse.wheel(0, -100)
    seen.settle()
    assert seen.span < whole


def test_dragging_zooms_to_what_was_selected(report: Path, opened: Open) -> None:
    seen = opened(report)
    whole = seen.span
    x, y = seen.middle()
    seen.page.mouse.move(x, y)
    seen.page.mouse.down()
    seen.page.mouse.move(x + 100, y + 2, steps=4)
    assert seen.page.locator(".part").is_visible()
    seen.page.mouse.up()
    seen.settle()
    assert whole / 15 < seen.span < whole / 8
    assert float(seen.data["bottom"]) - float(seen.data["top"]) == 16
    seen.page.mouse.move(x, y)
    seen.page.mouse.down()
    seen.page.mouse.move(x + 100, y + 60, steps=4)
    seen.page.mouse.up()
    seen.settle()
    assert 4 <= float(seen.data["bottom"]) - float(seen.data["top"]) < 8


def test_policies_share_one_view(report: Path, opened: Open) -> None:
    seen = opened(report)
    key(seen, "+", "+")
    shown, picture = seen.data, seen.picture
    for policy in POLICIES[1:]:
        seen.page.get_by_role("radio", name=policy, exact=True).check(force=True)
        seen.page.locator(f".timeline[data-run='{policy}']").wait_for()
        assert seen.data == {**shown, "run": policy}
        assert seen.picture != picture


def test_resting_on_a_block_says_whose_it_is(report: Path, opened: Open) -> None:
    seen = opened(report)
    x, y = seen.middle()
    for step in range(60):  # somewhere along the row a job is at work
        seen.page.mouse.move(x - 300 + step * 10, y)
        if seen.page.locator(".tip").is_visible():
            break
    job, tenant, where, when, ended = seen.page.locator(".tip div").all_inner_texts()
    assert job
    assert "GPU" in tenant
    assert tenant.startswith("tenant tenant-")
    assert where.split(":")[0].split()[-1].rpartition("-")[0] in ("v100", "k80")
    assert " to " in when
    assert ended in ("finished", "failed", "preempted", "node lost", "still under way")
    seen.page.mouse.move(5, 5)
    assert not seen.page.locator(".tip").is_visible()


def test_jobs_that_share_gpus_have_half_a_row_each(opened: Open, tmp_path: Path) -> None:
    seen = opened(a_page(tmp_path, a_history(hold("upper", 0, 100, (0, 15)), hold("lower", 0, 90, (0, 15)))))
    box = seen.page.locator(".stage canvas").bounding_box()
    rows = (box["height"] - 24) / 10  # four of ten rows are held
    told = []
    for part in (0.5, 1.5, 2.5, 3.5):
        seen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + part * rows)
        told.append(seen.page.locator(".tip div").first.inner_text())
    assert told == ["upper", "upper", "lower", "lower"]


def test_a_block_over_several_nodes_says_from_where_to_where(opened: Open, tmp_path: Path) -> None:
    seen = opened(a_page(tmp_path, a_history(hold("a", 0, 100, (0, 12), (1, 3)))))
    box = seen.page.locator(".stage canvas").bounding_box()
    seen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + (box["height"] - 24) * 0.4)
    first, last = CLUSTER.nodes[0].name, CLUSTER.nodes[1].name
    assert seen.page.locator(".tip div").all_inner_texts()[2] == f"4 GPUs, {first}:2 to {last}:1, gpu"


@pytest.mark.parametrize("width", [1200, 390])
def test_long_names_of_tenants_do_not_widen_the_page(width: int, opened: Open, tmp_path: Path) -> None:
    history = a_history(hold("a", 0, 100, (0, 3)), hold("b", 0, 90, (0, 12)))
    for life in history.jobs.values():
        life.tenant = life.tenant * 300
    seen = opened(a_page(tmp_path, history), viewport={"width": width, "height": 900})
    assert overflow(seen) == 0
    assert seen.page.locator(".key button").first.get_attribute("title") == "a" * 300


def test_colours_go_by_what_is_chosen_and_one_group_can_be_seen_alone(report: Path, opened: Open) -> None:
    seen = opened(report)
    pictures = [seen.picture]
    for choice, entries in (("job", 0), ("GPUs asked for", 4), ("how it ended", 8), ("tenant", 3)):
        seen.page.get_by_label("Colour by").last.select_option(choice)
        seen.settle()
        pictures.append(seen.picture)
        assert seen.page.locator(".key button").count() == entries
    assert pictures[-1] == pictures[0]
    assert len(set(pictures)) == 4
    entry = seen.page.locator(".key button").first
    entry.click()
    seen.settle()
    assert entry.get_attribute("aria-pressed") == "true"
    assert seen.picture != pictures[0]
    entry.click()
    seen.settle()
    assert seen.picture == pictures[0]


def test_phone_needs_no_sideways_scrolling_and_has_text_of_a_size(report: Path, opened: Open) -> None:
    seen = opened(report, **PHONE)
    assert overflow(seen) == 0
    sizes = seen.page.evaluate(
        """[...document.querySelectorAll("p,td,th,button,label,figure text")].map(each =>
            parseFloat(getComputedStyle(each).fontSize) * (each.ownerSVGElement?.getScreenCTM().a ?? 1))"""
    )
    assert min(sizes) >= 9


def test_fingers_pinch_and_tap(report: Path, opened: Open) -> None:
    seen = opened(report, **PHONE)
    whole = seen.span
    x, y = seen.middle()
    touch = seen.page.context.new_cdp_session(seen.page)

    def fingers(kind: str, *places: float) -> None:
        points = [{"x": place, "y": y, "id": number} for number, place in enumerate(places)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", x - 20, x + 20)
    fingers("touchMove", x - 60, x + 60)
    fingers("touchEnd")
    seen.settle()
    assert whole / 4 < seen.span < whole / 2
    before = float(seen.data["from"])
    fingers("touchStart", x)
    for step in range(1, 5):
        fingers("touchMove", x - 20 * step)
    fingers("touchEnd")
    seen.settle()
    assert float(seen.data["from"]) > before
    for step in range(8):  # a job is at work at one of these places
        seen.page.touchscreen.tap(x - 80 + 30 * step, y)
    assert seen.page.locator(".tip").is_visible()
    assert seen.errors == []


def test_dark_is_dark_and_paper_is_white(report: Path, opened: Open) -> None:
    seen = opened(report, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert seen.page.evaluate(ground) == "rgb(20, 24, 29)"
    on_screen = seen.picture
    seen.page.emulate_media(media="print")
    seen.settle()
    assert seen.page.evaluate(ground) == "rgb(255, 255, 255)"
    assert seen.picture != on_screen


def test_print_shows_the_timeline_without_its_tools_and_cuts_nothing_off(report: Path, opened: Open) -> None:
    seen = opened(report, viewport={"width": 690, "height": 1000})  # A4 less its margins
    seen.page.emulate_media(media="print")
    seen.settle()
    assert overflow(seen) == 0
    assert not seen.page.locator(".tools").is_visible()
    for selector in (".stage canvas", ".shown", ".key"):
        assert seen.page.locator(selector).is_visible()
    cut = seen.page.evaluate(
        """[...document.querySelectorAll("svg,canvas,table")].filter(each =>
            each.getBoundingClientRect().right > innerWidth + 1).length"""
    )
    assert cut == 0
    assert seen.page.pdf(format="A4", print_background=True).startswith(b"%PDF")


def test_a_wide_table_fits_on_paper(opened: Open, tmp_path: Path) -> None:
    row = ("tiresias:limits=300/900/90000/9000000,promote=8", *["11h46m ±10h56m"] * 8)
    path = tmp_path / "r.html"
    path.write_text(
        page("t", "", [Section("s", table=HtmlTable(("policy", *["average JCT"] * 8), (row, row)))]), encoding="utf-8"
    )
    seen = opened(path, viewport={"width": 690, "height": 1000})
    seen.page.emulate_media(media="print")
    assert overflow(seen) == 0


def test_without_scripts_every_run_is_a_picture(report: Path, opened: Open) -> None:
    page = opened(report, java_script_enabled=False).page
    stills = page.locator("noscript svg").all()
    assert [each.get_attribute("aria-label").split(":")[0] for each in stills] == [
        f"GPU timeline of {name}" for name in POLICIES
    ]
    assert all(each.bounding_box()["height"] > 100 for each in stills)
    assert not page.locator(".live").is_visible()


def test_a_browser_that_cannot_unpack_sees_the_pictures_too(report: Path, browser: Any) -> None:
    context = browser.new_context()
    context.add_init_script("delete globalThis.DecompressionStream")
    page = context.new_page()
    page.goto(report.as_uri())
    page.locator(".timeline > .figures svg").first.wait_for()
    assert page.locator(".timeline > .figures svg").count() == len(POLICIES)
    context.close()


HOSTILE = "</script><img src=x onerror=alert(1)>'\"&<!--]]>\\${1}"
"""A trace with worse, such as line separators, is refused; figures of such names are tested by themselves."""


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


@pytest.mark.usefixtures("one_core")
def test_names_stay_text_whatever_they_hold(opened: Open, tmp_path: Path) -> None:
    rows = [a_row(f"{HOSTILE}{n}", at=5 * n, gpus=2, seconds=500, tenant=f"{HOSTILE}{n % 2}") for n in range(6)]
    trace = tmp_path / "<img src=x onerror=alert(2)>.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said = poise("compare", trace, "--policies", "fifo,srtf", "--cluster", "gpu:4", "--html", tmp_path / "r.html")
    assert said.code == 0, said.err
    seen = opened(tmp_path / "r.html")
    x, y = seen.middle()
    seen.page.mouse.move(x, y)
    told = seen.page.locator(".tip div").first.inner_text()
    assert told.startswith("</script><img src=x onerror=alert(1)>")
    assert seen.page.locator("img").count() == 0
    assert seen.page.locator(".key button").count() == 2
    assert (seen.errors, seen.requests) == ([], [(tmp_path / "r.html").as_uri()])


def test_a_report_of_runs_in_which_nothing_ran_opens(opened: Open, tmp_path: Path) -> None:
    trace = tmp_path / "none.jsonl"
    trace.write_text(json.dumps(a_row("huge", gpus=99)) + "\n", encoding="utf-8")
    assert poise("compare", trace, "--policies", "fifo", "--cluster", "gpu:4", "--html", tmp_path / "r.html").code == 0
    seen = opened(tmp_path / "r.html")
    assert seen.errors == []
    assert "No job ever held a GPU" in seen.page.locator("main").inner_text()
