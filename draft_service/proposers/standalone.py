"""A draft model of its own: a small language model that guesses what the target would say (vLLM: draft_model)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from draft_service.proposers.drafting import Drafting, Outcome, truncated
from draft_service.proposers.recorded_proposals import RecordedProposals
from draft_service.settings import DraftSettings
from tandem.engine.buckets import Bucket
from tandem.engine.cache import KvUsage
from tandem.engine.engine import Engine
from tandem.engine.jobs import Job
from tandem.engine.model import load_model
from tandem.engine.recording import Recorder, recorder_for
from tandem.engine.runner import StepRunner
from tandem.engine.sampling import BY_TORCH, Sampler
from tandem.engine.sequence import Sequence as CachedSequence
from tandem.engine.settings import EngineSettings
from tandem.errors import InvalidRequestError
from tandem.telemetry.streams import OnStep
from tandem.types import (
    DenseLogits,
    DraftOptions,
    ModelInfo,
    Proposal,
    ProposeStep,
    RowKind,
    SparseDistribution,
)

_RECORDED_WIDTHS = (1, 2)
"""New tokens of a draft step: one, and two after all was accepted."""

_RECORDED_COUNTS = (2, 4, 8)
"""Tokens of proposals that are recorded whole: MAX's default, and what others use; shorter ones are cut from them."""


def load_standalone(
    settings: DraftSettings, on_step: OnStep = None, on_failure: Callable[[], None] | None = None
) -> StandaloneProposer:
    """Load the model that the settings name.

    Raises:
        ConfigurationError: it cannot be served as they ask.
    """
    model = load_model(
        settings.checkpoint,
        device=settings.compute_device,
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
    engine = Engine(
        model,
        partial(propose_head, sampler=Sampler(model.kernels)),
        limits,
        on_step=on_step,
        recorder=recorder,
        make_run_ahead=partial(record_proposals, settings.draft_top_k),
        on_failure=on_failure,
    )
    return StandaloneProposer(engine, settings.draft_top_k)


def record_proposals(
    draft_top_k: int, runner: StepRunner, buckets: Sequence[Bucket], recorder: Recorder
) -> RecordedProposals:
    """What makes whole proposals of a draft's engine; see `RecordedProposals`."""
    # After a rejection one token is new to the draft, after full acceptance two: the widest bucket does for both.
    widest = [bucket for bucket in buckets if bucket.width == max(_RECORDED_WIDTHS)]
    return RecordedProposals(runner, widest, _RECORDED_COUNTS, draft_top_k, recorder)


def propose_head(
    ready: Sequence[Job[Drafting]], logits: Tensor, sampler: Sampler = BY_TORCH
) -> list[Outcome]:
    """What the draft's logits mean: one more token for each proposal in the making."""
    draftings = [job.payload for job in ready]
    if all(drafting.options.sampling.is_greedy for drafting in draftings):
        token_ids = sampler.best(logits).tolist()
    else:
        token_ids = _drawn(draftings, logits, sampler)
    for i, (drafting, token_id) in enumerate(zip(draftings, token_ids, strict=True)):
        drafting.token_ids.append(token_id)
        if drafting.options.with_token_logits:
            drafting.token_logits.append(float(logits[i, token_id]))
    return [drafting.outcome() for drafting in draftings]


def _drawn(draftings: Sequence[Drafting], logits: Tensor, sampler: Sampler) -> list[int]:
    """Draw a token for each row, and note what sparse and dense ones were drawn from."""
    token_ids = [0] * len(draftings)
    sparse = [i for i, d in enumerate(draftings) if d.options.row_kind is RowKind.SUPPORT]
    whole = [i for i, d in enumerate(draftings) if d.options.row_kind is not RowKind.SUPPORT]
    if sparse:
        own = logits if len(sparse) == len(draftings) else logits[sparse]
        _draw_sparse([draftings[i] for i in sparse], own, sparse, token_ids, sampler)
    if whole:
        probs = sampler.warped(logits[whole], [draftings[i].options.sampling for i in whole])
        drawn = sampler.raced(probs, _keys([draftings[i] for i in whole], logits))
        for i, token_id in zip(whole, drawn.tolist(), strict=True):
            token_ids[i] = token_id
            if draftings[i].options.row_kind is RowKind.DENSE:
                draftings[i].distributions.append(DenseLogits(logits[i].float().cpu().numpy()))
    return token_ids


def _draw_sparse(
    draftings: Sequence[Drafting],
    logits: Tensor,
    indices: Sequence[int],
    token_ids: list[int],
    sampler: Sampler,
) -> None:
    """Draw from the top of each distribution, which then is the whole of it.

    Any distribution is right for a draft as long as it is the one that the token was drawn from and that is told. Only
    the highest logits are therefore warped: no sum over the vocabulary is needed.
    """
    width = min(max(drafting.draft_top_k for drafting in draftings), logits.shape[-1])
    highest, columns = sampler.highest(logits, width)
    probs = sampler.warped(highest, [truncated(drafting, width) for drafting in draftings])
    # What travels is binary32, so that is what the token must be drawn from.
    probs = probs.float().double()
    drawn = sampler.raced(probs, _keys(draftings, logits), columns).tolist()
    for drafting, i, row, ids, winner in zip(
        draftings, indices, probs.cpu().numpy(), columns.cpu().numpy(), drawn, strict=True
    ):
        kept = row > 0.0
        drafting.distributions.append(SparseDistribution(ids[kept], row[kept] / row[kept].sum()))
        token_ids[i] = int(ids[winner])


def _keys(draftings: Sequence[Drafting], like: Tensor) -> Tensor:
    return torch.tensor([drafting.next_key for drafting in draftings], dtype=torch.int64, device=like.device)


class StandaloneProposer:
    """Drafts with a model behind its engine."""

    def __init__(self, engine: Engine[Drafting, Proposal], draft_top_k: int) -> None:
        self._engine = engine
        self._draft_top_k = draft_top_k

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
    async def sequence(self, options: DraftOptions) -> AsyncIterator[StandaloneSequence]:
        """Keep a sequence in the KV cache for as long as the context lives.

        Raises:
            CapacityError: there is no room for another.
            InvalidRequestError: it may become longer than the model can read.
        """
        cached = await self._engine.open(options.max_length or self.model_info.max_length)
        try:
            yield StandaloneSequence(self._engine, cached, options, options.draft_top_k or self._draft_top_k)
        finally:
            self._engine.release(cached)


class StandaloneSequence:
    """One sequence that is drafted for."""

    def __init__(
        self,
        engine: Engine[Drafting, Proposal],
        cached: CachedSequence,
        options: DraftOptions,
        draft_top_k: int,
    ) -> None:
        self._engine = engine
        self._cached = cached
        self._options = options
        self._draft_top_k = draft_top_k

    async def propose(self, step: ProposeStep) -> Proposal:
        """Apply the step's delta and draw the tokens that follow, each from the draft's distribution.

        Raises:
            InvalidRequestError: the delta does not fit the sequence or the model, or the tokens do not.
        """
        self._check_room(step)
        drafting = Drafting(step.delta.length, step.token_count, self._options, self._draft_top_k)
        if step.token_count == 0:
            await self._engine.run(Job(self._cached, step.delta, 0, drafting))
            return Proposal(step.delta.length)
        return await self._engine.run(Job(self._cached, step.delta, 1, drafting))

    def _check_room(self, step: ProposeStep) -> None:
        # Noise is keyed for all tokens at once, so that a huge count would fill the memory before one is drawn.
        room = self._cached.max_length - step.delta.length + 1  # the last token is not read
        if step.token_count > max(room, 0):
            raise InvalidRequestError(
                f"{step.token_count} tokens were asked for after {step.delta.length}, but the sequence's limit is "
                f"{self._cached.max_length}."
            )
