"""A load: arrivals, lengths, figures, command line, a cluster without models, and a server that answers by the byte."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.common import read_options
from benchmarks.load.fakes import Script
from benchmarks.load.generator import (
    SHAREGPT_OUTPUTS,
    SHAREGPT_PROMPTS,
    Arrival,
    LoadSettings,
    Served,
    arrivals,
    base_of,
    bound_of,
    figures,
    histogram_quantile,
    http_connection,
    quantiles,
    send,
    served_model,
    waits_of,
)
from tandem.errors import ConfigurationError, NotFoundError, ServiceUnavailableError

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
    assert found.latencies["ttft"].mean == pytest.approx(550.0)
    assert found.latencies["itl"].mean == pytest.approx(150.0)
    assert found.latencies["tpot"].mean == pytest.approx(400 / 3)
    assert found.latencies["e2el"].percentiles["p50"] == pytest.approx(750.0)


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
        guess, target = SCRIPT.draft_token(position), SCRIPT.target_token(position)
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
        (["--http", "127.0.0.1:8000"], "must be http://HOST:PORT or https://HOST:PORT"),
        (["--http", "http://:8000"], "must be http://HOST:PORT or https://HOST:PORT"),
        (["--http", "http://host:port"], "must be http://HOST:PORT or https://HOST:PORT"),
        (["--http", "http://h:1", "--address", "h:2"], "--address and --http name two servers"),
        (["--address", "h:2", "--over", "http"], "--over http is about a coordinator that is started"),
        (["--http", "http://h:1", "--token-file", "/no/such"], "token_file is /no/such"),
    ],
)
def test_wrong_options_of_a_load_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_options(LoadSettings, words, "tandem bench", "")
    assert sentence in str(refused.value)


Answer = Callable[[str, Any], Sequence[bytes]]
"""From a path and a body (None without one) to the pieces of an answer, each written by itself."""


def events(*objects: object, done: bool = True) -> bytes:
    ends = b"data: [DONE]\n\n" if done else b""
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in objects) + ends


def text(content: str, usage: dict[str, int] | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content}], "usage": usage}


def usage(tokens: int) -> dict[str, Any]:
    """The chunk that `stream_options.include_usage` asks for."""
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


def answered(status: str, content: bytes, *more: str) -> list[bytes]:
    head = [f"HTTP/1.1 {status}", f"content-length: {len(content)}", *more, "", ""]
    return ["\r\n".join(head).encode() + content]


def chunked(*pieces: bytes) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
    chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
    return [head, *chunks, b"0\r\n\r\n"]


class OpenAiServer:
    """Its address, and what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.url = ""
        self.connections = 0
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        """Path, headers and body of each request."""
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection; an answer with `connection: close` ends it."""
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(content) if content else None
                path = first.split()[1]
                self.asked.append((path, headers, body))
                pieces = self._answer(path, body)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if b"connection: close" in pieces[0]:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def openai_server(answer: Answer) -> AsyncIterator[OpenAiServer]:
    """Serve on a free port."""
    ran = OpenAiServer(answer)
    server = await asyncio.start_server(ran.serve, "127.0.0.1", 0)
    ran.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield ran
    finally:
        server.close()


WANTED = [Arrival(0.0, 3, 8), Arrival(0.0, 5, 6)]
WITH_USAGE = chunked(events(text("a"), text("bc"), text(""), usage(8)))


async def load(answer: Answer, clients: int = 1, token: str = "") -> tuple[list[Served], OpenAiServer]:
    async with openai_server(answer) as server:
        connect = partial(http_connection, base_of(server.url), "some", token)
        return await send(connect, WANTED, clients, 0.5, is_paced=False), server


def always(*pieces: bytes) -> Answer:
    return lambda path, body: pieces


@pytest.mark.parametrize(
    ("url", "spelled"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"),
        ("https://host/proxy/v1", "https://host/proxy/v1"),
        ("http://[::1]:5", "http://[::1]:5/v1"),
    ],
)
def test_a_url_is_taken_with_or_without_its_version(url: str, spelled: str) -> None:
    assert base_of(url) == spelled


async def test_tokens_are_those_of_the_usage_and_chunks_those_with_text() -> None:
    found, server = await load(always(*WITH_USAGE))
    assert [(served.output_tokens, len(served.chunks), served.error) for served in found] == [(8, 2, "")] * 2
    assert all(served.ended >= served.chunks[-1] >= served.chunks[0] >= served.arrived for served in found)
    assert server.connections == 1, "a client keeps its connection"
    path, headers, body = server.asked[0]
    assert path == "/v1/completions"
    assert headers["host"] == server.url.removeprefix("http://")
    assert "authorization" not in headers
    assert body == {
        "model": "some",
        "prompt": [300, 301, 302],
        "max_tokens": 8,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_events_are_read_wherever_the_bytes_are_cut() -> None:
    content = b": a comment\n\n" + events(text("é"), text("b"), usage(7)).replace(b"\n\n", b"\r\n\r\n")
    found, _ = await load(always(*chunked(*(content[i : i + 1] for i in range(len(content))))))
    assert [(served.output_tokens, len(served.chunks)) for served in found] == [(7, 2)] * 2


@pytest.mark.parametrize("more", ["connection: close", "x-other: 1"])
async def test_a_connection_that_the_server_closes_is_opened_again(more: str) -> None:
    found, server = await load(always(*answered("200 OK", events(text("a"), usage(4)), more)))
    assert [served.output_tokens for served in found] == [4, 4]
    assert server.connections == (2 if "close" in more else 1)


async def test_each_client_has_a_connection_and_shows_its_token() -> None:
    _, server = await load(always(*WITH_USAGE), clients=2, token="secret")
    assert server.connections == 2
    assert {headers["authorization"] for _, headers, _ in server.asked} == {"Bearer secret"}


REFUSED = json.dumps({"error": {"message": "no such field: ignore_eos"}}).encode()


@pytest.mark.parametrize(
    ("pieces", "error", "reason"),
    [
        (answered("400 Bad Request", REFUSED), "InvalidRequestError", "answered 400: no such field: ignore_eos"),
        (answered("429 Too Many Requests", b"{}"), "CapacityError", "answered 429: {}"),
        (answered("500 Internal Server Error", b"oh"), "TandemError", "answered 500: oh"),
        (answered("503 Service Unavailable", b""), "ServiceUnavailableError", "answered 503"),
        (
            chunked(events(text("a")), events({"error": {"message": "it broke"}}, done=False)),
            "TandemError",
            "ended a completion: it broke",
        ),
        (chunked(b"data: {]\n\n"), "ProtocolError", "an event of a completion is no JSON object"),
        ([*chunked(events(text("a")))[:-1], b"none\r\n"], "ProtocolError", "does not speak HTTP/1.1"),
        ([b"SSH-2.0-OpenSSH_9\r\n\r\n"], "ProtocolError", "does not speak HTTP/1.1"),
    ],
)  # fmt: skip
async def test_failures_are_counted_by_kind_and_the_load_goes_on(
    pieces: Sequence[bytes], error: str, reason: str
) -> None:
    def first_fails(path: str, body: Any) -> Sequence[bytes]:
        return pieces if len(body["prompt"]) == 3 else WITH_USAGE

    found, _ = await load(first_fails)
    assert [served.error for served in found] == [error, ""]
    assert reason in found[0].reason


async def test_a_server_without_models_is_explained() -> None:
    async with openai_server(always(*answered("200 OK", b'{"data": []}'))) as server:
        with pytest.raises(NotFoundError, match="lists no model; name one with --model"):
            await served_model(base_of(server.url))
    async with openai_server(always(*answered("404 Not Found", b"nothing here"))) as server:
        with pytest.raises(NotFoundError, match="answered 404: nothing here"):
            await served_model(base_of(server.url))
    with pytest.raises(ServiceUnavailableError, match=r"http://127\.0\.0\.1:1/v1/models cannot be reached"):
        await served_model(base_of("http://127.0.0.1:1"))
