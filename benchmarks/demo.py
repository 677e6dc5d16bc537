"""`make demo`: a completion in colour, then the target alone beside speculative decoding on the same prompts."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from benchmarks.prompts import Prompt, held_out_prompts
from benchmarks.services import cluster
from coordinator.cli.received import ACCEPTED_STYLE, Record, show
from coordinator.figures import acceptance_rate, add, mean_acceptance_length
from tandem.client import Client
from tandem.types import GenerationRequest, SpeculationFigures

NUM_SPECULATIVE_TOKENS = 4
SEED = 7


@dataclass(frozen=True, slots=True)
class Row:
    """What one way of decoding came to over all prompts."""

    tokens_per_second: float
    first_token_seconds: float
    figures: SpeculationFigures


async def main(prompt_count: int, max_tokens: int) -> None:
    """Run the demo on a cluster of its own."""
    console = Console(highlight=False)
    console.print("Starting a draft service, a target service and a coordinator with the bundled models ...")
    async with cluster() as address, Client(address) as client:
        prompts = held_out_prompts(prompt_count)
        await _complete_one(console, client, prompts[0], max_tokens)
        console.print(
            f"\nThe same {len(prompts)} prompts, {max_tokens} tokens each, by the target alone and with "
            f"{NUM_SPECULATIVE_TOKENS} speculative tokens, in turn:\n"
        )
        console.print(await _comparison(client, prompts, max_tokens))
    console.print(
        "\nacceptance: accepted of the proposed tokens; length: tokens for each pass of the target.\n"
        "Next: [bold].venv/bin/tandem up[/bold], and in another terminal "
        '[bold].venv/bin/tandem generate "def main("[/bold]'
    )


async def _complete_one(console: Console, client: Client, prompt: Prompt, max_tokens: int) -> None:
    console.print(
        f"\n[bold]{prompt.name}[/bold]: [dim]the prompt[/dim], "
        f"[{ACCEPTED_STYLE}]proposed by the draft and accepted[/{ACCEPTED_STYLE}], supplied by the target\n"
    )
    console.print(prompt.text, style="dim", markup=False, end="")
    await show(client.generate(_request(prompt, max_tokens, temperature=0.0)))


async def _comparison(client: Client, prompts: Sequence[Prompt], max_tokens: int) -> Table:
    table = Table("temp.", "decoding")
    for name in ("tokens/s", "first token", "acceptance", "length", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for temperature in (0.0, 0.8):
        alone, speculative = await _measure(client, prompts, max_tokens, temperature)
        table.add_row(f"{temperature:g}", "target alone", *_speed(alone), "", "", "1.00 x")
        table.add_row(
            "",
            "speculative",
            *_speed(speculative),
            f"{acceptance_rate(speculative.figures):.1%}",
            f"{mean_acceptance_length(speculative.figures):.2f}",
            f"{speculative.tokens_per_second / alone.tokens_per_second:.2f} x",
        )
    return table


async def _measure(
    client: Client, prompts: Sequence[Prompt], max_tokens: int, temperature: float
) -> tuple[Row, Row]:
    """Both ways in turn, prompt by prompt, so that a machine that slows down slows both."""
    alone, speculative = [], []
    for prompt in prompts:
        request = _request(prompt, max_tokens, temperature)
        alone.append(await _run(client, replace(request, speculation=False)))
        speculative.append(await _run(client, request))
    return _row(alone), _row(speculative)


async def _run(client: Client, request: GenerationRequest) -> Record:
    record = Record()
    async for chunk in client.generate(request):
        record.add(chunk)
    return record


def _request(prompt: Prompt, max_tokens: int, temperature: float) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt.text,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=SEED,
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        ignore_eos=True,
    )


def _row(records: Sequence[Record]) -> Row:
    figures = SpeculationFigures()
    for record in records:
        assert record.summary is not None
        add(figures, record.summary.speculation)
    return Row(
        tokens_per_second=sum(len(r.token_ids) for r in records) / sum(r.total_seconds for r in records),
        first_token_seconds=statistics.median(r.first_token_seconds for r in records),
        figures=figures,
    )


def _speed(row: Row) -> tuple[str, str]:
    return f"{row.tokens_per_second:.1f}", f"{row.first_token_seconds * 1000:.0f} ms"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8, help="how many prompts to compare on")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each completion")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.prompts, arguments.max_tokens))
