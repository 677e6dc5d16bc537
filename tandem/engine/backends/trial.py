"""Trials of a backend: its results beside those of torch in a wider dtype, before anything is served by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tandem.engine.backends.eager import eager_backend
from tandem.engine.kv_cache.arena import PAGE_TOKENS, KvArena, group_layers, pages_for
from tandem.engine.kv_cache.paged_cache import PagedCache
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.models.loading import LoadedModel
from tandem.engine.steps import StepBackend

_FLOATS = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))
_CASTS = frozenset((Tensor.float, Tensor.half, Tensor.bfloat16))


_WIDENED_AT_ONCE = 1 << 19
"""Numbers of a weight that are in memory in the wider dtype at once."""


class ComputingIn(TorchFunctionMode):
    """All of torch's functions compute in a wider `dtype`: what they are called with is widened, a layer's weights
    while it computes. What they write to in place must have that dtype already."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: SequenceOf[type],
        args: SequenceOf[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _CASTS:
            return args[0].to(self._dtype)
        # An attribute such as `shape`, for which a whole weight would be widened
        if func.__name__ == "__get__":
            return func(*args, **kwargs or {})
        # The two that read a matrix as tall as the vocabulary: widened as a whole it may outweigh the model
        if func is nn.functional.embedding:
            return self._widen(func(*args, **kwargs or {}))
        if func is nn.functional.linear:
            return self._linear(*args, **kwargs or {})
        args, kwargs = tree_map(self._widen, (tuple(args), dict(kwargs or {})))
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if self._dtype is not torch.float64:
                raise
            # Some of torch's functions, such as the product of a mixture's experts, do not take float64.
            args, kwargs = tree_map(
                lambda value: value.float() if getattr(value, "dtype", None) is torch.float64 else value,
                (args, kwargs),
            )
            return tree_map(self._widen, func(*args, **kwargs))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        rows = max(1, _WIDENED_AT_ONCE // weight.shape[1])
        wide: Tensor = self._widen(input)
        product = wide.new_empty((*wide.shape[:-1], weight.shape[0]))
        # Written into one result: small ones between the wide parts would keep malloc from using their memory again
        for part, place in zip(torch.split(weight, rows), torch.split(product, rows, dim=-1), strict=True):
            place.copy_(wide @ self._widen(part).mT)
        if bias is not None:
            product += self._widen(bias)
        return product

    def _widen(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in _FLOATS and value.dtype is not self._dtype:
            return value.to(self._dtype)
        return self._dtype if isinstance(value, torch.dtype) and value in _FLOATS else value


T = TypeVar("T")

_WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""The dtype that stands for exact arithmetic, by the dtype that a model computes in."""

MAX_ERROR = {torch.float32: 10.0, torch.bfloat16: 1.5, torch.float16: 1.5}
"""The largest error that is trusted, in spreads. Correct kernels round bfloat16 where the modules do, or less
often, and measure at most 1.2; float32 has no such places, there the order of the additions alone decides."""


Lengths = tuple[int, int]
"""Tokens of a trial's sequence whose keys and values are there, and tokens of the step."""

_LENGTHS: tuple[Lengths, ...] = ((0, 9), (24, 1), (200, 5), (1000, 1))


class DistrustedError(Exception):
    """A replacement failed its trial; the text says how. Never leaves the engine."""


def try_out(make: Callable[[], T], error_of: Callable[[T], float], limit: float) -> T:
    """Make a replacement and return it if its error, in spreads, is at most `limit`."""
    try:
        made = make()
        error = error_of(made)
    except Exception as failure:
        raise DistrustedError(f"{type(failure).__name__}: {failure}".partition("\n")[0]) from failure
    if not error <= limit:
        raise DistrustedError(f"its error is {error:.2g} times torch's own, which must be at most {limit:g}")
    return made


def root_mean_square(values: Tensor) -> float:
    """Return the root mean square of all entries."""
    return float(values.double().square().mean().sqrt())


def _difference(results: Tensor, expected: Tensor) -> Tensor:
    difference = results.double() - expected.double()
    return difference.masked_fill_(results == expected, 0.0)


class Reference:
    """Torch's own logits of trial steps. Made before anything replaces torch's layers, so that it owes nothing to what
    is compared with it."""

    def __init__(self, model: LoadedModel) -> None:
        """Runs the trial steps twice: in the model's dtype, and in a wider one for the spread."""
        self._model = model
        most = model.info.max_length  # of a model of short sequences, to which the lengths are cut
        counts = (min(count, most) for _, count in _LENGTHS)
        self._lengths = [(min(past, most - n), n) for (past, _), n in zip(_LENGTHS, counts, strict=True)]
        wide = _WIDER[model.dtype]
        self._exact = self._logits(wide, eager_backend)
        own = self._logits(model.dtype, eager_backend)
        # A model of few operations may happen to be computed exactly
        smallest = 1e-7 * root_mean_square(self._exact[self._exact.isfinite()])
        self.spread = max(root_mean_square(_difference(own, self._exact)), smallest)
        """Root mean square of torch's own rounding errors in a logit."""
        self._spreads = [max(error, smallest) for error in self._errors(own)]
        self.limit = MAX_ERROR[model.dtype]

    def error_of(self, make_backend: Callable[[LoadedModel, KvArena], StepBackend]) -> float:
        """The error of a backend's logits in the trial steps, in spreads; not a number where any result is none.

        It is the geometric mean of the ratios to torch's own error, sequence by sequence: behind keys and values of
        random numbers some sequence may make much of any rounding, and must count no more than the others. No ratio may
        be beyond three times the limit, so that a fault of one length does not hide behind the others.
        """
        results = self._logits(self._model.dtype, make_backend)
        ratios = [error / spread for error, spread in zip(self._errors(results), self._spreads, strict=True)]
        if any(math.isnan(ratio) for ratio in ratios):
            return math.nan
        # A sequence that is more exact than a quarter makes up for no other
        mean = math.prod(max(ratio, 0.25) for ratio in ratios) ** (1.0 / len(ratios))
        return max(mean, max(ratios) / 3.0)

    def _errors(self, results: Tensor) -> list[float]:
        parts = torch.split(_difference(results, self._exact), [count for _, count in self._lengths])
        return [root_mean_square(part) for part in parts]

    def in_spreads(self, results: Tensor, expected: Tensor) -> float:
        """Root mean square of a difference of logits, in spreads; not a number where any result is none. Minus
        infinity, which a drafting head gives for tokens that it cannot say, equals itself."""
        return root_mean_square(_difference(results, expected)) / self.spread

    def _logits(
        self, dtype: torch.dtype, make_backend: Callable[[LoadedModel, KvArena], StepBackend]
    ) -> Tensor:
        model = replace(self._model, dtype=dtype)
        pages = sum(pages_for(past + count, PAGE_TOKENS) for past, count in self._lengths)
        arena = KvArena(model.layers, pages * len(group_layers(model.layers)), dtype, model.device)
        segments = trial_segments(arena, model.info.vocabulary_size, self._lengths)
        generator = torch.Generator(model.device).manual_seed(0)
        for storage in (each for layer in arena.storages for each in (layer.keys, layer.values)):
            numbers = torch.randn(storage.shape, generator=generator, device=model.device)
            storage.copy_(numbers.to(self._model.dtype))  # as they are stored in service
        rows = range(sum(segment.token_count for segment in segments))
        wider = nullcontext() if dtype is self._model.dtype else ComputingIn(dtype)
        with torch.inference_mode():
            backend = make_backend(model, arena)
            with wider:
                return backend.run(segments, rows).clone()


def trial_segments(arena: KvArena, vocabulary_size: int, lengths: SequenceOf[Lengths]) -> list[Segment]:
    """Parts of sequences of any tokens.

    The sequences take turns for their pages, the last ones first: whoever reads pages in the order of the arena reads
    those of others. As in service, pages before a window may be those of others.
    """
    cache = PagedCache(arena, reuses_prefixes=False)
    size = arena.page_tokens
    segments = []
    for index, (past, count) in enumerate(lengths):
        sequence = Sequence(arena.tables(past + count), past + count, vocabulary_size)
        sequence.token_ids = [(7 * index + 3 * step) % vocabulary_size for step in range(past + count)]
        segments.append(Segment(sequence, count))
    for end in range(size, max(map(sum, lengths)) + size, size):
        for segment, (past, count) in zip(segments, lengths, strict=True):
            sequence = segment.sequence
            cache.make_ready(sequence, min(end, past + count))
            sequence.advance(min(end, past) - sequence.computed_length)
            cache.after_step(sequence)
    return segments
