"""The model runner that vLLM calls V2: its requests, its rows, and the head that it drafts with.

Between `execute_model` and `sample_tokens`, which is never called, it leaves hidden states. Its requests' states are
tensors that Triton's kernels read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tandem.engine.rows import to_device
from tandem.engine_vllm.passes import to_all_ranks
from tandem.engine_vllm.runner_v1 import index_of, wait_for_device
from tandem.engine_vllm.step import Part, RoundEnd
from tandem.model.sampling.noise import Purpose, sample, stream_keys

METHODS = ("eagle", "eagle3", "mtp")
"""Heads that it has, as far as they were tried here. It has none for `medusa`."""


class RunnerV2:
    """The steps of one such runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def order(self, state: Any) -> list[str]:
        """The requests of the last step in vLLM's order, which is as it likes."""
        return list(state.input_batch.req_ids)

    def extend(self, parts: Sequence[Part]) -> None:
        """Make known requests' tokens those of the step. All of them are prompt to vLLM, a proposal as well: it takes
        the tokens behind a prompt from its own sampler. A step of one certain token and a proposal is a decode to it
        all the same."""
        states = self._runner.req_states
        for part in parts:
            index = states.req_id_to_index[part.request_id]
            states.all_token_ids.stage_write(index, part.first, part.token_ids)
            states.prefill_len.np[index] = part.end
            states.num_computed_tokens.stage_write_elem(index, part.start)
        states.apply_staged_writes()

    def from_states(self, parts: Sequence[Part]) -> AbstractContextManager[None]:
        """See `RunnerV1.from_states`: models with recurrent layers are refused with this runner."""
        return nullcontext()

    def logits(self, state: Any, parts: Sequence[Part]) -> Tensor | None:
        """The rows that are wanted, in the order of the parts, of hidden states [tokens of the step, hidden_size]."""
        batch = state.input_batch
        hidden = state.hidden_states
        ends = dict(zip(batch.req_ids, batch.query_start_loc_np[1:].tolist(), strict=False))
        rows = [ends[part.request_id] - back for part in parts for back in range(part.row_count, 0, -1)]
        return self._runner.model.compute_logits(hidden[index_of(rows, hidden)]) if rows else None

    def propose(self, state: Any, parts: Sequence[Part], ends: Sequence[RoundEnd], count: int) -> Tensor:
        """Tokens of vLLM's speculator behind the last step, [requests of the step, at least `count`], as its
        `sample_tokens` has them behind its own sampler.

        Args:
            parts: In the order of the batch, as the ends are.
        """
        from vllm.v1.worker.gpu.spec_decode.utils import get_drafter_hidden_states
        from vllm.v1.worker.workspace import use_workspace_lane

        runner = self._runner
        states = runner.req_states
        batch = state.input_batch
        places = index_of([states.req_id_to_index[part.request_id] for part in parts], state.hidden_states)
        # To the runner nothing was sampled: what follows is told to the speculator alone.
        next_ids = torch.zeros_like(states.last_sampled_tokens)
        own_ids = index_of([end.next_token_id or 0 for end in ends], state.hidden_states)
        next_ids[places, 0] = own_ids.to(next_ids.dtype)
        kept = [end.accepted_count + 1 for end in ends]
        rejected = [part.draft_count - end.accepted_count for part, end in zip(parts, ends, strict=True)]
        noise = getattr(runner.speculator, NOISE, None)
        if noise is not None:
            noise.set(places, ends)
        sampling = runner.sampler.sampling_states
        with use_workspace_lane(runner._draft_workspace_lane):
            drafts: Tensor = runner.speculator.propose(
                batch,
                state.attn_metadata,
                state.slot_mappings_by_layer,
                get_drafter_hidden_states(runner.model, state.hidden_states),
                state.aux_hidden_states,
                index_of(kept, state.hidden_states).int(),
                index_of(rejected, state.hidden_states).int(),
                next_ids,
                states.next_prefill_tokens,
                sampling.temperature.gpu,
                sampling.seeds.gpu,
                num_speculative_tokens=count,
                dp_sync_state=state.dp_sync_state,
            )
        return drafts

    def can_go_on(self) -> bool:
        """True if tokens alone are what a pass of this model takes."""
        return not self._runner.uses_inputs_embeds and self._runner.model_state.rope_state is None

    def passes(self, ends: Mapping[str, int], counts: Mapping[str, int]) -> PassesV2:
        """Passes behind the last step; see `PassesV2`."""
        return PassesV2(self._runner, ends, counts)

    def time_head(self, sequences: int) -> float:
        """Seconds of the head's work for one token of so many sequences.

        Only a whole step of the runner makes the speculator's inputs, so its part of one is timed.
        """
        speculator = self._runner.speculator
        propose = speculator.propose
        seconds = 0.0

        def propose_timed(*arguments: Any, **named: Any) -> Any:
            nonlocal seconds
            wait_for_device()
            began = time.perf_counter()
            drafted = propose(*arguments, **named)
            wait_for_device()
            seconds = time.perf_counter() - began
            return drafted

        speculator.propose = propose_timed
        try:
            self._runner._dummy_run(sequences)
        finally:
            del speculator.propose  # its class's own is there again
        return seconds / int(speculator.num_speculative_steps)


class PassesV2:
    """Forward passes behind a step, of one token of each sequence, which the device knows and the host does not.

    To this runner they are the steps that follow its own sampler: it finds tokens and lengths on the device.
    """

    def __init__(self, runner: Any, ends: Mapping[str, int], counts: Mapping[str, int]) -> None:
        """See `tandem.engine_vllm.passes.Passes`."""
        self._runner = runner
        self._counts = dict(counts)
        states = runner.req_states
        self._indexes = [states.req_id_to_index[name] for name in counts]
        self._host_lengths = [ends[name] for name in counts]
        numbers = np.array([self._indexes, self._host_lengths], dtype=np.int64)
        (given,) = to_device([numbers], states.last_sampled_tokens.device)
        self._places, self._lengths = given
        self._depth = 0

    def run(self, token_ids: Tensor | None) -> Tensor | None:
        """See `tandem.engine_vllm.passes.Passes`. A sequence that has all its tokens takes no part any more; its row is
        another's."""
        runner = self._runner
        states = runner.req_states
        tokens = to_all_ranks(token_ids, self._places).clamp(min=0)
        states.last_sampled_tokens[self._places, 0] = tokens
        lengths = self._lengths + self._depth
        states.num_computed_tokens.gpu[self._places] = lengths.to(states.num_computed_tokens.gpu.dtype)
        self._depth += 1
        active = [name for name, count in self._counts.items() if count > self._depth]
        for name, index, length in zip(self._counts, self._indexes, self._host_lengths, strict=True):
            if name in active:
                states.num_computed_tokens_np[index] = length + self._depth - 1
        try:
            runner.execute_model(_single_tokens(active))
        finally:
            state = runner.execute_model_state
            runner.execute_model_state = None
        order = {name: row for row, name in enumerate(state.input_batch.req_ids)}
        rows = [order.get(name, 0) for name in self._counts]
        hidden = state.hidden_states
        return cast("Tensor | None", runner.model.compute_logits(hidden[index_of(rows, hidden)]))


def _single_tokens(request_ids: Sequence[str]) -> Any:
    """A step of one token of each of these known requests, as vLLM's scheduler describes it."""
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict.fromkeys(request_ids, 1)
    output.total_num_scheduled_tokens = len(request_ids)
    return output


# ---- the noise that a target and its head share

NOISE = "tandem_noise"
"""The speculator's attribute with its `_Noise`."""


def share_noise() -> None:
    """Let every head draw with the target's noise where that is asked for.

    Before a speculator captures CUDA graphs of its draws, therefore for the class: vLLM makes one and captures it in a
    single call.
    """
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    TargetDependentARSpeculator.sample_draft = _draw


class _Noise:
    """Temperature and seed by the request's place in the runner's states; temperature 0 for the most probable token."""

    def __init__(self, places: int, device: torch.device) -> None:
        self.temperatures = torch.zeros(places, dtype=torch.float64, device=device)
        self.seeds = torch.zeros(places, dtype=torch.int64, device=device)

    def set(self, places: Tensor, ends: Sequence[RoundEnd]) -> None:
        temperatures = np.array([0.0 if end.noise is None else end.noise.temperature for end in ends])
        seeds = np.array([0 if end.noise is None else end.noise.seed for end in ends], dtype=np.int64)
        self.temperatures[places], self.seeds[places] = to_device([temperatures, seeds], self.seeds.device)


def _draw(
    speculator: Any,
    hidden_states: Tensor,
    sample_src_positions: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draft_step: Tensor,
    draft_logits: Tensor | None,
    spec_step_idx: int = 0,
) -> Tensor:
    """In the place of the speculator's `sample_draft`: device operations alone, which a graph can hold.

    Args:
        hidden_states: [requests, hidden_size].
        sample_src_positions: Position of the token before the one that is drawn.
        idx_mapping: Place of each request; -1 for none.
    """
    noise = getattr(speculator, NOISE, None)
    if noise is None:
        noise = _Noise(speculator.max_num_reqs, hidden_states.device)
        setattr(speculator, NOISE, noise)
    logits = speculator.compute_draft_logits(hidden_states, spec_step_idx)
    temperatures = noise.temperatures[idx_mapping]
    keys = stream_keys(noise.seeds[idx_mapping], sample_src_positions + 1, int(Purpose.TARGET))
    probs = torch.softmax(logits.double() / temperatures.clamp(min=1e-6)[:, None], dim=-1)
    return torch.where(temperatures > 0.0, sample(probs, keys), logits.argmax(dim=-1))
