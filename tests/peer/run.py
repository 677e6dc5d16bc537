"""Fetches the newest source of vLLM and runs the tests of its API against `tandem up`.

Its tests are fetched when this runs and are never kept in the repository: they belong to vLLM. Arguments are passed on
to pytest; those that are paths below `tests/entrypoints` choose among the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.peer.listed import FOLDERS

SOURCE_VARIABLE = "PEER_SOURCE"
"""Names the folder of an unpacked source, which is then used in place of the newest one."""
CACHE = Path(".peer")
TESTS = Path("tests") / "entrypoints"


def find_newest() -> str:
    """Return the newest version that the package index has."""
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    first_line = shown.stdout.partition("\n")[0]
    _, _, version = first_line.partition("(")
    if not version:
        sys.exit(
            f"error: the package index does not say which version of vLLM is the newest: {shown.stderr[-500:]}"
        )
    return version.rstrip(")")


def fetch_source() -> Path:
    """Return the folder of the newest source, which is fetched unless an earlier run has done so."""
    version = find_newest()
    kept = CACHE / f"vllm-{version}"
    if kept.is_dir():
        return kept
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        command += ["--no-build-isolation", "--no-clean", "--dest", folder, f"vllm=={version}"]
        # pip unpacks the source into the folder for temporary files, and then asks for metadata, which nobody needs
        # here and which fails where the packages are missing that build vLLM.
        environment = os.environ | {"TMPDIR": str(Path(folder).absolute())}
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found = sorted(Path(folder).glob(f"pip-*/vllm_*/{TESTS}"))
        if not found:
            sys.exit(f"error: pip cannot fetch the source of vLLM {version}: {shown.stderr[-500:]}")
        found[0].parents[1].rename(kept)
    return kept


def main() -> None:
    """Run the tests; the exit status is pytest's."""
    given = os.environ.get(SOURCE_VARIABLE)
    source = Path(given) if given else fetch_source()
    source = source.absolute()
    arguments = sys.argv[1:]
    if not any(each.startswith(str(TESTS)) for each in arguments):
        arguments += [str(TESTS / folder) for folder in FOLDERS]
    command = [sys.executable, "-P", "-m", "pytest", "-p", "tests.peer.plugin", "--noconftest"]
    command += [
        "-c",
        os.devnull,
        "--rootdir",
        str(source),
        "-o",
        "asyncio_mode=strict",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-W", "ignore", "--timeout", "600", "--tb", "short", "-q", *arguments]
    environment = os.environ | {SOURCE_VARIABLE: str(source), "PYTHONPATH": str(Path.cwd())}
    ended = subprocess.run(command, cwd=source, env=environment, check=False)
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
