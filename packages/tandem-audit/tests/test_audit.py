"""Audits of synthetic servers over HTTP, without a socket."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tandem_audit import command, progress
from tandem_audit.checks import Verdict, variation
from tandem_audit.client import Budget, Completion, Server, connect, speculation_counts
from tandem_audit.command import format_audit, main
from tandem_audit.errors import AnswerError, InvalidRequestError, RefusedError, UnreachableError, UsageError
from tandem_audit.progress import show_progress
from tandem_audit.report import acceptance_line, as_dict, html
from tandem_audit.run import Audit, AuditOptions, Reader, audit, compare_completions
from tandem_audit.simulation.samplers import PROPOSED, RIGHT, Language, Sampler

LANGUAGE = Language.random()
OTHER_LANGUAGE = Language.random(seed=6)
sampler_of = cache(Sampler)  # each takes a while to make
URL = "http://synthetic/v1"
Change = Callable[[dict[str, Any]], dict[str, Any]]


class Changed(httpx2.AsyncBaseTransport):
    """A synthetic server that changes requests before it answers."""

    def __init__(
        self, change: Change = lambda body: body, fault: str = RIGHT, language: Language = LANGUAGE
    ) -> None:
        self._inner = httpx2.ASGITransport(application(language, fault))
        self._change = change
        self.bodies: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/completions":
            self.bodies.append(json.loads(await request.aread()))
            request = httpx2.Request("POST", request.url, json=self._change(dict(self.bodies[-1])))
        return await self._inner.handle_async_request(request)


async def audited(
    transport: httpx2.AsyncBaseTransport, tokens: int, reference: Changed | None = None, **more: Any
) -> Audit:
    if reference is not None:
        more["reference"] = URL
    options = AuditOptions(URL, budget_tokens=tokens, **({"minutes": 5.0} | more))
    return await audit(options, transports=(transport, reference))


async def test_a_right_server_is_lossless() -> None:
    server = Changed()
    result = await audited(server, 6_000)
    assert result.findings == []
    assert result.verdict.startswith("lossless, as far as 6,0")
    assert result.verdict.endswith(" tokens a pass")
    assert {each.verdict for each in result.checks} <= {Verdict.OK, Verdict.NOTE}
    assert "by position" in acceptance_line(result)
    # It refuses ids as names, so what is accepted beside them is asked for.
    assert "return_tokens_as_token_ids" not in result.fields
    assert result.fields["ignore_eos"] is True
    assert result.tokens < 6_000 + 8 * 64
    assert result.requests == len(server.bodies)
    described = json.loads(json.dumps(as_dict(result)))
    assert described["speculation"]["tokens_per_pass"] > 2
    assert any(test["name"] == "first choice at position 4 modulo 5" for test in described["tests"])
    page = html(result)
    assert page.count("<svg") == 5
    assert "http://synthetic/v1" in page


async def test_another_model_than_the_reference_is_named() -> None:
    result = await audited(Changed(), 6_000, Changed(language=OTHER_LANGUAGE))
    assert any("these are two models" in finding for finding in result.findings)


async def test_a_reference_without_log_probabilities_is_asked_and_compared_by_its_text() -> None:
    result = await audited(Changed(), 6_000, Changed(unreported))
    assert result.findings == []
    assert [test.name for test in result.reference] == list(NAMES)
    assert result.tests


async def test_a_lossy_rule_is_named() -> None:
    result = await audited(Changed(fault="typical-acceptance"), 6_000)
    assert result.findings[0] == "the acceptance rule typical-acceptance is lossy by design"
    assert "not drawn from the reported probabilities" in result.findings[1]
    assert 'fill="#b91c1c"' in html(result)


@pytest.mark.parametrize("has_ids", [True, False])
async def test_log_probabilities_of_the_draft_are_named(has_ids: bool) -> None:
    def named(body: dict[str, Any]) -> dict[str, Any]:
        return body if has_ids else body | {"return_token_ids": False}

    server = Changed(named, "log probabilities of the draft")
    result = await audited(server, 3_000)
    assert any(isinstance(body["prompt"], list) for body in server.bodies) is has_ids
    (check,) = [each for each in result.checks if each.name.startswith("log probabilities and")]
    assert check.verdict is Verdict.FINDING
    assert "the target's distribution" in check.detail


async def test_a_server_is_compared_with_its_reference() -> None:
    result = await audited(Changed(), 6_000, Changed())
    assert result.findings == []
    assert [test.name for test in result.reference] == list(NAMES)
    assert "Against the reference" in html(result)
    (rows,) = [each for each in result.checks if each.name == "log probabilities, server and reference"]
    assert (rows.verdict, rows.detail[:5]) == (Verdict.OK, "0 of ")
    result.reference = [replace(test, adjusted_p=0.0) for test in result.reference]
    assert result.findings[0] == "another distribution than the reference: first token, p = 0"


NAMES = ("first token", "first two tokens", "pairs of tokens", "length", "reason to end")


@pytest.mark.parametrize(("fault", "differing"), [(RIGHT, set()), ("typical-acceptance", set(NAMES[:3]))])
def test_two_samples(fault: str, differing: set[str]) -> None:
    contexts = np.resize(np.array([5, 700, 1234, 4000]), 400)
    found = []
    for is_reference, sampler in enumerate((Sampler(LANGUAGE, fault), Sampler(LANGUAGE))):
        made, _ = sampler.generate(contexts, 8, np.random.default_rng(is_reference))
        completions = [Completion("", "length", tuple(map(str, tokens))) for tokens in made.tolist()]
        found += [
            (int(place), bool(is_reference), each) for place, each in zip(contexts, completions, strict=True)
        ]
    results = compare_completions(found, permutations=999)
    assert {test.name for test in results if (test.adjusted_p or 0.0) < 0.02} == differing


def unreported(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "logprobs"}


FAULTS: dict[str, Change] = {
    "greedy takes the most probable token": lambda b: b | ({"temperature": 1.0} if b["temperature"] == 0 else {}),
    "4 requests at once: noise of their own": lambda b: b | {"seed": 3},
    "stop strings": lambda b: b | {"stop": None},
    "greedy, streamed and whole": lambda b: b | ({"temperature": 1.0} if b.get("stream") else {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
async def test_other_faults_of_a_server_are_found(name: str) -> None:
    result = await audited(Changed(FAULTS[name]), 3_500)
    (check,) = [each for each in result.checks if each.name == name]
    assert check.verdict is Verdict.FINDING, check


class Stopping(Changed):
    """Keeps the stop string and what else its last token has in the text, or goes on for longer."""

    def __init__(self, past: int) -> None:
        super().__init__()
        self._past = past

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(await request.aread()) if request.method == "POST" else {}
        answer = await super().handle_async_request(request)
        if stops := body.get("stop"):
            whole = httpx2.Request("POST", request.url, json=body | {"stop": None})
            text = json.loads(await (await super().handle_async_request(whole)).aread())["choices"][0]["text"]
            text = text[: text.find(stops[0]) + len(stops[0]) + self._past]
            return httpx2.Response(200, json={"choices": [{"text": text, "finish_reason": "stop"}]})
        return answer


@pytest.mark.parametrize(
    ("past", "verdict"), [(0, Verdict.NOTE), (3, Verdict.NOTE), (-2, Verdict.FINDING), (20, Verdict.FINDING)]
)
async def test_stop_strings_that_stay_in_the_text_are_noted(past: int, verdict: Verdict) -> None:
    result = await audited(Stopping(past), 3_500)
    (check,) = [each for each in result.checks if each.name == "stop strings"]
    assert check.verdict is verdict


async def test_a_server_that_knows_no_n_is_not_accused() -> None:
    result = await audited(Changed(lambda body: body | {"n": 1}), 3_500)
    (check,) = [each for each in result.checks if each.name == "n = 4: noise of their own"]
    assert (check.verdict, check.detail) == (Verdict.NOTE, "1 of 4 choices came")


async def test_without_log_probabilities_nothing_is_claimed() -> None:
    result = await audited(Changed(unreported), 5_000)
    assert result.tests == {}
    assert result.findings == []
    assert result.verdict.startswith("nothing found, but too few sampled tokens")
    assert html(result).count("<svg") == 0


async def test_what_was_found_before_it_is_stopped_is_reported() -> None:
    sampled = 0

    def stopping(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal sampled
        sampled += body["max_tokens"] == 64 and body["temperature"] == 1.0 and "stop" not in body
        if sampled == 20:
            task.cancel()
        return body

    task = asyncio.ensure_future(audited(Changed(stopping, "typical-acceptance"), 100_000))
    result = await task
    assert 20 <= sampled < 32
    assert result.findings[0] == "the acceptance rule typical-acceptance is lossy by design"
    assert result.tests
    assert result.speculation is not None


@pytest.mark.parametrize("minutes", [0.01, 0.05])
async def test_the_time_holds_for_the_checks_too(minutes: float) -> None:
    """A server that takes 0.2 s over each answer needs 20 s for all checks."""

    class Slow(Changed):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            await asyncio.sleep(0.2)
            return await super().handle_async_request(request)

    result = await audited(Slow(), 100_000, minutes=minutes)
    assert result.seconds < 60 * minutes + 5
    skipped = [each.detail for each in result.checks if each.verdict is Verdict.SKIPPED]
    assert set(skipped) == {"its time was over; it needs more --minutes"}
    assert result.findings == []


@pytest.mark.parametrize("option", ["body", "reference_body"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 50),
        ("top_p", 0.9),
        ("top_p", None),
        ("min_p", 0.1),
        ("temperature", 0.5),
        ("seed", 1),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("stop", ["a"]),
        ("ignore_eos", False),
        ("n", 2),
        ("response_format", {"type": "json_object"}),
        ("max_tokens", 8),
    ],
)
def test_fields_that_change_what_is_drawn_are_refused(option: str, field: str, value: object) -> None:
    changed: dict[str, Any] = {option: {field: value}}
    with pytest.raises(UsageError, match=f"^--{option.replace('_', '-')}: {field} is .*; it must be "):
        AuditOptions(URL, **changed)


def test_fields_that_change_nothing_that_is_drawn_are_taken() -> None:
    body = {"top_k": -1, "top_p": 1.0, "logit_bias": {}, "rejection_sampling_strategy": "block"}
    assert AuditOptions(URL, body=body).body == body


async def test_the_budget_of_requests_holds() -> None:
    server = Changed()
    result = await audited(server, 100_000, budget_requests=70)
    assert len(server.bodies) == 70
    assert any(each.verdict is Verdict.SKIPPED for each in result.checks)


def _answering(
    *answers: httpx2.Response, models: int = 200
) -> tuple[httpx2.MockTransport, list[httpx2.Request]]:
    seen: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        if request.method == "GET":
            return httpx2.Response(models, json={"data": [{"id": "m"}]})
        found = answers[min(len(seen) - 2, len(answers) - 1)]
        return httpx2.Response(found.status_code, headers=found.headers, content=found.content)

    return httpx2.MockTransport(answer), seen


OF_ONE_TOKEN = {"choices": [{"text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}


def _connected(
    transport: httpx2.MockTransport, key: str | None = None, url: str = URL, model: str | None = None
) -> AbstractAsyncContextManager[Server]:
    budget = Budget(100, 1000)
    return connect(url, model, key, {}, budget=budget, concurrency=2, transport=transport)


async def _connect(transport: httpx2.MockTransport, key: str | None = None) -> str:
    async with _connected(transport, key) as server:
        return server.model


async def test_a_busy_server_is_asked_again_but_not_for_ever() -> None:
    busy = httpx2.Response(429, headers={"retry-after": "0"})
    transport, seen = _answering(busy, busy, httpx2.Response(200, json=OF_ONE_TOKEN))
    assert await _connect(transport) == "m"
    # Three attempts at the first set of fields; later sets are tried because no log probabilities came.
    assert len(seen) == 1 + 3 + 4
    transport, seen = _answering(busy)
    with pytest.raises(RefusedError, match="answered 429"):
        await _connect(transport)
    assert len(seen) == 1 + 3


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, InvalidRequestError),
        (401, RefusedError),
        (404, InvalidRequestError),
        (500, AnswerError),
        (502, UnreachableError),
    ],
)
async def test_what_a_server_refuses_is_one_sentence(status: int, error: type[Exception]) -> None:
    transport, seen = _answering(httpx2.Response(status, json={"error": {"message": "no"}}))
    with pytest.raises(error, match=rf"completions answered {status}: no"):
        await _connect(transport, key="secret")
    assert seen[-1].headers["authorization"] == "Bearer secret"


async def test_a_url_without_its_end_is_told_the_usual_one() -> None:
    transport, _ = _answering(httpx2.Response(404, json={}))
    with pytest.raises(InvalidRequestError, match="ends in /v1"):
        async with _connected(transport, url="http://server", model="m"):
            pass


async def test_an_answer_that_is_no_completion_is_a_protocol_error() -> None:
    transport, _ = _answering(httpx2.Response(200, json={"choices": [None]}))
    with pytest.raises(AnswerError, match="is not a completion"):
        await _connect(transport)
    transport, _ = _answering(
        *[httpx2.Response(200, json=OF_ONE_TOKEN)] * 5, httpx2.Response(200, text="data: {]\n\n")
    )
    async with _connected(transport) as server:
        with pytest.raises(AnswerError, match="is no JSON object"):
            await server.stream("a")


async def test_log_probabilities_in_the_form_of_chats_are_read() -> None:
    tops = [{"token": "x", "logprob": -0.1}, {"token": "y", "logprob": -2.4}]
    content = [{"token": "x", "logprob": -0.1, "top_logprobs": tops}]
    answer = {"choices": [{"text": "x", "logprobs": {"content": content}}], "usage": {"prompt_tokens": 2}}
    transport, _ = _answering(httpx2.Response(200, json=answer))
    async with _connected(transport, model="m") as server:
        (found,) = await server.complete("", max_tokens=1, temperature=1.0)
    assert found == Completion("x", None, ("x",), (-0.1,), ({"x": -0.1, "y": -2.4},), 2)
    assert server.listed == 20


def test_the_drawn_token_may_be_listed_beside_the_others() -> None:
    top = {"a": -0.7, "b": -1.5, "c": -3.0}
    completion = Completion("", None, ("c", "b", "a", "d"), (-3.0, -1.5, -0.7, -9.0), (top, top, top, top))
    assert Reader(2).steps(completion).chosen.tolist() == [2, 1, 0, 2]
    # Of equal candidates the drawn one must not be listed because it was drawn.
    level = {"c": -1.5, "a": -0.7, "b": -1.5}
    drawn = Completion("", None, ("c",), (-1.5,), (level,))
    assert Reader(2).steps(drawn).chosen.tolist() == [2]


def test_positions_whose_candidates_hide_each_other_are_left_out() -> None:
    tops = ({"a": -0.7}, {"a": -0.7, "\ufffd": -1.5}, {"a": 0.0}, {"a": -0.7, "b": -1.5})
    completion = Completion("", None, ("a",) * 4, tuple(top["a"] for top in tops), tops)
    assert Reader(2).steps(completion).is_usable.tolist() == [False, False, True, True]
    reader = Reader(2)
    reader.steps(Completion("", None, ("a",), (-0.1,), ({"a": -0.1, "b": -0.2},)))
    assert reader.sums_above_one == 1


def test_metrics_of_three_engines() -> None:
    vllm = speculation_counts(
        'vllm:spec_decode_num_drafts_total{model_name="m"} 4.0\n'
        "vllm:spec_decode_num_draft_tokens_total 16.0\nvllm:spec_decode_num_accepted_tokens_total 8.0\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3.0\n'
    )
    assert vllm is not None
    assert (vllm.tokens_per_pass, vllm.per_position) == (3.0, (3.0, 2.0))
    tandem = speculation_counts(
        'tandem_spec_decode_num_drafts_total{rule="strict"} 4.0\n'
        'tandem_spec_decode_num_drafts_total{rule="greedy"} 2.0\n'
    )
    assert tandem is not None
    assert (tandem.drafts, tandem.rules) == (6.0, {"strict": 4.0, "greedy": 2.0})
    assert tandem.since(tandem).rules == {}
    sglang = speculation_counts("sglang:spec_accept_length 2.5\n")
    assert sglang is not None
    assert sglang.tokens_per_pass == 2.5
    assert speculation_counts("up 1\n") is None


def test_variation_is_over_what_both_list() -> None:
    assert variation({"a": 0.0}, {"a": -float("inf"), "b": 0.0}) == 0.5
    assert variation({"a": -1.0, "b": -2.0}, {"a": -1.0}) == 0.0


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command without a key in the environment."""
    monkeypatch.delenv("TANDEM_AUDIT_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(*arguments: str) -> Ran:
        code = main(arguments)
        return Ran(code, *capsys.readouterr())

    return run


def test_the_command_says_what_it_found(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    seen: list[AuditOptions] = []

    async def found(options: AuditOptions, report: object) -> Audit:
        seen.append(options)
        sums = {"typical-acceptance": 3.0} if options.body else {}
        counts = speculation_counts(
            "".join(f'x_spec_decode_num_drafts_total{{rule="{each}"}} 3\n' for each in sums)
        )
        return Audit(options.url, "m", "now", is_miscalibrated=bool(options.body), speculation=counts)

    monkeypatch.setattr(command, "run_audit", found)
    monkeypatch.setenv("TANDEM_AUDIT_KEY", "secret")
    page = tmp_path / "audit.html"
    ran = run(URL, "--html", str(page), "--body", '{"x": 1}', "--quiet")
    assert ran.code == 1
    assert "- the acceptance rule typical-acceptance is lossy by design\n" in ran.out
    assert page.read_text().startswith("<!doctype html>")
    assert seen[0].key == "secret"
    assert "secret" not in ran.out + ran.err + page.read_text() + repr(seen[0])
    ran = run(URL, "--json", "--quiet")
    assert (ran.code, json.loads(ran.out)["findings"]) == (0, [])


async def test_a_person_is_shown_a_table_of_each_kind() -> None:
    lines = format_audit(await audited(Changed(), 6_000, Changed())).splitlines()
    heads = [line.split("  ")[0] for line in lines if line.split("  ")[0].isupper()]
    assert heads == ["CHECK", "TEST", "AGAINST THE REFERENCE"]
    assert all(line == line.rstrip() for line in lines)
    assert any(line.startswith(f"{URL}: lossless, as far as ") for line in lines)


@pytest.mark.parametrize(
    ("code", "arguments", "sentence"),
    [
        (2, (), "URL is missing"),
        (2, (URL, "--body", "3"), "--body is '3'; it must be a JSON object"),
        (2, (URL, "--body", '{"top_k": 50}'), "top_k is 50; it must be 0 or -1"),
        (2, (URL, "--reference-body", "{"), "which is no JSON"),
        (2, (URL, "--minuts", "3"), "--minutes"),
        (2, (URL, "--concurrency", "0"), "--concurrency"),
        (2, (URL, "more"), "more"),
        (4, ("http://127.0.0.1:1/v1", "-q"), "cannot be reached"),
    ],
)
def test_wrong_calls_are_one_sentence(run: Run, code: int, arguments: tuple[str, ...], sentence: str) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (code, "")
    (line,) = ran.err.splitlines()
    assert line.startswith("error: ")
    assert sentence in line


def test_the_help_and_the_version_are_shown(run: Run) -> None:
    ran = run("--help")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("Usage: tandem-audit")
    assert "--budget-tokens" in ran.out
    assert run("--version").out.startswith("tandem-audit ")


def test_progress_is_a_bar_in_a_terminal_and_a_line_now_and_then_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = io.StringIO()
    with show_progress(log) as report:
        report("reading", 0.1)
        monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
        report("sampling", 0.4)
    assert re.fullmatch(r"tandem-audit: sampling, 40% done after \d+ s\n", log.getvalue())
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    with show_progress(terminal) as report:
        report("sampling [1] tokens", 0.5)
    assert "tandem-audit" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K"), "the line is erased"


def test_nothing_of_an_engine_is_imported() -> None:
    """In a process of its own: `tandem-audit --help` works where there is no torch."""
    source = (
        "import sys; from tandem_audit.command import main; code = main(['--help']); "
        "heavy = {'grpc', 'torch', 'transformers', 'tandem', 'tandem_coordinator'} & sys.modules.keys(); "
        "sys.exit(str(heavy) if heavy else code)"
    )
    folder = str(Path(command.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False, cwd=folder
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("Usage: ")


@dataclass(slots=True)
class _Served:
    language: Language
    fault: str
    generator: np.random.Generator
    rounds: int = 0
    accepted: int = 0
    waiting: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)
    """Contexts of completions that are to be drawn, by length, temperature and top_p."""
    drawing: dict[tuple[Any, ...], asyncio.Task[tuple[Any, Any]]] = field(default_factory=dict)

    async def drawn(self, contexts: list[int], *kind: Any) -> tuple[Any, Any]:
        """Completions of a kind; those of requests that come together are drawn together, which takes far less."""
        waiting = self.waiting.setdefault(kind, [])
        own = slice(len(waiting), len(waiting) + len(contexts))
        waiting += contexts
        if own.start == 0:
            self.drawing[kind] = asyncio.create_task(self._draw(*kind))
        tokens, flags = await self.drawing[kind]
        return tokens[own], flags[own]

    async def _draw(self, length: int, *how: float) -> tuple[Any, Any]:
        await asyncio.sleep(0.001)
        contexts = np.array(self.waiting.pop((length, *how)))
        return sampler_of(self.language, self.fault, *how).generate(contexts, length, self.generator)

    async def choices(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The choices of an answer."""
        context = self.context(body["prompt"])
        length = body.get("max_tokens", 16)
        count = body.get("n", 1)
        temperature = float(body.get("temperature", 1.0))
        top_p = float(body.get("top_p", 1.0))
        if temperature == 0:
            one = list(self._greedy(context, length))
            made = [one] * count
            accepted = [[0] * length] * count
        else:
            if (seed := body.get("seed")) is None:
                tokens, flags = await self.drawn([context] * count, length, temperature, top_p)
            else:
                sampler = sampler_of(self.language, self.fault, temperature, top_p)
                generator = np.random.default_rng(seed)
                tokens, flags = sampler.generate(np.full(count, context), length, generator)
            self.accepted += int(flags.sum())
            self.rounds += int(flags.size - flags.sum())
            made = tokens.tolist()
            accepted = flags.tolist()
        for index, whole in enumerate(made):
            stops = [place for stop in body.get("stop") or () if (place := text(whole).find(stop)) >= 0]
            kept = whole[: min(stops, default=length)]
            choice = {"index": index, "text": text(kept), "finish_reason": "stop" if stops else "length"}
            if body.get("return_token_ids"):
                choice["token_ids"] = ids_of(text(kept))
            if body.get("logprobs"):
                choice["logprobs"] = self.logprobs(context, kept, accepted[index], body["logprobs"])
            yield choice

    def _greedy(self, context: int, length: int) -> Iterator[int]:
        for _ in range(length):
            token = int(self.language.target[context].argmax())
            context = self.language.after(context, token)
            yield token

    def context(self, prompt: str | list[int]) -> int:
        first, second = (each % self.language.size for each in ids_of(prompt)[-2:])
        return first * self.language.size + second

    def logprobs(self, context: int, tokens: list[int], accepted: list[int], count: int) -> dict[str, Any]:
        logprobs = []
        tops = []
        for token, is_accepted in zip(tokens, accepted, strict=False):
            is_wrong = self.fault == "log probabilities of the draft" and is_accepted
            logprobs.append(reported(self.language, is_wrong)[context][token])
            tops.append(most_probable(self.language, is_wrong, context, count))
            context = self.language.after(context, token)
        return {
            "tokens": [text([token]) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": tops,
        }


@cache
def reported(language: Language, is_drafts: bool) -> list[list[float]]:
    """Log probabilities by context."""
    rows: list[list[float]] = np.log(language.draft if is_drafts else language.target).tolist()
    return rows


@cache
def most_probable(language: Language, is_drafts: bool, context: int, count: int) -> dict[str, float]:
    """The log probabilities of so many tokens, from the most probable one on."""
    row = reported(language, is_drafts)[context]
    return {
        text([token]): row[token] for token in sorted(range(len(row)), key=row.__getitem__)[: -count - 1 : -1]
    }


def text(tokens: list[int]) -> str:
    """The text of tokens."""
    # One character each, of a range that is long enough, and whose first code point is a multiple of 64
    return "".join(chr(0x4E00 + token) for token in tokens)


def ids_of(prompt: str | list[int]) -> list[int]:
    """The ids of a prompt: its code points."""
    return [ord(character) for character in prompt] if isinstance(prompt, str) else prompt


def application(language: Language, fault: str = RIGHT) -> Starlette:
    """Serve a sampler as OpenAI's API, with vLLM's and Tandem's metrics of speculation."""
    served = _Served(language, fault, np.random.default_rng(0))

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "synthetic"}]})

    async def completions(request: Request) -> Response:
        body = await request.json()
        if body.get("return_tokens_as_token_ids"):
            return JSONResponse({"error": {"message": "return_tokens_as_token_ids is unknown"}}, 400)
        choices = [each async for each in served.choices(body)]
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": body.get("max_tokens", 16) * len(choices),
        }
        if body.get("stream"):
            return StreamingResponse(_events(choices), media_type="text/event-stream")
        return JSONResponse({"choices": choices, "usage": usage})

    async def tokenize(request: Request) -> Response:
        return JSONResponse({"tokens": ids_of((await request.json())["prompt"])})

    async def metrics(_: Request) -> Response:
        rule = "typical-acceptance" if fault == "typical-acceptance" else "residual"
        lines = [
            f'vllm:spec_decode_num_drafts_total{{model_name="synthetic",rule="{rule}"}} {served.rounds}.0',
            f"vllm:spec_decode_num_draft_tokens_total {served.rounds * PROPOSED}.0",
            f"vllm:spec_decode_num_accepted_tokens_total {served.accepted}.0",
            *(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {served.accepted / PROPOSED}'
                for i in range(PROPOSED)
            ),
        ]
        return PlainTextResponse("\n".join(lines))

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/metrics", metrics),
            Route("/tokenize", tokenize, methods=["POST"]),
        ]
    )


def _events(choices: list[dict[str, Any]]) -> Iterator[str]:
    for choice in choices:
        for character in choice["text"]:
            yield f"data: {json.dumps({'choices': [{'index': choice['index'], 'text': character}]})}\n\n"
    yield "data: [DONE]\n\n"
