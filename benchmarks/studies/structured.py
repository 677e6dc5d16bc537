"""Structured output: are all answers valid, and what does a schema cost.

    python -m benchmarks.studies.structured                             the demo pair
    python -m benchmarks.studies.structured --kill 1                    with deaths of drafts and targets
    python -m benchmarks.studies.structured --compare --answers 250     and the same prompts without a schema

Answers of 50 schemas (nested objects, enums, arrays, characters of several bytes, numbers with bounds, patterns), at
temperature 0 and 1, 32 at once, checked by the package jsonschema. A pass is the target's, through one sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from random import Random
from typing import Any

import jsonschema

from benchmarks.common import free_port, markdown_head, markdown_row, process, several, study_parser
from benchmarks.pairs import DEMO
from tandem.client import Client, Completed
from tandem.errors import TandemError
from tandem.standard_streams import write_out
from tandem.types import FinishReason, Grammar, GrammarKind

SCHEMAS = 50
AT_ONCE = 32
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


UNFORCED = {"type": "string", "minLength": 200, "maxLength": 250}
"""Leaves a choice at each token but the quotation marks, and allows more ids at once than any of the schemas."""


def is_valid(completed: Completed, schema: Mapping[str, Any]) -> bool:
    """True if the text is a value of the schema, and nothing else."""
    try:
        jsonschema.validate(json.loads(completed.text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return completed.finish_reason is FinishReason.STOP


Wanted = tuple[Grammar | None, int]
"""The grammar of an answer, and its tokens at most; without a grammar it has as many."""
PAIRS: dict[str, dict[str, tuple[str, ...]]] = {
    "demo": {"target": ("--model", str(DEMO / "target")), "draft": ("--model", str(DEMO / "draft"))},
    "smollm2": {"target": ("--model", "smollm2", "--dtype", "bfloat16"), "draft": ("--method", "suffix")},
}
"""Options of the target and of the draft."""


class Replica:
    """A draft or a target as a process."""

    def __init__(self, role: str, options: Sequence[str]) -> None:
        self.port = free_port()
        self._command = (f"{role}_service", *options, "--max-length", "1024", "--max-sequences", str(AT_ONCE))
        self._running = AsyncExitStack()

    async def start(self) -> None:
        """Start it at its port, and wait until it is ready."""
        _, self._pid = await self._running.enter_async_context(process(*self._command, port=self.port))

    async def restart(self) -> None:
        """Kill it with SIGKILL, and start another in its place."""
        os.kill(self._pid, signal.SIGKILL)
        await self.close()
        await self.start()

    async def close(self) -> None:
        """End it."""
        await self._running.aclose()


@asynccontextmanager
async def cluster(options: argparse.Namespace, kills: Counter[str]) -> AsyncIterator[Client]:
    """Run a coordinator over replicas of the pair, and kill one after the other, counted by role; its client."""
    async with AsyncExitStack() as stack:
        replicas = {
            role: [Replica(role, words) for _ in range(1 if options.kill is None else 2)]
            for role, words in PAIRS[options.pair].items()
        }
        words: list[str] = []
        for role, own in replicas.items():
            for each in own:
                stack.push_async_callback(each.close)
                await each.start()
            words += [f"--{role}-address", ",".join(f"127.0.0.1:{each.port}" for each in own)]
        address, _ = await stack.enter_async_context(process("coordinator", *words))

        async def kill_each(role: str) -> None:
            for replica in cycle(replicas[role]):
                await asyncio.sleep(options.kill)
                kills[role] += 1
                await replica.restart()

        async def stop(task: asyncio.Task[None]) -> None:
            task.cancel()
            await asyncio.wait([task])

        for role in replicas if options.kill is not None else ():
            stack.push_async_callback(stop, asyncio.create_task(kill_each(role)))
        yield await stack.enter_async_context(Client(address))


@dataclass
class Run:
    """Answers to requests of one kind."""

    lengths: list[int] = field(default_factory=list)
    """Tokens of each answer; 0 of a request that failed."""
    failures: list[str] = field(default_factory=list)
    """Errors, and texts that are not what their schema asks for."""
    passes: int = 0
    """The passes of the target through sequences."""
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(self.lengths)

    async def ask(self, client: Client, temperature: float, first: int, wanted: Sequence[Wanted]) -> None:
        """Ask for these answers at once; the number of the first seeds it, and the next ones the others."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, grammar: Grammar | None, max_tokens: int) -> Completed | TandemError:
            async with places:
                try:
                    return await client.complete(
                        f'# {number}\nperson = json.loads("',
                        max_tokens=max(max_tokens, 1),
                        temperature=temperature,
                        seed=number,
                        grammar=grammar,
                        ignore_eos=grammar is None,
                    )
                except TandemError as error:
                    return error

        began = time.perf_counter()
        found = await asyncio.gather(*(one(number, *each) for number, each in enumerate(wanted, first)))
        self.seconds += time.perf_counter() - began
        for answer, (grammar, _) in zip(found, wanted, strict=True):
            if isinstance(answer, TandemError):
                self.lengths.append(0)
                self.failures.append(str(answer))
                continue
            self.lengths.append(len(answer.token_ids))
            self.passes += answer.speculation.rounds
            if grammar is not None and not is_valid(answer, json.loads(grammar.source)):
                self.failures.append(answer.text)


async def answers(client: Client, options: argparse.Namespace, temperature: float) -> None:
    """Ask, check and print a row of the table. Parts with and without schemas take turns."""
    bound, free = Run(), Run()
    for start in range(0, options.answers, PART):
        numbers = range(start, min(start + PART, options.answers))
        schemas = (UNFORCED if options.unforced else schema_of(number % SCHEMAS) for number in numbers)
        grammars = (Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in schemas)
        await bound.ask(client, temperature, start, [(each, options.max_tokens) for each in grammars])
        if options.compare:
            await free.ask(client, temperature, start, [(None, each) for each in bound.lengths[start:]])
    count = len(bound.lengths)
    cells = [f"{temperature:g}", f"{count - len(bound.failures)} of {count}", bound.tokens]
    cells += [f"{bound.tokens / bound.passes:.2f}", f"{bound.tokens / bound.seconds:.0f}"]
    if options.compare:
        passes, tokens = (
            getattr(bound, name) / bound.seconds / (getattr(free, name) / free.seconds)
            for name in ("passes", "tokens")
        )
        cells += [f"{free.tokens / free.passes:.2f}", f"{passes:.2f}", f"{tokens:.2f}"]
    markdown_row(*cells)
    for failure in (*bound.failures, *free.failures)[:5]:
        write_out(f"\nfailed: {failure!r}\n")


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown."""
    schemas = "1 schema" if options.unforced else f"{SCHEMAS} schemas"
    write_out(f"{schemas}, {AT_ONCE} at once\n\n")
    free = (
        "tokens a pass without a schema",
        "passes a second by those without",
        "tokens a second by those without",
    )
    columns = ("temperature", "valid", "tokens", "tokens a pass", "tokens a second")
    markdown_head(*columns, *(free if options.compare else ()))
    kills = Counter[str]()
    async with cluster(options, kills) as client:
        for temperature in options.temperatures:
            await answers(client, options, temperature)
    if kills:
        killed = ", ".join(f"{count} {role}s" for role, count in kills.items())
        write_out(f"\nkilled and started again meanwhile: {killed}\n")


if __name__ == "__main__":
    parser = study_parser(__doc__)
    add = parser.add_argument
    add("--pair", choices=PAIRS, default="demo", help="smollm2: SmolLM2-135M-Instruct, drafts by suffix")
    add("--answers", type=int, default=1000, help="of each temperature")
    add("--max-tokens", type=int, default=400)
    add("--temperatures", type=several(float), default=[0.0, 1.0])
    add("--compare", action="store_true", help="ask the same for as many tokens without a schema, too")
    add("--kill", type=float, metavar="SECONDS", help="two of each, one killed so long after all are ready")
    add("--unforced", action="store_true", help="one schema that forces no text, so that proposals are alike")
    asyncio.run(main(parser.parse_args()))
