"""Drafting for targets with other tokenizers: a layer between a target's tokens and a draft that knows its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from tandem.drafting.proposal import SharedTokens
from tandem.engine.models.checkpoint import parsed_tokenizer
from tandem.errors import ConfigurationError, ServiceUnavailableError
from tandem.model.grammar import Grammars
from tandem.model.types import (
    Coverage,
    Delta,
    DraftOptions,
    ModelInfo,
    RowKind,
    SamplingParams,
    TargetTokenizer,
    VocabularyMapping,
)
from tandem.model.vocabulary import SharedVocabulary, Transcript, Vocabulary, vocabulary_hash

logger = logging.getLogger(__name__)

MAX_TARGETS = 8
"""Tokenizers of targets that are kept; one of 128k tokens takes some 100 MB."""


class Vocabularies:
    """The vocabularies of targets, and what each shares with the draft's."""

    def __init__(self, tokenizer_file: Path, model: ModelInfo) -> None:
        """For a draft and the file tokenizer.json beside it, which is read with the first target's."""
        self._file = tokenizer_file
        self._model = model
        self._known: OrderedDict[str, Mapped] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "vocabularies")

    def coverage(self, target_hash: str) -> Coverage | None:
        mapped = self._known.get(target_hash)
        return None if mapped is None else mapped.coverage

    async def add(self, target: TargetTokenizer) -> Coverage:
        loop = asyncio.get_running_loop()
        coverage = await loop.run_in_executor(self._thread, self._add, target)
        if (mapped := self._known.get(target.hash)) is not None:
            await mapped.grammars.prepare()
        return coverage

    def mapped(self, options: DraftOptions) -> tuple[Mapped, DraftOptions]:
        """How a sequence is drafted for, and the draft's options for it."""
        mapped = self._known.get(options.tokenizer_hash)
        if mapped is None:
            raise ServiceUnavailableError(
                f"the target's tokenizer (hash {options.tokenizer_hash[:12]}) is not known; it has to be sent first"
            )
        self._known.move_to_end(options.tokenizer_hash)
        # Penalties count tokens of the target's, so the draft proposes without them.
        plain = options.sampling.without_penalties()
        own = replace(options, max_length=0, vocabulary_size=0, sampling=plain)
        if not _writes_text(options):
            return mapped, own
        # The draft's likeliest text: whatever it is, the target decides by its own tokens. Above temperature 0 the
        # outcomes of a verification depend on noise, of which a text knows nothing.
        ahead = options.ahead if options.sampling.is_greedy and options.grammar is None else None
        own = replace(own, sampling=SamplingParams(temperature=0.0), row_kind=RowKind.TOKEN, ahead=ahead)
        return replace(mapped, tokens=None), own

    @cached_property
    def _own(self) -> Vocabulary:
        tokenizer = parsed_tokenizer(self._file.read_bytes(), str(self._file))
        return Vocabulary(tokenizer, self._model.vocabulary_size, "the draft's")

    def _add(self, target: TargetTokenizer) -> Coverage:
        if (known := self.coverage(target.hash)) is not None:
            return known  # several coordinators of a target begin at once
        mapped = self._known[target.hash] = self._map(target)
        while len(self._known) > MAX_TARGETS:
            self._known.popitem(last=False)
        logger.info("vocabulary mapped", extra={"tokenizer": target.hash[:12], **asdict(mapped.coverage)})
        return mapped.coverage

    def _map(self, target: TargetTokenizer) -> Mapped:
        began = time.perf_counter()
        tokenizer = parsed_tokenizer(target.content, "that the coordinator sent")
        if (found := vocabulary_hash(tokenizer)) != target.hash:
            raise ConfigurationError(
                f"a tokenizer was sent as {target.hash[:12]}, but its hash is {found[:12]}; they must be the same"
            )
        theirs = Vocabulary(tokenizer, target.vocabulary_size, "the target's")
        vocabulary = SharedVocabulary(self._own, theirs)
        grammars = Grammars(target.content.decode, target.vocabulary_size, target.eos_token_ids)
        tokens = SharedTokens(vocabulary.draft_ids, vocabulary.target_ids)
        coverage = replace(vocabulary.coverage, build_seconds=time.perf_counter() - began)
        coverage = replace(coverage, token_seconds=vocabulary.seconds_per_token())
        return Mapped(vocabulary, tokens, grammars, coverage)


def _writes_text(options: DraftOptions) -> bool:
    """True where the draft writes text freely.

    Without distributions it must be the very text that the target chooses, so at temperatures above 0, where the
    draft shares the target's noise for the tokens that both have, that is left to those. So are grammars, which
    speak of the target's tokens.
    """
    if options.with_token_logits or options.vocabulary_mapping is VocabularyMapping.TLI:
        return False
    if options.vocabulary_mapping is VocabularyMapping.SLEM:
        return True
    return options.sampling.is_greedy and options.grammar is None


@dataclass(frozen=True, slots=True)
class Mapped:
    """The mapping between the draft's vocabulary and one target's."""

    vocabulary: SharedVocabulary
    tokens: SharedTokens | None
    """The tokens that the draft draws among; None: all of its own, and its text is tokenized anew."""
    grammars: Grammars
    """Compiles what sequences may be, in the target's tokens."""
    coverage: Coverage


class MappedTrunk:
    """The proposal that is being verified, in the draft's tokens, and how outcomes in the target's tokens branch off.

    A branch begins where it would if the outcome were asked for: an outcome that the draft reads as other tokens than
    the trunk's and one more has none.
    """

    def __init__(self, mapped: Mapped, transcript: Transcript, proposed: Sequence[int], read: int) -> None:
        """`proposed` is in the target's tokens; `read` counts the transcript's first tokens that the draft has."""
        vocabulary = mapped.vocabulary
        self.tokens = mapped.tokens
        """The tokens that branches draw among; None: all of the draft's own."""
        self.base_length = transcript.length
        """The target's tokens before the proposal."""
        self._vocabulary = vocabulary
        self._end = transcript.end
        self._texts = [b""]
        """The proposal's text up to each of its places."""
        for token_id in proposed:
            self._texts.append(self._texts[-1] + vocabulary.target.text(token_id))
        lists = [self._end.tokens(text) for text in self._texts]
        whole = lists[-1]
        self._own = whole or []
        """The draft's tokens of the trunk, from the transcript's end on."""
        self.ends = [
            -1 if own is None or whole is None or whole[: len(own)] != own else self._end.count + len(own)
            for own in lists
        ]
        """The draft's tokens up to each place; -1 where a token of the draft's spans it."""
        self.places = [place for place, end in enumerate(self.ends) if end > 0]
        """Those at which outcomes can be drafted for."""
        kept = min(read, self._end.count)
        self.delta = Delta(kept, (*transcript.token_ids[kept : self._end.count], *self._own))
        """Makes the draft's sequence the trunk."""

    @property
    def row_count(self) -> int:
        """Number of the trunk's last positions of which rows are needed."""
        return self.delta.length - self.ends[self.places[0]] + 1

    def rows(self, logits: Tensor) -> Tensor:
        """The rows of `places`, of the tokens to draw among: from logits of the last `row_count` positions."""
        first = self.ends[self.places[0]]
        own = logits[[self.ends[place] - first for place in self.places]]
        return own if self.tokens is None else self.tokens.restrict(own)

    def candidates(
        self, columns: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The target's tokens for columns of rows, with their scores, the best first."""
        vocabulary = self._vocabulary
        found: list[dict[int, float]] = []
        for own, values in zip(columns, scores, strict=True):
            row: dict[int, float] = {}
            for column, score in zip(own, values, strict=True):
                is_own = self.tokens is None
                token_id = vocabulary.first_id(column) if is_own else int(vocabulary.target_ids[column])
                if token_id is not None:
                    row.setdefault(token_id, score)
            found.append(row)
        return [[*row] for row in found], [[*row.values()] for row in found]

    def begin(self, accepted: int, token_id: int) -> int | None:
        """The draft's token with which the branch of an outcome begins; None if it cannot be one token alone."""
        own = self._end.tokens(self._texts[accepted] + self._vocabulary.target.text(token_id))
        before = self.ends[accepted] - self._end.count
        if own is None or len(own) != before + 1 or own[:-1] != self._own[:before]:
            return None
        return own[-1]

    def said(self, draft_token_ids: Sequence[int], *, is_last: bool) -> tuple[int, ...]:
        """The target's tokens of what a branch says, while it goes on those before its last word."""
        found = self._vocabulary.retokenize(draft_token_ids)
        if is_last:
            return found
        begins = [
            i for i, token_id in enumerate(found) if self._vocabulary.target.text(token_id)[:1].isspace()
        ]
        return found[: begins[-1]] if begins else ()
