"""A model's pass as a list of operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tandem.engine.backends.cpu_native.plans.trace import TraceError, _drop_repeated_casts, traced


def test_layers_that_round_the_same_numbers_share_the_result() -> None:
    def forward(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return values.bfloat16() + 1, values.bfloat16() * 2, values.half(), (values + 1).bfloat16()

    graph = make_fx(forward)(torch.ones(3))
    expected = graph(torch.full((3,), 1.00390625))
    _drop_repeated_casts(graph)
    casts = [node for node in graph.graph.nodes if node.target is torch.ops.aten._to_copy.default]
    assert len(casts) == 3
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(graph(torch.full((3,), 1.00390625)), expected, strict=True)
    )


def test_numbers_that_may_change_between_two_roundings_are_rounded_twice() -> None:
    def forward(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = values.bfloat16()
        values.add_(1)
        return before, values.bfloat16()

    graph = make_fx(forward)(torch.ones(3))
    _drop_repeated_casts(graph)
    before, after = graph(torch.ones(3))
    assert torch.equal(after, before + 1)


def test_a_pass_that_depends_on_the_tokens_is_not_traced() -> None:
    class Choosy(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            chosen = (input_ids > 2).nonzero()
            return SimpleNamespace(), chosen

    with pytest.raises(TraceError):
        traced(Choosy())
