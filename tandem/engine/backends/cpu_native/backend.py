"""The CPU kernels as a backend: steps, branches and sampling by them, once they have passed their trial."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache, partial
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.backends.cpu_native.layers import (
    WIDEST_SEGMENT,
    NativeAttention,
    NativeLayout,
    pack_linears,
    unpack_linears,
)
from tandem.engine.backends.cpu_native.library.build import BuildError, built_kernels, bundled_kernels
from tandem.engine.backends.cpu_native.library.kernels import DTYPES, Kernels
from tandem.engine.backends.cpu_native.plans import MakeTrace, PlannedSteps, TraceError, traced
from tandem.engine.backends.eager import EagerBackend, clear_room, eager_backend
from tandem.engine.backends.trial import DistrustedError, Reference, trusted
from tandem.engine.hidden_states import HeadModel
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.loading import LoadedModel
from tandem.engine.rows import Sampler
from tandem.engine.steps import Packing, SequenceBranches, StepBackend, run_modules
from tandem.errors import ConfigurationError
from tandem.types import SamplingParams

logger = logging.getLogger(__name__)


class CpuNativeBackend(EagerBackend):
    """Steps by a model's modules whose linear layers are packed, with one attention call for each layer; from execution
    plans where the model's pass can be compiled to them."""

    def __init__(
        self,
        model: LoadedModel,
        arena: KvArena,
        kernels: Kernels,
        reference: Reference,
        trace: MakeTrace | None,
    ) -> None:
        super().__init__(model, arena)
        self.attention = NativeAttention(kernels, arena, model.layers)
        self.plans: PlannedSteps | None = None
        """None where the pass is not the same list of operations for all tokens."""
        if trace is None:
            return
        head = model.module if isinstance(model.module, HeadModel) else None
        try:
            self.plans = PlannedSteps(trace(), self.attention, reference, self.run_modules, head)
            self.warm_up_steps = self.plans.warm_up_steps
        except TraceError as error:
            logger.info("steps run by the model's modules", extra={"reason": str(error)})

    def prompt_tokens(self, limit: int) -> int:
        return limit if self.plans is None else self.plans.prompt_tokens(limit)

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """See `StepBackend`; with torch's attention where a segment is so wide that it is faster."""
        if any(segment.token_count > WIDEST_SEGMENT for segment in segments):
            return super().run(segments, rows)
        return self.run_modules(segments, rows) if self.plans is None else self.plans.run(segments, rows)

    def run_modules(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """A step without a plan."""
        layout = NativeLayout(segments, self.attention)
        return run_modules(self._model.module, layout, rows, self._model.device)

    def run_branches(self, parts: SequenceOf[SequenceBranches]) -> Tensor:
        """See `StepBackend`; by the model's modules where there is no plan of the size."""
        for part in parts:
            clear_room(self._arena, part)
        packing = Packing(parts)
        logits = None if self.plans is None else self.plans.replay(packing, range(packing.token_count))
        return super().run_branches(parts) if logits is None else logits


class KernelSampler(Sampler):
    """See `tandem.engine.rows.Sampler`; for logits on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def probabilities(
        self, logits: Tensor, sampling: Sequence[SamplingParams], columns: Tensor | None = None
    ) -> Tensor:
        """See `Sampler`. The kernels apply temperatures; torch truncates."""
        # The rows of a request have one object.
        distinct = {id(params): params for params in sampling}.values()
        if logits.dtype not in DTYPES or not all(map(_has_only_a_temperature, distinct)):
            return super().probabilities(logits, sampling, columns)
        return self._kernels.probabilities(logits, [params.temperature for params in sampling])

    def sample(self, probs: Tensor, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
        return self._kernels.sample(probs, keys, token_ids)

    def argmax(self, logits: Tensor) -> Tensor:
        if logits.dtype not in DTYPES:
            return super().argmax(logits)
        # Of 16 rows of 2,048 bfloat16 in 10 us; torch takes 116. Lists are faster here than arrays.
        found, columns = self._kernels.topk(logits, 1)
        winners = columns.view(-1)
        for row, (value,) in enumerate(found.tolist()):
            if not isfinite(value):
                winners[row] = -1
        return winners

    def topk(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if logits.dtype not in DTYPES:
            return super().topk(logits, count)
        return self._kernels.topk(logits, count)


def _has_only_a_temperature(params: SamplingParams) -> bool:
    return not params.is_greedy and not params.truncates


@dataclass(frozen=True, slots=True)
class NativeModel:
    """A model whose linear layers are packed for the kernels."""

    model: LoadedModel
    kernels: Kernels
    reference: Reference
    trace: MakeTrace | None
    """None compiles no execution plans."""

    def backend(self, arena: KvArena) -> StepBackend | None:
        """The backend of an arena; None for a model whose attention cannot be packed."""
        if not self.model.is_packed:
            return None
        return CpuNativeBackend(self.model, arena, self.kernels, self.reference, self.trace)


def load_native(model: LoadedModel, mode: str = "auto", folder: Path | None = None) -> NativeModel | None:
    """Finds or compiles the kernels, checks them, and packs the model's linear layers for them.

    Returns:
        None where torch's own must do; a log line says why when it is for want of a compiler or a wrong result.

    Raises:
        ConfigurationError: `mode` is ``on`` and the kernels cannot be used.
    """
    if mode == "off":
        return None
    started = time.perf_counter()
    try:
        kernels = load_kernels(model.device, model.dtype, folder)
        native = _packed(model, kernels)
    except (BuildError, DistrustedError) as error:
        if mode == "on":
            raise ConfigurationError(f"compile is on, but the kernels cannot be used: {error}.") from None
        if model.device.type == "cpu":
            logger.warning("no compiled kernels; torch's own are used", extra={"reason": str(error)})
        return None
    seconds = round(time.perf_counter() - started, 3)
    logger.info("kernels ready", extra={"seconds": seconds, "library": str(kernels.library)})
    return native


def load_kernels(device: torch.device, dtype: torch.dtype, folder: Path | None = None) -> Kernels:
    """The kernels, each compared with torch: those that came with the installation, or else those compiled here.

    Raises:
        BuildError: there are none for this device and dtype, they cannot be built, or their results are wrong.
    """
    if device.type != "cpu" or dtype not in DTYPES:
        raise BuildError(f"there are none for {dtype} on {device}")
    if bundled := bundled_kernels():
        try:
            return _checked(bundled)
        except BuildError as error:
            logger.warning(
                "the kernels of this installation are not used",
                extra={"library": str(bundled), "reason": str(error)},
            )
    return _checked(built_kernels(folder))


def _checked(library: Path) -> Kernels:
    kernels = Kernels(library)
    if not _samples_alike(kernels, Sampler()):
        raise BuildError("they do not sample as torch does")
    return kernels


def _samples_alike(kernels: Kernels, sampler: Sampler) -> bool:
    """Compare sampling with torch's: the trial of a model looks at logits alone."""
    generator = torch.Generator().manual_seed(5)
    sampling = [SamplingParams(temperature) for temperature in (0.4, 1.0, 1.7)]
    logits = 4.0 * torch.randn(len(sampling), 301, generator=generator)
    probs, keys = sampler.probabilities(logits, sampling), torch.arange(len(sampling)) << 40
    own = KernelSampler(kernels)
    pairs = ((own.sample(probs, keys), sampler.sample(probs, keys)), (own.argmax(logits), sampler.argmax(logits)),
             (own.topk(logits, 20)[0], sampler.topk(logits, 20)[0]))  # fmt: skip
    return all(torch.equal(*pair) for pair in pairs) and torch.allclose(
        own.probabilities(logits, sampling), probs, rtol=1e-12, atol=0.0
    )


def _packed(model: LoadedModel, kernels: Kernels) -> NativeModel:
    """Packs the model and runs it beside torch's own layers, whose logits were computed before."""
    reference = trusted(lambda: Reference(model), lambda _: 0.0, 0.0)

    def steps(model: LoadedModel, arena: KvArena) -> StepBackend:
        packs = model.is_packed
        return (
            CpuNativeBackend(model, arena, kernels, reference, None) if packs else eager_backend(model, arena)
        )

    def pack(wide_residual: bool) -> None:
        try:
            trusted(
                lambda: pack_linears(model.module, kernels, wide_residual=wide_residual),
                lambda _: reference.error_of(steps),
                reference.limit,
            )
        except DistrustedError:
            unpack_linears(model.module)
            raise

    try:
        pack(wide_residual=model.dtype is torch.bfloat16)
    except DistrustedError as error:
        if model.dtype is not torch.bfloat16:
            raise
        logger.info("the residual stream stays bfloat16", extra={"reason": str(error)})
        pack(wide_residual=False)
    return NativeModel(model, kernels, reference, cache(partial(traced, model.module)))
