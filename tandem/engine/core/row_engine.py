"""The embedded engine for targets: behind the services' seam, it answers with rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Done, Failed, Job, StepRecord, non_finite
from tandem.engine.interface import RowRequest
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.settings import EngineSettings
from tandem.engine.steps import ModelRunner
from tandem.errors import InvalidRequestError, TandemError
from tandem.types import Verification

_MASK_THREADS = min(4, os.cpu_count() or 1)
"""Threads that compute masks, one sequence each. Within the library they hold no lock."""


class RowEngine(Engine[RowRequest, Verification]):
    """See `tandem.engine.interface.SequenceEngine`."""

    def __init__(
        self,
        model: ModelRunner,
        settings: EngineSettings,
        on_step: Callable[[StepRecord], None] | None = None,
        *,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(model, partial(row_head, model=model), settings, on_step, on_failure=on_failure)
        self._masks = ThreadPoolExecutor(_MASK_THREADS, "masks")

    async def close(self) -> None:
        """See `SequenceEngine`."""
        await super().close()
        self._masks.shutdown(wait=False)

    async def run(self, sequence: CachedSequence, request: RowRequest) -> Verification:
        """See `SequenceEngine`."""
        step = request.step
        prepare = None if request.grammar is None else self._begin_masks
        job = Job(sequence, step.delta, step.row_count, request, step.lead, prepare=prepare)
        answer = await self.submit(job)
        return replace(answer, cost=job.cost) if job.row_count else Verification(request.base_length, ())

    def _begin_masks(self, job: Job[RowRequest]) -> Future[RowRequest]:
        """Compute the masks of a step while the model computes its logits: they depend on the tokens alone."""
        return self._masks.submit(job.payload.with_tokens, job.sequence.token_ids)


def row_head(
    ready: Sequence[Job[RowRequest]], logits: Any, model: ModelRunner
) -> list[Done[Verification] | Failed]:
    """Logits become the rows that each job asks for."""
    failures: dict[Job[RowRequest], Failed] = {}
    requests = [_with_tokens(job, failures) for job in ready]
    return [
        failures.get(job)
        or (
            non_finite(job.payload.base_length)
            if answer is None
            else Done(answer, partial(_go_on, job, answer))
        )
        for job, answer in zip(ready, model.verify(requests, logits), strict=True)
    ]


def _go_on(job: Job[RowRequest], answer: Verification) -> tuple[Verification, Job[RowRequest] | None]:
    """The answer, and the job with which the sequence goes on by itself."""
    answer = job.payload.decided(answer, job.sequence.token_ids)
    request = job.payload.following(answer)
    if request is None:
        return answer, None
    return answer, Job(
        job.sequence,
        request.step.delta,
        request.step.row_count,
        request,
        on_result=_tell_led,
        prepare=job.prepare,
    )


def _tell_led(job: Job[RowRequest], result: object) -> None:
    on_led, step = job.payload.on_led, job.payload.step
    if on_led is None:
        return
    if isinstance(result, Verification):
        on_led(replace(result, cost=job.cost, led_token_id=step.delta.token_ids[0]))
    elif isinstance(result, TandemError):
        on_led(result)


def _with_tokens(job: Job[RowRequest], failures: dict[Job[RowRequest], Failed]) -> RowRequest:
    request = job.payload
    if request.grammar is None and not request.sampling.penalizes:
        return request
    try:
        return request.with_tokens(job.sequence.token_ids) if job.prepared is None else job.prepared.result()
    except InvalidRequestError as error:
        failures[job] = Failed(error)
        return replace(request, grammar=None)
