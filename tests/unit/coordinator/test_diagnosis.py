"""Findings of the doctor for a cluster in a known state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tandem import __version__
from tandem.model.admin import (
    CoordinatorState,
    Finding,
    Load,
    Severity,
    SpeculationSettings,
    Status,
    Throughput,
)
from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role, is_last_target
from tandem.model.speculation_state import SpeculationState
from tandem.model.types import Coverage, ModelInfo, PositionStats, SpeculationStats
from tandem_coordinator.admin.administration import state_of
from tandem_coordinator.admin.diagnosis import diagnose, judge_acceptance
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.speculation_report import Advice
from tests.unit.coordinator.cli.samples import NOW, SPECULATION_OFF

MODEL = ModelInfo("big", "LlamaForCausalLM", 100, "same", 64, "float32", (1,), __version__, 7)
SMALL = replace(MODEL, name="small")
SETTINGS = CoordinatorSettings(target_address="127.0.0.1:1", draft_address="127.0.0.1:2")


def figures(*accepted: int, of: int = 1000) -> SpeculationStats:
    """Statistics of proposals with this many accepted tokens at each position."""
    reached = (of, *accepted)
    positions = [PositionStats(of, reached[index], count) for index, count in enumerate(accepted)]
    return SpeculationStats(of, of * len(accepted), sum(accepted), positions)


TARGET = ReplicaSnapshot(
    Role.TARGET, "127.0.0.1:1", ReplicaState.READY, "", 9.0, 0, 0.0003, 0.020, figures(), MODEL
)
DRAFT = ReplicaSnapshot(
    Role.DRAFT, "127.0.0.1:2", ReplicaState.READY, "", 9.0, 0, 0.0003, 0.004, figures(), SMALL
)


def status(
    *replicas: ReplicaSnapshot,
    stats: SpeculationStats | None = None,
    rule: str = "residual",
    state: SpeculationState | None = None,
) -> Status:
    return Status(
        __version__, state_of(replicas), NOW, 60.0, "big", Load(0, 0), Throughput(0.0, 0.0),
        stats or figures(800, 640, 512, 410), SpeculationSettings(True, 4, rule), replicas,
        state or SpeculationState(True, 4),
    )  # fmt: skip


def found(subject: Status, check: str, settings: CoordinatorSettings = SETTINGS) -> list[Finding]:
    return [finding for finding in diagnose(subject, settings) if finding.check == check]


def test_a_healthy_cluster_has_only_ok_findings() -> None:
    findings = [*diagnose(status(TARGET, DRAFT), SETTINGS)]
    assert {finding.severity for finding in findings} == {Severity.OK}
    assert all(not finding.advice for finding in findings)


def test_speculation_without_gain_is_reported_with_the_deciding_numbers() -> None:
    subject = status(TARGET, DRAFT, state=SPECULATION_OFF)
    (finding,) = found(subject, "speculation")
    assert finding.severity is Severity.WARNING
    assert finding.detail == ("off: drafting does not pay (with 95.2, without 114.1 tokens/s)")
    assert "a smaller one" in finding.advice


def test_no_target_is_a_problem_and_no_draft_a_warning() -> None:
    gone = replace(TARGET, state=ReplicaState.DOWN)
    assert [f.severity for f in found(status(gone, DRAFT), "targets")] == [Severity.PROBLEM]
    assert [f.severity for f in found(status(gone, DRAFT), "target")] == [Severity.PROBLEM]
    assert [f.severity for f in found(status(TARGET, gone, DRAFT), "target")] == [
        Severity.OK,
        Severity.WARNING,
    ]
    assert [f.severity for f in found(status(TARGET), "drafts")] == [Severity.WARNING]
    lost = replace(DRAFT, state=ReplicaState.DOWN)
    assert [f.severity for f in found(status(TARGET, lost), "drafts")] == [Severity.WARNING]
    (off,) = found(status(TARGET, DRAFT), "drafts", SETTINGS.model_copy(update={"speculation": False}))
    assert off.advice == "tandem admin config set speculation true"


def test_targets_that_draft_by_themselves_need_no_draft() -> None:
    assert TARGET.model is not None
    headed = replace(TARGET, model=replace(TARGET.model, drafting_method="eagle3"))
    (every,) = found(status(headed), "drafts")
    assert (every.severity, every.detail) == (
        Severity.OK,
        "1 of 1 targets draft by heads of their own (eagle3)",
    )
    (some,) = found(status(headed, replace(TARGET, address="127.0.0.1:3")), "drafts")
    assert (some.severity, some.detail) == (
        Severity.WARNING,
        "1 of 2 targets draft by heads of their own (eagle3); the others work alone",
    )


def test_models_versions_and_round_trips_are_checked() -> None:
    other = replace(DRAFT, model=replace(SMALL, tokenizer_hash="other"))
    (finding,) = found(status(TARGET, other), "models")
    assert (finding.severity, "has another tokenizer" in finding.detail) == (Severity.WARNING, True)
    model = replace(SMALL, tokenizer_hash="other", maps_vocabularies=True)
    mapped = replace(DRAFT, model=model, coverage=Coverage(300, 400, 500, 0.75, 0.5, 8e-6))
    (finding,) = found(status(TARGET, mapped), "models")
    words = (
        "by vocabulary mapping: the target has 300 of the draft's 400 tokens, 75% of those in a sample text; "
        "it took 0.5 s to map and takes 8 us a proposed token"
    )
    assert (finding.severity, words in finding.detail) == (Severity.OK, True)
    old = replace(DRAFT, model=replace(SMALL, service_version="0.0.1"))
    (finding,) = found(status(TARGET, old), "version")
    assert "it is 0.0.1" in finding.detail
    far = replace(DRAFT, address="10.0.0.9:1", round_trip_seconds=0.009)
    (finding,) = found(status(TARGET, far), "round trip")
    assert "nearer" in finding.advice
    (finding,) = found(status(TARGET, far), "services")
    assert finding.severity is Severity.WARNING, "plain text to another machine"


def test_rope_and_context_of_draft_and_target_are_compared() -> None:
    """As far as both services say what theirs are."""
    target = replace(TARGET, model=replace(MODEL, rope="rope_theta 10000.0", trained_length=MODEL.max_length))

    def models(**fields: Any) -> Finding:
        (finding,) = found(status(target, replace(DRAFT, model=replace(SMALL, **fields))), "models")
        return finding

    for same in ({}, {"rope": "rope_theta 10000.0", "trained_length": MODEL.max_length}):
        assert models(**same).severity is Severity.OK
    other = models(rope="rope_theta 500000.0")
    assert other.severity is Severity.WARNING
    assert "rotary embedding is rope_theta 500000.0 and the target's rope_theta 10000.0" in other.detail
    short = models(trained_length=MODEL.max_length - 1)
    assert short.severity is Severity.WARNING
    assert f"was trained for {MODEL.max_length - 1} positions" in short.detail


def test_the_finding_describes_the_rule() -> None:
    assert found(status(TARGET, DRAFT, rule="auto"), "rule")[0].detail.startswith(
        "auto: the fastest of strict, block"
    )
    assert found(status(TARGET, DRAFT, rule="synthetic"), "rule")[0].severity is Severity.WARNING
    assert "not distributed" in found(status(TARGET, DRAFT, rule="typical-acceptance"), "rule")[0].detail


FIXED = SETTINGS.model_copy(update={"speculation_policy": "fixed"})


@pytest.mark.parametrize(
    ("advice", "settings", "severity", "words"),
    [
        (None, SETTINGS, Severity.OK, "59% of 4,000 proposed tokens"),
        (
            Advice(6, 1, 1.5, 1.53),
            SETTINGS,
            Severity.OK,
            "predicted 1.50 times the speed of the target alone",
        ),
        (
            Advice(6, 1, 1.5, 1.6),
            SETTINGS,
            Severity.WARNING,
            "tandem admin config set num_speculative_tokens 6",
        ),
        (Advice(1, 1, 1.0, 1.1), SETTINGS, Severity.OK, "predicted 1.00 times"),
        (
            Advice(1, 1, 1.0, 1.1),
            FIXED,
            Severity.WARNING,
            "tandem admin config set speculation_policy adaptive",
        ),
        (Advice(0, 1, 0.9, 1.0), FIXED, Severity.WARNING, "tandem admin config set speculation false"),
    ],
)
def test_advice_is_what_the_controller_predicts_where_it_is_worth_it(
    advice: Advice | None, settings: CoordinatorSettings, severity: Severity, words: str
) -> None:
    finding = judge_acceptance(status(TARGET, DRAFT), settings, advice)
    assert finding.severity is severity
    assert words in finding.detail + finding.advice


def test_of_few_proposals_or_a_low_rate_without_predictions_it_says_so() -> None:
    few = judge_acceptance(status(TARGET, DRAFT, stats=figures(0, 0, of=20)), SETTINGS, None)
    assert "too few to judge" in few.detail
    low = judge_acceptance(status(TARGET, DRAFT, stats=figures(20, 1, 0, 0)), SETTINGS, None)
    assert "is low" in low.detail


def test_the_last_target_is_the_only_one_that_takes_sequences() -> None:
    second = replace(TARGET, address="127.0.0.1:3")
    assert is_last_target(TARGET, (TARGET, DRAFT))
    assert not is_last_target(TARGET, (TARGET, second))
    assert is_last_target(TARGET, (TARGET, replace(second, state=ReplicaState.DRAINING)))
    assert not is_last_target(DRAFT, (TARGET, DRAFT))


@pytest.mark.parametrize(
    ("replicas", "state"),
    [
        ((), CoordinatorState.STARTING),
        ((replace(TARGET, state=ReplicaState.CONNECTING, model=None),), CoordinatorState.STARTING),
        ((TARGET,), CoordinatorState.READY),
        ((TARGET, DRAFT), CoordinatorState.READY),
        ((TARGET, replace(DRAFT, state=ReplicaState.DRAINING)), CoordinatorState.DEGRADED),
        ((TARGET, DRAFT, replace(DRAFT, state=ReplicaState.DRAINING)), CoordinatorState.READY),
        ((TARGET, DRAFT, replace(DRAFT, state=ReplicaState.DOWN)), CoordinatorState.DEGRADED),
        ((replace(TARGET, state=ReplicaState.DOWN), DRAFT), CoordinatorState.UNAVAILABLE),
        ((replace(TARGET, state=ReplicaState.DRAINING),), CoordinatorState.UNAVAILABLE),
    ],
)
def test_the_state_follows_from_the_replicas(
    replicas: tuple[ReplicaSnapshot, ...], state: CoordinatorState
) -> None:
    assert state_of(replicas) is state
    assert state.completes is (state in (CoordinatorState.READY, CoordinatorState.DEGRADED))
