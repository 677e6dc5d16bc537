"""The page in a real browser: a prompt is typed, tokens appear, numbers change."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.end_to_end.browser import CHROMIUM, Page
from tests.end_to_end.processes import AHEAD, address_of, coordinator, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path (Debian: apt-get install chromium)"),
]

DASH = "\N{EN DASH}"
TOKEN = "a-token-of-many-characters"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
"""It names no roles, so the page begins with completions."""
HINT = "Tick \u201cthen the target alone\u201d to measure the speed-up: the same prompt, one run each."


def shown(page: Page, element: str) -> str:
    return str(page.evaluate(f"document.getElementById('{element}').textContent"))


def visit(page: Page, url: str) -> None:
    """Open the page and wait for its status, which shows more lines: a click while they come would miss its button."""
    page.open(url)
    page.until("document.getElementById('state').textContent === 'ready'")


def begin(page: Page, *, compare: bool = False, **fields: object) -> None:
    """Fill in these fields and press the button; without a run of the target alone unless it is wanted."""
    for name, value in fields.items():
        page.type(f"#{name.replace('_', '-')}", str(value))
    page.evaluate(f"document.getElementById('compare').checked = {json.dumps(compare)}")
    page.click("#run")


def settle(page: Page) -> None:
    page.until("document.getElementById('run').textContent === 'Complete'", 120.0)


def test_a_prompt_is_typed_and_tokens_appear(url: str, browser: Page, tmp_path: Path) -> None:
    visit(browser, url)
    browser.until("document.querySelectorAll('#replicas tbody tr').length === 2")
    assert shown(browser, "acceptance") == shown(browser, "speedup") == DASH
    begin(browser, compare=True, prompt="def area(width, height):\n", max_tokens=48, count=3)
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
    # The page counts rounds as the coordinator does.
    status = browser.evaluate("fetch('/tandem/status').then((response) => response.json())")
    rounds = browser.evaluate("document.querySelectorAll('.round').length")
    accepted = browser.evaluate("document.querySelectorAll('.round .yes').length")
    assert accepted == status["speculation"]["accepted"]
    assert rounds + 48 == status["speculation"]["rounds"], "the target alone takes a round for each token"
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.screenshot(tmp_path / f"{scheme}.png")
    assert (tmp_path / "light.png").read_bytes() != (tmp_path / "dark.png").read_bytes()
    loaded = browser.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded
    assert all(name.startswith(url) for name in loaded), "nothing comes from other hosts"
    assert browser.errors == []


def test_rounds_that_were_drafted_ahead_are_marked(paced_pair: tuple[str, str], browser: Page) -> None:
    with coordinator(*paced_pair, *AHEAD, "--http-port", "0") as process:
        address_of(process)
        visit(browser, process.line("http on "))
        begin(browser, prompt="def area(width, height):\n", max_tokens=64)
        browser.until("document.querySelectorAll('.round.ahead').length > 0")
        settle(browser)
        status = browser.evaluate("fetch('/tandem/status').then((response) => response.json())")
        rounds = browser.evaluate("document.querySelectorAll('.round').length")
        marked = browser.evaluate("document.querySelectorAll('.round.ahead').length")
        assert 0 < marked < rounds, "the first round has no proposal"
        assert marked == status["speculation"]["ahead"]["hits"]
        assert rounds == status["speculation"]["rounds"]
        assert shown(browser, "ahead") == f"drafted ahead: {marked} of {rounds}"
        said = browser.evaluate("document.getElementById('rounds').getAttribute('aria-label')")
        assert said.startswith(f"{rounds} rounds, {marked} of them drafted ahead, ")
        colour = "getComputedStyle(document.querySelector('%s')).borderBottomColor"
        assert browser.evaluate(colour % ".round.ahead") != browser.evaluate(colour % ".round:not(.ahead)")
        assert browser.errors == []


def test_numbers_update_during_a_completion_and_stop_ends_it(url: str, browser: Page) -> None:
    visit(browser, url)
    begin(browser, max_tokens=900, temperature=1)
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


def test_a_refused_request_clears_the_previous_completion(url: str, browser: Page) -> None:
    visit(browser, url)
    begin(browser, compare=True, max_tokens=8)
    browser.until("document.getElementById('speedup').textContent !== '\u2013'")
    settle(browser)
    begin(browser, compare=True, prompt="")
    browser.until("!document.getElementById('problem').hidden")
    assert shown(browser, "problem") == "the prompt is empty; it must hold at least one token"
    settle(browser)
    for element in ("output", "alone-output", "rounds", "rate", "alone-rate", "said"):
        assert shown(browser, element) == "", element
    for element in ("acceptance", "length", "first", "speedup"):
        assert shown(browser, element) == DASH, element
    assert shown(browser, "speedup-note") == HINT


def test_a_tokens_hover_has_the_probabilities_that_decided_it(url: str, browser: Page) -> None:
    visit(browser, url)
    browser.evaluate("document.getElementById('rule').value = 'residual'")
    begin(browser, compare=True, temperature=0.8, count=3, max_tokens=48)
    browser.until("!document.getElementById('race').hidden", 60.0)
    settle(browser)
    titles = "[...document.querySelectorAll('#output .%s')].map((token) => token.title)"
    accepted = browser.evaluate(titles % "accepted")
    own = browser.evaluate(titles % "supplied")
    said = "proposed by the draft and accepted \u00b7 draft "
    assert accepted
    assert all(title.startswith(said) and " target " in title for title in accepted)
    assert all(title.startswith("the target's own") for title in own)
    assert any("target " in title.removeprefix("the target's own") for title in own)


def test_a_race_shows_both_side_by_side_once_more(url: str, browser: Page) -> None:
    visit(browser, url)
    assert browser.evaluate("document.getElementById('race').hidden")
    begin(browser, compare=True, max_tokens=24)
    browser.until("!document.getElementById('race').hidden", 60.0)
    settle(browser)
    texts = {element: shown(browser, element) for element in ("output", "alone-output")}
    prompt = str(browser.evaluate("document.getElementById('prompt').value"))
    begun = browser.evaluate(
        "(document.getElementById('race').click(),"
        " ['output', 'alone-output'].map((name) => document.getElementById(name).textContent))"
    )
    assert all(
        text.startswith(part) and part != text for part, text in zip(begun, texts.values(), strict=True)
    )
    for element, text in texts.items():
        browser.until(f"document.getElementById('{element}').textContent.length === {len(text)}", 60.0)
        assert shown(browser, element) == text
        assert text.startswith(prompt)
    place = "document.getElementById('%s').getBoundingClientRect().%s"
    assert browser.evaluate(place % ("output", "right")) <= browser.evaluate(place % ("alone-output", "left"))
    assert browser.evaluate(place % ("output", "top")) == browser.evaluate(place % ("alone-output", "top"))


def test_a_sample_prompt_works(url: str, browser: Page) -> None:
    visit(browser, url)
    browser.evaluate("document.querySelectorAll('#samples button')[1].click()")
    assert browser.evaluate("document.getElementById('prompt').value") == "class Stack:\n"
    begin(browser, max_tokens=4)
    browser.until("document.getElementById('output').textContent.length > 14")
    settle(browser)
    assert shown(browser, "output").startswith("class Stack:\n")


def test_the_displayed_code_does_the_same_as_the_page(url: str, browser: Page) -> None:
    visit(browser, url)
    browser.type("#prompt", "print('it\\'s')\n# $HOME \"two\"\n")
    browser.type("#max-tokens", "8")
    browser.type("#count", "3")
    browser.evaluate("document.getElementById('compare').checked = false")
    browser.click("#code summary")
    browser.until("document.getElementById('python').textContent.includes('model=\"')")
    curl = shown(browser, "curl")
    python = shown(browser, "python")
    browser.click("#run")
    browser.until("document.getElementById('rate').textContent !== ''")
    settle(browser)
    prompt = str(browser.evaluate("document.getElementById('prompt').value"))
    expected = shown(browser, "output").removeprefix(prompt)
    assert json.loads(run("bash", "-c", curl).stdout)["choices"][0]["text"] == expected
    assert run(sys.executable, "-c", python).stdout == expected + "\n"
    browser.evaluate("document.getElementById('rule').value = 'strict'")
    browser.type("#seed", "7")
    browser.type("#top-p", "0.9")
    code = shown(browser, "python")
    assert all(word in code for word in ("seed=7", "top_p=0.9", '"rejection_sampling_strategy": "strict"'))


def test_on_a_phone_the_numbers_are_above_the_text_and_nothing_is_cut_off(url: str, browser: Page) -> None:
    visit(browser, url)
    top = "document.getElementById('%s').getBoundingClientRect().top"
    try:
        browser.resize(390, 844)
        assert browser.evaluate(top % "acceptance") < browser.evaluate(top % "output")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    finally:
        browser.resize(1280, 1000)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 1280


def test_the_page_shows_the_state_of_speculation(target_address: str, url: str, browser: Page) -> None:
    visit(browser, url)
    browser.until("document.getElementById('speculation').textContent.startsWith('Speculation is on: ')")
    with coordinator(target_address, None, "--http-port", "0") as process:
        address_of(process)
        browser.open(process.line("http on "))
        browser.until("document.getElementById('speculation').dataset.state === 'off'")
        assert shown(browser, "speculation").startswith("Speculation is off: the coordinator has no draft")
        # Two runs of the same differ by chance, and nothing was gained or lost.
        begin(browser, compare=True, max_tokens=8)
        browser.until("document.getElementById('speedup-note').textContent.startsWith('Measured')", 60.0)
        settle(browser)
        assert (shown(browser, "speedup-name"), shown(browser, "speedup")) == ("Speed-up", DASH)
        assert "times as fast" not in shown(browser, "said")


def test_the_page_asks_for_a_required_token(target_address: str, browser: Page) -> None:
    with coordinator(target_address, None, "--http-port", "0", "--auth-token", TOKEN) as process:
        address_of(process)
        browser.open(process.line("http on "))
        browser.until("!document.getElementById('token-option').hidden")
        browser.type("#token", TOKEN)
        # The token opens the status, as in `visit`.
        browser.until("document.getElementById('state').textContent === 'ready'")
        browser.until("document.querySelectorAll('#replicas tbody tr').length === 1")
        begin(browser, compare=True, max_tokens=4)
        browser.until("document.querySelectorAll('#output .supplied').length > 0")
        settle(browser)
        assert shown(browser, "problem") == ""
