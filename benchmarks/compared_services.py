"""The services behind the contenders, each a process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.services import service
from coordinator.cli.up import DRAFT_SHARE, TARGET_SHARE
from tandem.config.names import checkpoint_method

_SHARES = {"target": TARGET_SHARE, "draft": DRAFT_SHARE}
"""Of one GPU's memory, where both models are on it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Base class of contenders."""

    target: Path
    draft: Path
    dtype: str
    threads: int
    device: str
    """Of both models, unless the draft has one of its own."""
    max_length: int
    """Longest sequence, prompt and completion together."""
    max_sequences: int
    num_speculative_tokens: int
    logs: Path
    """Folder for what contenders write to stderr."""
    vllm_python: Path | None = None
    max_python: Path | None = None
    pace: str = ""
    """Minimum duration of steps; empty: none."""
    rule: str = ""
    """rejection_sampling_strategy of Tandem's contenders; empty: the default."""
    draft_device: str = ""
    """Empty: the target's."""
    delay_ms: float = 0.0
    """Delay between the coordinator and each service, one way."""
    head: Path | None = None
    """Folder of a drafting head for the target; None for those bundled with it."""

    def head_folder(self, method: str) -> Path | None:
        """The folder of the target's head for a drafting method; None if there is none."""
        folder = self.target.parent / method if self.head is None else self.head
        return folder if folder.is_dir() and checkpoint_method(folder) == method else None

    def as_dict(self) -> dict[str, Any]:
        """For a peer."""
        return {
            "target": str(self.target),
            "draft": str(self.draft),
            "dtype": self.dtype,
            "threads": self.threads,
            "device": self.device,
            "max_length": self.max_length,
            "max_sequences": self.max_sequences,
            "num_speculative_tokens": self.num_speculative_tokens,
            "pace": self.pace,
            "rule": self.rule,
        }


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of the three services."""

    target: str
    draft: str
    coordinator: str
    ahead: str
    """Address of a second coordinator of the same services that drafts ahead."""


@asynccontextmanager
async def services(setup: Setup, *, prefix_caching: bool) -> AsyncIterator[Addresses]:
    """A draft service, a target service and a coordinator, each a process.

    Contenders that share a target would reuse each other's prefixes of the same prompts. So prefix caching is off,
    except where it is measured.
    """
    models = model_options(setup, prefix_caching=prefix_caching)
    async with AsyncExitStack() as stack:
        # One after the other: two that load at once slow each other more than they gain.
        target, draft = [
            await stack.enter_async_context(
                model_service(setup, role, "--model", str(folder), *models, *placed(setup, role))
            )
            for role, folder in (("target", setup.target), ("draft", setup.draft))
        ]
        target, draft = [await delayed(setup, address, stack) for address in (target, draft)]
        coordinator, ahead = [
            await stack.enter_async_context(coordinator_of(setup, target, draft, draft_ahead=option))
            for option in ("off", "auto")
        ]
        yield Addresses(target, draft, coordinator, ahead)


def model_options(setup: Setup, *, prefix_caching: bool) -> tuple[str, ...]:
    """Options of both model services."""
    return (
        *(() if prefix_caching else ("--no-enable-prefix-caching",)),
        *("--dtype", setup.dtype, "--threads", str(setup.threads)),
        *("--max-length", str(setup.max_length), "--max-sequences", str(setup.max_sequences)),
    )


async def delayed(setup: Setup, address: str, stack: AsyncExitStack) -> str:
    """The address at which a service answers, later if a delay is asked for."""
    if not setup.delay_ms:
        return address
    return await stack.enter_async_context(
        service("benchmarks.timing.delay", "--to", address, "--ms", str(setup.delay_ms))
    )


def coordinator_of(
    setup: Setup, target: str, draft: str | None, *, draft_ahead: str = "off", rule: str = ""
) -> AbstractAsyncContextManager[str]:
    """A coordinator; without a draft's address it finds the one that the target hosts. The setup's rule is stronger."""
    rule = setup.rule or rule
    return service(
        "coordinator",
        *("--target-address", target, *(() if draft is None else ("--draft-address", draft))),
        *("--num-speculative-tokens", str(setup.num_speculative_tokens)),
        *(("--rejection-sampling-strategy", rule) if rule else ()),
        *("--draft-ahead", draft_ahead),
    )


def placed(setup: Setup, role: str) -> tuple[str, ...]:
    """Device of a service, and its share of the memory where both are on one GPU."""
    device = setup.draft_device if role == "draft" and setup.draft_device else setup.device
    is_shared = device != "cpu" and setup.draft_device in ("", setup.device)
    share = ("--device-memory-utilization", str(_SHARES[role])) if is_shared else ()
    return "--device", device, *share


def model_service(setup: Setup, role: str, *options: str) -> AbstractAsyncContextManager[str]:
    """A draft or target service; its steps have a minimum duration where a pace is given."""
    if setup.pace:
        return service("benchmarks.models.paced_services", "--role", role, "--pace", setup.pace, *options)
    return service(f"{role}_service", *options)
