"""A draft that violates the protocol of drafting ahead loses its place; the request completes all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.load.fakes import VOCABULARY_SIZE
from tandem.types import ProposeStep, SparseDistribution
from tests.service.ahead_draft import EXPECTED, AheadDraft, Pushes, completed

Violation = Callable[[AheadDraft, list[int], ProposeStep], Pushes]


def wrong_keys(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """Name outcomes with more accepted tokens than were proposed."""
    for each in draft.honest(tokens, step):
        counts = tuple(count + 5 for count in each.accepted_counts)
        yield replace(each, accepted_counts=counts)


def wrong_tokens(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """Name the right outcome, and continue it with a token that the target rejects."""
    for each in draft.honest(tokens, step):
        yield replace(each, token_ids=(7,))


def unknown_tokens(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    for each in draft.honest(tokens, step):
        yield replace(each, token_ids=(VOCABULARY_SIZE,))


def twice(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    for each in draft.honest(tokens, step):
        yield from (each, each)


def same_outcome_twice(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    first = next(draft.honest(tokens, step))
    yield replace(
        first,
        token_ids=first.token_ids * 2,
        accepted_counts=first.accepted_counts * 2,
        next_token_ids=first.next_token_ids * 2,
    )


def of_the_future(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    for each in draft.honest(tokens, step):
        yield replace(each, base_length=each.base_length + 3)


def of_the_past(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """Name a round before the first, of which no outcomes can be late."""
    for each in draft.honest(tokens, step):
        yield replace(each, base_length=each.base_length - 1)


def endless(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    (*_, last) = draft.honest(tokens, step)
    yield from draft.honest(tokens, step)
    for depth in range(100_000):
        yield replace(last, depth=last.depth + 1 + depth)


def endless_past(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    for _ in range(100_000):
        yield from of_the_past(draft, tokens, step)


def malformed(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    """Leave out one half of an outcome's key."""
    for push in draft.honest(tokens, step):
        yield replace(push, accepted_counts=(*push.accepted_counts, 0))


def supports_that_sum_to_nothing(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    support = SparseDistribution(np.array([1]), np.zeros(1))
    for push in draft.honest(tokens, step):
        yield replace(push, distributions=(support,) * len(push.token_ids))


def too_many(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    first = next(draft.honest(tokens, step))
    many = tuple(range(500))
    yield replace(first, token_ids=many, accepted_counts=(0,) * len(many), next_token_ids=many)


def too_far_ahead(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    for each in draft.honest(tokens, step):
        yield replace(each, lead_token_ids=(1,) * 200)


def unknown_lead(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    first = next(draft.honest(tokens, step))
    yield replace(first, lead_token_ids=(1 << 30,))


def wrong_lead(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    first = next(draft.honest(tokens, step))
    assert step.ahead is not None
    yield replace(first, lead_token_ids=(1,) * (step.ahead.token_count - 1))


def unasked_proposal(draft: AheadDraft, tokens: list[int], step: ProposeStep) -> Pushes:
    yield draft.proposal(tokens, 2)


HARMLESS: tuple[Violation, ...] = (wrong_tokens, wrong_lead)


FATAL: tuple[Violation, ...] = (
    wrong_keys,
    unknown_tokens,
    twice,
    same_outcome_twice,
    of_the_future,
    of_the_past,
    endless,
    endless_past,
    malformed,
    supports_that_sum_to_nothing,
    too_many,
    too_far_ahead,
    unknown_lead,
    unasked_proposal,
)


class ViolatingDraft(AheadDraft):
    """Answers requests correctly, and violates the protocol in what it drafts ahead."""

    def __init__(self, violation: Violation) -> None:
        super().__init__()
        self._violation = violation

    def pushes(self, tokens: list[int], step: ProposeStep) -> Pushes:
        yield from self._violation(self, tokens, step)


@pytest.mark.parametrize("violation", [*HARMLESS, *FATAL], ids=lambda violation: violation.__name__)
async def test_a_violation_costs_the_draft_its_place_and_the_request_nothing(
    violation: Violation, caplog: pytest.LogCaptureFixture
) -> None:
    draft = ViolatingDraft(violation)
    done = await completed(draft, step_seconds=0.003)
    assert done.token_ids == EXPECTED
    lost = [record for record in caplog.records if record.message == "draft lost"]
    assert draft.granted > 0
    if violation in HARMLESS:
        assert not lost
    else:
        assert lost
        assert all(
            "draft service: " in vars(record)["reason"] or "outcomes" in vars(record)["reason"]
            for record in lost
        )
        assert draft.opened <= 1 + len(lost)
