"""One call for all sequences gives what each query gets alone, and nothing that a sequence must not see counts."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tandem.engine.backends.paged import attention, plain, varlen
from tandem.engine.backends.paged.attention import paged_attention
from tandem.engine.backends.paged.queries import PagedQueries
from tandem.engine.backends.paged.scoring import Scoring
from tandem.engine.backends.paged.varlen import varlen_for
from tandem.engine.kv_cache.arena import LayerCache
from tests.unit.engine.backends.by_hand import naive_varlen, naive_varlen_for

PAGE_TOKENS, KV_HEADS, HEADS = 8, 2, 4


def numbers(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def pages(count: int, dim: int, seed: int, *, by_head: bool) -> Tensor:
    storage = numbers(count, PAGE_TOKENS, KV_HEADS, dim, seed=seed)
    return storage.transpose(1, 2).contiguous().transpose(1, 2) if by_head else storage


def layer_of(keys: Tensor, values: Tensor) -> LayerCache:
    return LayerCache(keys, values, values)


def integers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


TABLE = [[5, 0, 3], [2, 2, 2], [6, 4, 1]]
LENGTHS = [20, 3, 11]


def alone(
    query: Tensor, keys: Tensor, values: Tensor, sequence: int, position: int, window: int | None,
    scale: float | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """One query's attention, in as many words; [heads, value_dim]."""
    seen = range(0 if window is None else max(0, position - window + 1), position + 1)
    rows = []
    for head in range(HEADS):
        places = [(TABLE[sequence][at // PAGE_TOKENS], at % PAGE_TOKENS, head // 2) for at in seen]
        scores = torch.stack([query[head] @ keys[place] for place in places])
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1]))
        weights = scores.softmax(0)[: len(places)]
        rows.append(weights @ torch.stack([values[place] for place in places]))
    return torch.stack(rows)


OPTIONS = {
    "plain": {},
    "window": {"window": 6},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": numbers(HEADS, seed=9)},
    "all": {"window": 4, "scale": 0.7, "softcap": 3.0, "sinks": numbers(HEADS, seed=9)},
}


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("counts", [(7, 3, 1), (1, 1, 1), (4, 2, 4)])
def test_plain_attention_keeps_the_contract(
    counts: tuple[int, ...],
    options: dict[str, Any],
    by_head: bool,
    part_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefill, verify and decode in one call, all pages at once or one after the other; NaN behind each sequence's end,
    before what its queries see, and in every other page."""
    monkeypatch.setattr(plain, "MAX_PART_BYTES", part_bytes)
    window = options.get("window", 100)
    keys, values = pages(8, 16, 1, by_head=by_head), pages(8, 12, 2, by_head=by_head)
    used = [(table[at // PAGE_TOKENS], at % PAGE_TOKENS)
            for table, length, count in zip(TABLE, LENGTHS, counts, strict=True)
            for at in range(max(0, length - count - window + 1), length)]  # fmt: skip
    for storage in (keys, values):
        for page in range(8):
            for offset in range(PAGE_TOKENS):
                if (page, offset) not in used:
                    storage[page, offset] = float("nan")
    query = numbers(sum(counts), HEADS, 16, seed=3)
    starts = [sum(counts[:index]) for index in range(4)]
    queries = PagedQueries(integers(TABLE), integers(starts), integers(LENGTHS), max(counts), 24)
    given = {"window": None, "scale": None, "softcap": None, "sinks": None} | options
    found = paged_attention(query, layer_of(keys, values), queries, Scoring(**given))
    for sequence, count in enumerate(counts):
        for index in range(count):
            row, position = starts[sequence] + index, LENGTHS[sequence] - count + index
            expected = alone(query[row], keys, values, sequence, position, **given)
            assert torch.allclose(found[row], expected, atol=1e-5), (sequence, position)


@pytest.mark.parametrize("with_varlen", [False, True])
def test_padding_gives_numbers_and_touches_nobody(with_varlen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four of which two, none and four are a sequence's; the page tables end in pages of NaN."""
    if with_varlen:
        monkeypatch.setattr(attention, "varlen_for", naive_varlen_for([]))
    keys, values = pages(8, 16, 1, by_head=False), pages(8, 16, 2, by_head=False)
    table = integers([[5, 0, 7], [7, 7, 7], [6, 4, 7]])
    keys[7], values[7] = float("nan"), float("nan")
    keys[0, 4:], values[4, 3:] = float("nan"), float("nan")
    query = numbers(12, HEADS, 16, seed=3)
    queries = PagedQueries(table, integers([0, 4, 8, 12]), integers([12, 0, 11]), 4, 24, integers([2, 0, 4]))
    found = paged_attention(query, layer_of(keys, values), queries, Scoring())
    assert found.isfinite().all()
    assert not found[4:8].any()
    for row, sequence, position in ((0, 0, 10), (1, 0, 11), (8, 2, 7), (11, 2, 10)):
        expected = alone(query[row], keys, values, sequence, position, None, None, None, None)
        assert torch.allclose(found[row], expected, atol=1e-5), row


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("width", [1, 4])
def test_padding_sees_zeros_where_it_sees_no_key(width: int, options: dict[str, Any]) -> None:
    """A softmax over nothing is NaN. Here a sequence fills its table, so that padding comes to lie behind it."""
    keys, values = (pages(8, 16, seed, by_head=True) for seed in (1, 2))
    queries = PagedQueries(
        integers(TABLE[:2]), integers([0, width, 2 * width]), integers([24, 0]), width, 24,
        integers([1, 0]) if width > 1 else None,
    )  # fmt: skip
    given = {"window": None, "scale": None, "softcap": None, "sinks": None} | options | {"window": 1}
    found = paged_attention(numbers(2 * width, HEADS, 16), layer_of(keys, values), queries, Scoring(**given))
    assert found.isfinite().all()


def test_padding_of_single_queries_takes_no_sequences_of_its_own() -> None:
    queries = PagedQueries(integers(TABLE), integers([0, 1, 2, 3]), integers([20, 0, 11]), 1, 24)
    table, starts, lengths, key_starts = queries.for_varlen
    assert (len(table), starts.tolist(), lengths.tolist()) == (3, [0, 1, 2, 3], [20, 0, 11])
    assert key_starts.tolist() == [0, 20, 20, 31]
    assert key_starts.dtype == torch.int32


def test_torchs_function_is_called_as_it_is_documented() -> None:
    """Its signature is looked at, so that a torch without block tables is noticed before a request is."""
    found = varlen._varlen_attn()
    if found is None:
        pytest.skip("this torch has no block tables")
    assert {"seqused_k", "block_table", "window_size", "enable_gqa", "scale"} <= set(
        inspect.signature(found).parameters
    )


def test_torch_takes_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone, of Llama-3.1-8B: torch's operator checks names and types of what it is given."""
    found = varlen._varlen_attn()
    if found is None:
        pytest.skip("this torch has no block tables")
    monkeypatch.setattr(attention, "varlen_for", lambda *_: found)
    with FakeTensorMode(), torch.inference_mode():
        storage = torch.empty(64, 256, 8, 128, dtype=torch.bfloat16)
        query = torch.empty(1, 32, 20, 128, dtype=torch.bfloat16)[0].transpose(0, 1)
        table, starts, lengths, counts = (
            torch.empty(*sizes, dtype=torch.int32) for sizes in ((4, 512), (5,), (4,), (4,))
        )
        queries = PagedQueries(table, starts, lengths, 5, 131072, counts)
        result = paged_attention(query, layer_of(storage, storage), queries, Scoring(4096, 0.1))
    assert result.shape == (20, 32, 128)


@pytest.mark.parametrize("fault", ["refuses", "is wrong", "demands key starts", ""])
def test_the_kernel_is_tried_before_it_is_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = naive_varlen([])

    def kernel(query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, key_starts: Tensor | None,
               *rest: Any, **named: Any) -> Tensor:  # fmt: skip
        if fault == "refuses" or (fault == "demands key starts" and key_starts is None):
            raise RuntimeError("no kernel image is available")
        return right(query, keys, values, starts, key_starts, *rest, **named) * (1 + (fault == "is wrong"))

    monkeypatch.setattr(varlen, "_varlen_attn", lambda: kernel)
    tried = varlen._tried_varlen.__wrapped__
    found = tried(torch.device("cpu"), torch.bfloat16, 64, 32)
    assert (found is None) == (fault in ("refuses", "is wrong"))
    assert ("runs by plain torch" in caplog.text) == (found is None)


def test_what_torchs_function_cannot_do_is_left_to_plain_torch() -> None:
    storage = torch.empty(1, 64, 2, 16, dtype=torch.bfloat16)
    assert varlen_for(storage, storage) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_varlen_attn_serves_pages_on_this_gpu(dim: int) -> None:
    storage = torch.zeros(1, 256, 2, dim, dtype=torch.bfloat16, device="cuda")
    assert varlen_for(storage, storage) is not None
