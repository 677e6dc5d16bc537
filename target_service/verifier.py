"""Runs the target model for the servicer: sequences in, verifications out."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from tandem.engine.backends.eager.sampler import TORCH_SAMPLER
from tandem.engine.backends.interface import Sampler
from tandem.engine.backends.selection import choose_backends
from tandem.engine.core.engine import Engine
from tandem.engine.core.finite import non_finite
from tandem.engine.core.jobs import Done, Failed, Job
from tandem.engine.kv_cache.arena import KvUsage
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.models.loading import load_model
from tandem.engine.settings import EngineSettings, prefill_chunk_tokens
from tandem.errors import InvalidRequestError, NonFiniteLogitsError
from tandem.telemetry.streams import OnStep
from tandem.types import ModelFeature, ModelInfo, TargetOptions, Verification, VerifyStep
from target_service.adjustments import Adjustments, check_ids
from target_service.penalties import History
from target_service.rows import RowRequest, verifications
from target_service.settings import TargetSettings

logger = logging.getLogger(__name__)

_CAPTURED_WIDTHS = (1, 3, 5, 9)
"""The target alone, and proposals of 2 (MAX's default), 4 and 8 tokens; others are padded to the next."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def load_verifier(
    settings: TargetSettings, on_step: OnStep = None, on_failure: Callable[[], None] | None = None
) -> Verifier:
    """Load the model that the settings name.

    Raises:
        ConfigurationError: it cannot be served as they ask.
    """
    model = load_model(
        settings.model,
        device=settings.device,
        dtype=settings.compute_dtype,
        threads=settings.threads,
    )
    backends = choose_backends(
        model,
        compile_mode=settings.compile,
        compile_cache=settings.compile_cache,
        enforce_eager=settings.enforce_eager,
    )
    limits = EngineSettings(
        max_length=settings.max_length,
        max_sequences=settings.max_sequences,
        prefill_chunk_tokens=prefill_chunk_tokens(settings.max_num_batched_tokens, model.device.type),
        kv_cache_bytes=settings.kv_cache_memory_bytes,
        device_memory_utilization=settings.device_memory_utilization,
        prefix_reuse=settings.enable_prefix_caching,
        step_timeout_seconds=settings.step_timeout_seconds,
        captured_widths=_CAPTURED_WIDTHS,
    )
    head = partial(verify_head, sampler=backends.sampler)
    engine = Engine(model, head, limits, on_step, backends=backends, on_failure=on_failure)
    files = tuple(path for name in TOKENIZER_FILES if (path := settings.model / name).is_file())
    return Verifier(engine, files)


def verify_head(
    ready: Sequence[Job[RowRequest]], logits: Tensor, sampler: Sampler = TORCH_SAMPLER
) -> list[Done[Verification] | Failed]:
    """Head of the target's engine: logits become the rows that each job asks for."""
    requests = [_request(job) for job in ready]
    return [
        non_finite(request.base_length) if verification is None else Done(verification)
        for request, verification in zip(requests, verifications(requests, logits, sampler), strict=True)
    ]


def _request(job: Job[RowRequest]) -> RowRequest:
    """The job's request, with the sequence after its delta."""
    request = job.payload
    if request.history is None:
        return request
    return replace(request, history=replace(request.history, token_ids=job.sequence.token_ids))


class Verifier:
    """The target model behind its engine."""

    def __init__(self, engine: Engine[RowRequest, Verification], tokenizer_files: Sequence[Path]) -> None:
        self._engine = engine
        self.tokenizer_files = tokenizer_files
        """Files with which a coordinator tokenizes as the model does."""

    @property
    def model_info(self) -> ModelInfo:
        """Information about the model."""
        return replace(
            self._engine.model.info,
            max_length=self._engine.max_length,
            features=frozenset(ModelFeature),
            captures=self._engine.captures,
        )

    def kv_usage(self) -> KvUsage:
        """Usage of its KV cache."""
        return self._engine.usage

    @property
    def overdue_seconds(self) -> float:
        """How long the engine has been stuck in a step; 0 while all is well."""
        return self._engine.overdue_seconds

    async def start(self) -> None:
        """Begin to work, and warm up."""
        self._engine.start()
        await self._engine.warm_up()

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.close()

    @asynccontextmanager
    async def sequence(self, options: TargetOptions) -> AsyncIterator[VerifiedSequence]:
        """Keep a sequence in the KV cache for as long as the context lives.

        Raises:
            CapacityError: there is no room for another.
            InvalidRequestError: it may become longer than the model can read, or adjusts logits of ids that the model
                does not have.
        """
        adjustments = self._adjustments(options)
        cached = await self._engine.open(options.max_length or self.model_info.max_length)
        try:
            yield VerifiedSequence(self._engine, cached, options, adjustments)
        finally:
            self._engine.release(cached)

    def _adjustments(self, options: TargetOptions) -> Adjustments | None:
        if not options.adjustments:
            return None
        model = self._engine.model
        check_ids(options.adjustments, model.info.vocabulary_size)
        return Adjustments(options.adjustments, options.prompt_length, model.device)


class VerifiedSequence:
    """One sequence that proposals are verified for."""

    def __init__(
        self,
        engine: Engine[RowRequest, Verification],
        cached: CachedSequence,
        options: TargetOptions,
        adjustments: Adjustments | None = None,
    ) -> None:
        self._engine = engine
        self._cached = cached
        self._options = options
        self._adjustments = adjustments

    async def verify(self, step: VerifyStep) -> Verification:
        """Apply the step's delta and compute the requested rows.

        Raises:
            InvalidRequestError: the delta or a support does not fit the sequence or the model.
            NonFiniteLogitsError: the model computed logits that are not finite.
        """
        self._check_supports(step)
        sampling = self._options.sampling
        history = History(self._options.prompt_length) if sampling.penalizes else None
        request = RowRequest(step, sampling, history, self._adjustments)
        if step.row_count == 0:
            await self._engine.run(Job(self._cached, step.delta, 0, request))
            return Verification(request.base_length, ())
        job = Job(self._cached, step.delta, step.row_count, request)
        try:
            return replace(await self._engine.run(job), cost=job.cost)
        except NonFiniteLogitsError as error:
            logger.error(  # noqa: TRY400 - the traceback would say nothing
                "logits are not finite", extra={"request_id": self._options.request_id, "reason": str(error)}
            )
            raise

    def _check_supports(self, step: VerifyStep) -> None:
        size = self._engine.model.info.vocabulary_size
        for support in step.supports:
            if len(support) and not (support.min() >= 0 and support.max() < size):
                raise InvalidRequestError(
                    f"a support holds an id outside the vocabulary; ids must be in 0..{size - 1}"
                )
