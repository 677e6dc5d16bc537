"""The rules that speculative decoding must keep, each with a name and a sentence for whoever breaks it.

One table for each moment at which something new is known: the configuration alone; the models that the services serve,
when the coordinator meets them; a request. Every broken rule is reported at once. `docs/configuration.md` is made from
these tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.acceptance import configured_options
from coordinator.bounds import too_long
from coordinator.rejection.errors import RuleError
from coordinator.rejection.options import RejectionOptions
from coordinator.rejection.resolution import (
    logit_problems,
    named_strategy,
    relaxed_problems,
    synthetic_problems,
)
from coordinator.rejection.strategies import Strategy
from tandem.config import SpeculativeConfig
from tandem.config.methods import STANDALONE
from tandem.config.rule import Rule, at_least, broken, spelled, within
from tandem.errors import IncompatibleModelsError, InvalidRequestError
from tandem.types import (
    LEAST_REPETITION_PENALTY,
    LEAST_TEMPERATURE,
    MOST_REPETITION_PENALTY,
    GenerationRequest,
    ModelInfo,
    RowKind,
)

__all__ = [
    "COMBINATION_RULES",
    "MODEL_RULES",
    "REQUEST_RULES",
    "Deployment",
    "Rule",
    "TokenizedRequest",
    "check_models",
    "check_request",
]


@dataclass(frozen=True, slots=True)
class Deployment:
    """The models that are to work together, and how."""

    config: SpeculativeConfig
    target: ModelInfo
    draft: ModelInfo | None = None
    """None when the target works alone."""


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """A request, its prompt as token ids, and the models that are to complete it."""

    request: GenerationRequest
    prompt: Sequence[int]
    target: ModelInfo
    draft: ModelInfo | None = None
    """None when the target works alone."""
    options: RejectionOptions = field(default_factory=RejectionOptions)
    """What the acceptance rule is told: the configuration, and the request's own wishes."""

    @property
    def speculates_with_model(self) -> bool:
        """Whether a draft model of its own proposes tokens for this request."""
        return self.request.speculation and self.draft is not None and self.draft.has_model


def check_models(deployment: Deployment) -> None:
    """Refuse models that do not go together, or not with the configuration.

    Raises:
        IncompatibleModelsError: with a sentence for each broken rule.
    """
    if sentences := broken(MODEL_RULES, deployment):
        raise IncompatibleModelsError("; ".join(sentences))


def check_request(subject: TokenizedRequest) -> None:
    """Refuse a request that can never be completed as it is.

    Raises:
        InvalidRequestError: with a sentence for each broken rule.
    """
    if sentences := broken(REQUEST_RULES, subject):
        raise InvalidRequestError("; ".join(sentences))


# ---- the configuration alone: what options need of each other


def _combination(
    problems: Callable[[RejectionOptions, Strategy], Iterator[str]],
) -> Callable[[SpeculativeConfig], Iterator[str]]:
    """What an acceptance rule finds wrong with the options; nothing while the rule itself is unknown."""

    def check(config: SpeculativeConfig) -> Iterator[str]:
        options = configured_options(config)
        try:
            strategy = named_strategy(options)
        except RuleError:
            return
        yield from problems(options, strategy)

    return check


_STRATEGY = "rejection_sampling_strategy"

COMBINATION_RULES: tuple[Rule[SpeculativeConfig], ...] = (
    Rule(
        "relaxed-acceptance",
        "`use_relaxed_acceptance_for_thinking` goes with a rule that decides by probabilities, token by token.",
        _combination(relaxed_problems),
        (_STRATEGY, "use_relaxed_acceptance_for_thinking"),
    ),
    Rule(
        "synthetic-acceptance",
        "The rule synthetic has exactly one of its three options, in range; other rules have none of them.",
        _combination(synthetic_problems),
        (
            _STRATEGY,
            "num_speculative_tokens",
            "synthetic_acceptance_rate",
            "synthetic_acceptance_rates",
            "synthetic_acceptance_length",
        ),
    ),
    Rule(
        "logit-comparison",
        "The rule logit-comparison goes with a drafting method that has a model.",
        _combination(logit_problems),
        (_STRATEGY, "speculative_method"),
    ),
)
"""Beside `SpeculativeConfig.rules()`: what the acceptance rules need."""


# ---- the models that the services serve


def _drafting_method(deployment: Deployment) -> Iterator[str]:
    method, draft = deployment.config.speculative_method, deployment.draft
    if method is None:
        return
    if draft is None:
        yield f"speculative_method is {method}; it needs a draft service: name it with draft_address"
        return
    # A service that drafts without a model has the method for its architecture.
    served = STANDALONE if draft.has_model else draft.architecture
    if served != method:
        yield f"speculative_method is {method}; the draft service drafts by {served}: they must be the same"


def _vocabulary_size(deployment: Deployment) -> Iterator[str]:
    draft, target = deployment.draft, deployment.target
    if draft is None or not draft.has_model or draft.vocabulary_size == target.vocabulary_size:
        return
    yield (
        f"the draft {draft.name} has a vocabulary of {draft.vocabulary_size} tokens and the target {target.name} "
        f"one of {target.vocabulary_size}; they must be the same"
    )


def _tokenizer(deployment: Deployment) -> Iterator[str]:
    draft, target = deployment.draft, deployment.target
    if draft is None or not draft.has_model or draft.tokenizer_hash == target.tokenizer_hash:
        return
    yield (
        f"the draft {draft.name} has another tokenizer (hash {draft.tokenizer_hash[:12]}) than the target "
        f"{target.name} (hash {target.tokenizer_hash[:12]}); a token id must mean the same to both"
    )


def _shared_max_length(deployment: Deployment) -> Iterator[str]:
    draft, target = deployment.draft, deployment.target
    # 0: the service drafts whatever the length.
    if draft is None or draft.max_length in (0, target.max_length):
        return
    shared = min(draft.max_length, target.max_length)
    yield (
        f"max_length is {draft.max_length} for the draft {draft.name} and {target.max_length} for the target "
        f"{target.name}; they must share one: start both with --max-length {shared}"
    )


def _configured_max_length(deployment: Deployment) -> Iterator[str]:
    configured, target = deployment.config.max_length, deployment.target
    if configured not in (None, target.max_length):
        yield (
            f"max_length is {configured} for the coordinator and {target.max_length} for the target {target.name}; "
            f"they must share one: start all with --max-length {configured}, or leave it out here"
        )


def _tensor_parallel_size(deployment: Deployment) -> Iterator[str]:
    draft, target = deployment.draft, deployment.target
    if draft is None or not draft.has_model:
        return
    configured = deployment.config.draft_tensor_parallel_size
    wanted, allowed = configured or draft.tensor_parallel_size, {1, target.tensor_parallel_size}
    if wanted not in allowed:
        words = " or ".join(map(str, sorted(allowed)))
        yield f"draft_tensor_parallel_size is {wanted}; it must be {words}: 1 or the target's"
    elif wanted != draft.tensor_parallel_size:
        yield (
            f"draft_tensor_parallel_size is {wanted}; it must be what the draft {draft.name} was started with, "
            f"{draft.tensor_parallel_size}"
        )


MODEL_RULES: tuple[Rule[Deployment], ...] = (
    Rule(
        "drafting-method",
        "`speculative_method`, when set, is what the draft service drafts by.",
        _drafting_method,
    ),
    Rule("vocabulary-size", "Draft model and target have vocabularies of one size.", _vocabulary_size),
    Rule("tokenizer", "Draft model and target map the same tokens to the same ids.", _tokenizer),
    Rule("shared-max-length", "Draft and target share `max_length`.", _shared_max_length),
    Rule(
        "configured-max-length",
        "`max_length`, when the coordinator has it, is what the target serves.",
        _configured_max_length,
    ),
    Rule(
        "tensor-parallel-size",
        "`draft_tensor_parallel_size` is 1 or the target's, and the draft's own.",
        _tensor_parallel_size,
    ),
)


# ---- a request


def _prompt_not_empty(subject: TokenizedRequest) -> Iterator[str]:
    if not subject.prompt:
        yield "the prompt is empty; it must hold at least one token"


def _prompt_fits(subject: TokenizedRequest) -> Iterator[str]:
    return too_long(len(subject.prompt), subject.target.max_length)


def _known_ids(subject: TokenizedRequest) -> Iterator[str]:
    size = subject.target.vocabulary_size
    unknown = next((token_id for token_id in subject.prompt if not 0 <= token_id < size), None)
    if unknown is not None:
        yield f"the prompt holds token id {unknown}; ids must be in 0..{size - 1}"


def _stop_strings(subject: TokenizedRequest) -> Iterator[str]:
    if "" in subject.request.stop:
        yield "a stop string is empty; each must have a character"


def _rows_with_logprobs(subject: TokenizedRequest) -> Iterator[str]:
    kind = subject.request.row_kind
    if subject.request.logprobs is not None and kind not in (None, RowKind.DENSE):
        yield (
            f"row_kind is {kind.value} and logprobs are asked for; it must be dense: other rows do not tell the "
            "probability of every token"
        )


PENALTIES: Mapping[str, float] = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""The penalties of a request, each with the value that turns it off."""


def _penalties_without_draft_model(subject: TokenizedRequest) -> Iterator[str]:
    """The draft model proposes without them, so it would be wrong ever more often; MAX refuses this too."""
    if not subject.speculates_with_model:
        return
    for name, off in PENALTIES.items():
        value = getattr(subject.request, name)
        if value not in (None, off):
            yield (
                f"{name} is {spelled(value)}; with a separate draft model it must be {off:g}: use a draft service "
                "with speculative_method ngram or suffix, or turn speculation off for this request"
            )


def _logits_of_draft(subject: TokenizedRequest) -> Iterator[str]:
    """By what the draft says of itself: `speculative_method`, which another rule reads, may be left out."""
    draft = subject.draft
    if draft is None or draft.has_model or not subject.request.speculation:
        return
    if subject.request.temperature == 0.0:
        return  # greedy, whatever is named
    try:
        strategy = named_strategy(subject.options)
    except RuleError:
        return  # told when the rule is looked for
    if strategy.needs_token_logits:
        yield (
            f"the rule is {strategy.name} and the draft service drafts by {draft.architecture}, which has no logits; "
            "name another rejection_sampling_strategy, or turn speculation off for this request"
        )


def _request(subject: TokenizedRequest) -> GenerationRequest:
    return subject.request


MOST_LOGPROBS = 20
"""Most alternatives that are told of a position, as with OpenAI."""


def _temperature(subject: TokenizedRequest) -> Iterator[str]:
    temperature = subject.request.temperature
    if temperature in (None, 0.0) or LEAST_TEMPERATURE <= temperature < math.inf:
        return
    yield (
        f"temperature is {spelled(temperature)}; it must be 0 (greedy) or a finite number of at least "
        f"{LEAST_TEMPERATURE:g}"
    )


_SMALLEST = 5e-324

REQUEST_RULES: tuple[Rule[TokenizedRequest], ...] = (
    Rule("prompt-not-empty", "The prompt holds at least one token.", _prompt_not_empty),
    Rule("prompt-fits", "The prompt is shorter than `max_length`.", _prompt_fits),
    Rule("known-token-ids", "The prompt's ids are in the target's vocabulary.", _known_ids),
    at_least("max_tokens", 1, of=_request),
    Rule(
        "temperature",
        f"`temperature` is 0 (greedy) or a finite number of at least {LEAST_TEMPERATURE:g}.",
        _temperature,
    ),
    within("top_k", 0, 2**31 - 1, f"between 0 and {2**31 - 1} (0 keeps all)", of=_request),
    within("top_p", _SMALLEST, 1.0, "more than 0 and at most 1", of=_request),
    within("min_p", 0.0, 1.0, "between 0 and 1", of=_request),
    within(
        "repetition_penalty",
        LEAST_REPETITION_PENALTY,
        MOST_REPETITION_PENALTY,
        f"between {LEAST_REPETITION_PENALTY:g} and {MOST_REPETITION_PENALTY:g} (1 is off)",
        of=_request,
    ),
    within("frequency_penalty", -2.0, 2.0, "between -2 and 2 (0 is off)", of=_request),
    within("presence_penalty", -2.0, 2.0, "between -2 and 2 (0 is off)", of=_request),
    at_least("num_speculative_tokens", 1, of=_request),
    within("seed", -(2**63), 2**63 - 1, "a signed 64-bit integer", of=_request),
    within("logprobs", 0, MOST_LOGPROBS, f"between 0 and {MOST_LOGPROBS}", of=_request),
    Rule(
        "rows-with-logprobs",
        "Log probabilities come from dense rows.",
        _rows_with_logprobs,
        ("row_kind", "logprobs"),
    ),
    Rule("stop-strings", "No stop string is empty.", _stop_strings),
    Rule(
        "penalties-without-draft-model",
        "Penalties are off with a separate draft model; they work with ngram, suffix and without speculation.",
        _penalties_without_draft_model,
        tuple(PENALTIES),
    ),
    Rule(
        "logits-of-draft-model",
        "The rule logit-comparison goes with a draft service that has a model, and with any at `temperature` 0.",
        _logits_of_draft,
        (_STRATEGY,),
    ),
)
