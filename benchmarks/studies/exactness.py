"""How exact bfloat16 is: a token's log probability by our CPU kernels and by torch, against float32.

    python -m benchmarks.studies.exactness                      the demo target
    python -m benchmarks.studies.exactness --model smollm2      SmolLM2-135M-Instruct; `make exactness` measures both

Prompts of 30 to 100 tokens are pieces of this Python's standard library. Each is read as a service would: most of it as
a prompt, then two steps of five tokens, as proposals are verified, then five of one. The reference computes in float32
with the weights that the others have, those rounded to bfloat16, so what differs is the arithmetic alone.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.steps import Steps
from tandem.config.settings import load_settings
from tandem.engine.core.selection import Backends, choose_backends
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.loading import load_model
from tandem.model.types import FloatArray
from tandem.model_sources.bundled import DEMO, demo_pair
from tandem.model_sources.find import find_model
from tandem_load.common import Positive, StudySettings, one_sentence

SHORTEST, LONGEST = 30, 100
"""Tokens of a prompt."""
LAST_STEPS = (5, 5, 1, 1, 1, 1, 1)
"""Tokens of the steps that follow a prompt's first part."""


def prompts(folder: Path, count: int) -> list[list[int]]:
    """Token ids of `count` pieces of source code, each of another length."""
    text = ""
    files = iter(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    while len(text) < count * LONGEST * 8:  # more than any tokenizer takes on average for source code
        text += next(files).read_text(encoding="utf-8", errors="replace")
    token_ids = iter(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)
    lengths = [SHORTEST + 37 * index % (LONGEST - SHORTEST + 1) for index in range(count)]
    return [[next(token_ids) for _ in range(length)] for length in lengths]


def reference(folder: Path) -> Backends:
    """Torch in float32, with the weights of a model of bfloat16."""
    model = load_model(folder, dtype="float32")
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.copy_(parameter.bfloat16())
    return Backends(model)


@torch.inference_mode()
def log_probs(backends: Backends, texts: SequenceOf[SequenceOf[int]]) -> list[FloatArray]:
    """The log probability of each token but the first, float64 [tokens - 1] for each text."""
    steps = Steps(backends, 1, LONGEST)
    found: list[FloatArray] = []
    for text in texts:
        sequence = steps.sequence(text)
        logits: list[Tensor] = []
        for width in (len(text) - sum(LAST_STEPS), *LAST_STEPS):
            logits.append(steps.runner.run([Segment(sequence, width)], range(width)).double())
            sequence.advance(width)
        following = torch.tensor(text[1:])[:, None]
        found.append(torch.cat(logits)[:-1].log_softmax(-1).gather(1, following)[:, 0].numpy())
    return found


def ratio_interval(ours: SequenceOf[FloatArray], theirs: SequenceOf[FloatArray]) -> tuple[float, float]:
    """95 % interval of the ratio of two mean errors, by drawing prompts with replacement."""
    generator = np.random.default_rng(0)
    sums = np.array([(mine.sum(), other.sum()) for mine, other in zip(ours, theirs, strict=True)])
    drawn = sums[generator.integers(len(sums), size=(1000, len(sums)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    return float(low), float(high)


def table(name: str, folder: Path, count: int) -> Table:
    """Errors of one model."""
    texts = prompts(folder, count)
    exact = log_probs(reference(folder), texts)
    ways = {
        "torch": Backends(load_model(folder, dtype="bfloat16")),
        "kernels": choose_backends(load_model(folder, dtype="bfloat16"), compile_mode="on"),
    }
    errors = {
        way: [np.abs(own - right) for own, right in zip(log_probs(backends, texts), exact, strict=True)]
        for way, backends in ways.items()
    }
    low, high = ratio_interval(errors["kernels"], errors["torch"])
    nats = {way: np.concatenate(found) for way, found in errors.items()}
    result = Table(
        *("nats", "mean", "ratio", "maximum", "ratio"),
        title=f"{name}, {count} prompts, {len(nats['torch'])} tokens",
        caption=f"ratio of the means {low:.3f} to {high:.3f} (95 %)",
    )
    for way, own in nats.items():
        mean = own.mean() / nats["torch"].mean()
        most = own.max() / nats["torch"].max()
        result.add_row(way, f"{own.mean():.5f}", f"{mean:.3f}", f"{own.max():.3f}", f"{most:.3f}")
    return result


class ExactnessSettings(StudySettings):
    """Options of the measurement."""

    model: str = DEMO
    """A folder, demo or smollm2."""
    prompts: Positive = 200
    """Prompts to read."""


def main() -> None:
    """Measure, and print a table."""
    with one_sentence():
        settings = load_settings(ExactnessSettings, sys.argv[1:], "python -m benchmarks.studies.exactness")
        torch.set_num_threads(1)
        folder = demo_pair().target if settings.model == DEMO else find_model(settings.model)
        Console(highlight=False).print(table(settings.model, folder, settings.prompts))


if __name__ == "__main__":
    main()
