"""Render and check kustomizations: `python -m deploy.manifests [FOLDER ...]`, by default all of our overlays.

`-` stands for rendered objects on stdin, for what only kustomize itself renders:

    kubectl kustomize FOLDER | python -m deploy.manifests -

Exits 0 when all is well, 1 with a sentence for each fault.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.manifests.checks import faults
from deploy.manifests.kustomize import documents, render
from deploy.manifests.merge import ManifestError
from deploy.manifests.schemas import KUBERNETES

OVERLAYS = sorted(Path(__file__).resolve().parents[1].joinpath("kubernetes", "overlays").iterdir())


def main(arguments: Sequence[str]) -> None:
    """Check these kustomizations."""
    count = 0
    for folder in [Path(argument) for argument in arguments] or OVERLAYS:
        try:
            objects = documents(sys.stdin.read(), "stdin") if folder == Path("-") else render(folder)
        except ManifestError as error:
            sys.exit(f"error: {error}")
        found = faults(objects)
        count += len(found)
        words = "\n".join(f"  {fault}" for fault in found) or "  no faults"
        sys.stdout.write(f"{folder.name}: {len(objects)} objects, Kubernetes {KUBERNETES}\n{words}\n")
    sys.exit(1 if count else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
