"""The tokens of one sequence, as drafting without a model indexes them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

from tandem.errors import InvalidRequestError
from tandem.model.types import Delta, common_length


def check_start(delta: Delta, length: int) -> None:
    """Refuse a delta that begins outside a sequence of so many tokens.

    What was proposed and not sent back is not there, even where a KV cache holds it.
    """
    if not 0 <= delta.base_length <= length:
        raise InvalidRequestError(
            f"the delta starts at token {delta.base_length}, but the sequence has {length} tokens; "
            "send the missing ones from base_length 0"
        )


class TokenIndex(Protocol):
    """A drafting method's state for one sequence."""

    def forget(self, length: int) -> None:
        """Remove all that depends on tokens from `length` on. Called while these tokens are still there."""

    def learn(self) -> Iterator[None]:
        """Add the new tokens. Yields between small steps; a dropped iterator leaves the rest to the next call."""

    def propose(self, token_count: int) -> Sequence[int]:
        """At most `token_count` tokens that may follow."""

    def finish(self) -> Iterator[None]:
        """Keep what others can use of a finished completion: by default nothing. Yields between small steps."""
        return iter(())


async def in_pieces(steps: Iterator[None]) -> None:
    """Run all steps, and let the event loop run every now and then."""
    for done, _ in enumerate(steps, start=1):
        # One or two milliseconds of work: other sequences wait no longer for a long prompt
        if done % 128 == 0:
            await asyncio.sleep(0)


_LARGEST_ID = 2**31 - 1
"""Ids travel as signed 32-bit integers."""


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
        """Number of present tokens that a delta leaves unchanged.

        It is more than the base length where the delta repeats present tokens: a repeated step costs nothing.
        """
        self._check(delta)
        present = self.token_ids[delta.base_length : delta.length]
        return delta.base_length + common_length(present, delta.token_ids)

    def apply(self, delta: Delta, kept_length: int) -> None:
        del self.token_ids[kept_length:]
        self.token_ids.extend(delta.token_ids[kept_length - delta.base_length :])
        if self.prompt_length is None:
            self.prompt_length = len(self)

    def response(self) -> array[int]:
        return self.token_ids[self.prompt_length or 0 :]

    def _check(self, delta: Delta) -> None:
        check_start(delta, len(self))
        if self._max_length and delta.length > self._max_length:
            raise InvalidRequestError(
                f"the sequence would have {delta.length} tokens, but its limit is {self._max_length}"
            )
        if delta.token_ids and not 0 <= min(delta.token_ids) <= max(delta.token_ids) <= _LARGEST_ID:
            wrong = next(token_id for token_id in delta.token_ids if not 0 <= token_id <= _LARGEST_ID)
            raise InvalidRequestError(f"token id {wrong} is out of range; ids must be in 0..{_LARGEST_ID}")
