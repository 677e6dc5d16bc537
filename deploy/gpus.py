"""Print a compose file with further replicas of the profile gpu, each on a GPU of its own.

    python deploy/gpus.py --targets 2,3 --drafts 4 > gpus.yml
    docker compose -f docker-compose.yml -f gpus.yml --profile gpu up

`docker compose up --scale` gives every replica of a service the same GPU, so each further replica here is a service:
a copy of `target_service_gpu` or `draft_service_gpu` under the same network alias, which is how the coordinator finds
replicas.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import yaml
except ModuleNotFoundError:
    sys.exit(
        "error: this script needs PyYAML; run it with .venv/bin/python after `make setup`, or: pip install pyyaml"
    )

COMPOSE_FILE = Path(__file__).resolve().parents[1] / "docker-compose.yml"


def further_replicas(compose: Mapping[str, Any], gpus: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The services to add.

    Args:
        compose: The content of docker-compose.yml.
        gpus: For each service to copy, the GPUs of its further replicas, by number or GPU-... id.
    """
    services: dict[str, Any] = {}
    for name, ids in gpus.items():
        for number, gpu in enumerate(ids, start=2):
            service = copy.deepcopy(compose["services"][name])
            # The first replica's service builds the image.
            del service["build"]
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            device["device_ids"] = [gpu]
            services[f"{name}_{number}"] = service
    return {"services": services}


def main(arguments: Sequence[str]) -> None:
    """Print the compose file, or one sentence about an error in the GPUs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", default="", metavar="GPU,...", help="GPUs of further targets")
    parser.add_argument("--drafts", default="", metavar="GPU,...", help="GPUs of further drafts")
    options = parser.parse_args(arguments)
    gpus = {
        "target_service_gpu": [gpu for gpu in options.targets.split(",") if gpu],
        "draft_service_gpu": [gpu for gpu in options.drafts.split(",") if gpu],
    }
    every = [gpu for ids in gpus.values() for gpu in ids]
    if not every:
        parser.error("no GPUs are named; give --targets, --drafts or both")
    if unknown := [gpu for gpu in every if not gpu.isdecimal() and not gpu.startswith(("GPU-", "MIG-"))]:
        parser.error(
            f"GPU is {unknown[0]}; it must be a number as nvidia-smi has it, or an id: GPU-... or MIG-..."
        )
    if twice := sorted({gpu for gpu in every if every.count(gpu) > 1}):
        parser.error(f"GPU {', '.join(twice)} is named twice; each replica must have one of its own")
    compose = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))
    sys.stdout.write(yaml.dump(further_replicas(compose, gpus), Dumper=_WithoutAnchors, sort_keys=False))


class _WithoutAnchors(yaml.SafeDumper):
    """Repeats shared parts for each service instead of using anchors, since the file is generated."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        return True


if __name__ == "__main__":
    main(sys.argv[1:])
