"""A new user's first hour: the README and docs/getting-started.md, followed with the wheel in a fresh environment."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.clients.client import Client
from tests import bundled_kernels
from tests.commands import Ran
from tests.deploy.wheels import PACKAGES
from tests.end_to_end.processes import Process, descendants, is_alive, run, running
from tests.end_to_end.test_shutdown import END_SECONDS, REQUEST
from tests.paths import DEMO_TARGET, ROOT

DRIVER = """
import contextlib, io, json, sys
from tandem.__main__ import main

results = []
for call in json.loads(sys.argv[1]):
    sys.argv = ["tandem", *call]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    results.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
print(json.dumps(results))
"""
"""Runs `tandem` commands one after the other, and prints their exit codes and outputs as JSON."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A user with the wheel, in a folder of their own, for whom `tandem up` runs."""

    bin: Path
    folder: Path
    address: str
    """The coordinator's address."""
    url: str
    """The page's URL, without the / at its end."""
    cluster: Process

    def run(self, *lines: str) -> list[Ran]:
        """Run `tandem` commands in one process, because importing it takes a second, and return what each did."""
        calls = [self.words(line)[1:] for line in lines]
        results = self.python(DRIVER, json.dumps(calls))
        return [Ran(**ran) for ran in json.loads(results)]

    def words(self, line: str) -> list[str]:
        """Split a command into words, with the addresses of this cluster."""
        localized = line.replace("http://127.0.0.1:8000", self.url).replace("127.0.0.1:50051", self.address)
        return shlex.split(localized)

    def python(self, source: str, *arguments: str) -> str:
        """Run a Python program, and return its output."""
        return self.execute(str(self.bin / "python"), "-P", "-c", source, *arguments)

    def execute(self, *words: str) -> str:
        """Run a command that must succeed, and return its output."""
        environment = {
            "PYTHONPATH": "",
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "TANDEM_CLIENT_ADDRESS": self.address,
            "no_proxy": "*",
        }
        ran = run(*words, seconds=240.0, environment=environment, folder=self.folder)
        assert ran.returncode == 0, f"{words}: {ran.stderr}"
        return ran.stdout


pytestmark = pytest.mark.slow
FOREIGN_MODULES = ("torch", "grpc", "uvloop", "runpy")
GETTING_STARTED = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
PAGES = ((ROOT / "README.md").read_text(encoding="utf-8"), GETTING_STARTED)


def lines_of(page: str) -> list[str]:
    """Return the commands of a page's shell blocks."""
    return [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]


PAGES_LINES = list(dict.fromkeys(line for page in PAGES for line in lines_of(page)))
"""Each command once."""


@pytest.fixture(scope="module")
def newcomer(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    """Run one cluster of the demo pair for all commands."""
    folder = tmp_path_factory.mktemp("anywhere")
    # Python files of the user's folder must never run: neither a checkout's packages nor modules with names of ours.
    for module in (*(f"{package}/__init__" for package in PACKAGES), *FOREIGN_MODULES):
        path = folder / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"open({str(folder / 'ran')!r}, 'a').write(__file__)\nraise SystemExit(9)\n", encoding="utf-8"
        )
    options = ("--model", "demo", "--port", "0", "--http-port", "0", "--threads", "1", "--log-level", "error")
    # There is no compiler, so the wheel's own kernels must work; one service shows it.
    compile_mode = "on" if bundled_kernels.CAN_COMPILE else "off"
    environment = {"CXX": "/nonexistent/c++", "PYTHONPATH": "", "TANDEM_DRAFT_COMPILE": "off"}
    # With two sequences there are few steps to prepare.
    environment |= {"TANDEM_TARGET_COMPILE": compile_mode, "TANDEM_TARGET_MAX_SEQUENCES": "2"}
    with running(
        str(commands / "tandem"), "up", *options, environment=environment, working_folder=folder
    ) as process:
        address = process.line("tandem up: ready on ", seconds=300)
        url = process.line("page on ").partition("/ ")[0]
        yield Newcomer(commands, folder, address, url, process)


def test_the_demo_pair_is_served_from_any_folder(newcomer: Newcomer) -> None:
    """With the console script, a chat over HTTP, and the packages of the wheel."""
    prompt = ("--max-tokens", "8", "--temperature", "0", "def main(")
    written = newcomer.execute("tandem", "generate", "--quiet", *prompt)
    assert written.strip()
    chat = {"messages": [{"role": "user", "content": "def main("}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(f"{newcomer.url}/v1/chat/completions", json.dumps(chat).encode())
    request.add_header("Content-Type", "application/json")
    # The pair's chat template renders the same prompt.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    assert written.strip().endswith(text.strip())
    where = newcomer.python("import tandem_coordinator as c, tandem; print(c.__file__, tandem.__file__)")
    assert where.count(str(newcomer.bin.parent)) == 2


def test_every_tandem_command_of_the_pages_works(newcomer: Newcomer) -> None:
    lines = [line for line in PAGES_LINES if line.startswith(("tandem ", ".venv/bin/tandem "))]
    # tests/end_to_end/test_readme.py starts the services one by one, on other ports.
    lines = [line for line in lines if line.split()[1] not in ("up", "serve") and ":50151" not in line]
    assert len(lines) >= 15
    printed = dict(zip(lines, newcomer.run(*lines), strict=True))
    wrong = {line: ran for line, ran in printed.items() if ran.code != 0 or not ran.out.strip()}
    assert wrong == {}, "\n".join(map(str, wrong.items()))
    # The README promises the same text for its last two generate commands.
    strict, alone = [line for line in printed if "--seed 7" in line and "--json" not in line][-2:]
    generated = {line: ran for line, ran in printed.items() if line.split()[1] == "generate"}
    texts = {line: ran for line, ran in generated.items() if "strict" in line or "--no-speculation" in line}
    assert len(texts) == 2, (strict, alone)
    assert len({ran.out for ran in texts.values()}) == 1


def test_every_curl_and_python_of_the_pages_works(newcomer: Newcomer) -> None:
    curls = [line for line in PAGES_LINES if line.startswith("curl ")]
    assert len(curls) == 2
    for line in curls:
        assert json.loads(newcomer.execute(*newcomer.words(line)))["choices"], line
    sources = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    assert len(sources) >= 2
    for source in sources:
        assert newcomer.python(source.replace("127.0.0.1:50051", newcomer.address)).strip(), source


async def test_a_closed_terminal_ends_the_cluster_after_its_requests_and_leaves_no_process(
    newcomer: Newcomer,
) -> None:
    process = newcomer.cluster
    children = descendants(process.pid)
    assert len(children) >= 3
    async with Client(newcomer.address) as client:
        chunks = client.generate(REQUEST)
        tokens = [*(await anext(chunks)).token_ids]
        # The system sends the signal, and then the shell does.
        process.signal(signal.SIGHUP)
        process.signal(signal.SIGHUP)
        tokens += [token async for chunk in chunks for token in chunk.token_ids]
    assert len(tokens) == REQUEST.max_tokens
    assert process.wait(END_SECONDS) == 0
    assert not any(map(is_alive, children))
    # The HTTP server logs gRPC calls to the page's port itself.
    assert [line for line in process.stderr.splitlines() if "Invalid HTTP request" not in line] == []
    assert not (newcomer.folder / "ran").exists(), (newcomer.folder / "ran").read_text(encoding="utf-8")


@pytest.mark.soak
def test_the_commands_work_in_a_fresh_clone(tmp_path: Path) -> None:
    """Run the page's commands verbatim; pip takes minutes."""
    blocks = re.findall(r"```sh\n(.*?)```", GETTING_STARTED, re.DOTALL)
    script = "".join(block for block in blocks if "make demo" in block or "pip" in block)
    assert script.count("pip") == 4
    script = f"git clone --quiet {ROOT} clone\ncd clone\n{script}\ncd /\ntandem --version\ntandem config check '{{}}'"
    ran = run("bash", "-euxc", script, seconds=3600.0, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "SPEED-UP" in ran.stdout
    assert "tandem 0." in ran.stdout


def test_without_torch_one_sentence_names_the_extra(commands: Path, tmp_path: Path) -> None:
    for command in (("up",), ("serve", "target", "--model", str(DEMO_TARGET), "--log-level", "error")):
        hidden = {"TEST_HIDES_TORCH": "1", "PYTHONPATH": ""}
        words = (str(commands / "tandem"), *command, "--port", "0")
        ran = run(*words, environment=hidden, folder=tmp_path)
        assert ran.returncode == 2
        assert ran.stderr.splitlines() == [
            "error: running a model needs torch; install the extra: pip install 'tandem-speculative[engine]'"
        ]
