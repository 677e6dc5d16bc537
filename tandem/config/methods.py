"""Drafting methods by name, and which of them a draft model's name or folder implies, as in vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.config.refusals import REFUSED_METHODS

STANDALONE, NGRAM, SUFFIX = "standalone", "ngram", "suffix"
EAGLE, EAGLE3, MEDUSA, MTP, DFLASH = "eagle", "eagle3", "medusa", "mtp", "dflash"

METHODS = (STANDALONE, NGRAM, SUFFIX, EAGLE, EAGLE3, MEDUSA, MTP, DFLASH)
"""Drafting methods of this version."""

BOUND_METHODS = (EAGLE, EAGLE3, MEDUSA, MTP, DFLASH)
"""Those of them that read the target's hidden states, and so run in the target's process."""

OWN_METHODS = (MTP,)
"""Those of them whose weights lie in the target's own checkpoint, so that no draft is named."""

MODEL_FREE_METHODS = (NGRAM, SUFFIX)
"""Those of them that have no model."""

_EAGLE_ARCHITECTURES = ("EAGLEModel", "EagleLlamaForCausalLM", "EagleLlamaModel")
"""As vLLM writes them. SafeAILab's heads of EAGLE-1 and 2 say LlamaForCausalLM, so their name has to tell."""

METHOD_ALIASES = {"draft_model": STANDALONE}
"""vLLM's word for it."""


def canonical_method(name: str) -> str:
    """A method's own name; an unknown one is returned as it is spelled."""
    spelled = name.strip().lower()
    if spelled.endswith("_mtp"):
        return MTP
    return METHOD_ALIASES.get(spelled, spelled)


def inferred_method(draft_model: str) -> str:
    """The method that a draft model implies, by its name or its config.json, as in vLLM."""
    if canonical_method(draft_model) in MODEL_FREE_METHODS:
        return canonical_method(draft_model)
    return _method_named(draft_model) or _method_in(_config(Path(draft_model))) or STANDALONE


def checkpoint_method(folder: Path) -> str:
    """The method that a folder's config.json names, or else its own name; empty where neither names one."""
    return _method_in(_config(folder)) or _method_named(str(folder))


def _method_named(draft_model: str) -> str:
    name = Path(draft_model).name.lower()
    marks = ((EAGLE3, "eagle3"), (EAGLE, "eagle-"), ("dflash", "dflash"))
    return next((method for method, mark in marks if mark in name), "")


def _method_in(config: Mapping[str, Any]) -> str:
    wrapped = config.get("speculators_model_type")
    if isinstance(wrapped, str):
        return canonical_method(wrapped)
    architectures = config.get("architectures")
    if isinstance(architectures, list) and any("eagle3" in str(name).lower() for name in architectures):
        return EAGLE3
    if isinstance(architectures, list) and any("dflash" in str(name).lower() for name in architectures):
        return DFLASH
    if isinstance(architectures, list) and any(str(name) in _EAGLE_ARCHITECTURES for name in architectures):
        return EAGLE
    if "medusa_num_heads" in config:
        return MEDUSA
    model_type = canonical_method(str(config.get("model_type", "")))
    return model_type if model_type in (*BOUND_METHODS, *REFUSED_METHODS) else ""


def _config(folder: Path) -> Mapping[str, Any]:
    """A checkpoint's config; empty when there is none: loading the folder reports it better."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
