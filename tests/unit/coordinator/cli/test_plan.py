"""The model pair that `tandem plan` measures, named as for `tandem up`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cli import plan
from coordinator.cli.plan import PairOptions
from tandem.errors import ConfigurationError
from tandem.types import GenerationRequest


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


async def test_rounds_that_come_two_at_once_take_half_as_long_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Client:
        async def generate(self, request: GenerationRequest) -> AsyncIterator[SimpleNamespace]:
            nonlocal now
            for number in range(9):
                now += 0.0 if number % 2 else 0.016
                yield SimpleNamespace(token_ids=(number,), proposed=0)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    client: Any = Client()
    found = await plan._round_seconds(client, 1, [0], temperature=0.0)
    assert found == {0: pytest.approx(0.008)}
