"""A trial: an EAGLE-3 head on a device of its own against the head beside its target, through real services.

    python -m benchmarks.studies.head_apart --scale 20                  paced as 6.5 ms a step and 0.6 ms a pass
    python -m benchmarks.studies.head_apart --pace '' --pair smollm2    as fast as this machine is
    python -m benchmarks.studies.head_apart --pace '' --count --modes asked,ahead       bytes on the wire

Every cell is a coordinator of its own over services that stay. Proposals have a fixed length and texts are those of
temperature 0 or of the rule strict, so all ways write the same. Lookups of the target's own are off.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import uvloop
from pydantic import Field

from benchmarks.pairs import DEMO
from benchmarks.studies.remote_head import read_prompts
from tandem.clients.client import Client
from tandem.config.settings import load_settings
from tandem.model.types import GenerationRequest
from tandem.model_sources.find import find_model
from tandem_load.common import Listed, Positive, StudySettings, one_sentence, print_row, process, service

Mode = Literal["alone", "beside", "asked", "ahead", "draft", "draft-ahead"]
COUNTS = "HEAD_APART_COUNTS"
"""File to which a counting coordinator adds its bytes."""
WRITE_SECONDS = 0.1
"""Interval at which it does."""
TICKS = os.sysconf("SC_CLK_TCK")


class HeadApartSettings(StudySettings):
    """Options of the trial."""

    pair: Literal["demo", "smollm2"] = "demo"
    """The target, with the head bundled for it."""
    modes: Listed[Mode] = ("alone", "beside", "asked", "ahead", "draft", "draft-ahead")
    """Ways to draft."""
    batch: Listed[Positive] = (1, 8)
    """Requests at once."""
    temperatures: Listed[Annotated[float, Field(ge=0)]] = (0.0, 0.7)
    """0 is greedy, others are under the rule strict."""
    rule: str = "strict"
    """Acceptance rule above temperature 0."""
    lengths: Listed[Positive] = (1, 2, 3, 4)
    """Tokens of proposals."""
    outcomes: Listed[Positive] = (16, 64)
    """Outcomes to draft ahead for."""
    policy: Literal["fixed", "adaptive"] = "fixed"
    """Fixed: always as many tokens; adaptive: up to as many, as the controller chooses."""
    prompts: Positive = 3
    """Prompts with one request at a time."""
    batches: Positive = 2
    """Batches with several."""
    prompt_tokens: int = 0
    """Length of the prompts, made of several; 0: as they are."""
    max_tokens: Positive = 96
    """Tokens of each completion."""
    pace: str = "6.5,0.6"
    """Milliseconds of a step of the target and of a pass of the head; empty: as fast as they are."""
    delay: float = Field(default=0.25, ge=0)
    """Milliseconds between the coordinator and a service, one way; without a pace there is none."""
    scale: float = Field(default=1.0, gt=0)
    """All these times are so many times as long, and what is printed is as if they were not."""
    window: int | None = None
    """Tokens of the prompt whose states the head apart reads."""
    shared: bool = False
    """The head's branches share passes with its proposals."""
    lead: int | None = None
    """The coordinator's target_lead."""
    dtype: str = "bfloat16"
    """Type of the models."""
    count: bool = False
    """Count bytes on the wire, which takes processor time of the coordinator."""
    repeats: Positive = 1
    """Measurements of each cell, of which the median is printed."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one way did for one load."""

    tokens: int
    seconds: float
    coordinator_seconds: float
    """Processor time of the coordinator."""
    proposed: int
    accepted: int
    rounds: int
    hits: int
    awaited: int
    counts: dict[str, int]
    texts: tuple[tuple[int, ...], ...]
    positions: tuple[float, ...]
    """Share of the tokens at each place of a proposal that were accepted, of those whose tokens before were."""

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draft: the services that it needs, and its coordinator's options."""

    mode: Mode
    length: int = 0
    outcomes: int = 0

    @property
    def name(self) -> str:
        words: list[str] = [self.mode]
        if self.length:
            words.append(f"K {self.length}")
        if self.outcomes:
            words.append(f"{self.outcomes} outcomes")
        return ", ".join(words)

    def options(self, settings: HeadApartSettings) -> list[str]:
        words = [
            "--draft-ahead",
            str(self.outcomes or "off"),
            "--num-speculative-tokens",
            str(self.length or 1),
        ]
        words += ["--speculation-policy", settings.policy, "--generation-config", "vllm"]
        if settings.lead is not None:
            words += ["--target-lead", str(settings.lead)]
        return words


def ways(settings: HeadApartSettings) -> Iterator[Way]:
    """The ways to draft that the settings ask for."""
    for mode in settings.modes:
        if mode == "alone":
            yield Way(mode)
        elif mode in ("ahead", "draft-ahead"):
            yield from (Way(mode, k, n) for n in settings.outcomes for k in settings.lengths)
        else:
            yield from (Way(mode, length) for length in settings.lengths)


class Services:
    """Services that are started when a way needs them, and stay."""

    def __init__(self, settings: HeadApartSettings, stack: AsyncExitStack) -> None:
        self._settings = settings
        self._stack = stack
        self._running: dict[str, str] = {}
        is_demo = settings.pair == "demo"
        self.target = DEMO / "target" if is_demo else find_model("smollm2")
        root = DEMO if is_demo else DEMO.parent / "smollm2"
        self.head = root / "eagle3"
        self._draft = DEMO / "draft" if is_demo else None

    async def addresses(self, mode: Mode) -> tuple[str, str]:
        """The target's and the draft's."""
        own = ("--model", str(self.target))
        head = str(self.head)
        match mode:
            case "alone":
                return await self._start("target", "alone", *own), ""
            case "beside":
                beside = ("--draft-model", head, "--no-draft-repeats")
                return await self._start("target", "beside", *own, *beside), ""
            case "asked" | "ahead":
                target = await self._start("target", "features", *own, "--features", "eagle3", "--head", head)
                words = ["--model", head, "--target-features", "--target-model", str(self.target)]
                window = self._settings.window
                if window is not None:
                    words += ["--draft-feature-window", str(window)]
                if self._settings.shared:
                    words.append("--draft-shared-passes")
                return target, await self._start("draft", "head", *words)
            case _:
                assert self._draft is not None, "the demo pair has a draft"
                return await self._start("target", "alone", *own), await self._start(
                    "draft", "draft", "--model", str(self._draft)
                )

    async def _start(self, role: str, name: str, *words: str) -> str:
        if name in self._running:
            return self._running[name]
        settings = self._settings
        package = [f"tandem_{role}"]
        if settings.pace:
            paced = ",".join(f"{float(each) * settings.scale:g}" for each in settings.pace.split(","))
            package = ["benchmarks.pace", "--role", role, "--pace", paced]
        limits = (
            "--max-length",
            "1024",
            "--max-sequences",
            "32",
            "--threads",
            "1",
            "--dtype",
            settings.dtype,
        )
        words = (*package[1:], *words, *limits, "--no-enable-prefix-caching")
        address = await self._stack.enter_async_context(service(package[0], *words))
        if settings.pace and settings.delay:
            delay = ("--role", "delay", "--to", address, "--ms", f"{settings.delay * settings.scale:g}")
            address = await self._stack.enter_async_context(service("benchmarks.pace", *delay))
        self._running[name] = address
        return address


def processor_seconds(process_id: int) -> float:
    """Of a process, all of its threads."""
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def measure(
    settings: HeadApartSettings, services: Services, way: Way, loads: Sequence[Load]
) -> list[Cell]:
    """The cells of a way. Its coordinator is new, and completes a prompt that does not count."""
    target, draft = await services.addresses(way.mode)
    words = ["--target-address", target, *(("--draft-address", draft) if draft else ())]
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        package = "tandem_coordinator"
        if settings.count:
            os.environ[COUNTS] = str(counts)
            package = "benchmarks.studies.head_apart"
        async with (
            process(package, *words, *way.options(settings)) as (address, process_id),
            Client(address) as client,
        ):
            if not settings.count:
                await complete(client, loads[0].requests[0][:1])
            cells = [await run(client, load, process_id) for load in loads]
            await asyncio.sleep(5 * WRITE_SECONDS)
        if settings.count:
            del os.environ[COUNTS]
            found = json.loads(counts.read_text(encoding="utf-8"))
            cells[-1].counts.update(found)
    return cells


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, at once and one after the other."""

    name: str
    requests: Sequence[Sequence[GenerationRequest]]


async def run(client: Client, load: Load, process_id: int) -> Cell:
    """Complete a load's requests through the coordinator with this process id."""
    tokens = proposed = accepted = rounds = hits = awaited = 0
    texts: list[tuple[int, ...]] = []
    places: dict[int, tuple[int, int]] = {}
    before = processor_seconds(process_id)
    began = time.perf_counter()
    for batch in load.requests:
        for each in await complete(client, batch):
            tokens += len(each.token_ids)
            stats = each.summary.speculation
            rounds += stats.rounds
            proposed += stats.drafted
            accepted += stats.accepted
            hits += stats.ahead.hits
            awaited += stats.ahead.awaited
            texts.append(each.token_ids)
            for place, own in enumerate(stats.positions):
                before_it = places.get(place, (0, 0))
                places[place] = before_it[0] + own.reached, before_it[1] + own.accepted
    seconds = time.perf_counter() - began
    used = processor_seconds(process_id) - before
    rates = tuple(accepted / max(reached, 1) for reached, accepted in places.values())
    return Cell(tokens, seconds, used, proposed, accepted, rounds, hits, awaited, {}, tuple(texts), rates)


async def complete(client: Client, requests: Iterable[GenerationRequest]) -> list[Any]:
    """Complete requests at once."""
    return await asyncio.gather(*(client.complete(request) for request in requests))


def loads_of(settings: HeadApartSettings, prompts: Sequence[Sequence[int]]) -> Iterator[Load]:
    """The loads of the settings, the same for all ways."""
    for size in settings.batch:
        for temperature in settings.temperatures:
            terms: dict[str, Any] = {"temperature": temperature, "ignore_eos": True}
            if temperature:
                terms["rejection_sampling_strategy"] = settings.rule
            count = settings.prompts if size == 1 else settings.batches
            requests = [
                [
                    GenerationRequest(
                        tuple(prompts[number % len(prompts)]),
                        max_tokens=settings.max_tokens,
                        seed=number,
                        **terms,
                    )
                    for number in range(turn * size, (turn + 1) * size)
                ]
                for turn in range(count)
            ]
            yield Load(f"batch {size}, T {temperature:g}", requests)


def lengthen(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Prompts of so many tokens, each of several that follow one another."""
    joined = [[*chain(*prompts[place:], *prompts[:place])] for place in range(0, len(prompts), 2)]
    return [each[-count:] for each in joined]


async def study(settings: HeadApartSettings) -> None:
    """Measure, and print a table."""
    async with AsyncExitStack() as stack:
        services = Services(settings, stack)
        most = max(settings.prompts, settings.batches * max(settings.batch))
        prompts = read_prompts(services.target, 64 if settings.prompt_tokens else max(most, 16))
        if settings.prompt_tokens:
            prompts = lengthen(prompts, settings.prompt_tokens)
        loads = [*loads_of(settings, prompts)]
        print_row(
            "way",
            "load",
            "tokens/s",
            "us of the coordinator a token",
            "accepted",
            "tokens a round",
            "hits",
            "same",
            "accepted by place",
        )
        print_row(*["---"] * 9)
        texts: dict[str, tuple[tuple[int, ...], ...]] = {}
        for way in ways(settings):
            turns = [await measure(settings, services, way, loads) for _ in range(settings.repeats)]
            for index, load in enumerate(loads):
                own = [turn[index] for turn in turns]
                cell = own[0]
                first = texts.setdefault(load.name, cell.texts)
                print_row(
                    way.name,
                    load.name,
                    f"{settings.scale * statistics.median(each.speed for each in own):.1f}",
                    f"{1e6 * statistics.median(each.coordinator_seconds / each.tokens for each in own):.0f}",
                    f"{cell.accepted / cell.proposed:.3f}" if cell.proposed else "-",
                    f"{cell.tokens / max(cell.rounds, 1):.2f}",
                    f"{cell.hits / cell.awaited:.2f}" if cell.awaited else "-",
                    sum(a == b for a, b in zip(first, cell.texts, strict=True)),
                    " ".join(f"{rate:.2f}" for rate in cell.positions),
                )
                sys.stdout.flush()
            for name, number in sorted(turns[0][-1].counts.items()):
                every = sum(cell.tokens for cell in turns[0])
                print_row(way.name, name, number, f"{number / every:.1f} a token", "", "", "", "")
                sys.stdout.flush()


# ---- a coordinator that counts


def count_bytes() -> None:
    """Let the clients of this process count the bytes of their messages, and those of hidden states in them."""
    from tandem_coordinator.transport import draft_client, target_client

    counts: Counter[str] = Counter()
    _count_messages(counts, "target", target_client.TargetClient)
    _count_messages(counts, "draft", draft_client.DraftClient)

    def write() -> None:
        path = Path(os.environ[COUNTS])
        while path.parent.is_dir():
            part = path.with_suffix(".part")
            part.write_text(json.dumps(dict(counts)), encoding="utf-8")
            part.replace(path)
            time.sleep(WRITE_SECONDS)

    threading.Thread(target=write, daemon=True).start()


def _count_messages(counts: Counter[str], name: str, kind: Any) -> None:
    """Let the clients of a kind count under a name."""
    from tandem.wire.features import PassedStates

    make = kind.__init__

    def make_counting(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        write = self.streams.write
        read = self.streams.read

        def write_counted(taken: Any) -> Any:
            taken = list(taken)
            message = write(taken)
            counts[f"{name}, to it"] += message.ByteSize()
            counts[f"{name}, states to it"] += sum(
                part.size for _, part in taken if isinstance(part, PassedStates)
            )
            return message

        def read_counted(content: bytes) -> Any:
            counts[f"{name}, from it"] += len(content)
            for number, answer in read(content):
                if isinstance(answer, PassedStates):
                    counts[f"{name}, states from it"] += answer.size
                yield number, answer

        self.streams.write = write_counted
        self.streams.read = read_counted

    kind.__init__ = make_counting


def main() -> None:
    """Measure; as a process that the measurement has started, count for a coordinator."""
    if COUNTS in os.environ:
        import tandem_coordinator.__main__ as coordinator

        count_bytes()
        coordinator.run(sys.argv[1:])
        return
    with one_sentence():
        uvloop.run(
            study(load_settings(HeadApartSettings, sys.argv[1:], "python -m benchmarks.studies.head_apart"))
        )


if __name__ == "__main__":
    main()
