"""Sampling parameters of requests that name none: the model's own, a folder's, or an option's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tandem.config import SpeculativeConfig
from tandem.errors import ConfigurationError, InvalidRequestError, ModelFolderError
from tandem.model.sampling.defaults import sampling_defaults
from tandem.model.types import GenerationRequest, RowKind, SamplingDefaults
from tandem.serving.scopes import RequestScopes
from tandem_coordinator.decoding.tokenization import PromptEncoder
from tandem_coordinator.replicas.compatibility import Fleet
from tandem_coordinator.requests.plan import Models, Plan, keep_out, make_plan
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.settings.sampling import SamplingPolicy
from tests.unit.coordinator.model_infos import DRAFT, NGRAM, TARGET

OWN = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, max_new_tokens=50)
REQUEST = GenerationRequest((1, 2))


def settings(**options: Any) -> CoordinatorSettings:
    return CoordinatorSettings(target_address="127.0.0.1:1", **options)


def models(defaults: SamplingDefaults = OWN, draft: Any = None) -> Models:
    return Models(TARGET, draft, cast("PromptEncoder", None), sampling_defaults=defaults)


async def plan_of(request: GenerationRequest, bounds: CoordinatorSettings, known: Models) -> Plan:
    return await make_plan(request, "r", bounds, known, RequestScopes())


def folder(path: Path, content: object) -> Path:
    (path / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def test_what_a_request_names_is_stronger() -> None:
    filled = models().with_defaults(replace(REQUEST, temperature=0.0, top_k=0, repetition_penalty=1.0))
    assert (filled.temperature, filled.top_k, filled.repetition_penalty) == (0.0, 0, 1.0)
    assert (filled.top_p, filled.min_p, filled.frequency_penalty) == (0.95, None, None)
    assert models().with_defaults(filled) == filled, "filling in twice is filling in once"


@pytest.mark.parametrize(("asked", "wanted"), [(None, 50), (16, 16), (80, 50)])
def test_max_new_tokens_limits_every_completion(asked: int | None, wanted: int) -> None:
    assert models().with_defaults(replace(REQUEST, max_tokens=asked)).max_tokens == wanted


async def test_a_prompt_is_scored_without_what_changes_its_completion() -> None:
    scored = replace(REQUEST, prompt_logprobs=0, logit_bias={3: 1.0}, min_tokens=1)
    plan = await plan_of(scored, settings(), models())
    assert plan.target_options().adjustments
    assert plan.target_options().sampling.penalizes
    assert not plan.scoring_options().adjustments
    assert not plan.scoring_options().sampling.penalizes


async def test_a_plan_has_the_defaults_and_its_summary_says_them() -> None:
    plan = await plan_of(REQUEST, settings(), models())
    assert (plan.sampling.temperature, plan.sampling.top_k, plan.sampling.repetition_penalty) == (
        0.6,
        20,
        1.05,
    )
    assert plan.limits.max_tokens == 50
    plain = await plan_of(REQUEST, settings(), models(SamplingDefaults()))
    assert (plain.sampling.temperature, plain.sampling.top_p) == (1.0, 1.0)


@pytest.mark.parametrize("temperature", [1e-5, 1e-8, 5e-324, 9.9e-5])
async def test_a_temperature_that_is_too_low_to_compute_is_greedy(temperature: float) -> None:
    """In a request and among the defaults, as Qwen2.5-VL has 1e-6."""
    for request, defaults in (
        (replace(REQUEST, temperature=temperature), SamplingDefaults()),
        (REQUEST, SamplingDefaults(temperature=temperature)),
    ):
        plan = await plan_of(request, settings(), models(defaults, DRAFT))
        assert plan.sampling.is_greedy
        assert plan.rule.name == "greedy"
    lowest = await plan_of(replace(REQUEST, temperature=1e-4), settings(), models())
    assert lowest.sampling.temperature == 1e-4


async def test_default_penalties_leave_a_draft_model_out_or_not_as_configured() -> None:
    own = models(draft=DRAFT)
    for option, names in (("target-only", ("repetition_penalty",)), ("draft", ())):
        bounds = settings(draft_model_penalties=option)
        assert keep_out(REQUEST, bounds, own) == names
        plan = await plan_of(REQUEST, bounds, own)
        assert (plan.num_speculative_tokens > 0) == (option == "draft")
    with pytest.raises(
        InvalidRequestError, match=r"repetition_penalty is 1\.05; with a separate draft model"
    ):
        await plan_of(REQUEST, settings(compatibility="max"), own)


async def test_echo_is_served_with_drafts_but_not_as_max() -> None:
    own = models(SamplingDefaults(), NGRAM)
    echoed = replace(REQUEST, echo=True, max_tokens=8)
    assert keep_out(echoed, settings(), own) == ()
    assert (await plan_of(echoed, settings(), own)).num_speculative_tokens > 0
    as_max = settings(compatibility="max")
    with pytest.raises(InvalidRequestError, match="echo is true and a draft proposes"):
        await plan_of(echoed, as_max, own)
    short = await plan_of(replace(echoed, max_tokens=1), as_max, own)
    assert short.num_speculative_tokens == 0


def test_the_source_of_defaults_is_the_model_none_or_a_folder_and_an_override_is_stronger(
    tmp_path: Path,
) -> None:
    target = replace(TARGET, sampling_defaults=OWN)
    elsewhere = str(folder(tmp_path, {"temperature": 0.3, "do_sample": False, "bos_token_id": 1}))

    def defaults(**options: Any) -> SamplingDefaults:
        return SamplingPolicy(settings(**options)).defaults_of(target)

    assert defaults() == OWN
    assert defaults(generation_config="vllm") == SamplingDefaults()
    assert defaults(generation_config=elsewhere) == SamplingDefaults(temperature=0.3)
    override = '{"temperature": null, "top_k": -1, "min_p": 0.1}'
    changed = replace(OWN, temperature=None, top_k=0, min_p=0.1)
    assert defaults(override_generation_config=override) == changed
    assert defaults(override_generation_config=json.loads(override)) == changed


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("{", "override_generation_config is '{'; it must be a JSON object"),
        ("[" * 100_000, "it must be a JSON object"),
        ([1], r"override_generation_config is \[1\]; it must be a JSON object"),
        ({"max_tokens": 5}, "override_generation_config has max_tokens; it must be one of temperature, top_k"),
        ({"temperature": "hot"}, 'override_generation_config has temperature "hot"; it must be a finite number'),
        ({"temperature": True}, "override_generation_config has temperature true; it must be a finite number"),
        ({"top_p": 10**400}, "override_generation_config has top_p 1000"),
        ({"top_k": 1.5}, r"override_generation_config has top_k 1\.5; it must be a whole number from -1 to"),
        ({"max_new_tokens": 0}, "override_generation_config has max_new_tokens 0; it must be a whole number from 1"),
        ({"top_p": 0}, r"override_generation_config: top_p is 0\.0; it must be more than 0 and at most 1"),
        ({"temperature": -1}, "override_generation_config: temperature is -1.0; it must be a finite number of at"),
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_a_wrong_override_is_refused_in_one_sentence(override: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        settings(override_generation_config=override)


def test_a_wrong_source_is_refused_in_one_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    wrong = tmp_path / "wrong"
    for each in (empty, wrong):
        each.mkdir()
    folder(wrong, {"top_k": "all"})
    for named, sentence in (
        ("aut", "generation_config is aut; it must be auto, vllm, or a folder"),
        (empty, "has no generation_config.json"),
        (wrong, 'has top_k "all"; it must be a finite number'),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            SamplingPolicy(settings(generation_config=str(named)))


def test_a_models_file_is_read_by_type_and_judged_by_the_coordinator(tmp_path: Path) -> None:
    assert sampling_defaults(folder(tmp_path, {"temperature": None, "top_k": 50})) == SamplingDefaults(
        top_k=50
    )
    assert sampling_defaults(folder(tmp_path, {"temperature": 1e-6})) == SamplingDefaults(temperature=1e-6)
    with pytest.raises(ModelFolderError, match='has top_p "x"; it must be a finite number'):
        sampling_defaults(folder(tmp_path, {"top_p": "x"}))
    wrong = replace(TARGET, sampling_defaults=sampling_defaults(folder(tmp_path, {"top_p": 2})))
    fleet = Fleet(SpeculativeConfig())
    assert fleet.judge_target(wrong) == (
        "generation_config.json: top_p is 2.0; it must be more than 0 and at most 1; replace it by "
        "--override-generation-config, or leave the file out by --generation-config vllm"
    )
    assert fleet.target is None, "it sets no standard"
    for options in ({"generation_config": "vllm"}, {"override_generation_config": {"top_p": 0.5}}):
        assert Fleet(SpeculativeConfig(), SamplingPolicy(settings(**options))).judge_target(wrong) == ""


def test_targets_agree_in_the_defaults_that_are_in_force() -> None:
    own = replace(TARGET, sampling_defaults=OWN)
    other = replace(TARGET, sampling_defaults=replace(OWN, top_k=5))
    fleet = Fleet(SpeculativeConfig())
    assert fleet.judge_target(own) == ""
    assert fleet.sampling_defaults == OWN
    assert fleet.judge_target(other) == (
        "the sampling defaults are temperature 0.6, top_k 5, top_p 0.95, repetition_penalty 1.05, max_new_tokens 50 "
        "for this target and temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.05, max_new_tokens 50 for "
        "the others; give all targets one generation_config.json, or start the coordinator with --generation-config "
        "vllm or a folder"
    )
    for options in ({"generation_config": "vllm"}, {"override_generation_config": {"top_k": 0}}):
        fleet = Fleet(SpeculativeConfig(), SamplingPolicy(settings(**options)))
        assert [fleet.judge_target(each) for each in (own, other)] == ["", ""]


@pytest.mark.parametrize(
    ("logprobs", "kind"), [(None, RowKind.TOKEN), (0, RowKind.SUPPORT), (5, RowKind.SUPPORT)]
)
async def test_rows_have_log_probabilities_of_whatever_synthetic_acceptance_keeps(
    logprobs: int | None, kind: RowKind
) -> None:
    """At temperature 0 a row of one token is enough to decide, but knows nothing of a proposed token that is kept."""
    asked = replace(REQUEST, temperature=0.0, logprobs=logprobs, rejection_sampling_strategy="synthetic")
    bounds = settings(synthetic_acceptance_rate=0.6)
    plan = await plan_of(asked, bounds, models(SamplingDefaults(), NGRAM))
    assert plan.row_kind is kind
