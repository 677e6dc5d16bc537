"""Structured output: are all answers valid, what does a schema cost, and what does a mask.

    python -m benchmarks.studies.structured                                 the demo pair
    python -m benchmarks.studies.structured --kill 1                        with deaths of drafts and targets
    python -m benchmarks.studies.structured --compare --answers 250         and the same prompts without a schema
    python -m benchmarks.studies.structured --rule strict --no-jump-ahead   models write what the grammar forces
    python -m benchmarks.studies.structured --masks tokenizer.json          the time of masks alone, on random rows

Answers of 50 schemas (nested objects, enums, arrays, characters of several bytes, numbers with bounds, patterns), at
temperature 0 and 1, 32 at once, checked by the package jsonschema. A pass is the target's, through one sequence. Runs
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
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import jsonschema
import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.common import free_port, markdown_head, markdown_row, process, service, several, study_parser
from benchmarks.pairs import DEMO
from coordinator.decoding.completion import Completion
from tandem.client import Client, Completed
from tandem.engine.rows import forbid
from tandem.errors import TandemError
from tandem.grammar import Grammars
from tandem.standard_streams import write_out
from tandem.types import FinishReason, Grammar, GrammarKind

SCHEMAS = 50
AT_ONCE = 32
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
        program = ("coordinator",) if options.jump_ahead else (__spec__.name, _WITHOUT_JUMP_AHEAD)
        address = await stack.enter_async_context(service(*program, *words))

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

    completed: list[Completed | None] = field(default_factory=list)
    """The answers; None for a request that failed."""
    failures: list[str] = field(default_factory=list)
    """Errors, and texts that are not what their schema asks for."""
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

    async def ask(self, one: Any, questions: Iterable[tuple[int, Mapping[str, Any] | int]]) -> None:
        """Ask these questions at once: their numbers, and the schema or the number of tokens of each."""
        questions = list(questions)
        places = asyncio.Semaphore(AT_ONCE)

        async def asked(number: int, wanted: Mapping[str, Any] | int) -> Completed | None:
            async with places:
                try:
                    completed: Completed = await one(number, wanted)
                except TandemError as error:
                    self.failures.append(str(error))
                    return None
            return completed

        began = time.perf_counter()
        found = await asyncio.gather(*(asked(*each) for each in questions))
        self.seconds += time.perf_counter() - began
        self.completed += found
        self.failures += [
            each.text
            for each, (_, wanted) in zip(found, questions, strict=True)
            if each is not None and not isinstance(wanted, int) and not is_valid(each, wanted)
        ]


async def answer(
    client: Client,
    options: argparse.Namespace,
    temperature: float,
    number: int,
    wanted: Mapping[str, Any] | int,
) -> Completed:
    """The answer to a question, by a schema or with a number of tokens."""
    schema = None if isinstance(wanted, int) else Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wanted))
    return await client.complete(
        f'# {number}\nperson = json.loads("',
        max_tokens=max(wanted, 1) if isinstance(wanted, int) else options.max_tokens,
        temperature=temperature,
        seed=number,
        grammar=schema,
        ignore_eos=schema is None,
        speculation=not options.alone,
        rejection_sampling_strategy=options.rule if temperature else None,
    )


async def answers(client: Client, options: argparse.Namespace, temperature: float) -> None:
    """Ask, check and print a row of the table. Parts with and without schemas take turns."""
    bound, free = Run(), Run()
    one = partial(answer, client, options, temperature)
    for start in range(0, options.answers, PART):
        numbers = range(start, min(start + PART, options.answers))
        schemas = (UNFORCED if options.unforced else schema_of(number % SCHEMAS) for number in numbers)
        await bound.ask(one, zip(numbers, schemas, strict=True))
        if options.compare:
            await free.ask(one, zip(numbers, bound.lengths[start:], strict=True))
    count = len(bound.completed)
    texts = "\n".join("" if each is None else each.text for each in bound.completed)
    cells = [
        f"{temperature:g}",
        f"{count - len(bound.failures)} of {count}",
        bound.tokens,
        f"{bound.tokens / bound.passes:.2f}",
        f"{bound.tokens / bound.seconds:.0f}",
        hashlib.sha256(texts.encode()).hexdigest()[:8],
    ]
    if options.compare:
        passes, tokens = (
            getattr(bound, name) / bound.seconds / (getattr(free, name) / free.seconds)
            for name in ("passes", "tokens")
        )
        cells += [f"{free.tokens / free.passes:.2f}", f"{passes:.2f}", f"{tokens:.2f}"]
    markdown_row(*cells)
    for failure in (*bound.failures, *free.failures)[:5]:
        write_out(f"\nfailed: {failure!r}\n")


def masks(tokenizer: Path, sequences: int = 16, rows: int = 5) -> None:
    """Print what masks and their application take in steps of so many sequences with random logits, beside the
    matrices of a small model that has as many ids."""
    size = -(-Tokenizer.from_file(str(tokenizer)).get_vocab_size() // 64) * 64
    grammars = Grammars(tokenizer.read_text, size, [])
    texts = []
    for number in range(SCHEMAS):
        state = grammars.compiled(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema_of(number))))
        texts.append((state, _a_text(state, Random(number))))
    logits, random, matrices = torch.randn(sequences * rows, size), Random(0), _matrices(size)
    moments = []
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
        for weights in matrices:
            torch.randn(len(logits), weights.shape[0], dtype=torch.bfloat16) @ weights
        moments.append((began, made_at, applied_at, time.perf_counter()))
    taken = np.diff(moments, axis=1).T
    medians = ", ".join(
        f"{name} {1e3 * median(each):.1f} ms"
        for name, each in zip(("masks", "application", "the model's matrices"), taken.tolist(), strict=True)
    )
    write_out(f"{size} ids, {sequences} sequences of {rows} rows: {medians}\n")


def _matrices(vocabulary_size: int) -> list[torch.Tensor]:
    """Matrices of the shape of Llama-3.2-1B's, the smallest Llama of such a vocabulary: without attention, and one
    layer's for all 16, so that they take less than a step."""
    shapes = [(2048, 3072), (2048, 2048), (2048, 16_384), (8192, 2048)]
    layer = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    return [*layer * 16, torch.randn(2048, vocabulary_size, dtype=torch.bfloat16)]


def _a_text(state: Any, random: Random) -> list[int]:
    tokens: list[int] = []
    while state.follow(tokens) and not state.is_over and len(tokens) < 200:
        (row,) = state.masks(tokens, ())
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        tokens.append(int(random.choice(allowed.tolist())))
    return tokens


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown."""
    schemas = "1 schema" if options.unforced else f"{SCHEMAS} schemas"
    write_out(f"{schemas}, {AT_ONCE} at once\n\n")
    free = (
        "tokens a pass without a schema",
        "passes a second by those without",
        "tokens a second by those without",
    )
    columns = ("temperature", "valid", "tokens", "tokens a pass", "tokens a second", "texts")
    markdown_head(*columns, *(free if options.compare else ()))
    kills = Counter[str]()
    async with cluster(options, kills) as client:
        for temperature in options.temperatures:
            await answers(client, options, temperature)
    if kills:
        killed = ", ".join(f"{count} {role}s" for role, count in kills.items())
        write_out(f"\nkilled and started again meanwhile: {killed}\n")


def serve_without_jump_ahead(arguments: list[str]) -> None:
    """Run a coordinator that proposes no forced text by itself."""
    from coordinator.__main__ import run

    setattr(Completion, "forced", lambda completion: None)  # noqa: B010 - mypy refuses the assignment of a method
    run(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == [_WITHOUT_JUMP_AHEAD]:
        serve_without_jump_ahead(sys.argv[2:])
        sys.exit()
    parser = study_parser(__doc__)
    add = parser.add_argument
    add("--pair", choices=PAIRS, default="demo", help="smollm2: SmolLM2-135M-Instruct, drafts by suffix")
    add("--answers", type=int, default=1000, help="of each temperature")
    add("--max-tokens", type=int, default=400)
    add("--temperatures", type=several(float), default=[0.0, 1.0])
    add("--alone", action="store_true", help="the target without a draft")
    add("--compare", action="store_true", help="ask the same for as many tokens without a schema, too")
    add("--kill", type=float, metavar="SECONDS", help="two of each, one killed so long after all are ready")
    add("--rule", help="acceptance rule above temperature 0; by default the coordinator's")
    add("--no-jump-ahead", dest="jump_ahead", action="store_false", help="propose no forced text")
    add("--unforced", action="store_true", help="one schema that forces no text, so that proposals are alike")
    add("--masks", type=Path, help="measure masks alone, with this tokenizer.json")
    options = parser.parse_args()
    if options.masks is None:
        asyncio.run(main(options))
    else:
        masks(options.masks)
