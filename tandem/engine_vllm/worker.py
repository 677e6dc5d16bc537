"""In vLLM's worker processes: runs a step, keeps its logits on the device, and computes what is asked of them there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tandem.engine_vllm.adapter import prepare_runner
from tandem.engine_vllm.contract import RUNNER_ATTRIBUTES, lacking
from tandem.engine_vllm.runner_v1 import RunnerV1
from tandem.engine_vllm.runner_v2 import RunnerV2
from tandem.engine_vllm.step import Draws, Part, RoundEnd, Step

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
    prepare_runner()
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
        return lacking(runner, RUNNER_ATTRIBUTES["V2" if is_v2(runner) else "V1"])

    @property
    def _tandem_runner(self) -> RunnerV1 | RunnerV2:
        runner: Any = self.model_runner
        return RunnerV2(runner) if is_v2(runner) else RunnerV1(runner)

    @torch.inference_mode()
    def tandem_step(self, step: Step) -> None:
        """Run a step and keep the logits of its rows, part by part, [rows, vocabulary_size]."""
        self._tandem_logits = None
        self._tandem_left = None
        runner: Any = self.model_runner
        ours = self._tandem_runner
        ours.extend([part for part in step.parts if not part.is_new])
        try:
            with ours.from_states(step.parts):
                runner.execute_model(_scheduler_output(step))
        finally:
            state = runner.execute_model_state
            runner.execute_model_state = None
        self._tandem_logits = ours.logits(state, step.parts)
        self._tandem_left = state, step.parts
        if torch.cuda.is_initialized() and not any(part.row_count for part in step.parts):  # type: ignore[no-untyped-call]
            # Nobody reads anything of this step. The next one writes where this one's copies to the device may still
            # read; vLLM waits for them by sampling.
            torch.cuda.current_stream().synchronize()

    @torch.inference_mode()
    def tandem_propose(self, ends: Sequence[RoundEnd], count: int) -> list[list[int]] | None:
        """Have vLLM's own head read the last step, and draft `count` tokens behind what each of its parts came to; on
        the first rank, the tokens of each part."""
        left = self._tandem_left
        self._tandem_left = None
        if left is None:
            raise RuntimeError("the step has left nothing for a head")
        state, parts = left
        runner = self._tandem_runner
        order = runner.order(state)
        part_of = {part.request_id: part for part in parts}
        end_of = {part.request_id: end for part, end in zip(parts, ends, strict=True)}
        ordered_parts = [part_of[request_id] for request_id in order]
        ordered_ends = [end_of[request_id] for request_id in order]
        drafted = runner.propose(state, ordered_parts, ordered_ends, count)
        if self.rank != 0:
            return None
        rows = dict(zip(order, drafted.tolist(), strict=True))
        return [rows[part.request_id][:count] for part in parts]

    def tandem_drafts_by_itself(self) -> bool:
        """True if further tokens can follow a step's own, drawn here."""
        return self._tandem_runner.can_go_on()

    @torch.inference_mode()
    def tandem_draft(
        self,
        begin: Callable[[Any, Tensor, Sequence[int]], Draws[AnswerT]],
        payload: Any,
        counts: Sequence[int],
    ) -> AnswerT | None:
        """Draw so many tokens behind each row of the last step, and run all but the last of them through the model. The
        host does not wait for the device before it reads all of them; on the first rank, what it reads.

        Args:
            begin: Makes what draws, for this payload, for logits like the given ones, and with these counts.
        """
        logits = self._tandem_logits
        left = self._tandem_left
        if left is None or (logits is None and self.rank == 0):
            raise RuntimeError("the step has left no logits")
        _, parts = left
        draws = begin(payload, logits, counts) if self.rank == 0 and logits is not None else None
        passes = None
        if max(counts) > 1:
            drafted = [part.request_id for part in parts if part.row_count]
            ends = {part.request_id: part.end for part in parts}
            passes = self._tandem_runner.passes(ends, dict(zip(drafted, counts, strict=True)))
        for depth in range(max(counts)):
            token_ids = None if draws is None or logits is None else draws.draw(logits)
            if passes is not None and depth + 1 < max(counts):
                logits = passes.run(token_ids)
        return None if draws is None else draws.read()

    @torch.inference_mode()
    def tandem_time_head(self, sequences: int) -> float:
        """Seconds that the head takes for one token of so many sequences, the least of three trials."""
        return min(self._tandem_runner.time_head(sequences) for _ in range(3))

    @torch.inference_mode()
    def tandem_apply(self, function: Callable[[Any, Tensor], AnswerT], payload: Any) -> AnswerT | None:
        """`function(payload, logits)` of the last step's logits, on the first rank."""
        if self.rank != 0:
            return None
        logits = self._tandem_logits
        if logits is None:
            raise RuntimeError("the step has left no logits")
        return function(payload, logits)


def is_v2(runner: Any) -> bool:
    """True for the model runner that vLLM calls V2."""
    return hasattr(runner, "req_states")


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
