"""`python -m deploy.wheels FOLDER`: build the wheels, and run the first command of each in an empty environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLUG_IN = """
from importlib.metadata import version
import tandem_coordinator.drafting
print("tandem-vllm", version("tandem-vllm"))
"""
"""The plug-in has no command: vLLM imports it, and brings the torch that it needs. This imports what it stands on."""
FIRST_COMMANDS = {
    ".": ("tandem", "--version"),
    "packages/tandem-audit": ("tandem-audit", "--version"),
    "packages/tandem-vllm": ("python", "-c", PLUG_IN),
}
"""By the folder of each wheel."""


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of a source folder into another one."""
    before = set(folder.glob("*.whl"))
    run_pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel


def run_first_command(wheel: Path, command: tuple[str, ...], environment: Path) -> str:
    """Install a wheel with its requirements into an empty environment; what the command prints there."""
    venv.create(environment, with_pip=False)
    programs = environment / "bin"
    beside = ("--find-links", str(wheel.parent))
    run_pip("--python", str(programs / "python"), "install", "--no-compile", *beside, str(wheel))
    program, *words = command
    # From an empty folder and without the variables that add to the path: nothing of a checkout is imported.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ran = subprocess.run(
        (str(programs / program), *words),
        cwd=environment,
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


def run_pip(*words: str) -> None:
    """Run pip, which says what is wrong by itself."""
    subprocess.run(
        (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words), check=True
    )


def main() -> None:
    """Build all, and show what each first command prints."""
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    built = [(build_wheel(ROOT / place, folder), command) for place, command in FIRST_COMMANDS.items()]
    for wheel, command in built:
        with tempfile.TemporaryDirectory(prefix="tandem-wheel-") as environment:
            shown = run_first_command(wheel.absolute(), command, Path(environment))
        sys.stdout.write(f"{wheel.name}: {shown}\n")


if __name__ == "__main__":
    main()
