"""transformers' own `generate`, alone or assisted by the draft."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from benchmarks.peers.pipe import Run, serve
from benchmarks.workload import Answer, Outcome, Workload


class _Arrivals(BaseStreamer):
    """Notes when tokens come; the first that `generate` puts are the prompts."""

    def __init__(self, batch: int) -> None:
        self.answers = [Answer() for _ in range(batch)]
        self.puts = -1
        self._started = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """New tokens: one for each request of a batch, or several of a single one."""
        self.puts += 1
        if self.puts == 0:
            return
        seconds = time.perf_counter() - self._started
        rows = value.reshape(len(self.answers), -1).tolist()
        for answer, row in zip(self.answers, rows, strict=True):
            answer.add(seconds, row)

    def end(self) -> None:
        """Release everything."""


def load(setup: dict[str, Any]) -> Run:
    """The models, and how to run them. `assistance` is None, fixed (as many tokens each round) or defaults."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(setup["threads"])
    device, dtype = setup["device"], getattr(torch, setup["dtype"])

    def model(name: str) -> Any:
        loaded = AutoModelForCausalLM.from_pretrained(setup[name], dtype=dtype)
        return loaded.to(device).eval()

    target = model("target")
    draft: Any = model("draft") if setup["assistance"] else None
    if setup["assistance"] == "fixed":
        draft.generation_config.num_assistant_tokens = setup["num_speculative_tokens"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
    pad = _pad_id(target)

    def run(workload: Workload) -> Outcome:
        torch.manual_seed(workload.seed)
        ids, mask = _padded(workload.prompts, pad, device)
        arrivals = _Arrivals(len(workload.prompts))
        extra = {} if draft is None else {"assistant_model": draft}
        started = time.perf_counter()
        with torch.inference_mode():
            target.generate(
                ids,
                attention_mask=mask,
                generation_config=_config(workload, pad),
                streamer=arrivals,
                **extra,
            )
        seconds = time.perf_counter() - started
        _check(arrivals.answers, workload)
        rounds = arrivals.puts if draft is not None else 0
        return Outcome(arrivals.answers, seconds, rounds=rounds)

    return run


def _config(workload: Workload, pad: int) -> GenerationConfig:
    sampling: dict[str, Any] = {"do_sample": False}
    if workload.temperature > 0:
        sampling = {"do_sample": True, "temperature": workload.temperature, "top_k": 0, "top_p": 1.0}
    make: Any = GenerationConfig
    config: GenerationConfig = make(
        max_new_tokens=workload.max_tokens, eos_token_id=None, pad_token_id=pad, **sampling
    )
    return config


def _pad_id(model: Any) -> int:
    pad = model.config.pad_token_id
    return 0 if pad is None else int(pad)


def _padded(prompts: tuple[tuple[int, ...], ...], pad: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts padded on the left to the longest, and the mask that says so."""
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _check(answers: list[Answer], workload: Workload) -> None:
    counts = {len(answer.token_ids) for answer in answers}
    if counts != {workload.max_tokens}:
        raise ValueError(f"transformers made {sorted(counts)} tokens, not {workload.max_tokens}")


if __name__ == "__main__":
    serve(load)
