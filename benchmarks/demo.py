"""`make demo`: a completion in colour, then the target alone beside speculative decoding on the same prompts."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from benchmarks.common import one_sentence, service, study_parser
from benchmarks.prompts import QUESTIONS, Prompt, held_out_prompts
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


async def main(model: str, prompt_count: int, max_tokens: int, method: str | None = None) -> None:
    """Run the demo on a cluster of its own."""
    console = Console(highlight=False)
    if model == DEMO:
        named = "the bundled models" if method is None else f"the bundled target and {method} drafting"
    else:
        named = f"{model} and {_drafting(model, method)}"
    console.print(f"Starting the three services with {named} ...")
    drafting = [] if method is None else ["--method", method]
    async with (
        service("tandem", "up", "--model", model, "--no-http", *drafting) as address,
        Client(address) as client,
    ):
        prompts = held_out_prompts(prompt_count) if model == DEMO else await _questions(client, prompt_count)
        console.print(
            f"\n[bold]{prompts[0].name}[/bold]: [dim]the prompt[/dim], "
            f"[{ACCEPTED_STYLE}]accepted from the draft[/{ACCEPTED_STYLE}], the target's own\n"
        )
        end = "\n" if prompts[0].token_ids else ""
        console.print(prompts[0].text, style="dim", markup=False, end=end)
        chunks = client.generate(_request(prompts[0], max_tokens, temperature=0.0))
        streamed, record = Console(highlight=False, soft_wrap=True), Record()
        async for chunk in chunks:
            record.add(chunk, streamed)
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


def _drafting(model: str, method: str | None) -> str:
    """How `tandem up` drafts for a model other than the demo target."""
    if method is not None:
        return f"{method} drafting"
    has_head = model == SMOLLM2 and smollm2_head(SMOLLM2_METHOD) is not None
    return "its EAGLE-3 head" if has_head else "suffix decoding"


async def _questions(client: Client, count: int) -> list[Prompt]:
    """The first questions, as a model that chats is asked them."""
    return [
        Prompt(name, question, await client.chat_prompt([ChatMessage("user", question)]))
        for name, question in list(QUESTIONS.items())[:count]
    ]


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


async def _run(client: Client, request: GenerationRequest) -> Record:
    record = Record()
    async for chunk in client.generate(request):
        record.add(chunk)
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
