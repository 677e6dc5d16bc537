"""Real prompts: beginnings of functions that the demo pair was not trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).resolve().parents[2] / "models" / "demo" / "heldout_prompts.json"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a function, or a question in a model's chat format."""

    name: str
    text: str
    is_chat: bool = False
    """True if the answer ends where the model ends it: a chat model has nothing to say after its end-of-turn token."""


def held_out_prompts(count: int) -> list[Prompt]:
    """The first `count` held-out prompts."""
    return [
        Prompt(entry["name"], entry["prompt"])
        for entry in json.loads(_FILE.read_text(encoding="utf-8"))[:count]
    ]
