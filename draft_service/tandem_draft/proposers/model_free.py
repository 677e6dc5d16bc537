"""Base of drafting methods without a model: each sequence has an index of its tokens, which deltas change.

A method supplies a `TokenIndex`, a plain data structure without event loop or gRPC. Python takes up to a second to
read a prompt of 100k tokens, so an index learns in small steps and the event loop runs between them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import tandem
from tandem.errors import InvalidRequestError
from tandem.model.types import (
    Delta,
    DraftOptions,
    ModelInfo,
    Proposal,
    ProposeStep,
    StepCost,
    StepProfile,
    common_length,
)
from tandem.serving.fair_places import FairPlaces, extra_places
from tandem_draft.proposers import check_start
from tandem_draft.settings import DraftSettings

_PROFILED_TOKENS, _PROFILED_LENGTH = 256, 4
"""The text and the proposals by which the method measures itself: a short chat and the default length."""


class TokenIndex(Protocol):
    """A drafting method's state for one sequence."""

    def forget(self, length: int) -> None:
        """Remove all that depends on tokens from `length` on. Called while these tokens are still there."""

    def learn(self) -> Iterator[None]:
        """Add the new tokens. Yields between small steps; a dropped iterator leaves the rest to the next call."""

    def propose(self, token_count: int) -> Sequence[int]:
        """At most `token_count` tokens that may follow."""

    def finish(self) -> Iterator[None]:
        """Keep what others can use of a finished completion: by default nothing. Yields between small steps."""
        return iter(())


class ModelFreeProposer:
    """Drafts from earlier text."""

    def __init__(
        self, method: str, new_index: Callable[[TokenState, str], TokenIndex], settings: DraftSettings
    ) -> None:
        """`new_index` makes the index of a sequence, for its tokens and its scope."""
        self._method = method
        self._new_index = new_index
        self._max_length = settings.max_length or 0
        # Others wait, as they do for a place in a KV cache.
        self._places = FairPlaces(settings.max_sequences, extra_places(settings.max_sequences))
        self._step_profile = StepProfile()
        self.vocabularies = None
        """It needs none: it proposes what was there before, whatever it means."""
        # One sequence at a time adds what it leaves to others.
        self._finishing = asyncio.Lock()

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            name=self._method,
            architecture=self._method,
            vocabulary_size=0,
            tokenizer_hash="",
            max_length=self._max_length,
            dtype="",
            service_version=tandem.__version__,
            step_profile=self._step_profile,
        )

    @property
    def is_full(self) -> bool:
        return not self._places.has_room("")

    @property
    def overdue_seconds(self) -> float:
        """0: it has no steps."""
        return 0.0

    def kv_usage(self) -> None:
        """There is no KV cache."""

    async def start(self) -> None:
        """Measure what a token of a proposal takes, in a text that repeats itself."""
        tokens = TokenState(2 * _PROFILED_TOKENS)
        index = self._new_index(tokens, "")
        sequence = ModelFreeSequence(tokens, index)
        text = tuple(token % (_PROFILED_TOKENS // 4) for token in range(_PROFILED_TOKENS))
        costs = []
        for token in range(_PROFILED_TOKENS // 4):
            step = ProposeStep(Delta(len(tokens), (token,) if token else text), _PROFILED_LENGTH)
            proposal = await sequence.propose(step)
            if token and proposal.cost is not None and proposal.token_ids:
                costs.append(proposal.cost.seconds / len(proposal.token_ids))
        if costs:
            self._step_profile = StepProfile({(1, 1): statistics.median(costs)}, int(time.time()))

    async def close(self) -> None:
        """Do nothing."""

    @asynccontextmanager
    async def sequence(self, options: DraftOptions) -> AsyncIterator[ModelFreeSequence]:
        """Keep a sequence for as long as the context lives. Others of its scope learn from it only if it ends without
        an error."""
        if self._max_length and options.max_length > self._max_length:
            raise InvalidRequestError(
                f"a sequence of up to {options.max_length} tokens was asked for; this service takes "
                f"up to {self._max_length}"
            )
        await self._places.take(options.client)
        try:
            tokens = TokenState(options.max_length or self._max_length)
            index = self._new_index(tokens, options.scope)
            yield ModelFreeSequence(tokens, index)
            async with self._finishing:
                await in_pieces(index.finish())
        finally:
            self._places.leave(options.client)


@dataclass(slots=True, eq=False)
class ModelFreeSequence:
    """One sequence that is drafted for."""

    _tokens: TokenState
    _index: TokenIndex
    pushed: None = None
    """Nothing is drafted ahead: an answer takes less time than its way."""

    async def propose(self, step: ProposeStep) -> Proposal:
        began = time.perf_counter()
        kept = self._tokens.kept_length(step.delta)
        if kept < len(self._tokens):
            self._index.forget(kept)
        self._tokens.apply(step.delta, kept)
        await in_pieces(self._index.learn())
        token_ids = tuple(self._index.propose(step.token_count))
        return Proposal(len(self._tokens), token_ids, cost=StepCost(time.perf_counter() - began, 1, 1))


async def in_pieces(steps: Iterator[None]) -> None:
    """Run all steps, and let the event loop run every now and then."""
    for done, _ in enumerate(steps, start=1):
        # One or two milliseconds of work: other sequences wait no longer for a long prompt
        if done % 128 == 0:
            await asyncio.sleep(0)


_LARGEST_ID = 2**31 - 1
"""Ids travel as signed 32-bit integers."""


class TokenState:
    """Prompt and committed tokens of a sequence."""

    def __init__(self, max_length: int) -> None:
        self.token_ids: array[int] = array("i")
        """Four bytes each, and slices compare at the speed of C. Changed in place, never replaced."""
        self.prompt_length: int | None = None
        """Length after the first delta, in tokens; None before it. Later tokens are the response."""
        self._max_length = max_length

    def __len__(self) -> int:
        return len(self.token_ids)

    def kept_length(self, delta: Delta) -> int:
        """Number of present tokens that a delta leaves unchanged.

        It is more than the base length where the delta repeats present tokens: a repeated step costs nothing.
        """
        self._check(delta)
        present = self.token_ids[delta.base_length : delta.length]
        return delta.base_length + common_length(present, delta.token_ids)

    def apply(self, delta: Delta, kept_length: int) -> None:
        del self.token_ids[kept_length:]
        self.token_ids.extend(delta.token_ids[kept_length - delta.base_length :])
        if self.prompt_length is None:
            self.prompt_length = len(self)

    def response(self) -> array[int]:
        return self.token_ids[self.prompt_length or 0 :]

    def _check(self, delta: Delta) -> None:
        check_start(delta, len(self))
        if self._max_length and delta.length > self._max_length:
            raise InvalidRequestError(
                f"the sequence would have {delta.length} tokens, but its limit is {self._max_length}"
            )
        if delta.token_ids and not 0 <= min(delta.token_ids) <= max(delta.token_ids) <= _LARGEST_ID:
            wrong = next(token_id for token_id in delta.token_ids if not 0 <= token_id <= _LARGEST_ID)
            raise InvalidRequestError(f"token id {wrong} is out of range; ids must be in 0..{_LARGEST_ID}")
