"""Writes the tables of docs/memory.md: keys and values of common models, and how many requests fit on GPUs.

    python -m benchmarks.studies.memory

It is arithmetic over the shapes of the models, as vLLM stores them; no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
CONTEXTS = (2_048, 8_192, 32_768, 131_072)
SHARE = 0.9
"""Default of `device_memory_utilization` on a GPU."""


@dataclass(frozen=True, slots=True)
class Model:
    """A published model."""

    name: str
    layers: int
    kv_heads: int
    head_numbers: int
    """Numbers of a key and a value together, of one head."""
    weights: str
    """Type of the weights."""
    weight_gb: float
    max_length: int
    windowed_layers: int = 0
    window: int = 0

    def bytes_of(self, tokens: int, gpus: int = 1) -> int:
        """Bytes of keys and values of a request on each GPU. A head is on one of them, or on several that share it."""
        heads = max(1, self.kv_heads // gpus)
        kept = (self.layers - self.windowed_layers) * tokens + self.windowed_layers * min(tokens, self.window)
        # Two bytes for a key or a value in bfloat16
        return kept * heads * self.head_numbers * 2


LLAMA_8B = Model("Llama-3.1-8B", 32, 8, 256, "bfloat16", 16.1, 131_072)
QWEN_32B = Model("Qwen3-32B", 64, 8, 256, "bfloat16", 65.5, 40_960)
LLAMA_70B = Model("Llama-3.3-70B", 80, 8, 256, "fp8", 72.7, 131_072)
GPT_OSS = Model("GPT-OSS-120B", 36, 8, 128, "mxfp4", 65.2, 131_072, windowed_layers=18, window=128)
# Multi-head latent attention: one key of 512 + 64 numbers for all heads, of which the first 512 are the value.
DEEPSEEK = Model("DeepSeek-V3", 61, 1, 576, "fp8", 671.0, 163_840)
MODELS = (LLAMA_8B, QWEN_32B, LLAMA_70B, GPT_OSS, DEEPSEEK)
"""Shapes from each model's config.json; weights without layers for multi-token prediction."""
L40S, H100, H200 = ("L40S", 46_068), ("H100, 80 GB", 81_559), ("H200", 143_771)
"""Memory in MiB, as nvidia-smi reports it."""
DEPLOYMENTS = (
    (1, L40S, LLAMA_8B),
    (1, H100, LLAMA_8B),
    (1, H100, QWEN_32B),
    (2, H100, QWEN_32B),
    (2, H100, LLAMA_70B),
    (4, H100, LLAMA_70B),
    (1, H100, GPT_OSS),
    (8, H200, DEEPSEEK),
)


def requests_that_fit(model: Model, gpu_mib: int, gpus: int, context: int) -> int:
    """How many requests of so many tokens fit at once beside the weights, which the GPUs share."""
    room = SHARE * (gpu_mib << 20) - model.weight_gb * 1e9 / gpus
    return max(0, int(room // model.bytes_of(context, gpus)))


def with_tables(page: str) -> str:
    """The page with its tables written anew."""
    for name, lines in (("bytes", _bytes_lines()), ("requests", _request_lines())):
        begin, end = f"<!-- {name}: written by benchmarks.studies.memory -->\n", f"<!-- end of {name} -->"
        head, rest = page.split(begin)
        page = "".join([head, begin, *(f"{line}\n" for line in lines), end, rest.split(end, 1)[1]])
    return page


def _bytes_lines() -> Iterator[str]:
    yield "| model | weights | layers x heads x numbers | KV of a token | of 8,192 tokens |"
    yield "|---|---:|---:|---:|---:|"
    for model in MODELS:
        shape = f"{model.layers} x {model.kv_heads} x {model.head_numbers}"
        # The first token is in every layer's window.
        sizes = f"{model.bytes_of(1) / 1024:,.0f} KiB | {model.bytes_of(8_192) / 1e9:,.2f} GB"
        yield f"| {model.name} | {model.weight_gb:,.1f} GB, {model.weights} | {shape} | {sizes} |"


def _request_lines() -> Iterator[str]:
    yield "| GPUs | model | " + " | ".join(f"{context:,}" for context in CONTEXTS) + " |"
    yield "|---|---|" + "---:|" * len(CONTEXTS)
    for gpus, (gpu, mib), model in DEPLOYMENTS:
        counts = ((each, requests_that_fit(model, mib, gpus, each)) for each in CONTEXTS)
        cells = ["-" if each > model.max_length else f"{count:,}" for each, count in counts]
        yield f"| {gpus} x {gpu} | {model.name}, {model.weights} | {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
