"""Fused layers give the logits of transformers' own, or are not used."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.backends import selection
from tandem.engine.backends.cuda_graphs.capture import without_capture
from tandem.engine.backends.eager.backend import eager_backend
from tandem.engine.backends.fused import fuse as fusing
from tandem.engine.backends.fused.fuse import fuse, is_fusible, replace_layers
from tandem.engine.backends.fused.layers import FusedAttention, FusedMlp
from tandem.engine.backends.selection import choose_backends
from tandem.engine.backends.trial import Reference
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.models.loading import LoadedModel, load_model
from tests.unit.engine.backends.by_hand import ByHand, some_tokens
from tests.unit.engine.tiny_models import _GROUPED, CONFIGS, hf, save_checkpoint

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
STEPS = [[some_tokens(100), some_tokens(9, 1), some_tokens(1, 2)], [some_tokens(1, 3), some_tokens(4, 4)]]
_BIASED: dict[str, Any] = {
    "llama with biases": lambda: hf.LlamaConfig(**_GROUPED, attention_bias=True, mlp_bias=True)
}


def _logits(by_hand: ByHand) -> Tensor:
    backend = eager_backend(by_hand.model, by_hand.arena)
    return torch.cat([part for tokens in STEPS for part in by_hand.step(backend, tokens)])


@pytest.mark.parametrize("family", [*FAMILIES, *_BIASED])
def test_fused_layers_equal_transformers_own(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, make in _BIASED.items():
        monkeypatch.setitem(CONFIGS, name, make)
    plain, fused = (ByHand(tmp_path, family) for _ in range(2))
    replace_layers(fused.model.module, [])
    expected, found = _logits(plain), _logits(fused)
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_pass_the_trial(family: str, dtype: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIGS[family]())
    model = load_model(tmp_path, dtype=dtype)
    assert fuse(model) is not None
    layer: Any = model.module.model.layers[0]  # type: ignore[union-attr, index]
    assert type(layer.self_attn) is FusedAttention
    assert type(layer.mlp) is FusedMlp


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    save_checkpoint(tmp_path, CONFIGS["qwen3"]())
    return load_model(tmp_path, dtype="float32")


def test_the_merged_weights_take_no_memory_of_their_own(model: LoadedModel) -> None:
    module: Any = model.module
    attention, mlp = module.model.layers[1].self_attn, module.model.layers[1].mlp
    replace_layers(module, [])
    for fused, parts in (
        (module.model.layers[1].self_attn, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (module.model.layers[1].mlp, (mlp.gate_proj, mlp.up_proj)),
    ):
        storage = fused.weight.untyped_storage()
        assert {part.weight.untyped_storage().data_ptr() for part in parts} == {storage.data_ptr()}
        assert storage.nbytes() == sum(part.weight.nbytes for part in parts)


def test_layers_that_fail_their_trial_are_put_back(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(model.module.named_modules())
    weights = {name: weight.clone() for name, weight in model.module.named_parameters()}

    class Wrong(FusedMlp):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) * 1.01

    monkeypatch.setattr(fusing, "FusedMlp", Wrong)
    assert fuse(model) is None
    after = dict(model.module.named_modules())
    assert set(after) == set(before)
    assert all(after[name] is module for name, module in before.items())
    assert all(torch.equal(weight, weights[name]) for name, weight in model.module.named_parameters())
    (record,) = [vars(record) for record in caplog.records if record.levelno == logging.WARNING]
    assert record["message"] == "layers are not fused"
    assert "times torch's own" in record["reason"]


@pytest.mark.parametrize("family", ["gemma2", "phi3", "olmo2", "mixtral", "gpt2", "cohere"])
def test_other_families_stay_as_they_are(family: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIGS[family]())
    assert not is_fusible(load_model(tmp_path, dtype="float32").module)


def test_a_layer_that_does_more_than_multiply_stays(model: LoadedModel) -> None:
    class Adapted(torch.nn.Linear):
        pass

    module: Any = model.module
    assert is_fusible(module)
    module.model.layers[0].mlp.up_proj.__class__ = Adapted
    assert not is_fusible(module)


def test_nothing_changes_on_a_cpu(model: LoadedModel) -> None:
    before = dict(model.module.named_modules())
    choose_backends(model, compile_mode="off")
    assert all(dict(model.module.named_modules())[name] is module for name, module in before.items())


def test_layers_are_fused_on_a_gpu(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, asked = Reference(model), []

    def fuse_nothing(model: LoadedModel) -> Reference:
        asked.append(model)
        return reference

    monkeypatch.setattr(selection, "fuse", fuse_nothing)
    on_gpu = replace(model, device=torch.device("cuda"))
    backends = choose_backends(on_gpu, compile_mode="off", enforce_eager=True)
    assert asked == [on_gpu]
    context = replace(backends, capture=without_capture).graph_context(
        KvArena(model.layers, 1, model.dtype, model.device), (), 64
    )
    assert context is not None
    assert context.reference is reference
