"""The plug-in inside a real vLLM draws what the target alone would draw, for vLLM's rejection sampler knows its drafts'
probabilities."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers import mend_expansion
from tandem.model.types import Proposal
from tandem_vllm.proposer import WORKER, WaysOfDrafting, entries_of
from tests.end_to_end.processes import address_of, model_service
from tests.unit.engine.tiny_models import MAX_LENGTH, save_checkpoint
from tests.vllm.families import FAMILIES

pytestmark = pytest.mark.timeout(1200)

TEMPERATURE = 0.8
TOKENS = 24
"""On a busy machine a draft of so many new sequences reads prompts for the first steps."""
COMPLETIONS = 640
BINS = 10
SURE = 1e-6
"""Chance of a right sampler to be called wrong."""


class Pair:
    """A vLLM that drafts by a service of ours, and both models in transformers."""

    def __init__(self, llm: Any, target: Any, draft: Any) -> None:
        self._llm = llm
        self._target = target
        self._draft = draft

    def counts(self) -> tuple[int, int]:
        """Tokens drafted and accepted so far."""
        values = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        names = "num_draft_tokens", "num_accepted_tokens"
        drafted, accepted = (int(values.get(f"vllm:spec_decode_{name}", 0)) for name in names)
        return drafted, accepted

    def complete(self, prompt: Sequence[int]) -> list[list[int]]:
        """Many completions of a prompt."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=TEMPERATURE, max_tokens=TOKENS, ignore_eos=True, detokenize=False, n=1
        )
        asked = [{"prompt_token_ids": list(prompt)}] * COMPLETIONS
        return [
            list(found.outputs[0].token_ids) for found in self._llm.generate(asked, params, use_tqdm=False)
        ]

    def places(self, prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
        """Each token's place in the target's distribution, uniform in 0..1 if it was drawn from it. Tokens are in the
        order of what the draft favours, so that a draft's influence shows."""
        draw = random.Random(1)
        tokens = torch.tensor([[*prompt, *text] for text in texts])
        with torch.inference_mode():
            target, draft = (
                torch.softmax(model(tokens[:, :-1]).logits[:, len(prompt) - 1 :].double() / TEMPERATURE, -1)
                for model in (self._target, self._draft)
            )
        order = (draft / target).argsort(-1, descending=True)
        ordered = target.gather(-1, order)
        at = (order == tokens[:, len(prompt) :, None]).double().argmax(-1, keepdim=True)
        own = ordered.gather(-1, at)
        before = ordered.cumsum(-1).gather(-1, at) - own
        noise = torch.tensor([draw.random() for _ in range(own.numel())]).reshape(own.shape)
        return (before + noise * own).flatten().numpy()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "draft")]
    target, draft = (save_checkpoint(folder, FAMILIES["llama"]()) for folder in folders)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in draft.parameters():
            weights += 0.2 * weights.std() * torch.randn(weights.shape, generator=generator)
    draft.save_pretrained(folders[1])
    with _drafted_for(folders[0], folders[1]) as llm:
        yield Pair(llm, target, draft)


@contextmanager
def _drafted_for(target: Path, draft: Path) -> Iterator[Any]:
    """A vLLM of this target that drafts by a service of ours in every step."""
    mend_expansion()
    with (
        model_service("tandem_draft", draft, "--dtype", "float32") as service,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {
            "TANDEM_VLLM_DRAFT_ADDRESS": address_of(service),
            "TANDEM_VLLM_DRAFT_PATIENCE_SECONDS": "5",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }.items():
            patch.setenv(name, value)
        # Beside models this small vLLM alone is faster, so that soon nothing would be drafted.
        patch.setattr(WaysOfDrafting, "begin_step", lambda ways: ways.best)
        yield _engine(target)


def _engine(folder: Path) -> Any:
    from vllm import LLM

    ours = {"method": "custom_class", "model": "tandem_vllm.TandemProposer"}
    return LLM(
        model=str(folder),
        dtype="float32",
        max_model_len=MAX_LENGTH,
        max_num_seqs=64,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        kv_cache_memory_bytes=32 << 20,
        worker_cls=WORKER,
        speculative_config={**ours, "num_speculative_tokens": 3},
    )


def p_value(places: np.ndarray[Any, Any]) -> float:
    """Of a chi-square test that places are uniform."""
    found, _ = np.histogram(places, BINS, (0.0, 1.0))
    expected = len(places) / BINS
    statistic = torch.tensor(((found - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((BINS - 1) / 2.0).double(), statistic / 2.0))


def test_with_our_drafts_vllm_draws_from_the_target(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5, 9, 41, 7, 88, 13]
    texts = pair.complete(prompt)
    drafted, accepted = pair.counts()
    assert drafted > COMPLETIONS * TOKENS / 4, "hardly anything was drafted"
    assert 0.1 < accepted / drafted < 0.9, "nothing to correct"
    assert p_value(pair.places(prompt, texts)) > SURE

    # The test would notice: vLLM is told that the draft had been less sure than it was
    def halved(proposals: Sequence[Proposal]) -> Any:
        *at, probs = entries_of(proposals)
        return *at, probs / np.float32(2)

    monkeypatch.setattr("tandem_vllm.proposer.entries_of", halved)
    assert p_value(pair.places(prompt, pair.complete(prompt))) < SURE
