"""Other engines that complete the same prompts, each in a process of its own: vLLM and transformers.

    PYTHON -m benchmarks.peers vllm|transformers

The first line on a peer's stdin, a JSON object, says what to load, and the peer answers `{"ready": true}`. Each further
line is a `Workload`, answered by an `Outcome` or by `{"error": ...}`. Other engines' Pythons run this module, so it
imports an engine only when it is asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from tandem.errors import TandemError

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("draft", "verify", "sampling", "wait")
"""Phases of a round."""
FIRST_TOKENS = 100
"""Tokens of a completion that count apart: a controller that has just started learns while they are written."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts to complete at once, each by the same number of tokens."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids; the batch has as many requests."""
    temperature: float
    max_tokens: int
    """Tokens of each completion; end-of-sequence ids do not end it."""
    seed: int = 0


@dataclass(slots=True)
class Answer:
    """One completion, and the times at which its chunks arrived."""

    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the batch began, and the number of tokens that arrived then."""

    def add(self, seconds: float, token_ids: list[int]) -> None:
        if token_ids:
            self.token_ids += token_ids
            self.arrivals.append((seconds, len(token_ids)))


class PacedStep(NamedTuple):
    """When a step began and ended."""

    began: float
    ended: float
    is_of_target: bool = True
    """False for a step of the target's own head."""


@dataclass(slots=True)
class Outcome:
    """Result of a workload."""

    answers: list[Answer]
    seconds: float
    """From the start to the last token of the last request."""
    rounds: int = 0
    """Passes of the target, over all requests; 0 where that is not known."""
    drafted: int = 0
    accepted: int = 0
    led: int = 0
    """Rounds that the target had begun by itself."""
    wasted: int = 0
    """Further rounds that it had begun by itself and that were not wanted."""
    steps: list[PacedStep] = field(default_factory=list)
    """Steps of the paced target and of its head, in seconds since the batch began; empty where none is paced."""
    phases: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each round with a proposal, by phase; empty where that is not known."""

    @property
    def token_count(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.token_count / self.seconds

    def speed_between(self, begin: int, end: int) -> float:
        """Tokens per second of the tokens from `begin` to `end` of each request but its first chunk; 0 for none."""
        made = 0
        passed = 0.0
        for answer in self.answers:
            total = 0
            last = 0.0
            for seconds, count in answer.arrivals:
                if begin < total + count and total and total < end:
                    made += count
                    passed += seconds - last
                total += count
                last = seconds
        return made / passed * len(self.answers) if passed else 0.0


Contender = Callable[[Workload], Awaitable[Outcome]]
"""A started way of decoding: completes a workload's prompts, all at once, or raises a `TandemError`."""
WORKLOADS = TypeAdapter(Workload)
OUTCOMES = TypeAdapter(Outcome)


class PeerError(TandemError):
    """A peer could not start, or could not run a workload."""


@asynccontextmanager
async def peer(name: str, command: list[str], setup: dict[str, Any], log: Path) -> AsyncIterator[Contender]:
    """Another engine in a process of its own, which completes workloads; what it writes to stderr goes to a file."""
    python, *module = command
    with log.open("wb") as errors:
        try:
            # An outcome is one line: by default asyncio reads 64 KiB of it
            process = await asyncio.create_subprocess_exec(
                *(python, "-m", *module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
                limit=64 << 20,
            )
        except OSError as error:
            raise PeerError(f"{name} did not start: {python}: {error.strerror or error}") from error
    questions = process.stdin
    answers = process.stdout
    assert questions is not None
    assert answers is not None

    async def ask(message: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            questions.write(json.dumps(message).encode() + b"\n")
            async with asyncio.timeout(seconds):
                line = await answers.readline()
        except TimeoutError:
            raise PeerError(f"{name} did not answer within {seconds:g} s") from None
        if not line:
            raise PeerError(f"{name} ended with exit code {await process.wait()}: {_last_line(log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{name}: {answer['error']}")
        return answer

    async def run(workload: Workload) -> Outcome:
        return OUTCOMES.validate_python(await ask(asdict(workload), 600.0))

    try:
        # vLLM compiles its models at start, which takes minutes
        await ask(setup, 900.0)
        yield run
    finally:
        questions.close()
        try:
            await asyncio.wait_for(process.wait(), 20.0)
        except TimeoutError:  # an engine that hangs
            process.kill()
            await process.wait()


# ---- the peer's end of the pipe

Run = Callable[[Workload], Outcome]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def serve(load: Callable[[dict[str, Any]], Run]) -> None:
    """Load the models that the first line asks for, then answer workloads until stdin ends."""
    # Everything that engines print goes to stderr from here on.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        run = load(json.loads(sys.stdin.readline()))
    except Exception as error:
        tell({"error": _sentence(error)})
        raise
    tell({"ready": True})
    for line in sys.stdin:
        try:
            tell(asdict(run(WORKLOADS.validate_json(line))))
        except Exception as error:  # noqa: BLE001 - the benchmark reports any error of an engine and continues
            traceback.print_exc()
            tell({"error": _sentence(error)})


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# ---- transformers: `generate`, alone or assisted by the draft


def load_transformers(setup: dict[str, Any]) -> Run:  # noqa: C901 - one engine, in one place
    """Load the models. `assistance` is empty, fixed (as many tokens each round) or defaults."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils import logging

    class Arrivals(BaseStreamer):
        """Records when tokens arrive; the first that `generate` puts are the prompts."""

        def __init__(self, batch: int) -> None:
            self.answers = [Answer() for _ in range(batch)]
            self.puts = -1
            self._started = time.perf_counter()

        def put(self, value: Any) -> None:
            """New tokens: one for each request of a batch, or several of a single one."""
            self.puts += 1
            seconds = time.perf_counter() - self._started
            if self.puts > 0:
                rows = value.reshape(len(self.answers), -1).tolist()
                for answer, row in zip(self.answers, rows, strict=True):
                    answer.add(seconds, row)

        def end(self) -> None:
            """Nothing is held back."""

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(setup["threads"])
    device = setup["device"]
    dtype = getattr(torch, setup["dtype"])

    def model(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(setup[name], dtype=dtype).to(device).eval()

    target = model("target")
    draft: Any = model("draft") if setup["assistance"] else None
    if setup["assistance"] == "fixed":
        draft.generation_config.num_assistant_tokens = setup["num_speculative_tokens"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
    extra = {} if draft is None else {"assistant_model": draft}
    pad = target.config.pad_token_id or 0
    config: Any = GenerationConfig

    def run(workload: Workload) -> Outcome:
        torch.manual_seed(workload.seed)
        longest = max(map(len, workload.prompts))
        gaps = [longest - len(prompt) for prompt in workload.prompts]
        ids = [[pad] * gap + list(prompt) for gap, prompt in zip(gaps, workload.prompts, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
        sampling: dict[str, Any] = {"do_sample": False}
        if workload.temperature > 0:
            sampling = {"do_sample": True, "temperature": workload.temperature, "top_k": 0, "top_p": 1.0}
        arrivals = Arrivals(len(workload.prompts))
        started = time.perf_counter()
        with torch.inference_mode():
            target.generate(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=config(
                    max_new_tokens=workload.max_tokens, eos_token_id=None, pad_token_id=pad, **sampling
                ),
                streamer=arrivals,
                **extra,
            )
        seconds = time.perf_counter() - started
        counts = {len(answer.token_ids) for answer in arrivals.answers}
        if counts != {workload.max_tokens}:
            raise ValueError(f"transformers made {sorted(counts)} tokens, not {workload.max_tokens}")
        return Outcome(arrivals.answers, seconds, rounds=0 if draft is None else arrivals.puts)

    return run


# ---- vLLM's offline engine: alone, with its n-gram drafts, with the draft model, with a head, or with Tandem's service


def load_vllm(setup: dict[str, Any]) -> Run:
    """Load the engine. `mode` is alone, tandem, whose options are in `environment`, or a method of vLLM's."""
    os.environ.update(setup["environment"])
    # In this process, where a paced model must be: one hop less than vLLM's default, so nothing is held against it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{setup['threads'] - 1}")
    # The binding above is for workers in processes of their own; here torch would take every core.
    os.environ.setdefault("OMP_NUM_THREADS", str(setup["threads"]))
    from vllm import LLM

    mend_expansion()
    mode = setup["mode"]
    speculation = dict[str, Any]()
    if drafts := _VLLM_DRAFTS.get(mode):
        models = {"draft_model": setup["draft"], "eagle3": setup["own_head"]}
        own = {"model": models[mode]} if mode in models else {}
        config = {**drafts, **own, "num_speculative_tokens": setup["num_speculative_tokens"]}
        speculation["speculative_config"] = config
    if mode == "tandem":
        speculation["worker_cls"] = "tandem_vllm.worker.TandemWorker"
    engine = LLM(
        model=setup["target"],
        dtype=setup["dtype"],
        max_model_len=setup["max_length"],
        max_num_seqs=setup["max_sequences"],
        disable_log_stats=False,
        # No contender may reuse the prefixes of temperature 0 for the same prompts at temperature 1.
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enforce_eager=setup["vllm_eager"],
        tensor_parallel_size=(size := setup.get("tensor_parallel_size", 1)),
        distributed_executor_backend="uni" if size == 1 else "mp",
        **speculation,
    )
    if setup["pace"]:
        _pace_vllm(engine, setup["pace"])
    return lambda workload: _run_vllm(engine, workload)


def mend_expansion() -> None:
    """Mend vLLM 0.32's builds for a CPU without Triton, which divide the logits of proposed tokens by memory that was
    never written (vLLM's issue 55005): above temperature 0, acceptance and text are wrong with any draft."""
    from vllm.utils import cpu_triton_utils

    def expand(
        output: Any, values: Any, ends: Any, replace_from: Any, replace_to: Any, *_: Any, **__: Any
    ) -> None:
        counts = ends.diff(prepend=ends.new_zeros(1))
        replaced = values.where(values != replace_from, values.new_tensor(replace_to))
        output.copy_(replaced.repeat_interleave(counts))

    cpu_triton_utils._expand_kernel_impl = expand


_VLLM_DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "draft_model": {"method": "draft_model", "draft_sample_method": "probabilistic"},
    "eagle3": {"method": "eagle3"},
    "tandem": {"method": "custom_class", "model": "tandem_vllm.TandemProposer"},
}
"""vLLM's options of speculative decoding by mode."""


def _pace_vllm(engine: Any, text: str) -> None:
    """Let the passes of the target, and of vLLM's own draft model, take a minimum time."""
    from benchmarks.pace import Pace, sleep_until

    pace = Pace.from_text(text)

    def paced(role: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = forward(*arguments, **named)
            tokens = len(result[0] if isinstance(result, tuple) else result)
            sleep_until(began + pace.seconds(role, tokens))
            return result

        return run

    runner = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter = getattr(getattr(runner, "drafter", None), "model", None)
    for role, model in (("target", runner.model), ("draft", drafter)):
        if model is not None:
            model.forward = paced(role, model.forward)


def _run_vllm(llm: Any, workload: Workload) -> Outcome:
    from vllm import SamplingParams

    before = _vllm_counts(llm)
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
    rounds, drafted, accepted = (after - old for after, old in zip(_vllm_counts(llm), before, strict=True))
    return Outcome(answers, time.perf_counter() - started, rounds, drafted, accepted)


def _vllm_counts(llm: Any) -> list[int]:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return [int(values.get(f"vllm:spec_decode_{name}", 0)) for name in names]


if __name__ == "__main__":
    serve({"vllm": load_vllm, "transformers": load_transformers}[sys.argv[1]])
