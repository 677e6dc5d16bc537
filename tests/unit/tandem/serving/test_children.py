"""The sentence about a service that has ended."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

from tandem.serving.children import Child


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", f"was ended by signal {signal.SIGRTMIN + 1}"),
        (
            "os.kill(os.getpid(), signal.SIGILL)",
            "this CPU lacks or the system does not allow; try --dtype float32",
        ),
    ],
)
async def test_the_reason_is_told(end: str, told: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", f"import os, signal, sys; {end}")
    sentence = await Child("draft", process, 1.0).obituary()
    assert sentence.startswith("the draft service ")
    assert sentence.endswith(told)
