"""A plan says which requests draft ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.rejection import RejectionOptions, resolve
from coordinator.requests.plan import can_draft_ahead
from tandem.types import ModelInfo
from tests.unit.coordinator.rejection.builders import SAMPLED

DRAFT = ModelInfo("draft", "LlamaForCausalLM", 1024, "hash", 2048, "float32")


@pytest.mark.parametrize(
    ("name", "can"),
    [
        ("greedy", True),
        ("strict", True),
        ("residual", True),
        ("block", True),
        ("typical-acceptance", True),
        ("logit-comparison", False),
    ],
)
def test_a_rule_that_reads_the_drafts_logits_drafts_nothing_ahead(name: str, can: bool) -> None:
    rule = resolve(RejectionOptions(rejection_sampling_strategy=name), SAMPLED)
    assert can_draft_ahead(rule, DRAFT) is can


def test_a_draft_without_a_model_drafts_nothing_ahead() -> None:
    rule = resolve(RejectionOptions(rejection_sampling_strategy="greedy"), SAMPLED)
    assert not can_draft_ahead(rule, replace(DRAFT, vocabulary_size=0))
    assert not can_draft_ahead(rule, None)
