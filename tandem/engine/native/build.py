"""Compiles the kernels for this machine's processor, once: what was compiled is kept and found again."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
_HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
          "-fPIC", "-fopenmp", "-w")  # fmt: skip
_TIMEOUT_SECONDS = 120.0
_CPU_DESCRIPTION = Path("/proc/cpuinfo")
_CPU_LINES = ("model name", "flags", "Features", "CPU part")


class BuildError(Exception):
    """The kernels cannot be compiled here; the text says why. Never leaves the engine."""


def built_kernels(folder: Path | None = None) -> Path:
    """The shared library, compiled now unless it was before.

    Args:
        folder: where it is kept; None for the user's own cache folder.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    compiler = _compiler()
    folder = folder or _default_folder()
    _make_private(folder)
    library = folder / f"kernels-{_fingerprint(compiler)}.so"
    if not library.is_file():
        _compile(compiler, library)
    return library


def _compiler() -> str:
    """The compiler that CXX names, or else the first that is there."""
    named = os.environ.get("CXX")
    for candidate in (named,) if named else _COMPILERS:
        if path := shutil.which(candidate):
            return path
    raise BuildError(f"no C++ compiler: {named or ', '.join(_COMPILERS)} not found")


def _default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "tandem", "kernels")


def _make_private(folder: Path) -> None:
    """Sees to it that nobody else can put anything into the folder: what lies there will be run.

    Raises:
        BuildError: it cannot be made, or others can write there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise BuildError(f"no folder for compiled kernels: {error}; name one with --compile-cache") from None
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise BuildError(f"others can write to {folder}; name another folder with --compile-cache")


def _fingerprint(compiler: str) -> str:
    """Differs whenever the compiled code might: a home folder may be shared by different machines."""
    known = hashlib.sha256()
    for source in (SOURCE, *_HEADERS):
        known.update(source.read_bytes())
    for part in (*_FLAGS, compiler, _run([compiler, "--version"]), platform.machine(), _processor()):
        known.update(part.encode() + b"\0")
    return known.hexdigest()[:16]


def _processor() -> str:
    if not _CPU_DESCRIPTION.is_file():
        return platform.processor()
    lines = _CPU_DESCRIPTION.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(_CPU_LINES)}))


def _compile(compiler: str, library: Path) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            compiled, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
            _run([compiler, *_FLAGS, "-c", str(SOURCE), "-o", str(compiled)])
            # Linked without OpenMP: the runtime that torch has loaded serves. With another, two sets of threads would
            # wait for each other's cores.
            _run([compiler, "-shared", str(compiled), "-o", str(linked)])
            linked.replace(library)
    except OSError as error:
        raise BuildError(f"the kernels could not be written: {error}") from None


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from None
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise BuildError(f"{command[0]} failed: {reason}")
    return done.stdout
