"""The rules that speculative decoding must keep, each with a name and one sentence for whoever breaks it.

Every broken rule is reported at once. Against the models' descriptions they are checked when the coordinator meets its
services (it does not start when one is broken), against a request before anything is computed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem.errors import IncompatibleModelsError, InvalidRequestError
from tandem.types import GenerationRequest, ModelInfo

SubjectT = TypeVar("SubjectT")


@dataclass(frozen=True, slots=True)
class Rule(Generic[SubjectT]):
    """One thing that must hold."""

    name: str
    broken_by: Callable[[SubjectT], str | None]
    """The sentence that says how the subject breaks the rule; None when it keeps it."""


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A draft and the target it drafts for."""

    draft: ModelInfo
    target: ModelInfo


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """A request, its prompt as token ids, and the model that is to complete it."""

    request: GenerationRequest
    prompt: Sequence[int]
    target: ModelInfo


def check_models(pair: ModelPair) -> None:
    """Refuse a draft that does not go with the target.

    Raises:
        IncompatibleModelsError: with a sentence for each broken rule.
    """
    if sentences := _broken(MODEL_RULES, pair):
        raise IncompatibleModelsError("; ".join(sentences))


def check_request(subject: TokenizedRequest) -> None:
    """Refuse a request that can never be completed as it is.

    Raises:
        InvalidRequestError: with a sentence for each broken rule.
    """
    if sentences := _broken(REQUEST_RULES, subject):
        raise InvalidRequestError("; ".join(sentences))


def _broken(rules: Sequence[Rule[SubjectT]], subject: SubjectT) -> list[str]:
    return [sentence for rule in rules if (sentence := rule.broken_by(subject)) is not None]


# A drafting method without a model (ngram, suffix) has no vocabulary, tokenizer or length to compare.
_NONE = 0


def _vocabulary_size(pair: ModelPair) -> str | None:
    draft, target = pair.draft, pair.target
    if draft.vocabulary_size in (_NONE, target.vocabulary_size):
        return None
    return (
        f"the draft {draft.name} has a vocabulary of {draft.vocabulary_size} tokens and the target {target.name} "
        f"one of {target.vocabulary_size}; they must be the same"
    )


def _tokenizer(pair: ModelPair) -> str | None:
    draft, target = pair.draft, pair.target
    if draft.tokenizer_hash in ("", target.tokenizer_hash):
        return None
    return (
        f"the draft {draft.name} has another tokenizer (hash {draft.tokenizer_hash[:12]}) than the target "
        f"{target.name} (hash {target.tokenizer_hash[:12]}); a token id must mean the same to both"
    )


def _max_length(pair: ModelPair) -> str | None:
    draft, target = pair.draft, pair.target
    if draft.max_length in (_NONE, target.max_length):
        return None
    shared = min(draft.max_length, target.max_length)
    return (
        f"max_length is {draft.max_length} for the draft {draft.name} and {target.max_length} for the target "
        f"{target.name}; they must share one: start both with --max-length {shared}"
    )


def _prompt_not_empty(subject: TokenizedRequest) -> str | None:
    return None if subject.prompt else "the prompt is empty; it must hold at least one token"


def _prompt_fits(subject: TokenizedRequest) -> str | None:
    length, limit = len(subject.prompt), subject.target.max_length
    if length < limit:
        return None
    return f"the prompt has {length} tokens; it must have at most {limit - 1}, one less than max_length ({limit})"


def _known_ids(subject: TokenizedRequest) -> str | None:
    size = subject.target.vocabulary_size
    unknown = next((token_id for token_id in subject.prompt if not 0 <= token_id < size), None)
    if unknown is None:
        return None
    return f"the prompt holds token id {unknown}; ids must be in 0..{size - 1}"


def _at_least(field: str, least: float) -> Callable[[TokenizedRequest], str | None]:
    def check(subject: TokenizedRequest) -> str | None:
        value = getattr(subject.request, field)
        return (
            None
            if value is None or value >= least
            else f"{field} is {value:g}; it must be at least {least:g}"
        )

    return check


def _within(field: str, low: float, high: float, words: str) -> Callable[[TokenizedRequest], str | None]:
    def check(subject: TokenizedRequest) -> str | None:
        value = getattr(subject.request, field)
        return None if value is None or low <= value <= high else f"{field} is {value:g}; it must be {words}"

    return check


def _stop_strings(subject: TokenizedRequest) -> str | None:
    return "a stop string is empty; each must have a character" if "" in subject.request.stop else None


_SMALLEST_POSITIVE = 5e-324
_LARGEST = 1.7976931348623157e308

MODEL_RULES: tuple[Rule[ModelPair], ...] = (
    Rule("vocabulary-size", _vocabulary_size),
    Rule("tokenizer", _tokenizer),
    Rule("max-length", _max_length),
)

REQUEST_RULES: tuple[Rule[TokenizedRequest], ...] = (
    Rule("prompt-not-empty", _prompt_not_empty),
    Rule("prompt-fits", _prompt_fits),
    Rule("known-token-ids", _known_ids),
    Rule("max-tokens", _at_least("max_tokens", 1)),
    Rule("temperature", _within("temperature", 0.0, _LARGEST, "a finite number of at least 0 (0 is greedy)")),
    Rule("top-k", _at_least("top_k", 0)),
    Rule("top-p", _within("top_p", _SMALLEST_POSITIVE, 1.0, "more than 0 and at most 1")),
    Rule("min-p", _within("min_p", 0.0, 1.0, "between 0 and 1")),
    Rule("num-speculative-tokens", _at_least("num_speculative_tokens", 1)),
    Rule("stop-strings", _stop_strings),
)
