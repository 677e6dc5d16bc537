"""Every rule for requests is broken once: the sentence names the field, its value and the requirement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest

from tandem.acceptance.strategies import STRATEGIES, resolve
from tandem.config import SpeculativeConfig
from tandem.errors import InvalidRequestError, status_code
from tandem.model.types import GenerationRequest, Grammar, GrammarKind, ModelInfo, RowKind
from tandem_coordinator.requests.plan import can_draft_ahead
from tandem_coordinator.requests.validation import REQUEST_RULES, TokenizedRequest
from tests.unit.coordinator.model_infos import DRAFT, INF, NGRAM, TARGET
from tests.unit.tandem.acceptance.builders import SAMPLED

NAN = float("nan")


def request(
    prompt: tuple[int, ...] = (1, 2),
    draft: ModelInfo | None = DRAFT,
    rule: str | None = None,
    target: ModelInfo = TARGET,
    **fields: Any,
) -> TokenizedRequest:
    options = SpeculativeConfig(rejection_sampling_strategy=rule)
    return TokenizedRequest(GenerationRequest(prompt, **fields), prompt, target, draft, options)


WITH_DRAFT_MODEL = (
    "use a draft service with speculative_method ngram or suffix, turn speculation off for this request, or start the "
    "coordinator with --draft-model-penalties draft"
)
ANY_OBJECT = Grammar(GrammarKind.JSON_OBJECT)
REQUESTS: list[tuple[str, TokenizedRequest, str]] = [
    ("prompt-fits", request(()), "the prompt is empty; it must hold at least one token"),
    ("prompt-fits", request((1,) * 64), "the prompt has 64 tokens; it must have at most 63"),
    ("known-token-ids", request((1, 100)), "the prompt holds token id 100, out of vocabulary; ids must be in 0..99"),
    ("known-token-ids", request(delivered_token_ids=(100,)),
        "delivered_token_ids holds token id 100, out of vocabulary; ids must be in 0..99"),
    ("max-tokens", request(max_tokens=0), "max_tokens is 0; it must be at least 1"),
    ("max-tokens", request(max_tokens=-1, echo=True), "max_tokens is -1; it must be at least 0"),
    ("echo", replace(request(echo=True, max_tokens=2), echo_without_draft=True),
        "echo is true and a draft proposes; it must be false"),
    ("echo", request(echo=True, delivered_token_ids=(5,)), "echo is true and an earlier stream has delivered tokens"),
    ("prompt-logprobs", request(prompt_logprobs=-1), "prompt_logprobs is -1; it must be between 0 and 20"),
    ("priority", request(priority=-(2**31) - 1), "priority is -2147483649; it must be a signed 32-bit integer"),
    ("truncation", request(truncate_prompt_tokens=-2), "truncate_prompt_tokens is -2; it must be -1, or from 1 to 63"),
    ("allowed-tokens", request(allowed_token_ids=(1, 100)),
        "allowed_token_ids holds token id 100, out of vocabulary; ids must be in 0..99"),
    ("allowed-tokens", request(bad_words=(" ",)), "bad_words holds an empty text; each must have a character"),
    ("allowed-tokens", replace(request(allowed_token_ids=(5,), bad_words=("a",)), forbidden_sequences=((4, 5),)),
        "allowed_token_ids and bad_words are set so that no token may be left; some allowed token must be the last"),
    ("allowed-tokens", request(allowed_token_ids=(5,), grammar=ANY_OBJECT),
        "allowed_token_ids is set and structured output is asked for; one of them must be left out"),
    ("allowed-tokens", request(bad_words=("a",), rule="synthetic"),
        "bad_words is set and the rule is synthetic; name another rejection_sampling_strategy"),
    ("temperature", request(temperature=INF),
        "temperature is inf; it must be a finite number of at least 0 (below 0.0001 it counts as 0: greedy)"),
    ("top-k", request(top_k=-1), "top_k is -1; it must be between 0 and 2147483647 (0 keeps all)"),
    ("top-p", request(top_p=0.0), "top_p is 0.0; it must be more than 0 and at most 1"),
    ("min-p", request(min_p=1.5), "min_p is 1.5; it must be between 0 and 1"),
    ("repetition-penalty", request(repetition_penalty=0.0, draft=None),
        "repetition_penalty is 0.0; it must be between 0.01 and 100 (1 is off)"),
    ("frequency-penalty", request(frequency_penalty=2.5, draft=NGRAM),
        "frequency_penalty is 2.5; it must be between -2 and 2 (0 is off)"),
    ("presence-penalty", request(presence_penalty=-3.0, draft=NGRAM),
        "presence_penalty is -3.0; it must be between -2 and 2 (0 is off)"),
    ("num-speculative-tokens", request(num_speculative_tokens=0),
        "num_speculative_tokens is 0; it must be at least 1"),
    ("seed", request(seed=2**63), f"seed is {2**63}; it must be a signed 64-bit integer"),
    ("logprobs", request(logprobs=21), "logprobs is 21; it must be between 0 and 20"),
    ("stops", request(stop=("",)), "stop holds an empty string; each must have a character"),
    ("stops", request(stop_token_ids=(1, 100)),
        "stop_token_ids is for token id 100, out of vocabulary; ids must be in 0..99"),
    ("logit-bias", request(logit_bias={-1: 1.0}),
        "logit_bias is for token id -1, out of vocabulary; ids must be in 0..99"),
    ("logit-bias", request(logit_bias={5: 100.5}),
        "logit_bias is 100.5 for token id 5; it must be between -100 and 100"),
    ("logit-bias", request(logit_bias={5: NAN}), "logit_bias is nan for token id 5; it must be between -100 and 100"),
    ("min-tokens", request(min_tokens=-1), "min_tokens is -1; it must be at least 0"),
    ("min-tokens-fit", request(min_tokens=5, max_tokens=4), "min_tokens is 5; it must be at most max_tokens, 4"),
    ("min-tokens-fit", request(min_tokens=63, max_tokens=70),
        "min_tokens is 63; it must be at most the room that max_length (64) leaves after the prompt, 62"),
    ("min-tokens-fit", request(min_tokens=1, stop_token_ids=tuple(range(100))),
        "min_tokens is 1; it must be 0, since every token ends the completion"),
    ("max-tokens-fit", request(max_tokens=63, max_tokens_must_fit=True),
        "max_tokens is 63; it must be at most 62: max_length is 64, and the prompt has 2 tokens"),
    ("penalties-without-draft-model", request(repetition_penalty=1.3),
        f"repetition_penalty is 1.3; with a separate draft model it must be 1: {WITH_DRAFT_MODEL}"),
    (
        "penalties-without-draft-model",
        request(frequency_penalty=0.5, presence_penalty=-1.0),
        f"frequency_penalty is 0.5; with a separate draft model it must be 0: {WITH_DRAFT_MODEL}; "
        f"presence_penalty is -1.0; with a separate draft model it must be 0: {WITH_DRAFT_MODEL}",
    ),
    ("grammar-ends-the-text", request(grammar=ANY_OBJECT, ignore_eos=True),
        "ignore_eos is true and structured output is asked for; it must be false: the text ends with its form"),
    ("grammar-ends-the-text", request(grammar=ANY_OBJECT, min_tokens=1),
        "min_tokens is 1 and structured output is asked for; it must be 0: the text ends with its form"),
    ("grammar-ends-the-text", request(grammar=ANY_OBJECT, rule="synthetic"),
        "the rule is synthetic and structured output is asked for; name another rejection_sampling_strategy"),
    ("logits-of-draft-model", request(draft=NGRAM, rule="logit-comparison"),
        "the rule is logit-comparison and the draft service drafts by ngram, which has no logits"),
    ("sampled-logprobs", request(sampled_logprobs=True, row_kind=RowKind.DENSE),
        "sampled_logprobs is true and row_kind is dense; row_kind must be left out, or token or support"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "subject", "sentence"), REQUESTS)
def test_a_request_that_breaks_a_rule_is_refused(rule: str, subject: TokenizedRequest, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        subject.check()
    assert str(refusal.value).startswith(sentence)
    assert status_code(refusal.value) is grpc.StatusCode.INVALID_ARGUMENT


def test_every_rule_of_a_request_is_in_the_table() -> None:
    assert {rule.name for rule in REQUEST_RULES} == {rule for rule, _, _ in REQUESTS}


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
def test_draft_logits_are_required_only_by_logit_comparison(subject: TokenizedRequest) -> None:
    subject.check()


@pytest.mark.parametrize("name", [each.name for each in STRATEGIES if each.name != "synthetic"])
def test_a_rule_that_reads_the_drafts_logits_drafts_nothing_ahead(name: str) -> None:
    rule = resolve(SpeculativeConfig(rejection_sampling_strategy=name), SAMPLED)
    assert can_draft_ahead(rule, DRAFT) is (name != "logit-comparison")
    assert not can_draft_ahead(rule, replace(DRAFT, vocabulary_size=0)), "it has no model"
    assert not can_draft_ahead(rule, None)
