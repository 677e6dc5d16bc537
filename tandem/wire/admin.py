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

# Parts of these messages have their mirrors there.
from tandem.wire import common, generation  # noqa: F401
from tandem.wire.mirror import Mirror

# Parts before the whole.
Mirror(Load, admin_pb2.Load)
Mirror(Throughput, admin_pb2.Throughput)
Mirror(Outcomes, admin_pb2.Outcomes)
Mirror(SpeculationSettings, admin_pb2.SpeculationSettings, num_speculative_tokens="token_count")
Mirror(
    SpeculationDecision,
    admin_pb2.SpeculationDecision,
    target="target_address",
    draft="draft_model",
    load="sequence_count",
    num_speculative_tokens="token_count",
    best_draft_length="best_token_count",
)
REPLICA = Mirror(ReplicaSnapshot, admin_pb2.Replica, figures="speculation")
REQUEST = Mirror(RequestReport, admin_pb2.ActiveRequest, num_speculative_tokens="speculative_token_count")
STATUS = Mirror(Status, admin_pb2.Status)
STATS = Mirror(Stats, admin_pb2.Stats)
OPTION = Mirror(ConfigOption, admin_pb2.ConfigOption, value="json_value", changed_at="change_time")
Mirror(Finding, admin_pb2.Finding)
DIAGNOSIS = Mirror(Diagnosis, admin_pb2.DiagnoseResponse)
