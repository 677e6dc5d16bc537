"""GenerationService: requests of clients, and the chunks that they receive."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.errors import InvalidRequestError
from tandem.speculation_state import DecidingFigure, SpeculationState
from tandem.types import (
    AheadStats,
    ChatMessage,
    Chunk,
    FinishReason,
    GenerationRequest,
    PositionStats,
    RowKind,
    SpeculationStats,
    Summary,
    TokenLogprobs,
)
from tandem.v1 import generation_pb2, types_pb2
from tandem.wire.common import enum_words, row_kind_from_proto, row_kind_to_proto

_FINISH_REASONS, _FINISH_REASONS_BACK = enum_words(FinishReason, generation_pb2.FinishReason, "FINISH_REASON")


def request_to_proto(request: GenerationRequest) -> generation_pb2.GenerateRequest:
    """A request as a message; fields that are None stay unset."""
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
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop_token_ids,
        include_stop_str_in_output=request.include_stop_str_in_output,
        max_tokens_must_fit=request.max_tokens_must_fit,
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
        logit_bias=dict(message.logit_bias),
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        include_stop_str_in_output=message.include_stop_str_in_output,
        max_tokens_must_fit=message.max_tokens_must_fit,
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


def chat_to_proto(messages: Sequence[ChatMessage]) -> generation_pb2.RenderChatRequest:
    """A chat as a message."""
    return generation_pb2.RenderChatRequest(
        messages=[generation_pb2.ChatMessage(role=each.role, content=each.content) for each in messages]
    )


def chat_from_proto(message: generation_pb2.RenderChatRequest) -> list[ChatMessage]:
    """The chat in a message."""
    return [ChatMessage(each.role, each.content) for each in message.messages]


def chat_prompt_to_proto(token_ids: Sequence[int]) -> generation_pb2.RenderChatResponse:
    """The prompt that a chat makes as a message."""
    return generation_pb2.RenderChatResponse(prompt=generation_pb2.TokenIds(token_ids=token_ids))


def chat_prompt_from_proto(message: generation_pb2.RenderChatResponse) -> tuple[int, ...]:
    """The prompt in a message."""
    return tuple(message.prompt.token_ids)


def chunk_to_proto(chunk: Chunk) -> generation_pb2.GenerateResponse:
    """A piece of a completion as a message."""
    message = generation_pb2.GenerateResponse(
        text=chunk.text, proposed_token_count=chunk.proposed, drafted_ahead=chunk.drafted_ahead
    )
    message.token_ids.extend(chunk.token_ids)
    message.drafted.extend(chunk.drafted)
    message.text_lengths.extend(chunk.text_lengths)
    if chunk.summary is not None:
        message.summary.CopyFrom(_summary_to_proto(chunk.summary))
    for position in chunk.logprobs:
        message.logprobs.add(
            logprob=position.logprob,
            top_token_ids=position.top_token_ids,
            top_logprobs=position.top_logprobs,
        )
    return message


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
        message.drafted_ahead,
    )


def _summary_to_proto(summary: Summary) -> generation_pb2.GenerationSummary:
    message = generation_pb2.GenerationSummary(
        finish_reason=_FINISH_REASONS[summary.finish_reason],
        usage=generation_pb2.Usage(
            prompt_token_count=summary.prompt_tokens, completion_token_count=summary.completion_tokens
        ),
        speculation=speculation_stats_to_proto(summary.speculation),
        request_id=summary.request_id,
        seed=summary.seed,
        speculation_state=None
        if summary.speculation_state is None
        else state_to_proto(summary.speculation_state),
    )
    if isinstance(summary.stop_reason, str):
        message.stop_string = summary.stop_reason
    elif summary.stop_reason is not None:
        message.stop_token_id = summary.stop_reason
    return message


def _summary_from_proto(message: generation_pb2.GenerationSummary) -> Summary:
    return Summary(
        finish_reason=_FINISH_REASONS_BACK[message.finish_reason],
        prompt_tokens=message.usage.prompt_token_count,
        completion_tokens=message.usage.completion_token_count,
        speculation=speculation_stats_from_proto(message.speculation),
        request_id=message.request_id,
        seed=message.seed,
        speculation_state=(
            state_from_proto(message.speculation_state) if message.HasField("speculation_state") else None
        ),
        stop_reason=_stop_reason(message),
    )


def state_to_proto(state: SpeculationState) -> generation_pb2.SpeculationState:
    """Convert a speculation state to its message."""
    return generation_pb2.SpeculationState(
        is_on=state.is_on,
        token_count=state.num_speculative_tokens,
        reason=state.reason,
        figures=[
            generation_pb2.DecidingFigure(name=figure.name, value=figure.value, unit=figure.unit)
            for figure in state.figures
        ],
    )


def state_from_proto(message: generation_pb2.SpeculationState) -> SpeculationState:
    """The state in a message."""
    return SpeculationState(
        message.is_on,
        message.token_count,
        message.reason,
        tuple(DecidingFigure(figure.name, figure.value, figure.unit) for figure in message.figures),
    )


def _stop_reason(message: generation_pb2.GenerationSummary) -> str | int | None:
    match message.WhichOneof("stop_reason"):
        case "stop_string":
            return message.stop_string
        case "stop_token_id":
            return message.stop_token_id
        case _:
            return None


def speculation_stats_to_proto(stats: SpeculationStats) -> generation_pb2.SpeculationFigures:
    """Counts of what speculation did as a message."""
    return generation_pb2.SpeculationFigures(
        round_count=stats.rounds,
        drafted_token_count=stats.drafted,
        accepted_token_count=stats.accepted,
        positions=[
            generation_pb2.PositionFigures(
                drafted_token_count=position.drafted,
                reached_token_count=position.reached,
                accepted_token_count=position.accepted,
            )
            for position in stats.positions
        ],
        ahead=generation_pb2.AheadFigures(
            awaited_count=stats.ahead.awaited,
            hit_count=stats.ahead.hits,
            rank_hit_counts=stats.ahead.hits_by_rank,
            saved_seconds=stats.ahead.saved_seconds,
        ),
    )


def speculation_stats_from_proto(message: generation_pb2.SpeculationFigures) -> SpeculationStats:
    """The counts in a message."""
    return SpeculationStats(
        message.round_count,
        message.drafted_token_count,
        message.accepted_token_count,
        [
            PositionStats(
                position.drafted_token_count, position.reached_token_count, position.accepted_token_count
            )
            for position in message.positions
        ],
        AheadStats(
            message.ahead.awaited_count,
            message.ahead.hit_count,
            list(message.ahead.rank_hit_counts),
            message.ahead.saved_seconds,
        ),
    )
