"""Text that repeats itself: what followed the last two tokens before takes the place of a head's own proposal.

A head foresees a token or two of new text. Where the text repeats itself, prompt lookup foresees as many as are asked
for, and costs nothing. What is proposed so has no distribution, so this is for rounds that tokens alone decide: at
temperature 0, and under `strict`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.config.speculative import DraftingOptions
from tandem.drafting.ngram import NgramIndex
from tandem.drafting.tokens import TokenState
from tandem.model.types import common_length

_LOOKUP = DraftingOptions(prompt_lookup_min=2, prompt_lookup_max=2)
"""Counted with SmolLM2 and its head: with two tokens as many were accepted as by suffix decoding, with four fewer."""
_MEMORY = 32.0
"""Proposals that a mean is of, about."""
_FORGIVENESS = 1.0 / 1024
"""Accepted tokens by which repeats that were passed over seem better each time: the text may have changed."""


class Odds:
    """Accepted tokens of a proposal, by way; of all sequences that are decided alike."""

    def __init__(self) -> None:
        self._repeated = 2.0
        """More than most heads have at first, so that it is tried."""
        self._own = 1.0

    def prefer_repeats(self) -> bool:
        if self._repeated >= self._own:
            return True
        self._repeated += _FORGIVENESS
        return False

    def add(self, accepted: int, *, is_repeated: bool) -> None:
        if is_repeated:
            self._repeated += (accepted - self._repeated) / _MEMORY
        else:
            self._own += (accepted - self._own) / _MEMORY


class Repeats:
    """Proposals for one sequence from its own earlier text."""

    def __init__(self, tokens: TokenState, odds: Odds) -> None:
        self._tokens = tokens
        self._odds = odds
        self._index = NgramIndex(tokens, _LOOKUP)
        self._length = 0
        self._proposed: Sequence[int] = ()
        self._is_repeated = False

    def forget(self, length: int) -> None:
        self._index.forget(length)

    def propose(self, token_count: int) -> tuple[int, ...]:
        """Learn the new tokens and how the last proposal fared; then what was said before, if that is the better
        proposal."""
        following = self._tokens.token_ids[self._length :]
        if self._proposed and following:
            accepted = common_length(following, self._proposed)
            self._odds.add(accepted, is_repeated=self._is_repeated)
        for _ in self._index.learn():
            pass
        found = tuple(self._index.propose(token_count)) if token_count else ()
        if found and not self._odds.prefer_repeats():
            found = ()
        self.note(found, is_repeated=True)
        return found

    def note(self, token_ids: Sequence[int], *, is_repeated: bool = False) -> None:
        self._length = len(self._tokens)
        self._proposed = token_ids
        self._is_repeated = is_repeated
