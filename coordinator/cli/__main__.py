"""`python -m coordinator.cli`: the `tandem` command where it is not on the path."""

from __future__ import annotations

from coordinator.cli.main import main

if __name__ == "__main__":
    main()
