"""`tandem bench --steps`: steps of an engine beside those of torch alone, and the time to read the weights once."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.contenders import Setup
from benchmarks.report import Row, Table
from tandem.engine.core.selection import Backends, choose_backends
from tandem.engine.kv_cache.arena import PAGE_TOKENS, KvArena, PageTable, pages_for
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.models.loading import load_model

SIZES = ((1, 1), (1, 5), (4, 1), (4, 5), (16, 1), (16, 5), (1, 512))
"""Sequences, and tokens of each: one, a proposal of four with the token before it, and a prompt."""
PAST_TOKENS = 200
"""Number of earlier tokens that each sequence of a short step attends to."""
_READ_BYTES = 1 << 28
"""More than the caches of a processor hold."""


async def measured(setup: Setup) -> Table:
    """Steps of the target and of the draft, each in a process that takes the model with it when it ends."""
    rows: list[Row] = []
    for role in ("target", "draft"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows += await asyncio.get_running_loop().run_in_executor(pool, step_rows, role, setup)
    seconds = ((name, "seconds") for name in ("torch", "as served", "weights read once"))
    columns = ("step: sequences x tokens", ""), *seconds, ("torch by served", "ratio")
    return Table.of("Steps of the engine, medians", rows, *columns)


def step_rows(role: str, setup: Setup) -> list[Row]:
    """Measure in this process. Torch and engine run in turn, so that a machine that slows down slows both.

    With one thread of a CPU, times are processor time of that thread, which other work changes least.
    """
    settings = setup.settings
    folder = setup.pair.target if role == "target" else setup.pair.draft
    device = settings.draft_device if role == "draft" and settings.draft_device else settings.device
    is_cpu = device == "cpu"
    clock = time.thread_time if is_cpu and settings.threads == 1 else time.perf_counter

    def load() -> Backends:
        return Backends(load_model(folder, dtype=settings.dtype, device=device, threads=settings.threads))

    plain = load()
    weight_bytes = sum(each.nbytes for each in plain.model.module.parameters())
    numbers = torch.ones(_READ_BYTES // 4, device=device)
    read = min(_seconds({"read": lambda: numbers.sum().item()}, clock)["read"])
    room = max(count for count, _ in SIZES), PAST_TOKENS + max(width for _, width in SIZES)
    engines = {"torch": Steps(plain, *room)}
    if is_cpu:  # elsewhere the engine runs torch's own modules
        engines["served"] = Steps(choose_backends(load().model), *room)
    rows: list[Row] = []
    with torch.inference_mode():
        for sequences, width in SIZES:
            works = {name: each.work(sequences, width) for name, each in engines.items()}
            medians = {name: statistics.median(each) for name, each in _seconds(works, clock).items()}
            served = medians["served" if is_cpu else "torch"]
            plain_seconds = medians["torch"] if is_cpu else None
            ratio = plain_seconds and plain_seconds / served
            name = f"{role}, {sequences} x {width}"
            rows.append((name, plain_seconds, served, read * weight_bytes / _READ_BYTES, ratio))
    return rows


def _seconds(works: dict[str, Callable[[], object]], clock: Callable[[], float]) -> dict[str, list[float]]:
    """Time each work in turn, after one run of each that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(-1, 15):
        for name, work in works.items():
            began = clock()
            work()
            if number >= 0:
                taken[name].append(clock() - began)
    return taken


class Steps:
    """An engine's steps, run without its scheduler, with pages for so many sequences of so many tokens."""

    def __init__(self, backends: Backends, sequences: int, tokens: int) -> None:
        model = backends.model
        self._tokens = tokens
        self._sequences = sequences
        self._page_count = sequences * pages_for(tokens, PAGE_TOKENS)
        arena = KvArena(model.layers, self._page_count, model.dtype, model.device)
        self.runner = backends.steps(arena)
        self.vocabulary_size = model.info.vocabulary_size

    def sequence(self, token_ids: Iterable[int], index: int = 0) -> Sequence:
        """A sequence with these tokens, of which none is computed yet. Those that grow together take turns at pages."""
        pages = PageTable(PAGE_TOKENS, self._tokens, range(index, self._page_count, self._sequences))
        made = Sequence([pages], self._tokens, self.vocabulary_size)
        made.token_ids = list(token_ids)
        return made

    def work(self, sequences: int, width: int) -> Callable[[], object]:
        """A step of so many sequences and tokens, to be repeated."""
        past = 0 if width > PAST_TOKENS else PAST_TOKENS
        segments = []
        for index in range(sequences):
            numbers = range(index, index + 7 * (past + width), 7)
            made = self.sequence((each % (self.vocabulary_size - 3) + 3 for each in numbers), index)
            if past:
                self.runner.run([Segment(made, past)], [past - 1])
                made.advance(past)
            segments.append(Segment(made, width))
        rows = list(range(sequences * width)) if past else [width - 1]
        # `item` waits until the device has done what it was told to.
        return lambda: self.runner.run(segments, rows)[-1, 0].item()
