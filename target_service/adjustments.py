"""A request's changes to the model's logits: biases, and a minimum number of tokens.

Applied before penalties, temperature and truncation, as vLLM and transformers do. Biases are those of OpenAI's
`logit_bias` (transformers' `SequenceBiasLogitsProcessor` with single tokens). The minimum is vLLM's `min_tokens`
(transformers' `MinNewTokensLengthLogitsProcessor`): each position of a proposal has its own count of tokens before it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tandem.engine.backends.transfers import to_device
from tandem.errors import InvalidRequestError
from tandem.types import LogitAdjustments


class Adjustments:
    """The adjustments of one sequence, with their ids on the model's device."""

    def __init__(self, wanted: LogitAdjustments, prompt_length: int, device: torch.device) -> None:
        """Prepare what the sequence's rows need.

        Args:
            wanted: The adjustments; their ids must be in the vocabulary.
            prompt_length: Tokens of the prompt; those after it count towards `min_tokens`.
            device: Where the logits are.
        """
        self._first_free_length = prompt_length + wanted.min_tokens
        suppressed = np.array(wanted.suppressed_token_ids, dtype=np.int64)
        biased = np.array([*wanted.biases], dtype=np.int64)
        biases = np.array([*wanted.biases.values()], dtype=np.float64)
        self._suppressed, self._biased, on_device = to_device([suppressed, biased, biases], device)
        self._biases = on_device.float()

    def applied(self, logits: Tensor, base_length: int) -> Tensor:
        """The adjusted logits of successive positions.

        Args:
            logits: [R, V], any floating type. They are left as they are.
            base_length: How many tokens stand before the first row's position.

        Returns:
            float32 [R, V]. A suppressed id has -inf.
        """
        scores = logits.to(torch.float32, copy=True)
        if self._biased.numel():
            scores[:, self._biased] += self._biases
        suppressed_rows = min(max(self._first_free_length - base_length, 0), len(scores))
        if suppressed_rows and self._suppressed.numel():
            scores[:suppressed_rows, self._suppressed] = -torch.inf
        return scores


def check_ids(wanted: LogitAdjustments, vocabulary_size: int) -> None:
    """Refuse ids that the model does not have, and adjustments that leave it no token.

    Raises:
        InvalidRequestError: an id is outside the vocabulary, or every id is suppressed.
    """
    for token_id in (*wanted.biases, *wanted.suppressed_token_ids):
        if not 0 <= token_id < vocabulary_size:
            raise InvalidRequestError(
                f"the logit of token id {token_id} is to be adjusted; ids must be in 0..{vocabulary_size - 1}"
            )
    if wanted.min_tokens > 0 and len(set(wanted.suppressed_token_ids)) >= vocabulary_size:
        raise InvalidRequestError(
            f"min_tokens is {wanted.min_tokens} and every token ends the completion; it must be 0"
        )
