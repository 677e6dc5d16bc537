"""Parts that several tests of rules share."""

from __future__ import annotations

from tandem.types import (
    NextToken,
)

BONUS, RECOVERED, NONE = NextToken.BONUS, NextToken.RECOVERED, NextToken.NONE
