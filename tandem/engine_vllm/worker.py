"""In vLLM's worker processes: runs a step, keeps its logits on the device, and computes what is asked of them there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from tandem.engine_vllm.contract import RUNNER_ATTRIBUTES, lacking
from tandem.model.sampling.noise import Purpose, sample, stream_keys

AnswerT = TypeVar("AnswerT")

EXTENSION = "tandem.engine_vllm.worker.RowWorker"
"""Class that vLLM mixes into its worker class."""

NO_PROPOSER = "tandem.engine_vllm.worker.NoProposer"
"""Class that vLLM makes its proposer."""


def _end_with_parent() -> None:
    """End this process once the service is gone, however it ended. vLLM's own watcher asks the worker's loop to end,
    which a worker that loads weights or waits for another one never reads."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


# vLLM imports this module in each worker before it loads weights.
if multiprocessing.parent_process() is not None:
    threading.Thread(target=_end_with_parent, name="tandem-parent", daemon=True).start()
# Linux sends SIGILL to a process that uses a CPU's tile unit (AMX) without having asked for it. vLLM's attention in
# bfloat16 does not ask; oneDNN does, but computes no product of some small models.
torch.cpu._init_amx()


class NoProposer:
    """vLLM wants a proposer where a step has several rows of a sequence. It would ask it after sampling, so never."""

    def __init__(self, config: Any) -> None:
        """Takes any configuration."""

    def load_model(self, model: Any) -> None:
        """There is nothing to load."""

    def propose(self, *arguments: Any, **named: Any) -> list[list[int]]:
        """No tokens."""
        return []


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence in a step."""

    request_id: str
    is_new: bool
    """The worker does not know it."""
    start: int
    """Tokens whose keys and values are in the cache."""
    first: int
    """Tokens that the worker knows, at most `start`."""
    token_ids: list[int]
    """Those behind them, up to the end of the step."""
    row_count: int
    """Rows that are wanted, of the last tokens."""
    block_ids: tuple[list[int], ...]
    """For each group of layers, the blocks that the worker does not know."""

    @property
    def end(self) -> int:
        return self.first + len(self.token_ids)

    @property
    def draft_count(self) -> int:
        """Tokens that vLLM has to treat as a proposal, so that it computes `row_count` rows."""
        return max(self.row_count - 1, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """A step for the workers."""

    parts: Sequence[Part]
    finished_ids: Sequence[str]
    """Sequences to forget first."""
    block_ids_to_zero: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SharedNoise:
    """The noise with which a target draws its tokens, and its head draws the same where their distributions agree."""

    temperature: float
    seed: int
    length: int
    """Length of the sequence that the head's first token extends."""


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """What the round of one part came to."""

    accepted_count: int
    """How many of the proposed tokens are kept."""
    next_token_id: int | None
    """The token that follows them; None where nobody knows it yet."""
    noise: SharedNoise | None = None
    """With which the head draws; None where it takes the most probable tokens."""


class RowWorker:
    """Methods of vLLM's worker that are called by name (`collective_rpc`)."""

    model_runner: Any
    rank: int
    _tandem_logits: Tensor | None = None
    _tandem_left: tuple[Any, Sequence[Part]] | None = None
    """The last step's state and parts, where a head reads them."""

    def tandem_lacks(self) -> list[str]:
        """Members that the model runner should have and has not."""
        runner: Any = self.model_runner
        return lacking(runner, RUNNER_ATTRIBUTES["V2" if hasattr(runner, "req_states") else "V1"])

    @torch.inference_mode()
    def tandem_step(self, step: Step) -> None:
        """Run a step and keep the logits of its rows, part by part, [rows, vocabulary_size]."""
        self._tandem_logits = None
        self._tandem_left = None
        runner: Any = self.model_runner
        known = [part for part in step.parts if not part.is_new]
        extend, logits_of = (_extend_v2, _logits_v2) if hasattr(runner, "req_states") else (_extend, _logits)
        extend(runner, known)
        try:
            runner.execute_model(_scheduler_output(step))
        finally:
            state, runner.execute_model_state = runner.execute_model_state, None
        self._tandem_logits = logits_of(runner, state, step.parts)
        self._tandem_left = state, step.parts
        if torch.cuda.is_initialized() and not any(part.row_count for part in step.parts):  # type: ignore[no-untyped-call]
            # Nobody reads anything of this step. The next one writes where this one's copies to the device may still
            # read; vLLM waits for them by sampling.
            torch.cuda.current_stream().synchronize()

    @torch.inference_mode()
    def tandem_propose(self, ends: Sequence[RoundEnd], count: int) -> list[list[int]] | None:
        """Have vLLM's own head read the last step, and draft `count` tokens behind what each of its parts came to; on
        the first rank, the tokens of each part."""
        left, self._tandem_left = self._tandem_left, None
        if left is None:
            raise RuntimeError("the step has left nothing for a head")
        state, parts = left
        runner: Any = self.model_runner
        by_id = {part.request_id: end for part, end in zip(parts, ends, strict=True)}
        # vLLM orders requests as it likes
        order = list(runner.input_batch.req_ids)
        drafted = _propose(runner, state, parts, [by_id[request_id] for request_id in order], count)
        if self.rank != 0:
            return None
        rows = dict(zip(order, drafted.tolist(), strict=True))
        return [rows[part.request_id][:count] for part in parts]

    @torch.inference_mode()
    def tandem_time_head(self, sequences: int) -> float:
        """Seconds that the head takes for one token of so many sequences, the least of three trials."""
        runner: Any = self.model_runner
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            runner.drafter.dummy_run(sequences)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return min(seconds) / int(runner.num_spec_tokens)

    @torch.inference_mode()
    def tandem_apply(self, function: Callable[[Any, Tensor], AnswerT], payload: Any) -> AnswerT | None:
        """`function(payload, logits)` of the last step's logits, on the first rank."""
        if self.rank != 0:
            return None
        logits = self._tandem_logits
        if logits is None:
            raise RuntimeError("the step has left no logits")
        return function(payload, logits)


def _propose(runner: Any, state: Any, parts: Sequence[Part], ends: Sequence[RoundEnd], count: int) -> Tensor:
    """Tokens of vLLM's proposer behind the last step, [sequences of the batch, at least `count`].

    For the runner that vLLM calls V1; as its `propose_draft_token_ids` does behind its own sampler.

    Args:
        ends: In the batch's order.
    """
    drafter = runner.drafter
    device = state.hidden_states.device
    sampling = runner.input_batch.sampling_metadata
    kept_counts = [end.accepted_count + 1 for end in ends]
    if runner.speculative_config.method == "medusa":
        draft_counts = {part.request_id: part.draft_count for part in parts}
        rows = []
        first = 0
        for request_id, count_kept in zip(runner.input_batch.req_ids, kept_counts, strict=True):
            rows.append(first + count_kept - 1)
            first += draft_counts[request_id] + 1
        hidden = state.sample_hidden_states[_index(rows, state.sample_hidden_states)]
        return cast("Tensor", drafter.propose(drafter.num_speculative_tokens, hidden, sampling))
    metadata = state.spec_decode_common_attn_metadata
    sample_at = rejected = None
    token_count = state.scheduler_output.total_num_scheduled_tokens
    if state.spec_decode_metadata is not None:
        kept = torch.tensor(kept_counts, dtype=torch.int32, device=device)
        metadata, sample_at, rejected = drafter.prepare_inputs_padded(
            metadata, state.spec_decode_metadata, kept
        )
        token_count = metadata.num_actual_tokens
    hidden = state.hidden_states
    other = getattr(runner.get_model(), "get_mtp_target_hidden_states", lambda: None)()
    if other is not None:
        hidden = other
    if runner.use_aux_hidden_state_outputs:
        hidden = torch.cat([each[:token_count] for each in state.aux_hidden_states], dim=-1)
    next_ids = [0 if end.next_token_id is None else end.next_token_id for end in ends]
    with _shared_noise(drafter, [end.noise for end in ends], device):
        drafts: Tensor = drafter.propose(
            # One that drafts in parallel makes as many as it was made for.
            num_speculative_tokens=runner.num_spec_tokens if drafter.parallel_drafting else count,
            target_token_ids=runner.input_ids.gpu[:token_count],
            target_positions=runner._get_positions(token_count),
            target_hidden_states=hidden[:token_count],
            next_token_ids=torch.tensor(next_ids, dtype=torch.int32, device=device),
            token_indices_to_sample=sample_at,
            common_attn_metadata=metadata,
            sampling_metadata=sampling,
            mm_embed_inputs=None,
            num_rejected_tokens_gpu=rejected,
            slot_mappings=state.slot_mappings,
        )
    return drafts


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
        self._is_drawn = torch.tensor([each is not None for each in noises], device=device)
        self._temperatures = torch.tensor(
            [each.temperature for each in given], dtype=torch.float64, device=device
        )
        self._seeds = torch.tensor([each.seed for each in given], dtype=torch.int64, device=device)
        self._lengths = torch.tensor([each.length for each in given], dtype=torch.int64, device=device)
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


def _extend(runner: Any, parts: Sequence[Part]) -> None:
    """Make known requests' tokens those of the step. All of them are prompt to vLLM, which has sampled none."""
    batch = runner.input_batch
    for part in parts:
        request = runner.requests[part.request_id]
        certain = part.end - part.draft_count
        tokens = part.token_ids[: certain - part.first]
        request.prompt_token_ids[part.first :] = tokens
        request.num_prompt_tokens = certain
        index = batch.req_id_to_index.get(part.request_id)
        if index is not None:
            batch.token_ids_cpu[index, part.first : certain] = tokens
            batch.is_token_ids[index, part.first : certain] = True
            batch.num_tokens_no_spec[index] = batch.num_prompt_tokens[index] = certain


def _extend_v2(runner: Any, parts: Sequence[Part]) -> None:
    """`_extend` for the runner that vLLM calls V2, to which a proposal is prompt as well: it takes the tokens behind a
    prompt from its own sampler. A step of one certain token and a proposal is a decode to it all the same."""
    states = runner.req_states
    for part in parts:
        index = states.req_id_to_index[part.request_id]
        states.all_token_ids.stage_write(index, part.first, part.token_ids)
        states.prefill_len.np[index] = part.end
        states.num_computed_tokens.stage_write_elem(index, part.start)
    states.apply_staged_writes()


def _scheduler_output(step: Step) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    new = [part for part in step.parts if part.is_new]
    known = [part for part in step.parts if not part.is_new]
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(
                req_id=part.request_id,
                prompt_token_ids=part.token_ids[: part.end - part.draft_count],
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
                pooling_params=None,
                block_ids=part.block_ids,
                num_computed_tokens=part.start,
                lora_request=None,
                prefill_token_ids=part.token_ids,  # V2
            )
            for part in new
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[part.request_id for part in known],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[part.block_ids if any(part.block_ids) else None for part in known],
            num_computed_tokens=[part.start for part in known],
            num_output_tokens=[0] * len(known),
        ),
        num_scheduled_tokens={part.request_id: part.end - part.start for part in step.parts},
        total_num_scheduled_tokens=sum(part.end - part.start for part in step.parts),
        scheduled_spec_decode_tokens={
            part.request_id: part.token_ids[-part.draft_count :] for part in step.parts if part.draft_count
        },
        scheduled_encoder_inputs={},
        finished_req_ids=set(step.finished_ids),
        free_encoder_mm_hashes=[],
        new_block_ids_to_zero=list(step.block_ids_to_zero) or None,
    )


def _logits(runner: Any, state: Any, parts: Sequence[Part]) -> Tensor | None:
    """The rows that are wanted, in the order of the parts: vLLM orders requests as it likes, and computes a row of
    each.

    For the runner that vLLM calls V1, whose `execute_model` left logits [sum of all draft counts + 1,
    vocabulary_size], request after request; only the first rank may have them.
    """
    logits: Tensor | None = state.logits
    if logits is None:
        return None
    by_id = {part.request_id: part for part in parts}
    firsts: dict[str, int] = {}
    count = 0
    for request_id in runner.input_batch.req_ids:
        firsts[request_id] = count
        count += by_id[request_id].draft_count + 1
    rows = [firsts[part.request_id] + row for part in parts for row in range(part.row_count)]
    return logits if rows == list(range(len(logits))) else logits[_index(rows, logits)]


def _logits_v2(runner: Any, state: Any, parts: Sequence[Part]) -> Tensor | None:
    """`_logits` for the runner that vLLM calls V2, which leaves hidden states, [tokens of the step, hidden_size]."""
    batch, hidden = state.input_batch, state.hidden_states
    ends = dict(zip(batch.req_ids, batch.query_start_loc_np[1:].tolist(), strict=False))
    rows = [ends[part.request_id] - back for part in parts for back in range(part.row_count, 0, -1)]
    return runner.model.compute_logits(hidden[_index(rows, hidden)]) if rows else None


def _index(rows: Sequence[int], of: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=of.device)
