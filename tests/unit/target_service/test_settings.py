"""The settings of a service reach its engine."""

from __future__ import annotations

import pytest

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
