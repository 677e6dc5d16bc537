"""GenerationService: translates calls. Large requests take turns to be parsed, and a full queue refuses all unread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any, TypedDict, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from tandem.config.rule import refuse
from tandem.errors import InvalidRequestError, TandemError
from tandem.model.types import BatchItem, BatchOutcome
from tandem.rpc.credentials import AUTHORIZATION
from tandem.serving.interceptors import (
    Context,
    Handler,
    behaviour_of,
    ended_by,
    metadata_of,
    remade,
    traceparent_of,
    unreadable,
)
from tandem.serving.protection import Tokens, caller_token
from tandem.v1 import generation_pb2
from tandem.v1.generation_pb2_grpc import GenerationServiceServicer
from tandem.wire.generation import (
    chat_from_proto,
    chat_prompt_to_proto,
    chunk_to_proto,
    error_to_proto,
    piece_to_proto,
    request_from_proto,
)
from tandem_coordinator.http.chat import Chats
from tandem_coordinator.requests.admission import LARGE_BYTES, peer_of_grpc
from tandem_coordinator.requests.batch import Batch
from tandem_coordinator.requests.plan import Models
from tandem_coordinator.requests.runner import RequestRunner
from tandem_coordinator.requests.validation import MAX_BAD_WORDS, too_long, too_many
from tandem_coordinator.settings.coordinator import MAX_CHAT_MESSAGES, RequestBounds

MessageT = TypeVar("MessageT", bound=Message)

_SERVICE = "/tandem.v1.GenerationService/"
GENERATE = f"{_SERVICE}Generate"

_MAX_ID_BYTES = 5
"""Bytes of a token id as a varint."""
_BIAS_BYTES = 16
"""Bytes of an entry of logit_bias: its tag and length, an id and a number, each with a tag."""
_MESSAGE_BYTES = 64
"""Bytes of a chat's message beside its content: its role, tags and lengths."""
_OTHER_BYTES = 4 << 10
"""Enough for all fields of fixed size, for a salt, and for the tags and lengths of the others."""


class Caller(TypedDict):
    """Who sends a request, as `RequestRunner.complete` takes it."""

    traceparent: str
    peer: str
    token: str


class GenerationServicer(GenerationServiceServicer):
    """Streams completions to clients. A large request arrives as its bytes."""

    def __init__(self, completions: RequestRunner, chats: Chats, tokens: Callable[[], Tokens]) -> None:
        """`tokens` are those that the server knows."""
        self._completions = completions
        self._chats = chats
        self._known_tokens = tokens

    async def Generate(
        self, request: generation_pb2.GenerateRequest | bytes, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        if isinstance(request, bytes):
            models = self._completions.models
            bounds = self._completions.bounds
            request = await self._parse(generation_pb2.GenerateRequest, request, max_bytes(models, bounds))
            self._check_counts(request)
        chunks = self._completions.complete(
            request_from_proto(request), context.time_remaining(), **self._caller(context)
        )
        # A call that is cancelled between two chunks must not leave its streams to the garbage collector.
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk_to_proto(chunk)

    async def GenerateBatch(
        self,
        requests: AsyncIterator[generation_pb2.GenerateBatchRequest | bytes],
        context: Context,
    ) -> AsyncIterator[generation_pb2.GenerateBatchResponse]:
        batch = Batch(self._completions, context.time_remaining(), **self._caller(context))
        outcomes = batch.outcomes(self._items(requests, context))
        async with aclosing(outcomes):
            async for outcome in outcomes:
                for piece in outcome.pieces:
                    yield piece_to_proto(outcome.index, piece)
                if outcome.error is not None:
                    yield error_to_proto(outcome.index, ended_by(outcome.error))

    async def _items(
        self, requests: AsyncIterator[generation_pb2.GenerateBatchRequest | bytes], context: Context
    ) -> AsyncIterator[BatchItem | BatchOutcome]:
        """The requests of a batch; the outcome of one that cannot be read, so that the others go on."""
        # The client writes its other requests once it knows that the call is not refused.
        await context.send_initial_metadata(())
        async for request in requests:
            if isinstance(request, bytes):
                # Within gRPC's bound of a message: to refuse a longer one here would end the others.
                request = await self._parse(generation_pb2.GenerateBatchRequest, request, len(request))
            try:
                self._check_counts(request.request)
                yield BatchItem(request.index, request_from_proto(request.request))
            except TandemError as error:
                yield BatchOutcome(request.index, (), error)

    def _check_counts(self, request: generation_pb2.GenerateRequest) -> None:
        """Refuse more of anything than a request may have, before anything is built of it."""
        models = self._completions.models
        bounds = self._completions.bounds
        prompt_tokens = len(request.token_ids.token_ids)
        is_shortened = request.HasField("truncate_prompt_tokens")
        length = () if is_shortened else too_long(prompt_tokens, models.target.max_length)
        refuse([*length, *too_many(request, bounds)])

    def _caller(self, context: Context) -> Caller:
        header = metadata_of(context.invocation_metadata(), AUTHORIZATION)
        return Caller(
            traceparent=traceparent_of(context),
            peer=peer_of_grpc(context.peer()),
            token=caller_token(header, self._known_tokens()),
        )

    async def RenderChat(
        self, request: generation_pb2.RenderChatRequest | bytes, context: Context
    ) -> generation_pb2.RenderChatResponse:
        models = self._completions.models
        bounds = self._completions.bounds
        if isinstance(request, bytes):
            limit = _max_text_bytes(models, bounds) + MAX_CHAT_MESSAGES * _MESSAGE_BYTES
            request = await self._parse(generation_pb2.RenderChatRequest, request, limit)
        messages = [asdict(each) for each in chat_from_proto(request)]
        with self._completions.preparation(peer_of_grpc(context.peer()), traceparent_of(context)):
            text = await self._chats.prompt(messages, max_bytes=bounds.max_prompt_bytes)
            token_ids = await models.encode(text, bounds, add_special_tokens=False)
        return chat_prompt_to_proto(token_ids)

    async def _parse(self, kind: type[MessageT], content: bytes, limit: int) -> MessageT:
        if len(content) > limit:
            raise InvalidRequestError(f"the request has {len(content)} bytes; it must be at most {limit}")
        try:
            async with self._completions.admission.turn():
                return kind.FromString(content)
        except DecodeError:
            raise unreadable() from None


def max_bytes(models: Models, bounds: RequestBounds) -> int:
    """Maximum bytes of a request within all bounds."""
    prompt = max(_max_text_bytes(models, bounds), _MAX_ID_BYTES * models.target.max_length)
    # A character has up to 4 bytes in UTF-8
    stop = bounds.max_stop_strings * (4 * bounds.max_stop_length + _MAX_ID_BYTES)
    stop += MAX_BAD_WORDS * (4 * bounds.max_stop_length + _MAX_ID_BYTES)
    biases = (
        bounds.max_logit_biases * (_BIAS_BYTES + _MAX_ID_BYTES) + bounds.max_stop_token_ids * _MAX_ID_BYTES
    )
    return prompt + stop + biases + bounds.max_grammar_bytes + _OTHER_BYTES


def _max_text_bytes(models: Models, bounds: RequestBounds) -> int:
    limit = models.max_text_bytes
    return bounds.max_prompt_bytes if limit is None else min(bounds.max_prompt_bytes, limit)


def admit(completions: RequestRunner, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
    """The call's own handler, which gets the bytes of a large request in place of its message; or a refusal.

    Under overload every refusal delays the next one. Reading a request that is then refused would take a third of the
    coordinator's time for it, so most are refused here. A few that arrive at the same moment still pass, and
    `Admission` refuses them. Large requests are left to the servicer, which has them take turns.
    """

    # Not in this step itself: a caller without a token gets another error, and does not count as a request.
    async def refuse(_requests: Any, context: Context) -> None:
        completions.refuse(traceparent_of(context))

    if not details.method.startswith(_SERVICE):
        return handler
    if details.method == GENERATE and completions.admission.refuses():
        return remade(handler, refuse, at_once=True)
    return remade(handler, behaviour_of(handler), partial(_unless_large, handler.request_deserializer))


def _unless_large(read: Any, content: bytes) -> Any:
    return content if len(content) > LARGE_BYTES else read(content)
