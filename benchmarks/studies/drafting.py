"""Cost and gain of drafting without a model.

    python -m benchmarks.studies.drafting costs        what a proposal costs, by method and length of the context
    python -m benchmarks.studies.drafting gains        real services: against a draft model and against no speculation
    python -m benchmarks.studies.drafting start        from the start of the process to its `ready` line

Costs are processor time of this process, so that a busy machine does not spoil them; gains are wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.inputs.editing import editing_prompts, source_text
from benchmarks.services import service
from coordinator.cli.generate import Record
from coordinator.stats.speculation import acceptance_rate, add, tokens_per_pass
from draft_service.proposers.model_free import TokenIndex, TokenState
from draft_service.proposers.ngram import NgramIndex
from draft_service.proposers.suffix import ResponseCache, SuffixIndex
from tandem.client import Client
from tandem.config.speculative import DraftingOptions
from tandem.types import Delta, GenerationRequest, SpeculationStats

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"

CONTEXT_LENGTHS = (1_000, 10_000, 100_000)
PROPOSALS = 300
"""Measured for each line of the costs."""
TOKEN_COUNT = 8
LIMIT_MICROSECONDS = 1_000
"""Limit of the median proposal."""

SPECULATIVE_TOKENS = (4, 8)
SEED = 7

NewIndex = Callable[[TokenState], TokenIndex]

METHODS: dict[str, NewIndex] = {
    "ngram, 5 to 5": lambda tokens: NgramIndex(tokens, DraftingOptions()),
    "ngram, 1 to 8": lambda tokens: NgramIndex(
        tokens, DraftingOptions(prompt_lookup_min=1, prompt_lookup_max=8)
    ),
    "suffix": lambda tokens: SuffixIndex(tokens, ResponseCache(24, 0), DraftingOptions()),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of an index on one context."""

    prompt_microseconds: float
    """To learn the context, for each token of it."""
    proposal_microseconds: list[float]
    """To learn one to five new tokens and to propose, in ascending order."""

    def quantile(self, share: float) -> float:
        """The cost that this share of the proposals does not exceed."""
        return self.proposal_microseconds[int(share * (len(self.proposal_microseconds) - 1))]


def costs(console: Console) -> bool:
    """Show what proposals cost; whether all are within the limit."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    longest = max(CONTEXT_LENGTHS) + 5 * PROPOSALS
    # A token of source code has fewer characters than this.
    tokens = tokenizer.encode(source_text(6 * longest)).ids[:longest]
    table = Table("method")
    for name in ("context", "prompt/token", "median", "99 of 100", "memory/token"):
        table.add_column(name, justify="right", no_wrap=True)
    within = True
    for method, new_index in METHODS.items():
        for length in CONTEXT_LENGTHS:
            cost = _cost(new_index, tokens, length)
            within &= cost.quantile(0.5) <= LIMIT_MICROSECONDS
            table.add_row(
                method, f"{length:,}", *_cost_cells(cost), f"{_memory(new_index, tokens[:length]):.0f} B"
            )
    console.print(table)
    return within


def _cost_cells(cost: Cost) -> Iterator[str]:
    for microseconds in (cost.prompt_microseconds, cost.quantile(0.5), cost.quantile(0.99)):
        yield f"{microseconds:.1f} us"


def _cost(new_index: NewIndex, tokens: Sequence[int], length: int) -> Cost:
    state = TokenState(0)
    index = new_index(state)
    started = time.process_time()
    _learn(state, index, Delta(0, tokens[:length]))
    prompt_seconds = time.process_time() - started
    seconds = []
    for count in islice(cycle(range(1, 6)), PROPOSALS):
        started = time.process_time()
        _learn(state, index, Delta(len(state), tokens[len(state) : len(state) + count]))
        index.propose(TOKEN_COUNT)
        seconds.append(time.process_time() - started)
    return Cost(1e6 * prompt_seconds / length, sorted(1e6 * second for second in seconds))


def _memory(new_index: NewIndex, tokens: Sequence[int]) -> float:
    """Bytes for each token of a context."""
    tracemalloc.start()
    try:
        state = TokenState(0)
        index = new_index(state)
        _learn(state, index, Delta(0, tokens))
        return tracemalloc.get_traced_memory()[0] / len(tokens)
    finally:
        tracemalloc.stop()


def _learn(state: TokenState, index: TokenIndex, delta: Delta) -> None:
    state.apply(delta, state.kept_length(delta))
    for _ in index.learn():
        pass


@dataclass(slots=True)
class Gain:
    """Results of one way of decoding over all prompts."""

    tokens: int = 0
    seconds: float = 0.0
    figures: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def tokens_per_second(self) -> float:
        """Over whole requests, the reading of the prompt included."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Way:
    """A way of decoding."""

    draft: str
    """Display name; empty for the target alone."""
    token_count: int = 0
    again: bool = False
    """True if the same request was answered before."""


async def gains(console: Console, prompt_count: int, max_tokens: int) -> None:
    """Show what each method gains on prompts that ask to repeat a function with one change."""
    gained: dict[Way, Gain] = {}
    async with _coordinators() as clients:
        # In turn, prompt by prompt, so that a machine that slows down slows all of them.
        for prompt in editing_prompts(prompt_count):
            for way, client in clients.items():
                record = await _run(client, _request(prompt.text, max_tokens, way))
                _note(gained.setdefault(way, Gain()), record)
                if way.draft == "suffix":
                    record = await _run(client, _request(prompt.text, max_tokens, way))
                    _note(gained.setdefault(replace(way, again=True), Gain()), record)
    console.print(_gains_table(gained))


@asynccontextmanager
async def _coordinators() -> AsyncIterator[dict[Way, Client]]:
    """One target, and for each way a draft service with its own coordinator, so that none learns from another's
    responses."""
    async with AsyncExitStack() as stack:
        demo = [("--model", str(DEMO / name), "--threads", "1") for name in ("target", "draft")]
        target = await stack.enter_async_context(service("target_service", *demo[0]))

        async def client(*options: str) -> Client:
            address = await stack.enter_async_context(
                service("coordinator", "--target-address", target, *options)
            )
            return await stack.enter_async_context(Client(address))

        async def drafted(*options: str) -> Client:
            return await client(
                "--draft-address", await stack.enter_async_context(service("draft_service", *options))
            )

        clients = {Way(""): await client()}
        standalone = await drafted(*demo[1])
        ngram = await drafted("--method", "ngram")
        short = await drafted("--method", "ngram", "--prompt-lookup-min", "2", "--prompt-lookup-max", "5")
        for count in SPECULATIVE_TOKENS:
            clients[Way("standalone", count)] = standalone
            clients[Way("ngram", count)] = ngram
            clients[Way("ngram, 2 to 5", count)] = short
            clients[Way("suffix", count)] = await drafted("--method", "suffix")
        yield clients


def _request(prompt: str, max_tokens: int, way: Way) -> GenerationRequest:
    return GenerationRequest(
        prompt,
        max_tokens=max_tokens,
        temperature=0.0,
        seed=SEED,
        num_speculative_tokens=way.token_count or None,
        speculation=bool(way.draft),
        ignore_eos=True,
    )


async def _run(client: Client, request: GenerationRequest) -> Record:
    record = Record()
    async for chunk in client.generate(request):
        record.add(chunk)
    return record


def _note(gain: Gain, record: Record) -> None:
    assert record.summary is not None
    gain.tokens += len(record.token_ids)
    gain.seconds += record.total_seconds
    add(gain.figures, record.summary.speculation)


def _gains_table(gained: dict[Way, Gain]) -> Table:
    table = Table("draft", "K")
    for name in ("tokens/s", "acceptance", "tokens/pass", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    alone = gained[Way("")]
    for way, gain in sorted(
        gained.items(), key=lambda item: (item[0].draft, item[0].again, item[0].token_count)
    ):
        table.add_row(
            f"{way.draft or 'target alone'}{', asked again' if way.again else ''}",
            str(way.token_count or ""),
            f"{gain.tokens_per_second:.1f}",
            f"{acceptance_rate(gain.figures):.1%}" if way.draft else "",
            f"{tokens_per_pass(gain.figures):.2f}" if way.draft else "",
            f"{gain.tokens_per_second / alone.tokens_per_second:.2f} x",
        )
    return table


async def start_up(console: Console, times: int = 5) -> None:
    """Show how long a draft service takes to be ready."""
    for method, options in (
        ("ngram", ("--method", "ngram")),
        ("suffix", ("--method", "suffix")),
        ("standalone", ("--model", str(DEMO / "draft"), "--threads", "1")),
    ):
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            async with service("draft_service", *options):
                seconds.append(time.perf_counter() - started)
        console.print(
            f"{method}: ready after {statistics.median(seconds):.2f} s, the median of {times} starts"
        )


def main() -> None:
    """Run the measurement of the command line; exit 1 when a proposal costs too much."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["costs", "gains", "start"], help="by default all of them")
    parser.add_argument("--prompts", type=int, default=12, help="how many prompts to measure gains on")
    parser.add_argument("--max-tokens", type=int, default=160, help="tokens of each completion")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    within = True
    if arguments.what in (None, "costs"):
        within = costs(console)
    if arguments.what in (None, "gains"):
        asyncio.run(gains(console, arguments.prompts, arguments.max_tokens))
    if arguments.what in (None, "start"):
        asyncio.run(start_up(console))
    if not within:
        parser.exit(1, f"a median proposal costs more than {LIMIT_MICROSECONDS} us\n")


if __name__ == "__main__":
    main()
