"""`tandem plan`: what speculation gains, at which proposal length, and what would help most; and capacity of a fleet.

The first half is pure: the controller's predictions for given step times. The second measures, and shows what
follows."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from tempfile import TemporaryFile
from typing import Annotated, Any, ClassVar

import numpy as np
import typer
from pydantic import BeforeValidator, Field
from rich.console import Group, RenderableType

from tandem.clients.admin_client import AdminClient
from tandem.clients.client import Client
from tandem.config.names import DEVICES, Device
from tandem.config.rule import Rules, rule
from tandem.errors import ConfigurationError, NotFoundError, ServiceUnavailableError, plural
from tandem.model.speculation_state import SpeculationDecision
from tandem.model.types import GenerationRequest, StepProfile
from tandem.model_sources.bundled import DEMO
from tandem.serving.children import Child
from tandem.telemetry.progress import Progress
from tandem_coordinator.cli.command import OutputOptions, VerbOptions, command, plain_table
from tandem_coordinator.cli.connection import Connection
from tandem_coordinator.cli.doctor import round_trips
from tandem_coordinator.cli.main import app
from tandem_coordinator.cli.up import NO_DRAFT, STOP_SECONDS, UpOptions, as_words, service_arguments
from tandem_coordinator.cli.views import percent
from tandem_coordinator.prediction import (
    OUTCOMES,
    CostModel,
    GainModel,
    ServiceSpeed,
    StepModel,
    StepSeconds,
    expected_tokens,
)

MAX_TOKENS = 16
"""Longest proposal that a plan looks at."""
HELP = 1.5
"""A remedy is judged by the gain of a draft that is this many times as fast, as near, or as good."""
PER_8_ROWS = 0.1
"""Share by which a step takes longer for each 8 rows beyond the first: the GPUs of the published measurements spend
most of a step on reading weights."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times and acceptance of a pair."""

    verify_seconds: float
    """Seconds of a target step with one row."""
    draft_step_seconds: float
    """Seconds of a draft step with one row."""
    acceptance_rates: tuple[float, ...]
    """Conditional acceptance at each position; the last one holds for all positions after it."""
    round_trip_seconds: float = 0.0
    """Seconds of one message to a service and its answer."""
    per_8_rows: float = PER_8_ROWS

    def rounds(self, batch: int, max_tokens: int = MAX_TOKENS) -> Rounds:
        """The rounds of so many requests at once, as the controller predicts them."""
        target = ServiceSpeed(_profile(self.verify_seconds, self.per_8_rows), self.round_trip_seconds)
        draft = ServiceSpeed(_profile(self.draft_step_seconds, self.per_8_rows), self.round_trip_seconds)
        steps = CostModel(target, draft).predict_steps(batch, max_tokens)
        return Rounds(steps, _extend(self.acceptance_rates, max_tokens))


def _profile(seconds: float, per_8_rows: float) -> StepProfile:
    """The profile of a service whose step of one row takes so long, and each further row as much longer."""
    sizes = itertools.product((1, 2), repeat=2)
    return StepProfile(
        {(count, each): seconds * (1.0 + per_8_rows * (count * each - 1) / 8.0) for count, each in sizes}
    )


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds at one load."""

    steps: StepSeconds
    acceptance_rates: Sequence[float]
    """Conditional acceptance at each position of the longest proposal."""
    mapping: str = ""
    """Coverage of the vocabulary mapping, for a draft with another tokenizer."""

    @property
    def tokens(self) -> list[float]:
        """Expected tokens of a round that proposes 0, 1, ... tokens."""
        return expected_tokens(self.acceptance_rates)

    @property
    def seconds(self) -> list[float]:
        """Seconds of a round that proposes 0, 1, ... tokens."""
        return self.steps.predict_asked()

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of a request that proposes 0, 1, ... tokens."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


def _extend(rates: Sequence[float], count: int) -> list[float]:
    """The first `count` rates, where the last one is known to hold for all after it."""
    known = rates[:count]
    return [*known, *[rates[-1]] * (count - len(known))]


def measured_rounds(decision: SpeculationDecision, mapping: str = "", *, has_head: bool = False) -> Rounds:
    """Measurements of a running cluster at one load.

    Args:
        decision: The coordinator's own.
        mapping: Coverage of the vocabulary mapping.
        has_head: The target's own head proposes.
    """
    to_target = decision.alone_message_seconds
    to_draft = max(decision.message_seconds - to_target, 0.0)
    verify = []
    for count, seconds in enumerate(decision.round_seconds):
        questions = to_target + to_draft if count else to_target
        verify.append(max(seconds - count * decision.draft_step_seconds - questions, 1e-9))
    steps = StepSeconds(verify, decision.draft_step_seconds, to_target, to_draft, has_head=has_head)
    return Rounds(steps, _extend(decision.acceptance_rates, len(verify) - 1), mapping)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One proposal length. Seconds and speed-up over the target alone include the wire unless the name says more."""

    tokens: int
    """K."""
    tokens_per_pass: float
    """Expected tokens per round, including the target's own."""
    round_seconds: float
    speedup: float
    speedup_without_wire: float


@dataclass(frozen=True, slots=True)
class Remedy:
    """An improvement."""

    remedy: str
    speedup: float
    """Tokens per second with it, over those of today's target alone."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Advice for one number of requests."""

    of: str
    """The subject of the advice, as the report names it."""
    batch: int
    best_tokens: int
    """0: the target alone."""
    best_speedup: float
    break_even_acceptance: float | None
    """Lowest acceptance rate, the same at every position, at which any length pays; None where none does."""
    remedies: tuple[Remedy, ...]
    """The most helpful first."""
    mapping: str
    """See `Rounds.mapping`."""
    lengths: tuple[PlanRow, ...]


def plan(rounds: Rounds, batch: int, of: str = "") -> BatchPlan:
    """The table for one number of requests at once."""
    speedups = _relative(rounds.speeds)
    local = replace(rounds.steps, target_question=0.0, draft_question=0.0)
    without_wire = _relative(replace(rounds, steps=local).speeds)
    rows = zip(itertools.count(), rounds.tokens, rounds.seconds, speedups, without_wire, strict=False)
    best = max(range(len(speedups)), key=speedups.__getitem__)
    return BatchPlan(
        of=of,
        batch=batch,
        best_tokens=best,
        best_speedup=speedups[best],
        break_even_acceptance=break_even(rounds),
        remedies=remedies(rounds),
        mapping=rounds.mapping,
        lengths=tuple(PlanRow(*row) for row in rows),
    )


def _relative(speeds: Sequence[float]) -> list[float]:
    """Speeds over that of the target alone."""
    return [speed / speeds[0] for speed in speeds]


def break_even(rounds: Rounds) -> float | None:
    """The acceptance, the same at every position, from which drafting makes more tokens than the target alone."""

    def pays(millionths: int) -> bool:
        same = [millionths / 1e6] * len(rounds.acceptance_rates)
        speeds = replace(rounds, acceptance_rates=same).speeds
        return max(speeds) > speeds[0]

    first = bisect_right(range(1_000_001), False, key=pays)
    return first / 1e6 if first <= 1_000_000 else None


def remedies(rounds: Rounds) -> tuple[Remedy, ...]:
    """Improvements, the most helpful first."""
    steps = rounds.steps
    quick_draft = replace(steps, draft=steps.draft / HELP)
    quick_wire = replace(
        steps, target_question=steps.target_question / HELP, draft_question=steps.draft_question / HELP
    )
    fewer_rejections = [1.0 - (1.0 - rate) / HELP for rate in rounds.acceptance_rates]
    hit_rate = GainModel().hit_rate(OUTCOMES[-1])
    speeds = {
        f"a draft {HELP:g} times as fast": replace(rounds, steps=quick_draft).speeds,
        f"round trips {HELP:g} times as short": replace(rounds, steps=quick_wire).speeds,
        f"a draft with {1 - 1 / HELP:.0%} fewer rejections": replace(
            rounds, acceptance_rates=fewer_rejections
        ).speeds,
    }
    if not steps.has_head:  # which needs what the verification computes
        speeds[f"drafting ahead with {hit_rate:.0%} hits"] = _speeds_ahead(rounds, hit_rate)
    found = [Remedy(name, max(each) / rounds.speeds[0]) for name, each in speeds.items()]
    return tuple(sorted(found, key=lambda remedy: -remedy.speedup))


def _speeds_ahead(rounds: Rounds, hit_rate: float) -> list[float]:
    """Tokens per second where the draft works ahead, by proposed tokens."""
    speeds = rounds.speeds[:1]
    hits = rounds.steps.predict_hits(rounds.steps.draft)
    for count in range(1, len(hits)):
        mean = hit_rate * hits[count] + (1.0 - hit_rate) * rounds.seconds[count]
        speeds.append(rounds.tokens[count] / mean)
    return speeds


# ---- how many clients targets serve when their drafts are elsewhere, and how many drafts they need
#
# A target whose draft is on the same device is busy for t_verify + K x t_draft in each round; with the draft elsewhere
# it is busy for t_verify alone. So a saturated target, whose steps take as much longer as they have more rows, serves
# 1 + K x t_draft / t_verify times as many clients at the same rate (arXiv 2606.25091). `period_seconds` adds what the
# law leaves out: groups of clients that take turns, the draft's own queue, and the way between them.


@dataclass(frozen=True, slots=True)
class Fleet:
    """Targets that share drafts."""

    times: StepTimes
    targets: int
    drafts: int
    proposed: int
    """Tokens of a proposal (K), above 0."""
    draft_per_8_rows: float = 0.0
    """Share by which a draft step takes longer for each 8 sequences more."""
    _target: StepModel = field(init=False)
    _draft: StepModel = field(init=False)

    def __post_init__(self) -> None:
        times = self.times
        target = StepModel(_profile(times.verify_seconds, times.per_8_rows))
        draft = StepModel(_profile(times.draft_step_seconds, self.draft_per_8_rows))
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_draft", draft)

    def draft_step_seconds(self, sequences: float) -> float:
        """Seconds of a draft step with so many sequences."""
        return self._draft.predict(max(sequences, 1.0), 1)

    def verify_seconds(self, batch: float) -> float:
        """Seconds of a target step with so many clients."""
        return self._target.predict(max(batch, 1.0), self.proposed + 1)

    @property
    def tokens_per_round(self) -> float:
        """Expected tokens of a client's round."""
        return expected_tokens(_extend(self.times.acceptance_rates, self.proposed))[-1]

    def together_seconds(self, batch: float) -> float:
        """Seconds of a round where a target and its draft take turns on one device, with so many clients."""
        return self.verify_seconds(batch) + self.proposed * self.draft_step_seconds(batch)

    def period_seconds(self, clients: int, drafts: int | None = None) -> float:
        """Seconds of a client's round with drafts elsewhere, for the clients of all targets together.

        A target's clients are in groups of which one is verified while the others draft. Who comes back while a step
        runs waits for its end, so the number of groups is whole. With 0 drafts the targets go on alone.
        """
        drafts = self.drafts if drafts is None else drafts
        each = clients / self.targets
        if drafts == 0:
            step = self._target.predict(max(each, 1.0), 1)
            return (step + self.times.round_trip_seconds) * self.tokens_per_round
        period = self.together_seconds(each)
        for _ in range(16):
            period = 0.5 * (period + self._period(each, clients / drafts, period))
        return period

    def _period(self, of_target: float, of_draft: float, period: float) -> float:
        """A better estimate of the period."""
        step = self.draft_step_seconds(1.0)
        for _ in range(8):
            drafting = min(of_draft, max(1.0, of_draft * self.proposed * step / period))
            step = self.draft_step_seconds(drafting)
        # A proposal begins with the next step: it waits for half of one where the draft is never idle
        wait = 0.5 * step * min(1.0, of_draft * self.proposed * step / period)
        away = self.proposed * step + wait + 2.0 * self.times.round_trip_seconds
        # More would mean that a proposal takes as long as 31 verifications
        return min(
            max(
                groups * self.verify_seconds(of_target / groups),
                self.verify_seconds(of_target / groups) + away,
            )
            for groups in range(1, min(max(math.ceil(of_target), 1), 32) + 1)
        )


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Clients that a fleet serves, and their rates."""

    proposed: int
    together_clients: int
    """Clients of targets that share their devices with drafts; where the comparison begins."""
    rate: float
    """Tokens per second of each of them."""
    law: float
    """1 + K x t_draft / t_verify at their batch."""
    clients: int
    """Clients at no lower a rate with these drafts elsewhere."""
    gain: float
    """`clients` over `together_clients`."""
    drafts_needed: int | None
    """The fewest drafts that serve the law's clients at 0.9 of the rate; None: no number does."""
    rate_with_one_less: float
    """Tokens per second of each client once a draft is lost, and its clients are with the others."""
    lost_share: float
    """Share of each client's rate that this costs."""


def fleet_plan(fleet: Fleet, together_clients: int) -> FleetPlan:
    """Compare drafts elsewhere with drafts on the targets' devices, at one rate of each client."""
    batch = together_clients / fleet.targets
    together = fleet.together_seconds(batch)
    law = together / fleet.verify_seconds(batch)
    clients = bisect_right(range(1, 1 << 20), together, key=fleet.period_seconds)
    lost = fleet.period_seconds(max(clients, 1), fleet.drafts - 1)
    kept = fleet.period_seconds(max(clients, 1))
    lawful = max(round(law * together_clients), 1)
    numbers = range(1, min(4096, lawful) + 1)
    enough = (each for each in numbers if fleet.period_seconds(lawful, each) <= together / 0.9)
    return FleetPlan(
        proposed=fleet.proposed,
        together_clients=together_clients,
        rate=fleet.tokens_per_round / together,
        law=law,
        clients=clients,
        gain=clients / together_clients,
        drafts_needed=next(enough, None),
        rate_with_one_less=fleet.tokens_per_round / lost,
        lost_share=max(0.0, 1.0 - kept / lost),
    )


# ---- the command

MAX_GIVEN = 100_000
"""Largest time in milliseconds, and share, that a plan takes: nothing is that slow, and its sums stay finite."""
_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Proposal lengths that are measured, up to the longest asked for; those between are interpolated."""
_FIXED = {
    "TANDEM_COORDINATOR_SPECULATION_POLICY": "fixed",
    "TANDEM_COORDINATOR_DRAFT_PATIENCE_SECONDS": "60",
}
"""Each round is to propose exactly as much as it is asked to."""
_PROMPTS = (
    "def fibonacci(count):\n    ",
    "The capital of France is",
    "class Stack:\n    def __init__(self):\n",
    "Once upon a time, in a village by the sea,",
    "import json\n\n\ndef read_settings(path):\n",
    "The three laws of motion state that",
    "for index, line in enumerate(lines):\n    ",
    "Dear all, thank you for",
)
"""Code and prose, so that acceptance is no one kind's."""


def _read_rates(words: Any) -> Any:
    try:
        rates = tuple(map(float, words.split(",")))
    except ValueError:
        rates = (-1.0,)
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ValueError("it must be rates between 0 and 1 with commas between them")
    return rates


def _read_sizes(words: Any) -> Any:
    if not (sizes := _counts(words)):
        raise ValueError("it must be numbers from 1 to 4096 with commas between them")
    return sizes


def _read_fleet(words: Any) -> Any:
    if len(counts := _counts(words)) not in (3, 4):
        raise ValueError("it must be TARGETS,DRAFTS,CLIENTS or TARGETS,DRAFTS,CLIENTS,K, each from 1 to 4096")
    return counts


def _counts(text: str) -> tuple[int, ...]:
    """The numbers of a list, each from 1 to 4096; none where it holds anything else."""
    parts = text.split(",")
    is_right = all(part.strip().isdigit() and 0 < int(part) <= 4096 for part in parts)
    return tuple(int(part) for part in parts) if is_right else ()


@rule("The step times of target and draft and the acceptance go together.")
def _step_times(options: StepOptions) -> Iterator[str]:
    given = (options.verify_ms, options.draft_step_ms, options.acceptance)
    if options.verify_ms is not None and None in given:
        yield "--verify-ms was given without --draft-step-ms and --acceptance; give all three"


class StepOptions(VerbOptions):
    """Step times and acceptance as they are given, and what to plan with them."""

    verify_ms: float | None = Field(default=None, gt=0, le=MAX_GIVEN)
    """Step of the target with one row, in ms. Without it, ask the coordinator."""
    draft_step_ms: float | None = Field(default=None, gt=0, le=MAX_GIVEN)
    """Step of the draft with one row, in ms."""
    acceptance: Annotated[tuple[float, ...], BeforeValidator(_read_rates)] | None = None
    """Conditional acceptance rate at each position; the last one holds for all after it."""
    round_trip_ms: float = Field(default=0.0, ge=0, le=MAX_GIVEN)
    """Question to a service and its answer, in ms."""
    per_8_rows: float = Field(default=PER_8_ROWS, ge=0, le=MAX_GIVEN)
    """Share by which a step takes longer for each 8 rows more."""
    batch: Annotated[tuple[int, ...], BeforeValidator(_read_sizes)] = (1,)
    """Requests at once, for instance 1,8,32."""
    max_tokens: int = Field(default=MAX_TOKENS, ge=1, le=128)
    """Longest proposal."""
    fleet: Annotated[
        Annotated[tuple[int, ...], BeforeValidator(_read_fleet)] | None,
        typer.Option(metavar="TARGETS,DRAFTS,CLIENTS[,K]"),
    ] = None
    """Clients that targets serve with drafts elsewhere, beside so many clients with drafts on the targets' devices;
    needs the step times. K by default: the best."""
    draft_per_8_rows: float = Field(default=0.0, ge=0, le=MAX_GIVEN)
    """With --fleet: the same share for the draft's steps."""

    own_rules: ClassVar[Rules] = (_step_times,)

    @property
    def times(self) -> StepTimes | None:
        """The step times; None where they are to be measured."""
        if self.verify_ms is None or self.draft_step_ms is None or self.acceptance is None:
            return None
        return StepTimes(
            self.verify_ms / 1e3,
            self.draft_step_ms / 1e3,
            self.acceptance,
            self.round_trip_ms / 1e3,
            self.per_8_rows,
        )

    def planned_fleet(self, counts: Sequence[int], times: StepTimes) -> tuple[Fleet, int]:
        """The fleet, and how many clients it is compared at."""
        targets, drafts, clients, *given = counts
        batch = -(-clients // targets)
        best = plan(times.rounds(batch, self.max_tokens), batch).best_tokens
        proposed = given[0] if given else best
        if not proposed:
            raise ConfigurationError(
                f"at {batch} clients of each target no proposal pays, so there is no fleet to plan; give K as the "
                "fourth number of --fleet to see it all the same"
            )
        return Fleet(times, targets, drafts, proposed, self.draft_per_8_rows), clients


class PairOptions(VerbOptions):
    """The pair to measure on this machine; neither model named: nothing is measured."""

    target: Annotated[str | None, typer.Option(metavar="demo|smollm2|DIR|ID")] = None
    """Measure this target here: the demo pair's, a folder or a Hugging Face id."""
    draft: Annotated[str | None, typer.Option(metavar="ngram|suffix|DIR|ID")] = None
    """Measure with this draft. [default: as in tandem up]"""
    device: Device = Field(default="cpu", description=f"Where both models run: {DEVICES}.")
    max_length: int | None = Field(default=None, ge=1)
    """Maximum tokens of a sequence. [default: the models']"""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Temperature of the measured completions."""

    @property
    def is_named(self) -> bool:
        """True if a model was named, so that it is to be measured."""
        return self.target is not None or self.draft is not None

    def up_words(self) -> list[str]:
        """Options of `tandem up` for this pair."""
        if self.draft == NO_DRAFT:
            raise ConfigurationError(
                "--draft is none; a plan compares a draft with the target alone: name one, or ngram or suffix"
            )
        pair: dict[str, Any] = {"target": self.target} if self.target not in (None, DEMO) else {"model": DEMO}
        pair |= {"draft": self.draft, "max_length": self.max_length}
        service_arguments(UpOptions(**pair, device=self.device, http=False))
        # A plan adds up the times of draft and target, which drafting ahead would let overlap.
        fixed = ["--no-http", "--port", "0", "--draft-ahead", "off"]
        return [*fixed, "--device", self.device, *as_words(**pair)]


async def measured_through(
    address: str,
    batches: Sequence[int],
    max_tokens: int,
    temperature: float,
    report: Callable[[str, float], None] = lambda words, share: None,
) -> dict[int, Rounds]:
    """Rounds by batch size, at proposals of 0 to `max_tokens` tokens, of a coordinator whose proposals have a fixed
    length."""
    lengths = [0, *(length for length in _LENGTHS if length < max_tokens), max_tokens]
    async with Client(address) as client, AdminClient(address) as admin:
        replicas = await admin.replicas()
        has_head = any(each.model is not None and each.model.drafting_method for each in replicas)
        seconds = {}
        for number, batch in enumerate(batches):
            report(f"measuring rounds of batch {batch}", number / len(batches))
            seconds[batch] = await _round_seconds(client, batch, lengths, temperature, leads=has_head)
        decisions = (await admin.stats()).decisions
        coverages = [each.coverage for each in replicas if each.coverage is not None]
        trip = statistics.median(await round_trips(admin, 30))
    full = [decision for decision in decisions if len(decision.round_seconds) == max_tokens + 1]
    found = {}
    for batch, by_length in seconds.items():
        if 0 not in by_length or len(by_length) < 2 or not full:
            raise ServiceUnavailableError(
                f"the draft proposed nothing that could be measured at batch {batch}; see whether it starts with "
                "tandem up"
            )
        nearest = min(full, key=lambda decision: abs(decision.load - batch))
        known, measured = zip(*sorted(by_length.items()), strict=True)
        rounds = np.interp(range(max_tokens + 1), known, measured)
        # On a busy machine a message alone may take longer than a round; then half of the shortest round counts.
        messages = 0.0 if has_head else min(2.0 * trip, rounds.min() / 2.0)
        # The parts of a round take no longer than the round: the step is a mean over all rounds, slow ones included.
        longest = 0.9 * np.maximum(rounds[1:] - messages, 0.0) / np.arange(1, max_tokens + 1)
        decision = replace(
            nearest,
            round_seconds=tuple(rounds),
            message_seconds=messages,
            draft_step_seconds=min(nearest.draft_step_seconds, longest.min()),
            alone_message_seconds=min(nearest.alone_message_seconds, messages / 2.0),
        )
        mapping = str(coverages[0]) if coverages else ""
        found[batch] = measured_rounds(decision, mapping, has_head=has_head)
    return found


async def _round_seconds(
    client: Client, batch: int, lengths: Sequence[int], temperature: float, *, leads: bool
) -> dict[int, float]:
    """Seconds of a round by its proposed tokens, without the lengths that no round had.

    The lower quartile, and no more than a longer proposal took: what else runs on the machine only adds. Each length is
    measured three times, in turn with the others, so that a machine that slows down slows all of them.
    """
    seconds: dict[int, list[float]] = {}
    for number, length in itertools.product(range(4), lengths):  # the first time does not count
        request = GenerationRequest(
            "",
            max_tokens=24 + lengths[-1],
            temperature=temperature,
            num_speculative_tokens=length or None,
            speculation=length > 0,
            ignore_eos=True,
        )
        prompts = itertools.islice(itertools.cycle(_PROMPTS), batch)
        requests = [replace(request, prompt=prompt) for prompt in prompts]
        is_led = leads or not length
        rounds = await asyncio.gather(*(_rounds(client, each, is_led=is_led) for each in requests))
        if number:
            of_length = seconds.setdefault(length, [])
            of_length += [each for some in rounds for proposed, each in some if proposed == length]
    found: dict[int, float] = {}
    smallest = math.inf
    for length in sorted((length for length, measured in seconds.items() if measured), reverse=True):
        ordered = sorted(seconds[length])
        smallest = found[length] = min(smallest, ordered[len(ordered) // 4])
    return found


async def _rounds(client: Client, request: GenerationRequest, *, is_led: bool) -> list[tuple[int, float]]:
    """Proposed tokens and seconds of each round after the first; where the target begins rounds by itself, which may
    answer two at once, their mean."""
    rounds = []
    before: float | None = None
    async for chunk in client.generate(request):
        now = time.monotonic()
        if before is not None and chunk.token_ids:
            rounds.append((chunk.proposed, now - before))
        before = now
    if not (is_led and rounds):
        return rounds
    mean = statistics.fmean(seconds for _, seconds in rounds)
    return [(proposed, mean) for proposed, _ in rounds]


@asynccontextmanager
async def _services(words: Sequence[str]) -> AsyncIterator[str]:
    """Run `tandem up`; the coordinator's address."""
    with TemporaryFile() as errors:
        seconds = STOP_SECONDS + 5.0  # its services have 5 s less
        options = {"stderr": errors, "env": {**os.environ, **_FIXED}}
        child = await Child.start("tandem up", "tandem", ["up", *words], seconds, **options)
        try:
            try:
                address = await child.line("ready on ")
            except ServiceUnavailableError as error:
                errors.seek(0)
                lines = [*errors.read().decode(errors="replace").splitlines(), str(error)]
                reasons = [line.partition("error: ")[2] for line in lines if "error: " in line]
                reason = next(line for line in [*reasons, *lines] if line.strip())
                raise ServiceUnavailableError(f"the pair could not be measured: {reason}") from None
            yield address
        finally:
            await asyncio.shield(child.stop())


@command(
    app,
    "--address 10.0.0.5:50051",
    "--target models/my-target --draft models/my-draft --batch 1,8",
    "--verify-ms 6.5 --draft-step-ms 1.2 --acceptance 0.8 --round-trip-ms 0.5 --batch 1,8,32",
    "--verify-ms 22 --draft-step-ms 1.5 --acceptance 0.9,0.8,0.7 -o json",
    "--fleet 4,2,64 --verify-ms 22 --draft-step-ms 1.5 --acceptance 0.8 --per-8-rows 0.5",
)
async def plan_command(
    steps: StepOptions,
    connection: Connection,
    pair: PairOptions,
    output: OutputOptions,
) -> None:
    """Show the gain of speculation at each proposal length, the best length, and what would help most.

    The step times come from the options, from models that are measured on this machine (--target, --draft), or from the
    measurements of a running coordinator. The speed-up is over the
    target alone: (1 + E[accepted(K)]) x round of the target alone / round with K proposed tokens. The column without
    the wire is the usual formula (1 + E[accepted]) / (cost_draft x K + cost_verify).
    """
    times = steps.times
    if steps.fleet is not None:
        if pair.is_named or times is None:
            raise ConfigurationError(
                "--fleet was given without --verify-ms, --draft-step-ms and --acceptance; give all four"
            )
        fleet, clients = steps.planned_fleet(steps.fleet, times)
        planned = fleet_plan(fleet, clients)
        output.show(planned, lambda: fleet_view(fleet, planned))
        return
    if pair.is_named and times is not None:
        raise ConfigurationError(
            "--verify-ms was given with --target or --draft; give the step times or a pair to measure"
        )
    if pair.is_named or times is not None:
        if times is not None:
            rounds = {size: times.rounds(size, steps.max_tokens) for size in steps.batch}
        else:
            with Progress("tandem plan", sys.stderr) as progress:
                progress.show("starting the pair")
                async with _services(pair.up_words()) as address:
                    rounds = await measured_through(
                        address, steps.batch, steps.max_tokens, pair.temperature, progress.show
                    )
        plans = [plan(each, size, f"batch {size}") for size, each in rounds.items()]
    else:
        async with connection.admin_client() as client:
            known = [each for each in (await client.stats()).decisions if len(each.round_seconds) > 1]
        if not known:
            raise NotFoundError(
                "the coordinator has measured no rounds yet; run requests, name a pair with --target and --draft, or "
                "give --verify-ms, --draft-step-ms and --acceptance"
            )
        name = "{0.rule}, temperature {0.temperatures}, batch {0.load}"
        plans = [plan(measured_rounds(each), each.load, name.format(each)) for each in known]
    output.show(plans, lambda: plan_view(plans))


def fleet_view(fleet: Fleet, found: FleetPlan) -> RenderableType:
    """A fleet's capacity, in sentences."""
    count = found.drafts_needed
    needed = "no number of drafts is enough" if count is None else plural(count, "draft")
    left = "the targets go on alone" if fleet.drafts == 1 else f"{plural(fleet.drafts - 1, 'draft')} left"
    return Group(
        f"drafts on the targets' devices: {plural(found.together_clients, 'client')} at {found.rate:.1f} tokens/s each "
        f"(K = {found.proposed})",
        f"{plural(fleet.drafts, 'draft')} elsewhere: {plural(found.clients, 'client')} at that rate, "
        f"{found.gain:.2f}x; the law for saturated targets says {found.law:.2f}x",
        f"for the law's clients within a tenth of the rate: {needed}",
        f"a lost draft: {left}, {found.rate_with_one_less:.1f} tokens/s each, {found.lost_share:.0%} less",
    )


def plan_view(plans: Sequence[BatchPlan]) -> RenderableType:
    """A table for each batch, and what follows from it."""
    parts: list[RenderableType] = []
    for found in plans:
        columns = (">K", ">TOKENS/PASS", ">ROUND", ">SPEED-UP", ">WITHOUT THE WIRE", "")
        table = plain_table(*columns, title=found.of, title_style="bold")
        for row in found.lengths:
            table.add_row(
                str(row.tokens),
                f"{row.tokens_per_pass:.2f}",
                f"{row.round_seconds * 1e3:.2f} ms",
                f"{row.speedup:.2f}x",
                f"{row.speedup_without_wire:.2f}x",
                "best" if row.tokens == found.best_tokens else "",
            )
        parts += [table, *_words(found), ""]
    return Group(*parts[:-1])


def _words(found: BatchPlan) -> Iterator[str]:
    best = "the target alone"
    break_even = found.break_even_acceptance
    if found.best_tokens:
        best = f"{found.best_speedup:.2f}x with K = {found.best_tokens}"
    pays = "drafting would not pay even if every token were accepted"
    if break_even is not None:
        pays = f"drafting pays when more than {percent(break_even)} of the tokens are accepted"
    yield f"best: {best}; {pays}"
    helps = ", ".join(f"{each.remedy} ({each.speedup:.2f}x)" for each in found.remedies)
    yield f"what would help, best first: {helps}"
    if found.mapping:
        yield f"vocabulary mapping: {found.mapping}"
