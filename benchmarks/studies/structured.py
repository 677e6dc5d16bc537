"""Structured output: are all answers valid, what does a schema cost, and what does a mask.

    python -m benchmarks.studies.structured                                 the demo pair
    python -m benchmarks.studies.structured --address HOST:PORT             a coordinator that runs
    python -m benchmarks.studies.structured --masks tokenizer.json          the time of masks alone, on random rows

Answers of 50 schemas (nested objects, enums, arrays, characters of several bytes, numbers with bounds, patterns), at
temperature 0 and 1, many at once, checked by the package jsonschema. The comparison of speeds asks the same prompts
for as many tokens without a schema.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import torch

from benchmarks.contenders import Setup, services
from benchmarks.pairs import DEMO
from tandem.client import Client, Completed
from tandem.engine.rows import masked
from tandem.errors import TandemError
from tandem.grammar import Grammars
from tandem.types import FinishReason, Grammar, GrammarKind

SCHEMAS = 50
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


@asynccontextmanager
async def connected(options: argparse.Namespace) -> AsyncIterator[Client]:
    """A client of the coordinator that is measured."""
    async with AsyncExitStack() as stack:
        address = options.address
        if address is None:
            logs = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-structured-")))
            setup = Setup(DEMO / "target", DEMO / "draft", 1024, options.at_once, 4, logs, dtype="float32")
            address = (await stack.enter_async_context(services(setup, with_ahead=False))).coordinator
        yield await stack.enter_async_context(Client(address))


async def answers(client: Client, options: argparse.Namespace, temperature: float) -> None:
    """Ask, check and print a row of the table."""
    places = asyncio.Semaphore(options.at_once)
    failures: list[str] = []

    async def one(number: int, *, is_bound: bool, tokens: int) -> Completed | None:
        schema = schema_of(number % SCHEMAS)
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) if is_bound else None
        prompt = f'# {number}\nperson = json.loads("'
        async with places:
            try:
                found = await client.complete(
                    prompt,
                    max_tokens=tokens,
                    temperature=temperature,
                    seed=number,
                    grammar=grammar,
                    ignore_eos=not is_bound,
                    speculation=not options.alone,
                )
            except TandemError as error:
                failures.append(str(error))
                return None
        if is_bound and not is_valid(found, schema):
            failures.append(found.text)
        return found

    began = time.perf_counter()
    bound = await asyncio.gather(
        *(one(number, is_bound=True, tokens=options.max_tokens) for number in range(options.answers))
    )
    bound_seconds, began = time.perf_counter() - began, time.perf_counter()
    lengths = [0 if each is None else len(each.token_ids) for each in bound]
    await asyncio.gather(
        *(one(number, is_bound=False, tokens=max(length, 1)) for number, length in enumerate(lengths))
    )
    free_seconds = time.perf_counter() - began
    rounds = sum(0 if each is None else each.speculation.rounds for each in bound)
    total, valid = sum(lengths), options.answers - len(failures)
    sys.stdout.write(
        f"| {temperature:g} | {valid} of {options.answers} | {total / bound_seconds:.0f} | {total / free_seconds:.0f} "
        f"| {free_seconds / bound_seconds:.2f} | {total / max(rounds, 1):.2f} |\n"
    )
    for failure in failures[:5]:
        sys.stdout.write(f"\nnot valid: {failure!r}\n")
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
    sys.stdout.write(
        f"{SCHEMAS} schemas, {options.at_once} at once\n\n"
        "| temperature | valid | tokens/s | without a schema | share | tokens a round |\n|---|---|---|---|---|---|\n"
    )
    async with connected(options) as client:
        for temperature in (0.0, 1.0):
            await answers(client, options, temperature)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.structured", description=__doc__)
    add = parser.add_argument
    add("--address", help="a coordinator's gRPC address; by default one is started over the demo pair")
    add("--answers", type=int, default=1000, help="of each temperature")
    add("--at-once", type=int, default=32)
    add("--max-tokens", type=int, default=400)
    add("--alone", action="store_true", help="the target without a draft")
    add("--masks", type=Path, help="measure masks alone, with this tokenizer.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    asyncio.run(main(parse(sys.argv[1:])))
