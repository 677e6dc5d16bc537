"""The model pair that `tandem plan` measures, named as for `tandem up`."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.cli.plan import PairOptions
from tandem.errors import ConfigurationError


def test_the_demo_pair_is_measured_unless_another_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for options, named in (
        (PairOptions(target="demo"), ["--model", "demo"]),
        (PairOptions(draft="ngram"), ["--model", "demo", "--draft", "ngram"]),
        (PairOptions(target=folder), ["--target", folder]),
        (PairOptions(target=folder, draft=folder), ["--target", folder, "--draft", folder]),
        (PairOptions(target="demo", max_length=64), ["--model", "demo", "--max-length", "64"]),
    ):
        assert options.is_named
        fixed = ["--no-http", "--port", "0", "--draft-ahead", "off", "--device", "cpu"]
        assert options.up_words() == [*fixed, *named]
    assert not PairOptions().is_named


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (PairOptions(target="demo", draft="none"), "--draft is none"),
        (PairOptions(target="/nowhere"), "--target is /nowhere"),
        (PairOptions(target="demo", draft="/nowhere"), "--draft is /nowhere"),
        (PairOptions(target="demo", device="abacus"), "--device is 'abacus'"),
    ],
)
def test_unmeasurable_pairs_are_refused_before_anything_starts(options: PairOptions, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        options.up_words()
