"""Services whose models vLLM runs are killed, stopped and restarted under sixteen streams, and no text changes."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.test_campaign import assert_nothing_lost, pairs
from tests.paths import HELD_OUT_PROMPTS

OPTIONS = ("--engine=vllm", "--enforce-eager", "--dtype=float32", "--max-length=512", "--max-sequences=16")


@pytest.mark.parametrize(
    "strikes", [pytest.param(6, marks=pytest.mark.timeout(1800)), pytest.param(100, marks=pytest.mark.soak)]
)
async def test_kills_stops_and_restarts_lose_no_token(strikes: int) -> None:
    entries = json.loads(HELD_OUT_PROMPTS.read_text(encoding="utf-8"))
    await assert_nothing_lost(strikes, *pairs(*OPTIONS), [entry["prompt"] for entry in entries])
