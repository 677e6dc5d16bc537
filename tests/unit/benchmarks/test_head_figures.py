"""The acceptance that the recipe of the demo target's head measures."""

from __future__ import annotations

import torch

from models.demo.recipe.heads.measure_head import overlap

WANTED = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]).log()
OWN = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]).log()


def test_a_draft_like_the_target_is_always_accepted() -> None:
    for temperature in (0.0, 0.8):
        torch.testing.assert_close(overlap(WANTED, WANTED, temperature), torch.ones(2))


def test_greedily_the_most_likely_token_decides() -> None:
    assert overlap(WANTED, OWN, 0.0).tolist() == [0.0, 1.0]


def test_sampled_tokens_are_accepted_as_often_as_the_distributions_overlap() -> None:
    torch.testing.assert_close(overlap(WANTED, OWN, 1.0), torch.tensor([0.75, 0.7]))


def test_a_temperature_sharpens_both_distributions() -> None:
    # At 0.5 the probabilities are as their squares: 4, 1, 1 and 1, 4, 1 of 6.
    torch.testing.assert_close(overlap(WANTED[:1], OWN[:1], 0.5), torch.tensor([0.5]))
