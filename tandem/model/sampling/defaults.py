"""Sampling defaults, as a model's generation_config.json or an option names them.

`do_sample` is not read, as in vLLM: the parameters that a file names hold whatever it says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tandem.model.types import SamplingDefaults
from tandem.model_sources.files import read_object, refusal

GENERATION_CONFIG_FILE = "generation_config.json"
DEFAULT_NAMES = tuple(each.name for each in fields(SamplingDefaults))
_WHOLE_NUMBERS = {"top_k": -1, "max_new_tokens": 1}
"""Parameters that are whole numbers, and the lowest of each; of `top_k` -1 keeps all tokens, as 0 does."""
_MAX_WHOLE_NUMBER = 2**31 - 1


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """The defaults in a folder's generation_config.json, which must be there."""
    path = folder / GENERATION_CONFIG_FILE
    content = read_object(path, "sampling defaults are read from it")
    try:
        return SamplingDefaults(**parameters({name: content.get(name) for name in DEFAULT_NAMES}))
    except ValueError as error:
        raise refusal(path, str(error)) from None


def parameters(values: Mapping[str, object]) -> dict[str, Any]:
    """The values of parameters that JSON names, of the right types; a ValueError completes a sentence about where they
    are from."""
    return {name: _parameter(name, value) for name, value in values.items()}


def _parameter(name: str, value: object) -> float | int | None:
    if value is None:
        return None
    number = _number(value)
    if number is None:
        raise ValueError(f"has {name} {_show(value)}; it must be a finite number")
    low = _WHOLE_NUMBERS.get(name)
    if low is None:
        return number
    if not (number.is_integer() and low <= number <= _MAX_WHOLE_NUMBER):
        raise ValueError(
            f"has {name} {_show(value)}; it must be a whole number from {low} to {_MAX_WHOLE_NUMBER}"
        )
    return max(int(number), 0)


def _show(value: object) -> str:
    return json.dumps(value)[:60]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
