"""Stages of the Dockerfile, built without a container engine: Linux and root are enough.

Every RUN line runs as it is written, in the root of its own stage and with that stage's environment, folder and user.
The base images are stand-ins: the Python that runs the tests under /usr/local, beside this machine's compiler and
shell. Nothing is downloaded: a folder takes the place of the package index. It has real wheels of what builds our own,
and of everything else wheels that hold its name, version and requirements, which is what pip chooses by.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath

from deploy.requirements import requirements
from tests import bundled_kernels
from tests.deploy.images import VENV, Copy, Dockerfile, closure, ignored
from tests.paths import ROOT

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib64")
_SETTINGS = ("passwd", "group", "ld.so.conf", "ld.so.conf.d", "alternatives")
_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
_INDEX = "/packages"
_NOT_COPIED = ("__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages")
"""The base image has none of these either."""
_VLLM_RELEASE = "0.32.0"
_UV = f"""#!/bin/sh
# Stands for uv, with the one command that the Dockerfile gives it.
test "$1 $2 $3" = "pip install --system" || exit 64
shift 3
exec /usr/local/bin/{PYTHON} -m pip install "$@"
"""

_ENTER = """set -e
cd "$1"
mount --bind . .
cd "$1"
mkdir -p .local proc dev tmp packages
mount --bind usr/local .local
for name in $2; do
    if [ ! -L $name ]; then mount --rbind -o ro /$name $name; fi
done
mount --bind .local usr/local
mount --rbind /proc proc
mount --rbind /dev dev
mount --bind "$3" packages
shift 3
exec chroot . "$@"
"""
"""Mounts of its own, and then the command: $1 is the root, $2 names folders of the system, $3 holds the packages."""


class BuildError(Exception):
    """A RUN line of a stage failed."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage up to some line: what its next RUN line finds."""

    root: Path
    environment: dict[str, str]
    workdir: str = "/"
    user: str = "0:0"

    def run(self, line: str, packages: Path) -> subprocess.CompletedProcess[str]:
        """Run a line in the root of the stage, as its user."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        uid, _, gid = self.user.partition(":")
        command = [
            *("/usr/bin/env", "-i", f"--chdir={self.workdir}", *variables),
            *("/usr/bin/setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"),
            *("/bin/sh", "-c", line),
        ]
        names = " ".join(name for name in _SYSTEM if Path("/", name).exists())
        enter = ["unshare", "--mount", "sh", "-c", _ENTER, "sh", str(self.root), names, str(packages)]
        return subprocess.run([*enter, *command], capture_output=True, text=True, check=False)


class Builder:
    """Builds stages of a Dockerfile, each once, in a folder; another builder may have made the base images."""

    def __init__(
        self,
        folder: Path,
        dockerfile: Dockerfile | None = None,
        arguments: Mapping[str, str] | None = None,
        bases: Path | None = None,
    ) -> None:
        self._folder = folder
        self.bases = bases or folder / "bases"
        self._dockerfile = dockerfile or Dockerfile(ROOT / "Dockerfile")
        self._arguments = arguments or {}
        self._built: dict[str, Stage] = {}
        self._packages = self.bases / "packages"
        lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        self._ignored = [line for line in lines if line and not line.startswith("#")]

    def build(self, name: str) -> Stage:
        """Build the stage of this name, and those that it needs; a BuildError has the output of a failed line."""
        if name not in self._built:
            stage = self._dockerfile.stages[name]
            root = self._folder / name
            base = self.build(stage.base) if stage.base in self._dockerfile.stages else self._base(stage.base)
            shutil.copytree(base.root, root, symlinks=True)
            arguments: dict[str, str] = {}
            current = replace(base, root=root)
            for keyword, words in stage.instructions:
                current = self._follow(name, current, arguments, keyword, words)
            self._built[name] = current
        return self._built[name]

    def run(self, name: str, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line in a finished stage, as its user."""
        return self.build(name).run(line, self._packages)

    def _follow(self, name: str, stage: Stage, arguments: dict[str, str], keyword: str, words: str) -> Stage:
        """The stage after one instruction."""
        match keyword:
            case "ENV":
                return replace(stage, environment=stage.environment | _assignments(words, stage.environment))
            case "ARG":
                argument, _, default = words.partition("=")
                arguments[argument] = self._arguments.get(argument, default)
            case "WORKDIR":
                stage = replace(stage, workdir=words.replace("python3.12", PYTHON))
                (stage.root / stage.workdir[1:]).mkdir(parents=True, exist_ok=True)
            case "USER":
                return replace(stage, user=words)
            case "COPY":
                (copy,) = self._dockerfile.copies_of([words])
                self._copy(stage, copy)
            case "RUN":
                # A cache would only make it faster.
                line = re.sub(r"--mount=\S+\s+", "", words)
                inside = replace(stage, environment=arguments | stage.environment)
                done = inside.run(line, self._packages)
                if done.returncode != 0:
                    raise BuildError(f"stage {name}: RUN {line}\n{done.stdout}{done.stderr}")
            case _:
                pass  # says how a container starts
        return stage

    def _copy(self, stage: Stage, copy: Copy) -> None:
        origin = ROOT if copy.stage is None else self.build(copy.stage).root
        sources = [path for each in copy.sources for path in sorted(origin.glob(each.lstrip("/")))]
        assert len(sources) >= len(copy.sources), (
            f"{copy.sources} are not all in {copy.stage or 'the checkout'}"
        )
        place = stage.root / PurePosixPath(stage.workdir, copy.destination).as_posix()[1:]
        for source in sources:
            is_excluded = ignored(PurePosixPath(source.relative_to(origin)), self._ignored)
            assert copy.stage is not None or not is_excluded, f"{source} does not reach the builder"
            if source.is_dir():
                shutil.copytree(source, place, symlinks=True, ignore=self._excluded(copy), dirs_exist_ok=True)
            else:
                into = place / source.name if copy.destination.endswith(("/", ".")) else place
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, into)

    def _excluded(self, copy: Copy) -> Callable[[str, list[str]], list[str]] | None:
        """Skips the paths that .dockerignore keeps from the builder, which has all of another stage."""
        if copy.stage is not None:
            return None

        def excluded(at: str, names: list[str]) -> list[str]:
            paths = [PurePosixPath(at, name).relative_to(ROOT) for name in names]
            return [path.name for path in paths if ignored(path, self._ignored)]

        return excluded

    def _base(self, image: str) -> Stage:
        """The stand-in for a base image."""
        root = self.bases / re.sub(r"[^a-z0-9]+", "-", image)
        environment = {"PATH": _PATH, "HOME": "/root"} | bundled_kernels.ENVIRONMENT
        stage = Stage(root, environment)
        if root.exists():
            return stage
        if not self._packages.exists():
            fill_index(self._packages)
        (root / "etc").mkdir(parents=True)
        for name in _SYSTEM:
            if Path("/", name).is_symlink():
                (root / name).symlink_to(os.readlink(Path("/", name)))
        for name in _SETTINGS:
            path = Path("/etc", name)
            if path.is_dir():
                shutil.copytree(path, root / "etc" / name, symlinks=True)
            elif path.exists():
                shutil.copy2(path, root / "etc" / name)
        (root / "etc" / "pip.conf").write_text(
            f"[global]\nno-index = true\nno-cache-dir = true\nfind-links = {_INDEX}\n", encoding="utf-8"
        )
        _copy_python(root / "usr" / "local")
        if "vllm" in image:
            (root / "usr" / "local" / "bin" / "python").unlink()  # that image has python3 alone
            (root / "usr" / "local" / "bin" / "uv").write_text(_UV, encoding="utf-8")
            (root / "usr" / "local" / "bin" / "uv").chmod(0o755)
        done = stage.run("ldconfig", self._packages)
        assert done.returncode == 0, done.stderr
        return stage


def _assignments(words: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an ENV line, which may name those before it."""
    pairs = (word.split("=", 1) for word in words.split())
    return {
        name: re.sub(r"\$(\w+)", lambda match: environment.get(match[1], ""), value) for name, value in pairs
    }


def _copy_python(local: Path) -> None:
    """This Python and its pip, as the base image has them: without compiled modules."""
    binaries = local / "bin"
    binaries.mkdir(parents=True)
    shutil.copy2(Path(sys.base_prefix, "bin", PYTHON).resolve(), binaries / PYTHON)
    for name in ("python", "python3"):
        (binaries / name).symlink_to(PYTHON)
    library = local / "lib" / PYTHON
    stdlib = sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix})
    shutil.copytree(stdlib, library, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED, "config-*"))
    for shared in Path(str(sysconfig.get_config_var("LIBDIR"))).glob(f"lib{PYTHON}*.so.*"):
        shutil.copy2(shared, local / "lib" / shared.name)
    pip = distribution("pip")
    for file in pip.files or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            place = library / "site-packages" / file
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path(str(pip.locate_file(file))), place)


def fill_index(folder: Path) -> None:
    """Make wheels of all that the images install, at the versions of the environment that runs the tests."""
    folder.mkdir(parents=True)
    pyproject = ROOT / "pyproject.toml"
    build_lines = tomllib.loads(pyproject.read_text(encoding="utf-8"))["build-system"]["requires"]
    real = closure(build_lines)
    for name in real:
        _make_wheel(folder, name, has_content=True)
    for name in closure(requirements(pyproject, ["engine"])) - real:
        _make_wheel(folder, name, has_content=False)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {_VLLM_RELEASE}\n"
    _write_wheel(folder, f"vllm-{_VLLM_RELEASE}", {"METADATA": metadata}, [])


def _make_wheel(folder: Path, name: str, *, has_content: bool) -> None:
    package = distribution(name)
    stem = f"{re.sub(r'[-_.]+', '_', package.metadata['Name'])}-{package.version}"
    metadata = {"METADATA": package.read_text("METADATA") or ""}
    if not has_content:
        _write_wheel(folder, stem, metadata, [])
        return
    metadata["entry_points.txt"] = package.read_text("entry_points.txt") or ""
    files = [
        (str(file), Path(str(package.locate_file(file))))
        for file in package.files or []
        if ".." not in file.parts and "__pycache__" not in file.parts and ".dist-info" not in file.parts[0]
    ]
    _write_wheel(folder, stem, metadata, files)


def _write_wheel(folder: Path, stem: str, metadata: Mapping[str, str], files: list[tuple[str, Path]]) -> None:
    described = f"{stem}.dist-info"
    tag = "py3-none-any"
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{described}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        for name, text in metadata.items():
            wheel.writestr(f"{described}/{name}", text)
        for name, path in files:
            wheel.write(path, name)
        listed = [*wheel.namelist(), f"{described}/RECORD"]
        wheel.writestr(f"{described}/RECORD", "".join(f"{name},,\n" for name in listed))


def installed(stage: Stage) -> Iterator[str]:
    """The names of the packages in the environment of a stage."""
    for path in (stage.root / VENV[1:] / "lib" / PYTHON / "site-packages").glob("*.dist-info"):
        (name,) = re.findall(r"^Name: (.*)$", (path / "METADATA").read_text(encoding="utf-8"), re.MULTILINE)
        yield re.sub(r"[-_.]+", "-", name).lower()
