"""vLLM's offline engine: alone, with its n-gram drafts, or with the draft model. Runs in an environment of its own."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.peers.pipe import Run, serve
from benchmarks.workload import Answer, Outcome, Workload

_KV_CACHE_GIBIBYTES = 1
_DRAFTS = "vllm:spec_decode_num_drafts"
_DRAFTED = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def load(setup: dict[str, Any]) -> Run:
    """The engine. `mode` is alone, ngram or draft_model."""
    # In this process: one hop less than vLLM's default, so nothing is held against it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_KV_CACHE_GIBIBYTES))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{setup['threads'] - 1}")
    from vllm import LLM  # type: ignore[import-not-found]

    engine = LLM(
        model=setup["target"],
        dtype=setup["dtype"],
        max_model_len=setup["max_length"],
        max_num_seqs=setup["max_sequences"],
        disable_log_stats=False,
        # No contender may reuse the prefixes of temperature 0 for the same prompts at temperature 1.
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **_speculation(setup),
    )
    return lambda workload: _run(engine, workload)


def _speculation(setup: dict[str, Any]) -> dict[str, Any]:
    count = setup["num_speculative_tokens"]
    match setup["mode"]:
        case "ngram":
            config = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
        case "draft_model":
            config = {"method": "draft_model", "model": setup["draft"]}
        case _:
            return {}
    return {"speculative_config": {**config, "num_speculative_tokens": count}}


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
