"""vLLM's offline engine: alone, with its n-gram drafts, with the draft model, or with Tandem's draft service.

Runs in an environment of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.peers.pipe import Run, serve
from benchmarks.timing.sleeping import sleep
from benchmarks.workload import Answer, Outcome, Workload

_KV_CACHE_GIBIBYTES = 1
_DRAFTS = "vllm:spec_decode_num_drafts"
_DRAFTED = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def load(setup: dict[str, Any]) -> Run:
    """The engine. `mode` is alone, ngram, draft_model or tandem; the last one reads `environment` for its options."""
    os.environ.update(setup.get("environment", {}))
    # In this process: one hop less than vLLM's default, so nothing is held against it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_KV_CACHE_GIBIBYTES))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{setup['threads'] - 1}")
    from vllm import LLM

    engine = LLM(
        model=setup["target"],
        dtype=setup["dtype"],
        max_model_len=setup["max_length"],
        max_num_seqs=setup["max_sequences"],
        disable_log_stats=False,
        # No contender may reuse the prefixes of temperature 0 for the same prompts at temperature 1.
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **setup.get("engine", {}),
        **_speculation(setup),
    )
    if setup.get("vllm_pace"):
        _pace(engine, setup["vllm_pace"])
    return lambda workload: _run(engine, workload)


def _speculation(setup: dict[str, Any]) -> dict[str, Any]:
    count = setup["num_speculative_tokens"]
    match setup["mode"]:
        case "ngram":
            config = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
        case "draft_model":
            config = {"method": "draft_model", "model": setup["draft"]}
        case "tandem":
            config = {"method": "custom_class", "model": "tandem.integrations.vllm.TandemProposer"}
        case _:
            return {}
    return {"speculative_config": {**config, "num_speculative_tokens": count}}


def _pace(engine: Any, text: str) -> None:
    """Let the models' passes take a minimum time. The engine must run its models in this process."""
    from benchmarks.models.pace import Pace

    pace = Pace.from_text(text)
    runner = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter = getattr(getattr(runner, "drafter", None), "model", None)
    for role, model in (("target", runner.model), ("draft", drafter)):
        if model is not None:
            model.forward = _paced(model.forward, partial(pace.seconds, role))


def _paced(forward: Callable[..., Any], least: Callable[[int], float]) -> Callable[..., Any]:
    def paced(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = forward(*arguments, **named)
        tokens = len(result[0] if isinstance(result, tuple) else result)
        left = least(tokens) - (time.perf_counter() - began)
        if left > 0.0:
            sleep(left)
        return result

    return paced


def _run(llm: Any, workload: Workload) -> Outcome:
    from vllm import SamplingParams

    before = _counts(llm)
    answers = [Answer() for _ in workload.prompts]
    started = time.perf_counter()
    for index, prompt in enumerate(workload.prompts):
        params = SamplingParams(
            temperature=workload.temperature,
            max_tokens=workload.max_tokens,
            seed=workload.seed + index if workload.temperature > 0 else None,
            ignore_eos=True,
            detokenize=False,
        )
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        seconds = time.perf_counter() - started
        for output in outputs:
            answer = answers[int(output.request_id.split("-")[0])]
            answer.add(seconds, list(output.outputs[0].token_ids)[len(answer.token_ids) :])
    rounds, drafted, accepted = (after - old for after, old in zip(_counts(llm), before, strict=True))
    return Outcome(answers, time.perf_counter() - started, rounds, drafted, accepted)


def _counts(llm: Any) -> tuple[int, int, int]:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return (
        int(values.get(_DRAFTS, 0)),
        int(values.get(_DRAFTED, 0)),
        int(values.get(_ACCEPTED, 0)),
    )


if __name__ == "__main__":
    serve(load)
