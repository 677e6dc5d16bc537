"""Are a server's tokens as frequent as it says? A check of `tandem audit` that shares nothing with its statistics.

    python -m benchmarks.studies.token_frequencies http://127.0.0.1:8000/v1

Asks for the same completion many times, at temperature 1, and compares how often each token came at each position,
after the most frequent beginning, with its reported probability: Pearson's chi-squared, and the total variation.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections import Counter

from benchmarks.common import study_parser
from tandem.audit.client import Budget, Completion, connected
from tandem.standard_streams import write_out


def compared(completions: list[Completion], position: int) -> str:
    """Frequencies at a position of completions that are equal up to it."""
    count = len(completions)
    drawn = Counter(each.tokens[position] for each in completions)
    # The drawn token is listed beside the most probable ones, so the tokens that all list are compared.
    tops = [each.tops[position] for each in completions]
    listed = set(tops[0]).intersection(*tops)
    expected = {token: count * math.exp(tops[0][token]) for token in listed}
    cells = [(drawn[token], mean) for token, mean in expected.items() if mean >= 5.0]
    cells.append((count - sum(seen for seen, _ in cells), count - sum(mean for _, mean in cells)))
    squared = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    variation = sum(abs(seen - mean) for seen, mean in cells) / 2 / count
    freedom = len(cells) - 1
    z = ((squared / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))
    return (
        f"{count:,} tokens, chi-squared {squared:,.1f} with {freedom} degrees of freedom, "
        f"p = {math.erfc(z / math.sqrt(2)) / 2:.2g} (Wilson and Hilferty), total variation {variation:.4f}"
    )


async def study(arguments: argparse.Namespace) -> None:
    """Sample and print a line for each position."""
    budget = Budget(1_000_000, 1_000_000_000)
    completions: list[Completion] = []
    async with connected(
        arguments.url, model=None, key=None, budget=budget, concurrency=1, timeout_seconds=900.0
    ) as server:
        while len(completions) < arguments.completions:
            completions += await server.complete(
                arguments.prompt, max_tokens=arguments.max_tokens, temperature=1.0, n=16
            )
    for position in range(arguments.max_tokens):
        write_out(f"position {position}: {compared(completions, position)}\n")
        ((common, _),) = Counter(each.tokens[position] for each in completions).most_common(1)
        completions = [each for each in completions if each.tokens[position] == common]


if __name__ == "__main__":
    parser = study_parser(__doc__)
    parser.add_argument("url")
    parser.add_argument("--prompt", default="def fibonacci(n):\n")
    parser.add_argument("--completions", type=int, default=20_480)
    parser.add_argument("--max-tokens", type=int, default=3)
    asyncio.run(study(parser.parse_args()))
