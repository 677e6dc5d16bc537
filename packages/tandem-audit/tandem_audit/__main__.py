"""`python -m tandem_audit`, the same as `tandem-audit`."""

from __future__ import annotations

import sys

from tandem_audit.command import main

if __name__ == "__main__":
    sys.exit(main())
