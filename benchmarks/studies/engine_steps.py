"""Measures an engine's steps on this CPU beside their lower bound.

    python -m benchmarks.studies.engine_steps                     the demo pair and a model of 25 million parameters
    python -m benchmarks.studies.engine_steps --models all        and a pair of random weights, 200 and 20 million

Each step is timed three ways in turn, so that a machine that slows down slows all of them: by torch alone
(`--compile off`), by the model's modules with our kernels, and as a service runs it. Beside them stand the time of the
linear layers alone, and the time to read their weights once at the measured bandwidth. With one thread, times are
processor time of that thread, which a busy machine affects least; with more, wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from tandem.engine.backends.cpu_native.layers import PackedLinear
from tandem.engine.core.engine import Engine
from tandem.engine.core.jobs import Done, Job
from tandem.engine.core.selection import Backends, choose_backends
from tandem.engine.kv_cache.arena import PAGE_TOKENS, KvArena, PageTable, pages_for
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.engine.settings import EngineSettings
from tandem.engine.steps import StepRunner
from tandem.types import Delta

hf: Any = transformers  # its configurations take what they like

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"

SHAPES = {
    "25M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 2048},
    "200M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 15, "vocab_size": 32000},
    "20M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 32000},
}
"""Shapes of random models with the proportions of a Llama: heads of 64, four per KV head, tied embeddings."""

MODELS = ("demo-target", "demo-draft", "25M")
STEPS = {
    "1 token": (1, 1),
    "5 tokens": (1, 5),
    "16 x 1": (16, 1),
    "16 x 5": (16, 5),
    "prompt of 512": (1, 512),
}
"""Sequences, and tokens of each."""

PAST_TOKENS = 200
"""Number of earlier tokens that each sequence of a short step attends to."""
PREFIX_TOKENS = 512
ROOM = 768
SEQUENCES = 16
BANDWIDTH_BYTES = 256 << 20

Clock = Callable[[], float]
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one kind of step."""

    milliseconds: list[float]

    def __str__(self) -> str:
        ordered = sorted(self.milliseconds)
        return f"{statistics.median(ordered):.2f} ({ordered[0]:.2f}-{ordered[-1]:.2f})"

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.milliseconds)


def interleaved(ways: dict[str, Work], rounds: int, clock: Clock = time.perf_counter) -> dict[str, Timing]:
    """Times each way in turn, after one run of each that is not counted."""
    for work in ways.values():
        work()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            started = clock()
            work()
            taken[name].append(1e3 * (clock() - started))
    return {name: Timing(milliseconds) for name, milliseconds in taken.items()}


def bandwidth(clock: Clock) -> float:
    """Bytes a second that these threads read."""
    numbers = torch.ones(BANDWIDTH_BYTES // 4)
    timing = interleaved({"read": numbers.sum}, 5, clock)["read"]
    return BANDWIDTH_BYTES / min(timing.milliseconds) * 1e3


@contextmanager
def folders(names: Sequence[str]) -> Iterator[dict[str, Path]]:
    """The checkpoints, those of random weights made for as long as the block lives."""
    with tempfile.TemporaryDirectory() as made:
        found = {}
        for name in names:
            found[name] = DEMO / name.removeprefix("demo-") if name.startswith("demo-") else Path(made, name)
            if name in SHAPES:
                _save_random(SHAPES[name], found[name])
        yield found


def _save_random(shape: dict[str, int], folder: Path) -> None:
    heads = shape["hidden_size"] // 64
    config: Any = hf.LlamaConfig(
        **shape, num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), max_position_embeddings=2048,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((DEMO / "target" / "tokenizer.json").read_bytes())


class Steps:
    """An engine's step, run by hand."""

    def __init__(self, backends: Backends) -> None:
        model = backends.model
        self._page_tokens = PAGE_TOKENS
        self._pages = pages_for(ROOM, self._page_tokens)
        arena = KvArena(model.layers, SEQUENCES * self._pages, model.dtype, model.device)
        self._runner = StepRunner(backends.steps(arena))
        self._vocabulary_size = model.info.vocabulary_size

    def work(self, sequences: int, width: int) -> Work:
        """A step of so many sequences and tokens, to be repeated."""
        past = 0 if width > PAST_TOKENS else PAST_TOKENS
        segments = [Segment(self._sequence(index, past, width), width) for index in range(sequences)]
        rows = list(range(sequences * width)) if past else [width - 1]

        def run() -> object:
            return self._runner.run(segments, rows)

        return run

    def _sequence(self, index: int, past: int, width: int) -> CachedSequence:
        pages = range(index, SEQUENCES * self._pages, SEQUENCES)  # sequences that grow together take turns
        sequence = CachedSequence(PageTable(self._page_tokens, ROOM, pages), ROOM, self._vocabulary_size)
        sequence.token_ids = [
            (7 * step + index) % (self._vocabulary_size - 3) + 3 for step in range(past + width)
        ]
        if past:
            self._runner.run([Segment(sequence, past)], [past - 1])
            sequence.advance(past)
        return sequence


def linears(model: LoadedModel, rows: int) -> Work:
    """The linear layers alone, one after the other."""
    layers: list[Any] = [layer for layer in model.module.modules() if isinstance(layer, PackedLinear)]
    inputs = {layer.in_features: torch.randn(1, rows, layer.in_features).to(model.dtype) for layer in layers}
    return lambda: [layer(inputs[layer.in_features]) for layer in layers]


def weight_bytes(model: LoadedModel) -> int:
    """Bytes that the linear layers read."""
    return sum(layer._packed.nbytes for layer in model.module.modules() if isinstance(layer, PackedLinear))


def step_table(name: str, folder: Path, arguments: argparse.Namespace, clock: Clock) -> Table:
    """Cost of one model's steps."""
    options: dict[str, Any] = {"dtype": arguments.dtype, "threads": arguments.threads}
    backends = choose_backends(load_model(folder, **options), compile_mode="on")
    served, native = backends.model, backends.native
    if native is None:
        raise RuntimeError("these kernels were demanded")
    ways = {
        "torch": Steps(Backends(load_model(folder, **options))),
        "kernels": Steps(replace(backends, native=replace(native, trace=None))),
        "served": Steps(backends),
    }
    floor_ms = 1e3 * weight_bytes(served) / bandwidth(clock)
    table = Table(f"{name}, {served.info.parameter_count / 1e6:.0f} M, {arguments.dtype}")
    for column in (*ways, "linear layers", "weights read once", "torch / served"):
        table.add_column(column, justify="right", no_wrap=True)
    tokens_per_ms = {}
    for step, (sequences, width) in STEPS.items():
        works = {way: steps.work(sequences, width) for way, steps in ways.items()}
        works["linear layers"] = linears(served, sequences * width)
        timings = interleaved(works, arguments.rounds, clock)
        gain = timings["torch"].median / timings["served"].median
        table.add_row(step, *map(str, timings.values()), f"{floor_ms:.2f}", f"{gain:.2f} x")
        tokens_per_ms[step] = sequences * width / timings["served"].median
    ratio = tokens_per_ms["16 x 1"] / tokens_per_ms["1 token"]
    table.caption = f"milliseconds: median (least-most); 16 sequences are {ratio:.1f} x the tokens/s of one"
    return table


async def prefix_seconds(folder: Path, arguments: argparse.Namespace, rounds: int) -> tuple[Timing, Timing]:
    """Milliseconds to the first row of a prompt whose prefix is new, and of one whose prefix was served before."""
    model = load_model(folder, dtype=arguments.dtype, threads=arguments.threads)
    engine = Engine(
        choose_backends(model),
        lambda ready, logits: [Done(int(logits[0].argmax())) for _ in ready],
        EngineSettings(),
    )
    engine.start()
    await engine.warm_up()
    first: list[float] = []
    again: list[float] = []
    for index in range(rounds):
        for taken, end in ((first, 5), (again, 6)):
            prompt = [(index * 31 + 7 * step) % 900 + 3 for step in range(PREFIX_TOKENS)] + [end]
            started = time.perf_counter()
            sequence = await engine.open(len(prompt) + 1)
            await engine.submit(Job(sequence, Delta(0, prompt), 1, None))
            taken.append(1e3 * (time.perf_counter() - started))
            engine.release(sequence)
    await engine.close()
    return Timing(first), Timing(again)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), help=f"of {', '.join((*MODELS, *SHAPES))}, or all"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    names = dict.fromkeys((*MODELS, *SHAPES)) if arguments.models == ["all"] else arguments.models
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    console = Console(highlight=False, width=150)
    with folders(list(names)) as found:
        for name, folder in found.items():
            with torch.inference_mode():
                console.print(step_table(name, folder, arguments, clock))
            first, again = asyncio.run(prefix_seconds(folder, arguments, arguments.rounds))
            console.print(
                f"{name}: first row of {PREFIX_TOKENS + 1} tokens after {first} ms wall, with the prefix served before "
                f"after {again} ms: {again.median / first.median:.2f} of it\n"
            )


if __name__ == "__main__":
    main()
