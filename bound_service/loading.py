"""Loads a target, a drafting head for it, and joins them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bound_service.service import head_method
from draft_service.proposers.heads import BoundProposer, HeadKind, block_kind, parallel_kind
from tandem.config.names import MTP
from tandem.engine.core.selection import Backends, choose_backends
from tandem.engine.hidden_states import BoundSequences, HiddenStateTap, PairedStates, as_model
from tandem.engine.kv_cache.arena import memory_allowance
from tandem.engine.models.heads.interface import BlockHead, DraftHead
from tandem.engine.models.heads.loading import head_loader
from tandem.engine.models.loading import LoadedModel
from tandem.engine.settings import EngineSettings
from tandem.telemetry.streams import OnStep
from target_service.settings import TargetSettings
from target_service.verifier import Verifier, load_target, make_verifier


@dataclass(frozen=True, slots=True)
class BoundPair:
    """A target, and the draft that reads it."""

    verifier: Verifier
    proposer: BoundProposer


def load_pair(
    settings: TargetSettings,
    head_folder: Path | None,
    on_step: OnStep = None,
    on_draft_step: OnStep = None,
    on_failure: Callable[[], None] | None = None,
) -> BoundPair:
    """Load both.

    Args:
        settings: The target's. The head runs on its device and in its dtype.
        head_folder: The head's checkpoint; None for the layers for multi-token prediction in the target's own.
        on_step: Called after each step of the target, for metrics.
        on_draft_step: Likewise of the head.
        on_failure: Called when one of the engines has ended by itself.

    Raises:
        ConfigurationError: the target cannot be served as the settings ask, or the head is not one of this target's.
    """
    method = head_method(settings, head_folder)
    load_head = head_loader(
        head_folder or settings.model, method
    )  # refuses before the target's weights are read
    target = load_target(settings)
    head = load_head(target)
    tap, bound = HiddenStateTap(target, head), BoundSequences()
    own, others = (
        sum(each.values_per_token for each in layers) for layers in (head.layers, tap.model.layers)
    )
    limits, settings = _shared(
        EngineSettings.of(settings, target.device.type), settings, own / (own + others), target
    )
    name = f"{target.info.name} ({MTP})" if head_folder is None else head_folder.name
    # The head's cache first: on a GPU the target's then takes what is left of the process's share.
    states = PairedStates(tap, head.state_size, target.dtype, target.device)
    backends = _head_backends(as_model(head, states, target, name, head.architecture), head, settings)
    proposer = BoundProposer(backends, states, bound, limits, method, _kind(head), on_draft_step, on_failure)
    model = replace(tap.model, info=replace(target.info, drafting_method=method))
    verifier = make_verifier(model, settings, on_step, on_failure, tap, bound)
    return BoundPair(verifier, proposer)


def _kind(head: DraftHead) -> HeadKind | None:
    """How its passes become a proposal; None for one token each."""
    if isinstance(head, BlockHead):
        return block_kind(head.block_size, head.mask_token_id)
    return parallel_kind(head.tokens_per_pass) if head.tokens_per_pass > 1 else None


def _head_backends(model: LoadedModel, head: DraftHead, settings: TargetSettings) -> Backends:
    """CPU kernels and execution plans where the head has the engine's attention; blocks have one of their own."""
    return choose_backends(
        model,
        compile_mode="off" if isinstance(head, BlockHead) else settings.compile,
        compile_cache=settings.compile_cache,
    )


def _shared(
    limits: EngineSettings, settings: TargetSettings, share: float, target: LoadedModel
) -> tuple[EngineSettings, TargetSettings]:
    """The head's limits with its share of the memory, and the target's settings with the rest."""
    given = limits.kv_cache_bytes
    allowed = memory_allowance(limits.device_memory_utilization, target.device) if given is None else given
    own = max(int(allowed * share), 1)
    if given is not None:
        settings = settings.model_copy(update={"kv_cache_memory_bytes": max(given - own, 1)})
    return replace(limits, kv_cache_bytes=own), settings
