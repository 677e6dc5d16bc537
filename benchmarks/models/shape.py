"""How large a shaped pair is. Needs no torch, so that a wrong one is refused at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.errors import ConfigurationError

_FORM = "shaped:TARGET_PARAMETERS:DRAFT_LAYERS:AGREEMENT, for instance shaped:200M:1:0.8"
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
_LAYERS = 32
_WIDTHS = range(128, 16_385, 128)
_SMALLEST, _LARGEST = 5e5, 1e11


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama."""

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
        """A quarter of them."""
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
        """In all."""
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
        """For the cache's folder."""
        return f"shaped-{self.parameters:.3g}-{self.draft_layers}-{self.agreement:g}"

    def shape(self) -> Shape:
        """The target's: as many parameters as asked, and as close to 32 layers as that allows."""
        size = 128_256 if self.parameters >= 1e9 else 32_000 if self.parameters >= 5e7 else 2_048
        tied = self.parameters < 5e9
        candidates = [Shape(width, 1, size, tied) for width in _WIDTHS]
        shapes = [
            Shape(one.width, layers, size, tied)
            for one in candidates
            if one.heads % 4 == 0
            and (layers := round((self.parameters - one.parameters) / one.layer_parameters) + 1) >= 2
        ]
        return min(shapes, key=self._distance)

    def _distance(self, shape: Shape) -> float:
        off = abs(math.log(shape.parameters / self.parameters))
        return 10 * off + abs(math.log(shape.layers / _LAYERS))


def parse_shaped(text: str) -> ShapedPair:
    """The pair that a `shaped:...` asks for.

    Raises:
        ConfigurationError: it does not have that form, or asks for what cannot be.
    """
    parts = text.split(":")
    try:
        _, size, layers, agreement = parts
        unit = _UNITS.get(size[-1:].upper(), 1.0)
        number = float(size[:-1]) if size[-1:].upper() in _UNITS else float(size)
        pair = ShapedPair(number * unit, int(layers), float(agreement))
    except ValueError:
        raise ConfigurationError(f"--pair is {text!r}; it must be {_FORM}") from None
    if not 0.0 < pair.agreement < 1.0:
        raise ConfigurationError(f"--pair is {text!r}; the agreement must be between 0 and 1")
    if not _SMALLEST <= pair.parameters <= _LARGEST:
        raise ConfigurationError(f"--pair is {text!r}; the target must have from 500K to 100B parameters")
    return pair
