"""Devices of the models that `tandem up` starts, their shares of one accelerator, and its HTTP port."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.config.devices import as_torch
from tandem.errors import ConfigurationError

TARGET_SHARE = 0.65
DRAFT_SHARE = 0.25
"""Default shares where both models are on one accelerator. The rest is for CUDA itself and for captured graphs."""

HTTP_PORT = 8000
"""Default HTTP port, used unless it is taken."""

_UTILIZATION = "DEVICE_MEMORY_UTILIZATION"


@dataclass(frozen=True, slots=True)
class ModelPlacement:
    """Where one model runs."""

    device: str
    """As torch names it."""
    memory_utilization: float | None
    """Share of the device's memory; None where the service's own default or its environment decides."""


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options of `tandem up` about devices."""

    device: str = "cpu"
    """For both models, unless one has its own."""
    target_device: str | None = None
    draft_device: str | None = None
    target_memory_utilization: float | None = None
    draft_memory_utilization: float | None = None


def place(
    options: DeviceOptions, *, has_draft_model: bool, in_file: Mapping[str, object]
) -> tuple[ModelPlacement, ModelPlacement]:
    """Where the target and the draft run.

    Args:
        options: what was asked for.
        has_draft_model: false for drafting without a model, which needs no device.
        in_file: options of the config file that the draft service reads.

    Raises:
        ConfigurationError: a device or a share is none, or the shares are more than one device.
    """
    device = _device("--device", options.device)
    target = _device("--target-device", options.target_device) or device
    named = _device("--draft-device", options.draft_device)
    draft = named or _device("draft_devices", in_file.get("draft_devices")) or device
    shares = {"target": options.target_memory_utilization, "draft": options.draft_memory_utilization}
    for name, share in shares.items():
        if share is not None and not 0 < share <= 1:
            raise ConfigurationError(
                f"--{name}-memory-utilization is {share:g}; it must be above 0 and at most 1"
            )
    if has_draft_model and _is_one_accelerator(target, draft):
        _divide(shares, target, in_file)
    return ModelPlacement(target, shares["target"]), ModelPlacement(draft, shares["draft"])


def _device(option: str, name: object) -> str:
    """The device as torch names it; empty where none is named."""
    if name is None:
        return ""
    try:
        return as_torch(str(name))
    except ValueError as error:
        raise ConfigurationError(f"{option} is {str(name)!r}: {error}") from None


def _is_one_accelerator(target: str, draft: str) -> bool:
    first, second = (f"{name}:0" if name == "cuda" else name for name in (target, draft))
    return first == second != "cpu"


def _divide(shares: dict[str, float | None], device: str, in_file: Mapping[str, object]) -> None:
    """Gives each model a share, unless it has one from elsewhere."""
    defaults = {"target": TARGET_SHARE, "draft": DRAFT_SHARE}
    for name, default in defaults.items():
        is_set = any(os.environ.get(f"TANDEM_{prefix}{_UTILIZATION}") for prefix in (f"{name.upper()}_", ""))
        is_in_file = name == "draft" and "device_memory_utilization" in in_file
        if shares[name] is None and not is_set and not is_in_file:
            shares[name] = default
    if (total := sum(share for share in shares.values() if share is not None)) > 1:
        raise ConfigurationError(
            f"--target-memory-utilization is {shares['target']:g} and --draft-memory-utilization is "
            f"{shares['draft']:g}, {total:g} of {device} together; it must be at most 1"
        )


def http_port(wanted: int | None) -> int:
    """The port for HTTP: the wanted one, or the usual one if it is free, or 0 for any."""
    if wanted is not None:
        return wanted
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", HTTP_PORT))
        except OSError:
            return 0  # any free one
    return HTTP_PORT
