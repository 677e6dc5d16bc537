"""The parts that several messages of AdminService share."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from tandem.admin import Load, Throughput
from tandem.speculation_state import SpeculationDecision
from tandem.v1 import admin_pb2


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
        ahead_outcomes=message.ahead_outcome_count if message.HasField("ahead_outcome_count") else None,
    )
