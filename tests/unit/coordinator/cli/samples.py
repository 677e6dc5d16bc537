"""The state of a coordinator at one moment, as plain data."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

from tandem.model import admin
from tandem.model.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.model.speculation_state import DecidingFigure, SpeculationDecision, SpeculationState
from tandem.model.types import AheadStats, ModelInfo, PositionStats, SamplingDefaults, SpeculationStats

NOW = datetime(2026, 11, 21, 12, 30, 5, 250000, tzinfo=UTC)
FIGURES = SpeculationStats(
    10234, 40936, 24871, [PositionStats(10234, *each) for each in pairwise((10234, 8402, 6801, 5500, 4168))],
    AheadStats(10190, 7836, [4586, 1012, 611, 420, 330, 275, 190, 160, 90, 70, 40, 30, 10, 8, 3, 1], 1246.53),
)  # fmt: skip
MODEL = ModelInfo(
    "Llama-3.1-70B", "LlamaForCausalLM", 128256, "ab" * 32, 8192, "bfloat16", (2,), "0.1.0", 10**11,
    sampling_defaults=SamplingDefaults(temperature=0.6, top_p=0.9),
)  # fmt: skip


def replica(
    role: Role, address: str, state: ReplicaState = ReplicaState.READY, reason: str = ""
) -> ReplicaSnapshot:
    return ReplicaSnapshot(role, address, state, reason, 4030, 12, 0.0004, 0.0213, FIGURES, MODEL)


REPLICAS = (
    replica(Role.TARGET, "10.244.123.231:50051"),
    replica(Role.TARGET, "10.244.123.232:50051", ReplicaState.DRAINING, "an operator drained it"),
    replica(Role.DRAFT, "10.244.123.240:50052", ReplicaState.INCOMPATIBLE,
        "the draft Llama-3.2-1B has another tokenizer (hash cdcdcdcdcdcd) than the target Llama-3.1-70B (hash "
        "abababababab); a token id must mean the same to both"),
    replace(replica(Role.DRAFT, "10.244.123.241:50052", ReplicaState.DOWN, "it does not answer"),
        figures=SpeculationStats(), round_trip_seconds=None, step_seconds=None),
)  # fmt: skip
SPECULATION_ON = SpeculationState(True, 4)
RATES = (DecidingFigure("with", 95.2, "tokens/s"), DecidingFigure("without", 114.1, "tokens/s"))
SPECULATION_OFF = SpeculationState(False, 0, "drafting does not pay", RATES)
_AT_ONE = SpeculationDecision(
    "10.244.123.231:50051", "Llama-3.2-1B", "residual", "0.85-1.15", 1, 4, 4, 1.62, 0, 0
)
DECISIONS = (
    _AT_ONE,
    replace(
        _AT_ONE, num_speculative_tokens=6, best_draft_length=6, gain=2.31, predicted_seconds=0.41,
        measured_seconds=0.43, round_seconds=(0.0061, 0.0064, 0.0068, 0.0071, 0.0074, 0.0078, 0.0081),
        acceptance_rates=(0.71, 0.68, 0.66, 0.65, 0.65, 0.64), ahead_outcomes=16,
    ),
    replace(_AT_ONE, load=16, num_speculative_tokens=0, best_draft_length=2, gain=0.86),
)  # fmt: skip
STATS = admin.Stats(
    NOW, 8054.0, admin.Load(24, 3), admin.Throughput(1412.34, 1388.01), admin.Outcomes(12803, 3, 41, 2), 1_482_201,
    FIGURES, {"typical-acceptance": FIGURES, "greedy": SpeculationStats(12)}, SPECULATION_OFF, DECISIONS,
)  # fmt: skip
STATUS = admin.Status(
    "0.1.0", admin.CoordinatorState.DEGRADED, NOW, 8054.0, "Llama-3.1-70B", STATS.load, STATS.throughput, FIGURES,
    admin.SpeculationSettings(True, 4, "residual"), REPLICAS, SPECULATION_OFF, DECISIONS,
    SamplingDefaults(temperature=0.6, top_k=20, max_new_tokens=512),
)  # fmt: skip
BEFORE = replace(
    STATS, speculation=replace(FIGURES, rounds=10000, drafted=40000, accepted=24400, positions=[])
)
REQUEST = admin.RequestReport(
    "3f9c" * 8, 12.5, 4096, 371, "typical-acceptance", 4, "10.244.123.241:50052", None, FIGURES, SPECULATION_ON,
)  # fmt: skip
FINDINGS = (
    admin.Finding("address", "10.0.0.5:50051", admin.Severity.OK, "it accepts connections, within 1.3 ms"),
    admin.Finding("round trip", "10.244.123.231:50051", admin.Severity.WARNING, "8.2 ms, which every round waits for",
        "bring it nearer to the coordinator, or propose more tokens in each round"),
    admin.Finding("targets", "", admin.Severity.PROBLEM, "0 of 2 take new sequences", "start a target service"),
)  # fmt: skip
