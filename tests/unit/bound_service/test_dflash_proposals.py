"""A DFlash draft proposes what an independent reference does, and the target's greedy text does not change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.dflash_models import DFlashReference, save_dflash
from tests.unit.bound_service.pairs import Request, continued, running, saved_target, small_target

PROMPTS = [(5, 9, 2, 700, 31, 8), (1, 1), (40, 41, 42, 43) * 20]


async def check(
    model: Any, folders: tuple[Path, Path], prompts: Sequence[tuple[int, ...]], new_tokens: int, proposed: int = 4,
    **settings: object,
) -> int:  # fmt: skip
    """Run all prompts at once, and compare each proposal and each text; return the number of accepted tokens."""
    reference = DFlashReference(folders[1], model)
    async with running(folders[0], folders[1], **settings) as pair:
        assert pair.verifier.model_info.drafting_method == "dflash"
        requests = [Request(pair, str(index), prompt) for index, prompt in enumerate(prompts)]
        texts = await asyncio.gather(*(request.run(new_tokens) for request in requests))
    for prompt, text, request in zip(prompts, texts, requests, strict=True):
        assert text == continued(model, prompt, new_tokens)
        lengths = [len(proposal) for _, proposal in request.proposals]
        assert lengths == [0] + [proposed] * (len(lengths) - 1), "a proposal in every round but the first"
        for length, proposal in request.proposals[1:]:
            assert list(proposal) == reference.propose(request.tokens[:length], proposed)
    return sum(request.accepted for request in requests)


@pytest.mark.parametrize("block_size", [3, 5, 16])
def test_proposals_are_those_of_the_reference(block_size: int, tmp_path: Path) -> None:
    """Four tokens are asked for. The longest prompt is read in chunks, and the block behind it is not divided."""
    model = small_target()
    folders = (
        saved_target(model, tmp_path / "target"),
        save_dflash(tmp_path / "head", model, block_size=block_size),
    )
    proposed = min(4, block_size - 1)
    asyncio.run(check(model, folders, PROMPTS, 8, proposed, max_num_batched_tokens=24))


@pytest.mark.parametrize("draft_vocabulary", [None, 96])
def test_proposals_of_the_speculators_format(draft_vocabulary: int | None, tmp_path: Path) -> None:
    model = small_target()
    head = save_dflash(tmp_path / "head", model, wrapped=True, draft_vocabulary=draft_vocabulary)
    asyncio.run(check(model, (saved_target(model, tmp_path / "target"), head), PROMPTS, 8))


@pytest.mark.parametrize("compile_mode", ["off", "auto"])
def test_accepted_positions_read_the_targets_states(compile_mode: str, tmp_path: Path) -> None:
    """A model of six tokens accepts some proposals, wholly or in part."""
    model = small_target(vocab_size=6)
    folders = (saved_target(model, tmp_path / "target"), save_dflash(tmp_path / "head", model))
    prompts = [(1, 2, 3), (4, 5), (0, 0, 1, 5, 5)]
    assert asyncio.run(check(model, folders, prompts, 24, compile=compile_mode)) > 5


def test_a_block_ends_at_the_longest_sequence(tmp_path: Path) -> None:
    """Near max_length the proposals become shorter."""
    model = small_target(vocab_size=6)
    folders = (saved_target(model, tmp_path / "target"), save_dflash(tmp_path / "head", model))

    async def run() -> list[int]:
        async with running(*folders, max_length=32) as pair:
            request = Request(pair, "a", (1, 2, 3) * 8)
            await request.run(6)
            return [length + len(proposal) for length, proposal in request.proposals]

    assert max(asyncio.run(run())) <= 32
