"""SmolLM2 answers the recipe's questions, and the target service writes its hidden states to files.

Run as `python -m models.smollm2.recipe.answers FOLDER --minutes 20`. The files are those of `--shared-storage-path`
(docs/drafting-heads.md): for each answer its tokens, prompt included, and the states that the head reads, with the one
before the last norm behind them.
"""

import argparse
import asyncio
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import service
from models.demo.recipe.timebox import Every, TimeBox
from models.smollm2.recipe.questions import held_out_questions, training_questions
from tandem.client import Client
from tandem.model_sources.names import SMOLLM2
from tandem.types import ChatMessage, GenerationRequest

LAYER_IDS = (2, 15, 27)
"""EAGLE-3's default for 30 layers."""
LAST_LAYER_ID = 30
TEMPERATURES = (0.0, 0.7, 1.0, 0.4)
AT_ONCE = 64
MAX_TOKENS = 160

logger = logging.getLogger(__name__)


class Asking:
    """Asks one question after another, many at once, until the time is up or all are answered."""

    def __init__(self, client: Client, questions: Sequence[tuple[str, float]], minutes: float) -> None:
        self._client = client
        self._questions: Iterator[tuple[int, tuple[str, float]]] = enumerate(questions)
        self._box = TimeBox(minutes)
        self._report = Every(30)
        self.tokens = 0

    async def run(self) -> None:
        """Return when the last answer has ended."""
        await asyncio.gather(*(self._ask_on() for _ in range(AT_ONCE)))

    async def _ask_on(self) -> None:
        for seed, (question, temperature) in self._questions:
            if self._box.is_over:
                return
            prompt = await self._client.chat_prompt([ChatMessage("user", question)])
            request = GenerationRequest(
                prompt=prompt, max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, speculation=False
            )
            async for chunk in self._client.generate(request):
                self.tokens += len(chunk.token_ids)
            if self._report.is_due():
                logger.info("%.2f of the time, %d tokens of answers", self._box.fraction, self.tokens)


async def answer(folder: Path, questions: Sequence[tuple[str, float]], minutes: float, *options: str) -> int:
    """Fill the folder with files of states; returns the number of tokens answered.

    Args:
        folder: Exists.
        questions: Each with its temperature.
        minutes: After which no further question is asked.
        options: Further ones of the target service.
    """
    layers = ",".join(map(str, (*LAYER_IDS, LAST_LAYER_ID)))
    states = ("--shared-storage-path", str(folder), "--eagle-aux-hidden-state-layer-ids", layers)
    model = ("--model", SMOLLM2, "--max-sequences", str(AT_ONCE), "--device-memory-utilization", "0.15")
    async with (
        service("target_service", *model, *states, *options) as target,
        service("coordinator", "--target-address", target) as address,
        Client(address) as client,
    ):
        asking = Asking(client, questions, minutes)
        await asking.run()
    return asking.tokens


def main() -> None:
    """Let SmolLM2 answer questions, and keep its hidden states."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--held-out", type=int, help="ask as many held-out questions in place of the training's"
    )
    parser.add_argument("--temperature", type=float, help="by default several in turn")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")

    options.folder.mkdir(parents=True, exist_ok=True)
    asked = training_questions() if options.held_out is None else held_out_questions()[: options.held_out]
    temperatures = TEMPERATURES if options.temperature is None else (options.temperature,)
    questions = list(zip(asked, itertools.cycle(temperatures), strict=False))
    tokens = asyncio.run(answer(options.folder, questions, options.minutes, "--dtype", options.dtype))
    logger.info("%d tokens of answers to at most %d questions", tokens, len(questions))


if __name__ == "__main__":
    main()
