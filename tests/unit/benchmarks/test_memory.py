"""The tables of docs/memory.md are what the arithmetic says."""

from __future__ import annotations

import pytest

from benchmarks.studies.memory import (
    DEEPSEEK,
    DEPLOYMENTS,
    GPT_OSS,
    H100,
    LLAMA_8B,
    LLAMA_70B,
    PAGE,
    QWEN_32B,
    SHARE,
    Model,
    requests_that_fit,
    with_tables,
)


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run python -m benchmarks.studies.memory"


def test_a_token_takes_a_key_and_a_value_of_each_head_in_each_layer() -> None:
    assert LLAMA_8B.bytes_of(1) == 2 * 32 * 8 * 128 * 2 == 128 << 10
    assert DEEPSEEK.bytes_of(1) == 61 * 576 * 2


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    assert GPT_OSS.bytes_of(8_192) == 18 * (8_192 + 128) * 8 * 128 * 2


def test_gpus_share_the_heads_while_there_are_enough() -> None:
    assert LLAMA_70B.bytes_of(100, gpus=4) == LLAMA_70B.bytes_of(100) // 4
    assert LLAMA_70B.bytes_of(100, gpus=16) == LLAMA_70B.bytes_of(100, gpus=8)
    assert DEEPSEEK.bytes_of(100, gpus=8) == DEEPSEEK.bytes_of(100)


@pytest.mark.parametrize(("gpus", "gpu", "model"), DEPLOYMENTS, ids=lambda each: getattr(each, "name", None))
def test_what_fits_leaves_a_tenth_of_each_gpu(gpus: int, gpu: tuple[str, int], model: Model) -> None:
    count = requests_that_fit(model, gpu[1], gpus, 8_192)
    assert count > 0
    taken, one = model.weight_gb * 1e9 / gpus, model.bytes_of(8_192, gpus)
    assert taken + count * one <= SHARE * (gpu[1] << 20) < taken + (count + 1) * one


def test_weights_beyond_the_gpus_fit_no_request() -> None:
    assert requests_that_fit(DEEPSEEK, H100[1], 8, 2_048) == 0
    assert requests_that_fit(LLAMA_70B, H100[1], 1, 2_048) < requests_that_fit(QWEN_32B, H100[1], 1, 2_048)
