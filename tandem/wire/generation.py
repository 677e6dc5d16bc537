"""GenerationService: what clients send and what they are streamed."""

from __future__ import annotations

from tandem.errors import InvalidRequestError
from tandem.types import (
    Chunk,
    FinishReason,
    GenerationRequest,
    PositionFigures,
    RowKind,
    SpeculationFigures,
    Summary,
    TokenLogprobs,
)
from tandem.v1 import generation_pb2, types_pb2
from tandem.wire.common import row_kind_from_proto, row_kind_to_proto

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_FINISH_REASONS_BACK = {value: reason for reason, value in _FINISH_REASONS.items()}


def request_to_proto(request: GenerationRequest) -> generation_pb2.GenerateRequest:
    """A request as a message; what is None stays unset."""
    message = generation_pb2.GenerateRequest(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        seed=request.seed,
        stop=request.stop,
        num_speculative_tokens=request.num_speculative_tokens,
        rejection_sampling_strategy=request.rejection_sampling_strategy or "",
        disable_speculation=not request.speculation,
        row_kind=types_pb2.ROW_KIND_UNSPECIFIED
        if request.row_kind is None
        else row_kind_to_proto(request.row_kind),
        ignore_eos=request.ignore_eos,
        logprobs=request.logprobs,
    )
    if isinstance(request.prompt, str):
        message.text = request.prompt
    else:
        message.token_ids.token_ids.extend(request.prompt)
        message.token_ids.SetInParent()  # an empty list of ids is a prompt too, and gets its own refusal
    return message


def request_from_proto(message: generation_pb2.GenerateRequest) -> GenerationRequest:
    """The request of a message.

    Raises:
        InvalidRequestError: it has no prompt, or names an unknown row kind.
    """
    return GenerationRequest(
        prompt=_prompt(message),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        temperature=message.temperature if message.HasField("temperature") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
        frequency_penalty=message.frequency_penalty if message.HasField("frequency_penalty") else None,
        presence_penalty=message.presence_penalty if message.HasField("presence_penalty") else None,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        num_speculative_tokens=(
            message.num_speculative_tokens if message.HasField("num_speculative_tokens") else None
        ),
        rejection_sampling_strategy=message.rejection_sampling_strategy or None,
        speculation=not message.disable_speculation,
        row_kind=_row_kind(message.row_kind),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def _prompt(message: generation_pb2.GenerateRequest) -> str | tuple[int, ...]:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return tuple(message.token_ids.token_ids)
        case _:
            raise InvalidRequestError("the request has no prompt; set text or token_ids")


def _row_kind(value: types_pb2.RowKind.ValueType) -> RowKind | None:
    return None if value == types_pb2.ROW_KIND_UNSPECIFIED else row_kind_from_proto(value)


def chunk_to_proto(chunk: Chunk) -> generation_pb2.GenerateResponse:
    """A piece of a completion as a message."""
    return generation_pb2.GenerateResponse(
        text=chunk.text,
        token_ids=chunk.token_ids,
        drafted=chunk.drafted,
        text_lengths=chunk.text_lengths,
        summary=None if chunk.summary is None else _summary_to_proto(chunk.summary),
        proposed_token_count=chunk.proposed,
        logprobs=[
            generation_pb2.TokenLogprobs(
                logprob=position.logprob,
                top_token_ids=position.top_token_ids,
                top_logprobs=position.top_logprobs,
            )
            for position in chunk.logprobs
        ],
    )


def chunk_from_proto(message: generation_pb2.GenerateResponse) -> Chunk:
    """The piece of a completion in a message."""
    return Chunk(
        message.text,
        tuple(message.token_ids),
        tuple(message.drafted),
        tuple(message.text_lengths),
        _summary_from_proto(message.summary) if message.HasField("summary") else None,
        message.proposed_token_count,
        tuple(
            TokenLogprobs(position.logprob, tuple(position.top_token_ids), tuple(position.top_logprobs))
            for position in message.logprobs
        ),
    )


def _summary_to_proto(summary: Summary) -> generation_pb2.GenerationSummary:
    return generation_pb2.GenerationSummary(
        finish_reason=_FINISH_REASONS[summary.finish_reason],
        usage=generation_pb2.Usage(
            prompt_token_count=summary.prompt_tokens, completion_token_count=summary.completion_tokens
        ),
        speculation=figures_to_proto(summary.speculation),
        request_id=summary.request_id,
        seed=summary.seed,
    )


def _summary_from_proto(message: generation_pb2.GenerationSummary) -> Summary:
    return Summary(
        finish_reason=_FINISH_REASONS_BACK[message.finish_reason],
        prompt_tokens=message.usage.prompt_token_count,
        completion_tokens=message.usage.completion_token_count,
        speculation=figures_from_proto(message.speculation),
        request_id=message.request_id,
        seed=message.seed,
    )


def figures_to_proto(figures: SpeculationFigures) -> generation_pb2.SpeculationFigures:
    """Counts of what speculation did as a message."""
    return generation_pb2.SpeculationFigures(
        round_count=figures.rounds,
        drafted_token_count=figures.drafted,
        accepted_token_count=figures.accepted,
        positions=[
            generation_pb2.PositionFigures(
                drafted_token_count=position.drafted,
                reached_token_count=position.reached,
                accepted_token_count=position.accepted,
            )
            for position in figures.positions
        ],
    )


def figures_from_proto(message: generation_pb2.SpeculationFigures) -> SpeculationFigures:
    """The counts in a message."""
    return SpeculationFigures(
        message.round_count,
        message.drafted_token_count,
        message.accepted_token_count,
        [
            PositionFigures(
                position.drafted_token_count, position.reached_token_count, position.accepted_token_count
            )
            for position in message.positions
        ],
    )
