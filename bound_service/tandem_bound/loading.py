"""Loads a target, a drafting head for it, and joins them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from tandem.config.names import DFLASH, EAGLE, EAGLE3, MEDUSA, MTP
from tandem.engine.core.engine import Engine
from tandem.engine.core.selection import choose_backends
from tandem.engine.hidden_states import HiddenStateTap, PairedStates, as_model
from tandem.engine.interface import EngineSettings
from tandem.engine.kv_cache.arena import memory_allowance
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.models.heads.dflash import DFlashHead
from tandem.engine.models.heads.eagle import Eagle3Head, EagleHead
from tandem.engine.models.heads.interface import BlockHead, DraftHead
from tandem.engine.models.heads.medusa import MedusaHeads
from tandem.engine.models.heads.mtp import MtpHead
from tandem.engine.models.loading import LoadedModel
from tandem.telemetry.streams import OnStep
from tandem_bound.heads import chosen_head
from tandem_draft.proposers.heads import BoundProposer, extend_by_passes
from tandem_target.settings import TargetSettings
from tandem_target.verifier import Verifier, load_target, make_verifier

HEADS: Mapping[str, type[DraftHead]] = {
    EAGLE3: Eagle3Head,
    EAGLE: EagleHead,
    MEDUSA: MedusaHeads,
    MTP: MtpHead,
    DFLASH: DFlashHead,
}


@dataclass(frozen=True, slots=True)
class BoundPair:
    """A target, and the draft that reads it."""

    verifier: Verifier
    proposer: BoundProposer


def load_pair(
    settings: TargetSettings, on_step: OnStep = None, on_failure: Callable[[], None] | None = None
) -> BoundPair:
    """Load both; the head runs on the target's device and in its dtype."""
    method, head_folder = chosen_head(settings)
    # Refuses before the target's weights are read.
    head = HEADS[method](head_folder or settings.model)
    target = load_target(settings)
    head.load(target)
    tap, targets = HiddenStateTap(target, head), dict[str, Sequence]()
    own, others = (
        sum(each.values_per_token for each in layers) for layers in (head.layers, tap.model.layers)
    )
    limits, settings = _shared(EngineSettings.of(settings), settings, own / (own + others), target)
    name = f"{target.info.name} ({MTP})" if head_folder is None else head_folder.name
    # The head's cache first: on a GPU the target's then takes what is left of the process's share.
    states = PairedStates(tap)
    # Blocks have an attention of their own.
    mode = "off" if isinstance(head, BlockHead) else settings.compile
    backends = choose_backends(as_model(head, states, name), mode, settings.compile_cache)
    extend = partial(extend_by_passes, head=head, pairings=states.pairings, sampler=backends.sampler)
    # A pair's keys depend on a token that its own sequence does not show.
    engine = Engine(backends, extend, replace(limits, prefix_reuse=False), on_failure=on_failure)
    proposer = BoundProposer(engine, head, states.pairings, targets, method, settings.draft_repeats)
    model = replace(tap.model, info=replace(target.info, drafting_method=method))
    runner = choose_backends(model, settings.compile, settings.compile_cache, tap)
    verifier = make_verifier(runner, settings, on_step, on_failure, targets)
    proposer.open_grammar = verifier.open_grammar
    return BoundPair(verifier, proposer)


def _shared(
    limits: EngineSettings, settings: TargetSettings, share: float, target: LoadedModel
) -> tuple[EngineSettings, TargetSettings]:
    """Divide the memory: return the head's limits and the target's settings."""
    given = limits.kv_cache_bytes
    allowed = memory_allowance(limits.device_memory_utilization, target.device) if given is None else given
    own = max(int(allowed * share), 1)
    if given is not None:
        settings = settings.model_copy(update={"kv_cache_memory_bytes": max(given - own, 1)})
    return replace(limits, kv_cache_bytes=own), settings
