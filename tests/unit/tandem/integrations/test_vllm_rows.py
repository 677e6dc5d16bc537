"""Rows are recognised by their tokens, whatever happens to their order; what has ended is found out, and let go."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.integrations.vllm.rows import ABSENT_STEPS, IntArray, SequenceTable


def row(*tokens: int) -> IntArray:
    return np.array(tokens, np.int32)


class Receiver:
    """The other end: what each key's deltas add up to."""

    def __init__(self) -> None:
        self.table = SequenceTable()
        self.tokens: dict[int, list[int]] = {}

    def step(self, rows: list[list[int]]) -> list[int]:
        """Take a step's deltas; the key of each row, whose tokens must be the row's."""
        recognised = self.table.recognise([row(*tokens) for tokens in rows])
        for found, tokens in zip(recognised, rows, strict=True):
            assert found.is_new == (found.sequence.key not in self.tokens)
            self.tokens.setdefault(found.sequence.key, []).extend(found.new_tokens)
            assert self.tokens[found.sequence.key] == tokens == found.sequence.token_ids.tolist()
        keys = [found.sequence.key for found in recognised]
        assert len(set(keys)) == len(keys), "two rows were taken for one sequence"
        for ended in self.table.take_ended():
            del self.tokens[ended.key]
        return keys


def test_swapped_rows_keep_their_sequences() -> None:
    receiver = Receiver()
    first = receiver.step([[1, 2], [3, 4], [5]])
    assert receiver.step([[5, 9], [3, 4, 8], [1, 2, 7, 7]]) == [first[2], first[1], first[0]]


def test_equal_sequences_are_two() -> None:
    receiver = Receiver()
    keys = receiver.step([[1, 2], [1, 2]])
    assert set(receiver.step([[1, 2, 3], [1, 2, 4]])) == set(keys)


def test_a_sequence_that_was_away_for_a_step_is_the_same() -> None:
    receiver = Receiver()
    (key,) = receiver.step([[1, 2]])
    receiver.step([])
    assert receiver.step([[1, 2, 3]]) == [key]


def test_a_sequence_whose_steps_were_not_seen_is_the_same() -> None:
    """vLLM asks nobody while a sequence is near the length limit."""
    receiver = Receiver()
    (key,) = receiver.step([[1, 2]])
    assert receiver.step([[1, 2, 3, 4, 5, 6, 7, 8]]) == [key]


def test_other_tokens_in_the_same_row_are_another_sequence() -> None:
    receiver = Receiver()
    (key,) = receiver.step([[1, 2, 3]])
    assert receiver.step([[1, 9, 3, 4]]) != [key]


def test_the_end_of_a_sequence_is_told_once_after_some_steps() -> None:
    table = SequenceTable()
    (ended,) = table.recognise([row(1, 2)])
    told = []
    for _ in range(ABSENT_STEPS + 3):
        table.recognise([])
        told += table.take_ended()
    assert [known.key for known in told] == [ended.sequence.key]
    assert len(table) == 0


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(2, 4))
def test_every_delta_adds_up_to_the_rows_tokens(seed: int, max_rows: int, alphabet: int) -> None:
    """Few different tokens, so that sequences are often equal, or prefixes of each other."""
    chance = random.Random(seed)
    receiver, rows, away = Receiver(), list[list[int]](), list[list[int]]()
    for _ in range(40):
        for tokens in rows:
            tokens += [chance.randrange(alphabet) for _ in range(chance.randrange(4))]
        match chance.randrange(6):
            case 0 | 1 if len(rows) < max_rows:
                rows.append([chance.randrange(alphabet) for _ in range(chance.randrange(1, 6))])
            case 2 if rows:
                rows.pop(chance.randrange(len(rows)))
            case 3 if rows:
                away.append(rows.pop(chance.randrange(len(rows))))
            case 4 if away and len(rows) < max_rows:
                rows.append(away.pop())
            case _:
                chance.shuffle(rows)
        receiver.step(rows)
        assert len(receiver.table) <= max_rows * (ABSENT_STEPS + 1)
        assert len(receiver.tokens) == len(receiver.table)
