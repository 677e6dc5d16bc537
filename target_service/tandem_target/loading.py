"""Loads a target model, with a drafting head of its own where the settings name one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from tandem.config.names import DFLASH, EAGLE, EAGLE3, MEDUSA, MTP
from tandem.engine.core.engine import RowEngine
from tandem.engine.core.inline import InlineEngine
from tandem.engine.core.reloading import EmbeddedModel
from tandem.engine.core.selection import choose_backends
from tandem.engine.hidden_states import HiddenStateTap, PairedStates, as_model
from tandem.engine.interface import EngineSettings
from tandem.engine.kv_cache.arena import memory_allowance
from tandem.engine.models.checkpoint import find_weights, weights_fingerprint
from tandem.engine.models.heads.dflash import DFlashHead
from tandem.engine.models.heads.eagle import Eagle3Head, EagleHead
from tandem.engine.models.heads.interface import BlockHead, DraftHead
from tandem.engine.models.heads.medusa import MedusaHeads
from tandem.engine.models.heads.mtp import MtpHead
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.engine.steps import ModelRunner
from tandem.telemetry.streams import OnStep
from tandem_target.chosen_head import chosen_head
from tandem_target.features import FeatureSender, Projection
from tandem_target.head_drafter import HeadDrafter, extend_by_passes
from tandem_target.hidden_state_files import hidden_state_files
from tandem_target.settings import TargetSettings
from tandem_target.verifier import TOKENIZER_FILES, Verifier

HEADS: Mapping[str, type[DraftHead]] = {
    EAGLE3: Eagle3Head,
    EAGLE: EagleHead,
    MEDUSA: MedusaHeads,
    MTP: MtpHead,
    DFLASH: DFlashHead,
}

OnFailure = Callable[[], None] | None


def load_verifier(
    settings: TargetSettings,
    on_step: OnStep = None,
    on_failure: OnFailure = None,
    *,
    on_head_step: OnStep = None,
) -> Verifier:
    """Load the model that the settings name. `on_head_step` learns of the steps of the target's own head."""
    if settings.uses_vllm:
        return _load_over_vllm(settings, on_step, on_failure)
    if settings.has_head:
        return _load_with_head(settings, on_step, on_failure, on_head_step)
    if settings.features is not None:
        return _load_with_features(settings, on_step, on_failure)
    if settings.shared_storage_path is not None:
        return _load_with_files(settings, on_step, on_failure)

    def make_engine(backends: ModelRunner) -> RowEngine:
        return RowEngine(backends, EngineSettings.of(settings), on_step, on_failure=on_failure)

    model = EmbeddedModel(settings, settings.model, make_engine)
    verifier = _verifier(model.make_engine(), settings)
    verifier.model = model
    return verifier


def _load_over_vllm(settings: TargetSettings, on_step: OnStep, on_failure: OnFailure) -> Verifier:
    """Load a target that vLLM runs, with its head if it has one."""
    from tandem.engine_vllm.engine import VllmModel, load_vllm, vllm_head
    from tandem.engine_vllm.reloading import VllmWeights

    chosen = chosen_head(settings) if settings.has_head else None
    head = None if chosen is None else vllm_head(*chosen)

    def load(folder: Path) -> VllmModel:
        return load_vllm(
            settings,
            folder,
            proposal_length=settings.num_speculative_tokens,
            head=head,
            on_failure=on_failure,
        )

    def make_engine(model: VllmModel) -> RowEngine:
        limits = EngineSettings.of(settings)
        return RowEngine(model, limits, on_step, on_failure=on_failure, drafter=model.heads)

    if chosen is None:
        model = VllmWeights(settings.model, load, make_engine)
        verifier = _verifier(model.make_engine(), settings)
        verifier.model = model
        return verifier
    vllm = load(settings.model)
    verifier = _verifier(make_engine(vllm), settings)
    verifier.own_head = vllm.heads
    verifier.fixed_because = HEAD_READS_STATES.format(chosen[0])
    return verifier


HEAD_READS_STATES = "it hosts the drafting head {}, which reads the states of the present ones"
"""See `EngineOwner.fixed_because`."""


def _load_with_files(settings: TargetSettings, on_step: OnStep, on_failure: OnFailure) -> Verifier:
    """Load a target that writes its hidden states."""
    target = _load_target(settings)
    files = hidden_state_files(settings, target)
    assert files is not None
    backends = choose_backends(files.tap.model, settings.compile, settings.compile_cache, files.tap)
    engine = RowEngine(backends, EngineSettings.of(settings), on_step, on_failure=on_failure)
    verifier = _verifier(engine, settings)
    verifier.files = files
    verifier.fixed_because = "it writes the hidden states of its present weights (--shared-storage-path)"
    return verifier


def _load_with_features(settings: TargetSettings, on_step: OnStep, on_failure: OnFailure) -> Verifier:
    """Load a target that sends what a head on another device reads."""
    assert settings.head is not None, "checked before"
    head = Eagle3Head(settings.head)
    target = _load_target(settings)
    head.load(target)
    fingerprint = weights_fingerprint(settings.head, find_weights(settings.head))
    tap = HiddenStateTap(target, Projection(head))
    model = replace(tap.model, info=replace(target.info, features_head=fingerprint))
    backends = choose_backends(model, settings.compile, settings.compile_cache, tap)
    features = FeatureSender(tap, fingerprint)
    engine = RowEngine(
        backends, EngineSettings.of(settings), on_step, on_failure=on_failure, features=features
    )
    verifier = _verifier(engine, settings)
    verifier.fixed_because = "a head on another device reads the states of its present weights (--features)"
    return verifier


def _load_target(settings: TargetSettings) -> LoadedModel:
    return load_model(
        settings.model, device=settings.device, dtype=settings.compute_dtype, threads=settings.threads
    )


def _verifier(engine: RowEngine, settings: TargetSettings) -> Verifier:
    folder = settings.tokenizer or settings.model
    files = tuple(path for name in TOKENIZER_FILES if (path := folder / name).is_file())
    return Verifier(engine, files)


def _load_with_head(
    settings: TargetSettings, on_step: OnStep, on_failure: OnFailure, on_head_step: OnStep
) -> Verifier:
    """Load a target and its head, which runs on the target's device and in its dtype."""
    method, head_folder = chosen_head(settings)
    # Refuses before the target's weights are read.
    head = HEADS[method](head_folder or settings.model)
    target = _load_target(settings)
    head.load(target)
    tap = HiddenStateTap(target, head)
    values = [sum(each.values_per_token for each in layers) for layers in (head.layers, tap.model.layers)]
    head_limits, target_limits = divide_memory(EngineSettings.of(settings), values[0] / sum(values), target)
    name = f"{target.info.name} ({MTP})" if head_folder is None else head_folder.name
    # The head's cache first: on a GPU the target's then takes what is left of the process's share.
    states = PairedStates(tap)
    # Blocks have an attention of their own.
    mode = "off" if isinstance(head, BlockHead) else settings.compile
    backends = choose_backends(as_model(head, states, name), mode, settings.compile_cache)
    extend = partial(extend_by_passes, head=head, pairings=states.pairings, sampler=backends.sampler)
    inline = InlineEngine(backends, extend, head_limits, on_head_step)
    own_head = HeadDrafter(inline, head, states.pairings, repeats=settings.draft_repeats)
    model = replace(tap.model, info=replace(target.info, drafting_method=method))
    runner = choose_backends(model, settings.compile, settings.compile_cache, tap)
    engine = RowEngine(runner, target_limits, on_step, on_failure=on_failure, drafter=own_head)
    verifier = _verifier(engine, settings)
    verifier.own_head = own_head
    verifier.fixed_because = HEAD_READS_STATES.format(name)
    return verifier


def divide_memory(
    limits: EngineSettings, share: float, target: LoadedModel
) -> tuple[EngineSettings, EngineSettings]:
    """The limits of the head, which gets this share of the memory, and of the target."""
    given = limits.kv_cache_bytes
    allowed = memory_allowance(limits.device_memory_utilization, target.device) if given is None else given
    own = max(int(allowed * share), 1)
    # A pair's keys depend on a token that its own sequence does not show.
    head_limits = replace(limits, kv_cache_bytes=own, prefix_reuse=False)
    if given is not None:
        limits = replace(limits, kv_cache_bytes=max(given - own, 1))
    return head_limits, limits
