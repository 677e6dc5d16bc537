"""Runs the target model for the servicer: sequences in, verifications out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from tandem.engine.cache import KvUsage
from tandem.engine.engine import Engine
from tandem.engine.jobs import Done, Job
from tandem.engine.model import load_model
from tandem.engine.recording import recorder_for
from tandem.engine.sampling import BY_TORCH, Sampler
from tandem.engine.sequence import Sequence as CachedSequence
from tandem.engine.settings import EngineSettings
from tandem.errors import InvalidRequestError
from tandem.telemetry.streams import OnStep
from tandem.types import ModelInfo, TargetOptions, Verification, VerifyStep
from target_service.penalties import History
from target_service.rows import RowRequest, verifications
from target_service.settings import TargetSettings

_RECORDED_WIDTHS = (1, 3, 5, 9)
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
        compile_mode=settings.compile,
        compile_cache=settings.compile_cache,
    )
    limits = EngineSettings(
        max_length=settings.max_length,
        max_sequences=settings.max_sequences,
        device_memory_utilization=settings.device_memory_utilization,
        prefix_reuse=settings.enable_prefix_caching,
        recorded_widths=_RECORDED_WIDTHS,
    )
    recorder = recorder_for(model.device, enforce_eager=settings.enforce_eager)
    head = partial(verify_head, sampler=Sampler(model.kernels))
    engine = Engine(model, head, limits, on_step, recorder=recorder, on_failure=on_failure)
    files = tuple(path for name in TOKENIZER_FILES if (path := settings.model / name).is_file())
    return Verifier(engine, files)


def verify_head(
    ready: Sequence[Job[RowRequest]], logits: Tensor, sampler: Sampler = BY_TORCH
) -> list[Done[Verification]]:
    """What the target's logits mean: the rows that each job asks for."""
    requests = [_request(job) for job in ready]
    return [Done(verification) for verification in verifications(requests, logits, sampler)]


def _request(job: Job[RowRequest]) -> RowRequest:
    """What the job wants, with the sequence as it stands now that its delta is applied."""
    request = job.payload
    if request.history is None:
        return request
    return replace(request, history=replace(request.history, token_ids=job.sequence.token_ids))


class Verifier:
    """The target model behind its engine."""

    def __init__(self, engine: Engine[RowRequest, Verification], tokenizer_files: Sequence[Path]) -> None:
        self._engine = engine
        self.tokenizer_files = tokenizer_files
        """What a coordinator needs to tokenize as the model does."""

    @property
    def model_info(self) -> ModelInfo:
        """What the model is."""
        return replace(self._engine.model.info, max_length=self._engine.max_length)

    def kv_usage(self) -> KvUsage:
        """What its KV cache holds."""
        return self._engine.usage

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
            InvalidRequestError: it may become longer than the model can read.
        """
        cached = await self._engine.open(options.max_length or self.model_info.max_length)
        try:
            yield VerifiedSequence(self._engine, cached, options)
        finally:
            self._engine.release(cached)


class VerifiedSequence:
    """One sequence that proposals are verified for."""

    def __init__(
        self, engine: Engine[RowRequest, Verification], cached: CachedSequence, options: TargetOptions
    ) -> None:
        self._engine = engine
        self._cached = cached
        self._options = options

    async def verify(self, step: VerifyStep) -> Verification:
        """Apply the step's delta and tell the rows that it asks for.

        Raises:
            InvalidRequestError: the delta or a support does not fit the sequence or the model.
        """
        self._check_supports(step)
        sampling = self._options.sampling
        history = History(self._options.prompt_length) if sampling.penalizes else None
        request = RowRequest(step, sampling, history)
        if step.row_count == 0:
            await self._engine.run(Job(self._cached, step.delta, 0, request))
            return Verification(request.base_length, ())
        return await self._engine.run(Job(self._cached, step.delta, step.row_count, request))

    def _check_supports(self, step: VerifyStep) -> None:
        size = self._engine.model.info.vocabulary_size
        for support in step.supports:
            if len(support) and not (support.min() >= 0 and support.max() < size):
                raise InvalidRequestError(
                    f"a support holds an id outside the vocabulary; ids must be in 0..{size - 1}"
                )
