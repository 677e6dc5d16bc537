"""`python -m benchmarks.studies.vllm --vllm-python PYTHON`: vLLM with Tandem's drafts beside its own draft model.

All ways complete the same prompts in turn within one run. Each vLLM runs its models in its own process on one core;
the draft service is another process. With `--pace` the passes of both models take at least so long, in vLLM as in the
draft service, so that two cores play two devices.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.models.pairs import Pair, open_pair
from benchmarks.peers.process import Peer, peer
from benchmarks.services import service
from benchmarks.workload import Outcome, Workload

ALONE, OWN_DRAFT, PLAIN, AHEAD = "vLLM alone", "vLLM draft_model", "plug-in", "plug-in, ahead"
WAYS = {ALONE: "alone", OWN_DRAFT: "draft_model", PLAIN: "tandem", AHEAD: "tandem"}

_FEWEST_ROUNDS = 5


@dataclass(slots=True)
class Found:
    """Results of one way, over all rounds."""

    speeds: list[float] = field(default_factory=list)
    """Tokens per second of each round."""
    texts: list[list[int]] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count a workload."""
        tokens = sum(len(answer.token_ids) for answer in outcome.answers)
        self.speeds.append(tokens / outcome.seconds)
        self.texts += [answer.token_ids for answer in outcome.answers]
        self.rounds += outcome.rounds
        self.drafted += outcome.drafted
        self.accepted += outcome.accepted

    @property
    def acceptance(self) -> float:
        """Share of the proposed tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown for each batch."""
    pair = open_pair(options.pair, options.cache_folder, "cpu")
    async with AsyncExitStack() as stack:
        ways = await stack.enter_async_context(started(options, pair, options.ways))
        for batch in options.batch:
            found = await measured(options, ways, pair.prompts()[: options.prompts], batch)
            sys.stdout.write("\n" + "\n".join(_table(options, found, batch)) + "\n")
            sys.stdout.flush()


@asynccontextmanager
async def started(
    options: argparse.Namespace, pair: Pair, names: Sequence[str]
) -> AsyncIterator[dict[str, Peer]]:
    """Each way's vLLM, and the draft service of those that need one."""
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-vllm-")))
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
            environment = {
                "TANDEM_VLLM_DRAFT_ADDRESS": draft,
                "TANDEM_VLLM_DRAFT_AHEAD": options.ahead if name == AHEAD else "off",
            }
            own = {
                **setup,
                "mode": WAYS[name],
                "environment": environment if WAYS[name] == "tandem" else {},
            }
            log = options.logs / f"{name}.log" if options.logs else logs / f"{name}.log"
            ways[name] = await stack.enter_async_context(
                peer(name, str(options.vllm_python), "vllm_offline", own, log)
            )
            sys.stderr.write(f"{name} is ready\n")
        yield ways


def _draft(options: argparse.Namespace, pair: Pair, length: int) -> Any:
    arguments = [
        *(
            "--model",
            str(pair.draft),
            "--dtype",
            options.dtype,
            "--threads",
            "1",
            "--no-enable-prefix-caching",
        ),
        *("--max-length", str(length), "--max-sequences", str(2 * max(options.batch))),
    ]
    if options.pace:
        return service(
            "benchmarks.models.paced_services", "--role", "draft", "--pace", options.pace, *arguments
        )
    return service("draft_service", *arguments)


async def measured(
    options: argparse.Namespace, ways: dict[str, Peer], prompts: Sequence[tuple[int, ...]], batch: int
) -> dict[str, Found]:
    """Every way's results on the same workloads, one after the other; the first of each warms up."""
    found = {name: Found() for name in ways}
    count = options.rounds or max(math.ceil(len(prompts) / batch), _FEWEST_ROUNDS)
    names = list(ways)
    for number in range(-1, count):
        first = max(number, 0) * batch
        chosen = tuple(prompts[(first + index) % len(prompts)] for index in range(batch))
        workload = Workload(chosen, options.temperature, options.max_tokens, seed=number + 1)
        for name in names if number % 2 else names[::-1]:
            outcome = await ways[name].run(workload)
            if number >= 0:
                found[name].add(outcome)
    return found


def _table(options: argparse.Namespace, found: dict[str, Found], batch: int) -> list[str]:
    pace = f"paced {options.pace}" if options.pace else "not paced"
    alone = found.get(ALONE)
    base = found.get(OWN_DRAFT)
    rounds = len(next(iter(found.values())).speeds)
    lines = [
        f"Batch {batch}, {pace}, temperature {options.temperature:g}, K = {options.tokens}, {options.pair}, "
        f"{options.dtype}; medians of {rounds} workloads of {options.max_tokens} tokens each:",
        "",
        "| way | tokens/s | by vLLM's draft_model, median of pairs | accepted | proposed for each pass | equal texts |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        ratio = _ratio(one.speeds, base.speeds) if base is not None else "-"
        equal = (
            "-" if alone is None else f"{sum(map(list.__eq__, one.texts, alone.texts))} of {len(one.texts)}"
        )
        share = f"{100 * one.acceptance:.1f} %" if one.drafted else "-"
        proposed = f"{one.drafted / one.rounds:.2f}" if one.rounds else "-"
        lines.append(
            f"| {name} | {statistics.median(one.speeds):.1f} | {ratio} | {share} | {proposed} | {equal} |"
        )
    return lines


def _ratio(speeds: Sequence[float], base: Sequence[float]) -> str:
    return f"{statistics.median(mine / theirs for mine, theirs in zip(speeds, base, strict=True)):.2f}"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.vllm", description=__doc__)
    parser.add_argument("--vllm-python", type=Path, required=True, help="Python with vLLM and Tandem")
    parser.add_argument("--pair", default="demo", help="as for tandem bench")
    parser.add_argument("--ways", type=_texts, default=list(WAYS), help="several with semicolons")
    parser.add_argument("--pace", default="", help="VERIFY_MS,DRAFT_STEP_MS[,PER_8_ROWS]; empty: none")
    parser.add_argument("--tokens", type=int, default=4, help="K")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ahead", default="8", help="TANDEM_VLLM_DRAFT_AHEAD of the way that drafts ahead")
    parser.add_argument(
        "--batch", type=_numbers, default=[1, 16], help="requests at once, several with commas"
    )
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument(
        "--rounds", type=int, default=0, help="workloads of each way; 0: each prompt once, at least 5"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each completion")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--eager", action=argparse.BooleanOptionalAction, default=False, help="vLLM without torch.compile"
    )
    parser.add_argument("--logs", type=Path, default=None, help="folder for what each vLLM writes")
    parser.add_argument("--cache-folder", type=Path, default=Path.home() / ".cache" / "tandem" / "bench")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _texts(text: str) -> list[str]:
    return [next(name for name in WAYS if name == part.strip()) for part in text.split(";")]


if __name__ == "__main__":
    asyncio.run(main(parse(sys.argv[1:])))
