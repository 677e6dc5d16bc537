"""Every drafting head proposes what an independent reference does, and the target's greedy text does not change."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import pytest

from tandem.acceptance.strategies import rule_of
from tandem.errors import ConfigurationError
from tandem.model.types import (
    AcceptanceTerms,
    Delta,
    Grammar,
    GrammarKind,
    RowKind,
    SamplingParams,
    TargetOptions,
    TokenRow,
)
from tandem.model_sources.bundled import demo_pair
from tandem_target.loading import load_verifier
from tandem_target.service import TargetService
from tandem_target.settings import TargetSettings
from tandem_target.verifier import Verifier
from tests.end_to_end.models import load_reference, random_model, save_model, six_tokens
from tests.heads import (
    FLAGS,
    DFlashReference,
    Eagle3Reference,
    EagleReference,
    MedusaReference,
    save_dflash,
    save_eagle,
    save_eagle3,
    save_medusa,
)
from tests.mtp_models import FAMILIES, MtpTarget
from tests.paths import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET
from tests.unit.engine.greedy import most_probable

GREEDY = SamplingParams(temperature=0.0)


def small_target(**changes: object) -> Any:
    """Eight layers of random weights, with the demo pair's vocabulary."""
    shape = {"hidden_size": 48, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    return random_model(3, num_hidden_layers=8, initializer_range=0.2, **{**shape, **changes})


def saved_target(model: Any, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return save_model(model, folder)


@asynccontextmanager
async def running(target: Path, head: Path | None, **settings: object) -> AsyncIterator[Verifier]:
    """A target with its head, ready; None for the prediction layers in the target's own checkpoint."""
    values: dict[str, Any] = {"model": target, "threads": 1, "max_length": 256, "compile": "off"}
    values["draft_repeats"] = False  # a text of few tokens repeats itself, and no head would ever be asked
    own = {"draft_model": head, "speculative_method": None if head else "mtp"}
    verifier = load_verifier(TargetSettings(**(values | settings | own)))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(verifier.close)
        await verifier.start()
        yield verifier


class Request:
    """A request whose tokens the target draws, round by round as the coordinator runs it: a greedy one, or under the
    rule `strict` where it is sampled."""

    def __init__(
        self,
        verifier: Verifier,
        name: str,
        prompt: Sequence[int],
        token_count: int = 4,
        grammar: Grammar | None = None,
        scope: str = "",
        sampling: SamplingParams = GREEDY,
    ) -> None:
        self._verifier = verifier
        self._sampling = sampling
        self._terms = AcceptanceTerms("greedy" if sampling.is_greedy else "strict")
        self._grammar = grammar
        self._scope = scope
        self._name = name
        self._token_count = token_count
        self._sent = 0
        self.tokens = list(prompt)
        self.proposals: list[tuple[int, tuple[int, ...]]] = []
        """Of each round: the length before it, and what was proposed."""
        self.accepted = 0

    async def run(self, new_tokens: int) -> list[int]:
        """The first `new_tokens` tokens after the prompt."""
        end = len(self.tokens) + new_tokens
        prompt_length = len(self.tokens)
        grammar = self._grammar
        options = TargetOptions(
            self._name,
            self._sampling,
            scope=self._scope,
            prompt_length=prompt_length,
            grammar=grammar,
            acceptance=self._terms,
        )
        async with self._verifier.sequence(options) as verified:
            while len(self.tokens) < end:
                await self._round(verified)
        return self.tokens[end - new_tokens : end]

    async def _round(self, verified: Any) -> None:
        length = len(self.tokens)
        delta = Delta(self._sent, tuple(self.tokens[self._sent :]))
        rule = rule_of(self._terms, self._sampling)
        step = rule.own_step(delta, RowKind.TOKEN, 0, 0, self._token_count)
        verification = await verified.verify(step)
        proposal = verification.proposal
        self.proposals.append((length, proposal.token_ids))
        for index, row in enumerate(verification.rows):
            assert isinstance(row, TokenRow)
            self.tokens.append(row.token_id)
            if index == len(proposal) or row.token_id != proposal.token_ids[index]:
                break
            self.accepted += 1
        self._sent = len(self.tokens) - 1


class Reference(Protocol):
    """An independent computation of a head's proposals."""

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The most probable tokens after these."""


async def check(
    model: Any,
    folder: Path,
    head: Path | None,
    reference: Reference,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    proposed: int = 4,
    **settings: object,
) -> int:
    """Run all prompts at once, and compare each proposal and each text; return the number of accepted tokens."""
    async with running(folder, head, **settings) as verifier:
        requests = [Request(verifier, str(index), prompt) for index, prompt in enumerate(prompts)]
        texts = await asyncio.gather(*(request.run(new_tokens) for request in requests))
    for prompt, text, request in zip(prompts, texts, requests, strict=True):
        assert text == most_probable(model, prompt, text)
        lengths = [len(proposal) for _, proposal in request.proposals]
        assert lengths == [0] + [proposed] * (len(lengths) - 1), "a proposal in every round but the first"
        for length, proposal in reversed(request.proposals[1:]):  # the reference reads the longest text once
            assert list(proposal) == reference.propose(request.tokens[:length], proposed)
    return sum(request.accepted for request in requests)


Save = Callable[..., Path]
ON = True
OFF = False
EAGLE3: dict[str, dict[str, Any]] = {
    "raw": {},
    "raw, every flag": {
        "norm_before_residual": ON, "norm_before_fc": ON, "norm_output": ON, "own_embedding": ON,
        "layer_ids": (1, 4, 6),
    },
    "raw, a norm for each state": {"fc_norm": ON, "norm_output": ON, "draft_vocabulary": 2048},
    "speculators": {"wrapped": ON},
    "speculators, every flag": {
        "wrapped": ON, "norm_before_residual": OFF, "norm_before_fc": ON, "fc_norm": ON, "norm_output": ON,
    },
    "speculators, one flag": {"wrapped": ON, "norm_output": ON},
}  # fmt: skip
EAGLE: dict[str, dict[str, Any]] = {
    "raw": {},
    "a copy of the embedding and a bias": {"embedding": "copied", "bias": True},
    "vLLM's format and an embedding of its own": {"form": "vllm", "embedding": "own"},
    "speculators": {"form": "speculators"},
    "speculators with a bias": {"form": "speculators", "bias": True, "embedding": "own"},
    "speculators with norms": {"form": "speculators", "norms": True},
}
MEDUSA: dict[str, dict[str, Any]] = {
    "vLLM's format": {},
    "published names": {"published": True, "bias": True},
    "two layers": {"published": True, "layers": 2},
    "some tokens": {"draft_vocabulary": 96, "bias": True},
    "rows of some tokens": {"draft_vocabulary": 96, "whole_outputs": True},
    "one output layer": {"shared_output": True},
}
DFLASH: dict[str, dict[str, Any]] = {
    "raw": {},
    "speculators": {"wrapped": True, "draft_vocabulary": None},
    "speculators, some tokens": {"wrapped": True, "draft_vocabulary": 96},
}
METHODS: dict[str, tuple[Save, Callable[[Path, Any], Reference], dict[str, dict[str, Any]]]] = {
    "eagle3": (save_eagle3, Eagle3Reference, EAGLE3),
    "eagle": (save_eagle, EagleReference, EAGLE),
    "medusa": (save_medusa, MedusaReference, MEDUSA),
    "dflash": (save_dflash, DFlashReference, DFLASH),
}
VARIANTS = {
    f"{method}, {name}": (partial(save, **options), reference)
    for method, (save, reference, variants) in METHODS.items()
    for name, options in variants.items()
}
PROMPTS = [(5, 9, 2, 700, 31, 8), (1, 1), (40, 41, 42, 43) * 20]
FEW = [(1, 2, 3), (4, 5), (0, 0, 1, 5, 5)]
"""Prompts for a model of six tokens, which accepts some proposals, wholly or in part."""
MANY = [tuple((7 * row + column * column) % 2048 for column in range(2 + 3 * row)) for row in range(20)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of transformers, and its folder."""
    model = small_target()
    return model, saved_target(model, tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("are_many", [False, pytest.param(True, marks=pytest.mark.soak)])
async def test_proposals_are_the_references(
    name: str, are_many: bool, target: tuple[Any, Path], tmp_path: Path
) -> None:
    model, folder = target
    save, reference = VARIANTS[name]
    head = save(tmp_path / "eagle-head", model)
    prompts, new_tokens = (MANY, 64) if are_many else (PROMPTS, 5)
    await check(model, folder, head, reference(head, model), prompts, new_tokens, max_sequences=20)


@pytest.mark.soak
@pytest.mark.parametrize("wrapped", [False, True], ids=["raw", "speculators"])
async def test_every_flag_over_many_prompts(wrapped: bool, target: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = target
    for number, values in enumerate(product((OFF, ON), repeat=len(FLAGS))):
        flags: dict[str, Any] = dict(zip(FLAGS, values, strict=True))
        head = save_eagle3(tmp_path / f"head{number}", model, wrapped=wrapped, **flags)
        await check(model, folder, head, Eagle3Reference(head, model), MANY, 64, max_sequences=20)


def looked_up(tokens: Sequence[int], count: int) -> list[int]:
    """The tokens that followed the last two when they last came before."""
    for end in range(len(tokens) - 1, 1, -1):
        if tuple(tokens[end - 2 : end]) == tuple(tokens[-2:]):
            return list(tokens[end : end + count])
    return []


async def test_a_head_catches_up_behind_what_was_repeated(target: tuple[Any, Path], tmp_path: Path) -> None:
    """Where the text repeats itself the head runs no pass. Its next proposal has read what was written meanwhile."""
    model, folder = target
    head = save_eagle3(tmp_path / "head", model, norm_output=True)
    reference = Eagle3Reference(head, model)
    async with running(folder, head, draft_repeats=True) as verifier:
        requests = [Request(verifier, str(index), prompt) for index, prompt in enumerate(PROMPTS)]
        texts = await asyncio.gather(*(request.run(48) for request in requests))
    repeated = own = behind = 0
    for prompt, text, request in zip(PROMPTS, texts, requests, strict=True):
        assert text == most_probable(model, prompt, text)
        was_repeated = False
        reference.propose(request.tokens, 1)  # it reads the longest text once
        for length, proposal in request.proposals:
            tokens = request.tokens[:length]
            if proposal and list(proposal) == looked_up(tokens, 4):
                repeated += 1
                was_repeated = True
            elif proposal:
                assert list(proposal) == reference.propose(tokens, 4)
                own += 1
                behind += was_repeated
                was_repeated = False
    assert min(repeated, own, behind) > 0, (repeated, own, behind)


FEW_LAYERS: dict[str, dict[str, Any]] = {
    "eagle": {}, "eagle3": {"draft_vocabulary": 6, "layer_ids": (1, 2, 3)}, "medusa": {},
    "dflash": {"layer_ids": (0, 2)},
}  # fmt: skip
"""Options of each head for a target of four layers, whose steps are traced in half the time."""


@pytest.mark.parametrize(
    ("method", "compile_mode"),
    [("eagle", "auto"), ("eagle3", "auto"), ("medusa", "auto"), ("dflash", "off")],
)
async def test_accepted_positions_read_target_states(method: str, compile_mode: str, tmp_path: Path) -> None:
    model = six_tokens(6, 4, 48)
    save, reference, _ = METHODS[method]
    head = save(tmp_path / "eagle-head", model, **FEW_LAYERS[method])
    folder = saved_target(model, tmp_path / "target")
    assert await check(model, folder, head, reference(head, model), FEW, 24, compile=compile_mode) > 5


@pytest.mark.parametrize("family", FAMILIES)
async def test_proposals_of_the_targets_own_layers(family: str, tmp_path: Path) -> None:
    target = MtpTarget(family)
    await check(target.model, target.save(tmp_path / "target"), None, target, PROMPTS, 5)


@pytest.mark.parametrize(
    ("family", "compile_mode"), [("deepseek_v3", "auto"), ("qwen3_next", "off"), ("qwen3", "auto")]
)
async def test_accepted_positions_of_own_layers(family: str, compile_mode: str, tmp_path: Path) -> None:
    target = MtpTarget(family, vocabulary=6)
    folder = target.save(tmp_path / "target")
    assert await check(target.model, folder, None, target, FEW, 24, compile=compile_mode) > 5


@pytest.mark.parametrize("compile_mode", ["off", "auto"])
async def test_the_bundled_head_proposes_in_bfloat16(compile_mode: str) -> None:
    """By CPU kernels its residual stream is float32, its cache is not."""
    async with running(DEMO_TARGET, DEMO_EAGLE3, dtype="bfloat16", compile=compile_mode) as verifier:
        request = Request(verifier, "request", tuple(range(5, 60)))
        await request.run(24)
    lengths = [len(proposal) for _, proposal in request.proposals]
    assert lengths == [0] + [4] * (len(lengths) - 1), "a proposal in every round but the first"
    assert request.accepted > 4


async def test_the_bundled_medusa_heads_foresee_some_tokens() -> None:
    model = load_reference(DEMO_TARGET)
    head = demo_pair().head("medusa")
    prompts = [tuple(range(300, 320)), (40, 41, 42, 43) * 4]
    reference = MedusaReference(head, model)
    assert await check(model, DEMO_TARGET, head, reference, prompts, 24, dtype="float32") > 0


async def test_a_proposal_has_a_token_of_each_medusa_head_at_most(
    target: tuple[Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, folder = target
    head = save_medusa(tmp_path / "head", model)
    with caplog.at_level(logging.WARNING):
        async with running(folder, head) as verifier:
            # Said once for each number in a process
            request = Request(verifier, "one", PROMPTS[0], token_count=11)
            await request.run(4)
    lengths = [len(proposal) for _, proposal in request.proposals]
    assert lengths == [0] + [4] * (len(lengths) - 1)
    sentence = "11 tokens were asked for, but the draft has 4 heads, which propose one token each"
    assert sum(record.getMessage().startswith(sentence) for record in caplog.records) == 1


@pytest.mark.parametrize("block_size", [3, 5, 16])
async def test_blocks_of_any_size(block_size: int, target: tuple[Any, Path], tmp_path: Path) -> None:
    """Four tokens are asked for. The longest prompt is read in chunks, and the block behind it is not divided."""
    model, folder = target
    head = save_dflash(tmp_path / "head", model, block_size=block_size)
    proposed = min(4, block_size - 1)
    reference = DFlashReference(head, model)
    await check(model, folder, head, reference, PROMPTS, 5, proposed, max_num_batched_tokens=24)


async def test_a_block_ends_at_the_longest_sequence(tmp_path: Path) -> None:
    """Near max_length the proposals become shorter."""
    model = small_target(vocab_size=6)
    folder = saved_target(model, tmp_path / "target")
    head = save_dflash(tmp_path / "head", model)
    async with running(folder, head, max_length=32) as verifier:
        request = Request(verifier, "a", (1, 2, 3) * 8)
        await request.run(6)
    assert max(length + len(proposal) for length, proposal in request.proposals) <= 32


HEAD = {"architectures": ["LlamaForCausalLMEagle3"]}


def refusal(**settings: Any) -> str:
    values: dict[str, Any] = {"model": DEMO_TARGET, **settings}
    with pytest.raises(ConfigurationError) as error:
        TargetService(TargetSettings(**values))
    return str(error.value)


def test_a_draft_must_be_the_folder_of_a_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    TargetService(TargetSettings(model=DEMO_TARGET, draft_model=tmp_path))
    missing = tmp_path / "nowhere"
    assert refusal(draft_model=missing) == f"--draft-model is {missing}; there is no such folder"
    rule = "beside a target it must be eagle or eagle3 or medusa or dflash"
    assert refusal(draft_model=DEMO_DRAFT) == f"--method is not given for the draft {DEMO_DRAFT}; {rule}"
    named = refusal(draft_model=tmp_path, speculative_method="ngram")
    assert named == f"--method is ngram for the draft {tmp_path}; {rule}"


def test_mtp_needs_no_draft(tmp_path: Path) -> None:
    TargetService(TargetSettings(model=DEMO_TARGET, speculative_method="deepseek_mtp"))
    assert refusal(draft_model=tmp_path, speculative_method="mtp") == (
        f"--method is mtp, whose weights lie in the target's own checkpoint, and --draft-model is {tmp_path}; leave "
        "out --draft-model"
    )


@pytest.mark.parametrize("method", METHODS)
async def test_heads_propose_what_a_grammar_allows(
    method: str, target: tuple[Any, Path], tmp_path: Path
) -> None:
    """In every way of making proposals: one token a pass, heads side by side, and blocks."""
    model, folder = target
    whole = {"draft_vocabulary": 2048} if method == "eagle3" else {}
    head = METHODS[method][0](tmp_path / f"{method}-head", model, **whole)
    grammar = Grammar(GrammarKind.REGEX, "([ab][cd]){30}")
    async with running(folder, head) as verifier:
        request = Request(verifier, "r", PROMPTS[0], grammar=grammar)
        await request.run(16)
        state = await verifier.open_grammar(grammar, "")
    proposed = [(length, token_ids) for length, token_ids in request.proposals if token_ids]
    assert len(proposed) > 3
    for length, token_ids in proposed:
        assert state.follow(request.tokens[len(PROMPTS[0]) : length])
        assert state.allowed_count(token_ids) == len(token_ids)


async def test_a_heads_steps_have_plans_in_bfloat16_too(caplog: pytest.LogCaptureFixture) -> None:
    """A plan once met a cast that the trace had not: the states that its pass was tried with were another mode's."""
    caplog.set_level(logging.WARNING)
    async with running(DEMO_TARGET, DEMO_EAGLE3, dtype="bfloat16", compile="auto") as verifier:
        await Request(verifier, "r", PROMPTS[0]).run(8)
    assert not [record for record in caplog.records if "modules" in record.getMessage()]
