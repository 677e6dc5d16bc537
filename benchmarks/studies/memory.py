"""Writes the tables of docs/memory.md: keys and values of common models, and how many requests fit a GPU.

    python -m benchmarks.studies.memory

The numbers come from the engine's own accounting; no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.engine.kv_cache.arena import (
    PAGE_TOKENS,
    LayerGeometry,
    accelerator_allowance,
    arena_pages,
    bytes_of_page,
    group_layers,
    kept_pages,
)
from tandem.engine.settings import EngineSettings
from tandem.errors import ConfigurationError

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
CONTEXTS = (2_048, 8_192, 32_768, 131_072)
SHARE = 0.9
"""Default of `device_memory_utilization` on a GPU."""
_DTYPE = torch.bfloat16
_MAX_REQUESTS = 10_000
"""Above every count of the tables, so that memory is what bounds them."""


@dataclass(frozen=True, slots=True)
class Model:
    """A published model."""

    name: str
    layer_count: int
    kv_heads: int
    key_dim: int
    value_dim: int
    billion_parameters: float
    max_length: int
    window: int | None = None
    """Of every second layer; None for none."""

    @property
    def layers(self) -> tuple[LayerGeometry, ...]:
        """Geometry of each layer."""
        return tuple(
            LayerGeometry(self.kv_heads, self.key_dim, self.value_dim, None if index % 2 else self.window)
            for index in range(self.layer_count)
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in bfloat16."""
        return int(self.billion_parameters * 1e9) * _DTYPE.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in bfloat16, in all layers."""
        return self.layer_count * self.kv_heads * (self.key_dim + self.value_dim) * _DTYPE.itemsize

    def pages_of(self, tokens: int) -> int:
        """Pages of a request of so many tokens."""
        windows = [group.window for group in group_layers(self.layers)]
        return kept_pages(windows, tokens, tokens, PAGE_TOKENS)

    def bytes_of(self, tokens: int) -> int:
        """Bytes of keys and values of a request of so many tokens."""
        return self.pages_of(tokens) * bytes_of_page(self.layers, _DTYPE)


MODELS = (
    Model("Llama-3.1-8B", 32, 8, 128, 128, 8.03, 131_072),
    Model("Qwen3-32B", 64, 8, 128, 128, 32.76, 40_960),
    Model("Llama-3.3-70B", 80, 8, 128, 128, 70.55, 131_072),
    Model("GPT-OSS-120B", 36, 8, 64, 64, 116.83, 131_072, window=128),
    # Multi-head latent attention, expanded: each of 128 heads has a key of 128 + 64 numbers and a value of 128.
    Model("DeepSeek-V3", 61, 128, 192, 128, 671.03, 163_840),
)
"""Shapes from each model's config.json, parameters from its model card."""
GPUS = {"A100 or H100, 80 GB": 81_559, "H200, 141 GB": 143_771, "L40S, 48 GB": 46_068}
"""Memory in MiB, as nvidia-smi reports it; the smaller of A100 and H100."""


def requests_that_fit(model: Model, gpu_mib: int, context: int) -> int | None:
    """How many requests of so many tokens the GPU holds at once beside the weights; None if the weights do not fit."""
    total = gpu_mib << 20
    allowance = accelerator_allowance(total, total - model.weight_bytes, model.weight_bytes, SHARE)
    if allowance <= 0:
        return None
    settings = EngineSettings(kv_cache_bytes=allowance, max_sequences=_MAX_REQUESTS)
    try:
        pages = arena_pages(model.layers, settings, context, _DTYPE, torch.device("cuda"))
    except ConfigurationError:  # not even one fits
        return 0
    return pages // model.pages_of(context)


def with_tables(page: str) -> str:
    """The page with its tables written anew."""
    for name, lines in (("bytes", _bytes_lines()), ("requests", _request_lines())):
        begin, end = f"<!-- {name}: written by benchmarks.studies.memory -->\n", f"<!-- end of {name} -->"
        head, rest = page.split(begin)
        page = "".join([head, begin, *(f"{line}\n" for line in lines), end, rest.split(end, 1)[1]])
    return page


def _bytes_lines() -> Iterator[str]:
    yield "| model | weights | layers x heads x numbers of key and value | KV of a token | of 8,192 tokens |"
    yield "|---|---:|---:|---:|---:|"
    for model in MODELS:
        shape = f"{model.layer_count} x {model.kv_heads} x ({model.key_dim} + {model.value_dim})"
        sizes = f"{model.bytes_per_token / 1024:,.0f} KiB | {model.bytes_of(8_192) / 1e9:,.2f} GB"
        yield f"| {model.name} | {model.weight_bytes / 1e9:,.1f} GB | {shape} | {sizes} |"


def _request_lines() -> Iterator[str]:
    yield "| GPU | model | " + " | ".join(f"{context:,}" for context in CONTEXTS) + " |"
    yield "|---|---|" + "---:|" * len(CONTEXTS)
    for gpu, mib in GPUS.items():
        for model in MODELS:
            counts = {context: requests_that_fit(model, mib, context) for context in CONTEXTS}
            if None not in counts.values():
                cells = ["-" if each > model.max_length else f"{count:,}" for each, count in counts.items()]
                yield f"| {gpu} | {model.name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
