"""The CPU kernels as a backend: steps, branches and sampling by them, once they have passed their trial."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
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
from tandem.engine.backends.cpu_native.plans import ExecutionPlan, MakeTrace, Trace, TraceError
from tandem.engine.backends.eager import EagerBackend, clear_room, eager_backend
from tandem.engine.backends.trial import DistrustedError, Reference, try_out
from tandem.engine.hidden_states import HeadModel
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.loading import LoadedModel
from tandem.engine.rows import TORCH_SAMPLER, Sampler
from tandem.engine.steps import BranchStep, Packing, StepBackend, run_modules
from tandem.errors import ConfigurationError
from tandem.model.types import SamplingParams

logger = logging.getLogger(__name__)


class CpuNativeBackend(EagerBackend):
    """Steps by a model's modules whose linear layers are packed, with one attention call for each layer."""

    def __init__(self, model: LoadedModel, arena: KvArena, kernels: Kernels) -> None:
        super().__init__(model, arena)
        self.attention = NativeAttention(kernels, arena)

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """See `StepBackend`; with torch's attention where a segment is so wide that it is faster."""
        if any(segment.token_count > WIDEST_SEGMENT for segment in segments):
            return super().run(segments, rows)
        return self.run_modules(segments, rows)

    def run_modules(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        layout = NativeLayout(segments, self.attention)
        return run_modules(self._model.module, layout, rows, self._model.device)


TOKEN_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224,
                256)  # fmt: skip
"""Sizes of plans. Fewer tokens are padded, which costs little where reading the weights is what takes the time."""
_WORTHWHILE_USES = 8
"""Steps of a size after which its plan is compiled while requests run: for 25 million parameters in 29 layers this
takes 0.2 to 0.5 s, and saves 20 to 45 ms a step."""
_FEW_TOKENS = 32
"""Tokens of each sequence but the first in a warm-up step: sizes above the widest segment are that and a multiple."""


class PlannedBackend(CpuNativeBackend):
    """Steps from execution plans, each compiled in the warm-up, or once its size has been wanted often enough."""

    def __init__(
        self, model: LoadedModel, arena: KvArena, kernels: Kernels, trace: Trace, reference: Reference
    ) -> None:
        super().__init__(model, arena, kernels)
        self._trace = trace
        self.reference = reference
        self._head = model.module if isinstance(model.module, HeadModel) else None
        self.plans: dict[int, ExecutionPlan] = {}
        self._uses: Counter[int] = Counter()
        """Steps that wanted a plan which was not there, by its size."""
        self.is_trusted = True
        # One of each size. A drafting head reads no prompt beside other sequences.
        sizes = [size for size in TOKEN_COUNTS if size <= WIDEST_SEGMENT or self._head is None]
        self.warm_up_steps = [
            (min(size, WIDEST_SEGMENT), *(_FEW_TOKENS,) * ((size - WIDEST_SEGMENT) // _FEW_TOKENS))
            for size in sizes
        ]

    def prompt_tokens(self, limit: int) -> int:
        """See `StepBackend`. A prompt that plans hold comes faster in parts than in one step by the modules."""
        is_faster = self.is_trusted and self._computes_wanted_rows_only
        return min(limit, WIDEST_SEGMENT) if is_faster else limit

    def run_modules(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """By the modules only where no plan is right or faster."""
        packing = Packing(segments)
        count = packing.token_count
        # Without a head, a plan computes the logits of all its tokens: beyond this many, of which few are
        # wanted, the modules are faster.
        is_better_plain = count > 8 and 2 * len(rows) < count and not self._computes_wanted_rows_only
        if not self.is_trusted or count > TOKEN_COUNTS[-1] or is_better_plain:
            return super().run_modules(segments, rows)
        size = next(size for size in TOKEN_COUNTS if size >= count)
        if size in self.plans:
            return self._replay(self.plans[size], packing, rows)
        self._uses[size] += 1
        if self.is_warm and self._uses[size] < _WORTHWHILE_USES:
            return super().run_modules(segments, rows)
        return self._try_out(size, packing, rows)

    def run_branches(self, parts: SequenceOf[BranchStep]) -> Tensor:
        """See `StepBackend`; by the model's modules where there is no plan of the size."""
        packing = Packing(parts)
        plan = self.plans.get(next((size for size in TOKEN_COUNTS if size >= packing.token_count), 0))
        if plan is None:
            return super().run_branches(parts)
        for part in parts:
            clear_room(self._arena, part)
        return self._replay(plan, packing, range(packing.token_count))

    def _replay(self, plan: ExecutionPlan, packing: Packing, rows: SequenceOf[int]) -> Tensor:
        if self._head is None:
            return plan.replay(packing, rows)
        states = self._head.states.of_parts(packing.parts)
        own_logits = plan.replay(packing, rows, states)
        return self._head.finished(packing.parts, own_logits, plan.fed_back(packing.token_count))

    @property
    def _computes_wanted_rows_only(self) -> bool:
        return any(plan.computes_wanted_rows_only for plan in self.plans.values())

    def _try_out(self, size: int, packing: Packing, rows: SequenceOf[int]) -> Tensor:
        # The last token has looked at all others. Logits of all, of a large vocabulary, take longer than the step.
        compared = sorted({0, packing.token_count - 1, *rows})
        expected = super().run_modules(packing.segments, compared)
        states = None if self._head is None else self._head.states.any_states(size)
        try:
            # Half a spread where the step fills its plan, which makes the calls of the modules. Where tokens are
            # padded, torch may choose a kernel that adds up in another order, so the error may be that of any
            # kernel: in float32, 129 tokens in the plan of 160 differ from the modules by 0.2 to 0.52 spreads.
            self.plans[size] = try_out(
                lambda: ExecutionPlan(self._trace, self.attention, size, states),
                lambda plan: self.reference.in_spreads(self._replay(plan, packing, compared), expected),
                0.5 if size == packing.token_count else self.reference.limit,
            )
        except DistrustedError as error:
            logger.warning("steps run by the model's modules", extra={"reason": str(error)})
            self.is_trusted = False
            self.plans.clear()
            # Once more: keys and values must be the modules' own
            return super().run_modules(packing.segments, rows)
        return expected[[compared.index(row) for row in rows]]


class KernelSampler(Sampler):
    """See `tandem.engine.rows.Sampler`; for logits on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def probabilities(
        self, logits: Tensor, sampling: SequenceOf[SamplingParams], columns: Tensor | None = None
    ) -> Tensor:
        """See `Sampler`. The kernels apply temperatures; torch truncates."""
        # The rows of a request have one object.
        distinct = {id(params): params for params in sampling}.values()
        if logits.dtype not in DTYPES or any(params.is_greedy or params.truncates for params in distinct):
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


@dataclass(frozen=True, slots=True)
class NativeModel:
    """The kernels for a model whose linear layers are packed for them."""

    kernels: Kernels
    reference: Reference
    trace: MakeTrace | None = None

    def backend(self, model: LoadedModel, arena: KvArena) -> StepBackend:
        if not model.is_packed:
            return eager_backend(model, arena)
        if self.trace is not None:
            try:
                return PlannedBackend(model, arena, self.kernels, self.trace(), self.reference)
            except TraceError as error:
                logger.info("steps run by the model's modules", extra={"reason": str(error)})
        return CpuNativeBackend(model, arena, self.kernels)


def load_native(model: LoadedModel, mode: str = "auto", folder: Path | None = None) -> NativeModel | None:
    """Finds or compiles the kernels, checks them, and packs the model's linear layers for them.

    None where torch's own must do; a log line says why when it is for want of a compiler or a wrong result.
    """
    if mode == "off":
        return None
    started = time.perf_counter()
    try:
        kernels = load_kernels(model.device, model.dtype, folder)
        native = _pack(model, kernels)
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
    """The kernels, each compared with torch: those that came with the installation, or else those compiled here."""
    if device.type != "cpu" or dtype not in DTYPES:
        raise BuildError(f"there are none for {dtype} on {device}")
    if bundled := bundled_kernels():
        try:
            return _load_and_compare(bundled)
        except BuildError as error:
            refused = {"library": str(bundled), "reason": str(error)}
            logger.warning("the kernels of this installation are not used", extra=refused)
    return _load_and_compare(built_kernels(folder))


def _load_and_compare(library: Path) -> Kernels:
    """Compares sampling with torch's: the trial of a model looks at logits alone."""
    kernels = Kernels(library)
    own = KernelSampler(kernels)
    torchs = TORCH_SAMPLER
    sampling = [SamplingParams(temperature) for temperature in (0.4, 1.0, 1.7)]
    logits = 4.0 * torch.randn(len(sampling), 301, generator=torch.Generator().manual_seed(5))
    probs = torchs.probabilities(logits, sampling)
    keys = torch.arange(len(sampling)) << 40
    pairs = ((own.sample(probs, keys), torchs.sample(probs, keys)), (own.argmax(logits), torchs.argmax(logits)),
             (own.topk(logits, 20)[0], torchs.topk(logits, 20)[0]))  # fmt: skip
    are_close = torch.allclose(own.probabilities(logits, sampling), probs, rtol=1e-12, atol=0.0)
    if not are_close or not all(torch.equal(*pair) for pair in pairs):
        raise BuildError("they do not sample as torch does")
    return kernels


def _pack(model: LoadedModel, kernels: Kernels) -> NativeModel:
    """Packs the model and runs it beside torch's own layers, whose logits were computed before."""
    reference = try_out(lambda: Reference(model), lambda _: 0.0, 0.0)

    native = NativeModel(kernels, reference)

    for wide_residual in (True, False) if model.dtype is torch.bfloat16 else (False,):
        try:
            pack = partial(pack_linears, model.module, kernels, wide_residual=wide_residual)
            try_out(pack, lambda _: reference.error_of(native.backend), reference.limit)
            break
        except DistrustedError as error:
            unpack_linears(model.module)
            if not wide_residual:
                raise
            logger.info("the residual stream stays bfloat16", extra={"reason": str(error)})
    return replace(native, trace=cache(partial(Trace, model.module)))
