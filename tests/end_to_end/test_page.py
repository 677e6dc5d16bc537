"""The page in a real browser: a prompt is typed, tokens appear, figures move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.browser import CHROMIUM, Page, chromium
from tests.end_to_end.processes import address_of, coordinator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path (Debian: apt-get install chromium)"),
]

DASH = "\N{EN DASH}"
TOKEN = "a-token-of-many-characters"


@pytest.fixture(scope="module")
def url(target_address: str, draft_address: str) -> Iterator[str]:
    with coordinator(target_address, draft_address, "--http-port", "0") as process:
        address_of(process)
        yield process.line("http on ")


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as page:
        yield page


def shown(page: Page, element: str) -> str:
    return str(page.evaluate(f"document.getElementById('{element}').textContent"))


def settle(page: Page) -> None:
    page.until("document.getElementById('run').textContent === 'Complete'", 120.0)


def test_a_prompt_is_typed_and_tokens_appear(url: str, browser: Page, tmp_path: Path) -> None:
    browser.open(url)
    browser.until("document.getElementById('state').textContent === 'ready'")
    browser.until("document.querySelectorAll('#replicas tbody tr').length === 2")
    assert shown(browser, "acceptance") == shown(browser, "speedup") == DASH
    browser.type("#prompt", "def area(width, height):\n")
    browser.type("#max-tokens", "48")
    browser.type("#count", "3")
    browser.click("#run")
    browser.until("document.querySelectorAll('#output .accepted').length > 0")
    settle(browser)
    assert shown(browser, "problem") == ""
    text = shown(browser, "output")
    assert text.startswith("def area(width, height):\n")
    assert shown(browser, "alone-output") == text, "temperature 0: the same text either way"
    assert "The two texts are the same." in shown(browser, "speedup-note")
    assert browser.evaluate("document.querySelectorAll('#output .supplied').length") > 0
    assert browser.evaluate("document.querySelectorAll('#positions tbody tr').length") == 3
    for figure in ("acceptance", "length", "first", "speedup", "rate", "alone-rate"):
        assert any(character.isdigit() for character in shown(browser, figure))
    # The page counted each round as the coordinator did.
    status = browser.evaluate("fetch('/tandem/status').then((response) => response.json())")
    rounds = browser.evaluate("document.querySelectorAll('.round').length")
    accepted = browser.evaluate("document.querySelectorAll('.round .yes').length")
    assert accepted == status["speculation"]["accepted"]
    assert rounds + 48 == status["speculation"]["rounds"], "the target alone takes a round for each token"
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.screenshot(tmp_path / f"{scheme}.png")
    assert (tmp_path / "light.png").read_bytes() != (tmp_path / "dark.png").read_bytes()
    assert browser.errors == []


def test_figures_move_while_it_runs_and_stopping_stops(url: str, browser: Page) -> None:
    browser.open(url)
    browser.type("#max-tokens", "900")
    browser.type("#temperature", "1")
    browser.evaluate("document.getElementById('compare').checked = false")
    browser.click("#run")
    browser.until("document.querySelectorAll('.round').length > 3")
    before = browser.evaluate("document.querySelectorAll('.round').length")
    browser.until(f"document.querySelectorAll('.round').length > {before}")
    assert shown(browser, "run") == "Stop"
    browser.click("#run")
    settle(browser)
    browser.until(
        "fetch('/tandem/status').then((response) => response.json()).then((status) => status.load.running === 0)"
    )
    assert shown(browser, "problem") == ""


def test_a_refusal_is_shown_in_the_coordinators_words(url: str, browser: Page) -> None:
    browser.open(url)
    browser.type("#prompt", "")
    browser.click("#run")
    browser.until("!document.getElementById('problem').hidden")
    assert shown(browser, "problem") == "the prompt is empty; it must hold at least one token"
    settle(browser)


def test_it_asks_for_a_token_where_one_is_needed(target_address: str, browser: Page) -> None:
    with coordinator(target_address, None, "--http-port", "0", "--auth-token", TOKEN) as process:
        address_of(process)
        browser.open(process.line("http on "))
        browser.until("!document.getElementById('token-option').hidden")
        browser.type("#token", TOKEN)
        browser.type("#max-tokens", "4")
        browser.click("#run")
        browser.until("document.querySelectorAll('#output .supplied').length > 0")
        settle(browser)
        assert shown(browser, "problem") == ""


def test_nothing_of_it_comes_from_elsewhere(url: str, browser: Page) -> None:
    browser.open(url)
    browser.until("document.getElementById('state').textContent === 'ready'")
    names = browser.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert names
    assert all(name.startswith(url) for name in names)
