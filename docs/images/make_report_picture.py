"""Takes docs/images/report.png: the top of the HTML report of `poise demo`, its timeline zoomed to the first day.

python docs/images/make_report_picture.py [FILE]

Needs the browser of Debian's package `chromium`. Fonts differ from machine to machine, and so do the bytes.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, ViewportSize, sync_playwright

SIZE: ViewportSize = {"width": 1100, "height": 1330}
DAY = 0.53
"""About the first day, as a fraction of the longest run."""


def picture(browser: Browser, report: Path, target: Path) -> None:
    """Open, zoom by dragging, rest on a block, and take the picture."""
    page = browser.new_page(viewport=SIZE)
    page.goto(report.as_uri())
    page.locator(".timeline[data-ready]").wait_for()
    box = page.locator(".stage canvas").bounding_box()
    assert box is not None
    left, width, top = box["x"] + 52, box["width"] - 53, box["y"] + 60
    page.mouse.move(left, top)
    page.mouse.down()
    page.mouse.move(left + DAY * width, top, steps=5)
    page.mouse.up()
    page.wait_for_timeout(200)
    page.mouse.move(left + 0.71 * width, top)
    page.wait_for_timeout(200)
    page.screenshot(path=target)


def main() -> None:
    """Make the report, open it, take its picture."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("report.png")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = Path(folder) / "report.html"
        subprocess.run(["poise", "demo", "--quiet", "--html", report], check=True, stdout=subprocess.DEVNULL)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        picture(browser, report, target)
        browser.close()


if __name__ == "__main__":
    main()
