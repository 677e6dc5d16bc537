"""The drafting method of a service, and the model info of a draft without a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from draft_service.proposers.model_free import ModelFreeProposer, SequenceLimits
from draft_service.proposers.ngram import ngram_proposer
from draft_service.proposers.suffix import suffix_proposer
from draft_service.service import DraftService
from draft_service.settings import DraftSettings
from tandem.config.speculative import DraftingOptions
from tandem.errors import ConfigurationError
from tandem.settings import load_settings
from tests.paths import DEMO_EAGLE3


def settings(*arguments: str) -> DraftSettings:
    return load_settings(DraftSettings, arguments, "draft")


def test_the_default_method_is_a_draft_model() -> None:
    assert settings("--model", "somewhere").method == "standalone"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--model is missing; give it, or set TANDEM_DRAFT_MODEL"),
        (
            ["--method", "eagle3", "--model", "head"],
            "speculative_method is eagle3, which reads the target's hidden states and runs in its process",
        ),
        (
            ["--model", str(DEMO_EAGLE3)],
            "speculative_method is eagle3, which reads the target's hidden states",
        ),
        (["--method", "ngram", "--prompt-lookup-min", "0"], "prompt_lookup_min is 0; it must be at least 1"),
        (
            ["--method", "suffix", "--suffix-decoding-min-token-prob", "2"],
            "suffix_decoding_min_token_prob is 2; it must be between 0 and 1",
        ),
    ],
)
def test_invalid_options_are_refused_before_anything_is_loaded(
    arguments: Sequence[str], sentence: str
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        DraftService(settings(*arguments))
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_without_a_model_there_is_nothing_to_compare_with_the_targets(method: str) -> None:
    info = proposer(method, SequenceLimits()).model_info
    assert (info.name, info.architecture) == (method, method)
    assert (info.vocabulary_size, info.tokenizer_hash, info.max_length) == (0, "", 0)


def test_its_own_length_limit_is_reported() -> None:
    assert proposer("ngram", SequenceLimits(max_length=512)).model_info.max_length == 512


def proposer(method: str, limits: SequenceLimits) -> ModelFreeProposer:
    return (
        ngram_proposer(DraftingOptions(), limits)
        if method == "ngram"
        else suffix_proposer(DraftingOptions(), limits)
    )
