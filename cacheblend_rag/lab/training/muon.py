"""Muon for the matrices of the decoder blocks, AdamW for everything else.

Muon replaces a matrix's momentum by the nearest orthogonal matrix (five Newton-Schulz steps), so that every direction of
a matrix learns at one pace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["Muon", "orthogonalised"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalised(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return the approximately nearest orthogonal matrices of a stack ``(count, rows, columns)``."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: torch.Tensor = x.transpose(1, 2) if tall else x
    return result.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonal updates, for two-dimensional weights only."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            stacks: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    stacks[tuple(weight.shape)].append(weight)
            for (rows, columns), weights in stacks.items():
                gradients = [weight.grad for weight in weights if weight.grad is not None]
                buffers = [self.state[weight].setdefault("momentum", torch.zeros_like(weight)) for weight in weights]
                torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
                # Nesterov: look ahead along the momentum.
                updates = torch.stack(gradients).lerp_(torch.stack(buffers), group["momentum"])
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, list(orthogonalised(updates).unbind()), alpha=-scale)
