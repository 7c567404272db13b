"""Folding a cohort: empty rounds, integer and scalar buffers, BatchNorm statistics, order."""

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.errors import FLError
from fl_lightning.records import Message, ServerState
from fl_lightning.server.aggregate import by_samples, mean, uniform
from fl_lightning.server.rules import apply
from fl_lightning.vector import ParamLayout


def message(client: int, samples: int, delta: float = 1.0, steps: int | None = None, **buffers: Tensor) -> Message:
    taken = (1 if samples else 0) if steps is None else steps
    return Message(client, samples, taken, {"delta": torch.tensor([delta])}, buffers=buffers)


# Case H26: all clients report zero samples.


@pytest.mark.parametrize("messages", [[], [message(0, 0), message(1, 0)]], ids=["empty", "all zero"])
@pytest.mark.parametrize("prior", [by_samples, uniform])
def test_no_data_leaves_the_model_and_says_so_once(messages: list[Message], prior: object) -> None:
    server = ServerState(torch.tensor([3.0]))
    aggregate = mean(prior)(messages)
    after = apply()(server, aggregate)
    assert after.w is server.w
    assert after.round == 1
    assert len(aggregate.notes) == 1
    assert "no update" in aggregate.notes[0]


@pytest.mark.parametrize("prior", [by_samples, uniform])
def test_the_client_with_data_alone_counts(prior: object) -> None:
    aggregate = mean(prior)([message(0, 0, delta=9.0), message(1, 5, delta=2.0)])
    assert aggregate.weights == (0.0, 1.0)
    assert aggregate.vectors["delta"].item() == 2.0


def test_negative_samples_are_refused() -> None:
    with pytest.raises(FLError, match="client 1 reports num_samples=-3"):
        mean()([message(0, 5), message(1, -3, steps=1)])


# Case H02: a client that took no optimizer step never counts as n samples.


def test_a_client_without_steps_weighs_nothing() -> None:
    aggregate = mean()([message(0, 100, delta=9.0, steps=0), message(1, 5, delta=2.0)])
    assert aggregate.weights == (0.0, 1.0)
    assert "client 0 took no step" in aggregate.notes[0]


# Case H27: integer, boolean and 0-d buffers; parameters of several types.


def test_buffers_keep_type_and_shape_under_the_documented_rule() -> None:
    first = {"counter": torch.tensor(10), "seen": torch.tensor([True, False]), "scale": torch.tensor(1.0)}
    second = {"counter": torch.tensor(25), "seen": torch.tensor([False, False]), "scale": torch.tensor(3.0)}
    aggregate = mean()([message(0, 1, **first), message(1, 3, **second)])
    assert aggregate.buffers["counter"].item() == 25  # the longest-trained client's
    assert aggregate.buffers["seen"].tolist() == [True, False]
    assert aggregate.buffers["scale"].item() == pytest.approx(2.5, abs=1e-6)
    for name, tensor in first.items():
        assert aggregate.buffers[name].dtype == tensor.dtype
        assert aggregate.buffers[name].shape == tensor.shape


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(2, dtype=torch.float16))
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("flag", torch.tensor(True))


def test_a_model_of_mixed_types_survives_the_round_trip() -> None:
    module = Mixed()
    layout = ParamLayout.of(module)
    w = layout.flatten(dict(module.named_parameters()))
    uploads = [
        Message(k, n, 1, {"delta": torch.full_like(w, value)}, buffers=dict(module.named_buffers()))
        for k, (n, value) in enumerate([(1, 0.5), (3, -0.25)])
    ]
    server = apply()(ServerState(w, dict(module.named_buffers())), mean()(uploads))
    state = layout.state_dict(server.w, server.buffers)
    before = module.state_dict()
    module.load_state_dict(state, strict=True)
    assert {k: (v.dtype, v.shape) for k, v in state.items()} == {k: (v.dtype, v.shape) for k, v in before.items()}
    expected = 1 + (0.5 - 3 * 0.25) / 4
    torch.testing.assert_close(state["wide"], torch.full((3,), expected, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(state["narrow"], torch.full((2,), expected).half(), rtol=0, atol=0)


# Case H29: BatchNorm statistics are part of the average, in either order.


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_running_means_are_averaged(order: tuple[int, int]) -> None:
    uploads = [message(0, 4, running_mean=torch.tensor([0.0])), message(1, 4, running_mean=torch.tensor([10.0]))]
    aggregate = mean()([uploads[i] for i in order])
    assert aggregate.buffers["running_mean"].item() == 5.0
    assert apply()(ServerState(torch.zeros(1)), aggregate).buffers["running_mean"].item() == 5.0
