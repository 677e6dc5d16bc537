"""A model that vLLM's workers run, as our engine's core knows models."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

import tandem
from tandem.config.speculative import MAX_CONFIGURED_TOKENS
from tandem.engine.interface import EngineSettings, RowRequest
from tandem.engine.kv_cache.arena import memory_allowance
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.models.checkpoint import Checkpoint, open_checkpoint, tokenizer_hash
from tandem.engine.models.loading import end_ids_within
from tandem.engine.rows import ROW_ARRAYS, launch_rows, verifications
from tandem.engine.steps import BranchDraws, BranchStep, PendingRows, StepBackend
from tandem.engine_vllm.adapter import Core, gpus_to_itself, load_core, uses_v2_runner
from tandem.engine_vllm.cache import BlockCache
from tandem.engine_vllm.heads import VllmHeads
from tandem.engine_vllm.runner_v2 import METHODS as HEADS_OF_V2
from tandem.engine_vllm.step import Draws, RoundEnd
from tandem.engine_vllm.worker import EXTENSION, NO_PROPOSER
from tandem.errors import ConfigurationError
from tandem.model.leading import Leading
from tandem.model.types import ModelInfo, Verification
from tandem.model_sources.hub import model_name

if TYPE_CHECKING:
    from tandem.config.settings import ModelServerSettings

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_SHORT_STEP_TOKENS = 32
"""Tokens of each sequence beside a chunk of prompts, as `tandem.engine.core.scheduler` packs steps."""
_MAX_ROWS = MAX_CONFIGURED_TOKENS + 1
"""Rows of the longest proposal that can be configured: they are all in one step, even beside a full chunk."""
LOAD_FORMATS = ("safetensors", "fastsafetensors", "runai_streamer", "bitsandbytes", "dummy")
"""Those of vLLM's that unpickle nothing."""
_DRAWN_TOKENS = 16
"""Tokens that a draft draws in a row; more of them where there happens to be room. As many as a block of vLLM's has on
a GPU, so that the room for them is at most a block of each sequence."""
_ROW_VALUES = 8 << 20
"""Logits of which rows are made at a time: 55 rows of 152,000. The memory that it takes, 0.4 GB, is left free."""
_CPU_LENGTH = 4096
"""Tokens for which there is room in the cache of a model that names no limit."""
_CPU_BLOCK_TOKENS = 32
"""Its attention on a CPU wants a multiple of 32."""
_WITHOUT_CACHE = ("medusa",)
"""Methods whose heads read one hidden state alone, and keep nothing."""
ROLLED_BACK: dict[str, frozenset[str]] = {"cuda": frozenset({"GDN_ATTN", "MAMBA2"})}
"""Kinds of recurrent layers, by device, of which vLLM keeps a state behind each token of a proposal; others were not
tried. On a CPU vLLM 0.32 has both kinds too, but goes on from the wrong state: of 512 greedy tokens of a tiny model
with MAMBA2 layers 20 were right with vLLM's own n-gram proposals, and all 512 without."""
_WRONG_ON_CPU = "-rotary_embedding"
"""vLLM 0.32's kernel that rotates positions on a CPU takes a part of a head for a whole one, as DeepSeek's queries have
it; without it vLLM computes the same in torch."""


def load_vllm(
    settings: ModelServerSettings,
    folder: Path,
    *,
    proposal_length: int = 0,
    head: Mapping[str, Any] | None = None,
    load_config: Mapping[str, Any] | None = None,
    on_failure: Callable[[], None] | None = None,
) -> VllmModel:
    """Load a model into vLLM's workers.

    Args:
        proposal_length: Tokens of proposals whose verification CUDA graphs are captured for; 0 for a draft, whose
            steps mostly have one token of each sequence.
        head: Method and model of a drafting head beside it, as in vLLM's speculative configuration; None without one.
    """
    checkpoint = open_checkpoint(folder)
    given = dict(load_config or {})
    load_format = given.pop("load_format", settings.load_format or "safetensors")
    if load_format not in LOAD_FORMATS:
        raise ConfigurationError(f"load_format is {load_format}; it must be one of {', '.join(LOAD_FORMATS)}")
    limits = EngineSettings.of(settings)
    options = _options(settings, folder, limits, proposal_length, head) | given | {"load_format": load_format}
    if settings.compute_device == "cpu":
        if settings.kv_cache_memory_bytes is None:
            options["kv_cache_memory_bytes"] = _cpu_cache_bytes(checkpoint, limits, settings.compute_dtype)
        if "qk_rope_head_dim" in checkpoint.config:
            options["compilation_config"] = {"custom_ops": [_WRONG_ON_CPU]}
    count = settings.device_count
    if settings.compute_device == "cpu":
        core = load_core(options, on_failure, 0)
    else:
        with gpus_to_itself(count):
            core = load_core(options, on_failure, _row_bytes(checkpoint, limits, proposal_length))
    model = VllmModel(core, checkpoint, count)
    model.lookahead = 0 if proposal_length else _DRAWN_TOKENS - 1
    if head is not None:
        has_pairs = head["method"] not in _WITHOUT_CACHE
        model.heads = VllmHeads(model, proposal_length, has_pairs=has_pairs)
        model.info = replace(model.info, drafting_method=head["method"])
    return model


def _options(
    settings: ModelServerSettings,
    folder: Path,
    limits: EngineSettings,
    proposal_length: int,
    head: Mapping[str, Any] | None,
) -> dict[str, Any]:
    most = limits.prefill_chunk_tokens + _SHORT_STEP_TOKENS * limits.max_sequences + _MAX_ROWS
    is_cpu = settings.compute_device == "cpu"
    options = {
        "model": str(folder),
        "tokenizer": str(settings.tokenizer or folder),
        "skip_tokenizer_init": True,
        "dtype": settings.compute_dtype,
        "quantization": settings.quantization,
        "moe_backend": settings.moe_backend,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "max_model_len": settings.max_length,
        "gpu_memory_utilization": None if is_cpu else settings.device_memory_utilization,
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "block_size": _CPU_BLOCK_TOKENS if is_cpu else None,
        # Without it vLLM captures graphs of one token of each sequence.
        "speculative_config": _rows_of(proposal_length, head) if proposal_length else None,
        "seed": 0,
        "tensor_parallel_size": settings.device_count,
        "distributed_executor_backend": "mp" if settings.device_count > 1 else "uni",
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enable_chunked_prefill": True,
        # Requests are text. Otherwise a checkpoint with a vision tower would want its processor, and memory for images.
        "language_model_only": True,
        "max_num_batched_tokens": most,
        "max_num_seqs": limits.max_sequences,
        "enforce_eager": settings.enforce_eager,
        "worker_extension_cls": EXTENSION,
        "async_scheduling": False,
        "use_tqdm_on_load": False,  # stderr is for log lines
        "disable_log_stats": True,
    }
    return {name: value for name, value in options.items() if value is not None}


def _rows_of(proposal_length: int, head: Mapping[str, Any] | None) -> dict[str, Any]:
    """A configuration of vLLM's drafting. Without a head no proposer ever runs."""
    proposer: dict[str, Any]
    if head is not None:
        proposer = dict(head)
    elif uses_v2_runner():  # it takes none of others
        proposer = {"method": "ngram", "prompt_lookup_max": proposal_length}
    else:
        proposer = {"method": "custom_class", "model": NO_PROPOSER}
    if uses_v2_runner():
        # It captures graphs for each length in this table; batches choose none of them here. The longest and none at
        # all come first, as there are no more lengths than sequences.
        lengths = [proposal_length, *range(proposal_length)]
        proposer["num_speculative_tokens_per_batch_size"] = [
            (size, size, length) for size, length in enumerate(lengths, 1)
        ]
    return proposer | {"num_speculative_tokens": proposal_length}


def vllm_head(method: str, folder: Path | None) -> dict[str, Any]:
    """A drafting head as vLLM's speculative configuration names it.

    Raises:
        ConfigurationError: The model runner does not have such heads.
    """
    if uses_v2_runner() and method not in HEADS_OF_V2:
        raise ConfigurationError(
            f"VLLM_USE_V2_MODEL_RUNNER is 1 and --method is {method}; with that runner it must be one of "
            f"{', '.join(HEADS_OF_V2)}, or leave the variable out"
        )
    return {"method": method} if folder is None else {"method": method, "model": str(folder)}


def _row_bytes(checkpoint: Checkpoint, limits: EngineSettings, proposal_length: int) -> int:
    """Bytes that rows take at most while they are made, or a draft's tokens drawn: more than vLLM's own sampler, which
    it measures when it sizes the cache."""
    config = {**checkpoint.config, **checkpoint.config.get("text_config", {})}
    row_count = proposal_length + 1
    vocabulary_size = int(config.get("vocab_size") or 0)
    values = limits.max_sequences * row_count * vocabulary_size
    if proposal_length:
        values = min(values, max(_ROW_VALUES, row_count * vocabulary_size))
    return ROW_ARRAYS * torch.float64.itemsize * values


def _cpu_cache_bytes(checkpoint: Checkpoint, limits: EngineSettings, dtype: str) -> int:
    """Bytes of the KV cache on a CPU, where vLLM would take most of the memory: as many as all sequences could use, at
    most those that `device_memory_utilization` leaves."""
    config = {**checkpoint.config, **checkpoint.config.get("text_config", {})}
    size = torch.finfo(getattr(torch, dtype)).bits // 8
    heads = int(config["num_attention_heads"])
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    kept_heads = int(config.get("num_key_value_heads") or heads)
    if "qk_rope_head_dim" in config:  # latent attention, whose keys are kept as they are (`VLLM_MLA_DISABLE`)
        head_size = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
        kept_heads = heads
    token_bytes = 2 * int(config["num_hidden_layers"]) * kept_heads * head_size * size
    length = limits.max_length or int(config.get("max_position_embeddings") or _CPU_LENGTH)
    most = limits.max_sequences * (length + _CPU_BLOCK_TOKENS) * token_bytes
    allowed = memory_allowance(limits.device_memory_utilization, torch.device("cpu"))
    return max(min(most, allowed - checkpoint.weights.value_count * size), 1)


@dataclass(frozen=True, slots=True)
class RemoteLogits:
    """Logits of a step, where the workers left them."""

    model: VllmModel
    cache: BlockCache

    def apply(self, function: Callable[[Any, Tensor], AnswerT], payload: Any) -> AnswerT:
        """Call a function with the payload and the logits, [rows, vocabulary_size], on their device.

        With workers in other processes, function and payload are pickled.
        """
        answer: AnswerT = self.model.call("tandem_apply", function, payload)
        return answer

    def room(self, sequence: Sequence) -> int:
        """See `LogitsElsewhere`."""
        return self.cache.room(sequence) if self.model.drafts_by_itself else 0

    def draft(
        self,
        begin: Callable[[Any, Tensor, SequenceOf[int]], Draws[AnswerT]],
        payload: Any,
        counts: SequenceOf[int],
    ) -> AnswerT:
        """See `LogitsElsewhere`. With workers in other processes, function, payload and answer are pickled."""
        answer: AnswerT = self.model.call("tandem_draft", begin, payload, list(counts))
        return answer

    def __getitem__(self, rows: slice) -> Tensor:
        """Some of them, in this process; valid until the next step."""
        return self.apply(_some, (rows.start, rows.stop))


@dataclass(frozen=True, slots=True)
class RemoteRows:
    """Rows that another process makes and reads. They are launched when they are asked for: behind the model's step,
    which runs by then."""

    requests: SequenceOf[RowRequest]
    logits: RemoteLogits

    def read(self) -> list[Verification | None]:
        """See `PendingRows`."""
        return self.logits.apply(_VERIFICATIONS, self.requests)


class VllmModel:
    """See `tandem.engine.steps.ModelRunner`."""

    def __init__(self, core: Core, checkpoint: Checkpoint, device_count: int = 1) -> None:
        self._core = core
        self.info = _info(core, checkpoint, device_count)
        self.heads: VllmHeads | None = None
        """The model's own drafting head; None without one."""
        self.lookahead = 0
        """Tokens behind each step's for which there is to be room: those that heads read, or a draft draws in a row."""

    @cached_property
    def drafts_by_itself(self) -> bool:
        """True if the workers can go on from a step by tokens of their own."""
        return bool(self.call("tandem_drafts_by_itself"))

    @property
    def device(self) -> torch.device:
        """See `ModelRunner`. A worker of another process has a device of its own."""
        name = self._core.config.device_config.device_type
        return torch.device(f"{name}:0" if name == "cuda" and self._core.has_one_process else "cpu")

    def allocate(self, settings: EngineSettings, max_length: int) -> tuple[BlockCache, VllmSteps]:
        """See `ModelRunner`: vLLM has allocated the memory when it was loaded."""
        core = self._core
        specs = [group.kv_cache_spec for group in core.manager.kv_cache_config.kv_cache_groups]
        state_slots = max(core.state_slots(spec) for spec in specs)
        kinds = set().union(*map(core.recurrent_kinds, specs))
        if kinds:
            self._check_recurrent(kinds, state_slots)
        cache = BlockCache(
            core.manager,
            min(spec.block_size for spec in specs),
            # What others know of a prompt has no recurrent states
            core.engine.request_block_hasher if settings.prefix_reuse and not state_slots else None,
            core.running,
            has_windows=any(core.is_attention(spec) and not core.sees_all(spec) for spec in specs),
            state_slots=state_slots,
            heads=self.heads,
            lookahead=self.lookahead if self.heads is None else core.config.num_lookahead_tokens,
            sends_proposals=core.config.speculative_config is not None,
        )
        logger.info("kv cache sized", extra={"tokens": cache.usage().total_tokens})
        return cache, VllmSteps(self, cache, core)

    def _check_recurrent(self, kinds: AbstractSet[str], state_slots: int) -> None:
        """Refuse recurrent layers, by vLLM's names, whose states do not follow a sequence that rolls back."""
        config = self._core.config
        tried = ROLLED_BACK.get(config.device_config.device_type, frozenset())
        unknown = sorted(kinds - tried)
        reason = None
        if state_slots < 2:
            reason = "a draft of them would need a state behind each token that it draws"
        elif uses_v2_runner():
            reason = "with VLLM_USE_V2_MODEL_RUNNER=1 they cannot be rolled back to before a proposal: leave it out"
        elif self.heads is not None:
            reason = "no head drafts beside them: leave the head out"
        elif unknown and not tried:
            reason = (
                "vLLM's kernels for this device do not roll them back to before a proposal: run it on a GPU"
            )
        elif unknown or not config.model_config.is_hybrid:
            reason = (
                f"those of the kind {min(unknown or kinds)} cannot be rolled back to before a proposal here"
            )
        if reason is not None:
            raise ConfigurationError(
                f"{self.info.name} has recurrent layers, and {reason}; or name a model with attention alone"
            )

    def launch_rows(self, requests: SequenceOf[RowRequest], logits: RemoteLogits) -> PendingRows:
        if self._core.has_one_process:
            return logits.apply(_LAUNCH_ROWS, requests)
        # What decides and leads stays here: it cannot be pickled, and rows do not depend on it.
        requests = [
            replace(each, on_led=None, leading=Leading(), rule=None, proposal=None) for each in requests
        ]
        return RemoteRows(requests, logits)

    def propose(self, ends: SequenceOf[RoundEnd], count: int) -> list[list[int]]:
        """See `HeadModel`."""
        found: list[list[int]] = self.call("tandem_propose", ends, count)
        return found

    def time_heads(self, sequences: int) -> float:
        """See `HeadModel`."""
        return float(self.call("tandem_time_head", sequences))

    def are_finite(self, logits: RemoteLogits) -> bool:
        return logits.apply(_are_finite, None)

    def call(self, method: str, *arguments: Any) -> Any:
        executor = self._core.executor
        if self._core.has_one_process:
            return executor.collective_rpc(method, args=arguments)[0]
        return executor.collective_rpc(method, args=arguments, unique_reply_rank=0)

    def close(self) -> None:
        self._core.engine.shutdown()


_LAUNCH_ROWS = partial(launch_rows, chunk_values=_ROW_VALUES)
_VERIFICATIONS = partial(verifications, chunk_values=_ROW_VALUES)


def _some(bounds: tuple[int, int], logits: Tensor) -> Tensor:
    return logits[bounds[0] : bounds[1]]


def _are_finite(_: None, logits: Tensor) -> bool:
    return bool(logits.amax(dim=-1).isfinite().all())


class VllmSteps(StepBackend):
    """Runs steps by the workers. The logits stay there."""

    warm_up_steps = ((1,),)

    def __init__(self, model: VllmModel, cache: BlockCache, core: Core) -> None:
        self._model = model
        self._cache = cache
        self._limits = core.config.scheduler_config
        self.returns_early = core.config.device_config.device_type != "cpu"
        self.can_branch = core.has_one_process
        self.draws_branches = self.can_branch and model.drafts_by_itself

    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Any:
        """See `StepBackend`; returns `RemoteLogits`."""
        heads = self._model.heads
        row_counts = _row_counts(segments, rows)
        step = self._cache.step(segments, row_counts)
        try:
            self._model.call("tandem_step", step)
        except Exception:
            # The workers may know these sequences or not: they begin anew.
            for segment in segments:
                self._cache.distrust(segment.sequence)
            raise
        if heads is not None:
            heads.end_step(segments, row_counts)
        return RemoteLogits(self._model, self._cache)

    def run_branches(self, parts: SequenceOf[BranchStep]) -> Tensor:
        """See `StepBackend`. Branches are sequences that share the blocks of their trunk. Logits of those for which
        there is no room are NaN, with which they end."""
        branches: list[Sequence | None] = []
        for part in parts:
            branches += self._cache.branches(part) or [None] * part.token_count
        found = torch.full(
            (len(branches), self._model.info.vocabulary_size), torch.nan, device=self._model.device
        )
        try:
            for rows in self._steps_of(branches):
                segments = [
                    Segment(each, each.pending_count) for i in rows if (each := branches[i]) is not None
                ]
                ends = accumulate(segment.token_count for segment in segments)
                logits = self.run(segments, [end - 1 for end in ends])
                found[rows] = logits[: len(rows)].to(found.dtype)
                for segment in segments:
                    segment.sequence.advance(segment.token_count)
        except Exception:
            for part in parts:
                self._cache.trim(part.sequence)
            raise
        return found

    def draw_branches(
        self, parts: SequenceOf[BranchStep], draws: SequenceOf[BranchDraws]
    ) -> list[SequenceOf[Any] | None]:
        """See `StepBackend`."""
        branches: list[Sequence | None] = []
        payloads: list[Any] = []
        counts: list[int] = []
        for part, own in zip(parts, draws, strict=True):
            branches += self._cache.branches(part) or [None] * part.token_count
            payloads += own.payloads
            counts += [own.count] * part.token_count
        found: list[Any] = [None] * len(branches)
        try:
            for rows in self._steps_of(branches):
                segments = [
                    Segment(each, each.pending_count) for i in rows if (each := branches[i]) is not None
                ]
                ends = accumulate(segment.token_count for segment in segments)
                logits = self.run(segments, [end - 1 for end in ends])
                drawn = logits.draft(draws[0].begin, [payloads[i] for i in rows], [counts[i] for i in rows])
                for i, each in zip(rows, drawn, strict=True):
                    found[i] = each
        finally:
            for part in parts:
                self._cache.trim(part.sequence)
        split = iter(found)
        by_part = [[next(split) for _ in range(part.token_count)] for part in parts]
        return [None if None in own else own for own in by_part]

    def _steps_of(self, branches: SequenceOf[Sequence | None]) -> Iterator[list[int]]:
        """Branches that are run together, by their numbers, as many as vLLM takes in a step."""
        rows: list[int] = []
        tokens = 0
        for number, branch in enumerate(branches):
            if branch is None:
                continue
            if rows and (
                len(rows) == self._limits.max_num_seqs
                or tokens + branch.pending_count > self._limits.max_num_batched_tokens
            ):
                yield rows
                rows = []
                tokens = 0
            rows.append(number)
            tokens += branch.pending_count
        if rows:
            yield rows


def _row_counts(segments: SequenceOf[Segment], rows: SequenceOf[int]) -> list[int]:
    """Number of rows wanted of each segment; they are always those of its last tokens."""
    ends = accumulate(segment.token_count for segment in segments)
    return [last - first for first, last in pairwise((0, *(bisect_left(rows, end) for end in ends)))]


def _info(core: Core, checkpoint: Checkpoint, device_count: int) -> ModelInfo:
    model = core.config.model_config
    vocabulary_size = int(model.get_vocab_size())
    return ModelInfo(
        name=model_name(checkpoint.folder),
        architecture=checkpoint.architecture,
        vocabulary_size=vocabulary_size,
        tokenizer_hash=tokenizer_hash(checkpoint.folder),
        max_length=int(model.max_model_len),
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=end_ids_within(checkpoint, vocabulary_size),
        sampling_defaults=checkpoint.sampling_defaults,
        service_version=tandem.__version__,
        parameter_count=checkpoint.weights.value_count,
        tensor_parallel_size=device_count,
    )
