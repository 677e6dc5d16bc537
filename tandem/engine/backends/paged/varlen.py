"""torch's `varlen_attn`, tried beside plain torch before it is used."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor

from tandem.engine.backends.paged.plain import plain_attention
from tandem.engine.backends.paged.queries import PagedQueries
from tandem.engine.backends.paged.scoring import Scoring
from tandem.engine.kv_cache.arena import VARLEN_DTYPES, VARLEN_WIDEST_HEAD

logger = logging.getLogger(__name__)

_TRIAL_ERROR = 0.05
"""Largest difference in a trial whose numbers are of size 1: some ten times what bfloat16 rounds."""

Varlen = Callable[..., Tensor]
"""`varlen_attn`, called with a block table."""


def varlen_for(keys: Tensor, values: Tensor) -> Varlen | None:
    """`varlen_attn`, if it serves this layer's pages and gave right results here."""
    dim = keys.shape[-1]
    if (
        not keys.is_cuda
        or keys.dtype not in VARLEN_DTYPES
        or dim > VARLEN_WIDEST_HEAD
        or values.shape[-1] != dim
    ):
        return None
    return _tried_varlen(keys.device, keys.dtype, keys.shape[1], dim)


@cache
def _tried_varlen(device: torch.device, dtype: torch.dtype, page_tokens: int, dim: int) -> Varlen | None:
    """Runs a small step both ways, once: not every GPU and every build of torch has the kernel.

    The first call must not come while a graph is captured.
    """
    found = _varlen_attn()
    if found is None:
        logger.warning("torch has no attention to pages; plain torch stands in", extra={"dim": dim})
        return None
    failures = []
    # The third generation of the kernel takes no key starts, the second may demand them.
    for form in (_without_key_starts(found), found):
        try:
            error = _trial_error(form, device, dtype, page_tokens, dim)
        except (RuntimeError, TypeError, ValueError) as failure:
            failures.append(f"{type(failure).__name__}: {failure}".partition("\n")[0])
            continue
        if error <= _TRIAL_ERROR:
            return form
        failures.append(f"its error is {error:.2g}")
    logger.warning("attention to pages runs by plain torch", extra={"dim": dim, "reason": failures[-1]})
    return None


def _varlen_attn() -> Varlen | None:
    """torch's function; None where this torch has none that takes a block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return cast(Varlen, varlen_attn) if "block_table" in inspect.signature(varlen_attn).parameters else None


def _without_key_starts(function: Varlen) -> Varlen:
    def call(
        query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, _: Tensor, *rest: int, **named: object
    ) -> Tensor:
        return function(query, keys, values, starts, None, *rest, **named)

    return call


@torch.inference_mode()
def _trial_error(form: Varlen, device: torch.device, dtype: torch.dtype, page_tokens: int, dim: int) -> float:
    """The largest difference from plain attention; not a number where padding gives none.

    Kernels differ by window and between one query and several: all are tried, with a length of two pages beside one of
    three tokens, and padding where there are several queries.
    """
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    keys, values = numbers(3, page_tokens, 2, dim), numbers(3, page_tokens, 2, dim)
    keys[1, 9:], values[1, 9:] = float("nan"), float("nan")
    errors = []
    for width, counts in ((5, integers(5, 1)), (1, None)):
        queries = PagedQueries(
            integers(2, 1, 0, 0).view(2, 2), integers(0, width, 2 * width), integers(page_tokens + 9, 3), width,
            2 * page_tokens, counts,
        )  # fmt: skip
        query = numbers(2 * width, 4, dim)
        for window in (None, 7):
            found = varlen_attention(form, query, keys, values, queries, Scoring(window))
            expected = plain_attention(query, keys, values, queries, Scoring(window))
            difference = (found - expected)[: width + 1]  # all but the padding
            errors.append(
                difference.float().abs().max()
                if found.isfinite().all()
                else torch.tensor(torch.nan, device=device)
            )
    return float(torch.stack(errors).max())


def varlen_attention(
    varlen: Varlen,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: PagedQueries,
    scoring: Scoring,
) -> Tensor:
    """Attention by `varlen_attn`; see `plain_attention`."""
    table, query_starts, lengths, key_starts = queries.for_varlen
    return varlen(
        query,
        keys,
        values,
        query_starts,
        key_starts,
        queries.max_queries,
        queries.max_length,
        scale=scoring.scale,
        window_size=(-1 if scoring.window is None else scoring.window - 1, 0),
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=lengths,
        block_table=table,
    )
