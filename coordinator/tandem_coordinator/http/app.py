"""The endpoints and their description, the page, the checks that every request passes first, and the completions that a
body asks for."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from tandem import __version__
from tandem.config.rule import broken, refuse
from tandem.errors import InvalidRequestError, ServiceUnavailableError
from tandem.model.admin import Status
from tandem.model.types import GenerationRequest, TruncationSide
from tandem.rpc.addresses import is_loopback
from tandem.serving import protection
from tandem.serving.interceptors import RunningCalls
from tandem_coordinator.admin.plain import plain
from tandem_coordinator.http import schema
from tandem_coordinator.http.answers import Answer, Asked, ChatAnswer, CompletionAnswer, Reply, merged
from tandem_coordinator.http.bodies import BodyReader, BodyT, HeldBytes
from tandem_coordinator.http.chat import Chats
from tandem_coordinator.http.errors import HttpError, error_response
from tandem_coordinator.http.headers import ALONE_HEADER, REQUEST_ID_HEADER, fit, header_value, ignored_header
from tandem_coordinator.http.messages import CountTokensBody, MessagesAnswer, MessagesBody
from tandem_coordinator.http.reading import AnswerForms
from tandem_coordinator.http.responses import ResponseAnswer, ResponsesBody
from tandem_coordinator.requests.admission import peer_of_host
from tandem_coordinator.requests.plan import Models, keep_out, truncate
from tandem_coordinator.requests.runner import RequestRunner
from tandem_coordinator.requests.validation import REQUEST_RULES, TokenizedRequest, outside_vocabulary
from tandem_coordinator.settings.coordinator import CoordinatorSettings, RequestBounds
from tandem_coordinator.settings.sampling import as_sampling
from tandem_coordinator.telemetry.observer import CHAT, TEXT_COMPLETION, Choices

ENDPOINTS: tuple[tuple[str, str, str, str, type[schema.Body] | None], ...] = (
    ("POST", "/v1/completions", "complete", "Complete a prompt, or several", schema.CompletionBody),
    ("POST", "/v1/chat/completions", "complete", "Answer a chat", schema.ChatBody),
    ("POST", "/v1/responses", "complete", "OpenAI's Responses API", ResponsesBody),
    ("POST", "/v1/messages", "complete", "Anthropic's Messages API", MessagesBody),
    (
        "POST",
        "/v1/messages/count_tokens",
        "count_tokens",
        "How many tokens such a prompt has",
        CountTokensBody,
    ),
    ("POST", "/tokenize", "tokenize", "The token ids of a prompt or a chat", schema.TokenizeBody),
    ("POST", "/detokenize", "detokenize", "The text of token ids", schema.DetokenizeBody),
    ("GET", "/tokenizer_info", "tokenizer_info", "The tokenizer's configuration", None),
    ("GET", "/v1/models", "models", "The model that is served", None),
    ("GET", "/health", "health", "200, or 503 while it starts or drains; needs no token", None),
    ("GET", "/ping", "health", "The same under the name that SageMaker asks for", None),
    ("GET", "/load", "load", "How many requests run and wait", None),
    ("GET", "/version", "version", "The version", None),
    ("GET", "/metrics", "metrics_text", "All metrics in Prometheus's text form", None),
    ("GET", "/tandem/status", "page_status", "Replicas, load, statistics", None),
)
"""Method, path, the `App`'s method that answers, summary, and the class of the body."""

_BODIES: Mapping[str, type[schema.CompletionBody | schema.ChatBody | ResponsesBody | MessagesBody]] = {
    "/v1/completions": schema.CompletionBody,
    "/v1/chat/completions": schema.ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
}
"""Bodies that ask for completions, by their paths."""
_PAGE = Path(__file__).with_name("page")
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE_FILES = {
    "/": _PAGE / "index.html",
    **{
        f"/{file.relative_to(_PAGE).as_posix()}": file
        for kind in ("css", "js", "svg")
        for file in _PAGE.rglob(f"*.{kind}")
    },
}
"""The page's files by their paths; those in `vendor` are libraries of others."""
_PAGE_HEADERS = {
    # The pages load nothing from elsewhere, and nothing that they show can run as a script.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

# A load balancer has no token, and the page asks for one.
HEALTH_PATHS = frozenset({"/health", "/ping"})
_OPEN_PATHS = frozenset({*HEALTH_PATHS, "/openapi.json", "/docs", *_PAGE_FILES})

# RFC 9110 7.2: a name or an address, and perhaps a port. A URL's parser would also take user@name and name#fragment.
_HOST = re.compile(r"(?:(?P<name>[A-Za-z0-9.-]+)|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])(?::[0-9]*)?")


@dataclass(eq=False)
class App:
    """The whole of the HTTP side, as an ASGI application."""

    _settings: CoordinatorSettings
    _completions: RequestRunner
    _chats: Chats
    _status: Callable[[], Awaitable[Status]]
    _metrics: Callable[[], Awaitable[bytes | None]]
    """Returns Prometheus's text form; None when none are collected."""
    _calls: RunningCalls

    def __post_init__(self) -> None:
        settings = self._settings
        self._known_tokens = protection.token_source(settings, settings.http_host)
        self._local_only = is_loopback(settings.http_host) and not settings.knows_callers
        self._files = {path: file.read_bytes() for path, file in _PAGE_FILES.items()}
        self._reader = BodyReader(settings)
        self._held = HeldBytes(
            settings.http_max_held_answer_bytes,
            "large answers that are not streamed hold {max_bytes} bytes, which is the maximum; set stream, ask for "
            "fewer completions, tokens or logprobs, or try again",
        )
        self._created = int(time.time())
        self._router = Router(
            [
                Route("/ping", self.health, methods=["GET", "POST"]),
                *(Route(path, getattr(self, name), methods=[method]) for method, path, name, *_ in ENDPOINTS),
                Route("/v1/models/{name:path}", self.models),
                Route("/openapi.json", self.openapi),
                Route("/docs", self.docs),
                *(Route(path, self.page_file) for path in _PAGE_FILES),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Any error is answered in the form of the path's API."""
        has_begun = False
        path = scope["path"]
        named = header_value(dict(scope["headers"]).get(REQUEST_ID_HEADER, b"")[:256])
        request_id = named or uuid.uuid4().hex.encode()
        # The rules of requests have one name for each of these, clients several
        names = {"max_tokens": "max_tokens", "prompt": "prompt", "logprobs": "logprobs"}
        state = {"client_request_id": named.decode("latin-1"), "names": names}

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (REQUEST_ID_HEADER, request_id)]
            await send(message)

        try:
            self._admit(scope)
            # With an app in its scope the router raises errors that it would otherwise answer as plain text.
            await self._router({**scope, "app": self, "state": state}, receive, noted)
        except asyncio.CancelledError:
            # The server closes. Such a request waits for its body or for a turn, and no drain counts it.
            if not has_begun:
                error = ServiceUnavailableError("the coordinator is shutting down; send the request again")
                await error_response(error, path)(scope, receive, noted)
        except HTTPException as error:
            refusal = HttpError(error.status_code, f"there is nothing at {path}", "not_found")
            if error.status_code == 405:
                allowed = (error.headers or {}).get("Allow", "")
                sentence = f"method is {scope['method']}; {path} takes {allowed}"
                refusal = HttpError(405, sentence, headers=error.headers)
            await error_response(refusal, path)(scope, receive, noted)
        except InvalidRequestError as error:
            sentence = re.sub(r"\bmax_tokens\b", names["max_tokens"], str(error))
            sentence = re.sub(r"\blogprobs(?= is -?\d)", names["logprobs"], sentence)
            await error_response(type(error)(sentence), path, names)(scope, receive, noted)
        except Exception as error:  # noqa: BLE001 - an unexpected error is logged, and answered with an id
            await error_response(error, path)(scope, receive, noted)

    def _admit(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # RFC 9112 6.1: a proxy may have seen another end of such a request, and the rest of the
            # connection may be part of it.
            raise HttpError(
                400,
                "content-length and transfer-encoding are both set; a request must have one of them",
                headers={"Connection": "close"},
            )
        if self._local_only:
            # A web page whose own name points to this machine (DNS rebinding) is refused.
            host = headers.get(b"host", b"").decode("latin-1")
            spelled = _HOST.fullmatch(host)
            if spelled is None or not is_loopback(spelled["name"] or spelled["ipv6"]):
                named = f"host is {host or 'not set'}"
                served = "it must be this machine, which alone is served: localhost or 127.0.0.1"
                raise HttpError(403, f"{named}; {served}")
        if scope["path"] in _OPEN_PATHS:
            return
        protection.authorize(
            protection.Scope.CLIENT, _authorization(Headers(scope=scope)), self._known_tokens()
        )
        if self._calls.closed_because:
            raise ServiceUnavailableError(self._calls.closed_because)

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`, `/v1/chat/completions`, `/v1/responses` and `/v1/messages`."""
        given, headers = await self._body(request, _BODIES[request.url.path])
        models = self._completions.models
        bounds = self._completions.bounds
        if isinstance(given, schema.ChatDialect):
            body: schema.Sampled = self._chat_of(given, request)
        else:
            body = given
            if isinstance(body, schema.ChatBody):
                request.state.names |= {"prompt": "messages", "logprobs": "top_logprobs"}
            if body.max_completion_tokens is not None:
                request.state.names["max_tokens"] = "max_completion_tokens"
        peer = _peer_of(request)
        traceparent = request.headers.get("traceparent", "")
        with self._completions.preparation(peer, traceparent):
            requests = await requests_of(body, models, self._chats, bounds)
        # A client may use a name twice, so it is only a part of ours.
        named = request.state.client_request_id or body.request_id
        request_id = f"{fit(named)}-{uuid.uuid4().hex[:8]}" if named else uuid.uuid4().hex
        usage = body.stream_options
        is_continuous = usage is not None and usage.is_continuous
        prompts: list[tuple[int, ...]] | None = None
        if isinstance(body, schema.ChatBody) or is_continuous or body.return_token_ids:
            prompts = [
                truncate(await ids_of(each.prompt, models, bounds), each, models.target) for each in requests
            ]
            requests = [replace(each, prompt=prompt) for each, prompt in zip(requests, prompts, strict=True)]
        asked = Asked(request_id, self.model_name, models.tokenizer, body, prompts)
        answer = self._answer(given, asked, len(requests))
        if isinstance(body, schema.ChatBody):
            forms = AnswerForms.of(body, requests[0].grammar, self._chats)
            if not forms.is_empty:
                prompt = await ids_of(requests[0].prompt, models, bounds)
                answer.read_with(forms.readers(body, prompt, models.tokenizer))
        token = protection.caller_token(_authorization(request.headers), self._known_tokens())
        # The first completion has the request's own name in logs and lists.
        names = [request_id, *(f"{request_id}-{index}" for index in range(1, len(requests)))]
        chunks = merged(
            [
                self._completions.complete(
                    each, body.timeout_seconds, name, traceparent, peer, token, choices
                )
                for each, name, choices in zip(requests, names, _choices_of(body), strict=True)
            ]
        )
        if kept_out_by := keep_out(requests[0], bounds, models):
            headers |= {ALONE_HEADER: ", ".join(kept_out_by)}
        return Reply(answer, chunks, self._calls, self._held, headers, streams=bool(body.stream))

    def _chat_of(self, body: schema.ChatDialect, request: Request) -> schema.ChatBody:
        """The chat that a body asks for in other words than a chat's."""
        request.state.names |= {
            "max_tokens": body.limit_name,
            "prompt": body.prompt_name,
            "logprobs": "top_logprobs",
        }
        refuse(body.refusals())
        return body.chat()

    def _answer(self, given: schema.AboutCaller, asked: Asked, count: int) -> Answer:
        match given:
            case ResponsesBody():
                defaults = as_sampling(self._completions.models.sampling_defaults)
                return ResponseAnswer(given, defaults, asked)
            case MessagesBody():
                return MessagesAnswer(asked)
            case schema.ChatBody():
                return ChatAnswer(asked, count)
        return CompletionAnswer(asked, count)

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`."""
        body, headers = await self._body(request, CountTokensBody)
        chat = self._chat_of(body, request)
        refuse(chat.refusals())
        models = self._completions.models
        bounds = self._completions.bounds
        with self._completions.preparation(_peer_of(request), request.headers.get("traceparent", "")):
            token_ids = await chat_prompt(chat, models, self._chats, bounds)
        return JSONResponse({"input_tokens": len(token_ids)}, headers=headers)

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        body, headers = await self._body(request, schema.TokenizeBody)
        refuse(body.refusals())
        models = self._completions.models
        bounds = self._completions.bounds
        if body.prompt is None:
            request.state.names["prompt"] = "messages"
            with self._completions.preparation(_peer_of(request), request.headers.get("traceparent", "")):
                token_ids = await chat_prompt(body, models, self._chats, bounds)
        else:
            token_ids = await models.encode(body.prompt, bounds, add_special_tokens=body.add_special_tokens)
        answer = {
            "count": len(token_ids),
            "max_model_len": models.target.max_length,
            "tokens": token_ids,
            "token_strs": [*map(models.tokenizer.id_to_token, token_ids)] if body.return_token_strs else None,
        }
        return JSONResponse(answer, headers=headers)

    async def tokenizer_info(self, request: Request) -> Response:
        """`GET /tokenizer_info`, as in vLLM."""
        return JSONResponse(self._chats.tokenizer_info)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        body, headers = await self._body(request, schema.DetokenizeBody)
        models = self._completions.models
        refuse(outside_vocabulary("tokens holds", body.tokens, models.target))
        # Tens of thousands of ids take long enough for others to notice.
        text = await asyncio.to_thread(models.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text}, headers=headers)

    async def _body(self, request: Request, model: type[BodyT]) -> tuple[BodyT, dict[str, str]]:
        """The body, and the header that names what is ignored of it."""
        body, unknown = await self._reader.read(request, model, self._completions)
        self._check_model(body.model)
        return body, ignored_header(*unknown, *body.passed_over)

    @property
    def model_name(self) -> str:
        """The name that answers have."""
        return self._model_names[0]

    @property
    def _model_names(self) -> list[str]:
        """The names that the model is served under."""
        return self._settings.served_names(self._completions.models.target.name)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", *self._model_names):
            known = " or ".join(map(repr, self._model_names))
            sentence = f"model is {name!r}; it must be {known}, which is served here"
            raise HttpError(404, sentence, "model_not_found")

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`, and `/v1/models/NAME`."""
        asked: str | None = request.path_params.get("name")
        self._check_model(asked)
        model: dict[str, Any] = {
            "object": "model",
            "created": self._created,
            "owned_by": "tandem",
            "root": self._completions.models.target.name,
            "parent": None,
            "permission": [],
            "max_model_len": self._completions.models.target.max_length,
            "sampling_defaults": plain(self._completions.models.sampling_defaults),
        }
        models = [{"id": name, **model} for name in self._model_names if asked in (None, "", name)]
        return JSONResponse({"object": "list", "data": models} if asked is None else models[0])

    async def health(self, request: Request) -> Response:
        if self._calls.closed_because:
            return JSONResponse({"status": "unavailable", "reason": self._calls.closed_because}, 503)
        return JSONResponse({"status": "ok"})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(description())

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(docs_page(), headers=_PAGE_HEADERS)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def load(self, request: Request) -> Response:
        """`GET /load`, as in vLLM: how many requests the server has."""
        load = (await self._status()).load
        return JSONResponse({"server_load": load.running + load.queued})

    async def metrics_text(self, request: Request) -> Response:
        metrics = await self._metrics()
        if metrics is None:
            raise HttpError(404, "no metrics are collected here", "not_found")
        return Response(metrics, media_type="text/plain; version=1.0.0; charset=utf-8")

    async def page_status(self, request: Request) -> Response:
        # The decisions may be hundreds, and the page asks often.
        status = plain(replace(await self._status(), decisions=()))
        status |= {"chat": self._chats.has_template, "instruct": self._chats.is_instruct}
        return JSONResponse(status, headers={"Cache-Control": "no-store"})

    async def page_file(self, request: Request) -> Response:
        path = request.url.path
        media_type = _MEDIA_TYPES[_PAGE_FILES[path].suffix]
        return Response(self._files[path], media_type=media_type, headers=_PAGE_HEADERS)


def _choices_of(body: schema.Sampled) -> list[Choices]:
    """For each completion that a body asks for, those of the same prompt."""
    operation = CHAT if isinstance(body, schema.ChatBody) else TEXT_COMPLETION
    found: list[Choices] = []
    for _ in range(max(len(body.prompts), 1)):
        found += [Choices(operation, body.choices)] * body.choices
    return found


def _authorization(headers: Headers) -> str | None:
    """The header with the caller's token; Anthropic's clients send it in one of their own."""
    own = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {own}" if own else None)


# ---- the description of the API


@cache
def description() -> dict[str, Any]:
    """The API in OpenAPI's form."""
    models: Any = [(body, "validation") for *_, body in ENDPOINTS if body is not None]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for method, path, _, summary, body in ENDPOINTS:
        described: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "the answer"}}}
        if body is not None:
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
            described["requestBody"] = {"required": True, "content": content}
            described["responses"]["400"] = {"description": "a rule is broken"}
        paths[path] = {method.lower(): described}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": __version__,
            "description": "OpenAI's API, and some of vLLM's.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


@cache
def docs_page() -> str:
    """The page at `/docs`."""
    import jinja2  # only for whoever reads the page

    template = jinja2.Template((_PAGE / "docs.html").read_text(encoding="utf-8"), autoescape=True)
    paths = [(method, path, summary) for method, path, _, summary, _ in ENDPOINTS]
    rendered: str = template.render(version=__version__, paths=paths, fields=list(schema.field_rows()))
    return rendered


# ---- from a body to the completions that it asks for

Prompt = str | tuple[int, ...]

_OPTIONS = frozenset(field.name for field in fields(GenerationRequest))


def _peer_of(request: Request) -> str:
    """The address by which the request's client is counted; empty where it is not known."""
    return "" if request.client is None else peer_of_host(request.client.host)


async def requests_of(
    body: schema.Sampled, models: Models, chats: Chats, bounds: RequestBounds
) -> list[GenerationRequest]:
    """A request for each completion: those of the first prompt, then those of the second."""
    sentences = list(body.refusals())
    if isinstance(body, schema.ChatBody) and body.may_call and bounds.structured_output == "refuse":
        sentences += ["tools is set and structured_output is refuse; it must be empty, or tool_choice none"]
    prompts: list[Prompt] = body.prompts
    try:
        if isinstance(body, schema.ChatBody):
            prompts = [await chat_prompt(body, models, chats, bounds)]
    except InvalidRequestError as error:
        raise InvalidRequestError("; ".join([*sentences, str(error)])) from None
    if sentences:
        # Whoever breaks rules of both kinds is told of all of them. The first request stands for all: their number
        # may be what is wrong.
        refuse(sentences + await _broken_later(_request(body, prompts[0], 0), models, bounds))
    common: dict[str, Any] = {"grammar": body.grammar}
    if isinstance(body, schema.ChatBody):
        forms = AnswerForms.of(body, common["grammar"], chats)
        if forms.has_special_tokens(models.tokenizer):
            common["with_special_tokens"] = True
    return [_request(body, prompt, choice, **common) for prompt in prompts for choice in range(body.choices)]


async def ids_of(prompt: Prompt, models: Models, bounds: RequestBounds) -> tuple[int, ...]:
    """A prompt as ids."""
    return await models.encode(prompt, bounds) if isinstance(prompt, str) else prompt


async def _broken_later(request: GenerationRequest, models: Models, bounds: RequestBounds) -> list[str]:
    """A sentence for each rule that a request would break once it has its place."""
    try:
        prompt = await ids_of(request.prompt, models, bounds)
    except InvalidRequestError as error:
        return [str(error)]
    request = models.with_defaults(request)
    if keep_out(request, bounds, models):
        request = replace(request, speculation=False)
    subject = TokenizedRequest(
        request,
        truncate(prompt, request, models.target),
        models.target,
        models.draft,
        draft_model_penalties=bounds.draft_model_penalties,
        echo_without_draft=bounds.compatibility == "max",
    )
    return broken(REQUEST_RULES, subject)


async def chat_prompt(
    body: schema.Chat, models: Models, chats: Chats, bounds: RequestBounds
) -> tuple[int, ...]:
    """The prompt that a chat makes."""
    named: dict[str, Any] = {"tools": body.shown_tools} if body.shown_tools else {}
    if isinstance(body, schema.ChatBody):
        named |= {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    text = await chats.prompt(
        [message.fields for message in body.messages or ()],
        (body.chat_template_kwargs or {}) | named,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template=body.chat_template,
        max_bytes=bounds.max_prompt_bytes,
    )
    return await models.encode(text, bounds, add_special_tokens=False)


def _request(body: schema.Sampled, prompt: Prompt, choice: int, **others: Any) -> GenerationRequest:
    # What has the same name means the same; what differs follows.
    values = {
        name: value
        for name in _OPTIONS & type(body).model_fields.keys()
        if (value := getattr(body, name)) is not None
    }
    values |= {
        "prompt": prompt,
        "max_tokens": body.default_max_tokens if body.token_limit is None else body.token_limit,
        "max_tokens_must_fit": body.token_limit is not None,
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "allowed_token_ids": tuple(body.allowed_token_ids or ()),
        "bad_words": tuple(body.bad_words or ()),
        "truncation_side": TruncationSide(body.truncation_side or "left"),
        "prompt_logprobs": None if body.stream else body.prompt_logprobs,
        "echo": isinstance(body, schema.CompletionBody) and body.echo,
        "logprobs": body.alternatives,
        "probabilities": body.return_probabilities,
        "sampled_logprobs": body.sampled_logprobs,
        "with_special_tokens": not body.skip_special_tokens,
        **others,
    }
    if body.top_k == -1:
        values["top_k"] = 0
    if body.seed is not None and choice:
        # The choices of one prompt have consecutive seeds from the request's own on, within 64 bits.
        values["seed"] = (body.seed + choice + 2**63) % 2**64 - 2**63
    return GenerationRequest(**values)
