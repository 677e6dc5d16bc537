"""The servers that `vllm_server` compares, and the command that starts each."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.models.pairs import Pair

ALONE, SPECULATIVE = "Tandem, target alone", "Tandem"
_OURS = {ALONE: False, SPECULATIVE: True}
_MODES: dict[str, str] = {"vLLM": "", "vLLM, ngram": "ngram", "vLLM, draft_model": "draft_model"}
SERVERS = (*_OURS, *_MODES)

_KV_CACHE_GIBIBYTES = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server starts."""

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def launch_of(name: str, options: argparse.Namespace, pair: Pair, port: int) -> Launch:
    """The command of a server.

    No server may reuse the prefixes of a prompt that an earlier round sent.

    Args:
        name: One of `SERVERS`, with @THREADS after it where the threads are not those of the options.
        options: Of `vllm_server`.
        pair: Target and draft.
        port: Where it is to listen for HTTP.
    """
    kind, _, number = name.partition("@")
    threads = int(number) if number else options.threads
    if kind in _OURS:
        return _tandem(options, pair, port, threads, has_draft=_OURS[kind])
    return _vllm(options, pair, port, threads, _MODES[kind])


def _tandem(
    options: argparse.Namespace, pair: Pair, port: int, threads: int | None, *, has_draft: bool
) -> Launch:
    command = [
        *(sys.executable, "-P", "-m", "coordinator.cli", "up", "--port", "0", "--http-port", str(port)),
        *("--target", str(pair.target), "--draft", str(pair.draft) if has_draft else "none"),
        *("--dtype", options.dtype, "--max-length", str(options.max_length)),
    ]
    if has_draft:
        command += ["--num-speculative-tokens", str(options.tokens)]
    if threads is not None:
        command += ["--threads", str(threads)]
    off = {f"TANDEM_{role}_ENABLE_PREFIX_CACHING": "false" for role in ("TARGET", "DRAFT")}
    return Launch(command, off)


def _vllm(options: argparse.Namespace, pair: Pair, port: int, threads: int | None, mode: str) -> Launch:
    command = [
        *(str(options.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
        *("--port", str(port), "--model", str(pair.target), "--dtype", options.dtype),
        *("--max-model-len", str(options.max_length), "--max-num-seqs", str(options.clients)),
        "--no-enable-prefix-caching",
    ]
    if mode:
        command += ["--speculative-config", json.dumps(_speculation(mode, options, pair))]
    environment = {"VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIBIBYTES)}
    if threads is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    return Launch(command, environment)


def _speculation(mode: str, options: argparse.Namespace, pair: Pair) -> dict[str, Any]:
    config: dict[str, Any] = {"method": mode, "num_speculative_tokens": options.tokens}
    if mode == "ngram":
        return {**config, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    return {**config, "model": str(pair.draft)}


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
