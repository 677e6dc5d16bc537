"""Names of devices: MAX says gpu, torch says cuda, and both mean the same here."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_DEVICE = re.compile(r"cpu|(?:cuda|gpu)(:\d+)?")

DEVICES = "cpu, cuda, cuda:N, gpu or gpu:N"
"""Accepted names of a device."""


def as_torch(name: str) -> str:
    """The device as torch names it: gpu:1 is cuda:1.

    Raises:
        ValueError: there is no device of that name.
    """
    if _DEVICE.fullmatch(name) is None:
        raise ValueError(f"it must be {DEVICES}")
    return name.replace("gpu", "cuda")


Device = Annotated[str, AfterValidator(as_torch)]
"""A device as torch names it, whichever name it was given by."""
