"""A coordinator over targets with scripted faults, and the requests that the tests send it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from coordinator.service import CoordinatorService
from coordinator.settings.coordinator import CoordinatorSettings
from tandem.client import Client
from tandem.engine.models.loading import LoadedModel
from tandem.types import GenerationRequest, Verification
from tests.service.engines import Faults, draft, target
from tests.service.fakes import coordinator

PATIENCE_SECONDS = 30.0
"""Long enough that no draft is late on a busy machine, so that rounds begin where they did in the undisturbed run."""


BOUND_SECONDS = 30.0


REQUESTS = {
    "greedy": GenerationRequest("def f(", max_tokens=24, temperature=0.0, num_speculative_tokens=3, ignore_eos=True),
    "strict": GenerationRequest(
        "def f(", max_tokens=24, temperature=1.0, seed=5, rejection_sampling_strategy="strict",
        num_speculative_tokens=3, ignore_eos=True,
    ),
    "residual": GenerationRequest(
        "def f(", max_tokens=24, temperature=1.0, seed=6, rejection_sampling_strategy="residual",
        num_speculative_tokens=3, ignore_eos=True,
    ),
    "block": GenerationRequest(
        "def f(", max_tokens=24, temperature=1.0, seed=7, rejection_sampling_strategy="block",
        num_speculative_tokens=3, ignore_eos=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class FaultyCluster:
    """A coordinator over one faulty target for each set of faults, and one draft."""

    client: Client
    service: CoordinatorService
    faults: tuple[Faults, ...]

    @property
    def opened(self) -> int:
        return sum(faults.opened for faults in self.faults)


@asynccontextmanager
async def cluster(
    model: LoadedModel, other_model: LoadedModel, *faults: Faults, wait_seconds: float = 10.0
) -> AsyncIterator[FaultyCluster]:
    async with AsyncExitStack() as stack:
        addresses = [(await stack.enter_async_context(target(model, each)))[0] for each in faults]
        drafting, _ = await stack.enter_async_context(draft(other_model))
        settings = CoordinatorSettings(
            target_address=",".join(addresses),
            draft_address=drafting,
            draft_patience_seconds=PATIENCE_SECONDS,
            target_wait_seconds=wait_seconds,
            speculation_policy="fixed",
            draft_ahead="off",  # tests compare rounds, and hits depend on timing
        )
        address, service = await stack.enter_async_context(coordinator(settings))
        yield FaultyCluster(await stack.enter_async_context(Client(address)), service, faults)


def drop_rows(verification: Verification) -> Verification:
    return replace(verification, rows=())
