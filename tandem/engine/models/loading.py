"""Loads a checkpoint into a module with our attention function."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import tandem
from tandem.engine.kv_cache.layer_groups import LayerGeometry
from tandem.engine.models.attention import UnsupportedAttentionError
from tandem.engine.models.checkpoint import (
    CONFIG_FILE,
    Checkpoint,
    has_attention_alone,
    open_checkpoint,
    recurrent_state_error,
    tokenizer_hash,
)
from tandem.engine.models.fitness import check_finite, empty_model, end_ids_within, first_line
from tandem.engine.models.probe import Anatomy, probe
from tandem.engine.models.shards import stored_tensors
from tandem.engine.models.weight_files import first_of
from tandem.errors import ConfigurationError, ModelFolderError
from tandem.model_sources.hub import model_name
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
    """Geometry of each attention layer, by `layer_idx`."""
    is_packed: bool
    """True if one forward pass takes tokens of several sequences; see `tandem.engine.models.probe`."""
    dtype: torch.dtype
    device: torch.device


def load_model(
    folder: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "bfloat16",
    threads: int | None = None,
    name: str | None = None,
) -> LoadedModel:
    """Loads a decoder-only Hugging Face checkpoint.

    Args:
        folder: where the checkpoint is.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``float32``, ``bfloat16`` or ``float16``; the weights are converted to it.
        threads: CPU threads of torch in this process; None leaves them as they are.
        name: the model's name; by default that of `tandem.model_sources.hub.model_name`.

    Raises:
        ModelFolderError: the folder holds no checkpoint that can be served.
        ConfigurationError: the device or the dtype is not available.
    """
    torch_device, torch_dtype = _device(device), _dtype(dtype)
    if threads is not None:
        torch.set_num_threads(_positive("threads", threads))
    checkpoint = open_checkpoint(folder)
    # Before the weights, which may take minutes, so that a broken tokenizer is refused at once.
    vocabulary_hash = tokenizer_hash(checkpoint.folder)
    module = _load_module(checkpoint, torch_device, torch_dtype)
    anatomy = _anatomy(module, checkpoint, torch_device)
    check_finite(module, checkpoint)
    info = ModelInfo(
        name=name or model_name(checkpoint.folder),
        architecture=checkpoint.architecture,
        vocabulary_size=_vocabulary_size(module),
        tokenizer_hash=vocabulary_hash,
        max_length=_max_length(module.config),
        dtype=dtype,
        eos_token_ids=end_ids_within(checkpoint, _vocabulary_size(module)),
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
    return LoadedModel(module, info, anatomy.layers, anatomy.is_packed, torch_dtype, torch_device)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"the device is {name!r} and should be cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"the device is {name!r} and should be cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"the device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigurationError(f"the dtype is {name!r} and should be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise ConfigurationError(f"{option} is {value} and must be at least 1")
    return value


def _load_module(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Any:
    """Loads the weights, all of them and nothing else.

    Returns:
        The transformers model, in evaluation mode. `Any`, because its attributes depend on the architecture.
    """
    config = _load_config(checkpoint)
    _refuse_recurrent(checkpoint, config)
    empty = empty_model(checkpoint, config)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # stderr is for log lines
    try:
        loaded: Any = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict=stored_tensors(checkpoint.weights.files, device),
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, and `_check_loaded` says it better
        )
    except Exception as error:
        raise ModelFolderError(
            f"the weights in {checkpoint.folder} do not load: {first_line(error)}"
        ) from error
    module, report = loaded
    _check_loaded(checkpoint, report)
    # The weights are there already; buffers that are computed from the config are not.
    return module.to(device).eval().requires_grad_(False)


def _anatomy(module: Any, checkpoint: Checkpoint, device: torch.device) -> Anatomy:
    try:
        return probe(module, device)
    except UnsupportedAttentionError as error:
        raise ModelFolderError(
            f"the model in {checkpoint.folder} ({checkpoint.architecture}) cannot be served: {error}, and only layers "
            "that keep keys and values by position are supported"
        ) from error
    except Exception as error:
        raise ModelFolderError(
            f"the model in {checkpoint.folder} ({checkpoint.architecture}) cannot be run: {first_line(error)}"
        ) from error


def _load_config(checkpoint: Checkpoint) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        if checkpoint.model_type not in transformers.CONFIG_MAPPING:
            raise _unknown_architecture(checkpoint) from error
        raise ModelFolderError(
            f"the file {checkpoint.folder / CONFIG_FILE} is no config of a {checkpoint.model_type} model: "
            f"{first_line(error)}"
        ) from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unknown_architecture(checkpoint)
    return config


def _unknown_architecture(checkpoint: Checkpoint) -> ModelFolderError:
    return ModelFolderError(
        f"the model in {checkpoint.folder} has the architecture {checkpoint.architecture} (model_type "
        f"{checkpoint.model_type!r}), which transformers {transformers.__version__} does not know as a causal language "
        "model"
    )


def _refuse_recurrent(checkpoint: Checkpoint, config: Any) -> None:
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    has_state = getattr(model_class, "_is_stateful", False)
    if has_state and not has_attention_alone(
        checkpoint.model_type, getattr(config, "layer_types", None) or ()
    ):
        raise recurrent_state_error(checkpoint.folder, checkpoint.architecture)


def _check_loaded(checkpoint: Checkpoint, report: dict[str, Any]) -> None:
    """transformers fills gaps with random numbers and only warns; a model with gaps must not be served."""
    mismatched = sorted(str(entry[0]) for entry in report.get("mismatched_keys", ()))
    if mismatched:
        raise ModelFolderError(
            f"the weights in {checkpoint.folder} do not fit {checkpoint.architecture}: not of the shape that "
            f"config.json says: {first_of(mismatched)}"
        )
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ModelFolderError(
            f"the weights in {checkpoint.folder} do not fit {checkpoint.architecture}: missing: {first_of(missing)}"
        )


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
        f"the model's config.json gives no maximum length: none of {', '.join(_LENGTH_KEYS)} is set"
    )
