"""Drafting methods by name, and which of them a draft model's name or folder implies, as in vLLM."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.config.refusals import REFUSED_METHODS

STANDALONE, NGRAM, SUFFIX = "standalone", "ngram", "suffix"

METHODS = (STANDALONE, NGRAM, SUFFIX)
"""Drafting methods of this version."""

MODEL_FREE_METHODS = (NGRAM, SUFFIX)
"""Those of them that have no model."""

METHOD_ALIASES = {"draft_model": STANDALONE}
"""vLLM's word for it."""


def canonical_method(name: str) -> str:
    """A method's own name; an unknown one is returned as it is spelled."""
    spelled = name.strip().lower()
    if spelled.endswith("_mtp"):
        return "mtp"
    return METHOD_ALIASES.get(spelled, spelled)


def inferred_method(draft_model: str) -> str:
    """The method that a draft model implies, by its name or its config.json, as in vLLM."""
    if canonical_method(draft_model) in MODEL_FREE_METHODS:
        return canonical_method(draft_model)
    name = Path(draft_model).name.lower()
    for method, mark in (("eagle3", "eagle3"), ("eagle", "eagle-"), ("dflash", "dflash")):
        if mark in name:
            return method
    model_type = canonical_method(_model_type(Path(draft_model)))
    return model_type if model_type in REFUSED_METHODS else STANDALONE


def _model_type(folder: Path) -> str:
    """The `model_type` of a checkpoint; empty when there is none: loading the folder reports it better."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""
