"""Layers compiled by torch.compile give the logits of the layers as they were, or are not used.

The compilers here need no compiler: one runs what torch has traced, others fail or are wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AttentionInterface

from tandem.engine.backends import selection
from tandem.engine.backends.eager.backend import eager_backend
from tandem.engine.backends.fused.compiled import compile_layers
from tandem.engine.backends.fused.fuse import fuse
from tandem.engine.backends.selection import choose_backends
from tandem.engine.backends.trial import Reference
from tandem.engine.models.attention import ATTENTION_NAME, attention_forward
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.errors import ConfigurationError
from target_service.settings import TargetSettings
from tests.unit.engine.backends.by_hand import ByHand, some_tokens
from tests.unit.engine.tiny_models import CONFIGS, save_checkpoint

STEPS = [[some_tokens(20), some_tokens(3, 1)], [some_tokens(1, 3)], [some_tokens(4, 4), some_tokens(1, 5)]]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    torch.compiler.reset()


class Compiler:
    """A backend of torch.compile that runs what was traced, and counts it."""

    def __init__(self, factor: float = 1.0) -> None:
        self.compiled = self.ran = 0
        self._factor = factor

    def __call__(self, traced: Any, _: object) -> Callable[..., Any]:
        self.compiled += 1

        def run(*inputs: Tensor) -> Any:
            self.ran += 1
            found = traced.forward(*inputs)
            return [each * self._factor if _is_floating(each) else each for each in found]

        return run


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def logits_of(by_hand: ByHand) -> Tensor:
    backend = eager_backend(by_hand.model, by_hand.arena)
    return torch.cat([part for tokens in STEPS for part in by_hand.step(backend, tokens)])


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.soak)])
def test_compiled_layers_equal_the_layers_as_they_were(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fused ones of a Llama, and those that are not fused. Both layers of the model run the same code."""
    plain, compiled = (ByHand(tmp_path, family) for _ in range(2))
    expected, compiler = logits_of(plain), Compiler()
    reference = fuse(compiled.model)
    assert (reference is not None) == (family == "llama")
    with caplog.at_level(logging.INFO):
        made = compile_layers(compiled.model, reference, compiler)  # type: ignore[arg-type]  # any callable will do
    assert made is not None
    assert reference in (None, made)
    assert "layers compiled" in caplog.messages
    traced, compiler.ran = compiler.compiled, 0
    found = logits_of(compiled)
    assert compiler.ran >= 2 * 2 * len(STEPS), (
        "a part before attention and one after it, of each layer and step"
    )
    assert compiler.compiled - traced <= traced, (
        "steps of other sizes need no code of their own, but for one token"
    )
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5


def fails(*_: object) -> Any:
    raise RuntimeError("no Triton here")


@pytest.mark.parametrize(
    ("compiler", "reason"), [(fails, "no Triton here"), (Compiler(factor=1.5), "times torch's own")]
)
def test_layers_that_do_not_compile_or_are_wrong_stay_as_they_were(
    compiler: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, by_hand = (ByHand(tmp_path, "llama") for _ in range(2))
    reference = fuse(by_hand.model)
    assert compile_layers(by_hand.model, reference, compiler) is reference
    (record,) = [vars(record) for record in caplog.records if record.levelno == logging.WARNING]
    assert record["message"] == "layers are not compiled"
    assert reason in record["reason"]
    expected, found = logits_of(plain), logits_of(by_hand)
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5
    assert AttentionInterface()[ATTENTION_NAME] is attention_forward  # type: ignore[no-untyped-call]


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    save_checkpoint(tmp_path, CONFIGS["llama"]())
    return load_model(tmp_path, dtype="float32")


def test_a_cpu_compiles_no_layers(model: LoadedModel) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        choose_backends(model, compile_mode="layers")
    assert str(refusal.value) == (
        "compile is layers, which is for a GPU, but the device is cpu; it should be auto, on or off."
    )


@pytest.mark.parametrize("mode", ["auto", "off", "layers"])
def test_a_gpu_compiles_fused_layers_where_that_is_asked_for(
    mode: str, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, asked = Reference(model), []

    def compile_nothing(model: LoadedModel, known: Reference | None) -> Reference | None:
        asked.append(known)
        return known

    monkeypatch.setattr(selection, "fuse", lambda _: reference)
    monkeypatch.setattr(selection, "compile_layers", compile_nothing)
    on_gpu = replace(model, device=torch.device("cuda"))
    backends = choose_backends(on_gpu, compile_mode=mode, enforce_eager=True)
    assert asked == ([reference] if mode == "layers" else [])
    assert backends.reference is reference


def test_the_option_takes_known_values_alone() -> None:
    assert TargetSettings(model=Path("any"), compile="layers").compile == "layers"
    with pytest.raises(ValidationError, match="'auto', 'on', 'off' or 'layers'"):
        TargetSettings(model=Path("any"), compile="inductor")
