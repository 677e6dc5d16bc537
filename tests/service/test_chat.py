"""Chats over gRPC: the coordinator renders them to prompts, with or without HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.settings.coordinator import MAX_CHAT_MESSAGES
from tandem.errors import InvalidRequestError
from tandem.types import ChatMessage
from tests.service.fakes import FakeTarget, cluster
from tests.service.http_cluster import TOKENIZER


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
