"""A load: arrivals, lengths, figures, the script of fakes, command line, and clients over HTTP."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import httpx2
import pytest

from tandem.config.settings import load_settings
from tandem.errors import ConfigurationError, NotFoundError, ServiceUnavailableError
from tandem_load.fakes import Script
from tandem_load.generator import (
    SHAREGPT_OUTPUTS,
    SHAREGPT_PROMPTS,
    Arrival,
    LoadSettings,
    Served,
    arrivals,
    bound_of,
    figures,
    histogram_quantile,
    http_connection,
    quantiles,
    send,
    served_model,
    waits_of,
)

COUNT = 4000
RATE = 25.0


def test_gaps_are_exponential() -> None:
    times = [each.seconds for each in arrivals(COUNT, RATE, 0)]
    assert times[0] == 0.0
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / RATE, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / RATE, rel=0.1), (
        "an exponential's deviation is its mean"
    )
    assert sum(gap > 2 / RATE for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), rel=0.15)


@pytest.mark.parametrize("purpose", ["prompt_tokens", "output_tokens"])
def test_lengths_are_like_those_of_chats(purpose: str) -> None:
    lengths = [getattr(each, purpose) for each in arrivals(COUNT, RATE, 0)]
    wanted = SHAREGPT_PROMPTS if purpose == "prompt_tokens" else SHAREGPT_OUTPUTS
    assert statistics.median(lengths) == pytest.approx(wanted.median, rel=0.1)
    assert 160 < statistics.mean(lengths) < 240
    assert min(lengths) >= 4
    assert max(lengths) <= 1024


FAST = Served(10.0, 5, 4, [10.1, 10.2, 10.4], 10.5)
"""TTFT 100 ms, gaps of 100 and 200 ms, 500 ms in all, 133 ms by token after the first."""
SLOW = Served(11.0, 5, 1, [12.0], 12.0)
FAILED = Served(11.0, 5, 2, [11.5], 13.0, "ServiceUnavailableError")


def test_figures_count_what_was_completed_from_the_first_arrival_to_the_last_end() -> None:
    found = figures([FAST, SLOW, FAILED], {}, [50])
    assert (found.completed, found.failed, found.errors) == (2, 1, {"ServiceUnavailableError": 1})
    assert found.seconds == pytest.approx(3.0)
    assert (found.prompt_tokens, found.output_tokens) == (10, 5)
    assert found.requests_per_second == pytest.approx(2 / 3)
    assert found.output_tokens_per_second == pytest.approx(5 / 3)
    assert found.goodput is None
    assert found.latencies["ttft"]["mean"] == pytest.approx(550.0)
    assert found.latencies["itl"]["mean"] == pytest.approx(150.0)
    assert found.latencies["tpot"]["mean"] == pytest.approx(400 / 3)
    assert found.latencies["e2el"]["p50"] == pytest.approx(750.0)


@pytest.mark.parametrize(
    ("words", "good"),
    [
        (["ttft:100.1"], 1),
        (["ttft:1001"], 2),
        (["ttft:99"], 0),
        (["itl:199"], 1),  # that of the single token, which waits for nothing
        (["ttft:500", "itl:201"], 1),
        (["ttft:500", "itl:199"], 0),
        (["tpot:134", "e2el:501"], 1),
    ],
)
def test_goodput_counts_requests_within_all_bounds(words: list[str], good: int) -> None:
    found = figures([FAST, SLOW, FAILED], dict(map(bound_of, words)), [50])
    assert found.goodput == pytest.approx(good / 3.0)


def test_a_quantile_of_a_histogram_lies_inside_its_bucket() -> None:
    buckets = [(0.001, 50.0), (0.01, 100.0), (math.inf, 100.0)]
    assert histogram_quantile(buckets, 0.5) == pytest.approx(0.001)
    assert histogram_quantile(buckets, 0.75) == pytest.approx(0.0055)
    assert histogram_quantile([(0.001, 1.0), (math.inf, 100.0)], 0.99) == 0.001, "at least the last bound"
    assert histogram_quantile([(0.001, 0.0), (math.inf, 0.0)], 0.99) == 0.0


PAGE = """\
# TYPE tandem_round_phase_seconds histogram
tandem_round_phase_seconds_bucket{le="0.001",model_name="a",phase="verify"} 9.0
tandem_round_phase_seconds_bucket{le="0.001",model_name="a",phase="wait"} 4.0
tandem_round_phase_seconds_bucket{le="+Inf",model_name="a",phase="wait"} 4.0
tandem_round_phase_seconds_bucket{le="0.001",model_name="b",phase="wait"} 2.0
tandem_round_phase_seconds_bucket{le="+Inf",model_name="b",phase="wait"} 6.0
tandem_round_phase_seconds_sum{model_name="a",phase="wait"} 1.0
tandem_round_wait_seconds_bucket{le="0.001",model_name="a",place="answer"} 0.0
tandem_round_wait_seconds_bucket{le="0.01",model_name="a",place="answer"} 8.0
tandem_round_wait_seconds_bucket{le="+Inf",model_name="a",place="answer"} 8.0
"""


def test_counts_are_read_by_place_and_added_over_models() -> None:
    infinity = float("inf")
    assert waits_of(PAGE) == {
        "between": {0.001: 6.0, infinity: 10.0},
        "answer": {0.001: 0.0, 0.01: 8.0, infinity: 8.0},
    }


def test_quantiles_are_those_of_the_waits_between_two_readings() -> None:
    later = PAGE.replace(
        'le="0.01",model_name="a",place="answer"} 8', 'le="0.01",model_name="a",place="answer"} 10'
    )
    later = later.replace(
        'le="+Inf",model_name="a",place="answer"} 8', 'le="+Inf",model_name="a",place="answer"} 10'
    )
    found = quantiles(waits_of(PAGE), waits_of(later))
    assert found == {"answer": {"p50": pytest.approx(5.5), "p99": pytest.approx(9.91)}}


SCRIPT = Script(0.72)
POSITIONS = range(2000)


def test_the_draft_is_right_as_often_as_it_should_be() -> None:
    right = sum(SCRIPT.draft_token(position) == SCRIPT.target_token(position) for position in POSITIONS)
    assert 0.68 < right / len(POSITIONS) < 0.76


def test_supports_hold_the_guess_and_the_target_only_where_it_is_the_guess() -> None:
    for position in POSITIONS:
        guess = SCRIPT.draft_token(position)
        target = SCRIPT.target_token(position)
        support = SCRIPT.support(position, 24)
        assert support[0] == guess
        assert len(set(support)) == 24
        assert all(0 <= token_id < 2048 for token_id in support)
        assert (target in support) == (guess == target)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--clients", "0"], "clients is 0; it must be at least 1"),
        (["--rate", "-1"], "rate is -1; it must be above 0"),
        (["--clients", "2", "--goodput", "first:3"], "must be NAME:MILLISECONDS"),
        (["--clients", "2", "--percentiles", "101"], "percentiles.0 is 101: "),
        (["--address", "h:2", "--over", "http"], "--over http is about a coordinator that is started"),
        (["--address", "h:1", "--token-file", "/no/such"], "token_file is /no/such"),
    ],
)
def test_wrong_options_of_a_load_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(LoadSettings, words, "tandem bench")
    assert sentence in str(refused.value)


CLIENT = httpx2.AsyncClient
Server = Callable[[httpx2.Request], httpx2.Response]
Serve = Callable[[Server], list[httpx2.Request]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Let a function answer all requests over HTTP; they are listed."""

    def serve(answer: Server) -> list[httpx2.Request]:
        seen: list[httpx2.Request] = []

        def handle(request: httpx2.Request) -> httpx2.Response:
            seen.append(request)
            return answer(request)

        transport = httpx2.MockTransport(handle)
        monkeypatch.setattr(httpx2, "AsyncClient", partial(CLIENT, transport=transport))
        return seen

    return serve


def events(*objects: object, done: bool = True) -> httpx2.Response:
    ends = b"data: [DONE]\n\n" if done else b""
    data = (b"data: " + json.dumps(each).encode() + b"\n\n" for each in objects)
    return httpx2.Response(200, content=b": a comment\n\n" + b"".join(data) + ends)


def text(content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content}], "usage": None}


def usage(tokens: int) -> dict[str, Any]:
    """The chunk that `stream_options.include_usage` asks for."""
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


def with_usage(_: httpx2.Request) -> httpx2.Response:
    return events(text("a"), text("bc"), text(""), usage(8))


async def load() -> list[Served]:
    connect = partial(http_connection, "http://server/v1", "some")
    return await send(connect, [Arrival(0.0, 3, 8), Arrival(0.0, 5, 6)], 1, 0.5, is_paced=False)


async def test_tokens_are_those_of_the_usage_and_chunks_those_with_text(serve: Serve) -> None:
    asked = serve(with_usage)
    found = await load()
    assert [(served.output_tokens, len(served.chunks), served.error) for served in found] == [(8, 2, "")] * 2
    assert all(served.ended >= served.chunks[-1] >= served.chunks[0] >= served.arrived for served in found)
    assert asked[0].url.path == "/v1/completions"
    assert json.loads(asked[0].content) == {
        "model": "some",
        "prompt": [300, 301, 302],
        "max_tokens": 8,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (httpx2.Response(400, json={"error": {"message": "no such field: ignore_eos"}}), "InvalidRequestError",
         "answered 400: no such field: ignore_eos"),
        (httpx2.Response(429, json={}), "CapacityError", "answered 429: {}"),
        (httpx2.Response(500, text="oh"), "TandemError", "answered 500: oh"),
        (httpx2.Response(503), "ServiceUnavailableError", "answered 503"),
        (events(text("a"), {"error": {"message": "it broke"}}, done=False), "TandemError",
         "ended a completion: it broke"),
        (httpx2.Response(200, text="data: {]\n\n"), "ProtocolError", "an event of a completion is no JSON object"),
        (httpx2.RemoteProtocolError("no"), "ProtocolError", "does not speak HTTP/1.1"),
    ],
)  # fmt: skip
async def test_failures_are_counted_by_kind_and_the_load_goes_on(
    serve: Serve, answer: httpx2.Response | Exception, error: str, reason: str
) -> None:
    def first_fails(request: httpx2.Request) -> httpx2.Response:
        if len(json.loads(request.content)["prompt"]) != 3:
            return with_usage(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    serve(first_fails)
    found = await load()
    assert [served.error for served in found] == [error, ""]
    assert reason in found[0].reason


async def test_a_server_without_models_is_explained(serve: Serve) -> None:
    serve(lambda _: httpx2.Response(200, json={"data": []}))
    with pytest.raises(NotFoundError, match="lists no model"):
        await served_model("http://server/v1")
    serve(lambda _: httpx2.Response(404, text="nothing here"))
    with pytest.raises(NotFoundError, match="answered 404: nothing here"):
        await served_model("http://server/v1")


async def test_a_server_that_is_not_there_is_explained() -> None:
    with pytest.raises(ServiceUnavailableError, match=r"http://127\.0\.0\.1:1/v1/models cannot be reached"):
        await served_model("http://127.0.0.1:1/v1")
