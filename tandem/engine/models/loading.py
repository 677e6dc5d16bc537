"""Loads a checkpoint into a module with our attention function."""

from __future__ import annotations

import logging
import mmap
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, prod
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

import tandem
from tandem.config.names import LENGTH_KEYS
from tandem.engine.kv_cache.arena import LayerGeometry
from tandem.engine.models.attention import UnsupportedAttentionError, probe
from tandem.engine.models.checkpoint import (
    CONFIG_FILE,
    LONGEST_REASON,
    Checkpoint,
    first_of,
    open_checkpoint,
    tokenizer_hash,
    weights_fingerprint,
)
from tandem.errors import ConfigurationError, ModelFolderError
from tandem.model.types import ModelInfo, Weights
from tandem.model_sources.files import refusal
from tandem.model_sources.hub import model_name

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid", "mamba", "recurrent"})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, ready to run."""

    module: nn.Module
    info: ModelInfo
    layers: tuple[LayerGeometry, ...]
    """Geometry of each attention layer, by `layer_idx`."""
    is_packed: bool
    """True if one forward pass takes tokens of several sequences; see `tandem.engine.models.attention`."""
    dtype: torch.dtype
    device: torch.device
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of its parameters as they were loaded: kernels pack some into other ones."""
    stored_names: frozenset[str] = frozenset()
    """Names of the tensors in its checkpoint."""


def load_model(
    folder: str | Path, *, device: str = "cpu", dtype: str = "bfloat16", threads: int | None = None
) -> LoadedModel:
    """Loads a decoder-only Hugging Face checkpoint. `device` and `dtype` are names that settings have checked."""
    torch_device = torch.device(device)
    torch_dtype = _DTYPES[dtype]
    if torch_device.type == "cuda" and (torch_device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigurationError(f"the device is {device!r}, but torch sees {count} CUDA devices")
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint = open_checkpoint(folder)
    # Before the weights, which may take minutes, so that a broken tokenizer is refused at once.
    vocabulary_hash = tokenizer_hash(checkpoint.folder)
    module = load_module(checkpoint, torch_device, torch_dtype)
    try:
        layers, is_packed = probe(module, torch_device)
    except Exception as error:
        fault = f"run: {first_line(error)}"
        if isinstance(error, UnsupportedAttentionError):
            fault = f"served: {error}, and only layers that keep keys and values by position are supported"
        raise ModelFolderError(
            f"the model in {checkpoint.folder} ({checkpoint.architecture}) cannot be {fault}"
        ) from error
    check_finite(module, checkpoint)
    # Ids that the model can say, which may be more than the tokenizer knows
    vocabulary_size = int(module.get_output_embeddings().weight.shape[0])
    info = ModelInfo(
        name=model_name(checkpoint.folder),
        architecture=checkpoint.architecture,
        vocabulary_size=vocabulary_size,
        tokenizer_hash=vocabulary_hash,
        max_length=_max_length(module.config),
        dtype=dtype,
        eos_token_ids=end_ids_within(checkpoint, vocabulary_size),
        sampling_defaults=checkpoint.sampling_defaults,
        service_version=tandem.__version__,
        parameter_count=sum(parameter.numel() for parameter in module.parameters()),
        rope=_rope(module.config),
        trained_length=_max_length(module.config),
        weights=Weights(1, weights_fingerprint(checkpoint.folder, checkpoint.weights)),
    )
    loaded = {"model": info.name, "architecture": info.architecture, "parameters": info.parameter_count}
    logger.info("model loaded", extra={**loaded, "dtype": dtype})
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    names = checkpoint.weights.names
    return LoadedModel(module, info, layers, is_packed, torch_dtype, torch_device, shapes, names)


def load_module(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of transformers for a checkpoint, with its weights, ready for inference.

    Raises:
        ModelFolderError: Its weights do not load or do not fit, or its layers are recurrent.
    """
    config = _load_config(checkpoint)
    _refuse_recurrent(checkpoint, config)
    empty = empty_model(checkpoint, config)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # stderr is for log lines
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # a table of what did not fit
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
    _check_loaded(checkpoint, report, module)
    # The weights are there already; buffers that are computed from the config are not.
    return module.to(device).eval().requires_grad_(False)


def _load_config(checkpoint: Checkpoint) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        if checkpoint.model_type not in transformers.CONFIG_MAPPING:
            raise _unknown_architecture(checkpoint) from error
        fault = f"is no config of a {checkpoint.model_type} model: {first_line(error)}"
        raise refusal(checkpoint.folder / CONFIG_FILE, fault) from error
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
    """Refuse models whose cache is overwritten at each token: it cannot be rolled back after a rejected one."""
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    has_state = getattr(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False)
    # Models of a stateful family may have attention alone.
    if kinds & _RECURRENT_LAYER_TYPES or (has_state and kinds != {"full_attention"}):
        raise ModelFolderError(
            f"the model in {checkpoint.folder} ({checkpoint.architecture}) keeps recurrent state, which cannot be "
            "rolled back when a proposed token is rejected; a model with attention layers only is needed"
        )


def _check_loaded(checkpoint: Checkpoint, report: dict[str, Any], module: nn.Module) -> None:
    """Refuse a model with gaps, which transformers fills with random numbers, or with tensors that it drops: those of a
    part that is not served, such as a vision tower or an MTP layer, may be left over; one of a module of the model,
    such as the scale of a quantized weight, would change what the model says."""
    unused = sorted(report.get("unexpected_keys", ()))
    modules = {name for name, _ in module.named_modules() if name}
    wrong = {
        "not of the shape that config.json says: {}": [str(key) for key, *_ in report.get("mismatched_keys", ())],
        "missing: {}": report.get("missing_keys", ()),
        "they hold tensors that it has no use for: {}; quantized weights need their quantization_config in config.json":
            [name for name in unused if name.rpartition(".")[0] in modules],
    }  # fmt: skip
    for fault, names in wrong.items():
        if names:
            raise _misfit(checkpoint, fault.format(first_of(sorted(names))))
    if unused:
        logger.info("tensors of other parts are not loaded", extra={"tensors": first_of(unused)})


def _max_length(config: Any) -> int:
    text_config = config.get_text_config(decoder=True)
    for key in LENGTH_KEYS:
        value = getattr(text_config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelFolderError(
        f"the model's config.json gives no maximum length: none of {', '.join(LENGTH_KEYS)} is set"
    )


def _rope(config: Any) -> str:
    """See `ModelInfo.rope`. Lists are left out: longrope's have as many factors as a head has frequencies."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    plain = {name: value for name, value in parameters.items() if not isinstance(value, list | dict)}
    return ", ".join(f"{name} {value}" for name, value in sorted(plain.items()) if value is not None)


def empty_model(checkpoint: Checkpoint, config: Any) -> Any:
    """Return the model that the config describes, without memory for its numbers."""
    try:
        with torch.device("meta"):
            made: Any = transformers.AutoModelForCausalLM
            module = made.from_config(config, trust_remote_code=False)
    except Exception as error:
        fault = f"describes no {checkpoint.architecture}: {first_line(error)}"
        raise refusal(checkpoint.folder / CONFIG_FILE, fault) from error
    count = sum(parameter.numel() for parameter in module.parameters())
    # Up to that, loading reports missing tensors by name
    if count > 2 * checkpoint.weights.value_count:
        held = checkpoint.weights.value_count
        raise _misfit(
            checkpoint, f"{CONFIG_FILE} describes a model of {count} parameters, and the files hold {held}"
        )
    return module


def _misfit(checkpoint: Checkpoint, fault: str) -> ModelFolderError:
    return ModelFolderError(
        f"the weights in {checkpoint.folder} do not fit {checkpoint.architecture}: {fault}"
    )


def end_ids_within(checkpoint: Checkpoint, vocabulary_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence ids within the vocabulary; a warning names the others, which can never occur."""
    beyond = [str(token_id) for token_id in checkpoint.eos_token_ids if token_id >= vocabulary_size]
    if beyond:
        logger.warning(
            "an eos_token_id is beyond the vocabulary, so no text ends with it",
            extra={"eos_token_id": first_of(beyond), "vocabulary_size": vocabulary_size},
        )
    return tuple(token_id for token_id in checkpoint.eos_token_ids if token_id < vocabulary_size)


@torch.no_grad()
def check_finite(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Refuse weights that hold NaN or infinity, and buffers made of the config, such as rotary frequencies, that do.
    The extremes of each tensor show it, since NaN is both. Minus infinity is valid in buffers, as a mask."""
    weights = _extremes(module.named_parameters())
    buffers = _extremes(module.named_buffers())
    wrong = [name for name, (low, high) in weights.items() if not (isfinite(low) and isfinite(high))]
    if wrong:
        raise ModelFolderError(
            f"the weights in {checkpoint.folder} hold NaN or infinity as {module.dtype}: {first_of(wrong)}"
        )
    wrong = [name for name, (low, high) in buffers.items() if isnan(low) or high == inf]
    if wrong:
        fault = f"describes a model that cannot be: of its numbers come NaN or infinity in {first_of(wrong)}"
        raise refusal(checkpoint.folder / CONFIG_FILE, fault)


def _extremes(named: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[float, float]]:
    """The minimum and maximum of each floating-point tensor, NaN where it holds one, read from the device at once."""
    tensors = {name: tensor for name, tensor in named if tensor.is_floating_point() and tensor.numel()}
    if not tensors:
        return {}
    # torch cannot order numbers of 8 bits
    ordered = (each if each.element_size() > 1 else each.float() for each in tensors.values())
    both = [torch.stack(torch.aminmax(each)).float() for each in ordered]
    return {name: (low, high) for name, (low, high) in zip(tensors, torch.stack(both).tolist(), strict=True)}


def first_line(error: Exception) -> str:
    """An exception's message, short enough for a sentence."""
    line = str(error).strip().partition("\n")[0].rstrip(".:")[:LONGEST_REASON]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def stored_tensors(files: Sequence[Path], device: torch.device) -> dict[str, StoredTensor]:
    """The tensors of the files by name, none of them read yet."""
    tensors: dict[str, StoredTensor] = {}
    mapped = _MappedFile()
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                header = file.get_slice(name)
                shape = tuple(header.get_shape())
                tensors[name] = StoredTensor(mapped, path, name, header.get_dtype(), shape, device)
    return tensors


_MAX_MAPPED_BYTES = 32 << 20
"""Bytes of a file that are read before its pages are given back. Opening it for each tensor instead would read its
header as often, which takes 4 ms where it names 5,000 tensors."""


class _MappedFile:
    """The file of weights that is being read. Its pages would fill the memory with a second copy of the model if they
    stayed mapped, so the mapping is replaced again and again. Any thread may read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._mapping: Any = None
        self._mapped_bytes = 0

    def read(self, path: Path, name: str, rows: slice | EllipsisType) -> Tensor:
        """Part of a tensor, whose numbers lie in the file: copy them and let go of it."""
        with self._lock:
            if path != self._path or self._mapped_bytes > _MAX_MAPPED_BYTES:
                self._mapping = safe_open(path, framework="pt")
                self._path = path
                self._mapped_bytes = 0
            part: Tensor = self._mapping.get_slice(name)[rows]
            self._mapped_bytes += part.nbytes
            return part


_WIDEST_NUMBER = 8
"""Bytes of a number of the widest dtype in a file."""
_OWN_PAGES_BYTES = 1 << 20
"""A tensor of as many bytes has memory of its own that the system gets back as soon as the tensor is freed, which
most are when their layers are packed. What malloc gets back it keeps, apart for each thread that has read tensors."""


def _allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _OWN_PAGES_BYTES or sys.platform == "win32":
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor in a file, to be passed to transformers in a state dict.

    Behaves as transformers' own slices of files: `tensor[...].to(device, dtype)` reads it. It arrives on the model's
    device, since transformers moves tensors to another one than the CPU only if accelerate is installed.
    """

    mapped: _MappedFile
    path: Path
    name: str
    stored_dtype: str
    shape: tuple[int, ...]
    device: torch.device

    def __getitem__(self, index: EllipsisType) -> StoredTensor:
        return self

    def get_dtype(self) -> str:
        return self.stored_dtype

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        """Reads the tensor to the model's own device; a dtype of None keeps the file's."""
        if not self.shape:
            return self._read(...).to(self.device, dtype, copy=True)
        copied = _allocate(self.shape, dtype or self._read(slice(0, 0)).dtype, self.device)
        row_bytes = _WIDEST_NUMBER * prod(self.shape[1:])
        rows_at_once = max(1, _MAX_MAPPED_BYTES // max(row_bytes, 1))
        for start in range(0, self.shape[0], rows_at_once):
            rows = slice(start, start + rows_at_once)
            copied[rows] = self._read(rows)
        return copied

    def _read(self, rows: slice | EllipsisType) -> Tensor:
        return self.mapped.read(self.path, self.name, rows)


_FIXED = "fixed"
"""Put in place of the type's name: transformers updates only the types that it knows to vary."""


def fix_rotary_frequencies(model: nn.Module, max_length: int, device: torch.device) -> None:
    """Makes every rotary embedding of the model use the frequencies of a sequence of `max_length` tokens."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and _varies(rope_type):
            _evaluate_at(module, max_length, device)
            module.rope_type = _FIXED  # type: ignore[assignment]  # a plain attribute, not a submodule
        elif isinstance(rope_type, dict):
            for layer_type in [key for key, name in rope_type.items() if _varies(name)]:
                _evaluate_at(module, max_length, device, layer_type=layer_type)
                rope_type[layer_type] = _FIXED


def _varies(rope_type: str) -> bool:
    return rope_type == "longrope" or "dynamic" in rope_type


def _evaluate_at(module: Any, max_length: int, device: torch.device, **layer: str) -> None:
    """Runs the embedding at the last position, which makes it choose the frequencies of that length."""
    name = "_".join((*layer.values(), "inv_freq"))
    chosen = []
    with torch.no_grad():  # no inference mode: the module keeps the frequencies, and others may train it
        for position in (0, max_length - 1):
            module(torch.zeros(1, device=device), torch.tensor([[position]], device=device), **layer)
            chosen.append(getattr(module, name).clone())
    if not torch.equal(*chosen):
        logger.warning(
            "rotary frequencies are fixed for the longest sequence; a lower max_length may suit short texts better",
            extra={"max_length": max_length, **layer},
        )
