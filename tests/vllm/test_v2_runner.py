"""The tests of the engine and of drafts once more, with the model runner that vLLM calls V2.

Which runner vLLM takes is decided once in a process, so this runs in another one. Triton's interpreter computes V2's
kernels (`conftest`), and takes minutes for what takes seconds otherwise: a family with and one without windows are
enough to show that our requests come to the same states.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(3000)
def test_the_newer_runner_passes_the_same_tests() -> None:
    files = ("tests/vllm/test_engine.py", "tests/vllm/test_drafting.py")
    command = (sys.executable, "-m", "pytest", "-q", "-W", "default", "-k", "llama or gemma3", *files)
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
