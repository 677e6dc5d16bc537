"""Starts vLLM in this process, and hands over the parts of it that are used. `tandem.engine_vllm.contract` lists them.

The model runner is the one that vLLM calls V1, unless VLLM_USE_V2_MODEL_RUNNER is 1: between `execute_model` and
`sample_tokens`, which is never called, V1 leaves logits, and V2 hidden states. V2 needs Triton; it has run on a CPU by
Triton's interpreter, in the tests, and not on a GPU.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.engine_vllm.contract import check_engine, check_runner
from tandem.errors import ConfigurationError

logger = logging.getLogger(__name__)

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
    """Set what vLLM and torch read from the environment, unless the user has. Before either is imported."""
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


def uses_v2_runner() -> bool:
    """True if the user asks for the model runner that vLLM calls V2."""
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


def prepare_runner() -> None:
    """Change what is changed of vLLM's model runner, in each process that has one, before it loads weights."""
    if uses_v2_runner():
        # It imports torch, which reads what `prepare_process` sets.
        from tandem.engine_vllm.runner_v2 import share_noise

        share_noise()


@dataclass(frozen=True, slots=True)
class Core:
    """vLLM's parts, loaded: its own scheduler is there and never asked."""

    engine: Any
    """Its `EngineCore`."""
    config: Any
    executor: Any
    manager: Any
    """Its `KVCacheManager`."""
    running: Any
    """Its state of a request that has begun."""

    def is_attention(self, spec: Any) -> bool:
        """True if a group of layers keeps keys and values of tokens, which can be rolled back."""
        from vllm.v1.kv_cache_interface import AttentionSpec

        return all(isinstance(each, AttentionSpec) for each in _single(spec))

    def recurrent_kinds(self, spec: Any) -> set[str]:
        """vLLM's names of the recurrent layers in a group."""
        from vllm.v1.kv_cache_interface import MambaSpec

        return {each.mamba_type.name for each in _single(spec) if isinstance(each, MambaSpec)}

    def state_slots(self, spec: Any) -> int:
        """Tokens of a step behind each of which the recurrent layers of a group keep a state, if it has any."""
        return max((1 + getattr(each, "num_speculative_blocks", -1) for each in _single(spec)), default=0)

    def sees_all(self, spec: Any) -> bool:
        """True if a group of layers keeps all tokens."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        return all(isinstance(each, FullAttentionSpec) for each in _single(spec))

    @property
    def has_one_process(self) -> bool:
        """True if the worker runs in this process, on the calling thread."""
        return bool(self.config.parallel_config.world_size == 1)


def _single(spec: Any) -> list[Any]:
    """The specs that one of several similar ones stands for."""
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def load_core(
    options: Mapping[str, Any], on_failure: Callable[[], None] | None, reserved_bytes: int = 0
) -> Core:
    """Start vLLM's workers, load the weights and allocate the KV cache, beside which so much of a GPU's share stays
    free."""
    check_engine("V2" if uses_v2_runner() else "V1")
    prepare_runner()
    began = time.perf_counter()
    try:
        with _report_progress(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about its own code
            core = _start(options, on_failure, reserved_bytes)
        check_runner(core.executor.collective_rpc("tandem_lacks")[0])
    except ConfigurationError:
        raise
    except Exception as error:
        logger.exception("vLLM did not start")
        raise ConfigurationError(f"vLLM cannot serve {options['model']}: {_reason(error)}") from error
    logger.info("vLLM has loaded the model", extra={"seconds": time.perf_counter() - began})
    return core


def share_beside(share: float, reserved_bytes: int, total_bytes: int) -> float:
    """The share of a GPU's memory that vLLM may take of a service's, so that so much of that stays free."""
    left = share - reserved_bytes / total_bytes
    if left <= 0.0:
        raise ConfigurationError(
            f"device_memory_utilization is {share:g}, which is {share * total_bytes / 2**20:.0f} MB of this GPU; rows "
            f"alone take {reserved_bytes / 2**20:.0f} MB beside weights and KV cache, so it must be more"
        )
    return left


def _start(options: Mapping[str, Any], on_failure: Callable[[], None] | None, reserved_bytes: int) -> Core:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor
    from vllm.v1.request import RequestStatus

    if reserved_bytes and "kv_cache_memory_bytes" not in options:
        from vllm.platforms import current_platform

        share = options.get("gpu_memory_utilization", EngineArgs.gpu_memory_utilization)
        total = current_platform.get_device_total_memory()
        options = {**options, "gpu_memory_utilization": share_beside(share, reserved_bytes, total)}
    config = EngineArgs(**options).create_engine_config()
    if not config.scheduler_config.enable_chunked_prefill:
        raise ConfigurationError(
            f"vLLM cannot serve {options['model']}: on this device its attention for this model does not go on from a "
            "cache with several tokens, as a verification does; set engine to tandem"
        )
    if config.model_config.is_hybrid and config.cache_config.enable_prefix_caching:
        logger.info("the model has recurrent layers: nothing of a prompt is reused")
        config = EngineArgs(**{**options, "enable_prefix_caching": False}).create_engine_config()
    engine = EngineCore(config, Executor.get_class(config), False, executor_fail_callback=on_failure)
    manager = engine.scheduler.kv_cache_manager
    return Core(engine, engine.vllm_config, engine.model_executor, manager, RequestStatus.RUNNING)


@contextmanager
def gpus_to_itself(count: int) -> Iterator[None]:
    """Let no other service of this machine load a model on the same GPUs during the block: vLLM measures what a step
    takes by the memory that is free, and would count what another one allocates meanwhile."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    with ExitStack() as stack:
        # In one order, so that two services never wait for each other.
        for gpu in sorted(seen.split(",")[:count]):
            path = Path(tempfile.gettempdir()) / f"tandem-gpu-{gpu}.lock"
            with suppress(PermissionError):  # another user's, who made it
                path.touch()
            lock = stack.enter_context(path.open("rb"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting until another service has loaded its model", extra={"gpu": gpu})
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _report_progress() -> Iterator[None]:
    """Log that loading goes on. Workers in other processes, which may read weights for minutes, log warnings alone."""
    began = time.perf_counter()
    is_loaded = threading.Event()

    def tell() -> None:
        while not is_loaded.wait(_TOLD_EVERY_SECONDS):
            logger.info("vLLM is loading the model", extra={"seconds": round(time.perf_counter() - began)})

    threading.Thread(target=tell, name="tandem-loading", daemon=True).start()
    try:
        yield
    finally:
        is_loaded.set()


def _reason(error: BaseException) -> str:
    """The words of an error of vLLM's, or of the one behind it, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "validation error" not in line), type(error).__name__)
    return told.removeprefix("Value error, ").partition(" [type=")[0].rstrip(".")
