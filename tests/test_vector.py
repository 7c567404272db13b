"""ParamLayout: module <-> vector, for plain, tied, mixed-type and channels-last models."""

import pytest
import torch
from torch import nn

from fl_lightning.vector import ParamLayout


@pytest.mark.parametrize("channels_last", [False, True])
def test_round_trip_is_exact_and_strict(channels_last: bool) -> None:
    torch.manual_seed(0)
    source, target = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(2, 2)) for _ in range(2))
    layout = ParamLayout.of(source, channels_last)
    w = layout.flatten(dict(source.named_parameters()))
    assert w.shape == (layout.size,) == (sum(p.numel() for p in source.parameters()),)
    target.load_state_dict(layout.state_dict(w, dict(source.named_buffers())), strict=True)
    for (name, a), b in zip(source.state_dict().items(), target.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_bound_parameters_follow_the_vector_and_fill_its_gradient() -> None:
    module = nn.Conv2d(1, 2, 3)
    layout = ParamLayout.of(module, channels_last=True)
    flat, grad = torch.arange(20.0), torch.zeros(20)
    layout.bind(module, flat, grad)
    flat.mul_(2)
    assert torch.equal(layout.flatten(dict(module.named_parameters())), flat)
    module(torch.ones(1, 1, 3, 3)).sum().backward()
    assert torch.equal(grad, torch.ones(20))


def test_tied_parameters_take_one_slot() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    assert ParamLayout.of(module).size == 9


def test_mixed_types_are_copied_each_in_its_own() -> None:
    module = nn.ParameterDict(
        {"narrow": nn.Parameter(torch.ones(2).half()), "wide": nn.Parameter(torch.ones(2).double())}
    )
    layout = ParamLayout.of(module)
    assert layout.dtype == torch.float64
    assert not layout.uniform
    layout.load(module, torch.tensor([0.5, 0.25, 1 / 3, 2.0], dtype=torch.float64))
    assert module["narrow"].dtype == torch.float16
    assert module["narrow"].tolist() == [0.5, 0.25]
    assert module["wide"][0].item() == 1 / 3
    with pytest.raises(ValueError, match="several types"):
        layout.bind(module, torch.zeros(4), torch.zeros(4))


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        ParamLayout.of(nn.Flatten())
