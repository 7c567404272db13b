"""The local optimizers against torch.optim on the same gradients."""

from collections.abc import Callable

import pytest
import torch

from fl_lightning.local.optimizers import LocalOptimizer, adam, momentum, sgd

PAIRS: dict[str, tuple[LocalOptimizer, Callable]] = {
    "sgd": (sgd(0.1, 0.01), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01)),
    "momentum": (momentum(0.1, 0.9, 0.01), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)),
    "adam": (adam(0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, foreach=False)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_follows_torch(name: str, dtype: torch.dtype) -> None:
    ours, make = PAIRS[name]
    rng = torch.Generator().manual_seed(1)
    y = torch.randn(50, generator=rng, dtype=dtype)
    parameter = torch.nn.Parameter(y.clone())
    theirs = make([parameter])
    state = ours.init(y)
    for step in range(1, 11):
        g = torch.randn(50, generator=rng, dtype=dtype)
        y, state = ours.apply(y, g, state, step)
        parameter.grad = g.clone()
        theirs.step()
    torch.testing.assert_close(y, parameter.detach(), rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_apply_leaves_its_inputs_alone() -> None:
    for optimizer, _ in PAIRS.values():
        y, g = torch.ones(3), torch.full((3,), 2.0)
        first, state = optimizer.apply(y, g, optimizer.init(y), 1)
        kept = [t.clone() for t in state]
        optimizer.apply(first, g, state, 2)
        assert torch.equal(y, torch.ones(3))
        assert torch.equal(g, torch.full((3,), 2.0))
        assert all(torch.equal(a, b) for a, b in zip(kept, state, strict=True))
