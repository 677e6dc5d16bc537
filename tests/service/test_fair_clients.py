"""A client that fills all places delays no other client: over real services with a small model."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coordinator.requests.runner import RequestRunner
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.types import GenerationRequest
from tests.service import engines
from tests.service.clients import until
from tests.service.fakes import coordinator

SECONDS = 60.0
MANY = 28
"""More than may run in the coordinator (16 and 2), and far more than fit the target (8 and 1)."""
LONG = GenerationRequest((5, 6), max_tokens=400, temperature=0.0, ignore_eos=True)
SHORT = GenerationRequest((7, 8), max_tokens=6, temperature=0.0, ignore_eos=True)
CROWD, NEWCOMER = "192.0.2.1", "192.0.2.2"


async def tokens(completions: RequestRunner, request: GenerationRequest, peer: str) -> list[int]:
    return [token async for chunk in completions.complete(request, peer=peer) for token in chunk.token_ids]


async def test_a_newcomer_is_served_while_another_client_fills_every_place(tmp_path: Path) -> None:
    target, draft = engines.tiny_model(tmp_path / "target", 1), engines.tiny_model(tmp_path / "draft", 2)
    async with (
        engines.target(target, engines.Faults(), 0.01, 9, kept_sequences=1) as (target_address, _),
        engines.draft(draft, max_sequences=9, kept_sequences=1) as (draft_address, _),
        coordinator(
            CoordinatorSettings(
                target_address=target_address,
                draft_address=draft_address,
                max_concurrent_requests=16,
                max_queued_requests=16,
            )
        ) as (_, service),
    ):
        completions = service.completions
        alone = await tokens(completions, SHORT, NEWCOMER)
        crowd = [asyncio.create_task(tokens(completions, LONG, CROWD)) for _ in range(MANY)]
        try:
            admission = completions.admission
            await until(lambda: (admission.running, admission.queued) == (16, MANY - 16), SECONDS)
            await until(lambda: completions.requests.tokens.total > 200, SECONDS)
            async with asyncio.timeout(SECONDS):
                assert await tokens(completions, SHORT, NEWCOMER) == alone
            assert not any(task.done() for task in crowd), "it waited for the place of one of them"
        finally:
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
        await until(lambda: admission.running == admission.queued == 0, SECONDS)
