"""A proposal fits the room of its sequence; a longer one is refused before anything is allocated."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from draft_service.proposers.drafting import propose_head
from draft_service.proposers.standalone import StandaloneProposer
from tandem.engine.core.engine import Engine
from tandem.engine.models.loading import load_model
from tandem.engine.settings import EngineSettings
from tandem.errors import InvalidRequestError
from tandem.types import Delta, DraftOptions, ProposeStep, SamplingParams
from tests.unit.engine.tiny_models import CONFIGS, save_checkpoint

SAMPLED = DraftOptions("r", SamplingParams(seed=3), max_length=12)


@pytest.fixture
async def proposer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StandaloneProposer]:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, CONFIGS["llama"]())
    engine = Engine(
        load_model(folder, dtype="float32"), propose_head, EngineSettings(max_length=64, max_sequences=2)
    )
    proposer = StandaloneProposer(engine, 8)
    await proposer.start()
    yield proposer
    await proposer.close()


async def test_a_proposal_can_fill_the_sequence_exactly(proposer: StandaloneProposer) -> None:
    prompt = Delta(0, [5, 9, 2])
    async with proposer.sequence(SAMPLED) as sequence:
        # The draft does not read the last of them, so that one more than fits can be drawn.
        assert len(await sequence.propose(ProposeStep(prompt, 10)) or ()) == 10
    for count in (11, 2**31 - 1):
        async with proposer.sequence(SAMPLED) as sequence:
            with pytest.raises(
                InvalidRequestError, match=f"^{count} tokens were asked for after 3, but .* limit is 12$"
            ):
                await sequence.propose(ProposeStep(prompt, count))
            assert len(await sequence.propose(ProposeStep(prompt, 4)) or ()) == 4


async def test_a_sequence_that_is_too_long_is_refused(proposer: StandaloneProposer) -> None:
    async with proposer.sequence(SAMPLED) as sequence:
        with pytest.raises(InvalidRequestError, match="would have 14 tokens, but its limit is 12"):
            await sequence.propose(ProposeStep(Delta(0, [1] * 14), 0))
