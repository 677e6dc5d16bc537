"""Completions from start to end, seen by a client of a coordinator over fake services."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.errors import InvalidRequestError
from tandem.model.types import ChatMessage, FinishReason, GenerationRequest
from tandem_coordinator.settings.coordinator import MAX_CHAT_MESSAGES
from tests.service.clients import complete, until
from tests.service.fakes import MAX_LENGTH, FakeDraft, FakeTarget, cluster, fleet, paced
from tests.service.http_cluster import TOKENIZER

TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 1.0])
REQUEST = GenerationRequest((10,), max_tokens=11, temperature=0.0, num_speculative_tokens=4, seed=1)


@TEMPERATURES
@pytest.mark.parametrize("eos", [11, 12, 13, 15, 16])
async def test_tokens_after_an_end_of_sequence_are_dropped(eos: int, temperature: float) -> None:
    """The first token, the first of a proposal, one inside it, its last, and the bonus token."""
    async with cluster(FakeTarget(eos_token_ids=(3, eos)), FakeDraft()) as client:
        completed = await complete(client, replace(REQUEST, temperature=temperature))
    assert completed.token_ids == tuple(range(11, eos + 1))
    assert completed.finish_reason is FinishReason.STOP
    assert completed.speculation.accepted == sum(completed.drafted)


async def test_max_tokens_is_exact_at_every_point_of_a_round() -> None:
    async with cluster(target := FakeTarget(), FakeDraft()) as client:
        for max_tokens in range(1, 12):
            completed = await complete(client, replace(REQUEST, max_tokens=max_tokens))
            assert completed.token_ids == tuple(range(11, 11 + max_tokens))
            assert completed.finish_reason is FinishReason.LENGTH
            assert target.longest <= max_tokens, "the target never reads the last token"


@pytest.mark.parametrize("max_tokens", [None, 10 * MAX_LENGTH])
async def test_max_length_is_exact(max_tokens: int | None) -> None:
    async with cluster(target := FakeTarget(), draft := FakeDraft()) as client:
        completed = await complete(client, replace(REQUEST, max_tokens=max_tokens))
    assert completed.token_ids == tuple(range(11, 10 + MAX_LENGTH))
    assert completed.finish_reason is FinishReason.LENGTH
    assert max(target.longest, draft.longest) < MAX_LENGTH


async def test_too_large_requests_are_refused_before_they_wait() -> None:
    target = paced(0.1)
    async with fleet(target, max_concurrent_requests=1) as (client, _, service):
        running = asyncio.create_task(complete(client, replace(REQUEST, max_tokens=50)))
        await until(lambda: target.running == 1)
        with pytest.raises(InvalidRequestError, match=f"the prompt has {MAX_LENGTH} tokens"):
            await complete(client, replace(REQUEST, prompt=tuple(range(MAX_LENGTH))))
        assert not running.done(), "the small request ran first"
        assert service.completions.admission.queued == 0
        running.cancel()


async def test_a_chat_is_rendered_to_a_prompt(template: Path) -> None:
    async with cluster(FakeTarget(), chat_template=template, max_prompt_bytes=1000) as client:
        prompt = await client.chat_prompt([ChatMessage("system", "s"), ChatMessage("user", "a")])
        assert prompt == tuple(TOKENIZER.encode("system: s\nuser: a\n").ids)
        for messages, sentence in (
            ([], f"the chat has 0 messages; it must have 1 to {MAX_CHAT_MESSAGES}"),
            ([ChatMessage("", "")] * (MAX_CHAT_MESSAGES + 1), "the chat has 2049 messages"),
            ([ChatMessage("user", "a" * 1000)], "the prompt has 1007 bytes; it must be at most 1000"),
            (
                [ChatMessage("user", "a" * (1 << 20))],
                "the request has 1048590 bytes; it must be at most 132072",
            ),
        ):
            with pytest.raises(InvalidRequestError, match=sentence):
                await client.chat_prompt(messages)


async def test_a_model_without_a_template_refuses_chats() -> None:
    async with cluster(FakeTarget()) as client:
        with pytest.raises(InvalidRequestError, match="the model fake has no chat template; send a prompt"):
            await client.chat_prompt([ChatMessage("user", "a")])
