"""The contract with vLLM: which release calls a proposer how, and which of its processes is to ask.

vLLM calls the interface of custom proposers experimental, so another release may change it. It is compared at start, by
the source of the very call, because a proposer that is called otherwise would fail in the first request.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tandem.errors import ConfigurationError

logger = logging.getLogger(__name__)

METHOD = "custom_class"
"""vLLM's name for the method that calls a class of ours."""
TESTED_RELEASE = "0.32"
"""The release of vLLM that the tests run with; `pyproject.toml` pins the same."""
_EXPECTED = "propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=...)"


class ParallelConfig(Protocol):
    """The part of vLLM's `ParallelConfig` that says which process this is."""

    rank: int
    tensor_parallel_size: int


def asks(parallel: ParallelConfig) -> bool:
    """True in the one process of a tensor-parallel group whose proposals vLLM reads: its first.

    `MultiprocExecutor._get_output_rank` (vLLM 0.32) names that process: the first of the last pipeline stage, which is
    the only stage that makes proposers.
    """
    group = parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    return parallel.rank % group == 0


def check_vllm() -> None:
    """Compare how this vLLM calls a proposer with how this plug-in is called.

    Raises:
        ConfigurationError: it calls proposers differently, or not at all.
    """
    import vllm
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    version = str(vllm.__version__)
    found = called_as(getattr(GPUModelRunner, "propose_draft_token_ids", None))
    if found != _EXPECTED:
        raise ConfigurationError(
            f"vLLM {version} calls a custom proposer as {found}; this plug-in must be called as {_EXPECTED}, as vLLM "
            f"{TESTED_RELEASE} does: install vLLM {TESTED_RELEASE}, or a Tandem made for {version}"
        )
    if not f"{version}.".startswith(f"{TESTED_RELEASE}."):
        logger.warning(
            "this vLLM is not the release that Tandem is tested with",
            extra={"vllm": version, "tested": TESTED_RELEASE},
        )


def called_as(method: Callable[..., Any] | None) -> str:
    """The call of a custom proposer in a model runner's method, as text; a word where there is none."""
    if method is None:
        return "nothing"
    try:
        source = textwrap.dedent(inspect.getsource(method))
    except (OSError, TypeError):
        return "a method without source"
    return next((_text(call) for call in _custom_calls(ast.parse(source))), "nothing")


def _custom_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of `propose` where the method is custom_class."""
    for branch in ast.walk(tree):
        if not isinstance(branch, ast.If) or METHOD not in map(_constant, ast.walk(branch.test)):
            continue
        for statement in branch.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "propose":
                    yield node


def _constant(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _text(call: ast.Call) -> str:
    arguments = [str(getattr(each, "attr", None) or getattr(each, "id", "?")) for each in call.args]
    keywords = [f"{keyword.arg}=..." for keyword in call.keywords]
    return f"propose({', '.join([*arguments, *keywords])})"
