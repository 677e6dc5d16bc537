"""The tables of docs/memory.md are what the engine's accounting says."""

from __future__ import annotations

import pytest

from benchmarks.studies.memory import GPUS, MODELS, PAGE, requests_that_fit, with_tables

LLAMA, QWEN, *LARGE = MODELS
H100, H200, L40S = GPUS.values()


def test_the_page_has_the_tables_of_the_engines_accounting() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run python -m benchmarks.studies.memory"


def test_a_token_takes_a_key_and_a_value_of_each_head_in_each_layer() -> None:
    assert LLAMA.bytes_per_token == 2 * 32 * 8 * 128 * 2 == 128 << 10


@pytest.mark.parametrize("gpu", [H100, H200, L40S])
def test_requests_that_fit_leave_a_tenth_of_the_device(gpu: int) -> None:
    count = requests_that_fit(LLAMA, gpu, 8_192)
    assert count is not None
    taken, total = LLAMA.weight_bytes + count * 8_192 * LLAMA.bytes_per_token, gpu << 20
    assert taken <= 0.9 * total < taken + 8_192 * LLAMA.bytes_per_token


def test_weights_beyond_a_device_fit_no_request() -> None:
    assert requests_that_fit(QWEN, L40S, 2_048) is None
    assert {requests_that_fit(model, gpu, 2_048) for model in LARGE for gpu in GPUS.values()} == {None}
