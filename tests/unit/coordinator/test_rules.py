"""Every rule, what breaks it, and the exact sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from coordinator.rejection.options import RejectionOptions
from coordinator.rules import (
    MODEL_RULES,
    REQUEST_RULES,
    Deployment,
    TokenizedRequest,
    check_models,
    check_request,
)
from coordinator.settings import GuardedConfig
from tandem.config import SpeculativeConfig
from tandem.config.refusals import REFUSED_METHODS
from tandem.errors import IncompatibleModelsError, InvalidRequestError, status_code
from tandem.types import GenerationRequest, ModelInfo, RowKind

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

STRATEGIES = (
    "greedy, residual, block, strict, typical-acceptance, logit-comparison, synthetic, "
    "probabilistic, standard, typical"
)
INF = float("inf")

CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    (
        "section-name",
        {"section_name": "a"},
        "section_name is a; it needs config_file, the file that has the section",
    ),
    (
        "num-speculative-tokens",
        {"num_speculative_tokens": 0},
        "num_speculative_tokens is 0; it must be at least 1",
    ),
    (
        "most-configured-tokens",
        {"num_speculative_tokens": 129},
        "num_speculative_tokens is 129; it must be at most 128: an answer with a row for each must fit into a message",
    ),
    (
        "rejection-sampling-strategy",
        {"rejection_sampling_strategy": "hope"},
        f"rejection_sampling_strategy is 'hope'; it must be one of {STRATEGIES}",
    ),
    ("typical-epsilon", {"typical_epsilon": 1.5}, "typical_epsilon is 1.5; it must be between 0 and 1"),
    (
        "typical-delta",
        {"typical_delta": -0.1},
        "typical_delta is -0.1; it must be a finite number of at least 0",
    ),
    (
        "synthetic-acceptance-rate",
        {"synthetic_acceptance_rate": 1.1},
        "synthetic_acceptance_rate is 1.1; it must be between 0 and 1",
    ),
    ("relaxed-topk", {"relaxed_topk": 0}, "relaxed_topk is 0; it must be at least 1"),
    ("relaxed-delta", {"relaxed_delta": -1}, "relaxed_delta is -1.0; it must be between 0 and 1"),
    (
        "draft-top-k",
        {"draft_top_k": -1},
        "draft_top_k is -1; it must be at least 0 (0 leaves it to the draft service)",
    ),
    (
        "speculative-method",
        {"speculative_method": "guessing"},
        "speculative_method is guessing; it must be one of standalone, ngram, suffix",
    ),
    *(
        (
            "speculative-method",
            {"method": method},
            f"speculative_method is {method}, which is not available in this version: {reason}",
        )
        for method, reason in REFUSED_METHODS.items()
    ),
    (
        "model-free-method",
        {"method": "ngram", "model": "llama"},
        "draft_model_path is llama and speculative_method is ngram, which has no model; leave out draft_model_path, "
        "or set speculative_method to standalone",
    ),
    (
        "draft-devices",
        {"draft_devices": "gpu:0,1"},
        "draft_devices is gpu:0,1; it must be one device: cpu, gpu, gpu:N or cuda:N",
    ),
    (
        "prompt-lookup-min",
        {"prompt_lookup_min": 0, "prompt_lookup_max": 2},
        "prompt_lookup_min is 0; it must be at least 1",
    ),
    (
        "prompt-lookup-max",
        {"prompt_lookup_min": 1, "prompt_lookup_max": 0},
        "prompt_lookup_max is 0; it must be at least 1",
    ),
    (
        "prompt-lookup-range",
        {"prompt_lookup_min": 4, "prompt_lookup_max": 2},
        "prompt_lookup_min is 4; it must be at most prompt_lookup_max (2)",
    ),
    (
        "suffix-decoding-max-tree-depth",
        {"suffix_decoding_max_tree_depth": 0},
        "suffix_decoding_max_tree_depth is 0; it must be at least 1",
    ),
    (
        "suffix-decoding-max-cached-requests",
        {"suffix_decoding_max_cached_requests": -1},
        "suffix_decoding_max_cached_requests is -1; it must be at least 0",
    ),
    (
        "suffix-decoding-max-spec-factor",
        {"suffix_decoding_max_spec_factor": INF},
        "suffix_decoding_max_spec_factor is inf; it must be a finite number of at least 0",
    ),
    (
        "suffix-decoding-min-token-prob",
        {"suffix_decoding_min_token_prob": float("nan")},
        "suffix_decoding_min_token_prob is nan; it must be between 0 and 1",
    ),
    ("max-length", {"max_model_len": 0}, "max_length is 0; it must be at least 1"),
    (
        "device-memory-utilization",
        {"device_memory_utilization": 0},
        "device_memory_utilization is 0.0; it must be above 0 and at most 1",
    ),
    (
        "draft-tensor-parallel-size",
        {"draft_tensor_parallel_size": 0},
        "draft_tensor_parallel_size is 0; it must be at least 1",
    ),
    (
        "max-num-steps",
        {"max_num_steps": 8},
        "max_num_steps is 8; it must be 1: each step of the target verifies a proposal, and its result decides on the "
        "next",
    ),
    (
        "enable-echo",
        {"enable_echo": True},
        "enable_echo is true; it must be false: the prompt is not streamed back; put it before the completion",
    ),
    (
        "enable-structured-output",
        {"enable_structured_output": True},
        "enable_structured_output is true; it must be false: the draft would have to keep to the same grammar; "
        "check the completion after it ends",
    ),
    (
        "relaxed-acceptance",
        {"use_relaxed_acceptance_for_thinking": True, "rejection_sampling_strategy": "strict"},
        "use_relaxed_acceptance_for_thinking is on and the rule is strict; it needs one that decides by probabilities, "
        "token by token: residual, typical-acceptance, logit-comparison",
    ),
    (
        "synthetic-acceptance",
        {"rejection_sample_method": "synthetic"},
        "the rule synthetic needs exactly one of synthetic_acceptance_rate, synthetic_acceptance_rates, "
        "synthetic_acceptance_length; none of them is set",
    ),
    (
        "synthetic-acceptance",
        {"rejection_sample_method": "strict", "synthetic_acceptance_length": 2},
        "synthetic_acceptance_length is set and the rule is strict; it needs the rule synthetic",
    ),
    (
        "synthetic-acceptance",
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]},
        "synthetic_acceptance_rates has 1 entries; it must have 2, one for each token",
    ),
    (
        "synthetic-acceptance",
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 4},
        "synthetic_acceptance_length is 4.0; it must be between 1 and 3",
    ),
    (
        "logit-comparison",
        {"rejection_sampling_strategy": "logit-comparison", "speculative_method": "suffix"},
        "the rule is logit-comparison and speculative_method is suffix; it needs a draft that has logits",
    ),
]


@pytest.mark.parametrize(("rule", "options", "sentence"), CONFIGS)
def test_a_configuration_that_breaks_a_rule(rule: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        GuardedConfig(**options)
    assert [detail["msg"] for detail in refusal.value.errors()] == [sentence]


def test_every_rule_of_the_configuration_is_in_the_table() -> None:
    assert {rule.name for rule in GuardedConfig.rules()} == {rule for rule, _, _ in CONFIGS}


def deployment(
    config: dict[str, Any] | None = None, target: ModelInfo = TARGET, draft: ModelInfo | None = DRAFT
) -> Deployment:
    return Deployment(SpeculativeConfig(**config or {}), target, draft)


MODELS: list[tuple[str, Deployment, str]] = [
    (
        "drafting-method",
        deployment({"method": "ngram"}),
        "speculative_method is ngram; the draft service drafts by standalone: they must be the same",
    ),
    (
        "drafting-method",
        deployment({"method": "draft_model"}, draft=NGRAM),
        "speculative_method is standalone; the draft service drafts by ngram: they must be the same",
    ),
    (
        "drafting-method",
        deployment({"method": "suffix"}, draft=None),
        "speculative_method is suffix; it needs a draft service: name it with draft_address",
    ),
    (
        "vocabulary-size",
        deployment(draft=replace(DRAFT, vocabulary_size=99)),
        "the draft small has a vocabulary of 99 tokens and the target big one of 100; they must be the same",
    ),
    (
        "tokenizer",
        deployment(draft=replace(DRAFT, tokenizer_hash="b" * 64)),
        "the draft small has another tokenizer (hash bbbbbbbbbbbb) than the target big (hash aaaaaaaaaaaa); a token id "
        "must mean the same to both",
    ),
    (
        "shared-max-length",
        deployment(draft=replace(DRAFT, max_length=32)),
        "max_length is 32 for the draft small and 64 for the target big; they must share one: start both with "
        "--max-length 32",
    ),
    (
        "configured-max-length",
        deployment({"max_length": 48}, draft=None),
        "max_length is 48 for the coordinator and 64 for the target big; they must share one: start all with "
        "--max-length 48, or leave it out here",
    ),
    (
        "tensor-parallel-size",
        deployment({"draft_tensor_parallel_size": 2}),
        "draft_tensor_parallel_size is 2; it must be 1: 1 or the target's",
    ),
    (
        "tensor-parallel-size",
        deployment(
            draft=replace(DRAFT, tensor_parallel_size=2), target=replace(TARGET, tensor_parallel_size=4)
        ),
        "draft_tensor_parallel_size is 2; it must be 1 or 4: 1 or the target's",
    ),
    (
        "tensor-parallel-size",
        deployment({"draft_tensor_parallel_size": 4}, target=replace(TARGET, tensor_parallel_size=4)),
        "draft_tensor_parallel_size is 4; it must be what the draft small was started with, 1",
    ),
]


@pytest.mark.parametrize(("rule", "subject", "sentence"), MODELS)
def test_models_that_break_a_rule(rule: str, subject: Deployment, sentence: str) -> None:
    with pytest.raises(IncompatibleModelsError) as refusal:
        check_models(subject)
    assert str(refusal.value) == sentence


def test_every_rule_of_the_models_is_in_the_table() -> None:
    assert {rule.name for rule in MODEL_RULES} == {rule for rule, _, _ in MODELS}


@pytest.mark.parametrize("draft", [DRAFT, NGRAM, None])
def test_models_that_go_together(draft: ModelInfo | None) -> None:
    check_models(deployment({"max_length": 64, "draft_tensor_parallel_size": 1}, draft=draft))


def request(
    prompt: tuple[int, ...] = (1, 2),
    draft: ModelInfo | None = DRAFT,
    rule: str | None = None,
    **fields: Any,
) -> TokenizedRequest:
    options = RejectionOptions(rejection_sampling_strategy=rule)
    return TokenizedRequest(GenerationRequest(prompt, **fields), prompt, TARGET, draft, options)


WITH_DRAFT_MODEL = (
    "use a draft service with speculative_method ngram or suffix, or turn speculation off for this request"
)

REQUESTS: list[tuple[str, TokenizedRequest, str]] = [
    ("prompt-not-empty", request(()), "the prompt is empty; it must hold at least one token"),
    (
        "prompt-fits",
        request((1,) * 64),
        "the prompt has 64 tokens; it must have at most 63, one less than max_length (64)",
    ),
    ("known-token-ids", request((1, 100)), "the prompt holds token id 100; ids must be in 0..99"),
    ("max-tokens", request(max_tokens=0), "max_tokens is 0; it must be at least 1"),
    (
        "temperature",
        request(temperature=INF),
        "temperature is inf; it must be 0 (greedy) or a finite number of at least 0.0001",
    ),
    ("top-k", request(top_k=-1), "top_k is -1; it must be between 0 and 2147483647 (0 keeps all)"),
    ("top-p", request(top_p=0.0), "top_p is 0.0; it must be more than 0 and at most 1"),
    ("min-p", request(min_p=1.5), "min_p is 1.5; it must be between 0 and 1"),
    (
        "repetition-penalty",
        request(repetition_penalty=0.0, draft=None),
        "repetition_penalty is 0.0; it must be between 0.01 and 100 (1 is off)",
    ),
    (
        "frequency-penalty",
        request(frequency_penalty=2.5, draft=NGRAM),
        "frequency_penalty is 2.5; it must be between -2 and 2 (0 is off)",
    ),
    (
        "presence-penalty",
        request(presence_penalty=-3.0, draft=NGRAM),
        "presence_penalty is -3.0; it must be between -2 and 2 (0 is off)",
    ),
    (
        "num-speculative-tokens",
        request(num_speculative_tokens=0),
        "num_speculative_tokens is 0; it must be at least 1",
    ),
    ("seed", request(seed=2**63), f"seed is {2**63}; it must be a signed 64-bit integer"),
    ("logprobs", request(logprobs=21), "logprobs is 21; it must be between 0 and 20"),
    (
        "rows-with-logprobs",
        request(logprobs=0, row_kind=RowKind.SUPPORT),
        "row_kind is support and logprobs are asked for; it must be dense: other rows do not tell the probability of "
        "every token",
    ),
    ("stop-strings", request(stop=("",)), "a stop string is empty; each must have a character"),
    (
        "penalties-without-draft-model",
        request(repetition_penalty=1.3),
        f"repetition_penalty is 1.3; with a separate draft model it must be 1: {WITH_DRAFT_MODEL}",
    ),
    (
        "penalties-without-draft-model",
        request(frequency_penalty=0.5, presence_penalty=-1.0),
        f"frequency_penalty is 0.5; with a separate draft model it must be 0: {WITH_DRAFT_MODEL}; "
        f"presence_penalty is -1.0; with a separate draft model it must be 0: {WITH_DRAFT_MODEL}",
    ),
    (
        "logits-of-draft-model",
        request(draft=NGRAM, rule="logit-comparison"),
        "the rule is logit-comparison and the draft service drafts by ngram, which has no logits; name another "
        "rejection_sampling_strategy, or turn speculation off for this request",
    ),
]


@pytest.mark.parametrize(("rule", "subject", "sentence"), REQUESTS)
def test_a_request_that_breaks_a_rule(rule: str, subject: TokenizedRequest, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        check_request(subject)
    assert str(refusal.value) == sentence
    assert status_code(refusal.value) is grpc.StatusCode.INVALID_ARGUMENT


def test_every_rule_of_a_request_is_in_the_table() -> None:
    assert {rule.name for rule in REQUEST_RULES} == {rule for rule, _, _ in REQUESTS}


@pytest.mark.parametrize(
    "subject",
    [
        request(repetition_penalty=1.3, frequency_penalty=1.0, presence_penalty=1.0, draft=NGRAM),
        request(repetition_penalty=1.3, draft=None),
        request(repetition_penalty=1.3, speculation=False),
        request(repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0),
    ],
)
def test_penalties_work_without_a_draft_model(subject: TokenizedRequest) -> None:
    check_request(subject)


@pytest.mark.parametrize(
    "subject",
    [
        request(draft=NGRAM, rule="residual"),
        request(draft=NGRAM, rule="logit-comparison", temperature=0.0),
        request(draft=NGRAM, rule="logit-comparison", speculation=False),
        request(draft=None, rule="logit-comparison"),
        request(rule="logit-comparison"),
    ],
)
def test_logits_are_missed_only_where_they_are_compared(subject: TokenizedRequest) -> None:
    check_request(subject)


def test_every_broken_rule_is_told_at_once() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        check_request(request((), max_tokens=0, top_p=2.0))
    assert str(refusal.value) == (
        "the prompt is empty; it must hold at least one token; max_tokens is 0; it must be at least 1; "
        "top_p is 2.0; it must be more than 0 and at most 1"
    )
    with pytest.raises(IncompatibleModelsError) as refused:
        check_models(deployment(draft=replace(DRAFT, vocabulary_size=99, max_length=32)))
    assert "vocabulary" in str(refused.value)
    assert "max_length" in str(refused.value)


def test_names_are_unique_within_their_table() -> None:
    for rules in (GuardedConfig.rules(), MODEL_RULES, REQUEST_RULES):
        names = [rule.name for rule in rules]
        assert len(names) == len(set(names))
