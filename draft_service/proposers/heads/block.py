"""A drafting head that proposes a block of tokens in one pass (DFlash), beside its target.

The head's sequence holds the context, for which it reads the target's states, and during a pass the block behind it:
the last token of the text and a mask for each token to propose. Afterwards it is cut back to the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from draft_service.proposers.draft_head import extended
from draft_service.proposers.drafting import Drafting, Outcome
from draft_service.proposers.heads.bound import BoundSequence, HeadKind, finished
from tandem.engine.backends.hidden_states.pairing import Pairing
from tandem.engine.backends.interface import Sampler
from tandem.engine.core.jobs import Continue, Job
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.types import Delta


class BlockSequence(BoundSequence):
    """One sequence that a head drafts blocks for."""

    def __init__(self, *arguments: Any, block_size: int, mask_token_id: int) -> None:
        super().__init__(*arguments)
        self._block_size = block_size
        self._mask_token_id = mask_token_id

    def _apply(self, delta: Delta) -> None:
        kept = self._tokens.kept_length(delta)
        self._tokens.apply(delta, kept)
        self._read_length = min(self._read_length, kept)

    def _possible(self, token_count: int) -> int:
        return min(token_count, self._block_size - 1, self._cached.max_length - len(self._tokens))

    def _job(self, drafting: Drafting) -> Job[Drafting]:
        masks = (self._mask_token_id,) * drafting.token_count
        delta = Delta(self._read_length, (*self._tokens.token_ids[self._read_length :], *masks))
        # A row for each token of the block: the engine computes rows in one step, so it never divides the block.
        return Job(self._cached, delta, drafting.token_count + 1, drafting)


def block_kind(block_size: int, mask_token_id: int) -> HeadKind:
    """Proposals of one pass.

    Args:
        block_size: tokens of a block, the last one of the text among them.
        mask_token_id: what stands in a block for the tokens to propose.
    """
    make = partial(BlockSequence, block_size=block_size, mask_token_id=mask_token_id)
    return HeadKind(make, _extend)


def _extend(
    ready: Sequence[Job[Drafting]],
    logits: Tensor,
    *,
    pairings: dict[CachedSequence, Pairing],
    sampler: Sampler,
) -> list[Outcome]:
    """Head of the engine: the whole proposal of each job, a token from each of its masks' rows."""
    rows, first = [], 0
    for job in ready:
        rows.append(range(first + 1, first + job.row_count))  # the first row is that of the text's last token
        first += job.row_count
    outcomes: list[Outcome] = [Continue(0)] * len(ready)
    for step in range(max(map(len, rows))):
        going = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Continue)]
        found = extended([ready[i].payload for i in going], logits[[rows[i][step] for i in going]], sampler)
        for i, outcome in zip(going, found, strict=True):
            outcomes[i] = outcome
    return [
        finished(job, outcome, pairings.get(job.sequence))
        for job, outcome in zip(ready, outcomes, strict=True)
    ]
