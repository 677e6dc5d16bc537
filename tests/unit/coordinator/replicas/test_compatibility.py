"""Every rule for models is broken once; matching models are accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.config import SpeculativeConfig
from tandem.config.speculative import MAX_CONFIGURED_TOKENS
from tandem.errors import IncompatibleModelsError
from tandem.model.types import Coverage, DenseRow, GenerationRequest, ModelInfo, StepProfile, Verification
from tandem.wire.target import answers_to_proto
from tandem_coordinator.replicas.compatibility import (
    MODEL_RULES,
    Deployment,
    Fleet,
    check_coverage,
    check_models,
    needs_mapping,
)
from tandem_coordinator.requests.validation import BoundedRequest
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tests.unit.coordinator.model_infos import DRAFT, NGRAM, TARGET, deployment

MODELS: list[tuple[str, Deployment, str]] = [
    ("drafting-method", deployment({"method": "ngram"}),
        "speculative_method is ngram; the draft service drafts by standalone: they must be the same"),
    ("drafting-method", deployment({"method": "draft_model"}, draft=NGRAM),
        "speculative_method is standalone; the draft service drafts by ngram: they must be the same"),
    ("drafting-method", deployment({"method": "suffix"}, draft=None),
        "speculative_method is suffix; it needs a draft service: name it with draft_address"),
    ("vocabulary-size",
        deployment(
            target=replace(TARGET, tokenizer_hash=""), draft=replace(DRAFT, vocabulary_size=9, maps_vocabularies=True)),
        "the draft small has a vocabulary of 9 tokens and the target big one of 100; they must be equal, since the "
        "target names no tokenizer"),
    ("tokenizer", deployment(draft=replace(DRAFT, tokenizer_hash="b" * 64)),
        "the draft small has another tokenizer (hash bbbbbbbbbbbb) than the target big (hash aaaaaaaaaaaa)"),
    ("tokenizer",
        deployment(
            {"vocabulary_mapping": "off"}, draft=replace(DRAFT, tokenizer_hash="b" * 64, maps_vocabularies=True)),
        "the draft small has another tokenizer (hash bbbbbbbbbbbb) than the target big (hash aaaaaaaaaaaa); they "
        "must be the same, since vocabulary_mapping is off"),
    ("shared-max-length", deployment(draft=replace(DRAFT, max_length=32)),
        "max_length is 32 for the draft small and 64 for the target big; they must share one"),
    ("configured-max-length", deployment({"max_length": 48}, draft=None),
        "max_length is 48 for the coordinator and 64 for the target big; they must share one"),
    ("tensor-parallel-size", deployment({"draft_tensor_parallel_size": 2}),
        "draft_tensor_parallel_size is 2; it must be 1: 1 or the target's"),
    ("tensor-parallel-size",
        deployment(draft=replace(DRAFT, tensor_parallel_size=2), target=replace(TARGET, tensor_parallel_size=4)),
        "draft_tensor_parallel_size is 2; it must be 1 or 4: 1 or the target's"),
    ("tensor-parallel-size",
        deployment({"draft_tensor_parallel_size": 4}, target=replace(TARGET, tensor_parallel_size=4)),
        "draft_tensor_parallel_size is 4; it must be what the draft small was started with, 1"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "subject", "sentence"), MODELS)
def test_models_that_break_a_rule_are_refused(rule: str, subject: Deployment, sentence: str) -> None:
    with pytest.raises(IncompatibleModelsError) as refusal:
        check_models(subject)
    assert str(refusal.value).startswith(sentence)


def test_every_rule_of_the_models_is_in_the_table() -> None:
    assert {rule.name for rule in MODEL_RULES} == {rule for rule, _, _ in MODELS}


@pytest.mark.parametrize("draft", [DRAFT, NGRAM, None])
def test_matching_models_are_accepted(draft: ModelInfo | None) -> None:
    check_models(deployment({"max_length": 64, "draft_tensor_parallel_size": 1}, draft=draft))


VOCABULARY_SIZE = 128_256  # Llama 3


@pytest.mark.parametrize("count", [32, 41, MAX_CONFIGURED_TOKENS])
def test_an_answer_to_the_longest_proposal_fits_into_a_message(count: int) -> None:
    settings = CoordinatorSettings(target_address="localhost:1", num_speculative_tokens=count)
    request = GenerationRequest("a", num_speculative_tokens=count, logprobs=0)
    BoundedRequest(request, settings, TARGET.max_length).check()
    # Configured lengths can grow while the channels exist.
    fleet = Fleet(SpeculativeConfig())
    assert fleet.judge_target(replace(TARGET, vocabulary_size=VOCABULARY_SIZE)) == ""
    row = DenseRow(np.zeros(VOCABULARY_SIZE, np.float32))
    answer = answers_to_proto([(1, Verification(0, (row,) * (count + 1)))])
    assert answer.ByteSize() <= fleet.message_limit_bytes


def test_drafts_of_one_target_draft_alike() -> None:
    fleet = Fleet(SpeculativeConfig())
    assert fleet.judge_target(TARGET) == fleet.judge_draft(DRAFT) == ""
    assert "they must draft alike" in fleet.judge_draft(NGRAM, has_others=True)


def test_targets_of_one_model_may_measure_different_steps() -> None:
    fleet = Fleet(SpeculativeConfig())
    for seconds in (0.001, 0.002):
        measured = replace(TARGET, step_profile=StepProfile({(1, 1): seconds}))
        assert fleet.judge_target(measured) == ""
    assert "dtype" in fleet.judge_target(replace(TARGET, dtype="other"))


@pytest.mark.parametrize(
    ("changes", "is_mapped"),
    [
        ({}, False),
        ({"vocabulary_size": 90}, False),  # one tokenizer, fewer rows of padding
        ({"vocabulary_size": 110}, False),  # more of them, which it does not propose
        ({"tokenizer_hash": "b" * 64, "maps_vocabularies": True}, True),
        ({"tokenizer_hash": "b" * 64, "vocabulary_size": 90, "maps_vocabularies": True}, True),
    ],
)
def test_drafts_with_other_ids_are_mapped(changes: dict[str, Any], is_mapped: bool) -> None:
    draft = replace(DRAFT, **changes)
    check_models(deployment(draft=draft))
    assert needs_mapping(draft, TARGET) is is_mapped


def test_a_mapping_that_keeps_little_is_refused() -> None:
    config = SpeculativeConfig()
    check_coverage(config, DRAFT, Coverage(300, 1000, 1000, 0.3))
    little = Coverage(256, 1000, 1000, 0.2)
    with pytest.raises(IncompatibleModelsError, match="20% of the tokens that the draft small writes"):
        check_coverage(config, DRAFT, little)
    check_coverage(SpeculativeConfig(vocabulary_mapping="slem"), DRAFT, little)
