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
}
"""Named in the reference classes, refused here: the reason, which says what to do instead where there is something."""


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


STANDALONE, NGRAM, SUFFIX = "standalone", "ngram", "suffix"
SUFFIX_TREE_DEPTH = 24
"""Longest run of tokens that suffix trees remember, unless set. vLLM's default."""
EAGLE, EAGLE3, MEDUSA, MTP, DFLASH = "eagle", "eagle3", "medusa", "mtp", "dflash"

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
