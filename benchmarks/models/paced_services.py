"""A service whose steps take a minimum time: `python -m benchmarks.models.paced_services --role target --pace ...`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import draft_service.proposers.standalone as standalone
import target_service.verifier as verifier
from benchmarks.models.pace import Pace
from draft_service.__main__ import run as run_draft
from target_service.__main__ import run as run_target


def main(arguments: list[str]) -> None:
    """Start the service, and serve until a signal ends it."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--role", choices=("target", "draft"), required=True)
    parser.add_argument("--pace", type=Pace.from_text, required=True)
    options, others = parser.parse_known_args(arguments)
    pace: Pace = options.pace
    load_verifier, load_standalone = verifier.load_verifier, standalone.load_standalone

    def paced_verifier(settings: Any, on_step: Any = None, on_failure: Any = None) -> Any:
        return load_verifier(settings, pace.paced("target", on_step), on_failure)

    def paced_standalone(settings: Any, on_step: Any = None, on_failure: Any = None) -> Any:
        return load_standalone(settings, pace.paced("draft", on_step), on_failure)

    # The services look these up by name when they load.
    verifier.load_verifier = paced_verifier
    standalone.load_standalone = paced_standalone
    (run_target if options.role == "target" else run_draft)(others)


if __name__ == "__main__":
    main(sys.argv[1:])
