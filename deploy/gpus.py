"""Print a compose file that takes the place of deploy/compose.gpu.yml, with other GPUs.

    python deploy/gpus.py --target 0,1 --target 2,3 --draft 4 > gpus.yml
    docker compose -f docker-compose.yml -f gpus.yml up

Each --target and each --draft is a replica, with the GPUs that its model is split over. `docker compose up --scale`
would give every replica the same ones, so each further replica here is a service: a copy of `target_service` or
`draft_service` under the same network alias, which is how the coordinator finds replicas.
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

FOLDER = Path(__file__).resolve().parent


def replicas(
    compose: Mapping[str, Any], overlay: Mapping[str, Any], gpus: Mapping[str, Sequence[Sequence[str]]]
) -> dict[str, Any]:
    """The services to change and to add.

    Args:
        compose: The content of docker-compose.yml.
        overlay: The content of deploy/compose.gpu.yml.
        gpus: By role, target and draft, the GPUs of each replica, by number or GPU-... id.
    """
    services: dict[str, Any] = {}
    for role, each in gpus.items():
        name = f"{role}_service"
        for number, ids in enumerate(each, start=1):
            service = copy.deepcopy(overlay["services"][name])
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            device["device_ids"] = list(ids)
            service["environment"] = {f"TANDEM_{role.upper()}_TENSOR_PARALLEL_SIZE": len(ids)}
            if number == 1:
                services[name] = service
                continue
            whole = compose["services"][name] | service
            whole["environment"] = compose["services"][name]["environment"] | service["environment"]
            whole["volumes"] = compose["services"][name]["volumes"] + service["volumes"]
            # The first replica's service builds the image.
            del whole["build"]
            services[f"{name}_{number}"] = whole
    return {"services": services}


def main(arguments: Sequence[str]) -> None:
    """Print the compose file, or one sentence about an error in the GPUs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for role in ("target", "draft"):
        parser.add_argument(
            f"--{role}", action="append", required=True, metavar="GPU,...", help=f"GPUs of a {role}"
        )
    options = parser.parse_args(arguments)
    gpus = {role: [ids.split(",") for ids in getattr(options, role)] for role in ("target", "draft")}
    every = [gpu for replica in (*gpus["target"], *gpus["draft"]) for gpu in replica]
    if unknown := [gpu for gpu in every if not gpu.isdecimal() and not gpu.startswith(("GPU-", "MIG-"))]:
        parser.error(
            f"GPU is {unknown[0]!r}; it must be a number as nvidia-smi has it, or an id: GPU-... or MIG-..."
        )
    if twice := sorted({gpu for gpu in every if every.count(gpu) > 1}):
        parser.error(f"GPU {', '.join(twice)} is named twice; each replica must have its own")
    files = (FOLDER.parent / "docker-compose.yml", FOLDER / "compose.gpu.yml")
    compose, overlay = (yaml.safe_load(file.read_text(encoding="utf-8")) for file in files)
    sys.stdout.write(yaml.dump(replicas(compose, overlay, gpus), Dumper=_Dumper, sort_keys=False))


class _Dumper(yaml.SafeDumper):
    """Repeats shared parts for each service instead of using anchors, since the file is generated."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        return True


if __name__ == "__main__":
    main(sys.argv[1:])
