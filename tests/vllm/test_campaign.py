"""Services whose models vLLM runs are killed, stopped and restarted under sixteen streams, and no text changes."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.processes import Service, nursery, ready
from tests.end_to_end.test_campaign import assert_nothing_lost
from tests.paths import DEMO_DRAFT, DEMO_TARGET, HELD_OUT_PROMPTS

OPTIONS = [
    "--engine",
    "vllm",
    "--enforce-eager",
    "--dtype",
    "float32",
    "--max-length",
    "512",
    "--max-sequences",
    "16",
]


def pair() -> tuple[list[Service], list[Service]]:
    """Two targets and two drafts."""
    targets, drafts = (
        [nursery().model_service(package, model, *OPTIONS) for _ in range(2)]
        for package, model in (("target_service", DEMO_TARGET), ("draft_service", DEMO_DRAFT))
    )
    ready([*targets, *drafts])
    return targets, drafts


@pytest.mark.parametrize(
    "strikes", [pytest.param(6, marks=pytest.mark.timeout(1800)), pytest.param(100, marks=pytest.mark.soak)]
)
async def test_kills_stops_and_restarts_lose_no_token(strikes: int) -> None:
    entries = json.loads(HELD_OUT_PROMPTS.read_text(encoding="utf-8"))
    await assert_nothing_lost(strikes, *pair(), [entry["prompt"] for entry in entries])
