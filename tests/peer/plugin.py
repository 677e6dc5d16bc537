"""A pytest plugin under which vLLM's tests find `tandem up` where they start a server.

vLLM itself is not installed: whatever the tests import of it is a stand-in.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import anthropic
import openai
import pytest
import transformers

import tandem
from tandem.model_sources.find import find_model
from tests.peer.listed import FOLDERS, Group, Outcome, describe_passed, find_unused, read_groups
from tests.peer.run import SOURCE_VARIABLE, TESTS

SOURCE = Path(os.environ[SOURCE_VARIABLE])
GROUPS = read_groups()
MODEL = "smollm2"
MODEL_MAX_LENGTH = 8192
SHORT_LENGTH = 256
PORT_VARIABLE = "PEER_PORT"
"""Names the HTTP port of a server that runs already, with the names and the sampling that this one would have."""
START_SECONDS = 600.0
STOP_SECONDS = 60.0
SAMPLING = {"temperature": 0.0, "max_new_tokens": 120}
"""For requests that say nothing of it. Most do not, and a small model that repeats itself would go on until its context
is full; at temperature 0 it says the same in each run."""


# ---- in place of vLLM's server


class Process:
    """`tandem up` in a process of its own."""

    def __init__(self, names: Sequence[str], max_length: int) -> None:
        command = [sys.executable, "-m", "tandem", "up", "--model", MODEL, "--port", "0", "--http-port", "0"]
        command += ["--served-model-name", ",".join(names), "--max-model-len", str(max_length)]
        command += ["--override-generation-config", json.dumps(SAMPLING)]
        environment = os.environ | {"TANDEM_COORDINATOR_METRIC_NAMES": "vllm"}
        # It lives as long as the process.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
        self.port = self._await_port()

    def _await_port(self) -> int:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            said = self.read_log()
            found = re.search(r"page on http://127\.0\.0\.1:(\d+)/", said)
            if found is not None:
                return int(found[1])
            if self._process.poll() is not None:
                raise RuntimeError(f"tandem up has ended:\n{said[-2000:]}")
            time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"tandem up was not ready within {START_SECONDS:g} s")

    def read_log(self) -> str:
        """Return all that the services have written."""
        self._log.seek(0)
        return self._log.read()

    def stop(self) -> None:
        """End the services."""
        self._process.terminate()
        self._process.wait(STOP_SECONDS)
        self._log.close()


@cache
def find_names() -> tuple[str, ...]:
    """Return the names of the models that the tests ask for, by their source."""
    found: dict[str, None] = {}
    for folder in FOLDERS:
        for file in sorted((SOURCE / TESTS / folder).rglob("*.py")):
            for name in _NAME.findall(file.read_text(encoding="utf-8")):
                found[name] = None
    return tuple(found)


_NAME = re.compile(r'(?:MODEL_NAME\w*\s*=\s*|"--served-model-name",\s*|RemoteOpenAIServer\(\s*)"([\w./-]+)"')


class TandemServer:
    """Stands for vLLM's `RemoteOpenAIServer`: `tandem up` under the name of the model that a test asks for.

    All tests share one, which has all names and the model's whole length, except for those that need fewer tokens or a
    server that nobody has used.
    """

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False
    host = "127.0.0.1"
    _shared: ClassVar[Process | None] = None

    def __init__(self, model: str, arguments: Sequence[str] = (), **_: Any) -> None:
        words = [str(each) for each in arguments]
        name = find_value(words, "--served-model-name") or model
        length = int(find_value(words, "--max-model-len") or MODEL_MAX_LENGTH)
        is_counted = "test_metrics" in os.environ["PYTEST_CURRENT_TEST"]
        self._own: Process | None = None
        if length < SHORT_LENGTH or is_counted:
            self._own = Process([name], min(length, MODEL_MAX_LENGTH))
            self.port = self._own.port
        else:
            self.port = self._share()

    @classmethod
    def _share(cls) -> int:
        """The port of the server of all tests."""
        if PORT_VARIABLE in os.environ:
            return int(os.environ[PORT_VARIABLE])
        if cls._shared is None:
            cls._shared = Process(find_names(), MODEL_MAX_LENGTH)
        return cls._shared.port

    @classmethod
    def stop_shared(cls) -> None:
        """End the server of all tests."""
        if cls._shared is not None:
            cls._shared.stop()

    def __enter__(self) -> TandemServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.stop()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **given: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), **self._complete(given))

    def get_async_client(self, **given: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._complete(given))

    def get_client_anthropic(self, **given: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url_root, **self._complete(given))

    def get_async_client_anthropic(self, **given: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._complete(given))

    def _complete(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600, **given}


def find_value(words: Sequence[str], option: str) -> str | None:
    """Return the word after the last one that is the option."""
    found = None
    for index, word in enumerate(words[:-1]):
        if word.replace("_", "-") == option:
            found = words[index + 1]
    return found


# ---- in place of vLLM's modules

TOKENIZER = transformers.AutoTokenizer.from_pretrained(find_model(MODEL))


def _get_tokenizer(*_: Any, **__: Any) -> Any:
    return TOKENIZER


class _ModelConfig:
    """Stands for vLLM's, of which tests ask the size of the vocabulary."""

    def __init__(self, **_: Any) -> None: ...

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return len(TOKENIZER)


_REAL: dict[str, dict[str, Any]] = {
    "vllm": {"envs": SimpleNamespace(VLLM_USE_RUST_FRONTEND=False)},
    "vllm.config": {"ModelConfig": _ModelConfig},
    "vllm.tokenizers": {"get_tokenizer": _get_tokenizer},
    "vllm.version": {"__version__": tandem.__version__, "_prev_minor_version": lambda: "0.0"},
    "vllm.platforms": {"current_platform": MagicMock(is_rocm=lambda: False, is_xpu=lambda: False)},
}
"""Names that tests use beside the server."""

_ABSENT = ("vllm", "fastapi", "pybase64")
"""Packages that are not installed here. The others serve tests of vLLM's own code."""


class _StandIn(ModuleType):
    """A module that is not there, in which every name stands for a class without a meaning."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in _REAL:
            return importlib.import_module(f"{self.__name__}.{name}")
        base = Exception if name.endswith("Error") else MagicMock
        made = type(name, (base,), {})
        setattr(self, name, made)
        return made


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each module that is not there."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        vars(module).update(_REAL.get(spec.name, {}))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def _load_module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _replace_tests_package() -> None:
    """Both projects call their package `tests`: from here on it is vLLM's."""
    for name in list(sys.modules):
        if name == "tests" or name.startswith("tests."):
            del sys.modules[name]
    package = ModuleType("tests")
    package.__path__ = [str(SOURCE / "tests")]
    utils = _StandIn("tests.utils")
    vars(utils).update(RemoteOpenAIServer=TandemServer, ROCM_ENV_OVERRIDES={}, ROCM_EXTRA_ARGS=[])
    sys.modules["tests"] = package
    sys.modules["tests.utils"] = utils
    sys.modules["tests.conftest"] = _StandIn("tests.conftest")
    # The same library under the name of its next version.
    sys.modules["httpx"] = importlib.import_module("httpx2")


def pytest_configure(config: pytest.Config) -> None:
    """Put the stand-ins in place, and take the fixtures that vLLM's tests share."""
    sys.meta_path.insert(0, _StandIns())
    _replace_tests_package()
    transformers.AutoTokenizer.from_pretrained = _get_tokenizer  # type: ignore[method-assign]
    for name, folder in (("shared", ""), ("of_responses", "openai/responses")):
        fixtures = _load_module(f"peer_fixtures_{name}", SOURCE / TESTS / folder / "conftest.py")
        # Under the name of a conftest.py, pytest would look for its folder among its own arguments.
        config.pluginmanager.register(fixtures, f"peer_fixtures_{name}")


@pytest.fixture
def local_asset_server() -> None:
    """Stands for vLLM's server of images: no test that runs here asks it for one."""


# ---- the list of tests that do not pass

_used: Counter[str] = Counter()
"""Tests that each entry of the list names."""
_left_out: Counter[str] = Counter()
"""Tests that are not run, by reason. Those of files that are not even read are not known."""


def _find_groups(place: str) -> list[Group]:
    found = []
    for group in GROUPS:
        entry = group.find_pattern(place)
        if entry is not None:
            _used[entry] += 1
            found.append(group)
    return found


def _place_of(test: pytest.Item) -> str:
    return test.nodeid.removeprefix(f"{TESTS}/")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the files that are not run, which often need what is not installed."""
    if collection_path.is_dir() or not collection_path.is_relative_to(SOURCE / TESTS):
        return None
    place = str(collection_path.relative_to(SOURCE / TESTS))
    groups = [group for group in _find_groups(place) if group.outcome is Outcome.NOT_RUN]
    return True if groups else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the listed tests with what is expected of them, and leave out those that are not run."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        groups = _find_groups(_place_of(item))
        if len(groups) > 1:
            raise pytest.UsageError(f"{item.nodeid} is listed {len(groups)} times")
        outcome = groups[0].outcome if groups else None
        if outcome is Outcome.NOT_RUN:
            left_out.append(item)
            _left_out[groups[0].reason] += 1
            continue
        if outcome is not None:
            item.add_marker(pytest.mark.xfail(reason=groups[0].reason, strict=outcome is Outcome.FAILS))
        kept.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a listed test fail by itself only: one whose server does not start is an error. One that passes is told what
    that means for the list."""
    report = yield
    passed_by = str(report.longrepr).partition("[XPASS(strict)] ")[2]
    if call.when == "call" and report.failed and passed_by:
        report.longrepr = describe_passed(report.nodeid.removeprefix(f"{TESTS}/"), passed_by)
    if call.when == "setup" and hasattr(report, "wasxfail"):
        del report.wasxfail
        report.outcome = "failed"
    return report


# ---- what is said at the end


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the server of all tests, and let a whole run fail for entries that name no test."""
    TandemServer.stop_shared()
    if session.exitstatus == pytest.ExitCode.OK and _find_unused(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _find_unused(config: pytest.Config) -> list[str]:
    """Entries of the list that name no test; none if only some of the tests were chosen."""
    is_whole = set(config.args) == {str(TESTS / folder) for folder in FOLDERS}
    return find_unused(GROUPS, _used) if is_whole and not config.option.keyword else []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many tests passed, and by which reasons the others did not."""
    counts = {
        name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")
    }
    failed: Counter[str] = Counter(str(each.wasxfail) for each in terminalreporter.stats.get("xfailed", ()))
    terminalreporter.section("vLLM's tests")
    for name, count in counts.items():
        terminalreporter.line(f"{count:5} {name}")
    for outcome, reasons in (("listed", failed), ("not run", _left_out)):
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:5} {outcome}: {reason}")
    for entry in _find_unused(config):
        terminalreporter.line(f"tests/peer/listed.toml is out of date: no test is {entry}")
