"""The proposer that vLLM calls: translates batches into sequences, and the drafts' answers into lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.integrations.vllm import contract
from tandem.integrations.vllm.drafts import target_info
from tandem.integrations.vllm.metrics import log_through
from tandem.integrations.vllm.rows import IntArray
from tandem.integrations.vllm.settings import VllmSettings, read_settings
from tandem.integrations.vllm.step_drafter import StepDrafter, logger


class TandemProposer:
    """vLLM's proposer (`"method": "custom_class"`) over Tandem's draft services.

    Proposals are greedy, which vLLM takes as one-hot distributions; its output stays that of the target at any
    temperature. Whatever fails costs proposals, never a request.

    Source: `create_custom_proposer` and `GPUModelRunner.propose_draft_token_ids` of vLLM 0.32.
    """

    def __init__(self, vllm_config: Any) -> None:
        """
        Args:
            vllm_config: vLLM's `VllmConfig`.

        Raises:
            ConfigurationError: this vLLM calls proposers differently, or an option is wrong.
        """
        contract.check_vllm()
        self._settings: VllmSettings = read_settings()
        speculative = vllm_config.speculative_config
        self._token_count = int(speculative.num_speculative_tokens)
        self._max_length = int(vllm_config.model_config.max_model_len)
        self._is_asking = contract.asks(vllm_config.parallel_config)
        self._vllm_config = vllm_config
        self._steps: StepDrafter | None = None
        self._has_failed = False

    @property
    def steps(self) -> StepDrafter | None:
        """The part that asks the drafts; None in a process that does not, and before the start."""
        return self._steps

    def load_model(self, model: object = None) -> None:
        """Connect to the drafts. The model itself is not needed; vLLM calls this when it has loaded it."""
        if not self._is_asking or self._steps is not None:
            return
        log_through(logger)
        parallel = self._vllm_config.parallel_config
        target = target_info(self._vllm_config.model_config, parallel.tensor_parallel_size)
        self._steps = StepDrafter(self._settings, target, self._token_count)
        self._steps.start()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Tokens that may follow each row of the batch, at most `num_speculative_tokens`; none where none came in time.

        Args:
            sampled_token_ids: What each row's last step sampled; empty for a row that still reads its prompt.
            num_tokens_no_spec: Length of each row with what was sampled, int32, shape [max rows].
            token_ids_cpu: Tokens of each row, int32, shape [max rows, max length].
            slot_mappings: Not used.
        """
        nothing: list[list[int]] = [[] for _ in sampled_token_ids]
        if not self._is_asking or self._has_failed:
            return nothing
        try:
            self.load_model()
            assert self._steps is not None, "it was made just now"
            rows = _rows(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            return self._steps.propose(rows, [len(sampled) for sampled in sampled_token_ids])
        except Exception:  # noqa: BLE001 - an error of ours must not end a request of vLLM's
            self._has_failed = True
            logger.exception("drafting is switched off until the next start, because it failed")
            return nothing


def _rows(sampled: Sequence[Sequence[int]], lengths: Any, token_ids: Any) -> list[IntArray]:
    """The tokens of each row of vLLM's batch.

    Raises:
        TypeError: these are not the arrays of the release that the plug-in was made for.
    """
    if not (isinstance(lengths, np.ndarray) and isinstance(token_ids, np.ndarray) and token_ids.ndim == 2):
        raise TypeError(
            f"vLLM passed {type(lengths).__name__} and {type(token_ids).__name__}; they must be numpy arrays, the "
            "second one of two dimensions"
        )
    return [token_ids[row, : int(lengths[row])] for row in range(len(sampled))]
