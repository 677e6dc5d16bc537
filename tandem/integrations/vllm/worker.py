"""The worker class with which vLLM is started (`--worker-cls`): the platform's own, which lets the plug-in know its
model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from tandem.integrations.vllm.proposer import TandemProposer

if TYPE_CHECKING:
    PlatformWorker: Any
elif current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
elif current_platform.is_xpu():
    from vllm.v1.worker.xpu_worker import XPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class TandemWorker(PlatformWorker):  # type: ignore[misc]
    """The platform's worker, with Tandem's drafts."""

    def init_device(self) -> None:
        """Make the model runner, and give it to the proposer that it has made."""
        super().init_device()
        drafter = getattr(self.model_runner, "drafter", None)  # the last pipeline stage alone has one
        if isinstance(drafter, TandemProposer):
            drafter.attach(self.model_runner)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step, of which the drafts hear before it begins."""
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, TandemProposer):
            drafter.begin_step(scheduler_output)
        return super().execute_model(scheduler_output)
