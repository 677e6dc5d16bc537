"""The closing line of a completion says how it was sampled, where the request does not."""

from __future__ import annotations

import pytest

from tandem.model.types import (
    Chunk,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SpeculationStats,
    Summary,
)
from tandem_coordinator.cli.generate import Record, closing_line

LOW = "temperature 1e-05 is too low to compute and counts as 0: greedy"
DEFAULTS = "temperature 0.2, top_p 0.9 by the server's defaults"


@pytest.mark.parametrize(
    ("request_", "sampling", "words"),
    [
        (GenerationRequest("a"), SamplingParams(0.2, top_p=0.9), DEFAULTS),
        (GenerationRequest("a", temperature=0.2, top_p=0.9), SamplingParams(0.2, top_p=0.9), ""),
        (GenerationRequest("a"), SamplingParams(), ""),
        (GenerationRequest("a", temperature=1e-5), SamplingParams(0.0, top_p=0.9), LOW),
        (GenerationRequest("a", temperature=0.0), SamplingParams(0.0, top_p=0.9), ""),
        (GenerationRequest("a"), None, ""),
    ],
)
def test_it_names_what_the_request_does_not(
    request_: GenerationRequest, sampling: SamplingParams | None, words: str
) -> None:
    summary = Summary(FinishReason.LENGTH, 1, 1, SpeculationStats(), "r", 1, sampling=sampling)
    record = Record()
    record.add(Chunk("b", (1,), (False,), (1,), summary))
    assert closing_line([record], request_).partition("tokens/s")[2] == (f"; {words}" if words else "")
