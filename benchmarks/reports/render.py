"""Write charts and tables again from reports: `python -m benchmarks.reports.render benchmarks/results/bench_*.json`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.bench import render

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path, help="reports that `tandem bench --json` wrote")
    render(parser.parse_args().reports)
