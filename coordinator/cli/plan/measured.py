"""Step times and acceptance of a pair on this machine: `tandem up` runs it, and a few prompts are completed."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryFile
from typing import IO, Annotated

import typer

from coordinator.cli.up.arguments import NO_DRAFT, UpOptions, service_arguments
from coordinator.cli.up.devices import DeviceOptions
from coordinator.speculation.plan import StepTimes, measured_times
from tandem.clients.admin import AdminClient
from tandem.clients.aio import Client
from tandem.config.devices import DEVICES
from tandem.errors import ConfigurationError, ServiceUnavailableError
from tandem.model_sources.names import DEMO
from tandem.speculation_state import SpeculationDecision
from tandem.types import GenerationRequest

_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Proposal lengths that are measured, up to the longest asked for; those between are interpolated."""
_PASSES = 4
"""Each length is measured as often, in turn with the others, so that a machine that slows down slows all of them. The
first time does not count."""
_TOKENS = 24
"""Tokens of each completion, beside the longest proposal."""
_ROUND_TRIPS = 30
_MAX_DRAFT_SHARE = 0.9
"""Share of a round without its messages that the draft's steps may take."""
_FIXED = {
    "TANDEM_COORDINATOR_SPECULATION_POLICY": "fixed",
    "TANDEM_COORDINATOR_DRAFT_PATIENCE_SECONDS": "60",
}
"""Each round is to propose exactly as much as it is asked to."""
_STOP_SECONDS = 45.0
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


@dataclass(frozen=True, slots=True)
class PairOptions:
    """The pair to measure on this machine; neither model named: nothing is measured."""

    target: Annotated[
        str | None,
        typer.Option(
            metavar="demo|smollm2|DIR|ID",
            help="Measure this target here: the demo pair's, a folder or a Hugging Face id.",
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="ngram|suffix|DIR|ID",
            help="Measure with this draft. [default: as in tandem up]",
        ),
    ] = None
    device: Annotated[str, typer.Option(help=f"Where both models run: {DEVICES}.")] = "cpu"
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="Temperature of the measured completions.")
    ] = 0.0

    @property
    def is_named(self) -> bool:
        """True if a model was named, so that it is to be measured."""
        return self.target is not None or self.draft is not None

    def up_words(self) -> list[str]:
        """Options of `tandem up` for this pair.

        Raises:
            ConfigurationError: no service could start with it, or there is no draft.
        """
        if self.draft == NO_DRAFT:
            raise ConfigurationError(
                "--draft is none; a plan compares a draft with the target alone: name one, or ngram or suffix"
            )
        is_demo = self.target in (None, DEMO)
        service_arguments(
            UpOptions(
                model=DEMO if is_demo else None,
                target=None if is_demo else self.target,
                draft=self.draft,
                devices=DeviceOptions(self.device),
                http=False,
            )
        )
        named = [] if is_demo else ["--target", str(self.target)]
        drafted = [] if self.draft is None else ["--draft", self.draft]
        # A plan adds up the times of draft and target, which drafting ahead would let overlap.
        fixed = ["--no-http", "--port", "0", "--draft-ahead", "off"]
        return [*fixed, "--device", self.device, *named, *drafted]


async def measured_pair(
    options: PairOptions, batches: Sequence[int], max_tokens: int
) -> dict[int, StepTimes]:
    """Step times and acceptance by batch size, at proposals of 0 to `max_tokens` tokens.

    Raises:
        ConfigurationError: no service could start with the options.
        ServiceUnavailableError: a service ended by itself, or the draft proposed nothing.
    """
    async with _services(options.up_words()) as address:
        return await measured_through(address, batches, max_tokens, options.temperature)


async def measured_through(
    address: str, batches: Sequence[int], max_tokens: int, temperature: float
) -> dict[int, StepTimes]:
    """The same through a coordinator whose proposals have a fixed length.

    Raises:
        ServiceUnavailableError: the draft proposed nothing.
    """
    lengths = [0, *(length for length in _LENGTHS if length < max_tokens), max_tokens]
    async with Client(address) as client, AdminClient(address) as admin:
        seconds = {batch: await _round_seconds(client, batch, lengths, temperature) for batch in batches}
        decisions = (await admin.stats()).decisions
        trip = await _round_trip_seconds(admin)
    full = [decision for decision in decisions if len(decision.round_seconds) == max_tokens + 1]
    found = {}
    for batch, by_length in seconds.items():
        if 0 not in by_length or len(by_length) < 2 or not full:
            raise ServiceUnavailableError(
                f"the draft proposed nothing that could be measured at batch {batch}; see whether it starts with "
                "tandem up"
            )
        nearest = min(full, key=lambda decision: abs(decision.load - batch))
        found[batch] = _times(
            nearest, [_interpolated(by_length, each) for each in range(max_tokens + 1)], trip
        )
    return found


def _times(decision: SpeculationDecision, rounds: Sequence[float], trip: float) -> StepTimes:
    """Step times from measured rounds, with the draft's step and the acceptance as the coordinator knows them."""
    # On a busy machine a message alone may take longer than a round; then half of the shortest round counts.
    messages = min(2.0 * trip, min(rounds) / 2.0)
    # The parts of a round take no longer than the round: the step is a mean over all rounds, slow ones included.
    step = min(
        decision.draft_step_seconds,
        *(
            _MAX_DRAFT_SHARE * max(seconds - messages, 0.0) / count
            for count, seconds in enumerate(rounds)
            if count
        ),
    )
    return measured_times(
        replace(decision, round_seconds=tuple(rounds), message_seconds=messages, draft_step_seconds=step)
    )


async def _round_trip_seconds(admin: AdminClient) -> float:
    """Seconds of a message that asks for no work, and its answer."""
    seconds = []
    for _ in range(_ROUND_TRIPS):
        began = time.monotonic()
        await admin.is_serving()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


async def _round_seconds(
    client: Client, batch: int, lengths: Sequence[int], temperature: float
) -> dict[int, float]:
    """Seconds of a round by its proposed tokens, without the lengths that no round had.

    The lower quartile, and no more than a longer proposal took: what else runs on the machine only adds.
    """
    seconds: dict[int, list[float]] = {}
    for number, length in itertools.product(range(_PASSES), lengths):
        request = GenerationRequest(
            "",
            max_tokens=_TOKENS + lengths[-1],
            temperature=temperature,
            num_speculative_tokens=length or None,
            speculation=length > 0,
            ignore_eos=True,
        )
        prompts = itertools.islice(itertools.cycle(_PROMPTS), batch)
        rounds = await asyncio.gather(
            *(_rounds(client, replace(request, prompt=prompt)) for prompt in prompts)
        )
        if number:
            of_length = seconds.setdefault(length, [])
            of_length += [each for some in rounds for proposed, each in some if proposed == length]
    found: dict[int, float] = {}
    smallest = math.inf
    for length in sorted((length for length, measured in seconds.items() if measured), reverse=True):
        ordered = sorted(seconds[length])
        smallest = found[length] = min(smallest, ordered[len(ordered) // 4])
    return found


async def _rounds(client: Client, request: GenerationRequest) -> list[tuple[int, float]]:
    """Proposed tokens and seconds of each round after the first."""
    rounds = []
    before: float | None = None
    async for chunk in client.generate(request):
        now = time.monotonic()
        if before is not None and chunk.token_ids:
            rounds.append((chunk.proposed, now - before))
        before = now
    return rounds


def _interpolated(by_length: dict[int, float], length: int) -> float:
    """Seconds at a length, on the line between its measured neighbours; beyond the last one, as at that one."""
    below = max(known for known in by_length if known <= length)
    above = min((known for known in by_length if known >= length), default=below)
    if above == below:
        return by_length[below]
    share = (length - below) / (above - below)
    return by_length[below] + share * (by_length[above] - by_length[below])


@asynccontextmanager
async def _services(words: Sequence[str]) -> AsyncIterator[str]:
    """Run `tandem up`; the coordinator's address.

    Raises:
        ServiceUnavailableError: it ended before it was ready, with the reason that it gave.
    """
    with TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tandem.serving.supervised", str(os.getpid())),
            *("coordinator.cli", "up", *words),
            stdin=asyncio.subprocess.PIPE,  # its end tells the child that this process is gone
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **_FIXED},
            start_new_session=True,
        )
        try:
            yield await _address(process, errors)
        finally:
            if process.returncode is None:
                process.terminate()
                await asyncio.shield(_ended(process))


async def _address(process: asyncio.subprocess.Process, errors: IO[bytes]) -> str:
    assert process.stdout is not None
    async for line in process.stdout:
        _, found, address = line.decode().partition("ready on ")
        if found:
            return address.strip()
    code = await process.wait()
    errors.seek(0)
    reasons = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    reason = reasons[0].removeprefix("error: ") if reasons else f"tandem up ended with exit code {code}"
    raise ServiceUnavailableError(f"the pair could not be measured: {reason}")


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
