"""Makes the list of calls that a forward pass of a fixed number of tokens is.

Where the numbers lie is decided once, so that playing the list makes no tensor, no view and no decision: what is left
is the arithmetic. Each operation is one of the kernels' where that was just seen to give torch's own bits, and torch's
otherwise, so the numbers are those of the model's own modules.
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

from tandem.engine.native.attention import NativeAttention, point
from tandem.engine.native.calls import KernelCall
from tandem.engine.native.kernels import attention_call, linear_call
from tandem.engine.native.pointwise import UnknownOperationError, kernel_calls
from tandem.engine.native.trace import ATTEND, LINEAR

TorchCall = Callable[[], object]
Call = KernelCall | TorchCall

_PROBED = 8
"""Ids and positions that results are compared for: no model has fewer."""

_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}


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


class Binding:
    """Goes through the graph twice: to see who uses which memory until when, and to give it out."""

    def __init__(
        self, graph: GraphModule, attention: NativeAttention, inputs: Tensor, places: Tensor
    ) -> None:
        """Binds; the arena is not touched.

        Args:
            graph: the pass; see `tandem.engine.native.trace.traced`.
            attention: what the layers' attention needs.
            inputs: int64 [2, tokens], from which the calls will read ids and positions.
            places: from where they will read what `tandem.engine.native.attention.places` says.
        """
        self._graph = graph
        self._attention = attention
        self._kernels = attention.kernels
        self._inputs = inputs
        self._places = places
        self._nodes = list(graph.graph.nodes)
        self.calls: list[Call] = []
        self.kept: list[object] = []
        """What must live as long as the calls."""
        self._storages: dict[Node, torch.UntypedStorage] = {}
        self._pool: dict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self.head: Head | None = None
        self.most_numbers = 0
        """In the largest result that one of torch's own operations writes."""
        self.output: Tensor
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
                joined.append(self._kernels.player(cast("list[KernelCall]", list(group))))
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
                return self._inputs[index : index + 1]
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
                self.output = self._values[node.args[0]]
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
                self.calls.append(_copied(node.target, arguments, named, self._values[node]))
        elif isinstance(like, Tensor) and _operation(node) is not getitem and _is_mutable(node.target):
            self.calls.append(partial(_operation(node), *arguments, **named))

    @property
    def _known(self) -> set[int]:
        """Memory that has its place already."""
        values = (value for value in self.kept if isinstance(value, Tensor))
        return {_memory(value) for value in values}

    def _released(self) -> dict[int, list[Node]]:
        """Whose memory is free once a node has run. What the logits lie in never is."""
        last = self._nodes[-1].args[0]
        released = defaultdict(list)
        for root, index in self._last_use.items():
            if root is not self._root[last]:
                released[index].append(root)
        return released

    def _writing(self, node: Node, output: Tensor) -> SequenceOf[Call]:
        """What writes the node's value to `output`; it was made once, so that the next node finds its inputs."""
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
            self._kernels.play(*calls)
            if _same(output, expected):
                self.kept.append(arguments)
                return calls
        self.most_numbers = max(self.most_numbers, output.numel())
        return [self._torch_call(node, output, expected)]

    def _torch_call(self, node: Node, output: Tensor, expected: Tensor) -> TorchCall:
        arguments, named = self._arguments(node)
        for call in _candidates(node.target, arguments, named, output):
            output.zero_()
            try:
                call()
            except (TypeError, RuntimeError):
                continue
            if _same(output, expected):
                return call
        copy = _copied(node.target, arguments, named, (output,))
        copy()
        return copy

    def _linear(
        self, node: Node, output: Tensor, inputs: Tensor, weights: Tensor, bias: Tensor | None, _: int
    ) -> SequenceOf[Call]:
        output.zero_()
        self.kept += (weights, bias)
        inputs = self._laid(inputs, inputs.is_contiguous())
        if self._root[node] is not self._root[self._nodes[-1].args[0]]:
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
        call.segments = self._places.data_ptr()
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


def _candidates(
    target: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
) -> list[TorchCall]:
    """Ways to have the operation write to `output`, the cheapest to call first."""
    if target in _COPIES:
        return [partial(output.copy_, arguments[0])]
    name = target._schema.name.partition("::")[2]
    found: list[TorchCall] = [
        partial(function, *arguments, **named, out=output)
        for function in (getattr(place, name, None) for place in (torch, torch._C._nn))
        if function is not None
    ]
    packet = getattr(torch.ops.aten, name)
    found += [partial(getattr(packet, overload), *arguments, **named, out=output)
              for overload in packet.overloads() if "out" in overload]  # fmt: skip
    return found


def _copied(
    target: Any, arguments: tuple[Any, ...], named: dict[str, Any], outputs: SequenceOf[Tensor]
) -> TorchCall:
    """Of any operation: compute elsewhere, and copy."""

    def call() -> None:
        results = target(*arguments, **named)
        for output, result in zip(
            outputs, (results,) if isinstance(results, Tensor) else results, strict=True
        ):
            output.copy_(result)

    return call


def _is_mutable(target: Any) -> bool:
    return bool(target._schema.is_mutable)


def _same(results: Tensor, expected: Tensor) -> bool:
    return results.shape == expected.shape and torch.equal(results.nan_to_num(), expected.nan_to_num())
