"""An asynchronous client of OpenAI's completions that stays within a budget and never prints its key."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tandem_audit.errors import (
    AnswerError,
    AuditError,
    BudgetError,
    InvalidRequestError,
    RefusedError,
    UnreachableError,
)

LISTED = 20
"""Candidates with log probabilities that are asked for; 5, OpenAI's own limit, where a server refuses so many."""
_NEUTRAL: Mapping[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Named although they are defaults: a server may take others from a model's generation_config.json."""
_OPTIONAL: Sequence[Mapping[str, Any]] = (
    {"logprobs": LISTED, "ignore_eos": True, "return_tokens_as_token_ids": True, **_NEUTRAL},
    {"logprobs": LISTED, "ignore_eos": True, **_NEUTRAL},
    {"logprobs": LISTED, "top_p": 1.0},
    {"logprobs": 5, "top_p": 1.0},
    {"top_p": 1.0},
)
"""Fields of a request, the most wanted first: the first set that a server accepts is used."""
_IDS = re.compile(r"token_id:\d+")


@dataclass(slots=True)
class Budget:
    """How much an audit may ask of its servers."""

    requests: int
    tokens: int
    """Tokens generated."""
    sent: int = 0
    generated: int = 0

    @property
    def used_share(self) -> float:
        """The share of it that is used."""
        return max(self.sent / self.requests, self.generated / self.tokens)

    @property
    def is_spent(self) -> bool:
        return self.sent >= self.requests or self.generated >= self.tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice of an answer. The lists are empty where the server reports no log probabilities."""

    text: str
    finish_reason: str | None
    tokens: tuple[str, ...] = ()
    """Each token's text, or token_id:N where the server can name ids."""
    logprobs: tuple[float, ...] = ()
    tops: tuple[dict[str, float], ...] = ()
    """The most probable tokens at each position, natural logarithms."""
    prompt_tokens: int | None = None
    token_ids: tuple[int, ...] = ()
    """Where `return_token_ids` asked for them and the server knows the field."""

    @property
    def has_ids(self) -> bool:
        """True if tokens are named by id, so that two with the same text are told apart."""
        return bool(self.tokens) and bool(_IDS.fullmatch(self.tokens[0]))

    @property
    def pieces(self) -> tuple[str, ...]:
        """The units by which two completions are compared: tokens, or else characters."""
        return self.tokens or tuple(self.text)


@dataclass(slots=True)
class Server:
    """An OpenAI-compatible server."""

    http: httpx2.AsyncClient
    url: str
    """Ends in /v1 or what stands in its place, without a slash."""
    model: str
    budget: Budget
    concurrency: int
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request."""
    optional: Mapping[str, Any] = field(default_factory=dict)
    """Those of `_OPTIONAL` that it accepts."""
    slowest_seconds: float = field(default=0.0, init=False)
    """The longest that it took over an answer."""
    _places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.concurrency)

    @property
    def listed(self) -> int:
        """Candidates with log probabilities at each position; 0: it reports none."""
        return int(self.optional.get("logprobs", 0))

    @property
    def _root(self) -> str:
        return self.url.rpartition("/")[0]

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int, temperature: float, **fields: Any
    ) -> list[Completion]:
        """Complete a prompt once, or `n` times, within the budget. Of more fields, None leaves out one that is sent
        otherwise."""
        body = self._request(prompt, max_tokens, temperature, fields)
        answer = (await self._post("/completions", body)).json()
        try:
            usage = answer.get("usage") or {}
            found = [_completion(choice, usage) for choice in answer["choices"]]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise AnswerError(f"{self.url}: an answer is not a completion: {error!r}") from None
        self.budget.generated += max(
            sum(len(each.tokens) for each in found), int(usage.get("completion_tokens") or 0)
        )
        return found

    async def complete_one(
        self, prompt: str | Sequence[int], *, max_tokens: int = 32, temperature: float = 0.0, **fields: Any
    ) -> Completion:
        """One completion, greedy by default. Errors are those of `complete`."""
        return (await self.complete(prompt, max_tokens=max_tokens, temperature=temperature, **fields))[0]

    async def stream(self, prompt: str, *, max_tokens: int = 32, **fields: Any) -> str:
        """The text of a greedy completion that is streamed. Errors are those of `complete`."""
        body = self._request(prompt, max_tokens, 0.0, fields) | {"stream": True}
        answer = await self._post("/completions", body)
        parts = []
        for line in answer.text.splitlines():
            parts += [choice.get("text") or "" for choice in event_of(line).get("choices") or ()]
        self.budget.generated += max_tokens
        return "".join(parts)

    async def tokenize(self, text: str) -> list[int] | None:
        """A prompt's ids, from the path that vLLM and Tandem have for it; None: there is none."""
        try:
            answer = await self.http.post(
                self._root + "/tokenize", json={"model": self.model, "prompt": text}
            )
            return [int(each) for each in answer.json()["tokens"]] if answer.status_code == 200 else None
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):
            return None

    async def speculation(self) -> SpeculationCounts | None:
        """Counts of speculation in the server's /metrics since it started; None: there are none."""
        try:
            answer = await self.http.get(self._root + "/metrics")
            return speculation_counts(answer.text) if answer.status_code == 200 else None
        except (httpx2.HTTPError, ValueError):
            return None

    def _request(
        self, prompt: str | Sequence[int], max_tokens: int, temperature: float, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        named = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
        body = named | dict(self.optional) | dict(self.body) | dict(fields)
        return {name: value for name, value in body.items() if value is not None}

    async def _post(self, path: str, body: Mapping[str, Any]) -> httpx2.Response:
        url = self.url + path
        attempt = 0
        while True:
            attempt += 1
            if self.budget.is_spent:
                raise BudgetError("the budget of requests or tokens is spent")
            self.budget.sent += 1
            async with self._places:
                began = time.monotonic()
                with errors_of(url, self.http.timeout.read):
                    answer = await self.http.post(url, json=body)
                self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began)
            if answer.status_code not in (429, 503) or attempt == 3:
                raise_for(answer, url)
                return answer
            await asyncio.sleep(_retry_seconds(answer, attempt))


@asynccontextmanager
async def connect(
    url: str,
    model: str | None,
    key: str | None,
    body: Mapping[str, Any],
    *,
    budget: Budget,
    concurrency: int,
    transport: httpx2.AsyncBaseTransport | None = None,
) -> AsyncIterator[Server]:
    """Connect, find the model's name, and find out which optional fields the server accepts. The transport is for
    tests."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx2.AsyncClient(headers=headers, timeout=120.0, transport=transport) as http:
        base = url.rstrip("/")
        model = model or await first_model(http, base)
        server = Server(http, base, model, budget, concurrency, body)
        for optional in _OPTIONAL:
            server.optional = optional
            try:
                found = await server.complete_one("1 + 1 =", max_tokens=1, temperature=1.0)
            except InvalidRequestError:
                if optional is _OPTIONAL[-1]:
                    raise
                continue
            if optional.get("logprobs") and not found.tops:
                continue
            break
        yield server


async def first_model(http: httpx2.AsyncClient, base: str) -> str:
    """Name of the first model that the server at http://HOST:PORT/v1 lists."""
    url = base + "/models"
    with errors_of(url, http.timeout.read):
        answer = await http.get(url)
    raise_for(answer, url)
    try:
        listed = [str(each["id"]) for each in answer.json()["data"]]
    except (KeyError, TypeError, ValueError):
        raise AnswerError(f"{url}: the answer is no list of models") from None
    if not listed:
        raise InvalidRequestError(f"{base} lists no model; name one with --model")
    return listed[0]


@contextmanager
def asked_alike(server: Server, reference: Server) -> Iterator[None]:
    """Meanwhile both are sent the fields that both accept, so that they name tokens alike."""
    own = server.optional
    server.optional = reference.optional = max(server.optional, reference.optional, key=_OPTIONAL.index)
    try:
        yield
    finally:
        server.optional = own


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Counters of vLLM's and Tandem's metrics."""

    drafts: float = 0.0
    """Passes of the target that verified a proposal."""
    drafted: float = 0.0
    accepted: float = 0.0
    per_position: tuple[float, ...] = ()
    """Tokens accepted at each position of the proposals."""
    rules: Mapping[str, float] = field(default_factory=dict)
    """Passes with a proposal under each acceptance rule, where the server names them."""
    acceptance_length: float | None = None
    """SGLang's gauge: tokens for each pass."""

    def since(self, before: SpeculationCounts) -> SpeculationCounts:
        earlier = [*before.per_position, *[0.0] * len(self.per_position)]
        return SpeculationCounts(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.per_position, earlier, strict=False)),
            {
                rule: count - before.rules.get(rule, 0.0)
                for rule, count in self.rules.items()
                if count > before.rules.get(rule, 0.0)
            },
            self.acceptance_length,
        )

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens that a pass with a proposal yields."""
        return 1 + self.accepted / self.drafts if self.drafts else self.acceptance_length


def speculation_counts(metrics: str) -> SpeculationCounts | None:
    """Read Prometheus's text form; None where it counts no speculation. Raises ValueError for another form."""
    totals: defaultdict[str, float] = defaultdict(float)
    positions: defaultdict[int, float] = defaultdict(float)
    rules: defaultdict[str, float] = defaultdict(float)
    length: float | None = None
    for sample in chain.from_iterable(each.samples for each in text_string_to_metric_families(metrics)):
        _, _, counter = sample.name.partition("spec_decode_num_")
        if counter == "accepted_tokens_per_pos_total" and sample.labels.get("position", "").isdigit():
            positions[int(sample.labels["position"])] += sample.value
        elif counter:
            totals[counter.removesuffix("_total")] += sample.value
            if "rule" in sample.labels and counter == "drafts_total":
                rules[sample.labels["rule"]] += sample.value
        elif sample.name == "sglang:spec_accept_length":
            length = sample.value
    if not totals and length is None:
        return None
    per_position = tuple(
        positions[i] for i in range(min(positions, default=0), max(positions, default=-1) + 1)
    )
    return SpeculationCounts(
        totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], per_position, dict(rules), length
    )


def event_of(line: str) -> dict[str, Any]:
    """The JSON object of a line of server-sent events (WHATWG HTML, 9.2), as OpenAI's API has them; empty for a line
    without one."""
    if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
        return {}
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise AnswerError(f"an event of a completion is no JSON object: {data[:300]!r}")
    return event


def _completion(choice: Mapping[str, Any], usage: Mapping[str, Any]) -> Completion:
    reported = choice.get("logprobs") or {}
    if "content" in reported:
        # Some servers report completions as OpenAI's chats are: a list of objects.
        content = reported["content"] or ()
        reported = {
            "tokens": [each["token"] for each in content],
            "token_logprobs": [each["logprob"] for each in content],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in each.get("top_logprobs") or ()} for each in content
            ],
        }
    # A logarithm of 0, as vLLM writes it
    return Completion(
        text=str(choice.get("text") or ""),
        finish_reason=choice.get("finish_reason"),
        tokens=tuple(reported.get("tokens") or ()),
        logprobs=tuple(
            -9999.0 if each is None else float(each) for each in reported.get("token_logprobs") or ()
        ),
        tops=tuple({} if each is None else dict(each) for each in reported.get("top_logprobs") or ()),
        prompt_tokens=usage.get("prompt_tokens"),
        token_ids=tuple(choice.get("token_ids") or ()),
    )


@contextmanager
def errors_of(url: str, timeout_seconds: float | None = None) -> Iterator[None]:
    """Say in one sentence why a server cannot be reached."""
    try:
        yield
    except httpx2.ReadTimeout:
        raise AnswerError(f"{url}: no answer within {timeout_seconds} s") from None
    except httpx2.RemoteProtocolError as error:
        raise AnswerError(f"{url} does not speak HTTP/1.1, or closed the connection: {error}") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise UnreachableError(f"{url} cannot be reached: {str(error) or type(error).__name__}") from None


def _retry_seconds(answer: httpx2.Response, attempt: int) -> float:
    try:
        wanted = float(answer.headers.get("retry-after", ""))
    except ValueError:
        wanted = 2.0**attempt
    return min(max(wanted, 0.0), 10.0)


_KINDS: Mapping[int, type[AuditError]] = {
    401: RefusedError,
    403: RefusedError,
    408: AnswerError,
    429: RefusedError,
    502: UnreachableError,
    503: UnreachableError,
    504: AnswerError,
}


def raise_for(answer: httpx2.Response, url: str) -> None:
    """For any answer but a 200, raise the error of the status's kind, with the server's own words."""
    status = answer.status_code
    if status == 200:
        return
    kind = _KINDS.get(status, AnswerError if status >= 500 else InvalidRequestError)
    is_lost = status == 404 and "/v1/" not in url
    hint = " (OpenAI's API is usually at a URL that ends in /v1)" if is_lost else ""
    try:
        words = words_of(answer.json())
    except ValueError:
        words = answer.text
    told = f": {' '.join(words.split())[:300]}" if words else ""
    raise kind(f"{url} answered {status}{hint}{told}")


def words_of(answer: Any) -> str:
    """The message of an error in OpenAI's form, vLLM's older one, or any other."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
