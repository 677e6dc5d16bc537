"""An audit from its first request to its result."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import httpx2
import numpy as np

from tandem_audit.checks import (
    PROMPTS,
    Check,
    Verdict,
    greedy_equality,
    kept_and_removed,
    reproducibility,
    temperature_is_raw,
    unless_refused,
)
from tandem_audit.client import Budget, Completion, Server, SpeculationCounts, asked_alike, connect
from tandem_audit.errors import AuditError, BudgetError, UnreachableError, UsageError
from tandem_audit.statistics import (
    ALPHA,
    Calibration,
    Evidence,
    Steps,
    TestResult,
    holm,
    join_steps,
    permutation_p,
)

TEMPERATURE = 0.6
TOP_P = 0.8
"""Sampling parameters of the two shorter looks."""
MAIN = "temperature 1"
COLD = f"temperature {TEMPERATURE:g}"
NUCLEUS = f"top-p {TOP_P:g}"
_SHARES = {COLD: 0.05, NUCLEUS: 0.05}
_CHECKS_SHARE = 0.5
"""Of the time, at most, for the checks before anything is sampled."""
_MARGIN = 0.02
"""How near to top-p a sum may be without being tested: probabilities of bfloat16 have three digits."""
_MAX_SUM = 1.01
"""Highest sum of the probabilities of one position that rounding explains."""
GRAM_TOKENS = 24
"""First tokens of completions, whose pairs are compared."""
REFERENCE_ALPHA = 0.001 - ALPHA
"""Most false alarms of a comparison with a reference: with those of its draws, an audit has 1 in 1,000."""
LOSSY = ("typical", "logit-comparison", "logit_comparison", "synthetic", "relaxed")
"""Acceptance rules that are not lossless by design begin with one of these."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The server to audit, and the budget."""

    url: str
    model: str | None = None
    reference: str | None = None
    minutes: float = 10.0
    concurrency: int = 8
    max_tokens: int = 64
    """Maximum tokens of each sampled completion."""
    budget_requests: int = 20_000
    budget_tokens: int = 500_000
    num_speculative_tokens: int | None = None
    """None: what the server's metrics show."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request."""
    reference_model: str | None = None
    reference_body: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = field(default=None, repr=False)
    reference_key: str | None = field(default=None, repr=False)
    prompts: tuple[str, ...] = PROMPTS

    def __post_init__(self) -> None:
        _check_fields("--body", self.body)
        _check_fields("--reference-body", self.reference_body)


_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "min_tokens": (0,),
    "ignore_eos": (True,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "use_beam_search": (False,),
}
"""Values of a field that leave a token's distribution and a text's end as they are; an audit weighs no others."""
_SET_BY_THE_AUDIT = (
    "prompt",
    "messages",
    "model",
    "temperature",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
)
_WITHOUT_NEUTRAL = (
    "allowed_token_ids", "logits_processors", "response_format", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "suffix", "truncate_prompt_tokens", "thinking_token_budget",
)  # fmt: skip


def _check_fields(option: str, body: Mapping[str, Any]) -> None:
    """Refuse fields of requests after which reported probabilities are rightly others than those drawn from."""
    sentences = []
    for name, value in body.items():
        found = json.dumps(value)[:100]
        if name in _SET_BY_THE_AUDIT:
            sentences.append(f"{name} is {found}; it must be left out: the audit sets it itself")
        elif name in _WITHOUT_NEUTRAL or value not in _NEUTRAL_VALUES.get(name, (value,)):
            neutral = " or ".join(json.dumps(each) for each in _NEUTRAL_VALUES.get(name, ()))
            sentences.append(
                f"{name} is {found}; it must be {neutral or 'left out'}: the audit tests draws from the whole "
                "distribution that is reported"
            )
    if sentences:
        raise UsageError(f"{option}: {'; '.join(sentences)}")


@dataclass(slots=True)
class Audit:
    """The findings of an audit."""

    url: str
    model: str
    began: str
    """ISO 8601, UTC."""
    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    """Generated in all."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields beyond OpenAI's that requests had."""
    checks: list[Check] = field(default_factory=list)
    tests: dict[str, list[TestResult]] = field(default_factory=dict)
    path: list[tuple[int, float]] = field(default_factory=list)
    """Sequential evidence: tokens so far, log10 of the e-process."""
    max_log10: float = 0.0
    is_miscalibrated: bool = False
    detectable: float | None = None
    """Bias of the first choice's frequency that this many tokens find with 95 %."""
    reference: list[TestResult] = field(default_factory=list)
    speculation: SpeculationCounts | None = None

    @property
    def findings(self) -> list[str]:
        found = []
        if self.is_miscalibrated:
            worst = [
                f"{test.name} ({leg}, z = {test.z:+.1f})"
                for leg, tests in self.tests.items()
                for test in sorted(tests, key=lambda each: each.p if each.p is not None else 2.0)[:2]
                if test.adjusted_p is not None and test.adjusted_p < ALPHA / 2
            ]
            found.append(
                f"tokens are not drawn from the reported probabilities: evidence 10^{self.max_log10:.1f}"
                + "".join(f", {each}" for each in worst)
            )
        found += [
            f"another distribution than the reference: {test.name}, p = {test.adjusted_p:.2g}"
            for test in self.reference
            if test.adjusted_p is not None and test.adjusted_p < REFERENCE_ALPHA
        ]
        found += [f"{each.name}: {each.detail}" for each in self.checks if each.verdict is Verdict.FINDING]
        if self.lossy_rules:
            found.insert(0, f"the acceptance rule {', '.join(self.lossy_rules)} is lossy by design")
        return found

    @property
    def lossy_rules(self) -> list[str]:
        """Rules that the server's metrics name and that are not lossless by design."""
        rules = self.speculation.rules if self.speculation else {}
        return sorted(rule for rule in rules if rule.startswith(LOSSY))

    @property
    def verdict(self) -> str:
        if findings := self.findings:
            return f"{len(findings)} finding{'s' * (len(findings) > 1)}"
        passes = self.speculation.tokens_per_pass if self.speculation else None
        gain = f", and {passes:.2f} tokens a pass" if passes else ""
        if self.detectable is None:
            return f"nothing found, but too few sampled tokens with log probabilities to say that it is lossless{gain}"
        return f"lossless, as far as {self.tokens:,} tokens show{gain}"


async def audit(
    options: AuditOptions,
    report: Callable[[str, float], None] = lambda words, share: None,
    transports: Sequence[httpx2.AsyncBaseTransport | None] = (None, None),
) -> Audit:
    """Audit a server. An error means that it cannot be used at all. `report` is told what is done, and the share of the
    budget, time included, that is used."""
    began = time.monotonic()
    end = began + options.minutes * 60
    budget = Budget(options.budget_requests, options.budget_tokens)

    def report_check(words: str) -> None:
        of_time = (time.monotonic() - began) / max(end - began, 1e-9)
        report(words, min(1.0, max(of_time, budget.used_share)))

    async with AsyncExitStack() as stack:
        places = [(options.url, options.model, options.key, options.body)]
        if (url := options.reference) is not None:
            places.append((url, options.reference_model, options.reference_key, options.reference_body))
        servers = [
            await stack.enter_async_context(
                connect(*place, budget=budget, concurrency=options.concurrency, transport=transport)
            )
            for place, transport in zip(places, transports, strict=False)
        ]
        server = servers[0]
        reference = servers[1] if len(servers) > 1 else None
        result = Audit(server.url, server.model, datetime.now(UTC).isoformat(timespec="seconds"))
        result.fields = {**server.optional, **server.body}
        before = await server.speculation()
        checks_end = began + _CHECKS_SHARE * options.minutes * 60
        result.checks += await reproducibility(server, report_check, checks_end)
        after = await server.speculation()
        left = max(0.0, end - time.monotonic())
        if reference is not None:
            report_check("reference")
            # Without log probabilities the rest of an audit has nothing to weigh.
            share = 0.3 if server.listed else 1.0
            with asked_alike(server, reference):
                until = time.monotonic() + left * share
                result.checks += await unless_refused("reference", greedy_equality(server, reference), until)
                tokens = _share(server.budget, share)
                result.reference = await _two_samples(server, reference, options, until, tokens)
        if server.listed:
            modulus = (options.num_speculative_tokens or (len(after.per_position) if after else 0)) + 1
            await _calibrate(server, options, result, modulus if modulus > 1 else None, end, report_check)
        if (last := await server.speculation()) is not None:
            result.speculation = last.since(before or SpeculationCounts())
    result.seconds = time.monotonic() - began
    result.requests = budget.sent
    result.tokens = budget.generated
    return result


_LOOKS: Mapping[str, Mapping[str, Any]] = {
    COLD: {"temperature": TEMPERATURE},
    NUCLEUS: {"temperature": 1.0, "top_p": TOP_P},
    MAIN: {"temperature": 1.0},
}
"""Sampling parameters of each calibration, in order."""


async def _calibrate(
    server: Server,
    options: AuditOptions,
    result: Audit,
    modulus: int | None,
    end: float,
    report: Callable[[str], None],
) -> None:
    """Sample at temperature 1 and, for shorter, at a lower temperature and with top-p; weigh what comes."""
    try:
        async with asyncio.timeout_at(end):
            is_raw, check = await temperature_is_raw(server, TEMPERATURE)
    except (BudgetError, TimeoutError):
        return
    result.checks.append(check)
    evidence = Evidence({name: Calibration(name != MAIN, modulus) for name in _LOOKS})
    left = max(0.0, end - time.monotonic())
    reader = Reader(server.listed)
    removed = 0
    try:
        for name, fields in _LOOKS.items():
            share = _SHARES.get(name, 1.0)
            # What is asked for until then has come at the end
            until = min(end - server.slowest_seconds, time.monotonic() + left * share)
            tokens = _share(server.budget, share)
            async with aclosing(_batches(sample(server, options, until, tokens, fields), reader)) as batches:
                async for steps in batches:
                    conditional, count = condition_steps(name, steps, is_raw)
                    removed += count
                    evidence.add(name, conditional)
                    total, log10 = evidence.path[-1]
                    report(f"{name}: {total:,} tokens, evidence 10^{log10:.1f}")
                    # Sampling ends early at this evidence: more would not say more
                    if log10 > 6.0:
                        break
    except asyncio.CancelledError:
        # Ctrl-C ends the sampling. The evidence counts whenever one stops, so it is reported.
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
    # Tokens that top-p should have removed and that are no finding
    if removed > 2:
        detail = f"{removed} tokens are outside of it, by more than {_MARGIN:g}"
        result.checks.append(Check(NUCLEUS, Verdict.FINDING, detail))
    if reader.sums_above_one:
        detail = f"those of {reader.sums_above_one} positions add up to more than {_MAX_SUM:g}"
        result.checks.append(Check("probabilities", Verdict.FINDING, detail))
    result.tests = evidence.results()
    result.path = evidence.path
    result.max_log10 = evidence.max_log10
    result.is_miscalibrated = evidence.is_finding
    result.detectable = evidence.calibrations[MAIN].detectable()


def condition_steps(name: str, steps: Steps, is_raw: bool) -> tuple[Steps, int]:
    """The distribution that a look's tokens must have, given what the server reported, and how many tokens top-p should
    have removed. Raw probabilities are those before temperature and truncation."""
    if name == MAIN:
        return steps, 0
    if name == COLD or not is_raw:
        return steps.restrict(steps.ids >= 0, TEMPERATURE if name == COLD and is_raw else 1.0), 0
    kept, out = kept_and_removed(steps.probs, TOP_P, _MARGIN)
    is_unlisted_out = steps.probs.sum(axis=1) > TOP_P + _MARGIN
    is_out = np.append(out, is_unlisted_out[:, None], axis=1)
    is_drawn_out = np.take_along_axis(is_out, steps.chosen[:, None], axis=1)[:, 0]
    return steps.restrict(kept), int((is_drawn_out & steps.is_usable).sum())


async def _batches(
    completions: AsyncGenerator[tuple[int, Completion], None], reader: Reader
) -> AsyncGenerator[Steps, None]:
    batch: list[Steps] = []
    async with aclosing(completions):
        async for _, completion in completions:
            batch.append(reader.steps(completion))
            if len(batch) == 16:
                yield join_steps(batch)
                batch = []
    if batch:
        yield join_steps(batch)


def _share(budget: Budget, share: float) -> int:
    """Tokens that a look may generate: its share of what is left."""
    return budget.generated + math.floor(share * (budget.tokens - budget.generated))


async def sample(
    server: Server, options: AuditOptions, until: float, tokens: int, fields: Mapping[str, Any]
) -> AsyncGenerator[tuple[int, Completion], None]:
    """Completions with their prompts' places, in the order in which they were asked for.

    The order of their ends would depend on what was accepted, so it would select.
    """
    waiting: deque[tuple[int, asyncio.Task[list[Completion]]]] = deque()
    numbers = itertools.count()
    failures = 0
    try:
        while True:
            while (
                len(waiting) < server.concurrency
                and time.monotonic() < until
                and server.budget.generated + options.max_tokens * len(waiting) < tokens
                and not server.budget.is_spent
            ):
                place = next(numbers) % len(options.prompts)
                asked = server.complete(options.prompts[place], max_tokens=options.max_tokens, **fields)
                waiting.append((place, asyncio.ensure_future(asked)))
            if not waiting:
                return
            place, task = waiting.popleft()
            try:
                (completion,) = await task
            except BudgetError:
                return
            except AuditError as error:
                failures += 1
                if failures >= 5:
                    raise UnreachableError(f"{failures} requests in a row failed: {error}") from None
                continue
            failures = 0
            yield place, completion
    finally:
        for _, task in waiting:
            task.cancel()
        await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)


@dataclass(slots=True)
class Reader:
    """Turns completions into steps. Token names become numbers."""

    listed: int
    """Candidates at each position that were asked for."""
    sums_above_one: int = 0
    _ids: dict[str, int] = field(default_factory=dict)

    def steps(self, completion: Completion) -> Steps:
        count = min(len(completion.tokens), len(completion.tops), len(completion.logprobs))
        ids = np.full((count, self.listed), -1, np.int64)
        probs = np.zeros((count, self.listed))
        chosen = np.full(count, self.listed, np.int64)
        tokens = np.zeros(count, np.int64)
        is_usable = np.ones(count, bool)
        for i, (name, top) in enumerate(zip(completion.tokens[:count], completion.tops, strict=False)):
            # The drawn token may come as one more than were asked for, and last of several that are equal.
            entries = sorted(top.items(), key=lambda each: (-each[1], each[0] == name))[: self.listed]
            for column, (key, logprob) in enumerate(entries):
                ids[i, column] = self._id(key)
                probs[i, column] = math.exp(logprob)
                if key == name and abs(logprob - completion.logprobs[i]) < 0.001:
                    chosen[i] = column
            total = probs[i].sum()
            self.sums_above_one += bool(total > _MAX_SUM)
            # Tokens of the same text hide each other: too few candidates, or pieces of characters among them.
            is_hidden = not completion.has_ids and any("\ufffd" in key for key, _ in entries)
            is_usable[i] = (len(entries) == self.listed or total > 0.999) and not is_hidden
            tokens[i] = self._id(name)
        return Steps(ids, probs, chosen, tokens, np.arange(count), is_usable)

    def _id(self, name: str) -> int:
        return self._ids.setdefault(name, len(self._ids))


async def _two_samples(
    server: Server, reference: Server, options: AuditOptions, until: float, limit: int
) -> list[TestResult]:
    """Completions at temperature 1 of both, compared by permutation within each prompt."""
    found: list[tuple[int, bool, Completion]] = []
    short = replace(options, max_tokens=min(options.max_tokens, GRAM_TOKENS))
    # Side by side, so that a change in between would meet both.
    sources = [sample(each, short, until, limit, {"temperature": 1.0}) for each in (server, reference)]
    while True:
        pair = [await anext(source, None) for source in sources]
        if pair[0] is None or pair[1] is None:
            break
        found += [(each[0], bool(i), each[1]) for i, each in enumerate(pair) if each is not None]
    for source in sources:
        await source.aclose()
    # Completions of server and reference together; fewer are not compared
    if len(found) < 20:
        return []
    return compare_completions(found)


def compare_completions(
    found: Sequence[tuple[int, bool, Completion]], permutations: int = 9_999
) -> list[TestResult]:
    """Two-sample tests of first tokens, their pairs, pairs anywhere, lengths and reasons to end: of prompts' places,
    True for the reference, and completions."""
    kinds: dict[str, list[tuple[object, int]]] = {
        name: [] for name in ("first token", "first two tokens", "pairs of tokens", "length", "reason to end")
    }
    for unit, (place, _, completion) in enumerate(found):
        pieces = completion.pieces
        kinds["first token"].append(((place, pieces[:1]), unit))
        kinds["first two tokens"].append(((place, pieces[:2]), unit))
        kinds["pairs of tokens"] += [(pair, unit) for pair in itertools.pairwise(pieces)]
        kinds["length"].append((len(pieces).bit_length(), unit))
        kinds["reason to end"].append((completion.finish_reason, unit))
    strata = np.array([place for place, _, _ in found], np.int64)
    is_second = np.array([second for _, second, _ in found], bool)
    results = []
    for name, counted in kinds.items():
        numbers: dict[object, int] = {}
        cells = np.array([numbers.setdefault(cell, len(numbers)) for cell, _ in counted], np.int64)
        units = np.array([unit for _, unit in counted], np.int64)
        p = permutation_p(cells, units, strata, is_second, permutations)
        results.append(TestResult(name, len(cells), math.nan, math.nan, math.nan, p))
    adjusted = holm([test.p for test in results])
    return [replace(test, adjusted_p=each) for test, each in zip(results, adjusted, strict=True)]
