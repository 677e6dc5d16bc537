"""A tiny model twice: as transformers runs it, and as vLLM's worker does behind our engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.engine.core.engine import RowEngine
from tandem.engine.core.jobs import StepRecord
from tandem.engine.interface import EngineSettings, RowRequest
from tandem.engine_vllm.engine import load_vllm
from tandem.model.types import Delta, RowKind, SamplingParams, TargetOptions, TokenRow, VerifyStep
from tandem_target.settings import TargetSettings
from tests.paths import DEVICE
from tests.unit.engine.greedy import started
from tests.unit.engine.tiny_models import MAX_LENGTH, save_checkpoint

GREEDY = TargetOptions("r", SamplingParams(temperature=0.0))


@dataclass(frozen=True)
class Twin:
    """The same weights twice."""

    reference: Any
    engine: RowEngine
    records: list[StepRecord]
    """Of the engine's steps."""

    def logits(self, token_ids: SequenceOf[int]) -> Tensor:
        """Those that transformers computes, [tokens, vocabulary_size]."""
        with torch.inference_mode():
            return self.reference(torch.tensor([list(token_ids)])).logits[0]  # type: ignore[no-any-return]

    def is_greedy(self, prompt: SequenceOf[int], text: SequenceOf[int]) -> bool:
        """True if transformers finds each token of the text the most probable one."""
        found = self.logits([*prompt, *text])[len(prompt) - 1 : -1].argmax(-1).tolist()
        return found == list(text)


@asynccontextmanager
async def twin_of(
    folder: Path, config: Any, on_failure: Callable[[], None] | None = None, **options: Any
) -> AsyncIterator[Twin]:
    """Make a checkpoint of random weights, load it twice, and run our engine during the block."""
    reference = save_checkpoint(folder, config)
    for module in reference.modules():
        module.do_not_compile = True  # of some families vLLM runs transformers' own classes, and changes them
    records: list[StepRecord] = []
    async with engine_over(folder, records.append, on_failure, **options) as engine:
        yield Twin(reference, engine, records)


@asynccontextmanager
async def engine_over(
    folder: Path,
    on_step: Callable[[StepRecord], None] = lambda _: None,
    on_failure: Callable[[], None] | None = None,
    **options: Any,
) -> AsyncIterator[RowEngine]:
    """Our engine over vLLM's worker during the block."""
    values: dict[str, Any] = {
        "model": folder,
        "engine": "vllm",
        "device": DEVICE,
        "dtype": "float32",
        "threads": 1,
        "max_length": MAX_LENGTH,
        "max_sequences": 16,
        "max_num_batched_tokens": 24,  # prompts are read in chunks
        "kv_cache_memory_bytes": 32 << 20,
        "enforce_eager": True,
        **options,
    }
    settings = TargetSettings(**values)
    model = load_vllm(settings, folder, proposal_length=4, on_failure=on_failure)
    async with started(RowEngine(model, EngineSettings.of(settings), on_step)) as engine:
        yield engine


def prompts(count: int) -> list[list[int]]:
    """Prompts of different lengths, shorter and longer than a window, a chunk and a block."""
    draw = random.Random(1)
    return [[draw.randrange(3, 97) for _ in range(3 + 11 * (index % 8))] for index in range(count)]


async def text_of(
    engine: RowEngine, prompt: SequenceOf[int], count: int, known: SequenceOf[int] = (), seed: int = 0
) -> list[int]:
    """The text after a prompt, by proposals of random lengths, most of whose tokens are those of the known text."""
    draw = random.Random(seed)
    sequence = await engine.open(MAX_LENGTH, scope="a scope")
    text = list(prompt)
    base = 0
    try:
        while (done := len(text) - len(prompt)) < count:
            width = min(draw.choice((0, 2, 4, 7)), count - done - 1)
            proposal = [
                token if draw.random() < 0.8 else draw.randrange(3, 97)
                for token in known[done : done + width]
            ]
            step = VerifyStep(Delta(base, [*text[base:], *proposal]), RowKind.TOKEN, len(proposal) + 1)
            answer = await engine.run(sequence, RowRequest(step, GREEDY))
            found = [row.token_id for row in answer.rows if isinstance(row, TokenRow)]
            accepted = 0
            while accepted < len(proposal) and proposal[accepted] == found[accepted]:
                accepted += 1
            base = len(text)
            text += found[: accepted + 1]
    finally:
        engine.release(sequence)
    return text[len(prompt) :]


async def together(*works: Any) -> list[Any]:
    """All at once."""
    return list(await asyncio.gather(*works))
