"""Keyed noise: a random number is a function of its purpose, never of when or where it is drawn.

A key is made from a request's seed, a position, a purpose and, for some purposes, the base length of the
round. The position is the index in the sequence of the token that is being chosen. A key gives a stream of
uniforms, one for each token id. The bits come from integer arithmetic alone (the finaliser of
SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), written
once over array operators, so numpy and torch give the same bits on a CPU and on a GPU.

Which keys carry the round's base length
----------------------------------------
A token-by-token rule decides on a position with the noise of that position and earlier ones. The noise after a
rejection never influenced the tokens that were kept, so the next round may reuse it at those positions and stays
exact. Block verification is different: a later draft token and its acceptance uniform help to decide whether an
earlier token is kept. If the next round reused them, its noise would depend on tokens already emitted. Hence
`PROPOSAL` and `ACCEPTANCE` keys carry the base length, which no two rounds of a sequence share. Fresh noise is
exact for every rule, so these keys always carry it and no service needs to know the rule. `RECOVERY` keys carry it
too, so that everything the coordinator draws has the same kind of key; their sample is used only when it becomes
the token at its position.

`TARGET` keys never carry it: under `strict` the draft must use the noise that the target will use at that position,
in whichever round reaches it. Block verification stays exact with them, because the target's sample at a position is
used only when it becomes the token there.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace, device

from tandem.model.types import IntArray

Array: TypeAlias = Any
"""A numpy array or a torch tensor, used only through the array API standard."""


def _as_signed(bits: int) -> int:
    """Return the 64 bits as a signed number, as numpy and torch compute with them."""
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN = _as_signed(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = _as_signed(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = _as_signed(0x94D049BB133111EB)

_ALL_BITS = (1 << 64) - 1
"""Python's integers are cut to the 64 bits of numpy's and torch's."""

_LENGTH_BITS = 30
"""Positions and base lengths are below 2**30, so that both and the purpose share one word."""


class Purpose(IntEnum):
    """Purpose of a random number. Two purposes never share a key."""

    TARGET = 1
    """Samples of the target, and the draft's samples that anticipate them (`strict`)."""
    PROPOSAL = 2
    """Tokens that the draft samples from its own distribution."""
    ACCEPTANCE = 3
    """Decisions on proposed tokens."""
    RECOVERY = 4
    """The token after the accepted run: the recovered or the bonus token."""


def _shift_right(values: Array, count: int) -> Array:
    """Shift right with zeros; `>>` alone would repeat the sign."""
    shifted = values >> count
    shifted &= (1 << (64 - count)) - 1
    return shifted


def _mix(values: Array) -> Array:
    """Apply SplitMix64's finaliser: a bijection in which each input bit flips half of the output bits.

    It works in place after the first step, because the arrays can be as large as rows times vocabulary.
    """
    mixed = values ^ _shift_right(values, 30)
    mixed *= _FIRST_MULTIPLIER
    mixed ^= _shift_right(mixed, 27)
    mixed *= _SECOND_MULTIPLIER
    mixed ^= _shift_right(mixed, 31)
    return mixed


def _mixed_bits(bits: int) -> int:
    """Compute `_mix` of one word with unsigned Python integers.

    For the few numbers of a round numpy arrays would take ten times as long.
    """
    bits ^= bits >> 30
    bits = bits * _FIRST_MULTIPLIER & _ALL_BITS
    bits ^= bits >> 27
    bits = bits * _SECOND_MULTIPLIER & _ALL_BITS
    return bits ^ bits >> 31


_seed_bits = lru_cache(maxsize=4096)(_mixed_bits)
"""The part of a key that all keys of a request share, of the bits of its seed."""


def _key_bits(seed: int, position: int, purpose: Purpose, round_base: int) -> int:
    """Return a key of `stream_keys` as 64 unsigned bits."""
    word = position + (purpose << 2 * _LENGTH_BITS) + (round_base << _LENGTH_BITS)
    return _mixed_bits(_seed_bits(seed & _ALL_BITS) + word * _GOLDEN & _ALL_BITS)


def namespace_of(array: Array) -> Any:
    """Return the array's namespace. Looking it up takes longer than the arithmetic on the few numbers of a round, and
    numpy's own needs no wrapper, the import of which is a tenth of a coordinator's start."""
    return np if type(array) is np.ndarray else array_namespace(array)


def stream_keys(
    seeds: Array, positions: Array, purposes: Purpose | Array, round_bases: Array | int = 0
) -> Array:
    """Return the keys of many streams: int64 of the shape to which the arguments, int64 as well, broadcast.

    `positions` are the indices in their sequences of the tokens that are chosen; `round_bases` is 0 for the purpose
    TARGET (see the module docstring). For one seed, different arguments never give the same key.
    """
    words = positions + (purposes << 2 * _LENGTH_BITS) + (round_bases << _LENGTH_BITS)
    return _mix(_mix(seeds) + words * _GOLDEN)


def stream_key(seed: int, position: int, purpose: Purpose, round_base: int = 0) -> int:
    """Return the key of one stream, a signed 64-bit integer."""
    return _as_signed(_key_bits(seed, position, purpose, round_base))


def target_keys(seed: int, base_length: int, count: int) -> IntArray:
    """Return the keys of the target's samples for the `count` tokens after `base_length` ones, int64 [count].

    A draft that anticipates the target (`strict`) samples with the same keys.
    """
    return _keys(seed, base_length, count, Purpose.TARGET, 0)


def recovery_keys(seed: int, base_length: int, count: int) -> IntArray:
    """Return the keys for sampling the token after the accepted run, in the round that extends `base_length` tokens.

    Entry i applies if i tokens are accepted, and so chooses the token at `base_length` + i; a proposal of K tokens
    needs K + 1. Target, coordinator and a draft that anticipates them sample with the same keys.
    """
    return _keys(seed, base_length, count, Purpose.RECOVERY, base_length)


def _keys(seed: int, base_length: int, count: int, purpose: Purpose, round_base: int) -> IntArray:
    positions = range(base_length, base_length + count)
    keys = [stream_key(seed, position, purpose, round_base) for position in positions]
    return np.array(keys, dtype=np.int64)


def token_uniforms(keys: Array, token_ids: Array | int) -> Array:
    """Return the uniforms that each row's key gives to token ids: float64 [R, V], strictly between 0 and 1.

    Keys are int64 [R]; token ids int64 [V] for the same ids in every row, [R, V] for each row's own, or the
    vocabulary's size for all ids in order.
    """
    xp = namespace_of(keys)
    if isinstance(token_ids, int):
        token_ids = xp.arange(token_ids, dtype=xp.int64, device=device(keys))
    odd = _shift_right(_mix(keys[:, None] + (token_ids + 1) * _GOLDEN), 11)
    odd |= 1
    # Odd multiples of 2**-53 are exact in float64, symmetric about one half, never 0 or 1.
    return xp.astype(odd, xp.float64) * 2.0**-53


def uniform(seed: int, position: int, purpose: Purpose, round_base: int = 0) -> float:
    """Return the first uniform of a stream, strictly between 0 and 1."""
    bits = _mixed_bits(_key_bits(seed, position, purpose, round_base) + _GOLDEN & _ALL_BITS)
    return (bits >> 11 | 1) * 2.0**-53


def gumbel(keys: Array, token_ids: Array | int) -> Array:
    """Return standard Gumbel noise, float64 [R, V]; arguments as in `token_uniforms`."""
    xp = namespace_of(keys)
    return -xp.log(-xp.log(token_uniforms(keys, token_ids)))


def sample(probs: Array, keys: Array, token_ids: Array | None = None) -> Array:
    """Sample one token of each row.

    This is the Gumbel-max trick in its exponential form: the argmax of log(prob) + gumbel is the argmax of
    prob / exponential, which saves two logarithms and needs no special case for probability zero. Two models
    that sample with the same keys agree with probability (1 - TV) / (1 + TV) or more, where TV is the total
    variation distance of their distributions.

    Rows of `probs` [R, V] have a positive entry and need not sum to one; zeros are never drawn. `keys` are int64 [R] on
    the same device, `token_ids` the ids of the columns, as in `token_uniforms`; None for all ids in order. The result
    is the sampled columns, int64 [R]. The noise has the same bits everywhere; its logarithm may differ in the last
    place between devices, which changes about one sample in 10**13.
    """
    xp = namespace_of(probs)
    exponential = -xp.log(token_uniforms(keys, probs.shape[1] if token_ids is None else token_ids))
    return xp.argmax(probs / exponential, axis=1)
