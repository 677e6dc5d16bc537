"""Load on a coordinator, and the output of `tandem admin` without its variable parts."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from tandem.client import Client
from tandem.errors import TandemError
from tandem.types import GenerationRequest

PROMPT = "def area(width, height):\n    area = width"


def complete(address: str, count: int, max_tokens: int) -> list[TandemError | None]:
    """Run this many completions at once, and return the error of each, None for those that succeeded."""
    request = GenerationRequest(PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    async def complete_one(client: Client) -> TandemError | None:
        try:
            async for _ in client.generate(request):
                pass
        except TandemError as error:
            return error
        return None

    async def complete_all() -> list[TandemError | None]:
        async with Client(address) as client:
            return await asyncio.gather(*(complete_one(client) for _ in range(count)))

    return asyncio.run(complete_all())


@contextmanager
def busy(address: str, count: int) -> Iterator[list[TandemError | None]]:
    """Run long completions during the block; the list holds their errors after it."""
    errors: list[TandemError | None] = []
    thread = threading.Thread(target=lambda: errors.extend(complete(address, count, 900)))
    thread.start()
    try:
        yield errors
    finally:
        thread.join()


def stable(text: str, cluster: str, target: str, draft: str) -> str:
    """Replace the parts of an output that vary: addresses, ids, times, counts, and the column widths that follow."""
    for address, name in ((cluster, "COORDINATOR"), (target, "TARGET"), (draft, "DRAFT")):
        text = text.replace(address, name)
    for pattern, name in (
        (r"\b[0-9a-f]{64}\b", "HASH"),
        (r"\b[0-9a-f]{32}\b", "ID"),
        (r"^[0-9a-f]{12}\b", "ID"),
        (r"\d{4}-\d\d-\d\dT[\d:.+-]+", "TIME"),
        (r"\d\d:\d\d:\d\d by", "TIME by"),
        (r"127\.0\.0\.1:\d+", "ADDRESS"),
        (r"\b\d+\.\d+\.\d+\b", "VERSION"),
        (r"(?<![\w.])-?\d+(,\d{3})*(\.\d+)?(e-\d+)?", "#"),
        (r"[█▏▎▍▌▋▊▉]+", ""),
        (r"(#[mhds] ?)+", "AGE "),
        (r"(?<=\S) {2,}", "  "),
        (r" +$", ""),
        # A step profile has as many points as there was time for.
        (r'\[\s*(\{\s*"sequences": #,\s*"tokens": #,\s*"seconds": #\s*\},?\s*)+\]', "[STEPS]"),
        # What the controller says of it follows what was measured.
        (r"predicted #x[^\"]*", "predicted #x, ..."),
        # One entry for each position of the longest proposal.
        (r"\[\s*#(,\s*#)*\s*\]", "[#]"),
        (r"( *- #\n)( *- #\n)+", r"\1"),
        (r"(#  #%  #%\n)+", r"\1"),
    ):
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    return text


def documents(form: str, text: str) -> list[Any]:
    """Parse an output in JSON or YAML: one document, or one for each repetition."""
    if form == "yaml":
        return [*yaml.safe_load_all(text)]
    found, rest = [], text.strip()
    while rest:
        document, end = json.JSONDecoder().raw_decode(rest)
        found.append(document)
        rest = rest[end:].lstrip()
    return found
