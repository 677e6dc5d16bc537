"""Which revision of a model on a hub is meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from tandem.config.names import (
    AUTO,
    METHODS,
    MODEL_FREE_METHODS,
    MTP,
    NAMES,
    NGRAM,
    REFUSED_METHODS,
    SPELLINGS,
    SUFFIX,
    canonical_method,
    canonical_name,
)
from tandem.config.options import Options
from tandem.config.rule import Rule, always, at_least, within


class RevisionOptions(Options):
    """Which revision of a model on a hub is meant."""

    revision: str | None = None
    """Branch, tag or commit, when the model is named by a Hugging Face id. By default the hub's main branch. vLLM's
    name."""
    code_revision: str | None = None
    """Revision of the code that comes with a model. It has no effect, since Tandem never runs such code. vLLM's
    name."""


class SourceOptions(Options):
    """Further sources of options."""

    config_file: Path | None = None
    """TOML, YAML or JSON file with options; other sources are stronger. MAX's name."""
    section_name: str | None = None
    """Section of config_file that holds the options; by default the whole file. MAX's name."""
    speculative_config: str | None = None
    """Options as one JSON object; a separate option is stronger. vLLM's form."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """Rules for the sources of options."""
        return (*super().rules(), *SOURCE_RULES)


def _section(options: SourceOptions) -> Iterator[str]:
    if options.section_name is not None and options.config_file is None:
        yield f"section_name is {options.section_name}; it needs config_file, the file that has the section"


SOURCE_RULES: tuple[Rule[SourceOptions], ...] = (
    Rule(
        "section-name", "`section_name` goes with `config_file`.", _section, ("section_name", "config_file")
    ),
)
"""Rules for the sources of options."""


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


MAX_CONFIGURED_TOKENS = 128
"""Maximum tokens per proposal in the configuration. The limit on the size of services' messages has room for that many
rows, so that it stays the same while the option changes live."""


class AcceptanceOptions(Options):
    """How proposed tokens are accepted.

    This class checks ranges; `coordinator.rejection` checks combinations for the acceptance rules.
    """

    num_speculative_tokens: int = 2
    """Tokens proposed for each verification, unless a request says otherwise. MAX's and vLLM's name, MAX's default."""
    rejection_sampling_strategy: str | None = None
    """Acceptance rule, unless a request says otherwise: greedy, residual, block, strict, typical-acceptance,
    logit-comparison or synthetic; auto picks the fastest of block, strict and residual, which are lossless, for the
    pair, temperature and load. By default residual. MAX's name; vLLM: rejection_sample_method, with probabilistic or
    standard for residual."""
    typical_epsilon: float = 0.09
    """typical-acceptance: a token of more than this probability is always accepted. Tandem's own."""
    typical_delta: float = 0.3
    """typical-acceptance: factor of exp(-entropy), which is enough as well. Tandem's own."""
    synthetic_acceptance_rate: float | None = None
    """synthetic: share of the proposed tokens to accept on average, for benchmarks. MAX's name."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """synthetic: for each position, the probability that its token is accepted; none is above the one before.
    vLLM's name."""
    synthetic_acceptance_length: float | None = None
    """synthetic: average tokens per round, including the target's own. vLLM's name."""
    use_relaxed_acceptance_for_thinking: bool = False
    """Inside think spans, accept tokens among the target's most probable ones; not lossless. MAX's name."""
    relaxed_topk: int = 10
    """Relaxed acceptance: the token is among this many most probable ones. MAX's name."""
    relaxed_delta: float = 0.6
    """Relaxed acceptance: its probability is at most this far below the highest. MAX's name."""
    draft_top_k: int = 0
    """Number of most probable tokens from which the draft samples when it sends its distribution; 0 leaves it to the
    draft service. Tandem's own."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """Rules for each of them alone."""
        return (*super().rules(), *ACCEPTANCE_RULES)

    @field_validator("synthetic_acceptance_rates", mode="before")
    @classmethod
    def _from_text(cls, rates: Any) -> Any:
        """A list in one word: 0.9,0.5 or [0.9, 0.5]."""
        if not isinstance(rates, str):
            return rates
        try:
            return json.loads(rates if rates.strip().startswith("[") else f"[{rates}]")
        except ValueError:
            return rates

    def uses_greedy_rejection(self) -> bool:
        """True if a token is accepted when it is the target's most probable one."""
        return self._names("greedy")

    def uses_logit_comparison(self) -> bool:
        """True if the draft's logit is compared with the target's."""
        return self._names("logit-comparison")

    def uses_typical_acceptance(self) -> bool:
        """True if typical acceptance is named; it is not the default of any method of this version."""
        return self._names("typical-acceptance")

    def uses_residual_rejection(self) -> bool:
        """True if tokens go through rejection sampling, the default."""
        return self.rejection_sampling_strategy is None or self._names("residual")

    def uses_strict_rejection(self) -> bool:
        """True if a token is accepted when the target sampled the same one."""
        return self._names("strict")

    def uses_synthetic_acceptance(self) -> bool:
        """True if acceptance ignores the models."""
        return self._names("synthetic") or (
            self.rejection_sampling_strategy is None and self.synthetic_acceptance_rate is not None
        )

    def _names(self, rule: str) -> bool:
        return (
            self.rejection_sampling_strategy is not None
            and canonical_name(self.rejection_sampling_strategy) == rule
        )


def _max_tokens(options: AcceptanceOptions) -> Iterator[str]:
    if options.num_speculative_tokens > MAX_CONFIGURED_TOKENS:
        yield (
            f"num_speculative_tokens is {options.num_speculative_tokens}; it must be at most {MAX_CONFIGURED_TOKENS}: "
            "an answer with a row for each must fit into a message"
        )


def _known_rule(options: AcceptanceOptions) -> Iterator[str]:
    name = options.rejection_sampling_strategy
    if name is not None and canonical_name(name) not in (*NAMES, AUTO):
        yield f"rejection_sampling_strategy is {name!r}; it must be one of {', '.join(SPELLINGS)}"


ACCEPTANCE_RULES: tuple[Rule[AcceptanceOptions], ...] = (
    at_least("num_speculative_tokens", 1),
    Rule(
        "most-configured-tokens",
        f"`num_speculative_tokens` is at most {MAX_CONFIGURED_TOKENS}: an answer with a row for each must fit into a "
        "message.",
        _max_tokens,
        ("num_speculative_tokens",),
    ),
    Rule(
        "rejection-sampling-strategy",
        f"`rejection_sampling_strategy` is one of {', '.join(SPELLINGS)}.",
        _known_rule,
        ("rejection_sampling_strategy",),
    ),
    within("typical_epsilon", 0.0, 1.0, "between 0 and 1"),
    within("typical_delta", 0.0, 1e308, "a finite number of at least 0"),
    within("synthetic_acceptance_rate", 0.0, 1.0, "between 0 and 1"),
    at_least("relaxed_topk", 1),
    within("relaxed_delta", 0.0, 1.0, "between 0 and 1"),
    at_least("draft_top_k", 0, words=" (0 leaves it to the draft service)"),
)
"""Rules for each of them alone."""


class SpeculativeConfig(DraftingOptions, AcceptanceOptions, SourceOptions):
    """Speculative decoding, in the words of MAX's and vLLM's `SpeculativeConfig`.

    Made in Python, also from a file (`SpeculativeConfig(config_file=...)`); a process fills it from its command line,
    the environment and a file (`tandem.config.layers`). vLLM's spellings are accepted; what this version does not have
    is refused by name.

    Raises:
        ValidationError: with a sentence for everything that is wrong.
    """

    max_length: int | None = None
    """Maximum tokens of a sequence, prompt and completion together; the same for draft and target. By default the
    models' own. MAX's name; vLLM: max_model_len."""
    device_memory_utilization: float | None = None
    """Share of a device's memory that one service may take, model and KV cache together. By default 0.9 on a GPU and
    0.3 on a CPU. Draft and target on one device need shares that are at most 1 together. MAX's name."""
    draft_tensor_parallel_size: int | None = None
    """Number of devices for the draft model: 1 or the target's. By default 1. vLLM's name."""
    max_num_steps: int = 1
    """Steps of the target per scheduling step; it must be 1. MAX's name."""
    enable_echo: bool = False
    """Begin the completion with the prompt. MAX's name."""
    enable_structured_output: bool = False
    """Bind completions to a grammar or schema. MAX's name."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """Rules for the configuration alone."""
        return (*super().rules(), *SPECULATIVE_RULES)


SPECULATIVE_RULES: tuple[Rule[SpeculativeConfig], ...] = (
    at_least("max_length", 1),
    within("device_memory_utilization", 5e-324, 1.0, "above 0 and at most 1"),
    at_least("draft_tensor_parallel_size", 1),
    always(
        "max_num_steps", 1, "each step of the target verifies a proposal, and its result decides on the next"
    ),
    always(
        "enable_echo",
        False,
        "the prompt is not streamed back; put it before the completion",
    ),
    always(
        "enable_structured_output",
        False,
        "the draft would have to keep to the same grammar; check the completion after it ends",
    ),
)
"""Rules beside those of the drafting method and of the acceptance rule."""
