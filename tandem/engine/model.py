"""Loading a checkpoint into a module whose attention is ours."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import tandem
from tandem.engine.attention import UnsupportedAttentionError
from tandem.engine.cache import LayerGeometry
from tandem.engine.checkpoint import (
    Checkpoint,
    first_of,
    open_checkpoint,
    recurrent_state_error,
    tokenizer_hash,
)
from tandem.engine.native.kernels import Kernels
from tandem.engine.native.linear import pack_linears
from tandem.engine.native.load import load_kernels
from tandem.engine.native.trace import Trace
from tandem.engine.probe import Anatomy, probe
from tandem.errors import ConfigurationError, ModelFolderError
from tandem.types import ModelInfo

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, ready to run."""

    module: nn.Module
    info: ModelInfo
    layers: tuple[LayerGeometry, ...]
    """What each attention layer stores, by `layer_idx`."""
    is_packed: bool
    """Whether one forward pass takes tokens of several sequences; see `tandem.engine.probe`."""
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels | None = None
    """Compiled for this machine; None where torch's own must do."""
    trace: Trace | None = None
    """For steps that are played from tapes; None where there are no kernels, or sequences run one by one."""


def load_model(
    folder: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "bfloat16",
    threads: int | None = None,
    name: str | None = None,
    compile_mode: str = "auto",
    compile_cache: Path | None = None,
) -> LoadedModel:
    """Loads a decoder-only Hugging Face checkpoint.

    Args:
        folder: where the checkpoint is.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``float32``, ``bfloat16`` or ``float16``; the weights are converted to it.
        threads: CPU threads of torch in this process; None leaves them as they are.
        name: what the model is called; the folder's name unless given.
        compile_mode: ``auto`` computes with kernels compiled for this machine where that works, ``on`` demands it,
            ``off`` leaves all to torch.
        compile_cache: folder for compiled kernels; None for the user's own.

    Raises:
        ModelFolderError: the folder holds no checkpoint that can be served.
        ConfigurationError: the device or the dtype is not to be had, or the kernels are not although demanded.
    """
    torch_device, torch_dtype = _device(device), _dtype(dtype)
    if threads is not None:
        torch.set_num_threads(_positive("threads", threads))
    checkpoint = open_checkpoint(folder)
    module = _load_module(checkpoint, torch_device, torch_dtype)
    anatomy = _anatomy(module, checkpoint, torch_device)
    info = ModelInfo(
        name=name or checkpoint.folder.resolve().name,
        architecture=checkpoint.architecture,
        vocabulary_size=_vocabulary_size(module),
        tokenizer_hash=tokenizer_hash(checkpoint.folder),
        max_length=_max_length(module.config),
        dtype=dtype,
        eos_token_ids=checkpoint.eos_token_ids,
        service_version=tandem.__version__,
        parameter_count=sum(parameter.numel() for parameter in module.parameters()),
    )
    logger.info(
        "model loaded",
        extra={
            "model": info.name,
            "architecture": info.architecture,
            "parameters": info.parameter_count,
            "dtype": dtype,
        },
    )
    kernels = load_kernels(torch_device, torch_dtype, compile_mode, compile_cache)
    if kernels is not None:
        pack_linears(module, kernels)
    trace = Trace(module) if kernels is not None and anatomy.is_packed else None
    return LoadedModel(
        module, info, anatomy.layers, anatomy.is_packed, torch_dtype, torch_device, kernels, trace
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"The device is {name!r} and should be cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"The device is {name!r} and should be cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"The device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices."
        )
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigurationError(f"The dtype is {name!r} and should be one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise ConfigurationError(f"{option} is {value} and must be at least 1.")
    return value


def _load_module(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Any:
    """Loads the weights, all of them and nothing else.

    Returns:
        The transformers model, in evaluation mode. `Any`, because its attributes depend on the architecture.
    """
    config = _load_config(checkpoint)
    _refuse_recurrent(checkpoint, config)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # stderr is for log lines
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, and `_check_loaded` says it better
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise ModelFolderError(
            f"The weights in {checkpoint.folder} do not load: {_first_line(error)}."
        ) from error
    module, report = loaded
    _check_loaded(checkpoint, report)
    return module.to(device).eval().requires_grad_(False)


def _anatomy(module: Any, checkpoint: Checkpoint, device: torch.device) -> Anatomy:
    try:
        return probe(module, device)
    except UnsupportedAttentionError as error:
        raise ModelFolderError(
            f"The model in {checkpoint.folder} ({checkpoint.architecture}) cannot be served: {error}, and only layers "
            "that keep keys and values by position are supported."
        ) from error


def _load_config(checkpoint: Checkpoint) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=False, local_files_only=True
        )
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise _unknown_architecture(checkpoint) from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unknown_architecture(checkpoint)
    return config


def _unknown_architecture(checkpoint: Checkpoint) -> ModelFolderError:
    return ModelFolderError(
        f"The model in {checkpoint.folder} has the architecture {checkpoint.architecture} (model_type "
        f"{checkpoint.model_type!r}), which transformers {transformers.__version__} does not know as a causal language "
        "model."
    )


def _refuse_recurrent(checkpoint: Checkpoint, config: Any) -> None:
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        raise recurrent_state_error(checkpoint.folder, checkpoint.architecture)


def _check_loaded(checkpoint: Checkpoint, report: dict[str, Any]) -> None:
    """transformers fills gaps with random numbers and only warns; a model with gaps must not be served."""
    mismatched = sorted(str(entry[0]) for entry in report.get("mismatched_keys", ()))
    if mismatched:
        raise ModelFolderError(
            f"The weights in {checkpoint.folder} do not fit {checkpoint.architecture}: not of the shape that "
            f"config.json says: {first_of(mismatched)}."
        )
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ModelFolderError(
            f"The weights in {checkpoint.folder} do not fit {checkpoint.architecture}: missing: {first_of(missing)}."
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")


def _vocabulary_size(module: Any) -> int:
    """Rows of the output head: ids that the model can say, which may be more than the tokenizer knows."""
    return int(module.get_output_embeddings().weight.shape[0])


def _max_length(config: Any) -> int:
    text_config = config.get_text_config(decoder=True)
    for key in _LENGTH_KEYS:
        value = getattr(text_config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelFolderError(
        f"The model's config.json gives no maximum length: none of {', '.join(_LENGTH_KEYS)} is set."
    )
