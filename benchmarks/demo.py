"""`make demo`: a completion in colour, then the target alone beside speculative decoding on the same prompts."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from benchmarks.common import one_sentence, service, study_parser
from benchmarks.pairs import held_out_prompts
from coordinator.cli.command import plain_table
from coordinator.cli.generate import ACCEPTED_STYLE, Record
from coordinator.cli.up import SMOLLM2_METHOD
from coordinator.stats.speculation import acceptance_rate, add, tokens_per_pass
from tandem.client import Client
from tandem.errors import ModelFolderError
from tandem.model_sources.bundled import DEMO, SMOLLM2, smollm2_head
from tandem.model_sources.find import find_model
from tandem.types import ChatMessage, GenerationRequest, SpeculationStats

NUM_SPECULATIVE_TOKENS = 4
"""The documentation's examples have as many."""
QUESTIONS = {
    "a question": "Why is the sky blue?",
    "a corrected sentence": (
        "Correct the spelling and repeat the whole text: The quick brown fox jumpd over the lazy dog, and then the "
        "quick brown fox jumpd over the lazy cat as well, because the quick brown fox is very quick."
    ),
    "a list in capitals": "Write this list again with capital letters: apple, banana, cherry, apple, banana, date.",
    "a function": "Write a Python function that returns the sum of a list of numbers, and a test for it.",
    "three colours": "Name three colours and one thing of each colour.",
    "a summary": (
        "Summarise in one sentence: Speculative decoding lets a small model propose several tokens, which a large "
        "model verifies in one pass. The text is the large model's own, but it is written faster."
    ),
    "a haiku": "Write a haiku about the sea.",
    "the capital of France": "What is the capital of France?",
}
"""By name. Some answers repeat the question's text, which drafting without a model foresees, and some do not."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a function, or a question for a model that chats."""

    name: str
    text: str
    token_ids: tuple[int, ...] = ()
    """The question in the model's chat format; empty where the text is to be continued."""


async def main(model: str, prompt_count: int, max_tokens: int, method: str | None = None) -> None:
    """Run the demo on a cluster of its own."""
    console = Console(highlight=False)
    console.print(f"Starting the three services with {_named(model, method)} ...")
    drafting = [] if method is None else ["--method", method]
    async with (
        service("tandem", "up", "--model", model, "--no-http", *drafting) as address,
        Client(address) as client,
    ):
        prompts = [each async for each in _prompts(client, model, prompt_count)]
        console.print(
            f"\n[bold]{prompts[0].name}[/bold]: [dim]the prompt[/dim], "
            f"[{ACCEPTED_STYLE}]accepted from the draft[/{ACCEPTED_STYLE}], the target's own\n"
        )
        end = "\n" if prompts[0].token_ids else ""
        console.print(prompts[0].text, style="dim", markup=False, end=end)
        streamed = Console(highlight=False, soft_wrap=True)
        await _run(client, _request(prompts[0], max_tokens, temperature=0.0), streamed)
        streamed.print()
        console.print(
            f"\n{len(prompts)} prompts, {max_tokens} tokens each, in turn without and with up to "
            f"{NUM_SPECULATIVE_TOKENS} proposed tokens:\n"
        )
        console.print(await _comparison(client, prompts, max_tokens))
    options = "" if model == DEMO else f" --model {model}"
    options += "" if method is None else f" --method {method}"
    request = '"def main("' if model == DEMO else '--chat "Name three colours."'
    console.print(
        "\naccepted: share of the proposed tokens; tokens/pass: tokens per target pass.\n"
        f"\nNext: [bold].venv/bin/tandem up{options}[/bold]"
        f"\nand in another terminal: [bold].venv/bin/tandem generate {request}[/bold]"
    )


def default_model() -> str:
    """The model that chats, or without its package the bundled pair."""
    try:
        find_model(SMOLLM2)
    except ModelFolderError as error:
        Console(stderr=True, highlight=False).print(
            f"{error}. The bundled pair takes its place.", markup=False
        )
        return DEMO
    return SMOLLM2


def _named(model: str, method: str | None) -> str:
    """The models in words, and how `tandem up` drafts for one other than the demo target."""
    if model == DEMO:
        return "the bundled models" if method is None else f"the bundled target and {method} drafting"
    has_head = model == SMOLLM2 and smollm2_head(SMOLLM2_METHOD) is not None
    default = "its EAGLE-3 head" if has_head else "suffix decoding"
    return f"{model} and {default if method is None else f'{method} drafting'}"


async def _prompts(client: Client, model: str, count: int) -> AsyncIterator[Prompt]:
    """Beginnings of functions for the demo target, and the first questions for a model that chats."""
    for name, text in held_out_prompts(count) if model == DEMO else list(QUESTIONS.items())[:count]:
        chat = () if model == DEMO else await client.chat_prompt([ChatMessage("user", text)])
        yield Prompt(name, text, chat)


async def _comparison(client: Client, prompts: Sequence[Prompt], max_tokens: int) -> Table:
    """Both ways in turn, prompt by prompt, so that a machine that slows down slows both."""
    columns = ("TEMP", "DECODING", ">TOKENS/S", ">FIRST TOKEN", ">ACCEPTED", ">TOKENS/PASS", ">SPEED-UP")
    table = plain_table(*columns)
    for temperature in (0.0, 0.8):
        records: list[tuple[Record, Record]] = []
        # The first prompt runs once more than is counted: the first request also sets things up.
        for prompt in (prompts[0], *prompts):
            request = _request(prompt, max_tokens, temperature)
            alone = await _run(client, replace(request, speculation=False))
            records.append((alone, await _run(client, request)))
        slow, fast = zip(*records[1:], strict=True)
        table.add_row(f"{temperature:g}", "target alone", *_speeds(slow), "", "", "1.00 x")
        stats = SpeculationStats()
        for record in fast:
            summary = record.whole.summary
            assert summary is not None
            add(stats, summary.speculation)
        shares = f"{acceptance_rate(stats):.1%}", f"{tokens_per_pass(stats):.2f}"
        table.add_row("", "speculative", *_speeds(fast), *shares, f"{_speed(fast) / _speed(slow):.2f} x")
    return table


async def _run(client: Client, request: GenerationRequest, console: Console | None = None) -> Record:
    record = Record()
    async for chunk in client.generate(request):
        record.add(chunk, console)
    return record


def _request(prompt: Prompt, max_tokens: int, temperature: float) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt.token_ids or prompt.text,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=7,
        # The fastest lossless rule; with a seed that is strict, so both ways write the same text.
        rejection_sampling_strategy="auto",
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        # The answer to a question ends where the model ends it: behind that it has nothing to say.
        ignore_eos=not prompt.token_ids,
    )


def _speed(records: Sequence[Record]) -> float:
    return sum(len(r.whole.token_ids) for r in records) / sum(r.total_seconds for r in records)


def _speeds(records: Sequence[Record]) -> Iterator[str]:
    yield f"{_speed(records):.1f}"
    yield f"{1000 * statistics.median(r.first_token_seconds for r in records):.0f} ms"


if __name__ == "__main__":
    parser = study_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=8, help="how many prompts to compare on")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each completion")
    parser.add_argument(
        "--model",
        help="demo, smollm2, or the folder or Hugging Face id of a model that chats [default: smollm2, or demo "
        "where its package is not installed]",
    )
    parser.add_argument(
        "--method", help="drafting method: eagle3, medusa, ngram or suffix; by default as in tandem up"
    )
    options = parser.parse_args()
    with one_sentence():
        model = options.model or default_model()
        asyncio.run(main(model, options.prompts, options.max_tokens, options.method))
