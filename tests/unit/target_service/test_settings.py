"""The settings of a service reach its engine."""

from __future__ import annotations

import pytest

from tandem.engine.core.events import StepRecord
from tandem.engine.models.loading import load_model
from tandem.types import Delta, RowKind, SamplingParams, TargetOptions, VerifyStep
from target_service.settings import TargetSettings
from target_service.verifier import load_verifier
from tests.paths import DEMO_TARGET
from tests.service.clients import until

SECONDS = 60.0


@pytest.mark.parametrize("is_enabled", [True, False])
async def test_prefixes_are_kept_only_with_prefix_caching(is_enabled: bool) -> None:
    verifier = load_verifier(
        TargetSettings(
            model=DEMO_TARGET, max_length=64, max_sequences=2, compile="off", enable_prefix_caching=is_enabled
        )
    )
    await verifier.start()
    try:
        async with verifier.sequence(TargetOptions("a request", SamplingParams(), 64)) as sequence:
            await sequence.verify(VerifyStep(Delta(0, list(range(3, 51))), RowKind.TOKEN, 1))
        await until(lambda: verifier.kv_usage().sequence_count == 0, SECONDS)
        assert (verifier.kv_usage().retained_tokens > 0) is is_enabled
    finally:
        await verifier.close()


async def test_the_kv_cache_has_the_size_in_bytes_that_was_asked_for() -> None:
    settings = TargetSettings(model=DEMO_TARGET, max_length=64, max_sequences=9, compile="off")
    whole = load_verifier(settings).kv_usage().total_tokens
    layers = load_model(DEMO_TARGET, dtype="float32").layers
    size = 3 * 64 * 4 * sum(layer.values_per_token for layer in layers)
    limited = load_verifier(settings.model_copy(update={"kv_cache_memory_bytes": size}))
    assert (whole, limited.kv_usage().total_tokens) == (9 * 64, 3 * 64)


async def test_a_prompt_is_read_in_chunks_of_at_most_the_batched_tokens() -> None:
    steps: list[StepRecord] = []
    settings = TargetSettings(model=DEMO_TARGET, max_length=64, compile="off", max_num_batched_tokens=20)
    verifier = load_verifier(settings, steps.append)
    await verifier.start()
    try:
        steps.clear()
        async with verifier.sequence(TargetOptions("a request", SamplingParams(), 64)) as sequence:
            await sequence.verify(VerifyStep(Delta(0, list(range(3, 51))), RowKind.TOKEN, 1))
    finally:
        await verifier.close()
    assert [step.token_count for step in steps] == [20, 20, 8]
