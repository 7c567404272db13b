"""Models: exact sizes, every data set x model pair, and initial weights that depend on one generator only.

Cases H05 (shapes), H12 and H29 (BatchNorm under SAM and under averaging) on the networks that ship.
"""

import itertools
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from federations import digit_side, digits, train
from torch import nn

from fl_lightning.algorithms.algorithm import Protection
from fl_lightning.algorithms.dp_fedavg import dp_fedavg
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.algorithms.fedsam import fedsam
from fl_lightning.config import RunConfig, load_config
from fl_lightning.data import KNOWN_SETS, load_data
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.engine.objective import ModelObjective
from fl_lightning.errors import ConfigError, PrivacyError
from fl_lightning.local.optimizers import sgd
from fl_lightning.models import MODEL_KINDS, build_model, check_fit
from fl_lightning.models.alexnet import AlexNet
from fl_lightning.models.initialise import initialise
from fl_lightning.models.lenet5 import LeNet5
from fl_lightning.models.vgg_like import VGGLike
from fl_lightning.rng import generator

PLAIN = [kind for kind in MODEL_KINDS if kind != "resnet18"]


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_sizes_are_those_of_the_papers():
    """Golden group `size`: LeNet-5 with and without padding on 28x28x1, the VGG on 32x32x3; 10 classes."""
    assert size_of(build_model("lenet5", 1, 28, 28, 10, generator(1, "init"))) == 28_938
    assert size_of(LeNet5(1, 28, 28, 10, padding=0)) == 18_378
    assert size_of(build_model("vgg_like", 3, 32, 32, 10, generator(1, "init"))) == 550_570


def test_sizes_of_the_clipping_studys_models():
    """ResNet-18 for CIFAR as published (11,173,962), whichever its norm; AlexNet summed layer by layer."""
    for norm in ("group", "batch"):
        assert size_of(build_model("resnet18", 3, 32, 32, 10, generator(1, "init"), norm)) == 11_173_962
    widths = [3, 64, 192, 384, 256, 256]
    convolutions = sum((9 * a + 1) * b for a, b in itertools.pairwise(widths))
    for side, rows in ((32, 2), (28, 1)):
        linear = sum((a + 1) * b for a, b in itertools.pairwise([256 * rows**2, 1024, 1024, 10]))
        assert size_of(build_model("alexnet", 3, side, side, 10, generator(1, "init"))) == convolutions + linear


def test_layers_are_plain():
    """No dropout and no normalisation: nothing but convolutions and linear layers, and no buffers."""
    for kind in PLAIN:
        model = build_model(kind, 1, 28, 28, 10, generator(1, "init"))
        assert {type(layer) for layer in model.children()} == {nn.Conv2d, nn.Linear}
        assert not list(model.buffers())


@pytest.mark.parametrize("model", [f"model={kind}" for kind in MODEL_KINDS] + ["model=resnet18 model.norm=batch"])
@pytest.mark.parametrize("name", KNOWN_SETS)
def test_every_pair_trains_one_step_or_is_refused(name, model):
    """H05: 8x8 and 28x28 grey, 32x32 RGB. One step changes every parameter tensor and lowers the loss."""
    channels, height, width = KNOWN_SETS[name].shape
    kind = model.split()[0].removeprefix("model=")
    if (name, kind) == ("digits", "alexnet"):
        with pytest.raises(ConfigError) as caught:
            load_config([f"data={name}", *model.split()])
        assert "model.kind=alexnet: does not fit data.name=digits: its strided convolution and 3 " in str(caught.value)
        assert "at least 15x15 pixels, the data set has 8x8 with 1 channel(s)" in str(caught.value)
        return
    settings = load_config([f"data={name}", *model.split()]).model
    norm = getattr(settings, "norm", "group")
    model = build_model(kind, channels, height, width, KNOWN_SETS[name].num_classes, generator(3, "init"), norm)
    x = torch.randn(16, channels, height, width, generator=generator(3, "pixels"))[: 16 if kind in PLAIN else 3]
    y = torch.arange(len(x)) % KNOWN_SETS[name].num_classes
    before = F.cross_entropy(model(x), y)
    before.backward()
    old = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= (0.1 if kind in PLAIN else 0.01) * parameter.grad
    assert model(x).shape == (len(x), KNOWN_SETS[name].num_classes)
    assert all((new != was).any() for new, was in zip(model.parameters(), old, strict=True))
    assert F.cross_entropy(model(x), y) < before


@pytest.mark.parametrize(("channels", "height", "width"), [(4, 8, 8), (1, 9, 17), (3, 64, 48), (2, 28, 32)])
def test_models_adapt_to_a_users_images(channels, height, width):
    for kind in MODEL_KINDS:
        if kind == "alexnet" and min(height, width) < 15:
            continue
        model = build_model(kind, channels, height, width, 3, generator(1, "init"))
        assert model(torch.zeros(2, channels, height, width)).shape == (2, 3)


@pytest.mark.parametrize(
    ("kind", "width"), [("lenet5", 32 * 7 * 7), ("vgg_like", 128), ("alexnet", 1024), ("resnet18", 512)]
)
def test_features_are_what_the_last_layer_sees(kind, width):
    model = build_model(kind, 1, 28, 28, 10, generator(1, "init"))
    x = torch.randn(3, 1, 28, 28, generator=generator(3, "pixels"))
    last = [layer for layer in model.children() if isinstance(layer, nn.Linear)][-1]
    assert model.features(x).shape == (3, width)
    assert torch.equal(last(model.features(x)), model(x))


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

    alexnet = build_model("alexnet", 1, 28, 28, 10, generator(5, "init"))
    hidden = F.max_pool2d(F.relu(alexnet.conv1(x)), 2)
    hidden = F.max_pool2d(F.relu(alexnet.conv2(hidden)), 2)
    hidden = F.relu(alexnet.conv4(F.relu(alexnet.conv3(hidden))))
    hidden = F.max_pool2d(F.relu(alexnet.conv5(hidden)), 2).flatten(1)
    assert torch.equal(alexnet(x), alexnet.fc3(F.relu(alexnet.fc2(F.relu(alexnet.fc1(hidden))))))


def test_resnet_is_torchvisions_but_for_the_stem():
    """The same weights in torchvision's ResNet-18 with the CIFAR stem put in: the same outputs and statistics."""
    from torchvision.models import resnet18

    ours = build_model("resnet18", 3, 8, 8, 10, generator(5, "init"), "batch").double()
    theirs = resnet18(num_classes=10).double()
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False).double(), nn.Identity()
    with torch.no_grad():
        for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
            assert mine.shape == other.shape
            other.copy_(mine)
    x = torch.randn(4, 3, 8, 8, generator=generator(5, "pixels"), dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_initial_weights_depend_on_the_generator_only(kind):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_model(kind, 1, 16, 16, 10, generator(1, "init"))
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    torch.manual_seed(2)
    again = build_model(kind, 1, 16, 16, 10, generator(1, "init"))
    other = build_model(kind, 1, 16, 16, 10, generator(2, "init"))
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert "norm" in name or a.dim() == 1 or not torch.equal(a, c)
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
        initialise(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), generator(1, "init"))
    counting = nn.Linear(2, 2)
    counting.register_buffer("counter", torch.empty(3))
    with pytest.raises(TypeError, match="counter"):
        initialise(counting, generator(1, "init"))


def test_normalisation_begins_as_the_identity():
    """Buffers too: built without storage, they would hold whatever lay in memory."""
    model = build_model("resnet18", 1, 8, 8, 10, generator(1, "init"), "batch")
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert (layer.weight == 1).all() and (layer.bias == 0).all()
            assert (layer.running_mean == 0).all() and (layer.running_var == 1).all()
            assert layer.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("vgg_like", (1, 7, 8), ["model.kind=vgg_like", "8x8", "7x8", "model.kind=lenet5"]),
        ("lenet5", (3, 3, 3), ["model.kind=lenet5", "4x4", "3x3", "larger images"]),
        ("alexnet", (1, 8, 8), ["model.kind=alexnet", "15x15", "8x8", "model.kind=lenet5"]),
        ("resnet18", (0, 8, 8), ["model.kind=resnet18", "at least 1 channel"]),
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
    for kind, model, smallest in (("lenet5", LeNet5, 4), ("vgg_like", VGGLike, 8), ("alexnet", AlexNet, 15)):
        check_fit(kind, 1, smallest, smallest)
        assert build_model(kind, 1, smallest, smallest, 2, generator(1, "init"))(
            torch.zeros(1, 1, smallest, smallest)
        ).shape == (1, 2)
        with pytest.raises(ConfigError, match=f"at least {smallest}x{smallest}"):
            check_fit(kind, 1, smallest - 1, smallest)
        with pytest.raises(ValueError, match="leaves nothing"):
            model(1, smallest - 1, smallest, 2)


def test_any_size_fits_resnet():
    for norm in ("group", "batch"):
        model = build_model("resnet18", 2, 1, 3, 2, generator(1, "init"), norm)
        assert model(torch.zeros(2, 2, 1, 3)).shape == (2, 2)


def resnet_side(algorithm, sizes, norm="batch", **schedule):
    model = build_model("resnet18", 1, 8, 8, 10, generator(1, "init"), norm)
    return digit_side(algorithm, sizes, model=model, **schedule)


def test_h12_one_sam_step_moves_the_statistics_of_every_layer_once():
    """As one plain step does, and at the unperturbed weights; the momentum is left alone."""
    ends = []
    for algorithm in (fedavg(sgd(0.1)), fedsam(sgd(0.1), rho=0.5), fedsam(sgd(0.1), rho=0.0)):
        side = resnet_side(algorithm, (4,), max_steps=1)
        federation, _, _ = train(side, LightningEngine(side), 1)
        ends.append(federation.server)
        layers = [layer for layer in side.objective.model.modules() if isinstance(layer, nn.BatchNorm2d)]
        assert len(layers) == 20 and {layer.momentum for layer in layers} == {0.1}
    plain, sharp, zero = ends
    counters = [tensor for name, tensor in sharp.buffers.items() if name.endswith("num_batches_tracked")]
    assert len(counters) == 20 and all(counter == 1 for counter in counters)
    for name, tensor in plain.buffers.items():
        torch.testing.assert_close(sharp.buffers[name], tensor, rtol=0, atol=0, msg=name)
    assert not torch.equal(sharp.w, plain.w)
    torch.testing.assert_close(zero.w, plain.w, rtol=0, atol=1e-6)


def test_h29_the_global_model_has_the_mean_of_all_statistics():
    """Two clients of equal size, in both orders; the counter is the longest-trained client's."""
    means = []
    for cohort in ((0, 1), (1, 0)):
        side = resnet_side(fedavg(sgd(0.01)), (4, 4), max_steps=1)
        federation, _, messages = train(side, LightningEngine(side), 1, cohort=cohort)
        name = "blocks.0.norm1.running_mean"
        first, second = (message.buffers[name] for message in messages)
        assert not torch.equal(first, second)
        torch.testing.assert_close(federation.server.buffers[name], (first + second) / 2)
        assert federation.server.buffers["norm.num_batches_tracked"] == 1
        means.append(federation.server.buffers[name])
    torch.testing.assert_close(means[0], means[1])


def test_group_norm_trains_under_sample_privacy_and_batch_norm_is_refused():
    """Refused at configuration time; and again in code, for whoever builds the parts by hand."""
    shield = Protection("sample", 1.0, (1.0,))
    side = resnet_side(dp_fedavg(sgd(0.1), protection=shield), (4,), "group", batch_size=2, max_steps=1)
    _, _, messages = train(side, LightningEngine(side), 1)
    assert not messages[0].undeclared and not messages[0].buffers
    side = resnet_side(dp_fedavg(sgd(0.1), protection=shield), (4,), "batch")
    with pytest.raises(PrivacyError, match="BatchNorm"):
        train(side, DebugEngine(side), 1)
    with pytest.raises(ConfigError, match=r"model\.norm=batch: needs group with privacy\.level=sample"):
        load_config(["algorithm=dp_fedavg", "model=resnet18", "model.norm=batch"])
    assert load_config(["algorithm=dp_fedavg", "model=resnet18"]).model.norm == "group"


@pytest.mark.parametrize(
    ("kind", "channels", "side"),
    [("lenet5", 1, 8), ("lenet5", 3, 32), ("vgg_like", 1, 28), ("alexnet", 1, 28), ("resnet18", 1, 8)],
)
def test_per_sample_gradients_are_those_of_single_examples(kind, channels, side):
    """Opacus' own hooks are wrong for the channels-last activations of every convolution but the first."""
    model = build_model(kind, channels, side, side, 10, generator(1, "init"))
    objective = ModelObjective(model, dtype=torch.float64)
    images, labels = digits()
    x = F.interpolate(images[:2].double() / 255, size=side).expand(-1, channels, -1, -1)
    y = labels[:2]
    rows = objective.per_sample_gradients(objective.initial, (x, y))
    for k in range(2):
        one = objective.measure_gradient(objective.initial, (x[k : k + 1], y[k : k + 1]))
        torch.testing.assert_close(rows[k], one, rtol=1e-9, atol=1e-11)


def test_norm_belongs_to_resnet_alone():
    for kind in PLAIN:
        with pytest.raises(ConfigError) as caught:
            RunConfig(data="mnist", model={"kind": kind, "norm": "group"})
        told = f"model.norm=group: would be ignored with model.kind={kind}; remove it, or choose model.kind=resnet18"
        assert told in str(caught.value)
    notes = load_config(["algorithm=dp_fedavg", "privacy=update", "model=resnet18", "model.norm=batch"]).notes
    assert any("NOT PRIVATE" in note and "model.norm=group" in note for note in notes)


def test_check_fit_loads_no_torch():
    code = (
        "import sys; from fl_lightning.models import check_fit; from fl_lightning.data.catalogue import KNOWN_SETS; "
        "[check_fit('vgg_like', *known.shape) for known in KNOWN_SETS.values()]; "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
