"""A target's own prediction layer proposes what an independent reference does, and the greedy text does not change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mtp_models import FAMILIES, MtpReference, mtp_target, save_mtp
from tests.qwen_mtp_models import FAMILIES as QWEN_FAMILIES
from tests.qwen_mtp_models import QwenMtpReference, qwen_target, save_qwen_mtp
from tests.unit.bound_service.pairs import Request, continued, running

PROMPTS = [(5, 9, 2, 700, 31, 8), (1, 1), (40, 41, 42, 43) * 20]


def made(family: str, folder: Path, vocabulary: int = 2048) -> tuple[Any, MtpReference]:
    """A target with a prediction layer, written into a folder, and the reference of its proposals."""
    if family in QWEN_FAMILIES:
        model = qwen_target(family, vocabulary)
        return model, QwenMtpReference(save_qwen_mtp(model, folder), model)
    model = mtp_target(family, vocabulary)
    return model, MtpReference(save_mtp(model, folder), model)


async def check(
    model: Any,
    reference: MtpReference,
    folder: Path,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    **settings: object,
) -> int:
    """Run all prompts at once, and compare each proposal and each text; return the number of accepted tokens."""
    async with running(folder, None, max_length=256, **settings) as pair:
        assert pair.verifier.model_info.drafting_method == "mtp"
        requests = [Request(pair, str(index), prompt) for index, prompt in enumerate(prompts)]
        texts = await asyncio.gather(*(request.run(new_tokens) for request in requests))
    for prompt, text, request in zip(prompts, texts, requests, strict=True):
        assert text == continued(model, prompt, new_tokens)
        lengths = [len(proposal) for _, proposal in request.proposals]
        assert lengths == [0] + [4] * (len(lengths) - 1), "a proposal in every round but the first"
        for length, proposal in request.proposals[1:]:
            assert list(proposal) == reference.propose(request.tokens[:length], 4)
    return sum(request.accepted for request in requests)


@pytest.mark.parametrize("family", [*FAMILIES, *QWEN_FAMILIES])
def test_proposals_are_those_of_the_reference(family: str, tmp_path: Path) -> None:
    model, reference = made(family, tmp_path / "target")
    asyncio.run(check(model, reference, tmp_path / "target", PROMPTS, 8))


@pytest.mark.parametrize(
    ("family", "compile_mode"), [("deepseek_v3", "off"), ("deepseek_v3", "auto"), ("qwen3_next", "off"),
                                 ("qwen3_next", "auto"), ("qwen3", "auto")]
)  # fmt: skip
def test_accepted_positions_read_the_targets_states(family: str, compile_mode: str, tmp_path: Path) -> None:
    """A model of six tokens accepts some proposals, wholly or in part."""
    model, reference = made(family, tmp_path / "target", vocabulary=6)
    prompts = [(1, 2, 3), (4, 5), (0, 0, 1, 5, 5)]
    run = check(model, reference, tmp_path / "target", prompts, 24, compile=compile_mode)
    assert asyncio.run(run) > 5
