"""Bounds of a request. They are checked before it waits for a place, so that no large request waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coordinator.settings.coordinator import MAX_SPECULATIVE_TOKENS, RequestBounds
from tandem.config.rule import Rule, broken
from tandem.errors import InvalidRequestError
from tandem.plural import plural
from tandem.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class BoundedRequest:
    """A request as it arrived, and its bounds."""

    request: GenerationRequest
    bounds: RequestBounds
    num_speculative_tokens: int
    """The coordinator's setting."""
    max_length: int
    """The target's."""
    max_text_bytes: int | None = None
    """Bytes beyond which any text has more than `max_length` tokens; None where there is no such bound."""


def check_bounds(
    request: GenerationRequest,
    bounds: RequestBounds,
    num_speculative_tokens: int,
    max_length: int,
    max_text_bytes: int | None = None,
) -> None:
    """Refuse a request that asks for too much.

    Raises:
        InvalidRequestError: with a sentence for each bound that it goes beyond.
    """
    subject = BoundedRequest(request, bounds, num_speculative_tokens, max_length, max_text_bytes)
    if sentences := broken(BOUND_RULES, subject):
        raise InvalidRequestError("; ".join(sentences))


def too_much_text(text: str, bounds: RequestBounds, max_text_bytes: int | None = None) -> Iterator[str]:
    """Yield the reason why a prompt's text is too large to be tokenized; nothing when it is not.

    Args:
        text: The prompt.
        bounds: Bounds of a request.
        max_text_bytes: Bytes beyond which any text has too many tokens; None where there is no such bound.
    """
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


def _rule(
    name: str, requirement: str, limit_of: Callable[[BoundedRequest], tuple[str, int, str, int]]
) -> Rule[BoundedRequest]:
    """A rule for an upper bound: what it counts, how to count it, the unit, and the bound."""

    def check(subject: BoundedRequest) -> Iterator[str]:
        what, count, unit, limit = limit_of(subject)
        if count > limit:
            yield f"{what} {count}{unit}; it must be at most {limit}"

    return Rule(name, requirement, check)


def _prompt_bytes(subject: BoundedRequest) -> Iterator[str]:
    prompt = subject.request.prompt
    if isinstance(prompt, str):
        yield from too_much_text(prompt, subject.bounds, subject.max_text_bytes)


def _prompt_tokens(subject: BoundedRequest) -> Iterator[str]:
    """Token ids take some 36 bytes each while they wait; how many a text has is known once it has its place."""
    prompt = subject.request.prompt
    if not isinstance(prompt, str):
        yield from too_long(len(prompt), subject.max_length)


def _stop_count(subject: BoundedRequest) -> tuple[str, int, str, int]:
    return "the number of stop strings is", len(subject.request.stop), "", subject.bounds.max_stop_strings


def _stop_length(subject: BoundedRequest) -> tuple[str, int, str, int]:
    longest = max(map(len, subject.request.stop), default=0)
    return "a stop string has", longest, " characters", subject.bounds.max_stop_length


def _logit_biases(subject: BoundedRequest) -> tuple[str, int, str, int]:
    return "logit_bias names", len(subject.request.logit_bias), " token ids", subject.bounds.max_logit_biases


def _stop_token_ids(subject: BoundedRequest) -> tuple[str, int, str, int]:
    return (
        "stop_token_ids has",
        len(subject.request.stop_token_ids),
        " ids",
        subject.bounds.max_stop_token_ids,
    )


def _speculative_tokens(subject: BoundedRequest) -> tuple[str, int, str, int]:
    maximum = max(MAX_SPECULATIVE_TOKENS, subject.num_speculative_tokens)
    return "num_speculative_tokens is", subject.request.num_speculative_tokens or 0, "", maximum


BOUND_RULES: tuple[Rule[BoundedRequest], ...] = (
    Rule(
        "max-prompt-bytes",
        "The prompt's text has at most `max_prompt_bytes`, and no more than `max_length` tokens can hold.",
        _prompt_bytes,
    ),
    Rule("max-prompt-tokens", "A prompt of token ids is shorter than `max_length`.", _prompt_tokens),
    _rule("max-stop-strings", "There are at most `max_stop_strings`.", _stop_count),
    _rule("max-stop-length", "A stop string has at most `max_stop_length` characters.", _stop_length),
    _rule("max-logit-biases", "`logit_bias` names at most `max_logit_biases` ids.", _logit_biases),
    _rule("max-stop-token-ids", "`stop_token_ids` are at most `max_stop_token_ids`.", _stop_token_ids),
    _rule(
        "most-speculative-tokens",
        f"`num_speculative_tokens` is at most {MAX_SPECULATIVE_TOKENS}, or what the coordinator is set to.",
        _speculative_tokens,
    ),
)
