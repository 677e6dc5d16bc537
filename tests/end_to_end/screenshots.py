"""`make screenshots`: the pictures of the page in docs/images, wide and narrow, light and dark."""

from __future__ import annotations

from typing import Literal

from tests.end_to_end.browser import CHROMIUM, Page, chromium
from tests.end_to_end.processes import TANDEM, running
from tests.paths import ROOT

IMAGES = ROOT / "docs" / "images"
SIZES = {1280: 1000, 390: 844}
"""Height of the window by its width, in CSS pixels."""
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
SAMPLES = {1280: 0, 390: 1}
"""Index of the sample prompt by the window's width."""
WARM_UP_RUNS = 4
"""Completions before the first picture: the first ones of a process are slower."""


def main() -> None:
    if CHROMIUM is None:
        raise SystemExit("error: there is no Chromium on the path (Debian: apt-get install chromium)")
    with (
        running(TANDEM, "up", "--model", "demo", "--port", "0", "--http-port", "0") as cluster,
        chromium() as page,
    ):
        url = cluster.line("page on ", seconds=300).partition(" ")[0]
        for run in range(WARM_UP_RUNS + 1):
            complete(page, url, sample=run % 2)
        for width, height in SIZES.items():
            page.resize(width, height)
            complete(page, url, SAMPLES[width])
            for scheme in SCHEMES:
                page.prefer(scheme)
                page.screenshot(IMAGES / f"page-{width}-{scheme}.png")


def complete(page: Page, url: str, sample: int) -> None:
    """Complete a sample prompt, with the draft and then by the target alone."""
    page.open(url)
    page.until("document.querySelectorAll('#replicas tbody tr').length === 2")
    page.evaluate(f"document.querySelectorAll('#samples button')[{sample}].click()")
    page.evaluate("document.activeElement.blur()")
    page.evaluate("document.getElementById('run').click()")  # no mouse: it would hover over something
    page.until("document.getElementById('speedup').textContent !== '\u2013'", 120.0)
    page.until("document.getElementById('run').textContent === 'Complete'")
    page.until("document.getElementById('all-running').textContent === '0'")
    page.evaluate("window.scrollTo(0, 0)")


if __name__ == "__main__":
    main()
