"""Our engine over a real vLLM: its rows are those of transformers, whatever was proposed, rolled back or shared."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from tandem.engine.interface import RowRequest
from tandem.model.types import (
    Delta,
    DenseRow,
    LogitAdjustments,
    RowKind,
    SamplingParams,
    SupportRow,
    TargetOptions,
    TokenRow,
    VerifyStep,
)
from tests.unit.engine.greedy import settle
from tests.unit.engine.verified import verified
from tests.vllm.families import FAMILIES, VISION
from tests.vllm.models import GREEDY, Twin, prompts, text_of, together, twin_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

COUNT = 32
"""Tokens of a text."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES)
async def twin(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Twin]:
    async with twin_of(tmp_path_factory.mktemp(request.param), FAMILIES[request.param]()) as found:
        yield found


async def test_texts_are_those_of_transformers(twin: Twin) -> None:
    """Token by token, alone, among sixteen, and once more, when their prefixes are in the cache."""
    engine = twin.engine
    records = twin.records
    texts = prompts(16)
    expected = await together(*(text_of(engine, prompt, COUNT) for prompt in texts))
    assert all(twin.is_greedy(prompt, text) for prompt, text in zip(texts, expected, strict=True))
    assert await text_of(engine, texts[7], COUNT, expected[7]) == expected[7]
    records.clear()
    pairs = list(zip(texts, expected, strict=True))
    works = [text_of(engine, prompt, COUNT, known, seed) for seed, (prompt, known) in enumerate(pairs)]
    assert await together(*works) == expected
    assert max(record.sequence_count for record in records) > 4
    await settle(engine)
    assert engine.usage.reserved_tokens == 0 < engine.usage.retained_tokens


async def test_a_prefix_is_computed_once(twin: Twin) -> None:
    prompt = [7 * index % 90 + 3 for index in range(100)]
    first = await text_of(twin.engine, prompt, 8)
    await settle(twin.engine)
    twin.records.clear()
    assert await text_of(twin.engine, prompt, 8) == first
    assert sum(record.token_count for record in twin.records) < 60


async def test_rows_of_every_kind_are_those_of_its_logits(twin: Twin) -> None:
    prompt = prompts(8)[7]
    plain = LogitAdjustments()
    logits = twin.logits(prompt)[-4:]
    supports = tuple(np.array([7, 3, 90], dtype=np.int64) for _ in range(3))
    sampling = SamplingParams(temperature=0.8, top_k=40, seed=5)
    penalized = SamplingParams(temperature=0.0, repetition_penalty=1.7)
    asked = [
        (VerifyStep(Delta(0, prompt), RowKind.TOKEN, 4), SamplingParams(temperature=1.0, seed=3), plain),
        (VerifyStep(Delta(0, prompt), RowKind.SUPPORT, 4, supports, with_statistics=True), sampling, plain),
        (VerifyStep(Delta(0, prompt), RowKind.DENSE, 4), sampling, plain),
        (VerifyStep(Delta(0, prompt), RowKind.TOKEN, 4), penalized, LogitAdjustments({5: 3.0})),
    ]
    engine = twin.engine
    sequences = [await engine.open(len(prompt) + 1) for _ in asked]
    requests = [
        RowRequest(step, TargetOptions("r", how, prompt_length=5, adjustments=own))
        for step, how, own in asked
    ]
    found = await together(*(engine.run(s, r) for s, r in zip(sequences, requests, strict=True)))
    for sequence in sequences:
        engine.release(sequence)
    expected = [verified([replace(each, token_ids=prompt)], logits)[0] for each in requests]
    for answer, known in zip(found, expected, strict=True):
        assert answer.base_length == known.base_length
        for row, other in zip(answer.rows, known.rows, strict=True):
            if isinstance(other, SupportRow):
                assert isinstance(row, SupportRow)
                np.testing.assert_allclose(row.probs, other.probs, atol=1e-3)
                assert row.outside_token_id == other.outside_token_id
                assert row.outside_mass == pytest.approx(other.outside_mass, abs=1e-3)
                assert row.statistics is not None
            elif isinstance(other, DenseRow):
                assert isinstance(row, DenseRow)
                np.testing.assert_allclose(row.logits, other.logits, atol=2e-2)
            else:
                assert row == other


async def test_a_sequence_may_roll_back_as_far_as_it_likes(twin: Twin) -> None:
    """Into its prompt, into blocks that others know, and before its windows."""
    text = prompts(8)[7]
    steps = ((0, text), (60, [9, 8, 7]), (63, [5] * 40), (33, [11, 12]), (4, [1, 2, 3, 4]), (1, [50] * 70))
    sequence = await twin.engine.open(180)
    for base, tail in steps:
        text = [*text[:base], *tail]
        step = VerifyStep(Delta(base, tail), RowKind.TOKEN, 2)
        answer = await twin.engine.run(sequence, RowRequest(step, GREEDY))
        expected = twin.logits(text)[-2:].argmax(-1).tolist()
        assert [row.token_id for row in answer.rows if isinstance(row, TokenRow)] == expected
    twin.engine.release(sequence)


async def test_the_profile_holds_times_of_steps(twin: Twin) -> None:
    await twin.engine.warm_up()
    seconds = twin.engine.info.step_profile.seconds
    assert (1, 1) in seconds  # as many more as a second allows for
    assert torch.isfinite(torch.tensor(list(seconds.values()))).all()


@pytest.mark.parametrize("family", VISION)
async def test_a_checkpoint_with_a_vision_tower_serves_text(family: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    async with twin_of(tmp_path, VISION[family]()) as twin:
        texts = prompts(4)
        found = await together(*(text_of(twin.engine, prompt, COUNT) for prompt in texts))
        assert all(twin.is_greedy(prompt, text) for prompt, text in zip(texts, found, strict=True))
        # Rejections, and texts that are longer than what their requests began with
        works = [text_of(twin.engine, *each, seed=3) for each in zip(texts, [COUNT] * 4, found, strict=True)]
        assert await together(*works) == found
