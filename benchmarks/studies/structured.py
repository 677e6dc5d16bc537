"""Structured output: are all answers valid?

    python -m benchmarks.studies.structured                             the demo pair
    python -m benchmarks.studies.structured --kill 1                    with deaths of drafts and targets

Answers of 50 schemas (nested objects, enums, arrays, characters of several bytes, numbers with bounds, patterns), at
temperature 0 and 1, 32 at once, checked by the package jsonschema. A pass is the target's, through one sequence.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from random import Random
from typing import Annotated, Any, Literal

import jsonschema
from pydantic import Field

from benchmarks.pairs import DEMO
from tandem.clients.client import Client, Completed
from tandem.config.settings import load_settings
from tandem.errors import TandemError
from tandem.model.types import FinishReason, Grammar, GrammarKind
from tandem.serving.standard_streams import write_out
from tandem_load.common import Listed, Positive, StudySettings, free_port, one_sentence, print_row, process

SCHEMAS = 50
AT_ONCE = 32
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


PAIRS: dict[str, dict[str, tuple[str, ...]]] = {
    "demo": {"target": ("--model", str(DEMO / "target")), "draft": ("--model", str(DEMO / "draft"))},
    "smollm2": {"target": ("--model", "smollm2", "--dtype", "bfloat16"), "draft": ("--method", "suffix")},
}
"""Options of the target and of the draft."""


class StructuredSettings(StudySettings):
    """Options of the measurement."""

    pair: Literal["demo", "smollm2"] = "demo"
    """smollm2: SmolLM2-135M-Instruct, drafts by suffix."""
    answers: Positive = 1000
    """Answers of each temperature."""
    max_tokens: Positive = 400
    """Maximum tokens of an answer."""
    temperatures: Listed[Annotated[float, Field(ge=0)]] = (0.0, 1.0)
    """Temperatures of the answers."""
    kill: float | None = Field(default=None, gt=0)
    """Two replicas of each, one killed so many seconds after all are ready."""


@asynccontextmanager
async def cluster(settings: StructuredSettings, kills: Counter[str]) -> AsyncIterator[Client]:
    """Run a coordinator over replicas of the pair, and kill one after the other, counted by role; its client."""
    async with AsyncExitStack() as stack:

        async def started(role: str, port: int) -> tuple[AsyncExitStack, int]:
            """Start a replica, and wait until it is ready; what ends it, and its process id."""
            bounds = ("--max-length", "1024", "--max-sequences", str(AT_ONCE))
            running = process(f"tandem_{role}", *PAIRS[settings.pair][role], *bounds, port=port)
            own = await stack.enter_async_context(AsyncExitStack())
            return own, (await own.enter_async_context(running))[1]

        async def kill_each(role: str, seconds: float) -> None:
            """Kill the role's replicas in turn with SIGKILL, and start another in the place of each."""
            for port in cycle(ports[role]):
                await asyncio.sleep(seconds)
                own, pid = replicas[port]
                kills[role] += 1
                os.kill(pid, signal.SIGKILL)
                await own.aclose()
                replicas[port] = await started(role, port)

        count = 1 if settings.kill is None else 2
        ports = {role: [free_port() for _ in range(count)] for role in PAIRS[settings.pair]}
        replicas = {port: await started(role, port) for role, own in ports.items() for port in own}
        words = [
            word
            for role, own in ports.items()
            for word in (f"--{role}-address", ",".join(f"127.0.0.1:{port}" for port in own))
        ]
        address, _ = await stack.enter_async_context(process("tandem_coordinator", *words))
        killers: list[asyncio.Task[None]] = []
        if settings.kill is not None:
            killers += [asyncio.create_task(kill_each(role, settings.kill)) for role in ports]
        try:
            yield await stack.enter_async_context(Client(address))
        finally:
            for killer in killers:
                killer.cancel()
            await asyncio.gather(*killers, return_exceptions=True)


async def answers(client: Client, temperature: float, count: int, max_tokens: int) -> None:
    """Ask for so many, check them and print a row of the table."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Completed | TandemError:
        async with places:
            try:
                return await client.complete(
                    f'# {number}\nperson = json.loads("',
                    max_tokens=max_tokens,
                    temperature=temperature,
                    seed=number,
                    grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema_of(number % SCHEMAS))),
                )
            except TandemError as error:
                return error

    began = time.perf_counter()
    found = await asyncio.gather(*map(one, range(count)))
    seconds = time.perf_counter() - began
    completed = [each for each in found if isinstance(each, Completed)]
    failures = [
        each.text if isinstance(each, Completed) else str(each)
        for number, each in enumerate(found)
        if not isinstance(each, Completed) or not is_valid(each, schema_of(number % SCHEMAS))
    ]
    tokens = sum(len(each.token_ids) for each in completed)
    passes = sum(each.speculation.rounds for each in completed)
    valid = f"{count - len(failures)} of {count}"
    print_row(f"{temperature:g}", valid, tokens, f"{tokens / max(passes, 1):.2f}", f"{tokens / seconds:.0f}")
    for failure in failures[:5]:
        write_out(f"\nfailed: {failure!r}\n")


async def main(settings: StructuredSettings) -> None:
    """Measure, and print a table in Markdown."""
    write_out(f"{SCHEMAS} schemas, {AT_ONCE} at once\n\n")
    print_row("temperature", "valid", "tokens", "tokens a pass", "tokens a second")
    print_row(*["---"] * 5)
    kills = Counter[str]()
    async with cluster(settings, kills) as client:
        for temperature in settings.temperatures:
            await answers(client, temperature, settings.answers, settings.max_tokens)
    if kills:
        killed = ", ".join(f"{count} {role}s" for role, count in kills.items())
        write_out(f"\nkilled and started again meanwhile: {killed}\n")


if __name__ == "__main__":
    with one_sentence():
        settings = load_settings(StructuredSettings, sys.argv[1:], "python -m benchmarks.studies.structured")
        asyncio.run(main(settings))
