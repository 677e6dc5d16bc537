"""The types of administration survive a trip through AdminService's messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.admin import ConfigOption, CoordinatorState, Diagnosis
from tandem.config.layers import Origin
from tandem.replica import ReplicaState, Role
from tandem.wire import admin as wire
from tests.unit.coordinator.cli.samples import FINDINGS, NOW, REPLICAS, REQUEST, STATS, STATUS


@pytest.mark.parametrize("state", CoordinatorState)
def test_a_status_comes_back(state: CoordinatorState) -> None:
    status = replace(STATUS, state=state)
    assert wire.STATUS.from_proto(wire.STATUS.to_proto(status)) == status


@pytest.mark.parametrize("state", ReplicaState)
@pytest.mark.parametrize("role", Role)
def test_a_replica_comes_back(role: Role, state: ReplicaState) -> None:
    for shot in REPLICAS:
        replica = replace(
            shot, role=role, state=state, model=None if state is ReplicaState.DOWN else shot.model
        )
        assert wire.REPLICA.from_proto(wire.REPLICA.to_proto(replica)) == replica


def test_a_request_comes_back() -> None:
    assert wire.REQUEST.from_proto(wire.REQUEST.to_proto(REQUEST)) == REQUEST


def test_statistics_come_back_with_counts_of_years() -> None:
    years = replace(STATS.speculation, rounds=1 << 40, drafted=1 << 42)
    stats = replace(STATS, completion_tokens=1 << 43, speculation=years)
    assert wire.STATS.from_proto(wire.STATS.to_proto(stats)) == stats


@pytest.mark.parametrize("origin", Origin)
@pytest.mark.parametrize("value", [None, 6, 1.0, True, "strict", [0.9, 0.5]])
def test_an_option_comes_back_with_the_type_of_its_value(origin: Origin, value: object) -> None:
    option = ConfigOption("name", value, origin, True, "10.0.0.7:1", NOW)
    back = wire.OPTION.from_proto(wire.OPTION.to_proto(option))
    assert back == option
    assert type(back.value) is type(value)


def test_a_diagnosis_comes_back() -> None:
    diagnosis = Diagnosis("0.1.0", NOW, FINDINGS)
    assert wire.DIAGNOSIS.from_proto(wire.DIAGNOSIS.to_proto(diagnosis)) == diagnosis
