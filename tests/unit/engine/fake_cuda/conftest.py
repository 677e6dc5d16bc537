from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tandem.engine.backends.cuda_graphs import static_inputs
from tandem.engine.backends.paged import varlen
from tandem.engine.models.loading import LoadedModel
from tests.unit.engine.fake_cuda.device import fake_tensors
from tests.unit.engine.fake_cuda.guard import reason_to_skip, register
from tests.unit.engine.fake_cuda.models import make_model


class _QueuedCopy:
    """In place of a copy from pinned memory, whose events a CPU wheel lacks."""

    def start(self, target: object, source: object) -> None:
        target.copy_(source, non_blocking=True)  # type: ignore[attr-defined]

    def wait(self) -> None:
        pass


@pytest.fixture(scope="session")
def _guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    register(tmp_path_factory.mktemp("guard"))


@pytest.fixture
def fake_cuda(_guard: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All tensors are fake. `varlen_attn` counts as tried, since a trial needs numbers."""
    found = varlen._varlen_attn()
    assert found is not None
    monkeypatch.setattr(varlen, "_tried_varlen", lambda *_: varlen._without_key_starts(found))
    monkeypatch.setattr(static_inputs, "transfer_to", lambda _: _QueuedCopy())
    # Mixtures of experts ask for it to choose their product.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    with fake_tensors():
        yield


@pytest.fixture
def real_model(fake_cuda: None) -> Callable[[str], LoadedModel]:
    """Makes a model by its name."""
    return make_model
