"""Checks of a config, its weights and its other files that need torch and transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from math import inf, isfinite, isnan
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tandem.engine.models.checkpoint import CONFIG_FILE, Checkpoint
from tandem.engine.models.weight_files import first_of
from tandem.errors import ModelFolderError

logger = logging.getLogger(__name__)

_MAX_GAIN = 2
"""Maximum ratio of a model's numbers to those in its files; loading reports missing ones by name."""
_LONGEST_REASON = 300


def empty_model(checkpoint: Checkpoint, config: Any) -> Any:
    """Return the model that the config describes, without memory for its numbers.

    Args:
        checkpoint: the folder.
        config: its transformers config.

    Raises:
        ModelFolderError: it has far more numbers than the files hold, or transformers cannot make a model of it.
    """
    try:
        with torch.device("meta"):
            made: Any = transformers.AutoModelForCausalLM
            module = made.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise ModelFolderError(
            f"the file {checkpoint.folder / CONFIG_FILE} describes no {checkpoint.architecture}: {first_line(error)}"
        ) from error
    count = sum(parameter.numel() for parameter in module.parameters())
    if count > _MAX_GAIN * checkpoint.weights.value_count:
        raise ModelFolderError(
            f"the weights in {checkpoint.folder} do not fit {checkpoint.architecture}: {CONFIG_FILE} describes a model "
            f"of {count} parameters, and the files hold {checkpoint.weights.value_count}"
        )
    return module


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

    The extremes of each tensor show it, since NaN is both; all are read from the device at once. Minus infinity is
    valid in buffers, as a mask.

    Raises:
        ModelFolderError: with the name of the first such tensor.
    """
    weights, buffers = _extremes(module.named_parameters()), _extremes(module.named_buffers())
    wrong = [name for name, (low, high) in weights.items() if not (isfinite(low) and isfinite(high))]
    if wrong:
        raise ModelFolderError(
            f"the weights in {checkpoint.folder} hold NaN or infinity as {module.dtype}: {first_of(wrong)}"
        )
    wrong = [name for name, (low, high) in buffers.items() if isnan(low) or high == inf]
    if wrong:
        raise ModelFolderError(
            f"the file {checkpoint.folder / CONFIG_FILE} describes a model that cannot be: of its numbers come NaN or "
            f"infinity in {first_of(wrong)}"
        )


def _extremes(named: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[float, float]]:
    """The minimum and maximum of each floating-point tensor; NaN where it holds one."""
    tensors = {name: tensor for name, tensor in named if tensor.is_floating_point() and tensor.numel()}
    if not tensors:
        return {}
    both = [torch.stack(torch.aminmax(_comparable(tensor))).float() for tensor in tensors.values()]
    return {name: (low, high) for name, (low, high) in zip(tensors, torch.stack(both).tolist(), strict=True)}


def _comparable(tensor: Tensor) -> Tensor:
    """Numbers of 8 bits have no order in torch."""
    return tensor if tensor.element_size() > 1 else tensor.float()


def first_line(error: Exception) -> str:
    """An exception's message, short enough for a sentence."""
    line = str(error).strip().partition("\n")[0].rstrip(".:")[:_LONGEST_REASON]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
