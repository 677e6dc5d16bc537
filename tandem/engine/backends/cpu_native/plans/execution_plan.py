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

    def __init__(
        self,
        graph: GraphModule,
        attention: NativeAttention,
        token_count: int,
        states: Tensor | None = None,
    ) -> None:
        """Lays out memory and binds the calls. The arena is not touched.

        Args:
            graph: see `tandem.engine.backends.cpu_native.plans.trace.traced`.
            attention: what the layers' attention needs.
            token_count: of the pass.
            states: [token_count, state_size], any that a drafting head may read, to try its calls with.
        """
        inputs = torch.zeros(2, token_count, dtype=torch.long)
        where = torch.zeros(attention.group_count, 1 + 6 * token_count, dtype=torch.long)  # see `places`
        compiled = PlanCompiler(graph, attention, inputs, where, states)
        self._states = states
        # As numpy's, which take a few numbers in a third of the time that torch takes.
        self._token_ids, self._positions = inputs.numpy()
        self._places = where.numpy()
        self._head = compiled.head
        self._logits = compiled.outputs[0][0]
        self._fed_back = compiled.outputs[1:]
        self._calls = compiled.joined_calls()
        self._kept = compiled.kept
        """The kernels know memory by address only."""
        self._needs_threads = compiled.most_numbers > _ONE_THREADS_NUMBERS

    @property
    def computes_wanted_rows_only(self) -> bool:
        """True if logits of further tokens are free."""
        return self._head is not None

    def fed_back(self, token_count: int) -> Tensor:
        """States that a drafting head's last pass feeds back, [token_count, state_size]; the next pass changes them."""
        return self._fed_back[0][:token_count]

    def replay(self, packing: Packing, rows: SequenceOf[int], states: Tensor | None = None) -> Tensor:
        """Runs a step of no more tokens than the plan's, and stores keys and values.

        Args:
            packing: the step.
            rows: the tokens whose logits are wanted.
            states: [tokens, state_size], what a drafting head reads.

        Returns:
            The logits of the tokens that `rows` names, [len(rows), vocabulary_size]; no later replay changes them.
        """
        count = packing.token_count
        self._token_ids[:count] = packing.token_ids()
        self._positions[:count] = packing.positions()
        if self._states is not None and states is not None:
            self._states[:count] = states
        for group, own in enumerate(self._places):
            where = places(packing, group)
            own[: len(where)] = where
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
