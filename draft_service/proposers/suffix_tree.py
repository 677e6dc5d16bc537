"""A suffix tree of bounded depth over several texts, which can forget.

Every position of a text stands for a *window*: the tokens from there on, at most `max_depth` of them. The tree holds
windows; a path from the root is a string of tokens, and a node counts the windows that begin with it. Chains without a
branch are one node (a Patricia trie), so there are at most two nodes per window, whatever the depth.

Two things keep it short. A node's label is not stored: every node names one window that passes through it, whose text
is read instead, so that splitting and merging nodes touches no label. And no window is a proper prefix of another: a
finished text ends with `END`, and in a text that still grows a window which so far only repeats an earlier one is left
out until it differs from it or is complete. A leaf's label is open: it reaches as far as its text does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.proposers.token_state import common_length

END = -1
"""Closes a finished text. No token id is negative."""

_POSITION_BITS = 32
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


class SuffixNode:
    """The end of an edge of the tree."""

    __slots__ = ("children", "count", "depth", "latest", "repeats")

    def __init__(
        self, depth: int, count: int, latest: int, children: dict[int, SuffixNode] | None = None
    ) -> None:
        self.depth = depth
        """Tokens from the root to here; for a leaf the depth of the tree, even if its text ends before."""
        self.count = count
        """Windows that pass through here."""
        self.latest = latest
        """The most recent of them."""
        self.children = children
        """By their first token. None for a leaf."""
        self.repeats: dict[int, None] | None = None
        """A leaf's windows in their order, when it has several."""

    def most_frequent_child(self) -> SuffixNode | None:
        """Continuation of most windows; the most recent among equals."""
        if self.children is None:
            return None
        going_on = [child for token_id, child in self.children.items() if token_id != END]
        return max(going_on, key=_frequency, default=None)

    def continued_count(self) -> int:
        """Windows that go on past this branch with a token."""
        assert self.children is not None
        return sum(child.count for token_id, child in self.children.items() if token_id != END)

    def add_repeat(self, window: int) -> None:
        """Add a window equal to those that end in this leaf."""
        if self.repeats is None:
            self.repeats = {self.latest: None}
        self.repeats[window] = None

    def drop_repeat(self, window: int) -> None:
        """Remove a window from this leaf, where others end too."""
        assert self.repeats is not None
        del self.repeats[window]
        self.count -= 1
        self.latest = next(reversed(self.repeats))
        if self.count == 1:
            self.repeats = None


class SuffixTree:
    """Windows of the texts in `texts`, to which the owner may append.

    Windows are added in ascending order. Cost of adding, removing or finding one: a step for each node on its path,
    of which there are at most `max_depth`.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.texts: dict[int, array[int]] = {}
        """By number."""
        self.root = SuffixNode(0, 0, 0, {})

    def add(self, window: int) -> bool:
        """Add a window. False, and nothing is changed, while it is a proper prefix of one that is there."""
        tokens = self._tokens(window)
        path, matched = self._descend(tokens)
        last = path[-1]
        if matched == len(tokens):
            if not self._is_complete(tokens):
                return False
            last.add_repeat(window)
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
        if leaf.count > 1:
            leaf.drop_repeat(window)
        else:
            self._prune(path, tokens)
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
        prob, score = 1.0, 0.0
        while True:
            for token_id in self._label(node, depth, min(node.depth, depth + limit - len(token_ids))):
                if token_id == END:
                    return Continuation(token_ids, score)
                token_ids.append(token_id)
                score += prob
            child = node.most_frequent_child()
            if len(token_ids) == limit or child is None:
                return Continuation(token_ids, score)
            prob *= child.count / node.continued_count()
            if prob < min_prob:
                return Continuation(token_ids, score)
            node, depth = child, node.depth

    def node_count(self) -> int:
        """Number of nodes without the root. Visits them all."""
        pending, count = [self.root], 0
        while pending:
            children = list((pending.pop().children or {}).values())
            count += len(children)
            pending += children
        return count

    def _tokens(self, window: int) -> array[int]:
        position = window & _POSITION_MASK
        return self.texts[window >> _POSITION_BITS][position : position + self.max_depth]

    def _is_complete(self, tokens: array[int]) -> bool:
        return len(tokens) == self.max_depth or tokens[-1] == END

    def _label(self, node: SuffixNode, start: int, end: int) -> array[int]:
        """Tokens `start` to `end` of the path to a node, as far as the text goes that they are read from."""
        position = node.latest & _POSITION_MASK
        return self.texts[node.latest >> _POSITION_BITS][position + start : position + end]

    def _descend(self, tokens: array[int]) -> tuple[list[SuffixNode], int]:
        """The nodes on the way along a string, and how much of it is there. The last one's end may lie further on."""
        path, depth = [self.root], 0
        while depth < len(tokens):
            children = path[-1].children
            child = children.get(tokens[depth]) if children else None
            if child is None:
                break
            path.append(child)
            end = min(child.depth, len(tokens))
            label, wanted = self._label(child, depth, end), tokens[depth:end]
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


def _frequency(node: SuffixNode) -> tuple[int, int]:
    return node.count, node.latest
