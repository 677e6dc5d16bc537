"""MAX behind its own OpenAI-compatible server. Runs in an environment of its own; on a CPU it computes in float32."""

from __future__ import annotations

import atexit
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import socket
from typing import Any

from benchmarks.peers.pipe import Run, serve
from benchmarks.workload import Answer, Outcome, Workload

_HOST = "127.0.0.1"
_START_SECONDS = 600.0
_POLL_SECONDS = 0.5
_DEVICES = {"cpu": "cpu", "cuda": "gpu"}


def load(setup: dict[str, Any]) -> Run:
    """Start the server and wait for it."""
    with socket() as free:
        free.bind((_HOST, 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(_command(setup, port), stdin=subprocess.DEVNULL)
    atexit.register(process.terminate)
    _wait(process, port)
    return lambda workload: _run(setup["target"], port, workload)


def _command(setup: dict[str, Any], port: int) -> list[str]:
    device = setup["device"].partition(":")[0]
    return [
        *(str(Path(sys.executable).with_name("max")), "serve", "--model-path", setup["target"]),
        *("--devices", _DEVICES[device], "--quantization-encoding", setup["dtype"]),
        *("--max-length", str(setup["max_length"]), "--max-batch-size", str(setup["max_sequences"])),
        *("--port", str(port)),
    ]


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"max serve ended with exit code {process.returncode}")
        try:
            connection = http.client.HTTPConnection(_HOST, port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            pass  # not reachable yet
        time.sleep(_POLL_SECONDS)
    raise RuntimeError(f"max serve was not ready within {_START_SECONDS:g} s")


def _run(model: str, port: int, workload: Workload) -> Outcome:
    started = time.perf_counter()

    def one(index: int) -> Answer:
        return _complete(model, port, workload, index, lambda: time.perf_counter() - started)

    with ThreadPoolExecutor(len(workload.prompts)) as threads:
        answers = list(threads.map(one, range(len(workload.prompts))))
    return Outcome(answers, time.perf_counter() - started)


def _complete(model: str, port: int, workload: Workload, index: int, elapsed: Callable[[], float]) -> Answer:
    """One completion. The server sends texts, not ids, so each chunk counts as one token of unknown id."""
    body = {
        "model": model,
        "prompt": list(workload.prompts[index]),
        "max_tokens": workload.max_tokens,
        "temperature": workload.temperature,
        "seed": workload.seed + index,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(_HOST, port)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise RuntimeError(f"MAX answered {response.status}: {response.read().decode(errors='replace')}")
    answer = Answer()
    for line in response:
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:]).get("choices", ())
            answer.add(elapsed(), [-1] * len(choices))
    if not answer.arrivals:
        raise RuntimeError("MAX answered without a token")
    return answer


if __name__ == "__main__":
    serve(load)
