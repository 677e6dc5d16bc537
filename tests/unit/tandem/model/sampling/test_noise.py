"""Keyed noise: the same bits everywhere, and independent streams.

The seeds are fixed, so a test passes always or never. Thresholds of the statistical ones are at a false-alarm
probability of about 1e-6 each; what they would have seen is said beside them.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from tandem.model.sampling.noise import (
    Purpose,
    gumbel,
    recovery_keys,
    sample,
    stream_key,
    stream_keys,
    target_keys,
    token_uniforms,
    uniform,
)
from tandem.model.types import FloatArray, IntArray

EXTREME = [0, 1, -1, 2**62, -(2**62), 2**63 - 1, -(2**63)]
SIGMAS = 5.0
"""A normal deviate is further out with probability 6e-7."""

VALUES = 1 << 16
"""Number of uniforms of one stream in the statistical tests."""


def _reference_bits(seed: int, position: int, purpose: int, round_base: int, token_id: int) -> int:
    """The definition in Python's unbounded integers, which neither wrap nor have a sign bit."""
    mask = (1 << 64) - 1

    def mix(value: int) -> int:
        value ^= value >> 30
        value = value * 0xBF58476D1CE4E5B9 & mask
        value ^= value >> 27
        value = value * 0x94D049BB133111EB & mask
        return value ^ value >> 31

    golden = 0x9E3779B97F4A7C15
    word = position + (round_base << 30) + (purpose << 60)
    key = mix((mix(seed & mask) + word * golden) & mask)
    return mix((key + (token_id + 1) * golden) & mask)


@pytest.mark.parametrize("seed", EXTREME)
@pytest.mark.parametrize("purpose", Purpose)
def test_bits_agree_with_the_definition(seed: int, purpose: Purpose) -> None:
    position = 123_456
    round_base = 123_450
    token_id = 127_999
    bits = _reference_bits(seed, position, purpose, round_base, token_id)
    expected = ((bits >> 11) | 1) / 2**53
    key = stream_key(seed, position, purpose, round_base)
    assert token_uniforms(np.array([key]), token_id + 1)[0, token_id] == expected
    first = ((_reference_bits(seed, position, purpose, round_base, 0) >> 11) | 1) / 2**53
    assert uniform(seed, position, purpose, round_base) == first


def test_numpy_and_torch_have_the_same_bits() -> None:
    seeds = np.array(EXTREME)
    positions = np.arange(7)
    keys = stream_keys(seeds, positions, Purpose.PROPOSAL, 5)
    torch_keys = stream_keys(torch.tensor(seeds), torch.tensor(positions), Purpose.PROPOSAL, 5)
    np.testing.assert_array_equal(torch_keys.numpy(), keys)
    np.testing.assert_array_equal(token_uniforms(torch_keys, 50_000).numpy(), token_uniforms(keys, 50_000))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_has_the_same_bits() -> None:
    keys = target_keys(seed=-7, base_length=100, count=6)
    on_device = token_uniforms(torch.tensor(keys, device="cuda"), 128_000)
    assert on_device.device.type == "cuda"
    np.testing.assert_array_equal(on_device.cpu().numpy(), token_uniforms(keys, 128_000))


def test_ids_have_the_same_noise_alone_as_among_all() -> None:
    keys = target_keys(seed=3, base_length=9, count=2)
    everything = token_uniforms(keys, 1000)
    np.testing.assert_array_equal(token_uniforms(keys, np.array([999, 0, 17])), everything[:, [999, 0, 17]])
    own = np.array([[5, 6], [7, 8]])
    np.testing.assert_array_equal(token_uniforms(keys, own), np.take_along_axis(everything, own, axis=1))


@pytest.mark.parametrize("seed", EXTREME)
def test_arrays_and_scalars_agree(seed: int) -> None:
    seeds = np.array([seed])
    positions = np.arange(40, 44)
    np.testing.assert_array_equal(target_keys(seed, 40, 4), stream_keys(seeds, positions, Purpose.TARGET))
    keys = stream_keys(seeds, positions, Purpose.PROPOSAL, 40)
    recovering = stream_keys(seeds, positions, Purpose.RECOVERY, 40)
    np.testing.assert_array_equal(recovery_keys(seed, 40, 4), recovering)
    drawn = [uniform(seed, int(position), Purpose.PROPOSAL, 40) for position in positions]
    assert drawn == token_uniforms(keys, 1)[:, 0].tolist()
    assert target_keys(seed, 40, 0).dtype == recovery_keys(seed, 40, 0).dtype == np.int64


def test_uniforms_are_strictly_inside_and_exact() -> None:
    drawn = token_uniforms(target_keys(1, 0, 4), 1 << 18)
    scaled = drawn * 2.0**53
    assert drawn.dtype == np.float64
    assert np.all((scaled == np.floor(scaled)) & (scaled % 2 == 1))
    assert np.all((drawn > 0) & (drawn < 1))
    # The ends are reached: of 2**20 draws the smallest is below 2**-17, except with probability exp(-8).
    assert drawn.min() < 2.0**-17
    assert drawn.max() > 1 - 2.0**-17


def test_no_two_keys_of_a_sequence_are_equal() -> None:
    keys = {
        stream_key(5, position, purpose, round_base)
        for position in (*range(6), 2**30 - 1)
        for purpose in Purpose
        for round_base in (*range(6), 2**30 - 1)
    }
    assert len(keys) == 7 * 4 * 7


def _streams() -> dict[str, FloatArray]:
    """Pairs of streams whose arguments differ minimally."""
    keys = {
        "one": stream_key(7, 100, Purpose.TARGET),
        "next seed": stream_key(8, 100, Purpose.TARGET),
        "opposite seed": stream_key(-7, 100, Purpose.TARGET),
        "far seed": stream_key(7 + 2**60, 100, Purpose.TARGET),
        "next position": stream_key(7, 101, Purpose.TARGET),
        "proposal": stream_key(7, 100, Purpose.PROPOSAL),
        "acceptance": stream_key(7, 100, Purpose.ACCEPTANCE),
        "recovery": stream_key(7, 100, Purpose.RECOVERY),
        "round": stream_key(7, 100, Purpose.PROPOSAL, 100),
        "next round": stream_key(7, 100, Purpose.PROPOSAL, 101),
    }
    drawn = token_uniforms(np.array(list(keys.values())), VALUES)
    return dict(zip(keys, drawn, strict=True))


STREAMS = _streams()


def _assert_uniform(drawn: FloatArray, bins: int = 256) -> None:
    """Chi-square in `bins` cells, and the largest gap to the diagonal (Kolmogorov-Smirnov)."""
    counts = np.bincount((drawn * bins).astype(np.int64), minlength=bins)
    expected = drawn.size / bins
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - (bins - 1)) < SIGMAS * math.sqrt(2 * (bins - 1))
    ranks = np.arange(1, drawn.size + 1) / drawn.size
    gap = float(np.abs(np.sort(drawn) - ranks).max())
    # 2 exp(-2 n gap**2) = 1e-6
    assert gap < math.sqrt(math.log(2e6) / (2 * drawn.size)) + 1 / drawn.size


def _assert_independent(one: FloatArray, other: FloatArray, bins: int = 16) -> None:
    """Correlation, and chi-square of the pairs in `bins` x `bins` cells."""
    correlation = float(np.corrcoef(one, other)[0, 1])
    assert abs(correlation) < SIGMAS / math.sqrt(one.size)
    cells = (one * bins).astype(np.int64) * bins + (other * bins).astype(np.int64)
    counts = np.bincount(cells, minlength=bins * bins)
    expected = one.size / bins**2
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - (bins**2 - 1)) < SIGMAS * math.sqrt(2 * (bins**2 - 1))


@pytest.mark.parametrize("name", STREAMS)
def test_tokens_of_a_stream_are_uniform(name: str) -> None:
    _assert_uniform(STREAMS[name])


@pytest.mark.parametrize("name", STREAMS)
def test_neighbouring_tokens_are_independent(name: str) -> None:
    _assert_independent(STREAMS[name][:-1], STREAMS[name][1:])


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(STREAMS, 2)])
def test_streams_are_independent(one: str, other: str) -> None:
    _assert_independent(STREAMS[one], STREAMS[other])


@pytest.mark.parametrize("purpose", Purpose)
def test_first_values_are_uniform_and_independent_along_positions(purpose: Purpose) -> None:
    """The uniforms of the coordinator are the first of their streams, one stream for each position."""
    drawn = np.array([uniform(42, position, purpose, 1000) for position in range(VALUES)])
    _assert_uniform(drawn)
    _assert_independent(drawn[:-1], drawn[1:])


def test_first_values_are_uniform_and_independent_along_seeds_and_rounds() -> None:
    counter = np.arange(VALUES)
    by_seed = token_uniforms(stream_keys(counter, np.array([10]), Purpose.TARGET), 1)[:, 0]
    by_round = token_uniforms(stream_keys(np.array([3]), counter, Purpose.ACCEPTANCE, counter), 1)[:, 0]
    for drawn in (by_seed, by_round):
        _assert_uniform(drawn)
        _assert_independent(drawn[:-1], drawn[1:])


def test_the_statistical_tests_detect_dependence() -> None:
    """Streams that share half of their values, or a distribution that is off by two per cent, must fail."""
    one = STREAMS["one"]
    other = STREAMS["proposal"].copy()
    other[: VALUES // 2] = one[: VALUES // 2]
    with pytest.raises(AssertionError):
        _assert_independent(one, other)
    with pytest.raises(AssertionError):
        _assert_uniform(one**1.05)


def _keys(count: int) -> IntArray:
    return stream_keys(np.arange(count), np.array([0]), Purpose.TARGET)  # type: ignore[no-any-return]


def test_sample_is_the_gumbel_max_trick() -> None:
    keys = _keys(500)
    probs = np.random.default_rng(0).dirichlet(np.ones(50), 500)
    expected = np.argmax(np.log(probs) + gumbel(keys, 50), axis=1)
    np.testing.assert_array_equal(sample(probs, keys), expected)


def test_sample_of_some_ids_equals_that_of_all_restricted_to_them() -> None:
    keys = _keys(300)
    probs = np.random.default_rng(2).dirichlet(np.ones(40), 300)
    ids = np.array([31, 2, 17, 5])
    restricted = np.zeros_like(probs)
    restricted[:, ids] = probs[:, ids]
    np.testing.assert_array_equal(ids[sample(probs[:, ids], keys, ids)], sample(restricted, keys))


def test_sample_is_the_same_with_torch_and_numpy() -> None:
    keys = _keys(300)
    probs = np.random.default_rng(3).dirichlet(np.ones(40), 300)
    np.testing.assert_array_equal(
        sample(torch.tensor(probs), torch.tensor(keys)).numpy(), sample(probs, keys)
    )
