"""The recipes of the bundled models: what they measure and what they learn from."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.demo.recipe.measure import Rounds, rounds_of
from models.smollm2.recipe.answers import ANSWER_MARK, END_OF_ANSWER, frequent_tokens, questions, read_batch
from models.smollm2.recipe.train import foreseen


def test_rounds_are_counted_on_the_targets_own_text() -> None:
    every = [[True, True], [True, False], [False, True], [True, True]]
    # All of the first proposal, then none of the one at the place behind its bonus token: 2 + 1 and 1 tokens.
    assert rounds_of([every], 2) == Rounds(2, (2, 2))
    assert rounds_of([every[1:]], 2) == Rounds(2, (2, 1))
    assert rounds_of([every[2:]], 2).length == 2.0
    assert rounds_of([[[True]]], 2).rate == 0.5


PROMPT = [1, 40, 41, *ANSWER_MARK]


def save_answer(path: Path, answer: list[int]) -> Path:
    tokens = torch.tensor(PROMPT + answer)
    states = torch.arange(len(tokens) * 4 * 2).view(len(tokens), 4, 2).bfloat16()
    save_file({"token_ids": tokens, "hidden_states": states}, path)
    return path


def test_held_out_questions_are_not_among_those_of_the_training() -> None:
    training = questions()
    held_out = questions(held_out=True)
    assert len(set(training)) > 4000
    assert not set(training) & set(held_out)
    assert training == questions()


def test_answers_of_different_lengths_are_padded(tmp_path: Path) -> None:
    batch = read_batch([save_answer(tmp_path / "a", [50, 51, 52]), save_answer(tmp_path / "b", [60])])
    tokens = batch.tokens
    before = len(PROMPT) - 1
    assert batch.read is not None
    assert batch.mask is not None
    assert tokens.shape == batch.mask.shape == batch.hidden.shape[:2]
    assert batch.read.shape == (3, *tokens.shape, 2)
    # The states of the prompt's last token and of the answer's foresee the answer and what follows it.
    assert [row.nonzero()[:, 0].tolist() for row in batch.mask] == [
        list(range(before, before + 4)),
        [before, before + 1],
    ]
    assert batch.hidden[1, before].tolist() == [8.0 * before + 6, 8.0 * before + 7]


def test_the_draft_vocabulary_is_what_answers_are_made_of(tmp_path: Path) -> None:
    save_answer(tmp_path / "a.safetensors", [50, 51, 50])
    save_answer(tmp_path / "b.safetensors", [50, 51, 52])
    assert frequent_tokens(tmp_path, 3) == [END_OF_ANSWER, 50, 51]
    assert frequent_tokens(tmp_path, 6) == [0, 1, END_OF_ANSWER, 50, 51, 52]


def test_the_head_is_compared_with_the_target_where_it_can_propose_the_texts_token(tmp_path: Path) -> None:
    """Each token of a proposal is compared with the target's state one position before it."""
    head = SmallHead()
    target_ids = [END_OF_ANSWER, 50, 52]
    head.target_ids = torch.tensor(target_ids)
    batch = read_batch([save_answer(tmp_path / "a", [50, 51, 52])])
    first, second = foreseen(head, SmallLastLayer(), batch, 2)  # type: ignore[arg-type]
    before = len(PROMPT) - 1
    # 51 is outside the draft vocabulary, and what ends the answer is unknown.
    assert first[1][:, 0].tolist() == [8.0 * each + 6 for each in (before, before + 2, before + 3)]
    assert second[1].tolist() == first[1].tolist()
    assert len(first[0]) == len(first[1])


class SmallLastLayer:
    """Shows the states that it gets."""

    def __call__(self, states: Tensor) -> Tensor:
        return states.float()


class SmallHead:
    """Has states of its own, all zero."""

    target_ids: Tensor

    def combine(self, states: list[Tensor]) -> Tensor:
        return torch.zeros_like(states[0])

    def advance(
        self, tokens: Tensor, positions: Tensor, states: Tensor, step: object
    ) -> tuple[Tensor, Tensor]:
        assert tokens.shape == positions.shape
        return states, states

    def lm_head(self, states: Tensor) -> Tensor:
        return states
