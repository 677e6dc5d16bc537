"""Models for tests of rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.config import SpeculativeConfig
from tandem.model.types import ModelInfo
from tandem_coordinator.replicas.compatibility import Deployment

TARGET = ModelInfo(
    name="big",
    architecture="LlamaForCausalLM",
    vocabulary_size=100,
    tokenizer_hash="a" * 64,
    max_length=64,
    dtype="float32",
)
DRAFT = replace(TARGET, name="small")
NGRAM = ModelInfo("ngram", "ngram", vocabulary_size=0, tokenizer_hash="", max_length=0, dtype="")
INF = float("inf")


def deployment(
    config: dict[str, Any] | None = None, target: ModelInfo = TARGET, draft: ModelInfo | None = DRAFT
) -> Deployment:
    return Deployment(SpeculativeConfig(**config or {}), target, draft)
