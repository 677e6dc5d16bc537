"""`python -m benchmarks` is `tandem bench`."""

from __future__ import annotations

import sys

from benchmarks import bench
from benchmarks.load import generator
from coordinator.cli.serve import sends_load

if __name__ == "__main__":
    run = generator.run if sends_load(sys.argv[1:]) else bench.run
    run(sys.argv[1:], "python -m benchmarks")
