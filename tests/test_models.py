"""Models: exact sizes, every data set x model pair, and initial weights that depend on one generator only."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_lightning.data import KNOWN_SETS, load_data
from fl_lightning.errors import ConfigError
from fl_lightning.models import MODEL_KINDS, build_model, check_fit
from fl_lightning.models.initialise import initialise
from fl_lightning.models.lenet5 import LeNet5
from fl_lightning.models.vgg_like import VGGLike
from fl_lightning.rng import generator


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_sizes_are_those_of_the_papers():
    """Golden group `size`: LeNet-5 with and without padding on 28x28x1, the VGG on 32x32x3; 10 classes."""
    assert size_of(build_model("lenet5", 1, 28, 28, 10, generator(1, "init"))) == 28_938
    assert size_of(LeNet5(1, 28, 28, 10, padding=0)) == 18_378
    assert size_of(build_model("vgg_like", 3, 32, 32, 10, generator(1, "init"))) == 550_570


def test_layers_are_plain():
    """No dropout and no normalisation: nothing but convolutions and linear layers, and no buffers."""
    for kind in MODEL_KINDS:
        model = build_model(kind, 1, 28, 28, 10, generator(1, "init"))
        assert {type(layer) for layer in model.children()} == {nn.Conv2d, nn.Linear}
        assert not list(model.buffers())


@pytest.mark.parametrize("kind", MODEL_KINDS)
@pytest.mark.parametrize("name", KNOWN_SETS)
def test_every_pair_trains_one_step(name, kind):
    """H05: 8x8 and 28x28 grey, 32x32 RGB. One step with lr 0.1 changes every parameter tensor and lowers the loss."""
    channels, height, width = KNOWN_SETS[name].shape
    check_fit(kind, channels, height, width)
    model = build_model(kind, channels, height, width, KNOWN_SETS[name].num_classes, generator(3, "init"))
    x = torch.randn(16, channels, height, width, generator=generator(3, "pixels"))
    y = torch.arange(16) % KNOWN_SETS[name].num_classes
    before = F.cross_entropy(model(x), y)
    before.backward()
    old = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    assert model(x).shape == (16, KNOWN_SETS[name].num_classes)
    assert all((new != was).any() for new, was in zip(model.parameters(), old, strict=True))
    assert F.cross_entropy(model(x), y) < before


@pytest.mark.parametrize(("channels", "height", "width"), [(4, 8, 8), (1, 9, 17), (3, 64, 48), (2, 28, 32)])
def test_models_adapt_to_a_users_images(channels, height, width):
    for kind in MODEL_KINDS:
        model = build_model(kind, channels, height, width, 3, generator(1, "init"))
        assert model(torch.zeros(2, channels, height, width)).shape == (2, 3)


def test_lenet_reads_real_digits():
    """Two passes of plain SGD over the real digits: far above chance (0.1)."""
    torch.set_num_threads(1)
    data = load_data(SimpleNamespace(name="digits", subset=1.0))
    x = (data.x_train / 255 - data.mean[0]) / data.std[0]
    model = build_model("lenet5", *data.shape, data.num_classes, generator(1, "init"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randperm(2 * len(x), generator=generator(1, "batches")).remainder(len(x)).split(32):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), data.y_train[batch]).backward()
        optimizer.step()
    x_test = (data.x_test / 255 - data.mean[0]) / data.std[0]
    assert (model(x_test).argmax(1) == data.y_test).float().mean() > 0.9


def test_forward_is_the_textbook_order():
    """Pooling before ReLU gives what ReLU before pooling gives."""
    lenet = build_model("lenet5", 1, 28, 28, 10, generator(5, "init"))
    x = torch.randn(4, 1, 28, 28, generator=generator(5, "pixels"))
    hidden = F.max_pool2d(F.relu(lenet.conv1(x)), 2)
    hidden = F.max_pool2d(F.relu(lenet.conv2(hidden)), 2)
    assert torch.equal(lenet(x), lenet.fc(hidden.flatten(1)))

    vgg = build_model("vgg_like", 1, 28, 28, 10, generator(5, "init"))
    hidden = x
    for first, second in ((vgg.conv1a, vgg.conv1b), (vgg.conv2a, vgg.conv2b), (vgg.conv3a, vgg.conv3b)):
        hidden = F.max_pool2d(F.relu(second(F.relu(first(hidden)))), 2)
    assert torch.equal(vgg(x), vgg.fc2(F.relu(vgg.fc1(hidden.flatten(1)))))


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_initial_weights_depend_on_the_generator_only(kind):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_model(kind, 1, 8, 8, 10, generator(1, "init"))
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    torch.manual_seed(2)
    again = build_model(kind, 1, 8, 8, 10, generator(1, "init"))
    other = build_model(kind, 1, 8, 8, 10, generator(2, "init"))
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert a.dtype == torch.float32
        assert a.device.type == "cpu"
        assert a.requires_grad


def test_initial_weights_have_pytorchs_default_distribution():
    """Uniform in +-1/sqrt(fan_in): the largest of n draws is near the bound, the variance is bound^2 / 3."""
    model = build_model("vgg_like", 3, 32, 32, 10, generator(7, "init"))
    for layer in model.children():
        bound = 1 / math.sqrt(layer.weight[0].numel())
        assert layer.weight.abs().max() <= bound
        assert layer.bias.abs().max() <= bound
        assert layer.weight.abs().max() > 0.99 * bound
        assert layer.weight.var().item() == pytest.approx(bound**2 / 3, rel=0.1)
        reference = layer.__class__(*_arguments(layer))
        assert layer.weight.std().item() == pytest.approx(reference.weight.std().item(), rel=0.1)


def _arguments(layer: nn.Module) -> tuple[int, ...]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels, layer.kernel_size[0]


def test_a_layer_without_a_rule_is_refused():
    with pytest.raises(TypeError, match=r"1\.weight"):
        initialise(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), generator(1, "init"))


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("vgg_like", (1, 7, 8), ["model.kind=vgg_like", "8x8", "7x8", "model.kind=lenet5"]),
        ("lenet5", (3, 3, 3), ["model.kind=lenet5", "4x4", "3x3", "larger images"]),
        ("lenet", (1, 28, 28), ["model.kind=lenet", "did you mean lenet5"]),
        ("transformer", (1, 28, 28), ["model.kind=transformer", "lenet5, vgg_like"]),
    ],
)
def test_what_does_not_fit_is_refused_in_words(kind, shape, words):
    for refuse in (lambda: check_fit(kind, *shape), lambda: build_model(kind, *shape, 10, generator(1, "init"))):
        with pytest.raises(ConfigError) as caught:
            refuse()
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)


def test_smallest_images_fit():
    """The size rule of `check_fit` is exact: one pixel less and nothing is left before the fully connected layer."""
    for kind, model, smallest in (("lenet5", LeNet5, 4), ("vgg_like", VGGLike, 8)):
        check_fit(kind, 1, smallest, smallest)
        assert build_model(kind, 1, smallest, smallest, 2, generator(1, "init"))(
            torch.zeros(1, 1, smallest, smallest)
        ).shape == (1, 2)
        with pytest.raises(ValueError, match="leaves nothing"):
            model(1, smallest - 1, smallest, 2)


def test_check_fit_loads_no_torch():
    code = (
        "import sys; from fl_lightning.models import check_fit; from fl_lightning.data.catalogue import KNOWN_SETS; "
        "[check_fit('vgg_like', *known.shape) for known in KNOWN_SETS.values()]; "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
