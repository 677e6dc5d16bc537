"""`python -m benchmarks.studies.vllm --vllm-python PYTHON`: vLLM with Tandem's drafts beside its own draft model.

All ways complete the same prompts in turn within one run. Each vLLM runs its models in its own process on one core;
the draft service is another process. With `--pace` the passes of both models take at least so long, in vLLM as in the
draft service, so that two cores play two devices.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import CACHE_FOLDER, in_turn, numbers, service, speed, speed_ratio
from benchmarks.pairs import Pair, open_pair
from benchmarks.peers import Outcome, Peer, peer

ALONE, OWN_DRAFT, PLAIN, AHEAD = "vLLM alone", "vLLM draft_model", "plug-in", "plug-in, ahead"
WAYS = {ALONE: "alone", OWN_DRAFT: "draft_model", PLAIN: "tandem", AHEAD: "tandem"}


def acceptance(outcomes: Sequence[Outcome]) -> float:
    """Share of the proposed tokens that were accepted."""
    return sum(one.accepted for one in outcomes) / max(sum(one.drafted for one in outcomes), 1)


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown for each batch."""
    pair = open_pair(options.pair, options.cache_folder, "cpu")
    prompts = pair.prompts()[: options.prompts]
    async with started(options, pair, options.ways) as ways:
        for batch in options.batch:
            rounds = options.rounds or max(math.ceil(len(prompts) / batch), 5)
            found = await in_turn(ways, prompts, batch, options.temperature, options.max_tokens, rounds)
            sys.stdout.write("\n" + "\n".join(_table(options, found, batch)) + "\n")
            sys.stdout.flush()


@asynccontextmanager
async def started(
    options: argparse.Namespace, pair: Pair, names: Sequence[str]
) -> AsyncIterator[dict[str, Peer]]:
    """Each way's vLLM, and the draft service of those that need one."""
    async with AsyncExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(TemporaryDirectory(prefix="tandem-vllm-")))
        length = max(map(len, pair.prompts())) + options.max_tokens + 2 * options.tokens
        setup: dict[str, Any] = {
            "target": str(pair.target),
            "draft": str(pair.draft),
            "dtype": options.dtype,
            "threads": 1,
            "device": "cpu",
            "max_length": length,
            "max_sequences": max(options.batch),
            "num_speculative_tokens": options.tokens,
            "vllm_pace": options.pace,
            "engine": {"distributed_executor_backend": "uni", "enforce_eager": options.eager},
        }
        draft = ""
        if {PLAIN, AHEAD} & set(names):
            draft = await stack.enter_async_context(_draft(options, pair, length))
        ways = {}
        for name in names:
            own = {**setup, "mode": WAYS[name]}
            if WAYS[name] == "tandem":
                ahead = options.ahead if name == AHEAD else "off"
                own["environment"] = {
                    "TANDEM_VLLM_DRAFT_ADDRESS": draft,
                    "TANDEM_VLLM_DRAFT_AHEAD": ahead,
                }
            command = [str(options.vllm_python), "benchmarks.peers", "vllm"]
            ways[name] = await stack.enter_async_context(peer(name, command, own, logs / f"{name}.log"))
            sys.stderr.write(f"{name} is ready\n")
        yield ways


def _draft(options: argparse.Namespace, pair: Pair, length: int) -> AbstractAsyncContextManager[str]:
    arguments = [
        *("--model", str(pair.draft), "--dtype", options.dtype, "--threads", "1"),
        *("--max-length", str(length), "--max-sequences", str(2 * max(options.batch))),
        "--no-enable-prefix-caching",
    ]
    if options.pace:
        return service("benchmarks.pace", "--role", "draft", "--pace", options.pace, *arguments)
    return service("draft_service", *arguments)


def _table(options: argparse.Namespace, found: Mapping[str, Sequence[Outcome]], batch: int) -> list[str]:
    pace = f"paced {options.pace}" if options.pace else "not paced"
    lines = [
        f"Batch {batch}, {pace}, temperature {options.temperature:g}, K = {options.tokens}, {options.pair}, "
        f"{options.dtype}; medians of {len(next(iter(found.values())))} workloads of {options.max_tokens} tokens each:",
        "",
        "| way | tokens/s | by vLLM's draft_model, median of pairs | accepted | proposed for each pass | equal texts |",
        "|---|---|---|---|---|---|",
    ]
    for name, outcomes in found.items():
        rounds, drafted = (sum(getattr(one, each) for one in outcomes) for each in ("rounds", "drafted"))
        ratio = f"{speed_ratio(outcomes, found[OWN_DRAFT]):.2f}" if OWN_DRAFT in found else "-"
        share = f"{100 * acceptance(outcomes):.1f} %" if drafted else "-"
        proposed = f"{drafted / rounds:.2f}" if rounds else "-"
        equal = "-"
        if ALONE in found:
            own = texts(outcomes)
            equal = f"{sum(map(list.__eq__, own, texts(found[ALONE])))} of {len(own)}"
        lines.append(f"| {name} | {speed(outcomes):.1f} | {ratio} | {share} | {proposed} | {equal} |")
    return lines


def texts(outcomes: Sequence[Outcome]) -> list[list[int]]:
    """Token ids of all completions."""
    return [answer.token_ids for outcome in outcomes for answer in outcome.answers]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.vllm", description=__doc__)
    add = parser.add_argument
    add("--vllm-python", type=Path, required=True, help="Python with vLLM and Tandem")
    add("--pair", default="demo", help="as for tandem bench")
    add("--ways", type=_ways, default=list(WAYS), help="several with semicolons")
    add("--pace", default="", help="VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS]; empty: none")
    add("--tokens", type=int, default=4, help="K")
    add("--temperature", type=float, default=0.0)
    add("--ahead", default="8", help="TANDEM_VLLM_DRAFT_AHEAD of the way that drafts ahead")
    add("--batch", type=numbers, default=[1, 16], help="requests at once, several with commas")
    add("--prompts", type=int, default=20)
    add("--rounds", type=int, default=0, help="workloads of each way; 0: each prompt once, at least 5")
    add("--max-tokens", type=int, default=64, help="tokens of each completion")
    add("--dtype", default="float32")
    add("--eager", action=argparse.BooleanOptionalAction, default=False, help="vLLM without torch.compile")
    add("--logs", type=Path, default=None, help="folder for what each vLLM writes")
    add("--cache-folder", type=Path, default=CACHE_FOLDER)
    return parser.parse_args(arguments)


def _ways(text: str) -> list[str]:
    return [next(name for name in WAYS if name == part.strip()) for part in text.split(";")]


if __name__ == "__main__":
    asyncio.run(main(parse(sys.argv[1:])))
