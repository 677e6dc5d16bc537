"""A head that vLLM runs: it reads each step once, with what its rounds came to, and proposes behind its own pairs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.engine.core.engine import RowEngine
from tandem.engine.interface import EngineSettings
from tandem.engine.models.checkpoint import open_checkpoint
from tandem.engine_vllm.engine import VllmModel
from tandem.engine_vllm.heads import VllmHeads
from tandem_target.verifier import VerifiedSequence, Verifier
from tests.paths import DEMO_DRAFT
from tests.unit.engine_vllm.fake_vllm import VOCABULARY_SIZE, FakeHeadWorker, expected_logits, fake_core
from tests.unit.target_service.test_head_drafter import Request

_MAX_LENGTH = 64


@asynccontextmanager
async def running(worker: FakeHeadWorker, block_count: int) -> AsyncIterator[Verifier]:
    model = VllmModel(fake_core(worker, block_count, _MAX_LENGTH), open_checkpoint(Path(DEMO_DRAFT)))
    model.heads = VllmHeads(model, 4, has_pairs=True)
    settings = EngineSettings(prefill_chunk_tokens=12, max_sequences=32)
    verifier = Verifier(RowEngine(model, settings, drafter=model.heads), (), own_head=model.heads)
    await verifier.start()
    yield verifier
    await verifier.close()


def greedy(prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(expected_logits(text).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("scope", ["", "one"])
@pytest.mark.parametrize("block_count", [200, 60, 30])
async def test_it_proposes_behind_the_pairs_of_the_sequence_alone(block_count: int, scope: str) -> None:
    """Together, one after the other with prefixes in common, and where sequences lose their blocks."""
    draw = random.Random(block_count)
    shared = [each % VOCABULARY_SIZE for each in range(3, 23)]
    prompts = [
        [
            *shared[: draw.randrange(1, 20)],
            *(draw.randrange(VOCABULARY_SIZE) for _ in range(draw.randrange(9))),
        ]
        for _ in range(24)
    ]
    worker = FakeHeadWorker(shares_blocks=bool(scope))
    async with running(worker, block_count) as verifier:
        assert verifier.model_info.head_step_profile.seconds == {(1, 1): 0.001, (4, 1): 0.004, (16, 1): 0.016}
        for first in range(0, len(prompts), 8):
            some = prompts[first : first + 8]
            requests = [Request(verifier, "r", prompt, scope=scope) for prompt in some]
            texts = await asyncio.gather(*(request.run(20) for request in requests))
            for prompt, text in zip(some, texts, strict=True):
                assert text == greedy(prompt, 20)
    assert worker.stale_count == 0
    assert worker.proposed_count > 10


class Changing(Request):
    """Asks for a proposal now and then."""

    def __init__(self, verifier: Verifier, prompt: list[int], seed: int, scope: str) -> None:
        super().__init__(verifier, "r", prompt, scope=scope)
        self._draw = random.Random(seed)

    async def _round(self, verified: VerifiedSequence) -> None:
        self._token_count = self._draw.choice((0, 0, 4, 4, 4))
        await super()._round(verified)


@pytest.mark.parametrize("scope", ["", "one"])
@pytest.mark.parametrize("block_count", [200, 30])
async def test_a_head_that_rests_reads_later_what_it_missed(block_count: int, scope: str) -> None:
    """Beside others that never ask, whose blocks have no pairs."""
    draw = random.Random(block_count)
    shared = [each % VOCABULARY_SIZE for each in range(3, 23)]
    worker = FakeHeadWorker(shares_blocks=bool(scope))
    async with running(worker, block_count) as verifier:
        for number in range(4):
            prompts = [shared[: draw.randrange(1, 20)] for _ in range(8)]
            requests = [
                Changing(verifier, prompt, number, scope)
                if draw.random() < 0.7
                else Request(verifier, "r", prompt, 0, scope=scope)
                for prompt in prompts
            ]
            texts = await asyncio.gather(*(request.run(20) for request in requests))
            for prompt, text in zip(prompts, texts, strict=True):
                assert text == greedy(prompt, 20)
    assert worker.stale_count == 0
    assert worker.proposed_count > 10


async def test_a_head_that_nobody_asks_rests() -> None:
    worker = FakeHeadWorker()
    async with running(worker, 200) as verifier:
        for _ in range(2):
            request = Request(verifier, "r", list(range(20)), 0)
            assert await request.run(20) == greedy(list(range(20)), 20)
    assert worker.read_count == 0


@dataclass
class FailingHeadWorker(FakeHeadWorker):
    def step_ran(self, *_: object) -> None:
        """Given up, it is not asked to read any more."""

    def tandem_propose(self, *_: object) -> list[list[int]]:
        raise RuntimeError("out of memory")


async def test_a_head_that_fails_costs_its_proposals_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with running(FailingHeadWorker(), 200) as verifier:
        request = Request(verifier, "r", [1, 2, 3])
        assert await request.run(20) == greedy([1, 2, 3], 20)
    assert not any(proposal for _, proposal in request.proposals)
    said = [vars(each)["is_given_up"] for each in caplog.records if each.message == "head failed"]
    assert said == [False] * 7 + [True]
