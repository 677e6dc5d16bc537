"""AdminService: status, statistics, replicas, requests, options and findings."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from tandem.admin import (
    ConfigOption,
    CoordinatorState,
    Diagnosis,
    Finding,
    Load,
    Outcomes,
    RequestReport,
    Severity,
    SpeculationSettings,
    Stats,
    Status,
    Throughput,
)
from tandem.config.layers import Origin
from tandem.replica import ReplicaSnapshot, ReplicaState, Role
from tandem.speculation_state import SpeculationDecision
from tandem.v1 import admin_pb2
from tandem.wire.common import enum_words, model_info_from_proto, model_info_to_proto
from tandem.wire.generation import (
    speculation_stats_from_proto,
    speculation_stats_to_proto,
    state_from_proto,
    state_to_proto,
)


def load_to_proto(load: Load) -> admin_pb2.Load:
    """A coordinator's load as a message."""
    return admin_pb2.Load(running_count=load.running, queued_count=load.queued)


def load_from_proto(message: admin_pb2.Load) -> Load:
    """The load in a message."""
    return Load(message.running_count, message.queued_count)


def throughput_to_proto(throughput: Throughput) -> admin_pb2.Throughput:
    """Tokens per second as a message."""
    return admin_pb2.Throughput(
        last_10_seconds=throughput.last_10_seconds, last_60_seconds=throughput.last_60_seconds
    )


def throughput_from_proto(message: admin_pb2.Throughput) -> Throughput:
    """The tokens per second in a message."""
    return Throughput(message.last_10_seconds, message.last_60_seconds)


def timestamp_of(time: datetime) -> Timestamp:
    """A moment as a message."""
    message = Timestamp()
    message.FromDatetime(time)
    return message


def datetime_of(message: Timestamp) -> datetime:
    """The moment in a message, in the local time zone."""
    return message.ToDatetime(UTC).astimezone()


def decision_to_proto(decision: SpeculationDecision) -> admin_pb2.SpeculationDecision:
    """A decision of the speculation controller as a message."""
    return admin_pb2.SpeculationDecision(
        target_address=decision.target,
        draft_model=decision.draft,
        rule=decision.rule,
        temperatures=decision.temperatures,
        sequence_count=decision.load,
        token_count=decision.num_speculative_tokens,
        best_token_count=decision.best_draft_length,
        gain=decision.gain,
        predicted_seconds=decision.predicted_seconds,
        measured_seconds=decision.measured_seconds,
        round_seconds=decision.round_seconds,
        acceptance_rates=decision.acceptance_rates,
        draft_step_seconds=decision.draft_step_seconds,
        message_seconds=decision.message_seconds,
        ahead_outcome_count=decision.ahead_outcomes,
    )


def decision_from_proto(message: admin_pb2.SpeculationDecision) -> SpeculationDecision:
    """The decision in a message."""
    return SpeculationDecision(
        target=message.target_address,
        draft=message.draft_model,
        rule=message.rule,
        temperatures=message.temperatures,
        load=message.sequence_count,
        num_speculative_tokens=message.token_count,
        best_draft_length=message.best_token_count,
        gain=message.gain,
        predicted_seconds=message.predicted_seconds,
        measured_seconds=message.measured_seconds,
        round_seconds=tuple(message.round_seconds),
        acceptance_rates=tuple(message.acceptance_rates),
        draft_step_seconds=message.draft_step_seconds,
        message_seconds=message.message_seconds,
        ahead_outcomes=message.ahead_outcome_count,
    )


_STATES, _STATES_BACK = enum_words(CoordinatorState, admin_pb2.CoordinatorState, "COORDINATOR_STATE")
_ROLES, _ROLES_BACK = enum_words(Role, admin_pb2.ReplicaRole, "REPLICA_ROLE")
_REPLICA_STATES, _REPLICA_STATES_BACK = enum_words(ReplicaState, admin_pb2.ReplicaState, "REPLICA_STATE")
_ORIGINS, _ORIGINS_BACK = enum_words(Origin, admin_pb2.ConfigOrigin, "CONFIG_ORIGIN")
_SEVERITIES, _SEVERITIES_BACK = enum_words(Severity, admin_pb2.Severity, "SEVERITY")


def status_to_proto(status: Status) -> admin_pb2.Status:
    """A coordinator's status as a message."""
    return admin_pb2.Status(
        version=status.version,
        state=_STATES[status.state],
        time=timestamp_of(status.time),
        uptime_seconds=status.uptime_seconds,
        model=status.model,
        load=load_to_proto(status.load),
        throughput=throughput_to_proto(status.throughput),
        speculation=speculation_stats_to_proto(status.speculation),
        settings=admin_pb2.SpeculationSettings(
            is_on=status.settings.is_on,
            token_count=status.settings.num_speculative_tokens,
            rule=status.settings.rule,
        ),
        replicas=map(replica_to_proto, status.replicas),
        speculation_state=state_to_proto(status.speculation_state),
        decisions=map(decision_to_proto, status.decisions),
    )


def status_from_proto(message: admin_pb2.Status) -> Status:
    """The coordinator's status in a message."""
    settings = message.settings
    return Status(
        version=message.version,
        state=_STATES_BACK[message.state],
        time=datetime_of(message.time),
        uptime_seconds=message.uptime_seconds,
        model=message.model,
        load=load_from_proto(message.load),
        throughput=throughput_from_proto(message.throughput),
        speculation=speculation_stats_from_proto(message.speculation),
        settings=SpeculationSettings(settings.is_on, settings.token_count, settings.rule),
        replicas=tuple(map(replica_from_proto, message.replicas)),
        speculation_state=state_from_proto(message.speculation_state),
        decisions=tuple(map(decision_from_proto, message.decisions)),
    )


def replica_to_proto(replica: ReplicaSnapshot) -> admin_pb2.Replica:
    """A replica as a message."""
    return admin_pb2.Replica(
        role=_ROLES[replica.role],
        address=replica.address,
        state=_REPLICA_STATES[replica.state],
        reason=replica.reason,
        since_seconds=replica.since_seconds,
        open_sequence_count=replica.open_sequences,
        round_trip_seconds=replica.round_trip_seconds,
        step_seconds=replica.step_seconds,
        speculation=speculation_stats_to_proto(replica.figures),
        model=None if replica.model is None else model_info_to_proto(replica.model),
    )


def replica_from_proto(message: admin_pb2.Replica) -> ReplicaSnapshot:
    """The replica in a message."""
    return ReplicaSnapshot(
        role=_ROLES_BACK[message.role],
        address=message.address,
        state=_REPLICA_STATES_BACK[message.state],
        reason=message.reason,
        since_seconds=message.since_seconds,
        open_sequences=message.open_sequence_count,
        round_trip_seconds=message.round_trip_seconds if message.HasField("round_trip_seconds") else None,
        step_seconds=message.step_seconds if message.HasField("step_seconds") else None,
        figures=speculation_stats_from_proto(message.speculation),
        model=model_info_from_proto(message.model) if message.HasField("model") else None,
    )


def request_to_proto(request: RequestReport) -> admin_pb2.ActiveRequest:
    """A running request as a message."""
    return admin_pb2.ActiveRequest(
        request_id=request.request_id,
        age_seconds=request.age_seconds,
        prompt_token_count=request.prompt_tokens,
        completion_token_count=request.completion_tokens,
        rule=request.rule,
        speculative_token_count=request.num_speculative_tokens,
        draft_address=request.draft_address or "",
        target_address=request.target_address or "",
        speculation=speculation_stats_to_proto(request.speculation),
        speculation_state=state_to_proto(request.speculation_state),
    )


def request_from_proto(message: admin_pb2.ActiveRequest) -> RequestReport:
    """The running request in a message."""
    return RequestReport(
        request_id=message.request_id,
        age_seconds=message.age_seconds,
        prompt_tokens=message.prompt_token_count,
        completion_tokens=message.completion_token_count,
        rule=message.rule,
        num_speculative_tokens=message.speculative_token_count,
        draft_address=message.draft_address or None,
        target_address=message.target_address or None,
        speculation=speculation_stats_from_proto(message.speculation),
        speculation_state=state_from_proto(message.speculation_state),
    )


def stats_to_proto(stats: Stats) -> admin_pb2.Stats:
    """A coordinator's statistics as a message."""
    outcomes = stats.outcomes
    return admin_pb2.Stats(
        time=timestamp_of(stats.time),
        uptime_seconds=stats.uptime_seconds,
        load=load_to_proto(stats.load),
        throughput=throughput_to_proto(stats.throughput),
        outcomes=admin_pb2.Outcomes(
            completed_count=outcomes.completed,
            failed_count=outcomes.failed,
            cancelled_count=outcomes.cancelled,
            aborted_count=outcomes.aborted,
        ),
        completion_token_count=stats.completion_tokens,
        speculation=speculation_stats_to_proto(stats.speculation),
        rules=[
            admin_pb2.RuleFigures(rule=rule, speculation=speculation_stats_to_proto(rule_stats))
            for rule, rule_stats in stats.by_rule.items()
        ],
        speculation_state=state_to_proto(stats.speculation_state),
        decisions=map(decision_to_proto, stats.decisions),
    )


def stats_from_proto(message: admin_pb2.Stats) -> Stats:
    """The statistics in a message."""
    outcomes = message.outcomes
    return Stats(
        time=datetime_of(message.time),
        uptime_seconds=message.uptime_seconds,
        load=load_from_proto(message.load),
        throughput=throughput_from_proto(message.throughput),
        outcomes=Outcomes(
            outcomes.completed_count, outcomes.failed_count, outcomes.cancelled_count, outcomes.aborted_count
        ),
        completion_tokens=message.completion_token_count,
        speculation=speculation_stats_from_proto(message.speculation),
        by_rule={entry.rule: speculation_stats_from_proto(entry.speculation) for entry in message.rules},
        speculation_state=state_from_proto(message.speculation_state),
        decisions=tuple(map(decision_from_proto, message.decisions)),
    )


def option_to_proto(option: ConfigOption) -> admin_pb2.ConfigOption:
    """An option of the configuration as a message."""
    return admin_pb2.ConfigOption(
        name=option.name,
        json_value=json.dumps(option.value),
        origin=_ORIGINS[option.origin],
        is_live=option.is_live,
        changed_by=option.changed_by,
        change_time=None if option.changed_at is None else timestamp_of(option.changed_at),
    )


def option_from_proto(message: admin_pb2.ConfigOption) -> ConfigOption:
    """The option in a message."""
    return ConfigOption(
        name=message.name,
        value=json.loads(message.json_value),
        origin=_ORIGINS_BACK[message.origin],
        is_live=message.is_live,
        changed_by=message.changed_by,
        changed_at=datetime_of(message.change_time) if message.HasField("change_time") else None,
    )


def diagnosis_to_proto(diagnosis: Diagnosis) -> admin_pb2.DiagnoseResponse:
    """A diagnosis as a message."""
    return admin_pb2.DiagnoseResponse(
        version=diagnosis.version,
        time=timestamp_of(diagnosis.time),
        findings=[
            admin_pb2.Finding(
                check=finding.check,
                subject=finding.subject,
                severity=_SEVERITIES[finding.severity],
                detail=finding.detail,
                advice=finding.advice,
            )
            for finding in diagnosis.findings
        ],
    )


def diagnosis_from_proto(message: admin_pb2.DiagnoseResponse) -> Diagnosis:
    """The diagnosis in a message."""
    findings = (
        Finding(
            check=finding.check,
            subject=finding.subject,
            severity=_SEVERITIES_BACK[finding.severity],
            detail=finding.detail,
            advice=finding.advice,
        )
        for finding in message.findings
    )
    return Diagnosis(message.version, datetime_of(message.time), tuple(findings))
