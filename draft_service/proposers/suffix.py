"""Suffix decoding: the most frequent continuation in this sequence or in earlier responses (no model).

Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975), as vLLM's method `suffix` uses it. One suffix tree holds the
sequence itself, a second one the last finished responses. For every length at which a tree holds the sequence's end,
the method reads off the most probable continuation, no longer than `max_spec_factor` times that length. It proposes
the one with the highest score: the expected number of right tokens. So it proposes more where the past predicts well,
and nothing where the past says nothing.

This is not the package that vLLM uses. arctic-inference 0.3.0 comes as source only and needs torch, cmake and a C++20
compiler to build, while a draft service without a model should need none of them (once built by hand it runs without
torch, five times as fast as this). Its tree cannot take back tokens, as deltas do, and learns from responses while
they are still being written, abandoned ones too. It counts a text's end as a continuation; the paper does not.

Proposals depend on the responses to other requests; the text at temperature 0 or under the rule `strict` does not. Yet
its speed reveals whether a similar text was generated before. Where one user must not learn that about another, keep no
responses (`suffix_decoding_max_cached_requests` 0).

Memory: about 300 bytes for each token of a running sequence and of each response that is kept, at most 500.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from draft_service.proposers.model_free import ModelFreeProposer, SequenceLimits
from draft_service.proposers.suffix_tree import END, Continuation, SuffixTree, window_at
from draft_service.proposers.token_state import TokenState
from tandem.config.speculative import DraftingOptions

# The sequence's own text in its own tree.
_OWN = 0
# A product like 0.1 * 30 must not fall short of 3.
_ROUNDING = 1e-6


def suffix_proposer(options: DraftingOptions, limits: SequenceLimits) -> ModelFreeProposer:
    """Draft by suffix decoding."""
    responses = ResponseCache(
        options.suffix_decoding_max_tree_depth, options.suffix_decoding_max_cached_requests
    )
    return ModelFreeProposer(
        "suffix",
        lambda tokens: SuffixIndex(tokens, responses, options),
        limits,
    )


class ResponseCache:
    """The last finished responses."""

    def __init__(self, max_depth: int, max_responses: int) -> None:
        self.tree = SuffixTree(max_depth)
        self._max_responses = max_responses
        # How many windows of each response the tree holds; the oldest response comes first.
        self._window_counts: dict[int, int] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._window_counts)

    def add(self, response: array[int]) -> Iterator[None]:
        """Keep a response, and forget the oldest if there are too many. Yields between small steps.

        Only one response may be added at a time. An iterator that is dropped half-way leaves half of its response.
        """
        if self._max_responses == 0 or not response:
            return
        while len(self) >= self._max_responses:
            yield from self._forget_oldest()
        text_id, self._next_id = self._next_id, self._next_id + 1
        self.tree.texts[text_id] = response + array("i", [END])
        self._window_counts[text_id] = 0
        for position in range(len(response)):
            self.tree.add(window_at(text_id, position))
            self._window_counts[text_id] += 1
            yield

    def _forget_oldest(self) -> Iterator[None]:
        text_id = next(iter(self._window_counts))
        while (count := self._window_counts[text_id]) > 0:
            self.tree.remove(window_at(text_id, count - 1))
            self._window_counts[text_id] -= 1
            yield
        del self._window_counts[text_id]
        del self.tree.texts[text_id]


class SuffixIndex:
    """The suffix tree of one sequence, beside that of the responses that all sequences share."""

    def __init__(self, tokens: TokenState, responses: ResponseCache, options: DraftingOptions) -> None:
        self._tokens = tokens
        self._responses = responses
        self._options = options
        self._tree = SuffixTree(options.suffix_decoding_max_tree_depth)
        self._tree.texts[_OWN] = tokens.token_ids
        self._window_count = 0

    def forget(self, length: int) -> None:
        """Remove the windows that reach past `length`."""
        first = max(0, length - self._tree.max_depth + 1)
        for position in reversed(range(first, self._window_count)):
            self._tree.remove(window_at(_OWN, position))
        self._window_count = min(first, self._window_count)

    def learn(self) -> Iterator[None]:
        """Add windows up to the first that repeats an earlier one; later windows are part of it and repeat too."""
        while self._window_count < len(self._tokens):
            if not self._tree.add(window_at(_OWN, self._window_count)):
                return
            self._window_count += 1
            yield

    def propose(self, token_count: int) -> Sequence[int]:
        """The continuation with the highest score; the sequence's own among equals."""
        context = self._tokens.token_ids[-self._tree.max_depth :]
        best = best_continuation(self._tree, context, token_count, self._options)
        if len(self._responses):
            other = best_continuation(self._responses.tree, context, token_count, self._options)
            best = max(best, other, key=lambda continuation: continuation.score)
        return best.token_ids

    def finish(self) -> Iterator[None]:
        """Add the response, without the prompt, to those that all sequences learn from."""
        return self._responses.add(self._tokens.response())


def best_continuation(
    tree: SuffixTree, context: array[int], token_count: int, options: DraftingOptions
) -> Continuation:
    """The tree's best continuation of the context: the highest score over all match lengths.

    The longest match wins among equal scores.
    """
    matches = []
    for length in range(1, min(len(context), tree.max_depth - 1) + 1):
        node = tree.find(context[-length:])
        if node is None:
            break
        matches.append(node)
    best = Continuation()
    for length, node in reversed(list(enumerate(matches, start=1))):
        limit = min(token_count, int(length * options.suffix_decoding_max_spec_factor + _ROUNDING))
        # No token adds more than 1 to a score, so most short matches can be skipped.
        if limit <= best.score:
            continue
        found = tree.continuation(node, length, limit, options.suffix_decoding_min_token_prob)
        if found.score > best.score:
            best = found
    return best
