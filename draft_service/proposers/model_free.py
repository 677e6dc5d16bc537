"""What drafting methods without a model share: sequences whose past is indexed, and deltas that change them.

A method supplies a `TokenIndex`, which is plain data structure: no event loop, no gRPC. Reading a prompt of 100k tokens
takes up to a second in Python, so an index learns in small steps and the event loop turns between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import tandem
from draft_service.proposers.token_state import TokenState
from tandem.errors import InvalidRequestError
from tandem.types import DraftOptions, ModelInfo, Proposal, ProposeStep

# One or two milliseconds of work: other sequences' proposals wait no longer than that for a long prompt.
_STEPS_AT_A_TIME = 128


class TokenIndex(Protocol):
    """What a method knows of one sequence."""

    def forget(self, length: int) -> None:
        """Unlearn whatever rests on tokens from `length` on. Called while they are still there."""

    def learn(self) -> Iterator[None]:
        """Take in the tokens that came since. Yields between small steps; if dropped there, it goes on next time."""

    def propose(self, token_count: int) -> Sequence[int]:
        """At most `token_count` tokens that may follow."""

    def finish(self) -> Iterator[None]:
        """Keep what other sequences can use of a completion that ended properly. Yields between small steps."""


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """What bounds the memory of a method without a model."""

    max_length: int | None = None
    """Most tokens of a sequence. None: whatever the coordinator asks for."""
    max_sequences: int = 32
    """Most sequences at once; more of them wait, as they do for a place in a KV cache."""


class ModelFreeProposer:
    """Drafts from what was said before."""

    def __init__(
        self, method: str, new_index: Callable[[TokenState], TokenIndex], limits: SequenceLimits
    ) -> None:
        self._method = method
        self._new_index = new_index
        self._max_length = limits.max_length or 0
        self._places = asyncio.Semaphore(limits.max_sequences)
        # What sequences leave behind for others is taken in one sequence after the other.
        self._finishing = asyncio.Lock()

    @property
    def model_info(self) -> ModelInfo:
        """That there is no model: zeros and an empty hash where one would have to match the target's."""
        return ModelInfo(
            name=self._method,
            architecture=self._method,
            vocabulary_size=0,
            tokenizer_hash="",
            max_length=self._max_length,
            dtype="",
            service_version=tandem.__version__,
        )

    def kv_usage(self) -> None:
        """There is no KV cache."""

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to stop."""

    @asynccontextmanager
    async def sequence(self, options: DraftOptions) -> AsyncIterator[ModelFreeSequence]:
        """Keep a sequence for as long as the context lives. Only one that ends without an error leaves anything behind.

        Raises:
            InvalidRequestError: it may become longer than this service was told to allow.
        """
        if self._max_length and options.max_length > self._max_length:
            raise InvalidRequestError(
                f"a sequence of up to {options.max_length} tokens was asked for; this service takes "
                f"up to {self._max_length}"
            )
        async with self._places:
            tokens = TokenState(options.max_length or self._max_length)
            index = self._new_index(tokens)
            yield ModelFreeSequence(tokens, index)
            async with self._finishing:
                await _in_pieces(index.finish())


class ModelFreeSequence:
    """One sequence that is drafted for."""

    def __init__(self, tokens: TokenState, index: TokenIndex) -> None:
        self._tokens = tokens
        self._index = index

    async def propose(self, step: ProposeStep) -> Proposal:
        """Apply the step's delta and look up the tokens that may follow: each distribution is one-hot.

        Raises:
            InvalidRequestError: the delta does not fit the sequence.
        """
        kept = self._tokens.kept_length(step.delta)
        if kept < len(self._tokens):
            self._index.forget(kept)
        self._tokens.apply(step.delta, kept)
        await _in_pieces(self._index.learn())
        return Proposal(len(self._tokens), tuple(self._index.propose(step.token_count)))


async def _in_pieces(steps: Iterator[None]) -> None:
    """Work through the steps, and let the event loop turn now and then."""
    for done, _ in enumerate(steps, start=1):
        if done % _STEPS_AT_A_TIME == 0:
            await asyncio.sleep(0)
