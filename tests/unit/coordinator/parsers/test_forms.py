"""The table of forms: names, templates, and what the reader relies on."""

from __future__ import annotations

import re
from itertools import permutations

import pytest

from tandem_coordinator.parsers.forms import (
    CALL_FORMS,
    CALL_PARSERS,
    DEMANDED,
    REASONING_FORMS,
    REASONING_PARSERS,
    CallForm,
    NamedCalls,
    ReasoningForm,
    TaggedCalls,
    call_form,
    known_name,
    reasoning_form,
)
from tests.paths import ROOT

BEGIN = "<｜tool▁call▁begin｜>"
SEP = "<｜tool▁sep｜>"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("<|channel|>final<|message|>", "openai"),
        ("<tool_call>\\n<function=example>", "qwen3_coder"),
        ("<tool_call>{function-name}\\n<arg_key>", "glm45"),
        (f"'{BEGIN}' + type + '{SEP}' + name + '\\n```json'", "deepseek_v3"),
        (f"'{BEGIN}' + name + '{SEP}' + arguments", "deepseek_v31"),
        ("respond with <|tool_call|> followed by a JSON list", "granite"),
        ("'<|tool|>' + tools + '<|/tool|>'", "phi4_mini_json"),
        ("[func_name1(params_name1=params_value1...)]", "pythonic"),
        ("plain", "hermes"),
    ],
)
def test_a_template_tells_its_form(template: str, form: str) -> None:
    assert call_form("auto", template) is CALL_PARSERS[form]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("content.split('</think>')[-1]", "qwen3"),
        ("[THINK]thoughts[/THINK]", "mistral"),
        ("Write it like this: Here is my thought process: ...", "granite"),
        ("<|channel|>analysis", "openai_gptoss"),
        ("plain", None),
    ],
)
def test_a_template_tells_its_form_of_reasoning(template: str, form: str | None) -> None:
    assert reasoning_form("auto", template) is (None if form is None else REASONING_PARSERS[form])


def test_a_name_is_stronger_than_the_template() -> None:
    assert call_form("mistral", "<tool_call>") is CALL_PARSERS["mistral"]
    assert call_form("none", "<tool_call>") is None
    assert reasoning_form("deepseek_r1", "[THINK]") is REASONING_PARSERS["deepseek_r1"]
    assert reasoning_form("none", "</think>") is None


@pytest.mark.parametrize(
    ("given", "hint"),
    [("Qwen3-Coder", "; did you mean qwen3_coder?"), ("hermess", "; did you mean hermes?"), ("zzz", "")],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(given: str, hint: str) -> None:
    with pytest.raises(ValueError, match="it must be one of auto, none, openai") as refused:
        known_name(CALL_PARSERS)(given)
    assert str(refused.value).endswith(hint or "llama4_json")


@pytest.mark.parametrize("form", [DEMANDED, *CALL_FORMS])
def test_marks_of_calls_are_found_a_character_at_a_time(form: CallForm) -> None:
    """A mark that was begun and left hides no other: its first character is nowhere else in it, and of marks that are
    looked for together none begins another."""
    start = form.syntax.start if isinstance(form.syntax, NamedCalls | TaggedCalls) else ""
    starts = tuple(filter(None, (*form.begins, start)))
    assert_never_hidden(starts)
    assert not [pair for pair in permutations((*starts, *form.ends), 2) if pair[1].startswith(pair[0])]


@pytest.mark.parametrize("form", REASONING_FORMS)
def test_marks_of_reasoning_are_found_a_character_at_a_time(form: ReasoningForm) -> None:
    assert len(form.starts) == len(form.ends)
    assert_never_hidden(form.starts)
    assert_never_hidden(form.ends)


def assert_never_hidden(marks: tuple[str, ...]) -> None:
    assert not [mark for mark in marks if mark[0] in mark[1:]]
    assert not [pair for pair in permutations(marks, 2) if pair[1].startswith(pair[0])]


@pytest.mark.parametrize(
    ("form", "prompt", "has_begun"),
    [
        ("qwen3", "assistant\n<think>\n", True),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", None),
        ("qwen3", "What does <think> mean?\nassistant\n", False),
        ("deepseek_r1", "assistant\n", True),
        ("deepseek_r1", "assistant</think>", None),
        ("openai_gptoss", "<|start|>assistant", False),
    ],
)
def test_a_prompt_tells_where_reasoning_begins(form: str, prompt: str, has_begun: bool | None) -> None:
    assert REASONING_PARSERS[form].is_begun_by(prompt) is has_begun


@pytest.mark.parametrize(
    ("form", "text", "has_begun"),
    [
        ("qwen3", "<think>Hm", True),
        ("qwen3", "<think>Hm</think>So", None),
        ("qwen3", "So", None),
        ("qwen3", "", False),
        ("deepseek_r1", "", True),
        ("openai_gptoss", "So", None),
    ],
)
def test_a_continued_text_tells_where_reasoning_begins(form: str, text: str, has_begun: bool | None) -> None:
    assert REASONING_PARSERS[form].is_continued_by(text) is has_begun


def test_the_documentation_lists_all_names() -> None:
    page = (ROOT / "docs" / "tool-calls.md").read_text(encoding="utf-8")
    for option, known in (("tool-call", CALL_PARSERS), ("reasoning", REASONING_PARSERS)):
        (_, table) = page.split(f"| `--{option}-parser` |")
        rows = [row.split(" | ")[0] for row in table.split("\n\n")[0].splitlines()[2:]]
        assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(known)
