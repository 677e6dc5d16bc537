"""`python -m benchmarks.gpu`: measure a GPU that is there for half an hour.

    python -m benchmarks.gpu --results gpu.jsonl
    python -m benchmarks.gpu --results gpu.jsonl --wheels WHEELS --pair Qwen/Qwen3-8B:Qwen/Qwen3-0.6B --head HEAD
    python -m benchmarks.gpu --results cpu.jsonl --device cpu --small

The campaign has pieces of at most eight minutes, in order of worth, and writes a line of JSON for each as soon as it
has ended. Called again with the same file it goes on with those that are missing or have failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from tandem.config.settings import load_settings
from tandem.errors import ConfigurationError
from tandem_load.common import Positive, StudySettings, one_sentence

ROOT = Path(__file__).resolve().parents[1]
PIECE_SECONDS = 8 * 60
_SAID_LINES = 20
"""Last lines of a piece's output that its record keeps."""
_TESTS = (
    "tests/unit/engine/core", "tests/unit/engine/kv_cache", "tests/unit/engine/test_rows.py",
    "tests/unit/engine/models/test_architectures.py", "tests/unit/tandem/model/sampling",
    "tests/unit/draft_service/test_standalone.py", "tests/unit/draft_service/test_ahead.py",
    "tests/service/test_drafting_ahead.py", "tests/service/test_own_heads.py",
)  # fmt: skip
"""As `make test-gpu`."""
_SMALL_TESTS = ("tests/unit/engine/test_rows.py",)
_NO_HEAD = "name the folder of the target's EAGLE-3 head with --head"


class CampaignSettings(StudySettings):
    """Options of the campaign."""

    results: Path = Path("gpu.jsonl")
    """File of the records; those that are in it are not measured again."""
    pair: str = "shaped:8B:1:0.8"
    """As for `tandem bench`."""
    head: Path | None = None
    """Folder of an EAGLE-3 head for the pair's target."""
    device: str = "cuda"
    """Device of the models."""
    small: bool = False
    """Few tokens of the demo pair, to try the campaign itself."""
    only: str = ""
    """Name of the one piece to measure, whatever is in the file."""
    wheels: Path | None = None
    """Folder of wheels from which the engine's packages are installed first, for a machine that reaches no index."""
    vllm_python: Path = Field(default_factory=lambda: Path(sys.executable))
    """A Python that has vLLM."""
    piece_seconds: Positive = PIECE_SECONDS
    """The longest that a piece may take."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One measurement of the campaign."""

    name: str
    purpose: str
    command: tuple[str, ...]
    absent: str = ""
    """Reason why it cannot be measured; empty where it can."""


def pieces(settings: CampaignSettings) -> Iterator[Piece]:
    """The campaign, in order of worth."""
    tests = _SMALL_TESTS if settings.small else _TESTS
    words = ("-m", "pytest", "-q", "-m", "not soak", "-p", "no:cacheprovider")
    vllm = (str(settings.vllm_python),)
    if settings.wheels is not None:
        install = ("-m", "pip", "install", "--no-index", "--find-links", str(settings.wheels), "vllm")
        yield Piece("packages", "install what the engine needs", (str(settings.vllm_python), *install))
    yield Piece("tests", "the embedded engine's tests on the device", (sys.executable, *words, *tests))
    batches = "1" if settings.small else "1,16"
    texts = ("tests/vllm/test_engine.py", "-k", "texts_are and llama" if settings.small else "texts_are")
    # vLLM's own imports warn
    yield Piece(
        "text",
        "texts of a target that vLLM runs are transformers'",
        (*vllm, *words, "-W", "default", *texts),
    )
    common = ("--batch", batches, "--temperature", "0")
    # vLLM's own loop takes the GPU for itself, so no services of ours run beside it.
    yield _bench(
        settings,
        "draft",
        "a separate draft, with targets and drafts that vLLM runs",
        *(*common, "--engine", "vllm", "--contenders", "target-alone,speculative"),
    )
    yield _bench(
        settings,
        "vllm",
        "vLLM's own loop: alone, with the draft model, with n-gram",
        *(*common, "--contenders", "vllm,vllm-draft,vllm-ngram"),
    )
    absent = "" if settings.head is not None or settings.small else _NO_HEAD
    yield _bench(
        settings,
        "head",
        "vLLM's EAGLE-3 in the target's steps",
        *(*common, "--engine", "vllm", "--contenders", "target-alone,eagle3"),
        absent=absent,
    )
    yield _bench(
        settings,
        "vllm-head",
        "vLLM's own loop with EAGLE-3",
        *(*common, "--contenders", "vllm-eagle3"),
        absent=absent,
    )
    yield _bench(
        settings,
        "steps",
        "steps of the embedded engine, beside torch's own",
        *(
            "--engine",
            "tandem",
            "--batch",
            "1",
            "--temperature",
            "0",
            "--steps",
            "--contenders",
            "target-alone",
        ),
    )
    yield _bench(
        settings,
        "paced",
        "the demo pair, paced as such a pair is expected to run",
        *(
            "--batch",
            "1",
            "--temperature",
            "0",
            "--pace",
            "6.5,1.2",
            "--contenders",
            "target-alone,speculative",
        ),
        pair="demo",
    )


def _bench(
    settings: CampaignSettings, name: str, purpose: str, *words: str, absent: str = "", pair: str = ""
) -> Piece:
    size = (
        ("--rounds", "1", "--max-tokens", "8") if settings.small else ("--rounds", "3", "--max-tokens", "128")
    )
    head = () if settings.head is None else ("--head", str(settings.head))
    command = (
        *(
            sys.executable,
            "-m",
            "benchmarks",
            "--pair",
            pair or ("demo" if settings.small else settings.pair),
        ),
        *("--device", settings.device, "--vllm-python", str(settings.vllm_python)),
        *(("--vllm-eager", "--threads", "1") if settings.small else ()),
        *("--no-prefix", "--no-phases", *size, *head, *words),
    )
    return Piece(name, purpose, command, absent)


def read_measured(results: Path) -> set[str]:
    """Names of the pieces that a file has a good record of.

    Raises:
        ConfigurationError: A line of it is no record.
    """
    if not results.is_file():
        return set()
    good = set()
    for number, line in enumerate(results.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            if record["exit_code"] == 0:
                good.add(record["piece"])
        except (ValueError, KeyError, TypeError):
            raise ConfigurationError(
                f"--results is {results}, and its line {number} is no record of a piece; name another file"
            ) from None
    return good


def measure(piece: Piece, settings: CampaignSettings) -> dict[str, Any]:
    """The record of a piece: what it reported, how it ended, and the last that it said."""
    record: dict[str, Any] = {"piece": piece.name, "purpose": piece.purpose}
    if piece.absent:
        return {**record, "exit_code": None, "said": [piece.absent]}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder:
        report = Path(folder) / "report.json"
        log = Path(folder) / "log"
        is_bench = "benchmarks" in piece.command
        command = [*piece.command, *(("--json", str(report)) if is_bench else ())]
        code = _run(command, log, settings)
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SAID_LINES:]
        found = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else None
    return {
        **record,
        "command": " ".join(piece.command),
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 1),
        "exit_code": code,
        "report": found,
        "said": said,
    }


def _run(command: Sequence[str], log: Path, settings: CampaignSettings) -> int:
    """Exit code of a command; 124, as of `timeout`, where it took too long. What it started ends with it."""
    environment = {**os.environ, "TEST_DEVICE": settings.device}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(settings.piece_seconds)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    """Measure what is missing, and say how each piece ended."""
    with one_sentence():
        settings = load_settings(CampaignSettings, sys.argv[1:], "python -m benchmarks.gpu")
        known = set() if settings.only else read_measured(settings.results)
        for piece in pieces(settings):
            if piece.name in known or settings.only not in ("", piece.name):
                continue
            sys.stderr.write(f"{piece.name}: {piece.purpose}\n")
            record = measure(piece, settings)
            with settings.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            sys.stdout.write(f"{piece.name}: {_ending(record)}\n")
            sys.stdout.flush()


def _ending(record: dict[str, Any]) -> str:
    match record["exit_code"]:
        case None:
            return f"left out: {record['said'][0]}"
        case 0:
            return f"measured in {record['seconds']:g} s"
        case 124:
            return f"took longer than {record['seconds']:g} s and was ended"
        case code:
            said = record["said"][-1] if record["said"] else "it said nothing"
            return f"failed with exit code {code}: {said}"


if __name__ == "__main__":
    main()
