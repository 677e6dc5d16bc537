"""Compares rollouts that must be equal: the same prompts and seeds by `strict`, whatever happens to the services.

    python -m benchmarks.studies.rollouts                      200 prompts of the demo pair, in float32
    python -m benchmarks.studies.rollouts --dtype bfloat16     how many texts differ where batches round differently

Each way completes the same requests as the first one, the target alone with one request at a time: with a draft, with
other numbers of proposed tokens, in another order, by two targets, with a draft or a target that is killed meanwhile.
A text counts as different from its first other token on. Beside that: the largest difference between log probabilities
that came with the texts and those of one pass of the model in transformers over each finished text.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.clients.client import Client, Completed
from tandem.config.settings import load_settings
from tandem.model.types import GenerationRequest
from tandem.model_sources.bundled import demo_pair
from tandem.serving.children import Child
from tandem_load.common import Positive, StudySettings, one_sentence

STOP_SECONDS = 30.0
PROMPT_TOKENS = 24


class RolloutSettings(StudySettings):
    """Options of the measurement."""

    prompts: Positive = 200
    """Requests, each with a seed of its own."""
    tokens: Positive = 32
    """Tokens of each text."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In which both models compute."""
    engine: Literal["tandem", "vllm"] = "tandem"
    """Of draft and target."""


class Cluster:
    """Two targets, two drafts and their coordinators, each a process."""

    def __init__(self, settings: RolloutSettings, stack: AsyncExitStack) -> None:
        self._settings = settings
        self._stack = stack
        self._services: dict[str, Child] = {}
        self._addresses: dict[str, str] = {}

    async def start(self, name: str) -> str:
        """Start a service, if it does not run; returns its address."""
        role, _, _ = name.partition(" ")
        if name not in self._services:
            pair = demo_pair()
            model = pair.target if role == "target" else pair.draft
            options = (
                "--model",
                str(model),
                "--dtype",
                self._settings.dtype,
                "--engine",
                self._settings.engine,
            )
            await self._run(name, f"tandem_{role}", options)
        return self._addresses[name]

    @asynccontextmanager
    async def coordinator(self, targets: int, drafts: int) -> AsyncIterator[Client]:
        """A coordinator over the first of the services."""
        by_role = {"target": targets, "draft": drafts}
        options = ["--speculation-policy", "fixed", "--draft-patience-seconds", "30"]
        for role, count in by_role.items():
            addresses = [await self.start(f"{role} {number}") for number in range(count)]
            if addresses:
                options += [f"--{role}-address", ",".join(addresses)]
        name = f"coordinator of {targets} and {drafts}"
        await self._run(name, "tandem_coordinator", options)
        try:
            async with Client(self._addresses[name]) as client:
                yield client
        finally:
            await self._services.pop(name).stop()

    def kill(self, name: str) -> None:
        self._services.pop(name).kill()

    async def _run(self, name: str, package: str, options: Sequence[str]) -> None:
        child = await Child.start(
            name, package, [*options, "--port", "0", "--log-level", "error"], STOP_SECONDS
        )
        self._stack.push_async_callback(child.stop)
        self._services[name] = child
        self._addresses[name] = await child.line(" ready on ")


@dataclass(frozen=True)
class Way:
    """A way to complete the requests."""

    name: str
    targets: int = 1
    drafts: int = 1
    tokens: int = 4
    """Proposed at a time; 0 for the target alone."""
    at_once: int = 16
    order_seed: int | None = None
    """Of a shuffled order; None for the order of the prompts."""
    kills: str = ""
    """Service that is killed once a third of the requests has ended."""


WAYS = (
    Way("target alone, one at a time", drafts=0, tokens=0, at_once=1),
    Way("draft, K = 4"),
    Way("K = 2", tokens=2),
    Way("K = 7", tokens=7),
    Way("shuffled, 32 at once", order_seed=1, at_once=32),
    Way("two targets, two drafts", targets=2, drafts=2, order_seed=2),
    Way("a draft killed", drafts=1, kills="draft 0"),
    Way("a target killed", targets=2, drafts=2, kills="target 0"),
)


def requests(settings: RolloutSettings) -> list[GenerationRequest]:
    """The requests, which are the same in all ways."""
    pair = demo_pair()
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    texts = [each["prompt"] for each in json.loads((pair.target.parent / "heldout_prompts.json").read_text())]
    prompts = [tuple(tokenizer(text).input_ids[:PROMPT_TOKENS]) for text in texts]
    return [
        GenerationRequest(
            prompts[number % len(prompts)],
            max_tokens=settings.tokens,
            temperature=1.0,
            seed=number,
            rejection_sampling_strategy="strict",
            sampled_logprobs=True,
            ignore_eos=True,
        )
        for number in range(settings.prompts)
    ]


async def complete(cluster: Cluster, way: Way, asked: Sequence[GenerationRequest]) -> list[Completed]:
    """All requests, in the order of the prompts."""
    order = list(range(len(asked)))
    if way.order_seed is not None:
        random.Random(way.order_seed).shuffle(order)
    found: dict[int, Completed] = {}
    places = asyncio.Semaphore(way.at_once)
    async with cluster.coordinator(way.targets, way.drafts) as client:

        async def one(number: int) -> None:
            request = asked[number]
            if way.tokens:
                request = replace(request, num_speculative_tokens=way.tokens)
            else:
                request = replace(request, speculation=False)
            async with places:
                found[number] = await client.complete(request)
            if way.kills and len(found) == len(asked) // 3:
                cluster.kill(way.kills)

        await asyncio.gather(*(one(number) for number in order))
    return [found[number] for number in range(len(asked))]


def largest_difference(
    asked: Sequence[GenerationRequest],
    found: Sequence[Completed],
    logprobs: Callable[[Sequence[int]], torch.Tensor],
) -> float:
    """Between the log probabilities that came with the texts and those of a pass over each finished text."""
    largest = 0.0
    for request, completed in zip(asked, found, strict=True):
        rows = logprobs((*request.prompt, *completed.token_ids))[len(request.prompt) - 1 : -1]
        own = rows.gather(1, torch.tensor(completed.token_ids)[:, None])[:, 0]
        largest = max(
            largest, float((own - torch.tensor(completed.raw_logprobs, dtype=own.dtype)).abs().max())
        )
    return largest


@torch.inference_mode()
def pass_over(model: torch.nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
    """The training model's log probabilities behind each token, float64."""
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits.double().log_softmax(dim=-1)


async def measure(settings: RolloutSettings) -> Table:
    """Complete the requests in each way, and compare."""
    asked = requests(settings)
    dtype = getattr(torch, settings.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(demo_pair().target, dtype=dtype)
    table = Table(
        "way", "texts that differ", "first at token", "accepted", "largest difference of log probabilities",
        title=f"{len(asked)} prompts, {settings.tokens} tokens each, {settings.dtype}, engine {settings.engine}",
    )  # fmt: skip
    first: list[Completed] = []
    logprobs = cache(partial(pass_over, model))  # most texts are the same in all ways
    async with AsyncExitStack() as stack:
        cluster = Cluster(settings, stack)
        for way in WAYS:
            found = await complete(cluster, way, asked)
            first = first or found
            places = [
                place_of_difference(a.token_ids, b.token_ids) for a, b in zip(first, found, strict=True)
            ]
            differing = [place for place in places if place is not None]
            drafted = sum(each.speculation.drafted for each in found)
            accepted = sum(each.speculation.accepted for each in found)
            table.add_row(
                way.name,
                str(len(differing)),
                str(min(differing)) if differing else "",
                f"{accepted / drafted:.0%}" if drafted else "",
                f"{largest_difference(asked, found, logprobs):.1e}",
            )
    return table


def place_of_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place at which two texts differ; None where they are equal."""
    if a == b:
        return None
    return next(
        (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def main() -> None:
    """Measure, and print a table."""
    with one_sentence():
        settings = load_settings(RolloutSettings, sys.argv[1:], "python -m benchmarks.studies.rollouts")
        torch.set_num_threads(1)
        Console(highlight=False, width=110).print(asyncio.run(measure(settings)))


if __name__ == "__main__":
    main()
