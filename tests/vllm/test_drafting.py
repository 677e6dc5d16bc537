"""A draft over a real vLLM proposes, and drafts ahead, what the embedded engine does, with the noise that is shared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tandem.drafting.proposal import propose_head
from tandem.engine.core.engine import Engine
from tandem.engine.core.selection import Backends
from tandem.engine.interface import EngineSettings
from tandem.engine.models.loading import load_model
from tandem.model.grammar import Grammars
from tandem.model.types import Delta, DraftOptions, ProposeStep, SparseDistribution
from tandem_draft.proposers.mapping import Vocabularies
from tandem_draft.proposers.standalone import StandaloneProposer, load_standalone
from tandem_draft.settings import DraftSettings
from tests.paths import DEMO_TARGET, DEVICE
from tests.service.other_tokenizer import renumbered
from tests.unit.draft_service.test_ahead import (
    BUDGET,
    GREEDY,
    STRICT,
    SUPPORT,
    K,
    assert_as_if_asked,
    proposed,
)
from tests.unit.draft_service.test_mapped import (
    AHEAD,
    CODE,
    asked,
    assert_ahead_is_what_would_be_proposed,
    met,
)
from tests.unit.engine.tiny_models import MAX_LENGTH, save_checkpoint
from tests.unit.engine_vllm.test_drafting import wander
from tests.unit.engine_vllm.test_engine import drafted_rounds
from tests.vllm.families import FAMILIES

pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]


Pair = tuple[StandaloneProposer, StandaloneProposer]
"""Over vLLM, and over the embedded engine."""


@asynccontextmanager
async def pair_of(folder: Path) -> AsyncIterator[Pair]:
    """The proposers of a checkpoint."""
    options: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "threads": 1, "max_length": MAX_LENGTH}
    settings = DraftSettings(
        model=folder, engine="vllm", enforce_eager=True, kv_cache_memory_bytes=32 << 20, **options
    )
    over_vllm = load_standalone(settings, lambda record: None, lambda: None)
    embedded = Engine(
        Backends(load_model(folder, device="cpu", dtype="float32")), propose_head, EngineSettings()
    )
    own = StandaloneProposer(
        embedded,
        settings.draft_top_k,
        settings.draft_support_mass,
        grammars=Grammars.of(folder / "tokenizer.json", embedded.info),
        vocabularies=Vocabularies(folder / "tokenizer.json", embedded.info),
    )
    await over_vllm.start()
    await own.start()
    yield over_vllm, own
    await over_vllm.close()
    await own.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["llama", "mistral"])
async def proposers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    """Those of a tiny model."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, FAMILIES[request.param]())
    async with pair_of(folder) as found:
        yield found


@pytest.mark.parametrize("options", [GREEDY, STRICT, SUPPORT], ids=["greedy", "strict", "support"])
async def test_proposals_and_what_follows_them_are_those_of_the_embedded_engine(
    proposers: Pair, options: DraftOptions
) -> None:
    over_vllm, own = proposers
    assert over_vllm.model_info.drafts_ahead
    async with own.sequence(options) as other:
        prompt = tuple(7 * index % 90 + 3 for index in range(70))
        async for text, answer, drafted in drafted_rounds(over_vllm, options, prompt):
            assert len(drafted.outcomes) == BUDGET.branch_count
            await assert_as_if_asked(over_vllm, options, (*text, *answer.token_ids), drafted)
            expected = await proposed(other, ProposeStep(Delta(0, text), K))
            assert answer.token_ids == expected.token_ids
            for given, known in zip(answer.distributions, expected.distributions, strict=True):
                assert isinstance(given, SparseDistribution)
                assert isinstance(known, SparseDistribution)
                np.testing.assert_allclose(given.probs, known.probs, atol=1e-3)


@pytest.mark.parametrize("options", [GREEDY, STRICT, SUPPORT], ids=["greedy", "strict", "support"])
async def test_tokens_in_a_row_are_those_of_the_embedded_engine(
    proposers: Pair, options: DraftOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several sequences, whose proposals have different lengths, beside prompts that are read in parts."""
    over_vllm, own = proposers
    calls: list[str] = []
    model: Any = over_vllm._engine.model
    call = model.call

    def counted(method: str, *arguments: Any) -> Any:
        calls.append(method)
        return call(method, *arguments)

    monkeypatch.setattr(model, "call", counted)
    seeds = range(8)
    found = await asyncio.gather(*(wander(over_vllm, options, seed) for seed in seeds))
    expected = await asyncio.gather(*(wander(own, options, seed) for seed in seeds))
    for rounds, known in zip(found, expected, strict=True):
        assert [each.token_ids for each in rounds] == [each.token_ids for each in known]
    calls.clear()
    rounds = await wander(over_vllm, options, 3)
    assert sum(map(len, rounds)) > 2 * len(rounds)
    assert calls.count("tandem_step") == calls.count("tandem_draft") == len(rounds)


async def test_proposals_for_a_target_with_another_tokenizer_are_those_of_the_embedded_engine(
    tmp_path: Path,
) -> None:
    """The demo draft under other ids, for the demo target; also what is drafted ahead."""
    tokens = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")).encode(CODE).ids
    async with pair_of(renumbered(tmp_path, 1200)) as (over_vllm, own):
        assert over_vllm.model_info.maps_vocabularies
        for how in AHEAD:
            options = await met(over_vllm, asked(how))
            assert await met(own, asked(how)) == options
            answers = []
            for proposer in (over_vllm, own):
                async with proposer.sequence(replace(options, ahead=None)) as sequence:
                    answers.append(await sequence.propose(ProposeStep(Delta(0, tuple(tokens)), K)))
            assert answers[0] is not None
            assert answers[1] is not None
            assert len(answers[0]) > 1
            assert answers[0].token_ids == answers[1].token_ids
            await assert_ahead_is_what_would_be_proposed(over_vllm, options)
