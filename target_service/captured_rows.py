"""The drawing of rows as CUDA graphs, replayed behind the model's step without a return to the host between them.

They read logits from a buffer of their own, so each serves every step of the model, captured or not, and adjusted or
penalized logits as well. Replayed beside the same rows uncaptured before it is trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from tandem.engine.backends.cuda_graphs.capture import Capture, CaptureOutcome, capture_each
from tandem.engine.backends.cuda_graphs.static_inputs import transfer_to
from tandem.engine.backends.eager.sampler import TORCH_SAMPLER
from tandem.engine.backends.transfers import HostArray, to_host
from tandem.sampling.noise import sample
from tandem.sampling.warping import Steps, all_steps, parameter_rows, warp_by
from tandem.types import Delta, IntArray, RowKind, SamplingParams, SupportRow, Verification, VerifyStep
from target_service.row_kinds import Rows, SupportRows, parts, token_rows
from target_service.row_requests import RowRequest, keys_of_rows, sampling_of_rows
from target_service.rows import answers, processed, verifications

_ROW_COUNTS = (1, 8, 32)
"""Rows of a graph. Of more, each operation takes the device longer than its launch takes the host, and memory: eight
bytes for each number of the vocabulary, several times over."""

_MAX_SUPPORT = 512
"""Ids of a row's support: the most that a draft sends unless it is told otherwise."""

_COLUMNS, _KEY, _SIZE, _FIRST_ID = slice(0, 5), 5, 6, 7
"""Rows of the numbers that a graph starts from: parameters, key, size of the support and its ids."""
_WINNER, _WINNER_PROB, _OUTSIDE_MASS, _MAX_LOGIT, _FIRST_PROB = range(5)
"""Columns of what it gives."""


class Draw(IntEnum):
    """Amount of work in a graph; each does more than the one before, and takes longer."""

    ARGMAX = 0
    PLAIN = 1
    """Samples and supports, at a temperature."""
    TRUNCATED = 2
    """The same after min-p, top-k and top-p, for which the vocabulary is sorted."""

    def serves(self, request: RowRequest) -> bool:
        """True if the request's rows can be drawn so."""
        if self is Draw.ARGMAX:
            return request.needs_only_argmax
        step = request.step
        return (
            (
                step.row_kind is RowKind.TOKEN
                or (step.row_kind is RowKind.SUPPORT and not step.with_statistics)
            )
            and max(map(len, step.supports), default=0) <= _MAX_SUPPORT
            and (self is Draw.TRUNCATED or request.sampling.is_greedy or not request.sampling.truncates)
        )


@dataclass(frozen=True, slots=True, order=True)
class _Shape:
    row_count: int
    draw: Draw

    def __str__(self) -> str:
        return f"{self.row_count} {self.draw.name.lower()}"


class CapturedRows:
    """The graphs of one vocabulary, for each number of rows and each way to draw."""

    def __init__(self, capture: Capture, vocabulary_size: int, device: torch.device) -> None:
        """Captures them.

        Args:
            capture: turns work into its replay.
            vocabulary_size: numbers of a row.
            device: where the logits are.
        """
        self._logits = torch.zeros(_ROW_COUNTS[-1], vocabulary_size, device=device)
        self._graphs: list[_Graph]
        self.outcomes: list[CaptureOutcome]
        """Which were captured, and why the others were not."""
        with torch.inference_mode():
            self._graphs, self.outcomes = capture_each(
                "rows",
                [_Shape(count, draw) for count in _ROW_COUNTS for draw in Draw],
                lambda shape: _Graph(shape, self._logits, capture),
                _Graph.error,
                0.0,
                device,
            )

    def verifications(
        self, requests: Sequence[RowRequest], logits: Tensor
    ) -> list[Verification | None] | None:
        """The rows of each request, as `target_service.rows.verifications`; None where no graph fits them all."""
        graph = self._fitting(requests, len(logits))
        if graph is None:
            return None
        return answers(requests, graph.rows(requests, processed(None, requests, logits)))

    def _fitting(self, requests: Sequence[RowRequest], row_count: int) -> _Graph | None:
        for graph in self._graphs:
            if graph.shape.row_count >= row_count and all(map(graph.shape.draw.serves, requests)):
                return graph
        return None


class _Graph:
    def __init__(self, shape: _Shape, logits: Tensor, capture: Capture) -> None:
        self.shape = shape
        self._logits = logits[: shape.row_count]
        support_size = 0 if shape.draw is Draw.ARGMAX else min(_MAX_SUPPORT, logits.shape[1])
        sizes = (_FIRST_ID + support_size, shape.row_count)
        self._on_device = torch.zeros(sizes, dtype=torch.int64, device=logits.device)
        self._on_host = torch.zeros(sizes, dtype=torch.int64, pin_memory=logits.device.type == "cuda")
        self._numbers: IntArray = self._on_host.numpy()
        self._transfer = transfer_to(logits.device)
        self._fill(())
        self._replay = capture(self._work)

    def rows(self, requests: Sequence[RowRequest], logits: Tensor) -> list[Rows]:
        """The rows of each request. Waits for the device once."""
        self._fill(requests)
        self._logits[: len(logits)].copy_(logits)  # float32 holds every narrower number
        (found,) = to_host([self._replay()])
        ends = np.cumsum([request.step.row_count for request in requests])
        blocks = np.split(found[: len(logits)], ends[:-1])
        return [_rows(request, block) for request, block in zip(requests, blocks, strict=True)]

    def error(self) -> float:
        """The share of rows, of any logits, that are not those of `target_service.rows.verifications`."""
        generator = torch.Generator(self._logits.device).manual_seed(0)
        logits = torch.randn(self._logits.shape, generator=generator, device=self._logits.device) * 3.0
        requests = [_trial_request(row, self.shape.draw, logits.shape[1]) for row in range(len(logits))]
        found = self.rows(requests, logits)
        expected = verifications(requests, logits)
        return sum(map(_differs, found, expected)) / len(requests)

    def _fill(self, requests: Sequence[RowRequest]) -> None:
        """Sets the numbers of these rows; the other rows are sampled from whatever logits are there, for nobody."""
        self._transfer.wait()
        numbers = self._numbers
        numbers[:] = 0
        numbers[0].view(np.float64)[:] = 1.0  # a temperature
        if requests and self.shape.draw is not Draw.ARGMAX:
            sampling = sampling_of_rows(requests)
            count = len(sampling)
            numbers[_COLUMNS, :count] = parameter_rows(sampling).view(np.int64)
            numbers[_KEY, :count] = keys_of_rows(requests)
            for row, support in enumerate(each for request in requests for each in request.supports):
                if len(support):
                    numbers[_SIZE, row] = len(support)
                    numbers[_FIRST_ID:, row] = support[0]  # so that each place names an id of the support
                    numbers[_FIRST_ID : _FIRST_ID + len(support), row] = support
        self._transfer.start(self._on_device, self._on_host)

    def _work(self) -> Tensor:
        """int64 [rows, 1] ids for `ARGMAX`; else [rows, _FIRST_PROB + support size], where all but the first column
        are the bits of float64."""
        logits, draw = self._logits, self.shape.draw
        if draw is Draw.ARGMAX:
            return TORCH_SAMPLER.argmax(logits)[:, None]
        columns = self._on_device[_COLUMNS].view(torch.float64)
        steps = all_steps(logits.shape[1]) if draw is Draw.TRUNCATED else Steps(True, False, 0, False)
        probs = warp_by(logits, columns, steps)
        token_ids = self._on_device[_FIRST_ID:].T
        inside = probs.gather(1, token_ids)
        # A row without a support has id 0 in all places, whose probability stays.
        is_empty = (self._on_device[_SIZE] == 0)[:, None]
        probs = probs.scatter_(1, token_ids, torch.where(is_empty, inside, 0.0))
        winners = sample(probs, self._on_device[_KEY])[:, None]
        floats = (
            probs.gather(1, winners),
            probs.sum(dim=-1, keepdim=True),
            logits.amax(dim=-1, keepdim=True).double(),
            inside,
        )
        return torch.cat((winners, torch.cat(floats, dim=1).view(torch.int64)), dim=1)


def _rows(request: RowRequest, found: HostArray) -> Rows:
    """The rows of one request, from what a graph gave for them."""
    winners = found[:, _WINNER]
    if found.shape[1] == 1:
        return parts([request], token_rows(winners))[0]
    floats = np.ascontiguousarray(found).view(np.float64)
    if request.step.row_kind is RowKind.TOKEN:
        # One-hot probabilities hide logits that are not finite; NaN in others is not above 0.
        is_valid = np.isfinite(floats[:, _MAX_LOGIT]) & (floats[:, _WINNER_PROB] > 0.0)
        return parts([request], token_rows(np.where(is_valid, winners, -1)))[0]
    inside = [
        row[_FIRST_PROB : _FIRST_PROB + len(support)]
        for row, support in zip(floats, request.supports, strict=True)
    ]
    given = (np.concatenate(inside), winners, *floats[:, _WINNER_PROB:_FIRST_PROB].T)
    return SupportRows([request]).rows(given)[0]


def _trial_request(row: int, draw: Draw, vocabulary_size: int) -> RowRequest:
    """A request of one row; those of successive numbers differ in all that a graph takes."""
    delta = Delta(10 + row, [1])
    if draw is Draw.ARGMAX:
        return RowRequest(VerifyStep(delta, RowKind.TOKEN, 1), SamplingParams(temperature=0.0))
    temperature = (0.7, 1.0, 0.0)[row % 3]
    sampling = SamplingParams(temperature, seed=row)
    if draw is Draw.TRUNCATED:
        sampling = SamplingParams(
            temperature, (0, 20, 5)[row % 3], (0.9, 1.0)[row % 2], (0.0, 0.05)[row % 2], row
        )
    kind = (RowKind.SUPPORT, RowKind.TOKEN)[row // 2 % 2]
    support = np.arange(row, vocabulary_size, 1 + vocabulary_size // 9)
    return RowRequest(VerifyStep(delta, kind, 1, (support,) if kind is RowKind.SUPPORT else ()), sampling)


def _differs(found: Rows, expected: Verification | None) -> bool:
    """True unless two answers of one row are the same but for the last places of probabilities."""
    if found is None or expected is None:
        return True
    (one,), (other,) = found, expected.rows
    if not (isinstance(one, SupportRow) and isinstance(other, SupportRow)):
        return one != other
    probs, expected_probs = (np.append(row.probs, row.outside_mass) for row in (one, other))
    is_close = np.allclose(probs, expected_probs, rtol=1e-9, atol=1e-12)
    return one.outside_token_id != other.outside_token_id or not is_close
