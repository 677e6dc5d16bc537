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
from coordinator.cli.up_devices import DRAFT_SHARE, TARGET_SHARE
from coordinator.stats.speculation import add
from tandem.clients.aio import Client
from tandem.types import GenerationRequest, SpeculationStats

_SHARES = {"target": TARGET_SHARE, "draft": DRAFT_SHARE}
"""Of one GPU's memory, where both models are on it."""


class Contender(Protocol):
    """A started way of decoding."""

    async def run(self, workload: Workload) -> Outcome:
        """Complete the workload's prompts, all at once.

        Raises:
            TandemError: it could not.
        """


@dataclass(frozen=True, slots=True)
class Setup:
    """Base class of contenders."""

    target: Path
    draft: Path
    dtype: str
    threads: int
    device: str
    """Of both models, unless the draft has one of its own."""
    max_length: int
    """Longest sequence, prompt and completion together."""
    max_sequences: int
    num_speculative_tokens: int
    logs: Path
    """Folder for what contenders write to stderr."""
    vllm_python: Path | None = None
    max_python: Path | None = None
    pace: str = ""
    """Minimum duration of steps; empty: none."""
    rule: str = ""
    """rejection_sampling_strategy of Tandem's contenders; empty: the default."""
    draft_device: str = ""
    """Empty: the target's."""
    delay_ms: float = 0.0
    """Delay between the coordinator and each service, one way."""

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
            "pace": self.pace,
            "rule": self.rule,
        }


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the three services."""

    target: str
    draft: str
    coordinator: str
    ahead: str
    """Address of a second coordinator of the same services that drafts ahead."""


@asynccontextmanager
async def services(setup: Setup, *, prefix_caching: bool) -> AsyncIterator[Addresses]:
    """A draft service, a target service and a coordinator, each a process.

    Contenders that share a target would reuse each other's prefixes of the same prompts. So prefix caching is off,
    except where it is measured.
    """
    models = (
        *(() if prefix_caching else ("--no-enable-prefix-caching",)),
        *("--dtype", setup.dtype, "--threads", str(setup.threads)),
        *("--max-length", str(setup.max_length), "--max-sequences", str(setup.max_sequences)),
    )
    async with AsyncExitStack() as stack:
        # One after the other: two that load at once slow each other more than they gain.
        target, draft = [
            await stack.enter_async_context(
                _model_service(setup, role, "--model", str(folder), *models, *_placed(setup, role))
            )
            for role, folder in (("target", setup.target), ("draft", setup.draft))
        ]
        if setup.delay_ms:
            target, draft = [
                await stack.enter_async_context(
                    service("benchmarks.timing.delay", "--to", address, "--ms", str(setup.delay_ms))
                )
                for address in (target, draft)
            ]
        joined = ("--target-address", target, "--draft-address", draft)
        count = ("--num-speculative-tokens", str(setup.num_speculative_tokens))
        rule = ("--rejection-sampling-strategy", setup.rule) if setup.rule else ()
        coordinator, ahead = [
            await stack.enter_async_context(
                service("coordinator", *joined, *count, *rule, "--draft-ahead", option)
            )
            for option in ("off", "auto")
        ]
        yield Addresses(target, draft, coordinator, ahead)


def _placed(setup: Setup, role: str) -> tuple[str, ...]:
    """Device of a service, and its share of the memory where both are on one GPU."""
    device = setup.draft_device if role == "draft" and setup.draft_device else setup.device
    is_shared = device != "cpu" and setup.draft_device in ("", setup.device)
    share = ("--device-memory-utilization", str(_SHARES[role])) if is_shared else ()
    return "--device", device, *share


def _model_service(setup: Setup, role: str, *options: str) -> AbstractAsyncContextManager[str]:
    if setup.pace:
        return service("benchmarks.models.paced_services", "--role", role, "--pace", setup.pace, *options)
    return service(f"{role}_service", *options)


class ThroughServices:
    """Tandem as users run it: this process is the client of a coordinator."""

    def __init__(self, client: Client, *, speculation: bool) -> None:
        self._client = client
        self._speculation = speculation

    async def run(self, workload: Workload) -> Outcome:
        """Complete the prompts over one connection."""
        figures = SpeculationStats()
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
    """Display name."""
    start: Start
    is_ours: bool = False
    largest_batch: int | None = None
    """Maximum requests at once; None for any number."""
    absent: Callable[[Setup], str] = lambda _: ""
    """Reason why it cannot run with a setup; empty when it can."""


def _through_services(*, speculation: bool, ahead: bool = False) -> Start:
    @asynccontextmanager
    async def start(_: Setup, addresses: Addresses) -> AsyncIterator[Contender]:
        async with Client(addresses.ahead if ahead else addresses.coordinator) as client:
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
    "speculative-ahead": Kind(
        "Tandem, drafting ahead", _through_services(speculation=True, ahead=True), is_ours=True
    ),
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
