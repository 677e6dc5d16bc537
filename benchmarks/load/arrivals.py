"""When requests arrive and how long they are: random numbers that a seed decides, whatever the timing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_ARRIVALS, _PROMPTS, _OUTPUTS = range(3)
"""Each has random numbers of its own, so that a change of one leaves the others as they are."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of token counts, cut at both ends."""

    median: float
    sigma: float
    """Standard deviation of the logarithm; 0: every length is the median."""
    minimum: int = 4
    maximum: int = 1024

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read MEDIAN, MEDIAN:SIGMA, or MEDIAN:SIGMA:MAXIMUM.

        Raises:
            ValueError: it is none of these, or a number is out of its range.
        """
        try:
            median, *rest = map(float, text.split(":"))
            sigma, maximum = (*rest, *(0.0, 1024.0)[len(rest) :])
        except ValueError:
            raise ValueError(f"{text!r} must be MEDIAN, MEDIAN:SIGMA or MEDIAN:SIGMA:MAXIMUM") from None
        if not (median >= 1 and sigma >= 0 and maximum >= median) or not math.isfinite(median + sigma):
            raise ValueError(
                f"{text!r}: MEDIAN must be at least 1, SIGMA at least 0, MAXIMUM at least MEDIAN"
            )
        return cls(median, sigma, min(4, int(median)), int(maximum))


SHAREGPT_PROMPTS = Lengths(110.0, 1.15)
SHAREGPT_OUTPUTS = Lengths(110.0, 1.1)
"""Means of about 200 tokens with a long tail, as the chats of ShareGPT have after the filter of `vllm bench serve` (4
to 1,024 tokens)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to be sent."""

    seconds: float
    """After the start."""
    prompt_tokens: int
    output_tokens: int


def arrivals(
    count: int,
    rate: float,
    seed: int,
    prompts: Lengths = SHAREGPT_PROMPTS,
    outputs: Lengths = SHAREGPT_OUTPUTS,
) -> list[Arrival]:
    """Requests in the order of their arrival: a Poisson process, whose gaps are exponential.

    Args:
        count: Number of requests.
        rate: Requests a second on average; infinite: all arrive at the start.
        seed: Decides everything.
        prompts: Tokens of a prompt.
        outputs: Tokens of a completion.
    """
    gaps = np.zeros(count) if math.isinf(rate) else _random(seed, _ARRIVALS).exponential(1.0 / rate, count)
    # The first arrives at the start, as the gaps lie between requests.
    times = np.concatenate(([0.0], np.cumsum(gaps)))[:count]
    return [
        Arrival(float(time), int(prompt), int(output))
        for time, prompt, output in zip(
            times, _drawn(prompts, count, seed, _PROMPTS), _drawn(outputs, count, seed, _OUTPUTS), strict=True
        )
    ]


def _drawn(lengths: Lengths, count: int, seed: int, purpose: int) -> np.ndarray:
    """Lengths as an int64 array of shape (count,)."""
    drawn = lengths.median * np.exp(lengths.sigma * _random(seed, purpose).standard_normal(count))
    return np.clip(np.rint(drawn), lengths.minimum, lengths.maximum).astype(np.int64)


def _random(seed: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, purpose]))
