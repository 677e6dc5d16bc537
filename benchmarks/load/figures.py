"""Arrivals and lengths of a load, and its figures: throughput, goodput, percentiles of latencies. Pure functions.

A seed decides arrivals and lengths, whatever the timing; figures are named as by `vllm bench serve`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

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
            raise ValueError("it must be MEDIAN, MEDIAN:SIGMA or MEDIAN:SIGMA:MAXIMUM") from None
        if not (median >= 1 and sigma >= 0 and maximum >= median) or not math.isfinite(median + sigma):
            raise ValueError("MEDIAN must be at least 1, SIGMA at least 0, MAXIMUM at least MEDIAN")
        return cls(median, sigma, min(4, int(median)), int(maximum))

    def __str__(self) -> str:
        return f"{self.median:g}:{self.sigma:g}:{self.maximum}"


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
        rate: Requests a second on average; infinite: all arrive at the start.
        seed: Decides everything.
    """
    gaps = np.zeros(count) if math.isinf(rate) else _random(seed, _ARRIVALS).exponential(1.0 / rate, count)
    # The first arrives at the start, as the gaps lie between requests.
    times = np.concatenate(([0.0], np.cumsum(gaps)))[:count]
    lengths = _drawn(prompts, count, seed, _PROMPTS), _drawn(outputs, count, seed, _OUTPUTS)
    return [Arrival(float(time), int(p), int(o)) for time, p, o in zip(times, *lengths, strict=True)]


def _drawn(lengths: Lengths, count: int, seed: int, purpose: int) -> np.ndarray:
    """Lengths as an int64 array of shape (count,)."""
    drawn = lengths.median * np.exp(lengths.sigma * _random(seed, purpose).standard_normal(count))
    return np.clip(np.rint(drawn), lengths.minimum, lengths.maximum).astype(np.int64)


def _random(seed: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, purpose]))


LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""Time to first token; time per output token after it; between two chunks; from arrival to the end."""


@dataclass(slots=True)
class Served:
    """A request as its client saw it, in seconds of one clock."""

    arrived: float
    """When it was to be sent."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunks: list[float] = field(default_factory=list)
    """When each chunk with tokens came."""
    ended: float = 0.0
    error: str = ""
    """Kind of the error that ended it; empty when it did not fail."""
    reason: str = ""
    """The error's sentence."""

    def latencies(self) -> dict[str, list[float]]:
        """Seconds by name of `LATENCIES`, of a request with a chunk: one of each, but as many `itl` as there are gaps,
        and no `tpot` of a single token."""
        ttft, e2el = self.chunks[0] - self.arrived, self.ended - self.arrived
        tpot = [(e2el - ttft) / (self.output_tokens - 1)] if self.output_tokens > 1 else []
        itl = [after - before for before, after in pairwise(self.chunks)]
        return {"ttft": [ttft], "tpot": tpot, "itl": itl, "e2el": [e2el]}


def bound_of(text: str) -> tuple[str, float]:
    """A latency and its bound in seconds, from NAME:MILLISECONDS as `vllm bench serve --goodput` takes it.

    Raises:
        ValueError: the name or the number is wrong.
    """
    name, _, number = text.partition(":")
    try:
        milliseconds = float(number)
    except ValueError:
        milliseconds = math.nan
    if name not in LATENCIES or not milliseconds >= 0:
        raise ValueError(f"it must be NAME:MILLISECONDS, NAME one of {', '.join(LATENCIES)}")
    return name, milliseconds / 1000.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one latency, in milliseconds."""

    mean: float
    percentiles: Mapping[str, float]
    """By name: p50, p99."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a load."""

    completed: int
    failed: int
    errors: Mapping[str, int]
    """Number of errors of each kind."""
    reasons: Mapping[str, str]
    """The sentence of the first error of each kind."""
    seconds: float
    """From the first arrival to the last end."""
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    goodput: float | None
    """Requests a second within the bounds; None without bounds."""
    latencies: Mapping[str, Spread]
    """Without a latency that no request has."""


def figures(all_served: Sequence[Served], bounds: Mapping[str, float], percents: Sequence[float]) -> Figures:
    """The figures of requests that were served.

    Args:
        bounds: What a request meets to count for goodput, in seconds by latency. Of its waits between chunks, the
            longest counts.
        percents: Percentiles to give, 0 to 100.
    """
    well = [served for served in all_served if not served.error and served.chunks]
    seconds = max(served.ended for served in all_served) - min(served.arrived for served in all_served)
    own = [served.latencies() for served in well]
    good = [all(max(each[name], default=0.0) <= bound for name, bound in bounds.items()) for each in own]
    values = {name: [seconds for each in own for seconds in each[name]] for name in LATENCIES}
    failures = [served for served in all_served if served.error]
    tokens = sum(served.output_tokens for served in well)
    return Figures(
        completed=len(well),
        failed=len(all_served) - len(well),
        errors=Counter(served.error for served in failures),
        reasons={served.error: served.reason for served in reversed(failures)},
        seconds=seconds,
        prompt_tokens=sum(served.prompt_tokens for served in well),
        output_tokens=tokens,
        requests_per_second=_rate(len(well), seconds),
        output_tokens_per_second=_rate(tokens, seconds),
        goodput=_rate(sum(good), seconds) if bounds else None,
        latencies={name: _spread(found, percents) for name, found in values.items() if found},
    )


def _spread(seconds: Sequence[float], percents: Sequence[float]) -> Spread:
    found = 1000.0 * np.percentile(seconds, percents)
    return Spread(
        1000.0 * float(np.mean(seconds)),
        {f"p{percent:g}": float(value) for percent, value in zip(percents, found, strict=True)},
    )


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


BETWEEN = "between"
"""Place of the wait between acceptance and the next question: text, chunks, the controller."""

Counts = Mapping[str, Mapping[float, float]]
"""By place, cumulative counts of waits by upper bound in seconds."""


def waits_of(page: str) -> Counts:
    """The waits in a page of metrics, those of all models together; other places than `BETWEEN` only where they are
    measured."""
    found: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(page):
        for name, labels, value, *_ in family.samples:
            is_wait = name == "tandem_round_phase_seconds_bucket" and labels["phase"] == "wait"
            if is_wait or name == "tandem_round_wait_seconds_bucket":
                counts, bound = found.setdefault(labels.get("place", BETWEEN), {}), float(labels["le"])
                counts[bound] = counts.get(bound, 0.0) + value
    return found


def quantiles(before: Counts, after: Counts) -> dict[str, dict[str, float]]:
    """Median and p99 of the waits between two readings, in milliseconds by place; without places where none waited."""
    found = {}
    for place, counts in after.items():
        earlier = before.get(place, {})
        buckets = [(bound, counts[bound] - earlier.get(bound, 0.0)) for bound in sorted(counts)]
        if buckets[-1][1] > 0:
            shares = {"p50": 0.5, "p99": 0.99}
            found[place] = {name: 1000.0 * histogram_quantile(buckets, each) for name, each in shares.items()}
    return found


def histogram_quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """A quantile from a histogram, in proportion inside its bucket, as Prometheus computes it.

    Args:
        buckets: Upper bound and cumulative count of each, ascending; the last bound is infinite.
        share: 0 to 1.

    Returns:
        The quantile; the largest finite bound if it lies beyond; 0 of no values.
    """
    bounds, counts = zip(*buckets, strict=True)
    ends = [0.0, *bounds[:-1], bounds[-2]]
    return float(np.interp(share * counts[-1], [0.0, *counts], ends)) if counts[-1] else 0.0
