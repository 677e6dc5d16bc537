"""From the target's logits to the rows that coordinators ask for, for all sequences of a step at once.

Whatever mix of rows a step holds, the host waits for the device once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from tandem.engine.backends.transfers import to_device, to_host
from tandem.engine.sampler import TORCH_SAMPLER, Sampler
from tandem.types import Verification
from target_service.penalties import penalized
from target_service.row_kinds import MakeRows, Rows, RowsOfKind, kind_of
from target_service.row_requests import RowRequest


def verifications(
    requests: Sequence[RowRequest], logits: Tensor, sampler: Sampler = TORCH_SAMPLER
) -> list[Verification | None]:
    """The rows of each request; None for a request with logits that are not finite.

    Args:
        requests: The request of each sequence.
        logits: [rows of all requests in order, vocabulary_size], any floating type.
        sampler: Computes and draws.
    """
    groups = _by_kind(requests)
    if len(groups) == 1:
        ((make, _),) = groups.items()
        return answers(requests, _rows_of(make(requests), processed(None, requests, logits), sampler))
    rows: list[Rows] = [()] * len(requests)
    kinds = [make([requests[i] for i in indices]) for make, indices in groups.items()]
    blocks = [processed(indices, requests, logits) for indices in groups.values()]
    for indices, own in zip(groups.values(), _rows_of_all(kinds, blocks, sampler), strict=True):
        for i, each in zip(indices, own, strict=True):
            rows[i] = each
    return answers(requests, rows)


def _rows_of(kind: RowsOfKind, logits: Tensor, sampler: Sampler) -> list[Rows]:
    """The rows of one kind: one copy in, one out."""
    device = logits.device
    return kind.rows(to_host(kind.launch(logits, to_device(kind.inputs(device), device), sampler)))


def _rows_of_all(
    kinds: Sequence[RowsOfKind], blocks: Sequence[Tensor], sampler: Sampler
) -> Iterator[list[Rows]]:
    """The rows of several kinds: one copy in and one out for all of them.

    Args:
        kinds: The kinds.
        blocks: The logits of each, on one device.
        sampler: Computes and draws.
    """
    device = blocks[0].device
    wanted = [kind.inputs(device) for kind in kinds]
    given = iter(to_device([array for arrays in wanted for array in arrays], device))
    launched = [
        kind.launch(block, list(islice(given, len(arrays))), sampler)
        for kind, block, arrays in zip(kinds, blocks, wanted, strict=True)
    ]
    found = iter(to_host([tensor for tensors in launched for tensor in tensors]))
    for kind, tensors in zip(kinds, launched, strict=True):
        yield kind.rows(list(islice(found, len(tensors))))


def answers(requests: Sequence[RowRequest], rows: Iterable[Rows]) -> list[Verification | None]:
    """The answer to each request, made of its rows."""
    return [
        None if own is None else Verification(request.base_length, own)
        for request, own in zip(requests, rows, strict=True)
    ]


def processed(indices: Sequence[int] | None, requests: Sequence[RowRequest], logits: Tensor) -> Tensor:
    """The logits of some of the requests, adjusted and penalized where a request asks for it; no copy when the logits
    are all taken as they are.

    Args:
        indices: Of the requests; None for all.
        requests: All of the step's.
        logits: [rows of all requests in order, vocabulary_size].
    """
    if indices is None:
        if all(request.takes_logits_as_they_are for request in requests):
            return logits
        indices = range(len(requests))
    blocks = torch.split(logits, [request.step.row_count for request in requests])
    return torch.cat([_processed(requests[i], blocks[i]) for i in indices])


def _processed(request: RowRequest, block: Tensor) -> Tensor:
    """Apply the request's adjustments, then penalties, in the order of vLLM and transformers."""
    if request.adjustments is not None:
        block = request.adjustments.applied(block, request.base_length)
    return block if request.history is None else penalized(block, request.history, request.sampling)


def _by_kind(requests: Sequence[RowRequest]) -> dict[MakeRows, list[int]]:
    """Which requests' rows come about in the same way."""
    found: dict[MakeRows, list[int]] = {}
    for i, request in enumerate(requests):
        found.setdefault(kind_of(request), []).append(i)
    return found
