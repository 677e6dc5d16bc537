"""Outputs of commands, kept as files beside this one. UPDATE_SNAPSHOTS=1 writes them anew; look at the difference."""

from __future__ import annotations

import os
from difflib import unified_diff
from pathlib import Path

FOLDER = Path(__file__).parent


def assert_matches(name: str, text: str) -> None:
    """Fail when the text is not what the file of that name holds."""
    path = FOLDER / name
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    assert path.is_file(), f"{name} is not there; UPDATE_SNAPSHOTS=1 writes it"
    kept = path.read_text(encoding="utf-8")
    difference = "\n".join(unified_diff(kept.splitlines(), text.splitlines(), "kept", "now", lineterm=""))
    assert text == kept, f"{name} is another; if that is meant, UPDATE_SNAPSHOTS=1 writes it\n{difference}"
