"""Names of drafting methods, acceptance rules and devices, and what is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

REFUSED_OPTIONS = {
    "pipeline_parallel_size": "a sequence's next step depends on the one before, so stages would wait for each other; "
    "set tensor_parallel_size",
    "data_parallel_size": "each replica is a service of its own; start more of them",
    "disable_padded_drafter_batch": "batches are packed without padding, so there is none to disable",
    "use_local_argmax_reduction": "the draft's vocabulary is not split over devices, so there is nothing to reduce",
    "speculative_token_tree": "proposals are chains; set their length with num_speculative_tokens",
    "parallel_drafting": "the method decides it: dflash proposes a block in one pass, the others token after token",
    "draft_sample_method": "the draft samples as the acceptance rule needs; set rejection_sampling_strategy",
    "draft_proposal": "the draft samples as the acceptance rule needs; set rejection_sampling_strategy",
    "use_greedy_acceptance": "a request of temperature 0 is accepted greedily; set its temperature, or "
    "rejection_sampling_strategy",
    "enable_adaptive_verification": "the coordinator chooses the length by measured costs; leave it out",
    "attention_backend": "the engine chooses it; leave it out",
    "use_heterogeneous_vocab": "a draft with another tokenizer is mapped without it; set vocabulary_mapping",
    "index_share_for_mtp_iteration": "it belongs to attention that is not run; leave it out",
    "disable_eagle_block_drop": "no block of the prefix cache is dropped; leave it out",
    "dspark_draft_topk": "dspark is not run; use dflash",
    "xpress_topc": "xpress is not run; use dflash",
    "fly_window_size": "the rule fly is not run; set rejection_sampling_strategy to one that is",
    "fly_entropy_threshold": "the rule fly is not run; set rejection_sampling_strategy to one that is",
    "fly_entropy_top_k": "the rule fly is not run; set rejection_sampling_strategy to one that is",
    "draft_lm_head_quantization": "a draft is quantized as its checkpoint is; leave it out",
    "disable_lookahead_block_hashes": "the prefix cache has no such hashes; leave it out",
}
"""Named in the reference classes, refused here: the reason, which says what to do instead where there is something."""


_CHAIN = "proposals are chains; set their length with num_speculative_tokens"
SGLANG_NAMES = {
    "speculative_algorithm": "here it is called speculative_method",
    "speculative_draft_model_path": "here it is called draft_model_path",
    "speculative_draft_model": "here it is called draft_model_path",
    "speculative_draft_model_revision": "here it is called revision, an option of the draft service",
    "speculative_draft_model_quantization": "here it is called quantization, an option of the draft service",
    "speculative_draft_load_format": "here it is called load_format, an option of the draft service",
    "speculative_draft_kv_cache_dtype": "here it is called kv_cache_dtype, an option of the draft service",
    "speculative_moe_runner_backend": "here it is called moe_backend, an option of each service",
    "speculative_num_steps": "here it is called num_speculative_tokens",
    "speculative_num_draft_tokens": "here it is called num_speculative_tokens",
    "speculative_dflash_block_size": "here it is called num_speculative_tokens",
    "speculative_eagle_topk": _CHAIN,
    "speculative_adaptive": "here it is called speculation_policy",
    "speculative_adaptive_config": "here it is called speculation_policy",
    "speculative_accept_threshold_single": "here rejection_sampling_strategy typical-acceptance has thresholds",
    "speculative_accept_threshold_acc": "here rejection_sampling_strategy typical-acceptance has thresholds",
    "speculative_use_rejection_sampling": "here it is rejection_sampling_strategy residual",
    "speculative_use_block_verification": "here it is rejection_sampling_strategy block",
    "speculative_ngram_max_trie_depth": "here it is called suffix_decoding_max_tree_depth",
    "speculative_ngram_capacity": "here it is called suffix_decoding_max_cached_requests",
    "speculative_attention_mode": REFUSED_OPTIONS["attention_backend"],
    "speculative_draft_attention_backend": REFUSED_OPTIONS["attention_backend"],
    "decoupled_spec_role": "a draft is a service of its own: tandem serve draft",
    "decoupled_spec_bind_endpoint": "here it is called host and port, options of the draft service",
    "decoupled_spec_connect_endpoints": "here it is called draft_address, an option of the coordinator",
}
"""SGLang 0.5.23's (sglang/srt/arg_groups)."""
LLAMA_CPP_NAMES = {
    "model_draft": "here it is called draft_model_path",
    "spec_draft_model": "here it is called draft_model_path",
    "spec_draft_hf": "here it is called draft_model_path",
    "spec_type": "here it is called speculative_method",
    "draft": "here it is called num_speculative_tokens",
    "draft_n": "here it is called num_speculative_tokens",
    "draft_max": "here it is called num_speculative_tokens",
    "spec_draft_n_max": "here it is called num_speculative_tokens",
    "spec_ngram_mod_n_max": "here it is called num_speculative_tokens",
    "device_draft": "here it is called device, an option of the draft service",
    "spec_draft_device": "here it is called device, an option of the draft service",
    "spec_draft_threads": "here it is called threads, an option of the draft service",
    "spec_draft_type_k": "here it is called kv_cache_dtype, an option of the draft service",
    "spec_draft_type_v": "here it is called kv_cache_dtype, an option of the draft service",
    "spec_draft_p_split": _CHAIN,
    "draft_p_split": _CHAIN,
    "spec_ngram_size_n": "here it is called prompt_lookup_max",
    "spec_ngram_simple_size_n": "here it is called prompt_lookup_max",
    "spec_ngram_map_k_size_n": "here it is called prompt_lookup_max",
    "spec_ngram_map_k4v_size_n": "here it is called prompt_lookup_max",
    "spec_ngram_mod_n_match": "here it is called prompt_lookup_max",
    "spec_ngram_size_m": "here it is called num_speculative_tokens",
    "spec_ngram_simple_size_m": "here it is called num_speculative_tokens",
    "spec_ngram_map_k_size_m": "here it is called num_speculative_tokens",
    "spec_ngram_map_k4v_size_m": "here it is called num_speculative_tokens",
    "spec_synth_rates": "here it is called synthetic_acceptance_rates",
    "spec_synth_len": "here it is called synthetic_acceptance_length",
}
"""llama.cpp's (common/arg.cpp, November 2026)."""
_SGLANG_ONLY = (
    *(
        "boundary_reduction",
        "domino_candidate_pool_size",
        "draft_sink_size",
        "draft_window_size",
        "dsa_topk_backend",
    ),
    *("dspark_align_verify_tokens_to_graph_tier", "dspark_block_size", "dspark_confidence_sts_path"),
    *(
        "dspark_sps_table_path",
        "enable_w4a4_mxfp4_megamoe",
        "moe_a2a_backend",
        "ngram_external_corpus_max_tokens",
    ),
    *("ngram_external_corpus_path", "ngram_external_sam_budget", "ngram_match_type", "ngram_max_bfs_breadth"),
    *("ngram_min_bfs_breadth", "token_map"),
)
"""Further ones, behind `speculative_`."""


OF_A_SERVICE = {
    "kv_cache_dtype": "it is an option of each service that has a model; give it to the draft service"
}
"""Keys of vLLM's configuration that are no options of speculative decoding here."""


def named_elsewhere(option: str) -> str:
    """Where to find what an option of SGLang or llama.cpp means; empty for options that are neither's."""
    if words := SGLANG_NAMES.get(option):
        return f"it is SGLang's; {words}"
    if words := LLAMA_CPP_NAMES.get(option):
        return f"it is llama.cpp's; {words}"
    if option.removeprefix("speculative_") in _SGLANG_ONLY or option == "decoupled_spec_rank":
        return "it is SGLang's, and nothing here corresponds to it"
    if option.startswith(("spec_", "draft_p_", "draft_n_", "draft_min", "lookup_cache_")):
        return "it is llama.cpp's, and nothing here corresponds to it"
    return ""


def changes_nothing(option: str, value: object, method: object) -> bool:
    """True if a refused option asks for what is done anyway, such as one of vLLM's switches that is off by default."""
    word = str(value).lower()
    is_done = option == "parallel_drafting" and word == "true" and method == DFLASH
    return option in REFUSED_OPTIONS and (word == "false" or is_done)


_HEAD = (
    "of the heads that read the target's hidden states eagle, eagle3, medusa, mtp and dflash are run; use one of "
    "these, standalone, ngram or suffix"
)

REFUSED_METHODS = {
    "mlp_speculator": _HEAD,
    "extract_hidden_states": "it proposes nothing; start the target with --shared-storage-path, which writes the "
    "hidden states of requests with any draft",
    "dspark": _HEAD,
    "ngram_gpu": "prompt lookup needs no GPU here; use ngram",
    "custom_class": "no code from outside is loaded; use standalone, ngram or suffix",
}
"""Drafting methods, likewise. vLLM's deprecated names such as deepseek_mtp count as mtp."""


STANDALONE = "standalone"
NGRAM = "ngram"
SUFFIX = "suffix"
SUFFIX_TREE_DEPTH = 24
"""Longest run of tokens that suffix trees remember, unless set. vLLM's default."""
EAGLE = "eagle"
EAGLE3 = "eagle3"
MEDUSA = "medusa"
MTP = "mtp"
DFLASH = "dflash"

METHODS = (STANDALONE, NGRAM, SUFFIX, EAGLE, EAGLE3, MEDUSA, MTP, DFLASH)
"""Drafting methods of this version."""

BOUND_METHODS = (EAGLE, EAGLE3, MEDUSA, MTP, DFLASH)
"""Those of them that read the target's hidden states, and so run in the target's process."""

OWN_METHODS = (MTP,)
"""Those of them whose weights lie in the target's own checkpoint, so that no draft is named."""

MODEL_FREE_METHODS = (NGRAM, SUFFIX)
"""Those of them that have no model."""


def canonical_method(name: str) -> str:
    """A method's own name; an unknown one is returned as it is spelled.

    vLLM takes brackets around it, [ngram], and calls a draft model of its own draft_model.
    """
    spelled = name.strip().lower().removeprefix("[").removesuffix("]")
    if spelled.endswith("_mtp"):
        return MTP
    return STANDALONE if spelled == "draft_model" else spelled


def inferred_method(draft_model: str) -> str:
    """The method that a draft model implies, by its name or its config.json, as in vLLM."""
    if canonical_method(draft_model) in MODEL_FREE_METHODS:
        return canonical_method(draft_model)
    return _method_named(draft_model) or _method_in(read_config(Path(draft_model))) or STANDALONE


def checkpoint_method(folder: Path) -> str:
    """The method that a folder's config.json names, or else its own name; empty where neither names one."""
    return _method_in(read_config(folder)) or _method_named(str(folder))


def _method_named(draft_model: str) -> str:
    name = Path(draft_model).name.lower()
    marks = ((EAGLE3, "eagle3"), (EAGLE, "eagle-"), ("dflash", "dflash"))
    return next((method for method, mark in marks if mark in name), "")


def _method_in(config: Mapping[str, Any]) -> str:
    wrapped = config.get("speculators_model_type")
    if isinstance(wrapped, str):
        return canonical_method(wrapped)
    names = config.get("architectures")
    architectures = list(map(str, names)) if isinstance(names, list) else []
    for method in (EAGLE3, DFLASH):
        if any(method in name.lower() for name in architectures):
            return method
    # EAGLE heads in vLLM's spelling. SafeAILab's heads say LlamaForCausalLM, so their name has to tell.
    if not {"EAGLEModel", "EagleLlamaForCausalLM", "EagleLlamaModel"}.isdisjoint(architectures):
        return EAGLE
    if "medusa_num_heads" in config:
        return MEDUSA
    model_type = canonical_method(str(config.get("model_type", "")))
    return model_type if model_type in (*BOUND_METHODS, *REFUSED_METHODS) else ""


LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
"""Keys of a checkpoint's config for the maximum tokens of a sequence; the first that is there counts."""


def read_config(folder: Path) -> Mapping[str, Any]:
    """A checkpoint's config; empty when there is none: loading the folder reports it better."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


NAMES = ("greedy", "residual", "block", "strict", "typical-acceptance", "logit-comparison", "synthetic")

RULE_ALIASES = {"probabilistic": "residual", "standard": "residual", "typical": "typical-acceptance"}
"""Other words for some of them; the first two are vLLM's."""

AUTO = "auto"
"""Picks the rule of `AUTO_NAMES` with the most tokens per second. Tandem's own."""

AUTO_NAMES = ("strict", "block", "residual")
"""All of them lossless; the first are tried first. Under `strict` ids travel alone, and a target goes on by itself."""

SPELLINGS = (*NAMES, *RULE_ALIASES, AUTO)


def canonical_name(name: str) -> str:
    """A rule's own name. Capitals and underscores do not matter; an unknown name is returned as it is spelled."""
    spelled = name.strip().lower().replace("_", "-")
    return RULE_ALIASES.get(spelled, spelled)


DEVICES = "cpu, cuda, cuda:N, gpu or gpu:N"


def as_torch(name: str) -> str:
    """The device as torch names it: gpu:1 is cuda:1."""
    if re.fullmatch(r"cpu|(?:cuda|gpu)(:\d+)?", name) is None:
        raise ValueError(f"it must be {DEVICES}")
    return name.replace("gpu", "cuda")


Device = Annotated[str, AfterValidator(as_torch)]
"""A device as torch names it, whichever name it was given by."""
