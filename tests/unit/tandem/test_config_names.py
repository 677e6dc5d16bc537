"""Inferred values, as in vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.rejection import STRATEGIES
from draft_service.settings import DraftSettings
from tandem.config import SpeculativeConfig
from tandem.config import names as acceptance_names
from tandem.config.names import METHODS, REFUSED_METHODS, REFUSED_OPTIONS, as_torch, inferred_method
from tandem.config.options import ALIASES
from target_service.settings import TargetSettings


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("meta/Llama-68M", "standalone"),
        ("ngram", "ngram"),
        ("suffix", "suffix"),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("z-lab/Qwen3-8B-DFlash-b16", "dflash"),
    ],
)
def test_the_method_by_the_models_name(model: str, method: str) -> None:
    assert inferred_method(model) == method


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"model_type": "medusa"}, "medusa"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"model_type": "deepseek_mtp"}, "mtp"),
        ({"model_type": "llama"}, "standalone"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["EAGLEModel"], "model_type": "eagle"}, "eagle"),
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}, "eagle"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "medusa"),
        ({"medusa_num_heads": 5, "medusa_num_layers": 1}, "medusa"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "standalone"),
        # What says nothing is a model like any other.
        ("{", "standalone"),
        ([], "standalone"),
        ({"model_type": 3}, "standalone"),
    ],
)
def test_the_method_by_the_checkpoint(tmp_path: Path, config: Any, method: str) -> None:
    content = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(content)
    assert inferred_method(str(tmp_path)) == method


def test_a_method_given_as_the_model_is_not_a_model() -> None:
    config = SpeculativeConfig.model_validate({"model": "ngram"})
    assert (config.speculative_method, config.draft_model_path) == ("ngram", None)


def test_a_method_that_is_named_is_not_inferred() -> None:
    assert SpeculativeConfig.model_validate(
        {"model": "my/eagle-like", "method": "draft_model"}
    ).is_standalone()


@pytest.mark.parametrize(
    ("given", "expected"),
    [((None, None), (5, 5)), ((3, None), (3, 3)), ((None, 2), (2, 2)), ((2, 4), (2, 4))],
)
def test_one_end_of_a_lookup_sets_the_other(given: tuple[int | None, ...], expected: tuple[int, int]) -> None:
    config = SpeculativeConfig(prompt_lookup_min=given[0], prompt_lookup_max=given[1])
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected


def test_a_rate_list_may_be_one_word() -> None:
    for rates in ("0.9,0.5", "[0.9, 0.5]", [0.9, 0.5]):
        assert SpeculativeConfig(synthetic_acceptance_rates=rates).synthetic_acceptance_rates == (0.9, 0.5)


MAX_OPTIONS: dict[str, Any] = {
    "config_file": None,
    "section_name": None,
    "speculative_method": None,
    "num_speculative_tokens": 2,
    "rejection_sampling_strategy": None,
    "synthetic_acceptance_rate": None,
    "use_relaxed_acceptance_for_thinking": False,
    "relaxed_topk": 10,
    "relaxed_delta": 0.6,
    # Around its class:
    "draft_model_path": None,
    "draft_devices": None,
    "device_memory_utilization": None,
    "max_num_steps": 1,
    "max_length": None,
    "enable_echo": False,
    "enable_structured_output": False,
}
"""With MAX's defaults."""

VLLM_OPTIONS = (
    "num_speculative_tokens", "model", "method", "enforce_eager", "draft_tensor_parallel_size",
    "tensor_parallel_size", "quantization", "moe_backend", "draft_load_config", "revision", "code_revision",
    "max_model_len", "disable_padded_drafter_batch", "use_local_argmax_reduction", "prompt_lookup_max",
    "prompt_lookup_min", "speculative_token_tree", "parallel_drafting", "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
    "rejection_sample_method", "draft_sample_method", "num_speculative_tokens_per_batch_size",
    "enable_adaptive_verification", "attention_backend", "use_heterogeneous_vocab", "index_share_for_mtp_iteration",
    "disable_eagle_block_drop", "dspark_draft_topk", "synthetic_acceptance_rates", "synthetic_acceptance_length",
)  # fmt: skip
VLLM_DEFAULTS = {
    "prompt_lookup_min": 5,
    "prompt_lookup_max": 5,
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_cached_requests": 10000,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_min_token_prob": 0.1,
}

MAX_METHODS = ("standalone", "eagle", "mtp")
VLLM_METHODS = (
    "ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp", "deepseek_mtp", "medusa",
    "mlp_speculator", "dflash", "dspark", "extract_hidden_states", "custom_class",
)  # fmt: skip

RULE_NAMES = (
    "greedy", "residual", "typical-acceptance", "logit-comparison",
    "strict", "probabilistic", "synthetic", "standard", "block",
)  # fmt: skip


NEWER_MAX_OPTIONS = ("use_greedy_acceptance", "draft_proposal", "num_speculative_tokens_per_batch_size")


def refusal(**options: Any) -> str:
    with pytest.raises(ValidationError) as error:
        SpeculativeConfig(**options)
    (detail,) = error.value.errors()
    return detail["msg"]


@pytest.mark.parametrize("name", sorted({*MAX_OPTIONS, *NEWER_MAX_OPTIONS, *VLLM_OPTIONS}))
def test_an_option_is_supported_or_refused_by_name(name: str) -> None:
    if name in REFUSED_OPTIONS:
        assert refusal(**{name: 1}) == f"{name} is not available in this version: {REFUSED_OPTIONS[name]}"
        SpeculativeConfig(**{name: None})  # null is not given, as in vLLM
    else:
        assert ALIASES.get(name, name) in SpeculativeConfig.model_fields


def test_the_length_in_vllms_json_form_is_the_drafts() -> None:
    config = SpeculativeConfig.model_validate(
        {"speculative_config": {"max_model_len": 512}, "max_model_len": 4096}
    )
    assert (config.draft_max_length, config.max_length) == (512, 4096)


@pytest.mark.parametrize(("name", "default"), [*MAX_OPTIONS.items(), *VLLM_DEFAULTS.items()])
def test_defaults_are_the_references(name: str, default: object) -> None:
    assert getattr(SpeculativeConfig(), name) == default


@pytest.mark.parametrize("method", [*MAX_METHODS, *VLLM_METHODS])
def test_a_method_is_supported_or_refused_by_name(method: str) -> None:
    canonical = {"draft_model": "standalone", "deepseek_mtp": "mtp"}.get(method, method)
    if canonical in METHODS:
        assert SpeculativeConfig(speculative_method=method).speculative_method == canonical
    else:
        assert refusal(method=method).endswith(f"not available in this version: {REFUSED_METHODS[canonical]}")


@pytest.mark.parametrize("name", RULE_NAMES)
def test_an_acceptance_rule_goes_by_either_name(name: str) -> None:
    for spelled in (name, name.upper(), name.replace("-", "_")):
        config = SpeculativeConfig.model_validate({"rejection_sample_method": spelled})
        known_as = config.rejection_sampling_strategy
        assert known_as is not None
        assert acceptance_names.canonical_name(known_as) == acceptance_names.canonical_name(name)


def test_names_of_acceptance_rules_are_those_of_the_rules() -> None:
    assert {strategy.name for strategy in STRATEGIES} == set(acceptance_names.NAMES)
    assert set(acceptance_names.RULE_ALIASES.values()) <= set(acceptance_names.NAMES)


@pytest.mark.parametrize(
    ("options", "predicates"),
    [
        ({}, set()),
        ({"method": "draft_model"}, {"is_standalone"}),
        ({"method": "eagle3"}, {"is_eagle", "uses_typical_acceptance"}),
        ({"method": "mtp", "rejection_sampling_strategy": "strict"}, {"is_mtp"}),
        ({"rejection_sampling_strategy": "greedy"}, {"uses_greedy_rejection"}),
        ({"rejection_sampling_strategy": "logit_comparison"}, {"uses_logit_comparison"}),
        ({"rejection_sampling_strategy": "typical"}, {"uses_typical_acceptance"}),
        ({"method": "eagle", "synthetic_acceptance_rate": 0.7}, {"is_eagle"}),
    ],
)
def test_maxs_predicates(options: dict[str, Any], predicates: set[str]) -> None:
    config = SpeculativeConfig(**options)
    names = ("is_standalone", "is_eagle", "is_mtp", "uses_greedy_rejection", "uses_logit_comparison")
    assert {name for name in (*names, "uses_typical_acceptance") if getattr(config, name)()} == predicates


@pytest.mark.parametrize(
    ("name", "device"),
    [("cpu", "cpu"), ("cuda", "cuda"), ("gpu", "cuda"), ("cuda:1", "cuda:1"), ("gpu:12", "cuda:12")],
)
def test_gpu_and_cuda_are_the_same_everywhere(name: str, device: str) -> None:
    assert as_torch(name) == device
    assert TargetSettings(model=Path(), device=name).compute_device == device
    assert DraftSettings(device=name).compute_device == device
    assert DraftSettings(draft_devices=name).compute_device == device


@pytest.mark.parametrize("name", ["", "tpu", "cpu:0", "cuda:", "cuda:x", "CUDA", "gpu0", "cuda:0,1"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="it must be cpu, cuda, cuda:N, gpu or gpu:N"):
        TargetSettings(model=Path(), device=name)


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"method": "[ngram]", "enforce_eager": False}, {"speculative_method": "ngram"}),
        ({"method": "ngram", "parallel_drafting": False, "use_local_argmax_reduction": False}, {}),
        ({"method": "dflash", "parallel_drafting": True}, {"speculative_method": "dflash"}),
        ({"method": "ngram", "tensor_parallel_size": 1}, {"draft_tensor_parallel_size": 1}),
        ({"method": "suffix"}, {"num_speculative_tokens": 24}),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 8}, {"num_speculative_tokens": 8}),
        ({"method": "suffix", "num_speculative_tokens": 3}, {"num_speculative_tokens": 3}),
    ],
)
def test_vllms_defaults_mean_what_they_mean_there(options: dict[str, Any], changed: dict[str, Any]) -> None:
    config = SpeculativeConfig(speculative_config=json.dumps(options))
    assert {name: getattr(config, name) for name in changed} == changed


def test_a_head_says_how_many_tokens_it_proposes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"n_predict": 3, "model_type": "llama"}')
    assert SpeculativeConfig(draft_model_path=str(tmp_path)).num_speculative_tokens == 3
