"""`python -m benchmarks` is `tandem bench`."""

from __future__ import annotations

import sys

from benchmarks import bench
from tandem_coordinator.cli.serve import sends_load
from tandem_load import generator

if __name__ == "__main__":
    run = generator.run if sends_load(sys.argv[1:]) else bench.run
    run(sys.argv[1:], "python -m benchmarks")
