"""The study of servers: how each starts, is stopped and loaded, and the table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load.figures import Figures, Spread
from benchmarks.pairs import Pair
from benchmarks.report import PairInfo
from benchmarks.studies import servers as study
from benchmarks.studies.servers import Launch
from tandem.errors import ServiceUnavailableError
from tests.unit.benchmarks.test_http_load import answered, chunked, events, openai_server, text, usage

PAIR = Pair(Path("t"), Path("d"), PairInfo(name="demo", target_parameters=1, draft_parameters=1))


def options(*more: str) -> argparse.Namespace:
    return study.parse(["--vllm-python", "python-of-vllm", *more])


def found(tokens_per_second: float, failed: int = 0) -> Figures:
    spread = Spread(1.0, {"p50": 12.4, "p99": 20.0})
    return Figures(
        *(4, failed, {}, {}, 1.0, 10, 40, 4.0, tokens_per_second, None), {"ttft": spread, "itl": spread}
    )


def server(name: str, *speeds: float) -> study.Server:
    return study.Server(name, "http://127.0.0.1:1", found=[found(speed) for speed in speeds])


def test_ratios_are_medians_of_the_rounds_by_the_best_mode() -> None:
    lines = study.table(
        [server("Tandem", 10, 22, 30), server("vLLM", 10, 20, 20), server("vLLM, ngram", 9, 9, 40)]
    )

    assert lines[2:] == [
        "| Tandem | 10, 22, 30 | 22 | 1.10 | 12 ms | 12 ms | 0 |",
        "| vLLM | 10, 20, 20 | 20 | 1.00 | 12 ms | 12 ms | 0 |",
        "| vLLM, ngram | 9, 9, 40 | 9 | 0.90 | 12 ms | 12 ms | 0 |",
    ]


async def test_every_server_is_loaded_once_to_warm_up_and_once_for_each_round() -> None:
    def answer(path: str, body: Any) -> Sequence[bytes]:
        if path == "/v1/models":
            return answered("200 OK", json.dumps({"data": [{"id": "m"}]}).encode())
        return chunked(events(text("a"), text("b"), usage(body["max_tokens"])))

    async with openai_server(answer) as first, openai_server(answer) as second:
        servers = [study.Server(name, ran.url) for name, ran in (("Tandem", first), ("vLLM", second))]
        await study.measured(options("--rounds", "2", "--requests", "3", "--clients", "2"), servers)

        for each, ran in zip(servers, (first, second), strict=True):
            assert [one.completed for one in each.found] == [3, 3]
            assert sum(path == "/v1/completions" for path, _, _ in ran.asked) == 3 * (3 + 3)


async def test_a_server_that_ends_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "print('begins'); print('ValueError: no such mode'); print('ends'); exit(3)",
    ]
    monkeypatch.setattr(study, "launch_of", lambda *_: Launch(command))

    with pytest.raises(ServiceUnavailableError, match="ended with exit code 3: ValueError: no such mode"):
        async with study.started("vLLM", options(), PAIR, tmp_path):
            pass
