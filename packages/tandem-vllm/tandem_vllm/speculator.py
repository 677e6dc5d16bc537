"""The speculator of vLLM's newer model runner (V2), which replaces the one that vLLM would make.

Its tensors stay on the device, and vLLM's scheduler is a step ahead: it counts on as many proposed tokens as there may
be. So where a draft has fewer, the last sampled token is proposed as one that is certain, which costs nothing but its
row. This has not run on a GPU. On a CPU, by Triton's interpreter, it ran
once in vLLM's runner for a few completions, without a test of their distribution.

Source, of vLLM 0.32, in `vllm/v1/worker/gpu`: `spec_decode/speculator.py`, `spec_decode/ngram/speculator.py`, and how
`model_runner.py` and `spec_decode/rejection_sampler_utils.py` use `draft_logits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from tandem.errors import ConfigurationError
from tandem.model.types import Proposal
from tandem_vllm.proposer import BatchRow, Drafts, entries_of

METHOD = "ngram_gpu"
"""vLLM's name for the method in whose place Tandem drafts: one that needs no draft model, with which vLLM schedules
asynchronously."""


class TandemSpeculator(BaseSpeculator):  # type: ignore[misc]
    """Proposes for vLLM's V2 model runner from Tandem's draft services."""

    supports_mm_inputs = False

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        """Takes vLLM's `VllmConfig` and `RequestState`."""
        method = vllm_config.speculative_config.method
        if method != METHOD:
            raise ConfigurationError(
                f"vLLM's model runner V2 drafts by Tandem in place of the method {METHOD}, and this is {method}"
            )
        self._states = req_states
        self.drafts = Drafts(vllm_config)
        shape = req_states.max_num_reqs, req_states.num_speculative_steps
        self.draft_logits = torch.full((*shape, req_states.vocab_size), -torch.inf, device=device)
        """Logits of proposals before temperature, by place of the request: float32 [requests, tokens, vocabulary]."""
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Connect to the drafts: vLLM calls this once, when it has loaded its model."""
        self.drafts.start()

    def capture(self) -> None:
        """There is nothing to capture."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: object,
        aux_hidden_states: object,
        num_sampled: Tensor,
        num_rejected: object,
        last_sampled: object,
        next_prefill_tokens: object,
        temperature: Tensor,
        seeds: object,
        *,
        dummy_run: bool = False,
        **_: object,
    ) -> Tensor:
        """Proposed tokens of each row of the batch, int64 [rows, tokens], whose logits are then in `draft_logits`.

        Args, of those that are used:
            input_batch: vLLM's `InputBatch`.
            num_sampled: Tokens that each row has just sampled, 0 while it reads its prompt, [rows].
            temperature: Of each request, by its place, [requests].
        """
        count = input_batch.num_reqs
        if dummy_run:
            return self._tokens[:count]
        places = input_batch.idx_mapping[:count].long()
        rows, last = self._rows(input_batch.req_ids, places, num_sampled[:count])
        proposals = self.drafts.propose(count, lambda: rows)
        width = self._tokens.shape[1]
        filled = [
            Proposal(0, (*proposal.token_ids, *(token_id,) * (width - len(proposal))), proposal.distributions)
            for proposal, token_id in zip(proposals, last, strict=True)
        ]
        device = self.draft_logits.device
        at, columns, ids, probs = (torch.from_numpy(each).to(device) for each in entries_of(filled))
        self.draft_logits[places] = -torch.inf
        # The sampler divides by the temperature
        self.draft_logits[places[at], columns, ids] = probs.log() * temperature[places[at]]
        return torch.tensor([proposal.token_ids for proposal in filled], device=device)

    def _rows(
        self, names: Sequence[str], places: Tensor, sampled: Tensor
    ) -> tuple[list[BatchRow], list[int]]:
        """The rows of vLLM's batch, and the last token of each. The only wait for the device."""
        tokens = self._states.all_token_ids.gpu
        lengths = self._states.total_len.gpu[places].long()
        width = self._tokens.shape[1] + 1  # a step adds no more
        tail = (lengths[:, None] - width + torch.arange(width, device=places.device)).clamp(min=0)
        known = torch.cat(
            [lengths[:, None], sampled[:, None].long(), tokens[places[:, None], tail].long()], 1
        )

        def tokens_from(row: int, length: int, ids: list[int], start: int) -> list[int]:
            if length - start <= width:
                return ids[width - (length - start) :]
            read: list[int] = tokens[places[row], start:length].tolist()
            return read

        rows = []
        last = []
        for row, (length, count, *ids) in enumerate(known.tolist()):
            last.append(ids[-1])
            rows.append(BatchRow(names[row], count, partial(tokens_from, row, length, ids)))
        return rows, last
