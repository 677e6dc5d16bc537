"""The README's services that are started one by one; tests/deploy/test_first_hour.py runs the rest."""

from __future__ import annotations

import re
import shlex
import signal
from contextlib import ExitStack

import pytest

from tests.commands import run_here
from tests.end_to_end import processes
from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS = {f"TANDEM_{role}_{name}": value for role in ("TARGET", "DRAFT")
           for name, value in (("COMPILE", "off"), ("THREADS", "1"))}  # fmt: skip
"""As in `processes.NO_KERNELS` and `of_model`, for command lines that are the README's."""
BLOCKS = [block for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "50151" in block]


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_the_services_of_a_block_start_serve_its_commands_and_end_with_ctrl_c(block: str) -> None:
    lines = [shlex.split(line)[1:] for line in block.splitlines()]
    keep_running = [line for line in lines if line[0] in ("up", "serve")]
    assert keep_running
    with ExitStack() as stack:
        # tests/deploy/test_first_hour.py runs `tandem up` with its services.
        packages = {"up": "stand_in", "serve": "tandem"}
        started = [
            stack.enter_context(processes.service(packages[line[0]], *line, environment=OPTIONS))
            for line in keep_running
        ]
        for process in started:
            process.line("ready on ")
        for line in lines:
            if line not in keep_running:
                done = run_here(*line)
                assert done.returncode == 0, done.stderr
                assert done.stdout.strip(), f"{line} printed nothing"
        for process in reversed(started):
            process.signal(signal.SIGINT)
            assert process.wait() == 0, process.story


def test_every_link_leads_somewhere() -> None:
    """Pages outside docs/; `mkdocs build --strict` checks the links of the others, with their anchors."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "models").rglob("*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    ]
    assert links
    assert [(page, link) for page, link in links if not (page.parent / link).exists()] == []
