"""`SpeculativeConfig`: the options of speculative decoding, each once, in the words of MAX and vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from tandem.config import names
from tandem.config.options import SHORT_HELP, Options
from tandem.config.rule import Rules, always, not_below, rule

MAX_CONFIGURED_TOKENS = 128
PROPOSED_TOKENS = 2
"""Maximum tokens per proposal in the configuration. The limit on the size of services' messages has room for that many
rows, so that it stays the same while the option changes live."""

LookupMatch = Literal["latest", "earliest"]


def checked_method(name: str) -> str:
    """A drafting method's own name."""
    method = names.canonical_method(name)
    if reason := names.REFUSED_METHODS.get(method):
        raise ValueError(f"it is not available in this version: {reason}")
    if method not in names.METHODS:
        raise ValueError(f"it must be one of {', '.join(names.METHODS)}")
    return method


def check_rule(name: str) -> str:
    """An acceptance rule's own name."""
    rule = names.canonical_name(name)
    if rule not in (*names.NAMES, names.AUTO):
        raise ValueError(f"it must be one of {', '.join(names.SPELLINGS)}")
    return rule


def split_list(value: Any) -> Any:
    """A list in one word: 0.9,0.5 or [0.9, 0.5]."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value if value.strip().startswith("[") else f"[{value}]")
    except ValueError:
        return value.split(",")


def _object(value: Any) -> Any:
    """A JSON object in one word."""
    if not isinstance(value, str):
        return value
    with suppress(ValueError):
        value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError("it must be a JSON object")
    return value


class LoadRange(NamedTuple):
    """Proposal length at a range of loads, by the sequences that share a target."""

    first: int
    last: int
    tokens: int


def read_policy(value: Any) -> Any:
    """A policy's name, or the lengths by load in one word: [[1,4,4],[5,16,2]]."""
    if isinstance(value, str) and value in ("adaptive", "fixed"):
        return value
    with suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(isinstance(each, list | tuple) and len(each) == 3 for each in value):
        raise ValueError(
            "it must be adaptive, fixed, or lengths by load, such as [[1,4,4],[5,16,2]]: from, to, K"
        )
    following = 1
    for each in value:
        if not all(type(number) is int for number in each):
            raise ValueError(f"{list(each)} must be three whole numbers: from, to, K")
        lengths = LoadRange(*each)
        if lengths.first != following:
            raise ValueError(
                f"{list(each)} must begin at load {following}: neither gaps nor overlaps are allowed"
            )
        if lengths.last < lengths.first:
            raise ValueError(f"{list(each)} must not end before it begins")
        if lengths.tokens < 0:
            raise ValueError(f"{list(each)} must propose at least 0 tokens")
        following = lengths.last + 1
    return tuple(LoadRange(*each) for each in value)


SpeculationPolicy = Annotated[
    Literal["adaptive", "fixed"] | tuple[LoadRange, ...], BeforeValidator(read_policy)
]
"""How many tokens rounds propose."""

Floats = Annotated[tuple[float, ...], BeforeValidator(split_list)]
Integers = Annotated[tuple[int, ...], BeforeValidator(split_list)]


class ModelOptions(Options):
    """Which model is run and how, with the embedded engine and with vLLM."""

    max_length: Annotated[int | None, SHORT_HELP] = Field(default=None, ge=1)
    """Maximum tokens, prompt and completion together; the same for draft and target. By default the
    models' own. MAX's name; vLLM: max_model_len."""
    device_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a device's memory that one service may take, model and KV cache together. By default 0.9 on a GPU and
    0.3 on a CPU. Services that share a device need shares that are at most 1 together. MAX's name."""
    revision: str | None = None
    """Branch, tag or commit, when the model is named by a Hugging Face id. By default the hub's main branch. vLLM's
    name."""
    code_revision: str | None = None
    """Revision of the code that comes with a model. It has no effect, since Tandem never runs such code. vLLM's
    name."""
    quantization: str | None = None
    """How the model's weights are quantized, with the engine vllm: fp8, awq, gptq and others. By default what its
    config.json says. vLLM's name."""
    moe_backend: str | None = None
    """Kernels for a mixture of experts, with the engine vllm. By default its own choice. vLLM's name."""
    enforce_eager: bool = False
    """Compile nothing and capture no CUDA graphs, with the engine vllm; the engine tandem does neither. vLLM's name."""


@rule("`section_name` needs `config_file`.")
def _section_name(options: SourceOptions) -> Iterator[str]:
    if options.section_name is not None and options.config_file is None:
        yield f"section_name is {options.section_name}; it needs config_file, the file that has the section"


class SourceOptions(Options):
    """Further sources of options."""

    config_file: Annotated[Path | None, SHORT_HELP] = None
    """TOML, YAML or JSON file with options; other sources are stronger. MAX's name."""
    section_name: str | None = None
    """Section of config_file that holds the options; by default the whole file. MAX's name."""
    speculative_config: str | None = None
    """Options as one JSON object; a separate option is stronger. vLLM's form."""

    own_rules: ClassVar[Rules] = (_section_name,)


@rule("`draft_model_path` is not set for a method that has no model.")
def _model_free_method(options: DraftingOptions) -> Iterator[str]:
    if options.speculative_method in names.MODEL_FREE_METHODS and options.draft_model_path is not None:
        yield (
            f"draft_model_path is {options.draft_model_path} and speculative_method is {options.speculative_method}, "
            "which has no model; leave out draft_model_path, or set speculative_method to standalone"
        )


class DraftingOptions(ModelOptions):
    """Drafting method and its options."""

    speculative_method: Annotated[Annotated[str, AfterValidator(checked_method)] | None, SHORT_HELP] = None
    """Drafting method: standalone, ngram, suffix, eagle, eagle3, medusa, mtp or dflash. By default inferred from the
    draft model's name or config.json, as in vLLM. A draft that reads the target's hidden states (the last five) runs
    in the target's process. MAX's name; vLLM: method, with draft_model for standalone."""
    draft_model_path: str | None = None
    """Folder or Hugging Face id of the draft model; ngram or suffix in its place names the method. MAX's name; vLLM:
    model."""
    draft_devices: names.Device | None = None
    """Device of the draft model: cpu, gpu, gpu:N or cuda:N. By default the draft service's device. MAX's name."""
    draft_tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Number of GPUs for the draft model: 1 or the target's; more than 1 need the engine vllm. By default 1. vLLM's
    name, and tensor_parallel_size."""
    draft_load_config: Annotated[dict[str, Any], BeforeValidator(_object)] | None = None
    """How the draft's weights are read, with the engine vllm: the fields of its LoadConfig, such as
    {"load_format": "runai_streamer"}. vLLM's name."""
    prompt_lookup_min: int = Field(default=5, ge=1)
    """Smallest n-gram to look up, in tokens; by default prompt_lookup_max when that is given. vLLM's name."""
    prompt_lookup_max: int = Field(default=5, ge=1)
    """Largest n-gram to look up, in tokens; by default prompt_lookup_min when that is given. vLLM's name."""
    prompt_lookup_match: LookupMatch = "latest"
    """Which of several earlier occurrences counts: the most recent, or the earliest as in vLLM. Tandem's own."""
    suffix_decoding_max_tree_depth: int = Field(default=names.SUFFIX_TREE_DEPTH, ge=1)
    """Longest run of tokens that the suffix trees remember, prefix match and proposal together. vLLM's name."""
    suffix_decoding_max_cached_requests: int = Field(default=10000, ge=0)
    """Finished completions that suffix trees remember, of all callers together, first in, first out; 0 keeps none.
    vLLM's name."""
    suffix_decoding_max_spec_factor: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Maximum tokens proposed for each token of the matched prefix. vLLM's name."""
    suffix_decoding_min_token_prob: float = Field(default=0.1, ge=0, le=1)
    """Estimated probability that a suffix tree's token needs to be proposed. vLLM's name."""

    own_rules: ClassVar[Rules] = (_model_free_method, not_below("prompt_lookup_max", "prompt_lookup_min"))

    def is_standalone(self) -> bool:
        """True if a draft model of its own drafts."""
        return self.speculative_method == "standalone"

    def is_eagle(self) -> bool:
        """True if an EAGLE or EAGLE-3 head drafts."""
        return self.speculative_method in ("eagle", "eagle3")

    def is_mtp(self) -> bool:
        """True if the target's own prediction layers draft."""
        return self.speculative_method == "mtp"


class AcceptanceOptions(Options):
    """Acceptance rule and its options.

    This class checks ranges; `tandem.acceptance` checks combinations for the acceptance rules.
    """

    num_speculative_tokens: Annotated[int, SHORT_HELP] = Field(
        default=PROPOSED_TOKENS, ge=1, le=MAX_CONFIGURED_TOKENS
    )
    """Tokens proposed per verification; a request may say otherwise. MAX's and vLLM's name, MAX's default;
    as in vLLM suffix_decoding_max_tree_depth for suffix, and n_predict where the draft's config has it."""
    rejection_sampling_strategy: Annotated[Annotated[str, AfterValidator(check_rule)] | None, SHORT_HELP] = (
        None
    )
    """Acceptance rule: greedy, residual, block, strict, typical-acceptance, logit-comparison or synthetic; a request
    may say otherwise. auto picks the fastest of strict, block and residual, which are lossless, for the pair,
    temperature and load. By default residual, or typical-acceptance for eagle, eagle3 and mtp. MAX's name; vLLM:
    rejection_sample_method, with probabilistic or standard for residual."""
    draft_max_length: int | None = Field(default=None, ge=1)
    """Tokens of a sequence, prompt and completion together, beyond which nothing is drafted. By default max_length.
    vLLM's name, in its speculative_config: max_model_len."""
    typical_epsilon: float = Field(default=0.09, ge=0, le=1)
    """typical-acceptance: a token above this probability is always accepted. Tandem's own."""
    typical_delta: float = Field(default=0.3, ge=0, allow_inf_nan=False)
    """typical-acceptance: factor of exp(-entropy); a token above the product is accepted too. Tandem's own."""
    synthetic_acceptance_rate: float | None = Field(default=None, ge=0, le=1)
    """synthetic: share of the proposed tokens to accept on average, for benchmarks. MAX's name."""
    synthetic_acceptance_rates: Floats | None = None
    """synthetic: for each position, the probability that its token is accepted; none is above the one before.
    vLLM's name."""
    synthetic_acceptance_length: float | None = None
    """synthetic: average tokens per round, including the target's own. vLLM's name."""
    use_relaxed_acceptance_for_thinking: bool = False
    """Inside think spans, accept tokens among the target's most probable ones; not lossless. MAX's name."""
    relaxed_topk: int = Field(default=10, ge=1)
    """Relaxed acceptance: the token is among this many most probable ones. MAX's name."""
    relaxed_delta: float = Field(default=0.6, ge=0, le=1)
    """Relaxed acceptance: its probability is at most this far below the highest. MAX's name."""
    draft_top_k: int = Field(default=0, ge=0)
    """Number of most probable tokens from which the draft samples when it sends its distribution; 0 leaves it to the
    draft service. Tandem's own."""


@rule("No length of `speculation_policy` is above `num_speculative_tokens`.")
def _lengths_by_load(options: SpeculativeConfig) -> Iterator[str]:
    if isinstance(options.speculation_policy, str):
        return
    for first, last, tokens in options.speculation_policy:
        if tokens > options.num_speculative_tokens:
            yield (
                f"speculation_policy proposes {tokens} tokens at loads {first} to {last}; num_speculative_tokens is "
                f"{options.num_speculative_tokens} and must be at least as many"
            )


class SpeculativeConfig(DraftingOptions, AcceptanceOptions, SourceOptions):
    """Speculative decoding, in the words of MAX's and vLLM's `SpeculativeConfig`.

    Made in Python, also from a file (`SpeculativeConfig(config_file=...)`); a process fills it from its command line,
    the environment and a file (`tandem.config.settings`). vLLM's spellings are accepted; what this version does not
    have is refused by name.

    Raises:
        ValidationError: with a sentence for everything that is wrong.
    """

    is_shared: ClassVar = True

    speculation_policy: SpeculationPolicy = "adaptive"
    """How many tokens rounds propose. adaptive: from 0 to num_speculative_tokens, as many as promise the most tokens
    per second at the current load. fixed: always num_speculative_tokens, for benchmarks. [[1,4,4],[5,16,2]]: by load,
    the number of sequences that share a target: 4 tokens up to load 4, 2 from 5 on. Tandem's own; vLLM:
    num_speculative_tokens_per_batch_size."""
    vocabulary_mapping: Literal["auto", "tli", "slem", "off"] = "auto"
    """How a draft model with another tokenizer than the target's proposes its tokens. tli: it draws among the tokens
    that both vocabularies have. slem: the target's tokenizer splits the text that the draft writes. auto: slem at
    temperature 0, tli above. off: such a draft is refused. Tandem's own."""
    max_num_steps: int = 1
    """Steps of the target per scheduling step; it must be 1. MAX's name."""
    enable_echo: bool = False
    """Begin the completion with the prompt. MAX's name."""
    enable_structured_output: bool = False
    """Accepted, without effect: `structured_output` says whether completions may follow a grammar or schema. MAX's
    name."""

    own_rules: ClassVar[Rules] = (
        always(
            "max_num_steps",
            1,
            "each step of the target verifies a proposal, and its result decides on the next",
        ),
        _lengths_by_load,
        always("enable_echo", False, "the prompt is not streamed back; put it before the completion"),
    )

    @property
    def acceptance_rule(self) -> str:
        """Name of the acceptance rule for a temperature above 0, with the default decided as in MAX."""
        if self.rejection_sampling_strategy is not None:
            return self.rejection_sampling_strategy
        if self.synthetic_acceptance_rate is not None:
            return "synthetic"
        return "typical-acceptance" if self.is_eagle() or self.is_mtp() else "residual"

    def uses_greedy_rejection(self) -> bool:
        """True if a token is accepted when it is the target's most probable one."""
        return self.acceptance_rule == "greedy"

    def uses_logit_comparison(self) -> bool:
        """True if the draft's logit is compared with the target's."""
        return self.acceptance_rule == "logit-comparison"

    def uses_typical_acceptance(self) -> bool:
        """True if tokens that the target finds probable enough are accepted."""
        return self.acceptance_rule == "typical-acceptance"
