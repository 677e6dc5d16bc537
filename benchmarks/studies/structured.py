"""Structured output: are all answers valid, what does a schema cost, and what does a mask.

    python -m benchmarks.studies.structured                                 the demo pair
    python -m benchmarks.studies.structured --kill 5                        with deaths of drafts and targets
    python -m benchmarks.studies.structured --compare --answers 250         and the same prompts without a schema
    python -m benchmarks.studies.structured --address HOST:PORT             a coordinator that runs
    python -m benchmarks.studies.structured --masks tokenizer.json          the time of masks alone, on random rows

Answers of 50 schemas (nested objects, enums, arrays, characters of several bytes, numbers with bounds, patterns), at
temperature 0 and 1, many at once, checked by the package jsonschema. A pass is the target's, through one sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import torch

from benchmarks.common import floats, free_port, process, service
from benchmarks.pairs import DEMO
from tandem.client import Client, Completed
from tandem.engine.rows import masked
from tandem.errors import TandemError
from tandem.grammar import Grammars
from tandem.types import FinishReason, Grammar, GrammarKind

SCHEMAS = 50
PART = 250
"""Questions of one kind in a row."""
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


def is_valid(completed: Completed, schema: Mapping[str, Any]) -> bool:
    """True if the text is a value of the schema, and nothing else."""
    try:
        jsonschema.validate(json.loads(completed.text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return completed.finish_reason is FinishReason.STOP


class Replica:
    """A draft or a target as a process, started again at its port when it is killed."""

    def __init__(self, role: str, at_once: int) -> None:
        """Of the demo pair."""
        self.role = role
        self.port = free_port()
        self.ready, self._killed = asyncio.Event(), asyncio.Event()
        self._options = ("--model", str(DEMO / role), "--max-length", "1024", "--max-sequences", str(at_once))
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
    """A coordinator over such replicas."""

    def __init__(self, at_once: int, of_each: int) -> None:
        """So many of each role."""
        self._replicas = [Replica(role, at_once) for _ in range(of_each) for role in ("target", "draft")]
        self.kills = 0

    @asynccontextmanager
    async def coordinator(self, seconds_between_kills: float | None) -> AsyncIterator[str]:
        """Run all, and kill one after the other; the coordinator's address."""
        tasks = [asyncio.create_task(replica.run()) for replica in self._replicas]
        try:
            words = []
            for role in ("target", "draft"):
                own = [replica for replica in self._replicas if replica.role == role]
                words += [f"--{role}-address", ",".join(f"127.0.0.1:{replica.port}" for replica in own)]
                await asyncio.gather(*(replica.ready.wait() for replica in own))
            async with service("coordinator", *words) as address:
                if seconds_between_kills is not None:
                    tasks.append(asyncio.create_task(self._kill_each(seconds_between_kills)))
                yield address
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _kill_each(self, seconds: float) -> None:
        for replica in cycle(self._replicas):
            await asyncio.sleep(seconds)
            await asyncio.gather(*(each.ready.wait() for each in self._replicas))
            replica.kill()
            self.kills += 1


@dataclass
class Run:
    """What requests of one kind were answered with."""

    failures: list[str] = field(default_factory=list)
    answers: int = 0
    lengths: list[int] = field(default_factory=list)
    rounds: int = 0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(self.lengths)

    @property
    def tokens_a_pass(self) -> float:
        """Tokens by the passes of the target through sequences."""
        return self.tokens / max(self.rounds, 1)


class Questions:
    """Asks for answers with and without a schema."""

    def __init__(self, client: Client, options: argparse.Namespace, temperature: float) -> None:
        self._client = client
        self._options = options
        self._temperature = temperature
        self._places = asyncio.Semaphore(options.at_once)

    async def ask(self, run: Run, numbers: Sequence[int], lengths: Sequence[int] | None = None) -> None:
        """Ask these questions at once: with schemas, or without and for so many tokens each."""
        began = time.perf_counter()
        wanted = [None] * len(numbers) if lengths is None else lengths
        found = await asyncio.gather(
            *(self._one(run, number, tokens) for number, tokens in zip(numbers, wanted, strict=True))
        )
        run.seconds += time.perf_counter() - began
        run.answers += len(found)
        run.lengths += [0 if each is None else len(each.token_ids) for each in found]
        run.rounds += sum(0 if each is None else each.speculation.rounds for each in found)

    async def _one(self, run: Run, number: int, tokens: int | None) -> Completed | None:
        is_bound = tokens is None
        schema = schema_of(number % SCHEMAS)
        async with self._places:
            try:
                found = await self._client.complete(
                    f'# {number}\nperson = json.loads("',
                    max_tokens=self._options.max_tokens if tokens is None else max(tokens, 1),
                    temperature=self._temperature,
                    seed=number,
                    grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) if is_bound else None,
                    ignore_eos=not is_bound,
                    speculation=not self._options.alone,
                )
            except TandemError as error:
                run.failures.append(str(error))
                return None
        if is_bound and not is_valid(found, schema):
            run.failures.append(found.text)
        return found


async def answers(client: Client, options: argparse.Namespace, temperature: float) -> None:
    """Ask, check and print a row of the table. Parts with and without schemas take turns."""
    questions, bound, free = Questions(client, options, temperature), Run(), Run()
    for start in range(0, options.answers, PART):
        numbers = range(start, min(start + PART, options.answers))
        await questions.ask(bound, numbers)
        if options.compare:
            await questions.ask(free, numbers, bound.lengths[start:])
    valid = bound.answers - len(bound.failures)
    columns = [
        f"{temperature:g}",
        f"{valid} of {bound.answers}",
        f"{bound.tokens}",
        f"{bound.tokens_a_pass:.2f}",
    ]
    if options.compare:
        passes = bound.rounds / bound.seconds / (free.rounds / free.seconds)
        speed = bound.tokens / bound.seconds / (free.tokens / free.seconds)
        columns += [f"{free.tokens_a_pass:.2f}", f"{passes:.2f}", f"{speed:.2f}"]
    sys.stdout.write(f"| {' | '.join(columns)} |\n")
    for failure in (*bound.failures, *free.failures)[:5]:
        sys.stdout.write(f"\nfailed: {failure!r}\n")
    sys.stdout.flush()


def masks(tokenizer: Path, sequences: int = 16, rows: int = 5) -> None:
    """Print the time of masks and of their application, of a step of so many sequences with random logits."""
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(tokenizer))
    size = -(-own.get_vocab_size() // 64) * 64
    grammars = Grammars(tokenizer.read_text, size, [])
    logits = torch.randn(sequences * rows, size)
    found: list[tuple[float, float]] = []
    for number in range(SCHEMAS):
        schema = schema_of(number)
        state = grammars.compiled(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        tokens = _a_text(state, Random(number))
        for start in range(0, max(len(tokens) - rows, 1), rows):
            began = time.perf_counter()
            made = state.masks(tokens[:start], tokens[start : start + rows - 1])
            made_at = time.perf_counter()
            masked(logits[: len(made)], made)
            found.append((made_at - began, time.perf_counter() - made_at))
    making, applying = (1e3 * sequences * sum(each) / len(found) for each in zip(*found, strict=True))
    sys.stdout.write(
        f"{size} ids, {sequences} sequences of {rows} rows: masks {making:.2f} ms, application {applying:.2f} ms\n"
    )


def _a_text(state: Any, random: Random) -> list[int]:
    """Tokens of a random text of the grammar."""
    import numpy as np

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
    names = ["temperature", "valid", "tokens", "tokens a pass"]
    if options.compare:
        names += ["without a schema", "passes a second by those without", "tokens a second by those without"]
    sys.stdout.write(
        f"{SCHEMAS} schemas, {options.at_once} at once\n\n| {' | '.join(names)} |\n{'|---' * len(names)}|\n"
    )
    async with AsyncExitStack() as stack:
        address, cluster = options.address, None
        if address is None:
            cluster = Cluster(options.at_once, 1 if options.kill is None else 2)
            address = await stack.enter_async_context(cluster.coordinator(options.kill))
        client = await stack.enter_async_context(Client(address))
        for temperature in options.temperatures:
            await answers(client, options, temperature)
        if cluster is not None and cluster.kills:
            sys.stdout.write(f"\nkilled and started again meanwhile: {cluster.kills} services\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.structured", description=__doc__)
    add = parser.add_argument
    add("--address", help="a coordinator's gRPC address; by default one is started over the demo pair")
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
        help="two drafts and two targets, of which one is killed so often",
    )
    add("--masks", type=Path, help="measure masks alone, with this tokenizer.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    asyncio.run(main(parse(sys.argv[1:])))
