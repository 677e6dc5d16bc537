"""Numbers of a config.json that decide how large a model is, checked before anything of that size is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.errors import ModelFolderError

_LAYERS = frozenset({"num_hidden_layers", "n_layer", "n_layers", "num_layers"})
_EXPERTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"})
_SIZES = frozenset(
    {
        "vocab_size", "hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head", "n_heads",
        "num_key_value_heads", "head_dim",
    }
)  # fmt: skip
_MAX_LAYERS = 4096
_MAX_EXPERTS = 4096
_MAX_SIZE = (1 << 31) - 1


def check_numbers(path: Path, config: Mapping[str, Any], tensor_count: int) -> None:
    """Refuse a config with sizes that no model has, or that do not fit the weights.

    Args:
        path: the file, for the sentence.
        config: its content.
        tensor_count: tensors of the checkpoint. Each layer has at least one.

    Raises:
        ModelFolderError: with all numbers that are wrong.
    """
    nested = config.get("text_config")
    sections = [config, nested] if isinstance(nested, dict) else [config]
    sentences = [sentence for section in sections for sentence in _wrong(section, tensor_count)]
    if sentences:
        raise ModelFolderError(f"the file {path} describes no model that can be: {'; '.join(sentences)}")


def _wrong(section: Mapping[str, Any], tensor_count: int) -> Iterator[str]:
    for name, value in section.items():
        if name in _LAYERS:
            maximum = min(_MAX_LAYERS, max(tensor_count, 1))
            yield from _outside(name, value, maximum, f", the checkpoint having {tensor_count} tensors")
        elif name in _EXPERTS:
            yield from _outside(name, value, _MAX_EXPERTS, minimum=0)
        elif name in _SIZES:
            yield from _outside(name, value, _MAX_SIZE)


def _outside(name: str, value: object, maximum: int, why: str = "", minimum: int = 1) -> Iterator[str]:
    """Reason why the value is no such number. Some configs have one per layer, and null where it is derived."""
    for number in value if isinstance(value, list) else [value]:
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int) or not minimum <= number <= maximum:
            yield f"{name} is {str(number)[:40]!r} and must be a whole number from {minimum} to {maximum}{why}"
            return
