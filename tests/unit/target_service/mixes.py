"""Steps of a target with any mix of rows, for property tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from tandem.types import Delta, IntArray, LogitAdjustments, RowKind, SamplingParams, VerifyStep
from target_service.adjustments import Adjustments
from target_service.penalties import History
from target_service.row_requests import RowRequest

VOCABULARY_SIZE = 40
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Asked:
    """What a step's sequences ask for, and which logits it has."""

    requests: list[tuple[VerifyStep, SamplingParams, LogitAdjustments | None]]
    seed: int
    is_poisoned: bool
    """One row holds NaN."""
    dtype: torch.dtype


_SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.7, 1.0)),
    top_k=st.sampled_from((0, 0, 1, 5, 100)),
    top_p=st.sampled_from((1.0, 1.0, 0.9, 0.3)),
    min_p=st.sampled_from((0.0, 0.0, 0.1)),
    seed=st.integers(0, 1 << 40),
    repetition_penalty=st.sampled_from((1.0, 1.0, 1.3)),
    frequency_penalty=st.sampled_from((0.0, 0.0, 0.5)),
)
_SUPPORTS = st.lists(st.integers(0, VOCABULARY_SIZE - 1), max_size=6, unique=True).map(
    lambda ids: np.array(ids, dtype=np.int64)
)
_ADJUSTMENTS = st.sampled_from((None, None, LogitAdjustments({3: 5.0, 4: -2.0}, 9, (1, 2))))


@st.composite
def _steps(draw: st.DrawFn) -> VerifyStep:
    kind = draw(st.sampled_from((RowKind.TOKEN, RowKind.SUPPORT, RowKind.SUPPORT, RowKind.DENSE)))
    rows = draw(st.integers(1, 4))
    supports: tuple[IntArray, ...] = ()
    if kind is RowKind.SUPPORT:
        supports = tuple(draw(st.lists(_SUPPORTS, max_size=rows)))
    has_statistics = draw(st.sampled_from((False, False, True)))
    delta = Delta(draw(st.integers(0, 50)), [7] * rows)
    return VerifyStep(delta, kind, rows, supports, has_statistics, draw(st.booleans()))


def asked_mixes() -> st.SearchStrategy[Asked]:
    """Up to six sequences of up to four rows."""
    return st.builds(
        Asked,
        st.lists(st.tuples(_steps(), _SAMPLINGS, _ADJUSTMENTS), min_size=1, max_size=6),
        st.integers(0, 1000),
        st.booleans(),
        st.sampled_from((torch.float32, torch.bfloat16)),
    )


def some_logits(asked: Asked) -> torch.Tensor:
    """Those of the step, rounded so that some are equal."""
    row_count = sum(step.row_count for step, _, _ in asked.requests)
    generator = torch.Generator().manual_seed(asked.seed)
    logits = (torch.randn(row_count, VOCABULARY_SIZE, generator=generator) * 3).to(asked.dtype)
    if asked.seed % 3 == 0:
        logits = logits.round()
    if asked.is_poisoned:
        logits[asked.seed % row_count] = torch.nan
    return logits


def to_requests(asked: Asked, device: torch.device) -> list[RowRequest]:
    """The step's requests, with what they need on the device."""
    found = []
    for step, sampling, wanted in asked.requests:
        tokens = [5 + i % 9 for i in range(step.delta.length)]
        history = History(min(3, len(tokens)), tokens) if sampling.penalizes else None
        adjustments = None if wanted is None else Adjustments(wanted, 3, device)
        found.append(RowRequest(step, sampling, history, adjustments))
    return found
