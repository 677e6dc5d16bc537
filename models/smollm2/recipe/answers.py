"""SmolLM2 answers the recipe's questions, and the target service writes its hidden states to files.

Run as `python -m models.smollm2.recipe.answers FOLDER --minutes 20`. The files are those of `--shared-storage-path`
(docs/drafting-heads.md): for each answer its tokens, prompt included, and the states that the head reads, with the one
before the last norm behind them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.demo.recipe.architecture import Texts
from models.demo.recipe.measure import PROPOSED, parser_of
from models.demo.recipe.training import REPORT_MINUTES, TimeBox
from tandem.clients.client import Client
from tandem.model.types import ChatMessage, GenerationRequest
from tandem.model_sources.bundled import SMOLLM2
from tandem_load.common import service

WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
"""Every combination makes a question."""
QUESTION_SEED = 25
"""The seed of the checked-in head."""
LAYER_IDS = (2, 15, 27)
"""EAGLE-3's default for 30 layers."""
ANSWER_MARK = (1, 520, 9531, 198)
"""Token ids of `<|im_start|>assistant` and the end of its line: the model's own text follows."""
END_OF_ANSWER = 2
"""Token id of `<|im_end|>`. It is in no file: the target does not read what it ends with."""
TEMPERATURES = (0.0, 0.8, 0.0, 0.7, 0.8, 1.0, 0.0, 0.4)
AT_ONCE = 64
"""Questions at once, and sequences of the target."""

logger = logging.getLogger(__name__)


def questions(*, held_out: bool = False) -> list[str]:
    """Several thousand different questions, shuffled. Held-out ones are of the same kinds, with other subjects and
    tasks."""
    subjects, tasks = (WORDS["held_out_" * held_out + name] for name in ("subjects", "tasks"))
    product = itertools.product
    rewrites = itertools.cycle(WORDS["rewrites"])
    asked = [question.format(subject) for subject, question in product(subjects, WORDS["questions"])]
    sentences = (sentence.format(subject) for subject, sentence in product(subjects, WORDS["sentences"]))
    asked += [rewrite.format(sentence) for sentence, rewrite in zip(sentences, rewrites, strict=False)]
    asked += [
        question.format(language, task)
        for task, language, question in product(tasks, WORDS["languages"], WORDS["code_questions"])
    ]
    draw = random.Random(QUESTION_SEED + held_out)
    sums = (
        draw.choice(WORDS["sums"]).format(
            draw.choice(WORDS["people"]),
            draw.randint(3, 90),
            draw.choice(WORDS["goods"]),
            draw.randint(2, 12),
        )
        for _ in range(16 if held_out else 400)
    )
    asked += sorted(set(sums))
    random.Random(QUESTION_SEED).shuffle(asked)
    return asked


async def answer(folder: Path, questions: Sequence[tuple[str, float]], minutes: float) -> int:
    """Fill the folder with files of states, by questions with their temperatures, until the time is up; returns the
    number of tokens answered."""
    layers = ",".join(map(str, (*LAYER_IDS, 30)))
    states = ("--shared-storage-path", str(folder), "--eagle-aux-hidden-state-layer-ids", layers)
    model = (
        *("--model", SMOLLM2, "--dtype", "bfloat16"),
        *("--max-sequences", str(AT_ONCE), "--device-memory-utilization", "0.15"),
    )
    box = TimeBox(minutes)
    report = TimeBox(REPORT_MINUTES)
    seeds = enumerate(questions)
    tokens = 0

    async def ask_on(client: Client) -> None:
        nonlocal tokens, report
        for seed, (question, temperature) in seeds:
            if box.fraction >= 1.0:
                return
            prompt = await client.chat_prompt([ChatMessage("user", question)])
            request = GenerationRequest(
                prompt=prompt, max_tokens=160, temperature=temperature, seed=seed, speculation=False
            )
            async for chunk in client.generate(request):
                tokens += len(chunk.token_ids)
            if report.fraction >= 1.0:
                report = TimeBox(REPORT_MINUTES)
                logger.info("%.2f of the time, %d tokens of answers", box.fraction, tokens)

    async with (
        service("tandem_target", *model, *states) as target,
        service("tandem_coordinator", "--target-address", target) as address,
        Client(address) as client,
    ):
        await asyncio.gather(*(ask_on(client) for _ in range(AT_ONCE)))
    return tokens


def answer_start(tokens: Sequence[int]) -> int:
    """Index of the first token after the prompt."""
    size = len(ANSWER_MARK)
    for start in range(len(tokens) - size, -1, -1):
        if tuple(tokens[start : start + size]) == ANSWER_MARK:
            return start + size
    raise ValueError("the text has no line that opens an answer")


def read_batch(paths: Sequence[Path]) -> Texts:
    """Answers of these files, padded on the right, each with room for one proposal behind it."""
    tokens: list[Tensor] = []
    states: list[Tensor] = []
    masks: list[Tensor] = []
    for path in paths:
        file = load_file(path)
        for values, found in ((file["token_ids"], tokens), (file["hidden_states"], states)):
            found.append(torch.cat((values, values.new_zeros(PROPOSED + 1, *values.shape[1:]))))
        places = torch.arange(len(tokens[-1]))
        length = len(file["token_ids"])
        masks.append((places >= answer_start(file["token_ids"].tolist()) - 1) & (places < length))
    all_tokens, all_states, mask = (pad_sequence(each, batch_first=True) for each in (tokens, states, masks))
    return Texts(all_tokens, all_states[:, :, -1], mask, all_states[:, :, :-1].permute(2, 0, 1, 3))


def endless_batches(folder: Path, rows: int, generator: torch.Generator) -> Iterator[Texts]:
    """Batches for ever. Each pass takes every file once that is there when it begins."""
    while True:
        paths = sorted(folder.glob("*.safetensors"))
        if len(paths) < rows:
            raise ValueError(f"the folder {folder} has {len(paths)} answers; it must have {rows} or more")
        order = torch.randperm(len(paths), generator=generator).tolist()
        for start in range(0, len(order) - rows + 1, rows):
            yield read_batch([paths[index] for index in order[start : start + rows]])


def frequent_tokens(folder: Path, count: int) -> list[int]:
    """The token ids that occur most often in the answers, in ascending order."""
    found: Counter[int] = Counter()
    for path in folder.glob("*.safetensors"):
        tokens = load_file(path)["token_ids"].tolist()
        found.update([*tokens[answer_start(tokens) :], END_OF_ANSWER])
    # A small folder may not have as many: the lowest ids are the shortest pieces of text.
    ranked = dict.fromkeys([*(token for token, _ in found.most_common()), *range(count)])
    return sorted(itertools.islice(ranked, count))


def main() -> None:
    """Let SmolLM2 answer questions, and keep its hidden states."""
    parser = parser_of(main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--held-out", type=int, help="ask as many held-out questions in place of the training's"
    )
    parser.add_argument(
        "--skip", type=int, default=0, help="leave out as many questions, which were answered before"
    )
    parser.add_argument("--temperature", type=float, help="by default several in turn")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    asked = questions(held_out=options.held_out is not None)[: options.held_out][options.skip :]
    temperatures = itertools.cycle(TEMPERATURES if options.temperature is None else (options.temperature,))
    tokens = asyncio.run(
        answer(options.folder, list(zip(asked, temperatures, strict=False)), options.minutes)
    )
    logger.info("%d tokens of answers to at most %d questions", tokens, len(asked))


if __name__ == "__main__":
    main()
