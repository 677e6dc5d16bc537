"""A peer's end of the pipe. Standard library only."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from benchmarks.workload import Outcome, Workload

Run = Callable[[Workload], Outcome]


def serve(load: Callable[[dict[str, Any]], Run]) -> None:
    """Load what the first line asks for, then answer workloads until stdin ends."""
    answers = _own_stdout()
    try:
        run = load(json.loads(sys.stdin.readline()))
    except Exception as error:
        _tell(answers, {"error": _sentence(error)})
        raise
    _tell(answers, {"ready": True})
    for line in sys.stdin:
        try:
            _tell(answers, run(Workload.from_json(json.loads(line))).to_json())
        except Exception as error:  # noqa: BLE001 - the benchmark reports any error of an engine and continues
            traceback.print_exc()
            _tell(answers, {"error": _sentence(error)})


def _own_stdout() -> TextIO:
    """The real stdout; what engines print goes to stderr from here on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _tell(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _sentence(error: Exception) -> str:
    first_line = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {first_line}"
