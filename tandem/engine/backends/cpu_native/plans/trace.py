"""A model's forward pass as a list of torch's operations, learnt by running it once on shapes alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import has_side_effect

from tandem.engine.backends.cpu_native.linear import PackedLinear
from tandem.engine.backends.hidden_states.head_model import HeadModel
from tandem.engine.models.attention import STEP_ARGUMENT

_TRACED_TOKENS = 7
"""Any number that is no other size of a model."""

_REFUSED_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)

_library: Any = cast(Any, torch.library.Library)("tandem", "DEF")
_library.define(
    "linear(Tensor inputs, Tensor weights, Tensor? bias, int outputs, ScalarType? dtype) -> Tensor"
)
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float? scale, float? softcap) -> Tensor"
)


def _linear_shape(
    inputs: Tensor, weights: Tensor, bias: Tensor | None, outputs: int, dtype: torch.dtype | None
) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], outputs), dtype=dtype)


def _attend_shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


for _key in ("Meta", "CPU"):  # while a plan is compiled, shapes are all that is wanted on a CPU as well
    _library.impl("linear", _linear_shape, _key)
    _library.impl("attend", _attend_shape, _key)

LINEAR: Any = torch.ops.tandem.linear.default
ATTEND: Any = torch.ops.tandem.attend.default
# It stores keys and values: a trace must not lose one whose result is of no use.
has_side_effect(ATTEND)


class TraceError(Exception):
    """The pass is not the same list of operations for all tokens; the text says why. Never leaves the engine."""


class _TracedStep:
    """Stands for any step: shows the arguments of attention, not its results."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionStep.attend`."""
        return ATTEND(query, key, value, sinks, module.layer_idx, scale, softcap)  # type: ignore[no-any-return]


class _TracedKernels:
    """Stands for the kernels of a packed layer."""

    def linear(
        self,
        inputs: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        output_width: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `Kernels.linear`."""
        return LINEAR(inputs, weights, bias, output_width, dtype)  # type: ignore[no-any-return]


class Trace:
    """A model's pass, traced when it is first asked for and then kept."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._result: GraphModule | TraceError | None = None

    def graph(self) -> GraphModule:
        """See `traced`."""
        if self._result is None:
            try:
                self._result = traced(self._module)
            except TraceError as error:
                self._result = error
        if isinstance(self._result, TraceError):
            raise self._result
        return self._result


def traced(module: nn.Module) -> GraphModule:
    """The pass of any number of tokens: from ids and positions, each [1, tokens], to logits [1, tokens, vocabulary].
    A drafting head's also reads states and ends in those that it feeds back (`HeadModel.computed`).

    Nothing else may run the module meanwhile.

    Raises:
        TraceError: what is computed depends on the tokens themselves, as a choice of experts does.
    """

    def forward(token_ids: Tensor, positions: Tensor) -> Tensor:
        output = module(
            input_ids=token_ids, position_ids=positions, logits_to_keep=0, use_cache=False,
            **{STEP_ARGUMENT: _TracedStep()},
        )  # fmt: skip
        logits: Tensor = output.logits
        return logits

    tokens = torch.arange(_TRACED_TOKENS)[None]
    inputs, of_inputs = [tokens, tokens.clone()], cast(Any, forward)
    if isinstance(module, HeadModel):
        inputs.append(module.states.any_states(_TRACED_TOKENS))
        of_inputs = partial(module.computed, step=_TracedStep())
    with torch.no_grad(), _stand_ins(module), _quiet():
        try:
            graph = make_fx(of_inputs, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
        except Exception as error:  # noqa: BLE001 - what cannot be traced runs as it is
            raise TraceError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from None
    for node in graph.graph.nodes:
        if any(tag in getattr(node.target, "tags", ()) for tag in _REFUSED_TAGS):
            raise TraceError(f"{node.target} depends on the tokens")
    _drop_repeated_casts(graph)
    return graph


def _drop_repeated_casts(graph: GraphModule) -> None:
    """Lets layers that round the same numbers share the result, as a norm's output for query, key and value."""
    nodes = list(graph.graph.nodes)
    if any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in nodes):
        return  # the numbers might change between two casts
    first: dict[tuple[Any, ...], Any] = {}
    for node in nodes:
        if node.target is torch.ops.aten._to_copy.default:
            same = first.setdefault((*node.args, *sorted(node.kwargs.items())), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.graph.erase_node(node)
    graph.recompile()


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs untraceable code at length; one line of our own log suffices."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _stand_ins(module: nn.Module) -> Iterator[None]:
    layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    kernels = [layer._kernels for layer in layers]
    for layer in layers:
        layer._kernels = _TracedKernels()
    try:
        yield
    finally:
        for layer, own in zip(layers, kernels, strict=True):
            layer._kernels = own
