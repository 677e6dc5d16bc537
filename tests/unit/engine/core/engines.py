"""Parts that several tests of the engine share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as SequenceOf
from typing import Any

from torch import Tensor

from tandem.engine.core.jobs import Continue, Done, Job

_PROMPT = [5, 17, 80, 3, 44]


class _BlockingHead:
    """A head that waits to be let through, so that a test can act while a step is in progress."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.may_leave = threading.Event()
        self.calls = 0

    def __call__(self, ready: SequenceOf[Job[Any]], logits: Tensor) -> list[Done[str] | Continue]:
        self.calls += 1
        self.entered.set()
        assert self.may_leave.wait(10)
        return [Continue(3) if job.payload == "forever" else Done("done") for job in ready]

    async def wait_entered(self) -> None:
        """Until a step has reached the head."""
        assert await asyncio.to_thread(self.entered.wait, 10)
