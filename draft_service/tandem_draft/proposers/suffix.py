"""Suffix decoding: the most frequent continuation in this sequence or in its caller's earlier responses (no model).

Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975), as vLLM's method `suffix` uses it. One suffix tree holds the
sequence itself, a second one the last finished responses of its scope (`tandem.serving.scopes`). For every length at
which a tree holds the sequence's end, the method reads off the most probable continuation, no longer than
`max_spec_factor` times that length. It proposes the one with the highest score: the expected number of right tokens.
So it proposes more where the past predicts well, and nothing where the past says nothing.

This is not the package that vLLM uses. arctic-inference 0.3.0 comes as source only and needs torch, cmake and a C++20
compiler to build, while a draft service without a model should need none of them (once built by hand it runs without
torch, five times as fast as this). Its tree cannot take back tokens, as deltas do, and learns from responses while
they are still being written, abandoned ones too. It counts a text's end as a continuation; the paper does not.

Proposals depend on the responses to other requests, and whoever can ask for proposals after beginnings of its choice
reads these responses from them. So each scope has a tree of its own, and a sequence without a scope reads and leaves
nothing.

Memory: about 300 bytes for each token of a running sequence and of each response that is kept, at most 500 over all
scopes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.config.speculative import DraftingOptions
from tandem.drafting.tokens import TokenState
from tandem.model.types import common_length
from tandem_draft.proposers.model_free import ModelFreeProposer
from tandem_draft.settings import DraftSettings

# The sequence's own text in its own tree.
_OWN = 0


def suffix_proposer(settings: DraftSettings) -> ModelFreeProposer:
    """Draft by suffix decoding."""
    responses = ResponseCache(
        settings.suffix_decoding_max_tree_depth, settings.suffix_decoding_max_cached_requests
    )
    return ModelFreeProposer(
        "suffix", lambda tokens, scope: SuffixIndex(tokens, responses, settings, scope), settings
    )


@dataclass(slots=True)
class KeptResponse:
    """A finished response that a tree holds."""

    scope: str
    window_count: int = 0
    """How many of its windows the tree holds."""


class ResponseCache:
    """The last finished responses of all scopes, in a tree for each scope."""

    def __init__(self, max_depth: int, max_responses: int) -> None:
        self._max_depth = max_depth
        self._max_responses = max_responses
        self._trees: dict[str, SuffixTree] = {}
        """Those that hold a response."""
        self._kept: dict[int, KeptResponse] = {}
        """Responses by number, the oldest of any scope first."""
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._kept)

    def tree(self, scope: str) -> SuffixTree | None:
        """The responses of a scope; None if there are none."""
        return self._trees.get(scope)

    def add(self, scope: str, response: array[int]) -> Iterator[None]:
        """Keep a response, and forget the oldest if there are too many. Yields between small steps.

        Only one response may be added at a time. An iterator that is dropped half-way leaves half of its response.
        """
        if self._max_responses == 0 or not scope or not response:
            return
        while len(self) >= self._max_responses:
            yield from self._forget_oldest()
        text_id = self._next_id
        self._next_id += 1
        tree = self._trees.setdefault(scope, SuffixTree(self._max_depth))
        tree.texts[text_id] = response + array("i", [END])
        kept = self._kept[text_id] = KeptResponse(scope)
        for position in range(len(response)):
            tree.add(window_at(text_id, position))
            kept.window_count += 1
            yield

    def _forget_oldest(self) -> Iterator[None]:
        text_id, kept = next(iter(self._kept.items()))
        tree = self._trees[kept.scope]
        while kept.window_count > 0:
            tree.remove(window_at(text_id, kept.window_count - 1))
            kept.window_count -= 1
            yield
        del self._kept[text_id]
        del tree.texts[text_id]
        if not tree.texts:
            del self._trees[kept.scope]


class SuffixIndex:
    """The suffix tree of one sequence, beside that of the responses that sequences of its scope share."""

    def __init__(
        self, tokens: TokenState, responses: ResponseCache, options: DraftingOptions, scope: str = ""
    ) -> None:
        self._tokens = tokens
        self._responses = responses
        self._scope = scope
        self._options = options
        self._tree = SuffixTree(options.suffix_decoding_max_tree_depth)
        self._tree.texts[_OWN] = tokens.token_ids
        self._window_count = 0

    def forget(self, length: int) -> None:
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
        responses = self._responses.tree(self._scope)
        if responses is not None:
            other = best_continuation(responses, context, token_count, self._options)
            best = max(best, other, key=lambda continuation: continuation.score)
        return best.token_ids

    def finish(self) -> Iterator[None]:
        """Add the response, without the prompt, to those that sequences of its scope learn from."""
        return self._responses.add(self._scope, self._tokens.response())


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
        # A product like 0.1 * 30 must not fall short of 3
        limit = min(token_count, int(length * options.suffix_decoding_max_spec_factor + 1e-6))
        # No token adds more than 1 to a score, so most short matches can be skipped.
        if limit <= best.score:
            continue
        found = tree.continuation(node, length, limit, options.suffix_decoding_min_token_prob)
        if found.score > best.score:
            best = found
    return best


END = -1
"""Closes a finished text. No token id is negative."""

_POSITION_BITS = 32
"""Positions are below 2**31."""
_POSITION_MASK = (1 << _POSITION_BITS) - 1


def window_at(text_id: int, position: int) -> int:
    """The window that starts at a position of a text, as one number, which takes less memory than a tuple."""
    return text_id << _POSITION_BITS | position


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens that may follow a string."""

    token_ids: Sequence[int] = ()
    score: float = 0.0
    """Expected number of right tokens: the sum of their estimated probabilities."""


@dataclass(slots=True, eq=False)
class SuffixNode:
    """The end of an edge of the tree."""

    depth: int
    """Tokens from the root to here; for a leaf the depth of the tree, even if its text ends before."""
    count: int
    """Windows that pass through here."""
    latest: int
    """The most recent of them."""
    children: dict[int, SuffixNode] | None = None
    """Children by their first token; None for a leaf."""
    repeats: dict[int, None] | None = None
    """A leaf's windows in their order, when it has several."""


class SuffixTree:
    """Windows of the texts in `texts`, to which the owner may append.

    Windows are added in ascending order. Cost of adding, removing or finding one: a step for each node on its path,
    of which there are at most `max_depth`.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.texts: dict[int, array[int]] = {}
        """Texts by number."""
        self.root = SuffixNode(0, 0, 0, {})

    def add(self, window: int) -> bool:
        """Add a window. False, and nothing is changed, while it is a proper prefix of one that is there."""
        tokens = self._tokens(window)
        path, matched = self._descend(tokens)
        last = path[-1]
        if matched == len(tokens):
            if len(tokens) < self.max_depth and tokens[-1] != END:
                return False
            last.repeats = last.repeats or {last.latest: None}
            last.repeats[window] = None
        else:
            if matched < last.depth:
                last = path[-1] = self._split(path[-2], last, tokens, matched)
            assert last.children is not None
            last.children[tokens[matched]] = SuffixNode(self.max_depth, 1, window)
        for node in path:
            node.count += 1
            node.latest = window
        return True

    def remove(self, window: int) -> None:
        """Remove a window that was added. Its text must still be there."""
        tokens = self._tokens(window)
        path = [self.root]
        while (children := path[-1].children) is not None:
            path.append(children[tokens[path[-1].depth]])
        leaf = path.pop()
        if leaf.repeats is None:
            self._prune(path, tokens)
        else:
            del leaf.repeats[window]
            leaf.count -= 1
            leaf.latest = next(reversed(leaf.repeats))
            if leaf.count == 1:
                leaf.repeats = None
        # From the leaf up, as a node learns its most recent window from its children.
        for node in reversed(path[1:]):
            node.count -= 1
            if node.latest == window and node.children:
                node.latest = max(child.latest for child in node.children.values())

    def find(self, tokens: array[int]) -> SuffixNode | None:
        """The node at or above whose end a string of tokens ends; None when no window begins with it."""
        path, matched = self._descend(tokens)
        return path[-1] if matched == len(tokens) else None

    def continuation(self, node: SuffixNode, depth: int, limit: int, min_prob: float) -> Continuation:
        """The most probable tokens after the string of `depth` tokens that `find` found at `node`.

        A token's probability is estimated as the product, along its path, of each branch's share among the windows
        that go on there; it ends before the probability falls below `min_prob` (Oliaro et al. 2024, arXiv 2411.04975,
        section 4: C(N) and D(N); a single path in place of the tree of it).
        """
        token_ids: list[int] = []
        prob = 1.0
        score = 0.0
        while True:
            for token_id in self._label(node, depth, min(node.depth, depth + limit - len(token_ids))):
                if token_id == END:
                    return Continuation(token_ids, score)
                token_ids.append(token_id)
                score += prob
            going_on = [child for token_id, child in (node.children or {}).items() if token_id != END]
            if len(token_ids) == limit or not going_on:
                return Continuation(token_ids, score)
            # The continuation of most windows; the most recent among equals
            child = max(going_on, key=lambda child: (child.count, child.latest))
            prob *= child.count / sum(each.count for each in going_on)
            if prob < min_prob:
                return Continuation(token_ids, score)
            node, depth = child, node.depth

    def _tokens(self, window: int) -> array[int]:
        position = window & _POSITION_MASK
        return self.texts[window >> _POSITION_BITS][position : position + self.max_depth]

    def _label(self, node: SuffixNode, start: int, end: int) -> array[int]:
        """Tokens `start` to `end` of the path to a node, as far as its latest text has them."""
        position = node.latest & _POSITION_MASK
        return self.texts[node.latest >> _POSITION_BITS][position + start : position + end]

    def _descend(self, tokens: array[int]) -> tuple[list[SuffixNode], int]:
        """The nodes on the way along a string, and how much of it is there. The last one's end may lie further on."""
        path = [self.root]
        depth = 0
        while depth < len(tokens):
            children = path[-1].children
            child = children.get(tokens[depth]) if children else None
            if child is None:
                break
            path.append(child)
            end = min(child.depth, len(tokens))
            label = self._label(child, depth, end)
            wanted = tokens[depth:end]
            if label != wanted:
                return path, depth + common_length(label, wanted)
            depth = end
        return path, depth

    def _split(self, parent: SuffixNode, child: SuffixNode, tokens: array[int], depth: int) -> SuffixNode:
        """Put a node at `depth` into the edge to `child`. The tokens lead there, and go elsewhere after it."""
        following = self._label(child, depth, depth + 1)[0]
        middle = SuffixNode(depth, child.count, child.latest, {following: child})
        assert parent.children is not None
        parent.children[tokens[parent.depth]] = middle
        return middle

    def _prune(self, path: list[SuffixNode], tokens: array[int]) -> None:
        """Drop the leaf after the path, and the path's last node if it no longer is a branch."""
        parent = path[-1]
        assert parent.children is not None
        del parent.children[tokens[parent.depth]]
        if parent is self.root or len(parent.children) > 1:
            return
        (only,) = parent.children.values()
        path.pop()
        grandparent = path[-1]
        assert grandparent.children is not None
        grandparent.children[tokens[grandparent.depth]] = only
