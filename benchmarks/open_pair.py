"""Finds the pair of models that `--pair` names, or makes it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pairs import DEMO, SHAPED_FORM, Pair, PairInfo, parse_shaped
from tandem.engine.models.checkpoint import find_weights
from tandem.errors import ConfigurationError
from tandem.model_sources import hub


def open_pair(text: str, cache_folder: Path, device: str) -> Pair:
    """The pair that `--pair` names; a shaped one is made when it is not in the cache."""
    if text.startswith("shaped:"):
        asked = parse_shaped(text)
        from benchmarks.shaping import shaped_pair

        return shaped_pair(asked, text, cache_folder / asked.name, device)
    if text == "random":
        from benchmarks.shaping import random_draft

        target = DEMO / "target"
        draft = random_draft(cache_folder / "random")
    elif text == "demo":
        target = DEMO / "target"
        draft = DEMO / "draft"
    else:
        target, draft = _folders(text)
    sizes = (find_weights(each).value_count for each in (target, draft))
    return Pair(target, draft, PairInfo(text, *sizes))


def _folders(text: str) -> list[Path]:
    parts = [Path(part) for part in text.split(":")]
    if len(parts) == 2:
        folders = [hub.fetch(str(part)) if hub.is_model_id(part) else part for part in parts]
        if all((folder / "config.json").is_file() for folder in folders):
            return folders
    raise ConfigurationError(
        f"--pair is {text!r}; it must be demo, random, the folders or Hugging Face ids of a target and a draft "
        f"as TARGET:DRAFT, or {SHAPED_FORM}"
    )
