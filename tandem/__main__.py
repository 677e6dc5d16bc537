"""The `tandem` command: the coordinator lies beside this package in a checkout, and in it where it is installed."""

from __future__ import annotations

from tandem_coordinator.cli.main import main

if __name__ == "__main__":
    main()
