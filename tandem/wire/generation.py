"""GenerationService: requests of clients, and the chunks that they receive."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.speculation_state import DecidingFigure, SpeculationState
from tandem.model.types import (
    AheadStats,
    ChatMessage,
    Chunk,
    GenerationRequest,
    LeadStats,
    PositionStats,
    RequestTiming,
    SpeculationStats,
    Summary,
    TokenLogprobs,
    TruncationSide,
)
from tandem.v1 import generation_pb2, types_pb2
from tandem.wire.common import GRAMMAR, ROW_KIND, SAMPLING, WEIGHTS
from tandem.wire.converter import Codec, Converter, enum_codec
from tandem.wire.status import Ending, read_ending, write_ending

SPECULATION: Converter[SpeculationStats, generation_pb2.SpeculationFigures] = Converter(
    SpeculationStats,
    generation_pb2.SpeculationFigures,
    Converter(PositionStats, generation_pb2.PositionFigures),
    Converter(AheadStats, generation_pb2.AheadFigures, hits_by_rank="rank_hit_counts"),
    Converter(LeadStats, generation_pb2.LeadFigures),
)
SPECULATION_STATE: Converter[SpeculationState, generation_pb2.SpeculationState] = Converter(
    SpeculationState,
    generation_pb2.SpeculationState,
    Converter(DecidingFigure, generation_pb2.DecidingFigure),
    num_speculative_tokens="token_count",
)
_SUMMARY: Converter[Summary, generation_pb2.GenerationSummary] = Converter(
    Summary,
    generation_pb2.GenerationSummary,
    WEIGHTS,
    SPECULATION,
    SPECULATION_STATE,
    SAMPLING,
    Converter(RequestTiming, generation_pb2.RequestTiming),
    apart=("stop_reason",),
)
_REQUEST: Converter[GenerationRequest, generation_pb2.GenerateRequest] = Converter(
    GenerationRequest,
    generation_pb2.GenerateRequest,
    GRAMMAR,
    ROW_KIND,
    enum_codec(TruncationSide, generation_pb2.TruncationSide.DESCRIPTOR, "truncation_side"),
    apart=("prompt", "speculation"),
)


def request_to_proto(request: GenerationRequest) -> generation_pb2.GenerateRequest:
    """A request as a message; fields that are None stay unset."""
    message = _REQUEST.to_proto(request)
    message.disable_speculation = not request.speculation
    if isinstance(request.prompt, str):
        message.text = request.prompt
    else:
        message.token_ids.token_ids.extend(request.prompt)
        message.token_ids.SetInParent()  # an empty list of ids is a prompt too, and gets its own refusal
    return message


def request_from_proto(message: generation_pb2.GenerateRequest) -> GenerationRequest:
    """The request of a message."""
    if message.WhichOneof("prompt") is None:
        raise InvalidRequestError("the request has no prompt; set text or token_ids")
    prompt = message.text if message.HasField("text") else tuple(message.token_ids.token_ids)
    return _REQUEST.from_proto(message, prompt=prompt, speculation=not message.disable_speculation)


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
    return generation_pb2.RenderChatResponse(prompt=types_pb2.TokenIds(token_ids=token_ids))


def chat_prompt_from_proto(message: generation_pb2.RenderChatResponse) -> tuple[int, ...]:
    """The prompt in a message."""
    return tuple(message.prompt.token_ids)


def _summary_to_proto(summary: Summary) -> generation_pb2.GenerationSummary:
    message = _SUMMARY.to_proto(summary)
    if isinstance(summary.stop_reason, str):
        message.stop_string = summary.stop_reason
    elif summary.stop_reason is not None:
        message.stop_token_id = summary.stop_reason
    return message


def _summary_from_proto(message: generation_pb2.GenerationSummary) -> Summary:
    field = message.WhichOneof("stop_reason")
    return _SUMMARY.from_proto(message, stop_reason=None if field is None else getattr(message, field))


_CHUNK: Converter[Chunk, generation_pb2.GenerateResponse] = Converter(
    Chunk,
    generation_pb2.GenerateResponse,
    Converter(TokenLogprobs, generation_pb2.TokenLogprobs),
    Codec(Summary, _summary_to_proto, _summary_from_proto),
)
chunk_to_proto = _CHUNK.to_proto
chunk_from_proto = _CHUNK.from_proto


def batch_item_to_proto(
    index: int, request: generation_pb2.GenerateRequest
) -> generation_pb2.GenerateBatchRequest:
    """A request of a batch as a message."""
    return generation_pb2.GenerateBatchRequest(index=index, request=request)


def piece_to_proto(index: int, piece: Chunk) -> generation_pb2.GenerateBatchResponse:
    """A piece of the completion of a request of a batch as a message."""
    return generation_pb2.GenerateBatchResponse(index=index, piece=chunk_to_proto(piece))


def error_to_proto(index: int, ending: Ending) -> generation_pb2.GenerateBatchResponse:
    """The error of a request of a batch as a message."""
    message = generation_pb2.GenerateBatchResponse(index=index)
    write_ending(message.error, ending)
    return message


def result_from_proto(message: generation_pb2.GenerateBatchResponse) -> Chunk | Ending:
    """The piece of a completion in a result, or its error."""
    match message.WhichOneof("result"):
        case "piece":
            return chunk_from_proto(message.piece)
        case "error":
            return read_ending(message.error)
        case _:
            raise ProtocolError("a result has neither piece nor error; it must hold one of them")
