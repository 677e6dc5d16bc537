"""Drafting for targets with other tokenizers: a layer between a target's tokens and a draft that knows its own."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from draft_service.proposers.drafting import SharedTokens
from tandem.engine.models.checkpoint import parsed_tokenizer, vocabulary_hash
from tandem.errors import ConfigurationError, ServiceUnavailableError
from tandem.types import (
    Coverage,
    Delta,
    DraftOptions,
    ModelInfo,
    Proposal,
    ProposeStep,
    RowKind,
    SamplingParams,
    TargetTokenizer,
    VocabularyMapping,
)
from tandem.vocabulary import SharedVocabulary, Transcript, UnknownTokenizerError, Vocabulary

logger = logging.getLogger(__name__)

MAX_TARGETS = 8
"""Tokenizers of targets that are kept; one of 128k tokens takes some 100 MB."""
_MANY_TOKENS = 512
"""So many tokens are read in a thread: it takes a millisecond."""


class Vocabularies:
    """The vocabularies of targets, and what each shares with the draft's."""

    def __init__(self, tokenizer_file: Path, model: ModelInfo) -> None:
        """For a draft and the file tokenizer.json beside it, which is read with the first target's."""
        self._file = tokenizer_file
        self._model = model
        self._known: OrderedDict[str, Shared] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "vocabularies")

    def coverage(self, target_hash: str) -> Coverage | None:
        """What the draft shares with a target; None for one that is not known."""
        shared = self._known.get(target_hash)
        return None if shared is None else shared.vocabulary.coverage

    async def add(self, target: TargetTokenizer) -> Coverage:
        """Take the tokenizer of a target.

        Raises:
            ConfigurationError: it is no tokenizer, another one than the hash says, or one that cannot be mapped.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._added, target)

    def mapped(self, options: DraftOptions) -> Mapped:
        """How a sequence is drafted for.

        Raises:
            ServiceUnavailableError: its target's vocabulary is not known any more.
        """
        shared = self._known.get(options.tokenizer_hash)
        if shared is None:
            raise ServiceUnavailableError(
                f"the target's tokenizer (hash {options.tokenizer_hash[:12]}) is not known; it has to be sent first"
            )
        self._known.move_to_end(options.tokenizer_hash)
        return Mapped(shared, options)

    @cached_property
    def _own(self) -> Vocabulary:
        tokenizer = parsed_tokenizer(self._file.read_bytes(), str(self._file))
        return Vocabulary(tokenizer, self._model.vocabulary_size)

    def _added(self, target: TargetTokenizer) -> Coverage:
        if (known := self.coverage(target.hash)) is not None:
            return known  # several coordinators of a target begin at once
        shared = self._known[target.hash] = self._shared(target)
        while len(self._known) > MAX_TARGETS:
            self._known.popitem(last=False)
        found = shared.vocabulary.coverage
        logger.info("vocabulary mapped", extra={"tokenizer": target.hash[:12], **asdict(found)})
        return found

    def _shared(self, target: TargetTokenizer) -> Shared:
        tokenizer = parsed_tokenizer(target.content, "that the coordinator sent")
        if (found := vocabulary_hash(tokenizer)) != target.hash:
            raise ConfigurationError(
                f"a tokenizer was sent as {target.hash[:12]}, but its hash is {found[:12]}; they must be the same"
            )
        try:
            own = self._own
        except UnknownTokenizerError as error:
            raise ConfigurationError(f"the draft's tokenizer cannot be mapped to another: {error}") from None
        try:
            vocabulary = SharedVocabulary(own, Vocabulary(tokenizer, target.vocabulary_size))
        except UnknownTokenizerError as error:
            raise ConfigurationError(
                f"the target's tokenizer cannot be mapped to the draft's: {error}"
            ) from None
        return Shared(vocabulary, SharedTokens(vocabulary.draft_ids, vocabulary.target_ids))


@dataclass(frozen=True, slots=True)
class Shared:
    """What the draft shares with one target."""

    vocabulary: SharedVocabulary
    tokens: SharedTokens


class Mapped:
    """How one sequence is drafted for."""

    def __init__(self, shared: Shared, options: DraftOptions) -> None:
        self.vocabulary = shared.vocabulary
        self.tokens: SharedTokens | None = shared.tokens
        """The tokens that the draft draws among; None: all of its own, and its text is tokenized anew."""
        # The grammar is the target's business: its tokens would have to be found in the draft's.
        self.draft_options = replace(options, max_length=0, ahead=None, grammar=None)
        """Options with which the draft opens the sequence."""
        if self._writes_text(options):
            self.tokens = None
            # The draft's likeliest text: whatever it is, the target decides by its own tokens.
            greedy = SamplingParams(temperature=0.0)
            self.draft_options = replace(self.draft_options, sampling=greedy, row_kind=RowKind.TOKEN)

    @staticmethod
    def _writes_text(options: DraftOptions) -> bool:
        """True where the draft writes text freely.

        Without distributions it must be the very text that the target chooses, so at temperatures above 0, where the
        draft shares the target's noise for the tokens that both have, that is left to those.
        """
        if options.with_token_logits or options.vocabulary_mapping is VocabularyMapping.TLI:
            return False
        return options.vocabulary_mapping is VocabularyMapping.SLEM or options.sampling.is_greedy


class _Drafted(Protocol):
    """The draft's own sequence."""

    def room(self, length: int) -> int:
        """How many tokens can be proposed behind so many."""

    async def proposed(
        self, delta: Delta, count: int, base_length: int | None = None, shared: SharedTokens | None = None
    ) -> Proposal:
        """Apply a delta and draw tokens."""


class MappedSequence:
    """A sequence in a target's tokens, which is drafted for in the draft's."""

    def __init__(self, drafted: _Drafted, mapped: Mapped) -> None:
        self._drafted = drafted
        self._mapped = mapped
        self._transcript = Transcript(mapped.vocabulary)
        self._read = 0
        """The transcript's first tokens that the draft has."""
        self.pushed = None
        """Nothing is drafted ahead."""

    async def propose(self, step: ProposeStep) -> Proposal | None:
        """Apply the step's delta and draw the tokens that follow. None are proposed while the text ends within a
        character, and behind a text that is longer than the draft can read.

        Raises:
            InvalidRequestError: the delta does not fit the sequence.
            NonFiniteLogitsError: the draft computed logits that are not finite.
        """
        transcript = self._transcript
        if len(step.delta.token_ids) > _MANY_TOKENS:
            changed = await asyncio.to_thread(transcript.apply, step.delta)
        else:
            changed = transcript.apply(step.delta)
        self._read = min(self._read, changed.base_length)
        if not step.is_answered:
            return None
        base_length, room = step.delta.length, self._drafted.room(len(transcript.token_ids))
        count = min(step.token_count, room) if transcript.is_whole and transcript.token_ids else 0
        if room < 1 or not transcript.token_ids:
            return Proposal(base_length)
        delta = Delta(self._read, transcript.token_ids[self._read :])
        self._read = len(transcript.token_ids)
        proposal = await self._drafted.proposed(delta, count, base_length, self._mapped.tokens)
        if self._mapped.tokens is None:
            written = self._mapped.vocabulary.retokenized(proposal.token_ids)
            return Proposal(base_length, written[: step.token_count], cost=proposal.cost)
        return proposal
