"""The tests of the engine, of drafts and of heads once more, with the model runner that vLLM calls V2.

Which runner vLLM takes is decided once in a process, so this runs in another one. Triton's interpreter computes V2's
kernels (`conftest`), and takes minutes for what takes seconds otherwise: a family with and one without windows are
enough to show that our requests come to the same states.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SUITES = {
    "rows": ("llama or gemma3", "tests/vllm/test_engine.py", "tests/vllm/test_drafting.py"),
    # Its own heads in the processes of services have no interpreter
    "heads": (
        "references_and_texts and eagle3 or noise or random_heads and eagle",
        "tests/vllm/test_heads.py",
    ),
}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("suite", SUITES)
def test_the_newer_runner_passes_the_same_tests(suite: str) -> None:
    selection, *files = SUITES[suite]
    command = (sys.executable, "-m", "pytest", "-q", "-W", "default", "-k", selection, *files)
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
