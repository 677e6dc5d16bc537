"""Prompt lookup: what followed these words before will follow them again (no model).

The longest n-gram that ends the sequence and occurred earlier in it is looked up, and the tokens that followed it then
are proposed (Saxena 2023, "Prompt Lookup Decoding"; vLLM's method `ngram` with `prompt_lookup_min` and
`prompt_lookup_max`). It pays where a completion copies from its prompt: editing, summarising, retrieval.

Cost: a proposal looks up one n-gram of each size, whatever the length of the sequence; a new token adds one of each
size. Memory: about 150 bytes for each token and each size in the range, given back when the sequence ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from draft_service.proposers.model_free import ModelFreeProposer, SequenceLimits
from draft_service.proposers.token_state import TokenState
from tandem.errors import ConfigurationError

LookupMatch = Literal["latest", "earliest"]

_DEFAULT_SIZE = 5
_NONE = -1


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """What prompt lookup can be told. Sizes are in tokens."""

    prompt_lookup_min: int = _DEFAULT_SIZE
    """Smallest n-gram to look up. vLLM's name."""
    prompt_lookup_max: int = _DEFAULT_SIZE
    """Largest n-gram to look up; the largest that is found wins. vLLM's name."""
    prompt_lookup_match: LookupMatch = "latest"
    """Which of several earlier occurrences counts: the most recent, or the earliest as in vLLM on a CPU."""

    def __post_init__(self) -> None:
        if broken := self._broken():
            raise ConfigurationError("; ".join(broken))

    @classmethod
    def resolve(
        cls,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        prompt_lookup_match: LookupMatch = "latest",
    ) -> NgramOptions:
        """Fill in the sizes that were not given, as vLLM does: the other one's, or 5 when neither was.

        Raises:
            ConfigurationError: with a sentence for each option that is wrong.
        """
        smallest = prompt_lookup_max if prompt_lookup_min is None else prompt_lookup_min
        largest = prompt_lookup_min if prompt_lookup_max is None else prompt_lookup_max
        return cls(
            _DEFAULT_SIZE if smallest is None else smallest,
            _DEFAULT_SIZE if largest is None else largest,
            prompt_lookup_match,
        )

    def _broken(self) -> list[str]:
        sizes = {"prompt_lookup_min": self.prompt_lookup_min, "prompt_lookup_max": self.prompt_lookup_max}
        broken = [f"{name} is {size}; it must be at least 1" for name, size in sizes.items() if size < 1]
        if not broken and self.prompt_lookup_min > self.prompt_lookup_max:
            broken.append(
                f"prompt_lookup_min is {self.prompt_lookup_min} and prompt_lookup_max is {self.prompt_lookup_max}; "
                "the minimum must not be above the maximum"
            )
        if self.prompt_lookup_match not in get_args(LookupMatch):
            words = " or ".join(get_args(LookupMatch))
            broken.append(f"prompt_lookup_match is {self.prompt_lookup_match}; it must be {words}")
        return broken


def ngram_proposer(options: NgramOptions, limits: SequenceLimits) -> ModelFreeProposer:
    """Draft by prompt lookup."""
    return ModelFreeProposer(
        "ngram",
        lambda tokens: NgramIndex(tokens, options),
        limits,
    )


class NgramIndex:
    """Where each n-gram of a sequence occurred."""

    def __init__(self, tokens: TokenState, options: NgramOptions) -> None:
        self._tokens = tokens.token_ids
        sizes = range(options.prompt_lookup_max, options.prompt_lookup_min - 1, -1)
        self._largest_first = [_Occurrences(size, options.prompt_lookup_match) for size in sizes]

    def forget(self, length: int) -> None:
        """Unlearn n-grams that reach past `length` or that nothing follows any more."""
        for occurrences in self._largest_first:
            occurrences.forget(self._tokens, length)

    def learn(self) -> Iterator[None]:
        """Note the new n-grams; the one that ends the sequence is not noted, since nothing has followed it yet."""
        for occurrences in self._largest_first:
            yield from occurrences.learn(self._tokens)

    def propose(self, token_count: int) -> Sequence[int]:
        """The tokens that followed the longest n-gram which ends the sequence and occurred before."""
        for occurrences in self._largest_first:
            end = occurrences.end_of_match(self._tokens)
            if end is not None:
                return self._tokens[end : end + token_count]
        return ()

    def finish(self) -> Iterator[None]:
        """Other sequences learn nothing from this one."""
        return iter(())


class _Occurrences:
    """Where each n-gram of one size occurred: the position after its last token.

    The keys are the n-gram's bytes, so two different ones never meet, as hashes might.
    """

    def __init__(self, size: int, match: LookupMatch) -> None:
        self._size = size
        self._keeps_earliest = match == "earliest"
        self._ends: dict[bytes, int] = {}
        # For the n-gram that ends at size, size + 1, ...: what its entry held before, so that it can be restored.
        self._replaced = array("i")

    def learn(self, tokens: array[int]) -> Iterator[None]:
        size, ends = self._size, self._ends
        for end in range(size + len(self._replaced), len(tokens)):
            key = tokens[end - size : end].tobytes()
            known = ends.get(key, _NONE)
            if known == _NONE or not self._keeps_earliest:
                ends[key] = end
            self._replaced.append(known)
            yield

    def forget(self, tokens: array[int], length: int) -> None:
        # An n-gram that ends at `length` exactly goes too: what followed it is gone.
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
