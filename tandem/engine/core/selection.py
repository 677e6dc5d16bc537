"""Chooses how a model's steps are run."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.backends.cpu_native.backend import KernelSampler, NativeModel, load_native
from tandem.engine.backends.eager import eager_backend
from tandem.engine.hidden_states import HiddenStateTap
from tandem.engine.interface import EngineSettings, RowRequest
from tandem.engine.kv_cache.arena import KvArena, arena_pages
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.models.loading import LoadedModel, fix_rotary_frequencies
from tandem.engine.rows import TORCH_SAMPLER, LaunchedRows, Sampler, launch_rows
from tandem.engine.steps import StepBackend
from tandem.model.types import ModelInfo


@dataclass(frozen=True, slots=True)
class Backends:
    """The ways to run a model's steps beside its own modules."""

    model: LoadedModel
    native: NativeModel | None = None
    tap: HiddenStateTap | None = None
    """Takes hidden states out of the steps, for a drafting head."""

    @property
    def info(self) -> ModelInfo:
        return self.model.info

    @property
    def device(self) -> torch.device:
        return self.model.device

    def allocate(self, settings: EngineSettings, max_length: int) -> tuple[PagedCache, StepBackend]:
        """See `ModelRunner`. The model's rotary frequencies are fixed for the longest sequence."""
        model = self.model
        fix_rotary_frequencies(model.module, max_length, model.device)
        pages = arena_pages(model.layers, settings, max_length, model.dtype, model.device)
        arena = KvArena(model.layers, pages, model.dtype, model.device)
        return PagedCache(arena, reuses_prefixes=settings.prefix_reuse), self.steps(arena)

    def launch_rows(self, requests: SequenceOf[RowRequest], logits: Tensor) -> LaunchedRows:
        return launch_rows(requests, logits, self.sampler)

    def are_finite(self, logits: Tensor) -> bool:
        return bool(logits.amax(dim=-1).isfinite().all())

    def close(self) -> None:
        """See `ModelRunner`: the memory is this process's own."""

    @property
    def sampler(self) -> Sampler:
        return TORCH_SAMPLER if self.native is None else KernelSampler(self.native.kernels)

    def steps(self, arena: KvArena) -> StepBackend:
        """Runs steps over an arena, which must be empty."""
        if self.tap is not None:
            self.tap.attach(arena)
        return (
            eager_backend(self.model, arena)
            if self.native is None
            else self.native.backend(self.model, arena)
        )


def choose_backends(
    model: LoadedModel,
    compile_mode: str = "auto",
    compile_cache: Path | None = None,
    tap: HiddenStateTap | None = None,
) -> Backends:
    """The backends that this machine has for a model. `compile_mode` ``auto`` uses CPU kernels where they work, ``on``
    demands them (ConfigurationError), ``off`` leaves all to torch."""
    return Backends(model, load_native(model, compile_mode, compile_cache), tap)
