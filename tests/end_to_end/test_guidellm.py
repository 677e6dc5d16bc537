"""The load over HTTP that the documentation names, against a coordinator with the demo pair."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.processes import address_of, coordinator
from tests.paths import ROOT

SECONDS = 500


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("guidellm") is None, reason="guidellm needs an environment of its own")
def test_the_documented_load_is_served(target_address: str, draft_address: str, tmp_path: Path) -> None:
    with coordinator(target_address, draft_address, "--http-port", "0") as process:
        address_of(process)
        url = process.line("http on ")
        words = [
            word.replace("http://127.0.0.1:8000", url).replace("load.json", str(tmp_path / "load.json"))
            for word in documented()
        ]
        # One process, as the documentation says for small machines; the tokenizer lies in the repository.
        environment = {**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            ["guidellm", *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = json.loads((tmp_path / "load.json").read_text(encoding="utf-8"))["benchmarks"]
    assert found["metrics"]["request_totals"] == {
        "successful": 12,
        "errored": 0,
        "incomplete": 0,
        "total": 12,
    }
    assert found["metrics"]["output_token_count"]["successful"]["mean"] == 32


def documented() -> list[str]:
    """The words of the command in the documentation, behind the program's name."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    command = re.search(r"guidellm/bin/guidellm (run .*?--disable-progress)", page, re.DOTALL)
    assert command is not None
    return shlex.split(command[1].replace("\\\n", " "))
