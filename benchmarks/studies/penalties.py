"""Penalties: how much of a draft's proposals does the target accept with them, and how much without?

    tandem up --model demo
    python -m benchmarks.studies.penalties

Completions of the bundled prompts over a coordinator that runs, with its `draft_model_penalties` and the policy `fixed`
while this lasts. Acceptance depends on no clock.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.pairs import held_out_prompts
from tandem.clients.admin_client import AdminClient
from tandem.clients.client import DEFAULT_ADDRESS, Client
from tandem.config.settings import load_settings
from tandem.model.types import ChatMessage
from tandem_coordinator.stats.speculation import acceptance_rate, sum_stats, tokens_per_pass
from tandem_load.common import Positive, StudySettings, one_sentence, print_row

PENALTIES: Sequence[dict[str, float]] = (
    {},
    {"presence_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.05},
    {"repetition_penalty": 1.3},
)
QUESTIONS = (
    "Why is the sky blue?",
    "Name three colours and say where they occur.",
    "How do I boil an egg?",
    "What is a prime number?",
    "Write a short letter to a friend.",
    "Explain how a bicycle stays upright.",
)
TEMPERATURES = (0.0, 0.8)


class PenaltySettings(StudySettings):
    """Options of the measurement."""

    address: str = DEFAULT_ADDRESS
    """HOST:PORT of the coordinator."""
    prompts: Positive = 6
    """Prompts to complete."""
    max_tokens: Positive = 96
    """Tokens of each completion."""
    chat: bool = False
    """Ask questions by the model's chat template, for a model that chats."""


async def main(settings: PenaltySettings) -> None:
    """Measure, and print a table in Markdown."""
    async with Client(settings.address) as client, AdminClient(settings.address) as admin:
        prompts: Sequence[Any] = [text for _, text in held_out_prompts(settings.prompts)]
        if settings.chat:
            prompts = [
                await client.chat_prompt([ChatMessage("user", question)])
                for question in QUESTIONS[: settings.prompts]
            ]
        await admin.update_config({"speculation_policy": "fixed"})
        try:
            await _measure(client, prompts, settings)
        finally:
            await admin.update_config({}, ["speculation_policy"])


async def _measure(client: Client, prompts: Sequence[Any], settings: PenaltySettings) -> None:
    print_row("temperature", "penalty", "proposed", "accepted", "tokens a pass")
    print_row(*["---"] * 5)
    for temperature in TEMPERATURES:
        for penalty in PENALTIES:
            asked: dict[str, Any] = {
                "max_tokens": settings.max_tokens,
                "temperature": temperature,
                "rejection_sampling_strategy": "block",
                "num_speculative_tokens": 4,
                "ignore_eos": True,
                # The server's own defaults may be others
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
            found = [
                (await client.complete(prompt, seed=number, **(asked | penalty))).speculation
                for number, prompt in enumerate(prompts)
            ]
            total = sum_stats(found)
            words = ", ".join(f"{name} {value:g}" for name, value in penalty.items()) or "none"
            rate = f"{acceptance_rate(total):.1%}"
            print_row(f"{temperature:g}", words, total.drafted, rate, f"{tokens_per_pass(total):.2f}")


if __name__ == "__main__":
    with one_sentence():
        settings = load_settings(PenaltySettings, sys.argv[1:], "python -m benchmarks.studies.penalties")
        asyncio.run(main(settings))
