"""The Python client.

    async with Client("127.0.0.1:50051") as client:
        async for chunk in client.generate("def main():", max_tokens=64):
            print(chunk.text, end="")

Leaving the loop cancels the request on every service. `tandem.clients.sync_client` is the same without async.

    async for result in client.generate_many(prompts, max_tokens=64, temperature=1.0):
        print(result.index, result.completed or result.error)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias, TypedDict, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    ProtocolError,
    ServiceUnavailableError,
    TandemError,
    plural,
)
from tandem.model.types import (
    ChatMessage,
    Chunk,
    FinishReason,
    GenerationRequest,
    Grammar,
    RowKind,
    SpeculationStats,
    Summary,
    TokenLogprobs,
    TruncationSide,
)
from tandem.rpc.channels import Deadline, errors_of, failure, open_channel
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.v1 import generation_pb2
from tandem.v1.generation_pb2_grpc import GenerationServiceStub
from tandem.wire.generation import (
    batch_item_to_proto,
    chat_prompt_from_proto,
    chat_to_proto,
    chunk_from_proto,
    request_to_proto,
    result_from_proto,
)
from tandem.wire.status import Ending

_BatchCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[generation_pb2.GenerateBatchRequest, generation_pb2.GenerateBatchResponse]"
)


@dataclass(frozen=True, slots=True)
class Retries:
    """Number of retries of a request.

    Only for errors that may pass: a coordinator that cannot be reached, or one that is full and says when to come back.
    """

    attempts: int = 4
    """Maximum attempts, including the first."""
    first_wait_seconds: float = 0.1
    """Longest wait before the second try; it doubles with each."""
    longest_wait_seconds: float = 5.0
    """Longest wait before an attempt. A refusal that asks for a longer wait is raised instead."""
    goes_on: bool = True
    """When a stream breaks, go on after the tokens that it has delivered. Statistics in the summary are those of the
    last stream. False: only a request that nothing was delivered of is tried again."""

    def wait_seconds(self, error: TandemError, tried: int, uniform: float) -> float | None:
        """Seconds to wait before the next attempt; None: do not retry. `uniform`, between 0 and 1, spreads the retries
        of clients that failed at the same moment."""
        if tried >= self.attempts:
            return None
        spread = self.first_wait_seconds * 2.0 ** (tried - 1)
        if isinstance(error, ServiceUnavailableError):
            # At least half of the wait remains.
            return min(spread * (0.5 + 0.5 * uniform), self.longest_wait_seconds)
        hint = error.retry_after_seconds if isinstance(error, CapacityError) else None
        return hint + spread * uniform if hint is not None and hint <= self.longest_wait_seconds else None


NO_RETRIES = Retries(attempts=1)
"""A single try."""


class Tries:
    """The tries of one request, within its time."""

    def __init__(self, retries: Retries, timeout_seconds: float | None, service: str) -> None:
        self.timeout_seconds = timeout_seconds
        self.delivered: list[int] = []
        """Tokens received so far."""
        self.has_ended = False
        """True once the summary has come: what breaks after it takes nothing away."""
        self._retries = retries
        self._service = service
        self._is_echoed = False
        self._has_scores = False
        """True once scores of the prompt have come, which the next try would bring again."""
        self._tried = 0
        self._deadline = Deadline(timeout_seconds)

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds that the next try may take; None for no limit."""
        return self._deadline.remaining_seconds

    def received(self, chunk: Chunk) -> None:
        """Note a chunk. Tries are counted from the last one on."""
        self.delivered += chunk.token_ids
        self._has_scores = self._has_scores or bool(chunk.prompt_logprobs)
        self.has_ended = chunk.summary is not None
        self._tried = 0

    def message(self, request: GenerationRequest) -> generation_pb2.GenerateRequest:
        """The next try's message."""
        self._is_echoed = request.echo  # the prompt would be among the tokens
        delivered = (*request.delivered_token_ids, *self.delivered)
        return as_message(replace(request, delivered_token_ids=delivered))

    def wait_seconds(self, error: TandemError) -> float:
        """Seconds to wait before the next attempt. Raises the error itself if there is none: a retry would not help, or
        the time is up."""
        self._tried += 1
        count = len(self.delivered)
        if isinstance(error, DeadlineError) and self.timeout_seconds is not None:
            # gRPC's own clock may strike before the coordinator has had its say.
            raise DeadlineError(
                f"{self._service}: the request took longer than the {self.timeout_seconds:g} s it was given; "
                f"{plural(count, 'token')} {'was' if count == 1 else 'were'} delivered"
            ) from None
        goes_on = self._retries.goes_on and not self._is_echoed
        if not count:
            goes_on = not self._has_scores
        wait = self._retries.wait_seconds(error, self._tried, random.random()) if goes_on else None
        remaining = self.remaining_seconds
        if wait is None or (remaining is not None and wait >= remaining):
            raise error
        return wait


_HTTP = "an HTTP server answers there, and this needs the coordinator's gRPC port (50051 unless set), not the page's"
_ADVICE = {
    # The first bytes of an HTTP/1 server are no frame of HTTP/2
    "Expected SETTINGS frame as the first frame": _HTTP,
    "connect an http1.x server": _HTTP,
    "Connection refused": "connection refused; is `tandem up` running there? If it listens elsewhere, name its address",
}
"""The reason in plain words and what to do, by what gRPC's sentence has."""


@contextmanager
def coordinator_errors(address: str) -> Iterator[None]:
    """Raise gRPC errors of the block as ours, naming the coordinator and the next step."""
    try:
        with errors_of(f"coordinator {address}"):
            yield
    except ServiceUnavailableError as error:
        for mark, advice in _ADVICE.items():
            if mark in str(error):
                raise ServiceUnavailableError(f"coordinator {address}: {advice}") from error
        raise


Prompt = str | Sequence[int] | GenerationRequest
"""Text, token ids of the target's vocabulary, or a request that says everything."""


class Options(TypedDict, total=False):
    """Fields of `GenerationRequest`, which documents them."""

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
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    include_stop_str_in_output: bool
    max_tokens_must_fit: bool
    grammar: Grammar | None
    echo: bool
    with_special_tokens: bool
    probabilities: bool
    cache_salt: str | None
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide
    priority: int
    sampled_logprobs: bool
    delivered_token_ids: tuple[int, ...]


_BITS = {
    "seed": 64,
    "max_tokens": 32,
    "top_k": 32,
    "num_speculative_tokens": 32,
    "logprobs": 32,
    "prompt_logprobs": 32,
    "truncate_prompt_tokens": 32,
    "priority": 32,
}
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
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For each token of the prompt, when the request asked for them."""
    raw_logprobs: tuple[float, ...] = ()
    processed_logprobs: tuple[float, ...] = ()
    """For each token, when the request asked for them; see `Chunk`."""

    @property
    def finish_reason(self) -> FinishReason:
        return self.summary.finish_reason

    @property
    def speculation(self) -> SpeculationStats:
        return self.summary.speculation


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The end of one of many requests."""

    index: int
    """Its place among the prompts, from 0 on."""
    completed: Completed | None
    """None where it failed."""
    error: TandemError | None = None


def as_request(prompt: Prompt, options: Options) -> GenerationRequest:
    """The request that a client's arguments mean."""
    values: dict[str, Any] = dict(options)
    if "stop" in values:
        stop = values["stop"]
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
        if name in values:
            values[name] = tuple(values[name])
    if isinstance(prompt, GenerationRequest):
        return replace(prompt, **values)
    return GenerationRequest(prompt if isinstance(prompt, str) else tuple(prompt), **values)


def as_message(request: GenerationRequest) -> generation_pb2.GenerateRequest:
    """The request as a message."""
    for name, bits in _BITS.items():
        value = getattr(request, name)
        limit = 1 << (bits - 1)
        if isinstance(value, int) and not -limit <= value < limit:
            raise InvalidRequestError(f"{name} is {value}; it must be from {-limit} to {limit - 1}")
    try:
        return request_to_proto(request)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from None


def join_chunks(chunks: Sequence[Chunk]) -> Completed:
    """All pieces of a completion as one."""
    whole = Chunk.join(chunks)
    assert whole.summary is not None
    return Completed(
        whole.text,
        whole.token_ids,
        whole.drafted,
        whole.summary,
        whole.logprobs,
        whole.prompt_logprobs,
        whole.raw_logprobs,
        whole.processed_logprobs,
    )


@dataclass(slots=True)
class _Unanswered:
    """One of many requests, which has no result yet."""

    message: generation_pb2.GenerateRequest
    pieces: list[Chunk] = field(default_factory=list)
    """Those of its completion that the present call has brought."""
    tried: int = 0
    """How often it has ended with an error that may pass."""


class ManyRequests:
    """The requests of `Client.generate_many`: which were sent, and which have no result yet."""

    def __init__(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        options: Options,
        retries: Retries,
        service: str,
    ) -> None:
        if isinstance(prompts, str):
            raise InvalidRequestError(
                "prompts is a text; it must be a list of prompts, or an iterator of them"
            )
        self._prompts = aiter(prompts if isinstance(prompts, AsyncIterable) else _one_by_one(prompts))
        self._options = options
        self._retries = retries
        self._service = service
        self._unanswered: dict[int, _Unanswered] = {}
        self._count = 0
        self._next: asyncio.Task[Prompt] | None = None
        """Waits for a prompt. It stays when a call breaks, so that none is lost."""
        self._is_exhausted = False
        self._failed: list[BatchResult] = []
        """Results of those that cannot be sent."""
        self._error: TandemError | None = None
        """The last error of a request that is to be tried again."""

    def has_more(self) -> bool:
        """True while a request has no result, or a prompt may follow."""
        return bool(self._unanswered) or not self._is_exhausted

    async def send(self, call: _BatchCall) -> None:
        """Write all requests to a call: those that an earlier one has not answered, and then further prompts."""
        try:
            for index in sorted(self._unanswered):
                await self._write(call, index)
            while not self._is_exhausted:
                if (prompt := await self._take()) is not None and self._add(prompt):
                    await self._write(call, self._count - 1)
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the call has ended, and its reader learns why
        except Exception:
            call.cancel()
            raise

    def receive(self, response: generation_pb2.GenerateBatchResponse) -> list[BatchResult]:
        """The results that a response completes."""
        results = self.take_failed()
        asked = self._unanswered.get(response.index)
        if asked is None:
            raise ProtocolError(
                f"{self._service}: it sent a result of request {response.index}, which it does not have"
            )
        found = result_from_proto(response)
        if isinstance(found, Ending):
            return results + self._fail(response.index, asked, failure(self._service, found))
        asked.pieces.append(found)
        if found.summary is not None:
            del self._unanswered[response.index]
            results.append(BatchResult(response.index, join_chunks(asked.pieces)))
        return results

    def take_failed(self) -> list[BatchResult]:
        failed = self._failed
        self._failed = []
        return failed

    def begin_again(self) -> None:
        """Forget what the last call has brought of requests that it has not answered."""
        self._error = None
        for asked in self._unanswered.values():
            asked.pieces.clear()

    def why_unanswered(self) -> TandemError:
        """Why requests have no result although the call has ended well."""
        return self._error or ServiceUnavailableError(
            f"{self._service}: it ended the call and left requests without a result"
        )

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def _fail(self, index: int, asked: _Unanswered, error: TandemError) -> list[BatchResult]:
        asked.tried += 1
        if self._retries.wait_seconds(error, asked.tried, 0.0) is not None:
            asked.pieces.clear()
            self._error = error
            return []
        del self._unanswered[index]
        return [BatchResult(index, None, error)]

    async def _take(self) -> Prompt | None:
        """The next prompt; None at their end."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._prompts))
        try:
            prompt = await asyncio.shield(self._next)
        except StopAsyncIteration:
            self._is_exhausted = True
            return None
        self._next = None
        return prompt

    def _add(self, prompt: Prompt) -> bool:
        """Number a request. False for one that cannot be sent."""
        index = self._count
        self._count += 1
        try:
            message = as_message(as_request(prompt, self._options))
        except InvalidRequestError as error:
            self._failed.append(BatchResult(index, None, error))
            return False
        self._unanswered[index] = _Unanswered(message)
        return True

    async def _write(self, call: _BatchCall, index: int) -> None:
        await call.write(batch_item_to_proto(index, self._unanswered[index].message))
        # Of a call that is refused while it is written to, gRPC loses the status. So nothing follows the first request
        # until the coordinator has taken the call, or refused it.
        await call.initial_metadata()


async def _one_by_one(prompts: Iterable[Prompt]) -> AsyncIterator[Prompt]:
    for prompt in prompts:
        yield prompt


DEFAULT_ADDRESS = "127.0.0.1:50051"

POLL_SECONDS = 0.1
"""Between two questions to a coordinator that is starting: people do not notice the delay."""


class CoordinatorClient:
    """A connection to a coordinator, made on first use and closed at the end of an `async with`."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address = address
        self._channel = open_channel(address, credentials=credentials)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; requests still running are cancelled."""
        await self._channel.close()


class Client(CoordinatorClient):
    """Talks to a coordinator."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        credentials: Credentials = PLAIN,
        *,
        retries: Retries = Retries(),
    ) -> None:
        """Connect on first use.

        Raises:
            ConfigurationError: a file of the credentials cannot be read, or makes no sense.
        """
        super().__init__(address, credentials)
        self._retries = retries
        self._stub = GenerationServiceStub(self._channel)

    async def generate(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk]:
        """Stream a completion. The last chunk carries the summary.

        Args:
            prompt: Text, token ids, or a complete `GenerationRequest`.
            options: Fields of `GenerationRequest`.

        Raises:
            TandemError: the coordinator refused or failed; the error's class says which.
        """
        request = as_request(prompt, options)
        tries = Tries(self._retries, timeout_seconds, f"coordinator {self.address}")
        while True:
            try:
                async with aclosing(self._try(tries.message(request), tries)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except TandemError as error:
                if tries.has_ended:
                    return
                wait_seconds = tries.wait_seconds(error)
            else:
                return
            await asyncio.sleep(wait_seconds)

    async def complete(
        self, prompt: Prompt, *, timeout_seconds: float | None = None, **options: Unpack[Options]
    ) -> Completed:
        """A whole completion; arguments and errors are those of `generate`."""
        return join_chunks(
            [chunk async for chunk in self.generate(prompt, timeout_seconds=timeout_seconds, **options)]
        )

    async def generate_many(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        timeout_seconds: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[BatchResult]:
        """Complete many prompts, and yield the result of each as it ends.

        Prompts are taken from the iterator as far as the coordinator has room for them, and it makes no further ones
        than are read here. A request that fails ends no other: its result has the error. When the connection breaks,
        the requests without a result are sent again.

        Args:
            prompts: As that of `generate`, thousands of them.
            timeout_seconds: For all of them together.
            options: Fields of `GenerationRequest`, for all of them.

        Raises:
            TandemError: the coordinator refused the call or cannot be reached; the error's class says which.
        """
        deadline = Deadline(timeout_seconds)
        many = ManyRequests(prompts, options, self._retries, f"coordinator {self.address}")
        tried = 0
        try:
            while many.has_more():
                error: TandemError
                try:
                    async with aclosing(self._try_many(many, deadline.remaining_seconds)) as results:
                        async for result in results:
                            tried = 0
                            yield result
                    error = many.why_unanswered()
                except DeadlineError as late:
                    if timeout_seconds is not None:
                        raise
                    # It was not read for long
                    error = ServiceUnavailableError(str(late))
                except TandemError as failed:
                    error = failed
                if not many.has_more():
                    return
                tried += 1
                wait_seconds = self._retries.wait_seconds(error, tried, random.random())
                if wait_seconds is None or deadline.at_most(wait_seconds) < wait_seconds:
                    raise error
                await asyncio.sleep(wait_seconds)
        finally:
            many.close()

    async def _try_many(
        self, many: ManyRequests, timeout_seconds: float | None
    ) -> AsyncGenerator[BatchResult]:
        many.begin_again()
        call = self._stub.GenerateBatch(timeout=timeout_seconds)
        sending = asyncio.create_task(many.send(call))
        try:
            with coordinator_errors(self.address):
                async for response in call:
                    for result in many.receive(response):
                        yield result
            await sending
        except asyncio.CancelledError:
            # The call is cancelled where the prompts themselves failed
            if sending.done() and not sending.cancelled() and (error := sending.exception()) is not None:
                raise error from None
            raise
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            call.cancel()
        for result in many.take_failed():
            yield result

    async def chat_prompt(
        self, messages: Sequence[ChatMessage], *, timeout_seconds: float | None = None
    ) -> tuple[int, ...]:
        """The prompt that a chat makes by the model's chat template, as token ids for `generate`.

        Raises:
            InvalidRequestError: the model has no chat template, or it does not take these messages.
            TandemError: the coordinator refused or failed; the error's class says which.
        """
        with coordinator_errors(self.address):
            response = await self._stub.RenderChat(chat_to_proto(messages), timeout=timeout_seconds)
        return chat_prompt_from_proto(response)

    async def _try(self, message: generation_pb2.GenerateRequest, tries: Tries) -> AsyncGenerator[Chunk]:
        call = self._stub.Generate(message, timeout=tries.remaining_seconds)
        try:
            with coordinator_errors(self.address):
                async for response in call:
                    chunk = chunk_from_proto(response)
                    tries.received(chunk)
                    yield chunk
        finally:
            call.cancel()

    async def wait_until_ready(self, timeout_seconds: float) -> None:
        """Return once the coordinator serves.

        Raises:
            ServiceUnavailableError: it does not within the time.
        """
        if not await serves(self._channel, timeout_seconds):
            raise ServiceUnavailableError(
                f"coordinator {self.address}: not ready within {timeout_seconds:g} s"
            )


async def serves(channel: grpc.aio.Channel, timeout_seconds: float) -> bool:
    """True if the server behind a channel says within the time that it serves, by the standard health protocol."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return True
                except grpc.aio.AioRpcError:
                    pass  # not reachable yet; the time limit decides
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        return False
