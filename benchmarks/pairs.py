"""The pair of models that is measured: the demo pair, two folders, or random weights with the shape of a real pair."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer

from benchmarks.prompts import held_out_prompts
from tandem.engine.models.checkpoint import find_weights
from tandem.errors import ConfigurationError
from tandem.model_sources import hub

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
_FORM = "shaped:TARGET_PARAMETERS:DRAFT_LAYERS:AGREEMENT, for instance shaped:200M:1:0.8"
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
_WIDTHS = range(128, 16_385, 128)
_SMALLEST, _LARGEST = 5e5, 1e11


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a Llama: width 4096, 32 layers and four query heads for each KV head in the 8B model."""

    width: int
    layers: int
    vocabulary_size: int
    is_tied: bool
    """True if embedding and head are one matrix."""

    @property
    def head_dim(self) -> int:
        """128 as in the 8B model; less for narrow ones, so that there are four heads at least."""
        return 128 if self.width >= 2048 else 64 if self.width >= 1024 and self.width % 256 == 0 else 32

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.width // self.head_dim

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""
        return self.heads // 4

    @property
    def mlp_width(self) -> int:
        """3.5 times the width."""
        return self.width * 7 // 2

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer."""
        kv_width = self.kv_heads * self.head_dim
        return 2 * self.width * (self.width + kv_width) + 3 * self.width * self.mlp_width + 2 * self.width

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        embeddings = self.vocabulary_size * self.width * (1 if self.is_tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.width


@dataclass(frozen=True, slots=True)
class ShapedPair:
    """A shaped pair, as `--pair shaped:...` describes it."""

    parameters: float
    draft_layers: int
    agreement: float
    """Wanted share of positions at which the draft's most probable token is the target's."""

    @property
    def name(self) -> str:
        """Name of the cache's folder."""
        return f"shaped-{self.parameters:.3g}-{self.draft_layers}-{self.agreement:g}"

    def shape(self) -> Shape:
        """The target's: as many parameters as asked, and as close to 32 layers as that allows."""
        # Small models have the demo pair's vocabulary, large ones Llama 2's and 3.1's.
        size = 128_256 if self.parameters >= 1e9 else 32_000 if self.parameters >= 5e7 else 2_048
        tied = self.parameters < 5e9
        shapes = []
        for one in (Shape(width, 1, size, tied) for width in _WIDTHS):
            layers = round((self.parameters - one.parameters) / one.layer_parameters) + 1
            if one.heads % 4 == 0 and layers >= 2:
                shapes.append(Shape(one.width, layers, size, tied))
        return min(shapes, key=self._distance)

    def _distance(self, shape: Shape) -> float:
        off = abs(math.log(shape.parameters / self.parameters))
        # As many layers as Llama 3.1 8B, where the parameters allow it
        return 10 * off + abs(math.log(shape.layers / 32))


def parse_shaped(text: str) -> ShapedPair:
    """The pair that a `shaped:...` asks for."""
    try:
        _, size, layers, agreement = text.split(":")
        unit = _UNITS.get(size[-1:].upper())
        pair = ShapedPair(float(size[:-1] if unit else size) * (unit or 1.0), int(layers), float(agreement))
    except ValueError:
        raise ConfigurationError(f"--pair is {text!r}; it must be {_FORM}") from None
    if not 0.0 < pair.agreement < 1.0:
        raise ConfigurationError(f"--pair is {text!r}; the agreement must be between 0 and 1")
    if not _SMALLEST <= pair.parameters <= _LARGEST:
        raise ConfigurationError(f"--pair is {text!r}; the target must have from 500K to 100B parameters")
    return pair


class PairInfo(BaseModel):
    """The models."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

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
        return [tuple(tokenizer.encode(prompt.text).ids) for prompt in held_out_prompts(64)]


def open_pair(text: str, cache_folder: Path, device: str) -> Pair:
    """The pair that `--pair` names; a shaped one is made when it is not in the cache."""
    if text.startswith("shaped:"):
        asked = parse_shaped(text)
        from benchmarks.shaping import shaped_pair

        target, draft, made = shaped_pair(asked, cache_folder, device)
        return Pair(target, draft, PairInfo(name=text, **made))
    if text == "random":
        from benchmarks.shaping import random_draft

        target, draft = DEMO / "target", random_draft(cache_folder / "random")
    else:
        target, draft = (DEMO / "target", DEMO / "draft") if text == "demo" else _folders(text)
    target_parameters, draft_parameters = (find_weights(each).value_count for each in (target, draft))
    info = PairInfo(name=text, target_parameters=target_parameters, draft_parameters=draft_parameters)
    return Pair(target, draft, info)


def _folders(text: str) -> list[Path]:
    parts = [Path(part) for part in text.split(":")]
    if len(parts) == 2:
        folders = [hub.fetch(str(part)) if hub.is_model_id(part) else part for part in parts]
        if all((folder / "config.json").is_file() for folder in folders):
            return folders
    raise ConfigurationError(
        f"--pair is {text!r}; it must be demo, random, the folders or Hugging Face ids of a target and a draft "
        f"as TARGET:DRAFT, or {_FORM}"
    )
