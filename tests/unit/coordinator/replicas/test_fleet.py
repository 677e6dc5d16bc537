"""The limit on a message's size has room for the largest possible answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.replicas.fleet import Fleet
from coordinator.requests.bounds import check_bounds
from coordinator.settings.coordinator import CheckedSpeculativeConfig, RequestBounds
from tandem.config.speculative import MAX_CONFIGURED_TOKENS
from tandem.replica import Role
from tandem.types import DenseRow, GenerationRequest, Verification
from tandem.wire.target import verification_to_proto
from tests.unit.coordinator.model_infos import TARGET

VOCABULARY_SIZE = 128_256  # Llama 3


@pytest.mark.parametrize("count", [32, 41, MAX_CONFIGURED_TOKENS])
def test_an_answer_to_the_longest_proposal_fits_into_a_message(count: int) -> None:
    config = CheckedSpeculativeConfig(num_speculative_tokens=count)
    request = GenerationRequest("a", num_speculative_tokens=count, logprobs=0)
    check_bounds(request, RequestBounds(), config.num_speculative_tokens, TARGET.max_length)
    # Configured lengths can grow while the channels exist.
    fleet = Fleet(CheckedSpeculativeConfig())
    assert fleet.judge(Role.TARGET, replace(TARGET, vocabulary_size=VOCABULARY_SIZE)) == ""
    row = DenseRow(np.zeros(VOCABULARY_SIZE, np.float32))
    answer = verification_to_proto(Verification(0, (row,) * (count + 1)))
    assert answer.ByteSize() <= fleet.message_limit_bytes
