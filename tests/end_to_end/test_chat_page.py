"""The chat of the page in a real browser, over a real cluster and over scripted answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.end_to_end.browser import CHROMIUM, Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path (Debian: apt-get install chromium)"),
]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
)
SETTLED = "document.getElementById('send').textContent === 'Send'"
PHONE = 360


@pytest.fixture
def page(browser: Page, url: str) -> Page:
    """The page with an empty chat, and requests noted in `asked`."""
    browser.resize(1280, 1000)
    browser.open(url)
    browser.until("document.getElementById('state').textContent === 'ready'")
    browser.until("document.body.dataset.tab === 'chat'")
    browser.evaluate(
        "(window.asked = [], window.sent = window.fetch, window.fetch = (path, options) => {"
        " if (options?.body) window.asked.push(JSON.parse(options.body));"
        " return window.sent(path, options); }, 0)"
    )
    browser.evaluate("document.getElementById('message').focus()")
    browser.errors.clear()
    return browser


Piece = tuple[str, bool]
"""A token of a scripted answer, and whether the draft proposed it."""


def script(page: Page, pieces: Sequence[Piece]) -> None:
    """Let the coordinator's next answers be this one."""
    events: list[dict[str, Any]] = [
        {
            "choices": [
                {
                    "delta": {"content": text},
                    "token_ids": [1],
                    "drafted": [is_drafted],
                    "text_lengths": [len(text)],
                    "proposed": [1],
                    "drafted_ahead": [False],
                }
            ]
        }
        for text, is_drafted in pieces
    ]
    events.append({"choices": [], "speculation": {"state": {"is_on": True}}})
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.evaluate(
        "(window.sent = ((real) => (path, options) => path === '/v1/chat/completions'"
        f" ? Promise.resolve(new Response({json.dumps(lines)})) : real(path, options))(window.sent), 0)"
    )


def send(page: Page, text: str) -> None:
    """Send a message by the keyboard, and wait for the answer's end."""
    before = page.evaluate("document.querySelectorAll('.turn.assistant').length")
    page.write(text)
    page.press("Enter")
    page.until(f"document.querySelectorAll('.turn.assistant').length === {before + 1}")
    page.until(SETTLED, 120.0)


def choose(page: Page, **settings: object) -> None:
    """Fill in the drawer's fields, and close it by the keyboard."""
    page.click("#settings")
    for name, value in settings.items():
        page.type(f"#{name.replace('_', '-')}", str(value))
    page.press("Escape")


def shown_turns(page: Page) -> list[str]:
    return list(page.evaluate("[...document.querySelectorAll('.turn .body')].map((body) => body.innerText)"))


def asked(page: Page) -> list[dict[str, Any]]:
    return list(page.evaluate("window.asked"))


def test_a_conversation_is_held_by_the_keyboard(page: Page) -> None:
    choose(page, system="Be brief.", chat_max_tokens=24, chat_temperature=0, chat_seed=7, chat_count=3)
    assert page.evaluate("document.getElementById('drawer').hidden")
    assert page.evaluate("document.activeElement.id") == "settings", "the focus returns"
    page.evaluate("document.getElementById('message').focus()")
    page.write("def one():")
    page.press("Enter", shift=True)
    assert page.evaluate("document.getElementById('message').value.split('\\n').length") == 2
    assert not asked(page), "Shift-Enter breaks the line"
    send(page, "    pass")
    send(page, "def two():")
    send(page, "def three():")
    assert page.evaluate("document.getElementById('message').value") == ""
    assert page.evaluate("document.activeElement.id") == "message"
    turns = shown_turns(page)
    assert [turns[0], turns[2], turns[4]] == ["def one():\n    pass", "def two():", "def three():"]
    requests = asked(page)
    assert [len(request["messages"]) for request in requests] == [2, 4, 6]
    assert requests[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    roles = [message["role"] for message in requests[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    wanted = {"max_tokens": 24, "temperature": 0, "seed": 7, "num_speculative_tokens": 3}
    assert all(request.items() >= wanted.items() for request in requests)
    assert "top_p" not in requests[0], "what is left empty is the coordinator's to choose"
    figures = page.evaluate("[...document.querySelectorAll('.figures')].map((each) => each.innerText)")
    assert len(figures) == 3
    assert all(word in each for each in figures for word in ("tokens/s", "first token ", "24 tokens", "%"))
    assert "Speed-up" not in page.text()
    assert page.errors == []


def test_the_newest_text_stays_in_view_unless_one_looks_back(page: Page) -> None:
    choose(page, chat_max_tokens=16)
    page.resize(1280, 420)
    page.evaluate("document.getElementById('message').focus()")
    view = "document.getElementById('conversation')"
    at_end = f"{view}.scrollHeight - {view}.scrollTop - {view}.clientHeight < 2"
    for number in range(3):
        send(page, f"def number_{number}():")
        page.until(at_end)
    choose(page, chat_max_tokens=900)
    page.evaluate("document.getElementById('message').focus()")
    page.write("import os")
    page.press("Enter")
    length = "document.querySelector('.turn.assistant:last-child').innerText.length"
    page.until(f"{length} > 200", 120.0)
    page.until(at_end)
    page.evaluate("document.getElementById('conversation').scrollTop = 0")
    page.until("!document.getElementById('newest').hidden")
    before = page.evaluate(length)
    page.until(f"{length} > {before} || {SETTLED}")
    assert page.evaluate("document.getElementById('conversation').scrollTop") == 0
    page.click("#newest")
    page.until(at_end)
    page.evaluate("document.getElementById('message').focus()")
    page.press("Escape")
    page.until(SETTLED)


def test_an_answer_is_stopped_made_again_and_its_question_edited(page: Page) -> None:
    choose(page, chat_max_tokens=900, chat_temperature=1)
    page.evaluate("document.getElementById('message').focus()")
    page.write("import os")
    page.press("Enter")
    page.until("document.querySelector('.turn.assistant .text').innerText.length > 20", 60.0)
    assert page.evaluate("document.querySelector('.turn.assistant').getAttribute('aria-busy')") == "true"
    page.click("#send")
    page.until(SETTLED)
    page.until("document.querySelector('.figures').innerText.includes('stopped')")
    page.until(
        "fetch('/tandem/status').then((response) => response.json()).then((status) => status.load.running === 0)"
    )
    choose(page, chat_max_tokens=4)
    page.evaluate("document.querySelector('[aria-label=\"Answer again\"]').click()")
    page.until(f"document.querySelector('.figures')?.innerText.includes('4 tokens') && {SETTLED}", 60.0)
    send(page, "second")
    page.evaluate("document.querySelector('[aria-label=\"Edit this message\"]').click()")
    assert page.evaluate("document.activeElement.value") == "import os"
    page.press("Escape")
    assert shown_turns(page)[0] == "import os"
    page.evaluate("document.querySelector('[aria-label=\"Edit this message\"]').click()")
    page.evaluate("document.activeElement.select()")
    page.write("import sys")
    page.press("Enter")
    page.until(f"document.querySelectorAll('.turn').length === 2 && {SETTLED}", 60.0)
    assert shown_turns(page)[0] == "import sys"
    assert [message["content"] for message in asked(page)[-1]["messages"]] == ["import sys"], (
        "what followed is gone"
    )
    page.click("#new-chat")
    assert shown_turns(page) == []
    assert not page.evaluate("document.getElementById('welcome').hidden")
    assert page.errors == []


def test_a_failed_answer_says_why_and_is_left_out_of_what_follows(page: Page) -> None:
    choose(page, chat_max_tokens=99999)
    page.evaluate("document.getElementById('message').focus()")
    send(page, "too long")
    assert "max_tokens" in page.evaluate("document.querySelector('.turn [role=alert]').innerText")
    choose(page, chat_max_tokens=2)
    page.evaluate("document.getElementById('message').focus()")
    send(page, "short")
    assert [message["content"] for message in asked(page)[-1]["messages"]] == ["short"]


HOSTILE = """Before <script>window.hit = 1</script>
<img src=x onerror="window.hit = 2"> <svg onload="window.hit = 3">
<iframe srcdoc="<script>parent.hit = 4</script>"></iframe>

<style>body { display: none }</style><form action="/x"><input name=a></form>

[link](javascript:window.hit=5) [data](data:text/html,<script>window.hit=6</script>) [vb](VBScript:x)
![picture](https://evil.example/?secret) <a href="javascript:window.hit=7" onclick="window.hit=8">raw</a>

```html"onmouseover="window.hit=9
<script>window.hit = 10</script>
```

<math><mtext><table><mglyph><style><img src=x onerror="window.hit=11"></style></mglyph></table></mtext></math>
After."""


def test_nothing_in_an_answer_runs(page: Page) -> None:
    for size in (len(HOSTILE), 7):  # whole, and in pieces, each of which is rendered
        script(page, [(HOSTILE[start : start + size], True) for start in range(0, len(HOSTILE), size)])
        send(page, "hello")
    page.evaluate("document.querySelectorAll('.turn a, .turn code').forEach((each) => each.click())")
    page.evaluate("new Promise((resolve) => setTimeout(resolve, 300))")
    assert page.evaluate("window.hit === undefined")
    kinds = "script, img, svg, iframe, style, form.x, input, math, object, embed, link, base"
    assert page.evaluate(f"document.querySelectorAll('.turn .text :is({kinds})').length") == 0
    attributes = page.evaluate(
        "[...document.querySelectorAll('.turn .text *')].flatMap((each) => [...each.attributes])"
        ".map((attribute) => [attribute.name, attribute.value])"
    )
    assert not [
        name
        for name, _ in attributes
        if name.startswith("on") or name in ("style", "src", "srcdoc", "action")
    ]
    assert all(value.startswith("https:") for name, value in attributes if name == "href")
    text = shown_turns(page)[1]
    assert "<script>window.hit = 1</script>" in text, "tags are shown as they were written"
    assert "After." in text
    assert page.errors == [], "nothing was even tried that the browser had to forbid"


MARKDOWN = (
    "## Steps\n\nUse **two** of [these](https://a.example/long/path), a < b & c:\n\n1. one\n2. `two`\n\n"
    "```python\nx = 1\n```\n"
)
CONTROLS = "[...document.querySelectorAll('button, input, textarea, select')].filter((each) => each.checkVisibility())"


def test_markdown_is_shown_and_the_drafts_tokens_are_coloured(page: Page) -> None:
    words = [("## Steps\n\n", True), ("Use **", False), ("two", True), ("** of [", False), ("these", True),
             ("](https://a.example/long/path), ", False), ("a < b & c", True), (":\n\n1. one\n2. `", False),
             ("two", True), ("`\n\n```python\nx ", False), ("= 1", True), ("\n```\n", False)]  # fmt: skip
    assert "".join(text for text, _ in words) == MARKDOWN
    script(page, words)
    send(page, "how?")
    assert page.evaluate("document.querySelector('.text h2').innerText") == "Steps"
    assert page.evaluate("document.querySelector('.text strong').innerText") == "two"
    assert page.evaluate("document.querySelectorAll('.text ol li').length") == 2
    assert page.evaluate("document.querySelector('.text a').rel") == "noopener noreferrer nofollow"
    assert page.evaluate("document.querySelector('.text pre code').innerText.trim()") == "x = 1"
    assert "python" in page.evaluate("document.querySelector('.bar-of-code').innerText")
    coloured = "[...(CSS.highlights.get('accepted') ?? [])].map(String)"
    assert page.evaluate(coloured) == ["Steps", "two", "these", "a < b & c", "two", "= 1"]
    page.click("#colours")
    assert page.evaluate(coloured) == []
    page.click("#colours")
    assert len(page.evaluate(coloured)) == 6
    page.click("#new-chat")
    assert page.evaluate(coloured) == []


def test_reasoning_is_folded_away(page: Page) -> None:
    script(
        page,
        [("<think>\n", False), ("Hm.", True), ("\n</think>\n\n", False), ("Yes, ", True), ("so.", False)],
    )
    send(page, "really?")
    assert page.evaluate("document.querySelector('.thought p').textContent") == "Hm."
    assert not page.evaluate("document.querySelector('.thought').open")
    assert page.evaluate("document.querySelector('.turn.assistant .text').innerText.trim()") == "Yes, so."
    assert page.evaluate("[...CSS.highlights.get('accepted')].map(String)") == ["Yes,"]


def test_on_a_phone_nothing_is_cut_off_and_everything_has_a_name(page: Page) -> None:
    page.resize(PHONE, 740)
    script(page, [(MARKDOWN + "word" * 200, False)])
    send(page, "a" * 200)
    for opened in (False, True):
        if opened:
            page.click("#settings")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
        assert page.evaluate("document.documentElement.scrollHeight") <= 740, "only the conversation scrolls"
        outside = page.evaluate(
            f"{CONTROLS}.filter((each) => each.getBoundingClientRect().right > {PHONE}).map((each) => each.outerHTML)"
        )
        assert outside == []
        is_named = "each.ariaLabel || each.labels?.[0]?.textContent.trim() || each.textContent.trim()"
        nameless = page.evaluate(f"{CONTROLS}.filter((each) => !({is_named})).map((each) => each.outerHTML)")
        assert nameless == []
    page.press("Escape")
    page.evaluate("document.getElementById('chat-tab').focus()")
    page.press("ArrowRight")
    assert page.evaluate("document.body.dataset.tab") == "completion"
    assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE


def test_the_drawers_code_asks_the_same(page: Page) -> None:
    choose(page, chat_max_tokens=8, chat_temperature=0, chat_top_k=5)
    page.evaluate("document.getElementById('message').focus()")
    page.write("def area():")
    page.click("#settings")
    page.click("#chat-code summary")
    page.until("document.getElementById('chat-python').textContent.includes('def area():')")
    curl = str(page.evaluate("document.getElementById('chat-curl').textContent"))
    assert '"messages":[{"role":"user","content":"def area():"}]' in curl
    assert '"top_k": 5' in page.evaluate("document.getElementById('chat-python').textContent")


def test_without_a_chat_template_there_are_completions_alone(page: Page) -> None:
    page.evaluate(
        "(window.sent = ((real) => async (path, options) => { const response = await real(path, options);"
        " if (path !== '/tandem/status') return response;"
        " return new Response(JSON.stringify({ ...await response.json(), chat: false })); })(window.sent), 0)"
    )
    page.until("document.getElementById('chat-tab').disabled")
    assert page.evaluate("document.body.dataset.tab") == "completion"
