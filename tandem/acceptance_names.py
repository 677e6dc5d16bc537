"""Names of the acceptance rules in MAX and vLLM. `coordinator.rejection` holds the rules themselves."""

from __future__ import annotations

NAMES = ("greedy", "residual", "block", "strict", "typical-acceptance", "logit-comparison", "synthetic")
"""The rules."""

ALIASES = {"probabilistic": "residual", "standard": "residual", "typical": "typical-acceptance"}
"""Other words for some of them; the first two are vLLM's."""

AUTO = "auto"
"""Picks the rule of `AUTO_NAMES` with the most tokens per second. Tandem's own."""

AUTO_NAMES = ("block", "strict", "residual")
"""All of them lossless; the first are tried first."""

SPELLINGS = (*NAMES, *ALIASES, AUTO)
"""All that can be written."""


def canonical_name(name: str) -> str:
    """A rule's own name. Capitals and underscores do not matter; an unknown name is returned as it is spelled."""
    spelled = name.strip().lower().replace("_", "-")
    return ALIASES.get(spelled, spelled)


def default_name(speculative_method: str | None) -> str:
    """The rule of a drafting method when none is named, as in MAX."""
    return "typical-acceptance" if speculative_method in ("eagle", "eagle3", "mtp") else "residual"
