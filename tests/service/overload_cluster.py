"""A coordinator in a process of its own over fakes in this one, for tests that overload it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.end_to_end.processes import Process, address_of, running
from tests.service.fakes import Fake, FakeDraft, FakeTarget, serving

MAX_MIB = 300


LONG = 100_000


def again(tokens: Sequence[int]) -> int:
    """Repeat the last token."""
    return tokens[-1]


class Endless(Fake):
    """A fake that repeats its last token, with a much longer context than the other fakes."""

    def __init__(self) -> None:
        super().__init__(again)
        self.model_info = replace(self.model_info, max_length=LONG)

    def open(self, max_length: int) -> None:
        self.opened += 1


class EndlessTarget(Endless, FakeTarget):
    """A target that repeats the last token."""


class EndlessDraft(Endless, FakeDraft):
    """A draft that repeats the last token."""


@dataclass(frozen=True)
class CoordinatorProcess:
    """A coordinator in a process of its own, over fakes in this one."""

    process: Process
    address: str

    def mebibytes(self, field: str = "VmRSS") -> int:
        """Return the process's resident memory in MiB: VmRSS is the current value, VmHWM the peak."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(status.partition(f"{field}:")[2].split()[0]) // 1024


@asynccontextmanager
async def coordinator_process(
    target: FakeTarget, draft: FakeDraft | None, *options: str
) -> AsyncIterator[CoordinatorProcess]:
    async with AsyncExitStack() as stack:
        target_address, _ = await stack.enter_async_context(serving(target))
        draft_address = None
        if draft is not None:
            draft_address, _ = await stack.enter_async_context(serving(draft))
        drafts = () if draft_address is None else ("--draft-address", draft_address)
        # The adaptive policy would stop speculating under load.
        policy = ("--speculation-policy", "fixed", "--draft-ahead", "off", "--log-level", "warning")
        process = stack.enter_context(
            # Not of a nursery, whose memory would count as the coordinator's.
            running(
                *(
                    sys.executable,
                    "-P",
                    "-m",
                    "coordinator",
                    "--port",
                    "0",
                    "--target-address",
                    target_address,
                ),
                *(*drafts, *policy, *options),
            )
        )
        # The fakes answer from this event loop, so nothing may block it.
        yield CoordinatorProcess(process, await asyncio.to_thread(address_of, process))
        assert "unexpected error" not in process.stderr, process.stderr[-4000:]
