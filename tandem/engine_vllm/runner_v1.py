"""The model runner that vLLM calls V1: its requests, its rows, and the head that it drafts with.

Between `execute_model` and `sample_tokens`, which is never called, it leaves logits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tandem.engine.rows import to_device
from tandem.engine_vllm.passes import Passes
from tandem.engine_vllm.step import Part, RoundEnd, SharedNoise
from tandem.model.sampling.noise import Purpose, sample, stream_keys


class RunnerV1:
    """The steps of one such runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def order(self, state: Any) -> list[str]:
        """The requests of the last step in vLLM's order, which is as it likes."""
        return list(self._runner.input_batch.req_ids)

    def extend(self, parts: Sequence[Part]) -> None:
        """Make known requests' tokens those of the step. All of them are prompt to vLLM, which has sampled none."""
        runner = self._runner
        batch = runner.input_batch
        for part in parts:
            request = runner.requests[part.request_id]
            certain = part.end - part.draft_count
            tokens = part.token_ids[: certain - part.first]
            request.prompt_token_ids[part.first :] = tokens
            request.num_prompt_tokens = certain
            if runner.uses_mrope:  # text has the same position in each of the dimensions
                dimensions = len(request.mrope_positions)
                request.mrope_positions = torch.arange(certain).expand(dimensions, -1)
            index = batch.req_id_to_index.get(part.request_id)
            if index is not None:
                batch.token_ids_cpu[index, part.first : certain] = tokens
                batch.is_token_ids[index, part.first : certain] = True
                batch.num_tokens_no_spec[index] = batch.num_prompt_tokens[index] = certain

    @contextmanager
    def from_states(self, parts: Sequence[Part]) -> Iterator[None]:
        """Let recurrent layers go on from the states of `Part.kept_states` in a step during the block.

        vLLM notes them where it samples, by places in its batch. It is told here once the batch holds the step's
        requests, and before it sorts them: to it only what follows a prompt can be a verification.
        """
        runner = self._runner
        if not runner.model_config.is_hybrid:
            yield
            return
        batch = runner.input_batch
        reorder = runner._may_reorder_batch

        def reorder_batch(scheduled: Any) -> None:
            for part in parts:
                index = batch.req_id_to_index[part.request_id]
                batch.num_accepted_tokens_cpu[index] = max(part.kept_states, 1)
                if part.kept_states:
                    batch.num_prompt_tokens[index] = part.start
            reorder(scheduled)

        runner._may_reorder_batch = reorder_batch
        try:
            yield
        finally:
            del runner._may_reorder_batch  # its class's own is there again

    def logits(self, state: Any, parts: Sequence[Part]) -> Tensor | None:
        """The rows that are wanted, in the order of the parts: vLLM computes a row of each request.

        `execute_model` left logits [sum of all draft counts + 1, vocabulary_size], request after request; only the
        first rank may have them.
        """
        if any(part.row_count > part.draft_count + 1 for part in parts):
            return self._logits_of_states(state, parts)
        logits: Tensor | None = state.logits
        if logits is None:
            return None
        by_id = {part.request_id: part for part in parts}
        firsts: dict[str, int] = {}
        count = 0
        for request_id in self.order(state):
            firsts[request_id] = count
            count += by_id[request_id].draft_count + 1
        rows = [
            firsts[part.request_id] + part.draft_count + 1 - back
            for part in parts
            for back in range(part.row_count, 0, -1)
        ]
        return logits if rows == list(range(len(logits))) else logits[index_of(rows, logits)]

    def _logits_of_states(self, state: Any, parts: Sequence[Part]) -> Tensor | None:
        """`logits` where vLLM computes one row a request: from hidden states [tokens of the step, hidden_size]."""
        by_id = {part.request_id: part for part in parts}
        ends: dict[str, int] = {}
        end = 0
        for request_id in self.order(state):
            end += by_id[request_id].end - by_id[request_id].start
            ends[request_id] = end
        rows = [ends[part.request_id] - back for part in parts for back in range(part.row_count, 0, -1)]
        hidden = state.hidden_states
        return cast("Tensor | None", self._runner.model.compute_logits(hidden[index_of(rows, hidden)]))

    def propose(self, state: Any, parts: Sequence[Part], ends: Sequence[RoundEnd], count: int) -> Tensor:
        """Tokens of vLLM's proposer behind the last step, [requests of the step, at least `count`], as its
        `propose_draft_token_ids` has them behind its own sampler.

        Args:
            parts: In the order of the batch, as the ends are.
        """
        runner = self._runner
        drafter = runner.drafter
        device = state.hidden_states.device
        sampling = runner.input_batch.sampling_metadata
        kept_counts = [end.accepted_count + 1 for end in ends]
        if runner.speculative_config.method == "medusa":
            rows = []
            first = 0
            for part, kept in zip(parts, kept_counts, strict=True):
                rows.append(first + kept - 1)
                first += part.draft_count + 1
            hidden = state.sample_hidden_states[index_of(rows, state.sample_hidden_states)]
            return cast("Tensor", drafter.propose(drafter.num_speculative_tokens, hidden, sampling))
        metadata = state.spec_decode_common_attn_metadata
        sample_at = rejected = None
        token_count = state.scheduler_output.total_num_scheduled_tokens
        if state.spec_decode_metadata is not None:
            metadata, sample_at, rejected = drafter.prepare_inputs_padded(
                metadata,
                state.spec_decode_metadata,
                index_of(kept_counts, state.hidden_states).int(),
            )
            token_count = metadata.num_actual_tokens
        hidden = state.hidden_states
        other = getattr(runner.get_model(), "get_mtp_target_hidden_states", lambda: None)()
        if other is not None:
            hidden = other
        if runner.use_aux_hidden_state_outputs:
            hidden = torch.cat([each[:token_count] for each in state.aux_hidden_states], dim=-1)
        next_ids = [end.next_token_id or 0 for end in ends]
        with _shared_noise(drafter, [end.noise for end in ends], device):
            drafts: Tensor = drafter.propose(
                # One that drafts in parallel makes as many as it was made for.
                num_speculative_tokens=runner.num_spec_tokens if drafter.parallel_drafting else count,
                target_token_ids=runner.input_ids.gpu[:token_count],
                target_positions=runner._get_positions(token_count),
                target_hidden_states=hidden[:token_count],
                next_token_ids=index_of(next_ids, state.hidden_states).int(),
                token_indices_to_sample=sample_at,
                common_attn_metadata=metadata,
                sampling_metadata=sampling,
                mm_embed_inputs=None,
                num_rejected_tokens_gpu=rejected,
                slot_mappings=state.slot_mappings,
            )
        return drafts

    def can_go_on(self) -> bool:
        """True if tokens alone are what a pass of this model takes, and it has no recurrent state."""
        runner = self._runner
        takes_more = runner.uses_mrope or runner.supports_mm_inputs or runner.enable_prompt_embeds
        return not (takes_more or runner.model_config.is_hybrid)

    def passes(self, ends: Mapping[str, int], counts: Mapping[str, int]) -> Passes:
        """Passes behind the last step; see `Passes`."""
        return Passes(self._runner, ends, counts)

    def time_head(self, sequences: int) -> float:
        """Seconds of the head's work for one token of so many sequences."""
        began = time.perf_counter()
        self._runner.drafter.dummy_run(sequences)
        wait_for_device()
        return (time.perf_counter() - began) / int(self._runner.num_spec_tokens)


@contextmanager
def _shared_noise(drafter: Any, noises: Sequence[SharedNoise | None], device: torch.device) -> Iterator[None]:
    """Have the drafter draw tokens with noise during the block, if any is given."""
    if not any(noises):
        yield
        return
    drafter._sample_draft_tokens = _NoisyDraws(drafter.model, noises, device)
    try:
        yield
    finally:
        del drafter._sample_draft_tokens  # its class's own is there again


class _NoisyDraws:
    """Draws the tokens of a proposal position by position, without waiting for the device."""

    def __init__(self, model: Any, noises: Sequence[SharedNoise | None], device: torch.device) -> None:
        silent = SharedNoise(1.0, 0, 0)
        given = [silent if each is None else each for each in noises]
        self._model = model
        numbers = np.array(
            [(each.seed, each.length, own is not None) for each, own in zip(given, noises, strict=True)],
            dtype=np.int64,
        )
        temperatures = np.array([each.temperature for each in given])
        columns, self._temperatures = to_device([numbers.T, temperatures], device)
        self._seeds, self._lengths, is_drawn = columns
        self._is_drawn = is_drawn > 0
        self._depth = 0

    def __call__(self, hidden_states: Tensor, _: Any) -> tuple[Tensor, None]:
        """The next token of each sequence; or all of its tokens, one after the other, where a head drafts in
        parallel."""
        logits = self._model.compute_logits(hidden_states)
        count = len(logits) // len(self._seeds)
        depths = self._depth + torch.arange(count, device=logits.device).repeat(len(self._seeds))
        self._depth += count
        positions = self._lengths.repeat_interleave(count) + depths
        keys = stream_keys(self._seeds.repeat_interleave(count), positions, int(Purpose.TARGET))
        temperatures = self._temperatures.repeat_interleave(count)[:, None]
        probs = torch.softmax(logits.double() / temperatures, dim=-1)
        is_drawn = self._is_drawn.repeat_interleave(count)
        return torch.where(is_drawn, sample(probs, keys), logits.argmax(dim=-1)), None


def index_of(rows: Sequence[int], of: Tensor) -> Tensor:
    """The rows as an index, on the tensor's device, in a copy that the host does not wait for."""
    (found,) = to_device([np.array(rows, dtype=np.int64)], of.device)
    return found


def wait_for_device() -> None:
    """Wait until the GPU has done what it was given, if there is one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
