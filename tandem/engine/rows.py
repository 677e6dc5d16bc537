"""Makes the rows that coordinators ask for of a target's logits, for all sequences of a step at once.

Whatever mix of rows a step holds, the host waits for the device once: each kind of row says which numbers it needs
there, computes without waiting, and reads the result on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from math import inf, isfinite, log
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.interface import RowRequest
from tandem.model.grammar import MaskArray
from tandem.model.sampling.noise import Purpose, sample, stream_keys
from tandem.model.sampling.warping import parameter_rows, warp
from tandem.model.types import (
    DenseRow,
    FloatArray,
    IntArray,
    LogitAdjustments,
    RowKind,
    RowLogprobs,
    RowStatistics,
    SamplingParams,
    SupportRow,
    TargetRow,
    TokenRow,
    Verification,
)

ROW_ARRAYS = 6
"""Arrays in float64, each as large as the logits that are worked on, that making rows takes at most at once."""

HostArray: TypeAlias = npt.NDArray[Any]

_TORCH = {"int64": torch.int64, "float64": torch.float64}
_NUMPY = {torch.int64: np.int64, torch.float64: np.float64, torch.float32: np.float32}


def to_device(arrays: Sequence[IntArray | FloatArray], device: torch.device) -> list[Tensor]:
    """Brings int64 and float64 arrays to the device in one copy; on a CPU the tensors are in the arrays' own memory.

    Any other way from ordinary memory makes the host wait until the device has done all of its work so far.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    if not arrays:
        return []
    packed = np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.int64) for array in arrays])
    # torch keeps pinned memory that a copy still reads from being used again.
    on_device = torch.from_numpy(packed).pin_memory().to(device, non_blocking=True)
    parts = torch.split(on_device, [array.size for array in arrays])
    return [part.view(_TORCH[array.dtype.name]).view(array.shape)
            for part, array in zip(parts, arrays, strict=True)]  # fmt: skip


def to_host(tensors: Sequence[Tensor]) -> list[HostArray]:
    """Brings tensors of int64, float64 and float32 to the host in one copy: the only wait of a step."""
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    words = [tensor.contiguous().view(-1).view(torch.int32) for tensor in tensors]
    packed = torch.cat(words).cpu().numpy()
    ends = np.cumsum([word.numel() for word in words])[:-1]
    return [
        part.view(_NUMPY[tensor.dtype]).reshape(tensor.shape)
        for part, tensor in zip(np.split(packed, ends), tensors, strict=True)
    ]


class Sampler:
    """Chooses tokens with torch's own operations, on any device.

    A subclass draws the same noise bits; its probabilities may differ in their last places, which changes about one
    sample in 10**13.
    """

    def probabilities(
        self, logits: Tensor, sampling: Sequence[SamplingParams], columns: Tensor | None = None
    ) -> Tensor:
        """The distribution of each row, float64 [R, V]; see `tandem.model.sampling.warping.warp`. `columns` are their
        `parameter_rows` on the device of the logits, so that the host need not wait for it."""
        probs: Tensor = warp(logits, sampling, columns)
        return probs

    def sample(self, probs: Tensor, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """One column per row of float64 probs [R, V], int64 [R]; see `tandem.model.sampling.noise.sample`. `token_ids`
        [R, V] are the ids of the columns; None when columns are ids."""
        winners: Tensor = sample(probs, keys, token_ids)
        return winners

    def sample_tokens(self, probs: Tensor, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """As `sample`, with `token_ids` [V] and without waiting for the device; -1 where the row is no distribution, as
        `probabilities` makes of logits that are not finite."""
        ids = None if token_ids is None else token_ids.repeat(len(probs), 1)
        columns = self.sample(probs, keys, ids)[:, None]
        # A row that is no distribution holds only NaN or zeros, so any winner shows it.
        return torch.where(probs.gather(1, columns) > 0.0, columns, -1)[:, 0]

    def argmax(self, logits: Tensor) -> Tensor:
        """The column of each row's highest logit, the first of equal ones, int64 [R]; -1 where that is not finite. Does
        not wait for the device. Kernels skip NaN as long as a row has other numbers."""
        columns = logits.argmax(dim=-1, keepdim=True)  # of a NaN, where there is one
        is_finite = logits.gather(1, columns).isfinite()
        return torch.where(is_finite, columns, -1)[:, 0]

    def topk(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The highest logits of each row and their columns, [R, count] both, highest first."""
        values, columns = logits.topk(count, dim=-1)
        return values, columns


TORCH_SAMPLER = Sampler()


def adjust_logits(
    logits: Tensor,
    wanted: LogitAdjustments,
    prompt_length: int,
    base_length: int,
    token_ids: Sequence[int] = (),
) -> Tensor:
    """A request's changes to the logits of successive positions, float32 [R, V]: biases, a minimum of tokens, and what
    the completion may not hold.

    Biases are those of OpenAI's `logit_bias` (transformers' `SequenceBiasLogitsProcessor` with single tokens). The
    minimum is vLLM's `min_tokens` (transformers' `MinNewTokensLengthLogitsProcessor`): each position of a proposal
    has its own count of tokens before it; `base_length` is that of the first. The ids must be in the vocabulary.
    Allowed ids and forbidden sequences are vLLM's `allowed_token_ids` and `bad_words`; `token_ids` are all of the
    sequence's, a proposal's at the end, which sequences of several ids need.
    """
    scores = logits.to(torch.float32, copy=True)
    if wanted.biases:
        ids = np.fromiter(wanted.biases.keys(), np.int64, len(wanted.biases))
        values = np.fromiter(wanted.biases.values(), np.float64, len(wanted.biases))
        biased, biases = to_device([ids, values], logits.device)
        scores[:, biased] += biases.float()
    suppressed_rows = min(max(prompt_length + wanted.min_tokens - base_length, 0), len(scores))
    if suppressed_rows and wanted.suppressed_token_ids:
        (suppressed,) = to_device([np.array(wanted.suppressed_token_ids, dtype=np.int64)], logits.device)
        scores[:suppressed_rows, suppressed] = -torch.inf
    if wanted.allowed_token_ids:
        (allowed,) = to_device([np.array(wanted.allowed_token_ids, dtype=np.int64)], logits.device)
        only = torch.full_like(scores, -torch.inf)
        only[:, allowed] = scores[:, allowed]
        scores = only
    if wanted.forbidden_sequences:
        places = _forbidden_places(
            wanted.forbidden_sequences, token_ids[prompt_length:], base_length - prompt_length, len(scores)
        )
        rows, columns = to_device([*places], logits.device)
        scores[rows, columns] = -torch.inf
    return scores


def _forbidden_places(
    sequences: Sequence[tuple[int, ...]], completion: Sequence[int], base_length: int, row_count: int
) -> IntArray:
    """Rows and ids, int64 [2, N], at which a sequence's last id would follow its others; `base_length` is the number of
    the completion's tokens before the first row."""
    places = [(row, sequence[0]) for sequence in sequences if len(sequence) == 1 for row in range(row_count)]
    longer = [sequence for sequence in sequences if len(sequence) > 1]
    for row in range(row_count if longer else 0):
        end = base_length + row
        for *before, last in longer:
            start = end - len(before)
            if start >= 0 and list(completion[start:end]) == before:
                places.append((row, last))
    return np.array(places, dtype=np.int64).reshape(-1, 2).T


def apply_masks(logits: Tensor, masks: MaskArray) -> Tensor:
    """A float32 copy of the logits with -inf for the ids that a grammar forbids; see `forbid`."""
    return forbid(logits.to(torch.float32, copy=True), masks)


def forbid(logits: Tensor, masks: MaskArray) -> Tensor:
    """Write -inf over the logits of the ids that a grammar forbids, and return the logits. In place, since new memory
    for 80 rows of 128k ids costs a CPU more than the rest."""
    if logits.device.type == "cpu":
        bits = np.unpackbits(~masks.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        forbidden = torch.from_numpy(bits).view(torch.bool)
    else:
        (packed,) = to_device([masks.view(np.int64)], logits.device)
        words = packed.view(torch.int32)
        shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
        forbidden = ((words[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]] == 0
    return logits.masked_fill_(forbidden, -torch.inf)


def _masks_of_rows(requests: Sequence[RowRequest]) -> MaskArray | None:
    """The masks of all rows, those of requests without a grammar allow everything; None if no request has one."""
    words = next((request.masks.shape[1] for request in requests if request.masks is not None), None)
    if words is None:
        return None
    rows = max(request.step.row_count for request in requests)
    everything = np.full((rows, words), -1, dtype=np.int32)
    return np.concatenate(
        [everything[: each.step.row_count] if each.masks is None else each.masks for each in requests]
    )


def apply_penalties(
    logits: Tensor, token_ids: Sequence[int], prompt_length: int, sampling: SamplingParams
) -> Tensor:
    """The logits of one sequence's rows, float32 [R, V], with penalties on tokens that occurred before.

    Each row sees all tokens before its own position, including a proposal's tokens, as if the target had written
    them. The last row is for the token after all of `token_ids`. Repetition is that of transformers'
    `RepetitionPenaltyLogitsProcessor` (Keskar et al. 2019, arXiv 1909.05858, section 4.1), over prompt and completion.
    Frequency and presence are those of OpenAI's API and of vLLM, over the completion alone. In this order, as in vLLM.
    """
    scores = logits.float()
    if (penalty := sampling.repetition_penalty) != 1.0:
        occurred = _counts(scores, token_ids, 0) > 0
        discouraged = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(occurred, discouraged, scores)
    if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
        counts = _counts(scores, token_ids, prompt_length)
        scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return scores


def _counts(like: Tensor, token_ids: Sequence[int], start: int) -> Tensor:
    """For each row, how often each token stands between `start` and the row's position; shape and device of `like`."""
    row_count, vocabulary_size = like.shape
    base_length = max(len(token_ids) - row_count + 1, 0)
    (before,) = to_device([np.array(token_ids[start:base_length], dtype=np.int64)], like.device)
    # `torch.bincount` would wait for the device.
    counts = like.new_zeros(vocabulary_size).index_add_(0, before, like.new_ones(len(before)))
    counts = counts.repeat(row_count, 1)
    for row, position in enumerate(range(base_length, len(token_ids)), start=1):
        if position >= start:
            counts[row:, token_ids[position]] += 1
    return counts


def keys_of_rows(requests: Sequence[RowRequest]) -> IntArray:
    """The key of each row of all requests, int64 [R]."""
    # Integers take 11 us for each, arrays 50 us and 2 us for each
    if len(requests) < 8:
        return np.concatenate([request.keys for request in requests])
    table = [
        (request.step.row_count, request.base_length, request.options.sampling.seed, request.races_recovery)
        for request in requests
    ]
    counts, bases, seeds, races = np.array(table, dtype=np.int64).T
    rows = np.arange(counts.sum())
    positions = rows + np.repeat(bases - counts.cumsum() + counts, counts)
    purposes = np.where(races, Purpose.RECOVERY, Purpose.TARGET)
    keys: IntArray = stream_keys(
        np.repeat(seeds, counts), positions, np.repeat(purposes, counts), np.repeat(bases * races, counts)
    )
    return keys


def sampling_of_rows(requests: Sequence[RowRequest]) -> list[SamplingParams]:
    """The sampling parameters of each row."""
    return [request.options.sampling for request in requests for _ in range(request.step.row_count)]


Rows: TypeAlias = tuple[TargetRow, ...] | None
"""A request's rows; None where its logits are not finite."""


class RowsOfKind:
    """The rows of some requests, in three parts. This class has the logits of the whole vocabulary."""

    drawn: int | None = None
    """Which of the launched tensors has the token of each row; None where rows have no token."""
    argmaxes: int | None = None
    """Which of them has the argmax of each row; None where rows have no statistics."""

    def __init__(self, requests: Sequence[RowRequest]) -> None:
        self._requests = requests

    def inputs(self, device: torch.device) -> list[IntArray | FloatArray]:
        """Numbers that are needed on the device of the logits."""
        return []

    def launch(self, logits: Tensor, inputs: Sequence[Tensor], sampler: Sampler) -> list[Tensor]:
        """Computes on the device, without waiting for it, what the host reads: of logits [rows of the requests in
        order, vocabulary_size], of any floating type, and of `inputs`."""
        return [logits.float()]

    def rows(self, found: Sequence[HostArray]) -> list[Rows]:
        # NaN is the highest wherever it is.
        return self._by_request([DenseRow(row) if isfinite(row.max()) else None for row in found[0]])

    def drawn_probs(self, found: Sequence[HostArray]) -> list[float]:
        """The probability of each row's token, if that is all that the row says and a request wants it; else ones."""
        return [1.0] * sum(request.step.row_count for request in self._requests)

    def _by_request(self, rows: Sequence[TargetRow | None]) -> list[Rows]:
        given = iter(rows)
        parts = (tuple(islice(given, request.step.row_count)) for request in self._requests)
        return [None if None in part else cast("Rows", part) for part in parts]


class GreedyTokens(RowsOfKind):
    """The id of each row's highest logit."""

    drawn = 0

    def launch(self, logits: Tensor, inputs: Sequence[Tensor], sampler: Sampler) -> list[Tensor]:
        return [sampler.argmax(logits)]

    def rows(self, found: Sequence[HostArray]) -> list[Rows]:
        return self._by_request(
            [None if token_id < 0 else TokenRow(token_id) for token_id in found[0].tolist()]
        )


class DrawnTokens(GreedyTokens):
    """A sampled id of each row."""

    def __init__(self, requests: Sequence[RowRequest]) -> None:
        super().__init__(requests)
        self._sampling = sampling_of_rows(requests)
        self._scores = any(request.options.sampled_logprobs for request in requests)

    def inputs(self, device: torch.device) -> list[IntArray | FloatArray]:
        return [keys_of_rows(self._requests), *parameters_for(self._sampling, device)]

    def launch(self, logits: Tensor, inputs: Sequence[Tensor], sampler: Sampler) -> list[Tensor]:
        """The tokens, and their probabilities where a request wants those."""
        keys, *columns = inputs
        probs = sampler.probabilities(logits, self._sampling, *columns)
        tokens = sampler.sample_tokens(probs, keys)
        if not self._scores:
            return [tokens]
        return [tokens, probs.gather(1, tokens[:, None].clamp(min=0))[:, 0]]

    def drawn_probs(self, found: Sequence[HostArray]) -> list[float]:
        return cast("list[float]", found[1].tolist())


class SupportRows(RowsOfKind):
    """Probabilities on the supports, and a token sampled outside each."""

    drawn = 1

    def __init__(self, requests: Sequence[RowRequest]) -> None:
        super().__init__(requests)
        self._sampling = sampling_of_rows(requests)
        self._supports = [support for request in requests for support in request.supports]
        self._sizes = [len(support) for support in self._supports]
        self._wants_statistics = [
            request.step.with_statistics for request in requests for _ in range(request.step.row_count)
        ]
        if any(self._wants_statistics):
            self.argmaxes = 7

    def inputs(self, device: torch.device) -> list[IntArray | FloatArray]:
        rows = np.repeat(np.arange(len(self._supports)), self._sizes)
        places = np.stack((rows, np.concatenate(self._supports)))
        return [keys_of_rows(self._requests), places, *parameters_for(self._sampling, device)]

    def launch(self, logits: Tensor, inputs: Sequence[Tensor], sampler: Sampler) -> list[Tensor]:
        """Probabilities inside, samples outside and their probabilities, masses outside, highest logits; statistics
        if any row needs them."""
        keys, (rows, token_ids), *columns = inputs
        probs = sampler.probabilities(logits, self._sampling, *columns)
        statistics: list[Tensor] = []
        if any(self._wants_statistics):
            statistics = self._statistics(logits, probs, rows, token_ids)
        inside = probs.new_empty(0)
        if len(token_ids):
            inside = probs[rows, token_ids]
            # In place: a copy of rows times vocabulary would cost more than drawing from it
            probs[rows, token_ids] = 0.0
        samples = sampler.sample(probs, keys)
        sample_probs = probs.gather(1, samples[:, None])[:, 0]
        return [inside, samples, sample_probs, probs.sum(dim=-1), self._max_logits(logits), *statistics]

    def rows(self, found: Sequence[HostArray]) -> list[Rows]:
        inside, ids, outside_probs, masses, max_logits, *statistics = found
        parts = [slice(*bounds) for bounds in pairwise((0, *accumulate(self._sizes)))]
        columns = zip(
            self._finite_rows(inside, masses, max_logits), self._supports, parts, masses.tolist(), ids.tolist(),
            self._read_statistics(statistics, parts), outside_probs.tolist(), strict=True,
        )  # fmt: skip
        rows: list[SupportRow | None] = []
        for is_finite, support, part, mass, token_id, own, outside_prob in columns:
            if not is_finite:
                rows.append(None)
                continue
            outside_token_id = token_id if mass > 0.0 else -1
            rows.append(SupportRow(support, inside[part], mass, outside_token_id, own, outside_prob))
        return self._by_request(rows)

    def _finite_rows(self, inside: HostArray, masses: HostArray, max_logits: HostArray) -> list[bool]:
        found = np.isfinite(masses) & np.isfinite(max_logits)
        are_finite = np.isfinite(inside)
        if not are_finite.all():
            found[np.repeat(np.arange(len(found)), self._sizes)[~are_finite]] = False
        return cast("list[bool]", found.tolist())

    def _max_logits(self, logits: Tensor) -> Tensor:
        """The highest logit of each row, float32 [R], if a row is greedy: its one-hot probabilities hide logits that
        are not finite, which those of other rows show."""
        if any(request.options.sampling.is_greedy for request in self._requests):
            return logits.amax(dim=-1).float()
        return logits.new_zeros(len(logits), dtype=torch.float32)

    def _statistics(self, logits: Tensor, probs: Tensor, rows: Tensor, token_ids: Tensor) -> list[Tensor]:
        """Entropy, maximum probability and argmax of each row, [R]; then rank and logit of each id of the supports."""
        max_probs, argmaxes = probs.max(dim=-1)
        own = probs[rows, token_ids]
        # A row at a time: all at once would need ids times vocabulary.
        ranks = [(probs[row] > part[:, None]).sum(dim=-1)
                 for row, part in enumerate(torch.split(own, self._sizes))]  # fmt: skip
        entropies = torch.special.entr(probs).sum(dim=-1)
        return [entropies, max_probs, argmaxes, torch.cat(ranks), logits[rows, token_ids].float()]

    def _read_statistics(
        self, found: Sequence[HostArray], parts: Sequence[slice]
    ) -> list[RowStatistics | None]:
        if not found:
            return [None] * len(parts)
        entropies, max_probs, argmaxes = (each.tolist() for each in found[:3])
        ranks = found[3].astype(np.int64)
        logits = found[4].astype(np.float32)
        return [
            RowStatistics(entropies[i], max_probs[i], argmaxes[i], ranks[part], logits[part])
            if wanted
            else None
            for i, (wanted, part) in enumerate(zip(self._wants_statistics, parts, strict=True))
        ]


def parameters_for(sampling: Sequence[SamplingParams], device: torch.device) -> list[FloatArray]:
    """The parameters for the device, if that is another; a CPU takes them from `sampling`."""
    return [] if device.type == "cpu" else [parameter_rows(sampling)]


class RowLogprobsOf:
    """Log probabilities beside the rows of those requests of a kind that want them."""

    def __init__(self, requests: Sequence[RowRequest]) -> None:
        self._counts = [
            request.options.logprobs for request in requests for _ in range(request.step.row_count)
        ]
        self._wanted = [row for row, count in enumerate(self._counts) if count is not None]
        self._supports = [support for request in requests for support in request.supports]
        self._row_counts = [request.step.row_count for request in requests]

    def launch(self, logits: Tensor, tokens: Tensor) -> list[Tensor]:
        """Computes on the device what the host reads: the highest logits, their columns, the logits of the rows' own
        tokens, and what turns logits into log probabilities. `tokens` are those that were drawn, one for each row."""
        if not self._wanted:
            return []
        width = max(len(self._supports[row]) for row in self._wanted)
        ids = np.zeros((len(self._wanted), width), dtype=np.int64)
        for place, row in enumerate(self._wanted):
            ids[place, : len(self._supports[row])] = self._supports[row]
        rows, own = to_device([np.array(self._wanted, dtype=np.int64), ids], logits.device)
        wanted = logits[rows].double()
        own = torch.cat([own, tokens[rows, None].clamp(min=0)], dim=1)
        most = max(count or 0 for count in self._counts)
        values, columns = wanted.topk(min(most, wanted.shape[1]), dim=-1)
        return [values, columns, wanted.gather(1, own), wanted.logsumexp(dim=-1)]

    def rows(self, found: Sequence[HostArray]) -> list[tuple[RowLogprobs, ...]]:
        """Those of each request."""
        by_row: dict[int, RowLogprobs] = {}
        if found:
            values, columns, own, sums = found
            for place, row in enumerate(self._wanted):
                count = self._counts[row] or 0
                size = len(self._supports[row])
                logprobs = own[place] - sums[place]
                by_row[row] = RowLogprobs(
                    tuple(columns[place, :count].tolist()),
                    tuple((values[place, :count] - sums[place]).tolist()),
                    (*logprobs[:size].tolist(), float(logprobs[-1])),
                )
        starts = list(accumulate(self._row_counts, initial=0))
        return [tuple(by_row[row] for row in range(*bounds) if row in by_row) for bounds in pairwise(starts)]


class SampledLogprobsOf:
    """Raw and processed log probabilities beside the rows of those requests of a kind that want them."""

    def __init__(self, kind: RowsOfKind, requests: Sequence[RowRequest], starts: Sequence[int]) -> None:
        """`starts` are the requests' first rows in the logits of all kinds."""
        self._kind = kind
        self._requests = requests
        self._rows: list[int] = []
        """The wanted rows of the kind."""
        self._sources: list[int] = []
        """The same rows in the logits of all kinds."""
        self._supports: list[IntArray] = []
        row = 0
        for request, start in zip(requests, starts, strict=True):
            count = request.step.row_count
            if request.options.sampled_logprobs and kind.drawn is not None:
                self._rows += range(row, row + count)
                self._sources += range(start, start + count)
                self._supports += request.supports
            row += count

    def copy(self, logits: Tensor) -> Tensor | None:
        """The model's own logits of the wanted rows, before anything changes them; None where none is wanted."""
        if not self._rows:
            return None
        (sources,) = to_device([np.array(self._sources, dtype=np.int64)], logits.device)
        return logits[sources].double()

    def launch(self, raw: Tensor | None, launched: Sequence[Tensor]) -> list[Tensor]:
        """Computes on the device what the host reads: log probabilities by the model alone, of each row's support, of
        its token and of its argmax. `launched` is of the kind."""
        if raw is None or self._kind.drawn is None:
            return []
        ids = np.zeros((len(self._rows), max(map(len, self._supports))), dtype=np.int64)
        for own, support in zip(ids, self._supports, strict=True):
            own[: len(support)] = support
        rows, supports = to_device([np.array(self._rows, dtype=np.int64), ids], raw.device)
        tokens = launched[self._kind.drawn]
        argmaxes = tokens if self._kind.argmaxes is None else launched[self._kind.argmaxes]
        last = torch.stack([tokens[rows], argmaxes[rows]], dim=1).clamp(min=0)
        own_ids = torch.cat([supports, last], dim=1)
        return [raw.gather(1, own_ids) - raw.logsumexp(dim=-1, keepdim=True)]

    def add_to(
        self,
        answers: Sequence[Verification | None],
        launched: Sequence[HostArray],
        found: Sequence[HostArray],
    ) -> None:
        """Writes them beside the rows of the requests' answers. `launched` is of the kind, `found` of `launch`."""
        if not found:
            return
        raw = iter(found[0].tolist())
        drawn = iter(self._kind.drawn_probs(launched))
        for request, answer in zip(self._requests, answers, strict=True):
            probs = list(islice(drawn, request.step.row_count))
            if not request.options.sampled_logprobs:
                continue
            by_model = list(islice(raw, request.step.row_count))
            if answer is None:
                continue
            others = answer.logprobs or (RowLogprobs((), (), ()),) * len(answer.rows)
            answer.logprobs = tuple(map(_with_sampled, others, answer.rows, by_model, probs))


def _with_sampled(
    other: RowLogprobs, row: TargetRow, by_model: Sequence[float], drawn_prob: float
) -> RowLogprobs:
    """A row's log probabilities with the raw and the processed ones of its own tokens."""
    *_, of_token, of_argmax = by_model
    raw = [of_token]
    probs = [drawn_prob]
    if isinstance(row, SupportRow):
        raw = [*by_model[: len(row.token_ids)], of_token]
        probs = [*row.probs.tolist(), row.outside_prob or 0.0]
        if row.statistics is not None:
            raw.append(of_argmax)
            probs.append(row.statistics.max_prob)
    processed = tuple(log(prob) if prob > 0.0 else -inf for prob in probs)
    return replace(other, raw_logprobs=tuple(raw), processed_logprobs=processed)


class LaunchedRows:
    """Rows that the device computes, after all that was launched before."""

    def __init__(self, chunks: Sequence[_Chunk], launched: Sequence[Tensor]) -> None:
        self._chunks = chunks
        self._launched = launched

    def read(self) -> list[Verification | None]:
        """Wait for the device; the rows of each request, None for one whose logits are not finite."""
        found = iter(to_host(self._launched))
        return [answer for chunk in self._chunks for answer in chunk.read(found)]


def launch_rows(
    requests: Sequence[RowRequest],
    logits: Tensor,
    sampler: Sampler = TORCH_SAMPLER,
    chunk_values: int | None = None,
) -> LaunchedRows:
    """Have the device compute the rows of each request, of logits [rows of all in order, V]. Does not wait for it.

    Args:
        chunk_values: Logits that are worked on at a time, in whole requests, which bounds the memory that it takes;
            None for all. The host waits once all the same.
    """
    chunks = []
    first = 0
    for own in _in_chunks(requests, logits.shape[1], chunk_values):
        end = first + sum(request.step.row_count for request in own)
        chunks.append(_Chunk(own, logits[first:end]))
        first = end
    # One copy in and one out for all.
    given = iter(to_device([array for chunk in chunks for array in chunk.inputs()], logits.device))
    return LaunchedRows(chunks, [tensor for chunk in chunks for tensor in chunk.launch(given, sampler)])


def verifications(
    requests: Sequence[RowRequest],
    logits: Tensor,
    sampler: Sampler = TORCH_SAMPLER,
    chunk_values: int | None = None,
) -> list[Verification | None]:
    """The rows of `launch_rows`, at once."""
    return launch_rows(requests, logits, sampler, chunk_values).read()


def _in_chunks(
    requests: Sequence[RowRequest], vocabulary_size: int, most_values: int | None
) -> Iterator[Sequence[RowRequest]]:
    """The requests in their order, as many at a time as have so many logits, at least one."""
    if most_values is None:
        yield requests
        return
    own: list[RowRequest] = []
    rows = 0
    for request in requests:
        if own and (rows + request.step.row_count) * vocabulary_size > most_values:
            yield own
            own = []
            rows = 0
        own.append(request)
        rows += request.step.row_count
    yield own


class _Chunk:
    """Requests whose rows are made together."""

    def __init__(self, requests: Sequence[RowRequest], logits: Tensor) -> None:
        self._requests = requests
        self._logits = logits
        groups: dict[type[RowsOfKind], list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(_kind_of(request), []).append(i)
        self._groups = list(groups.values())
        self._kinds = [make([requests[i] for i in indices]) for make, indices in groups.items()]
        self._beside = [RowLogprobsOf([requests[i] for i in indices]) for indices in self._groups]
        starts = list(accumulate((request.step.row_count for request in requests), initial=0))
        self._sampled = [
            SampledLogprobsOf(kind, [requests[i] for i in indices], [starts[i] for i in indices])
            for kind, indices in zip(self._kinds, self._groups, strict=True)
        ]
        self._counts: list[tuple[int, int, int]] = []
        """How many tensors each kind has launched: for rows, for log probabilities, and for sampled ones."""

    def inputs(self) -> list[IntArray | FloatArray]:
        """Numbers that are needed on the device of the logits."""
        self._inputs = [kind.inputs(self._logits.device) for kind in self._kinds]
        return [array for arrays in self._inputs for array in arrays]

    def launch(self, given: Iterator[Tensor], sampler: Sampler) -> list[Tensor]:
        """Computes on the device, without waiting for it, what the host reads."""
        logits = self._logits
        raw = [each.copy(logits) for each in self._sampled]
        # Grammars come first: no adjustment and no penalty makes -inf anything else
        masks = _masks_of_rows(self._requests)
        if masks is not None:
            forbid(logits, masks)
        blocks = [logits]
        if len(self._kinds) > 1 or any(
            request.options.adjustments or request.options.sampling.penalizes for request in self._requests
        ):
            parts = torch.split(logits, [request.step.row_count for request in self._requests])
            blocks = [torch.cat([_process(self._requests[i], parts[i]) for i in own]) for own in self._groups]
        launched = [
            kind.launch(block, list(islice(given, len(arrays))), sampler)
            for kind, block, arrays in zip(self._kinds, blocks, self._inputs, strict=True)
        ]
        scored = [
            each.launch(block, tensors[kind.drawn]) if kind.drawn is not None else []
            for each, kind, block, tensors in zip(self._beside, self._kinds, blocks, launched, strict=True)
        ]
        by_model = [
            each.launch(own, tensors) for each, own, tensors in zip(self._sampled, raw, launched, strict=True)
        ]
        of_kinds = zip(launched, scored, by_model, strict=True)
        self._counts = [(len(own), len(beside), len(sampled)) for own, beside, sampled in of_kinds]
        return [tensor for tensors in (*launched, *scored, *by_model) for tensor in tensors]

    def read(self, found: Iterator[HostArray]) -> list[Verification | None]:
        """The rows of each request."""
        requests = self._requests
        answers: list[Verification | None] = [None] * len(requests)
        of_rows = [list(islice(found, count)) for count, _, _ in self._counts]
        for kind, indices, own in zip(self._kinds, self._groups, of_rows, strict=True):
            for i, rows in zip(indices, kind.rows(own), strict=True):
                answers[i] = None if rows is None else Verification(requests[i].base_length, rows)
        for each, indices, (_, count, _) in zip(self._beside, self._groups, self._counts, strict=True):
            logprobs = each.rows(list(islice(found, count)))
            for i, beside in zip(indices, logprobs, strict=True):
                if (answer := answers[i]) is not None:
                    answer.logprobs = beside
        for sampled, indices, own, (_, _, count) in zip(
            self._sampled, self._groups, of_rows, self._counts, strict=True
        ):
            sampled.add_to([answers[i] for i in indices], own, list(islice(found, count)))
        return answers


def _kind_of(request: RowRequest) -> type[RowsOfKind]:
    tokens = GreedyTokens if request.options.sampling.is_greedy else DrawnTokens
    return {RowKind.DENSE: RowsOfKind, RowKind.SUPPORT: SupportRows}.get(request.step.row_kind, tokens)


def _process(request: RowRequest, block: Tensor) -> Tensor:
    # In the order of vLLM and transformers
    options = request.options
    if options.adjustments:
        block = adjust_logits(
            block, options.adjustments, options.prompt_length, request.base_length, request.token_ids
        )
    if options.sampling.penalizes:
        block = apply_penalties(block, request.token_ids, options.prompt_length, options.sampling)
    return block
