"""`python -m benchmarks` is `tandem bench`."""

from __future__ import annotations

import sys

from benchmarks.bench import run

if __name__ == "__main__":
    run(sys.argv[1:], "python -m benchmarks")
