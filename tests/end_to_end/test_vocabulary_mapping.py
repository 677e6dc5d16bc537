"""One draft process for targets with three tokenizers at once: two of them are mapped, losslessly."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.admin_client import AdminClient
from tests.end_to_end.processes import AHEAD, Nursery, address_of, coordinator
from tests.paths import DEMO_UNIGRAM
from tests.service.clients import complete_all
from tests.service.other_tokenizer import renumbered
from tests.service.test_vocabulary_mapping import GREEDY, PROMPTS, SAMPLED

pytestmark = pytest.mark.slow


async def test_one_draft_serves_three_tokenizers_at_once(
    services: Nursery, target_address: str, draft_address: str, tmp_path: Path
) -> None:
    requests = [
        replace(each, prompt=prompt, max_tokens=64) for each in (GREEDY, SAMPLED) for prompt in PROMPTS
    ]
    with ExitStack() as stack:
        others = [DEMO_UNIGRAM, renumbered(tmp_path / "renumbered", 700)]
        targets = [target_address, *(services.started("target_service", each).address for each in others)]
        started = [stack.enter_context(coordinator(target, draft_address, *AHEAD)) for target in targets]
        addresses = [address_of(process) for process in started]
        drafted = await asyncio.gather(*(complete_all(address, requests) for address in addresses))
        alone = [replace(each, speculation=False) for each in requests]
        texts = await asyncio.gather(*(complete_all(address, alone) for address in addresses))
        shares = []
        for address in addresses:
            async with AdminClient(address) as admin:
                shares += [each.coverage for each in await admin.replicas() if each.coverage is not None]
    for own, reference in zip(drafted, texts, strict=True):
        assert [each.token_ids for each in own] == [each.token_ids for each in reference]
        assert sum(each.stats.accepted for each in own) > 10
    assert len(shares) == 2
    assert all(0.25 < each.text_share <= 1.0 and each.build_seconds > 0.0 for each in shares)
