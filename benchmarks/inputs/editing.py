"""Prompts that ask to repeat a function with one change: where drafting from the prompt should pay."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from benchmarks.inputs.prompts import Prompt

_HELD_OUT = Path(__file__).resolve().parents[2] / "models" / "demo" / "heldout_prompts.json"

# In characters. The demo pair reads 1024 tokens, and the function stands there twice.
_SHORTEST, _LONGEST = 300, 900


def editing_prompts(count: int) -> list[Prompt]:
    """The first `count` functions of suitable length in the held-out files, each to be repeated under another name."""
    return list(islice(map(_prompt, _functions()), count))


def source_text(length: int) -> str:
    """At least `length` characters of real source code, where the standard library has as many."""
    text = ""
    for file in sorted(_library().glob("*.py")):
        if len(text) >= length:
            break
        text += file.read_text(encoding="utf-8", errors="replace")
    return text


def _prompt(function: tuple[str, str]) -> Prompt:
    name, source = function
    return Prompt(name, f"{source}\n\n\n# The same function under the name {name}_again:\ndef {name}_again(")


def _functions() -> Iterator[tuple[str, str]]:
    """Name and source of functions that neither model was trained on, from this Python's own library."""
    for file in _held_out_files():
        path = _library() / file
        if not path.exists():  # another version of Python
            continue
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                text = ast.get_source_segment(source, node) or ""
                if _SHORTEST <= len(text) <= _LONGEST:
                    yield node.name, text


def _held_out_files() -> list[str]:
    entries = json.loads(_HELD_OUT.read_text(encoding="utf-8"))
    return list(dict.fromkeys(entry["source_file"] for entry in entries))


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])
