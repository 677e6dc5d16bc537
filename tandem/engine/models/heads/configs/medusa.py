"""A Medusa checkpoint's `config.json`, as FasterDecoding publishes it or as vLLM's `MedusaConfig`. Needs no torch.

FasterDecoding's has `medusa_num_heads` and `medusa_num_layers`, and leaves the widths to the target. vLLM's has
`model_type` medusa, calls the two numbers `num_heads` and `num_hidden_layers`, and names the widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.names import MEDUSA
from tandem.engine.models.checkpoint import CONFIG_FILE
from tandem.engine.models.heads.configs.values import flag, size
from tandem.engine.models.json_files import read_object
from tandem.errors import ModelFolderError

_HEADS = ("medusa_num_heads", "num_heads", "num_lookahead_tokens")
_LAYERS = ("medusa_num_layers", "num_hidden_layers", "num_layers")


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Shape of a Medusa checkpoint."""

    folder: Path
    architecture: str
    heads: int
    """Each proposes one token, so that a proposal has at most this many."""
    layers: int
    """Residual blocks of a head."""
    hidden_size: int | None
    """Width of the target's states; None where the checkpoint leaves it to the target."""
    vocabulary_size: int | None
    """The target's, likewise."""
    truncated_vocabulary_size: int | None
    """Tokens that the heads can say, which a tensor `token_map` lists; None for all."""
    shares_output_layer: bool
    """All heads have one output layer (vLLM's `original_lm_head`)."""
    method: str = MEDUSA


def read_medusa_config(folder: Path) -> MedusaConfig:
    """The config of Medusa heads.

    Raises:
        ModelFolderError: there is none, or a number in it is missing or wrong.
    """
    path = folder / CONFIG_FILE
    content = read_object(path, "a drafting head needs one")
    if not is_medusa(content):
        raise ModelFolderError(
            f"the file {path} is not that of Medusa heads: model_type is {content.get('model_type')!r} and has to be "
            "medusa, or there has to be a number medusa_num_heads"
        )
    vocabulary = _optional(path, content, "vocab_size")
    truncated = _optional(path, content, "truncated_vocab_size")
    architectures = content.get("architectures")
    return MedusaConfig(
        folder=folder,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "MedusaModel",
        heads=_first(path, content, _HEADS),
        layers=_first(path, content, _LAYERS),
        hidden_size=_optional(path, content, "hidden_size"),
        vocabulary_size=vocabulary,
        truncated_vocabulary_size=None if truncated == vocabulary else truncated,
        shares_output_layer=flag(path, content, "original_lm_head"),
    )  # fmt: skip


def is_medusa(content: Mapping[str, Any]) -> bool:
    """True if a config.json is that of Medusa heads."""
    return content.get("model_type") == "medusa" or "medusa_num_heads" in content


def _first(path: Path, content: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    key = next((key for key in keys if key in content), keys[0])
    return size(path, content, key)


def _optional(path: Path, content: Mapping[str, Any], key: str) -> int | None:
    return None if content.get(key) is None else size(path, content, key)
