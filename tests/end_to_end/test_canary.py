"""The text and token ids of one caller's requests are nowhere but with that caller.

They are recognisable, and are then looked for in all that anybody else gets to see: logs at debug level, traces and
metrics of every service, all calls of AdminService, every path of HTTP, and what other callers are answered.
"""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tokenizers import Tokenizer

from tandem.model.types import GenerationRequest, Grammar, GrammarKind
from tandem.v1 import admin_pb2
from tandem.v1.admin_pb2_grpc import AdminServiceStub
from tandem.v1.generation_pb2_grpc import GenerationServiceStub
from tandem.wire.generation import request_to_proto
from tests.end_to_end.processes import (
    NO_KERNELS,
    Process,
    address_of,
    coordinator,
    metrics_of,
    of_model,
    service,
    until,
)
from tests.paths import DEMO_DRAFT, DEMO_TARGET
from tests.service.http_cluster import TEMPLATE

pytestmark = pytest.mark.slow

CANARIES = {
    "prompt": "Wombatoz Quixjfem",
    "answer": "Vexyglinqo Bazkuth",
    "chat": "Yardwipso Flumjekt",
    "stop": "Hobzifrang Quovlyx",
    "schema": "Jukmapowd Zibvurne",
    "refused": "Crozflimep Wuhdgax",
}
"""By the place where a request holds them. No model writes such words by itself."""
TOKENIZER: Any = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
OWN, OTHER, ADMIN = (f"{name}-0123456789abcdef" for name in ("own", "other", "admin"))
"""Tokens of the caller, of another caller and of the administrator."""
ENDLESS = Grammar(GrammarKind.REGEX, "(Vexyglinqo Bazkuth ){200}")
ALIVE_SECONDS = 60.0
# Typed for asyncio alone.
GENERATION: Any = GenerationServiceStub
ADMINISTRATION: Any = AdminServiceStub


def leaks(text: str) -> list[str]:
    """The parts of canaries in a text: six characters of a word, or three of its token ids one after the other."""
    found = []
    lowered = text.lower()
    for place, canary in CANARIES.items():
        parts = {word[at : at + 6].lower() for word in canary.split() for at in range(len(word) - 5)}
        found += [f"{place}: {part}" for part in parts if part in lowered]
        ids = TOKENIZER.encode(canary).ids
        for at in range(len(ids) - 2):
            run = r"\D{1,60}".join(map(str, ids[at : at + 3]))
            if re.search(rf"(?<!\d){run}(?!\d)", text):
                found.append(f"{place}: token ids {ids[at : at + 3]}")
    return found


def test_a_canary_is_recognised() -> None:
    ids = TOKENIZER.encode(CANARIES["answer"]).ids
    for text in (
        "say vexyglinqo",
        '{"text": "Bazkuth"}',
        f"tokens={ids}",
        "".join(f"id: {each}\n" for each in ids),
    ):
        assert leaks(text), text
    assert leaks(f"{ids[0]}, {ids[1]}, 7, {ids[2]}") == leaks("def vex(): pass") == []


@dataclass
class Collector(grpc.GenericRpcHandler):
    """Takes what services export, and keeps all of it as text."""

    texts: list[str] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        kind: Any = ExportTraceServiceRequest if "trace" in details.method else ExportMetricsServiceRequest

        def keep(request: Any, _context: object) -> bytes:
            with self.lock:
                self.texts.append(str(request))
            return b""

        return grpc.unary_unary_rpc_method_handler(keep, kind.FromString, lambda answer: answer)

    @property
    def all(self) -> str:
        with self.lock:
            return "\n".join(self.texts)


@dataclass
class Cluster:
    """A coordinator with two clients' tokens, and its services; all of them log and export all that they can."""

    collector: Collector
    processes: dict[str, Process]
    url: str

    @property
    def address(self) -> str:
        return address_of(self.processes["coordinator"])

    def http(self, path: str, body: object = None, token: str = OTHER) -> tuple[int, str]:
        """The status of an answer, and the answer with its head."""
        request = urllib.request.Request(f"{self.url}{path}")
        request.add_header("authorization", f"Bearer {token}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=ALIVE_SECONDS) as answer:
                return answer.status, f"{answer.headers}\n{answer.read().decode()}"
        except urllib.error.HTTPError as error:
            return error.code, f"{error.headers}\n{error.read().decode()}"


@pytest.fixture(scope="module", params=["draft model", "suffix"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("canary")
    (folder / "tokens").write_text(f"{OWN}\n{OTHER}\n")
    (folder / "admin").write_text(f"{ADMIN}\n")
    (folder / "chat.jinja").write_text(TEMPLATE)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "300")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        collector = Collector()
        server = grpc.server(ThreadPoolExecutor(4), handlers=[collector])
        endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        stack.callback(lambda: server.stop(0).wait())
        options = ("--otlp-endpoint", endpoint, "--prometheus-port", "0", "--log-level", "debug")
        pace = ("--role", "target", "--pace", "15,1")
        target = stack.enter_context(
            service("benchmarks.pace", *pace, *of_model(DEMO_TARGET), *NO_KERNELS, *options)
        )
        drafting = (
            ("--method", "suffix") if request.param == "suffix" else (*of_model(DEMO_DRAFT), *NO_KERNELS)
        )
        draft = stack.enter_context(service("tandem_draft", *drafting, *options))
        joined = stack.enter_context(
            coordinator(
                *(address_of(target), address_of(draft), "--trace-rounds", "1", "--http-port", "0"),
                *("--auth-token-file", str(folder / "tokens"), "--admin-token-file", str(folder / "admin")),
                *("--chat-template", str(folder / "chat.jinja"), "--draft-ahead", "4", *options),
            )
        )
        address_of(joined)
        processes = {"coordinator": joined, "draft": draft, "target": target}
        yield Cluster(collector, processes, joined.line("http on "))


def served_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests with canaries that are answered: the path, and the body."""
    prompt = f"# {CANARIES['prompt']}\n"
    ids = TOKENIZER.encode(prompt).ids
    answer = {"max_tokens": 60, "structured_outputs": {"regex": "(Vexyglinqo Bazkuth ){3}"}}
    schema = {
        "type": "object",
        "properties": {CANARIES["schema"]: {"enum": ["x"]}},
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for body in (
        {"prompt": prompt, "logprobs": 2, **answer},
        {"prompt": prompt, "return_token_ids": True, "stream": True, **answer},
        {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1},
        {"prompt": ids, "max_tokens": 8, "stop": [CANARIES["stop"]], "temperature": 0},
        {"prompt": "a", "max_tokens": 40, "response_format": form},
    ):
        yield "/v1/completions", {"model": "target", **body}
    messages = [{"role": "user", "content": CANARIES["chat"]}]
    yield "/v1/chat/completions", {"model": "target", "messages": messages, "max_tokens": 8}
    yield "/v1/responses", {"model": "target", "input": CANARIES["chat"], "max_output_tokens": 16}
    yield "/tokenize", {"prompt": CANARIES["prompt"]}
    yield "/detokenize", {"tokens": ids}


def refused_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests with canaries that are refused: the path, and the body."""
    canary = CANARIES["refused"]
    for body in (
        {"prompt": canary, "max_tokens": -1},
        {"prompt": canary, "temperature": -1},
        {"prompt": f"{canary} " * 600},
        {"prompt": "a", "stop": [canary * 40]},
        {"prompt": "a", "structured_outputs": {"regex": f"({canary}"}},
        {"prompt": "a", "structured_outputs": {"json": {"type": canary}}},
        {"prompt": "a", "rejection_sampling_strategy": canary},
    ):
        yield "/v1/completions", {"model": "target", **body}
    messages = [{"role": "user", "content": {"text": canary}}]
    yield "/v1/chat/completions", {"model": "target", "messages": messages}
    yield "/tokenize", {"prompt": canary, "messages": canary}


def every_path(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Reads, as another caller, every path that takes no body."""
    _, described = cluster.http("/openapi.json")
    paths = json.loads(described.partition("\n\n")[2])["paths"]
    for path in [each for each, methods in paths.items() if "get" in methods]:
        yield path, cluster.http(path)[1]


def answers_of_others(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Asks, as another caller, for all that an answer can hold."""
    for body in ({"prompt": "def f(", "return_token_ids": True, "logprobs": 3}, {"prompt": "#", "n": 2}):
        status, answer = cluster.http("/v1/completions", {"model": "target", "max_tokens": 16, **body})
        assert status == 200, answer
        yield f"another caller's answer to {body}", answer
    with grpc.insecure_channel(cluster.address) as channel:
        call = GENERATION(channel).Generate
        request = request_to_proto(GenerationRequest("def g(", max_tokens=24))
        yield "another caller's stream", "\n".join(map(str, call(request, metadata=bearer(OTHER))))


def bearer(token: str) -> Sequence[tuple[str, str]]:
    return (("authorization", f"Bearer {token}"),)


def every_admin_call(cluster: Cluster, running_id: str) -> Iterator[tuple[str, str]]:
    """Makes each call of an administrator."""
    draft = address_of(cluster.processes["draft"])
    fields: dict[str, list[dict[str, Any]]] = {
        "GetStatus": [{}],
        "ListReplicas": [{}],
        "DrainReplica": [{"address": draft}],
        "ResumeReplica": [{"address": draft}],
        "ListRequests": [{}],
        "GetRequest": [{"request_id": running_id}, {"request_id": "nobody"}],
        "GetStats": [{}],
        "WatchStats": [{"interval_seconds": 0.1}],
        "GetConfig": [{}],
        "UpdateConfig": [{"values": {"target_lead": "1"}}],
        "Diagnose": [{}],
        "AbortRequest": [{"request_id": running_id, "reason": "enough"}],
    }
    methods = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods
    assert {method.name for method in methods} == fields.keys()
    with grpc.insecure_channel(cluster.address) as channel:
        stub = ADMINISTRATION(channel)
        for name, requests in fields.items():
            for given in requests:
                request = getattr(admin_pb2, f"{name}Request")(**given)
                try:
                    answer = getattr(stub, name)(request, metadata=bearer(ADMIN), timeout=ALIVE_SECONDS)
                    text = str(next(iter(answer))) if name == "WatchStats" else str(answer)
                except grpc.RpcError as error:
                    text = str(error)
                    assert given.get("request_id") == "nobody", text
                yield f"admin {name}", text


def exercise(cluster: Cluster) -> dict[str, str]:
    """Send canaries in every way, and return all that others see while and after that, by where they see it."""
    seen: dict[str, str] = {}
    for path, body in served_bodies():
        status, answer = cluster.http(path, body, OWN)
        assert status == 200, (path, body, answer)
        if "Vexyglinqo" in str(body):
            assert leaks(answer), "the caller itself gets its answer"
    for path, body in refused_bodies():
        status, answer = cluster.http(path, body, OWN)
        assert status == 400, (path, body, answer)
    with grpc.insecure_channel(cluster.address) as channel:
        call = GENERATION(channel).Generate
        request = GenerationRequest(CANARIES["prompt"], max_tokens=900, grammar=ENDLESS)
        stream = call(request_to_proto(request), metadata=bearer(OWN))
        assert next(stream).token_ids
        with grpc.insecure_channel(cluster.address) as other:
            listed = ADMINISTRATION(other).ListRequests(
                admin_pb2.ListRequestsRequest(), metadata=bearer(ADMIN)
            )
        (running,) = listed.requests
        seen |= {f"{name}, while it runs": text for name, text in every_path(cluster)}
        cluster.processes["draft"].kill()
        seen |= every_admin_call(cluster, running.request_id)
        with suppress(grpc.RpcError):
            seen["the stream's own end"] = ""
            assert leaks("".join(chunk.text for chunk in stream))
        assert stream.code() is grpc.StatusCode.ABORTED
    seen |= {f"{name}, afterwards": text for name, text in every_path(cluster)}
    seen |= answers_of_others(cluster)
    for name in ("coordinator", "target"):
        seen[f"metrics of the {name}"] = metrics_of(cluster.processes[name])
    before = len(cluster.collector.texts)
    until(lambda: len(cluster.collector.texts) >= before + 4, ALIVE_SECONDS)
    for name in ("coordinator", "target"):
        cluster.processes[name].stop()
    for name, process in cluster.processes.items():
        seen[f"stdout of the {name}"] = process.stdout
        seen[f"log of the {name}"] = process.stderr
    seen["traces and metrics by OTLP"] = cluster.collector.all
    return seen


def test_a_callers_text_and_token_ids_are_nowhere_but_with_that_caller(cluster: Cluster) -> None:
    seen = exercise(cluster)
    assert "span_id" in seen["traces and metrics by OTLP"]
    assert "tandem_" in seen["metrics of the coordinator"]
    assert {where: found for where, text in seen.items() if (found := leaks(text))} == {}
