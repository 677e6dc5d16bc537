"""A worker's share of the bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.settings.coordinator import CoordinatorSettings
from coordinator.workers.setup import WorkerSetup, settings_of_worker, share


@given(bound=st.integers(0, 5000), count=st.integers(1, 64))
def test_shares_add_up_to_the_bound_and_differ_by_one_at_most(bound: int, count: int) -> None:
    shares = [share(bound, index, count) for index in range(count)]
    assert sum(shares) == bound
    assert max(shares) - min(shares) <= 1


def test_a_worker_has_its_share_and_the_shared_port() -> None:
    settings = CoordinatorSettings(
        target_address="127.0.0.1:1",
        workers=3,
        max_concurrent_requests=10,
        max_queued_requests=2,
        max_streams_per_peer=4,
        prometheus_port=9000,
        http_max_body_bytes=1 << 20,
        http_max_held_body_bytes=2 << 20,
        stream_interval=4,
    )
    found = [settings_of_worker(settings, WorkerSetup(index, 50051, "/f")) for index in range(3)]
    assert [each.max_concurrent_requests for each in found] == [4, 3, 3]
    assert [each.max_queued_requests for each in found] == [1, 1, 0]
    assert {each.max_streams_per_peer for each in found} == {2}
    assert {each.port for each in found} == {50051}
    assert {each.prometheus_port for each in found} == {None}
    assert {each.http_max_held_body_bytes for each in found} == {1 << 20}
    assert {each.stream_interval for each in found} == {4}
    # They are settings that could have been given, so that live changes can be checked against them.
    for each in found:
        CoordinatorSettings(**each.model_dump())


def test_a_setup_survives_the_command_line() -> None:
    setup = WorkerSetup(1, 2, "/f", 7, listens_late=True, changes={"speculation": "false"}, drained=["h:1"])
    assert WorkerSetup.from_json(setup.to_json()) == setup


def test_more_workers_than_places_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_concurrent_requests is 2; it must be at least workers \(3\)"):
        CoordinatorSettings(target_address="127.0.0.1:1", workers=3, max_concurrent_requests=2)
