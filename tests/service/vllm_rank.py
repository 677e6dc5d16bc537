"""One process of a tensor-parallel group, over the stand-in of vLLM: prints how many tokens it proposed."""

from __future__ import annotations

import os
import sys
import time

from tandem.integrations.vllm import TandemProposer
from tests.service import vllm_stub
from tests.service.vllm_drafts import PATIENCE, STEP_SECONDS, hashed
from tests.service.vllm_stub import ModelRunner, Request, Runner


def main(rank: int, address: str) -> None:
    """Make some steps."""
    sys.modules.update(vllm_stub.modules())
    os.environ["TANDEM_VLLM_DRAFT_ADDRESS"] = address
    os.environ["TANDEM_VLLM_DRAFT_PATIENCE_SECONDS"] = str(PATIENCE)
    proposer = TandemProposer(vllm_stub.config(rank, tensor_parallel_size=2))
    runner = Runner(hashed)
    proposer.attach(ModelRunner(runner))
    proposer.load_model()
    runner.requests = [Request([1, 2])]
    for _ in range(6):
        runner.step(proposer)
        time.sleep(10 * STEP_SECONDS)
    sys.stdout.write(f"{runner.proposed}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
