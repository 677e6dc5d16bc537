"""Runs the target model for the servicer: sequences in, verifications out."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from tandem.engine.backends.selection import choose_backends
from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Done, Failed, Job, non_finite
from tandem.engine.hidden_states import BoundSequences, HiddenStateTap
from tandem.engine.kv_cache.arena import KvUsage
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.engine.rows import Adjustments, History, RowRequest, check_ids, verifications
from tandem.engine.sampler import TORCH_SAMPLER, Sampler
from tandem.engine.settings import EngineSettings, prefill_chunk_tokens
from tandem.errors import InvalidRequestError, NonFiniteLogitsError
from tandem.fair_places import extra_places
from tandem.telemetry.streams import OnStep
from tandem.types import ModelFeature, ModelInfo, TargetOptions, Verification, VerifyStep
from target_service.hidden_state_files import HiddenStateFiles, hidden_state_files
from target_service.settings import TargetSettings

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def load_verifier(
    settings: TargetSettings, on_step: OnStep = None, on_failure: Callable[[], None] | None = None
) -> Verifier:
    """Load the model that the settings name.

    Raises:
        ConfigurationError: it cannot be served as they ask.
    """
    target = load_target(settings)
    files = hidden_state_files(settings, target)
    if files is None:
        return make_verifier(target, settings, on_step, on_failure)
    return make_verifier(files.tap.model, settings, on_step, on_failure, files.tap, files=files)


def load_target(settings: TargetSettings) -> LoadedModel:
    """Load the model alone.

    Raises:
        ConfigurationError: it cannot be loaded as the settings ask.
    """
    return load_model(
        settings.model,
        device=settings.device,
        dtype=settings.compute_dtype,
        threads=settings.threads,
    )


def make_verifier(
    model: LoadedModel,
    settings: TargetSettings,
    on_step: OnStep = None,
    on_failure: Callable[[], None] | None = None,
    tap: HiddenStateTap | None = None,
    bound: BoundSequences | None = None,
    files: HiddenStateFiles | None = None,
) -> Verifier:
    """Put a loaded model to work.

    Args:
        model: From `load_target`, or the tap's.
        settings: Its limits.
        on_step: Called after each step, for metrics.
        on_failure: Called when the engine's thread has ended by itself.
        tap: Takes hidden states out of its steps, for a draft beside it.
        bound: Learns of each sequence, for that draft.
        files: Receive the hidden states that the tap takes out.

    Raises:
        ConfigurationError: it cannot be served as the settings ask.
    """
    backends = choose_backends(
        model,
        compile_mode=settings.compile,
        compile_cache=settings.compile_cache,
        tap=tap,
    )
    head = partial(verify_head, sampler=backends.sampler)
    limits = engine_settings(settings, model)
    engine = Engine(model, head, limits, on_step, backends=backends, on_failure=on_failure)
    tokenizer_files = tuple(path for name in TOKENIZER_FILES if (path := settings.model / name).is_file())
    return Verifier(engine, tokenizer_files, bound, files)


def engine_settings(settings: TargetSettings, model: LoadedModel) -> EngineSettings:
    """The limits of the model's engine."""
    return EngineSettings(
        max_length=settings.max_length,
        max_sequences=settings.max_sequences + extra_places(settings.max_sequences),
        kept_sequences=extra_places(settings.max_sequences),
        prefill_chunk_tokens=prefill_chunk_tokens(settings.max_num_batched_tokens, model.device.type),
        kv_cache_bytes=settings.kv_cache_memory_bytes,
        device_memory_utilization=settings.device_memory_utilization,
        prefix_reuse=settings.enable_prefix_caching,
        step_timeout_seconds=settings.step_timeout_seconds,
    )


def verify_head(
    ready: Sequence[Job[RowRequest]], logits: Tensor, sampler: Sampler = TORCH_SAMPLER
) -> list[Done[Verification] | Failed]:
    """Head of the target's engine: logits become the rows that each job asks for."""
    requests = [_request(job) for job in ready]
    found = verifications(requests, logits, sampler)
    return [
        non_finite(request.base_length) if verification is None else Done(verification)
        for request, verification in zip(requests, found, strict=True)
    ]


def _request(job: Job[RowRequest]) -> RowRequest:
    """The job's request, with the sequence after its delta."""
    request = job.payload
    if request.history is None:
        return request
    return replace(request, history=replace(request.history, token_ids=job.sequence.token_ids))


class Verifier:
    """The target model behind its engine."""

    def __init__(
        self,
        engine: Engine[RowRequest, Verification],
        tokenizer_files: Sequence[Path],
        bound: BoundSequences | None = None,
        files: HiddenStateFiles | None = None,
    ) -> None:
        """
        Args:
            engine: Runs the model.
            tokenizer_files: See the attribute.
            bound: Learns of each sequence, where a draft reads the model's hidden states.
            files: Receive the hidden states of finished sequences.
        """
        self._engine = engine
        self._bound = bound or BoundSequences()
        self._files = files
        self.tokenizer_files = tokenizer_files
        """Files with which a coordinator tokenizes as the model does."""

    @property
    def model_info(self) -> ModelInfo:
        """Information about the model."""
        return replace(
            self._engine.model.info,
            max_length=self._engine.max_length,
            features=frozenset(ModelFeature),
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
        if self._files is not None:
            await self._files.close()

    @asynccontextmanager
    async def sequence(self, options: TargetOptions) -> AsyncIterator[VerifiedSequence]:
        """Keep a sequence in the KV cache for as long as the context lives.

        Raises:
            CapacityError: there is no room for another.
            InvalidRequestError: it may become longer than the model can read, or adjusts logits of ids that the model
                does not have.
        """
        adjustments = self._adjustments(options)
        longest = options.max_length or self.model_info.max_length
        cached = await self._engine.open(longest, client=options.client)
        self._bound.open(options.request_id, cached)
        sequence = VerifiedSequence(self._engine, cached, options, adjustments)
        try:
            yield sequence
            if self._files is not None:  # not for a request that was abandoned, which leaves by an exception
                await sequence.write_states(self._files)
        finally:
            self._bound.close(options.request_id, cached)
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
        self._kept_length = 0
        """Tokens that will not be taken back, as far as is known."""

    def keep(self, token_count: int | None) -> None:
        """Learn, at the end, how many of the first tokens the coordinator keeps; None if it did not say."""
        if token_count is not None:
            self._kept_length = token_count

    async def write_states(self, files: HiddenStateFiles) -> None:
        """Write the hidden states of the tokens that were kept. Only a log line tells if it fails."""
        count = min(self._kept_length, self._cached.length)
        await files.take(self._engine, self._cached, count, self._options.request_id)

    async def verify(self, step: VerifyStep) -> Verification:
        """Apply the step's delta and compute the requested rows.

        Raises:
            InvalidRequestError: the delta or a support does not fit the sequence or the model.
            NonFiniteLogitsError: the model computed logits that are not finite.
        """
        self._check_supports(step)
        self._kept_length = step.delta.base_length + len(step.delta.token_ids) - max(step.row_count - 1, 0)
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
