"""The embedded engine for targets: behind the services' seam, it answers with rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Done, Failed, Job, StepRecord, non_finite
from tandem.engine.core.selection import Backends
from tandem.engine.interface import RowRequest
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.models.loading import LoadedModel
from tandem.engine.rows import verifications
from tandem.engine.sampler import Sampler
from tandem.engine.settings import EngineSettings
from tandem.types import Verification


class RowEngine(Engine[RowRequest, Verification]):
    """See `tandem.engine.interface.SequenceEngine`."""

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings,
        on_step: Callable[[StepRecord], None] | None = None,
        *,
        backends: Backends | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Allocates the KV cache; see `Engine`."""
        backends = backends or Backends(model)
        head = partial(row_head, sampler=backends.sampler)
        super().__init__(model, head, settings, on_step, backends=backends, on_failure=on_failure)

    async def run(self, sequence: CachedSequence, request: RowRequest) -> Verification:
        """See `SequenceEngine`."""
        job = Job(sequence, request.step.delta, request.step.row_count, request)
        answer = await self.submit(job)
        return replace(answer, cost=job.cost) if job.row_count else Verification(request.base_length, ())


def row_head(
    ready: Sequence[Job[RowRequest]], logits: Tensor, sampler: Sampler
) -> list[Done[Verification] | Failed]:
    """Logits become the rows that each job asks for."""
    requests = [_with_tokens(job) for job in ready]
    return [
        non_finite(request.base_length) if verification is None else Done(verification)
        for request, verification in zip(requests, verifications(requests, logits, sampler), strict=True)
    ]


def _with_tokens(job: Job[RowRequest]) -> RowRequest:
    request = job.payload
    return replace(request, token_ids=job.sequence.token_ids) if request.sampling.penalizes else request
