"""The host waits once for the device: for all rows of a step, and for all tokens that a draft draws in a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.drafting.proposal import Drafting, Drawn, SharedTokens, TokenDraws
from tandem.engine.rows import verifications
from tandem.model.types import DraftOptions, RowKind, SamplingParams
from tests.unit.engine.stand_in_device import stand_in_device
from tests.unit.engine.test_rows import ASKED, wide_logits

ONCE = ["to_host"]
"""Where the one wait is."""
DEPTHS = 4
WIDTH = 60


@pytest.mark.parametrize("kind", [*ASKED, "all"])
def test_rows(kind: str) -> None:
    requests = [*ASKED.values()] if kind == "all" else [ASKED[kind]]
    logits = wide_logits(3 * len(requests))
    expected = verifications(requests, logits.clone())
    with stand_in_device() as device:
        found = verifications(requests, device.put(logits))
    assert device.waits == ONCE
    assert repr(found) == repr(expected)


def test_the_stand_in_notices_a_wait() -> None:
    with stand_in_device() as device:
        numbers = device.put(torch.arange(6.0))
        assert not device.waits
        numbers.tolist()
        numbers[2].item()
        bool(numbers[1] > 0)
        numbers.cpu()
        numbers.to("cpu")
        numbers[[1, 2]]
        numbers[numbers > 3]
        torch.tensor([1.0], device=numbers.device)
        torch.tensor([1.0]).to(numbers.device)
    assert len(device.waits) == 9


SHARED = SharedTokens(np.arange(3, 43), np.arange(40)[::-1].copy())
SAMPLED = SamplingParams(0.8, seed=5)
NUCLEUS = SamplingParams(1.1, top_k=20, top_p=0.9, seed=6)
GREEDY = SamplingParams(0.0)
WAYS: dict[str, list[tuple[SamplingParams, RowKind, SharedTokens | None]]] = {
    "greedy": [(GREEDY, RowKind.TOKEN, None)] * 3,
    "strict": [(SAMPLED, RowKind.TOKEN, None), (NUCLEUS, RowKind.TOKEN, None)],
    "support": [(SAMPLED, RowKind.SUPPORT, None), (NUCLEUS, RowKind.SUPPORT, None)],
    "shared": [(SAMPLED, RowKind.SUPPORT, SHARED), (NUCLEUS, RowKind.TOKEN, SHARED)],
}
WAYS["all"] = [each for way in WAYS.values() for each in way]


def draftings(way: str) -> list[Drafting]:
    return [
        Drafting(
            7 + number,
            DEPTHS,
            DraftOptions(
                "r", sampling, row_kind=kind, draft_top_k=8, draft_support_mass=0.9, with_token_logits=True
            ),
            shared=shared,
        )
        for number, (sampling, kind, shared) in enumerate(WAYS[way])
    ]


def drawn_from(logits: list[Tensor], own: list[Drafting], counts: list[int]) -> list[Drawn]:
    draws = TokenDraws(own, logits[0], counts)
    for each in logits:
        draws.draw(each)
    return draws.read()


@pytest.mark.parametrize("way", WAYS)
def test_tokens_in_a_row(way: str) -> None:
    """They are those of one at a time, also where proposals end at different lengths."""
    size = len(WAYS[way])
    logits = [
        torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(depth)) * 3
        for depth in range(DEPTHS)
    ]
    alone = draftings(way)
    for each in logits:
        drawn_from([each], alone, [1] * size)
    with stand_in_device() as device:
        sent = [device.put(each) for each in logits]
        counts = [DEPTHS - number % 2 for number in range(size)]
        found = drawn_from(sent, draftings(way), counts)
    assert device.waits == ONCE
    for drawn, known, count in zip(found, alone, counts, strict=True):
        assert drawn.drafting.token_ids == known.token_ids[:count]
        assert drawn.drafting.token_logits == known.token_logits[:count]
        assert repr(drawn.drafting.distributions) == repr(known.distributions[:count])
        assert len(drawn.read_ids) == count - 1
