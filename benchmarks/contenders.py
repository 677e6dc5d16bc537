"""The ways of decoding that are compared, and how each is started."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.process import PeerError, peer
from benchmarks.services import service
from benchmarks.workload import Answer, Outcome, Workload
from coordinator.figures import add
from tandem.client import Client
from tandem.types import GenerationRequest, SpeculationFigures


class Contender(Protocol):
    """A way of decoding that is ready to run."""

    async def run(self, workload: Workload) -> Outcome:
        """Complete the workload's prompts, all at once.

        Raises:
            TandemError: it could not.
        """


@dataclass(frozen=True, slots=True)
class Setup:
    """What all contenders have in common."""

    target: Path
    draft: Path
    dtype: str
    threads: int
    device: str
    max_length: int
    """Longest sequence, prompt and completion together."""
    max_sequences: int
    num_speculative_tokens: int
    logs: Path
    """Folder for what contenders write to stderr."""
    vllm_python: Path | None = None
    max_python: Path | None = None

    def as_dict(self) -> dict[str, Any]:
        """For a peer."""
        return {
            "target": str(self.target),
            "draft": str(self.draft),
            "dtype": self.dtype,
            "threads": self.threads,
            "device": self.device,
            "max_length": self.max_length,
            "max_sequences": self.max_sequences,
            "num_speculative_tokens": self.num_speculative_tokens,
        }


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the three services listen."""

    target: str
    draft: str
    coordinator: str


@asynccontextmanager
async def services(setup: Setup, *, prefix_caching: bool) -> AsyncIterator[Addresses]:
    """A draft service, a target service and a coordinator, each a process.

    Contenders that share a target would take over what the one before has read of the same prompts: whoever comes
    first would read for all. So it is off except where it is what is measured.
    """
    models = (
        *(() if prefix_caching else ("--no-enable-prefix-caching",)),
        *("--dtype", setup.dtype, "--threads", str(setup.threads), "--device", setup.device),
        *("--max-length", str(setup.max_length), "--max-sequences", str(setup.max_sequences)),
    )
    async with AsyncExitStack() as stack:
        # One after the other: two that load at once slow each other more than they gain.
        target, draft = [
            await stack.enter_async_context(service(package, "--model", str(folder), *models))
            for package, folder in (("target_service", setup.target), ("draft_service", setup.draft))
        ]
        joined = ("--target-address", target, "--draft-address", draft)
        count = ("--num-speculative-tokens", str(setup.num_speculative_tokens))
        coordinator = await stack.enter_async_context(service("coordinator", *joined, *count))
        yield Addresses(target, draft, coordinator)


class ThroughServices:
    """Tandem as users run it: this process is the client of a coordinator."""

    def __init__(self, client: Client, *, speculation: bool) -> None:
        self._client = client
        self._speculation = speculation

    async def run(self, workload: Workload) -> Outcome:
        """Complete the prompts over one connection."""
        figures = SpeculationFigures()
        # One request accepts as it does in one process, so that only the path differs. Many come as clients send them:
        # a seed would forbid the coordinator to shorten their proposals.
        seed = workload.seed if len(workload.prompts) == 1 else None
        started = time.perf_counter()

        async def one(index: int) -> Answer:
            answer = Answer()
            request = GenerationRequest(
                workload.prompts[index],
                max_tokens=workload.max_tokens,
                temperature=workload.temperature,
                seed=seed,
                speculation=self._speculation,
                ignore_eos=True,
            )
            async for chunk in self._client.generate(request):
                answer.add(time.perf_counter() - started, list(chunk.token_ids))
                if chunk.summary is not None:
                    add(figures, chunk.summary.speculation)
            return answer

        answers = await asyncio.gather(*map(one, range(len(workload.prompts))))
        return Outcome(
            answers, time.perf_counter() - started, figures.rounds, figures.drafted, figures.accepted
        )


Start = Callable[[Setup, Addresses], AbstractAsyncContextManager[Contender]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A contender that can be asked for."""

    title: str
    """What a reader calls it."""
    start: Start
    is_ours: bool = False
    largest_batch: int | None = None
    """Most requests at once; None for any number."""
    absent: Callable[[Setup], str] = lambda _: ""
    """Why it cannot run with a setup; empty when it can."""


def _through_services(*, speculation: bool) -> Start:
    @asynccontextmanager
    async def start(_: Setup, addresses: Addresses) -> AsyncIterator[Contender]:
        async with Client(addresses.coordinator) as client:
            yield ThroughServices(client, speculation=speculation)

    return start


def _peer(module: str, python: Callable[[Setup], Path | str], **extra: object) -> Start:
    def start(setup: Setup, _: Addresses) -> AbstractAsyncContextManager[Contender]:
        name = "-".join([module, *(str(value) for value in extra.values() if value)])
        return peer(
            name, str(python(setup)), module, {**setup.as_dict(), **extra}, setup.logs / f"{name}.log"
        )

    return start


def _no_vllm(setup: Setup) -> str:
    return "" if setup.vllm_python else "name a Python that has vLLM with --vllm-python"


def _no_max(setup: Setup) -> str:
    if setup.max_python is None:
        return "name a Python that has MAX with --max-python"
    if setup.device == "cpu" and setup.dtype != "float32":
        return f"MAX computes in float32 only on a CPU, and dtype is {setup.dtype}"
    return ""


def _vllm_python(setup: Setup) -> Path:
    if setup.vllm_python is None:
        raise PeerError(_no_vllm(setup))
    return setup.vllm_python


def _max_python(setup: Setup) -> Path:
    if setup.max_python is None:
        raise PeerError(_no_max(setup))
    return setup.max_python


def _this_python(_: Setup) -> str:
    return sys.executable


CONTENDERS: dict[str, Kind] = {
    "target-alone": Kind("Tandem, target alone", _through_services(speculation=False), is_ours=True),
    "speculative": Kind("Tandem, speculative", _through_services(speculation=True), is_ours=True),
    "one-process": Kind("the same loop in one process", _peer("one_process", _this_python), is_ours=True),
    "transformers": Kind(
        "transformers generate", _peer("transformers_generate", _this_python, assistance="")
    ),
    "assisted": Kind(
        "transformers assisted, same K",
        _peer("transformers_generate", _this_python, assistance="fixed"),
        largest_batch=1,
    ),
    "assisted-defaults": Kind(
        "transformers assisted, its defaults",
        _peer("transformers_generate", _this_python, assistance="defaults"),
        largest_batch=1,
    ),
    "vllm": Kind("vLLM", _peer("vllm_offline", _vllm_python, mode="alone"), absent=_no_vllm),
    "vllm-ngram": Kind("vLLM, ngram", _peer("vllm_offline", _vllm_python, mode="ngram"), absent=_no_vllm),
    "vllm-draft": Kind(
        "vLLM, draft model", _peer("vllm_offline", _vllm_python, mode="draft_model"), absent=_no_vllm
    ),
    "max": Kind("MAX", _peer("max_serve", _max_python), absent=_no_max),
}
"""By the name that `--contenders` takes."""
