"""Messages between the engine and vLLM's workers: steps, and the ends of their rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

AnswerT_co = TypeVar("AnswerT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence in a step."""

    request_id: str
    is_new: bool
    """The worker does not know it."""
    start: int
    """Tokens whose keys and values are in the cache."""
    first: int
    """Tokens that the worker knows, at most `start`."""
    token_ids: list[int]
    """Those behind them, up to the end of the step."""
    row_count: int
    """Rows that are wanted, of the last tokens."""
    draft_count: int
    """Last tokens that vLLM has to treat as a proposal, so that it computes `row_count` rows."""
    block_ids: tuple[list[int], ...]
    """For each group of layers, the blocks that the worker does not know."""
    kept_states: int = 0
    """Tokens of the sequence's last step that are kept, where recurrent layers go on from the state behind the last of
    them and have to keep a state behind each token of this step. 0: only the state behind its last token is wanted."""

    @property
    def end(self) -> int:
        return self.first + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Step:
    """A step for the workers."""

    parts: Sequence[Part]
    finished_ids: Sequence[str]
    """Sequences to forget first."""
    block_ids_to_zero: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SharedNoise:
    """The noise with which a target draws its tokens, and its head draws the same where their distributions agree."""

    temperature: float
    seed: int
    length: int
    """Length of the sequence that the head's first token extends."""


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """The end of a part's round."""

    accepted_count: int
    """How many of the proposed tokens are kept."""
    next_token_id: int | None
    """The token that follows them; None where nobody knows it yet."""
    noise: SharedNoise | None = None
    """With which the head draws; None where it takes the most probable tokens."""


class Draws(Protocol[AnswerT_co]):
    """Draws tokens in a row from the logits of the one before (`tandem.drafting.proposal.TokenDraws`)."""

    def draw(self, logits: Tensor) -> Tensor:
        """The next token behind each row of the logits, int64 [rows]; negative where a row has none."""

    def read(self) -> AnswerT_co:
        """Bring what was drawn to the host."""
