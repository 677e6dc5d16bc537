"""Structured output: are all answers valid, what does a schema cost, and what does a mask.

    python -m benchmarks.studies.structured                                 the demo pair
    python -m benchmarks.studies.structured --pair smollm2                  SmolLM2-135M-Instruct, drafts by suffix
    python -m benchmarks.studies.structured --kill 1                        with deaths of drafts and targets
    python -m benchmarks.studies.structured --compare --answers 250         and the same prompts without a schema
    python -m benchmarks.studies.structured --compare --unforced ...        of a schema that forces no text
    python -m benchmarks.studies.structured --rule strict --no-jump-ahead   models write what the grammar forces
    python -m benchmarks.studies.structured --address HOST:PORT             a coordinator that runs
    python -m benchmarks.studies.structured --masks tokenizer.json          the time of masks alone, on random rows

Answers of 50 schemas (nested objects, enums, arrays, characters of several bytes, numbers with bounds, patterns), at
temperature 0 and 1, many at once, checked by the package jsonschema. A pass is the target's, through one sequence. Runs
whose texts are equal print the same hash of them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import jsonschema
import numpy as np
import torch

from benchmarks.common import floats, free_port, process, service
from benchmarks.pairs import DEMO
from coordinator.decoding.completion import Completion
from tandem.client import Client, Completed
from tandem.engine.rows import forbid
from tandem.errors import TandemError
from tandem.grammar import Grammars
from tandem.types import FinishReason, Grammar, GrammarKind

SCHEMAS = 50
PART = 250
"""Questions of one kind in a row."""
_WITHOUT_JUMP_AHEAD = "coordinator-without-jump-ahead"
"""First word of a command line that starts such a coordinator."""
_WORDS = ("name", "größe", "city", "状態", "price", "is open", "id", "note", "tags", "λ")


def schema_of(number: int) -> dict[str, Any]:
    """A schema; the same for the same number."""
    return _object(Random(number), depth=2)


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(_WORDS, random.randint(2, 5))
    return {
        "type": "object",
        "properties": {name: _value(random, depth) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _value(random: Random, depth: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": random.randint(3, 12)},
        {"type": "integer", "minimum": random.randint(-9, 0), "maximum": random.randint(1, 999)},
        {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        {"enum": random.sample(["rot", "grün", "blå", "黄", 7, None], 3)},
        {"type": "boolean"},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        {"const": "fixed text that is forced"},
    ]
    if depth:
        kinds.append(_object(random, depth - 1))
        kinds.append({"type": "array", "items": _value(random, depth - 1), "minItems": 1, "maxItems": 3})
    return random.choice(kinds)


UNFORCED = {"type": "string", "minLength": 200, "maxLength": 250}
"""Leaves a choice at each token but the quotation marks, and allows more ids at once than any of the schemas."""


def is_valid(completed: Completed, schema: Mapping[str, Any]) -> bool:
    """True if the text is a value of the schema, and nothing else."""
    try:
        jsonschema.validate(json.loads(completed.text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return completed.finish_reason is FinishReason.STOP


PAIRS = {
    "demo": (("--model", str(DEMO / "target")), ("--model", str(DEMO / "draft"))),
    "smollm2": (("--model", "smollm2", "--dtype", "bfloat16"), ("--method", "suffix")),
}
"""Options of the target and of the draft."""


class Replica:
    """A draft or a target as a process, started again at its port when it is killed."""

    def __init__(self, role: str, options: Sequence[str]) -> None:
        self.role = role
        self.port = free_port()
        self.ready, self._killed = asyncio.Event(), asyncio.Event()
        self._options = options
        self._pid = 0

    async def run(self) -> None:
        """Run it until this is cancelled."""
        while True:
            async with process(f"{self.role}_service", *self._options, port=self.port) as (_, self._pid):
                self.ready.set()
                await self._killed.wait()
                self._killed.clear()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.ready.clear()
        os.kill(self._pid, signal.SIGKILL)
        self._killed.set()


class Cluster:
    """A coordinator over replicas of a pair."""

    def __init__(self, pair: str, at_once: int, of_each: int) -> None:
        limits = ("--max-length", "1024", "--max-sequences", str(at_once))
        self._replicas = [
            Replica(role, (*options, *limits))
            for role, options in zip(("target", "draft"), PAIRS[pair], strict=True)
            for _ in range(of_each)
        ]
        self.kills = Counter[str]()
        """By role."""

    @asynccontextmanager
    async def coordinator(
        self, seconds_between_kills: float | None, *, jump_ahead: bool = True
    ) -> AsyncIterator[str]:
        """Run all, and kill one after the other; the coordinator's address."""
        program = ("coordinator",) if jump_ahead else (__spec__.name, _WITHOUT_JUMP_AHEAD)
        tasks = [asyncio.create_task(replica.run()) for replica in self._replicas]
        try:
            words = []
            for role in ("target", "draft"):
                own = [replica for replica in self._replicas if replica.role == role]
                words += [f"--{role}-address", ",".join(f"127.0.0.1:{replica.port}" for replica in own)]
                await asyncio.gather(*(replica.ready.wait() for replica in own))
            async with service(*program, *words) as address:
                if seconds_between_kills is not None:
                    tasks += [
                        asyncio.create_task(self._kill_each(role, seconds_between_kills))
                        for role in ("target", "draft")
                    ]
                yield address
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _kill_each(self, role: str, seconds: float) -> None:
        """Kill one of a role after the other, while the others of that role are ready."""
        own = [replica for replica in self._replicas if replica.role == role]
        for replica in cycle(own):
            await asyncio.sleep(seconds)
            await asyncio.gather(*(each.ready.wait() for each in own))
            replica.kill()
            self.kills[role] += 1


@dataclass
class Run:
    """Answers to requests of one kind."""

    schemas: list[dict[str, Any]] = field(default_factory=list)
    """Schema of each answer; empty where they had none."""
    completed: list[Completed | None] = field(default_factory=list)
    """The answers; None for a request that failed."""
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each answer."""
        return [0 if each is None else len(each.token_ids) for each in self.completed]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(self.lengths)

    @property
    def passes(self) -> int:
        """The passes of the target through sequences."""
        return sum(0 if each is None else each.speculation.rounds for each in self.completed)

    @property
    def failures(self) -> list[str]:
        """Errors, and texts that are not what their schema asks for."""
        pairs = zip(self.completed, self.schemas, strict=False)
        return self.errors + [
            each.text for each, schema in pairs if each is not None and not is_valid(each, schema)
        ]


class Questions:
    """Asks for answers with and without a schema."""

    def __init__(self, client: Client, options: argparse.Namespace, temperature: float) -> None:
        self._client = client
        self._options = options
        self._temperature = temperature
        self._places = asyncio.Semaphore(options.at_once)

    async def ask(self, run: Run, numbers: Sequence[int], lengths: Sequence[int] | None = None) -> None:
        """Ask these questions at once: with schemas, or without and for so many tokens each."""
        schemas = [UNFORCED if self._options.unforced else schema_of(number % SCHEMAS) for number in numbers]
        wanted = schemas if lengths is None else lengths
        began = time.perf_counter()
        run.completed += await asyncio.gather(
            *(self._one(run, number, each) for number, each in zip(numbers, wanted, strict=True))
        )
        run.seconds += time.perf_counter() - began
        if lengths is None:
            run.schemas += schemas

    async def _one(self, run: Run, number: int, wanted: Mapping[str, Any] | int) -> Completed | None:
        tokens = wanted if isinstance(wanted, int) else None
        async with self._places:
            try:
                return await self._client.complete(
                    f'# {number}\nperson = json.loads("',
                    max_tokens=self._options.max_tokens if tokens is None else max(tokens, 1),
                    temperature=self._temperature,
                    seed=number,
                    grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wanted)) if tokens is None else None,
                    ignore_eos=tokens is not None,
                    speculation=not self._options.alone,
                    rejection_sampling_strategy=self._options.rule if self._temperature else None,
                )
            except TandemError as error:
                run.errors.append(str(error))
                return None


async def answers(client: Client, options: argparse.Namespace, temperature: float) -> None:
    """Ask, check and print a row of the table. Parts with and without schemas take turns."""
    questions, bound, free = Questions(client, options, temperature), Run(), Run()
    for start in range(0, options.answers, PART):
        numbers = range(start, min(start + PART, options.answers))
        await questions.ask(bound, numbers)
        if options.compare:
            await questions.ask(free, numbers, bound.lengths[start:])
    failures = bound.failures
    count = len(bound.completed)
    texts = "\n".join("" if each is None else each.text for each in bound.completed)
    columns = [
        f"{temperature:g}",
        f"{count - len(failures)} of {count}",
        f"{bound.tokens}",
        f"{bound.tokens / bound.passes:.2f}",
        f"{bound.tokens / bound.seconds:.0f}",
        hashlib.sha256(texts.encode()).hexdigest()[:8],
    ]
    if options.compare:
        passes = bound.passes / bound.seconds / (free.passes / free.seconds)
        speed = bound.tokens / bound.seconds / (free.tokens / free.seconds)
        columns += [f"{free.tokens / free.passes:.2f}", f"{passes:.2f}", f"{speed:.2f}"]
    sys.stdout.write(f"| {' | '.join(columns)} |\n")
    for failure in (*failures, *free.errors)[:5]:
        sys.stdout.write(f"\nfailed: {failure!r}\n")
    sys.stdout.flush()


def masks(tokenizer: Path, sequences: int = 16, rows: int = 5) -> None:
    """Print what masks and their application take in steps of so many sequences with random logits, beside the
    matrices of a small model that has as many ids."""
    from tokenizers import Tokenizer

    size = -(-Tokenizer.from_file(str(tokenizer)).get_vocab_size() // 64) * 64
    grammars = Grammars(tokenizer.read_text, size, [])
    texts = []
    for number in range(SCHEMAS):
        state = grammars.compiled(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema_of(number))))
        texts.append((state, _a_text(state, Random(number))))
    logits, random = torch.randn(sequences * rows, size), Random(0)
    times: dict[str, list[float]] = {"masks": [], "application": [], "the model's matrices": []}
    model = _matrices(size)
    for _ in range(40):
        own = random.sample(texts, sequences)
        starts = [random.randrange(max(len(tokens) - rows, 1)) for _, tokens in own]
        began = time.perf_counter()
        made = [
            state.masks(tokens[:start], tokens[start : start + rows - 1])
            for (state, tokens), start in zip(own, starts, strict=True)
        ]
        made_at = time.perf_counter()
        all_made = np.concatenate(made)
        forbid(logits[: len(all_made)], all_made)
        applied_at = time.perf_counter()
        model(len(logits))
        ends = (began, made_at, applied_at, time.perf_counter())
        for found, (start_at, end_at) in zip(times.values(), pairwise(ends), strict=True):
            found.append(1e3 * (end_at - start_at))
    medians = ", ".join(f"{name} {median(found):.1f} ms" for name, found in times.items())
    sys.stdout.write(f"{size} ids, {sequences} sequences of {rows} rows: {medians}\n")


def _matrices(vocabulary_size: int) -> Callable[[int], None]:
    """Multiplies so many rows with matrices of the shape of Llama-3.2-1B's, the smallest Llama of such a vocabulary:
    without attention, and with one layer's matrices for all 16, so that it takes less than a step."""
    shapes = [(2048, 3072), (2048, 2048), (2048, 16_384), (8192, 2048)]
    layer = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    output = torch.randn(2048, vocabulary_size, dtype=torch.bfloat16)

    def run(rows: int) -> None:
        for weights in (*layer * 16, output):
            torch.randn(rows, weights.shape[0], dtype=torch.bfloat16) @ weights

    return run


def _a_text(state: Any, random: Random) -> list[int]:
    tokens: list[int] = []
    while state.follow(tokens) and not state.is_over and len(tokens) < 200:
        (row,) = state.masks(tokens, ())
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        tokens.append(int(random.choice(allowed.tolist())))
    return tokens


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown."""
    if options.masks is not None:
        masks(options.masks)
        return
    names = ["temperature", "valid", "tokens", "tokens a pass", "tokens a second", "texts"]
    if options.compare:
        names += [
            "tokens a pass without a schema",
            "passes a second by those without",
            "tokens a second by those without",
        ]
    schemas = "1 schema" if options.unforced else f"{SCHEMAS} schemas"
    sys.stdout.write(f"{schemas}, {options.at_once} at once\n\n")
    sys.stdout.write(f"| {' | '.join(names)} |\n{'|---' * len(names)}|\n")
    async with AsyncExitStack() as stack:
        address, cluster = options.address, None
        if address is None:
            cluster = Cluster(options.pair, options.at_once, 1 if options.kill is None else 2)
            address = await stack.enter_async_context(
                cluster.coordinator(options.kill, jump_ahead=options.jump_ahead)
            )
        client = await stack.enter_async_context(Client(address))
        for temperature in options.temperatures:
            await answers(client, options, temperature)
        if cluster is not None and cluster.kills:
            killed = ", ".join(f"{count} {role}s" for role, count in cluster.kills.items())
            sys.stdout.write(f"\nkilled and started again meanwhile: {killed}\n")


def serve_without_jump_ahead(arguments: list[str]) -> None:
    """Run a coordinator that proposes no forced text by itself."""
    from coordinator.__main__ import run

    setattr(Completion, "forced", lambda completion: None)  # noqa: B010 - mypy refuses the assignment of a method
    run(arguments)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.structured", description=__doc__)
    add = parser.add_argument
    add("--address", help="a coordinator's gRPC address; by default one is started over the pair")
    add("--pair", choices=PAIRS, default="demo")
    add("--answers", type=int, default=1000, help="of each temperature")
    add("--at-once", type=int, default=32)
    add("--max-tokens", type=int, default=400)
    add("--temperatures", type=floats, default=[0.0, 1.0])
    add("--alone", action="store_true", help="the target without a draft")
    add(
        "--compare", action="store_true", help="ask the same prompts for as many tokens without a schema, too"
    )
    add(
        "--kill",
        type=float,
        metavar="SECONDS",
        help="two drafts and two targets, of which one of each is killed so long after all are ready",
    )
    add("--rule", help="acceptance rule above temperature 0; by default the coordinator's")
    add(
        "--no-jump-ahead",
        dest="jump_ahead",
        action="store_false",
        help="the coordinator proposes no forced text by itself",
    )
    add("--unforced", action="store_true", help="one schema that forces no text, so that proposals are alike")
    add("--masks", type=Path, help="measure masks alone, with this tokenizer.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == [_WITHOUT_JUMP_AHEAD]:
        serve_without_jump_ahead(sys.argv[2:])
    else:
        asyncio.run(main(parse(sys.argv[1:])))
