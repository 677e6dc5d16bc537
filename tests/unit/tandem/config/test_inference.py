"""Inferred values, as in vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from tandem.config import SpeculativeConfig
from tandem.config.methods import inferred_method


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
    ("model_type", "method"),
    [
        ("medusa", "medusa"),
        ("mlp_speculator", "mlp_speculator"),
        ("deepseek_mtp", "mtp"),
        ("llama", "standalone"),
    ],
)
def test_the_method_by_the_checkpoint(tmp_path: Path, model_type: str, method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert inferred_method(str(tmp_path)) == method


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["EAGLEModel"], "model_type": "eagle"}, "eagle"),
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}, "eagle"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "medusa"),
        ({"medusa_num_heads": 5, "medusa_num_layers": 1}, "medusa"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "standalone"),
    ],
)
def test_the_method_of_a_drafting_head(tmp_path: Path, config: dict[str, object], method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert inferred_method(str(tmp_path)) == method


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": 3}'])
def test_a_checkpoint_that_says_nothing_is_a_model_like_any_other(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert inferred_method(str(tmp_path)) == "standalone"


def test_a_method_given_as_the_model_is_not_a_model() -> None:
    config = SpeculativeConfig.model_validate({"model": "ngram"})
    assert (config.speculative_method, config.draft_model_path) == ("ngram", None)


def test_a_method_that_is_named_is_not_inferred() -> None:
    assert SpeculativeConfig.model_validate(
        {"model": "my/eagle-like", "method": "draft_model"}
    ).is_standalone()


def test_nothing_is_inferred_without_model_and_method() -> None:
    assert SpeculativeConfig().speculative_method is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [((None, None), (5, 5)), ((3, None), (3, 3)), ((None, 2), (2, 2)), ((2, 4), (2, 4))],
)
def test_one_end_of_the_lookup_sets_the_other(
    given: tuple[int | None, ...], expected: tuple[int, int]
) -> None:
    config = SpeculativeConfig(prompt_lookup_min=given[0], prompt_lookup_max=given[1])
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected


def test_a_rate_list_may_be_one_word() -> None:
    for rates in ("0.9,0.5", "[0.9, 0.5]", [0.9, 0.5]):
        assert SpeculativeConfig(synthetic_acceptance_rates=rates).synthetic_acceptance_rates == (0.9, 0.5)


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SpeculativeConfig().num_speculative_tokens = 3  # type: ignore[misc]
