"""The ways of decoding that are compared, and how each is started."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.compared_services import (
    Addresses,
    Setup,
    coordinator_of,
    delayed,
    model_options,
    placed,
)
from benchmarks.peers.process import PeerError, peer
from benchmarks.services import service
from benchmarks.workload import Answer, Outcome, Workload
from coordinator.cli.serve import BOUND_PACKAGE
from coordinator.stats.speculation import add
from tandem.client import Client
from tandem.config.names import BOUND_METHODS, MODEL_FREE_METHODS, OWN_METHODS
from tandem.types import GenerationRequest, SpeculationStats

HEAD_METHODS = tuple(method for method in BOUND_METHODS if method not in OWN_METHODS)
"""Drafting methods whose heads have folders of their own."""
_LOSSLESS = "residual"


class Contender(Protocol):
    """A started way of decoding."""

    async def run(self, workload: Workload) -> Outcome:
        """Complete the workload's prompts, all at once.

        Raises:
            TandemError: it could not.
        """


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


def _by_head(method: str) -> Start:
    """A target of its own with a head beside it, and a coordinator."""

    @asynccontextmanager
    async def start(setup: Setup, _: Addresses) -> AsyncIterator[Contender]:
        options = model_options(setup, prefix_caching=False)
        async with AsyncExitStack() as stack:
            hosted = await stack.enter_async_context(
                service(
                    BOUND_PACKAGE,
                    *("--model", str(setup.target), "--draft-model", str(setup.head_folder(method))),
                    *options,
                    *placed(setup, "target"),
                )
            )
            target = await delayed(setup, hosted, stack)
            # A head's default rule is lossy; the others' contenders leave the target's distribution as it is.
            coordinator = await stack.enter_async_context(coordinator_of(setup, target, None, rule=_LOSSLESS))
            yield await stack.enter_async_context(_client(coordinator))

    return start


def _by_method(method: str) -> Start:
    """A draft service without a model, and a coordinator, before the target that all share."""

    @asynccontextmanager
    async def start(setup: Setup, addresses: Addresses) -> AsyncIterator[Contender]:
        async with AsyncExitStack() as stack:
            drafting = await stack.enter_async_context(service("draft_service", "--method", method))
            draft = await delayed(setup, drafting, stack)
            coordinator = await stack.enter_async_context(coordinator_of(setup, addresses.target, draft))
            yield await stack.enter_async_context(_client(coordinator))

    return start


@asynccontextmanager
async def _client(coordinator: str) -> AsyncIterator[Contender]:
    async with Client(coordinator) as client:
        yield ThroughServices(client, speculation=True)


def _no_head(method: str) -> Callable[[Setup], str]:
    def reason(setup: Setup) -> str:
        if setup.head_folder(method) is None:
            return f"name the folder of the target's {method} head with --head"
        return "--pace does not slow a head, which runs in the target's process" if setup.pace else ""

    return reason


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
    **{
        method: Kind(f"Tandem, {method}", _by_head(method), is_ours=True, absent=_no_head(method))
        for method in HEAD_METHODS
    },
    **{method: Kind(f"Tandem, {method}", _by_method(method), is_ours=True) for method in MODEL_FREE_METHODS},
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
