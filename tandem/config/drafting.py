"""How the draft service drafts: the method, and the options of each method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import field_validator

from tandem.config.methods import METHODS, MODEL_FREE_METHODS, MTP, NGRAM, SUFFIX, canonical_method
from tandem.config.refusals import REFUSED_METHODS
from tandem.config.revisions import RevisionOptions
from tandem.config.rule import Rule, at_least, within

LookupMatch = Literal["latest", "earliest"]


class DraftingOptions(RevisionOptions):
    """How the draft service drafts."""

    speculative_method: str | None = None
    """Drafting method: standalone, ngram, suffix, eagle, eagle3 or medusa. By default inferred from the draft
    model's name or config.json, as in vLLM. A draft that reads the target's hidden states (the last three) runs
    in the target's process. MAX's name; vLLM: method, with draft_model for standalone."""
    draft_model_path: str | None = None
    """Folder or Hugging Face id of the draft model; ngram or suffix in its place names the method. MAX's name; vLLM:
    model."""
    draft_devices: str | None = None
    """Device of the draft model: cpu, gpu, gpu:N or cuda:N. By default the draft service's device. MAX's name."""
    prompt_lookup_min: int = 5
    """Smallest n-gram to look up, in tokens; by default prompt_lookup_max when that is given. vLLM's name."""
    prompt_lookup_max: int = 5
    """Largest n-gram to look up, in tokens; by default prompt_lookup_min when that is given. vLLM's name."""
    prompt_lookup_match: LookupMatch = "latest"
    """Which of several earlier occurrences counts: the most recent, or the earliest as in vLLM. Tandem's own."""
    suffix_decoding_max_tree_depth: int = 24
    """Longest run of tokens that the suffix trees remember, prefix match and proposal together. vLLM's name."""
    suffix_decoding_max_cached_requests: int = 10000
    """Finished completions that the global suffix tree remembers, first in, first out; 0 keeps none. vLLM's name."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Maximum tokens proposed for each token of the matched prefix. vLLM's name."""
    suffix_decoding_min_token_prob: float = 0.1
    """Estimated probability that a suffix tree's token needs to be proposed. vLLM's name."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """Rules for the drafting method."""
        return (*super().rules(), *DRAFTING_RULES)

    @field_validator("speculative_method", mode="after")
    @classmethod
    def _canonical(cls, method: str | None) -> str | None:
        return None if method is None else canonical_method(method)

    def is_standalone(self) -> bool:
        """True if a draft model of its own drafts."""
        return self.speculative_method == "standalone"

    def is_ngram(self) -> bool:
        """True if prompt lookup drafts."""
        return self.speculative_method == NGRAM

    def is_suffix(self) -> bool:
        """True if suffix trees draft."""
        return self.speculative_method == SUFFIX

    def is_eagle(self) -> bool:
        """True if an EAGLE or EAGLE-3 head drafts."""
        return self.speculative_method in ("eagle", "eagle3")

    def is_mtp(self) -> bool:
        """True if the target's own prediction layers draft."""
        return self.speculative_method == MTP

    def is_model_free(self) -> bool:
        """True if the method has no model, so that penalties and any target go with it."""
        return self.speculative_method in MODEL_FREE_METHODS


def _method(options: DraftingOptions) -> Iterator[str]:
    method = options.speculative_method
    if method is None or method in METHODS:
        return
    if reason := REFUSED_METHODS.get(method):
        yield f"speculative_method is {method}, which is not available in this version: {reason}"
    else:
        yield f"speculative_method is {method}; it must be one of {', '.join(METHODS)}"


def _no_model(options: DraftingOptions) -> Iterator[str]:
    if options.is_model_free() and options.draft_model_path is not None:
        yield (
            f"draft_model_path is {options.draft_model_path} and speculative_method is {options.speculative_method}, "
            "which has no model; leave out draft_model_path, or set speculative_method to standalone"
        )


def _devices(options: DraftingOptions) -> Iterator[str]:
    devices = options.draft_devices
    if devices is None:
        return
    kind, _, index = devices.partition(":")
    if kind not in ("cpu", "gpu", "cuda") or (":" in devices and (kind == "cpu" or not index.isdigit())):
        yield f"draft_devices is {devices}; it must be one device: cpu, gpu, gpu:N or cuda:N"


def _lookup_range(options: DraftingOptions) -> Iterator[str]:
    smallest, largest = options.prompt_lookup_min, options.prompt_lookup_max
    if smallest > largest >= 1:
        yield f"prompt_lookup_min is {smallest}; it must be at most prompt_lookup_max ({largest})"


DRAFTING_RULES: tuple[Rule[DraftingOptions], ...] = (
    Rule(
        "speculative-method",
        f"`speculative_method` is one of {', '.join(METHODS)}; other methods of MAX and vLLM are refused by name.",
        _method,
        ("speculative_method",),
    ),
    Rule(
        "model-free-method",
        "`draft_model_path` is not set for a method that has no model.",
        _no_model,
        ("speculative_method", "draft_model_path"),
    ),
    Rule(
        "draft-devices",
        "`draft_devices` is one device: cpu, gpu, gpu:N or cuda:N.",
        _devices,
        ("draft_devices",),
    ),
    at_least("prompt_lookup_min", 1),
    at_least("prompt_lookup_max", 1),
    Rule(
        "prompt-lookup-range",
        "`prompt_lookup_min` is at most `prompt_lookup_max`.",
        _lookup_range,
        ("prompt_lookup_min", "prompt_lookup_max"),
    ),
    at_least("suffix_decoding_max_tree_depth", 1),
    at_least("suffix_decoding_max_cached_requests", 0),
    within("suffix_decoding_max_spec_factor", 0.0, 1e308, "a finite number of at least 0"),
    within("suffix_decoding_min_token_prob", 0.0, 1.0, "between 0 and 1"),
)
"""Rules for the drafting method."""
