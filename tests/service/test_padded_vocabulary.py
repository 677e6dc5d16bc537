"""A draft with more rows than its target, and the same tokenizer, proposes as one with as many."""

from __future__ import annotations

import pytest

from tandem.engine.models.loading import LoadedModel, load_model
from tandem.model.types import GenerationRequest
from tests.end_to_end.models import random_model, save_model
from tests.paths import DEVICE
from tests.service import engines
from tests.service.clients import complete
from tests.service.engines import TINY

VOCABULARY_SIZE = 2048
PADDING = 64


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The target's own weights, and rows behind them of which many a one is the likeliest."""
    own = random_model(1, **TINY)
    padded = random_model(7, vocab_size=VOCABULARY_SIZE + PADDING, **TINY)
    weights = padded.state_dict()
    for name, values in own.state_dict().items():
        if values.shape == weights[name].shape:
            weights[name].copy_(values)
        else:
            weights[name][:VOCABULARY_SIZE].copy_(values)
            weights[name][VOCABULARY_SIZE:].mul_(8.0)
    folder = save_model(padded, tmp_path_factory.mktemp("padded"))
    return load_model(folder, device=DEVICE, dtype="float32", threads=1)


@pytest.mark.parametrize("draft_ahead", ["off", "4"])
async def test_rows_that_the_target_lacks_are_not_proposed(
    model: LoadedModel, padded: LoadedModel, draft_ahead: str
) -> None:
    async with (
        engines.pair(model, model, draft_ahead=draft_ahead) as (plain, _),
        engines.pair(model, padded, draft_ahead=draft_ahead) as (client, coordinator),
    ):
        (draft,) = coordinator.replicas.drafts.snapshots()
        assert draft.model is not None
        assert draft.model.vocabulary_size == VOCABULARY_SIZE + PADDING
        assert draft.coverage is None, "no vocabulary needs a mapping"
        for temperature, rule in ((0.0, None), (0.3, "strict"), (0.3, "residual"), (0.3, "block")):
            request = GenerationRequest(
                "def f(",
                max_tokens=24,
                seed=3,
                num_speculative_tokens=3,
                ignore_eos=True,
                temperature=temperature,
                rejection_sampling_strategy=rule,
            )
            expected = await complete(plain, request)
            found = await complete(client, request)
            assert found.speculation.drafted > 0
            if rule in (None, "strict"):
                assert found.token_ids == expected.token_ids
                assert found.speculation.accepted == found.speculation.drafted
            if draft_ahead == "off":
                assert found.token_ids == expected.token_ids
                assert found.speculation == expected.speculation
