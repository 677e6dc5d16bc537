"""Repeated text takes the place of a head's proposals for as long as more of it is accepted."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.proposers.model_free import TokenState
from draft_service.proposers.repeats import Odds, Repeats
from tandem.types import Delta

PROMPT = (1, 2, 3, 4, 5, 6, 1, 2)


class Text:
    """A sequence that is proposed for and written on."""

    def __init__(self, odds: Odds, prompt: Sequence[int] = PROMPT) -> None:
        self._tokens = TokenState(4096)
        self.repeats = Repeats(self._tokens, odds)
        self.write(*prompt)

    def write(self, *token_ids: int, base: int | None = None) -> None:
        delta = Delta(len(self._tokens) if base is None else base, token_ids)
        kept = self._tokens.kept_length(delta)
        if kept < len(self._tokens):
            self.repeats.forget(kept)
        self._tokens.apply(delta, kept)


async def rounds(odds: Odds, *, repeats_right: bool, head_right: int) -> list[bool]:
    """Which of 2,000 proposals were repeated, where the head foresees so many tokens and repeats all or none."""
    found = []
    for _ in range(2000):
        text = Text(odds)
        repeated = await text.repeats.propose(4)
        found.append(bool(repeated))
        own = (7, 7, 7, 7)
        if not repeated:
            text.repeats.proposed(own)
        right = (4 if repeats_right else 0) if repeated else head_right
        text.write(*(repeated or own)[:right], 99)
        await text.repeats.propose(0)
    return found


async def test_what_followed_before_is_proposed_and_nothing_where_nothing_did() -> None:
    text = Text(Odds())
    assert await text.repeats.propose(3) == (3, 4, 5)
    text.write(3, 9)
    assert await text.repeats.propose(3) == ()


async def test_tokens_that_were_taken_back_are_not_repeated() -> None:
    text = Text(Odds(), (1, 2, 3, 1, 2, 4, 1, 2))
    assert await text.repeats.propose(1) == (4,)
    text.write(5, 1, 2, base=5)
    assert await text.repeats.propose(1) == (5,)


async def test_the_better_of_both_ways_is_taken() -> None:
    assert all(await rounds(Odds(), repeats_right=True, head_right=2))
    odds = Odds()
    first = await rounds(odds, repeats_right=False, head_right=2)
    assert first[0], "it was tried"
    later = await rounds(odds, repeats_right=False, head_right=2)
    assert 0 < sum(later) < 0.1 * len(later), "it is tried again now and then"
    await rounds(odds, repeats_right=True, head_right=0)
    assert all((await rounds(odds, repeats_right=True, head_right=0))[-100:]), "the text has changed"
