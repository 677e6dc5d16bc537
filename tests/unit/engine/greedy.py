"""Simple heads, and the plain computation to compare them with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Continue, Done, Head, Job, StepRecord
from tandem.engine.core.selection import Backends
from tandem.engine.interface import EngineSettings
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.models.loading import LoadedModel
from tandem.engine.steps import ModelRunner
from tandem.model.types import Delta
from tests.service.clients import until

EngineT = TypeVar("EngineT", bound=Engine[Any, Any])


@dataclass
class Generation:
    """Payload that asks for so many tokens."""

    token_count: int
    token_ids: list[int] = field(default_factory=list)


class GreedyHead:
    """Generates greedily up to the requested number of tokens."""

    def __call__(
        self, ready: SequenceOf[Job[Generation]], logits: Tensor
    ) -> list[Done[list[int]] | Continue]:
        outcomes: list[Done[list[int]] | Continue] = []
        for job, last in zip(ready, _rows_of(ready, logits), strict=True):
            token_id = int(last[-1].argmax())
            job.payload.token_ids.append(token_id)
            is_enough = len(job.payload.token_ids) == job.payload.token_count
            outcomes.append(Done(job.payload.token_ids) if is_enough else Continue(token_id))
        return outcomes


class RowsHead:
    """Returns the rows unchanged."""

    def __call__(self, ready: SequenceOf[Job[None]], logits: Tensor) -> list[Done[Tensor] | Continue]:
        return [Done(own.to("cpu", copy=True)) for own in _rows_of(ready, logits)]


def _rows_of(ready: SequenceOf[Job[Any]], logits: Tensor) -> tuple[Tensor, ...]:
    """Each job's rows."""
    return torch.split(logits, [job.row_count for job in ready])


@asynccontextmanager
async def started(engine: EngineT) -> AsyncIterator[EngineT]:
    """Run an engine during the block."""
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def running(
    model: LoadedModel | ModelRunner,
    head: Head[Any, Any],
    *,
    on_step: Callable[[StepRecord], None] | None = None,
    on_failure: Callable[[], None] | None = None,
    **settings: Any,
) -> AsyncIterator[Engine[Any, Any]]:
    """Make an engine of a loaded model or of what runs its steps, and run it during the block."""
    runner = Backends(model) if isinstance(model, LoadedModel) else model
    made = Engine(runner, head, EngineSettings(**settings), on_step, on_failure=on_failure)
    async with started(made) as engine:
        yield engine


async def greedy(
    engine: Engine[Any, Any], prompt: SequenceOf[int], token_count: int, scope: str = "a scope"
) -> list[int]:
    """The continuation of a prompt, by the engine, in a sequence of its own."""
    sequence = await engine.open(len(prompt) + token_count, scope=scope)
    try:
        return list(await engine.submit(Job(sequence, Delta(0, prompt), 1, Generation(token_count))))
    finally:
        engine.release(sequence)


async def greedy_together(
    engine: Engine[Any, Any], prompts: SequenceOf[SequenceOf[int]], token_count: int
) -> list[list[int]]:
    """The continuations of many prompts at once."""
    return list(await asyncio.gather(*(greedy(engine, prompt, token_count) for prompt in prompts)))


async def rows(engine: Engine[Any, Any], sequence: Sequence, delta: Delta, row_count: int) -> Tensor:
    """Logits at the last positions once the delta is applied, [row_count, vocabulary_size]."""
    result: Tensor = await engine.submit(Job(sequence, delta, row_count, None))
    return result


def plain_logits(reference: Any, token_ids: SequenceOf[int]) -> Tensor:
    """Logits at every position, by transformers alone, without a cache; [len(token_ids), vocabulary_size]."""
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([list(token_ids)])).logits[0]
    return logits


def plain_greedy(reference: Any, prompt: SequenceOf[int], token_count: int) -> list[int]:
    """The continuation of a prompt, by transformers' `generate`."""
    inputs = torch.tensor([list(prompt)])
    output = reference.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=token_count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    return token_ids


def most_probable(reference: Any, prompt: SequenceOf[int], token_ids: SequenceOf[int]) -> list[int]:
    """The most probable token where each of these stands, behind the prompt and those before it.

    A greedy text is equal to it. One pass of transformers checks a text that takes `generate` a pass for each token.
    """
    logits = plain_logits(reference, [*prompt, *token_ids[:-1]])
    return logits[len(prompt) - 1 :].argmax(dim=-1).tolist()


async def settle(engine: Engine[Any, Any]) -> None:
    """Waits until nothing is reserved any more."""
    await until(lambda: not (engine.usage.reserved_tokens or engine.usage.sequence_count), 5.0)
