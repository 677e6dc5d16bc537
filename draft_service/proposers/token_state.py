"""The tokens of one sequence, changed by the deltas that arrive."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tandem.errors import InvalidRequestError
from tandem.types import Delta

_LARGEST_ID = 2**31 - 1


class TokenState:
    """Prompt and committed tokens of a sequence."""

    def __init__(self, max_length: int) -> None:
        self.token_ids: array[int] = array("i")
        """Four bytes each, and slices compare at the speed of C. Changed in place, never replaced."""
        self.prompt_length: int | None = None
        """Length after the first delta, in tokens; None before it. Later tokens are the response."""
        self._max_length = max_length

    def __len__(self) -> int:
        return len(self.token_ids)

    def kept_length(self, delta: Delta) -> int:
        """How many of the present tokens a delta leaves as they are.

        More than its base length where the delta repeats present tokens: a repeated step costs nothing.

        Raises:
            InvalidRequestError: the delta leaves a gap, is too long, or holds a number that cannot be a token id.
        """
        self._check(delta)
        present = self.token_ids[delta.base_length : delta.length]
        return delta.base_length + common_length(present, delta.token_ids)

    def apply(self, delta: Delta, kept_length: int) -> None:
        """Change the tokens past those that the delta keeps."""
        del self.token_ids[kept_length:]
        self.token_ids.extend(delta.token_ids[kept_length - delta.base_length :])
        if self.prompt_length is None:
            self.prompt_length = len(self)

    def response(self) -> array[int]:
        """The tokens that came after the prompt."""
        return self.token_ids[self.prompt_length or 0 :]

    def _check(self, delta: Delta) -> None:
        if not 0 <= delta.base_length <= len(self):
            raise InvalidRequestError(
                f"the delta starts at token {delta.base_length}, but the sequence has {len(self)} tokens; "
                "send the missing ones from base_length 0"
            )
        if self._max_length and delta.length > self._max_length:
            raise InvalidRequestError(
                f"the sequence would have {delta.length} tokens, but its limit is {self._max_length}"
            )
        if delta.token_ids and not 0 <= min(delta.token_ids) <= max(delta.token_ids) <= _LARGEST_ID:
            wrong = next(token_id for token_id in delta.token_ids if not 0 <= token_id <= _LARGEST_ID)
            raise InvalidRequestError(f"token id {wrong} is out of range; ids must be in 0..{_LARGEST_ID}")


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many items two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
