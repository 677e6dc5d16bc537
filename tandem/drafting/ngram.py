"""Prompt lookup: the tokens that followed these ones before will follow them again (no model).

The method looks up the longest n-gram that ends the sequence and occurred in it before, and proposes the tokens that
followed it then (Saxena 2023, "Prompt Lookup Decoding"; vLLM's method `ngram` with `prompt_lookup_min` and
`prompt_lookup_max`). Drafting this way pays where a completion copies from its prompt: editing, summarising, retrieval.

Cost: a proposal looks up one n-gram of each size, whatever the length of the sequence; a new token adds one of each
size. Memory: about 150 bytes for each token and each size in the range, given back when the sequence ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from tandem.config.speculative import DraftingOptions, LookupMatch
from tandem.drafting.tokens import TokenIndex, TokenState

_NONE = -1
"""Stands for the previous position of an n-gram that is new."""


class NgramIndex(TokenIndex):
    """Positions of each n-gram of a sequence."""

    def __init__(self, tokens: TokenState, options: DraftingOptions) -> None:
        self._tokens = tokens.token_ids
        sizes = range(options.prompt_lookup_max, options.prompt_lookup_min - 1, -1)
        self._largest_first = [_Occurrences(size, options.prompt_lookup_match) for size in sizes]

    def forget(self, length: int) -> None:
        for occurrences in self._largest_first:
            occurrences.forget(self._tokens, length)

    def learn(self) -> Iterator[None]:
        """Add the new n-grams. The one that ends the sequence has to wait, since nothing has followed it yet."""
        for occurrences in self._largest_first:
            yield from occurrences.learn(self._tokens)

    def propose(self, token_count: int) -> Sequence[int]:
        """The tokens that followed the longest n-gram which ends the sequence and occurred before."""
        for occurrences in self._largest_first:
            end = occurrences.end_of_match(self._tokens)
            if end is not None:
                return self._tokens[end : end + token_count]
        return ()


class _Occurrences:
    """Positions of each n-gram of one size: the position after its last token.

    The keys are the n-grams' bytes, which never collide as hashes might.
    """

    def __init__(self, size: int, match: LookupMatch) -> None:
        self._size = size
        self._keeps_earliest = match == "earliest"
        self._ends: dict[bytes, int] = {}
        # Previous entries of the n-grams that end at size, size + 1, ..., so that `forget` can restore them.
        self._replaced = array("i")

    def learn(self, tokens: array[int]) -> Iterator[None]:
        size = self._size
        ends = self._ends
        for end in range(size + len(self._replaced), len(tokens)):
            key = tokens[end - size : end].tobytes()
            known = ends.get(key, _NONE)
            if known == _NONE or not self._keeps_earliest:
                ends[key] = end
            self._replaced.append(known)
            yield

    def forget(self, tokens: array[int], length: int) -> None:
        # An n-gram that ends exactly at `length` goes too: no token follows it any more.
        while self._replaced and (end := self._size + len(self._replaced) - 1) >= length:
            key = tokens[end - self._size : end].tobytes()
            known = self._replaced.pop()
            if known == _NONE:
                del self._ends[key]
            else:
                # Where the earliest is kept, the entry is `known` already.
                self._ends[key] = known

    def end_of_match(self, tokens: array[int]) -> int | None:
        if len(tokens) < self._size:
            return None
        return self._ends.get(tokens[-self._size :].tobytes())
