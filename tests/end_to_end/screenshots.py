"""`make screenshots`: the pictures of the page in docs/images, wide and narrow, light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tests.end_to_end.browser import CHROMIUM, Page, chromium
from tests.end_to_end.processes import TANDEM, running
from tests.paths import ROOT

IMAGES = ROOT / "docs" / "images"
SIZES = {1280: 1000, 360: 740}
"""Height of the window by its width, in CSS pixels."""
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
MESSAGES = (
    "Write a Python function that reverses a string, and explain it.",
    "What is the capital of France?",
    "List three facts about rivers.",
)
WARM_UP_RUNS = 3
"""Completions before the first picture: the first ones of a process are slower."""


def main() -> None:
    if CHROMIUM is None:
        raise SystemExit("error: there is no Chromium on the path (Debian: apt-get install chromium)")
    with (
        running(TANDEM, "up", "--model", "smollm2", "--port", "0", "--http-port", "0") as cluster,
        chromium() as page,
    ):
        url = cluster.line("page on ", seconds=300).partition(" ")[0]
        page.open(url)
        page.until("document.getElementById('state').textContent === 'ready'")
        for _ in range(WARM_UP_RUNS):
            complete(page)
        take(page, "completion", widths=(1280,), schemes=("light",))
        page.evaluate("document.getElementById('chat-tab').click()")
        converse(page)
        take(page, "chat")


def take(
    page: Page,
    name: str,
    widths: Iterable[int] = SIZES,
    schemes: Iterable[Literal["light", "dark"]] = SCHEMES,
) -> None:
    """Take pictures of what the page shows."""
    for width in widths:
        page.resize(width, SIZES[width])
        page.evaluate("document.getElementById('conversation').scrollTop = 1e6")
        for scheme in schemes:
            page.prefer(scheme)
            page.screenshot(IMAGES / f"{name}-{width}-{scheme}.png")


def complete(page: Page) -> None:
    """Complete a sample prompt, with the draft and then by the target alone."""
    page.evaluate("document.getElementById('completion-tab').click()")
    page.evaluate("document.querySelectorAll('#samples button')[0].click()")
    page.evaluate("document.activeElement.blur()")
    page.evaluate("document.getElementById('run').click()")  # no mouse: it would hover over something
    page.until("!document.getElementById('race').hidden", 180.0)
    page.until("document.getElementById('run').textContent === 'Complete'")
    page.until("document.getElementById('all-running').textContent === '0'")
    page.evaluate("window.scrollTo(0, 0)")


def converse(page: Page) -> None:
    """Hold a conversation of three turns."""
    for message in MESSAGES:
        page.evaluate("document.getElementById('message').focus()")
        page.write(message)
        page.press("Enter")
        page.until("document.getElementById('send').textContent === 'Stop'")
        page.until("document.getElementById('send').textContent === 'Send'", 300.0)
    page.evaluate("document.activeElement.blur()")


if __name__ == "__main__":
    main()
