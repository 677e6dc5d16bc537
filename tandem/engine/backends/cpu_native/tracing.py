"""A model's pass as the list of torch's operations that it consists of, for any number of tokens."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import has_side_effect
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tandem.engine.backends.cpu_native.layers import PackedLinear
from tandem.engine.hidden_states import HeadModel
from tandem.engine.models.attention import STEP_ARGUMENT, Scoring

_REFUSED_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
_READERS = frozenset(("tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "__dlpack__"))
"""Methods by which a tensor's numbers leave torch without an operation."""
_TOKENS, _MORE_TOKENS = 7, 18
"""Two passes show which numbers of an operation go with the tokens. What is rounded to blocks, halved or cut at a bound
between the two does not grow by a multiple of eleven."""

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


# While a pass is traced or a plan is compiled, shapes are all that is wanted.
_library.impl("linear", _linear_shape, "CPU")
_library.impl("attend", _attend_shape, "CPU")

LINEAR: Any = torch.ops.tandem.linear.default
ATTEND: Any = torch.ops.tandem.attend.default
# It stores keys and values: a trace must not lose one whose result is of no use.
has_side_effect(ATTEND)
_aten: Any = torch.ops.aten


class TraceError(Exception):
    """The pass is not the same list of operations for all tokens; the text says why. Never leaves the engine."""


class _TracedStep:
    """Stands for any step: shows the arguments of attention, not its results."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        scale, softcap, sinks, _ = scoring
        return ATTEND(query, key, value, sinks, module.layer_idx, scale, softcap)  # type: ignore[no-any-return]


MakeTrace = Callable[[], GraphModule]
"""Traces a model's pass, or returns the trace that was made before; see `traced`."""


def traced(module: nn.Module) -> GraphModule:
    """The pass of any number of tokens: from ids and positions, each [1, tokens], to logits [1, tokens, vocabulary].
    A drafting head's also reads states and ends in those that it feeds back (`HeadModel.computed`).

    Nothing else may run the module meanwhile. A TraceError says that what is computed depends on the tokens
    themselves, as a choice of experts does.
    """

    def forward(token_ids: Tensor, positions: Tensor) -> Tensor:
        output = module(
            input_ids=token_ids, position_ids=positions, logits_to_keep=0, use_cache=False,
            **{STEP_ARGUMENT: _TracedStep()},
        )  # fmt: skip
        logits: Tensor = output.logits
        return logits

    of_inputs = cast(Any, forward)
    if isinstance(module, HeadModel):
        of_inputs = partial(module.computed, step=_TracedStep())
    recorders = []
    with torch.no_grad(), _packed_layers_shown(module):
        for count in (_TOKENS, _MORE_TOKENS):
            tokens = torch.arange(count)[None]
            inputs = [tokens, tokens.clone()]
            if isinstance(module, HeadModel):
                inputs.append(module.states.any_states(count))
            recorder = _Recorder(inputs)
            try:
                recorder.record(of_inputs)
            except TraceError:
                raise
            except Exception as error:  # noqa: BLE001 - what cannot be traced runs as it is
                reason = str(error).strip().partition("\n")[0]
                raise TraceError(f"{type(error).__name__}: {reason}") from None
            recorders.append(recorder)
    graph = _generalized(*recorders)
    _drop_repeated_casts(graph)
    return GraphModule(recorders[0].constants, graph)


class _RefusedReads(TorchFunctionMode):
    """Refuses to let numbers leave torch: what became of them would be the same for all tokens."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: SequenceOf[type],
        args: SequenceOf[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.__name__ in _READERS:
            raise TraceError(f"{func.__name__} reads the numbers of a tensor")
        return func(*args, **kwargs or {})


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Notes operations while they run."""

    def __init__(self, inputs: SequenceOf[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self.constants: dict[str, Any] = {}
        self._inputs = inputs
        self._nodes: dict[int, tuple[Node, Tensor]] = {}
        """By the id of a tensor, which lives on, so that the id is no other's."""
        for index, each in enumerate(inputs):
            self._nodes[id(each)] = self.graph.placeholder(f"input_{index}"), each

    def record(self, computed: Callable[..., Any]) -> None:
        with _RefusedReads(), self:
            results = computed(*self._inputs)
        self.graph.output(tree_map(self._node, results))
        self.graph.eliminate_dead_code()

    def __torch_dispatch__(
        self, func: Any, types: SequenceOf[type], args: SequenceOf[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(tag in func.tags for tag in _REFUSED_TAGS):
            raise TraceError(f"{func} depends on the tokens")
        if func is _aten.lift_fresh.default:
            func = _aten.lift_fresh_copy.default  # the constant stays as it is when the pass writes to it
        named = kwargs or {}
        node = self.graph.call_function(func, *tree_map(self._node, (tuple(args), dict(named))))
        results = func(*args, **named)
        if isinstance(results, Tensor):
            self._nodes[id(results)] = node, results
        for index, part in enumerate(results if isinstance(results, tuple | list) else ()):
            self._nodes[id(part)] = self.graph.call_function(operator.getitem, (node, index)), part
        return results

    def _node(self, value: Any) -> Any:
        """The node of a tensor; other values stand for themselves."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = value
            self._nodes[id(value)] = self.graph.get_attr(name), value
        return self._nodes[id(value)][0]


def _generalized(fewer: _Recorder, more: _Recorder) -> Graph:
    """The graph of the pass over fewer tokens, in which numbers that go with the tokens are computed from their count.
    A TraceError says that the two passes differ by more."""
    graph = fewer.graph
    nodes, others = list(graph.nodes), list(more.graph.nodes)
    if [node.target for node in nodes] != [node.target for node in others]:
        raise TraceError("which operations there are depends on the number of tokens")
    twins = dict(zip(others, nodes, strict=True))
    token_ids = nodes[0]
    first = next(node for node in nodes if node.op != "placeholder")

    @cache
    def size(low: int, high: int) -> Node:
        step, rest = divmod(high - low, _MORE_TOKENS - _TOKENS)
        if rest:
            raise TraceError(f"a number is {low} for {_TOKENS} tokens and {high} for {_MORE_TOKENS}")
        with graph.inserting_before(first):
            tokens = graph.call_function(_aten.sym_size.int, (token_ids, 1))
            part = graph.call_function(operator.mul, (tokens, step))
            return graph.call_function(operator.add, (part, low - step * _TOKENS))

    for other, node in twins.items():
        if node.op == "get_attr" and not _are_same(*(each.constants[node.target] for each in (fewer, more))):
            raise TraceError("a tensor that the pass makes depends on the tokens")
        values, form = tree_flatten((node.args, node.kwargs))
        beside, form_beside = tree_flatten((other.args, other.kwargs))
        if form != form_beside:
            raise TraceError(f"the arguments of {node.target} depend on the number of tokens")
        for index, (value, other_value) in enumerate(zip(values, beside, strict=True)):
            if type(value) is type(other_value) is int and value != other_value:
                values[index] = size(value, other_value)
            elif value != twins.get(other_value, other_value):
                raise TraceError(f"an argument of {node.target} is {value} or {other_value}")
        node.args, node.kwargs = tree_unflatten(values, form)
    return graph


def _are_same(constant: Tensor, other: Tensor) -> bool:
    return constant is other or (constant.dtype == other.dtype and torch.equal(constant, other))


def _drop_repeated_casts(graph: Graph) -> None:
    """Lets layers that round the same numbers share the result, as a norm's output for query, key and value."""
    nodes = list(graph.nodes)
    if any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in nodes):
        return  # the numbers might change between two casts
    first: dict[tuple[Any, ...], Any] = {}
    for node in nodes:
        if node.target is _aten._to_copy.default:
            same = first.setdefault((*node.args, *sorted(node.kwargs.items())), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


@contextmanager
def _packed_layers_shown(module: nn.Module) -> Iterator[None]:
    """Packed layers show their products."""
    layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, PackedLinear)]
    kernels = [layer._kernels for layer in layers]
    for layer in layers:
        layer._kernels = SimpleNamespace(linear=LINEAR)
    try:
        yield
    finally:
        for layer, own in zip(layers, kernels, strict=True):
            layer._kernels = own
