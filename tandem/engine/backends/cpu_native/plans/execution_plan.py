"""A forward pass of a fixed number of tokens, replayed from a list of calls without arguments."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from torch.fx import GraphModule

from tandem.engine.backends.cpu_native.attention import NativeAttention, places
from tandem.engine.backends.cpu_native.plans.plan_compiler import PlanCompiler
from tandem.engine.backends.packing import Packing

_ONE_THREADS_NUMBERS = 32_768
"""Results up to which torch itself computes most operations in one thread. Some it does not: for the cosines of 160
numbers it wakes a second one, which takes 105 us where they take 3. docs/engine.md has more."""


class ExecutionPlan:
    """The pass over `token_count` tokens."""

    def __init__(self, graph: GraphModule, attention: NativeAttention, token_count: int) -> None:
        """Lays out memory and binds the calls. The arena is not touched."""
        inputs = torch.zeros(2, token_count, dtype=torch.long)
        where = torch.zeros(1 + 6 * token_count, dtype=torch.long)  # see `places`
        compiled = PlanCompiler(graph, attention, inputs, where)
        # As numpy's, which take a few numbers in a third of the time that torch takes.
        self._token_ids, self._positions = inputs.numpy()
        self._places = where.numpy()
        self._head = compiled.head
        self._logits = compiled.output[0]
        self._calls = compiled.joined_calls()
        self._kept = compiled.kept
        """The kernels know memory by address only."""
        self._needs_threads = compiled.most_numbers > _ONE_THREADS_NUMBERS

    @property
    def computes_wanted_rows_only(self) -> bool:
        """True if logits of further tokens are free."""
        return self._head is not None

    def replay(self, packing: Packing, rows: SequenceOf[int]) -> Tensor:
        """Runs a step of no more tokens than the plan's, and stores keys and values.

        Returns:
            The logits of the tokens that `rows` names, [len(rows), vocabulary_size]; no later replay changes them.
        """
        count = packing.token_count
        self._token_ids[:count] = packing.token_ids()
        self._positions[:count] = packing.positions()
        where = places(packing)
        self._places[: len(where)] = where
        if self._head is not None:
            self._head.choose(rows)
        if self._needs_threads:
            self._replay()
        else:
            self._replay_in_one_thread()
        return self._logits[: len(rows)].clone() if self._head is not None else self._logits[rows]

    def _replay_in_one_thread(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # our kernels keep to the number that they were bound with
        try:
            self._replay()
        finally:
            torch.set_num_threads(threads)

    def _replay(self) -> None:
        for call in self._calls:
            call()
