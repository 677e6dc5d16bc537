"""Base of drafting methods without a model: each sequence has an index of its tokens, which deltas change.

A method supplies a `TokenIndex`, a plain data structure without event loop or gRPC. Python takes up to a second to
read a prompt of 100k tokens, so an index learns in small steps and the event loop runs between them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import tandem
from tandem.drafting.tokens import TokenIndex, TokenState, in_pieces
from tandem.errors import InvalidRequestError
from tandem.model.types import Delta, DraftOptions, ModelInfo, Proposal, ProposeStep, StepCost, StepProfile
from tandem.serving.fair_places import FairPlaces, extra_places
from tandem_draft.settings import DraftSettings

_PROFILED_TOKENS = 256
"""Tokens of the text by which the method measures itself: a short chat."""
_PROFILED_LENGTH = 4
"""Tokens of the proposals that it makes then: the default length."""


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
