"""Prompts of benchmark runs: beginnings of functions, source code, and questions for a model that chats."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

_HELD_OUT = Path(__file__).resolve().parents[1] / "models" / "demo" / "heldout_prompts.json"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a function, or a question for a model that chats."""

    name: str
    text: str
    token_ids: tuple[int, ...] = ()
    """The question in the model's chat format; empty where the text is to be continued."""


def held_out_prompts(count: int) -> list[Prompt]:
    """The first `count` beginnings of functions that the demo pair was not trained on."""
    entries = json.loads(_HELD_OUT.read_text(encoding="utf-8"))[:count]
    return [Prompt(entry["name"], entry["prompt"]) for entry in entries]


def source_text(length: int) -> str:
    """At least `length` characters of real source code, where the standard library has as many."""
    text = ""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) >= length:
            break
        text += file.read_text(encoding="utf-8", errors="replace")
    return text


QUESTIONS = {
    "a question": "Why is the sky blue?",
    "a corrected sentence": (
        "Correct the spelling and repeat the whole text: The quick brown fox jumpd over the lazy dog, and then the "
        "quick brown fox jumpd over the lazy cat as well, because the quick brown fox is very quick."
    ),
    "a list in capitals": "Write this list again with capital letters: apple, banana, cherry, apple, banana, date.",
    "a function": "Write a Python function that returns the sum of a list of numbers, and a test for it.",
    "three colours": "Name three colours and one thing of each colour.",
    "a summary": (
        "Summarise in one sentence: Speculative decoding lets a small model propose several tokens, which a large "
        "model verifies in one pass. The text is the large model's own, but it is written faster."
    ),
    "a haiku": "Write a haiku about the sea.",
    "the capital of France": "What is the capital of France?",
}
"""By name. Some answers repeat the question's text, which drafting without a model foresees, and some do not."""
