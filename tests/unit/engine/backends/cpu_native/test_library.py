"""Compiled kernels come with the installation or from a compiler; a library with another interface is not used."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tandem.engine.backends.cpu_native.backend import load_kernels
from tandem.engine.backends.cpu_native.library.build import (
    SOURCE,
    TARGETS,
    WARNING_FLAGS,
    BuildError,
    built_kernels,
    bundled_kernels,
)
from tandem.engine.backends.cpu_native.library.kernels import EXPECTED, Kernels, check_interface
from tests.bundled_kernels import CAN_COMPILE, TARGET
from tests.end_to_end.processes import run

needs_compiler = pytest.mark.skipif(not CAN_COMPILE, reason="there is no C++ compiler for x86-64")

_CPU = torch.device("cpu")
_AVX2 = frozenset(
    ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm",
     "movbe", "xsave", "sse2", "aes")
)  # fmt: skip
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of objects of an installation on a machine without a compiler; still empty."""
    folder = tmp_path / "objects"
    folder.mkdir()
    monkeypatch.setattr(
        "tandem.engine.backends.cpu_native.backend.bundled_kernels", partial(bundled_kernels, folder)
    )
    return folder


@pytest.fixture
def without_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _small_library(folder: Path, source: str) -> Path:
    (folder / "small.cpp").write_text(source, encoding="utf-8")
    library = folder / "small.so"
    subprocess.run(["c++", "-shared", "-fPIC", str(folder / "small.cpp"), "-o", str(library)], check=True)
    return library


def _library_that_says(folder: Path, numbers: list[int]) -> Path:
    listed = ", ".join(map(str, numbers))
    return _small_library(
        folder,
        f"""
        extern "C" long tandem_interface(long* numbers, long room) {{
            const long own[] = {{{listed}}};
            for (long i = 0; i < room && i < {len(numbers)}; i++) numbers[i] = own[i];
            return {len(numbers)};
        }}""",
    )


@pytest.mark.parametrize(
    ("flags", "present", "expected"),
    [
        (_AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}, list(TARGETS), "amx-bf16"),
        (_AVX512 | {"avx512_bf16", "amx_tile"}, list(TARGETS), "avx512-bf16"),
        (_AVX512 | {"avx512_bf16"}, ["x86-64-v3", "avx512"], "avx512"),
        (_AVX512, list(TARGETS), "avx512"),
        (_AVX512 - {"avx512vl"}, list(TARGETS), "x86-64-v3"),
        (_AVX2, list(TARGETS), "x86-64-v3"),
        (_AVX2, ["avx512"], None),
        (_AVX2 - {"fma"}, list(TARGETS), None),
        (frozenset[str](), list(TARGETS), None),
    ],
)
def test_the_fastest_kernels_that_the_processor_can_run_are_chosen(
    flags: frozenset[str], present: list[str], expected: str | None, tmp_path: Path
) -> None:
    for name in present:
        (tmp_path / f"{name}.so").touch()
    assert bundled_kernels(tmp_path, flags) == (expected and tmp_path / f"{expected}.so")


@needs_compiler
@pytest.mark.parametrize(
    ("target", "macro"),
    [
        ("x86-64-v3", "__AVX2__"),
        ("avx512", "__AVX512F__"),
        ("avx512-bf16", "__AVX512BF16__"),
        ("amx-bf16", "__AMX_BF16__"),
    ],
)
def test_the_sources_compile_without_a_warning_for_each_processor(target: str, macro: str) -> None:
    command = ["c++", "-std=c++17", *TARGETS[target], "-fopenmp"]
    defined = run(*command, "-dM", "-E", "-x", "c++", "/dev/null")
    assert f"#define {macro} 1" in defined.stdout
    done = run(*command, *WARNING_FLAGS, "-fsyntax-only", str(SOURCE))
    assert (done.returncode, done.stderr) == (0, "")


@needs_compiler
def test_an_installation_brings_its_kernels_where_there_is_no_compiler(
    installed: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(built_kernels(), installed / f"{TARGET}.so")
    request.getfixturevalue("without_compiler")
    with caplog.at_level(logging.WARNING):
        kernels = load_kernels(_CPU, torch.bfloat16)
    assert kernels.library == installed / f"{TARGET}.so"
    assert not caplog.records


@needs_compiler
@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ([99, *list(EXPECTED.values())[1:]], "interface version 99, must be"),
        ([EXPECTED["interface version"], 8], "size of Linear 8, must be"),
        ([*EXPECTED.values(), 5], f"state {len(EXPECTED) + 1} numbers, must be {len(EXPECTED)}"),
        (list(EXPECTED.values())[:-1], "number of dimensions 0, must be"),
    ],
)
def test_kernels_of_another_interface_are_refused(numbers: list[int], reason: str, tmp_path: Path) -> None:
    library = _library_that_says(tmp_path, numbers)
    with pytest.raises(BuildError, match=reason):
        Kernels(library)


@needs_compiler
def test_a_library_that_states_no_interface_is_refused(tmp_path: Path) -> None:
    library = _small_library(tmp_path, 'extern "C" long tandem_block() { return 16; }')
    with pytest.raises(BuildError, match="do not state their interface version"):
        check_interface(ctypes.CDLL(str(library)))


@needs_compiler
@pytest.mark.parametrize("has_compiler", [True, False])
def test_unusable_kernels_of_an_installation_are_logged_once(
    has_compiler: bool,
    installed: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The compiler makes others; without one, torch computes."""
    _library_that_says(tmp_path, [EXPECTED["interface version"] + 1]).rename(installed / f"{TARGET}.so")
    compiled = built_kernels()
    if not has_compiler:
        request.getfixturevalue("without_compiler")
    with caplog.at_level(logging.WARNING):
        if has_compiler:
            assert load_kernels(_CPU, torch.float32).library == compiled
        else:
            with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
                load_kernels(_CPU, torch.float32)
    (record,) = caplog.records
    assert record.message == "the kernels of this installation are not used"
    assert "another interface: interface version" in vars(record)["reason"]


def _use_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, says: str) -> None:
    """A compiler that makes an empty file, and says what a line of the shell does."""
    compiler = folder / "own-c++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{says}\nfor last; do :; done\n: >"$last"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))


def test_warnings_of_the_compiler_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _use_compiler(monkeypatch, tmp_path, '[ "$1" = -shared ] || echo "kernels.cpp:7: warning: unused" >&2')
    with caplog.at_level(logging.WARNING):
        assert built_kernels(tmp_path / "cache").is_file()
    (record,) = caplog.records
    assert vars(record)["warnings"] == "kernels.cpp:7: warning: unused"


def test_a_wheel_waits_longer_for_its_kernels_than_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine made images without kernels."""
    monkeypatch.setattr("tandem.engine.backends.cpu_native.library.build.START_SECONDS", 0.001)
    _use_compiler(monkeypatch, tmp_path, "sleep 0.1")
    with pytest.raises(BuildError, match="did not run"):
        built_kernels(tmp_path / "cache")
    assert built_kernels(tmp_path / "cache", target=TARGET).is_file()


def test_compiled_kernels_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    _use_compiler(monkeypatch, tmp_path, f'echo "$@" >>{calls}')
    first = built_kernels(tmp_path / "cache")
    compiled = calls.read_text().count("kernels.cpp")
    assert built_kernels(tmp_path / "cache") == first
    assert calls.read_text().count("kernels.cpp") == compiled == 1
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(BuildError, match="others can write to"):
        built_kernels(tmp_path)


_COMPILING = """
import sys
from pathlib import Path
from tandem.engine.backends.cpu_native.library.build import built_kernels

built_kernels(Path(sys.argv[1]))
"""


def test_a_compiler_and_its_processes_end_with_the_service_that_started_it(tmp_path: Path) -> None:
    """Even if the service is killed. The compiler is a script whose child goes on for a minute."""
    started = tmp_path / "started"
    compiler = tmp_path / "slow-c++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\nsleep 60 & echo $$ $! > {started}.part\n'
        f"mv {started}.part {started}\nwait\n"
    )
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", _COMPILING, str(cache)]
    service = subprocess.Popen(command, env=os.environ | {"CXX": str(compiler)})
    try:
        _wait_until(started.is_file)
        pids = [int(pid) for pid in started.read_text().split()]
        assert [_is_running(pid) for pid in pids] == [True, True], "the compiler and its child"
    finally:
        service.kill()
        service.wait()
    _wait_until(lambda: not any(_is_running(pid) for pid in pids))


def _wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(300):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it does not come within 30 s")


def _is_running(pid: int) -> bool:
    """True if a process is there and is no zombie, which waits for somebody to take its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_full_disk_is_noticed_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = tmp_path / "compiled"
    compiler = tmp_path / "fake-c++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\ntouch {compiled}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BuildError, match=r"could not be written: .*No space left on device"):
        built_kernels(tmp_path / "cache")
    assert not compiled.exists()
