"""A draft is chosen by its way, queue, steps, whether it has room, and the beginnings of texts that it has read."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.model.types import DraftLoad, StepProfile
from tandem_coordinator.replicas import pool
from tandem_coordinator.replicas.pool import Prefixes
from tandem_coordinator.rounds.placement import earliest, expected_seconds

PROFILE = StepProfile({(1, 1): 0.010, (4, 1): 0.012, (16, 1): 0.020, (1, 64): 0.016})


@dataclass(eq=False)
class Draft:
    """The attributes of a draft that the choice reads."""

    load: DraftLoad = field(default_factory=DraftLoad)
    round_trip_seconds: float | None = 0.001
    profile: StepProfile = PROFILE
    open_sequences: int = 0
    step: Any = field(default_factory=lambda: SimpleNamespace(value=None))

    @property
    def client(self) -> Any:
        return SimpleNamespace(load=self.load)

    @property
    def model(self) -> Any:
        return SimpleNamespace(step_profile=self.profile)

    @property
    def round_trip(self) -> Any:
        return SimpleNamespace(value=self.round_trip_seconds)


def expected(draft: Draft, tokens: int = 4, unread: int = 0) -> float:
    return expected_seconds(draft, tokens, unread)  # type: ignore[arg-type]  # as much of one as it looks at


def chosen(*drafts: Draft) -> Draft:
    found: Any = earliest({each: expected(each) for each in drafts})  # type: ignore[misc]
    assert isinstance(found, Draft)
    return found


def test_the_answer_is_expected_by_way_queue_and_profile() -> None:
    assert expected(Draft()) == pytest.approx(0.001 + 4 * 0.010)
    assert expected(Draft(DraftLoad(sequences=3, wait_seconds=0.005))) == pytest.approx(0.006 + 4 * 0.012)
    assert expected(Draft(DraftLoad(sequences=99))) == pytest.approx(0.001 + 4 * 0.020)
    assert expected(Draft(open_sequences=3)) == expected(Draft(DraftLoad(sequences=3)))
    assert expected(Draft(), unread=640) == pytest.approx(0.001 + 4 * 0.010 + 10 * 0.016)
    assert expected(Draft(profile=StepProfile())) == 0.0


def test_without_a_profile_sequences_decide_alone() -> None:
    far = Draft(round_trip_seconds=0.5, profile=StepProfile())
    near = Draft(DraftLoad(sequences=1))
    assert chosen(near, far) is far
    far.open_sequences = 2
    assert chosen(near, far) is near


def test_sequences_of_others_count_between_equals() -> None:
    busy = Draft(DraftLoad(sequences=3), profile=StepProfile())
    idle = Draft(open_sequences=1, profile=StepProfile())
    assert chosen(busy, idle) is idle


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 0.1), st.booleans()), min_size=1, max_size=6))
def test_the_chosen_one_is_never_much_later_than_the_earliest(states: list[tuple[int, float, bool]]) -> None:
    drafts = [Draft(DraftLoad(count, 0, full, wait)) for count, wait, full in states]
    found = chosen(*drafts)
    free = [each for each in drafts if not each.load.is_full] or drafts
    assert found in free
    assert expected(found) <= 1.1 * min(map(expected, free)) + 0.001


def test_the_longest_known_beginning_counts() -> None:
    held = Prefixes()
    held.add("a", "mine", range(300))
    held.add("b", "mine", [*range(100), *range(500, 700)])
    assert held.held("mine", range(300)) == {"b": 64, "a": 256}
    assert held.held("mine", [*range(100), *range(500, 700)]) == {"b": 256}
    assert held.held("mine", range(63)) == {}
    assert held.held("mine", range(1, 300)) == {}


def test_a_beginning_is_known_to_its_scope_alone() -> None:
    held = Prefixes()
    held.add("a", "mine", range(100))
    assert held.held("yours", range(100)) == {}
    assert held.held("", range(100)) == {}
    held.add("b", "yours", range(100))
    assert held.held("mine", range(100)) == {"a": 64}
    assert held.held("yours", range(100)) == {"b": 64}


def test_old_beginnings_go() -> None:
    held = Prefixes()
    for first in range(pool._MAX_PREFIXES + 1):
        held.add("a", "mine", range(first, first + 64))
    assert held.held("mine", range(64)) == {}
    assert held.held("mine", range(1, 65)) == {"a": 64}
