"""Reports as people meet them: made by the command, opened in a real browser. Skipped where there is no browser."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.shell import poise_apart

TRACE = "synthetic:jobs=150,seed=1,rate=90,tenants=3,failures=0.3,durations=lognormal:1200:1"
POLICIES = ("fifo", "srtf", "las")
DESKTOP = {"width": 1200, "height": 900}


@dataclass
class Opened:
    """A page, with everything that it complained of and everything that it asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def span(self) -> float:
        """Seconds that the timeline shows."""
        shown = self.data
        return float(shown["to"]) - float(shown["from"])

    @property
    def data(self) -> dict[str, str]:
        """What the timeline says of itself."""
        found: dict[str, str] = self.page.locator(".timeline").evaluate("element => ({...element.dataset})")
        return found

    @property
    def picture(self) -> str:
        """The pixels of the timeline, to compare."""
        found: str = self.page.locator(".stage canvas").evaluate("canvas => canvas.toDataURL()")
        return found

    def settle(self) -> None:
        """Wait for what was asked for to be drawn."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def scrolled_to(self, top: float) -> None:
        """Wait until the page is where the timeline is so far from the upper edge."""
        there = "top => Math.abs(document.querySelector('.stage').getBoundingClientRect().top - top) <= 2"
        self.page.wait_for_function(there, arg=top)

    def middle(self) -> tuple[float, float]:
        """The middle of the timeline, to which the pointer goes."""
        stage = self.page.locator(".stage")
        stage.scroll_into_view_if_needed()
        box = stage.bounding_box()
        return box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.4


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser, for no longer than its tests take.

    Until it is closed, Playwright has an event loop running in this thread, so that no other test could run one.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; `make setup` brings it")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium here; Debian's package of that name has it")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the command, once; not at all where nothing could open it."""
    html = tmp_path_factory.mktemp("report") / "report.html"
    words = ("--policies", ",".join(POLICIES), "--cluster", "v100:8,k80:8", "--html", html, "--quiet")
    said = poise_apart("compare", TRACE, *words)
    assert said.code == 0, said.err
    return html


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Opens a file in a context of its own, and waits until its timeline, if any, is drawn."""
    contexts: list[Any] = []

    def open_file(path: Path, **options: Any) -> Opened:
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        contexts.append(context)
        seen = Opened(context.new_page())
        seen.page.on(
            "console", lambda message: seen.errors.append(message.text) if message.type in ("error", "warning") else 0
        )
        seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
        seen.page.on("request", lambda request: seen.requests.append(request.url))
        seen.page.goto(path.as_uri())
        if options.get("java_script_enabled", True) and seen.page.locator(".timeline").count():
            seen.page.locator(".timeline[data-ready]").wait_for()
        return seen

    yield open_file
    for context in contexts:
        context.close()
