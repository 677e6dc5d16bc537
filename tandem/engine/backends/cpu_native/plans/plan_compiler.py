"""Compiles a forward pass of a fixed number of tokens to a list of calls.

All memory is assigned once, so that replaying the list makes no tensors, views or decisions: only arithmetic remains.
An operation is one of the kernels' where that has just given torch's own bits, and torch's otherwise, so the results
are those of the model's own modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import groupby
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tandem.engine.backends.cpu_native.attention import NativeAttention, point
from tandem.engine.backends.cpu_native.library.calls import KernelCall
from tandem.engine.backends.cpu_native.library.kernels import attention_call, linear_call
from tandem.engine.backends.cpu_native.plans.torch_calls import TorchCall, copied, same, torch_call
from tandem.engine.backends.cpu_native.plans.trace import ATTEND, LINEAR
from tandem.engine.backends.cpu_native.pointwise import UnknownOperationError, kernel_calls

Call = KernelCall | TorchCall

_PROBED = 8
"""Ids and positions that results are compared for: no model has fewer."""

_new_storage: Callable[[int], torch.UntypedStorage] = torch.UntypedStorage  # untyped in torch


class Head:
    """The last linear layer of a pass, which is computed for the wanted tokens alone."""

    def __init__(self, inputs: Tensor, weights: Tensor, bias: Tensor | None, output: Tensor) -> None:
        chosen = torch.empty_like(inputs)
        table = inputs.view(-1, inputs.shape[-1])
        rows = torch.arange(table.shape[0])
        self._rows = rows.numpy()
        gather = kernel_calls(torch.ops.aten.embedding.default, (table, rows), {}, chosen)
        self.calls = [*gather, linear_call(chosen, weights, bias, output)]
        self._gather, self._linear = (call.arguments for call in self.calls)
        self._kept = (chosen, inputs, rows)

    def choose(self, rows: SequenceOf[int]) -> None:
        """From now on the first rows of the output are those of these tokens."""
        self._rows[: len(rows)] = rows
        self._gather.count = self._linear.rows = len(rows)


class PlanCompiler:
    """Goes through the graph twice: to find the lifetime of each result, and to assign memory."""

    def __init__(
        self,
        graph: GraphModule,
        attention: NativeAttention,
        inputs: Tensor,
        places: Tensor,
        states: Tensor | None = None,
    ) -> None:
        """Binds; the arena is not touched.

        Args:
            graph: the pass; see `tandem.engine.backends.cpu_native.plans.trace.traced`.
            attention: what the layers' attention needs.
            inputs: int64 [2, tokens], from which the calls will read ids and positions.
            places: from where they will read what `tandem.engine.backends.cpu_native.attention.places` says, a row for
                each group of layers.
            states: [tokens, state_size], from where a drafting head's pass will read states.
        """
        self._graph = graph
        self._attention = attention
        self._kernels = attention.kernels
        self._inputs = [inputs[:1], inputs[1:]] if states is None else [inputs[:1], inputs[1:], states]
        self._places = places
        self._nodes = list(graph.graph.nodes)
        self.calls: list[Call] = []
        self.kept: list[object] = []
        """Objects that must live as long as the calls."""
        self._storages: dict[Node, torch.UntypedStorage] = {}
        self._pool: dict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self.head: Head | None = None
        self.most_numbers = 0
        """In the largest result that one of torch's own operations writes."""
        last = self._nodes[-1].args[0]
        self._results: tuple[Node, ...] = tuple(last) if isinstance(last, tuple | list) else (last,)
        self.outputs: list[Tensor] = []
        """The logits, and what a drafting head feeds back."""
        with torch.no_grad():
            inputs[:] = torch.arange(inputs.shape[1]) % _PROBED  # all zeros would hide a mistake
            self._survey()
            self._bind()
            inputs.zero_()

    def joined_calls(self) -> list[TorchCall]:
        """The calls, those of kernels that follow on each other as one."""
        joined: list[TorchCall] = []
        for is_kernel, group in groupby(self.calls, lambda call: isinstance(call, KernelCall)):
            if is_kernel:
                joined.append(self._kernels.joined(cast("list[KernelCall]", list(group))))
            else:
                joined += cast("list[TorchCall]", group)
        return joined

    # ---- first pass

    def _survey(self) -> None:
        """Runs all nodes on memory of their own."""
        self._values: dict[Node, Any] = {}
        self._root: dict[Node, Node] = {}
        self._last_use: dict[Node, int] = {}
        owner: dict[int, Node] = {}
        for index, node in enumerate(self._nodes):
            value = self._evaluate(node)
            self._values[node] = value
            for part in value if isinstance(value, tuple | list) else ():
                owner.setdefault(_memory(part), node)
            if isinstance(value, Tensor):
                self._root[node] = owner.setdefault(_memory(value), node)
                for user in (node, *node.all_input_nodes):
                    if user in self._root:
                        self._last_use[self._root[user]] = index

    def _evaluate(self, node: Node) -> Any:
        """The value of a node, its inputs being known."""
        match node.op:
            case "placeholder":
                index = [other for other in self._nodes if other.op == "placeholder"].index(node)
                return self._inputs[index]
            case "get_attr":
                return getattr(self._graph, str(node.target))
            case "output":
                return None
        arguments, named = self._arguments(node)
        return _operation(node)(*arguments, **named)

    def _arguments(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def value(part: Node) -> Any:
            return self._values[part]

        return torch.fx.map_arg((node.args, node.kwargs), value)

    # ---- second pass

    def _bind(self) -> None:
        """Runs all nodes again on memory that is used over and over, and notes the call that each one is."""
        shapes = dict(self._values)
        released = self._released()
        for index, node in enumerate(self._nodes):
            if node.op == "output":
                self.outputs = [self._values[each] for each in self._results]
            elif node.op == "call_function":
                self._bind_node(node, shapes[node])
            self.kept.append(self._values.get(node))
            for root in released[index]:
                if root in self._storages:
                    storage = self._storages[root]
                    self._pool[storage.nbytes()].append(storage)

    def _bind_node(self, node: Node, like: Any) -> None:
        """Gives the node's value a place, and notes what computes it."""
        if isinstance(like, Tensor) and self._root[node] is node:
            self._storages[node] = _storage_like(like, self._pool)
            self._values[node] = _on(self._storages[node], like)
            self.calls += self._writing(node, self._values[node])
            return
        self._values[node] = self._evaluate(node)
        arguments, named = self._arguments(node)
        if isinstance(like, tuple | list):
            if not all(_memory(part) in self._known for part in self._values[node]):
                self.calls.append(copied(node.target, arguments, named, self._values[node]))
        elif isinstance(like, Tensor) and _operation(node) is not getitem and _is_mutable(node.target):
            self.calls.append(partial(_operation(node), *arguments, **named))

    @property
    def _known(self) -> set[int]:
        """Memory that has its place already."""
        values = (value for value in self.kept if isinstance(value, Tensor))
        return {_memory(value) for value in values}

    def _released(self) -> dict[int, list[Node]]:
        """Nodes whose memory is free once a node has run. That of the results never is."""
        kept = {self._root[each] for each in self._results}
        released = defaultdict(list)
        for root, index in self._last_use.items():
            if root not in kept:
                released[index].append(root)
        return released

    def _writing(self, node: Node, output: Tensor) -> SequenceOf[Call]:
        """Return the operation that writes the node's value to `output`. It has run once, so that the next node
        finds its inputs."""
        arguments, named = self._arguments(node)
        if node.target is LINEAR:
            return self._linear(node, output, *arguments)
        if node.target is ATTEND:
            return self._attend(output, *arguments)
        expected = _operation(node)(*arguments, **named)
        try:
            calls = kernel_calls(node.target, arguments, named, output)
        except UnknownOperationError:
            pass
        else:
            output.zero_()
            self._kernels.run(*calls)
            if same(output, expected):
                self.kept.append(arguments)
                return calls
        self.most_numbers = max(self.most_numbers, output.numel())
        return [torch_call(node.target, arguments, named, output, expected)]

    def _linear(
        self, node: Node, output: Tensor, inputs: Tensor, weights: Tensor, bias: Tensor | None, *_: object
    ) -> SequenceOf[Call]:
        output.zero_()
        self.kept += (weights, bias)
        inputs = self._laid(inputs, inputs.is_contiguous())
        if self._root[node] is not self._root[self._results[0]]:
            return [linear_call(inputs, weights, bias, output)]
        self.head = Head(inputs, weights, bias, output)
        return self.head.calls

    def _attend(
        self,
        output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layer: int,
        scale: float | None,
        softcap: float | None,
    ) -> SequenceOf[Call]:
        output.zero_()
        query, key, value = (self._laid(states, states.stride(3) == 1) for states in (query, key, value))
        floats = None if sinks is None else sinks.float()
        call = self._attention.new_call(layer)
        point(call, query, key, value, output, sinks=floats, scale=scale, softcap=softcap)
        call.segments = self._places[self._attention.group_of(layer)].data_ptr()
        self.kept.append(floats)
        return [attention_call(call)]

    def _laid(self, states: Tensor, is_laid: bool) -> Tensor:
        """The numbers in the order that a kernel reads, by a copy at each playing where they are not."""
        if is_laid:
            return states
        copy = torch.empty_like(states, memory_format=torch.contiguous_format)
        self.kept.append(copy)
        self.calls.append(partial(copy.copy_, states))
        return copy


def _operation(node: Node) -> Any:
    return node.target


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _storage_like(value: Tensor, pool: dict[int, list[torch.UntypedStorage]]) -> torch.UntypedStorage:
    size = value.untyped_storage().nbytes()
    return pool[size].pop() if pool[size] else _new_storage(size)


def _on(storage: torch.UntypedStorage, value: Tensor) -> Tensor:
    """A tensor like `value` on other memory."""
    return torch.empty(0, dtype=value.dtype).set_(
        storage, value.storage_offset(), value.shape, value.stride()
    )


def _is_mutable(target: Any) -> bool:
    return bool(target._schema.is_mutable)
