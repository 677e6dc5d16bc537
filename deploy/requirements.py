"""Print pip's requirements for the project and some of its extras, one per line.

    python requirements.py pyproject.toml engine > requirements.txt

An image installs these before the project itself, so that a change of the code keeps the large layers.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The project's dependencies and those of the extras."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    return sorted(
        [
            *project["dependencies"],
            *(line for extra in extras for line in project["optional-dependencies"][extra]),
        ]
    )


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path(sys.argv[1]), sys.argv[2:])) + "\n")
