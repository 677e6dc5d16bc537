"""Arguments and results of the clients: requests from plain arguments, and whole completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from tandem.errors import InvalidRequestError
from tandem.types import (
    Chunk,
    FinishReason,
    GenerationRequest,
    RowKind,
    SpeculationStats,
    Summary,
    TokenLogprobs,
)
from tandem.v1 import generation_pb2
from tandem.wire.generation import request_to_proto

Prompt = str | Sequence[int] | GenerationRequest
"""Text, token ids of the target's vocabulary, or a request that says everything."""


class Options(TypedDict, total=False):
    """How to complete a prompt: fields of `GenerationRequest`, which documents them."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    seed: int | None
    stop: str | Sequence[str]
    num_speculative_tokens: int | None
    rejection_sampling_strategy: str | None
    speculation: bool
    row_kind: RowKind | None
    ignore_eos: bool
    logprobs: int | None
    logit_bias: Mapping[int, float]
    min_tokens: int
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    max_tokens_must_fit: bool


_BITS = {"seed": 64, "max_tokens": 32, "top_k": 32, "num_speculative_tokens": 32, "logprobs": 32}
"""Size of the signed integers that carry these fields."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A whole completion."""

    text: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    """For each token, whether the draft proposed it and the target accepted it."""
    summary: Summary
    logprobs: tuple[TokenLogprobs, ...] = ()
    """For each token, when the request asked for them."""

    @property
    def finish_reason(self) -> FinishReason:
        """Reason for its end."""
        return self.summary.finish_reason

    @property
    def speculation(self) -> SpeculationStats:
        """Its speculation statistics."""
        return self.summary.speculation


def as_request(prompt: Prompt, options: Options) -> GenerationRequest:
    """The request that a client's arguments mean."""
    values: dict[str, Any] = dict(options)
    if "stop" in values:
        stop = values["stop"]
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "stop_token_ids" in values:
        values["stop_token_ids"] = tuple(values["stop_token_ids"])
    if isinstance(prompt, GenerationRequest):
        return replace(prompt, **values)
    return GenerationRequest(prompt if isinstance(prompt, str) else tuple(prompt), **values)


def as_message(request: GenerationRequest) -> generation_pb2.GenerateRequest:
    """The request as a message.

    Raises:
        InvalidRequestError: a value has a wrong type, or is out of the protocol's range.
    """
    for name, bits in _BITS.items():
        value, limit = getattr(request, name), 1 << (bits - 1)
        if isinstance(value, int) and not -limit <= value < limit:
            raise InvalidRequestError(f"{name} is {value}; it must be from {-limit} to {limit - 1}")
    try:
        return request_to_proto(request)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from None


def joined(chunks: Sequence[Chunk]) -> Completed:
    """All pieces of a completion as one."""
    summary = chunks[-1].summary if chunks else None
    assert summary is not None
    return Completed(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        drafted=tuple(drafted for chunk in chunks for drafted in chunk.drafted),
        summary=summary,
        logprobs=tuple(position for chunk in chunks for position in chunk.logprobs),
    )
