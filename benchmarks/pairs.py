"""The pair of models that is measured: the demo pair, two folders, or random weights with the shape of a real pair."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tandem.errors import ConfigurationError

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
SHAPED_FORM = "shaped:TARGET_PARAMETERS:DRAFT_LAYERS:AGREEMENT, for instance shaped:200M:1:0.8"
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
_WIDTHS = range(128, 16_385, 128)
_SMALLEST = 5e5
_LARGEST = 1e11


def held_out_prompts(count: int) -> list[tuple[str, str]]:
    """Names and texts of the first beginnings of functions that the demo pair was not trained on."""
    entries = json.loads((DEMO / "heldout_prompts.json").read_text(encoding="utf-8"))
    return [(entry["name"], entry["prompt"]) for entry in entries[:count]]


def llama(width: int, layers: int, vocabulary_size: int, *, is_tied: bool) -> dict[str, Any]:
    """Shape of a Llama, as `LlamaConfig` names it; width 4096 and 32 layers are the 8B model's. Where it is tied,
    embedding and head are one matrix."""
    # 128 as in the 8B model; less for narrow ones, so that there are four heads at least
    head_dim = 128 if width >= 2048 else 64 if width >= 1024 and width % 256 == 0 else 32
    heads = width // head_dim
    return {
        "vocab_size": vocabulary_size,
        "tie_word_embeddings": is_tied,
        "hidden_size": width,
        "intermediate_size": width * 7 // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": head_dim,
    }


def layer_parameters(shape: Mapping[str, Any]) -> int:
    """Number of parameters of one layer."""
    width = shape["hidden_size"]
    kv_width = shape["num_key_value_heads"] * shape["head_dim"]
    return int(2 * width * (width + kv_width) + 3 * width * shape["intermediate_size"] + 2 * width)


def parameters(shape: Mapping[str, Any]) -> int:
    """Number of parameters of the model."""
    embeddings = shape["vocab_size"] * shape["hidden_size"] * (1 if shape["tie_word_embeddings"] else 2)
    return int(embeddings + shape["num_hidden_layers"] * layer_parameters(shape) + shape["hidden_size"])


@dataclass(frozen=True, slots=True)
class ShapedPair:
    """A shaped pair, as `--pair shaped:...` describes it."""

    parameters: float
    draft_layers: int
    agreement: float
    """Wanted share of positions at which the draft's most probable token is the target's."""

    @property
    def name(self) -> str:
        return f"shaped-{self.parameters:.3g}-{self.draft_layers}-{self.agreement:g}"

    def shape(self) -> dict[str, Any]:
        """The target's: as many parameters as asked, and as close to Llama 3.1 8B's 32 layers as that allows."""
        # Small models have the demo pair's vocabulary, large ones Llama 2's and 3.1's.
        size = 128_256 if self.parameters >= 1e9 else 32_000 if self.parameters >= 5e7 else 2_048
        shapes: dict[float, dict[str, Any]] = {}
        for width in _WIDTHS:
            one = llama(width, 1, size, is_tied=self.parameters < 5e9)
            layers = round((self.parameters - parameters(one)) / layer_parameters(one)) + 1
            if one["num_attention_heads"] % 4 == 0 and layers >= 2:
                shape = one | {"num_hidden_layers": layers}
                off = abs(math.log(parameters(shape) / self.parameters))
                shapes[10 * off + abs(math.log(layers / 32))] = shape
        return shapes[min(shapes)]


def parse_shaped(text: str) -> ShapedPair:
    """The pair that a `shaped:...` asks for."""
    try:
        _, size, layers, agreement = text.split(":")
        unit = _UNITS.get(size[-1:].upper())
        pair = ShapedPair(float(size[:-1] if unit else size) * (unit or 1.0), int(layers), float(agreement))
    except ValueError:
        raise ConfigurationError(f"--pair is {text!r}; it must be {SHAPED_FORM}") from None
    if not 0.0 < pair.agreement < 1.0:
        raise ConfigurationError(f"--pair is {text!r}; the agreement must be between 0 and 1")
    if not _SMALLEST <= pair.parameters <= _LARGEST:
        raise ConfigurationError(f"--pair is {text!r}; the target must have from 500K to 100B parameters")
    return pair


@dataclass(frozen=True, slots=True)
class PairInfo:
    """The models."""

    name: str
    target_parameters: int
    draft_parameters: int
    agreement: float | None = None
    """Share of positions with the same most probable token, measured when a shaped pair was made."""
    overlap: float | None = None
    """Likewise: the probability that they share at temperature 1."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Folders of a target and its draft."""

    target: Path
    draft: Path
    info: PairInfo

    def prompts(self) -> list[tuple[int, ...]]:
        """Beginnings of real functions, as token ids of the pair's own tokenizer."""
        tokenizer = Tokenizer.from_file(str(self.target / "tokenizer.json"))
        return [tuple(tokenizer.encode(text).ids) for _, text in held_out_prompts(64)]
