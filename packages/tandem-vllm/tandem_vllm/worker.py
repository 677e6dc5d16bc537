"""The worker class with which vLLM is started (`--worker-cls`): the platform's own, which lets the plug-in know its
model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from tandem_vllm.proposer import TandemProposer

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
        """Make the model runner with our speculator, or give it to the proposer that it has made."""
        if self.use_v2_model_runner:
            from vllm.v1.worker.gpu import model_runner

            from tandem_vllm.speculator import TandemSpeculator

            model_runner.init_speculator = TandemSpeculator
        super().init_device()
        # The last pipeline stage alone has one
        name = "speculator" if self.use_v2_model_runner else "drafter"
        self._tandem: Any = getattr(self.model_runner, name, None)
        if isinstance(self._tandem, TandemProposer):
            self._tandem.attach(self.model_runner)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step, of which the drafts hear before it begins."""
        if self._tandem is not None:
            self._tandem.drafts.begin_step(scheduler_output)
        return super().execute_model(scheduler_output)
