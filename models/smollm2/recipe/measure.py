"""Measures the head as it is served: acceptance and tokens/s on the held-out questions, beside other drafts.

Run as `python -m models.smollm2.recipe.measure`. Each question is answered in turn without and with speculation by the
same services, so that a machine that slows down slows both. By default every round proposes as much as it may.
"""

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.common import cluster
from coordinator.stats.speculation import acceptance_length, acceptance_rate, add, conditional_rates
from models.smollm2.recipe.questions import held_out_questions
from tandem.client import Client
from tandem.model_sources.bundled import SMOLLM2
from tandem.types import ChatMessage, GenerationRequest, SpeculationStats

PROPOSED = 4
RULE = "residual"
POLICY_VARIABLE = "TANDEM_COORDINATOR_SPECULATION_POLICY"

logger = logging.getLogger(__name__)


@dataclass
class Figures:
    """Of all questions at one temperature."""

    tokens: int = 0
    seconds: float = 0.0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    async def answer(self, client: Client, requests: Sequence[GenerationRequest]) -> None:
        """Count the answers to some requests at once."""

        async def count(request: GenerationRequest) -> None:
            async for chunk in client.generate(request):
                self.tokens += len(chunk.token_ids)
                if chunk.summary is not None:
                    add(self.stats, chunk.summary.speculation)

        started = time.perf_counter()
        await asyncio.gather(*map(count, requests))
        self.seconds += time.perf_counter() - started


async def measure(
    client: Client, questions: Sequence[str], temperature: float, options: argparse.Namespace
) -> tuple[Figures, Figures]:
    """Without and with speculation."""
    requests = [
        GenerationRequest(
            prompt=await client.chat_prompt([ChatMessage("user", question)]),
            max_tokens=options.max_tokens,
            temperature=temperature,
            seed=seed,
            rejection_sampling_strategy=RULE,
            num_speculative_tokens=PROPOSED,
        )
        for seed, question in enumerate(questions)
    ]
    alone, drafted = Figures(), Figures()
    for start in range(0, len(requests), options.at_once):
        group = requests[start : start + options.at_once]
        # Whichever comes second finds the prompts in the prefix cache.
        is_drafted_first = start // options.at_once % 2 == 1
        for figures in (drafted, alone) if is_drafted_first else (alone, drafted):
            await figures.answer(client, [replace(each, speculation=figures is drafted) for each in group])
    return alone, drafted


async def measure_method(method: str, questions: Sequence[str], options: argparse.Namespace) -> None:
    """Run a cluster with this drafting method, and log its figures."""
    words = ("--model", SMOLLM2, "--method", method, "--dtype", options.dtype, "--no-http")
    async with cluster(*words) as address, Client(address) as client:
        for temperature in options.temperatures:
            alone, drafted = await measure(client, questions, temperature, options)
            own, other = drafted.tokens / drafted.seconds, alone.tokens / alone.seconds
            logger.info(
                "%s, temperature %.1f: acceptance rate %.3f, acceptance length %.2f, by position %s; "
                "%.1f tokens/s, the target alone %.1f, ratio %.2f; %d tokens",
                method,
                temperature,
                acceptance_rate(drafted.stats),
                acceptance_length(drafted.stats),
                " ".join(f"{each:.3f}" for each in conditional_rates(drafted.stats)),
                own,
                other,
                own / other,
                drafted.tokens,
            )


def main() -> None:
    """Measure the head and suffix decoding on the held-out questions."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=1, help="requests at the same time")
    parser.add_argument("--policy", default="fixed", help="adaptive leaves a draft out that does not pay")
    parser.add_argument("--methods", nargs="+", default=["eagle3", "suffix"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")

    os.environ[POLICY_VARIABLE] = options.policy
    questions = held_out_questions()[: options.questions]
    for method in options.methods:
        asyncio.run(measure_method(method, questions, options))


if __name__ == "__main__":
    main()
