"""Write charts and tables again from reports: `python -m benchmarks.render benchmarks/results/bench_*.json`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.bench import render

if __name__ == "__main__":
    render([Path(name) for name in sys.argv[1:]])
