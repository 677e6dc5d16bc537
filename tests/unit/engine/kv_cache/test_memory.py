"""Services on one accelerator take the shares that they were given, whoever starts first."""

from __future__ import annotations

import itertools

import pytest
import torch

from tandem.engine.kv_cache.arena import accelerator_allowance, memory_allowance

GIB = 1 << 30
TOTAL = 80 * GIB
CONTEXT = GIB // 2
"""Memory of a process that torch's allocator does not know."""


@pytest.mark.parametrize("order", list(itertools.permutations(["target", "draft"])))
def test_two_services_take_their_shares_in_either_order(order: tuple[str, ...]) -> None:
    weights = {"target": 16 * GIB, "draft": 2 * GIB}
    shares = {"target": 0.6, "draft": 0.3}
    free = TOTAL
    for name in order:
        free -= weights[name] + CONTEXT
        allowance = accelerator_allowance(TOTAL, free, weights[name], shares[name])
        assert weights[name] + allowance == int(TOTAL * shares[name])
        free -= allowance
    assert free > 0


def test_memory_of_others_does_not_count_as_long_as_the_share_is_free() -> None:
    alone = accelerator_allowance(TOTAL, TOTAL - 10 * GIB, 10 * GIB, 0.5)
    shared = accelerator_allowance(TOTAL, TOTAL - 45 * GIB, 10 * GIB, 0.5)
    assert alone == shared == 30 * GIB


def test_nothing_is_left_where_the_weights_exceed_the_share() -> None:
    assert accelerator_allowance(TOTAL, 60 * GIB, 20 * GIB, 0.2) < 0


def test_a_service_reads_the_devices_memory_and_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With simulated figures; no GPU is needed."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    device = torch.device("cuda:1")
    assert memory_allowance(0.4, device) == 16 * GIB
    assert not caplog.messages
    assert 19 * GIB < memory_allowance(None, device) < 20 * GIB, "less than 0.9 of the device leaves"
    assert vars(caplog.records[0])["promised_bytes"] == 56 * GIB
