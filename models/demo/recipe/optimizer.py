"""Muon for the matrices of the layers, AdamW for everything else.

`torch.optim.Muon` orthogonalises matrix by matrix in bf16, which takes longer than the model itself on a CPU
without bf16 arithmetic; this one works in fp32 on all matrices of one shape at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

# Jordan et al. 2024, "Muon": a quintic whose iteration drives every singular value towards one.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 4


class BatchedMuon(torch.optim.Optimizer):
    """Momentum whose update is replaced by the nearest orthogonal matrix (Jordan et al. 2024)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply one update; a closure is not supported."""
        if closure is not None:
            raise ValueError("BatchedMuon takes no closure")
        for group in self.param_groups:
            for matrices in _by_shape(group["params"]).values():
                self._update(matrices, group["lr"], group["momentum"])

    def _update(self, matrices: list[nn.Parameter], lr: float, momentum: float) -> None:
        updates = torch.stack([self._momentum_update(matrix, momentum) for matrix in matrices])
        rows, columns = updates.shape[-2:]
        # A tall matrix gets the larger step that keeps the change of its output as large as a square one's.
        step_size = lr * max(1.0, rows / columns) ** 0.5
        for matrix, update in zip(matrices, orthogonalised(updates), strict=True):
            matrix.add_(update, alpha=-step_size)

    def _momentum_update(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        assert matrix.grad is not None
        average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
        average.lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(average, momentum)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Each matrix of a [batch, rows, columns] stack with its singular values pushed to about one."""
    linear, cubic, quintic = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrices.size(-2) > matrices.size(-1)
    wide = matrices.mT if is_tall else matrices
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT
        wide = torch.baddbmm(
            wide, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), wide, beta=linear
        )
    return wide.mT if is_tall else wide


class Optimizers:
    """Both optimizers of one model behind one `step`."""

    def __init__(self, model: nn.Module, matrix_lr: float, other_lr: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_inner = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if is_inner else others).append(parameter)
        self._parts: list[tuple[torch.optim.Optimizer, float]] = [
            (BatchedMuon(matrices, lr=matrix_lr), matrix_lr),
            (torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0), other_lr),
        ]

    def step(self, factor: float) -> None:
        """Update the model with the learning rates scaled by `factor`, and clear the gradients."""
        for optimizer, peak in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, object]]:
        """State saved in a checkpoint."""
        return [optimizer.state_dict() for optimizer, _ in self._parts]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        """Take up where a checkpoint left off."""
        for (optimizer, _), state in zip(self._parts, states, strict=True):
            optimizer.load_state_dict(state)


def _by_shape(matrices: list[nn.Parameter]) -> dict[torch.Size, list[nn.Parameter]]:
    groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
    for matrix in matrices:
        groups[matrix.shape].append(matrix)
    return groups
