"""Draft proposals of Tandem's draft services for vLLM, by vLLM's speculative method `custom_class`.

`proposer` is what vLLM calls; `link` owns the thread that talks to the drafts; all else is pure or small.
"""

from tandem_vllm.proposer import TandemProposer

__all__ = ["TandemProposer"]
