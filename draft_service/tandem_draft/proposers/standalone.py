"""A standalone draft model: a small language model that predicts the target's next tokens (vLLM: draft_model)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tandem.drafting.proposal import Drafting, propose_head, propose_where_logits_are, with_defaults
from tandem.engine.core.engine import Engine
from tandem.engine.core.reloading import EmbeddedModel
from tandem.engine.core.selection import Backends
from tandem.engine.interface import EngineOwner, EngineSettings, ReloadableModel
from tandem.engine.models.checkpoint import TOKENIZER_FILE
from tandem.engine.rows import TORCH_SAMPLER, Sampler
from tandem.model.grammar import Grammars
from tandem.model.types import DraftOptions, ModelInfo, Proposal, RowKind
from tandem.telemetry.streams import OnStep
from tandem_draft.proposers.ahead import AheadDrafter, OutcomeHistory
from tandem_draft.proposers.mapped import MappedSequence
from tandem_draft.proposers.mapping import Vocabularies
from tandem_draft.proposers.sequence import StandaloneSequence
from tandem_draft.settings import DraftSettings


def load_standalone(
    settings: DraftSettings, on_step: OnStep = None, on_failure: Callable[[], None] | None = None
) -> StandaloneProposer:
    """Load the model that the settings name."""
    folder = settings.checkpoint
    limits = EngineSettings.of(settings)
    drafts_ahead = True
    has_vocabularies = True
    sampler = TORCH_SAMPLER
    model: ReloadableModel[Engine[Drafting, Proposal]]
    if settings.uses_vllm:
        from tandem.engine_vllm.engine import VllmModel, load_vllm
        from tandem.engine_vllm.reloading import VllmWeights

        # Workers in processes of their own would be sent the shared tokens with each step.
        has_vocabularies = settings.device_count == 1
        drafts_ahead = has_vocabularies and settings.enable_prefix_caching

        def load(folder: Path) -> VllmModel:
            return load_vllm(settings, folder, load_config=settings.draft_load_config, on_failure=on_failure)

        def make_over_vllm(runner: VllmModel) -> Engine[Drafting, Proposal]:
            return Engine(runner, propose_where_logits_are, limits, on_step=on_step, on_failure=on_failure)

        model = VllmWeights(folder, load, make_over_vllm)
    else:

        def make_engine(backends: Backends) -> Engine[Drafting, Proposal]:
            head = partial(propose_head, sampler=backends.sampler)
            return Engine(backends, head, limits, on_step=on_step, on_failure=on_failure)

        embedded = EmbeddedModel(settings, folder, make_engine)
        model = embedded
        sampler = embedded.backends.sampler
    tokenizer = folder / TOKENIZER_FILE
    return StandaloneProposer(
        model.make_engine(),
        settings.draft_top_k,
        settings.draft_support_mass,
        sampler,
        Grammars.of(tokenizer, model.info),
        drafts_ahead=drafts_ahead,
        vocabularies=Vocabularies(tokenizer, model.info) if has_vocabularies else None,
        model=model,
    )


@dataclass(eq=False)
class StandaloneProposer(EngineOwner[Engine[Drafting, Proposal]]):
    """Drafts with a model behind its engine."""

    draft_top_k: int
    support_mass: float = 1.0
    sampler: Sampler = TORCH_SAMPLER
    grammars: Grammars | None = None
    """None: proposals heed no grammar."""
    drafts_ahead: bool = True
    vocabularies: Vocabularies | None = None
    histories: defaultdict[tuple[RowKind, bool, bool, bool], OutcomeHistory] = field(
        default_factory=lambda: defaultdict(OutcomeHistory), init=False
    )

    @property
    def model_info(self) -> ModelInfo:
        maps = self.vocabularies is not None
        return replace(self._engine.info, drafts_ahead=self.drafts_ahead, maps_vocabularies=maps)

    async def start(self) -> None:
        await super().start()
        if self.grammars is not None:
            await self.grammars.prepare()

    def forget_old_weights(self) -> None:
        self.histories.clear()

    @asynccontextmanager
    async def sequence(self, options: DraftOptions) -> AsyncIterator[StandaloneSequence | MappedSequence]:
        mapped = None
        if (
            options.tokenizer_hash not in ("", self._engine.info.tokenizer_hash)
            and self.vocabularies is not None
        ):
            mapped, options = self.vocabularies.mapped(options)  # its tokens become the draft's
        grammar = None
        grammars = self.grammars if mapped is None else mapped.grammars
        if options.grammar is not None and grammars is not None:
            grammar = await grammars.open(options.grammar, options.scope)
        spare = 0 if options.ahead is None else options.ahead.branch_count * (options.ahead.token_count + 1)
        cached = await self._engine.open(
            options.max_length or self.model_info.max_length, spare, options.client, options.scope
        )
        try:
            options = with_defaults(options, self.draft_top_k, self.support_mass)
            kind = options.row_kind, options.sampling.is_greedy, options.noise_is_unknown, mapped is not None
            history = self.histories[kind]
            ahead = (
                None
                if options.ahead is None or not self.drafts_ahead
                else AheadDrafter(self._engine, cached, options, self.sampler, history, grammar)
            )
            if mapped is None:
                yield StandaloneSequence(self._engine, cached, options, ahead, grammar)
            else:
                masks = None if mapped.tokens is None else grammar
                drafted = StandaloneSequence(self._engine, cached, options, grammar=masks)
                yield MappedSequence(drafted, mapped, ahead, grammar)
        finally:
            self._engine.release(cached)
