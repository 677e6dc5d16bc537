"""Refuses requests that ask for too much or for what cannot work: all broken rules in one answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from tandem.acceptance.strategies import SYNTHETIC, checked_strategy, for_draft
from tandem.config import SpeculativeConfig
from tandem.config.names import OWN_METHODS, canonical_name
from tandem.config.rule import Rule, broken, refuse, rule, spell, within
from tandem.errors import plural
from tandem.model.sampling.ranges import request_sampling_rules
from tandem.model.types import MAX_LOGIT_BIAS, GenerationRequest, LogitAdjustments, ModelInfo, RowKind
from tandem.serving.scopes import MAX_SALT_LENGTH
from tandem_coordinator.settings.coordinator import MAX_SPECULATIVE_TOKENS, CoordinatorSettings, RequestBounds


@dataclass(frozen=True, slots=True)
class BoundedRequest:
    """A request as it arrived, and its bounds."""

    request: GenerationRequest
    bounds: CoordinatorSettings
    max_length: int
    """The target's."""
    max_text_bytes: int | None = None
    """Bytes beyond which any text has more than `max_length` tokens; None where there is no such bound."""
    draft: ModelInfo | None = None
    """Its method may decide the coordinator's own rule. None when the target works alone."""

    def check(self) -> None:
        """Refuse it if it asks for too much."""
        refuse(broken(BOUND_RULES, self))


def too_much_text(text: str, bounds: RequestBounds, max_text_bytes: int | None = None) -> Iterator[str]:
    """Yield the reason why a prompt's text is too large to be tokenized, if it is: too many bytes, or more than
    `max_length` tokens can hold."""
    # Lone surrogates cannot travel over the wire, but occur in Python.
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > bounds.max_prompt_bytes:
        yield f"the prompt has {plural(size, 'byte')}; it must be at most {bounds.max_prompt_bytes}"
    elif max_text_bytes is not None and size > max_text_bytes:
        yield (
            f"the prompt has {plural(size, 'byte')}; it must be at most {max_text_bytes}, since longer texts have "
            "more tokens than max_length whatever they say"
        )


def too_long(token_count: int, max_length: int) -> Iterator[str]:
    """Yield the reason why a prompt of so many tokens is too long; nothing when it fits."""
    if token_count >= max_length:
        yield (
            f"the prompt has {plural(token_count, 'token')}; it must have at most {max_length - 1}, "
            f"one less than max_length ({max_length})"
        )


MAX_BAD_WORDS = 256
"""Each makes up to two sequences of tokens, which are compared with the end of the completion at each position."""


def too_many(request: Any, bounds: RequestBounds) -> Iterator[str]:
    """Yield a sentence for each list with too many items, of a request or of the protocol's GenerateRequest, whose
    fields have the same names."""
    for sentence, count, maximum in (
        ("stop has {} strings", len(request.stop), bounds.max_stop_strings),
        (
            "stop holds a string of {} characters",
            max(map(len, request.stop), default=0),
            bounds.max_stop_length,
        ),
        ("logit_bias names {} token ids", len(request.logit_bias), bounds.max_logit_biases),
        ("stop_token_ids has {} ids", len(request.stop_token_ids), bounds.max_stop_token_ids),
        ("allowed_token_ids has {} ids", len(request.allowed_token_ids), bounds.max_logit_biases),
        ("bad_words has {} texts", len(request.bad_words), MAX_BAD_WORDS),
        (
            "bad_words holds a text of {} characters",
            max(map(len, request.bad_words), default=0),
            bounds.max_stop_length,
        ),
    ):
        if count > maximum:
            yield f"{sentence.format(count)}; it must be at most {maximum}"


@rule(
    "The prompt's text has at most `max_prompt_bytes`, and no more than `max_length` tokens can hold; token ids are "
    "fewer than `max_length`."
)
def _prompt_size(subject: BoundedRequest) -> Iterator[str]:
    """Token ids take some 36 bytes each while they wait; how many a text has is known once it has its place."""
    request = subject.request
    prompt = request.prompt
    is_shortened = request.truncate_prompt_tokens is not None
    if isinstance(prompt, str):
        return too_much_text(prompt, subject.bounds, None if is_shortened else subject.max_text_bytes)
    return iter(()) if is_shortened else too_long(len(prompt), subject.max_length)


@rule(
    "There are at most `max_stop_strings`, each of at most `max_stop_length` characters, at most `max_logit_biases` "
    "ids in `logit_bias` and in `allowed_token_ids`, at most `max_stop_token_ids`, and at most "
    f"{MAX_BAD_WORDS} `bad_words` as long as stop strings."
)
def _counts(subject: BoundedRequest) -> Iterator[str]:
    return too_many(subject.request, subject.bounds)


@rule("Structured output is allowed (`structured_output`), and its source has at most `max_grammar_bytes`.")
def _structured_output(subject: BoundedRequest) -> Iterator[str]:
    grammar = subject.request.grammar
    bounds = subject.bounds
    if grammar is None:
        return
    if bounds.structured_output == "refuse":
        yield (
            f"a {grammar.kind.value} is asked for and structured_output is refuse; start the coordinator with "
            "--structured-output allow, or leave it out"
        )
    size = len(grammar.source.encode("utf-8", "surrogatepass"))
    if size > bounds.max_grammar_bytes:
        yield (
            f"the structured output's {grammar.kind.value} has {plural(size, 'byte')}; it must be at most "
            f"{bounds.max_grammar_bytes}"
        )


@rule(f"`cache_salt` has 1 to {MAX_SALT_LENGTH} characters.")
def _cache_salt(subject: BoundedRequest) -> Iterator[str]:
    salt = subject.request.cache_salt
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_LENGTH:
        yield f"cache_salt has {plural(len(salt), 'character')}; it must have 1 to {MAX_SALT_LENGTH}"


@rule(f"`num_speculative_tokens` is at most {MAX_SPECULATIVE_TOKENS}, or what the coordinator is set to.")
def _most_speculative_tokens(subject: BoundedRequest) -> Iterator[str]:
    count = subject.request.num_speculative_tokens
    most = max(MAX_SPECULATIVE_TOKENS, subject.bounds.num_speculative_tokens)
    if count is not None and count > most:
        yield f"num_speculative_tokens is {count}; it must be at most {most}"


@rule(
    "A request names a rule of `allowed_rejection_sampling_strategies`, or the one that the coordinator is set to."
)
def _allowed_rule(subject: BoundedRequest) -> Iterator[str]:
    named = subject.request.rejection_sampling_strategy
    if named is None:
        return
    own = canonical_name(for_draft(subject.bounds, subject.draft).acceptance_rule)
    allowed = dict.fromkeys((*subject.bounds.allowed_rejection_sampling_strategies, own))
    if canonical_name(named) not in allowed:
        yield f"rejection_sampling_strategy is {named!r}; this coordinator allows {', '.join(allowed)}"


BOUND_RULES: tuple[Rule[BoundedRequest], ...] = (
    _prompt_size,
    _counts,
    _structured_output,
    _cache_salt,
    _most_speculative_tokens,
    _allowed_rule,
)


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """A request, its prompt as token ids, and the models that complete it."""

    request: GenerationRequest
    prompt: Sequence[int]
    target: ModelInfo
    draft: ModelInfo | None = None
    """None when the target works alone."""
    options: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    """Options of the acceptance rule: the configuration, overridden by the request."""
    draft_model_penalties: str = "refuse"
    """The coordinator's option."""
    forbidden_sequences: tuple[tuple[int, ...], ...] = ()
    """The request's bad words as token ids."""
    echo_without_draft: bool = False
    """True if no draft may propose where the prompt is echoed."""

    def check(self) -> None:
        """Refuse it if it can never be completed."""
        refuse(broken(REQUEST_RULES, self))


def is_separate_model(draft: ModelInfo | None) -> bool:
    """True for a draft with a model of its own, so not for one whose layers lie in the target (as in MAX)."""
    return draft is not None and draft.has_model and draft.drafting_method not in OWN_METHODS


@rule("The prompt holds at least one token, and is shorter than `max_length`.")
def _prompt_fits(subject: TokenizedRequest) -> Iterator[str]:
    if not subject.prompt:
        yield "the prompt is empty; it must hold at least one token"
    yield from too_long(len(subject.prompt), subject.target.max_length)


@rule("Ids of the prompt, and those that an earlier stream has delivered, are in the target's vocabulary.")
def _known_token_ids(subject: TokenizedRequest) -> Iterator[str]:
    delivered = subject.request.delivered_token_ids
    yield from outside_vocabulary("the prompt holds", subject.prompt, subject.target)
    yield from outside_vocabulary("delivered_token_ids holds", delivered, subject.target)


@rule("No stop string is empty, and `stop_token_ids` are in the target's vocabulary.")
def _stops(subject: TokenizedRequest) -> Iterator[str]:
    if "" in subject.request.stop:
        yield "stop holds an empty string; each must have a character"
    yield from outside_vocabulary("stop_token_ids is for", subject.request.stop_token_ids, subject.target)


_BIASES = f"between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}"


@rule(f"`logit_bias` is for ids of the target's vocabulary, and {_BIASES}.")
def _logit_bias(subject: TokenizedRequest) -> Iterator[str]:
    biases = subject.request.logit_bias
    yield from outside_vocabulary("logit_bias is for", biases, subject.target)
    wrong = [
        f"{spell(bias)} for token id {token_id}"
        for token_id, bias in biases.items()
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS
    ]
    if wrong:
        yield f"logit_bias is {_join_values(wrong)}; it must be {_BIASES}"


def outside_vocabulary(holder: str, token_ids: Iterable[int], target: ModelInfo) -> Iterator[str]:
    """Yield a sentence about the ids that the target does not have; it begins with the holder of the ids."""
    size = target.vocabulary_size
    unknown = dict.fromkeys(token_id for token_id in token_ids if not 0 <= token_id < size)
    if unknown:
        noun = "token id" if len(unknown) == 1 else "token ids"
        yield f"{holder} {noun} {_join_values([*map(str, unknown)])}, out of vocabulary; ids must be in 0..{size - 1}"


_MAX_LISTED = 8
"""Wrong values of a list that a sentence names."""


def _join_values(values: Sequence[str]) -> str:
    more = len(values) - _MAX_LISTED
    return ", ".join(values[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def adjustments_of(
    request: GenerationRequest, target: ModelInfo, forbidden_sequences: tuple[tuple[int, ...], ...] = ()
) -> LogitAdjustments:
    """The changes that a request makes to the target's logits.

    As in vLLM, `min_tokens` suppresses the model's end-of-sequence ids even where `ignore_eos` permits them.
    """
    ends = {*target.eos_token_ids, *request.stop_token_ids} if request.min_tokens > 0 else ()
    return LogitAdjustments(
        request.logit_bias,
        request.min_tokens,
        tuple(sorted(ends)),
        tuple(sorted({*request.allowed_token_ids})),
        forbidden_sequences,
    )


@rule(
    "`allowed_token_ids` are in the target's vocabulary, no text of `bad_words` is empty, both leave a token at each "
    "position, and neither stands beside structured output or synthetic acceptance."
)
def _allowed_tokens(subject: TokenizedRequest) -> Iterator[str]:
    request = subject.request
    yield from outside_vocabulary("allowed_token_ids holds", request.allowed_token_ids, subject.target)
    if "" in map(str.strip, request.bad_words):
        yield "bad_words holds an empty text; each must have a character that is no space"
    named = [name for name in ("allowed_token_ids", "bad_words") if getattr(request, name)]
    if not named:
        return
    verb = f"{' and '.join(named)} {'is' if len(named) == 1 else 'are'} set"
    adjustments = adjustments_of(request, subject.target, subject.forbidden_sequences)
    if adjustments.leaves_no_token(subject.target.vocabulary_size):
        yield (
            f"{verb} so that no token may be left; some allowed token must be the last one of no bad word and, with "
            "min_tokens, not end the completion"
        )
    if request.grammar is not None:
        yield f"{verb} and structured output is asked for; one of them must be left out: the form binds the tokens"
    if request.speculation and checked_strategy(subject.options) is SYNTHETIC and subject.draft is not None:
        yield (
            f"{verb} and the rule is synthetic; name another rejection_sampling_strategy: synthetic acceptance takes "
            "tokens whatever they are"
        )


@rule("`truncate_prompt_tokens` is -1, or from 1 to one less than `max_length`.")
def _truncation(subject: TokenizedRequest) -> Iterator[str]:
    count = subject.request.truncate_prompt_tokens
    most = subject.target.max_length - 1
    if count is not None and count != -1 and not 1 <= count <= most:
        yield f"truncate_prompt_tokens is {count}; it must be -1, or from 1 to {most}"


@rule(
    "`min_tokens` is at most `max_tokens` and the room after the prompt, and some token does not end the "
    "completion."
)
def _min_tokens_fit(subject: TokenizedRequest) -> Iterator[str]:
    request = subject.request
    target = subject.target
    if request.min_tokens <= 0:
        return
    room = target.max_length - len(subject.prompt)
    limit = f"the room that max_length ({target.max_length}) leaves after the prompt, {room}"
    if request.max_tokens is not None and request.max_tokens < room:
        room = request.max_tokens
        limit = f"max_tokens, {request.max_tokens}"
    if request.min_tokens > room:
        yield f"min_tokens is {request.min_tokens}; it must be at most {limit}"
    if len({*target.eos_token_ids, *request.stop_token_ids}) >= target.vocabulary_size:
        yield f"min_tokens is {request.min_tokens}; it must be 0, since every token ends the completion"


@rule("With `max_tokens_must_fit`, which OpenAI's API implies, `max_length` leaves room for `max_tokens`.")
def _max_tokens_fit(subject: TokenizedRequest) -> Iterator[str]:
    request = subject.request
    room = subject.target.max_length - len(subject.prompt)
    if request.max_tokens_must_fit and request.max_tokens is not None and 0 < room < request.max_tokens:
        yield (
            f"max_tokens is {request.max_tokens}; it must be at most {room}: max_length is "
            f"{subject.target.max_length}, and the prompt has {plural(len(subject.prompt), 'token')}"
        )


PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""The penalties of a request, each with the value that turns it off."""


def penalties_of(request: GenerationRequest) -> tuple[str, ...]:
    """Names of the request's penalties that are not off."""
    return tuple(name for name, off in PENALTIES.items() if getattr(request, name) not in (None, off))


@rule("With `draft_model_penalties` refuse, penalties are off where a separate draft model proposes.")
def _penalties_without_draft_model(subject: TokenizedRequest) -> Iterator[str]:
    """MAX refuses them. A request that the target serves alone no longer asks for speculation here."""
    if not (subject.request.speculation and is_separate_model(subject.draft)):
        return
    if subject.draft_model_penalties != "refuse":
        return
    for name in penalties_of(subject.request):
        value = spell(getattr(subject.request, name))
        yield (
            f"{name} is {value}; with a separate draft model it must be {PENALTIES[name]:g}: use a draft service "
            "with speculative_method ngram or suffix, turn speculation off for this request, or start the "
            "coordinator with --draft-model-penalties draft"
        )


@rule("`max_tokens` is at least 1, or 0 with `echo`.")
def _max_tokens(subject: TokenizedRequest) -> Iterator[str]:
    minimum = 0 if subject.request.echo else 1
    if subject.request.max_tokens is not None and subject.request.max_tokens < minimum:
        yield f"max_tokens is {subject.request.max_tokens}; it must be at least {minimum}"


def never_proposes(request: GenerationRequest) -> bool:
    """True for a completion that is too short for any proposal."""
    return request.max_tokens is not None and request.max_tokens <= 1


@rule("With `echo` no draft proposes under `compatibility` max, and no earlier stream has delivered tokens.")
def _echo(subject: TokenizedRequest) -> Iterator[str]:
    request = subject.request
    if not request.echo:
        return
    may_propose = request.speculation and subject.draft is not None and not never_proposes(request)
    if may_propose and subject.echo_without_draft:
        yield (
            "echo is true and a draft proposes; it must be false: set max_tokens to 0 or 1, or turn speculation off "
            "for this request"
        )
    if request.delivered_token_ids:
        yield "echo is true and an earlier stream has delivered tokens; it must be false"


@rule("With structured output `ignore_eos` is false, `min_tokens` 0, and acceptance not synthetic.")
def _grammar_ends_the_text(subject: TokenizedRequest) -> Iterator[str]:
    request = subject.request
    if request.grammar is None:
        return
    if request.ignore_eos:
        yield "ignore_eos is true and structured output is asked for; it must be false: the text ends with its form"
    if request.min_tokens > 0:
        yield (
            f"min_tokens is {request.min_tokens} and structured output is asked for; it must be 0: the text ends with "
            "its form"
        )
    # An unknown rule is reported when it is resolved.
    strategy = checked_strategy(subject.options)
    if request.speculation and strategy is SYNTHETIC and subject.draft is not None:
        yield (
            "the rule is synthetic and structured output is asked for; name another rejection_sampling_strategy: "
            "synthetic acceptance takes tokens whatever they are"
        )


@rule("With `sampled_logprobs` the target does not answer with dense rows.")
def _sampled_logprobs(subject: TokenizedRequest) -> Iterator[str]:
    if subject.request.sampled_logprobs and subject.request.row_kind is RowKind.DENSE:
        yield "sampled_logprobs is true and row_kind is dense; row_kind must be left out, or token or support"


@rule("The rule logit-comparison needs a draft service that has a model, except at `temperature` 0.")
def _logits_of_draft_model(subject: TokenizedRequest) -> Iterator[str]:
    """Reads the draft's own report: `speculative_method`, which another rule checks, may be left out."""
    draft = subject.draft
    if draft is None or draft.has_model or not subject.request.speculation:
        return
    if subject.request.temperature == 0.0:
        return  # greedy, whichever rule is named
    strategy = checked_strategy(subject.options)
    if strategy is not None and strategy.needs_token_logits:
        yield (
            f"the rule is {strategy.name} and the draft service drafts by {draft.architecture}, which has no logits; "
            "name another rejection_sampling_strategy, or turn speculation off for this request"
        )


_request = attrgetter("request")
MAX_LOGPROBS = 20
"""Maximum alternatives for each position, as with OpenAI."""


REQUEST_RULES: tuple[Rule[TokenizedRequest], ...] = (
    _prompt_fits,
    _known_token_ids,
    _max_tokens,
    *request_sampling_rules(of=_request),
    within("num_speculative_tokens", 1, of=_request),
    within("seed", -(2**63), 2**63 - 1, "a signed 64-bit integer", of=_request),
    within("logprobs", 0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}", of=_request),
    within("prompt_logprobs", 0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}", of=_request),
    within("priority", -(2**31), 2**31 - 1, "a signed 32-bit integer", of=_request),
    _stops,
    _logit_bias,
    _allowed_tokens,
    _truncation,
    within("min_tokens", 0, of=_request),
    _min_tokens_fit,
    _max_tokens_fit,
    _echo,
    _grammar_ends_the_text,
    _penalties_without_draft_model,
    _logits_of_draft_model,
    _sampled_logprobs,
)
