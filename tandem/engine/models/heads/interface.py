"""The engine's view of a drafting head: a model of its own that reads pairs of a token and a state.

The pair of position i is the token at i + 1 and the target's state at i, so a head predicts the token at i + 2. Where
the target has not read the token yet, within a proposal, the head's own state takes the place of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tandem.engine.kv_cache.layer_groups import LayerGeometry

FINAL_STATE = -1
"""Stands in `layer_ids` for the state behind the target's last norm, which its output layer reads."""


class DraftHead(nn.Module):
    """A drafting head. Subclasses compute."""

    layer_ids: tuple[int, ...]
    """Which of the target's states are read: residual streams by the number of layers before them, or `FINAL_STATE`."""
    state_size: int
    """Width of what is kept for each of the target's tokens."""
    vocabulary_size: int
    """The target's."""
    has_reduced_vocabulary: bool
    """True if the head cannot say some of the target's tokens."""
    layers: tuple[LayerGeometry, ...]
    """Attention layers of the head itself."""
    tokens_per_pass: int = 1
    """Tokens that one pass foresees. With more than one a proposal is a single pass, and has at most as many."""

    @property
    def readers(self) -> Sequence[nn.Module]:
        """The modules that `combined` calls."""
        raise NotImplementedError

    def combined(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """The part of the target's states that the head reads, [tokens, state_size].

        Args:
            hidden_states: [tokens, target_hidden_size] for each of `layer_ids`.
        """
        raise NotImplementedError

    def advanced(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any
    ) -> tuple[Tensor, Tensor]:
        """One pass over pairs of several sequences.

        Args:
            token_ids: int64 [1, tokens], the token of each pair.
            positions: int64 [1, tokens], of the pairs in their sequences.
            states: [tokens, state_size]
            step: the pass, as attention layers see it (`tandem.engine.models.attention.AttentionStep`).

        Returns:
            What `logits` takes, and the states that the next step of a proposal reads; [tokens, state_size] both.
        """
        raise NotImplementedError

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Logits of what the head can say, [rows, width]; see `widened`."""
        raise NotImplementedError

    def widened(self, own_logits: Tensor) -> Tensor:
        """[rows, tokens_per_pass * vocabulary_size], a pass's first token first; minus infinity for tokens that the
        head cannot say. By default the head can say all."""
        return own_logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the target's whole vocabulary."""
        return self.widened(self.own_logits(hidden))


class BlockHead(DraftHead):
    """A drafting head that proposes a block of tokens in one pass. Its positions are those of the tokens themselves: of
    the context it reads the target's states alone, of the block behind it the token ids alone."""

    block_size: int
    """Tokens of a block: the last one of the text, and the masks that become the proposal."""
    mask_token_id: int

    def of_blocks(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, is_in_block: Tensor, step: Any
    ) -> Tensor:
        """One pass over context and blocks of several sequences.

        Args:
            token_ids: int64 [1, tokens]
            positions: int64 [1, tokens], of the tokens in their sequences.
            states: [tokens, state_size]; zeros for tokens of a block.
            is_in_block: bool [tokens]
            step: the pass (`tandem.engine.backends.eager.layout.StepLayout`).

        Returns:
            What `logits` takes, [tokens, state_size]; zeros for tokens of the context.
        """
        raise NotImplementedError
