"""What a request may ask for at most. Checked before it waits for a place, so that nothing too large waits for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import Field

from tandem.config.options import Options
from tandem.config.rule import Rule, broken
from tandem.errors import InvalidRequestError
from tandem.types import GenerationRequest

MOST_SPECULATIVE_TOKENS = 32
"""A request may ask for as many tokens in a proposal, or for as many as the coordinator is set to."""


class RequestBounds(Options):
    """How much work the coordinator takes on."""

    max_concurrent_requests: int = Field(default=256, ge=1)
    """Most requests that run at once."""
    max_queued_requests: int = Field(default=256, ge=0)
    """Most requests that wait for a place among them; more are refused at once, and told when to try again."""
    max_prompt_bytes: int = Field(default=1 << 20, ge=1)
    """Most bytes of a prompt's text, in UTF-8."""
    max_stop_strings: int = Field(default=16, ge=0)
    """Most stop strings of a request."""
    max_stop_length: int = Field(default=256, ge=1)
    """Most characters of a stop string."""


@dataclass(frozen=True, slots=True)
class BoundedRequest:
    """A request as it came, and what it may ask for."""

    request: GenerationRequest
    bounds: RequestBounds
    num_speculative_tokens: int
    """What the coordinator is set to."""
    max_length: int
    """The target's."""


def check_bounds(
    request: GenerationRequest, bounds: RequestBounds, num_speculative_tokens: int, max_length: int
) -> None:
    """Refuse a request that asks for too much.

    Raises:
        InvalidRequestError: with a sentence for each bound that it goes beyond.
    """
    subject = BoundedRequest(request, bounds, num_speculative_tokens, max_length)
    if sentences := broken(BOUND_RULES, subject):
        raise InvalidRequestError("; ".join(sentences))


def too_much_text(text: str, bounds: RequestBounds) -> Iterator[str]:
    """Why a prompt's text is not even tokenized; nothing when it is."""
    # Lone surrogates never come over the wire, but from Python.
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > bounds.max_prompt_bytes:
        yield f"the prompt has {size} bytes; it must be at most {bounds.max_prompt_bytes}"


def too_long(token_count: int, max_length: int) -> Iterator[str]:
    """Why a prompt of so many tokens cannot be completed; nothing when it can."""
    if token_count >= max_length:
        yield (
            f"the prompt has {token_count} tokens; it must have at most {max_length - 1}, one less than max_length "
            f"({max_length})"
        )


def _rule(
    name: str, requirement: str, most: Callable[[BoundedRequest], tuple[str, int, str, int]]
) -> Rule[BoundedRequest]:
    """The rule that something has at most so many of a unit: what it is, how many it has, the unit, the most."""

    def check(subject: BoundedRequest) -> Iterator[str]:
        what, count, unit, limit = most(subject)
        if count > limit:
            yield f"{what} {count}{unit}; it must be at most {limit}"

    return Rule(name, requirement, check)


def _prompt_bytes(subject: BoundedRequest) -> Iterator[str]:
    prompt = subject.request.prompt
    if isinstance(prompt, str):
        yield from too_much_text(prompt, subject.bounds)


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


def _speculative_tokens(subject: BoundedRequest) -> tuple[str, int, str, int]:
    most = max(MOST_SPECULATIVE_TOKENS, subject.num_speculative_tokens)
    return "num_speculative_tokens is", subject.request.num_speculative_tokens or 0, "", most


BOUND_RULES: tuple[Rule[BoundedRequest], ...] = (
    Rule("max-prompt-bytes", "The prompt's text has at most `max_prompt_bytes`.", _prompt_bytes),
    Rule("max-prompt-tokens", "A prompt of token ids is shorter than `max_length`.", _prompt_tokens),
    _rule("max-stop-strings", "There are at most `max_stop_strings`.", _stop_count),
    _rule("max-stop-length", "A stop string has at most `max_stop_length` characters.", _stop_length),
    _rule(
        "most-speculative-tokens",
        f"`num_speculative_tokens` is at most {MOST_SPECULATIVE_TOKENS}, or what the coordinator is set to.",
        _speculative_tokens,
    ),
)
