"""AdminService: status, statistics, replicas, requests, options and findings."""

from __future__ import annotations

from tandem.model.admin import (
    ConfigOption,
    Diagnosis,
    Finding,
    Load,
    Outcomes,
    RequestReport,
    SpeculationSettings,
    Stats,
    Status,
    Throughput,
)
from tandem.model.replica import ReplicaSnapshot
from tandem.model.speculation_state import SpeculationDecision
from tandem.v1 import admin_pb2
from tandem.wire.common import COVERAGE, MODEL_INFO, SAMPLING_DEFAULTS
from tandem.wire.converter import Converter
from tandem.wire.generation import SPECULATION, SPECULATION_STATE

_LOAD: Converter[Load, admin_pb2.Load] = Converter(Load, admin_pb2.Load)
_THROUGHPUT: Converter[Throughput, admin_pb2.Throughput] = Converter(Throughput, admin_pb2.Throughput)
_DECISION: Converter[SpeculationDecision, admin_pb2.SpeculationDecision] = Converter(
    SpeculationDecision,
    admin_pb2.SpeculationDecision,
    SPECULATION_STATE,
    target="target_address",
    draft="draft_model",
    load="sequence_count",
    num_speculative_tokens="token_count",
    best_draft_length="best_token_count",
)
REPLICA: Converter[ReplicaSnapshot, admin_pb2.Replica] = Converter(
    ReplicaSnapshot, admin_pb2.Replica, SPECULATION, MODEL_INFO, COVERAGE, figures="speculation"
)
REQUEST: Converter[RequestReport, admin_pb2.ActiveRequest] = Converter(
    RequestReport,
    admin_pb2.ActiveRequest,
    SPECULATION,
    SPECULATION_STATE,
    num_speculative_tokens="speculative_token_count",
)
STATUS: Converter[Status, admin_pb2.Status] = Converter(
    Status,
    admin_pb2.Status,
    _LOAD,
    _THROUGHPUT,
    _DECISION,
    REPLICA,
    SPECULATION,
    SPECULATION_STATE,
    SAMPLING_DEFAULTS,
    Converter(SpeculationSettings, admin_pb2.SpeculationSettings, num_speculative_tokens="token_count"),
)
STATS: Converter[Stats, admin_pb2.Stats] = Converter(
    Stats,
    admin_pb2.Stats,
    _LOAD,
    SPECULATION,
    SPECULATION_STATE,
    _THROUGHPUT,
    _DECISION,
    Converter(Outcomes, admin_pb2.Outcomes),
)
OPTION: Converter[ConfigOption, admin_pb2.ConfigOption] = Converter(
    ConfigOption, admin_pb2.ConfigOption, value="json_value", changed_at="change_time"
)
DIAGNOSIS: Converter[Diagnosis, admin_pb2.DiagnoseResponse] = Converter(
    Diagnosis, admin_pb2.DiagnoseResponse, Converter(Finding, admin_pb2.Finding)
)
